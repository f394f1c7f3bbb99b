"""Copies and pickles of wrappers and averages, with their variables and without."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from spawned import one_process

import gpuopt
from gpuopt import Variable

pytestmark = pytest.mark.contract

Model = dict[str, Any]
NAMES = ["w", "table"]


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


BOTH = pytest.mark.parametrize("copied", [copy.deepcopy, pickled])


def scaled(variables: list[Variable], step: Variable) -> Any:
    manager = gpuopt.ExponentialUpdateLossScaleManager(8.0, 3, 1)
    return gpuopt.LossScaleOptimizer(
        gpuopt.AdamOptimizer(0.1), manager, accept_after=2, host_may_wait=True
    )


def accumulating(variables: list[Variable], step: Variable) -> Any:
    return gpuopt.GradientAccumulationOptimizer(gpuopt.AdamOptimizer(0.1), 4, "sum")


def accumulating_for_no_slots(variables: list[Variable], step: Variable) -> Any:
    return gpuopt.GradientAccumulationOptimizer(gpuopt.GradientDescentOptimizer(0.1), 4)


def averaging(variables: list[Variable], step: Variable) -> Any:
    return gpuopt.MovingAverageOptimizer(gpuopt.MomentumOptimizer(0.1, 0.9), 0.5)


def averaging_in_the_step(variables: list[Variable], step: Variable) -> Any:
    return gpuopt.AdamOptimizer(0.1, averages=gpuopt.ExponentialMovingAverage(0.5))


def clipping(variables: list[Variable], step: Variable) -> Any:
    dims = {variables[0]: [1], variables[1]: [0, 1]}
    return gpuopt.VariableClippingOptimizer(gpuopt.AdamOptimizer(0.5), dims, 0.75, True, name="c")


def multitask(variables: list[Variable], step: Variable) -> Any:
    return gpuopt.MultitaskOptimizerWrapper(gpuopt.MomentumOptimizer(0.1, 0.9))


def nested(variables: list[Variable], step: Variable) -> Any:
    inner = averaging(variables, step)
    manager = gpuopt.DynamicLossScale(4.0, 2)
    scaled_inside = gpuopt.LossScaleOptimizer(inner, manager)
    return gpuopt.GradientAccumulationOptimizer(scaled_inside, 4, name="outer")


WRAPPERS = [
    scaled,
    accumulating,
    accumulating_for_no_slots,
    averaging,
    averaging_in_the_step,
    clipping,
    multitask,
    nested,
]
EACH = pytest.mark.parametrize("make", WRAPPERS)


def gradient(number: int, shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(number).normal(size=shape).astype(np.float32)


def train(model: Model, steps: Iterable[int]) -> None:
    w, table = model["variables"]
    for number in steps:
        of_w = np.zeros(w.shape, np.float32) if number == 5 else gradient(number, w.shape)
        if number in (1, 7, 8):
            of_w[0, 0] = np.inf if "LossScale" in repr(model["optimizer"]) else 0.5
        rows = gpuopt.IndexedSlices(gradient(number, (3, 2)), [1, 4, 1])
        pairs: list[Any] = [(of_w, w), (rows, table)]
        model["optimizer"].apply_gradients(pairs, global_step=model["step"])


def model_of(make: Callable[..., Any]) -> Model:
    variables = [
        Variable(gradient(91, (4, 3)), name="w"),
        Variable(gradient(92, (6, 2)), name="table"),
    ]
    step = Variable(0, name="step", trainable=False)
    return {"variables": variables, "step": step, "optimizer": make(variables, step)}


def averages_of(optimizer: Any) -> gpuopt.ExponentialMovingAverage | None:
    while isinstance(optimizer, gpuopt.GradientAccumulationOptimizer | gpuopt.LossScaleOptimizer):
        optimizer = optimizer._inner
    if isinstance(optimizer, gpuopt.MovingAverageOptimizer):
        return optimizer.averages
    found: gpuopt.ExponentialMovingAverage | None
    found = getattr(optimizer, "_arguments", ((), {}))[1].get("averages")
    return found


def values(model: Model) -> dict[str, bytes]:
    """Returns the bits of the variables, averages and state, by their names in the first model."""
    variables = dict(zip(NAMES, model["variables"], strict=True))
    state = model["optimizer"].state_dict(variables)
    slots = {
        f"{name}/{slot}": value
        for slot, of_slot in state["slots"].items()
        for name, value in of_slot.items()
    }
    found = {"step": model["step"].numpy(), **slots, **state["non_slots"]}
    averages = averages_of(model["optimizer"])
    for name, variable in variables.items():
        found[name] = variable.numpy()
        if averages is not None and (average := averages.average(variable)) is not None:
            found[f"average of {name}"] = average.numpy()
    return {name: np.asarray(value).tobytes() for name, value in found.items()}


def arrays_of(model: Model) -> list[Any]:
    optimizer = model["optimizer"]
    averages = averages_of(optimizer)
    beside = [] if averages is None else averages.averages_of_variables()
    own = optimizer._own_variables().values() if hasattr(optimizer, "manager") else []
    return [each.value() for each in (*model["variables"], *optimizer.variables(), *beside, *own)]


@EACH
@BOTH
@pytest.mark.parametrize("steps", [0, 2, 6])
@pytest.mark.one_in(3)
def test_a_model_copied_with_its_wrapper_continues_to_the_bit(
    make: Any, copied: Any, steps: int
) -> None:
    model = model_of(make)
    train(model, range(steps))
    other = copied(model)
    assert values(other) == values(model)
    train(model, range(steps, 11))
    between = values(other)
    assert between != values(model)
    train(other, range(steps, 11))
    assert values(other) == values(model)
    assert repr(other["optimizer"]) == repr(model["optimizer"])
    mine, theirs = arrays_of(model), arrays_of(other)
    assert len(mine) == len(theirs) > 2
    assert not [one for one in mine for two in theirs if np.shares_memory(one, two)]


@EACH
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize("steps", [2, 6])
@pytest.mark.one_in(3)
def test_a_wrapper_copied_alone_continues_with_variables_of_the_names(
    make: Any, copied: Any, steps: int
) -> None:
    model = model_of(make)
    train(model, range(steps))
    alone = {**model, "optimizer": copied(model["optimizer"])}
    again = copy.deepcopy(model)
    train(again, range(steps, 11))
    train(alone, range(steps, 11))
    assert values(alone) == values(again)


def test_counts_of_skipped_steps_and_what_was_not_finite_are_copied() -> None:
    model = model_of(scaled)
    train(model, range(3))
    other = copy.copy(model["optimizer"])
    assert (other.num_skipped, other.skipped_in_a_row) == (1, 0)
    assert other.last_nonfinite == model["optimizer"].last_nonfinite is not None
    assert other.loss_scale == model["optimizer"].loss_scale == np.float32(6.4)
    other.manager.update_loss_scale(False)
    assert model["optimizer"].loss_scale == np.float32(6.4) != other.loss_scale


@pytest.mark.parametrize("make", [averaging, averaging_in_the_step])
def test_a_shallow_copy_moves_averages_of_its_own(make: Any) -> None:
    model = model_of(make)
    train(model, range(2))
    other = copy.copy(model["optimizer"])
    mine, theirs = averages_of(model["optimizer"]), averages_of(other)
    assert mine is not None
    assert theirs is not None
    [w, _] = model["variables"]
    before = mine.average(w).numpy()
    assert theirs.average(w).numpy().tolist() == before.tolist()
    train({**model, "optimizer": other}, [2])
    assert mine.average(w).numpy().tolist() == before.tolist()
    assert theirs.average(w).numpy().tolist() != before.tolist()


def test_a_manager_is_shown_with_its_scale_and_rule() -> None:
    manager = gpuopt.DynamicLossScale(8.0, 1, 2.5)
    assert repr(manager) == "<DynamicLossScale loss_scale=8 increment_period=1 multiplier=2.5>"
    manager.update_loss_scale(True)
    assert repr(manager).startswith("<DynamicLossScale loss_scale=20 ")
    assert repr(gpuopt.FixedLossScaleManager(4.0)) == "<FixedLossScaleManager loss_scale=4>"
    manager = copy.copy(gpuopt.ExponentialUpdateLossScaleManager(16.0, 3))
    assert repr(manager) == (
        "<ExponentialUpdateLossScaleManager loss_scale=16 incr_every_n_steps=3 "
        "decr_every_n_nan_or_inf=2 incr_ratio=2 decr_ratio=0.8>"
    )


def test_two_optimizers_of_one_manager_are_copied_with_one() -> None:
    manager = gpuopt.DynamicLossScale(8.0)
    pair = [gpuopt.LossScaleOptimizer(gpuopt.AdamOptimizer(), manager) for _ in range(2)]
    one, two = copy.deepcopy(pair)
    assert one.manager is two.manager is not manager


def test_averages_follow_the_copy_of_their_count() -> None:
    step = Variable(0, name="step", trainable=False)
    averages = gpuopt.ExponentialMovingAverage(0.9, num_updates=step)
    other, count = copy.deepcopy((averages, step))
    count.assign(30)
    assert averages.decay_now() == np.float32(0.1)
    assert other.decay_now() == np.float32(31) / np.float32(40)


def test_averages_of_copies_go_with_them() -> None:
    model = model_of(averaging)
    train(model, range(3))
    other = copy.deepcopy(model)
    train(other, range(3, 4))
    averages = other["optimizer"].averages
    del other
    assert averages.averages_of_variables() == []
    v = Variable([[1.0]], name="v")
    averages.track([v])
    assert averages.average(v).numpy().tolist() == [[1.0]]
    assert not averages._waiting


def test_averages_that_cannot_be_copied_are_refused_by_name() -> None:
    averages = gpuopt.ExponentialMovingAverage(0.9)

    def loss() -> float:
        return 1.0

    averages.apply([loss])
    with pytest.raises(TypeError, match="it keeps averages of functions"):
        copy.deepcopy(averages)
    averages = gpuopt.ExponentialMovingAverage(0.9)
    array = np.ones(6, np.float32)
    averages.apply([array[:3]])
    with pytest.raises(ValueError, match="it is a view of another array"):
        copy.deepcopy(averages)


@BOTH
def test_averages_of_arrays_are_copied_with_them(copied: Any) -> None:
    averages = gpuopt.ExponentialMovingAverage(0.5)
    array = np.ones(3, np.float32)
    averages.apply([array])
    other, twin = copied((averages, array))
    for one, values in ((averages, array), (other, twin)):
        values[...] = 3
        one.apply([values])
        assert one.average(values).numpy().tolist() == [2, 2, 2]
    assert len(other.averages_of_variables()) == 1
    alone = copied(averages)
    if copied is copy.deepcopy:
        array[...] = 4
        alone.apply([array])
        assert alone.average(array).numpy().tolist() == [3, 3, 3]
    else:
        for _ in range(2):
            with pytest.raises(ValueError, match="came out of a copy or a pickle without the arr"):
                alone.apply([array])


def test_a_step_with_averages_that_came_without_their_arrays_writes_nothing() -> None:
    w, step = np.ones(3, np.float32), Variable(0, trainable=False)
    averages = gpuopt.ExponentialMovingAverage(0.9)
    optimizer = gpuopt.GradientDescentOptimizer(0.1, averages=averages)
    optimizer.apply_gradients([(np.ones(3, np.float32), w)], global_step=step)
    before, alone = w.tolist(), pickled(optimizer)
    for _ in range(2):
        with pytest.raises(ValueError, match="came out of a copy or a pickle without the arrays"):
            alone.apply_gradients([(np.ones(3, np.float32), w)], global_step=step)
        assert (w.tolist(), int(step)) == (before, 1)


@pytest.mark.parametrize(("copied", "calls"), [(copy.deepcopy, 1), (pickled, 2), (pickled, 3)])
def test_sums_of_gradients_of_arrays_are_copied_with_them(copied: Any, calls: int) -> None:
    def call(model: Any, number: int) -> None:
        rows = gpuopt.IndexedSlices(gradient(number, (2, 2)), [1, 4])
        pairs = [(gradient(number, (4, 3)), model["arrays"][0]), (rows, model["arrays"][1])]
        model["optimizer"].apply_gradients(pairs)

    arrays = [gradient(91, (4, 3)), gradient(92, (6, 2))]
    inner = gpuopt.AdamOptimizer(0.1, averages=gpuopt.ExponentialMovingAverage(0.9))
    model = {"optimizer": gpuopt.GradientAccumulationOptimizer(inner, 2), "arrays": arrays}
    for number in range(calls):
        call(model, number)
    other = copied(model)
    for number in range(calls, 6):
        call(model, number)
        call(other, number)
    assert [a.tobytes() for a in other["arrays"]] == [a.tobytes() for a in arrays]


def test_a_function_that_a_pickle_cannot_name_is_refused_by_name() -> None:
    optimizer = gpuopt.GradientAccumulationOptimizer(gpuopt.AdamOptimizer(), lambda: 2)
    with pytest.raises(TypeError, match="pickled: its accumulation_steps is <function"):
        pickle.dumps(optimizer)
    assert copy.deepcopy(optimizer).accumulation_steps is optimizer.accumulation_steps


class OfAUser(gpuopt.MultitaskOptimizerWrapper):
    def __init__(self, rate: float) -> None:
        super().__init__(gpuopt.GradientDescentOptimizer(rate))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_wrappers_of_workers_and_of_users_with_other_arguments_are_not_copied(copied: Any) -> None:
    opt = gpuopt.AdamOptimizer()
    wrappers = [
        gpuopt.TowerOptimizer(opt),
        gpuopt.SyncReplicasOptimizer(opt, replicas_to_aggregate=1),
        gpuopt.ModelAverageOptimizer(opt, 1, 1, gpuopt.ModelAverageCustomGetter("/cpu:0")),
        OfAUser(0.5),
    ]
    for wrapper in wrappers:
        kind = type(wrapper).__name__
        with pytest.raises(TypeError, match=rf"{kind} cannot be copied.*state_dict\(\)"):
            copied(wrapper)


def continue_elsewhere(model: Model) -> dict[str, bytes]:
    train(model, range(6, 11))
    assert [each.name for each in model["variables"]] == NAMES
    return values(model)


def test_a_model_and_its_wrappers_go_to_a_process_that_is_spawned() -> None:
    model = model_of(nested)
    train(model, range(6))
    with one_process() as pool:
        elsewhere = pool.submit(continue_elsewhere, model).result()
    train(model, range(6, 11))
    assert elsewhere == values(model)


@pytest.mark.gpu
@BOTH
def test_a_copy_continues_where_a_gpu_decides_about_steps(copied: Any) -> None:
    cupy: Any = pytest.importorskip("cupy")

    def step(optimizer: Any, variable: Variable, number: int) -> None:
        given = gradient(number, (4, 3))
        given[0, 0] = np.inf if number in (1, 4) else 0.5
        optimizer.apply_gradients([(cupy.asarray(given), variable)], loss_scale=8.0)

    w = Variable(gradient(91, (4, 3)), name="w", device="gpu:0")
    optimizer = scaled([], w)
    for number in range(3):
        step(optimizer, w, number)
    other, v = copied((optimizer, w))
    for number in range(3, 7):
        step(optimizer, w, number)
        step(other, v, number)
    assert (other.num_skipped, other.loss_scale) == (optimizer.num_skipped, optimizer.loss_scale)
    assert other.num_skipped == 2
    assert v.numpy().tobytes() == w.numpy().tobytes()
