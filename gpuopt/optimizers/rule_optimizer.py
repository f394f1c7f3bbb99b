"""RuleOptimizer: an optimizer whose step is one update rule."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gpuopt.backends import Target, backend_for, moved
from gpuopt.backends.backend import compute_type
from gpuopt.dense_plans import Batch, DensePlans
from gpuopt.device import Device
from gpuopt.gradients import Form, Gradient, has_form
from gpuopt.identity import Identity
from gpuopt.indexed_slices import IndexedSlices
from gpuopt.optimizer import OnNonfinite, Optimizer, apply_constraint
from gpuopt.update_rule import UpdateRule
from gpuopt.variable import FLOAT_DTYPES, Variable

# A number, something with a scalar value, or a function without arguments that returns one.
Hyperparameter = float | Any | Callable[[], Any]

_APPLY_HOOKS = (
    "_apply_one",
    "_apply_dense",
    "_resource_apply_dense",
    "_apply_sparse",
    "_resource_apply_sparse",
    "_apply_sparse_duplicate_indices",
    "_resource_apply_sparse_duplicate_indices",
)


class _Known(NamedTuple):
    """How to update a list of variables, as long as no slots are made or replaced."""

    form: Form
    batches: list[Batch]
    slots_version: int


class RuleOptimizer(Optimizer):
    """Base of the optimizers that apply an `UpdateRule` to every element or touched row.

    A subclass sets `rule`, names its slots in `_initial_slot_values`, and passes the
    hyperparameters to `__init__`; it overrides `_scalars` where the rule takes something else than
    the hyperparameters themselves.

    Attributes:
        rule: The arithmetic of a step.
        touches_all_rows: A sparse gradient also updates rows that it does not name, as if their
            gradient were zero.
    """

    rule: UpdateRule
    touches_all_rows: ClassVar[bool] = False

    def __init__(
        self,
        use_locking: bool,
        name: str,
        *,
        on_nonfinite: OnNonfinite,
        **hyperparameters: Hyperparameter,
    ) -> None:
        super().__init__(use_locking, name, on_nonfinite=on_nonfinite)
        for key, value in hyperparameters.items():
            if not callable(value):
                as_scalar(value, key)
        self._hyperparameters = hyperparameters
        self._plans = DensePlans()
        # Of one thread's step: another thread may be in another step of a schedule.
        self._step = threading.local()

    def _initial_slot_values(self) -> Mapping[str, float]:
        """What each slot starts with, in order of creation."""
        return {}

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
        return self._step.hyperparameters[name]  # type: ignore[no-any-return]

    def _create_slots(self, var_list: Sequence[Variable]) -> None:
        if self._plans.has(var_list, self._slots.version):
            return
        for slot_name, value in self._initial_slot_values().items():
            for variable in var_list:
                if self._slots.get(variable, slot_name) is None:
                    self._slots.create(variable, slot_name, self._slot_op_name(slot_name), value)

    def _prepare(self) -> None:
        self._step.hyperparameters = {
            name: as_scalar(self._call_if_callable(value), name)
            for name, value in self._hyperparameters.items()
        }

    def _apply_dense(self, grad: Any, var: Variable) -> None:
        self._apply_rule_dense([grad], [var])

    def _apply_sparse(self, grad: IndexedSlices, var: Variable) -> None:
        self._apply_rule_sparse(grad, var)

    def _still_fit(self, gradients: Sequence[Any]) -> bool:
        known: _Known = self._repeat.kept
        return known.slots_version == self._slots.version and (
            self._repeat.is_again or has_form(gradients, known.form)
        )

    def _apply_all(
        self,
        grads_and_vars: Sequence[tuple[Gradient, Variable]],
        gradients: Sequence[Any] | None = None,
    ) -> list[Any]:
        if gradients is not None:
            self._apply_batches(gradients, self._repeat.kept.batches, self._repeat.token)
            return []
        if self._overrides_apply_hook():
            return super()._apply_all(grads_and_vars)
        gradients, variables = zip(*grads_and_vars, strict=True)
        if IndexedSlices in set(map(type, gradients)):
            dense = []
            for gradient, variable in grads_and_vars:
                if isinstance(gradient, IndexedSlices):
                    self._apply_rule_sparse(gradient, variable)
                else:
                    dense.append((gradient, variable))
            if not dense:
                return []
            gradients, variables = zip(*dense, strict=True)
        batches = self._apply_rule_dense(gradients, variables)
        constrained = [variable for variable in variables if variable.constraint is not None]
        for variable in constrained:
            apply_constraint(variable)
        form = self._seen.get(variables)
        if form is not None and not constrained:
            self._repeat.keep(_Known(form, batches, self._slots.version))
        return []

    def _apply_rule_dense(
        self, gradients: Sequence[Any], variables: Sequence[Variable]
    ) -> list[Batch]:
        """Applies the rule to variables of any devices and dtypes; returns how."""
        batches = self._plans.find(variables, self._slots.version, self._target)
        self._apply_batches(gradients, batches)
        return batches

    def _apply_batches(
        self, gradients: Sequence[Any], batches: list[Batch], token: object = None
    ) -> None:
        for batch in batches:
            backend_for(batch.device).apply_dense(
                self.rule,
                batch.plan,
                gradients
                if batch.positions is None
                else [gradients[position] for position in batch.positions],
                self._scalars_for(batch.dtype),
                token=token,
                refused=self._row_checks.flag(batch.device),
            )

    def _apply_rule_sparse(self, grad: IndexedSlices, var: Variable) -> None:
        target, identities = self._target(var)
        backend_for(var.device).apply_sparse(
            self.rule,
            target,
            grad.values,
            grad.indices,
            self._scalars_for(var.dtype),
            touches_all_rows=self.touches_all_rows,
            updated=identities,
            refused=self._row_checks.flag(var.device),
        )

    def _target(self, variable: Variable) -> tuple[Target, list[Identity]]:
        found = (self._slots.get(variable, name) for name in self.rule.slots)
        written = [variable, *(slot for slot in found if slot is not None)]
        first, *slots = [each.storage for each in written]
        return Target(first, slots), [each.identity for each in written]

    def _scalars_for(self, dtype: np.dtype[Any]) -> Mapping[str, np.floating[Any]]:
        with np.errstate(all="ignore"):
            return self._scalars(compute_type(dtype))

    def _must_check_first(self, grads_and_vars: Sequence[tuple[Gradient, Variable]]) -> bool:
        return (
            self._overrides_apply_hook()
            or type(self)._finish.__module__.partition(".")[0] != "gpuopt"
            or any(variable.constraint is not None for _, variable in grads_and_vars)
        )

    def _overrides_apply_hook(self) -> bool:
        """Whether a user's subclass wants to see each variable: then nothing may be batched."""
        cls = type(self)
        return any(getattr(cls, hook) is not getattr(RuleOptimizer, hook) for hook in _APPLY_HOOKS)


def as_scalar(value: Any, name: str) -> np.floating[Any]:
    """Rounds a hyperparameter as TensorFlow does.

    Python's numbers become float32; a numpy or device scalar of float64 keeps all its digits.
    (`numpy.float64` is a Python float by inheritance, and yet is not rounded.)

    Raises:
        TypeError: `value` is not a real number.
        ValueError: it is an array of numbers.
    """
    if type(value) is float:
        return np.float32(value)
    if isinstance(value, Variable):
        value = value.numpy()
    array = moved(value, Device.cpu)
    if array.dtype.kind not in "biuf" and array.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be a number, or a function that returns one, got {value!r}")
    if array.shape != ():
        raise ValueError(f"{name} must be a scalar, got an array of shape {array.shape}")
    keeps_digits = array.dtype == np.float64 and hasattr(value, "dtype")
    return np.float64(array) if keeps_digits else np.float32(array)


def require_positive(**hyperparameters: float) -> None:
    """Refuses what TensorFlow refuses; NaN too.

    Raises:
        ValueError: a number is not above 0.
    """
    for name, value in hyperparameters.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive: {value}")


def require_not_negative(**hyperparameters: Hyperparameter) -> None:
    """Refuses what TensorFlow refuses, NaN too; functions are not called.

    Raises:
        ValueError: a number is not 0 or above.
    """
    for name, value in hyperparameters.items():
        if not callable(value) and not value >= 0:
            raise ValueError(f"{name} {value} needs to be positive or zero")
