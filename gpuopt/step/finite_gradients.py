"""A step that is made if its gradients are finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpuopt.step.additions import Forget, nothing_to_forget
from gpuopt.step.device_scaling import DeviceScaling, Key
from gpuopt.step.ledger import Ledger
from gpuopt.step.nonfinite import first_nonfinite
from gpuopt.step.updates import Updates
from gpuopt.variables.variable import Variable


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
            on_gpu: The optimizer's; the step is made inside its `call`.
            key: The key of that call.
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
