"""Whether a rule's step depends on where its variable is.

If it does not, but for a decay, a variable that is the sum of two numbers can be stepped and
rounded once: the rule steps the smaller one, and the result is added to the larger one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

if TYPE_CHECKING:
    from gpuopt.rules.update_rule import UpdateRule


class Shift(NamedTuple):
    """A step that is the same wherever the variable is, but for a decay.

    Attributes:
        decay: The scalar by which the step multiplies the variable, to subtract that; None if it
            does not.
    """

    decay: str | None


def shift_of(rule: UpdateRule) -> Shift | None:
    """Returns the rule's `Shift`, or None if its step may depend on the variable in another way.

    The rule is called with stand-ins that have no values: what it would do by values, it may do.
    """
    var = _Variable()
    slots = [_Unknown() for _ in rule.slots]
    scalars = {name: _Unknown(name) for name in rule.scalars}
    try:
        rule.apply(var, _Unknown(), *slots, **scalars)
    except (_Depends, Exception):  # of the rule's own arithmetic, too: a step will raise it
        return None
    # A rule that did not move it may have asked for its type.
    return Shift(var.decay) if var.is_moved else None


def cpp_type(rule: UpdateRule) -> str:
    """Returns the type in kernels/shared/catch_up.cuh that says what `shift_of` does."""
    shift = rule.shift
    if shift is None:
        return "gpuopt::Shift<false, -1>"
    place = -1 if shift.decay is None else rule.scalars.index(shift.decay)
    return f"gpuopt::Shift<true, {place}>"


class _Depends(BaseException):
    """A result may depend on the variable, or a call on values; no rule's own `except` ends it."""


class _Unknown(np.lib.mixins.NDArrayOperatorsMixin):
    """Stands for any numbers that do not depend on the variable.

    Attributes:
        name: Of the scalar that it is; None for anything else.
    """

    __class__ = property(lambda self: np.ndarray)  # a rule may ask whether it has one
    dtype = np.dtype(np.float64)

    def __init__(self, name: str | None = None) -> None:
        self.name = name

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any
    ) -> Any:
        if method != "__call__":
            raise _Depends
        return _result(ufunc, inputs, out, options)

    def __array_function__(
        self, function: Any, types: Any, inputs: Any, options: dict[str, Any]
    ) -> Any:
        out = options.pop("out", None)
        return _result(function, inputs, None if out is None else (out,), options)

    def __setitem__(self, key: Any, value: Any) -> None:
        _result(np.positive, [value], (self,), {})

    def _refuse(self, *arguments: Any, **options: Any) -> NoReturn:
        raise _Depends

    __bool__ = __float__ = __int__ = __index__ = __complex__ = _refuse
    __array__ = __getitem__ = __len__ = __iter__ = __format__ = __round__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # numpy looks for its protocols
            raise AttributeError(name)
        raise _Depends


class _Variable(_Unknown):
    """Stands for the variable.

    Attributes:
        decay: The scalar that it was multiplied by, to be subtracted.
        is_moved: Whether something was added to it or subtracted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.decay: str | None = None
        self.is_moved = False


class _Decay(_Unknown):
    """Stands for a scalar times the variable."""


def _result(function: Any, inputs: Any, out: Any, options: dict[str, Any]) -> Any:
    """Returns what stands for a call's result.

    Raises:
        _Depends: it may depend on the variable, other than by a decay or by adding to it.
    """
    into = _Unknown() if out is None else out[0]
    seen = [*inputs, *options.values(), into]
    if not any(isinstance(each, _Variable | _Decay) for each in seen):
        if any(isinstance(each, list | tuple | dict) for each in seen):
            raise _Depends
        # A number is not changed in place: its name gets another one.
        return into if into.name is None else _Unknown()
    if options or len(inputs) != 2:
        raise _Depends
    first, second = inputs
    if function is np.multiply and out is None:
        if isinstance(first, _Variable):
            first, second = second, first
        if isinstance(second, _Variable) and type(first) is _Unknown and first.name is not None:
            return _Decay(first.name)
    if into is first and isinstance(into, _Variable):
        if isinstance(second, _Decay) and function is np.subtract and into.decay is None:
            into.decay = second.name
            into.is_moved = True
            return into
        if function in (np.add, np.subtract) and not isinstance(second, _Variable | _Decay):
            into.is_moved = True
            return into
    raise _Depends
