"""Replicas of a mirrored strategy train as one, stay equal, and never hang."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from naive_communicator import NaiveGroup

import gpuopt
from gpuopt import (
    DeadlineExceededError,
    IndexedSlices,
    MirroredStrategy,
    Variable,
    WorkerFailedError,
    embedding_lookup,
)
from gpuopt.distributed import PerReplica
from gpuopt.step.replica_context import replica_context

SHORT_S = 0.3


def over_the_protocol(devices: list[str]) -> MirroredStrategy:
    """Makes a strategy over communicators with nothing but the protocol."""
    return MirroredStrategy(devices, group=NaiveGroup(len(devices), 20.0))


def new_step() -> Variable:
    return Variable(0, name="global_step", trainable=False, dtype=np.int64)


def sgd() -> gpuopt.Optimizer:
    return gpuopt.GradientDescentOptimizer(1.0)


def rank() -> int:
    return replica_context().replica_id


@pytest.mark.value
@pytest.mark.parametrize(
    ("make_strategy", "replicas", "make"),
    [
        (MirroredStrategy, 1, lambda: gpuopt.MomentumOptimizer(0.1, 0.9)),
        (MirroredStrategy, 3, lambda: gpuopt.AdamOptimizer(0.1)),
        (over_the_protocol, 3, sgd),
    ],
)
def test_replicas_train_as_one_would_with_all_data(
    make_strategy: Any, replicas: int, make: Any
) -> None:
    rng = np.random.default_rng(0)
    ids, labels = rng.integers(0, 5, 6), rng.standard_normal(6).astype(np.float32)
    weights = []
    for number in (1, replicas):
        strategy = make_strategy(["cpu"] * number)
        table = strategy.variable(np.ones((5, 1), np.float32), name="table")
        bias = strategy.variable(np.zeros(1, np.float32), name="bias")
        step, optimizer = new_step(), make()

        def train(
            ids: Any,
            labels: Any,
            table: Any = table,
            bias: Any = bias,
            step: Any = step,
            optimizer: Any = optimizer,
        ) -> None:
            def loss() -> Any:
                rows = embedding_lookup(table.local, ids)[:, 0]
                return ((rows + bias.local - labels) ** 2).mean()

            optimizer.minimize(loss, step, [table.local, bias.local])

        parts = PerReplica(np.split(ids, number)), PerReplica(np.split(labels, number))
        for _ in range(4):
            strategy.run(train, parts)
        for variable in (table, bias):
            copies = [copy.numpy().tobytes() for copy in variable.replicas]
            assert len(set(copies)) == 1
        assert int(step) == 4
        weights.append(np.concatenate([table.numpy().ravel(), bias.numpy()]))
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-5, atol=1e-6)


def test_each_copy_has_slots_and_the_optimizers_own_variables_are_shared() -> None:
    strategy = MirroredStrategy(["cpu", "cpu"])
    w = strategy.variable([1.0, 2.0], name="w")
    assert [copy.name for copy in w.replicas] == ["w", "w/replica_1"]
    rates: list[float] = []
    optimizer = gpuopt.AdamOptimizer(lambda: rates.append(0.1) or 0.1)  # type: ignore[func-returns-value]
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(2, np.float32), w)]))
    assert len(rates) == 1
    first, second = (optimizer.get_slot(copy, "m") for copy in w.replicas)
    assert first is not second
    assert first.numpy().tolist() == second.numpy().tolist()
    names = [variable.name for variable in optimizer.variables()]
    assert names[:2] == ["beta1_power", "beta2_power"]
    assert optimizer.variables()[0].numpy() == np.float32(0.9) * np.float32(0.9)


@pytest.mark.value
def test_gradients_are_summed_and_none_is_left_out() -> None:
    strategy = MirroredStrategy(["cpu"] * 3)
    w, idle = strategy.variable([0.0, 0.0], name="w"), strategy.variable([1.0], name="idle")
    optimizer, step = sgd(), new_step()

    def train() -> float:
        mine = np.full(2, rank() + 1, np.float32)
        optimizer.apply_gradients([(mine, w.local), (None, idle.local)], step)
        return float(w.local[0])

    assert strategy.run(train).values == (-6, -6, -6)
    assert (idle.numpy().tolist(), int(step)) == ([1], 1)


def test_skipping_the_aggregation_updates_each_copy_by_its_own_gradient() -> None:
    strategy = MirroredStrategy(["cpu", "cpu"])
    w, optimizer = strategy.variable([0.0], name="w"), sgd()

    def train() -> None:
        mine = np.full(1, rank() + 1, np.float32)
        optimizer.apply_gradients([(mine, w.local)], skip_gradients_aggregation=True)

    strategy.run(train)
    assert [float(copy[0]) for copy in w.replicas] == [-1, -2]


def test_the_cross_replica_context_wants_distributed_apply() -> None:
    strategy = MirroredStrategy(["cpu", "cpu"])
    w, table = strategy.variable([0.0], name="w"), strategy.variable(np.zeros((3, 1)), name="t")
    optimizer, step = sgd(), new_step()
    dense = PerReplica(np.full(1, value, np.float32) for value in (1, 2))
    rows = PerReplica(IndexedSlices(np.ones((1, 1)), [row]) for row in (0, 2))
    with strategy.scope():
        with pytest.raises(RuntimeError, match=r"Use `_distributed_apply\(\)` instead"):
            optimizer.apply_gradients([(np.ones(1, np.float32), w.local)], step)
        pairs = [(dense, w), (None, w), (rows, table)]
        optimizer._distributed_apply(strategy, pairs, step)
    assert [float(copy[0]) for copy in w.replicas] == [-3, -3]
    assert [copy.numpy().ravel().tolist() for copy in table.replicas] == [[-1, 0, -1]] * 2
    assert int(step) == 1
    optimizer.apply_gradients([(np.ones(1, np.float32), w.replicas[0])])


@pytest.mark.value
def test_batch_reduce_to_sums_for_every_replica() -> None:
    strategy = MirroredStrategy(["cpu", "cpu"])
    w = strategy.variable([0.0, 0.0], name="w")
    values = PerReplica([np.float32([1, 2]), np.float32([3, 4])])
    (reduced,) = strategy.batch_reduce_to("SUM", [(values, w)])
    assert [value.tolist() for value in reduced.values] == [[4, 6], [4, 6]]
    assert values.values[0].tolist() == [1, 2]
    with pytest.raises(ValueError, match='op must be "SUM"'):
        strategy.batch_reduce_to("MEAN", [(values, w)])
    with pytest.raises(ValueError, match='gradients for "w" must be a PerReplica of 2'):
        strategy.batch_reduce_to("SUM", [(PerReplica([np.ones(2)]), w)])
    with pytest.raises(TypeError, match="expected a MirroredVariable"):
        strategy.batch_reduce_to("SUM", [(values, w.local)])


def test_replicas_may_reduce_for_themselves() -> None:
    strategy = MirroredStrategy(["cpu"] * 3)
    totals = strategy.run(lambda: strategy.communicator.all_reduce(np.array([rank()])).tolist())
    assert totals.values == ([3], [3], [3])
    with pytest.raises(RuntimeError, match=r"only in MirroredStrategy\.run"):
        _ = strategy.communicator


def test_assigning_reaches_every_copy_and_replicas_see_their_own() -> None:
    strategy = MirroredStrategy(["cpu", "cpu"])
    w = strategy.variable([1.0], name="w")
    w.assign([5.0])
    assert [float(copy[0]) for copy in w.replicas] == [5, 5]
    seen = strategy.run(lambda a, b: (w.local.name, a, b), (PerReplica([1, 2]),), {"b": 3})
    assert seen.values == (("w", 1, 3), ("w/replica_1", 2, 3))
    assert replica_context().strategy is None


# Nobody hangs.


def test_a_replica_that_fails_releases_the_others_and_its_error_is_raised() -> None:
    strategy = MirroredStrategy(["cpu", "cpu"])
    w, optimizer = strategy.variable([0.0], name="w"), sgd()
    noticed: list[Exception] = []

    def train() -> None:
        if rank() == 1:
            raise KeyError("lost")
        try:
            optimizer.apply_gradients([(np.ones(1, np.float32), w.local)])
        except WorkerFailedError as error:
            noticed.append(error)
            raise

    started = time.monotonic()
    with pytest.raises(KeyError, match="lost"):
        strategy.run(train)
    assert time.monotonic() - started < 10  # the deadline is 60 s
    assert "rank 1 has failed: KeyError: 'lost'" in str(noticed[0])
    assert w.numpy().tolist() == [0]


def test_a_replica_that_never_comes_is_named_in_time() -> None:
    strategy = MirroredStrategy(["cpu", "cpu"], timeout_s=SHORT_S)
    w, optimizer, release = strategy.variable([0.0], name="late"), sgd(), threading.Event()

    def train() -> None:
        if rank() == 1:
            late.append(threading.current_thread())
            release.wait(20)
        optimizer.apply_gradients([(np.ones(1, np.float32), w.local)])

    late: list[threading.Thread] = []
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"rank 1 did not come within 0\.3 s"):
        strategy.run(train)
    assert time.monotonic() - started < 2 * SHORT_S + 2
    release.set()
    late[0].join(20)  # or its variables would be there in the next test


def test_replicas_that_disagree_are_refused_and_nothing_is_updated() -> None:
    strategy = MirroredStrategy(["cpu", "cpu"])
    a, b = strategy.variable([0.0], name="a"), strategy.variable([0.0], name="b")
    optimizer = sgd()

    def train() -> None:
        optimizer.apply_gradients([(np.ones(1, np.float32), (a, b)[rank()])])

    with pytest.raises(ValueError, match=r"all ranks must make the same call.*'a by.*'b by"):
        strategy.run(train)
    foreign = Variable([0.0], name="foreign")
    for target in (foreign, a.replicas[0]):
        with pytest.raises(ValueError, match="is not this replica's copy"):
            strategy.run(lambda v=target: optimizer.apply_gradients([(np.ones(1, "f4"), v)]))
    assert [v.numpy().tolist() for v in (a, b, foreign)] == [[0], [0], [0]]


def test_replicas_with_optimizers_of_other_classes_are_refused() -> None:
    strategy = MirroredStrategy(["cpu", "cpu"])
    mirrored = strategy.variable(np.ones(2, np.float32), name="w")
    optimizers = [sgd(), gpuopt.AdamOptimizer()]

    def train() -> None:
        optimizers[rank()].apply_gradients([(np.ones(2, np.float32), mirrored.local)])

    with pytest.raises(ValueError, match=r"GradientDescentOptimizer.*AdamOptimizer"):
        strategy.run(train)
    np.testing.assert_array_equal(mirrored.numpy(), [1, 1])


def test_ctrl_c_ends_all_replicas_after_whole_steps() -> None:
    strategy = MirroredStrategy(["cpu", "cpu"])
    w, step = strategy.variable([0.0], name="w"), new_step()
    optimizer = sgd()

    def train() -> None:
        while True:
            optimizer.apply_gradients([(np.ones(1, np.float32), w.local)], step)
            if rank() == 1 and int(step) == 3:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    num_threads = threading.active_count()
    for _ in range(2):
        step.assign(0)
        w.assign([0.0])
        with pytest.raises(KeyboardInterrupt):
            strategy.run(train)
        count = int(step)
        assert count >= 3
        assert [float(copy[0]) for copy in w.replicas] == [-2.0 * count] * 2
        time.sleep(0.05)
        assert (int(step), threading.active_count()) == (count, num_threads)


def test_a_second_ctrl_c_does_not_wait_for_replicas() -> None:
    strategy = MirroredStrategy(["cpu", "cpu"])
    release, sent = threading.Event(), []

    def wait() -> None:
        while rank() == 0 and len(sent) < 2 and not release.is_set():
            sent.append(signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
            time.sleep(0.2)
        release.wait(20)

    with pytest.raises(KeyboardInterrupt):
        strategy.run(wait)
    is_waiting = not release.is_set()
    release.set()
    assert is_waiting
    assert len(sent) == 2


def test_an_update_that_fails_is_the_same_error_in_every_replica() -> None:
    strategy = MirroredStrategy(["cpu"] * 3)
    w = strategy.variable([0.0], name="w")
    optimizer = gpuopt.GradientDescentOptimizer(1.0, on_nonfinite="raise")

    def train() -> list[str]:
        seen = []
        for value in (np.nan if rank() == 2 else 1.0, 1.0):
            try:
                optimizer.apply_gradients([(np.full(1, value, np.float32), w.local)])
                seen.append("updated")
            except FloatingPointError as error:
                seen.append(str(error)[:35])
        return seen

    expected = ['gradient for "w" is not finite: 1 o', "updated"]
    assert strategy.run(train).values == (expected,) * 3
    assert [float(copy[0]) for copy in w.replicas] == [-3] * 3


def test_a_slow_update_does_not_hold_up_the_others_deadline() -> None:
    release = threading.Event()

    class SlowDescent(gpuopt.GradientDescentOptimizer):
        def _prepare(self) -> None:
            assert release.wait(20)
            super()._prepare()

    strategy = MirroredStrategy(["cpu", "cpu"], timeout_s=SHORT_S)
    w, optimizer = strategy.variable([0.0], name="w"), SlowDescent(1.0)

    def train() -> None:
        try:
            optimizer.apply_gradients([(np.ones(1, np.float32), w.local)])
        finally:
            release.set()

    with pytest.raises(
        DeadlineExceededError,
        match=r"^the update of apply_gradients of \w+ with \['w by ndarray'\]: rank 0 did not come",
    ):
        strategy.run(train)


def test_an_optimizers_own_distributed_apply_sees_the_sums_once() -> None:
    class Halving(gpuopt.GradientDescentOptimizer):
        def _distributed_apply(
            self, distribution: Any, grads_and_vars: Any, global_step: Any = None, name: Any = None
        ) -> None:
            assert distribution.num_replicas_in_sync == 2
            with pytest.raises(RuntimeError, match="cross-replica context"):
                self.apply_gradients([])
            sums = distribution.batch_reduce_to("SUM", grads_and_vars)
            halves = [
                (PerReplica(value / 2 for value in summed.values), variable)
                for summed, (_, variable) in zip(sums, grads_and_vars, strict=True)
            ]
            super()._distributed_apply(distribution, halves, global_step, name)

    strategy = MirroredStrategy(["cpu", "cpu"])
    w, optimizer, step = strategy.variable([0.0], name="w"), Halving(1.0), new_step()
    strategy.run(lambda: optimizer.apply_gradients([(np.full(1, 3, np.float32), w.local)], step))
    assert [float(copy[0]) for copy in w.replicas] == [-3, -3]
    assert int(step) == 1


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_apply_gradients_of_a_users_own_sees_each_replicas_gradients_once(
    is_wrapped: bool,
) -> None:
    class Halving(gpuopt.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars: Any, *arguments: Any, **more: Any) -> None:
            halves = [(gradient / 2, variable) for gradient, variable in grads_and_vars]
            super().apply_gradients(halves, *arguments, **more)

    strategy = MirroredStrategy(["cpu", "cpu"])
    w, optimizer, step = strategy.variable([0.0], name="w"), Halving(1.0), new_step()
    around = gpuopt.MovingAverageOptimizer(optimizer, 0.5) if is_wrapped else optimizer
    strategy.run(lambda: around.apply_gradients([(np.full(1, 3, np.float32), w.local)], step))
    assert [float(copy[0]) for copy in w.replicas] == [-3, -3]
    assert int(step) == 1


def test_gradients_of_a_wrong_shape_are_not_summed() -> None:
    strategy = MirroredStrategy(["cpu", "cpu"])
    w = strategy.variable(np.zeros((2, 3)), name="w")
    gradients = PerReplica([np.zeros((2, 3)), np.zeros((3, 2))])
    with pytest.raises(ValueError, match=r'gradient for "w" has shape \(3, 2\); the variable has'):
        strategy.batch_reduce_to("SUM", [(gradients, w)])


def test_a_group_has_a_rank_for_each_device() -> None:
    with pytest.raises(ValueError, match=r"has 3 ranks in this process; .* one for each of 2"):
        MirroredStrategy(["cpu", "cpu"], group=NaiveGroup(3))


def test_a_strategy_needs_devices() -> None:
    with pytest.raises(ValueError, match="at least one device"):
        MirroredStrategy([])
    with pytest.raises(gpuopt.DeviceUnavailableError):
        MirroredStrategy(["cpu", "gpu:99"])


def test_devices_are_a_list() -> None:
    with pytest.raises(TypeError, match=r'devices must be a list, as \["cpu", "cpu"\], got'):
        MirroredStrategy("cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("args", [np.ones(2), PerReplica([1, 2])])
def test_an_argument_alone_is_not_taken_for_all_arguments(args: Any) -> None:
    called = []
    with pytest.raises(TypeError, match=rf"args must be a tuple .*got {type(args).__name__}"):
        MirroredStrategy(["cpu", "cpu"]).run(called.append, args)
    assert not called


def test_a_mirrored_variable_as_a_whole_is_refused_with_a_word_about_its_copies() -> None:
    w = MirroredStrategy(["cpu", "cpu"]).variable(np.zeros(2, np.float32), name="w")
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    with pytest.raises(TypeError, match=r"got MirroredVariable; in a replica, .*variable\.local"):
        optimizer.apply_gradients([(np.ones(2, np.float32), w)])


@pytest.mark.value
def test_uneven_batches_count_by_their_examples() -> None:
    inputs = np.random.default_rng(0).standard_normal((7, 3)).astype(np.float32)
    strategy = MirroredStrategy(["cpu"] * 3)
    w = strategy.variable(np.zeros(3, np.float32), name="w")
    batches = PerReplica([inputs[:1], inputs[1:3], inputs[3:]])

    def train(batch: Any) -> float:
        weight = strategy.weight_of(len(batch))
        sgd().minimize(lambda: weight * ((batch @ w.local - 1) ** 2).mean(), var_list=[w.local])
        return weight

    assert strategy.run(train, (batches,)).values == (3 / 7, 6 / 7, 12 / 7)
    gradient = -2 * inputs.astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(w.numpy(), -gradient, rtol=1e-6)

    for numbers in ([0, 0, 0], [1, -1, 3]):
        with pytest.raises(ValueError, match="weight_of needs numbers of examples"):
            strategy.run(strategy.weight_of, (PerReplica(numbers),))


@pytest.mark.parametrize("is_inside", [False, True])
def test_what_one_rank_alone_calls_is_called_once(is_inside: bool) -> None:
    calls: list[str] = []

    def call() -> str:
        calls.append("once")
        return "result"

    strategy = MirroredStrategy(["cpu"] * 2)
    if is_inside:
        assert strategy.run(lambda: strategy.call_once(call)).values == ("result", "result")
    else:
        assert strategy.call_once(call) == "result"
    assert calls == ["once"]


def test_what_fails_in_one_rank_alone_is_told_to_the_others_and_training_goes_on() -> None:
    strategy = MirroredStrategy(["cpu"] * 2)

    def train() -> tuple[str, int]:
        try:
            strategy.call_once(lambda: 1 / 0)
        except (ZeroDivisionError, WorkerFailedError) as error:
            return f"{type(error).__name__}: {error}", strategy.call_once(lambda: 5)
        return "nothing", 0

    told = "WorkerFailedError: rank 0 has failed in call_once: ZeroDivisionError: division by zero"
    assert strategy.run(train).values == (("ZeroDivisionError: division by zero", 5), (told, 5))


@pytest.mark.value
def test_a_norm_counts_each_gradient_of_several_copies_once() -> None:
    strategy = gpuopt.MirroredStrategy(["cpu", "cpu"])
    v = strategy.variable(np.zeros(2, np.float32), name="v")
    optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_norm=1.0)
    strategy.run(lambda: optimizer.apply_gradients([(np.float32([3, 4]), v)]))
    assert optimizer.global_norm == 10  # of the sum of two replicas
    for copy in v.replicas:
        np.testing.assert_allclose(copy.numpy(), [-0.6, -0.8], rtol=1e-6)
        copy.assign(np.zeros(2, np.float32))
    bounded = gpuopt.GradientDescentOptimizer(1.0, clip_value=1.5)
    strategy.run(lambda: bounded.apply_gradients([(np.float32([3, 4]), v)]))
    assert v.numpy().tolist() == [-1.5, -1.5]
