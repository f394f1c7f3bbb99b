"""Rows of variables that several workers or replicas have."""

from __future__ import annotations

import numpy as np
import pytest
from emulator.emulator import EmulatorLauncher

import gpuopt
from gpuopt import Variable
from gpuopt.backends.cpu.backend import CpuBackend


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@pytest.mark.parametrize("devices", [["cpu", "cpu"], ["gpu:0", "gpu:1"]], ids=str)
def test_all_copies_of_a_mirrored_variable_change_together(devices: list[str]) -> None:
    strategy = gpuopt.MirroredStrategy(devices)
    table = strategy.variable(np.zeros((3, 2), np.float32), name="table")
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)

    def step() -> None:
        gradient = np.ones(table.local.shape, np.float32)
        optimizer.apply_gradients([(gradient, table.local)])

    strategy.run(step)
    with pytest.raises(ValueError, match='pass the MirroredVariable "table" to'):
        gpuopt.rows(table.replicas[1]).keep([0])
    gpuopt.rows(table).append(np.full((1, 2), 7, np.float32))
    gpuopt.rows(table).keep([3, 0])
    strategy.run(step)
    for copy in table.replicas:
        # The gradients' sum is 2.
        np.testing.assert_array_equal(copy.numpy(), [[5, 5], [-5, -5]])
        slot = optimizer.get_slot(copy, "momentum")
        np.testing.assert_array_equal(slot.numpy(), [[2, 2], [3, 3]])


@pytest.mark.emulator
@pytest.mark.parametrize("devices", [["cpu", "cpu"], ["gpu:0", "gpu:1"]], ids=str)
def test_several_mirrored_variables_change_in_one_launch_for_each_device(
    devices: list[str], emulated_gpus: list[EmulatorLauncher]
) -> None:
    strategy = gpuopt.MirroredStrategy(devices)
    start = np.arange(6, dtype=np.float32)
    table = strategy.variable(start.reshape(3, 2), name="table")
    scale = strategy.variable(start[:3], name="scale")
    before = [gpu.launches for gpu in emulated_gpus]
    gpuopt.rows([table, scale]).keep([2, 0])
    launches = [gpu.launches - old for gpu, old in zip(emulated_gpus, before, strict=True)]
    assert launches == ([0, 0] if devices[0] == "cpu" else [1, 1])
    for copies, expected in ((table.replicas, [[4, 5], [0, 1]]), (scale.replicas, [2, 0])):
        for copy in copies:
            np.testing.assert_array_equal(copy.numpy(), expected)
    with pytest.raises(RuntimeError, match='rows of "table", "scale" cannot come or go in a rep'):
        strategy.run(lambda: gpuopt.rows([table, scale]).keep([0]))


def test_a_replica_among_several_does_not_change_the_copies_of_all() -> None:
    """Each of them would: they run the same function."""
    strategy = gpuopt.MirroredStrategy(["cpu", "cpu"])
    table = strategy.variable(np.ones((3, 2)), name="table")
    with pytest.raises(RuntimeError, match='rows of "table" cannot come or go in a replica'):
        strategy.run(lambda: gpuopt.rows(table).append(np.zeros((1, 2))))
    assert [copy.shape for copy in table.replicas] == [(3, 2), (3, 2)]
    alone = gpuopt.MirroredStrategy(["cpu"])
    other = alone.variable(np.ones((3, 2)), name="other")
    alone.run(lambda: gpuopt.rows(other).append(np.zeros((1, 2))))
    assert other.replicas[0].shape == (4, 2)


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
def test_one_copy_that_cannot_change_keeps_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = gpuopt.MirroredStrategy(["gpu:0", "cpu"])
    table = strategy.variable(np.zeros((3, 2), np.float32), name="table")
    gpuopt.MomentumOptimizer(1.0, 0.5).apply_gradients(
        [(np.ones((3, 2), np.float32), table.replicas[0])]
    )

    def fail(self: CpuBackend, array: np.ndarray) -> None:
        raise MemoryError

    monkeypatch.setattr(CpuBackend, "from_host", fail)  # of row numbers
    before = [each.numpy() for each in gpuopt.global_variables()]
    for change in ("keep", "reset"):
        with pytest.raises(MemoryError):
            getattr(gpuopt.rows(table), change)([0])
    for each, value in zip(gpuopt.global_variables(), before, strict=True):
        np.testing.assert_array_equal(each.numpy(), value)


def test_variables_of_synchronous_workers_keep_their_rows_until_these_have_ended() -> None:
    table, step = Variable(np.zeros((3, 2)), name="table"), Variable(0, dtype=np.int64)
    sync = gpuopt.SyncReplicasOptimizer(
        gpuopt.GradientDescentOptimizer(1.0), replicas_to_aggregate=1, total_num_replicas=1
    )
    for height in (3, 4):
        with sync.start(step), sync.worker(0) as worker:
            worker.apply_gradients([(-np.ones((height, 2)), table)], step)
            with pytest.raises(ValueError, match='"table" stay as they are while workers'):
                gpuopt.rows(table).keep([0])
        gpuopt.rows(table).append(np.zeros((1, 2)))
    np.testing.assert_array_equal(table.numpy()[:, 0], [2, 2, 2, 1, 0])


def test_variables_with_a_global_center_keep_their_rows() -> None:
    getter = gpuopt.AGNCustomGetter()
    table = getter.variable(np.zeros((3, 2)), "table")
    free = getter.variable(np.zeros((3, 2)), "free", trainable=False)
    for each in (table, getter.center(table), getter.made()[0].companion):
        with pytest.raises(ValueError, match=f'rows of "{each.name}" stay as they are: workers'):
            gpuopt.rows(each).keep([0])
    gpuopt.rows(free).keep([0])
    assert free.shape == (1, 2)
