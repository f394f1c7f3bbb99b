"""Arrays of other libraries on a GPU, which become CuPy's without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpuopt

pytestmark = pytest.mark.gpu


class ByInterface:
    """An array that another library describes, as Numba's does."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def __cuda_array_interface__(self) -> Any:
        return self._array.__cuda_array_interface__


class ByDlpack:
    """An array that another library hands over, as torch's does."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def as_cupys(theirs: Any) -> Any:
    import cupy

    return cupy.from_dlpack(theirs) if isinstance(theirs, ByDlpack) else cupy.asarray(theirs)


@pytest.mark.parametrize("kind", [ByInterface, ByDlpack])
@pytest.mark.parametrize("optimizer", ["Momentum", "Adam"])
def test_weights_of_another_library_are_updated_where_they_are(
    kind: Any, optimizer: str, every_schedule: str
) -> None:
    import cupy

    rng = np.random.default_rng(0)
    start = rng.standard_normal((30, 7)).astype(np.float32)
    stream = rng.standard_normal((4, 30, 7)).astype(np.float32)
    arguments = {"Momentum": (0.1, 0.9), "Adam": (0.01,)}[optimizer]

    def make() -> gpuopt.Optimizer:
        return getattr(gpuopt, f"{optimizer}Optimizer")(*arguments)  # type: ignore[no-any-return]

    expected, on_host = gpuopt.Variable(start), make()
    memory = cupy.asarray(start)
    found = gpuopt.Variable(as_cupys(kind(memory)), copy=False)
    on_gpu = make()
    for each in stream:
        on_host.apply_gradients([(each, expected)])
        on_gpu.apply_gradients([(as_cupys(kind(cupy.asarray(each))), found)])
    values = cupy.asnumpy(memory)
    np.testing.assert_allclose(values, expected.numpy(), rtol=1e-5, atol=1e-6)
    assert (values != start).any()


@pytest.mark.parametrize("kind", [ByInterface, ByDlpack])
def test_a_gradient_of_another_library_is_read_where_it_is(kind: Any) -> None:
    import cupy

    variable = gpuopt.Variable(np.ones(5, np.float32), device="gpu:0")
    gradient = cupy.full(5, 2, cupy.float32)
    gpuopt.GradientDescentOptimizer(0.5).apply_gradients([(as_cupys(kind(gradient)), variable)])
    np.testing.assert_array_equal(variable.numpy(), np.zeros(5))
    np.testing.assert_array_equal(cupy.asnumpy(gradient), np.full(5, 2))
