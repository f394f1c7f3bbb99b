"""Clipping of gradients by hand, under TensorFlow 1's names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from gpuopt.backends import backend_for, refuse_masked, to_device
from gpuopt.backends.backend import compute_type
from gpuopt.backends.norms import Clipping
from gpuopt.device import Device, device_of
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.operators import reading, storage_of
from gpuopt.variables.scalars import as_scalar
from gpuopt.variables.variable import FLOAT_DTYPES, Variable

Array = Any


def clip_by_value(t: Any, clip_value_min: Any, clip_value_max: Any, name: str | None = None) -> Any:
    """Returns `t` with elements below `clip_value_min` or above `clip_value_max` replaced by these.

    NaN stays.

    Args:
        t: An array of any device, a Variable, or IndexedSlices, whose values are clipped.
        clip_value_min: A number, or an array of `t`'s dtype that can be broadcast to its shape.
        clip_value_max: The same.
        name: Ignored.

    Returns:
        A new array on the same device, or IndexedSlices with one and the same indices.

    Raises:
        TypeError: `t` is not numbers, or a bound cannot be of its dtype.
        ValueError: a bound is NaN, or has another shape.
    """
    with _values("t", t) as [values]:
        with _working_on(values) as xp:
            low = _bound("clip_value_min", clip_value_min, values)
            high = _bound("clip_value_max", clip_value_max, values)
            clipped = xp.maximum(xp.minimum(values, high), low)
        return _like(t, clipped, values)


def clip_by_norm(t: Any, clip_norm: Any, axes: Any = None, name: str | None = None) -> Any:
    """Returns `t * clip_norm / max(norm, clip_norm)`, where `norm` is the root of a sum of squares.

    Where the norm is infinite, infinite elements become NaN, and others 0.

    Args:
        t: An array of any device, a Variable, or IndexedSlices, whose values are clipped.
        clip_norm: The largest norm; a number from 0.
        axes: The axes that a norm is taken over; all unless given.
        name: Ignored.

    Returns:
        A new array on the same device, or IndexedSlices with one and the same indices.

    Raises:
        TypeError: `t` is not of a floating-point type, or `clip_norm` is no number.
        ValueError: `clip_norm` is below 0 or NaN; an axis is not one of `t`'s.
    """
    most = _most(clip_norm)
    with _values("t", t, floating=True) as [values]:
        if axes is None:
            return _like(t, _clipped_alone(values, most, Clipping.NORM), values)
        over = normalize_axis_tuple(axes, values.ndim, "axes")
        with _working_on(values) as xp:
            clipped = ignore_fp_warnings(_clipped_over, xp, values, most, over)
        return _like(t, clipped, values)


def clip_by_average_norm(t: Any, clip_norm: Any, name: str | None = None) -> Any:
    """Returns `t`, scaled down to a norm of `clip_norm` for each element.

    As in TensorFlow, that is `t * clip_norm * min(size / norm, 1 / clip_norm)`. Where the norm is
    infinite, infinite elements become NaN, and others 0.

    Args:
        t: An array of any device, a Variable, or IndexedSlices, whose values are clipped.
        clip_norm: The largest norm divided by the number of elements; a number from 0.
        name: Ignored.

    Returns:
        A new array on the same device, or IndexedSlices with one and the same indices.

    Raises:
        TypeError, ValueError: See `clip_by_norm`.
    """
    most = _most(clip_norm)
    with _values("t", t, floating=True) as [values]:
        return _like(t, _clipped_alone(values, most, Clipping.AVERAGE_NORM), values)


def global_norm(t_list: Sequence[Any], name: str | None = None) -> Any:
    """Returns the root of the sum of the squares of all elements.

    A row that IndexedSlices have twice counts twice, and is not added up first, as in TensorFlow.

    Args:
        t_list: Arrays of any devices, Variables, IndexedSlices and None, which is left out.
        name: Ignored.

    Returns:
        A scalar, float64 if one of the arrays is, else float32: on the first GPU that has one of
        the arrays, for which the host does not wait; in host memory if none is on a GPU.

    Raises:
        TypeError: `t_list` is not a list or tuple; one of it is not of a floating-point type.
        ValueError: there is nothing but None.
    """
    with _tensors(t_list) as tensors:
        return _global_norm([each for each in tensors if each is not None])


def clip_by_global_norm(
    t_list: Sequence[Any], clip_norm: Any, use_norm: Any = None, name: str | None = None
) -> tuple[list[Any], Any]:
    """Returns arrays scaled down together so that their global norm is at most `clip_norm`.

    Each is `t * clip_norm * min(1 / norm, 1 / clip_norm)`, and all are NaN if the norm is infinite
    or NaN (Pascanu, Mikolov & Bengio 2012, algorithm 1).

    Args:
        t_list: Arrays of any devices, Variables, IndexedSlices and None, which stays None.
        clip_norm: The largest norm; a number from 0.
        use_norm: The norm to take in place of `global_norm(t_list)`: a scalar of any device.
        name: Ignored.

    Returns:
        (new arrays on the same devices, or IndexedSlices with one and the same indices; the norm).

    Raises:
        TypeError: `t_list` is not a list or tuple; one of it is not of a floating-point type;
            `clip_norm` or `use_norm` is no number.
        ValueError: there is nothing but None; `clip_norm` is below 0 or NaN, or one is no scalar.
    """
    most = _most(clip_norm)
    with _tensors(t_list) as tensors:
        present = [each for each in tensors if each is not None]
        norm = _global_norm(present) if use_norm is None else _scalar("use_norm", use_norm)
        clipped: list[Any] = [None] * len(tensors)
        for device in dict.fromkeys(map(device_of, present)):
            positions = [
                i
                for i, each in enumerate(tensors)
                if each is not None and device_of(each) is device
            ]
            here = [tensors[i] for i in positions]
            norm_here = to_device(norm, device)
            with _working_on(*here, norm_here):
                scaled = backend_for(device).norms.scale(
                    here, norm_here, most, Clipping.GLOBAL_NORM
                )
            for i, each in zip(positions, scaled, strict=True):
                clipped[i] = _like(t_list[i], each, tensors[i])
        return clipped, norm


@contextmanager
def _tensors(t_list: Sequence[Any]) -> Iterator[list[Array | None]]:
    """Work inside reads these arrays: the values of IndexedSlices, and None as it is."""
    if not isinstance(t_list, (list, tuple)):
        raise TypeError(f"t_list must be a list or tuple of arrays, got {type(t_list).__name__}")
    names = [f"t_list[{i}]" for i in range(len(t_list))]
    present = [(name, t) for name, t in zip(names, t_list, strict=True) if t is not None]
    if not present:
        raise ValueError(f"t_list must have at least one array, got {list(t_list)!r}")
    with reading(*t_list):
        arrays = {name: _array(name, t, floating=True) for name, t in present}
        yield [arrays.get(name) for name in names]


@contextmanager
def _values(name: str, t: Any, *, floating: bool = False) -> Iterator[list[Array]]:
    """Work inside reads one array, or the values of IndexedSlices."""
    with reading(t):
        yield [_array(name, t, floating)]


def _array(name: str, t: Any, floating: bool) -> Array:
    if isinstance(t, tuple) and any(isinstance(each, Variable) for each in t):
        raise TypeError(
            f"{name} is a pair of a gradient and a variable: give the gradients alone, as in "
            "[gradient for gradient, _ in pairs]"
        )
    given = t.values if isinstance(t, IndexedSlices) else storage_of(t)
    refuse_masked(given, name)
    array = backend_for(device_of(given)).as_array(given)
    if array.dtype == np.float64 and not hasattr(given, "dtype"):
        array = array.astype(np.float32)  # Python's floats, as in TensorFlow
    if array.dtype not in FLOAT_DTYPES and (floating or array.dtype.kind not in "iu"):
        wanted = "floating-point numbers" if floating else "numbers"
        raise TypeError(f"{name} must be {wanted}, got dtype {array.dtype}")
    return array


@contextmanager
def _working_on(*arrays: Array) -> Iterator[Any]:
    """Work inside is on the arrays' device, and they live until it is done; gives its `xp`."""
    backend = backend_for(device_of(arrays[0]))
    backend.refuse_capture("clipping")
    with backend.enter():
        yield backend.xp
        backend.hold(*arrays)


def _global_norm(arrays: Sequence[Array]) -> Any:
    # Not by generators: an exception from a signal handler in one that `any` has left is lost.
    real = np.float64 if np.float64 in [array.dtype for array in arrays] else np.float32
    devices = list(dict.fromkeys(map(device_of, arrays)))
    gpus = [device for device in devices if device.kind == "gpu"]
    home = gpus[0] if gpus else Device.cpu
    sums = []
    for device in devices:
        if device is not home:
            there = [array for array in arrays if device_of(array) is device]
            with _working_on(*there):
                total = backend_for(device).norms.sum_squares(there)
            sums.append(to_device(total, home))
    here = [array for array in arrays if device_of(array) is home]
    with _working_on(*here):
        return backend_for(home).norms.norm(here, sums, real)


def _clipped_alone(values: Array, most: np.floating[Any], clipping: Clipping) -> Array:
    norms = backend_for(device_of(values)).norms
    with _working_on(values):
        norm = norms.norm([values], (), compute_type(values.dtype))
        [clipped] = norms.scale([values], norm, most, clipping)
    return clipped


def _clipped_over(xp: Any, values: Array, most: np.floating[Any], axes: tuple[int, ...]) -> Array:
    real = compute_type(values.dtype)
    wide = values.astype(real, copy=False)
    norm = xp.sqrt(xp.sum(wide * wide, axis=axes, keepdims=True))
    clipped = wide * real(most) / xp.maximum(norm, real(most))
    return clipped.astype(values.dtype, copy=False)


def _most(clip_norm: Any) -> np.floating[Any]:
    most = as_scalar(clip_norm, "clip_norm")
    if not most >= 0:
        raise ValueError(f"clip_norm must be a number from 0, got {clip_norm!r}")
    return most


def _scalar(name: str, value: Any) -> Any:
    """Returns a scalar where it is; the host does not wait for it."""
    value = storage_of(value)
    if device_of(value).kind == "cpu":
        return as_scalar(value, name)
    array = backend_for(device_of(value)).as_array(value)
    if array.shape != () or array.dtype not in (np.float32, np.float64):
        raise ValueError(
            f"{name} must be a scalar of float32 or float64, got shape {array.shape} and dtype "
            f"{array.dtype}"
        )
    return array


def _bound(name: str, value: Any, values: Array) -> Any:
    """Returns a bound in the dtype of the values, and on their device."""
    value = storage_of(value)
    refuse_masked(value, name)
    is_number = not hasattr(value, "shape") or isinstance(value, np.generic)
    if is_number:
        whole = isinstance(value, (int, np.integer))
        if not isinstance(value, (int, float, np.number)) or not (
            whole or values.dtype in FLOAT_DTYPES
        ):
            raise TypeError(f"{name} must be a number of {values.dtype}, got {value!r}")
        if not whole and math.isnan(value):
            raise ValueError(f"{name} must not be NaN")
        return values.dtype.type(value)
    bound = to_device(value, device_of(values))
    if bound.dtype != values.dtype:
        raise TypeError(f"{name} must have dtype {values.dtype}, as t has, got {bound.dtype}")
    try:
        fits = np.broadcast_shapes(bound.shape, values.shape) == values.shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"{name} of shape {bound.shape} cannot be broadcast to t of shape {values.shape}"
        )
    return bound


def _like(t: Any, clipped: Array, values: Array) -> Any:
    """Returns what is clipped as an array, or as slices if `t` is."""
    array = clipped if device_of(values).kind == "gpu" else np.asarray(clipped)
    if isinstance(t, IndexedSlices):
        return IndexedSlices(array, t.indices, t.dense_shape)
    return array
