"""Optimizer: TensorFlow 1's interface between gradients and variables."""

from __future__ import annotations

import itertools
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from gpuopt.autodiff import engine_of
from gpuopt.autodiff.engine import Loss, OnGradient, flatten
from gpuopt.backends import backend_for, profiling_range
from gpuopt.by_variables import ByVariables
from gpuopt.gradients import (
    Form,
    Gradient,
    as_list,
    checked_pairs,
    first_nonfinite,
    refuse_shared_memory,
)
from gpuopt.host_scalar import HostScalar
from gpuopt.identity import Identity
from gpuopt.indexed_slices import IndexedSlices
from gpuopt.optimizer_state import OptimizerState, load_state, read_state
from gpuopt.repeat import Repeat
from gpuopt.replica_context import replica_context
from gpuopt.row_checks import RowChecks
from gpuopt.slots import Slots, SlotTable, check_fits
from gpuopt.step_gate import between_steps, step
from gpuopt.variable import FLOAT_DTYPES, Variable, as_variable

# What a gradient with NaN or infinity in it does.
OnNonfinite = Literal["propagate", "skip", "raise"]

_logger = logging.getLogger("gpuopt")

# In order of creation.
_living: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
_serials = itertools.count()


class Optimizer:
    """Base of all optimizers.

    A user's optimizer overrides, as in TensorFlow 1: `_create_slots`, `_prepare`, `_apply_dense`,
    `_apply_sparse`, `_apply_sparse_duplicate_indices`, their `_resource_` twins, and `_finish`.
    Variables reach these hooks as `Variable`, also where the caller gave a raw array. Where both an
    `_apply` hook and its `_resource_` twin are overridden, the twin is called, as in TensorFlow's
    eager mode.

    Threads may share an optimizer. With `use_locking=True` they lose no update.
    """

    GATE_NONE: ClassVar[int] = 0
    GATE_OP: ClassVar[int] = 1
    GATE_GRAPH: ClassVar[int] = 2

    def __init__(
        self, use_locking: bool, name: str, *, on_nonfinite: OnNonfinite = "propagate"
    ) -> None:
        """Names the optimizer.

        Args:
            use_locking: Updates of one variable take turns.
            name: Slot variables are named after it.
            on_nonfinite: What NaN or infinity in any gradient of a step does. "propagate" computes
                with it, as TensorFlow does; "skip" leaves out the whole step, with all slots and
                the global step as they were, and logs a warning; "raise" is a FloatingPointError,
                and nothing is written.

        Raises:
            ValueError: `name` is empty or None, or `on_nonfinite` is none of the three.
        """
        if not name:
            raise ValueError("Must specify the optimizer name")
        if not isinstance(name, str):
            raise TypeError(f"the optimizer's name must be text, got {name!r}")
        if on_nonfinite not in get_args(OnNonfinite):
            raise ValueError(
                f"on_nonfinite must be one of {list(get_args(OnNonfinite))}, got {on_nonfinite!r}"
            )
        self._use_locking = use_locking
        self._name = name
        self._on_nonfinite = on_nonfinite
        self._slots = Slots()
        self._non_slots: dict[str, Variable] = {}
        self._waiting_non_slots: dict[str, np.ndarray[Any, Any]] = {}
        self._seen: ByVariables[Form] = ByVariables()
        self._repeat = Repeat()
        self._row_checks = RowChecks()
        self._creation = threading.RLock()
        self._gate_warning_given = False
        _living[next(_serials)] = self

    def get_name(self) -> str:
        return self._name

    def minimize(
        self,
        loss: Loss,
        global_step: Any = None,
        var_list: Any = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: Any = None,
    ) -> None:
        """Computes gradients and applies them; see `compute_gradients` and `apply_gradients`.

        With GATE_NONE, each variable is updated as soon as its gradient is final, and the gradient
        is freed: memory holds about one gradient instead of all. An exception in the middle then
        leaves the variables updated that had their turn; with the other gates it leaves everything
        as it was.

        Raises:
            ValueError: no variable has a gradient.
        """
        gate_gradients = self._checked_gate(gate_gradients)
        if gate_gradients == self.GATE_NONE and not self._needs_all_gradients():
            self._minimize_gradient_by_gradient(loss, global_step, var_list, name, grad_loss)
            return
        grads_and_vars = self.compute_gradients(
            loss,
            var_list=var_list,
            gate_gradients=gate_gradients,
            aggregation_method=aggregation_method,
            colocate_gradients_with_ops=colocate_gradients_with_ops,
            grad_loss=grad_loss,
        )
        if all(gradient is None for gradient, _ in grads_and_vars):
            _refuse_no_gradients(loss, [variable for _, variable in grads_and_vars])
        self.apply_gradients(grads_and_vars, global_step=global_step, name=name)

    def compute_gradients(
        self,
        loss: Loss,
        var_list: Any = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
    ) -> list[tuple[Gradient | None, Variable]]:
        """Runs the loss once and returns its gradients.

        Args:
            loss: A function without arguments, in operations of numpy or CuPy; or one decorated
                with `gpuopt.with_torch`, or with `gpuopt.with_gradients`. What it returns acts as
                its sum. In replica i of n that average their losses, it is scaled by 1/n.
            var_list: Variables, in nested lists if need be; by default the trainable variables
                that the loss reads.
            gate_gradients: GATE_NONE, GATE_OP or GATE_GRAPH; here all give the same.
            aggregation_method: Ignored; it chose among graph operations.
            colocate_gradients_with_ops: Ignored; likewise.
            grad_loss: What gradients are multiplied by: a scalar, or of the loss's shape.

        Returns:
            (gradient or None, variable) pairs in the order of `var_list`. Rows read by
            `gpuopt.embedding_lookup` give IndexedSlices. Gradients are only to be read.

        Raises:
            RuntimeError: `loss` is a value, not a function.
            TypeError: `var_list` holds something else than variables.
            ValueError: a bad gate, no variables, or a loss or variable that is not floating point.
        """
        self._checked_gate(gate_gradients)
        value, grads_and_vars = self._differentiated(loss, var_list, grad_loss)
        self._assert_valid_dtype(_dtype_of(value), "loss")
        for gradient, variable in grads_and_vars:
            if gradient is not None:
                self._assert_valid_dtype(variable.dtype, f'"{variable.name}"')
        return grads_and_vars

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
    ) -> None:
        """Updates every variable that has a gradient, in place and on its own device.

        Everything is checked before anything is written. Gradients are only read. In a replica of
        a strategy, gradients are summed over the replicas first.

        Args:
            grads_and_vars: (gradient, variable) pairs. A gradient is an array of the variable's
                shape and dtype, nested lists of numbers, a Variable, IndexedSlices, or None, which
                leaves its variable alone. A variable is a Variable or a writable array.
            global_step: A scalar Variable or array, which grows by 1 after the update.
            name: What NVIDIA's profilers call this step; by default the optimizer's name.
            skip_gradients_aggregation: In a replica, update this replica's variables by its own
                gradients, as if there were no strategy.

        Raises:
            ValueError: no pairs, no gradient, a malformed pair, a wrong shape, a read-only array,
                or memory that would be updated twice.
            TypeError: something is no gradient or no variable, or has a wrong dtype.
            IndexError: a row of IndexedSlices is outside its variable. Where the rows are on a GPU,
                a later call raises it (see `check`), and this one changes nothing there.
            RuntimeError: IndexedSlices for a variable with a constraint; or a strategy's
                cross-replica context.
            DeviceUnavailableError: an array lives on a device that cannot be used.
            FloatingPointError: a gradient is not finite, and `on_nonfinite` is "raise".
        """
        context = replica_context()
        if context.strategy is not None and not skip_gradients_aggregation:
            if context.is_cross_replica:
                raise RuntimeError(
                    "Use `_distributed_apply()` instead of `apply_gradients()` in a cross-replica "
                    "context."
                )
            context.strategy.apply_gradients(self, grads_and_vars, global_step, name)
            return
        self._row_checks.raise_late(wait=False)
        pairs = given = as_list(grads_and_vars)
        gradients = self._repeat.sees(given)
        if gradients is None or not self._still_fit(gradients):
            gradients = None
            checked = checked_pairs(given, self._dtypes(), self._seen)
            if checked is not given:  # what is applied is not what was given
                self._repeat.forget()
            pairs = [pair for pair in checked if pair[0] is not None]
        counter = None if global_step is None else checked_global_step(global_step)
        if self._on_nonfinite != "propagate" and self._must_skip(pairs):
            return
        if gradients is None:
            with self._creation:
                self._create_slots([variable for _, variable in pairs])
        self._prepare()
        undo = partial(self._undoing, counter)
        at_once = partial(self._must_check_first, pairs)
        sparse_pairs = pairs if gradients is None else ()
        with (
            profiling_range(name or self._name),
            step(),
            self._row_checks.around(sparse_pairs, undo, at_once),
        ):
            update_ops = self._apply_locked(pairs, gradients)
            self._finish(update_ops, name or self._name)
            self._count(counter)

    def check(self) -> None:
        """Waits for the GPUs, and raises what they found wrong with earlier calls.

        A GPU looks at the rows of sparse gradients while the host goes on. If one is out of range,
        the call changes nothing on that GPU, nor do the calls after it; the next call that learns
        of it raises the error, and takes back what the host has done in them: the global step, and
        Adam's powers of beta. These are `apply_gradients`, `check`, `Variable.numpy`, and so
        whatever saves. With GPUOPT_CHECK=1 in the environment, each call waits for its own check.

        Raises:
            IndexError: a row of IndexedSlices is outside its variable.
        """
        self._row_checks.raise_late(wait=True)

    def _distributed_apply(
        self,
        distribution: Any,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
    ) -> None:
        """Does `apply_gradients` in a cross-replica context.

        Args:
            distribution: The strategy whose variables these are.
            grads_and_vars: (gradients, variable) pairs: one gradient for each replica, which are
                summed and applied to each replica's copy, or None.
            global_step: See `apply_gradients`; it grows once.
            name: See `apply_gradients`.
        """
        distribution.update(self, grads_and_vars, global_step, name)

    def get_slot(self, var: Any, name: str) -> Variable | None:
        """Returns the slot variable `name` of `var`, or None if it was never created."""
        return self._slots.get(as_variable(var), name)

    def get_slot_names(self) -> list[str]:
        """Lists the names of the slots created so far, sorted."""
        return self._slots.names()

    def variables(self) -> list[Variable]:
        """Lists the optimizer's own variables, slots and others, sorted by name."""
        return sorted([*self._slots, *self._non_slots.values()], key=lambda variable: variable.name)

    def state_dict(self, variables: Mapping[str, Any] | None = None) -> OptimizerState:
        """Copies the optimizer's state to host memory, as of one moment between two steps.

        Args:
            variables: Names to variables or arrays: their slots are included, under these names. By
                default all `global_variables()` under their own names.

        Returns:
            Plain dictionaries with numpy arrays of the slots' own dtypes. Hyperparameters are there
            to be read; `load_state_dict` does not set them.

        Raises:
            ValueError: an array without a name has slots, and `variables` is not given.
            RuntimeError: called in the middle of a step.
        """
        with between_steps():
            return read_state(self, variables, Variable.numpy)

    def load_state_dict(
        self, state: OptimizerState, variables: Mapping[str, Any] | None = None
    ) -> None:
        """Takes over a state, exactly; the run continues as the saved one would have.

        Slots that are missing are made at once. The state of variables that do not exist yet waits
        for them, by name, and is what their slots start with; a later call replaces it.
        Everything is checked before anything is written.

        Args:
            state: What `state_dict` returned. Its arrays are copied.
            variables: The state's names to variables or arrays; by default the
                `global_variables()` under their own names.

        Raises:
            ValueError: names, shapes or dtypes do not fit.
            TypeError: `state` is something else.
            RuntimeError: called in the middle of a step.
        """
        with between_steps():
            load_state(self, state, variables)

    # What a subclass overrides.

    def _hyperparameters_to_save(self) -> dict[str, Any]:
        """What a checkpoint says of the settings; for readers, nothing is restored from it."""
        return {}

    def _all_slot_names(self) -> list[str] | None:
        """Every slot that a variable gets, in order of creation; None where it is not known.

        Known slots have their variable's shape and dtype.
        """
        return None

    def _all_non_slot_names(self) -> list[str]:
        """The names of the optimizer's other variables that are always there after a step."""
        return []

    def _slot_op_name(self, slot_name: str) -> str:
        """What the slot's variables are named after."""
        return self._name

    def _valid_dtypes(self) -> Iterable[Any]:
        """The dtypes of loss, variables and gradients that are accepted."""
        return FLOAT_DTYPES

    def _create_slots(self, var_list: Sequence[Variable]) -> None:
        """Makes the slots that `var_list` still lacks. Called before every update."""

    def _prepare(self) -> None:
        """Evaluates hyperparameters, once in an update and before any variable is written."""

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
        return self._resource_apply_sparse(sums.astype(var.dtype, copy=False), var, rows)

    def _resource_apply_sparse_duplicate_indices(
        self, grad: Any, handle: Variable, indices: Any
    ) -> Any:
        return self._apply_sparse_duplicate_indices(
            IndexedSlices(grad, indices, handle.shape), handle
        )

    def _finish(self, update_ops: list[Any], name_scope: str) -> Any:
        """Runs after all variables were updated, before the global step grows."""

    # What a subclass calls.

    def _call_if_callable(self, param: Any) -> Any:
        return param() if callable(param) else param

    def _zeros_slot(self, var: Any, slot_name: str, op_name: str) -> Variable:
        """Returns the slot, made with zeros if need be."""
        return self._get_or_make_slot(var, 0, slot_name, op_name)

    def _get_or_make_slot(self, var: Any, val: Any, slot_name: str, op_name: str) -> Variable:
        """Returns the slot, made with `val`, a number or an array of the variable's shape."""
        variable = as_variable(var)
        with self._creation:
            slot = self._slots.get(variable, slot_name)
            if slot is None:
                slot = self._slots.create(variable, slot_name, op_name, val)
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
        with self._creation:
            slot = self._slots.get(variable, slot_name)
            if slot is None:
                value = initializer(shape, dtype=dtype)
                slot = self._slots.create(variable, slot_name, op_name, value, shape, dtype)
            return slot

    def _slot_dict(self, slot_name: str) -> SlotTable:
        """Returns all slots of one name, by `_var_key(variable)`."""
        return self._slots.table(slot_name)

    def _create_non_slot_variable(
        self, initial_value: Any, name: str, colocate_with: Any
    ) -> Variable:
        """Returns the optimizer's own variable `name`, made if need be on another's device."""
        with self._creation:
            if name not in self._non_slots:
                device = as_variable(colocate_with).device
                self._add_non_slot(
                    name, Variable(initial_value, name=name, trainable=False, device=device)
                )
            return self._non_slots[name]

    def _create_host_scalar(self, initial_value: Any, name: str, colocate_with: Any) -> Variable:
        """Does what `_create_non_slot_variable` does; the host keeps the value. See HostScalar."""
        with self._creation:
            if name not in self._non_slots:
                device = as_variable(colocate_with).device
                self._add_non_slot(name, HostScalar(initial_value, name, device))
            return self._non_slots[name]

    def _add_non_slot(self, name: str, variable: Variable) -> None:
        restored = self._waiting_non_slots.get(name)
        if restored is not None:
            check_fits(restored, f'"{name}"', variable.shape, variable.dtype)
            variable.assign(restored)
        self._non_slots[name] = variable
        self._waiting_non_slots.pop(name, None)

    def _get_non_slot_variable(self, name: str, graph: Any = None) -> Variable | None:
        """Returns the optimizer's own variable `name`, or None. There is only one graph."""
        return self._non_slots.get(name)

    def _still_fit(self, gradients: Sequence[Any]) -> bool:
        """Whether gradients fit what `self._repeat` has kept about their variables."""
        return False

    def _apply_all(
        self,
        grads_and_vars: Sequence[tuple[Gradient, Variable]],
        gradients: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Updates the variables one after the other, through the hooks.

        Args:
            grads_and_vars: What to update.
            gradients: Of these pairs, if `self._repeat` has kept what to do about the variables.
        """
        return [self._apply_one(gradient, variable) for gradient, variable in grads_and_vars]

    def _must_check_first(self, grads_and_vars: Sequence[tuple[Gradient, Variable]]) -> bool:
        """Whether something here would write though a GPU has refused the rows."""
        return True

    def _undoing(self, counter: Variable | None) -> Callable[[], None]:
        """Returns what takes back the host's part of the step that comes now."""
        kept = [
            (variable, variable.numpy())
            for variable in self._non_slots.values()
            if isinstance(variable, HostScalar)
        ]

        def undo() -> None:
            for variable, value in kept:
                variable.assign(value)
            if counter is not None:
                counter.assign_sub(1)

        return undo

    def _apply_locked(
        self,
        grads_and_vars: Sequence[tuple[Gradient, Variable]],
        gradients: Sequence[Any] | None = None,
    ) -> list[Any]:
        if not self._use_locking:
            return self._apply_all(grads_and_vars, gradients)
        with ExitStack() as locks:
            # In one order everywhere, so that two threads cannot wait for each other.
            for identity in sorted((variable.identity for _, variable in grads_and_vars), key=id):
                locks.enter_context(identity.lock)
            return self._apply_all(grads_and_vars, gradients)

    def _differentiated(
        self, loss: Loss, var_list: Any, grad_loss: Any, on_grad: OnGradient | None = None
    ) -> tuple[Any, list[tuple[Gradient | None, Variable]]]:
        """Has the loss's engine run it, after the checks that come before."""
        if not callable(loss):
            raise RuntimeError(
                "`loss` passed to Optimizer.compute_gradients should be a function when eager "
                f"execution is enabled, got {loss!r}."
            )
        if var_list is not None and not list(flatten(var_list)):
            raise ValueError("No variables to optimize.")
        if grad_loss is not None:
            self._assert_valid_dtype(_dtype_of(grad_loss), "grad_loss")
        scale = replica_context().loss_scale
        if scale != 1:
            grad_loss = scale if grad_loss is None else grad_loss * scale
        value, grads_and_vars = engine_of(loss).compute(loss, var_list, grad_loss, on_grad)
        if not grads_and_vars:
            raise ValueError(f"No variables to optimize: the loss {loss!r} read no trainable one.")
        return value, grads_and_vars

    def _minimize_gradient_by_gradient(
        self, loss: Loss, global_step: Any, var_list: Any, name: str | None, grad_loss: Any
    ) -> None:
        self._row_checks.raise_late(wait=False)
        counter = None if global_step is None else checked_global_step(global_step)
        self._repeat.forget()
        updated: list[Variable] = []
        update_ops: list[Any] = []

        def update(gradient: Any, variable: Variable) -> None:
            live = checked_pairs([(gradient, variable)], self._dtypes())
            refuse_shared_memory([*updated, variable])
            with self._creation:
                self._create_slots([variable])
            if not updated:
                self._prepare()
            # What follows depends on this update, and cannot be undone without it.
            with self._row_checks.around(live, lambda: _nothing, lambda: True):
                update_ops.extend(self._apply_locked(live))
            updated.append(variable)

        with profiling_range(name or self._name), step():
            _, grads_and_vars = self._differentiated(loss, var_list, grad_loss, update)
            if not updated:
                _refuse_no_gradients(loss, [variable for _, variable in grads_and_vars])
            self._finish(update_ops, name or self._name)
            self._count(counter)

    def _count(self, counter: Variable | None) -> None:
        if counter is not None:
            counter.assign_add(1, use_locking=self._use_locking)

    def _must_skip(self, grads_and_vars: list[tuple[Gradient, Variable]]) -> bool:
        """Looks for NaN and infinity; raises or logs what it finds, as `on_nonfinite` says."""
        found = first_nonfinite(grads_and_vars)
        if found is None:
            return False
        if self._on_nonfinite == "raise":
            raise FloatingPointError(f"{found}; nothing was changed")
        _logger.warning("%s; %s skips the step", found, self._name)
        return True

    def _needs_all_gradients(self) -> bool:
        """Whether gradients cannot be applied one by one; if so, says why, once."""
        if replica_context().strategy is not None:
            return True
        cls = type(self)
        reasons = [
            f"{cls.__name__} overrides {hook}, which"
            for hook in ("compute_gradients", "apply_gradients")
            if getattr(cls, hook) is not getattr(Optimizer, hook)
        ]
        if self._on_nonfinite != "propagate":
            reasons.append(f'on_nonfinite="{self._on_nonfinite}"')
        if reasons and not self._gate_warning_given:
            self._gate_warning_given = True
            warnings.warn(
                f"GATE_NONE gives way to GATE_OP: {reasons[0]} needs all gradients at once",
                stacklevel=3,
            )
        return bool(reasons)

    def _checked_gate(self, gate_gradients: int) -> int:
        if gate_gradients not in (self.GATE_NONE, self.GATE_OP, self.GATE_GRAPH):
            raise ValueError(
                "gate_gradients must be one of: Optimizer.GATE_NONE, Optimizer.GATE_OP, "
                f"Optimizer.GATE_GRAPH.  Not {gate_gradients}"
            )
        return gate_gradients

    def _apply_one(self, gradient: Gradient, variable: Variable) -> Any:
        with backend_for(variable.device).active(variable.identity):
            if isinstance(gradient, IndexedSlices):
                return self._resource_apply_sparse_duplicate_indices(
                    gradient.values, variable, gradient.indices
                )
            update_op = self._resource_apply_dense(gradient, variable)
            apply_constraint(variable)
            return update_op

    def _dtypes(self) -> frozenset[np.dtype[Any]]:
        return frozenset(map(np.dtype, self._valid_dtypes()))

    def _assert_valid_dtype(self, dtype: np.dtype[Any], what: str) -> None:
        if dtype not in self._dtypes():
            expected = sorted(map(str, self._dtypes()))
            raise ValueError(f"Invalid type {dtype} for {what}, expected: {expected}.")


def _nothing() -> None:
    pass


def living_optimizers() -> list[Optimizer]:
    """Lists the optimizers still alive, in order of creation."""
    return [optimizer for _, optimizer in sorted(_living.items())]


def _var_key(var: Any) -> Identity:
    """What optimizer state of `var` is filed under; TensorFlow's name for it."""
    return as_variable(var).identity


def apply_constraint(variable: Variable) -> None:
    """Projects a variable after its update; slots stay as they are."""
    if variable.constraint is not None:
        with backend_for(variable.device).active():
            variable.assign(variable.constraint(variable.storage))


def checked_global_step(global_step: Any) -> Variable:
    """Returns the variable that counts steps, or raises TypeError or ValueError."""
    try:
        step = as_variable(global_step)
    except (TypeError, ValueError) as error:
        raise type(error)(f"global_step: {error}") from error
    if step.shape != () or step.dtype.kind not in "iuf":
        raise TypeError(
            f'global_step "{step.name}" must be a scalar number, got shape {step.shape} and dtype '
            f"{step.dtype}"
        )
    return step


def _refuse_no_gradients(loss: Loss, variables: list[Variable]) -> None:
    names = [variable.name for variable in variables]
    raise ValueError(
        f"No gradients provided for any variable: the loss {loss!r} does not depend on {names}."
    )


def _dtype_of(value: Any) -> np.dtype[Any]:
    """The dtype of a number, array or tensor, where Python's float counts as float32."""
    if type(value) is float:
        return np.dtype(np.float32)
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    return np.dtype(str(dtype).removeprefix("torch."))
