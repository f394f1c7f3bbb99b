"""The languages that a loss may be written in."""

from __future__ import annotations

import autograd.numpy as anp
import fake_cupy
import numpy as np
import pytest
from losses import Language, to_stand_in

import gpuopt
from gpuopt.autodiff import tracing


@pytest.fixture(
    params=[
        "numpy",
        "autograd.numpy",
        pytest.param("stand-in", marks=pytest.mark.emulator),
        pytest.param("torch", marks=pytest.mark.torch),
    ]
)
def language(request: pytest.FixtureRequest) -> Language:
    if request.param == "torch":
        import torch

        return Language(torch, torch.as_tensor, gpuopt.with_torch)
    if request.param == "stand-in":
        request.getfixturevalue("emulated_gpus")
        tracing.add_array_type(fake_cupy.ndarray, fake_cupy)
        return Language(np, fake_cupy.asarray, place=to_stand_in, get=fake_cupy.asnumpy)
    return Language(np if request.param == "numpy" else anp, np.asarray)
