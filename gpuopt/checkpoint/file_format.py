"""The checkpoint's format: a safetensors file whose metadata holds checksums and a description."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from json.encoder import encode_basestring_ascii
from typing import Any

import numpy as np

from gpuopt.extras import import_for
from gpuopt.locks import importing

Array = np.ndarray[Any, Any]

SUFFIX = ".safetensors"
FORMAT = "gpuopt checkpoint"
FORMAT_VERSION = "1"
# The types of numpy and ml_dtypes that the safetensors format can hold, by the format's names.
DTYPES = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
# The key of the header that is no tensor's name.
METADATA = "__metadata__"
# The safetensors library reads no longer headers.
MOST_HEADER_BYTES = 100_000_000
# In nanoseconds since 1970: what 64 bits hold.
LATEST_TIME = 2**63 - 1
# Bytes are copied, checksummed and written or read through a buffer that stays in the cache.
BUFFER_BYTES = 1 << 20
# A tensor of fewer bytes is written or read by one call.
SMALL_BYTES = 1 << 16
# The most tensors between two reports of progress.
MOST_TENSORS = 1024


def header_checksum(
    metadata: Mapping[str, str], entries: Mapping[str, tuple[str, Sequence[int]]]
) -> str:
    """Returns the checksum of all in a header but itself; entries are dtypes and shapes."""
    # As json.dumps writes it, in a fifth of the time.
    listed = []
    for name in sorted(entries):
        code, shape = entries[name]
        listed.append(f'[{encode_basestring_ascii(name)}, "{code}", {list(shape)}]')
    canonical = f"[{json.dumps(sorted(metadata.items()))}, [{', '.join(listed)}]]"
    return checksum_of(canonical.encode())


def checksum_of(content: bytes | memoryview) -> str:
    """Returns the checksum of one piece, as `new_checksum().hexdigest()` would be."""
    return str(_xxhash().xxh3_64_hexdigest(content))


def new_checksum() -> Any:
    """Returns a hash object for a tensor's bytes, with `update`, and `hexdigest` of 16 digits.

    The hash is to find damage, not forgeries, and to be faster than the disk.
    """
    return _xxhash().xxh3_64()


@cache
def _xxhash() -> Any:
    # Imported once, so that a signal handler may wait for the save of another thread: it could not
    # if it had stopped its own thread in the middle of an import.
    with importing:
        return import_for("checkpoints", "xxhash", "checkpoints")
