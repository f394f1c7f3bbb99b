"""Master copies of 16-bit variables: steps, writes in between, and with what they go together."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any

import autograd.numpy as anp
import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from array_slots import array_slots
from autograd import elementwise_grad
from each_device import variable_on
from emulator.emulator import EmulatorLauncher
from every_optimizer import make, one_of_each_shape
from interrupt_at import Interrupt, InterruptAt

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable
from gpuopt.backends import using
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.checkpoint.saver import SwappingSaver
from gpuopt.device import Device
from gpuopt.rules.split import split
from gpuopt.state.masters import SplitMaster

pytestmark = pytest.mark.value

DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
# Of masters, and of the variables.
KINDS = [("float32", DTYPES[0]), ("float32", DTYPES[1]), ("remainder", DTYPES[1])]
every_kind = pytest.mark.parametrize(("masters", "dtype"), KINDS, ids=str)
every_masters = pytest.mark.parametrize("masters", ["float32", "remainder"])
BFLOAT16 = DTYPES[1]
SHAPES = [(), (1,), (40,), (5, 3), (0,), (300, 7)]
ROWS = np.array([3, 3, 0, 11, 3])

Make = Callable[..., Any]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda **more: gpuopt.GradientDescentOptimizer(0.01, **more),
    "momentum": lambda **more: gpuopt.MomentumOptimizer(0.01, 0.9, **more),
    "adam": lambda **more: gpuopt.AdamOptimizer(0.01, **more),
    "lazy-adam": lambda **more: gpuopt.LazyAdamOptimizer(0.01, **more),
    "adam-w": lambda **more: gpuopt.AdamWOptimizer(0.01, 0.01, **more),
    "cautious": lambda **more: gpuopt.TorchAdamWOptimizer(0.01, cautious=True, **more),
    "adagrad": lambda **more: gpuopt.AdagradOptimizer(0.01, **more),
    "lars": lambda **more: gpuopt.LARSOptimizer(0.1, **more),
    "lamb": lambda **more: gpuopt.LAMBOptimizer(0.01, **more),
    "row-wise": lambda **more: gpuopt.RowWiseAdagradOptimizer(0.01, **more),
}
# What else a step may do, by the arguments for it.
STAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip_norm": {"clip_norm": 0.5},
    "clip_value": {"clip_value": 0.01},
    "groups": {"groups": [ParameterGroup("[wv][24]", learning_rate=0.5)]},
    "clipped groups": {"clip_norm": 2.0, "groups": [ParameterGroup("[wv][24]", clip_value=0.02)]},
}


@pytest.fixture(params=["plain", "compiled"])
def form(request: Any) -> Iterator[str]:
    """How rules are computed; the compiled form needs a compiler."""
    large = 10**9 if request.param == "plain" else 1
    with using(Device.cpu, CpuBackend(CpuLimits(small_elements=1, large_elements=large))):
        yield request.param


def normal(seed: int, shape: tuple[int, ...], dtype: Any) -> Any:
    return np.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def steps(number: int, kind: str, dtype: Any) -> Iterator[list[Any]]:
    """Yields the gradients of each step; tables have sparse ones in some of them."""
    for step in range(number):
        gradients = [normal(100 * step + i, shape, dtype) for i, shape in enumerate(SHAPES)]
        if kind == "sparse" or (kind == "mixed" and step % 2):
            values = normal(100 * step, (len(ROWS), 7), dtype)
            gradients[-1] = IndexedSlices(values, ROWS)
        yield gradients


def in_float32(gradient: Any) -> Any:
    if isinstance(gradient, IndexedSlices):
        return IndexedSlices(gradient.values.astype(np.float32), gradient.indices)
    return gradient.astype(np.float32)


def master_of(optimizer: Any, variable: Variable) -> Any:
    return optimizer.get_slot(variable, "master")


def check_rounded(optimizer: Any, variable: Variable) -> None:
    master = master_of(optimizer, variable).numpy()
    assert master.dtype == np.float32
    rounded = master.astype(variable.dtype)
    if optimizer.options.codecs.masters == "remainder":  # half up, by the bits
        rounded = split(master)[0]
    np.testing.assert_array_equal(variable.numpy(), rounded)


def one_step(w: Variable, optimizer: Any, seed: int = 9) -> None:
    optimizer.apply_gradients([(normal(seed, w.shape, w.dtype), w)])


def one_step_on(xp: Any, w: Variable, optimizer: Any) -> None:
    optimizer.apply_gradients([(xp.asarray(normal(9, w.shape, w.dtype)), w)])


@every_kind
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["dense", "sparse", "mixed"])
@pytest.mark.one_in(36)
def test_a_step_is_that_of_float32_variables_which_are_rounded_after_it(
    name: str, stage: str, kind: str, masters: Any, dtype: Any, form: str
) -> None:
    mine = [Variable(normal(i, shape, dtype), name=f"w{i}") for i, shape in enumerate(SHAPES)]
    theirs = [Variable(w.numpy().astype(np.float32), name=f"v{i}") for i, w in enumerate(mine)]
    options = STAGES[stage]
    exact = OPTIMIZERS[name](**options)
    optimizer = OPTIMIZERS[name](masters=masters, **options)
    for gradients in steps(3, kind, dtype):
        before = [w.numpy().copy() for w in theirs]
        optimizer.apply_gradients(list(zip(gradients, mine, strict=True)))
        exact.apply_gradients([(in_float32(g), w) for g, w in zip(gradients, theirs, strict=True)])
        moved = max(
            np.abs(w.numpy() - old).max(initial=0) for w, old in zip(theirs, before, strict=True)
        )
        for w, v in zip(mine, theirs, strict=True):
            check_rounded(optimizer, w)
            bound = 4 * np.finfo(np.float32).eps * max(moved, np.abs(v.numpy()).max(initial=0))
            np.testing.assert_allclose(
                master_of(optimizer, w).numpy(), v.numpy(), rtol=0, atol=bound
            )


@every_masters
@one_of_each_shape
def test_every_optimizer_keeps_masters(name: str, arguments: dict[str, Any], masters: Any) -> None:
    dtype = BFLOAT16
    w, v = Variable(normal(0, (6, 4), dtype)), Variable(normal(0, (6, 4), dtype).astype(np.float32))
    mine, exact = make(name, arguments, masters=masters), make(name, arguments)
    for seed in range(3):
        gradient = normal(seed, (6, 4), dtype)
        mine.apply_gradients([(gradient, w)])
        exact.apply_gradients([(gradient.astype(np.float32), v)])
    np.testing.assert_array_equal(master_of(mine, w).numpy(), v.numpy())
    check_rounded(mine, w)
    for slot in array_slots(exact):
        np.testing.assert_array_equal(
            mine.get_slot(w, slot).numpy(), exact.get_slot(v, slot).numpy()
        )


def test_small_steps_are_not_lost() -> None:
    w, lost = (Variable(np.ones(3, ml_dtypes.bfloat16)) for _ in range(2))
    with_masters = gpuopt.GradientDescentOptimizer(1e-4, masters="float32")
    without = gpuopt.GradientDescentOptimizer(1e-4)
    for _ in range(100):
        gradient = np.ones(3, ml_dtypes.bfloat16)
        with_masters.apply_gradients([(gradient, w)])
        without.apply_gradients([(gradient, lost)])
    assert lost.numpy()[0] == 1
    np.testing.assert_allclose(w.numpy().astype(np.float32), 0.99, rtol=4e-3)
    np.testing.assert_allclose(master_of(with_masters, w).numpy(), 0.99, rtol=1e-5)


def test_wide_variables_have_none() -> None:
    optimizer = gpuopt.AdamOptimizer(masters="float32")
    wide = [Variable(np.ones(3, dtype)) for dtype in (np.float32, np.float64)]
    narrow = Variable(np.ones(3, np.float16))
    optimizer.apply_gradients([(np.ones(3, w.dtype), w) for w in [*wide, narrow]])
    assert [master_of(optimizer, w) is None for w in [*wide, narrow]] == [True, True, False]
    assert [optimizer.get_slot(w, "m").dtype for w in wide] == [np.float32, np.float64]


@every_kind
def test_what_is_assigned_to_a_variable_or_its_master_goes_to_both(
    masters: Any, dtype: Any, xp: Any
) -> None:
    w, optimizer = variable_on(xp, np.ones(4, dtype)), gpuopt.AdamOptimizer(masters=masters)
    one_step(w, optimizer)
    master = master_of(optimizer, w)
    kept = master.numpy()[1:].copy()
    w[0] = 3
    np.testing.assert_array_equal(master.numpy(), [3, *kept])
    master.assign(np.float32([1, 2, 3, 4.0001]))
    np.testing.assert_array_equal(w.numpy(), np.asarray([1, 2, 3, 4], dtype))
    w.assign_add(np.ones(4, dtype))
    np.testing.assert_array_equal(master.numpy(), [2, 3, 4, 5])
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients([(np.ones(4, dtype), w)])
    np.testing.assert_array_equal(master.numpy(), [1, 2, 3, 4])
    w.assign(np.zeros(4, dtype))
    one_step(w, optimizer, seed=3)
    assert np.abs(master.numpy()).max() < 0.01
    check_rounded(optimizer, w)


INDICES: dict[str, Any] = {
    "one row": 3,
    "one element": (2, 5),
    "a slice": slice(1, 30, 7),
    "columns": (slice(None), slice(2, 4)),
    "rows that repeat": np.array([3, 0, 3, 39]),
    "a list": [5, 1],
    "a mask": np.arange(320).reshape(40, 8) % 3 == 0,
    "points": (np.array([0, 7]), np.array([1, 1])),
    "nothing": slice(0, 0),
    "everything": ...,
}


@every_kind
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("piece", [8, 1 << 22], ids=["in pieces", "at once"])
@pytest.mark.one_in(6)
def test_what_is_assigned_to_a_part_goes_to_that_part_of_both(
    index: str, piece: int, masters: Any, dtype: Any, xp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpuopt.state.masters, "_PIECE", piece)
    w = variable_on(xp, normal(0, (40, 8), dtype))
    optimizer = gpuopt.AdamOptimizer(masters=masters)
    one_step_on(xp, w, optimizer)
    master, at = master_of(optimizer, w), INDICES[index]
    on_device = xp.asarray(at) if isinstance(at, np.ndarray) else at
    weights, exact = w.numpy(), master.numpy()
    assert (weights.astype(np.float32) != exact).any()
    weights[at], exact[at] = 0.3, np.asarray(0.3, dtype)
    w[on_device] = 0.3
    np.testing.assert_array_equal(w.numpy(), weights)
    np.testing.assert_array_equal(master.numpy(), exact)
    exact[at] = 0.7654321
    master[on_device] = 0.7654321
    np.testing.assert_array_equal(master.numpy(), exact)
    check_rounded(optimizer, w)
    w[on_device] = w.numpy()[at] if xp is np else xp.asarray(w.numpy()[at])
    np.testing.assert_array_equal(master.numpy(), exact)


@every_kind
def test_operators_in_place_go_to_both(masters: Any, dtype: Any, xp: Any) -> None:
    w, optimizer = variable_on(xp, np.ones((3, 2), dtype)), gpuopt.AdamOptimizer(masters=masters)
    one_step_on(xp, w, optimizer)
    master = master_of(optimizer, w)
    w *= 0
    w += 2
    np.testing.assert_array_equal(master.numpy(), np.full((3, 2), 2))
    master += np.float32(1)
    master.assign_sub(xp.asarray(np.full((3, 2), 2.0**-20, np.float32)))
    np.testing.assert_array_equal(master.numpy(), np.full((3, 2), 3 - 2.0**-20, np.float32))
    np.testing.assert_array_equal(w.numpy().astype(np.float32), np.full((3, 2), 3))


@pytest.mark.parametrize(
    ("masters", "dtype"), [("float32", np.float16), ("remainder", ml_dtypes.bfloat16)]
)
def test_functions_that_write_into_one_go_to_both(masters: Any, dtype: Any) -> None:
    w, optimizer = Variable(np.ones((3, 2), dtype)), gpuopt.AdamOptimizer(masters=masters)
    one_step(w, optimizer)
    master = master_of(optimizer, w)
    for write, expected in (
        (lambda: np.copyto(master, 2), 2),
        (lambda: np.add(master, 1, out=master), 3),
        (lambda: np.subtract.at(master, [0, 1, 2], 1), 2),
        (lambda: np.sum(np.ones((3, 3, 2), np.float32), axis=0, out=master), 3),
        (lambda: np.copyto(w, dtype(4)), 4),
    ):
        write()
        np.testing.assert_array_equal(master.numpy(), np.full((3, 2), expected))
        np.testing.assert_array_equal(w.numpy().astype(np.float32), np.full((3, 2), expected))


def test_the_array_of_a_master_shows_what_is_assigned_to_its_variable() -> None:
    w, optimizer = Variable(np.ones(4, np.float16)), gpuopt.AdamOptimizer(masters="float32")
    one_step(w, optimizer)
    array, weights = master_of(optimizer, w).value(), w.value()
    w[1] = 5
    assert array[1] == 5
    master_of(optimizer, w)[2] = 7
    assert weights[2] == 7


@every_kind
def test_a_row_is_assigned_without_a_copy_of_the_table(masters: Any, dtype: Any) -> None:
    w = Variable(np.ones((200_000, 8), dtype))
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9, masters=masters)
    rows = np.arange(5)
    optimizer.apply_gradients([(IndexedSlices(np.ones((5, 8), dtype), rows), w)])
    master = master_of(optimizer, w)
    for written, value in ((w, np.full((5, 8), 3, dtype)), (master, np.full((5, 8), 4.5))):
        written[rows] = value  # what is imported or compiled is not counted
        tracemalloc.start()
        written[rows] = value
        written[7:9] = value[:2]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < w.nbytes / 8
    np.testing.assert_array_equal(w[7:9].astype(np.float32), 4.5)
    np.testing.assert_array_equal(master.numpy()[rows], 4.5)


@every_masters
def test_digits_of_the_master_stay_where_the_variable_is_assigned_what_it_rounds_to(
    masters: Any,
) -> None:
    w, optimizer = Variable(np.ones(40, BFLOAT16)), gpuopt.AdamOptimizer(masters=masters)
    one_step(w, optimizer)
    before = master_of(optimizer, w).numpy()
    assert (before.astype(BFLOAT16) != before).any()
    w.assign(w.numpy())
    np.testing.assert_array_equal(master_of(optimizer, w).numpy(), before)


def test_nan_and_infinity_pass_between_a_variable_and_its_master() -> None:
    w, optimizer = Variable(np.ones(3, np.float16)), gpuopt.AdamOptimizer(masters="float32")
    one_step(w, optimizer)
    master = master_of(optimizer, w)
    w.assign(np.float16([np.nan, np.inf, -0.0]))
    np.testing.assert_array_equal(master.numpy(), [np.nan, np.inf, 0])
    assert np.signbit(master.numpy()[2])
    master.assign(np.float32([1e30, np.nan, 1]))
    np.testing.assert_array_equal(w.numpy(), np.float16([np.inf, np.nan, 1]))


@pytest.mark.internal
def test_a_variable_follows_its_master_after_a_step_that_was_interrupted(form: str) -> None:
    w = Variable(np.ones(40, np.float16), name="w")
    table = Variable(np.ones((5, 3), np.float16), name="table")
    optimizer = gpuopt.MomentumOptimizer(0.25, 0.5, masters="float32")
    gradient = np.full(40, 0.5, np.float16)
    slices = IndexedSlices(np.full((2, 3), 0.5, np.float16), np.array([1, 4]))
    optimizer.apply_gradients([(gradient, w), (slices, table)])
    num_unfinished = 0
    for moment in count(1):
        optimizer.accept_unfinished_step()
        for variable in (w, table):
            variable.assign(np.ones(variable.shape, np.float16))
        interrupts = InterruptAt(moment)
        try:
            with interrupts:
                optimizer.apply_gradients([(gradient, w), (slices, table)])
        except Interrupt:
            optimizer.accept_unfinished_step()
            for variable in (w, table):
                follows = variable.numpy()
                master = optimizer.get_slot(variable, "master").numpy()
                assert master.astype(np.float16).tobytes() == follows.tobytes()
            num_unfinished += bool((w.numpy() != 1).any() and (table.numpy() == 1).all())
        if interrupts.left > 0:
            break
    assert num_unfinished


@every_masters
def test_a_step_of_another_optimizer_is_followed(masters: Any) -> None:
    w, optimizer = Variable(np.ones(4, BFLOAT16)), gpuopt.AdamOptimizer(masters=masters)
    one_step(w, optimizer)
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients([(np.ones(4, BFLOAT16), w)])
    np.testing.assert_array_equal(master_of(optimizer, w).numpy(), w.numpy())
    one_step(w, optimizer)
    check_rounded(optimizer, w)


@every_masters
def test_a_step_of_another_optimizer_starts_at_what_the_master_was_assigned(masters: Any) -> None:
    w, optimizer = Variable(np.ones(4, BFLOAT16)), adam_with_masters(masters)
    one_step(w, optimizer)
    master_of(optimizer, w).assign(np.full(4, 8, np.float32))
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients([(np.ones(4, BFLOAT16), w)])
    np.testing.assert_array_equal(w.numpy().astype(np.float32), 7)
    np.testing.assert_array_equal(master_of(optimizer, w).numpy(), 7)


@every_masters
def test_a_variable_that_is_written_is_left_alone_by_steps_of_others(masters: Any) -> None:
    w, optimizer = Variable(np.ones(4, BFLOAT16)), adam_with_masters(masters)
    one_step(w, optimizer)
    assert (master_of(optimizer, w).numpy() != w.numpy().astype(np.float32)).all()
    x = Variable(np.ones(1, np.float32))
    with w.identity.master_pair.while_written(w.identity, nullcontext()):  # as by another thread
        gpuopt.GradientDescentOptimizer(1.0).apply_gradients([(np.ones(1, np.float32), x)])
        w.unread_storage[...] = 2
    np.testing.assert_array_equal(master_of(optimizer, w).numpy(), 2)


@pytest.mark.internal
@every_masters
def test_what_was_assigned_counts_after_a_step_that_was_interrupted(masters: Any) -> None:
    w = Variable(np.ones(4, BFLOAT16))
    optimizer = gpuopt.GradientDescentOptimizer(0.25, masters=masters)
    pairs = [(np.ones(4, BFLOAT16), w)]
    optimizer.apply_gradients(pairs)
    for moment in count(1):
        w.assign(np.full(4, 2))
        interrupts = InterruptAt(moment)
        with suppress(Interrupt), interrupts:
            optimizer.apply_gradients(pairs)
        optimizer.accept_unfinished_step()
        optimizer.apply_gradients(pairs)
        check_rounded(optimizer, w)
        assert w.numpy()[0] in (1.75, 1.5), moment
        if interrupts.left > 0:
            break


@pytest.mark.internal
def test_who_looks_after_an_interrupted_step_sees_the_master() -> None:
    w = Variable(np.ones(4, BFLOAT16))
    optimizer = gpuopt.GradientDescentOptimizer(0.25, masters="remainder")
    pairs = [(np.ones(4, BFLOAT16), w)]
    optimizer.apply_gradients(pairs)
    for moment in count(1):
        optimizer.accept_unfinished_step()
        w.assign(np.full(4, 2))
        check_rounded(optimizer, w)
        interrupts = InterruptAt(moment)
        with suppress(Interrupt), interrupts:
            optimizer.apply_gradients(pairs)
        check_rounded(optimizer, w)
        if interrupts.left > 0:
            break


def refused(w: Any, optimizer: Any, error: type[Exception], says: str) -> None:
    before = np.array(w if isinstance(w, np.ndarray) else w.numpy())
    with pytest.raises(error, match=says):
        optimizer.apply_gradients([(np.ones(before.shape, before.dtype), w)])
    np.testing.assert_array_equal(w if isinstance(w, np.ndarray) else w.numpy(), before)
    assert optimizer.variables() == []


@pytest.mark.contract
def test_what_would_not_stay_in_step_is_refused_by_name() -> None:
    def adam(**more: Any) -> Any:
        return gpuopt.AdamOptimizer(masters="float32", **more)

    refused(np.ones(3, np.float16), adam(), ValueError, '"array.*" is an array')
    adopted = Variable(np.ones(3, np.float16), name="lent", copy=False)
    refused(adopted, adam(), ValueError, '"lent" was made with copy=False')
    projected = Variable(np.ones(3, np.float16), name="proj", constraint=lambda array: array)
    refused(projected, adam(), ValueError, '"proj" has a constraint')
    shared, first = Variable(np.ones(3, np.float16), name="both"), adam()
    one_step(shared, first)
    refused(shared, adam(), ValueError, '"both" has a master copy under another optimizer')
    halved = gpuopt.AdamOptimizer(masters="remainder")
    half = Variable(np.ones(3, np.float16), name="half")
    refused(half, halved, ValueError, '"half" is float16, and only bfloat16 variables')
    table = Variable(np.ones((3, 2), BFLOAT16), name="rows")
    one_step(table, halved)
    with pytest.raises(
        NotImplementedError, match='"rows" has a master copy by masters="remainder"'
    ):
        gpuopt.rows(table).keep([0])
    for bad in ("float64", np.float64, BFLOAT16, 32):
        with pytest.raises(ValueError, match="masters must be None or one of"):
            gpuopt.AdamOptimizer(masters=bad)

    class Own(gpuopt.GradientDescentOptimizer):
        def _apply_dense(self, grad: Any, var: Variable) -> None:
            super()._apply_dense(grad, var)

    hooked = Own(0.1, masters="float32")
    refused(Variable(np.ones(3, np.float16)), hooked, NotImplementedError, "has no master copies")


@pytest.mark.contract
def test_a_table_whose_rows_catch_up_has_no_master_under_another_optimizer() -> None:
    slices = IndexedSlices(np.ones((1, 2), np.float16), np.array([1]))
    table = Variable(np.ones((4, 2), np.float16), name="table")
    behind = gpuopt.AdamOptimizer(catch_up=True)
    behind.apply_gradients([(slices, table)])
    with pytest.raises(ValueError, match='"table" has rows that catch up'):
        gpuopt.AdamOptimizer(masters="float32").apply_gradients([(slices, table)])
    other = Variable(np.ones((4, 2), np.float16), name="other")
    one_step(other, keeping := gpuopt.AdamOptimizer(masters="float32"))
    with pytest.raises(ValueError, match='"other" has a master copy'):
        behind.apply_gradients([(slices, other)])
    check_rounded(keeping, other)


def test_another_optimizer_may_take_over_once_the_first_is_gone() -> None:
    w = Variable(np.ones(4, np.float16))
    one_step(w, gpuopt.AdamOptimizer(masters="float32"))
    one_step(w, optimizer := gpuopt.AdamOptimizer(masters="float32"))
    check_rounded(optimizer, w)


def run(w: Variable, optimizer: Any, first: int, number: int = 3) -> None:
    for seed in range(first, first + number):
        one_step(w, optimizer, seed)


@every_masters
@pytest.mark.parametrize("from_masters", ["float32", "remainder"])
@pytest.mark.parametrize("by_saver", [False, True], ids=["state_dict", "Saver"])
@pytest.mark.parametrize("is_made", [False, True], ids=["before", "after its first step"])
def test_a_restored_run_goes_on_to_the_bit(
    by_saver: bool, is_made: bool, from_masters: Any, masters: Any, tmp_path: Path
) -> None:
    start = normal(0, (30,), BFLOAT16)
    w, optimizer = Variable(start, name="w"), adam_with_masters(from_masters)
    run(w, optimizer, 0)
    if by_saver:
        path = gpuopt.Saver({"w": w}, optimizers=[optimizer]).save(str(tmp_path / "model"))
    kept, state = w.numpy(), optimizer.state_dict({"w": w})
    run(w, optimizer, 3)
    other, restored = Variable(np.zeros(30, BFLOAT16), name="w"), adam_with_masters(masters)
    if is_made:
        run(other, restored, 40)
    if by_saver:
        gpuopt.Saver({"w": other}, optimizers=[restored]).restore(path)
    else:
        restored.load_state_dict(state, {"w": other})
        other.assign(kept)
    run(other, restored, 3)
    np.testing.assert_array_equal(
        master_of(restored, other).numpy(), master_of(optimizer, w).numpy()
    )


def adam_with_masters(masters: Any = "float32") -> Any:
    return gpuopt.AdamOptimizer(0.01, masters=masters)


@every_kind
@pytest.mark.parametrize("by_saver", [False, True], ids=["state_dict", "Saver"])
@pytest.mark.parametrize("with_masters", [False, True], ids=["from masters", "to masters"])
@pytest.mark.parametrize("is_made", [False, True], ids=["before", "after its first step"])
def test_a_run_goes_on_with_masters_or_without(
    with_masters: bool, by_saver: bool, is_made: bool, masters: Any, dtype: Any, tmp_path: Path
) -> None:
    makers = [lambda: adam_with_masters(masters), lambda: gpuopt.AdamOptimizer(0.01)]
    old, new = makers[::-1] if with_masters else makers
    w, optimizer = Variable(normal(0, (30,), dtype), name="w"), old()
    run(w, optimizer, 0)
    other, restored = Variable(np.zeros(30, dtype), name="w"), new()
    if is_made:
        run(other, restored, 40)
    if by_saver:
        path = gpuopt.Saver({"w": w}, optimizers=[optimizer]).save(str(tmp_path / "model"))
        gpuopt.Saver({"w": other}, optimizers=[restored]).restore(path)
    else:
        restored.load_state_dict(optimizer.state_dict({"w": w}), {"w": other})
        other.assign(w.numpy())
    np.testing.assert_array_equal(other.numpy(), w.numpy())
    for name in ("m", "v"):
        slots = [each.get_slot(v, name) for each, v in ((optimizer, w), (restored, other))]
        assert slots[1].dtype == (np.float32 if with_masters else dtype)
        np.testing.assert_array_equal(slots[1].numpy(), slots[0].numpy().astype(slots[1].dtype))
    run(other, restored, 3)
    if with_masters:
        check_rounded(restored, other)
    else:
        assert master_of(restored, other) is None


@pytest.mark.parametrize("by_saver", [False, True], ids=["state_dict", "Saver"])
@pytest.mark.parametrize("kinds", [("remainder", "float32"), ("float32", "remainder")], ids=str)
def test_ties_keep_their_digits_in_a_run_with_the_other_masters(
    kinds: tuple[Any, Any], by_saver: bool, tmp_path: Path, xp: Any
) -> None:
    old, new = map(adam_with_masters, kinds)
    w, other = (variable_on(xp, np.zeros(4, BFLOAT16), name="w") for _ in range(2))
    one_step_on(xp, w, old)
    # Between two numbers of 16 bits: one kind rounds them up, the other to the even one.
    ties = np.float32([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 2.0**-120 * (1 + 2**-8)])
    master_of(old, w).assign(ties)
    if by_saver:
        path = gpuopt.Saver({"w": w}, optimizers=[old]).save(str(tmp_path / "model"))
        gpuopt.Saver({"w": other}, optimizers=[new]).restore(path)
    else:
        new.load_state_dict(old.state_dict({"w": w}), {"w": other})
        other.assign(w.numpy())
    np.testing.assert_array_equal(master_of(new, other).numpy(), ties)
    check_rounded(new, other)


def test_a_float32_run_takes_the_slots_of_one_with_masters() -> None:
    w, optimizer = Variable(normal(0, (30,), np.float16), name="w"), adam_with_masters()
    run(w, optimizer, 0)
    wide = Variable(master_of(optimizer, w).numpy(), name="w")
    plain = gpuopt.AdamOptimizer(0.01)
    plain.load_state_dict(optimizer.state_dict({"w": w}), {"w": wide})
    gradient = normal(5, (30,), np.float16)
    optimizer.apply_gradients([(gradient, w)])
    plain.apply_gradients([(gradient.astype(np.float32), wide)])
    np.testing.assert_array_equal(master_of(optimizer, w).numpy(), wide.numpy())


def test_a_state_passes_through_an_optimizer_with_masters_that_makes_no_step() -> None:
    w = Variable(np.ones(3, np.float16), name="w")
    optimizer = gpuopt.LionOptimizer(0.1)
    optimizer.apply_gradients([(np.float16([1, 2, 3]), w)])
    between = gpuopt.LionOptimizer(0.1, masters="float32")
    between.load_state_dict(optimizer.state_dict({"w": w}), {"w": w})
    again = gpuopt.LionOptimizer(0.1)
    again.load_state_dict(between.state_dict({"w": w}), {"w": w})
    expected, found = (each.get_slot(w, "m") for each in (optimizer, again))
    assert expected is not None
    assert found is not None
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found.numpy(), expected.numpy())


@pytest.mark.contract
def test_a_state_without_hyperparameters_of_masters_has_no_slot_of_that_name() -> None:
    w, optimizer = Variable(np.ones(3, np.float16), name="w"), gpuopt.AdamOptimizer()
    one_step(w, optimizer)
    state = optimizer.state_dict({"w": w})
    state["slots"]["master"] = {"w": np.ones(3, np.float32)}
    with pytest.raises(ValueError, match='has a slot "master"'):
        optimizer.load_state_dict(state, {"w": w})
    keeping = adam_with_masters()
    state["slots"]["master"] = {"w": np.ones(4, np.float32)}
    with pytest.raises(ValueError, match='slot "master" of "w" has shape'):
        keeping.load_state_dict(state, {"w": w})


def test_rows_that_come_and_go_keep_their_masters(xp: Any) -> None:
    table, optimizer = variable_on(xp, normal(0, (6, 4), np.float16)), adam_with_masters()
    run(table, optimizer, 0)
    before = master_of(optimizer, table).numpy()
    rows = gpuopt.rows(table)
    rows.keep([4, 1, 2])
    np.testing.assert_array_equal(master_of(optimizer, table).numpy(), before[[4, 1, 2]])
    rows.append(np.full((2, 4), 0.1, np.float16))
    expected = np.float32(np.float16(0.1))
    assert (master_of(optimizer, table).numpy()[3:] == expected).all()
    rows.append(np.full((1, 4), 0.2, np.float16), state_of=[0])
    assert (master_of(optimizer, table).numpy()[5] == np.float32(np.float16(0.2))).all()
    m = optimizer.get_slot(table, "m").numpy()
    np.testing.assert_array_equal(m[5], m[0])
    check_rounded(optimizer, table)
    table[0] = 7  # still followed
    assert (master_of(optimizer, table).numpy()[0] == 7).all()
    rows.reset([1])
    check_rounded(optimizer, table)
    run(table, optimizer, 3)
    check_rounded(optimizer, table)


@every_kind
def test_averages_are_of_the_variable(masters: Any, dtype: Any) -> None:
    w, optimizer = Variable(normal(0, (30,), dtype)), adam_with_masters(masters)
    average = gpuopt.ExponentialMovingAverage(0.5)
    run(w, optimizer, 0)
    average.apply([w])
    run(w, optimizer, 3)
    average.apply([w])
    w.assign(average.average(w).numpy())
    check_rounded(optimizer, w)


@every_masters
def test_each_copy_of_a_mirrored_variable_has_a_master(masters: Any) -> None:
    strategy = gpuopt.MirroredStrategy(["cpu", "cpu"])
    w = strategy.variable(np.ones(8, BFLOAT16), name="w")
    alone, optimizer = Variable(np.ones(8, BFLOAT16)), adam_with_masters(masters)
    gradients = [normal(seed, (8,), BFLOAT16) for seed in (1, 2)]
    strategy.run(
        lambda gradient: optimizer.apply_gradients([(gradient, w.local)]),
        (gpuopt.distributed.PerReplica(gradients),),
    )
    single = adam_with_masters(masters)
    single.apply_gradients([(gradients[0] + gradients[1], alone)])
    for copy in w.replicas:
        expected = master_of(single, alone).numpy()
        np.testing.assert_array_equal(master_of(optimizer, copy).numpy(), expected)
        check_rounded(optimizer, copy)
    w.assign(np.zeros(8, BFLOAT16))
    for copy in w.replicas:
        assert (master_of(optimizer, copy).numpy() == 0).all()


@every_masters
def test_towers_move_a_master(masters: Any) -> None:
    w, inner = Variable(np.ones(8, BFLOAT16)), adam_with_masters(masters)
    tower = gpuopt.TowerOptimizer(inner)

    def model(factors: Any) -> float:
        tower.minimize(lambda: (w * factors).sum(), var_list=[w])
        return 0.0

    train = gpuopt.replicate(model, gpuopt.distributed.Reduction.SUM, ["cpu", "cpu"])
    for seed in range(3):
        train(normal(seed, (2, 8), BFLOAT16))
    check_rounded(inner, w)
    assert (master_of(inner, w).numpy() != w.numpy()).any()


@pytest.mark.contract
def test_torch_keeps_no_masters() -> None:
    pytest.importorskip("torch")
    w, optimizer = Variable(np.ones(8, np.float16)), gpuopt.TorchAdamWOptimizer(masters="float32")
    one_step(w, optimizer)
    with pytest.raises(ValueError, match="torch's optimizers keep no master copies"):
        gpuopt.optimizer_to_torch(optimizer, [w])


def test_a_remainder_takes_two_bytes_and_its_master_is_made_for_who_looks() -> None:
    w, optimizer = Variable(normal(0, (40,), BFLOAT16)), adam_with_masters("remainder")
    run(w, optimizer, 0)
    master = master_of(optimizer, w)
    assert master.unread_storage.strides == (0,)
    assert w.identity.master_pair.remainder.nbytes == 2 * w.size
    seen = master.numpy()
    assert (split(seen)[1] == w.identity.master_pair.remainder).all()
    run(w, optimizer, 3, 1)
    assert master.unread_storage.strides == (0,)


def test_a_loss_reads_the_numbers_of_a_master_copy() -> None:
    w, optimizer = Variable(np.ones(3, BFLOAT16)), adam_with_masters("remainder")
    one_step(w, optimizer)
    master, x = master_of(optimizer, w), Variable(np.ones(3, np.float32))
    numbers = master.numpy()
    [(of_x, _), (of_master, _)] = optimizer.compute_gradients(
        lambda: (x * master * master).sum(), var_list=[x, master]
    )
    [(by_constant, _)] = optimizer.compute_gradients(lambda: (x * master).sum(), var_list=[x])
    np.testing.assert_array_equal(of_x, numbers * numbers)
    np.testing.assert_array_equal(of_master, numbers + numbers)
    np.testing.assert_array_equal(by_constant, numbers)


def test_a_function_of_autograd_reads_the_numbers_of_a_master_copy() -> None:
    w, optimizer = Variable(np.ones(3, BFLOAT16)), adam_with_masters("remainder")
    one_step(w, optimizer)
    master = master_of(optimizer, w)
    found = elementwise_grad(lambda x: anp.multiply(x, master))(np.ones(3, np.float32))
    np.testing.assert_array_equal(found, master.numpy())


def test_a_loss_in_torch_reads_the_numbers_of_a_master_copy() -> None:
    pytest.importorskip("torch")
    w, optimizer = Variable(np.ones(3, BFLOAT16)), adam_with_masters("remainder")
    one_step(w, optimizer)
    master, x = master_of(optimizer, w), Variable(np.ones(3, np.float32))
    loss = gpuopt.with_torch(lambda: (x.value() * master.value()).sum())
    [(of_x, _)] = optimizer.compute_gradients(loss, var_list=[x])
    np.testing.assert_array_equal(of_x, master.numpy())


@pytest.mark.contract
def test_a_step_of_another_optimizer_on_a_remainders_master_is_refused() -> None:
    class Hook(gpuopt.Optimizer):
        def __init__(self) -> None:
            super().__init__(False, "Hook")

        def _apply_dense(self, grad: Any, var: Variable) -> None:
            var.assign_sub(grad)

    w, optimizer = Variable(np.ones((3, 2), BFLOAT16), name="w"), adam_with_masters("remainder")
    one_step(w, optimizer)
    master, x = master_of(optimizer, w), Variable(np.ones((3, 2), np.float32))
    gradient, before = np.ones((3, 2), np.float32), master.numpy()
    for each in (gradient, IndexedSlices(gradient[:1], np.array([0]))):
        for other in (Hook(), gpuopt.AdamOptimizer()):
            with pytest.raises(ValueError, match=r'"w/Adam.*" is the master copy of "w"'):
                other.apply_gradients([(gradient, x), (each, master)])
            assert other.variables() == []
    assert (x.numpy() == 1).all()
    np.testing.assert_array_equal(master.numpy(), before)
    one_step(w, optimizer)


def test_a_master_in_halves_is_assigned_before_it_has_a_weight() -> None:
    master = SplitMaster(np.ones(3, np.float32), name="alone")
    master[1] = 2
    np.testing.assert_array_equal(master.numpy(), [1, 2, 1])


def test_weights_that_others_have_rounded_half_to_even_keep_their_master() -> None:
    w, optimizer = Variable(np.ones(3, BFLOAT16)), adam_with_masters("remainder")
    one_step(w, optimizer)
    tie = np.float32(1 + 2.0**-8)  # between 1 and 1 + 2 ** -7
    master_of(optimizer, w).assign(np.full(3, tie))
    np.testing.assert_array_equal(w.numpy().astype(np.float32), 1 + 2.0**-7)
    w.assign(np.full(3, tie).astype(BFLOAT16))
    np.testing.assert_array_equal(master_of(optimizer, w).numpy(), tie)


def test_nan_and_infinity_pass_between_a_variable_and_its_remainder() -> None:
    w, optimizer = Variable(np.ones(4, BFLOAT16)), adam_with_masters("remainder")
    one_step(w, optimizer)
    master = master_of(optimizer, w)
    w.assign(np.asarray([np.nan, np.inf, -0.0, 1], BFLOAT16))
    np.testing.assert_array_equal(master.numpy(), [np.nan, np.inf, 0, 1])
    last_nan = np.uint32(0x7FFFFFFF).view(np.float32)
    master.assign(np.float32([3.4e38, last_nan, 1, -np.inf]))
    np.testing.assert_array_equal(w.numpy().astype(np.float32)[1:], [np.nan, 1, -np.inf])
    one_step(w, optimizer)
    np.testing.assert_array_equal(np.isnan(master.numpy()), [False, True, False, False])


def test_the_remainder_goes_with_its_variable() -> None:
    w, optimizer = Variable(np.ones(4, BFLOAT16)), adam_with_masters("remainder")
    one_step(w, optimizer)
    pair = weakref.ref(w.identity.master_pair)
    del w
    assert pair() is None


def test_averages_of_master_copies_have_a_saver_of_their_own_type(tmp_path: Path) -> None:
    averages = gpuopt.ExponentialMovingAverage(0.5)
    w = Variable(np.ones(3, np.float16), name="w")
    optimizer = gpuopt.AdamOptimizer(masters="float32", averages=averages)
    for _ in range(2):
        optimizer.apply_gradients([(np.ones(3, np.float16), w)])
    average = averages.average(w)
    assert average is not None
    kept = average.numpy()
    path = gpuopt.Saver([w, average], optimizers=[]).save(str(tmp_path / "model"))
    average.assign(0 * kept)
    gpuopt.Saver([w, average], optimizers=[]).restore(path)
    np.testing.assert_array_equal(average.numpy(), kept)


@pytest.mark.parametrize("names", [["w", "w/ExponentialMovingAverage"], ["a", "b"]], ids=str)
def test_averages_are_swapped_with_16_bit_variables(names: list[str], tmp_path: Path) -> None:
    averages = gpuopt.ExponentialMovingAverage(0.75)
    w = Variable(np.full(3, 1, BFLOAT16), name="w")
    [average] = averages.track([w])
    average.assign(np.full(3, 1.2345, np.float32))
    swapping = SwappingSaver(averages, dict(zip(names, [w, average], strict=True)))
    path = swapping.save(str(tmp_path / "model"))
    rounded = np.full(3, 1.2345, BFLOAT16)
    weights = Variable(np.zeros(3, BFLOAT16))
    gpuopt.Saver({names[0]: weights}, optimizers=[]).restore(path)
    assert weights.numpy().tolist() == rounded.tolist()
    w.assign(np.zeros(3, BFLOAT16))
    average.assign(np.zeros(3, np.float32))
    swapping.restore(path)
    assert w.numpy().tolist() == [1, 1, 1]
    assert average.numpy().tolist() == rounded.tolist()


@pytest.mark.parametrize("given", [np.float32, np.dtype("float32")], ids=repr)
def test_the_type_itself_is_as_good_as_its_name(given: Any) -> None:
    w, optimizer = Variable(np.ones(4, BFLOAT16)), gpuopt.AdamOptimizer(masters=given)
    one_step(w, optimizer)
    assert master_of(optimizer, w).dtype == np.float32
    assert optimizer.state_dict({"w": w})["hyperparameters"]["masters"] == "float32"


def train_with_averages(dtype: Any, masters: Any) -> tuple[Variable, Any]:
    averages = gpuopt.ExponentialMovingAverage(0.75)
    w = Variable(normal(0, (4, 3), dtype), name="w")
    optimizer = gpuopt.AdamOptimizer(0.1, masters=masters, averages=averages)
    for step in range(3):
        optimizer.apply_gradients([(normal(step, (4, 3), dtype), w)])
    return w, averages


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("masters", [("float32", None), (None, "float32")], ids=str)
@pytest.mark.parametrize("way", ["restore", "attach", "as weights"])
def test_averages_are_restored_with_masters_or_without(
    dtype: Any, masters: tuple[Any, Any], way: str, tmp_path: Path
) -> None:
    there, here = masters
    w, averages = train_with_averages(dtype, there)
    saved = averages.average(w).numpy()
    path = gpuopt.Saver([w, averages.average(w)], optimizers=[]).save(str(tmp_path / "model"))
    del w, averages
    gc.collect()
    w, averages = train_with_averages(dtype, here)
    restored = average = averages.average(w)
    if way == "restore":
        gpuopt.Saver([w, average], optimizers=[]).restore(path)
    elif way == "attach":
        saver = gpuopt.Saver([w], optimizers=[])
        saver.restore(path, deferred=True)
        saver.attach([average])
    else:
        gpuopt.Saver({averages.average_name(w): w}, optimizers=[]).restore(path)
        restored = w
    assert restored.dtype == (np.float32 if restored is average else dtype)
    np.testing.assert_array_equal(restored.numpy(), saved.astype(restored.dtype))


@pytest.mark.contract
def test_another_variable_is_not_restored_in_another_type(tmp_path: Path) -> None:
    for dtypes in [(np.float32, BFLOAT16), (BFLOAT16, np.float32), (np.float32, np.int32)]:
        there, here = (Variable(np.ones(3, dtype)) for dtype in dtypes)
        path = gpuopt.Saver({"w": there}, optimizers=[]).save(str(tmp_path / "model"))
        with pytest.raises(gpuopt.CheckpointError, match='"w" has dtype'):
            gpuopt.Saver({"w": here}, optimizers=[]).restore(path)


# On devices


def after_steps(
    xp: Any, make: Callable[..., Any], masters: Any, dtype: Any, **options: Any
) -> list[np.ndarray]:
    """Makes three steps, and an assignment in between; returns the variables and all slots."""
    shapes = [(), (3,), (40,), (5, 3), (0,), (3000,)]
    variables = [
        variable_on(xp, normal(i, shape, dtype), name=f"w{i}") for i, shape in enumerate(shapes)
    ]
    table = variable_on(xp, normal(9, (40, 12), dtype), name="table")
    optimizer = make(masters=masters, **options)
    for step in range(3):
        pairs = [
            (xp.asarray(normal(10 * step + i, v.shape, dtype)), v) for i, v in enumerate(variables)
        ]
        rows = np.random.default_rng(step).integers(0, 40, 100)
        values = xp.asarray(normal(step, (100, 12), dtype))
        optimizer.apply_gradients([*pairs, (IndexedSlices(values, xp.asarray(rows)), table)])
        variables[2].assign_add(xp.asarray(np.ones(40, dtype)))
    written = [*variables, table]
    slots = [optimizer.get_slot(v, name) for v in written for name in array_slots(optimizer)]
    for each in written:
        check_rounded(optimizer, each)
    return [each.numpy() for each in slots]


@pytest.mark.parametrize(
    ("name", "masters", "dtype"),
    # The loops around a rule depend on the types, and not on the rule.
    [
        ("adam", "float32", DTYPES[0]),
        ("adam", "remainder", DTYPES[1]),
        ("lamb", "remainder", DTYPES[1]),
        *(
            (name, "float32", DTYPES[1])
            for name in ("adam", "adam-w", "momentum", "lamb", "row-wise")
        ),
    ],
    ids=str,
)
@pytest.mark.one_in(3)
def test_every_device_makes_the_same_steps(name: str, masters: Any, dtype: Any, xp: Any) -> None:
    groups = [ParameterGroup("w[34]", learning_rate=0.5), ParameterGroup("w5", clip_value=0.25)]
    for options in ({}, {"clip_norm": 2.0, "groups": groups}):
        got, expected = (
            after_steps(m, OPTIMIZERS[name], masters, dtype, **options) for m in (xp, np)
        )
        for mine, theirs in zip(got, expected, strict=True):
            assert mine.dtype == theirs.dtype == np.float32
            np.testing.assert_allclose(mine, theirs, rtol=3e-6, atol=3e-6)


@pytest.mark.emulator
@pytest.mark.parametrize("slot_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("is_averaged", [False, True], ids=["", "averaged"])
@pytest.mark.parametrize("masters", ["float32", "remainder"])
def test_a_step_is_one_launch_and_the_host_waits_for_nothing(
    masters: Any, is_averaged: bool, slot_dtype: Any, emulated_gpus: list[EmulatorLauncher]
) -> None:
    if is_averaged and slot_dtype is not None:
        pytest.skip("averages are moved after the update then")
    w = Variable(np.ones(3000, DTYPES[1]), device="gpu:0")
    averages = gpuopt.ExponentialMovingAverage(0.5) if is_averaged else None
    optimizer = gpuopt.AdamOptimizer(
        0.01, masters=masters, averages=averages, slot_dtype=slot_dtype
    )
    gradient = fake_cupy.asarray(np.ones(3000, DTYPES[1]))
    for _ in range(3):
        launches, waits = emulated_gpus[0].launches, fake_cupy.counts.synchronisations
        optimizer.apply_gradients([(gradient, w)])
    assert emulated_gpus[0].launches - launches == 1
    assert fake_cupy.counts.synchronisations == waits


def step_and_read(optimizer: Any, gradient: Any, variable: Variable) -> None:
    """A GPU finds a bad row after the host has gone on."""
    optimizer.apply_gradients([(gradient, variable)])
    variable.numpy()


def test_a_bad_row_changes_neither_variable_nor_master(xp: Any) -> None:
    table, optimizer = variable_on(xp, normal(0, (6, 4), np.float16)), adam_with_masters()
    values = xp.asarray(normal(1, (2, 4), np.float16))
    optimizer.apply_gradients([(IndexedSlices(values, xp.asarray(np.array([1, 2]))), table)])
    before = optimizer.get_slot(table, "master").numpy(), table.numpy()
    refused = IndexedSlices(values, xp.asarray(np.array([1, 6])))
    with pytest.raises(IndexError):
        step_and_read(optimizer, refused, table)
    after = optimizer.get_slot(table, "master").numpy(), table.numpy()
    for mine, old in zip(after, before, strict=True):
        np.testing.assert_array_equal(mine, old)
