"""VariableClippingOptimizer: keeps the norms of variables below a bound."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.backends.backend import compute_type
from gpuopt.distributed import MirroredVariable
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.optimizer import Optimizer
from gpuopt.step.ledger import Ledger
from gpuopt.step.updates import Updates
from gpuopt.variables.identity import Identity
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.operators import reading
from gpuopt.variables.storage import describe
from gpuopt.variables.variable import Variable, is_iterable
from gpuopt.wrappers.base import StepWrapper, checked_number

_logger = logging.getLogger("gpuopt")


class VariableClippingOptimizer(StepWrapper):
    """Scales variables down to a norm after each step, as contrib's does.

        w *= max_norm / max(norm(w), max_norm)

    The norm is that of each slice along the given dimensions, as of each row with [1]. A sparse
    gradient has the rows that it names clipped and no others, unless dimension 0 is among those of
    the norm: then the whole variable is, and a warning says so. Slots stay as they are.

        optimizer = VariableClippingOptimizer(AdamOptimizer(), {embedding: [1]}, max_norm=2.0)

    16-bit variables are clipped in float32.
    """

    def __init__(
        self,
        opt: Optimizer,
        vars_to_clip_dims: Mapping[Any, Sequence[int]],
        max_norm: float,
        use_locking: bool = False,
        colocate_clip_ops_with_vars: bool = False,
        name: str = "VariableClipping",
    ) -> None:
        """Wraps `opt`.

        Args:
            opt: Makes the steps; its state is this optimizer's.
            vars_to_clip_dims: For each Variable (or MirroredVariable) to be clipped, the dimensions
                over which its norms are taken. Others are left alone, as those without a gradient
                are in a step.
            max_norm: The largest norm that a slice keeps.
            use_locking: Clipping takes turns with other threads' locked updates of the variable.
            colocate_clip_ops_with_vars: Ignored: a variable is always clipped on its own device.
            name: See `Optimizer`.

        Raises:
            TypeError: `opt` is no optimizer, `vars_to_clip_dims` no mapping of variables to lists
                of integers, or `max_norm` no number.
            ValueError: a variable lacks a dimension, or one is listed twice; or `max_norm` is not
                above 0 and finite, in a variable's type.
        """
        self._dims: WeakKeyDictionary[Identity, tuple[int, ...]] = WeakKeyDictionary()
        self._has_warned_of: WeakKeyDictionary[Identity, bool] = WeakKeyDictionary()
        # Of a copy: references to the clipped variables, by the names of what they are copies of.
        self._expected: dict[str, tuple[ref[Variable], tuple[int, ...]]] = {}
        self._max_norm = checked_number("max_norm", max_norm)
        _check_max_norm(self._max_norm, max_norm)
        if not isinstance(vars_to_clip_dims, Mapping):
            raise TypeError(
                "vars_to_clip_dims must map variables to lists of dimensions, got "
                f"{describe(vars_to_clip_dims)}"
            )
        for given, dims in vars_to_clip_dims.items():
            for variable in given.replicas if isinstance(given, MirroredVariable) else [given]:
                if not isinstance(variable, Variable):
                    raise TypeError(f"vars_to_clip_dims holds {describe(variable)}, not a Variable")
                _check_max_norm(
                    ignore_fp_warnings(compute_type(variable.dtype), self._max_norm), max_norm
                )
                self._dims[variable.identity] = _checked_dims(variable, dims)
        super().__init__(opt, use_locking, name)

    def _made_with(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dims = {each: self._dims[each.identity] for each in self._clipped().values()}
        return (self._inner, dims, self._max_norm, self._use_locking, False, self._name), {}

    def _own_state(self) -> tuple[Any, dict[str, Any]]:
        clipped = self._clipped()
        return {name: self._dims[each.identity] for name, each in clipped.items()}, clipped

    def _take_state(self, state: Any, variables: Mapping[str, Any]) -> None:
        self._expected = {name: (ref(variables[name]), dims) for name, dims in state.items()}

    @property
    def _what_is_added(self) -> str:
        return "clipping"

    def _after_update(self, updates: Updates, ledger: Ledger) -> None:
        def clip() -> None:
            for gradient, variable in updates.pairs():
                dims = self._dims_of(variable.identity)
                if dims is not None:
                    rows = self._rows_to_clip(gradient, variable, dims)
                    self._clip(variable, rows, dims, ledger)

        ignore_fp_warnings(clip)

    def _clipped(self) -> dict[str, Variable]:
        holders = [identity.holder() for identity in list(self._dims)]
        return {each.name: each for each in holders if isinstance(each, Variable)}

    def _dims_of(self, identity: Identity) -> tuple[int, ...] | None:
        found = self._dims.get(identity)
        if found is None and self._expected:
            variable, dims = self._expected.get(identity.name, (None, ()))
            if variable is not None and variable() is None:  # copied without its variables
                self._dims[identity] = found = dims
        return found

    def _rows_to_clip(self, gradient: Any, variable: Variable, dims: tuple[int, ...]) -> Any:
        """Returns the rows that a sparse gradient names; None stands for all."""
        if not isinstance(gradient, IndexedSlices):
            return None
        if 0 not in dims:
            return gradient.indices
        if variable.identity not in self._has_warned_of:
            self._has_warned_of[variable.identity] = True
            _logger.warning(
                'Clipping norm across dims %s for "%s" is inefficient when including sparse '
                "dimension 0: all of its %d rows are clipped in each step",
                list(dims),
                variable.name,
                variable.shape[0],
            )
        return None

    def _clip(self, variable: Variable, rows: Any, dims: tuple[int, ...], ledger: Ledger) -> None:
        if not variable.size:
            return
        backend = backend_for(variable.device)
        real = compute_type(variable.dtype)
        with variable.identity.lock if self._use_locking else nullcontext():
            with reading(variable), backend.enter():
                if rows is None:
                    old = variable.storage
                else:
                    if variable.device in ledger.records:
                        # The GPU may be about to find some that are not there.
                        rows = backend.xp.clip(rows, 0, variable.shape[0] - 1)
                    variable.bring_up(rows)
                    old = variable.unread_storage[rows]
                clipped = _clipped_by_norm(backend.xp, old.astype(real), real(self._max_norm), dims)
                new = ledger.unless_refused(variable.device, clipped.astype(variable.dtype), old)
            if rows is None:
                variable.assign(new)
            else:
                variable.assign_rows(rows, new)


def _clipped_by_norm(xp: Any, values: Any, max_norm: Any, dims: tuple[int, ...]) -> Any:
    """TensorFlow's `clip_by_norm`: NaN and infinity spread over their slice."""
    squares = values * values
    norms = xp.sqrt(squares.sum(axis=dims, keepdims=True) if dims else squares)
    return values * (max_norm / xp.maximum(norms, max_norm))


def _check_max_norm(value: Any, given: Any) -> None:
    if not (value > 0 and np.isfinite(value)):
        raise ValueError(
            f"max_norm must be above 0 and finite, in the variables' types, got {given!r}"
        )


def _checked_dims(variable: Variable, dims: Any) -> tuple[int, ...]:
    what = f'vars_to_clip_dims of "{variable.name}"'
    if not is_iterable(dims):
        raise TypeError(f"{what} must be a list of dimensions, got {dims!r}")
    given = list(dims)
    try:
        numbers = [operator.index(dim) for dim in given]
    except TypeError as error:
        raise TypeError(f"{what} must be a list of dimensions, got {dims!r}") from error
    if any(not -variable.ndim <= number < variable.ndim for number in numbers):
        raise ValueError(f"{what} are {dims!r}; the variable has shape {variable.shape}")
    counted = sorted({number % variable.ndim for number in numbers})
    if len(counted) < len(numbers):
        raise ValueError(f"{what} are {dims!r}, which names a dimension twice")
    return tuple(counted)
