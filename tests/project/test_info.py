"""`gpuopt info` names what there is, and the first obstacle between gpuopt and a GPU."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpuopt
from gpuopt import environment, info
from gpuopt.backends import cuda
from gpuopt.backends.cuda import availability
from gpuopt.device import Device

ONE_GPU = availability.Driver(None, 13000, ("NVIDIA H200",))


class FakeCuda:
    """libcuda.so.1 as ctypes shows it."""

    def __init__(self, init: int = 0, gpus: tuple[bytes, ...] = ()) -> None:
        self._init, self._gpus = init, gpus

    def cuInit(self, flags: int) -> int:
        return self._init

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 12080
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self._gpus)
        return 0

    def cuDeviceGet(self, handle: Any, index: int) -> int:
        handle._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, handle: Any) -> int:
        name.value = self._gpus[handle.value]
        return 0


def cupy_of_extra(name: str) -> str:
    """Returns the requirement of CuPy that pyproject.toml has for one of gpuopt's extras."""
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    [requirement] = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"][name]
    return str(requirement.partition(";")[0])


def install(monkeypatch: pytest.MonkeyPatch, *names: str, version: str = "14.2.0") -> None:
    monkeypatch.setattr(availability, "installed", lambda name: version if name in names else None)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeCuda], availability.Driver]:
    def ask(cuda: FakeCuda) -> availability.Driver:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
        return availability.ask_driver()

    return ask


def test_a_missing_driver_is_named_with_the_library_that_was_looked_for() -> None:
    problem = availability.ask_driver("libno-such-driver.so.1").problem
    assert problem == "no NVIDIA driver (libno-such-driver.so.1 was not found)"


def test_the_driver_gives_its_cuda_version_and_the_name_of_every_gpu(
    driver: Callable[[FakeCuda], availability.Driver],
) -> None:
    gpus = ("NVIDIA H200", "NVIDIA L4")
    answer = driver(FakeCuda(gpus=tuple(name.encode() for name in gpus)))
    assert answer == availability.Driver(None, 12080, gpus)


@pytest.mark.parametrize("cuda", [FakeCuda(), FakeCuda(init=100)])
def test_a_driver_without_a_gpu_is_no_broken_driver(
    driver: Callable[[FakeCuda], availability.Driver],
    monkeypatch: pytest.MonkeyPatch,
    cuda: FakeCuda,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert driver(cuda).problem == "the NVIDIA driver finds no GPU"


def test_hidden_gpus_are_explained_by_the_environment_variable_that_hides_them(
    driver: Callable[[FakeCuda], availability.Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "(CUDA_VISIBLE_DEVICES is '')" in (driver(FakeCuda()).problem or "")


def test_a_driver_that_fails_gives_its_error_number(
    driver: Callable[[FakeCuda], availability.Driver],
) -> None:
    assert driver(FakeCuda(init=803)).problem == "the NVIDIA driver fails with CUDA error 803"


@pytest.mark.parametrize(
    ("driver", "distributions", "words"),
    [
        (availability.Driver("no NVIDIA driver"), (), "no NVIDIA driver"),
        (availability.Driver(None, 11040, ("Tesla K80",)), ("cupy-cuda12x",), "too old"),
        (ONE_GPU, (), f"pip install '{cupy_of_extra('cuda13')}'"),
        (ONE_GPU._replace(cuda_version=12080), (), f"pip install '{cupy_of_extra('cuda12')}'"),
        (ONE_GPU, ("cupy-cuda12x", "cupy-cuda13x"), "cupy-cuda12x and cupy-cuda13x"),
        (
            ONE_GPU._replace(cuda_version=12080),
            ("cupy-cuda13x",),
            f"cupy-cuda13x is installed, and the NVIDIA driver is for CUDA 12: pip uninstall "
            f"cupy-cuda13x, then pip install '{cupy_of_extra('cuda12')}'",
        ),
    ],
)
def test_the_first_obstacle_to_a_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch,
    driver: availability.Driver,
    distributions: tuple[str, ...],
    words: str,
) -> None:
    install(monkeypatch, *distributions)
    assert words in (availability.why_no_gpu(driver) or "")


@pytest.mark.parametrize("version", ["12.3.0", "13.2.1", "13.0.0rc1"])
def test_info_and_the_error_of_an_unusable_gpu_name_a_cupy_that_is_too_old(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install(monkeypatch, "cupy-cuda13x", version=version)
    for module in (info, cuda):
        monkeypatch.setattr(module, "ask_driver", lambda: ONE_GPU)
    expected = (
        f"cupy-cuda13x {version} is too old, gpuopt needs 13.3 or newer: "
        f"pip install '{cupy_of_extra('cuda13')}'"
    )
    assert dict(info.describe())["gpu:0"] == f"NVIDIA H200, not usable: {expected}"
    with pytest.raises(gpuopt.DeviceUnavailableError, match=re.escape(expected)):
        cuda.cuda_backend(Device("gpu", 0))


@pytest.mark.parametrize("version", ["13.3", "13.10.0", "14.0.0a1"])
def test_a_newer_cupy_is_not_too_old(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, "cupy-cuda13x", version=version)
    assert availability.why_no_gpu(ONE_GPU) is None


def test_a_driver_runs_an_older_cupy_and_info_names_the_one_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "cupy-cuda12x")
    monkeypatch.setattr(info, "ask_driver", lambda: ONE_GPU)
    monkeypatch.setattr(info, "installed", availability.installed)
    assert availability.why_no_gpu(ONE_GPU) is None
    assert dict(info.describe())["gpu:0"] == (
        "NVIDIA H200, usable; better: cupy-cuda12x is installed, and the NVIDIA driver is for CUDA "
        f"13: pip uninstall cupy-cuda12x, then pip install '{cupy_of_extra('cuda13')}'"
    )
    install(monkeypatch, "cupy-cuda13x")
    assert dict(info.describe())["gpu:0"] == "NVIDIA H200, usable"


def test_a_gpu_is_listed_by_its_name_with_the_reason_why_it_is_not_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch)
    monkeypatch.setattr(info, "ask_driver", lambda: ONE_GPU)
    rows = dict(info.describe())
    assert rows["driver"] == "runs CUDA up to 13.0"
    assert rows["gpu:0"].startswith("NVIDIA H200, not usable: CuPy is not installed")


def test_info_prints_versions_and_devices() -> None:
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-m", "gpuopt", "info"], capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    rows = dict(line.split(maxsplit=1) for line in finished.stdout.splitlines())
    assert rows["gpuopt"].startswith(gpuopt.__version__)
    assert rows["mpi"].startswith(("usable: mpi4py ", "not usable: mpi4py "))
    assert rows["nccl"].startswith(("usable: NCCL ", "not usable: CuPy "))
    assert {"python", "numpy", "ml_dtypes", "torch", "matplotlib", "cupy", "cpu"} <= rows.keys()
    assert any(what.startswith("gpu") and what != "gpuopt" for what in rows)


def test_nccl_that_is_not_there_is_an_error_that_says_what_to_do() -> None:
    script = (
        "from gpuopt.distributed.communicators.nccl_library import describe_nccl, import_nccl\n"
        "print(describe_nccl()); import_nccl()"
    )
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True
    )
    if finished.stdout.startswith("usable"):
        assert finished.returncode == 0, finished.stderr
        return
    last = finished.stderr.splitlines()[-1]
    assert re.match("ImportError: .*(pip install nvidia-nccl-cu1[23]|see `gpuopt info`)$", last)


@pytest.mark.parametrize(
    ("arguments", "stdout", "unbuffered"),
    [
        (["info"], ">&-", ""),
        (["bench", "--list"], "> /dev/full", "1"),
        (["--help"], "> /dev/full", ""),
    ],
)
def test_output_that_cannot_be_written_is_an_error_without_a_traceback(
    arguments: list[str], stdout: str, unbuffered: str
) -> None:
    if "full" in stdout and not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    command = [sys.executable, "-m", "gpuopt", *arguments]
    finished = subprocess.run(
        ["sh", "-c", f'"$@" {stdout}', "sh", *command],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert finished.returncode == 2
    assert re.fullmatch("gpuopt: .*\n", finished.stderr)


def test_info_imports_no_cuda_library() -> None:
    script = (
        "import sys, gpuopt.info as info; info.describe();"
        "sys.exit(any(name in sys.modules for name in ('cupy', 'torch', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_info_says_how_many_threads_there_are_and_what_runs_the_rules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    monkeypatch.setenv("GPUOPT_THREADS", "3")
    monkeypatch.setenv("CXX", f"{compiler} -pipe")
    monkeypatch.delenv("GPUOPT_COMPILED", raising=False)
    rows = dict(info.describe())
    assert rows["threads"] == "3"
    assert rows["rules"] == f"compiled by {compiler} -pipe"
    monkeypatch.setenv("GPUOPT_COMPILED", "0")
    assert dict(info.describe())["rules"] == "numpy: GPUOPT_COMPILED is 0"
    monkeypatch.setenv("GPUOPT_COMPILED", "1")
    for script, words in (("exit 3", "it ended with 3"), ("echo broken >&2; exit 1", "broken")):
        broken = tmp_path / "compiler"
        broken.write_text(f"#!/bin/sh\n{script}\n")
        broken.chmod(0o700)
        monkeypatch.setenv("CXX", str(broken))
        rules = dict(info.describe())["rules"]
        assert rules == f"numpy: {broken} does not work as a C++ compiler: {words}"
    monkeypatch.setenv("GPUOPT_COMPILED", "yes")
    rows = dict(info.describe())
    assert rows["rules"] == rows["GPUOPT_COMPILED"] == "GPUOPT_COMPILED='yes' is neither 0 nor 1"


def test_info_lists_every_variable_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.names():
        monkeypatch.delenv(name, raising=False)
    assert {dict(info.describe())[name] for name in environment.names()} == {"not set"}
    monkeypatch.setenv("GPUOPT_CACHE_DIR", "here")
    monkeypatch.setenv("GPUOPT_CHECK", "on")
    rows = dict(info.describe())
    assert rows["GPUOPT_CACHE_DIR"] == "'here'"
    assert rows["GPUOPT_CHECK"] == "GPUOPT_CHECK='on' is neither 0 nor 1"
