"""Runs a defect of planted.cu under a sanitizer, which must end the process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np

from emulator.emulator import EmulatorLauncher
from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.parameters import Number, Parameter, Pointer, struct_of

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
    types = {"is_defective": "true" if defective else "false"}
    parameters = {"values": Pointer("float32"), "size": Number("int64")}
    return Kernel(name, parameters, types, file="planted.cu")


def all_planted() -> list[Kernel]:
    return [planted_kernel(name, defective) for name in NAMES for defective in (False, True)]


def run(launcher: EmulatorLauncher, name: str, defective: bool) -> np.ndarray:
    """Returns what the kernel made of zeros."""
    launcher.prepare(all_planted())
    values = np.zeros(SIZE, np.float32)
    kernel = planted_kernel(name, defective)
    launcher.launch(kernel, NUM_BLOCKS, NUM_THREADS, values=values, size=values.size)
    return values


class Pair(NamedTuple):
    """Its twin is in planted.cu."""

    left: Annotated[Any, Pointer("Value")]
    right: Annotated[Any, Pointer("Value")]
    left_factor: Annotated[int, Number("int32")]
    right_factor: Annotated[int, Number("int32")]


COMBINE: dict[str, Parameter] = {
    "pair": struct_of(Pair, Value="float32"),
    "before": Pointer("float32"),
    "after": Pointer("float32"),
    "results": Pointer("float32"),
    "before_factor": Number("int32"),
    "after_factor": Number("int64"),
}


def combine(parameters: Mapping[str, Parameter] = COMBINE) -> Kernel:
    return Kernel("combine", parameters, {"Value": "float"}, file="planted.cu")


def _with_parameters(*names: str, **others: Parameter) -> Kernel:
    return combine({name: {**COMBINE, **others}[name] for name in names})


# Wrong declarations, and what the compiler has to say of each.
BY_COMPILER = {
    "struct_of_other_types": (
        combine({**COMBINE, "pair": struct_of(Pair, Value="float64")}),
        "Python declares parameter 0 of gpuopt::combine<float>, pair, as gpuopt::Pair<double>",
    ),
    "parameter_of_another_size": (
        _with_parameters(*COMBINE, before_factor=Number("int64")),
        "Python declares parameter 4 of gpuopt::combine<float>, before_factor, as long long",
    ),
    "parameter_of_another_type": (
        _with_parameters(*COMBINE, after=Pointer("int32")),
        r"Python declares parameter 2 of gpuopt::combine<float>, after, as int\*",
    ),
    "number_for_a_pointer": (
        _with_parameters(*COMBINE, results=Number("uint64")),
        "Python declares parameter 3 of gpuopt::combine<float>, results, as unsigned long long",
    ),
}
# Wrong names, which no compiler compares.
BY_NAME = {
    "parameters_swapped": _with_parameters(
        "pair", "after", "before", "results", "before_factor", "after_factor"
    ),
    "parameter_renamed": _with_parameters(
        "pair",
        *("before", "after", "sums", "before_factor", "after_factor"),
        sums=Pointer("float32"),
    ),
    "parameter_missing": _with_parameters("pair", "before", "after", "results", "before_factor"),
    "parameter_too_many": _with_parameters(*COMBINE, "more", more=Number("int32")),
}


if __name__ == "__main__":
    is_defective = sys.argv[1] == "defective"
    for planted in sys.argv[2:]:
        run(EmulatorLauncher(), planted, is_defective)
    print("ran to the end")
