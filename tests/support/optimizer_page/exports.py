"""The exported optimizers: their arguments, the parts of their docstrings, and how to make them."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import gpuopt
import gpuopt.optimizers
from gpuopt.demo import settings
from gpuopt.optimizers.base import Common, RuleOptimizer
from gpuopt.optimizers.base.declared import declared, meaning_of

_INDENTED = re.compile(r"^(?:    .*\n?)+", re.MULTILINE)
_SECTION = re.compile(r"^(Args|Raises|Attributes|Returns):$", re.MULTILINE)
# A formula that is part of a sentence.
_INLINE = re.compile(r"`([^`]*\bw -= [^`]*)`")


def optimizers() -> list[type[RuleOptimizer]]:
    return [
        value
        for name, value in vars(gpuopt.optimizers).items()
        if name in gpuopt.optimizers.__all__
    ]


def short_name(optimizer: type[RuleOptimizer]) -> str:
    return optimizer.__name__.removesuffix("Optimizer")


def own_arguments(optimizer: type[RuleOptimizer]) -> list[inspect.Parameter]:
    """The constructor's parameters, but for those that every optimizer has, or that it refuses."""
    parameters = inspect.signature(optimizer).parameters
    left_out = {*Common.__annotations__}
    if optimizer.rule_of_other_rows is None:  # as where an optimizer inherits from one that has it
        left_out.add("catch_up")
    return [value for name, value in parameters.items() if name not in left_out]


class Docstring(NamedTuple):
    """The parts of an optimizer's docstring.

    Attributes:
        summary: The first paragraph, in one line, less the formula that it may end with.
        formula: What is indented, or a formula in the summary. An optimizer without one has that of
            the class that it extends.
        text: The other paragraphs.
        arguments: What they mean, by name.
    """

    summary: str
    formula: str
    text: str
    arguments: Mapping[str, str]


def docstring(optimizer: type[RuleOptimizer]) -> Docstring:
    described, *_ = documents = [
        inspect.cleandoc(each.__doc__)
        for each in optimizer.__mro__
        if each.__doc__ and issubclass(each, RuleOptimizer) and each is not RuleOptimizer
    ]
    prose = _SECTION.split(described)[0]
    first, _, rest = prose.partition("\n\n")
    return Docstring(
        _in_one_line(first),
        next(filter(None, map(_formula, documents)), ""),
        re.sub(r"\n{3,}", "\n\n", _INDENTED.sub("", rest)).strip(),
        {name: meaning_of(each) for name, each in declared(optimizer).items()},
    )


def _formula(document: str) -> str:
    prose = _SECTION.split(document)[0]
    blocks = [textwrap.dedent(block).rstrip() for block in _INDENTED.findall(prose)]
    return "\n\n".join(blocks) or "\n".join(_INLINE.findall(prose.partition("\n\n")[0]))


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


def required_arguments(optimizer: type[RuleOptimizer]) -> dict[str, Any]:
    """Returns what the demo gives for the arguments without a default, less the global step.

    Raises:
        LookupError: it gives nothing for one of them.
    """
    name = short_name(optimizer)
    given = {"learning_rate": settings.TUNED.get(name, settings.UNTUNED_RATE)}
    given |= settings.ARGUMENTS.get(name, {})
    found = {}
    for parameter in own_arguments(optimizer):
        if parameter.default is parameter.empty and parameter.name != "global_step":
            if parameter.name not in given:
                raise LookupError(
                    f'{optimizer.__name__} needs {parameter.name}: add "{name}" to ARGUMENTS in '
                    f"{settings.__name__}"
                )
            found[parameter.name] = given[parameter.name]
    return found


def takes_global_step(optimizer: type[RuleOptimizer]) -> bool:
    return any(parameter.name == "global_step" for parameter in own_arguments(optimizer))


def make(
    optimizer: type[RuleOptimizer], settings: Mapping[str, Any], global_step: gpuopt.Variable
) -> RuleOptimizer:
    """Makes one, by arguments beside those without a default."""
    given = {**required_arguments(optimizer), **settings}
    if takes_global_step(optimizer):
        given["global_step"] = global_step
    return optimizer(**given)
