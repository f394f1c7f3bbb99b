"""Runs recorded launches in GPGPU-Sim.

In a process of its own: the simulator's library prints its statistics, and ends the process if a
launch goes wrong. Between `BEGIN` and `END` is what it prints of a launch.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

BEGIN, END = "@@ launch", "@@ done"
# PTX 7.8 is the last that the simulator's parser takes nearly all of, and NVRTC 11.8 writes that.
_VIRTUAL_ARCHITECTURE = "compute_70"
# Whose registers ptxas counts, for the occupancy.
_REAL_ARCHITECTURE = 80
_TO_DEVICE, _TO_HOST = 1, 2


def main() -> None:
    """Runs what `recording` has written to a folder; writes the memory after it."""
    folder, library, nvrtc, headers = map(Path, sys.argv[1:])
    recorded = json.loads((folder / "launches.json").read_text())
    memory = np.fromfile(folder / "memory.bin", np.uint8)
    simulator = _Simulator(library)
    compiler = _Nvrtc(nvrtc, headers)
    for source in recorded["sources"]:
        ptx, names = compiler.compile(source["source"], source["options"], source["kernels"])
        simulator.load(ptx, names)
    simulator.copy(recorded["begin"], memory, _TO_DEVICE)
    for launch in recorded["launches"]:
        simulator.launch(launch)
    simulator.copy(recorded["begin"], memory, _TO_HOST)
    memory.tofile(folder / "after.bin")


class _Nvrtc:
    """NVRTC, from a wheel."""

    def __init__(self, library: Path, headers: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._headers = headers

    def compile(
        self, source: str, options: Sequence[str], kernels: Sequence[str]
    ) -> tuple[str, dict[str, str]]:
        """Returns PTX, and the kernels' names there."""
        # CuPy's and its CUDA's own headers are of another version.
        kept = [each for each in options if "site-packages" not in each]
        # As CuPy does.
        given = [
            f"--gpu-architecture={_VIRTUAL_ARCHITECTURE}",
            "-ftz=true",
            "--device-as-default-execution-space",
            f"-I{self._headers}",
            *kept,
        ]
        program = ctypes.c_void_p()
        call = self._call
        call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"", 0, None, None)
        for kernel in kernels:
            call("nvrtcAddNameExpression", program, kernel.encode())
        flags = (ctypes.c_char_p * len(given))(*(each.encode() for each in given))
        try:
            call("nvrtcCompileProgram", program, len(given), flags)
        except RuntimeError as error:
            raise RuntimeError(self._read(program, "nvrtcGetProgramLog")) from error
        names = {}
        for kernel in kernels:
            name = ctypes.c_char_p()
            call("nvrtcGetLoweredName", program, kernel.encode(), ctypes.byref(name))
            names[kernel] = (name.value or b"").decode()
        return self._read(program, "nvrtcGetPTX"), names

    def _read(self, program: ctypes.c_void_p, function: str) -> str:
        size = ctypes.c_size_t()
        self._call(f"{function}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(function, program, text)
        return text.value.decode()

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise RuntimeError(f"{function} fails with {status}")


class _Simulator:
    """GPGPU-Sim's libcudart.so, with the functions that our patch adds."""

    def __init__(self, library: Path) -> None:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
        self._library = ctypes.CDLL(str(library))
        # By kernel: the address by which the simulator knows it.
        self._keys: dict[str, Any] = {}
        self._num_loaded = 0

    def load(self, ptx: str, names: dict[str, str]) -> None:
        self._num_loaded += 1
        path = Path(f"{self._num_loaded}.ptx")
        path.write_text(in_known_words(ptx))
        self._library.gpuopt_load_ptx(str(path).encode(), self._num_loaded, _REAL_ARCHITECTURE)
        for kernel, name in names.items():
            key = self._keys[kernel] = ctypes.create_string_buffer(name.encode())
            self._library.gpuopt_register(self._num_loaded, key, key)

    def copy(self, address: int, memory: np.ndarray[Any, Any], direction: int) -> None:
        device, host = ctypes.c_void_p(address), ctypes.c_void_p(memory.ctypes.data)
        target, source = (device, host) if direction == _TO_DEVICE else (host, device)
        size = ctypes.c_size_t(memory.nbytes)
        self._check(self._library.cudaMemcpy(target, source, size, direction))

    def launch(self, launch: dict[str, Any]) -> None:
        values = [ctypes.create_string_buffer(bytes.fromhex(each)) for each in launch["arguments"]]
        given = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        print(f"\n{BEGIN} {launch['kernel']}", flush=True)
        kernel = ctypes.cast(self._keys[launch["kernel"]], ctypes.c_void_p)
        shape = (launch["grid"], 1, 1, launch["block"], 1, 1)
        self._check(self._library.cuLaunchKernel(kernel, *shape, 0, None, given, None))
        self._check(self._library.cudaDeviceSynchronize())
        ctypes.CDLL(None).fflush(None)
        print(f"\n{END}", flush=True)

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"the simulator refuses a call with {status}")


def in_known_words(ptx: str) -> str:
    """Returns PTX that means the same to the simulator's parser, which lacks some instructions."""
    # The predicate, which nobody reads, of a shuffle; and the distance from the highest bit.
    without = re.sub(r"(shfl\.sync\.\w+\.b32\s+%r\d+)\|%p\d+", r"\1", ptx)
    return without.replace("bfind.shiftamt.u32", "clz.b32")


if __name__ == "__main__":
    main()
