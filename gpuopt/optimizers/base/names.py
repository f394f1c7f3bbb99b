"""The hyperparameters of gpuopt's optimizers, which type checkers know by this list alone.

`.venv/bin/python tests/support/tables.py` writes it from the constructors.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from gpuopt.optimizers.base.declared import Hyperparameter

HyperparameterName = Literal[
    "alpha",
    "base",
    "beta",
    "beta1",
    "beta2",
    "dampening",
    "decay",
    "eeta",
    "epsilon",
    "epsilon_root",
    "l1_regularization_strength",
    "l2_regularization_strength",
    "l2_shrinkage_regularization_strength",
    "learning_rate",
    "learning_rate_decay",
    "learning_rate_power",
    "momentum",
    "momentum_decay",
    "rho",
    "weight_decay",
    "clip_norm",
    "clip_value",
]


class OfGroup(TypedDict, total=False):
    """The hyperparameters that a group may have."""

    alpha: Hyperparameter
    base: Hyperparameter
    beta: Hyperparameter
    beta1: Hyperparameter
    beta2: Hyperparameter
    dampening: Hyperparameter
    decay: Hyperparameter
    eeta: Hyperparameter
    epsilon: Hyperparameter
    epsilon_root: Hyperparameter
    l1_regularization_strength: Hyperparameter
    l2_regularization_strength: Hyperparameter
    l2_shrinkage_regularization_strength: Hyperparameter
    learning_rate: Hyperparameter
    learning_rate_decay: Hyperparameter
    learning_rate_power: Hyperparameter
    momentum: Hyperparameter
    momentum_decay: Hyperparameter
    rho: Hyperparameter
    weight_decay: Hyperparameter
    clip_norm: Hyperparameter | None
    clip_value: Hyperparameter | None
