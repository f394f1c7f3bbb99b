"""Runs a command that can reach this machine alone, where the system lets it: a network namespace.

    python loopback_only.py COMMAND...

Elsewhere the command keeps its network; `mpi_job.py` tells launchers to use the loopback device.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys

CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def leave_network() -> bool:
    """Moves this process to a new network, of which only the loopback device is up."""
    if sys.platform != "linux" or ctypes.CDLL(None).unshare(CLONE_NEWNET) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        _, flags, _ = struct.unpack("16sH14s", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", flags | IFF_UP, b""))
    return True


if __name__ == "__main__":
    if not leave_network():
        print("loopback_only.py: this process keeps its network", file=sys.stderr)
    os.execvp(sys.argv[1], sys.argv[1:])
