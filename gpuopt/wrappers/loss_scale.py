"""LossScaleOptimizer: scales the loss, and leaves out steps whose gradients are not finite."""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import Any

import numpy as np

from gpuopt.autodiff.engine import Loss
from gpuopt.backends import array_types, backend_for, gpu_backends, to_device
from gpuopt.backends.norms import Clipping
from gpuopt.device import Device, device_of
from gpuopt.distributed.tower import TowerOptimizer
from gpuopt.distributed.wrapper import OptimizerWrapper, inner_optimizers
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.optimizer import Optimizer
from gpuopt.optimizers.base.numbers_by_count import unknown_beside, unknown_hyperparameter
from gpuopt.optimizers.base.rule_optimizer import RuleOptimizer
from gpuopt.rules.loss_scaling import ScaleRule, ScaleState, after_step
from gpuopt.state import loss_scales
from gpuopt.state.state_dict import OptimizerState, check_form, load_state
from gpuopt.step.additions import Forget, nothing_to_forget
from gpuopt.step.chain import DeviceScale, reciprocal_on
from gpuopt.step.device_scaling import DeviceScaling, Key
from gpuopt.step.loss import GATE_OP, checked_gate
from gpuopt.step.pairs import Gradient, as_pairs, as_sequence
from gpuopt.step.replica_context import replica_context
from gpuopt.step.request import StepRequest, is_overridden, make_step
from gpuopt.step.updates import Updates
from gpuopt.step.wide_gradients import GradientTypes, unscaled
from gpuopt.variables.gate import between_writes, writing
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.late_errors import raise_late_errors
from gpuopt.variables.scalars import as_scalar, check_bool
from gpuopt.variables.undo import Undo, all_or_nothing
from gpuopt.variables.variable import Variable
from gpuopt.wrappers.base import StepWrapper
from gpuopt.wrappers.loss_scale_managers import LossScaleManager, RuleManager, checked_scale

_logger = logging.getLogger("gpuopt")

_NO_RULE = ScaleRule()
# What a manager of a user's own may override.
_methods_of = attrgetter("get_loss_scale", "update_loss_scale")


class LossScaleOptimizer(StepWrapper):
    """Multiplies the loss so that small gradients do not vanish in 16 bits, as contrib's does.

    Gradients are those of the loss times `loss_scale`, and are divided by it again. If one of them
    is not finite then, the step is left out: variables, slots, averages, powers of beta and the
    global step stay as they are. `loss_scale_manager` hears of each step and changes the scale.

        manager = ExponentialUpdateLossScaleManager(2.0**15, incr_every_n_steps=2000)
        optimizer = LossScaleOptimizer(AdamOptimizer(), manager)
        optimizer.minimize(loss, global_step)

    Where all variables are on GPUs, one of these decides whether a step is made, chooses the scale
    and picks the numbers that the step is made by. The host goes on, and waits where the scale, a
    count, a power of beta or the global step is read. This is so right around an optimizer with an
    update rule and the `apply_gradients` of this package, with a manager of this package, and a
    `global_step` in host memory; and with `averages` if all are made, as by the first step that is
    not skipped. Else the host decides, and waits for gradients on GPUs, once in a step.

    What follows from more than the count of steps would have it wait in each of them. So, where a
    variable is on a GPU, these are refused by name, unless `host_may_wait=True` is given: a
    hyperparameter that is a Python function, a variable, a schedule of a subclass or of another
    variable than the step's `global_step`, or, if it clips, any schedule; a variable's constraint;
    and `averages` whose `num_updates` is something else than a number or this `global_step`, or
    whose decay a subclass computes.

    `minimize` divides while it updates, so that gradients are only read. `compute_gradients`
    divides and returns new arrays, of float32 for variables of 16 bits, and `apply_gradients` takes
    such. Both may be used by `SyncReplicasOptimizer`, `TowerOptimizer` and other wrappers around
    this one, and by `MirroredStrategy`: then the decision is about the gradients of all, and the
    same for all.

    The scale, the manager's counts, and those of skipped steps are variables, which a `Saver`
    saves; `state_dict` has them, too.
    """

    _unlisted = frozenset(["leaves_out_call"])

    def __init__(
        self,
        opt: Optimizer,
        loss_scale_manager: LossScaleManager,
        *,
        accept_after: int | None = None,
        host_may_wait: bool = False,
    ) -> None:
        """Wraps `opt`.

        Args:
            opt: Makes the steps; its name is this optimizer's.
            loss_scale_manager: Chooses the scale.
            accept_after: After so many skipped steps in a row, a step is made with what is not
                finite; from 1, and None for never.
            host_may_wait: Whether a step on GPUs may have what the host alone can compute, and not
                before it has waited for them: a Python function as a hyperparameter, say. It
                changes no number, and is in no saved state.

        Raises:
            TypeError: `opt` is no optimizer, the manager is none, `accept_after` is no whole
                number, or `host_may_wait` is neither True nor False.
            ValueError: `accept_after` is below 1, or 2**63 or more; `opt` gathers the gradients of
                several workers or towers, which goes around this optimizer; it scales a loss
                itself; or it decides about gradients that are not finite, by `on_nonfinite`.
        """
        if not isinstance(loss_scale_manager, LossScaleManager):
            raise TypeError(
                f"loss_scale_manager must be a LossScaleManager, got {loss_scale_manager!r}: as "
                "FixedLossScaleManager(1024) for a scale that stays, or DynamicLossScale()"
            )
        if accept_after is not None:
            accept_after = _checked_count(accept_after)
        check_bool(host_may_wait, "host_may_wait")
        super().__init__(opt)
        self._refuse_inside()
        self._manager = loss_scale_manager
        self._accept_after = accept_after
        self._host_may_wait = host_may_wait
        self._counts = {
            name: Variable(np.int64(0), name=f"{loss_scales.SCALE}/{name}", trainable=False)
            for name in loss_scales.COUNTS
        }
        starts = loss_scale_manager.starts if isinstance(loss_scale_manager, RuleManager) else {}
        for name, variable in self._own_variables().items():
            loss_scales.note_start(variable, starts.get(name, loss_scales.ZERO))
        rule = loss_scale_manager.rule if isinstance(loss_scale_manager, RuleManager) else _NO_RULE
        self._rule_is_known = isinstance(loss_scale_manager, RuleManager) and _methods_of(
            type(loss_scale_manager)
        ) == _methods_of(RuleManager)
        self._on_gpu = DeviceScaling(
            self.owner_of_state.ledger, rule, accept_after, self._own_variables()
        )

    @property
    def manager(self) -> LossScaleManager:
        """Chooses the scale; another manager is for another `LossScaleOptimizer`."""
        return self._manager

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by."""
        return float(self.manager.get_loss_scale())

    @property
    def num_skipped(self) -> int:
        """How many steps were left out."""
        return int(self._counts["num_skipped"])

    @property
    def skipped_in_a_row(self) -> int:
        """How many of them since the last step whose gradients were finite."""
        return int(self._counts["skipped_in_a_row"])

    @property
    def last_nonfinite(self) -> str | None:
        """Describes the first gradient that was not finite; see `Optimizer.last_nonfinite`."""
        self._on_gpu.ledger.bring_up()
        return self._on_gpu.last_nonfinite

    def _gradients_to_apply(
        self, loss: Loss, **options: Any
    ) -> tuple[list[tuple[Gradient | None, Variable]], Mapping[str, Any]]:
        """Leaves the gradients scaled: the step divides them."""
        grad_loss = options["grad_loss"]
        scale = self._scale_of_loss(grad_loss)
        pairs = self._scaled_gradients(loss, options["var_list"], grad_loss, scale)
        return pairs, {"loss_scale": scale}

    def compute_gradients(
        self,
        loss: Loss,
        var_list: Any = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
    ) -> list[tuple[Gradient | None, Variable]]:
        """Returns the gradients of the scaled loss, divided by the scale, as new arrays.

        They are of float32 for variables of 16 bits, so that small ones do not vanish again.
        `apply_gradients` takes such, of this optimizer and of those around it.

        The arguments are those of `Optimizer.compute_gradients`.
        """
        checked_gate(gate_gradients)
        scale = self._scale_of_loss(grad_loss)
        return unscaled_pairs(self._scaled_gradients(loss, var_list, grad_loss, scale), scale)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        *,
        loss_scale: Any = None,
    ) -> None:
        """Makes a step if all gradients are finite; see `Optimizer.apply_gradients`.

        Args:
            grads_and_vars: (gradient, variable) pairs; a gradient may be None, and one for a
                variable of 16 bits may be of float32.
            global_step: Grows by 1 unless the step is left out.
            name: See `Optimizer.apply_gradients`.
            skip_gradients_aggregation: Likewise.
            loss_scale: What the gradients are divided by while they are read: what their loss was
                multiplied by, from 1 to 2**126. 1 if not given, as for those of
                `compute_gradients`.

        Raises:
            TypeError: `loss_scale` is no number.
            RuntimeError: workers that meet after a number of steps are around this optimizer.
            ValueError: `loss_scale` is below 1, above 2**126, or NaN; or the host would wait for
                GPUs in each step, without `host_may_wait`.
        """
        request = StepRequest(grads_and_vars, global_step, name, skip_gradients_aggregation)
        make_step(self, request, loss_scale=loss_scale)

    def _apply_request(self, request: StepRequest, **own: Any) -> None:
        for outer in request.additions:
            if isinstance(outer, OptimizerWrapper) and outer.is_for_workers:
                raise RuntimeError(
                    f"{type(outer).__name__} cannot be around LossScaleOptimizer: its workers meet "
                    "after a number of steps, and each of them would skip others"
                )
        loss_scale, pairs = checked_loss_scale(own.get("loss_scale")), as_sequence(request.pairs)
        context = replica_context()
        if context.strategy is not None and not request.skips_aggregation:
            if loss_scale is not None:
                pairs = unscaled_pairs(as_pairs(pairs), loss_scale)
            # The strategy adds up the replicas' gradients, and calls this again.
            Optimizer._apply_request(self, request._replace(pairs=pairs))
            return
        request = request._replace(pairs=pairs, takes_wide=True)
        scale, key = np.float32(1) if loss_scale is None else loss_scale, self._key_on_gpu(request)
        request = request._replace(loss_scales={**request.loss_scales, self: (scale, key)})
        if key is not None:
            request = request._replace(decides=self._on_gpu)
        else:
            self._on_gpu.ledger.raise_late(wait=True)
        super()._apply_request(request)

    def leaves_out_call(self) -> bool:
        """Tells of a call, of several that make a step, that is left out as it is not finite.

        The manager hears of it, and it counts as a skipped step.

        Returns:
            False if it is not to be left out, after `accept_after` skipped ones in a row.
        """
        with writing():
            most = self._accept_after
            if most is not None and self.skipped_in_a_row >= most:
                return False
            self.manager.update_loss_scale(False)
            self._count(False)
        return True

    def state_dict(self, variables: Mapping[str, Any] | None = None) -> OptimizerState:
        """Copies the state of the optimizer inside, with the scale and the counts.

        See `Optimizer.state_dict`.
        """
        with between_writes(f'reading the state of optimizer "{self.get_name()}"'):
            state = super().state_dict(variables)
            own = {name: variable.numpy() for name, variable in self._own_variables().items()}
            state["non_slots"] = {**state["non_slots"], **own}
            return state

    def load_state_dict(
        self, state: OptimizerState, variables: Mapping[str, Any] | None = None
    ) -> None:
        """Takes over a state of `state_dict`; see `Optimizer.load_state_dict`.

        It may be of an optimizer without this one around it, or with another manager: what it lacks
        begins anew, as the scale of this manager and counts of 0 do. A scale that stays is this
        manager's in any case.

        Raises:
            TypeError: the state is no dictionary with the parts of a state, or holds no numbers.
            ValueError: the state has a number that no run makes, or lacks one that is saved with
                others that it has.
        """
        check_form(state)
        own = self._own_variables()
        taken, others = loss_scales.taken_over(own, state["non_slots"])
        inner: Any = {**state, "non_slots": others}

        def load(undo: Undo) -> None:
            load_state(self.owner_of_state.state, inner, variables, undo)
            for name, value in taken.items():
                undo.assign(own[name], value)

        with between_writes(f'loading the state of optimizer "{self.get_name()}"', writes=True):
            raise_late_errors()
            all_or_nothing(load)

    def _settings(self) -> dict[str, Any]:
        (_, manager), own = self._made_with()
        return {**super()._settings(), "loss_scale_manager": manager, **own}

    def _names_to_give(self) -> Collection[str]:
        return {*super()._names_to_give(), "accept_after", "host_may_wait"}

    def _made_with(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = {"accept_after": self._accept_after, "host_may_wait": self._host_may_wait}
        return (self._inner, self.manager), own

    def _own_state(self) -> tuple[Any, dict[str, Any]]:
        counts = {name: variable.numpy() for name, variable in self._counts.items()}
        return {"counts": counts, "last_nonfinite": self.last_nonfinite}, {}

    def _take_state(self, state: Any, variables: Mapping[str, Any]) -> None:
        for name, count in state["counts"].items():
            self._counts[name].assign(count)
        self._on_gpu.last_nonfinite = state["last_nonfinite"]

    def _note_nonfinite(self, description: str) -> None:
        self._on_gpu.last_nonfinite = description

    def _extra_saved_variables(self) -> Mapping[str, Variable]:
        own = {variable.name: variable for variable in self._own_variables().values()}
        return {**super()._extra_saved_variables(), **own}

    def _own_variables(self) -> dict[str, Variable]:
        """Returns the variables of the manager and of this optimizer, by name."""
        managed = self.manager.variables if isinstance(self.manager, RuleManager) else {}
        return {**managed, **self._counts}

    def _scale_of_loss(self, grad_loss: Any) -> Any:
        """Returns the scale: a number, or a `DeviceScale`, for which the host does not wait."""
        on_gpu = self._on_gpu.scale if grad_loss is None else None
        if on_gpu is not None:
            return on_gpu
        name = f"{type(self.manager).__name__}.get_loss_scale()"
        return _checked_scale(name, self.manager.get_loss_scale())

    def _key_on_gpu(self, request: StepRequest) -> Key | None:
        # Else a user's code would read numbers that the host does not know.
        is_ours = not is_overridden(self._inner, "apply_gradients")
        return self._inner._key_on_gpu(request) if self._rule_is_known and is_ours else None

    def _scaled_gradients(
        self, loss: Loss, var_list: Any, grad_loss: Any, scale: Any
    ) -> list[tuple[Gradient | None, Variable]]:
        if isinstance(grad_loss, list | tuple):
            grad_loss = np.asarray(grad_loss, np.float32)
        if isinstance(scale, DeviceScale):
            scale = scale.seed()
        seed = scale if grad_loss is None else grad_loss * scale
        compute = partial(self._inner.compute_gradients, loss, var_list=var_list, grad_loss=seed)
        # What overflows is looked for in any case.
        return ignore_fp_warnings(compute)

    def _refuse_inside(self) -> None:
        """Raises ValueError if something inside decides about gradients otherwise."""
        for each in inner_optimizers(self._inner):
            kind = type(each).__name__
            if isinstance(each, LossScaleOptimizer):
                raise ValueError("a LossScaleOptimizer cannot be around another one: use one")
            is_for_workers = isinstance(each, OptimizerWrapper) and each.is_for_workers
            if is_for_workers or isinstance(each, TowerOptimizer):
                raise ValueError(
                    f"LossScaleOptimizer cannot be around {kind}, which brings together the "
                    f"gradients that it decides about: write {kind}(LossScaleOptimizer(...), ...)"
                )
            if each._on_nonfinite != "propagate":
                raise ValueError(
                    f'on_nonfinite="{each._on_nonfinite}" of {kind} and LossScaleOptimizer both '
                    "decide about gradients that are not finite: use one of them"
                )

    # What the step calls: see `Addition`.

    @property
    def _gradient_types(self) -> GradientTypes:  # type: ignore[override]
        return max(GradientTypes.WIDE, self._inner._gradient_types)

    @property
    def _keeps_new_slots(self) -> bool:
        return True  # as in TensorFlow, and as where a GPU decides after they are made

    def _prepare_updates(self, optimizer: Any, updates: Updates) -> tuple[Updates, Forget]:
        loss_scale, key = updates.request.loss_scales[self]
        if self._on_gpu.prepare(key, optimizer, updates, loss_scale):
            return updates, nothing_to_forget
        if gpu_backends and not self._host_may_wait:
            self._refuse_waits(optimizer, updates)
        updates.unscale(float(np.float32(1) / _number(loss_scale)))
        return updates, nothing_to_forget

    def _refuse_waits(self, optimizer: Any, updates: Updates) -> None:
        """Raises ValueError if the host has to know whether earlier steps on GPUs were made."""
        gpus = {v.device for v in updates.variables() if v.device.kind == "gpu"}
        if not gpus:
            return
        counter, found, following = optimizer.this_thread.global_step, None, None
        if isinstance(optimizer, RuleOptimizer):
            following = optimizer.options.averages
            every = optimizer.hyperparameters, *optimizer.groups
            found = unknown_hyperparameter(every, counter)
        found = found or unknown_beside(following, updates, counter)
        if found is not None:
            raise ValueError(
                f'"{self.get_name()}" of LossScaleOptimizer: {found.what}. The host would wait in '
                f"each step until it knows whether {min(gpus, key=str)} skips the step. Give "
                f"{found.instead}; or LossScaleOptimizer(..., host_may_wait=True), for one wait in "
                "each step"
            )

    def _makes_step(self, updates: Updates) -> bool:
        if updates.gpu_decides is not None:
            return True
        found = updates.find_nonfinite()
        if found is not None:
            self._note_nonfinite(found)
        self.manager.update_loss_scale(found is None)
        return self._count(found is None)

    def _accept_decided(self, is_counted: bool) -> None:
        self._on_gpu.ledger.bring_up()
        if not is_counted:
            self.manager.update_loss_scale(True)
            self._count(True)

    def _count(self, is_finite: bool) -> bool:
        """Counts a step; returns whether it is made."""
        before = ScaleState(np.float32(1), 0, 0, self.num_skipped, self.skipped_in_a_row)
        after, makes_step = after_step(before, _NO_RULE, is_finite, self._accept_after)
        if after != before:
            self._counts["num_skipped"].assign(np.int64(after.num_skipped))
            self._counts["skipped_in_a_row"].assign(np.int64(after.skipped_in_a_row))
        if not makes_step:
            _logger.info("%s; %s skips the step", self._on_gpu.last_nonfinite, self.get_name())
        return makes_step


def _checked_scale(name: str, scale: Any) -> np.float32:
    """Returns a scale, of a number or of an array or Variable of one."""
    if hasattr(scale, "dtype") and not isinstance(scale, np.generic):
        scale = as_scalar(scale, name)
    return np.float32(checked_scale(name, scale))


def checked_loss_scale(loss_scale: Any) -> Any:
    """Returns what a loss was multiplied by: None, a `DeviceScale`, or else a float32.

    Raises:
        TypeError: it is no number.
        ValueError: it is below 1, above 2**126, or NaN.
    """
    if loss_scale is None or isinstance(loss_scale, DeviceScale):
        return loss_scale
    return _checked_scale("loss_scale", loss_scale)


def _number(loss_scale: Any) -> np.float32:
    """Returns what the loss was multiplied by; waits for a GPU that knows it alone."""
    if isinstance(loss_scale, DeviceScale):
        return loss_scale.number()
    return np.float32(loss_scale)


def unscaled_pairs(pairs: Iterable[tuple[Any, Any]], loss_scale: Any) -> list[tuple[Any, Any]]:
    """Divides gradients by a number, or by a `DeviceScale`: the host waits for none on a GPU."""
    pairs = list(pairs)
    factor_on = cache(partial(reciprocal_on, loss_scale))

    def divided(gradient: Any) -> Any:
        if gradient is None:
            return None
        values = gradient.values if isinstance(gradient, IndexedSlices) else gradient
        return unscaled(gradient, factor_on(device_of(values)))

    together = _divided_together([gradient for gradient, _ in pairs], loss_scale)
    return [
        (together[at] if at in together else divided(gradient), variable)
        for at, (gradient, variable) in enumerate(pairs)
    ]


def _divided_together(gradients: Sequence[Any], loss_scale: Any) -> dict[int, Any]:
    """Returns the quotients of dense float32 gradients on GPUs, by position: of a GPU at once."""
    by_device: dict[Device, list[int]] = {}
    for position, gradient in enumerate(gradients):
        if type(gradient) in array_types and gradient.dtype == np.float32:
            by_device.setdefault(device_of(gradient), []).append(position)
    divided: dict[int, Any] = {}
    for device, positions in by_device.items():
        if device.kind == "gpu" and len(positions) > 1:
            is_on_gpu = isinstance(loss_scale, DeviceScale)
            norm = to_device(loss_scale.seed() if is_on_gpu else np.float32(loss_scale), device)
            mine, backend = [gradients[at] for at in positions], backend_for(device)
            with backend.enter():
                # x / max(scale, 1): no scale is below 1.
                scaled = backend.norms.scale(mine, norm, np.float32(1), Clipping.NORM)
            divided.update(zip(positions, scaled, strict=True))
    return divided


def _checked_count(value: Any) -> int:
    try:
        count = operator.index(value)
    except TypeError as error:
        raise TypeError(f"accept_after must be a whole number or None, got {value!r}") from error
    if isinstance(value, bool):
        raise TypeError(f"accept_after must be a whole number or None, got {value!r}")
    if count < 0:
        raise ValueError(f"accept_after must be from 1, or None for never, got {value!r}")
    if count == 0:
        raise ValueError("accept_after must be from 1, or None for never: 0 would make every step")
    if count >= 2**63:
        raise ValueError(f"accept_after must be less than 2**63, got {value!r}: None is for never")
    return count
