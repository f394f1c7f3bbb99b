"""Compares steps on a device with the same steps in numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
from array_slots import array_slots
from dtypes import DTYPES_BY_NAME
from every_optimizer import make, own_step

from gpuopt import IndexedSlices, Variable
from gpuopt.variables.variable import as_variable

# Functions of which each library has its own last bits.
LIBRARYS_OWN = {"power", "exp", "log"}
# In units of eps x (|w| + the largest update): what steps with such functions, or with sums over a
# variable or a row, may differ by.
BOUND = 4


class Device(Protocol):
    """The device of a test's arrays."""

    def put(self, host: np.ndarray) -> Any:
        """Returns a new array on the device with these values."""

    def get(self, array: Any) -> np.ndarray:
        """Returns a copy in host memory."""


class Layout(NamedTuple):
    """How a variable and its gradient lie in memory: functions of a flat array of 20,000."""

    name: str
    variable: Callable[[Any], Any]
    gradient: Callable[[Any], Any]


def same(name: str, view: Callable[[Any], Any]) -> Layout:
    return Layout(name, view, view)


MEMORY = 20_000
LAYOUTS = [
    same("aligned", lambda memory: memory[:4096]),
    same("tail", lambda memory: memory[:1003]),
    same("more than a chunk", lambda memory: memory[:16_387]),
    same("one element", lambda memory: memory[:1]),
    same("scalar", lambda memory: memory[:1].reshape(())),
    same("empty", lambda memory: memory[:0]),
    same("both misaligned", lambda memory: memory[1:1002]),
    Layout("variable misaligned", lambda memory: memory[3:1004], lambda memory: memory[:1001]),
    Layout("gradient misaligned", lambda memory: memory[:1001], lambda memory: memory[1:1002]),
    same("transposed", lambda memory: memory[:600].reshape(20, 30).T),
    same("every third", lambda memory: memory[:1500:3]),
    same("backwards", lambda memory: memory[:500][::-1]),
    Layout(
        "gradient transposed",
        lambda memory: memory[:600].reshape(20, 30),
        lambda memory: memory[:600].reshape(30, 20).T,
    ),
    Layout(
        "gradient broadcast",
        lambda memory: memory[:600].reshape(20, 30),
        lambda memory: np.broadcast_to(memory[:30], (20, 30)),
    ),
    *[same(f"small {i}", lambda memory, i=i: memory[i : i + 5]) for i in range(0, 600, 5)],
]


class Rows(NamedTuple):
    """A sparse gradient's shape: which rows of a table of `height` by `width` it names."""

    name: str
    height: int
    width: int
    index: type[np.signedinteger[Any]]
    draw: Callable[[np.random.Generator], np.ndarray]


ROWS = [
    Rows("repeated", 50, 9, np.int32, lambda rng: rng.zipf(1.4, 240) % 50),
    Rows("unsorted, whole packs", 300, 8, np.int64, lambda rng: rng.permutation(300)[:170]),
    Rows("several lanes", 40, 40, np.int32, lambda rng: rng.integers(0, 40, 60)),
    Rows("more than 32 packs", 20, 300, np.int64, lambda rng: rng.integers(0, 20, 30)),
    Rows("one column", 400, 1, np.int32, lambda rng: rng.integers(0, 400, 500)),
    Rows("long runs", 9, 12, np.int64, lambda rng: rng.permutation([0] * 700 + [5] * 300 + [8])),
    Rows("one row", 30, 4, np.int32, lambda rng: rng.integers(0, 30, 1)),
    Rows("no row", 30, 4, np.int64, lambda rng: np.zeros(0)),
    Rows("a table of one row", 1, 6, np.int32, lambda rng: np.zeros(3)),
]


def summable(rng: np.random.Generator, shape: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Numbers whose sums are exact in any order, so that only the rule rounds."""
    return (rng.integers(-8, 9, shape) / 8).astype(dtype)


class Step(NamedTuple):
    """The gradients of one step, for each variable, in host memory and on the device."""

    on_host: list[Any]
    on_device: list[Any]


def dense_case(
    device: Device, dtype: str, layouts: Sequence[Layout] = LAYOUTS, num_steps: int = 3
) -> tuple[list[Any], list[Step]]:
    """Returns arrays on the device, and gradients for them."""
    rng = np.random.default_rng(1)

    def memory() -> np.ndarray:
        values = rng.normal(size=MEMORY).astype(DTYPES_BY_NAME[dtype])
        values[7:11] = 0
        return values

    variables = [layout.variable(device.put(memory())) for layout in layouts]
    steps = []
    for _ in range(num_steps):
        memories = [memory() for _ in layouts]
        pairs = list(zip(layouts, memories, strict=True))
        steps.append(
            Step(
                [np.array(layout.gradient(values)) for layout, values in pairs],
                [layout.gradient(device.put(values)) for layout, values in pairs],
            )
        )
    return variables, steps


def sparse_case(
    device: Device, dtype: str, cases: Sequence[Rows] = ROWS, num_steps: int = 3
) -> tuple[list[Any], list[Step]]:
    """Returns tables on the device, and sparse gradients for them."""
    rng = np.random.default_rng(2)
    tables = [
        device.put(rng.normal(size=(case.height, case.width)).astype(DTYPES_BY_NAME[dtype]))
        for case in cases
    ]
    steps = []
    for _ in range(num_steps):
        step = Step([], [])
        for case in cases:
            indices = case.draw(rng).astype(case.index)
            values = summable(rng, (indices.size, case.width), DTYPES_BY_NAME[dtype])
            step.on_host.append(IndexedSlices(values, indices))
            step.on_device.append(IndexedSlices(device.put(values), device.put(indices)))
        steps.append(step)
    return tables, steps


class Run:
    """A new optimizer and its variables, with their slots."""

    def __init__(self, name: str, arguments: dict[str, Any], variables: Sequence[Any]) -> None:
        self._optimizer = make(name, arguments)
        self._given = variables
        # Raw arrays are variables, too.
        self._variables = [as_variable(variable) for variable in variables]
        self._optimizer._create_slots(self._variables)

    @property
    def is_exact(self) -> bool:
        """Whether each number of a step follows from the same operations, rounded alike."""
        optimizer: Any = self._optimizer
        rules = [optimizer.rule, optimizer.rule_of_other_rows or optimizer.rule]
        nodes = [node for rule in rules for node in rule.programs["float32"].nodes()]
        has_sums = any(rule.computed for rule in rules)
        return not has_sums and LIBRARYS_OWN.isdisjoint(node.op for node in nodes)

    def apply(self, gradients: Sequence[Any]) -> None:
        pairs = zip(gradients, self._given, strict=True)
        self._optimizer.apply_gradients(pairs, global_step=own_step(self._optimizer))

    def values(self, get: Callable[[Any], np.ndarray]) -> list[np.ndarray]:
        return [get(variable.storage) for variable in self._variables]

    def state(self, get: Callable[[Any], np.ndarray]) -> list[np.ndarray]:
        """Copies all variables, and after each its slots but for counts."""
        return [get(variable.storage) for variable in self._with_slots()]

    def take_over(self, state: Sequence[np.ndarray]) -> None:
        for variable, array in zip(self._with_slots(), state, strict=True):
            variable.assign(array)

    def _with_slots(self) -> Iterator[Variable]:
        names = array_slots(self._optimizer)
        for variable in self._variables:
            yield variable
            for slot in (self._optimizer.get_slot(variable, name) for name in names):
                assert slot is not None
                yield slot


def check_against_numpy(
    device: Device,
    name: str,
    arguments: dict[str, Any],
    variables: Sequence[Any],
    steps: Sequence[Step],
) -> None:
    """Takes each step on the device and, from the state before it, in numpy.

    So rounding errors do not add up over the steps, and each step's bound is that of a single step.
    """
    ours = Run(name, arguments, variables)
    numpys = Run(name, arguments, [Variable(array) for array in ours.values(device.get)])
    for step in steps:
        before = ours.state(device.get)
        numpys.take_over(before)
        numpys.apply(step.on_host)
        expected = numpys.state(np.array)
        ours.apply(step.on_device)
        got = ours.state(device.get)
        assert len(got) == len(expected)
        for arrays in zip(before, got, expected, strict=True):
            check_step(*arrays, is_exact=ours.is_exact)


def check_step(
    before: np.ndarray, got: np.ndarray, expected: np.ndarray, *, is_exact: bool
) -> None:
    """Compares one array after a step; denormals are left out.

    Args:
        before: The array before the step.
        got: On the device.
        expected: By numpy.
        is_exact: Whether the bits must be numpy's. Else no element may be further from numpy's than
            BOUND eps x (|w| + the array's largest update).
    """
    info = ml_dtypes.finfo(expected.dtype)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    if not got.size:
        return
    was, wide, numpys = (array.astype(np.float64) for array in (before, got, expected))
    error = abs(wide - numpys)
    largest_update = abs(numpys - was).max()
    most = np.zeros_like(was)
    if not is_exact:
        most = BOUND * float(info.eps) * (abs(was) + largest_update)
    # CuPy compiles with -ftz=true.
    is_denormal = np.maximum(abs(wide), abs(numpys)) < float(info.smallest_normal)
    wrong = ~(error <= most) & ~is_denormal
    if is_exact:
        has_other_sign = np.signbit(wide) != np.signbit(numpys)
        wrong |= has_other_sign & (wide == numpys)
    if wrong.any():
        worst = np.unravel_index(np.argmax(np.where(wrong, error, -1)), error.shape)
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} elements are wrong; at {list(map(int, worst))}: was "
            f"{was[worst]!r}, got {wide[worst]!r}, numpy has {numpys[worst]!r}; the bound is "
            f"{most[worst]:.3g}"
        )
