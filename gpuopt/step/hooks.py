"""What a user's optimizer overrides and calls: TensorFlow 1's contract with subclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.backends.backend import Scalars
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.state.state import Range, SlotTable, State
from gpuopt.step.options import Options
from gpuopt.step.pairs import Gradient
from gpuopt.step.updates import apply_constraint
from gpuopt.step.user_code import call_user_code
from gpuopt.variables.gate import writing
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import FLOAT_DTYPES, NewRows, Variable, as_variable

Finish = TypeVar("Finish", bound=Callable[..., Any])


def undoable(finish: Finish) -> Finish:
    """Marks a `_finish` that writes nothing but host scalars, which a late undo restores.

    A GPU may find a step's rows out of range after the host has gone on. A step whose `_finish` is
    not marked waits for the GPU's check. The mark belongs to the function, so a step waits if a
    subclass overrides `_finish` without marking it.
    """
    # Not True: `functools.wraps` copies the mark to a function that may do more.
    finish.__dict__["is_undoable"] = finish
    return finish


def is_undoable(finish: Callable[..., Any]) -> bool:
    """Whether a `_finish` is marked by `undoable`, as is the one that does nothing."""
    function = getattr(finish, "__func__", finish)
    return getattr(function, "is_undoable", None) is function


class Hooks:
    """The part of `Optimizer` that its subclasses build on.

    Attributes:
        state: The optimizer's slots and other variables.
        options: How it makes its steps.
    """

    state: State
    options: Options = Options()
    _name: str

    # What a subclass overrides.

    def _hyperparameters_to_save(self) -> dict[str, Any]:
        """Returns the settings that a checkpoint mentions for its reader; none is restored."""
        return {}

    def _all_slot_names(self) -> list[str] | None:
        """Returns the names of each variable's slots, in order of creation; None if unknown.

        Slots that are named here have their variable's dtype, and its shape unless
        `_row_slot_names` has them, too. Others may only be made by a class that overrides a hook
        and not this list, nor that of non-slots.
        """
        return None

    def _row_slot_names(self) -> Sequence[str]:
        """Returns those of `_all_slot_names` that have a number for each row: see `row_shape`."""
        return ()

    def _all_non_slot_names(self) -> list[str]:
        """Returns the names of the optimizer's other variables, which exist after any step."""
        return []

    def _non_slot_names_of_groups(self) -> list[str]:
        """Returns the names of those that belong to a group: `<name of another>/<group>`.

        A state may lack them, as it may be of another grouping: the next step makes them then.
        """
        return []

    def _state_ranges(self) -> Mapping[str, Range]:
        """Returns the numbers that slots and other variables can hold, where not all are possible.

        A state with other numbers is not restored.
        """
        return {}

    def _new_slot_rows(self, slot_name: str) -> NewRows:
        """Returns what a slot's row starts with where its variable gets a new row.

        A number; or "value", for the variable's row; or None for the number that the slot was made
        with, if it was made with one. A slot of another shape than the variable's has rows only if
        this says what they start with.
        """
        return None

    def _slot_op_name(self, slot_name: str) -> str:
        """Returns the second part of a slot variable's name, `<variable>/<op_name>`."""
        return self._name

    def _valid_dtypes(self) -> Iterable[Any]:
        """Returns the dtypes that a loss, a variable and a gradient may have."""
        return FLOAT_DTYPES

    def _create_slots(self, var_list: Sequence[Variable]) -> None:
        """Makes the slots that `var_list` still lacks. Called before every update."""

    def _prepare(self) -> None:
        """Evaluates hyperparameters, once in an update and before any variable is written."""

    def _scalars_for(self, real: type[np.floating[Any]]) -> Sequence[Scalars]:
        """Returns what the optimizer's rule, if it has one, is given in this step besides arrays.

        Args:
            real: The type that the rule computes in.

        Returns:
            What it is given for variables in no group, and then for those of each group.
        """
        return ()

    def _apply_dense(self, grad: Any, var: Variable) -> Any:
        """Updates `var` by a gradient of its shape."""
        raise NotImplementedError(f"{type(self).__name__} does not implement _apply_dense")

    def _resource_apply_dense(self, grad: Any, handle: Variable) -> Any:
        return self._apply_dense(grad, handle)

    def _apply_sparse(self, grad: IndexedSlices, var: Variable) -> Any:
        """Updates rows of `var`; no index is repeated."""
        raise NotImplementedError(f"{type(self).__name__} does not implement _apply_sparse")

    def _resource_apply_sparse(self, grad: Any, handle: Variable, indices: Any) -> Any:
        return self._apply_sparse(IndexedSlices(grad, indices, handle.shape), handle)

    def _apply_sparse_duplicate_indices(self, grad: IndexedSlices, var: Variable) -> Any:
        """Updates rows of `var`; indices may repeat. By default sums their gradients first."""
        sums, rows = backend_for(var.device).sum_duplicate_rows(grad.values, grad.indices)
        values = ignore_fp_warnings(lambda: sums.astype(var.dtype, copy=False))
        return self._resource_apply_sparse(values, var, rows)

    def _resource_apply_sparse_duplicate_indices(
        self, grad: Any, handle: Variable, indices: Any
    ) -> Any:
        return self._apply_sparse_duplicate_indices(
            IndexedSlices(grad, indices, handle.shape), handle
        )

    @undoable
    def _finish(self, update_ops: list[Any], name_scope: str) -> Any:
        """Runs after all variables were updated, before the global step grows."""

    def _lists_all_state(self) -> bool:
        """Whether the names of slots and non-slots are listed by all classes that make any."""
        if self._all_slot_names() is None:
            return False
        slots_listed_by = self._defining_class("_all_slot_names")
        others_listed_by = self._defining_class("_all_non_slot_names")
        # No generators: one that is closed early would swallow Ctrl-C.
        for hook in ("_create_slots", "_prepare", "_finish"):
            maker = self._defining_class(hook)
            if not (issubclass(slots_listed_by, maker) or issubclass(others_listed_by, maker)):
                return False
        return True

    def _defining_class(self, method: str) -> type:
        for each in type(self).__mro__:
            if method in vars(each):
                return each
        raise AttributeError(method)

    # What a subclass calls.

    def _call_if_callable(self, param: Any) -> Any:
        return call_user_code(param) if callable(param) else param

    def _zeros_slot(self, var: Any, slot_name: str, op_name: str) -> Variable:
        """Returns the slot, made with zeros if need be."""
        return self._get_or_make_slot(var, 0, slot_name, op_name)

    def _get_or_make_slot(self, var: Any, val: Any, slot_name: str, op_name: str) -> Variable:
        """Returns the slot, made with `val`, a number or an array of the variable's shape."""
        variable = as_variable(var)
        with writing(), self.state.lock:
            slot = self.state.slot(variable, slot_name)
            if slot is None:
                slot = self.state.create_slot(variable, slot_name, op_name, val)
            return slot

    def _get_or_make_slot_with_initializer(
        self,
        var: Any,
        initializer: Callable[..., Any],
        shape: tuple[int, ...],
        dtype: Any,
        slot_name: str,
        op_name: str,
    ) -> Variable:
        """Returns the slot, made with `initializer(shape, dtype=dtype)` if need be."""
        variable, dtype = as_variable(var), np.dtype(dtype)
        with writing(), self.state.lock:
            slot = self.state.slot(variable, slot_name)
            if slot is None:
                value = initializer(shape, dtype=dtype)
                slot = self.state.create_slot(variable, slot_name, op_name, value, shape, dtype)
            return slot

    def _slot_dict(self, slot_name: str) -> SlotTable:
        """Returns all slots of one name, by `_var_key(variable)`."""
        return self.state.table(slot_name)

    def _create_non_slot_variable(
        self, initial_value: Any, name: str, colocate_with: Any
    ) -> Variable:
        """Returns the optimizer's own variable `name`, made if need be on another's device."""
        return self.state.create_other(name, initial_value, as_variable(colocate_with).device)

    def _get_non_slot_variable(self, name: str, graph: Any = None) -> Variable | None:
        """Returns the optimizer's own variable `name`, or None. There is only one graph."""
        return self.state.other(name)

    def _apply_one(self, gradient: Gradient, variable: Variable) -> Any:
        with backend_for(variable.device).enter(variable.identity):
            if isinstance(gradient, IndexedSlices):
                return self._resource_apply_sparse_duplicate_indices(
                    gradient.values, variable, gradient.indices
                )
            update_op = self._resource_apply_dense(gradient, variable)
            apply_constraint(variable)
            return update_op
