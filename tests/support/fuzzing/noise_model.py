"""Gradient noise in plain Python and numpy, with a generator of its own and nothing of gpuopt."""

from __future__ import annotations

import hashlib

import numpy as np

SEED, ETA, GAMMA = 2**40 + 5, 2.0**-8, 0.55
_WORD = 2**64 - 1


def noise(step: int, shape: tuple[int, ...], name: str = "Variable") -> np.ndarray:
    """Returns what some step adds to the gradient of the first variable of a name."""
    deviation = np.sqrt(ETA / (1 + step) ** GAMMA)
    return deviation * normal(step, int(np.prod(shape)), name).reshape(shape)


def normal(step: int, size: int, name: str) -> np.ndarray:
    """Returns the normal numbers of the elements of a variable in some step."""
    first = int.from_bytes(hashlib.sha256(f"{name}:0".encode()).digest()[:8], "big") // 4
    golden = 0x9E3779B97F4A7C15
    key = mixed(mixed(SEED + golden & _WORD) + (step + 1) * golden & _WORD)
    words = [mixed(key + (number + 1) * golden & _WORD) for number in range(first, first + size)]
    one = np.array([(word >> 40) + 1 for word in words]) / 2**24
    other = np.array([word >> 16 & 0xFFFFFF for word in words]) / 2**24
    return np.sqrt(-2 * np.log(one)) * np.cos(2 * np.pi * other)


def mixed(bits: int) -> int:
    """Returns SplitMix64's word for a state."""
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _WORD
    return bits ^ bits >> 31
