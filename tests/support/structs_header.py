"""Writes kernels/shared/structs.cuh: the structs of gpuopt/backends/cuda/structs.py in C++.

.venv/bin/python tests/support/structs_header.py
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpuopt.backends.cuda import structs
from gpuopt.backends.cuda.parameters import (
    CPP_TYPES,
    Field,
    Number,
    Numbers,
    Pointer,
    Several,
    fields_of,
    struct_of,
)

COMMAND = ".venv/bin/python tests/support/structs_header.py"
HEADER = Path(__file__).resolve().parents[2] / "kernels" / "shared" / "structs.cuh"

_OPENING = f"""\
// How data for kernels is laid out. Addresses are integers, but for arrays that are only read.
// Written from gpuopt/backends/cuda/structs.py by {COMMAND}.
#pragma once

namespace gpuopt {{
"""
_CLOSING = "}  // namespace gpuopt\n"


def header() -> str:
    """Returns the text that the header should have."""
    forms = [
        form
        for form in vars(structs).values()
        if isinstance(form, type) and form.__module__ == structs.__name__
    ]
    return "\n".join([_OPENING, *("\n".join(lines_of(form)) + "\n" for form in forms), _CLOSING])


def lines_of(form: type[Any]) -> Iterator[str]:
    """Yields the lines of a NamedTuple's struct, with its docstring as comments."""
    text, _, attributes = (inspect.getdoc(form) or "").partition("\n\nAttributes:\n")
    fields = fields_of(form)
    types = map(type_of, fields.values())
    parameters = [
        *(f"class {name}" for name in dict.fromkeys(types) if name not in CPP_TYPES),
        *(["int count"] if any(isinstance(field, Several) for field in fields.values()) else []),
    ]
    yield from comment(text)
    if parameters:
        yield f"template <{', '.join(parameters)}>"
    # Of 8 bytes, a compiler loads all at once if it knows where they begin.
    is_word = not parameters and struct_of(form).size == 8
    yield f"struct {'alignas(8) ' if is_word else ''}{form.__name__} {{"
    documented = re.findall(r"^    ([\w, ]+): (.*(?:\n     .*)*)", attributes, re.MULTILINE)
    about = {names.split(", ")[0]: text for names, text in documented}
    assert about.keys() <= fields.keys(), f"{form.__name__} has no field of one of {[*about]}"
    for name, field in fields.items():
        yield from comment(about.get(name, ""), "  ")
        yield f"  {declaration(name, field)};"
    yield "};"


def comment(text: str, indent: str = "") -> Iterator[str]:
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            yield f"{indent}//"
        before = f"{indent}// "
        words = " ".join(paragraph.split())
        yield from textwrap.wrap(words, 100, initial_indent=before, subsequent_indent=before)


def declaration(name: str, field: Field | Several) -> str:
    of_field = type_of(field)
    cpp = CPP_TYPES.get(of_field, of_field)
    if isinstance(field, Pointer):
        return f"const {cpp}* {name}"
    if isinstance(field, Numbers):
        return f"{cpp} {name}[{field.count}]"
    return f"{cpp} {name}[count]" if isinstance(field, Several) else f"{cpp} {name}"


def type_of(field: Field | Several | str) -> str:
    """The dtype of a field's numbers, or the name of a template parameter."""
    if isinstance(field, str):
        return field
    if isinstance(field, Number | Pointer):
        return field.dtype
    return type_of(field.number if isinstance(field, Numbers) else field.element)


if __name__ == "__main__":
    HEADER.write_text(header())
