"""Schedule: a hyperparameter that follows the global step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from gpuopt.quietly import quietly
from gpuopt.rules.schedule_formulas import FORMULAS, Formula
from gpuopt.step.step import checked_global_step
from gpuopt.step.step_numbers import FollowsSteps
from gpuopt.variables.variable import Variable


@dataclass(frozen=True, eq=False, repr=False)
class Schedule(FollowsSteps):
    """A function without arguments: its value is that at the present `global_step`.

    An optimizer takes one for any hyperparameter and calls it once in each step, before the step is
    counted. `exponential_decay` and its like make one. A copy, and one that is unpickled, follows a
    copy of the global step.

    Attributes:
        name: The function that has made it.
        arguments: What that was given.
        global_step: The variable that is followed.
        formula: What is computed.
        constants: The formula's constants, in the type that it computes in.
        dtype: That type: float64 if the learning rate was given so, else float32.
        then: What comes after a warm-up, with steps counted from there; else None.
    """

    name: str
    arguments: Mapping[str, Any]
    global_step: Variable
    formula: Formula
    constants: Mapping[str, Any]
    dtype: np.dtype[Any]
    then: Schedule | None = None

    @property
    def _is_ours(self) -> bool:
        """Whether it is no subclass's, which may override what is computed."""
        return type(self) is Schedule

    def __call__(self) -> np.floating[Any]:
        """Returns the value at the present step; waits for a global step on a GPU.

        Raises:
            ValueError: the global step is between two whole numbers.
        """
        return self.at(self.global_step.numpy())  # type: ignore[no-any-return]

    def at(self, steps: Any) -> Any:
        """Returns the values at any steps.

        Args:
            steps: A whole number, or an array of such.

        Returns:
            A scalar, or an array of the same shape, of `dtype`.

        Raises:
            TypeError: a step is no number.
            ValueError: a step is between two whole numbers.
        """
        given = np.asarray(steps)
        if given.dtype.kind not in "iuf":
            raise TypeError(f"{self.name} has values at whole steps, got {steps!r}")
        counts = given.astype(np.int64) if given.dtype.kind != "f" else _whole(given)
        if counts is None:
            raise ValueError(f"{self.name} has values at whole steps, got {steps!r}")
        # A scalar, not an array of no dimensions: numpy takes a tenth of the time.
        return np.asarray(quietly(self._values, counts[()]), self.dtype)[()]

    def _values(self, counts: Any) -> Any:
        values = self.formula(counts.astype(self.dtype), counts, **self.constants)
        if self.then is None:
            return values
        after = counts - np.int64(self.constants["warmup_steps"])
        if np.all(after < 0):
            return values
        return np.where(after < 0, values, self.then._values(np.maximum(after, 0)))

    def device_form(self) -> np.ndarray[Any, Any]:
        """Returns what `schedule_at` of kernels/shared/schedules.cuh reads, as float64.

        It has no digits less than the constants: they are float32, or whole numbers below 2**53.
        """
        numbers = [np.ravel(constant) for constant in self.constants.values()]
        constants = np.concatenate(numbers).astype(np.float64)
        head = np.array([FORMULAS.index(self.formula), constants.size], np.float64)
        rest = [] if self.then is None else [self.then.device_form()]
        return np.concatenate([head, constants, *rest])

    def plot(self, steps: int | Iterable[int], path: Any = None) -> Any:
        """Draws the values into a picture.

        Args:
            steps: How many steps from 0 on, at least one; or which ones.
            path: The file to write; its ending says the format.

        Returns:
            matplotlib's Figure.

        Raises:
            ImportError: matplotlib is not installed.
            TypeError, ValueError: There are no such steps; see `at`.
            OSError: the file cannot be written.
        """
        if find_spec("matplotlib") is None:
            raise ImportError(
                'a picture of a schedule needs matplotlib, which is in gpuopt\'s extra "plots": '
                "pip install matplotlib; schedule.at(steps) gives the values"
            )
        # Here, because matplotlib takes long to import, and may be missing. Not pyplot, which would
        # choose a window system; a Figure draws with Agg.
        from matplotlib.figure import Figure

        numbers = range(steps) if isinstance(steps, int | np.integer) else steps
        counts = np.asarray(list(numbers))
        if not counts.size:
            raise ValueError(f"a picture needs one step or more, got {steps!r}")
        figure = Figure(figsize=(6, 3), layout="constrained")
        axes = figure.subplots()
        axes.plot(counts, self.at(counts))
        axes.set(xlabel="step", title=self.name)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.name}({given})"


def _whole(steps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Returns steps as integers; None if one is between two."""
    counts: np.ndarray[Any, Any] = quietly(steps.astype, np.int64)
    return counts if np.array_equal(counts, steps) else None


def make(
    formula: Formula,
    constants: Mapping[str, Any],
    dtype: Any,
    name: str,
    arguments: Mapping[str, Any],
    then: Schedule | None = None,
) -> Schedule:
    """Makes a schedule.

    Args:
        formula: What is computed.
        constants: By name, in the formula's order; see `Schedule`.
        dtype: What is computed in.
        name: The public function that is called.
        arguments: What that was given: its `locals()`.
        then: What comes after a warm-up.

    Raises:
        TypeError: `global_step` is not a scalar variable or array.
    """
    step = arguments["x" if "x" in arguments else "global_step"]
    given = {key: value for key, value in arguments.items() if key != "name"}
    counter = checked_global_step(step)
    return Schedule(name, given, counter, formula, constants, np.dtype(dtype), then)
