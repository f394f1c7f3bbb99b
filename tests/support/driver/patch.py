"""Makes the CUDA runtime that CuPy carries within itself jump to the driver's functions.

CuPy's extensions contain NVIDIA's runtime as a static library, with its symbols.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
from pathlib import Path

READ_WRITE_EXECUTE = 7
_libc = ctypes.CDLL(None, use_errno=True)
# What the stubs of unknown functions point at.
_names: list[ctypes.c_char_p] = []


def patch(extension: Path, driver: ctypes.CDLL) -> None:
    """Overwrites the beginning of each function of the runtime in a loaded extension."""
    handle = ctypes.CDLL(str(extension))
    symbols = _runtime_functions(extension)
    base = _base(extension)
    _allow_writing(base, [at for at, _ in symbols.values()])
    for name, (at, size) in symbols.items():
        code = _jump(_counterpart(name, driver), name if size >= 32 else None, driver)
        if size >= len(code):
            ctypes.memmove(base + at, code, len(code))
    del handle


def _runtime_functions(extension: Path) -> dict[str, tuple[int, int]]:
    """Finds (address, size) of each function."""
    symbols = {}
    listing = subprocess.check_output(["nm", "--print-size", str(extension)], text=True)
    for line in listing.splitlines():
        parts = line.split()
        if len(parts) == 4 and parts[2] in "tT" and parts[3].startswith("cuda"):
            symbols[parts[3]] = (int(parts[0], 16), int(parts[1], 16))
    return symbols


def _base(extension: Path) -> int:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(extension.resolve())):
            return int(line.split("-")[0], 16)
    raise RuntimeError(f"{extension} is not loaded")


def _allow_writing(base: int, addresses: list[int]) -> None:
    first = (base + min(addresses)) // mmap.PAGESIZE * mmap.PAGESIZE
    size = base + max(addresses) + mmap.PAGESIZE - first
    if _libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(size), READ_WRITE_EXECUTE):
        raise OSError(ctypes.get_errno(), "the code of CuPy's runtime cannot be made writable")


def _counterpart(name: str, driver: ctypes.CDLL) -> int | None:
    for suffix in ("", "_v2", "_ptsz", "_ptds"):
        function = getattr(driver, name.removesuffix(suffix), None)
        if name.endswith(suffix) and function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _jump(target: int | None, name: str | None, driver: ctypes.CDLL) -> bytes:
    """Returns the machine code of a jump; to an unknown function with its name as argument."""
    code = b""
    if target is None:
        unknown = driver.driver_unknown_function
        target = ctypes.cast(unknown, ctypes.c_void_p).value or 0
        _names.append(ctypes.c_char_p((name or "a function of the runtime").encode()))
        address = ctypes.cast(_names[-1], ctypes.c_void_p).value or 0
        code = b"\x48\xbf" + address.to_bytes(8, "little")  # movabs $address, %rdi
    # movabs $target, %r11; jmp *%r11
    return code + b"\x49\xbb" + target.to_bytes(8, "little") + b"\x41\xff\xe3"
