"""Reads what GPGPU-Sim prints of each launch."""

from __future__ import annotations

import re
from typing import NamedTuple

from bench.simulated.replay import BEGIN, END

# What an access to memory moves.
_ACCESS_BYTES = 32


class Simulated(NamedTuple):
    """A launch, simulated.

    Attributes:
        kernel: Its name in C++, without namespaces.
        cycles: Of the multiprocessors.
        dram_bytes: Read and written by memory; what stays in L2 is not among them.
        activations: How many rows of memory were opened for that.
    """

    kernel: str
    cycles: int
    dram_bytes: int
    activations: int


def read_launches(log: str) -> list[Simulated]:
    """Returns each launch of a log, in order.

    Raises:
        ValueError: a launch has not ended, or lacks statistics.
    """
    found = []
    accesses = activations = 0
    for part in log.split(f"{BEGIN} ")[1:]:
        kernel, _, rest = part.partition("\n")
        report, end, _ = rest.partition(END)
        cycles = re.findall(r"(?m)^gpu_sim_cycle = (\d+)", report)
        if not end or not cycles:
            raise ValueError(f"{kernel} has not ended in the simulator:\n{rest[-2000:]}")
        # Those of memory are sums over all launches so far, one for each channel.
        accesses_so_far = _sum(report, "n_rd") + _sum(report, "n_write") + _sum(report, "n_wr_bk")
        activations_so_far = _sum(report, "n_act")
        found.append(
            Simulated(
                kernel.replace("gpuopt::", ""),
                int(cycles[-1]),
                (accesses_so_far - accesses) * _ACCESS_BYTES,
                activations_so_far - activations,
            )
        )
        accesses, activations = accesses_so_far, activations_so_far
    return found


def _sum(report: str, name: str) -> int:
    return sum(map(int, re.findall(rf"\b{name}=(\d+)", report)))
