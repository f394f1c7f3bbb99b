"""Boxes and nodes of our own, with which a loss computes and which autograd's functions record.

numpy passes its calls on boxes to them, and they pass these to autograd.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import autograd.numpy as anp
import ml_dtypes
import numpy as np
from autograd.core import VJPNode
from autograd.extend import Box, VSpace, vspace
from autograd.numpy import numpy_wrapper
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.numpy.numpy_vspaces import ArrayVSpace
from autograd.tracer import getval, isbox, new_box, notrace_primitives, trace_primitives_map

from gpuopt.autodiff import array_modules
from gpuopt.autodiff.derivatives import (
    call_composition,
    leave_out_defaults,
    make_vjps,
    parameters_of,
    refuse_argument,
    refuse_function,
)
from gpuopt.variables.operators import value_of
from gpuopt.variables.recording import recorder
from gpuopt.variables.variable import Variable

_item = ArrayBox.__getitem__
# Arguments that hold no array.
_PLAIN = frozenset((int, float, str, slice))
# Functions of an array's form, not of its elements.
_QUERIES = frozenset(
    (np.shape, np.ndim, np.size, np.iscomplexobj, np.isrealobj, np.result_type, np.can_cast)
)
# The trace of a variable that this thread's loss does not watch. It is below every other trace, so
# autograd ignores it.
_NO_TRACE = -2.0


class LossNode:
    """One call that a loss has made.

    autograd makes a node of the kind that the arguments have. autograd's own kind, VJPNode, uses
    autograd's derivatives; this kind uses gpuopt's.

    Attributes:
        parents: The nodes that its differentiated arguments came from.
        vjp: Returns the gradients by these arguments, given the gradient by its result. None for a
            variable, and once it was used.
        constants: Weak references to all arrays in the loss that were arguments of a call, and are
            not differentiated by. Derivatives may read them until the loss is differentiated.
    """

    __slots__ = ("constants", "parents", "vjp")

    parents: tuple[LossNode, ...]
    vjp: Callable[[Any], Iterable[Any]] | None

    def __init__(
        self,
        value: Any,
        function: Any,
        args: tuple[Any, ...],
        options: dict[str, Any],
        positions: tuple[int, ...],
        parents: tuple[LossNode, ...],
    ) -> None:
        self.parents = parents
        self.constants: list[weakref.ref[Any]] = parents[0].constants
        if len(args) > len(parents) or options:
            self._note_constants(args, options, positions)
        self.vjp = make_vjps(function, positions, value, args, options)

    @classmethod
    def of_leaf(cls, constants: list[weakref.ref[Any]]) -> LossNode:
        """Makes the node of a variable that the loss reads."""
        node = cls.__new__(cls)
        node.parents, node.vjp, node.constants = (), None, constants
        return node

    def _note_constants(
        self, args: tuple[Any, ...], options: dict[str, Any], positions: tuple[int, ...]
    ) -> None:
        given = [a for n, a in enumerate(args) if type(a) not in _PLAIN and n not in positions]
        if options:
            given.extend(options.values())
        for value in given:
            constant = value.unread_storage if isinstance(value, Variable) else value
            self.constants.extend(map(weakref.ref, array_modules.arrays_in(constant)))


class LossBox(ArrayBox):
    """An array in a loss. Operations that would silently drop its gradient are refused."""

    __slots__ = ()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return _call_ufunc(ufunc, method, inputs, options)

    def __array_function__(
        self, function: Any, types: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        return _call_function(function, args, options)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        raise TypeError(
            "numpy would take an array out of the loss here, and lose its gradient. To make one "
            "array of several, use numpy.stack; for `a.dot(b)`, write `a @ b`"
        )

    def __float__(self) -> NoReturn:
        _refuse_number("float()")

    def __int__(self) -> NoReturn:
        _refuse_number("int()")

    def __complex__(self) -> NoReturn:
        _refuse_number("complex()")

    def __index__(self) -> NoReturn:
        _refuse_number("use as an index")

    def item(self, *args: int) -> NoReturn:
        _refuse_number("item()")

    def tolist(self) -> NoReturn:
        _refuse_number("tolist()")

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError(
            "an array that a loss has computed cannot be written; make a new one, as with "
            "numpy.where or numpy.concatenate"
        )

    def __format__(self, form: str) -> str:
        return format(self._value, form)

    def __repr__(self) -> str:
        return f"LossBox({self._value!r})"

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __pos__(self) -> LossBox:
        return self

    def __floordiv__(self, other: Any) -> Any:
        return anp.floor_divide(self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return anp.floor_divide(other, self)

    def clip(self, min: Any = None, max: Any = None) -> Any:
        return anp.clip(self, min, max)

    def copy(self, order: str = "C") -> LossBox:
        return self  # nothing can write it

    def dot(self, b: Any) -> Any:
        return anp.dot(self, b)

    def transpose(self, *axes: Any) -> Any:
        return anp.transpose(self, axes[0] if len(axes) == 1 else axes or None)

    def reshape(self, *shape: Any, order: str = "C") -> Any:
        return anp.reshape(self, shape[0] if len(shape) == 1 else shape, order=order)

    def flatten(self, order: str = "C") -> Any:
        return anp.ravel(self, order)

    def astype(self, dtype: Any, copy: bool = True, **options: Any) -> Any:
        for name in options:
            refuse_argument(np.ndarray.astype, name)
        if np.dtype(dtype).kind in "biu":  # it moves in steps, so it is a constant
            return self._value.astype(dtype, copy=copy)
        return numpy_wrapper._astype(self, dtype, copy=copy)

    def __getitem__(self, index: Any) -> Any:
        return _item(self, _constant_index(index))


def _constant_index(index: Any) -> Any:
    """Replaces the Variables in an index by their arrays."""
    if isinstance(index, tuple):
        return tuple(map(_constant_index, index))
    return value_of(index)


def _call_function(function: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
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


def _call_ufunc(
    ufunc: Any, method: str, inputs: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """Does what `_call_function` does, for a method of a ufunc."""
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


def _refuse_number(what: str) -> NoReturn:
    raise TypeError(
        f"{what} would take a number out of the loss, and lose its gradient. Compute with the "
        "array itself; print it as text, or return it from the loss and read it there"
    )


def add_array_type(array_type: type, module: Any) -> None:
    """Has losses compute with arrays of `array_type`, which belong to `module`, as CuPy's do."""

    class Space(ArrayVSpace):
        def __init__(self, value: Any) -> None:
            self.shape, self.dtype = value.shape, value.dtype

        def zeros(self) -> Any:
            return module.zeros(self.shape, dtype=self.dtype)

        def ones(self) -> Any:
            return module.ones(self.shape, dtype=self.dtype)

    VSpace.mappings.setdefault(array_type, Space)
    Box.type_mappings[array_type] = _box_maker(Box.type_mappings.get(array_type))
    array_modules.add_array_type(array_type, module)


def add_cupy() -> None:
    """Adds CuPy's arrays, as soon as CuPy is imported."""
    cupy = sys.modules.get("cupy")
    if cupy is not None and not array_modules.is_array_type(cupy.ndarray):
        add_array_type(cupy.ndarray, cupy)


def add_variables() -> None:
    """Adds the subclasses of Variable that are defined so far: autograd looks for exact types."""
    Box.types.update(Variable.__subclasses__())


def _box_maker(others: Callable[..., Any] | None) -> Callable[..., Any]:
    """Makes boxes for our nodes; for autograd's, makes what autograd made before."""

    def make_box(value: Any, trace: float, node: Any) -> Any:
        if type(node) is LossNode:
            return LossBox(value, trace, node)
        if others is None:
            raise KeyError(type(value))  # autograd turns it into a TypeError
        return others(value, trace, node)

    return make_box


def _as_read(name: str, otherwise: Callable[[Variable], Any]) -> property:
    """Makes a property that a Variable takes from its box in this thread's loss."""

    def get(variable: Variable) -> Any:
        variable.bring_up()
        by = recorder()
        read = None if by is None else by.read(variable)
        return getattr(read, name) if isbox(read) else otherwise(variable)

    return property(get)


def _register() -> None:
    """Adds our types to autograd's tables. What autograd does with its own stays as it is."""
    for array_type, make in list(Box.type_mappings.items()):
        if make is ArrayBox and array_type is not ArrayBox:
            Box.type_mappings[array_type] = _box_maker(ArrayBox)
    for array_type, outside in ((LossBox, ArrayBox), (ml_dtypes.bfloat16, None)):
        Box.type_mappings[array_type] = _box_maker(outside)
    VSpace.mappings.setdefault(ml_dtypes.bfloat16, ArrayVSpace)
    # Variables in lists and dictionaries that autograd goes through, as in `misc.flatten`.
    Box.type_mappings[Variable] = lambda variable, *of_box: new_box(variable.value(), *of_box)
    VSpace.mappings[Variable] = lambda variable: vspace(variable.unread_storage)
    # Functions without a gradient in autograd have none here; but full_like depends on fill_value.
    notrace_primitives[LossNode] = notrace_primitives[VJPNode] - {anp.full_like}
    # A function of `autograd.numpy` must see a Variable among its arguments as the box that it
    # reads as: otherwise it would record the box inside the value of another box, and lose its
    # gradient.
    Box.types.update((LossBox, Variable))
    for name, otherwise in (
        ("_trace", lambda variable: _NO_TRACE),
        ("_node", lambda variable: None),
        ("_value", Variable.unread_numbers),
    ):
        setattr(Variable, name, _as_read(name, otherwise))


_register()
