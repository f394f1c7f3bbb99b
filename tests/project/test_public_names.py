"""What users may call is written down, so that a change of it is seen and meant."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import public_api
import pytest
from internal_names import INTERNAL

import gpuopt
from gpuopt.near_names import OTHER_LIBRARIES, find_near

ROOT = Path(__file__).parents[2]
# What something else on the pages has, too: another class, a library, or an argument.
NAMES_OF_OTHERS = {
    *("apply_gradients", "betas", "check", "close", "join", "masters", "memory", "slot_dtype"),
    *("start", "state", "stop", "variables"),
}


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


def test_internal_members_are_there_and_no_page_tells_users_of_them() -> None:
    classes = {
        base
        for module in map(importlib.import_module, public_api.MODULES)
        for name in module.__all__
        if isinstance(exported := getattr(module, name), type)
        for base in exported.__mro__
    }
    of_instances = {"row_checks", "this_thread"}
    for cls in classes:
        for member in INTERNAL.get(cls.__name__, ()):
            assert member in of_instances or hasattr(cls, member) or member in annotations_of(cls)
    assert set(INTERNAL) <= {cls.__name__ for cls in classes}
    reference = [*(ROOT / "docs" / "reference").glob("*.md")]
    guides = {*(ROOT / "docs").rglob("*.md")} - {*(ROOT / "docs" / "decisions").glob("*.md")}
    code = [ROOT / "README.md", *(ROOT / "examples").glob("*.py")]
    pages = [*sorted(guides - {*reference, ROOT / "docs" / "architecture.md"}), *code]
    members = set().union(*INTERNAL.values()) - NAMES_OF_OTHERS
    named = re.compile(rf"(?:\.|`)({'|'.join(sorted(members))})(?=[(`])")
    found = {page.name: named.findall(page.read_text()) for page in pages}
    assert not {name: those for name, those in found.items() if those}


def annotations_of(cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in inspect.get_annotations(base)}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Adam", ["AdamOptimizer"]),
        ("RMSprop", ["RMSPropOptimizer"]),
        ("AdamOptimiser", ["AdamOptimizer"]),
        ("CosineDecay", ["cosine_decay"]),
        ("Variabel", ["Variable"]),
        ("SGD", ["GradientDescentOptimizer", "MomentumOptimizer", "TorchSGDOptimizer"]),
        ("NAdam", ["NadamOptimizer"]),
        ("AdamW", ["AdamWOptimizer"]),
        ("clip_grad_norm_", ["clip_by_global_norm"]),
        ("CosineAnnealingLR", ["cosine_decay"]),
        ("GradScaler", ["LossScaleOptimizer", "DynamicLossScale"]),
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


@pytest.mark.parametrize("name", sorted(OTHER_LIBRARIES))
def test_what_another_library_calls_so_is_there_by_the_name_it_has_here(name: str) -> None:
    assert set(OTHER_LIBRARIES[name]) <= set(gpuopt.__all__)
    assert find_near(name, gpuopt.__all__) == list(OTHER_LIBRARIES[name])


def test_names_near_it_are_looked_for_only_where_one_is_missing() -> None:
    program = (
        "import sys, gpuopt; gpuopt.AdamOptimizer; before = set(sys.modules); "
        "getattr(gpuopt, 'Adam', None); print('gpuopt.near_names' in before, "
        "'gpuopt.near_names' in sys.modules)"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    assert subprocess.check_output(command, text=True) == "False True\n"
