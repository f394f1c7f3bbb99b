"""Finds every exported optimizer and update rule, for tests that hold for all of them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import numpy as np

import gpuopt
import gpuopt.optimizers
from gpuopt.optimizers.rule_optimizer import RuleOptimizer
from gpuopt.update_rule import UpdateRule

# Arguments that have no default, and settings under which ten steps move a weight visibly.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "AdagradDAOptimizer": {"l1_regularization_strength": 0.001},
    "FtrlOptimizer": {"l1_regularization_strength": 0.01, "beta": 0.1},
    "MomentumOptimizer": {"momentum": 0.9},
    "ProximalAdagradOptimizer": {"l1_regularization_strength": 0.01},
    "ProximalGradientDescentOptimizer": {"l1_regularization_strength": 0.01},
    "RMSPropOptimizer": {"momentum": 0.5},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "MomentumOptimizer": {"use_nesterov": True},
    "RMSPropOptimizer": {"centered": True},
}


def optimizer_classes() -> dict[str, type[RuleOptimizer]]:
    return {
        name: value
        for name, value in vars(gpuopt).items()
        if inspect.isclass(value) and issubclass(value, RuleOptimizer)
    }


def modules() -> list[Any]:
    """The modules of gpuopt.optimizers that hold an optimizer."""
    names = [module.name for module in pkgutil.iter_modules(gpuopt.optimizers.__path__)]
    return [
        importlib.import_module(f"gpuopt.optimizers.{name}")
        for name in names
        if name != "rule_optimizer"
    ]


def update_rules() -> list[UpdateRule]:
    rules = {
        value.name: value
        for module in modules()
        for value in vars(module).values()
        if isinstance(value, UpdateRule)
    }
    return [rules[name] for name in sorted(rules)]


# Each optimizer, and the variants that have a rule of their own: (id, class name, arguments).
CONFIGURATIONS = [
    (name if arguments is base else f"{name}+{'+'.join(VARIANTS[name])}", name, arguments)
    for name in sorted(optimizer_classes())
    for base in [ARGUMENTS.get(name, {})]
    for arguments in ([base, {**base, **VARIANTS[name]}] if name in VARIANTS else [base])
]


def make(name: str, arguments: dict[str, Any] | None = None, **more: Any) -> RuleOptimizer:
    """Makes an optimizer with a learning rate of 0.1, and its own global step if it needs one."""
    cls = optimizer_classes()[name]
    given = {"learning_rate": 0.1, **(ARGUMENTS.get(name, {}) if arguments is None else arguments)}
    if "global_step" in inspect.signature(cls.__init__).parameters:
        given["global_step"] = gpuopt.Variable(0, name="own_step", dtype=np.int64)
    return cls(**given, **more)
