"""Writes from exports the pages of optimizers, their list in README.md, and docs/reference.

From constructors it writes the names of hyperparameters for type checkers, and from Adam's rule
kernels/sample_program.cuh and the example of `gpuopt show`.

.venv/bin/python tests/support/tables.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import reference_pages
from optimizer_page import exports
from optimizer_page.page import page, page_of

from gpuopt import __main__ as command_line
from gpuopt.backends.cuda.kernels import dense_update
from gpuopt.optimizers.adam import adam
from gpuopt.optimizers.base import RuleOptimizer
from gpuopt.optimizers.base.clipping import CLIPPING
from gpuopt.optimizers.base.declared import hyperparameters_of

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ".venv/bin/python tests/support/tables.py"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "optimizers.md"
REFERENCE = ROOT / "docs" / "reference"
COMMAND_LINE = ROOT / "docs" / "command_line.md"
NAMES = ROOT / "gpuopt" / "optimizers" / "base" / "names.py"
PROGRAM = ROOT / "kernels" / "sample_program.cuh"
# The text is compared as it is generated.
SAMPLE = """\
// What gpuopt generates from the rule `adam` in gpuopt/optimizers/adam.py, for compilers to read
// before dense_update.cu, and the program that they read after it, for float32 variables. Then
// {expression}
// is a kernel. Nothing includes this file; `{command}` writes it.
// clang-format off
{rule}
{program}
"""
OF_TYPE_CHECKERS = '''\
"""The hyperparameters of gpuopt's optimizers, which type checkers know by this list alone.

`{command}` writes it from the constructors.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from gpuopt.optimizers.base.declared import Hyperparameter

HyperparameterName = Literal[
{literals}
]


class OfGroup(TypedDict, total=False):
    """The hyperparameters that a group may have."""

{fields}
'''


def pages() -> dict[Path, Callable[[], str]]:
    """Returns each file that follows from the exports, and what makes its text."""
    reference = {
        REFERENCE / f"{name}.md": partial(reference_pages.text_of, each, COMMAND)
        for name, each in reference_pages.PAGES.items()
    }
    one_by_one = {
        PAGE.with_suffix("") / f"{exports.short_name(each)}.md": partial(page_of, each, COMMAND)
        for each in exports.optimizers()
    }
    by_page = {README: readme, PAGE: partial(page, COMMAND), **one_by_one, **reference}
    by_page[NAMES] = names_of_hyperparameters
    return {**by_page, PROGRAM: sample_program, COMMAND_LINE: partial(with_example, COMMAND_LINE)}


def readme() -> str:
    names = ", ".join(map(in_short, exports.optimizers()))
    guide = "[which one?](docs/optimizers.md#choosing-one)"
    names = f"{names}; in brackets, options for variants."
    row = f"| [Optimizers](docs/optimizers.md) | {names} {guide} |"
    text, rows = re.subn(r"^\| \[?Optimizers\b.*$", row, README.read_text(), flags=re.MULTILINE)
    assert rows == 1, "README.md has no row that begins with | Optimizers"
    return text


def names_of_hyperparameters() -> str:
    of_all = [hyperparameters_of(each) for each in exports.optimizers()]
    names = [*sorted({name for each in of_all for name in each}), *CLIPPING]
    types = {name: f"Hyperparameter{' | None' * (name in CLIPPING)}" for name in names}
    return OF_TYPE_CHECKERS.format(
        command=COMMAND,
        literals="\n".join(f'    "{name}",' for name in names),
        fields="\n".join(f"    {name}: {each}" for name, each in types.items()),
    )


def sample_program() -> str:
    kernel = dense_update(adam, "float32")
    return SAMPLE.format(
        expression=kernel.expression,
        rule=adam.cpp,
        program="\n".join(kernel.struct),
        command=COMMAND,
    )


def with_example(page: Path) -> str:
    """Returns the page of the command line with what its `gpuopt show` prints."""
    text = page.read_text()
    [command] = re.findall(r"^    gpuopt (show .*)$", text, re.MULTILINE)
    before, fence, after = re.split(
        r"^(```text\n).*?(?=^```$)", text, flags=re.DOTALL | re.MULTILINE
    )
    with redirect_stdout(StringIO()) as printed:
        command_line.main(command.split())
    return f"{before}{fence}{printed.getvalue()}{after}"


def in_short(optimizer: type[RuleOptimizer]) -> str:
    """The name, and the arguments that choose among variants: "RMSProp (centered)"."""
    flags = [
        parameter.name
        for parameter in exports.own_arguments(optimizer)
        if isinstance(parameter.default, bool)
    ]
    name = exports.short_name(optimizer)
    return f"{name} ({', '.join(flags)})" if flags else name


def main() -> None:
    texts = {path: text() for path, text in pages().items()}
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
