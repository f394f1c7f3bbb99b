"""What tests compile is compiled once, and waits for nobody who hangs."""

from __future__ import annotations

import time
from pathlib import Path

import build_cache
import pytest

pytestmark = pytest.mark.internal

fcntl = pytest.importorskip("fcntl")


def test_a_lock_that_is_never_released_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_cache, "LONGEST_BUILD_S", 0.3)
    with (tmp_path / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.monotonic()
        with build_cache.locked(tmp_path / "lock"):
            assert time.monotonic() - began >= 0.3
