"""Rows that are appended to a table with Adam's slots, compared with copies of the arrays."""

from __future__ import annotations

import numpy as np

import gpuopt
from bench.harness import Workload
from bench.targets import Target

_HEIGHT, _WIDTH, _MORE = 1_000_000, 64, 1_000

TARGETS = (Target("append_rows", "ratio", "copies of the arrays", at_most=1.3),)


def append_rows() -> Workload:
    optimizer = gpuopt.AdamOptimizer(0.001)
    table = gpuopt.Variable(np.zeros((_HEIGHT, _WIDTH), np.float32), name="table")
    optimizer.apply_gradients([(np.ones((_HEIGHT, _WIDTH), np.float32), table)])
    rows = gpuopt.rows(table)
    values = np.ones((_MORE, _WIDTH), np.float32)
    copies = [variable.numpy() for variable in (table, *optimizer.state.slots_of(table))]

    def copy_arrays() -> None:
        # As rows do: the old arrays go when all new ones are there.
        copies[:] = [array.copy() for array in copies]

    def remove_again() -> None:
        # After each step all the same, so that both find memory that was freed in the same way.
        rows.keep(np.arange(_HEIGHT))
        copy_arrays()

    return Workload(
        name="append_rows",
        description=f"{_MORE:,} rows appended to {_HEIGHT:,} x {_WIDTH} with Adam's slots",
        bytes_moved=2 * 3 * 4 * _HEIGHT * _WIDTH,
        contenders={
            "gpuopt": lambda: rows.append(values),
            "copies of the arrays": copy_arrays,
        },
        settle=remove_again,
    )
