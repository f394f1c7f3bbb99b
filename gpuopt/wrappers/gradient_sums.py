"""Sums of gradients over several steps, computed where the variables are."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from gpuopt import environment
from gpuopt.backends import Target, backend_for
from gpuopt.backends.backend import codecs_of
from gpuopt.backends.clips import FACTOR_OF_FLOAT32
from gpuopt.backends.record import NOTHING_KNOWN, StepRecord
from gpuopt.codecs import Codecs
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.rules.accumulation import add_to_sum, begin_sum
from gpuopt.rules.clipped import CLIP_FACTOR, clipped
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.step.known import Group, KnownGroups
from gpuopt.step.sparse_updates import as_dense
from gpuopt.step.updates import Pair
from gpuopt.step.wide_gradients import wide_dtype
from gpuopt.variables.identity import Identity
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable
from gpuopt.wrappers.loss_factors import LossFactors
from gpuopt.wrappers.sums_in_state import KeptSum, SumsInState, refuse_rows_outside

Array = Any


class GradientSums(SumsInState):
    """The sums of one optimizer: what is added to them, and what they are at the end."""

    def __init__(self, optimizer: Any) -> None:
        """Begins without gradients, or with those that its state has.

        Args:
            optimizer: In whose state the sums are.
        """
        super().__init__(optimizer)
        self._user: weakref.ref[Any] | None = None
        # See `use`.
        self.most_rows = 0
        self.known = KnownGroups()
        self._factors = LossFactors()

    def use(self, user: Any, most_rows: int) -> None:
        """Keeps all others from adding gradients, as long as the user lives.

        Args:
            user: Who adds gradients.
            most_rows: So many rows of a variable's sparse gradients are kept as they are; if there
                are more, and twice as many as different ones, equal rows are added up.

        Raises:
            ValueError: somebody else does.
        """
        if self._user is not None and self._user() is not None:
            raise ValueError(
                f'the gradients of "{self._optimizer.get_name()}" are accumulated by another '
                f"{type(user).__name__} already"
            )
        self._user, self.most_rows = weakref.ref(user), most_rows
        self._state.wrapper_state = self

    def add(self, pairs: Sequence[Pair], divisor: int, loss_scale: Any = None) -> None:
        """Adds the gradients of one step.

        Args:
            pairs: Checked.
            divisor: What dense sums are divided by then: theirs alone who have a dense gradient.
            loss_scale: What gradients are divided by as they are added: see `LossFactors.on`; None
                if they are not.
        """
        self._begin()
        dense: list[Pair] = []
        for gradient, variable in pairs:
            found = self._sums.setdefault(variable.identity, KeptSum(variable))
            found.note(variable)
            self._take_restored(variable, found)
            if not isinstance(gradient, IndexedSlices):
                if found.slices:
                    self._launch([(self._as_dense(found), variable)])
                dense.append((gradient, variable))
            elif found.is_dense:
                dense.append((self._dense_of(gradient, variable), variable))
            else:
                self._add_slices(gradient, variable, found, loss_scale)
        self._launch(dense, divisor, loss_scale)
        self._counter().add(1)

    def check_rows(self) -> None:
        """Raises IndexError if a row of sparse gradients is not there; waits for GPUs."""
        for found in list(self._sums.values()):
            if found.slices and found.variable is not None:
                refuse_rows_outside(found.joined(found.variable)[1], found.variable)

    def take(
        self, divisor: int, divided: Sequence[Variable] = ()
    ) -> tuple[list[tuple[Any, Variable]], list[Variable]]:
        """Ends the sums: from now on, nothing is summed.

        Args:
            divisor: What sums are divided by.
            divided: Variables whose sums are divided already.

        Returns:
            (gradient, variable) pairs, of float32 where variables have 16 bits; and the variables
            that hold the dense ones of the gradients, which the next `add` overwrites.
        """
        self._begin()
        self._take_all_restored()
        own = {variable.identity for variable in divided}
        left: list[Pair] = []
        pairs: list[tuple[Any, Variable]] = []
        totals: list[Variable] = []
        for identity, found in list(self._sums.items()):
            variable = found.variable
            if variable is None:
                continue
            if found.is_dense:
                totals.append(self._total(variable))
                pair = totals[-1].unread_storage, variable
                pairs.append(pair)
                if divisor != 1 and identity not in own:
                    left.append(pair)
            elif found.slices:
                values, rows = found.joined(variable)
                with backend_for(variable.device).enter_reading(found, kept=[values]):
                    values = values / values.dtype.type(divisor)
                pairs.append((IndexedSlices(values, rows, variable.shape), variable))
        self._launch(left, divisor, begin=True)
        self.reset()
        return pairs, totals

    def _target(self, variable: Variable) -> tuple[Target, list[Identity], Codecs]:
        total = self._total(variable)
        target = Target(total.unread_storage, [])
        return target, [total.identity], codecs_of(target)

    def _launch(
        self,
        pairs: Sequence[Pair],
        divisor: int = 1,
        loss_scale: Any = None,
        *,
        begin: bool = False,
    ) -> None:
        """Adds dense gradients to sums.

        Args:
            pairs: Theirs.
            divisor: What the sums are divided by then.
            loss_scale: See `add`.
            begin: Has sums begin anew that have begun.
        """
        # A launch for each: sparse gradients that have become dense may be of another type.
        by_kind: dict[tuple[bool, str], list[Pair]] = {}
        for gradient, variable in pairs:
            begins = begin or not self._sums[variable.identity].is_dense
            is_own = gradient.dtype == variable.dtype
            kind = begins, "" if is_own else gradient.dtype.name
            by_kind.setdefault(kind, []).append((gradient, variable))
        for (all_begin, _), some in by_kind.items():
            rule = begin_sum if all_begin else add_to_sum
            ignore_fp_warnings(partial(self._launch_one, rule, some, divisor, loss_scale))
        for _, variable in pairs:
            self._sums[variable.identity].is_dense = True

    def _launch_one(
        self, rule: UpdateRule, pairs: Sequence[Pair], divisor: int, loss_scale: Any
    ) -> None:
        gradients, variables = zip(*pairs, strict=True)
        state_version = self._state.version.number
        group = self.known.find(variables, state_version)
        if group is None:
            group = Group(variables, state_version, self._target, lambda _: 0)
            self.known.add(group)
        versions = group.accept(gradients)
        for batch in group.batches:
            scalars = {"divisor": batch.real(divisor)}
            record = NOTHING_KNOWN
            if loss_scale is not None:
                factors = self._factors.on(batch.device, loss_scale)
                factor = batch.backend.clips.factor_scalar(factors, 0, batch.real)
                scalars[CLIP_FACTOR], record = factor, StepRecord(factors=factors)
            batch.backend.apply_dense(
                rule if loss_scale is None else clipped(rule),
                batch.plan,
                batch.select(gradients),
                [scalars],
                record=record,
                version=None if versions is None else versions[batch.number],
            )

    def _add_slices(
        self, slices: IndexedSlices, variable: Variable, found: KeptSum, loss_scale: Any
    ) -> None:
        backend = backend_for(variable.device)
        if environment.settings().checks_at_once:
            self._check_rows([(slices.values, slices.indices)], variable)
        with backend.enter_update(found, kept=(slices.values, slices.indices)):
            values = slices.values.astype(wide_dtype(variable))
            if loss_scale is not None:
                factors = self._factors.on(variable.device, loss_scale)
                values *= factors[0, FACTOR_OF_FLOAT32].astype(values.dtype)
                backend.hold(factors)
            found.slices.append((values, slices.indices.astype(np.int64)))
            if found.num_rows > max(self.most_rows, 2 * found.num_unique):
                self._check_rows(found.slices, variable)
                found.slices = [backend.sum_duplicate_rows(*found.joined(variable))]
                found.num_unique = found.num_rows

    def _as_dense(self, found: KeptSum) -> Array:
        """Returns an array that sparse gradients add up to, and forgets these."""
        assert found.variable is not None
        values, rows = found.joined(found.variable)
        found.slices, found.num_unique = [], 0
        return self._dense_of(IndexedSlices(values, rows, found.variable.shape), found.variable)

    def _dense_of(self, slices: IndexedSlices, variable: Variable) -> Array:
        self._check_rows([(slices.values, slices.indices)], variable)
        return as_dense(backend_for(variable.device), slices, variable, wide_dtype(variable), None)

    def _check_rows(self, slices: Sequence[tuple[Array, Array]], variable: Variable) -> None:
        """Raises IndexError if a row is not there; waits for a GPU that knows."""
        pairs: list[Pair] = [(IndexedSlices(*each, variable.shape), variable) for each in slices]
        self._optimizer.ledger.check_first(pairs)
