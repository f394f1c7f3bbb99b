"""Arithmetic on a variable: on the array that it holds, or on what stands for it in a loss."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from numbers import Number
from typing import Any, TypeVar, cast

import numpy as np

from gpuopt.backends import array_types, gpu_backends, refuse_masked, to_device
from gpuopt.backends.foreign import is_foreign
from gpuopt.variables.gate import writing

_Left = TypeVar("_Left")
_Binary = Callable[[Any, Any], Any]

_nothing = nullcontext()

_WRITE_INTO_THE_FIRST = frozenset(
    (np.copyto, np.put, np.place, np.putmask, np.put_along_axis, np.fill_diagonal)
)


def value_of(operand: Any) -> Any:
    """Returns what a variable reads as, and anything else as it is."""
    return cast(Any, operand).value() if isinstance(operand, ArrayOperators) else operand


def storage_of(operand: Any) -> Any:
    """Returns a variable's own array, and anything else as it is."""
    return cast(Any, operand).storage if isinstance(operand, ArrayOperators) else operand


def as_constant(operand: Any) -> Any:
    """Returns a variable's own array, also in a loss, and anything else as it is.

    The current stream of a GPU waits for the variable's updates on other streams.
    """
    if isinstance(operand, ArrayOperators):
        cast(Any, operand).follow_updates()
    return storage_of(operand)


def reading(*operands: Any) -> AbstractContextManager[Any]:
    """Work inside reads the storage of the variables among the operands.

    It waits for their last updates on other streams, and their next updates wait for it.
    """
    return _reading(operands) if gpu_backends else _nothing


@contextmanager
def _reading(operands: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for operand in operands:
            if isinstance(operand, ArrayOperators):
                stack.enter_context(cast(Any, operand)._being_read())
        yield


def having_read(result: Any, *operands: Any) -> Any:
    """Returns a result; next updates of the variables among the operands wait until it is there."""
    if gpu_backends:
        # Not by `_operands_in`, which would take longer than all the rest.
        for operand in operands:
            if isinstance(operand, ArrayOperators):
                cast(Any, operand).note_reading()
            elif isinstance(operand, list | tuple):
                having_read(None, *operand)
    return result


def checked_foreign(operand: Any, variable: Any, what: str) -> Any:
    """Returns an operand of a write, brought to the variable's device if another library has it.

    Raises:
        TypeError: it is masked, or the library's array cannot be read.
    """
    refuse_masked(storage_of(operand), f'{what} for "{variable.name}"')
    if isinstance(operand, ArrayOperators) or type(operand) in array_types:
        return operand
    if not is_foreign(operand):
        return operand
    try:
        return to_device(operand, variable.memory)
    except TypeError as error:
        raise TypeError(f'{what} for "{variable.name}": {error}') from error


def operand_on_device(operand: Any, variable: Any) -> Any:
    """Returns an operand of a write to a variable, with arrays in place of Variables.

    If the variable is on a GPU, arrays and lists in host memory are copied there; numbers are not.
    """
    operand = storage_of(operand)
    if variable.memory.kind == "cpu":
        return operand
    if isinstance(operand, list | tuple):
        if any(hasattr(each, "shape") for each in operand):  # as for numpy.concatenate
            return type(operand)(operand_on_device(each, variable) for each in operand)
        operand = np.asarray(operand) if isinstance(operand, list) else operand
    return to_device(operand, variable.memory) if isinstance(operand, np.ndarray) else operand


def value_on_device(value: Any, variable: Any, dtype: Any = None) -> Any:
    """Returns a value written to a variable: an array where the variable is, or a number.

    Args:
        value: A Variable, an array, a number, or what `numpy.asarray` takes, as a list or a buffer.
        variable: What it is written to.
        dtype: Of the array, if the value is in host memory and the variable is on a GPU.

    Raises:
        TypeError: the value does not hold numbers.
    """
    value = storage_of(value)
    is_of_host = isinstance(value, np.ndarray) or not isinstance(value, (*array_types, Number))
    if variable.memory.kind == "cpu" or not is_of_host:
        return value
    array = np.asarray(value, dtype)
    if array.dtype.kind in "OSU":
        raise TypeError(
            f'the value for "{variable.name}" must hold numbers, got {type(value).__name__}'
        )
    return to_device(array, variable.memory)


def _make_operators(apply: _Binary) -> tuple[_Binary, _Binary]:
    """Makes `v + a` and `a + v`."""

    def from_left(self: Any, other: Any) -> Any:
        return having_read(apply(self.value(), value_of(other)), self, other)

    def from_right(self: Any, other: Any) -> Any:
        return having_read(apply(value_of(other), self.value()), self, other)

    return from_left, from_right


def _make_in_place(function: np.ufunc) -> Callable[[_Left, Any], _Left]:
    """Makes `v += a`; type checkers see that it is still a variable."""

    def into(self: _Left, other: Any) -> _Left:
        variable = cast(Any, self)
        other = checked_foreign(other, variable, "the operand")
        with writing(), reading(other), variable._writing(other):
            try:
                operand = value_on_device(other, variable)
                function(variable._array, operand, out=variable._array)
            except (TypeError, ValueError) as error:
                error.add_note(
                    f'Raised by an operation in place of "{variable.name}", which stays of shape '
                    f"{variable.shape} and dtype {variable.dtype}."
                )
                raise
        return self

    return into


def _make_comparison(apply: _Binary) -> _Binary:
    return _make_operators(apply)[0]


def _method(name: str) -> Callable[..., Any]:
    def call_on_value(self: Any, *args: Any, **options: Any) -> Any:
        return having_read(_call_with_values(getattr(self.value(), name), args, options), self)

    call_on_value.__name__ = name
    return call_on_value


def _make_unary(apply: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def apply_to_value(self: Any) -> Any:
        return having_read(apply(self.value()), self)

    return apply_to_value


class ArrayOperators:
    """Operators, numpy's functions and an array's methods, and torch's, for `Variable`."""

    __slots__ = ()

    __add__, __radd__ = _make_operators(operator.add)
    __sub__, __rsub__ = _make_operators(operator.sub)
    __mul__, __rmul__ = _make_operators(operator.mul)
    __truediv__, __rtruediv__ = _make_operators(operator.truediv)
    __floordiv__, __rfloordiv__ = _make_operators(operator.floordiv)
    __mod__, __rmod__ = _make_operators(operator.mod)
    __pow__, __rpow__ = _make_operators(operator.pow)
    __matmul__, __rmatmul__ = _make_operators(operator.matmul)
    __lt__, __le__ = _make_comparison(operator.lt), _make_comparison(operator.le)
    __gt__, __ge__ = _make_comparison(operator.gt), _make_comparison(operator.ge)
    __neg__, __pos__, __abs__ = (
        _make_unary(operator.neg),
        _make_unary(operator.pos),
        _make_unary(operator.abs),
    )

    sum, mean, prod, var, std = map(_method, ("sum", "mean", "prod", "var", "std"))
    max, min, argmax, argmin = map(_method, ("max", "min", "argmax", "argmin"))
    all, any, round, clip, cumsum = map(_method, ("all", "any", "round", "clip", "cumsum"))
    dot, trace, diagonal, take, repeat = map(
        _method, ("dot", "trace", "diagonal", "take", "repeat")
    )
    reshape, ravel, flatten, squeeze = map(_method, ("reshape", "ravel", "flatten", "squeeze"))
    transpose, swapaxes, astype = map(_method, ("transpose", "swapaxes", "astype"))
    copy = _method("copy")

    __iadd__, __isub__ = _make_in_place(np.add), _make_in_place(np.subtract)
    __imul__, __itruediv__ = _make_in_place(np.multiply), _make_in_place(np.true_divide)
    __ifloordiv__, __imod__ = _make_in_place(np.floor_divide), _make_in_place(np.remainder)
    __ipow__, __imatmul__ = _make_in_place(np.power), _make_in_place(np.matmul)

    def __format__(self, form: str) -> str:
        variable = cast(Any, self)
        if form and variable.ndim:
            raise TypeError(
                f'"{variable.name}" of shape {variable.shape} is no number, which the format '
                f'"{form}" is for; format its elements, or use np.array2string(v.numpy(), ...)'
            )
        return format(variable.numpy(), form) if form else str(self)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        called = getattr(ufunc, method)
        if method == "at":
            target, *others = inputs
            return _call_writing(called, [target], (target, *others), options)
        given = options.get("out")
        if given is None:
            return having_read(called(*map(value_of, inputs), **options), *inputs)
        result = _call_writing(called, given, inputs, options)
        return given[0] if len(given) == 1 and isinstance(given[0], ArrayOperators) else result

    def __array_function__(
        self, function: Any, types: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        if function in _WRITE_INTO_THE_FIRST:
            if not args:  # as in np.copyto(dst=v, src=w)
                name = next(each for each in ("dst", "arr", "a") if each in options)
                args, options = (options[name],), {**options}
                del options[name]
            target, *others = args
            return _call_writing(function, [target], (target, *others), options)
        out = options.get("out")
        if isinstance(out, ArrayOperators):
            return _call_writing(function, [out], args, options)
        return _call_with_values(function, args, options)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        return _call_with_values(function, args, options or {})


def _call_with_values(function: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    values = {name: _read_variables(option) for name, option in options.items()}
    return having_read(function(*map(_read_variables, args), **values), args, *options.values())


def _call_writing(
    function: Any, written: Sequence[Any], args: Sequence[Any], options: dict[str, Any]
) -> Any:
    """Calls a function that writes into the variables among `written`."""
    for operand in args:
        refuse_masked(operand, "an operand of what is written to a variable")
    operands = [*args, *options.values()]
    with writing(), reading(*_operands_in(operands)), ExitStack() as updates:
        for operand in written:
            if isinstance(operand, ArrayOperators):
                updates.enter_context(cast(Any, operand)._writing(*operands))
                args = [operand_on_device(value_of(each), operand) for each in args]
                options = {
                    name: each if name == "out" else operand_on_device(each, operand)
                    for name, each in options.items()
                }
        return _call_with_values(function, args, options)


def _operands_in(args: Sequence[Any]) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, list | tuple):
            yield from _operands_in(arg)
        else:
            yield arg


def _read_variables(operand: Any) -> Any:
    """Replaces variables by what they read as, also in lists, as in `numpy.concatenate([v, w])`."""
    if isinstance(operand, list | tuple):
        return type(operand)(map(_read_variables, operand))
    return value_of(operand)
