"""The optimizers in torch's own forms, from torch and to it: formulas and numbers are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuopt.interop.exported import Exported, Given, States, names_with_slots, read_numbers
from gpuopt.interop.torch_groups import (
    Imported,
    Part,
    arguments_of,
    counts_of,
    numbers_of,
    settings_of,
    shared,
    values_of,
)
from gpuopt.optimizer import Optimizer
from gpuopt.optimizers import (
    AMSGradOptimizer,
    RAdamOptimizer,
    TorchAdagradOptimizer,
    TorchAdamWOptimizer,
    TorchNAdamOptimizer,
    TorchRMSpropOptimizer,
    TorchSGDOptimizer,
)
from gpuopt.optimizers.base.declared import hyperparameters_of
from gpuopt.optimizers.torch_sgd import torch_nesterov
from gpuopt.state.counts import STEP
from gpuopt.variables.variable import Variable

_AVERAGES = {"m": "exp_avg", "v": "exp_avg_sq"}
_OF_RMS_PROP = {"rms": "square_avg", "mg": "grad_avg", "momentum": "momentum_buffer"}


class _Form(NamedTuple):
    """An optimizer of Adam's family.

    Attributes:
        optimizer: gpuopt's.
        kind: The name of torch's.
        slots: torch's names, by gpuopt's.
        settings: torch's that choose the formula.
    """

    optimizer: Any
    kind: str
    slots: Mapping[str, str] = _AVERAGES
    settings: Mapping[str, Any] = {}


# By the name of torch's formula.
FORMS = {
    "AdamW": _Form(TorchAdamWOptimizer, "AdamW"),
    "Adam with amsgrad": _Form(
        AMSGradOptimizer, "Adam", {**_AVERAGES, "vhat": "max_exp_avg_sq"}, {"amsgrad": True}
    ),
    "NAdam": _Form(TorchNAdamOptimizer, "NAdam"),
    "RAdam": _Form(RAdamOptimizer, "RAdam"),
}
_FORM_OF = {form.optimizer: form for form in FORMS.values()}


def import_form(form: _Form, parts: Sequence[Part]) -> Imported:
    """Makes an optimizer of Adam's family of torch's parameter groups, which were checked.

    Returns:
        See `Imported`: slots of the variables' shapes and dtypes, and counts of each variable.
    """
    names = hyperparameters_of(form.optimizer)
    numbers = [numbers_of(part.settings, names) for part in parts]
    optimizer = form.optimizer(**arguments_of(numbers, parts))
    slots = {ours: values_of(parts, key) for ours, key in form.slots.items()}
    counts = {key: counts_of(parts, key, start) for key, start in optimizer.own_counts.items()}
    return optimizer, {**slots, **counts}, {}


def import_torch_sgd(parts: Sequence[Part]) -> Imported:
    """Makes a `TorchSGDOptimizer` of torch's parameter groups, as `import_form` does.

    Raises:
        ValueError: the groups differ in more than numbers.
    """
    with_momentum = _with_momentum(parts)
    use_nesterov = bool(with_momentum) and shared(
        "nesterov", [part.settings for part in with_momentum]
    )
    has_begun = [
        bool(part.settings["momentum"]) and state.get("momentum_buffer") is not None
        for part in parts
        for state in part.states
    ]
    left_out = {"momentum": not with_momentum, "dampening": not with_momentum or use_nesterov}
    names = [name for name in hyperparameters_of(TorchSGDOptimizer) if not left_out.get(name)]
    numbers = [numbers_of(part.settings, names) for part in parts]
    for given in numbers:
        if "dampening" in given and not given["momentum"]:  # torch dampens nothing then
            given["dampening"] = np.float64(0)
    optimizer = TorchSGDOptimizer(**arguments_of(numbers, parts), use_nesterov=use_nesterov)
    slots = {"momentum": values_of(parts, "momentum_buffer")} if with_momentum else {}
    # torch does not count; whether a step is the first is all that matters.
    if optimizer.own_counts:
        return optimizer, {**slots, STEP: [np.array(each, np.int64) for each in has_begun]}, {}
    return optimizer, slots, {STEP: np.array(any(has_begun), np.float64)}


def import_adagrad(parts: Sequence[Part]) -> Imported:
    """Makes a `TorchAdagradOptimizer` of torch's parameter groups, as `import_form` does."""
    names = hyperparameters_of(TorchAdagradOptimizer)
    numbers = [numbers_of(part.settings, names) for part in parts]
    initial = float(parts[0].settings["initial_accumulator_value"])
    optimizer = TorchAdagradOptimizer(
        **arguments_of(numbers, parts), initial_accumulator_value=initial
    )
    steps = counts_of(parts, STEP, optimizer.own_counts[STEP])
    return optimizer, {"accumulator": values_of(parts, "sum"), STEP: steps}, {}


def import_rms_prop(parts: Sequence[Part]) -> Imported:
    """Makes a `TorchRMSpropOptimizer` of torch's parameter groups, as `import_form` does.

    Raises:
        ValueError: the groups differ in more than numbers.
    """
    names = hyperparameters_of(TorchRMSpropOptimizer)
    if not _with_momentum(parts):
        names.remove("momentum")
    numbers = [numbers_of(part.settings, names) for part in parts]
    is_centered = shared("centered", [part.settings for part in parts])
    optimizer = TorchRMSpropOptimizer(**arguments_of(numbers, parts), centered=is_centered)
    slots = {name: values_of(parts, _OF_RMS_PROP[name]) for name in optimizer.rule.slots}
    return optimizer, slots, {}


def export_form(
    optimizer: Any, given: Given, variables: Mapping[str, Variable], _: bool
) -> Exported:
    """Returns what torch's optimizer of the same formula is to be given for one group.

    Args:
        optimizer: Of a class that a form has.
        given: The group's hyperparameters.
        variables: The group's, by their names in a state.

    Returns:
        See `Exported`: averages of the variables' shapes and dtypes, and counts, float32 scalars;
        an empty state for a variable that has made no step.

    Raises:
        ValueError: torch has no such formula, or a hyperparameter is a function.
    """
    form = _FORM_OF[type(optimizer)]
    if optimizer.rule.sums:
        raise ValueError(f"torch's {form.kind} is not cautious, as this optimizer is")
    if form.optimizer is AMSGradOptimizer and optimizer._form != "torch":
        raise ValueError(f'torch has the form "torch" of AMSGrad, not "{optimizer._form}"')
    numbers = read_numbers(given, hyperparameters_of(form.optimizer))
    state = optimizer.state_dict(variables)
    slots, counts = state["slots"], list(optimizer.own_counts)
    states: States = [
        {
            **{key: slots[key][name].astype(np.float32) for key in counts},
            **{key: slots[ours][name] for ours, key in form.slots.items()},
        }
        if name in slots.get("m", ())
        else {}
        for name in variables
    ]
    return form.kind, {**settings_of(numbers), **form.settings}, states


def export_torch_sgd(
    optimizer: Any, given: Given, variables: Mapping[str, Variable], _: bool
) -> Exported:
    """Returns what torch's SGD is to be given for one group, as `export_form` does.

    Raises:
        ValueError: as `export_form`; or gradients are dampened without momentum, which torch's SGD
            does not do.
    """
    names = [name for name in hyperparameters_of(TorchSGDOptimizer) if name in given]
    hyper = {"momentum": 0.0, "dampening": 0.0, **read_numbers(given, names)}
    if hyper["dampening"] and not hyper["momentum"]:
        raise ValueError("torch's SGD dampens nothing without momentum, gpuopt's TorchSGD does")
    is_nesterov = optimizer.rule is torch_nesterov and hyper["momentum"] != 0
    settings = {**settings_of(hyper), "nesterov": is_nesterov}
    state = optimizer.state_dict(variables)
    slots = state["slots"]
    of_all = state["non_slots"].get(STEP, 0)
    has_begun = [slots.get(STEP, {}).get(name, of_all) > 0 for name in variables]
    states: States = [
        {"momentum_buffer": slots["momentum"][name]}
        if each and name in slots.get("momentum", ())
        else {}
        for name, each in zip(variables, has_begun, strict=True)
    ]
    return "SGD", settings, states


def export_adagrad(
    optimizer: Any, given: Given, variables: Mapping[str, Variable], _: bool
) -> Exported:
    """Returns what torch's Adagrad is to be given for one group, as `export_form` does."""
    numbers = read_numbers(given, hyperparameters_of(TorchAdagradOptimizer))
    state = optimizer.state_dict(variables)
    slots, initial = state["slots"], float(optimizer.initial_accumulator_value)
    settings = {**settings_of(numbers), "initial_accumulator_value": initial}
    # torch's Adagrad has states from its construction on, so they must be there.
    states: States = [
        {"step": slots[STEP][name].astype(np.float32), "sum": slots["accumulator"][name]}
        if name in slots.get("accumulator", ())
        else {"step": np.array(0, np.float32), "sum": np.full(each.shape, initial, each.dtype)}
        for name, each in variables.items()
    ]
    return "Adagrad", settings, states


def export_rms_prop(
    optimizer: Any, given: Given, variables: Mapping[str, Variable], _: bool
) -> Exported:
    """Returns what torch's RMSprop is to be given for one group, as `export_form` does."""
    names = [name for name in hyperparameters_of(TorchRMSpropOptimizer) if name in given]
    numbers = {"momentum": 0.0, **read_numbers(given, names)}
    state = optimizer.state_dict(variables)
    settings = {**settings_of(numbers), "centered": "mg" in optimizer.rule.slots}
    states: States = [
        # torch counts the steps, and its formula has no count.
        {"step": np.array(0, np.float32)}
        | {_OF_RMS_PROP[slot]: state["slots"][slot][name] for slot in optimizer.rule.slots}
        for name in names_with_slots(state, "rms", variables)
    ]
    return "RMSprop", settings, states


EXPORTS: dict[type[Optimizer], Callable[[Any, Given, Mapping[str, Variable], bool], Exported]] = {
    **dict.fromkeys(_FORM_OF, export_form),
    TorchSGDOptimizer: export_torch_sgd,
    TorchAdagradOptimizer: export_adagrad,
    TorchRMSpropOptimizer: export_rms_prop,
}


def _with_momentum(parts: Sequence[Part]) -> list[Part]:
    found = [part for part in parts if part.settings["momentum"]]
    if found and not parts[0].settings["momentum"]:
        raise ValueError(
            "torch's first parameter group has no momentum, and another one has: import each group "
            "into an optimizer of its own"
        )
    return found
