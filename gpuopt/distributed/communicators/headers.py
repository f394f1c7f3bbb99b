"""The first message of each call: the call's name, and the sizes of the blocks that follow."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# What goes with a header in one message; longer blocks follow it in messages of their own. Longer
# messages than 4 KB need a handshake in Open MPI on one host, and cost the same as two.
INLINE_BYTES = 4000

_HEADER = struct.Struct("<BQQ16sQ")


class Kind(IntEnum):
    """What a header says: a call, the rank's end as failed or finished, or a message."""

    CALL, FAILED, FINISHED, MESSAGE = range(4)


class Parcel(NamedTuple):
    """What one rank sends to another in one exchange.

    Attributes:
        inline: At most INLINE_BYTES.
        blocks: Contiguous memory of any size, which must not change before the exchange is over.
    """

    inline: bytes = b""
    blocks: Sequence[Bytes] = ()


class Announced(NamedTuple):
    """What one rank will send to another in one call.

    Attributes:
        sizes: The number of bytes of each block, in the order in which they will be sent.
        inline: As in `Parcel`.
    """

    sizes: tuple[int, ...] = ()
    inline: bytes = b""


class Header(NamedTuple):
    """The first message of a rank in each exchange, or its last one in a run, or one to one rank.

    Attributes:
        kind: What has happened; a `Kind`.
        run: The number of the group's run.
        number: The number of the exchange in the run.
        digest: Of the call's description; of a failure by `sys.exit`, its status, and else 0.
        sizes: Of the blocks that follow.
        inline: The parcel's, or the text of a failure.
    """

    kind: int
    run: int
    number: int
    digest: bytes
    sizes: tuple[int, ...]
    inline: bytes

    def pack(self) -> bytes:
        fixed = _HEADER.pack(self.kind, self.run, self.number, self.digest, len(self.sizes))
        return fixed + struct.pack(f"<{len(self.sizes)}Q", *self.sizes) + self.inline

    @classmethod
    def unpack(cls, message: bytes) -> Header:
        kind, run, number, digest, num_blocks = _HEADER.unpack_from(message)
        sizes = struct.unpack_from(f"<{num_blocks}Q", message, _HEADER.size)
        return cls(kind, run, number, digest, sizes, message[_HEADER.size + 8 * num_blocks :])


@lru_cache(maxsize=256)
def digest_of(description: str) -> bytes:
    """Returns the digest of a call's description, by which ranks compare their calls."""
    return hashlib.blake2b(description.encode(), digest_size=16).digest()
