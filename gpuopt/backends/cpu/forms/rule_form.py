"""A rule with one step's scalars, in one of the three forms that update chunks of host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.backends.cpu.forms.compiled import CompiledForm, compiled_rule
from gpuopt.backends.cpu.forms.plain import PlainRule
from gpuopt.backends.cpu.forms.replayed import replayed_rules
from gpuopt.backends.cpu.numbers import Numbers
from gpuopt.rules.update_rule import UpdateRule

Array = np.ndarray[Any, Any]


class RuleForm(Protocol):
    """A rule with one step's scalars, which updates flat chunks in any thread.

    Attributes:
        scratch_dtypes: The dtypes of the scratch arrays that `apply` wants.
        most_elements: How long a chunk should be at most.
    """

    @property
    def scratch_dtypes(self) -> Sequence[np.dtype[Any]]: ...

    @property
    def most_elements(self) -> int: ...

    def apply(
        self,
        written: Sequence[Array],
        grad: Array | None,
        scratch: Sequence[Array],
        numbers: Numbers | None = None,
    ) -> None:
        """Updates chunks of the same rows; see `row_width` in chunks.py.

        Args:
            written: A flat chunk of the variable and of each slot.
            grad: The gradient's chunk; None if the form was made for a gradient of zeros.
            scratch: As long as the variable's chunk, of `scratch_dtypes`.
            numbers: Of the elements in their variable; None for a rule that takes none.
        """


def quickest_forms(
    rule: UpdateRule,
    real: np.dtype[Any],
    scalars: Sequence[Scalars],
    is_large: bool,
    *,
    zero_grad: bool = False,
) -> Sequence[RuleForm]:
    """Returns the quickest forms for work that is not small: compiled where that is possible.

    Else it is replayed if the work is large, and plain if it is not. Replay supports no rule with
    sums, whose scalars differ between variables, and none with row slots, whose arrays have two
    lengths: these are plain.

    Args:
        rule: The rule.
        real: The type of all chunks.
        scalars: The rule's scalars, of that type: those of each group. There is a form for each.
        is_large: Whether at least `CpuLimits.large_elements` are updated.
        zero_grad: The gradient is zero everywhere; `apply` gets none.
    """
    compiled = compiled_rule(rule, real)
    if compiled is not None:
        return [CompiledForm(compiled, each) for each in scalars]
    if rule.computed or not is_large:
        return [PlainRule(rule, each) for each in scalars]
    return replayed_rules(rule, real, scalars, zero_grad=zero_grad)
