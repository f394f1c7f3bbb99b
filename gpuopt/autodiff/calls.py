"""Passes a call of numpy's function on a loss's arrays to autograd, which records it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from autograd.tracer import getval, isbox, trace_primitives_map

from gpuopt.autodiff.derivatives import (
    call_composition,
    leave_out_defaults,
    parameters_of,
    refuse_argument,
    refuse_function,
)

# Functions of an array's form, not of its elements.
_QUERIES = frozenset(
    (np.shape, np.ndim, np.size, np.iscomplexobj, np.isrealobj, np.result_type, np.can_cast)
)


def call_function(function: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Does `function(*args, **options)`, and records it.

    Raises:
        NotImplementedError: the function has no derivative, or none by an argument that the loss
            computes.
    """
    if function in _QUERIES:
        return function(*map(getval, args), **{n: getval(v) for n, v in options.items()})
    result = call_composition(function, args, options)
    if result is not NotImplemented:
        return result
    recorded = trace_primitives_map.get(function)
    if recorded is None:
        refuse_function(function)
    if any(map(isbox, options.values())) or not any(map(isbox, args)):
        args, options = _by_position(function, args, options)
    leave_out_defaults(recorded, args, options)  # raises before anything is written to `out`
    return recorded(*args, **options)


def call_ufunc(ufunc: Any, method: str, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Does what `call_function` does, for a method of a ufunc."""
    recorded = trace_primitives_map.get(ufunc)
    if recorded is None or method != "__call__":
        refuse_function(ufunc if method == "__call__" else getattr(ufunc, method))
    leave_out_defaults(recorded, inputs, options)
    # Without this, autograd would call numpy, and numpy would call this function again.
    return recorded(*inputs, called_by_autograd_dispatcher=True, **options)


def _by_position(
    function: Any, args: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Passes arguments that the loss computes by position, where alone autograd looks for them."""
    parameters = parameters_of(function)
    given = dict(zip(parameters, args, strict=False)) | dict(options)
    boxed = [name for name, value in given.items() if isbox(value)]
    if not boxed:  # they are in a list
        refuse_function(function)
    for name in boxed:
        parameter = parameters.get(name)
        if parameter is None or parameter.kind in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_KEYWORD,
        ):
            refuse_argument(function, name)
    names = list(parameters)
    names = names[: max(map(names.index, boxed)) + 1]
    positional = tuple(given.get(name, parameters[name].default) for name in names)
    return positional, {name: given[name] for name in options if name not in names}
