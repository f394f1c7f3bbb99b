"""Starts a defect of planted.cu: under a sanitizer, it is to end the process."""

from __future__ import annotations

import sys

import numpy as np

from emulator.emulator import EmulatorLauncher
from gpuopt.backends.cuda.kernel import Kernel

# What finds them.
BY_ADDRESS = {
    "write_past_end": "heap-buffer-overflow",
    "write_past_shared_end": "global-buffer-overflow",
    "misaligned_access": "misaligned address",
    "shift_too_far": "shift exponent 32 is too large",
}
BY_THREAD = [
    "missing_barrier",
    "missing_second_barrier",
    "missing_warp_barrier",
    "race_of_blocks",
    "missing_fence",
]
BY_EMULATOR = {
    "barrier_of_some_warps": "not reached by .* which have exited",
    "different_barriers": "wait in different barriers",
    "shuffle_after_exit": "names lanes that have exited",
    "mask_without_own_lane": "lacks the lane itself",
    "shuffle_outside_mask": "reads lane 16, which the mask 0000ffff lacks",
    "different_collectives": "meet in __a.._sync at .* and __a.._sync",
    "deadlock": "deadlock: 64 thread|deadlock: 32 thread",
    "too_many_threads": "__launch_bounds__ says at most 32",
}
BY_VALUES = ["uninitialised_shared", "block_order", "missing_barrier"]
NAMES = [*dict.fromkeys([*BY_ADDRESS, *BY_THREAD, *BY_EMULATOR, *BY_VALUES])]

NUM_BLOCKS = 4
NUM_THREADS = 64
SIZE = NUM_BLOCKS * NUM_THREADS - 6


def planted_kernel(name: str, defective: bool) -> Kernel:
    types = ("true" if defective else "false",)
    return Kernel(name, ("*float32", "int64"), types, file="planted.cu")


def all_planted() -> list[Kernel]:
    return [planted_kernel(name, defective) for name in NAMES for defective in (False, True)]


def run(launcher: EmulatorLauncher, name: str, defective: bool) -> np.ndarray:
    """Returns what the kernel made of zeros."""
    launcher.prepare(all_planted())
    values = np.zeros(SIZE, np.float32)
    kernel = planted_kernel(name, defective)
    launcher.launch(kernel, NUM_BLOCKS, NUM_THREADS, [values, np.int64(values.size)])
    return values


if __name__ == "__main__":
    is_defective = sys.argv[1] == "defective"
    for planted in sys.argv[2:]:
        run(EmulatorLauncher(), planted, is_defective)
    print("ran to the end")
