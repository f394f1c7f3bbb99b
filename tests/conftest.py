"""What tests need: GPUOPT_REQUIRE turns a skip for something missing into a failure."""

from __future__ import annotations

import gc
import os
import shutil
from importlib.util import find_spec

import pytest
from emulator.kernel_library import what_is_missing

from gpuopt.info import ask_driver


def has_gpu() -> bool:
    return ask_driver().problem is None and find_spec("cupy") is not None


# Marker to (is it there, what to say if not).
NEEDS = {
    "cxx": (lambda: shutil.which("g++") is not None, "g++ is not installed"),
    "emulator": (lambda: what_is_missing() is None, what_is_missing()),
    "gpu": (has_gpu, "there is no GPU, or no CuPy"),
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
    gc.collect()
