"""The command `gpuopt show`: an optimizer's step as C++, with its stages and its arrays' types."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import gpuopt.optimizers
from gpuopt.backends.backend import compute_type
from gpuopt.codecs import Split, codec_of
from gpuopt.near_names import find_near
from gpuopt.optimizers.base import RuleOptimizer
from gpuopt.optimizers.base.arguments import options
from gpuopt.optimizers.base.declared import hyperparameters_of
from gpuopt.rules.slot_codes import scales_name
from gpuopt.rules.stage import ORDER, in_order
from gpuopt.rules.staged import StagedRule, staged
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.slot_codecs import MASTER
from gpuopt.step.averages import averaged_rule
from gpuopt.step.updated_arrays import target_of
from gpuopt.training.moving_average import ExponentialMovingAverage
from gpuopt.variables.variable import FLOAT_DTYPES, Variable

_EPILOG = """\
options of all optimizers, as in Python; in brackets, the value if none is given:
{switches}
--clip is short for --clip-norm. All other arguments of the optimizer are options, too, as
--use-nesterov or --momentum 0.9. Hyperparameters are arguments of the C++, so their values do not
change it."""

_SHORT = {"clip": "clip_norm"}
# The arrays of stages, by the function of a program that calls them.
_OF_FUNCTIONS = {"apply": "variable", "follow": "stored"}
# For hyperparameters without a default, or without a value.
_NUMBER = 0.5


class ShowError(Exception):
    """An optimizer or option that the command cannot show."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments; `text_of` takes all others as the optimizer's."""
    parser.epilog = _EPILOG.format(switches="\n".join(_switches()))
    parser.usage = "gpuopt show NAME [--dtype TYPE] [--OPTION [VALUE] ...]"
    parser.add_argument(
        "optimizer",
        metavar="NAME",
        help="an optimizer, such as adam; or MODULE:CLASS for your own, from the current folder or "
        "an installed package",
    )
    parser.add_argument(
        "--dtype",
        choices=sorted(dtype.name for dtype in FLOAT_DTYPES),
        default="float32",
        help="dtype of variables and gradients; float32 by default",
    )


def text_of(name: str, dtype: str, words: Sequence[str]) -> str:
    """Returns a step's C++, with comments about its stages and arrays.

    Args:
        name: The argument NAME of the command line.
        dtype: The variable's.
        words: The optimizer's options, as typed on the command line.

    Raises:
        ShowError: there is no such optimizer, or it refuses an option.
    """
    made = _class_of(name)
    typed = _options(words, made)
    given: dict[str, Any] = {**_required(made), **typed}
    try:
        if "averages" in given:
            given["averages"] = ExponentialMovingAverage(given["averages"])
        optimizer = made(**given)
        variable = Variable(np.ones((4, 2), dtype), name="variable")
        optimizer.apply_gradients([(np.zeros((4, 2), dtype), variable)])
    except (TypeError, ValueError) as error:
        raise ShowError(str(error)) from error
    rule = _rule_of(optimizer, variable.dtype)
    real = np.dtype(compute_type(variable.dtype))
    arguments = [f"{option}={value!r}" for option, value in typed.items()]
    lines = [
        f"{', '.join([type(optimizer).__name__, *arguments])}; variables of {dtype}",
        "",
        "stages of a step, in this order:",
        *_in_columns(_stages(rule)),
        "",
        f"arrays (a step computes in {real}):",
        *_in_columns(_arrays(optimizer, rule, variable, real)),
    ]
    return "\n".join([*(f"// {line}".rstrip() for line in lines), rule.cpp])


def _class_of(name: str) -> type[Any]:
    module, _, attribute = name.partition(":")
    if attribute:
        if "" not in sys.path:
            sys.path.insert(0, "")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ShowError(f"{name!r} cannot be imported: {error}") from error
        if not (isinstance(found, type) and issubclass(found, RuleOptimizer)):
            raise ShowError(f"{name!r} is no class of optimizers with an update rule")
        return found
    names = [each for each in vars(gpuopt.optimizers) if each.endswith("Optimizer")]
    wanted = name.lower().removesuffix("optimizer")
    for each in names:
        if each.removesuffix("Optimizer").lower() == wanted:
            return getattr(gpuopt.optimizers, each)  # type: ignore[no-any-return]
    others = find_near(name, names) or names
    short = ", ".join(each.removesuffix("Optimizer") for each in others)
    raise ShowError(f"there is no optimizer {name!r}; there is {short}")


def _switches() -> list[str]:
    """Describes the options that all optimizers take, but for those that no text can give."""
    lines: list[str] = []
    for name, each in options().items():
        if (alone := _alone(name)) is not None:
            switch = f"  --{name.replace('_', '-')} [{alone}]"
            lines.append(f"{switch:<30}  {each.meaning.partition('. ')[0].rstrip('.')}")
    return lines


def _alone(name: str) -> Any:
    """Returns the value of an option of all optimizers that is given without one."""
    option = options()[name].option
    return option and option.alone


def _options(words: Sequence[str], made: type[Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            raise ShowError(f"{word!r} is no option: options are --NAME or --NAME VALUE")
        name, has_value, value = word[2:].partition("=")
        name = name.replace("-", "_")
        name = _SHORT.get(name, name)
        if not has_value and left and not left[0].startswith("--"):
            has_value, value = "=", left.pop(0)
        if has_value:
            given[name] = _value(value)
        elif name in options():
            if (alone := _alone(name)) is None:
                raise ShowError(f"--{name.replace('_', '-')} needs a value")
            given[name] = alone
        else:
            given[name] = _NUMBER if name in hyperparameters_of(made) else True
    return given


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _required(made: type[Any]) -> dict[str, Any]:
    """Returns values of the arguments without a default."""
    parameters = inspect.signature(made).parameters.values()
    names = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind is not each.VAR_KEYWORD
    ]
    return {name: Variable(0, name=name) if name == "global_step" else _NUMBER for name in names}


def _rule_of(optimizer: RuleOptimizer, dtype: np.dtype[Any]) -> UpdateRule:
    """Returns the rule of a step that updates variables of a dtype by dense gradients."""
    rule = optimizer.rule
    if optimizer.options.averages is not None:
        rule = averaged_rule(rule, dtype, optimizer.options.codecs.masters)
    for option in optimizer.options.stages:
        rule = staged(rule, option.stage) if option.joins(dtype) else rule
    optimizer._prepare()
    thread, clips = optimizer.this_thread, optimizer.options.clips
    if clips is None:
        return rule
    return clips.of_step(thread.hyperparameters, thread.of_groups).stages_around(rule)


def _stages(rule: UpdateRule) -> Sequence[Sequence[str]]:
    own = rule.rule if isinstance(rule, StagedRule) else rule
    rows = [("sums", ", ".join(rule.sums), "over each variable, before anything is written")]
    rows = rows if rule.sums else []
    for called_by in ORDER:
        for stage in in_order(rule.stages, called_by):
            if stage is None:
                rows.append(("rule", own.name, own.apply.__module__))
                continue
            function = stage.function
            summary = (inspect.getdoc(function) or "").partition("\n")[0]
            what = f"{function.__module__}: {summary}"
            place = "step" if "step" in stage.arrays else _OF_FUNCTIONS.get(called_by, called_by)
            rows.append((place, function.__name__, what))
    return rows


def _arrays(
    optimizer: RuleOptimizer, rule: UpdateRule, variable: Variable, real: np.dtype[Any]
) -> Sequence[Sequence[str]]:
    """Returns the name of each array, its type, and how it is stored."""

    def how(dtype: np.dtype[Any]) -> str:
        codec = codec_of(dtype, real)
        if not codec.is_decoded:
            return "plain"
        is_random = rule.is_rounded and codec.is_rounded
        return "rounded at random" if is_random else "rounded to nearest"

    own = variable.dtype
    rows = [("gradient", own, "plain" if own == real else "converted as it is read")]
    target, _, codecs = target_of(optimizer, variable)
    if target.companion is None:
        rows.append(("variable", own, how(own)))
    elif isinstance(codecs.var, Split):
        rows.append(("variable", own, f"the upper half of a {real}, rounded half up"))
        rows.append((MASTER, target.companion.dtype, "its lower half"))
    else:
        rows.append((MASTER, target.var.dtype, how(target.var.dtype)))
        rows.append(("variable", own, f"a copy of {MASTER}, rounded to nearest"))
    if optimizer.options.averages is not None:
        [average] = optimizer.options.averages.of([variable])
        rows.append(("average", average.dtype, how(average.dtype)))
    coded = optimizer.options.codecs.coded
    names = optimizer.options.codecs.array_names(optimizer.rule_with_slots.slots)
    for name, slot in zip(names, target.slots, strict=True):
        what = how(slot.dtype)
        if name in coded:
            what = f"codes of {coded[name].meaning}"
        elif name in map(scales_name, coded):
            what = f"a scale for {codecs.per_block} codes"
        if name in optimizer.rule.row_slots:
            what += ", one number a row"
        rows.append((name, slot.dtype, what))
    return [(name, str(dtype), what) for name, dtype, what in rows]


def _in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
