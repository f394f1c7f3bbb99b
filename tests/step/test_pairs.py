"""Which memory one call may write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import Variable
from gpuopt.step.overlap import refuse_shared_memory
from gpuopt.variables.variable import as_variable


def variable_with_slot() -> tuple[Variable, Variable]:
    w = Variable(np.zeros(3, np.float32), name="w")
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.9)
    optimizer.apply_gradients([(np.ones(3, np.float32), w)])
    slot = optimizer.get_slot(w, "momentum")
    assert slot is not None
    return w, slot


def test_a_variable_its_slot_and_a_counter_are_three_memories() -> None:
    w, slot = variable_with_slot()
    counter = Variable(0, name="counter")
    memory = np.zeros(6, np.float32)
    refuse_shared_memory([w], [slot, counter])
    refuse_shared_memory([w, as_variable(memory[:3])], [slot, as_variable(memory[3:])])


def test_a_slot_is_not_updated_beside_its_variable() -> None:
    w, slot = variable_with_slot()
    with pytest.raises(ValueError, match='"w/Momentum" would be written twice') as raised:
        refuse_shared_memory([w, slot], [slot])
    assert "as a slot or as the global step" in str(raised.value)
    alias = as_variable(slot.storage[1:])
    with pytest.raises(ValueError, match="would be written twice"):
        refuse_shared_memory([w, alias], [slot])


@pytest.mark.parametrize("count", [lambda memory: memory[3:4].reshape(()), lambda memory: memory])
def test_the_global_step_is_not_in_memory_that_is_updated(count: Any) -> None:
    memory = np.zeros(4, np.float32)
    w = Variable(memory, name="w", copy=False)
    counter = as_variable(count(memory))
    with pytest.raises(ValueError, match=r'memory of "w" and "array\w*" would be written twice'):
        refuse_shared_memory([w], [counter])
    with pytest.raises(ValueError, match='"w" would be written twice'):
        refuse_shared_memory([w], [w])


def test_a_slot_owns_its_memory_until_something_is_made_on_it() -> None:
    _, slot = variable_with_slot()
    assert slot.owns_memory
    assert not Variable(slot.storage, copy=False).owns_memory
