"""The same as black_box_svi.py along the natural gradient, after autograd's natural_gradient.

The gradient is divided by the Fisher information of the normal distribution, which is diagonal in
its mean and the logarithm of its width: 1 / std^2, and 2.
"""

import autograd.numpy as np
from black_box_svi import log_funnel, negative_bound

import gpuopt


class NaturalGradientDescent(gpuopt.GradientDescentOptimizer):
    """Gradient descent of the mean and the width of a normal distribution."""

    def __init__(self, learning_rate, mean, log_std):
        super().__init__(learning_rate, name="NaturalGradientDescent")
        self._mean, self._log_std = mean, log_std

    def compute_gradients(self, loss, *arguments, **options):
        variance = np.exp(2 * self._log_std.numpy())
        information = {self._mean: 1 / variance, self._log_std: 2.0}
        pairs = super().compute_gradients(loss, *arguments, **options)
        return [(gradient / information[variable], variable) for gradient, variable in pairs]


def main(steps: int = 300) -> tuple[float, float]:
    """Fits, and returns the negative bound's estimate before and after, of the same samples."""
    rng = np.random.default_rng(0)
    mean = gpuopt.Variable(np.array([-1.0, -1.0]))
    log_std = gpuopt.Variable(np.array([-5.0, -5.0]))

    def loss(generator=rng):
        return negative_bound(log_funnel, mean, log_std, generator)

    def estimate():
        return float(loss(np.random.default_rng(1)))

    optimizer = NaturalGradientDescent(0.1, mean, log_std)
    before = estimate()
    for _ in range(steps):
        optimizer.minimize(loss)
    return before, estimate()


if __name__ == "__main__":
    print("negative bound before and after: {:.2f} {:.2f}".format(*main()))
