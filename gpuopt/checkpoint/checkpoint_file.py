"""Reads one checkpoint, which may be damaged or forged: nothing is used before it is checked."""

from __future__ import annotations

import errno
import io
import json
import math
import mmap
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from gpuopt.atomic_file import is_at
from gpuopt.checkpoint.file_format import (
    BUFFER_BYTES,
    DTYPES,
    FORMAT,
    FORMAT_VERSION,
    LATEST_TIME,
    checksum_of,
    header_checksum,
)
from gpuopt.errors import CheckpointError
from gpuopt.extras import import_for
from gpuopt.locks import importing

Array = np.ndarray[Any, Any]

_ALIGNMENT_BYTES = 64
_KEYS = {"dtype", "shape", "data_offsets"}
_LINUX = sys.platform == "linux"
_TYPES_BY_CODE = {
    code: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    for name, code in DTYPES.items()
}


class TensorForm(NamedTuple):
    """A tensor's shape and dtype, before it is read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class CheckpointFile:
    """An opened checkpoint whose header has been checked; made by `open_checkpoint`.

    Attributes:
        path: The file's path.
        forms: The tensors' shapes and dtypes by name.
        description: The description that the checkpoint was saved with.
        saved_at: When it was saved, in nanoseconds since 1970; each checkpoint of a folder has a
            later time than the one before.
        written_at: The file's time of writing in the file system, in the same unit.
        fingerprint: Text that no other checkpoint has.
    """

    def __init__(self, path: Path, file: BinaryIO, header: Any) -> None:
        self.path = path
        self._file = file
        self._known: dict[tuple[str, tuple[int, ...]], TensorForm] = {}
        metadata = header.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise CheckpointError(f"{path} is a safetensors file, but not gpuopt's checkpoint")
        # safetensors has checked the header, but a call of it for each tensor would take longer.
        begin, entries = self._read_entries()
        names = header.offset_keys()
        self._check_header(metadata, {name: entries[name] for name in names})
        self.forms = {name: self._form(name, entries[name]) for name in names}
        self._offsets, self._sizes = self._found_places(begin)
        self._checksums = self._read_checksums(metadata)
        self.description = json.loads(metadata["description"])
        self.saved_at = self._read_time(metadata)
        self.written_at = os.fstat(file.fileno()).st_mtime_ns
        self.fingerprint = f"{metadata['saved_at']}-{metadata['header_checksum']}"

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.forms)

    @staticmethod
    @contextmanager
    def opened(path: Path, file: BinaryIO) -> Iterator[CheckpointFile]:
        """Checks the header of an open, unbuffered file.

        Args:
            path: What the file is called in errors.
            file: The file.

        Raises:
            CheckpointError: the file is damaged, cut short, or something else than a checkpoint.
            OSError: the disk failed.
        """
        with checked_header(path, file) as header:
            try:
                checkpoint = CheckpointFile(path, file, header)
            except CheckpointError:
                raise
            except (KeyError, TypeError, ValueError, RecursionError) as error:
                raise CheckpointError(f"{path} is damaged: {error!r}") from error
            yield checkpoint

    def is_at(self, path: Path) -> bool:
        """Whether `path` is the name of this file now, and not of a newer one."""
        return is_at(self._file.fileno(), path)

    def read(self, names: Iterable[str]) -> dict[str, Array]:
        """Returns tensors in memory of their own.

        Raises:
            CheckpointError: their bytes are not those that were saved.
        """
        wanted = sorted(names, key=self._offsets.__getitem__)
        memory = _new_memory(sum(_padded(self._sizes[name]) for name in wanted))
        tensors = {}
        start = 0
        with self._buffered() as file:
            position = -1
            for name in wanted:
                offset, size = self._offsets[name], self._sizes[name]
                stored = memory[start : start + size]
                start += _padded(size)
                self._read_into(file, stored, offset if offset != position else None, name)
                position = offset + size
                self._compare(name, checksum_of(stored.data))
                shape, dtype = self.forms[name]
                try:
                    tensors[name] = stored.view(dtype).reshape(shape)
                except ValueError as error:  # numpy has no such shape
                    raise CheckpointError(f'{self.path}: "{name}": {error}') from error
        return tensors

    @contextmanager
    def _buffered(self) -> Iterator[Any]:
        buffered = io.BufferedReader(self._file, BUFFER_BYTES)  # type: ignore[type-var]
        try:
            yield buffered
        finally:
            buffered.detach()

    def _compare(self, name: str, checksum: str) -> None:
        if checksum != self._checksums[name]:
            raise CheckpointError(f'{self.path} is damaged: the checksum of "{name}" does not fit')

    def _read_into(self, file: Any, memory: Array, offset: int | None, name: str) -> None:
        """Reads bytes from a place in the file, or from where it is."""
        try:
            if offset is not None:
                file.seek(offset)
            done = file.readinto(memory.data) if memory.size else 0
        except OSError as error:
            raise CheckpointError(f'{self.path}: "{name}" cannot be read: {error}') from error
        if done < memory.size:
            raise CheckpointError(f'{self.path} is damaged: it ends within "{name}"')

    def _read_entries(self) -> tuple[int, dict[str, Any]]:
        """Returns where the header ends, and the dtype and the shape of each tensor."""
        known: dict[Any, tuple[str, tuple[int, ...]]] = {}

        # A dictionary and two lists for each tensor would set off Python's garbage collector again
        # and again: tensors of one form have one tuple.
        def compact(pairs: list[tuple[str, Any]]) -> Any:
            entry = dict(pairs)
            if entry.keys() != _KEYS or not isinstance(entry["dtype"], str):
                return entry
            form = entry["dtype"], tuple(entry["shape"])
            return known.setdefault(form, form)

        with self._buffered() as file:
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            return 8 + length, json.loads(file.read(length), object_pairs_hook=compact)

    def _form(self, name: str, entry: tuple[str, tuple[int, ...]]) -> TensorForm:
        code, shape = entry
        if code not in _TYPES_BY_CODE:
            raise CheckpointError(f'{self.path}: "{name}" has the unknown dtype {code}')
        return self._known.setdefault(entry, TensorForm(shape, _TYPES_BY_CODE[code]))

    def _found_places(self, begin: int) -> tuple[dict[str, int], dict[str, int]]:
        """Computes where each tensor is, in bytes: offsets and sizes, without gaps."""
        offsets, sizes = {}, {}
        for name, (shape, dtype) in self.forms.items():
            offsets[name] = begin
            sizes[name] = math.prod(shape) * dtype.itemsize
            begin += sizes[name]
        if begin != os.fstat(self._file.fileno()).st_size:
            raise CheckpointError(f"{self.path} is damaged: its tensors do not fill it")
        return offsets, sizes

    def _check_header(
        self, metadata: dict[str, str], entries: dict[str, tuple[str, tuple[int, ...]]]
    ) -> None:
        others = {key: text for key, text in metadata.items() if key != "header_checksum"}
        if metadata.get("header_checksum") != header_checksum(others, entries):
            raise CheckpointError(
                f"{self.path} is damaged: the checksum of its header does not fit"
            )
        if metadata["format_version"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{self.path} has format version {metadata['format_version']}, saved by gpuopt "
                f"{metadata.get('gpuopt_version')}; this version of gpuopt reads {FORMAT_VERSION}"
            )

    def _read_checksums(self, metadata: dict[str, str]) -> dict[str, str]:
        checksums = json.loads(metadata["checksums"])
        if not isinstance(checksums, dict) or checksums.keys() != self.forms.keys():
            raise CheckpointError(f"{self.path} is damaged: it lacks the checksum of a tensor")
        return checksums

    def _read_time(self, metadata: dict[str, str]) -> int:
        digits = metadata["saved_at"]
        if not re.fullmatch("[0-9]{1,19}", digits) or int(digits) > LATEST_TIME:
            raise CheckpointError(f"{self.path} is damaged: it was saved at no time")
        return int(digits)


@contextmanager
def open_checkpoint(path: Path) -> Iterator[CheckpointFile]:
    """Opens a checkpoint; nothing but its header is read, and no code in it is run.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged, cut short, or something else than a checkpoint.
    """

    # Opening a pipe would wait for its other end.
    def opener(name: str, flags: int) -> int:
        _refuse_special_file(path, os.stat(name).st_mode)
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    try:
        file = open(path, "rb", buffering=0, opener=opener)  # noqa: SIM115
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no checkpoint {path}") from None
    with file:
        _refuse_special_file(path, os.fstat(file.fileno()).st_mode)
        with CheckpointFile.opened(path, file) as checkpoint:
            yield checkpoint


def checked_header(path: Path, file: BinaryIO) -> Any:
    """Has safetensors check the header of an open file; returns its handle, a context manager.

    Args:
        path: What the file is called in errors.
        file: The file.

    Raises:
        CheckpointError: the file is damaged, cut short, or something else than a checkpoint.
        OSError: the disk failed.
    """
    # The open file, even if another process gives its name to a newer one just now.
    same = Path(f"/dev/fd/{file.fileno()}")
    readable = same if same.exists() else file.name
    safetensors = _safetensors()
    try:
        # Reads instead of mapped memory: an error of the disk is then an exception, no signal.
        return safetensors.safe_open(readable, framework="np", backend="pread")
    except OSError as error:
        raise OSError(errno.EIO, f"{path} cannot be read: {error}") from error
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or no checkpoint: {error}") from error


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@cache
def _safetensors() -> Any:
    with importing:  # once; see `file_format`
        return import_for("checkpoints", "safetensors", "checkpoints")


def _refuse_special_file(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is no checkpoint: it is a folder, a pipe or a device")


def _new_memory(size: int) -> Array:
    """Returns bytes in pages that are mapped already; mapping one by one would slow the read."""
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE} if _LINUX else {}
    return np.frombuffer(mmap.mmap(-1, max(size, 1), **flags), np.uint8)
