"""Moving averages of variables."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from gpuopt import environment
from gpuopt.backends import to_device
from gpuopt.backends.backend import compute_type
from gpuopt.device import Device
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.interrupts import interrupts_put_off
from gpuopt.locks import Lock
from gpuopt.state.state import new_slot_variable
from gpuopt.step.averages import AverageWeights, MovingAverages
from gpuopt.training.average_updates import AverageUpdates
from gpuopt.training.function_averages import FunctionAverages, correct, name_of
from gpuopt.variables.copied import Copied, Copy, describe_lost, to_copy, variable_of
from gpuopt.variables.gate import writing
from gpuopt.variables.identity import Identity
from gpuopt.variables.names import unique_name
from gpuopt.variables.operators import reading, storage_of
from gpuopt.variables.scalars import as_scalar, check_bool
from gpuopt.variables.unfinished import refuse_unfinished
from gpuopt.variables.variable import (
    FLOAT_DTYPES,
    Variable,
    as_variable,
    checked_list,
    global_variables,
    known_identity,
    require_known_owner,
    trainable_variables,
)


class ExponentialMovingAverage(MovingAverages):
    """Keeps an exponentially decaying average of each variable, for use in evaluation.

        average -= (1 - decay) * (average - value)

    The average of a variable is a second variable, its "shadow", on the same device. It is named
    `<variable>/<name>` and starts at the variable's value. It is float32 for a variable of 16 bits,
    in which it would stand still, and else of the variable's type. In place of a plain tensor,
    gpuopt takes a function without arguments: each `apply` calls it, and the average of its values
    starts at zero. The average goes when the function does, so make the function once, before the
    loop.
    """

    def __init__(
        self,
        decay: float,
        num_updates: Any = None,
        zero_debias: bool = False,
        name: str = "ExponentialMovingAverage",
    ) -> None:
        """Keeps the settings.

        Args:
            decay: The weight of the old average in each `apply`, from 0 to 1: slightly below 1.
            num_updates: The number of training steps so far: a number, or a scalar variable that
                each `apply` reads. The decay is then at most
                `(1 + num_updates) / (10 + num_updates)`, so that averages follow faster at the
                beginning.
            zero_debias: Correct the averages of functions for their start at zero (Kingma & Ba
                2015, section 3). Averages of variables do not start at zero and need no correction.
            name: The last part of the shadow variables' names.

        Raises:
            TypeError: `decay` or `num_updates` is no scalar number, `zero_debias` is neither True
                nor False, or `name` is no text.
            ValueError: `decay` is not from 0 to 1, or `num_updates` is a number below 0, or not
                finite. TensorFlow takes these, and computes what is no average.
        """
        environment.settings()
        _check_decay(decay)
        _check_num_updates(num_updates)
        check_bool(zero_debias, "zero_debias")
        if not isinstance(name, str):
            raise TypeError(f"name must be a text, got {name!r}")
        self._decay = decay
        self._num_updates = num_updates
        self._zero_debias = zero_debias
        self._name = name
        self.version = 0
        self._averages: WeakKeyDictionary[Identity, Variable] = WeakKeyDictionary()
        # Of a copy: averages by the names of the variables that those they belong to are copies of,
        # until its first use; and then, of variables that are gone, those that wait for others.
        self._expected: dict[str, tuple[Copy, Variable]] = {}
        self._waiting: dict[str, Variable] = {}
        self._making = Lock("the making of moving averages")
        self._of_functions = FunctionAverages(name, zero_debias)
        self._updates = AverageUpdates()

    @property
    def name(self) -> str:
        return self._name

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies the averages with their variables; functions have none in a copy.

        Copied together with its variables, it continues with the copies; copied alone, with
        variables of their names, once they are tracked. Raw arrays are pickled with it.

        Raises:
            TypeError: it keeps averages of functions.
            ValueError: it keeps that of a view of an array, and the program does not keep the view.
        """
        refuse_unfinished("copied", [average.identity for _, average in self._made()])
        if len(self._of_functions):
            raise TypeError(
                f"{type(self).__name__} cannot be copied or pickled: it keeps averages of "
                "functions, which a copy would not know. Make another one for the functions"
            )
        kept = []
        for identity, average in self._made():
            rows: int | None = None
            while rows != identity.row_change:  # again if another thread changes rows meanwhile
                rows = identity.row_change
                owner, value = to_copy(identity), average.numpy()
            if owner is not None:
                kept.append((identity.name, owner, value))
        given = self._decay, self._num_updates, self._zero_debias, self._name
        return _make_again, (type(self), given, kept)

    def __repr__(self) -> str:
        given = {"decay": self._decay, "num_updates": self._num_updates, "name": self._name}
        settings = [f"{name}={value!r}" for name, value in given.items() if value is not None]
        return f"ExponentialMovingAverage({', '.join(settings)})"

    def apply(self, var_list: Iterable[Any] | None = None) -> None:
        """Moves the averages towards the current values; call it after each training step.

        Ctrl-C is raised when all have moved; a second one ends it at once.

        Args:
            var_list: A list of variables, arrays, or functions without arguments that return an
                array; by default `trainable_variables()`. The first call makes the shadow
                variables.

        Raises:
            TypeError: a value is not floating point, or masked, or `var_list` is no list; no
                average has been changed.
            ValueError: a raw array's average would be lost (see `gpuopt.Variable(array,
                copy=False)`), or a function returns another shape than before; no average has been
                changed.
        """
        tracked = _tracked(var_list)
        values = [self._read_value(source) for source in tracked]
        decay = self.decay_now()

        def move() -> None:
            averages, of_functions = [], []
            for source, value in zip(tracked, values, strict=True):
                if callable(source):
                    of_functions.append(self._of_functions.find_or_make(source, value))
                    averages.append(of_functions[-1].biased)
                else:
                    averages.append(self._shadow(as_variable(source)))
            self._updates.move(averages, values, AverageWeights([1 - decay]))
            correct(self._updates, of_functions, 1 - decay)

        # The gate, so that a checkpoint holds all old averages, or all new ones.
        later = interrupts_put_off(waits_for_begin=True)
        with later, writing():
            later.begin()
            ignore_fp_warnings(move)

    def start(self, variables: Sequence[Variable], values: Sequence[Variable]) -> list[Variable]:
        """Does what `track` does, as a part of a step; see `MovingAverages`."""
        made: list[Variable] = []
        for variable, value in zip(variables, values, strict=True):
            self._read_value(variable)
            self._shadow(variable, made, value)
        return made

    def move(
        self, variables: Sequence[Variable], values: Sequence[Variable], weights: AverageWeights
    ) -> None:
        """Does what `apply` does, as a part of a step; see `MovingAverages`."""

        def move() -> None:
            averages = [self._shadow(variable) for variable in variables]
            self._updates.move(averages, values, weights)

        ignore_fp_warnings(move)

    def track(self, var_list: Iterable[Any] | None = None) -> list[Variable]:
        """Makes the averages that are missing, from the current values; changes no other average.

        Without this call, the first `apply` makes them, from the values after the training step.

        Args:
            var_list: As in `apply`.

        Returns:
            The averages of variables that it has made.
        """
        made: list[Variable] = []
        tracked = _tracked(var_list)
        values = [self._read_value(source) for source in tracked]
        for source, value in zip(tracked, values, strict=True):
            if callable(source):
                self._of_functions.find_or_make(source, value)
            else:
                self._shadow(as_variable(source), made)
        return made

    def forget(self, averages: Iterable[Variable]) -> None:
        """Drops averages of variables: `track` or `apply` makes new ones."""
        dropped = set(averages)
        with self._making:
            for identity, average in self._made():
                if average in dropped:
                    del self._averages[identity]
                    self.version += 1

    def averages_of_variables(self) -> list[Variable]:
        """Lists the averages of variables made so far, in order of creation."""
        return sorted((average for _, average in self._made()), key=Variable.serial)

    def average(self, var: Any) -> Variable | None:
        """Returns the variable that holds the average of `var`, or None before `apply`."""
        if callable(var):
            found = self._of_functions.find(var)
            return None if found is None else found.average
        return self._averages.get(as_variable(var).identity)

    def average_name(self, var: Any) -> str:
        """Returns the name of the average of `var`; before `apply`, the name that it will get."""
        average = self.average(var)
        if average is not None:
            return average.name
        name = name_of(var) if callable(var) else as_variable(var).name
        return unique_name(f"{name}/{self._name}")

    def variables_to_restore(
        self, moving_avg_variables: Iterable[Variable] | None = None
    ) -> dict[str, Variable]:
        """Maps names in a checkpoint to variables, so that a restore loads averages as weights.

        Args:
            moving_avg_variables: The variables to load from their averages; by default the
                trainable variables and those that have an average.

        Returns:
            These variables by the names of their averages, and all others by their own names.
        """
        everything = global_variables()
        if moving_avg_variables is None:
            averaged = [v for v in everything if v.trainable or v.identity in self._averages]
        else:
            averaged = list(moving_avg_variables)
        names = {self.average_name(variable): variable for variable in averaged}
        skipped = {variable.name for variable in averaged} | set(names)
        names.update((v.name, v) for v in everything if v.name not in skipped)
        return names

    def decay_now(self, counter: Variable | None = None) -> np.floating[Any]:
        """Returns the weight of old averages; see `MovingAverages`.

        Raises:
            ValueError: `decay` is an array or a variable, and not from 0 to 1 any more; or averages
                of arrays were unpickled without these.
        """
        if self._expected:  # before a step writes anything
            self._settle_expected()
        if not _is_number(self._decay):
            _check_decay(self._decay)
        decay = np.float32(self._decay)
        if self._num_updates is None:
            return decay
        with reading(self._num_updates):
            counted = to_device(storage_of(self._num_updates), Device.cpu)
        if counter is not None and _is_same(self._num_updates, counter):
            counted = counted + 1
        updates = np.float32(counted)
        return min(decay, (1 + updates) / (10 + updates))

    def follows(self, counter: Variable | None) -> bool:
        """Whether `decay_now` is known for any value of a counter; see `MovingAverages`."""
        if type(self).decay_now is not ExponentialMovingAverage.decay_now:
            return False
        if not _is_number(self._decay):
            return False
        number = self._num_updates
        is_number = number is None or _is_number(number)
        return is_number or (counter is not None and _is_same(number, counter))

    def _made(self) -> list[tuple[Identity, Variable]]:
        # At once: other threads make and drop variables meanwhile.
        identities = [reference() for reference in self._averages.keyrefs()]
        found = [(each, self._averages.get(each)) for each in identities if each is not None]
        return [(identity, average) for identity, average in found if average is not None]

    def _read_value(self, source: Any) -> Any:
        if callable(source):
            value, name = self._of_functions.read(source), name_of(source)
        else:
            variable = as_variable(source)
            require_known_owner(variable)
            value, name = variable, variable.name
        if value.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f'The variables must be half, float, or double: "{name}" has dtype {value.dtype}'
            )
        return value

    def _shadow(
        self,
        variable: Variable,
        made: list[Variable] | None = None,
        value: Variable | None = None,
    ) -> Variable:
        """Returns the average of a variable; if it must be made, it is added to `made`.

        Args:
            variable: What the average belongs to.
            made: The averages that were made so far.
            value: What a new one starts with; None for the variable.
        """
        if self._expected:
            self._settle_expected()
        shadow = self._averages.get(variable.identity)
        if shadow is not None:
            return shadow
        # The gate, so that the variable's rows do not change meanwhile.
        with writing(), self._making:
            shadow = self._averages.get(variable.identity)
            if shadow is None:
                first = variable if value is None else value
                # In 16 bits, moves of less than half a last digit would be lost.
                dtype = np.dtype(compute_type(variable.dtype))
                with reading(first):
                    start = first.storage
                    waiting = self._waiting.pop(variable.name, None)
                    if waiting is not None and waiting.shape == variable.shape:
                        start = waiting.numpy()
                    shadow = new_slot_variable(
                        variable, self._name, start, "value", variable.shape, dtype
                    )
                shadow.is_average = True
                self._averages[variable.identity] = shadow
                if made is not None:
                    made.append(shadow)
            return shadow

    def _settle_expected(self) -> None:
        """Ends what a copy began: averages belong to the variables that are there now."""
        with self._making:
            gone = {n: each for n, each in self._expected.items() if not each[0].is_kept()}
            lost = [name for name, (copied, _) in gone.items() if copied.name_of_other() is None]
            if lost and len(gone) == len(self._expected):
                raise ValueError(describe_lost(f'the averages "{self._name}"', lost))
            waiting = {copied.name_of_other(): average for copied, average in gone.values()}
            self._waiting = {name: each for name, each in waiting.items() if name is not None}
            self._expected = {}


def _make_again(
    cls: type[ExponentialMovingAverage],
    given: tuple[Any, ...],
    *rest: Any,
) -> ExponentialMovingAverage:
    """Makes what was pickled; before the last argument, other versions have one that says types."""
    kept: Iterable[tuple[str, Copied, Any]] = rest[-1]
    made = cls(*given)
    expected = {}
    for name, owner, value in kept:
        average = made._shadow(variable_of(owner))
        average.assign(value)
        expected[name] = Copy(name, owner), average
    made._expected = expected
    return made


def _tracked(var_list: Iterable[Any] | None) -> list[Any]:
    return trainable_variables() if var_list is None else checked_list(var_list, "var_list")


def _is_number(value: Any) -> bool:
    """Whether it cannot change, as an array and a variable can."""
    return isinstance(value, numbers.Real)


def _check_decay(decay: Any) -> None:
    """Raises TypeError or ValueError unless it is a number from 0 to 1, or an array of one."""
    try:
        number = as_scalar(decay, "decay")
    except TypeError as error:
        raise TypeError(f"decay must be a number from 0 to 1, got {decay!r}") from error
    # All of its digits, and not those of float32 alone.
    if not 0 <= (decay if _is_number(decay) else number) <= 1:
        raise ValueError(f"decay must be from 0 to 1, got {decay!s}")


def _check_num_updates(num_updates: Any) -> None:
    """Raises TypeError or ValueError unless it counts updates: None for not at all."""
    if num_updates is None:
        return
    array = storage_of(num_updates)
    if not hasattr(array, "dtype"):
        array = np.asarray(array)
    if array.shape != () or array.dtype.kind not in "iuf":
        raise TypeError(f"num_updates must be a scalar number, got {num_updates!r}")
    if _is_number(num_updates) and not 0 <= num_updates < math.inf:
        raise ValueError(f"num_updates must be from 0, and finite, got {num_updates!s}")


def _is_same(value: Any, variable: Variable) -> bool:
    """Whether a number, an array or a variable is this variable."""
    return hasattr(value, "dtype") and known_identity(value) is variable.identity
