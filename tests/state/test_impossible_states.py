"""States that no run can have made are refused by name; those of any run are taken over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import gpuopt
from gpuopt import Saver, Variable

GRADIENT = np.float32([0.5, -2.0, 0.0])
# The slots that hold sums or averages of squares.
SQUARES = {
    "Adadelta": ["accum", "accum_update"],
    "Adagrad": ["accumulator"],
    "AdagradDA": ["gradient_squared_accumulator"],
    "Adam": ["v"],
    "Ftrl": ["accum"],
    "LazyAdam": ["v"],
    "ProximalAdagrad": ["accumulator"],
    "RMSProp": ["rms"],
}


def optimizer_named(name: str, **options: Any) -> Any:
    if name == "AdagradDA":
        options["global_step"] = Variable(0, name="step", trainable=False)
    return getattr(gpuopt, f"{name}Optimizer")(learning_rate=0.1, **options)


def trained(optimizer: Any, steps: int = 3) -> Variable:
    w = Variable(np.ones(3, np.float32), name="w")
    for _ in range(steps):
        optimizer.apply_gradients([(GRADIENT, w)])
    return w


def assert_refused(optimizer: Any, state: Any, w: Variable, words: str, kind: Any) -> None:
    """Loads a state, which changes nothing; neither does it where the variable is to come."""
    before = str(optimizer.state_dict({"w": w}))
    for named in ({"w": w}, {}):
        with pytest.raises(kind, match=words):
            optimizer.load_state_dict(state, named)
        assert str(optimizer.state_dict({"w": w})) == before


@pytest.mark.parametrize(
    ("name", "slot", "options"),
    [
        *((name, slot, {}) for name, slots in SQUARES.items() for slot in slots),
        ("RMSProp", "rms", {"centered": True}),
    ],
)
def test_squares_below_0_are_refused(name: str, slot: str, options: Any) -> None:
    optimizer = optimizer_named(name, **options)
    w = trained(optimizer)
    state = optimizer.state_dict({"w": w})
    state["slots"][slot]["w"][1] = -1e-30
    words = f'slot "{slot}" of "w" holds numbers from 0 to inf; the saved value has -1e-30'
    for each in (optimizer, optimizer_named(name, **options)):
        assert_refused(each, state, w, words, ValueError)


@pytest.mark.parametrize("name", SQUARES)
def test_every_slot_of_a_diverged_run_is_taken_over(name: str, tmp_path: Path) -> None:
    optimizer = optimizer_named(name)
    w = trained(optimizer)
    for value in (1e30, np.nan, np.inf, -np.inf):
        optimizer.apply_gradients([(np.full(3, value, np.float32), w)])
        path = Saver({"w": w}, optimizers=[optimizer]).save(tmp_path / "model")
        again, other = Variable(np.ones(3, np.float32)), optimizer_named(name)
        Saver({"w": again}, optimizers=[other]).restore(path)
        expected = optimizer.state_dict({"w": w})["slots"]
        np.testing.assert_equal(other.state_dict({"w": again})["slots"], expected)


@pytest.mark.parametrize("value", [-0.125, 1.0, 1.5, np.nan, np.inf])
def test_a_power_that_no_beta_has_is_refused(value: float) -> None:
    optimizer = gpuopt.AdamOptimizer()
    w = trained(optimizer)
    for power in ("beta1_power", "beta2_power"):
        state = optimizer.state_dict({"w": w})
        state["non_slots"][power][...] = value
        words = f'"{power}" holds numbers from 0 to 0.99999994; the saved value has {value:g}'
        for each in (optimizer, gpuopt.AdamOptimizer()):
            assert_refused(each, state, w, words, ValueError)


@pytest.mark.parametrize("beta1", [0.0, 1e-30, -0.5, 1.0, lambda: -0.5])
def test_the_powers_of_every_run_are_taken_over(beta1: Any) -> None:
    optimizer = gpuopt.AdamOptimizer(beta1=beta1, beta2=0.5)
    w = trained(optimizer, 200)
    state = optimizer.state_dict({"w": w})
    assert state["non_slots"]["beta2_power"] == 0  # underflow
    other = gpuopt.AdamOptimizer(beta1=beta1, beta2=0.5)
    other.load_state_dict(state, {"w": w})
    assert str(other.state_dict({"w": w})) == str(state)


@pytest.mark.parametrize(
    ("value", "words", "kind"),
    [
        (np.float64(0.5), "has dtype float32; the saved value has dtype float64", ValueError),
        (np.zeros(1, np.float32), r"has shape \(\); the saved value has shape \(1,\)", ValueError),
        ("0.5", "must hold numbers, got str", TypeError),
        (None, "must hold numbers, got NoneType", TypeError),
    ],
)
def test_a_power_of_another_form_is_refused_before_the_first_step(
    value: Any, words: str, kind: Any
) -> None:
    optimizer = gpuopt.AdamOptimizer()
    w = trained(optimizer)
    state = optimizer.state_dict({"w": w})
    state["non_slots"]["beta1_power"] = value
    for each in (optimizer, gpuopt.AdamOptimizer()):
        assert_refused(each, state, w, f'"beta1_power" {words}|of "beta1_power" {words}', kind)


@pytest.mark.parametrize("value", [np.array(["a", "b", "c"]), np.array([None] * 3)])
def test_a_waiting_slot_must_hold_numbers(value: Any) -> None:
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
    w = trained(optimizer)
    state = optimizer.state_dict({"w": w})
    state["slots"]["momentum"]["w"] = value
    words = 'the saved value of slot "momentum" of "w" must hold numbers'
    with pytest.raises(TypeError, match=words):
        optimizer.load_state_dict(state, {})


def test_waiting_slots_of_one_variable_have_one_form() -> None:
    optimizer = gpuopt.AdamOptimizer()
    w = trained(optimizer)
    state = optimizer.state_dict({"w": w})
    for other in (np.ones(4, np.float32), np.ones(3, np.float64)):
        state["slots"]["v"]["w"] = other
        with pytest.raises(ValueError, match=r'slot "v" of "w" has (shape|dtype)'):
            gpuopt.AdamOptimizer().load_state_dict(state, {})


@pytest.mark.parametrize("name", ["Adam", "Momentum", "GradientDescent"])
def test_an_unknown_variable_of_the_optimizer_is_refused(name: str) -> None:
    options = {"momentum": 0.5} if name == "Momentum" else {}
    optimizer = optimizer_named(name, **options)
    w = trained(optimizer)
    state = optimizer.state_dict({"w": w})
    state["non_slots"]["beta3_power"] = np.float32(0.5)
    assert_refused(optimizer, state, w, f'{name}" has a "beta3_power"; {name}Optim', ValueError)


class WithMore(gpuopt.MomentumOptimizer):
    """Makes a slot and a variable that no list of names mentions."""

    def _create_slots(self, var_list: Any) -> None:
        super()._create_slots(var_list)
        for variable in var_list:
            self._zeros_slot(variable, "more", "More")
            self._create_non_slot_variable(0.0, "count", variable)

    def _finish(self, update_ops: Any, name_scope: str) -> None:
        for name, count in self.state.others().items():
            count.assign_add(1.0)
            for slot in self._slot_dict("more").values():
                slot.assign_add(np.full(slot.shape, len(name), np.float32))


@pytest.mark.parametrize("attached", [False, True])
def test_what_a_subclass_makes_later_waits_for_it(attached: bool, tmp_path: Path) -> None:
    optimizer = WithMore(1.0, 0.5)
    w, kept = trained(optimizer), Variable(0.0)
    saved = Saver({"w": w, "kept": kept}, optimizers=[optimizer]).save(tmp_path / "model")
    optimizer.apply_gradients([(GRADIENT, w)])
    again, other = Variable(np.zeros(3, np.float32)), WithMore(1.0, 0.5)
    named = {"kept": kept} if attached else {"kept": kept, "w": again}
    saver = Saver(named, optimizers=[other])
    saver.restore(saved, deferred=attached)
    if attached:
        saver.attach({"w": again})
    count = other.state_dict({"w": again})["non_slots"]
    assert {name: float(value) for name, value in count.items()} == {"count": 3}
    other.apply_gradients([(GRADIENT, again)])
    assert str(other.state_dict({"w": again})) == str(optimizer.state_dict({"w": w}))
    np.testing.assert_array_equal(again.numpy(), w.numpy())


def test_a_subclass_of_ftrl_with_a_slot_of_its_own_is_saved(tmp_path: Path) -> None:
    class Counting(gpuopt.FtrlOptimizer):
        def _create_slots(self, var_list: Any) -> None:
            super()._create_slots(var_list)
            for variable in var_list:
                self._zeros_slot(variable, "more", "More")

    optimizer = Counting(0.1)
    w = trained(optimizer)
    optimizer.get_slot(w, "more").assign(GRADIENT)
    path = Saver({"w": w}, optimizers=[optimizer]).save(tmp_path / "model")
    again, other = Variable(np.zeros(3, np.float32)), Counting(0.1)
    Saver({"w": again}, optimizers=[other]).restore(path)
    np.testing.assert_array_equal(other.get_slot(again, "more").numpy(), GRADIENT)


def test_a_subclass_that_lists_what_it_makes_takes_nothing_else() -> None:
    class Listing(WithMore):
        def _all_slot_names(self) -> list[str]:
            return ["momentum", "more"]

        def _all_non_slot_names(self) -> list[str]:
            return ["count"]

    optimizer = Listing(1.0, 0.5)
    w = trained(optimizer)
    state = optimizer.state_dict({"w": w})
    Listing(1.0, 0.5).load_state_dict(state, {"w": w})
    state["slots"]["most"] = {"w": np.zeros(3, np.float32)}
    assert_refused(optimizer, state, w, 'has a slot "most"', ValueError)


def test_the_order_of_a_state_does_not_change_a_checkpoints_names(tmp_path: Path) -> None:
    optimizer = gpuopt.RMSPropOptimizer(0.1, momentum=0.5, name="R")
    w = trained(optimizer)
    state = optimizer.state_dict({"w": w})
    expected = load_file(Saver({"w": w}, optimizers=[optimizer]).save(tmp_path / "a"))
    state["slots"] = dict(sorted(state["slots"].items()))
    assert list(state["slots"]) == ["momentum", "rms"]
    for later in (False, True):
        other = gpuopt.RMSPropOptimizer(0.1, momentum=0.5, name="R")
        other.load_state_dict(state, {} if later else {"w": w})
        # Those of a variable that is to come, too.
        saver = Saver({"step" if later else "w": w}, optimizers=[other])
        found = load_file(saver.save(tmp_path / "b"))
        for name in ("w/R", "w/R_1"):
            np.testing.assert_array_equal(found[name], expected[name])


def test_one_variable_has_one_name() -> None:
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
    w = trained(optimizer)
    state = optimizer.state_dict({"w": w})
    words = 'one variable is named "w" and "u"; give it one name'
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(state, {"w": w, "u": w})
    with pytest.raises(ValueError, match=words):
        optimizer.state_dict({"w": w, "u": w})
    with pytest.raises(ValueError, match=words):
        Saver({"w": w, "u": w}, optimizers=[])
