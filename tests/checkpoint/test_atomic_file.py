"""A file that is being written belongs to one process."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from pathlib import Path

import pytest
from interrupt_at import Interrupt, each_moment

from gpuopt import atomic_file
from gpuopt.atomic_file import open_aside, replace_file


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_move_its_parents_position_in_a_file(tmp_path: Path) -> None:
    with open_aside(tmp_path / "file") as file:
        file.write(b"abc")
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (
                lambda: file.seek(0),
                lambda: file.read(1),
                lambda: file.readinto(bytearray(1)),
                lambda: file.write(b"x"),
                lambda: file.take_name(tmp_path / "other"),
            ):
                try:
                    call()
                except RuntimeError:
                    refused += 1
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        assert file.tell() == 3


# A file that an interrupt leaves open is closed when its object goes.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_leaves_no_file_beside_the_target(tmp_path: Path) -> None:
    target = tmp_path / "state"
    inside = atomic_file.__file__, "pathlib", "os.py"
    for interrupt in each_moment(inside, least=10):
        with suppress(Interrupt), interrupt:
            replace_file(target, b"numbers")
        gc.collect()
        assert set(os.listdir(tmp_path)) <= {"state"}
    assert target.read_bytes() == b"numbers"


def test_a_file_that_has_the_new_name_already_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, free = tmp_path / ".state.taken.partial", tmp_path / ".state.free.partial"
    taken.write_bytes(b"of another")
    names = iter([taken, free])
    monkeypatch.setattr(atomic_file, "aside_name", lambda path: next(names))
    with pytest.raises(KeyboardInterrupt), open_aside(tmp_path / "state"):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == [taken.name]
