"""What the optimizers ask of a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from gpuopt.device import Device
from gpuopt.update_rule import UpdateRule

Array = Any
Scalars = Mapping[str, "np.floating[Any]"]


class Update(NamedTuple):
    """One variable's arrays on their way into a rule.

    Attributes:
        var: Updated in place; any strides.
        grad: Read only, and may be a broadcast view. Dense: var's shape. Sparse: one row for each
            entry of `rows`.
        slots: In the rule's order; each of var's shape, updated in place.
        rows: For a sparse gradient, the row of `var` that each row of `grad` belongs to: 1-D int32
            or int64 within range, repeats allowed. None for a dense one.
    """

    var: Array
    grad: Array
    slots: Sequence[Array]
    rows: Array | None = None


class Backend(Protocol):
    """Arrays and updates on one kind of device.

    Attributes:
        xp: The device's array module: numpy, or one with numpy's names.
        device: Where its arrays live.
    """

    xp: Any
    device: Device

    def full(self, shape: tuple[int, ...], dtype: np.dtype[Any], value: Any) -> Array:
        """Returns new aligned storage with `value`, a scalar or array of `shape`, written to it."""

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        """Returns a copy in host memory."""

    def apply_dense(self, rule: UpdateRule, updates: Sequence[Update], scalars: Scalars) -> None:
        """Applies `rule` to every element of every variable.

        Args:
            rule: What to compute.
            updates: Of one dtype, without `rows`, sharing no memory among the variables.
            scalars: The rule's scalars in the compute type of that dtype.
        """

    def apply_sparse(
        self, rule: UpdateRule, update: Update, scalars: Scalars, *, touches_all_rows: bool
    ) -> None:
        """Applies `rule` to the rows of a sparse gradient, with repeated rows summed first.

        Args:
            rule: What to compute.
            update: One variable's arrays, with `rows`.
            scalars: The rule's scalars in the compute type of the variable's dtype.
            touches_all_rows: Rows without a gradient are updated as if theirs were zero.
        """

    def sum_duplicate_rows(self, values: Array, indices: Array) -> tuple[Array, Array]:
        """Adds up rows of `values` that share an index, in order of appearance.

        Returns:
            (sums, rows): float16 and bfloat16 are summed, and returned, in float32; `rows` are
            unique, in order of first appearance as TensorFlow gives them.
        """


def compute_type(dtype: np.dtype[Any]) -> type[np.float32] | type[np.float64]:
    """Returns the type a rule computes in: 16-bit storage is too coarse to compute in."""
    return np.float64 if dtype == np.float64 else np.float32
