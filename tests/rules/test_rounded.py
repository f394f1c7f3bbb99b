"""Stochastic rounding to bfloat16: its random bits, its mean, and where nothing is at random."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpuopt.rules.rounded import BFLOAT16, ROUNDING, key_of_step, round_at_random

pytestmark = pytest.mark.value

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15


def next_word(state: int) -> int:
    """SplitMix64 as its authors publish it, in Python's integers."""
    z = (state + GOLDEN) % WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB % WORD
    return z ^ z >> 31


def rounded(values: Any, seed: int = 1, step: int = 0) -> np.ndarray[Any, Any]:
    flat = np.asarray(values, np.float32)
    numbers = np.arange(flat.size, dtype=np.uint64)
    [result] = round_at_random([flat], numbers, key_of_step(seed, step))
    return result.astype(np.float64)


def test_the_bits_are_those_of_the_published_generator() -> None:
    seed, step, size = 2**63 - 1, 10**12, 50
    key = next_word((next_word(seed) + step * GOLDEN) % WORD)
    scalars = key_of_step(seed, step)
    assert tuple(scalars) == ROUNDING.scalars
    values = [float(each) for each in scalars.values()]
    assert sum(int(each) << 16 * place for place, each in enumerate(values)) == key
    arrays = [np.random.default_rng(k).normal(size=size).astype(np.float32) for k in range(5)]
    numbers = np.arange(7, 7 + size, dtype=np.uint64) * np.uint64(10**15)
    got = round_at_random(arrays, numbers, scalars)
    for k, (array, mine) in enumerate(zip(arrays, got, strict=True)):
        for value, number, result in zip(array.view(np.uint32), numbers, mine, strict=True):
            word = next_word((key + (int(number) * 2 + k // 4) * GOLDEN) % WORD)
            random = word >> 16 * (k % 4) & 0xFFFF
            assert result.view(np.uint16) == int(value) + random >> 16


@pytest.mark.parametrize("fraction", [1 / 65536, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_mean_is_the_number_itself(fraction: float, sign: int) -> None:
    size, ulp = 400_000, 2.0**-7
    value = np.float32(sign * (1 + np.float32(round(fraction * 65536)) * 2.0**-23))
    probability = (abs(float(value)) - 1) / ulp
    ups = [
        (np.abs(rounded(np.full(size, value), seed=3, step=step)) == 1 + ulp).sum()
        for step in range(3)
    ]
    # Five standard deviations of a binomial distribution.
    most = 5 * np.sqrt(size * probability * (1 - probability))
    assert all(abs(up - size * probability) <= most for up in ups), (ups, size * probability)


def test_neighbours_steps_seeds_and_slots_do_not_go_together() -> None:
    size = 200_000
    half = np.full(size, 1 + 2.0**-8, np.float32)

    def ups(seed: int, step: int) -> Any:
        numbers = np.arange(size, dtype=np.uint64)
        arrays = round_at_random([half] * 5, numbers, key_of_step(seed, step))
        return [2.0 * (array.astype(np.float64) > 1) - 1 for array in arrays]

    first, others = ups(3, 0), [*ups(3, 1), *ups(4, 0)]
    pairs = [(first[0], each) for each in (*first[1:], *others)]
    pairs += [(first[0][:-lag], first[0][lag:]) for lag in (1, 2, 8, 1024)]
    for a, b in pairs:
        assert abs(np.mean(a * b)) <= 5 / np.sqrt(a.size)


def test_what_is_a_bfloat16_stays() -> None:
    every = np.arange(65536, dtype=np.uint16).view(BFLOAT16).astype(np.float32)
    every = every[~np.isnan(every)]
    for step in range(3):
        np.testing.assert_array_equal(rounded(every, step=step), every.astype(np.float64))


def test_only_neighbours_come_out_and_zero_keeps_its_sign() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 100_000).astype(np.uint32)
    bits = bits[bits & 0x7FFFFFFF <= 0x7F800000]
    got = rounded(bits.view(np.float32))
    lower = bits & 0xFFFF0000
    upper = np.where(lower & 0x7FFFFFFF < 0x7F800000, lower + np.uint32(0x10000), lower)
    lower, upper = (each.view(np.float32).astype(np.float64) for each in (lower, upper))
    assert ((got == lower) | (got == upper)).all()
    assert np.signbit(rounded([-0.0, -1e-45])).all()


def test_every_nan_stays_nan() -> None:
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF] * 9, np.uint32)
    assert np.isnan(rounded(nans.view(np.float32))).all()


def test_beyond_the_last_finite_number_rounding_is_to_nearest() -> None:
    bits = np.array([0x7F7F0001, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000] * 50, np.uint32)
    for sign in (np.uint32(0), np.uint32(0x80000000)):
        values = (bits | sign).view(np.float32)
        expected = values.astype(BFLOAT16).astype(np.float64)
        for step in range(3):
            np.testing.assert_array_equal(rounded(values, step=step), expected)
