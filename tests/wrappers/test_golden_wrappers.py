"""The wrappers do what TensorFlow's contrib did: every case of contrib_wrappers.json, counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_cases import error, read_json
from safetensors.numpy import load_file

import gpuopt
from gpuopt import IndexedSlices, Variable

FLOAT32_TOLERANCE = 3e-6

CASES = read_json("contrib_wrappers.json")
AVERAGES = [key for key in CASES if key.startswith("moving_average_")]
CLIPPING = [key for key in CASES if key.startswith("variable_clipping_")]
WORKERS = ["elastic_average_1worker", "model_average_1worker", "agn_1worker_adam"]
SCALED = "loss_scale_exponential"


def test_every_case_is_replayed_here_or_belongs_to_another_wrapper() -> None:
    assert sorted([*AVERAGES, *CLIPPING, *WORKERS, SCALED]) == sorted(CASES)
    assert (len(AVERAGES), len(CLIPPING)) == (2, 5)


@pytest.mark.parametrize("key", AVERAGES)
def test_averages_and_the_swapping_savers_file_are_tensorflows(key: str, tmp_path: Path) -> None:
    case = CASES[key]
    assert case["note"] == "SGD(2.0), decay .5, grad [.1,.2], v0=[10,20]"
    v = Variable([10.0, 20.0], name="v")
    optimizer = gpuopt.MovingAverageOptimizer(
        gpuopt.GradientDescentOptimizer(2.0),
        average_decay=0.5,
        sequential_update=key.endswith("True"),
    )
    for expected in case["steps"]:
        optimizer.apply_gradients([(np.float32([0.1, 0.2]), v)])
        assert error(v.numpy(), expected["v"]) <= FLOAT32_TOLERANCE
        average = optimizer.averages.average(v)
        assert average is not None
        assert error(average.numpy(), expected["avg"]) <= FLOAT32_TOLERANCE
    saved = load_file(optimizer.swapping_saver().save(tmp_path / "model"))
    assert set(saved) == set(case["swapping_saver_checkpoint"])
    for name, values in case["swapping_saver_checkpoint"].items():
        assert error(saved[name], values) <= FLOAT32_TOLERANCE, name


@pytest.mark.parametrize("key", CLIPPING)
def test_clipped_variables_are_tensorflows(key: str) -> None:
    case = CASES[key]
    dims = {"dim0": [0], "dim1": [1], "all": [0, 1]}[key.rpartition("_")[2]]
    assert case["note"].startswith(f"SGD(3.0), max_norm 2, clip dims {dims}, v0=[[0,1],[2,3]")
    v = Variable([[0.0, 1.0], [2.0, 3.0], [-1.0, 2.0]], name="v")
    gradient: Any = np.float32([[0.1, 0.1], [-0.4, 0.2], [0.3, -0.5]])
    if "sparse" in key:
        gradient = IndexedSlices(gradient[:2], np.array([0, 2]))
    optimizer = gpuopt.VariableClippingOptimizer(
        gpuopt.GradientDescentOptimizer(3.0), {v: dims}, max_norm=2.0
    )
    assert len(case["v"]) == 3
    for expected in case["v"]:
        optimizer.apply_gradients([(gradient, v)])
        assert error(v.numpy(), np.reshape(expected, (3, 2))) <= FLOAT32_TOLERANCE


def test_an_elastic_average_is_tensorflows_bit_by_bit() -> None:
    case = CASES["elastic_average_1worker"]
    assert case["note"] == "SGD(1.0), period 3, moving_rate .25, grads v0:[-1,-1] v1:[-2]"
    getter = gpuopt.ElasticAverageCustomGetter()
    v0, v1 = getter.variable([0.0, 3.0], name="v0"), getter.variable([1.0], name="v1")
    step = Variable(0, name="gs", trainable=False)
    optimizer = gpuopt.ElasticAverageOptimizer(
        gpuopt.GradientDescentOptimizer(1.0), 1, getter, 3, moving_rate=0.25
    )
    named = {variable.name: variable for variable in gpuopt.global_variables()}
    assert set(named) == {*case["global_vars"], *case["local_vars"]}
    keys = {
        "g0": "global_center_variable/v0",
        "g1": "global_center_variable/v1",
        "c0": "local_center_variable/v0",
        "ls": "local_step",
    }
    for expected in case["steps"]:
        optimizer.apply_gradients([(-np.ones(2, np.float32), v0), (np.float32([-2]), v1)], step)
        for key, value in expected.items():
            assert named[keys.get(key, key)].numpy().tolist() == value, key


def test_a_model_average_is_tensorflows_bit_by_bit() -> None:
    case = CASES["model_average_1worker"]
    assert case["note"] == "SGD(1.0), interval 2, grad [-1,-1]"
    getter = gpuopt.ModelAverageCustomGetter()
    v0 = getter.variable([0.0, 3.0], name="v0")
    step = Variable(0, name="gs", trainable=False)
    optimizer = gpuopt.ModelAverageOptimizer(
        gpuopt.GradientDescentOptimizer(1.0), 1, True, getter, interval_steps=2
    )
    for expected in case["steps"]:
        optimizer.apply_gradients([(-np.ones(2, np.float32), v0)], step)
        got = {"v0": v0.numpy().tolist(), "g0": getter.center(v0).numpy().tolist(), "gs": int(step)}
        assert got == expected


def test_accumulated_gradients_move_the_center_as_tensorflows_do() -> None:
    case = CASES["agn_1worker_adam"]
    assert case["note"] == "Adam(.2), period 2"
    getter = gpuopt.AGNCustomGetter()
    v0 = getter.variable([0.0, 3.0], name="v0")
    step = Variable(0, name="gs", trainable=False)
    optimizer = gpuopt.AGNOptimizer(gpuopt.AdamOptimizer(0.2), 1, getter, communication_period=2)
    [total] = [v for v in gpuopt.global_variables() if v.name == "grad_variable/v0"]
    for expected in case["steps"]:
        optimizer.apply_gradients([(np.float32(expected["g"]), v0)], step)
        assert error(v0.numpy(), expected["v0"]) <= FLOAT32_TOLERANCE
        assert error(getter.center(v0).numpy(), expected["global0"]) <= FLOAT32_TOLERANCE
        assert total.numpy().tolist() == expected["acc0"]
        assert int(step) == expected["gs"]


@pytest.mark.parametrize("by", ["minimize", "apply_gradients", "state_dict"])
def test_a_loss_scale_is_tensorflows_bit_by_bit(by: str) -> None:
    case = CASES[SCALED]
    assert case["note"] == (
        "SGD(0.1), v0=[1,2], loss=sum(v*g); manager(init 8, incr_every 2, decr_every 2, incr 2.0, "
        "decr 0.5)"
    )
    v = Variable([1.0, 2.0], name="v")
    step = Variable(0, name="gs", trainable=False)

    def make() -> gpuopt.LossScaleOptimizer:
        manager = gpuopt.ExponentialUpdateLossScaleManager(8, 2, 2, 2.0, 0.5)
        return gpuopt.LossScaleOptimizer(gpuopt.GradientDescentOptimizer(0.1), manager)

    optimizer = make()
    for expected in case["steps"]:
        gradient = np.float32([float(number) for number in expected["grad"]])
        if by == "minimize":
            optimizer.minimize(lambda: np.sum(v.value() * gradient), step, [v])  # noqa: B023
        else:
            optimizer.apply_gradients([(gradient, v)], step)
        if by == "state_dict":  # as if each step were in a new process
            state, optimizer = optimizer.state_dict(), make()
            optimizer.load_state_dict(state)
        counts = optimizer.manager.variables
        got = {
            "v": v.numpy().tolist(),
            "scale": optimizer.loss_scale,
            "good": int(counts["good_steps"]),
            "bad": int(counts["bad_steps"]),
            "global_step": int(step),
        }
        assert got == {name: expected[name] for name in got}
    assert (optimizer.num_skipped, optimizer.skipped_in_a_row) == (15, 0)
