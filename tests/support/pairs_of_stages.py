"""The stages of a step, by two: which go together, and how the others are refused."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from gpuopt import ParameterGroup

# All of these are exact in binary, so that no digits are lost before a step begins.
RATE, GROUP_RATE, MOST_NORM, MOST_VALUE, DECAY, AVERAGE_DECAY, SCALE = (
    0.5,
    0.25,
    2.0,
    0.5,
    0.125,
    0.75,
    8.0,
)
ROUNDING_SEED = 7
# What each stage is asked for by.
STAGES: dict[str, dict[str, Any]] = {
    "clip_norm": {"clip_norm": MOST_NORM},
    "clip_value": {"clip_value": MOST_VALUE},
    "loss_scale": {},
    "cautious": {"cautious": True},
    "decay": {},
    "groups": {"groups": [ParameterGroup(r"w1|table", learning_rate=GROUP_RATE)]},
    "on_nonfinite": {"on_nonfinite": "skip"},
    "averages": {},
    "slot_bits": {"slot_bits": 8},
    "catch_up": {"catch_up": "stepping"},
    "accumulation": {},
    "growing_scale": {},
    "masters": {"masters": "float32"},
    "remainders": {"masters": "remainder"},
    "rounding": {"stochastic_rounding": ROUNDING_SEED},
    "slot_dtype": {"slot_dtype": "bfloat16"},
}
REFUSED = {
    ("clip_norm", "clip_value"): "cannot both clip",
    ("cautious", "catch_up"): "catch_up",
    ("loss_scale", "on_nonfinite"): "both decide",
    ("loss_scale", "growing_scale"): "around another one",
    ("on_nonfinite", "growing_scale"): "both decide",
    ("masters", "rounding"): "stochastic_rounding=7 cannot be had with masters='float32'",
    ("remainders", "rounding"): "stochastic_rounding=7 cannot be had with masters='remainder'",
    ("slot_bits", "slot_dtype"): "slot_dtype='bfloat16' cannot be had with slot_bits=8",
}
# Values of one argument.
SAME = [("masters", "remainders")]
PAIRS = [pair for pair in combinations(STAGES, 2) if pair not in [*REFUSED, *SAME]]
