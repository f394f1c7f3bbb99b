"""The kernels of row-wise rules, run on the CPU, where rows lie in other ways than side by side."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from emulator.emulator import EmulatorLauncher
from every_kernel import kernels_of, kernels_without_rule, types_of
from kernel_updates import Arrays, Update, apply_dense, apply_sparse, check, copy_of, sparse_case

from gpuopt.backends import Target
from gpuopt.backends.backend import SparseUpdate
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.backend import CudaBackend
from gpuopt.backends.cuda.launch_shapes import DENSE_THREADS, MAX_CHUNK, MIN_CHUNK
from gpuopt.backends.cuda.structs import FEW_GRADIENTS, FewGradients, FewScalars
from gpuopt.device import Device
from gpuopt.optimizers.partial_row_wise_adam import partial_row_wise_adam as rule

pytestmark = pytest.mark.emulator

SANITIZED = bool(os.environ.get("GPUOPT_EMULATOR_SANITIZE"))


@pytest.fixture(scope="module", autouse=True)
def kernels_are_compiled() -> None:
    """Compiles the kernels of this file at once, on all cores."""
    every = [*kernels_without_rule(), *kernels_of(rule)]
    EmulatorLauncher().prepare(
        kernel for kernel in every if types_of(kernel).isdisjoint({"__half", "__nv_bfloat16"})
    )


@pytest.fixture(params=[7] if SANITIZED else [0, 7], ids=lambda seed: f"order-{seed}")
def launcher(request: pytest.FixtureRequest) -> EmulatorLauncher:
    return EmulatorLauncher(seed=request.param)


@pytest.fixture
def backend(launcher: EmulatorLauncher) -> CudaBackend:
    return CudaBackend(Device("gpu"), launcher)


def misaligned(array: np.ndarray) -> np.ndarray:
    """Returns a copy at an address that is not aligned to packs."""
    return np.concatenate([array.reshape(-1)[:1], array.reshape(-1)])[1:].reshape(array.shape)


def variants(plain: Update) -> list[Update]:
    """The same update where its arrays lie otherwise."""
    strided = np.asfortranarray
    m, v = plain.slots
    return [
        plain,
        plain._replace(var=misaligned(plain.var)),
        plain._replace(grad=misaligned(plain.grad)),
        plain._replace(slots=[misaligned(m), v]),
        plain._replace(slots=[m, misaligned(v)]),
        plain._replace(slots=[strided(m), np.repeat(v, 2, axis=0)[::2]]),
        plain._replace(var=strided(plain.var), grad=strided(plain.grad)),
    ]


@pytest.mark.parametrize("width", [3, 8, 600])
def test_dense_rows_are_updated_wherever_they_lie(backend: CudaBackend, width: int) -> None:
    arrays = Arrays(rule, "float32")
    updates = variants(arrays.update(9, width))
    updates.append(arrays.update(4, width, grad=np.broadcast_to(arrays.gradient(1), (4, width))))
    updates = [copy_of(each) if each is updates[0] else each for each in updates]
    for update in updates:
        expected = copy_of(update)
        scalars = arrays.scalars()
        apply_dense(CpuBackend(), rule, [expected], scalars)
        apply_dense(backend, rule, [update], scalars)
        check([update], [expected])


@pytest.mark.parametrize("width", [3, 8, 600])
def test_sparse_rows_are_updated_wherever_they_lie(backend: CudaBackend, width: int) -> None:
    arrays = Arrays(rule, "float64")
    rows = np.array([3, 1, 3, 6], np.int32)
    plain = arrays.update(7, width, grad=arrays.gradient(4, width), rows=rows)
    for update in [*variants(plain), plain._replace(grad=plain.var[:4])]:
        expected = copy_of(update._replace(grad=update.grad.copy()))
        scalars = arrays.scalars()
        apply_sparse(CpuBackend(), rule, expected, scalars, False)
        apply_sparse(backend, rule, update, scalars, False)
        check([update], [expected])


def test_a_gradient_may_lie_in_slots_of_rows(backend: CudaBackend) -> None:
    def overlapping() -> list[Update]:
        memory = np.linspace(1, 2, 40)
        ones = np.ones((4, 3))
        return [
            Update(ones.copy(), memory[2:14].reshape(4, 3), [ones.copy(), memory[:4, None]]),
            Update(ones.copy(), ones, [ones.copy(), memory[20:24, None]]),
        ]

    scalars = Arrays(rule, "float64").scalars()
    expected = [update._replace(grad=update.grad.copy()) for update in overlapping()]
    updates = overlapping()
    apply_dense(CpuBackend(), rule, expected, scalars)
    apply_dense(backend, rule, updates, scalars)
    check(updates, expected)


@pytest.mark.parametrize("shape", [(3, MIN_CHUNK + 1), (5, 2 * MIN_CHUNK), (2 * MIN_CHUNK, 3)])
def test_rows_across_chunks_are_updated_once(backend: CudaBackend, shape: tuple[int, int]) -> None:
    arrays = Arrays(rule, "float32")
    updates = [arrays.update(*shape), arrays.update(2, 5)]
    expected = [copy_of(update) for update in updates]
    scalars = arrays.scalars()
    apply_dense(CpuBackend(), rule, expected, scalars)
    apply_dense(backend, rule, updates, scalars)
    check(updates, expected)


def test_tables_of_one_width_step_together_with_scalars_of_their_groups(
    launcher: EmulatorLauncher, backend: CudaBackend
) -> None:
    arrays = Arrays(rule, "float32")
    scalars = [arrays.scalars(), arrays.scalars()]
    cases = [sparse_case(arrays, height, 6, np.array([2, 0, 2])) for height in (3, 70, 5)]
    groups = [0, 1, 0]
    for backend_, which in ((CpuBackend(), 1), (backend, 0)):
        updates = [
            SparseUpdate(backend_.plan_dense([Target(u.var, u.slots)]), u.grad, u.rows, group)
            for u, group in zip((case[which] for case in cases), groups, strict=True)
        ]
        backend_.apply_sparse(rule, updates, scalars, other_rows=None)
    check([case[0] for case in cases], [case[1] for case in cases])


def test_rows_that_are_refused_change_nothing(backend: CudaBackend) -> None:
    arrays = Arrays(rule, "float32")
    dense, rows = arrays.update(5, 6), np.array([1])
    sparse = arrays.update(5, 6, grad=arrays.gradient(1, 6), rows=rows)
    before = [copy_of(dense), copy_of(sparse)]
    flag = backend.row_flags.new()
    flag.array[0] = 1
    apply_dense(backend, rule, [dense], arrays.scalars(), refused=flag)
    apply_sparse(backend, rule, sparse, arrays.scalars(), False, refused=flag)
    for got, expected in zip([dense, sparse], before, strict=True):
        arrays_of: Any = zip((got.var, *got.slots), (expected.var, *expected.slots), strict=True)
        assert all(np.array_equal(a, b) for a, b in arrays_of)


def test_rows_beyond_32_bits_are_reached(launcher: EmulatorLauncher) -> None:
    """The kernel gets arrays that end where the test's do and begin 2**32 rows earlier."""
    arrays = Arrays(rule, "float32")
    before, width = 2**32, 8
    update, expected = (copy_of(each) for each in [arrays.update(2, width)] * 2)
    scalars = arrays.scalars()
    apply_dense(CpuBackend(), rule, [expected], scalars)
    m, v = update.slots
    grad, var, m_start = (
        each.ctypes.data - 4 * width * before for each in (update.grad, update.var, m)
    )
    launcher.launch(
        kernels.dense_update(rule, "float32"),
        1,
        DENSE_THREADS,
        variables=np.array([(before + 2) * width, 0, var, m_start, v.ctypes.data - 4 * before]),
        num_variables=1,
        groups=np.zeros(1, np.int64),
        widths=np.array([width]),
        chunks=np.array([0, before * width // MAX_CHUNK], np.uint32),
        num_chunks=1,
        chunk_size=MAX_CHUNK,
        grads=np.array([grad]),
        few_grads=FewGradients([0] * FEW_GRADIENTS),
        scalars=FewScalars(
            np.array([scalars[name] for name in rule.scalars], np.float32).tobytes()
        ),
        many_scalars=None,
        refused=np.zeros(2, np.uint64),
    )
    check([update], [expected])
