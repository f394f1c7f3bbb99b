"""Which host a rank is on."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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
