"""The options that add a stage to each step, with scalars by the count of steps."""

from __future__ import annotations

from gpuopt.step.rounding import StochasticRounding
from gpuopt.step.stage_options import StageOption

# By the arguments' names; an argument that is not given is None.
STAGE_OPTIONS: dict[str, type[StageOption]] = {"stochastic_rounding": StochasticRounding}
