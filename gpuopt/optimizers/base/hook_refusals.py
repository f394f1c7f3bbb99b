"""Options that do not go together with a hook that updates one variable at a time."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

# By the attribute that says whether an option is on: what is missing there, and what to do.
_MISSING = {
    "averages": "which `averages` do not follow: use gpuopt.MovingAverageOptimizer",
    "clips": (
        "which clip_norm and clip_value do not reach: clip by hand, with gpuopt.clip_by_global_norm"
    ),
    "slot_codecs.slot_form": "which has no slots in 8 bits: leave slot_bits=8 out",
    "slot_codecs.masters": "which has no master copies: leave masters out",
    "slot_codecs.slot_dtype": "whose slots have its variable's type: leave slot_dtype out",
    "rounding": "which is rounded to nearest: leave stochastic_rounding out",
}


def refuse_options(optimizer: Any) -> None:
    """Raises NotImplementedError if an option of a `RuleOptimizer` is on that hooks do not know."""
    missing = [why for name, why in _MISSING.items() if attrgetter(name)(optimizer) is not None]
    missing += [f"which has no {each.name}: leave it out" for each in optimizer.stage_options]
    if missing:
        raise NotImplementedError(
            f"{type(optimizer).__name__} overrides a hook that updates one variable at a time, "
            f"{missing[0]}"
        )
