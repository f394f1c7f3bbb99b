"""Runs a command that can reach, and be reached from, this machine alone: in a network namespace.

    python loopback_only.py COMMAND...

Launchers of MPI listen on every network that they find.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

CLONE_NEWNET, CLONE_NEWUSER = 0x40000000, 0x10000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def leave_network() -> None:
    """Moves this process to a new network, of which only the loopback device is up.

    Raises:
        OSError: the system does not let it.
    """
    if sys.platform != "linux":
        raise OSError("only Linux has network namespaces")
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNET) != 0:
        # Not root: it is one in a namespace of its own.
        if libc.unshare(CLONE_NEWNET | CLONE_NEWUSER) != 0:
            raise OSError(ctypes.get_errno(), "this process may not make a network namespace")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        _, flags, _ = struct.unpack("16sH14s", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", flags | IFF_UP, b""))


if __name__ == "__main__":
    leave_network()
    os.execvp(sys.argv[1], sys.argv[1:])
