"""Checks (gradient, variable) pairs before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice
from typing import Any, NoReturn, TypeAlias, overload

import numpy as np

from gpuopt.backends import array_types, backend_for, refuse_masked, to_device
from gpuopt.device import device_of
from gpuopt.errors import DeviceUnavailableError
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.state.masters import refuse_split
from gpuopt.step.overlap import refuse_shared_memory
from gpuopt.step.wide_gradients import GradientTypes, as_read
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.operators import reading
from gpuopt.variables.storage import describe
from gpuopt.variables.variable import Variable, as_variable, is_iterable

Gradient: TypeAlias = "Any | IndexedSlices"

HOW_TO_PASS = (
    "apply_gradients takes (gradient, variable) pairs, as in zip(gradients, variables); "
    "update(params, grads) takes lists and dicts of arrays as they are"
)


class Zipped(Sequence[tuple[Any, Any]]):
    """The (gradient, variable) pairs of two lists, which steps read without making the pairs."""

    def __init__(self, gradients: list[Any], variables: list[Any]) -> None:
        self.gradients = gradients
        self.variables = variables

    def __len__(self) -> int:
        return len(self.gradients)

    @overload
    def __getitem__(self, position: int) -> tuple[Any, Any]: ...
    @overload
    def __getitem__(self, position: slice) -> list[tuple[Any, Any]]: ...
    def __getitem__(self, position: int | slice) -> Any:
        if isinstance(position, slice):
            return list(zip(self.gradients[position], self.variables[position], strict=True))
        return self.gradients[position], self.variables[position]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return zip(self.gradients, self.variables, strict=True)


def checked_pairs(
    grads_and_vars: Iterable[tuple[Any, Any]],
    valid_dtypes: Set[np.dtype[Any]],
    types: GradientTypes = GradientTypes.OWN,
) -> list[tuple[Gradient | None, Variable]]:
    """Turns what a user passes to `apply_gradients` into pairs that can be applied.

    Args:
        grads_and_vars: See `Optimizer.apply_gradients`.
        valid_dtypes: The dtypes that variables and gradients may have.
        types: The types that gradients may have.

    Returns:
        Pairs in the given order. A gradient is None, an array of its variable's shape and dtype,
        or IndexedSlices whose rows fit the variable.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError, DeviceUnavailableError: something does not
            fit; the message names the variable.
    """
    unchecked = [
        unpack_pair(position, pair) for position, pair in enumerate(as_sequence(grads_and_vars))
    ]
    # Not by a generator: an exception from a signal handler in one that `all` has left is lost.
    if not [gradient for gradient, _ in unchecked if gradient is not None]:
        refuse_no_gradients([variable for _, variable in unchecked])
    gradients = checked_gradients(unchecked, range(len(unchecked)), valid_dtypes, types)
    pairs = [(new, variable) for new, (_, variable) in zip(gradients, unchecked, strict=True)]
    refuse_shared_memory([variable for gradient, variable in pairs if gradient is not None])
    return pairs


def as_sequence(grads_and_vars: Iterable[tuple[Any, Any]]) -> Sequence[tuple[Any, Any]]:
    """Returns a list or `Zipped` as it is, and makes a list of another iterable.

    Raises:
        TypeError: `grads_and_vars` is no iterable.
    """
    if type(grads_and_vars) is list or type(grads_and_vars) is Zipped:
        return grads_and_vars
    if not is_iterable(grads_and_vars) or isinstance(grads_and_vars, Mapping):
        raise TypeError(
            "grads_and_vars must be an iterable of (gradient, variable) pairs, got "
            f"{type(grads_and_vars).__name__}; {HOW_TO_PASS}"
        )
    return list(grads_and_vars)


def as_pairs(given: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Returns tuples of two.

    Raises:
        TypeError, ValueError: an item is no pair, or there are none.
    """
    if not given:
        refuse_no_gradients([])
    return [_pair(position, pair) for position, pair in enumerate(given)]


def refuse_no_gradients(variables: list[Variable]) -> None:
    """Raises ValueError: a step without a gradient updates nothing."""
    if not variables:
        raise ValueError("No variables provided.")
    names = [variable.name for variable in variables]
    raise ValueError(f"No gradients provided for any variable: {names}.")


def unpack_pair(position: int, pair: Any) -> tuple[Any, Variable]:
    """Takes a pair of `grads_and_vars` apart; its variable may be a raw array."""
    is_plain = type(pair) is tuple and len(pair) == 2
    gradient, variable = pair if is_plain else _pair(position, pair)
    if isinstance(gradient, Variable) and not isinstance(variable, Variable):
        raise TypeError(
            f'grads_and_vars[{position}] is (Variable "{gradient.name}", {describe(variable)}), '
            "which looks swapped: a pair is (gradient, variable). To update a plain array by a "
            "Variable's value, pass (variable.value(), array)"
        )
    if type(variable) in (str, list, tuple, dict):
        raise TypeError(
            f"variable of grads_and_vars[{position}]: expected a Variable or an array, got "
            f"{type(variable).__name__}; {HOW_TO_PASS}"
        )
    try:
        return gradient, as_variable(variable)
    except DeviceUnavailableError as error:
        raise DeviceUnavailableError(f"variable of grads_and_vars[{position}]: {error}") from error
    except Exception as error:
        raise_naming(f"variable of grads_and_vars[{position}]", error)


def checked_gradients(
    pairs: Sequence[tuple[Any, Variable]],
    positions: Sequence[int],
    valid_dtypes: Set[np.dtype[Any]],
    types: GradientTypes = GradientTypes.OWN,
) -> list[Gradient | None]:
    """Returns the gradients of pairs, each as `checked_gradient` does; None stays None.

    Args:
        pairs: (gradient, variable) pairs.
        positions: Where they are in `grads_and_vars`.
        valid_dtypes: See `checked_gradient`.
        types: The types that gradients may have.

    Raises:
        TypeError: of gradients with other dtypes than their variables, the error lists each.
    """
    try:
        return [
            None if gradient is None else checked_gradient(gradient, variable, valid_dtypes, types)
            for gradient, variable in pairs
        ]
    except TypeError:
        wrong = [
            f"grads_and_vars[{position}]: {message}"
            for position, pair in zip(positions, pairs, strict=True)
            if (message := _wrong_dtype(*pair, types)) is not None
        ]
        if len(wrong) < 2:
            raise
    listed = "; ".join(wrong)
    raise TypeError(f"{len(wrong)} gradients have a wrong dtype: {listed}. {_how_to_cast(types)}")


def checked_gradient(
    gradient: Any,
    variable: Variable,
    valid_dtypes: Set[np.dtype[Any]],
    types: GradientTypes = GradientTypes.OWN,
) -> Gradient:
    """Returns an array of its variable's device, shape and dtype, or IndexedSlices that fit it.

    Its dtype is one of `types` that updates can read.
    """
    refuse_split(variable)
    if variable.dtype not in valid_dtypes:
        expected = sorted(str(dtype) for dtype in valid_dtypes)
        parts = {"complex64": "float32", "complex128": "float64"}.get(variable.dtype.name)
        hint = (
            f" Of a complex array w, w.view(np.{parts}) trains real and imaginary parts apart, by "
            "the same view of its gradient."
            if parts
            else ""
        )
        raise ValueError(
            f'Invalid type {variable.dtype} for "{variable.name}", expected: {expected}.{hint}'
        )
    if isinstance(gradient, IndexedSlices):
        return _checked_slices(gradient, variable, types)
    array = _as_gradient_array(gradient, variable, types)
    if array.shape != variable.shape:
        hint = "For a gradient of some rows, pass IndexedSlices(values, indices)."
        if array.shape == (1, *variable.shape):
            hint = (
                f"Drop its first dimension, as by gradient.reshape({variable.shape}), or by "
                ".sum(axis=0) without keepdims."
            )
        elif [n for n in array.shape if n != 1] == [n for n in variable.shape if n != 1]:
            hint = f"Pass gradient.reshape({variable.shape})."
        raise ValueError(
            f'gradient for "{variable.name}" has shape {array.shape}; the variable has shape '
            f"{variable.shape}. {hint}"
        )
    return array


def _pair(position: int, pair: Any) -> tuple[Any, Any]:
    # An array of two rows could be taken apart.
    if hasattr(pair, "shape"):
        raise ValueError(
            f"grads_and_vars[{position}] must be a (gradient, variable) pair, got "
            f"{describe(pair)}, of shape {pair.shape}; {HOW_TO_PASS}. One pair goes into a list: "
            "[(gradient, variable)]"
        )
    message = f"grads_and_vars[{position}] must be a (gradient, variable) pair, got "
    if not is_iterable(pair):
        raise TypeError(f"{message}{pair!r}")
    parts = tuple(islice(pair, 3))
    if len(parts) != 2:
        raise ValueError(f"{message}{pair!r}")
    return parts


def _checked_slices(
    slices: IndexedSlices, variable: Variable, types: GradientTypes
) -> IndexedSlices:
    shape = variable.shape
    if variable.constraint is not None:
        raise RuntimeError(
            f'Cannot use a constraint function on a sparse variable: "{variable.name}" has a '
            "constraint and its gradient is IndexedSlices."
        )
    if not shape:
        raise ValueError(
            f'gradient for "{variable.name}" is IndexedSlices, but a scalar has no rows'
        )
    try:
        slices.check()
    except (TypeError, ValueError) as error:
        raise_naming(f'gradient for "{variable.name}"', error)
    values, indices = slices.values, slices.indices
    is_other = values.dtype != variable.dtype
    if is_other:
        _check_dtype(values, variable, types)
    if values.shape[1:] != shape[1:]:
        raise ValueError(
            f'gradient for "{variable.name}" has rows of shape {values.shape[1:]} (values '
            f"{values.shape}); the variable has rows of shape {shape[1:]} (shape {shape})"
        )
    dense_shape = slices.dense_shape
    if dense_shape is not None and dense_shape != shape:
        raise ValueError(
            f'gradient for "{variable.name}" has dense_shape {dense_shape}; the variable has shape '
            f"{shape}"
        )
    device = variable.device
    most_rows = backend_for(device).most_rows
    if most_rows is not None and indices.shape[0] > most_rows:
        raise ValueError(
            f'gradient for "{variable.name}" has {indices.shape[0]} rows; on {device} it may have '
            f"at most {most_rows}"
        )
    indices_device = device_of(indices)
    if indices_device.kind == "cpu":
        _check_rows(np.asarray(indices), variable, shape[0])
    are_arrays = array_types.issuperset((type(values), type(indices)))
    if not (are_arrays and indices_device is device and device_of(values) is device):
        values, indices = _on_device(values, variable), _on_device(indices, variable)
    if is_other:
        values = as_read(values, variable)
    return slices.replace(values, indices, shape)


def _check_rows(indices: np.ndarray[Any, Any], variable: Variable, height: int) -> None:
    """Raises IndexError for rows outside; a GPU checks those that it has itself."""
    # As unsigned numbers, negative ones are greater than all others: one pass finds both.
    unsigned = indices.view(f"u{indices.itemsize}")
    if unsigned.size and unsigned.max() >= height:
        offset = int((unsigned >= height).argmax())
        raise IndexError(
            f'gradient for "{variable.name}": indices[{offset}] = {indices[offset]} is not in '
            f"[0, {height}), the variable's rows"
        )


def _as_gradient_array(gradient: Any, variable: Variable, types: GradientTypes) -> Any:
    if isinstance(gradient, Variable):
        # The step reads it later, inside `reading`; a copy to another device is made now.
        with reading(gradient):
            return _as_gradient_array(gradient.storage, variable, types)
    refuse_masked(gradient, f'gradient for "{variable.name}"')
    if hasattr(gradient, "dtype"):
        array = _on_device(gradient, variable)
        _check_dtype(array, variable, types)
        return as_read(array, variable)
    try:
        array = np.asarray(gradient)
    except Exception as error:  # of a ragged list, or of the gradient's own code
        raise_naming(f'gradient for "{variable.name}"', error)
    if array.dtype.kind not in "bif":
        raise TypeError(
            "Gradient must be convertible to an array or IndexedSlices, or None: gradient for "
            f'"{variable.name}" is {gradient!r}'
        )
    if _has_dtype(gradient):
        _check_dtype(array, variable, types)
        return as_read(_on_device(array, variable), variable)
    # Python's numbers have no type of their own.
    return _on_device(ignore_fp_warnings(lambda: array.astype(variable.dtype)), variable)


def _has_dtype(value: Any) -> bool:
    """Whether a value that numpy can make an array of has a dtype of its own, as a buffer has."""
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        return True
    try:
        memoryview(value)
    except TypeError:
        return False
    return True


def _on_device(array: Any, variable: Variable) -> Any:
    if isinstance(array, Variable):  # among IndexedSlices
        with reading(array), backend_for(array.device).enter():
            array = array.storage.copy()
    try:
        return to_device(array, variable.device)
    except DeviceUnavailableError as error:
        raise DeviceUnavailableError(
            f'gradient for "{variable.name}" is on {device_of(array)}, the variable on '
            f"{variable.device}: {error}"
        ) from error
    except Exception as error:
        raise_naming(f'gradient for "{variable.name}"', error)


def _check_dtype(array: Any, variable: Variable, types: GradientTypes) -> None:
    message = _wrong_dtype(array, variable, types)
    if message is not None:
        raise TypeError(f"{message}. {_how_to_cast(types)}")


def _how_to_cast(types: GradientTypes) -> str:
    if types is GradientTypes.FLOATS:
        return 'gradient_dtype="cast" is for floats: use gradient.astype(...).'
    return (
        'No gradient is cast: use gradient.astype(...), or pass gradient_dtype="cast" to the '
        "optimizer, for floats."
    )


def _wrong_dtype(gradient: Any, variable: Variable, types: GradientTypes) -> str | None:
    """Describes the dtype of a gradient that its variable does not take; None if it takes it."""
    values = gradient.values if isinstance(gradient, IndexedSlices) else gradient
    dtype = getattr(values, "dtype", variable.dtype)
    if types.include(dtype, variable):
        return None
    return (
        f'gradient for "{variable.name}" has dtype {dtype}; the variable has dtype {variable.dtype}'
    )


def raise_naming(what: str, error: Exception) -> NoReturn:
    """Raises an error again so that it names the gradient or variable that it is about.

    One that is neither a TypeError nor a ValueError comes from a user's own code: it stays what it
    is, with a note.
    """
    if isinstance(error, TypeError | ValueError):
        # Not its own type, which may take other arguments.
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{what}: {error}") from error
    error.add_note(f"Raised by the {what}.")
    raise error
