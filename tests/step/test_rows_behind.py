"""A table whose rows catch up shows every reader the rows of a table that made all steps.

tests/fuzz/test_all_stages.py draws steps of all kinds, with other optimizers, hyperparameters that
change, averages, and restores into other forms.
"""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from late_pairs import HEIGHT, Pair, close

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable
from gpuopt.distributed import MirroredStrategy, PerReplica
from gpuopt.step import tables_behind

GPUS = [
    pytest.param("emulated", marks=pytest.mark.emulator),
    pytest.param("gpu", marks=pytest.mark.gpu),
]

READS: dict[str, Callable[[Variable], Any]] = {
    "numpy()": lambda table: table.numpy(),
    "value()": lambda table: table.value().copy(),
    "storage": lambda table: table.storage.copy(),
    "table + 0": lambda table: table + 0,
    "0 + table": lambda table: 0 + table,
    "table[...]": lambda table: table[...].copy(),
    "copy": lambda table: copy.deepcopy(table).numpy(),
    "a Variable of it": lambda table: Variable(table).numpy(),
    "assigned": lambda table: Variable(np.zeros(table.shape, "f4")).assign(table).numpy(),
    "all rows": lambda table: gpuopt.embedding_lookup(table, np.arange(HEIGHT)),
}
READS_OF_NUMPY: dict[str, Callable[[Variable], Any]] = {
    "asarray": lambda table: np.array(np.asarray(table)),
    "np.concatenate": lambda table: np.concatenate([table, table])[: len(table)],
    "np.positive": lambda table: np.positive(table),
    "DLPack": lambda table: np.from_dlpack(table).copy(),
    "a loss": lambda table: _gradient_of(lambda: (table * table).sum(), table) / 2,
}


def _gradient_of(loss: Callable[[], Any], table: Variable) -> Any:
    [(gradient, _)] = gpuopt.AdamOptimizer().compute_gradients(loss, var_list=[table])
    return gradient


def check_read(pair: Pair, read: Callable[[Variable], Any], *, is_whole: bool = True) -> None:
    pair.step(20)
    assert pair.is_behind()
    got = read(pair.late)
    assert not (is_whole and pair.is_behind())
    close(got, pair.exact)
    pair.step(3)
    pair.check()


@pytest.mark.parametrize("read", READS)
@pytest.mark.one_in(4)
def test_a_read_sees_all_steps(read: str, device: str) -> None:
    check_read(Pair(device=device), READS[read], is_whole=read != "all rows")


@pytest.mark.parametrize("read", READS_OF_NUMPY)
def test_a_read_by_numpy_sees_all_steps(read: str) -> None:
    check_read(Pair(), READS_OF_NUMPY[read])


@pytest.mark.gpus(2)
@pytest.mark.parametrize("device", GPUS, indirect=True)
def test_a_read_by_another_gpu_sees_all_steps(device: str) -> None:
    check_read(Pair(device=device), lambda table: Variable(table, device="gpu:1"))


def test_a_flush_makes_all_steps(device: str) -> None:
    pair = Pair(device=device)
    pair.step(20)
    pair.optimizer.flush()
    assert not pair.is_behind()
    close(pair.late._array, pair.exact)
    pair.check()


WRITES: dict[str, Callable[[Variable], Any]] = {
    "assign": lambda table: table.assign(np.ones(table.shape, "f4")),
    "assign_add": lambda table: table.assign_add(np.ones(table.shape, "f4")),
    "+=": lambda table: table.__iadd__(1),
    "table[1:3] =": lambda table: table.__setitem__(slice(1, 3), 4),
}
WRITES_OF_NUMPY: dict[str, Callable[[Variable], Any]] = {
    "np.copyto": lambda table: np.copyto(table, np.float32(2)),
    "np.add, out=": lambda table: np.add(table, 1, out=table),
}


def check_write(pair: Pair, write: Callable[[Variable], Any]) -> None:
    pair.step(20)
    write(pair.late)
    write(pair.exact)
    pair.step(20)
    pair.check()


@pytest.mark.parametrize("write", WRITES)
def test_a_write_comes_after_the_steps_before_it(write: str, device: str) -> None:
    check_write(Pair(device=device), WRITES[write])


@pytest.mark.parametrize("write", WRITES_OF_NUMPY)
def test_a_write_by_numpy_comes_after_the_steps_before_it(write: str) -> None:
    check_write(Pair(), WRITES_OF_NUMPY[write])


def test_a_lookup_brings_up_its_rows_alone() -> None:
    pair = Pair()
    pair.step(10)
    pair.apply(IndexedSlices(np.ones((1, 3), "f4"), [30]))
    pair.apply(IndexedSlices(np.ones((1, 3), "f4"), [31]))
    before = pair.late._array.copy()
    ids = np.array([[30, 2], [30, 31]])
    close(gpuopt.embedding_lookup(pair.late, ids), pair.exact.numpy()[ids])
    others = np.setdiff1d(np.arange(HEIGHT), ids)
    np.testing.assert_array_equal(pair.late._array[others], before[others])
    assert pair.is_behind()
    pair.check()


@pytest.mark.parametrize("engine", ["autograd", pytest.param("torch", marks=pytest.mark.torch)])
def test_a_loss_that_looks_rows_up_brings_up_those_alone(engine: str) -> None:
    pair = Pair()
    pair.step(10)
    pair.apply(IndexedSlices(np.ones((1, 3), "f4"), [30]))
    pair.step(2)
    before = pair.late._array.copy()
    ids = np.array([30, 2, 30])

    def loss() -> Any:
        return (gpuopt.embedding_lookup(pair.late, ids) ** 2).sum()

    marked = gpuopt.with_torch(loss) if engine == "torch" else loss
    gradient = _gradient_of(marked, pair.late)
    assert isinstance(gradient, IndexedSlices)
    close(np.asarray(gradient.values) / 2, pair.exact.numpy()[np.asarray(gradient.indices)])
    others = np.setdiff1d(np.arange(HEIGHT), ids)
    np.testing.assert_array_equal(pair.late._array[others], before[others])


def test_a_loss_may_read_the_table_after_a_lookup() -> None:
    pair = Pair()
    pair.step(20)

    def loss_of(table: Variable) -> Callable[[], Any]:
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
        pair.optimizer.apply_gradients(
            [(IndexedSlices(np.ones((len(ids), 3), "f4"), ids), pair.late)]
        )
    np.testing.assert_array_equal(pair.late._array, before)
    pair.check()


def test_betas_for_which_steps_count_for_ever_move_all_rows() -> None:
    pair = Pair(beta1=0.99, beta2=0.9)
    pair.step(5)
    assert not pair.is_behind()
    pair.check()
    for optimizer, _ in pair.both:
        optimizer.hyperparameters["beta2"] = 0.999
    pair.step(5)
    assert pair.is_behind()
    pair.check()


def test_tables_of_groups_fall_behind_beside_each_other(device: str) -> None:
    """Some of one width, which are updated together; not all in each step."""
    rng = np.random.default_rng(6)
    shapes = [(20, 2), (33, 2), (7, 2), (20, 5)]
    of_both = []
    for where, catch_up in ((device, True), ("cpu", False)):
        tables = [Variable(np.ones(shape, "f4"), device=where) for shape in shapes]
        groups = [
            ParameterGroup(variables=tables[1:2], beta1=0.5, learning_rate=0.1, epsilon=1e-4),
            ParameterGroup(variables=tables[2:3], learning_rate=0.01),
        ]
        of_both.append((gpuopt.AdamOptimizer(catch_up=catch_up, groups=groups), tables))
    for number in range(30):
        chosen = [at for at in range(4) if (number + at) % 3]
        slices = {
            at: IndexedSlices(
                rng.normal(size=(4, shapes[at][1])).astype("f4"), rng.integers(0, 7, 4)
            )
            for at in chosen
        }
        for optimizer, tables in of_both:
            optimizer.apply_gradients([(slices[at], tables[at]) for at in chosen])
        if number % 10 == 4:
            for _, tables in of_both:
                gpuopt.embedding_lookup(tables[number % 4], [1, 5])
    for table, other in zip(of_both[0][1], of_both[1][1], strict=True):
        close(table, other)


def test_a_slot_may_be_replaced() -> None:
    pair = Pair()
    pair.step(10)
    for optimizer, table in pair.both:
        slots = optimizer.state.table("m")
        slots[table.identity] = Variable(np.ones((HEIGHT, 3), "f4"), trainable=False)
    pair.step(10)
    pair.check()


@pytest.mark.parametrize("in_hook", ["_apply_sparse", "_apply_dense"])
def test_hooks_may_call_the_rule(in_hook: str) -> None:
    def apply(self: Any, grad: Any, var: Any) -> Any:
        return getattr(gpuopt.AdamOptimizer, in_hook)(self, grad, var)

    pair = Pair(type("Hooked", (gpuopt.AdamOptimizer,), {in_hook: apply}))
    pair.step(10)
    pair.apply(np.ones((HEIGHT, 3), np.float32))
    pair.step(10)
    pair.check()


@pytest.mark.parametrize("device", ["host", GPUS[1]], indirect=True)  # autograd takes no stand-in
def test_minimize_updates_tables_that_are_behind(device: str) -> None:
    pair = Pair(device=device)
    pair.step(20)
    for step in range(12):
        ids = np.array([[step % 5, 7], [2, HEIGHT - 1]])
        for optimizer, table in pair.both:

            def loss(table: Any = table, ids: Any = ids) -> Any:
                return ((gpuopt.embedding_lookup(table, ids) - 1) ** 2).sum()

            optimizer.minimize(loss, var_list=[table], gate_gradients=step % 3)
    assert pair.is_behind()
    pair.check()


@pytest.mark.internal
def test_a_table_goes_with_its_variable() -> None:
    pair = Pair()
    pair.step(3)
    behind = weakref.ref(pair.late.identity.behind)
    number = len(tables_behind.members_of_tables)
    del pair.late
    gc.collect()
    assert behind() is None
    assert len(tables_behind.members_of_tables) == number - 3


@pytest.mark.internal
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
    pair.apply(IndexedSlices(np.ones((1, 3), "f4"), [30]))
    pair.step(500)
    pair.apply(IndexedSlices(np.ones((1, 3), "f4"), [31]))
    pair.step(2)
    for optimizer, _ in pair.both:
        optimizer.hyperparameters["learning_rate"] = rate
    pair.step()
    for optimizer, _ in pair.both:
        optimizer.hyperparameters["learning_rate"] = 0.01
    pair.step(3)
    pair.late.numpy()
    assert not np.isfinite(pair.exact.numpy()).any()
    pair.check()


@pytest.mark.internal
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
            gpuopt.VariableClippingOptimizer(each, {table: [1]}, 1.0) for each, table in pair.both
        )
    pair.apply(IndexedSlices(np.ones((1, 3), "f4"), [30]))
    pair.step(4)
    behind: Any = pair.late.identity.behind
    assert behind._catch_up.last[30] == 1
    pair.check()


@pytest.mark.gpus(2)
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("device", GPUS, indirect=True)
def test_mirrored_copies_on_two_gpus_catch_up_alike() -> None:
    ids = np.random.default_rng(8).integers(0, 12, (20, 2, 3))
    ends = []
    for devices, catch_up in ((["gpu:0", "gpu:1"], True), (["cpu", "cpu"], False)):
        strategy = MirroredStrategy(devices)
        table = strategy.variable(np.ones((12, 2), np.float32), name="mirrored")
        optimizer = gpuopt.AdamOptimizer(0.01, catch_up=catch_up)

        def train(rows: Any, seen: Any, table: Any = table, optimizer: Any = optimizer) -> None:
            gpuopt.embedding_lookup(table.local, seen)
            values = 2 * gpuopt.embedding_lookup(table.local, rows)
            optimizer.apply_gradients([(IndexedSlices(values, rows), table.local)])

        for number, rows in enumerate(ids):
            strategy.run(train, [PerReplica(rows), PerReplica([[number % 12], [0]])])
        arrays = [
            [copy.numpy(), *(optimizer.get_slot(copy, name).numpy() for name in "mv")]
            for copy in table.replicas
        ]
        for one, other in zip(*arrays, strict=True):
            np.testing.assert_array_equal(one, other)
        ends.append(arrays[0])
    for got, expected in zip(*ends, strict=True):
        close(got, expected)


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.parametrize("seed", range(2))
def test_mirrored_tables_on_two_gpus_take_what_comes(seed: int) -> None:
    ends = []
    for devices, catch_up in ((["gpu:0", "gpu:1"], True), (["cpu", "cpu"], False)):
        rng = np.random.default_rng(seed)
        strategy = MirroredStrategy(devices)
        tables = [strategy.variable(np.ones((24, width), np.float32)) for width in (2, 5)]
        optimizer, other = (gpuopt.AdamOptimizer(0.01, catch_up=catch_up) for _ in "12")
        for _ in range(40):
            event = rng.choice(["", "look up", "read", "assign", "other", "read one", "flush"])
            chosen = [[0], [1], [0, 1]][rng.integers(3)]
            rows = rng.integers(0, 12, (2, 4))
            values = [rng.normal(size=(2, 4, width)).astype("f4") for width in (2, 5)]

            by = other if event == "other" else optimizer
            slices = [list(map(IndexedSlices, each, rows)) for each in values]

            def train(
                replica: int, rows: Any, event: str, by: Any, slices: Any, tables: Any = tables
            ) -> None:
                local = [table.local for table in tables]
                if event == "look up":
                    gpuopt.embedding_lookup(local[0], rows)
                if event == "read":
                    local[1].numpy()
                if event == "assign":
                    local[0].assign_add(np.full((24, 2), 0.01, "f4"))
                by.apply_gradients([(each[replica], local[at]) for at, each in slices])

            given = event, by, [(at, slices[at]) for at in chosen]
            strategy.run(train, [PerReplica([0, 1]), PerReplica(list(rows)), *given])
            if event == "read one":
                tables[0].replicas[1].numpy()
            if event == "flush":
                optimizer.flush()
        for table in tables:
            np.testing.assert_array_equal(*[copy.numpy() for copy in table.replicas])
        ends.append([table.replicas[0].numpy() for table in tables])
    for got, expected in zip(*ends, strict=True):
        close(got, expected, 4e-6)
