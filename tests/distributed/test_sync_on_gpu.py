"""What a chief and its workers send each other is the same if their variables are on GPUs."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.distributed import SingleCommunicator
from gpuopt.distributed.chief_messages import SharedVariables

pytestmark = pytest.mark.gpu


def test_gradients_and_values_travel_through_host_memory(every_schedule: Any) -> None:
    w = Variable(np.arange(5.0), name="w", dtype=np.float32, device="gpu:0")
    table = Variable(np.ones((4, 2)), name="table", dtype="bfloat16", device="gpu:0")
    step = Variable(7, name="global_step", trainable=False, dtype=np.int64)
    shared = SharedVariables(SingleCommunicator(), step, {}, {}, "a test")

    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    gradient = w.value() * 2  # still being computed when it is packed
    rows = IndexedSlices(table.value()[1:3] * 3, [2, 0], table.shape)
    sent = pickle.dumps(shared.pack_gradients([(gradient, w), (rows, table)]))
    optimizer.apply_gradients(shared.unpack_gradients(pickle.loads(sent)), step)
    assert w.numpy().astype(float).tolist() == [0, -1, -2, -3, -4]
    expected = [[-2, -2], [1, 1], [-2, -2], [1, 1]]
    assert table.numpy().astype(float).tolist() == expected

    state = shared.pack([table, w])
    for variable in (w, table, step):
        variable.assign(np.zeros(variable.shape, variable.dtype))
    shared.unpack(state)
    assert w.numpy().astype(float).tolist() == [0, -1, -2, -3, -4]
    assert table.numpy().astype(float).tolist() == expected
    assert int(step) == 8
