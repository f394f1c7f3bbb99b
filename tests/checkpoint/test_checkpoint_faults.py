"""Whatever happens during a save, the newest checkpoint is the old one or the new one, in full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parents[1] / "support"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="injects Linux's system calls")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("shim") / "fault_injection.so"
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-O1", "-o", str(built)]
    subprocess.run([*command, str(HERE / "fault_injection.c"), "-ldl"], check=True)
    return built


def run(program: str, folder: Path, *arguments: Any, prefix: Any = (), **environment: str) -> Any:
    command = [sys.executable, str(HERE / "checkpoint_faults.py"), program, str(folder)]
    finished = subprocess.run(
        [*prefix, *command, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout)


@pytest.mark.cxx
@pytest.mark.parametrize("numbered", [True, False])
def test_a_save_survives_the_failure_of_any_system_call(
    shim: Path, tmp_path: Path, numbered: bool
) -> None:
    result = run("failing_calls", tmp_path, numbered, LD_PRELOAD=str(shim))
    assert result["errors"] >= 20
    for order in result["orders"]:
        # The bytes are on the disk before the name is theirs, and the name after that.
        calls = [call for call in order.split() if call not in ("close", "open")]
        renamed = calls.index("rename")
        assert calls[renamed - 1 : renamed + 2] == ["fsync", "rename", "fsync"]
        assert "write" in calls[:renamed]
        assert "unlink" not in calls[: renamed + 2]


@pytest.mark.cxx
@pytest.mark.parametrize("numbered", [True, False])
def test_no_checkpoint_is_lost_if_the_process_is_killed_at_any_system_call_of_a_save(
    shim: Path, tmp_path: Path, numbered: bool
) -> None:
    result = run("killed_at_each_call", tmp_path, numbered, LD_PRELOAD=str(shim))
    assert result["old"] >= 5
    assert result["new"] >= 2


def test_no_checkpoint_is_lost_if_the_process_is_killed_at_random_moments(
    tmp_path: Path,
) -> None:
    times = 200 if os.environ.get("GPUOPT_FULL") else 60
    result = run("killed_at_random_moments", tmp_path, times)
    assert result["times"] == times
    assert result["distinct"] > 10


def test_a_full_and_then_read_only_disk_loses_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = f"mount -t tmpfs -o size=2m none {folder}"
    namespace = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*namespace, mount], capture_output=True).returncode != 0:
        pytest.skip("no small file system can be mounted here")
    script = f'{mount} && exec "$0" "$@"'
    result = run("full_disk", folder, prefix=[*namespace, script])
    assert result["saved"] >= 3
    assert "could not be saved" in result["full"]
    assert "No space left" in result["full"]
    assert "Read-only file system" in result["read_only"]
