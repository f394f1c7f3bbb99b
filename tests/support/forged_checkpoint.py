"""Checkpoints that somebody else has changed, with right checksums."""

from __future__ import annotations

import json
from pathlib import Path

from gpuopt.checkpoint import file_format


def forged(path: Path, **metadata: str) -> bytes:
    """Returns a checkpoint's content with other metadata and right checksums."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    changed = {**header.pop("__metadata__"), **metadata}
    del changed["header_checksum"]
    entries = {name: (tensor["dtype"], tensor["shape"]) for name, tensor in header.items()}
    changed["header_checksum"] = file_format.header_checksum(changed, entries)
    text = json.dumps({"__metadata__": changed, **header}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]
