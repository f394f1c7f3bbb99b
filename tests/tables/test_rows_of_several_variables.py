"""The same rows of several variables come and go in one call, all or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import Variable, backends
from gpuopt.device import Device

SHAPES: dict[str, tuple[tuple[int, ...], type]] = {
    "means": ((6, 3), np.float32),
    "opacity": ((6,), np.float64),
    "colors": ((6, 2, 2), np.float16),
}


class Scene:
    """Variables with a row for each point, two optimizers of all of them, and averages."""

    def __init__(self, device: str = "cpu") -> None:
        rng = np.random.default_rng(1)
        self.variables = [
            Variable(rng.normal(size=shape).astype(dtype), name=name, device=device)
            for name, (shape, dtype) in SHAPES.items()
        ]
        self.adam, self.adagrad = gpuopt.AdamOptimizer(0.1), gpuopt.AdagradOptimizer(0.1, 0.5)
        self.averages = gpuopt.ExponentialMovingAverage(0.5)
        pairs = [(rng.normal(size=v.shape).astype(v.dtype), v) for v in self.variables]
        for optimizer in (self.adam, self.adagrad):
            optimizer.apply_gradients(pairs)
        self.averages.apply(self.variables)

    def all_of(self, variable: Variable) -> list[Variable]:
        slots = [self.adam.get_slot(variable, name) for name in ("m", "v")]
        accumulator = self.adagrad.get_slot(variable, "accumulator")
        return [variable, *slots, accumulator, self.averages.average(variable)]

    def values(self) -> list[list[np.ndarray]]:
        return [[each.numpy() for each in self.all_of(v)] for v in self.variables]


def new_rows(variable: Variable) -> np.ndarray:
    return np.full((2, *variable.shape[1:]), 7, variable.dtype)


# What is done to some variables, and to each alone.
CHANGES: dict[str, Callable[[Any, Callable[[Callable[[Variable], Any]], Any]], None]] = {
    "keep": lambda rows, _: rows.keep([3, 1, 1]),
    "remove": lambda rows, _: rows.remove(np.arange(6) % 2 == 0),
    "append": lambda rows, each: rows.append(each(new_rows)),
    "append with state": lambda rows, each: rows.append(each(new_rows), state_of=[0, 3]),
    "reset": lambda rows, _: rows.reset([4, 0, 4]),
    "reset to values": lambda rows, each: rows.reset([4, 0], each(new_rows)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_several_is_that_of_each(change: str, device: str) -> None:
    together, alone = Scene(device), Scene(device)
    CHANGES[change](
        gpuopt.rows(together.variables), lambda make: [make(v) for v in together.variables]
    )
    for variable in alone.variables:
        CHANGES[change](gpuopt.rows(variable), lambda make, variable=variable: make(variable))
    for got, expected in zip(together.values(), alone.values(), strict=True):
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    for scene in (together, alone):
        pairs = [(np.ones(v.shape, v.dtype), v) for v in scene.variables]
        scene.adam.apply_gradients(pairs)
    assert [v.shape for v in together.variables] == [v.shape for v in alone.variables]


@pytest.mark.emulator
def test_one_launch_copies_the_rows_of_all(emulated_gpus: Any) -> None:
    scene = Scene("gpu:0")
    for variable in scene.variables:
        gpuopt.rows(variable).keep([0, 1, 2, 3, 4, 5])
    before = emulated_gpus[0].launches
    gpuopt.rows(scene.variables).remove([1])
    assert emulated_gpus[0].launches == before + 1


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (
            lambda rows, new: rows.append([new[0], new[1][:1], new[2]]),
            ValueError,
            '"means" would get 2 rows, and "opacity" 1',
        ),
        (lambda rows, new: rows.append([*new[:2], new[1]]), ValueError, 'values .* "colors"'),
        (lambda rows, new: rows.append(new[:2]), TypeError, "must be a list of 3, one for each"),
        (lambda rows, new: rows.append(new[0]), TypeError, "must be a list of 3.*got ndarray"),
        (lambda rows, new: rows.reset([0], new), ValueError, 'values for 1 rows of "means"'),
        (lambda rows, new: rows.reset([0, 0], new), ValueError, "cannot get two values"),
        (lambda rows, _: rows.remove([6]), IndexError, 'rows of "means", "opacity", "colors" to r'),
        (lambda rows, new: rows.append(new, state_of=[1]), ValueError, "state of 1; there must"),
    ],
)
def test_what_does_not_fit_one_changes_none(
    change: Callable[[Any, Any], None], error: type[Exception], match: str
) -> None:
    scene = Scene()
    before = scene.values()
    with pytest.raises(error, match=match):
        change(gpuopt.rows(scene.variables), [new_rows(v) for v in scene.variables])
    for got, expected in zip(scene.values(), before, strict=True):
        assert all(map(np.array_equal, got, expected))


def test_a_failure_in_the_last_variables_memory_changes_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    before = scene.values()
    backend = backends.backend_for(Device.cpu)
    empty = backend.empty

    def failing(shape: tuple[int, ...], dtype: Any) -> Any:
        if dtype == np.float16:
            raise MemoryError("no more")
        return empty(shape, dtype)

    monkeypatch.setattr(backend, "empty", failing)
    with pytest.raises(MemoryError):
        gpuopt.rows(scene.variables).remove([1])
    for got, expected in zip(scene.values(), before, strict=True):
        assert all(map(np.array_equal, got, expected))


def test_variables_that_cannot_change_together_are_refused() -> None:
    scene = Scene()
    tall = Variable(np.ones((7, 1)), name="tall")
    with pytest.raises(ValueError, match='"colors" has 6 rows, and "tall" 7: rows come and go tog'):
        gpuopt.rows([*scene.variables, tall]).remove([1])
    with pytest.raises(ValueError, match='"means" is listed twice'):
        gpuopt.rows([*scene.variables, scene.variables[0]])
    with pytest.raises(ValueError, match="list of variables whose rows change is empty"):
        gpuopt.rows([])
    with pytest.raises(TypeError, match="got ndarray"):
        gpuopt.rows([*scene.variables, np.ones((6, 1))])
