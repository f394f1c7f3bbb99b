"""What a kernel is: a function template of `kernels/`, with its types filled in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Any

from gpuopt.backends.cuda.parameters import Memory, Parameter, Pointer, Struct
from gpuopt.computed_once import computed_once
from gpuopt.rules.sources import kernel_root
from gpuopt.rules.update_rule import UpdateRule


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel, compiled for one set of types.

    What is declared here must hold in C++, too. The compiler checks it, except for the names of
    parameters, which tests compare.

    Attributes:
        function: Its name in namespace gpuopt; `<function>.cu` of `kernels/` unless `file` says.
        parameters: What it takes, in order, under the names that they have in C++.
        types: C++ template arguments.
        rule: The rule whose functor is one of them.
        file: Where the function stands.
        constants: The values of constants in C++ that the host relies on.
    """

    function: str
    parameters: Mapping[str, Parameter]
    types: tuple[str, ...] = ()
    rule: UpdateRule | None = None
    file: str = ""
    constants: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @computed_once
    def expression(self) -> str:
        """The function's name in C++, as NVRTC takes it."""
        arguments = f"<{', '.join(self.types)}>" if self.types else ""
        return f"gpuopt::{self.function}{arguments}"

    @property
    def includes(self) -> list[str]:
        """The files that a translation unit needs, the function's own last."""
        of_rule = () if self.rule is None else self.rule.headers
        return ["shared/declared.cuh", *of_rule, self.file or f"{self.function}.cu"]

    @property
    def include_folders(self) -> tuple[Traversable, ...]:
        """Where the compiler looks for what `source` includes."""
        return (kernel_root(),) if self.rule is None else self.rule.include_folders

    @property
    def assertions(self) -> list[str]:
        """Lines of C++ that compile if the includes hold what is declared here."""
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
            struct = parameter.struct if isinstance(parameter, Pointer) else parameter
            if isinstance(struct, Struct):
                lines += _layout(struct)
        for name, value in self.constants.items():
            lines.append(_assertion(f"{name} == {value}", f"{name} as {value}"))
        return lines

    @computed_once
    def source(self) -> str:
        """A translation unit that has the function, and compiles only if it is as declared."""
        includes = [f'#include "{file}"' for file in self.includes]
        return "".join(f"{line}\n" for line in [*includes, *self.assertions])

    def order_arguments(self, given: Mapping[str, Any], memory: Memory) -> list[Any]:
        """Checks a launch's arguments, and puts them in C++'s order.

        Args:
            given: By parameter: for a pointer an array, or None if it is optional; a number; for a
                struct a NamedTuple of these.
            memory: The launcher.

        Returns:
            Arrays, None for null pointers, numpy scalars, and for a struct its bytes: a numpy array
            of one element.

        Raises:
            TypeError: an argument is missing or unknown, or is not of the parameter's type.
        """
        if given.keys() != self.parameters.keys():
            missing = [name for name in self.parameters if name not in given]
            unknown = [name for name in given if name not in self.parameters]
            raise TypeError(
                f"{self.expression} takes {', '.join(self.parameters)}; missing: "
                f"{', '.join(missing) or 'none'}, unknown: {', '.join(unknown) or 'none'}"
            )
        ordered = []
        for name, parameter in self.parameters.items():
            try:
                ordered.append(parameter.to_argument(given[name], memory))
            except TypeError as error:
                raise TypeError(f"{self.expression}: {name}{error}") from None
        return ordered

    @computed_once
    def positions(self) -> Mapping[str, int]:
        """Where each parameter stands in C++'s order."""
        return {name: position for position, name in enumerate(self.parameters)}


def _assertion(condition: str, declaration: str) -> str:
    return f'static_assert({condition}, "Python declares {declaration}");'


def _layout(struct: Struct) -> list[str]:
    """Asserts that a struct has these fields in C++, and no others."""
    name = struct.cpp_type
    lines = [_assertion(f"sizeof({name}) == {struct.size}", f"{name} with {struct.size} bytes")]
    for (field, parameter), offset in zip(struct.fields.items(), struct.offsets, strict=True):
        same_type = f"gpuopt::is_declared<decltype({name}::{field}), {parameter.cpp_type}>"
        same_place = f"GPUOPT_OFFSET({field}, {name}) == {offset}"
        declaration = f"{name}::{field} as {parameter.cpp_type} at byte {offset}"
        lines.append(_assertion(f"{same_type} && {same_place}", declaration))
    return lines
