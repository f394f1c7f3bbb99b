"""A table's count of steps, in device memory, because the host does not know refused steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends.catch_up import CatchUp
from gpuopt.backends.cuda.launch_shapes import NUM_POWERS, POWER_BITS
from gpuopt.backends.cuda.launcher import Launcher, to_device
from gpuopt.backends.cuda.structs import LateTable
from gpuopt.rules.random_bits import NUM_PARTS

Array = Any


class CountOfSteps:
    """The data by which kernels count steps, and bring up rows that have missed some.

    Attributes:
        rule: The rule of rows without a gradient.
        arrays: In device memory: whoever launches a kernel keeps them.
    """

    def __init__(self, launcher: Launcher, catch_up: CatchUp, real: type[Any]) -> None:
        """Uploads the data that is not in device memory yet.

        Args:
            launcher: The device's.
            catch_up: The table's, with its arrays in device memory.
            real: The type that the rule computes in.
        """
        factors, rule, unnamed = catch_up.factors, catch_up.rule, catch_up.rule.unnamed
        assert unnamed is not None, "an optimizer without it refuses the option"
        self.rule = rule
        epsilon, weights, one_earlier = real(0), None, None
        if unnamed.movement is not None:
            epsilon = factors.scalars[unnamed.movement.epsilon]
        if factors.weights is not None:
            weights = to_device(launcher, factors.weights)
        if factors.one_earlier is not None:
            one_earlier = to_device(launcher, np.array(factors.one_earlier))
        scalars = [factors.scalars[name] for name in rule.scalars]
        # The key of random bits is the last step's.
        numbers = [*[0] * NUM_PARTS, factors.tolerance, epsilon, *scalars]
        self._now = launcher.xp.zeros(1, dtype=np.int64)
        by_name = {
            "last": catch_up.last,
            "now": self._now,
            "steps": catch_up.steps,
            "sums": catch_up.sums,
            "weights": weights,
            "powers": to_device(launcher, _powers(factors.decays)),
            "numbers": to_device(launcher, np.array(numbers, real)),
            "one_earlier": one_earlier,
        }
        self.arrays: list[Array] = [each for each in by_name.values() if each is not None]
        addresses = {
            name: 0 if array is None else launcher.address(array) for name, array in by_name.items()
        }
        self.table = LateTable(**addresses, window=factors.window)

    def table_from(self, first_key: int) -> LateTable:
        """Returns the table for kernels that know its rows by their keys.

        Args:
            first_key: Of its row 0.
        """
        if not first_key:
            return self.table
        return self.table._replace(last=self.table.last - first_key * np.dtype(np.int32).itemsize)


def _powers(decays: tuple[float, ...]) -> np.ndarray[Any, Any]:
    """Returns what `power_of` in kernels/shared/late_rows.cuh reads, [num_slots, NUM_POWERS]."""
    digits = np.arange(1 << POWER_BITS, dtype=np.float64)
    exponents = [digits * 2.0**shift for shift in range(0, 4 * POWER_BITS, POWER_BITS)]
    with np.errstate(all="ignore"):
        powers = [np.power(decay, np.concatenate(exponents)) for decay in decays]
    return np.array(powers, np.float64).reshape(len(decays), NUM_POWERS)
