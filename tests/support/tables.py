"""Writes the tables of optimizers in README.md and docs/, from the exported classes.

.venv/bin/python tests/support/tables.py
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import peers

import gpuopt.optimizers
import gpuopt.wrappers
from gpuopt import Optimizer
from gpuopt.optimizers.base import Common, RuleOptimizer
from gpuopt.wrappers.periodic import PeriodicWrapper

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ".venv/bin/python tests/support/tables.py"

PAGE = f"""# Optimizers

<!-- `{COMMAND}` writes this page. -->

All of them are classes of `gpuopt`. Each number but an initial value may be a function without
arguments that returns one; it is called once in each step. Every optimizer also takes
`use_locking`, `name` and `on_nonfinite`, as `Optimizer` does, and `groups`: [other numbers for some
variables](guides/parameter_groups.md). Slots are what an optimizer keeps for each variable.

| | | arguments | slots |
|---|---|---|---|
"""

FORMS = f"""
## Beside torch, optax and others

Libraries give the same name to different formulas. Here, an optimizer without a library in its name
has TensorFlow's form, if TensorFlow 1 has it: its docstring says which one is meant. This is how
far the weights of two optimizers end from each other after {peers.STEPS} steps in float64, relative
to how far the other library's have moved; at a learning rate of 0.01, with gradients that do not
depend on the weights. `make test-peers` measures it.

| here | there | distance |
|---|---|---|
"""

WRAPPERS = """
## Wrappers

These wrap an optimizer, or another wrapper, and add to its steps. What they add is a part of the
step: a save sees both or neither, and a step that is skipped or refused has none of it. Slots,
variables and `state_dict` are those of the optimizer inside
([TensorFlow's and these](coming_from_tensorflow.md#wrappers-of-contrib)).

| | | arguments |
|---|---|---|
"""

WORKERS = """
## Optimizers of workers

These wrap an optimizer, too. Several workers train by themselves, and what they have in common
follows them ([guide](guides/workers_and_towers.md#workers-that-train-by-themselves),
[TensorFlow's and these](coming_from_tensorflow.md#workers-of-contrib)). A custom getter is of the
class that is named after the optimizer, as `AGNCustomGetter`.

| | | arguments |
|---|---|---|
"""


def optimizers() -> list[type[RuleOptimizer]]:
    return [
        value
        for name, value in vars(gpuopt.optimizers).items()
        if name in gpuopt.optimizers.__all__
    ]


def pages() -> dict[Path, str]:
    """Returns each file that holds a table, and the text that it should have."""
    readme = ROOT / "README.md"
    names = ", ".join(map(in_short, optimizers()))
    row = f"| [Optimizers](docs/optimizers.md) | {names} |"
    text, rows = re.subn(r"^\| \[?Optimizers\b.*$", row, readme.read_text(), flags=re.MULTILINE)
    assert rows == 1, "README.md has no row that begins with | Optimizers"
    rows = map(in_full, optimizers())
    of_workers = [each for each in wrappers() if is_for_workers(each)]
    others = [each for each in wrappers() if each not in of_workers]
    page = PAGE + "".join(rows) + FORMS + "".join(map(in_comparison, peers.CASES))
    page += WRAPPERS + "".join(map(wrapper_in_full, others))
    page += WORKERS + "".join(map(wrapper_in_full, of_workers))
    return {readme: text, ROOT / "docs" / "optimizers.md": page}


def in_short(optimizer: type[RuleOptimizer]) -> str:
    """The name, and the arguments that choose among variants: "RMSProp (centered)"."""
    flags = [
        parameter.name
        for parameter in own_arguments(optimizer)
        if isinstance(parameter.default, bool)
    ]
    return optimizer.__name__.removesuffix("Optimizer") + (
        f" ({', '.join(flags)})" if flags else ""
    )


def in_full(optimizer: type[RuleOptimizer]) -> str:
    summary = inspect.getdoc(optimizer).partition("\n\n")[0].replace("\n", " ")
    arguments = ", ".join(
        str(parameter.replace(annotation=parameter.empty)) for parameter in own_arguments(optimizer)
    )
    slots = ", ".join(f"`{slot}`" for slot in optimizer.rule.slots)
    return f"| `{optimizer.__name__}` | {summary} | `{arguments}` | {slots} |\n"


def in_comparison(case: peers.Case) -> str:
    distance = f"{case.distance:.2g}" if case.distance else "rounding"
    ours, theirs = (
        peers.call(name, arguments)
        for name, arguments in ((case.ours, case.arguments), (case.peer, case.settings))
    )
    return f"| `{ours}` | `{theirs}` | {distance} |\n"


def wrappers() -> list[type[Optimizer]]:
    named = (getattr(gpuopt.wrappers, name) for name in gpuopt.wrappers.__all__)
    return [each for each in named if isinstance(each, type) and issubclass(each, Optimizer)]


def is_for_workers(wrapper: type[Optimizer]) -> bool:
    return issubclass(wrapper, PeriodicWrapper | gpuopt.DropStaleGradientOptimizer)


def wrapper_in_full(wrapper: type[Optimizer]) -> str:
    summary = inspect.getdoc(wrapper).partition("\n\n")[0].replace("\n", " ")
    parameters = inspect.signature(wrapper).parameters.values()
    arguments = ", ".join(str(each.replace(annotation=each.empty)) for each in parameters)
    return f"| `{wrapper.__name__}` | {summary} | `{arguments}` |\n"


def own_arguments(optimizer: type[RuleOptimizer]) -> list[inspect.Parameter]:
    """The constructor's parameters, but for those that every optimizer has."""
    parameters = inspect.signature(optimizer).parameters
    return [value for name, value in parameters.items() if name not in Common.__annotations__]


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
