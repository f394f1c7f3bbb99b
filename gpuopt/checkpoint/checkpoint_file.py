"""One checkpoint is one safetensors file: written so that it survives, and read with suspicion."""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from gpuopt.errors import CheckpointError

Array = np.ndarray[Any, Any]

SUFFIX = ".safetensors"
_FORMAT = "gpuopt checkpoint"
_FORMAT_VERSION = "1"
# What the safetensors format can hold of numpy's and ml_dtypes' types, by the format's names.
_DTYPES = {
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

_ALIGNMENT_BYTES = 64
_LINUX = sys.platform == "linux"

_logger = logging.getLogger("gpuopt")


class _Place(NamedTuple):
    """Where in the file a tensor is, in bytes, and what."""

    offset: int
    size: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def padded_size(self) -> int:
        return -(-self.size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def write_checkpoint(
    path: Path, tensors: Mapping[str, Array], description: Any, saved_at: int
) -> None:
    """Writes a file that is there in full or not at all, also after a crash or a power cut.

    The bytes go to a file aside and to the disk before the name is given to them.

    Args:
        path: Where; a file there is replaced at once.
        tensors: Arrays in host memory by name.
        description: What `CheckpointFile.description` returns later; anything that JSON holds.
        saved_at: Nanoseconds since 1970, more than any other checkpoint of the folder has.

    Raises:
        ValueError: a tensor's type has no place in the format; nothing is written.
        OSError: something could not be written. What was at `path` is as it was, unless the
            message says that the new file is there.
    """
    stored = {name: _as_stored(name, array) for name, array in tensors.items()}
    # The widest types first, so that all are aligned.
    order = sorted(stored, key=lambda name: (-stored[name].itemsize, name))
    header = _header(order, stored, _metadata(stored, description, saved_at))
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    outcome = "earlier checkpoints are as they were"
    try:
        # safetensors' own writer leaves a file of a random name behind when it is killed.
        with aside.open("wb") as file:
            file.write(header)
            for name in order:
                file.write(_bytes_of(stored[name]))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        outcome = "it is there, but may not survive a power cut; earlier ones are kept"
        _fsync(path.parent)
    except BaseException as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            message = f"checkpoint {path} could not be saved: {error.strerror or error}; {outcome}"
            raise OSError(error.errno, message) from error
        raise


def remove_abandoned(prefix: Path) -> None:
    """Removes what saves under a prefix left aside when their process was killed."""
    partial = re.compile(rf"\.{re.escape(prefix.name)}(-\d+)?{re.escape(SUFFIX)}\.\d+\.partial")
    for path in prefix.parent.iterdir():
        if partial.fullmatch(path.name):
            with suppress(OSError):
                path.unlink()


def checkpoint_files(folder: Path) -> dict[Path, int]:
    """Finds the folder's checkpoints and when they were saved, the newest last.

    Files that are no checkpoints, or are cut short, are logged and left out.
    """
    saved_at: dict[Path, int] = {}
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            with open_checkpoint(path) as checkpoint:
                saved_at[path] = checkpoint.saved_at
        except FileNotFoundError:
            continue  # removed meanwhile
        except (OSError, CheckpointError) as error:
            _logger.warning("not counted as a checkpoint: %s", error)
    return dict(sorted(saved_at.items(), key=lambda item: item[1]))


class CheckpointFile:
    """An opened checkpoint whose header has been checked; made by `open_checkpoint`.

    Attributes:
        path: Where it is.
        names: Its tensors'.
        description: What it was saved with.
        saved_at: When, in nanoseconds; grows with each checkpoint of a folder.
    """

    def __init__(self, path: Path, file: BinaryIO, header: Any) -> None:
        self.path = path
        self._file = file
        metadata = header.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise CheckpointError(f"{path} is a safetensors file, but not gpuopt's checkpoint")
        self.names = frozenset(header.keys())
        self._checksums = self._checked_header(header, metadata)
        self._places = self._found_places(header)
        self.description = json.loads(metadata["description"])
        self.saved_at = int(metadata["saved_at"])

    def read(self, names: Iterable[str]) -> dict[str, Array]:
        """Returns tensors in memory of their own.

        Raises:
            CheckpointError: their bytes are not those that were saved.
        """
        wanted = [(name, self._places[name]) for name in names]
        memory = _new_memory(sum(place.padded_size for _, place in wanted))
        tensors = {}
        start = 0
        for name, place in wanted:
            stored = memory[start : start + place.size]
            start += place.padded_size
            self._read_into(stored, place.offset, name)
            if _checksum(stored) != self._checksums[name]:
                raise CheckpointError(
                    f'{self.path} is damaged: the checksum of "{name}" does not fit'
                )
            tensors[name] = stored.view(place.dtype).reshape(place.shape)
        return tensors

    def _read_into(self, memory: Array, offset: int, name: str) -> None:
        self._file.seek(offset)
        done = 0
        while done < memory.size:
            try:
                count = self._file.readinto(memory[done:].data)  # type: ignore[attr-defined]
            except OSError as error:
                raise CheckpointError(f'{self.path}: "{name}" cannot be read: {error}') from error
            if not count:
                raise CheckpointError(f'{self.path} is damaged: it ends within "{name}"')
            done += count

    def _found_places(self, header: Any) -> dict[str, _Place]:
        """Adds up where each tensor begins: the format leaves no gaps, and safetensors checks."""
        self._file.seek(0)
        offset = 8 + int.from_bytes(self._file.read(8), "little")
        types = {code: name for name, code in _DTYPES.items()}
        places = {}
        for name in header.offset_keys():
            tensor = header.get_slice(name)
            code, shape = tensor.get_dtype(), tuple(tensor.get_shape())
            if code not in types:
                raise CheckpointError(f'{self.path}: "{name}" has the unknown dtype {code}')
            dtype = np.dtype(ml_dtypes.bfloat16 if code == "BF16" else types[code])
            places[name] = _Place(offset, math.prod(shape) * dtype.itemsize, dtype, shape)
            offset += places[name].size
        return places

    def _checked_header(self, header: Any, metadata: dict[str, str]) -> dict[str, str]:
        entries = []
        for name in self.names:
            tensor = header.get_slice(name)
            entries.append([name, tensor.get_dtype(), tensor.get_shape()])
        claimed = metadata.pop("header_checksum", None)
        if claimed != _header_checksum(metadata, entries):
            raise CheckpointError(
                f"{self.path} is damaged: the checksum of its header does not fit"
            )
        if metadata["format_version"] != _FORMAT_VERSION:
            raise CheckpointError(
                f"{self.path} has format version {metadata['format_version']}, saved by gpuopt "
                f"{metadata['gpuopt_version']}; this version of gpuopt reads {_FORMAT_VERSION}"
            )
        checksums: dict[str, str] = json.loads(metadata["checksums"])
        return checksums


@contextmanager
def open_checkpoint(path: Path) -> Iterator[CheckpointFile]:
    """Opens a checkpoint; nothing but its header is read, and no code in it is run.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: the file is damaged, cut short, or something else than a checkpoint.
    """
    from safetensors import safe_open

    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no checkpoint {path}") from None
    with file:
        # The file that is open here, also where its name is given to a newer one just now.
        same = Path(f"/dev/fd/{file.fileno()}")
        try:
            # By reads, not by mapped memory: a disk's error is an exception then, not a signal.
            header = safe_open(same if same.exists() else path, framework="np", backend="pread")
        except Exception as error:
            raise CheckpointError(f"{path} is damaged or no checkpoint: {error}") from error
        with header:
            try:
                checkpoint = CheckpointFile(path, file, header)
            except CheckpointError:
                raise
            except (KeyError, TypeError, ValueError, RecursionError) as error:
                raise CheckpointError(f"{path} is damaged: {error!r}") from error
            yield checkpoint


def _metadata(tensors: Mapping[str, Array], description: Any, saved_at: int) -> dict[str, str]:
    from gpuopt import __version__

    metadata = {
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        "gpuopt_version": __version__,
        "saved_at": str(saved_at),
        "checksums": json.dumps({name: _checksum(array) for name, array in tensors.items()}),
        "description": json.dumps(description),
    }
    entries = [[n, _DTYPES[a.dtype.name], list(a.shape)] for n, a in tensors.items()]
    return {**metadata, "header_checksum": _header_checksum(metadata, entries)}


def _header(order: list[str], tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """Returns the beginning of a safetensors file: its header's length, and the header."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in order:
        array = tensors[name]
        start, end = end, end + array.nbytes
        entries[name] = {
            "dtype": _DTYPES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _new_memory(size: int) -> Array:
    """Returns bytes whose pages are there already: to make them one by one takes most of a read."""
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE} if _LINUX else {}
    return np.frombuffer(mmap.mmap(-1, max(size, 1), **flags), np.uint8)


def _header_checksum(metadata: Mapping[str, str], entries: Iterable[list[Any]]) -> str:
    from xxhash import xxh3_64_hexdigest

    canonical = json.dumps([sorted(metadata.items()), sorted(entries)])
    return xxh3_64_hexdigest(canonical.encode())


def _checksum(array: Array) -> str:
    """Finds accidents, not forgeries; it must be faster than the disk."""
    from xxhash import xxh3_64_hexdigest

    return xxh3_64_hexdigest(_bytes_of(array))


def _bytes_of(array: Array) -> Any:
    return array.reshape(-1).view(np.uint8).data if array.size else b""


def _as_stored(name: str, array: Array) -> Array:
    """Returns the array in the format's order of bytes and elements, itself if it is in it."""
    if array.dtype.name not in _DTYPES:
        raise ValueError(
            f'"{name}" has dtype {array.dtype}, which a checkpoint cannot hold; it holds '
            f"{', '.join(_DTYPES)}"
        )
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
