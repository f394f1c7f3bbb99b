"""The options of an optimizer, checked, as its steps use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpuopt.state.slot_codecs import SlotCodecs
from gpuopt.step.averages import FollowingAverages
from gpuopt.step.clips import GradientClips
from gpuopt.step.rounding import StochasticRounding
from gpuopt.step.stage_options import StageOption

# The options that add a stage to each step, with scalars by the count of steps, by the arguments'
# names; an argument that is not given is None.
STAGE_OPTIONS: dict[str, type[StageOption]] = {"stochastic_rounding": StochasticRounding}


class Options(NamedTuple):
    """How an optimizer makes its steps.

    Attributes:
        codecs: How slots are stored.
        stages: The options that are stages of each step.
        averages: The moving averages that follow each step; None if there are none.
        clips: How gradients are clipped; None if they are not.
    """

    codecs: SlotCodecs = SlotCodecs()
    stages: Sequence[StageOption] = ()
    averages: FollowingAverages | None = None
    clips: GradientClips | None = None

    @property
    def counters(self) -> list[str]:
        """The names of the variables that count steps for stages."""
        return [each.counter for each in self.stages]
