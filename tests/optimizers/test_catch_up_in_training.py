"""Rows catch up in towers, copies, workers and checkpoints as rows do that make all steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catching_up import OPTIMIZERS
from dtypes import DTYPES_BY_NAME
from safetensors.numpy import load_file

import gpuopt
from gpuopt import IndexedSlices, Saver, Variable
from gpuopt.distributed import Reduction, SyncReplicasOptimizer, TowerOptimizer, replicate

HEIGHT = 30
# What TensorFlow calls the slots of each optimizer in a file, and what is in it of no variable.
IN_FILES: dict[str, tuple[dict[str, str], list[str]]] = {
    "Adam": ({"m": "table/Adam", "v": "table/Adam_1"}, ["beta1_power", "beta2_power"]),
    "AdamW": ({"m": "table/AdamW", "v": "table/AdamW_1"}, ["beta1_power", "beta2_power"]),
    "Nadam": ({"m": "table/Adam", "v": "table/Adam_1"}, ["beta1_power", "beta2_power"]),
    "AddSign": ({"m": "table/AddSignOptimizer"}, []),
    "PowerSign": ({"m": "table/PowerSignOptimizer"}, []),
}


class Training:
    """A table and its optimizer, with rows that catch up or without."""

    def __init__(self, catch_up: Any, name: str = "Adam") -> None:
        value = np.random.default_rng(1).normal(size=(HEIGHT, 2)).astype(np.float32)
        self.table = Variable(value, name="table")
        self.optimizer = OPTIMIZERS[name](learning_rate=0.01, catch_up=catch_up)

    def step(self, gradients: list[IndexedSlices]) -> None:
        for slices in gradients:
            self.optimizer.apply_gradients([(slices, self.table)])

    def is_behind(self) -> bool:
        behind: Any = self.table.identity.behind
        return behind is not None and behind.is_behind

    def values(self) -> list[np.ndarray]:
        slots = [
            self.optimizer.get_slot(self.table, name).numpy()
            for name in self.optimizer.get_slot_names()
        ]
        return [self.table.numpy(), *slots]


def gradients(steps: int, seed: int = 2) -> Iterator[IndexedSlices]:
    """Of three rows each: of all in the first steps, of few after that."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        rows = np.arange(3 * step, 3 * step + 3) if 3 * step < HEIGHT else rng.integers(0, 6, 3)
        yield IndexedSlices(rng.normal(size=(3, 2)).astype(np.float32), rows)


def close(one: Training, other: Training) -> None:
    for got, expected in zip(one.values(), other.values(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=4e-6, atol=4e-6)


def of_both_ways() -> list[Training]:
    return [Training(catch_up) for catch_up in (True, False)]


def test_towers_look_rows_up_that_are_up_to_date() -> None:
    late, exact = both = of_both_ways()
    ids = np.random.default_rng(3).integers(0, 6, (20, 4))
    seen: list[Any] = [[], []]
    for training, lookups in zip(both, seen, strict=True):
        training.step(list(gradients(14)))
        optimizer = TowerOptimizer(training.optimizer)

        def model(
            ids: Any, training: Any = training, optimizer: Any = optimizer, lookups: Any = lookups
        ) -> Any:
            def loss() -> Any:
                return (gpuopt.embedding_lookup(training.table, ids) ** 2).sum()

            lookups.append(gpuopt.embedding_lookup(training.table, [ids[0], 20]))
            optimizer.minimize(loss, var_list=[training.table])

        train = replicate(model, Reduction.SUM, ["cpu", "cpu"])
        for batch in ids:
            train(batch)
    assert late.is_behind()
    np.testing.assert_allclose(*seen, rtol=4e-6, atol=4e-6)
    close(late, exact)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {}),
        ("float32", {"slot_bits": 8}),
        ("bfloat16", {"masters": "remainder", "slot_dtype": "bfloat16", "stochastic_rounding": 3}),
    ],
    ids=["plain", "8 bits", "remainder"],
)
def test_copies_of_a_mirrored_table_agree_to_the_bit_whoever_reads(
    dtype: str, options: dict[str, Any]
) -> None:
    strategy = gpuopt.distributed.MirroredStrategy(["cpu", "cpu"])
    table = strategy.variable(np.ones((12, 2), DTYPES_BY_NAME[dtype]), name="mirrored")
    optimizer = gpuopt.AdamOptimizer(0.01, catch_up=True, **options)
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
        np.testing.assert_allclose(other, tables[0], rtol=2e-6, atol=2e-6)


def test_a_step_of_several_workers_is_one_step_of_the_rows_that_it_names() -> None:
    late, exact = both = of_both_ways()
    for training in both:
        training.step(list(gradients(14)))
        step = Variable(0, name="global_step", dtype=np.int64, trainable=False)
        sync = SyncReplicasOptimizer(training.optimizer, 2, 2)
        given = gradients(40, seed=4)
        with sync.start(step, 0) as coordinator:
            for number in range(15):
                tickets = [
                    coordinator.push(worker, number, [(next(given), training.table)])
                    for worker in range(2)
                ]
                for ticket in tickets:
                    coordinator.wait(ticket)
        assert int(step) == 15
    assert late.is_behind()
    close(late, exact)


@pytest.mark.parametrize("saved_by", [True, False])
@pytest.mark.parametrize("restored_by", [True, "stepping", False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.one_in(8)
def test_a_file_is_restored_into_either_form(
    name: str, saved_by: bool, restored_by: Any, tmp_path: Path
) -> None:
    first, all_rows = Training(saved_by, name), Training(False, name)
    for training in (first, all_rows):
        training.step(list(gradients(25)))
    assert first.is_behind() == saved_by
    named = {"table": first.table}
    path = Saver(named, optimizers=[first.optimizer]).save(tmp_path / "model")
    tensors = load_file(path)
    slots, others = IN_FILES[name]
    keys = ["table", *map(slots.__getitem__, first.optimizer.get_slot_names())]
    assert sorted(tensors) == sorted([*others, *keys])
    # As they are after all steps, in the file itself.
    for key, expected in zip(keys, all_rows.values(), strict=True):
        np.testing.assert_allclose(tensors[key], expected, rtol=4e-6, atol=4e-6)

    second = Training(restored_by, name)
    second.step(list(gradients(12, seed=5)))  # rows that are behind are overwritten
    Saver({"table": second.table}, optimizers=[second.optimizer]).restore(path)
    for value, key in zip(second.values(), keys, strict=True):
        np.testing.assert_array_equal(value, tensors[key])
    for training in (second, all_rows):
        training.step(list(gradients(20, seed=6)))
    close(second, all_rows)
