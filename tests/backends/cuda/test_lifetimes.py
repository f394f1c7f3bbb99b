"""Memory is not used again before work in flight is done with it, and is not kept much longer."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gpu_streams import new_stream, uploaded, wait_for_gpus

import gpuopt
from gpuopt import IndexedSlices, Variable, backends
from gpuopt.backends.cuda import cuda_backend, order
from gpuopt.device import Device
from gpuopt.distributed.reduction import sum_gradients
from gpuopt.step.wide_gradients import unscaled, widened

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("every_schedule")]

# Elements of a variable whose memory counts.
LARGE = 10_000


@pytest.fixture
def cupy() -> Any:
    import cupy

    return cupy


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape or 100, np.float32)


def sgd() -> gpuopt.GradientDescentOptimizer:
    return gpuopt.GradientDescentOptimizer(1.0)


def assert_equal(values: Any, expected: Any) -> None:
    got = values.numpy() if isinstance(values, Variable) else values.get()
    np.testing.assert_array_equal(got, np.broadcast_to(np.float32(expected), got.shape))


# What is freed on the stream that owns it while another one uses it


@pytest.mark.parametrize("step", [None, 2])
def test_a_gradient_is_kept_also_if_only_its_copy_is_read(cupy: Any, step: int | None) -> None:
    a, b = new_stream(), new_stream()
    variable = Variable(np.zeros(100, np.float32), device="gpu:0")
    gradient = uploaded(ones(100 * (step or 1)), a)
    wait_for_gpus()
    with b:
        sgd().apply_gradients([(gradient[::step], variable)])
    del gradient
    with a:
        mine = cupy.full(100 * (step or 1), 300, np.float32)
    assert_equal(variable, -1)
    a.synchronize()
    assert_equal(mine, 300)


def test_a_gradient_is_kept_from_which_a_step_computes_another(cupy: Any) -> None:
    owner, other = new_stream(), new_stream()
    variable, gradient = Variable(ones(), device="gpu:0"), uploaded(ones())
    optimizer = gpuopt.LARSOptimizer(1.0, momentum=0.0)
    wait_for_gpus()
    for stream in (owner, other):
        with stream:
            optimizer.apply_gradients([(gradient, variable)])
    wait_for_gpus()
    before = variable.numpy()
    with owner:
        dropped = uploaded(ones(), owner)
    wait_for_gpus()
    with other:
        optimizer.apply_gradients([(dropped, variable)])
    del dropped
    with owner:
        cupy.full(100, -1, np.float32)  # not a longer one: LARS divides by the length
    wait_for_gpus()
    assert (variable.numpy() < before).all()


@pytest.mark.parametrize("step", [None, 2])
def test_a_sparse_gradient_is_kept_also_if_only_its_copy_is_read(
    cupy: Any, step: int | None
) -> None:
    a, b = new_stream(), new_stream()
    variable = Variable(np.zeros((10, 4), np.float32), device="gpu:0")
    values, rows = uploaded(ones(20, 4), a), uploaded(np.repeat(np.arange(10), 2), a)
    wait_for_gpus()
    optimizer = sgd()
    with b:
        optimizer.apply_gradients([(IndexedSlices(values[::step], rows[::step]), variable)])
    del values, rows
    with a:
        mine = cupy.full((20, 4), 300, np.float32), cupy.full(20, 3, np.int64)
    assert_equal(variable, -1 if step else -2)
    optimizer.check()
    a.synchronize()
    assert_equal(mine[0], 300)


def test_a_gradient_of_a_side_stream_is_kept_on_the_default_stream(cupy: Any) -> None:
    a = new_stream()
    variable = Variable(np.zeros(100, np.float32), device="gpu:0")
    with a:
        variable.assign(ones())
    gradient = uploaded(ones(), a)
    a.synchronize()
    sgd().apply_gradients([(gradient, variable)])
    del gradient
    with a:
        mine = cupy.full(100, 300, np.float32)
    assert_equal(variable, 0)
    a.synchronize()
    assert_equal(mine, 300)


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_a_gradient_of_the_default_stream_is_kept_if_all_calls_come_on_one_other(
    cupy: Any, num_steps: int
) -> None:
    gpu = Device("gpu", 0)
    # With a backend that has seen no other stream.
    with backends.using(gpu, cuda_backend(gpu)):
        stream = new_stream()
        with stream:
            variable = Variable(np.zeros(100, np.float32), device="gpu:0")
            optimizer = sgd()
        for _ in range(num_steps):
            gradient = cupy.ones(100, np.float32)
            cupy.cuda.Stream.null.synchronize()
            with stream:
                optimizer.apply_gradients([(gradient, variable)])
            del gradient
            mine = cupy.full(100, 300, np.float32)
        with stream:
            assert_equal(variable, -num_steps)
        assert_equal(mine, 300)


def apply_accumulated(table: Variable, made: Callable[..., Any]) -> None:
    optimizer = gpuopt.GradientAccumulationOptimizer(sgd(), 2, "sum")
    for _ in range(2):
        slices = IndexedSlices(made(ones(10, 4) / 2), made(np.arange(10)))
        optimizer.apply_gradients([(slices, table)])
        del slices


def apply_masked(table: Variable, made: Callable[..., Any]) -> None:
    slices = IndexedSlices.from_mask(made(ones(10, 4)), made(np.ones(10, bool)))
    sgd().apply_gradients([(slices, table)])


READING: dict[str, Callable[[Variable, Callable[..., Any]], Any]] = {
    "accumulated": apply_accumulated,
    "from_mask": apply_masked,
    "unscaled": lambda table, made: table.assign_sub(unscaled(made(2 * ones(10, 4)), 0.5)),
    "widened": lambda table, made: table.assign_sub(
        widened(made(np.ones((10, 4), np.float16)), Variable(np.float16(0), device="gpu:0"))
    ),
    "copyto": lambda table, made: np.copyto(
        table.assign(-ones(10, 4)), made(ones(10, 4)), where=made(np.zeros((10, 4), bool))
    ),
}


@pytest.mark.parametrize("name", READING)
def test_what_a_call_on_one_stream_only_reads_is_kept_for_the_default_stream(
    cupy: Any, name: str
) -> None:
    def made(host: Any) -> Any:
        array = uploaded(host, cupy.cuda.Stream.null)
        cupy.cuda.Stream.null.synchronize()
        return array

    with new_stream():
        table = Variable(np.zeros((10, 4), np.float32), device="gpu:0")
        READING[name](table, made)
        assert_equal(table, -1)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_what_an_accumulator_took_on_one_stream_is_kept_for_a_take_on_another(
    cupy: Any, is_sparse: bool
) -> None:
    a, b = new_stream(), new_stream()
    gradient: Any = uploaded(np.ones((10, 4), np.float16))
    make: Any = gpuopt.ConditionalAccumulator
    if is_sparse:
        gradient = IndexedSlices(gradient, uploaded(np.arange(10)))
        make = gpuopt.SparseConditionalAccumulator
    accumulator = make(np.float16, (10, 4), reduction_type="SUM", device="gpu:0")
    wait_for_gpus()
    with a:
        accumulator.apply_grad(gradient)
        accumulator.apply_grad(gradient)
    with b:
        taken = accumulator.take_grad(2)
    with a:
        cupy.full((10, 4), 300, np.float32)
    b.synchronize()
    assert_equal(taken.values if is_sparse else taken, 2)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "broadcast"])
@pytest.mark.gpus(2)
def test_a_gradient_of_the_other_gpu_is_kept_and_complete(cupy: Any, layout: str) -> None:
    here, there, theirs = new_stream(0), new_stream(1), new_stream(1)
    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    expected = host.T if layout == "transposed" else host
    if layout == "broadcast":
        expected = np.broadcast_to(host[:1], (3, 4))
    variable = Variable(np.zeros(expected.shape, np.float32), device="gpu:0")
    gradient = uploaded(host, theirs, 1)
    wait_for_gpus()
    with cupy.cuda.Device(1), there:
        if layout == "transposed":
            gradient = gradient.T
        elif layout == "broadcast":
            gradient = cupy.broadcast_to(gradient[:1], (3, 4))
        with cupy.cuda.Device(0), here:
            sgd().apply_gradients([(gradient, variable)])
    del gradient
    with cupy.cuda.Device(1), theirs:
        mine = cupy.full((3, 4), 300, np.float32)
    assert_equal(variable, -expected)
    with cupy.cuda.Device(1):
        theirs.synchronize()
        assert_equal(mine, 300)


@pytest.mark.gpus(2)
def test_a_scalar_gradient_comes_from_the_other_gpu() -> None:
    variable = Variable(np.float32(0), device="gpu:0")
    sgd().apply_gradients([(uploaded(np.float32(1), device=1), variable)])
    assert_equal(variable, -1)


@pytest.mark.gpus(2)
def test_gradients_of_two_gpus_are_summed_whole() -> None:
    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    parts = [uploaded(host + device, device=device).T for device in range(2)]
    total = sum_gradients(parts, Device("gpu", 0))
    del parts
    np.testing.assert_array_equal(total.get(), (2 * host + 1).T)


@pytest.mark.parametrize("strided", [False, True])
def test_slots_and_variables_outlive_their_optimizer_until_the_step_is_done(
    cupy: Any, strided: bool
) -> None:
    a, b = new_stream(), new_stream()
    gradient = uploaded(ones())
    wait_for_gpus()
    with a:
        array = cupy.zeros(200 if strided else 100, np.float32)
        variable = Variable(array[:: 2 if strided else 1], copy=False)
        optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
        optimizer.apply_gradients([(gradient, variable)])
        other = gpuopt.MomentumOptimizer(1.0, 0.5)
        other.apply_gradients([(gradient, gone := Variable(ones(), device="gpu:0"))])
    a.synchronize()
    with b:
        optimizer.apply_gradients([(gradient, variable)])
        other.apply_gradients([(gradient, gone)])
    del optimizer, other, gone
    with a:
        mine = [cupy.full(n, 100, np.float32) for n in (100, 100, 100, 200)]
    a.synchronize()
    assert_equal(variable, -2.5)
    for array in mine:
        assert_equal(array, 100)


def test_a_flag_of_rows_outlives_its_optimizer_until_its_steps_are_done(cupy: Any) -> None:
    a, b = new_stream(), new_stream()
    table = Variable(np.zeros((10, 4), np.float32), device="gpu:0")
    values, rows = uploaded(ones(3, 4)), uploaded(np.arange(3))
    wait_for_gpus()
    optimizer = sgd()
    with a:
        optimizer.apply_gradients([(IndexedSlices(values, rows), table)])
    a.synchronize()
    with b:
        optimizer.apply_gradients([(IndexedSlices(values, rows), table)])
    del optimizer
    gc.collect()
    with a:
        mine = [cupy.full(4, 100, np.float32) for _ in range(20)]
    a.synchronize()
    assert table.numpy()[:4, 0].tolist() == [-2, -2, -2, 0]
    for array in mine:
        assert_equal(array, 100)


def test_a_variable_outlives_its_last_reference_until_arithmetic_on_it_is_done(cupy: Any) -> None:
    owner, other = new_stream(), new_stream()
    with owner:
        variable = Variable(ones(), device="gpu:0")
    wait_for_gpus()
    with other:
        doubled = variable + variable
    del variable
    with owner:
        cupy.full(100, 7, np.float32)
    other.synchronize()
    assert_equal(doubled, 2)


def test_arithmetic_on_two_streams_keeps_no_more_than_is_in_flight() -> None:
    variable, streams = Variable(ones(), device="gpu:0"), [new_stream(), new_stream()]
    for number in range(20):
        with streams[number % 2]:
            variable.sum()
        wait_for_gpus()
    backend = backends.backend_for(Device("gpu", 0))
    assert len(backend._order.in_flight.held) <= 2


def test_a_raw_array_outlives_its_last_reference_until_the_step_is_done(cupy: Any) -> None:
    a, b = new_stream(), new_stream()
    gradient, optimizer = uploaded(ones()), sgd()
    wait_for_gpus()
    with a:
        array = cupy.zeros(100, np.float32)
        optimizer.apply_gradients([(gradient, array)])
    a.synchronize()
    with b:
        optimizer.apply_gradients([(gradient, array)])
    del array
    with a:
        mine = cupy.full(100, 100, np.float32)
    b.synchronize()
    a.synchronize()
    assert_equal(mine, 100)


def test_what_is_assigned_is_kept_and_what_it_is_assigned_to(cupy: Any) -> None:
    a, b = new_stream(), new_stream()
    with a:
        variable, gone = (Variable(cupy.zeros(100, np.float32)) for _ in range(2))
        value, initial = (cupy.full(100, 3, np.float32) for _ in range(2))
    a.synchronize()
    with b:
        variable.assign(value)
        variable += value
        gone.assign(value)
        made = Variable(initial)
    del value, gone, initial
    with a:
        mine = [cupy.full(100, 100, np.float32) for _ in range(3)]
    b.synchronize()
    a.synchronize()
    assert_equal(variable, 6)
    assert_equal(made, 3)
    for array in mine:
        assert_equal(array, 100)


# Page-locked memory


def test_a_flag_on_its_way_to_the_host_is_not_written_over_an_upload(cupy: Any) -> None:
    def train() -> None:
        table = Variable(np.zeros((50, 8), np.float32), device="gpu:0")
        optimizer = gpuopt.AdagradOptimizer(1.0)
        for _ in range(2):
            optimizer.apply_gradients([(IndexedSlices(values, rows), table)])

    rows, values = uploaded(np.arange(10)), uploaded(ones(10, 8))
    train()
    array = cupy.asarray(np.arange(1, 9, dtype=np.float32))
    np.testing.assert_array_equal(array.get(), np.arange(1, 9))


def test_flags_of_refused_calls_are_not_written_over_an_upload(cupy: Any) -> None:
    table = Variable(np.zeros((50, 8), np.float32), device="gpu:0")
    values, rows, bad = uploaded(ones(10, 8)), uploaded(np.arange(10)), uploaded(np.arange(10) + 45)
    optimizer = gpuopt.AdagradOptimizer(1.0)

    def train() -> None:
        for given in (bad, rows, rows):
            optimizer.apply_gradients([(IndexedSlices(values, given), table)])
        optimizer.check()

    with pytest.raises(IndexError):
        train()
    arrays = [cupy.asarray(np.arange(1, 9, dtype=np.float32)) for _ in range(3)]
    for array in arrays:
        np.testing.assert_array_equal(array.get(), np.arange(1, 9))


@pytest.fixture
def page_locked(cupy: Any) -> Iterator[list[int]]:
    """Lists the sizes of page-locked memory that is asked for."""
    sizes: list[int] = []
    pool = cupy.get_default_pinned_memory_pool()

    def allocate(size: int) -> Any:
        sizes.append(size)
        return pool.malloc(size)

    cupy.cuda.set_pinned_memory_allocator(allocate)
    yield sizes
    cupy.cuda.set_pinned_memory_allocator(pool.malloc)


@pytest.mark.parametrize("kind", ["one variable", "sparse", "many variables"])
@pytest.mark.one_in(3)
def test_a_loop_far_ahead_of_the_gpu_allocates_no_page_locked_memory(
    page_locked: list[int], kind: str
) -> None:
    rate = 0.5
    number_of = 12 if kind == "many variables" else 1
    variables = [Variable(np.zeros((10, 4), np.float32), device="gpu:0") for _ in range(number_of)]
    optimizer = gpuopt.GradientDescentOptimizer(lambda: rate)
    gradients: list[Any] = [uploaded(ones(10, 4)) for _ in range(2 * number_of)]
    if kind == "sparse":
        gradients = [IndexedSlices(each, uploaded(np.arange(10))) for each in gradients]
    optimizer.apply_gradients(zip(gradients, variables, strict=False))
    page_locked.clear()
    for number in range(300):
        rate = 1.0 + number
        # From other addresses, which must be uploaded if there are more than five.
        gradients = gradients[1:] + gradients[:1]
        optimizer.apply_gradients(zip(gradients, variables, strict=False))
    assert page_locked == []
    optimizer.check()
    for variable in variables:
        assert_equal(variable, -0.5 - sum(range(1, 301)))


# What is kept no longer than needed


def peak_bytes(cupy: Any, step: Callable[[], None], num_steps: int) -> int:
    """How much more memory the pool has lent at most, between steps, than before the first."""
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    most = 0
    for _ in range(num_steps):
        step()
        most = max(most, pool.used_bytes() - before)
    return most


@pytest.mark.parametrize(("own_stream", "num_kept"), [(False, 0), (True, 2)])
def test_a_loop_keeps_two_gradients_on_its_one_stream_and_none_on_the_default_one(
    cupy: Any, own_stream: bool, num_kept: int
) -> None:
    stream = new_stream() if own_stream else cupy.cuda.Stream.null
    gradient = None

    def step() -> None:
        nonlocal gradient
        gradient = cupy.ones(LARGE, np.float32)
        optimizer.apply_gradients([(gradient, variable)])

    gpu = Device("gpu", 0)
    # With a backend that has seen no other stream.
    with stream, backends.using(gpu, cuda_backend(gpu)):
        variable = Variable(np.zeros(LARGE, np.float32), device="gpu:0")
        optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
        step()
        # One more is the step's own, in the place of the one before.
        assert peak_bytes(cupy, step, 30) < (num_kept * 4 + 1) * LARGE


def test_a_loop_on_two_streams_keeps_what_two_steps_use(cupy: Any) -> None:
    variables = [Variable(np.zeros(LARGE, np.float32), device="gpu:0") for _ in range(3)]
    table = Variable(np.zeros((LARGE // 4, 4), np.float32), device="gpu:0")
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
    rows = uploaded(np.arange(LARGE // 4))
    streams = [new_stream(), new_stream()]
    wait_for_gpus()
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        with streams[number % 2]:
            dense = [(cupy.ones(LARGE, np.float32), variable) for variable in variables]
            values = cupy.ones((LARGE // 4, 4), np.float32)
            optimizer.apply_gradients([*dense, (IndexedSlices(values, rows), table)])

    for _ in range(4):
        step()
    wait_for_gpus()
    of_a_step = 4 * 4 * LARGE
    most = peak_bytes(cupy, step, 30)
    assert most < 2.2 * of_a_step
    wait_for_gpus()
    step()
    assert_equal(variables[0], float(optimizer_reference(35)))


def test_the_host_waits_for_the_step_before_the_last_and_for_no_later_one(
    monkeypatch: pytest.MonkeyPatch, cupy: Any
) -> None:
    """Also if steps check rows: the flag, which is written twice a step, does not count."""
    table = Variable(np.zeros((10, 4), np.float32), device="gpu:0")
    slices = IndexedSlices(uploaded(ones(10, 4)), uploaded(np.arange(10)))
    weight, gradient = Variable(ones(), device="gpu:0"), uploaded(ones())
    optimizer, streams = sgd(), [new_stream(), new_stream()]
    wait_for_gpus()

    def step(stream: Any) -> None:
        with stream:
            optimizer.apply_gradients([(gradient, weight), (slices, table)])

    for stream in streams:
        step(stream)
    wait_for_gpus()
    wait, waits = order.wait_for_event, []

    def waiting(event: Any, what: str) -> None:
        waits.append(what)
        wait(event, what)

    monkeypatch.setattr(order, "wait_for_event", waiting)
    for stream in streams:
        step(stream)
    assert not waits


def test_what_an_update_has_used_goes_with_the_next_update_of_any_variable(cupy: Any) -> None:
    large, small = (Variable(np.zeros(n, np.float32), device="gpu:0") for n in (LARGE, 1))
    optimizer, gradient = sgd(), uploaded(ones(1))
    pool = cupy.get_default_memory_pool()
    with new_stream():
        optimizer.apply_gradients([(gradient, small)])
        wait_for_gpus()
        before = pool.used_bytes()
        optimizer.apply_gradients([(cupy.ones(LARGE, np.float32), large)])
        wait_for_gpus()
        optimizer.apply_gradients([(gradient, small)])
    assert pool.used_bytes() < before + LARGE


def optimizer_reference(num_steps: int) -> np.float32:
    value = momentum = np.float32(0)
    for _ in range(num_steps):
        momentum = np.float32(momentum * np.float32(0.5) + 1)
        value -= momentum
    return value


def test_a_stream_for_each_step_costs_memory_for_a_few_streams_only(cupy: Any) -> None:
    variable = Variable(np.zeros((100, 100), np.float32), device="gpu:0")
    optimizer = gpuopt.AdagradOptimizer(1.0)
    gradient = uploaded(ones(100, 100))
    slices = IndexedSlices(gradient, uploaded(np.arange(100)))
    wait_for_gpus()

    def step() -> None:
        with new_stream():
            optimizer.apply_gradients([(gradient, variable)])
            optimizer.apply_gradients([(slices, variable)])

    for _ in range(20):
        step()
    wait_for_gpus()
    assert peak_bytes(cupy, step, 30) < 2 * 100 * 100 * 4
