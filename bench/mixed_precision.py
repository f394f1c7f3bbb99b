"""Steps of 16-bit variables with master copies, and with slots in bfloat16; and the demo so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import gpuopt
from bench.harness import Workload
from bench.slot_bits import CASES as MOVEMENTS
from bench.slot_bits import movement_of
from bench.targets import Target
from gpuopt.demo.digits import load_digits
from gpuopt.demo.model import WideAndDeep
from gpuopt.demo.settings import ARGUMENTS, TUNED
from gpuopt.demo.train import BATCH_SIZE
from gpuopt.device import Device

_SIZE = 16 * 2**20
_PLAIN = "float32 variables and slots"
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_SEEDS = range(10)
_STEPS = 400
_SCALE = 1024.0
_SEED_OF_BITS = 7
_FEW, _LONG = 4096, 1000


# The largest ratios to a step of float32 variables and slots.
_AT_MOST = {"stochastic_slot_dtype": 4.0}
_ELSE_AT_MOST = 2.0


class Kind(NamedTuple):
    """What a step stores.

    Attributes:
        what: In words.
        dtype: The variables' type.
        bytes_moved: For each parameter, by Adam.
        options: Of the optimizer.
    """

    what: str
    dtype: np.dtype[Any]
    bytes_moved: int
    options: dict[str, Any]


KINDS = {
    "masters": Kind("bfloat16 with float32 masters", _BFLOAT16, 28, {"masters": "float32"}),
    "remainder": Kind("bfloat16 with remainders", _BFLOAT16, 26, {"masters": "remainder"}),
    "slot_dtype": Kind(
        "float32 with bfloat16 slots", np.dtype(np.float32), 20, {"slot_dtype": "bfloat16"}
    ),
    "remainder_slot_dtype": Kind(
        "bfloat16 with remainders and bfloat16 slots",
        _BFLOAT16,
        18,
        {"masters": "remainder", "slot_dtype": "bfloat16"},
    ),
    "stochastic_slot_dtype": Kind(
        "float32 with bfloat16 slots that are rounded stochastically",
        np.dtype(np.float32),
        20,
        {"slot_dtype": "bfloat16", "stochastic_rounding": _SEED_OF_BITS},
    ),
}


TARGETS = tuple(
    Target(f"{name}_adam_16m", "ratio", _PLAIN, at_most=_AT_MOST.get(name, _ELSE_AT_MOST))
    for name in KINDS
)


def make_workloads() -> Iterator[Workload]:
    """Yields each workload when its turn comes, so that only one at a time is in memory."""
    for name, kind in KINDS.items():
        steps = {
            "gpuopt": _step_of(kind.dtype, kind.options),
            _PLAIN: _step_of(np.dtype(np.float32), {}),
        }
        what = f"Adam on {_SIZE:,} elements, {kind.what}"
        yield Workload(f"{name}_adam_16m", what, _SIZE * kind.bytes_moved, steps)


def slot_dtype_movement() -> Workload:
    """Makes the workload that says how far steps with slots in bfloat16 go astray."""
    found = []
    nearest: dict[str, Any] = {"slot_dtype": "bfloat16"}
    at_random = {**nearest, "stochastic_rounding": _SEED_OF_BITS}
    for name, case in MOVEMENTS.items():
        moved = [movement_of(case, slot_bits=32, **each) for each in (nearest, at_random)]
        found.append(f"{name}: {moved[0]} to nearest, {moved[1]} stochastically")
    squares = [_squares_after_a_fall(**each) for each in (nearest, at_random, {})]
    found.append(
        f"after {_LONG} steps with a tenth of the gradients of {_LONG} before, v is "
        f"{squares[0] / squares[2]:.2f} and {squares[1] / squares[2]:.3f} times what it should be"
    )
    return Workload(
        "slot_dtype_movement",
        f"Adam with bfloat16 slots; the movement's error after 600 steps, {'; '.join(found)}",
        None,
        {
            "gpuopt": _step_of(np.dtype(np.float32), nearest, _FEW),
            _PLAIN: _step_of(np.dtype(np.float32), {}, _FEW),
        },
    )


def demo_in_float16() -> Workload:
    """Makes the workload that trains the demo's model in float16 and in float32.

    Raises:
        AssertionError: the mean test losses differ by more than 2 standard errors of float32's.
    """
    half, single = (
        np.array([_test_loss(dtype, seed) for seed in _SEEDS]) for dtype in (np.float16, np.float32)
    )
    error = float(single.std(ddof=1)) / len(_SEEDS) ** 0.5
    means = float(half.mean()), float(single.mean())
    found = f"{means[0]:.5f} and {means[1]:.5f}, whose standard error is {error:.5f}"
    assert abs(means[0] - means[1]) <= 2 * error, f"the mean test losses are {found}"
    return Workload(
        "demo_in_float16",
        f"A step of the demo in float16 with master copies and a scaled loss, and in float32; over "
        f"{len(_SEEDS)} seeds, the mean test losses after {_STEPS} steps of Adam are {found}",
        None,
        {"gpuopt": _Run(np.float16, 0).step, "float32": _Run(np.float32, 0).step},
    )


class _Run:
    """A run of the demo's model, by gradients of a loss that is scaled in float16."""

    def __init__(self, dtype: Any, seed: int) -> None:
        self.model = WideAndDeep(Device.cpu, np.dtype(dtype), seed)
        self._images, _ = load_digits()
        self._random = np.random.default_rng(seed)
        settings = {"learning_rate": TUNED["Adam"], **ARGUMENTS["Adam"]}
        self._optimizer: Any = gpuopt.AdamOptimizer(**settings)
        if dtype == np.float16:
            inner = gpuopt.AdamOptimizer(**settings, masters="float32")
            manager = gpuopt.contrib.FixedLossScaleManager(_SCALE)
            self._optimizer = gpuopt.LossScaleOptimizer(inner, manager)

    def step(self) -> None:
        chosen = self._random.integers(0, len(self._images.labels), BATCH_SIZE)
        given = self._images.images[chosen], self._images.labels[chosen]
        self._optimizer.minimize(lambda: self.model.loss(*given), var_list=self.model.variables)


def _test_loss(dtype: Any, seed: int) -> float:
    run = _Run(dtype, seed)
    for _ in range(_STEPS):
        run.step()
    _, test = load_digits()
    return float(run.model.loss(test.images, test.labels))


def _squares_after_a_fall(**options: Any) -> float:
    """Returns the mean of Adam's v after many steps, and as many with smaller gradients."""
    random = np.random.default_rng(0)
    variable = gpuopt.Variable(np.zeros(_FEW, np.float32))
    optimizer = gpuopt.AdamOptimizer(0.0, **options)
    for scale in (1.0, 0.1):
        for _ in range(_LONG):
            gradient = np.float32(scale) * random.standard_normal(_FEW, np.float32)
            optimizer.apply_gradients([(gradient, variable)])
    slot = optimizer.get_slot(variable, "v")
    assert slot is not None
    return float(slot.numpy().astype(np.float64).mean())


def _step_of(
    dtype: np.dtype[Any], options: dict[str, Any], size: int = _SIZE
) -> Callable[[], None]:
    variable = gpuopt.Variable(np.ones(size, dtype))
    gradient = np.random.default_rng(0).standard_normal(size, np.float32).astype(dtype)
    optimizer = gpuopt.AdamOptimizer(1e-3, **options)
    return lambda: optimizer.apply_gradients([(gradient, variable)])
