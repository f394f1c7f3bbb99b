"""Where the CUDA sources are: inside an installed package, or in a checkout."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path


@cache
def kernel_root() -> Traversable:
    """Returns the folder that holds the `.cu` and `.cuh` files.

    Raises:
        FileNotFoundError: the package was installed without them.
    """
    packaged = files("gpuopt") / "kernels"
    if packaged.is_dir():
        return packaged
    checkout = Path(__file__).resolve().parent.parent / "kernels"
    if checkout.is_dir():
        return checkout
    raise FileNotFoundError("gpuopt was installed without its kernels/ folder: reinstall it")
