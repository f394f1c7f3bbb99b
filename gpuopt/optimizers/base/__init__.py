"""The base class of optimizers with an update rule, and what their modules import."""

from gpuopt.optimizers.base.all_digits import AllDigitsOptimizer
from gpuopt.optimizers.base.arguments import Additions, Common, DecayAdditions, DecayCommon
from gpuopt.optimizers.base.declared import (
    AllDigits,
    Hyperparameter,
    Range,
    check_numbers,
    check_range,
)
from gpuopt.optimizers.base.groups import ParameterGroup
from gpuopt.optimizers.base.names import HyperparameterName
from gpuopt.optimizers.base.rule_optimizer import RuleOptimizer
from gpuopt.optimizers.base.step_counting import StepCountingOptimizer
from gpuopt.rules.catch_up import CatchUpOption
from gpuopt.rules.sources import CudaSource
from gpuopt.rules.unnamed import Movement, Unnamed
from gpuopt.rules.update_rule import UpdateRule, update_rule
from gpuopt.step.hooks import undoable

__all__ = [
    "Additions",
    "AllDigits",
    "AllDigitsOptimizer",
    "CatchUpOption",
    "Common",
    "CudaSource",
    "DecayAdditions",
    "DecayCommon",
    "Hyperparameter",
    "HyperparameterName",
    "Movement",
    "ParameterGroup",
    "Range",
    "RuleOptimizer",
    "StepCountingOptimizer",
    "Unnamed",
    "UpdateRule",
    "check_numbers",
    "check_range",
    "undoable",
    "update_rule",
]
