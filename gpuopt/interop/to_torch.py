"""Hands over a training run to torch.optim."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gpuopt.interop.from_torch import EpsilonOfTorch
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
States = list[dict[str, Array]]
Exported = tuple[str, dict[str, Any], States]


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


def _export_adam(optimizer: Any, variables: Mapping[str, Variable], allow: bool) -> Exported:
    epsilon = optimizer.hyperparameters["epsilon"]
    hyper = _read_numbers(optimizer, ["learning_rate", "beta1", "beta2"])
    if isinstance(epsilon, EpsilonOfTorch):
        hyper["epsilon"] = epsilon.eps
    else:
        hyper |= _read_numbers(optimizer, ["epsilon"])
    if hyper["epsilon"] and not isinstance(epsilon, EpsilonOfTorch) and not allow:
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


def _to_tensor(value: Array) -> Any:
    import torch

    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(value))
