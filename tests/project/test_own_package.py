"""The package that docs/guides/own_package.md shows is built, and works where it is installed."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from emulator import EmulatorLauncher

from gpuopt import IndexedSlices, Variable

pytest.importorskip("hatchling", reason="hatchling, which builds the package, is not installed")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "own_package.md"
BUILD = "import hatchling.build as b; b.build_wheel('wheel')"


def files_of_the_page() -> dict[str, str]:
    """Returns what each titled block holds, by its title."""
    blocks = re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE.read_text(), re.M | re.S)
    return dict(blocks)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name, text in files_of_the_page().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def installed(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel of the page's package is installed, and nothing else."""
    subprocess.run([sys.executable, "-c", BUILD], cwd=project, check=True, capture_output=True)
    [wheel] = (project / "wheel").iterdir()
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder)
    return folder


@pytest.fixture
def package(installed: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(installed)
    return importlib.import_module("averaged_sign")


def values_after_steps(package: ModuleType, device: str) -> np.ndarray:
    """A dense and a sparse variable's, joined, after two steps of each."""
    optimizer = package.AveragedSignOptimizer(0.5)
    dense = Variable(np.ones(3, np.float32), device=device)
    table = Variable(np.ones((4, 2), np.float32), device=device)
    for factor in (1, -0.1):
        slices = IndexedSlices(np.full((2, 2), factor, np.float32), [3, 1])
        gradient = factor * np.float32([1, -1, 0])
        optimizer.apply_gradients([(gradient, dense), (slices, table)])
    return np.concatenate([dense.numpy(), table.numpy().ravel()])


EXPECTED = [0, 2, 1, 1, 1, 0, 0, 1, 1, 0, 0]


def test_the_page_lists_the_files_that_it_shows() -> None:
    listing = re.findall(r"^      (\S+)$", PAGE.read_text(), re.M)
    assert listing == list(files_of_the_page())


def test_the_wheel_holds_the_header(installed: Path) -> None:
    found = {
        path.relative_to(installed).as_posix() for path in installed.glob("averaged_sign/**/*")
    }
    assert "averaged_sign/kernels/averaged_sign.cuh" in found


@pytest.mark.cxx
def test_the_packages_own_test_passes_where_it_is_installed(
    project: Path, installed: Path, tmp_path: Path
) -> None:
    test = tmp_path / "test_averaged_sign.py"
    test.write_text((project / test.name).read_text())
    path = os.pathsep.join([str(installed), str(ROOT)])
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test.name],
        env={**os.environ, "PYTHONPATH": path, "GPUOPT_COMPILED": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "2 passed" in finished.stdout


def test_the_packages_rule_has_the_same_values_in_every_form_of_the_cpu(
    package: ModuleType, every_cpu_form: str
) -> None:
    np.testing.assert_array_equal(values_after_steps(package, "cpu"), EXPECTED)


@pytest.mark.emulator
def test_the_packages_rule_has_the_same_values_on_a_gpu(
    package: ModuleType, emulated_gpus: list[EmulatorLauncher]
) -> None:
    np.testing.assert_array_equal(values_after_steps(package, "gpu:0"), EXPECTED)
    assert emulated_gpus[0].launches
