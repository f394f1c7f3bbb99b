"""CuPy's own arrays, on host memory, go through optimizers to kernels that run on the CPU.

CuPy makes arrays on any memory it is told of, and asks no driver for it. What it computes itself
needs one, and is left out here: fills, copies and casts.
"""

from __future__ import annotations

import ctypes
import gc
import warnings
import weakref
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from dtypes import every_dtype
from emulator import EmulatorLauncher
from every_optimizer import configurations, make, own_step

import gpuopt
from gpuopt import IndexedSlices, Variable, backends
from gpuopt import device as devices
from gpuopt.backends.cuda.backend import CudaBackend
from gpuopt.device import Device

pytestmark = [
    pytest.mark.value,
    pytest.mark.emulator,
    pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed"),
    pytest.mark.usefixtures("launcher"),
]


def cupy() -> Any:
    with warnings.catch_warnings(action="ignore"):  # of a missing driver
        import cupy

    return cupy


def on_gpu(host: np.ndarray) -> Any:
    """An array of CuPy's on the memory of one of numpy's."""
    memory = cupy().cuda.UnownedMemory(host.ctypes.data, max(1, host.nbytes), host, 0)
    return cupy().ndarray(host.shape, host.dtype, cupy().cuda.MemoryPointer(memory, 0))


class Launcher(EmulatorLauncher):
    """Reads CuPy's arrays as the launcher for a GPU does; works in host memory without a driver."""

    def host(self, array: Any) -> np.ndarray:
        if isinstance(array, np.ndarray):
            return array
        where = {"data": (array.data.ptr, False), "shape": array.shape, "strides": array.strides}
        interface = {"version": 3, "typestr": array.dtype.str, **where}
        lent = type("Lent", (), {"__array_interface__": interface, "owner": array})()
        return np.asarray(lent).view(array.dtype)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def unowned(self, array: Any) -> Any:
        from gpuopt.backends.cuda.cupy_launcher import CupyLauncher

        return CupyLauncher.unowned(self, array)  # type: ignore[arg-type]

    def memory_owner(self, array: Any) -> Any:
        from gpuopt.backends.cuda.cupy_launcher import CupyLauncher

        return CupyLauncher.memory_owner(self, array)  # type: ignore[arg-type]

    def owns(self, arrays: Any) -> bool:
        return {array.data.device_id for array in arrays} == {self._index}

    def strided(self, arrays: Any) -> list[int]:
        return [i for i, array in enumerate(arrays) if not array._c_contiguous]


class Backend(CudaBackend):
    def full(self, shape: tuple[int, ...], dtype: Any, value: Any) -> Any:
        return on_gpu(np.full(shape, value, dtype))


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch, compiled_kernels: None) -> Iterator[Launcher]:
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
    with backends.using(gpu, Backend(gpu, launcher)):
        yield launcher


@configurations
@every_dtype
@pytest.mark.one_in(4)
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
            optimizer.apply_gradients(
                zip(grads, targets, strict=True), global_step=own_step(optimizer)
            )
    there.check()
    tolerance = 64 * float(ml_dtypes.finfo(dtype).eps)
    for variable, copy in zip(variables, copies, strict=True):
        for slot_name in [None, *there.get_slot_names()]:
            mine, theirs = (
                (each if slot_name is None else optimizer.get_slot(each, slot_name))
                for optimizer, each in ((there, variable), (here, copy))
            )
            has_numpy = hasattr(mine, "numpy")
            got = mine.numpy() if has_numpy else backends.to_device(mine, Device.cpu)
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


@every_dtype
def test_an_unowned_array_is_on_the_same_memory_and_does_not_keep_it(
    launcher: Launcher, dtype: Any
) -> None:
    memory = on_gpu(np.zeros((4, 3), dtype))
    for array in (memory, memory[::-2], memory.T, memory[1, 1], memory[:0]):
        unowned = backends.backend_for(Device("gpu")).unowned(array)
        assert type(unowned) is cupy().ndarray
        assert (unowned.shape, unowned.strides, unowned.dtype) == (
            *(array.shape, array.strides, array.dtype),
        )
        assert unowned.data.device_id == 0
        assert unowned._c_contiguous == array._c_contiguous
        launcher.host(unowned)[...] = 7
        assert np.all(launcher.host(array) == 7)
    gone = weakref.ref(memory)
    del memory, array
    gc.collect()
    assert gone() is None


def lent_by(owner: Any, host: np.ndarray) -> Any:
    """An array of CuPy's on memory that `owner` is said to keep."""
    memory = cupy().cuda.UnownedMemory(host.ctypes.data, host.nbytes, owner, 0)
    return cupy().ndarray(host.shape, host.dtype, cupy().cuda.MemoryPointer(memory, 0))


def torch_tensor() -> tuple[Any, np.ndarray]:
    import torch

    tensor = torch.zeros(3)
    return tensor, tensor.numpy()


def tensor_on_other_memory(host: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(host).set_(torch.zeros(3))


@pytest.mark.parametrize(
    "make_owner",
    [
        lambda: (host := np.zeros(3, np.float32), host),
        pytest.param(torch_tensor, marks=pytest.mark.torch),
    ],
)
def test_state_of_lent_memory_is_found_through_arrays_that_are_made_anew(
    launcher: Launcher, make_owner: Any
) -> None:
    owner, host = make_owner()
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
    gradient = on_gpu(np.ones(3, np.float32))
    for _ in range(3):
        lender = owner if isinstance(owner, np.ndarray) else owner.detach()
        optimizer.apply_gradients([(gradient, lent_by(lender, host))])
    assert host.tolist() == [-1 - 1.5 - 1.75] * 3
    assert len(optimizer.variables()) == 1
    del owner, host, lender
    gc.collect()
    assert optimizer.variables() == []


class DLTensor(ctypes.Structure):
    """What a DLPack capsule holds, of dlpack.h's DLManagedTensor."""

    _fields_ = [
        *(("data", ctypes.c_void_p), ("device_type", ctypes.c_int32)),
        *(("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32)),
        *(("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *(("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.c_void_p)),
        *(("byte_offset", ctypes.c_uint64), ("context", ctypes.c_void_p)),
        ("deleter", ctypes.c_void_p),
    ]


def from_dlpack(host: np.ndarray) -> Any:
    shape = (ctypes.c_int64 * 1)(host.size)
    tensor = DLTensor(host.ctypes.data, 2, 0, 1, 2, 32, 1, shape, None, 0, None, None)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    kept.extend((host, shape, tensor))
    capsule = new_capsule(ctypes.addressof(tensor), b"dltensor", None)
    with warnings.catch_warnings(action="ignore"):  # from_dlpack, its successor, needs a driver
        return cupy().fromDlpack(capsule)


kept: list[Any] = []  # what CuPy reads as long as its array lives


@pytest.mark.parametrize(
    ("view", "described"),
    [
        (from_dlpack, "DLPackMemory"),
        (lambda host: from_dlpack(host)[:], "DLPackMemory"),
        (lambda host: lent_by(None, host), "type UnownedMemory"),
        (lambda host: lent_by(object(), host), "type object"),
        pytest.param(
            lambda host: lent_by(tensor_on_other_memory(host), host),
            "type Tensor",
            marks=pytest.mark.torch,
        ),
    ],
)
def test_state_is_refused_where_the_owner_is_not_known(
    launcher: Launcher, view: Any, described: str
) -> None:
    host = np.zeros(3, np.float32)
    gradient = on_gpu(np.ones(3, np.float32))
    with pytest.raises(ValueError, match=described) as raised:
        gpuopt.MomentumOptimizer(1.0, 0.5).apply_gradients([(gradient, view(host))])
    assert "gpuopt.Variable(array, copy=False)" in str(raised.value)
    assert not host.any()
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    for _ in range(2):
        optimizer.apply_gradients([(gradient, view(host))])
    assert (host == -2).all()


def test_the_same_arrays_are_recognised(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = []
    addresses = launcher.addresses

    def counting(arrays: Any) -> Any:
        looked_at.append(len(arrays))
        return addresses(arrays)

    monkeypatch.setattr(launcher, "addresses", counting)
    variables = [Variable(on_gpu(np.zeros(3, np.float32)), copy=False) for _ in range(3)]
    gradients = [on_gpu(np.ones(3, np.float32)) for _ in range(3)]
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    for _ in range(4):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    # At first; when they come again, and are watched from then on; and not any more.
    assert looked_at == [3, 3]
    gradients[1] = on_gpu(np.full(3, 2, np.float32))
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    assert looked_at == [3, 3, 3]
    assert [launcher.host(v.storage)[0] for v in variables] == [-5, -6, -5]
    wrong = on_gpu(np.ones(3, np.float64))
    with pytest.raises(TypeError, match="dtype float64"):
        optimizer.apply_gradients(zip([wrong] * 3, variables, strict=True))
