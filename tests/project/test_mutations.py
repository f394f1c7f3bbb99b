"""tests/support/mutations.toml keeps up with the code that it breaks."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutations import Mutant, mutants

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.what)
def test_a_mutation_changes_one_place_and_names_tests_that_are_there(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new
    assert all((ROOT / test).exists() for test in mutant.tests.split())
