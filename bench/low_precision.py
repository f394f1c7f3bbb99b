"""How far steps with slots and variables of fewer bits go astray."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import gpuopt
from bench.harness import Offer
from gpuopt.bench.clock import Step
from gpuopt.bench.contenders import make_our_step
from gpuopt.bench.workloads import Workload
from gpuopt.demo.digits import load_digits
from gpuopt.demo.model import WideAndDeep
from gpuopt.demo.settings import ARGUMENTS, TUNED
from gpuopt.demo.train import BATCH_SIZE
from gpuopt.device import Device

# Of random rounding.
SEED = 7
_RATE = 1e-3
_STEPS = 600
_BLOCKS = 16
_BLOCK = 256
_FEW, _LONG = 4096, 1000
# Of the demo.
_SEEDS = range(10)
_DEMO_STEPS = 400
_SCALE = 1024.0


class Case(NamedTuple):
    """Gradients of a block that are unlike each other.

    Attributes:
        spread: Their scales are spread by e^(spread N).
        part: The part of them that is not 0.
        most_error: What the movement's relative error may be.
    """

    spread: float
    part: float
    most_error: float


# Where squares are stored as they are, as bitsandbytes and torchao do, "mixed" goes 36 times too
# far, and "rare" 1.4 times.
CASES = {
    "alike": Case(0.5, 1.0, 0.06),
    "mixed": Case(2.0, 1.0, 0.2),
    "rare": Case(1.0, 0.02, 0.06),
}
LENGTHS = 0.95, 1.05


class Movement(NamedTuple):
    """How a variable has moved, compared with exact slots.

    Attributes:
        error: The distance of where it ends from where it should, relative to the whole way.
        length: The length of its way, relative to the one that it should have.
    """

    error: float
    length: float

    def __str__(self) -> str:
        return f"{self.error:.3f} (length {self.length:.2f})"


def movement_of(case: Case, device: str = "cpu", **options: Any) -> Movement:
    """Makes 600 steps of Adam with slots in 8 bits unless options say otherwise, and in float64.

    Args:
        case: Which gradients.
        device: Where.
        **options: Of the optimizer.
    """
    exact = np.zeros(_BLOCKS * _BLOCK)
    variable = gpuopt.Variable(np.zeros(exact.size, np.float32), device=device)
    optimizer = gpuopt.AdamOptimizer(_RATE, **{"slot_bits": 8, **options})
    m, v = np.zeros((2, exact.size))
    for step, gradient in enumerate(gradients_of(case), 1):
        m += 0.1 * (gradient - m)
        v += 0.001 * (np.square(gradient, dtype=np.float64) - v)
        size = _RATE * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        exact -= size * m / (np.sqrt(v) + 1e-8)
        optimizer.apply_gradients([(gradient, variable)])
    length = np.linalg.norm(exact)
    moved = variable.numpy()
    return Movement(
        float(np.linalg.norm(moved - exact) / length), float(np.linalg.norm(moved) / length)
    )


def gradients_of(case: Case) -> Iterator[Any]:
    """Yields the gradient of each step."""
    random = np.random.default_rng(1)
    size = _BLOCKS * _BLOCK
    scale = np.exp(random.standard_normal(size) * case.spread) * 1e-3
    mean = random.standard_normal(size) * 0.3
    for step in range(_STEPS):
        drop = 1.0 if step < _STEPS // 2 else 0.3
        gradient = scale * (mean + random.standard_normal(size)) * drop
        yield np.float32(gradient * (random.random(size) < case.part))


def slot_dtype_movement() -> Workload:
    """Makes the workload that says how far steps with slots in bfloat16 go astray."""
    found = []
    nearest: dict[str, Any] = {"slot_dtype": "bfloat16"}
    at_random = {**nearest, "stochastic_rounding": SEED}
    for name, case in CASES.items():
        moved = [movement_of(case, slot_bits=32, **each) for each in (nearest, at_random)]
        found.append(f"{name}: {moved[0]} to nearest, {moved[1]} stochastically")
    squares = [_squares_after_a_fall(**each) for each in (nearest, at_random, {})]
    found.append(
        f"after {_LONG} steps with a tenth of the gradients of {_LONG} before, v is "
        f"{squares[0] / squares[2]:.2f} and {squares[1] / squares[2]:.3f} times what it should be"
    )
    return Workload(
        f"Adam with bfloat16 slots; the movement's error after 600 steps, {'; '.join(found)}",
        {
            "gpuopt": _step_of(**nearest),
            "float32 variables and slots": _step_of(),
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
        f"A step of the demo in float16 with master copies and a scaled loss, and in float32; over "
        f"{len(_SEEDS)} seeds, the mean test losses after {_DEMO_STEPS} steps of Adam are {found}",
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
    for _ in range(_DEMO_STEPS):
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


def _step_of(**options: Any) -> Step:
    gradient = np.random.default_rng(0).standard_normal(_FEW, np.float32)
    make = partial(gpuopt.AdamOptimizer, _RATE, **options)
    return make_our_step(make, [np.ones(_FEW, np.float32)], [[gradient]])


OFFERS = (
    Offer("slot_dtype_movement", slot_dtype_movement, is_slow=True),
    Offer("demo_in_float16", demo_in_float16, is_slow=True),
)
