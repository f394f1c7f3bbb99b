"""Steps that a GPU may leave out, as a gradient is not finite, while the host goes on."""

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
from gpuopt.variables.late_errors import hear_late, register
from gpuopt.variables.variable import Variable

# What the numbers of a step follow from, beside the count: objects that do not change.
Key = Sequence[Any]
# See `RuleUpdates.measured_names`.
Names = Sequence[tuple[Sequence[int], Sequence[str], bool]]
# Of a loss that is not scaled.
_STAYS = ScaleRule()

# Calls that may turn out to be left out: for each, kernels get scalars.
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
    """Returns what gradients of a scaled loss are multiplied by.

    Args:
        loss_scale: A number, or a `DeviceScale`: the host waits for none on a GPU.
        device: Where the gradients are.

    Returns:
        A float32; of a `DeviceScale`, a scalar array of the device.
    """
    if isinstance(loss_scale, DeviceScale):
        return to_device(loss_scale.unscale(), device)
    return np.float32(1) / np.float32(loss_scale)


class _Count(NamedTuple):
    """What a step is made by if a GPU has made some number of steps before it.

    Attributes:
        numbers: Of the variables that steps change, by identity: arrays that stay as they are.
        of_step: What updates are given, `StepNumbers`; None if these are the numbers of a step that
            was not prepared yet.
    """

    numbers: Mapping[Identity, Any]
    of_step: Any


class _Promise(NamedTuple):
    """A step that was enqueued, and that the GPU may leave out.

    Attributes:
        step: Its number, from 1.
        seen: From `LossScalings.read`, after it.
        names: `RuleUpdates.measured_names` of the step.
    """

    step: int
    seen: Any
    names: Names


class _Chain(NamedTuple):
    """Steps that a GPU decides about, one after the other: replaced by each, and never changed.

    Attributes:
        scale: The loss scale after the last of them.
        copies: The same on other devices that have had part in the last one.
        devices: Where the updates were.
        last: The last of them, or one that was to follow.
        num_calls: How many steps were to be made.
        num_made: How many of them are known to be made.
        counts: For each number that the GPU may have made, from the known one on.
        promises: The steps of which it is not known, the oldest first: one less than `counts`.
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

    Also the ledger of these steps. Each step that the host has enqueued is a promise until its
    decision arrives. Meanwhile kernels are given the scalars for each number of steps that the GPU
    may have made, and take those of its own count. The numbers that steps change, and the loss
    scale, are behind: whoever reads or writes one waits for the GPU. The host takes none for known
    that is not: so nothing has to be taken back, and a step that fails leaves no trace.

    Where no loss is scaled, the scale is 1 and stays. A step that is not finite may be an error,
    too, which is raised late: no step is made then until the host has heard of it.

    Attributes:
        lock: Held by a step from its decision to its promise, inside of `counting`.
        last_nonfinite: Describes the first gradient that was not finite in the last step that had
            one, of those that the host has heard of.
    """

    holds_arrays = False

    def __init__(
        self,
        rule: ScaleRule = _STAYS,
        accept_after: int | None = None,
        variables: Mapping[str, Variable] | None = None,
        *,
        tell: Callable[[str], None] | None = None,
        refuses: bool = False,
    ) -> None:
        """Does nothing yet.

        Args:
            rule: How the scale changes.
            accept_after: See `after_step`.
            variables: By names of `ScaleState`, where the state is while no GPU has it; None if the
                scale is 1 and stays.
            tell: Called with a description of each step that was not finite, once the host hears of
                it.
            refuses: Whether such a step is an error.
        """
        self._rule = rule
        self._accept_after = accept_after
        self._variables = variables or {}
        self._tell = tell
        self._refuses = refuses
        self.lock = Lock("what a GPU decides about steps")
        self.last_nonfinite: str | None = None
        self._chain: _Chain | None = None
        # In the place of numbers while none is behind: another one after each chain.
        self._settled: Mapping[Identity, Any] = {}
        # What is still to be told, and to be raised.
        self._untold: deque[str] = deque()
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
            key: What the numbers of a step follow from, beside the count: objects. None if the host
                has to know which steps were made.

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
        finally:  # without a call: after Ctrl-C at one, this thread would see them for ever
            own_numbers.ledger, own_numbers.of = outer, outer_numbers
        if self._refuses and environment.settings().checks_at_once:
            self.raise_late(wait=True)

    @property
    def _newest(self) -> Mapping[Identity, Any]:
        """The numbers of the next step if all of the promises are kept."""
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
            key: What `call` was given.
            optimizer: Whose step it is; it has been prepared.
            updates: The step's.
            loss_scale: What gradients are multiplied by: a number, or a `DeviceScale`.
            can_skip: Whether the step may be left out without the host's help.

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
        self._raise_heard()
        is_known = own_numbers.of is self._settled
        # The host counts it, once it knows the steps that other threads make meanwhile.
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
        """Returns the chain with what a step is given for each count.

        None if there is none that the step can follow in: then nothing is behind.

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
        """Settles even in a step of this thread, whose own number it is not that is written."""
        if not self.lock.is_this_threads:
            with undoing(), counting:
                self._settle()
        return work

    def bring_up(self, rows: Any = None) -> None:
        """Waits until the GPU has decided about all steps, and puts the host's numbers right.

        Does nothing in a step of this thread, which has numbers of its own.
        """
        if self._chain is None or own_numbers.ledger is self or self.lock.is_this_threads:
            return
        self._wait(leave=0)
        with undoing(), counting:
            self._settle()
        self._tell_all()

    def raise_late(self, device: Device | None = None, *, wait: bool) -> None:
        """Raises what a GPU has found in an earlier step; see `LateErrors`.

        Raises:
            FloatingPointError: the step was not finite. Neither it nor a later one was made.
        """
        chain = self._chain
        if own_numbers.ledger is self:
            return
        if chain is not None and (wait or chain.promises) and device in (None, *chain.devices):
            self._wait(leave=0 if wait else _MOST_PROMISES - 1)
            hear_late(counting, self._settle if wait else self._look)
        self._raise_heard()

    def _raise_heard(self) -> None:
        """Tells and raises what was heard: not under the lock, as users have loggers."""
        self._tell_all()
        self._raise_refused()

    def _raise_refused(self) -> None:
        found = self._refused
        if found is not None:
            try:
                raise FloatingPointError(found)
            finally:  # not before: Ctrl-C in between would lose it
                self._refused = None

    def _tell_all(self) -> None:
        while self._untold:
            try:
                found = self._untold.popleft()
            except IndexError:  # another thread tells of it
                return
            if self._tell is not None:
                self._tell(found)

    def _begin(self, step: _DecidedStep) -> Mapping[Identity, Any]:
        """Begins a chain, and returns the numbers that it begins with."""
        own_numbers.of = {}
        for each in step.variables:
            each.bring_up()  # another optimizer's steps may count by the same variable
        numbers = {each.identity: each.numpy() for each in step.variables}
        given: dict[str, Any] = {"loss_scale": np.float32(1)}
        given |= {name: each.numpy()[()] for name, each in self._variables.items()}
        scale = DeviceScale(_scalings(step.device).new(ScaleState(**given)), step.device)
        # Before there is a chain: Ctrl-C in between leaves no number that nobody puts right.
        for each in (*step.variables, *self._variables.values()):
            each.identity.behind = self
        self._chain = _Chain(scale, {}, (), step, 0, 0, [_Count(numbers, None)], [])
        return numbers

    def _look(self) -> None:
        """Learns what the GPU has decided, without waiting unless it is far behind."""
        with self.lock:
            self._hear(leave=_MOST_PROMISES - 1)
            if self._refused is not None:
                self._settle()

    def _settle(self) -> None:
        """Ends a chain, if there is one, by what the GPU has decided; again, if interrupted."""
        with self.lock:
            self._hear(leave=0)
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
        """Waits as `_hear` would, before locks are taken that steps of other optimizers take."""
        chain = self._chain
        if chain is not None:
            for promise in chain.promises[: max(0, len(chain.promises) - leave)]:
                promise.seen.wait(_waited_for(chain))

    def _hear(self, leave: int) -> None:
        """Hears of promises, the oldest first; waits while there are more than some number."""
        while (chain := self._chain) is not None and chain.promises:
            first, *promises = chain.promises
            if len(chain.promises) > leave:
                first.seen.wait(_waited_for(chain))
            if not first.seen.is_done:
                return
            num_made, *bad = map(int, first.seen.values)
            if bad[0] == first.step:
                self._note(chain, first, bad[1])
            is_made = num_made > chain.num_made
            counts = chain.counts[1:] if is_made else chain.counts[:-1]
            self._chain = chain._replace(num_made=num_made, counts=counts, promises=promises)

    def _note(self, chain: _Chain, promise: _Promise, gradient: int) -> None:
        """Notes a step that was not finite; again, if it was interrupted."""
        found = self.last_nonfinite = _describe(gradient, promise.names)
        if self._tell is not None:
            self._untold.append(found)
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
        key: What `DeviceScaling.call` was given.
        device: Which GPU it is.
        counter: The global step; None if there is none.
        variables: In host memory, those that count steps: powers, counters, the global step.
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
        """Whether they also follow from the same hyperparameters."""
        return self.counts_like(other) and all(map(is_, self.key, other.key))

    def decide(self, updates: RuleUpdates) -> None:
        self._ledger._decide(self, updates)

    def promise(self, updates: RuleUpdates) -> None:
        self._ledger._promise(self, updates)


def _counts_of(chain: _Chain, step: _DecidedStep, updates: RuleUpdates) -> list[_Count] | None:
    """Returns what a step is given for each count; None if its numbers are not those of `chain`.

    They are others where powers or counters follow from a hyperparameter that was set.
    """
    if not step.counts_like(chain.last):
        return None
    *earlier, newest = chain.counts
    if step.is_like(chain.last):
        if own_numbers.of is not newest.numbers:  # another thread has made a step, or heard of one
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
    """Returns the numbers that a step makes of others, which stay as they are."""
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
    """Says what was not finite: a gradient by its number, or -1 for one that was clipped."""
    for numbers, named, is_sparse in names:
        if gradient in numbers:
            found = f'gradient for "{named[numbers.index(gradient)]}" is not finite'
            return f"{found}, or equal rows of it add up to what is not" if is_sparse else found
    return CLIPPING_MAKES_NAN


def _scalings(device: Device) -> LossScalings:
    found = backend_for(device).loss_scalings
    assert found is not None, "it decides about steps"
    return found
