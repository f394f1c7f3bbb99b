"""A table whose rows catch up, and one that makes all steps: of Adam's, and without optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gpuopt.backends import Target, backend_for
from gpuopt.backends.backend import SparseUpdate
from gpuopt.backends.catch_up import CatchUp
from gpuopt.device import Device
from gpuopt.optimizers.adam import adam
from gpuopt.rules.catch_up import Factors

HEIGHT = 120


class Table:
    """A table of Adam's, with the steps that its rows have missed."""

    def __init__(
        self,
        real: Any,
        *,
        stepping: bool,
        epsilon: float,
        height: int = HEIGHT,
        beta2: float = 0.999,
        backend: Any = None,
    ) -> None:
        self.real = real
        self.backend = backend or backend_for(Device.cpu)
        self.scalars = {
            "step_size": real(0),
            "beta1": real(np.float32(0.9)),
            "beta2": real(np.float32(beta2)),
            "epsilon": real(epsilon),
        }
        self.var, self.m, self.v = (np.zeros((height, 1), real) for _ in range(3))
        self.plan = self.backend.plan_dense([Target(self.var, [self.m, self.v])])
        self._factors = Factors(adam, self.scalars, real, stepping=stepping)
        self.catch_up = self._new_count()

    def _new_count(self) -> CatchUp:
        last = np.zeros(len(self.var), np.int32)
        return CatchUp(adam, self._factors, last, partial(np.zeros, dtype=self.real))

    def step(self, rows: np.ndarray, values: np.ndarray, step_size: float) -> None:
        if self.catch_up.now == self.catch_up.room:
            self.read()
            self.catch_up = self._new_count()
        scalars = {**self.scalars, "step_size": self.real(step_size)}
        update = SparseUpdate(self.plan, values.astype(self.real), rows, 0, self.catch_up)
        self.backend.apply_sparse(adam, [update], [scalars], other_rows=None)

    def read(self, rows: Any = None) -> np.ndarray:
        self.backend.bring_up_rows(self.plan, self.catch_up, rows)
        return self.var


class AllRows:
    """TensorFlow's Adam, which moves all rows in each step."""

    def __init__(
        self, real: Any, epsilon: float, height: int = HEIGHT, beta2: float = 0.999
    ) -> None:
        self.real, self.epsilon = real, real(epsilon)
        # As float32 has them: else they differ in the eighth digit.
        self.beta1, self.beta2 = real(np.float32(0.9)), real(np.float32(beta2))
        self.var, self.m, self.v = (np.zeros((height, 1), real) for _ in range(3))

    def step(self, rows: np.ndarray, values: np.ndarray, step_size: float) -> None:
        real = self.real
        gradient = np.zeros_like(self.var)
        np.add.at(gradient, rows, values.astype(real))
        self.m += (1 - self.beta1) * (gradient - self.m)
        self.v += (1 - self.beta2) * (gradient * gradient - self.v)
        self.var -= real(step_size) * self.m / (np.sqrt(self.v) + self.epsilon)


class RoundedWrites:
    """Rows that move as exactly as those of `AllRows`, but are rounded whenever they are written.

    That is all the error of a row whose other numbers are exact.
    """

    def __init__(self, real: Any, exact: AllRows) -> None:
        self.var, self._exact, self._seen = exact.var.astype(real), exact, exact.var.copy()

    def write(self, rows: Any) -> np.ndarray:
        """Moves rows to where they are now, and returns the table."""
        moved = self._exact.var[rows] - self._seen[rows]
        self.var[rows] = self.var[rows] + moved
        self._seen[rows] = self._exact.var[rows]
        return self.var


class FourTables:
    """A table of float32, and what it is compared with.

    Attributes:
        ours: Its rows catch up.
        exact: Makes all steps in float64.
        all_rows: Makes all steps in float32.
        writes: Its writes alone are rounded, once in each step of a row, and when it is read.
    """

    def __init__(
        self, epsilon: float, height: int, backend: Any = None, *, looks_up: bool = False
    ) -> None:
        """Begins at 0.

        Args:
            epsilon: Adam's.
            height: The number of rows.
            backend: That of `ours`; None for numpy and C++.
            looks_up: Whether rows are read before each step that names them, as in training.
        """
        self._looks_up = looks_up
        self.ours = Table(
            np.float32, stepping=False, epsilon=epsilon, height=height, backend=backend
        )
        self.exact, self.all_rows = (
            AllRows(real, epsilon, height) for real in (np.float64, np.float32)
        )
        self.writes = RoundedWrites(np.float32, self.exact)

    def step(self, rows: np.ndarray, values: np.ndarray, step_size: float) -> None:
        if self._looks_up:
            self.ours.read(rows)
            self.writes.write(rows)
        for each in (self.ours, self.exact, self.all_rows):
            each.step(rows, values.astype(np.float32), step_size)
        self.writes.write(rows)


def constant(step: int) -> float:
    return 1e-2


def cosine(step: int) -> float:
    return 1e-2 * (0.5 + 0.5 * math.cos(math.pi * step / 10_000))


def waves(step: int) -> float:
    """Falls, rises, is 0 for a while, and turns its sign."""
    return 0.0 if step % 97 < 20 else 1e-2 * math.sin(step / 31)


def step_size(rate: Callable[[int], float], step: int) -> float:
    return rate(step) * math.sqrt(1 - 0.999**step) / (1 - 0.9**step)


def zipf_steps(
    steps: int, seed: int, height: int = HEIGHT, draws: int = 6
) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    shares = 1 / np.arange(1, height + 1)
    named = rng.choice(height, (steps, draws), p=shares / shares.sum())
    return list(zip(named, rng.normal(0.2, 1, (steps, draws, 1)), strict=True))


def side_by_side(steps: int, seeds: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns steps of one table that holds the tables of several seeds, one below the other."""
    of_each = zip(*(zipf_steps(steps, seed) for seed in range(seeds)), strict=True)
    return [
        (
            np.concatenate([rows + HEIGHT * seed for seed, (rows, _) in enumerate(step)]),
            np.concatenate([values for _, values in step]),
        )
        for step in of_each
    ]


class Distances(NamedTuple):
    """How far tables of float32 are from one that makes all steps in float64.

    Attributes:
        step: After so many.
        ours: Of rows that catch up.
        of_all_rows: Of rows that make all steps.
        of_writes: Of rows whose writes alone are rounded; see `RoundedWrites`.
    """

    step: int
    ours: float
    of_all_rows: float
    of_writes: float


def distances(
    rate: Callable[[int], float], epsilon: float, steps: int, seeds: int, backend: Any = None
) -> Iterator[Distances]:
    """Reads tables of several seeds at some steps, and yields their distances.

    Of one table alone, these are a matter of chance: where every number but the variable is exact,
    and that is rounded at each write, 1 of 420 is still 2 % above that of all rows.
    """
    tables = FourTables(epsilon, seeds * HEIGHT, backend)
    for step, (rows, values) in enumerate(side_by_side(steps, seeds), start=1):
        tables.step(rows, values, step_size(rate, step))
        if step % 487 == 0 or step == steps:
            read = tables.ours.read(), tables.all_rows.var, tables.writes.write(slice(None))
            yield Distances(step, *(distance_of_each(each, tables.exact.var) for each in read))


# Rows that are named in so large a part of the steps, or larger.
OFTEN = {"in every second step": 0.5, "in every 20th": 0.05, "in fewer": 0.0}


class Read(NamedTuple):
    """How rows of a table of float32 are that was read, beside those of all steps.

    They may be as far from all steps in float64 as all rows in float32 are, or 1e-6 of their
    movement, whichever is more. "Of writes" are rows whose writes alone are rounded; see
    `RoundedWrites`.

    Attributes:
        step: After so many.
        distance: Of the table, as a part of its movement.
        of_all_rows: The same of all rows in float32.
        table: How far the table is, as a part of how far it may be.
        lookup: How far the rows of a lookup are, as a part of how far they may be.
        lookup_of_writes: The same of writes.
        beyond: The part of the rows, each for itself, that are further than they may be.
        beyond_of_writes: The same of writes.
        squares: [2, 3]: of our rows and of all rows, the squares of all distances, added up for
            rows that are named as often as `OFTEN` says.
    """

    step: int
    distance: float
    of_all_rows: float
    table: float
    lookup: float
    lookup_of_writes: float
    beyond: float
    beyond_of_writes: float
    squares: np.ndarray


def read_tables(
    rate: Callable[[int], float],
    epsilon: float,
    steps: int,
    backend: Any = None,
    *,
    looks_up: bool = False,
) -> Iterator[Read]:
    """Looks up rows of a table of 2,000 that are often named, and then all, every 250 steps."""
    height, draws = 2_000, 64
    tables = FourTables(epsilon, height, backend, looks_up=looks_up)
    exact, all_rows = tables.exact.var, tables.all_rows.var
    times_named = np.zeros(height)
    for step, (rows, values) in enumerate(zipf_steps(steps, 1, height, draws), start=1):
        tables.step(rows, values, step_size(rate, step))
        times_named[rows] += 1
        if step % 250 == 0:
            [(some, _)] = zipf_steps(1, step, height, draws)
            lookups = [
                _part_of_most(read[some], exact[some], all_rows[some])
                for read in (tables.ours.read(some), tables.writes.write(some))
            ]
            ours, of_writes = tables.ours.read(), tables.writes.write(slice(None))
            most = np.maximum(abs(all_rows - exact), 1e-6 * abs(exact))
            beyond = [float(np.mean(abs(each - exact) > most)) for each in (ours, of_writes)]
            squares = [
                [np.sum((each - exact)[chosen] ** 2) for chosen in _by_share(times_named / step)]
                for each in (ours, all_rows)
            ]
            of_table = [distance(each, exact) for each in (ours, all_rows)]
            part = _part_of_most(ours, exact, all_rows)
            yield Read(step, *of_table, part, *lookups, *beyond, np.array(squares))


def check_reads(reads: Sequence[Read]) -> None:
    """Compares rows with those of all steps, and with rows whose writes alone are rounded.

    What holds for each read of the table holds of single rows but for a few, and of lookups as far
    as it does if writes alone are rounded. All reads of rows that are named as seldom together are
    nearer than those of all rows; rows that are named in nearly each step are the same in both.
    """
    columns = {name: np.array([getattr(read, name) for read in reads]) for name in Read._fields}
    assert columns["table"].max() <= 0.75
    assert columns["beyond"].mean() <= 6.5e-3
    assert columns["lookup"].max() <= max(1.0, columns["lookup_of_writes"].max()) + 0.05
    ours, of_all_rows = np.sqrt(columns["squares"].sum(axis=0))
    assert (ours <= np.array([1.2, 0.55, 0.2]) * of_all_rows).all()


def error_of_squares(gap: int, backend: Any = None) -> float:
    """Returns the mean relative error of `v` in rows that are named after equal gaps.

    Each gap multiplies it by the same power: what this is off by adds up, and to either side.
    """
    height, steps = 40, 900
    rng = np.random.default_rng(3)
    ours = Table(np.float32, stepping=False, epsilon=1e-8, height=height + 1, backend=backend)
    exact = AllRows(np.float64, 1e-8, height=height + 1)
    for step in range(steps):
        rows = np.arange(height) if step % (gap + 1) == 0 else np.array([height])
        values = rng.normal(size=(len(rows), 1)).astype(np.float32)
        for each in (ours, exact):
            each.step(rows, values, step_size(constant, step + 1))
    ours.read()
    return float(np.mean(ours.v[:height] / exact.v[:height] - 1))


def _part_of_most(read: np.ndarray, exact: np.ndarray, all_rows: np.ndarray) -> float:
    return distance(read, exact) / max(distance(all_rows, exact), 1e-6)


def _by_share(shares: np.ndarray) -> list[np.ndarray]:
    bounds = [*OFTEN.values()]
    above = [math.inf, *bounds[:-1]]
    return [(shares >= low) & (shares < high) for low, high in zip(bounds, above, strict=True)]


def distance_of_each(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the root mean square of the distances of tables that lie side by side."""
    tables = (len(one) // HEIGHT, HEIGHT)
    pairs = zip(one.reshape(tables), other.reshape(tables), strict=True)
    return math.sqrt(np.mean([distance(*pair) ** 2 for pair in pairs]))


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Of two tables that began at 0, as a part of the movement of the second."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))
