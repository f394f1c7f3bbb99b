"""Row-wise Adagrad and Adam: one number for each row, in every place and type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
import textbook
from dtypes import every_dtype
from each_device import variable_on

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable, backends
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.device import Device
from gpuopt.distributed import PerReplica
from gpuopt.optimizers.base import RuleOptimizer
from gpuopt.optimizers.gradient_descent import gradient_descent

CLASSES: dict[str, Any] = {
    "row_wise_adagrad": gpuopt.RowWiseAdagradOptimizer,
    "partial_row_wise_adam": gpuopt.PartialRowWiseAdamOptimizer,
}
# An epsilon beside which the smallest mean square of 16 bits may be zero.
NUMBERS: dict[str, dict[str, Any]] = {
    "row_wise_adagrad": {"learning_rate": 0.125, "epsilon": 0.25, "weight_decay": 0.25},
    "partial_row_wise_adam": {
        "learning_rate": 0.125,
        "beta1": 0.5,
        "beta2": 0.75,
        "epsilon": 0.25,
        "weight_decay": 0.25,
    },
}
ROW_SLOT = {"row_wise_adagrad": "accumulator", "partial_row_wise_adam": "v"}
each_optimizer = pytest.mark.parametrize("name", CLASSES)

# A gradient is an array, or (values, rows).
Gradient = Any


def trained(name: str, start: np.ndarray, gradients: Sequence[Gradient], **numbers: Any) -> Any:
    """Returns what the textbook makes of a table, row by row."""
    table = np.atleast_1d(start.astype(np.float64))
    states = []
    for row in range(len(table)):
        history = []
        for step, gradient in enumerate(gradients, 1):
            if isinstance(gradient, tuple):
                values, rows = gradient
                if row in rows:
                    history.append((step, values[rows == row].astype(np.float64).sum(0)[None]))
            else:
                history.append((step, np.atleast_1d(gradient).astype(np.float64)[row][None]))
        given = {**NUMBERS[name], **numbers}
        states.append(getattr(textbook, name)(table[row : row + 1], history, **given))
    return {key: np.concatenate([each[key] for each in states]) for key in states[0]}


def check(optimizer: Any, variable: Variable, expected: Any, in_eps: float = 16) -> None:
    tolerance = in_eps * float(ml_dtypes.finfo(variable.dtype).eps)
    slots = {name: optimizer.get_slot(variable, name) for name in optimizer.get_slot_names()}
    for name, got in {"var": variable, **slots}.items():
        np.testing.assert_allclose(
            np.atleast_1d(got.numpy()).astype(np.float64),
            expected[name],
            rtol=tolerance,
            atol=tolerance,
            err_msg=name,
        )


def given(gradient: Gradient, xp: Any = np) -> Any:
    if isinstance(gradient, tuple):
        return IndexedSlices(*map(xp.asarray, gradient))
    return xp.asarray(gradient)


def sparse(rng: Any, shape: tuple[int, ...], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    rows = rng.integers(0, shape[0], size=1 + shape[0] // 2)
    return rng.normal(size=(rows.size, *shape[1:])).astype(dtype), rows


@pytest.mark.parametrize("shape", [(), (1,), (9,), (7, 3), (70, 8), (4, 5, 3), (3, 1100)], ids=str)
@every_dtype
@each_optimizer
@pytest.mark.one_in(6)
def test_steps_are_the_textbooks(name: str, dtype: Any, shape: tuple[int, ...], xp: Any) -> None:
    rng = np.random.default_rng(1)
    start = np.asarray(rng.normal(size=shape)).astype(dtype)
    gradients: list[Gradient] = [np.asarray(rng.normal(size=shape)).astype(dtype) for _ in range(3)]
    gradients[2][...] = 0
    if shape:
        gradients[1] = sparse(rng, shape, dtype)
    w = variable_on(xp, start)
    optimizer = CLASSES[name](**NUMBERS[name])
    for gradient in gradients:
        optimizer.apply_gradients([(given(gradient, xp), w)])
    check(optimizer, w, trained(name, start, gradients))
    slot = optimizer.get_slot(w, ROW_SLOT[name])
    assert slot.shape == (*shape[:1], *[1] * (len(shape) - 1))
    assert slot.dtype == dtype


@each_optimizer
def test_twenty_steps_in_float64_end_where_the_formula_does(name: str, xp: Any) -> None:
    rng = np.random.default_rng(2)
    start = rng.normal(size=(30, 6))
    gradients = [
        sparse(rng, start.shape, np.float64) if t % 2 else rng.normal(size=start.shape)
        for t in range(20)
    ]
    w, optimizer = variable_on(xp, start), CLASSES[name]()
    for gradient in gradients:
        optimizer.apply_gradients([(given(gradient, xp), w)])
    defaults = {"learning_rate": 0.01, "epsilon": 1e-8, "weight_decay": 0.0}
    if name == "partial_row_wise_adam":
        defaults |= {"beta1": 0.9, "beta2": 0.999}
    expected = trained(name, start, gradients, **defaults)["var"]
    assert np.abs(w.numpy() - expected).max() < 1e-12 * np.abs(expected - start).max()


def test_the_accumulator_starts_as_asked(xp: Any) -> None:
    start, gradient = np.random.default_rng(3).normal(size=(2, 5, 3))
    w = variable_on(xp, start)
    optimizer = gpuopt.RowWiseAdagradOptimizer(
        **NUMBERS["row_wise_adagrad"], initial_accumulator_value=0.5
    )
    optimizer.apply_gradients([(given(gradient, xp), w)])
    expected = trained("row_wise_adagrad", start, [gradient], initial_accumulator_value=0.5)
    check(optimizer, w, expected)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (-1.0, ValueError, r"must be at least 0, got -1\.0"),
        (np.nan, ValueError, "must be at least 0, got nan"),
        ("much", TypeError, "must be a number, .*'much'"),
        (None, TypeError, "must be a number, .*None"),
        (lambda: 1.0, TypeError, "must be a number, got <function"),
        (np.ones(2), ValueError, "must be a scalar, got an array"),
    ],
    ids=["negative", "NaN", "text", "None", "function", "array"],
)
def test_an_accumulator_that_starts_with_no_number_from_0_is_refused(
    value: Any, error: type[Exception], words: str
) -> None:
    for of_class in (gpuopt.RowWiseAdagradOptimizer, gpuopt.FtrlOptimizer):
        with pytest.raises(error, match=f"initial_accumulator_value {words}"):
            of_class(learning_rate=0.5, initial_accumulator_value=value)


@each_optimizer
def test_tables_of_all_widths_step_together_each_by_its_group(name: str, xp: Any) -> None:
    rng = np.random.default_rng(4)
    shapes = {"wide": (20, 70), "bias": (9,), "tall": (3000, 4), "no rows": (0, 3), "scale": ()}
    shapes |= {"narrow": (5, 4), "no columns": (5, 0)}
    starts = {key: np.asarray(rng.normal(size=s)).astype(np.float32) for key, s in shapes.items()}
    variables = {key: variable_on(xp, start, name=key) for key, start in starts.items()}
    groups = [ParameterGroup("bias|scale", weight_decay=0.0), ParameterGroup("tall", epsilon=1.0)]
    own = {key: {"weight_decay": 0.0} for key in ("bias", "scale")} | {"tall": {"epsilon": 1.0}}
    optimizer = CLASSES[name](**NUMBERS[name], groups=groups)
    steps: list[dict[str, Gradient]] = []
    for step in range(3):
        of_step: dict[str, Gradient] = {}
        for key, shape in shapes.items():
            is_sparse = step == 1 and len(shape) == 2 and all(shape)
            dense = np.asarray(rng.normal(size=shape)).astype(np.float32)
            of_step[key] = sparse(rng, shape, np.float32) if is_sparse else dense
        optimizer.apply_gradients([(given(of_step[key], xp), variables[key]) for key in shapes])
        steps.append(of_step)
    for key, start in starts.items():
        if start.size:
            history = [of_step[key] for of_step in steps]
            check(optimizer, variables[key], trained(name, start, history, **own.get(key, {})))


def test_more_groups_than_are_passed_by_value_have_their_own_epsilon(xp: Any) -> None:
    rng = np.random.default_rng(5)
    starts = rng.normal(size=(70, 2, 3)).astype(np.float32)
    variables = [variable_on(xp, start, name=f"w{i}") for i, start in enumerate(starts)]
    numbers = NUMBERS["row_wise_adagrad"]
    optimizer = gpuopt.RowWiseAdagradOptimizer(
        **numbers,
        groups=[
            ParameterGroup(variables=[variable], epsilon=0.1 + i)
            for i, variable in enumerate(variables)
        ],
    )
    dense = rng.normal(size=(2, 3)).astype(np.float32)
    rows = rng.normal(size=(1, 3)).astype(np.float32), np.array([1])
    for gradient in (dense, rows):
        optimizer.apply_gradients([(given(gradient, xp), variable) for variable in variables])
    for i, (start, variable) in enumerate(zip(starts, variables, strict=True)):
        expected = trained("row_wise_adagrad", start, [dense, rows], epsilon=0.1 + i)
        check(optimizer, variable, expected)


@each_optimizer
def test_a_sparse_gradient_of_all_rows_makes_the_step_of_a_dense_one(name: str, xp: Any) -> None:
    start, gradient = np.random.default_rng(6).normal(size=(2, 300, 24)).astype(np.float32)
    tables = [variable_on(xp, start) for _ in range(2)]
    optimizers = [CLASSES[name](**NUMBERS[name]) for _ in range(2)]
    order = np.random.default_rng(7).permutation(300)
    for _ in range(2):
        optimizers[0].apply_gradients([(given(gradient, xp), tables[0])])
        optimizers[1].apply_gradients([(given((gradient[order], order), xp), tables[1])])
    assert np.array_equal(tables[0].numpy(), tables[1].numpy())
    slots = [o.get_slot(w, ROW_SLOT[name]) for o, w in zip(optimizers, tables, strict=True)]
    assert np.array_equal(slots[0].numpy(), slots[1].numpy())


@each_optimizer
def test_rows_out_of_range_change_nothing(name: str, xp: Any) -> None:
    start = np.random.default_rng(8).normal(size=(4, 2)).astype(np.float32)
    table, w = variable_on(xp, start), variable_on(xp, start)
    optimizer = CLASSES[name](**NUMBERS[name])
    good, bad = ((np.ones((1, 2), np.float32), np.array([row])) for row in (1, 4))
    optimizer.apply_gradients([(given(good, xp), table), (given(start, xp), w)])
    arrays = [table, w, *(optimizer.get_slot(each, ROW_SLOT[name]) for each in (table, w))]
    before = [each.numpy() for each in arrays]

    def step() -> None:
        optimizer.apply_gradients([(given(bad, xp), table), (given(start, xp), w)])
        table.numpy()

    with pytest.raises(IndexError, match="4"):
        step()
    assert all(map(np.array_equal, before, [each.numpy() for each in arrays]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "every_cpu_form", ["plain", pytest.param("compiled", marks=pytest.mark.cxx)], indirect=True
)
@each_optimizer
def test_rows_without_columns_stay_as_they_are(name: str, every_cpu_form: None) -> None:
    table, optimizer = Variable(np.ones((4, 0), np.float32)), CLASSES[name](**NUMBERS[name])
    gradient = IndexedSlices(np.ones((3, 0), np.float32), [1, 1, 2])
    optimizer.apply_gradients([(gradient, table)])
    assert not optimizer.get_slot(table, ROW_SLOT[name]).numpy().any()


@each_optimizer
def test_variables_that_do_not_decay_are_listed(name: str) -> None:
    starts = np.random.default_rng(9).normal(size=(2, 4, 2))
    decaying, other = variables = [Variable(start) for start in starts]
    optimizer = CLASSES[name](**NUMBERS[name])
    gradient = np.ones((4, 2))
    pairs = [(gradient, each) for each in variables]
    optimizer.apply_gradients(pairs, decay_var_list=[decaying])
    check(optimizer, decaying, trained(name, starts[0], [gradient]))
    check(optimizer, other, trained(name, starts[1], [gradient], weight_decay=0.0))


@each_optimizer
def test_rows_come_and_go_with_their_numbers(name: str, xp: Any) -> None:
    rng = np.random.default_rng(10)
    optimizer = CLASSES[name](**NUMBERS[name])
    # Each row is a table of one row beside the table.
    table = variable_on(xp, rng.normal(size=(4, 3)).astype(np.float32))
    singles = [variable_on(xp, row[None]) for row in table.numpy()]

    def train() -> None:
        gradient = rng.normal(size=table.shape).astype(np.float32)
        pairs = [(given(gradient, xp), table)]
        pairs += [
            (given(row[None], xp), single) for row, single in zip(gradient, singles, strict=True)
        ]
        optimizer.apply_gradients(pairs)

    train()
    added = rng.normal(size=(2, 3)).astype(np.float32)
    gpuopt.rows(table).append(xp.asarray(added[:1]))
    gpuopt.rows(table).append(xp.asarray(added[1:]), state_of=[0])
    singles.append(variable_on(xp, added[:1]))
    for slot_name in optimizer.get_slot_names():
        got = optimizer.get_slot(table, slot_name).numpy()
        assert np.array_equal(got[5], got[0])
        assert not got[4].any()
    gpuopt.rows(table).remove([5])
    train()
    gpuopt.rows(table).keep([4, 0, 3])
    singles = [singles[row] for row in (4, 0, 3)]
    gpuopt.rows(table).reset([1], xp.asarray(added[:1]))
    singles[1] = variable_on(xp, added[:1])
    train()
    for array in ("the variable", *optimizer.get_slot_names()):
        every = [
            each.numpy() if array == "the variable" else optimizer.get_slot(each, array).numpy()
            for each in (table, *singles)
        ]
        tolerance = 8 * float(np.finfo(np.float32).eps)
        np.testing.assert_allclose(
            every[0], np.concatenate(every[1:]), rtol=tolerance, err_msg=array
        )


def renamed(state: Any, name: str) -> Any:
    return {**state, "slots": {key: {name: of["w"]} for key, of in state["slots"].items()}}


@pytest.mark.contract
@each_optimizer
def test_a_state_goes_on_from_a_checkpoint(name: str, tmp_path: Path, xp: Any) -> None:
    rng = np.random.default_rng(11)
    start, *gradients = rng.normal(size=(4, 5, 3)).astype(np.float32)
    w = variable_on(xp, start, name="w")
    optimizer = CLASSES[name](**NUMBERS[name])
    optimizer.apply_gradients([(given(gradients[0], xp), w)])
    path = gpuopt.Saver([w], optimizers=[optimizer]).save(str(tmp_path / "model"))
    state = optimizer.state_dict({"w": w})
    for gradient in gradients[1:]:
        optimizer.apply_gradients([(given(gradient, xp), w)])
    expected = w.numpy()

    def go_on(again: Any, other: Variable) -> None:
        for gradient in gradients[1:]:
            again.apply_gradients([(given(gradient, xp), other)])
        assert np.array_equal(other.numpy(), expected)

    del optimizer
    restored = CLASSES[name](**NUMBERS[name])
    gpuopt.Saver([w], optimizers=[restored]).restore(path)
    values = w.numpy()
    go_on(restored, w)
    loaded, waiting = (CLASSES[name](**NUMBERS[name]) for _ in range(2))
    here = variable_on(xp, values, name="here")
    loaded.load_state_dict(renamed(state, "here"), {"here": here})
    go_on(loaded, here)
    waiting.load_state_dict(renamed(state, "later"), {})
    go_on(waiting, variable_on(xp, values, name="later"))


@pytest.mark.contract
@each_optimizer
def test_a_state_of_other_shapes_is_refused(name: str) -> None:
    w = Variable(np.ones((5, 3), np.float32), name="w")
    optimizer, slot = CLASSES[name](), ROW_SLOT[name]
    optimizer.apply_gradients([(np.ones((5, 3), np.float32), w)])
    state = optimizer.state_dict({"w": w})

    def with_slot(value: np.ndarray) -> Any:
        return {**state, "slots": {**state["slots"], slot: {"w": value}}}

    per_element = with_slot(np.ones((5, 3), np.float32))
    words = rf'slot "{slot}" of "w" has shape \(5, 1\); the saved value has shape \(5, 3\)'
    with pytest.raises(ValueError, match=words):
        CLASSES[name]().load_state_dict(per_element, {"w": w})
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(per_element, {"w": w})
    if len(state["slots"]) > 1:  # of a variable that does not exist yet
        with pytest.raises(ValueError, match=words):
            CLASSES[name]().load_state_dict(per_element, {})
    with pytest.raises(ValueError, match=rf'slot "{slot}" of "w" holds numbers from 0'):
        optimizer.load_state_dict(with_slot(np.full((5, 1), -1, np.float32)), {"w": w})


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@each_optimizer
def test_the_host_waits_for_no_row(name: str) -> None:
    variables = [Variable(np.ones(shape, np.float32), device="gpu:0") for shape in ((9, 4), (50,))]
    pairs = [(fake_cupy.asarray(np.ones(v.shape, np.float32)), v) for v in variables]
    optimizer = CLASSES[name](**NUMBERS[name])
    optimizer.apply_gradients(pairs)
    before = fake_cupy.counts.synchronisations
    optimizer.apply_gradients(pairs)
    assert fake_cupy.counts.synchronisations == before


@each_optimizer
def test_mirrored_replicas_keep_equal_rows(name: str) -> None:
    strategy = gpuopt.MirroredStrategy(["cpu", "cpu"])
    start = np.random.default_rng(12).normal(size=(4, 3))
    gradients = [np.full((4, 3), 0.5), np.linspace(0, 1, 12).reshape(4, 3)]
    optimizer = CLASSES[name](**NUMBERS[name])
    w = strategy.variable(start, name="mirrored")
    strategy.run(
        lambda gradient: optimizer.apply_gradients([(gradient, w.local)]),
        [PerReplica(gradients)],
    )
    expected = trained(name, start, [sum(gradients)])
    for copy in w.replicas:
        check(optimizer, copy, expected)


@pytest.mark.parametrize("shape", [(300, 20), (3, 1100), (6000,), (900, 5)], ids=str)
@pytest.mark.parametrize(
    "every_cpu_form",
    ["plain", "replayed", pytest.param("compiled", marks=pytest.mark.cxx)],
    indirect=True,
)
@every_dtype
@each_optimizer
@pytest.mark.one_in(8)
def test_every_form_of_the_cpu_makes_the_same_steps(
    name: str, dtype: Any, every_cpu_form: None, shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(13)
    start = rng.normal(size=shape).astype(dtype)
    gradients = [rng.normal(size=shape).astype(dtype), sparse(rng, shape, dtype)]
    w, optimizer = Variable(start), CLASSES[name](**NUMBERS[name])
    for gradient in gradients:
        optimizer.apply_gradients([(given(gradient), w)])
    check(optimizer, w, trained(name, start, gradients))


@pytest.mark.parametrize("view", [lambda a: a[::-1], lambda a: a.T, lambda a: a[:, ::2]])
def test_arrays_of_any_strides_are_updated(view: Any, xp: Any) -> None:
    if xp is fake_cupy:
        pytest.skip("its arrays have no strides")
    start, gradient = np.random.default_rng(14).normal(size=(2, 50, 8)).astype(np.float32)
    w = view(xp.asarray(start.copy()))
    for each in (view(xp.asarray(gradient)), IndexedSlices(view(xp.asarray(gradient))[:2], [3, 3])):
        gpuopt.RowWiseAdagradOptimizer(**NUMBERS["row_wise_adagrad"]).apply_gradients([(each, w)])
    expected = trained("row_wise_adagrad", view(start), [view(gradient)])["var"]
    rows = view(gradient)[:2], np.array([3, 3])
    expected = trained("row_wise_adagrad", expected, [rows])["var"]
    np.testing.assert_allclose(w if xp is np else w.get(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "every_cpu_form",
    ["plain", "replayed", pytest.param("compiled", marks=pytest.mark.cxx)],
    indirect=True,
)
@each_optimizer
def test_a_rows_squares_are_added_up_in_the_same_order_however_they_lie(
    name: str, every_cpu_form: None
) -> None:
    # One after the other, the ones would all be lost beside the first square.
    gradient = np.ones((3, 2000), np.float32)
    gradient[:, 0] = 2.0**12
    ends = []
    for layout in (gradient, np.asfortranarray(gradient)):
        for given_so in (layout, IndexedSlices(layout, [2, 0, 1])):
            w, optimizer = Variable(np.ones_like(gradient)), CLASSES[name](**NUMBERS[name])
            optimizer.apply_gradients([(given_so, w)])
            ends.append(optimizer.get_slot(w, ROW_SLOT[name]).numpy())
    assert all(np.array_equal(ends[0], end) for end in ends[1:])


@pytest.mark.parametrize(
    "every_cpu_form", ["plain", pytest.param("compiled", marks=pytest.mark.cxx)], indirect=True
)
def test_a_gradient_in_its_variables_memory_is_read_first(every_cpu_form: None) -> None:
    start = np.random.default_rng(15).normal(size=(5000, 8)).astype(np.float32)
    for gradient in (lambda a: a[::-1], lambda a: IndexedSlices(a[::-1], np.arange(len(a)))):
        array, apart = start.copy(), Variable(start)
        optimizer = gpuopt.RowWiseAdagradOptimizer(**NUMBERS["row_wise_adagrad"])
        optimizer.apply_gradients([(gradient(array), array)])
        optimizer.apply_gradients([(gradient(start), apart)])
        assert np.array_equal(array, apart.numpy())
    memory = start.copy()
    optimizer = gpuopt.RowWiseAdagradOptimizer(**NUMBERS["row_wise_adagrad"])
    one_row_on, apart = memory[1:], Variable(start[1:])
    optimizer.apply_gradients([(memory[:-1], one_row_on)])
    optimizer.apply_gradients([(start[:-1], apart)])
    assert np.array_equal(one_row_on, apart.numpy())


WIDTHS = (1, 2, 3, 5, 8, 9, 17, 70, 1100)


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.cxx)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@each_optimizer
def test_a_tables_bits_depend_on_no_thread_chunk_or_neighbour(
    name: str, dtype: Any, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUOPT_COMPILED", str(int(is_compiled)))
    rng = np.random.default_rng(16)
    shapes = [(height, width) for width in WIDTHS for height in (1, 301)]
    starts = [rng.normal(size=shape).astype(dtype) for shape in shapes]
    gradients = [rng.normal(size=shape).astype(dtype) for shape in shapes]

    def ends(threads: int, small_elements: int, at_once: int) -> list[np.ndarray]:
        monkeypatch.setenv("GPUOPT_THREADS", str(threads))
        limits = CpuLimits(small_elements, small_elements, large_elements=0, elements_per_thread=1)
        arrays = []
        with backends.using(Device.cpu, CpuBackend(limits)):
            for first in range(0, len(starts), at_once):
                part = slice(first, first + at_once)
                tables = [Variable(start, name=f"table {i}") for i, start in enumerate(starts)][
                    part
                ]
                own = [table for i, table in enumerate(tables, first) if i % 3 == 1]
                groups = [ParameterGroup(variables=own, epsilon=1.0)] if own else []
                optimizer = CLASSES[name](**NUMBERS[name], groups=groups)
                optimizer.apply_gradients(list(zip(gradients[part], tables, strict=True)))
                slots = [optimizer.get_slot(table, ROW_SLOT[name]) for table in tables]
                arrays += [
                    each.numpy() for pair in zip(tables, slots, strict=True) for each in pair
                ]
        return arrays

    alone = ends(threads=1, small_elements=1, at_once=1)
    for threads, small_elements in [(1, 10**9), (3, 10**9), (3, 1), (7, 600)]:
        together = ends(threads, small_elements, at_once=len(shapes))
        assert all(map(np.array_equal, alone, together))


# Rules of one's own.


@gpuopt.update_rule(row_slots=("largest",))
def largest_of_rows(
    var: Any, grad: Any, largest: Any, *, learning_rate: Any, mean_square: Any
) -> None:
    largest[...] = np.maximum(largest, mean_square)
    var -= learning_rate / np.sqrt(largest) * grad


class LargestOfRowsOptimizer(RuleOptimizer):
    rule = largest_of_rows

    def __init__(self, learning_rate: Any, **common: Any) -> None:
        super().__init__(common, learning_rate=learning_rate)


def test_a_users_rule_may_have_slots_of_rows_and_decay() -> None:
    start = np.array([[1.0, 2.0], [3.0, 4.0]])
    extended = gpuopt.extend_with_decoupled_weight_decay(LargestOfRowsOptimizer)
    w, optimizer = Variable(start), extended(0.5, learning_rate=0.25)
    optimizer.apply_gradients([(np.array([[3.0, 3.0], [1.0, -1.0]]), w)])
    optimizer.apply_gradients([(IndexedSlices(np.array([[1.0, 1.0]]), [0]), w)])
    first = start * 0.5 - 0.25 * np.array([[1, 1], [1, -1]])
    expected = [first[0] * 0.5 - 0.25 / 3, first[1]]
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-12)
    assert optimizer.get_slot(w, "largest").numpy().tolist() == [[9.0], [1.0]]


def test_small_tables_of_one_width_are_updated_in_one_call() -> None:
    calls = []

    @gpuopt.update_rule(row_slots=["total"])
    def counted(var: Any, grad: Any, total: Any, *, learning_rate: Any, mean_square: Any) -> None:
        total += mean_square
        var -= learning_rate * grad

    def count(var: Any, *arrays: Any, **scalars: Any) -> None:
        if type(var) is np.ndarray:  # and not traced
            calls.append(var.shape)
        counted.apply(var, *arrays, **scalars)

    class CountedOptimizer(LargestOfRowsOptimizer):
        rule = replace(counted, apply=count)

    heights = [2, 3, 4] * 20
    tables = [Variable(np.ones((height, 5), np.float32)) for height in heights]
    biases = [Variable(np.ones(height, np.float32)) for height in heights]
    pairs = [(np.ones(each.shape, np.float32), each) for each in (*tables, *biases)]
    CountedOptimizer(0.5).apply_gradients(pairs)
    assert calls == [(180, 1), (180, 5)]
    assert all(np.all(each.numpy() == 0.5) for each in (*tables, *biases))


@pytest.mark.contract
def test_slots_of_rows_that_no_rule_can_have_are_refused() -> None:
    def apply(var: Any, grad: Any, row: Any, m: Any, *, mean_square: Any) -> None:
        var -= grad

    def without(var: Any, grad: Any, row: Any, *, learning_rate: Any) -> None:
        var -= grad

    def summed(var: Any, grad: Any, row: Any, *, total: Any, mean_square: Any) -> None:
        var -= grad

    with pytest.raises(ValueError, match=r"row_slots=\('row',\) must be the last of its slots"):
        gpuopt.update_rule(row_slots=["row"])(apply)
    with pytest.raises(ValueError, match="takes the scalar mean_square"):
        gpuopt.update_rule(row_slots=["row"])(without)
    with pytest.raises(ValueError, match="not both"):
        gpuopt.update_rule(row_slots=["row"], sums=["total"], terms=lambda *_, **__: [])(summed)
    with pytest.raises(ValueError, match=r'mixed: .*: writes numbers of elements to .* "row_m"'):

        @gpuopt.update_rule(row_slots=["row", "row_m"])
        def mixed(var: Any, grad: Any, row: Any, row_m: Any, *, mean_square: Any) -> None:
            row += mean_square
            row_m += grad
            var -= row_m / row

    with pytest.raises(ValueError, match="passive writes to none of its arrays"):

        @gpuopt.update_rule(row_slots=["row"])
        def passive(var: Any, grad: Any, row: Any, *, mean_square: Any) -> None:
            var = var - grad / row

    with pytest.raises(TypeError, match="rule largest_of_rows with slots of rows"):

        class AllRowsOptimizer(LargestOfRowsOptimizer):
            rule = largest_of_rows
            rule_of_other_rows = gradient_descent


@pytest.mark.cxx
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [1, 2, 8, 9, 16, 17, 63, 64, 80, 700])
@pytest.mark.parametrize("name", ["RowWiseAdagradOptimizer", "PartialRowWiseAdamOptimizer"])
@pytest.mark.one_in(4)
def test_a_compiler_changes_no_bit_of_a_mean_over_a_row(
    name: str, width: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = []
    for compiled in ("0", "1"):
        monkeypatch.setenv("GPUOPT_COMPILED", compiled)
        rng = np.random.default_rng(width)
        height = 70_000 // width + 1
        table = gpuopt.Variable(np.ones((height, width), dtype))
        optimizer = getattr(gpuopt, name)(0.125)
        for _ in range(2):
            rows = rng.integers(0, height, height)
            given = gpuopt.IndexedSlices(rng.normal(size=(height, width)).astype(dtype), rows)
            optimizer.apply_gradients([(given, table)])
            optimizer.apply_gradients([(rng.normal(size=table.shape).astype(dtype), table)])
        tables.append(table.numpy())
    assert np.array_equal(*tables)
