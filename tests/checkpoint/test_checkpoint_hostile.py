"""A file that is not what it should be is refused: nothing is restored, run, or left behind."""

from __future__ import annotations

import io
import json
import pickle
import random
import resource
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors import safe_open
from safetensors.numpy import save_file

import gpuopt
from gpuopt import CheckpointError, Saver, Variable
from gpuopt.checkpoint import checkpoint_file, checkpoint_writer, file_format


class Model:
    """Two variables under Adam, saved once, and changed since."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(0)
        self.w = Variable(rng.normal(size=(64, 40)).astype(np.float32), name="w")
        self.b = Variable(rng.normal(size=300).astype(np.float32), name="b")
        self.optimizer = gpuopt.AdamOptimizer(0.1)
        self.train()
        self.saver = Saver()
        self.path = Path(self.saver.save(folder / "model"))
        self.whole = self.path.read_bytes()
        self.train()
        self.before = self.state()

    def train(self) -> None:
        pairs = [(np.ones(v.shape, np.float32), v) for v in (self.w, self.b)]
        self.optimizer.apply_gradients(pairs)

    def state(self) -> list[bytes]:
        own = self.optimizer.variables()
        return [variable.numpy().tobytes() for variable in (self.w, self.b, *own)]

    def refuses(self, content: bytes) -> str:
        """Restores a file with this content, which must fail and change nothing."""
        self.path.write_bytes(content)
        with pytest.raises(CheckpointError) as raised:
            self.saver.restore(self.path)
        assert self.state() == self.before
        return str(raised.value)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


def tensor_at(content: bytes, offset: int) -> str | None:
    """Names the tensor whose bytes hold this offset; None in the header."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            if 8 + length + start <= offset < 8 + length + end:
                return name
    return None


def test_file_cut_short_anywhere_is_refused(model: Model) -> None:
    boundaries = range(0, len(model.whole), 1024)
    assert len(boundaries) > 30
    for size in [*range(0, 3000, 7), *boundaries, len(model.whole) - 1]:
        model.refuses(model.whole[:size])
    model.refuses(model.whole + b"\0")
    model.path.write_bytes(model.whole)
    model.saver.restore(model.path)


def test_every_flipped_bit_is_found_and_its_tensor_named(model: Model) -> None:
    choose = random.Random(0)
    header = 8 + struct.unpack("<Q", model.whole[:8])[0]
    bits = [choose.randrange(8 * len(model.whole)) for _ in range(1000)]
    bits += [choose.randrange(8 * header) for _ in range(1000)]
    bits += range(8 * 8)
    for bit in bits:
        content = bytearray(model.whole)
        content[bit // 8] ^= 1 << bit % 8
        message = model.refuses(bytes(content))
        name = tensor_at(model.whole, bit // 8)
        assert name is None or f'"{name}"' in message


def rewritten(model: Model, **changes: Any) -> None:
    """Saves the model's tensors again, with some replaced, all checksums right."""
    with checkpoint_file.open_checkpoint(model.path) as opened:
        tensors = opened.read(sorted(opened.names))
        description = opened.description
    for name, change in changes.items():
        if name == "description":
            description = change(description)
        elif change is None:
            del tensors[name]
        else:
            tensors[name] = change
    checkpoint_writer.write_checkpoint(model.path, tensors, description, saved_at=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w": np.zeros((64, 41), np.float32)}, r'"w" has shape \(64, 40\); .* \(64, 41\)'),
        ({"b": np.zeros(300, np.float64)}, '"b" has dtype float32; .* float64'),
        ({"b/Adam_1": np.zeros(3, np.float32)}, r'"v" of "b" has shape \(300,\)'),
        ({"w/Adam": np.zeros((64, 40), np.int32)}, 'slot "m" of "w" has dtype float32'),
        ({"beta2_power": np.zeros((), np.float16)}, '"beta2_power" has dtype float32'),
        ({"w": None}, 'holds no "w"'),
        ({"w/Adam": None}, '"w/Adam"'),
        ({"u": np.zeros(1)}, 'holds "u", which nothing here is called'),
    ],
)
def test_wrong_shapes_dtypes_and_names_are_named(
    model: Model, changes: dict[str, Any], message: str
) -> None:
    rewritten(model, **changes)
    with pytest.raises(CheckpointError, match=message):
        model.saver.restore(model.path)
    assert model.state() == model.before


@pytest.mark.parametrize(
    "change",
    [
        lambda d: None,
        lambda d: [],
        lambda d: {"optimizers": None},
        lambda d: {"optimizers": 5},
        lambda d: {"optimizers": [5]},
        lambda d: {"optimizers": [{"name": "Adam"}]},
        lambda d: {"optimizers": [{**d["optimizers"][0], "slots": 5}]},
        lambda d: {"optimizers": [{**d["optimizers"][0], "slots": {"m": 5}}]},
        lambda d: {"optimizers": [{**d["optimizers"][0], "slots": {"m": {"w": 5}}}]},
        lambda d: {"optimizers": [{**d["optimizers"][0], "slots": {"m": {"w": []}}}]},
        lambda d: {"optimizers": [{**d["optimizers"][0], "slots": {"m": {"w": "nothing"}}}]},
        lambda d: {"optimizers": [{**d["optimizers"][0], "non_slots": []}]},
        lambda d: {"optimizers": [{**d["optimizers"][0], "non_slots": {}}]},
        lambda d: {"optimizers": [{**d["optimizers"][0], "name": []}]},
        lambda d: {"optimizers": [{**d["optimizers"][0], "format": "9"}]},
        lambda d: {"optimizers": d["optimizers"] * 2},
        lambda d: {"optimizers": []},
    ],
)
def test_a_header_that_makes_no_sense_is_refused(model: Model, change: Any) -> None:
    rewritten(model, description=change)
    with pytest.raises(CheckpointError):
        model.saver.restore(model.path)
    assert model.state() == model.before


def test_one_tensor_is_not_restored_to_several_slots(model: Model) -> None:
    def change(description: Any) -> Any:
        [adam] = description["optimizers"]
        return {"optimizers": [{**adam, "slots": dict.fromkeys("mv", adam["slots"]["m"])}]}

    rewritten(model, description=change)
    saver = Saver([model.w, model.b], optimizers=[model.optimizer])
    with pytest.raises(CheckpointError, match='"b/Adam", "w/Adam" is in several places'):
        saver.restore(model.path)
    assert model.state() == model.before


def headed(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


class Marker:
    """A pickle that would make a file if it were loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def zip_bomb() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w.npy", b"\0" * 50_000_000)
    return buffer.getvalue()


def entry(dtype: str, shape: list[int], end: int) -> str:
    return json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}})


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "a few bytes": b"123",
    "zip bomb": zip_bomb(),
    "a header of 2^60 bytes": struct.pack("<Q", 2**60) + b"{}",
    "a header of 2^64 - 1 bytes": struct.pack("<Q", 2**64 - 1) + b"{}",
    "a header of 99 MB": struct.pack("<Q", 99_000_000) + b"{}",
    "no metadata": headed(entry("F32", [1], 4).encode(), b"\0" * 4),
    "no JSON": headed(b"\xff" * 100),
    "a deep list": headed(b"[" * 100_000),
    "a shape that overflows": headed(entry("F32", [2**62, 4], 0).encode()),
    "a shape of 2^62 times 0": headed(entry("F32", [2**62, 0], 0).encode()),
    "a shape below 0": headed(entry("F32", [-1], 4).encode(), b"\0" * 4),
    "a tensor beyond the end": headed(entry("F32", [2**34], 2**36).encode(), b"\0" * 4),
    "unknown dtype": headed(entry("F3", [1], 4).encode(), b"\0" * 4),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_file_is_refused(model: Model, what: str) -> None:
    model.refuses(HOSTILE[what])


def test_an_exception_of_a_signal_handler_is_not_taken_for_damage(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TimeIsUp(Exception):
        pass

    def interrupted(*_: Any, **__: Any) -> None:
        raise TimeIsUp

    monkeypatch.setattr(safetensors, "safe_open", interrupted)
    with pytest.raises(TimeIsUp):
        model.saver.restore(model.path)
    with pytest.raises(TimeIsUp):
        gpuopt.latest_checkpoint(model.path.parent)


def test_pickle_in_a_checkpoints_place_is_not_run(model: Model, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        model.refuses(pickle.dumps(Marker(marker), protocol))
    assert not marker.exists()
    pickle.loads(pickle.dumps(Marker(marker))).close()
    assert marker.exists(), "the pickle was harmless, so this proved nothing"


def test_a_deeply_nested_header_with_a_right_checksum_is_refused(
    model: Model, tmp_path: Path
) -> None:
    with safe_open(str(model.path), "np") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        entries = {
            name: (opened.get_slice(name).get_dtype(), opened.get_slice(name).get_shape())
            for name in tensors
        }
    del metadata["header_checksum"]
    metadata["description"] = "[" * 200_000 + "]" * 200_000
    metadata["header_checksum"] = file_format.header_checksum(metadata, entries)
    save_file(tensors, model.path, metadata)
    with pytest.raises(CheckpointError, match="damaged"):
        model.saver.restore(model.path)


def test_memory_is_bounded_by_the_files_size(tmp_path: Path) -> None:
    """In a process that may take only 64 MB more than it has."""
    for number, content in enumerate(HOSTILE.values()):
        (tmp_path / f"{number}.safetensors").write_bytes(content)
    program = f"""
import resource, sys, pathlib
import numpy as np, safetensors, xxhash, json
import gpuopt
w = gpuopt.Variable(np.zeros(1, np.float32), name="w")
saver = gpuopt.Saver([w])
pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 64 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sorted(pathlib.Path({str(tmp_path)!r}).iterdir()):
    try:
        saver.restore(path)
    except gpuopt.CheckpointError as error:
        print("refused")
try:
    np.zeros(2**27, np.uint8)
except MemoryError:
    print("limited")
"""
    assert resource.getpagesize()
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert finished.stdout.split() == ["refused"] * len(HOSTILE) + ["limited"]


def test_damaged_files_are_left_out_of_latest_checkpoint_with_a_warning(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newer = Path(model.saver.save(tmp_path / "model", global_step=7))
    newer.write_bytes(newer.read_bytes()[:2000])
    assert gpuopt.latest_checkpoint(tmp_path) == str(model.path)
    assert "model-7.safetensors is damaged" in caplog.text
