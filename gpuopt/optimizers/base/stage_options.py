"""The options that are stages of a step with numbers by the count of steps."""

from __future__ import annotations

from gpuopt.step.rounding import StochasticRounding
from gpuopt.step.stage_options import StageOption

# By the arguments' names: each is None unless it is given.
STAGE_OPTIONS: dict[str, type[StageOption]] = {"stochastic_rounding": StochasticRounding}
