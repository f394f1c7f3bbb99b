"""GradientAccumulationOptimizer: one step of another optimizer by the gradients of several."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, get_args

from gpuopt.autodiff.engine import Loss
from gpuopt.choices import is_one_of
from gpuopt.distributed.strategy import MirroredStrategy
from gpuopt.distributed.wrapper import OptimizerWrapper, check_inside_of_workers, inner_optimizers
from gpuopt.interrupts import SMALL_WRITE, interrupts_put_off
from gpuopt.locks import Lock
from gpuopt.optimizer import OnNonfinite, Optimizer
from gpuopt.step.nonfinite import first_nonfinite
from gpuopt.step.pairs import Gradient, as_pairs, as_sequence
from gpuopt.step.replica_context import replica_context
from gpuopt.step.request import StepRequest, is_overridden, make_step, pass_on
from gpuopt.step.step import checked_global_step
from gpuopt.step.updates import Pair, pairs_for
from gpuopt.variables.copied import found_again
from gpuopt.variables.gate import between_writes, writing
from gpuopt.variables.identity import Identity
from gpuopt.variables.operators import reading
from gpuopt.variables.unfinished import refuse_unfinished
from gpuopt.variables.variable import Variable
from gpuopt.wrappers.base import at_least_1
from gpuopt.wrappers.gradient_sums import GradientSums
from gpuopt.wrappers.loss_scale import LossScaleOptimizer, checked_loss_scale, unscaled_pairs
from gpuopt.wrappers.replica_sums import ReplicaCall, Sums, strategy_of_replica

_logger = logging.getLogger("gpuopt")

# How many steps' gradients are summed for an update, or a function that returns it.
Steps = int | Callable[[], Any]
Reduction = Literal["mean", "sum"]


class GradientAccumulationOptimizer(OptimizerWrapper):
    """Lets `opt` make one step by the mean of several steps' gradients, for batches beyond memory.

        optimizer = GradientAccumulationOptimizer(AdamOptimizer(), 4)
        for batch in batches:
            optimizer.minimize(lambda: loss(batch), global_step)  # every fourth call updates

    A call of `apply_gradients` adds gradients to sums on the device, in one launch for all dense
    ones, and computes nothing else. The last one of an update divides the sums in its launch, and
    `opt` makes its step: its hyperparameters, `global_step`, `clip_norm` and averages see updates
    alone. A variable without a gradient in some of the steps has less in its sum, which is divided
    alike; without any, it is left alone. Sums for variables of 16 bits are float32, and so is what
    `opt` is given. Sparse gradients stay sparse, one after the other; where a
    variable has gradients of both kinds, they become dense.

    In a replica of a `MirroredStrategy`, each copy has a sum of its own, on its device. The
    replicas of a process add their gradients together, and wait for other processes with the last
    ones of an update alone, whose sums the strategy adds up.

    The sums and their count belong to the state of `opt`: they are saved and restored with it. If a
    call raises an error once it adds, or a GPU refuses rows of an update, what was accumulated is
    dropped.
    """

    is_for_workers = True

    def __init__(
        self,
        opt: Optimizer,
        accumulation_steps: Steps,
        reduction: Reduction = "mean",
        *,
        most_rows: int = 65536,
        on_nonfinite: OnNonfinite = "propagate",
        use_locking: bool = False,
        name: str | None = None,
    ) -> None:
        """Wraps `opt`.

        Args:
            opt: Makes the updates; its state is this optimizer's.
            accumulation_steps: How many calls of `apply_gradients` make an update, from 1: an
                integer, which can be set later, or a function that is called in each of them.
            reduction: "mean" divides the sums by the number of calls; "sum" does not.
            most_rows: A variable's sparse gradients are kept as they are up to so many rows; beyond
                that, and twice the number of different rows, equal rows are added up. The host
                waits for a GPU then.
            on_nonfinite: What to do about a call with NaN or infinity in a gradient: "propagate"
                adds it; "skip" leaves the call out, as if it had not been made, and logs a warning;
                "raise" raises FloatingPointError. For the last two, the host waits for each GPU. A
                LossScaleOptimizer inside hears of a call that is left out, and lowers its scale.
            use_locking: Accepted like that of other optimizers: calls always take turns.
            name: This optimizer's; by default that of `opt`.

        Raises:
            TypeError: `opt` is no optimizer, or a number is no integer.
            ValueError: a number is less than 1, `reduction` or `on_nonfinite` is unknown, `opt` is
                for workers, or accumulates already; or a call is to raise what a LossScaleOptimizer
                inside skips.
        """
        self._optimizer = check_inside_of_workers(opt, "GradientAccumulationOptimizer")
        scales = [each for each in inner_optimizers(opt) if isinstance(each, LossScaleOptimizer)]
        if scales and on_nonfinite == "raise":
            raise ValueError(
                'on_nonfinite="raise" around LossScaleOptimizer would keep from it what is not '
                'finite, so that it would never lower the scale: give "skip", which leaves out the '
                "call alone, or leave on_nonfinite out"
            )
        self._scaling = scales[0] if scales else None
        if not is_one_of(reduction, get_args(Reduction)):
            raise ValueError(
                f"reduction must be one of {list(get_args(Reduction))}, got {reduction!r}"
            )
        self._reduction = reduction
        self.accumulation_steps = accumulation_steps
        rows = at_least_1("most_rows", most_rows)
        before = self.owner_of_state.state.wrapper_state
        self._sums = (
            before if isinstance(before, GradientSums) else GradientSums(self.owner_of_state)
        )
        self._adding = Lock("the accumulation of gradients")
        own_name = opt.get_name() if name is None else name
        super().__init__(use_locking, own_name, on_nonfinite=on_nonfinite)
        self._sums.use(self, rows)

    @property
    def _inner(self) -> Optimizer:
        return self._optimizer

    def _settings(self) -> dict[str, Any]:
        own: dict[str, Any] = {
            "accumulation_steps": self._accumulation_steps,
            "reduction": self._reduction,
            "on_nonfinite": self._on_nonfinite,
        }
        return {**super()._settings(), **own}

    def _names_to_give(self) -> Collection[str]:
        return {*super()._names_to_give(), "reduction", "most_rows"}

    @property
    def accumulation_steps(self) -> Steps:
        """How many calls make an update; to be set at any time."""
        return self._accumulation_steps

    @accumulation_steps.setter
    def accumulation_steps(self, steps: Steps) -> None:
        self._accumulation_steps = (
            steps if callable(steps) else at_least_1("accumulation_steps", steps)
        )

    @property
    def accumulated_steps(self) -> int:
        """How many calls have been added up since the last update."""
        return self._sums.num_steps

    def _gradients_to_apply(
        self, loss: Loss, **options: Any
    ) -> tuple[list[tuple[Gradient | None, Variable]], Mapping[str, Any]]:
        """Leaves gradients scaled, if they are: they are divided as they are added."""
        inner, methods = self._inner, ("compute_gradients", "apply_gradients")
        is_users = any(is_overridden(self, each) for each in methods)
        if is_users or type(inner) is not LossScaleOptimizer:
            return super()._gradients_to_apply(loss, **options)
        return inner._gradients_to_apply(loss, **options)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        *,
        loss_scale: Any = None,
    ) -> None:
        """Adds gradients to the sums; if they are as many as `accumulation_steps`, updates.

        Args:
            grads_and_vars: See `Optimizer.apply_gradients`.
            global_step: Likewise; it grows with each update.
            name: Likewise.
            skip_gradients_aggregation: Likewise.
            loss_scale: What the gradients are divided by as they are added: what their loss was
                multiplied by, from 1 to 2**126. 1 if not given, as for those of
                `compute_gradients`.

        Raises:
            TypeError: `loss_scale` is no number.
            ValueError: `loss_scale` is below 1, above 2**126, or NaN.
            RuntimeError: called in a tower, in the middle of another call, as by a function that
                gives a hyperparameter, or by a signal handler; or in one of several processes that
                has sums which the others do not have.
            FloatingPointError: a gradient is not finite, and `on_nonfinite` is "raise".

        Besides what `Optimizer.apply_gradients` raises.
        """
        request = StepRequest(grads_and_vars, global_step, name, skip_gradients_aggregation)
        make_step(self, request, loss_scale=loss_scale)

    def _apply_request(self, request: StepRequest, **own: Any) -> None:
        self._refuse_nested()
        loss_scale, global_step = checked_loss_scale(own.get("loss_scale")), request.global_step
        given = as_sequence(request.pairs)
        strategy = strategy_of_replica(self)
        if strategy is not None:
            if loss_scale is not None:
                given = unscaled_pairs(as_pairs(given), loss_scale)
            if request.skips_aggregation:
                raise RuntimeError(
                    f'"{self.get_name()}" counts the calls of all replicas together: '
                    "skip_gradients_aggregation cannot be had in a replica"
                )
            self._call_in_replica(strategy, given, request)
            return
        steps = self._steps_now()
        if global_step is not None:
            checked_global_step(global_step)
        pairs: list[Pair] = [pair for pair in pairs_for(self, given) if pair[0] is not None]
        identities = [variable.identity for _, variable in pairs]
        refuse_unfinished("updated", identities, self.owner_of_state.state)
        if self._on_nonfinite != "propagate":
            found = first_nonfinite(pairs)
            if found is not None:
                self._raise_if_asked(found)
                if self._leaves_out(found):
                    return
        later = interrupts_put_off(waits_for_begin=True)
        with later, writing(), self._adding, reading(*(gradient for gradient, _ in given)):
            if sum(variable.size for _, variable in pairs) > SMALL_WRITE:
                later.begin()
            count = 1 + self._sums.num_steps
            try:
                is_last = count >= steps
                divisor = self._divisor(count) if is_last else 1
                self._sums.add(pairs, divisor, loss_scale)
                if is_last:
                    divided = [variable for _, variable in pairs]
                    self._update(divisor, divided, request)
            except BaseException as error:
                self._drop(error, count)
                raise

    def apply_accumulated(self, global_step: Any = None, name: str | None = None) -> None:
        """Makes an update now by what is accumulated; without anything, does nothing.

        Args:
            global_step: See `Optimizer.apply_gradients`.
            name: Likewise.
        """
        make_step(self, StepRequest(None, global_step, name), self._update_now)

    def _update_now(self, request: StepRequest) -> None:
        self._refuse_nested()
        strategy = strategy_of_replica(self)
        if strategy is not None:
            self._call_in_replica(strategy, None, request)
            return
        if request.global_step is not None:
            checked_global_step(request.global_step)
        with writing(), self._adding:
            count = self._sums.num_steps
            if count:
                try:
                    self._update(self._divisor(count), (), request)
                except BaseException as error:
                    self._drop(error, count)
                    raise

    def check(self) -> None:
        """Does what `Optimizer.check` does, and looks at rows that are accumulated on GPUs.

        If one is out of range, what is accumulated is dropped. In a replica of a strategy, an
        update looks at them.

        Raises:
            IndexError, FloatingPointError: see `Optimizer.check`.
        """
        super().check()
        if self._adding.is_this_threads or replica_context().strategy is not None:
            return
        with writing(), self._adding:
            try:
                self._sums.check_rows()
            except IndexError as error:
                self._drop(error, self._sums.num_steps)
                raise

    def reset(self) -> None:
        """Drops what is accumulated.

        Raises:
            RuntimeError: called in a replica of a strategy, or in a tower.
        """
        if replica_context().strategy is not None:
            raise RuntimeError(
                f'"{self.get_name()}": reset() is for all replicas at once: call it outside of '
                "MirroredStrategy.run, or of towers"
            )
        self._refuse_nested()
        with writing(), self._adding:
            self._sums.reset()

    def _made_with(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self._inner, self._accumulation_steps, self._reduction), {
            "most_rows": self._sums.most_rows,
            "on_nonfinite": self._on_nonfinite,
            "use_locking": self._use_locking,
            "name": self._name,
        }

    def _own_state(self) -> tuple[Any, dict[str, Any]]:
        with between_writes(f'reading the sums of "{self.get_name()}"'):
            if not self._sums.num_steps:
                return None, {}
            owners = self._sums.owners()
            return self.state_dict(found_again(owners)), owners

    def _take_state(self, state: Any, variables: Mapping[str, Any]) -> None:
        if state is not None:
            self.load_state_dict(state, found_again(variables))
            self.owner_of_state.state.expect_by_name(variables)

    def forget_plans(self, changed: Set[Identity]) -> None:
        super().forget_plans(changed)
        self._sums.known.forget(changed)

    def _refuse_nested(self) -> None:
        # The update is reading sums that a new call would begin anew.
        if self._adding.is_this_threads:
            raise RuntimeError(
                "gradients cannot be accumulated, applied or dropped in the middle of another call "
                f'of the same {type(self).__name__} "{self.get_name()}", as by a function that '
                "gives a hyperparameter, or by a signal handler: do it after that"
            )

    def _steps_now(self) -> int:
        steps = self._accumulation_steps
        return at_least_1("accumulation_steps", steps()) if callable(steps) else steps

    def _call_in_replica(
        self, strategy: MirroredStrategy, given: Sequence[Any] | None, request: StepRequest
    ) -> None:
        """Does one replica's part of `apply_gradients`, or of `apply_accumulated`.

        The first replica of a process adds the gradients of all of them, each to the sum of its own
        copy. For an update, each brings its sums to the strategy.
        """
        call = ReplicaCall(strategy, self, given)
        steps = 1 if given is None or not call.is_first else self._steps_now()
        if request.global_step is not None:
            checked_global_step(request.global_step)
        if given is not None and self._on_nonfinite != "propagate":
            found = call.first_found(first_nonfinite(call.pairs))
            if found is not None:
                self._raise_if_asked(found)
                # What the first replica of a process decides, it counts for all of them.
                if call.first_found(self._leaves_out(found) if call.is_first else None):
                    return
        if call.is_first and call.is_spread:
            self._sums.spread()
        gradients = [gradient for gradient, _ in given or ()]
        call.wait_for_others()
        # From the last step's gradients to the update, for those who save: it is one.
        with (
            writing() if call.is_first else nullcontext(),
            self._adding if call.is_first else nullcontext(),
        ):
            count = self._sums.num_steps + (given is not None)
            try:
                with reading(*gradients):
                    sums = call.in_first(partial(self._add_in_replicas, steps, given is None))
                if sums is not None:
                    self._apply_sums(*sums, request)
            except BaseException as error:
                if call.is_first:
                    self._drop(error, count)
                raise

    def _add_in_replicas(self, steps: int, is_early: bool, pairs: list[Pair]) -> Sums | None:
        if is_early:
            count = self._sums.num_steps
            return self._sums.take(self._divisor(count)) if count else None
        count = 1 + self._sums.num_steps
        divisor = self._divisor(count) if count >= steps else 1
        self._sums.add(pairs, divisor)
        divided = [variable for _, variable in pairs]
        return self._sums.take(divisor, divided) if count >= steps else None

    def _leaves_out(self, found: str) -> bool:
        if self._scaling is not None and not self._scaling.leaves_out_call():
            return False
        _logger.warning("%s; %s does not accumulate the step's", found, self.get_name())
        return True

    def _divisor(self, count: int) -> int:
        return count if self._reduction == "mean" else 1

    def _update(self, divisor: int, divided: Sequence[Any], request: StepRequest) -> None:
        self._apply_sums(*self._sums.take(divisor, divided), request)

    def _apply_sums(
        self, pairs: Sequence[tuple[Any, Any]], totals: Sequence[Variable], request: StepRequest
    ) -> None:
        with reading(*totals):
            pass_on(self._inner, request._replace(pairs=pairs, takes_wide=True))

    def _drop(self, error: BaseException, count: int) -> None:
        self._sums.reset()
        calls = "1 call" if count == 1 else f"{count} calls"
        error.add_note(f'What "{self.get_name()}" had accumulated in {calls} was dropped.')
