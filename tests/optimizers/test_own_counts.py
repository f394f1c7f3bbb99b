"""Each variable has a count of steps of its own, where the form is torch's or it is asked for."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import textbook

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable
from gpuopt.backends import to_device
from gpuopt.device import Device
from gpuopt.step.ledger import Ledger

# An optimizer, and its textbook with the same numbers.
FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "AdamW": (
        lambda **more: gpuopt.TorchAdamWOptimizer(0.1, 0.6, 0.7, **more),
        lambda *given: textbook.torch_adam_w(*given, learning_rate=0.1, beta1=0.6, beta2=0.7),
    ),
    "NAdam": (
        lambda **more: gpuopt.TorchNAdamOptimizer(0.1, 0.6, 0.7, **more),
        lambda *given: textbook.torch_nadam(*given, learning_rate=0.1, beta1=0.6, beta2=0.7),
    ),
    "RAdam": (
        lambda **more: gpuopt.RAdamOptimizer(0.1, 0.6, 0.8, **more),
        lambda *given: textbook.r_adam(*given, learning_rate=0.1, beta1=0.6, beta2=0.8),
    ),
    "AMSGrad": (
        lambda **more: gpuopt.AMSGradOptimizer(0.1, 0.6, 0.7, **more),
        lambda *given: textbook.ams_grad(*given, learning_rate=0.1, beta1=0.6, beta2=0.7),
    ),
    "Adagrad": (
        lambda **more: gpuopt.TorchAdagradOptimizer(0.1, 0.5, **more),
        lambda *given: textbook.torch_adagrad(*given, learning_rate=0.1, learning_rate_decay=0.5),
    ),
    "SGD": (
        lambda **more: gpuopt.TorchSGDOptimizer(0.1, 0.9, 0.5, **more),
        lambda *given: textbook.torch_sgd(*given, learning_rate=0.1, momentum=0.9, dampening=0.5),
    ),
    "LazyAdam": (
        lambda **more: gpuopt.LazyAdamOptimizer(
            np.float64(0.1), np.float64(0.6), np.float64(0.7), count="variable", **more
        ),
        lambda *given: textbook.adam(*given, learning_rate=0.1, beta1=0.6, beta2=0.7),
    ),
}
every_form = pytest.mark.parametrize("form", FORMS)
G = np.ones(3, np.float32)


def count(optimizer: Any, variable: Any) -> int:
    slot = optimizer.get_slot(variable, "step").numpy()
    assert (slot.shape, slot.dtype) == ((), np.int64)
    return int(slot)


def rows_of(values: np.ndarray, rows: list[int], device: str) -> IndexedSlices:
    """A gradient that is there, so that the device itself checks the rows."""
    at = Device.parse(device)
    return IndexedSlices(to_device(values, at), to_device(np.array(rows), at))


def pair() -> list[Variable]:
    return [Variable(np.ones(3, np.float32), name=name) for name in "ab"]


@every_form
@pytest.mark.parametrize("together", [True, False], ids=["one call", "a call for each"])
def test_variables_that_join_pause_and_leave_take_the_textbooks_steps(
    form: str, together: bool
) -> None:
    make, expected = FORMS[form]
    rng, optimizer = np.random.default_rng(3), make()
    starts = rng.normal(size=(5, 4))
    variables = [Variable(start) for start in starts]
    given: list[list[np.ndarray]] = [[] for _ in variables]
    for step in range(24):
        # The last joins in step 6, and the first leaves after 15; others pause now and then.
        used = [at for at in (1, 2, 3) if rng.random() < 0.7]
        used += [0] if step < 15 else []
        used += [4] if step >= 6 else []
        gradients = {at: rng.normal(size=4) for at in used}
        if together:
            optimizer.apply_gradients([(gradients.get(at), v) for at, v in enumerate(variables)])
        for at, gradient in gradients.items():
            given[at].append(gradient)
            if not together:
                optimizer.apply_gradients([(gradient, variables[at])])
    for start, variable, gradients_of in zip(starts, variables, given, strict=True):
        history = list(enumerate(gradients_of, start=1))
        np.testing.assert_allclose(
            variable.numpy(), expected(start, history)["var"], rtol=1e-12, atol=1e-12
        )
        assert count(optimizer, variable) == len(history)


@every_form
def test_the_same_on_each_device_beside_a_table(form: str, device: str) -> None:
    make, expected = FORMS[form]
    rng, optimizer = np.random.default_rng(4), make()
    start = rng.normal(size=(3, 4, 2)).astype(np.float32)
    variables = [Variable(each, device=device) for each in start]
    given: list[list[np.ndarray]] = [[] for _ in variables]
    for step in range(12):
        used = [0, *([1] if step % 3 else []), *([2] if step > 4 else [])]
        gradients = {at: rng.normal(size=(4, 2)).astype(np.float32) for at in used}
        pairs: list[Any] = [(gradients[at], variables[at]) for at in used]
        if 1 in used:  # all rows: the textbook knows no others
            pairs[1] = (IndexedSlices(gradients[1], np.arange(4)), variables[1])
        optimizer.apply_gradients(pairs)
        for at in used:
            given[at].append(gradients[at].astype(np.float64))
    for at, variable in enumerate(variables):
        history = list(enumerate(given[at], start=1))
        wanted = expected(start[at].astype(np.float64), history)["var"]
        np.testing.assert_allclose(variable.numpy(), wanted, rtol=2e-5, atol=2e-5)
        assert count(optimizer, variable) == len(history)


def test_a_variable_that_joins_in_step_6_moves_by_the_rate() -> None:
    for make in (
        lambda: gpuopt.TorchAdamWOptimizer(0.1, weight_decay=0.0),
        lambda: gpuopt.LazyAdamOptimizer(0.1, count="variable"),
    ):
        (a, b), optimizer = pair(), make()
        for _ in range(5):
            optimizer.apply_gradients([(G, a)])
        optimizer.apply_gradients([(G, a), (G, b)])
        np.testing.assert_allclose(b.numpy(), 0.9, rtol=1e-6)


def test_lazy_adam_counts_all_steps_by_default() -> None:
    (a, b), optimizer = pair(), gpuopt.LazyAdamOptimizer(0.1)
    for _ in range(5):
        optimizer.apply_gradients([(G, a)])
    optimizer.apply_gradients([(G, a), (G, b)])
    assert optimizer.get_slot_names() == ["m", "v"]
    np.testing.assert_allclose(b.numpy(), 0.9477884, rtol=1e-6)


@pytest.mark.contract
def test_another_count_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match='count must be "shared" or "variable", got \'row\''):
        gpuopt.LazyAdamOptimizer(count="row")  # type: ignore[arg-type]


def test_groups_have_the_numbers_of_their_own_steps() -> None:
    make, expected = FORMS["NAdam"]
    a, b, c = (Variable(np.ones(2), name=name) for name in "abc")
    optimizer = make(groups=[ParameterGroup("b", beta1=0.3)])
    g = np.array([1.0, -2.0])
    for number in range(6):
        optimizer.apply_gradients([(g, a), (g, b), *([(g, c)] if number > 3 else [])])
    history = [(t, g) for t in range(1, 7)]
    theirs = textbook.torch_nadam(np.ones(2), history, learning_rate=0.1, beta1=0.3, beta2=0.7)
    np.testing.assert_allclose(b.numpy(), theirs["var"], rtol=1e-12)
    np.testing.assert_allclose(a.numpy(), expected(np.ones(2), history)["var"], rtol=1e-12)
    np.testing.assert_allclose(c.numpy(), expected(np.ones(2), history[:2])["var"], rtol=1e-12)


def test_a_step_that_is_skipped_or_refused_advances_no_count(device: str) -> None:
    table, w = (Variable(np.ones((3, 2), np.float32), device=device) for _ in range(2))
    g, bad = np.ones((3, 2), np.float32), np.full((3, 2), np.inf, np.float32)
    skipping = gpuopt.TorchAdamWOptimizer(0.1, on_nonfinite="skip")
    for gradient in (g, bad, g, bad):
        skipping.apply_gradients([(gradient, w), (g, table)])
    skipping.apply_gradients([(bad, w)])
    skipping.apply_gradients([(g, w)])
    assert (count(skipping, w), count(skipping, table)) == (3, 2)
    refusing = gpuopt.RAdamOptimizer(0.1)
    refusing.apply_gradients([(g, w), (g, table)])

    def step() -> None:
        refusing.apply_gradients([(rows_of(g[:1], [3], device), table), (g, w)])
        refusing.check()

    with pytest.raises(IndexError):
        step()
    assert (count(refusing, w), count(refusing, table)) == (1, 1)


@pytest.fixture
def slow_gpu(emulated_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPU whose late errors no call hears of that does not wait for them."""
    raise_late = Ledger.raise_late

    def raise_if_waiting(ledger: Ledger, device: Any = None, *, wait: bool) -> None:
        if wait:
            raise_late(ledger, device, wait=wait)

    monkeypatch.setattr(Ledger, "raise_late", raise_if_waiting)
    return "gpu:0"


@pytest.mark.internal
@pytest.mark.emulator
def test_a_refused_call_is_undone_before_its_count_is_divided(slow_gpu: str) -> None:
    table, w = (Variable(np.ones((3, 2), np.float32), device=slow_gpu) for _ in range(2))
    g = np.ones((3, 2), np.float32)
    optimizer = gpuopt.RAdamOptimizer(0.1)
    optimizer.apply_gradients([(g, w), (g, table)])
    bad = rows_of(g[:1], [3], slow_gpu)

    def refused(*after: Any) -> None:
        optimizer.apply_gradients([(bad, table), (g, w)])
        optimizer.apply_gradients([*after])
        optimizer.check()

    for after in ([(g, table), (g, w)], [(g, w)]):  # the second is to divide the count
        with pytest.raises(IndexError):
            refused(*after)
    optimizer.apply_gradients([(g, w)])
    assert (count(optimizer, w), count(optimizer, table)) == (2, 1)


@pytest.mark.internal
@pytest.mark.emulator
def test_a_count_that_an_error_left_whole_is_divided_by_the_next_call(slow_gpu: str) -> None:
    """The variables of the call that raises are known as a group: its plan is made at once."""
    table, v, w = (Variable(np.ones((3, 2), np.float32), device=slow_gpu) for _ in range(3))
    g = np.ones((3, 2), np.float32)
    good, bad = (rows_of(g[:1], [row], slow_gpu) for row in (0, 3))
    optimizer = gpuopt.RAdamOptimizer(0.1)

    def refused() -> None:
        optimizer.apply_gradients([(bad, table), (g, v), (g, w)])
        optimizer.apply_gradients([(g, v), (g, w)])
        optimizer.check()

    for _ in range(2):
        optimizer.apply_gradients([(good, table), (g, v), (g, w)])
    with pytest.raises(IndexError):
        refused()
    for _ in range(2):
        optimizer.apply_gradients([(g, v), (g, w)])
    assert [count(optimizer, each) for each in (table, v, w)] == [2, 4, 4]


def test_parts_of_a_step_count_as_one() -> None:
    a, b = pair()
    optimizer = gpuopt.TorchAdamWOptimizer(0.1, weight_decay=0.0)
    for _ in range(3):
        optimizer.minimize(
            lambda: (a * a).sum() + (b * b).sum(),
            var_list=[a, b],
            gate_gradients=optimizer.GATE_NONE,
        )
    optimizer.apply_gradients([(G, b)])
    assert (count(optimizer, a), count(optimizer, b)) == (3, 4)


def test_a_step_inside_of_a_hyperparameter_counts_what_it_updates() -> None:
    a, b = pair()
    inner_steps = iter([False, True, False])

    def rate() -> float:
        if next(inner_steps, False):
            optimizer.apply_gradients([(G, b)])
        return 0.1

    optimizer = gpuopt.TorchAdamWOptimizer(rate)
    for _ in range(2):
        optimizer.apply_gradients([(G, a), (G, b)])
    assert (count(optimizer, a), count(optimizer, b)) == (2, 3)


@pytest.mark.internal
def test_a_step_that_looks_at_gradients_first_finds_counts_that_were_divided_meanwhile() -> None:
    """As by another thread, between the step's beginning and its look at the gradients."""
    (a, b), optimizer = pair(), gpuopt.LazyAdamOptimizer(0.1, on_nonfinite="skip", count="variable")
    both = [(G, a), (G, b)]
    for _ in range(3):
        optimizer.apply_gradients(both)
    checked_updates = optimizer._checked_updates

    def step_of_another(request: Any) -> Any:
        updates = checked_updates(request)
        optimizer._checked_updates = checked_updates
        optimizer.apply_gradients([(G, b)])
        return updates

    optimizer._checked_updates = step_of_another
    optimizer.apply_gradients(both)
    assert (count(optimizer, a), count(optimizer, b)) == (4, 5)


def test_a_hook_of_a_users_own_counts_each_variable_once() -> None:
    class Own(gpuopt.TorchAdamWOptimizer):
        def _apply_dense(self, grad: Any, var: Any) -> None:
            super()._apply_dense(grad, var)

    a, b = pair()
    c, d = pair()
    own, plain = Own(0.1), gpuopt.TorchAdamWOptimizer(0.1)
    for number in range(4):
        own.apply_gradients([(G, a), *([(G, b)] if number > 1 else [])])
        plain.apply_gradients([(G, c), *([(G, d)] if number > 1 else [])])
    assert (count(own, a), count(own, b)) == (4, 2)
    assert np.array_equal(a.numpy(), c.numpy())
    assert np.array_equal(b.numpy(), d.numpy())


def test_an_assigned_count_is_of_one_variable() -> None:
    (a, b), optimizer = pair(), gpuopt.RAdamOptimizer(0.1)
    optimizer.apply_gradients([(G, a), (G, b)])
    optimizer.get_slot(a, "step").assign(7)  # type: ignore[union-attr]
    optimizer.apply_gradients([(G, a), (G, b)])
    assert (count(optimizer, a), count(optimizer, b)) == (8, 2)


@pytest.mark.internal
def test_variables_that_are_updated_together_share_a_count() -> None:
    many = [Variable(np.ones(3, np.float32)) for _ in range(20)]
    optimizer = gpuopt.TorchAdamWOptimizer(0.1)

    def number_of_counts() -> int:
        return len(set(optimizer.state.table("step").values()))

    optimizer.apply_gradients([(G, v) for v in many])
    assert number_of_counts() == 1
    optimizer.apply_gradients([(G, v) for v in many[:5]])
    optimizer.apply_gradients([(G, v) for v in many])
    assert number_of_counts() == 2
    optimizer.load_state_dict(optimizer.state_dict())
    assert number_of_counts() == 2


# States


def uneven(make: Callable[[], Any]) -> tuple[Any, dict[str, Variable]]:
    (a, b), optimizer = pair(), make()
    for number in range(5):
        optimizer.apply_gradients([(G, a), *([(G, b)] if number > 2 else [])])
    return optimizer, {"a": a, "b": b}


@every_form
@pytest.mark.parametrize("how", ["state", "before its variables", "deepcopy", "pickle"])
def test_a_run_goes_on_with_the_counts_of_all_variables(form: str, how: str) -> None:
    make, _ = FORMS[form]
    first, variables = uneven(make)
    if how in ("deepcopy", "pickle"):
        both = {"optimizer": first, "variables": variables}
        other = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
        second, theirs = other["optimizer"], other["variables"]
    else:
        second, state = make(), first.state_dict(variables)
        if how == "state":
            theirs = {n: Variable(v.numpy(), name=f"{n}{n}") for n, v in variables.items()}
            second.load_state_dict(state, theirs)
        else:
            second.load_state_dict({**state, "slots": renamed(state["slots"])}, {})
            theirs = {n: Variable(v.numpy(), name=f"{n}{n}") for n, v in variables.items()}
    for number in range(4):
        for optimizer, own in ((first, variables), (second, theirs)):
            optimizer.apply_gradients([(G, own["b"]), *([(G, own["a"])] if number % 2 else [])])
    for name, variable in variables.items():
        assert count(second, theirs[name]) == count(first, variable)
        assert np.array_equal(theirs[name].numpy(), variable.numpy())


def renamed(slots: Mapping[str, Any]) -> dict[str, Any]:
    return {slot: {n * 2: value for n, value in of.items()} for slot, of in slots.items()}


def shared_state(optimizer: Any, variables: dict[str, Variable], **numbers: Any) -> Any:
    """A state as it was when all variables had one count."""
    state = optimizer.state_dict(variables)
    slots = {n: s for n, s in state["slots"].items() if n not in ("step", "mu_product")}
    return {**state, "slots": slots, "non_slots": {n: np.array(v) for n, v in numbers.items()}}


def test_an_older_state_gives_its_count_to_variables_with_slots() -> None:
    optimizer, variables = uneven(gpuopt.RAdamOptimizer)
    c = Variable(np.ones(3, np.float32), name="c")
    other = gpuopt.RAdamOptimizer()
    other.load_state_dict(shared_state(optimizer, variables, step=5.0), variables)
    assert other.state_dict(variables)["non_slots"] == {}
    other.apply_gradients([(G, c), (G, variables["b"])])
    assert [count(other, v) for v in (*variables.values(), c)] == [5, 6, 1]


def test_an_older_state_of_groups_gives_each_variable_its_groups_product() -> None:
    groups = [ParameterGroup("b", beta1=0.5)]
    optimizer, variables = uneven(lambda: gpuopt.TorchNAdamOptimizer(groups=groups))
    numbers = {"step": 5.0, "mu_product": 0.25, "mu_product/b": 0.125}
    optimizer.load_state_dict(shared_state(optimizer, variables, **numbers), variables)
    products = optimizer.state_dict(variables)["slots"]["mu_product"]
    assert products == {"a": 0.25, "b": 0.125}


@pytest.mark.parametrize("steps", [0, 1, 17, 5000])
def test_powers_of_beta_become_counts(steps: int) -> None:
    (a, b), shared = pair(), gpuopt.LazyAdamOptimizer(0.1)
    optimizer = gpuopt.LazyAdamOptimizer(0.1, count="variable")
    for _ in range(steps):
        shared.apply_gradients([(G, a)])
    optimizer.load_state_dict(shared.state_dict({"a": a}), {"a": a})
    optimizer.apply_gradients([(G, a), (G, b)])
    assert (count(optimizer, a), count(optimizer, b)) == (steps + 1, 1)


@pytest.mark.contract
def test_a_count_that_no_run_makes_is_refused() -> None:
    optimizer, variables = uneven(gpuopt.TorchNAdamOptimizer)
    for name, value in (("step", np.int64(-1)), ("mu_product", np.float64(1.5))):
        state = optimizer.state_dict(variables)
        state["slots"][name]["a"] = np.array(value)
        with pytest.raises(ValueError, match=f'"{name}" of "a" holds numbers from'):
            optimizer.load_state_dict(state, variables)
    with pytest.raises(ValueError, match='"step" holds numbers from'):
        optimizer.load_state_dict(
            shared_state(optimizer, variables, step=np.nan, mu_product=0.5), variables
        )
    state = optimizer.state_dict(variables)
    state["slots"]["step"]["a"] = np.array(3.0)
    with pytest.raises(ValueError, match='"step" of "a" has dtype int64'):
        optimizer.load_state_dict(state, variables)
    assert [count(optimizer, each) for each in variables.values()] == [5, 2]


def test_a_checkpoint_keeps_counts(tmp_path: Any) -> None:
    optimizer, variables = uneven(gpuopt.TorchAdamWOptimizer)
    saver = gpuopt.Saver(variables, optimizers=[optimizer])
    path = saver.save(str(tmp_path / "run"))
    optimizer.apply_gradients([(G, variables["b"])])
    saver.restore(path)
    assert [count(optimizer, each) for each in variables.values()] == [5, 2]


@pytest.mark.contract
@pytest.mark.parametrize("bad", [-1, 1.5, "x", [1, 2], np.nan])
def test_a_count_is_a_whole_number_from_0(bad: Any) -> None:
    w = gpuopt.Variable(np.ones(2, np.float32), name="w")
    optimizer = gpuopt.TorchAdamWOptimizer(0.1)
    optimizer.apply_gradients([(np.ones(2, np.float32), w)])
    count: Any = optimizer.get_slot(w, "step")
    with pytest.raises(ValueError, match=r'^step of "w" cannot be '):
        count.assign(bad)
    assert int(count.numpy()) == 1
    count.assign(7)
    assert int(count.numpy()) == 7
