"""The structs of kernels' arguments in C++ are those of Python."""

from __future__ import annotations

import structs_header


def test_the_header_of_structs_is_as_python_declares_them() -> None:
    written = structs_header.HEADER.read_text()
    assert written == structs_header.header(), f"write it anew by {structs_header.COMMAND}"
