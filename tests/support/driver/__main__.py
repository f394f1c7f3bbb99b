"""Runs Python on the stub driver: python tests/support/driver SCRIPT or -m MODULE ...

GPUOPT_DRIVER_STREAMS says how streams run: immediate, oldest (the default), newest or random:SEED.
GPUOPT_DRIVER_DEVICES says how many GPUs there are (5).
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path


def main() -> None:
    if len(sys.argv) < 2:
        print(__doc__)
        sys.exit(2)
    site = Path(__file__).resolve().parent / "site"
    sys.path.insert(0, str(site.parents[1]))
    from driver import native_library

    try:
        native_library.compiled()  # where it fails in the next process, that goes on without it
    except native_library.MissingHeadersError as error:
        sys.exit(str(error))
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **where_cuda_is(), "PYTHONPATH": path, "GPUOPT_DRIVER": "1"}
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment)


def where_cuda_is() -> dict[str, str]:
    """Tells CuPy 13 where pip has put CUDA 12; others look there by themselves."""
    compiler = Path(sysconfig.get_path("purelib")) / "nvidia" / "cuda_nvrtc" / "lib"
    if not compiler.exists():
        return {}
    library_path = os.pathsep.join(filter(None, [str(compiler), os.environ.get("LD_LIBRARY_PATH")]))
    headers = compiler.parents[1] / "cuda_runtime"
    return {"LD_LIBRARY_PATH": library_path, "CUDA_PATH": str(headers)}


if __name__ == "__main__":
    main()
