"""TensorFlow's own checkpoints, read through an optional tensorflow.

They do not describe optimizers, whose tensors are found by their names.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from gpuopt.checkpoint.contents import SavedOptimizer
from gpuopt.errors import CheckpointError
from gpuopt.optimizer import Optimizer
from gpuopt.state.state import Description
from gpuopt.variables.variable import FLOAT_DTYPES, Variable

# The ends of the names of a checkpoint's files.
_FILES = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")
# The last bytes of TensorFlow's table files; the first format keeps all tensors in one.
_END_OF_TABLE = bytes.fromhex("57fb808b247547db")
_MOST_NEAR = 4
_NUMBER = re.compile(r"_\d+$")
# What comes before and after a variable in a slot's name, for each slot of an optimizer.
_Kind = tuple[tuple[str, str], ...]


def find_checkpoint(path: str) -> str | None:
    """Returns the prefix of TensorFlow's checkpoint at a path, or None if there is none.

    Args:
        path: The prefix, as "model.ckpt-1000", or one of its files.

    Raises:
        CheckpointError: the checkpoint is of TensorFlow's first format.
    """
    prefixes = path, _FILES.sub("", path)
    for prefix in prefixes:
        if Path(prefix + ".index").is_file():
            return prefix
    for prefix in prefixes:
        if _ends_as_table(Path(prefix)):
            raise CheckpointError(
                f"{prefix} is a checkpoint of TensorFlow's first format (V1), which is not read: "
                "restore it with TensorFlow, and save it by "
                "tf.train.Saver(write_version=tf.train.SaverDef.V2)"
            )
    return None


class TensorFlowCheckpoint:
    """A checkpoint that `tf.train.Saver` wrote, opened by its prefix, as "model.ckpt-1000".

    Attributes:
        path: The prefix.
        names: The names of its tensors.
    """

    def __init__(self, prefix: str) -> None:
        """Opens the checkpoint.

        Raises:
            ModuleNotFoundError: tensorflow is not installed.
            CheckpointError: TensorFlow cannot read it.
        """
        try:
            from tensorflow.train import load_checkpoint
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{prefix} is TensorFlow's checkpoint: reading it needs tensorflow, which is not "
                "installed; convert it where TensorFlow is"
            ) from error
        self.path = prefix
        try:
            self._reader = load_checkpoint(prefix)
            self.names = frozenset(self._reader.get_variable_to_shape_map())
        except Exception as error:  # TensorFlow's errors are its own classes
            raise CheckpointError(f"TensorFlow cannot read {prefix}: {error}") from error

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Returns tensors by name."""
        try:
            return {name: np.asarray(self._reader.get_tensor(name)) for name in names}
        except Exception as error:
            raise CheckpointError(f"TensorFlow cannot read {self.path}: {error}") from error


def by_tensorflows_names(
    optimizers: Sequence[Optimizer],
    variables: Mapping[str, Variable],
    present: frozenset[str],
    path: str,
    scopes: Mapping[Optimizer, str],
    *,
    deferred: bool,
) -> list[SavedOptimizer]:
    """Finds the optimizers' tensors in a checkpoint without descriptions of optimizers.

    TensorFlow names a slot after its variable. It numbers slots of one name, and powers of beta, in
    the order in which they were made. A variable's slots are those of the optimizers that have
    slots for it here. If none has, and several might, each is given the same tensors, which wait
    for the first one to update the variable.

    Args:
        optimizers: In the order in which the graph made them.
        variables: By their names in the checkpoint. No optimizer takes a tensor of these names.
        present: The names of the checkpoint's tensors.
        path: The checkpoint's.
        scopes: The scopes that optimizers were built in.
        deferred: Whether slots of variables that do not exist yet are wanted, too.

    Returns:
        A description of each optimizer, as our own checkpoints have it.

    Raises:
        CheckpointError: a slot or another variable of an optimizer is missing, or it is unclear
            whose it is.
        ValueError: an optimizer is of the user's own, and does not list its slots.
    """
    names = _Names(path, present, frozenset(variables))
    owners = [_owner(each, scopes.get(each, ""), variables, present) for each in optimizers]
    kinds: dict[_Kind, list[_Owner]] = defaultdict(list)
    for owner in owners:
        if owner.kind:
            kinds[owner.kind].append(owner)
    # Else an optimizer without slots may train a variable that has none.
    all_have_slots = bool(owners) and all(owner.kind for owner in owners)
    for name in sorted({*variables, *present} if deferred else variables):
        variable = variables.get(name)
        has_any = False
        for kind, alike in kinds.items():
            sets = names.take_slots(name, kind, len(alike))
            has_any |= bool(sets)
            for owner, slots in _share_out(names, name, variable, alike, sets):
                for slot_name, tensor in zip(owner.slot_names, slots, strict=True):
                    owner.saved["slots"][slot_name][name] = tensor
        if variable is not None and _may_be_trained(variable) and all_have_slots and not has_any:
            names.refuse_missing(_slot(owners[0].kind[0], name), name)
    for owner in owners:
        for name in owner.described.other_names:
            owner.saved["non_slots"][name] = names.take(f"{owner.scope}{name}")
    names.refuse_unclaimed()
    return [owner.saved for owner in owners]


def _ends_as_table(path: Path) -> bool:
    """Whether a path is a table file of TensorFlow's, and so a checkpoint of the first format."""
    if not path.is_file() or path.stat().st_size < len(_END_OF_TABLE):
        return False
    with path.open("rb") as file:
        file.seek(-len(_END_OF_TABLE), os.SEEK_END)
        return file.read() == _END_OF_TABLE


class _Owner(NamedTuple):
    """An optimizer, and the tensors of its state.

    Attributes:
        optimizer: The optimizer.
        described: Its description.
        scope: The scope that it was built in, with a slash at the end, or "".
        slot_names: Its slots in TensorFlow, which has none in 8 bits.
        kind: The names of these slots. Those of optimizers of one kind differ in their numbers.
        saved: Its tensors, as far as they are found.
    """

    optimizer: Optimizer
    described: Description
    scope: str
    slot_names: Sequence[str]
    kind: _Kind
    saved: SavedOptimizer

    def has_slots(self, variable: Variable | None) -> bool:
        """Whether the optimizer has slots for a variable here."""
        state = self.optimizer.state
        return variable is not None and any(
            state.slot(variable, name) is not None for name in self.described.slot_names or ()
        )


def _owner(
    optimizer: Optimizer, scope: str, variables: Mapping[str, Variable], present: frozenset[str]
) -> _Owner:
    described = optimizer.state.describe()
    if described.slot_names is None:
        raise ValueError(
            f"{described.optimizer} does not say which slots it has, so they cannot be found by "
            "TensorFlow's names; use load_state_dict"
        )
    slot_names = described.slot_codecs.without_scales(described.slot_names)
    kind = tuple((scope, f"/{described.op_name(name)}") for name in slot_names)
    if not any(_slot(each, variable) in present for each in kind for variable in variables):
        # A `name_scope`, other than a `variable_scope`, is no part of slots' names.
        kind = tuple(("", op_name) for _, op_name in kind)
    saved: SavedOptimizer = {
        "format": 1,
        "optimizer": described.optimizer,
        "name": described.name,
        "hyperparameters": {},
        "slots": {name: {} for name in slot_names},
        "non_slots": {},
    }
    return _Owner(optimizer, described, scope, slot_names, kind, saved)


def _slot(affixes: tuple[str, str], variable: str) -> str:
    """Returns a slot's name, without a number."""
    return variable.join(affixes)


def _may_be_trained(variable: Variable) -> bool:
    return variable.trainable and variable.dtype in FLOAT_DTYPES


def _share_out(
    names: _Names,
    name: str,
    variable: Variable | None,
    alike: Sequence[_Owner],
    sets: Sequence[Sequence[str]],
) -> list[tuple[_Owner, Sequence[str]]]:
    """Says which of several optimizers of one kind a variable's sets of slots belong to."""
    having = [owner for owner in alike if owner.has_slots(variable)]
    if not sets and having:
        names.refuse_missing(_slot(having[0].kind[0], name), name)
    for owners in (having, alike):
        if len(owners) == len(sets):
            return list(zip(owners, sets, strict=True))
    if len(sets) == 1 and not having:
        return [(owner, sets[0]) for owner in alike]
    if not sets:
        return []
    raise CheckpointError(
        f'{names.path} holds slots of {len(sets)} optimizers named "{alike[0].described.name}" for '
        f'"{name}", and it is unclear which of {len(alike)} they belong to: make one step with '
        "each before the restore, so that they have slots for their variables"
    )


class _Names:
    """The names of a checkpoint's tensors, and which of them are taken.

    Attributes:
        path: The checkpoint's.
    """

    def __init__(self, path: str, present: frozenset[str], users: frozenset[str]) -> None:
        """Begins with nothing taken.

        Args:
            path: The checkpoint's.
            present: All names.
            users: Those of the user's variables, which are not to be taken.
        """
        self.path = path
        self._present = present
        self._users = users
        self._numbers: dict[str, int] = defaultdict(int)
        self._taken: set[str] = set()

    def take(self, name: str) -> str:
        """Returns the next tensor of a name, with the next number.

        Raises:
            CheckpointError: it is not there.
        """
        numbered = self._next(name)
        if numbered not in self._present:
            self.refuse_missing(numbered)
        self._taken.add(numbered)
        return numbered

    def take_slots(self, variable: str, kind: _Kind, most: int) -> list[list[str]]:
        """Returns a variable's sets of slots, `most` of them at most.

        Raises:
            CheckpointError: a set is there in part.
        """
        sets: list[list[str]] = []
        bases = [_slot(each, variable) for each in kind]
        while len(sets) < most:
            before = {base: self._numbers[base] for base in bases}
            found = [self._next(base) for base in bases]
            missing = [name for name in found if name not in self._present]
            if missing:
                self._numbers.update(before)
                if len(missing) < len(found):
                    self.refuse_missing(missing[0], variable)
                break
            self._taken.update(found)
            sets.append(found)
        return sets

    def refuse_missing(self, name: str, variable: str | None = None) -> NoReturn:
        """Raises CheckpointError about a tensor that is not there, with names like it.

        Args:
            name: The tensor's.
            variable: Whose slot it is, or None for another variable of an optimizer.
        """
        in_scopes = sorted(each for each in self._present if each.endswith(f"/{name}"))
        like = get_close_matches(name, sorted(self._present - self._users), _MOST_NEAR)
        near = list(dict.fromkeys([*in_scopes, *like]))[:_MOST_NEAR]
        what = f'"{name}"' if variable is None else f'"{name}", a slot of "{variable}"'
        message = f"{self.path} holds no {what}; "
        message += f"near it are {_quoted(near)}" if near else "nothing there has such a name"
        if in_scopes:
            message += ". optimizer_scope= names the scope that an optimizer was built in"
        if variable is not None:
            message += (
                f'. If none of these optimizers trains "{variable}", restore it by a Saver without '
                "optimizers, or make it with trainable=False"
            )
        raise CheckpointError(message)

    def refuse_unclaimed(self) -> None:
        """Raises CheckpointError if there are more tensors of the names that were taken.

        It is unclear then which ones are those of the optimizers here.
        """
        bases = {base for base, number in self._numbers.items() if number}
        left = self._present - self._taken - self._users
        unclaimed = sorted(n for n in left if n in bases or _NUMBER.sub("", n) in bases)
        if unclaimed:
            raise CheckpointError(
                f"{self.path} holds {_quoted(unclaimed[:_MOST_NEAR])}, too, which no optimizer or "
                "variable here claims: its graph had more optimizers. Give the Saver all of them, "
                "in the graph's order; or your own variable of this name"
            )

    def _next(self, name: str) -> str:
        while True:
            number = self._numbers[name]
            self._numbers[name] += 1
            numbered = f"{name}_{number}" if number else name
            if numbered not in self._users:
                return numbered


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
