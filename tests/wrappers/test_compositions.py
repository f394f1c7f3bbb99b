"""Wrappers in wrappers do what a naive model does, over random programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from wrapper_programs import Program


@pytest.mark.parametrize("seed", range(25))
def test_random_programs_on_the_host(seed: int, tmp_path: Path) -> None:
    Program(seed, tmp_path).run(25)


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@pytest.mark.parametrize("seed", range(100, 112))
def test_random_programs_on_emulated_gpus(seed: int, tmp_path: Path) -> None:
    Program(seed, tmp_path, "gpu:0").run(15)


@pytest.mark.gpu
@pytest.mark.usefixtures("every_schedule")
@pytest.mark.parametrize("seed", range(200, 204))
def test_random_programs_on_gpus(seed: int, tmp_path: Path) -> None:
    Program(seed, tmp_path, "gpu:0").run(12)
