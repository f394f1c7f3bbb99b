"""What autograd does for code that is not ours: the same to the bit before and after our losses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SNAPSHOT = Path(__file__).parents[1] / "support" / "autograd_snapshot.py"


def test_autograd_is_the_same_before_and_after_a_loss_of_ours() -> None:
    program = f"import runpy; runpy.run_path({str(SNAPSHOT)!r}, run_name='__main__')"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    [compared] = ran.stdout.splitlines()
    assert int(compared.removeprefix("compared ")) > 4000
