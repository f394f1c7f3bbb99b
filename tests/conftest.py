"""What tests need: GPUOPT_REQUIRE turns a skip for something missing into a failure."""

from __future__ import annotations

import gc
import os
import shutil
from importlib.util import find_spec

import fake_cupy
import pytest
from emulator import EmulatorLauncher
from emulator.kernel_library import what_is_missing
from every_kernel import kernels_of, kernels_without_rule
from every_optimizer import update_rules

from gpuopt import backends, identity
from gpuopt.backends import host_compiler, host_plan, numpy_backend
from gpuopt.backends.cuda.availability import ask_driver, installed
from gpuopt.backends.cuda.cuda_backend import CudaBackend
from gpuopt.device import Device


def has_gpu() -> bool:
    return ask_driver().problem is None and find_spec("cupy") is not None


def has_nvrtc() -> bool:
    wheels = "cuda-core", "nvidia-cuda-nvrtc", "nvidia-cuda-nvdisasm"
    return all(installed(wheel) is not None for wheel in wheels)


# Marker to (is it there, what to say if not).
NEEDS = {
    "cxx": (lambda: shutil.which("g++") is not None, "g++ is not installed"),
    "emulator": (lambda: what_is_missing() is None, what_is_missing()),
    "gpu": (has_gpu, "there is no GPU, or no CuPy"),
    "nvrtc": (has_nvrtc, "cuda-core, NVRTC or nvdisasm is not installed"),
    "torch": (lambda: find_spec("torch") is not None, "torch is not installed"),
}


def required() -> set[str]:
    names = {name for name in os.environ.get("GPUOPT_REQUIRE", "").split(",") if name}
    if unknown := names - set(NEEDS):
        raise pytest.UsageError(
            f"GPUOPT_REQUIRE names {', '.join(sorted(unknown))}; known are {', '.join(NEEDS)}"
        )
    return names


def pytest_configure(config: pytest.Config) -> None:
    required()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, (is_there, reason) in NEEDS.items():
        if item.get_closest_marker(name) is None or is_there():
            continue
        if name in required():
            pytest.fail(f"{reason}, and GPUOPT_REQUIRE asks for it", pytrace=False)
        pytest.skip(reason)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keeps what lives as long as the session out of the collections below: they are quick then."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def names_of_earlier_tests_are_free() -> None:
    """A caught exception keeps its test's variables, and so their names, in a reference cycle."""
    if identity._named:
        gc.collect()


@pytest.fixture
def kept_libraries(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled rules are kept from one run of the tests to the next, apart from the user's own."""
    folder = pytestconfig.cache.mkdir("compiled-rules")
    monkeypatch.setattr(host_compiler, "cache_folder", lambda: folder)


@pytest.fixture(params=["plain", "recorded", pytest.param("compiled", marks=pytest.mark.cxx)])
def every_cpu_form(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kept_libraries: None
) -> str:
    """Runs a test with rules as written, and with each form that large work takes, in threads."""
    monkeypatch.setenv("GPUOPT_COMPILED", "1" if request.param == "compiled" else "0")
    if request.param != "plain":
        monkeypatch.setenv("GPUOPT_THREADS", "3")
        monkeypatch.setattr(numpy_backend, "_LARGE_ELEMENTS", 0)
        monkeypatch.setattr(numpy_backend, "_ELEMENTS_PER_THREAD", 1)
        monkeypatch.setattr(host_plan, "_SMALL_ELEMENTS", 1)
    return str(request.param)


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """All at once, and on all cores."""
    EmulatorLauncher().prepare(
        kernel
        for group in (kernels_without_rule(), *map(kernels_of, update_rules()))
        for kernel in group
    )


@pytest.fixture
def emulated_gpus(
    monkeypatch: pytest.MonkeyPatch, compiled_kernels: None
) -> list[EmulatorLauncher]:
    """Makes gpu:0 and gpu:1 usable: arrays of fake_cupy, and kernels that run on the CPU."""
    launchers = [EmulatorLauncher(xp=fake_cupy, index=index) for index in range(2)]
    for index, launcher in enumerate(launchers):
        device = Device("gpu", index)
        monkeypatch.setitem(backends._backends, device, CudaBackend(device, launcher))
    return launchers
