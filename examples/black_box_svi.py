"""A normal distribution that is close to any other, after autograd's black_box_svi.

Only the other's log density is known: here of a funnel, which gets narrower to one side.
"""

# Needs SciPy, for autograd.scipy: pip install scipy

from collections.abc import Callable
from typing import Any

import autograd.numpy as np
from autograd.scipy.stats import norm

import gpuopt

SAMPLES = 200


def log_funnel(points):
    """Returns the log density, less a constant, of points [number, 2]."""
    position, log_width = points[:, 0], points[:, 1]
    return norm.logpdf(log_width, 0, 1.35) + norm.logpdf(position, 0, np.exp(log_width))


def negative_bound(
    log_density: Callable[[Any], Any], mean: Any, log_std: Any, rng: np.random.Generator
) -> Any:
    """Returns an estimate of the negative evidence lower bound, of samples that depend on both."""
    noise = rng.standard_normal((SAMPLES, len(mean)))
    entropy = 0.5 * len(mean) * (1.0 + np.log(2 * np.pi)) + np.sum(log_std)
    return -(entropy + np.mean(log_density(noise * np.exp(log_std) + mean)))


def main(steps: int = 300) -> tuple[float, float]:
    """Fits, and returns the estimate before and after, of the same samples."""
    rng = np.random.default_rng(0)
    mean = gpuopt.Variable(np.array([-1.0, -1.0]))
    log_std = gpuopt.Variable(np.array([-5.0, -5.0]))

    def loss(generator=rng):
        return negative_bound(log_funnel, mean, log_std, generator)

    def estimate():
        return float(loss(np.random.default_rng(1)))

    optimizer = gpuopt.AdamOptimizer(0.1)
    before = estimate()
    for _ in range(steps):
        optimizer.minimize(loss)
    return before, estimate()


if __name__ == "__main__":
    print("negative bound before and after: {:.2f} {:.2f}".format(*main()))
