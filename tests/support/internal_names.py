"""Members of public classes that gpuopt alone uses, from another module than the class's.

They have no underscore, and no promise: they are neither in tests/project/public_api.txt nor in
docs/reference, and may be others in the next version.
"""

from __future__ import annotations

import re
from typing import Any

# By the name of the class that has them first; subclasses have them, too.
_MEMBERS = """
Optimizer: forget_plans masters open_report owner_of_state rounding row_checks slot_codes
  slot_dtype state this_thread
OptimizerWrapper: is_for_workers
LossScaleOptimizer: leaves_out_call
RuleOptimizer: derived_hyperparameters finish_is_undoable hyperparameter_of instead_of_all_rows
AdamOptimizer: betas
StepCountingOptimizer: counters
Variable: assign_rows belongs_to bring_up count_down follow_updates identity is_beside
  is_beside_another is_orphan is_raw_array memory new_rows note_reading owns_memory serial
  unread_storage unread_value
IndexedSlices: check replace
ParameterGroup: has is_empty lost with_changes
ExponentialMovingAverage: averages_of_variables decay_now follows forget keep_in_float32 move
  start version
Schedule: arguments constants formula then
UpdateRule: assertions computed eight_bit gradient headers include include_folders is_rounded own
  require_cuda slot_shape
Unnamed: check cpp_type
MirroredStrategy: apply_gradients own_gradients place_of
LocalVariables: find initial_value_beside made name_here refuse_row_changes
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
    return frozenset().union(
        *(INTERNAL.get(base.__name__, frozenset()) for base in getattr(cls, "__mro__", ()))
    )
