"""Finds rules whose step does not depend on the value of the variable.

If it does not, but for a decay, a variable that is the sum of two numbers can be stepped and
rounded once: the rule steps the smaller one, and the result is added to the larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpuopt.rules.tracing import Node, Program


class Shift(NamedTuple):
    """A step that is the same wherever the variable is, but for a decay.

    Attributes:
        decay: The scalar s of the term `var -= s * var`; None if there is no such term.
    """

    decay: str | None


def shift_of(program: Program) -> Shift | None:
    """Returns a rule's `Shift`, or None if its step may depend on the variable in another way."""
    moved = dict(program.stores)
    node = moved.pop("var", None)
    dependent = _dependent(program)
    if node is None or not dependent.isdisjoint(moved.values()):
        return None
    decay = None
    while node.op != "array":
        if node.op not in ("add", "subtract"):
            return None
        first, second = node.operands
        if node.op == "add" and first not in dependent:
            first, second = second, first
        if second in dependent:
            found = _decay(second)
            if found is None or decay is not None or node.op == "add":
                return None
            decay = found
        if first not in dependent:
            return None
        node = first
    return Shift(decay)


def _dependent(program: Program) -> set[Node]:
    """Returns the values that depend on the variable."""
    found: set[Node] = set()
    for node in program.nodes():
        if (node.op, node.detail) == ("array", "var") or not found.isdisjoint(node.operands):
            found.add(node)
    return found


def _decay(node: Node) -> str | None:
    """Returns the scalar s of a value `s * var`; None if the value is no such product."""
    factors = {each.op: each.detail for each in node.operands}
    is_decay = node.op == "multiply" and factors.get("array") == "var" and "scalar" in factors
    return factors["scalar"] if is_decay else None


def cpp_type(shift: Shift | None, scalars: Sequence[str]) -> str:
    """Returns the type in kernels/shared/catch_up.cuh for a rule with these scalars."""
    if shift is None:
        return "gpuopt::Shift<false, -1>"
    place = -1 if shift.decay is None else scalars.index(shift.decay)
    return f"gpuopt::Shift<true, {place}>"
