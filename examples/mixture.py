"""A mixture of normal distributions by gradient descent, after autograd's gmm."""

# Needs SciPy, for autograd.scipy: pip install scipy

import autograd.numpy as np
from autograd.scipy.special import logsumexp
from autograd.scipy.stats import multivariate_normal

import gpuopt

COMPONENTS, DIMENSIONS = 5, 2


def pinwheel(rng: np.random.Generator, number: int) -> np.ndarray:
    """Returns points in arms around the origin."""
    arms = np.repeat(np.arange(COMPONENTS), number // COMPONENTS)
    points = rng.standard_normal((len(arms), 2)) * [0.3, 0.05] + [1.0, 0.0]
    angles = 2 * np.pi * arms / COMPONENTS + 0.25 * np.exp(points[:, 0])
    x, y = points.T
    return np.stack(
        [x * np.cos(angles) - y * np.sin(angles), x * np.sin(angles) + y * np.cos(angles)], axis=1
    )


def main(steps: int = 150) -> tuple[float, float]:
    """Fits, and returns a point's negative log-likelihood before and after."""
    rng = np.random.default_rng(0)
    points = pinwheel(rng, 200)
    log_shares = gpuopt.Variable(0.1 * rng.standard_normal(COMPONENTS))
    means = gpuopt.Variable(0.5 * rng.standard_normal((COMPONENTS, DIMENSIONS)))
    roots = gpuopt.Variable(0.5 * np.stack([np.eye(DIMENSIONS)] * COMPONENTS))

    def loss():
        logs = log_shares - logsumexp(log_shares)
        of_components = [
            logs[k] + multivariate_normal.logpdf(points, means[k], np.dot(roots[k].T, roots[k]))
            for k in range(COMPONENTS)
        ]
        return -np.mean(logsumexp(np.stack(of_components), axis=0))

    optimizer = gpuopt.AdamOptimizer(0.05)
    before = float(loss())
    for _ in range(steps):
        optimizer.minimize(loss)
    return before, float(loss())


if __name__ == "__main__":
    print("negative log-likelihood before and after: {:.3f} {:.3f}".format(*main()))
