"""A variable's identity: its name, its lock, and the memory by which a raw array is recognised."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from gpuopt.backends import Owner
from gpuopt.backends.memory_owner import array_at
from gpuopt.locks import Lock
from gpuopt.variables.behind import RowsBehind, WritesFollowed
from gpuopt.variables.names import Name

# The owner's id, the address, the shape, the strides, and the dtype.
MemoryKey = tuple[int, int, tuple[int, ...], tuple[int, ...], np.dtype[Any]]

# Reentrant: a garbage collection inside a guarded block may run Python code on the same thread.
_guard = Lock("the identities of raw arrays")
_by_memory: dict[MemoryKey, Identity] = {}
_Byte = ctypes.c_char


class _Form(NamedTuple):
    """The form of an array, without its elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]


class Identity:
    """The key of a variable's optimizer state. Lives as long as the Variable or raw array's memory.

    Attributes:
        lock: Held by updates with `use_locking=True`.
        last_update: The backend's record of the last update, by which streams wait for each other.
        behind: Brings the variable up to date before a read or write; None if it always is. See
            `RowsBehind`.
        master_pair: Of a variable with a master copy, and of that copy: has a write to one go to
            the other, too.
        copies: The identities of a mirrored variable's other copies in this process.
        row_change: The number of the last change of the variable's rows; 0 if there was none.
        given_name: The name that the user chose, before it got a suffix, also if it is that of the
            variable that this one is a copy of; None if there is none.
        unknown_owner: Describes the object that lends a raw array's memory, if gpuopt does not know
            when the memory ends; else None. See `require_known_owner`.
    """

    __slots__ = (
        "__weakref__",
        "_array",
        "_holder",
        "_key",
        "_name",
        "behind",
        "copies",
        "given_name",
        "last_update",
        "lock",
        "master_pair",
        "row_change",
        "unknown_owner",
    )

    def __init__(
        self,
        name: str,
        holder: Any,
        unknown_owner: str | None = None,
        on_end: Callable[[weakref.ref[Any]], None] | None = None,
        *,
        is_named: bool = True,
    ) -> None:
        """Takes a name.

        Args:
            name: The wanted name; it gets a suffix if a live variable has it.
            holder: See `holder`; it is not kept alive.
            unknown_owner: See above.
            on_end: Called at the holder's end.
            is_named: Whether this is a variable with a name that the user chose.
        """
        self._array: weakref.ref[Any] | None = None
        self._key: MemoryKey | None = None
        self._holder = weakref.ref(holder, on_end)
        self.unknown_owner = unknown_owner
        self.last_update: Any = None
        self.behind: RowsBehind | None = None
        self.master_pair: WritesFollowed | None = None
        self.copies: Sequence[weakref.ref[Identity]] = ()
        self.row_change = 0
        self._name = Name(name, is_named)
        self.given_name = name if is_named else None
        self.lock = Lock(self._name)

    @property
    def name(self) -> str:
        """Unique among live variables: a second "w" is "w_1", as in TensorFlow; see `Name`."""
        return self._name.text

    def was_named_by_gpuopt(self) -> None:
        """Notes that the user has not chosen the name."""
        self._name.is_given, self.given_name = False, None

    def give_name(self, name: str) -> None:
        """Gives a raw array a name that the user chose; it gets a suffix as in `name`."""
        self._name, self.given_name = Name(name, is_given=True), name

    def holder(self) -> Any:
        """Returns the object with which the identity dies, or None if it is gone.

        It is the Variable, or the owner of a raw array's memory, and weak references to it are
        possible. Code that keeps the memory's address watches the holder by such a reference, and
        drops the address at its end; see `Backend.unowned`.
        """
        return self._holder()

    def array(self) -> Any:
        """Returns a raw array or view that was seen here; None if it is gone."""
        return None if self._array is None else self._array()

    @property
    def is_of_array(self) -> bool:
        """Whether it is a raw array's, and not a Variable's."""
        return self._key is not None

    @property
    def path(self) -> str | None:
        """A raw array's path in a tree: its name, without the suffix that it may have got."""
        return self.given_name if self.is_of_array else None

    def note_seen(self, array: Any) -> None:
        """Notes a raw array or view that is there, in the place of one that is gone."""
        if self.array() is None:
            self._array = weakref.ref(array)

    def __repr__(self) -> str:
        return f"Identity({self.name!r})"


def followed(
    identity: Identity, work: AbstractContextManager[Any], at: Any = ...
) -> AbstractContextManager[Any]:
    """Returns a context for a write to a variable that is up to date; see `WritesFollowed`."""
    for each in (identity.behind, identity.master_pair):
        if each is not None:
            work = each.while_written(identity, work, at)
    return work


def identity_of(layout: np.ndarray[Any, Any], address: int, owner: Owner) -> Identity:
    """Finds a raw array's identity by its memory, or makes one.

    Arrays on memory of one owner with the same address, shape, strides and dtype are one variable.
    The identity goes when the owner does; it does not keep the owner alive.

    Args:
        layout: An array of this shape, strides and dtype.
        address: Where the first element is.
        owner: Of the memory.

    Raises:
        ValueError: several of its elements share memory.
    """
    key = (id(owner.watched), address, layout.shape, layout.strides, layout.dtype)
    found = _by_memory.get(key)
    if found is not None and found.holder() is owner.watched:
        return found
    refuse_self_overlap(layout)
    with _guard:
        found = _by_memory.get(key)
        if found is None or found.holder() is not owner.watched:
            forget = partial(_forget, key)
            name = "_of_".join(filter(None, ["array", "x".join(map(str, layout.shape))]))
            found = Identity(name, owner.watched, owner.unknown, forget, is_named=False)
            found._key = key
            _by_memory[key] = found
        return found


def move_identity(identity: Identity, place: Identity) -> None:
    """Has a raw array's identity be found by the memory of another one, instead of its own.

    The other's `place`, which nobody has kept anything for, is not found any more.
    """
    with _guard:
        old, new = identity._key, place._key
        assert new is not None
        _by_memory[new] = identity
        identity._holder = weakref.ref(place.holder(), partial(_forget, new))
        identity._key, identity._array = new, place._array
        identity.unknown_owner = place.unknown_owner
        if old is not None and _by_memory.get(old) is identity:
            del _by_memory[old]


def find_identity(array: np.ndarray[Any, Any]) -> Identity | None:
    """Returns the identity that was made for this memory, if numpy owns it; quick for views.

    None also for arrays that are read-only, empty or not contiguous.
    """
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if owner.base is not None:
        return None
    try:  # much quicker than `array.ctypes`
        address = ctypes.addressof(_Byte.from_buffer(cast(Any, array)))
    except (TypeError, ValueError, BufferError):
        return None
    found = _by_memory.get((id(owner), address, array.shape, array.strides, array.dtype))
    return found if found is not None and found._holder() is owner else None


def layouts_of_raw_arrays() -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Lists the raw arrays that have an identity: their names and layouts, not to be read."""
    return [
        (identity.name, array_at(address, _Form(shape, strides, dtype)))
        for (_, address, shape, strides, dtype), identity in list(_by_memory.items())
        if address and identity.holder() is not None
    ]


def _forget(key: MemoryKey, dead: weakref.ref[Any]) -> None:
    # Without the lock, as a garbage collection may come here while this thread holds others. It
    # runs before the owner's id can be given to something new.
    _by_memory.pop(key, None)


def refuse_self_overlap(layout: np.ndarray[Any, Any]) -> None:
    """Raises ValueError for an array with several elements on the same memory.

    An update would count once for each of them, or only once, as it is computed.

    Args:
        layout: An array of this shape, strides and item size; its elements are not looked at.
    """
    if not layout.flags.forc and _overlaps_itself(layout):
        raise ValueError(
            f"the array of shape {layout.shape} and strides {layout.strides} has several elements "
            "on the same memory, so it cannot be updated; pass the array that it is a view of, or "
            "a copy"
        )


def _overlaps_itself(layout: np.ndarray[Any, Any]) -> bool:
    steps = sorted(
        (abs(stride), length)
        for stride, length in zip(layout.strides, layout.shape, strict=True)
        if length > 1
    )
    extent = layout.itemsize
    is_nested = True  # each step reaches beyond all that the smaller ones span
    for stride, length in steps:
        is_nested &= stride >= extent
        extent += stride * (length - 1)
    if is_nested:
        return False
    if layout.nbytes > extent:
        return True
    offsets = np.zeros(1, np.int64)
    for stride, length in steps:
        offsets = np.add.outer(offsets, stride * np.arange(length)).reshape(-1)
    return bool((np.diff(np.sort(offsets)) < layout.itemsize).any())
