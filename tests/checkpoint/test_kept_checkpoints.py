"""`max_to_keep` knows files, however their paths are spelled, and removes only its own."""

from __future__ import annotations

import _thread
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_values import names, value, variable

from gpuopt import DeadlineExceededError, Saver, locks
from gpuopt.checkpoint import checkpoint_folder, checkpoint_writer
from gpuopt.checkpoint import saver as saver_module


def test_max_to_keep_knows_a_file_by_any_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    monkeypatch.chdir(folder)
    saver = Saver([variable()], max_to_keep=1)
    for path in (folder / "m", "m", "./m", link / "m", f"{folder}//m", f"{link}/../folder/m"):
        saved = saver.save(path, 7)
        assert Path(saved).exists(), path
        assert saver.last_checkpoints == [saved]
    later = Saver([variable()], max_to_keep=2)
    later.recover_last_checkpoints([str(link / "m-7.safetensors"), "m-7.safetensors"])
    assert later.last_checkpoints == ["m-7.safetensors"]
    saved = [later.save(link / "m", 7), later.save("m", 8)]
    assert later.last_checkpoints == saved
    assert names(folder) == ["m-7.safetensors", "m-8.safetensors"]


@pytest.mark.parametrize("mode", ["save", "save_async"])
def test_a_relative_path_means_the_folder_of_its_save(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    saver = Saver([variable()], max_to_keep=1)
    write = saver_module.write_checkpoint

    def elsewhere(*arguments: Any) -> str:
        os.chdir(second)
        return write(*arguments)

    monkeypatch.chdir(first)
    monkeypatch.setattr(saver_module, "write_checkpoint", elsewhere)
    saved = getattr(saver, mode)("m", 1)
    assert (saved if mode == "save" else saved.result()) == "m-1.safetensors"
    assert (names(first), names(second)) == (["m-1.safetensors"], [])
    Saver([variable()]).save("m", 1)  # another Saver's, of the same name
    saver.save("m", 2)
    assert (names(first), names(second)) == ([], ["m-1.safetensors", "m-2.safetensors"])


def test_max_to_keep_removes_nothing_that_others_have_put_in_a_checkpoints_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    w = variable(1.0)
    mine, other = Saver([w], max_to_keep=1), Saver([w], max_to_keep=1)
    mine.save(tmp_path / "m", 1)
    w.assign(np.full(3, 2.0))
    path = other.save(tmp_path / "m", 1)
    mine.save(tmp_path / "m", 2)
    assert value(path) == 2.0
    assert "m-1.safetensors is kept, though it is old: it is another checkpoint now" in caplog.text
    (tmp_path / "m-2.safetensors").write_text("precious")
    mine.save(tmp_path / "m", 3)
    assert (tmp_path / "m-2.safetensors").read_text() == "precious"
    assert mine.last_checkpoints == [str(tmp_path / "m-3.safetensors")]


def test_what_takes_a_checkpoints_place_just_before_its_removal_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = variable(1.0)
    saver = Saver([w], max_to_keep=1)
    first = Path(saver.save(tmp_path / "m", 1))
    rename = os.rename

    def late(source: Any, target: Any) -> None:
        if Path(source) == first:
            (tmp_path / "new").write_text("precious")
            os.replace(tmp_path / "new", first)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    saver.save(tmp_path / "m", 2)
    assert first.read_text() == "precious"
    assert names(tmp_path) == ["m-1.safetensors", "m-2.safetensors"]


def test_savers_of_one_prefix_leave_each_others_checkpoints_alone(tmp_path: Path) -> None:
    savers = [Saver([variable(name=name)], max_to_keep=2) for name in "abc"]
    for step in range(6):
        savers[step % 3].save(tmp_path / "m", step)
        savers[step % 3].save(tmp_path / "m", 10 + step)
    assert names(tmp_path) == sorted(f"m-{s}.safetensors" for s in (3, 4, 5, 13, 14, 15))


@pytest.mark.parametrize("moment", ["os.replace", "sync_folder"])
def test_a_save_that_is_interrupted_when_the_file_gets_its_name_counts_if_it_is_there(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    saver = Saver([variable()], max_to_keep=2)
    first = saver.save(tmp_path / "m", 0)
    is_there = moment == "sync_folder"
    target = checkpoint_writer if is_there else os
    for step in range(1, 6):
        with monkeypatch.context() as patch:
            patch.setattr(target, moment.removeprefix("os."), interrupt)
            with pytest.raises(KeyboardInterrupt):
                saver.save(tmp_path / "m", step)
        assert saver.last_checkpoints[0] == first
        assert len(saver.last_checkpoints) == (1 + step if is_there else 1)
    saved = saver.save(tmp_path / "m", 6)
    before = str(tmp_path / "m-5.safetensors") if is_there else first
    assert saver.last_checkpoints == [before, saved]
    assert names(tmp_path) == [Path(path).name for path in saver.last_checkpoints]


# The moments of a save: before the file has its name, after it, and when an old one is removed.
MOMENTS = {
    "before": (os, "replace"),
    "after": (checkpoint_writer, "sync_folder"),
    "removing": (checkpoint_folder, "_remove"),
}


@pytest.mark.parametrize("mode", ["save", "save_async"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_save_by_a_signal_handler_in_a_save_is_refused(
    moment: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute = MOMENTS[moment]
    call = getattr(owner, attribute)
    w = variable()
    saver = Saver([w], max_to_keep=2)
    steps = iter(range(100, 200))

    def handled(*arguments: Any) -> Any:
        nonlocal is_wanted
        if is_wanted:
            is_wanted = False
            with pytest.raises(RuntimeError, match="signal handler"):
                saver.save(tmp_path / "m", next(steps))
        return call(*arguments)

    for step in range(6):
        is_wanted = step > 1
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, handled)
            if mode == "save_async":
                # As if the thread had not begun when the next call needs the file.
                patch.setattr(_thread, "start_new_thread", lambda run, given: None)
                saver.save_async(tmp_path / "m", step)
                saver._finish_background()
            else:
                saver.save(tmp_path / "m", step)
        assert not is_wanted
        assert len(saver.last_checkpoints) == min(2, step + 1)
        assert names(tmp_path) == sorted(Path(path).name for path in saver.last_checkpoints)


def test_a_signal_handler_in_a_save_in_the_background_is_told_not_to_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Saver([variable()])
    replace = os.replace
    futures, refused = [], []

    def handled(*arguments: Any) -> None:
        if not futures[0].done():
            with pytest.raises(RuntimeError, match=r"this thread is saving .*, and a signal handl"):
                futures[0].result()
            refused.append(True)
        replace(*arguments)

    monkeypatch.setattr(_thread, "start_new_thread", lambda run, given: None)
    futures.append(saver.save_async(tmp_path / "m", 1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", handled)
        saver.save(tmp_path / "m", 2)
    assert refused == [True]
    assert futures[0].result() == str(tmp_path / "m-1.safetensors")


def test_a_thread_that_begins_late_does_not_wait_for_whoever_writes_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for another thread's write has a deadline, whoever came first."""
    monkeypatch.setattr(locks, "DEADLINE_S", 0.05)
    go_on, writing = threading.Event(), threading.Event()
    saver = Saver([variable()])
    replace = os.replace

    def slow(*arguments: Any) -> None:
        writing.set()
        assert go_on.wait(30)
        replace(*arguments)

    monkeypatch.setattr(os, "replace", slow)
    future = saver.save_async(tmp_path / "m", 1)
    assert writing.wait(30)
    try:
        with pytest.raises(DeadlineExceededError, match=r"a thread that is saving .*m"):
            # What a second thread does that has looked just before the first one began.
            future._save.finish()
    finally:
        go_on.set()
    monkeypatch.setattr(locks, "DEADLINE_S", 30)
    assert future.result() == str(tmp_path / "m-1.safetensors")
