"""clip_gradients_by_global_norm: contrib's clipping for several tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gpuopt.backends import backend_for, to_device
from gpuopt.backends.backend import compute_type
from gpuopt.device import Device, device_of
from gpuopt.quietly import quietly
from gpuopt.step.pairs import Gradient, as_list, as_pairs, checked_gradient, unpack_pair
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.operators import reading
from gpuopt.variables.variable import FLOAT_DTYPES


def clip_gradients_by_global_norm(
    gradients_variables: Iterable[tuple[Any, Any]], clip_norm: float = 20.0
) -> tuple[list[tuple[Gradient | None, Any]], Any]:
    """Scales gradients down so that the norm of all of them together is at most `clip_norm`.

    Each is multiplied by `clip_norm / max(global_norm, clip_norm)`. Zero gradients, as those of
    other tasks, stay zero, so that `MultitaskOptimizerWrapper` leaves their variables alone. If a
    gradient holds NaN or infinity, all become NaN, as in TensorFlow. The host waits for a GPU
    only where variables are on the CPU, too.

    Args:
        gradients_variables: (gradient, variable) pairs, as of `compute_gradients`. Gradients are
            only read.
        clip_norm: The largest norm that is kept.

    Returns:
        The pairs, with gradients of the same types, and None where it was given; and the norm
        before clipping, a scalar in float32, or float64 if a gradient is: on the first GPU that a
        variable is on, or else the CPU.

    Raises:
        TypeError, ValueError: `clip_norm` is no number above 0; or what
            `Optimizer.apply_gradients` raises for a pair.
    """
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, int | float | np.number):
        raise TypeError(f"clip_norm must be a number, got {clip_norm!r}")
    if not 0 < clip_norm < np.inf:
        raise ValueError(f"clip_norm must be above 0 and finite, got {clip_norm!r}")
    given = as_pairs(as_list(gradients_variables))
    unpacked = [unpack_pair(position, pair) for position, pair in enumerate(given)]
    gradients = [
        None if gradient is None else checked_gradient(gradient, variable, FLOAT_DTYPES)
        for gradient, variable in unpacked
    ]
    with reading(*(gradient for gradient, _ in unpacked)):
        clipped, norm = quietly(_clip_by_global_norm, gradients, clip_norm)
    return [(gradient, pair[1]) for gradient, pair in zip(clipped, given, strict=True)], norm


def _clip_by_global_norm(
    gradients: Sequence[Gradient | None], clip_norm: float
) -> tuple[list[Gradient | None], Any]:
    norm = _global_norm(gradients)
    home = device_of(norm)
    with backend_for(home).enter():
        limit = norm.dtype.type(clip_norm)
        # The second term is 0, or NaN.
        scale = limit / backend_for(home).xp.maximum(norm, limit) + (norm - norm)
    return [None if gradient is None else _scaled(gradient, scale) for gradient in gradients], norm


def _global_norm(gradients: Sequence[Gradient | None]) -> Any:
    """Returns the norm of all gradients together; gradients of zero count for nothing."""
    by_device: dict[Device, list[Any]] = {}
    for gradient in gradients:
        if gradient is not None:
            values = _values(gradient)
            by_device.setdefault(device_of(values), []).append(values)
    every = [values for of_device in by_device.values() for values in of_device]
    real = np.float64 if any(values.dtype == np.float64 for values in every) else np.float32
    home = next((device for device in by_device if device.kind == "gpu"), Device.cpu)
    total: Any = np.zeros((), real)
    if home.kind == "gpu":
        total = to_device(total, home)
    for device, of_device in by_device.items():
        with backend_for(device).enter():
            squares = [(values.astype(real) ** 2).sum() for values in of_device]
            of_device_total = backend_for(device).xp.stack(squares).sum()
        there = to_device(of_device_total, home)
        with backend_for(home).enter():
            total = total + there
    with backend_for(home).enter():
        return backend_for(home).xp.sqrt(total)


def _scaled(gradient: Gradient, scale: Any) -> Gradient:
    values = _values(gradient)
    device = device_of(values)
    here = to_device(scale, device)
    with backend_for(device).enter():
        real = compute_type(values.dtype)
        scaled = (values.astype(real) * here.astype(real)).astype(values.dtype)
    if isinstance(gradient, IndexedSlices):
        return IndexedSlices(scaled, gradient.indices, gradient.dense_shape)
    return scaled


def _values(gradient: Gradient) -> Any:
    return gradient.values if isinstance(gradient, IndexedSlices) else gradient
