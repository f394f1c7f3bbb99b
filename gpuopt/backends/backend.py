"""What the optimizers ask of a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from gpuopt.device import Device
from gpuopt.update_rule import UpdateRule

Array = Any
Scalars = Mapping[str, "np.floating[Any]"]


class Target(NamedTuple):
    """One variable's arrays that a rule updates in place.

    Attributes:
        var: Of any strides.
        slots: In the rule's order; each of var's shape.
    """

    var: Array
    slots: Sequence[Array]


class Backend(Protocol):
    """Arrays and updates on one kind of device.

    Attributes:
        xp: The device's array module: numpy, or one with numpy's names.
        device: Where its arrays live.
    """

    xp: Any
    device: Device

    def full(self, shape: tuple[int, ...], dtype: np.dtype[Any], value: Any) -> Array:
        """Returns new aligned storage with `value`, a scalar or array of `shape`, written to it.

        Small arrays made one after the other may lie side by side, for faster updates.
        """

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        """Returns a copy in host memory."""

    def plan_dense(self, targets: Sequence[Target]) -> Any:
        """Prepares dense updates of variables of one dtype that share no memory.

        Returns:
            What `apply_dense` takes. It keeps the arrays alive, and holds as long as they do.
        """

    def apply_dense(
        self, rule: UpdateRule, plan: Any, gradients: Sequence[Array], scalars: Scalars
    ) -> None:
        """Applies `rule` to every element of every variable of a plan.

        Args:
            rule: What to compute.
            plan: From `plan_dense`.
            gradients: One for each variable, of its shape and dtype. Only read; may be broadcast
                views, and share memory with each other and with what is written.
            scalars: The rule's scalars in the compute type of the variables' dtype.
        """

    def apply_sparse(
        self,
        rule: UpdateRule,
        target: Target,
        values: Array,
        rows: Array,
        scalars: Scalars,
        *,
        touches_all_rows: bool,
    ) -> None:
        """Applies `rule` to the rows of a sparse gradient, with repeated rows summed first.

        Args:
            rule: What to compute.
            target: The variable and its slots.
            values: [num_rows, ...], the gradient's rows. Only read.
            rows: [num_rows], int32 or int64 within range: which row each belongs to.
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
