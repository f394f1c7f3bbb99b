"""A network whose weights are a distribution, after autograd's example bayesian_neural_net."""

# Needs SciPy, for autograd.scipy: pip install scipy

from itertools import pairwise

import autograd.numpy as np
from autograd.scipy.stats import norm
from black_box_svi import negative_bound

import gpuopt

SIZES = [1, 8, 8, 1]


def predictions(weights, inputs):
    """Returns outputs [number of samples, number of inputs, 1].

    Args:
        weights: [number of samples, number of weights].
        inputs: [number of inputs, 1].
    """
    hidden, begin = inputs[np.newaxis], 0
    for m, n in pairwise(SIZES):
        middle, end = begin + m * n, begin + m * n + n
        matrices = weights[:, begin:middle].reshape((-1, m, n))
        outputs = np.matmul(hidden, matrices) + weights[:, np.newaxis, middle:end]
        hidden, begin = np.sin(outputs), end
    return outputs


def main(steps: int = 300) -> tuple[float, float]:
    """Fits a curve, and returns the negative bound's estimate before and after."""
    rng = np.random.default_rng(0)
    inputs = (np.concatenate([np.linspace(0, 2, 20), np.linspace(6, 8, 20)])[:, None] - 4) / 4
    targets = np.cos(4 * inputs) + 0.1 * rng.standard_normal(inputs.shape)
    num_weights = sum(m * n + n for m, n in pairwise(SIZES))

    def log_density(weights):
        log_prior = np.sum(norm.logpdf(weights, 0.0, 1.0), axis=1)
        log_likelihood = norm.logpdf(predictions(weights, inputs), targets, 0.3)
        return log_prior + np.sum(log_likelihood, axis=(1, 2))

    mean = gpuopt.Variable(rng.standard_normal(num_weights))
    log_std = gpuopt.Variable(np.full(num_weights, -5.0))

    def loss(generator=rng):
        return negative_bound(log_density, mean, log_std, generator)

    def estimate():
        return float(loss(np.random.default_rng(1)))

    optimizer = gpuopt.AdamOptimizer(0.05)
    before = estimate()
    for _ in range(steps):
        optimizer.minimize(loss)
    return before, estimate()


if __name__ == "__main__":
    print("negative bound before and after: {:.2f} {:.2f}".format(*main()))
