"""Tests that need a GPU's driver: what a step allocates and waits for, streams, caches."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import driver
import numpy as np
import pytest
from every_optimizer import configurations, make, own_step
from interrupt_at import Interrupt, InterruptAt

import gpuopt
from bench import first_step
from gpuopt import IndexedSlices, Variable
from gpuopt.backends import backend_for
from gpuopt.backends.cuda.page_locked import Landing
from gpuopt.bench import measure
from gpuopt.bench.clock import GpuClock
from gpuopt.device import Device

pytestmark = pytest.mark.gpu

# How long the GPU is kept busy: much longer than the host takes for a step.
HELD_MS = 300
# What a step of the largest variable takes.
HUGE_BYTES = 30e9


@pytest.fixture
def cupy() -> Any:
    import cupy

    return cupy


@pytest.fixture(scope="module")
def clock() -> GpuClock:
    import cupy

    return GpuClock(cupy)


class Model:
    """Dense variables, small and large, a table, and what a step of `optimizer` takes.

    Attributes:
        variables: CuPy's arrays in Variables; the last is the table.
        host_gradients: Of each variable, in host memory.
    """

    def __init__(self, cupy: Any, name: str, arguments: dict[str, Any]) -> None:
        rng = np.random.default_rng(0)
        shapes = [(3,), (100_003,), (64, 64), (5000, 16)]
        starts = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
        self.optimizer = make(name, arguments)
        self.variables = [Variable(cupy.asarray(start)) for start in starts]
        rows = rng.integers(0, 5000, 3000)
        self.host_gradients = [
            *(rng.normal(size=shape).astype(np.float32) for shape in shapes[:-1]),
            IndexedSlices(rng.normal(size=(3000, 16)).astype(np.float32), rows),
        ]
        self.gradients = [on_gpu(cupy, gradient) for gradient in self.host_gradients]
        self._step = own_step(self.optimizer)

    def step(self, gradients: Any = None) -> None:
        pairs = zip(gradients or self.gradients, self.variables, strict=True)
        self.optimizer.apply_gradients(pairs, global_step=self._step)

    def values(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in self.variables]


def on_gpu(cupy: Any, gradient: Any) -> Any:
    if isinstance(gradient, IndexedSlices):
        return IndexedSlices(cupy.asarray(gradient.values), cupy.asarray(gradient.indices))
    return cupy.asarray(gradient)


def after_steps(cupy: Any, count: int) -> list[np.ndarray]:
    """What Adam's variables are after so many steps, one after the other on one stream."""
    model = Model(cupy, "AdamOptimizer", {})
    for _ in range(count):
        model.step()
    return model.values()


def assert_equal(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


# What a step costs besides its kernels


def test_the_clock_times_the_device_and_not_the_host(
    clock: GpuClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other processes may take turns on the GPU.
    assert 40 <= clock.device_ms(lambda: clock.hold(40), host_ms=1) < 200
    assert clock.device_ms(lambda: sleep(0.2), host_ms=400) < 150
    monkeypatch.setattr(measure, "_GPU_COPY_BYTES", 2**26)
    assert measure.prepare(Device.parse("gpu:0")).measure_copies(rounds=3).gb_per_s > 1


@pytest.mark.driver
def test_a_timed_step_finds_caches_that_were_written_and_then_read(clock: GpuClock) -> None:
    def kernels_before(time: Callable[[], object]) -> list[str]:
        with driver.record_launches() as launches:
            time()
        return [each.name or each.kind for each in launches if each.name != "hold"]

    read = kernels_before(lambda: clock.device_ms(lambda: None, host_ms=0))
    assert [name.partition("_")[0] for name in read] == ["fill", "cupy"]
    assert "max" in read[1]
    assert kernels_before(lambda: clock.whole_ms(lambda: None)) == read
    assert kernels_before(lambda: clock.device_ms(lambda: None, 0, dirty=True)) == read[:1]


@pytest.fixture
def page_locked(cupy: Any) -> Iterator[list[int]]:
    """Lists the sizes of page-locked host memory as it is really allocated, past the pool."""
    sizes: list[int] = []

    def allocate(size: int) -> Any:
        sizes.append(size)
        return cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(size), 0)

    cupy.cuda.set_pinned_memory_allocator(cupy.cuda.PinnedMemoryPool(allocate).malloc)
    yield sizes
    cupy.cuda.set_pinned_memory_allocator(cupy.get_default_pinned_memory_pool().malloc)


@contextmanager
def counted(cupy: Any) -> Iterator[Counter[str]]:
    """Counts device memory that is asked for, modules compiled or loaded, and waiting.

    Of waiting, only what Python code asks for is seen; `GpuClock.runs_ahead` misses nothing.
    """
    counts: Counter[str] = Counter()

    class Requests(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "requests"

        def malloc_preprocess(self, **of_request: Any) -> None:
            counts["allocations"] += 1

    def count(patch: pytest.MonkeyPatch, owner: Any, attribute: str, what: str) -> None:
        original = getattr(owner, attribute)

        def counting(*arguments: Any, **options: Any) -> Any:
            counts[what] += 1
            return original(*arguments, **options)

        patch.setattr(owner, attribute, counting)

    with pytest.MonkeyPatch.context() as patch, Requests():
        count(patch, cupy.cuda.compiler, "_compile_module_with_cache", "modules")
        for kind in ("RawModule", "RawKernel"):
            count(patch, cupy, kind, "modules")
        for function in ("deviceSynchronize", "streamSynchronize", "eventSynchronize", "memcpy"):
            count(patch, cupy.cuda.runtime, function, "waits")
        count(patch, cupy.cuda.Event, "synchronize", "waits")
        count(patch, cupy.cuda.Stream, "synchronize", "waits")
        count(patch, cupy.ndarray, "get", "waits")
        yield counts


def test_the_counters_count_allocations_waits_and_compilations(cupy: Any, clock: GpuClock) -> None:
    with counted(cupy) as counts:
        array = cupy.empty(5, dtype=np.float32)
        assert counts == {"allocations": 1}
        array.get()
        cupy.cuda.get_current_stream().synchronize()
        # `get` itself waits by `Stream.synchronize`, which is counted, too.
        assert counts["waits"] == 3
        kernel = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
        kernel((1,), (1,), ())
        assert counts["modules"] >= 2
    assert clock.runs_ahead(lambda: None, HELD_MS / 4)
    assert not clock.runs_ahead(array.get, HELD_MS / 4)


@configurations
@pytest.mark.one_in(4)
def test_from_the_third_step_on_nothing_is_allocated_compiled_or_waited_for(
    cupy: Any, clock: GpuClock, page_locked: list[int], name: str, arguments: dict[str, Any]
) -> None:
    model = Model(cupy, name, arguments)
    others = [[on_gpu(cupy, gradient) for gradient in model.host_gradients] for _ in range(2)]
    for gradients in (None, others[0]):
        model.step(gradients)
        clock.synchronize()
    page_locked.clear()
    with counted(cupy) as counts:
        for gradients in (None, None, others[0], others[1]):
            model.step(gradients)
            clock.synchronize()  # so that no more is under way than in the steps before
    assert not counts
    assert not page_locked
    assert clock.runs_ahead(model.step, HELD_MS / 4)


@pytest.mark.driver
@pytest.mark.parametrize("num_groups", [5, 70])
def test_groups_take_the_launches_of_one_and_no_new_memory(
    cupy: Any, clock: GpuClock, page_locked: list[int], num_groups: int
) -> None:
    """70 are more than a launch takes by value: Adam's scalars are uploaded in each step."""
    rng = np.random.default_rng(1)
    starts = [rng.normal(size=(8, 4)).astype(np.float32) for _ in range(2 * num_groups)]
    dense = [rng.normal(size=(8, 4)).astype(np.float32) for _ in range(num_groups)]
    sparse = [IndexedSlices(each[:3], np.array([1, 5, 1])) for each in dense]
    gradients = [*dense, *sparse]

    def program(
        put: Any, has_groups: bool
    ) -> tuple[list[Variable], Any, list[tuple[Any, Variable]]]:
        variables = [Variable(put(start)) for start in starts]
        groups = [
            gpuopt.ParameterGroup(variables=variables[i::num_groups], learning_rate=0.001 * i)
            for i in range(1, num_groups)
        ]
        optimizer = gpuopt.LazyAdamOptimizer(0.5, groups=groups if has_groups else ())
        given = gradients if put is np.array else [on_gpu(cupy, each) for each in gradients]
        return variables, optimizer, list(zip(given, variables, strict=True))

    _, one, pairs = program(cupy.asarray, False)
    names = []
    variables, optimizer, of_groups = program(cupy.asarray, True)
    on_host, by_numpy, host_pairs = program(np.array, True)
    for chosen, given in ((one, pairs), (optimizer, of_groups)):
        for _ in range(2):
            chosen.apply_gradients(given)
            clock.synchronize()
        page_locked.clear()
        with counted(cupy) as counts, driver.record_launches() as launches:
            for _ in range(2):
                chosen.apply_gradients(given)
                clock.synchronize()
        assert not counts
        assert not page_locked
        names.append([each.name.split("<")[0] for each in launches])
    kernels_of_both = [[each for each in of_one if "update" in each] for of_one in names]
    assert kernels_of_both[0] == kernels_of_both[1]
    assert len(kernels_of_both[0]) == 2 * 2
    for _ in range(4):
        by_numpy.apply_gradients(host_pairs)
    for got, expected in zip(variables, on_host, strict=True):
        np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["event", "landing"])
def test_what_ctrl_c_has_kept_from_being_made_goes_quietly(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from gpuopt.backends.cuda.cupy_launcher import CupyEvent

    memory, event = np.zeros(16, np.uint8), CupyEvent()
    made: Any = partial(Landing, memory, event, memory, memory.ctypes.data, deque())
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    with pytest.raises(Interrupt), InterruptAt(1):
        CupyEvent() if kind == "event" else made()
    gc.collect()
    assert not said


# Streams


@pytest.fixture
def streams(cupy: Any) -> list[Any]:
    return [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]


@pytest.mark.usefixtures("every_schedule")
def test_steps_on_two_streams_follow_each_other(
    cupy: Any, clock: GpuClock, streams: list[Any]
) -> None:
    model = Model(cupy, "AdamOptimizer", {})
    model.step()
    clock.synchronize()
    with streams[0]:
        clock.hold(HELD_MS)
        model.step()
    with streams[1]:
        model.step()
    model.step()
    assert_equal(model.values(), after_steps(cupy, 4))


@pytest.mark.usefixtures("every_schedule")
def test_a_value_read_on_another_stream_is_that_of_the_last_step(
    cupy: Any, clock: GpuClock, streams: list[Any]
) -> None:
    model = Model(cupy, "AdamOptimizer", {})
    clock.synchronize()
    with streams[0]:
        clock.hold(HELD_MS)
        model.step()
    with streams[1]:
        values = model.values()
    assert_equal(values, after_steps(cupy, 1))


@pytest.mark.usefixtures("every_schedule")
def test_a_gradient_may_be_freed_while_its_update_waits(
    cupy: Any, clock: GpuClock, streams: list[Any]
) -> None:
    model = Model(cupy, "AdamOptimizer", {})
    with streams[1]:
        gradients = [on_gpu(cupy, gradient) for gradient in model.host_gradients]
    clock.synchronize()
    with streams[0]:
        clock.hold(HELD_MS)
        model.step(gradients)
    sizes = [gradient.shape for gradient in gradients[:-1]] + [gradients[-1].values.shape]
    del gradients
    with streams[1]:  # the same memory, if the pool has it back
        spoilt = [cupy.full(size, np.nan, dtype=np.float32) for size in sizes]
    assert_equal(model.values(), after_steps(cupy, 1))
    del spoilt


# Devices


@pytest.mark.usefixtures("every_schedule")
def test_gradients_in_host_memory_are_moved_to_the_gpu(cupy: Any) -> None:
    model = Model(cupy, "AdamOptimizer", {})
    model.step(model.host_gradients)
    assert_equal(model.values(), after_steps(cupy, 1))


@pytest.mark.usefixtures("every_schedule")
def test_variables_in_host_memory_and_on_the_gpu_share_a_step(cupy: Any) -> None:
    start, gradient = np.random.default_rng(0).normal(size=(2, 1000)).astype(np.float32)
    variables = [Variable(cupy.asarray(start)), Variable(start)]
    optimizer = gpuopt.AdamOptimizer(0.1)
    for _ in range(2):
        optimizer.apply_gradients(
            [(cupy.asarray(gradient), variables[0]), (gradient, variables[1])]
        )
    on_device, on_host = (variable.numpy() for variable in variables)
    np.testing.assert_allclose(on_device, on_host, rtol=1e-5, atol=1e-6)
    assert [str(variable.device) for variable in variables] == ["gpu:0", "cpu"]
    for variable in variables:
        assert optimizer.get_slot(variable, "m").device == variable.device


@pytest.mark.usefixtures("every_schedule")
def test_raw_arrays_are_updated_in_place(cupy: Any) -> None:
    start, gradient = np.random.default_rng(1).normal(size=(2, 1000)).astype(np.float32)
    array, variable = cupy.asarray(start), Variable(cupy.asarray(start))
    address = array.data.ptr
    optimizer = gpuopt.AdamOptimizer(0.1)
    for _ in range(2):
        given = cupy.asarray(gradient)
        optimizer.apply_gradients([(given, array), (given, variable)])
    assert array.data.ptr == address
    np.testing.assert_array_equal(array.get(), variable.numpy())
    assert not np.array_equal(array.get(), start)


@pytest.mark.driver  # few GPUs can read the system's memory
def test_memory_of_the_system_is_cupys_own(cupy: Any) -> None:
    pointer = cupy.cuda.memory.malloc_system(48)
    ctypes.memset(pointer.ptr, 0, 48)
    array = cupy.ndarray((3, 4), np.float32, pointer)
    gradient = cupy.ones((3, 4), np.float32)
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
    for _ in range(3):
        optimizer.apply_gradients([(gradient, array[:])])
    cupy.cuda.Device(0).synchronize()
    values = np.ctypeslib.as_array((ctypes.c_float * 12).from_address(pointer.ptr))
    assert values.tolist() == [-1 - 1.5 - 1.75] * 12
    assert len(optimizer.variables()) == 1


@pytest.mark.driver  # as above
def test_memory_of_the_system_that_numpy_has_lent_is_numpys() -> None:
    program = """
import cupy, gpuopt, numpy as np
host = np.zeros(3, np.float32)
optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
for _ in range(3):
    array = cupy.asarray(host)
    assert array.data.ptr == host.ctypes.data
    optimizer.apply_gradients([(cupy.ones(3, np.float32), array)])
cupy.cuda.Device(0).synchronize()
print(host.tolist(), len(optimizer.variables()))
"""
    environment = {**os.environ, "CUPY_ENABLE_UMP": "1"}
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert finished.stdout.splitlines() == ["[-4.25, -4.25, -4.25] 1"], finished.stderr


@pytest.mark.gpus(2)
@pytest.mark.usefixtures("every_schedule")
def test_variables_of_several_gpus_are_each_updated_on_their_own(cupy: Any) -> None:
    start, gradient = np.random.default_rng(2).normal(size=(2, 1000)).astype(np.float32)
    variables = [Variable(start, device=f"gpu:{index}") for index in range(2)]
    with cupy.cuda.Device(1):
        of_another_gpu = cupy.asarray(gradient)
    optimizer = gpuopt.AdamOptimizer(0.1)
    for _ in range(2):
        optimizer.apply_gradients([(of_another_gpu, variable) for variable in variables])
    assert_equal([variables[0].numpy()], [variables[1].numpy()])
    for index, variable in enumerate(variables):
        assert optimizer.get_slot(variable, "m").device == gpuopt.device.Device("gpu", index)
    assert cupy.cuda.runtime.getDevice() == 0


@pytest.mark.gpus(2)
def test_ctrl_c_while_a_device_is_entered_leaves_the_one_before_current(cupy: Any) -> None:
    backend = backend_for(gpuopt.device.Device("gpu", 1))
    errors = []  # their tracebacks keep alive what was in the middle of something
    for moment in itertools.count(1):
        interrupts = InterruptAt(moment)
        try:
            with interrupts, backend.enter():
                pass
        except Interrupt as error:
            errors.append(error)
        assert cupy.cuda.runtime.getDevice() == 0, moment
        if interrupts.left > 0:
            break
    assert errors


# Sizes


@pytest.fixture
def huge(cupy: Any) -> Any:
    """More float16 elements than 32 bits can count."""
    if cupy.cuda.runtime.memGetInfo()[0] < HUGE_BYTES:
        pytest.skip(f"the GPU has less than {HUGE_BYTES / 1e9:g} GB of free memory")
    yield cupy.zeros(2**32 + 5, dtype=np.float16)
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.real_gpu(f"needs {HUGE_BYTES / 1e9:g} GB of its memory")
def test_a_variable_may_have_more_elements_than_32_bits_can_count(cupy: Any, huge: Any) -> None:
    gradient = cupy.ones(huge.shape, dtype=np.float16)
    gradient[-2:] = 2
    small = np.zeros(2, np.float16)
    optimizer = gpuopt.GradientDescentOptimizer(0.1)
    optimizer.apply_gradients([(gradient, huge), (np.float16([1, 2]), small)])
    assert huge[-3:].get().tolist() == [small[0], small[1], small[1]]
    assert bool((huge[:-2] == small[0]).all())


@pytest.mark.real_gpu(f"needs {HUGE_BYTES / 1e9:g} GB of its memory")
def test_a_table_may_have_more_rows_than_32_bits_can_count(cupy: Any, huge: Any) -> None:
    height = huge.size
    rows = cupy.asarray([height - 1, 3, 2**32, height - 1, 0], dtype=np.int64)
    slices = IndexedSlices(cupy.ones((5, 1), dtype=np.float16), rows)
    small = np.zeros(2, np.float16)
    optimizer = gpuopt.GradientDescentOptimizer(0.1)
    optimizer.apply_gradients([(slices, huge.reshape(-1, 1)), (np.float16([1, 2]), small)])
    once, twice = small.tolist()
    touched = {0: once, 3: once, 2**32: once, height - 1: twice}
    assert {row: float(huge[row]) for row in touched} == touched
    assert int(cupy.count_nonzero(huge)) == len(touched)


# Rows that a variable does not have


class Refused:
    """A model whose second step named a row that its table does not have.

    Attributes:
        before: Everything as it was before that step.
    """

    def __init__(self, cupy: Any) -> None:
        self.table = Variable(cupy.zeros((10, 3), dtype=np.float32), name="embedding")
        self.bias = Variable(cupy.zeros(4, dtype=np.float32), name="bias")
        self.global_step = Variable(0, name="global_step", trainable=False)
        self.optimizer = gpuopt.AdamOptimizer(0.1)
        self._cupy = cupy
        self.step([1, 5, 1])
        self.before = self.everything()

    def step(self, rows: list[int]) -> None:
        values = self._cupy.ones((len(rows), 3), dtype=np.float32)
        slices = IndexedSlices(values, self._cupy.asarray(rows, dtype=np.int64))
        bias = self._cupy.ones(4, dtype=np.float32)
        self.optimizer.apply_gradients(
            [(bias, self.bias), (slices, self.table)], global_step=self.global_step
        )

    def everything(self) -> list[np.ndarray]:
        variables = [self.table, self.bias, self.global_step, *self.optimizer.variables()]
        return [variable.numpy() for variable in variables]


SURFACES = {
    "check": lambda refused, folder: refused.optimizer.check(),
    "numpy": lambda refused, folder: refused.table.numpy(),
    "save": lambda refused, folder: gpuopt.Saver({"embedding": refused.table}).save(
        str(folder / "model")
    ),
    "the next step": lambda refused, folder: refused.step([1]),
}


@pytest.mark.usefixtures("every_schedule")
@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("row", [10, -1, 2**40])
def test_a_row_outside_the_variable_is_an_error_later_and_changes_nothing(
    cupy: Any, clock: GpuClock, tmp_path: Path, surface: str, row: int
) -> None:
    refused = Refused(cupy)
    refused.step([3, row])
    clock.synchronize()
    with pytest.raises(IndexError, match=f'"embedding".*{row}'):
        SURFACES[surface](refused, tmp_path)
    assert_equal(refused.everything(), refused.before)
    refused.step([2])
    unharmed = Refused(cupy)
    unharmed.step([2])
    assert_equal(refused.everything(), unharmed.everything())


@pytest.mark.usefixtures("every_schedule")
def test_with_gpuopt_check_a_row_outside_the_variable_is_an_error_at_once(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Refused(cupy)
    monkeypatch.setenv("GPUOPT_CHECK", "1")
    with pytest.raises(IndexError, match='"embedding"'):
        refused.step([3, 10])
    assert_equal(refused.everything(), refused.before)


@pytest.mark.driver
@pytest.mark.usefixtures("every_schedule")
def test_after_a_kernel_has_failed_a_wait_ends_at_once_with_the_error_of_cuda(cupy: Any) -> None:
    variable = Variable(np.zeros(4, np.float32), name="weights", device="gpu:0")
    # Threads that do not all reach a barrier.
    source = 'extern "C" __global__ void fail() { if (threadIdx.x) __syncthreads(); }'
    cupy.RawKernel(source, "fail")((1,), (32,), ())
    began = monotonic()
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="cudaErrorLaunchFailure"):
        variable.numpy()
    assert monotonic() - began < 60


# The first step of a process


@pytest.mark.real_gpu("is about its speed")
def test_the_first_use_of_a_rule_compiles_in_two_seconds(tmp_path: Path) -> None:
    assert first_step.run("dense", "gpu:0", str(tmp_path))["first_step_ms"] < 2000


def test_the_first_use_of_a_rule_compiles_once_for_all_processes(tmp_path: Path) -> None:
    first = first_step.run("dense", "gpu:0", str(tmp_path))
    assert first["compiled"] > 0
    kept = sorted(path.name for path in tmp_path.iterdir())
    second = first_step.run("dense", "gpu:0", str(tmp_path))
    assert second["compiled"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
