"""The optimizers that are compared, in gpuopt and in other libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import gpuopt

RATE, BETA1, BETA2, EPSILON, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.9
_RMS_EPSILON = 1e-10
# Times the learning rate, as in torch and optax.
WEIGHT_DECAY = 0.01


class Place(NamedTuple):
    """The device of the contenders' arrays.

    Attributes:
        xp: CuPy, or numpy where there is no GPU.
        torch_device: torch's name of the same device.
    """

    xp: Any
    torch_device: str

    @property
    def on_host(self) -> bool:
        return self.torch_device == "cpu"


class Elementwise(NamedTuple):
    """A rule as Thinc and Chainer run it: one `cupy.ElementwiseKernel` for each parameter.

    Attributes:
        scalars: The names of the step's scalars.
        body: C++ that updates one element of `w` and of the state, by one element of `grad`.
    """

    scalars: Sequence[str]
    body: str


class Job(NamedTuple):
    """One optimizer, in gpuopt and in the alternatives.

    Attributes:
        title: The optimizer's name.
        state: The names of its state arrays, with their first values.
        ours: Makes gpuopt's optimizer.
        torch: Makes torch's optimizer from (torch, parameters, implementation).
        optax: Makes optax's optimizer from (optax).
        scalars: Returns the scalars of step t; the first step has t = 1.
        elementwise: The rule in C++, with `scalars`.
        formula: The rule in array operations on (w, g, *state, *scalars). Updates w and state.
    """

    title: str
    state: Mapping[str, float]
    ours: Callable[[], gpuopt.Optimizer]
    torch: Callable[..., Any]
    optax: Callable[[Any], Any]
    scalars: Callable[[int], Sequence[float]]
    elementwise: Elementwise
    formula: Callable[..., None]


def _adam(w: Any, g: Any, m: Any, v: Any, *scalars: float) -> None:
    step_size, one_minus_beta1, one_minus_beta2, epsilon = scalars
    m += one_minus_beta1 * (g - m)
    v += one_minus_beta2 * (g**2 - v)
    w -= step_size * m / (np.sqrt(v) + epsilon)


def _adam_w(w: Any, g: Any, m: Any, v: Any, decay: float, *scalars: float) -> None:
    w -= decay * w
    _adam(w, g, m, v, *scalars)


def _momentum(w: Any, g: Any, a: Any, rate: float, decay: float) -> None:
    a[...] = decay * a + g
    w -= rate * a


def _adagrad(w: Any, g: Any, n: Any, rate: float) -> None:
    n += g**2
    w -= rate * g / np.sqrt(n)


def _rms_prop(w: Any, g: Any, r: Any, b: Any, *scalars: float) -> None:
    rate, decay, momentum, epsilon = scalars
    r += (1 - decay) * (g**2 - r)
    b[...] = momentum * b + rate * g / np.sqrt(r + epsilon)
    w -= b


def _sgd(w: Any, g: Any, rate: float) -> None:
    w -= rate * g


def _adam_scalars(t: int) -> list[float]:
    step_size = float(RATE * np.sqrt(1 - BETA2**t) / (1 - BETA1**t))
    return [step_size, 1 - BETA1, 1 - BETA2, EPSILON]


_ADAM_SCALARS = ("step_size", "one_minus_beta1", "one_minus_beta2", "epsilon")
_ADAM_BODY = (
    "m += one_minus_beta1 * (grad - m);"
    "v += one_minus_beta2 * (grad * grad - v);"
    "w -= step_size * m / (sqrt(v) + epsilon);"
)

JOBS: Mapping[str, Job] = {
    "adam": Job(
        "Adam",
        {"m": 0.0, "v": 0.0},
        lambda: gpuopt.AdamOptimizer(RATE, BETA1, BETA2, EPSILON),
        lambda torch, p, form: torch.optim.Adam(p, RATE, (BETA1, BETA2), EPSILON, **form),
        lambda optax: optax.adam(RATE, BETA1, BETA2, EPSILON),
        _adam_scalars,
        Elementwise(_ADAM_SCALARS, _ADAM_BODY),
        _adam,
    ),
    # TensorFlow's decay is not multiplied by the learning rate.
    "adam_w": Job(
        "AdamW",
        {"m": 0.0, "v": 0.0},
        lambda: gpuopt.AdamWOptimizer(WEIGHT_DECAY * RATE, RATE, BETA1, BETA2, EPSILON),
        lambda torch, p, form: torch.optim.AdamW(
            p, RATE, (BETA1, BETA2), EPSILON, weight_decay=WEIGHT_DECAY, **form
        ),
        lambda optax: optax.adamw(RATE, BETA1, BETA2, EPSILON, weight_decay=WEIGHT_DECAY),
        lambda t: [WEIGHT_DECAY * RATE, *_adam_scalars(t)],
        Elementwise(("decay", *_ADAM_SCALARS), "w -= decay * w;" + _ADAM_BODY),
        _adam_w,
    ),
    "momentum": Job(
        "Momentum",
        {"a": 0.0},
        lambda: gpuopt.MomentumOptimizer(RATE, DECAY),
        lambda torch, p, form: torch.optim.SGD(p, RATE, momentum=DECAY, **form),
        lambda optax: optax.sgd(RATE, DECAY),
        lambda t: [RATE, DECAY],
        Elementwise(["rate", "decay"], "a = decay * a + grad; w -= rate * a;"),
        _momentum,
    ),
    "adagrad": Job(
        "Adagrad",
        {"n": 0.1},
        lambda: gpuopt.AdagradOptimizer(RATE),
        lambda torch, p, form: torch.optim.Adagrad(p, RATE, initial_accumulator_value=0.1, **form),
        lambda optax: optax.adagrad(RATE, 0.1),
        lambda t: [RATE],
        Elementwise(["rate"], "n += grad * grad; w -= rate * grad / sqrt(n);"),
        _adagrad,
    ),
    # torch's begins with averages of 0, and adds epsilon after the root.
    "rms_prop": Job(
        "RMSProp with momentum",
        {"r": 1.0, "b": 0.0},
        lambda: gpuopt.RMSPropOptimizer(RATE, DECAY, BETA1, _RMS_EPSILON),
        lambda torch, p, form: torch.optim.RMSprop(p, RATE, DECAY, momentum=BETA1, **form),
        lambda optax: optax.rmsprop(RATE, DECAY, initial_scale=1.0, momentum=BETA1),
        lambda t: [RATE, DECAY, BETA1, _RMS_EPSILON],
        Elementwise(
            ["rate", "decay", "momentum", "epsilon"],
            "r += (1 - decay) * (grad * grad - r);"
            "b = momentum * b + rate * grad / sqrt(r + epsilon);"
            "w -= b;",
        ),
        _rms_prop,
    ),
    "sgd": Job(
        "Gradient descent",
        {},
        lambda: gpuopt.GradientDescentOptimizer(RATE),
        lambda torch, p, form: torch.optim.SGD(p, RATE, **form),
        lambda optax: optax.sgd(RATE),
        lambda t: [RATE],
        Elementwise(["rate"], "w -= rate * grad;"),
        _sgd,
    ),
}
# What gradients of some rows are for: Adam's own updates all rows.
LAZY_ADAM = JOBS["adam"]._replace(
    title="LazyAdam",
    ours=lambda: gpuopt.LazyAdamOptimizer(RATE),
    torch=lambda torch, p, form: torch.optim.SparseAdam(p, RATE),
)
