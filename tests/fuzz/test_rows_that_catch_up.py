"""Random programs of rows that catch up, beside a model that moves all rows in each step."""

from __future__ import annotations

import pytest
from fuzzing import late_rows
from fuzzing.settings import NUMBERS, long_run, run_for_a_while, seeds


@pytest.mark.parametrize("seed", seeds(24))
def test_rows_catch_up_in_a_random_program_as_if_they_made_all_steps(seed: int) -> None:
    late_rows.run(seed, NUMBERS)


@long_run
def test_rows_catch_up_in_many_random_programs(part: int) -> None:
    run_for_a_while(late_rows.run)
