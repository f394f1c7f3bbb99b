"""Weight decay, as a stage: before the rule (Loshchilov & Hutter 2019, algorithm 2)."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.rules.stage import Stage
from gpuopt.rules.staged import StagedRule, staged
from gpuopt.rules.update_rule import UpdateRule


def decay(var: Any, *, weight_decay: Any) -> None:
    """Makes the variable smaller."""
    var -= weight_decay * var


def decay_rows(var: Any, grad: Any, *, weight_decay: Any) -> None:
    """Makes the variable smaller where the gradient is not -0."""
    is_named = (grad != 0) | ~np.signbit(grad)
    var[...] = np.where(is_named, var - weight_decay * var, var)


_DECAY = Stage("decayed", decay)
_DECAY_OF_ROWS = Stage("decayed_rows", decay_rows)


def decayed(base: UpdateRule) -> StagedRule:
    """Returns the rule that does `var -= weight_decay * var`, and then what `base` does.

    What `base` sums does not depend on the decay. It has the slots of `base`, and the scalar
    `weight_decay` after those of `base`.
    """
    return staged(base, _DECAY)


def decayed_rows(base: UpdateRule) -> StagedRule:
    """Returns the rule that does what `decayed(base)` does, but where the gradient is -0.

    There, nothing decays. It is for a sparse gradient that is made dense: -0 stands in the rows
    that it does not name, and nowhere else.
    """
    return staged(base, _DECAY_OF_ROWS)
