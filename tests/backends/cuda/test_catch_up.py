"""Rows of tables on GPUs catch up as those in host memory do."""

from __future__ import annotations

import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dtypes import DTYPES_BY_NAME
from emulator import EmulatorLauncher
from gpu_streams import new_stream, uploaded

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.backends import to_device
from gpuopt.device import Device
from gpuopt.rules.catch_up import Factors
from gpuopt.step import tables_behind

pytestmark = pytest.mark.value

HEIGHT = 24

on_gpus = pytest.mark.parametrize(
    "gpus",
    [
        pytest.param("gpu", marks=pytest.mark.gpu),
        pytest.param("emulated", marks=pytest.mark.emulator),
    ],
    indirect=True,
)
ways = pytest.mark.parametrize("catch_up", [True, "stepping"])


@pytest.fixture
def gpus(request: pytest.FixtureRequest) -> Any:
    """The launchers of emulated GPUs; None on others."""
    if request.param == "gpu":
        return None
    return request.getfixturevalue("emulated_gpus")


def slices_of(rng: np.random.Generator, number: int, width: int, dtype: Any) -> IndexedSlices:
    """Rows of the first third, which may repeat; others were named once or never."""
    rows = rng.integers(0, HEIGHT // 3, number)
    return IndexedSlices(rng.normal(size=(number, width)).astype(dtype), rows)


def trained(device: str, catch_up: Any, dtype: Any, width: int, number: int) -> list[np.ndarray]:
    """Returns tables and their slots after steps of no row, of one, and of several."""
    rng = np.random.default_rng(1)
    value = rng.normal(size=(HEIGHT, width)).astype(dtype)
    tables = [Variable(value, device=device) for _ in range(number)]
    optimizer = gpuopt.AdamOptimizer(0.01, catch_up=catch_up)
    every_row = IndexedSlices(np.ones((HEIGHT - 1, width), dtype), np.arange(HEIGHT - 1))
    optimizer.apply_gradients([(every_row, table) for table in tables])
    for step in range(30):
        rows = [0, 1, 3, 9][step % 4]
        optimizer.apply_gradients([(slices_of(rng, rows, width, dtype), each) for each in tables])
        if step % 11 == 5:
            gpuopt.embedding_lookup(tables[0], np.array([1, 1, HEIGHT - 1, 2]))
    arrays = [table.numpy() for table in tables]
    for slot in optimizer.get_slot_names():
        arrays += [optimizer.get_slot(table, slot).numpy() for table in tables]
    return [array.astype(np.float64) for array in arrays]


@on_gpus
@ways
@pytest.mark.parametrize(("width", "number"), [(1, 1), (3, 2), (8, 1), (40, 2)])
@pytest.mark.parametrize("dtype", DTYPES_BY_NAME.values(), ids=DTYPES_BY_NAME)
@pytest.mark.one_in(3)
def test_rows_catch_up_as_numpys(
    gpus: Any, dtype: Any, width: int, number: int, catch_up: Any
) -> None:
    got = trained("gpu:0", catch_up, dtype, width, number)
    expected = trained("cpu", catch_up, dtype, width, number)
    # A row is stored up to 20 times; in 16 bits, a sum may round to the number beside it.
    bound = 4 * float(ml_dtypes.finfo(dtype).eps)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=bound, atol=bound)


@on_gpus
@ways
@pytest.mark.parametrize("gap", [0, 1, 255, 256, 257, 1030])
@pytest.mark.one_in(6)
def test_a_row_catches_up_over_a_gap(gpus: Any, gap: int, catch_up: Any) -> None:
    """Beyond 1,024 steps there is no room for more until all rows are up to date."""
    ends = []
    for device in ("cpu", "gpu:0"):
        table = Variable(np.ones((HEIGHT, 2)), device=device)
        optimizer = gpuopt.AdamOptimizer(0.01, catch_up=catch_up)
        first = IndexedSlices(np.array([[0.5, 1e-9]]), [5])
        other = IndexedSlices(np.array([[1.0, 1.0]]), [2])
        optimizer.apply_gradients([(first, table)])
        for _ in range(gap):
            optimizer.apply_gradients([(other, table)])
        optimizer.apply_gradients([(first, table)])
        ends.append(table.numpy())
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-12)


@on_gpus
@pytest.mark.parametrize("bad", ["value", "row"])
def test_a_refused_step_is_not_counted(gpus: Any, bad: str) -> None:
    ends = []
    gpu = Device("gpu", 0)
    for catch_up in (False, True):
        rng = np.random.default_rng(3)
        table = Variable(np.ones((HEIGHT, 3), "f4"), device="gpu:0")
        optimizer = gpuopt.AdamOptimizer(0.01, catch_up=catch_up, on_nonfinite="skip")
        for step in range(12):
            gradient = slices_of(rng, 3, 3, np.float32)
            if step % 4 == 2 and bad == "value":
                gradient.values[0] = np.nan
            elif step % 4 == 2:
                wrong = to_device(np.array([1, HEIGHT, 2]), gpu)
                refused = IndexedSlices(to_device(gradient.values, gpu), wrong)
                optimizer.apply_gradients([(refused, table)])
                with pytest.raises(IndexError, match=f"row {HEIGHT} is not in"):
                    optimizer.check()
            optimizer.apply_gradients([(gradient, table)])
        ends.append(table.numpy())
    np.testing.assert_allclose(ends[1], ends[0], rtol=2e-6, atol=2e-6)


@pytest.mark.emulator
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("tables", [1, 5])
def test_a_step_launches_as_many_kernels_as_lazy_adams(
    emulated_gpus: list[EmulatorLauncher], number: int, tables: int
) -> None:
    launches = []
    for optimizer in (gpuopt.LazyAdamOptimizer(), gpuopt.AdamOptimizer(catch_up=True)):
        rng = np.random.default_rng(4)
        every = [Variable(np.ones((HEIGHT, 3), "f4"), device="gpu:0") for _ in range(tables)]
        for _ in range(number):
            before = emulated_gpus[0].launches
            optimizer.apply_gradients([(slices_of(rng, 5, 3, np.float32), each) for each in every])
            launches.append(emulated_gpus[0].launches - before)
    assert launches[:number] == launches[number:]


@pytest.mark.emulator
def test_a_lookup_writes_its_rows_alone(emulated_gpus: list[EmulatorLauncher]) -> None:
    rng = np.random.default_rng(5)
    table = Variable(np.ones((HEIGHT, 3), "f4"), device="gpu:0")
    optimizer = gpuopt.AdamOptimizer(0.1, catch_up=True)
    for _ in range(20):
        optimizer.apply_gradients([(slices_of(rng, 4, 3, np.float32), table)])
    before = table.unread_storage.get()
    gpuopt.embedding_lookup(table, [0, 6, 6])
    after = table.unread_storage.get()
    changed = np.flatnonzero((before != after).any(axis=1))
    assert set(changed) <= {0, 6}
    assert changed.size
    assert any(each.is_behind for _, each in tables_behind._behind())


@pytest.mark.emulator
def test_a_read_is_refused_in_a_capture(
    emulated_gpus: list[EmulatorLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Variable(np.ones((HEIGHT, 3), "f4"), device="gpu:0")
    optimizer = gpuopt.AdamOptimizer(0.1, catch_up=True)
    gradient = IndexedSlices(np.ones((1, 3), "f4"), [1])
    for _ in range(2):
        optimizer.apply_gradients([(gradient, table)])
    before = table.unread_storage.get()
    monkeypatch.setattr(emulated_gpus[0], "is_capturing", lambda: True, raising=False)
    with pytest.raises(RuntimeError, match=r"read it before, or call flush\(\)"):
        table.storage  # noqa: B018
    np.testing.assert_array_equal(table.unread_storage.get(), before)


def step_by(optimizer: Any, table: Variable, given: IndexedSlices) -> None:
    optimizer.apply_gradients([(given, table)])


def ends_on_streams(streams: list[Any], catch_up: Any) -> list[np.ndarray]:
    """Returns tables and slots after steps and lookups on streams in turn."""
    rng = np.random.default_rng(8)
    tables = [Variable(rng.normal(size=(HEIGHT, 4)).astype("f4"), device="gpu:0") for _ in "12"]
    optimizer = gpuopt.AdamOptimizer(0.01, catch_up=catch_up)
    for step in range(24):
        with streams[step % len(streams)]:
            slices = slices_of(rng, 5, 4, np.float32)
            # Made on the stream, and freed before the step is done.
            given = IndexedSlices(uploaded(slices.values), uploaded(slices.indices))
            optimizer.apply_gradients([(given, table) for table in tables[: 1 + step % 3]])
            del given
        with streams[(step + 1) % len(streams)]:
            gpuopt.embedding_lookup(tables[step % 2], uploaded(rng.integers(0, HEIGHT, 3)))
            if step % 10 == 9:
                optimizer.get_slot(tables[0], "m").numpy()
    with streams[0]:
        arrays = [table.numpy() for table in tables]
        slots = [optimizer.get_slot(table, name).numpy() for table in tables for name in "mv"]
    return arrays + slots


@pytest.mark.gpu
@pytest.mark.usefixtures("every_schedule")
@ways
@pytest.mark.parametrize("room", [None, 7])
def test_steps_and_lookups_on_several_streams_follow_each_other(
    room: int | None, catch_up: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for 7 steps, counts begin anew while work of other streams is in flight."""
    if room is not None:
        monkeypatch.setattr(Factors, "room_for", lambda self, height: room)
    one = [new_stream()]
    expected = ends_on_streams(one, catch_up)
    got = ends_on_streams([new_stream() for _ in range(3)], catch_up)
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.gpu
@pytest.mark.usefixtures("every_schedule")
@pytest.mark.parametrize("last_call", ["step", "lookup", "steps where it was made"])
def test_a_table_and_its_count_outlive_their_last_reference_until_the_step_is_done(
    last_call: str,
) -> None:
    """A stream is given the memory again that was taken on it, though others still use that."""
    rng = np.random.default_rng(9)
    kept = Variable(np.zeros((HEIGHT, 4), "f4"), device="gpu:0")
    is_used_elsewhere = last_call != "steps where it was made"
    for turn in range(4):
        a, b = new_stream(), new_stream()
        slices = [slices_of(rng, 5, 4, np.float32) for _ in range(3)]
        with a:
            table = Variable(np.ones((HEIGHT, 4), "f4"), device="gpu:0")
            optimizer = gpuopt.AdamOptimizer(0.01, catch_up=True, name=f"Gone{turn}")
            optimizer.apply_gradients([(slices[0], table)])
            if last_call == "lookup":
                optimizer.apply_gradients([(slices[1], table)])
        with b if is_used_elsewhere else a:
            if last_call != "lookup":
                for each in slices[1:]:
                    optimizer.apply_gradients([(each, table)])
            if last_call != "step":
                gpuopt.embedding_lookup(table, uploaded(np.arange(4)))
        del table, optimizer
        gc.collect()
        with a if is_used_elsewhere else b:  # takes freed memory, if there is any
            filled = [uploaded(np.full((HEIGHT, 4), 7, "f4")) for _ in range(8)]
            for each in filled:
                kept.assign(each)
        for stream in (a, b):
            stream.synchronize()
        for each in filled:
            np.testing.assert_array_equal(each.get(), 7)
    np.testing.assert_array_equal(kept.numpy(), 7)
