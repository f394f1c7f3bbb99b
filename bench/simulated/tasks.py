"""Steps to simulate, and copies to compare them with: `TASKS`, and `SETS` of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray[Any, Any]]

# Of CuPy's pool.
POOL_ALIGNMENT = 512


class Optimizer(NamedTuple):
    """An optimizer of gpuopt's.

    Attributes:
        name: Its class.
        arguments: Of its constructor.
        slots: The names of its slots.
    """

    name: str
    arguments: Mapping[str, float]
    slots: tuple[str, ...]


_ADAM_ARGUMENTS = {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
ADAM = Optimizer("AdamOptimizer", _ADAM_ARGUMENTS, ("m", "v"))
LAZY_ADAM = Optimizer("LazyAdamOptimizer", _ADAM_ARGUMENTS, ("m", "v"))
MOMENTUM = Optimizer("MomentumOptimizer", {"learning_rate": 0.01, "momentum": 0.9}, ("momentum",))
ADAGRAD = Optimizer("AdagradOptimizer", {"learning_rate": 0.01}, ("accumulator",))


class Dense(NamedTuple):
    """A dense step.

    Attributes:
        optimizer: The optimizer.
        dtype: The variables'.
        sizes: How many elements each variable has.
        alignment: Arrays begin at multiples of so many bytes.
    """

    optimizer: Optimizer
    dtype: str
    sizes: tuple[int, ...]
    alignment: int = POOL_ALIGNMENT

    @property
    def num_bytes(self) -> int:
        """How many must be moved."""
        arrays = 3 + 2 * len(self.optimizer.slots)
        return sum(self.sizes) * np.dtype(self.dtype).itemsize * arrays

    def draw(self) -> Arrays:
        """Returns what `recording` takes: state and gradients."""
        rng = np.random.default_rng(0)
        drawn: Arrays = {}
        for i, size in enumerate(self.sizes):
            drawn |= _draw_state(rng, self.optimizer, self.dtype, (size,), i)
            drawn[f"grad{i}"] = rng.standard_normal(size, np.float32).astype(self.dtype)
        return drawn


class Sparse(NamedTuple):
    """A sparse step.

    Attributes:
        optimizer: The optimizer.
        dtype: The tables'.
        num_rows: How many rows each table's gradient has.
        shape: Of each table.
        exponent: Of Zipf's law, which says how often each row occurs; 0 where all are as likely.
        num_tables: How many tables there are.
        alignment: See `Dense`.
    """

    optimizer: Optimizer
    dtype: str
    num_rows: int
    shape: tuple[int, int]
    exponent: float
    num_tables: int = 1
    alignment: int = POOL_ALIGNMENT

    def draw(self) -> Arrays:
        """Returns what `recording` takes: state, and gradients with their rows."""
        rng = np.random.default_rng(1)
        height, width = self.shape
        drawn: Arrays = {}
        for i in range(self.num_tables):
            if self.exponent:
                ranks = (rng.zipf(self.exponent, self.num_rows) - 1) % height
            else:
                ranks = rng.integers(0, height, self.num_rows)
            drawn[f"rows{i}"] = rng.permutation(height)[ranks].astype(np.int32)
            drawn |= _draw_state(rng, self.optimizer, self.dtype, self.shape, i)
            # Small: a frequent row's sum is squared, and float16 ends at 65,504.
            grad = rng.standard_normal((self.num_rows, width), np.float32) / 64
            drawn[f"grad{i}"] = grad.astype(self.dtype)
        return drawn


class Copy(NamedTuple):
    """A copy by packs of 16 bytes, one for each thread, that moves as many bytes as a step.

    Attributes:
        num_bytes: Read and written.
    """

    num_bytes: int


Task = Dense | Sparse | Copy


def _draw_state(
    rng: np.random.Generator, optimizer: Optimizer, dtype: str, shape: tuple[int, ...], number: int
) -> Arrays:
    """Returns a variable and its slots, which are positive, as squares are."""
    drawn = {f"table{number}": rng.standard_normal(shape, np.float32).astype(dtype)}
    for slot in optimizer.slots:
        drawn[f"{slot}{number}"] = (rng.random(shape, np.float32) + 0.5).astype(dtype)
    return drawn


# The steps whose speed counts, and the copies that move as many bytes.
COPIES = {
    "adam_2500x64": "copy_of_adam_2500x64",
    "adam_2500x64_packed": "copy_of_adam_2500x64",
    "adam_524288": "copy_of_adam_524288",
}


def _list_tasks() -> dict[str, Task]:
    tasks: dict[str, Task] = {}
    named = {"adam": ADAM, "momentum": MOMENTUM, "adagrad": ADAGRAD}
    for dtype in ("float32", "float16"):
        for name, optimizer in named.items():
            # Whole packs, a rest, and several chunks.
            tasks[f"{name}_{dtype}"] = Dense(optimizer, dtype, (64, 1021, 5000))
        # 1,100 different rows of one piece and of several stretches; three digits to sort.
        for name, optimizer in {**named, "lazy_adam": LAZY_ADAM}.items():
            height = 2000 if optimizer is ADAM else 70_000
            tasks[f"sparse_{name}_{dtype}"] = Sparse(optimizer, dtype, 3000, (height, 24), 1.2)
        tasks[f"few_rows_{dtype}"] = Sparse(LAZY_ADAM, dtype, 300, (1000, 7), 1.2)
        tasks[f"tables_{dtype}"] = Sparse(ADAGRAD, dtype, 1500, (1000, 16), 1.2, 3)
    tasks["adam_2500x64"] = small = Dense(ADAM, "float32", (64,) * 2500)
    # One behind the other, as parts of a large array may lie.
    tasks["adam_2500x64_packed"] = small._replace(alignment=256)
    tasks["adam_524288"] = large = Dense(ADAM, "float32", (524_288,))
    tasks["sparse_16384"] = Sparse(LAZY_ADAM, "float32", 16_384, (65_536, 128), 1.2)
    for name, task in {"adam_2500x64": small, "adam_524288": large}.items():
        tasks[COPIES[name]] = Copy(task.num_bytes)
    return tasks


TASKS = _list_tasks()
SETS: Mapping[str, tuple[str, ...]] = {
    "results": tuple(name for name in TASKS if name.endswith(("float32", "float16"))),
    "dense": (*dict.fromkeys(COPIES.values()), *COPIES),
    "sparse": ("sparse_16384",),
}
