"""Decoupled weight decay: which variables and rows decay, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from optimizers_by_hooks import ByHooks, RuleByHooks

import gpuopt
from gpuopt import Device, IndexedSlices, Variable, extend_with_decoupled_weight_decay
from gpuopt.backends import to_device

pytestmark = pytest.mark.value

WD = np.float32(0.25)
AdagradW = extend_with_decoupled_weight_decay(gpuopt.AdagradOptimizer)
LazyAdamW = extend_with_decoupled_weight_decay(gpuopt.LazyAdamOptimizer)


BASES = {
    "rule": lambda wd: extend_with_decoupled_weight_decay(gpuopt.GradientDescentOptimizer)(wd, 0.5),
    "hooks": lambda wd: extend_with_decoupled_weight_decay(ByHooks)(wd),
    "rule by hooks": lambda wd: extend_with_decoupled_weight_decay(RuleByHooks)(wd, 0.5),
}


def put(device: str, values: Any, dtype: Any = np.float32) -> Any:
    return to_device(np.array(values, dtype), Device.parse(device))


def variable(device: str, *shape: int) -> Variable:
    return Variable(
        np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape), device=device
    )


@pytest.mark.parametrize("make", BASES.values(), ids=BASES)
def test_weights_decay_and_then_move_by_the_gradient(make: Any, device: str) -> None:
    w = variable(device, 4)
    start = w.numpy()
    make(0.25).apply_gradients([(put(device, np.ones(4)), w)])
    assert np.array_equal(w.numpy(), start - WD * start - 0.5)


@pytest.mark.parametrize("make", BASES.values(), ids=BASES)
def test_a_row_that_is_named_twice_decays_once_and_others_do_not(make: Any, device: str) -> None:
    table = variable(device, 4, 2)
    start = table.numpy()
    slices = IndexedSlices(put(device, np.ones((3, 2))), put(device, [2, 0, 2], np.int64))
    make(0.25).apply_gradients([(slices, table)])
    expected = start.copy()
    expected[[0, 2]] -= WD * start[[0, 2]]
    expected[0] -= 0.5
    expected[2] -= 1
    assert np.array_equal(table.numpy(), expected)


@pytest.mark.parametrize("make", BASES.values(), ids=BASES)
@pytest.mark.parametrize("call", ["apply_gradients", "minimize", "one by one"])
def test_only_listed_variables_decay(make: Any, call: str) -> None:
    decaying, staying = Variable(np.float32([4, 8])), Variable(np.float32([4, 8]))
    optimizer = make(0.25)
    ones = np.ones(2, np.float32)
    for listed, first in (([decaying], [2.5, 5.5]), (None, [1.375, 3.625]), ([], [0.875, 3.125])):
        if call == "apply_gradients":
            pairs = [(ones, staying), (ones, decaying)]
            optimizer.apply_gradients(pairs, decay_var_list=listed)
        else:
            gate = optimizer.GATE_NONE if call == "one by one" else optimizer.GATE_OP
            optimizer.minimize(
                lambda: np.sum(staying + decaying), gate_gradients=gate, decay_var_list=listed
            )
        assert decaying.numpy().tolist() == first
    assert staying.numpy().tolist() == [1.625, 4.625]


def test_tables_that_decay_and_others_step_together(device: str) -> None:
    decaying, staying = variable(device, 4, 2), variable(device, 4, 2)
    rows = put(device, [1, 3, 1], np.int32)
    slices = [IndexedSlices(put(device, np.ones((3, 2))), rows) for _ in range(2)]
    optimizer = gpuopt.AdamWOptimizer(0.25, 0.1)
    for _ in range(2):
        pairs = zip(slices, (staying, decaying), strict=True)
        optimizer.apply_gradients(pairs, decay_var_list=[decaying])
    references = []
    for alone in (gpuopt.AdamOptimizer(0.1), gpuopt.AdamWOptimizer(0.25, 0.1)):
        references.append(variable(device, 4, 2))
        for _ in range(2):
            alone.apply_gradients([(slices[0], references[-1])])
    assert np.array_equal(staying.numpy(), references[0].numpy())
    assert np.array_equal(decaying.numpy(), references[1].numpy())
    assert not np.array_equal(staying.numpy(), decaying.numpy())


def test_a_raw_array_in_the_list_is_known_by_its_memory() -> None:
    memory = np.full(8, 4, np.float32)
    gradients = [np.ones(4, np.float32) for _ in range(2)]
    optimizer = BASES["rule"](0.25)
    optimizer.apply_gradients(
        zip(gradients, (memory[:4], memory[4:]), strict=True), decay_var_list=[memory[:4]]
    )
    assert memory.tolist() == [2.5] * 4 + [3.5] * 4


def test_decay_is_a_number_of_all_digits_or_a_function_called_once_in_a_step() -> None:
    calls: list[int] = []
    for decay in (0.1, np.float64(0.1), lambda: calls.append(1) or 0.1):
        w, b = Variable(np.ones(1)), Variable(np.ones(1))
        zero = np.zeros(1)
        BASES["rule"](decay).apply_gradients([(zero, w), (zero, b)])
        assert w.numpy()[0] == 1 - 0.1
    assert calls == [1]
    w = Variable(np.ones(1))
    BASES["rule"](Variable(np.float32(0.1))).apply_gradients([(np.zeros(1), w)])
    assert w.numpy()[0] == 1 - float(np.float32(0.1))


def test_decay_by_hooks_computes_in_float32_for_16_bit_weights() -> None:
    w, b = (Variable(np.float16([1, 3, 1000])) for _ in range(2))
    for name, variable in (("hooks", w), ("rule", b)):
        BASES[name](0.001).apply_gradients([(np.zeros(3, np.float16), variable)])
    assert np.array_equal(w.numpy(), b.numpy())


def test_an_extended_class_keeps_its_bases_names_and_state() -> None:
    optimizer = AdagradW(0.01, 0.1, initial_accumulator_value=0.5)
    w = Variable(np.float32([1]), name="w")
    optimizer.apply_gradients([(np.float32([1]), w)])
    assert optimizer.get_slot(w, "accumulator").name == "w/Adagrad"
    assert optimizer.get_slot(w, "accumulator").numpy() == 1.5
    assert isinstance(optimizer, gpuopt.AdagradOptimizer)
    state = optimizer.state_dict()
    assert state["hyperparameters"]["weight_decay"] == 0.01
    other = AdagradW(0.01, 0.1)
    other.load_state_dict(state)
    assert other.get_slot(w, "accumulator").numpy() == 1.5


def test_lazy_adam_with_decay_leaves_other_rows_alone() -> None:
    table = Variable(np.ones((3, 1), np.float32))
    optimizer = LazyAdamW(0.25, 0.1)
    for row in (0, 1):
        slices = IndexedSlices(np.ones((1, 1), np.float32), [row])
        optimizer.apply_gradients([(slices, table)])
        if row == 0:
            first = table.numpy()
    assert np.array_equal(first[0], table.numpy()[0])
    assert table.numpy()[2] == 1


def test_a_frozen_accumulator_and_decay_go_together() -> None:
    optimizer = extend_with_decoupled_weight_decay(gpuopt.RegAdagradOptimizer)(0.25, 1.0, 4.0)
    w, b = Variable(np.float32([8])), Variable(np.float32([8]))
    one = np.ones(1, np.float32)
    with optimizer.avoid_updating_slots():
        optimizer.apply_gradients([(one, w), (one, b)], decay_var_list=[w])
    assert optimizer.get_slot(w, "accumulator").numpy() == 4
    assert (w.numpy(), b.numpy()) == (5.5, 7.5)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("base", "words"),
    [
        (lambda: "Adam", "base_optimizer must be a class of optimizers, got 'Adam'"),
        (gpuopt.AdamOptimizer, "base_optimizer must be a class of optimizers"),
        (
            lambda: gpuopt.TowerOptimizer,
            "TowerOptimizer wraps another optimizer: extend the class of that",
        ),
        (lambda: gpuopt.LARSOptimizer, "LARSOptimizer has a weight_decay already"),
        (lambda: gpuopt.LionOptimizer, "LionOptimizer has a weight_decay already"),
    ],
    ids=["name", "instance", "wrapper", "decay of its own", "decoupled already"],
)
def test_what_is_no_class_of_optimizers_is_not_extended(
    base: Callable[[], Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        extend_with_decoupled_weight_decay(base())


@pytest.mark.contract
@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (["w"], r"decay_var_list\[0\]: expected a Variable or an array, got"),
        ("w", "decay_var_list must be a list of variables, got 'w'"),
        (3, "decay_var_list must be a list of variables, got 3"),
        (np.ones(2), "decay_var_list must be a list of variables, got array"),
    ],
)
def test_a_wrong_list_is_refused_before_anything_is_written(listed: Any, words: str) -> None:
    w = Variable(np.float32([1, 2]))
    optimizer = gpuopt.MomentumWOptimizer(0.1, 0.1, 0.9)
    with pytest.raises(TypeError, match=words):
        optimizer.apply_gradients([(np.ones(2, np.float32), w)], decay_var_list=listed)
    with pytest.raises(TypeError, match=words):
        optimizer.minimize(lambda: np.sum(w * 1.0), decay_var_list=listed)
    assert w.numpy().tolist() == [1, 2]
    assert optimizer.get_slot(w, "momentum") is None


@pytest.mark.contract
@pytest.mark.parametrize("decay", ["much", np.ones(2), lambda: "much"])
def test_a_decay_that_is_no_number_is_refused_by_name(decay: Any) -> None:
    w = Variable(np.float32([1, 2]))
    for make in BASES.values():
        with pytest.raises((TypeError, ValueError), match="weight_decay must be a"):
            make(decay).apply_gradients([(np.ones(2, np.float32), w)])
    assert w.numpy().tolist() == [1, 2]


@pytest.mark.contract
def test_a_list_is_refused_in_a_replica() -> None:
    strategy = gpuopt.MirroredStrategy(["cpu", "cpu"])
    w = strategy.variable(np.float32([8]), name="w")
    optimizer = gpuopt.MomentumWOptimizer(0.25, 1.0, 0.9)

    def step(listed: Any) -> None:
        pairs = [(np.ones(1, np.float32), w)]
        optimizer.apply_gradients(pairs, decay_var_list=[w.replicas[0]] if listed else None)

    strategy.run(step, args=(False,))
    assert [copy.numpy().tolist() for copy in w.replicas] == [[4.0], [4.0]]
    with pytest.raises(ValueError, match="decay_var_list cannot be given in a replica"):
        strategy.run(step, args=(True,))
    assert [copy.numpy().tolist() for copy in w.replicas] == [[4.0], [4.0]]
