"""Which backend runs on a device."""

from __future__ import annotations

from contextlib import suppress

import pytest

import gpuopt
from gpuopt import Variable
from gpuopt.backends import backend_for, using
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cuda.availability import ask_driver
from gpuopt.device import Device


@pytest.mark.skipif(ask_driver().problem is None, reason="there is a GPU")
@pytest.mark.parametrize("device", ["gpu:7", "gpu"])
def test_a_gpu_that_is_not_there_is_named(device: str) -> None:
    with pytest.raises(gpuopt.DeviceUnavailableError, match=f'"gpu:{device[4:] or 0}" was asked'):
        Variable(1.0, device=device)


def test_a_backend_is_used_inside_the_context_alone() -> None:
    before, outer, inner = backend_for(Device.cpu), CpuBackend(), CpuBackend()
    with using(Device.cpu, outer):
        with suppress(ZeroDivisionError), using(Device.cpu, inner):
            assert backend_for(Device.cpu) is inner
            raise ZeroDivisionError
        assert backend_for(Device.cpu) is outer
    assert backend_for(Device.cpu) is before


def test_a_device_that_was_not_there_is_not_there_again_afterwards() -> None:
    gpu, backend = Device("gpu", 99), CpuBackend()
    with using(gpu, backend):
        assert backend_for(gpu) is backend
    with pytest.raises(gpuopt.DeviceUnavailableError):
        backend_for(gpu)
