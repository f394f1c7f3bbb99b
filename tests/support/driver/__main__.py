"""Runs Python on GPUs that are not there: python tests/support/driver SCRIPT or -m MODULE ...

GPUOPT_DRIVER_STREAMS says how streams run: immediate, oldest (the default), newest or random:SEED.
GPUOPT_DRIVER_DEVICES and GPUOPT_DRIVER_MULTIPROCESSORS say how much is not there, and
GPUOPT_DRIVER_FIRST_ADDRESS where its memory begins.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    if len(sys.argv) < 2:
        print(__doc__)
        sys.exit(2)
    site = Path(__file__).resolve().parent / "site"
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "GPUOPT_DRIVER": "1"}
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment)


if __name__ == "__main__":
    main()
