"""Random programs of everything, against a naive model: see tests/support/fuzzing."""

from __future__ import annotations

import itertools
import os
import secrets
import time

import pytest
from fuzzing import program

SEED = os.environ.get("GPUOPT_FUZZ_SEED")
ONLY = os.environ.get("GPUOPT_FUZZ_ONLY")
SECONDS = os.environ.get("GPUOPT_FUZZ_SECONDS", "600" if os.environ.get("GPUOPT_FULL") else None)
SEEDS = range(12) if SEED is None else [int(SEED)]
OPERATIONS = range(40) if ONLY is None else [int(number) for number in ONLY.split(",")]
HOST = ("cpu",)
GPUS = ("cpu", "gpu:0", "gpu:1")


@pytest.mark.parametrize("seed", SEEDS)
def test_random_program_on_the_host(seed: int) -> None:
    program.run(seed, OPERATIONS, HOST)


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@pytest.mark.parametrize("seed", SEEDS[:4])
def test_random_program_on_gpus(seed: int) -> None:
    program.run(seed, OPERATIONS, GPUS)
