"""Runs Python under a sanitizer, for kernels that the emulator runs.

python tests/support/emulator/sanitized.py address -m pytest ...    and undefined behaviour
python tests/support/emulator/sanitized.py thread -m pytest ...
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

SETTINGS = {
    "address": {
        # Python itself never gives some of its memory back.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    },
    # Python and numpy are not instrumented: what they do says nothing about the kernels.
    "thread": {"TSAN_OPTIONS": "halt_on_error=1:exitcode=66:ignore_noninstrumented_modules=1"},
}
RUNTIMES = {"address": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}


def sanitized(sanitize: str, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the command and the environment that run Python under a sanitizer."""
    # A sanitizer must find libstdc++ when it starts, for the sake of libraries that throw.
    libraries = [_path_of(name) for name in (*RUNTIMES[sanitize], "libstdc++.so.6")]
    environment = {
        **os.environ,
        **SETTINGS[sanitize],
        "GPUOPT_EMULATOR_SANITIZE": sanitize,
        "LD_PRELOAD": " ".join(libraries),
        # Each of Python's own objects in memory of its own.
        "PYTHONMALLOC": "malloc",
    }
    return [*_fixed_addresses(), sys.executable, *arguments], environment


def _path_of(library: str) -> str:
    return subprocess.check_output(["g++", f"-print-file-name={library}"], text=True).strip()


def _fixed_addresses() -> list[str]:
    """The sanitizers of GCC 13 and older cannot start where addresses are randomised by much."""
    prefix = ["setarch", "--addr-no-randomize"]
    if (
        shutil.which("setarch")
        and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    ):
        return prefix
    return []


if __name__ == "__main__":
    command, environment = sanitized(sys.argv[1], sys.argv[2:])
    os.execvpe(command[0], command, environment)
