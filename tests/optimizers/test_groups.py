"""Variables with hyperparameters of their own: each is updated as by an optimizer of its own."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import textbook
from array_slots import array_slots
from every_optimizer import (
    ARGUMENTS,
    CONFIGURATIONS,
    in_each_shapes_forms,
    make,
    one_of_each_shape,
    optimizer_classes,
    own_step,
    shapes,
)
from interrupt_at import Interrupt, InterruptAt

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Saver, Variable, backends
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.device import Device
from gpuopt.optimizers.base import hyperparameters
from gpuopt.variables.scalars import as_scalar

STEPS = 4
# Another value of each hyperparameter than any optimizer's own.
OTHERS: dict[str, float] = {
    "alpha": 0.7,
    "base": 1.5,
    "beta": 0.8,
    "beta1": 0.7,
    "beta2": 0.95,
    "dampening": 0.3,
    "decay": 0.8,
    "epsilon": 0.01,
    "epsilon_root": 0.001,
    "l1_regularization_strength": 0.02,
    "l2_regularization_strength": 0.03,
    "l2_shrinkage_regularization_strength": 0.04,
    "learning_rate": 0.03,
    "learning_rate_power": -0.6,
    "momentum": 0.4,
    "momentum_decay": 0.5,
    "rho": 0.8,
    "weight_decay": 0.05,
}


def settable(name: str, arguments: dict[str, Any]) -> list[str]:
    optimizer = make(name, arguments)
    return [each for each in optimizer.hyperparameters if each in OTHERS and takes(optimizer, each)]


def takes(optimizer: Any, hyperparameter: str) -> bool:
    return hyperparameter not in optimizer.derived_hyperparameters


def values_of_group(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {each: OTHERS[each] for each in settable(name, arguments)}


def made(name: str, arguments: dict[str, Any], groups: Any) -> Any:
    return make(name, arguments, groups=groups)


def state_of(optimizer: Any, variables: list[Variable]) -> list[np.ndarray]:
    names = array_slots(optimizer)
    return [
        array.numpy()
        for variable in variables
        for array in (variable, *(optimizer.get_slot(variable, name) for name in names))
    ]


class Model:
    """Small, large and strided variables, and tables of one width, with a gradient for each."""

    def __init__(self, dtype: Any = np.float32) -> None:
        rng = np.random.default_rng(3)
        self.variables: list[Variable] = []
        self.gradients: list[list[Any]] = []
        for shape in ((7,), (20_000,), (3, 5), (19_000,), (4,)):
            self._add(rng, dtype, shape)
        for rows in ([1, 0, 1], [3], [2, 2]):
            self._add(rng, dtype, (6, 3), np.array(rows))

    def _add(self, rng: Any, dtype: Any, shape: tuple[int, ...], rows: Any = None) -> None:
        number = len(self.variables)
        start = rng.uniform(0.5, 2, shape).astype(dtype)
        self.variables.append(Variable(start, name=f"w{number}"))
        shape = shape if rows is None else (rows.size, shape[1])
        gradients = [rng.normal(size=shape).astype(dtype) for _ in range(STEPS)]
        self.gradients.append(
            [each if rows is None else IndexedSlices(each, rows) for each in gradients]
        )

    def train(self, optimizer: Any, steps: range = range(STEPS), only: Any = None) -> None:
        chosen = range(len(self.variables)) if only is None else only
        for t in steps:
            pairs = [(self.gradients[i][t], self.variables[i]) for i in chosen]
            optimizer.apply_gradients(pairs, global_step=own_step(optimizer))


@in_each_shapes_forms
@pytest.mark.one_in(6)
def test_each_group_is_updated_as_by_an_optimizer_of_its_own(
    name: str, arguments: dict[str, Any], every_cpu_form: str
) -> None:
    """Dense and sparse; the last group has all hyperparameters of its own."""
    own = values_of_group(name, arguments)
    model, expected = Model(), Model()
    of_rate, of_all = [0, 3, 5], [2, 4, 6, 1]
    groups = [
        ParameterGroup(variables=[model.variables[i] for i in of_rate], learning_rate=lambda: 0.02),
        ParameterGroup(variables=[model.variables[i] for i in of_all], **own),
    ]
    optimizer = made(name, arguments, groups)
    model.train(optimizer)
    for given, mine in (
        ({}, [7]),
        ({"learning_rate": 0.02}, of_rate),
        (own, of_all),
    ):
        alone = make(name, {**arguments, **given})
        expected.train(alone, only=mine)
        got = state_of(optimizer, [model.variables[i] for i in mine])
        # Where a form works on bundles or rows, it rounds as with one group.
        for a, b in zip(got, state_of(alone, [expected.variables[i] for i in mine]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.cxx
@pytest.mark.parametrize("is_compiled", ["0", "1"])
# Recorded forms of two powers make different calls, and need different scratch arrays.
@pytest.mark.parametrize("of_last", [{"learning_rate_power": -0.7}, {"learning_rate": 2.0}])
def test_small_variables_of_several_groups_share_a_bundle(
    of_last: dict[str, Any], is_compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUOPT_COMPILED", is_compiled)
    rng = np.random.default_rng(7)
    starts = [rng.uniform(0.5, 2, size).astype(np.float32) for size in (3, 40, 5, 1, 7)]
    gradients = [rng.normal(size=start.size).astype(np.float32) for start in starts]
    own: list[dict[str, Any]] = [{}, {"learning_rate": 0.5}, of_last]
    number_of = [1, 0, 2, 1, 2]
    variables = [Variable(start, name=f"b{i}") for i, start in enumerate(starts)]
    groups = [
        ParameterGroup(
            variables=[v for v, mine in zip(variables, number_of, strict=True) if mine == number],
            **own[number],
        )
        for number in (1, 2)
    ]
    optimizer = gpuopt.FtrlOptimizer(0.1, groups=groups)
    with backends.using(Device.cpu, CpuBackend(CpuLimits(large_elements=0))):
        for _ in range(3):
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
    for start, gradient, number, got in zip(starts, gradients, number_of, variables, strict=True):
        alone = Variable(start)
        single = gpuopt.FtrlOptimizer(**{"learning_rate": 0.1, **own[number]})
        for _ in range(3):
            single.apply_gradients([(gradient, alone)])
        np.testing.assert_allclose(got.numpy(), alone.numpy(), rtol=1e-6, atol=1e-7)


@one_of_each_shape
def test_a_groups_dense_step_is_the_textbooks(name: str, arguments: dict[str, Any]) -> None:
    own = {each: np.float64(value) for each, value in values_of_group(name, arguments).items()}
    rng = np.random.default_rng(4)
    w, bias = (Variable(rng.normal(size=5), name=each) for each in ("w", "bias"))
    start = bias.numpy()
    gradients = [rng.normal(size=5) for _ in range(STEPS)]
    optimizer = made(name, arguments, [ParameterGroup("^bias$", **own)])
    for gradient in gradients:
        pairs = [(gradient, w), (gradient, bias)]
        optimizer.apply_gradients(pairs, global_step=own_step(optimizer))
    module = optimizer_classes()[name].__module__.rpartition(".")[2]
    history = [(t + 1, gradient) for t, gradient in enumerate(gradients)]
    given = {each: float(value) for each, value in own.items()}
    structural = {key: value for key, value in arguments.items() if key not in own}
    expected = getattr(textbook, module)(start, history, **{**structural, **given})
    np.testing.assert_allclose(bias.numpy(), expected["var"], rtol=2e-6, atol=2e-6)
    assert not np.allclose(w.numpy(), bias.numpy(), atol=1e-3)


def on_a_gpu() -> list[Any]:
    """An optimizer for each number of slots, and for each way to update other rows."""
    firsts: dict[Any, Any] = {}
    for shape, configuration in zip(shapes(), CONFIGURATIONS, strict=True):
        firsts.setdefault((shape.num_slots, shape.other_rows), configuration)
    return CONFIGURATIONS if os.environ.get("GPUOPT_FULL") else list(firsts.values())


@pytest.mark.emulator
@pytest.mark.parametrize("configuration", on_a_gpu(), ids=lambda each: each.identifier)
def test_groups_on_a_gpu_are_updated_as_in_numpy(configuration: Any, emulated_gpus: Any) -> None:
    _, name, arguments = configuration
    dtype = [np.float32, np.float64][CONFIGURATIONS.index(configuration) % 2]
    got, expected = (run_on(device, name, arguments, dtype) for device in ("gpu:0", "cpu"))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def run_on(device: str, name: str, arguments: dict[str, Any], dtype: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    sizes = [(3,), (1030,), (2, 2), (8, 4), (5, 4), (3, 4)]
    variables = [
        Variable(rng.uniform(0.5, 2, shape).astype(dtype), name=f"v{i}", device=device)
        for i, shape in enumerate(sizes)
    ]
    groups = [
        ParameterGroup("^v[13]", learning_rate=0.02),
        ParameterGroup("^v[24]", **values_of_group(name, arguments)),
    ]
    optimizer = made(name, arguments, groups)
    for _ in range(2):
        pairs: list[Any] = []
        for variable in variables:
            shape = variable.shape
            if shape[-1:] != (4,):
                pairs.append((rng.normal(size=shape).astype(dtype), variable))
                continue
            rows = rng.integers(0, shape[0], 6)
            pairs.append((IndexedSlices(rng.normal(size=(6, 4)).astype(dtype), rows), variable))
        optimizer.apply_gradients(pairs, global_step=own_step(optimizer))
    return state_of(optimizer, variables)


@pytest.mark.internal
@pytest.mark.emulator
@pytest.mark.parametrize("num_groups", [40, 300])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_many_groups_are_as_many_launches_as_one(
    num_groups: int, is_sparse: bool, emulated_gpus: Any
) -> None:
    """More groups than go by value into a launch upload their scalars, and launch no more."""
    launched = []
    rates = [0.001 * (1 + number) for number in range(num_groups)]
    for count in (1, num_groups):
        variables = [
            Variable(np.ones((3, 4), np.float32), name=f"t{i}", device="gpu:0")
            for i in range(num_groups)
        ]
        groups = [
            ParameterGroup(variables=[variables[i]], learning_rate=rates[i])
            for i in range(1, count)
        ]
        optimizer = gpuopt.MomentumOptimizer(rates[0], 0.9, groups=groups)
        dense = np.ones((3, 4), np.float32)
        rows = IndexedSlices(np.ones((1, 4), np.float32), np.array([1]))
        pairs = [(rows if is_sparse else dense, variable) for variable in variables]
        optimizer.apply_gradients(pairs)
        before = emulated_gpus[0].launches
        optimizer.apply_gradients(pairs)
        launched.append(emulated_gpus[0].launches - before)
        expected = np.ones((3, 4), np.float32)
        for i, variable in enumerate(variables):
            rate = np.float32(rates[i] if count > 1 else rates[0])
            moved = expected - rate - rate * np.float32(1.9)
            at = 1 if is_sparse else slice(None)
            np.testing.assert_allclose(variable.numpy()[at], moved[at], rtol=1e-6)
        del variables, groups, optimizer, pairs
    assert launched[0] == launched[1] > 0


def test_weights_decay_and_biases_do_not_by_one_line() -> None:
    variables = [
        Variable(np.ones(2, np.float32), name=name) for name in ("w", "bias", "norm/scale")
    ]
    optimizer = gpuopt.AdamWOptimizer(0.1, groups=[ParameterGroup("bias|norm", weight_decay=0.0)])
    optimizer.apply_gradients([(np.zeros(2, np.float32), each) for each in variables])
    assert [each.numpy()[0] for each in variables] == [np.float32(0.9), 1, 1]


def test_a_list_says_what_decays_and_a_group_how_much() -> None:
    variables = [Variable(np.ones(2, np.float32), name=name) for name in ("a", "b", "c")]
    a, b, _ = variables
    optimizer = gpuopt.MomentumWOptimizer(
        0.1, 0.1, 0.9, groups=[ParameterGroup("b|c", weight_decay=0.5)]
    )
    pairs = [(np.zeros(2, np.float32), each) for each in variables]
    optimizer.apply_gradients(pairs, decay_var_list=[a, b])
    assert [each.numpy()[0] for each in variables] == [np.float32(0.9), 0.5, 1]


def test_an_optimizer_of_hooks_sees_the_hyperparameters_of_each_variables_group() -> None:
    class Own(gpuopt.GradientDescentOptimizer):
        def _apply_dense(self, grad: Any, var: Variable) -> None:
            seen[var.name] = float(self._hyper("learning_rate"))
            super()._apply_dense(grad, var)

    seen: dict[str, float] = {}
    variables = [Variable(np.ones(2, np.float32), name=name) for name in ("a", "b")]
    optimizer = Own(0.5, groups=[ParameterGroup("b", learning_rate=0.25)])
    optimizer.apply_gradients([(np.ones(2, np.float32), each) for each in variables])
    assert seen == {"a": 0.5, "b": 0.25}
    assert [each.numpy()[0] for each in variables] == [0.5, 0.75]
    assert optimizer.this_thread.hyperparameters == {}


def test_norms_of_lars_are_scaled_by_the_groups_own_numbers() -> None:
    rng = np.random.default_rng(0)
    start, gradient = (rng.normal(size=9).astype(np.float32) for _ in range(2))
    a, b, alone = (Variable(start, name=name) for name in ("a", "b", "alone"))
    own = {"learning_rate": 0.5, "eeta": 0.1, "weight_decay": 0.01, "momentum": 0.5}
    optimizer = gpuopt.LARSOptimizer(0.1, groups=[ParameterGroup("^b$", **own)])
    single = gpuopt.LARSOptimizer(**own)
    for _ in range(3):
        optimizer.apply_gradients([(gradient, a), (gradient, b)])
        single.apply_gradients([(gradient, alone)])
    np.testing.assert_array_equal(b.numpy(), alone.numpy())
    assert not np.allclose(a.numpy(), b.numpy(), atol=1e-3)


def test_functions_and_variables_are_evaluated_once_in_a_step() -> None:
    calls = []

    def rate() -> float:
        calls.append(1)
        return 0.25

    variables = [Variable(np.ones(2, np.float32), name=name) for name in ("a", "b", "c")]
    of_c = Variable(0.125, dtype=np.float32)
    groups = [ParameterGroup("b", learning_rate=rate), ParameterGroup("c", learning_rate=of_c)]
    optimizer = gpuopt.GradientDescentOptimizer(lambda: rate() * 2, groups=groups)
    pairs = [(np.ones(2, np.float32), each) for each in variables]
    optimizer.apply_gradients(pairs)
    assert [each.numpy()[0] for each in variables] == [0.5, 0.75, 0.875]
    assert len(calls) == 2
    of_c.assign(0.5)
    optimizer.minimize(lambda: np.sum(variables[2]), var_list=variables[2:], gate_gradients=0)
    assert variables[2].numpy()[0] == 0.375


def test_hyperparameters_are_read_and_set() -> None:
    variables = [Variable(np.ones(1, np.float32), name=name) for name in ("a", "b")]
    groups = [ParameterGroup("b", learning_rate=0.25)]
    optimizer = gpuopt.MomentumOptimizer(0.5, 0.0, groups=groups)
    [of_b] = optimizer.groups
    assert dict(of_b) == {"learning_rate": 0.25, "momentum": 0.0}

    def moves() -> list[float]:
        before = [each.numpy()[0] for each in variables]
        optimizer.apply_gradients([(np.ones(1, np.float32), each) for each in variables])
        return [float(old - each.numpy()[0]) for old, each in zip(before, variables, strict=True)]

    assert moves() == [0.5, 0.25]
    of_b["learning_rate"] = 2.0
    assert moves() == [0.5, 2.0]
    optimizer.hyperparameters["learning_rate"] = 4.0
    assert moves() == [4.0, 2.0]
    of_b["learning_rate"] = lambda: 8.0
    assert moves() == [4.0, 8.0]
    of_b["learning_rate"] = 1.0
    assert moves() == [4.0, 1.0]
    assert groups[0].hyperparameters == {"learning_rate": 0.25}
    with pytest.raises(KeyError, match="'rate' cannot be set; these can: learning_rate, momentum"):
        of_b["rate"] = 1.0
    with pytest.raises(TypeError, match="momentum must be a number"):
        of_b["momentum"] = "much"
    with pytest.raises(KeyError, match="'decay' cannot be set"):
        gpuopt.AddSignOptimizer().hyperparameters["decay"] = 0.5
    [of_adams] = gpuopt.AdamOptimizer(groups=[ParameterGroup("b", beta1=0.5)]).groups
    of_adams["beta1"] = 0.75
    with pytest.raises(KeyError, match="'beta2' cannot be set"):
        of_adams["beta2"] = 0.5


@pytest.mark.contract
@pytest.mark.parametrize(
    ("name", "own", "expected"),
    [
        ("Adam", {"lr": 1.0}, "lr, which does not exist; .* may have learning_rate, beta1"),
        ("Momentum", {"use_nesterov": True}, "use_nesterov, which all variables share"),
        ("Momentum", {"decay": 1.0}, "decay, which does not exist; .* learning_rate, momentum"),
        ("RMSProp", {"centered": True}, "centered, which all variables share"),
        (
            "Ftrl",
            {"l1_regularization_strength": -1.0},
            "l1_.* must be at least 0, got -1.0",
        ),
        ("Ftrl", {"learning_rate_power": 1.0}, "learning_rate_power must be at most 0, got 1.0"),
        ("PowerSign", {"base": 0.0}, "base must be above 0, got 0.0"),
        ("PowerSign", {"decay": 0.5}, "decay, which does not exist"),
        ("AdamW", {"weight_decay": np.ones(2)}, "weight_decay must be a scalar"),
    ],
)
def test_what_a_group_cannot_have_is_refused_by_name(
    name: str, own: dict[str, Any], expected: str
) -> None:
    name = f"{name}Optimizer"
    with pytest.raises((TypeError, ValueError), match=f'group "bias".*{expected}'):
        make(name, ARGUMENTS.get(name, {}), groups=[ParameterGroup("bias", **own)])


@pytest.mark.contract
def test_what_is_no_group_is_refused() -> None:
    w = Variable(np.ones(2, np.float32), name="w")
    for error, given, expected in (
        (TypeError, {}, "a pattern of its variables' names, or a list"),
        (TypeError, {"pattern": "w", "variables": [w]}, "a pattern of its variables' names, or"),
        (TypeError, {"pattern": 3}, "pattern must be text"),
        (ValueError, {"pattern": "("}, 'malformed pattern "\\("'),
        (TypeError, {"variables": w}, "must be a list of variables"),
        (TypeError, {"variables": "w"}, "must be a list of variables"),
        (TypeError, {"variables": [w, "b"]}, r"variables\[1\]"),
        (ValueError, {"variables": []}, "empty"),
        (ValueError, {"variables": [w, w]}, '"w" is listed twice'),
    ):
        with pytest.raises(error, match=expected):
            ParameterGroup(**given, learning_rate=1.0)
    for given in (ParameterGroup("w"), [{"pattern": "w"}], 3):
        with pytest.raises(TypeError, match="must be a list of ParameterGroup"):
            gpuopt.AdamOptimizer(groups=given)


@pytest.mark.contract
def test_a_variable_of_two_groups_and_a_pattern_of_none_are_refused_before_any_write() -> None:
    w, bias = (Variable(np.ones(2, np.float32), name=name) for name in ("w", "bias"))
    pairs = [(np.ones(2, np.float32), each) for each in (w, bias)]
    for groups, expected in (
        (
            [ParameterGroup(variables=[w, bias]), ParameterGroup("b.as")],
            'variable "bias" is in two groups, "w" and "b.as"',
        ),
        ([ParameterGroup("biased")], 'pattern of group "biased" in its name; .* "w", "bias"'),
    ):

        class Hooked(gpuopt.AdamOptimizer):
            def _apply_dense(self, grad: Any, var: Variable) -> None:
                super()._apply_dense(grad, var)

        for cls in (gpuopt.AdamOptimizer, Hooked):
            optimizer = cls(groups=groups)
            with pytest.raises(ValueError, match=expected):
                optimizer.apply_gradients(pairs)
            assert w.numpy()[0] == bias.numpy()[0] == 1
            assert optimizer.variables() == []
    with pytest.raises(ValueError, match='two groups are of "w"'):
        gpuopt.AdamOptimizer(groups=[ParameterGroup("w"), ParameterGroup(variables=[w])])


def test_slots_of_others_do_not_stand_for_a_patterns_variable() -> None:
    w = Variable(np.ones(2, np.float32), name="w")
    pairs = [(np.ones(2, np.float32), w)]
    other = gpuopt.MomentumOptimizer(0.1, 0.9, name="bias_only")
    other.apply_gradients(pairs)
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9, groups=[ParameterGroup("bias")])
    with pytest.raises(ValueError, match='no variable has the pattern of group "bias"'):
        optimizer.apply_gradients(pairs)


@pytest.mark.contract
def test_a_bad_number_of_a_groups_function_is_refused_with_the_groups_name() -> None:
    w = Variable(np.ones(2, np.float32), name="w")
    groups = [ParameterGroup("w", learning_rate=lambda: "fast")]
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9, groups=groups)
    with pytest.raises(TypeError, match='group "w": learning_rate must be a number'):
        optimizer.apply_gradients([(np.ones(2, np.float32), w)])
    assert w.numpy()[0] == 1


@pytest.mark.contract
def test_a_group_shows_what_it_is_of_and_what_it_was_given() -> None:
    w, bias = (Variable(np.ones(2, np.float32), name=name) for name in ("w", "bias"))
    assert repr(ParameterGroup("w$", epsilon=0.5)) == "ParameterGroup('w$', epsilon=0.5)"
    listed = repr(ParameterGroup(variables=[w, bias], beta1=0.5))
    assert listed == "ParameterGroup(variables=['bias', 'w'], beta1=0.5)"


@pytest.mark.internal
def test_two_threads_set_two_hyperparameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in the middle of the other's setting."""
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    threads: list[threading.Thread] = []

    def as_scalar_and_set(value: Any, name: str) -> Any:
        if not threads:
            set_other = partial(optimizer.hyperparameters.__setitem__, "momentum", 0.75)
            threads.append(threading.Thread(target=set_other))
            threads[0].start()
            threads[0].join(0.1)  # it goes on, or waits for this one
        return as_scalar(value, name)

    monkeypatch.setattr(hyperparameters, "as_scalar", as_scalar_and_set)
    optimizer.hyperparameters["learning_rate"] = lambda: 0.5
    threads[0].join()
    assert optimizer.hyperparameters["momentum"] == 0.75
    assert optimizer.hyperparameters.evaluate() == {"learning_rate": 0.5, "momentum": 0.75}


def test_a_pattern_may_wait_for_a_variable_that_this_step_does_not_update() -> None:
    w, bias = (Variable(np.ones(2, np.float32), name=name) for name in ("w", "bias"))
    optimizer = gpuopt.GradientDescentOptimizer(
        0.5, groups=[ParameterGroup("bias", learning_rate=0.25)]
    )
    for each in (w, bias):
        optimizer.apply_gradients([(np.ones(2, np.float32), each)])
    later = Variable(np.ones(2, np.float32), name="layer/bias")
    optimizer.apply_gradients([(np.ones(2, np.float32), later)])
    assert [each.numpy()[0] for each in (w, bias, later)] == [0.5, 0.75, 0.75]


@pytest.mark.internal
def test_groups_keep_neither_variables_nor_the_optimizer_alive() -> None:
    w, array = Variable(np.ones(2, np.float32), name="w"), np.ones(2, np.float32)
    optimizer = gpuopt.AdamOptimizer(
        groups=[ParameterGroup(variables=[w, array], beta1=0.5), ParameterGroup("v")]
    )
    v = Variable(np.ones(2, np.float32), name="v")
    optimizer.apply_gradients([(np.ones(2, np.float32), each) for each in (w, array, v)])
    ends = [weakref.ref(each) for each in (w, optimizer)]
    gc.disable()
    try:
        del w, v, array
        assert ends[0]() is None
        assert Variable(np.ones(2, np.float32), name="w").name == "w"
        del optimizer
        assert ends[1]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_group_has_every_replicas_copy_of_a_variable(is_listed: bool) -> None:
    strategy = gpuopt.MirroredStrategy(["cpu", "cpu"])
    w, bias = (strategy.variable(np.ones(2, np.float32), name=name) for name in ("w", "bias"))
    where: dict[str, Any] = {"variables": [bias]} if is_listed else {"pattern": "bias"}
    optimizer = gpuopt.AdamWOptimizer(
        0.5, beta1=0.5, groups=[ParameterGroup(**where, weight_decay=0.25, beta1=0.75)]
    )

    def step() -> None:
        zeros = np.zeros(2, np.float32)
        optimizer.apply_gradients([(zeros, w.local), (zeros, bias.local)])

    strategy.run(step)
    assert [copy.numpy()[0] for copy in (*w.replicas, *bias.replicas)] == [0.5, 0.5, 0.75, 0.75]
    found = powers(optimizer)
    assert [value for name, value in found.items() if name.startswith("beta1")] == [0.25, 0.5625]


# ---- State


def adam(groups: Any, **more: Any) -> gpuopt.AdamOptimizer:
    return gpuopt.AdamOptimizer(0.1, groups=groups, **more)


def powers(optimizer: Any) -> dict[str, float]:
    return {name: float(value) for name, value in optimizer.state_dict()["non_slots"].items()}


@pytest.mark.contract
def test_a_state_names_groups_and_their_powers(tmp_path: Any) -> None:
    def program() -> tuple[list[Variable], Any]:
        variables = [Variable(np.ones(2, np.float32), name=name) for name in ("w", "bias")]
        own = {"beta1": 0.5, "epsilon": lambda: 0.1}
        return variables, adam([ParameterGroup("bias", **own)])

    variables, optimizer = program()
    pairs = [(np.ones(2, np.float32), each) for each in variables]
    for _ in range(3):
        optimizer.apply_gradients(pairs)
    state = optimizer.state_dict()
    assert state["hyperparameters"]["groups"] == {"bias": {"beta1": 0.5, "epsilon": None}}
    assert state["non_slots"].keys() == {"beta1_power", "beta2_power", "beta1_power/bias"}
    assert state["non_slots"]["beta1_power/bias"] == 0.5**4
    path = Saver().save(tmp_path / "checkpoint")
    optimizer.apply_gradients(pairs)
    expected = state_of(optimizer, variables), powers(optimizer)
    del variables, optimizer, pairs
    variables, optimizer = program()
    Saver().restore(path)
    optimizer.apply_gradients([(np.ones(2, np.float32), each) for each in variables])
    np.testing.assert_equal((state_of(optimizer, variables), powers(optimizer)), expected)


@pytest.mark.contract
@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("before", [[], ["a"], ["a", "b"]])
@pytest.mark.parametrize("after", [[], ["b"], ["b", "a"]])
def test_a_state_is_restored_where_the_grouping_has_changed(
    before: list[str], after: list[str], has_run: bool
) -> None:
    """Powers of groups that are new are as if the groups had always been; others go."""
    betas = {"a": {"beta1": 0.5, "beta2": 0.75}, "b": {"beta1": 0.625}}
    variables = [Variable(np.ones(3, np.float32), name=name) for name in ("a", "b", "c")]

    def step(optimizer: Any) -> None:
        optimizer.apply_gradients([(np.ones(3, np.float32), each) for each in variables])

    first = adam([ParameterGroup(name, **betas[name]) for name in before])
    for _ in range(5):
        step(first)
    second = adam([ParameterGroup(name, **betas[name]) for name in after])
    if has_run:
        step(second)
    second.load_state_dict(first.state_dict())
    for name in ("m", "v"):
        for each in variables:
            np.testing.assert_array_equal(
                second.get_slot(each, name).numpy(), first.get_slot(each, name).numpy()
            )
    step(second)
    expected = {"beta1_power": 0.9**7, "beta2_power": 0.999**7}
    for name in after:
        for beta, value in betas[name].items():
            expected[f"{beta}_power/{name}"] = value**7
    assert powers(second) == pytest.approx(expected, rel=1e-6)


@pytest.mark.internal
def test_a_step_that_is_interrupted_leaves_groups_their_powers() -> None:
    """A variable that is new has the optimizer look for the powers of all groups again."""
    gradient = np.ones(2, np.float32)
    for moment in range(1, 10_000, 1 if os.environ.get("GPUOPT_FULL") else 5):
        w, bias = (Variable(np.ones(2, np.float32), name=name) for name in ("w", "bias"))
        optimizer = adam([ParameterGroup("bias", beta1=0.5)])
        optimizer.apply_gradients([(gradient, w), (gradient, bias)])
        new = Variable(np.ones(2, np.float32), name="new")
        interrupts = InterruptAt(moment)
        try:
            with interrupts:
                optimizer.apply_gradients([(gradient, new)])
        except Interrupt:
            assert interrupts.left <= 0
        else:
            assert interrupts.left > 0, "the interrupt was lost"
            break
        optimizer.accept_unfinished_step()
        optimizer.apply_gradients([(gradient, w), (gradient, bias)])
    assert moment > 100


@pytest.mark.contract
def test_powers_that_no_run_makes_and_unknown_counts_are_refused() -> None:
    w = Variable(np.ones(3, np.float32), name="w")
    first = adam([ParameterGroup("w", beta1=0.5)])
    first.apply_gradients([(np.ones(3, np.float32), w)])
    state = first.state_dict()
    state["non_slots"]["beta1_power/w"] = np.array(1.5, np.float32)
    with pytest.raises(ValueError, match=r'"beta1_power/w" holds numbers from 0'):
        first.load_state_dict(state)
    state["non_slots"]["beta1_power/w"] = np.ones(2, np.float32) / 2
    with pytest.raises(ValueError, match=r'"beta1_power/w" has shape \(\)'):
        first.load_state_dict(state)
    state["non_slots"].pop("beta1_power/w")
    changing = adam([ParameterGroup("w", beta1=0.5)], beta1=lambda: 0.9, beta2=lambda: 0.999)
    changing.load_state_dict(state)
    with pytest.raises(ValueError, match="do not tell how many steps Adam has made"):
        changing.apply_gradients([(np.ones(3, np.float32), w)])
    state["non_slots"]["other/w"] = np.array(0.5, np.float32)
    with pytest.raises(ValueError, match='has a "other/w"'):
        first.load_state_dict(state)


# ---- Random programs


@pytest.mark.parametrize("seed", range(12))
def test_programs_do_what_an_optimizer_for_each_variable_does(seed: int) -> None:
    """Rates are set, variables come, and a restore moves them between groups.

    The model is the textbook's Momentum on each variable by itself, with numbers of the moment.
    """
    rng = np.random.default_rng([6, seed])
    names = [f"x{i}" for i in range(6)]
    variables: dict[str, Variable] = {}
    model: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def grouped() -> tuple[Any, dict[str, int]]:
        number_of = {name: int(rng.integers(3)) for name in names}
        groups = []
        for number in (1, 2):
            mine = [name for name in names if number_of[name] == number]
            pattern = "^(" + "|".join([*mine, f"none{number}"]) + ")$"
            if any(name in variables for name in mine):
                groups.append(ParameterGroup(pattern, learning_rate=float(number), momentum=0.5))
            else:
                number_of.update(dict.fromkeys(mine, 0))
        numbers = {number: i + 1 for i, number in enumerate(sorted({*number_of.values()} - {0}))}
        optimizer = gpuopt.MomentumOptimizer(0.5, 0.25, groups=groups)
        return optimizer, {name: numbers.get(number, 0) for name, number in number_of.items()}

    def add(name: str) -> None:
        start = rng.normal(size=int(rng.integers(1, 6)))
        variables[name] = Variable(start, name=name)
        model[name] = start.copy(), np.zeros_like(start)

    add("x0")
    optimizer, number_of = grouped()
    for _ in range(25):
        action = rng.choice(["step", "step", "set", "add", "restore"])
        if action == "add" and len(variables) < len(names):
            add(names[len(variables)])
        elif action == "set":
            every = [optimizer.hyperparameters, *optimizer.groups]
            chosen = every[int(rng.integers(len(every)))]
            name = str(rng.choice(["learning_rate", "momentum"]))
            value = np.float64(rng.uniform(0.1, 0.9))
            chosen[name] = value if rng.random() < 0.5 else lambda value=value: value
        elif action == "restore":
            state = optimizer.state_dict()
            optimizer, number_of = grouped()
            optimizer.load_state_dict(state)
        else:
            mine = [name for name in variables if rng.random() < 0.8] or ["x0"]
            pairs = []
            for name in mine:
                gradient = rng.normal(size=variables[name].shape)
                pairs.append((gradient, variables[name]))
                given = [optimizer.hyperparameters, *optimizer.groups][number_of[name]]
                rate, decay = (now(given[each]) for each in ("learning_rate", "momentum"))
                w, velocity = model[name]
                velocity = decay * velocity + gradient
                model[name] = w - rate * velocity, velocity
            optimizer.apply_gradients(pairs)
        for name, (w, _) in model.items():
            np.testing.assert_allclose(variables[name].numpy(), w, rtol=1e-9, atol=1e-9)


def now(value: Any) -> float:
    return float(value() if callable(value) else value)
