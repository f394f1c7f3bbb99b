"""The updates of a step without some of its variables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from gpuopt.device import Device
from gpuopt.step.request import StepRequest
from gpuopt.step.updates import HookOptimizer, Pair, Updates
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable


class ChoosingOptimizer(HookOptimizer, Protocol):
    """The part of an optimizer that `ChosenUpdates` uses."""

    def _checked_updates(self, request: StepRequest) -> Updates: ...


class ChosenUpdates(Updates):
    """Some updates of a step. Those left out are checked like the others, and not written.

    See `Updates` for what each method promises.
    """

    def __init__(
        self, optimizer: ChoosingOptimizer, every: Updates, chosen: Sequence[Pair]
    ) -> None:
        """Prepares the updates of the chosen variables.

        Args:
            optimizer: Whose step this is; it has been prepared.
            every: All of the step's updates, checked.
            chosen: Those of their pairs that are written; there may be none.
        """
        self._every = every
        self.request = every.request
        mine = every.request._replace(pairs=list(chosen))
        self._chosen = optimizer._checked_updates(mine) if chosen else None
        self.has_rows_on_a_gpu = every.has_rows_on_a_gpu
        self.created = every.created
        self.forgets = every.forgets if self._chosen is None else self._chosen.forgets
        self.read = every.read
        self.create_slots()
        self.fix_scalars()
        self.check()
        if self._chosen is not None and every.unscaled_by is not None:
            self._chosen.unscale(every.unscaled_by)

    @property
    def clips(self) -> Any:
        return None if self._chosen is None else self._chosen.clips

    @property
    def is_followed(self) -> bool:
        return self._chosen is not None and self._chosen.is_followed

    @property
    def unscaled_by(self) -> float | None:
        return None if self._chosen is None else self._chosen.unscaled_by

    def pairs(self) -> Sequence[Pair]:
        return self._every.pairs()

    def variables(self) -> Sequence[Variable]:
        return self._every.variables()

    def sparse_pairs(self) -> Sequence[Pair]:
        return self._every.sparse_pairs()

    def identities(self) -> Iterable[Identity]:
        return self._every.identities()

    @property
    def num_elements(self) -> int:
        return 0 if self._chosen is None else self._chosen.num_elements

    def devices(self) -> Collection[Device]:
        return self._every.devices()

    def refuse_shared_memory(self, counter: Variable | None) -> None:
        self._every.refuse_shared_memory(counter)

    def create_slots(self, of_part: bool = False) -> None:
        if self._chosen is not None:
            self._chosen.create_slots()

    def fix_scalars(self) -> None:
        if self._chosen is not None:
            self._chosen.fix_scalars()

    def check(self) -> None:
        if self._chosen is not None:
            self._chosen.check()

    def must_check_first(self) -> bool:
        return self._every.must_check_first()

    def measure(self) -> None:
        if self._chosen is not None:
            self._chosen.measure()

    def update(self) -> list[Any]:
        return [] if self._chosen is None else self._chosen.update()

    def follow(self) -> None:
        if self._chosen is not None:
            self._chosen.follow()

    def unscale(self, factor: float) -> None:
        if self._chosen is not None:
            self._chosen.unscale(factor)

    def measure_all(self) -> None:
        if self._chosen is not None:
            self._chosen.measure_all()

    def find_nonfinite(self) -> str | None:
        # Those that are left out are 0.
        return None if self._chosen is None else self._chosen.find_nonfinite()

    def written(self) -> tuple[list[str], list[str]]:
        return ([], []) if self._chosen is None else self._chosen.written()
