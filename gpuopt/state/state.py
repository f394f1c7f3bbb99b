"""State: the slots and numbers of one optimizer, and their lock."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
    Set,
)
from contextlib import AbstractContextManager
from hashlib import sha256
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakMethod, WeakValueDictionary

import numpy as np

from gpuopt.backends import backend_for, new_storage
from gpuopt.device import Device
from gpuopt.locks import Lock
from gpuopt.state.host_scalar import HostScalar
from gpuopt.state.masters import SplitMaster, paired
from gpuopt.state.slot_codecs import MASTER, SlotCodecs
from gpuopt.variables.copied import Copied, CopiedArray, Copy, describe_lost, variable_of
from gpuopt.variables.gate import undoing, writing
from gpuopt.variables.identity import Identity
from gpuopt.variables.undo import Undo
from gpuopt.variables.variable import NewRows, Variable, require_known_owner


class Range(NamedTuple):
    """Which numbers a slot or another variable of an optimizer can hold.

    Attributes:
        low, high: The smallest and the largest. What has no largest may also be NaN, as after a run
            has diverged.
        dtype: Of a scalar; None if it is a slot, with its variable's shape and dtype.
    """

    low: float
    high: float
    dtype: type[np.number[Any]] | None = None


class Description(NamedTuple):
    """Describes the optimizer that a state belongs to.

    Attributes:
        optimizer: The name of the optimizer's class.
        name: The optimizer's own name.
        hyperparameters: Numbers by name; None where a function gives the number.
        slot_names: The names of each variable's slots, in order of creation; such slots have the
            variable's shape and dtype. None if they are unknown.
        row_slots: Those among them that have `row_shape` instead: a number for each row.
        other_names: The names of the optimizer's other variables, which exist after any step.
        names_of_groups: The names of those that belong to a group of variables; a state of another
            grouping has others.
        lists_all: Whether the optimizer makes nothing that has another name than these.
        ranges: The numbers that slots and other variables can hold, where not all are possible.
        op_name: Returns, for a slot's name, the second part of a slot variable's own name.
        names_left_out: The names of other variables that it has with other options alone. A saved
            state may have them; they are left out.
        slot_codecs: How slots are stored.
        counting: The optimizer, if it counts the steps of each variable: see
            `gpuopt.state.counts`. Such counts are slots of one number.
    """

    optimizer: str
    name: str
    hyperparameters: dict[str, Any]
    slot_names: list[str] | None
    row_slots: Sequence[str]
    other_names: list[str]
    names_of_groups: list[str]
    lists_all: bool
    ranges: Mapping[str, Range]
    op_name: Callable[[str], str]
    names_left_out: Sequence[str]
    slot_codecs: SlotCodecs
    counting: Any


class WrapperState(Protocol):
    """The part of an optimizer's state that belongs to a wrapper around it.

    A state may be loaded that has none of it, and one that has it is refused where no wrapper keeps
    it.

    Attributes:
        slot_names: The slots' names; they may be of any shape and dtype.
        others: The numbers that other variables can hold, by their names.
    """

    slot_names: Sequence[str]
    others: Mapping[str, Range]

    def lay_out(self) -> AbstractContextManager[None]:
        """Makes the state hold all that is kept, as long as it is read inside."""

    def is_stale(self, slot_name: str, identity: Identity) -> bool:
        """Whether a slot holds nothing that counts."""

    def check(
        self, slots: Mapping[str, np.ndarray[Any, Any]], variable: Variable, name: str
    ) -> None:
        """Raises ValueError unless saved values fit their variable, and each other.

        Args:
            slots: All of the variable's, by some of `slot_names`.
            variable: Whose slots they are.
            name: The variable's name in the state.
        """

    def keep(self, undo: Undo) -> None:
        """Has `undo` put back what `forget_all` removes, other than slots."""

    def forget_all(self) -> None:
        """Removes all of it, before another state is taken over."""


class Created(NamedTuple):
    """A slot or other variable of a state, just made.

    Attributes:
        slot_name: The slot's name, or the other variable's.
        owner: The identity of the slot's variable; None for another variable.
        variable: The new variable.
        restored: The restored value that it took, or None.
    """

    slot_name: str
    owner: weakref.ref[Identity] | None
    variable: Variable
    restored: np.ndarray[Any, Any] | None


class Version:
    """A number that grows when a slot of any table of a state is replaced or removed.

    Plans for updates keep the slots' arrays.
    """

    def __init__(self) -> None:
        self.number = 0


class SlotTable(MutableMapping[Identity, Variable]):
    """The slots of one name, by their variable's identity; a slot goes when its variable does."""

    def __init__(self, lock: AbstractContextManager[Any], version: Version) -> None:
        self._lock = lock
        self._version = version
        self._slots: WeakKeyDictionary[Identity, Variable] = WeakKeyDictionary()

    def __getitem__(self, identity: Identity) -> Variable:
        return self._slots[identity]

    def __setitem__(self, identity: Identity, slot: Variable) -> None:
        # The gate first, as `bring_up` passes it: a save takes the lock while the gate is closed.
        with undoing(), self._lock:
            if identity in self._slots:
                self._slots[identity].bring_up()
                self._version.number += 1
            self._slots[identity] = slot

    def __delitem__(self, identity: Identity) -> None:
        with undoing(), self._lock:
            if not isinstance(self._slots[identity], HostScalar):  # a call may take back its own
                self._slots[identity].bring_up()
            del self._slots[identity]
            self._version.number += 1

    def __iter__(self) -> Iterator[Identity]:
        with self._lock:
            # Not iter(self._slots): as long as such an iterator is open, slots of dropped variables
            # stay; in a child that is forked then, for ever.
            keys = (reference() for reference in self._slots.keyrefs())
            return iter([key for key in keys if key is not None])

    def __len__(self) -> int:
        return len(self._slots)

    def restore(self, slots: Mapping[Identity, Variable]) -> None:
        """Replaces all slots by those that the table had before."""
        with self._lock:
            self._slots = WeakKeyDictionary(slots)
            self._version.number += 1


class State:
    """One optimizer's slots, its other variables, and restored values that wait for either.

    Attributes:
        version: Grows when a slot is replaced or removed, and not with a new slot.
        lock: Held while something is made, listed, restored or read.
        waiting_slots: Restored values, by (slot name, variable's name), whose slot is not made yet.
        names_of_paths: The names of arrays by their paths. Slots restored for a path wait for the
            name, which has a suffix if another live array has the same path.
        waiting_others: Restored values of the optimizer's other variables that are not made yet.
        wrapper_state: The part that belongs to a wrapper, or None.
        rivals: By a variable's name in the checkpoint: the states of the other optimizers in which
            the same restored slots wait. The first of them to update the variable takes these.
        contested: The same for variables that exist, by their identities.
        loaded: The variables that have got slots by the last load, by the names in what was loaded.
        restored_elsewhere: Names of variables whose slots, in the last checkpoint, went to another
            optimizer of the same name.
        unfinished: The additions of wrappers to steps that were not finished; see `Step`.
    """

    def __init__(self, describe: Callable[[], Description]) -> None:
        """Starts empty; it does not keep the optimizer alive whose method `describe` is."""
        self.lock = Lock("an optimizer's state")
        self.waiting_slots: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
        self.names_of_paths: dict[str, str] = {}
        self.waiting_others: dict[str, np.ndarray[Any, Any]] = {}
        self.restored_elsewhere: frozenset[str] = frozenset()
        self.rivals: Mapping[str, Sequence[weakref.ref[State]]] = {}
        self.contested: WeakKeyDictionary[Identity, Sequence[weakref.ref[State]]] = (
            WeakKeyDictionary()
        )
        self.loaded: WeakValueDictionary[str, Identity] = WeakValueDictionary()
        self.wrapper_state: WrapperState | None = None
        self.unfinished: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
        self._describe = WeakMethod(describe)
        self.version = Version()
        self._tables: dict[str, SlotTable] = {}
        self._others: dict[str, Variable] = {}
        # See `first_number`; and of each name, how many have one.
        self._numbers: WeakKeyDictionary[Identity, int] = WeakKeyDictionary()
        self._namesakes: Counter[str] = Counter()
        # The result of `collect_created` so far; None outside of it, as slots go with variables.
        self._created: list[Created] | None = None
        # Of a copy: what has the slots of a variable that may not have come along, by its name.
        self._expected: dict[str, tuple[Copy, list[tuple[str, Variable]]]] = {}
        # The arrays that have not, where no others can have their slots: a step is refused then.
        self._lost: list[str] = []

    def describe(self) -> Description:
        """Returns a description of the optimizer whose state this is.

        Raises:
            ReferenceError: the optimizer is gone.
        """
        describe = self._describe()
        if describe is None:
            raise ReferenceError("the optimizer of this state is gone")
        return describe()

    def expect_by_name(self, variables: Mapping[str, Copied]) -> None:
        """Lets slots wait for variables of these names if the given ones are not kept.

        Args:
            variables: Copies that have slots here, by the names of what they are copies of. If
                no other object holds one by the first step, the optimizer was copied without it.
        """
        with self.lock:
            for name, copied in variables.items():
                identity = variable_of(copied).identity
                if isinstance(copied, CopiedArray) and copied.is_named and identity.path is None:
                    identity.give_name(name)
                slots = [(key, t[identity]) for key, t in self._tables.items() if identity in t]
                self._expected[name] = Copy(name, copied), slots

    def settle_expected(self) -> None:
        """Ends `expect_by_name`: from now on, slots belong to the variables that exist."""
        if not self._expected:
            return
        with undoing(), self.lock:
            gone = {n: each for n, each in self._expected.items() if not each[0].is_kept()}
            lost = []
            for name, (copied, slots) in gone.items():
                other = copied.name_of_other()
                if other is None:
                    lost.append(name)
                    continue
                for slot_name, slot in slots:
                    self.waiting_slots.setdefault((slot_name, other), slot.numpy())
            if lost and len(gone) == len(self._expected):
                self._lost = lost
            # An array comes to its path by a step, and may be replaced before that.
            self._expected = {
                name: each
                for name, each in self._expected.items()
                if name not in gone and each[0].has_path
            }

    def follow_paths(self, leaves: Mapping[str, Variable]) -> None:
        """Lets slots that were loaded for arrays wait for those that have their paths now.

        The former arrays may still be alive, and have the paths as their names.

        Args:
            leaves: The arrays that have no slots yet, by their paths.
        """
        self.settle_expected()
        with undoing(), self.lock:
            self.wait_for_paths()
            formers: set[Identity] = set()
            for path, variable in leaves.items():
                former = self.loaded.get(path)
                if former is not None and former.is_of_array and former is not variable.identity:
                    formers.add(former)
                    for slot_name, table in self._tables.items():
                        if former in table:
                            self.waiting_slots[slot_name, path] = table[former].numpy()
                            del table[former]
                self.names_of_paths[path] = variable.name
            # The formers' slots go on here: they are not to wait again once the formers are gone.
            self.expect_no_more(formers)
            self.wait_for_names()

    def expect_no_more(self, identities: Set[Identity]) -> None:
        """Ends `expect_by_name` for some variables, which exist."""
        self._expected = {
            name: each
            for name, each in self._expected.items()
            if not each[0].is_of_one_of(identities)
        }

    def wait_for_paths(self) -> None:
        """Has slots that wait for arrays' names wait for their paths, as in a saved state."""
        self._rename_waiting({name: path for path, name in self.names_of_paths.items()})

    def wait_for_names(self) -> None:
        """Has slots that wait for arrays' paths wait for their names."""
        self._rename_waiting(self.names_of_paths)

    def _rename_waiting(self, names: Mapping[str, str]) -> None:
        # All at once: the new name of one array may be the path of another one.
        self.waiting_slots = {
            (slot_name, names.get(name, name)): value
            for (slot_name, name), value in self.waiting_slots.items()
        }

    def forget_lost(self) -> None:
        """Forgets which arrays a copy lacks, because another state is loaded."""
        self._lost = []

    def table(self, slot_name: str) -> SlotTable:
        """Returns the slots of one name by the identity of their variable, to read or change."""
        with self.lock:
            return self._tables.setdefault(slot_name, SlotTable(self.lock, self.version))

    def slot(self, variable: Variable, slot_name: str) -> Variable | None:
        """Returns a variable's slot, or None if it was never made."""
        table = self._tables.get(slot_name)
        return None if table is None else table.get(variable.identity)

    def slots_of(self, variable: Variable) -> list[Variable]:
        """Lists the slots that a variable has so far, but for those that it may share: counts."""
        with self.lock:
            found = [table.get(variable.identity) for table in self._tables.values()]
        return [slot for slot in found if slot is not None and not isinstance(slot, HostScalar)]

    def first_number(self, identity: Identity) -> int:
        """Returns the number of a variable's first element, below 2^62: variables are far apart.

        It follows from the name that the user chose, and among variables of one name or none, from
        the order in which they are first asked for. Copies of a mirrored variable share theirs.
        """
        copies = [identity, *(copy for each in identity.copies if (copy := each()) is not None)]
        with self.lock:
            found = next((self._numbers[each] for each in copies if each in self._numbers), None)
            if found is None:
                # The other copies' names begin with the first one's.
                name = min((each.given_name or "" for each in copies), key=len)
                text = f"{name}:{self._namesakes[name]}"
                self._namesakes[name] += 1
                found = int.from_bytes(sha256(text.encode()).digest()[:8], "big") >> 2
            self._numbers[identity] = found
            return found

    def slot_names(self) -> list[str]:
        """Lists the names of the slots made so far, in order of creation."""
        with self.lock:
            return list(self._tables)

    def other(self, name: str) -> Variable | None:
        """Returns the optimizer's own variable `name`, or None if it was never made."""
        return self._others.get(name)

    def others(self) -> dict[str, Variable]:
        """Returns the optimizer's other variables by name."""
        with self.lock:
            return dict(self._others)

    def variables(self) -> list[Variable]:
        """Lists slots and other variables."""
        with self.lock:
            slots = [slot for table in self._tables.values() for slot in table.values()]
            return [*dict.fromkeys(slots), *self._others.values()]  # several may share a count

    def keep(self, undo: Undo) -> None:
        """Has `undo` put back the present tables, variables and waiting values, but no numbers."""
        with self.lock:
            tables = {name: (table, dict(table)) for name, table in self._tables.items()}
            others, waiting_slots = dict(self._others), dict(self.waiting_slots)
            waiting_others, lost = dict(self.waiting_others), self._lost
            names_of_paths = dict(self.names_of_paths)
            restored_elsewhere, of_wrapper = self.restored_elsewhere, self.wrapper_state
            rivals, contested, loaded = self.rivals, dict(self.contested), dict(self.loaded)

        def put_back() -> None:
            with undoing(), self.lock:
                for table, slots in tables.values():
                    table.restore(slots)
                self._tables = {name: table for name, (table, _) in tables.items()}
                self._others, self.waiting_others = dict(others), dict(waiting_others)
                self.waiting_slots, self._lost = dict(waiting_slots), lost
                self.names_of_paths = dict(names_of_paths)
                self.restored_elsewhere, self.rivals = restored_elsewhere, rivals
                self.contested = WeakKeyDictionary(contested)
                self.loaded = WeakValueDictionary(loaded)
                self.version.number += 1

        undo.on_error("an optimizer's state", put_back)
        if of_wrapper is not None:
            of_wrapper.keep(undo)

    def collect_created(self, create: Callable[[], None]) -> list[Created]:
        """Calls `create`, and returns the slots and other variables that it makes.

        Raises:
            ValueError: the optimizer was copied or unpickled without its arrays.
        """
        self.settle_expected()
        if self._lost:
            lost = describe_lost(f'the state of "{self.describe().name}"', self._lost)
            by_name = 'load_state_dict(state, {"w": array}), with what state_dict({"w": array})'
            raise ValueError(f"{lost}; or hand the state over by names: {by_name} has returned")
        with writing(), self.lock:
            made: list[Created] = []
            outer, self._created = self._created, made
            try:
                create()
                return made
            finally:
                self._created = outer

    def forget(self, created: Iterable[Created], devices: Collection[Device] | None = None) -> None:
        """Removes what `collect_created` returned; restored values wait again.

        Args:
            created: The variables that are removed, unless something else has taken its place.
            devices: The devices of slots that are removed; by default all. As long as others are
                left, the optimizer's own variables belong to them, and stay.
        """
        with writing(), self.lock:
            others = []
            for each in created:
                name, owner, variable, restored = each
                if owner is None:
                    others.append(each)
                    continue
                if devices is not None and variable.device not in devices:
                    continue
                identity = owner()
                if identity is not None and self.table(name).get(identity) is variable:
                    # Removed last: if this is interrupted, it is called again.
                    if restored is not None:
                        for state in (self, *self._rivals_of(identity)):
                            state.waiting_slots[name, identity.name] = restored
                    del self.table(name)[identity]
            if devices is not None and any(self._tables.values()):
                return
            for name, _, variable, restored in others:
                if self._others.get(name) is variable:
                    self.version.number += 1
                    if restored is not None:
                        self.waiting_others[name] = restored
                    del self._others[name]

    def create_slot(
        self,
        variable: Variable,
        slot_name: str,
        op_name: str,
        value: Any,
        shape: tuple[int, ...] | None = None,
        dtype: Any = None,
    ) -> Variable:
        """Makes a slot on the variable's device.

        Args:
            variable: The variable that the slot belongs to.
            slot_name: Its key, as "momentum".
            op_name: The optimizer's name: the slot's own name is `<variable>/<op_name>`, with a
                suffix where that is taken.
            value: The initial value: a number, or an array of its shape. A restored value that
                waits for this slot takes its place.
            shape: The variable's, if not given.
            dtype: The variable's, if not given.

        Raises:
            ValueError: the waiting value does not fit, a raw array's state would not last, or the
                restored slot went to another optimizer.
        """
        with writing(), self.lock:
            restored = self.restored_slot(
                variable,
                slot_name,
                variable.shape if shape is None else tuple(shape),
                variable.dtype if dtype is None else np.dtype(dtype),
            )
            # Of a restored slot it may be another number than of a new one.
            new_rows = float(value) if isinstance(value, int | float | np.number) else None
            # Only then: to describe the optimizer takes as long as to make the slot.
            masters = self.describe().slot_codecs.masters if slot_name == MASTER else None
            slot = new_slot_variable(
                variable,
                op_name,
                value if restored is None else restored,
                new_rows,
                shape,
                dtype,
                SplitMaster if masters == "remainder" else Variable,
            )
            self.add_slot(variable, slot_name, slot, restored)
            if masters is not None:
                paired(self, variable, slot)
            return slot

    def restored_slot(
        self,
        variable: Variable,
        slot_name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> np.ndarray[Any, Any] | None:
        """Returns the restored value that waits for a slot; None if there is none.

        Raises:
            ValueError: it has another shape or dtype, or it went to another optimizer.
        """
        restored = self.waiting_slots.get(self._waiting_key(variable, slot_name))
        is_missing = restored is None and variable.name in self.restored_elsewhere
        if is_missing or self.is_taken_elsewhere(variable.identity):
            described = self.describe()
            raise ValueError(
                f'the restored slot "{slot_name}" of "{variable.name}" went to another '
                f'optimizer named "{described.name}" than the {described.optimizer} that '
                "updates it now: optimizers of one name get their state in the order in which "
                "they are made. Make them in the order of the saved run, give them different "
                "names before the save, or name them for the restore: "
                "Saver(var_list, optimizers=[...])"
            )
        if restored is not None:
            check_fits(restored, f'slot "{slot_name}" of "{variable.name}"', shape, dtype)
        return restored

    def add_slot(
        self,
        variable: Variable,
        slot_name: str,
        slot: Variable,
        restored: np.ndarray[Any, Any] | None,
    ) -> None:
        """Gives a variable a new slot; `restored`, if it had this value, waits no more."""
        key = self._waiting_key(variable, slot_name)
        self.table(slot_name)[variable.identity] = slot
        for state in (self, *self._rivals_of(variable.identity)):
            state.waiting_slots.pop(key, None)
        if self._created is not None:
            owner = weakref.ref(variable.identity)
            self._created.append(Created(slot_name, owner, slot, restored))

    def _waiting_key(self, variable: Variable, slot_name: str) -> tuple[str, str]:
        """Returns the key of what waits for a slot: by the variable's name, or by its path."""
        key = slot_name, variable.name
        path = variable.identity.path
        if path is not None and key not in self.waiting_slots:
            key = slot_name, self.names_of_paths.get(path, path)
        return key

    def is_taken_elsewhere(self, identity: Identity) -> bool:
        """Whether another optimizer has a variable's slots, which waited here, too."""
        return any(
            identity in table
            for rival in self._rivals_of(identity)
            for table in list(rival._tables.values())
        )

    def _rivals_of(self, identity: Identity) -> list[State]:
        """Returns the states in which a variable's restored slots wait, too.

        Not to be read under their locks, as this one may be held.
        """
        states = [rival() for rival in self.contested.get(identity, ())]
        return [state for state in states if state is not None]

    def create_other(self, name: str, value: Any, device: Device) -> Variable:
        """Makes the optimizer's own variable `name`, unless it exists.

        It starts with the restored value that waits for it, if there is one, else with `value`.

        Raises:
            ValueError: the waiting value does not fit.
        """
        return self._create_other(
            name, lambda: Variable(value, name=name, trainable=False, device=device)
        )

    def create_host_scalar(self, name: str, value: np.generic, device: Device) -> HostScalar:
        """Does what `create_other` does, with a scalar of `device` that the host computes with."""
        created = self._create_other(name, lambda: HostScalar(value, name, device))
        assert isinstance(created, HostScalar)
        return created

    def host_scalar(self, name: str) -> HostScalar:
        """Returns what `create_host_scalar` has made."""
        scalar = self._others[name]
        assert isinstance(scalar, HostScalar), f'"{name}" is {scalar!r}'
        return scalar

    def copy_host_scalars(self, own: Iterable[HostScalar] = ()) -> list[tuple[Variable, Any]]:
        """Returns the scalars that the host computes with, and their values; `own` are a step's."""
        if not self._others and not own:
            return []
        # Without the lock and with few calls: each step does this.
        others = [*self._others.copy().values(), *own]
        for each in others:
            if each.identity.behind is not None:
                each.bring_up()
        return [(each, each._known.item()) for each in others if isinstance(each, HostScalar)]

    def scalars_of_steps(self) -> list[HostScalar]:
        """Lists the scalars that steps change on the host: not those that a wrapper keeps."""
        of_wrapper = () if self.wrapper_state is None else self.wrapper_state.others
        others = [other for name, other in self.others().items() if name not in of_wrapper]
        return [other for other in others if isinstance(other, HostScalar)]

    def drop_slots(self, slot_name: str) -> None:
        """Removes all slots of a name; waiting values stay."""
        with writing(), self.lock:
            table = self.table(slot_name)
            for identity in list(table):
                del table[identity]
            del self._tables[slot_name]

    def drop_other(self, name: str) -> None:
        """Removes the optimizer's own variable `name`, and a value that waits for it."""
        with writing(), self.lock:
            self.waiting_others.pop(name, None)
            if self._others.pop(name, None) is not None:
                self.version.number += 1

    def _create_other(self, name: str, create: Callable[[], Variable]) -> Variable:
        with writing(), self.lock:
            existing = self._others.get(name)
            if existing is not None:
                return existing
            variable = create()
            variable.identity.was_named_by_gpuopt()
            restored = self.waiting_others.get(name)
            if restored is not None:
                check_fits(restored, f'"{name}"', variable.shape, variable.dtype)
                variable.assign(restored)
            self._others[name] = variable
            self.waiting_others.pop(name, None)
            if self._created is not None:
                self._created.append(Created(name, None, variable, restored))
            return variable


def check_fits(
    value: np.ndarray[Any, Any], what: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> None:
    """Raises ValueError unless a restored value has the expected shape and dtype."""
    if value.shape != shape:
        raise ValueError(f"{what} has shape {shape}; the saved value has shape {value.shape}")
    if value.dtype != dtype.newbyteorder("="):
        raise ValueError(f"{what} has dtype {dtype}; the saved value has dtype {value.dtype}")


def new_slot_variable(
    variable: Variable,
    op_name: str,
    value: Any,
    new_rows: NewRows,
    shape: tuple[int, ...] | None = None,
    dtype: Any = None,
    kind: type[Variable] = Variable,
) -> Variable:
    """Makes an untrainable variable for another one, named `<variable>/<op_name>`.

    Args:
        variable: The other one, on whose device it is.
        op_name: The second part of its name.
        value: The initial value: a number, or an array of its shape.
        new_rows: See `Variable.set_owner`.
        shape: The variable's, if not given.
        dtype: Likewise.
        kind: Its class.

    Raises:
        ValueError: a raw array's state would not last; see `require_known_owner`.
    """
    require_known_owner(variable)
    storage = new_storage(
        value,
        variable.device,
        variable.dtype if dtype is None else dtype,
        variable.shape if shape is None else tuple(shape),
    )
    slot = kind(storage, name=f"{variable.name}/{op_name}", trainable=False, copy=False)
    slot.owns_memory = True
    slot.set_owner(variable, new_rows)
    backend_for(variable.device).record_creation(slot.identity)
    return slot
