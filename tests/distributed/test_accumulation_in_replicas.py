"""Replicas accumulate gradients each for itself, and sum them once for an update."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from accumulating_ranks import MICRO_STEPS, NUM_CALLS, Model, accumulate, expected_values
from emulator.emulator import EmulatorLauncher
from naive_communicator import NaiveGroup
from rank_process import run_processes
from stages import STAGES

import gpuopt
from gpuopt import GradientAccumulationOptimizer, MirroredStrategy, Variable
from gpuopt.distributed.reduction import sum_over_ranks
from gpuopt.step.replica_context import replica_context

pytestmark = pytest.mark.value

UPDATES = range(3), range(3, 6), range(6, NUM_CALLS)


def rank() -> int:
    return replica_context().replica_id


def one(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def of_copies(values: list[Any], num_copies: int) -> list[Any]:
    return [each for each in values for _ in range(num_copies)]


@pytest.mark.parametrize(("group", "num_replicas"), [("threads", 1), ("threads", 3), ("naive", 2)])
def test_an_update_is_by_the_sums_of_all_replicas(group: str, num_replicas: int) -> None:
    devices = ["cpu"] * num_replicas
    strategy = (
        MirroredStrategy(devices)
        if group == "threads"
        else MirroredStrategy(devices, group=NaiveGroup(num_replicas, 20.0))
    )
    values = expected_values(num_replicas, *UPDATES, divide=False)
    assert accumulate(strategy) == [2, 3, of_copies(values, num_replicas)]


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@pytest.mark.parametrize("devices", [["gpu:0", "gpu:1"], ["gpu:1", "cpu", "gpu:1"]], ids=str)
def test_each_device_has_its_copies_sums(devices: list[str]) -> None:
    values = expected_values(len(devices), *UPDATES, divide=False)
    assert accumulate(MirroredStrategy(devices)) == [2, 3, of_copies(values, len(devices))]


@pytest.mark.gpu
@pytest.mark.usefixtures("every_schedule")
def test_replicas_on_gpus_may_have_streams_of_their_own() -> None:
    devices = ["gpu:0", "gpu:0"]
    values = expected_values(2, *UPDATES, divide=False)
    assert accumulate(MirroredStrategy(devices)) == [2, 3, of_copies(values, 2)]


@pytest.mark.emulator
def test_a_call_between_updates_is_a_launch_on_each_gpu_and_nothing_waits(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    strategy = MirroredStrategy(["gpu:0", "gpu:1"])
    variables = [strategy.variable(np.zeros(9, np.float32), name=f"w{i}") for i in range(4)]
    optimizer = GradientAccumulationOptimizer(gpuopt.AdamOptimizer(), 3)
    counted = []

    def call() -> None:
        gradients = [variable.local.value() for variable in variables]
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))

    for _ in range(9):
        launches = [gpu.launches for gpu in emulated_gpus]
        waits = fake_cupy.counts.synchronisations
        strategy.run(call)
        counted.append(
            (
                [gpu.launches - old for gpu, old in zip(emulated_gpus, launches, strict=True)],
                fake_cupy.counts.synchronisations - waits,
            )
        )
    assert counted[6:8] == [([1, 1], 0)] * 2
    assert counted[8][0] == [2, 2]


def test_replicas_meet_in_an_update_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[str] = []

    def reduce(communicator: Any, gradients: Any, what: str) -> Any:
        reduced.append(what)
        return sum_over_ranks(communicator, gradients, what)

    monkeypatch.setattr("gpuopt.distributed.strategy.sum_over_ranks", reduce)
    model = Model(MirroredStrategy(["cpu", "cpu"]))
    for call in range(2 * MICRO_STEPS):
        model.call(call)
        assert len(reduced) == 2 * ((call + 1) // MICRO_STEPS)


def test_who_saves_sees_the_last_call_with_its_update(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(MirroredStrategy(["cpu", "cpu"]))
    named = {copy.name: copy for each in (model.w, model.table) for copy in each.replicas}
    states: list[Any] = []
    readers: list[threading.Thread] = []

    def reduce(communicator: Any, gradients: Any, what: str) -> Any:
        if communicator.rank == 0:  # the sums are taken, and the update is not made yet
            reader = threading.Thread(
                target=lambda: states.append(model.optimizer.state_dict(named))
            )
            reader.start()
            reader.join(0.1)
            readers.append(reader)
        return sum_over_ranks(communicator, gradients, what)

    monkeypatch.setattr("gpuopt.distributed.strategy.sum_over_ranks", reduce)
    model.train(range(MICRO_STEPS))
    readers[0].join()
    assert states[0]["non_slots"]["accumulated_steps"] == 0
    momentum = model.inner.get_slot(model.w.replicas[1], "momentum")
    assert momentum is not None
    saved = states[0]["slots"]["momentum"]["w/replica_1"]
    np.testing.assert_array_equal(saved, momentum.numpy())
    assert saved.any()


def test_sums_of_16_bits_are_not_rounded_before_the_update() -> None:
    dtype = ml_dtypes.bfloat16
    strategy = MirroredStrategy(["cpu", "cpu"])
    w = strategy.variable(np.zeros(2, dtype), name="half")
    optimizer = GradientAccumulationOptimizer(gpuopt.GradientDescentOptimizer(1.0), 3, "sum")
    for number in (4096, 1, -4096):  # 4097 is no bfloat16
        strategy.run(
            lambda number=number: optimizer.apply_gradients(
                [(np.full(2, number + rank() * (number == 1), dtype), w)]
            )
        )
    assert [copy.numpy().tolist() for copy in w.replicas] == [[-3, -3]] * 2


@pytest.mark.parametrize(
    ("way", "stopped_at"), [("saver", 2), ("saver", 4), ("state_dict", 1), ("state_dict", 3)]
)
def test_a_run_goes_on_in_the_middle_of_accumulation(
    way: str, stopped_at: int, tmp_path: Path
) -> None:
    def model() -> tuple[Model, gpuopt.Saver, dict[str, Variable]]:
        made = Model(MirroredStrategy(["cpu", "cpu"]), reduction="sum")
        copies = [*made.w.replicas, *made.table.replicas]
        named = {copy.name: copy for copy in copies}
        return made, gpuopt.Saver([*copies, made.step], optimizers=[made.optimizer]), named

    first, saver, named = model()
    first.train(range(stopped_at))
    path = saver.save(str(tmp_path / "model"))
    state, values = first.optimizer.state_dict(named), [each.numpy() for each in named.values()]
    del first, saver, named
    second, saver, named = model()
    if way == "saver":
        saver.restore(path)
        assert int(second.step) == stopped_at // MICRO_STEPS
    else:
        second.optimizer.load_state_dict(state, named)
        for variable, value in zip(named.values(), values, strict=True):
            variable.assign(value)
    assert second.optimizer.accumulated_steps == stopped_at % MICRO_STEPS
    second.train(range(stopped_at, 6))
    expected = expected_values(2, *UPDATES[:2], divide=False)
    assert second.values() == of_copies(expected, 2)


def test_what_replicas_bring_must_fit_together_and_nothing_is_added_else() -> None:
    model = Model(MirroredStrategy(["cpu", "cpu"]), reduction="sum")
    model.call(0)

    def differ() -> None:
        model.optimizer.apply_gradients(model.pairs(1)[: 1 + rank()])

    def fail() -> None:
        if rank():
            raise KeyError("lost")
        model.optimizer.apply_gradients(model.pairs(1))

    with pytest.raises(ValueError, match=r"to accumulate, \['w by ndarray'\] on rank 0; .*table"):
        model.strategy.run(differ)
    with pytest.raises(KeyError, match="lost"):
        model.strategy.run(fail)
    foreign = Variable(one(0), name="foreign")
    with pytest.raises(ValueError, match='"foreign" is not this replica'):
        model.strategy.run(lambda: model.optimizer.apply_gradients([(one(1), foreign)]))
    assert model.optimizer.accumulated_steps == 1
    model.train([1, 2])
    assert model.values() == of_copies(expected_values(2, range(3), divide=False), 2)


def test_an_update_that_fails_drops_what_all_replicas_have_accumulated() -> None:
    model = Model(MirroredStrategy(["cpu", "cpu"]), reduction="sum")
    model.inner.hyperparameters["learning_rate"] = lambda: rate[0]
    rate: list[Any] = ["no number"]
    model.train([0, 1])
    with pytest.raises(TypeError) as raised:
        model.call(2)
    assert "accumulated in 3 calls was dropped" in raised.value.__notes__[-1]
    assert (int(model.step), model.optimizer.accumulated_steps) == (0, 0)
    rate[0] = 0.5
    model.train(range(3, 6))
    assert model.values() == of_copies(expected_values(2, range(3, 6), divide=False), 2)


@pytest.mark.parametrize("is_in_middle", [False, True])
def test_loss_scaling_inside_decides_about_the_sums_of_all(is_in_middle: bool) -> None:
    strategy = MirroredStrategy(["cpu", "cpu"])
    w, step = strategy.variable(one(2), name="w"), Variable(np.int64(0))
    scaling = gpuopt.LossScaleOptimizer(
        gpuopt.GradientDescentOptimizer(0.5), gpuopt.DynamicLossScale(8.0, 2, 2.0)
    )
    optimizer = GradientAccumulationOptimizer(scaling, 2)

    def call(of_first: float, of_second: float) -> None:
        factor = np.float32(of_second if rank() else of_first)
        optimizer.minimize(lambda: factor * w.local, step, [w.local])

    strategy.run(call, (1.0, 2.0))
    strategy.run(call, (3.0, 2.0))
    # Means of replicas, and of calls: (1.5 + 2.5) / 2.
    assert [w.numpy(), int(step), scaling.loss_scale] == [1, 1, 8]
    strategy.run(call, (1.0, np.inf if is_in_middle else 1.0))
    strategy.run(call, (1.0, 1.0 if is_in_middle else np.inf))
    assert [w.numpy(), int(step), scaling.loss_scale, scaling.num_skipped] == [1, 1, 4, 1]
    for _ in range(2):
        strategy.run(call, (1.0, 1.0))
    assert [copy.numpy().tolist() for copy in w.replicas] == [[0.5], [0.5]]


def test_averages_and_clipping_see_updates_alone() -> None:
    strategy = MirroredStrategy(["cpu", "cpu"])
    w = strategy.variable(one(0, 0), name="w")
    inner = gpuopt.GradientDescentOptimizer(1.0, clip_norm=2.5)
    optimizer = gpuopt.MovingAverageOptimizer(GradientAccumulationOptimizer(inner, 2), 0.5)
    for gradient in ([6, 0], [0, 8]):  # each of two replicas: the mean is (6, 8)
        strategy.run(lambda gradient=gradient: optimizer.apply_gradients([(one(*gradient), w)]))
    assert inner.global_norm == 10
    for copy in w.replicas:
        np.testing.assert_allclose(copy.numpy(), [-1.5, -2], rtol=3e-7)
        np.testing.assert_allclose(optimizer.averages.average(copy).numpy(), [-0.75, -1], rtol=3e-7)


# The others are beside accumulation in the random programs of tests/fuzz.
@pytest.mark.parametrize("stage", ["clip_norm", "sums", "row-wise, clip_norm"])
def test_an_update_with_each_stage_is_that_of_one_process_by_the_sums(stage: str) -> None:
    strategy = MirroredStrategy(["cpu", "cpu"])
    shapes = {"w0": (3, 4), "w1": (5,), "w2": (), "table": (9, 2)}
    start = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    mirrored = {name: strategy.variable(value, name=name) for name, value in start.items()}
    alone = {name: Variable(value, name=f"{name}_1") for name, value in start.items()}
    optimizers = [GradientAccumulationOptimizer(STAGES[stage](), 2) for _ in range(2)]

    def pairs(call: int, rank: int, variables: Any) -> list[Any]:
        rng = np.random.default_rng((call, rank))
        made: list[Any] = []
        for name, variable in variables.items():
            shape = (5, 2) if name == "table" else shapes[name]
            gradient: Any = np.asarray(rng.normal(size=shape)).astype(np.float32)
            if name == "table":
                gradient = gpuopt.IndexedSlices(gradient, rng.integers(0, 9, 5))
            made.append((gradient, variable))
        return made

    for call in range(6):
        strategy.run(lambda call=call: optimizers[0].apply_gradients(pairs(call, rank(), mirrored)))
        of_ranks = [pairs(call, number, alone) for number in range(2)]
        together: list[Any] = []
        for (first, variable), (second, _) in zip(*of_ranks, strict=True):
            if isinstance(first, gpuopt.IndexedSlices):
                values = np.concatenate([first.values, second.values])
                rows = np.concatenate([first.indices, second.indices])
                together.append((gpuopt.IndexedSlices(values, rows), variable))
            else:
                together.append((first + second, variable))
        optimizers[1].apply_gradients(together)
    for name, variable in alone.items():
        first, second = (copy.numpy() for copy in mirrored[name].replicas)
        np.testing.assert_array_equal(first, second)
        # Around 1, as sums of replicas are rounded in another order.
        np.testing.assert_allclose(first, variable.numpy(), rtol=0, atol=2e-6)


def test_what_is_not_for_replicas_is_refused_by_name() -> None:
    model = Model(MirroredStrategy(["cpu", "cpu"]))
    model.call(0)
    calls: dict[str, Callable[[], Any]] = {
        "skip_gradients_aggregation cannot be had in a replica": lambda: (
            model.optimizer.apply_gradients(model.pairs(0), skip_gradients_aggregation=True)
        ),
        r"reset\(\) is for all replicas at once": model.optimizer.reset,
    }
    for message, call in calls.items():
        with pytest.raises(RuntimeError, match=message):
            model.strategy.run(call)
    with (
        model.strategy.scope(),
        pytest.raises(RuntimeError, match="cannot be used in a cross-replica context"),
    ):
        model.optimizer.apply_gradients([(one(*range(5)), model.w.replicas[0])])
    assert model.optimizer.accumulated_steps == 1
    model.optimizer.reset()
    assert model.optimizer.accumulated_steps == 0


@pytest.mark.parametrize("ranks_of_processes", [[[0], [1], [2]], [[0, 1], [2]]], ids=str)
def test_processes_reduce_their_sums(ranks_of_processes: list[list[int]]) -> None:
    values = expected_values(3, *UPDATES, divide=False)
    for ranks, outcome in zip(
        ranks_of_processes, run_processes("accumulate", ranks_of_processes), strict=True
    ):
        assert outcome == [2, 3, of_copies(values, len(ranks))]


def test_what_is_not_finite_in_one_process_is_left_out_by_all() -> None:
    values = expected_values(3, [0, 2, 3], divide=False)
    assert run_processes("leave_out_in_one", [[0, 1], [2]]) == [
        [1, of_copies(values, num_copies)] for num_copies in (2, 1)
    ]


def test_sums_of_one_process_are_not_saved_nor_brought_to_all() -> None:
    for told in run_processes("save_in_the_middle", [[0], [1]]):
        middle, after, restored, ended, reset = told
        assert "cannot be read while it accumulates gradients in several processes" in middle
        assert after == reset == "nothing"
        for error in (restored, ended):
            assert "was restored, or begun outside of MirroredStrategy.run" in error
