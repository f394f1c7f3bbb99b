"""Makes HIPS autograd keep float32 in float32, and differentiate CuPy arrays.

Some of autograd's derivatives make float64 of float32 on the way, or convert a device array to
numpy, which CuPy refuses. Those are registered again here, through autograd's public extension
interface, with the same values. This holds for the whole process.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import autograd.numpy as anp
import ml_dtypes
import numpy as np
from autograd.extend import SparseObject, VSpace, defvjp, defvjp_argnum, primitive, vspace
from autograd.numpy import numpy_vjps, numpy_wrapper
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.numpy.numpy_vspaces import ArrayVSpace
from autograd.tracer import trace_primitives_map
from autograd.util import func

_lock = threading.Lock()
_installed = False
# Array types of devices to their modules, as cupy.ndarray to cupy.
_device_modules: dict[type, Any] = {}

# Functions that autograd wraps by hand, so that numpy's own do not lead to them.
_WRAPPED_BY_HAND = (
    "array",
    "concatenate",
    "hstack",
    "mean",
    "stack",
    "std",
    "var",
    "vstack",
)


def array_module(array: Any) -> Any:
    """Returns the module that computes with `array`: numpy, or CuPy."""
    return _device_modules.get(type(array), np)


def install() -> None:
    """Registers the derivatives, once in a process, and CuPy as soon as it is imported."""
    global _installed
    if not _installed:
        with _lock:
            if not _installed:
                _register_derivatives()
                _register_bfloat16()
                _installed = True
    cupy = sys.modules.get("cupy")
    if cupy is not None and cupy.ndarray not in _device_modules:
        register_device_arrays(cupy.ndarray, cupy)


def register_device_arrays(array_type: type, module: Any) -> None:
    """Has autograd trace arrays of `array_type`, which `module` computes with."""

    class DeviceVSpace(ArrayVSpace):
        def __init__(self, value: Any) -> None:
            self.shape, self.dtype = value.shape, value.dtype

        def zeros(self) -> Any:
            return module.zeros(self.shape, dtype=self.dtype)

        def ones(self) -> Any:
            return module.ones(self.shape, dtype=self.dtype)

    ArrayBox.register(array_type)
    VSpace.register(array_type, DeviceVSpace)
    _device_modules[array_type] = module


def _register_bfloat16() -> None:
    ArrayBox.register(ml_dtypes.bfloat16)
    VSpace.register(ml_dtypes.bfloat16, ArrayVSpace)


def _register_derivatives() -> None:
    _register_reductions()
    _register_powers()
    _register_choices()
    _register_shapes()
    _register_products()
    _register_indexing()
    _register_lists()
    _register_logsumexp()
    ArrayBox.__array__ = _refuse_conversion
    # np.f(box), spelled with numpy's own name, leads to what autograd records.
    ArrayBox.__array_function__ = _array_function


def _array_function(
    self: Any, function: Any, types: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    recorded = trace_primitives_map.get(function)
    name = getattr(function, "__name__", "")
    if name in _WRAPPED_BY_HAND and function is getattr(np, name):
        recorded = getattr(numpy_wrapper, name)
    return NotImplemented if recorded is None else recorded(*args, **options)


def _refuse_conversion(self: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    raise TypeError(
        "numpy would take an array out of the loss here, and lose its gradient. To make one of "
        "several arrays or numbers, use autograd.numpy.array or numpy.stack"
    )


# Reductions


def _axes(axis: Any, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(ndim))
    return tuple(a % ndim for a in (axis if isinstance(axis, tuple | list) else (axis,)))


def _expanded(gradient: Any, x: Any, axis: Any) -> tuple[Any, int, tuple[int, ...]]:
    """Undoes a reduction of `x`.

    Returns:
        (`gradient` spread over x's shape, how many elements each sum had, the shape that
        keepdims=True gives).
    """
    shape = anp.shape(x)
    reduced = _axes(axis, len(shape))
    kept = tuple(1 if i in reduced else size for i, size in enumerate(shape))
    count = 1
    for i in reduced:
        count *= shape[i]
    return anp.broadcast_to(anp.reshape(gradient, kept), shape), count, kept


def _as_mask(condition: Any, like: Any) -> Any:
    """Zeros and ones in the gradient's own type."""
    return numpy_wrapper._astype(condition, anp.result_type(like))


def _register_reductions() -> None:
    def sum_vjp(ans: Any, x: Any, axis: Any = None, keepdims: bool = False, **_: Any) -> Any:
        return lambda g: _expanded(g, x, axis)[0]

    def mean_vjp(ans: Any, x: Any, axis: Any = None, keepdims: bool = False, **_: Any) -> Any:
        def vjp(g: Any) -> Any:
            spread, count, _ = _expanded(g, x, axis)
            return spread * (1.0 / count)

        return vjp

    def prod_vjp(ans: Any, x: Any, axis: Any = None, keepdims: bool = False, **_: Any) -> Any:
        return lambda g: _expanded(g * ans, x, axis)[0] / x

    def extremum_vjp(ans: Any, x: Any, axis: Any = None, keepdims: bool = False, **_: Any) -> Any:
        def vjp(g: Any) -> Any:
            spread, _, kept = _expanded(g, x, axis)
            attained = _as_mask(x == anp.reshape(ans, kept), g)
            return spread * attained / anp.sum(attained, axis=axis, keepdims=True)

        return vjp

    def var_vjp(
        ans: Any, x: Any, axis: Any = None, ddof: int = 0, keepdims: bool = False, **_: Any
    ) -> Any:
        def vjp(g: Any) -> Any:
            spread, count, _ = _expanded(g, x, axis)
            return spread * (x - anp.mean(x, axis=axis, keepdims=True)) * (2.0 / (count - ddof))

        return vjp

    def std_vjp(
        ans: Any, x: Any, axis: Any = None, ddof: int = 0, keepdims: bool = False, **_: Any
    ) -> Any:
        def vjp(g: Any) -> Any:
            spread, count, _ = _expanded(g / numpy_vjps.replace_zero(ans, 1.0), x, axis)
            centered = x - anp.mean(x, axis=axis, keepdims=True)
            return spread * centered * (1.0 / max(count - ddof, 1))

        return vjp

    def trace_vjp(ans: Any, x: Any, offset: int = 0) -> Any:
        return lambda g: g * array_module(x).eye(*anp.shape(x), k=offset, dtype=anp.result_type(g))

    defvjp(anp.sum, sum_vjp)
    defvjp(numpy_wrapper._primitive_mean, mean_vjp)
    defvjp(anp.prod, prod_vjp)
    for extremum in (anp.max, anp.min, anp.amax, anp.amin):
        defvjp(extremum, extremum_vjp)
    defvjp(numpy_wrapper._primitive_var, var_vjp)
    defvjp(numpy_wrapper._primitive_std, std_vjp)
    defvjp(anp.trace, trace_vjp)


# Powers and logarithms


def _register_powers() -> None:
    def base_vjp(ans: Any, x: Any, y: Any) -> Any:
        return numpy_vjps.unbroadcast_f(x, lambda g: g * y * x ** anp.where(y, y - 1, 1.0))

    def exponent_vjp(ans: Any, x: Any, y: Any) -> Any:
        if isinstance(x, int | float):  # np.log of it would be a float64, and spread
            log_x = float(np.log(x or 1.0))
            return numpy_vjps.unbroadcast_f(y, lambda g: g * ans * log_x)
        return numpy_vjps.unbroadcast_f(
            y, lambda g: g * ans * anp.log(numpy_vjps.replace_zero(x, 1.0))
        )

    defvjp(anp.power, base_vjp, exponent_vjp)
    defvjp(anp.exp2, lambda ans, x: lambda g: g * ans * math.log(2))
    defvjp(anp.log2, lambda ans, x: lambda g: g / x / math.log(2))
    defvjp(anp.log10, lambda ans, x: lambda g: g / x / math.log(10))


# Choices between two arrays


def _register_choices() -> None:
    def chosen_vjp(argnum: int) -> Callable[..., Any]:
        def make(ans: Any, x: Any, y: Any) -> Any:
            mine, other = (x, y) if argnum == 0 else (y, x)

            def vjp(g: Any) -> Any:  # a tie is shared
                return g * _as_mask(mine == ans, g) / (1.0 + _as_mask(mine == other, g))

            return numpy_vjps.unbroadcast_f(mine, vjp)

        return make

    for choice in (anp.maximum, anp.minimum, anp.fmax, anp.fmin):
        defvjp(choice, chosen_vjp(0), chosen_vjp(1))

    def where_x(ans: Any, c: Any, x: Any, y: Any) -> Any:
        return numpy_vjps.unbroadcast_f(x, lambda g: anp.where(c, g, 0))

    def where_y(ans: Any, c: Any, x: Any, y: Any) -> Any:
        return numpy_vjps.unbroadcast_f(y, lambda g: anp.where(c, 0, g))

    defvjp(trace_primitives_map[np.where], None, where_x, where_y)


# Shapes


def _register_shapes() -> None:
    def broadcast_vjp(ans: Any, x: Any, shape: Any) -> Any:
        return numpy_vjps.unbroadcast_f(x, lambda g: g)

    def transpose_vjp(ans: Any, x: Any, axes: Any = None) -> Any:
        if axes is not None:
            positions = [axis % len(axes) for axis in axes]
            axes = tuple(sorted(range(len(axes)), key=positions.__getitem__))
        return lambda g: anp.transpose(g, axes)

    def reshape_vjp(ans: Any, x: Any, *shape: Any, order: Any = None, **_: Any) -> Any:
        # CuPy refuses order=None.
        options = {"order": order} if order else {}
        return lambda g: anp.reshape(g, anp.shape(x), **options)

    def ravel_vjp(ans: Any, x: Any, order: Any = None) -> Any:
        return reshape_vjp(ans, x, order=order)

    defvjp(anp.broadcast_to, broadcast_vjp)
    defvjp(anp.transpose, transpose_vjp)
    defvjp(anp.reshape, reshape_vjp)
    defvjp(anp.ravel, ravel_vjp)


# Products


def _register_products() -> None:
    defvjp(anp.dot, _dot_vjp(0), _dot_vjp(1))
    defvjp(anp.tensordot, _tensordot_vjp(0), _tensordot_vjp(1))

    def inner_vjp(argnum: int) -> Callable[..., Any]:
        def make(ans: Any, a: Any, b: Any) -> Any:
            axes = [anp.ndim(a) - 1], [anp.ndim(b) - 1]
            return _tensordot_vjp(argnum)(ans, a, b, axes)

        return make

    defvjp(anp.inner, inner_vjp(0), inner_vjp(1))
    defvjp_argnum(anp.einsum, _einsum_vjp)


def _dot_vjp(argnum: int) -> Callable[..., Any]:
    def make(ans: Any, a: Any, b: Any) -> Any:
        def vjp(g: Any) -> Any:
            ndim_a, ndim_b = anp.ndim(a), anp.ndim(b)
            if ndim_a == 0 or ndim_b == 0:  # a product with a number
                other, ndim_mine = (b, ndim_a) if argnum == 0 else (a, ndim_b)
                return anp.sum(g * other) if ndim_mine == 0 else g * other
            summed_b = 0 if ndim_b == 1 else ndim_b - 2
            if argnum == 0:
                free_b = [i for i in range(ndim_b) if i != summed_b]
                of_g = list(range(ndim_a - 1, ndim_a - 1 + len(free_b)))
                return anp.tensordot(g, b, axes=[of_g, free_b])
            free_a = list(range(ndim_a - 1))
            return anp.moveaxis(anp.tensordot(a, g, axes=[free_a, free_a]), 0, summed_b)

        return vjp

    return make


def _tensordot_vjp(argnum: int) -> Callable[..., Any]:
    def make(ans: Any, a: Any, b: Any, axes: Any = 2) -> Any:
        ndim_a, ndim_b = anp.ndim(a), anp.ndim(b)
        if isinstance(axes, int):
            summed_a, summed_b = list(range(ndim_a - axes, ndim_a)), list(range(axes))
        else:
            summed_a, summed_b = _axis_list(axes[0], ndim_a), _axis_list(axes[1], ndim_b)
        free_a = [i for i in range(ndim_a) if i not in summed_a]
        free_b = [i for i in range(ndim_b) if i not in summed_b]

        def vjp(g: Any) -> Any:
            if argnum == 0:
                of_g = list(range(len(free_a), len(free_a) + len(free_b)))
                product = anp.tensordot(g, b, axes=[of_g, free_b])
                order = free_a + [i for _, i in sorted(zip(summed_b, summed_a, strict=True))]
            else:
                product = anp.tensordot(g, a, axes=[list(range(len(free_a))), free_a])
                order = free_b + [i for _, i in sorted(zip(summed_a, summed_b, strict=True))]
            return anp.transpose(product, tuple(sorted(range(len(order)), key=order.__getitem__)))

        return vjp

    return make


def _axis_list(axes: Any, ndim: int) -> list[int]:
    return [int(axis) % ndim for axis in (axes if isinstance(axes, list | tuple) else [axes])]


def _einsum_vjp(argnum: int, ans: Any, operands: Sequence[Any], options: Any) -> Any:
    subscripts, arrays = operands[0].replace(" ", ""), list(operands[1:])
    if "..." in subscripts:
        raise NotImplementedError("the gradient of einsum needs subscripts without '...'")
    inputs, arrow, output = subscripts.partition("->")
    letters = inputs.split(",")
    if not arrow:
        joined = "".join(letters)
        output = "".join(sorted(c for c in set(joined) if joined.count(c) == 1))
    mine = argnum - 1
    wanted = letters[mine]
    others = [subscript for i, subscript in enumerate(letters) if i != mine]
    if len(set(wanted)) != len(wanted):
        raise NotImplementedError(f"the gradient of einsum by {wanted!r}, which repeats an index")
    known = set("".join([output, *others]))

    def vjp(g: Any) -> Any:
        reached = "".join(c for c in wanted if c in known)
        rest = [array for i, array in enumerate(arrays) if i != mine]
        product = anp.einsum(f"{','.join([output, *others])}->{reached}", g, *rest)
        shape = anp.shape(arrays[mine])
        kept = tuple(n if c in known else 1 for c, n in zip(wanted, shape, strict=True))
        return anp.broadcast_to(anp.reshape(product, kept), shape)

    return vjp


# Indexing


def _is_basic(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(i, int | np.integer | slice | type(None) | type(...)) for i in parts)


@primitive
def _put_back(x: Any, index: Any, space: Any) -> Any:
    """An array of zeros with `x` added at `index`, made when it is needed."""

    def add_to(array: Any) -> Any:
        if _is_basic(index):
            array[index] += x
        else:
            array_module(array).add.at(array, index, x)
        return array

    return SparseObject(space, add_to)


def _register_indexing() -> None:
    def item_vjp(ans: Any, array: Any, index: Any) -> Any:
        return lambda g: _put_back(g, index, vspace(array))

    def take_vjp(ans: Any, x: Any, indices: Any, axis: Any = None, **_: Any) -> Any:
        if axis is None:
            flat = array_module(indices).asarray(indices) % anp.size(x)
            index = array_module(indices).unravel_index(flat, anp.shape(x))
        else:
            index = (*(slice(None),) * (axis % anp.ndim(x)), indices)
        return lambda g: _put_back(g, index, vspace(x))

    def sort_vjp(ans: Any, x: Any, axis: Any = -1, **_: Any) -> Any:
        if axis is None:
            raise NotImplementedError("the gradient of sort needs an axis; ravel the array first")
        order = anp.argsort(getattr(x, "_value", x), axis)
        shape = anp.shape(x)
        index: list[Any] = list(np.ix_(*map(np.arange, shape)))
        index[axis] = order
        return lambda g: _put_back(g, tuple(index), vspace(x))

    def diagonal_vjp(ans: Any, x: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
        first, second = sorted((axis1 % anp.ndim(x), axis2 % anp.ndim(x)))
        # Where numpy puts the dimension that two index arrays give.
        position = first if second == first + 1 else 0

        def vjp(g: Any) -> Any:
            steps = np.arange(anp.shape(g)[-1])
            index: list[Any] = [slice(None)] * anp.ndim(x)
            index[axis1] = steps + max(-offset, 0)
            index[axis2] = steps + max(offset, 0)
            return _put_back(anp.moveaxis(g, -1, position), tuple(index), vspace(x))

        return vjp

    defvjp(func(ArrayBox.__getitem__), item_vjp)
    defvjp(_put_back, lambda ans, x, index, space: lambda g: g[index])
    defvjp(anp.take, take_vjp)
    defvjp(anp.sort, sort_vjp)
    defvjp(anp.diagonal, diagonal_vjp)


# Arrays made of arrays


@primitive
def _concatenate(axis: int, *arrays: Any) -> Any:
    return np.concatenate(arrays, axis)


@primitive
def _array_of(args: Any, options: Any, *elements: Any) -> Any:
    device = next((_device_modules[type(e)] for e in elements if type(e) in _device_modules), None)
    if device is None:
        return np.array(elements, *args, **options)
    return np.stack([e if type(e) in _device_modules else device.asarray(e) for e in elements])


@primitive
def _array_of_one(args: Any, options: Any, element: Any) -> Any:
    if type(element) not in _device_modules:
        return np.array(element, *args, **options)
    for _ in range(max(0, options.get("ndmin", 0) - element.ndim)):
        element = element[None]
    return element


def _register_lists() -> None:
    def concatenate_vjp(argnum: int, ans: Any, args: Any, options: Any) -> Any:
        axis, arrays = args[0], args[1:]
        sizes = [anp.shape(array)[axis] for array in arrays]
        start = sum(sizes[: argnum - 1])
        index = [slice(None)] * anp.ndim(ans)
        index[axis] = slice(start, start + sizes[argnum - 1])
        return lambda g: g[tuple(index)]

    defvjp_argnum(_concatenate, concatenate_vjp)
    defvjp_argnum(_array_of, lambda argnum, ans, args, options: lambda g: g[argnum - 2])
    defvjp(
        _array_of_one,
        lambda ans, args, options, x: lambda g: anp.reshape(g, anp.shape(x)),
        argnums=(2,),
    )
    numpy_wrapper.concatenate_args = anp.concatenate_args = _concatenate
    numpy_wrapper.array_from_args = _array_of
    numpy_wrapper._array_from_scalar_or_array = _array_of_one


@primitive
def logsumexp(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """Returns log(sum(exp(x))) without overflow; autograd's own calls scipy, on the host."""
    largest = np.max(x, axis=axis, keepdims=True)
    result = np.log(np.sum(np.exp(x - largest), axis=axis, keepdims=True)) + largest
    return result if keepdims else np.squeeze(result, axis=_axes(axis, np.ndim(x)))


def _register_logsumexp() -> None:
    def vjp(ans: Any, x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        return lambda g: _expanded(g, x, axis)[0] * anp.exp(x - _expanded(ans, x, axis)[0])

    defvjp(logsumexp, vjp)
    if find_spec("scipy") is not None:  # without it, autograd.scipy cannot be imported
        import autograd.scipy.special

        autograd.scipy.special.logsumexp = logsumexp
