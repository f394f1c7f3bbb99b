"""Has a test run on each kind of device."""

from __future__ import annotations

from typing import Any

import fake_cupy
import numpy as np
import pytest


@pytest.fixture(
    params=[
        "host",
        pytest.param("emulated", marks=pytest.mark.emulator),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ]
)
def xp(request: pytest.FixtureRequest) -> Any:
    """The module of a device's arrays."""
    if request.param == "host":
        return np
    if request.param == "emulated":
        request.getfixturevalue("emulated_gpus")
        return fake_cupy
    return pytest.importorskip("cupy")
