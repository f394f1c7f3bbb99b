"""What users may call is written down, so that a change of it is seen and meant."""

from __future__ import annotations

import difflib

import public_api


def test_public_names_and_signatures_are_those_that_are_written_down() -> None:
    written = public_api.PAGE.read_text().splitlines()
    changes = difflib.unified_diff(
        written, public_api.listing().splitlines(), "as written", "as they are", lineterm="", n=0
    )
    shown = "\n".join(changes)
    assert not shown, (
        f"public names have changed; if users should see that, say so in CHANGELOG.md, and write "
        f"them anew by {public_api.COMMAND}:\n{shown}"
    )
