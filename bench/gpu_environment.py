"""Makes a virtual environment on top of a machine's packages, without a network.

The environment sees the machine's packages, also those of an active virtual environment, and does
not change them. Further packages that gpuopt and its tests need come from a folder of wheels.

    python3 bench/gpu_environment.py FOLDER [WHEELS]
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FOR_TESTS = ("pytest>", "hypothesis")


def main(folder: str, wheels: str | None = None) -> int:
    """Returns pip's status: not 0 if a package is neither on the machine nor among the wheels."""
    venv.create(folder, with_pip=False)
    [packages] = Path(folder).glob("lib/python*/site-packages")
    seen = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "machine.pth").write_text("\n".join(seen))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [
        *project["project"]["dependencies"],
        *(need for need in project["dependency-groups"]["test"] if need.startswith(_FOR_TESTS)),
    ]
    sources = ["--no-index", *([] if wheels is None else ["--find-links", wheels])]
    pip = [str(Path(folder, "bin", "python")), "-m", "pip", "install", "--quiet"]
    return subprocess.run([*pip, "--disable-pip-version-check", *sources, *needed]).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
