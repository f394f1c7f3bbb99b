"""Operations beside files that somebody else has planted, damaged or forged."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forged_checkpoint import forged

import gpuopt
from fuzzing.saves import Files
from fuzzing.world import World
from gpuopt.backends.cpu.compiler import read_library, write_library

LIMIT_S = 15.0
# Names of which some part is no text that can be read again, or that the format needs itself.
UNREADABLE = ["__metadata__", "loss\udc80", "\ud83d\ude00", "a/\udfff/b"]
FORGED = [
    {"saved_at": "9" * 4300},
    {"saved_at": "soon"},
    {"checksums": "[1]"},
    {"checksums": "no JSON"},
    {"description": "[" * 100_000 + "]" * 100_000},
]


def unreadable_name(world: World, files: Files) -> str:
    """A name that no reader would take is refused before anything is written."""
    files.finish_all()
    name = world.choose(UNREADABLE)
    saver = gpuopt.Saver({name: world.steps}, optimizers=[])
    try:
        saver.save(files.folders[0] / "m", 80)
    except ValueError:
        return f"a save with the name {name!r}: refused"
    raise AssertionError(f"not refused: a save with the name {name!r}")


def save_beside_planted_files(world: World, files: Files) -> str:
    """A save and a look for the newest neither wait, nor follow a link, nor fail."""
    files.finish_all()
    folder = world.choose(files.folders)
    victim = world.folder / "victim"
    victim.write_text("precious")
    planted: list[Path] = []
    what = world.choose(["link", "link", "pipe", "forgery", "forgery"])
    saver = gpuopt.Saver({"steps": world.steps}, optimizers=[])
    if what == "link":
        for process in (f"{os.getpid():016x}", f"{os.getpid()}"):
            planted.append(folder / f".m-82.safetensors.{process}.partial")
            planted[-1].symlink_to(victim)
    elif what == "pipe" and hasattr(os, "mkfifo"):
        planted.append(folder / "m-81.safetensors")
        os.mkfifo(planted[0])
    else:
        metadata = world.choose(FORGED)
        planted.append(Path(gpuopt.Saver({"w": world.steps}, optimizers=[]).save(folder / "m", 81)))
        planted[0].write_bytes(forged(planted[0], **metadata))
        what += f" of {next(iter(metadata))}"

    def work() -> tuple[str, str | None]:
        return saver.save(folder / "m", 82), gpuopt.latest_checkpoint(folder)

    saved, latest = _in_time(work, planted)
    assert latest == saved
    saver.restore(saved)
    Path(saved).unlink()
    assert victim.read_text() == "precious"
    return f"a save beside a {what}"


def damaged_library(world: World, files: Files) -> str:
    """A library in the compile cache is what was built, or it is not read."""
    path, key = world.folder / "library.so", world.rng.bytes(8)
    content = world.rng.bytes(int(world.rng.integers(1, 500)))
    write_library(path, key, content)
    assert read_library(path, key) == content
    whole = path.read_bytes()
    how = world.choose(["cut short", "replaced", "changed", "of another key", "a link"])
    if how == "cut short":
        path.write_bytes(whole[: world.rng.integers(len(whole))])
    elif how == "replaced":
        path.write_bytes(world.rng.bytes(len(whole)))
    elif how == "changed":
        damaged = bytearray(whole)
        damaged[world.rng.integers(len(whole))] ^= 1 << int(world.rng.integers(8))
        path.write_bytes(damaged)
    elif how == "a link":
        path.rename(world.folder / "moved.so")
        path.symlink_to(world.folder / "moved.so")
    found = read_library(path, key + b"1" if how == "of another key" else key)
    assert found is None, f"a library was loaded that is {how}"
    path.unlink()
    write_library(path, key, content)
    assert read_library(path, key) == content
    return f"a library {how}"


def _in_time(
    work: Callable[[], tuple[str, str | None]], planted: list[Path]
) -> tuple[str, str | None]:
    """Runs some work, and removes what is planted; whoever waits for that can go on then."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        try:
            return done.result(LIMIT_S)
        finally:
            for path in planted:
                if path.is_fifo():
                    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
                path.unlink()
