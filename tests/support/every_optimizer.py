"""Finds every exported optimizer and update rule, for tests that hold for all of them."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from dtypes import DTYPES

import gpuopt
import gpuopt.optimizers
from gpuopt.optimizers.base.rule_optimizer import RuleOptimizer
from gpuopt.rules.update_rule import UpdateRule

# Arguments that have no default, and settings under which ten steps move a weight visibly.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "AdagradDAOptimizer": {"l1_regularization_strength": 0.001},
    "AdamWOptimizer": {"weight_decay": 0.01},
    "AdaBeliefOptimizer": {"epsilon_root": 1e-4},
    "FtrlOptimizer": {"l1_regularization_strength": 0.01, "beta": 0.1},
    "LionOptimizer": {"weight_decay": 0.01},
    "MomentumOptimizer": {"momentum": 0.9},
    "MomentumWOptimizer": {"weight_decay": 0.01, "momentum": 0.9},
    "PowerSignOptimizer": {"base": 2.0},
    "ProximalAdagradOptimizer": {"l1_regularization_strength": 0.01},
    "ProximalGradientDescentOptimizer": {"l1_regularization_strength": 0.01},
    "RMSPropOptimizer": {"momentum": 0.5},
    "ScheduleFreeAdamWOptimizer": {"weight_decay": 0.01},
    "ScheduleFreeSGDOptimizer": {"weight_decay": 0.01},
    "TorchAdagradOptimizer": {"learning_rate_decay": 0.1, "epsilon": 0.01},
    "TorchRMSpropOptimizer": {"momentum": 0.5, "epsilon": 0.01},
    "TorchSGDOptimizer": {"momentum": 0.9, "weight_decay": 0.01},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "AMSGradOptimizer": {"form": "optax"},
    "MomentumOptimizer": {"use_nesterov": True},
    "MomentumWOptimizer": {"use_nesterov": True},
    "RMSPropOptimizer": {"centered": True},
    "TorchRMSpropOptimizer": {"centered": True},
    "TorchSGDOptimizer": {"use_nesterov": True},
}
# Optimizers whose elements do not each step alone; they have tests of their own.
NOT_ELEMENTWISE = {
    "LAMBOptimizer",
    "LARSOptimizer",
    "PartialRowWiseAdamOptimizer",
    "RowWiseAdagradOptimizer",
}


def optimizer_classes() -> dict[str, type[RuleOptimizer]]:
    return {
        name: value
        for name, value in vars(gpuopt.optimizers).items()
        if inspect.isclass(value) and issubclass(value, RuleOptimizer)
        if name not in NOT_ELEMENTWISE
    }


def modules() -> list[Any]:
    """The modules of gpuopt.optimizers that hold an optimizer."""
    return [
        importlib.import_module(f"gpuopt.optimizers.{module.name}")
        for module in pkgutil.iter_modules(gpuopt.optimizers.__path__)
        if not module.ispkg
    ]


@cache
def update_rules() -> tuple[UpdateRule, ...]:
    rules = {
        value.name: value
        for module in modules()
        for value in vars(module).values()
        if isinstance(value, UpdateRule)
    }
    rules |= {rule.name: rule for rule, _ in configured_rules()}  # some are made of others
    for name, cls in optimizer_classes().items():
        if "cautious" in inspect.signature(cls).parameters:
            rule = make(name, cautious=True).rule
            rules[rule.name] = rule
    return tuple(rules[name] for name in sorted(rules))


class Configuration(NamedTuple):
    """An exported optimizer, or a variant of it that has a rule of its own.

    Attributes:
        identifier: The part of a test's name.
        name: The optimizer's name.
        arguments: The arguments for `make`.
    """

    identifier: str
    name: str
    arguments: dict[str, Any]


CONFIGURATIONS = [
    Configuration(
        name if arguments is base else f"{name}+{'+'.join(VARIANTS[name])}", name, arguments
    )
    for name in sorted(optimizer_classes())
    for base in [ARGUMENTS.get(name, {})]
    for arguments in ([base, {**base, **VARIANTS[name]}] if name in VARIANTS else [base])
]

_own_steps: WeakKeyDictionary[RuleOptimizer, gpuopt.Variable] = WeakKeyDictionary()


def make(name: str, arguments: dict[str, Any] | None = None, **more: Any) -> RuleOptimizer:
    """Makes an optimizer with a learning rate of 0.1, and its own global step if it needs one."""
    cls = optimizer_classes()[name]
    given = {"learning_rate": 0.1, **(ARGUMENTS.get(name, {}) if arguments is None else arguments)}
    if "global_step" in inspect.signature(cls.__init__).parameters:
        given["global_step"] = gpuopt.Variable(0, name="own_step", dtype=np.int64)
    optimizer = cls(**given, **more)
    if "global_step" in given:
        _own_steps[optimizer] = given["global_step"]
    return optimizer


def own_step(optimizer: RuleOptimizer) -> gpuopt.Variable | None:
    """Returns the global step that `make` has given to an optimizer, if it needs one."""
    return _own_steps.get(optimizer)


@cache
def configured_rules() -> list[tuple[UpdateRule, UpdateRule | None]]:
    """Returns the rule of each of CONFIGURATIONS, and that of rows without a gradient."""
    optimizers = [make(name, arguments) for _, name, arguments in CONFIGURATIONS]
    return [(each.rule, each.rule_of_other_rows) for each in optimizers]


def rules_of_other_rows_alone() -> set[UpdateRule]:
    """Returns the rules by which no optimizer updates a row that has a gradient."""
    of_others = {other for _, other in configured_rules() if other}
    return of_others - {rule for rule, _ in configured_rules()}


def rules_of_missed_steps() -> dict[UpdateRule, UpdateRule]:
    """Returns, for the rules of optimizers whose rows can catch up, that of the steps they miss."""
    return {rule: other for rule, other in configured_rules() if other and other.unnamed}


def rules_of_each_shape() -> list[UpdateRule]:
    """Returns a rule for each number of slots: the loops around a rule depend on nothing else.

    If several rules have a number of slots, it is the rule that most optimizers use.
    """
    uses = Counter(rule for rule, _ in configured_rules())
    by_slots: dict[int, UpdateRule] = {}
    for rule in sorted(uses, key=lambda rule: (-uses[rule], rule.name)):
        by_slots.setdefault(len(rule.slots), rule)
    return [by_slots[num_slots] for num_slots in sorted(by_slots)]


class Shape(NamedTuple):
    """The properties of an optimizer that the code around its rule depends on.

    Attributes:
        num_slots: The number of its rule's slots.
        other_rows: Whether a sparse gradient updates rows that it does not name, and whether by the
            same rule.
        overridden: The methods of RuleOptimizer that its class overrides, but for
            `_initial_slot_values`.
    """

    num_slots: int
    other_rows: Literal["stay", "same rule", "another rule"]
    overridden: frozenset[str]


def shapes() -> list[Shape]:
    """Returns the shape of each of CONFIGURATIONS."""
    pairs = zip(CONFIGURATIONS, configured_rules(), strict=True)
    return [shape_of(optimizer_classes()[each.name], *rules) for each, rules in pairs]


def shape_of(cls: type[RuleOptimizer], rule: UpdateRule, of_others: UpdateRule | None) -> Shape:
    overridden = {
        name
        for name, base in inspect.getmembers_static(RuleOptimizer, inspect.isfunction)
        if not name.startswith("__") and inspect.getattr_static(cls, name) is not base
    }
    return Shape(
        len(rule.slots),
        "stay" if of_others is None else "same rule" if of_others is rule else "another rule",
        frozenset(overridden - {"_initial_slot_values"}),
    )


def first_of_each_shape() -> list[Configuration]:
    firsts: dict[Shape, Configuration] = {}
    for shape, configuration in zip(shapes(), CONFIGURATIONS, strict=True):
        firsts.setdefault(shape, configuration)
    return list(firsts.values())


# GPUOPT_FULL tests the others like these.
FIRST_OF_EACH_SHAPE = CONFIGURATIONS if os.environ.get("GPUOPT_FULL") else first_of_each_shape()

# In which form an optimizer that is not the first of its shape runs each dtype: every form occurs.
FORM_OF_DTYPE = dict(zip(DTYPES, ["replayed", "plain", "compiled", "compiled"], strict=True))
FORMS = sorted(set(FORM_OF_DTYPE.values()))


def _parametrized(
    cases: Iterable[tuple[Configuration, *tuple[Any, ...]]], *more: str
) -> pytest.MarkDecorator:
    """Has a test run with an optimizer's `name` and `arguments`, and with more parameters."""
    return pytest.mark.parametrize(
        ("name", "arguments", *more),
        [
            pytest.param(
                configuration.name,
                configuration.arguments,
                *values,
                id="-".join([configuration.identifier, *map(str, values)]),
                marks=[pytest.mark.cxx] if "compiled" in values else [],
            )
            for configuration, *values in cases
        ],
        indirect=[fixture for fixture in more if fixture == "every_cpu_form"],
    )


# Decorators for tests that take `name` and `arguments`, for `make`.
configurations = _parametrized((configuration,) for configuration in CONFIGURATIONS)
# For mechanisms that see no more of an optimizer than its shape.
one_of_each_shape = _parametrized((configuration,) for configuration in FIRST_OF_EACH_SHAPE)
one_of_each_shape_in_forms = _parametrized(
    (
        (configuration, FORMS[number % len(FORMS)])
        for number, configuration in enumerate(FIRST_OF_EACH_SHAPE)
    ),
    "every_cpu_form",
)
in_every_form = _parametrized(
    ((configuration, form) for configuration in CONFIGURATIONS for form in FORMS),
    "every_cpu_form",
)
# What depends on the shape is tested in full for the first optimizer of each shape. The others run
# in one form, or where there is a `dtype`, in one form with each.
in_each_shapes_forms = _parametrized(
    (
        (configuration, form)
        for configuration in CONFIGURATIONS
        for form in (FORMS if configuration in FIRST_OF_EACH_SHAPE else ["replayed"])
    ),
    "every_cpu_form",
)
in_each_shapes_forms_and_dtypes = _parametrized(
    (
        (configuration, form, dtype)
        for configuration in CONFIGURATIONS
        for dtype in DTYPES
        for form in (FORMS if configuration in FIRST_OF_EACH_SHAPE else [FORM_OF_DTYPE[dtype]])
    ),
    "every_cpu_form",
    "dtype",
)
