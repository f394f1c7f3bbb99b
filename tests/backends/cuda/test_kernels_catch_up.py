"""Rows that missed steps, brought up to date by kernels that run on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from dtypes import DTYPES_BY_NAME, TYPES_OF_KERNELS
from emulator.emulator import EmulatorLauncher
from every_kernel import kernels_of_late_rows, kernels_without_rule
from every_optimizer import rules_of_missed_steps
from late_tables import (
    AllRows,
    Table,
    check_reads,
    constant,
    cosine,
    distances,
    read_tables,
    step_size,
    waves,
)

from gpuopt.backends import Target
from gpuopt.backends.backend import RowCheck, SparseUpdate, compute_type
from gpuopt.backends.catch_up import CatchUp
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cuda.backend import CudaBackend
from gpuopt.backends.cuda.sorted_rows import Table as SortedTable
from gpuopt.backends.cuda.sparse_launches import SparseLaunches, kind_of
from gpuopt.backends.cuda.workspace import Workspace
from gpuopt.backends.record import NOTHING_KNOWN, StepRecord
from gpuopt.codecs import Codecs, Plain
from gpuopt.device import Device
from gpuopt.optimizers.adam import adam
from gpuopt.rules.catch_up import Factors
from gpuopt.rules.clipped import bounded, clipped
from gpuopt.rules.update_rule import UpdateRule

pytestmark = pytest.mark.emulator

FULL = bool(os.environ.get("GPUOPT_FULL"))
SANITIZED = bool(os.environ.get("GPUOPT_EMULATOR_SANITIZE"))
MISSED = rules_of_missed_steps()
BETAS = {"beta1": 0.9, "beta2": 0.999, "beta": 0.9}


@pytest.fixture(scope="module", autouse=True)
def kernels_are_compiled() -> None:
    EmulatorLauncher().prepare(
        [
            *kernels_without_rule(),
            *(kernel for dtype in TYPES_OF_KERNELS for kernel in kernels_of_late_rows(adam, dtype)),
        ]
    )


@pytest.fixture(params=[7] if SANITIZED else [0, 7], ids=lambda seed: f"order-{seed}")
def backend(request: pytest.FixtureRequest) -> CudaBackend:
    return new_backend(request.param)


def new_backend(seed: int = 0) -> CudaBackend:
    return CudaBackend(Device("gpu"), EmulatorLauncher(seed=seed))


def launches_of(backend: CudaBackend) -> int:
    return backend._launcher.launches  # type: ignore[attr-defined, no-any-return]


class Counted(NamedTuple):
    """A table and its slots, and its count of steps, on one backend."""

    backend: Any
    arrays: list[np.ndarray]
    plan: Any
    catch_up: CatchUp

    @classmethod
    def of(
        cls,
        backend: Any,
        rule: UpdateRule,
        arrays: Sequence[np.ndarray],
        scalars: dict[str, Any],
        *,
        stepping: bool = False,
    ) -> Counted:
        own = [np.array(array) for array in arrays]
        real = compute_type(own[0].dtype)
        missed = MISSED[rule]
        factors = Factors(missed, missed.own(scalars), real, stepping=stepping)
        last = np.zeros(len(own[0]), np.int32)
        catch_up = CatchUp(missed, factors, last, partial(np.zeros, dtype=real))
        return cls(backend, own, backend.plan_dense([Target(own[0], own[1:])]), catch_up)

    def update(self, values: np.ndarray, rows: np.ndarray, group: int = 0) -> SparseUpdate:
        return SparseUpdate(self.plan, values, rows, group, self.catch_up)

    def read(self, rows: Any = None) -> None:
        self.backend.bring_up_rows(self.plan, self.catch_up, rows)


def scalars_of(rule: UpdateRule, real: Any, size: float = 0.01) -> dict[str, Any]:
    numbers = {"epsilon": 1e-5, **BETAS}
    return {name: real(numbers.get(name, size)) for name in rule.scalars}


def random_arrays(rule: UpdateRule, dtype: Any, shape: tuple[int, ...], seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return [rng.uniform(0.5, 1, shape).astype(dtype) for _ in ("var", *rule.slots)]


def pair_of(
    backend: CudaBackend, rule: UpdateRule, dtype: Any, shape: tuple[int, ...], **options: Any
) -> list[Counted]:
    """The same table on the GPU, and in host memory."""
    arrays = random_arrays(rule, dtype, shape)
    scalars = scalars_of(rule, compute_type(np.dtype(dtype)))
    return [Counted.of(each, rule, arrays, scalars, **options) for each in (backend, CpuBackend())]


def step(
    tables: Sequence[Counted], rule: UpdateRule, values: np.ndarray, rows: np.ndarray, size: float
) -> None:
    real = compute_type(tables[0].arrays[0].dtype)
    for table in tables:
        table.backend.apply_sparse(
            rule, [table.update(values, rows)], [scalars_of(rule, real, size)], other_rows=None
        )


def check(gpu: Counted, cpu: Counted, eps: float = 64) -> None:
    """Compares within some eps: fused operations, and 16 bits that numpy stores between."""
    np.testing.assert_array_equal(gpu.catch_up.last, cpu.catch_up.last)
    tolerance = eps * float(ml_dtypes.finfo(gpu.arrays[0].dtype).eps)
    for mine, theirs in zip(gpu.arrays, cpu.arrays, strict=True):
        a, b = mine.astype(np.float64), theirs.astype(np.float64)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def draw(rng: np.random.Generator, height: int, shape: tuple[int, ...], dtype: Any) -> Any:
    rows = (rng.zipf(1.3, int(rng.integers(0, 90))) - 1) % height
    values = rng.normal(size=(len(rows), *shape)).astype(dtype)
    return values, rows.astype(rng.choice(["int32", "int64"]))


@pytest.mark.parametrize("stepping", [False, True])
@pytest.mark.parametrize("width", [1, 3, 8, 200])
@pytest.mark.parametrize("dtype", TYPES_OF_KERNELS)
@pytest.mark.one_in(3)
def test_rows_of_each_type_and_width_are_where_numpy_has_them(
    backend: CudaBackend, dtype: str, width: int, *, stepping: bool
) -> None:
    rng = np.random.default_rng(width)
    pair = pair_of(backend, adam, DTYPES_BY_NAME[dtype], (40, width), stepping=stepping)
    for turn in range(6 if SANITIZED else 25):
        values, rows = draw(rng, 40, (width,), DTYPES_BY_NAME[dtype])
        step(pair, adam, values, rows, 0.01 * (turn - 3))
        if turn % 5 == 4:
            some = rng.integers(0, 40, (2, 5))
            for table in pair:
                table.read(some)
    check(*pair)
    for table in pair:
        table.read()
    assert (pair[0].catch_up.last == pair[0].catch_up.now).all()
    check(*pair)


@pytest.mark.parametrize("types", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_gradients_may_be_of_another_type(backend: CudaBackend, types: tuple[str, str]) -> None:
    table, gradient = (DTYPES_BY_NAME[name] for name in types)
    rng = np.random.default_rng(9)
    pair = pair_of(backend, adam, table, (40, 8))
    for _ in range(6):
        step(pair, adam, *draw(rng, 40, (8,), gradient), 0.01)
    for each in pair:
        each.read()
    check(*pair)


@pytest.mark.skipif(SANITIZED, reason="the kernels are those of Adam but for the arithmetic")
@pytest.mark.parametrize("rule", MISSED, ids=lambda rule: rule.name)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_of_every_rule_are_where_numpy_has_them(rule: UpdateRule, dtype: Any) -> None:
    rng = np.random.default_rng(3)
    pair = pair_of(new_backend(), rule, dtype, (30, 5))
    for _ in range(30):
        step(pair, rule, *draw(rng, 8, (5,), dtype), 0.01)
    for table in pair:
        table.read()
    check(*pair)


@pytest.mark.skipif(SANITIZED, reason="thousands of steps")
@pytest.mark.parametrize(("rate", "epsilon"), [(cosine, 1e-5), (constant, 1e-8), (waves, 1e-3)])
def test_rows_are_as_close_to_all_steps_as_float32_itself(
    rate: Callable[[int], float], epsilon: float
) -> None:
    steps = 2_500 if FULL else 500
    for step, ours, of_all_rows, of_writes in distances(rate, epsilon, steps, 4, new_backend()):
        assert ours <= max(of_all_rows, 1e-6), step
        assert ours <= 2 * of_writes, step  # after few steps, roundings of slots count, too


@pytest.mark.skipif(SANITIZED, reason="hundreds of steps")
def test_each_read_and_its_rows_are_as_close_to_all_steps_as_float32_itself() -> None:
    check_reads(list(read_tables(cosine, 1e-8, 750 if FULL else 500, new_backend())))


@pytest.mark.skipif(SANITIZED, reason="hundreds of steps")
def test_sums_of_more_steps_than_move_a_row_are_numpys() -> None:
    sums = []
    for backend in (new_backend(), None):
        table = Table(np.float64, stepping=False, epsilon=1e-8, height=2, backend=backend)
        for number in range(1, 500):
            # Of both signs: the bound has none.
            table.step(np.zeros(1, np.int64), np.ones((1, 1)), step_size(waves, number))
        assert table.catch_up.factors.window < 499
        sums.append(table.catch_up.sums)
    # The last term that counts for a row is 1e-23, one in the middle of the window 1e-13.
    np.testing.assert_allclose(*sums, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("gap", [1, 255, 256, 257, 65_535, 65_536, 10**6, 2**31 - 3])
def test_slots_decay_over_any_gap(backend: CudaBackend, gap: int) -> None:
    [rule] = [rule for rule in MISSED if rule.name == "add_sign"]
    real = np.float64
    scalars = {**scalars_of(rule, real), "beta": real(1 - 2.0**-20)}
    table = Counted.of(backend, rule, random_arrays(rule, real, (4, 3)), scalars)
    before = [array.copy() for array in table.arrays]
    empty = np.zeros((0, 3), real), np.zeros(0, np.int64)
    backend.apply_sparse(rule, [table.update(*empty)], [scalars], other_rows=None)
    table.catch_up.on_device._now[0] = gap
    table.read(np.array([2, 0]))
    assert table.catch_up.last.tolist() == [gap, 0, gap, 0]
    var, m = table.arrays
    np.testing.assert_array_equal(var, before[0])
    np.testing.assert_array_equal(m[[1, 3]], before[1][[1, 3]])
    expected = before[1] * np.power(1 - 2.0**-20, gap)
    np.testing.assert_allclose(m[[0, 2]], expected[[0, 2]], rtol=4e-15)


@pytest.mark.parametrize("extreme", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("stepping", [False, True])
def test_what_is_not_finite_stays_in_its_row(extreme: float, *, stepping: bool) -> None:
    for slot in ("var", "m", "v"):
        table = Table(np.float32, stepping=stepping, epsilon=1e-8, height=3, backend=new_backend())
        exact = AllRows(np.float32, 1e-8, height=3)
        with np.errstate(all="ignore"):
            for number in range(1, 12):
                rows = np.array([0, 1] if number == 1 else [2])
                for each in (table, exact):
                    each.step(rows, np.ones((len(rows), 1)), step_size(constant, number))
                    if number == 1:
                        getattr(each, slot)[0] = extreme
            table.read()
        for name in ("var", "m", "v"):
            got, expected = getattr(table, name), getattr(exact, name)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
            np.testing.assert_allclose(got, expected, rtol=4e-6)


def test_rows_that_a_read_repeats_or_the_table_lacks_do_nothing_more(backend: CudaBackend) -> None:
    pair = pair_of(backend, adam, np.float32, (20, 6))
    rng = np.random.default_rng(1)
    for _ in range(7):
        step(pair, adam, *draw(rng, 4, (6,), np.float32), 0.01)
    gpu, cpu = pair
    for rows in ([[5, 5, 5], [7, 5, 7]], [], np.arange(3, dtype=np.uint8)):
        for table in pair:
            table.read(np.array(rows, np.asarray(rows).dtype if len(rows) else np.int64))
        check(*pair)
    gpu.read(np.array([-1, 20, 2**40, 6]))
    cpu.read(np.array([6]))
    check(*pair)


def test_a_step_takes_no_more_launches_than_one_without(backend: CudaBackend) -> None:
    rows = np.arange(3_000) % 70
    values = np.ones((3_000, 4), np.float32)
    counts = []
    for catches_up in (False, True):
        [table, _] = pair_of(backend, adam, np.float32, (100_000, 4))
        update = table.update(values, rows)
        if not catches_up:
            update = update._replace(catch_up=None)
        before = launches_of(backend)
        backend.apply_sparse(adam, [update], [scalars_of(adam, np.float32)], other_rows=None)
        counts.append(launches_of(backend) - before)
    without, with_option = counts
    assert with_option == without
    step([table], adam, values[:0], rows[:0], 0.01)
    assert launches_of(backend) - before == with_option + 1
    before = launches_of(backend)
    table.read()
    assert launches_of(backend) - before == 1


def test_the_same_steps_have_the_same_bits() -> None:
    def trained(seed: int) -> list[bytes]:
        [table, _] = pair_of(new_backend(seed), adam, np.float32, (50, 4))
        rng = np.random.default_rng(0)
        for _ in range(12):
            step([table], adam, *draw(rng, 30, (4,), np.float32), 0.01)
            table.read(rng.integers(0, 50, 9))
        table.read()
        return [array.tobytes() for array in table.arrays]

    assert trained(1) == trained(2) == trained(3)


def test_a_read_before_a_step_rounds_a_row_once_more_and_changes_nothing_else(
    backend: CudaBackend,
) -> None:
    rng = np.random.default_rng(2)
    tables = [pair_of(backend, adam, ml_dtypes.bfloat16, (12, 8))[0] for _ in "12"]
    for _ in range(20):
        values, rows = draw(rng, 12, (8,), ml_dtypes.bfloat16)
        tables[1].read(rows)
        step(tables, adam, values, rows, 0.01)
    rounding = float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps)
    for mine, theirs in zip(tables[0].arrays, tables[1].arrays, strict=True):
        got, expected = (each.astype(np.float64) for each in (theirs, mine))
        np.testing.assert_allclose(got, expected, rtol=4 * rounding, atol=4 * rounding)


@pytest.mark.parametrize("num_rows", [3, 3_000])
def test_a_refused_step_is_not_counted(backend: CudaBackend, num_rows: int) -> None:
    pair = pair_of(backend, adam, np.float32, (20, 4))
    gpu, cpu = pair
    rng = np.random.default_rng(4)
    for _ in range(4):
        step(pair, adam, *draw(rng, 10, (4,), np.float32), 0.01)
    flag = backend.row_flags.new()
    record = StepRecord(flag)
    rows = np.full(num_rows, 20)
    values = np.ones((num_rows, 4), np.float32)
    before = [each.copy() for each in (*gpu.arrays, gpu.catch_up.last, gpu.catch_up.sums)]
    scalars = [scalars_of(adam, np.float32)]
    for given in (rows, rows[:0]):  # the second is good, and comes before the flag is read
        backend.row_flags.check(flag, [RowCheck(0, given, 20)])
        update = gpu.update(values[: len(given)], given)
        backend.apply_sparse(adam, [update], scalars, other_rows=None, record=record)
    after = (*gpu.arrays, gpu.catch_up.last, gpu.catch_up.sums)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    backend.row_flags.clear(flag)
    for _ in range(3):
        step(pair, adam, *draw(rng, 10, (4,), np.float32), 0.01)
    for table in pair:
        table.read()
    gpu.catch_up.last -= gpu.catch_up.last.max() - cpu.catch_up.now
    check(*pair)


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("clips", [False, True])
def test_several_tables_and_groups_are_updated_together(
    backend: CudaBackend, num_groups: int, *, clips: bool
) -> None:
    shapes = [(33, 4), (5, 4), (64, 4), (7, 3), (1, 4)]
    rng = np.random.default_rng(5)
    groups = [
        {**scalars_of(adam, np.float32), "beta1": np.float32(0.9 - 0.1 * number)}
        for number in range(num_groups)
    ]
    rule = clipped(bounded(adam)) if clips else adam
    more = {"clip_factor": np.float32(-1), "clip_bound": np.float32(0.5)} if clips else {}
    pairs = []
    for number, shape in enumerate(shapes):
        arrays = random_arrays(adam, np.float32, shape, seed=number)
        scalars = groups[number % num_groups]
        pairs.append([Counted.of(each, adam, arrays, scalars) for each in (backend, CpuBackend())])
    for turn in range(8):
        drawn = [draw(rng, shape[0], shape[1:], np.float32) for shape in shapes]
        if turn == 5:
            drawn = [(values[:0], rows[:0]) for values, rows in drawn]
        sizes = [{**each, "step_size": np.float32(0.01 * (turn + 1)), **more} for each in groups]
        for side in range(2):
            updates = [
                pair[side].update(*given, number % num_groups)
                for number, (pair, given) in enumerate(zip(pairs, drawn, strict=True))
            ]
            if side and clips:
                sizes = [{**each, "clip_factor": np.float32(1)} for each in sizes]
            pairs[0][side].backend.apply_sparse(rule, updates, sizes, other_rows=None)
    for gpu, cpu in pairs:
        check(gpu, cpu)
        for table in (gpu, cpu):
            table.read()
        check(gpu, cpu)


def test_rows_of_slots_that_lie_elsewhere_are_brought_up(backend: CudaBackend) -> None:
    arrays = random_arrays(adam, np.float32, (12, 8))
    scalars = scalars_of(adam, np.float32)
    pair = [Counted.of(each, adam, arrays, scalars) for each in (backend, CpuBackend())]
    own = pair[0].arrays
    for place, lies in enumerate((np.asfortranarray, lambda a: np.repeat(a, 2, axis=0)[::2])):
        own[place + 1] = lies(own[place + 1])
    pair[0] = pair[0]._replace(plan=backend.plan_dense([Target(own[0], own[1:])]))
    rng = np.random.default_rng(6)
    for _ in range(6):
        step(pair, adam, *draw(rng, 12, (8,), np.float32), 0.01)
    for table in pair:
        table.read()
    check(*pair)


def test_rows_beyond_32_bits_are_found_by_their_keys() -> None:
    """The rows in memory are the last of each table: row 0 of both has a made-up address."""
    heights, here, width = (2**32 - 64, 64), 64, 4
    backend = new_backend()
    rng = np.random.default_rng(0)
    scalars = scalars_of(adam, np.float32)
    tables, pairs = [], []
    for height in heights:
        arrays = random_arrays(adam, np.float32, (here, width))
        gpu, cpu = (Counted.of(each, adam, arrays, scalars) for each in (backend, CpuBackend()))
        empty = np.zeros((0, width), np.float32), np.zeros(0, np.int64)
        step([gpu, cpu], adam, *empty, 0.02)
        rows = rng.integers(here, size=50)
        values = rng.normal(size=(50, width)).astype(np.float32)
        step([cpu], adam, values, rows, 0.01)
        count, before = gpu.catch_up.on_device, height - here
        count.table = count.table._replace(last=count.table.last - before * 4)
        addresses = [each.ctypes.data - before * width * 4 for each in gpu.arrays]
        tables.append(SortedTable(addresses, height, values, rows + before, 0, count))
        pairs.append((gpu, cpu))
    launcher: Any = backend._launcher
    plain = Plain(np.dtype(np.float32))
    kind = kind_of(adam, Codecs(plain, (plain,) * 2), width, tables, None, False)
    given = [scalars], NOTHING_KNOWN, np.zeros(2, np.uint64)
    SparseLaunches(launcher, Workspace(launcher), kind, tables, *given).start(tables, *given)
    for gpu, cpu in pairs:
        check(gpu, cpu)
