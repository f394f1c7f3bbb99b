"""Variable: a named array, pinned to one device."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import get_ident
from typing import Any, Literal, SupportsIndex

import ml_dtypes
import numpy as np

from gpuopt.backends import backend_for, gpu_backends, refuse_masked, to_device
from gpuopt.device import Device, device_of
from gpuopt.errors import DeviceUnavailableError
from gpuopt.interrupts import at_once
from gpuopt.listed import ListsWhatUsersNeed
from gpuopt.variables.behind import counting, own_numbers
from gpuopt.variables.gate import is_between_writes, is_writing, writing
from gpuopt.variables.identity import Identity, followed, identity_of, move_identity
from gpuopt.variables.late_errors import is_updating, raise_late_errors, raise_late_errors_of
from gpuopt.variables.operators import (
    ArrayOperators,
    checked_foreign,
    having_read,
    reading,
    storage_of,
    value_of,
    value_on_device,
)
from gpuopt.variables.printing import format_value
from gpuopt.variables.recording import before_write, recorder
from gpuopt.variables.storage import adopt_array, copy_value, describe, hint_for_foreign
from gpuopt.variables.unfinished import begun, note_all, refuse_unfinished, settle

FLOAT_DTYPES = frozenset(
    np.dtype(dtype) for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
)

# What a slot's row, or an average's, starts with where its variable gets a new row: a number, the
# variable's row, the same whatever row's state it gets, or what is not known.
NewRows = float | Literal["value", "master"] | None

# In order of creation. Slot variables are among them; raw arrays are not.
_live: weakref.WeakValueDictionary[int, Variable] = weakref.WeakValueDictionary()
_serials = itertools.count()


class Variable(ListsWhatUsersNeed, ArrayOperators):
    """A named array of fixed dtype and shape that optimizers update in place.

    Its number of rows changes by `gpuopt.rows` alone.

    Arithmetic works as on the array, from either side, and gives arrays; `+=` and its kin, and
    item assignment, write into the variable. `==` and `hash` go by identity.

    Attributes:
        name: Unique among live variables: a second "w" becomes "w_1". It is fixed when it is first
            asked for: a variable that takes the place of another one of its name has the same.
        trainable: Whether `trainable_variables()` lists it.
        constraint: Called with the array after each dense update; returns what to store.
        device: Where the array lives.
        is_average: Whether this is a moving average, which checkpoints may have in 16 bits.
        copied_row_change: Of a copy: the `Identity.row_change` of what was copied; else None.
    """

    __slots__ = (
        "__weakref__",
        "_array",
        "_constraint",
        "_new_rows",
        "_owner",
        "_serial",
        "copied_row_change",
        "device",
        "identity",
        "is_average",
        "owns_memory",
        "trainable",
    )
    _unlisted = frozenset(
        [
            "assign_rows",
            "set_owner",
            "bring_up",
            "copied_row_change",
            "count_down",
            "count_up",
            "follow_updates",
            "identity",
            "is_average",
            "is_owned_by",
            "has_owner",
            "is_orphan",
            "is_raw_array",
            "memory",
            "new_rows",
            "note_reading",
            "overwrite",
            "owns_memory",
            "serial",
            "take_array",
            "unread_numbers",
            "unread_storage",
            "unread_value",
        ]
    )

    def __init__(
        self,
        value: Any,
        name: str | None = None,
        trainable: bool = True,
        constraint: Callable[[Any], Any] | None = None,
        dtype: Any = None,
        device: Device | str | None = None,
        copy: bool = True,
    ) -> None:
        """Copies `value` into storage of its own, aligned for speed, or adopts it.

        Args:
            value: An array, nested lists, a number, or a function without arguments that returns
                one. Python's floats become float32 and its integers int32, as in TensorFlow.
            name: "Variable" if not given.
            trainable: Whether training should update it.
            constraint: Projects the array after each dense update.
            dtype: Converts to this type; needs `copy=True` if `value` has another.
            device: "cpu" or "gpu:<index>"; by default where `value` lives.
            copy: False adopts the array: updates are then seen in it, and nothing is copied. The
                variable stays as it is if the array is made read-only later, or gets another dtype
                or shape in place.

        Raises:
            TypeError: `value` does not hold numbers, or there is no array to adopt.
            ValueError: the array cannot be adopted as it is, or an argument is malformed.
            DeviceUnavailableError: nothing here can run on `device`.
        """
        if begun and not is_writing(get_ident()):
            note_all()  # a step that is not noted yet keeps variables alive, which have names
        if name is None:
            name = "Variable"
        if not isinstance(name, str):
            raise TypeError(f"name must be text, got {name!r}")
        if not name:
            raise ValueError("name must not be empty")
        if constraint is not None and not callable(constraint):
            raise ValueError(f'constraint of "{name}" must be callable, got {constraint!r}')
        if callable(value) and not hasattr(value, "dtype"):
            value = value()
        source = device_of(value)
        target = source if device is None else Device.parse(device)
        backend_for(source)
        make = copy_value if copy else adopt_array
        with reading(value):
            array = make(value, name, dtype, target)
        self._fill(array, Identity(name, self), target, trainable, constraint)
        if copy:
            backend_for(target).record_creation(self.identity)
        self.owns_memory = copy
        _live[self._serial] = self

    def _fill(
        self,
        array: Any,
        identity: Identity,
        device: Device,
        trainable: bool = True,
        constraint: Callable[[Any], Any] | None = None,
    ) -> Variable:
        self._array = array
        # The key of this variable's optimizer state.
        self.identity = identity
        self._serial = next(_serials)
        # Whether no other variable was made on the same memory; False for an adopted array.
        self.owns_memory = False
        self.device = device
        self.trainable = trainable
        self.is_average = False
        self._constraint = constraint
        # Of a slot or an average: a reference to its variable's identity.
        self._owner: weakref.ref[Identity] | None = None
        self._new_rows: NewRows = None
        self.copied_row_change: int | None = None
        return self

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def constraint(self) -> Callable[[Any], Any] | None:
        return self._constraint

    def serial(self) -> int:
        """Returns a number that grows with each variable made."""
        return self._serial

    def set_owner(self, variable: Variable, new_rows: NewRows) -> None:
        """Makes this a slot or an average of another variable.

        Args:
            variable: The other one.
            new_rows: What a row starts with if the other variable gets one more; None if that is
                not known.
        """
        self._owner = weakref.ref(variable.identity)
        self._new_rows = new_rows
        self.identity.was_named_by_gpuopt()

    @property
    def new_rows(self) -> NewRows:
        """What was given to `set_owner`."""
        return self._new_rows

    @property
    def has_owner(self) -> bool:
        """Whether this was made for another variable, as a slot or an average."""
        return self._owner is not None

    def is_owned_by(self, variable: Variable) -> bool:
        """Whether this was made for `variable`."""
        return self._owner is not None and self._owner() is variable.identity

    @property
    def is_orphan(self) -> bool:
        """Whether this was made for another variable, which is gone."""
        if self._owner is None:
            return False
        identity = self._owner()
        return identity is None or identity.holder() is None

    @property
    def is_raw_array(self) -> bool:
        """Whether this stands for a caller's array, only for as long as a call lasts."""
        return self._serial not in _live

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._array.dtype  # type: ignore[no-any-return]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape  # type: ignore[no-any-return]

    @property
    def ndim(self) -> int:
        return self._array.ndim  # type: ignore[no-any-return]

    @property
    def size(self) -> int:
        return self._array.size  # type: ignore[no-any-return]

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def T(self) -> Any:
        return self.value().T

    @property
    def storage(self) -> Any:
        """The array itself; a loss that reads it here gets no gradient for this variable."""
        behind = self.identity.behind
        if behind is not None:
            behind.bring_up()
        return self._numbers()

    @property
    def unread_storage(self) -> Any:
        """The array itself, for its address and its form: its rows may be behind."""
        return self._array

    def value(self) -> Any:
        """Returns the array itself, not a copy: it shows every later update.

        Of a table whose rows catch up with their steps, it shows those that were brought up to date
        since: read such a table again. Inside a loss that is being differentiated, returns the
        object that stands for the array. On a GPU, the current stream waits for updates on other
        streams.
        """
        self.bring_up()
        return self.unread_value()

    def unread_value(self) -> Any:
        """Does what `value` does; rows may be behind, other than those of `bring_up(rows)`."""
        by = recorder()
        if by is not None:
            return by.read(self)
        self.follow_updates()
        return self.unread_numbers()

    def unread_numbers(self) -> Any:
        """Returns the array to compute with; rows may be behind. No loss notices the read."""
        return self._numbers()

    def _numbers(self) -> Any:
        """Returns the array to read, after `bring_up`; in a step, its own number of a counter."""
        if self.identity.behind is None:
            return self._array
        return own_numbers.of.get(self.identity, self._array)

    def bring_up(self, rows: Any = None) -> None:
        """Brings the variable up to date with the steps so far; see `RowsBehind`."""
        behind = self.identity.behind
        if behind is not None:
            behind.bring_up(rows)

    def follow_updates(self) -> None:
        """Has the current stream of a GPU wait for updates on other streams."""
        if self.identity.last_update is not None:
            with backend_for(self.device).enter(self.identity):
                pass

    def note_reading(self) -> None:
        """Has the next update wait for what the current stream of a GPU has been given so far."""
        if gpu_backends:
            backend_for(self.device).note_reading(self.identity, kept=(self._array,))

    def numpy(self) -> np.ndarray[Any, Any]:
        """Returns a copy in host memory; waits for a GPU to finish the updates so far.

        Raises:
            IndexError: an earlier update on this GPU was given a row that its variable lacks.
            FloatingPointError: an earlier step on this GPU was not finite, and its optimizer's
                `on_nonfinite` is "raise".
        """
        if self.device.kind != "cpu":
            raise_late_errors(self.device)
        backend = backend_for(self.memory)
        with backend.enter(self.identity):
            self.bring_up()
            return backend.to_host(self._numbers())

    def assign(self, value: Any, use_locking: bool = False) -> Variable:
        """Overwrites the value in place, also what an unfinished step has left.

        Args:
            value: Of the variable's shape; its type may change only within its kind.
            use_locking: Waits for locked updates of this variable to finish.

        Returns:
            The variable.

        Raises:
            ValueError: `value` has another shape, or Python's integers do not fit into the type.
            TypeError: `value` has a type of another kind, as float64 for an integer variable.
            IndexError: the variable counts steps, and a GPU has refused one: see `numpy`.
            FloatingPointError: likewise.
        """
        if gpu_backends and self.ndim == 0:
            raise_late_errors_of(self)
        self.overwrite(value, use_locking)
        # Not in a restore, which may not come to its end, and settles all that it has written.
        if begun and not is_between_writes():
            settle([self.identity])
        return self

    def overwrite(self, value: Any, use_locking: bool = False) -> None:
        """Does what `assign` does, and leaves an unfinished step unsettled."""
        with reading(value):
            value = _checked_operand(self, value)
            with writing(), self._lock(use_locking), self._counting(), self._writing(value):
                _check_shape(self, value)
                self._array[...] = value

    def assign_add(self, delta: Any, use_locking: bool = False) -> Variable:
        """Adds `delta` in place; see `assign`."""
        return self._change(np.add, delta, use_locking)

    def assign_sub(self, delta: Any, use_locking: bool = False) -> Variable:
        """Subtracts `delta` in place; see `assign`."""
        return self._change(np.subtract, delta, use_locking)

    def _change(self, by: np.ufunc, delta: Any, use_locking: bool) -> Variable:
        with reading(delta):
            delta = _checked_operand(self, delta)
            with writing(), self._lock(use_locking), self._counting(), self._writing(delta):
                _check_shape(self, delta)
                by(self._array, delta, out=self._array, casting="same_kind")
        return self

    def assign_rows(self, rows: Any, value: Any) -> None:
        """Overwrites some rows in place; others may stay behind their steps.

        Args:
            rows: Integers within range; of a row that is there twice, the values are equal.
            value: An array [len(rows), ...] on the variable's device.
        """
        with writing(), reading(rows, value), self._writing(rows, value, rows=rows, at=rows):
            self._array[rows] = value

    def take_array(self, other: Variable) -> None:
        """Stands for another raw array from now on, which a new Variable stands for.

        Work on other streams of a GPU that reads or writes either array comes first.

        Args:
            other: The new Variable, of the same form. Its identity is moved; see `move_identity`.
        """
        with writing(), self._writing(), other._writing():
            array = other._array.view()
            move_identity(self.identity, other.identity)
            self._array = array

    def count_up(self, use_locking: bool = False) -> None:
        """Adds 1 in place, as `assign_add(1)` does, which takes several times as long to check it.

        Args:
            use_locking: See `assign`.
        """
        with writing(), self._lock(use_locking), self._counting(), self._writing():
            np.add(self._array, self.dtype.type(1), out=self._array)

    def count_down(self, note: Callable[[], object]) -> None:
        """Subtracts 1 in place, and calls `note`: both or neither, wherever Ctrl-C comes.

        Args:
            note: A method of a built-in type.
        """
        with writing(), self._counting(), self._writing():
            one = self.dtype.type(1)
            subtract = partial(np.subtract, self._array, one, out=self._array)
            at_once([subtract, note])

    @property
    def memory(self) -> Device:
        """Where the array that is written to is: a `HostScalar`'s is in host memory."""
        return self.device

    def _lock(self, use_locking: bool) -> AbstractContextManager[Any]:
        return self.identity.lock if use_locking else nullcontext()

    def _counting(self) -> AbstractContextManager[Any]:
        """Keeps steps of other threads from having a GPU change a number while it is written.

        A signal handler in the middle of an update does not wait for them, as they may wait for it.
        """
        may_count = gpu_backends and self.ndim == 0 and self.memory.kind == "cpu"
        return counting if may_count and not is_updating() else nullcontext()

    def _writing(
        self, *operands: Any, rows: Any = None, at: Any = ...
    ) -> AbstractContextManager[Any]:
        """Work inside writes to the variable, or to some rows, and reads the operands.

        Args:
            operands: What is read.
            rows: The rows that are written; others may stay behind their steps.
            at: The index of what is written.
        """
        before_write((self,))
        self.bring_up(rows)
        # Variables are kept by `reading`.
        kept = [each for each in operands if not isinstance(each, Variable)]
        work = backend_for(self.memory).enter_update(self.identity, kept=(self._array, kept))
        return followed(self.identity, work, at)

    def _being_read(self) -> AbstractContextManager[Any]:
        backend = backend_for(self.memory)
        return backend.enter_reading(self.identity, kept=(self._array,))

    def item(self, *index: Any) -> Any:
        """Returns one element as a number of Python's; see `numpy` about waiting."""
        self._refuse_as_constant("a number of Python's")
        return self.numpy().item(*index)

    def tolist(self) -> Any:
        """Returns the elements as nested lists of Python's numbers; see `numpy` about waiting."""
        self._refuse_as_constant("a list")
        return self.numpy().tolist()

    def _refuse_as_constant(self, what: str) -> None:
        """Raises TypeError in a loss that is differentiated by this variable."""
        by = recorder()
        if by is not None and by.watches(self):
            raise TypeError(
                f'"{self.name}" would lose its gradient by becoming {what} in a loss; '
                "numpy() gives a constant, and a @ b is what a.dot(b) is"
            )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if self.device.kind != "cpu":
            raise TypeError(
                f'"{self.name}" lives on {self.device}; numpy() copies it to host memory'
            )
        self._refuse_as_constant("a plain array")
        self.bring_up()
        return np.array(self._numbers(), dtype=dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        return self.storage.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.storage.__dlpack_device__()  # type: ignore[no-any-return]

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    def __getitem__(self, key: Any) -> Any:
        refuse_masked(key, f'the index for "{self.name}"')
        return having_read(self.value()[value_of(key)], self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        refuse_masked(key, f'the index for "{self.name}"')
        value = checked_foreign(value, self, "the value")
        at = storage_of(key)
        with writing(), reading(key, value), self._counting(), self._writing(key, value, at=at):
            self._array[at] = value_on_device(value, self, self.dtype)

    def __len__(self) -> int:
        return len(self._array)

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def __index__(self) -> int:
        if self.ndim != 0:
            raise TypeError(f'"{self.name}" of shape {self.shape} cannot be used as an index')
        array: SupportsIndex = self.numpy()
        return array.__index__()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies by value: the result is a variable of its own, on its own memory.

        Raises:
            RuntimeError: a step of it was not finished.
        """
        refuse_unfinished("copied", [self.identity])
        while True:
            rows = self.identity.row_change
            value = self.numpy()
            if self.identity.row_change == rows:  # else another thread has changed rows meanwhile
                break
        options = self.trainable, self._constraint, self.device
        return _copy, (value, self.name, *options, rows, self.identity.given_name)

    def __repr__(self) -> str:
        """Shows the value, abbreviated as by numpy; on a GPU, the host waits for it once."""
        array, memory = self._numbers(), backend_for(self.memory)
        return (
            f'<Variable "{self.name}" shape={self.shape} dtype={self.dtype} device={self.device} '
            f"value={format_value(array, self.identity, memory, self.identity.behind)}>"
        )


def _copy(
    value: Any,
    name: str,
    trainable: bool,
    constraint: Callable[[Any], Any] | None,
    device: Device,
    row_change: int | None = None,
    given_name: str | None = None,
) -> Variable:
    made = Variable(value, name, trainable, constraint, device=device)
    made.copied_row_change = row_change
    made.identity.given_name = given_name
    return made


def trainable_variables() -> list[Variable]:
    """Lists the live trainable variables in order of creation."""
    return [variable for variable in global_variables() if variable.trainable]


def global_variables() -> list[Variable]:
    """Lists all live variables, optimizers' state among them, in order of creation."""
    # One list at once: other threads make and drop variables meanwhile.
    live = (reference() for reference in _live.valuerefs())
    return sorted((each for each in live if each is not None), key=Variable.serial)


def as_variable(value: Any) -> Variable:
    """Returns a Variable as it is, and for a raw array a Variable that stands for its memory.

    Raises:
        TypeError: `value` is neither a Variable nor an array.
        ValueError: the array is read-only, or overlaps itself.
        DeviceUnavailableError: the array lives on a device that cannot be used.
    """
    if isinstance(value, Variable):
        return value
    device = device_of(value)
    backend = backend_for(device)
    array = backend.plain_array(value)
    if array is None:
        refuse_masked(value, "the variable")
        raise TypeError(f"expected a Variable or an array, got {describe(value)}{_hint(value)}")
    layout = backend.layout(array)
    if not layout.flags.writeable:
        raise ValueError(
            f"the array of shape {array.shape} and dtype {array.dtype} is read-only, so it cannot "
            "be updated; pass a writable one, or a gpuopt.Variable made from it"
        )
    # An empty array of a GPU has no address.
    address = layout.ctypes.data if array.size or device.kind == "cpu" else 0
    identity = identity_of(layout, address, backend.memory_owner(array, address))
    identity.note_seen(value)
    return object.__new__(Variable)._fill(array, identity, device)


def list_raw_array(variable: Variable) -> None:
    """Has `global_variables` list the Variable of a raw array for as long as it is kept.

    It stays as it is if the array gets another dtype or shape in place.
    """
    with backend_for(variable.device).enter():
        variable._array = variable._array.view()
    _live[variable.serial()] = variable


def checked_list(variables: Any, argument: str) -> list[Any]:
    """Returns the elements of a list of variables.

    Raises:
        TypeError: `variables` is one variable, whose rows would be taken for variables; or no list.
    """
    is_one = isinstance(variables, Variable | str) or hasattr(variables, "shape")
    if is_one or not is_iterable(variables):
        raise TypeError(f"{argument} must be a list of variables, got {describe(variables)}")
    return list(variables)


def is_iterable(value: Any) -> bool:
    """Whether a value can be iterated over.

    It is not tried: this may run user code, which may raise a TypeError for a reason of its own.
    """
    has_elements = isinstance(value, Iterable) or hasattr(type(value), "__getitem__")
    return has_elements and getattr(value, "shape", None) != ()


def known_identity(value: Any) -> Identity | None:
    """Returns the identity of a Variable, or of a raw array; None if that cannot be updated."""
    if isinstance(value, Variable):
        return value.identity
    try:
        return as_variable(value).identity
    except (TypeError, ValueError, DeviceUnavailableError):
        return None


def checked_rows(variable: Variable, values: Any, num_rows: int | None) -> Any:
    """Returns rows for a variable, as a new array of its dtype on its device.

    Args:
        variable: What they are for.
        values: [num_rows, ...], of a type as in `Variable.assign`.
        num_rows: How many there must be; None for any number.

    Raises:
        ValueError, TypeError: they do not fit.
    """
    with reading(values):
        array = _on_its_device(variable, values)
        of_row = variable.shape[1:]
        fits = array.ndim > 0 and array.shape[1:] == of_row and num_rows in (None, array.shape[0])
        if not fits:
            rows = "rows" if num_rows is None else f"{num_rows} rows"
            raise ValueError(
                f'values for {rows} of "{variable.name}", which have shape {of_row} each: got '
                f"values of shape {array.shape}"
            )
        _check_dtype(variable, array)
        return backend_for(variable.memory).full(array.shape, variable.dtype, array)


def require_known_owner(variable: Variable) -> None:
    """Raises ValueError for a raw array on memory of which gpuopt does not know the owner.

    Called before state is made for a variable: a new view of the same memory could not be told from
    new memory at the same address, so that state would be lost, or taken for another array's.
    """
    owner = variable.identity.unknown_owner
    if owner is not None:
        raise ValueError(
            f"the array of shape {variable.shape} and dtype {variable.dtype} has its memory from "
            f"{owner}, and gpuopt cannot tell when that memory is freed. Make a variable of the "
            "array once, by gpuopt.Variable(array, copy=False), and pass that instead: it updates "
            "the same memory and keeps the array's slots and averages"
        )


def _checked_operand(variable: Variable, value: Any) -> Any:
    """Returns what is about to be written; Python's numbers take the variable's type.

    Raises:
        ValueError, TypeError: see `Variable.assign`.
    """
    array = _on_its_device(variable, value)
    _check_shape(variable, array)
    _check_dtype(variable, array)
    return array


def _check_shape(variable: Variable, array: Any) -> None:
    """Raises ValueError for an array of another shape."""
    if array.shape != variable.shape:
        raise ValueError(
            f'"{variable.name}" has shape {variable.shape}; the value has shape {array.shape}'
        )


def _on_its_device(variable: Variable, value: Any) -> Any:
    array = storage_of(value)
    refuse_masked(array, f'the value for "{variable.name}"')
    if not hasattr(array, "dtype"):
        try:
            given = array = np.asarray(array)
        except ValueError as error:  # lists of several lengths
            raise ValueError(f'the value for "{variable.name}": {error}') from error
        if array.dtype.kind in "OSU":
            raise TypeError(
                f'the value for "{variable.name}" must hold numbers, got {type(value).__name__}'
            )
        if array.dtype.kind in ("biu" if variable.dtype.kind in "iu" else "biuf"):
            array = array.astype(variable.dtype)
            if variable.dtype.kind in "iu" and np.any(array != given):
                raise ValueError(
                    f'the value for "{variable.name}" does not fit into {variable.dtype}'
                )
    try:
        return to_device(array, variable.memory)
    except TypeError as error:
        raise TypeError(f'the value for "{variable.name}": {error}') from error


def _check_dtype(variable: Variable, array: Any) -> None:
    if not np.can_cast(array.dtype, variable.dtype, "same_kind"):
        raise TypeError(
            f'"{variable.name}" has dtype {variable.dtype}; the value has dtype {array.dtype}'
        )


def _hint(value: Any) -> str:
    """Says what to pass instead of a value that cannot be updated."""
    if isinstance(value, bool | int | float | list | tuple | np.generic):
        return "; make one, as in gpuopt.Variable(value), and keep it"
    if isinstance(getattr(value, "local", None), Variable):  # a MirroredVariable
        return "; in a replica, pass its own copy, `variable.local`"
    if isinstance(getattr(value, "__dict__", None), dict) and not hasattr(value, "__dlpack__"):
        return "; of an object that holds arrays, pass the arrays"
    return hint_for_foreign(value)
