"""A stand-in for CuPy on machines without a GPU: arrays in host memory that refuse what CuPy does.

Read from CuPy 14's cupy/_core/core.pyx: no implicit conversion to numpy, no numpy array as an
operand, foreign operands left to their own class, and results that are always arrays, also of no
dimensions. Where CuPy is installed, each function called is also looked up there, with its
arguments.

There are two devices. As in CuPy, arrays are computed with where they are only if that is the
current device; streams and events are there to be looked at, as everything is done at once.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import threading
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

_ALIGNMENT = 512
_REFUSAL = "Implicit conversion to a NumPy array is not allowed. Please use `.get()`"


class ndarray:
    __array_priority__ = 100
    is_lent = False  # whether another library made the memory
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, host: np.ndarray, base: ndarray | None = None) -> None:
        self._host = host
        self.base = base if base is None or base.base is None else base.base
        self.device_id = cuda.current.device if base is None else base.device_id
        if base is None:
            counts.allocations += 1

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError(_REFUSAL)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        out = options.pop("out", ())
        known = ndarray, np.ndarray, numbers.Number, np.generic
        if not all(isinstance(operand, known) for operand in (*inputs, *out)):
            return NotImplemented
        if method != "__call__":
            return NotImplemented
        if out:
            options["out"] = tuple(map(_operand, out))
        result = ufunc(*map(_operand, inputs), **options)
        return out[0] if out else _on_device(result)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        if not all(issubclass(t, (ndarray, np.ndarray)) for t in types):
            return NotImplemented
        _look_up(function, args, options)
        result = function(
            *map(_operand, args), **{name: _operand(value) for name, value in options.items()}
        )
        return _on_device(result)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device_id  # CUDA

    @property
    def device(self) -> cuda.Device:
        return cuda.Device(self.device_id)

    @property
    def flags(self) -> Any:
        """The flags that CuPy's arrays have; `writeable` is not among them."""
        return _Flags(self._host.flags.c_contiguous, self._host.flags.f_contiguous)

    def __getitem__(self, index: Any) -> ndarray:
        return self._on_same_memory(self._host[_index(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        _check_device(self)
        self._host[_index(index)] = _operand(value)

    def fill(self, value: Any) -> None:
        _check_device(self)
        self._host.fill(_operand(value))

    def view(self, dtype: Any = None) -> ndarray:
        return self._on_same_memory(self._host.view(self._host.dtype if dtype is None else dtype))

    def _on_same_memory(self, result: Any) -> ndarray:
        if isinstance(result, np.ndarray) and np.may_share_memory(result, self._host):
            return ndarray(result, self)
        _check_device(self)
        return ndarray(np.asarray(result))

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __repr__(self) -> str:
        return f"fake_cupy.{self._host!r}"

    def get(self) -> np.ndarray:
        counts.synchronisations += 1
        return self._host.copy()


class _Flags(NamedTuple):
    c_contiguous: bool
    f_contiguous: bool


class _Counts:
    """Counts of operations that a steady step must not do."""

    allocations = 0
    synchronisations = 0


counts = _Counts()


class cuda:
    """The part of cupy.cuda that chooses devices and streams."""

    class _Current(threading.local):
        device = 0
        stream = 0

    current = _Current()

    class Device:
        def __init__(self, index: int) -> None:
            self.id = index

        def __enter__(self) -> None:
            self._outer = cuda.current.device
            cuda.current.device = self.id

        def __exit__(self, *raised: object) -> None:
            cuda.current.device = self._outer

    class Stream:
        """A current one other than the default, which is 0."""

        number = 0

        def __init__(self) -> None:
            cuda.Stream.number += 1
            self.ptr = cuda.Stream.number

        def __enter__(self) -> cuda.Stream:
            self._outer = cuda.current.stream
            cuda.current.stream = self.ptr
            return self

        def __exit__(self, *raised: object) -> None:
            cuda.current.stream = self._outer


def _attribute(name: str) -> property:
    return property(lambda self: getattr(self._host, name))


def _method(name: str) -> Callable[..., Any]:
    def called(self: ndarray, *args: Any, **options: Any) -> Any:
        result = getattr(self._host, name)(*args, **options)
        if isinstance(result, np.ndarray | np.generic):
            return self._on_same_memory(result)
        return result

    return called


def _operator(ufunc: np.ufunc, swapped: bool = False) -> Callable[..., Any]:
    if ufunc.nin == 1:
        return lambda self: ufunc(self)
    return lambda self, other: ufunc(other, self) if swapped else ufunc(self, other)


for _name in ("shape", "ndim", "size", "dtype", "strides", "itemsize", "nbytes"):
    setattr(ndarray, _name, _attribute(_name))
for _name in ("T", "real"):
    get_view = lambda self, name=_name: self._on_same_memory(getattr(self._host, name))  # noqa: E731
    setattr(ndarray, _name, property(get_view))
for _name in ("astype", "copy", "reshape", "ravel", "flatten", "swapaxes"):
    setattr(ndarray, _name, _method(_name))
for _name in ("sum", "max", "mean", "all", "any", "argmin", "argmax"):
    setattr(ndarray, _name, _method(_name))
for _name, _ufunc in {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.true_divide,
    "mod": np.remainder,
    "pow": np.power,
    "matmul": np.matmul,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
}.items():
    setattr(ndarray, f"__{_name}__", _operator(_ufunc))
    setattr(ndarray, f"__r{_name}__", _operator(_ufunc, swapped=True))
    setattr(
        ndarray, f"__i{_name}__", lambda self, other, ufunc=_ufunc: ufunc(self, other, out=self)
    )
for _name, _ufunc in {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "neg": np.negative,
    "abs": np.absolute,
    "invert": np.invert,
}.items():
    setattr(ndarray, f"__{_name}__", _operator(_ufunc))


def host_memory(array: Any) -> np.ndarray:
    """Returns numpy's array on the same memory, from wherever this is called."""
    return array._host if isinstance(array, ndarray) else array


def asarray(value: Any, dtype: Any = None) -> ndarray:
    host = value._host if isinstance(value, ndarray) else value
    return ndarray(np.asarray(host, dtype))


def asnumpy(array: Any) -> np.ndarray:
    return array.get() if isinstance(array, ndarray) else np.asarray(array)


def empty(shape: Any, dtype: Any = float) -> ndarray:
    """Memory as cudaMalloc gives it: aligned, and of any content."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = np.full(size + _ALIGNMENT, 0xA5, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return ndarray(memory[offset : offset + size].view(dtype).reshape(shape))


def on_memory(host: np.ndarray, device: int) -> ndarray:
    """An array on memory that is there already, as one of UnownedMemory."""
    array = object.__new__(ndarray)
    array._host, array.base, array.device_id = host, None, device
    array.is_lent = True
    return array


def from_dlpack(value: Any) -> ndarray:
    host = value._host if isinstance(value, ndarray) else np.from_dlpack(value)
    return on_memory(host, cuda.current.device)


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    array = empty(shape, dtype)
    array._host.fill(0)
    return array


def ones(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray(np.ones(shape, dtype))


def eye(n: int, m: int | None = None, k: int = 0, dtype: Any = float) -> ndarray:
    return ndarray(np.eye(n, m, k, dtype))


def concatenate(arrays: Any, axis: int = 0) -> ndarray:
    return ndarray(np.concatenate([_operand(array) for array in arrays], axis))


def unravel_index(flat: ndarray, shape: Any) -> tuple[ndarray, ...]:
    return _on_device(np.unravel_index(flat._host, shape))


def ascontiguousarray(array: ndarray) -> ndarray:
    return array if array.flags.c_contiguous else array.copy()


def may_share_memory(one: ndarray, other: ndarray) -> bool:
    return np.may_share_memory(one._host, other._host)


class _Add:
    """cupy.add; its `at` takes indices in host memory too."""

    def __call__(self, *operands: Any, **options: Any) -> Any:
        return np.add(*operands, **options)

    @staticmethod
    def at(array: ndarray, index: Any, values: Any) -> None:
        np.add.at(array._host, _index(index), _operand(values))


add = _Add()


def _of_numpy(name: str) -> Callable[..., Any]:
    function = getattr(np, name)

    def called(*args: Any, **options: Any) -> Any:
        _look_up(function, args, options)
        return _on_device(
            function(*map(_operand, args), **{k: _operand(v) for k, v in options.items()})
        )

    return called


def __getattr__(name: str) -> Any:
    """Returns numpy's function of this name; CuPy must have it, too, where CuPy is installed."""
    if name.startswith("_"):
        raise AttributeError(name)
    return _of_numpy(name)


def _operand(value: Any) -> Any:
    """Takes arrays off the device, also out of lists, where CuPy would accept them."""
    if isinstance(value, ndarray):
        _check_device(value)
        return value._host
    if isinstance(value, np.ndarray) or type(value).__name__.endswith("Box"):
        raise TypeError(f"Unsupported type {type(value)}")
    if isinstance(value, list | tuple):
        return type(value)(map(_operand, value))
    return value


def _check_device(array: ndarray) -> None:
    if array.device_id != cuda.current.device:
        raise ValueError(
            f"Array device must be same as the current device: array device = {array.device_id} "
            f"while current = {cuda.current.device}"
        )


def _index(index: Any) -> Any:
    """Indices alone may be in host memory."""
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    return index._host if isinstance(index, ndarray) else index


def _on_device(result: Any) -> Any:
    if isinstance(result, np.ndarray | np.generic):
        return ndarray(np.asarray(result))
    if isinstance(result, list):
        return list(map(_on_device, result))
    if isinstance(result, tuple) and _holds_arrays(result):  # CuPy's tuples have no names
        return tuple(map(_on_device, result))
    return result


def _holds_arrays(results: tuple[Any, ...]) -> bool:
    return any(isinstance(result, np.ndarray | np.generic) for result in results)


@functools.cache
def _cupy() -> Any:
    if find_spec("cupy") is None:
        return None
    with warnings.catch_warnings(action="ignore"):  # of a missing driver
        import cupy
    return cupy


def _look_up(function: Any, args: Any, options: Any) -> None:
    """Raises TypeError where CuPy lacks the function, or would not take these arguments."""
    if _cupy() is None:
        return
    module = "" if isinstance(function, np.ufunc) else function.__module__
    path = [*module.split(".")[1:], function.__name__]
    try:
        in_cupy = functools.reduce(getattr, path, _cupy())
    except AttributeError:
        raise TypeError(f"cupy has no {'.'.join(path)}") from None
    try:
        signature = inspect.signature(in_cupy)
    except ValueError:
        return
    signature.bind(*args, **options)
    if options.get("order", "C") is None:
        raise TypeError(f"cupy.{function.__name__} refuses order=None")
