"""Takes over a training run from torch.optim."""

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
from gpuopt.state.state_dict import OptimizerState
from gpuopt.variables.variable import Variable, as_variable

Array = np.ndarray[Any, Any]
Settings = Mapping[str, Any]
Imported = tuple[Optimizer, dict[str, list[Array]], dict[str, Array]]
States = list[dict[str, Array]]

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


class EpsilonOfTorch:
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
    epsilon = EpsilonOfTorch(settings["eps"])
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


def _to_array(value: Any) -> Any:
    if value is None or not hasattr(value, "detach"):
        return value if value is None else np.asarray(value)
    tensor = value.detach().cpu().contiguous()
    if str(tensor.dtype) == "torch.bfloat16":
        import ml_dtypes
        import torch

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
