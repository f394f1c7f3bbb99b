"""What a step may do besides: optimizers with each stage, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpuopt
from gpuopt import ParameterGroup

# Stages that are added to a step, and rules that are more than elementwise. Of the variables of a
# test, "w0" and so on, or "w0_1", some are in groups.
STAGES: dict[str, Callable[..., Any]] = {
    "plain": gpuopt.AdamOptimizer,
    "clip_norm": lambda **more: gpuopt.AdamOptimizer(clip_norm=2.0, **more),
    "clip_value": lambda **more: gpuopt.AdamOptimizer(clip_value=0.5, **more),
    "groups": lambda **more: gpuopt.AdamOptimizer(
        groups=[
            ParameterGroup("w[24](_.*)?", learning_rate=0.5),
            ParameterGroup("w1(_.*)?", clip_norm=0.1),
        ],
        **more,
    ),
    "cautious": lambda **more: gpuopt.TorchAdamWOptimizer(cautious=True, **more),
    "decay": lambda **more: gpuopt.AdamWOptimizer(0.01, **more),
    "decay, clip_norm, groups": lambda **more: gpuopt.AdamWOptimizer(
        0.01, clip_norm=1.0, groups=[ParameterGroup("w[24](_.*)?", weight_decay=0.5)], **more
    ),
    "sums": gpuopt.LAMBOptimizer,
    "sums, clip_norm": lambda **more: gpuopt.LAMBOptimizer(clip_norm=1.0, **more),
    "sums of inputs, clip_norm": lambda **more: gpuopt.LARSOptimizer(0.1, clip_norm=1.0, **more),
    "other rule for rows": lambda **more: gpuopt.LARSOptimizer(0.1, **more),
    "row-wise": gpuopt.RowWiseAdagradOptimizer,
    "row-wise, clip_norm": lambda **more: gpuopt.PartialRowWiseAdamOptimizer(clip_norm=1.0, **more),
    "no slots": lambda **more: gpuopt.GradientDescentOptimizer(0.1, **more),
    "catch_up": lambda **more: gpuopt.AdamOptimizer(catch_up=True, **more),
    "lazy": gpuopt.LazyAdamOptimizer,
    "slot_bits": lambda **more: gpuopt.AdamOptimizer(slot_bits=8, **more),
    "slot_bits, clip_norm, groups": lambda **more: gpuopt.LionOptimizer(
        slot_bits=8,
        clip_norm=1.0,
        groups=[ParameterGroup("w[24](_.*)?", learning_rate=0.5)],
        **more,
    ),
}
