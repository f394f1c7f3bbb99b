"""By what a variable is known again, and how long its identity lasts."""

from __future__ import annotations

import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpuopt
from gpuopt.backends import backend_for
from gpuopt.device import Device
from gpuopt.variables.variable import as_variable


def test_the_holder_of_a_variable_is_the_variable_itself() -> None:
    variable = gpuopt.Variable([1.0, 2.0])
    identity = variable.identity
    assert identity.holder() is variable
    del variable
    assert identity.holder() is None


def test_the_holder_of_a_raw_array_owns_its_memory_and_can_be_watched() -> None:
    memory = np.zeros(6, np.float32)
    identity = as_variable(memory[2:]).identity
    assert identity.holder() is memory
    ended: list[str] = []
    watch = weakref.ref(identity.holder(), lambda _: ended.append("memory"))
    del memory
    assert ended == ["memory"]
    assert identity.holder() is watch() is None


FORMS = [
    lambda a: a,
    lambda a: a[1:, ::2],
    lambda a: a[::-1],
    lambda a: a.T,
    lambda a: a[1, 1:2].reshape(()),
    lambda a: a[:0],
]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("form", FORMS)
def test_an_unowned_array_is_on_the_same_memory_and_does_not_keep_it(form: Any, dtype: Any) -> None:
    memory = np.arange(12).reshape(3, 4).astype(dtype)
    array = form(memory)
    unowned = backend_for(Device.cpu).unowned(array)
    assert type(unowned) is np.ndarray
    assert (unowned.shape, unowned.strides, unowned.dtype) == (
        *(array.shape, array.strides, array.dtype),
    )
    unowned[...] = 7
    assert np.all(array == dtype(7))
    gone = weakref.ref(memory)
    del memory, array
    assert gone() is None


@pytest.mark.emulator
@pytest.mark.parametrize("form", FORMS[:3])
def test_an_unowned_array_of_a_gpu_is_on_the_same_memory_and_does_not_keep_it(
    form: Any, emulated_gpus: Any
) -> None:
    launcher = emulated_gpus[1]
    with launcher.device():
        memory = launcher.xp.zeros((3, 4), ml_dtypes.bfloat16)
    array = form(memory)
    unowned = backend_for(Device("gpu", 1)).unowned(array)
    assert type(unowned) is type(memory)
    assert (unowned.shape, unowned.strides, unowned.dtype) == (
        *(array.shape, array.strides, array.dtype),
    )
    assert unowned.device_id == 1
    unowned._host[...] = 7
    assert array._host.astype(np.float32).min() == 7
    gone = weakref.ref(memory)
    del memory, array
    assert gone() is None


@pytest.mark.emulator
def test_state_is_refused_for_what_another_library_lends_a_gpu(emulated_gpus: Any) -> None:
    launcher = emulated_gpus[0]
    with launcher.device():
        memory = launcher.xp.zeros((3,), np.float32)
        gradient = launcher.xp.ones((3,), np.float32)
        lent = launcher.xp.from_dlpack(memory)
    with pytest.raises(ValueError, match="has its memory from another library"):
        gpuopt.MomentumOptimizer(1.0, 0.9).apply_gradients([(gradient, lent)])
    assert not memory._host.any()
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.9)
    for _ in range(3):
        optimizer.apply_gradients([(gradient, memory[:])])
    assert np.allclose(memory._host, -5.61)
