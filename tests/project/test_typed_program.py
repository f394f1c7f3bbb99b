"""The program whose types `make lint` checks, as those of a user's own, does what it says."""

from __future__ import annotations

import typed_program


def test_the_program_whose_types_are_checked_runs() -> None:
    assert 0 < typed_program.main() < 3
