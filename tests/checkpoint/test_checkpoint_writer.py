"""A save that returned is readable and holds one moment; what was there stays until then."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_values import names, value, variable
from other_thread import repeated
from safetensors.numpy import load_file

import gpuopt
from gpuopt import ExponentialMovingAverage, Saver, Variable
from gpuopt.checkpoint.checkpoint_file import open_checkpoint
from gpuopt.distributed import SyncReplicasOptimizer

FULL = bool(os.environ.get("GPUOPT_FULL"))
LARGE = 3_000_000 if FULL else 1_000_000


# Values that change during the save.


class Writers:
    """Threads that write all the time, each by one of the ways there are."""

    def __init__(self) -> None:
        self.w = variable(size=LARGE)
        self.averaged = variable(size=LARGE, name="averaged")
        self.step = Variable(0, name="global_step", trainable=False, dtype=np.int64)
        self.optimizer = gpuopt.GradientDescentOptimizer(-1.0)
        self.averages = ExponentialMovingAverage(0.0)
        self.averages.apply([self.averaged])
        self.gradient = np.ones(LARGE, np.float32)
        self.stop = threading.Event()
        self.errors: list[BaseException] = []
        self.threads = [
            threading.Thread(target=self.run, args=(w,)) for w in (self.write, self.sync)
        ]

    def __enter__(self) -> Writers:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        assert self.errors == []

    def run(self, write: Any) -> None:
        try:
            write()
        except BaseException as error:
            self.errors.append(error)

    def write(self) -> None:
        while not self.stop.is_set():
            self.w.assign(self.gradient)
            self.w += 1.0
            self.w[:] = 5.0
            np.add(self.w, 1.0, out=self.w)

    def sync(self) -> None:
        """Steps that add 1; the average is always the variable itself."""
        sync = SyncReplicasOptimizer(
            self.optimizer,
            1,
            1,
            variable_averages=self.averages,
            variables_to_average=[self.averaged],
        )

        def train(worker: Any) -> None:
            while not self.stop.is_set():
                worker.apply_gradients([(self.gradient, self.averaged)], self.step)

        sync.run(train, self.step)


@pytest.mark.parametrize("mode", ["save", "save_async"])
def test_what_threads_write_by_all_means_is_saved_as_of_one_moment(
    mode: str, tmp_path: Path
) -> None:
    with Writers() as writers:
        saver = Saver(max_to_keep=2, optimizers=[writers.optimizer])
        for number in range(8 if FULL else 4):
            saved = getattr(saver, mode)(tmp_path / "m", number)
            path = saved if mode == "save" else saved.result()
            assert value(path) in (0.0, 1.0, 2.0, 5.0, 6.0)
            steps = value(path, "global_step")
            assert value(path, "averaged") == steps
            assert value(path, "averaged/ExponentialMovingAverage") == steps


def test_a_save_is_readable_though_its_arrays_are_written_directly(tmp_path: Path) -> None:
    array = np.zeros(LARGE, np.float32)
    strided = np.zeros((LARGE // 2, 2), np.float32)[:, 0]
    saver = Saver({"array": array, "strided": strided}, max_to_keep=1)

    def write() -> None:
        for raw in (array, strided):
            raw += 1

    with repeated(write):
        for number in range(10):
            path = saver.save(tmp_path / "m", number)
            with open_checkpoint(Path(path)) as checkpoint:
                checkpoint.read(checkpoint.names)


# The old one stays until the new one is proven.


def test_what_is_read_back_otherwise_does_not_replace_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = variable(1.0)
    saver = Saver([w], max_to_keep=1)
    path = saver.save(tmp_path / "m")
    w.assign(np.full(3, 2.0))
    fsync = os.fsync
    written = Path(path).read_bytes()
    in_header = written.index(b'"saved_at": "') + len(b'"saved_at": "')  # another digit
    for offset in (20, in_header, len(written) - 1):

        def spoil(descriptor: int, offset: int = offset) -> None:
            byte = os.pread(descriptor, 1, offset)
            os.pwrite(descriptor, bytes([byte[0] ^ 1]), offset)
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", spoil)
        with pytest.raises(OSError, match=r"m\.safetensors could not be saved: what was written"):
            saver.save(tmp_path / "m")
        monkeypatch.undo()
        assert value(path) == 1.0
        assert names(tmp_path) == ["m.safetensors"]
    saver.save(tmp_path / "m")
    assert value(path) == 2.0


@pytest.mark.parametrize(
    "name", ["__metadata__", "loss\udc80", "\ud83d\ude00", "w" * 60_000_000], ids=range(4)
)
def test_a_name_that_the_format_cannot_hold_is_refused_and_nothing_is_lost(
    name: str, tmp_path: Path
) -> None:
    w = variable(1.0)
    saver = Saver(max_to_keep=1, optimizers=[])
    path = saver.save(tmp_path / "m", 1)
    other = variable(name=name)
    with pytest.raises(ValueError, match=r"checkpoint .*m-2\.safetensors"):
        saver.save(tmp_path / "m", 2)
    with pytest.raises(ValueError, match=r"checkpoint .*m-2\.safetensors"):
        saver.save_async(tmp_path / "m", 2).result()
    assert names(tmp_path) == ["m-1.safetensors"]
    assert gpuopt.latest_checkpoint(tmp_path) == path
    del other
    assert value(saver.save(tmp_path / "m", 2)) == w.numpy()[0]


def test_an_optimizers_name_that_the_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    w = variable()
    optimizer = gpuopt.GradientDescentOptimizer(1.0, name="\ud83d\ude00")
    with pytest.raises(ValueError, match="no valid Unicode"):
        Saver([w], optimizers=[optimizer]).save(tmp_path / "m")
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_synced_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refusing(number: int) -> Any:
        def sync(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))
            fsync(descriptor)

        return sync

    saver = Saver([variable(1.0)])
    monkeypatch.setattr(os, "fsync", refusing(errno.EINVAL))
    assert value(saver.save(tmp_path / "m", 1)) == 1.0
    monkeypatch.setattr(os, "fsync", refusing(errno.EIO))
    with pytest.raises(OSError, match="it is there, but may not survive a power cut"):
        saver.save(tmp_path / "m", 2)


def test_what_is_written_is_plain_safetensors_of_the_same_bytes(tmp_path: Path) -> None:
    """More than one buffer, in the order of elements, whatever the strides."""
    rng = np.random.default_rng(0)
    arrays = {
        "large": rng.normal(size=(300, 1000)),
        "transposed": rng.normal(size=(40, 30)).T,
        "big endian": rng.normal(size=5).astype(">f4"),
        "empty": np.zeros((0, 3)),
    }
    loaded = load_file(Saver(arrays).save(tmp_path / "m"))
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
