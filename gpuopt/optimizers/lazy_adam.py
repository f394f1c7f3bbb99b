"""Adam that leaves rows without a gradient alone."""

from __future__ import annotations

from typing import Annotated, Literal, Unpack

from gpuopt.optimizers.adam import AdamOptimizer
from gpuopt.optimizers.base import Additions, CatchUpOption, Hyperparameter
from gpuopt.optimizers.base.catching_up import CATCH_UP
from gpuopt.state.counts import STEP_OF_EACH


class LazyAdamOptimizer(AdamOptimizer):
    """Adam whose sparse step updates the rows of the gradient and no others.

        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g^2 - v)
        w -= learning_rate * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon)

    The dense step is Adam's. A sparse step costs what its rows cost, however tall the table; the
    step size still follows the number of all steps, or with `count="variable"` of the table's own.
    It is TensorFlow's `contrib.opt.LazyAdamOptimizer`, and takes `AdamOptimizer`'s arguments;
    `catch_up` is refused, as other rows have nothing to catch up with.
    """

    rule_of_other_rows = None

    def __init__(
        self,
        learning_rate: Hyperparameter = 0.001,
        beta1: Hyperparameter = 0.9,
        beta2: Hyperparameter = 0.999,
        epsilon: Hyperparameter = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
        *,
        count: Annotated[
            Literal["shared", "variable"],
            'What `t` counts: "shared" all steps of the optimizer, by `beta1_power` and '
            '`beta2_power`; "variable" those of each variable, in its slot `step`. Then a variable '
            "that joins later begins with first steps, as in torch.",
        ] = "shared",
        catch_up: Annotated[CatchUpOption, CATCH_UP] = False,
        **common: Unpack[Additions],
    ) -> None:
        if count not in ("shared", "variable"):
            raise ValueError(f'count must be "shared" or "variable", got {count!r}')
        if count == "variable":
            self.own_counts = STEP_OF_EACH
        super().__init__(
            learning_rate,
            beta1,
            beta2,
            epsilon,
            use_locking,
            name,
            catch_up=catch_up,
            **common,
        )
