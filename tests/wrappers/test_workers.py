"""Contrib's optimizers of workers do what a naive model does, over any communicator."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import workers
from communicator_kinds import GROUPS, LONG_S

import gpuopt
from gpuopt import IndexedSlices, Variable, WorkerFailedError
from gpuopt.distributed import Communicator, ThreadGroup
from gpuopt.step.replica_context import ReplicaContext, in_replica

every_kind = pytest.mark.parametrize("kind", workers.KINDS)


def run(size: int, function: Callable[[Communicator], Any]) -> list[Any]:
    return ThreadGroup(size, LONG_S).run(function)


def new_step() -> Variable:
    return Variable(0, name="global_step", trainable=False, dtype=np.int64)


def sgd(rate: float = 1.0, **options: Any) -> gpuopt.Optimizer:
    return gpuopt.GradientDescentOptimizer(rate, **options)


@every_kind
@pytest.mark.parametrize("group", ["threads 1", "threads 4"])
def test_workers_do_what_the_naive_model_does(group: str, kind: str) -> None:
    communicators, size = group.split()
    traces = GROUPS[communicators](int(size), LONG_S).run(partial(workers.trace, kind))
    workers.assert_close(traces, workers.Model(kind, int(size)).run())


@every_kind
def test_workers_get_the_same_bits_in_each_run(kind: str) -> None:
    first = run(3, partial(workers.trace, kind))
    for _ in range(5 if os.environ.get("GPUOPT_FULL") else 2):
        assert run(3, partial(workers.trace, kind)) == first


@every_kind
def test_threads_may_count_in_one_global_step(kind: str) -> None:
    step = new_step()

    def train(communicator: Communicator) -> int:
        getter = workers.make_getter(kind, communicator)
        w = getter.variable(np.zeros(2), name="w")
        optimizer = workers.make_optimizer(kind, getter, sgd(), period=2)
        for _ in range(6):
            optimizer.apply_gradients([(np.ones(2), w)], step)
        return int(step)

    assert run(3, train) == [3 if kind == "model" else 9] * 3


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*zip(workers.KINDS, ["float16", "bfloat16", "float32", "float64"], strict=True)],
)
def test_all_ranks_have_the_same_bits_of_a_center_in_any_type(dtype: str, kind: str) -> None:
    shapes: list[tuple[int, ...]] = [(), (0, 2), (3, 4)]

    def train(communicator: Communicator) -> list[bytes]:
        getter = workers.make_getter(kind, communicator)
        name = "Variable"
        made = [getter.variable(np.ones(s, np.float32), name, dtype=dtype) for s in shapes]
        optimizer = workers.make_optimizer(kind, getter, gpuopt.AdamOptimizer(0.1), period=1)
        rng = np.random.default_rng(communicator.rank)
        for _ in range(2):
            gradients = [rng.standard_normal(v.shape).astype(v.dtype) for v in made]
            optimizer.apply_gradients(zip(gradients, made, strict=True), new_step())
        centers = [getter.center(v) for v in made]
        assert [(c.dtype, c.shape) for c in centers] == [(v.dtype, v.shape) for v in made]
        return [c.numpy().tobytes() for c in centers]

    first, *others = run(3, train)
    assert others == [first] * 2
    assert np.frombuffer(first[2], np.uint8).any()


def test_an_average_of_16_bit_variables_does_not_overflow() -> None:
    def train(communicator: Communicator) -> Any:
        getter = workers.make_getter("model", communicator)
        w = getter.variable(np.full(2, 60000, np.float16), name="w")
        optimizer = workers.make_optimizer("model", getter, sgd(), period=1)
        optimizer.apply_gradients([(np.float16([0, 64 * communicator.rank]), w)], new_step())
        return w.numpy().tolist()

    assert run(2, train) == [[60000, 59968]] * 2


def test_ranks_begin_with_the_value_of_rank_0_and_have_names_of_their_own() -> None:
    def make(communicator: Communicator) -> Any:
        getter = workers.make_getter("agn", communicator)
        made = [getter.variable(np.full(2, communicator.rank + 1.0), name="w")]
        made.append(getter.variable(float(communicator.rank), name="own", trainable=False))
        optimizer = workers.make_optimizer("agn", getter, sgd())
        communicator.barrier()
        return made, getter.center(made[0]), optimizer

    [(a, center_a, _), (b, center_b, _)] = made = run(2, make)
    assert [v.numpy().tolist() for v in (*a, *b)] == [[1, 1], 0, [1, 1], 1]
    assert [center_a.numpy().tolist(), center_b.numpy().tolist()] == [[1, 1]] * 2
    names = ["w", "grad_variable/w", "global_center_variable/w", "own", "local_step"]
    listed = sorted(v.name for v in gpuopt.global_variables())
    assert listed == sorted([*names, *(f"{name}/replica_1" for name in names)])
    assert [v.name for v in gpuopt.trainable_variables() if "replica" not in v.name] == ["w"]
    assert len(made) == 2


# The gradient of the distance.


@pytest.mark.parametrize("grad_loss", [None, 3.0])
def test_elastic_gradients_are_those_of_the_loss_and_the_distance(grad_loss: Any) -> None:
    getter = workers.make_getter("elastic")
    w = getter.variable([1.0, -2.0, 3.0], name="w", dtype=np.float64)
    unread = getter.variable([4.0], name="unread", dtype=np.float64)
    optimizer = gpuopt.ElasticAverageOptimizer(sgd(0.5), 1, getter, 2, rho=np.float64(0.7))
    for _ in range(3):
        optimizer.apply_gradients([(np.array([1.0, 2.0, -1.0]), w), (np.ones(1), unread)])
    centers = {v.name: v.numpy() for v in gpuopt.global_variables()}

    def total(values: np.ndarray) -> float:
        away = values[:3] - centers["local_center_variable/w"]
        away_too = values[3:] - centers["local_center_variable/unread"]
        distance = 0.5 * ((away**2).sum() + (away_too**2).sum())
        return (grad_loss or 1.0) * ((values[:3] ** 3).sum() + 0.7 * distance)

    pairs = optimizer.compute_gradients(lambda: (w**3).sum(), [w, unread], grad_loss=grad_loss)
    at = np.concatenate([w.numpy(), unread.numpy()])
    expected = [(total(at + nudge) - total(at - nudge)) / 2e-6 for nudge in 1e-6 * np.eye(len(at))]
    assert abs(at[3] - centers["local_center_variable/unread"]).all()
    np.testing.assert_allclose(np.concatenate([g for g, _ in pairs]), expected, rtol=1e-6)


def test_a_lookups_rows_and_the_distance_of_all_rows_are_added() -> None:
    getter = workers.make_getter("elastic")
    table = getter.variable(np.zeros((4, 2)), name="table")
    optimizer = gpuopt.ElasticAverageOptimizer(sgd(), 1, getter, 100, rho=np.float64(0.5))
    optimizer.apply_gradients([(-np.ones((4, 2)), table)])
    rows = [1, 3, 1]
    [(gradient, _)] = optimizer.compute_gradients(
        lambda: (2 * gpuopt.embedding_lookup(table, rows)).sum(), [table]
    )
    assert isinstance(gradient, IndexedSlices)
    assert gradient.dense_shape == (4, 2)
    total = np.zeros((4, 2))
    np.add.at(total, gradient.indices, gradient.values)
    assert total.tolist() == [[0.5] * 2, [4.5] * 2, [0.5] * 2, [2.5] * 2]


def test_rho_follows_the_learning_rate() -> None:
    rates = iter([0.5, 0.25, 0.125])
    getter = workers.make_getter("elastic")
    w = getter.variable(np.zeros(1), name="w")
    inside = gpuopt.MultitaskOptimizerWrapper(sgd(lambda: np.float64(next(rates))))
    optimizer = gpuopt.ElasticAverageOptimizer(inside, 1, getter, 10, moving_rate=0.5)
    w.assign([1.0])
    pairs = optimizer.compute_gradients(lambda: 0 * w.sum(), [w])
    assert [gradient.tolist() for gradient, _ in pairs] == [[0.5 / 0.25]]


def test_the_default_moving_rate_is_tensorflows() -> None:
    getter = workers.make_getter("elastic")
    w = getter.variable(np.zeros(1), name="w")
    optimizer = gpuopt.ElasticAverageOptimizer(sgd(), 1, getter, communication_period=2)
    for _ in range(2):
        optimizer.apply_gradients([(-np.ones(1), w)])
    assert getter.center(w).numpy() == pytest.approx(2 * 0.9 / 2)


# What is refused.


@pytest.mark.contract
@every_kind
def test_a_variable_of_another_origin_is_refused_before_anything_is_written(kind: str) -> None:
    getter = workers.make_getter(kind)
    w, other = getter.variable(np.zeros(2), name="w"), Variable(np.zeros(2), name="other")
    optimizer, step = workers.make_optimizer(kind, getter), new_step()
    kept = {v: v.numpy() for v in gpuopt.global_variables()}
    with pytest.raises(ValueError, match='"other" has no global center'):
        optimizer.apply_gradients([(np.ones(2), w), (np.ones(2), other)], step)
    assert optimizer.variables() == []
    for variable, value in kept.items():
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ([{"synchronous": True}, {}], "2, synchronous, with moving_rate 0.25 on rank 0; the exc"),
        (
            [{"synchronous": True, "moving_rate": rate} for rate in (0.25, 0.5)],
            "moving_rate 0.25 on rank 0; the exchange of .* moving_rate 0.5 on rank 1",
        ),
    ],
)
def test_workers_that_meet_together_move_the_center_alike(
    settings: list[dict[str, Any]], told: str
) -> None:
    def train(communicator: Communicator) -> Any:
        getter = workers.make_getter("elastic", communicator)
        w = getter.variable(np.zeros(2), name="w")
        options = {"moving_rate": 0.25, **settings[communicator.rank]}
        optimizer = gpuopt.ElasticAverageOptimizer(sgd(), 2, getter, 2, **options)
        for _ in range(2):
            optimizer.apply_gradients([(np.ones(2), w)])

    with pytest.raises(ValueError, match=told):
        run(2, train)


@pytest.mark.contract
def test_arguments_that_do_not_fit_are_refused_by_name() -> None:
    elastic, agn = workers.make_getter("elastic"), workers.make_getter("agn")
    model = workers.make_getter("model")
    make = gpuopt.ElasticAverageOptimizer
    with pytest.raises(TypeError, match=r"must be of ElasticAverageCustomGetter, got <gpuopt.*AGN"):
        make(sgd(), 1, agn)
    with pytest.raises(ValueError, match=r"num_worker is 2, and the communicator .* has 1 ranks"):
        make(sgd(), 2, elastic)
    with pytest.raises(ValueError, match="communication_period must be at least 1, got 0"):
        make(sgd(), 1, elastic, 0)
    with pytest.raises(TypeError, match=r"interval_steps must be an integer, got 2\.5"):
        gpuopt.ModelAverageOptimizer(sgd(), 1, True, model, 2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the optimizer to wrap must be an Optimizer, got None"):
        gpuopt.AGNOptimizer(None, 1, agn)  # type: ignore[arg-type]
    for moving_rate in (0, 1.5, np.nan):
        with pytest.raises(ValueError, match="moving_rate must be above 0 and up to 1"):
            make(sgd(), 1, elastic, moving_rate=moving_rate)
    with pytest.raises(TypeError, match="moving_rate must be a number, got '1'"):
        make(sgd(), 1, elastic, moving_rate="1")  # type: ignore[arg-type]
    for rho in (-1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="rho must be finite and not negative"):
            make(sgd(), 1, elastic, rho=rho)
    with pytest.raises(ValueError, match=r"rho must be given.* learning rate, which is 0\.0"):
        make(sgd(0.0), 1, elastic)
    with pytest.raises(ValueError, match='rho must be given: "Users" has no learning rate'):
        make(gpuopt.Optimizer(False, "Users"), 1, elastic)
    with pytest.raises(ValueError, match="is_chief is False for the worker that is rank 0"):
        gpuopt.ModelAverageOptimizer(sgd(), 1, False, model)
    optimizer = gpuopt.ModelAverageOptimizer(sgd(), 1, True, model)
    with pytest.raises(ValueError, match="Global step is required"):
        optimizer.apply_gradients([(np.ones(1), model.variable(np.zeros(1)))])
    with pytest.raises(ValueError, match="task_index is 1; this worker is rank 0"):
        optimizer.get_init_op(1)


@pytest.mark.contract
@every_kind
def test_replicas_and_towers_are_refused(kind: str) -> None:
    getter = workers.make_getter(kind)
    w = getter.variable(np.zeros(1), name="w")
    optimizer = workers.make_optimizer(kind, getter)
    for context in (
        ReplicaContext(0, 2),
        ReplicaContext(strategy=gpuopt.MirroredStrategy(["cpu"])),
    ):
        with in_replica(context), pytest.raises(RuntimeError, match="in a replica of a strategy"):
            optimizer.apply_gradients([(np.ones(1), w)], new_step())
    assert w.numpy().tolist() == [0]


def test_workers_that_make_other_variables_are_told() -> None:
    def make(communicator: Communicator) -> None:
        workers.make_getter("agn", communicator).variable(np.zeros(2 + communicator.rank), name="w")

    with pytest.raises(ValueError, match=r'"w" of float64\[2\] on rank 0; .*\[3\] on rank 1'):
        run(2, make)


def test_workers_that_have_made_other_numbers_of_steps_are_told() -> None:
    def train(communicator: Communicator) -> None:
        getter = workers.make_getter("model", communicator)
        w = getter.variable(np.zeros(1), name="w")
        optimizer = workers.make_optimizer("model", getter, sgd(), period=2)
        optimizer.local_step.assign(2 * communicator.rank)
        for _ in range(2):
            optimizer.apply_gradients([(np.ones(1), w)], new_step())

    with pytest.raises(ValueError, match=r"after local step 2 on rank 0; .*step 4 on rank 1"):
        run(2, train)


@pytest.mark.contract
def test_a_global_step_that_only_some_workers_have_is_refused() -> None:
    def train(communicator: Communicator) -> None:
        getter = workers.make_getter("agn", communicator)
        w = getter.variable(np.zeros(1), name="w")
        optimizer = workers.make_optimizer("agn", getter, sgd(), period=1)
        optimizer.apply_gradients([(np.ones(1), w)], new_step() if communicator.rank else None)

    with pytest.raises(ValueError, match="no global step on rank 0; one on rank 1"):
        run(2, train)


@every_kind
def test_workers_do_not_wait_for_one_that_has_failed(kind: str) -> None:
    errors: list[BaseException] = []

    def train(communicator: Communicator) -> None:
        getter = workers.make_getter(kind, communicator)
        w = getter.variable(np.zeros(1), name="w")
        optimizer = workers.make_optimizer(kind, getter, sgd(), period=1)
        if communicator.rank == 1:
            raise ZeroDivisionError("out of data")
        try:
            optimizer.apply_gradients([(np.ones(1), w)], new_step())
        except WorkerFailedError as error:
            errors.append(error)
            raise

    with pytest.raises(ZeroDivisionError, match="out of data"):
        run(3, train)
    assert len(errors) == 2


# Steps that are skipped, saved, restored, and made again.


def test_a_skipped_step_counts_and_is_not_summed() -> None:
    def train(communicator: Communicator) -> Any:
        getter = workers.make_getter("agn", communicator)
        w = getter.variable(np.zeros(1), name="w")
        opt = sgd(on_nonfinite="skip")
        optimizer, step = workers.make_optimizer("agn", getter, opt, period=2), new_step()
        for gradient in (1.0, np.nan if communicator.rank else 3.0):
            optimizer.apply_gradients([(np.array([gradient]), w)], step)
        return w.numpy().item(), int(optimizer.local_step), int(step)

    # The means are 4 / 2 and 1 / 2.
    assert run(2, train) == [(-2.0, 2, 2), (-2.5, 2, 2)]


def test_a_constraint_holds_for_the_center() -> None:
    getter = workers.make_getter("agn")
    w = getter.variable(np.ones(2), name="w", constraint=lambda w: np.maximum(w, 0))
    optimizer = workers.make_optimizer("agn", getter, sgd(), period=1)
    optimizer.apply_gradients([(np.array([0.25, 9.0]), w)])
    assert getter.center(w).numpy().tolist() == w.numpy().tolist() == [0.75, 0]


def test_a_gradient_in_the_variables_memory_is_summed_as_it_was_given() -> None:
    getter = workers.make_getter("agn")
    w = getter.variable(np.ones(2), name="w")
    optimizer = workers.make_optimizer("agn", getter, sgd(0.5), period=2)
    optimizer.apply_gradients([(w, w)])
    [total] = [v for v in gpuopt.global_variables() if v.name == "grad_variable/w"]
    assert (w.numpy().tolist(), total.numpy().tolist()) == ([0.5, 0.5], [1, 1])


@every_kind
def test_a_run_goes_on_from_a_checkpoint_in_the_middle_of_a_period(
    kind: str, tmp_path: Path
) -> None:
    def train(communicator: Communicator) -> None:
        getter = workers.make_getter(kind, communicator)
        w = getter.variable(np.zeros((3, 2)), name="w")
        optimizer = workers.make_optimizer(kind, getter, gpuopt.AdamOptimizer(0.1))
        step = Variable(0, name=getter.name_here("step"), trainable=False, dtype=np.int64)
        slots = lambda: [optimizer.get_slot(w, "m"), optimizer.get_slot(getter.center(w), "m")]  # noqa: E731
        mine = [v for v in gpuopt.global_variables() if v is step or v is w]
        rng = np.random.default_rng(communicator.rank)
        gradients = rng.standard_normal((9, 3, 2))

        def steps(first: int, last: int) -> None:
            for gradient in gradients[first:last]:
                optimizer.apply_gradients([(gradient, w)], step)

        def everything() -> list[bytes]:
            found = getter.find(w)
            variables = [w, found.center, step, optimizer.local_step, *slots()]
            variables += [] if found.companion is None else [found.companion]
            return [b"" if v is None else v.numpy().tobytes() for v in variables]

        found = getter.find(w)
        state = [*mine, found.center, optimizer.local_step]
        state += [] if found.companion is None else [found.companion]
        saver = gpuopt.Saver(list(dict.fromkeys(state)), optimizers=[optimizer])
        steps(0, 4)
        path = saver.save(tmp_path / f"rank-{communicator.rank}")
        steps(4, 9)
        expected = everything()
        communicator.barrier()
        saver.restore(path)
        steps(4, 9)
        assert everything() == expected

    run(2, train)


@every_kind
def test_the_default_saver_holds_all_there_is(kind: str, tmp_path: Path) -> None:
    getter = workers.make_getter(kind)
    w = getter.variable(np.zeros(2), name="w")
    optimizer, step = workers.make_optimizer(kind, getter, period=2), new_step()
    optimizer.apply_gradients([(np.ones(2), w)], step)
    path = gpuopt.Saver().save(tmp_path / "model")
    kept = {v: v.numpy() for v in gpuopt.global_variables()}
    for _ in range(3):
        optimizer.apply_gradients([(np.ones(2), w)], step)
    gpuopt.Saver().restore(path)
    for variable, value in kept.items():
        np.testing.assert_array_equal(variable.numpy(), value, variable.name)


@every_kind
def test_all_begin_anew_from_rank_0s_centers(kind: str) -> None:
    def train(communicator: Communicator) -> Any:
        getter = workers.make_getter(kind, communicator)
        w = getter.variable(np.zeros(2), name="w")
        optimizer = workers.make_optimizer(kind, getter, sgd())
        is_chief, rank = communicator.rank == 0, communicator.rank
        optimizer.apply_gradients([(np.ones(2), w)], new_step())
        getter.center(w).assign(np.full(2, 5.0 + rank))
        hook = optimizer.make_session_run_hook
        with hook() if kind == "model" else hook(is_chief, rank):
            found = getter.find(w)
            companion = None if found.companion is None else found.companion.numpy().tolist()
            return [
                w.numpy().tolist(),
                found.center.numpy().tolist(),
                companion,
                int(optimizer.local_step),
            ]

    companion = {"model": None, "agn": [0, 0]}.get(kind, [5, 5])
    assert run(2, train) == [[[5, 5], [5, 5], companion, 0]] * 2


def test_the_swapping_saver_holds_centers_as_weights(tmp_path: Path) -> None:
    getter = workers.make_getter("elastic")
    optimizer = workers.make_optimizer("elastic", getter, sgd(), period=1)
    with pytest.raises(RuntimeError, match="the swapping_saver needs variables"):
        optimizer.swapping_saver()
    w, other = getter.variable(np.zeros(2), name="w"), Variable([3.0], name="other")
    optimizer.apply_gradients([(-np.ones(2), w)])
    paths = [
        optimizer.swapping_saver().save(tmp_path / "all"),
        optimizer.swapping_saver([w, other]).save(tmp_path / "listed"),
        optimizer.swapping_saver({"w": w, "raw": np.zeros(2)}).save(tmp_path / "mapped"),
    ]
    assert (w.numpy().tolist(), getter.center(w).numpy().tolist()) == ([0.75] * 2, [0.25] * 2)
    for path in paths:
        w.assign(np.zeros(2))
        gpuopt.Saver({"w": w}).restore(path)
        assert w.numpy().tolist() == [0.25] * 2
        getter.center(w).assign(np.zeros(2))
        optimizer.swapping_saver({"w": w}).restore(path)
        assert getter.center(w).numpy().tolist() == [0.25] * 2


@every_kind
def test_a_worker_that_waits_for_others_does_not_hold_up_a_save(kind: str, tmp_path: Path) -> None:
    saved = threading.Event()

    def train(communicator: Communicator) -> None:
        getter = workers.make_getter(kind, communicator)
        w = getter.variable(np.zeros(2), name="w")
        optimizer = workers.make_optimizer(kind, getter, sgd(), period=1)
        communicator.barrier()
        if communicator.rank == 0:
            # The other worker waits in the exchange, as soon as it is counted.
            while not any(int(v) for v in gpuopt.global_variables() if "step/rep" in v.name):
                saved.wait(0.01)
            gpuopt.Saver([w]).save(tmp_path / "model")
        optimizer.apply_gradients([(np.ones(2), w)], new_step())

    run(2, train)


@pytest.mark.parametrize("order", ["inside", "around"])
def test_moving_averages_follow_the_workers_own_steps(order: str) -> None:
    getter = workers.make_getter("agn")
    w = getter.variable(np.zeros(1), name="w")
    if order == "inside":
        averages = gpuopt.MovingAverageOptimizer(sgd(), 0.5)
        optimizer = workers.make_optimizer("agn", getter, averages, period=2)
    else:
        optimizer = averages = gpuopt.MovingAverageOptimizer(
            workers.make_optimizer("agn", getter, sgd(), period=2), 0.5
        )
    for _ in range(3):
        optimizer.apply_gradients([(-np.ones(1), w)])
    # Steps to 1 and 2, the center's to 1, and a step to 2: averages of 0.5, 1.25 and 1.625.
    average = averages.averages.average(w)
    assert (w.numpy().item(), getter.center(w).numpy().item()) == (2, 1)
    assert average is not None
    assert average.numpy().item() == 1.625
    of_center = averages.averages.average(getter.center(w))
    assert (of_center is None) == (order == "around")


def test_averages_of_a_center_follow_the_steps_of_all_workers() -> None:
    def train(communicator: Communicator) -> list[float]:
        rank = communicator.rank
        getter = workers.make_getter("agn", communicator)
        w = getter.variable(np.zeros(1), name="w")
        v = getter.variable(np.ones(1), name="v")
        inside = gpuopt.MovingAverageOptimizer(sgd(), 0.5)
        around = gpuopt.MultitaskOptimizerWrapper(inside)
        optimizer = workers.make_optimizer("agn", getter, around, period=2)
        # One worker alone trains "v", so that the others must make its center's average to get it.
        pairs = [(np.full(1, rank + 1.0), each) for each in ([w, v] if rank == 1 else [w])]
        for _ in range(4):
            optimizer.apply_gradients(pairs)
        centers = [getter.center(w), getter.center(v)]
        averages = [inside.averages.average(center) for center in centers]
        return [each.numpy().item() for each in (*centers, *averages) if each is not None]

    centers, averages = np.array([0.0, 1.0]), np.array([0.0, 1.0])
    for rank in [0, 1, 2] * 2:
        trained = slice(2) if rank == 1 else slice(1)
        centers[trained] -= rank + 1
        averages[trained] += 0.5 * (centers[trained] - averages[trained])
    assert run(3, train) == [[*centers, *averages]] * 3


FOR_WORKERS: dict[str, Callable[[gpuopt.Optimizer], gpuopt.Optimizer]] = {
    "SyncReplicasOptimizer": lambda inside: gpuopt.SyncReplicasOptimizer(inside, 1),
    "DropStaleGradientOptimizer": lambda inside: gpuopt.DropStaleGradientOptimizer(inside, 1),
    **{
        name: partial(workers.make_optimizer, kind, workers.make_getter(kind))
        for name, kind in (
            ("ElasticAverageOptimizer", "elastic"),
            ("ModelAverageOptimizer", "model"),
            ("AGNOptimizer", "agn"),
        )
    },
}


@pytest.mark.contract
@pytest.mark.parametrize(
    ("outer", "inner"), [*itertools.pairwise([*FOR_WORKERS, *FOR_WORKERS][:6])]
)
def test_of_two_optimizers_for_workers_one_is_not_inside_of_the_other(
    outer: str, inner: str
) -> None:
    """Nor inside of what is inside of it; each in each is in test_nestings.py."""
    inside = gpuopt.MovingAverageOptimizer(FOR_WORKERS[inner](sgd()))
    for each in (inside, inside._inner):
        with pytest.raises(ValueError, match=f"{outer} cannot be around {inner}: both decide"):
            FOR_WORKERS[outer](each)


def test_an_optimizer_inside_that_wants_to_know_the_step_is_told() -> None:
    getter = workers.make_getter("agn")
    w = getter.variable(np.ones(1), name="w")
    told: list[int] = []

    def decay(step: Any) -> Any:
        told.append(int(step))
        return np.float32(1)

    inside = gpuopt.AddSignOptimizer(0.1, sign_decay_fn=decay)
    optimizer = workers.make_optimizer("agn", getter, inside, period=2)
    for _ in range(2):
        optimizer.apply_gradients([(np.ones(1), w)])
    assert told == [0, 1, 2]
