"""What lies in the compile cache is loaded if it is what was built, and built again otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuopt.backends.cpu.compiler import load, read_library, write_library

pytestmark = [
    pytest.mark.cxx,
    pytest.mark.skipif(sys.platform != "linux", reason="shared libraries are Linux's here"),
]

_STEP = """
import logging, sys
import numpy as np, gpuopt
logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(message)s")
v = gpuopt.Variable(np.zeros(400_000, np.float32))
gpuopt.MomentumOptimizer(1.0, 0.9).apply_gradients([(np.ones(400_000, np.float32), v)])
assert (v.numpy() == -1).all()
"""


def step(timeout_s: float = 60, **environment: str) -> str:
    """Does a large step in a process of its own, and returns what it has logged."""
    finished = subprocess.run(
        [sys.executable, "-c", _STEP],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "GPUOPT_COMPILED": "1", **environment},
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the file that a first step leaves, and that a second one finds."""
    folder = tmp_path_factory.mktemp("cache")
    assert "building" in step(GPUOPT_CACHE_DIR=str(folder))
    assert "building" not in step(GPUOPT_CACHE_DIR=str(folder))
    (file,) = folder.iterdir()
    return file


@pytest.mark.parametrize("spoil", ["cut short", "a pipe"])
def test_a_step_builds_what_is_spoilt_again(spoil: str, built: Path, tmp_path: Path) -> None:
    file = tmp_path / built.name
    if spoil == "a pipe":
        os.mkfifo(file)
    else:
        file.write_bytes(built.read_bytes()[:8192])  # loading this would end in SIGBUS
    log = step(GPUOPT_CACHE_DIR=str(tmp_path))
    assert f"WARNING {file} is not" in log
    assert "building" in log
    assert list(tmp_path.iterdir()) == [file]
    assert "building" not in step(GPUOPT_CACHE_DIR=str(tmp_path))


CONTENT = bytes(range(256)) * 40


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """Returns a file that was kept, to be spoilt."""
    path = tmp_path / "library.so"
    write_library(path, b"key", CONTENT)
    assert read_library(path, b"key") == CONTENT
    yield path
    assert read_library(path, b"key") is None
    write_library(path, b"key", CONTENT)
    assert read_library(path, b"key") == CONTENT
    assert path in tmp_path.iterdir()
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 4096, -33, -32, -31, -1])
def test_a_file_cut_short_is_not_taken(size: int, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:size])


@pytest.mark.parametrize("offset", [0, 5000, -33, -32, -1])
def test_a_file_with_another_byte_is_not_taken(offset: int, file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def test_another_library_of_our_own_is_not_taken_for_this_one(file: Path) -> None:
    write_library(file, b"another key", CONTENT)


def test_a_pipe_is_not_waited_for(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def test_a_link_is_not_followed(file: Path, tmp_path: Path) -> None:
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_may_have_written_is_not_taken(mode: int, file: Path) -> None:
    file.chmod(mode)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_another_users_file_is_not_taken(file: Path) -> None:
    os.chown(file, 65534, 65534)


def test_an_open_umask_lets_nobody_else_write(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_library(tmp_path / "library.so", b"key", CONTENT)
    finally:
        os.umask(before)
    assert read_library(tmp_path / "library.so", b"key") == CONTENT


def test_a_folder_in_its_place_leaves_the_rule_compiled(built: Path, tmp_path: Path) -> None:
    (tmp_path / built.name).mkdir()
    log = step(GPUOPT_CACHE_DIR=str(tmp_path))
    assert "building" in log
    assert "cannot be kept, and is built again next time" in log
    assert "numpy is used" not in log
    assert [path.name for path in tmp_path.iterdir()] == [built.name]


def test_without_a_folder_nothing_is_left_in_the_temporary_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    nowhere = str(tmp_path / "file" / "cache")
    log = step(GPUOPT_CACHE_DIR=nowhere, TMPDIR=str(temporary))
    assert "building" in log
    assert "numpy is used" not in log
    assert list(temporary.iterdir()) == []


def test_a_loaded_library_does_not_mind_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what is cut short afterwards, nor what gets its place."""
    compiled = {}
    for number in (1, 2):
        source = tmp_path / f"{number}.c"
        source.write_text(f"int number(void) {{ return {number}; }}")
        library = tmp_path / f"{number}.so"
        command = ["gcc", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        compiled[number] = library.read_bytes()
    file = tmp_path / "cached.so"
    loaded = []
    for from_memory in (True, True, False, False):
        if not from_memory:
            monkeypatch.delattr(os, "memfd_create", raising=False)
        for number, content in compiled.items():
            write_library(file, b"key", content)
            found = read_library(file, b"key")
            assert found == content
            loaded.append((number, load(found)))
        with file.open("r+b") as opened:
            opened.truncate(1000)
    assert [library.number() for _, library in loaded] == [number for number, _ in loaded]


def test_processes_that_build_at_once_end_with_one_good_file(tmp_path: Path) -> None:
    environment = {**os.environ, "GPUOPT_COMPILED": "1", "GPUOPT_CACHE_DIR": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", _STEP], env=environment, stderr=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]
    assert "building" not in step(GPUOPT_CACHE_DIR=str(tmp_path))
