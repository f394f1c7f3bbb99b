"""A traced rule as numpy's calls, replayed on chunks without allocating memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.backends.cpu.numbers import Numbers
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.rules.tracing import NUMBER, Node, Program
from gpuopt.rules.update_rule import UpdateRule

Chunk = np.ndarray[Any, Any]

# numpy's arrays take these for such powers, which are much faster.
_OF_POWERS = {0.5: np.sqrt, 2.0: np.square}


class Plan(NamedTuple):
    """How a rule is replayed: the same for all scalars by which it decides alike.

    Attributes:
        calls: What is called, and what chooses its arguments among all arrays; the last one of
            these gets the result. All arrays are those that the rule writes, the gradient, the
            elements' numbers if it reads them, scratch arrays, and constants.
        scratch_dtypes: The types of the scratch arrays.
        constants: The values of the constants.
        reads_numbers: See `UpdateRule`.
    """

    calls: Sequence[tuple[Callable[..., Any], Callable[..., Any]]]
    scratch_dtypes: tuple[np.dtype[Any], ...]
    constants: tuple[Node, ...]
    reads_numbers: bool


class ReplayedRule:
    """A rule whose results go to its arrays and to scratch arrays instead of new memory.

    Its calls are replayed on each chunk, one by one, so that each rounds as in the rule. A scratch
    array is used again when its value is no longer needed.

    Attributes:
        plan: The calls.
        constants: Arrays of one number, or of one for each element of a chunk.
        scratch_dtypes: The types of the scratch arrays that `apply` wants.
    """

    most_elements = 256 * 1024

    def __init__(self, plan: Plan, constants: Sequence[Chunk]) -> None:
        self.plan, self.constants = plan, constants
        self.scratch_dtypes = plan.scratch_dtypes

    def apply(
        self,
        written: Sequence[Chunk],
        grad: Chunk | None,
        scratch: Sequence[Chunk],
        numbers: Numbers | None = None,
    ) -> None:
        arrays = [*written, *([] if grad is None else [grad])]
        if self.plan.reads_numbers:
            assert numbers is not None, "loops have them"
            arrays.append(numbers())
        arrays += [*scratch, *self.constants]
        # This thread holds the interpreter's lock between the calls, so little is done there.
        for function, arguments_in in self.plan.calls:
            function(*arguments_in(arrays))


def replayed_rules(
    rule: UpdateRule, real: np.dtype[Any], scalars: Sequence[Scalars], *, zero_grad: bool = False
) -> Sequence[ReplayedRule]:
    """Returns the replayed form of a rule, for the scalars of each group.

    Args:
        rule: The rule. It has no sums, and no slots of rows.
        real: The type of all chunks.
        scalars: The rule's scalars, of that type: those of each group.
        zero_grad: The gradient is zero everywhere, and not given to `apply`.

    Raises:
        TypeError: the rule is not arithmetic on elements, or writes to the gradient.
    """
    return ignore_fp_warnings(lambda: [_replayed(rule, real, each, zero_grad) for each in scalars])


def form_of_parts(
    forms: Sequence[object], groups: Sequence[int], lengths: Sequence[int] | Chunk
) -> ReplayedRule | None:
    """Returns a form that updates parts of several groups as one chunk, or None if there is none.

    There is one if the groups' forms make the same calls.

    Args:
        forms: The form of each group.
        groups: The number of each part's group.
        lengths: How many elements each part has.
    """
    replayed = [form for form in map(forms.__getitem__, groups) if isinstance(form, ReplayedRule)]
    if len({id(form.plan) for form in replayed}) != 1:
        return None
    each_constant = zip(*[form.constants for form in replayed], strict=True)
    constants = [
        values[0] if len({each.tobytes() for each in values}) == 1 else np.repeat(values, lengths)
        for values in each_constant
    ]
    return ReplayedRule(replayed[0].plan, constants)


def _replayed(
    rule: UpdateRule, real: np.dtype[Any], scalars: Scalars, zero_grad: bool
) -> ReplayedRule:
    program, numbers = rule.programs[real.name], _Numbers(scalars)
    outcomes = tuple(numbers.outcome(node) for node in _choices(program, zero_grad))
    names = ("var", *rule.slots, *["grad"][zero_grad:], *[NUMBER] * rule.reads_numbers)
    plan = _plan(program, names, zero_grad, outcomes)
    # Ufuncs take arrays without dimensions faster than scalars.
    return ReplayedRule(plan, [np.asarray(numbers.value(node)) for node in plan.constants])


class _Numbers:
    """The values of those nodes that are the same for all elements."""

    def __init__(self, scalars: Scalars) -> None:
        self._scalars = scalars
        self._known: dict[Node, Any] = {}

    def value(self, node: Node) -> Any:
        if node not in self._known:
            self._known[node] = self._compute(node)
        return self._known[node]

    def outcome(self, choice: Node) -> float:
        """Returns the choice: the operand of a `select`, or the exponent of a power."""
        if choice.op == "select":
            return 1 if self.value(choice.operands[0]) else 2
        exponent = float(self.value(choice.operands[1]))
        return exponent if exponent in _OF_POWERS else 0

    def _compute(self, node: Node) -> Any:
        if node.op == "scalar":
            return self._scalars[node.detail]
        if node.op == "constant":
            return node.dtype.type(node.detail)
        if node.op == "array":
            return node.dtype.type(0)  # the gradient
        if node.op == "select":
            return self.value(node.operands[int(self.outcome(node))])
        operands = [self.value(each) for each in node.operands]
        if node.op == "convert":
            return operands[0].astype(node.dtype)
        # A power of numbers is not always rounded as numpy's power of arrays.
        return operator.pow(*operands) if node.op == "power" else _function_of(node)(*operands)


def _function_of(node: Node) -> Callable[..., Any]:
    """Returns numpy's function for a node, or that of another library."""
    return getattr(np, node.op) if node.detail is None else node.detail  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def _varying(program: Program, zero_grad: bool) -> frozenset[Node]:
    """Returns the values that may differ between elements."""
    found: set[Node] = set()
    for node in program.nodes():
        is_array = node.op == "array" and not (zero_grad and node.detail == "grad")
        if is_array or not found.isdisjoint(node.operands):
            found.add(node)
    return frozenset(found)


@lru_cache(maxsize=256)
def _choices(program: Program, zero_grad: bool) -> list[Node]:
    """Returns the nodes by which a plan differs with the scalars."""
    varying = _varying(program, zero_grad)
    return [
        node
        for node in program.nodes()
        if node in varying
        and (
            (node.op == "select" and node.operands[0] not in varying)
            or (node.op == "power" and node.operands[1] not in varying)
        )
    ]


@lru_cache(maxsize=256)
def _plan(
    program: Program, names: tuple[str, ...], zero_grad: bool, outcomes: tuple[float, ...]
) -> Plan:
    """Plans the calls, given the arrays' names, and `_Numbers.outcome` of each of `_choices`."""
    chosen = dict(zip(_choices(program, zero_grad), outcomes, strict=True))
    order = _Order(program, _varying(program, zero_grad), chosen)
    places = {name: place for place, name in enumerate(names)}
    scratch: list[np.dtype[Any]] = []
    constants: dict[Node, int] = {}
    idle: list[int] = []
    array_of: dict[Node, int] = {}

    def operand(node: Node) -> tuple[str, int]:
        if node in array_of:
            return "scratch", array_of[node]
        if node in order.in_place:
            return "own", places[order.in_place[node]]
        if node in order.varying:
            return "own", places[node.detail]
        return "constant", constants.setdefault(node, len(constants))

    calls: list[tuple[Callable[..., Any], list[tuple[str, int]]]] = []
    last = {each: i for i, node in enumerate(order.nodes) for each in order.operands(node)}
    last |= dict.fromkeys(order.copied.values(), len(order.nodes))
    for i, node in enumerate(order.nodes):
        operands = order.operands(node)
        arguments = [operand(each) for each in operands]
        # An operand that is not needed again may be overwritten by the result.
        idle += [array_of[each] for each in {*operands} & array_of.keys() if last[each] == i]
        if node not in order.in_place:
            fitting = [place for place in idle if scratch[place] == node.dtype]
            if fitting:
                idle.remove(fitting[-1])
            else:
                scratch.append(node.dtype)
            array_of[node] = fitting[-1] if fitting else len(scratch) - 1
        calls.append((_into_last(node, chosen), [*arguments, operand(node)]))
    for name, node in order.copied.items():
        calls.append((_assign, [operand(node), ("own", places[name])]))
    first = {"own": 0, "scratch": len(places), "constant": len(places) + len(scratch)}
    return Plan(
        [
            (function, itemgetter(*[first[kind] + place for kind, place in arguments]))
            for function, arguments in calls
        ],
        tuple(scratch),
        tuple(constants),
        NUMBER in names,
    )


class _Order:
    """In which order values are computed, and which of them where they are stored.

    A value is computed where it is stored if all that need the old value can come before it.

    Attributes:
        nodes: The order.
        in_place: The arrays' names by the nodes that are computed there.
        copied: The nodes that are copied in the end, by the arrays' names.
        varying: See `_varying`.
    """

    def __init__(
        self, program: Program, varying: frozenset[Node], chosen: Mapping[Node, float]
    ) -> None:
        self.varying = varying
        self.in_place: dict[Node, str] = {}
        self.copied: dict[str, Node] = {}
        self._chosen = chosen
        self._before: dict[Node, list[Node]] = {}
        ends: dict[str, Node] = {}
        # The variable last, as its value follows from those of the slots.
        for name, node in reversed(list(program.stores.items())):
            end = self._at(node)
            if end.op == "array" or end not in varying or end in ends.values():
                end = Node("convert", (end,), end.dtype, None, end.rank, end.line)
            ends[name] = end
            self._add(end)
        for name, end in ends.items():
            readers = [
                node
                for node in self._before
                if node is not end
                and any((x.op, x.detail) == ("array", name) for x in self.operands(node))
            ]
            if not self._followers(end).isdisjoint(readers):
                self.copied[name] = end
            else:
                self.in_place[end] = name
                self._before[end] += readers
        self.nodes: dict[Node, None] = {}
        for end in ends.values():
            self._append(end)

    def operands(self, node: Node) -> list[Node]:
        """Returns what a call for a node takes."""
        operands = list(map(self._at, node.operands))
        is_one_of_powers = node.op == "power" and self._chosen.get(node) in _OF_POWERS
        return operands[:1] if is_one_of_powers else operands

    def _at(self, node: Node) -> Node:
        """Returns the node that is computed for this one: of a `select` that which is chosen."""
        while node.op == "select" and node in self._chosen:
            node = node.operands[int(self._chosen[node])]
        return node

    def _add(self, node: Node) -> None:
        if node not in self._before and node.op != "array":
            self._before[node] = [
                each for each in self.operands(node) if each in self.varying and each.op != "array"
            ]
            for each in self._before[node]:
                self._add(each)

    def _followers(self, node: Node) -> set[Node]:
        """Returns a node and those that can be computed only after it."""
        found, number = {node}, 0
        while len(found) > number:
            number = len(found)
            found |= {each for each, before in self._before.items() if not found.isdisjoint(before)}
        return found

    def _append(self, node: Node) -> None:
        if node not in self.nodes:
            for each in self._before[node]:
                self._append(each)
            self.nodes[node] = None


def _into_last(node: Node, chosen: Mapping[Node, float]) -> Callable[..., Any]:
    """Returns a function that puts its result into its last argument."""
    if node.op == "convert":
        return _assign
    if node.op == "select":
        return _select
    function = _OF_POWERS.get(chosen.get(node, 0)) or _function_of(node)
    # numpy deprecates `out` by position, which is quickest, for these two alone.
    return partial(_call_with_out, function) if node.op in ("maximum", "minimum") else function


def _assign(value: Chunk, out: Chunk) -> None:
    out[...] = value


def _select(condition: Chunk, yes: Chunk, no: Chunk, out: Chunk) -> None:
    out[...] = np.where(condition, yes, no)


def _call_with_out(function: Callable[..., Any], first: Chunk, second: Chunk, out: Chunk) -> None:
    function(first, second, out=out)
