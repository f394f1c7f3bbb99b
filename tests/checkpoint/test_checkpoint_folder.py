"""Whatever lies in a checkpoint's folder hangs nothing, and is neither opened nor removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint_values import names, value, variable
from forged_checkpoint import forged

import gpuopt
from gpuopt import CheckpointError, Saver, atomic_file
from gpuopt.checkpoint import file_format


def test_pipes_and_folders_in_a_checkpoints_place_hang_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    saver = Saver([variable()])
    assert gpuopt.latest_checkpoint(tmp_path) is None
    saved = saver.save(tmp_path / "m", 1)
    assert gpuopt.latest_checkpoint(tmp_path) == saved
    for name in ("pipe", "folder", "zero"):
        with pytest.raises(CheckpointError, match=rf"{name}\.safetensors is no checkpoint"):
            saver.restore(tmp_path / name)
        saver.recover_last_checkpoints([str(tmp_path / f"{name}.safetensors")])
        assert saver.last_checkpoints == []
    for name in ("pipe", "folder"):
        with pytest.raises(OSError, match="could not be saved: something that is no file"):
            saver.save(tmp_path / name)


def test_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "m.safetensors").symlink_to(victim)
    path = Saver([variable(1.0)]).save(tmp_path / "m")
    assert value(path) == 1.0
    assert not Path(path).is_symlink()
    assert victim.read_text() == "precious"


def test_planted_files_aside_are_neither_opened_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    planted = [tmp_path / f".m-1.safetensors.{16 * digit}.partial" for digit in "0123"]
    planted[0].symlink_to(victim)
    os.mkfifo(planted[1])
    planted[2].mkdir()
    planted[3].symlink_to("nowhere")
    before = names(tmp_path)
    tokens = iter([*(16 * digit for digit in "0123"), 16 * "a"])
    monkeypatch.setattr(atomic_file.secrets, "token_hex", lambda size: next(tokens))
    path = Saver([variable(1.0)]).save(tmp_path / "m", 1)
    assert value(path) == 1.0
    assert names(tmp_path) == sorted([*before, "m-1.safetensors"])
    assert victim.read_text() == "precious"


def test_only_what_was_abandoned_under_the_prefix_is_removed(tmp_path: Path) -> None:
    abandoned = [".m.safetensors.{}.partial", ".m-5.safetensors.{}.partial"]
    others = [
        ".mm.safetensors.{}.partial",
        ".m-5.safetensors.{}.partia",
        ".m-x.safetensors.{}.partial",
        "m-5.safetensors.{}.partial",
    ]
    for name in [*abandoned, *others]:
        (tmp_path / name.format(16 * "0")).write_text("text")
    with atomic_file.open_aside(tmp_path / "m-6.safetensors") as file:
        path = Saver([variable()]).save(tmp_path / "m", 1)
        left = [name.format(16 * "0") for name in others]
        expected = [Path(path).name, Path(file.name).name, *left]
        assert names(tmp_path) == sorted(expected)


def test_what_was_still_open_at_the_first_save_is_removed_by_a_later_one(tmp_path: Path) -> None:
    saver = Saver([variable()])
    with atomic_file.open_aside(tmp_path / "m-6.safetensors"):
        saver.save(tmp_path / "m", 1)
        assert len(names(tmp_path)) == 2
    saver.save(tmp_path / "m", 2)
    assert names(tmp_path) == ["m-1.safetensors", "m-2.safetensors"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root gives files away")
def test_what_another_user_has_put_there_is_not_removed(tmp_path: Path) -> None:
    theirs = tmp_path / f".m-1.safetensors.{16 * '0'}.partial"
    theirs.write_text("text")
    os.chown(theirs, 65534, 65534)
    Saver([variable()]).save(tmp_path / "m", 1)
    assert theirs.exists()


@pytest.mark.parametrize(
    "saved_at", ["9" * 4300, "9" * 5000, str(2**63), str(2**63 - 1), str(2**63 - 2), "-5", "٣", ""]
)
@pytest.mark.one_in(3, saved_at=type)
def test_a_forged_time_disturbs_no_other_checkpoint(saved_at: str, tmp_path: Path) -> None:
    w = variable(1.0)
    good = Path(Saver([w]).save(tmp_path / "m", 1))
    os.utime(good, (1, 1))
    forgery = tmp_path / "x.safetensors"
    forgery.write_bytes(forged(good, saved_at=saved_at))
    os.utime(forgery, (2, 2))
    program = f"""
import sys, numpy as np, gpuopt
w = gpuopt.Variable(np.zeros(3, np.float32), name="w")
saver = gpuopt.Saver([w])
for step in range(2, 7):
    path = saver.save({str(tmp_path / "m")!r}, step)
    assert gpuopt.latest_checkpoint({str(tmp_path)!r}) == path, path
saver.restore({str(good)!r})
assert w.numpy()[0] == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("checksums", ["[1]", "{}", "null", "5", '{"w": 5}', '{"v": "0"}'])
def test_forged_checksums_are_refused(checksums: str, tmp_path: Path) -> None:
    saver = Saver([variable(1.0)])
    path = Path(saver.save(tmp_path / "m"))
    path.write_bytes(forged(path, checksums=checksums))
    with pytest.raises(CheckpointError, match="damaged"):
        saver.restore(path)


def test_a_shape_that_numpy_cannot_hold_is_a_checkpoint_error(tmp_path: Path) -> None:
    shape = [0, 2**63 - 1]
    header: dict[str, Any] = {"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
    checksums = json.dumps({"x": file_format.new_checksum().hexdigest()})
    header["__metadata__"] = {
        **{"format": file_format.FORMAT, "format_version": "1", "gpuopt_version": "0"},
        **{"saved_at": "1", "checksums": checksums, "description": '{"optimizers": []}'},
    }
    checksum = file_format.header_checksum(header["__metadata__"], {"x": ("F32", shape)})
    header["__metadata__"]["header_checksum"] = checksum
    text = json.dumps(header).encode()
    (tmp_path / "m.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match='"x"'):
        Saver(optimizers=[]).restore(tmp_path / "m", deferred=True)
