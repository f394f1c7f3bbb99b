"""Prints the figures of docs/guides/adam_for_embeddings.md, "How close"; half an hour.

Usage: PYTHONPATH=tests/support python tests/support/late_figures.py [STEPS]
"""

from __future__ import annotations

import sys

import numpy as np
from late_tables import OFTEN, constant, cosine, distances, read_tables

CASES = [(rate, epsilon) for rate in (cosine, constant) for epsilon in (1e-8, 1e-5, 1e-3)]


def main(steps: int) -> None:
    for rate in (cosine, constant):
        *_, last = distances(rate, 1e-8, steps, seeds=20)
        print(f"20 tables of 120 rows, {rate.__name__}: {last}")
    for looks_up in (False, True):
        every = []
        for rate, epsilon in CASES:
            reads = list(read_tables(rate, epsilon, steps, looks_up=looks_up))
            every += reads
            report(f"2,000 rows, {rate.__name__}, epsilon {epsilon}", reads)
        report("all six" + " with lookups before each step" * looks_up, every)


def report(what: str, reads: list) -> None:
    columns = {name: np.array([getattr(read, name) for read in reads]) for name in reads[0]._fields}
    table, number = columns["table"], len(reads)
    print(f"{what}: table {table.min():.2f} to {table.max():.2f} of what it may be")
    for read in reads:
        if read.step in (3_000, 10_000):
            print(f"  {read.distance:.2e} after {read.step}, all rows {read.of_all_rows:.2e}")
    for name in ("lookup", "lookup_of_writes"):
        lookups = columns[name]
        print(f"  {name}: {np.sum(lookups > 1)} of {number} beyond, at most {lookups.max():.3f}")
    for name in ("beyond", "beyond_of_writes"):
        print(f"  single rows {name}: {100 * columns[name].mean():.2f} %")
    ours, of_all_rows = np.sqrt(columns["squares"].sum(axis=0))
    for often, ratio in zip(OFTEN, ours / of_all_rows, strict=True):
        print(f"  rows named {often}: {ratio:.3f} of the distance of all rows")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
