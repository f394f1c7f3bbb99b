"""Updates on a device are numpy's: on a GPU where there is one, and by its kernels on the CPU."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_cases import (
    DTYPES,
    LAYOUTS,
    ROWS,
    Device,
    Run,
    check_against_numpy,
    dense_case,
    sparse_case,
)
from emulator.emulator import EmulatorLauncher
from every_kernel import kernels_of, kernels_without_rule
from every_optimizer import CONFIGURATIONS, make, update_rules

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.backends.cuda.cuda_backend import CudaBackend

ROOT = Path(__file__).resolve().parent.parent

configurations = pytest.mark.parametrize(
    ("name", "arguments"),
    [(name, arguments) for _, name, arguments in CONFIGURATIONS],
    ids=[identifier for identifier, _, _ in CONFIGURATIONS],
)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


class OnGpu:
    """CuPy's arrays on the current GPU."""

    def __init__(self) -> None:
        import cupy

        self.xp = cupy

    def put(self, host: np.ndarray) -> Any:
        return self.xp.array(host)

    def get(self, array: Any) -> np.ndarray:
        return self.xp.asnumpy(array)

    def reference(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


class EmulatedBackend(CudaBackend):
    """With numpy's arrays, which CuPy's functions do not know."""

    def to_host(self, array: Any) -> np.ndarray:
        return np.array(array)


class Emulated:
    """numpy's arrays, updated by the kernels on the CPU, except in `reference`."""

    xp = np

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._numpys = gpuopt.backends._numpy_backend
        self._emulated = EmulatedBackend(gpuopt.device.Device.cpu, EmulatorLauncher(seed=3))
        self._patch = monkeypatch
        self._use(self._emulated)

    def put(self, host: np.ndarray) -> np.ndarray:
        return np.array(host)

    def get(self, array: Any) -> np.ndarray:
        return np.array(array)

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        self._use(self._numpys)
        yield
        self._use(self._emulated)

    def _use(self, backend: Any) -> None:
        self._patch.setattr(gpuopt.backends, "_numpy_backend", backend)


@pytest.fixture(scope="module")
def compiled_kernels() -> None:
    """All at once, and on all cores."""
    EmulatorLauncher().prepare(
        kernel
        for group in (kernels_without_rule(), *map(kernels_of, update_rules()))
        for kernel in group
        if kernel.function != "sparse_update" or kernel.types[-1] == "unsigned int"
    )


@pytest.fixture(
    params=[
        pytest.param("gpu", marks=pytest.mark.gpu),
        pytest.param("emulated", marks=pytest.mark.emulator),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    if request.param == "gpu":
        return OnGpu()
    request.getfixturevalue("compiled_kernels")
    monkeypatch.setenv("GPUOPT_COMPILED", "0")
    return Emulated(monkeypatch)


# Values


@configurations
@dtypes
def test_dense_steps_are_numpys_in_every_layout(
    device: Device, name: str, arguments: dict[str, Any], dtype: str
) -> None:
    variables, steps = dense_case(device, dtype)
    check_against_numpy(device, name, arguments, variables, steps)


@configurations
@dtypes
def test_sparse_steps_are_numpys_for_all_kinds_of_rows(
    device: Device, name: str, arguments: dict[str, Any], dtype: str
) -> None:
    tables, steps = sparse_case(device, dtype)
    check_against_numpy(device, name, arguments, tables, steps)
