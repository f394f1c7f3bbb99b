"""Every derivative that gpuopt registers in autograd again, to second order.

The reference is autograd's own check: finite differences of the function, and of its gradient.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import autograd.numpy as np
import autograd.scipy.special as special
import numpy
import pytest
from autograd.test_util import check_grads

from gpuopt.autodiff import cupy_compat

_rng = numpy.random.default_rng(0)


def real(*shape: int) -> Any:
    return _rng.normal(size=shape) + 0.1


def positive(*shape: int) -> Any:
    return _rng.uniform(0.5, 1.5, size=shape)


MATRICES = [(), (3,), (2, 3), (4, 2, 3)]
FACTORS = [(), (3,), (3, 5), (4, 3, 5)]
ROW = numpy.array([True, False, True])
COLUMN = numpy.array([[True], [False]])

# By the name of the function whose derivative is checked.
CASES: dict[str, list[tuple[Any, ...]]] = {
    "sum": [
        (lambda x: np.sum(x * x), real(2, 3)),
        (lambda x: np.sum(x * x, axis=(0, -1)), real(2, 3, 4)),
        (lambda x: np.sum(x * x, axis=1, keepdims=True), real(2, 3)),
    ],
    "mean": [
        (lambda x: np.mean(x * x), real(2, 3)),
        (lambda x: np.mean(x * x, axis=-1, keepdims=True), real(2, 3)),
    ],
    "prod": [(lambda x: np.prod(x), positive(4)), (lambda x: np.prod(x, axis=1), positive(4, 3))],
    "var": [(lambda x: np.var(x), real(4, 3)), (lambda x: np.var(x, axis=0, ddof=1), real(4, 3))],
    "std": [(lambda x: np.std(x), real(4, 3)), (lambda x: np.std(x, axis=0, ddof=1), real(4, 3))],
    "max": [(lambda x: np.max(x), real(4, 3)), (lambda x: np.max(x, axis=1), real(4, 3))],
    "amax": [(lambda x: np.amax(x * x, axis=1, keepdims=True), real(4, 3))],
    "min": [(lambda x: np.min(x), real(4, 3)), (lambda x: np.min(x, axis=0), real(4, 3))],
    "amin": [(lambda x: np.amin(x * x, axis=-1, keepdims=True), real(4, 3))],
    "trace": [(lambda x: np.trace(x * x, 1), real(3, 4))],
    "power": [
        (lambda x: x**3, real(2, 3)),
        (lambda x: 2.0**x, real(2, 3)),
        (lambda x: 0.0**x, positive(3)),
        (lambda x, y: np.power(x, y), positive(2, 3), real(3)),
    ],
    "exp2": [(lambda x: np.exp2(x), real(2, 3))],
    "log2": [(lambda x: np.log2(x), positive(2, 3))],
    "log10": [(lambda x: np.log10(x), positive(2, 3))],
    "maximum": [(lambda x, y: np.maximum(x, y), real(2, 3), real(3))],
    "minimum": [(lambda x, y: np.minimum(x, y), real(2, 1), real(2, 3))],
    "fmax": [(lambda x, y: np.fmax(x * x, y), real(2, 3), real(3))],
    "fmin": [(lambda x, y: np.fmin(x * x, y), real(2, 3), real(3))],
    "where": [
        (lambda x, y: np.where(COLUMN, x * x, y), real(2, 3), real(2, 3)),
        (lambda x, y: np.where(ROW, x, y * y), real(2, 3), real(3)),
    ],
    "broadcast_to": [(lambda x: np.broadcast_to(x * x, (5, 2, 3)), real(2, 1))],
    "transpose": [
        (lambda x: np.transpose(x * x), real(2, 3, 4)),
        (lambda x: np.transpose(x * x, (2, 0, -2)), real(2, 3, 4)),
    ],
    "reshape": [
        (lambda x: np.reshape(x * x, (3, 2)), real(2, 3)),
        (lambda x: np.reshape(x * x, (-1,), order="F"), real(2, 3)),
    ],
    "ravel": [
        (lambda x: np.ravel(x * x), real(2, 3)),
        (lambda x: np.ravel(x, order="F") ** 2, real(2, 3)),
    ],
    "dot": [
        (lambda x, y: np.dot(x, y), real(*a), real(*b))
        for a, b in itertools.product(MATRICES, FACTORS)
    ],
    "tensordot": [
        (lambda x, y: np.tensordot(x, y, 0), real(2), real(3)),
        (lambda x, y: np.tensordot(x, y, 2), real(4, 2, 3), real(2, 3, 5)),
        (lambda x, y: np.tensordot(x, y, axes=(-1, 0)), real(4, 3), real(3, 5)),
        (
            lambda x, y: np.tensordot(x, y, axes=([0, 2], [1, 0])),
            real(4, 2, 3),
            real(3, 4, 5),
        ),
    ],
    "inner": [
        (lambda x, y: np.inner(x, y), real(2, 3), real(4, 3)),
        (lambda x, y: np.inner(x, y), real(3), real(2, 4, 3)),
    ],
    "einsum": [
        (lambda x, y: np.einsum("bij,bjk->bik", x, y), real(2, 3, 4), real(2, 4, 2)),
        (lambda x, y: np.einsum("ij,kj", x, y), real(2, 3), real(4, 3)),
        (lambda x, y: np.einsum("ij, k -> k", x * x, y), real(2, 3), real(4)),
    ],
    "__getitem__": [
        (lambda x: x[numpy.array([0, 1, 0])] ** 2, real(2, 3)),
        (lambda x: x[numpy.array([0, 1]), numpy.array([2, 2])] ** 2, real(2, 3)),
        (lambda x: x[..., 1:, None] ** 2, real(2, 3)),
        (lambda x: x[0] * x[1] + x[0], real(2, 3)),
        (lambda x: x[numpy.array([True, False])] ** 2, real(2, 3)),
    ],
    "take": [
        (lambda x: np.take(x, numpy.array([0, 2, 0])) ** 2, real(2, 3)),
        (lambda x: np.take(x, numpy.array([0, 2, 0]), axis=-1) ** 2, real(2, 3)),
    ],
    "sort": [
        (lambda x: np.sort(x * x), real(5)),
        (lambda x: np.sort(x * x, axis=0), real(4, 3)),
        (lambda x: np.sort(x * x, axis=1), real(2, 3, 2)),
    ],
    "diagonal": [
        (lambda x: np.diagonal(x * x), real(3, 4)),
        (lambda x: np.diagonal(x * x, 1, -1, -2), real(2, 3, 4)),
        (lambda x: np.diagonal(x * x, -1, 0, 2), real(3, 2, 4)),
        (lambda x: np.diagonal(x * x, 1, 1, 2), real(2, 3, 4)),
    ],
    "_concatenate": [
        (lambda x, y: np.concatenate([x * x, y, x], axis=-1), real(2, 3), real(2, 1)),
        (lambda x, y: np.stack([x * x, y], axis=1), real(2, 3), real(2, 3)),
        (lambda x, y: np.vstack([x, y * y]), real(3), real(2, 3)),
        (lambda x, y: np.append(x * x, y), real(3), real(2)),
    ],
    "_array_of": [(lambda x: np.array([x[0] ** 2, 2.0, x[1]]), real(3))],
    "_array_of_one": [(lambda x: np.array(x[0] ** 2, ndmin=2), real(3))],
    "logsumexp": [
        (lambda x: special.logsumexp(x), real(2, 3)),
        (lambda x: special.logsumexp(x, axis=1), real(2, 3)),
        (lambda x: special.logsumexp(x, axis=0, keepdims=True), real(2, 3)),
    ],
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{name}-{number}")
        for name, cases in CASES.items()
        for number, case in enumerate(cases)
    ],
)
def test_derivative_agrees_with_finite_differences(case: tuple[Any, ...]) -> None:
    cupy_compat.install()
    function, *arrays = case
    check_grads(function, modes=["rev"], order=2)(*arrays)


def test_every_derivative_registered_again_is_checked() -> None:
    """In a process of its own, where the derivatives are autograd's until `install`."""
    program = """
import autograd.core, autograd.numpy, autograd.scipy.special
before = dict(autograd.core.primitive_vjps)
from gpuopt.autodiff import cupy_compat
cupy_compat.install()
for function, vjps in autograd.core.primitive_vjps.items():
    if before.get(function) is not vjps:
        print(function.__name__)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    # _put_back is the derivative of __getitem__, and so what the second order of it checks.
    assert set(ran.stdout.split()) - {"_put_back"} == set(CASES)
