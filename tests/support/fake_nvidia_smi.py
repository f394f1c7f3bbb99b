"""An nvidia-smi that answers from files, for GPUs of the stub driver."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# As the real one, it answers for all GPUs where none is named, and takes a while.
_PROGRAM = """#!/bin/sh
cd "$(dirname "$0")"
sleep 0.05
if [ "$1" = -i ]; then
  echo "$2" >> asked
  cat "$2"
else
  echo all >> asked
  cat 0000:*
fi
"""


class NvidiaSmi:
    """Is found in PATH, until the test ends."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        program = folder / "nvidia-smi"
        program.write_text(_PROGRAM)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def answer(self, bus_id: str, answer: str) -> None:
        """Has it give this answer for a GPU."""
        (self._folder / bus_id).write_text(f"{answer}\n")

    def list_asked(self) -> list[str]:
        """Returns the bus ids that it was asked for, and "all" for each question without one."""
        asked = self._folder / "asked"
        return asked.read_text().split() if asked.exists() else []
