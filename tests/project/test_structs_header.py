"""The structs and constants of kernels are those of Python."""

from __future__ import annotations

import pytest
import structs_header


@pytest.mark.parametrize("name", ["structs.cuh", "constants.cuh"])
def test_the_header_is_as_python_declares_it(name: str) -> None:
    [(path, text)] = [each for each in structs_header.headers().items() if each[0].name == name]
    assert path.read_text() == text, f"write it anew by {structs_header.COMMAND}"
