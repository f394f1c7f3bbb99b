"""SwappingSaver: saves moving averages under the names of their variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuopt.checkpoint.saver import Saver
from gpuopt.training import ExponentialMovingAverage
from gpuopt.variables.variable import Variable


class SwappingSaver(Saver):
    """Saves averages under their variables' names, and variables under their averages' names.

    A plain `Saver` restores such a checkpoint's averages as weights. This one brings each value
    back to where it came from. Averages of 16-bit variables, which are float32, are saved in the
    variables' type.
    """

    def __init__(
        self, averages: ExponentialMovingAverage, var_list: Any = None, **options: Any
    ) -> None:
        """Says what belongs to the checkpoints.

        Args:
            averages: The averages, which are swapped with their variables.
            var_list: See `Saver`; what is among them as a variable and not as its average, or the
                other way round, is refused.
            **options: Other arguments of `Saver`.

        Raises:
            ValueError: a variable's average is missing from `var_list`, or an average's variable;
                or see `Saver`.
            TypeError: see `Saver`.
        """
        super().__init__(var_list, **options)
        self._averages = averages
        self._places(self._named())

    def _places(self, named: Mapping[str, Variable]) -> Mapping[str, Variable]:
        names = {variable.identity: name for name, variable in named.items()}
        partners = dict(named)
        left = {average.identity for average in self._averages.averages_of_variables()}
        for name, variable in named.items():
            average = self._averages.average(variable)
            if average is None:
                continue
            if average.identity not in names:
                raise ValueError(
                    f'"{name}" is to be saved, and its average "{average.name}" is not: they are '
                    "swapped, so var_list must hold both"
                )
            partners[name], partners[names[average.identity]] = average, variable
            left.discard(average.identity)
        if alone := [name for identity, name in names.items() if identity in left]:
            raise ValueError(
                f'the average "{alone[0]}" is to be saved, and its variable is not: they are '
                'swapped, so var_list must hold both, a raw array by a name, as in {"name": array}'
            )
        return partners
