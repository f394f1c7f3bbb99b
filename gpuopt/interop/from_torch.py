"""Takes over a training run from torch.optim."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from gpuopt.interop.torch_checks import (
    check_layout,
    check_settings,
    check_states,
    in_torchs_order,
    named_variables,
    names_of_parameters,
)
from gpuopt.interop.torch_forms import (
    FORMS,
    import_adagrad,
    import_form,
    import_rms_prop,
    import_torch_sgd,
)
from gpuopt.interop.torch_groups import (
    Array,
    Imported,
    Part,
    Settings,
    arguments_of,
    name_of,
    numbers_of,
    parts_of,
    shared,
    step_of,
    values_of,
)
from gpuopt.optimizer import Optimizer
from gpuopt.optimizers import (
    AdamOptimizer,
    GradientDescentOptimizer,
    MomentumOptimizer,
)
from gpuopt.optimizers.base.declared import hyperparameters_of
from gpuopt.state.state import State
from gpuopt.state.state_dict import OptimizerState

# torch's settings that gpuopt supports with this value only, but for those of `_TERMS`.
_NEUTRAL = {"weight_decay": 0, "dampening": 0, "amsgrad": False, "maximize": False}
# The terms in formulas that are optimizers of their own here.
_TERMS = {
    "AdamW": {"weight_decay"},
    "Adam with amsgrad": {"amsgrad"},
    "SGD with decay or dampening": {"weight_decay", "dampening"},
}

# For each of torch's optimizers: names of settings that none of those after it has together.
_MARKS = {
    "Adam": {"betas", "amsgrad"},
    "NAdam": {"betas", "momentum_decay"},
    "RAdam": {"betas", "decoupled_weight_decay"},
    "SGD": {"dampening", "nesterov"},
    "Adagrad": {"lr_decay", "initial_accumulator_value"},
    "RMSprop": {"alpha", "centered"},
}


def optimizer_from_torch(state_dict: Mapping[str, Any], variables: Sequence[Any]) -> Optimizer:
    """Makes an optimizer that continues a run of torch.optim.

    torch's first parameter group is of the optimizer's own hyperparameters, and each other one a
    `ParameterGroup`. The settings of SGD, RMSprop and Adam's family may differ between them, as far
    as the formulas have numbers for them.

    Args:
        state_dict: The result of `state_dict()` of torch's Adam, AdamW, NAdam, RAdam, SGD, Adagrad
            or RMSprop.
        variables: One variable or array for each of torch's parameters, with the parameters'
            values. They are not changed. Variables are matched by their names if the state has
            names, as of `torch.optim.Adam(model.named_parameters())`; arrays, and variables that
            were made without a name, are in the order of torch's parameters.

    Returns:
        An optimizer with a state: slots of the variables' shapes and dtypes, on their devices. If
        torch's states of 16-bit parameters are float32, it has `slot_dtype="float32"`. A parameter
        that was never trained has no slots yet.

    Raises:
        TypeError: `state_dict` is no dictionary, or `variables` no list of variables.
        ValueError: the formulas do not agree, a shape or dtype differs from the variable's, the
            parameters that were trained are at different steps, their groups differ in more than
            numbers, names of variables are not those of parameters, a variable is given twice, or
            the state is damaged.
    """
    check_layout(state_dict)
    kind, settings = _read_settings(state_dict)
    groups = [group["params"] for group in state_dict["param_groups"] if group["params"]]
    indices = [index for group in groups for index in group]
    given = named_variables(variables)
    if len(indices) != len(given):
        raise ValueError(f"torch's state has {len(indices)} parameters for {len(given)} variables")
    named = in_torchs_order(given, names_of_parameters(state_dict))
    states = [
        {key: _to_array(value) for key, value in state_dict["state"].get(index, {}).items()}
        for index in indices
    ]
    of_each = [mine for mine, group in zip(settings, groups, strict=True) for _ in group]
    slot_dtype = check_states(kind, of_each, states, list(named.values()))
    parts = parts_of(settings, states, named.values(), slot_dtype)
    is_trained = [any(value is not None for value in state.values()) for state in states]
    # What torch has not made yet is not made here either.
    has_slots = is_trained if any(is_trained) else [True] * len(states)
    optimizer, slots, non_slots = _IMPORTS[kind](parts)
    state: OptimizerState = {
        "format": 1,
        "optimizer": type(optimizer).__name__,
        "name": optimizer.get_name(),
        "hyperparameters": {},
        "slots": {
            slot_name: {
                name: value
                for name, value, is_there in zip(named, values, has_slots, strict=True)
                if is_there
            }
            for slot_name, values in slots.items()
        },
        "non_slots": non_slots,
    }
    optimizer.load_state_dict(state, named)
    return optimizer


class EpsilonOfTorch:
    """torch's epsilon of Adam, as gpuopt adds it: to the root of `v` before the bias correction.

    Args:
        eps: torch's.
        power: The name of the power of beta2 that corrects the bias.

    Attributes:
        state: The optimizer's, once it is made.
    """

    def __init__(self, eps: float, power: str) -> None:
        self.eps = eps
        self.state: State | None = None
        self._power = power

    def __repr__(self) -> str:
        return f"EpsilonOfTorch({self.eps!r}, {self._power!r})"

    def for_state(self, state: State) -> EpsilonOfTorch:
        """Returns the same for another optimizer's state."""
        other = EpsilonOfTorch(self.eps, self._power)
        other.state = state
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies without the state, which the copy of the optimizer gives it."""
        return EpsilonOfTorch, (self.eps, self._power)

    def __call__(self) -> np.float64:
        assert self.state is not None
        beta2_power = self.state.host_scalar(self._power).numpy()
        return np.float64(self.eps * math.sqrt(1 - float(beta2_power)))


def _import_adam(parts: Sequence[Part]) -> Imported:
    step = step_of(parts)
    base = parts[0].settings
    powers: dict[str, Array] = {}
    epsilons: list[EpsilonOfTorch] = []

    def hyperparameters(settings: Settings, group: str) -> dict[str, Any]:
        """Returns a group's; those that are the first group's have no powers of their own."""
        given: dict[str, Any] = numbers_of(settings, ["learning_rate"])
        at = {}
        for name, beta, of_base in zip(
            ("beta1", "beta2"), settings["betas"], base["betas"], strict=True
        ):
            at[name] = f"{name}_power{group}" if beta != of_base else f"{name}_power"
            given[name] = np.float64(beta)
            powers[at[name]] = np.array(given[name] ** (step + 1), np.float32)
        given["epsilon"] = EpsilonOfTorch(settings["eps"], at["beta2"])
        epsilons.append(given["epsilon"])
        if group and settings["eps"] == base["eps"] and at["beta2"] == "beta2_power":
            del given["epsilon"]
        return given

    of_groups = ["", *(f"/{name_of(part)}" for part in parts[1:])]
    given = map(hyperparameters, [part.settings for part in parts], of_groups)
    optimizer = AdamOptimizer(**arguments_of(list(given), parts))
    for epsilon in epsilons:
        epsilon.state = optimizer.state
    return (
        optimizer,
        {"m": values_of(parts, "exp_avg"), "v": values_of(parts, "exp_avg_sq")},
        powers,
    )


def _import_sgd(parts: Sequence[Part]) -> Imported:
    with_momentum = [part.settings for part in parts if part.settings["momentum"]]
    optimizer_class: Any = MomentumOptimizer if with_momentum else GradientDescentOptimizer
    names = hyperparameters_of(optimizer_class)
    arguments = arguments_of([numbers_of(part.settings, names) for part in parts], parts)
    if not with_momentum:
        return GradientDescentOptimizer(**arguments), {}, {}
    # Without momentum, both forms are one.
    use_nesterov = shared("nesterov", with_momentum)
    optimizer = MomentumOptimizer(**arguments, use_nesterov=use_nesterov)
    return optimizer, {"momentum": values_of(parts, "momentum_buffer")}, {}


_IMPORTS: dict[str, Callable[[Sequence[Part]], Imported]] = {
    "Adam": _import_adam,
    "SGD": _import_sgd,
    "Adagrad": import_adagrad,
    "RMSprop": import_rms_prop,
    **{kind: partial(import_form, form) for kind, form in FORMS.items()},
    "SGD with decay or dampening": import_torch_sgd,
}


def _read_settings(state_dict: Mapping[str, Any]) -> tuple[str, list[Settings]]:
    """Returns the name of torch's optimizer, and the settings of each group with parameters."""
    groups = [group for group in state_dict["param_groups"] if group["params"]]
    kinds = {
        next((kind for kind, marks in _MARKS.items() if marks <= set(settings)), None)
        for settings in groups
    }
    [kind] = kinds if len(kinds) == 1 else [None]
    if kind is None:
        found = sorted(key for key in groups[0] if key not in ("params", "param_names"))
        raise ValueError(f"settings {found} are not those of torch's {', '.join(_MARKS)} or AdamW")
    kind = _formula(kind, groups)
    for settings in groups:
        for key, neutral in _NEUTRAL.items():
            if settings.get(key, neutral) != neutral and key not in _TERMS.get(kind, ()):
                raise ValueError(
                    f"torch's {kind} has {key}={settings[key]}; gpuopt's formula has no such term"
                )
        check_settings(kind, settings)
    return kind, groups


def _formula(kind: str, groups: Sequence[Settings]) -> str:
    """Returns which of the formulas of torch's optimizer some groups have."""
    given = {key for settings in groups for key in _NEUTRAL if settings.get(key)}
    if kind == "SGD" and given & _TERMS["SGD with decay or dampening"]:
        return "SGD with decay or dampening"
    if kind == "Adam" and "weight_decay" in given:
        if any("decoupled_weight_decay" not in settings for settings in groups):
            raise ValueError(
                "torch's state has a weight_decay, and an older torch has not said whether it is "
                "Adam's or AdamW's. If it is AdamW's, set decoupled_weight_decay=True in each of "
                "its param_groups"
            )
        is_decoupled = all(settings.get("decoupled_weight_decay") for settings in groups)
        return "AdamW" if is_decoupled else kind
    if kind == "Adam" and "amsgrad" in given:
        shared("amsgrad", groups)
        return "Adam with amsgrad"
    return kind


def _to_array(value: Any) -> Any:
    if value is None or not hasattr(value, "detach"):
        return value if value is None else np.asarray(value)
    tensor = value.detach().cpu().contiguous()
    if str(tensor.dtype) == "torch.bfloat16":
        import ml_dtypes
        import torch

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
