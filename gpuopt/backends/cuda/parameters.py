"""The parameters of kernels: numbers, pointers, and structs by value, with their C++ types."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol, get_type_hints

import ml_dtypes  # noqa: F401  (numpy knows the dtype name "bfloat16" from here on)
import numpy as np

from gpuopt.computed_once import computed_once

# numpy's dtype names to C++ types.
CPP_TYPES = {
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "float64": "double",
    "int32": "int",
    "int64": "long long",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
}


@cache
def name_of(dtype: np.dtype[Any]) -> str:
    """Returns numpy's name of a dtype. Cached: numpy composes the name anew each time."""
    return dtype.name


class Memory(Protocol):
    """The part of a `Launcher` that turns arrays into arguments."""

    xp: Any

    def address(self, array: Any) -> int: ...


@dataclass(frozen=True)
class Number:
    """A number by value.

    Attributes:
        dtype: numpy's name of its type.
    """

    dtype: str

    def __str__(self) -> str:
        return self.dtype

    @property
    def cpp_type(self) -> str:
        return CPP_TYPES[self.dtype]

    @property
    def code(self) -> str:
        """Its letter in formats of Python's `struct`: the same as numpy's."""
        return np.dtype(self.dtype).char

    def to_values(self, given: Any, memory: Memory) -> tuple[Any, ...]:
        """Returns what Python's `struct` packs: a numpy scalar of the dtype."""
        if type(given) in self.as_they_are or (type(given) is int and given in self._range):
            return (given,)
        if not isinstance(given, self._taken):
            raise _refusal(self, given)
        try:
            # numpy checks the range of Python's numbers, but not of its own.
            return (self.scalar(given.item() if isinstance(given, np.generic) else given),)
        except OverflowError:
            raise _refusal(self, given) from None

    @computed_once
    def scalar(self) -> type[Any]:
        """The type of numpy's scalars."""
        return np.dtype(self.dtype).type

    @computed_once
    def as_they_are(self) -> tuple[type[Any], ...]:
        """The types whose values need neither a check nor a conversion."""
        return (self.scalar, float) if self.dtype == "float64" else (self.scalar,)

    @computed_once
    def _range(self) -> range:
        """The Python integers that need no conversion."""
        if self.dtype.startswith("float"):
            return range(0)
        limits = np.iinfo(self.dtype)
        return range(int(limits.min), int(limits.max) + 1)

    @computed_once
    def _taken(self) -> tuple[type[Any], ...]:
        integers = int, np.integer
        return (*integers, float, np.floating) if self.dtype.startswith("float") else integers


@dataclass(frozen=True)
class Numbers:
    """An array of numbers inside a struct.

    Attributes:
        number: One of them.
        count: How many there are.
    """

    number: Number
    count: int

    def __str__(self) -> str:
        return f"{self.count} of {self.number}"

    @property
    def code(self) -> str:
        return f"{self.count}{self.number.code}"

    def to_values(self, given: Any, memory: Memory) -> tuple[Any, ...]:
        """Returns what Python's `struct` packs."""
        if len(given) != self.count:
            raise _refusal(self, given)
        return tuple(value for each in given for value in self.number.to_values(each, memory))


@dataclass(frozen=True)
class Records:
    """An array of structs inside a struct.

    Attributes:
        record: One of them.
        count: How many there are.
    """

    record: Struct
    count: int

    def __str__(self) -> str:
        return f"the bytes of up to {self.count} of {self.record.cpp_type}"

    @property
    def code(self) -> str:
        return f"{self.count * self.record.size}s"

    def to_values(self, given: Any, memory: Memory) -> tuple[Any, ...]:
        """Returns what Python's `struct` packs: those that are missing become 0."""
        size = self.record.size
        if type(given) is not bytes or len(given) % size or len(given) > self.count * size:
            raise _refusal(self, given)
        return (given,)


@dataclass(frozen=True)
class Several:
    """An array inside a struct template, whose parameter `count` is its length.

    Attributes:
        element: A number, or the name of the parameter that stands for a struct.
    """

    element: Number | str


@dataclass(frozen=True)
class Pointer:
    """The address of an array on the device.

    Attributes:
        dtype: numpy's name of the array's dtype.
        struct: The struct that C++ reads from the array, each number from one element; None if C++
            reads numbers.
        is_optional: Whether None is accepted, too, as a null pointer.
    """

    dtype: str
    struct: Struct | None = None
    is_optional: bool = False

    code = "P"

    def __str__(self) -> str:
        return f"*{self.dtype}"

    @property
    def cpp_type(self) -> str:
        """The type in C++, without the `const` that it may have there."""
        return f"{CPP_TYPES[self.dtype] if self.struct is None else self.struct.cpp_type}*"

    def to_values(self, given: Any, memory: Memory) -> tuple[Any, ...]:
        """Returns what Python's `struct` packs: the array's address, or 0 for None."""
        if given is None and self.is_optional:
            return (0,)
        if not isinstance(given, memory.xp.ndarray) or given.dtype != self._dtype:
            raise _refusal(self, given)
        if self.struct is not None and given.nbytes % self.struct.size:
            fields = ", ".join(self.struct.fields)
            raise TypeError(f" must have elements for {fields}; it has {given.size}")
        return (memory.address(given),)

    @computed_once
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)


@dataclass(frozen=True)
class Struct:
    """A struct by value; in Python, a NamedTuple with fields of the same names.

    Its fields lie side by side, without padding: so all compilers have the same offsets.

    Attributes:
        cpp_type: Its name in C++, with template arguments.
        fields: By name, in C++'s order.
    """

    cpp_type: str
    fields: Mapping[str, Field]

    def __post_init__(self) -> None:
        codes = [field.code for field in self.fields.values()]
        widest = max((code[-1] for code in codes), key=struct.calcsize, default="b")
        if struct.calcsize(f"{''.join(codes)}0{widest}") != sum(map(struct.calcsize, codes)):
            raise TypeError(f"{self.cpp_type} has padding: declare its widest fields first")

    def __str__(self) -> str:
        return f"a tuple with fields {', '.join(self.fields)}"

    @computed_once
    def size(self) -> int:
        """In bytes."""
        return struct.calcsize(self.code)

    @property
    def offsets(self) -> list[int]:
        """Where each field begins, in bytes."""
        sizes = [struct.calcsize(field.code) for field in self.fields.values()]
        return [sum(sizes[:position]) for position in range(len(sizes))]

    def to_values(self, given: Any, memory: Memory) -> tuple[Any, ...]:
        """Returns what Python's `struct` packs."""
        if getattr(given, "_fields", None) != self._names:
            raise _refusal(self, given)
        if tuple(map(type, given)) == self._types:  # as a rule's scalars mostly are
            return tuple(given)
        values: list[Any] = []
        for (name, field), value in zip(self.fields.items(), given, strict=True):
            # As `Number.to_values` does it, whose call would cost time.
            if type(field) is Number:
                kind = type(value)
                if kind in field.as_they_are or (kind is int and value in field._range):
                    values.append(value)
                    continue
            try:
                values.extend(field.to_values(value, memory))
            except TypeError as error:
                raise TypeError(f".{name}{error}") from None
        return tuple(values)

    @computed_once
    def code(self) -> str:
        """Its format for Python's `struct`."""
        # C++ has no struct of 0 bytes.
        return "".join(field.code for field in self.fields.values()) or "x"

    @computed_once
    def _names(self) -> tuple[str, ...]:
        return tuple(self.fields)

    @computed_once
    def _types(self) -> tuple[type[Any] | None, ...]:
        """The fields' types, if they are numbers, which need no further checks."""
        fields = self.fields.values()
        return tuple(field.scalar if isinstance(field, Number) else None for field in fields)


Field = Number | Numbers | Records | Pointer
Parameter = Number | Pointer | Struct


def struct_of(form: type, **arguments: str | int | Struct) -> Struct:
    """Returns the struct of a NamedTuple of structs.py.

    Args:
        form: Its fields are annotated by their types in C++, where it is `gpuopt::<name>`.
        arguments: Those of the template, by the names of its parameters and in order: a dtype, a
            struct, or the `count` of elements of its arrays.
    """
    fields = {name: _filled_in(field, arguments) for name, field in fields_of(form).items()}
    in_cpp = (
        each.cpp_type if isinstance(each, Struct) else CPP_TYPES.get(str(each), str(each))
        for each in arguments.values()
    )
    listed = f"<{', '.join(in_cpp)}>" if arguments else ""
    return Struct(f"gpuopt::{form.__name__}{listed}", fields)


@cache
def fields_of(form: type) -> dict[str, Field | Several]:
    """Returns the types of a NamedTuple's fields in C++. Cached: annotations are evaluated."""
    hints = get_type_hints(form, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


def _filled_in(field: Field | Several, arguments: Mapping[str, Any]) -> Field:
    """Puts arguments in the places of a template's parameters."""
    if isinstance(field, Several):
        if isinstance(field.element, Number):
            return Numbers(field.element, arguments["count"])
        return Records(arguments[field.element], arguments["count"])
    if isinstance(field, Pointer) and field.dtype in arguments:
        return replace(field, dtype=arguments[field.dtype])
    return field


def _refusal(expected: Parameter | Numbers | Records, given: Any) -> TypeError:
    """Makes the error for a wrong argument; the caller puts the parameter's name before it."""
    got = repr(given)
    if hasattr(given, "dtype") and not isinstance(given, np.generic):
        got = f"*{given.dtype.name} of {type(given).__module__}"
    return TypeError(f" must be {expected}, got {got}")
