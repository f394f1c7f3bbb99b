"""Rows that come and go do what a list of rows does, over random programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_streams import new_stream
from row_programs import Program


@pytest.mark.parametrize("seed", range(30))
def test_random_programs_on_the_host(seed: int, tmp_path: Path) -> None:
    Program(seed, tmp_path).run(40)


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@pytest.mark.parametrize("seed", range(100, 110))
def test_random_programs_on_emulated_gpus(seed: int, tmp_path: Path) -> None:
    Program(seed, tmp_path, "gpu:0").run(20)


@pytest.mark.gpu
@pytest.mark.usefixtures("every_schedule")
@pytest.mark.parametrize("seed", range(200, 206))
def test_random_programs_on_streams(seed: int, tmp_path: Path) -> None:
    Program(seed, tmp_path, "gpu:0", [new_stream() for _ in range(3)]).run(15)
