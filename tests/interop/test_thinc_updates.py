"""Updates of Thinc's parameters on each device, without Thinc."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from gpuopt.backends import to_device
from gpuopt.device import Device
from gpuopt.interop.thinc_updates import Formula, Parameter, Settings, Updates

pytestmark = pytest.mark.value

SHAPES = [(40, 30), (30,), (2, 3, 4), (1,), (7, 1), (5,), (3,)]
STEPS = 12


def numbers(formula: Formula, step: int, **others: Any) -> Settings:
    # Like spaCy's; of RAdam, several steps are rectified with this beta2.
    given = {
        "formula": formula,
        "learn_rate": 0.01,
        "beta1": 0.9,
        "beta2": 0.9,
        "eps": 1e-8,
        "l2": 0.1,
        "l2_is_weight_decay": True,
        "grad_clip": 1.0,
        "lr_scale": 1.0,
        "step": step,
    }
    return Settings(**{**given, **others})


def textbook(weights: np.ndarray, gradients: list[np.ndarray], at: list[Settings]) -> Any:
    """Returns weights and their average after some steps, in float64, as Thinc's code has it."""
    w = weights.astype(np.float64)
    m, v, average = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
    for g, s in zip(gradients, at, strict=True):
        g = g.astype(np.float64)
        if not s.l2_is_weight_decay:
            g = g + s.l2 * w
        norm = np.linalg.norm(g)
        if s.grad_clip and norm >= s.grad_clip:
            g = g * s.grad_clip / norm
        m = s.beta1 * m + (1 - s.beta1) * g
        v = s.beta2 * v + (1 - s.beta2) * g * g
        rate = s.learn_rate * s.lr_scale
        if s.formula == "SGD":
            w = w - rate * g
        elif s.formula == "Adam":
            rate = rate * np.sqrt(1 - s.beta2**s.step) / (1 - s.beta1**s.step)
            w = w - rate * m / (np.sqrt(v) + s.eps)
        else:
            t = s.step + 1
            long = 2 / (1 - s.beta2) - 1
            n = long - 2 * t * s.beta2**t / (1 - s.beta2**t)
            step = s.learn_rate / (1 - s.beta1**t)
            if n >= 5:
                r = (1 - s.beta2**t) * (n - 4) / (long - 4) * (n - 2) / n * long / (long - 2)
                w = w - step * np.sqrt(r) * m / (np.sqrt(v) + s.eps)
            else:
                w = w - step * m
        if s.l2_is_weight_decay:
            w = w - rate_of_decay(s) * w
        decay = min((1 + s.step) / (10 + s.step), 0.9999)
        average = average - (1 - decay) * (average - w)
    return w, average


def rate_of_decay(s: Settings) -> float:
    return s.learn_rate * s.lr_scale * s.l2


def run(formula: Formula, device: Device, others: list[dict[str, Any]]) -> None:
    """Makes steps on a device, and compares with the textbook.

    Args:
        formula: Of all parameters.
        device: Theirs.
        others: Settings of each parameter: a list as long as `SHAPES`.
    """
    rng = np.random.default_rng(3)
    start = [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    stream = [
        [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES] for _ in range(STEPS)
    ]

    def on_device(array: Any) -> Any:
        return to_device(np.array(array), device)

    parameters = []
    for number, weights in enumerate(start):
        moments = () if formula == "SGD" else [on_device(np.zeros_like(weights.ravel()))] * 1
        if formula != "SGD":
            moments = tuple(on_device(np.zeros_like(weights.ravel())) for _ in range(2))
        average = on_device(np.zeros_like(weights))
        parameters.append(Parameter((number, "W"), on_device(weights), tuple(moments), average))
    gradients = [on_device(each) for each in stream[0]]
    updates = Updates()
    settings = [[numbers(formula, step, **mine) for mine in others] for step in range(1, STEPS + 1)]
    for step, new in enumerate(stream):
        if step == STEPS // 2:  # others from now on
            gradients = [on_device(each) for each in new]
        for gradient, values in zip(gradients, new, strict=True):
            gradient[...] = on_device(values)
        updates.apply(parameters, gradients, settings[step])
        assert not any(to_device(gradient, Device.cpu).any() for gradient in gradients)
    for number, parameter in enumerate(parameters):
        of_parameter = [each[number] for each in settings]
        expected = textbook(start[number], [each[number] for each in stream], of_parameter)
        for found, wanted in zip((parameter.weights, parameter.average), expected, strict=True):
            array = to_device(found, Device.cpu)
            np.testing.assert_allclose(array, wanted, rtol=1e-5, atol=2e-6)


SAME: list[dict[str, Any]] = [{}] * len(SHAPES)
DIFFERENT: list[dict[str, Any]] = [
    {},
    {"grad_clip": 0.0},
    {"l2": 0.0, "learn_rate": 0.1},
    {"l2_is_weight_decay": False},
    {"lr_scale": 0.5},
    {"beta1": 0.5},
    {"grad_clip": 1e-3},
]
CASES = pytest.mark.parametrize("others", [SAME, DIFFERENT], ids=["same", "different"])
FORMULAS = pytest.mark.parametrize("formula", ["Adam", "RAdam", "SGD"])


@FORMULAS
@CASES
def test_steps_are_thincs_in_host_memory(
    formula: Formula, others: list[dict[str, Any]], every_cpu_form: str
) -> None:
    from gpuopt.interop import thinc_updates

    thinc_updates._host.cache_clear()
    try:
        run(formula, Device.cpu, others)
    finally:
        thinc_updates._host.cache_clear()


@pytest.mark.emulator
@FORMULAS
@CASES
def test_steps_are_thincs_on_emulated_gpus(
    formula: Formula, others: list[dict[str, Any]], emulated_gpus: Any
) -> None:
    run(formula, Device("gpu", 0), others)


@pytest.mark.gpu
@FORMULAS
@CASES
def test_steps_are_thincs_on_a_gpu(
    formula: Formula, others: list[dict[str, Any]], every_schedule: str
) -> None:
    run(formula, Device("gpu", 0), others)


def test_views_of_the_same_memory_are_recognised() -> None:
    from gpuopt.interop.thinc_updates import is_same_memory

    array = np.zeros((4, 6), np.float32)
    assert is_same_memory(array, array[:])
    for other in (array.copy(), array[1:], array.T, array.view(np.int32), array[:, ::2]):
        assert not is_same_memory(array, other)


def test_a_copy_has_no_plans() -> None:
    updates = Updates()
    array = np.ones(3, np.float32)
    updates.apply([Parameter((0, "W"), array, (), None)], [array.copy()], [numbers("SGD", 1)])
    assert vars(copy.deepcopy(updates)) == vars(Updates())
