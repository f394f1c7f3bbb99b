"""Puts docs/optimizers.md together, and the page of each optimizer in docs/optimizers."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import peers
import reference_pages
import surfaces
from optimizer_page import entries, exports, forms, peer_defaults, prose
from optimizer_page.measured import bytes_of_state, measure, reach

import gpuopt
import gpuopt.wrappers
from gpuopt import Optimizer
from gpuopt.optimizers.base import RuleOptimizer
from gpuopt.optimizers.base.arguments import Additions, options
from gpuopt.optimizers.base.declared import Declared
from gpuopt.wrappers.periodic import PeriodicWrapper

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
# Their names in a sentence.
LIBRARIES = {"tf": "TensorFlow", "keras": "Keras", "lion_pytorch": "lion-pytorch"}


def page(command: str) -> str:
    optimizers = exports.optimizers()
    steps = {f"{each.name}_steps": each.steps for each in surfaces.SURFACES}
    of_workers = [each for each in wrappers() if is_for_workers(each)]
    others = [each for each in wrappers() if each not in of_workers]
    return "".join(
        [
            prose.BEGINNING.format(command=command),
            *(row(case, ", ".join(map(link_to, names)), why) for case, names, why in prose.GUIDE),
            prose.ALL,
            *map(in_one_row, optimizers),
            prose.COMMON.format(options=options_of_all()),
            prose.GALLERY.format(**steps),
            prose.FORMS,
            *map(family, forms.FAMILIES),
            prose.WRAPPERS,
            *map(wrapper_in_full, others),
            prose.WORKERS,
            *map(wrapper_in_full, of_workers),
        ]
    )


def row(*cells: str) -> str:
    assert not any("|" in cell for cell in cells), f"a cell would be divided: {cells}"
    return f"| {' | '.join(cells)} |\n"


def code_cell(text: object) -> str:
    return f"`{text}`"


def listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def link_to(short_name: str) -> str:
    return f"[{short_name}](optimizers/{short_name}.md)"


def in_one_row(optimizer: type[RuleOptimizer]) -> str:
    link = f"[`{optimizer.__name__}`](optimizers/{exports.short_name(optimizer)}.md)"
    found = measure(optimizer, {})
    summary = exports.docstring(optimizer).summary
    return row(link, summary, state(optimizer), reach(found))


def options_of_all() -> str:
    """Describes the options of all optimizers in a list."""
    given = options().items()
    return "\n".join(item_of(*each) for each in given if each[0] in Additions.__annotations__)


def item_of(name: str, declared: Declared) -> str:
    assert declared.option is not None
    guide = f" [Guide]({prose.GUIDES[name]})." if name in prose.GUIDES else ""
    text = f"- `{name}`, by default `{declared.option.default!r}`: {declared.meaning}{guide}"
    return textwrap.fill(
        text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def state(optimizer: type[RuleOptimizer]) -> str:
    """Says how many bytes the state takes: "8, or 12 with `centered=True`"."""
    usual = bytes_of_state(measure(optimizer, {}))
    larger = entries.entry_of(optimizer.__name__).larger
    if not larger:
        return usual
    arguments = ", ".join(f"`{name}={value!r}`" for name, value in larger.items())
    return f"{usual}, or {bytes_of_state(measure(optimizer, larger))} with {arguments}"


def page_of(optimizer: type[RuleOptimizer], command: str) -> str:
    """Returns the page of one optimizer."""
    name = exports.short_name(optimizer)
    described = exports.docstring(optimizer)
    found = measure(optimizer, {})
    kept = [f"{state(optimizer)} bytes for each float32 parameter"]
    kept += [f"in the slots {listed(list(map(code_cell, found.slots)))}"] if found.slots else []
    kept += [f"and {listed(list(map(code_cell, found.others)))} once"] if found.others else []
    if found.counts:
        kept += [f"and {listed(list(map(code_cell, found.counts)))} once for each variable"]
    parts = [
        f"# {optimizer.__name__}",
        f"<!-- `{command}` writes this page. -->",
        described.summary,
        f"```text\n{described.formula}\n```",
        described.text,
        f"![Its path from the circle to the star, on Rosenbrock's function and in a ravine: "
        f"{name}.](../images/paths/{name}.svg)",
        f"## Use\n\n```python\n{example(optimizer)}\n```",
        f"State: {', '.join(kept)}. A sparse step writes {reach(found)}.",
        f"Compared in the tests with {listed(sources(optimizer))}.",
        arguments(optimizer),
        elsewhere(optimizer),
        program(optimizer),
        reference_pages.signature_of(f"gpuopt.{optimizer.__name__}"),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def sources(optimizer: type[RuleOptimizer]) -> list[str]:
    """Lists what the tests compare an optimizer's numbers with."""
    name = exports.short_name(optimizer)
    of_contrib = json.loads((GOLDEN / "contrib_index.json").read_text())
    found = []
    if (GOLDEN / f"{name}.npz").exists():
        found.append(f"values of TensorFlow (`tests/golden/{name}.npz`)")
    elif any(case["optimizer"] == name for case in of_contrib["cases"]):
        found.append("values of TensorFlow 1.15 (`tests/golden/contrib.npz`)")
    theirs = dict.fromkeys(case.peer.name for case in peers.CASES if case.ours.name == name)
    found += map(code_cell, theirs)
    return [*found, "its formula in float64 (`tests/support/textbook.py`)"]


def example(optimizer: type[RuleOptimizer]) -> str:
    given = [f"{name}={value!r}" for name, value in exports.required_arguments(optimizer).items()]
    takes_step = exports.takes_global_step(optimizer)
    given += ["global_step=step"] if takes_step else []
    return prose.EXAMPLE.format(
        name=optimizer.__name__,
        step=prose.STEP if takes_step else "",
        arguments=", ".join(given),
        given=", global_step=step" if takes_step else "",
    )


def arguments(optimizer: type[RuleOptimizer]) -> str:
    meanings = exports.docstring(optimizer).arguments
    rows = [
        row(code_cell(each.name), default(each), meanings.get(each.name, ""))
        for each in exports.own_arguments(optimizer)
    ]
    return f"## Arguments\n\n{prose.ARGUMENTS}{''.join(rows)}"


def default(argument: inspect.Parameter) -> str:
    is_required = argument.default is argument.empty
    return peer_defaults.REQUIRED if is_required else in_cell(argument.default)


def program(optimizer: type[RuleOptimizer]) -> str:
    """Returns the C++ that is generated of the rule, without its lines of Python."""
    rule = exports.make(optimizer, {}, gpuopt.Variable(0, name="global_step")).rule
    code = re.sub(r"^#line .*\n", "", rule.cpp, flags=re.MULTILINE)
    return f"{prose.PROGRAM}\n\n```cpp\n{code}\n```"


def elsewhere(optimizer: type[RuleOptimizer]) -> str:
    """Returns the defaults beside those of other libraries, and how far these are from ours."""
    compared = entries.entry_of(optimizer.__name__).peers
    distances = agreement(exports.short_name(optimizer))
    parts = ["## In other libraries"] if compared or distances else []
    if compared:
        every = peer_defaults.all_signatures()
        columns = ["argument", "here", *map(code_cell, compared)]
        rows = [row(*columns), f"|{'---|' * len(columns)}\n"]
        for argument in exports.own_arguments(optimizer):
            there = [their_default(argument.name, every[peer]) for peer in compared]
            rows += [row(code_cell(argument.name), default(argument), *there)] if any(there) else []
        versions = [
            f"{LIBRARIES.get(library, library)} {version}"
            for library, version in peer_defaults.versions().items()
            if any(peer.startswith(f"{library}.") for peer in compared)
        ]
        parts += [f"Defaults of {listed(versions)}:", "".join(rows).rstrip()]
    return "\n\n".join([*parts, distances] if distances else parts)


def their_default(name: str, signature: peer_defaults.Signature) -> str:
    found = peer_defaults.beside(name, signature)
    if found is None:
        return ""
    theirs, value = found
    return in_cell(value) if theirs == name else f"`{theirs}`: {in_cell(value)}"


def in_cell(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def family(family: forms.Family) -> str:
    """Describes the forms of one name, and their distances."""
    letters = [chr(ord("A") + index) for index in range(len(family.forms))]
    columns = ["", "", "here", "elsewhere", *(f"to {letter}" for letter in letters)]
    rows = [row(*columns), f"|{'---|' * len(columns)}\n"]
    for letter, form in zip(letters, family.forms, strict=True):
        elsewhere = [*map(code_cell, form.theirs), *([form.also] if form.also else [])]
        here = f"[`{form.ours}`](optimizers/{form.ours.name}.md)" if form.ours else ""
        apart = ["" if form is other else distance(form, other) for other in family.forms]
        rows.append(row(letter, form.description, here, ", ".join(elsewhere), *apart))
    return f"\n### {family.question}\n\n{family.text}\n\n{''.join(rows)}"


def distance(first: forms.Form, second: forms.Form) -> str:
    return f"{forms.between(first, second):.2g}"


def agreement(name: str) -> str:
    """Returns the table of the optimizers of other libraries that one is or is not."""
    rows = [
        row(code_cell(case.ours), code_cell(case.peer), within(case.within))
        for case in peers.CASES
        if case.ours.name == name
    ]
    for family, form in forms.of_optimizer(name):
        for other in family.forms:
            rows += [
                row(code_cell(form.ours), there, distance(form, other))
                for there in whose(other)
                if other is not form
            ]
    if not rows:
        return ""
    columns = f"| here | there | [distance]({prose.DISTANCES}) |\n|---|---|---|\n"
    return f"{columns}{''.join(rows)}"


def whose(form: forms.Form) -> Iterable[str]:
    theirs = [code_cell(each) for each in form.theirs]
    return [*theirs, *([form.also] if form.also else [])] or [form.description]


def within(bound: float) -> str:
    return "rounding" if bound == peers.ROUNDING else f"below {bound:.0e}"


def wrappers() -> list[type[Optimizer]]:
    named = (getattr(gpuopt.wrappers, name) for name in gpuopt.wrappers.__all__)
    return [each for each in named if isinstance(each, type) and issubclass(each, Optimizer)]


def is_for_workers(wrapper: type[Optimizer]) -> bool:
    return issubclass(wrapper, PeriodicWrapper | gpuopt.DropStaleGradientOptimizer)


def wrapper_in_full(wrapper: type[Optimizer]) -> str:
    summary = inspect.getdoc(wrapper).partition("\n\n")[0].replace("\n", " ")
    parameters = inspect.signature(wrapper).parameters.values()
    arguments = ", ".join(str(each.replace(annotation=each.empty)) for each in parameters)
    name = wrapper.__name__
    name = name if name in gpuopt.__all__ else f"contrib.{name}"
    return f"| `{name}` | {summary} | `{arguments}` |\n"
