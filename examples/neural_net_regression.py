"""A curve through noisy points, by a network with a prior: autograd's neural_net_regression."""

# Needs SciPy, for autograd.scipy: pip install scipy

from itertools import pairwise

import autograd.numpy as np
from autograd.misc.flatten import flatten
from autograd.scipy.stats import norm

import gpuopt


def main(steps: int = 300) -> tuple[float, float]:
    """Fits, and returns the mean squared distance to the curve before and after."""
    rng = np.random.default_rng(0)
    inputs = np.concatenate([np.linspace(0, 3, 40), np.linspace(6, 8, 40)])[:, np.newaxis]
    inputs = (inputs - 4) / 2
    curve = np.cos(2 * inputs)
    targets = curve + 0.1 * rng.standard_normal(inputs.shape)
    sizes = [1, 12, 12, 1]
    layers = [
        {
            "weights": gpuopt.Variable(0.5 * rng.standard_normal((m, n))),
            "biases": gpuopt.Variable(0.5 * rng.standard_normal(n)),
        }
        for m, n in pairwise(sizes)
    ]

    def predictions():
        hidden = inputs
        for layer in layers:
            outputs = np.dot(hidden, layer["weights"]) + layer["biases"]
            hidden = np.tanh(outputs)
        return outputs

    def loss():
        flat, _ = flatten(layers)
        log_prior = np.sum(norm.logpdf(flat, 0.0, 2.0))
        log_likelihood = np.sum(norm.logpdf(predictions(), targets, 0.1))
        return -(log_prior + log_likelihood)

    def distance():
        return float(np.mean((predictions() - curve) ** 2))

    optimizer = gpuopt.AdamOptimizer(0.02)
    before = distance()
    for _ in range(steps):
        optimizer.minimize(loss)
    return before, distance()


if __name__ == "__main__":
    print("squared distance before and after: {:.4f} {:.4f}".format(*main()))
