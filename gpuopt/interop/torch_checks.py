"""Refuses states of torch.optim in which something is missing or impossible."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gpuopt.interop.torch_groups import setting_of
from gpuopt.optimizers import (
    AdamOptimizer,
    AMSGradOptimizer,
    MomentumOptimizer,
    RAdamOptimizer,
    TorchAdagradOptimizer,
    TorchAdamWOptimizer,
    TorchNAdamOptimizer,
    TorchRMSpropOptimizer,
    TorchSGDOptimizer,
)
from gpuopt.optimizers.base.declared import hyperparameters_of
from gpuopt.state.slot_codecs import SlotDtype, has_master
from gpuopt.state.state import check_fits
from gpuopt.variables.variable import Variable, as_variable

# Of a variable that was made without a name.
_DEFAULT_NAME = re.compile(r"Variable(_\d+)?")
# torch's names of sums and averages of squares.
_OF_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg")

# The optimizers whose hyperparameters are the settings of torch's.
_OPTIMIZERS = {
    "Adam": AdamOptimizer,
    "Adam with amsgrad": AMSGradOptimizer,
    "AdamW": TorchAdamWOptimizer,
    "NAdam": TorchNAdamOptimizer,
    "RAdam": RAdamOptimizer,
    "SGD with decay or dampening": TorchSGDOptimizer,
    "SGD": MomentumOptimizer,
    "Adagrad": TorchAdagradOptimizer,
    "RMSprop": TorchRMSpropOptimizer,
}


def named_variables(variables: Any) -> dict[str, Variable]:
    """Returns the variables that belong to torch's parameters, by their positions as text.

    Raises:
        TypeError: they are no list of variables.
        ValueError: one is given twice.
    """
    is_one = isinstance(variables, str | Mapping) or hasattr(variables, "dtype")
    if is_one or not isinstance(variables, Iterable):
        raise TypeError(
            "variables must be a list with a variable for each of torch's parameters, got "
            f"{type(variables).__name__}"
        )
    named: dict[str, Variable] = {}
    positions: dict[Any, int] = {}
    for position, given in enumerate(variables):
        try:
            variable = as_variable(given)
        except TypeError as error:
            raise TypeError(f"variables[{position}]: {error}") from error
        if variable.identity in positions:
            raise ValueError(
                f'"{variable.name}" is given for two of torch\'s parameters, as '
                f"variables[{positions[variable.identity]}] and variables[{position}]"
            )
        positions[variable.identity] = position
        named[str(position)] = variable
    return named


def check_layout(state_dict: Any) -> None:
    """Checks that a state has the state of each parameter, and each once.

    Raises:
        TypeError: `state_dict` is no dictionary, or its states are none.
        ValueError: a part is missing, or belongs to no parameter or to several.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            "state_dict must be what torch's state_dict() returned, got "
            f"{type(state_dict).__name__}"
        )
    for part in ("state", "param_groups"):
        if part not in state_dict:
            raise ValueError(f"torch's state lacks {part!r}; it has {sorted(state_dict)}")
    states = state_dict["state"]
    if not isinstance(states, Mapping) or not all(
        isinstance(state, Mapping) for state in states.values()
    ):
        raise TypeError("torch's 'state' must be a dictionary with a dictionary for each parameter")
    groups = state_dict["param_groups"]
    if not groups:
        raise ValueError("torch's state has no parameter groups")
    for group in groups:
        if "params" not in group:
            raise ValueError(f"a parameter group of torch's state lacks 'params': {sorted(group)}")
    uses = Counter(index for group in groups for index in group["params"])
    if not uses:
        raise ValueError("torch's state has no parameters, so there is no run to continue")
    index, count = uses.most_common(1)[0]
    if count > 1:
        raise ValueError(f"torch's parameter groups list parameter {index} twice")
    unlisted = sorted(set(state_dict["state"]) - set(uses), key=str)
    if unlisted:
        raise ValueError(
            f"torch's state has values of parameters {unlisted}, which no parameter group lists"
        )


def check_settings(kind: str, settings: Mapping[str, Any]) -> None:
    """Raises ValueError if torch's optimizer of this kind cannot have such settings."""
    names = [setting_of(name)[0] for name in hyperparameters_of(_OPTIMIZERS[kind])]
    names += ["initial_accumulator_value"] if kind == "Adagrad" else []
    for name in dict.fromkeys(names):
        if name not in settings:
            raise ValueError(f"a parameter group of torch's {kind} lacks {name!r}")
        value = settings[name]
        if name == "betas":
            # Below 1, as the bias correction divides by 1 - beta.
            is_right = isinstance(value, Sequence) and len(value) == 2
            is_right = is_right and all(0 <= _number(beta) < 1 for beta in value)
        else:
            # A schedule may lead the learning rate anywhere.
            is_right = math.isfinite(_number(value)) and (name == "lr" or _number(value) >= 0)
        if not is_right:
            raise ValueError(f"torch's {kind} cannot have {name}={value!r}")


def check_states(
    kind: str,
    settings: Sequence[Mapping[str, Any]],
    states: Sequence[Mapping[str, Any]],
    variables: Sequence[Variable],
) -> SlotDtype | None:
    """Checks each parameter's state.

    States of 16-bit parameters may be float32, as some trainers keep them.

    Args:
        kind: The name of torch's optimizer.
        settings: Those of each parameter.
        states: One for each parameter; empty where torch has made none yet.
        variables: The gpuopt variable for each parameter.

    Returns:
        "float32" if the states of 16-bit parameters are so, else None.

    Raises:
        ValueError: a part is missing or does not fit its variable, a count of steps is impossible,
            an average of squares is negative, or only some states of 16-bit parameters are float32.
    """
    # Where the first state of a 16-bit parameter is of each type.
    found: dict[np.dtype[Any], str] = {}
    for position, (state, variable, mine) in enumerate(
        zip(states, variables, settings, strict=True)
    ):
        where = f'parameter {position} (for "{variable.name}")'
        # torch's Adagrad makes its sums at once, the others at a parameter's first step.
        present = {part: value for part, value in state.items() if value is not None}
        for part in _parts(kind, mine) if state or kind == "Adagrad" else ():
            # torch's SGD itself has None for a momentum that it has not made yet.
            if part not in (state if kind.startswith("SGD") else present):
                raise ValueError(
                    f"torch's state of {where} lacks {part!r}, which its {kind} has; it has "
                    f"{sorted(present)}"
                )
            if part in present and part not in ("step", "mu_product"):
                array, expected = np.asarray(present[part]), variable.dtype
                what = f"torch's {part!r} of {where}"
                if has_master(expected):
                    if array.dtype == np.float32:
                        expected = array.dtype
                    found.setdefault(expected, what)
                check_fits(array, what, variable.shape, expected)
        steps = _number(present.get("step", 0))
        if not (math.isfinite(steps) and steps >= 0 and steps.is_integer()):
            raise ValueError(f"torch's {where} is at step {steps:g}, which is no count of steps")
        product = _number(present.get("mu_product", 1))
        if not -1 <= product <= 1:
            raise ValueError(f"torch's {where} has a mu_product of {product:g}, of factors below 1")
        for part in _OF_SQUARES:
            if part in present and (present[part] < 0).any():
                raise ValueError(
                    f"torch's {part!r} of {where} has negative elements; it adds up squares"
                )
    wide = found.pop(np.dtype(np.float32), None)
    if wide is None:
        return None
    doubles = [f'"{each.name}" is float64' for each in variables if each.dtype == np.float64]
    others = [*(f"{where} is {dtype}" for dtype, where in found.items()), *doubles]
    if others:
        raise ValueError(
            f"{wide} is float32, and {others[0]}: an optimizer has one type for all its slots, or "
            "that of each variable. Import these parameters into optimizers of their own"
        )
    return "float32"


def names_of_parameters(state_dict: Mapping[str, Any]) -> list[str] | None:
    """Returns torch's names of its parameters, in its order; None if the state has none.

    Raises:
        ValueError: it has not one for each parameter.
    """
    groups = [group for group in state_dict["param_groups"] if group["params"]]
    if not any("param_names" in group for group in groups):
        return None
    names: list[str] = []
    for group in groups:
        given = group.get("param_names", ())
        if len(given) != len(group["params"]) or not all(isinstance(each, str) for each in given):
            raise ValueError(
                f"a parameter group of torch's state has {len(group['params'])} parameters and the "
                f"names {list(given)}"
            )
        names += given
    return names


def in_torchs_order(
    variables: Mapping[str, Variable], names: Sequence[str] | None
) -> dict[str, Variable]:
    """Returns the variables in the order of torch's parameters, by their positions as text.

    Args:
        variables: As `named_variables` has returned them. Arrays, and variables that were made
            without a name, are in torch's order.
        names: torch's, in its order; None if it has none, and all variables are in its order.

    Raises:
        ValueError: variables have other names than parameters.
    """
    ours = [each.name if _has_own_name(each) else None for each in variables.values()]
    if names is None or not any(ours):
        return dict(variables)
    if len(set(names)) == len(names) and set(ours) == set(names):
        by_name = {variable.name: variable for variable in variables.values()}
        return {str(position): by_name[name] for position, name in enumerate(names)}
    for position, (mine, theirs) in enumerate(zip(ours, names, strict=True)):
        if mine not in (None, theirs):
            raise ValueError(
                f'variables[{position}] is called "{mine}", and torch\'s parameter {position} '
                f'"{theirs}". Give variables the names of torch\'s parameters, in any order; or '
                'delete "param_names" from each of the state\'s param_groups: then variables are '
                "taken in the order of parameters, whatever they are called"
            )
    return dict(variables)


def _has_own_name(variable: Variable) -> bool:
    is_array = not isinstance(variable.identity.holder(), Variable)
    return not is_array and _DEFAULT_NAME.fullmatch(variable.name) is None


def _number(value: Any) -> float:
    """Returns a number or a scalar array as a float; NaN if it is neither."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def _parts(kind: str, settings: Mapping[str, Any]) -> list[str]:
    """Returns the names of the parts of a parameter's state, once the parameter has made a step."""
    if "betas" in settings:
        more = {"Adam with amsgrad": ["max_exp_avg_sq"], "NAdam": ["mu_product"]}
        return ["step", "exp_avg", "exp_avg_sq", *more.get(kind, [])]
    if kind == "Adagrad":
        return ["sum", "step"]
    momentum = ["momentum_buffer"] if settings["momentum"] else []
    if kind.startswith("SGD"):
        return momentum
    return ["square_avg", *momentum, *(["grad_avg"] if settings["centered"] else [])]
