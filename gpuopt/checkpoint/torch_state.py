"""Moves a run in mid-training from torch.optim to gpuopt, and back.

Where the two compute the same formula, the next steps agree to float32 rounding:

| torch.optim | gpuopt | agree |
|---|---|---|
| Adam, AdamW | AdamOptimizer | from torch always, epsilon follows torch's; to torch at epsilon 0 |
| SGD | GradientDescentOptimizer, MomentumOptimizer | always |
| Adagrad | AdagradOptimizer | where epsilon is lost in rounding beside the accumulators |
| RMSprop | RMSPropOptimizer | at epsilon 0: torch adds it outside the root |

Weight decay, amsgrad, maximize, dampening and lr_decay have no counterpart and are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gpuopt.optimizer import Optimizer
from gpuopt.optimizer_state import OptimizerState
from gpuopt.optimizers import (
    AdagradOptimizer,
    AdamOptimizer,
    GradientDescentOptimizer,
    MomentumOptimizer,
    RMSPropOptimizer,
)
from gpuopt.optimizers.momentum import nesterov_momentum
from gpuopt.optimizers.rms_prop import centered_rms_prop
from gpuopt.optimizers.rule_optimizer import as_scalar
from gpuopt.variable import Variable, as_variable

Array = np.ndarray[Any, Any]
Settings = Mapping[str, Any]

# Settings that gpuopt has no counterpart of, where they are anything but this.
_NEUTRAL = {"weight_decay": 0, "dampening": 0, "lr_decay": 0, "amsgrad": False, "maximize": False}

# What tells a kind of optimizer from all others: names among its settings.
_MARKS = {
    "Adam": {"betas", "amsgrad"},
    "SGD": {"dampening", "nesterov"},
    "Adagrad": {"lr_decay", "initial_accumulator_value"},
    "RMSprop": {"alpha", "centered"},
}


def optimizer_from_torch(
    state_dict: Mapping[str, Any],
    variables: Sequence[Any],
    *,
    allow_epsilon_difference: bool = False,
) -> Optimizer:
    """Makes the optimizer that continues a run of torch.optim.

    Args:
        state_dict: What `state_dict()` of torch's Adam, AdamW, SGD, Adagrad or RMSprop returned.
        variables: One variable or array for each of torch's parameters, in their order, with the
            parameters' values; nothing is written into them.
        allow_epsilon_difference: Go on where the formulas differ by epsilon's place alone.

    Raises:
        ValueError: the formulas do not agree, a shape or dtype is another, or parameters are at
            different steps or have different settings.
    """
    kind, settings = _settings(state_dict)
    named = {str(position): as_variable(value) for position, value in enumerate(variables)}
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    if len(indices) != len(named):
        raise ValueError(f"torch's state has {len(indices)} parameters for {len(named)} variables")
    states = [
        {key: _as_array(value) for key, value in state_dict["state"].get(index, {}).items()}
        for index in indices
    ]
    optimizer, slots, non_slots = _IMPORTS[kind](
        settings, states, list(named.values()), allow_epsilon_difference
    )
    state: OptimizerState = {
        "format": 1,
        "optimizer": type(optimizer).__name__,
        "name": optimizer.get_name(),
        "hyperparameters": {},
        "slots": {
            slot_name: dict(zip(named, values, strict=True)) for slot_name, values in slots.items()
        },
        "non_slots": non_slots,
    }
    optimizer.load_state_dict(state, named)
    return optimizer


def optimizer_to_torch(
    optimizer: Optimizer, variables: Sequence[Any], *, allow_epsilon_difference: bool = False
) -> dict[str, Any]:
    """Returns a state for `load_state_dict` of the torch optimizer that continues this run.

    Adam goes to torch's Adam or AdamW, GradientDescent and Momentum to SGD, Adagrad to Adagrad,
    RMSProp to RMSprop. Needs torch.

    Args:
        optimizer: Exactly one of these classes, with numbers as hyperparameters.
        variables: The variables of torch's parameters, in their order.
        allow_epsilon_difference: Go on where the formulas differ by epsilon's place alone.

    Raises:
        ValueError: the formulas do not agree, or a hyperparameter is a function.
    """
    import torch

    export = _EXPORTS.get(type(optimizer))
    if export is None:
        raise ValueError(f"{type(optimizer).__name__} has no counterpart in torch.optim")
    named = {str(position): as_variable(value) for position, value in enumerate(variables)}
    kind, settings, states = export(optimizer, named, allow_epsilon_difference)
    parameters = [torch.zeros(variable.shape) for variable in named.values()]
    groups = getattr(torch.optim, kind)(parameters, **settings).state_dict()["param_groups"]
    return {
        "state": {
            position: {key: _as_tensor(value) for key, value in state.items()}
            for position, state in enumerate(states)
        },
        "param_groups": groups,
    }


Imported = tuple[Optimizer, dict[str, list[Array]], dict[str, Array]]
States = list[dict[str, Array]]


def _import_adam(
    settings: Settings, states: States, variables: list[Variable], _: bool
) -> Imported:
    steps = {int(state["step"]) if state else 0 for state in states}
    if len(steps) > 1:
        raise ValueError(
            f"torch's parameters are at steps {sorted(steps)}; gpuopt's Adam counts all alike"
        )
    beta1, beta2 = (np.float64(beta) for beta in settings["betas"])
    [step] = steps
    powers = {
        "beta1_power": np.array(beta1 ** (step + 1), np.float32),
        "beta2_power": np.array(beta2 ** (step + 1), np.float32),
    }
    bias_correction: list[Callable[[], np.float64]] = []
    optimizer = AdamOptimizer(
        _number(settings["lr"]),
        beta1,
        beta2,
        # torch adds epsilon before the bias correction, gpuopt after it.
        lambda: np.float64(settings["eps"]) * bias_correction[0](),
    )
    power = optimizer._create_non_slot_variable(
        powers["beta2_power"], "beta2_power", min(variables, key=lambda v: v.name)
    )
    bias_correction.append(lambda: np.sqrt(1 - np.float64(power.numpy())))
    return (
        optimizer,
        {
            "m": _values(states, "exp_avg", variables),
            "v": _values(states, "exp_avg_sq", variables),
        },
        powers,
    )


def _import_sgd(settings: Settings, states: States, variables: list[Variable], _: bool) -> Imported:
    learning_rate = _number(settings["lr"])
    if not settings["momentum"]:
        return GradientDescentOptimizer(learning_rate), {}, {}
    optimizer = MomentumOptimizer(
        learning_rate, _number(settings["momentum"]), use_nesterov=settings["nesterov"]
    )
    return optimizer, {"momentum": _values(states, "momentum_buffer", variables)}, {}


def _import_adagrad(
    settings: Settings, states: States, variables: list[Variable], allow: bool
) -> Imported:
    sums = _values(states, "sum", variables)
    # Accumulators only grow, so an epsilon that is lost in rounding now stays lost.
    visible_below = (settings["eps"] / np.finfo(np.float32).epsneg) ** 2
    smallest = min((values.min() for values in sums if values.size), default=np.inf)
    if settings["eps"] and smallest < visible_below and not allow:
        raise ValueError(
            f"torch's Adagrad adds eps={settings['eps']} to the root, gpuopt's does not; that "
            f"shows where an accumulator is below {visible_below:.2g}, and one is {smallest:.2g}"
        )
    return AdagradOptimizer(_number(settings["lr"])), {"accumulator": sums}, {}


def _import_rms_prop(
    settings: Settings, states: States, variables: list[Variable], allow: bool
) -> Imported:
    if settings["eps"] and not allow:
        raise ValueError(
            f"torch's RMSprop adds eps={settings['eps']} outside the root, gpuopt's inside; they "
            "agree at eps=0 alone"
        )
    learning_rate = _number(settings["lr"])
    optimizer = RMSPropOptimizer(
        learning_rate,
        _number(settings["alpha"]),
        _number(settings["momentum"]),
        np.float64(settings["eps"]) ** 2,
        centered=settings["centered"],
    )
    buffers = _values(states, "momentum_buffer", variables)
    slots = {
        "rms": _values(states, "square_avg", variables),
        # gpuopt's buffer has the learning rate in it.
        "momentum": [(learning_rate * buffer).astype(buffer.dtype) for buffer in buffers],
    }
    if settings["centered"]:
        slots["mg"] = _values(states, "grad_avg", variables)
    return optimizer, {name: slots[name] for name in optimizer._all_slot_names()}, {}


_IMPORTS: dict[str, Callable[[Settings, States, list[Variable], bool], Imported]] = {
    "Adam": _import_adam,
    "SGD": _import_sgd,
    "Adagrad": _import_adagrad,
    "RMSprop": _import_rms_prop,
}

Exported = tuple[str, dict[str, Any], States]


def _export_adam(optimizer: Any, variables: Mapping[str, Variable], allow: bool) -> Exported:
    hyper = _numbers(optimizer, ["learning_rate", "beta1", "beta2", "epsilon"])
    if hyper["epsilon"] and not allow:
        raise ValueError(
            f"gpuopt's Adam adds epsilon={hyper['epsilon']} after the bias correction, torch's "
            "before it; they agree at epsilon=0 alone"
        )
    state = optimizer.state_dict(variables)
    power = float(state["non_slots"]["beta2_power"]) if state["non_slots"] else hyper["beta2"]
    step = _steps_of(power, hyper["beta2"])
    states: States = [
        {
            "step": np.array(step, np.float32),
            "exp_avg": state["slots"]["m"][name],
            "exp_avg_sq": state["slots"]["v"][name],
        }
        for name in _all_or_none(state, "m", variables)
    ]
    betas = (hyper["beta1"], hyper["beta2"])
    return "Adam", {"lr": hyper["learning_rate"], "betas": betas, "eps": hyper["epsilon"]}, states


def _export_sgd(optimizer: Any, variables: Mapping[str, Variable], _: bool) -> Exported:
    state = optimizer.state_dict(variables)
    if isinstance(optimizer, GradientDescentOptimizer):
        return "SGD", {"lr": _numbers(optimizer, ["learning_rate"])["learning_rate"]}, []
    hyper = _numbers(optimizer, ["learning_rate", "decay"])
    settings = {
        "lr": hyper["learning_rate"],
        "momentum": hyper["decay"],
        "nesterov": optimizer.rule is nesterov_momentum,
    }
    names = _all_or_none(state, "momentum", variables)
    return (
        "SGD",
        settings,
        [{"momentum_buffer": state["slots"]["momentum"][name]} for name in names],
    )


def _export_adagrad(optimizer: Any, variables: Mapping[str, Variable], _: bool) -> Exported:
    state = optimizer.state_dict(variables)
    names = _all_or_none(state, "accumulator", variables)
    settings = {
        "lr": _numbers(optimizer, ["learning_rate"])["learning_rate"],
        "eps": 0.0,
        "initial_accumulator_value": float(optimizer._initial_accumulator_value),
    }
    # torch makes its accumulators with the optimizer, so there is no state without them.
    sums = [state["slots"]["accumulator"][name] for name in names] or [
        np.full(v.shape, optimizer._initial_accumulator_value, v.dtype) for v in variables.values()
    ]
    # The count matters to lr_decay alone.
    return "Adagrad", settings, [{"step": np.array(0, np.float32), "sum": s} for s in sums]


def _export_rms_prop(optimizer: Any, variables: Mapping[str, Variable], allow: bool) -> Exported:
    hyper = _numbers(optimizer, ["learning_rate", "decay", "momentum_decay", "epsilon"])
    if hyper["epsilon"] and not allow:
        raise ValueError(
            f"gpuopt's RMSProp adds epsilon={hyper['epsilon']} inside the root, torch's outside; "
            "they agree at epsilon=0 alone"
        )
    learning_rate = hyper["learning_rate"]
    if not learning_rate:
        raise ValueError("a learning rate of 0 is part of RMSProp's momentum, torch's is not")
    centered = optimizer.rule is centered_rms_prop
    state = optimizer.state_dict(variables)
    names = _all_or_none(state, "rms", variables)
    # torch's averages start at 0, gpuopt's at 1, so there is no state without them.
    slots = (
        state["slots"]
        if names
        else {"rms": {n: np.ones(v.shape, v.dtype) for n, v in variables.items()}}
    )
    states: States = []
    for name in variables:
        zeros = np.zeros_like(slots["rms"][name])
        buffer = slots["momentum"][name] if names else zeros
        entry = {
            "step": np.array(0, np.float32),
            "square_avg": slots["rms"][name],
            "momentum_buffer": (buffer / learning_rate).astype(zeros.dtype),
        }
        if centered:
            entry["grad_avg"] = slots["mg"][name] if names else zeros
        states.append(entry)
    settings = {
        "lr": learning_rate,
        "alpha": hyper["decay"],
        "eps": math.sqrt(hyper["epsilon"]),
        "momentum": hyper["momentum_decay"],
        "centered": centered,
    }
    return "RMSprop", settings, states


_EXPORTS: dict[type[Optimizer], Callable[[Any, Mapping[str, Variable], bool], Exported]] = {
    AdamOptimizer: _export_adam,
    GradientDescentOptimizer: _export_sgd,
    MomentumOptimizer: _export_sgd,
    AdagradOptimizer: _export_adagrad,
    RMSPropOptimizer: _export_rms_prop,
}


def _settings(state_dict: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns which of torch's optimizers it is, and the settings of all its parameters."""
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in state_dict["param_groups"]
    ]
    settings = groups[0]
    if any(group != settings for group in groups):
        raise ValueError(
            "torch's parameter groups have different settings; import them one by one, each into "
            "an optimizer of its own"
        )
    kind = next((kind for kind, marks in _MARKS.items() if marks <= set(settings)), None)
    if kind is None:
        raise ValueError(
            f"settings {sorted(settings)} are not those of torch's {', '.join(_MARKS)} or AdamW"
        )
    for key, neutral in _NEUTRAL.items():
        if settings.get(key, neutral) != neutral:
            raise ValueError(
                f"torch's {kind} has {key}={settings[key]}; gpuopt's formula has no such term"
            )
    return kind, settings


def _values(states: States, key: str, variables: list[Variable]) -> list[Array]:
    """Returns a state of all parameters; where torch has made none yet, it starts with 0."""
    return [
        state[key] if state.get(key) is not None else np.zeros(variable.shape, variable.dtype)
        for state, variable in zip(states, variables, strict=True)
    ]


def _number(value: Any) -> np.float64:
    """Keeps all digits of a number or of torch's scalar."""
    return np.float64(float(value))


def _numbers(optimizer: Any, names: list[str]) -> dict[str, float]:
    """Returns hyperparameters as gpuopt rounds them."""
    numbers = {}
    for name in names:
        value = optimizer._hyperparameters[name]
        if callable(value):
            raise ValueError(f"{name} is a function; torch's settings are numbers")
        numbers[name] = float(as_scalar(value, name))
    return numbers


def _all_or_none(
    state: OptimizerState, slot_name: str, variables: Mapping[str, Variable]
) -> list[str]:
    """Returns the variables' names if they have slots, nothing if none has yet."""
    present = state["slots"].get(slot_name, {})
    missing = [name for name in variables if name not in present]
    if present and missing:
        names = [variables[name].name for name in missing]
        raise ValueError(f"{names} have no state yet, and others have")
    return list(variables) if present else []


def _steps_of(power: float, beta: float) -> int:
    """Finds t in `power = beta^(t + 1)`; where the power has vanished, any large t is right."""
    if not 0 < beta < 1:
        return 1
    smallest = float(np.finfo(np.float32).tiny)
    return max(0, round(math.log(max(power, smallest)) / math.log(beta)) - 1)


def _as_array(value: Any) -> Any:
    if value is None or not hasattr(value, "detach"):
        return value if value is None else np.asarray(value)
    tensor = value.detach().cpu().contiguous()
    if str(tensor.dtype) == "torch.bfloat16":
        import ml_dtypes
        import torch

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _as_tensor(value: Array) -> Any:
    import torch

    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(value))
