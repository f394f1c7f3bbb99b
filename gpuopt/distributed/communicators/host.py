"""The host of a rank, and the other ranks on it."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gpuopt.backends.cpu.cores import cores
from gpuopt.distributed.communicator import Communicator

# Linux writes another one at each start (proc(5)).
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Host(NamedTuple):
    """A host: those of a cluster may all have one name, and containers of a host have several.

    Attributes:
        name: The host's name.
        boot: The id of its last start; empty where it has none.
    """

    name: str
    boot: str


def this_host() -> Host:
    """Returns the host of this process."""
    boot = ""
    with suppress(OSError):
        boot = _BOOT_ID.read_text().strip()
    return Host(socket.gethostname(), boot)


def find_neighbours(communicator: Communicator, what: str) -> tuple[int, bool]:
    """Finds the ranks of this host, which are processes; rank 0 prints the process of each rank.

    Returns:
        This rank's place among those of its host, and whether there is a core for each of them.
    """
    ranks = communicator.all_gather((os.getpid(), this_host(), cores()), what)
    rank = communicator.rank
    hosts = [host for _, host, _ in ranks]
    cores_here = [of_rank for _, host, of_rank in ranks if host == hosts[rank]]
    if rank == 0 and communicator.size > 1:
        lines = [
            f"gpuopt: rank {each} is process {process} on {host.name}\n"
            for each, (process, host, _) in enumerate(ranks)
        ]
        sys.stderr.write("".join(lines))
        sys.stderr.flush()
    has_core = len(frozenset().union(*cores_here)) >= len(cores_here)
    return hosts[:rank].count(hosts[rank]), has_core
