"""NCCL, which CuPy has as `cupy.cuda.nccl`.

CuPy is imported here, and nowhere else in this package, when a group is made.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from operator import methodcaller
from typing import Any, TypeVar

from gpuopt.backends.cuda.availability import installed

Result = TypeVar("Result")

_ASKING_S = 60.0


def import_nccl() -> Any:
    """Returns the module `cupy.cuda.nccl`.

    Raises:
        ImportError: CuPy is not installed, or finds no NCCL.
    """
    if find_spec("cupy") is None:
        raise ImportError("NCCL is used through CuPy, which is not installed: see `gpuopt info`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's, of what the error tells
        from cupy.cuda import nccl

    if not nccl.available:
        raise ImportError(f"CuPy finds no NCCL; install it: {_how_to_install()}")
    return nccl


@cache
def describe_nccl() -> str:
    """Says which NCCL there is, or why there is none; a process of its own imports CuPy."""
    if find_spec("cupy") is None:
        return "not usable: CuPy is not installed"
    ask = (
        "import warnings; warnings.simplefilter('ignore'); from cupy.cuda import nccl; "
        "print(nccl.get_version() if nccl.available else 0)"
    )
    try:
        asked = subprocess.run(
            [sys.executable, "-c", ask], capture_output=True, text=True, timeout=_ASKING_S
        )
    except subprocess.TimeoutExpired:
        return f"not usable: CuPy cannot be imported within {_ASKING_S:g} s"
    if asked.returncode:
        said = asked.stderr.strip().splitlines() or [f"status {asked.returncode}"]
        return f"not usable: {said[-1]}"
    version = int(asked.stdout)
    if not version:
        return f"not usable: CuPy finds no NCCL: {_how_to_install()}"
    return f"usable: NCCL {version // 10000}.{version % 10000 // 100}.{version % 100}"


def call_in_group(nccl: Any, calls: Callable[[], Result]) -> Result:
    """Makes NCCL's calls as one, which begins when all were made; returns what `calls` does."""
    begun: list[Any] = []
    try:
        # Built-ins alone: Ctrl-C between the beginning and its note would leave the group open, and
        # what this thread calls later would never begin.
        begun.extend(map(methodcaller("groupStart"), [nccl]))
        return calls()
    finally:
        if begun:
            nccl.groupEnd()


def current_stream() -> int:
    """Returns the address of the current GPU's current stream."""
    import cupy

    return cupy.cuda.get_current_stream().ptr  # type: ignore[no-any-return]


def record_event() -> Any:
    """Marks the present end of the current stream's work."""
    import cupy

    from gpuopt.backends.cuda.cupy_launcher import CupyEvent

    event = CupyEvent()
    event.record(cupy.cuda.get_current_stream())
    return event


def place_of(index: int) -> str:
    """Returns a GPU's address on this host's bus."""
    import cupy

    return cupy.cuda.runtime.deviceGetPCIBusId(index)  # type: ignore[no-any-return]


def _how_to_install() -> str:
    flavour = 12 if installed("cupy-cuda12x") else 13
    return f"pip install nvidia-nccl-cu{flavour}"
