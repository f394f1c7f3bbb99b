"""Tables that are sorted and updated together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dtypes import DTYPES_BY_NAME
from emulator.emulator import EmulatorLauncher
from every_optimizer import rules_of_each_shape, update_rules

from gpuopt.backends import Backend, Target
from gpuopt.backends.backend import RowCheck, SparseUpdate, compute_type
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cuda.backend import CudaBackend
from gpuopt.backends.cuda.sorted_rows import Table
from gpuopt.backends.cuda.sparse_launches import SparseLaunches, kind_of
from gpuopt.backends.cuda.workspace import Workspace
from gpuopt.backends.record import NOTHING_KNOWN
from gpuopt.backends.row_order import MAX_ROWS, MAX_SHORT_KEYS, together
from gpuopt.codecs import Codecs, Plain
from gpuopt.device import Device
from gpuopt.rules.update_rule import UpdateRule

pytestmark = [pytest.mark.value, pytest.mark.emulator]

SANITIZED = bool(os.environ.get("GPUOPT_EMULATOR_SANITIZE"))
[MOMENTUM] = [rule for rule in update_rules() if rule.name == "momentum"]


class Model:
    """Tables of a rule, on two backends: what one computes is compared with the other's."""

    def __init__(
        self, rule: UpdateRule, dtype: str, shapes: Sequence[tuple[int, ...]], seed: int = 0
    ) -> None:
        self.rule, self.dtype, self.shapes = rule, DTYPES_BY_NAME[dtype], shapes
        self.rng = np.random.default_rng(seed)
        self.tables = [self._arrays(shape) for shape in shapes]
        self.expected = [[array.copy() for array in table] for table in self.tables]
        self.launcher = EmulatorLauncher(seed=seed)
        self.gpu = CudaBackend(Device("gpu"), self.launcher)
        self.cpu = CpuBackend()
        self._plans = [self._planned(self.gpu, self.tables), self._planned(self.cpu, self.expected)]

    def _arrays(self, shape: tuple[int, ...]) -> list[np.ndarray]:
        slots = [(0, 0.5) if name == "mg" else (1, 2) for name in self.rule.slots]
        ranges = [(-1, 1), *slots]
        # Some begin within a pack, and some are not contiguous.
        offset = int(self.rng.integers(3))
        arrays = [
            self.rng.uniform(*limits, (offset + int(np.prod(shape)),)).astype(self.dtype)[offset:]
            for limits in ranges
        ]
        if self.rng.random() < 0.2:
            return [array.reshape(shape[::-1]).T for array in arrays]
        return [array.reshape(shape) for array in arrays]

    @staticmethod
    def _planned(backend: Backend, tables: Sequence[Sequence[np.ndarray]]) -> list[Any]:
        return [backend.plan_dense([Target(var, slots)]) for var, *slots in tables]

    def gradients(self, most_rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
        found = []
        for shape in self.shapes:
            size = (
                int(self.rng.integers(most_rows + 1)) * (self.rng.random() < 0.8) * (shape[0] > 0)
            )
            # Many of one row, and few of the others.
            rows = (self.rng.zipf(1.3, size) - 1) % max(shape[0], 1)
            values = self.rng.normal(size=(size, *shape[1:])).astype(self.dtype)
            found.append((values, rows.astype(self.rng.choice(["int32", "int64"]))))
        return found

    def step(
        self, gradients: Sequence[tuple[np.ndarray, np.ndarray]], touches_all_rows: bool = False
    ) -> None:
        real = compute_type(self.dtype)
        scalars = {name: real(self.rng.uniform(0.1, 0.9)) for name in self.rule.scalars}
        for backend, plans in zip((self.gpu, self.cpu), self._plans, strict=True):
            updates = [
                SparseUpdate(plan, values, rows)
                for plan, (values, rows) in zip(plans, gradients, strict=True)
            ]
            other_rows = self.rule if touches_all_rows else None
            backend.apply_sparse(self.rule, updates, [scalars], other_rows=other_rows)

    def check(self, sum_error: float = 200) -> None:
        tolerance = sum_error * float(ml_dtypes.finfo(self.dtype).eps)
        for mine, theirs in zip(self.tables, self.expected, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                a64, b64 = a.astype(np.float64), b.astype(np.float64)
                np.testing.assert_allclose(a64, b64, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("touches_all_rows", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("rule", rules_of_each_shape(), ids=lambda rule: rule.name)
def test_tables_of_all_sizes_are_updated_like_each_alone(
    rule: UpdateRule, dtype: str, touches_all_rows: bool
) -> None:
    shapes = [(1, 4), (300, 4), (33, 4), (0, 4), (64, 4), (5, 3), (70, 2, 4), (9, 3), (40,), (7, 0)]
    model = Model(rule, dtype, shapes)
    for most_rows in (3, 80) if SANITIZED else (3, 80, 700, 80):
        model.step(model.gradients(most_rows), touches_all_rows)
        model.check()


@pytest.mark.parametrize("touches_all_rows", [False, True])
def test_prepared_launches_get_each_steps_arrays(touches_all_rows: bool) -> None:
    """Four steps with as many rows each: only what has moved is looked at again."""
    model = Model(MOMENTUM, "float32", [(50, 4)] * 3)
    first = [(values.copy(), rows) for values, rows in model.gradients(20)]
    for turn in range(4):
        rng = np.random.default_rng(turn)
        given = [
            (rng.normal(size=values.shape).astype(np.float32), rng.permutation(rows))
            for values, rows in first
        ]
        model.step(given, touches_all_rows)
        model.check()
    uploads = model.launcher.uploads
    model.step(given, touches_all_rows)
    model.step(given, touches_all_rows)
    model.check()
    assert model.launcher.uploads == uploads


def test_rows_of_either_type_follow_each_other() -> None:
    model = Model(MOMENTUM, "float32", [(50, 4)])
    for index in (np.int32, np.int64, np.int32):
        values = model.rng.normal(size=(20, 4)).astype(np.float32)
        model.step([(values, model.rng.integers(50, size=20).astype(index))])
        model.check()


def test_many_tables_take_as_many_launches_as_one() -> None:
    model = Model(MOMENTUM, "float32", [(2**12, 4)] * 26)
    rng = np.random.default_rng(0)
    given = [(np.ones((500, 4), np.float32), rng.integers(2**12, size=500)) for _ in model.shapes]
    flag = model.gpu.row_flags.new()
    model.gpu.row_flags.check(flag, [RowCheck(0, rows, 2**12) for _, rows in given])
    model.step(given)
    # The check, the rows' gathering, three digits, pieces, the update.
    assert model.launcher.launches == 1 + 1 + 3 * 2 + 1 + 1
    model.check()


@pytest.mark.parametrize("bad", [(3, -1), (0, 40), (25, 2**31 - 1)])
def test_a_row_outside_any_of_the_tables_is_refused_by_name(bad: tuple[int, int]) -> None:
    backend = CudaBackend(Device("gpu"), EmulatorLauncher(seed=1))
    rows = [np.arange(1 + number % 7, dtype=np.int32) for number in range(26)]
    number, row = bad
    rows[number] = np.append(rows[number], np.array([row], rows[number].dtype))
    rows[7] = rows[7].astype(np.int64)
    rows[8] = rows[8][:0]
    flag = backend.row_flags.new()
    backend.row_flags.check(flag, [RowCheck(100 + i, each, 40) for i, each in enumerate(rows)])
    assert flag.array.view(np.int64).tolist() == [101 + number, row]


def table_of(height: int, num_rows: int = 0) -> Table:
    rows = np.broadcast_to(np.int32(0), num_rows)
    return Table([0], height, np.broadcast_to(np.float32(0), (num_rows, 1)), rows)


def test_tables_whose_keys_pass_32_bits_are_sorted_apart() -> None:
    a, b, c = table_of(2**31), table_of(2**31), table_of(1)
    assert list(together([a, b])) == [[a, b]]
    assert list(together([a, b, c])) == [[a, b], [c]]
    tall = table_of(MAX_SHORT_KEYS + 1)
    assert list(together([c, tall, c, c])) == [[c], [tall], [c, c]]
    # Each table's keys begin with a word of bits.
    assert [len(some) for some in together([table_of(2**32 - 32), table_of(32)])] == [2]
    assert [len(some) for some in together([table_of(2**32 - 32), table_of(33)])] == [1, 1]
    many = [table_of(1, MAX_ROWS // 2), table_of(1, MAX_ROWS // 2 - 1)]
    assert [len(some) for some in together(many)] == [2]
    assert [len(some) for some in together([*many, table_of(1, 1)])] == [2, 1]
    assert list(together([])) == []


@pytest.mark.parametrize("heights", [(2**31, 2**31), (2**32 - 64, 64), (64, 2**32 - 64)])
def test_keys_of_32_bits_are_sorted_to_the_last(heights: tuple[int, int]) -> None:
    """The rows in memory are the last of each table: their first row has a made-up address."""
    width, here = 4, 64
    launcher = EmulatorLauncher()
    rng = np.random.default_rng(0)
    tables, variables = [], []
    for height in heights:
        var, slot = (rng.normal(size=(here, width)).astype(np.float32) for _ in range(2))
        before = (height - here) * width * 4
        rows = height - 1 - rng.integers(here, size=50)
        values = rng.normal(size=(50, width)).astype(np.float32)
        tables.append(
            Table([each.ctypes.data - before for each in (var, slot)], height, values, rows)
        )
        variables.append((var, slot, values, rows - (height - here)))
    expected = [(var.copy(), slot.copy()) for var, slot, _, _ in variables]
    scalars = {"learning_rate": np.float32(0.1), "decay": np.float32(0.9)}
    cpu = CpuBackend()
    cpu.apply_sparse(
        MOMENTUM,
        [
            SparseUpdate(cpu.plan_dense([Target(var, [slot])]), values, rows)
            for (var, slot), (_, _, values, rows) in zip(expected, variables, strict=True)
        ],
        [scalars],
        other_rows=None,
    )
    plain = Plain(np.dtype(np.float32))
    kind = kind_of(
        MOMENTUM,
        Codecs(plain, (plain,)),
        width,
        tables,
        None,
        False,
    )
    given = [scalars], NOTHING_KNOWN, np.zeros(2, np.uint64)
    SparseLaunches(launcher, Workspace(launcher), kind, tables, *given).start(tables, *given)
    for (var, slot, *_), (expected_var, expected_slot) in zip(variables, expected, strict=True):
        np.testing.assert_allclose(var, expected_var, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(slot, expected_slot, rtol=1e-5, atol=1e-6)
