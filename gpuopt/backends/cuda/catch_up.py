"""Tables whose rows miss steps, in a GPU's memory: their counts of steps, and how rows catch up."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends.backend import INDEX_DTYPES
from gpuopt.backends.catch_up import CatchUp
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.dense_plan import DensePlan
from gpuopt.backends.cuda.launch_shapes import (
    NUM_POWERS,
    PACK_BYTES,
    POWER_BITS,
    ROW_THREADS,
    lanes_per_block,
    lanes_per_row,
    num_blocks,
)
from gpuopt.backends.cuda.launcher import Launcher, to_device
from gpuopt.backends.cuda.mixed import element_bytes, storage_of
from gpuopt.backends.cuda.parameters import name_of
from gpuopt.backends.cuda.structs import Arrays, LateTable
from gpuopt.backends.cuda.workspace import Workspace
from gpuopt.rules.random_bits import NUM_PARTS
from gpuopt.rules.rounded import rounded

Array = Any


class CountOfSteps:
    """The data by which kernels count steps, and bring up rows that have missed some.

    Attributes:
        rule: The rule of rows without a gradient.
        arrays: In device memory: whoever launches a kernel keeps them.
    """

    def __init__(self, launcher: Launcher, catch_up: CatchUp, real: type[Any]) -> None:
        """Uploads the data that is not in device memory yet; the rule computes in `real`."""
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
        """Returns the table for kernels that know its rows by their keys, from that of row 0 on."""
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


def bring_up(
    launcher: Launcher, workspace: Workspace, plan: DensePlan, catch_up: CatchUp, rows: Any
) -> None:
    """Does what `Backend.bring_up_rows` does, on the current stream.

    A row is moved by the first of the threads that find it behind. `rows` are from `readable`, or
    None.
    """
    num_rows = plan.height if rows is None else rows.size
    count: CountOfSteps = catch_up.on_device
    rule = count.rule if catch_up.rounding is None else rounded(count.rule)
    storage, codecs = storage_of(plan.codecs, plan.dtype), plan.codecs
    index = name_of(np.dtype(np.int64) if rows is None else rows.dtype)
    kernel = kernels.bring_up_rows(rule, count.rule, storage, index, codecs.coded)
    more = {}
    if codecs.per_block:
        lanes = lanes_per_block(plan.width, codecs.per_block)
    else:
        lanes = lanes_per_row(plan.width, PACK_BYTES // element_bytes(storage))
        more = {"lanes_per_row": lanes}
    blocks = num_blocks(num_rows * lanes, ROW_THREADS, launcher.num_multiprocessors)
    given = {
        "arrays": Arrays(plan.addresses),
        "rows": rows,
        "num_rows": num_rows,
        "height": plan.height,
        "row_width": plan.width,
        "late": count.table,
        **more,
    }
    launch = workspace.launch(kernel, blocks, ROW_THREADS, **given)
    if rows is not None:
        launch.forget("rows")


def readable(launcher: Launcher, rows: Any) -> Any:
    """Returns rows as a kernel reads them."""
    rows = rows if rows.dtype in INDEX_DTYPES else rows.astype(np.int64)
    return launcher.xp.ascontiguousarray(rows).reshape(-1)
