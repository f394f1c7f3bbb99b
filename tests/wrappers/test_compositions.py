"""Wrappers in wrappers do what a naive model does, over random programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_streams import new_stream
from wrapper_programs import Program


@pytest.mark.parametrize("seed", range(25))
def test_random_programs_on_the_host(seed: int, tmp_path: Path) -> None:
    Program(seed, tmp_path).run(25)


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@pytest.mark.parametrize("seed", range(100, 112))
@pytest.mark.parametrize("places", ["gpu:0", "mixed"])
def test_random_programs_on_emulated_gpus(places: str, seed: int, tmp_path: Path) -> None:
    Program(seed, tmp_path, places).run(15)


@pytest.mark.gpu
@pytest.mark.usefixtures("every_schedule")
@pytest.mark.parametrize("seed", range(200, 204))
@pytest.mark.parametrize("places", ["gpu:0", "mixed"])
def test_random_programs_on_streams(places: str, seed: int, tmp_path: Path) -> None:
    Program(seed, tmp_path, places, [new_stream() for _ in range(3)]).run(12)
