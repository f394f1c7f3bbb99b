"""Writes structs.cuh and constants.cuh in kernels/shared/: what Python and C++ share.

.venv/bin/python tests/support/structs_header.py
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

from gpuopt.backends import row_order
from gpuopt.backends.clips import ClipForm
from gpuopt.backends.cuda import launch_shapes, structs
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
from gpuopt.backends.norms import Clipping
from gpuopt.rules.random_bits import NUM_PARTS
from gpuopt.rules.slot_codes import Coding

COMMAND = ".venv/bin/python tests/support/structs_header.py"
_SHARED = Path(__file__).resolve().parents[2] / "kernels" / "shared"

_OPENING = f"""\
// How data for kernels is laid out. Addresses are integers, but for arrays that are only read.
// Written from gpuopt/backends/cuda/structs.py by {COMMAND}.
#pragma once

namespace gpuopt {{
"""
_CLOSING = "}  // namespace gpuopt\n"
_OPENING_OF_CONSTANTS = f"""\
// Numbers of which Python has the same. Compiles as CUDA and as plain C++17.
// Written by {COMMAND}.
#pragma once

namespace gpuopt {{
"""


def _numbers_of(kind: type[IntEnum], prefix: str) -> dict[str, int]:
    return {f"{prefix}_{each.name.lower()}": each.value for each in kind}


# By where they are in Python.
_CONSTANTS = {
    "gpuopt/backends/cuda/launch_shapes.py": {
        "warp_size": launch_shapes.WARP,
        "tile_size": launch_shapes.SORT_TILE,
        "pack_bytes": launch_shapes.PACK_BYTES,
        "dense_threads": launch_shapes.DENSE_THREADS,
        "sort_threads": launch_shapes.SORT_THREADS,
        "shares_per_group": launch_shapes.SHARES_PER_GROUP,
        "few_rows": launch_shapes.FEW_ROWS,
        "digit_bits": launch_shapes.DIGIT_BITS,
        "num_digits": launch_shapes.NUM_DIGITS,
        "row_threads": launch_shapes.ROW_THREADS,
        "piece_threads": launch_shapes.PIECE_THREADS,
        "clip_threads": launch_shapes.CLIP_THREADS,
        "clip_chunk": launch_shapes.CLIP_CHUNK,
        "measured_rows": launch_shapes.MEASURED_ROWS,
        "copy_threads": launch_shapes.COPY_THREADS,
        "copy_chunk": launch_shapes.COPY_CHUNK,
        "lane_codes": launch_shapes.LANE_CODES,
        "power_bits": launch_shapes.POWER_BITS,
        "num_powers": launch_shapes.NUM_POWERS,
    },
    "gpuopt/backends/row_order.py": {
        "piece_size": row_order.PIECE,
        "pieces_per_stretch": row_order.PIECES_PER_STRETCH,
        "stretch_size": row_order.STRETCH,
        "rows_per_word": row_order.ROWS_PER_WORD,
    },
    "`ClipForm` in gpuopt/backends/clips.py": _numbers_of(ClipForm, "clip"),
    "`Clipping` in gpuopt/backends/norms.py": _numbers_of(Clipping, "clip_by"),
    "`Coding` in gpuopt/rules/slot_codes.py": _numbers_of(Coding, "coding"),
    "gpuopt/rules/random_bits.py": {"num_key_parts": NUM_PARTS},
}


def headers() -> dict[Path, str]:
    """Returns the text that each header should have."""
    return {_SHARED / "structs.cuh": _structs(), _SHARED / "constants.cuh": _constants()}


def _constants() -> str:
    lines = [_OPENING_OF_CONSTANTS]
    for place, numbers in _CONSTANTS.items():
        lines.append(f"// {place}.")
        lines += [f"constexpr int {name} = {number};" for name, number in numbers.items()]
        lines.append("")
    nothing = float(structs.NOTHING_IS_WRONG).hex()
    lines += [
        "// gpuopt/backends/cuda/structs.py.",
        f"constexpr double nothing_is_wrong = {nothing};",
        "",
    ]
    return "\n".join([*lines, _CLOSING])


def _structs() -> str:
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
    if not fields:
        yield f"struct {form.__name__} {{}};"
        return
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
    for path, text in headers().items():
        path.write_text(text)
