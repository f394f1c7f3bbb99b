"""Writes tests/project/public_api.txt: every public name of gpuopt, with its signature.

.venv/bin/python tests/support/public_api.py
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, ForwardRef

from internal_names import internal_members

from gpuopt.optimizers.base.declared import type_in

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ".venv/bin/python tests/support/public_api.py"
PAGE = ROOT / "tests" / "project" / "public_api.txt"
MODULES = (
    "gpuopt",
    "gpuopt.contrib",
    "gpuopt.device",
    "gpuopt.distributed",
    "gpuopt.errors",
    "gpuopt.interop",
    "gpuopt.schedules",
    "gpuopt.optimizers.base",
)
# What TensorFlow 1's subclasses override and call.
HOOKS = frozenset(
    [
        "_apply_dense",
        "_apply_sparse",
        "_apply_sparse_duplicate_indices",
        "_call_if_callable",
        "_create_non_slot_variable",
        "_create_slots",
        "_finish",
        "_get_non_slot_variable",
        "_get_or_make_slot",
        "_get_or_make_slot_with_initializer",
        "_prepare",
        "_resource_apply_dense",
        "_resource_apply_sparse",
        "_resource_apply_sparse_duplicate_indices",
        "_slot_dict",
        "_valid_dtypes",
        "_zeros_slot",
    ]
)


class Written(str):
    """An annotation as its module has it."""

    __slots__ = ()
    __repr__ = str.__str__


def listing() -> str:
    """Returns a line for each public name, and for each public member of a class."""
    exported = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            # A name that several modules export belongs to the first one.
            found = getattr(module, name)
            exported.setdefault(id(found), (f"{module_name}.{name}", found))
    named = dict(exported.values())
    classes = {found: name for name, found in named.items() if isinstance(found, type)}
    lines = []
    for name in sorted(named):
        lines += describe(name, named[name], classes)
    return "\n".join(lines) + "\n"


def describe(name: str, found: Any, classes: dict[type, str]) -> Iterator[str]:
    if not isinstance(found, type):
        yield f"{name}{signature_of(found)}" if callable(found) else f"{name}: {found!r}"
        return
    bases = [classes.get(base, base.__name__) for base in found.__bases__]
    yield f"class {name}({', '.join(bases)})"
    if has_own_constructor(found):
        has_full_one = any("__signature__" in vars(base) for base in found.__mro__)
        yield f"{name}.__init__{signature_of(found.__init__ if has_full_one else found)}"
    yield from sorted(members_of(name, found, classes))


def members_of(name: str, found: type, classes: dict[type, str]) -> Iterator[str]:
    """Yields the public members that are the class's own, or of bases that are not exported."""
    internal = internal_members(found)
    listed_elsewhere = {
        base for listed in found.__mro__[1:] if listed in classes for base in listed.__mro__
    }
    seen = set()
    for base in found.__mro__:
        if base in listed_elsewhere or not base.__module__.startswith("gpuopt"):
            continue
        members = {**inspect.get_annotations(base), **vars(base)}
        for member in members:
            is_hook = member in HOOKS and classes[found] == "gpuopt.Optimizer"
            is_private = member.startswith("_") or member in internal
            if member in seen or (is_private and not is_hook):
                continue
            seen.add(member)
            if member not in vars(base):
                yield f"{name}.{member}: {as_written(members[member])}"
            else:
                annotation = inspect.get_annotations(base).get(member)
                yield f"{name}.{member}{describe_member(vars(base)[member], annotation)}"


def describe_member(value: Any, annotation: Any) -> str:
    if isinstance(value, property) and not inspect.isfunction(value.fget):
        return f": property(self) -> {annotation}"  # a built-in reads it
    if isinstance(value, property):
        is_set = ", can be set" if value.fset else ""
        return f": property{signature_of(value.fget)}{is_set}"
    if isinstance(value, classmethod | staticmethod):
        return f": {type(value).__name__}{signature_of(value.__func__)}"
    if inspect.isfunction(value):
        return signature_of(value)
    if isinstance(value, bool | int | float | str | tuple | frozenset | None | Enum):
        return f" = {value!r}"
    return f": {type(value).__name__}"


_NONE = object.__init__


def has_own_constructor(found: type) -> bool:
    """Whether a class of gpuopt says what it is made of; those of enums and protocols do not."""
    if issubclass(found, Enum) or getattr(found, "_is_protocol", False):
        return False
    own = [
        vars(base)
        for base in found.__mro__
        if base.__module__.startswith("gpuopt") and not getattr(base, "_is_protocol", False)
    ]
    # Python gives a class that implements a protocol object's, when it is first called.
    return any("__new__" in each or each.get("__init__", _NONE) is not _NONE for each in own)


def signature_of(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=as_written(parameter.annotation))
        for parameter in signature.parameters.values()
    ]
    result = as_written(signature.return_annotation)
    text = str(signature.replace(parameters=parameters, return_annotation=result))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def as_written(annotation: Any) -> Any:
    if isinstance(annotation, ForwardRef):  # whose repr depends on the version of Python
        annotation = annotation.__forward_arg__
    annotation = type_in(annotation)
    return Written(annotation) if isinstance(annotation, str) else annotation


if __name__ == "__main__":
    PAGE.write_text(listing())
