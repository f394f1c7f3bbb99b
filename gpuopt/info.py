"""The command `gpuopt info`: libraries, CPU, GPUs, and the reason why a GPU is not usable."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Callable

import gpuopt
from gpuopt import environment
from gpuopt.backends.cpu.compiler import compiler, why_compiler_fails, why_not_compiled
from gpuopt.backends.cpu.threads import num_threads
from gpuopt.backends.cuda.availability import (
    CUPY_DISTRIBUTIONS,
    ask_driver,
    installed,
    other_flavour,
    why_no_gpu,
)
from gpuopt.distributed.communicators.mpi_description import describe_mpi
from gpuopt.distributed.communicators.nccl_library import describe_nccl

_LIBRARIES = ("numpy", "ml_dtypes", "rich", "torch", "matplotlib")


def describe() -> list[tuple[str, str]]:
    """Returns (subject, answer) rows for `gpuopt info`."""
    driver = ask_driver()
    cupy = [f"{name} {found}" for name in CUPY_DISTRIBUTIONS if (found := installed(name))]
    source = "" if installed("gpuopt") else ", not installed, running from source"
    rows = [
        ("gpuopt", gpuopt.__version__ + source),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *((name, installed(name) or "not installed") for name in _LIBRARIES),
        ("cupy", ", ".join(cupy) or "not installed"),
    ]
    if driver.cuda_version:
        major, minor = driver.cuda_version // 1000, driver.cuda_version % 1000 // 10
        rows.append(("driver", f"runs CUDA up to {major}.{minor}"))
    rows.append(("cpu", f"usable, {os.cpu_count()} cores"))
    rows.append(("threads", _call_or_explain(lambda: str(num_threads()))))
    rows += environment.describe()
    rows.append(("mpi", describe_mpi()))
    rows.append(("nccl", describe_nccl()))
    rows.append(("rules", _call_or_explain(_describe_rules)))
    reason = why_no_gpu(driver)
    usable = "usable" if reason is None else f"not usable: {reason}"
    if reason is None and (other := other_flavour(driver)) is not None:
        usable += f"; better: {other}"
    rows += [(f"gpu:{index}", f"{name}, {usable}") for index, name in enumerate(driver.gpus)]
    return rows if driver.gpus else [*rows, ("gpu", usable)]


def _describe_rules() -> str:
    reason = why_not_compiled() or why_compiler_fails()
    return f"compiled by {shlex.join(compiler() or [])}" if reason is None else f"numpy: {reason}"


def _call_or_explain(function: Callable[[], str]) -> str:
    """Calls `function`; if an environment variable has a wrong value, returns the error's text."""
    try:
        return function()
    except ValueError as error:
        return str(error)
