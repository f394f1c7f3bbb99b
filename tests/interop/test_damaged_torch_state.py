"""States of torch.optim with parts missing or impossible are refused by name; imports go back."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import Variable, optimizer_from_torch, optimizer_to_torch

ONES = np.ones(2, np.float32)
ADAM: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False}
AMSGRAD: dict[str, Any] = {**ADAM, "amsgrad": True}
NADAM: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "momentum_decay": 0.004}
DAMPENED: dict[str, Any] = {**SGD, "dampening": 0.5, "weight_decay": 0}
ADAGRAD: dict[str, Any] = {
    "lr": 0.1,
    "lr_decay": 0,
    "eps": 0.0,
    "initial_accumulator_value": 0.1,
}
RMSPROP: dict[str, Any] = {"lr": 0.1, "alpha": 0.9, "eps": 0, "momentum": 0.5, "centered": True}


def adam_state(**changes: Any) -> dict[str, Any]:
    state = {"step": np.float32(5), "exp_avg": ONES, "exp_avg_sq": ONES} | changes
    return {key: value for key, value in state.items() if value is not ...}


def of_torch(settings: dict[str, Any], state: Any, params: Any = (0,)) -> dict[str, Any]:
    return {"state": state, "param_groups": [{**settings, "params": list(params)}]}


DAMAGED: dict[str, tuple[Any, str]] = {
    "no groups": ({"state": {}, "param_groups": []}, "has no parameter groups"),
    "no state": ({"param_groups": [ADAM]}, "lacks 'state'"),
    "no list of groups": ({"state": {}}, "lacks 'param_groups'"),
    "group without parameters": ({"state": {}, "param_groups": [ADAM]}, "lacks 'params'"),
    "no dictionary": ([], "state_dict must be what torch's state_dict.. returned, got list"),
    "unlisted parameter": (of_torch(ADAM, {0: adam_state(), 3: adam_state()}), "parameters .3."),
    "a parameter twice": (of_torch(ADAM, {0: adam_state()}, (0, 0)), "parameter 0 twice"),
    "no exp_avg": (of_torch(ADAM, {0: adam_state(exp_avg=...)}), "parameter 0 .*lacks 'exp_avg'"),
    "no exp_avg_sq": (of_torch(ADAM, {0: adam_state(exp_avg_sq=...)}), "lacks 'exp_avg_sq'"),
    "exp_avg None": (of_torch(ADAM, {0: adam_state(exp_avg=None)}), "lacks 'exp_avg'"),
    "exp_avg_sq None": (of_torch(ADAM, {0: adam_state(exp_avg_sq=None)}), "lacks 'exp_avg_sq'"),
    "step None": (of_torch(ADAM, {0: adam_state(step=None)}), "lacks 'step'"),
    "sum None": (of_torch(ADAGRAD, {0: {"step": 1.0, "sum": None}}), "lacks 'sum'"),
    "a list of states": (of_torch(ADAM, [adam_state()]), "a dictionary for each parameter"),
    "a state None": (of_torch(ADAM, {0: None}), "a dictionary for each parameter"),
    "no step": (of_torch(ADAM, {0: adam_state(step=...)}), "lacks 'step'"),
    "step -5": (of_torch(ADAM, {0: adam_state(step=-5)}), "is at step -5"),
    "step inf": (of_torch(ADAM, {0: adam_state(step=np.inf)}), "is at step inf"),
    "step nan": (of_torch(ADAM, {0: adam_state(step=np.nan)}), "is at step nan"),
    "step 2.5": (of_torch(ADAM, {0: adam_state(step=2.5)}), "is at step 2.5"),
    "negative variance": (
        of_torch(ADAM, {0: adam_state(exp_avg_sq=np.float32([1, -1]))}),
        "'exp_avg_sq' of parameter 0 .*negative",
    ),
    "no largest average": (of_torch(AMSGRAD, {0: adam_state()}), "lacks 'max_exp_avg_sq'"),
    "negative largest average": (
        of_torch(AMSGRAD, {0: adam_state(max_exp_avg_sq=-ONES)}),
        "'max_exp_avg_sq' .*negative",
    ),
    "no product of NAdam": (of_torch(NADAM, {0: adam_state()}), "lacks 'mu_product'"),
    "product of nan": (
        of_torch(NADAM, {0: adam_state(mu_product=np.nan)}),
        "has a mu_product of nan",
    ),
    "no dampened momentum": (of_torch(DAMPENED, {0: {"other": ONES}}), "lacks 'momentum_buffer'"),
    "no momentum": (of_torch(SGD, {0: {"other": ONES}}), "lacks 'momentum_buffer'"),
    "no sum": (of_torch(ADAGRAD, {0: {"step": 1.0}}), "lacks 'sum'"),
    "no state of Adagrad": (of_torch(ADAGRAD, {}), "lacks 'sum'"),
    "negative sum": (of_torch(ADAGRAD, {0: {"step": 1.0, "sum": -ONES}}), "'sum' .*negative"),
    "no square_avg": (
        of_torch(RMSPROP, {0: {"momentum_buffer": ONES, "grad_avg": ONES}}),
        "lacks 'square_avg'",
    ),
    "no grad_avg": (
        of_torch(RMSPROP, {0: {"square_avg": ONES, "momentum_buffer": ONES}}),
        "lacks 'grad_avg'",
    ),
    "no momentum of RMSprop": (
        of_torch(RMSPROP, {0: {"square_avg": ONES, "grad_avg": ONES}}),
        "lacks 'momentum_buffer'",
    ),
    "exp_avg of another shape": (
        of_torch(ADAM, {0: adam_state(exp_avg=np.ones(3, np.float32))}),
        r"torch.s 'exp_avg' of parameter 0 .for .v0.. has shape .2,.; the saved value",
    ),
    "sum of another dtype": (
        of_torch(ADAGRAD, {0: {"step": 1.0, "sum": np.ones(2)}}),
        r"'sum' of parameter 0 .for .v0.. has dtype float32; the saved value",
    ),
    "a number for an average": (
        of_torch(RMSPROP, {0: {"square_avg": ONES, "momentum_buffer": ONES, "grad_avg": 0.0}}),
        r"'grad_avg' of parameter 0 .for .v0.. has shape .2,.; the saved value",
    ),
    "a list for a step": (of_torch(ADAM, {0: adam_state(step=[1, 2])}), "is at step nan"),
    "a huge step": (of_torch(ADAM, {0: adam_state(step=10**400)}), "is at step nan"),
    "no learning rate": (of_torch({"dampening": 0, "nesterov": False}, {}), "SGD lacks 'lr'"),
    "no momentum setting": (
        of_torch({"lr": 0.1, "dampening": 0, "nesterov": False}, {}),
        "SGD lacks 'momentum'",
    ),
    **{
        f"{name}={value}": (of_torch({**settings, name: value}, {}), f"cannot have {name}=")
        for settings, name, value in [
            (SGD, "lr", np.nan),
            (SGD, "lr", "fast"),
            (SGD, "momentum", -0.5),
            (ADAM, "eps", None),
            (ADAM, "eps", -1.0),
            (ADAM, "betas", (0.9, 1.0)),
            (ADAM, "betas", (0.9,)),
            (ADAM, "betas", (np.nan, 0.9)),
            (ADAM, "betas", 0.9),
            (RMSPROP, "alpha", np.inf),
            (NADAM, "momentum_decay", -1.0),
            (DAMPENED, "weight_decay", np.nan),
        ]
    },
    "negative square_avg": (
        of_torch(RMSPROP, {0: {"square_avg": -ONES, "momentum_buffer": ONES, "grad_avg": ONES}}),
        "'square_avg' .*negative",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_state_is_refused_by_name(name: str) -> None:
    state, message = DAMAGED[name]
    count = 2 if name == "a parameter twice" else 1
    variables = [Variable(ONES, name=f"v{i}") for i in range(count)]
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer_from_torch(state, variables)


def test_a_variable_for_two_parameters_is_refused() -> None:
    v = Variable(ONES, name="v")
    with pytest.raises(ValueError, match=r'"v" is given for two of torch.s parameters'):
        optimizer_from_torch(of_torch(ADAM, {}, (0, 1)), [v, v])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Variable(ONES), TypeError, "variables must be a list .* got Variable"),
        (lambda: {"w": Variable(ONES)}, TypeError, "variables must be a list .* got dict"),
        (lambda: 5, TypeError, "variables must be a list .* got int"),
        (lambda: ["w"], TypeError, r"variables\[0\]: expected a Variable or an array, got str"),
        (lambda: [ONES] * 2, ValueError, r"two of torch.s parameters, as variables\[0\] and .*1\]"),
    ],
)
def test_what_is_no_list_of_variables_is_refused(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    variables = make()
    with pytest.raises(error, match=message):
        optimizer_from_torch(of_torch(ADAM, {}, (0,)), variables)
    if find_spec("torch"):
        with pytest.raises(error, match=message):
            optimizer_to_torch(gpuopt.TorchSGDOptimizer(0.1), variables)


def test_a_state_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="has no parameters"):
        optimizer_from_torch(of_torch(ADAM, {}, ()), [])


@pytest.mark.parametrize(
    ("settings", "state", "slot"),
    [
        (ADAM, {}, "m"),
        (SGD, {}, "momentum"),
        (SGD, {0: {"momentum_buffer": None}}, "momentum"),
        (RMSPROP, {}, "rms"),
        (RMSPROP, {}, "mg"),
    ],
)
def test_what_torch_has_not_made_yet_starts_at_0(settings: Any, state: Any, slot: str) -> None:
    v = Variable(ONES)
    optimizer = optimizer_from_torch(of_torch(settings, state), [v])
    assert optimizer.get_slot(v, slot).numpy().tolist() == [0, 0]  # type: ignore[union-attr]


@pytest.mark.torch
@pytest.mark.parametrize("train", [lambda optimizer, variables: None, None])
def test_a_run_from_torchs_adam_goes_back(train: Callable[..., Any] | None) -> None:
    import torch

    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    theirs = torch.optim.Adam(parameters, 0.01, eps=0.001)

    def step(count: int) -> None:
        for _ in range(count):
            for parameter in parameters:
                parameter.grad = 0.5 * torch.ones_like(parameter)
            theirs.step()

    step(3)
    variables = [Variable(p.detach().numpy(), name=f"p{i}") for i, p in enumerate(parameters)]
    optimizer = optimizer_from_torch(theirs.state_dict(), variables)
    gradients = [np.full(v.shape, 0.5, np.float32) for v in variables]
    if train is None:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        step(1)
    state = optimizer_to_torch(optimizer, variables)
    assert state["param_groups"][0]["eps"] == 0.001
    expected = theirs.state_dict()["state"]
    for index, of_parameter in state["state"].items():
        for key, value in of_parameter.items():
            torch.testing.assert_close(value, expected[index][key])
    again = optimizer_from_torch(state, variables)
    assert isinstance(again, gpuopt.AdamOptimizer)
    theirs.load_state_dict(state)
