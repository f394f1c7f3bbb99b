"""Variables and raw arrays that are copied or pickled together with their state."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Set
from typing import Any, NamedTuple, TypeAlias

from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable, as_variable, known_identity


class Original:
    """The identity of what was copied; None once it is gone, or in another process."""

    __slots__ = ("_identity",)

    def __init__(self, identity: Identity | None = None) -> None:
        self._identity = None if identity is None else weakref.ref(identity)

    def __call__(self) -> Identity | None:
        return None if self._identity is None else self._identity()

    def __deepcopy__(self, memo: Any) -> Original:
        return self

    def __reduce__(self) -> Any:
        return Original, ()


class CopiedArray(NamedTuple):
    """A raw array, or its copy: the one that the rest of what is copied or pickled has, too.

    Attributes:
        array: The array.
        original: Its identity.
        is_named: Whether the user gave it a name, by which it is known in other processes.
    """

    array: Any
    original: Original
    is_named: bool = False


class CopiedVariable(NamedTuple):
    """A variable, or its copy.

    Attributes:
        variable: The one that the rest of what is copied or pickled has, too.
        row_change: Its `Identity.row_change` when its slots or averages were read.
        original: Its identity.
    """

    variable: Variable
    row_change: int
    original: Original


# A bare variable is of a pickle that another version has made.
Copied: TypeAlias = CopiedVariable | CopiedArray | Variable


def to_copy(identity: Identity) -> Copied | None:
    """Returns what is copied or pickled to find a variable again; None if it is gone.

    Raises:
        ValueError: it is a view of an array, and the program does not keep the view.
    """
    holder = identity.holder()
    if holder is None:
        return None
    if isinstance(holder, Variable):
        return CopiedVariable(holder, identity.row_change, Original(identity))
    array = array_of(identity)
    if array is not None:
        return CopiedArray(array, Original(identity), identity.given_name is not None)
    raise ValueError(
        f'"{identity.name}" cannot be copied or pickled: it is a view of another array, made anew '
        "for a step, and a copy of that array would not be known by it. Make it once and keep it: "
        "w = gpuopt.Variable(view, copy=False); or hand the state over by names, as in "
        'state_dict({"w": view})'
    )


def array_of(identity: Identity) -> Any:
    """Returns a raw array that has this identity; None if the program keeps none."""
    for each in (identity.array(), identity.holder()):
        if each is not None and known_identity(each) is identity:
            return each
    return None


def found_again(copied: Mapping[str, Copied]) -> dict[str, Variable]:
    """Returns the variables that `to_copy` has returned, or that are copies of those, by name."""
    return {name: variable_of(each) for name, each in copied.items()}


def variable_of(copied: Copied) -> Variable:
    """Does for one what `found_again` does.

    Raises:
        RuntimeError: its rows came or went between the copies of it and of its slots or averages.
    """
    if isinstance(copied, Variable):
        return copied
    if isinstance(copied, CopiedVariable):
        variable, row_change, original = copied
        is_copy = original() is not variable.identity
        if is_copy and variable.copied_row_change not in (None, row_change):
            raise RuntimeError(
                f'rows of "{variable.name}" came or went, by another thread, between the copies of '
                "it and of its slots or averages, which do not fit together: copy or pickle all of "
                "them again, while no thread changes rows"
            )
        return variable
    variable = as_variable(copied.array)
    # What was copied or unpickled is in memory of its own, though the unpickler still holds that.
    variable.identity.unknown_owner = None
    return variable


class Copy:
    """A variable that has come out of a copy or a pickle, which the program may keep or not.

    It is not kept alive. If the program has not kept it, the optimizer was copied without its
    variables, and goes on with others.
    """

    __slots__ = ("_identity", "_name", "_original", "has_path")

    def __init__(self, name: str, copied: Copied) -> None:
        """Watches it.

        Args:
            name: Of the variable that it is a copy of.
            copied: The copy.
        """
        self._name = name
        self._identity = weakref.ref(variable_of(copied).identity)
        self._original = None
        # Whether it is an array of a tree.
        self.has_path = isinstance(copied, CopiedArray) and copied.is_named
        if isinstance(copied, CopiedArray) and not copied.is_named:
            self._original = copied.original

    def is_of_one_of(self, identities: Set[Identity]) -> bool:
        return self._identity() in identities

    def is_kept(self) -> bool:
        identity = self._identity()
        return identity is not None and identity.holder() is not None

    def name_of_other(self) -> str | None:
        """Returns the name of the variable in its place, which an array has in one process alone.

        An array in another process has no name by which it would be known.
        """
        if self._original is None:
            return self._name
        identity = self._original()
        return None if identity is None or identity.holder() is None else identity.name

    def is_replaced_by(self, identity: Identity) -> bool:
        """Whether it was not kept, and this variable is in its place."""
        return not self.is_kept() and identity.name == self.name_of_other()


def describe_lost(what: str, names: list[str]) -> str:
    """Returns the message for `what` came without its arrays of these names."""
    listed = ", ".join(f'"{name}"' for name in names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"{what} came out of a copy or a pickle without the arrays {listed}, and other arrays "
        "would not be known by such names: copy or pickle both together, as in "
        "pickle.dumps((arrays, optimizer))"
    )
