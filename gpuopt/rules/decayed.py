"""Weight decay, as a stage: before the rule (Loshchilov & Hutter 2019, algorithm 2)."""

from __future__ import annotations

from typing import Any

from gpuopt.rules.stage import Stage
from gpuopt.rules.staged import StagedRule, staged
from gpuopt.rules.update_rule import UpdateRule


def decay(var: Any, *, weight_decay: Any) -> None:
    """Makes the variable smaller."""
    var -= weight_decay * var


_DECAY = Stage("decayed", decay)


def decayed(base: UpdateRule) -> StagedRule:
    """Returns the rule that does `var -= weight_decay * var`, and then what `base` does.

    What `base` sums does not depend on the decay. It has the slots of `base`, and the scalar
    `weight_decay` after those of `base`.
    """
    return staged(base, _DECAY)
