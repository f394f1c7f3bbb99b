"""A step on one element as a program without jumps, traced from a function written for numpy.

The function runs on stand-ins for its arrays and scalars, and each numpy call on them becomes a
node. A Python `if` on a scalar is followed both ways: the function runs once for each outcome, and
what the runs disagree about becomes a `select`. So scalars stay arguments of the program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, NoReturn, TypeAlias

import numpy as np

from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.rules.functions import OF_INTEGERS, OF_WORDS, TYPES, UFUNCS

MOST_DECISIONS = 8
_OWN_FILES = (__file__, np.lib.mixins.__file__)

DType: TypeAlias = "np.dtype[Any]"

# The types that rules compute in.
REALS = (np.dtype(np.float32), np.dtype(np.float64))

# The array that has the number of each element in its variable, and its type.
NUMBER = "number"
WORD: DType = np.dtype(np.uint64)


class Rank(IntEnum):
    """The scope in which a value is constant: a whole variable, a row, or one element."""

    UNIFORM = 0
    ROW = 1
    ELEMENT = 2


@dataclass(frozen=True, eq=False)
class Node:
    """One value.

    Attributes:
        op: A ufunc's name; or "array", "scalar", "constant", "convert", "select" or "clip".
        operands: The values that it is computed from.
        dtype: Its type.
        detail: The name of an array or a scalar; a constant's value; a ufunc that gpuopt cannot
            write as C++.
        rank: The scope in which it is constant.
        line: Of Python, as "gpuopt/optimizers/adam.py:45"; "" for an array or a scalar.
    """

    op: str
    operands: tuple[Node, ...]
    dtype: DType
    detail: Any
    rank: Rank
    line: str


@dataclass(frozen=True, eq=False)
class Program:
    """A traced function.

    Attributes:
        stores: The last value of each array that it writes, by the array's name.
        returned: The values that it returns.
        lines: The line of Python that writes each array.
    """

    stores: Mapping[str, Node]
    returned: Sequence[Node]
    lines: Mapping[str, str]

    def nodes(self) -> list[Node]:
        """Returns the nodes that the results need, each after its operands."""
        ordered: dict[Node, None] = {}

        def visit(node: Node) -> None:
            if node not in ordered:
                for operand in node.operands:
                    visit(operand)
                ordered[node] = None

        for root in (*self.stores.values(), *self.returned):
            visit(root)
        return list(ordered)


def trace(
    name: str,
    function: Callable[[Mapping[str, Any]], Iterable[Any] | None],
    arrays: Mapping[str, Rank],
    scalars: Mapping[str, Rank],
    real: DType,
    read_only: Mapping[str, str],
    *,
    is_emitted: bool = True,
) -> Program:
    """Traces a function.

    Args:
        name: The function's name in errors.
        function: Takes a mapping of stand-ins by name; may return values.
        arrays: The names of its arrays.
        scalars: The names of its scalars. A scalar of rank ROW is an array that is only read.
        real: The type of all but `NUMBER`, which is only read.
        read_only: The arrays that it must not write: their descriptions in errors, by name.
        is_emitted: Whether the program is written as C++, so that other operations are refused.

    Raises:
        TypeError: it does something that a program cannot do; the message has the line.
        ValueError: it writes numbers of elements to an array of rows.
    """
    tape = _Tape(name, is_emitted)
    read_only = {NUMBER: "the numbers of elements", **read_only}
    paths: list[_Path] = []
    lines: dict[str, str] = {}
    pending: list[list[bool]] = [[]]
    while pending:
        tape.follow(pending.pop())
        own, given = (
            {
                each: tape.given(
                    op, each, rank, WORD if each == NUMBER else real, read_only.get(each, "")
                )
                for each, rank in names.items()
            }
            for op, names in (("array", arrays), ("scalar", scalars))
        )
        begins = {each: value.node for each, value in own.items()}
        returned = ignore_fp_warnings(lambda: function({**own, **given}))  # noqa: B023  (called at once)
        if returned is not None and not isinstance(returned, Iterable):
            tape.refuse(f"returning {returned!r}")
        ends: dict[Any, Node] = {each: value.node for each, value in own.items()}
        ends |= {place: tape.as_node(each) for place, each in enumerate(returned or ())}
        paths.append((tape.decisions, ends))
        lines |= {each: value.written_in for each, value in own.items() if value.written_in}
        new = range(len(tape.prefix), len(tape.decisions))
        pending += [[*(made for _, made in tape.decisions[:at]), False] for at in new]
    if len({len(ends) for _, ends in paths}) > 1:
        tape.refuse("returning another number of values by a decision")
    ends = tape.merged(paths, 0)
    stores = {each: ends[each] for each in arrays if ends[each] is not begins[each]}
    for each, node in stores.items():
        if node.rank > arrays[each]:
            raise ValueError(
                f'{name}: {lines[each]}: writes numbers of elements to its slot of rows "{each}", '
                "which is [num_rows, 1]: what it writes there must follow from the slots of rows "
                "and the scalars alone"
            )
    returned_nodes = [node for each, node in ends.items() if isinstance(each, int)]
    return Program(stores, returned_nodes, lines)


_Path: TypeAlias = "tuple[list[tuple[Node, bool]], dict[Any, Node]]"


class Traced(np.lib.mixins.NDArrayOperatorsMixin):
    """Stands for an array, whose value changes in place, or for a scalar, whose value does not."""

    def __init__(
        self, tape: _Tape, node: Node, is_array: bool, name_of_read_only: str = ""
    ) -> None:
        self.tape, self.node, self.is_array = tape, node, is_array
        self.name_of_read_only = name_of_read_only
        self.written_in = ""  # the line of Python that has given it another value

    # A rule may ask whether it has an array.
    __class__ = property(lambda self: np.ndarray if self.is_array else np.floating)

    def __repr__(self) -> str:
        return "an array" if self.is_array else "a scalar"

    @property
    def dtype(self) -> DType:
        return self.node.dtype

    def astype(self, dtype: Any, copy: bool = True) -> Traced:
        return Traced(self.tape, self.tape.convert(self.node, np.dtype(dtype)), self.is_array)

    def copy(self) -> Traced:
        return Traced(self.tape, self.node, self.is_array)

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any
    ) -> Traced:
        if method != "__call__" or ufunc.nout != 1:
            called = "" if method == "__call__" else f".{method}"
            what = f"np.{ufunc.__name__}{called}, which is not of one element alone"
            self.tape.refuse(what + (_USE_SUMS if ufunc is np.add and called == ".reduce" else ""))
        if options:
            self.tape.refuse(f"np.{ufunc.__name__} with {', '.join(options)}=")
        result = self.tape.call(ufunc, inputs)
        if out is None:
            return result
        [target] = out
        if not isinstance(target, Traced):
            self.tape.refuse(f"np.{ufunc.__name__} with out= of an array that is not the rule's")
        # `x += 1` gives the name x another scalar where x is a scalar.
        if not target.is_array:
            return result
        target.become(result, "same_kind")
        return target

    def __array_function__(
        self, function: Any, types: Any, inputs: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        traced = _FUNCTIONS.get(function)
        if traced is None:
            self.tape.refuse(_name_with_advice("np", function.__name__))
        try:
            return traced(self.tape, *inputs, **options)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                self.tape.refuse(f"np.{function.__name__} with these arguments")
            raise

    def __pow__(self, exponent: Any) -> Any:
        # numpy's arrays do the same.
        if isinstance(exponent, int | float) and exponent in (0.5, 2):
            return np.sqrt(self) if exponent == 0.5 else np.square(self)
        return np.power(self, exponent)

    def __setitem__(self, key: Any, value: Any) -> None:
        if key is not Ellipsis and not (isinstance(key, slice) and key == slice(None)):
            self.tape.refuse(f"array[{_shown(key)}] = ...: use np.where(condition, a, b)")
        node = self.tape.as_node(value, None if isinstance(value, Traced) else self.dtype)
        self.become(Traced(self.tape, node, True), "unsafe")

    def __getitem__(self, key: Any) -> Any:
        if key is Ellipsis or (isinstance(key, slice) and key == slice(None)):
            return self
        self.tape.refuse(f"array[{_shown(key)}]: use np.where(condition, a, b)")

    def __bool__(self) -> bool:
        return self.tape.decide(self.node)

    def __float__(self) -> Any:
        self.tape.refuse("a conversion to a number, as in math.sqrt(x): use np.sqrt(x)")

    __int__ = __index__ = __complex__ = __float__

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        self.tape.refuse("a conversion to another array")

    def __iter__(self) -> Any:
        self.tape.refuse("a loop over the elements")

    def __hash__(self) -> Any:
        self.tape.refuse("a value as a key")

    def __round__(self, digits: int = 0) -> Any:
        return _round(self.tape, self, digits)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.tape.refuse(_name_with_advice("array", name))

    def become(self, value: Traced, casting: Any) -> None:
        """Takes another value, in place."""
        if self.name_of_read_only:
            self.tape.refuse(f"writing to {self.name_of_read_only}")
        if not np.can_cast(value.dtype, self.dtype, casting):
            self.tape.refuse(f"writing {value.dtype} to {self.dtype}")
        self.node = self.tape.convert(value.node, self.dtype)
        self.written_in = _line()


class _Tape:
    """All nodes of a program, and the path that is followed."""

    def __init__(self, name: str, is_emitted: bool) -> None:
        self._name, self._is_emitted = name, is_emitted
        self._nodes: dict[Any, Node] = {}
        self._selected: dict[tuple[Node, Node, Node], Node] = {}
        self.follow([])

    def follow(self, prefix: list[bool]) -> None:
        """Begins a path with these outcomes of its first decisions."""
        self.prefix = prefix
        self.decisions: list[tuple[Node, bool]] = []

    def decide(self, node: Node) -> bool:
        """Returns the outcome of a Python `if`."""
        if node.rank is not Rank.UNIFORM:
            self.refuse("an `if` on an array's values: use np.where(condition, a, b)")
        outcomes = dict(self.decisions)
        if node not in outcomes:
            at = len(self.decisions)
            if at == MOST_DECISIONS:
                self.refuse(f"more than {MOST_DECISIONS} decisions by scalars: use np.where")
            outcomes[node] = self.prefix[at] if at < len(self.prefix) else True
            self.decisions.append((node, outcomes[node]))
        return outcomes[node]

    def given(self, op: str, name: str, rank: Rank, dtype: DType, read_only: str) -> Traced:
        """Returns the stand-in for an argument."""
        node = self.node(op, (), dtype, name, rank, line="")
        return Traced(self, node, op == "array" or rank is not Rank.UNIFORM, read_only)

    def call(self, ufunc: np.ufunc, inputs: Sequence[Any]) -> Traced:
        """Returns the result of a ufunc."""
        name = ufunc.__name__
        is_known = name in UFUNCS
        if not is_known and self._is_emitted:
            self.refuse(_name_with_advice("np", name))
        given = [self._kind(x) for x in inputs]
        try:
            *dtypes, result = ufunc.resolve_dtypes((*given, None))
        except TypeError:
            self.refuse(f"np.{name} of {', '.join(map(_shown_type, inputs))}")
        kinds = {each.kind for each in dtypes}
        is_operator = "numpy::" not in UFUNCS.get(name, "")
        takes = "f" + "bi" * (is_operator or name in OF_INTEGERS)
        takes += "u" * (is_operator or name in OF_WORDS)
        if not kinds <= set(takes) or result.name not in TYPES:
            self.refuse(f"np.{name} of {', '.join(map(str, dtypes))}")
        operands = [self.as_node(x, to) for x, to in zip(inputs, dtypes, strict=True)]
        is_array = any(isinstance(x, Traced) and x.is_array for x in inputs)
        node = self.node(name, operands, result, None if is_known else ufunc)
        return Traced(self, node, is_array)

    def as_node(self, value: Any, dtype: DType | None = None) -> Node:
        """Returns the node of a stand-in or a number, converted to a type if one is given."""
        if isinstance(value, Traced):
            return value.node if dtype is None else self.convert(value.node, dtype)
        kind = self._kind(value)
        if dtype is None:
            dtype = np.dtype(kind)
        is_plain = isinstance(kind, type)
        number = value if is_plain else np.asarray(value).reshape(()).item()
        # Python's numbers are written as they are: C++ rounds them as numpy does.
        return self._constant(number if is_plain else dtype.type(number).item(), dtype)

    def _kind(self, value: Any) -> Any:
        """Returns the type that numpy promotes by: for a Python number, the class int or float."""
        if isinstance(value, Traced):
            return value.dtype
        if type(value) in (int, float):
            return type(value)
        if isinstance(value, bool):
            return np.dtype(bool)
        if not isinstance(value, np.generic | np.ndarray) or np.size(value) != 1:
            self.refuse(f"arithmetic with {_shown(value)}, which is none of its arguments")
        return value.dtype

    def _constant(self, value: Any, dtype: DType) -> Node:
        number = bool(value) if dtype.kind == "b" else float(value) if dtype.kind == "f" else value
        return self.node("constant", (), dtype, number, Rank.UNIFORM)

    def convert(self, node: Node, dtype: DType) -> Node:
        if node.dtype == dtype:
            return node
        if node.op == "constant":
            return self._constant(dtype.type(node.detail).item(), dtype)
        is_known = dtype.name in ("bool", "uint64", "float32", "float64") or (
            dtype == np.int64 and node.dtype.kind == "b"
        )
        if not is_known and self._is_emitted:
            self.refuse(f"a conversion to {dtype}")
        return self.node("convert", (node,), dtype)

    def select(self, condition: Node, yes: Node, no: Node, line: str | None = None) -> Node:
        """Returns the node of `yes if condition else no`.

        Where both are the same operation on similar operands, the operands are selected instead of
        the results, so that the operation is computed once.
        """
        if yes is no:
            return yes
        key = condition, yes, no
        if key not in self._selected:
            pairs = list(zip(yes.operands, no.operands, strict=False))
            different = [(a, b) for a, b in pairs if a is not b]
            if (
                condition.rank is Rank.UNIFORM
                and _have_same_operation(yes, no)
                and (len(different) == 1 or yes.op == "select" or _are_alike(yes, no))
            ):
                operands = [self.select(condition, a, b, line) for a, b in pairs]
                found = self.node(yes.op, operands, yes.dtype, yes.detail, line=line)
            else:
                found = self.node("select", (condition, yes, no), yes.dtype, line=line)
            self._selected[key] = found
        return self._selected[key]

    def merged(self, paths: Sequence[_Path], depth: int) -> dict[Any, Node]:
        """Returns the final values of all paths, joined by selects."""
        if len(paths) == 1:
            return paths[0][1]
        condition = paths[0][0][depth][0]
        yes, no = (
            self.merged([path for path in paths if path[0][depth][1] is made], depth + 1)
            for made in (True, False)
        )
        return {
            each: self.select(condition, yes[each], no[each], yes[each].line or no[each].line)
            for each in yes
        }

    def node(
        self,
        op: str,
        operands: Sequence[Node],
        dtype: DType,
        detail: Any = None,
        rank: Rank | None = None,
        line: str | None = None,
    ) -> Node:
        """Returns a value's node: equal operations on the same operands share one."""
        # By its text, -0.0 is not 0.0, and NaN is itself.
        key = op, tuple(map(id, operands)), dtype, repr(detail)
        found = self._nodes.get(key)
        if found is None:
            if rank is None:
                rank = max((operand.rank for operand in operands), default=Rank.UNIFORM)
            at = _line() if line is None else line
            found = Node(op, tuple(operands), dtype, detail, rank, at)
            self._nodes[key] = found
        return found

    def refuse(self, what: str) -> NoReturn:
        raise TypeError(
            f"{self._name}: {_line()}: an update rule is arithmetic on the elements of equally "
            f"long arrays; it cannot do this: {what}"
        )


_SUMS = frozenset({"average", "dot", "inner", "mean", "norm", "sum", "vdot"})
_USE_SUMS = ": for a sum over a variable, give update_rule `sums` and `terms`"
_USE_OTHERS = ': the guide "Your own rule" lists the functions that it can call'


def _name_with_advice(owner: str, name: str) -> str:
    return f"{owner}.{name}" + (_USE_SUMS if name in _SUMS else _USE_OTHERS)


def _have_same_operation(yes: Node, no: Node) -> bool:
    if (yes.op, yes.dtype, yes.detail) != (no.op, no.dtype, no.detail):
        return False
    if yes.op == "select" and yes.operands[0] is not no.operands[0]:
        return False
    return [each.dtype for each in yes.operands] == [each.dtype for each in no.operands]


@cache
def _are_alike(yes: Node, no: Node) -> bool:
    """Whether two values differ only in subexpressions of the same operands."""
    if yes is no:
        return True
    if _have_same_operation(yes, no):
        return bool(yes.operands) and all(map(_are_alike, yes.operands, no.operands))
    return yes.dtype == no.dtype and not {yes, *yes.operands}.isdisjoint((no, *no.operands))


def _where(tape: _Tape, condition: Any, yes: Any, no: Any) -> Traced:
    dtype = np.result_type(*map(_example, (yes, no)))
    ways = tape.as_node(yes, dtype), tape.as_node(no, dtype)
    return Traced(tape, tape.select(tape.as_node(condition, np.dtype(bool)), *ways), True)


def _clip(tape: _Tape, a: Any, a_min: Any = None, a_max: Any = None, **options: Any) -> Any:
    low, high = options.pop("min", a_min), options.pop("max", a_max)
    if options:
        tape.refuse(f"np.clip with {', '.join(options)}=")
    if low is None or high is None:
        return np.minimum(a, high) if low is None else np.maximum(a, low)
    dtype = np.result_type(*map(_example, (a, low, high)))
    nodes = [tape.as_node(each, dtype) for each in (a, low, high)]
    return Traced(tape, tape.node("clip", nodes, dtype), True)


def _like(value: float) -> Callable[..., Traced]:
    def make(tape: _Tape, like: Traced) -> Traced:
        return Traced(tape, tape.as_node(value, like.dtype), True)

    return make


def _round(tape: _Tape, value: Traced, decimals: int = 0) -> Any:
    if decimals:
        tape.refuse("np.round with decimals: np.rint rounds to whole numbers")
    return np.rint(value)


def _copy_to(tape: _Tape, dst: Traced, src: Any) -> None:
    dst[...] = src


def _full_like(tape: _Tape, like: Traced, fill_value: Any) -> Traced:
    return Traced(tape, tape.as_node(fill_value, like.dtype), True)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.where: _where,
    np.clip: _clip,
    np.copyto: _copy_to,
    np.round: _round,
    np.zeros_like: _like(0.0),
    np.empty_like: _like(0.0),
    np.ones_like: _like(1.0),
    np.full_like: _full_like,
}


def _example(value: Any) -> Any:
    return value.dtype if isinstance(value, Traced) else value


def _shown_type(value: Any) -> str:
    return str(value.dtype) if hasattr(value, "dtype") else type(value).__name__


def _shown(value: Any) -> str:
    if isinstance(value, Traced):
        return "an array" if value.is_array else "a scalar"
    return f"an array of shape {value.shape}" if isinstance(value, np.ndarray) else repr(value)


def _line() -> str:
    """Returns the line of Python that the traced function is executing.

    The file's path begins at its package, so it does not depend on where that is installed.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in _OWN_FILES:
        frame = frame.f_back
    package = frame.f_globals.get("__package__") or ""
    depth = package.count(".") + 1 if package else 0
    path = frame.f_code.co_filename.replace("\\", "/").split("/")
    return f"{'/'.join(path[-1 - depth :])}:{frame.f_lineno}"
