"""The optimizers in torch's own forms, from torch and to it: formulas and numbers are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuopt.interop.exported import Exported, Given, States, names_with_slots, read_numbers
from gpuopt.interop.torch_groups import (
    Array,
    Imported,
    Part,
    arguments_of,
    name_of,
    numbers_of,
    settings_of,
    shared,
    step_of,
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
    """Makes an optimizer of Adam's family of torch's parameter groups.

    Args:
        form: Which one.
        parts: The groups, the first for the optimizer's own hyperparameters; checked.

    Returns:
        See `Imported`: slots of the variables' shapes and dtypes, and counters, float64 scalars.

    Raises:
        ValueError: the parameters are at different steps.
    """
    step = step_of(parts)
    names = hyperparameters_of(form.optimizer)
    numbers = [numbers_of(part.settings, names) for part in parts]
    optimizer = form.optimizer(**arguments_of(numbers, parts))
    counters: dict[str, Array] = {"step": np.array(step, np.float64)}
    if "mu_product" in optimizer.counters:
        for part in parts:
            name = "mu_product" if part is parts[0] else f"mu_product/{name_of(part)}"
            products = [state["mu_product"] for state in part.states if state]
            counters[name] = np.array(products[0] if products else 1, np.float64)
    return optimizer, {ours: values_of(parts, key) for ours, key in form.slots.items()}, counters


def import_torch_sgd(parts: Sequence[Part]) -> Imported:
    """Makes a `TorchSGDOptimizer` of torch's parameter groups, as `import_form` does.

    Raises:
        ValueError: the groups differ in more than numbers.
    """
    with_momentum = _with_momentum(parts)
    use_nesterov = bool(with_momentum) and shared(
        "nesterov", [part.settings for part in with_momentum]
    )
    states = [state for part in with_momentum for state in part.states]
    has_begun = [state.get("momentum_buffer") is not None for state in states]
    left_out = {"momentum": not with_momentum, "dampening": not with_momentum or use_nesterov}
    names = [name for name in hyperparameters_of(TorchSGDOptimizer) if not left_out.get(name)]
    numbers = [numbers_of(part.settings, names) for part in parts]
    for given in numbers:
        if "dampening" in given and not given["momentum"]:  # torch dampens nothing then
            given["dampening"] = np.float64(0)
    optimizer = TorchSGDOptimizer(**arguments_of(numbers, parts), use_nesterov=use_nesterov)
    slots = {"momentum": values_of(parts, "momentum_buffer")} if with_momentum else {}
    # torch does not count; whether a step is the first is all that matters.
    return optimizer, slots, {"step": np.array(any(has_begun), np.float64)}


def import_adagrad(parts: Sequence[Part]) -> Imported:
    """Makes a `TorchAdagradOptimizer` of torch's parameter groups, as `import_form` does."""
    # Only the decay depends on the step. torch's parameters have states before their first steps.
    decaying = [
        part._replace(states=[state for state in part.states if state["step"]])
        for part in parts
        if part.settings["lr_decay"]
    ]
    steps = [int(state["step"]) for part in parts for state in part.states]
    step = step_of(decaying) if decaying else max(steps)
    names = hyperparameters_of(TorchAdagradOptimizer)
    numbers = [numbers_of(part.settings, names) for part in parts]
    initial = float(parts[0].settings["initial_accumulator_value"])
    optimizer = TorchAdagradOptimizer(
        **arguments_of(numbers, parts), initial_accumulator_value=initial
    )
    counters = {"step": np.array(step, np.float64)}
    return optimizer, {"accumulator": values_of(parts, "sum")}, counters


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
        See `Exported`: averages of the variables' shapes and dtypes, and counters, float32 scalars;
        no states where no step has been made.

    Raises:
        ValueError: torch has no such formula, a hyperparameter is a function, or some variables
            have slots and others not.
    """
    form = _FORM_OF[type(optimizer)]
    if optimizer.rule.sums:
        raise ValueError(f"torch's {form.kind} is not cautious, as this optimizer is")
    if form.optimizer is AMSGradOptimizer and optimizer._form != "torch":
        raise ValueError(f'torch has the form "torch" of AMSGrad, not "{optimizer._form}"')
    numbers = read_numbers(given, hyperparameters_of(form.optimizer))
    state = optimizer.state_dict(variables)
    counters = {"step": np.float32(_steps(state))}
    if "mu_product" in optimizer.counters:
        of_groups = [f"mu_product/{group.group_name}" for group in optimizer.groups]
        number = optimizer._grouping.number_of(next(iter(variables.values())))
        name = ["mu_product", *of_groups][number]
        counters["mu_product"] = np.float32(state["non_slots"].get(name, 1))
    states: States = [
        {
            **{key: np.array(value) for key, value in counters.items()},
            **{key: state["slots"][ours][name] for ours, key in form.slots.items()},
        }
        for name in names_with_slots(state, "m", variables)
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
    with_slots = names_with_slots(state, "momentum", variables) if _steps(state) else []
    slots = state["slots"]
    return "SGD", settings, [{"momentum_buffer": slots["momentum"][name]} for name in with_slots]


def export_adagrad(
    optimizer: Any, given: Given, variables: Mapping[str, Variable], _: bool
) -> Exported:
    """Returns what torch's Adagrad is to be given for one group, as `export_form` does."""
    numbers = read_numbers(given, hyperparameters_of(TorchAdagradOptimizer))
    state = optimizer.state_dict(variables)
    names = names_with_slots(state, "accumulator", variables)
    initial = float(optimizer.initial_accumulator_value)
    settings = {**settings_of(numbers), "initial_accumulator_value": initial}
    # torch's Adagrad has sums from its construction on, so they must be in the state.
    sums = [state["slots"]["accumulator"][name] for name in names] or [
        np.full(variable.shape, initial, variable.dtype) for variable in variables.values()
    ]
    step = np.array(_steps(state), np.float32)
    return "Adagrad", settings, [{"step": step, "sum": each} for each in sums]


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


def _steps(state: Any) -> float:
    return float(state["non_slots"].get("step", 0))
