"""CuPy's own arrays, on host memory, go through optimizers to kernels that run on the CPU.

CuPy makes arrays on any memory it is told of, and asks no driver for it. What it computes itself
needs one, and is left out here: fills, copies and casts.
"""

from __future__ import annotations

import gc
import warnings
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from emulator import EmulatorLauncher
from every_optimizer import CONFIGURATIONS, make

import gpuopt
from gpuopt import IndexedSlices, Variable, backends
from gpuopt import device as devices
from gpuopt.backends.cuda.cuda_backend import CudaBackend
from gpuopt.device import Device

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed"),
    pytest.mark.usefixtures("launcher"),
]
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def cupy() -> Any:
    with warnings.catch_warnings(action="ignore"):  # of a missing driver
        import cupy

    return cupy


def on_gpu(host: np.ndarray) -> Any:
    """An array of CuPy's on the memory of one of numpy's."""
    memory = cupy().cuda.UnownedMemory(host.ctypes.data, max(1, host.nbytes), host, 0)
    return cupy().ndarray(host.shape, host.dtype, cupy().cuda.MemoryPointer(memory, 0))


class Launcher(EmulatorLauncher):
    """As the one for a GPU asks CuPy's arrays; what a driver would do is done in host memory."""

    def host(self, array: Any) -> np.ndarray:
        if isinstance(array, np.ndarray):
            return array
        where = {"data": (array.data.ptr, False), "shape": array.shape, "strides": array.strides}
        interface = {"version": 3, "typestr": array.dtype.str, **where}
        lent = type("Lent", (), {"__array_interface__": interface, "owner": array})()
        return np.asarray(lent).view(array.dtype)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def owns(self, arrays: Any) -> bool:
        return {array.data.device_id for array in arrays} == {self._index}

    def strided(self, arrays: Any) -> list[int]:
        return [i for i, array in enumerate(arrays) if not array._c_contiguous]


class Backend(CudaBackend):
    def full(self, shape: tuple[int, ...], dtype: Any, value: Any) -> Any:
        return on_gpu(np.full(shape, value, dtype))


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch, compiled_kernels: None) -> Launcher:
    xp: Any = ModuleType("cupy_without_driver")
    xp.ndarray, xp.cuda = cupy().ndarray, fake_cupy.cuda
    xp.empty = lambda shape, dtype: on_gpu(np.empty(shape, dtype))
    xp.zeros = lambda shape, dtype: on_gpu(np.zeros(shape, dtype))
    xp.ascontiguousarray = cupy().ascontiguousarray
    xp.may_share_memory = cupy().may_share_memory
    launcher = Launcher(xp=xp)
    xp.asnumpy = lambda array: launcher.host(array).copy()
    ask = lambda array: array.data.device_id  # noqa: E731
    monkeypatch.setitem(devices._index_by_type, cupy().ndarray, ask)
    gpu = Device("gpu")
    monkeypatch.setitem(backends._backends, gpu, Backend(gpu, launcher))
    return launcher


@pytest.mark.parametrize(
    ("name", "arguments"),
    [(name, arguments) for _, name, arguments in CONFIGURATIONS],
    ids=[identifier for identifier, _, _ in CONFIGURATIONS],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy_arrays_step_as_numpys_do(name: str, arguments: dict[str, Any], dtype: Any) -> None:
    rng = np.random.default_rng(1)
    there, here = make(name, arguments), make(name, arguments)
    shapes = [(7, 3), (5,), ()]
    values = [rng.normal(size=shape).astype(dtype) for shape in shapes]
    raw = on_gpu(values[0].copy())
    variables = [raw, *(Variable(on_gpu(value.copy()), copy=False) for value in values[1:])]
    copies = [Variable(value) for value in values]
    for step in range(4):
        gradients: list[Any] = [rng.normal(size=shape).astype(dtype) for shape in shapes]
        given: list[Any] = [on_gpu(gradient) for gradient in gradients]
        if step % 2:
            rows = rng.integers(0, 7, 5).astype(np.int32 if step == 1 else np.int64)
            gradients[0] = IndexedSlices(gradients[0][:5], rows)
            given[0] = IndexedSlices(given[0][:5], on_gpu(rows))
        for optimizer, grads, targets in ((there, given, variables), (here, gradients, copies)):
            counter = getattr(optimizer, "_global_step", None)
            optimizer.apply_gradients(zip(grads, targets, strict=True), global_step=counter)
    there.check()
    tolerance = 64 * float(ml_dtypes.finfo(dtype).eps)
    for variable, copy in zip(variables, copies, strict=True):
        for slot_name in [None, *there.get_slot_names()]:
            mine, theirs = (
                (each if slot_name is None else optimizer.get_slot(each, slot_name))
                for optimizer, each in ((there, variable), (here, copy))
            )
            got = backends.moved(getattr(mine, "storage", mine), Device.cpu)
            expected = theirs.numpy()
            np.testing.assert_allclose(
                got.astype(float), expected.astype(float), rtol=tolerance, atol=tolerance
            )


def test_a_raw_array_is_known_through_views_and_its_state_goes_with_it(launcher: Launcher) -> None:
    memory = on_gpu(np.zeros(12, np.float32))
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
    gradient = on_gpu(np.ones((2, 3), np.float32))
    for _ in range(3):
        view = memory[:6].reshape(2, 3)
        optimizer.apply_gradients([(gradient, view)])
    assert launcher.host(view).tolist() == [[-1 - 1.5 - 1.75] * 3] * 2
    assert len(optimizer.variables()) == 1
    with pytest.raises(ValueError, match="memory can be updated only once"):
        optimizer.apply_gradients([(memory[:6], memory[:6]), (memory[5:], memory[5:])])
    del memory, view
    gc.collect()
    assert optimizer.variables() == []


def test_the_same_arrays_are_recognised(launcher: Launcher) -> None:
    variables = [Variable(on_gpu(np.zeros(3, np.float32)), copy=False) for _ in range(3)]
    gradients = [on_gpu(np.ones(3, np.float32)) for _ in range(3)]
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    for _ in range(4):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    assert optimizer._repeat.is_again
    gradients[1] = on_gpu(np.full(3, 2, np.float32))
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    assert not optimizer._repeat.is_again
    assert [launcher.host(v.storage)[0] for v in variables] == [-5, -6, -5]
    wrong = on_gpu(np.ones(3, np.float64))
    with pytest.raises(TypeError, match="dtype float64"):
        optimizer.apply_gradients(zip([wrong] * 3, variables, strict=True))
