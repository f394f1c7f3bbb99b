"""The table of derivatives, and the arguments that each derivative supports."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np
from autograd.core import VJPNode, primitive_vjps
from autograd.tracer import notrace_primitives

# Called with (result, *arguments of the function), it returns what turns a gradient by the result
# into the gradient by one of the arguments.
MakeVjp = Callable[..., Callable[[Any], Any]]
# Called with (positions of the arguments to differentiate by, result, arguments, options).
MakeVjps = Callable[
    [tuple[int, ...], Any, tuple[Any, ...], Mapping[str, Any]], Callable[[Any], Iterable[Any]]
]

_INSTEAD = {
    "out": "use what the function returns, as in `a = a + b` instead of `a += b`",
    "where": "choose elements with numpy.where",
    "dtype": "convert with astype",
    "a_min": "use numpy.maximum",
    "a_max": "use numpy.minimum",
    "min": "use numpy.maximum",
    "max": "use numpy.minimum",
    "full_matrices": "pass full_matrices=False",
}
# In numpy 2.0, Python cannot tell the signature of a ufunc.
_UFUNC_DEFAULTS = {
    "out": None,
    "where": True,
    "casting": "same_kind",
    "order": "K",
    "dtype": None,
    "subok": True,
}
_OTHERWISE = "leave it out, or write the formula with operators"


class _Known(NamedTuple):
    """How a loss treats a function, and the arguments that it honours.

    Attributes:
        call: Makes the derivative of a call; or computes the function by calls of others.
        most: How many arguments may be given by position.
        names: Of all arguments that may be given.
    """

    call: Callable[..., Any]
    most: float
    names: frozenset[str]

    def honours(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
        return len(args) <= self.most and (not options or self.names.issuperset(options))


# The key is autograd's wrapper of the function. autograd's own table is read, and never written.
_derivatives: dict[Any, _Known] = {}
# The key is numpy's function.
_compositions: dict[Any, _Known] = {}


def derivative(function: Any, *makers: MakeVjp | None) -> None:
    """Sets the derivative that losses take of `function`.

    A maker's parameters after the result say which arguments are honoured. They have the names
    that `function` gives them; those at the front of its signature stand in the same order, and
    the others are keyword-only. An argument that is no parameter is refused.

    Args:
        function: autograd's wrapper of a function.
        makers: For each argument to differentiate by, from the first. None: the result does not
            depend on it.
    """

    def make(positions: Any, result: Any, args: Any, options: Any) -> Any:
        if len(positions) == 1:  # most often
            vjp = _maker(function, makers, positions[0])(result, *args, **options)
            return lambda g: (vjp(g),)
        vjps = [_maker(function, makers, p)(result, *args, **options) for p in positions]
        return lambda g: [vjp(g) for vjp in vjps]

    _derivatives[function] = _Known(make, *_arguments_of(next(filter(None, makers)), 1))


def derivative_by_position(function: Any, maker: Callable[..., Any], *names: str) -> None:
    """Sets the derivative of autograd's wrapper of a function of any number of arrays.

    The maker is called with (position, result, arguments, options); `names` are the options that
    are honoured.
    """

    def make(positions: Any, result: Any, args: Any, options: Any) -> Any:
        vjps = [maker(position, result, args, options) for position in positions]
        return lambda g: [vjp(g) for vjp in vjps]

    _derivatives[function] = _Known(make, float("inf"), frozenset(names))


def composition(function: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Has losses call the decorated function, made of others, in place of numpy's `function`.

    Its parameters say which arguments are honoured, as a maker's do; see `derivative`.
    """

    def register(composed: Callable[..., Any]) -> Callable[..., Any]:
        _compositions[function] = _Known(composed, *_arguments_of(composed, 0))
        return composed

    return register


def call_composition(function: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Calls the composition that replaces `function` in a loss; NotImplemented if there is none.

    Raises:
        NotImplementedError: the composition does not honour an argument of the call.
    """
    found = _compositions.get(function)
    if found is None:
        return NotImplemented
    if not found.honours(args, options):
        args, options = _without_defaults(function, found, args, options)
    return found.call(*args, **options)


def make_vjps(
    function: Any, positions: tuple[int, ...], result: Any, args: tuple[Any, ...], options: Any
) -> Callable[[Any], Iterable[Any]]:
    """Returns the derivative of one call of `function`: gpuopt's own, or else autograd's.

    Raises:
        NotImplementedError: `function` has none, or the call has an argument that its derivative
            does not honour.
    """
    args, options = leave_out_defaults(function, args, options)
    found = _derivatives.get(function)
    make: MakeVjps | None = primitive_vjps.get(function) if found is None else found.call
    if make is None:
        if function in notrace_primitives[VJPNode]:  # a constant
            make = _no_dependences
        else:
            refuse_function(function)
    return make(positions, result, args, options)


def leave_out_defaults(
    function: Any, args: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Returns the arguments of a call without those that have their default value.

    Raises:
        NotImplementedError: the derivative of `function` does not honour one of the arguments that
            are left.
    """
    found = _derivatives.get(function)
    if found is not None:
        if not found.honours(args, options):
            return _without_defaults(function.fun, found, args, options)
    elif isinstance(getattr(function, "fun", None), np.ufunc):
        if len(args) > function.fun.nin:
            refuse_argument(function, "out")
        for name, value in options.items():
            if name not in _UFUNC_DEFAULTS or not _is_same(value, _UFUNC_DEFAULTS[name]):
                refuse_argument(function, name)
        options = {}
    return args, options


def refuse_function(function: Any) -> NoReturn:
    """Refuses a call of a function that has no derivative."""
    raise NotImplementedError(
        f"{name_of(function)} has no derivative in a loss; write it with operators and other "
        "functions of numpy, or define it with autograd.extend.primitive and defvjp"
    )


def refuse_argument(function: Any, name: str, value: Any = None) -> NoReturn:
    """Refuses an argument of a call, or only its value."""
    what = f"its argument {name!r}" if value is None else f"{name}={value!r}"
    raise NotImplementedError(
        f"the derivative of {name_of(function)} does not honour {what}; "
        f"{_INSTEAD.get(name, _OTHERWISE)}"
    )


def name_of(function: Any) -> str:
    """Returns what users call a function, as "numpy.linalg.norm"."""
    wrapped = getattr(function, "fun", function)
    name = getattr(wrapped, "__name__", repr(wrapped))
    if getattr(np, name, None) is wrapped:
        return f"numpy.{name}"
    module = getattr(wrapped, "__module__", None)
    return name if module is None else f"{module}.{name}"


@functools.cache
def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of numpy's function; none where Python cannot tell."""
    try:
        return inspect.signature(function).parameters
    except ValueError:
        return {}


def _arguments_of(python: Callable[..., Any], skipped: int) -> tuple[float, frozenset[str]]:
    """Returns how many arguments may be given by position, and the names of all."""
    code = python.__code__
    most = float("inf") if code.co_flags & inspect.CO_VARARGS else code.co_argcount - skipped
    names = code.co_varnames[skipped : code.co_argcount + code.co_kwonlyargcount]
    return most, frozenset(names)


def _maker(function: Any, makers: tuple[MakeVjp | None, ...], position: int) -> MakeVjp:
    if position >= len(makers):
        names = list(parameters_of(getattr(function, "fun", function)))
        name = names[position] if position < len(names) else f"number {position + 1}"
        raise NotImplementedError(
            f"{name_of(function)} has no derivative by its argument {name!r}; "
            f"{_INSTEAD.get(name, 'pass a constant')}"
        )
    return makers[position] or functools.partial(_no_dependence, position)


def _no_dependences(positions: Any, result: Any, args: Any, options: Any) -> Any:
    vjps = [_no_dependence(position, result, *args) for position in positions]
    return lambda g: [vjp(g) for vjp in vjps]


def _no_dependence(position: int, result: Any, *args: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda g: np.zeros_like(args[position])


def _without_defaults(
    function: Any, known: _Known, args: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    parameters = parameters_of(function)
    positional = args[: int(min(known.most, len(args)))]
    further = list(parameters)[len(positional) : len(args)]
    if len(positional) + len(further) < len(args):
        refuse_argument(function, f"number {len(args)}")
    by_name = dict(zip(further, args[len(positional) :], strict=True)) | dict(options)
    for name, value in by_name.items():
        if name not in known.names and not _is_default(parameters.get(name), value):
            refuse_argument(function, name)
    return positional, {name: value for name, value in by_name.items() if name in known.names}


def _is_default(parameter: inspect.Parameter | None, value: Any) -> bool:
    return parameter is not None and _is_same(value, parameter.default)


def _is_same(value: Any, default: Any) -> bool:
    is_plain = isinstance(value, bool | int | float | str | None)
    return value is default or (is_plain and bool(value == default))
