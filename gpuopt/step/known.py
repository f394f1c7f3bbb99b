"""The cache of groups: variables that are updated together, with their plans."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from functools import partial
from itertools import chain
from operator import attrgetter, eq, itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from gpuopt.backends import Backend, Target, backend_for
from gpuopt.backends.backend import compute_type
from gpuopt.codecs import Codecs
from gpuopt.device import Device
from gpuopt.state.counts import StepCount
from gpuopt.step.wide_gradients import GradientTypes, converted_at_once
from gpuopt.variables.identity import Identity, find_identity
from gpuopt.variables.variable import Variable, known_identity

# Groups of several variables that are kept: a program with another list of variables in each step
# never hits the cache. (There are no more groups of one variable than variables.)
_MOST_LISTS = 256
# Of the variables in all these lists: a plan takes about 4 KB for each. A few lists are kept,
# however long they are: a program may take turns with them.
_MOST_MEMBERS = 16 * 1024
_FEW_LISTS = 8

_ID_BYTES = np.dtype(object).itemsize

# The ids of objects, and the `choice` of `KnownGroups.find`.
_Key = tuple[tuple[int, ...] | bytes, bytes]
_FEW_OBJECTS = 16

Value = TypeVar("Value")

# In place of a `State.version.number`: of a group that is not used any more.
_NEVER = -1

# Compared instead of the shape, which follows from strides and size.
_layout_of = attrgetter("dtype", "strides", "size")


class Batch(NamedTuple):
    """Variables of one group, device and dtype.

    Attributes:
        device: The variables' device.
        dtype: The variables' dtype.
        backend: The device's backend.
        real: The type that rules compute in.
        plan: The backend's plan for updates of these variables.
        positions: The variables' positions in the group; None if the batch is the whole group.
        number: The batch's position among the batches of the group.
        is_borrowed: Whether some variables are raw arrays, whose memory the plan does not own.
        groups: For each variable, the position of its group among `scalar_groups`; None if there
            is one group.
        scalar_groups: The numbers of the groups whose scalars the variables have, each once:
            the plan's groups, in its order.
    """

    device: Device
    dtype: np.dtype[Any]
    backend: Backend
    real: type[np.float32] | type[np.float64]
    plan: Any
    positions: Sequence[int] | None
    number: int
    is_borrowed: bool
    groups: Sequence[int] | None
    scalar_groups: Sequence[int]

    def select(self, items: Sequence[Any]) -> Sequence[Any]:
        """Returns the items of the batch's variables, given an item for each of the group's."""
        if self.positions is None:
            return items
        return [items[position] for position in self.positions]


class Group:
    """Variables that are updated together, and the plans for it; none of them is kept alive.

    Attributes:
        batches: One for each device and dtype.
        state_version: The `State.version.number` of the slots that the plans write to.
        identities: The variables' identities, in order.
        constrained: The positions of variables with a constraint.
        num_elements: Of all variables.
        uses: Has an item more each time that the group is found by its variables' identities.
        choice: See `KnownGroups.find`.
        counts: The variables' counts of steps, if they have their own.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        state_version: int,
        target_of: Callable[[Variable], tuple[Target, list[Identity], Codecs]],
        scalar_group_of: Callable[[Variable], int],
        choice: bytes = b"",
        counts: Sequence[StepCount] = (),
    ) -> None:
        """Has each device's backend plan the updates.

        Args:
            variables: At least one; they share no memory.
            state_version: The `State.version.number` of the slots that `target_of` finds.
            target_of: Returns a variable's arrays, their identities, and how they are stored.
            scalar_group_of: Returns the number of the group whose scalars a variable has.
            choice: See `KnownGroups.find`.
            counts: The variables', each once.
        """
        self.choice = choice
        self.counts = counts
        self.state_version = state_version
        self.identities = tuple(variable.identity for variable in variables)
        self.constrained = [
            position for position, variable in enumerate(variables) if variable.constraint
        ]
        self.num_elements = sum(variable.size for variable in variables)
        self.uses: list[None] = []
        self._names: tuple[str, ...] = ()
        self._known_apart: dict[_Key, list[weakref.ref[Any]]] = {}
        self.batches: list[Batch] = []
        by_kind: dict[tuple[Device, np.dtype[Any]], list[int]] = {}
        for position, variable in enumerate(variables):
            by_kind.setdefault((variable.device, variable.dtype), []).append(position)
        for (device, dtype), positions in by_kind.items():
            backend = backend_for(device)
            targets, identities, codecs = zip(
                *(target_of(variables[position]) for position in positions), strict=True
            )
            borrowed = [i for i, at in enumerate(positions) if variables[at].is_raw_array]
            numbers = [scalar_group_of(variables[position]) for position in positions]
            used = sorted(set(numbers))
            groups = None if len(used) == 1 else [used.index(each) for each in numbers]
            updated = list(chain.from_iterable(identities))
            plan = backend.plan_dense(targets, codecs[0], updated, borrowed, groups)
            is_all = len(by_kind) == 1
            of_group = None if is_all else positions
            number, real = len(self.batches), compute_type(dtype)
            self.batches.append(
                Batch(
                    device,
                    dtype,
                    backend,
                    real,
                    plan,
                    of_group,
                    number,
                    bool(borrowed),
                    groups,
                    used,
                )
            )

    @property
    def names(self) -> Sequence[str]:
        """The variables' names, in order."""
        if not self._names:
            self._names = tuple(identity.name for identity in self.identities)
        return self._names

    def is_known_apart(self, members: Sequence[Group | Identity]) -> bool:
        """Whether `note_apart` was called with these: they share no memory with this group."""
        return _key_of(members) in self._known_apart

    def note_apart(self, members: Sequence[Group | Identity]) -> None:
        """Remembers that these members share no memory with this group, nor with each other.

        The first of them to die ends this: its id may be given to another.
        """
        key = _key_of(members)
        _make_room(self._known_apart, key)
        gone = partial(_drop, weakref.ref(self), "_known_apart", key)
        self._known_apart[key] = [weakref.ref(each, gone) for each in members]

    def as_read(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Returns gradients in types that loops convert from, as far as one look at all finds out.

        So a step of many float64 arrays does not take the time of a look at each.
        """
        if len(self.batches) > 1 or self.batches[0].device.kind != "cpu":
            return gradients
        return converted_at_once(gradients, self.batches[0].dtype)

    def accept(
        self, gradients: Sequence[Any], types: GradientTypes = GradientTypes.OWN
    ) -> list[int] | None:
        """Returns the version of each batch's gradients; None if some do not fit their variable.

        Gradients fit if they are plain arrays on the variables' device, of their shape and dtype,
        or of another one of `types` that loops convert from, if all of a batch have it.
        The version stays the same only as long as a batch gets the same arrays.
        """
        if len(self.batches) == 1:
            [batch] = self.batches
            version = batch.plan.accept(gradients)
            if version is None and types:
                version = batch.plan.accept(gradients, types.others(batch.dtype))
            return None if version is None else [version]
        versions: list[int] = []
        for batch in self.batches:
            chosen = batch.select(gradients) if batch.positions else gradients
            version = batch.plan.accept(chosen)
            if version is None and types:
                version = batch.plan.accept(chosen, types.others(batch.dtype))
            if version is None:
                return None
            versions.append(version)
        return versions


class _Recognised(NamedTuple, Generic[Value]):
    """A cache entry that is found by the Python objects of its variables.

    Attributes:
        value: What is cached.
        raw: The positions of the raw arrays among the objects.
        layouts: The `_layout_of` these arrays: a user may change an array's layout in place.
        references: Weak references to the objects; the first to die drops this entry.
    """

    value: Value
    raw: list[int]
    layouts: list[tuple[Any, ...]]
    references: list[weakref.ref[Any]]

    def is_unchanged(self, given: Sequence[Any]) -> bool:
        raw = given if len(self.raw) == len(given) else [given[at] for at in self.raw]
        return all(map(eq, map(_layout_of, raw), self.layouts))


class KnownObjects(Generic[Value]):
    """A cache by the Python objects of variables, each entry as long as all of these live."""

    def __init__(self) -> None:
        self._entries: dict[_Key, _Recognised[Value]] = {}
        # The key of the last objects that were not found.
        self._missed: _Key = (), b""

    def find(self, given: Sequence[Any], choice: bytes = b"") -> Value | None:
        """Returns what is cached for these variables and raw arrays, in this order, or None."""
        ids: tuple[int, ...] | bytes  # as in `_key_of`, without a call
        if len(given) <= _FEW_OBJECTS:
            ids = tuple(map(id, given))
        else:
            ids = np.fromiter(given, object, len(given)).tobytes()
        entry = self._entries.get((ids, choice))
        if entry is not None and (not entry.raw or entry.is_unchanged(given)):
            return entry.value
        return None

    def add(self, given: Sequence[Any], value: Value, choice: bytes = b"") -> None:
        """Caches what was not found.

        Raw arrays are watched only if they come twice in a row: watching new views in each step
        would gain nothing.
        """
        key = _key_of(given, choice)
        raw = [at for at, each in enumerate(given) if not isinstance(each, Variable)]
        if not raw or self._missed == key:
            layouts = [_layout_of(given[at]) for at in raw]
            _make_room(self._entries, key)
            references = _watch(given, partial(_drop, weakref.ref(self), "_entries", key))
            if references is not None:
                self._entries[key] = _Recognised(value, raw, layouts, references)
        self._missed = key

    def forget(self, is_over: Callable[[Value], bool]) -> None:
        """Drops entries by their values."""
        for key, entry in list(self._entries.items()):
            if is_over(entry.value):
                self._entries.pop(key, None)


class KnownGroups:
    """One optimizer's groups, each for as long as all of its variables live.

    A group is found if a caller passes the same Python objects again, or else by the identities of
    the variables: a raw array may come as a new view in each step.
    """

    def __init__(self) -> None:
        self._by_objects = KnownObjects[Group]()
        self._by_identities: dict[_Key, tuple[Group, list[weakref.ref[Any]]]] = {}

    def find(self, given: Sequence[Any], state_version: int, choice: bytes = b"") -> Group | None:
        """Returns the group of these variables, in this order, or None.

        Args:
            given: Variables and raw arrays, as the caller passed them.
            state_version: The present `State.version.number`; a group of another version is not
                returned.
            choice: A key of what parameter groups the variables have in this call: for each, a byte
                of 0 or 1. Empty if they have the same in all calls.
        """
        group = self._by_objects.find(given, choice)
        if group is None:
            group = self.find_by_identities(given, choice)
            if group is None:
                return None
            self._by_objects.add(given, group, choice)
        return group if group.state_version == state_version else None

    def find_by_identities(self, given: Sequence[Any], choice: bytes = b"") -> Group | None:
        """Returns the group of these variables, of any version, or None; see `find`."""
        identities = _identities_of(given)
        if identities is None:
            return None
        found = self._by_identities.get(_key_of(identities, choice))
        if found is None:
            return None
        group, _ = found
        group.uses.append(None)
        return group

    def add(self, group: Group) -> None:
        """Caches a group, unless a variable's end cannot be watched."""
        holders = [identity.holder() for identity in group.identities]
        key = _key_of(group.identities, group.choice)
        _make_room(self._by_identities, key)
        references = _watch(holders, partial(_drop, weakref.ref(self), "_by_identities", key))
        if references is not None:
            self._by_identities[key] = group, references

    def forget(self, changed: Set[Identity]) -> None:
        """Drops the groups of variables that have got other arrays.

        A step in flight that has found such a group finds it to be of another version.
        """
        is_over = partial(_end_if_changed, changed)
        for key, (group, _) in list(self._by_identities.items()):
            if is_over(group):
                self._by_identities.pop(key, None)
        self._by_objects.forget(is_over)


class PlannedPart(NamedTuple):
    """A part of a step's gradients, less these.

    Attributes:
        group: The variables' group.
        is_sparse: Whether the gradient is IndexedSlices.
        is_averaged: Whether the rule moves the variables' averages, too.
        choice: See `KnownGroups.find`.
        positions: Where the gradients stand in the caller's list.
        select: Returns the items at these positions; None if these are all.
    """

    group: Group
    is_sparse: bool
    is_averaged: bool
    choice: bytes
    positions: Sequence[int]
    select: Callable[[Sequence[Any]], Sequence[Any]] | None


class StepPlan(NamedTuple):
    """What steps of the same variables have in common.

    Attributes:
        kinds: The types of the gradients, as a set if there is one; and, where these decide about
            the parts, their dtypes.
        parts: Their parts.
    """

    kinds: Collection[Any]
    parts: Sequence[PlannedPart]

    def has_changed(self, changed: Set[Identity]) -> bool:
        """Whether it is for a variable that has got another array."""
        return any(not changed.isdisjoint(part.group.identities) for part in self.parts)


def selecting(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns what selects the items at ascending positions."""
    first, last = positions[0], positions[-1] + 1
    if last - first == len(positions):
        return itemgetter(slice(first, last))
    return itemgetter(*positions)


def _end_if_changed(changed: Set[Identity], group: Group) -> bool:
    is_over = not changed.isdisjoint(group.identities)
    if is_over:
        group.state_version = _NEVER
    return is_over


def _key_of(objects: Sequence[Any], choice: bytes = b"") -> _Key:
    """Returns a key of these objects: while they live, others have another key.

    A tuple of thousands of ids takes three times as long, and one of few a third.
    """
    if len(objects) <= _FEW_OBJECTS:
        return tuple(map(id, objects)), choice
    return np.fromiter(objects, object, len(objects)).tobytes(), choice


def _count_ids(key: _Key) -> int:
    """Returns how many objects a key is for."""
    ids, _ = key
    return len(ids) if isinstance(ids, tuple) else len(ids) // _ID_BYTES


def _make_room(cache: dict[_Key, Any], key: _Key) -> None:
    """Drops the oldest lists until there is room for `key`."""
    if _count_ids(key) == 1 or key in cache:
        return
    lists = [each for each in list(cache) if _count_ids(each) > 1]
    members = _count_ids(key) + sum(map(_count_ids, lists))
    for number, oldest in enumerate(lists):
        left = len(lists) - number
        if left < _FEW_LISTS or (left < _MOST_LISTS and members <= _MOST_MEMBERS):
            break
        cache.pop(oldest, None)
        members -= _count_ids(oldest)


def _identities_of(given: Sequence[Any]) -> list[Identity] | None:
    """Returns the identities of variables and raw arrays; None if one has none yet."""
    identities = []
    for each in given:
        # Faster, for steps of a thousand views that are made anew in each step.
        identity = find_identity(each) if type(each) is np.ndarray else None
        identity = identity or known_identity(each)
        if identity is None:
            return None
        identities.append(identity)
    return identities


def _watch(
    objects: Iterable[Any], gone: Callable[[weakref.ref[Any]], None]
) -> list[weakref.ref[Any]] | None:
    try:
        return [weakref.ref(each, gone) for each in objects]
    except TypeError:  # weak references to one of the objects are not possible
        return None


def _drop(
    owner: weakref.ref[Any],
    cache: str,
    key: _Key,
    dead: weakref.ref[Any],
) -> None:
    living = owner()
    if living is not None:
        getattr(living, cache).pop(key, None)
