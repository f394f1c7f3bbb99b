"""MovingAverageOptimizer: moving averages that follow each step, and a Saver that swaps them in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from gpuopt.checkpoint import Saver
from gpuopt.checkpoint.saver import SwappingSaver
from gpuopt.device import Device
from gpuopt.optimizer import Optimizer
from gpuopt.state.copies import Changes
from gpuopt.step.additions import Forget, nothing_to_forget
from gpuopt.step.averages import AverageWeights
from gpuopt.step.ledger import Ledger
from gpuopt.step.updates import Updates
from gpuopt.training import ExponentialMovingAverage
from gpuopt.variables.variable import Variable
from gpuopt.wrappers.base import StepWrapper, checked_number


class MovingAverageOptimizer(StepWrapper):
    """Keeps an `ExponentialMovingAverage` of each variable that `opt` updates, as contrib's does.

    The average of "w" is called "w/ExponentialMovingAverage". It starts at the value that `w` has
    before its first step, and is moved in the same step as `w`: not if `opt` skips the step, and
    not on a GPU that refuses it.

        optimizer = MovingAverageOptimizer(AdamOptimizer(), average_decay=0.999)
        optimizer.minimize(loss)
        optimizer.swapping_saver().save("model")  # a plain Saver restores the averages as weights

    Averages are variables, which a `Saver` saves and `state_dict` leaves out. To go on from a
    checkpoint, make them before the restore, by `optimizer.averages.track(variables)`.

    Attributes:
        averages: The averages, to be read, as by `optimizer.averages.average(w)`.
    """

    def __init__(
        self,
        opt: Optimizer,
        average_decay: float = 0.9999,
        num_updates: Any = None,
        sequential_update: bool = True,
    ) -> None:
        """Wraps `opt`.

        Args:
            opt: Makes the steps; its state and its name are this optimizer's.
            average_decay: The weight of the old average in each step, from 0 to 1.
            num_updates: A number, or a scalar variable that is read in each step, for which the
                host waits if it is on a GPU; it bounds the decay, see `ExponentialMovingAverage`.
                A `global_step` has counted the step by then, if updates are sequential.
            sequential_update: Averages follow the variables' values after the step; if not, those
                before it.

        Raises:
            TypeError: `opt` is no optimizer, or a number is none.
            ValueError: `average_decay` is not from 0 to 1.
        """
        checked_number("average_decay", average_decay)
        if not 0 <= average_decay <= 1:
            raise ValueError(f"average_decay must be from 0 to 1, got {average_decay!r}")
        self.averages = ExponentialMovingAverage(average_decay, num_updates=num_updates)
        self._sequential_update = sequential_update
        super().__init__(opt)

    def _made_with(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        averages = self.averages
        return (self._inner, averages._decay, averages._num_updates, self._sequential_update), {}

    def _changes(self) -> Changes:
        return [{"averages": self.averages}]

    def _repeat_changes(self, changes: Changes) -> None:
        self.averages = changes[0]["averages"]

    def swapping_saver(
        self, var_list: Any = None, name: str = "swapping_saver", **kwargs: Any
    ) -> Saver:
        """Makes a Saver that swaps variables and averages.

        It saves averages under the variables' names, and the variables' values under the averages'
        names, and brings each back to where it came from. A plain `Saver` restores such a
        checkpoint's averages as weights.

        Args:
            var_list: As in `Saver`, for variables and their averages; by default all variables,
                and all optimizers' state.
            name: Accepted as in TensorFlow; nothing here is named after it.
            **kwargs: Other arguments of `Saver`.

        Raises:
            RuntimeError: there is no average yet.
            ValueError: `var_list` holds a variable without its average, or an average without its
                variable; or see `Saver`.
            TypeError: see `Saver`.
        """
        if not self.averages.averages_of_variables():
            raise RuntimeError(
                "Must call apply_gradients or minimize before creating the swapping_saver, or make "
                "the averages by `averages.track(variables)`"
            )
        return SwappingSaver(self.averages, var_list, **kwargs)

    @property
    def _what_is_added(self) -> str:
        return "moving averages"

    def _variables_beside(self, variables: Sequence[Variable]) -> list[Variable]:
        self.averages.track(variables)
        averages = (self.averages.average(variable) for variable in variables)
        return [average for average in averages if average is not None]

    def _prepare_updates(self, optimizer: Any, updates: Updates) -> tuple[Updates, Forget]:
        averages = self.averages
        made = averages.track(updates.variables())

        def forget(devices: Collection[Device] | None) -> None:
            averages.forget(each for each in made if devices is None or each.device in devices)

        return updates, forget if made else nothing_to_forget

    def _written_beside(self, variables: Sequence[Variable]) -> Iterable[Variable]:
        averages = map(self.averages.average, variables)
        return [each for each in averages if each is not None]

    def _before_update(self, updates: Updates, ledger: Ledger) -> None:
        if not self._sequential_update:
            self._move(updates, ledger)

    def _after_update(self, updates: Updates, ledger: Ledger) -> None:
        if self._sequential_update:
            self._move(updates, ledger)

    def _move(self, updates: Updates, ledger: Ledger) -> None:
        variables = updates.variables()
        weights = AverageWeights([1 - self.averages.decay_now()], ledger.records)
        self.averages.move(variables, variables, weights)
