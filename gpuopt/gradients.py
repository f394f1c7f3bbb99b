"""What a (gradient, variable) pair must be before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from operator import attrgetter, eq, is_
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib.array_utils import byte_bounds

from gpuopt.backends import Backend, backend_for, moved
from gpuopt.by_variables import ByVariables
from gpuopt.device import device_of
from gpuopt.errors import DeviceUnavailableError
from gpuopt.indexed_slices import IndexedSlices
from gpuopt.variable import Variable, as_variable

Gradient: TypeAlias = "Any | IndexedSlices"

# np.shares_memory solves a small integer program; interleaved views need little work.
_OVERLAP_WORK = 100_000


class Form(NamedTuple):
    """What dense gradients of a list of variables, all on one device, look like."""

    shapes: list[tuple[int, ...]]
    dtypes: list[np.dtype[Any]]
    backend: Backend


def checked_pairs(
    grads_and_vars: Iterable[tuple[Any, Any]],
    valid_dtypes: Set[np.dtype[Any]],
    seen: ByVariables[Form] | None = None,
) -> list[tuple[Gradient | None, Variable]]:
    """Turns what a user passes to `apply_gradients` into pairs that can be applied.

    Args:
        grads_and_vars: See `Optimizer.apply_gradients`.
        valid_dtypes: Of variables and gradients.
        seen: Lists of variables that were checked before with these `valid_dtypes`: if gradients
            for them have the right form, nothing else is left to check.

    Returns:
        Pairs in the given order. A gradient is None, an array of its variable's shape and dtype,
        or IndexedSlices whose rows fit the variable.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError, DeviceUnavailableError: something does not
            fit; the message names the variable.
    """
    given = as_list(grads_and_vars)
    if not given:
        raise ValueError("No variables provided.")
    if seen is not None and _have_form(given, seen):
        return given
    unchecked = [_unpacked(position, pair) for position, pair in enumerate(given)]
    if all(gradient is None for gradient, _ in unchecked):
        names = [variable.name for _, variable in unchecked]
        raise ValueError(f"No gradients provided for any variable: {names}.")
    pairs = [
        (
            None if gradient is None else _checked_gradient(gradient, variable, valid_dtypes),
            variable,
        )
        for gradient, variable in unchecked
    ]
    refuse_shared_memory([variable for gradient, variable in pairs if gradient is not None])
    if seen is not None:
        _note_form(pairs, seen)
    return pairs


def as_list(grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Returns a list as it is, and makes one of another iterable, or raises TypeError."""
    if type(grads_and_vars) is list:
        return grads_and_vars
    try:
        return list(grads_and_vars)
    except TypeError as error:
        raise TypeError(
            "grads_and_vars must be an iterable of (gradient, variable) pairs, got "
            f"{type(grads_and_vars).__name__}"
        ) from error


def _have_form(given: list[Any], seen: ByVariables[Form]) -> bool:
    """Whether these are gradients in memory for variables seen before: a model has thousands."""
    if set(map(type, given)) != {tuple}:
        return False
    try:
        gradients, variables = zip(*given, strict=True)
    except ValueError:
        return False
    form = seen.get(variables)
    return form is not None and has_form(gradients, form)


def has_form(gradients: Sequence[Any], form: Form) -> bool:
    """Says whether gradients are plain arrays where and as they must be."""
    return (
        form.backend.are_here(gradients)
        # Not as lists: thousands of tuples at once would set off the garbage collection.
        and all(map(eq, map(attrgetter("shape"), gradients), form.shapes))
        and all(map(is_, map(attrgetter("dtype"), gradients), form.dtypes))
    )


def _note_form(pairs: list[tuple[Gradient | None, Variable]], seen: ByVariables[Form]) -> None:
    variables = [variable for _, variable in pairs]
    devices = {variable.device for variable in variables}
    if len(devices) == 1 and not any(
        gradient is None or isinstance(gradient, IndexedSlices) for gradient, _ in pairs
    ):
        shapes = [variable.shape for variable in variables]
        dtypes = [variable.dtype for variable in variables]
        seen.keep(variables, Form(shapes, dtypes, backend_for(devices.pop())))


def first_nonfinite(grads_and_vars: Iterable[tuple[Gradient, Variable]]) -> str | None:
    """Describes the first gradient that holds NaN or infinity; None if all are finite."""
    for gradient, variable in grads_and_vars:
        values = gradient.values if isinstance(gradient, IndexedSlices) else gradient
        backend = backend_for(variable.device)
        with backend.active():
            finite = backend.xp.isfinite(values)
            if finite.all():
                continue
            first = np.unravel_index(int(finite.argmin()), values.shape)
            offset = tuple(int(i) for i in first)
            return (
                f'gradient for "{variable.name}" is not finite: {values.size - int(finite.sum())} '
                f"of {values.size} values, the first is {float(values[offset])} at {list(offset)}"
            )
    return None


def _unpacked(position: int, pair: Any) -> tuple[Any, Variable]:
    try:
        gradient, variable = pair
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"grads_and_vars[{position}] must be a (gradient, variable) pair, got {pair!r}"
        ) from error
    try:
        return gradient, as_variable(variable)
    except (TypeError, ValueError, DeviceUnavailableError) as error:
        raise type(error)(f"variable of grads_and_vars[{position}]: {error}") from error


def _checked_gradient(
    gradient: Any, variable: Variable, valid_dtypes: Set[np.dtype[Any]]
) -> Gradient:
    if variable.dtype not in valid_dtypes:
        expected = sorted(str(dtype) for dtype in valid_dtypes)
        raise ValueError(
            f'Invalid type {variable.dtype} for "{variable.name}", expected: {expected}.'
        )
    if isinstance(gradient, IndexedSlices):
        return _checked_slices(gradient, variable)
    array = _as_gradient_array(gradient, variable)
    if array.shape != variable.shape:
        raise ValueError(
            f'gradient for "{variable.name}" has shape {array.shape}; the variable has shape '
            f"{variable.shape}. For a gradient of some rows, pass IndexedSlices(values, indices)."
        )
    return array


def _checked_slices(slices: IndexedSlices, variable: Variable) -> IndexedSlices:
    name, shape = variable.name, variable.shape
    if variable.constraint is not None:
        raise RuntimeError(
            f'Cannot use a constraint function on a sparse variable: "{name}" has a constraint and '
            "its gradient is IndexedSlices."
        )
    if variable.ndim == 0:
        raise ValueError(f'gradient for "{name}" is IndexedSlices, but a scalar has no rows')
    values, indices = slices.values, slices.indices
    _check_dtype(values, variable)
    if values.shape[1:] != shape[1:]:
        raise ValueError(
            f'gradient for "{name}" has rows of shape {values.shape[1:]} (values {values.shape}); '
            f"the variable has rows of shape {shape[1:]} (shape {shape})"
        )
    if slices.dense_shape is not None and slices.dense_shape != shape:
        raise ValueError(
            f'gradient for "{name}" has dense_shape {slices.dense_shape}; the variable has shape '
            f"{shape}"
        )
    most_rows = backend_for(variable.device).most_rows
    if most_rows is not None and indices.shape[0] > most_rows:
        raise ValueError(
            f'gradient for "{name}" has {indices.shape[0]} rows; on {variable.device} it may have '
            f"at most {most_rows}"
        )
    if device_of(indices).kind == "cpu":
        _check_rows(np.asarray(indices), variable)
    return IndexedSlices(_on_device(values, variable), _on_device(indices, variable), shape)


def _check_rows(indices: np.ndarray[Any, Any], variable: Variable) -> None:
    """Raises IndexError for rows outside; a GPU checks those that it has itself."""
    height = variable.shape[0]
    outside = (indices < 0) | (indices >= height)
    if outside.any():
        offset = int(outside.argmax())
        raise IndexError(
            f'gradient for "{variable.name}": indices[{offset}] = {indices[offset]} is not in '
            f"[0, {height}), the variable's rows"
        )


def _as_gradient_array(gradient: Any, variable: Variable) -> Any:
    gradient = gradient.storage if isinstance(gradient, Variable) else gradient
    if hasattr(gradient, "dtype"):
        array = _on_device(gradient, variable)
        _check_dtype(array, variable)
        return array
    try:
        array = np.asarray(gradient)
    except ValueError as error:  # a ragged list
        raise ValueError(f'gradient for "{variable.name}": {error}') from error
    if array.dtype.kind not in "bif":
        raise TypeError(
            "Gradient must be convertible to an array or IndexedSlices, or None: gradient for "
            f'"{variable.name}" is {gradient!r}'
        )
    # Python's numbers have no type of their own.
    return _on_device(array.astype(variable.dtype), variable)


def _on_device(array: Any, variable: Variable) -> Any:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f'gradient for "{variable.name}" is a masked array; fill it first')
    try:
        return moved(array, variable.device)
    except DeviceUnavailableError as error:
        raise DeviceUnavailableError(
            f'gradient for "{variable.name}" is on {device_of(array)}, the variable on '
            f"{variable.device}: {error}"
        ) from error


def _check_dtype(array: Any, variable: Variable) -> None:
    if array.dtype != variable.dtype:
        raise TypeError(
            f'gradient for "{variable.name}" has dtype {array.dtype}; the variable has dtype '
            f"{variable.dtype}. Nothing is cast silently: use gradient.astype(...)."
        )


def refuse_shared_memory(variables: list[Variable]) -> None:
    """Raises ValueError where two updates of one memory would depend on their order."""
    if all(variable.owns_memory for variable in variables) and (
        len({variable.identity for variable in variables}) == len(variables)
    ):
        return
    for device in {variable.device for variable in variables}:
        _refuse_overlap([variable for variable in variables if variable.device == device])


def _refuse_overlap(variables: list[Variable]) -> None:
    """Does it for variables of one device."""
    layouts = [backend_for(variable.device).layout(variable.storage) for variable in variables]
    spans = sorted(
        (*byte_bounds(layouts[position]), position)
        for position, variable in enumerate(variables)
        if variable.size
    )
    reach = 0  # of the spans so far, the one that ends last
    for position in range(1, len(spans)):
        if spans[position - 1][1] > spans[reach][1]:
            reach = position - 1
        start = spans[position][0]
        if start >= spans[reach][1]:
            continue
        later = variables[spans[position][2]]
        for earlier_start, earlier_end, earlier_position in spans[:position]:
            earlier = variables[earlier_position]
            if earlier_start <= start < earlier_end and _share_memory(
                layouts[earlier_position], layouts[spans[position][2]]
            ):
                same = earlier.identity is later.identity
                what = "appears twice" if same else f'shares memory with "{earlier.name}"'
                raise ValueError(
                    f'"{later.name}" {what}: memory can be updated only once in a call; add the '
                    "gradients up first"
                )


def _share_memory(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_OVERLAP_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
