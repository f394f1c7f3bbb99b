"""Launches through CuPy: the driver is passed what CuPy's own call would pass it, and no more."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import driver
import ml_dtypes
import numpy as np
import pytest

import gpuopt
from gpuopt import IndexedSlices, LossScaleOptimizer, Variable, backends
from gpuopt.backends.cuda import cuda_backend, kernels
from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.structs import (
    Arrays,
    FewGradients,
    IndexList,
    Shares,
    SortedRows,
    TableGradient,
)
from gpuopt.device import Device
from gpuopt.optimizers.adam import adam

pytestmark = [pytest.mark.gpu, pytest.mark.driver]

SCALARS = {"step_size": 0.1, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}


@pytest.fixture
def cupy() -> Any:
    import cupy

    return cupy


@pytest.fixture
def launcher(cupy: Any) -> Any:
    from gpuopt.backends.cuda.cupy_launcher import CupyLauncher

    return CupyLauncher(0)


def by_value(cupy: Any, given: Any) -> Any:
    """Returns an argument as CuPy takes it: a struct is an array of one element."""
    if not isinstance(given, tuple):
        return given
    fields = [each.data.ptr if isinstance(each, cupy.ndarray) else each for each in given]
    types = [
        (name, each.dtype if isinstance(each, np.generic) else np.int64, np.shape(each))
        for name, each in zip(given._fields, fields, strict=True)  # type: ignore[attr-defined]
    ]
    return np.array([tuple(fields)], np.dtype(types))


def cases(cupy: Any) -> dict[str, tuple[Kernel, Mapping[str, Any]]]:
    """Kernels with numbers, pointers that may be null, and structs of all kinds, in C++'s order."""
    words = {name: cupy.zeros(64, np.uint32) for name in "abcdef"}
    table = cupy.zeros(60, np.int64)
    refused = cupy.ones(2, np.uint64)  # so that nothing is done
    scalars = kernels.scalars_of(adam, {name: np.float32(SCALARS[name]) for name in adam.scalars})
    return {
        "move_rows": (
            kernels.move_rows("int64", "uint32"),
            {
                "keys": table,
                "positions": words["a"],
                "shares": Shares(5, 1, 1024),
                "shift": np.int32(-8),
                "counts": words["b"],
                "group_counts": words["c"],
                "sorted_keys": words["d"],
                "sorted_positions": words["e"],
                "refused": refused,
            },
        ),
        "dense_update": (
            kernels.dense_update(adam, "float32"),
            {
                "variables": table,
                "num_variables": np.int64(3),
                "chunks": words["a"],
                "num_chunks": np.int64(1),
                "chunk_size": np.int64(2**40),
                "grads": None,
                "few_grads": FewGradients([1, 2, 3, -4, 2**40]),
                "scalars": scalars,
                "refused": refused,
            },
        ),
        "sparse_update": (
            kernels.sparse_update(adam, "float32", "uint32"),
            {
                "only_gradient": TableGradient(7, -9, 2**40),
                "gradients": table,
                "num_tables": np.int64(2),
                "only_arrays": Arrays([1, 2, 3]),
                "arrays": None,
                "rows": SortedRows(words["a"], words["b"], 5),
                "parts": cupy.zeros(64, np.float32),
                "row_width": np.int64(4),
                "scalars": scalars,
                "touched": words["f"],
                "lanes_per_row": np.int32(1),
                "refused": refused,
            },
        ),
    }


@pytest.mark.parametrize("name", ["move_rows", "dense_update", "sparse_update"])
def test_a_launch_passes_what_cupy_would(cupy: Any, launcher: Any, name: str) -> None:
    from gpuopt.backends.cuda.cupy_launcher import load

    kernel, given = cases(cupy)[name]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream, driver.record_launches() as launches:
        launcher.launch(kernel, 3, 64, **given)
        load(kernel)(
            (3,), (64,), tuple(by_value(cupy, given.get(each)) for each in kernel.parameters)
        )
    ours, cupys = launches
    assert ours == cupys
    assert ours.stream == stream.ptr
    assert len(b"".join(ours.arguments)) > 60


def test_arguments_may_be_replaced_while_the_launch_is_queued(cupy: Any, launcher: Any) -> None:
    refused = cupy.zeros(2, np.uint64)
    rows = cupy.array([5, 9, 7])
    flags = [cupy.zeros(2, np.uint64) for _ in range(3)]
    cupy.cuda.get_current_stream().synchronize()
    given = {"lists": None, "num_lists": 1, "num_rows": 3}
    height = {"address": rows.data.ptr, "index_size": 8, "first": 0, "first_key": 0, "variable": 0}
    only = IndexList(**height, height=9)
    launch = launcher.bind(kernels.check_rows(), 1, 128, **given, only=only, refused=refused)
    for flag in flags:
        launch.replace(refused=flag)
        launch.start()
    assert [flag.get().tolist() for flag in flags] == [[1, 9]] * 3
    assert refused.get().tolist() == [0, 0]


# What asks, and what is counted under another name, too.
QUERIES = {"cudaGetDevice", "cudaSetDevice", "cudaEventQuery", "cudaStreamIsCapturing"}
TWICE = {"cuLaunchKernel", "cudaMemcpyAsync", "device to host bytes"}


def dense_step(
    cupy: Any, num_variables: int, num_sets: int, dtype: Any = np.float32, **options: Any
) -> Callable[[], None]:
    variables = [Variable(np.zeros(9, dtype), device="gpu:0") for _ in range(num_variables)]
    sets = [[(cupy.zeros(9, dtype), v) for v in variables] for _ in range(num_sets)]
    turns, optimizer = itertools.cycle(sets), gpuopt.AdamOptimizer(**options)
    return lambda: optimizer.apply_gradients(next(turns))


def averaged_step(
    cupy: Any, num_variables: int, num_sets: int, dtype: Any = np.float32, **options: Any
) -> Callable[[], None]:
    averages = gpuopt.ExponentialMovingAverage(0.9)
    return dense_step(cupy, num_variables, num_sets, dtype, averages=averages, **options)


def averaged_rows_step(cupy: Any, num_tables: int, num_rows: int) -> Callable[[], None]:
    averages = gpuopt.ExponentialMovingAverage(0.9)
    return sparse_step(cupy, num_tables, num_rows, gpuopt.LazyAdamOptimizer(averages=averages))


def averages_alone(cupy: Any, num_variables: int, num_functions: int) -> Callable[[], None]:
    variables = [Variable(np.zeros(9, np.float32), device="gpu:0") for _ in range(num_variables)]
    losses = [cupy.ones((), np.float32) for _ in range(num_functions)]
    functions = [lambda loss=loss: loss for loss in losses]
    averages = gpuopt.ExponentialMovingAverage(0.9, zero_debias=True)
    return lambda: averages.apply([*variables, *functions])


def sparse_step(
    cupy: Any, num_tables: int, num_rows: int, optimizer: Any = None
) -> Callable[[], None]:
    values, rows = cupy.zeros((num_rows, 4), np.float32), cupy.zeros(num_rows, np.int64)
    pairs = [
        (IndexedSlices(values, rows), Variable(cupy.zeros((10_000, 4), np.float32)))
        for _ in range(num_tables)
    ]
    optimizer = optimizer or gpuopt.AdagradOptimizer(0.1)
    return lambda: optimizer.apply_gradients(pairs)


def scaled_step(
    cupy: Any,
    num_variables: int,
    num_rows: int,
    optimizer: Any = None,
    dtype: Any = np.float32,
    step: Any = None,
) -> Callable[[], None]:
    variables = [Variable(np.zeros(9, dtype), device="gpu:0") for _ in range(num_variables)]
    pairs: list[Any] = [(cupy.zeros(9, dtype), v) for v in variables]
    if num_rows:
        slices = IndexedSlices(
            cupy.zeros((num_rows, 4), np.float32), cupy.zeros(num_rows, np.int64)
        )
        pairs.append((slices, Variable(cupy.zeros((10_000, 4), np.float32))))
    inner = optimizer or gpuopt.LazyAdamOptimizer(clip_norm=1.0)
    scaled = LossScaleOptimizer(inner, gpuopt.DynamicLossScale())
    step = Variable(0, name="step") if step is None else step
    return lambda: scaled.apply_gradients(pairs, step)


def scaled_averaged_step(cupy: Any, num_variables: int, num_rows: int) -> Callable[[], None]:
    averages = gpuopt.ExponentialMovingAverage(0.9)
    optimizer = gpuopt.AdamOptimizer(averages=averages)
    return scaled_step(cupy, num_variables, num_rows, optimizer)


def scaled_averaged_rows_step(cupy: Any, num_variables: int, num_rows: int) -> Callable[[], None]:
    """The decay follows the count of steps, which the GPU alone knows."""
    step = Variable(0, name="step")
    averages = gpuopt.ExponentialMovingAverage(0.9, step)
    inner = gpuopt.LazyAdamOptimizer(averages=averages)
    return scaled_step(cupy, num_variables, num_rows, inner, step=step)


def groups_step(
    cupy: Any, num_variables: int, num_groups: int, is_scaled: bool = False, **options: Any
) -> Callable[[], None]:
    """Each group is clipped to a norm of its own."""
    variables = [Variable(np.zeros(9, np.float32), device="gpu:0") for _ in range(num_variables)]
    groups = [
        gpuopt.ParameterGroup(variables=variables[number :: num_groups + 1], clip_norm=0.5)
        for number in range(num_groups)
    ]
    optimizer: Any = gpuopt.AdamOptimizer(clip_norm=1.0, groups=groups, **options)
    if is_scaled:
        optimizer = LossScaleOptimizer(optimizer, gpuopt.DynamicLossScale())
    pairs, step = [(cupy.zeros(9, np.float32), v) for v in variables], Variable(0, name="step")
    return lambda: optimizer.apply_gradients(pairs, step)


def scaled_coded_step(cupy: Any, num_variables: int, num_rows: int) -> Callable[[], None]:
    return scaled_step(cupy, num_variables, num_rows, gpuopt.AdamOptimizer(slot_bits=8))


def scaled_rounded_step(cupy: Any, num_variables: int, num_rows: int) -> Callable[[], None]:
    optimizer = gpuopt.AdamOptimizer(stochastic_rounding=7)
    return scaled_step(cupy, num_variables, num_rows, optimizer, ml_dtypes.bfloat16)


def scaled_late_step(cupy: Any, num_variables: int, num_rows: int) -> Callable[[], None]:
    optimizer = gpuopt.AdamOptimizer(catch_up=True)
    return scaled_step(cupy, num_variables, num_rows, optimizer)


def late_step(cupy: Any, num_tables: int, num_rows: int) -> Callable[[], None]:
    return sparse_step(cupy, num_tables, num_rows, gpuopt.AdamOptimizer(catch_up=True))


def coded_step(cupy: Any, num_variables: int, num_sets: int) -> Callable[[], None]:
    return dense_step(cupy, num_variables, num_sets, slot_bits=8)


def coded_clipped_step(cupy: Any, num_variables: int, num_sets: int) -> Callable[[], None]:
    return dense_step(cupy, num_variables, num_sets, slot_bits=8, clip_norm=1.0)


def coded_rows_step(cupy: Any, num_tables: int, num_rows: int) -> Callable[[], None]:
    return sparse_step(cupy, num_tables, num_rows, gpuopt.LazyAdamOptimizer(slot_bits=8))


BFLOAT16 = ml_dtypes.bfloat16
# Averages in the launch that updates their variables.
AVERAGED: dict[str, dict[str, Any]] = {
    "averages": {},
    "averages of 16 bits": {"dtype": BFLOAT16},
    "averages beside slots in bfloat16": {"slot_dtype": "bfloat16"},
    "averages of masters with slots in bfloat16": {
        **{"dtype": BFLOAT16, "masters": "float32", "slot_dtype": "bfloat16"},
    },
    "averages of remainders with slots in bfloat16": {
        **{"dtype": BFLOAT16, "masters": "remainder", "slot_dtype": "bfloat16"},
    },
    "averages beside slots in 8 bits": {"slot_bits": 8},
    "averages of 16 bits beside slots in 8 bits": {"dtype": BFLOAT16, "slot_bits": 8},
}

# Events end the check, the update, the copy of the flag of refused rows, and what reads the flag.
OF_ROWS = {"cudaEventRecord": 4, "device to host": 1}
# Each has an event of its own.
OF_A_DECISION = {"cudaEventCreate": 1, "cudaEventDestroy": 1}
# Gradients are measured, and the step is decided about; then it is made or not. The host reads how
# many steps were made.
DENSE_SCALED = {"launches": 2, "cudaEventRecord": 3, "device to host": 1, **OF_A_DECISION}
# Rows are sorted for both, and their sums have two launches more each.
SPARSE_SCALED = {"launches": 9, "cudaEventRecord": 7, "device to host": 2, **OF_A_DECISION}


def of_averages(launches: int) -> dict[str, int]:
    """Launches of averages alone: the values' next updates wait for the event of each."""
    return {"launches": launches, "cudaEventRecord": launches}


def together(*counted: dict[str, int]) -> dict[str, int]:
    return dict(sum(map(Counter, counted), Counter()))


STEPS: dict[str, tuple[Callable[..., Any], tuple[int, int], dict[str, int]]] = {
    "one variable": (dense_step, (1, 1), {"launches": 1, "cudaEventRecord": 1}),
    "148, three sets in turn": (dense_step, (148, 3), {"launches": 1, "cudaEventRecord": 1}),
    **{
        name: (partial(averaged_step, **options), (24, 3), {"launches": 1, "cudaEventRecord": 1})
        for name, options in AVERAGED.items()
    },
    "averages without a step": (averages_alone, (24, 0), of_averages(1)),
    "averages of functions, too": (averages_alone, (24, 20), of_averages(2)),
    "slots in 8 bits": (coded_step, (148, 3), {"launches": 1, "cudaEventRecord": 1}),
    # The norm, too.
    "slots in 8 bits, clipped": (coded_clipped_step, (3, 1), {"launches": 2, "cudaEventRecord": 2}),
    "few rows of slots in 8 bits": (coded_rows_step, (1, 100), {"launches": 4, **OF_ROWS}),
    "26 tables of slots in 8 bits": (coded_rows_step, (26, 3000), {"launches": 10, **OF_ROWS}),
    # The check, the sort, the sums of pieces, and the update.
    "few rows": (sparse_step, (1, 100), {"launches": 4, **OF_ROWS}),
    # Their averages move in all rows, after the update.
    "26 tables, and averages": (
        averaged_rows_step,
        (26, 3000),
        together({"launches": 10, **OF_ROWS}, of_averages(1)),
    ),
    # The sort does the check, by two launches for each of two digits.
    "many rows": (sparse_step, (1, 3000), {"launches": 6, **OF_ROWS}),
    # Gradients are measured, and the step is decided about; then it is made or not. The host reads
    # how many steps were made.
    "scaled": (scaled_step, (3, 0), DENSE_SCALED),
    "groups with norms": (groups_step, (12, 3), {"launches": 2, "cudaEventRecord": 2}),
    "groups with norms, if finite": (
        partial(groups_step, on_nonfinite="skip"),
        (12, 3),
        DENSE_SCALED,
    ),
    "scaled groups with norms": (partial(groups_step, is_scaled=True), (12, 3), DENSE_SCALED),
    "scaled, with averages": (scaled_averaged_step, (3, 0), DENSE_SCALED),
    "scaled, of slots in 8 bits": (scaled_coded_step, (3, 0), DENSE_SCALED),
    "scaled, and rounded": (scaled_rounded_step, (3, 0), DENSE_SCALED),
    "scaled rows, and averages": (
        scaled_averaged_rows_step,
        (3, 100),
        together(SPARSE_SCALED, of_averages(1)),
    ),
    "scaled rows": (scaled_step, (3, 100), SPARSE_SCALED),
    "scaled rows that catch up": (scaled_late_step, (3, 100), SPARSE_SCALED),
    # The check, the gathering of keys, and three digits.
    "26 tables": (sparse_step, (26, 3000), {"launches": 10, **OF_ROWS}),
    # Rows catch up, and steps are counted, in the launch that updates them.
    "few rows that catch up": (late_step, (1, 100), {"launches": 4, **OF_ROWS}),
    "many rows that catch up": (late_step, (1, 3000), {"launches": 6, **OF_ROWS}),
    "26 tables that catch up": (late_step, (26, 3000), {"launches": 10, **OF_ROWS}),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_steady_step_asks_cuda_for_no_more_than_it_needs(cupy: Any, name: str) -> None:
    make, arguments, expected = STEPS[name]
    gpu = Device("gpu", 0)
    # With a backend that has seen no other stream, as other tests' has.
    with backends.using(gpu, cuda_backend(gpu)):
        step = make(cupy, *arguments)
        for _ in range(6):
            step()
            driver.synchronize()
        before = driver.counts()
        step()
        after = driver.counts()
    called = {each: after[each] - before.get(each, 0) for each in after.keys() - QUERIES - TWICE}
    assert {each: number for each, number in called.items() if number} == expected


def test_a_lookup_of_rows_that_are_behind_takes_one_launch_more(cupy: Any) -> None:
    gpu = Device("gpu", 0)
    with backends.using(gpu, cuda_backend(gpu)):
        table = Variable(cupy.zeros((10_000, 4), np.float32))
        optimizer = gpuopt.AdamOptimizer(catch_up=True)
        named = IndexedSlices(cupy.zeros((5, 4), np.float32), cupy.arange(5))
        ids = cupy.arange(50)

        def calls_of_lookup(is_behind: bool) -> Counter[str]:
            for _ in range(6):
                optimizer.apply_gradients([(named, table)])
                if not is_behind:
                    optimizer.flush()
                driver.synchronize()
                before = Counter(driver.counts())
                gpuopt.embedding_lookup(table, ids)
                after = Counter(driver.counts())
                driver.synchronize()
            return after - before

        late, up_to_date = calls_of_lookup(True), calls_of_lookup(False)
    for each in QUERIES | TWICE:
        late.pop(each, None)
        up_to_date.pop(each, None)
    assert late - up_to_date == {"launches": 1, "cudaEventRecord": 1}
    assert not up_to_date - late


def test_a_thread_that_has_not_used_the_gpu_launches(cupy: Any, launcher: Any) -> None:
    kernel, given = cases(cupy)["move_rows"]
    errors: list[Exception] = []

    def launch() -> None:
        try:
            with launcher.device():
                launcher.launch(kernel, 1, 256, **given)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert errors == []
