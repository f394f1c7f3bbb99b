"""Momentum with decoupled weight decay."""

from __future__ import annotations

from typing import Unpack

from gpuopt.optimizers.base import DecayAdditions, Hyperparameter
from gpuopt.optimizers.base.weight_decay import RuleWithWeightDecay
from gpuopt.optimizers.momentum import MomentumOptimizer


class MomentumWOptimizer(RuleWithWeightDecay, MomentumOptimizer):
    """Momentum with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 1).

        w -= weight_decay * w    and then Momentum's step, by a gradient from before

    As in TensorFlow, `weight_decay` is not multiplied by the learning rate, and its digits are not
    rounded to float32. A sparse gradient updates the rows it names. `minimize` and
    `apply_gradients` take `decay_var_list`: the variables that decay, by default
    `decay_variables`. It is TensorFlow's `contrib.opt.MomentumWOptimizer`.
    """

    def __init__(
        self,
        weight_decay: Hyperparameter,
        learning_rate: Hyperparameter,
        momentum: Hyperparameter,
        use_locking: bool = False,
        name: str = "MomentumW",
        use_nesterov: bool = False,
        **common: Unpack[DecayAdditions],
    ) -> None:
        super().__init__(
            weight_decay, learning_rate, momentum, use_locking, name, use_nesterov, **common
        )
