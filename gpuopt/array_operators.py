"""Arithmetic on a variable: on the array that it holds, or on what stands for it in a loss."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import numpy as np

_Binary = Callable[[Any, Any], Any]


def value_of(operand: Any) -> Any:
    """Returns what a variable reads as, and anything else as it is."""
    return cast(Any, operand).value() if isinstance(operand, ArrayOperators) else operand


def storage_of(operand: Any) -> Any:
    """Returns a variable's own array, and anything else as it is."""
    return cast(Any, operand).storage if isinstance(operand, ArrayOperators) else operand


def _operators(apply: _Binary, in_place: np.ufunc) -> tuple[_Binary, _Binary, _Binary]:
    """Makes `a + v`'s three forms: from the left, from the right, and in place."""

    def from_left(self: Any, other: Any) -> Any:
        return apply(self.value(), value_of(other))

    def from_right(self: Any, other: Any) -> Any:
        return apply(value_of(other), self.value())

    def into(self: Any, other: Any) -> Any:
        other = storage_of(other)
        with self._writing():
            in_place(self._array, other, out=self._array)
        return self

    return from_left, from_right, into


def _comparison(apply: _Binary) -> _Binary:
    return _operators(apply, np.less)[0]


def _unary(apply: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def applied(self: Any) -> Any:
        return apply(self.value())

    return applied


class ArrayOperators:
    """Operators, numpy's functions, and torch's, for `Variable`."""

    __slots__ = ()

    __add__, __radd__, __iadd__ = _operators(operator.add, np.add)
    __sub__, __rsub__, __isub__ = _operators(operator.sub, np.subtract)
    __mul__, __rmul__, __imul__ = _operators(operator.mul, np.multiply)
    __truediv__, __rtruediv__, __itruediv__ = _operators(operator.truediv, np.true_divide)
    __floordiv__, __rfloordiv__, __ifloordiv__ = _operators(operator.floordiv, np.floor_divide)
    __mod__, __rmod__, __imod__ = _operators(operator.mod, np.remainder)
    __pow__, __rpow__, __ipow__ = _operators(operator.pow, np.power)
    __matmul__, __rmatmul__, __imatmul__ = _operators(operator.matmul, np.matmul)
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)
    __neg__, __pos__, __abs__ = _unary(operator.neg), _unary(operator.pos), _unary(operator.abs)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        given = options.get("out")
        if given is not None:
            options["out"] = tuple(map(storage_of, given))
        result = getattr(ufunc, method)(*map(value_of, inputs), **options)
        in_place = given is not None and len(given) == 1 and isinstance(given[0], ArrayOperators)
        return given[0] if given is not None and in_place else result

    def __array_function__(
        self, function: Any, types: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        return _called(function, args, options)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        return _called(function, args, options or {})


def _called(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return function(*map(_values_in, args), **{k: _values_in(v) for k, v in options.items()})


def _values_in(operand: Any) -> Any:
    """Replaces variables, also in lists, as in `numpy.concatenate([v, w])`."""
    if isinstance(operand, list | tuple):
        return type(operand)(map(_values_in, operand))
    return value_of(operand)
