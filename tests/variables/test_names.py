"""Names of variables: when they are fixed, and whom they depend on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import Variable
from gpuopt.variables import names

pytestmark = pytest.mark.contract


@pytest.fixture(autouse=True)
def collects_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No earlier test has used up the time for collections; Python collects nothing by itself."""
    monkeypatch.setattr(names, "_allowance", names._Allowance())
    gc.collect()
    thresholds = gc.get_threshold()
    gc.set_threshold(10**9)
    yield
    gc.set_threshold(*thresholds)


def test_a_cell_that_is_run_again_makes_variables_and_slots_of_the_same_names() -> None:
    notebook: dict[str, Any] = {"gpuopt": gpuopt, "np": np}
    cell = """
w = gpuopt.Variable(np.ones(3, np.float32), name="w")
unnamed = gpuopt.Variable(1.0)
opt = gpuopt.AdamOptimizer(0.1)
opt.minimize(lambda: np.sum(w**2) * unnamed)
found = [v.name for v in gpuopt.global_variables()]
"""
    runs = []
    for _ in range(3):
        exec(cell, notebook)
        runs.append(notebook.pop("found"))
    assert runs[0][:2] == ["w", "Variable"]
    assert runs[0] == runs[1] == runs[2]


class Model:
    """Refers to itself, so that Python's garbage collection alone ends it."""

    def __init__(self) -> None:
        self.w = Variable([1.0, 2.0], name="w")
        self.b = Variable([1.0, 2.0], name="w")
        self.loss = lambda: np.sum(self.w + self.b)


def test_names_of_a_model_made_again_do_not_depend_on_when_garbage_is_collected() -> None:
    for _ in range(3):
        model = Model()
        assert (model.w.name, model.b.name) == ("w", "w_1")


def test_nothing_is_collected_where_garbage_collection_is_off() -> None:
    garbage = Model()
    assert garbage.w.name == "w"
    del garbage
    gc.disable()
    try:
        assert Model().w.name == "w_2"
    finally:
        gc.enable()


def test_variables_with_slots_of_one_name_collect_no_garbage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collected: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append("all"))
    w = Variable([1.0, 2.0], name="w")
    optimizers = [gpuopt.AdamOptimizer(0.1) for _ in range(2)]
    arrays = [np.ones(2, np.float32) for _ in range(3)]
    for optimizer in optimizers:
        optimizer.apply_gradients([([1.0, 1.0], each) for each in (w, *arrays)])
    assert "w/Adam_3" in [v.name for v in gpuopt.global_variables()]
    assert not collected


@pytest.mark.parametrize("made_again", [[0], [1], [0, 1], [2], [0, 2], [1, 2], [0, 1, 2]])
def test_variables_made_again_beside_others_of_their_name_get_the_same_names(
    made_again: list[int],
) -> None:
    kept = Variable(1.0, name="w")
    others: list[Variable | None] = [Variable(1.0, name="w") for _ in range(3)]
    assert [v.name for v in (kept, *others)] == ["w", "w_1", "w_2", "w_3"]
    for _ in range(4):
        for i in made_again:
            others[i] = None
        for i in made_again:
            others[i] = Variable(1.0, name="w")
        assert [v.name for v in others] == ["w_1", "w_2", "w_3"]


def test_slots_of_an_optimizer_made_again_beside_another_get_the_same_names() -> None:
    w = Variable([1.0, 2.0], name="w")
    first = gpuopt.AdamOptimizer(0.1)
    first.apply_gradients([([1.0, 1.0], w)])
    for _ in range(4):
        second = gpuopt.AdamOptimizer(0.1)
        second.apply_gradients([([1.0, 1.0], w)])
        assert [second.get_slot(w, slot).name for slot in ("m", "v")] == ["w/Adam_2", "w/Adam_3"]


class Clock:
    """A clock that stands still, except where the program works or collects garbage.

    Attributes:
        collecting_s: How long collections have taken, of `seconds` each.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now = self.collecting_s = 0.0
        really_collect = gc.collect

        def collect() -> None:
            really_collect()
            self.now += seconds
            self.collecting_s += seconds

        monkeypatch.setattr(names.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(names.gc, "collect", collect)
        monkeypatch.setattr(names, "_allowance", names._Allowance())


@pytest.mark.parametrize(("times", "pause_s"), [(20, 0.0), (50, 0.5), (200, 1.0)])
def test_names_stay_where_a_model_is_made_again_among_millions_of_objects(
    times: int, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, seconds=1.0)
    for _ in range(times):
        model = Model()
        assert (model.w.name, model.b.name) == ("w", "w_1")
        clock.now += pause_s


def test_names_stay_where_another_model_that_lives_on_has_them_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, seconds=1.0)
    teacher = Model()
    assert teacher.w.name == "w"
    for _ in range(100):
        student = Model()
        assert (student.w.name, student.b.name) == ("w_2", "w_3")
        clock.now += 1.0


@pytest.mark.parametrize("work_s", [0.0001, 0.3])
def test_collections_slow_a_loop_that_keeps_its_variables_by_a_twentieth(
    work_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, seconds=0.2)
    kept = [Variable(1.0, name="w")]
    assert kept[0].name
    clock.now = began = 3600.0
    for _ in range(1000):
        kept.append(Variable(1.0, name="w"))
        assert kept[-1].name
        clock.now += work_s
    elapsed_s = clock.now - began
    assert 0.04 * elapsed_s < clock.collecting_s < 0.05 * elapsed_s + 0.9


def test_collections_take_half_the_time_at_most_of_a_loop_that_makes_a_model_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, seconds=1.0)
    for _ in range(1000):
        assert Model().w.name
        clock.now += 0.1
    assert clock.collecting_s < clock.now / 2 + 31.0


def test_names_follow_the_order_of_creation_whoever_is_asked_first() -> None:
    first, second = Variable(1.0, name="w"), Variable(1.0, name="w")
    explicit = Variable(1.0, name="w_1")
    assert [explicit.name, second.name, first.name] == ["w_1_1", "w_1", "w"]


def test_a_name_stays_when_a_variable_of_that_name_goes() -> None:
    first, second = Variable(1.0, name="w"), Variable(1.0, name="w")
    assert second.name == "w_1"
    del first
    assert second.name == "w_1"
    third = Variable(1.0, name="w")
    assert third.name == "w"


def test_a_name_that_an_interrupt_left_half_fixed_is_the_same_afterwards() -> None:
    class Interrupted(Exception):
        pass

    class Table(type(names._named)):  # type: ignore[misc]
        def __setitem__(self, text: str, name: Any) -> None:
            super().__setitem__(text, name)
            raise Interrupted

    kept = Variable(1.0, name="w")
    assert kept.name == "w"
    second = Variable(1.0, name="w")
    plain = names._named
    try:
        names._named = Table(plain)
        with pytest.raises(Interrupted):
            second.name  # noqa: B018
        half_fixed = names._named
    finally:
        names._named = plain
    plain.update(half_fixed)
    assert second.name == "w_1"
    assert Variable(1.0, name="w").name == "w_2"


def test_a_lock_is_described_by_the_name() -> None:
    kept = Variable(1.0, name="w")
    second = Variable(1.0, name="w")
    assert str(second.identity.lock._what) == 'variable "w_1"'
    assert kept.name == "w"
