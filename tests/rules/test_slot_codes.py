"""The quotients that kernels look codes up by have the bits of a division."""

from __future__ import annotations

import ctypes
import subprocess
from importlib.resources import as_file
from pathlib import Path

import numpy as np
import pytest

from gpuopt.rules.sources import kernel_root

pytestmark = pytest.mark.value

SOURCE = """
#include "shared/slot_codes.cuh"

extern "C" void divide(const float* numbers, const float* scales, float* quotients, long count) {
  for (long i = 0; i < count; ++i)
    quotients[i] = gpuopt::BlockDivisor(scales[i]).quotient(numbers[i]);
}
"""


def floats(rng: np.random.Generator, exponents: np.ndarray) -> np.ndarray:
    """Returns positive floats of these exponents: a quarter just above a power of 2, one below."""
    digits = rng.integers(1 << 23, size=exponents.size, dtype=np.uint32)
    few = rng.integers(8, size=exponents.size, dtype=np.uint32)
    kinds = [digits, digits, few, np.uint32((1 << 23) - 1) - few]
    chosen = np.choose(rng.integers(4, size=exponents.size), kinds)
    return (exponents.astype(np.uint32) << np.uint32(23) | chosen).view(np.float32)


def test_quotients_by_a_scale_are_those_of_a_division(tmp_path: Path) -> None:
    with as_file(kernel_root()) as kernels:
        command = ["g++", "-std=c++17", "-O2", "-mfma", "-ffp-contract=off", f"-I{kernels}"]
        command += ["-shared", "-fPIC", "-x", "c++", "-", "-o", str(tmp_path / "divide.so")]
        subprocess.run(command, input=SOURCE, text=True, check=True)
    divide = ctypes.CDLL(str(tmp_path / "divide.so")).divide
    rng, count = np.random.default_rng(0), 1 << 20
    for _ in range(8):
        exponents = rng.integers(255, size=count)  # 0: of numbers that GPUs take for 0
        scales = np.maximum(floats(rng, exponents), np.finfo(np.float32).smallest_subnormal)
        numbers = floats(rng, np.maximum(exponents - rng.integers(26, size=count), 0))
        numbers, quotients = np.minimum(numbers, scales), np.empty(count, np.float32)
        numbers[:: 1 << 10] = scales[:: 1 << 10]
        divide(
            *(each.ctypes.data_as(ctypes.c_void_p) for each in (numbers, scales, quotients)), count
        )
        expected = numbers / scales
        is_exact = expected >= 2.0**-24  # smaller ones are below all bounds
        np.testing.assert_array_equal(quotients[is_exact], expected[is_exact])
        assert quotients[~is_exact].max() < 2.0**-23
