"""Moves the state of a training run from torch.optim to gpuopt, and back.

Where both libraries compute the same formula, the next steps agree to float32 rounding:

| torch.optim | gpuopt | agree |
|---|---|---|
| Adam, AdamW | AdamOptimizer | from torch, and back to torch: always; else to torch: at epsilon 0 |
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

from gpuopt.interop.torch_checks import check_layout, check_settings, check_states
from gpuopt.optimizer import Optimizer
from gpuopt.optimizers import (
    AdagradOptimizer,
    AdamOptimizer,
    GradientDescentOptimizer,
    MomentumOptimizer,
    RMSPropOptimizer,
)
from gpuopt.optimizers.momentum import nesterov_momentum
from gpuopt.optimizers.rms_prop import centered_rms_prop
from gpuopt.state.state_dict import OptimizerState
from gpuopt.variables.scalars import as_scalar
from gpuopt.variables.variable import Variable, as_variable

Array = np.ndarray[Any, Any]
Settings = Mapping[str, Any]

# torch's settings that gpuopt supports with this value only.
_NEUTRAL = {"weight_decay": 0, "dampening": 0, "lr_decay": 0, "amsgrad": False, "maximize": False}

# For each of torch's optimizers: names of settings that no other of them has together.
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
    """Makes an optimizer that continues a run of torch.optim.

    Args:
        state_dict: The result of `state_dict()` of torch's Adam, AdamW, SGD, Adagrad or RMSprop.
        variables: One variable or array for each of torch's parameters, in the same order, with
            the parameters' values. They are not changed.
        allow_epsilon_difference: Accept formulas that differ only in where epsilon is added.

    Raises:
        ValueError: the formulas do not agree, a shape or dtype differs from the variable's, the
            parameters are at different steps or have different settings, or the state is damaged.
    """
    check_layout(state_dict)
    kind, settings = _read_settings(state_dict)
    named = {str(position): as_variable(value) for position, value in enumerate(variables)}
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    if len(indices) != len(named):
        raise ValueError(f"torch's state has {len(indices)} parameters for {len(named)} variables")
    states = [
        {key: _to_array(value) for key, value in state_dict["state"].get(index, {}).items()}
        for index in indices
    ]
    check_states(kind, settings, states, list(named.values()))
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
    """Returns a state for `load_state_dict` of a torch optimizer that continues this run.

    torch's Adam and AdamW load the state of Adam, SGD that of GradientDescent and Momentum, Adagrad
    that of Adagrad, RMSprop that of RMSProp. Needs torch.

    Args:
        optimizer: Of exactly one of these classes (no subclass), with numbers as hyperparameters.
        variables: One variable for each of torch's parameters, in the same order.
        allow_epsilon_difference: Accept formulas that differ only in where epsilon is added.

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
            position: {key: _to_tensor(value) for key, value in state.items()}
            for position, state in enumerate(states)
        },
        "param_groups": groups,
    }


Imported = tuple[Optimizer, dict[str, list[Array]], dict[str, Array]]
States = list[dict[str, Array]]


class _EpsilonOfTorch:
    """torch's epsilon of Adam: added before the bias correction, gpuopt's after it."""

    def __init__(self, eps: float) -> None:
        self.eps = eps
        self.beta2_power: Variable | None = None

    def __call__(self) -> np.float64:
        assert self.beta2_power is not None
        return np.float64(self.eps * math.sqrt(1 - float(self.beta2_power.numpy())))


def _import_adam(
    settings: Settings, states: States, variables: list[Variable], _: bool
) -> Imported:
    steps = {int(state["step"]) if state else 0 for state in states}
    if len(steps) > 1:
        raise ValueError(
            f"torch's parameters are at steps {sorted(steps)}; gpuopt's Adam has one step for all"
        )
    beta1, beta2 = (np.float64(beta) for beta in settings["betas"])
    [step] = steps
    powers = {
        "beta1_power": np.array(beta1 ** (step + 1), np.float32),
        "beta2_power": np.array(beta2 ** (step + 1), np.float32),
    }
    epsilon = _EpsilonOfTorch(settings["eps"])
    optimizer = AdamOptimizer(
        _to_number(settings["lr"]),
        beta1,
        beta2,
        epsilon,
    )
    first = min(variables, key=lambda variable: variable.name)
    power = optimizer.state.create_host_scalar(
        "beta2_power", np.float32(powers["beta2_power"]), first.device
    )
    epsilon.beta2_power = power
    return (
        optimizer,
        {
            "m": _values(states, "exp_avg", variables),
            "v": _values(states, "exp_avg_sq", variables),
        },
        powers,
    )


def _import_sgd(settings: Settings, states: States, variables: list[Variable], _: bool) -> Imported:
    learning_rate = _to_number(settings["lr"])
    if not settings["momentum"]:
        return GradientDescentOptimizer(learning_rate), {}, {}
    optimizer = MomentumOptimizer(
        learning_rate, _to_number(settings["momentum"]), use_nesterov=settings["nesterov"]
    )
    return optimizer, {"momentum": _values(states, "momentum_buffer", variables)}, {}


def _import_adagrad(
    settings: Settings, states: States, variables: list[Variable], allow: bool
) -> Imported:
    sums = _values(states, "sum", variables)
    # Accumulators only grow: if epsilon is lost in rounding now, it will be in every later step.
    visible_below = (settings["eps"] / np.finfo(np.float32).epsneg) ** 2
    smallest = min((values.min() for values in sums if values.size), default=np.inf)
    if settings["eps"] and smallest < visible_below and not allow:
        raise ValueError(
            f"torch's Adagrad adds eps={settings['eps']} to the root, gpuopt's does not; results "
            f"differ where an accumulator is below {visible_below:.2g}, and one is {smallest:.2g}"
        )
    return AdagradOptimizer(_to_number(settings["lr"])), {"accumulator": sums}, {}


def _import_rms_prop(
    settings: Settings, states: States, variables: list[Variable], allow: bool
) -> Imported:
    if settings["eps"] and not allow:
        raise ValueError(
            f"torch's RMSprop adds eps={settings['eps']} outside the root, gpuopt's inside; they "
            "agree only at eps=0"
        )
    learning_rate = _to_number(settings["lr"])
    optimizer = RMSPropOptimizer(
        learning_rate,
        _to_number(settings["alpha"]),
        _to_number(settings["momentum"]),
        np.float64(settings["eps"]) ** 2,
        centered=settings["centered"],
    )
    buffers = _values(states, "momentum_buffer", variables)
    slots = {
        "rms": _values(states, "square_avg", variables),
        # gpuopt's momentum slot includes the learning rate.
        "momentum": [(learning_rate * buffer).astype(buffer.dtype) for buffer in buffers],
    }
    if settings["centered"]:
        slots["mg"] = _values(states, "grad_avg", variables)
    names = optimizer.state.describe().slot_names or []
    return optimizer, {name: slots[name] for name in names}, {}


_IMPORTS: dict[str, Callable[[Settings, States, list[Variable], bool], Imported]] = {
    "Adam": _import_adam,
    "SGD": _import_sgd,
    "Adagrad": _import_adagrad,
    "RMSprop": _import_rms_prop,
}

Exported = tuple[str, dict[str, Any], States]


def _export_adam(optimizer: Any, variables: Mapping[str, Variable], allow: bool) -> Exported:
    epsilon = optimizer.hyperparameters["epsilon"]
    hyper = _read_numbers(optimizer, ["learning_rate", "beta1", "beta2"])
    if isinstance(epsilon, _EpsilonOfTorch):
        hyper["epsilon"] = epsilon.eps
    else:
        hyper |= _read_numbers(optimizer, ["epsilon"])
    if hyper["epsilon"] and not isinstance(epsilon, _EpsilonOfTorch) and not allow:
        raise ValueError(
            f"gpuopt's Adam adds epsilon={hyper['epsilon']} after the bias correction, torch's "
            "before it; they agree only at epsilon=0"
        )
    state = optimizer.state_dict(variables)
    power = float(state["non_slots"]["beta2_power"]) if state["non_slots"] else hyper["beta2"]
    step = _count_steps(power, hyper["beta2"])
    states: States = [
        {
            "step": np.array(step, np.float32),
            "exp_avg": state["slots"]["m"][name],
            "exp_avg_sq": state["slots"]["v"][name],
        }
        for name in _names_with_slots(state, "m", variables)
    ]
    betas = (hyper["beta1"], hyper["beta2"])
    return "Adam", {"lr": hyper["learning_rate"], "betas": betas, "eps": hyper["epsilon"]}, states


def _export_sgd(optimizer: Any, variables: Mapping[str, Variable], _: bool) -> Exported:
    state = optimizer.state_dict(variables)
    if isinstance(optimizer, GradientDescentOptimizer):
        return "SGD", {"lr": _read_numbers(optimizer, ["learning_rate"])["learning_rate"]}, []
    hyper = _read_numbers(optimizer, ["learning_rate", "decay"])
    settings = {
        "lr": hyper["learning_rate"],
        "momentum": hyper["decay"],
        "nesterov": optimizer.rule is nesterov_momentum,
    }
    names = _names_with_slots(state, "momentum", variables)
    return (
        "SGD",
        settings,
        [{"momentum_buffer": state["slots"]["momentum"][name]} for name in names],
    )


def _export_adagrad(optimizer: Any, variables: Mapping[str, Variable], _: bool) -> Exported:
    state = optimizer.state_dict(variables)
    names = _names_with_slots(state, "accumulator", variables)
    settings = {
        "lr": _read_numbers(optimizer, ["learning_rate"])["learning_rate"],
        "eps": 0.0,
        "initial_accumulator_value": float(optimizer.initial_accumulator_value),
    }
    # torch's Adagrad has accumulators from its construction on, so they must be in the state.
    sums = [state["slots"]["accumulator"][name] for name in names] or [
        np.full(v.shape, optimizer.initial_accumulator_value, v.dtype) for v in variables.values()
    ]
    # torch uses the step only for lr_decay.
    return "Adagrad", settings, [{"step": np.array(0, np.float32), "sum": s} for s in sums]


def _export_rms_prop(optimizer: Any, variables: Mapping[str, Variable], allow: bool) -> Exported:
    hyper = _read_numbers(optimizer, ["learning_rate", "decay", "momentum_decay", "epsilon"])
    if hyper["epsilon"] and not allow:
        raise ValueError(
            f"gpuopt's RMSProp adds epsilon={hyper['epsilon']} inside the root, torch's outside; "
            "they agree only at epsilon=0"
        )
    learning_rate = hyper["learning_rate"]
    if not learning_rate:
        raise ValueError(
            "gpuopt's RMSProp multiplies its momentum by the learning rate, torch's does not: at a "
            "learning rate of 0, the momentum cannot be converted"
        )
    centered = optimizer.rule is centered_rms_prop
    state = optimizer.state_dict(variables)
    names = _names_with_slots(state, "rms", variables)
    # torch's averages start at 0 and gpuopt's at 1, so gpuopt's must be in the state.
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


def _read_settings(state_dict: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the name of torch's optimizer, and the settings that all its parameters share."""
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in state_dict["param_groups"]
    ]
    settings = groups[0]
    if any(group != settings for group in groups):
        raise ValueError(
            "torch's parameter groups have different settings; import each group into an optimizer "
            "of its own"
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
    check_settings(kind, settings)
    return kind, settings


def _values(states: States, key: str, variables: list[Variable]) -> list[Array]:
    """Returns one state array for each variable; zeros where torch has not made it yet."""
    return [
        state[key] if state.get(key) is not None else np.zeros(variable.shape, variable.dtype)
        for state, variable in zip(states, variables, strict=True)
    ]


def _to_number(value: Any) -> np.float64:
    """Converts a number or a scalar of torch without losing digits."""
    return np.float64(float(value))


def _read_numbers(optimizer: Any, names: list[str]) -> dict[str, float]:
    """Returns hyperparameters, rounded as gpuopt's steps round them."""
    numbers = {}
    for name in names:
        value = optimizer.hyperparameters[name]
        if callable(value):
            raise ValueError(f"{name} is a function; torch's settings are numbers")
        numbers[name] = float(as_scalar(value, name))
    return numbers


def _names_with_slots(
    state: OptimizerState, slot_name: str, variables: Mapping[str, Variable]
) -> list[str]:
    """Returns all names in `variables` if each has the slot, and [] if none has it."""
    present = state["slots"].get(slot_name, {})
    missing = [name for name in variables if name not in present]
    if present and missing:
        names = [variables[name].name for name in missing]
        raise ValueError(f'{names} have no slot "{slot_name}" yet, but other variables have one')
    return list(variables) if present else []


def _count_steps(power: float, beta: float) -> int:
    """Returns t such that `power = beta^(t + 1)`; any large t will do where the power is 0."""
    if not 0 < beta < 1:
        return 1
    smallest = float(np.finfo(np.float32).tiny)
    return max(0, round(math.log(max(power, smallest)) / math.log(beta)) - 1)


def _to_array(value: Any) -> Any:
    if value is None or not hasattr(value, "detach"):
        return value if value is None else np.asarray(value)
    tensor = value.detach().cpu().contiguous()
    if str(tensor.dtype) == "torch.bfloat16":
        import ml_dtypes
        import torch

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _to_tensor(value: Array) -> Any:
    import torch

    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(value))
