"""Work on several streams that run late, each in any order that CUDA allows."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import pytest
from gpu_streams import new_stream, uploaded, wait_for_gpus

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.backends import backend_for
from gpuopt.backends.cuda import order
from gpuopt.backends.cuda.launcher import Launch
from gpuopt.backends.cuda.page_locked import Landings
from gpuopt.backends.cuda.row_flags import CudaRowFlags
from gpuopt.device import Device
from gpuopt.state.state import State
from gpuopt.step.replica_context import replica_context

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("every_schedule")]


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape or 100, np.float32)


def on_gpu(host: Any, device: int = 0, **options: Any) -> Variable:
    return Variable(host, device=f"gpu:{device}", **options)


def sgd() -> gpuopt.GradientDescentOptimizer:
    return gpuopt.GradientDescentOptimizer(1.0)


def assert_equal(variable: Variable, expected: float) -> None:
    np.testing.assert_array_equal(variable.numpy(), np.full(variable.shape, expected, np.float32))


class Model:
    """A weight and a table, their gradients, and rows that are good and bad: on one GPU."""

    def __init__(self, device: int = 0, **options: Any) -> None:
        self.weight = on_gpu(np.zeros(100, np.float32), device, **options)
        self.table = on_gpu(np.zeros((10, 4), np.float32), device)
        self.gradient = uploaded(ones(), device=device)
        self.values = uploaded(ones(3, 4), device=device)
        self.rows = uploaded(np.arange(3), device=device)
        self.bad_rows = uploaded(np.arange(3) + 9, device=device)
        self.optimizer = sgd()
        wait_for_gpus()

    def dense(self) -> None:
        self.optimizer.apply_gradients([(self.gradient, self.weight)])

    def sparse(self) -> None:
        self.optimizer.apply_gradients([(IndexedSlices(self.values, self.rows), self.table)])

    def bad(self) -> None:
        self.optimizer.apply_gradients([(IndexedSlices(self.values, self.bad_rows), self.table)])


# Updates of the same variables


@pytest.mark.parametrize("second", ["both", "the first"])
def test_updates_are_done_in_the_order_of_their_calls(second: str) -> None:
    """Whichever streams they are on, and whichever other variables are updated with them."""
    a, b = new_stream(), new_stream()
    both = [on_gpu(np.zeros(100, np.float32)) for _ in range(2)]
    gradients = [uploaded(number * ones()) for number in (1, 10, 100)]
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
    wait_for_gpus()
    for stream, gradient, updated in zip(
        (a, b, a), gradients, (both, both if second == "both" else both[:1], both), strict=True
    ):
        with stream:
            optimizer.apply_gradients([(gradient, variable) for variable in updated])
    assert_equal(both[0], -(1 + 10.5 + 105.25))
    assert_equal(both[1], -(1 + 10.5 + 105.25) if second == "both" else -(1 + 100.5))


@pytest.mark.parametrize("is_sparse", [False, True])
def test_an_update_that_is_interrupted_after_its_last_launch_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, is_sparse: bool
) -> None:
    a, b = new_stream(), new_stream()
    table = on_gpu(np.zeros((10, 4), np.float32))
    gradient = uploaded(ones(10, 4))
    given = IndexedSlices(gradient, uploaded(np.arange(10))) if is_sparse else gradient
    optimizer = sgd()
    wait_for_gpus()
    start, num_started, last = Launch.start, 0, 0

    def interrupted(launch: Launch) -> None:
        nonlocal num_started
        start(launch)
        num_started += 1
        if num_started == last:
            raise KeyboardInterrupt

    monkeypatch.setattr(Launch, "start", interrupted)
    with a:
        optimizer.apply_gradients([(given, table)])
        last = 2 * num_started
        with pytest.raises(KeyboardInterrupt):
            optimizer.apply_gradients([(given, table)])
    with b:
        table.assign(gradient)
    assert_equal(table, 1)


def test_a_stand_in_is_not_written_by_what_had_its_memory_before() -> None:
    """It is allocated by a step on one stream that fails, and used by a step on another."""
    a, b = new_stream(), new_stream()
    weight = Variable(uploaded(np.zeros((100, 2), np.float32))[:, 0], copy=False)
    gradient = uploaded(ones())
    is_failing = True

    def rate() -> float:
        if is_failing:
            raise ValueError("planted")
        return 1.0

    optimizer = gpuopt.GradientDescentOptimizer(rate)
    wait_for_gpus()
    with a:
        backend_for(Device("gpu", 0)).xp.full(100, 7, np.float32)  # freed at once
        with pytest.raises(ValueError, match="planted"):
            optimizer.apply_gradients([(gradient, weight)])
    is_failing = False
    with b:
        optimizer.apply_gradients([(gradient, weight)])
    assert_equal(weight, -1)


def test_an_array_is_read_whole_while_its_first_step_is_enqueued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by a thread, which needs no lock to read, while the step's kernel is compiled."""
    a, b = new_stream(), new_stream()
    gradient, optimizer = uploaded(ones()), sgd()
    wait_for_gpus()
    with a:
        variable = on_gpu(5 * ones())
    from gpuopt.backends.cuda.cupy_launcher import CupyLauncher

    bind, found = CupyLauncher.bind, []

    def reading(launcher: CupyLauncher, *arguments: Any, **named: Any) -> Launch:
        with b:
            found.append(variable.value() + 0)
        return bind(launcher, *arguments, **named)

    monkeypatch.setattr(CupyLauncher, "bind", reading)
    with a:
        optimizer.apply_gradients([(gradient, variable)])
    b.synchronize()
    assert set(found[0].get().tolist()) <= {4.0, 5.0}


def test_a_call_after_two_calls_at_once_comes_after_both() -> None:
    """One thread's step comes in the middle of another's assignment: theirs may be in any order."""
    a, b, c = (new_stream() for _ in range(3))
    variable, other, optimizer = on_gpu(0 * ones()), on_gpu(0 * ones()), sgd()
    gradient, ten = uploaded(ones()), uploaded(10 * ones())
    wait_for_gpus()

    def step(stream: Any) -> None:
        with stream:
            optimizer.apply_gradients([(gradient, variable), (gradient, other)])

    step(b)
    with a, backend_for(Device("gpu", 0)).enter_update(variable.identity):
        variable.storage[...] = ten
        in_the_middle = threading.Thread(target=step, args=(b,))
        in_the_middle.start()
        in_the_middle.join()
    step(c)
    assert set(variable.numpy().tolist()) <= {9.0, 8.0}
    assert_equal(other, -3)


@pytest.mark.parametrize("is_step", [False, True])
def test_a_call_that_is_interrupted_as_it_begins_forgets_no_update(
    monkeypatch: pytest.MonkeyPatch, is_step: bool
) -> None:
    a, b, c = new_stream(), new_stream(), new_stream()
    first, second, optimizer = on_gpu(0 * ones()), on_gpu(0 * ones()), sgd()
    gradient, ten = uploaded(ones()), uploaded(10 * ones())
    wait_for_gpus()
    for stream in (a, b):
        with stream:
            optimizer.apply_gradients([(gradient, first), (gradient, second)])
    wait_for_gpus()
    with a:
        for _ in range(2):
            optimizer.apply_gradients([(gradient, first), (gradient, second)])

    def interrupted(event: Any, what: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, b:
        patched.setattr(order, "wait_for_event", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.apply_gradients([(ten, first)]) if is_step else first.assign(ten)
    optimizer.accept_unfinished_step()
    with c:
        optimizer.apply_gradients([(ten, first)])
    assert_equal(first, -14)


def test_the_powers_of_beta_can_be_read_on_every_stream() -> None:
    a, b = new_stream(), new_stream()
    variable, gradient, optimizer = on_gpu(ones()), uploaded(ones()), gpuopt.AdamOptimizer()
    optimizer.apply_gradients([(gradient, variable)])
    wait_for_gpus()
    power = optimizer.state.others()["beta1_power"]
    found = []
    for stream in (a, b):
        with stream:
            found.append(power + 0)
    for stream, each in zip((a, b), found, strict=True):
        assert each.get(stream=stream) == pytest.approx(0.81)


def test_the_norm_of_a_step_can_be_read_on_every_stream() -> None:
    a, b = new_stream(), new_stream()
    variable, gradient = on_gpu(ones()), uploaded(ones())
    optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_norm=1.0)
    wait_for_gpus()
    with a:
        optimizer.apply_gradients([(gradient, variable)])
    with b:
        norm = optimizer.global_norm
    assert norm.get(stream=b) == 10


# Flags of rows


def test_a_flag_is_zero_on_every_stream_from_the_first_sparse_call_on() -> None:
    a, b = new_stream(), new_stream()
    model = Model()
    junk = uploaded(np.full(64, 7, np.uint64), a)
    wait_for_gpus()
    del junk  # the flag may get its memory
    with a:
        model.sparse()
    with b:
        model.dense()
    assert_equal(model.weight, -1)


def test_a_call_is_not_lost_by_a_bad_row_of_a_later_call_on_another_stream() -> None:
    a, b = new_stream(), new_stream()
    model = Model()
    model.sparse()
    with a:
        model.dense()
    with b:
        model.bad()
    with pytest.raises(IndexError, match="row"):
        model.optimizer.check()
    assert_equal(model.weight, -1)


@pytest.mark.parametrize("kind", ["dense", "sparse", "dense after sparse"])
def test_the_first_call_after_an_error_is_not_lost_on_another_stream(kind: str) -> None:
    a, b = new_stream(), new_stream()
    model = Model()
    with a:
        model.bad()
        with pytest.raises(IndexError):
            model.optimizer.check()
        if kind == "dense after sparse":
            model.sparse()
    with b:
        model.sparse() if kind == "sparse" else model.dense()
    if kind == "sparse":
        assert model.table.numpy()[:4, 0].tolist() == [-1, -1, -1, 0]
    else:
        assert_equal(model.weight, -1)


def test_a_call_on_another_stream_after_a_bad_one_is_refused() -> None:
    a, b = new_stream(), new_stream()
    model = Model()
    model.sparse()
    model.optimizer.check()
    with a:
        model.bad()
    with b:
        model.dense()
    with pytest.raises(IndexError, match="the 1 calls since"):
        model.optimizer.check()
    assert_equal(model.weight, 0)
    model.dense()
    assert_equal(model.weight, -1)


def test_the_flag_of_calls_without_sparse_gradients_is_zero_on_every_stream() -> None:
    from gpuopt.backends.cuda.backend import CudaBackend
    from gpuopt.backends.cuda.cupy_launcher import CupyLauncher
    from gpuopt.device import Device
    from gpuopt.optimizers.gradient_descent import gradient_descent

    a, b = new_stream(), new_stream()
    var, gradient = uploaded(np.zeros(100, np.float32)), uploaded(ones())
    junk = uploaded(np.full(64, 3, np.uint64), a)
    wait_for_gpus()
    with a:
        del junk
        backend = CudaBackend(Device("gpu", 0), CupyLauncher(0))
    with b:
        plan = backend.plan_dense([gpuopt.backends.Target(var, [])])
        scalars = {"learning_rate": np.float32(1)}
        backend.apply_dense(gradient_descent, plan, [gradient], [scalars])
    b.synchronize()
    np.testing.assert_array_equal(var.get(), -ones())


def test_a_refused_call_with_a_constraint_writes_nothing() -> None:
    model = Model(constraint=lambda array: array * 0 + 5)
    model.bad()
    with pytest.raises(IndexError, match="row"):
        model.dense()
    assert_equal(model.weight, 0)


@pytest.mark.gpus(2)
def test_a_value_is_not_read_before_its_bad_row_is_found_though_another_gpu_is_behind() -> None:
    models = [Model(device) for device in (0, 1)]
    models[1].optimizer = models[0].optimizer
    models[0].sparse()
    models[1].bad()
    with pytest.raises(IndexError, match="gpu:1"):
        models[1].table.numpy()
    assert models[0].table.numpy()[2].tolist() == [-1] * 4
    assert_equal(models[1].table, 0)


@pytest.mark.parametrize("bad_gpu", [0, 1])
@pytest.mark.gpus(2)
def test_a_bad_row_on_one_gpu_refuses_the_call_on_both(bad_gpu: int) -> None:
    models = [Model(device) for device in (0, 1)]
    tables = [model.table for model in models]
    optimizer = gpuopt.AdagradOptimizer(1.0, initial_accumulator_value=3.0)
    good = [IndexedSlices(model.values, model.rows) for model in models]
    given = list(good)
    given[bad_gpu] = IndexedSlices(models[bad_gpu].values, models[bad_gpu].bad_rows)
    optimizer.apply_gradients(zip(given, tables, strict=True))
    with pytest.raises(IndexError, match=f"gpu:{bad_gpu}"):
        optimizer.check()
    for table in tables:
        assert optimizer.get_slot(table, "accumulator") is None
        assert not table.numpy().any()
    optimizer.apply_gradients(zip(good, tables, strict=True))
    optimizer.check()
    for table in tables:
        np.testing.assert_allclose(table.numpy()[:4, 0], [-0.5, -0.5, -0.5, 0])


def test_the_undoing_of_refused_calls_goes_on_after_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, step = Model(), Variable(0)
    slices = {
        rows: IndexedSlices(model.values, getattr(model, rows)) for rows in ("rows", "bad_rows")
    }
    for rows in ("rows", "bad_rows", "rows"):
        model.optimizer.apply_gradients([(slices[rows], model.table)], step)
    assert int(step) == 3

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    for owner, name in ((CudaRowFlags, "clear"), (State, "forget")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                model.optimizer.check()
    with pytest.raises(IndexError, match="row 10"):
        model.optimizer.check()
    assert int(step) == 1
    model.optimizer.apply_gradients([(slices["rows"], model.table)], step)
    model.optimizer.check()
    assert int(step) == 2
    np.testing.assert_array_equal(model.table.numpy()[:4, 0], [-2, -2, -2, 0])


@pytest.mark.parametrize("waits", [False, True])
def test_a_refused_call_leaves_no_slots_and_no_count(waits: bool) -> None:
    model = Model(constraint=(lambda array: array) if waits else None)
    optimizer = gpuopt.AdamOptimizer(0.1)
    step = Variable(0)
    before = optimizer.state_dict({"table": model.table, "weight": model.weight})
    bad = IndexedSlices(model.values, model.bad_rows)

    def steps() -> None:
        optimizer.apply_gradients([(bad, model.table), (model.gradient, model.weight)], step)
        optimizer.apply_gradients([(model.gradient, model.weight)], step)
        optimizer.check()

    with pytest.raises(IndexError):
        steps()
    assert int(step) == 0
    assert optimizer.variables() == []
    optimizer.load_state_dict(before, {"table": model.table, "weight": model.weight})
    good = IndexedSlices(model.values, model.rows)
    optimizer.apply_gradients([(good, model.table)], step)
    np.testing.assert_allclose(model.table.numpy()[:4, 0], [-0.1, -0.1, -0.1, 0], rtol=1e-5)


def test_restored_slots_wait_again_after_a_refused_call() -> None:
    model = Model()
    trained = gpuopt.AdagradOptimizer(1.0)
    trained.apply_gradients([(IndexedSlices(model.values, model.rows), model.table)])
    state = trained.state_dict({"later": model.table})
    optimizer = gpuopt.AdagradOptimizer(1.0)
    optimizer.load_state_dict(state, {})
    later = on_gpu(np.zeros((10, 4), np.float32), name="later")
    optimizer.apply_gradients([(IndexedSlices(model.values, model.bad_rows), later)])
    with pytest.raises(IndexError):
        optimizer.check()
    optimizer.apply_gradients([(IndexedSlices(model.values, model.rows), later)])
    accumulator = optimizer.get_slot(later, "accumulator")
    assert accumulator is not None
    np.testing.assert_allclose(accumulator.numpy()[:4, 0], [2.1, 2.1, 2.1, 0.1], rtol=1e-6)


@pytest.mark.parametrize("touches_all_rows", [False, True])
def test_calls_of_two_threads_are_refused_as_a_whole_or_not_at_all(touches_all_rows: bool) -> None:
    """The rows of one thread are bad now and then; the other's are good, with all rows touched."""
    tables = [on_gpu(np.zeros((10, 4), np.float32)) for _ in range(2)]
    optimizer: gpuopt.Optimizer = gpuopt.GradientDescentOptimizer(1.0)
    if touches_all_rows:  # other rows decay
        optimizer = gpuopt.AdamOptimizer(beta1=0.5, beta2=0.5)
    values = uploaded(np.ones((3, 4), np.float32))
    rows, bad_rows = uploaded(np.array([0, 1, 1])), uploaded(np.array([0, 1, 99]))
    wait_for_gpus()
    counts, errors = [Variable(0), Variable(0)], []

    def work(number: int) -> None:
        try:
            with new_stream():
                for turn in range(20):
                    is_bad = number == 1 and turn % 4 == 3
                    given = IndexedSlices(values, bad_rows if is_bad else rows)
                    try:
                        optimizer.apply_gradients([(given, tables[number])], counts[number])
                    except IndexError:
                        continue
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with contextlib.suppress(IndexError):
        optimizer.check()
    for table, count in zip(tables, counts, strict=True):
        num_steps = int(count)
        if not touches_all_rows:
            assert table.numpy()[:, 0].tolist() == [-num_steps, -2 * num_steps, *[0] * 8]
            continue
        m = optimizer.get_slot(table, "m")
        assert m is not None
        expected = [1 - 0.5**num_steps, 2 * (1 - 0.5**num_steps), *[0.0] * 8]
        np.testing.assert_allclose(m.numpy()[:, 0], expected, rtol=1e-6)


# Reading a Variable


def test_assigning_a_variable_waits_for_its_update_and_the_next_update_for_it() -> None:
    a, b = new_stream(), new_stream()
    source, target, gradient = on_gpu(ones()), on_gpu(ones()), uploaded(ones())
    wait_for_gpus()
    with a:
        sgd().apply_gradients([(gradient, source)])
    with b:
        target.assign(source)
        target.assign_add(source)
        target += source
        target[:50] = source[:50]
        np.add(target, source, out=target)
    with a:
        sgd().apply_gradients([(gradient, source)])
    assert_equal(target, 0)
    with b:
        target.assign(source)
    with a:
        source.assign(ones())
    assert_equal(target, -1)


def test_a_variable_made_from_a_variable_waits_for_its_update() -> None:
    a, b = new_stream(), new_stream()
    source, gradient = on_gpu(ones()), uploaded(ones())
    wait_for_gpus()
    with a:
        sgd().apply_gradients([(gradient, source)])
    with b:
        copy = Variable(source)
    with a:
        sgd().apply_gradients([(gradient, source)])
    assert_equal(copy, 0)
    assert_equal(source, -1)


def test_a_gradient_that_is_a_variable_is_waited_for_and_waits() -> None:
    a, b = new_stream(), new_stream()
    source, target, gradient = on_gpu(ones()), on_gpu(ones()), uploaded(ones())
    optimizer = sgd()
    wait_for_gpus()
    with a:
        optimizer.apply_gradients([(gradient, source)])
    with b:
        optimizer.apply_gradients([(source, target)])
    with a:
        optimizer.apply_gradients([(gradient, source)])
    assert_equal(target, 1)
    assert_equal(source, -1)


def test_a_moving_average_waits_for_updates_and_updates_wait_for_it() -> None:
    a, b = new_stream(), new_stream()
    variable, gradient, optimizer = on_gpu(ones()), uploaded(ones()), sgd()
    average = gpuopt.ExponentialMovingAverage(0.5)
    average.track([variable])
    wait_for_gpus()
    with a:
        optimizer.apply_gradients([(gradient, variable)])
    with b:
        average.apply([variable])
        variable.assign(5 * ones())
        average.apply([variable])
    with a:
        optimizer.apply_gradients([(gradient, variable)])
        optimizer.apply_gradients([(gradient, variable)])
    shadow = average.average(variable)
    assert shadow is not None
    assert_equal(shadow, 2.75)


def test_a_loss_waits_for_the_update_of_a_variable_that_it_reads() -> None:
    pytest.importorskip("autograd")
    a, b = new_stream(), new_stream()
    variable, gradient = on_gpu(ones()), uploaded(ones())
    wait_for_gpus()
    with a:
        sgd().apply_gradients([(gradient, variable)])
    with b:
        [(found, _)] = sgd().compute_gradients(lambda: (variable * variable).sum(), [variable])
    b.synchronize()
    np.testing.assert_array_equal(found.get(), 0 * ones())


READINGS = {
    "v + w": lambda v: v + v,
    "1 + v": lambda v: 1 + v,
    "-v": lambda v: -v,
    "v < 1": lambda v: v < 1,
    "v[rows]": lambda v: v[[3, 1]],
    "v.sum()": lambda v: v.sum(),
    "np.sqrt(v)": np.sqrt,
    "np.concatenate([v, v])": lambda v: np.concatenate([v, v]),
}


@pytest.mark.parametrize("name", READINGS)
def test_arithmetic_waits_for_an_update_and_the_next_update_for_it(name: str) -> None:
    a, b = new_stream(), new_stream()
    variable, gradient, optimizer = on_gpu(ones()), uploaded(ones()), sgd()
    wait_for_gpus()
    with a:
        optimizer.apply_gradients([(gradient, variable)])
    with b:
        found = READINGS[name](variable)
    with a:
        variable.assign_add(gradient)
        optimizer.apply_gradients([(gradient, variable)])
        variable.assign(5 * ones())
    b.synchronize()
    np.testing.assert_array_equal(found.get(), READINGS[name](0 * ones()))


@pytest.mark.parametrize("name", READINGS)
def test_the_first_update_of_an_array_waits_for_arithmetic(name: str) -> None:
    a, b = new_stream(), new_stream()
    variable = Variable(uploaded(ones()), copy=False)
    gradient, optimizer = uploaded(ones()), sgd()
    wait_for_gpus()
    with b:
        found = READINGS[name](variable)
    with a:
        optimizer.apply_gradients([(gradient, variable)])
    b.synchronize()
    np.testing.assert_array_equal(found.get(), READINGS[name](ones()))


def test_an_update_waits_for_a_loss_that_reads_its_variable() -> None:
    pytest.importorskip("autograd")
    a, b = new_stream(), new_stream()
    variable, constant = on_gpu(ones()), on_gpu(ones())
    gradient, optimizer = uploaded(ones()), sgd()
    wait_for_gpus()
    with a:
        optimizer.apply_gradients([(gradient, variable), (gradient, constant)])
    with b:
        [(found, _)] = sgd().compute_gradients(
            lambda: ((variable + 1) * (constant + 2) * constant).sum(), [variable]
        )
    with a:
        constant.assign(5 * ones())
    b.synchronize()
    np.testing.assert_array_equal(found.get(), 0 * ones())


@pytest.mark.gpus(2)
def test_values_go_from_one_gpu_to_the_other_in_order() -> None:
    a, b = new_stream(0), new_stream(1)
    here, there = on_gpu(ones(), 0), on_gpu(ones(), 1)
    gradient = uploaded(ones(), device=1)
    wait_for_gpus()
    import cupy

    with cupy.cuda.Device(1), b:
        sgd().apply_gradients([(gradient, there)])
        with cupy.cuda.Device(0), a:
            here.assign(there)
        sgd().apply_gradients([(gradient, there)])
    assert_equal(here, 0)
    assert_equal(there, -1)


# Replicas


@pytest.mark.parametrize("devices", [(0, 0), pytest.param((0, 1), marks=pytest.mark.gpus(2))])
def test_replicas_may_overwrite_their_gradients_after_the_step(devices: tuple[int, ...]) -> None:
    import cupy

    streams = [new_stream(device) for device in devices]
    strategy = gpuopt.MirroredStrategy([f"gpu:{device}" for device in devices])
    variable = strategy.variable(np.zeros(100, np.float32))
    gradients = [uploaded(ones(), s, d) for s, d in zip(streams, devices, strict=True)]
    optimizer = sgd()
    wait_for_gpus()

    def replica() -> None:
        place = replica_context().replica_id
        with cupy.cuda.Device(devices[place]), streams[place]:
            for _ in range(2):
                gradients[place].fill(1)
                optimizer.apply_gradients([(gradients[place], variable.local)])
                gradients[place].fill(999)

    strategy.run(replica)
    assert_equal(variable.replicas[0], -4)
    assert_equal(variable.replicas[1], -4)


# Capture into a graph


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_step_in_a_capture_is_refused_and_leaves_nothing_behind(is_warm: bool) -> None:
    import cupy

    model, stream = Model(), new_stream()
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
    step = Variable(0)
    with stream:
        if is_warm:
            optimizer.apply_gradients([(uploaded(0 * ones()), model.weight)], step)
            step.assign(0)
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="gpu:0 is being captured"):
            optimizer.apply_gradients([(model.gradient, model.weight)], step)
        cupy.multiply(model.gradient, 2, out=model.gradient)
        graph = stream.end_capture()
        assert int(step) == 0
        assert len(optimizer.variables()) == is_warm
        graph.launch(stream)
        optimizer.apply_gradients([(model.gradient, model.weight)], step)
    optimizer.apply_gradients([(model.gradient, model.weight)], step)
    assert_equal(model.weight, -5)
    assert int(step) == 2


@pytest.mark.parametrize("in_use", ["one stream", "two streams"])
def test_variables_can_be_read_in_a_capture_and_not_written(in_use: str) -> None:
    import cupy

    trains, captures = new_stream(), new_stream()
    if in_use == "one stream":
        captures = trains
    with trains:
        model = Model()
        model.dense()
    other = on_gpu(np.zeros(100, np.float32))
    wait_for_gpus()
    with captures:
        out = cupy.zeros(100, np.float32)
        captures.begin_capture()
        cupy.multiply(model.weight.value(), 3, out=out)
        for write in (
            lambda: other.assign(model.gradient),
            lambda: other.assign_add(model.weight),
            lambda: Variable(model.gradient),
        ):
            with pytest.raises(RuntimeError, match="gpu:0 is being captured"):
                write()
        graph = captures.end_capture()
    with trains:
        other.assign(model.gradient)
        model.dense()
    wait_for_gpus()
    graph.launch(captures)
    captures.synchronize()
    np.testing.assert_array_equal(out.get(), -6 * ones())
    assert_equal(other, 1)


# Messages to other processes


@pytest.mark.parametrize("shape", [(), (3,), (5,), (0, 4), (200, 500)])
def test_what_is_staged_for_a_message_is_complete_and_page_locked(shape: tuple[int, ...]) -> None:
    import cupy

    host = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    backend = backend_for(Device.parse("gpu:0"))
    with new_stream():
        array = uploaded(host)
        array += 1
        staged = [backend.stage(each) for each in (array, array.T)]
        array -= 1  # comes too late for it
    for each, expected in zip(staged, (host + 1, (host + 1).T), strict=True):
        np.testing.assert_array_equal(each, expected)
        assert each.flags.c_contiguous
        if each.nbytes > Landings.SIZE:
            kind = cupy.cuda.runtime.pointerGetAttributes(each.ctypes.data).type
            assert kind == cupy.cuda.runtime.memoryTypeHost


def test_small_arrays_that_are_staged_stay_as_they_are_while_others_are_copied() -> None:
    backend = backend_for(Device.parse("gpu:0"))
    with new_stream():
        array = uploaded(np.arange(3, dtype=np.float32))
        staged = backend.stage(array)
        array -= 7
        for _ in range(300):  # small copies share page-locked memory
            backend.stage(array)
    np.testing.assert_array_equal(staged, [0, 1, 2])
