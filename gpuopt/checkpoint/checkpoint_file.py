"""One checkpoint is one safetensors file: written so that it survives, and read with suspicion."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

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

_logger = logging.getLogger("gpuopt")


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
    from safetensors import SafetensorError, TensorSpec, serialize_file

    stored = {name: _as_stored(name, array) for name, array in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=array.dtype.name,
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in stored.items()
    }
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    outcome = "earlier checkpoints are as they were"
    try:
        serialize_file(specs, aside, metadata=_metadata(stored, description, saved_at))
        _fsync(aside)
        os.replace(aside, path)
        outcome = "it is there, but may not survive a power cut; earlier ones are kept"
        _fsync(path.parent)
    except BaseException as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        if isinstance(error, OSError | SafetensorError):
            message = f"checkpoint {path} could not be saved: {error}; {outcome}"
            number = getattr(error, "errno", None)
            raise (OSError(message) if number is None else OSError(number, message)) from error
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

    def __init__(self, path: Path, opened: Any) -> None:
        self.path = path
        self._opened = opened
        metadata = opened.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise CheckpointError(f"{path} is a safetensors file, but not gpuopt's checkpoint")
        self.names = frozenset(opened.keys())
        self._checksums = self._checked_header(metadata)
        self.description = json.loads(metadata["description"])
        self.saved_at = int(metadata["saved_at"])

    def read(self, name: str) -> Array:
        """Returns a tensor of its own memory.

        Raises:
            CheckpointError: its bytes are not those that were saved.
        """
        try:
            array: Array = self._opened.get_tensor(name)
        except Exception as error:
            raise CheckpointError(f'{self.path}: "{name}" cannot be read: {error}') from error
        if _checksum(array) != self._checksums[name]:
            raise CheckpointError(f'{self.path} is damaged: the checksum of "{name}" does not fit')
        return array

    def _checked_header(self, metadata: dict[str, str]) -> dict[str, str]:
        entries = []
        for name in self.names:
            tensor = self._opened.get_slice(name)
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

    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    try:
        # By reads, not by mapped memory: a disk's error is an exception then, not a signal.
        opened = safe_open(path, framework="np", backend="pread")
    except Exception as error:
        raise CheckpointError(f"{path} is damaged or no checkpoint: {error}") from error
    with opened as handle:
        try:
            checkpoint = CheckpointFile(path, handle)
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


def _header_checksum(metadata: Mapping[str, str], entries: Iterable[list[Any]]) -> str:
    from xxhash import xxh3_64_hexdigest

    canonical = json.dumps([sorted(metadata.items()), sorted(entries)])
    return xxh3_64_hexdigest(canonical.encode())


def _checksum(array: Array) -> str:
    """Finds accidents, not forgeries; it must be faster than the disk."""
    from xxhash import xxh3_64_hexdigest

    return xxh3_64_hexdigest(array.reshape(-1).view(np.uint8).data if array.size else b"")


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
