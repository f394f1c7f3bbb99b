"""A file that is being written belongs to one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuopt.atomic_file import open_aside


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
