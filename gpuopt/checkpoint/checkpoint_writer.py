"""Writes one checkpoint durably, and reads it back before it replaces an older one."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gpuopt.atomic_file import open_aside, sync_folder, write_all
from gpuopt.checkpoint.checkpoint_file import checked_header
from gpuopt.checkpoint.file_format import (
    BUFFER_BYTES,
    DTYPES,
    FORMAT,
    FORMAT_VERSION,
    METADATA,
    MOST_HEADER_BYTES,
    MOST_TENSORS,
    SMALL_BYTES,
    checksum_of,
    header_checksum,
    new_checksum,
)
from gpuopt.errors import CheckpointError
from gpuopt.version import __version__

Array = np.ndarray[Any, Any]

# A checksum that is not known yet; it takes the same room.
_NO_CHECKSUM = "0" * 16


def write_checkpoint(
    path: Path,
    tensors: Mapping[str, Array],
    description: Any,
    saved_at: int,
    on_progress: Callable[[], None] = lambda: None,
    on_ready: Callable[[str], None] = lambda fingerprint: None,
) -> str:
    """Writes a file that exists in full or not at all, also after a crash or a power cut.

    The bytes are written to a temporary file, synced to the disk, and read back: they must be the
    same, and safetensors must accept the header. Then the file is renamed to `path`. The bytes are
    copied before the checksum is computed, so that it fits the written bytes even if another thread
    writes to a tensor meanwhile.

    Args:
        path: The file's path; a file there is replaced atomically.
        tensors: Arrays in host memory by name.
        description: The later `CheckpointFile.description`; anything that JSON can hold.
        saved_at: Nanoseconds since 1970, more than any other checkpoint of the folder has.
        on_progress: Called again and again while the file is written.
        on_ready: Called with the file's fingerprint, just before it gets its name.

    Returns:
        The file's fingerprint; see `CheckpointFile`.

    Raises:
        ValueError: a tensor's type or name has no place in the format; nothing is written.
        OSError: something could not be written. A file that was at `path` is unchanged, unless the
            message says that the new file is there.
    """
    header = _Header(path, tensors, description, saved_at)
    beginning = header.placeholder()
    if len(beginning) > MOST_HEADER_BYTES:
        raise ValueError(
            f"checkpoint {path} would have a header of {len(beginning):,} bytes for its "
            f"{len(tensors):,} tensors, and {MOST_HEADER_BYTES:,} can be read; give shorter names, "
            "or save the variables by several Savers"
        )
    outcome = "earlier checkpoints are as they were"
    try:
        _refuse_special_file(path)
        # safetensors' own writer leaves a file of a random name behind when it is killed.
        with open_aside(path) as file:
            write_all(file, beginning)
            header.checksums, checksum = _write_tensors(file, header.tensors, on_progress)
            beginning = header.text()
            file.seek(0)
            write_all(file, beginning)
            os.fsync(file.fileno())
            _read_back(file, path, beginning, checksum, on_progress)
            on_ready(header.fingerprint)
            file.take_name(path)
            outcome = "it is there, but may not survive a power cut; earlier ones are kept"
        sync_folder(path.parent)
    except OSError as error:
        message = f"checkpoint {path} could not be saved: {error.strerror or error}; {outcome}"
        raise OSError(error.errno, message) from error
    return header.fingerprint


class _Header:
    """The beginning of a file that is about to be written.

    Attributes:
        tensors: The tensors as they are stored, in the order of the file.
        checksums: The checksums that are known so far.
        fingerprint: The fingerprint of a file with these checksums; see `CheckpointFile`.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, Array], description: Any, saved_at: int
    ) -> None:
        stored = {name: _as_stored(path, name, array) for name, array in tensors.items()}
        # The widest types first, so that all are aligned. A tuple for each tensor, here and below,
        # would set off Python's garbage collector again and again.
        order = sorted(sorted(stored), key=lambda name: -stored[name].itemsize)
        self.tensors = {name: stored[name] for name in order}
        self.checksums = dict.fromkeys(tensors, _NO_CHECKSUM)
        self.fingerprint = ""
        self._metadata = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "gpuopt_version": __version__,
            "saved_at": str(saved_at),
            "description": _as_json(path, description),
        }
        self._forms = {name: _form(each.dtype, each.shape) for name, each in self.tensors.items()}
        # As json.dumps writes it, in a fifth of the time.
        parts = []
        end = 0
        for name, array in self.tensors.items():
            code, shape = self._forms[name]
            start, end = end, end + array.nbytes
            parts.append(
                f', {encode_basestring_ascii(name)}: {{"dtype": "{code}", "shape": {list(shape)}, '
                f'"data_offsets": [{start}, {end}]}}'
            )
        self._entries = "".join(parts)

    def placeholder(self) -> bytes:
        """Returns text of the header's size, before checksums are known."""
        checksums = json.dumps(self.checksums)
        metadata = {**self._metadata, "checksums": checksums, "header_checksum": _NO_CHECKSUM}
        return self._text(metadata)

    def text(self) -> bytes:
        """Returns the header's length and the header."""
        metadata = {**self._metadata, "checksums": json.dumps(self.checksums)}
        checksum = metadata["header_checksum"] = header_checksum(metadata, self._forms)
        self.fingerprint = f"{metadata['saved_at']}-{checksum}"
        return self._text(metadata)

    def _text(self, metadata: Mapping[str, str]) -> bytes:
        text = f"{json.dumps({METADATA: metadata})[:-1]}{self._entries}}}".encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def _write_tensors(
    file: BinaryIO, tensors: Mapping[str, Array], on_progress: Callable[[], None]
) -> tuple[dict[str, str], str]:
    """Writes all tensors, one after the other.

    Returns their checksums, and one of all their bytes.
    """
    checksums = {}
    of_all = new_checksum()
    # No other thread writes to this memory.
    copy = np.empty(BUFFER_BYTES, np.uint8)
    buffered = io.BufferedWriter(file, BUFFER_BYTES)
    for number, (name, array) in enumerate(tensors.items()):
        if array.nbytes <= SMALL_BYTES:
            content = array.tobytes()
            checksums[name] = checksum_of(content)
            of_all.update(content)
            buffered.write(content)
        else:
            checksum = new_checksum()
            whole = array.reshape(-1).view(np.uint8)
            for start in range(0, whole.size, BUFFER_BYTES):
                part = copy[: min(BUFFER_BYTES, whole.size - start)]
                part[...] = whole[start : start + BUFFER_BYTES]
                checksum.update(part.data)
                of_all.update(part.data)
                buffered.write(part.data)
                on_progress()
            checksums[name] = checksum.hexdigest()
        if number % MOST_TENSORS == 0:
            on_progress()
    buffered.flush()
    buffered.detach()
    return checksums, of_all.hexdigest()


def _read_back(
    file: Any, path: Path, beginning: bytes, checksum: str, on_progress: Callable[[], None]
) -> None:
    """Raises OSError unless a file has this beginning, and then bytes of this checksum."""
    try:
        with checked_header(path, file):
            pass
    except CheckpointError as error:
        raise OSError(errno.EIO, f"what was written is read back otherwise: {error}") from error
    file.seek(0)
    buffered = io.BufferedReader(file, BUFFER_BYTES)
    is_same = buffered.read(len(beginning)) == beginning
    found = new_checksum()
    memory = np.empty(BUFFER_BYTES, np.uint8)
    while size := buffered.readinto(memory.data):
        found.update(memory[:size].data)
        on_progress()
    buffered.detach()
    if not is_same or found.hexdigest() != checksum:
        raise OSError(errno.EIO, "what was written is read back otherwise")


def _refuse_special_file(path: Path) -> None:
    """Raises OSError for a pipe or a device at `path`, which the save would remove."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        raise OSError(errno.EEXIST, "something that is no file has its name")


def _as_stored(path: Path, name: str, array: Array) -> Array:
    """Returns the array, or a copy in the format's order of bytes and elements if that differs."""
    if _code_of(array.dtype) is None:
        raise ValueError(
            f'"{name}" has dtype {array.dtype}, which a checkpoint cannot hold; it holds '
            f"{', '.join(DTYPES)}"
        )
    if not name.isascii():
        _check_text(path, name)
    if name == METADATA:
        raise ValueError(f"checkpoint {path} cannot hold a variable named {name!r}: rename it")
    return np.asarray(array, dtype=_little_endian(array.dtype), order="C")


@lru_cache(maxsize=1024)
def _form(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Returns the format's name of a dtype that it has, and a shape: one tuple for all tensors."""
    return DTYPES[dtype.name], shape


@cache
def _code_of(dtype: np.dtype[Any]) -> str | None:
    """Returns the format's name of a dtype, if it has one; numpy writes its own anew each time."""
    return DTYPES.get(dtype.name)


@cache
def _little_endian(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")


def _as_json(path: Path, description: Any) -> str:
    _check_text(path, json.dumps(description, ensure_ascii=False))
    return json.dumps(description)


def _check_text(path: Path, text: str) -> None:
    """Refuses text with half a surrogate pair: JSON would write text that readers refuse."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text if len(text) < 100 else text[max(0, error.start - 20) : error.end + 20]
        raise ValueError(
            f"checkpoint {path} cannot hold the name {shown!r}: it is no valid Unicode; rename it"
        ) from error
