"""Members of public classes that gpuopt alone uses, from another module than the class's.

They have no underscore, and no promise: they are neither in tests/project/public_api.txt nor in
docs/reference, and may be others in the next version.
"""

from __future__ import annotations

import re
from typing import Any

from gpuopt.listed import unlisted_names

# What users may use of optimizers, but few do: `dir` does not list it.
SELDOM = frozenset(
    [
        "GATE_GRAPH",
        "GATE_NONE",
        "GATE_OP",
        "accept_unfinished_step",
        "catch_up",
        "rule",
        "rule_of_other_rows",
    ]
)
# By the name of the class that has them first; subclasses have them, too. Of optimizers and
# variables, what `dir` does not list is internal.
_MEMBERS = """
IndexedSlices: check replace
ParameterGroup: has is_empty lost with_changes
ExponentialMovingAverage: averages_of_variables decay_now follows forget move
  start version
Schedule: arguments constants formula then
UpdateRule: computed definitions fields functor gradient include
  include_folders is_averaged is_clipped is_emitted is_numbered is_rounded is_scaled own
  own_functor programs programs_of_terms reads_numbers slot_shape stages
Unnamed: check cpp_type
MirroredStrategy: apply_gradients own_gradients place_of
LocalVariables: find initial_companion made name_here refuse_row_changes
_Accumulator: accept after_fork close drop_before has take
SparseConditionalAccumulator: merge_rows
Coordinator: after_fork ask can_go_on_with close give_up has_failed is_closed join leave
  num_workers_needed push refuse_row_changes stop variables wait
NCCLCommunicator: end
"""
INTERNAL = {
    name: frozenset(members.split())
    for name, _, members in (
        each.partition(":") for each in re.split(r"\n(?=\w)", _MEMBERS.strip())
    )
}


def internal_members(cls: Any) -> frozenset[str]:
    """Returns the internal members of a class, its bases' among them; a function has none."""
    if not isinstance(cls, type):
        return frozenset()
    named = (INTERNAL.get(base.__name__, frozenset()) for base in cls.__mro__)
    return frozenset().union(unlisted_names(cls) - SELDOM, *named)
