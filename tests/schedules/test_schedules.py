"""Schedules have TensorFlow's values, and follow the global step in every optimizer."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import textbook_schedules
from every_schedule_function import DECAYS, FORMULAS, NOISY, PIECES
from golden_cases import read_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpuopt
from gpuopt import Variable
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.rules.schedule_formulas import normal

# The first numbers that a process draws may take a second.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

GOLDEN = read_json("schedules_and_clipping.json")["schedules"]
FUNCTIONS = set(gpuopt.schedules.__all__) - {"Schedule"}


def new_step(value: int = 0) -> Variable:
    return Variable(value, name="global_step", trainable=False, dtype=np.int64)


def make(name: str, kwargs: dict[str, Any], learning_rate: Any = 0.4) -> gpuopt.Schedule:
    first = "max_learning_rate" if name == "one_cycle" else "learning_rate"
    made: gpuopt.Schedule = getattr(gpuopt, name)(
        **{first: learning_rate}, global_step=new_step(), **kwargs
    )
    return made


def case_id(case: Any) -> str:
    return f"{case[0]}-{'-'.join(map(str, case[1].values()))}"


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case_id(list(case.values())))
def test_values_are_tensorflows(case: dict[str, Any]) -> None:
    name = case["schedule"]
    step = "x" if name == "piecewise_constant" else "global_step"
    schedule = getattr(gpuopt, name)(**{step: new_step()}, **case["kwargs"])
    steps, expected = zip(*case["values"], strict=True)
    got = schedule.at(steps)
    assert got.dtype == np.dtype(case["dtype"]) == np.float32
    # Bit for bit, unless TensorFlow's cosine is a neighbour of the rounded one: it is of size 1.
    tolerance = case["kwargs"]["learning_rate"] * 2.0**-23 if "cosine" in name else 0
    np.testing.assert_allclose(got, np.float32(expected), rtol=0, atol=tolerance)
    assert np.count_nonzero(got != np.float32(expected)) <= 1


def test_golden_values_cover_every_function_of_tensorflows_that_is_not_random() -> None:
    ours = {"linear_warmup", "one_cycle", "warmup_stable_decay"}
    random, alias = "noisy_linear_cosine_decay", "piecewise_constant_decay"
    assert {case["schedule"] for case in GOLDEN} == FUNCTIONS - ours - {random, alias}
    assert gpuopt.piecewise_constant_decay is gpuopt.piecewise_constant


@pytest.mark.parametrize("case", DECAYS, ids=case_id)
def test_values_are_the_textbooks(case: tuple[str, dict[str, Any]]) -> None:
    name, kwargs = case
    exact = {key: np.float64(v) if type(v) is float else v for key, v in kwargs.items()}
    schedule = make(name, exact, np.float64(0.4))
    assert schedule.dtype == np.float64
    steps = range(400)
    expected = [getattr(textbook_schedules, name)(step, 0.4, **kwargs) for step in steps]
    np.testing.assert_allclose(schedule.at(steps), expected, rtol=1e-12, atol=1e-14)
    rounded = make(name, kwargs)
    assert rounded.dtype == np.float32
    # At a restart, a step of float32 may fall on the other side; those here do not.
    np.testing.assert_allclose(rounded.at(steps), expected, rtol=1e-5, atol=2e-7)


def test_pieces_include_their_last_boundary() -> None:
    schedule = gpuopt.piecewise_constant(new_step(), **PIECES)
    expected = [textbook_schedules.piecewise_constant(step, **PIECES) for step in range(120)]
    assert schedule.at(range(120)).tolist() == np.float32(expected).tolist()


def test_every_function_is_tested_with_the_textbook() -> None:
    tested = {name for name, _ in DECAYS} | {"piecewise_constant", "piecewise_constant_decay"}
    assert tested | {"noisy_linear_cosine_decay"} == FUNCTIONS


@PATIENT
@given(
    learning_rate=st.floats(1e-4, 1),
    decay_steps=st.integers(1, 10**6),
    step=st.integers(0, 10**7),
    end=st.floats(0, 1),
)
def test_decays_begin_and_end_where_they_should(
    learning_rate: float, decay_steps: int, step: int, end: float
) -> None:
    counter = new_step()
    for schedule, last in (
        (gpuopt.polynomial_decay(learning_rate, counter, decay_steps, end, 2.0), end),
        (gpuopt.cosine_decay(learning_rate, counter, decay_steps, end), learning_rate * end),
        (
            gpuopt.warmup_stable_decay(learning_rate, counter, 0, 0, decay_steps, 0.0, end),
            end,
        ),
    ):
        assert math.isclose(schedule.at(0), learning_rate, rel_tol=1e-6, abs_tol=1e-7)
        for at in (decay_steps, decay_steps + step):
            assert math.isclose(schedule.at(at), last, rel_tol=1e-6, abs_tol=1e-7)
        low, high = sorted((schedule.at(0), schedule.at(decay_steps)))
        assert low - 1e-6 <= schedule.at(min(step, decay_steps)) <= high + 1e-6


def test_noise_has_the_mean_and_variance_of_tensorflows() -> None:
    decay_steps, variance, variance_decay, beta = 10**6, 0.5, 0.55, 0.25
    # No cosine: what is left is 1 - share + noise + beta.
    settings = {"initial_variance": variance, "variance_decay": variance_decay, "num_periods": 0}
    steps = np.arange(20000)
    for seed in range(5):
        schedule = make(
            "noisy_linear_cosine_decay",
            {"decay_steps": decay_steps, "beta": beta, "seed": seed, **settings},
            np.float64(1),
        )
        noise = schedule.at(steps) - (1 - steps / decay_steps) - beta
        scaled = noise / np.sqrt(variance / (1 + steps) ** variance_decay)
        assert abs(scaled.mean()) < 4 / math.sqrt(steps.size)
        assert abs(scaled.var() - 1) < 4 * math.sqrt(2 / steps.size)
        # Normal, too: a third lies outside of one deviation, and one in 22 outside of two.
        assert abs(np.mean(np.abs(scaled) > 1) - 0.3173) < 0.014
        assert abs(np.mean(np.abs(scaled) > 2) - 0.0455) < 0.006
        # And not the same twice, nor followed by its like.
        assert abs(np.mean(scaled[1:] * scaled[:-1])) < 4 / math.sqrt(steps.size)


def test_noise_depends_on_seed_and_step_alone() -> None:
    steps = np.arange(500)
    once, again = (make("noisy_linear_cosine_decay", NOISY).at(steps) for _ in range(2))
    assert once.tolist() == again.tolist()
    backwards = make("noisy_linear_cosine_decay", NOISY)
    assert [backwards.at(step) for step in reversed(steps)] == once.tolist()[::-1]
    other = make("noisy_linear_cosine_decay", {**NOISY, "seed": 8}).at(steps[:100])
    assert np.count_nonzero(other == once[:100]) < 3


def test_noise_is_made_of_these_bits_for_ever() -> None:
    """By Python's integers, from the description alone: a restored run needs the same noise."""

    def word(seed: int, position: int) -> int:
        def mixed(bits: int) -> int:
            bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
            return bits ^ bits >> 31

        golden = 0x9E3779B97F4A7C15
        return mixed((mixed((seed + golden) % 2**64) + position * golden) % 2**64)

    for seed, step in ((0, 0), (7, 1), (2**53 - 1, 10**12)):
        first, *others = (word(seed, 17 * step + i) for i in range(17))
        ones = sum(each.bit_count() for each in others)
        expected = (ones - 512.5 + (first >> 11) / 2**53) / math.sqrt(256 + 1 / 12)
        assert ignore_fp_warnings(normal, seed, np.int64(step)) == expected


def test_without_variance_there_is_no_noise() -> None:
    quiet = make("noisy_linear_cosine_decay", {"decay_steps": 120, "initial_variance": 0})
    same = make("linear_cosine_decay", {"decay_steps": 120})
    assert quiet.at(range(200)).tolist() == same.at(range(200)).tolist()


def test_a_warmup_goes_on_as_the_schedule_after_it() -> None:
    step = new_step()
    after = gpuopt.exponential_decay(0.5, step, 10, 0.5)
    schedule = gpuopt.linear_warmup(after, step, 5, 0.1)
    expected = [
        textbook_schedules.linear_warmup(
            at, lambda t: textbook_schedules.exponential_decay(t, 0.5, 10, 0.5), 5, 0.1
        )
        for at in range(50)
    ]
    np.testing.assert_allclose(schedule.at(range(50)), expected, rtol=1e-6)
    twice = gpuopt.linear_warmup(schedule, step, 3, 0.0)
    assert twice.at(range(3, 50)).tolist() == schedule.at(range(47)).tolist()


@pytest.mark.parametrize(
    "optimizer", ["AdamOptimizer", "FtrlOptimizer", "GradientDescentOptimizer"]
)
def test_an_optimizer_takes_the_value_before_the_step_is_counted(optimizer: str) -> None:
    step = new_step(3)
    schedule = gpuopt.piecewise_constant(step, [3, 4], [0.5, 0.25, 0.125])
    follows, fixed = Variable([1.0, 2.0]), Variable([1.0, 2.0])
    rate = Variable(0.0)
    one, other = getattr(gpuopt, optimizer)(schedule), getattr(gpuopt, optimizer)(rate)
    for value in (0.5, 0.25, 0.125, 0.125):
        one.apply_gradients([([1.0, -2.0], follows)], global_step=step)
        rate.assign(value)
        other.apply_gradients([([1.0, -2.0], fixed)])
        assert follows.numpy().tolist() == fixed.numpy().tolist()
    assert int(step) == 7


def test_every_hyperparameter_may_be_a_schedule() -> None:
    step = new_step()
    momentum = gpuopt.linear_warmup(0.9, step, 4, 0.5)
    w = Variable([0.0])
    optimizer = gpuopt.MomentumOptimizer(1.0, momentum)
    for _ in range(3):
        optimizer.apply_gradients([([1.0], w)], global_step=step)
    a = 1 + 0.6 * 1
    assert w.numpy()[0] == pytest.approx(-(1 + a + (1 + 0.7 * a)), rel=1e-6)


def test_a_raw_array_can_be_the_global_step() -> None:
    step = np.array(0, np.int64)
    schedule = gpuopt.linear_warmup(gpuopt.cosine_decay(1.0, step, 10), step, 4)
    w = np.zeros(1, np.float32)
    gpuopt.GradientDescentOptimizer(schedule).apply_gradients([([1.0], w)], global_step=step)
    assert step == 1
    assert schedule() == np.float32(0.25)


def test_a_copy_follows_a_step_of_its_own() -> None:
    schedule = gpuopt.linear_warmup(
        gpuopt.exponential_decay(0.5, step := new_step(), 9, 0.5), step, 3
    )
    for other in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))):
        assert other.at(range(20)).tolist() == schedule.at(range(20)).tolist()
        other.global_step.assign(2)
        assert schedule() == schedule.at(0)
        assert other() == schedule.at(2)
        assert other.then is not None
        assert other.then.global_step is other.global_step


@pytest.mark.contract
def test_a_schedule_shows_what_it_was_given_and_cannot_be_changed() -> None:
    schedule = gpuopt.exponential_decay(0.5, new_step(), decay_steps=10, decay_rate=0.9)
    shown = repr(schedule)
    assert shown.startswith('exponential_decay(learning_rate=0.5, global_step=<Variable "global_st')
    assert shown.endswith("decay_steps=10, decay_rate=0.9, staircase=False)")
    with pytest.raises(AttributeError):
        schedule.dtype = np.dtype(np.float64)  # type: ignore[misc]


def test_the_learning_rate_decides_the_type_as_in_tensorflow() -> None:
    # A Python float is rounded to float32 before it is cast to the learning rate's float64.
    schedule = make("exponential_decay", {"decay_steps": 1, "decay_rate": 0.1}, np.float64(1))
    assert schedule.at(1) == np.float64(np.float32(0.1))
    exact = make("exponential_decay", {"decay_steps": 1, "decay_rate": np.float64(0.1)})
    assert exact.dtype == np.float32


# At that step alone, or from a step on that is not tried.
BECOMES_WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("exponential_decay", {"decay_steps": 10, "decay_rate": -0.5}, "nan at step 1"),
    ("exponential_decay", {"decay_steps": 2**20, "decay_rate": 1e38}, r"inf at step 1\d{6}"),
    ("inverse_time_decay", {"decay_steps": 1_000_003, "decay_rate": -1}, "inf at step 1000003"),
    (
        "inverse_time_decay",
        {"decay_steps": 300, "decay_rate": -1, "staircase": True},
        "inf at step 300",
    ),
    ("polynomial_decay", {"decay_steps": 999_999, "power": -1}, "inf at step 999999"),
    ("cosine_decay_restarts", {"first_decay_steps": 10, "t_mul": 0.5}, "nan at step 20"),
    ("cosine_decay_restarts", {"first_decay_steps": 3e6, "t_mul": 0.75}, "nan at step 12000000"),
    (
        "cosine_decay_restarts",
        {"first_decay_steps": 1, "t_mul": 1, "m_mul": 1e20},
        "inf at step 2",
    ),
    ("linear_cosine_decay", {"alpha": 3e38, "learning_rate": 10.0}, "inf at step 0"),
    ("noisy_linear_cosine_decay", {"variance_decay": -1e3}, r"-?inf at step \d"),
    ("one_cycle", {"total_steps": 77_777, "final_div_factor": 1e-42}, r"(inf|nan) at step \d+"),
    (
        "warmup_stable_decay",
        {"learning_rate": 3e38, "end_learning_rate": -3e38},
        r"(inf|nan) at step \d+",
    ),
]
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("exponential_decay", {"decay_steps": 0}, ValueError, "decay_steps must be positive, got 0"),
    ("exponential_decay", {"decay_steps": -3}, ValueError, "decay_steps must be positive"),
    ("exponential_decay", {"decay_steps": math.nan}, ValueError, "decay_steps must be finite"),
    ("exponential_decay", {"decay_rate": "x"}, TypeError, "decay_rate must be a number"),
    ("exponential_decay", {"decay_rate": [0.5]}, ValueError, "decay_rate must be a scalar"),
    ("exponential_decay", {"learning_rate": math.inf}, ValueError, "learning_rate must be finite"),
    ("exponential_decay", {"learning_rate": 1e300}, ValueError, "learning_rate must be finite"),
    ("exponential_decay", {"learning_rate": lambda: 1}, TypeError, "learning_rate must be a num"),
    ("exponential_decay", {"staircase": "yes"}, TypeError, "staircase must be True or False"),
    ("exponential_decay", {"global_step": None}, TypeError, "global_step"),
    ("exponential_decay", {"global_step": 3}, TypeError, "global_step"),
    (
        "exponential_decay",
        {"global_step": np.zeros(2, int)},
        TypeError,
        r"must be a scalar.*\(2,\)",
    ),
    ("natural_exp_decay", {"decay_rate": -1e3}, ValueError, r"exp\(-decay_rate\) must be finite"),
    ("inverse_time_decay", {"decay_steps": 0}, ValueError, "decay_steps must be positive"),
    ("polynomial_decay", {"decay_steps": 0}, ValueError, "decay_steps must be positive"),
    ("polynomial_decay", {"power": None}, TypeError, "power must be a number"),
    ("cosine_decay", {"decay_steps": 0}, ValueError, "decay_steps must be positive"),
    ("cosine_decay", {"alpha": math.nan}, ValueError, "alpha must be finite"),
    ("cosine_decay_restarts", {"first_decay_steps": 0}, ValueError, "first_decay_steps must be"),
    ("cosine_decay_restarts", {"t_mul": 0}, ValueError, "t_mul must be positive"),
    *(
        (name, wrong, ValueError, f"{name}.* would be {when}$")
        for name, wrong, when in BECOMES_WRONG
    ),
    ("linear_cosine_decay", {"decay_steps": 0}, ValueError, "decay_steps must be positive"),
    ("noisy_linear_cosine_decay", {"decay_steps": 0}, ValueError, "decay_steps must be positive"),
    ("noisy_linear_cosine_decay", {"initial_variance": -1}, ValueError, "initial_variance must no"),
    ("noisy_linear_cosine_decay", {"seed": -1}, ValueError, "seed must be a whole number from 0"),
    ("noisy_linear_cosine_decay", {"seed": 2**53}, ValueError, "seed must be a whole number"),
    (
        "linear_warmup",
        {"warmup_steps": 0},
        ValueError,
        "warmup_steps must be a whole number from 1",
    ),
    ("linear_warmup", {"warmup_steps": 2.5}, ValueError, "warmup_steps must be a whole number"),
    ("one_cycle", {"total_steps": 0}, ValueError, "total_steps must be a whole number from 1"),
    ("one_cycle", {"warmup_fraction": 1}, ValueError, "warmup_fraction must be from 0 to below 1"),
    ("one_cycle", {"div_factor": 0}, ValueError, "div_factor must be positive"),
    ("warmup_stable_decay", {"decay_steps": 0}, ValueError, "decay_steps must be a whole number"),
    ("warmup_stable_decay", {"stable_steps": -1}, ValueError, "stable_steps must be a whole numb"),
]
VALID: dict[str, dict[str, Any]] = dict(reversed(DECAYS))
VALID["noisy_linear_cosine_decay"] = NOISY


@pytest.mark.contract
@pytest.mark.parametrize(("name", "wrong", "error", "message"), REFUSED)
def test_wrong_arguments_are_refused_by_name(
    name: str, wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    first = "max_learning_rate" if name == "one_cycle" else "learning_rate"
    given: dict[str, Any] = {first: 0.1, "global_step": new_step(), **VALID[name], **wrong}
    with pytest.raises(error, match=message):
        getattr(gpuopt, name)(**given)


@pytest.mark.parametrize("decay_steps", [333.3, 0.001])
def test_a_cycle_ends_at_0_and_not_below(decay_steps: float) -> None:
    """In float32, a multiple of `decay_steps` may be rounded to less than the step."""
    schedule = gpuopt.polynomial_decay(0.1, new_step(), decay_steps, 0.0, 0.5, cycle=True)
    values = schedule.at(range(100_000))
    assert np.all(values >= 0)
    assert np.all(values <= np.float32(0.1))


@pytest.mark.contract
@pytest.mark.parametrize(
    ("boundaries", "values", "error", "message"),
    [
        ([], [1.0], ValueError, "one or more boundaries"),
        ([1, 2], [1.0, 2.0], ValueError, "2 boundaries and 2 values"),
        ([3, 3], [1.0, 2.0, 3.0], ValueError, r"must increase, got 3 after 3 \(boundaries\[1\]\)"),
        ([3, 1], [1.0, 2.0, 3.0], ValueError, "must increase, got 1 after 3"),
        ([math.nan], [1.0, 2.0], ValueError, r"boundaries\[0\] must be finite"),
        ([1], [1.0, math.inf], ValueError, r"values\[1\] must be finite"),
        ([1], [1.0, np.float64(2)], TypeError, "values must be of one type"),
        (1, [1.0, 2.0], TypeError, "boundaries must be a list of numbers, got 1"),
        ([1], (each for each in [1.0, 2.0]), TypeError, "values must be a list of numbers"),
        (np.array(1), [1.0, 2.0], TypeError, "boundaries must be a list of numbers"),
    ],
)
def test_wrong_pieces_are_refused_by_name(
    boundaries: Any, values: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        gpuopt.piecewise_constant(new_step(), boundaries, values)


@pytest.mark.contract
def test_a_warmup_into_a_schedule_of_another_step_is_refused() -> None:
    after = gpuopt.exponential_decay(0.5, Variable(0, name="other"), 10, 0.5)
    with pytest.raises(
        ValueError, match=r'follows the global_step "global_step\w*".*follows "other"'
    ):
        gpuopt.linear_warmup(after, new_step(), 5)


@pytest.mark.contract
def test_steps_between_whole_ones_are_refused() -> None:
    step = Variable(np.float32(2))
    schedule = gpuopt.exponential_decay(0.5, step, 10, 0.5)
    assert schedule() == schedule.at(2)
    step.assign(2.5)
    with pytest.raises(ValueError, match="at whole steps, got"):
        schedule()
    with pytest.raises(TypeError, match="at whole steps, got 'x'"):
        schedule.at("x")


@pytest.mark.contract
def test_a_picture_takes_one_call(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    schedule = make("one_cycle", {"total_steps": 100})
    figure = schedule.plot(120, tmp_path / "picture.png")
    [axes] = figure.axes
    [line] = axes.lines
    assert line.get_xdata().tolist() == list(range(120))
    assert line.get_ydata().tolist() == schedule.at(range(120)).tolist()
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert schedule.plot(range(50, 60)).axes[0].lines[0].get_xdata().tolist() == [*range(50, 60)]
    assert schedule.plot(np.int64(5)).axes[0].lines[0].get_xdata().tolist() == [*range(5)]
    for none in (0, -5, []):
        with pytest.raises(ValueError, match="needs one step or more, got"):
            schedule.plot(none, tmp_path / "empty.png")
    assert not (tmp_path / "empty.png").exists()
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.contract
@pytest.mark.parametrize(
    ("name", "arguments", "last"),
    [
        ("exponential_decay", {"decay_steps": 100, "decay_rate": 0.5}, 110),
        ("polynomial_decay", {"decay_steps": 200, "cycle": True}, 220),
        ("cosine_decay", {"decay_steps": 1000}, 1100),
        ("cosine_decay", {"decay_steps": 10_000_000_000}, 2**31 - 1),
        ("cosine_decay_restarts", {"first_decay_steps": 50}, 55),
        ("one_cycle", {"total_steps": 300}, 330),
        ("warmup_stable_decay", {"warmup_steps": 20, "stable_steps": 0, "decay_steps": 50}, 77),
        ("linear_warmup", {"warmup_steps": 40}, 44),
    ],
)
def test_a_picture_goes_a_tenth_beyond_the_end_of_a_schedule(
    name: str, arguments: dict[str, Any], last: int
) -> None:
    pytest.importorskip("matplotlib")
    assert_picture_ends(make(name, arguments), last)


@pytest.mark.contract
def test_a_picture_shows_the_last_piece_and_what_follows_a_warmup() -> None:
    pytest.importorskip("matplotlib")
    step = new_step()
    pieces = gpuopt.piecewise_constant(step, [10, 90], [0.3, 0.2, 0.1])
    assert_picture_ends(pieces, 99)
    assert_picture_ends(gpuopt.piecewise_constant(step, [-7], [0.3, 0.2]), 1)
    assert_picture_ends(gpuopt.linear_warmup(pieces, step, 10), 110)


def assert_picture_ends(schedule: gpuopt.Schedule, last: int) -> None:
    [line] = schedule.plot().axes[0].lines
    steps = line.get_xdata()
    assert (steps[0], steps[-1]) == (0, last)
    assert len(steps) == min(last + 1, 1001)
    assert line.get_ydata().tolist() == schedule.at(steps).tolist()


@pytest.mark.contract
def test_a_picture_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuopt.schedules.schedule.find_spec", lambda name: None)
    with pytest.raises(ImportError, match='extra "plots"'):
        make("one_cycle", {"total_steps": 100}).plot(10)


def test_every_formula_is_a_public_schedules() -> None:
    used = {make(name, kwargs).formula for name, kwargs in DECAYS}
    used.add(make("noisy_linear_cosine_decay", NOISY).formula)
    used.add(gpuopt.piecewise_constant(new_step(), **PIECES).formula)
    assert used == FORMULAS
