"""IndexedSlices: the gradient of some rows of a variable, checked when it is made."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from gpuopt.backends import backend_for, refuse_masked, to_device
from gpuopt.backends.backend import INDEX_DTYPES
from gpuopt.device import Device, device_of
from gpuopt.variables.operators import reading, storage_of


class IndexedSlices:
    """The gradient of some rows of a variable: row `indices[i]` receives `values[i]`.

    A row may appear several times, and then counts as the sum, or not at all. No rows is legal.

    Attributes:
        values: [num_rows, ...], an array.
        indices: [num_rows], int32 or int64. Their range is checked against the variable's height
            when the gradient is applied.
        dense_shape: The variable's shape, or None.
    """

    __slots__ = ("_dense_shape", "_indices", "_values")

    # Steps read them, several times each: these take no call of Python's.
    values: Any = property(attrgetter("_values"))
    indices: Any = property(attrgetter("_indices"))
    dense_shape: tuple[int, ...] | None = property(attrgetter("_dense_shape"))  # type: ignore

    def __init__(self, values: Any, indices: Any, dense_shape: Sequence[int] | None = None) -> None:
        """Keeps the arrays that are given; lists become arrays.

        Raises:
            TypeError: indices are not int32 or int64, values are not numbers, or one is masked.
            ValueError: values have no rows, indices are not a vector, or their lengths differ.
        """
        refuse_masked(values, "IndexedSlices values")
        refuse_masked(indices, "IndexedSlices indices")
        self._values = _as_array(values)
        self._indices = _as_array(indices, empty_dtype=np.int64)
        self._dense_shape = None if dense_shape is None else _as_shape(dense_shape)
        self.check()

    @classmethod
    def from_mask(cls, values: Any, mask: Any) -> IndexedSlices:
        """Makes the gradient of the rows where a mask is true; other rows have none.

        On a GPU, the host waits for the number of these rows.

        Args:
            values: [num_rows, ...], a gradient for every row of the variable, of which some count:
                a dense gradient, say. An array or a Variable.
            mask: [num_rows], bool, on any device.

        Returns:
            Slices with a copy of these rows, ascending indices, and `values.shape` as their
            `dense_shape`: they fit no variable with another number of rows.

        Raises:
            TypeError: the mask is not bool, values are not numbers or are IndexedSlices, or one is
                masked.
            ValueError: the mask is no vector, or values have not as many rows as it has elements.
            RuntimeError: a GPU's current stream is being captured into a CUDA graph.
        """
        if values is None or isinstance(values, IndexedSlices):
            given = "None" if values is None else "IndexedSlices, which name their rows already"
            raise TypeError(f"from_mask takes a gradient of all rows, as an array; got {given}")
        refuse_masked(values, "IndexedSlices values")
        refuse_masked(mask, "the mask of rows")
        with reading(values, mask):
            of_all, is_chosen = _as_array(storage_of(values)), _as_array(storage_of(mask))
            if is_chosen.dtype != bool:
                raise TypeError(
                    f"a mask of rows must be bool, got {is_chosen.dtype}; for the numbers of rows, "
                    "use IndexedSlices(values, indices)"
                )
            if is_chosen.ndim != 1:
                raise ValueError(f"a mask of rows must be a vector, got shape {is_chosen.shape}")
            if of_all.shape[:1] != is_chosen.shape:
                raise ValueError(
                    f"values of shape {of_all.shape} for a mask of {is_chosen.size} rows: there "
                    "must be a gradient for every row. For those of some rows alone, use "
                    "IndexedSlices(values, indices)"
                )
            backend = backend_for(device_of(of_all))
            backend.refuse_capture("from_mask")
            indices = backend.true_positions(to_device(is_chosen, backend.device))
            with backend.enter():
                of_rows = of_all[indices]
                backend.hold(of_all, is_chosen)
                return cls(of_rows, indices, of_all.shape)

    def check(self) -> None:
        """Repeats the constructor's checks: a user may have changed an array in place since."""
        values, indices = self._values, self._indices
        if values.dtype.kind in "OSUMm":
            raise TypeError(f"IndexedSlices values must be numbers, got dtype {values.dtype}")
        if indices.dtype not in INDEX_DTYPES:
            raise TypeError(f"IndexedSlices indices must be int32 or int64, got {indices.dtype}")
        if indices.ndim != 1:
            raise ValueError(
                f"IndexedSlices indices must be a vector, got shape {indices.shape}; flatten them, "
                "and the values' leading dimensions with them"
            )
        if values.ndim == 0:
            raise ValueError("IndexedSlices values must have a row for each index, got a scalar")
        if values.shape[0] != indices.shape[0]:
            raise ValueError(
                f"IndexedSlices has {values.shape[0]} rows of values (shape {values.shape}) for "
                f"{indices.shape[0]} indices; there must be one for each"
            )
        if self._dense_shape is not None and self._dense_shape[1:] != values.shape[1:]:
            raise ValueError(
                f"IndexedSlices values have shape {values.shape}; rows of dense_shape "
                f"{self._dense_shape} have shape {self._dense_shape[1:]}"
            )

    def replace(self, values: Any, indices: Any, dense_shape: tuple[int, ...]) -> IndexedSlices:
        """Returns slices of these arrays without checks: they are this object's own, or copies."""
        same = values is self._values and indices is self._indices
        if same and dense_shape == self._dense_shape:
            return self
        slices = object.__new__(IndexedSlices)
        slices._values, slices._indices, slices._dense_shape = values, indices, dense_shape
        return slices

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._values.dtype  # type: ignore[no-any-return]

    @property
    def device(self) -> Device:
        return device_of(self._values)

    def __repr__(self) -> str:
        return (
            f"IndexedSlices(values={self._values!r}, indices={self._indices!r}, "
            f"dense_shape={self._dense_shape})"
        )


def _as_array(value: Any, empty_dtype: Any = None) -> Any:
    device = device_of(value)
    has_dtype = hasattr(value, "dtype")
    if has_dtype and not isinstance(value.dtype, np.dtype):
        # Another library's array, as a torch tensor: numpy's or CuPy's on the same memory.
        return backend_for(device).as_array(value)
    if device.kind == "gpu":
        return value
    array = np.asarray(value)
    if array.size == 0 and empty_dtype is not None and not has_dtype:
        return array.astype(empty_dtype)
    return array


def _as_shape(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(operator.index(size) for size in shape)
    if any(size < 0 for size in sizes):
        raise ValueError(f"dense_shape must not be negative, got {sizes}")
    return sizes
