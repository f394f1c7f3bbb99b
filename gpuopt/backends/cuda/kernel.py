"""What a kernel is: a function template of `kernels/`, with its types filled in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Kernel:
    """One kernel, compiled for one set of types.

    Attributes:
        function: Its name in namespace gpuopt; `<function>.cu` of `kernels/` unless `file` says.
        parameters: What it takes, in order: numpy dtype names with a star for pointers ("*float32",
            "int64"), or "*void" for memory of any kind.
        types: C++ template arguments.
        header: A header of `kernels/` that they need.
        file: Where the function stands.
    """

    function: str
    parameters: tuple[str, ...]
    types: tuple[str, ...] = ()
    header: str | None = None
    file: str = ""

    @cached_property
    def expression(self) -> str:
        """The function's name in C++, as NVRTC takes it."""
        arguments = f"<{', '.join(self.types)}>" if self.types else ""
        return f"gpuopt::{self.function}{arguments}"

    @cached_property
    def source(self) -> str:
        """A translation unit that holds the function."""
        files = [self.header, self.file or f"{self.function}.cu"]
        return "".join(f'#include "{file}"\n' for file in files if file is not None)
