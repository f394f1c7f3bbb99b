"""Elements beyond the 2^31st are counted, found and updated: sizes and offsets have 64 bits.

No machine of the tests holds as many. The kernels are given the last chunks of arrays that begin
far below what there is of them: nobody reads the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator.emulator import EmulatorLauncher
from every_kernel import coded

from gpuopt.backends.cuda import dense_plan, kernels
from gpuopt.backends.cuda.launch_shapes import CLIP_CHUNK, CLIP_THREADS
from gpuopt.backends.cuda.structs import (
    Chunk,
    ClippedArray,
    ClipRule,
    ClipTotals,
    FewGradients,
    NoDecision,
)
from gpuopt.optimizers.adam import adam
from gpuopt.optimizers.gradient_descent import gradient_descent
from gpuopt.optimizers.lamb import lamb
from gpuopt.optimizers.lars import lars
from gpuopt.rules.accumulation import add_to_sum, begin_sum
from gpuopt.rules.clipped import clipped
from gpuopt.rules.scaled import scaled

pytestmark = pytest.mark.emulator

# The number of elements before the ones that are there, whose bytes fit into no 32 bits either.
BEFORE = [0, 2**31 - CLIP_CHUNK, 2**31, 2**33, 3 * 2**36]
SIZE = 2 * CLIP_CHUNK + 5


def address_before(array: np.ndarray, num_elements: int) -> int:
    return int(array.ctypes.data) - num_elements * array.itemsize


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_squares_and_scaled_arrays_of_late_chunks_are_those_of_the_first(
    dtype: str, before: int
) -> None:
    launcher, array = EmulatorLauncher(), np.arange(SIZE).astype(dtype) % 7
    scaled = np.zeros_like(array)
    only = ClippedArray(
        address_before(array, before),
        address_before(scaled, before),
        before + SIZE,
        -before // CLIP_CHUNK,
    )
    sums = np.zeros(3)
    given: dict[str, Any] = {"only": only, "arrays": None, "num_arrays": 1, "num_chunks": 3}
    launcher.launch(kernels.sum_squares(dtype), 2, CLIP_THREADS, **given, sums=sums)
    chunks = np.split(array, [CLIP_CHUNK, 2 * CLIP_CHUNK])
    assert sums.tolist() == [float(np.sum(np.float64(each) ** 2)) for each in chunks]
    real = np.dtype(np.float64 if dtype == "float64" else np.float32).type
    launcher.launch(
        kernels.scale_to_norm(dtype),
        2,
        CLIP_THREADS,
        **given,
        norm=np.array([4], real),
        most=real(2),
        formula=0,
    )
    np.testing.assert_array_equal(scaled, array / 2)


@pytest.mark.parametrize("before", BEFORE)
def test_gradients_of_late_chunks_are_measured(before: int) -> None:
    launcher, gradient = EmulatorLauncher(), (np.arange(SIZE) % 7).astype(np.float16)
    begin = address_before(gradient, before)
    only = ClippedArray(begin, 0, before + SIZE, -before // CLIP_CHUNK)
    sums, num_done = np.zeros(1), np.zeros(1, np.uint32)
    address = launcher.address
    launcher.launch(
        kernels.measure("float16"),
        2,
        CLIP_THREADS,
        only=only,
        arrays=None,
        num_arrays=1,
        num_chunks=3,
        parts=np.zeros(3),
        totals=ClipTotals(address(sums), address(num_done), 0, 1, 0, 1, 1),
        rule=ClipRule(0, np.inf, 1.0, 1.0, 0, 0),
        results=None,
        decision=NoDecision(),
    )
    assert sums[0] == np.sum(gradient.astype(np.float64) ** 2)


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize(
    ("rule", "scalar", "expected"),
    [
        (gradient_descent, "learning_rate", lambda grad: 1 - grad / 2),
        (begin_sum, "divisor", lambda grad: grad * 2),
        (add_to_sum, "divisor", lambda grad: (1 + grad) * 2),
    ],
    ids=lambda each: each.name if hasattr(each, "name") else "",
)
def test_late_chunks_of_a_variable_are_updated(
    rule: Any, scalar: str, expected: Any, before: int
) -> None:
    launcher, chunk_size = EmulatorLauncher(), CLIP_CHUNK
    var, grad = np.ones(SIZE, np.float32), np.arange(SIZE).astype(np.float32) % 5
    first = before // chunk_size
    launcher.launch(
        kernels.dense_update(rule, "float32"),
        2,
        256,
        variables=np.array([[before + SIZE, 0, address_before(var, before)]]),
        num_variables=1,
        chunks=np.array([[0, first + k] for k in range(3)], np.uint32),
        num_chunks=3,
        chunk_size=chunk_size,
        grads=None,
        few_grads=FewGradients([address_before(grad, before), 0, 0, 0, 0]),
        scalars=kernels.scalars_of(rule, {scalar: np.float32(0.5)}),
        refused=np.zeros(2, np.uint64),
    )
    np.testing.assert_array_equal(var, expected(grad))


def test_a_plan_cuts_all_of_a_tall_variable_into_chunks() -> None:
    sizes = np.array([3, 2**31 + 5, 0, 2**33 + 1])
    chunk_size = 2**20
    chunks = dense_plan._chunks(sizes, chunk_size)
    for variable, size in enumerate(sizes):
        numbers = chunks[chunks[:, 0] == variable][:, Chunk._fields.index("number")]
        assert numbers.tolist() == list(range(-(-int(size) // chunk_size)))


@pytest.mark.parametrize("rule", [adam, gradient_descent], ids=lambda rule: rule.name)
def test_kernels_take_sizes_and_counts_of_64_bits(rule: Any) -> None:
    codecs = coded(adam)
    for kernel in (
        kernels.measure("float32"),
        kernels.measure("float32", decides=True),
        kernels.measure_rows("float32", "uint32"),
        kernels.measure_rows("float32", "uint32", decides=True),
        kernels.join_sums(),
        kernels.join_sums(decides=True),
        kernels.sum_squares("float32"),
        kernels.scale_to_norm("float32"),
        kernels.dense_update(rule, "float32"),
        kernels.dense_update(rule, "float32", has_groups=True),
        kernels.dense_update(rule, "float32"),
        kernels.dense_update(begin_sum, "float32"),
        kernels.dense_update(add_to_sum, "float32"),
        kernels.sum_terms(lamb, "float32"),
        kernels.measure_inputs(lars, "float32"),
        kernels.measure_inputs(lars, "float32", decides=True),
        kernels.dense_update(clipped(lars), "float32", is_given_sums=True),
        kernels.dense_update(scaled(lars), "float32", is_given_sums=True),
        kernels.coded_update(adam, codecs, "float32"),
        kernels.sum_coded_terms(lamb, codecs, "float32"),
        kernels.sparse_update(rule, "float32", "uint32"),
        kernels.sparse_update(rule, "float32", "uint32", has_groups=True),
        kernels.update_other_rows(rule, "float32"),
        kernels.sparse_update(adam, "float32", "uint32", True, codecs),
        kernels.update_other_rows(adam, "float32", codecs=codecs),
        kernels.update_other_rows(adam, "float32", True, codecs),
    ):
        counts = {
            name: parameter.dtype
            for name, parameter in kernel.parameters.items()
            if (name.startswith("num_") and name != "num_done")
            or name in ("chunk_size", "row_width", "size", "table")
        }
        assert counts
        assert set(counts.values()) == {"int64"}, (kernel.function, counts)
