"""Saver: TensorFlow 1's way of saving and restoring, with optimizers' state."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from gpuopt.atomic_file import remove_abandoned
from gpuopt.checkpoint.background import BackgroundSave
from gpuopt.checkpoint.checkpoint_file import open_checkpoint
from gpuopt.checkpoint.checkpoint_folder import KeptCheckpoint, KeptCheckpoints, next_time
from gpuopt.checkpoint.checkpoint_writer import write_checkpoint
from gpuopt.checkpoint.contents import SavedOptimizer, flattened
from gpuopt.checkpoint.file_format import SUFFIX
from gpuopt.checkpoint.restoring import Readable, fitted, read_values, saved_optimizers
from gpuopt.checkpoint.tensorflow_checkpoint import (
    TensorFlowCheckpoint,
    by_tensorflows_names,
    find_checkpoint,
)
from gpuopt.errors import CheckpointError
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.optimizer import Optimizer, living_optimizers
from gpuopt.state import state_dict
from gpuopt.state.state_dict import OptimizerState
from gpuopt.training import ExponentialMovingAverage
from gpuopt.variables.gate import between_writes, note_progress, refuse_while_writing, writing
from gpuopt.variables.late_errors import raise_late_errors
from gpuopt.variables.scalars import step_number
from gpuopt.variables.storage import describe
from gpuopt.variables.undo import Undo, all_or_nothing
from gpuopt.variables.unfinished import refuse_unfinished
from gpuopt.variables.variable import (
    Variable,
    as_variable,
    checked_list,
    global_variables,
)

_logger = logging.getLogger("gpuopt")

Array = np.ndarray[Any, Any]
Result = TypeVar("Result")

_STEP_AND_SUFFIX = re.compile(rf"(-\d+)?{re.escape(SUFFIX)}$")


class _Target(NamedTuple):
    """Where a checkpoint goes.

    Attributes:
        spelled: Its path as the user wrote it, which may be relative, or lead through links.
        file: Its path from the root, whose folders are no links.
        step: The global step, if one was given.
    """

    spelled: str
    file: Path
    step: int | None


class Saver:
    """Saves variables and optimizers' state to files, and restores them.

    A checkpoint is one safetensors file, `<path>-<global_step>.safetensors`, with TensorFlow's
    names and exact dtypes. A save is atomic and durable: after a crash at any moment, the newest
    checkpoint is the old one or the new one, and it is complete. A checkpoint is the state between
    two steps, also while other threads train. Only one process at a time may save under one path.
    """

    def __init__(
        self,
        var_list: Any = None,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float = 10000.0,
        optimizers: Sequence[Optimizer] | None = None,
    ) -> None:
        """Chooses the variables and optimizers of the checkpoints.

        Args:
            var_list: A list of Variables; or a mapping of names in the checkpoint to variables or
                arrays, which renames variables, and gives raw arrays a name. By default all that
                `global_variables()` lists at each call; a checkpoint must then contain exactly
                these.
            max_to_keep: How many checkpoints of this Saver are kept; older ones are removed once a
                newer one is on the disk. None or 0 keeps all. In a forked child, checkpoints that
                the parent has saved do not count.
            keep_checkpoint_every_n_hours: Keep one checkpoint for each such period, even if
                `max_to_keep` would remove it.
            optimizers: The optimizers whose state is saved. By default all that exist, or none if
                `var_list` is given. For a wrapper, as SyncReplicasOptimizer, the state of the
                optimizer inside is saved, with the scale and the counts of a LossScaleOptimizer.

        Raises:
            TypeError: `var_list` or `optimizers` contains an object of another type.
            ValueError: a name or a variable appears twice, or a number is negative.
        """
        if isinstance(max_to_keep, Optimizer | list | tuple):
            raise TypeError(
                f"max_to_keep must be a number, got {max_to_keep!r}; optimizers are given by name: "
                "Saver(variables, optimizers=[optimizer])"
            )
        self._variables = None if var_list is None else _by_name(var_list, "var_list")
        if self._variables == {}:
            raise ValueError("No variables to save")
        if isinstance(optimizers, Optimizer):
            raise TypeError(f"optimizers must be a list of optimizers, got {optimizers!r}")
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
        self._kept = KeptCheckpoints(max_to_keep, keep_checkpoint_every_n_hours)
        self._waiting: dict[str, Array] = {}
        self._background: BackgroundSave | None = None
        # (folder, beginning of names) where nothing abandoned is left.
        self._cleaned: set[tuple[Path, str]] = set()

    def __repr__(self) -> str:
        chosen, optimizers = self._variables, self._chosen_optimizers
        saved = "all variables" if chosen is None else f"{len(chosen)} variables"
        names = "all" if optimizers is None else [each.get_name() for each in optimizers]
        return f"<{type(self).__name__} of {saved}; optimizers: {names}>"

    def save(self, path: str | os.PathLike[str], global_step: Any = None) -> str:
        """Writes a checkpoint and returns when it is safely on the disk.

        Args:
            path: The folder and the beginning of the file's name, as "folder/model".
            global_step: A number, or a scalar variable or array; it becomes part of the name.

        Returns:
            The file's path.

        Raises:
            FileNotFoundError: there is no such folder.
            OSError: the file could not be written; earlier checkpoints are as they were.
            ValueError: a variable has a dtype or a name that a checkpoint cannot contain, or no
                name; without `var_list`, loaded slots wait for a variable; `path` is a folder, as
                "here/"; or `global_step` is negative or not a whole number.
            TypeError: `global_step` is not a number.
            RuntimeError: called in the middle of a step, or a step was not finished.
            DeadlineExceededError: another thread does not end its step, its save or its restore.
        """

        def save() -> str:
            target = _target(path, global_step)
            tensors, description = self._contents(_in_host_memory, target.step)
            return self._write(target, tensors, description, note_progress)

        return self._between_writes(f"saving {os.fspath(path)}", save)

    def save_async(self, path: str | os.PathLike[str], global_step: Any = None) -> Future[str]:
        """Copies the state, and writes it in a thread while training goes on.

        There is at most one copy in memory: a call waits until the one before has been written. If
        a save fails, the error is logged, and raised by `result()` of the returned future. At its
        exit, Python waits for the thread. In a forked child, the parent writes the file.

        Args:
            path: As in `save`.
            global_step: As in `save`.

        Returns:
            A future of the file's path: `.result()` waits until the file is safely on the disk,
            and raises the errors of `save`.

        Raises:
            FileNotFoundError: there is no such folder.
            ValueError: an array has slots and no name, loaded slots wait for a variable, or
                `global_step` is negative or not a whole number.
            TypeError: `global_step` is not a number.
            RuntimeError: called in the middle of a step, or a step was not finished.
            DeadlineExceededError: another thread does not end its step, its save or its restore.
        """
        purpose = f"saving {os.fspath(path)}"

        def start() -> Future[str]:
            target = _target(path, global_step)
            tensors, description = self._contents(Variable.numpy, target.step)
            write = partial(self._write, target, tensors, description)
            self._background = BackgroundSave(purpose, write)
            self._background.start()
            return self._background.saved_path

        return self._between_writes(purpose, start)

    def restore(
        self,
        path: str | os.PathLike[str],
        deferred: bool = False,
        *,
        optimizer_scope: str | Mapping[Optimizer, str] | None = None,
    ) -> None:
        """Reads a checkpoint into the variables and slots, in place.

        The run continues as the saved one would. Everything is read and checked before anything is
        written. Missing slots are made. While values are written, the first Ctrl-C waits; an error,
        or a second Ctrl-C, undoes what was written. Meanwhile the checkpoint is in host memory,
        where its values and the replaced ones change places.

        Args:
            path: The path that `save` or `latest_checkpoint` returned; or the prefix of a
                checkpoint that TensorFlow itself wrote, as "model.ckpt-1000", or one of its files.
                This needs tensorflow, and the Saver must have the graph's optimizers, in the order
                in which the graph made them.
            deferred: Keep the values of variables that do not exist yet until `attach`, and the
                slots of such variables until their first step or `attach`. If False, such values
                are an error, or are ignored if `var_list` was given.
            optimizer_scope: The `variable_scope` or `name_scope` in which TensorFlow's graph made
                the optimizers; or a mapping from optimizers to scopes, which leaves out optimizers
                that were made in none.

        Raises:
            FileNotFoundError: there is no such file.
            TypeError: `optimizer_scope` is neither text nor a mapping of optimizers to text.
            ValueError: `path` is None; or `optimizer_scope` is given, but the checkpoint is not
                TensorFlow's, or it names an optimizer that is not the Saver's.
            CheckpointError: the file is damaged, or in TensorFlow's first format; or names, shapes
                or dtypes do not fit; or TensorFlow's checkpoint has slots or powers of beta that
                belong to no optimizer here.
            ModuleNotFoundError: the checkpoint is TensorFlow's, and tensorflow is not installed.
            IndexError: a GPU has refused an earlier step; see `Optimizer.check`.
            FloatingPointError: likewise.
            RuntimeError: called in the middle of a step.
            DeadlineExceededError: another thread does not end its step, its save or its restore.
        """
        if path is None:
            raise ValueError(
                "path must not be None, which latest_checkpoint returns for a folder without a "
                "checkpoint"
            )
        prefix = os.fspath(path)
        file = Path(prefix if prefix.endswith(SUFFIX) else prefix + SUFFIX)
        purpose = f"restoring {prefix}"
        scopes = self._scopes(optimizer_scope)
        refuse_while_writing()
        self._finish_background()
        foreign = None if file.exists() else find_checkpoint(prefix)
        if foreign is not None:
            checkpoint = TensorFlowCheckpoint(foreign)
            saved = by_tensorflows_names(
                self._optimizers(),
                self._named(),
                checkpoint.names,
                foreign,
                scopes,
                deferred=deferred,
            )
            # What TensorFlow saved besides, as a save counter, belongs to nothing here.
            self._restore(checkpoint, saved, purpose, deferred, strict=False)
            return
        if optimizer_scope is not None:
            raise ValueError(f"optimizer_scope is for TensorFlow's checkpoints; {prefix} is none")
        if not file.exists() and Path(prefix).is_dir():
            raise FileNotFoundError(
                f"{prefix} is a folder; its newest checkpoint is latest_checkpoint({prefix!r})"
            )
        with open_checkpoint(file) as own:
            saved = saved_optimizers(own.description, own.names, file)
            self._restore(own, saved, purpose, deferred, self._variables is None)

    def attach(self, variables: Any) -> None:
        """Gives variables that were made after a deferred `restore` their restored values.

        Their slots get their values, too. This Saver's later checkpoints contain the variables.

        Args:
            variables: A list of Variables, or a mapping of names in the checkpoint to variables or
                arrays.

        Raises:
            ValueError: there is no restored value for a variable, or the variable or a slot has
                another shape or dtype.
        """
        named = _by_name(variables, "variables")
        places = self._places(named)
        values: dict[str, Array] = {}
        with between_writes(f"attaching {sorted(named)}", writes=True):
            raise_late_errors()
            for name, variable in named.items():
                if name not in self._waiting:
                    raise ValueError(
                        f'no restored value waits for "{name}"; waiting are {sorted(self._waiting)}'
                    )
                values[name] = fitted(name, self._waiting[name], variable, places[name])
                for optimizer in self._optimizers():
                    state_dict.check_claim(optimizer.state, name, variable)

            def attach(undo: Undo) -> None:
                optimizers = self._optimizers()
                for optimizer in optimizers:
                    optimizer.state.keep(undo)
                for name, variable in named.items():
                    undo.assign(places[name], values[name])
                    for optimizer in optimizers:
                        state_dict.claim_state(optimizer.state, name, variable, undo)
                left = {name: each for name, each in self._waiting.items() if name not in named}
                undo.set(self, "_waiting", left)
                if self._variables is not None:
                    undo.set(self, "_variables", {**self._variables, **named})

            all_or_nothing(attach)

    @property
    def last_checkpoints(self) -> list[str]:
        """The checkpoints of this Saver that `max_to_keep` has not removed, the newest last."""
        return self._kept.paths

    def recover_last_checkpoints(self, checkpoint_paths: Iterable[str]) -> None:
        """Makes `max_to_keep` count these checkpoints, of an earlier run, instead of its own.

        List the newest last. Missing files are ignored; damaged ones are logged and ignored.
        """
        paths = list(checkpoint_paths)
        self._between_writes("reading checkpoints", lambda: self._kept.replace_all(paths))

    def _optimizers(self) -> Sequence[Optimizer]:
        """The optimizers with a state of their own, each once, in order of creation or as given."""
        chosen = self._chosen_optimizers
        listed = living_optimizers() if chosen is None else chosen
        return list(dict.fromkeys(optimizer.owner_of_state for optimizer in listed))

    def _scopes(self, given: str | Mapping[Optimizer, str] | None) -> dict[Optimizer, str]:
        """Returns the scope of each optimizer that has one, with a slash at the end."""
        mine = self._optimizers()
        if isinstance(given, str):
            by_optimizer: dict[Optimizer, Any] = dict.fromkeys(mine, given)
        elif given is None or (
            isinstance(given, Mapping) and all(isinstance(each, Optimizer) for each in given)
        ):
            by_optimizer = {each.owner_of_state: scope for each, scope in (given or {}).items()}
        else:
            raise TypeError(
                "optimizer_scope must be a scope's name, or a mapping of optimizers to such, got "
                f"{given!r}"
            )
        for optimizer, scope in by_optimizer.items():
            if not isinstance(scope, str):
                raise TypeError(
                    f'optimizer_scope of "{optimizer.get_name()}" must be text, got {scope!r}'
                )
            if optimizer not in mine:
                raise ValueError(
                    f'optimizer_scope has an optimizer "{optimizer.get_name()}", whose state this '
                    "Saver does not restore"
                )
        return {each: f"{scope.rstrip('/')}/" for each, scope in by_optimizer.items() if scope}

    def _named(self) -> dict[str, Variable]:
        """The variables by their names in the checkpoint, without those that optimizers own."""
        if self._variables is not None:
            listed = {variable.identity for variable in self._variables.values()}
            extra = {
                name: variable
                for optimizer in self._chosen_optimizers or ()
                for name, variable in optimizer._extra_saved_variables().items()
                if variable.identity not in listed
            }
            return {**extra, **self._variables}
        owned = {
            variable.identity
            for optimizer in self._optimizers()
            for variable in optimizer.variables()
        }
        arrays = {
            array.name: array
            for optimizer in self._optimizers()
            for array in state_dict.arrays_with_paths(optimizer.state)
        }
        named = [variable for variable in global_variables() if variable.identity not in owned]
        # Another thread may just be dropping a variable: what belongs to it goes next.
        if orphans := sorted(variable.name for variable in named if variable.is_orphan):
            _logger.warning(
                "neither saved nor restored: %s, of variables that are gone; give them to the "
                "Saver by name",
                ", ".join(f'"{name}"' for name in orphans),
            )
        return {
            **arrays,
            **{variable.name: variable for variable in named if not variable.is_orphan},
        }

    def _places(self, named: Mapping[str, Variable]) -> Mapping[str, Variable]:
        """Returns the variables whose values are saved and restored under these names."""
        return named

    def _contents(
        self, read: Callable[[Variable], Array], step: int | None
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        named = self._named()
        if not named and not self._waiting:
            raise ValueError("No variables to save")
        places = self._places(named)
        refuse_unfinished("saved", [place.identity for place in places.values()])
        values = {name: _as_named(read(places[name]), variable) for name, variable in named.items()}
        values.update(self._waiting)
        # Without a list, an array that has slots and no name is refused, not left out.
        by_name = None if self._variables is None else named
        states = [
            (optimizer, state_dict.read_state(optimizer.state, by_name, read, by_path=False))
            for optimizer in self._optimizers()
        ]
        if by_name is None:
            _refuse_slots_alone(states, values)
        tensors, saved = flattened(values, states)
        return tensors, {"global_step": step, "optimizers": saved}

    def _write(
        self,
        target: _Target,
        tensors: Mapping[str, Array],
        description: Any,
        on_progress: Callable[[], None],
    ) -> str:
        folder = target.file.parent
        beginning = _STEP_AND_SUFFIX.sub("", target.file.name)
        names = re.compile(re.escape(beginning) + _STEP_AND_SUFFIX.pattern)
        is_clean = (folder, beginning) in self._cleaned or remove_abandoned(folder, names)
        # Unless this save, too, leaves something behind.
        self._cleaned.discard((folder, beginning))
        expected: list[KeptCheckpoint] = []

        def expect(fingerprint: str) -> None:
            expected.append(self._kept.expect(target.spelled, target.file, fingerprint))

        try:
            fingerprint = write_checkpoint(
                target.file, tensors, description, next_time(folder), on_progress, expect
            )
        except BaseException:
            self._kept.end(expected)
            raise
        self._kept.confirm(fingerprint)
        if is_clean:
            self._cleaned.add((folder, beginning))
        return target.spelled

    def _restore(
        self,
        checkpoint: Readable,
        saved: Sequence[SavedOptimizer],
        purpose: str,
        deferred: bool,
        strict: bool,
    ) -> None:
        named = self._named()

        def restore(undo: Undo) -> None:
            restoration.write(undo)
            undo.set(self, "_waiting", restoration.waiting)

        try:
            restoration = read_values(
                checkpoint,
                saved,
                named,
                self._places(named),
                self._optimizers(),
                deferred=deferred,
                strict=strict,
            )
            with between_writes(purpose, writes=True):
                raise_late_errors()
                with writing():
                    all_or_nothing(restore)
        except CheckpointError:
            raise
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{checkpoint.path}: {error}") from error

    def _between_writes(self, purpose: str, work: Callable[[], Result]) -> Result:
        """Calls `work` between two steps, when no earlier save is being written any more."""
        refuse_while_writing()
        while True:
            self._finish_background()
            with between_writes(purpose):
                # Another thread may have begun a save meanwhile.
                if self._background is None or self._background.is_finished:
                    return work()

    def _finish_background(self) -> None:
        if self._background is not None:
            self._background.finish()


def _by_name(variables: Any, argument: str) -> dict[str, Variable]:
    if isinstance(variables, Mapping):
        named = {
            name: _as_variable(variable, f"{argument}[{name!r}]")
            for name, variable in variables.items()
        }
    else:
        listed = checked_list(variables, argument)
        for variable in listed:
            if not isinstance(variable, Variable):
                raise TypeError(
                    f"{argument} holds {describe(variable)}, not a Variable; a raw array needs a "
                    'name, as in {"name": array}'
                )
        named = {variable.name: variable for variable in listed}
        if len(named) != len(listed):
            raise ValueError(f"a variable appears twice in {argument}")
    for name in named:
        if not isinstance(name, str) or not name:
            raise TypeError(f"a variable's name in a checkpoint must be text, got {name!r}")
    state_dict.refuse_two_names(named)
    return named


def _as_variable(value: Any, place: str) -> Variable:
    if isinstance(value, Mapping | list | tuple):
        raise TypeError(
            f"{place}: expected a Variable or an array, got {describe(value)}; list each array of "
            'a tree with its path, as in {"layers/0/W": array}'
        )
    try:
        return as_variable(value)
    except TypeError as error:
        raise TypeError(f"{place}: {error}") from None


def _in_host_memory(variable: Variable) -> Array:
    """The storage itself where it is in host memory: it is written between steps."""
    if variable.device.kind == "cpu":
        return variable.storage  # type: ignore[no-any-return]
    return variable.numpy()


def _as_named(value: Array, named: Variable) -> Array:
    """Returns a value in the type of the variable that has its name, where these are swapped."""
    if value.dtype == named.dtype:
        return value
    return ignore_fp_warnings(partial(value.astype, named.dtype))


def _refuse_slots_alone(
    states: Sequence[tuple[Optimizer, OptimizerState]], values: Mapping[str, Array]
) -> None:
    """Raises ValueError if there are slots of a variable whose value would not be saved."""
    for optimizer, state in states:
        for by_variable in state["slots"].values():
            for name in by_variable:
                if name not in values:
                    raise ValueError(
                        f'the slots of "{name}" in "{optimizer.get_name()}" were loaded, and wait '
                        "for a variable or an array of this name, without which a checkpoint could "
                        "not be restored: save after the first step, or give var_list"
                    )


def _target(path: str | os.PathLike[str], global_step: Any) -> _Target:
    prefix = os.fspath(path).removesuffix(SUFFIX)
    if not os.path.basename(prefix):
        raise ValueError(
            f"{os.fspath(path)!r} ends without a file's name: give its beginning, too, as in "
            f"{os.path.join(prefix, 'model')!r}"
        )
    step = None if global_step is None else step_number(global_step, "global_step")
    spelled = Path(prefix + SUFFIX if step is None else f"{prefix}-{step}{SUFFIX}")
    if not spelled.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {spelled.parent} to save a checkpoint in")
    return _Target(str(spelled), spelled.parent.resolve() / spelled.name, step)


class SwappingSaver(Saver):
    """Saves averages under their variables' names, and variables under their averages' names.

    A plain `Saver` restores such a checkpoint's averages as weights. This one brings each value
    back to where it came from. Averages of 16-bit variables, which are float32, are saved in the
    variables' type.
    """

    def __init__(
        self, averages: ExponentialMovingAverage, var_list: Any = None, **options: Any
    ) -> None:
        """Says what belongs to the checkpoints.

        Args:
            averages: The averages, which are swapped with their variables.
            var_list: See `Saver`; what is among them as a variable and not as its average, or the
                other way round, is refused.
            **options: Other arguments of `Saver`.

        Raises:
            ValueError: a variable's average is missing from `var_list`, or an average's variable;
                or see `Saver`.
            TypeError: see `Saver`.
        """
        super().__init__(var_list, **options)
        self._averages = averages
        self._places(self._named())

    def _places(self, named: Mapping[str, Variable]) -> Mapping[str, Variable]:
        names = {variable.identity: name for name, variable in named.items()}
        partners = dict(named)
        left = {average.identity for average in self._averages.averages_of_variables()}
        for name, variable in named.items():
            average = self._averages.average(variable)
            if average is None:
                continue
            if average.identity not in names:
                raise ValueError(
                    f'"{name}" is to be saved, and its average "{average.name}" is not: they are '
                    "swapped, so var_list must hold both"
                )
            partners[name], partners[names[average.identity]] = average, variable
            left.discard(average.identity)
        if alone := [name for identity, name in names.items() if identity in left]:
            raise ValueError(
                f'the average "{alone[0]}" is to be saved, and its variable is not: they are '
                'swapped, so var_list must hold both, a raw array by a name, as in {"name": array}'
            )
        return partners
