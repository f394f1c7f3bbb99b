"""C++ of a traced rule: a functor that the loops of kernels/ call for each element."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gpuopt.rules.functions import OPERATIONS, TYPES
from gpuopt.rules.tracing import NUMBER, Node, Program, Rank

# Computed before all else where they do not depend on the element: see `_body`.
_COSTLY = {"divide", "power", "select", "sqrt"}

# Of two booleans, numpy's sum and product are booleans; C++'s are integers.
_OF_BOOLEANS = {"add": "logical_or", "multiply": "logical_and"}

# The arrays of stages that are no slots.
_OF_STEPS = {"var", "grad", "step", NUMBER}

# The file and line of statements without a line of Python.
_GENERATED = "generated:1"


class Functor(NamedTuple):
    """A functor in C++.

    Attributes:
        name: With its namespaces.
        definition: Of the struct.
    """

    name: str
    definition: str


class EmittedStage(NamedTuple):
    """The parts of a stage that are written as C++.

    Attributes:
        name: The function's name in C++.
        arrays: The function's arrays, in order.
        programs: The function's trace for each type.
        terms: The same for `Stage.terms`; empty if the stage has no sums.
    """

    name: str
    arrays: Sequence[str]
    programs: Mapping[str, Program]
    terms: Mapping[str, Program]


def field_name(name: str, place: int, kind: str = "scalar") -> str:
    """Returns a scalar's name in C++: no keyword or macro ends with an underscore like it."""
    is_plain = name.isascii() and not name.startswith("_")
    return f"{name}_" if is_plain else f"{kind}_{place}"


def emit(
    name: str,
    slots: Sequence[str],
    fields: Mapping[str, str],
    counts: Mapping[str, int],
    degrees: Sequence[int],
    steps: Mapping[str, Program],
    terms: Mapping[str, Program],
) -> Functor:
    """Returns the functor of a rule.

    Args:
        name: The rule's.
        slots: The rule's, in order.
        fields: The names of its scalars in C++, by their names in Python, in order.
        counts: The values of the functor's constants, by their names.
        degrees: See `UpdateRule`.
        steps: The traces of the rule, for float32 and for float64.
        terms: The traces of its terms; empty if it has no sums.
    """
    places = {"var": "var", "grad": "grad"}
    places |= {slot: f"slot[{place}]" for place, slot in enumerate(slots)}
    names = {f"array {array}": text for array, text in places.items()}
    names |= {f"scalar {scalar}": f"s.{field}" for scalar, field in fields.items()}
    lines = [f"  static constexpr int {each} = {count};" for each, count in counts.items()]
    lines += _degree(degrees)
    declared = f"Real {', '.join(fields.values())}; " if fields else ""
    lines += ["  template <class Real>", f"  struct Scalars {{ {declared}}};"]
    if terms:
        head = "terms({0} var, {0} grad, {0}* slot, const Scalars<{0}>& s, {0}* terms)"
        lines += _functions(head, terms, names, places)
    head = "apply({0}& var, {0} grad, {0}* slot, const Scalars<{0}>& s)"
    lines += _functions(head, steps, names, places)
    return _struct(name, lines)


def emit_staged(
    name: str,
    rule: str,
    constants: Mapping[str, int],
    fields: Mapping[str, str],
    degrees: Sequence[int],
    stages: Mapping[str, Sequence[EmittedStage | None]],
    slots: Sequence[str],
    *,
    has_own_sums: bool,
) -> Functor:
    """Returns the functor of a rule with stages, which calls the rule's.

    Args:
        name: The name of the rule with its stages.
        rule: The name of the rule's own functor.
        constants: The functor's constants, by name.
        fields: What the stages' scalars are called in C++, which follow those of the rule.
        degrees: See `UpdateRule`.
        stages: By the function that calls them, in order; None stands for the rule.
        slots: The stages' slots, which precede those of the rule.
        has_own_sums: Whether the rule has sums.
    """
    lines = [
        f"  static constexpr {'bool' if _is_boolean(each) else 'int'} {each} = "
        f"{str(bool(value)).lower() if _is_boolean(each) else value};"
        for each, value in constants.items()
    ]
    lines += _degree(degrees)
    declared = f"Real {', '.join(fields.values())}; " if fields else ""
    lines += [
        f"  using Rule = {rule};",
        "  template <class Real>",
        f"  struct Scalars : Rule::template Scalars<Real> {{ {declared}}};",
    ]
    for called_by, called in stages.items():
        write = _random if called_by == "store" else _stage
        lines += [line for stage in called if stage is not None for line in write(stage, fields)]
    own = f"slot + {len(slots)}" if slots else "slot"
    slot_of = {slot: f"slot[{place}]" for place, slot in enumerate(slots)}
    in_place = [stage for stage in stages["apply"] if stage is not None and "step" in stage.arrays]
    step = ["Real step = Real(0);"] if in_place else []
    step += [f"Rule::apply({'step' if in_place else 'var'}, grad, {own}, s);"]

    def calls(some: Sequence[EmittedStage | None]) -> list[str]:
        lines = []
        for stage in some:
            if stage is None:
                lines += step
            else:
                arrays = [slot_of.get(each, each) for each in stage.arrays]
                lines.append(f"{stage.name}({', '.join([*arrays, 's'])});")
        return lines

    scalars = "const Scalars<Real>& s"
    template = "  template <class Real>"
    if stages["gradient"]:
        is_numbered = any(NUMBER in stage.arrays for stage in stages["gradient"] if stage)
        number = f" {NUMBER}" if is_numbered else ""
        has_slots = any(slot_of.keys() & {*stage.arrays} for stage in stages["gradient"] if stage)
        slot = " slot" if has_slots else ""
        head = f"Real gradient(Real grad, numpy::Word{number}, Real*{slot}, {scalars})"
        lines += _lines(head, [*calls(stages["gradient"]), "return grad;"], template)
    terms = [stage for stage in in_place if stage.terms]
    if terms or has_own_sums:
        body = [*step, f"{terms[0].name}_terms(grad, step, terms);"] if terms else []
        body += [] if terms else [f"Rule::terms(var, grad, {own}, s, terms);"]
        var = "Real" if terms else "Real var"
        head = f"void terms({var}, Real grad, Real* slot, {scalars}, Real* terms)"
        lines += _lines(head, body, template)
    head = f"void apply(Real& var, Real grad, Real* slot, {scalars})"
    lines += _lines(head, calls(stages["apply"]), template)
    if stages["follow"]:
        head = f"void follow(Real var, Real* slot, {scalars})"
        lines += _lines(head, calls(stages["follow"]), template)
    return _struct(name, lines)


def _is_boolean(constant: str) -> bool:
    return constant.startswith(("is_", "has_"))


def _degree(degrees: Sequence[int]) -> list[str]:
    if not degrees:
        return []
    chosen = "".join(f"sum == {place} ? {degree} : " for place, degree in enumerate(degrees))
    return [f"  GPUOPT_INLINE static constexpr int degree(int sum) {{ return {chosen}-1; }}"]


def _stage(stage: EmittedStage, fields: Mapping[str, str]) -> list[str]:
    """Returns the functions of a stage."""
    places = {
        each: each if each in _OF_STEPS else field_name(each, place, "array")
        for place, each in enumerate(stage.arrays)
    }
    names = {f"array {array}": text for array, text in places.items()}
    names |= {f"scalar {scalar}": f"s.{field}" for scalar, field in fields.items()}
    written = {array for program in stage.programs.values() for array in program.stores}
    given = [
        f"{'numpy::Word' if each == NUMBER else '{0}'}{'&' if each in written else ''} {text}"
        for each, text in places.items()
    ]
    head = f"{stage.name}({', '.join([*given, 'const Scalars<{0}>& s'])})"
    lines = _functions(head, stage.programs, names, places)
    if stage.terms:
        head = f"{stage.name}_terms({{0}} grad, {{0}} step, {{0}}* terms)"
        lines += _functions(head, stage.terms, names, places)
    return lines


def _random(stage: EmittedStage, fields: Mapping[str, str]) -> list[str]:
    """Returns the function of the random bits by which loops store."""
    names = {f"array {NUMBER}": NUMBER}
    names |= {f"scalar {scalar}": f"s.{field}" for scalar, field in fields.items()}
    lines = _body(stage.programs["float32"], TYPES, names, {}, returned="return {1};")
    head = f"numpy::Word random(numpy::Word {NUMBER}, const Scalars<Real>& s)"
    return _lines(head, lines, "  template <class Real>")


def _struct(name: str, lines: Sequence[str]) -> Functor:
    """Returns a functor, whose name has a digest of its statements."""
    body = "\n".join(lines)
    # A rule that moves in its file keeps its name.
    digest = hashlib.sha256("\n".join(_without_places(lines)).encode()).hexdigest()[:8]
    plain = re.sub("[^A-Za-z0-9_]", "_", name)
    struct = f"{plain}_{digest}"
    guard = f"GPUOPT_TRACED_{struct}"  # one source may have a rule twice: alone, and with stages
    text = (
        f"namespace gpuopt {{\nnamespace traced {{\nstruct {struct} : RuleDefaults {{\n{body}\n"
        "};\n}\n}"
    )
    includes = '#include "shared/numpy.cuh"\n#include "shared/rule.cuh"'
    return Functor(
        f"gpuopt::traced::{struct}", f"{includes}\n#ifndef {guard}\n#define {guard}\n{text}\n#endif"
    )


def _functions(
    head: str, programs: Mapping[str, Program], names: Mapping[str, str], places: Mapping[str, str]
) -> list[str]:
    """Returns a function template; or a function for each type, if their statements differ."""
    bodies = {
        real: _body(program, {**TYPES, real: "Real"}, names, places)
        for real, program in programs.items()
    }
    if len({*map("\n".join, bodies.values())}) == 1:
        lines = next(iter(bodies.values()))
        return _function(head.format("Real"), lines, "  template <class Real>")
    return [
        line
        for real, lines in bodies.items()
        for line in _function(
            head.format(TYPES[real]), [f"using Real = {TYPES[real]};", *lines], ""
        )
    ]


def _function(head: str, lines: Sequence[str], template: str) -> list[str]:
    code = "\n".join(_without_places(lines))
    for name in re.findall(r" (\w+)(?=[,)])", head):
        if name != "terms" and not re.search(rf"\b{name}\b", code):
            head = re.sub(rf" {name}(?=[,)])", "", head)  # compilers warn of unused parameters
    return _lines(f"void {head}", lines, template)


def _lines(head: str, lines: Sequence[str], template: str) -> list[str]:
    return [
        *([template] if template else []),
        f"  GPUOPT_INLINE static {head} {{",
        *(line if line.startswith("#") else f"    {line}" for line in lines),
        "  }",
    ]


def _at(line: str) -> str:
    """Returns the directive by which compilers and profilers show a line of Python."""
    path, _, number = line.rpartition(":")
    # ptxas takes none of these in a file's name, escaped or not.
    path = re.sub(r'["\\\x00-\x1f]', "_", path)
    return f'#line {number} "{path}"'


def _without_places(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if not line.startswith("#line")]


def _body(
    program: Program,
    types: Mapping[str, str],
    names: Mapping[str, str],
    places: Mapping[str, str],
    returned: str = "terms[{}] = {};",
) -> list[str]:
    """Returns the statements of a program.

    `returned` is the statement for a result, with placeholders for its number and its value.
    """
    writer = _Writer(program, types, names)
    # Costly values that are the same for all elements come first: compilers hoist them.
    for node in program.nodes():
        if node.rank is Rank.UNIFORM and node.op in _COSTLY:
            writer.name(node)
    ends = [(array, writer.value(node)) for array, node in program.stores.items()]
    terms = [(node, writer.value(node)) for node in program.returned]
    # Stores follow all statements, which need the old values.
    for place, (array, value) in enumerate(ends):
        writer.write(program.lines[array], f"const Real new_{place} = {value};")
    for place, (array, _) in enumerate(ends):
        writer.write(program.lines[array], f"{places[array]} = new_{place};")
    for place, (node, value) in enumerate(terms):
        writer.write(node.line, returned.format(place, value))
    return [*writer.lines, _at(_GENERATED)]


class _Writer:
    """Writes nodes as statements; a value that is used once is part of its user's expression."""

    def __init__(
        self, program: Program, types: Mapping[str, str], names: Mapping[str, str]
    ) -> None:
        self._types, self._names = types, names
        self._users = Counter(each for node in program.nodes() for each in node.operands)
        self._users.update([*program.stores.values(), *program.returned])
        self._written: dict[Node, str] = {}
        self.lines: list[str] = []

    def write(self, line: str, statement: str) -> None:
        """Writes a statement after a `#line` for its line of Python."""
        self.lines += [_at(line or _GENERATED), statement]

    def value(self, node: Node) -> str:
        """Returns an expression without effects: a name, a number, or one in brackets."""
        if node in self._written:
            return self._written[node]
        if node.op in ("array", "scalar"):
            return self._names[f"{node.op} {node.detail}"]
        if node.op == "constant":
            return self._literal(node)
        if self._users[node] == 1:
            return f"({self._expression(node)})"
        return self.name(node)

    def name(self, node: Node) -> str:
        """Returns the name of a constant that has the value."""
        if node not in self._written:
            text, name = self._expression(node), f"t{len(self._written)}"
            self._written[node] = name
            self.write(node.line, f"const {self._type_of(node)} {name} = {text};")
        return self._written[node]

    def _expression(self, node: Node) -> str:
        operands = [self.value(operand) for operand in node.operands]
        if node.op == "convert":
            return f"static_cast<{self._type_of(node)}>({operands[0]})"
        op = _OF_BOOLEANS.get(node.op, node.op) if node.dtype.kind == "b" else node.op
        return OPERATIONS[op].format(*operands)

    def _literal(self, node: Node) -> str:
        if node.dtype.kind == "b":
            return str(node.detail).lower()
        of_type = self._type_of(node)
        infinite = f"numpy::infinity<{of_type}>()"
        if np.isnan(node.detail):
            return f"({infinite} - {infinite})"
        if np.isinf(node.detail):
            return infinite if node.detail > 0 else f"(-{infinite})"
        suffix = "ull" if node.dtype.kind == "u" else ""
        return f"{of_type}({node.detail!r}{suffix})"

    def _type_of(self, node: Node) -> str:
        return self._types[node.dtype.name]
