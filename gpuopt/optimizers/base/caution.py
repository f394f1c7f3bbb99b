"""Caution (Liang et al. 2024) as an option of optimizers."""

from __future__ import annotations

from gpuopt.optimizers.base.arguments import Common
from gpuopt.optimizers.base.declared import Hyperparameter
from gpuopt.optimizers.base.step_counting import StepCountingOptimizer
from gpuopt.rules.cautious import cautious as cautious_rule
from gpuopt.variables.scalars import check_bool

CAUTIOUS = (
    "Whether elements move against their gradient alone, as in `TorchAdamWOptimizer`; a sparse "
    "gradient then makes the step of a dense one."
)


class CautiousOption(StepCountingOptimizer):
    """Base of optimizers that may leave out what goes along with the gradient.

    Their steps depend on gradients alone. Slots are as without caution. Decay of the weights is not
    masked. Rows that a sparse gradient does not name stay, without decay, but their slots decay.
    """

    def __init__(
        self, cautious: bool, common: Common, /, **hyperparameters: Hyperparameter
    ) -> None:
        check_bool(cautious, "cautious")
        super().__init__(common, **hyperparameters)
        self.cautious = cautious
        if cautious:
            self.rule = cautious_rule(self.rule)
