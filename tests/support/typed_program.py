"""A program as a user writes it.

mypy and basedpyright, in strict mode, must find its types, and find it right, but for the lines of
`mistakes`, which both must find wrong: each has an ignored error, and one without use is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

import numpy as np

import gpuopt


def rate() -> float:
    return 0.1


def train(optimizer: gpuopt.Optimizer, steps: int) -> float:
    w = gpuopt.Variable(np.ones((3, 2), np.float32), name="w")
    table = gpuopt.Variable(np.zeros((10, 4), np.float32), trainable=False)
    step = gpuopt.Variable(0, trainable=False)

    def loss() -> Any:
        return ((w - 1.5) ** 2).sum()

    with optimizer.report() as report:
        for _ in range(steps):
            optimizer.minimize(loss, global_step=step)
    assert_type(report.launches[0].total_ms, float)
    value, pairs = gpuopt.value_and_gradients(loss, [w])
    optimizer.apply_gradients(pairs, global_step=step)
    rows = gpuopt.IndexedSlices(np.ones((2, 4), np.float32), [1, 3], table.shape)
    decayed = gpuopt.exponential_decay(0.1, step, decay_steps=10, decay_rate=0.5)
    gpuopt.GradientDescentOptimizer(decayed).apply_gradients([(rows, table)])
    assert_type(step.numpy(), np.ndarray[Any, Any])
    assert_type(optimizer.get_slot(w, "m"), gpuopt.Variable | None)
    assert_type(optimizer.state_dict()["name"], str)
    w += 1
    assert_type(w, gpuopt.Variable)
    return float(value)


def main() -> float:
    group = gpuopt.ParameterGroup("bias", weight_decay=0.0)
    optimizer = gpuopt.TorchAdamWOptimizer(rate, groups=[group], clip_norm=1.0, name="mine")
    optimizer.hyperparameters["learning_rate"] = 0.05
    optimizer.hyperparameters["learning_rate"] *= 0.5
    optimizer.hyperparameters["weight_decay"] = np.float32(0.01)
    assert_type(gpuopt.Adam(np.float64(0.1), beta1=rate), gpuopt.AdamOptimizer)
    assert_type(
        gpuopt.MultitaskOptimizerWrapper(optimizer), gpuopt.contrib.MultitaskOptimizerWrapper
    )
    wrapped = gpuopt.GradientAccumulationOptimizer(gpuopt.AdamOptimizer(0.01), 2)
    assert_type(repr(optimizer), str)
    variable = gpuopt.Variable(1.0)
    assert_type(optimizer.get_slot(variable, "m"), gpuopt.Variable | None)
    return train(gpuopt.MomentumOptimizer(rate, 0.9, use_nesterov=True), 3) + train(wrapped, 4)


if TYPE_CHECKING:

    def mistakes(optimizer: gpuopt.AdamOptimizer) -> None:
        gpuopt.AdamOptimizer("0.1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        gpuopt.ParameterGroup("bias", lr=0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        optimizer.hyperparameters["lr"]  # type: ignore[index]  # pyright: ignore[reportArgumentType]
        optimizer.hyperparameters["lr"] = 0.1  # type: ignore[index]  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    print(main())
