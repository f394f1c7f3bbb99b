"""The choice of variables that decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np

from gpuopt.step.user_code import call_user_code
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable

MATRICES = "matrices"
# Those of two or more dimensions; those for which a function returns True; or all.
DecayVariables = Literal["matrices"] | Callable[[Variable], bool] | None


class Decaying:
    """Which variables decay. A function is called once for each."""

    def __init__(self, given: Any) -> None:
        """Takes the argument `decay_variables`.

        Raises:
            TypeError: it is neither "matrices" nor a function.
        """
        if not callable(given) and not (isinstance(given, str) and given == MATRICES):
            raise TypeError(
                f'decay_variables must be "{MATRICES}" or a function of a Variable that returns '
                f"True or False, got {given!r}; for a list of variables that do not decay, give "
                "groups=[ParameterGroup(variables=[...], weight_decay=0.0)]"
            )
        self._given = given
        self._known: WeakKeyDictionary[Identity, bool] = WeakKeyDictionary()

    def has(self, variable: Variable) -> bool:
        """Whether a variable decays.

        Raises:
            TypeError: the function returns something else than True or False.
        """
        if self._given == MATRICES:
            return len(variable.shape) > 1
        found = self._known.get(variable.identity)
        if found is None:
            answer = call_user_code(self._given, variable)
            if not isinstance(answer, bool | np.bool_):
                raise TypeError(
                    f"decay_variables must return True or False, got {answer!r} for "
                    f'"{variable.name}"'
                )
            found = self._known[variable.identity] = bool(answer)
        return found
