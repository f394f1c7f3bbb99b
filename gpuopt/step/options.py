"""The options of an optimizer, checked, as its steps use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpuopt.state.slot_codecs import SlotCodecs
from gpuopt.step.averages import FollowingAverages
from gpuopt.step.clips import GradientClips
from gpuopt.step.stage_options import StageOption


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
