"""What is peculiar to the optimizers of TensorFlow's contrib."""

from __future__ import annotations

import math
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from golden_cases import NOT_BUILT, GoldenCase, exceptions, optimizer_cases, read_json

import gpuopt
from gpuopt import IndexedSlices, Variable

SIGN_OPTIMIZERS = [gpuopt.AddSignOptimizer, gpuopt.PowerSignOptimizer]


def test_no_golden_case_of_contrib_is_left_out() -> None:
    replayed = Counter(case["optimizer"] for case in optimizer_cases())
    of_contrib = {name: replayed[name] for name in COUNTS}
    assert of_contrib == COUNTS
    listed = Counter(case["optimizer"] for case in read_json("contrib_index.json")["cases"])
    assert listed.keys() - COUNTS.keys() == NOT_BUILT
    assert len(exceptions("index")) == 1


COUNTS = {
    **dict.fromkeys(
        ["Nadam", "AdaMax", "AdamW", "MomentumW", "AddSign", "PowerSign", "LazyAdam"], 24
    ),
    **dict.fromkeys(["AdagradW", "RegAdagrad"], 12),
    "LARS": 36,
}


def refused() -> list[dict[str, Any]]:
    """The public cases that TensorFlow refuses, with the arrays of a twin that it does not."""
    by_id = {case["id"]: case for case in read_json("contrib_index.json")["cases"]}
    ids = [case["id"] for case in read_json("failed_contrib.json")]
    return [by_id[each.removesuffix("res") + "ref"] for each in ids if each.startswith("p_")]


def test_sparse_signs_on_resource_variables_which_tensorflow_refuses_are_those_on_others() -> None:
    """There is one kind of variable here, so that each refused case is one that is replayed."""
    twins = refused()
    assert len(twins) == 24
    assert all(case in optimizer_cases() for case in twins)
    assert {case["optimizer"] for case in twins} == {"AddSign", "PowerSign"}
    assert all(GoldenCase(case).is_sparse for case in twins)


# Sign decay


def decays(function: Any, steps: int = 9) -> list[float]:
    return [float(function(Variable(step, dtype=np.int64))) for step in range(steps)]


def test_linear_decay_falls_to_zero_and_stays() -> None:
    expected = [1 - step / 6 for step in range(7)] + [0, 0]
    assert decays(gpuopt.get_linear_decay_fn(6)) == pytest.approx(expected, abs=1e-7)


def test_cosine_decay_has_its_periods_and_ends_where_it_is_told() -> None:
    def expected(periods: float, steps: int = 9) -> list[float]:
        angles = [2 * math.pi * periods * min(step, 8) / 8 for step in range(steps)]
        return [(1 + math.cos(angle)) / 2 for angle in angles]

    got = decays(gpuopt.get_cosine_decay_fn(8, num_periods=2))
    assert got == pytest.approx(expected(2), abs=1e-6)
    got = decays(gpuopt.get_cosine_decay_fn(8))
    assert got == pytest.approx(expected(0.5), abs=1e-6)
    ended = decays(gpuopt.get_cosine_decay_fn(8, num_periods=2, zero_after=0.5))
    assert ended == pytest.approx([*expected(2)[:2], *[0] * 7], abs=1e-6)


def test_restart_decay_begins_again() -> None:
    half = [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    got = decays(gpuopt.get_restart_decay_fn(8, num_periods=2))
    assert got == pytest.approx([*half, *half, 1], abs=1e-6)
    ended = decays(gpuopt.get_restart_decay_fn(8, num_periods=2, zero_after=1))
    assert ended == pytest.approx([*half, *[0] * 5], abs=1e-6)


@pytest.mark.parametrize("optimizer", SIGN_OPTIMIZERS)
@pytest.mark.parametrize("gate", [gpuopt.Optimizer.GATE_OP, gpuopt.Optimizer.GATE_NONE])
def test_sign_decay_is_asked_once_in_a_step_for_the_step_before_it_is_counted(
    optimizer: Any, gate: int
) -> None:
    asked: list[int] = []
    sign_decay = optimizer(sign_decay_fn=lambda step: asked.append(int(step)) or 0.5)
    step = Variable(3, name="step", dtype=np.int64)
    w, b = Variable(np.float32([1])), Variable(np.ones(1))
    for _ in range(2):
        sign_decay.minimize(lambda: np.sum(w) + np.sum(b), step, gate_gradients=gate)
    assert asked == [3, 4]


@pytest.mark.parametrize("optimizer", SIGN_OPTIMIZERS)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (gpuopt.get_linear_decay_fn, "linear_decay"),
        (gpuopt.get_cosine_decay_fn, "cosine_decay"),
        (gpuopt.get_restart_decay_fn, "restart_decay"),
    ],
)
def test_a_step_that_is_not_counted_is_refused_before_anything_is_written(
    optimizer: Any, make: Any, name: str
) -> None:
    w = Variable(np.float32([1]))
    counted = Variable(0, name="step")
    with_decay = optimizer(sign_decay_fn=make(10))
    with pytest.raises(ValueError, match=f"{name} needs the global step: pass global_step"):
        with_decay.apply_gradients([(np.float32([1]), w)])
    assert w.numpy() == 1
    with_decay.apply_gradients([(np.float32([1]), w)], global_step=counted)
    assert w.numpy() != 1


def test_wrong_arguments_are_refused_by_name() -> None:
    for make in (
        gpuopt.get_linear_decay_fn,
        gpuopt.get_cosine_decay_fn,
        gpuopt.get_restart_decay_fn,
    ):
        with pytest.raises(ValueError, match="decay_steps must be positive, got 0"):
            make(0)
    for optimizer in SIGN_OPTIMIZERS:
        with pytest.raises(TypeError, match=r"sign_decay_fn must be a function, got 0\.5"):
            optimizer(sign_decay_fn=0.5)
    for base in (0.0, -1.0, lambda: -1.0):
        w = Variable(np.float32([1]))
        with pytest.raises(ValueError, match="base must be above 0"):
            gpuopt.PowerSignOptimizer(base=base).apply_gradients([(np.float32([1]), w)])
        assert w.numpy() == 1


def test_signs_follow_the_average_and_not_the_gradient_alone() -> None:
    """The second gradient is against the average, the third with it."""
    w = Variable(np.zeros(1))
    optimizer = gpuopt.AddSignOptimizer(1.0, alpha=2.0, beta=np.float64(0.5))
    moves = []
    for gradient in (4.0, -1.0, 1.0):
        before = w.numpy()
        optimizer.apply_gradients([(np.array([gradient]), w)])
        moves.append(float((before - w.numpy())[0]))
    assert moves == [3 * 4, 1 * -1, 3 * 1]


# RegAdagrad


@pytest.mark.parametrize("rows", [None, [0, 1, 0]])
def test_a_step_that_avoids_slots_reads_the_accumulator_and_leaves_it(
    rows: Any, device: str
) -> None:
    w = Variable(np.full((2, 1), 10, np.float32), device=device)
    optimizer = gpuopt.RegAdagradOptimizer(1.0, initial_accumulator_value=4.0)
    ones = np.ones((2, 1), np.float32)
    gradient = ones if rows is None else IndexedSlices(np.ones((3, 1), np.float32), rows)
    with optimizer.avoid_updating_slots():
        optimizer.apply_gradients([(gradient, w)])
    assert w.numpy().tolist() == [[9.5], [9.5]] if rows is None else [[9.0], [9.5]]
    assert optimizer.get_slot(w, "accumulator").numpy().tolist() == [[4.0], [4.0]]
    optimizer.apply_gradients([(ones, w)])
    assert optimizer.get_slot(w, "accumulator").numpy().tolist() == [[5.0], [5.0]]


def test_slots_are_avoided_in_this_thread_alone_and_until_the_outer_end() -> None:
    optimizer = gpuopt.RegAdagradOptimizer(1.0, initial_accumulator_value=4.0)
    w = Variable(np.float32([1]))

    def step() -> float:
        optimizer.apply_gradients([(np.float32([1]), w)])
        return float(optimizer.get_slot(w, "accumulator").numpy()[0])

    with optimizer.avoid_updating_slots():
        with pytest.raises(KeyError), optimizer.avoid_updating_slots():
            raise KeyError
        assert step() == 4
        other = threading.Thread(target=step)
        other.start()
        other.join()
        assert step() == 5
    assert step() == 6
