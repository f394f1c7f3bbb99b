"""What is peculiar to the optimizers in the forms of torch and others."""

from __future__ import annotations

from threading import Thread
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import textbook

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable

GRADIENTS = np.random.default_rng(5).normal(size=(20, 3))
SCHEDULE_FREE = [gpuopt.ScheduleFreeSGDOptimizer, gpuopt.ScheduleFreeAdamWOptimizer]


def trained(optimizer: Any, gradients: Any = GRADIENTS, dtype: Any = np.float64) -> Variable:
    w = Variable(np.ones(gradients.shape[1:], dtype))
    for gradient in gradients.astype(dtype):
        optimizer.apply_gradients([(gradient, w)])
    return w


def history(gradients: np.ndarray) -> list[tuple[int, np.ndarray]]:
    return list(enumerate(gradients, start=1))


def assert_close(got: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def others(optimizer: Any) -> dict[str, Any]:
    """The scalars that an optimizer keeps."""
    return optimizer.state_dict()["non_slots"]


# Steps


def test_steps_are_counted_in_float64_and_by_threads_together() -> None:
    optimizer = gpuopt.AMSGradOptimizer(form="optax")

    def train() -> None:
        trained(optimizer)

    threads = [Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    step = others(optimizer)["step"]
    assert (step, step.dtype) == (60, np.float64)


def test_a_refused_step_is_not_counted(device: str) -> None:
    optimizer = gpuopt.ScheduleFreeAdamWOptimizer(0.5)
    table = Variable(np.ones((3, 2), np.float32), device=device)
    good = IndexedSlices(np.ones((1, 2), np.float32), [2])
    optimizer.apply_gradients([(good, table)])
    before = {name: float(value) for name, value in others(optimizer).items()}
    assert before == {"step": 1, "weight_sum": 0.25, "largest_learning_rate": 0.5}
    bad = IndexedSlices(np.ones((1, 2), np.float32), [3])

    def step() -> None:
        optimizer.apply_gradients([(bad, table)])
        optimizer.check()

    with pytest.raises(IndexError):
        step()
    assert {name: float(value) for name, value in others(optimizer).items()} == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: gpuopt.TorchAdamWOptimizer(0.1),
        lambda: gpuopt.TorchNAdamOptimizer(0.1),
        lambda: gpuopt.RAdamOptimizer(0.1),
        lambda: gpuopt.TorchSGDOptimizer(0.1, 0.9, 0.5),
        lambda: gpuopt.ScheduleFreeAdamWOptimizer(0.1),
    ],
    ids=["AdamW", "NAdam", "RAdam", "SGD", "ScheduleFree"],
)
def test_a_run_goes_on_from_a_saved_state(make: Any) -> None:
    through = trained(make())
    first, w = make(), Variable(np.ones(3), name="w")
    for gradient in GRADIENTS[:8]:
        first.apply_gradients([(gradient, w)])
    state = first.state_dict({"w": w})
    second = make()
    second.load_state_dict(state, {"w": w})
    for gradient in GRADIENTS[8:]:
        second.apply_gradients([(gradient, w)])
    assert np.array_equal(w.numpy(), through.numpy())


@pytest.mark.contract
@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (gpuopt.ScheduleFreeSGDOptimizer, "step", -1.0),
        (gpuopt.ScheduleFreeSGDOptimizer, "step", np.nan),
        (gpuopt.ScheduleFreeSGDOptimizer, "weight_sum", -0.5),
        (gpuopt.ScheduleFreeSGDOptimizer, "largest_learning_rate", -0.5),
    ],
)
def test_a_count_that_no_run_makes_is_refused(make: Any, name: str, value: float) -> None:
    optimizer, w = make(), Variable(np.ones(3), name="w")
    optimizer.apply_gradients([(np.ones(3), w)])
    state = optimizer.state_dict({"w": w})
    state["non_slots"][name] = np.array(value)
    with pytest.raises(ValueError, match=f'"{name}" holds numbers from'):
        optimizer.load_state_dict(state, {"w": w})


def test_each_group_has_its_own_numbers_but_for_the_step() -> None:
    optimizer = gpuopt.ScheduleFreeSGDOptimizer(
        0.5, groups=[ParameterGroup("b", learning_rate=0.25)]
    )
    a, b = (Variable(np.ones(2), name=name) for name in "ab")
    optimizer.apply_gradients([(np.ones(2), a), (np.ones(2), b)])
    assert {name: float(value) for name, value in others(optimizer).items()} == {
        "step": 1,
        "weight_sum": 0.25,
        "weight_sum/b": 0.0625,
        "largest_learning_rate": 0.5,
        "largest_learning_rate/b": 0.25,
    }


def test_a_group_that_is_new_goes_on_from_the_numbers_of_no_group() -> None:
    w = Variable(np.ones(3), name="w")
    first, second = (gpuopt.TorchNAdamOptimizer(0.1, name="n") for _ in range(2))
    for gradient in GRADIENTS[:8]:
        first.apply_gradients([(gradient, w)])
    state = first.state_dict({"w": w})
    copy = Variable(w.numpy(), name="copy")
    grouped = gpuopt.TorchNAdamOptimizer(0.1, groups=[ParameterGroup("copy", epsilon=1e-8)])
    grouped.load_state_dict(state, {"w": copy})
    second.load_state_dict(state, {"w": w})
    for gradient in GRADIENTS[8:]:
        second.apply_gradients([(gradient, w)])
        grouped.apply_gradients([(gradient, copy)])
    assert np.array_equal(copy.numpy(), w.numpy())


def test_all_digits_of_a_number_are_kept_whether_it_is_given_or_returned() -> None:
    for rate in (0.1, lambda: 0.1):
        w = trained(gpuopt.TorchSGDOptimizer(rate), np.ones((1, 1)))
        assert w.numpy() == 1 - 0.1


def test_in_float32_the_bias_of_the_rounded_beta_is_corrected() -> None:
    """1 - beta2 in float32 is 5e-5 off; at the first step, Adam moves each weight by its rate."""
    w = trained(gpuopt.TorchAdamWOptimizer(0.5, weight_decay=0.0), np.ones((1, 3)), np.float32)
    np.testing.assert_allclose(w.numpy(), 0.5, rtol=4 * np.finfo(np.float32).eps)


def test_a_beta_of_1_divides_by_0_quietly() -> None:
    w = trained(gpuopt.TorchAdamWOptimizer(beta1=lambda: 1.0), np.ones((2, 2)))
    assert not np.isfinite(w.numpy()).any()


# AdamW


def test_decay_is_times_the_learning_rate_and_for_the_listed_variables() -> None:
    w, b = (Variable(np.full(2, 8.0)) for _ in range(2))
    optimizer = gpuopt.TorchAdamWOptimizer(0.5, weight_decay=0.25)
    optimizer.apply_gradients([(np.zeros(2), w), (np.zeros(2), b)], decay_var_list=[w])
    assert (w.numpy().tolist(), b.numpy().tolist()) == ([7, 7], [8, 8])


def test_a_schedule_scales_the_decay_with_the_step() -> None:
    rates = iter([0.5, 0.25])
    w = Variable(np.full(1, 16.0))
    optimizer = gpuopt.LionOptimizer(lambda: next(rates), weight_decay=0.5)
    for _ in range(2):
        optimizer.apply_gradients([(np.zeros(1), w)])
    assert w.numpy() == 16 * (1 - 0.25) * (1 - 0.125)


# AMSGrad


def test_forms_differ_in_which_v_is_the_largest() -> None:
    """A large first gradient: corrected, its v stays the largest; as it is, v grows further."""
    gradients = np.array([[4.0], [3.0]])
    slots = {}
    for form in ("torch", "optax"):
        optimizer = gpuopt.AMSGradOptimizer(0.1, beta2=0.5, form=form)
        w = trained(optimizer, gradients)
        slots[form] = float(optimizer.get_slot(w, "vhat").numpy()[0])
    assert slots == {"torch": 0.5 * 8 + 0.5 * 9, "optax": 16}


@pytest.mark.contract
def test_another_form_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match='form must be "torch" or "optax", got \'keras\''):
        gpuopt.AMSGradOptimizer(form="keras")


# NAdam


@pytest.mark.contract
def test_a_momentum_decay_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match=r"momentum_decay must be at least 0, got -0\.1"):
        gpuopt.TorchNAdamOptimizer(momentum_decay=-0.1)


# RAdam


def test_steps_are_rectified_once_there_are_enough_gradients() -> None:
    """With the default beta2, rho is above 5 from the sixth step on."""
    gradients = np.full((8, 1), 100.0)
    w, optimizer = Variable(np.zeros(1)), gpuopt.RAdamOptimizer(1.0)
    moves = []
    for gradient in gradients:
        before = w.numpy()
        optimizer.apply_gradients([(gradient, w)])
        moves.append(float((before - w.numpy())[0]))
    assert moves[:5] == pytest.approx([100] * 5)
    assert max(moves[5:]) < 1


# SGD


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"momentum": 0.0, "dampening": 0.3, "weight_decay": 0.1},
    ],
    ids=["momentum", "no momentum"],
)
def test_dampening_and_no_momentum_are_the_textbooks(settings: dict[str, float]) -> None:
    optimizer = gpuopt.TorchSGDOptimizer(0.1, **settings)
    w = trained(optimizer)
    expected = textbook.torch_sgd(np.ones(3), history(GRADIENTS), learning_rate=0.1, **settings)
    assert_close(w.numpy(), expected["var"])
    assert optimizer.get_slot_names() == (["momentum", "step"] if settings["momentum"] else [])


@pytest.mark.contract
def test_nesterov_without_momentum_or_with_dampening_is_refused() -> None:
    for settings in ({}, {"momentum": 0.9, "dampening": 0.1}):
        with pytest.raises(ValueError, match="use_nesterov needs momentum and no dampening"):
            gpuopt.TorchSGDOptimizer(use_nesterov=True, **settings)


@pytest.mark.contract
def test_a_group_cannot_have_momentum_where_the_rule_has_none() -> None:
    with pytest.raises(TypeError, match='group "w" has momentum, which all variables share'):
        gpuopt.TorchSGDOptimizer(groups=[ParameterGroup("w", momentum=0.9)])


# Schedule-Free


def test_evaluation_weights_of_a_group_are_by_its_own_beta1() -> None:
    grouped = gpuopt.ScheduleFreeSGDOptimizer(0.1, groups=[ParameterGroup("w", beta1=0.5)])
    w, alone = Variable(np.ones(3), name="w"), gpuopt.ScheduleFreeSGDOptimizer(0.1, beta1=0.5)
    expected = trained(alone)
    for gradient in GRADIENTS:
        grouped.apply_gradients([(gradient, w)])
    assert_close(grouped.evaluation_weights(w), alone.evaluation_weights(expected))


@pytest.mark.parametrize("make", SCHEDULE_FREE)
def test_models_are_evaluated_with_the_weighted_average(make: Any) -> None:
    """During a warm-up, the largest learning rate grows, and so do the weights."""

    def rate_at(step: int) -> float:
        return 0.1 * min(step, 5) / 5 if step < 12 else 0.03

    steps = iter(range(1, 21))
    optimizer = make(lambda: rate_at(next(steps)), weight_decay=0.1)
    w = trained(optimizer)
    function = getattr(textbook, make.__module__.rpartition(".")[2])
    expected = function(np.ones(3), history(GRADIENTS), learning_rate=rate_at, weight_decay=0.1)
    y = w.numpy()
    assert_close(y, expected["var"])
    assert_close(optimizer.evaluation_weights(w), expected["x"])
    assert np.array_equal(w.numpy(), y)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_evaluation_weights_are_of_the_variables_kind(device: str, dtype: Any) -> None:
    optimizer = gpuopt.ScheduleFreeSGDOptimizer(0.5)
    w = Variable(np.ones((2, 2), dtype), device=device)
    before = optimizer.evaluation_weights(w)
    for _ in range(2):
        optimizer.apply_gradients([(np.ones((2, 2), w.dtype), w)])
    x = optimizer.evaluation_weights(w)
    assert type(x) is type(before) is type(w.storage)
    assert x.dtype == w.dtype
    # z is at 0.5 and 0, and x at their mean.
    on_host = Variable(x, device=device).numpy().astype(np.float32)
    np.testing.assert_allclose(on_host, 0.25, rtol=0.02)
    assert (Variable(before, device=device).numpy() == 1).all()


def test_a_learning_rate_of_0_moves_nothing() -> None:
    for make in SCHEDULE_FREE:
        assert (trained(make(0.0)).numpy() == 1).all()


@pytest.mark.contract
def test_a_beta1_of_0_is_refused() -> None:
    for make in SCHEDULE_FREE:
        with pytest.raises(ValueError, match=r"beta1 must be above 0, got 0\.0"):
            make(beta1=0.0)
