"""Updates on a GPU agree with numpy's: on a real GPU if there is one, and on the emulator."""

from __future__ import annotations

from typing import Any

import driver
import fake_cupy
import numpy as np
import pytest
from device_cases import (
    LAYOUTS,
    MEMORY,
    ROWS,
    Device,
    Run,
    check_against_numpy,
    dense_case,
    sparse_case,
)
from dtypes import DTYPES_BY_NAME
from every_optimizer import CONFIGURATIONS, FIRST_OF_EACH_SHAPE, configurations

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.backends.cuda.backend import CudaBackend

dtypes = pytest.mark.parametrize("dtype", DTYPES_BY_NAME)
# On a real GPU everything; else, every type for the first optimizer of each shape.
in_every_dtype = pytest.mark.parametrize(
    ("device", "dtype", "name", "arguments"),
    [
        pytest.param(
            device, dtype, name, arguments, id=f"{device}-{dtype}-{identifier}", marks=[mark]
        )
        for device, mark in (("gpu", pytest.mark.gpu), ("emulated", pytest.mark.emulator))
        for identifier, name, arguments in CONFIGURATIONS
        for dtype in DTYPES_BY_NAME
        if dtype == "float32"
        or (device == "gpu" and not driver.is_here())
        or (identifier, name, arguments) in FIRST_OF_EACH_SHAPE
    ],
    indirect=["device"],
)


class OnGpu:
    """CuPy's arrays on the current GPU."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy

    def put(self, host: np.ndarray) -> Any:
        return self._cupy.array(host)

    def get(self, array: Any) -> np.ndarray:
        return self._cupy.asnumpy(array)


class OnEmulatedGpu:
    """A stand-in's arrays, updated by the kernels on the CPU."""

    def put(self, host: np.ndarray) -> fake_cupy.ndarray:
        return fake_cupy.asarray(np.array(host))

    def get(self, array: fake_cupy.ndarray) -> np.ndarray:
        return array.get()


ON_GPU = pytest.param("gpu", marks=pytest.mark.gpu)
EMULATED = pytest.param("emulated", marks=pytest.mark.emulator)


@pytest.fixture(params=[ON_GPU, EMULATED])
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "gpu":
        return OnGpu()
    request.getfixturevalue("emulated_gpus")
    return OnEmulatedGpu()


# Values


@in_every_dtype
@pytest.mark.one_in(8)
def test_dense_steps_are_numpys_in_every_layout(
    device: Device, name: str, arguments: dict[str, Any], dtype: str
) -> None:
    variables, steps = dense_case(device, dtype)
    check_against_numpy(device, name, arguments, variables, steps)


@in_every_dtype
@pytest.mark.one_in(8)
def test_sparse_steps_are_numpys_for_all_kinds_of_rows(
    device: Device, name: str, arguments: dict[str, Any], dtype: str
) -> None:
    tables, steps = sparse_case(device, dtype)
    check_against_numpy(device, name, arguments, tables, steps)


@pytest.mark.parametrize("device", [EMULATED], indirect=True)
@pytest.mark.parametrize("case", [dense_case, sparse_case])
def test_a_device_that_skips_the_last_element_or_row_is_found(
    device: Device, monkeypatch: pytest.MonkeyPatch, case: Any
) -> None:
    """The backend skips the last element of every gradient, or the last row."""
    apply_dense, apply_sparse = CudaBackend.apply_dense, CudaBackend.apply_sparse

    def short_dense(backend: Any, rule: Any, plan: Any, gradients: Any, *rest: Any, **more: Any):
        gradients = [gradient.copy() for gradient in gradients]
        for gradient in gradients:
            gradient.reshape(-1)[-1:] = 0
        apply_dense(backend, rule, plan, gradients, *rest, **more)

    def short_sparse(backend: Any, rule: Any, updates: Any, *rest: Any, **more: Any) -> None:
        short = [each._replace(values=each.values[:-1], rows=each.rows[:-1]) for each in updates]
        apply_sparse(backend, rule, short, *rest, **more)

    monkeypatch.setattr(CudaBackend, "apply_dense", short_dense)
    monkeypatch.setattr(CudaBackend, "apply_sparse", short_sparse)
    variables, steps = case(device, "float32")
    with pytest.raises(AssertionError, match="elements are wrong"):
        check_against_numpy(device, "MomentumOptimizer", {"momentum": 0.9}, variables, steps)


@pytest.mark.parametrize("device", [ON_GPU], indirect=True)
@configurations
@dtypes
@pytest.mark.one_in(8)
def test_two_runs_give_the_same_bits(
    device: Device, name: str, arguments: dict[str, Any], dtype: str
) -> None:
    """Includes sums of repeated rows, whose rounding depends on the order of the terms."""

    def run() -> list[np.ndarray]:
        rng = np.random.default_rng(3)
        arrays, dense = dense_case(device, dtype, LAYOUTS[:8])
        tables, sparse = sparse_case(device, dtype)
        model = Run(name, arguments, [*arrays, *tables])
        for of_arrays, of_tables in zip(dense, sparse, strict=True):
            inexact = [
                IndexedSlices(
                    device.put(rng.normal(size=slices.values.shape).astype(DTYPES_BY_NAME[dtype])),
                    slices.indices,
                )
                for slices in of_tables.on_device
            ]
            model.apply([*of_arrays.on_device, *inexact])
        return model.state(device.get)

    for first, second in zip(run(), run(), strict=True):
        assert first.tobytes() == second.tobytes()


@dtypes
def test_variables_on_views_are_updated_where_they_are(device: Device, dtype: str) -> None:
    """A Variable on a view is updated, and memory around the view is not written."""
    rng = np.random.default_rng(4)
    host = rng.normal(size=MEMORY).astype(DTYPES_BY_NAME[dtype])
    memory = device.put(host)
    variable = Variable(memory[101:1102], copy=False)
    gradient = device.put(rng.normal(size=1001).astype(DTYPES_BY_NAME[dtype]))
    gpuopt.MomentumOptimizer(0.1, 0.9).apply_gradients([(gradient, variable)])
    after = device.get(memory)
    assert np.array_equal(after[101:1102], variable.numpy())
    moved = after != host
    assert moved[101:1102].mean() > 0.9
    assert not moved[:101].any()
    assert not moved[1102:].any()


@dtypes
def test_rows_without_a_gradient_keep_their_bits_but_under_adam(device: Device, dtype: str) -> None:
    [case] = [case for case in ROWS if case.name == "repeated"]
    for name, arguments in (("LazyAdamOptimizer", {}), ("AdamOptimizer", {})):
        [table], steps = sparse_case(device, dtype, [case])
        model = Run(name, arguments, [table])
        for step in steps:
            before = device.get(table)
            model.apply(step.on_device)
            moved = (device.get(table) != before).any(axis=1)
            named = np.isin(np.arange(case.height), step.on_host[0].indices)
            assert named.any()
            assert not named.all()
            if name == "LazyAdamOptimizer":
                assert not moved[~named].any()
        if name == "AdamOptimizer":  # rows named in earlier steps move on
            assert moved[~named].any()


def test_a_gradient_is_only_read(device: Device) -> None:
    variables, [step] = dense_case(device, "float32", LAYOUTS[:6], num_steps=1)
    tables, [sparse] = sparse_case(device, "float32", num_steps=1)
    Run("AdamOptimizer", {}, [*variables, *tables]).apply([*step.on_device, *sparse.on_device])
    for got, given in zip(step.on_device, step.on_host, strict=True):
        assert np.array_equal(device.get(got), given)
    for got, given in zip(sparse.on_device, sparse.on_host, strict=True):
        assert np.array_equal(device.get(got.values), given.values)
        assert np.array_equal(device.get(got.indices), given.indices)
