"""Variables on GPUs, tested on emulated ones: no driver is needed."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import fake_cupy
import numpy as np
import pytest
from dtypes import every_dtype
from emulator import EmulatorLauncher, kernel_library
from every_optimizer import configurations, make, own_step
from failing_launch import failing_launch
from fake_cupy import host_memory
from golden_cases import GoldenCase, check, kind_of_case, optimizer_cases
from interrupt_at import HandleAt, Interrupt, InterruptAt

import gpuopt
from gpuopt import IndexedSlices, Variable, locks
from gpuopt.backends import backend_for
from gpuopt.backends.cuda.launcher import Download, Launch
from gpuopt.backends.cuda.structs import FEW_GRADIENTS
from gpuopt.device import Device
from gpuopt.distributed.communicators.threads import run_threads
from gpuopt.state.host_scalar import HostScalar

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("emulated_gpus")]

GPUS = [Device("gpu", 0), Device("gpu", 1)]


def on_gpu(array: Any, index: int = 0) -> fake_cupy.ndarray:
    with fake_cupy.cuda.Device(index):
        return fake_cupy.asarray(np.array(array))


def arrays_of(optimizer: gpuopt.Optimizer, variable: Any) -> list[np.ndarray]:
    slots = [optimizer.get_slot(variable, name) for name in optimizer.get_slot_names()]
    var = variable.numpy() if isinstance(variable, Variable) else variable.get()
    return [var, *(slot.numpy() for slot in slots)]


def assert_same(got: np.ndarray, expected: np.ndarray) -> None:
    """Compares bits."""
    assert (got.dtype, got.tobytes()) == (expected.dtype, expected.tobytes())


class Twins:
    """Variables on a GPU, and the same ones on the CPU, each with an optimizer of its own."""

    def __init__(self, name: str = "AdamOptimizer", arguments: Any = None) -> None:
        self.there, self.here = make(name, arguments), make(name, arguments)
        self.variables: list[tuple[Any, Variable]] = []
        self._rng = np.random.default_rng(3)

    def random(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        return self._rng.normal(size=shape).astype(dtype)

    def add(self, shape: Sequence[int], dtype: Any, device: str) -> None:
        value = self.random(shape, dtype)
        self.variables.append((Variable(value, device=device, name="w"), Variable(value)))

    def step(self, gradients: list[tuple[Any, Any]]) -> None:
        """Applies (there, here) gradients."""
        for optimizer, side in ((self.there, 0), (self.here, 1)):
            step = own_step(optimizer)
            optimizer.apply_gradients(
                [
                    (gradient[side], variable[side])
                    for gradient, variable in zip(gradients, self.variables, strict=True)
                ],
                global_step=step,
            )

    def check(self) -> None:
        for there, here in self.variables:
            got, expected = arrays_of(self.there, there), arrays_of(self.here, here)
            for mine, theirs in zip(got, expected, strict=True):
                assert_same(mine, theirs)


# Values


@configurations
@every_dtype
@pytest.mark.one_in(3)
def test_one_call_updates_variables_on_two_gpus_and_the_cpu(
    name: str, arguments: dict[str, Any], dtype: Any
) -> None:
    twins = Twins(name, arguments)
    for shape, device in (
        *(((7, 5), "gpu:0"), ((1,), "gpu:0"), ((), "gpu:1")),
        *(((33,), "gpu:1"), ((4, 2), "cpu"), ((0, 3), "gpu:0")),
    ):
        twins.add(shape, dtype, device)
    for step in range(3):
        gradients = []
        for position, (_, here) in enumerate(twins.variables):
            grad = twins.random(here.shape, dtype)
            # On the host, on gpu:0 and on gpu:1, in turn.
            place = (position + step) % 3
            gradients.append((on_gpu(grad, place) if place < 2 else grad, grad))
        twins.step(gradients)
    twins.check()
    for there, _ in twins.variables:
        for slot_name in twins.there.get_slot_names():
            assert twins.there.get_slot(there, slot_name).device == there.device


@configurations
@every_dtype
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.one_in(8)
def test_sparse_updates_on_a_gpu_are_numpys(
    name: str, arguments: dict[str, Any], dtype: Any, index: Any
) -> None:
    twins = Twins(name, arguments)
    twins.add((11, 3), dtype, "gpu:1")
    twins.add((4,), dtype, "gpu:0")
    for rows in ([7, 2, 7, 0, 7], [], [10, 9]):
        values = twins.random((len(rows), 3), dtype)
        indices = np.array(rows, index)
        dense = twins.random((4,), dtype)
        twins.step(
            [
                (
                    IndexedSlices(on_gpu(values, 1), on_gpu(indices, 1)),
                    IndexedSlices(values, indices),
                ),
                (on_gpu(dense), dense),
            ]
        )
    twins.check()


@pytest.mark.parametrize(
    "case",
    [case for case in optimizer_cases() if case["dtype"] != "float16"],
    ids=lambda case: case["id"],
)
@pytest.mark.one_in(8, case=kind_of_case)
def test_a_gpu_steps_like_tensorflow(case: dict[str, Any]) -> None:
    golden = GoldenCase(case)
    tolerance = {"float64": 1e-12, "float32": 3e-6}[case["dtype"]]
    for key, rows in golden.replay(device="gpu:1").items():
        check("index", f"{case['id']}/{key}", rows, golden.arrays[key][1:], tolerance)


def test_strided_variables_and_gradients_are_updated() -> None:
    twins = Twins()
    memory = on_gpu(np.arange(24, dtype=np.float32).reshape(4, 6))
    views = memory[:, ::2], memory[::2, 1]
    twins.variables = [(view, Variable(view.get())) for view in views]
    for _ in range(3):
        wide = twins.random((6, 4), np.float32)
        narrow = twins.random((1,), np.float32)
        twins.step(
            [
                (on_gpu(wide).T[:, :3], wide.T[:, :3]),
                (on_gpu(np.broadcast_to(narrow, 2)), np.broadcast_to(narrow, 2)),
            ]
        )
    twins.check()


def test_misaligned_views_are_updated() -> None:
    twins = Twins("MomentumOptimizer")
    memory = on_gpu(np.zeros(100, np.float32))
    twins.variables = [(memory[1:50], Variable(np.zeros(49, np.float32)))]
    for _ in range(2):
        grad = twins.random((49,), np.float32)
        there = on_gpu(np.concatenate([grad[:3], grad]))[3:]
        twins.step([(there, grad)])
    twins.check()
    assert not memory.get()[[0, *range(50, 100)]].any()


# Launches


def test_one_launch_for_all_variables_of_a_device_and_type(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    variables = [Variable(np.ones(5, np.float32), device="gpu:0") for _ in range(9)]
    variables += [Variable(np.ones(5, np.float64), device="gpu:0") for _ in range(9)]
    variables += [Variable(np.ones(5, np.float32), device="gpu:1")]
    gpuopt.AdamOptimizer().apply_gradients([(v.numpy(), v) for v in variables])
    assert [launcher.launches for launcher in emulated_gpus] == [2, 1]


@pytest.mark.parametrize("moving", [False, True], ids=["same gradients", "fresh gradients"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("num_weights", [3, FEW_GRADIENTS + 1])
def test_a_steady_step_allocates_compiles_and_waits_for_nothing(
    emulated_gpus: list[EmulatorLauncher],
    monkeypatch: pytest.MonkeyPatch,
    moving: bool,
    sparse: bool,
    num_weights: int,
) -> None:
    table = Variable(np.ones((20, 4), np.float32), device="gpu:0")
    weights = [Variable(np.ones(5, np.float32), device="gpu:0") for _ in range(num_weights)]
    step = Variable(0, name="step")
    optimizer = gpuopt.AdamOptimizer()

    def gradients() -> list[Any]:
        slices = IndexedSlices(on_gpu(np.ones((6, 4), np.float32)), on_gpu([3, 1, 3, 0, 7, 7]))
        dense = [on_gpu(np.ones(5, np.float32)) for _ in weights]
        return [slices, *dense] if sparse else dense

    variables = [table, *weights] if sparse else weights
    steps = [gradients() for _ in range(6)] if moving else [gradients()] * 6
    for given in steps[:5]:
        optimizer.apply_gradients(zip(given, variables, strict=True), global_step=step)
    compiled: list[Any] = []
    monkeypatch.setattr(kernel_library, "compile_all", lambda *given: compiled.append(given))
    before = vars(fake_cupy.counts).copy()
    launches, uploads = emulated_gpus[0].launches, emulated_gpus[0].uploads
    optimizer.apply_gradients(zip(steps[5], variables, strict=True), global_step=step)
    assert vars(fake_cupy.counts) == before
    assert not compiled
    if not sparse:
        assert emulated_gpus[0].launches == launches + 1
        # Scalars and a few addresses are passed by value.
        assert emulated_gpus[0].uploads == uploads + (moving and num_weights > FEW_GRADIENTS)


def test_sets_of_gradients_in_turn_are_uploaded_once(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    variables = [Variable(np.zeros(5, np.float32), device="gpu:0") for _ in range(8)]
    sets = [[on_gpu(np.full(5, i, np.float32)) for _ in variables] for i in (1, 10, 100, 1000)]
    optimizer = gpuopt.GradientDescentOptimizer(-1.0)
    uploads = []
    for turn in range(4):
        for number, gradients in enumerate(sets):
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            assert variables[7].numpy()[0] == 1111 * turn + sum(
                s[0].get()[0] for s in sets[: number + 1]
            )
        uploads.append(emulated_gpus[0].uploads)
    assert len(set(uploads)) == 1
    # One list more than is known: the oldest is forgotten, and the values stay right.
    sets.append([on_gpu(np.full(5, 10000, np.float32)) for _ in variables])
    before = variables[0].numpy()[0]
    for gradients in [*sets, *sets]:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    assert variables[0].numpy()[0] == before + 2 * 11111


@pytest.mark.parametrize("num_variables", [3, FEW_GRADIENTS + 1])
def test_a_step_that_ctrl_c_stops_before_its_launch_leaves_the_next_its_gradients(
    monkeypatch: pytest.MonkeyPatch, num_variables: int
) -> None:
    variables = [Variable(np.zeros(2, np.float32), device="gpu:0") for _ in range(num_variables)]
    ones, hundreds = (
        [(on_gpu(np.full(2, value, np.float32)), variable) for variable in variables]
        for value in (1, 100)
    )
    optimizer = gpuopt.GradientDescentOptimizer(-1.0)
    for given in (hundreds, ones):
        optimizer.apply_gradients(given)
    replace = Launch.replace

    def replace_and_stop(self: Launch, **arguments: Any) -> None:
        replace(self, **arguments)
        if not {"grads", "few_grads"}.isdisjoint(arguments):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Launch, "replace", replace_and_stop)
        with pytest.raises(KeyboardInterrupt):
            optimizer.apply_gradients(hundreds)
    optimizer.accept_unfinished_step()
    optimizer.apply_gradients(ones)
    assert all(variable.numpy().tolist() == [102] * 2 for variable in variables)


def test_a_new_gradient_with_the_id_of_a_dead_one_is_not_taken_for_it() -> None:
    """The cache must not take a new array for a dead one with the same id."""
    w = Variable(np.zeros(3, np.float32), device="gpu:0")
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    gradients = [on_gpu(np.full(3, value, np.float32)) for value in (1, 2)]
    expected = 0.0
    for step in range(12):
        given = gradients[step // 4 % 2]
        optimizer.apply_gradients([(given, w)])
        expected -= 1 + step // 4 % 2
        if step % 5 == 4:  # another object, likely with the id of the one that goes
            del given
            value = gradients.pop(0).get()[0]
            gradients.append(on_gpu(np.full(3, value, np.float32)))
            gradients.reverse()
        assert w.numpy().tolist() == [expected] * 3


@pytest.mark.parametrize("how", ["strided", "overlapping"])
def test_gradients_that_are_copied_are_copied_in_each_step(how: str) -> None:
    memory = on_gpu(np.ones((2, 3), np.float32))
    w, other = (Variable(np.zeros(6, np.float32), device="gpu:0") for _ in range(2))
    gradient = memory.T if how == "strided" else w.storage[:3].reshape(3)
    target = Variable(np.zeros(gradient.shape, np.float32), device="gpu:0")
    given = [(gradient, target), (on_gpu(np.ones(6, np.float32)), w)]
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    # Of another size than a copy of the gradient: it could take the memory of the one before.
    expected = np.zeros(gradient.shape, np.float64)
    for step in range(6):
        host_memory(memory)[...] = np.arange(6).reshape(2, 3) + step
        expected -= host_memory(gradient)
        optimizer.apply_gradients(given)
        assert target.numpy().tolist() == expected.tolist()
    del other


def test_a_gradient_in_a_variable_of_another_dtype_is_copied_in_each_step() -> None:
    a = Variable(np.zeros(6, np.float32), device="gpu:0")
    b = Variable(np.zeros(3), device="gpu:0")
    given = [(on_gpu(np.zeros(6, np.float32)), a), (a.storage.view(np.float64), b)]
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    others = []
    for step in range(6):
        others.append(on_gpu(np.zeros(3)))  # where the last copy was
        host_memory(a.storage)[...] = np.full(3, float(step)).view(np.float32)
        optimizer.apply_gradients(given)
        assert b.numpy().tolist() == [-sum(range(step + 1))] * 3


def test_a_gradient_in_the_first_of_three_updates_is_read_before() -> None:
    a = Variable(np.ones((3, 2), np.float32), device="gpu:0")
    b = Variable(np.ones(3), device="gpu:0")
    table = Variable(np.zeros((3, 2), np.float32), device="gpu:0")
    slices = IndexedSlices(a.storage, on_gpu([0, 1, 2]))
    pairs = [(on_gpu(np.ones((3, 2), np.float32)), a), (on_gpu(np.ones(3)), b), (slices, table)]
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients(pairs)
    assert a.numpy().tolist() == [[0, 0]] * 3
    assert table.numpy().tolist() == [[-1, -1]] * 3


def test_tables_of_two_dtypes_are_updated_in_one_call() -> None:
    dtypes = np.float32, np.float64
    tables = [Variable(np.zeros((4, 2), dtype), device="gpu:0") for dtype in dtypes]
    slices = [
        IndexedSlices(on_gpu(np.full((3, 2), i + 1, dtype)), on_gpu([i, 3, 3]))
        for i, dtype in enumerate(dtypes)
    ]
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients(zip(slices, tables, strict=True))
    assert tables[0].numpy()[:, 1].tolist() == [-1, 0, 0, -2]
    assert tables[1].numpy()[:, 1].tolist() == [0, -2, 0, -4]


def test_gradients_in_host_memory_are_moved_in_each_step() -> None:
    gradient = np.ones(3, np.float32)
    w = Variable(np.zeros(3, np.float32), device="gpu:1")
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    expected = 0.0
    for step in range(8):
        gradient[...] = step
        expected -= step
        optimizer.apply_gradients([(gradient, w)])
        assert w.numpy().tolist() == [expected] * 3


def test_a_hook_may_change_the_gradient_in_each_step() -> None:
    class Growing(gpuopt.GradientDescentOptimizer):
        def _apply_dense(self, grad: Any, var: Variable) -> None:
            # They live on, so that none lies where another was.
            changed.append(grad * np.float32(len(changed) + 1))
            super()._apply_dense(changed[-1], var)

    changed: list[Any] = []
    w = Variable(np.zeros(3, np.float32), device="gpu:0")
    optimizer = Growing(1.0)
    given = [(on_gpu(np.ones(3, np.float32)), w)]
    for step in range(8):
        optimizer.apply_gradients(given)
        assert w.numpy().tolist() == [-sum(range(step + 2))] * 3


def test_a_slot_that_was_replaced_is_used_from_then_on() -> None:
    w = Variable(np.zeros(2, np.float32), device="gpu:0")
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
    given = [(on_gpu(np.ones(2, np.float32)), w)]
    for _ in range(5):
        optimizer.apply_gradients(given)
    table = optimizer._slot_dict("momentum")
    table[w.identity] = Variable(np.float32([6, 8]), device="gpu:0")
    w.assign(np.zeros(2, np.float32))
    optimizer.apply_gradients(given)
    assert w.numpy().tolist() == [-4, -5]


def test_a_steps_name_is_given_to_profilers(emulated_gpus: list[EmulatorLauncher]) -> None:
    w = Variable(np.zeros(2, np.float32), device="gpu:0")
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    for name in (None, "warm up"):
        optimizer.apply_gradients([([1.0, 1.0], w)], name=name)
    assert emulated_gpus[0].ranges == ["GradientDescent", "warm up"]


# Streams


def waits(launchers: list[EmulatorLauncher]) -> list[tuple[int, int]]:
    seen = launchers[0].waits[:]
    launchers[0].waits.clear()
    return seen


def test_another_stream_waits_for_the_last_update(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    a, b, c = (Variable(np.ones(3, np.float32), device="gpu:0") for _ in range(3))
    gradient = on_gpu(np.ones(3, np.float32))
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    waits(emulated_gpus)
    optimizer.apply_gradients([(gradient, a), (gradient, b)])
    optimizer.apply_gradients([(gradient, a), (gradient, b)])
    assert waits(emulated_gpus) == []
    with fake_cupy.cuda.Stream() as one:
        optimizer.apply_gradients([(gradient, a)])  # without b
        assert waits(emulated_gpus) == [(one.ptr, 0)]
        optimizer.apply_gradients([(gradient, a)])
        assert waits(emulated_gpus) == []
    with fake_cupy.cuda.Stream() as two:
        optimizer.apply_gradients([(gradient, a), (gradient, b)])
        assert waits(emulated_gpus) == [(two.ptr, one.ptr), (two.ptr, 0)]
        a.assign(np.zeros(3, np.float32))
        c.value()
        assert waits(emulated_gpus) == [(two.ptr, 0)]
        c.assign_add(np.ones(3, np.float32))
    assert a.value() is a.storage
    assert c.numpy().tolist() == [2, 2, 2]
    assert optimizer.get_slot(b, "momentum").numpy().any()
    assert waits(emulated_gpus) == [(two.ptr, 0), *[(0, two.ptr)] * 3]


def test_a_step_waits_for_the_same_step_on_another_stream(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    w = Variable(np.ones(3, np.float32), device="gpu:0")
    gradient = on_gpu(np.ones(3, np.float32))
    optimizer = gpuopt.GradientDescentOptimizer(0.1)
    streams = [fake_cupy.cuda.Stream() for _ in range(2)]
    waits(emulated_gpus)
    for stream in (streams[0], streams[1], streams[1], streams[0]):
        with stream:
            optimizer.apply_gradients([(gradient, w)])
    one, two = (stream.ptr for stream in streams)
    assert waits(emulated_gpus) == [(one, 0), (two, one), (one, two)]


def test_two_optimizers_of_one_variable_wait_for_each_other(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    w = Variable(np.ones(3, np.float32), device="gpu:0")
    gradient = on_gpu(np.ones(3, np.float32))
    optimizers = [gpuopt.GradientDescentOptimizer(0.1) for _ in range(2)]
    streams = [fake_cupy.cuda.Stream() for _ in range(2)]
    waits(emulated_gpus)
    for _ in range(2):
        for optimizer, stream in zip(optimizers, streams, strict=True):
            with stream:
                optimizer.apply_gradients([(gradient, w)])
    one, two = (stream.ptr for stream in streams)
    assert waits(emulated_gpus) == [(one, 0), (two, one), (one, two), (two, one)]


@pytest.mark.parametrize("own_stream", [False, True])
def test_gradients_are_held_until_another_stream_has_read_them(
    emulated_gpus: list[EmulatorLauncher], monkeypatch: pytest.MonkeyPatch, own_stream: bool
) -> None:
    """CuPy gives freed memory back to its own stream, which may write to it at once."""
    w = Variable(np.ones(3, np.float32), device="gpu:0")
    optimizer = gpuopt.GradientDescentOptimizer(0.1)
    events = []
    record = emulated_gpus[0].record

    def pending(event: Any = None) -> Any:
        event = record(event)
        event.done = False
        events.append(event)
        return event

    monkeypatch.setattr(emulated_gpus[0], "record", pending)
    gradient = on_gpu(np.ones(3, np.float32))
    gone = weakref.ref(gradient)
    with fake_cupy.cuda.Stream() if own_stream else fake_cupy.cuda.Device(0):
        optimizer.apply_gradients([(gradient, w)])
        del gradient
        assert (gone() is not None) == own_stream
        optimizer.apply_gradients([(on_gpu(np.ones(3, np.float32)), w)])
        assert (gone() is not None) == own_stream
        for event in events:
            event.done = True
        optimizer.apply_gradients([(on_gpu(np.ones(3, np.float32)), w)])
    assert gone() is None


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_rows_are_held_until_another_stream_has_summed_them(
    emulated_gpus: list[EmulatorLauncher], monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    launcher, events = emulated_gpus[0], []
    record, download = launcher.record, launcher.download

    def pending(event: Any = None) -> Any:
        events.append(record(event))
        events[-1].done = False
        return events[-1]

    def last_download(source: Any) -> Download:
        found = download(source)
        if source.dtype == np.uint32:  # the number of runs
            monkeypatch.setattr(launcher, "record", pending)
            if is_interrupted:
                raise KeyboardInterrupt
        return found

    w = Variable(np.ones(3, np.float32), device="gpu:0")
    rows = on_gpu([2, 0, 2])
    gone = weakref.ref(rows)
    monkeypatch.setattr(launcher, "download", last_download)
    with fake_cupy.cuda.Stream(), contextlib.suppress(KeyboardInterrupt):
        backend_for(GPUS[0]).sum_duplicate_rows(on_gpu(np.ones((3, 1), np.float32)), rows)
    del rows
    assert gone() is not None
    for event in events:
        event.done = True
    w.assign_add(np.ones(3, np.float32))
    assert gone() is None


@pytest.mark.parametrize("step", [None, 2])
@pytest.mark.parametrize("strided", ["values", "rows"])
def test_a_sparse_gradient_is_held_as_the_caller_gave_it(
    emulated_gpus: list[EmulatorLauncher],
    monkeypatch: pytest.MonkeyPatch,
    strided: str,
    step: int | None,
) -> None:
    """Where it is not contiguous, kernels read a copy, and the copy's kernel the original."""
    table = Variable(np.ones((4, 2), np.float32), device="gpu:0")
    optimizer = gpuopt.GradientDescentOptimizer(0.1)
    record = emulated_gpus[0].record
    events = []

    def pending(event: Any = None) -> Any:
        event = record(event)
        event.done = False
        events.append(event)
        return event

    length = 2 * (step or 1)
    values = on_gpu(np.ones((length if strided == "values" else 2, 2), np.float32))
    rows = on_gpu(np.zeros(length if strided == "rows" else 2, np.int64))
    gone = weakref.ref(values), weakref.ref(rows)
    with fake_cupy.cuda.Stream():
        monkeypatch.setattr(emulated_gpus[0], "record", pending)
        given = values[::step] if strided == "values" else values
        named = rows[::step] if strided == "rows" else rows
        optimizer.apply_gradients([(IndexedSlices(given, named), table)])
        del values, rows, given, named
        gc.collect()
        assert all(each() is not None for each in gone)
        for event in events:
            event.done = True
        optimizer.check()
        optimizer.apply_gradients([(on_gpu(np.ones((4, 2), np.float32)), table)])
    gc.collect()
    assert all(each() is None for each in gone)


def test_the_host_waits_for_the_step_before_the_last_on_two_streams(
    emulated_gpus: list[EmulatorLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a host that is far ahead would keep the gradients of all its steps."""
    record = emulated_gpus[0].record

    events: list[Any] = []

    def pending(event: Any = None) -> Any:
        event = record(event)
        event.done = False
        events.append(event)
        return event

    w = Variable(np.ones(3, np.float32), device="gpu:0")
    optimizer = gpuopt.GradientDescentOptimizer(0.1)
    monkeypatch.setattr(emulated_gpus[0], "record", pending)
    monkeypatch.setattr(locks, "DEADLINE_S", 0.05)
    with fake_cupy.cuda.Stream():
        for _ in range(2):
            optimizer.apply_gradients([(on_gpu(np.ones(3, np.float32)), w)])
        with pytest.raises(gpuopt.DeadlineExceededError, match="two steps behind"):
            optimizer.apply_gradients([(on_gpu(np.ones(3, np.float32)), w)])
    # Each step has its own: to record one again would put off what the step before keeps.
    assert len(events) == len(set(map(id, events))) >= 2


def test_rows_are_not_kept_after_the_update() -> None:
    table = Variable(np.zeros((4, 2), np.float32), device="gpu:0")
    rows = on_gpu([1, 3])
    gone = weakref.ref(rows)
    slices = IndexedSlices(on_gpu(np.ones((2, 2), np.float32)), rows)
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    optimizer.apply_gradients([(slices, table)])
    optimizer.check()
    del rows, slices
    assert gone() is None
    assert table.numpy()[:, 0].tolist() == [0, -1, 0, -1]


def test_an_update_waits_for_readings_on_other_streams(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    w, read = (Variable(np.ones(3, np.float32), device="gpu:0") for _ in range(2))
    gradient = on_gpu(np.ones(3, np.float32))
    optimizer = gpuopt.GradientDescentOptimizer(0.1)
    optimizer.apply_gradients([(gradient, read)])
    with fake_cupy.cuda.Stream() as one:
        w.assign(read)
    waits(emulated_gpus)
    optimizer.apply_gradients([(gradient, read)])
    assert waits(emulated_gpus) == [(0, one.ptr)]
    optimizer.apply_gradients([(gradient, read)])
    assert waits(emulated_gpus) == []


def test_an_update_waits_for_arithmetic_on_other_streams(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    w = Variable(np.ones(3, np.float32), device="gpu:0")
    gradient = on_gpu(np.ones(3, np.float32))
    optimizer = gpuopt.GradientDescentOptimizer(0.1)
    optimizer.apply_gradients([(gradient, w)])
    with fake_cupy.cuda.Stream() as one:
        w.sum()
    waits(emulated_gpus)
    optimizer.apply_gradients([(gradient, w)])
    assert waits(emulated_gpus) == [(0, one.ptr)]
    optimizer.apply_gradients([(gradient, w)])
    assert waits(emulated_gpus) == []


def test_arithmetic_in_a_program_with_one_stream_records_nothing(
    emulated_gpus: list[EmulatorLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = Variable(np.ones(3, np.float32), device="gpu:0")
    events: list[Any] = []
    monkeypatch.setattr(emulated_gpus[0], "record", lambda event=None: events.append(event))
    assert (w * 2).get().tolist() == [2, 2, 2]
    assert events == []


def test_what_is_done_is_let_go_by_an_update_of_any_variable() -> None:
    a, b = (Variable(np.ones(3, np.float32), device="gpu:0") for _ in range(2))
    optimizer = gpuopt.GradientDescentOptimizer(0.1)
    gradient = on_gpu(np.ones(3, np.float32))
    gone = weakref.ref(gradient)
    with fake_cupy.cuda.Stream():
        optimizer.apply_gradients([(gradient, a)])
        del gradient
        assert gone() is not None
        optimizer.apply_gradients([(on_gpu(np.ones(3, np.float32)), b)])
    assert gone() is None


def test_threads_with_streams_of_their_own_lose_no_update() -> None:
    w = Variable(np.zeros(3, np.float32), device="gpu:0")
    table = Variable(np.zeros((4, 2), np.float32), device="gpu:1")
    step = Variable(0, name="step")
    optimizer = gpuopt.GradientDescentOptimizer(1.0, use_locking=True)

    def work() -> None:
        gradient, rows = on_gpu(np.ones(3, np.float32)), on_gpu([3, 1, 3], 1)
        slices = IndexedSlices(on_gpu(np.ones((3, 2), np.float32), 1), rows)
        with fake_cupy.cuda.Stream():
            for _ in range(20):
                optimizer.apply_gradients([(gradient, w), (slices, table)], global_step=step)
                w.value()

    run_threads([work] * 4, lambda: None)
    optimizer.check()
    assert int(step) == 80
    assert w.numpy().tolist() == [-80] * 3
    assert table.numpy()[:, 0].tolist() == [0, -80, 0, -160]


# Rows out of range


class Table:
    """A table and a weight on gpu:0, a weight on the CPU, and a global step."""

    def __init__(self, optimizer: gpuopt.Optimizer | None = None) -> None:
        self.table = Variable(np.ones((6, 2), np.float32), name="table", device="gpu:0")
        self.dense = Variable(np.ones(3, np.float32), name="dense", device="gpu:0")
        self.step = Variable(0, name="step")
        self.optimizer = optimizer or gpuopt.AdamOptimizer(0.1)
        self.apply([0, 5])

    def apply(self, rows: list[int] | None) -> None:
        pairs: list[Any] = [(on_gpu(np.ones(3, np.float32)), self.dense)]
        if rows is not None:
            values = on_gpu(np.ones((len(rows), 2), np.float32))
            pairs.append((IndexedSlices(values, on_gpu(np.array(rows))), self.table))
        self.optimizer.apply_gradients(pairs, global_step=self.step)

    def bytes(self) -> list[Any]:
        """Everything, without having the device asked for errors."""
        return [
            *(host_memory(v.storage).tobytes() for v in (self.table, self.dense)),
            # Without a look at the flag of bad rows, which `numpy` takes.
            *(
                (v.numpy() if isinstance(v, HostScalar) else host_memory(v.storage)).tobytes()
                for v in self.optimizer.variables()
            ),
            int(self.step),
        ]


@pytest.fixture
def slow_flags(emulated_gpus: list[EmulatorLauncher], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Delays copies of flags to the host until the test releases them or something waits."""
    download = emulated_gpus[0].download
    pending: list[Any] = []

    def slow(source: Any) -> Any:
        found = download(source)
        found.event.done = False
        pending.append(found.event)
        return found

    monkeypatch.setattr(emulated_gpus[0], "download", slow)
    monkeypatch.setattr(Download, "wait", lambda found, what: setattr(found.event, "done", True))
    return pending


def test_waits_for_a_gpu_end_and_say_what_is_waited_for(
    emulated_gpus: list[EmulatorLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    record, download = emulated_gpus[0].record, emulated_gpus[0].download

    def pending(event: Any) -> Any:
        event.done = False
        events.append(event)
        return event

    def slow_download(source: Any) -> Any:
        found = download(source)
        pending(found.event)
        return found

    model = Table()
    monkeypatch.setattr(locks, "DEADLINE_S", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(emulated_gpus[0], "download", slow_download)
        model.apply([1])
    with pytest.raises(gpuopt.DeadlineExceededError, match="gpu:0, which checks gradients"):
        model.optimizer.check()
    for event in events:
        event.done = True
    with monkeypatch.context() as patch:
        patch.setattr(emulated_gpus[0], "record", lambda event=None: pending(record(event)))
        with pytest.raises(gpuopt.DeadlineExceededError, match="gpu:0, from which values are read"):
            model.dense.numpy()
    model.apply([1])
    model.optimizer.check()
    model.dense.numpy()


@pytest.mark.parametrize("bad", [6, -1, 2**40])
def test_a_bad_row_changes_nothing_and_is_raised_by_the_next_call(bad: int) -> None:
    model = Table()
    before = model.bytes()
    model.apply([1, bad, 2])
    with pytest.raises(IndexError, match=rf'"table": row {bad} is not in \[0, 6\).*gpu:0'):
        model.apply([1])
    assert model.bytes() == before
    model.apply([1])
    assert int(model.step) == 2


def test_calls_after_a_bad_row_change_nothing_until_the_host_knows(slow_flags: list[Any]) -> None:
    model, reference = Table(), Table()
    for event in slow_flags:
        event.done = True
    before = model.bytes()
    model.apply([6])
    model.apply([1])
    model.apply(None)
    assert int(model.step) == 4
    for event in slow_flags:
        event.done = True
    with pytest.raises(IndexError, match="the 2 calls since"):
        model.apply([1])
    assert model.bytes() == before
    model.apply([3])
    reference.apply([3])
    model.optimizer.check()
    assert model.bytes() == reference.bytes()


def test_a_call_on_another_stream_waits_for_the_flag_of_bad_rows(
    emulated_gpus: list[EmulatorLauncher], slow_flags: list[Any]
) -> None:
    model = Table()
    with fake_cupy.cuda.Stream() as one:
        model.apply([6])
    other = Variable(np.ones(3, np.float32), device="gpu:0")
    waits(emulated_gpus)
    with fake_cupy.cuda.Stream() as two:
        model.optimizer.apply_gradients([(on_gpu(np.ones(3, np.float32)), other)])
    assert (two.ptr, one.ptr) in waits(emulated_gpus)
    with pytest.raises(IndexError, match="the 1 calls since"):
        model.optimizer.check()


@pytest.mark.internal
def test_a_known_dense_update_reads_the_flag_from_the_first_rows_on() -> None:
    table = Variable(np.zeros((4, 2), np.float32), device="gpu:0")
    w = Variable(np.zeros(3, np.float32), device="gpu:0")
    gradient = on_gpu(np.ones(3, np.float32))
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    optimizer.apply_gradients([(gradient, w)])
    bad = IndexedSlices(on_gpu(np.ones((1, 2), np.float32)), on_gpu([4]))
    optimizer.apply_gradients([(gradient, w), (bad, table)])
    with pytest.raises(IndexError, match="row 4"):
        optimizer.check()
    assert w.numpy().tolist() == [-1] * 3


def test_the_host_waits_for_checks_that_are_far_behind(slow_flags: list[Any]) -> None:
    model = Table()
    for _ in range(200):
        model.apply([1])
    assert len(model.optimizer.ledger.books.promises) <= 65
    assert sum(not event.done for event in slow_flags) == len(model.optimizer.ledger.books.promises)


@pytest.mark.parametrize(
    "ask",
    [
        lambda model, folder: model.optimizer.check(),
        lambda model, folder: model.dense.numpy(),
        lambda model, folder: float(model.table.numpy()[0, 0]),
        lambda model, folder: model.optimizer.state_dict(),
        lambda model, folder: gpuopt.Saver().save(folder / "model"),
    ],
    ids=["check", "numpy", "element", "state_dict", "save"],
)
def test_reading_a_value_raises_the_error_of_a_bad_row(
    slow_flags: list[Any], tmp_path: Any, ask: Any
) -> None:
    model = Table()
    model.optimizer.check()
    before = model.bytes()
    model.apply([0, -7])
    with pytest.raises(IndexError, match='"table": row -7'):
        ask(model, tmp_path)
    assert model.bytes() == before
    ask(model, tmp_path)


def test_with_gpuopt_check_the_call_itself_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUOPT_CHECK", "1")
    model = Table()
    before = model.bytes()
    with pytest.raises(IndexError, match='"table": row 6'):
        model.apply([6])
    assert model.bytes() == before


def test_a_bad_row_does_not_stop_other_optimizers(slow_flags: list[Any]) -> None:
    bad, good = Table(), Table()
    bad.apply([6])
    good.apply([2])
    good.optimizer.ledger.raise_late(wait=True)
    assert int(good.step) == 2
    with pytest.raises(IndexError, match="row 6"):
        bad.optimizer.check()


def test_a_check_of_several_variables_reads_no_lists_of_another_thread(
    emulated_gpus: list[EmulatorLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(optimizer: gpuopt.Optimizer, tables: Sequence[Variable], rows: Sequence[int]) -> None:
        ones = on_gpu(np.ones((1, 4), np.float32))
        slices = [IndexedSlices(ones, on_gpu([row])) for row in rows]
        optimizer.apply_gradients(zip(slices, tables, strict=True))

    small, large = (
        [Variable(np.zeros((height, 4), np.float32), device="gpu:0") for _ in range(2)]
        for height in (8, 100)
    )
    mine, others = gpuopt.GradientDescentOptimizer(1.0), gpuopt.GradientDescentOptimizer(1.0)
    thread = threading.Thread(target=step, args=(others, large, [98, 99]))
    upload = emulated_gpus[0].upload

    def upload_beside_the_thread(target: Any, source: np.ndarray) -> None:
        upload(target, source)
        if not thread.ident:
            thread.start()
            thread.join(0.2)  # it waits for this thread, or is done

    monkeypatch.setattr(emulated_gpus[0], "upload", upload_beside_the_thread)
    step(mine, small, [3, 8])
    thread.join()
    with pytest.raises(IndexError, match=r"row 8 is not in \[0, 8\)"):
        mine.check()
    others.check()
    assert not any(table.numpy().any() for table in small)
    assert all(table.numpy().sum() == -4 for table in large)


def test_a_signal_handler_in_an_update_waits_for_no_check_that_waits_for_the_update(
    slow_flags: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "DEADLINE_S", 2.0)
    model, w = Table(), Variable(np.zeros(2, np.float32), device="gpu:0")
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    model.apply([1])
    assert slow_flags  # the next read of anything waits for this check
    errors: list[BaseException] = []

    def step() -> None:
        try:
            model.apply([2])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=step)

    def handle() -> None:
        thread.start()
        time.sleep(0.2)
        w.numpy()

    with HandleAt(1, handle, ["dense_launch.py"]) as handled:
        optimizer.apply_gradients([(on_gpu(np.float32([1, 2])), w)])
    thread.join()
    assert not handled.is_over
    assert not errors
    assert w.numpy().tolist() == [-1, -2]
    assert int(model.step) == 3


def test_hooks_in_plain_array_code_are_not_called_for_bad_rows() -> None:
    class Plain(gpuopt.Optimizer):
        def __init__(self) -> None:
            super().__init__(False, "Plain")

        def _apply_dense(self, grad: Any, var: Variable) -> None:
            var.assign_sub(grad)

        def _apply_sparse(self, grad: IndexedSlices, var: Variable) -> None:
            var[grad.indices] -= grad.values

    w = Variable(np.ones(2, np.float32), device="gpu:1")
    Plain().apply_gradients([(on_gpu(np.float32([1, 2]), 1), w)])
    assert w.numpy().tolist() == [0, -1]
    model = Table(Plain())
    assert model.table.numpy().tolist() == [[0, 0], *[[1, 1]] * 4, [0, 0]]
    before = model.bytes()
    with pytest.raises(IndexError, match='"table": row 6'):
        model.apply([1, 6])
    assert model.bytes() == before


def test_a_constraint_waits_for_the_check() -> None:
    model = Table()
    model.dense = Variable(
        np.ones(3, np.float32), name="dense", device="gpu:0", constraint=lambda w: w * 0
    )
    before = model.bytes()
    with pytest.raises(IndexError, match='"table": row 9'):
        model.apply([9])
    assert model.bytes()[:2] == before[:2]


def test_rows_in_host_memory_are_checked_before_anything_is_written() -> None:
    model = Table()
    before = model.bytes()
    slices = IndexedSlices(np.ones((1, 2), np.float32), np.array([6]))
    with pytest.raises(IndexError, match=r'"table": indices\[0\] = 6'):
        model.optimizer.apply_gradients([(slices, model.table)])
    assert model.bytes() == before


def test_more_rows_than_can_be_sorted_are_refused() -> None:
    model = Table()
    before = model.bytes()
    values = fake_cupy.ndarray(np.broadcast_to(np.float32(0), (2**31, 2)))
    indices = fake_cupy.ndarray(np.broadcast_to(np.int32(0), 2**31))
    with pytest.raises(ValueError, match='"table" has 2147483648 rows; on gpu:0'):
        model.optimizer.apply_gradients([(IndexedSlices(values, indices), model.table)])
    assert model.bytes() == before


def test_a_check_that_nobody_has_read_keeps_no_gradient(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    table = Variable(np.zeros((4, 2), np.float32), device="gpu:0")
    values = on_gpu(np.ones((2, 2), np.float32))
    optimizer = gpuopt.AdamOptimizer()
    optimizer.apply_gradients([(IndexedSlices(values, on_gpu([1, 3])), table)])
    assert optimizer.ledger.books.promises
    gradient, variable = weakref.ref(values), weakref.ref(table)
    del values, table
    gc.collect()
    assert gradient() is None
    assert variable() is None


@pytest.mark.internal
@pytest.mark.parametrize("failing", range(12))
def test_a_launch_that_fails_leaves_no_row_marked(failing: int) -> None:
    """A mark left behind would make the next step of Adam skip that row."""
    model = Table()
    model.apply([0, 1, 2, 3, 4, 5])
    with failing_launch(failing, KeyboardInterrupt), contextlib.suppress(KeyboardInterrupt):
        model.apply([1, 2, 1])
    model.optimizer.accept_unfinished_step()
    var, m, v = arrays_of(model.optimizer, model.table)
    beta1_power, beta2_power = (power.numpy() for power in model.optimizer.state.scalars_of_steps())
    model.apply([4])
    grad = np.zeros((6, 2), np.float32)
    grad[4] = 1
    m += (1 - 0.9) * (grad - m)
    v += (1 - 0.999) * (grad * grad - v)
    var -= 0.1 * np.sqrt(1 - beta2_power) / (1 - beta1_power) * m / (np.sqrt(v) + 1e-8)
    np.testing.assert_allclose(model.table.numpy(), var, rtol=1e-6)


# The first launch of a sparse step looks at its rows.
@pytest.mark.parametrize(("is_sparse", "failing"), [(False, 0), (True, 1), (True, 2)])
def test_a_launch_that_fails_keeps_other_streams_waiting(
    emulated_gpus: list[EmulatorLauncher], is_sparse: bool, failing: int
) -> None:
    a, b = (Variable(np.ones((3, 2), np.float32), device="gpu:0") for _ in range(2))
    gradient = on_gpu(np.ones((3, 2), np.float32))
    given = IndexedSlices(gradient, on_gpu([0, 1, 2])) if is_sparse else gradient
    optimizer = gpuopt.GradientDescentOptimizer(0.1)
    with fake_cupy.cuda.Stream() as one:
        optimizer.apply_gradients([(gradient, a), (gradient, b)])
        with failing_launch(failing, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            optimizer.apply_gradients([(given, a)])
    optimizer.accept_unfinished_step()
    waits(emulated_gpus)
    with fake_cupy.cuda.Stream() as two:
        optimizer.apply_gradients([(gradient, a)])
    assert waits(emulated_gpus) == [(two.ptr, one.ptr)]


# The check of rows, three dense updates, a sort, and a sparse update.
@pytest.mark.parametrize("failing", range(6))
def test_a_launch_that_fails_says_what_was_updated_and_leaves_the_optimizer_usable(
    failing: int,
) -> None:
    ones = {"a": np.ones(3, np.float32), "b": np.ones(3), "c": np.ones(3, np.float32)}
    table = Variable(np.zeros((4, 2), np.float32), name="table", device="gpu:0")
    variables = {
        name: Variable(0 * one, name=name, device=f"gpu:{int(name == 'c')}")
        for name, one in ones.items()
    }
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)

    def step() -> None:
        dense = [(on_gpu(one, int(name == "c")), variables[name]) for name, one in ones.items()]
        slices = IndexedSlices(on_gpu(np.ones((4, 2), np.float32)), on_gpu([0, 1, 2, 3]))
        optimizer.apply_gradients([*dense, (slices, table)])

    with failing_launch(failing, MemoryError), pytest.raises(MemoryError) as raised:
        step()
    said = "".join(getattr(raised.value, "__notes__", []))
    updated, _, unsure = said.partition("Updated, in part")
    variables["table"] = table
    for name, variable in variables.items():
        if f'"{name}"' in updated:
            assert (variable.numpy() == -1).all()
        elif f'"{name}"' not in unsure:
            assert (variable.numpy() == 0).all()
    assert not said or 'The step of "Momentum" was not finished' in said
    expected = {}
    for name, variable in variables.items():
        slot = optimizer.get_slot(variable, "momentum")
        # Before the first update, the slots that the step has made are taken back.
        assert (slot is None) == (failing == 0)
        before = 0 if slot is None else slot.numpy()
        expected[name] = variable.numpy() - (0.5 * before + 1)
    if said:
        with pytest.raises(RuntimeError, match="was not finished"):
            step()
    optimizer.accept_unfinished_step()
    step()
    optimizer.check()
    for name, variable in variables.items():
        np.testing.assert_array_equal(variable.numpy(), expected[name])


@pytest.mark.internal
def test_a_refused_call_is_undone_once_wherever_ctrl_c_comes() -> None:
    """Also what waited to be restored waits again."""
    trained = Variable(np.zeros((4, 2), np.float32), device="gpu:0")
    rows = {row: on_gpu([row]) for row in (1, 9)}
    values = on_gpu(np.ones((1, 2), np.float32))
    adam = gpuopt.AdamOptimizer(0.1)
    adam.apply_gradients([(IndexedSlices(values, rows[1]), trained)])
    for moment in itertools.count(1, 1 if os.environ.get("GPUOPT_FULL") else 6):
        table = Variable(np.zeros((4, 2), np.float32), name=f"table{moment}", device="gpu:0")
        optimizer, step = gpuopt.AdamOptimizer(0.1), Variable(5)
        optimizer.load_state_dict(adam.state_dict({table.name: trained}), {})
        optimizer.apply_gradients([(IndexedSlices(values, rows[9]), table)], step)
        interrupts = InterruptAt(moment, weakref)  # Python loses what comes in its callbacks
        with contextlib.suppress(Interrupt, IndexError), interrupts:
            optimizer.check()
        with contextlib.suppress(IndexError):
            optimizer.check()
        assert int(step) == 5, moment
        assert optimizer.variables() == [], moment
        optimizer.apply_gradients([(IndexedSlices(values, rows[1]), table)], step)
        optimizer.check()
        m = optimizer.get_slot(table, "m")
        assert m is not None
        assert m.numpy()[:, 0] == pytest.approx([0, 0.19, 0, 0]), moment
        assert float(optimizer.state.others()["beta1_power"]) == pytest.approx(0.9**3), moment
        if interrupts.left > 0:
            break


@pytest.mark.parametrize("failing", [0, 1])
def test_a_check_that_fails_leaves_no_flag_set_that_nobody_reads(failing: int) -> None:
    tables = [Variable(np.zeros((4, 2), np.float32), device=f"gpu:{i}") for i in range(2)]
    optimizer = gpuopt.GradientDescentOptimizer(1.0)

    def step(rows: list[int]) -> None:
        optimizer.apply_gradients(
            (IndexedSlices(on_gpu(np.ones((1, 2), np.float32), i), on_gpu(rows, i)), tables[i])
            for i in range(2)
        )

    step([0])
    with failing_launch(failing, MemoryError), pytest.raises(MemoryError):
        step([9])
    with contextlib.suppress(IndexError):
        optimizer.check()
    step([1])
    optimizer.check()
    for table in tables:
        assert table.numpy()[:, 0].tolist() == [-1, -1, 0, 0]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("row", [1, 9])
def test_a_flag_whose_reading_fails_is_read_before_the_next_call(
    emulated_gpus: list[EmulatorLauncher],
    monkeypatch: pytest.MonkeyPatch,
    failing: int,
    row: int,
) -> None:
    tables = [
        Variable(np.zeros((4, 2), np.float32), name=f"table{i}", device=f"gpu:{i}")
        for i in range(2)
    ]
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    count = Variable(0)

    def step(*rows: int) -> None:
        values = [on_gpu(np.ones((1, 2), np.float32), i) for i in range(2)]
        slices = [IndexedSlices(values[i], on_gpu([rows[i]], i)) for i in range(2)]
        optimizer.apply_gradients(zip(slices, tables, strict=True), count)

    def download(source: Any) -> Any:
        raise MemoryError("no page-locked memory")

    with monkeypatch.context() as patched:
        patched.setattr(emulated_gpus[failing], "download", download)
        with pytest.raises(MemoryError) as raised:
            step(*(row if i == failing else 0 for i in range(2)))
    assert 'The step of "GradientDescent" was finished before.' in raised.value.__notes__
    if row == 9:
        with pytest.raises(IndexError, match=f'"table{failing}": row 9'):
            step(2, 2)
        assert int(count) == 0
    step(3, 3)
    optimizer.check()
    for i, table in enumerate(tables):
        expected = [0, 0, 0, -1]
        if row == 1:  # else both have refused it
            expected[1 if i == failing else 0] = -1
        assert table.numpy()[:, 0].tolist() == expected


# Who a variable is, and where


def test_a_raw_array_keeps_its_state_through_views_and_loses_it_with_its_memory() -> None:
    memory = on_gpu(np.ones((4, 3), np.float32))
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    gradient = on_gpu(np.ones(3, np.float32))
    for _ in range(2):
        optimizer.apply_gradients([(gradient, memory[1])])
    assert optimizer.get_slot(memory[1], "momentum").numpy() == pytest.approx(1.9)
    assert optimizer.get_slot(memory[2], "momentum") is None
    assert len(optimizer.variables()) == 1
    del memory
    gc.collect()
    assert optimizer.variables() == []


def test_a_raw_array_without_elements_has_one_state() -> None:
    empty = on_gpu(np.ones((0, 3), np.float32))
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    for _ in range(3):
        optimizer.apply_gradients([(empty.copy(), empty)])
    assert len(optimizer.variables()) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [(slice(0, 4), slice(3, 6)), (slice(0, 6, 2), slice(2, 5, 2)), (slice(0, 3), slice(0, 3))],
)
def test_memory_that_would_be_updated_twice_is_refused(one: slice, other: slice) -> None:
    memory = on_gpu(np.ones(6, np.float32))
    pairs = [(memory[each].copy(), memory[each]) for each in (one, other)]
    with pytest.raises(ValueError, match="memory can be updated only once"):
        gpuopt.GradientDescentOptimizer(0.1).apply_gradients(pairs)
    assert memory.get().tolist() == [1] * 6


def test_interleaved_views_and_equal_addresses_on_two_gpus_are_no_overlap() -> None:
    memory = on_gpu(np.ones(6, np.float32))
    elsewhere = fake_cupy.ndarray(host_memory(memory))
    elsewhere.device_id = 1
    optimizer = gpuopt.GradientDescentOptimizer(0.5)
    optimizer.apply_gradients(
        [(memory[::2].copy(), memory[::2]), (memory[1::2].copy(), memory[1::2])]
    )
    assert memory.get().tolist() == [0.5] * 6
    optimizer.apply_gradients(
        [(on_gpu(np.ones(6, np.float32)), memory), (np.ones(6, np.float32), elsewhere)]
    )
    assert memory.get().tolist() == [-0.5] * 6
    momentum = gpuopt.MomentumOptimizer(0.5, 0.9)
    for array, device in ((memory, GPUS[0]), (elsewhere, GPUS[1])):
        momentum.apply_gradients([(np.ones(6, np.float32), array)])
        slot = momentum.get_slot(array, "momentum")
        assert slot is not None
        assert slot.device == device


def test_values_come_from_any_device_and_go_to_any() -> None:
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    there = Variable(value, device="gpu:1")
    assert isinstance(there.storage, fake_cupy.ndarray)
    for source in (there, there.storage, value):
        for device in ("cpu", "gpu:0", "gpu:1"):
            copy = Variable(source, device=device)
            assert copy.device == Device.parse(device)
            assert copy.numpy().tolist() == value.tolist()
            assert copy.assign(source).assign_add(on_gpu(value)).numpy()[1, 2] == 10
    assert there.numpy().tolist() == value.tolist()
    assert Variable(there, dtype=np.float64).dtype == np.float64
    adopted = Variable(there.storage, copy=False)
    assert np.shares_memory(host_memory(adopted.storage), host_memory(there.storage))
    with pytest.raises(ValueError, match="cannot move from gpu:1 to cpu"):
        Variable(there.storage, copy=False, device="cpu")


@every_dtype
def test_a_slot_starts_with_its_value_in_every_type(dtype: Any) -> None:
    optimizer = gpuopt.AdagradOptimizer(0.1, initial_accumulator_value=0.3)
    w = Variable(np.ones((3, 2), dtype), device="gpu:1")
    optimizer._create_slots([w])
    assert np.array_equal(optimizer.get_slot(w, "accumulator").numpy(), np.full((3, 2), 0.3, dtype))


def test_arithmetic_and_item_assignment_work_on_the_variables_device() -> None:
    w = Variable(np.ones(4, np.float32), device="gpu:1")
    with fake_cupy.cuda.Device(1):
        assert (2 * w + w).get().tolist() == [3] * 4
        ones = fake_cupy.ones(4, np.float32)
    w += ones
    w[1:3] = 7
    assert w.numpy().tolist() == [2, 7, 7, 2]
    with pytest.raises(TypeError, match="lives on gpu:1"):
        np.asarray(w)


# The optimizer's own variables


def test_powers_of_beta_are_kept_in_host_memory() -> None:
    w = Variable(np.ones(3, np.float32), device="gpu:1")
    optimizer = gpuopt.AdamOptimizer()
    optimizer.apply_gradients([(np.ones(3, np.float32), w)])
    power = optimizer.state.host_scalar("beta1_power")
    assert (power.device, power.dtype, power.shape) == (w.device, np.float32, ())
    before = fake_cupy.counts.synchronisations
    assert float(power.numpy()) == np.float32(0.9) * np.float32(0.9)
    assert float(power) == pytest.approx(0.81)
    assert fake_cupy.counts.synchronisations == before
    assert isinstance(power.value(), fake_cupy.ndarray)
    assert power.value().get() == power.storage.get()
    power.assign(0.5)
    assert power.value().get() == 0.5
    power += np.float32(0.25)
    assert power.value().get() == np.float32(0.75)


def test_a_checkpoint_of_a_gpu_goes_on_on_the_cpu_and_back(tmp_path: Any) -> None:
    rng = np.random.default_rng(5)
    gradients = rng.normal(size=(6, 4, 2)).astype(np.float32)

    class Run:
        def __init__(self, device: str) -> None:
            self.w = Variable(np.ones((4, 2), np.float32), name="w", device=device)
            self.step = Variable(0, name="step")
            self.optimizer = gpuopt.AdamOptimizer(0.1)
            named = {"w": self.w, "step": self.step}
            self.saver = gpuopt.Saver(named, optimizers=[self.optimizer])

        def advance(self, begin: int, end: int) -> list[np.ndarray]:
            for gradient in gradients[begin:end]:
                self.optimizer.apply_gradients([(gradient, self.w)], global_step=self.step)
            return [*arrays_of(self.optimizer, self.w), self.step.numpy()]

    expected = Run("cpu").advance(0, 6)
    gc.collect()
    first = Run("gpu:1")
    first.advance(0, 2)
    path = first.saver.save(tmp_path / "model")
    del first
    for device, begin in (("cpu", 2), ("gpu:0", 4)):
        run = Run(device)
        run.saver.restore(path)
        got = run.advance(begin, begin + 2)
        path = run.saver.save(tmp_path / "model")
        power = run.optimizer.state.host_scalar("beta1_power")
        assert power.device == run.w.device
        del run, power
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


# Several of them


def test_towers_on_two_gpus_step_like_the_whole_batch() -> None:
    batch = np.arange(8, dtype=np.float32).reshape(4, 2)
    w = Variable(np.ones(2, np.float32), name="w", device="gpu:1")
    optimizer = gpuopt.TowerOptimizer(gpuopt.GradientDescentOptimizer(0.1))
    places = []

    def model(rows: Any) -> Any:
        places.append(fake_cupy.cuda.current.device)
        assert rows.device_id == places[-1]
        optimizer.apply_gradients([(rows.sum(axis=0), w)])
        return rows.sum()

    total = gpuopt.replicate(model, "weighted_sum", devices=["gpu:0", "gpu:1"])(batch)
    assert places == [0, 1]
    assert float(total) == batch.sum()
    np.testing.assert_allclose(w.numpy(), 1 - 0.1 * batch.sum(axis=0), rtol=1e-6)


def test_mirrored_variables_on_two_gpus_stay_the_same() -> None:
    strategy = gpuopt.MirroredStrategy(["gpu:0", "gpu:1"])
    w = strategy.variable(np.ones(3, np.float32), name="w")
    table = strategy.variable(np.ones((4, 1), np.float32), name="table")
    optimizer = gpuopt.AdamOptimizer(0.1)

    def step() -> int:
        place = fake_cupy.cuda.current.device
        gradient = fake_cupy.ones(3, np.float32) * (1 + place)
        rows = fake_cupy.asarray(np.array([place, 3]))
        slices = IndexedSlices(fake_cupy.ones((2, 1), np.float32), rows)
        replicas = w.replicas[place], table.replicas[place]
        optimizer.apply_gradients([(gradient, replicas[0]), (slices, replicas[1])])
        return place

    for _ in range(2):
        assert sorted(strategy.run(step).values) == [0, 1]
    for mirrored in (w, table):
        one, other = (replica.numpy() for replica in mirrored.replicas)
        assert one.tobytes() == other.tobytes()
        assert (one != 1).any()


def test_workers_with_gradients_on_two_gpus_make_one_step() -> None:
    w = Variable(np.ones(2, np.float32), name="w", device="gpu:0")
    table = Variable(np.zeros((3, 2), np.float32), name="table", device="gpu:1")
    step = Variable(0, name="step")
    sync = gpuopt.SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 2, 2)

    def work(worker: Any) -> None:
        place = worker.index
        values = on_gpu(np.full((2, 2), 1 + place, np.float32), place)
        slices = IndexedSlices(values, on_gpu([2, place], place))
        worker.apply_gradients([(on_gpu(np.float32([1, 3]), place), w), (slices, table)], step)

    sync.run(work, step)
    assert int(step) == 1
    assert w.numpy().tolist() == [0, -2]
    assert table.numpy().tolist() == [[-1, -1], [-2, -2], [-1.5, -1.5]]


def test_check_of_a_wrapper_checks_the_wrapped_optimizer() -> None:
    inner = gpuopt.GradientDescentOptimizer(1.0)
    Table(inner).apply([6])
    with pytest.raises(IndexError, match="row 6"):
        gpuopt.TowerOptimizer(inner).check()


def test_averages_live_on_the_device_of_their_variables() -> None:
    w = Variable(np.float32([1, 2]), name="w", device="gpu:1")
    averages = gpuopt.ExponentialMovingAverage(0.5)
    averages.apply([w])
    w.assign(np.float32([3, 4]))
    averages.apply([w])
    average = averages.average(w)
    assert average is not None
    assert average.device == w.device
    assert average.numpy().tolist() == [2, 3]


def test_nonfinite_gradients_on_a_gpu_are_found() -> None:
    w = Variable(np.ones((2, 2), np.float32), name="w", device="gpu:1")
    optimizer = gpuopt.AdamOptimizer(on_nonfinite="raise")
    gradient = on_gpu(np.float32([[1, 2], [np.nan, np.inf]]), 1)
    with pytest.raises(FloatingPointError, match=r"not finite: 2 of 4 .* nan at \[1, 0\]"):
        optimizer.apply_gradients([(gradient, w)])  # the host decides, as it makes slots
    assert w.numpy().tolist() == [[1, 1], [1, 1]]


def test_the_demo_trains_on_a_gpu_as_on_the_cpu() -> None:
    from gpuopt.demo.train import train

    losses = []
    for device in (Device.cpu, GPUS[1]):
        gc.collect()
        result = train("Adam", device=device, dtype=np.dtype(np.float32), steps=5, seed=0)
        losses.append(result.losses)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
