"""The base class of optimizers with an update rule, and what their modules import."""

from gpuopt.optimizers.base.all_digits import AllDigitsOptimizer
from gpuopt.optimizers.base.arguments import Additions, Common, DecayAdditions, DecayCommon
from gpuopt.optimizers.base.groups import ParameterGroup
from gpuopt.optimizers.base.hyperparameters import (
    Hyperparameter,
    HyperparameterName,
    require_not_negative,
    require_number,
    require_positive,
)
from gpuopt.optimizers.base.rule_optimizer import RuleOptimizer, undoable
from gpuopt.optimizers.base.step_counting import StepCountingOptimizer
from gpuopt.rules.catch_up import CatchUpOption
from gpuopt.rules.sources import CudaSource
from gpuopt.rules.unnamed import Movement, Unnamed
from gpuopt.rules.update_rule import UpdateRule, update_rule

__all__ = [
    "Additions",
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
    "RuleOptimizer",
    "StepCountingOptimizer",
    "Unnamed",
    "UpdateRule",
    "require_not_negative",
    "require_number",
    "require_positive",
    "undoable",
    "update_rule",
]
