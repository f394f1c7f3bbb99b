"""A few steps that launch every kernel once, beside the same steps in numpy: the first to run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import driver
import numpy as np
import pytest

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable
from gpuopt.backends import backend_for
from gpuopt.device import Device

pytestmark = pytest.mark.value

KERNELS = Path(__file__).resolve().parents[3] / "kernels"
# Makes steps on a device, and returns what came of them.
Case = Callable[[str], Sequence[np.ndarray]]


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def on(device: str, array: np.ndarray) -> Any:
    return Variable(array, device=device, name="given", trainable=False).value()


def dense(
    make: Callable[[], gpuopt.Optimizer], shape: tuple[int, ...] = (50, 9), other: str | None = None
) -> Case:
    """Makes two steps of two variables, the second of which may be on another device."""

    def run(device: str) -> list[np.ndarray]:
        optimizer = make()
        devices = [device, device if other is None or device == "cpu" else other]
        variables = [
            Variable(numbers(*shape, seed=at), name=f"v{at}", device=each)
            for at, each in enumerate(devices)
        ]
        for step in range(2):
            gradient = numbers(*shape, seed=10 + step)
            optimizer.apply_gradients([(on(str(v.device), gradient), v) for v in variables])
        return [each.numpy() for each in variables]

    return run


def sparse(
    make: Callable[[], gpuopt.Optimizer],
    num_rows: int = 200,
    table: tuple[int, int] = (50, 9),
    num_tables: int = 1,
) -> Case:
    """Makes two steps of tables, by rows some of which are the same."""

    def run(device: str) -> list[np.ndarray]:
        optimizer = make()
        tables = [
            Variable(numbers(*table, seed=at), name=f"v{at}", device=device)
            for at in range(num_tables)
        ]
        for step in range(2):
            rows = np.random.default_rng(step).integers(0, table[0] - 1, num_rows)
            # Sums of these are exact in any order.
            values = np.round(8 * numbers(num_rows, table[1], seed=10 + step)) / 8
            slices = IndexedSlices(on(device, values), on(device, rows))
            optimizer.apply_gradients([(slices, each) for each in tables])
        return [each.numpy() for each in tables]

    return run


def clipped_array(device: str) -> list[np.ndarray]:
    return [np.asarray(to_host(gpuopt.clip_by_norm(on(device, numbers(50, 9)), 1.0)))]


def kept_rows(device: str) -> list[np.ndarray]:
    table = Variable(numbers(6, 4), name="table", device=device)
    gpuopt.rows(table).keep([3, 1, 1])
    return [table.numpy()]


def summed_rows(device: str) -> list[np.ndarray]:
    values, rows = np.round(numbers(300, 5)), np.arange(300) % 7
    sums, unique = backend_for(Device.parse(device)).sum_duplicate_rows(
        on(device, values), on(device, rows)
    )
    return [to_host(sums), to_host(unique)]


def to_host(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else array  # type: ignore[no-any-return]


def groups() -> list[ParameterGroup]:
    return [ParameterGroup("v1", learning_rate=0.2)]


WITH_CODES = ["slots in 8 bits", "all rows, slots in 8 bits", "late rows, slots in 8 bits"]
CASES: dict[str, Case] = {
    "decided": dense(lambda: gpuopt.AdamOptimizer(0.1, on_nonfinite="skip")),
    "sums over variables": dense(
        lambda: gpuopt.TorchAdamWOptimizer(0.1, cautious=True, clip_norm=1.0)
    ),
    "rows of a dense gradient": dense(lambda: gpuopt.RowWiseAdagradOptimizer(0.1)),
    "slots in 8 bits": dense(
        lambda: gpuopt.TorchAdamWOptimizer(0.1, cautious=True, slot_bits=8), (300, 300)
    ),
    "measured inputs": dense(lambda: gpuopt.LARSOptimizer(0.1, clip_norm=1.0)),
    "measured inputs, decided": dense(lambda: gpuopt.LARSOptimizer(0.1, on_nonfinite="skip")),
    "few rows": sparse(lambda: gpuopt.LazyAdamOptimizer(0.1)),
    "many rows": sparse(lambda: gpuopt.LazyAdamOptimizer(0.1), 20_000, (3000, 8)),
    "all rows, decided": sparse(lambda: gpuopt.AdamOptimizer(0.1, on_nonfinite="skip")),
    "several tables": sparse(lambda: gpuopt.LazyAdamOptimizer(0.1, groups=groups()), num_tables=2),
    "all rows, slots in 8 bits": sparse(
        lambda: gpuopt.AdamOptimizer(0.1, slot_bits=8, on_nonfinite="skip"), 200, (3000, 32)
    ),
    "late rows": sparse(lambda: gpuopt.AdamOptimizer(0.1, catch_up=True)),
    "late rows of several tables": sparse(
        lambda: gpuopt.AdamOptimizer(0.1, catch_up=True, groups=groups()), num_tables=2
    ),
    "late rows, slots in 8 bits": sparse(
        lambda: gpuopt.AdamOptimizer(0.1, catch_up=True, slot_bits=8), 200, (300, 300)
    ),
    "clipped array": clipped_array,
    "kept rows": kept_rows,
    "summed rows": summed_rows,
    "joined sums": dense(lambda: gpuopt.AdamOptimizer(0.1, clip_norm=1.0), other="cpu"),
    "joined sums, decided": dense(
        lambda: gpuopt.AdamOptimizer(0.1, clip_norm=1.0, on_nonfinite="skip"), other="gpu:1"
    ),
}
NEED_TWO = [name for name in CASES if name == "joined sums, decided"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.gpus(2)] * (name in NEED_TWO)) for name in CASES],
)
def test_steps_that_launch_each_kernel_are_numpys(name: str) -> None:
    # The nearest code may be another one: neighbours are 1/127 of the largest apart.
    tolerance = 1e-2 if name in WITH_CODES else 1e-5
    for got, expected in zip(CASES[name]("gpu:0"), CASES[name]("cpu"), strict=True):
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.driver
def test_these_steps_launch_every_kernel() -> None:
    source = "".join(path.read_text() for path in KERNELS.glob("*.cu"))
    written = re.findall(r"__global__ void(?: __launch_bounds__\(.*?\)\s)?\s*(\w+)\(", source)
    assert len(written) == source.count("__global__")
    with driver.record_launches() as launches:
        for case in CASES.values():
            case("gpu:0")
    launched = {re.split(r"[<(]", each.name.partition("gpuopt::")[2])[0] for each in launches}
    assert launched - {""} == set(written)
