"""A run moves between torch.optim and gpuopt in mid-training, and goes on as it would have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpuopt
from gpuopt import IndexedSlices, Variable, optimizer_from_torch, optimizer_to_torch

pytestmark = pytest.mark.value

torch = pytest.importorskip("torch", reason="torch is not installed")

# torch's optimizer, its settings, and what is gpuopt's.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Adam": ("Adam", {"lr": 0.01}, "AdamOptimizer"),
    "Adam, other betas, large eps": (
        "Adam",
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 0.01},
        "AdamOptimizer",
    ),
    "Adam, foreach": ("Adam", {"lr": 0.01, "foreach": True}, "AdamOptimizer"),
    "AdamW": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}, "TorchAdamWOptimizer"),
    "AdamW, other betas, large eps": (
        "AdamW",
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 0.01, "weight_decay": 0.5},
        "TorchAdamWOptimizer",
    ),
    "Adam, amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True, "eps": 0.01}, "AMSGradOptimizer"),
    "NAdam": ("NAdam", {"lr": 0.01, "momentum_decay": 0.01}, "TorchNAdamOptimizer"),
    "RAdam": ("RAdam", {"lr": 0.01, "betas": (0.8, 0.9)}, "RAdamOptimizer"),
    "SGD, decay": ("SGD", {"lr": 0.1, "weight_decay": 0.1}, "TorchSGDOptimizer"),
    "SGD, dampening": (
        "SGD",
        {"lr": 0.1, "momentum": 0.8, "dampening": 0.5},
        "TorchSGDOptimizer",
    ),
    "SGD, Nesterov and decay": (
        "SGD",
        {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
        "TorchSGDOptimizer",
    ),
    "AdamW without decay": ("AdamW", {"lr": 0.01, "weight_decay": 0.0}, "AdamOptimizer"),
    "SGD": ("SGD", {"lr": 0.1}, "GradientDescentOptimizer"),
    "SGD, momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}, "MomentumOptimizer"),
    "SGD, Nesterov": (
        "SGD",
        {"lr": 0.1, "momentum": 0.8, "nesterov": True},
        "MomentumOptimizer",
    ),
    "Adagrad": ("Adagrad", {"lr": 0.1}, "TorchAdagradOptimizer"),
    "Adagrad, large eps": (
        "Adagrad",
        {"lr": 0.1, "eps": 0.1, "initial_accumulator_value": 0.1, "lr_decay": 0.01},
        "TorchAdagradOptimizer",
    ),
    "RMSprop": ("RMSprop", {"lr": 0.01}, "TorchRMSpropOptimizer"),
    "RMSprop, momentum": (
        "RMSprop",
        {"lr": 0.01, "eps": 0.1, "momentum": 0.7, "alpha": 0.9},
        "TorchRMSpropOptimizer",
    ),
    "RMSprop, centered": (
        "RMSprop",
        {"lr": 0.01, "eps": 0.1, "centered": True},
        "TorchRMSpropOptimizer",
    ),
    "RMSprop, centered, momentum": (
        "RMSprop",
        {"lr": 0.01, "eps": 0.1, "momentum": 0.5, "centered": True},
        "TorchRMSpropOptimizer",
    ),
}
STEPS = 10


def gradients(t: int) -> list[np.ndarray]:
    rng = np.random.default_rng([3, t])
    # Away from 0, where sqrt(v) of a single step may be as small as epsilon.
    return [
        (rng.uniform(0.5, 2, shape) * rng.choice([-1, 1], shape)).astype(np.float32)
        for shape in ((4, 3), (5,))
    ]


class TorchRun:
    def __init__(
        self, kind: str, settings: dict[str, Any], start: list[np.ndarray], own: Any = None
    ) -> None:
        """Starts a run; with `own`, each parameter is a group with these settings."""
        self.parameters = [torch.nn.Parameter(torch.from_numpy(value.copy())) for value in start]
        given: Any = self.parameters
        if own is not None:
            pairs = zip(self.parameters, own, strict=True)
            given = [{"params": [parameter], **each} for parameter, each in pairs]
        self.optimizer = getattr(torch.optim, kind)(given, **settings)

    def train(self, first: int, last: int) -> None:
        for t in range(first, last):
            for parameter, gradient in zip(self.parameters, gradients(t), strict=True):
                parameter.grad = torch.from_numpy(gradient)
            self.optimizer.step()

    def values(self) -> list[np.ndarray]:
        return [parameter.detach().numpy().copy() for parameter in self.parameters]


def start() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in ((4, 3), (5,))]


def train(optimizer: gpuopt.Optimizer, variables: list[Variable], first: int, last: int) -> None:
    for t in range(first, last):
        optimizer.apply_gradients(zip(gradients(t), variables, strict=True))


def assert_agree(got: list[Any], expected: list[np.ndarray], began: list[np.ndarray]) -> None:
    for mine, theirs, before in zip(got, expected, began, strict=True):
        assert np.abs(theirs - before).max() > 1e-3, "nothing moved"
        # One rounding of the weight in a step, and the update's own few of a smaller number.
        tolerance = STEPS * np.finfo(np.float32).eps * np.maximum(1, np.abs(theirs))
        np.testing.assert_array_less(np.abs(np.asarray(mine) - theirs), tolerance)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("steps_before", [0, 1, 7, 300])
def test_a_run_of_torch_continues_in_gpuopt(case: str, steps_before: int) -> None:
    kind, settings, expected_class = CASES[case]
    run = TorchRun(kind, settings, start())
    run.train(0, steps_before)
    began = run.values()
    variables = [Variable(value, name=f"p{i}") for i, value in enumerate(began)]
    optimizer = optimizer_from_torch(run.optimizer.state_dict(), variables)
    assert type(optimizer).__name__ == expected_class
    run.train(steps_before, steps_before + STEPS)
    train(optimizer, variables, steps_before, steps_before + STEPS)
    assert_agree(variables, run.values(), began)


MINE: dict[str, tuple[Any, str]] = {
    "Adam": (lambda: gpuopt.AdamOptimizer(0.01, epsilon=0.0), "Adam"),
    "Adam to AdamW": (lambda: gpuopt.AdamOptimizer(0.01, 0.8, 0.95, epsilon=0.0), "AdamW"),
    "TorchAdamW": (lambda: gpuopt.TorchAdamWOptimizer(0.01, weight_decay=0.1), "AdamW"),
    "AMSGrad": (lambda: gpuopt.AMSGradOptimizer(0.01, epsilon=0.01), "Adam"),
    "TorchNAdam": (lambda: gpuopt.TorchNAdamOptimizer(0.01, momentum_decay=0.01), "NAdam"),
    "RAdam": (lambda: gpuopt.RAdamOptimizer(0.01, 0.8, 0.9), "RAdam"),
    "TorchSGD": (lambda: gpuopt.TorchSGDOptimizer(0.1, weight_decay=0.1), "SGD"),
    "TorchSGD, dampening": (
        lambda: gpuopt.TorchSGDOptimizer(0.1, momentum=0.8, dampening=0.5),
        "SGD",
    ),
    "TorchSGD, Nesterov": (
        lambda: gpuopt.TorchSGDOptimizer(0.1, momentum=0.8, weight_decay=0.1, use_nesterov=True),
        "SGD",
    ),
    "GradientDescent": (lambda: gpuopt.GradientDescentOptimizer(0.1), "SGD"),
    "Momentum": (lambda: gpuopt.MomentumOptimizer(0.1, 0.9), "SGD"),
    "Nesterov": (lambda: gpuopt.MomentumOptimizer(0.1, 0.8, use_nesterov=True), "SGD"),
    "Adagrad": (lambda: gpuopt.AdagradOptimizer(0.1), "Adagrad"),
    "TorchAdagrad": (
        lambda: gpuopt.TorchAdagradOptimizer(0.1, 0.01, 0.1, initial_accumulator_value=0.1),
        "Adagrad",
    ),
    "RMSProp": (lambda: gpuopt.RMSPropOptimizer(0.01, epsilon=0.0), "RMSprop"),
    "RMSProp, centered": (
        lambda: gpuopt.RMSPropOptimizer(0.01, momentum=0.5, epsilon=0.0, centered=True),
        "RMSprop",
    ),
    "TorchRMSprop": (lambda: gpuopt.TorchRMSpropOptimizer(0.01, 0.9), "RMSprop"),
    "TorchRMSprop, momentum": (
        lambda: gpuopt.TorchRMSpropOptimizer(0.01, epsilon=0.1, momentum=0.7),
        "RMSprop",
    ),
    "TorchRMSprop, centered": (
        lambda: gpuopt.TorchRMSpropOptimizer(0.01, epsilon=0.1, centered=True),
        "RMSprop",
    ),
    "TorchRMSprop, centered, momentum": (
        lambda: gpuopt.TorchRMSpropOptimizer(0.01, epsilon=0.1, momentum=0.5, centered=True),
        "RMSprop",
    ),
}


@pytest.mark.parametrize("case", MINE)
@pytest.mark.parametrize("steps_before", [0, 1, 7, 300])
def test_a_run_of_gpuopt_continues_in_torch(case: str, steps_before: int) -> None:
    make, kind = MINE[case]
    optimizer = make()
    variables = [Variable(value, name=f"p{i}") for i, value in enumerate(start())]
    train(optimizer, variables, 0, steps_before)
    began = [variable.numpy() for variable in variables]
    run = TorchRun(kind, {"lr": 1.0}, began)
    run.optimizer.load_state_dict(optimizer_to_torch(optimizer, variables))
    run.train(steps_before, steps_before + STEPS)
    train(optimizer, variables, steps_before, steps_before + STEPS)
    assert_agree(variables, run.values(), began)


# torch's optimizer, its settings, and the settings of each of two groups.
GROUPED: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "Adam": ("Adam", {"lr": 0.01}, [{}, {"lr": 0.03}]),
    "Adam, equal": ("Adam", {"lr": 0.01}, [{}, {}]),
    "Adam, betas and eps": (
        "Adam",
        {"lr": 0.01},
        [{"eps": 0.1}, {"betas": (0.8, 0.95), "eps": 0.02}],
    ),
    "Adam, one beta": ("Adam", {"lr": 0.01}, [{}, {"betas": (0.9, 0.9)}]),
    "SGD": ("SGD", {"lr": 0.1}, [{"lr": 0.2}, {"lr": 0.05}]),
    "SGD, momentum in one": ("SGD", {"lr": 0.1}, [{}, {"momentum": 0.9}]),
    "SGD, Nesterov in one": ("SGD", {"lr": 0.1}, [{"momentum": 0.9, "nesterov": True}, {}]),
    "AdamW": ("AdamW", {"lr": 0.01}, [{"weight_decay": 0.1}, {"weight_decay": 0.0, "eps": 0.1}]),
    "Adam, amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True}, [{}, {"betas": (0.8, 0.9)}]),
    "AdamW, decay in the other, betas": (
        "AdamW",
        {"lr": 0.01},
        [{"weight_decay": 0.0}, {"weight_decay": 0.5, "betas": (0.8, 0.95), "eps": 0.1}],
    ),
    "NAdam": ("NAdam", {"lr": 0.01}, [{"betas": (0.8, 0.9)}, {"momentum_decay": 0.1}]),
    "RAdam": ("RAdam", {"lr": 0.01}, [{}, {"betas": (0.8, 0.9)}]),
    "SGD, decay in one": ("SGD", {"lr": 0.1}, [{}, {"weight_decay": 0.1}]),
    "SGD, dampening in one": (
        "SGD",
        {"lr": 0.1, "momentum": 0.8},
        [{"dampening": 0.5}, {"momentum": 0.0}],
    ),
    "Adagrad": (
        "Adagrad",
        {"initial_accumulator_value": 0.1},
        [{"eps": 0.1}, {"lr": 0.2, "lr_decay": 0.1}],
    ),
    "RMSprop": (
        "RMSprop",
        {"lr": 0.01, "eps": 0.1, "momentum": 0.5},
        [{"alpha": 0.9}, {"lr": 0.02, "momentum": 0.7, "eps": 0.01}],
    ),
    "RMSprop, momentum in one": (
        "RMSprop",
        {"lr": 0.01},
        [{"momentum": 0.5}, {}],
    ),
}


@pytest.mark.parametrize("case", GROUPED)
@pytest.mark.parametrize("steps_before", [1, 7])
def test_a_run_with_groups_continues_in_gpuopt_and_again_in_torch(
    case: str, steps_before: int
) -> None:
    kind, settings, own = GROUPED[case]
    run = TorchRun(kind, settings, start(), own)
    run.train(0, steps_before)
    began = run.values()
    variables = [Variable(value, name=f"p{i}") for i, value in enumerate(began)]
    optimizer = optimizer_from_torch(run.optimizer.state_dict(), variables)
    assert len(optimizer.groups) == 1
    run.train(steps_before, steps_before + STEPS)
    train(optimizer, variables, steps_before, steps_before + STEPS)
    assert_agree(variables, run.values(), began)
    began = [variable.numpy() for variable in variables]
    last = TorchRun(kind, {"lr": 1.0}, began, [{}, {}])
    last.optimizer.load_state_dict(optimizer_to_torch(optimizer, variables))
    last.train(steps_before + STEPS, steps_before + 2 * STEPS)
    train(optimizer, variables, steps_before + STEPS, steps_before + 2 * STEPS)
    assert_agree(variables, last.values(), began)


def test_variables_that_do_not_come_group_by_group_are_not_exported() -> None:
    variables = [Variable(np.ones(2, np.float32), name=name) for name in ("a", "b", "c")]
    groups = [gpuopt.ParameterGroup("b", learning_rate=0.5)]
    optimizer = gpuopt.GradientDescentOptimizer(0.1, groups=groups)
    with pytest.raises(ValueError, match='"c" comes after a variable of another group'):
        optimizer_to_torch(optimizer, variables)
    a, b, c = variables
    exported = optimizer_to_torch(optimizer, [a, c, b])
    assert [group["params"] for group in exported["param_groups"]] == [[0, 1], [2]]
    assert [group["lr"] for group in exported["param_groups"]] == pytest.approx([0.1, 0.5])


@pytest.mark.parametrize("grouped", [False, True])
def test_variables_that_do_not_decay_are_a_group_of_torch(grouped: bool) -> None:
    began = [np.ones(shape, np.float32) for shape in ((2, 2), (2,), (3, 2), (3,))]
    variables = [Variable(value, name=f"p{i}") for i, value in enumerate(began)]
    groups = [gpuopt.ParameterGroup("p2|p3", learning_rate=0.5)] if grouped else []
    optimizer = gpuopt.TorchAdamWOptimizer(
        0.1, weight_decay=0.25, decay_variables="matrices", groups=groups
    )
    order = [0, 2, 1, 3] if not grouped else [0, 1, 2, 3]
    exported = optimizer_to_torch(optimizer, [variables[i] for i in order])["param_groups"]
    found = [(len(each["params"]), each["lr"], each["weight_decay"]) for each in exported]
    if grouped:
        assert found == [(1, 0.1, 0.25), (1, 0.1, 0.0), (1, 0.5, 0.25), (1, 0.5, 0.0)]
    else:
        assert found == [(2, 0.1, 0.25), (2, 0.1, 0.0)]


def state_of(kind: str, steps: int = 3, **settings: Any) -> dict[str, Any]:
    run = TorchRun(kind, settings, start())
    run.train(0, steps)
    return run.optimizer.state_dict()


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("Adam", {"weight_decay": 0.1}, "weight_decay=0.1"),
        ("AdamW", {"amsgrad": True}, "amsgrad=True"),
        ("Adam", {"maximize": True}, "maximize=True"),
        ("NAdam", {"weight_decay": 0.1}, "weight_decay=0.1"),
        ("RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}, "weight_decay=0.1"),
        ("Adagrad", {"weight_decay": 0.1}, "weight_decay=0.1"),
        ("RMSprop", {"weight_decay": 0.1}, "weight_decay=0.1"),
        ("Adamax", {}, "not those of torch's Adam"),
    ],
)
def test_formulas_that_differ_are_refused(
    kind: str, settings: dict[str, Any], message: str
) -> None:
    variables = [Variable(value) for value in start()]
    with pytest.raises(ValueError, match=message):
        optimizer_from_torch(state_of(kind, **settings), variables)


def test_decay_that_a_state_does_not_call_decoupled_is_refused_until_it_does() -> None:
    """As those of an older torch."""
    variables = [Variable(value) for value in start()]
    state = state_of("AdamW")
    del state["param_groups"][0]["decoupled_weight_decay"]
    with pytest.raises(ValueError, match="set decoupled_weight_decay=True in each"):
        optimizer_from_torch(state, variables)
    state["param_groups"][0]["decoupled_weight_decay"] = True
    optimizer = optimizer_from_torch(state, variables)
    assert type(optimizer) is gpuopt.TorchAdamWOptimizer


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("AdamW", {"lr": 0.1}),
        ("Adam", {"lr": 0.1, "amsgrad": True}),
        ("NAdam", {"lr": 0.1}),
        ("RAdam", {"lr": 0.1, "betas": (0.6, 0.8)}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
        ("Adagrad", {"lr": 0.1, "lr_decay": 0.5}),
    ],
)
def test_parameters_at_different_steps_go_on_from_them_in_both_directions(
    kind: str, settings: dict[str, Any]
) -> None:
    rng = np.random.default_rng(11)
    values = [rng.normal(size=3) for _ in range(4)]
    parameters = [torch.nn.Parameter(torch.tensor(value)) for value in values]
    theirs = getattr(torch.optim, kind)(parameters, **settings)

    def step(used: list[int], optimizer: Any = None, variables: Any = ()) -> None:
        gradients = {at: rng.normal(size=3) for at in used}
        for at, parameter in enumerate(parameters):
            parameter.grad = torch.tensor(gradients[at]) if at in used else None
        theirs.step()
        if optimizer is not None:
            optimizer.apply_gradients([(gradients[at], variables[at]) for at in used])

    for used in ([0], [0, 1], [0, 2], [1, 2]):  # the last makes no step yet
        step(used)
    variables = [Variable(each.detach().numpy()) for each in parameters]
    ours = optimizer_from_torch(theirs.state_dict(), variables)
    for used in ([1], [0, 1, 2], [2], [1, 2]):
        step(used, ours, variables)
    again = [torch.nn.Parameter(torch.tensor(each.numpy())) for each in variables]
    exported = getattr(torch.optim, kind)(again, **settings)
    exported.load_state_dict(optimizer_to_torch(ours, variables))
    parameters, theirs = again, exported
    for used in ([3, 0], [1, 3], [2]):
        step(used, ours, variables)
    for variable, parameter in zip(variables, parameters, strict=True):
        expected = parameter.detach().numpy()
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6, atol=1e-6)


# torch's optimizers that count the steps of each parameter, and what is ours.
OF_PARTS: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "AdamW": ({}, lambda: gpuopt.TorchAdamWOptimizer(0.1)),
    "NAdam": ({}, lambda: gpuopt.TorchNAdamOptimizer(0.1)),
    "RAdam": ({}, lambda: gpuopt.RAdamOptimizer(0.1)),
    "Adam": ({"amsgrad": True}, lambda: gpuopt.AMSGradOptimizer(0.1)),
    "Adagrad": ({"lr_decay": 0.5}, lambda: gpuopt.TorchAdagradOptimizer(0.1, 0.5)),
    "SGD": (
        {"momentum": 0.9, "dampening": 0.5},
        lambda: gpuopt.TorchSGDOptimizer(0.1, 0.9, 0.5),
    ),
    "SparseAdam": ({}, lambda: gpuopt.LazyAdamOptimizer(np.float64(0.1), count="variable")),
}


@pytest.mark.parametrize("kind", OF_PARTS)
@pytest.mark.parametrize("together", [True, False], ids=["one call", "a call for each"])
def test_parameters_that_join_pause_and_leave_move_as_in_torch(kind: str, together: bool) -> None:
    settings, make = OF_PARTS[kind]
    rng, ours = np.random.default_rng(5), make()
    starts = [rng.normal(size=(4, 2)).astype(np.float32) for _ in range(4)]
    variables = [Variable(start) for start in starts]
    parameters = [torch.nn.Parameter(torch.tensor(start)) for start in starts]
    theirs = getattr(torch.optim, kind)(parameters, lr=0.1, **settings)
    for step in range(20):
        used = [0, *([1] if step % 3 else []), *([2] if step > 5 else []), *([3] * (step < 9))]
        pairs: list[Any] = []
        for at, parameter in enumerate(parameters):
            gradient = rng.normal(size=(4, 2)).astype(np.float32)
            gradient[[0, step % 3 + 1]] = 0
            parameter.grad = torch.tensor(gradient) if at in used else None
            if kind == "SparseAdam" and at in used:
                parameter.grad = parameter.grad.to_sparse(1)
                rows = parameter.grad.indices()[0].numpy()
                pairs.append((IndexedSlices(gradient[rows], rows), variables[at]))
            elif at in used:
                pairs.append((gradient, variables[at]))
        theirs.step()
        for given in [pairs] if together else [[pair] for pair in pairs]:
            ours.apply_gradients(given)
    for variable, parameter in zip(variables, parameters, strict=True):
        expected = parameter.detach().numpy()
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_momentum_that_the_first_group_lacks_is_refused() -> None:
    run = TorchRun("RMSprop", {}, start(), [{}, {"momentum": 0.5}])
    with pytest.raises(ValueError, match="first parameter group has no momentum"):
        optimizer_from_torch(run.optimizer.state_dict(), [Variable(value) for value in start()])


@pytest.mark.parametrize(
    "make",
    [
        lambda: gpuopt.AdamOptimizer(0.1),
        lambda: gpuopt.RMSPropOptimizer(0.1),
        lambda: gpuopt.LazyAdamOptimizer(0.1),
        lambda: gpuopt.FtrlOptimizer(0.1),
        lambda: gpuopt.GradientDescentOptimizer(lambda: 0.1),
        lambda: gpuopt.AMSGradOptimizer(0.1, form="optax"),
        lambda: gpuopt.RAdamOptimizer(0.1, cautious=True),
        lambda: gpuopt.TorchAdamWOptimizer(lambda: 0.1),
        lambda: gpuopt.TorchSGDOptimizer(0.1, momentum=lambda: 0.5),
    ],
)
def test_a_state_that_torch_cannot_continue_is_not_exported(make: Any) -> None:
    variables = [Variable(value) for value in start()]
    with pytest.raises(
        ValueError, match=r'epsilon|no counterpart|is a function|not cautious|not "optax"'
    ):
        optimizer_to_torch(make(), variables)


def test_no_variables_are_no_run_for_torch() -> None:
    with pytest.raises(ValueError, match="variables is empty"):
        optimizer_to_torch(gpuopt.TorchSGDOptimizer(0.1), [])


def test_parameters_at_different_steps_or_settings_are_refused() -> None:
    variables = [Variable(value) for value in start()]
    state = state_of("Adam")
    state["state"][1]["step"] += 1
    with pytest.raises(ValueError, match=r"at steps \[3, 4\]"):
        optimizer_from_torch(state, variables)
    own = [{"centered": False}, {"centered": True}]
    run = TorchRun("RMSprop", {"eps": 0.0}, start(), own)
    with pytest.raises(ValueError, match="groups differ in centered, which chooses the formula"):
        optimizer_from_torch(run.optimizer.state_dict(), variables)
    own = [{"momentum": 0.5}, {"momentum": 0.5, "nesterov": True}]
    run = TorchRun("SGD", {"lr": 0.1}, start(), own)
    with pytest.raises(ValueError, match="groups differ in nesterov"):
        optimizer_from_torch(run.optimizer.state_dict(), variables)
    own = [{}, {"momentum": 0.5}]
    run = TorchRun("SGD", {"lr": 0.1, "weight_decay": 0.1}, start(), own)
    with pytest.raises(ValueError, match="first parameter group has no momentum"):
        optimizer_from_torch(run.optimizer.state_dict(), variables)
    state = state_of("NAdam")
    state["state"][1]["mu_product"] *= 100
    with pytest.raises(ValueError, match="mu_product of"):
        optimizer_from_torch(state, variables)
    own = [{}, {"weight_decay": 0.25}]
    run = TorchRun("Adam", {}, start(), own)
    with pytest.raises(ValueError, match=r"weight_decay=0\.25"):
        optimizer_from_torch(run.optimizer.state_dict(), variables)
    with pytest.raises(ValueError, match="2 parameters for 1 variables"):
        optimizer_from_torch(state_of("Adam"), variables[:1])
    with pytest.raises(ValueError, match="has shape"):
        optimizer_from_torch(state_of("Adam"), variables[::-1])


def test_bfloat16_crosses_bit_by_bit() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    peer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.tensor([0.1, 0.2, 0.3], dtype=torch.bfloat16)
    peer.step()
    w = Variable(np.ones(3, ml_dtypes.bfloat16), name="w")
    optimizer = optimizer_from_torch(peer.state_dict(), [w])
    expected = parameter.grad.view(torch.int16).numpy()
    np.testing.assert_array_equal(
        optimizer.get_slot(w, "momentum").numpy().view(np.int16), expected
    )
    exported = optimizer_to_torch(optimizer, [w])["state"][0]["momentum_buffer"]
    assert exported.dtype == torch.bfloat16
    np.testing.assert_array_equal(exported.view(torch.int16).numpy(), expected)


def named_run(*names: str) -> tuple[Any, dict[str, float]]:
    """Returns torch's state of a run of parameters of one shape, and the first m of each."""
    parameters = {name: torch.nn.Parameter(torch.zeros(3)) for name in names}
    optimizer = torch.optim.AdamW(parameters.items(), 0.1)
    for number, parameter in enumerate(parameters.values()):
        parameter.grad = torch.full((3,), 1.0 + number)
    optimizer.step()
    state = optimizer.state_dict()
    return state, {n: optimizer.state[p]["exp_avg"][0].item() for n, p in parameters.items()}


def first_m(optimizer: gpuopt.Optimizer, variable: Any) -> float:
    slot = optimizer.get_slot(variable, "m")
    assert slot is not None
    return float(slot.numpy()[0])


def test_variables_are_found_by_the_names_of_torchs_parameters() -> None:
    state, expected = named_run("b", "c", "a")
    variables = [Variable(np.zeros(3, np.float32), name=name) for name in "abc"]
    optimizer = optimizer_from_torch(state, variables)
    assert {each.name: first_m(optimizer, each) for each in variables} == expected


def test_arrays_and_variables_without_names_are_in_torchs_order() -> None:
    state, expected = named_run("b", "c", "a")
    variables = [np.zeros(3, np.float32), Variable(np.zeros(3, np.float32)), np.zeros(3, "f4")]
    optimizer = optimizer_from_torch(state, variables)
    assert [first_m(optimizer, each) for each in variables] == list(expected.values())
    mixed = [np.zeros(3, np.float32), Variable(np.zeros(3, np.float32), name="c"), variables[2]]
    optimizer_from_torch(state, mixed)


@pytest.mark.parametrize("names", ["acb", "abx", "xyz", "b-a"])
def test_other_names_than_torchs_are_refused_until_the_state_has_none(names: str) -> None:
    state, expected = named_run("b", "c", "d")
    variables = [
        np.zeros(3, np.float32) if name == "-" else Variable(np.zeros(3, np.float32), name=name)
        for name in names
    ]
    words = r'variables\[\d\] is called "\w", and torch\'s parameter \d "[bcd]"'
    with pytest.raises(ValueError, match=words):
        optimizer_from_torch(state, variables)
    for group in state["param_groups"]:
        del group["param_names"]
    optimizer = optimizer_from_torch(state, variables)
    assert [first_m(optimizer, each) for each in variables] == list(expected.values())


def test_a_state_with_other_than_a_name_for_each_parameter_is_refused() -> None:
    state, _ = named_run("b", "c")
    state["param_groups"][0]["param_names"].pop()
    with pytest.raises(ValueError, match=r"has 2 parameters and the names \['b'\]"):
        optimizer_from_torch(state, [np.zeros(3, np.float32) for _ in range(2)])


@pytest.mark.parametrize("case", CASES)
def test_a_parameter_that_was_never_trained_stays_untrained(case: str) -> None:
    kind, settings, _ = CASES[case]
    torchs = TorchRun(kind, settings, [*start(), np.ones((2,), np.float32)])
    torchs.parameters.pop()  # of which train gives no gradients
    torchs.train(0, 7)
    state = torchs.optimizer.state_dict()
    began = [*torchs.values(), np.ones((2,), np.float32)]
    variables = [Variable(value) for value in began]
    optimizer = optimizer_from_torch(state, variables)
    torchs.train(7, STEPS)
    train(optimizer, variables[:2], 7, STEPS)
    assert_agree([each.numpy() for each in variables[:2]], torchs.values(), began[:2])
    np.testing.assert_array_equal(variables[2].numpy(), began[2])
    names = optimizer.state.describe().slot_names or []
    present = [optimizer.get_slot(variables[2], name) is not None for name in names]
    # torch's Adagrad makes its sums at once.
    assert all(present) if kind == "Adagrad" else not any(present)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_states_beside_16_bit_parameters_stay_float32(dtype: str) -> None:
    state = TorchRun("AdamW", {"lr": 0.01, "weight_decay": 0.1}, start())
    state.train(0, 7)
    parameters = [p.detach().to(getattr(torch, dtype)) for p in state.parameters]
    ours = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    variables = [Variable(p.float().numpy().astype(ours)) for p in parameters]
    optimizer = optimizer_from_torch(state.optimizer.state_dict(), variables)
    moments = [
        [state.optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq")]
        for p in state.parameters
    ]
    for t in range(7, STEPS):
        for w, (m, v), gradient in zip(parameters, moments, gradients(t), strict=True):
            # torch's formula, in float32, with the weights rounded after each step.
            g = torch.from_numpy(gradient.astype(ours).astype(np.float32))
            m.lerp_(g, 0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            wide = w.float() * (1 - 0.01 * 0.1)
            denominator = v.sqrt() / (1 - 0.999 ** (t + 1)) ** 0.5 + 1e-8
            w.copy_(wide - 0.01 / (1 - 0.9 ** (t + 1)) * m / denominator)
        pairs = [(g.astype(ours), v) for g, v in zip(gradients(t), variables, strict=True)]
        optimizer.apply_gradients(pairs)
    for w, (m, v), variable in zip(parameters, moments, variables, strict=True):
        for name, theirs in (("m", m), ("v", v)):
            slot = optimizer.get_slot(variable, name)
            assert slot is not None
            assert slot.dtype == np.float32
            np.testing.assert_allclose(slot.numpy(), theirs.numpy(), rtol=1e-5)
        expected = w.float().numpy()
        # One unit in the last place, where a number between two is rounded to either.
        tolerance = ml_dtypes.finfo(ours).eps * np.abs(expected)
        np.testing.assert_array_less(
            np.abs(variable.numpy().astype(np.float32) - expected), 1.1 * tolerance
        )


def test_states_of_several_types_are_refused() -> None:
    state = TorchRun("AdamW", {"lr": 0.01}, start())
    state.train(0, 3)
    wide = state.optimizer.state_dict()
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    variables = [Variable(value.astype(bfloat16)) for value in start()]
    wide["state"][1]["exp_avg_sq"] = wide["state"][1]["exp_avg_sq"].bfloat16()
    words = "'exp_avg' of parameter 0 .* is float32, and .*'exp_avg_sq' of parameter 1 .* bfloat16"
    with pytest.raises(ValueError, match=words):
        optimizer_from_torch(wide, variables)
