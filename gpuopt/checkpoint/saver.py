"""Saver: TensorFlow 1's way of saving and restoring, with optimizers' state."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from gpuopt import optimizer_state
from gpuopt.checkpoint.checkpoint_file import (
    SUFFIX,
    checkpoint_files,
    open_checkpoint,
    remove_abandoned,
    write_checkpoint,
)
from gpuopt.checkpoint.contents import (
    SavedOptimizer,
    by_tensorflows_names,
    flattened,
    paired,
    tensor_names,
    with_values,
)
from gpuopt.checkpoint.tensorflow_checkpoint import TensorFlowCheckpoint
from gpuopt.errors import CheckpointError
from gpuopt.optimizer import Optimizer, living_optimizers
from gpuopt.slots import check_fits
from gpuopt.step_gate import between_steps
from gpuopt.variable import Variable, as_variable, global_variables

Array = np.ndarray[Any, Any]
# What reads tensors by name out of an opened checkpoint.
_Reader = Callable[[Iterable[str]], Mapping[str, Array]]

_logger = logging.getLogger("gpuopt")


class Saver:
    """Saves variables and optimizers' state to files, and restores them.

    A checkpoint is one safetensors file, `<path>-<global_step>.safetensors`, with TensorFlow's
    names and exact dtypes. A save is atomic and durable: after a crash at any moment the newest
    checkpoint is the old one or the new one, in full. What is saved is the state between two steps,
    also while other threads train. One process at a time saves under one path.
    """

    def __init__(
        self,
        var_list: Any = None,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float = 10000.0,
        optimizers: Sequence[Optimizer] | None = None,
    ) -> None:
        """Says what belongs to the checkpoints.

        Args:
            var_list: Variables; or a mapping of names in the checkpoint to variables or arrays, by
                which a checkpoint with other names is restored, and raw arrays are saved. By
                default whatever `global_variables()` lists at each call; a checkpoint must then
                hold exactly these.
            max_to_keep: How many checkpoints of this Saver are kept; older ones are removed once a
                newer one is on the disk. None or 0 keeps all.
            keep_checkpoint_every_n_hours: Of those to be removed, one in so many hours stays.
            optimizers: Whose state belongs to the checkpoints. By default every living optimizer,
                or none if `var_list` is given.

        Raises:
            TypeError: `var_list` or `optimizers` holds something else.
            ValueError: a name appears twice, or a number is negative.
        """
        self._variables = None if var_list is None else _by_name(var_list)
        if self._variables == {}:
            raise ValueError("No variables to save")
        if optimizers is not None:
            optimizers = list(optimizers)
            for optimizer in optimizers:
                if not isinstance(optimizer, Optimizer):
                    raise TypeError(f"optimizers must hold optimizers, got {optimizer!r}")
        elif var_list is not None:
            optimizers = []
        if max_to_keep is not None and max_to_keep < 0:
            raise ValueError(f"max_to_keep must not be negative, got {max_to_keep}")
        self._chosen_optimizers = optimizers
        self._max_to_keep = max_to_keep
        self._keep_every_s = keep_checkpoint_every_n_hours * 3600
        self._keep_next_after = time.time() + self._keep_every_s
        self._kept: list[tuple[str, float]] = []
        self._waiting: dict[str, Array] = {}
        self._folders: dict[Path, int] = {}
        self._one_at_a_time = threading.RLock()
        self._thread: ThreadPoolExecutor | None = None
        self._written: Future[str] | None = None

    def save(self, path: str | os.PathLike[str], global_step: Any = None) -> str:
        """Writes a checkpoint and returns when it is safely on the disk.

        Args:
            path: Where, and the beginning of the file's name.
            global_step: A number, or a scalar variable or array; it becomes part of the name.

        Returns:
            The file's path.

        Raises:
            FileNotFoundError: there is no such folder.
            OSError: the file could not be written; earlier checkpoints are as they were.
            ValueError: something has a dtype that a checkpoint cannot hold, or no name.
            RuntimeError: called in the middle of a step.
        """
        with self._one_at_a_time:
            self._wait()
            with between_steps():
                target, step = _target(path, global_step)
                tensors, description = self._contents(_in_host_memory, step)
                return self._write(target, tensors, description)

    def save_async(self, path: str | os.PathLike[str], global_step: Any = None) -> Future[str]:
        """Copies the state, and writes it in a thread while training goes on.

        Memory holds one copy at most: a call waits until the one before it has been written. A
        failure is logged, and raised by the result's `result()`. Python waits for the thread at its
        own end.

        Args:
            path: As in `save`.
            global_step: As in `save`.

        Returns:
            The path to be: `.result()` waits until the file is safely on the disk, and raises what
            `save` raises.

        Raises:
            ValueError: something has a dtype that a checkpoint cannot hold, or no name.
            RuntimeError: called in the middle of a step.
        """
        with self._one_at_a_time:
            self._wait()
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpuopt-saver")
            with between_steps():
                target, step = _target(path, global_step)
                tensors, description = self._contents(Variable.numpy, step)
            self._written = self._thread.submit(self._write_logged, target, tensors, description)
            return self._written

    def restore(self, path: str | os.PathLike[str], deferred: bool = False) -> None:
        """Takes over a checkpoint's values, in place; the run continues as the saved one would.

        Everything is read and checked before anything is written. Slots that are missing are made.

        Args:
            path: What `save` or `latest_checkpoint` returned; or the prefix of a checkpoint that
                TensorFlow itself wrote, as "model.ckpt-1000", which needs tensorflow.
            deferred: Values of variables that do not exist yet wait for `attach`, and the slots of
                such variables for the first step or `attach`. Without it they are an error, or
                are left out if `var_list` was given.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: the file is damaged, or names, shapes or dtypes do not fit.
            ModuleNotFoundError: tensorflow is needed.
            RuntimeError: called in the middle of a step.
        """
        prefix = os.fspath(path)
        file = Path(prefix if prefix.endswith(SUFFIX) else prefix + SUFFIX)
        with self._one_at_a_time:
            self._wait()
            if not file.exists() and Path(prefix + ".index").exists():
                foreign = TensorFlowCheckpoint(prefix)
                saved = by_tensorflows_names(
                    self._optimizers(), sorted(self._named()), sorted(foreign.names)
                )
                # What TensorFlow saved besides, as a save counter, belongs to nothing here.
                self._restore(foreign.read, foreign.names, saved, deferred, strict=False)
                return
            with open_checkpoint(file) as checkpoint:
                saved = _saved_optimizers(checkpoint.description, checkpoint.names, file)
                strict = self._variables is None
                try:
                    self._restore(
                        checkpoint.read,
                        checkpoint.names,
                        saved,
                        deferred,
                        strict,
                    )
                except CheckpointError:
                    raise
                except ValueError as error:
                    raise CheckpointError(f"{file}: {error}") from error

    def attach(self, variables: Any) -> None:
        """Gives variables that were made after a deferred `restore` the values that wait for them.

        Args:
            variables: Variables, or a mapping of names in the checkpoint to variables or arrays.
                Their slots are made with the restored values, too. They belong to this Saver's
                later checkpoints.

        Raises:
            ValueError: nothing waits for a variable, or its shape or dtype is another.
        """
        named = _by_name(variables)
        with self._one_at_a_time, between_steps():
            for name, variable in named.items():
                if name not in self._waiting:
                    raise ValueError(
                        f'no restored value waits for "{name}"; waiting are {sorted(self._waiting)}'
                    )
                check_fits(self._waiting[name], f'"{name}"', variable.shape, variable.dtype)
            for name, variable in named.items():
                variable.assign(self._waiting.pop(name))
                for optimizer in self._optimizers():
                    optimizer_state.claim_state(optimizer, name, variable)
                if self._variables is not None:
                    self._variables[name] = variable

    @property
    def last_checkpoints(self) -> list[str]:
        """The checkpoints of this Saver that `max_to_keep` has not removed, the newest last."""
        return [path for path, _ in self._kept]

    def recover_last_checkpoints(self, checkpoint_paths: Iterable[str]) -> None:
        """Lets `max_to_keep` count checkpoints of an earlier run, the newest last."""
        with self._one_at_a_time:
            found = [path for path in checkpoint_paths if Path(path).exists()]
            self._kept = [(path, Path(path).stat().st_mtime) for path in found]

    def _optimizers(self) -> Sequence[Optimizer]:
        chosen = self._chosen_optimizers
        return living_optimizers() if chosen is None else chosen

    def _named(self) -> dict[str, Variable]:
        """The variables by their names in the checkpoint, without those that optimizers own."""
        if self._variables is not None:
            return self._variables
        owned = {
            variable.identity
            for optimizer in self._optimizers()
            for variable in optimizer.variables()
        }
        return {v.name: v for v in global_variables() if v.identity not in owned}

    def _contents(
        self, read: Callable[[Variable], Array], step: int | None
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        named = self._named()
        if not named and not self._waiting:
            raise ValueError("No variables to save")
        values = {name: read(variable) for name, variable in named.items()}
        values.update(self._waiting)
        # Without a list, an array that has slots and no name is refused, not left out.
        by_name = None if self._variables is None else named
        states = [
            (optimizer, optimizer_state.read_state(optimizer, by_name, read))
            for optimizer in self._optimizers()
        ]
        tensors, saved = flattened(values, states)
        return tensors, {"global_step": step, "optimizers": saved}

    def _write(self, path: Path, tensors: Mapping[str, Array], description: Any) -> str:
        if path.parent not in self._folders:
            newest = max(checkpoint_files(path.parent).values(), default=0)
            remove_abandoned(path.parent / _without_step(path))
            self._folders[path.parent] = newest
        # Clocks are set back at times; the order of checkpoints must not be.
        saved_at = max(time.time_ns(), self._folders[path.parent] + 1)
        write_checkpoint(path, tensors, description, saved_at)
        self._folders[path.parent] = saved_at
        self._remove_old(str(path))
        return str(path)

    def _write_logged(self, path: Path, tensors: Mapping[str, Array], description: Any) -> str:
        try:
            return self._write(path, tensors, description)
        except BaseException as error:
            _logger.error("%s", error)
            raise

    def _remove_old(self, newest: str) -> None:
        self._kept = [entry for entry in self._kept if entry[0] != newest]
        self._kept.append((newest, time.time()))
        while self._max_to_keep and len(self._kept) > self._max_to_keep:
            path, saved = self._kept[0]
            if saved > self._keep_next_after:
                self._keep_next_after += self._keep_every_s
            else:
                try:
                    Path(path).unlink(missing_ok=True)
                except OSError as error:
                    _logger.warning("an old checkpoint could not be removed: %s", error)
                    return  # it is tried again after the next save
            del self._kept[0]

    def _wait(self) -> None:
        if self._written is not None:
            self._written.exception()
            self._written = None

    def _restore(
        self,
        read: _Reader,
        names: frozenset[str],
        saved: Sequence[SavedOptimizer],
        deferred: bool,
        strict: bool,
    ) -> None:
        named = self._named()
        pairs = paired(self._optimizers(), saved)
        own_tensors = {name for entry in saved for name in tensor_names(entry)}
        for name in named:
            if name not in names:
                raise CheckpointError(
                    f'the checkpoint holds no "{name}"; it holds {_shortened(names - own_tensors)}'
                )
        if not strict and not deferred:
            pairs = [(optimizer, _only(entry, named)) for optimizer, entry in pairs]
        claimed = {name for _, entry in pairs for name in tensor_names(entry)}
        extra = names - claimed - set(named)
        if strict and not deferred:
            orphans = [
                variable
                for _, entry in pairs
                for by_variable in entry["slots"].values()
                for variable in by_variable
                if variable not in named
            ]
            if extra or orphans:
                raise CheckpointError(
                    f"the checkpoint holds {_shortened({*extra, *orphans})}, which nothing here is "
                    "called; give var_list, or restore with deferred=True before they are made"
                )
        waiting = extra - own_tensors if deferred else set()
        tensors = read(sorted({*named, *claimed, *waiting}))
        for name, variable in named.items():
            check_fits(tensors[name], f'"{name}"', variable.shape, variable.dtype)
        states = [(optimizer, with_values(entry, tensors)) for optimizer, entry in pairs]
        with between_steps():
            for optimizer, state in states:
                optimizer_state.check_state(optimizer, state, named)
            for optimizer, state in states:
                optimizer_state.load_state(optimizer, state, named)
            for name, variable in named.items():
                variable.assign(tensors[name])
            self._waiting = {name: tensors[name].copy() for name in waiting}


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> str | None:
    """Returns the path of the folder's newest checkpoint, or None if there is none.

    The files themselves say when they were saved; nothing but their headers is read. Files that
    are damaged so far that it shows there are logged and left out.
    """
    folder = Path(checkpoint_dir)
    found = list(checkpoint_files(folder)) if folder.is_dir() else []
    return str(found[-1]) if found else None


def _by_name(variables: Any) -> dict[str, Variable]:
    if isinstance(variables, Mapping):
        named = {name: as_variable(variable) for name, variable in variables.items()}
    else:
        listed = [as_variable(variable) for variable in variables]
        named = {variable.name: variable for variable in listed}
        if len(named) != len(listed):
            raise ValueError("a variable appears twice in var_list")
    for name in named:
        if not isinstance(name, str) or not name:
            raise TypeError(f"a variable's name in a checkpoint must be text, got {name!r}")
    return named


def _in_host_memory(variable: Variable) -> Array:
    """The storage itself where it is in host memory: it is written between steps."""
    if variable.device.kind == "cpu":
        return variable.storage  # type: ignore[no-any-return]
    return variable.numpy()


def _target(path: str | os.PathLike[str], global_step: Any) -> tuple[Path, int | None]:
    prefix = os.fspath(path).removesuffix(SUFFIX)
    step = None if global_step is None else int(global_step)
    target = Path(prefix + SUFFIX if step is None else f"{prefix}-{step}{SUFFIX}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} to save a checkpoint in")
    return target, step


def _without_step(path: Path) -> str:
    stem = path.name.removesuffix(SUFFIX)
    prefix, dash, number = stem.rpartition("-")
    return prefix if dash and number.isdigit() else stem


def _saved_optimizers(description: Any, names: frozenset[str], path: Path) -> list[SavedOptimizer]:
    """Returns what a checkpoint says of its optimizers, if it can be meant."""
    try:
        saved: list[SavedOptimizer] = description["optimizers"]
        for entry in saved:
            if set(entry) != set(SavedOptimizer.__annotations__):
                raise ValueError(f"an optimizer is described by {sorted(entry)}")
            unknown = set(tensor_names(entry)) - names
            if unknown or not isinstance(entry["name"], str):
                raise ValueError(f"an optimizer needs {_shortened(unknown)}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    return saved


def _only(saved: SavedOptimizer, variables: Iterable[str]) -> SavedOptimizer:
    """Leaves out the slots of other variables."""
    kept = {
        slot_name: {name: tensor for name, tensor in by_variable.items() if name in variables}
        for slot_name, by_variable in saved["slots"].items()
    }
    return {**saved, "slots": kept}


def _shortened(names: Iterable[str]) -> str:
    listed = sorted(names)
    shown = ", ".join(f'"{name}"' for name in listed[:8])
    return f"{shown} and {len(listed) - 8} more" if len(listed) > 8 else shown or "nothing"
