"""Steps that are made if their gradients are finite: a GPU decides if it can, or the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from types import MappingProxyType
from typing import Any

import numpy as np

from gpuopt.backends.loss_scaling import Decision
from gpuopt.device import Device
from gpuopt.rules.loss_scaling import ScaleRule, ScaleState
from gpuopt.state.counts import numbers_of
from gpuopt.step.additions import Forget, nothing_to_forget
from gpuopt.step.chain import Chain, Count, DeviceScale, Outcome, with_numbers
from gpuopt.step.clips import scalings
from gpuopt.step.ledger import Ledger
from gpuopt.step.nonfinite import first_nonfinite
from gpuopt.step.rule_updates import RuleUpdates
from gpuopt.step.step_numbers import StepNumbers
from gpuopt.step.updates import Updates
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable

# The objects that a step's numbers depend on, other than the count; they do not change.
Key = Sequence[Any]
# The rule of a loss that is not scaled: the scale is always 1.
_STAYS = ScaleRule()


class DeviceScaling:
    """Has a GPU decide about steps of one optimizer, by a loss scale that it changes.

    Until the decision arrives, kernels get the scalars for each possible count of steps, and use
    those of the GPU's own count. The host never assumes a decision, so no number is taken back, and
    a step that fails leaves the ledger unchanged.

    If no loss is scaled, the scale is always 1. A step that is not finite can also be an error,
    which is raised late. The GPU makes no step until the host has raised it: so a step that is made
    follows steps that were all made, and gets the scalars of that count alone.

    Attributes:
        ledger: The optimizer's.
        rule: How the scale changes.
        accept_after: See `after_step`.
        variables: They hold the state while no GPU has it, by the names of `ScaleState`; empty if
            the scale is always 1.
        report: Called with a description of each step that was not finite, when its decision has
            arrived.
        refuses: Whether such a step is an error.
        last_nonfinite: Describes the first gradient that was not finite in the last such step whose
            decision has arrived.
    """

    def __init__(
        self,
        ledger: Ledger,
        rule: ScaleRule = _STAYS,
        accept_after: int | None = None,
        variables: Mapping[str, Variable] = MappingProxyType({}),
        *,
        report: Callable[[str], None] | None = None,
        refuses: bool = False,
    ) -> None:
        """Does nothing yet; the arguments are the attributes."""
        self.ledger = ledger
        self.rule = rule
        self.accept_after = accept_after
        self.variables = variables
        self.report = report
        self.refuses = refuses
        self.last_nonfinite: str | None = None

    @property
    def scale(self) -> DeviceScale | None:
        """The present scale, if a GPU has it."""
        chain = self.ledger.books.chain
        return chain.scale if chain is not None and chain.policy is self else None

    def fix_scalars(self, prepare: Callable[[], None], updates: Updates) -> None:
        """Fixes a step's scalars by the numbers that it has if the GPU makes all promised steps.

        Args:
            prepare: Prepares the optimizer.
            updates: The step's.
        """
        chain = self.ledger.books.chain
        numbers = self.ledger.settled if chain is None else chain.counts[-1].numbers

        def fix() -> None:
            prepare()
            updates.fix_scalars()

        with_numbers(self.ledger, numbers, fix)
        updates.fixed_by = numbers

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
            key: The objects that the step's numbers depend on, other than the count. None if the
                host must know which steps were made.
            optimizer: The step's, prepared.
            updates: The step's.
            loss_scale: The factor in the gradients: a number, or a `DeviceScale`.
            can_skip: Whether the GPU can skip the step without the host.

        Raises:
            FloatingPointError: an earlier step was not finite, and `refuses`.
            IndexError: an earlier step's row was out of range.
        """
        if key is None or not isinstance(updates, RuleUpdates):
            return False
        ledger, device = self.ledger, None
        if can_skip:
            chain = ledger.books.chain
            device = updates.deciding_gpu(None if chain is None else chain.scale.device)
        if device is not None:
            updates.gpu_decides = _DecidedStep(self, key, device, optimizer, loss_scale)
            return True
        ledger.settle()
        if updates.fixed_by is not ledger.settled:
            updates.fix_scalars_anew()
        updates.clip()
        return False


class FiniteGradients:
    """An `Addition`: a GPU decides if it can; else the host decides, and waits for GPUs.

    If norms are computed anyway, the host decides by these: gradients are read once for both.
    """

    _what_is_added = ""
    _keeps_new_slots = False

    def __init__(
        self,
        on_gpu: DeviceScaling,
        key: Key | None,
        makes_step_of: Callable[[str | None], bool],
        takes_norms: bool,
    ) -> None:
        """Prepares the decision about one step.

        Args:
            on_gpu: The optimizer's.
            key: See `DeviceScaling.prepare`.
            makes_step_of: Returns whether the step is made, given the description of a gradient
                that is not finite, or None.
            takes_norms: Whether the step computes norms of gradients anyway.
        """
        self._on_gpu = on_gpu
        self._key = key
        self._makes_step_of = makes_step_of
        self._takes_norms = takes_norms

    def _prepare_updates(self, optimizer: Any, updates: Updates) -> tuple[Updates, Forget]:
        # A step that is skipped must not leave new slots, and a GPU cannot remove them.
        is_on_gpu = self._on_gpu.prepare(
            self._key, optimizer, updates, 1, can_skip=not updates.created
        )
        if self._takes_norms and not is_on_gpu:
            updates.measure_all()
        return updates, nothing_to_forget

    def _makes_step(self, updates: Updates) -> bool:
        if updates.gpu_decides is not None:
            return True
        if self._takes_norms:
            return self._makes_step_of(updates.find_nonfinite())
        return self._makes_step_of(first_nonfinite(updates.pairs()))

    def _written_beside(self, variables: Sequence[Variable]) -> Iterable[Variable]:
        return ()

    def _accept_decided(self, is_counted: bool) -> None:
        self._on_gpu.ledger.bring_up()

    def _before_update(self, updates: Updates, ledger: Ledger) -> None:
        pass

    def _after_update(self, updates: Updates, ledger: Ledger) -> None:
        pass


class _DecidedStep:
    """A step that a GPU decides about; a `Decider`.

    Attributes:
        key: See `DeviceScaling.prepare`.
        device: The GPU.
        counter: The global step; None if there is none.
        variables: All that the step changes in host memory: powers, counters, the global step.
        loss_scale: See `DeviceScaling.prepare`.
    """

    def __init__(
        self, policy: DeviceScaling, key: Key, device: Device, optimizer: Any, loss_scale: Any
    ) -> None:
        self._policy = policy
        self.key = key
        self.device = device
        self.counter: Variable | None = optimizer.this_thread.global_step
        own = numbers_of(optimizer.this_thread.counted)
        self.variables: list[Variable] = [*optimizer.state.scalars_of_steps(), *own]
        if self.counter is not None:
            self.variables.append(self.counter)
        self.loss_scale = loss_scale

    def counts_like(self, other: _DecidedStep) -> bool:
        """Whether two steps change the same variables, and one GPU decides about both alike."""
        is_same = self._policy is other._policy and self.device == other.device
        is_same = is_same and len(self.variables) == len(other.variables)
        return is_same and all(map(is_, self.variables, other.variables))

    def begin(self, updates: RuleUpdates) -> None:
        ledger = self._policy.ledger
        chain = ledger.books.chain
        counts = None if chain is None else self._counts_of(chain, updates)
        if chain is None or counts is None:
            ledger.settle_locked()
            is_known = updates.fixed_by is ledger.settled
            chain = self._new_chain()
            [count] = chain.counts
            if is_known:
                updates.fixed_by = count.numbers
            counts = [count._replace(of_step=self._numbers_by(count, updates))]
        chain = chain._replace(counts=counts, last=self)
        ledger.books = ledger.books._replace(chain=chain)
        self._have_decided(updates, chain)

    def _counts_of(self, chain: Chain, updates: RuleUpdates) -> list[Count] | None:
        """Returns the step's numbers for each count; None if those of `chain` are not valid for it.

        This is so after a hyperparameter was set that powers or counters depend on, if steps may be
        skipped.
        """
        if not self.counts_like(chain.last):
            return None
        *earlier, newest = chain.counts
        is_like = all(map(is_, self.key, chain.last.key))
        if is_like and earlier:  # an earlier step's variables may be of other types
            types = updates.numbers.scalars.keys()
            is_like = all(types <= each.of_step.scalars.keys() for each in earlier)
        if is_like or self._policy.refuses:
            return [*earlier, newest._replace(of_step=self._numbers_by(newest, updates))]
        found: list[Count] = []
        for count, after in zip(chain.counts, [*chain.counts[1:], None], strict=True):
            found.append(count._replace(of_step=self._numbers_by(count, updates)))
            if after is not None and self._counted(count, updates) != after.numbers:
                return None
        return found

    def _new_chain(self) -> Chain:
        ledger, own = self._policy.ledger, self._policy.variables
        for each in self.variables:
            each.bring_up()  # another optimizer's steps may count by the same variable
        numbers = {each.identity: each.numpy() for each in self.variables}
        given: dict[str, Any] = {"loss_scale": np.float32(1)}
        given |= {name: each.numpy()[()] for name, each in own.items()}
        scale = DeviceScale(scalings(self.device).new(ScaleState(**given)), self.device)
        # Before there is a chain: after Ctrl-C in between, a read still finds the right number.
        for each in (*self.variables, *own.values()):
            each.identity.behind = ledger
        chain = Chain(self._policy, scale, {}, (), self, 0, 0, [Count(numbers, None)])
        ledger.books = ledger.books._replace(chain=chain)
        return chain

    def _numbers_by(self, count: Count, updates: RuleUpdates) -> StepNumbers:
        """Returns the numbers of the updates for one count of steps."""

        def fix() -> StepNumbers:
            if updates.fixed_by is not count.numbers:
                updates.fix_scalars_anew()
            return updates.numbers

        found = with_numbers(self._policy.ledger, count.numbers, fix)
        updates.fixed_by = count.numbers
        return found

    def _counted(self, before: Count, updates: RuleUpdates) -> Mapping[Identity, Any]:
        """Returns copies of numbers, as they are after the step."""
        numbers = {identity: number.copy() for identity, number in before.numbers.items()}
        with_numbers(self._policy.ledger, numbers, updates.count)
        if self.counter is not None:
            number = numbers[self.counter.identity]
            np.add(number, self.counter.dtype.type(1), out=number)
        return numbers

    def _have_decided(self, updates: RuleUpdates, chain: Chain) -> None:
        loss_scale = self.loss_scale
        if not isinstance(loss_scale, DeviceScale):
            unscale = float(np.float32(1) / np.float32(loss_scale))
        elif loss_scale == chain.scale:
            unscale = 0.0
        else:
            unscale = float(np.float32(1) / loss_scale.number())
        counts = chain.counts[-1:] if self._policy.refuses else chain.counts
        decision = Decision(
            self._policy.rule,
            self._policy.accept_after,
            chain.scale.scaling,
            chain.num_calls + 1,
            self._policy.refuses,
            chain.copies,
            len(counts),
            chain.num_made + len(chain.counts),
        )
        every = [each.of_step for each in reversed(counts)]
        updates.decide_on_gpu(decision, chain.scale.device, unscale, every)

    def promise(self, updates: RuleUpdates) -> None:
        chain = self._policy.ledger.books.chain
        assert chain is not None, "the step was decided about"
        device, num_calls = chain.scale.device, chain.num_calls + 1
        copies = {at: record.refused for at, record in updates.records.items()}
        after = copies.pop(device)
        outcome = Outcome(num_calls, scalings(device).read(after), updates.measured_names)
        longer = chain._replace(
            scale=DeviceScale(after, device),
            copies=copies,
            devices={*chain.devices, device, *copies},
            num_calls=num_calls,
            counts=[*chain.counts, Count(self._counted(chain.counts[-1], updates), None)],
        )
        self._policy.ledger.decide_by(longer, outcome)
