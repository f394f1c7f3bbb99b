"""Schedule: a hyperparameter that follows the global step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.rules.schedule_formulas import Formula
from gpuopt.step.step import checked_global_step
from gpuopt.step.step_numbers import FollowsSteps
from gpuopt.variables.variable import Variable

# More steps than a training makes.
_LAST_STEP = 2**31 - 1

# Of a picture: more than it has pixels from left to right.
_MOST_POINTS = 1001


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
        return np.asarray(ignore_fp_warnings(self._values, counts[()]), self.dtype)[()]

    def _values(self, counts: Any) -> Any:
        values = self.formula(counts.astype(self.dtype), counts, **self.constants)
        if self.then is None:
            return values
        after = counts - np.int64(self.constants["warmup_steps"])
        if np.all(after < 0):
            return values
        return np.where(after < 0, values, self.then._values(np.maximum(after, 0)))

    def plot(self, steps: int | Iterable[int] | None = None, path: Any = None) -> Any:
        """Draws the values into a picture.

        Args:
            steps: How many steps from 0 on, at least one; or which ones. By default it draws a
                tenth more than the decay, the first cycle, or the steps up to the last boundary.
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

        if steps is None:
            steps = self._steps_to_draw()
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

    def _steps_to_draw(self) -> Any:
        last = min(max(1.1 * self._end(), 1), _LAST_STEP)
        return np.unique(np.linspace(0, last, _MOST_POINTS).astype(np.int64))

    def _end(self) -> float:
        """Returns the step at which a decay or a first cycle ends, or that of the last boundary."""
        numbers = self.constants
        if "total_steps" in numbers:
            return float(numbers["total_steps"])
        own = sum(float(each) for name, each in numbers.items() if name.endswith("_steps"))
        last = float(max(numbers.get("boundaries", ()), default=0))
        return own + last + (0 if self.then is None else self.then._end())

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.name}({given})"


def _whole(steps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Returns steps as integers; None if one is between two."""
    counts: np.ndarray[Any, Any] = ignore_fp_warnings(steps.astype, np.int64)
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
        ValueError: the value is NaN or infinite at a step below 2**31.
    """
    step = arguments["x" if "x" in arguments else "global_step"]
    given = {key: value for key, value in arguments.items() if key != "name"}
    counter = checked_global_step(step)
    made = Schedule(name, given, counter, formula, constants, np.dtype(dtype), then)
    _check_values(made)
    return made


def _check_values(schedule: Schedule) -> None:
    """Computes what a schedule will, up to 2**31 steps.

    All steps at first, then four in each octave, and those at which a formula may change or divide
    by 0: they are constants, or quotients of constants, such as `first_decay_steps / (1 - t_mul)`.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    numbers = [abs(float(each)) for each in schedule.constants.values() if np.ndim(each) == 0]
    divisors = np.array([1.0, *numbers, *(abs(1 - each) for each in numbers)])
    octaves = np.outer(2.0 ** np.arange(8, 31), [1.0, 1.25, 1.5, 1.75]).ravel()
    marks = ignore_fp_warnings(np.divide.outer, np.array(numbers), divisors[divisors > 0]).ravel()
    marks = marks[marks < _LAST_STEP]
    steps = np.unique([*range(256), *octaves, _LAST_STEP, *np.floor(marks), *np.ceil(marks)])
    values = schedule.at(steps)
    wrong = np.flatnonzero(~np.isfinite(values))
    if wrong.size:
        first = wrong[0]
        raise ValueError(f"{schedule!r} would be {values[first]} at step {int(steps[first])}")
