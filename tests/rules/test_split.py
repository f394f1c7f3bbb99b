"""Floats are split into bfloat16 and 16 bits, and joined again: every upper half there is."""

from __future__ import annotations

import os
import subprocess
from importlib.resources import as_file
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from gpuopt.rules.sources import kernel_root
from gpuopt.rules.split import joined, split

pytestmark = pytest.mark.value

# Between lower halves that are tried beside the ties.
STEP = 1 if os.environ.get("GPUOPT_FULL") else 15

PROGRAM = """
#include "shared/split.cuh"
#include <cstdio>

// Whether a pattern comes back, or as a NaN if it is one; and its weight is the nearest one, and of
// two the one away from zero.
bool is_right(unsigned int bits) {
  const gpuopt::Halves halves = gpuopt::split(bits);
  const unsigned int back = gpuopt::joined(halves);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const unsigned int magnitude = bits & 0x7fffffffu, lower = magnitude & 0xffffu;
  const unsigned int nearest = (magnitude >> 16) + (lower >= 0x8000u);
  return is_nan ? (back & 0x7fffffffu) > 0x7f800000u && (halves.weight & 0x7fffu) > 0x7f80u
                : back == bits && halves.weight == ((bits >> 31 << 15) | nearest);
}

int main() {
  const unsigned int ties[] = {0x7fff, 0x8000, 0x8001, 0xffff};
  for (unsigned int upper = 0; upper < 1u << 16; ++upper) {
    bool all_right = true;
    for (const unsigned int lower : ties) all_right &= is_right(upper << 16 | lower);
    for (unsigned int lower = 0; lower < 1u << 16; lower += STEP)
      all_right &= is_right(upper << 16 | lower);
    if (!all_right) {
      std::printf("of %04x....\\n", upper);
      return 1;
    }
  }
  return 0;
}
"""


@pytest.mark.cxx
def test_patterns_come_back_to_the_bit_and_every_nan_as_one(tmp_path: Path) -> None:
    program = tmp_path / "split"
    with as_file(kernel_root()) as folder:
        command = ["g++", "-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror"]
        command += [f"-I{folder}", f"-DSTEP={STEP}"]
        subprocess.run(
            [*command, "-x", "c++", "-", "-o", str(program)], input=PROGRAM, text=True, check=True
        )
    found = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (found.stdout, found.returncode) == ("", 0)


# The patterns around each tie, of every upper half.
LOWER = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)


def test_numpy_splits_as_kernels_do() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32)[:, np.newaxis] << 16
    bits = upper | LOWER
    weights, remainders = split(bits.view(np.float32))
    assert weights.dtype == ml_dtypes.bfloat16
    assert remainders.dtype == np.uint16
    is_nan = np.isnan(bits.view(np.float32))
    back = joined(weights, remainders)
    np.testing.assert_array_equal(back.view(np.uint32)[~is_nan], bits[~is_nan])
    assert np.isnan(back[is_nan]).all()
    assert np.isnan(weights[is_nan].astype(np.float32)).all()
    magnitude = bits & 0x7FFFFFFF
    nearest = (bits >> 31 << 15) | ((magnitude + 0x8000) >> 16)
    np.testing.assert_array_equal(weights.view(np.uint16)[~is_nan], nearest[~is_nan])


def test_a_scalar_is_split_too() -> None:
    value = np.asarray(np.float32(1.0001))
    weight, remainder = split(value)
    assert joined(np.asarray(weight), np.asarray(remainder)) == value
