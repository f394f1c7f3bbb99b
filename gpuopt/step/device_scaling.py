"""Steps that a GPU may leave out, as a gradient is not finite, while the host goes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gpuopt import environment
from gpuopt.backends import backend_for, to_device
from gpuopt.backends.loss_scaling import Decision, LastBad, LossScalings
from gpuopt.device import Device
from gpuopt.locks import Lock, call_if_free
from gpuopt.rules.loss_scaling import ScaleRule, ScaleState
from gpuopt.step.clips import CLIPPING_MAKES_NAN
from gpuopt.step.row_checks import is_updating
from gpuopt.step.rule_updates import RuleUpdates
from gpuopt.step.step_numbers import StepNumbers
from gpuopt.step.updates import Updates
from gpuopt.variables.gate import undoing
from gpuopt.variables.late_errors import register
from gpuopt.variables.variable import Variable

# What steps share that a GPU can decide about one after the other: objects.
Key = Sequence[Any]
# See `RuleUpdates.measured_names`.
Names = Sequence[tuple[Sequence[int], Sequence[str], bool]]
# Of a loss that is not scaled.
_STAYS = ScaleRule()

# Steps that the host may be ahead of what it knows: for each, kernels get scalars.
_MOST_STEPS = 32


class StepAgain(Exception):
    """A step was prepared by numbers that may be wrong: a GPU may have left out earlier steps."""


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


class _Counted(NamedTuple):
    """What the host had when it had counted some number of steps.

    Attributes:
        numbers: The values of `_Chain.numbers`.
        of_step: What it gave to the updates of the next step.
    """

    numbers: Sequence[Any]
    of_step: StepNumbers


class _Read(NamedTuple):
    """A GPU's count of the steps that were made, on its way to the host.

    Attributes:
        num_calls: How many steps were to be made.
        seen: From `LossScalings.read`.
    """

    num_calls: int
    seen: Any


class _Chain(NamedTuple):
    """Steps that a GPU decides about, one after the other.

    Attributes:
        scale: The loss scale after the last of them.
        copies: The same on other devices that have had part in the last one.
        devices: Where the updates were.
        key: Equal if steps can follow each other in one chain.
        kept: What `key` has the ids of.
        numbers: Variables in host memory that count steps: powers, counters, the global step.
        num_calls: How many steps were to be made.
        host_count: How many of them the host takes for made.
        by_count: For each count that the GPU may have.
        reads: Those that the host has not looked at yet.
        names: `RuleUpdates.measured_names` of the steps of these, by their numbers.
    """

    scale: DeviceScale
    copies: Mapping[Device, Any]
    devices: Collection[Device]
    key: Hashable
    kept: Any
    numbers: Sequence[Variable]
    num_calls: int
    host_count: int
    by_count: Mapping[int, _Counted]
    reads: tuple[_Read, ...]
    names: Mapping[int, Names]


@dataclass(slots=True)
class Attempt:
    """One preparation of a step, by the host's numbers that no GPU has refuted.

    Attributes:
        key: What `DeviceScaling.call` was given for it; empty if the host has to know which steps
            were made.
        place: Where the chain was when these numbers were read.
    """

    key: Key
    place: tuple[DeviceScale, int] | None


class _ThisThread(threading.local):
    """What this thread may see before a GPU has confirmed it.

    Attributes:
        ahead_of: The `DeviceScaling` whose numbers it may see; None for nobody's.
    """

    ahead_of: Any = None


_this_thread = _ThisThread()


class DeviceScaling:
    """The loss scale of one optimizer, while a GPU decides about its steps; a `RowsBehind`.

    The host counts each step as if it were made, and gives kernels the scalars for this count and
    for smaller ones. They take those of the count that the GPU has reached. When the host learns
    that steps were left out, it goes back to the numbers that it had at the smaller count. All
    these numbers and the loss scale are behind meanwhile: who reads one waits for the GPU.

    A step that fails, or is interrupted, leaves the chain as it was. What the host had counted of
    it is taken back when the next step is prepared, or a number is read.

    Where no loss is scaled, the scale is 1 and stays. A step that is not finite may be an error,
    too, which is raised late: no step is made then until the host has heard of it.

    Attributes:
        lock: Held by a step from its decision to its count, inside the gate.
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
        # What is still to be told, and to be raised.
        self._untold: deque[str] = deque()
        self._refused: str | None = None
        if refuses:
            register(self)

    @property
    def scale(self) -> DeviceScale | None:
        """The present scale, if a GPU has it."""
        return None if self._chain is None else self._chain.scale

    @property
    def is_ahead(self) -> bool:
        """Whether this thread is in a step that a GPU may decide about."""
        return _this_thread.ahead_of is self

    def call(self, step: Callable[[Attempt], None], key_of_step: Callable[[], Key | None]) -> None:
        """Makes a step; again, as often as it was prepared by numbers that may be wrong.

        Args:
            step: Makes it; `prepare` and `confirm` are given what this is given.
            key_of_step: Called before; returns objects: steps with the same ones can follow each
                other. None if the host has to know which steps were made.

        Raises:
            FloatingPointError: an earlier step was not finite, and `refuses`; or this one, and
                GPUOPT_CHECK is 1.
            RuntimeError: this thread is in the middle of a step, as in a signal handler.
        """
        while True:
            key = key_of_step()
            with suppress(StepAgain):
                self._call_once(step, key)
                break
        if self._refuses and environment.settings().checks_at_once:
            self.raise_late(wait=True)

    def _call_once(self, step: Callable[[Attempt], None], key: Key | None) -> None:
        """Calls `step`, in which this thread sees the host's numbers that no GPU has refuted."""
        if self.lock.is_this_threads:
            raise RuntimeError(
                "a step cannot be made in the middle of another one of the same optimizer that a "
                "GPU decides about, as by a signal handler: do it after that"
            )
        self.raise_late(wait=key is None)
        outer = _this_thread.ahead_of
        try:
            _this_thread.ahead_of = None if key is None else self
            step(Attempt(key or (), _place_of(self._chain)))
        finally:  # without a call: after Ctrl-C at one, this thread would see them for ever
            _this_thread.ahead_of = outer

    def prepare(
        self,
        attempt: Attempt,
        optimizer: Any,
        updates: Updates,
        loss_scale: Any,
        *,
        can_skip: bool = True,
    ) -> bool:
        """Has a GPU decide about a step, if it can; returns whether it will.

        Args:
            attempt: From `call`.
            optimizer: Whose step it is; it has been prepared.
            updates: The step's.
            loss_scale: What gradients are multiplied by: a number, or a `DeviceScale`.
            can_skip: Whether the step may be left out without the host's help.

        Raises:
            StepAgain: the step was prepared by numbers that may be wrong.
        """
        if not self.is_ahead or not isinstance(updates, RuleUpdates):
            return False
        counter = optimizer.this_thread.global_step
        numbers = [*optimizer.state.scalars_of_steps(), *([] if counter is None else [counter])]
        before, key, device = self._chain, attempt.key, None
        if can_skip:
            device = updates.deciding_gpu(None if before is None else before.scale.device)
        chain_key = device, *map(id, (*key, *numbers))
        with undoing(), self.lock:
            chain = self._chain
            if chain is not None and chain.key != chain_key:
                self._settle()
                raise StepAgain
            if _place_of(chain) != attempt.place:  # another thread has made a step, or waited
                raise StepAgain
            if device is None:
                return False
            if chain is not None and self._take_back_half_counted(chain):
                raise StepAgain
            if chain is None:
                chain = self._begin(device, chain_key, key, numbers)
            if not isinstance(loss_scale, DeviceScale):
                unscale = float(np.float32(1) / np.float32(loss_scale))
            elif loss_scale == chain.scale:
                unscale = 0.0
            else:
                unscale = float(np.float32(1) / loss_scale.number())
            now = _Counted([each.numpy() for each in chain.numbers], updates.numbers)
            by_count = {**chain.by_count, chain.host_count: now}
            self._chain = chain._replace(by_count=by_count)
            below = range(chain.host_count - 1, min(by_count) - 1, -1)
            attempt.place = _place_of(chain)
            updates.decide_on_gpu(
                Decision(
                    self._rule,
                    self._accept_after,
                    chain.scale.scaling,
                    chain.host_count,
                    chain.num_calls + 1,
                    self._refuses,
                    chain.copies,
                ),
                chain.scale.device,
                unscale,
                [by_count[count].of_step for count in below],
                self.lock,
            )
            return True

    def confirm(self, attempt: Attempt) -> None:
        """Called with `lock` held, before the GPU is to decide.

        Raises:
            StepAgain: another thread has made a step since `prepare`, or waited for the GPU.
        """
        if _place_of(self._chain) != attempt.place:
            raise StepAgain

    def note_step(self, updates: Updates) -> None:
        """Notes that a step was enqueued, and counted by the host; does nothing if that decides."""
        if updates.gpu_decides is None or not isinstance(updates, RuleUpdates):
            return
        with self.lock:
            chain = self._chain
            assert chain is not None, "it was prepared"
            device = chain.scale.device
            copies = {at: each.after for at, each in updates.decided_by_device.items()}
            after, num_calls = copies.pop(device), chain.num_calls + 1
            read = _Read(num_calls, _scalings(device).read(after))
            self._chain = chain._replace(
                scale=DeviceScale(after, device),
                copies=copies,
                devices={*chain.devices, device, *copies},
                num_calls=num_calls,
                host_count=chain.host_count + 1,
                reads=(*chain.reads, read),
                names={**chain.names, num_calls: updates.measured_names},
            )

    def while_written(
        self, written: Any, work: AbstractContextManager[Any], at: Any = ...
    ) -> AbstractContextManager[Any]:
        return work

    def bring_up(self, rows: Any = None) -> None:
        """Waits until the GPU has decided about all steps, and puts the host's numbers right."""
        if self.is_ahead or self._chain is None:
            return
        with undoing(), self.lock:
            self._settle()
        self._tell_all()

    def raise_late(self, device: Device | None = None, *, wait: bool) -> None:
        """Raises what a GPU has found in an earlier step; see `LateErrors`.

        Raises:
            FloatingPointError: the step was not finite. Neither it nor a later one was made.
        """
        chain = self._chain
        if self.is_ahead:
            return
        if chain is not None and (wait or chain.reads) and device in (None, *chain.devices):
            hear = self._settle if wait else self._look
            with undoing():
                # See `RowChecks.raise_late`.
                if not call_if_free(self.lock, hear) and not is_updating():
                    with self.lock:
                        hear()
        self._tell_all()
        found = self._refused
        if found is not None:
            try:
                raise FloatingPointError(found)
            finally:  # not before: Ctrl-C in between would lose it
                self._refused = None

    def _tell_all(self) -> None:
        """Tells of steps that the host has heard of: not under the lock, as users have loggers."""
        while self._untold:
            try:
                found = self._untold.popleft()
            except IndexError:  # another thread tells of it
                return
            if self._tell is not None:
                self._tell(found)

    def _begin(
        self, device: Device, chain_key: Hashable, key: Sequence[Any], numbers: Sequence[Variable]
    ) -> _Chain:
        for each in numbers:
            each.bring_up()  # another optimizer's steps may count by the same variable
        given: dict[str, Any] = {"loss_scale": np.float32(1)}
        given |= {name: each.numpy()[()] for name, each in self._variables.items()}
        scale = DeviceScale(_scalings(device).new(ScaleState(**given)), device)
        # Before there is a chain: Ctrl-C in between leaves no number that nobody puts right.
        for each in (*numbers, *self._variables.values()):
            each.identity.behind = self
        self._chain = _Chain(scale, {}, (), chain_key, key, numbers, 0, 0, {}, (), {})
        return self._chain

    def _look(self) -> None:
        """Learns what the GPU has decided, without waiting unless it is far behind."""
        chain = self._chain
        if chain is None:
            return
        reads, known = list(chain.reads), None
        while reads:
            if len(reads) >= _MOST_STEPS:
                reads[0].seen.wait(f"{chain.scale.device}, which is {_MOST_STEPS} steps behind")
            if not reads[0].seen.is_done:
                break
            known = reads.pop(0)
            self._hear(chain, known)
        if self._refused is not None:
            self._settle()
        elif known is not None:
            made = int(known.seen.values[0])
            count = made + chain.num_calls - known.num_calls
            self._go_back(chain, count)
            left = {n: counted for n, counted in chain.by_count.items() if made <= n <= count}
            names = {n: each for n, each in chain.names.items() if n > known.num_calls}
            self._chain = chain._replace(
                host_count=count, by_count=left, reads=tuple(reads), names=names
            )

    def _settle(self) -> None:
        """Ends a chain, if there is one; again, if it was interrupted."""
        chain = self._chain
        if chain is None:
            return
        state, made, last_bad = _scalings(chain.scale.device).state(chain.scale.scaling)
        self._take_back_half_counted(chain)
        self._go_back(chain, made)
        if self._tell is None:
            self._note(chain, last_bad)
        else:  # there may be several
            for read in chain.reads:
                read.seen.wait(f"{chain.scale.device}, which decides about steps")
                self._hear(chain, read)
        values = [
            np.asarray(getattr(state, name), variable.dtype)
            for name, variable in self._variables.items()
        ]
        self._assign(self._variables.values(), values)
        self._chain = None
        for each in (*chain.numbers, *self._variables.values()):
            if each.identity.behind is self:
                each.identity.behind = None

    def _hear(self, chain: _Chain, read: _Read) -> None:
        """Takes what a GPU says of one step, whose numbers have arrived."""
        last_bad = LastBad(*map(int, read.seen.values[1:]))
        if last_bad.step == read.num_calls:
            self._note(chain, last_bad)

    def _note(self, chain: _Chain, bad: LastBad) -> None:
        """Notes a step that was not finite, unless that has been done."""
        if bad.step not in chain.names:
            return
        found = self.last_nonfinite = _describe(bad.gradient, chain.names[bad.step])
        if self._tell is not None:
            self._untold.append(found)
        if self._refuses:
            later = chain.num_calls - bad.step
            since = f", nor by the {later} calls since" if later else ""
            self._refused = (
                f"{found}; {chain.scale.device} found this after the call: nothing was changed by "
                f"it{since}"
            )

    def _take_back_half_counted(self, chain: _Chain) -> bool:
        """Takes back what the host had counted of an interrupted step; returns whether it had."""
        before = chain.by_count.get(chain.host_count)
        return before is not None and self._assign(chain.numbers, before.numbers)

    def _go_back(self, chain: _Chain, count: int) -> None:
        if count != chain.host_count:
            self._assign(chain.numbers, chain.by_count[count].numbers)

    def _assign(self, variables: Iterable[Variable], values: Sequence[Any]) -> bool:
        """Writes numbers without bringing them up to date before; returns if one was another."""
        outer, was_another = _this_thread.ahead_of, False
        try:
            _this_thread.ahead_of = self
            for variable, value in zip(variables, values, strict=True):
                if variable.numpy() != value:
                    was_another = True
                    variable.assign(value)
        finally:
            _this_thread.ahead_of = outer
        return was_another


def _describe(gradient: int, names: Names) -> str:
    """Says what was not finite: a gradient by its number, or -1 for one that was clipped."""
    for numbers, named, is_sparse in names:
        if gradient in numbers:
            found = f'gradient for "{named[numbers.index(gradient)]}" is not finite'
            return f"{found}, or equal rows of it add up to what is not" if is_sparse else found
    return CLIPPING_MAKES_NAN


def _place_of(chain: _Chain | None) -> tuple[DeviceScale, int] | None:
    return None if chain is None else (chain.scale, chain.host_count)


def _scalings(device: Device) -> LossScalings:
    found = backend_for(device).loss_scalings
    assert found is not None, "it decides about steps"
    return found
