"""Rows that come and go, with groups or without, over random programs beside naive models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import regrouping_programs
import row_programs
from gpu_streams import new_stream


def programs(of_rows: range, of_groups: range) -> pytest.MarkDecorator:
    """Parametrizes with programs' classes and seeds."""
    if not os.environ.get("GPUOPT_FULL"):
        of_rows, of_groups = of_rows[: len(of_rows) // 3 + 1], of_groups[: len(of_groups) // 3 + 1]
    cases = [pytest.param(row_programs.Program, seed, id=f"rows-{seed}") for seed in of_rows]
    regrouping = regrouping_programs.Program
    cases += [pytest.param(regrouping, seed, id=f"groups-{seed}") for seed in of_groups]
    return pytest.mark.parametrize(("program", "seed"), cases)


@programs(range(30), range(16))
def test_random_programs_on_the_host(program: Any, seed: int, tmp_path: Path) -> None:
    program(seed, tmp_path).run(40)


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@programs(range(100, 110), range(100, 104))
def test_random_programs_on_emulated_gpus(program: Any, seed: int, tmp_path: Path) -> None:
    program(seed, tmp_path, "gpu:0").run(20)


@pytest.mark.gpu
@pytest.mark.usefixtures("every_schedule")
@programs(range(200, 206), range(200, 202))
def test_random_programs_on_streams(program: Any, seed: int, tmp_path: Path) -> None:
    program(seed, tmp_path, "gpu:0", [new_stream() for _ in range(3)]).run(15)
