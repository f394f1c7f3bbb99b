"""The pages of docs/reference: which public name stands on which, described by its docstring."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from internal_names import internal_members

import gpuopt
import gpuopt.contrib
import gpuopt.distributed
import gpuopt.errors
import gpuopt.interop
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


def _value(name: str) -> Any:
    """Returns what has a public name: where it is defined, only Python can tell."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def _exported(module: str, names: Sequence[str]) -> list[str]:
    """Returns paths to names: in `gpuopt` itself if it exports them, else in a module of it."""
    return [f"{'gpuopt' if name in gpuopt.__all__ else module}.{name}" for name in names]


# `rows` returns one, beside which it is described.
_ROWS = "gpuopt.contrib.Rows"
_OF_CONTRIB = [each for each in _in("gpuopt.contrib", gpuopt.contrib.__all__) if each != _ROWS]
_WRAPPERS = [name for name in gpuopt.wrappers.__all__ if name in gpuopt.__all__]
_SCHEDULES = [name for name in gpuopt.schedules.__all__ if name not in gpuopt.contrib.__all__]
_OF_DISTRIBUTED = _exported("gpuopt.distributed", gpuopt.distributed.__all__)

# By the file's name.
PAGES = {
    "optimizers": Reference(
        "Methods of optimizers",
        "Every optimizer has the methods of `Optimizer`, and takes its arguments and [the options "
        "of all](../optimizers.md#arguments-of-all) beside its own: [each has a "
        "page](../optimizers.md#all-of-them).",
        [
            "gpuopt.Optimizer",
            "gpuopt.optimizers.base.RuleOptimizer",
            "gpuopt.ParameterGroup",
        ],
        frozenset(
            {"gpuopt.Optimizer", "gpuopt.optimizers.base.RuleOptimizer", "gpuopt.ParameterGroup"}
        ),
    ),
    "wrappers": Reference(
        "Wrappers",
        "They go around an optimizer, or around another wrapper, and have its methods.",
        _in("gpuopt", _WRAPPERS),
        frozenset(_in("gpuopt", _WRAPPERS)),
    ),
    "variables": Reference(
        "Variables and gradients",
        "A `Variable` stands wherever an array may: numpy's and CuPy's functions take it.",
        [
            "gpuopt.Variable",
            "gpuopt.IndexedSlices",
            "gpuopt.embedding_lookup",
            "gpuopt.rows",
            _ROWS,
            "gpuopt.with_gradients",
            "gpuopt.with_torch",
            "gpuopt.value_and_gradients",
            "gpuopt.device.Device",
        ],
        frozenset({"gpuopt.Variable", "gpuopt.IndexedSlices", _ROWS, "gpuopt.device.Device"}),
        frozenset({"gpuopt.Variable"}),
    ),
    "training": Reference(
        "Training",
        "Averages, checkpoints, clipping by hand, and the errors that gpuopt raises beside "
        "Python's.",
        [
            "gpuopt.ExponentialMovingAverage",
            "gpuopt.Saver",
            "gpuopt.latest_checkpoint",
            "gpuopt.clip_by_value",
            "gpuopt.clip_by_global_norm",
            "gpuopt.global_norm",
            *_exported("gpuopt.errors", gpuopt.errors.__all__),
        ],
        frozenset({"gpuopt.ExponentialMovingAverage", "gpuopt.Saver"}),
    ),
    "schedules": Reference(
        "Schedules",
        "Hyperparameters that follow the global step: "
        "[guide](../guides/schedules_and_clipping.md).",
        _exported("gpuopt.schedules", _SCHEDULES),
        frozenset({"gpuopt.schedules.Schedule"}),
    ),
    "distributed": Reference(
        "Several workers",
        "What `gpuopt` does not export itself is in `gpuopt.distributed`.",
        _OF_DISTRIBUTED,
        frozenset(_OF_DISTRIBUTED),
    ),
    "rules": Reference(
        "Rules",
        "For [rules of your own](../guides/rules.md).",
        [
            "gpuopt.update_rule",
            "gpuopt.optimizers.base.UpdateRule",
            "gpuopt.optimizers.base.CudaSource",
            "gpuopt.optimizers.base.Unnamed",
            "gpuopt.optimizers.base.Movement",
        ],
    ),
    "interop": Reference(
        "Other libraries",
        "States of [torch](../guides/with_torch.md) and bitsandbytes, and torch's modules.",
        _exported("gpuopt.interop", gpuopt.interop.__all__),
    ),
    "contrib": Reference(
        "TensorFlow's contrib",
        "What few need is in `gpuopt.contrib`: most of `tf.contrib`'s names, and second names of "
        "one thing. `gpuopt` itself has them, too, and does not list them. `get_linear_decay_fn`, "
        "`get_cosine_decay_fn` and `get_restart_decay_fn` are for `sign_decay_fn` of AddSign and "
        "PowerSign.",
        _OF_CONTRIB,
        frozenset(each for each in _OF_CONTRIB if isinstance(_value(each), type)),
    ),
}


def text_of(page: Reference, command: str) -> str:
    """Returns a page's Markdown; mkdocstrings puts the docstrings in."""
    parts = [f"# {page.title}", f"<!-- `{command}` writes this page. -->", page.text]
    for name in page.names:
        options = [f"heading: {name}"]
        options += [] if name in page.with_members else ["members: false"]
        options += ["inherited_members: true"] if name in page.inherited else []
        if name in page.with_members and (internal := internal_members(_value(name))):
            options.append(f'filters: ["!^_", "!^({"|".join(sorted(internal))})$"]')
        parts.append(_block(name, options))
    return "\n\n".join(parts) + "\n"


def signature_of(name: str) -> str:
    """Returns the block of a class whose docstring the page has already, in parts."""
    hidden = (f"show_docstring_{part}: false" for part in ("description", "parameters"))
    return _block(
        name,
        [
            "heading: Signature",
            "toc_label: Signature",
            "heading_level: 2",
            "members: false",
            *hidden,
        ],
    )


def _block(name: str, options: Sequence[str]) -> str:
    value = _value(name)
    defined = f"{value.__module__}.{value.__qualname__}"
    return "\n      ".join([f"::: {defined}\n    options:", *options])
