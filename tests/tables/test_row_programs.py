"""Rows that come and go, over random programs beside a naive model.

tests/fuzz/test_all_stages.py changes rows of tables in groups, and with other optimizers.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpu_streams import new_stream
from row_programs import Program


def seeds(first: int, number: int) -> pytest.MarkDecorator:
    few = number if os.environ.get("GPUOPT_FULL") else number // 3 + 1
    return pytest.mark.parametrize("seed", range(first, first + few))


@seeds(0, 30)
def test_random_programs_on_the_host(seed: int, tmp_path: Path) -> None:
    Program(seed, tmp_path).run(40)


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@seeds(100, 10)
def test_random_programs_on_emulated_gpus(seed: int, tmp_path: Path) -> None:
    Program(seed, tmp_path, "gpu:0").run(20)


@pytest.mark.gpu
@pytest.mark.usefixtures("every_schedule")
@seeds(200, 6)
def test_random_programs_on_streams(seed: int, tmp_path: Path) -> None:
    Program(seed, tmp_path, "gpu:0", [new_stream() for _ in range(3)]).run(15)
