"""bench/gpu_environment.py adds what a machine lacks, and says what that is; no network is used."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.internal

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "gpu_environment.py"
RUNTIME = {"numpy", "autograd", "ml_dtypes", "rich", "safetensors", "xxhash"}
OF_TESTS = {"pytest", "pytest-xdist", "pytest-benchmark", "hypothesis"}
# A machine that has all of it.
COMPLETE = {
    **{"numpy": "2.5.2", "autograd": "1.9.1", "ml_dtypes": "0.6.0", "rich": "15.0.0"},
    **{"safetensors": "0.8.0", "xxhash": "3.8.2", "pytest": "9.2.0", "pytest-xdist": "3.8.0"},
    **{"pytest-benchmark": "5.3.1", "hypothesis": "6.170.17", "cupy-cuda13x": "14.2.0"},
    "torch": "2.13.0+cu130",
}


def make_wheel(folder: Path, name: str, version: str, needs: Sequence[str] = ()) -> Path:
    """Makes a package whose module holds its version."""
    stem = f"{name.replace('-', '_')}-{version}"
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name.replace('-', '_')}.py", f"version = {version!r}\n")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        metadata += "".join(f"Requires-Dist: {each}\n" for each in needs)
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
        wheel.writestr(f"{stem}.dist-info/WHEEL", tags)
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return folder / f"{stem}-py3-none-any.whl"


def make_machine(folder: Path, packages: Mapping[str, str]) -> str:
    """Returns a Python with these packages, and pip."""
    venv.create(folder / "machine", with_pip=False)
    [site] = (folder / "machine").glob("lib/python*/site-packages")
    for name, version in packages.items():
        with zipfile.ZipFile(make_wheel(folder / "packages", name, version)) as wheel:
            wheel.extractall(site)
    (site / "pip").symlink_to(Path(sysconfig.get_path("purelib")) / "pip")
    return str(folder / "machine" / "bin" / "python")


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True
    )


def lines_of(finished: subprocess.CompletedProcess[str]) -> list[str]:
    """Returns the list, without the line of what packages do not bring."""
    assert not finished.stderr
    lines = [line.strip() for line in finished.stdout.splitlines()]
    return [line for line in lines if not line.startswith("compute-sanitizer")]


def versions_on(python: str, folder: Path, *names: str) -> list[str]:
    """Returns the versions of modules that a Python finds whose PYTHONPATH has a folder."""
    imports = f"import {', '.join(names)}; print({', '.join(f'{name}.version' for name in names)})"
    return run([python, "-c", imports], PYTHONPATH=str(folder)).stdout.split()


def test_a_machine_that_lacks_nothing_gets_nothing(tmp_path: Path) -> None:
    python = make_machine(tmp_path, COMPLETE)
    tool = tmp_path / "compute-sanitizer"
    tool.touch(mode=0o755)
    finished = run([python, str(SCRIPT), str(tmp_path / "env")], PATH=str(tmp_path))
    assert (finished.returncode, lines_of(finished)) == (0, ["nothing is missing"])
    assert not (tmp_path / "env").exists()


def test_what_is_missing_or_does_not_fit_comes_from_wheels_but_for_numpy_cupy_and_torch(
    tmp_path: Path,
) -> None:
    """The newest wheel that pyproject.toml allows is taken; the machine's packages stay."""
    packages = {**COMPLETE, "xxhash": "4.1.0", "numpy": "1.26.4", "cupy-cuda13x": "13.2.0"}
    for name in ("autograd", "torch", "pytest-xdist"):
        del packages[name]
    python = make_machine(tmp_path, packages)
    wheels = tmp_path / "wheels"
    for name, version in (
        *(("xxhash", "3.8.2"), ("xxhash", "4.1.0"), ("autograd", "1.9.1"), ("numpy", "2.6.0")),
        *(("cupy", "14.2.0"), ("torch", "2.15.0")),
    ):
        make_wheel(wheels, name, version)
    finished = run([python, str(SCRIPT), str(tmp_path / "env"), "--wheels", str(wheels)])
    assert finished.returncode == 1  # gpuopt refuses this CuPy
    title, *lines = lines_of(finished)
    assert title == "missing, too old or too new on this machine:"
    absent = "not here; not brought: No matching distribution found for"
    assert lines == [
        "numpy>=2.0,<3: 1.26.4 is here",
        "autograd>=1.9.1,<1.10: not here; brought from wheels",
        "xxhash>=3.5,<4: 4.1.0 is here; brought from wheels",
        f"pytest-xdist>=3.6: {absent} pytest-xdist>=3.6",
        "cupy>=13.3,<15: 13.2.0 is here",
        "torch>=2.13: not here",
    ]
    found = versions_on(python, tmp_path / "env", "numpy", "xxhash", "autograd", "cupy_cuda13x")
    assert found == ["1.26.4", "3.8.2", "1.9.1", "13.2.0"]
    assert versions_on(python, tmp_path, "xxhash") == ["4.1.0"]


def test_what_a_package_needs_comes_with_it_unless_the_machine_has_it(tmp_path: Path) -> None:
    machine = {**COMPLETE, "pluggy": "1.3.0", "iniconfig": "2.0.0"}
    del machine["pytest"]
    python = make_machine(tmp_path, machine)
    wheels = tmp_path / "wheels"
    needs = ["pluggy<2,>=1.5", "iniconfig>=1", "pygments>=2", "colorama; sys_platform=='win32'"]
    make_wheel(wheels, "pytest", "9.2.0", [*needs, "attrs; extra == 'dev'"])
    for name, version in (
        *(("pluggy", "1.7.0"), ("pluggy", "2.0.0"), ("iniconfig", "2.3.1")),
        *(("pygments", "2.21.0"), ("attrs", "26.1.0")),
    ):
        make_wheel(wheels, name, version)
    finished = run([python, str(SCRIPT), str(tmp_path / "env"), "--wheels", str(wheels)])
    assert lines_of(finished)[1:] == ["pytest>=9: not here; brought from wheels"]
    brought = {path.name for path in (tmp_path / "env").glob("*.dist-info")}
    assert brought == {
        f"{each}.dist-info" for each in ("pytest-9.2.0", "pluggy-1.7.0", "pygments-2.21.0")
    }


def test_fetched_wheels_are_of_the_projects_own_requirements_without_numpy(tmp_path: Path) -> None:
    index = tmp_path / "index"
    needs = {**COMPLETE, "numpy": "2.5.5"}
    for name, version in needs.items():
        make_wheel(index, name, version)
    make_wheel(index, "xxhash", "4.1.0")
    finished = run(
        [sys.executable, str(SCRIPT), "--fetch", str(tmp_path / "wheels"), "--python", "3.12"],
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(index),
        PIP_CONFIG_FILE=os.devnull,
    )
    assert finished.returncode == 0, finished.stderr
    fetched = {path.name.split("-")[0] for path in (tmp_path / "wheels").glob("*.whl")}
    assert fetched == {name.replace("-", "_") for name in (RUNTIME | OF_TESTS) - {"numpy"}}
    assert (tmp_path / "wheels" / "xxhash-3.8.2-py3-none-any.whl").exists()
