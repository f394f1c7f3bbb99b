"""A kernel: a function template of `kernels/` with its types filled in."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import NamedTuple

from gpuopt.backends.cuda.parameters import Parameter, Pointer
from gpuopt.codecs import Codec
from gpuopt.computed_once import computed_once
from gpuopt.rules.sources import kernel_root
from gpuopt.rules.update_rule import UpdateRule

# The types that a struct is named after, of a rule's arrays and of others.
_OF_ARRAYS = ("Var", "Slot", "Gradient")
_OTHERS = ("Companion", "Storage", "Source", "Key", "Index")
# Bytes: each argument begins at a multiple, as no type in C++ that is declared needs more.
WORD = 8


class Place(NamedTuple):
    """Where an argument lies.

    Attributes:
        parameter: The parameter that it is for.
        pack_into: Writes its values to memory, at an offset: `struct.Struct`'s.
        offset: In bytes.
    """

    parameter: Parameter
    pack_into: Callable[..., None]
    offset: int


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel, compiled for one type, or for a struct that has several.

    A template has one parameter: those of several, CuPy 14.0 and 14.1 compile anew in each process
    (github.com/cupy/cupy/issues/10173). What a rule's kernel is compiled for is a program: a struct
    that is derived from the rule's functor.

    The declarations must hold in C++, too. The compiler checks them, except for the names of
    parameters, which tests compare.

    Attributes:
        function: Its name in namespace gpuopt.
        parameters: Its parameters, in order, by their names in C++.
        types: What the template's argument has, types of C++ and integers, by name; or that type
            itself, if it is the only one and there is no rule.
        rule: The rule that the argument is derived from.
        other_rows: The rule of rows without a gradient, if its functor is one of the types.
        file: The file in `kernels/` that defines the function; by default `<function>.cu`.
        codecs: Those whose C++ is among the types.
    """

    function: str
    parameters: Mapping[str, Parameter]
    types: Mapping[str, str | int] = dataclasses.field(default_factory=dict)
    rule: UpdateRule | None = None
    file: str = ""
    other_rows: UpdateRule | None = None
    codecs: tuple[Codec, ...] = ()

    @computed_once
    def expression(self) -> str:
        """The function's name in C++, as NVRTC takes it."""
        return f"gpuopt::{self.function}{f'<{self.argument}>' if self.types else ''}"

    @computed_once
    def argument(self) -> str:
        """The template's argument in C++; "" of a function that is no template."""
        if self._is_struct:
            return f"gpuopt::{self._struct_name}"
        return str(next(iter(self.types.values()), ""))

    @property
    def struct(self) -> list[str]:
        """C++ that defines the argument after the function's own file; none of a type alone."""
        if not self._is_struct:
            return []
        text = f"struct {self._struct_name}{self._base} {{\n{self._body}}};"
        return [f"namespace gpuopt {{\n{text}\n}}"]

    @property
    def _is_struct(self) -> bool:
        return len(self.types) > 1 or self.rule is not None

    @property
    def _base(self) -> str:
        return "" if self.rule is None else f" : {self.rule.functor}"

    @property
    def _body(self) -> str:
        return "".join(
            f"  static constexpr int {name} = {value};\n"
            if isinstance(value, int)
            else f"  using {name} = {value};\n"
            for name, value in self.types.items()
        )

    @computed_once
    def _struct_name(self) -> str:
        """The rule's name and the types, for people, and a digest, which makes it unique."""
        functor = "types" if self.rule is None else self.rule.functor.rpartition("::")[2]
        arrays, others = (
            [str(self.types[name]) for name in names if name in self.types]
            for names in (_OF_ARRAYS, _OTHERS)
        )
        if len(set(arrays)) == 1 and "gpuopt::Alone" in others:
            arrays = arrays[:1]
        digest = hashlib.sha256(f"{self._base} {self._body}".encode()).hexdigest()[:8]
        words = re.findall(r"[A-Za-z0-9]+", " ".join((*arrays, *others)).replace("gpuopt::", ""))
        return "_".join((functor, *words, digest))

    @property
    def name(self) -> str:
        """The function's name and the rule's, for people."""
        return self.function if self.rule is None else f"{self.function} {self.rule.name}"

    @property
    def rules(self) -> list[UpdateRule]:
        """The rule, and the one of rows without a gradient."""
        return [rule for rule in (self.rule, self.other_rows) if rule is not None]

    @property
    def own_file(self) -> str:
        """The file where the function stands."""
        return self.file or f"{self.function}.cu"

    @property
    def definitions(self) -> list[str]:
        """C++ that a translation unit needs before the function's own file, piece by piece."""
        shared = '#include "shared/declared.cuh"'
        of_rules = (each for rule in self.rules for each in rule.definitions)
        of_codecs = (each for codec in self.codecs for each in codec.definitions)
        return [shared, *of_rules, *dict.fromkeys(of_codecs)]

    @property
    def include_folders(self) -> tuple[Traversable, ...]:
        """Where the compiler looks for what `source` includes."""
        of_rules = [folder for rule in self.rules for folder in rule.include_folders]
        return tuple(dict.fromkeys((kernel_root(), *of_rules)))

    @property
    def assertions(self) -> list[str]:
        """Lines of C++ that compile only if the includes agree with the declarations."""
        function = f"decltype({self.expression})"
        count = len(self.parameters)
        lines = [
            _assertion(
                f"gpuopt::num_parameters<{function}> == {count}",
                f"{self.expression} with {count} parameters",
            )
        ]
        for position, (name, parameter) in enumerate(self.parameters.items()):
            lines.append(
                _assertion(
                    f"gpuopt::takes<{position}, {function}, {parameter.cpp_type}>",
                    f"parameter {position} of {self.expression}, {name}, as {parameter.cpp_type}",
                )
            )
        return lines

    @property
    def pieces(self) -> list[str]:
        """C++ that has the function, and compiles only if it is as declared, piece by piece."""
        return [*self.definitions, f'#include "{self.own_file}"', *self.struct, *self.assertions]

    @computed_once
    def source(self) -> str:
        """A translation unit of these pieces."""
        return "".join(f"{piece}\n" for piece in self.pieces)

    def check_names(self, given: Collection[str]) -> None:
        """Raises TypeError if an argument is missing or unknown; a null pointer may be left out."""
        needed = (name for name, each in self.parameters.items() if not _may_be_null(each))
        missing = [name for name in needed if name not in given]
        unknown = [name for name in given if name not in self.parameters]
        if missing or unknown:
            raise TypeError(
                f"{self.expression} takes {', '.join(self.parameters)}; missing: "
                f"{', '.join(missing) or 'none'}, unknown: {', '.join(unknown) or 'none'}"
            )

    @computed_once
    def places(self) -> Mapping[str, Place]:
        """Where each argument lies in the memory of a launch, behind pointers."""
        places = {}
        offset = WORD * len(self.parameters)
        for name, parameter in self.parameters.items():
            packed = struct.Struct(parameter.code)
            places[name] = Place(parameter, packed.pack_into, offset)
            offset += -(-packed.size // WORD) * WORD
        return places

    @computed_once
    def words_of_arguments(self) -> int:
        """How many words the pointers and arguments take."""
        sizes = [struct.calcsize(parameter.code) for parameter in self.parameters.values()]
        return len(sizes) + sum(-(-size // WORD) for size in sizes)


def _may_be_null(parameter: Parameter) -> bool:
    return isinstance(parameter, Pointer) and parameter.is_optional


def _assertion(condition: str, declaration: str) -> str:
    return f'static_assert({condition}, "Python declares {declaration}");'
