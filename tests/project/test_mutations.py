"""tests/support/mutations.toml keeps up with the code that it breaks."""

from __future__ import annotations

from pathlib import Path

from mutations import mutants

ROOT = Path(__file__).parents[2]


def test_each_mutation_changes_one_place_and_names_tests_that_are_there() -> None:
    listed = list(mutants())
    texts = {file: (ROOT / file).read_text() for file in {each.file for each in listed}}
    tests = {test for each in listed for test in each.tests.split()}
    assert [test for test in sorted(tests) if not (ROOT / test).exists()] == []
    wrong = [
        (each.what, each.file)
        for each in listed
        if texts[each.file].count(each.old) != 1 or each.old == each.new
    ]
    assert wrong == []
