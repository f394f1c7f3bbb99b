"""Random bits that depend on a key and a number alone: SplitMix64 (Steele, Lea & Flood 2014).

Mirrored by kernels/shared/random_bits.cuh.
"""

from __future__ import annotations

from typing import Any

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mixed(bits: Any) -> Any:
    """Returns the generator's words for its states, an array of uint64."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
