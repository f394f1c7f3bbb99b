"""A rule's numpy calls, as it makes them on stand-ins for its arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

import numpy as np

from gpuopt.backends.cpu.forms.scalar_of_groups import GroupsDiffer, ScalarOfGroups
from gpuopt.quietly import quietly
from gpuopt.rules.update_rule import UpdateRule

# Beside ufuncs, those that take arrays wherever they take scalars.
_BY_ELEMENT_OF_ALL = (np.clip, np.where)


class _Call(NamedTuple):
    """One recorded call. Operands and result are positions among the values of the recording.

    Attributes:
        function: A ufunc, or another of numpy's functions that work element by element; its last
            argument is where the result goes.
        operands: Of the other arguments.
        result: Where the result goes.
        options: Names and values of keyword arguments.
    """

    function: Callable[..., Any]
    operands: tuple[int, ...]
    result: int
    options: tuple[tuple[str, Any], ...]


class Plan(NamedTuple):
    """How a recording is replayed; the same for all recordings that differ in their constants.

    Attributes:
        calls: What is called, what chooses its arguments among all arrays, and keyword arguments.
        scratch_dtypes: The types of the scratch arrays that the calls use.
    """

    calls: Sequence[tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]]
    scratch_dtypes: tuple[np.dtype[Any], ...]


class Recording(NamedTuple):
    """What a rule does, for the scalars that it was recorded with.

    Attributes:
        plan: The calls.
        constants: The last of the arrays among which the plan chooses: numbers, and a
            `ScalarOfGroups` where groups have numbers of their own.
    """

    plan: Plan
    constants: Sequence[Any]


def record(
    rule: UpdateRule, real: np.dtype[Any], scalars: Mapping[str, Any], *, zero_grad: bool
) -> Recording:
    """Runs a rule once, on stand-ins for chunks that record the calls made on them.

    Arithmetic among scalars is done then.

    Args:
        rule: What to compute.
        real: The type of all chunks.
        scalars: The rule's scalars by name, of that type; a `ScalarOfGroups` has those of several
            groups.
        zero_grad: The gradient is zero everywhere, and not among the arrays.

    Raises:
        TypeError: the rule is not arithmetic on elements, or writes to the gradient.
        GroupsDiffer: it asks more of a `ScalarOfGroups` than arithmetic.
    """
    tape = _Tape(rule.name)
    var, *slots = [tape.new_value(real) for _ in ("var", *rule.slots)]
    grad = real.type(0) if zero_grad else tape.new_value(real, read_only=True)
    quietly(lambda: rule.apply(var, grad, *slots, **scalars))
    plan = tape.plan(2 + len(slots) - zero_grad)
    # Their positions count from the end.
    return Recording(plan, tape.constants[::-1])


class _Value(np.lib.mixins.NDArrayOperatorsMixin):
    """Stands for a chunk, or for what was computed from chunks, while a rule is recorded."""

    def __init__(self, tape: _Tape, position: int, dtype: np.dtype[Any], read_only: bool) -> None:
        self.tape, self.position, self.dtype, self.read_only = tape, position, dtype, read_only

    def __repr__(self) -> str:
        return "an array"

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any
    ) -> Any:
        if method != "__call__" or ufunc.nout != 1:
            self.tape.refuse(f"np.{ufunc.__name__}.{method}")
        return self.tape.record(ufunc, inputs, None if out is None else out[0], options)

    def __array_function__(
        self, function: Any, types: Any, inputs: Sequence[Any], options: dict[str, Any]
    ) -> Any:
        others = {name: value for name, value in options.items() if name != "out"}
        return self.tape.record(function, inputs, options.get("out"), others)

    def __pow__(self, exponent: Any) -> Any:
        # numpy's arrays do the same: a root and a square are much faster than a power.
        if np.ndim(exponent) == 0 and exponent in (0.5, 2):
            return np.sqrt(self) if exponent == 0.5 else np.square(self)
        return np.power(self, exponent)

    def __setitem__(self, key: Any, value: Any) -> None:
        if key is not Ellipsis:
            self.tape.refuse(f"array[{key!r}] = ...")
        self.tape.record_assignment(self, value)

    def __getitem__(self, key: Any) -> Any:
        self.tape.refuse(f"array[{key!r}]")

    def __bool__(self) -> bool:
        self.tape.refuse("a decision by an array's values")

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        self.tape.refuse("a conversion to another array")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.tape.refuse(f"array.{name}")


class _Tape:
    """A recording: values by position, the rule's arguments first, and the calls."""

    def __init__(self, rule_name: str) -> None:
        self.constants: list[Any] = []
        self._rule_name = rule_name
        self._dtypes: list[np.dtype[Any]] = []
        self._calls: list[_Call] = []

    def new_value(self, dtype: np.dtype[Any], read_only: bool = False) -> _Value:
        self._dtypes.append(dtype)
        return _Value(self, len(self._dtypes) - 1, dtype, read_only)

    def record(
        self, function: Any, inputs: Sequence[Any], out: Any, options: dict[str, Any]
    ) -> Any:
        """Records a call and returns the value that stands for its result."""
        if options and any(isinstance(x, _Value | np.ndarray | list) for x in options.values()):
            self.refuse(f"np.{function.__name__} with an array as a keyword argument")
        if out is None and not options.get("where", True):  # numpy leaves what was in memory
            self.refuse(f"np.{function.__name__} with where=False and without out=")
        is_ufunc = isinstance(function, np.ufunc)
        if options or not is_ufunc:
            _refuse_groups(function, inputs, options)
        self._refuse_arrays(function.__name__, inputs)
        examples = [_example(x.dtype) if isinstance(x, _Value) else _number(x) for x in inputs]
        only_scalars = not any(isinstance(x, _Value) for x in inputs)
        operands = self._operands(inputs, function if is_ufunc and not options else None)
        example = function(*examples, **options)
        is_known = only_scalars or is_ufunc
        if np.shape(example) != (() if only_scalars else (2,)) or not (
            is_known or _is_by_element(function, inputs, options)
        ):
            self.refuse(f"np.{function.__name__}")
        if out is None and not only_scalars:
            out = self.new_value(example.dtype)
        elif not isinstance(out, _Value) or not np.can_cast(example.dtype, out.dtype, "same_kind"):
            self.refuse(f"np.{function.__name__} of type {example.dtype} in place")
        elif out.read_only:
            self.refuse("writing to the gradient")
        call = _Call(_with_out(function), tuple(operands), out.position, tuple(options.items()))
        self._calls.append(call)
        return out

    def record_assignment(self, out: _Value, value: Any) -> None:
        """Records `out[...] = value`, which converts any type, as in numpy."""
        self._refuse_arrays("an assignment", [value])
        if out.read_only:
            self.refuse("writing to the gradient")
        self._calls.append(_Call(_assign, tuple(self._operands([value])), out.position, ()))

    def _refuse_arrays(self, what: str, inputs: Sequence[Any]) -> None:
        """Refuses arrays other than chunks: their length would have to be the variable's."""
        if any(np.size(x) != 1 for x in inputs if isinstance(x, np.ndarray | list | tuple)):
            self.refuse(f"{what} with an array that is none of its own")

    def _operands(self, inputs: Sequence[Any], ufunc: np.ufunc | None = None) -> list[int]:
        """Returns the positions of a call's operands; those of constants count down from -1.

        Args:
            inputs: The operands.
            ufunc: The function that is called, if it is a ufunc without options. Then Python's
                numbers are converted here, once, to the type in which the ufunc computes.
        """
        of_numbers: Sequence[Any] = [None] * len(inputs)
        if ufunc is not None and any(type(x) in (int, float) for x in inputs):
            of_numbers = ufunc.resolve_dtypes((*map(_type_of, inputs), *[None] * ufunc.nout))
        operands = []
        for x, dtype in zip(inputs, of_numbers, strict=False):
            if isinstance(x, _Value):
                operands.append(x.position)
                continue
            if type(x) in (int, float) and dtype is not None:
                x = dtype.type(x)
            # Ufuncs take arrays without dimensions faster than scalars.
            self.constants.append(np.asarray(x) if isinstance(x, np.generic) else x)
            operands.append(-len(self.constants))
        return operands

    def plan(self, num_arguments: int) -> Plan:
        """Plans the calls of a rule that has so many arrays as arguments."""
        return _plan(tuple(self._calls), tuple(self._dtypes), num_arguments)

    def refuse(self, what: str) -> NoReturn:
        raise TypeError(
            f"{self._rule_name}: an update rule is arithmetic on the elements of equally long "
            f"arrays; it cannot do this: {what}"
        )


def _assign(value: Any, out: np.ndarray[Any, Any]) -> None:
    out[...] = value


def _type_of(operand: Any) -> Any:
    """Returns an operand's type, as numpy resolves types by it."""
    if type(operand) in (int, float):
        return type(operand)
    values = operand.values if isinstance(operand, ScalarOfGroups) else operand
    return values.dtype if hasattr(values, "dtype") else np.asarray(values).dtype


@cache
def _example(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Two elements are enough to learn a result's type by numpy's own rules."""
    return np.ones(2, dtype)


def _number(scalar: Any) -> Any:
    """Returns a scalar as one group has it."""
    return scalar.values[0] if isinstance(scalar, ScalarOfGroups) else scalar


def _refuse_groups(function: Any, inputs: Sequence[Any], options: dict[str, Any]) -> None:
    """Raises GroupsDiffer if a function may take an array for something else than many scalars."""
    at_risk = [] if function in _BY_ELEMENT_OF_ALL else list(inputs)
    if any(isinstance(x, ScalarOfGroups) for x in (*at_risk, *options.values())):
        raise GroupsDiffer


def _is_by_element(function: Any, inputs: Sequence[Any], options: dict[str, Any]) -> bool:
    """Whether elements of the result depend on the same elements of arrays, and on no others."""

    def call_with(*elements: int) -> Any:
        given = [
            np.array(elements, x.dtype) if isinstance(x, _Value) else _number(x) for x in inputs
        ]
        return function(*given, **options)

    alone = np.stack([call_with(1, 1)[:1], call_with(0, 0)[1:]]).reshape(-1)
    return np.array_equal(call_with(1, 0), alone, equal_nan=True)


# The same in each step, while scalars change.
@lru_cache(maxsize=256)
def _plan(calls: tuple[_Call, ...], dtypes: tuple[np.dtype[Any], ...], num_arguments: int) -> Plan:
    """Replaces positions of values by those of arrays: arguments, scratch, constants.

    A value gets a scratch array from its first call to its last.

    Args:
        calls: As they were recorded.
        dtypes: Of all values.
        num_arguments: How many arrays the rule is given.
    """
    calls = _without_copies(calls, dtypes, num_arguments)
    last = {at: i for i, call in enumerate(calls) for at in (*call.operands, call.result)}
    scratch: list[np.dtype[Any]] = []
    idle: list[int] = []
    array_of = {at: at for at in range(num_arguments)}
    planned = []
    for i, call in enumerate(calls):
        operands = [array_of.get(at, at) for at in call.operands]
        # An operand that is not needed again may be overwritten by the result.
        ending = {at for at in (*call.operands, call.result) if last[at] == i}
        idle += [array_of[at] for at in ending if at >= num_arguments and at in array_of]
        if call.result not in array_of:
            dtype = dtypes[call.result]
            fitting = [at for at in idle if scratch[at - num_arguments] == dtype]
            if fitting:
                idle.remove(fitting[-1])
            else:
                scratch.append(dtype)
            array_of[call.result] = fitting[-1] if fitting else num_arguments + len(scratch) - 1
        arguments_in = itemgetter(*operands, array_of[call.result])
        planned.append((call.function, arguments_in, dict(call.options)))
    return Plan(planned, tuple(scratch))


def _without_copies(
    calls: Sequence[_Call], dtypes: Sequence[np.dtype[Any]], num_arguments: int
) -> tuple[_Call, ...]:
    """Has a call write to `array` itself where `array[...] = result` follows the call."""
    uses = Counter(at for call in calls for at in (*call.operands, call.result))
    left: list[_Call] = []
    for call in calls:
        computed = left[-1].result if left else -1
        if (
            call.function is _assign
            and call.operands == (computed,)
            and computed >= num_arguments
            and uses[computed] == 2
            and dtypes[computed] == dtypes[call.result]
        ):
            left[-1] = left[-1]._replace(result=call.result)
        else:
            left.append(call)
    return tuple(left)


@cache
def _with_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that puts its result into its last argument."""
    has_out = isinstance(function, np.ufunc) or function is np.clip
    # By position it is quickest; numpy deprecates that for these two alone.
    if has_out and function not in (np.maximum, np.minimum):
        return function

    def into_last(*arguments: Any, **options: Any) -> None:
        *operands, out = arguments
        if has_out:
            function(*operands, out=out, **options)
        else:
            np.copyto(out, function(*operands, **options))

    return into_last
