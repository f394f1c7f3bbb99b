"""What users may call is written down, so that a change of it is seen and meant."""

from __future__ import annotations

import difflib
import subprocess
import sys

import public_api
import pytest

import gpuopt


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


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Adam", ["AdamOptimizer"]),
        ("RMSprop", ["RMSPropOptimizer"]),
        ("AdamOptimiser", ["AdamOptimizer"]),
        ("CosineDecay", ["cosine_decay"]),
        ("Variabel", ["Variable"]),
        ("SGD", ["ScheduleFreeSGDOptimizer", "TorchSGDOptimizer"]),
        ("x", []),
        ("__wrapped__", []),
    ],
)
def test_a_name_that_is_not_there_is_answered_by_those_near_it(name: str, near: list[str]) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(gpuopt, name)
    expected = f"module 'gpuopt' has no attribute '{name}'"
    assert str(raised.value) == (f"{expected}; it has {', '.join(near)}" if near else expected)
    assert raised.value.name == name


def test_names_near_it_are_looked_for_only_where_one_is_missing() -> None:
    program = (
        "import sys, gpuopt; gpuopt.AdamOptimizer; before = set(sys.modules); "
        "getattr(gpuopt, 'Adam', None); print('gpuopt.near_names' in before, "
        "'gpuopt.near_names' in sys.modules)"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    assert subprocess.check_output(command, text=True) == "False True\n"
