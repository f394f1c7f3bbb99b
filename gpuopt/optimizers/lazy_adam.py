"""Adam that leaves rows without a gradient alone."""

from __future__ import annotations

from gpuopt.optimizers.adam import AdamOptimizer


class LazyAdamOptimizer(AdamOptimizer):
    """Adam whose sparse step updates the rows of the gradient and no others.

        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g^2 - v)
        w -= learning_rate * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon)

    The dense step is Adam's. A sparse step costs what its rows cost, however tall the table; the
    step size still follows the number of all steps. It is TensorFlow's
    `contrib.opt.LazyAdamOptimizer`, and takes `AdamOptimizer`'s arguments; `catch_up` is refused,
    as other rows have nothing to catch up with.
    """

    rule_of_other_rows = None
