"""Optimizers that keep all digits of a Python float, as those of torch and optax do."""

from __future__ import annotations

import numpy as np

from gpuopt.optimizers.base.rule_optimizer import RuleOptimizer


class AllDigitsOptimizer(RuleOptimizer):
    """Base of the optimizers that TensorFlow 1 does not have, in the forms of torch and others.

    As those do in float64, they keep all digits of a Python float, which TensorFlow's optimizers
    round to float32. So they agree with them to the last digits, and a test can tell an epsilon in
    one place from an epsilon in another. A step's scalars are computed in float64, and rounded to
    the type that the rule computes in.
    """

    _keeps_all_digits = True

    def _given(self, *names: str) -> list[np.float64]:
        """Returns hyperparameters of this step."""
        return [np.float64(self._hyper(name)) for name in names]
