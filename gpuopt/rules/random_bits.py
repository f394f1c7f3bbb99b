"""Random bits that depend on a key and a number alone: SplitMix64 (Steele, Lea & Flood 2014)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Scalars are floats, so a key of 64 bits is passed as several of 16 bits.
NUM_PARTS = 4
_BITS = 64 // NUM_PARTS


def mixed(bits: Any) -> Any:
    """Returns the generator's words for its states, an array of uint64."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def key_of_step(seed: int, step: int) -> list[np.float32]:
    """Returns the parts of a step's key, the lowest bits first; steps are counted from 0."""
    of_seed = mixed(np.array([seed], np.uint64) + GOLDEN)
    [key] = mixed(of_seed + np.array([step + 1], np.uint64) * GOLDEN).tolist()
    return [np.float32(key >> _BITS * place & 0xFFFF) for place in range(NUM_PARTS)]


def random_words(key: Sequence[Any], numbers: Any) -> Any:
    """Returns a word of uint64 for each number, which is an array of uint64; can be traced."""
    whole: Any = np.uint64(0)
    for place, part in enumerate(key):
        whole = whole | part.astype(np.uint64) << np.uint64(_BITS * place)
    return mixed(whole + (numbers + np.uint64(1)) * GOLDEN)
