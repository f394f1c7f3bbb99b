"""Gradients of expressions users write: right, in float32, and accepted by CuPy.

The reference is a central difference, in float64, of the same expression in plain numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import autograd.numpy as anp
import fake_cupy
import numpy as np
import pytest
from autograd_special import logsumexp
from emulator import EmulatorLauncher

from gpuopt import Device, Variable
from gpuopt.autodiff import tracing
from gpuopt.autodiff.autograd_engine import AutogradEngine
from gpuopt.backends import using
from gpuopt.backends.cuda.availability import why_no_gpu
from gpuopt.backends.cuda.backend import CudaBackend

pytestmark = pytest.mark.value

_rng = np.random.default_rng(0)
X = _rng.uniform(0.5, 1.5, (4, 6))
W = _rng.normal(size=(6, 3))
B = _rng.normal(size=6)
IDS = np.array([0, 2, 0])
LABELS = np.array([0, 1, 2, 1])
RANGE = np.arange(4)

# Name to expression of x, a [4, 6] array, `xp`, numpy or
# autograd.numpy, and `put`, which puts constants beside x.
EXPRESSIONS: dict[str, Callable[[Any, Any, Callable[[Any], Any]], Any]] = {
    "x + b": lambda xp, x, put: x + put(B),
    "b + x": lambda xp, x, put: put(B) + x,
    "x - 1.0": lambda xp, x, put: x - 1.0,
    "1.0 - x": lambda xp, x, put: 1.0 - x,
    "x * x": lambda xp, x, put: x * x,
    "2.0 * x": lambda xp, x, put: 2.0 * x,
    "x / b": lambda xp, x, put: x / put(B),
    "1.0 / x": lambda xp, x, put: 1.0 / x,
    "x**2": lambda xp, x, put: x**2,
    "x**0.5": lambda xp, x, put: x**0.5,
    "x**-1.5": lambda xp, x, put: x**-1.5,
    "2.0**x": lambda xp, x, put: 2.0**x,
    "-x": lambda xp, x, put: -x,
    "abs(x - 1)": lambda xp, x, put: abs(x - 1.0),
    "exp": lambda xp, x, put: xp.exp(x),
    "expm1": lambda xp, x, put: xp.expm1(x),
    "log": lambda xp, x, put: xp.log(x),
    "log1p": lambda xp, x, put: xp.log1p(x),
    "log2": lambda xp, x, put: xp.log2(x),
    "sqrt": lambda xp, x, put: xp.sqrt(x),
    "square": lambda xp, x, put: xp.square(x),
    "sin": lambda xp, x, put: xp.sin(x),
    "cos": lambda xp, x, put: xp.cos(x),
    "tanh": lambda xp, x, put: xp.tanh(x),
    "sinh": lambda xp, x, put: xp.sinh(x),
    "arctan": lambda xp, x, put: xp.arctan(x),
    "arctan2": lambda xp, x, put: xp.arctan2(x, put(B)),
    "sign(x - 1) * x": lambda xp, x, put: xp.sign(x - 1.0) * x,
    "sigmoid": lambda xp, x, put: 1 / (1 + xp.exp(-x)),
    "softplus": lambda xp, x, put: xp.logaddexp(x, 0.0),
    "logaddexp": lambda xp, x, put: xp.logaddexp(x, put(B)),
    "relu": lambda xp, x, put: xp.maximum(x - 1.0, 0.0),
    "maximum": lambda xp, x, put: xp.maximum(x, put(B + 1)),
    "minimum": lambda xp, x, put: xp.minimum(x, put(0.9 * X)),
    "fmax": lambda xp, x, put: xp.fmax(x, put(B + 1)),
    "leaky relu by where": lambda xp, x, put: xp.where(x > 1, x, 0.1 * x),
    "where with numbers": lambda xp, x, put: xp.where(x > 1, x, 0.0),
    "clip": lambda xp, x, put: xp.clip(x, 0.6, 1.2),
    "gelu": lambda xp, x, put: x * 0.5 * (1 + xp.tanh(0.79788456 * (x + 0.044715 * x**3))),
    "sum": lambda xp, x, put: xp.sum(x * x),
    "sum over an axis": lambda xp, x, put: xp.sum(x * x, axis=1),
    "sum, keepdims": lambda xp, x, put: x / xp.sum(x, axis=1, keepdims=True),
    "sum over a tuple": lambda xp, x, put: xp.sum(x * x, axis=(0, 1)),
    "x.sum()": lambda xp, x, put: (x * x).sum(),
    "x.mean(axis)": lambda xp, x, put: (x * x).mean(axis=0),
    "mean": lambda xp, x, put: xp.mean(x * x),
    "mean over an axis": lambda xp, x, put: xp.mean(x * x, axis=-1),
    "var": lambda xp, x, put: xp.var(x, axis=0),
    "var, ddof": lambda xp, x, put: xp.var(x, axis=1, ddof=1, keepdims=True),
    "std": lambda xp, x, put: xp.std(x, axis=0),
    "batch norm": lambda xp, x, put: (x - xp.mean(x, axis=0)) / xp.sqrt(xp.var(x, axis=0) + 1e-3),
    "max": lambda xp, x, put: xp.max(x, axis=1),
    "min": lambda xp, x, put: xp.min(x),
    "x.max()": lambda xp, x, put: x.max(),
    "prod": lambda xp, x, put: xp.prod(x, axis=1),
    "cumsum": lambda xp, x, put: xp.cumsum(x, axis=1),
    "logsumexp": lambda xp, x, put: logsumexp(x, axis=1),
    "logsumexp, composed": lambda xp, x, put: xp.log(
        xp.sum(xp.exp(x - xp.max(x, axis=1, keepdims=True)), axis=1)
    ),
    "cross-entropy": lambda xp, x, put: (
        -xp.mean((x - xp.log(xp.sum(xp.exp(x), axis=1, keepdims=True)))[RANGE, LABELS])
    ),
    "norm": lambda xp, x, put: xp.linalg.norm(x),
    "dot": lambda xp, x, put: xp.dot(x, put(W)),
    "dot with a vector": lambda xp, x, put: xp.dot(x, put(B)),
    "x @ w": lambda xp, x, put: x @ put(W),
    "w.T @ x.T": lambda xp, x, put: put(W.T) @ x.T,
    "x @ x.T": lambda xp, x, put: x @ x.T,
    "batched matmul": lambda xp, x, put: xp.matmul(xp.reshape(x, (2, 2, 6)), put(W)),
    "einsum": lambda xp, x, put: xp.einsum("ij,jk->ik", x, put(W)),
    "einsum, one operand": lambda xp, x, put: xp.einsum("ij->i", x * x),
    "tensordot": lambda xp, x, put: xp.tensordot(x, put(W), axes=([1], [0])),
    "outer": lambda xp, x, put: xp.outer(x[0], put(B)),
    "inner": lambda xp, x, put: xp.inner(x, put(B)),
    "inv": lambda xp, x, put: xp.linalg.inv(x[:, :4] + put(4 * np.eye(4))),
    "x.T": lambda xp, x, put: x.T * 2.0,
    "transpose": lambda xp, x, put: xp.transpose(x * x, (1, 0)),
    "reshape": lambda xp, x, put: xp.reshape(x * x, (2, 12)),
    "x.reshape": lambda xp, x, put: (x * x).reshape(2, 12),
    "x.reshape(-1)": lambda xp, x, put: (x * x).reshape(-1),
    "ravel": lambda xp, x, put: xp.ravel(x * x),
    "x.flatten()": lambda xp, x, put: (x * x).flatten(),
    "expand_dims": lambda xp, x, put: xp.expand_dims(x * x, 0),
    "squeeze": lambda xp, x, put: xp.squeeze(x[:, :1] ** 2, 1),
    "swapaxes": lambda xp, x, put: xp.swapaxes(x * x, 0, 1),
    "moveaxis": lambda xp, x, put: xp.moveaxis(x * x, 0, 1),
    "broadcast_to": lambda xp, x, put: xp.broadcast_to(x[:, :1], (4, 6)),
    "repeat": lambda xp, x, put: xp.repeat(x * x, 2, axis=0),
    "tile": lambda xp, x, put: xp.tile(x * x, (2, 1)),
    "roll": lambda xp, x, put: xp.roll(x * x, 1, axis=0),
    "flip": lambda xp, x, put: xp.flipud(x * x),
    "pad": lambda xp, x, put: xp.pad(x * x, ((1, 1), (0, 0)), "constant"),
    "concatenate": lambda xp, x, put: xp.concatenate([x, x * 2], axis=0),
    "concatenate with a constant": lambda xp, x, put: xp.concatenate([x * x, put(X)], axis=0),
    "stack": lambda xp, x, put: xp.stack([x, x * 2]),
    "hstack": lambda xp, x, put: xp.hstack([x, x * x]),
    "vstack": lambda xp, x, put: xp.vstack([x, x * x]),
    "split": lambda xp, x, put: xp.split(x * x, 2, axis=0)[0],
    "array of elements": lambda xp, x, put: anp.array([x[0, 0], x[1, 1] ** 2]),
    "x[0]": lambda xp, x, put: x[0] ** 2,
    "x[:, 1:3]": lambda xp, x, put: x[:, 1:3] ** 2,
    "x[..., None]": lambda xp, x, put: x[..., None] ** 2,
    "x[ids]": lambda xp, x, put: x[IDS] ** 2,
    "x[ids], beside x": lambda xp, x, put: x[put(IDS)] ** 2,
    "x[range, labels]": lambda xp, x, put: x[RANGE, LABELS] ** 2,
    "x[mask]": lambda xp, x, put: x[put(X > 1)] ** 2,
    "take": lambda xp, x, put: xp.take(x * x, put(IDS), axis=0),
    "take of all": lambda xp, x, put: xp.take(x * x, put(np.array([7, -1, 7]))),
    "diag": lambda xp, x, put: xp.diag(x[:, 0] ** 2),
    "triu": lambda xp, x, put: xp.triu(x * x),
    "trace": lambda xp, x, put: xp.trace(x * x),
    "diagonal": lambda xp, x, put: xp.diagonal(x[:, :4] ** 2, axis1=-1, axis2=-2),
    "sort": lambda xp, x, put: xp.sort(x[0] ** 2),
    "sort of rows": lambda xp, x, put: xp.sort(x**2, axis=0),
    "diff": lambda xp, x, put: xp.diff(x * x, axis=1),
    "ones_like": lambda xp, x, put: x * x * xp.ones_like(x),
    "astype": lambda xp, x, put: (x * x).astype(x.dtype),
    "fft": lambda xp, x, put: xp.real(xp.fft.fft(x * x)),
}
MODULES = [
    pytest.param("numpy", id="numpy"),
    pytest.param("fake_cupy", id="stand-in"),
    pytest.param("cupy", id="cupy", marks=pytest.mark.gpu),
]
SPELLINGS = [pytest.param(np, id="np"), pytest.param(anp, id="autograd.numpy")]


@pytest.fixture(autouse=True)
def stand_in_is_on_a_gpu() -> Iterator[None]:
    """A gradient of the stand-in's arrays is put on gpu:0, unless a real one is there."""
    if why_no_gpu() is None:
        yield
        return
    gpu = Device("gpu")
    with using(gpu, CudaBackend(gpu, EmulatorLauncher(xp=fake_cupy))):
        yield


# Under these names, autograd.numpy has functions of its own, which bring arrays to the host; and
# scipy, which autograd.scipy calls, knows no CuPy.
ON_THE_HOST = ("logsumexp", "array of elements")
ON_THE_HOST_BY_AUTOGRAD = (
    "concatenate",
    "concatenate with a constant",
    "stack",
    "hstack",
    "vstack",
)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("module_name", MODULES)
@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.one_in(12)
def test_gradient_is_right_and_in_float32(name: str, module_name: str, spelling: Any) -> None:
    module, to_host = module_of(module_name)

    def put(constant: np.ndarray) -> Any:
        is_real = constant.dtype.kind == "f"
        return module.asarray(constant.astype(np.float32) if is_real else constant)

    is_by_autograd = spelling is anp and name in ON_THE_HOST_BY_AUTOGRAD
    if module is not np and (is_by_autograd or name in ON_THE_HOST):
        return
    x = on_device(Variable(X, dtype=np.float32), put(X))
    shape = np.shape(EXPRESSIONS[name](np, X, lambda constant: constant))
    weights = np.random.default_rng(1).normal(size=shape)
    value, [(gradient, _)] = AutogradEngine().compute(
        lambda: EXPRESSIONS[name](spelling, x.value(), put), grad_loss=put(weights)
    )
    assert value.dtype == gradient.dtype == np.float32
    assert type(gradient) is type(x.storage)
    expected = central_difference(EXPRESSIONS[name], weights)
    assert np.abs(to_host(gradient) - expected).max() <= 2e-5 * np.abs(expected).max()


def on_device(variable: Variable, array: Any) -> Variable:
    if type(array) is not np.ndarray:
        variable._array, variable.device = array, Device("gpu")
    return variable


def module_of(name: str) -> tuple[Any, Callable[[Any], np.ndarray]]:
    if name == "numpy":
        return np, np.asarray
    if name == "fake_cupy":
        tracing.add_array_type(fake_cupy.ndarray, fake_cupy)
        return fake_cupy, fake_cupy.asnumpy
    import cupy

    return cupy, cupy.asnumpy


def central_difference(expression: Any, weights: np.ndarray) -> np.ndarray:
    """The gradient of sum(weights * expression(X)), at X rounded to float32."""
    x = X.astype(np.float32).astype(np.float64)
    step = 1e-6

    def to_device(index: Any, by: float) -> float:
        there = x.copy()
        there[index] += by
        result = expression(np, there, lambda c: c)
        return float(np.sum(weights * result))

    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        gradient[index] = (to_device(index, step) - to_device(index, -step)) / (2 * step)
    return gradient
