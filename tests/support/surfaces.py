"""Paths of optimizers on functions of two numbers, and the learning rates at which they get far."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import gpuopt
from gpuopt.demo.settings import make_optimizer
from gpuopt.demo.tune import RATES
from gpuopt.fp_warnings import ignore_fp_warnings

Point = np.ndarray
# A start this far off must not lead elsewhere: a path that depends on rounding is no picture of an
# optimizer, and would be another one on another machine.
NUDGE = 1e-9
MOST_EFFECT = 1e-4


class Surface(NamedTuple):
    """A function of two numbers, and the part of it that the picture shows.

    Attributes:
        name: Of the picture's file.
        title: Above the picture.
        value: Takes x and y, which may be arrays.
        slope: Returns the gradient at a point.
        start, minimum: Points.
        frame: The lowest and highest x, and the lowest and highest y.
        steps: How many an optimizer makes.
    """

    name: str
    title: str
    value: Callable[[np.ndarray, np.ndarray], np.ndarray]
    slope: Callable[[Point], Point]
    start: tuple[float, float]
    minimum: tuple[float, float]
    frame: tuple[float, float, float, float]
    steps: int

    def shows(self, path: np.ndarray) -> bool:
        """Whether all points [n, 2] of a path are in the frame."""
        low_x, high_x, low_y, high_y = self.frame
        x, y = path.T
        return bool(np.all((low_x <= x) & (x <= high_x) & (low_y <= y) & (y <= high_y)))


def _rosenbrock(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


def _slope_of_rosenbrock(point: Point) -> Point:
    x, y = point
    return np.array([-2 * (1 - x) - 400 * x * (y - x**2), 200 * (y - x**2)])


_ALONG = np.array([np.cos(np.pi / 6), np.sin(np.pi / 6)])
_ACROSS = np.array([-_ALONG[1], _ALONG[0]])
_STEEPNESS = 50.0
# Not at 0, where some optimizers begin anew or draw weights to.
_LOWEST = (1.0, 1.0)


def _ravine(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x, y = x - _LOWEST[0], y - _LOWEST[1]
    along, across = x * _ALONG[0] + y * _ALONG[1], x * _ACROSS[0] + y * _ACROSS[1]
    return (along**2 + _STEEPNESS * across**2) / 2


def _slope_of_ravine(point: Point) -> Point:
    point = point - _LOWEST
    return (point @ _ALONG) * _ALONG + _STEEPNESS * (point @ _ACROSS) * _ACROSS


SURFACES = (
    Surface(
        "rosenbrock",
        "Rosenbrock's function",
        _rosenbrock,
        _slope_of_rosenbrock,
        start=(-1.2, 1.0),
        minimum=(1.0, 1.0),
        frame=(-1.7, 1.5, -0.6, 2.0),
        steps=300,
    ),
    Surface(
        "ravine",
        "A ravine",
        _ravine,
        _slope_of_ravine,
        start=(-1.4, 0.4),
        minimum=_LOWEST,
        frame=(-1.8, 2.0, -0.8, 2.0),
        steps=80,
    ),
)


def path_of(
    surface: Surface, name: str, rate: float, start: tuple[float, float] | None = None
) -> np.ndarray:
    """Returns the points [steps + 1, 2] of an optimizer's path.

    Args:
        surface: Where it goes.
        name: Of the optimizer, less "Optimizer", with the demo's settings.
        rate: The learning rate.
        start: By default the surface's.
    """
    # One row of a table, so that optimizers that keep something for each row keep one number.
    variable = gpuopt.Variable(np.array([start or surface.start]), name="point")
    step = gpuopt.Variable(0, name="global_step", trainable=False, dtype=np.int64)
    optimizer = make_optimizer(name, step, rate)
    average = getattr(optimizer, "evaluation_weights", None)
    points = [variable.numpy()[0].copy()]
    for _ in range(surface.steps):
        slope = surface.slope(variable.numpy()[0])
        optimizer.apply_gradients([(slope[None], variable)], global_step=step)
        points.append((average(variable) if average else variable.numpy())[0].copy())
        if not surface.shows(points[-1][None]):
            break
    return np.array(points)


def best_rate(surface: Surface, name: str) -> float:
    """Returns the rate whose path ends lowest, among those that stay in the frame.

    The end is the last tenth of the path, and its highest point counts.

    Raises:
        ValueError: there is none.
    """
    highest = {}
    for rate in RATES:
        path = ignore_fp_warnings(path_of, surface, name, rate)
        if surface.shows(path):
            highest[rate] = float(surface.value(*path[-surface.steps // 10 :].T).max())
    for rate in sorted(highest, key=highest.__getitem__):
        if _is_steady(surface, name, rate):
            return rate
    raise ValueError(f"no learning rate keeps {name} in the picture of {surface.title}")


def _is_steady(surface: Surface, name: str, rate: float) -> bool:
    x, y = surface.start
    path = path_of(surface, name, rate)
    nudged = path_of(surface, name, rate, start=(x + NUDGE, y - NUDGE))
    return len(path) == len(nudged) and bool(np.abs(path - nudged).max() < MOST_EFFECT)
