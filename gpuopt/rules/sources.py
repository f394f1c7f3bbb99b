"""The folders of CUDA sources: gpuopt's own, and those of rules in other packages."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from gpuopt.temporary_folder import TemporaryFolder

# The suffixes of files that a header may include.
_SUFFIXES = {"", ".cu", ".cuh", ".h", ".hh", ".hpp", ".hxx", ".inc", ".inl", ".ipp", ".tpp"}

# Copies of folders of archives.
_copies: dict[Traversable, TemporaryFolder] = {}


@dataclass(frozen=True)
class CudaSource:
    """The CUDA form of a rule: a functor, and the header that defines it.

    The header is plain C++17, as the guide on packages of one's own shows it. It may include
    gpuopt's headers, as in `#include "shared/math.cuh"`, and others below its own folder.

    Attributes:
        folder: The folder that the header's path starts from: `importlib.resources.files("name")`
            of a package, or a Path. All headers below it belong to the cache key of compiled code,
            so a folder with sources alone is best.
        header: The header's path inside the folder, with forward slashes.
        functor: The struct's name in C++, with its namespaces.

    Raises:
        TypeError: `folder` is text.
        FileNotFoundError: the header is not in the folder.
        ValueError: gpuopt has a header of the same path, so that compilers would confuse the two.
    """

    folder: Traversable
    header: str
    functor: str

    def __post_init__(self) -> None:
        if isinstance(self.folder, str):
            raise TypeError(
                f"folder must be a Path, or importlib.resources.files(...), got {self.folder!r}"
            )
        if not (self.folder / self.header).is_file():
            raise FileNotFoundError(
                f"the CUDA form {self.functor} of a rule should be in {self.header}, which is not "
                f"in {self.folder}"
            )
        if self.folder != kernel_root() and (kernel_root() / self.header).is_file():
            raise ValueError(
                f"{self.header} in {self.folder} has the path of a header in gpuopt's kernels/: "
                "give it another name"
            )


@cache
def kernel_root() -> Traversable:
    """Returns the folder that holds gpuopt's `.cu` and `.cuh` files.

    Raises:
        FileNotFoundError: the package was installed without them.
    """
    packaged = files("gpuopt") / "kernels"
    if packaged.is_dir():
        return packaged
    checkout = Path(__file__).resolve().parents[2] / "kernels"
    if checkout.is_dir():
        return checkout
    raise FileNotFoundError("gpuopt was installed without its kernels/ folder: reinstall it")


def on_disk(folder: Traversable) -> Path:
    """Returns a folder's path on disk, for compilers.

    A folder inside an archive is copied to disk; the copy lasts as long as the process.
    """
    if isinstance(folder, Path):
        return folder
    if folder not in _copies:
        copy = TemporaryFolder()
        _copy(folder, copy.path)
        _copies[folder] = copy
    return _copies[folder].path


@cache
def digest(folder: Path) -> str:
    """Returns a digest of the names and contents of all C++ and CUDA sources below a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in _SUFFIXES and path.is_file():
            found.update(f"{path.relative_to(folder).as_posix()}\0".encode())
            found.update(path.read_bytes() + b"\0")
    return found.hexdigest()


def _copy(folder: Traversable, target: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            (target / entry.name).mkdir()
            _copy(entry, target / entry.name)
        else:
            (target / entry.name).write_bytes(entry.read_bytes())
