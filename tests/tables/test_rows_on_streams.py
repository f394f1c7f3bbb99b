"""Rows that come and go on GPUs whose streams run late, in any order that CUDA allows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_streams import new_stream, uploaded, wait_for_gpus

import gpuopt
from gpuopt import IndexedSlices, Variable

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("every_schedule")]


class Model:
    def __init__(self) -> None:
        self.table = Variable(np.zeros((6, 4), np.float32), name="table", device="gpu:0")
        self.optimizer = gpuopt.MomentumOptimizer(1.0, 1.0)
        self.gradient = uploaded(np.full((6, 4), -1, np.float32))
        self.values = uploaded(np.full((2, 4), -1, np.float32))
        self.rows, self.bad_rows = uploaded(np.array([0, 2])), uploaded(np.array([0, 6]))
        wait_for_gpus()

    def step(self, rows: Any = None) -> None:
        gradient = self.gradient if rows is None else IndexedSlices(self.values, rows)
        self.optimizer.apply_gradients([(gradient, self.table)])


def test_changes_follow_steps_on_any_stream_and_steps_follow_changes() -> None:
    streams = [new_stream() for _ in range(3)]
    model = Model()
    for number in range(3):
        with streams[number]:
            model.step()  # 1, 3, 6
    with streams[0]:
        gpuopt.rows(model.table).remove([0, 1])
        # What the old arrays leave may go to others at once.
        other = [uploaded(np.full((6, 4), 99, np.float32), stream) for stream in streams]
    with streams[1]:
        gpuopt.rows(model.table).append(uploaded(np.zeros((2, 4), np.float32), streams[1]))
    with streams[2]:
        model.step()
    np.testing.assert_array_equal(model.table.numpy()[:, 0], [10, 10, 10, 10, 1, 1])
    slot = model.optimizer.get_slot(model.table, "momentum").numpy()
    np.testing.assert_array_equal(slot[:, 0], [-4, -4, -4, -4, -1, -1])
    wait_for_gpus()
    for each in other:
        assert (each.get() == 99).all()


def test_readings_on_other_streams_see_the_rows_of_their_time() -> None:
    streams = [new_stream() for _ in range(3)]
    model = Model()
    model.step()
    with streams[0]:
        before = model.table * 1
    with streams[1]:
        gpuopt.rows(model.table).reset([1], np.full((1, 4), 5, np.float32))
    with streams[2]:
        gpuopt.rows(model.table).keep([1, 1])
        after = model.table * 1
    wait_for_gpus()
    np.testing.assert_array_equal(before.get(), np.ones((6, 4)))
    np.testing.assert_array_equal(after.get(), np.full((2, 4), 5))


@pytest.mark.parametrize("change", ["keep", "reset"])
def test_rows_that_a_gpu_has_yet_to_refuse_are_refused_before(change: str) -> None:
    model = Model()
    model.step(model.rows)
    with new_stream():
        model.step(model.bad_rows)
    with pytest.raises(IndexError, match='gradient for "table": row 6'):
        getattr(gpuopt.rows(model.table), change)([0, 1])
    np.testing.assert_array_equal(model.table.numpy()[:, 0], [1, 0, 1, 0, 0, 0])
    gpuopt.rows(model.table).keep([0, 1])
    model.step(uploaded(np.array([1, 1])))
    np.testing.assert_array_equal(model.table.numpy()[:, 0], [1, 2])


def test_no_rows_change_in_a_capture() -> None:
    model, stream = Model(), new_stream()
    model.step()
    mask, values = uploaded(np.ones(6, bool)), uploaded(np.ones((6, 4), np.float32))
    wait_for_gpus()
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match="is being captured into a CUDA graph"):
                gpuopt.rows(model.table).keep([0])
            with pytest.raises(RuntimeError, match="call from_mask outside of the capture"):
                IndexedSlices.from_mask(values, mask)
        finally:
            stream.end_capture()
    np.testing.assert_array_equal(model.table.numpy(), np.ones((6, 4)))
    model.step()


def test_masks_of_a_gpu_are_read_after_what_makes_them() -> None:
    stream, model = new_stream(), Model()
    with stream:
        values = model.gradient * 2
        mask = values[:, 0] < uploaded(np.float32([0, -9, 0, -9, -9, 0]), stream)
        gradient = IndexedSlices.from_mask(values, mask)
        del values, mask
        model.optimizer.apply_gradients([(gradient, model.table)])
    np.testing.assert_array_equal(model.table.numpy()[:, 0], [2, 0, 2, 0, 0, 2])
