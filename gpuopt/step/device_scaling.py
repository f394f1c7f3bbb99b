"""Steps that a GPU may skip because a gradient is not finite, while the host goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from gpuopt import environment
from gpuopt.backends import backend_for, to_device
from gpuopt.backends.loss_scaling import Decision, LossScalings
from gpuopt.device import Device
from gpuopt.locks import Lock
from gpuopt.rules.loss_scaling import ScaleRule, ScaleState
from gpuopt.step.clips import CLIPPING_MAKES_NAN
from gpuopt.step.rule_updates import RuleUpdates
from gpuopt.step.updates import Updates
from gpuopt.variables.behind import counting, own_numbers
from gpuopt.variables.gate import undoing
from gpuopt.variables.identity import Identity
from gpuopt.variables.late_errors import check_for_late_errors, register
from gpuopt.variables.variable import Variable

# The objects that a step's numbers depend on, other than the count; they do not change.
Key = Sequence[Any]
# See `RuleUpdates.measured_names`.
Names = Sequence[tuple[Sequence[int], Sequence[str], bool]]
# The rule of a loss that is not scaled: the scale is always 1.
_STAYS = ScaleRule()

# Steps whose decision the host does not know yet: kernels get scalars for each possible count.
_MOST_PROMISES = 8


class DeviceScale(NamedTuple):
    """A loss scale that the host may not know.

    Attributes:
        scaling: From `LossScalings`.
        device: The GPU.
    """

    scaling: Any
    device: Device

    def seed(self) -> Any:
        """Returns it as a scalar array there."""
        return _scalings(self.device).seed(self.scaling)

    def unscale(self) -> Any:
        """Returns its reciprocal as a scalar array there."""
        return _scalings(self.device).unscale(self.scaling)

    def number(self) -> np.float32:
        """Waits for it."""
        return np.float32(_scalings(self.device).state(self.scaling)[0].loss_scale)


def reciprocal_on(loss_scale: Any, device: Device) -> Any:
    """Returns the factor that divides gradients by a loss scale.

    Args:
        loss_scale: A number, or a `DeviceScale`, for which the host does not wait.
        device: The gradients' device.

    Returns:
        A float32; for a `DeviceScale`, a scalar array on the device.
    """
    if isinstance(loss_scale, DeviceScale):
        return to_device(loss_scale.unscale(), device)
    return np.float32(1) / np.float32(loss_scale)


class _Count(NamedTuple):
    """The numbers of a step for one possible count of the steps before it.

    Attributes:
        numbers: The values of the variables that steps change, by identity: arrays that nothing
            writes.
        of_step: The `StepNumbers` of the updates; None for a step that was not prepared yet.
    """

    numbers: Mapping[Identity, Any]
    of_step: Any


class _Promise(NamedTuple):
    """An enqueued step, which the GPU may skip.

    Attributes:
        step: Its number, from 1.
        outcome: The count after it and the first gradient that was not finite, from
            `LossScalings.read`.
        names: `RuleUpdates.measured_names` of the step.
    """

    step: int
    outcome: Any
    names: Names


class _Chain(NamedTuple):
    """Consecutive steps that a GPU decides about. Immutable: each step replaces it by another.

    Attributes:
        scale: The loss scale after the last promised step.
        copies: The same on the other devices of that step.
        devices: All devices of the updates.
        last: The last step that `counts` was computed for, even if it was not promised.
        num_calls: The number of promised steps.
        num_made: How many of them the GPU has made, as far as the host knows.
        counts: The numbers for each possible count, in ascending order; the first is `num_made`.
        promises: The steps with an unknown decision, the oldest first: one less than `counts`.
    """

    scale: DeviceScale
    copies: Mapping[Device, Any]
    devices: Collection[Device]
    last: _DecidedStep
    num_calls: int
    num_made: int
    counts: Sequence[_Count]
    promises: Sequence[_Promise]


class DeviceScaling:
    """The loss scale of one optimizer, while a GPU decides about its steps; a `RowsBehind`.

    Also the ledger of these steps. An enqueued step is a promise until the GPU's decision arrives.
    Until then, kernels get the scalars for each possible count of steps, and use those of the GPU's
    own count. A read or write of a number that steps change, or of the loss scale, waits for the
    GPU. The host never assumes a decision, so nothing is taken back, and a step that fails leaves
    the ledger unchanged.

    If no loss is scaled, the scale is always 1. A step that is not finite can also be an error,
    which is raised late: the GPU makes no step until the host has raised it.

    Attributes:
        lock: Held by a step from its decision to its promise, inside of `counting`.
        last_nonfinite: Describes the first gradient that was not finite in the last such step whose
            decision has arrived.
    """

    holds_arrays = False

    def __init__(
        self,
        rule: ScaleRule = _STAYS,
        accept_after: int | None = None,
        variables: Mapping[str, Variable] | None = None,
        *,
        report: Callable[[str], None] | None = None,
        refuses: bool = False,
    ) -> None:
        """Does nothing yet.

        Args:
            rule: How the scale changes.
            accept_after: See `after_step`.
            variables: They hold the state while no GPU has it, by the names of `ScaleState`; None
                if the scale is always 1.
            report: Called with a description of each step that was not finite, when its decision
                has arrived.
            refuses: Whether such a step is an error.
        """
        self._rule = rule
        self._accept_after = accept_after
        self._variables = variables or {}
        self._report = report
        self._refuses = refuses
        self.lock = Lock("what a GPU decides about steps")
        self.last_nonfinite: str | None = None
        self._chain: _Chain | None = None
        # A step's own numbers while there is no chain: another empty mapping after each chain, so
        # that a step notices that one has ended.
        self._settled: Mapping[Identity, Any] = {}
        # Descriptions that are not reported yet, and the error that is not raised yet.
        self._unreported: deque[str] = deque()
        self._refused: str | None = None
        if refuses:
            register(self)

    @property
    def scale(self) -> DeviceScale | None:
        """The present scale, if a GPU has it."""
        return None if self._chain is None else self._chain.scale

    def call(self, step: Callable[[], None], key: Key | None) -> None:
        """Makes a step.

        Args:
            step: Makes it; `prepare` is given the same key.
            key: The objects that the step's numbers depend on, other than the count. None if the
                host must know which steps were made.

        Raises:
            FloatingPointError: an earlier step was not finite, and `refuses`; or this one, and
                GPUOPT_CHECK is 1.
            RuntimeError: this thread is in the middle of a step, as in a signal handler.
        """
        if self.lock.is_this_threads:
            raise RuntimeError(
                "a step cannot be made in the middle of another one of the same optimizer that a "
                "GPU decides about, as by a signal handler: do it after that"
            )
        self.raise_late(wait=key is None)
        outer, outer_numbers = own_numbers.ledger, own_numbers.of
        try:
            if key is None:
                own_numbers.ledger, own_numbers.of = None, {}
            else:
                own_numbers.ledger, own_numbers.of = self, self._newest
            step()
        finally:  # without a call: Ctrl-C at one would leave them to this thread for ever
            own_numbers.ledger, own_numbers.of = outer, outer_numbers
        if self._refuses and environment.settings().checks_at_once:
            self.raise_late(wait=True)

    @property
    def _newest(self) -> Mapping[Identity, Any]:
        """The numbers of the next step if the GPU makes all promised ones."""
        chain = self._chain
        return self._settled if chain is None else chain.counts[-1].numbers

    def prepare(
        self,
        key: Key | None,
        optimizer: Any,
        updates: Updates,
        loss_scale: Any,
        *,
        can_skip: bool = True,
    ) -> bool:
        """Has a GPU decide about a step, if it can; returns whether it will.

        Args:
            key: The same as for `call`.
            optimizer: The step's, prepared.
            updates: The step's.
            loss_scale: The factor in the gradients: a number, or a `DeviceScale`.
            can_skip: Whether the GPU can skip the step without the host.

        Raises:
            FloatingPointError: an earlier step was not finite, and `refuses`.
        """
        if key is None or not isinstance(updates, RuleUpdates):
            return False
        chain, device = self._chain, None
        if can_skip:
            device = updates.deciding_gpu(None if chain is None else chain.scale.device)
        if device is not None:
            step = _DecidedStep(self, key, device, optimizer, loss_scale)
            if chain is not None and not step.is_like(chain.last):
                # Before its rows are checked, as this may raise an error and drop the step.
                with undoing(), self.lock:
                    self._follow(step, updates)
            updates.gpu_decides = step
            return True
        self._wait(leave=0)
        with undoing(), counting:
            self._settle()
        self._report_and_raise()
        is_known = own_numbers.of is self._settled
        # The host counts the step. First it waits for steps that other threads make meanwhile.
        own_numbers.ledger, own_numbers.of = None, {}
        if not is_known:
            updates.fix_scalars_anew()
        return False

    def _decide(self, step: _DecidedStep, updates: RuleUpdates) -> None:
        """See `Decider.decide`."""
        chain, loss_scale = self._follow(step, updates), step.loss_scale
        if chain is None:
            is_known = own_numbers.of is self._settled
            numbers = self._begin(step)
            own_numbers.of = numbers
            if not is_known:
                updates.fix_scalars_anew()
            chain = self._follow(step, updates)
            assert chain is not None, "it has begun with this step"
        if not isinstance(loss_scale, DeviceScale):
            unscale = float(np.float32(1) / np.float32(loss_scale))
        elif loss_scale == chain.scale:
            unscale = 0.0
        else:
            unscale = float(np.float32(1) / loss_scale.number())
        decision = Decision(
            self._rule,
            self._accept_after,
            chain.scale.scaling,
            chain.num_made + len(chain.promises),
            chain.num_calls + 1,
            self._refuses,
            chain.copies,
        )
        every = [each.of_step for each in reversed(chain.counts)]
        updates.decide_on_gpu(decision, chain.scale.device, unscale, every)

    def _follow(self, step: _DecidedStep, updates: RuleUpdates) -> _Chain | None:
        """Returns the chain, with a step's numbers for each count.

        Ends the chain and returns None if its numbers are not those of the step.

        Raises:
            FloatingPointError: an earlier step was not finite, and `refuses`.
        """
        chain = self._chain
        counts = None if chain is None else _counts_of(chain, step, updates)
        if chain is None or counts is None:
            self._settle()
            self._raise_refused()
            return None
        self._chain = chain = chain._replace(counts=counts, last=step)
        return chain

    def _promise(self, step: _DecidedStep, updates: RuleUpdates) -> None:
        """See `Decider.promise`."""
        chain = self._chain
        assert chain is not None, "the step was decided about"
        device, num_calls = chain.scale.device, chain.num_calls + 1
        copies = {at: each.after for at, each in updates.decided_by_device.items()}
        after = copies.pop(device)
        promise = _Promise(num_calls, _scalings(device).read(after), updates.measured_names)
        self._chain = chain._replace(
            scale=DeviceScale(after, device),
            copies=copies,
            devices={*chain.devices, device, *copies},
            num_calls=num_calls,
            counts=[*chain.counts, _Count(_counted(chain.counts[-1], step, updates), None)],
            promises=[*chain.promises, promise],
        )

    def while_written(
        self, written: Any, work: AbstractContextManager[Any], at: Any = ...
    ) -> AbstractContextManager[Any]:
        """Settles even in a step of this thread: a write is not to the step's own numbers."""
        if not self.lock.is_this_threads:
            with undoing(), counting:
                self._settle()
        return work

    def bring_up(self, rows: Any = None) -> None:
        """Waits until the GPU has decided about all steps, and assigns the variables' values.

        Does nothing in a step of this thread, which has numbers of its own.
        """
        if self._chain is None or own_numbers.ledger is self or self.lock.is_this_threads:
            return
        self._wait(leave=0)
        with undoing(), counting:
            self._settle()
        self._report_all()

    def raise_late(self, device: Device | None = None, *, wait: bool) -> None:
        """Raises the error that a GPU has found in an earlier step; see `LateErrors`.

        Raises:
            FloatingPointError: the step was not finite. Neither it nor a later one was made.
        """
        chain = self._chain
        if own_numbers.ledger is self:
            return
        if chain is not None and (wait or chain.promises) and device in (None, *chain.devices):
            self._wait(leave=0 if wait else _MOST_PROMISES - 1)
            check_for_late_errors(counting, self._settle if wait else self._read_finished)
        self._report_and_raise()

    def _report_and_raise(self) -> None:
        """Reports and raises what has arrived: without the lock, because this calls loggers."""
        self._report_all()
        self._raise_refused()

    def _raise_refused(self) -> None:
        found = self._refused
        if found is not None:
            try:
                raise FloatingPointError(found)
            finally:  # not before: Ctrl-C in between would lose it
                self._refused = None

    def _report_all(self) -> None:
        while self._unreported:
            try:
                found = self._unreported.popleft()
            except IndexError:  # another thread reports it
                return
            if self._report is not None:
                self._report(found)

    def _begin(self, step: _DecidedStep) -> Mapping[Identity, Any]:
        """Begins a chain, and returns the numbers that it begins with."""
        own_numbers.of = {}
        for each in step.variables:
            each.bring_up()  # another optimizer's steps may count by the same variable
        numbers = {each.identity: each.numpy() for each in step.variables}
        given: dict[str, Any] = {"loss_scale": np.float32(1)}
        given |= {name: each.numpy()[()] for name, each in self._variables.items()}
        scale = DeviceScale(_scalings(step.device).new(ScaleState(**given)), step.device)
        # Before there is a chain: after Ctrl-C in between, a read still finds the right number.
        for each in (*step.variables, *self._variables.values()):
            each.identity.behind = self
        self._chain = _Chain(scale, {}, (), step, 0, 0, [_Count(numbers, None)], [])
        return numbers

    def _read_finished(self) -> None:
        """Reads the decisions that have arrived; waits only if there are too many promises."""
        with self.lock:
            self._read_decisions(leave=_MOST_PROMISES - 1)
            if self._refused is not None:
                self._settle()

    def _settle(self) -> None:
        """Ends the chain, if there is one, after all decisions; can be repeated if interrupted."""
        with self.lock:
            self._read_decisions(leave=0)
            self._end()

    def _end(self) -> None:
        chain = self._chain
        if chain is None:
            return
        variables = [*chain.last.variables]
        numbers = [chain.counts[0].numbers[each.identity] for each in variables]
        if self._variables:
            state, *_ = _scalings(chain.scale.device).state(chain.scale.scaling)
            numbers += [getattr(state, name) for name in self._variables]
        variables += self._variables.values()
        outer = own_numbers.of
        try:
            own_numbers.of = {}
            for variable, number in zip(variables, numbers, strict=True):
                if variable.numpy() != number:
                    variable.assign(np.asarray(number, variable.dtype))
        finally:
            own_numbers.of = outer
        self._settled = {}
        self._chain = None
        for each in variables:
            if each.identity.behind is self:
                each.identity.behind = None

    def _wait(self, leave: int) -> None:
        """Waits like `_read_decisions`, before taking locks that other optimizers' steps need."""
        chain = self._chain
        if chain is not None:
            for promise in chain.promises[: max(0, len(chain.promises) - leave)]:
                promise.outcome.wait(_waited_for(chain))

    def _read_decisions(self, leave: int) -> None:
        """Reads decisions, the oldest first; waits while more than `leave` promises are left."""
        while (chain := self._chain) is not None and chain.promises:
            first, *promises = chain.promises
            if len(chain.promises) > leave:
                first.outcome.wait(_waited_for(chain))
            if not first.outcome.is_done:
                return
            count, *bad = map(int, first.outcome.values)
            if bad[0] == first.step:
                self._note(chain, first, bad[1])
            is_made = count > chain.num_made
            num_made = chain.num_made + is_made
            counts = chain.counts[1:] if is_made else chain.counts[:-1]
            self._chain = chain._replace(num_made=num_made, counts=counts, promises=promises)

    def _note(self, chain: _Chain, promise: _Promise, gradient: int) -> None:
        """Notes a step that was not finite; can be repeated if interrupted."""
        found = self.last_nonfinite = _describe(gradient, promise.names)
        if self._report is not None:
            self._unreported.append(found)
        if self._refuses:
            later = chain.num_calls - promise.step
            since = f", nor by the {later} calls since" if later else ""
            self._refused = (
                f"{found}; {chain.scale.device} found this after the call: nothing was changed by "
                f"it{since}"
            )


class _DecidedStep:
    """A step that a GPU decides about; a `Decider`.

    Attributes:
        lock: Of the ledger.
        key: See `DeviceScaling.call`.
        device: The GPU.
        counter: The global step; None if there is none.
        variables: All that the step changes in host memory: powers, counters, the global step.
        loss_scale: See `DeviceScaling.prepare`.
    """

    def __init__(
        self, ledger: DeviceScaling, key: Key, device: Device, optimizer: Any, loss_scale: Any
    ) -> None:
        self._ledger = ledger
        self.key = key
        self.lock = ledger.lock
        self.device = device
        self.counter: Variable | None = optimizer.this_thread.global_step
        self.variables: list[Variable] = optimizer.state.scalars_of_steps()
        if self.counter is not None:
            self.variables.append(self.counter)
        self.loss_scale = loss_scale

    def counts_like(self, other: _DecidedStep) -> bool:
        """Whether two steps change the same variables, and one GPU decides about both."""
        is_same = self.device == other.device and len(self.variables) == len(other.variables)
        return is_same and all(map(is_, self.variables, other.variables))

    def is_like(self, other: _DecidedStep) -> bool:
        """Whether their numbers also depend on the same hyperparameters."""
        return self.counts_like(other) and all(map(is_, self.key, other.key))

    def decide(self, updates: RuleUpdates) -> None:
        self._ledger._decide(self, updates)

    def promise(self, updates: RuleUpdates) -> None:
        self._ledger._promise(self, updates)


def _counts_of(chain: _Chain, step: _DecidedStep, updates: RuleUpdates) -> list[_Count] | None:
    """Returns a step's numbers for each count; None if those of `chain` are not valid for it.

    This is so after a hyperparameter was set that powers or counters depend on.
    """
    if not step.counts_like(chain.last):
        return None
    *earlier, newest = chain.counts
    if step.is_like(chain.last):
        if own_numbers.of is not newest.numbers:  # another thread has made a step, or ended a chain
            own_numbers.of = newest.numbers
            updates.fix_scalars_anew()
        return [*earlier, newest._replace(of_step=updates.numbers)]
    found: list[_Count] = []
    for count, after in zip(chain.counts, [*chain.counts[1:], None], strict=True):
        own_numbers.of = count.numbers
        updates.fix_scalars_anew()
        found.append(_Count(count.numbers, updates.numbers))
        if after is not None and _counted(count, step, updates) != after.numbers:
            return None
    return found


def _counted(before: _Count, step: _DecidedStep, updates: RuleUpdates) -> Mapping[Identity, Any]:
    """Returns copies of numbers, as they are after a step."""
    numbers = {identity: number.copy() for identity, number in before.numbers.items()}
    try:
        own_numbers.of = numbers
        updates.count()
    finally:
        own_numbers.of = before.numbers
    if step.counter is not None:
        number = numbers[step.counter.identity]
        np.add(number, step.counter.dtype.type(1), out=number)
    return numbers


def _waited_for(chain: _Chain) -> str:
    return f"{chain.scale.device}, which decides about steps"


def _describe(gradient: int, names: Names) -> str:
    """Describes what was not finite: the gradient of a number, or, for -1, a clipped one."""
    for numbers, named, is_sparse in names:
        if gradient in numbers:
            found = f'gradient for "{named[numbers.index(gradient)]}" is not finite'
            return f"{found}, or equal rows of it add up to what is not" if is_sparse else found
    return CLIPPING_MAKES_NAN


def _scalings(device: Device) -> LossScalings:
    found = backend_for(device).loss_scalings
    assert found is not None, "it decides about steps"
    return found
