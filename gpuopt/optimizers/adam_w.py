"""Adam with decoupled weight decay."""

from __future__ import annotations

from typing import Annotated, Unpack

from gpuopt.optimizers.adam import AdamOptimizer
from gpuopt.optimizers.base import CatchUpOption, DecayAdditions, Hyperparameter
from gpuopt.optimizers.base.catching_up import CATCH_UP
from gpuopt.optimizers.base.weight_decay import RuleWithWeightDecay


class AdamWOptimizer(RuleWithWeightDecay, AdamOptimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2).

        w -= weight_decay * w    and then Adam's step, by a gradient from before

    As in TensorFlow, `weight_decay` is not multiplied by the learning rate, and its digits are not
    rounded to float32. A sparse gradient lets the rows decay that it names; Adam moves every row.
    `minimize` and `apply_gradients` take `decay_var_list`: the variables that decay, by default
    `decay_variables`. It is TensorFlow's `contrib.opt.AdamWOptimizer`.
    """

    instead_of_all_rows = "extend_with_decoupled_weight_decay(LazyAdamOptimizer)"

    def __init__(
        self,
        weight_decay: Hyperparameter,
        learning_rate: Hyperparameter = 0.001,
        beta1: Hyperparameter = 0.9,
        beta2: Hyperparameter = 0.999,
        epsilon: Hyperparameter = 1e-8,
        use_locking: bool = False,
        name: str = "AdamW",
        *,
        catch_up: Annotated[CatchUpOption, CATCH_UP] = False,
        **common: Unpack[DecayAdditions],
    ) -> None:
        super().__init__(
            weight_decay,
            learning_rate,
            beta1,
            beta2,
            epsilon,
            use_locking,
            name,
            catch_up=catch_up,
            **common,
        )
