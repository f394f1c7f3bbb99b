"""RuleOptimizer: an optimizer whose step is one update rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from gpuopt.backends import Target
from gpuopt.optimizer import Optimizer
from gpuopt.optimizers.base.arguments import Common, FullSignature, with_defaults
from gpuopt.optimizers.base.hyperparameters import Hyperparameter, as_scalar
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.step.known import KnownGroups
from gpuopt.step.rule_updates import RuleUpdates
from gpuopt.step.updates import HookUpdates, Updates
from gpuopt.variables.identity import Identity
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable

Finish = TypeVar("Finish", bound=Callable[..., Any])

# Their values never change.
_NUMBER_TYPES = (float, int, np.float32, np.float64)

_APPLY_HOOKS = (
    "_apply_one",
    "_apply_dense",
    "_resource_apply_dense",
    "_apply_sparse",
    "_resource_apply_sparse",
    "_apply_sparse_duplicate_indices",
    "_resource_apply_sparse_duplicate_indices",
)


def undoable(finish: Finish) -> Finish:
    """Marks a `_finish` that writes nothing but what a late undo takes back: host scalars.

    A GPU may find a step's rows out of range after the host has gone on. A step with a `_finish`
    that is not marked waits for the GPU's check. The mark belongs to the function, so a subclass
    that overrides `_finish` waits unless its own is marked.
    """
    finish.__dict__["is_undoable"] = True
    return finish


class RuleOptimizer(Optimizer):
    """Base of the optimizers that apply an `UpdateRule` to every element or touched row.

    A subclass sets `rule` and passes its hyperparameters to `__init__`. It overrides
    `_initial_slot_values` where a slot does not start at 0, and `_scalars` where the rule takes
    something else than the hyperparameters themselves.

    Attributes:
        rule: The arithmetic of a step.
        touches_all_rows: A sparse gradient also updates rows that it does not name, as if their
            gradient were zero.
        known: What is known of variables from earlier steps.
    """

    rule: UpdateRule
    touches_all_rows: ClassVar[bool] = False
    __signature__ = FullSignature()

    def __init__(self, common: Common, /, **hyperparameters: Hyperparameter) -> None:
        """Keeps the hyperparameters; the class says what each is.

        A `Hyperparameter` is a number, something with a scalar value, or a function without
        arguments that returns one and is called once in each step.

        Args:
            common: What every optimizer takes, as `Optimizer` does: `use_locking` (False unless
                given), `name` (by default the class's, less "Optimizer") and `on_nonfinite`.
            hyperparameters: By name.

        Raises:
            TypeError: a hyperparameter is no number, or an argument is unknown.
            ValueError: a hyperparameter is an array of numbers, or `Optimizer` refuses an argument.
        """
        super().__init__(**with_defaults(common, type(self)))
        for key, value in hyperparameters.items():
            if not callable(value):
                as_scalar(value, key)
        self._hyperparameters = hyperparameters
        self.known = KnownGroups()
        # Others than numbers are looked at in each step: a function, a Variable, an array.
        self._fixed = {
            key: as_scalar(value, key)
            for key, value in hyperparameters.items()
            if type(value) in _NUMBER_TYPES
        }
        self.runs_user_code = len(self._fixed) < len(hyperparameters) or any(
            getattr(type(self), hook) is not getattr(RuleOptimizer, hook)
            for hook in ("_prepare", "_call_if_callable")
        )

    def _initial_slot_values(self) -> Mapping[str, float]:
        """What each slot starts with, in order of creation: by default the rule's slots, at 0."""
        return dict.fromkeys(self.rule.slots, 0.0)

    def _all_slot_names(self) -> list[str]:
        return list(self._initial_slot_values())

    def _hyperparameters_to_save(self) -> dict[str, Any]:
        return {
            "rule": self.rule.name,
            **{
                name: None if callable(value) else float(value)
                for name, value in self._hyperparameters.items()
            },
        }

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        """Returns the rule's scalars of this step, computed in the type `real`."""
        return {name: real(self._hyper(name)) for name in self.rule.scalars}

    def _hyper(self, name: str) -> np.floating[Any]:
        """Returns a hyperparameter of this step: float64 where it was given so, else float32."""
        return self.this_thread.hyperparameters[name]

    def _create_slots(self, var_list: Sequence[Variable]) -> None:
        if self.rule.cuda is None:
            for variable in var_list:
                if variable.device.kind == "gpu" and not self._overrides_apply_hook():
                    self.rule.require_cuda(f'"{variable.name}" on {variable.device}')
        for slot_name, value in self._initial_slot_values().items():
            for variable in var_list:
                if self.state.slot(variable, slot_name) is None:
                    self.state.create_slot(
                        variable, slot_name, self._slot_op_name(slot_name), value
                    )

    def _prepare(self) -> None:
        fixed = self._fixed
        if len(fixed) < len(self._hyperparameters):
            fixed = {
                name: fixed[name]
                if name in fixed
                else as_scalar(self._call_if_callable(value), name)
                for name, value in self._hyperparameters.items()
            }
        self.this_thread.hyperparameters = fixed

    def _apply_dense(self, grad: Any, var: Variable) -> None:
        self._apply_rule(grad, var)

    def _apply_sparse(self, grad: IndexedSlices, var: Variable) -> None:
        self._apply_rule(grad, var)

    def _apply_rule(self, grad: Any, var: Variable) -> None:
        """Updates one variable, for a hook: the step's numbers are there already."""
        updates = RuleUpdates(self, [(grad, var)])
        updates.create_slots()
        updates.write()

    def _checked_updates(self, given: list[Any]) -> Updates:
        return (
            HookUpdates(self, given) if self._overrides_apply_hook() else RuleUpdates(self, given)
        )

    def _target(self, variable: Variable) -> tuple[Target, list[Identity]]:
        found = (self.state.slot(variable, name) for name in self.rule.slots)
        slots = [slot for slot in found if slot is not None]
        return (
            Target(variable.storage, [slot.storage for slot in slots]),
            [variable.identity, *(slot.identity for slot in slots)],
        )

    def _hint_at_cost(self, table: Variable, num_rows: int) -> None:
        """Called before all rows of a table are updated for a gradient of `num_rows` rows."""

    @property
    def finish_is_undoable(self) -> bool:
        """Whether `_finish` does nothing, or is marked as `undoable`."""
        finish = getattr(self._finish, "__func__", self._finish)
        return finish is Optimizer._finish or getattr(finish, "is_undoable", False)

    def _overrides_apply_hook(self) -> bool:
        """Whether a user's subclass wants to see each variable: then nothing may be batched."""
        cls = type(self)
        return any(
            getattr(cls, hook) is not getattr(RuleOptimizer, hook) for hook in _APPLY_HOOKS
        ) or not vars(self).keys().isdisjoint(_APPLY_HOOKS)
