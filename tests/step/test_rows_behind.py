"""A table whose rows catch up shows every reader the rows of a table that made all steps."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from late_pairs import HEIGHT, SLICES, Pair, close

import gpuopt
from gpuopt.step import tables_behind

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
