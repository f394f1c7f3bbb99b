"""Operations that save and restore: the model knows what is in each file, and which files go."""

from __future__ import annotations

import copy
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

import gpuopt
from fuzzing.steps import apply, random_call
from fuzzing.world import Place, Trainer, World, as_float64

# Elements: to write them takes some milliseconds.
BALLAST = 500_000


class Snapshot(NamedTuple):
    """What a saver saves, in float64.

    Attributes:
        values: By label.
        states: Each optimizer's, of the same labels.
    """

    values: dict[str, np.ndarray]
    count: int
    states: dict[str, Any]

    def only(self, labels: list[str]) -> Snapshot:
        """Leaves out the slots of other arrays."""
        states = {
            trainer: (
                {
                    name: {label: slots[label] for label in labels if label in slots}
                    for name, slots in by_name.items()
                },
                others,
            )
            for trainer, (by_name, others) in self.states.items()
        }
        return Snapshot(self.values, self.count, states)


class SaverWithModel:
    """A Saver, and which files it should keep.

    Attributes:
        places: What it saves.
        kept: (path, number of the save) of its files, the newest last.
        pending: A save that goes on, with what it will return, its path, number and snapshot.
    """

    def __init__(self, places: list[Place], trainers: list[Trainer], steps: Any, most: int) -> None:
        self.places, self.most = places, most
        named = {place.label: place.handle for place in places}
        self.real = gpuopt.Saver(
            {**named, "steps": steps},
            max_to_keep=most,
            optimizers=[trainer.real for trainer in trainers],
        )
        self.kept: list[tuple[Path, int]] = []
        self.pending: tuple[Future[str], str, Path, int, Snapshot] | None = None

    @property
    def labels(self) -> list[str]:
        return [place.label for place in self.places]


class Files:
    """The checkpoints of a program.

    Attributes:
        content: (number of the save, snapshot) by path.
        savers: All of them.
        states: Results of `state_dict`, each with the trainer, the places and the model's state.
        prefixes: Of paths, in folders that exist.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.content: dict[Path, tuple[int, Snapshot]] = {}
        self.savers: list[SaverWithModel] = []
        self.states: list[tuple[Trainer, list[Place], Any, Any]] = []
        self.num_saves = 0
        self.folders = [world.folder / "a", world.folder / "b"]
        for folder in self.folders:
            folder.mkdir()
        (world.folder / "link").symlink_to(world.folder / "a")
        os.chdir(self.folders[0])

    def drop(self, memory: Any) -> None:
        """Forgets savers that hold arrays of a memory that goes."""
        self.finish_all()
        self.savers = [
            saver for saver in self.savers if all(p.memory is not memory for p in saver.places)
        ]

    def snapshot(self, places: list[Place]) -> Snapshot:
        labels = [place.label for place in places]
        values = {place.label: place.expected.copy() for place in places}
        states = {trainer.label: trainer.model.state() for trainer in self.world.trainers}
        return Snapshot(values, self.world.count, states).only(labels)

    def finish(self, saver: SaverWithModel) -> None:
        if saver.pending is not None:
            future, spelled, path, number, snapshot = saver.pending
            saver.pending = None
            assert future.result(60) == spelled
            self.note(saver, path, number, snapshot)

    def finish_all(self) -> None:
        for saver in self.savers:
            self.finish(saver)

    def note(self, saver: SaverWithModel, path: Path, number: int, snapshot: Snapshot) -> None:
        """Does with the model's files what a save does."""
        self.content[path] = number, snapshot
        saver.kept = [*(entry for entry in saver.kept if entry[0] != path), (path, number)]
        while saver.most and len(saver.kept) > saver.most:
            old, its_number = saver.kept.pop(0)
            if old in self.content and self.content[old][0] == its_number:
                del self.content[old]
        tensors = load_file(path)
        for label, value in snapshot.values.items():
            np.testing.assert_array_equal(as_float64(tensors[label]), value, err_msg=label)
        assert tensors["steps"] == snapshot.count

    def check(self) -> None:
        if any(saver.pending for saver in self.savers):
            return
        found = {folder / name for folder in self.folders for name in os.listdir(folder)}
        assert found == set(self.content), (
            f"files {sorted(map(str, found))}, expected {sorted(map(str, self.content))}"
        )


def make_saver(world: World, files: Files, most: int) -> SaverWithModel:
    places = [place for place in world.places if world.happens(0.7)]
    saver = SaverWithModel(places, world.trainers, world.steps, most)
    files.savers.append(saver)
    del files.savers[:-3]
    return saver


def target(world: World, files: Files) -> tuple[str, int, Path]:
    """Chooses a path: how it is spelled, the step, and the file that it is."""
    folder = world.choose([*files.folders, files.folders[0], files.folders[0]])
    step = int(world.rng.integers(4))  # few: savers replace each other's files
    spelled = world.choose(["absolute", "relative", "link"])
    path = folder / "m"
    if spelled == "relative":
        prefix = os.path.relpath(path)
    elif spelled == "link" and folder == files.folders[0]:
        prefix = str(world.folder / "link" / "m")
    else:
        prefix = str(path)
    return prefix, step, path.with_name(f"m-{step}.safetensors")


def save(world: World, files: Files) -> str:
    if len(files.savers) < 2 or world.happens(0.1):
        files.finish_all()
        make_saver(world, files, int(world.choose([1, 2, 2, 3, 0])))
    saver = world.choose(files.savers)
    prefix, step, path = target(world, files)
    # Which of two saves to one file ends last is left open.
    pending = {other.pending[2] for other in files.savers if other.pending is not None}
    if path in {*files.content, *pending} or saver.pending is not None or world.happens(0.3):
        files.finish_all()
    snapshot, number = files.snapshot(saver.places), files.num_saves
    files.num_saves += 1
    what = f"saver {files.savers.index(saver)} of {saver.labels} to {prefix}-{step}"
    if world.happens(0.4):
        future = saver.real.save_async(prefix, step)
        saver.pending = future, f"{prefix}-{step}.safetensors", path, number, snapshot
        return f"save_async, {what}"
    saved = saver.real.save(prefix, step)
    assert saved == f"{prefix}-{step}.safetensors"
    files.note(saver, path, number, snapshot)
    if not any(other.pending for other in files.savers):
        latest = gpuopt.latest_checkpoint(path.parent)
        assert latest is not None
        assert Path(latest).resolve() == path
    return f"save, {what}"


def finish_saves(world: World, files: Files) -> str:
    files.finish_all()
    return "wait for saves"


def change_folder(world: World, files: Files) -> str:
    folder = world.choose(files.folders)
    os.chdir(folder)
    return f"chdir {folder.name}"


def restore(world: World, files: Files) -> str:
    files.finish_all()
    if not files.savers or not files.content:
        return save(world, files)
    saver = world.choose(files.savers)
    path = world.choose(sorted(files.content))
    snapshot = files.content[path][1].only(saver.labels)
    spelled = world.choose([str(path), os.path.relpath(path)])
    what = f"saver {files.savers.index(saver)} of {saver.labels} restores {path.name}"
    is_there = all(label in snapshot.values for label in saver.labels)
    fits = all(
        trainer.model.accepts(snapshot.states[trainer.label], saver.labels)
        for trainer in world.trainers
    )
    if not is_there or not fits:
        try:
            saver.real.restore(spelled)
        except gpuopt.CheckpointError:
            return f"{what}: refused"
        raise AssertionError(f"not refused: {what}")
    saver.real.restore(spelled)
    for place in saver.places:
        place.expected[...] = snapshot.values[place.label]
    world.count = snapshot.count
    for trainer in world.trainers:
        trainer.model.load(snapshot.states[trainer.label], saver.labels)
    return what


def state_dict(world: World, files: Files) -> str:
    """One optimizer's state as a dictionary, which is checked and kept."""
    trainer = world.choose(world.trainers)
    places = [place for place in world.places if world.happens(0.8)]
    state = trainer.real.state_dict({place.label: place.handle for place in places})
    labels = [place.label for place in places]
    naive = Snapshot({}, 0, {"": trainer.model.state()}).only(labels).states[""]
    slots, others = naive
    assert {name: set(table) for name, table in state["slots"].items() if table} == {
        name: set(table) for name, table in slots.items() if table
    }
    for name, table in slots.items():
        for label, value in table.items():
            np.testing.assert_array_equal(as_float64(state["slots"][name][label]), value)
    assert {name: float(value) for name, value in state["non_slots"].items()} == others
    files.states.append((trainer, places, state, copy.deepcopy(naive)))
    del files.states[:-3]
    return f"state_dict of {trainer.label} for {labels}"


def load_state_dict(world: World, files: Files) -> str:
    """Also into arrays that were made again, of the same names."""
    if not files.states:
        return state_dict(world, files)
    trainer, places, state, naive = world.choose(files.states)
    labels = [place.label for place in places]
    what = f"load_state_dict of {trainer.label} for {labels}"
    named = {place.label: place.handle for place in places}
    if not trainer.model.accepts(naive, labels):
        try:
            trainer.real.load_state_dict(state, named)
        except ValueError:
            return f"{what}: refused"
        raise AssertionError(f"not refused: {what}")
    trainer.real.load_state_dict(state, named)
    trainer.model.load(naive, labels)
    return what


def step_while_saving(world: World, files: Files) -> str:
    """Steps that are made while an earlier state is being written."""
    text = save(world, files)
    call = random_call(world, world.choose(world.trainers), world.apart(4))
    apply(world, call, counts=True)
    return f"{text}; then {call}"
