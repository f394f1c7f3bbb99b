"""Layers that are objects, with batch normalization: each parameter has a value and a gradient."""

from __future__ import annotations

import numpy as np

import gpuopt

try:
    import cupy

    xp = cupy if cupy.is_available() else np
except ImportError:
    xp = np

EPSILON = 1e-5


class Parameter:
    """A value, and its gradient once there is one."""

    def __init__(self, data):
        self.data = xp.asarray(data, xp.float32)
        self.grad = None


class Linear:
    """x @ W + b."""

    def __init__(self, rng, inputs, outputs):
        self.W = Parameter(rng.standard_normal((inputs, outputs)) * np.sqrt(2 / inputs))
        self.b = Parameter(np.zeros(outputs))

    def forward(self, x):
        self.x = x
        return x @ self.W.data + self.b.data

    def backward(self, gradient):
        self.W.grad = self.x.T @ gradient
        self.b.grad = gradient.sum(axis=0)
        return gradient @ self.W.data.T


class BatchNorm:
    """Gives each unit a mean of 0 and a variance of 1 in a batch, then scales and shifts it."""

    def __init__(self, units):
        self.scale, self.shift = Parameter(np.ones(units)), Parameter(np.zeros(units))

    def forward(self, x):
        self.deviation = xp.sqrt(x.var(axis=0) + EPSILON)
        self.normal = (x - x.mean(axis=0)) / self.deviation
        return self.scale.data * self.normal + self.shift.data

    def backward(self, gradient):
        self.scale.grad = (gradient * self.normal).sum(axis=0)
        self.shift.grad = gradient.sum(axis=0)
        # Through the mean and the variance: they do not change by a shift or a scaling of x.
        of_normal = gradient * self.scale.data
        along = (of_normal * self.normal).mean(axis=0)
        return (of_normal - of_normal.mean(axis=0) - self.normal * along) / self.deviation


class ReLU:
    """Leaves out what is below 0."""

    def forward(self, x):
        self.is_on = x > 0
        return x * self.is_on

    def backward(self, gradient):
        return gradient * self.is_on


class Model:
    """Layers, one after the other."""

    def __init__(self, *layers):
        self.layers = layers

    def params(self):
        for layer in self.layers:
            yield from (each for each in vars(layer).values() if isinstance(each, Parameter))

    def forward(self, x):
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def backward(self, gradient):
        for layer in reversed(self.layers):
            gradient = layer.backward(gradient)


def cross_entropy(scores, labels):
    """Returns the mean cross entropy, and its derivative by the scores."""
    shifted = scores - scores.max(axis=1, keepdims=True)
    logs = shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))
    one_hot = xp.eye(scores.shape[1], dtype=xp.float32)[labels]
    loss = -(logs * one_hot).sum(axis=1).mean()
    return loss, (xp.exp(logs) - one_hot) / np.float32(len(labels))


def spirals(rng, points=200, arms=3):
    """Returns points on the arms of a spiral, and the number of the arm of each."""
    labels = np.repeat(np.arange(arms), points)
    radius = np.tile(np.linspace(0.05, 1, points), arms)
    angle = 4 * radius + 2 * np.pi * labels / arms + 0.15 * rng.standard_normal(len(labels))
    places = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return xp.asarray(places, xp.float32), xp.asarray(labels)


def main(steps: int = 150) -> tuple[float, float]:
    """Trains on all points in each step, and returns the first loss and the last one."""
    rng = np.random.default_rng(0)
    places, labels = spirals(rng)
    model = Model(
        Linear(rng, 2, 32), BatchNorm(32), ReLU(),
        Linear(rng, 32, 32), BatchNorm(32), ReLU(),
        Linear(rng, 32, 3),
    )  # fmt: skip
    optimizer = gpuopt.MomentumOptimizer(learning_rate=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        scores = model.forward(places)
        loss, gradient = cross_entropy(scores, labels)
        model.backward(gradient)
        params = list(model.params())
        optimizer.update([each.data for each in params], [each.grad for each in params])
        losses.append(loss)
        if step % 25 == 0:
            print(f"step {step}: loss {float(loss):.3f}")

    right = scores.argmax(axis=1) == labels
    print(f"loss {float(losses[-1]):.3f}; {float(right.mean()):.1%} of the points are right")
    return float(losses[0]), float(losses[-1])


if __name__ == "__main__":
    main()
