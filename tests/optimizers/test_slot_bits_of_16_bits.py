"""Slots in 8 bits beside 16-bit variables with master copies, or that are rounded at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dtypes import DTYPES_BY_NAME

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.backends import backend_for
from gpuopt.device import Device
from gpuopt.rules.rounded import key_of_step, round_at_random
from gpuopt.rules.slot_codes import BLOCK, Coding

pytestmark = pytest.mark.value

Array = np.ndarray[Any, Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SEED, RATE, DECAY = 5, np.float32(0.5), np.float32(0.75)
# A variable's type and the options, by what a case is called.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "float16, masters": ("float16", {"masters": "float32"}),
    "bfloat16, masters": ("bfloat16", {"masters": "float32"}),
    "remainders": ("bfloat16", {"masters": "remainder"}),
    "rounding": ("bfloat16", {"stochastic_rounding": SEED}),
}


class Naive:
    """Momentum in numpy: the weights in float32, and a slot that is the nearest codes' numbers.

    Attributes:
        weights: What a step computes with.
        variable: What is stored of them.
        slot: The numbers that are stored.
    """

    def __init__(self, start: Array, options: dict[str, Any]) -> None:
        self._options, self._count = options, 0
        self.variable, self.weights = start, start.astype(np.float32)
        self.slot = np.zeros(start.shape, np.float32)

    def step(self, gradient: Array, rows: Array, *, by_rows: bool) -> None:
        self.slot[rows] = self.slot[rows] * DECAY + gradient.astype(np.float32)
        self.weights[rows] -= RATE * self.slot[rows]
        self._store(rows)
        self._encode(rows if by_rows else None)
        self._count += 1

    def _store(self, rows: Array) -> None:
        if self._options.get("masters") == "remainder":
            bits = self.weights.view(np.uint32) + np.uint32(0x8000)
            self.variable = (bits >> 16).astype(np.uint16).view(BFLOAT16)
        elif "masters" in self._options:
            self.variable = self.weights.astype(self.variable.dtype)
        else:
            numbers = np.arange(self.weights.size, dtype=np.uint64)
            arrays = [self.weights.reshape(-1), None]
            [rounded, _] = round_at_random(arrays, numbers, key_of_step(SEED, self._count))
            self.variable[rows] = rounded.reshape(self.variable.shape)[rows]
            self.weights = self.variable.astype(np.float32)

    def _encode(self, rows: Array | None) -> None:
        blocks = self.slot.reshape(1, -1) if rows is None else self.slot[rows]
        for row in blocks:
            for first in range(0, len(row), BLOCK):
                block = row[first : first + BLOCK]
                scale = np.abs(block).max() or np.float32(1)
                nearest = np.searchsorted(Coding.SIGNED.bounds, np.abs(block) / scale)
                last = len(Coding.SIGNED.magnitudes) - 1
                nearest = np.where(block < 0, np.minimum(nearest, last - 1), nearest)  # no -1
                block[:] = np.copysign(Coding.SIGNED.magnitudes[nearest], block) * scale
        if rows is not None:
            self.slot[rows] = blocks


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_steps_and_restored_ones_are_those_of_numpy(
    case: str, is_sparse: bool, every_place: str, tmp_path: Path
) -> None:
    name, options = CASES[case]
    dtype, random, shape = DTYPES_BY_NAME[name], np.random.default_rng(0), (5, 600)
    xp = np if every_place == "cpu" else backend_for(Device.parse(every_place)).xp
    starts = [np.asarray(random.normal(size=shape)).astype(dtype) for _ in range(2)]
    naive = [Naive(start.copy(), options) for start in starts]

    def begin() -> tuple[Any, list[Variable]]:
        variables = [Variable(start.copy(), device=every_place) for start in starts]
        return gpuopt.MomentumOptimizer(0.5, 0.75, slot_bits=8, **options), variables

    optimizer, variables = begin()
    rows = np.array([3, 0]) if is_sparse else np.arange(5)
    for number in range(4):
        if number == 2:
            path = gpuopt.Saver(
                dict(zip("ab", variables, strict=True)), optimizers=[optimizer]
            ).save(str(tmp_path / "saved"))
            optimizer, variables = begin()
            gpuopt.Saver(dict(zip("ab", variables, strict=True)), optimizers=[optimizer]).restore(
                path
            )
        pairs: list[Any] = []
        for each, variable in zip(naive, variables, strict=True):
            values = np.asarray(random.normal(size=(len(rows), 600))).astype(dtype)
            each.step(values, rows, by_rows=is_sparse)
            gradient: Any = xp.asarray(values)
            if is_sparse:
                gradient = IndexedSlices(gradient, xp.asarray(rows), shape)
            pairs.append((gradient, variable))
        optimizer.apply_gradients(pairs)
        for each, variable in zip(naive, variables, strict=True):
            np.testing.assert_array_equal(variable.numpy(), each.variable)
            stored: Any = optimizer.get_slot(variable, "momentum")
            np.testing.assert_array_equal(stored.numpy(), each.slot)
            if "masters" in options:
                master: Any = optimizer.get_slot(variable, "master")
                np.testing.assert_array_equal(master.numpy(), each.weights)
