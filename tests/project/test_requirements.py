"""Tests that need something skip with a reason, or fail where GPUOPT_REQUIRE says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def run_rule_parity(tmp_path: Path, require: str) -> subprocess.CompletedProcess[str]:
    """Runs a test that needs g++ where there is none."""
    environment = {**os.environ, "PATH": str(tmp_path), "GPUOPT_REQUIRE": require}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    test = f"{TESTS / 'rules/test_rule_parity.py'}::test_headers_and_rules_belong_together"
    return subprocess.run(
        [*command, test], env=environment, cwd=TESTS.parent, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("require", "status", "words"),
    [
        ("", 0, "g++ is not installed"),
        ("cxx", 1, "GPUOPT_REQUIRE asks for it"),
        ("cxy", 4, "GPUOPT_REQUIRE names cxy"),
    ],
)
def test_a_missing_compiler_skips_with_a_reason_or_fails_where_it_is_required(
    tmp_path: Path, require: str, status: int, words: str
) -> None:
    finished = run_rule_parity(tmp_path, require)
    assert finished.returncode == status
    assert words in finished.stdout + finished.stderr
