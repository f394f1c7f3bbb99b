"""The pages of docs/reference: which public name stands on which, described by its docstring."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from internal_names import internal_members

import gpuopt
import gpuopt.distributed
import gpuopt.interop
import gpuopt.optimizers
import gpuopt.schedules
import gpuopt.wrappers


class Reference(NamedTuple):
    """A page.

    Attributes:
        title: Its heading.
        text: What it begins with.
        names: The public names that it describes, as paths in Python.
        with_members: Those of them whose methods and attributes are described, too.
        inherited: Of those, the ones that get theirs from private classes.
    """

    title: str
    text: str
    names: Sequence[str]
    with_members: frozenset[str] = frozenset()
    inherited: frozenset[str] = frozenset()


def _in(module: str, names: Sequence[str]) -> list[str]:
    return [f"{module}.{name}" for name in names]


_ERRORS = sorted(name for name in gpuopt.__all__ if name.endswith("Error"))
_OF_DISTRIBUTED = gpuopt.distributed.__all__
_DECAYS = ["get_linear_decay_fn", "get_cosine_decay_fn", "get_restart_decay_fn"]

# By the file's name.
PAGES = {
    "optimizers": Reference(
        "Optimizers",
        "Every optimizer has the methods of `Optimizer`, and takes its arguments and those of "
        "`RuleOptimizer` beside its own. [Optimizers](../optimizers.md) compares them.",
        [
            "gpuopt.Optimizer",
            "gpuopt.optimizers.base.RuleOptimizer",
            "gpuopt.ParameterGroup",
            *_in("gpuopt", gpuopt.optimizers.__all__),
            "gpuopt.extend_with_decoupled_weight_decay",
        ],
        frozenset(
            {"gpuopt.Optimizer", "gpuopt.optimizers.base.RuleOptimizer", "gpuopt.ParameterGroup"}
        ),
    ),
    "wrappers": Reference(
        "Wrappers",
        "They go around an optimizer, or around another wrapper, and have its methods.",
        _in("gpuopt", gpuopt.wrappers.__all__),
        frozenset(_in("gpuopt", gpuopt.wrappers.__all__)),
    ),
    "variables": Reference(
        "Variables and gradients",
        "A `Variable` stands wherever an array may: numpy's and CuPy's functions take it.",
        _in(
            "gpuopt",
            [
                "Variable",
                "IndexedSlices",
                "embedding_lookup",
                "rows",
                "Rows",
                "with_gradients",
                "with_torch",
                "value_and_gradients",
                "trainable_variables",
                "global_variables",
                "Device",
            ],
        ),
        frozenset({"gpuopt.Variable", "gpuopt.IndexedSlices", "gpuopt.Rows", "gpuopt.Device"}),
        frozenset({"gpuopt.Variable"}),
    ),
    "training": Reference(
        "Training",
        "Averages, checkpoints, clipping by hand, and the errors that gpuopt raises beside "
        "Python's.",
        _in(
            "gpuopt",
            [
                "ExponentialMovingAverage",
                "Saver",
                "latest_checkpoint",
                "clip_by_value",
                "clip_by_norm",
                "clip_by_average_norm",
                "clip_by_global_norm",
                "global_norm",
                *_ERRORS,
            ],
        ),
        frozenset({"gpuopt.ExponentialMovingAverage", "gpuopt.Saver"}),
    ),
    "schedules": Reference(
        "Schedules",
        "Hyperparameters that follow the global step: "
        "[guide](../guides/schedules_and_clipping.md). The last three are for `sign_decay_fn` of "
        "AddSign and PowerSign.",
        _in("gpuopt", [*gpuopt.schedules.__all__, *_DECAYS]),
        frozenset({"gpuopt.Schedule"}),
    ),
    "distributed": Reference(
        "Several workers",
        "What `gpuopt` does not export itself is in `gpuopt.distributed`.",
        [
            f"gpuopt.{name}" if name in gpuopt.__all__ else f"gpuopt.distributed.{name}"
            for name in _OF_DISTRIBUTED
        ],
        frozenset(
            f"gpuopt.{name}" if name in gpuopt.__all__ else f"gpuopt.distributed.{name}"
            for name in _OF_DISTRIBUTED
        ),
    ),
    "rules": Reference(
        "Rules",
        "For [rules of your own](../guides/rules.md).",
        [
            "gpuopt.update_rule",
            "gpuopt.UpdateRule",
            "gpuopt.CudaSource",
            "gpuopt.optimizers.base.Unnamed",
            "gpuopt.optimizers.base.Movement",
        ],
    ),
    "interop": Reference(
        "Other libraries",
        "States of [torch](../guides/with_torch.md) and bitsandbytes, and torch's modules.",
        [
            f"gpuopt.{name}" if name in gpuopt.__all__ else f"gpuopt.interop.{name}"
            for name in gpuopt.interop.__all__
        ],
    ),
}


def text_of(page: Reference, command: str) -> str:
    """Returns a page's Markdown; mkdocstrings puts the docstrings in."""
    parts = [f"# {page.title}", f"<!-- `{command}` writes this page. -->", page.text]
    for name in page.names:
        options = [f"heading: {name}"]
        value = _value(name)
        options += [] if name in page.with_members else ["members: false"]
        options += ["inherited_members: true"] if name in page.inherited else []
        if name in page.with_members and (internal := internal_members(value)):
            options.append(f'filters: ["!^_", "!^({"|".join(sorted(internal))})$"]')
        defined = f"{value.__module__}.{value.__qualname__}"
        parts.append("\n      ".join([f"::: {defined}\n    options:", *options]))
    return "\n\n".join(parts) + "\n"


def _value(name: str) -> Any:
    """Returns what has a public name: where it is defined, only Python can tell."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)
