"""Kernels at the edges of tiles, shares, groups, pieces, stretches and packs."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dtypes import DTYPES_BY_NAME, TYPES_OF_KERNELS
from emulator.emulator import EmulatorLauncher
from every_kernel import kernels_without_rule
from every_optimizer import update_rules
from kernel_updates import Arrays, Update, apply_dense, check, check_sorted, copy_of
from row_sums import PIECE, STRETCH, sum_by_cuts

from gpuopt.backends import Target
from gpuopt.backends.backend import SparseUpdate, compute_type
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cuda import kernels, launch_shapes, sorted_rows
from gpuopt.backends.cuda.backend import CudaBackend
from gpuopt.backends.cuda.launch_shapes import (
    FEW_ROWS,
    MAX_CHUNK,
    MIN_CHUNK,
    PACK_BYTES,
    SHARES_PER_GROUP,
    SORT_TILE,
    dense_blocks,
    dense_chunk,
    dense_threads,
    shares,
)
from gpuopt.backends.cuda.launcher import Launch, LaunchSequence
from gpuopt.backends.cuda.sorted_rows import add_sort
from gpuopt.backends.cuda.workspace import Workspace
from gpuopt.device import Device
from gpuopt.rules.clipped import bounded, clipped
from gpuopt.rules.sources import CudaSource
from gpuopt.rules.update_rule import update_rule

pytestmark = pytest.mark.emulator

SANITIZED = bool(os.environ.get("GPUOPT_EMULATOR_SANITIZE"))
ADAM = next(rule for rule in update_rules() if rule.name == "adam")
# Rows of one group of shares.
GROUP = SHARES_PER_GROUP * SORT_TILE


@pytest.fixture(scope="module", autouse=True)
def kernels_are_compiled() -> None:
    """Compiles all kernels of this file at once, on all cores."""
    EmulatorLauncher().prepare(
        [
            *kernels_without_rule(),
            *(kernels.dense_update(ADAM, dtype) for dtype in TYPES_OF_KERNELS),
        ]
    )


# Sorting


@pytest.fixture
def always_in_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a few rows sorted as many are."""
    monkeypatch.setattr(sorted_rows, "FEW_ROWS", 0)


@pytest.mark.parametrize("size", [1, 255, 257, FEW_ROWS - 1, FEW_ROWS])
@pytest.mark.parametrize("height", [1, 300, 2**40])
def test_few_rows_are_sorted_in_one_launch(size: int, height: int) -> None:
    launcher = EmulatorLauncher(seed=size)
    rows = np.random.default_rng(size).integers(height, size=size)
    rows[::3] = rows[0]
    check_sorted(launcher, rows, height)
    assert launcher.launches == 1


def test_one_row_more_is_sorted_in_shares() -> None:
    launcher = EmulatorLauncher(seed=1)
    rows = np.random.default_rng(1).integers(300, size=FEW_ROWS + 1).astype(np.int32)
    check_sorted(launcher, rows, 300)
    assert launcher.launches == 2 * 2


@pytest.mark.parametrize(
    "size",
    [1, 31, SORT_TILE - 1, SORT_TILE, SORT_TILE + 1]
    + ([] if SANITIZED else [GROUP - 1, GROUP, GROUP + 1, 2 * GROUP + 77]),
)
@pytest.mark.parametrize("height", [200, 2**16])
def test_rows_at_the_edges_of_shares_and_groups_are_sorted(
    size: int, height: int, always_in_shares: None
) -> None:
    rows = np.random.default_rng(size).zipf(1.2, size) % height
    check_sorted(EmulatorLauncher(seed=2), rows, height)


@pytest.mark.skipif(SANITIZED, reason="takes too many threads")
def test_counts_of_more_groups_than_are_loaded_at_once_are_added() -> None:
    rows = np.random.default_rng(0).integers(256, size=9 * GROUP - 5)
    check_sorted(EmulatorLauncher(), rows, 256)


@pytest.mark.parametrize("most_shares", [1, 3])
def test_shares_of_several_tiles_are_sorted(
    most_shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_shapes, "MAX_SHARES", most_shares)
    rows = np.random.default_rng(0).zipf(1.1, size=4 * SORT_TILE + 1) % 2**16
    check_sorted(EmulatorLauncher(seed=4), rows, 2**16)


def test_sorts_of_any_sizes_and_digits_follow_each_other(always_in_shares: None) -> None:
    """Each leaves the counts of groups as the next one needs them."""
    launcher = EmulatorLauncher(seed=3)
    workspace = Workspace(launcher)
    rng = np.random.default_rng(0)
    sizes = [3000, 40, 1025] if SANITIZED else [GROUP + 9, 40, 2 * GROUP + 1, 3000, GROUP + 9]
    for size in sizes:
        for height in (200, 2**16, 2**24):
            check_sorted(launcher, rng.integers(height, size=size), height, workspace)


class FlaggingLauncher(EmulatorLauncher):
    """Sets a row flag before a certain launch."""

    def __init__(self, flag: Any, before: int) -> None:
        super().__init__(seed=1)
        self._flag, self._before = flag, before

    def start(self, *arguments: Any) -> None:
        if self.launches == self._before:
            self._flag[0] = 1
        super().start(*arguments)


@pytest.mark.parametrize("before", range(5))
@pytest.mark.parametrize("height", [200, 2**16])
def test_a_sort_is_right_after_one_that_was_refused_on_its_way(
    before: int, height: int, always_in_shares: None
) -> None:
    flag = np.zeros(2, np.uint64)
    launcher = FlaggingLauncher(flag, before)
    workspace = Workspace(launcher)
    rows = np.random.default_rng(0).integers(height, size=1500)
    sequence = LaunchSequence()
    add_sort(sequence, launcher, workspace, rows, height, flag)
    sequence.start(rows)
    check_sorted(launcher, rows[::-1].copy(), height, workspace)


class FailingLauncher(EmulatorLauncher):
    """One launch fails."""

    fails_at = 0

    def start(self, *arguments: Any) -> None:
        self.fails_at -= 1
        if self.fails_at == 0:
            raise RuntimeError("a launch failed")
        super().start(*arguments)


@pytest.mark.parametrize("fails_at", range(1, 7))
def test_sums_are_right_after_a_launch_that_failed(fails_at: int, always_in_shares: None) -> None:
    launcher = FailingLauncher()
    backend = CudaBackend(Device("gpu"), launcher)
    rows = np.random.default_rng(0).integers(2**10, size=1500)
    values = np.ones((rows.size, 1), np.float32)
    launcher.fails_at = fails_at
    with pytest.raises(RuntimeError, match="a launch failed"):
        backend.sum_duplicate_rows(values, rows)
    sums, unique = backend.sum_duplicate_rows(values, rows)
    assert dict(zip(unique, sums[:, 0], strict=True)) == dict(
        zip(*np.unique(rows, return_counts=True), strict=True)
    )


# Long runs


RUNS = [1, PIECE, PIECE + 1, STRETCH + 1] + (
    [] if SANITIZED else [PIECE - 1, STRETCH - 1, STRETCH, 4 * STRETCH, 9 * STRETCH + 5]
)


@pytest.mark.parametrize(
    ("run", "dtype"),
    [(run, dtype) for run in RUNS for dtype in TYPES_OF_KERNELS]
    + ([] if SANITIZED else [(70_000, "float32")]),
)
def test_runs_of_any_length_are_summed_in_the_documented_order(run: int, dtype: str) -> None:
    """To the bit, wherever the run begins and whatever follows it."""
    rng = np.random.default_rng(run)
    for before, width in ((0, 1), (1, 8), (33, 3), (STRETCH - 1, 1), (STRETCH, 1)):
        lengths = {1: before, 2: run, 5: run if run < STRETCH else 100, 6: 3}
        rows = np.repeat(list(lengths), list(lengths.values()))
        values = rng.normal(size=(rows.size, width)).astype(DTYPES_BY_NAME[dtype])
        values[rows == 6] = -0.0
        backend = CudaBackend(Device("gpu"), EmulatorLauncher(seed=width))
        sums, unique = backend.sum_duplicate_rows(values, rows)
        real = values.astype(compute_type(values.dtype))
        for row, got in zip(unique, sums, strict=True):
            begin = int(np.searchsorted(rows, row))
            expected = sum_by_cuts(real[rows == row], begin)
            assert got.tobytes() == expected.tobytes(), (before, width, row)


@pytest.mark.skipif(SANITIZED, reason="takes too many threads")
def test_a_row_named_70_000_times_is_updated_by_its_sum() -> None:
    rule = next(rule for rule in update_rules() if rule.name == "gradient_descent")
    rows = np.zeros(70_000, np.int32)
    grad = np.ones((rows.size, 4), np.float32)
    var = np.zeros((3, 4), np.float32)
    backend = CudaBackend(Device("gpu"), EmulatorLauncher())
    plan = backend.plan_dense([Target(var, [])])
    scalars = {"learning_rate": np.float32(0.5)}
    update = SparseUpdate(plan, grad, rows)
    backend.apply_sparse(rule, [update], [scalars], other_rows=None)
    assert var.tolist() == [[-35_000.0] * 4, [0.0] * 4, [0.0] * 4]


# Dense


class Guarded:
    """Arrays at chosen offsets from 16 bytes, each between numbers that must stay as they are."""

    CANARY = 77

    def __init__(self) -> None:
        self._blocks: list[tuple[np.ndarray, int, int]] = []

    def place(self, values: np.ndarray, offset: int) -> np.ndarray:
        """Returns a copy that begins `offset` bytes after a multiple of 16."""
        itemsize, margin = values.dtype.itemsize, 2 * PACK_BYTES
        block = np.full((values.nbytes + 3 * margin) // itemsize, self.CANARY, values.dtype)
        begin = (offset - block.ctypes.data) % PACK_BYTES + margin
        assert begin % itemsize == 0
        first = begin // itemsize
        self._blocks.append((block, first, first + values.size))
        placed = block[first : first + values.size]
        placed[...] = values
        assert placed.ctypes.data % PACK_BYTES == offset or not placed.size
        return placed

    def check(self) -> None:
        for block, first, last in self._blocks:
            assert np.all(block[:first] == self.CANARY)
            assert np.all(block[last:] == self.CANARY)


@pytest.mark.parametrize("dtype", TYPES_OF_KERNELS)
def test_arrays_at_any_offset_get_the_bits_of_aligned_ones(dtype: str) -> None:
    arrays = Arrays(ADAM, dtype)
    scalars = arrays.scalars()
    offsets = range(0, PACK_BYTES, arrays.dtype.itemsize)
    if SANITIZED:
        offsets = offsets[: 3 if arrays.dtype.itemsize < 8 else 2]
    guarded = Guarded()
    for size in (0, 1, 31, 33, 200):
        updates, expected = [], []
        for of_grad in offsets:
            for of_var in offsets:
                for of_slots in {(of_var, of_var), (of_var, of_grad), (0, 0), (of_grad, of_var)}:
                    update = arrays.update(size)
                    expected.append(copy_of(update))
                    slots = [
                        guarded.place(slot, offset)
                        for slot, offset in zip(update.slots, of_slots, strict=True)
                    ]
                    grad = guarded.place(update.grad, of_grad)
                    updates.append(Update(guarded.place(update.var, of_var), grad, slots))
        by_cpu = [copy_of(update) for update in expected]
        apply_dense(CpuBackend(), ADAM, by_cpu, scalars)
        for each in expected:  # one by one: other launch shapes, same bits
            apply_dense(CudaBackend(Device("gpu"), EmulatorLauncher()), ADAM, [each], scalars)
        apply_dense(CudaBackend(Device("gpu"), EmulatorLauncher(seed=2)), ADAM, updates, scalars)
        check(updates, by_cpu)
        for mine, aligned in zip(updates, expected, strict=True):
            for a, b in zip((mine.var, *mine.slots), (aligned.var, *aligned.slots), strict=True):
                assert a.tobytes() == b.tobytes()
    guarded.check()


THREAD_OF = """
#pragma once

struct ThreadOf {
  static constexpr int num_slots = 1;

  template <class Real>
  struct Scalars {
    Real unused;
  };

  template <class Real>
  static __device__ void apply(Real& var, Real, Real*, const Scalars<Real>&) {
    var = threadIdx.x;
  }
};
"""


@pytest.mark.skipif(SANITIZED, reason="is about speed")
@pytest.mark.parametrize("dtype", TYPES_OF_KERNELS)
def test_one_thread_updates_a_pack_where_variable_and_slots_begin_alike(
    dtype: str, tmp_path: Path
) -> None:
    """Wherever that is, and wherever the gradient begins."""
    (tmp_path / "thread_of.cuh").write_text(THREAD_OF)

    @update_rule(cuda=CudaSource(tmp_path, "thread_of.cuh", "ThreadOf"))
    def thread_of(var: Any, grad: Any, slot: Any, *, unused: Any) -> None:
        raise AssertionError("runs on a GPU alone")

    size, threads, zeros = 45, 32, np.zeros(45, DTYPES_BY_NAME[dtype])
    pack = PACK_BYTES // zeros.itemsize
    guarded = Guarded()
    for of_var, of_slot, of_grad in itertools.product(
        *[range(0, PACK_BYTES, zeros.itemsize)] * 2, (0, PACK_BYTES - zeros.itemsize)
    ):
        var, slot, grad = (guarded.place(zeros, offset) for offset in (of_var, of_slot, of_grad))
        backend = CudaBackend(Device("gpu"), EmulatorLauncher())
        unused = {"unused": compute_type(zeros.dtype)(0)}
        apply_dense(backend, thread_of, [Update(var, grad, [slot])], unused)
        before, packs = -of_var % PACK_BYTES // zeros.itemsize, 0
        if of_var == of_slot:
            packs = (size - before) // pack
        else:
            before = 0
        alone = np.arange(size - packs * pack) % threads
        expected = [*alone[:before], *np.repeat(np.arange(packs), pack), *alone[before:]]
        assert var.tolist() == expected, (of_var, of_slot, of_grad)
    guarded.check()


@pytest.mark.parametrize("multiprocessors", [1, 4, 132])
def test_launch_shapes_of_dense_updates_keep_within_their_limits(multiprocessors: int) -> None:
    for elements in (0, 1, 64, 10_000 * 64, 2**20, 160 * 10**6, 2**40):
        chunk = dense_chunk(elements, multiprocessors)
        assert MIN_CHUNK <= chunk <= MAX_CHUNK
        assert chunk % (PACK_BYTES // 2) == 0
        for chunks in (1, 10_000, 2**24):
            for pack_size in (2, 4, 8):
                threads = dense_threads(elements, chunks, pack_size)
                assert threads in (32, 64, 128, 256)
                assert 1 <= dense_blocks(chunks, threads, multiprocessors) <= chunks


def test_small_tensors_get_small_blocks_and_few_elements_many_chunks() -> None:
    # On an H200: 10,000 tensors of 64 float32, of 250, of 1,024; a million elements; 160 million.
    assert dense_threads(640_000, 10_000, pack_size=4) == 32
    assert dense_threads(2_500_000, 10_000, pack_size=4) == 64
    assert dense_threads(1_024_000, 1000, pack_size=4) == 256
    assert dense_chunk(2**20, 132) == 1024
    assert dense_chunk(160 * 10**6, 132) == 16384
    assert dense_blocks(10_000, 32, 132) == dense_blocks(10_000, 64, 132) == 32 * 132
    assert dense_blocks(10_000, 256, 132) == 16 * 132


def test_65_536_rows_are_sorted_by_64_blocks_and_a_million_by_512() -> None:
    assert shares(65_536).num_shares == 64
    assert shares(2**20) == (2**20, 512, 2 * SORT_TILE)
    assert shares(2**31 - 1).num_shares <= 512


def test_launches_of_small_and_large_tensors_differ_in_threads() -> None:
    launched = []

    class Recording(EmulatorLauncher):
        def bind(self, kernel: Any, blocks: int, threads: int, /, **arguments: Any) -> Launch:
            launched.append((kernel.function, blocks, threads, arguments["chunk_size"]))
            return super().bind(kernel, blocks, threads, **arguments)

    backend = CudaBackend(Device("gpu"), Recording())
    arrays = Arrays(ADAM, "float32")
    for sizes in ([16] * 50, [3000]):
        apply_dense(backend, ADAM, [arrays.update(size) for size in sizes], arrays.scalars())
    assert launched == [("dense_update", 50, 32, 1024), ("dense_update", 3, 256, 1024)]


def test_an_update_after_a_norm_begins_with_the_chunks_that_were_measured_last() -> None:
    first_chunks = {}

    class Recording(EmulatorLauncher):
        def bind(self, kernel: Any, blocks: int, threads: int, /, **arguments: Any) -> Launch:
            first_chunks[kernel.rule.name] = arguments["chunks"][0].tolist()
            return super().bind(kernel, blocks, threads, **arguments)

    backend = CudaBackend(Device("gpu"), Recording())
    arrays, clipping = Arrays(ADAM, "float32"), clipped(bounded(ADAM))
    of_adam = arrays.scalars()
    for rule, own in ((ADAM, {}), (clipping, {"clip_bound": np.float32(0.5)})):
        updates = [arrays.update(size) for size in (5, 3000)]
        expected = [copy_of(each) for each in updates]
        # In the place of the factor, a GPU's kernel has the number of a norm: there is none.
        factors = {"clip_factor": np.float32(-1)}, {"clip_factor": np.float32(1)}
        for made_by, given, factor in zip(
            (backend, CpuBackend()), (updates, expected), factors, strict=True
        ):
            apply_dense(made_by, rule, given, {**of_adam, **own, **(factor if own else {})})
        check(updates, expected)
    assert first_chunks == {ADAM.name: [0, 0], clipping.name: [1, 2]}
