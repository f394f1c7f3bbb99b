"""Slots in 8 bits: what is stored, how far steps go astray, and with what they go together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from array_slots import array_slots
from dtypes import DTYPES_BY_NAME

import gpuopt
from bench.low_precision import CASES, LENGTHS, gradients_of, movement_of
from gpuopt import IndexedSlices, ParameterGroup, Variable, update_rule
from gpuopt.backends import backend_for, using
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cpu.forms.compiled import CompiledRule
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.codecs import Byte
from gpuopt.device import Device
from gpuopt.optimizers.base import RuleOptimizer
from gpuopt.rules.slot_codes import BLOCK, CodedValues, Coding

pytestmark = pytest.mark.value

SIZES = [(), (1,), (255,), (256,), (257,), (1000,), (3, 300), (0,), (0, 5)]

Make = Callable[..., Any]
OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda **more: gpuopt.MomentumOptimizer(0.05, 0.9, **more),
    "nesterov": lambda **more: gpuopt.MomentumOptimizer(0.05, 0.9, use_nesterov=True, **more),
    "momentum-w": lambda **more: gpuopt.MomentumWOptimizer(0.01, 0.05, 0.9, **more),
    "adam": lambda **more: gpuopt.AdamOptimizer(0.01, **more),
    "lazy-adam": lambda **more: gpuopt.LazyAdamOptimizer(0.01, **more),
    "adam-w": lambda **more: gpuopt.AdamWOptimizer(0.01, 0.01, **more),
    "torch-adam-w": lambda **more: gpuopt.TorchAdamWOptimizer(0.01, **more),
    "lion": lambda **more: gpuopt.LionOptimizer(0.01, weight_decay=0.1, **more),
}
# What else a step may do, by the arguments for it.
STAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip_norm": {"clip_norm": 0.5},
    "clip_value": {"clip_value": 0.01},
    "groups": {"groups": [ParameterGroup("table", learning_rate=0.5)]},
    "clipped groups": {"clip_norm": 2.0, "groups": [ParameterGroup("table", clip_value=0.02)]},
    "bitsandbytes": {"slot_form": "bitsandbytes"},
}


def normal(seed: int, shape: tuple[int, ...]) -> Any:
    return np.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)


class ByHand:
    """An optimizer whose slots are float32, and rounded to codes and back after each step."""

    def __init__(self, make: Make, form: str, tables: bool, **more: Any) -> None:
        self.optimizer = make(**more)
        self._of_squares = Coding.ROOTS if form == "root" else Coding.SQUARES
        self._tables = tables
        self.stored: dict[tuple[str, str], CodedValues] = {}

    def apply_gradients(self, pairs: Any) -> None:
        self.optimizer.apply_gradients(pairs)
        for _, variable in pairs:
            for name in array_slots(self.optimizer):
                slot = self.optimizer.get_slot(variable, name)
                coding = self._of_squares if name == "v" else Coding.SIGNED
                by_rows = self._tables and variable.ndim > 1
                stored = Byte(coding).new_arrays(slot.numpy(), by_rows=by_rows)
                before = self.stored.get((variable.name, name))
                if before is not None and by_rows:
                    # Codes that are decoded and encoded are others: there is no -1.
                    same = (Byte(coding).numbers(before) == slot.numpy()).all(axis=1)
                    for new, old in zip(stored, before, strict=True):
                        new[same] = old[same]
                self.stored[variable.name, name] = stored
                slot.assign(Byte(coding).numbers(stored))


@pytest.mark.parametrize("coding", Coding)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_each_number_gets_the_nearest_code_of_its_block(
    coding: Coding, shape: tuple[int, ...]
) -> None:
    numbers = normal(0, shape) if coding is Coding.SIGNED else np.square(normal(0, shape))
    stored = np.sqrt(numbers) if coding is Coding.ROOTS else numbers
    codes, scales = Byte(coding).new_arrays(numbers)
    assert codes.shape == shape
    assert scales.shape == (-(-codes.size // BLOCK),)
    for number, of_block in enumerate(
        np.split(stored.reshape(-1), range(BLOCK, stored.size, BLOCK))
    ):
        if of_block.size:
            assert scales[number] == np.abs(of_block).max()
            mine = codes.reshape(-1)[number * BLOCK :][:BLOCK]
            distances = np.abs(of_block[:, np.newaxis] - coding.values * scales[number])
            chosen = np.take_along_axis(distances, mine[:, np.newaxis].astype(np.intp), 1)[:, 0]
            np.testing.assert_allclose(chosen, distances.min(axis=1), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("coding", Coding)
def test_codes_are_found_as_by_a_search_among_all(coding: Coding) -> None:
    random = np.random.default_rng(1)
    numbers = np.concatenate(
        [
            random.random(4096),
            10 ** (-9 * random.random(4096)),
            coding.bounds,
            np.nextafter(coding.bounds, np.float32(1)),
            np.nextafter(coding.bounds, np.float32(0)),
            [0, 1e-45, 1],
        ]
    ).astype(np.float32)
    # In rows, which each have a block that ends with 1: the numbers are magnitudes as they are.
    rows = np.stack([numbers, np.ones_like(numbers)], axis=1)
    kept = np.square(rows) if coding is Coding.ROOTS else rows
    codes, _ = Byte(coding).new_arrays(kept, by_rows=True)
    magnitudes = np.sqrt(kept[:, 0]) if coding is Coding.ROOTS else kept[:, 0]
    expected = coding.zero + np.searchsorted(coding.bounds, magnitudes)
    np.testing.assert_array_equal(codes[:, 0], expected)
    if coding is Coding.SIGNED:
        codes, _ = Byte(coding).new_arrays(-rows, by_rows=True)
        np.testing.assert_array_equal(codes[:, 0], 127 - np.minimum(expected - 127, 127))


@pytest.mark.parametrize("coding", Coding)
def test_maps_are_ascending_and_the_published_ones(coding: Coding) -> None:
    values = coding.values
    assert values.shape == (256,)
    assert (np.diff(values) > 0).all()
    assert values[coding.zero] == 0
    # Of `create_dynamic_map` of bitsandbytes 0.50.2.
    few = [-0.9929687, 5.5e-07, 0.9929687] if coding is Coding.SIGNED else [0, 3.25e-07, 0.9964844]
    np.testing.assert_allclose(values[[0, coding.zero + 1, 254]], few, rtol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("gradients", ["dense", "sparse", "mixed"])
@pytest.mark.one_in(3)
def test_a_step_is_that_of_float32_slots_which_are_rounded_after_it(
    name: str, stage: str, gradients: str
) -> None:
    more, make = dict(STAGES[stage]), OPTIMIZERS[name]
    form = more.pop("slot_form", "root")
    if form == "bitsandbytes" and gradients != "dense":
        return
    shapes = {"dense": [(1000,), (7, 30)], "sparse": [(40, 300), (9, 5)]}
    shapes["mixed"] = [(1000,), (40, 300)]
    tables = gradients != "dense"
    ours = make(slot_bits=8, slot_form=form, **more)
    theirs = ByHand(make, form, tables, **more)
    starts = [normal(seed, shape) for seed, shape in enumerate(shapes[gradients])]
    every = [
        [
            Variable(start, name=name)
            for start, name in zip(starts, ("weights", "table"), strict=True)
        ]
        for _ in range(2)
    ]
    random = np.random.default_rng(5)
    for step in range(5):
        given = []
        for number, start in enumerate(starts):
            gradient: Any = normal(100 * step + number, start.shape) * np.float32(0.1)
            if tables and start.ndim == 2:
                rows = random.integers(0, len(start), len(start))
                gradient = IndexedSlices(gradient, rows, start.shape)
            given.append(gradient)
        before = [variable.numpy() for variable in every[1]]
        for optimizer, variables in zip((ours, theirs), every, strict=True):
            optimizer.apply_gradients(list(zip(given, variables, strict=True)))
        for was, one, other in zip(before, every[0], every[1], strict=True):
            largest = np.abs(other.numpy() - was).max()
            tolerance = 4 * np.finfo(np.float32).eps * max(largest, np.abs(was).max())
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=0, atol=tolerance)
            # What follows is compared from the same numbers.
            one.assign(other.numpy())
            for slot_name in array_slots(ours):
                slot, stored = ours.get_slot(one, slot_name), theirs.stored[other.name, slot_name]
                np.testing.assert_allclose(slot.scales.numpy(), stored.scales, rtol=1e-6)
                slot.codes.assign(stored.codes)
                slot.scales.assign(stored.scales)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "cautious"])
@pytest.mark.parametrize("shape", [(5000,), (70, 300), (300, 7)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.one_in(4)
def test_the_compiled_form_writes_what_numpy_writes(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    shape: tuple[int, ...],
    dtype: str,
) -> None:
    make = OPTIMIZERS.get(name, partial(gpuopt.TorchAdamWOptimizer, 0.01, cautious=True))
    found, update_chunks = [], CompiledRule.update_chunks
    for large in (1, 1 << 60):
        limits = CpuLimits(large_elements=large, elements_per_thread=1024)
        used: list[Any] = []

        def noting(self: CompiledRule, *arguments: Any, used: list[Any] = used) -> None:
            used.append(self.stored.codecs.per_block)
            update_chunks(self, *arguments)

        monkeypatch.setattr(CompiledRule, "update_chunks", noting)
        with using(Device.cpu, CpuBackend(limits)):
            optimizer = make(slot_bits=8)
            variable = Variable(normal(1, shape).astype(DTYPES_BY_NAME[dtype]))
            for step in range(4):
                gradient: Any = normal(step, shape).astype(DTYPES_BY_NAME[dtype])
                if step > 1 and len(shape) == 2:
                    gradient = IndexedSlices(gradient[:30], np.arange(30), shape)
                optimizer.apply_gradients([(gradient, variable)])
        assert any(used) == (large == 1)
        state = optimizer.state_dict({"w": variable})
        found.append([variable.numpy(), *(of["w"] for of in state["slots"].values())])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_variable_is_the_gradient_of_another_one_as_it_was_before_the_step() -> None:
    found = []
    for is_copied in (False, True):
        first, second = np.ones(300, np.float32), np.zeros(300, np.float32)
        optimizer = gpuopt.MomentumOptimizer(0.5, 0.9, slot_bits=8)
        optimizer.apply_gradients(
            [(np.ones_like(first), first), (first.copy() if is_copied else first, second)]
        )
        found.append(second)
    np.testing.assert_array_equal(*found)
    assert set(found[0]) == {-0.5}


@pytest.mark.parametrize("case", CASES)
def test_a_blocks_scales_may_be_mixed(case: str) -> None:
    found = movement_of(CASES[case])
    assert found.error <= CASES[case].most_error
    assert LENGTHS[0] <= found.length <= LENGTHS[1]


@pytest.mark.parametrize(("case", "most_error"), [("alike", 0.06), ("mixed", 0.2), ("rare", 0.25)])
def test_lions_steps_are_signs_and_go_astray_where_gradients_are_rare(
    case: str, most_error: float
) -> None:
    gradients = gradients_of(CASES[case])
    variable, optimizer = None, gpuopt.LionOptimizer(1e-3, slot_bits=8)
    for gradient in gradients:
        if variable is None:
            variable = Variable(np.zeros(gradient.shape, np.float32))
            exact, m = np.zeros((2, *gradient.shape))
        exact -= 1e-3 * np.sign(0.9 * m + 0.1 * gradient)
        m = 0.99 * m + 0.01 * gradient
        optimizer.apply_gradients([(gradient, variable)])
    assert variable is not None
    moved, length = variable.numpy(), np.linalg.norm(exact)
    assert np.linalg.norm(moved - exact) <= most_error * length
    assert 0.94 <= np.linalg.norm(moved) / length <= 1.05


def test_dense_adam_has_2_03_bytes_of_state_for_each_parameter() -> None:
    variable = Variable(np.zeros(1 << 20, np.float32))
    optimizer = gpuopt.AdamOptimizer(slot_bits=8)
    optimizer.apply_gradients([(np.ones_like(variable.numpy()), variable)])
    slots = optimizer.state.slots_of(variable)
    assert sum(slot.size * slot.dtype.itemsize for slot in slots) == 2 * (1 + 4 / 256) * 2**20


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [100, 70_000])
def test_16_bit_variables_have_the_slots_of_float32_ones(dtype: str, size: int) -> None:
    import ml_dtypes

    stored = np.dtype(np.float16 if dtype == "float16" else ml_dtypes.bfloat16)
    optimizers = [gpuopt.MomentumOptimizer(0.1, 0.9, slot_bits=8) for _ in range(2)]
    given = normal(0, (size,)).astype(stored)
    variables = [Variable(given.astype(each)) for each in (stored, np.float32)]
    for optimizer, variable in zip(optimizers, variables, strict=True):
        gradient = normal(1, (size,)).astype(stored).astype(variable.dtype)
        optimizer.apply_gradients([(gradient, variable)])
    expected = variables[1].numpy().astype(stored)
    np.testing.assert_array_equal(variables[0].numpy(), expected)
    slots = [o.get_slot(v, "momentum") for o, v in zip(optimizers, variables, strict=True)]
    np.testing.assert_array_equal(*[slot.codes.numpy() for slot in slots])


@pytest.mark.parametrize("size", [300, 300_000])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_slots_that_would_not_be_finite_begin_anew(size: int, bad: float) -> None:
    optimizer = gpuopt.AdamOptimizer(0.1, slot_bits=8)
    variable = Variable(np.zeros(size, np.float32))
    gradient = normal(0, (size,))
    optimizer.apply_gradients([(gradient, variable)])
    before = [optimizer.get_slot(variable, name).numpy() for name in "mv"]
    again = gradient.copy()
    again[3] = bad
    optimizer.apply_gradients([(again, variable)])
    after = [optimizer.get_slot(variable, name).numpy() for name in "mv"]
    # As with float32 slots, the variable shows it.
    assert np.isnan(variable.numpy()[3])
    assert np.isfinite(np.delete(variable.numpy(), 3)).all()
    for was, slot in zip(before, after, strict=True):
        assert slot[3] == 0
        assert np.isfinite(slot).all()
        assert (slot[4:200] != was[4:200]).any()


@update_rule
def held(var: Any, grad: Any, m: Any, start: Any, *, learning_rate: Any) -> None:
    m += grad
    var -= learning_rate * (m + (var - start))


class Held(RuleOptimizer):
    rule = held

    def __init__(self, learning_rate: float, **common: Any) -> None:
        super().__init__(common, learning_rate=learning_rate)


def test_a_slot_that_the_rule_only_reads_begins_anew_with_the_others(every_place: str) -> None:
    optimizer, start = Held(0.5, slot_bits=8), np.arange(1, 9, dtype=np.float32)
    variable = Variable(np.zeros(8, np.float32), device=every_place)
    gradient = np.zeros(8, np.float32)
    xp = np if every_place == "cpu" else backend_for(Device.parse(every_place)).xp
    optimizer.apply_gradients([(xp.asarray(gradient), variable)])
    optimizer.get_slot(variable, "start").assign(start)
    before = optimizer.get_slot(variable, "start").numpy()
    gradient[3] = np.inf
    optimizer.apply_gradients([(xp.asarray(gradient), variable)])
    expected = np.where(np.arange(8) == 3, 0, before)
    np.testing.assert_array_equal(optimizer.get_slot(variable, "start").numpy(), expected)


def test_a_variable_that_is_not_contiguous_is_updated_in_place() -> None:
    base = normal(0, (20, 30))
    copy = Variable(base.T.copy())
    optimizers = [gpuopt.AdamOptimizer(0.1, slot_bits=8) for _ in range(2)]
    for _ in range(3):
        optimizers[0].apply_gradients([(np.ones((30, 20), np.float32), base.T)])
        optimizers[1].apply_gradients([(np.ones((30, 20), np.float32), copy)])
    np.testing.assert_array_equal(base.T, copy.numpy())


def test_a_gradient_may_be_the_variable_itself() -> None:
    variable, other = (Variable(normal(0, (1000,))) for _ in range(2))
    optimizers = [gpuopt.AdamOptimizer(0.1, slot_bits=8) for _ in range(2)]
    optimizers[0].apply_gradients([(variable.value(), variable)])
    optimizers[1].apply_gradients([(other.numpy(), other)])
    np.testing.assert_array_equal(variable.numpy(), other.numpy())


def test_blocks_end_at_rows_once_a_gradient_is_sparse() -> None:
    variable = Variable(normal(0, (10, 300)))
    optimizer = gpuopt.LazyAdamOptimizer(0.1, slot_bits=8)
    optimizer.apply_gradients([(normal(1, (10, 300)), variable)])
    before = optimizer.get_slot(variable, "m").numpy()
    assert optimizer.get_slot(variable, "m").scales.shape == (12,)
    rows = IndexedSlices(normal(2, (2, 300)), np.array([3, 3]), (10, 300))
    optimizer.apply_gradients([(rows, variable)])
    slot = optimizer.get_slot(variable, "m")
    assert slot.scales.shape == (10, 2)
    untouched = np.delete(np.arange(10), 3)
    # Two roundings: at most a 50th of the block's largest, each.
    bound = np.abs(before).max() / 25
    np.testing.assert_allclose(slot.numpy()[untouched], before[untouched], rtol=0, atol=bound)
    codes = slot.codes.numpy()
    optimizer.apply_gradients([(rows, variable)])
    np.testing.assert_array_equal(slot.codes.numpy()[untouched], codes[untouched])


def test_rows_come_and_go_with_their_codes() -> None:
    variable = Variable(normal(0, (10, 200)), name="table")
    optimizer = gpuopt.LazyAdamOptimizer(0.1, slot_bits=8)
    optimizer.apply_gradients([(normal(1, (10, 200)), variable)])
    with_rows = gpuopt.rows(variable)
    with_rows.keep(np.array([7, 2]))
    kept = optimizer.get_slot(variable, "m").numpy()
    with_rows.append(normal(3, (3, 200)))
    slot = optimizer.get_slot(variable, "m")
    assert slot.shape == (5, 200)
    assert slot.scales.shape == (5, 1)
    np.testing.assert_array_equal(slot.numpy()[:2], kept)
    assert kept.any()
    assert not slot.numpy()[2:].any()


REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "bits": (ValueError, "slot_bits must be 8 or 32", lambda: gpuopt.AdamOptimizer(slot_bits=4)),
    "form": (
        ValueError,
        "slot_form must be one of",
        lambda: gpuopt.AdamOptimizer(slot_bits=8, slot_form="linear"),
    ),
    "form alone": (
        ValueError,
        "is for slot_bits=8",
        lambda: gpuopt.AdamOptimizer(slot_form="bitsandbytes"),
    ),
    "rows": (
        ValueError,
        "PartialRowWiseAdamOptimizer: .* whose slots v have a number for each row",
        lambda: gpuopt.PartialRowWiseAdamOptimizer(slot_bits=8),
    ),
    "no slots": (
        ValueError,
        "of the rule gradient_descent, which has no slots",
        lambda: gpuopt.GradientDescentOptimizer(0.1, slot_bits=8),
    ),
    "no momentum": (
        ValueError,
        "of the rule torch_sgd, which has no slots",
        lambda: gpuopt.TorchSGDOptimizer(0.1, slot_bits=8),
    ),
}


@pytest.mark.contract
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_stored_in_8_bits_is_refused_by_name(case: str) -> None:
    error, message, make = REFUSED[case]
    with pytest.raises(error, match=message):
        make()


@pytest.mark.contract
def test_codes_are_not_exported_to_torch() -> None:
    with pytest.raises(ValueError, match="has slot_bits=8, and torch's optimizers have no codes"):
        gpuopt.optimizer_to_torch(gpuopt.AdagradOptimizer(0.1, slot_bits=8), [])


@pytest.mark.contract
def test_float64_variables_are_refused_before_anything_is_written() -> None:
    variables = [Variable(np.ones(5, np.float32)), Variable(np.ones(5), name="wide")]
    optimizer = gpuopt.AdamOptimizer(slot_bits=8)
    with pytest.raises(TypeError, match='"wide" is float64'):
        optimizer.apply_gradients([(np.ones(5, each.dtype), each) for each in variables])
    assert not optimizer.variables() or optimizer.get_slot_names() == []
    assert variables[0].numpy().tolist() == [1] * 5


@pytest.mark.contract
def test_sparse_gradients_of_bitsandbytes_form_are_refused_before_anything_is_written() -> None:
    variable = Variable(np.ones((4, 5), np.float32), name="table")
    optimizer = gpuopt.AdamOptimizer(slot_bits=8, slot_form="bitsandbytes")
    slices = IndexedSlices(np.ones((1, 5), np.float32), np.array([1]), (4, 5))
    with pytest.raises(NotImplementedError, match='"table" is IndexedSlices'):
        optimizer.apply_gradients([(slices, variable)])
    assert optimizer.get_slot(variable, "m") is None
    assert (variable.numpy() == 1).all()


@pytest.mark.parametrize("kind", ["Adam", "LazyAdam"])
@pytest.mark.parametrize("shape", [(9, 2), (9, 0)], ids=str)
def test_a_gradient_without_rows_or_columns_is_no_work_for_the_compiled_form(
    kind: str, shape: tuple[int, int]
) -> None:
    with using(Device.cpu, CpuBackend(CpuLimits(large_elements=0))):
        table = Variable(np.ones(shape, np.float32))
        optimizer = getattr(gpuopt, f"{kind}Optimizer")(0.1, slot_bits=8)
        for rows in ([], [1, 4]):
            values = np.ones((len(rows), shape[1]), np.float32)
            optimizer.apply_gradients([(IndexedSlices(values, rows), table)])
    moved = np.flatnonzero((table.numpy() != 1).any(axis=1))
    assert moved.tolist() == ([1, 4] if shape[1] else [])
