"""Rows come and go together with all that hangs on them, or not at all."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dtypes import every_dtype
from emulator.emulator import EmulatorLauncher
from forked_children import check_child, forked
from interrupt_at import Interrupt, InterruptAt
from other_thread import InThread, held

import gpuopt
from gpuopt import IndexedSlices, Variable, backends
from gpuopt.device import Device
from gpuopt.variables import variable
from gpuopt.variables.gate import between_writes, writing

START = np.arange(12, dtype=np.float64).reshape(6, 2)


class Model:
    """A table with the slots of two optimizers and an average, after a step of each."""

    def __init__(self, device: str = "cpu", value: Any = START) -> None:
        self.table = Variable(value, name="table", device=device)
        self.adam = gpuopt.AdamOptimizer(0.1)
        self.adagrad = gpuopt.AdagradOptimizer(0.1, 0.5)
        self.averages = gpuopt.ExponentialMovingAverage(0.5)
        for optimizer in (self.adam, self.adagrad):
            self.step(optimizer)
        self.averages.apply([self.table])

    def step(self, optimizer: gpuopt.Optimizer) -> None:
        optimizer.apply_gradients([(np.ones(self.table.shape, self.table.dtype), self.table)])

    def variables(self) -> list[Variable]:
        slots = [self.adam.get_slot(self.table, name) for name in ("m", "v")]
        slots += [self.adagrad.get_slot(self.table, "accumulator")]
        return [self.table, *slots, self.averages.average(self.table)]

    def values(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in self.variables()]


def assert_same(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


CHANGES: dict[str, Callable[[Any], None]] = {
    "keep": lambda rows: rows.keep([3, 1, 1]),
    "remove": lambda rows: rows.remove([True, False, False, False, False, True]),
    "append": lambda rows: rows.append(np.full((2, 2), 7)),
    "append with state": lambda rows: rows.append(np.full((2, 2), 7), state_of=[0, 3]),
    "reset": lambda rows: rows.reset([4, 0], np.full((2, 2), 7)),
}


def expected(change: str, before: list[np.ndarray]) -> list[np.ndarray]:
    if change == "keep":
        return [value[[3, 1, 1]] for value in before]
    if change == "remove":
        return [value[1:5] for value in before]
    # The value, Adam's slots, Adagrad's, the average.
    new = [np.full((2, 2), start) for start in (7, 0, 0, 0.5, 7)]
    if change == "append with state":
        new = [new[0], *(value[[0, 3]] for value in before[1:])]
    if change == "reset":
        after = [value.copy() for value in before]
        for value, rows in zip(after, new, strict=True):
            value[[4, 0]] = rows
        return after
    return [np.concatenate(pair) for pair in zip(before, new, strict=True)]


@pytest.mark.parametrize("change", CHANGES)
def test_all_that_hangs_on_a_variable_gets_the_same_rows_under_the_same_names(change: str) -> None:
    model = Model()
    before, names = model.values(), [each.name for each in model.variables()]
    CHANGES[change](gpuopt.rows(model.table))
    assert_same(model.values(), expected(change, before))
    assert [each.name for each in model.variables()] == names
    model.step(model.adam)
    model.step(model.adagrad)


@pytest.mark.emulator
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_one_launch_for_all_arrays(
    change: str, emulated_gpus: list[EmulatorLauncher]
) -> None:
    model = Model("gpu:0")
    before, launches = model.values(), emulated_gpus[0].launches
    CHANGES[change](gpuopt.rows(model.table))
    assert emulated_gpus[0].launches == launches + 1
    assert_same(model.values(), expected(change, before))


@every_dtype
@pytest.mark.parametrize("shape", [(5,), (5, 2, 3), (5, 0), (0, 4), (5, 1)], ids=str)
def test_rows_of_any_shape_and_type_come_and_go(dtype: Any, shape: tuple[int, ...]) -> None:
    value = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    model = Model(value=value)
    before, rows = model.values(), gpuopt.rows(model.table)
    first = range(min(3, shape[0]))
    rows.append(value[:2], state_of=first[:2])
    rows.keep([*range(shape[0])])
    assert_same(model.values(), before)
    rows.keep(first)
    assert_same(model.values(), [each[:3] for each in before])
    model.step(model.adam)


def test_nothing_else_of_an_optimizer_changes() -> None:
    model, other = Model(), Variable(np.zeros((6, 2)), name="other")
    model.adam.apply_gradients([(np.ones((6, 2)), other)])
    unchanged = [other, *model.adam.state.slots_of(other), *model.adam.state.others().values()]
    before = [(each.storage, each.numpy()) for each in unchanged]
    gpuopt.rows(model.table).keep([1])
    for each, (storage, value) in zip(unchanged, before, strict=True):
        assert each.storage is storage
        np.testing.assert_array_equal(each.numpy(), value)


def test_old_arrays_are_not_kept_alive() -> None:
    model = Model()
    pair = Variable(np.zeros(3), name="pair")
    for _ in range(3):  # plans of both, found by objects and by identities
        model.adam.apply_gradients([(np.ones((6, 2)), model.table), (np.ones(3), pair)])
    old = [weakref.ref(each.storage) for each in model.variables()]
    gpuopt.rows(model.table).keep([1, 2])
    gc.collect()
    assert [reference() for reference in old] == [None] * 5


def test_an_adopted_array_keeps_the_old_rows() -> None:
    array = np.zeros((3, 2))
    table = Variable(array, copy=False)
    gpuopt.rows(table).append(np.ones((1, 2)))
    table += 1
    assert (array == 0).all()
    assert table.shape == (4, 2)
    assert table.owns_memory
    gpuopt.rows(table).reset([0], np.full((1, 2), 5))
    np.testing.assert_array_equal(table.numpy()[:, 0], [5, 1, 1, 2])


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@pytest.mark.parametrize("device", ["cpu", "gpu:0"])
def test_strided_adopted_arrays_are_reset_in_place_and_copied_by_others(device: str) -> None:
    base = Variable(np.zeros((4, 6)), device=device).storage
    table = Variable(base[:, ::2], copy=False)
    gpuopt.rows(table).reset([2, 0], [[1, 2, 3], [4, 5, 6]])
    wanted = np.zeros((4, 3))
    wanted[[2, 0]] = [[1, 2, 3], [4, 5, 6]]
    np.testing.assert_array_equal(table.numpy(), wanted)
    np.testing.assert_array_equal(Variable(base).numpy()[:, ::2], wanted)
    gpuopt.rows(table).keep([2, 0])
    np.testing.assert_array_equal(table.numpy(), wanted[[2, 0]])


def test_losses_and_lookups_go_on_with_other_rows() -> None:
    table = Variable(np.ones((3, 2), np.float32), name="table")
    optimizer = gpuopt.LazyAdamOptimizer(0.1)
    for gate in (0, 1):
        height = table.shape[0]
        ids = np.array([0, height - 1])
        optimizer.minimize(
            lambda ids=ids: np.sum(gpuopt.embedding_lookup(table, ids)), gate_gradients=gate
        )
        gpuopt.rows(table).append(np.ones((2, 2), np.float32))
        assert table.shape == (height + 2, 2)
    optimizer.minimize(lambda: np.sum(table * table))


# What is refused.


def assert_refused(model: Model, error: type[Exception], match: str) -> None:
    before, arrays = model.values(), [each.storage for each in model.variables()]
    for change in CHANGES.values():
        with pytest.raises(error, match=match):
            change(gpuopt.rows(model.table))
    assert_same(model.values(), before)
    for each, array in zip(model.variables(), arrays, strict=True):
        assert each.storage is array


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (np.zeros((3, 2)), TypeError, "got ndarray of dtype float64: make one of an array"),
        (3, TypeError, "rows come and go in a gpuopt.Variable, got int"),
    ],
    ids=["raw array", "number"],
)
def test_what_is_no_variable_is_refused(given: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        gpuopt.rows(given)


def test_a_scalar_has_no_rows() -> None:
    with pytest.raises(ValueError, match='"scalar" is a scalar, which has no rows'):
        gpuopt.rows(Variable(1.0, name="scalar"))


def test_slots_and_averages_do_not_change_alone() -> None:
    for each in Model().variables()[1:]:
        with pytest.raises(ValueError, match=f'"{each.name}" is a slot or an average'):
            gpuopt.rows(each)


@pytest.mark.parametrize(
    ("rows", "error", "match"),
    [
        ([0, 6], IndexError, r'rows of "table" to .+: \[1\] = 6 is not in \[0, 6\)'),
        ([-1], IndexError, r"\[0\] = -1 is not in \[0, 6\)"),
        (np.uint64([2**63 + 1]), IndexError, "9223372036854775809 is not in"),
        (1, ValueError, r"must be a vector, got shape \(\)"),
        ([[1]], ValueError, r"must be a vector, got shape \(1, 1\)"),
        ([1.0], TypeError, "must be integers, or a mask of bool, got dtype float64"),
        ([True], ValueError, "a mask of 1 elements for 6 rows; it must have one for each"),
        (np.ma.array([1], mask=[1]), TypeError, "masked"),
        ("ab", ValueError, "must be a vector"),
    ],
    ids=str,
)
def test_rows_that_are_none_are_refused(rows: Any, error: type[Exception], match: str) -> None:
    model = Model()
    before = model.values()
    table = gpuopt.rows(model.table)
    for call in (table.keep, table.remove, table.reset):
        with pytest.raises(error, match=match):
            call(rows)
    with pytest.raises(error, match=match):
        table.append(np.zeros((1, 2)), state_of=rows)
    assert_same(model.values(), before)


def test_values_that_do_not_fit_are_refused() -> None:
    rows = gpuopt.rows(Variable(np.zeros((3, 2), np.int32), name="table"))
    for values, error, match in (
        (np.zeros((2, 3)), ValueError, r'values for rows of "table", .* \(2,\) each: .* \(2, 3\)'),
        (np.zeros(2), ValueError, r"shape \(2,\)"),
        (np.zeros((2, 2)), TypeError, '"table" has dtype int32; the value has dtype float64'),
        ([[2**40, 0]], ValueError, "does not fit into int32"),
    ):
        with pytest.raises(error, match=match):
            rows.append(values)
    with pytest.raises(ValueError, match="a row that comes twice cannot get two values"):
        rows.reset([1, 1], [[1, 1], [2, 2]])
    rows.reset([1, 1])


def test_memory_of_several_variables_is_refused() -> None:
    model = Model()
    alias = Variable(model.table.storage[1:3], name="alias", copy=False)
    assert_refused(model, ValueError, '"table" shares memory with "alias"')
    del alias
    slot = Variable(model.variables()[2].storage, name="of_slot", copy=False)
    assert_refused(model, ValueError, f'"{model.variables()[2].name}" shares memory with "of_slot"')
    with pytest.raises(ValueError, match='"of_slot" shares memory with'):
        CHANGES["keep"](gpuopt.rows(slot))


def test_memory_that_is_updated_as_a_raw_array_is_refused() -> None:
    model = Model()
    raw = model.table.storage[2:]
    gpuopt.GradientDescentOptimizer(0.0).apply_gradients([(np.ones((4, 2)), raw)])
    assert_refused(model, ValueError, '"table" shares memory with the raw array "array')


def test_a_change_in_a_loss_is_refused() -> None:
    model = Model()

    def loss() -> Any:
        assert_refused(model, RuntimeError, 'rows of "table" cannot come or go in a loss')
        return np.sum(model.table)

    model.adam.minimize(loss)


def test_a_change_in_the_middle_of_a_step_is_refused() -> None:
    model = Model()

    def constraint(value: Any) -> Any:
        assert_refused(model, RuntimeError, "nor get other rows, in the middle of a step")
        return value

    other = Variable(np.zeros(3), constraint=constraint)
    model.adam.apply_gradients([(np.ones(3), other)])


def test_a_change_in_the_middle_of_a_save_is_refused() -> None:
    model = Model()
    with between_writes("saving somewhere"):
        assert_refused(model, RuntimeError, "neither changed nor saved while this thread is saving")


def test_a_change_step_or_assignment_by_the_values_of_a_change_is_refused() -> None:
    model = Model()

    class Values:
        def __init__(self, call: Callable[[], None]) -> None:
            self._call = call

        def __array__(self, *args: Any, **options: Any) -> Any:
            self._call()

    before = model.values()
    calls: list[Callable[[], Any]] = [
        lambda: CHANGES["keep"](gpuopt.rows(model.table)),
        lambda: model.step(model.adam),
        lambda: model.table.assign(model.table.numpy() + 1),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match='while this thread is changing the rows of "table"'):
            gpuopt.rows(model.table).append(Values(call))
        assert_same(model.values(), before)


@pytest.mark.parametrize("change", ["keep", "append"])
def test_a_function_that_gives_a_hyperparameter_cannot_change_rows(change: str) -> None:
    model = Model()

    def rate() -> float:
        CHANGES[change](gpuopt.rows(model.table))
        return 0.1

    before, counter = model.values(), Variable(0)
    optimizer = gpuopt.GradientDescentOptimizer(rate)
    with pytest.raises(RuntimeError, match="nor get other rows, in the middle of a step"):
        optimizer.apply_gradients([(np.ones((6, 2)), model.table)], counter)
    assert int(counter) == 0
    assert_same(model.values(), before)


def test_a_change_waits_for_a_step_that_reads_its_hyperparameters() -> None:
    model = Model()
    inside, go_on = threading.Event(), threading.Event()

    def rate() -> float:
        inside.set()
        assert go_on.wait(30)
        return 1.0

    optimizer = gpuopt.GradientDescentOptimizer(rate)
    rows = IndexedSlices(np.ones((1, 2)), np.array([0]))
    expected = model.values()
    expected[0][0] -= 1
    step = InThread(lambda: optimizer.apply_gradients([(rows, model.table)]))
    assert inside.wait(30)
    change = InThread(lambda: gpuopt.rows(model.table).keep([5, 4, 3, 2, 1, 0]))
    assert not change.ends_within(0.05)
    go_on.set()
    step.join()
    change.join()
    assert_same(model.values(), [value[::-1] for value in expected])


@pytest.mark.parametrize("change", ["keep", "append"])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_step_whose_pairs_change_rows_is_refused(is_sparse: bool, change: str) -> None:
    model = Model()
    gradient: Any = np.ones((6, 2))
    if is_sparse:
        gradient = IndexedSlices(np.ones((1, 2)), np.array([0]))

    def pairs() -> Any:
        yield gradient, model.table
        CHANGES[change](gpuopt.rows(model.table))

    before, counter = model.values(), Variable(0)
    with pytest.raises((RuntimeError, ValueError), match='"table"') as raised:
        gpuopt.GradientDescentOptimizer(1.0).apply_gradients(pairs(), counter)
    said = str(raised.value)
    assert "came or went while a step" in said or "the variable has shape" in said
    assert int(counter) == 0
    assert_same(model.values(), expected(change, before))


def test_old_states_are_refused_with_both_shapes(tmp_path: Path) -> None:
    model = Model()
    saver = gpuopt.Saver([model.table], optimizers=[model.adam])
    path, state = saver.save(tmp_path / "m"), model.adam.state_dict()
    before = model.values()
    gpuopt.rows(model.table).append(np.zeros((3, 2)))
    for call in (lambda: saver.restore(path), lambda: model.adam.load_state_dict(state)):
        with pytest.raises((gpuopt.CheckpointError, ValueError), match=r"\(9, 2\).*\(6, 2\)"):
            call()
    assert_same([value[:6] for value in model.values()], before)


def test_slots_of_unknown_beginnings_need_the_state_of_other_rows() -> None:
    class Hook(gpuopt.Optimizer):
        def _create_slots(self, var_list: Any) -> None:
            for var in var_list:
                self._get_or_make_slot(var, np.full(var.shape, 3.0), "like", "like")

        def _apply_dense(self, grad: Any, var: Any) -> None:
            pass

    class Said(Hook):
        def _new_slot_rows(self, slot_name: str) -> Any:
            return "value"

    table = Variable(np.zeros((2, 2)), name="table")
    optimizer = Hook(False, "hook")
    optimizer.apply_gradients([(np.ones((2, 2)), table)])
    for call in (
        lambda: gpuopt.rows(table).append([[1, 1]]),
        lambda: gpuopt.rows(table).reset([0]),
    ):
        with pytest.raises(ValueError, match='new row of slot "like" of "table" under Hook starts'):
            call()
    assert table.shape == (2, 2)
    gpuopt.rows(table).append([[1, 1]], state_of=[1])
    np.testing.assert_array_equal(optimizer.get_slot(table, "like").numpy(), np.full((3, 2), 3))
    del optimizer, call
    gc.collect()
    other = Variable(np.zeros((2, 2)), name="other")
    said = Said(False, "said")
    said.apply_gradients([(np.ones((2, 2)), other)])
    gpuopt.rows(other).append([[8, 9]])
    np.testing.assert_array_equal(said.get_slot(other, "like").numpy()[2], [8, 9])


def test_slots_without_a_row_for_each_are_refused() -> None:
    class Columns(gpuopt.Optimizer):
        def _create_slots(self, var_list: Any) -> None:
            for var in var_list:
                self.state.create_slot(var, "columns", "columns", 0.0, var.shape[1:])

        def _apply_dense(self, grad: Any, var: Any) -> None:
            pass

    model = Model()
    optimizer = Columns(False, "columns")
    model.step(optimizer)
    assert_refused(model, ValueError, r'slot "columns" of "table" under Columns has shape \(2,\)')


def test_restored_slots_that_wait_for_their_variable_come_along(tmp_path: Path) -> None:
    model = Model()
    path = gpuopt.Saver([model.table], optimizers=[model.adam]).save(tmp_path / "m")
    accumulators = [value.copy() for value in model.values()[1:3]]
    del model
    gc.collect()
    table, adam = Variable(START, name="table"), gpuopt.AdamOptimizer(0.1)
    gpuopt.Saver([table], optimizers=[adam]).restore(path)
    state = adam.state_dict()
    fresh = gpuopt.AdamOptimizer(0.1, name="fresh")
    fresh.load_state_dict(state, {})
    assert fresh.get_slot(table, "m") is None
    gpuopt.rows(table).keep([4, 2])
    for optimizer in (adam, fresh):
        for name, value in zip("mv", accumulators, strict=True):
            np.testing.assert_array_equal(optimizer.get_slot(table, name).numpy(), value[[4, 2]])


# What comes between.


def test_rows_change_under_a_copy_that_has_made_no_step() -> None:
    """Its slots in 8 bits had blocks with parts of several rows."""
    table = Variable(np.ones((9, 2), np.float32))
    optimizer = gpuopt.AdamOptimizer(0.5, slot_bits=8)
    optimizer.apply_gradients([(np.ones((9, 2), np.float32), table)])
    table, optimizer = copy.deepcopy((table, optimizer))
    expected = optimizer.get_slot(table, "m").numpy()[:5]
    gpuopt.rows(table).keep(np.arange(5))
    np.testing.assert_array_equal(optimizer.get_slot(table, "m").numpy(), expected)


@pytest.mark.parametrize("change", [name for name in CHANGES if name != "reset"])
def test_failure_at_any_allocation_leaves_everything(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    backend, number = backends.backend_for(Device.cpu), 0
    empty = type(backend).empty

    def failing(self: Any, *arguments: Any) -> Any:
        nonlocal number
        number -= 1
        if number == 0:
            raise MemoryError
        return empty(self, *arguments)

    monkeypatch.setattr(type(backend), "empty", failing)
    for fails_at in range(1, 6):
        before, number = model.values(), fails_at
        with pytest.raises(MemoryError):
            CHANGES[change](gpuopt.rows(model.table))
        assert_same(model.values(), before)
    CHANGES[change](gpuopt.rows(model.table))
    assert_same(model.values(), expected(change, before))


@pytest.mark.parametrize("change", CHANGES)
def test_interrupts_leave_all_rows_or_none(change: str) -> None:
    seen = set()
    # There are hundreds.
    stride = 3 if os.environ.get("GPUOPT_FULL") else 13
    for moment in range(1 + len(change) % stride, 10_000, stride):
        model = Model()
        before = model.values()
        after = expected(change, before)
        rows = gpuopt.rows(model.table)
        interrupts = InterruptAt(moment)
        try:
            with interrupts:
                CHANGES[change](rows)
        except Interrupt:
            pass
        has_changed = bool(
            (model.values()[0].shape, model.values()[0].sum())
            != (
                before[0].shape,
                before[0].sum(),
            )
        )
        seen.add(has_changed)
        assert_same(model.values(), after if has_changed else before)
        model.step(model.adam)
        model.step(model.adagrad)
        if interrupts.left > 0:
            break
    assert seen == {False, True}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_rows_of_a_forked_child_are_its_own() -> None:
    model = Model()
    before = model.values()

    def child() -> None:
        CHANGES["append"](gpuopt.rows(model.table))
        model.step(model.adam)
        assert model.table.shape == (8, 2)

    with held(lambda: between_writes("changing rows", writes=True)):
        check_child(forked(child))
    assert_same(model.values(), before)


def test_rows_change_between_the_steps_of_other_threads() -> None:
    table = Variable(np.zeros((4, 3)), name="table")
    # After n steps, a row is n (n + 1) / 2 and its slot -n.
    optimizer = gpuopt.MomentumOptimizer(np.float64(1), np.float64(1), use_locking=True)
    refused: list[str] = []
    stop, done = threading.Event(), [0]

    def train() -> None:
        while not stop.is_set():
            try:
                if done[0] % 2:
                    mask = np.ones(table.shape[0], bool)
                    gradient: Any = IndexedSlices.from_mask(-np.ones((len(mask), 3)), mask)
                else:
                    gradient = -np.ones(table.shape)
                optimizer.apply_gradients([(gradient, table)])
                done[0] += 1
            except (RuntimeError, ValueError) as error:
                refused.append(str(error))

    threads = [InThread(train) for _ in range(2)]
    rng, number = np.random.default_rng(1), 0
    try:
        while number < 60 or done[0] < 20:
            number += 1
            rows, height = gpuopt.rows(table), table.shape[0]
            if rng.random() < 0.5:
                rows.append(np.zeros((int(rng.integers(1, 4)), 3)))
            else:
                rows.keep(rng.permutation(height)[: rng.integers(1, height + 1)])
            optimizer.state_dict()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert all(f'"{table.name}"' in message for message in refused), refused
    value, slot = table.numpy(), optimizer.get_slot(table, "momentum")
    np.testing.assert_array_equal(value, slot.numpy() * (slot.numpy() - 1) / 2)


@pytest.mark.parametrize("assign", ["assign", "assign_add", "assign_sub"])
def test_an_assignment_that_rows_overtake_is_refused(
    assign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of one row, which numpy would write to all rows.
    table = Variable(np.zeros((1, 2)), name="table")

    def overtaken() -> Any:
        monkeypatch.undo()
        gpuopt.rows(table).append(np.zeros((2, 2)))
        return writing()

    monkeypatch.setattr(variable, "writing", overtaken)
    with pytest.raises(ValueError, match=r'"table" has shape \(3, 2\); the value has .* \(1, 2\)'):
        getattr(table, assign)(np.ones((1, 2)))
    assert not table.numpy().any()


def test_saves_in_flight_keep_the_old_rows(tmp_path: Path) -> None:
    model = Model()
    before = model.table.numpy()
    saver = gpuopt.Saver([model.table], optimizers=[])
    future = saver.save_async(tmp_path / "m")
    gpuopt.rows(model.table).keep([1])
    with pytest.raises(gpuopt.CheckpointError, match=r"\(1, 2\).*\(6, 2\)"):
        saver.restore(future.result())
    other = Variable(np.zeros((6, 2)), name="other")
    gpuopt.Saver({"table": other}, optimizers=[]).restore(future.result())
    np.testing.assert_array_equal(other.numpy(), before)
