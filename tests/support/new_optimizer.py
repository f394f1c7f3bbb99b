"""Adds an optimizer: make new-optimizer NAME=Grams, once before it is filled in and once after.

The first call writes module, textbook function, exports, the entry of its page and a line
of the changelog, with `FILL IN` where something is left to write: a test fails as long as it is.
The second call writes what follows from them: the tuned rate, pages, pictures and public names.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZERS = "gpuopt/optimizers"
RATES = "gpuopt/demo/data/learning_rates.toml"
USAGE = "make new-optimizer NAME=Grams: its class is GramsOptimizer, in gpuopt/optimizers/grams.py"
FILL_IN = "FILL IN"

RULE = '''"""{name}."""

from __future__ import annotations

from typing import Annotated, Any, Unpack

from gpuopt.optimizers.base import (
    AllDigitsOptimizer,
    Common,
    Hyperparameter,
    update_rule,
)


@update_rule
def {module}(var: Any, grad: Any, *, learning_rate: Any) -> None:
    # FILL IN the slots after grad, the scalars after *, and the formula, which writes in place.
    raise NotImplementedError("gpuopt/optimizers/{module}.py: FILL IN the formula of {name}")


class {name}Optimizer(AllDigitsOptimizer):
    """{name} (FILL IN authors, year, algorithm): FILL IN what it does, in half a line.

        FILL IN the formula

    FILL IN whose form it is. A sparse gradient updates the rows it names. Python floats keep all
    digits.
    """

    rule = {module}

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "FILL IN, and the other arguments."] = 0.001,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(common, learning_rate=learning_rate)
'''

TEXTBOOK = '''

def {module}(w, history: History, *, learning_rate=0.001) -> State:
    """FILL IN authors, year, algorithm."""
    raise NotImplementedError("tests/support/textbook.py: FILL IN {name}, from its paper")
'''

EXPORT = "from gpuopt.optimizers.{module} import {name}Optimizer as {name}Optimizer\n"
LONG_EXPORT = """from gpuopt.optimizers.{module} import (
    {name}Optimizer as {name}Optimizer,
)
"""
SHORT_NAME = "{name} = _all.{name}Optimizer\n"
# An entry of a panel that there is not fails.
ENTRY = '    "{name}Optimizer": Entry("FILL IN its panel, and its peers"),\n'
CHANGE = "- {name}: FILL IN what it is.\n"


class Place(NamedTuple):
    """A line that has to be filled in."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"    {self.file}:{self.line}: {self.text.strip()}"


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    name = " ".join(arguments)
    if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", name) or name.endswith("Optimizer"):
        asked = f"{name!r} is no name" if name else "there is no name"
        return refuse(f"{asked}: a capital, letters and digits, without Optimizer. {USAGE}")
    module = module_of(name)
    file = ROOT / OPTIMIZERS / f"{module}.py"
    if not file.exists():
        if taken := [each for each in names() if each.lower() == name.lower()]:
            return refuse(f"{taken[0]} exists, which is spelled as {name} but for its case")
        write_pieces(name, module)
        print(f"{name} is written. Fill in:", *left(name), sep="\n")
        print(f"CONTRIBUTING.md says how. Then again: make new-optimizer NAME={name}")
        return 0
    if name not in names() or re.search(rf"^{name} = ", (ROOT / RATES).read_text(), re.MULTILINE):
        return refuse(f"{name} exists: {file.relative_to(ROOT)}")
    if places := left(name):
        print(f"new-optimizer: {name} is not filled in:", *places, sep="\n", file=sys.stderr)
        return 1
    return generate(name)


def refuse(reason: str) -> int:
    print(f"new-optimizer: {reason}", file=sys.stderr)
    return 1


def module_of(name: str) -> str:
    """Returns the module of an optimizer: that of AMSGrad is ams_grad."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def names() -> list[str]:
    """Returns the exported optimizers, less "Optimizer"."""
    exports = (ROOT / OPTIMIZERS / "__init__.py").read_text()
    return re.findall(r"as (\w+)Optimizer\b", exports)


def write_pieces(name: str, module: str) -> None:
    """Writes what has to be filled in, and exports it."""
    (ROOT / OPTIMIZERS / f"{module}.py").write_text(RULE.format(name=name, module=module))
    with (ROOT / "tests/support/textbook.py").open("a") as textbook:
        textbook.write(TEXTBOOK.format(name=name, module=module))
    export = EXPORT.format(name=name, module=module)
    if len(export) > 101:
        export = LONG_EXPORT.format(name=name, module=module)
    line = r"^from gpuopt\.optimizers\.(\w+) import"
    insert(f"{OPTIMIZERS}/__init__.py", export, line, module, "\n# Type checkers")
    entry, line = ENTRY.format(name=name), r'^    "(\w+)Optimizer": Entry'
    insert("tests/support/optimizer_page/entries.py", entry, line, name, "}\n\n\ndef entry_of")
    short, line = SHORT_NAME.format(name=name), r"^(\w+) = _all\."
    insert("gpuopt/short_names.py", short, line, name)
    changes = ROOT / "CHANGELOG.md"
    before, heading, after = changes.read_text().partition("### Optimizers\n\n")
    assert heading, "CHANGELOG.md has no section Optimizers"
    first, end, others = after.partition("\n\n")
    text = f"{before}{heading}{first}\n{CHANGE.format(name=name)}{end[1:]}{others}"
    changes.write_text(text)


def insert(file: str, line: str, pattern: str, key: str, end: str = "") -> None:
    """Inserts a line into a file before the first of a kind whose key is larger, or at the end."""
    text = (ROOT / file).read_text()
    larger = (
        found.start()
        for found in re.finditer(pattern, text, re.MULTILINE)
        if found[1].lower() > key.lower()
    )
    at = next(larger, text.index(end) if end else len(text))
    (ROOT / file).write_text(text[:at] + line + text[at:])


def left(name: str) -> list[Place]:
    """Returns what of an optimizer is left to fill in."""
    module = module_of(name)
    return [
        *places(f"{OPTIMIZERS}/{module}.py", ""),
        *places("tests/support/textbook.py", rf"^def {module}\((?:.*\n)*?(?=\n\n|\Z)"),
        *places("tests/support/optimizer_page/entries.py", rf'^    "{name}Optimizer": .*$'),
        *places("CHANGELOG.md", rf"^- {name}: .*$"),
    ]


def places(file: str, pattern: str) -> Iterator[Place]:
    """Yields what is left to fill in in a file, or in the part of it that a pattern finds."""
    path = ROOT / file
    text = path.read_text() if path.exists() else ""
    part = re.search(pattern, text, re.MULTILINE) if pattern else None
    begin, end = part.span() if part else (0, 0 if pattern else len(text))
    for found in re.finditer(rf"^.*{FILL_IN}.*$", text[begin:end], re.MULTILINE):
        yield Place(file, text.count("\n", 0, begin + found.start()) + 1, found[0])


def generate(name: str) -> int:
    """Runs what writes the files that follow from an optimizer; returns the exit status."""
    for command in (
        ["-m", "gpuopt.demo.tune", name],
        ["tests/support/tables.py"],
        ["tests/support/gallery.py"],
        ["tests/support/public_api.py"],
    ):
        print(f"== {' '.join(command)}", flush=True)
        if status := subprocess.run([sys.executable, *command], cwd=ROOT).returncode:
            return status
    print(f"{name} is complete. Test it: make lint; make test; make test-gpu; make test-peers")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
