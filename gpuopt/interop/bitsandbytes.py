"""Moves a training run with slots in 8 bits from bitsandbytes to gpuopt, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from gpuopt.codecs import Byte
from gpuopt.interop.exported import names_with_slots, read_numbers, refuse_options
from gpuopt.interop.to_torch import runs_of_groups
from gpuopt.interop.torch_checks import (
    check_layout,
    in_torchs_order,
    named_variables,
    names_of_parameters,
)
from gpuopt.interop.torch_groups import (
    Array,
    arguments_of,
    numbers_of,
    parts_of,
    settings_of,
)
from gpuopt.optimizer import Optimizer
from gpuopt.optimizers import LionOptimizer, MomentumOptimizer, TorchAdamWOptimizer
from gpuopt.optimizers.base.declared import hyperparameters_of
from gpuopt.rules.slot_codes import BLOCK, CodedValues, Coding, scales_name, scales_shape
from gpuopt.state.counts import STEP
from gpuopt.state.state_dict import OptimizerState
from gpuopt.variables.variable import Variable

Kind = Literal["AdamW", "Lion", "SGD"]

_CODINGS = Coding.SIGNED, Coding.SQUARES
# Around the arrays of a parameter, in files of bitsandbytes since 0.48.
_WRAPPED = "__bnb_optimizer_quant_state__"
_SETTINGS = "lr", "betas", "eps", "weight_decay"


class _Form(NamedTuple):
    """An optimizer that both libraries have.

    Attributes:
        optimizer: gpuopt's.
        slots: The names of its slots: bitsandbytes' state1, and state2.
    """

    optimizer: Any
    slots: tuple[str, ...]

    def numbers(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns gpuopt's hyperparameters of a parameter group."""
        if self.optimizer is MomentumOptimizer:
            settings = {**settings, "momentum": settings["betas"][0]}
        return numbers_of(settings, hyperparameters_of(self.optimizer))


_FORMS: dict[str, _Form] = {
    "AdamW": _Form(TorchAdamWOptimizer, ("m", "v")),
    "Lion": _Form(LionOptimizer, ("m",)),
    "SGD": _Form(MomentumOptimizer, ("momentum",)),
}


def optimizer_from_bitsandbytes(
    kind: Kind, state_dict: Mapping[str, Any], variables: Sequence[Any]
) -> Optimizer:
    """Makes an optimizer with `slot_bits=8` that continues a run of bitsandbytes.

    The codes and scales become the optimizer's as they are. A parameter of fewer elements than
    `min_8bit_size`, whose state bitsandbytes has in float32, has 8 bits from now on, too.

    Args:
        kind: What the state is of, which it does not say: "AdamW" of bitsandbytes' `AdamW8bit` or
            `Adam8bit`, which decays as AdamW does; "Lion" of `Lion8bit`; "SGD" of `SGD8bit`.
        state_dict: The result of `state_dict()`.
        variables: One variable or array for each parameter, with the parameters' values, found by
            name or by order as in `optimizer_from_torch`. They are not changed.

    Returns:
        A `TorchAdamWOptimizer`, `LionOptimizer` or `MomentumOptimizer` of `slot_form`
        "bitsandbytes".

    Raises:
        TypeError: `state_dict` is no dictionary, or `variables` no list of variables.
        ValueError: the kind is unknown, the formulas do not agree, a state does not fit its
            variable, is damaged or of other blocks or another map, or variables have other names
            than parameters.
    """
    if kind not in _FORMS:
        raise ValueError(f"kind must be one of {list(get_args(Kind))}, got {kind!r}")
    check_layout(state_dict)
    form, named = _FORMS[kind], named_variables(variables)
    groups = [group for group in state_dict["param_groups"] if group["params"]]
    indices = [index for group in groups for index in group["params"]]
    if len(indices) != len(named):
        raise ValueError(f"the state has {len(indices)} parameters for {len(named)} variables")
    named = in_torchs_order(named, names_of_parameters(state_dict))
    for group in groups:
        _check_settings(kind, group)
    given = [state_dict["state"].get(index, {}) for index in indices]
    states = [{**state, **state.get(_WRAPPED, {})} for state in given]
    slots: dict[str, dict[str, Array]] = {}
    for state, (name, variable) in zip(states, named.items(), strict=True):
        if state:
            for number, slot_name in enumerate(form.slots):
                codes, scales = _coded(state, number, variable)
                slots.setdefault(slot_name, {})[name] = codes
                slots.setdefault(scales_name(slot_name), {})[name] = scales
    parts = parts_of(groups, states, named.values())
    for state, variable in zip(states, named.values(), strict=True):
        _check_step(state, variable)
    numbers = [form.numbers(part.settings) for part in parts]
    optimizer = form.optimizer(
        **arguments_of(numbers, parts), slot_bits=8, slot_form="bitsandbytes"
    )
    if STEP in optimizer.own_counts:
        slots[STEP] = {
            name: np.array(state["step"], np.int64)
            for state, name in zip(states, named, strict=True)
            if state
        }
    saved: OptimizerState = {
        "format": 1,
        "optimizer": type(optimizer).__name__,
        "name": optimizer.get_name(),
        "hyperparameters": optimizer.options.codecs.described(),
        "slots": slots,
        "non_slots": {},
    }
    optimizer.load_state_dict(saved, named)
    return optimizer  # type: ignore[no-any-return]


def optimizer_to_bitsandbytes(optimizer: Optimizer, variables: Sequence[Any]) -> dict[str, Any]:
    """Returns a state for `load_state_dict` of a bitsandbytes optimizer that continues this run.

    `AdamW8bit` and `Adam8bit` load the state of TorchAdamW, `Lion8bit` that of Lion, and `SGD8bit`
    that of Momentum. Needs torch.

    Args:
        optimizer: Of exactly one of these classes, with `slot_bits=8`, `slot_form="bitsandbytes"`
            and numbers as hyperparameters.
        variables: One variable for each parameter, in the same order.

    Returns:
        `state`, tensors in host memory, and `param_groups`.

    Raises:
        ImportError: torch is not installed.
        TypeError: `variables` is no list of variables.
        ValueError: the formulas do not agree, a hyperparameter is a function, some variables have
            slots and others not, variables of one group do not follow each other, or there are
            none, or one is given twice.
    """
    import torch

    form = next((each for each in _FORMS.values() if each.optimizer is type(optimizer)), None)
    if form is None or optimizer.options.codecs.slot_form != "bitsandbytes":
        raise ValueError(
            f"{type(optimizer).__name__} has no counterpart in bitsandbytes: give it a TorchAdamW, "
            'Lion or Momentum with slot_bits=8 and slot_form="bitsandbytes"'
        )
    if form.optimizer is MomentumOptimizer and optimizer.rule.name != "momentum":  # type: ignore[attr-defined]
        raise ValueError("bitsandbytes' SGD8bit has no Nesterov momentum")
    refuse_options(optimizer)
    named = named_variables(variables)
    if not named:
        raise ValueError("variables is empty, so there is no run to continue")
    saved = optimizer.state_dict(named)
    steps = saved["slots"].get(STEP, {})
    states: dict[int, dict[str, Any]] = {}
    has_steps = STEP in optimizer.own_counts
    for name in steps if has_steps else names_with_slots(saved, form.slots[0], named):
        states[int(name)] = of_parameter = {"step": int(steps.get(name, 1))}
        for number, slot_name in enumerate(form.slots):
            of_parameter |= {
                f"state{number + 1}": torch.from_numpy(np.array(saved["slots"][slot_name][name])),
                f"absmax{number + 1}": torch.from_numpy(
                    np.array(saved["slots"][scales_name(slot_name)][name])
                ),
                f"qmap{number + 1}": torch.from_numpy(np.array(_CODINGS[number].values)),
            }
    groups = []
    for given, run in runs_of_groups(optimizer, named):
        groups.append({"params": list(map(int, run)), **_settings(form, given)})
    return {"state": states, "param_groups": groups}


def _check_settings(kind: str, settings: Mapping[str, Any]) -> None:
    for name in _SETTINGS:
        if name not in settings:
            raise ValueError(f"a parameter group of bitsandbytes' {kind} lacks {name!r}")
    betas = settings["betas"]
    is_right = isinstance(betas, Sequence) and len(betas) == 2
    is_right = is_right and all(_is_number(beta) and 0 <= beta < 1 for beta in betas)
    rest = [settings[name] for name in _SETTINGS if name != "betas"]
    if not (is_right and all(map(_is_number, rest)) and min(rest[1:]) >= 0):
        given = {name: settings[name] for name in _SETTINGS}
        raise ValueError(f"bitsandbytes' {kind} cannot have {given}")
    if kind == "SGD" and settings["weight_decay"]:
        raise ValueError(
            f"bitsandbytes' SGD has weight_decay={settings['weight_decay']}; gpuopt's formula has "
            "no such term"
        )


def _check_step(state: Mapping[str, Any], variable: Variable) -> None:
    step: Any = state.get("step") if state else 0
    if not _is_number(step) or step < 0 or step != int(step):
        raise ValueError(
            f'bitsandbytes\' "{variable.name}" is at step {step!r}, which is no count of steps'
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _coded(state: Mapping[str, Any], number: int, variable: Variable) -> CodedValues:
    """Returns what is stored of a slot, from a parameter's state.

    Raises:
        ValueError: a part is missing, damaged or of other blocks, or the map is another one.
    """
    coding, what = _CODINGS[number], f'bitsandbytes\' state{number + 1} of "{variable.name}"'
    names = [f"{part}{number + 1}" for part in ("state", "absmax", "qmap")]
    if state.get(names[0]) is None:
        raise ValueError(f"{what} is missing; there are {sorted(map(str, state))}")
    values = _to_array(state[names[0]])
    if values.dtype == np.float32 and values.shape == variable.shape:
        if not np.isfinite(values).all() or (coding is Coding.SQUARES and (values < 0).any()):
            raise ValueError(f"{what} has elements that are not finite, or squares below 0")
        return Byte(coding).new_arrays(values)
    scales, qmap = (_to_array(state.get(name)) for name in names[1:])
    shape = scales_shape(variable.shape, BLOCK, by_rows=False)
    found = (values.shape, values.dtype.name), (scales.shape, scales.dtype.name)
    if found != ((variable.shape, "uint8"), (shape, "float32")):
        raise ValueError(
            f"{what} must be uint8 of shape {variable.shape}, with {names[1]} float32 of shape "
            f"{shape}, one for each 256; they are {found[0]} and {found[1]}"
        )
    if not (np.isfinite(scales).all() and (scales >= 0).all()):
        raise ValueError(f"{what} has an {names[1]} that is no largest magnitude")
    if qmap.shape != (256,) or not np.allclose(qmap, coding.values, rtol=1e-5, atol=0):
        raise ValueError(f"{what} has a {names[2]} that is not bitsandbytes' dynamic map")
    return CodedValues(values, scales)


def _settings(form: _Form, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns bitsandbytes' settings of a group."""
    numbers = read_numbers(given, hyperparameters_of(form.optimizer))
    if form.optimizer is MomentumOptimizer:
        numbers |= {"beta1": numbers.pop("momentum"), "beta2": 0.0}
    return {"eps": 0.0, "weight_decay": 0.0, **settings_of(numbers)}


def _to_array(value: Any) -> Array:
    """Returns a tensor or an array as numpy's; None as an array of an object."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
