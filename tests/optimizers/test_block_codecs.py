"""A codec of blocks is one class and a line of a table: here is one that gpuopt does not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.backends import backend_for
from gpuopt.codecs import Coded
from gpuopt.device import Device
from gpuopt.rules.slot_codes import BLOCK
from gpuopt.state import slot_codecs

pytestmark = pytest.mark.value

Array = np.ndarray[Any, Any]

_CPP = """\
#include "shared/slot_codes.cuh"
#ifndef GPUOPT_STEPS
#define GPUOPT_STEPS
namespace gpuopt {
struct StepsCode {
  static constexpr bool has_sign = true;

  GPUOPT_INLINE static void prepare() {}
  GPUOPT_INLINE static float decode(int code, float scale) {
    return static_cast<float>(code - 100) * 0.0625f * scale;
  }
  GPUOPT_INLINE static float to_store(float value) { return value; }
  GPUOPT_INLINE static int encode(float magnitude, bool is_below_0) {
    const int steps = static_cast<int>(magnitude * 16.0f);
    return (is_below_0 ? 100 - steps : 100 + steps) << code_shift;
  }
};
}
#endif"""


@dataclass(frozen=True)
class Steps(Coded):
    """Sixteenths of the largest magnitude, rounded towards 0; the code of 0 is 100."""

    name = "sixteenths"
    map = "steps"
    zero = 100
    cpp_code = "gpuopt::StepsCode"
    definitions = (_CPP,)

    def encode_blocks(self, values: Array) -> tuple[Array, Array]:
        scales = np.abs(values).max(axis=1)
        divisors = np.where(scales > 0, scales, np.float32(1))[:, np.newaxis]
        return (100 + np.trunc(values / divisors * np.float32(16))).astype(np.uint8), scales

    def decode_blocks(self, codes: Array, scales: Array) -> Array:
        steps = codes.astype(np.float32) - np.float32(100)
        return np.asarray(steps * np.float32(0.0625) * scales[:, np.newaxis])


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Adds the codec to the table; returns the options that ask for it."""
    form = slot_codecs.CodedForm(Steps(), Steps())
    monkeypatch.setitem(slot_codecs.CODED_FORMS, "steps", form)  # type: ignore[misc]
    return {"slot_bits": 8, "slot_form": "steps"}


def as_stored(slot: Array, by_rows: bool) -> Array:
    """Returns the numbers that are read again: block after block, from the definition."""
    rows = slot.reshape(len(slot), -1) if by_rows else slot.reshape(1, -1)
    read = np.zeros_like(rows)
    for row, numbers in zip(rows, read, strict=True):
        for first in range(0, len(row), BLOCK):
            block = row[first : first + BLOCK]
            scale = np.abs(block).max() or np.float32(1)
            whole = np.trunc(block / scale * np.float32(16))
            numbers[first : first + BLOCK] = whole * np.float32(0.0625) * scale
    return read.reshape(slot.shape)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_slots_are_stored_as_the_codec_says(
    steps: dict[str, Any], every_place: str, is_sparse: bool
) -> None:
    random, shape = np.random.default_rng(0), (5, 600)
    var = np.asarray(random.normal(size=shape), np.float32)
    slot = np.zeros(shape, np.float32)
    variable = Variable(var.copy(), name="w", device=every_place)
    optimizer = gpuopt.MomentumOptimizer(0.5, 0.75, **steps)
    xp = np if every_place == "cpu" else backend_for(Device.parse(every_place)).xp
    rows = np.array([3, 0]) if is_sparse else np.arange(5)
    for _ in range(3):
        values = np.asarray(random.normal(size=(len(rows), 600)), np.float32)
        gradient: Any = xp.asarray(values)
        if is_sparse:
            gradient = IndexedSlices(gradient, xp.asarray(rows), shape)
        optimizer.apply_gradients([(gradient, variable)])
        slot[rows] = slot[rows] * np.float32(0.75) + values
        var[rows] -= np.float32(0.5) * slot[rows]
        slot = as_stored(slot, is_sparse)
        np.testing.assert_array_equal(variable.numpy(), var)
        stored: Any = optimizer.get_slot(variable, "momentum")
        np.testing.assert_array_equal(stored.numpy(), slot)
    said = optimizer.state_dict({"w": variable})["hyperparameters"]
    assert said["slot_codings"] == {"momentum": "sixteenths"}
    assert said["slot_map"] == "steps"


def test_a_saved_state_is_decoded_and_encoded_by_the_codec(steps: dict[str, Any]) -> None:
    random, shape = np.random.default_rng(1), (3, 300)
    gradient = np.asarray(random.normal(size=shape), np.float32)
    stored = as_stored(gradient, by_rows=False)
    variable = Variable(np.zeros(shape, np.float32), name="w")
    coded = gpuopt.MomentumOptimizer(0.5, 0.75, **steps)
    coded.apply_gradients([(gradient, variable)])
    plain = gpuopt.MomentumOptimizer(0.5, 0.75)
    plain.load_state_dict(coded.state_dict({"w": variable}), {"w": variable})
    slot: Any = plain.get_slot(variable, "momentum")
    np.testing.assert_array_equal(slot.numpy(), stored)
    slot.assign(gradient)
    again = gpuopt.MomentumOptimizer(0.5, 0.75, **steps)
    again.load_state_dict(plain.state_dict({"w": variable}), {"w": variable})
    slot = again.get_slot(variable, "momentum")
    np.testing.assert_array_equal(slot.numpy(), stored)
