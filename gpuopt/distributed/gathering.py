"""The accumulators of all variables that workers train, filled and emptied together."""

from __future__ import annotations

from typing import Any, TypeAlias

from gpuopt.distributed.accumulators import ConditionalAccumulator, SparseConditionalAccumulator
from gpuopt.step.pairs import Gradient
from gpuopt.variables.identity import Identity
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable

Pairs: TypeAlias = "list[tuple[Gradient | None, Variable]]"
Accumulator = ConditionalAccumulator | SparseConditionalAccumulator


class GatheredGradients:
    """An accumulator for each variable. Only one thread at a time may call its methods."""

    def __init__(self) -> None:
        self._accumulators: dict[Identity, tuple[Variable, Accumulator]] = {}
        self._without_gradient: dict[Identity, Variable] = {}

    @property
    def variables(self) -> list[Variable]:
        """The trained variables: known once the first gradients are there."""
        return [variable for variable, _ in self._accumulators.values()]

    def num_accumulated(self, variable: Variable) -> int:
        """Returns how many gradients of `variable` are there."""
        found = self._accumulators.get(variable.identity)
        return 0 if found is None else found[1].num_accumulated()

    def num_complete(self) -> int:
        """Returns how many pushes have had all their gradients accepted."""
        counts = [accumulator.num_accumulated() for _, accumulator in self._accumulators.values()]
        return min(counts, default=0)

    def check(self, pairs: Pairs, step: int) -> None:
        """Raises ValueError if these are not gradients of the variables known so far.

        Args:
            pairs: As `checked_pairs` returns them. The first ones say which variables there are,
                and which of them have IndexedSlices.
            step: The first step whose gradients are not late.
        """
        if not self._accumulators:
            self._make_accumulators(pairs, step)
        given = {variable.identity for gradient, variable in pairs if gradient is not None}
        if given != self._accumulators.keys():
            expected = sorted(identity.name for identity in self._accumulators)
            raise ValueError(
                "each push must hold gradients for the same variables: the first had them for "
                f"{expected}, this one has them for {sorted(identity.name for identity in given)}"
            )
        for gradient, variable in pairs:
            if gradient is None:
                continue
            _, accumulator = self._accumulators[variable.identity]
            was_sparse = isinstance(accumulator, SparseConditionalAccumulator)
            if isinstance(gradient, IndexedSlices) != was_sparse:
                kinds = ("an array", "IndexedSlices")
                raise ValueError(
                    f'the gradient for "{variable.name}" is {kinds[not was_sparse]}; the first one '
                    f"was {kinds[was_sparse]}"
                )

    def prepare(self, pairs: Pairs) -> list[tuple[Accumulator, Any]]:
        """Pairs gradients with their accumulators, and merges rows that one gradient repeats.

        Any number of threads may do this at a time.
        """
        prepared = []
        for gradient, variable in pairs:
            if gradient is None:
                continue
            _, accumulator = self._accumulators[variable.identity]
            if isinstance(accumulator, SparseConditionalAccumulator):
                gradient = accumulator.merge_rows(gradient.values, gradient.indices)
            prepared.append((accumulator, gradient))
        return prepared

    def accept(self, prepared: list[tuple[Accumulator, Any]], local_step: int) -> bool:
        """Adds gradients; drops all of them and returns False if `local_step` is over."""
        # All or none are accepted, because every accumulator is at the same step.
        return all(accumulator.accept(gradient, local_step) for accumulator, gradient in prepared)

    def has(self, num_required: int) -> bool:
        """Returns whether there are enough gradients of every variable."""
        return all(accumulator.has(num_required) for _, accumulator in self._accumulators.values())

    def take(self) -> Pairs:
        """Returns the mean of all gradients; those that come later count for the next step.

        All variables are taken together: no gradient can be split between two steps.
        """
        taken: Pairs = [(a.take(), variable) for variable, a in self._accumulators.values()]
        return taken + [(None, variable) for variable in self._without_gradient.values()]

    def drop_before(self, step: int) -> None:
        """Makes gradients for steps before `step` late from now on; `step` may also go back."""
        for _, accumulator in self._accumulators.values():
            accumulator.drop_before(step)

    def _make_accumulators(self, pairs: Pairs, step: int) -> None:
        for gradient, variable in pairs:
            if gradient is None:
                self._without_gradient[variable.identity] = variable
                continue
            sparse = isinstance(gradient, IndexedSlices)
            make = SparseConditionalAccumulator if sparse else ConditionalAccumulator
            accumulator = make(
                gradient.dtype,
                variable.shape,
                device=variable.device,
                name=f"{variable.name}/grad_accum",
            )
            accumulator.drop_before(step)
            self._accumulators[variable.identity] = variable, accumulator
