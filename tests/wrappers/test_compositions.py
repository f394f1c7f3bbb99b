"""Wrappers in wrappers do what a naive model does, over random programs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gpu_streams import new_stream
from wrapper_programs import Program

import gpuopt
from gpuopt import IndexedSlices, Variable


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.one_in(3, seed=type)
def test_random_programs_on_the_host(seed: int, tmp_path: Path) -> None:
    Program(seed, tmp_path).run(25)


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@pytest.mark.parametrize("seed", range(100, 112))
@pytest.mark.parametrize("places", ["gpu:0", "mixed"])
@pytest.mark.one_in(3, seed=type)
def test_random_programs_on_emulated_gpus(places: str, seed: int, tmp_path: Path) -> None:
    Program(seed, tmp_path, places).run(15)


@pytest.mark.gpu
@pytest.mark.usefixtures("every_schedule")
@pytest.mark.parametrize("seed", range(200, 204))
@pytest.mark.parametrize("places", ["gpu:0", "mixed"])
def test_random_programs_on_streams(places: str, seed: int, tmp_path: Path) -> None:
    Program(seed, tmp_path, places, [new_stream() for _ in range(3)]).run(12)


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@pytest.mark.parametrize("device", ["cpu", "gpu:0"])
def test_variables_may_be_scalars_or_empty(device: str) -> None:
    shapes = [(), (0,), (0, 3), (3, 0), (1, 1), (2, 3, 4)]
    variables = [Variable(np.full(s, 4, np.float32), device=device) for s in shapes]
    dims = {variable: list(range(variable.ndim)) for variable in variables}
    clipping = gpuopt.VariableClippingOptimizer(gpuopt.AdamOptimizer(0.1), dims, max_norm=1.0)
    optimizer = gpuopt.MovingAverageOptimizer(gpuopt.MultitaskOptimizerWrapper(clipping), 0.0)
    for number in (1, 0):
        gradients = [np.full(shape, number, np.float32) for shape in shapes]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    no_rows = IndexedSlices(np.zeros((0, 3), np.float32), [])
    no_columns = IndexedSlices(np.zeros((2, 0), np.float32), np.array([0, 2]))
    optimizer.apply_gradients([(no_rows, variables[2]), (no_columns, variables[3])])
    for variable in variables:
        assert np.linalg.norm(variable.numpy().ravel()) <= 1 + 1e-6
        np.testing.assert_array_equal(
            optimizer.averages.average(variable).numpy(), variable.numpy()
        )


def test_hyperparameters_are_set_through_wrappers() -> None:
    groups = [gpuopt.ParameterGroup("w", learning_rate=0.5)]
    inner = gpuopt.GradientDescentOptimizer(0.1, groups=groups)
    optimizer = gpuopt.SyncReplicasOptimizer(
        gpuopt.MovingAverageOptimizer(gpuopt.MultitaskOptimizerWrapper(inner)), 1, 1
    )
    assert optimizer.hyperparameters is inner.hyperparameters
    optimizer.groups[0]["learning_rate"] = 0.25
    assert inner.groups[0]["learning_rate"] == 0.25
    by_hooks = gpuopt.Optimizer(False, "ByHooks")
    with pytest.raises(AttributeError, match="hyperparameters"):
        _ = gpuopt.MultitaskOptimizerWrapper(by_hooks).hyperparameters


def test_norms_are_read_through_wrappers() -> None:
    groups = [gpuopt.ParameterGroup("b", clip_norm=1.0)]
    inner = gpuopt.GradientDescentOptimizer(0.1, clip_norm=1.0, groups=groups)
    optimizer = gpuopt.GradientAccumulationOptimizer(
        gpuopt.LossScaleOptimizer(inner, gpuopt.FixedLossScaleManager(8)), 2
    )
    assert optimizer.global_norm is None
    a, b = (gpuopt.Variable(np.zeros(2, np.float32), name=name) for name in "ab")
    for scale in (1, 3):
        gradients = np.float32([3, 4]) * scale, np.float32([6, 8]) * scale
        optimizer.apply_gradients(zip(gradients, (a, b), strict=True))
    assert optimizer.global_norm == 10
    assert optimizer.group_norms == {"b": 20}


def test_raw_arrays_keep_their_averages_from_view_to_view() -> None:
    flat = np.zeros(100, np.float32)
    optimizer = gpuopt.MovingAverageOptimizer(
        gpuopt.MultitaskOptimizerWrapper(gpuopt.MomentumOptimizer(1.0, 0.5)), 0.5
    )
    for gradient in (-1, 0, -1, 0):
        dense, every_second = flat[:60].reshape(6, 10), flat[60::2]
        optimizer.apply_gradients(
            [
                (np.full((6, 10), gradient, np.float32), dense),
                (-np.ones(20, np.float32), every_second),
            ]
        )
    # 1, 1, 2.5, 2.5; and the average 0.5, 0.75, 1.625, 2.0625
    np.testing.assert_array_equal(flat[:60], 2.5)
    average = optimizer.averages.average(flat[:60].reshape(6, 10))
    np.testing.assert_array_equal(average.numpy(), 2.0625)
    assert not flat[61::2].any()
    assert len(optimizer.averages.averages_of_variables()) == 2
