"""A table whose rows catch up shows every reader the rows of a table that made all steps."""

from __future__ import annotations

import copy
import gc
import math
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupt_at import HandleAt, Interrupt, InterruptAt

import gpuopt
from gpuopt import locks
from gpuopt.optimizers.base import Movement, RuleOptimizer, Unnamed
from gpuopt.rules.catch_up import Factors
from gpuopt.step import rule_updates, tables_behind
from gpuopt.variables.gate import between_writes

HEIGHT = 40
SLICES = gpuopt.IndexedSlices
# Where a signal handler may come.
_INSIDE = (
    "catch_up.py",
    "missed_steps.py",
    "rows_behind.py",
    "sparse_update.py",
    "tables_behind.py",
)


class Pair:
    """The same table twice: one catches up, and one makes all steps."""

    def __init__(self, make: Any = gpuopt.AdamOptimizer, *, height: int = HEIGHT, **options: Any):
        self.rng = np.random.default_rng(5)
        value = self.rng.normal(size=(height, 3)).astype(np.float32)
        self.late = gpuopt.Variable(value, name="late")
        self.exact = gpuopt.Variable(value, name="exact")
        self.optimizer = make(catch_up=True, name="Late", **options)
        self.all_rows = make(name="AllRows", **options)

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            rows = self.rng.integers(0, max(self.late.shape[0] // 4, 1), 3)
            values = self.rng.normal(size=(3, 3)).astype(np.float32)
            self.apply(SLICES(values, rows))

    def apply(self, gradient: Any) -> None:
        self.optimizer.apply_gradients([(gradient, self.late)])
        self.all_rows.apply_gradients([(gradient, self.exact)])

    def is_behind(self) -> bool:
        return any(table.is_behind for _, table in tables_behind._behind())

    def slot(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        return (
            self.optimizer.get_slot(self.late, name).numpy(),
            self.all_rows.get_slot(self.exact, name).numpy(),
        )

    def check(self) -> None:
        close(self.late._array, self.exact._array)
        for name in self.all_rows.get_slot_names():
            close(*self.slot(name))


def close(one: Any, other: Any) -> None:
    np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-6, atol=2e-6)


READS: dict[str, Callable[[gpuopt.Variable], Any]] = {
    "numpy()": lambda table: table.numpy(),
    "value()": lambda table: table.value().copy(),
    "storage": lambda table: table.storage.copy(),
    "asarray": lambda table: np.array(np.asarray(table)),
    "table + 0": lambda table: table + 0,
    "0 + table": lambda table: 0 + table,
    "table[...]": lambda table: table[...].copy(),
    "np.concatenate": lambda table: np.concatenate([table, table])[: len(table)],
    "np.positive": lambda table: np.positive(table),
    "copy": lambda table: copy.deepcopy(table).numpy(),
    "DLPack": lambda table: np.from_dlpack(table).copy(),
    "a Variable of it": lambda table: gpuopt.Variable(table).numpy(),
    "assigned": lambda table: gpuopt.Variable(np.zeros(table.shape, "f4")).assign(table).numpy(),
    "a loss": lambda table: _gradient_of(lambda: (table * table).sum(), table) / 2,
    "flush()": lambda table: None,
}


def _gradient_of(loss: Callable[[], Any], table: gpuopt.Variable) -> Any:
    [(gradient, _)] = gpuopt.AdamOptimizer().compute_gradients(loss, var_list=[table])
    return gradient


@pytest.mark.parametrize("read", READS)
def test_a_read_sees_all_steps(read: str) -> None:
    pair = Pair()
    pair.step(20)
    assert pair.is_behind()
    if read == "flush()":
        pair.optimizer.flush()
        got = pair.late._array
    else:
        got = READS[read](pair.late)
    assert not pair.is_behind()
    close(got, pair.exact)
    pair.check()


def test_a_slot_that_is_read_shows_all_steps() -> None:
    pair = Pair()
    pair.step(20)
    close(*pair.slot("m"))
    pair.step(20)
    close(*pair.slot("v"))
    pair.check()


WRITES: dict[str, Callable[[gpuopt.Variable], Any]] = {
    "assign": lambda table: table.assign(np.ones(table.shape, "f4")),
    "assign_add": lambda table: table.assign_add(np.ones(table.shape, "f4")),
    "+=": lambda table: table.__iadd__(1),
    "table[1:3] =": lambda table: table.__setitem__(slice(1, 3), 4),
    "np.copyto": lambda table: np.copyto(table, np.float32(2)),
    "np.add, out=": lambda table: np.add(table, 1, out=table),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_comes_after_the_steps_before_it(write: str) -> None:
    pair = Pair()
    pair.step(20)
    WRITES[write](pair.late)
    WRITES[write](pair.exact)
    pair.step(20)
    pair.late.numpy()
    pair.check()


def test_a_slot_may_be_written() -> None:
    pair = Pair()
    pair.step(10)
    for optimizer, table in ((pair.optimizer, pair.late), (pair.all_rows, pair.exact)):
        optimizer.get_slot(table, "m").assign(np.ones(table.shape, "f4"))
    pair.step(10)
    pair.late.numpy()
    pair.check()


def test_a_lookup_brings_up_its_rows_alone() -> None:
    pair = Pair()
    pair.step(10)
    pair.apply(SLICES(np.ones((1, 3), "f4"), [30]))
    pair.apply(SLICES(np.ones((1, 3), "f4"), [31]))
    before = pair.late._array.copy()
    ids = np.array([[30, 2], [30, 31]])
    close(gpuopt.embedding_lookup(pair.late, ids), pair.exact.numpy()[ids])
    others = np.setdiff1d(np.arange(HEIGHT), ids)
    np.testing.assert_array_equal(pair.late._array[others], before[others])
    assert pair.is_behind()
    pair.late.numpy()
    pair.check()


@pytest.mark.parametrize("engine", ["autograd", pytest.param("torch", marks=pytest.mark.torch)])
def test_a_loss_that_looks_rows_up_brings_up_those_alone(engine: str) -> None:
    pair = Pair()
    pair.step(10)
    pair.apply(SLICES(np.ones((1, 3), "f4"), [30]))
    pair.step(2)
    before = pair.late._array.copy()
    ids = np.array([30, 2, 30])

    def loss() -> Any:
        return (gpuopt.embedding_lookup(pair.late, ids) ** 2).sum()

    marked = gpuopt.with_torch(loss) if engine == "torch" else loss
    gradient = _gradient_of(marked, pair.late)
    assert isinstance(gradient, SLICES)
    close(np.asarray(gradient.values) / 2, pair.exact.numpy()[np.asarray(gradient.indices)])
    others = np.setdiff1d(np.arange(HEIGHT), ids)
    np.testing.assert_array_equal(pair.late._array[others], before[others])


def test_a_loss_may_read_the_table_after_a_lookup() -> None:
    pair = Pair()
    pair.step(20)

    def loss_of(table: gpuopt.Variable) -> Callable[[], Any]:
        return lambda: (gpuopt.embedding_lookup(table, [3]) ** 2).sum() + (table * table).sum()

    close(
        _gradient_of(loss_of(pair.late), pair.late), _gradient_of(loss_of(pair.exact), pair.exact)
    )


@pytest.mark.parametrize("ids", [[HEIGHT], [-1], [0, HEIGHT]])
def test_a_lookup_out_of_range_writes_nothing(ids: list[int]) -> None:
    pair = Pair()
    pair.step(10)
    before = pair.late._array.copy()
    with pytest.raises(IndexError):
        gpuopt.embedding_lookup(pair.late, np.array(ids))
    with pytest.raises(IndexError):
        pair.optimizer.apply_gradients([(SLICES(np.ones((len(ids), 3), "f4"), ids), pair.late)])
    np.testing.assert_array_equal(pair.late._array, before)
    pair.late.numpy()
    pair.check()


def test_a_dense_gradient_comes_after_all_steps() -> None:
    pair = Pair()
    pair.step(10)
    pair.apply(np.ones((HEIGHT, 3), np.float32))
    pair.step(10)
    pair.late.numpy()
    pair.check()


def test_another_optimizers_step_comes_after_all_steps() -> None:
    pair = Pair()
    decay = gpuopt.extend_with_decoupled_weight_decay(gpuopt.GradientDescentOptimizer)(0.1, 0.1)
    other = gpuopt.AdamOptimizer(catch_up=True)
    for optimizer in (decay, other, decay):
        pair.step(10)
        slices = SLICES(np.ones((1, 3), "f4"), [1])
        optimizer.apply_gradients([(slices, pair.late), (slices, pair.exact)])
    pair.step(10)
    pair.late.numpy()
    pair.exact.numpy()
    pair.check()


def test_hyperparameters_may_change() -> None:
    pair = Pair(learning_rate=0.1)
    for name, value in (
        ("beta1", 0.5),
        ("learning_rate", lambda: 0.05),
        ("epsilon", 1e-3),
        ("beta2", 0.99),
    ):
        pair.step(15)
        for optimizer in (pair.optimizer, pair.all_rows):
            optimizer.hyperparameters[name] = value
    pair.step(15)
    pair.late.numpy()
    pair.check()


def test_betas_for_which_steps_count_for_ever_move_all_rows() -> None:
    pair = Pair(beta1=0.99, beta2=0.9)
    pair.step(5)
    assert not pair.is_behind()
    pair.check()
    for optimizer in (pair.optimizer, pair.all_rows):
        optimizer.hyperparameters["beta2"] = 0.999
    pair.step(5)
    assert pair.is_behind()
    pair.late.numpy()
    pair.check()


def test_more_steps_than_there_is_room_for() -> None:
    pair = Pair(learning_rate=1e-3)
    for _ in range(9):
        pair.step(131)
    table: Any = pair.late.identity.behind
    assert 0 < table._catch_up.now < 9 * 131
    pair.late.numpy()
    np.testing.assert_allclose(pair.late.numpy(), pair.exact.numpy(), rtol=1e-5, atol=1e-5)


def test_empty_gradients_count_as_steps() -> None:
    pair = Pair()
    pair.step(3)
    for _ in range(4):
        pair.apply(SLICES(np.zeros((0, 3), "f4"), np.zeros(0, np.int64)))
    pair.late.numpy()
    pair.check()


def test_a_step_that_is_skipped_is_not_counted() -> None:
    pair = Pair(on_nonfinite="skip")
    pair.step(3)
    pair.apply(SLICES(np.full((1, 3), np.nan, "f4"), [1]))
    pair.step(3)
    pair.late.numpy()
    pair.check()


def test_several_tables_and_groups() -> None:
    tables = [gpuopt.Variable(np.ones((20 + i, 2), "f4"), name=f"table{i}") for i in range(3)]
    exact = [gpuopt.Variable(np.ones((20 + i, 2), "f4"), name=f"exact{i}") for i in range(3)]

    def groups(of: list[gpuopt.Variable]) -> list[gpuopt.ParameterGroup]:
        return [
            gpuopt.ParameterGroup(variables=of[1:2], beta1=0.5, learning_rate=0.1, epsilon=1e-4)
        ]

    late = gpuopt.AdamOptimizer(catch_up=True, groups=groups(tables))
    all_rows = gpuopt.AdamOptimizer(groups=groups(exact))
    rng = np.random.default_rng(6)
    for step in range(30):
        chosen = range(3) if step % 3 else range(1, 3)
        slices = [
            SLICES(rng.normal(size=(2, 2)).astype("f4"), rng.integers(0, 20, 2)) for _ in "12"
        ]
        for optimizer, of in ((late, tables), (all_rows, exact)):
            optimizer.apply_gradients([(slices[i % 2], of[i]) for i in chosen])
    for table, other in zip(tables, exact, strict=True):
        close(table.numpy(), other.numpy())


def test_an_average_follows_all_steps() -> None:
    pair = Pair()
    averages = [gpuopt.ExponentialMovingAverage(0.9, name=name) for name in ("One", "Two")]
    for _ in range(3):
        pair.step(5)
        for average, table in zip(averages, (pair.late, pair.exact), strict=True):
            average.apply([table])
    close(averages[0].average(pair.late).numpy(), averages[1].average(pair.exact).numpy())


def test_a_checkpoint_has_rows_brought_up_to_date(tmp_path: Path) -> None:
    pair = Pair()
    pair.step(20)
    saver = gpuopt.Saver({"w": pair.late}, optimizers=[pair.optimizer])
    path = saver.save(str(tmp_path / "late"))
    pair.check()
    # Into the other form, and into this one again after more steps.
    value = np.zeros((HEIGHT, 3), np.float32)
    restored = Pair()
    for table, optimizer in (
        (restored.late, restored.optimizer),
        (restored.exact, restored.all_rows),
    ):
        table.assign(value)
        state = pair.optimizer.state_dict({"w": pair.late})
        optimizer.load_state_dict(state, {"w": table})
        table.assign(pair.late)
    restored.step(10)
    restored.late.numpy()
    restored.check()
    expected = pair.exact.numpy()
    pair.step(5)
    saver.restore(path)
    close(pair.late.numpy(), expected)


def test_rows_may_come_and_go() -> None:
    pair = Pair()
    for _ in range(3):
        pair.step(10)
        for table in (pair.late, pair.exact):
            rows = gpuopt.rows(table)
            rows.append(np.ones((2, 3), np.float32))
            rows.remove([0, 5])
    pair.step(10)
    pair.late.numpy()
    pair.check()


def test_a_slot_may_be_replaced() -> None:
    pair = Pair()
    pair.step(10)
    for optimizer, table in ((pair.optimizer, pair.late), (pair.all_rows, pair.exact)):
        slots = optimizer.state.table("m")
        slots[table.identity] = gpuopt.Variable(np.ones((HEIGHT, 3), "f4"), trainable=False)
    pair.step(10)
    pair.late.numpy()
    pair.check()


@pytest.mark.parametrize("in_hook", ["_apply_sparse", "_apply_dense"])
def test_hooks_may_call_the_rule(in_hook: str) -> None:
    def apply(self: Any, grad: Any, var: Any) -> Any:
        return getattr(gpuopt.AdamOptimizer, in_hook)(self, grad, var)

    pair = Pair(type("Hooked", (gpuopt.AdamOptimizer,), {in_hook: apply}))
    pair.step(10)
    pair.apply(np.ones((HEIGHT, 3), np.float32))
    pair.step(10)
    pair.late.numpy()
    pair.check()


def test_minimize_updates_tables_that_are_behind() -> None:
    pair = Pair()
    for step in range(12):
        ids = np.array([step % 5, 7])
        for optimizer, table in ((pair.optimizer, pair.late), (pair.all_rows, pair.exact)):

            def loss(table: Any = table, ids: Any = ids) -> Any:
                return ((gpuopt.embedding_lookup(table, ids) - 1) ** 2).sum()

            optimizer.minimize(loss, var_list=[table], gate_gradients=step % 3)
    pair.late.numpy()
    pair.check()


def test_a_read_that_is_interrupted_is_finished_by_the_next() -> None:
    moment, finished = 1, False
    while not finished:
        pair = Pair()
        pair.step(12)
        try:
            with InterruptAt(moment, inside=(*_INSIDE, "gate.py")):
                pair.late.numpy()
            finished = True
        except Interrupt:
            pair.late.numpy()
        pair.check()
        moment += 3
    assert moment > 60


def test_a_step_that_is_interrupted_leaves_other_rows_to_catch_up() -> None:
    others = np.arange(HEIGHT // 4, HEIGHT)
    moment, finished = 1, False
    while not finished:
        pair = Pair()
        pair.step(12)
        pair.apply(SLICES(np.ones((len(others), 3), "f4"), others))
        pair.step(3)
        try:
            with InterruptAt(moment, inside=_INSIDE):
                pair.optimizer.apply_gradients([(SLICES(np.ones((1, 3), "f4"), [0]), pair.late)])
            finished = True
        except Interrupt:
            pass
        # Counted, or not: there is nothing between.
        before = pair.exact.numpy()
        pair.all_rows.apply_gradients([(SLICES(np.ones((1, 3), "f4"), [0]), pair.exact)])
        got, after = pair.late.numpy()[others], pair.exact.numpy()
        is_counted = abs(got - after[others]).max() < abs(got - before[others]).max()
        close(got, (after if is_counted else before)[others])
        moment += 3
    assert is_counted
    assert moment > 60


@pytest.mark.usefixtures("every_cpu_form")
@pytest.mark.parametrize(
    ("call", "handler"), [("read", "read"), ("read", "step"), ("step", "read"), ("step", "look up")]
)
def test_a_signal_handler_may_come_at_any_moment(call: str, handler: str) -> None:
    others = np.arange(HEIGHT // 4, HEIGHT)
    slices = SLICES(np.full((2, 3), 2, np.float32), [1, 19])
    calls: dict[str, Callable[[Any, Any], Any]] = {
        "read": lambda optimizer, table: table.numpy(),
        "look up": lambda optimizer, table: gpuopt.embedding_lookup(table, [0, 17]),
        "step": lambda optimizer, table: optimizer.apply_gradients([(slices, table)]),
    }
    moment, is_over = 1, False
    while not is_over:
        pair = Pair()
        pair.step(3)
        pair.apply(SLICES(np.ones((len(others), 3), "f4"), others))
        pair.step(2)
        handle = HandleAt(moment, partial(calls[handler], pair.optimizer, pair.late), _INSIDE)
        with handle:
            calls[call](pair.optimizer, pair.late)
        is_over = handle.is_over
        for each in (call, *[handler] * (not is_over)):
            calls[each](pair.all_rows, pair.exact)
        pair.late.numpy()
        pair.check()
        moment += 3
    assert moment > 20


def test_threads_may_read_while_another_steps() -> None:
    pair = Pair(height=400)
    pair.step()
    ends = threading.Event()
    errors: list[BaseException] = []

    def read() -> None:
        try:
            while not ends.is_set():
                pair.late.numpy()
                gpuopt.embedding_lookup(pair.late, np.arange(50))
        except BaseException as error:
            errors.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    pair.step(150)
    ends.set()
    for reader in readers:
        reader.join()
    assert not errors
    pair.late.numpy()
    pair.check()


def test_a_table_goes_with_its_variable() -> None:
    pair = Pair()
    pair.step(3)
    behind = weakref.ref(pair.late.identity.behind)
    number = len(tables_behind.members_of_tables)
    del pair.late
    gc.collect()
    assert behind() is None
    assert len(tables_behind.members_of_tables) == number - 3


def test_a_table_catches_up_after_its_optimizer_is_gone() -> None:
    pair = Pair()
    pair.step(10)
    del pair.optimizer
    gc.collect()
    close(pair.late.numpy(), pair.exact.numpy())


@pytest.mark.parametrize("array", [np.ones((4, 2), "f4"), "adopted"], ids=["raw", "adopted"])
def test_arrays_are_refused_with_what_to_do(array: Any) -> None:
    if isinstance(array, str):
        array = gpuopt.Variable(np.ones((4, 2), "f4"), copy=False)
    optimizer = gpuopt.AdamOptimizer(catch_up=True)
    with pytest.raises(ValueError, match=r"gpuopt\.Variable\(array\), and read that; or leave out"):
        optimizer.apply_gradients([(SLICES(np.ones((1, 2), "f4"), [1]), array)])
    assert not optimizer.variables()


@pytest.mark.parametrize("catch_up", [False, True, "stepping"])
def test_rows_of_a_table_with_a_constraint_are_refused(catch_up: Any) -> None:
    table = gpuopt.Variable(np.ones((4, 2), "f4"), constraint=lambda array: np.maximum(array, 0))
    optimizer = gpuopt.AdamOptimizer(0.5, catch_up=catch_up)
    with pytest.raises(RuntimeError, match="constraint"):
        optimizer.apply_gradients([(SLICES(np.ones((1, 2), "f4"), [1]), table)])
    np.testing.assert_array_equal(table._array, 1)
    assert not optimizer.variables()
    for _ in range(3):  # of which the constraint makes 0
        optimizer.apply_gradients([(np.ones((4, 2), np.float32), table)])
    np.testing.assert_array_equal(table.numpy(), 0)


@pytest.mark.parametrize(
    "make",
    [gpuopt.LazyAdamOptimizer, gpuopt.extend_with_decoupled_weight_decay(gpuopt.LazyAdamOptimizer)],
)
def test_optimizers_that_leave_rows_alone_refuse_the_option(make: Any) -> None:
    arguments = {"weight_decay": 0.1} if "WeightDecay" in str(make.__mro__) else {}
    with pytest.raises(ValueError, match="there is nothing to catch up with"):
        make(catch_up=True, **arguments)
    with pytest.raises(
        TypeError, match='must be False, True or "stepping", got "yes"'.replace('"yes"', "'yes'")
    ):
        make(catch_up="yes", **arguments)
    for wrong in (1, None, np.ones(2)):
        with pytest.raises(TypeError, match='must be False, True or "stepping", got'):
            make(catch_up=wrong, **arguments)
    with pytest.raises(TypeError, match="catch_up"):
        gpuopt.MomentumOptimizer(0.1, 0.9, catch_up=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("rate", [math.inf, math.nan])
@pytest.mark.parametrize("make", [gpuopt.AdamOptimizer, gpuopt.AddSignOptimizer])
def test_a_step_size_that_is_not_finite_moves_every_row(make: Any, rate: float) -> None:
    pair = Pair(make, learning_rate=0.01)
    pair.apply(SLICES(np.ones((1, 3), "f4"), [30]))
    pair.step(500)
    pair.apply(SLICES(np.ones((1, 3), "f4"), [31]))
    pair.step(2)
    for optimizer in (pair.optimizer, pair.all_rows):
        optimizer.hyperparameters["learning_rate"] = rate
    pair.step()
    for optimizer in (pair.optimizer, pair.all_rows):
        optimizer.hyperparameters["learning_rate"] = 0.01
    pair.step(3)
    pair.late.numpy()
    assert not np.isfinite(pair.exact.numpy()).any()
    pair.check()


def test_a_slot_is_replaced_while_another_thread_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "DEADLINE_S", 5.0)
    pair = Pair()
    pair.step(10)
    slots = pair.optimizer.state.table("m")
    errors: list[BaseException] = []

    def replace() -> None:
        try:
            slots[pair.late.identity] = gpuopt.Variable(np.ones((HEIGHT, 3), "f4"))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=replace)
    with between_writes("saving"):
        thread.start()
        time.sleep(0.1)
        with pair.optimizer.state.lock:  # as a save takes it
            pass
    thread.join()
    assert not errors
    close(pair.late._array, pair.exact)


def test_two_threads_may_step_by_optimizers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, exact = Pair(), gpuopt.AdamOptimizer(0.01)
    late = gpuopt.AdamOptimizer(0.01, catch_up=True)
    slices = SLICES(np.ones((1, 3), "f4"), [30])
    late.apply_gradients([(slices, pair.late)])
    exact.apply_gradients([(slices, pair.exact)])
    pair.step(10)
    table_of = rule_updates.table_behind

    def replaced_by_another_thread(*arguments: Any) -> Any:
        monkeypatch.undo()
        table = table_of(*arguments)
        step = partial(late.apply_gradients, [(slices, pair.late)])
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        return table

    monkeypatch.setattr(rule_updates, "table_behind", replaced_by_another_thread)
    pair.apply(SLICES(np.ones((1, 3), "f4"), [20]))
    # Made anew, under the lock of the table that the other thread's step came by.
    behind: Any = pair.late.identity.behind
    assert behind.belongs_to(pair.optimizer.state)
    exact.apply_gradients([(slices, pair.exact)])
    pair.late.numpy()
    pair.check()


def test_a_signal_handler_may_step_by_another_optimizer() -> None:
    value = np.full((2, 3), 2, np.float32)
    slices, others = SLICES(value, [1, 19]), SLICES(value, [2, 18])
    moment, is_over = 1, False
    while not is_over:
        pair = Pair(learning_rate=0.1)
        late, exact = gpuopt.AdamOptimizer(catch_up=True), gpuopt.AdamOptimizer()
        pair.step(4)
        handle = HandleAt(moment, partial(late.apply_gradients, [(others, pair.late)]), _INSIDE)
        with handle:
            pair.optimizer.apply_gradients([(slices, pair.late)])
        is_over = handle.is_over
        pair.all_rows.apply_gradients([(slices, pair.exact)])
        if not is_over:
            exact.apply_gradients([(others, pair.exact)])
        # Of rows that the step in whose middle the handler comes does not name.
        close(*(np.delete(table.numpy(), [1, 19], axis=0) for table in (pair.late, pair.exact)))
        moment += 3
    assert moment > 20


@pytest.mark.parametrize("steps", [4, 5, 6])
def test_a_signal_handler_may_take_the_last_room(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Factors, "room_for", lambda self, height: 6)
    value = np.full((2, 3), 2, np.float32)
    slices, others = SLICES(value, [1, 19]), SLICES(value, [2, 18])
    moment, is_over = 1, False
    while not is_over:
        pair = Pair()
        pair.step(steps)
        handle = HandleAt(
            moment, partial(pair.optimizer.apply_gradients, [(others, pair.late)]), _INSIDE
        )
        with handle:
            pair.optimizer.apply_gradients([(slices, pair.late)])
        is_over = handle.is_over
        for each in [slices] if is_over else [slices, others]:
            pair.all_rows.apply_gradients([(each, pair.exact)])
        # Of rows that neither names: the order of the steps is the handler's. One step that is lost
        # makes ten times the difference that their numbers make.
        got, expected = (
            np.delete(table.numpy(), [1, 2, 18, 19], axis=0) for table in (pair.late, pair.exact)
        )
        np.testing.assert_allclose(got, expected, atol=5e-5)
        moment += 3
    assert moment > 20


class _Handled:
    """Calls in whose middle a signal handler steps by rows 2 and 18, at one moment after another.

    The steps of rows that no gradient names are few, and large: one that is lost moves them by ten
    times what the order of two steps does.
    """

    OTHERS = SLICES(np.full((2, 3), 1, np.float32), [2, 18])

    def __init__(self) -> None:
        self.pair = Pair(learning_rate=0.1)
        self.pair.apply(SLICES(np.full((20, 3), 3, np.float32), np.arange(20, HEIGHT)))

    def step(self, number: int) -> None:
        for _ in range(number):
            self.pair.apply(SLICES(np.ones((2, 3), np.float32), [3, 4]))

    def call_at(self, moment: int, call: Callable[[], Any]) -> bool:
        """Returns whether the call was over before that moment."""
        pair = self.pair
        step = partial(pair.optimizer.apply_gradients, [(self.OTHERS, pair.late)])
        handle = HandleAt(moment, step, _INSIDE)
        with handle:
            call()
        if not handle.is_over:
            pair.all_rows.apply_gradients([(self.OTHERS, pair.exact)])
        return handle.is_over

    def check(self) -> None:
        tables = self.pair.late, self.pair.exact
        got, expected = (table.numpy()[20:] for table in tables)
        np.testing.assert_allclose(got, expected, rtol=0, atol=4e-3)


@pytest.mark.parametrize("call", ["read", "step"])
def test_steps_after_a_signal_handler_took_the_last_room_are_not_lost(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Factors, "room_for", lambda self, height: 6)
    slices = SLICES(np.ones((2, 3), np.float32), [1, 19])
    moment, is_over = 1, False
    while not is_over:
        handled = _Handled()
        pair = handled.pair
        handled.step(5)
        calls: dict[str, Callable[[], Any]] = {
            "read": pair.late.numpy,
            "step": partial(pair.optimizer.apply_gradients, [(slices, pair.late)]),
        }
        is_over = handled.call_at(moment, calls[call])
        if call == "step":
            pair.all_rows.apply_gradients([(slices, pair.exact)])
        handled.step(9)
        handled.check()
        moment += 3
    assert moment > 20


def test_a_signal_handler_may_step_while_a_new_count_begins() -> None:
    slices = SLICES(np.ones((2, 3), np.float32), [1, 19])
    moment, is_over = 1, False
    while not is_over:
        handled = _Handled()
        pair = handled.pair
        handled.step(3)
        for optimizer in (pair.optimizer, pair.all_rows):
            optimizer.hyperparameters["epsilon"] = 1e-3
        step = partial(pair.optimizer.apply_gradients, [(slices, pair.late)])
        is_over = handled.call_at(moment, step)
        pair.all_rows.apply_gradients([(slices, pair.exact)])
        handled.check()
        moment += 3
    assert moment > 20


def test_a_signal_handler_may_step_by_a_table_that_is_being_replaced() -> None:
    slices = SLICES(np.ones((2, 3), np.float32), [1, 19])
    moment, is_over = 1, False
    while not is_over:
        handled = _Handled()
        handled.step(3)
        other = gpuopt.AdamOptimizer(catch_up=True)
        step = partial(other.apply_gradients, [(slices, handled.pair.late)])
        is_over = handled.call_at(moment, step)
        handled.check()
        moment += 2
    assert moment > 20


@pytest.mark.parametrize("meanwhile", ["both tables", "another optimizer"])
@pytest.mark.parametrize("own", [0, 1])
def test_a_signal_handler_waits_for_no_thread_that_waits_for_the_step_around_it(
    own: int, meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It steps by one table, a step of the other around it; a thread wants that one, or both."""
    monkeypatch.setattr(locks, "DEADLINE_S", 2.0)
    tables = [gpuopt.Variable(np.ones((HEIGHT, 3), "f4")) for _ in "12"]
    optimizer, others = (gpuopt.AdamOptimizer(catch_up=True) for _ in "12")
    slices = SLICES(np.ones((1, 3), "f4"), [1])
    optimizer.apply_gradients([(slices, table) for table in tables])
    for table in tables:
        table.numpy()  # then nobody has to bring it up to date first
    wanted = tables if meanwhile == "both tables" else [tables[own]]
    by = optimizer if meanwhile == "both tables" else others
    errors: list[BaseException] = []

    def step() -> None:
        try:
            by.apply_gradients([(slices, table) for table in wanted])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=step)

    def handle() -> None:
        thread.start()
        time.sleep(0.2)
        gpuopt.AdamOptimizer(catch_up=True).apply_gradients([(slices, tables[1 - own])])

    with HandleAt(1, handle, ["sparse_update.py"]) as handled:
        optimizer.apply_gradients([(slices, tables[own])])
    thread.join()
    assert not handled.is_over
    assert not errors


def test_room_is_used_up_before_rows_are_brought_up_to_date() -> None:
    pair = Pair()
    pair.step()
    table: Any = pair.late.identity.behind
    first = table._catch_up
    pair.step(first.room - 1)
    assert table._catch_up is first
    assert first.now == first.room
    pair.step()
    assert table._catch_up is not first
    assert table._catch_up.now == 1


@pytest.mark.parametrize("in_hooks", [False, True])
@pytest.mark.parametrize("what", ["clipping", "decay"])
def test_a_step_around_another_brings_up_its_rows_alone(what: str, *, in_hooks: bool) -> None:
    def apply(self: Any, grad: Any, var: Any) -> Any:
        return gpuopt.AdamOptimizer._apply_sparse(self, grad, var)

    made = type("Hooked", (gpuopt.AdamOptimizer,), {"_apply_sparse": apply} if in_hooks else {})
    if what == "decay":
        made = partial(gpuopt.extend_with_decoupled_weight_decay(made), 0.01)
    pair = Pair(made)
    if what == "clipping":
        pair.optimizer, pair.all_rows = (
            gpuopt.VariableClippingOptimizer(each, {table: [1]}, 1.0)
            for each, table in ((pair.optimizer, pair.late), (pair.all_rows, pair.exact))
        )
    pair.apply(SLICES(np.ones((1, 3), "f4"), [30]))
    pair.step(4)
    behind: Any = pair.late.identity.behind
    assert behind._catch_up.last[30] == 1
    pair.late.numpy()
    pair.check()


def test_copies_of_a_mirrored_table_agree_to_the_bit_whoever_reads() -> None:
    strategy = gpuopt.distributed.MirroredStrategy(["cpu", "cpu"])
    table = strategy.variable(np.ones((12, 2), np.float32), name="mirrored")
    optimizer = gpuopt.AdamOptimizer(0.01, catch_up=True)
    rng = np.random.default_rng(8)
    for step in range(30):

        def train(ids: Any, seen: Any, reads_all: bool) -> None:
            gpuopt.embedding_lookup(table.local, seen)
            if reads_all:
                optimizer.get_slot(table.local, "m").numpy()

            def loss() -> Any:
                return (gpuopt.embedding_lookup(table.local, ids) ** 2).sum()

            optimizer.minimize(loss, var_list=[table.local])

        ids, seen = rng.integers(0, 12, (2, 2, 3))
        of_replicas = [ids, seen, [False, step % 7 == 3]]
        strategy.run(train, [gpuopt.distributed.PerReplica(each) for each in of_replicas])
        gpuopt.embedding_lookup(table.replicas[1], [step % 12])
    for name in ("m", "v"):
        slots = [optimizer.get_slot(copy, name).numpy() for copy in table.replicas]
        np.testing.assert_array_equal(*slots)
    np.testing.assert_array_equal(*[copy.numpy() for copy in table.replicas])


def test_copies_of_a_mirrored_table_catch_up_each() -> None:
    tables, ids = [], np.random.default_rng(8).integers(0, 12, (20, 2, 3))
    for catch_up in (False, True):
        strategy = gpuopt.distributed.MirroredStrategy(["cpu", "cpu"])
        table = strategy.variable(np.ones((12, 2), np.float32), name="mirrored")
        optimizer = gpuopt.AdamOptimizer(0.01, catch_up=catch_up)

        def train(rows: np.ndarray, table: Any = table, optimizer: Any = optimizer) -> None:
            def loss() -> Any:
                return (gpuopt.embedding_lookup(table.local, rows) ** 2).sum()

            optimizer.minimize(loss, var_list=[table.local])

        for rows in ids:
            strategy.run(train, (gpuopt.distributed.PerReplica(rows),))
        tables += [copy.numpy() for copy in table.replicas]
    for other in tables[1:]:
        close(other, tables[0])


@pytest.mark.parametrize(
    "unnamed",
    [
        Unnamed({"n": "beta"}),
        Unnamed({"m": "gamma"}),
        Unnamed({"m": "beta"}, Movement("rate", "m", "v", "beta")),
    ],
)
def test_what_a_rule_does_to_other_rows_must_be_of_its_slots_and_scalars(unnamed: Any) -> None:
    def rule(var: Any, grad: Any, m: Any, *, rate: Any, beta: Any) -> None:
        m *= beta
        m += grad
        var -= rate * m

    with pytest.raises(ValueError, match="must be"):
        gpuopt.update_rule(unnamed=unnamed)(rule)


def test_a_users_rule_may_let_rows_catch_up() -> None:
    @gpuopt.update_rule(unnamed=Unnamed({"m": "beta"}))
    def fading(var: Any, grad: Any, m: Any, *, rate: Any, beta: Any) -> None:
        m *= beta
        m += grad
        var -= rate * m * grad

    class Fading(RuleOptimizer):
        rule = fading
        rule_of_other_rows = fading

        def __init__(self, catch_up: Any = False, name: str = "Fading") -> None:
            super().__init__({"name": name}, rate=0.1, beta=0.9)
            self._set_catch_up(catch_up)

    pair = Pair(Fading)
    pair.step(20)
    assert pair.is_behind()
    pair.late.numpy()
    pair.check()
