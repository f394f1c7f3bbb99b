"""An MPI is asked whether it takes GPUs' memory, in the way that it knows."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuopt.distributed.communicators.mpi_description import takes_cuda_memory


def make_mpi(info: dict[str, str], file: str = "") -> Any:
    """Makes what is asked of the module `mpi4py.MPI`."""
    comm = SimpleNamespace(Get_info=lambda: SimpleNamespace(Get=info.get))
    return SimpleNamespace(COMM_WORLD=comm, __file__=file)


@pytest.mark.parametrize(
    ("kinds", "takes"),
    [("mpi,system", False), ("mpi,system,cuda", True), ("system,cuda:device:managed,mpi", True)],
)
def test_kinds_of_memory_say_it(kinds: str, takes: bool) -> None:
    assert takes_cuda_memory(make_mpi({"mpi_memory_alloc_kinds": kinds})) is takes


@pytest.mark.cxx
@pytest.mark.parametrize(
    ("source", "takes"),
    [
        ("int MPIX_Query_cuda_support() { return 1; }", True),
        ("int MPIX_Query_cuda_support() { return 0; }", False),
        ("int MPIX_GPU_query_support(int kind, int* is) { *is = kind == 0; return 0; }", True),
        ("int MPIX_GPU_query_support(int kind, int* is) { *is = kind != 0; return 0; }", False),
        ("int MPIX_GPU_query_support(int, int*) { return 1; }", None),
        ("int MPI_Init() { return 0; }", None),
    ],
)
def test_an_mpi_without_kinds_has_a_function(
    source: str, takes: bool | None, tmp_path: Path
) -> None:
    library = tmp_path / "libmpi.so"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=f'extern "C" {source}', text=True, check=True)
    assert takes_cuda_memory(make_mpi({}, str(library))) is takes
