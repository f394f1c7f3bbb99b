"""Hands over a training run to torch.optim."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from gpuopt.interop.exported import (
    Array,
    Exported,
    Given,
    States,
    names_with_slots,
    read_numbers,
    refuse_options,
)
from gpuopt.interop.from_torch import EpsilonOfTorch
from gpuopt.interop.torch_checks import named_variables
from gpuopt.interop.torch_forms import EXPORTS as _OF_TORCHS_FORMS
from gpuopt.interop.torch_groups import settings_of
from gpuopt.optimizer import Optimizer
from gpuopt.optimizers import (
    AdagradOptimizer,
    AdamOptimizer,
    GradientDescentOptimizer,
    MomentumOptimizer,
    RMSPropOptimizer,
)
from gpuopt.optimizers.adam import count_steps
from gpuopt.optimizers.base.declared import hyperparameters_of
from gpuopt.optimizers.momentum import nesterov_momentum
from gpuopt.optimizers.rms_prop import centered_rms_prop
from gpuopt.variables.variable import Variable


def optimizer_to_torch(
    optimizer: Optimizer, variables: Sequence[Any], *, allow_epsilon_difference: bool = False
) -> dict[str, Any]:
    """Returns a state for `load_state_dict` of a torch optimizer that continues this run.

    torch's Adam and AdamW load the state of Adam, SGD that of GradientDescent, Momentum and
    TorchSGD, Adagrad that of Adagrad and TorchAdagrad, RMSprop that of RMSProp and TorchRMSprop,
    AdamW that of TorchAdamW, Adam with amsgrad that of AMSGrad, NAdam and RAdam those of TorchNAdam
    and RAdam. Needs torch.

    Args:
        optimizer: Of exactly one of these classes (no subclass), with numbers as hyperparameters.
        variables: One variable for each of torch's parameters, in the same order.
        allow_epsilon_difference: Accept formulas that differ only in where epsilon is added.

    Returns:
        `state`, tensors in host memory of the variables' shapes and dtypes, and `param_groups`.

    Raises:
        ImportError: torch is not installed.
        TypeError: `variables` is no list of variables.
        ValueError: the formulas do not agree, a hyperparameter is a function, some variables have
            slots and others not, variables of one group do not follow each other, or there are
            none, or one is given twice.
    """
    if optimizer.options.codecs.coded:
        raise ValueError(
            f'"{optimizer.get_name()}" has slot_bits=8, and torch\'s optimizers have no codes: '
            "load its state_dict into an optimizer without slot_bits, and export that"
        )
    import torch

    export = _EXPORTS.get(type(optimizer))
    if export is None:
        raise ValueError(f"{type(optimizer).__name__} has no counterpart in torch.optim")
    refuse_options(optimizer)
    named = named_variables(variables)
    if not named:
        raise ValueError("variables is empty, so there is no run to continue")
    states: dict[int, dict[str, Any]] = {}
    parameters: list[dict[str, Any]] = []
    for given, run in runs_of_groups(optimizer, named):
        kind, settings, of_run = export(optimizer, given, run, allow_epsilon_difference)
        # Where torch has made no state yet, there are no states.
        for name, state in zip(run, of_run, strict=False):
            if not state:
                continue
            states[int(name)] = {key: _to_tensor(value) for key, value in state.items()}
        params = [torch.zeros(variable.shape) for variable in run.values()]
        parameters.append({"params": params, **settings})
    defaults = {name: value for name, value in parameters[0].items() if name != "params"}
    groups = getattr(torch.optim, kind)(parameters, **defaults).state_dict()["param_groups"]
    return {"state": states, "param_groups": groups}


def runs_of_groups(
    optimizer: Any, named: Mapping[str, Variable]
) -> list[tuple[Given, dict[str, Variable]]]:
    """Returns each group's hyperparameters and variables: torch numbers them group by group.

    Variables that do not decay have a group of their own.

    Raises:
        ValueError: variables of one group do not follow each other.
    """
    every = [optimizer.hyperparameters, *optimizer.groups]
    every += [{**given, "weight_decay": 0.0} for given in every]
    runs = [
        (number, dict(run))
        for number, run in groupby(named.items(), lambda item: optimizer._group_of_scalars(item[1]))
    ]
    seen: set[int] = set()
    for number, run in runs:
        if number in seen:
            first = next(iter(run.values()))
            raise ValueError(
                f'torch\'s parameters come group by group, and "{first.name}" comes after a '
                "variable of another group than its own. Variables without decay are a group of "
                "torch's: list those that decay first"
            )
        seen.add(number)
    return [(every[number], run) for number, run in runs]


def _export_adam(
    optimizer: Any, given: Given, variables: Mapping[str, Variable], allow: bool
) -> Exported:
    epsilon = given["epsilon"]
    hyper = read_numbers(given, ["learning_rate", "beta1", "beta2"])
    if isinstance(epsilon, EpsilonOfTorch):
        hyper["epsilon"] = epsilon.eps
    else:
        hyper |= read_numbers(given, ["epsilon"])
    if hyper["epsilon"] and not isinstance(epsilon, EpsilonOfTorch) and not allow:
        raise ValueError(
            f"gpuopt's Adam adds epsilon={hyper['epsilon']} to the root of v, torch's to that of "
            "the bias-corrected v; they agree only at epsilon=0. To accept the difference, pass "
            "allow_epsilon_difference=True"
        )
    state = optimizer.state_dict(variables)
    beta2 = read_numbers(optimizer.hyperparameters, ["beta2"])["beta2"]
    power = float(state["non_slots"]["beta2_power"]) if state["non_slots"] else beta2
    step = count_steps(power, beta2)
    states: States = [
        {
            "step": np.array(step, np.float32),
            "exp_avg": state["slots"]["m"][name],
            "exp_avg_sq": state["slots"]["v"][name],
        }
        for name in names_with_slots(state, "m", variables)
    ]
    return "Adam", settings_of(hyper), states


def _export_sgd(
    optimizer: Any, given: Given, variables: Mapping[str, Variable], _: bool
) -> Exported:
    state = optimizer.state_dict(variables)
    if isinstance(optimizer, GradientDescentOptimizer):
        return "SGD", settings_of(read_numbers(given, ["learning_rate"])), []
    hyper = read_numbers(given, hyperparameters_of(MomentumOptimizer))
    # Without momentum, both forms are one, and torch refuses Nesterov's.
    is_nesterov = optimizer.rule is nesterov_momentum and hyper["momentum"] != 0
    settings = {**settings_of(hyper), "nesterov": is_nesterov}
    names = names_with_slots(state, "momentum", variables)
    return (
        "SGD",
        settings,
        [{"momentum_buffer": state["slots"]["momentum"][name]} for name in names],
    )


def _export_adagrad(
    optimizer: Any, given: Given, variables: Mapping[str, Variable], _: bool
) -> Exported:
    state = optimizer.state_dict(variables)
    names = names_with_slots(state, "accumulator", variables)
    settings = {
        **settings_of(read_numbers(given, ["learning_rate"])),
        "eps": 0.0,
        "initial_accumulator_value": float(optimizer.initial_accumulator_value),
    }
    # torch's Adagrad has accumulators from its construction on, so they must be in the state.
    sums = [state["slots"]["accumulator"][name] for name in names] or [
        np.full(v.shape, optimizer.initial_accumulator_value, v.dtype) for v in variables.values()
    ]
    # torch uses the step only for lr_decay.
    return "Adagrad", settings, [{"step": np.array(0, np.float32), "sum": s} for s in sums]


def _export_rms_prop(
    optimizer: Any, given: Given, variables: Mapping[str, Variable], allow: bool
) -> Exported:
    hyper = read_numbers(given, hyperparameters_of(RMSPropOptimizer))
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
    names = names_with_slots(state, "rms", variables)
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
    hyper["epsilon"] = math.sqrt(hyper["epsilon"])
    return "RMSprop", {**settings_of(hyper), "centered": centered}, states


_EXPORTS: dict[type[Optimizer], Callable[[Any, Given, Mapping[str, Variable], bool], Exported]] = {
    AdamOptimizer: _export_adam,
    GradientDescentOptimizer: _export_sgd,
    MomentumOptimizer: _export_sgd,
    AdagradOptimizer: _export_adagrad,
    RMSPropOptimizer: _export_rms_prop,
    **_OF_TORCHS_FORMS,
}


def _to_tensor(value: Array) -> Any:
    import torch

    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(value))
