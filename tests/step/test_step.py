"""What runs inside a step cannot change it, and what one call writes, it has read before."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.step import rule_updates

pytestmark = pytest.mark.contract

KNOWN = 6  # Steps after which nothing of a list of variables is new any more.


def zeros(*shape: int, name: str = "v") -> Variable:
    return Variable(np.zeros(shape, np.float32), name=name)


# User code inside a step


@pytest.mark.parametrize("inner_steps", [1, 2, 4])
def test_a_learning_rate_may_step_the_same_optimizer(inner_steps: int) -> None:
    v, w = zeros(3), zeros(3, name="w")
    one, ten = np.ones(3, np.float32), np.full(3, 10, np.float32)
    is_inside = False
    steps = 0

    def learning_rate() -> float:
        nonlocal is_inside, steps
        if not is_inside:
            steps += 1
            if steps >= KNOWN:
                is_inside = True
                for _ in range(inner_steps):
                    optimizer.apply_gradients([(ten, w)])
                is_inside = False
        return 1.0

    optimizer = gpuopt.GradientDescentOptimizer(learning_rate)
    for _ in range(KNOWN + 2):
        optimizer.apply_gradients([(one, v)])
    assert v.numpy().tolist() == [-(KNOWN + 2)] * 3
    assert w.numpy().tolist() == [-10 * 3 * inner_steps] * 3


@pytest.mark.parametrize("module", [__name__, None])
def test_a_users_prepare_may_step_another_optimizer(module: Any) -> None:
    v, w = zeros(3), zeros(3, name="w")
    other = gpuopt.GradientDescentOptimizer(1.0)

    class Own(gpuopt.AdamOptimizer):
        def _prepare(self) -> None:
            super()._prepare()
            other.apply_gradients([(np.ones(3, np.float32), w)])

    prepare: Any = Own._prepare
    prepare.__module__ = module
    for _ in range(2):
        Own(1.0).apply_gradients([(np.ones(3, np.float32), v)])
    assert w.numpy().tolist() == [-2] * 3
    np.testing.assert_allclose(v.numpy(), -2, rtol=1e-5)


def test_a_learning_rate_that_reshapes_the_gradient_is_noticed_before_anything_is_written() -> None:
    v, gradient = zeros(6), np.ones(6, np.float32)
    reshaping = False

    def learning_rate() -> float:
        if reshaping:
            gradient.shape = (2, 3)
        return 1.0

    optimizer = gpuopt.GradientDescentOptimizer(learning_rate)
    for _ in range(KNOWN):
        optimizer.apply_gradients([(gradient, v)])
    reshaping = True
    with pytest.raises(ValueError, match=r'gradient for "v" has shape \(2, 3\)'):
        optimizer.apply_gradients([(gradient, v)])
    assert v.numpy().tolist() == [-KNOWN] * 6


def test_a_learning_rate_that_moves_a_row_out_of_range_is_noticed() -> None:
    table, rows = zeros(4, 2), np.array([0, 3])
    slices = IndexedSlices(np.ones((2, 2), np.float32), rows)

    def learning_rate() -> float:
        rows[1] = 4_000_000
        return 1.0

    with pytest.raises(IndexError, match="indices"):
        gpuopt.GradientDescentOptimizer(learning_rate).apply_gradients([(slices, table)])
    assert not table.numpy().any()


def test_a_learning_rate_that_changes_the_list_of_pairs_does_not_change_the_step() -> None:
    v, w = zeros(2), zeros(2, name="w")
    pairs: list[Any] = [(np.ones(2, np.float32), v)]

    def learning_rate() -> float:
        pairs[:] = [(np.ones(2, np.float32), w)]
        return 1.0

    gpuopt.GradientDescentOptimizer(learning_rate).apply_gradients(pairs)
    assert (v.numpy().tolist(), w.numpy().tolist()) == ([-1, -1], [0, 0])


def test_a_constraint_that_steps_the_same_adam_does_not_change_the_outer_steps_numbers() -> None:
    w = zeros(2, name="w")
    is_inside = False

    def constrain(array: Any) -> Any:
        nonlocal is_inside
        if not is_inside:
            is_inside = True
            optimizer.apply_gradients([(np.ones(2, np.float32), w)])
            is_inside = False
        return array

    betas = iter([0.5, 0.5, 0.25])
    optimizer = gpuopt.AdamOptimizer(0.1, beta1=lambda: next(betas))
    v = Variable(np.zeros(2, np.float32), name="v", constraint=constrain)
    optimizer.apply_gradients([(np.ones(2, np.float32), v)])
    # First 0.5; then the inner step's 0.25, and the outer step's own 0.5.
    [power] = [each for each in optimizer.variables() if each.name == "beta1_power"]
    assert float(power) == 0.5 * 0.25 * 0.5


@pytest.mark.parametrize("hook", ["_create_slots", "_prepare", "_scalars", "_initial_slot_values"])
def test_a_hook_that_changes_a_gradient_in_place_is_noticed(hook: str) -> None:
    gradient, changes = np.ones(4, np.float32), False

    def change(self: Any, *arguments: Any) -> Any:
        if changes:
            gradient.dtype = np.int32
        return getattr(gpuopt.MomentumOptimizer, hook)(self, *arguments)

    optimizer = type("Changing", (gpuopt.MomentumOptimizer,), {hook: change})(1.0, 0.9)
    known = zeros(4)
    for _ in range(KNOWN):
        optimizer.apply_gradients([(gradient, known)])
    changes = True
    new = zeros(4)
    # What is known has its slots.
    for v in [new] if "slot" in hook else [known, new]:
        before = v.numpy()
        gradient.dtype = np.float32
        with pytest.raises(TypeError, match="has dtype int32"):
            optimizer.apply_gradients([(gradient, v)])
        assert np.array_equal(v.numpy(), before)


def test_a_hook_of_the_instance_that_changes_a_gradient_in_place_is_noticed() -> None:
    v, gradient = zeros(4), np.ones(4, np.float32)
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    optimizer.apply_gradients([(gradient, v)])
    prepare = optimizer._prepare

    def change() -> None:
        gradient.dtype = np.int32
        prepare()

    optimizer._prepare = change  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="has dtype int32"):
        optimizer.apply_gradients([(gradient, v)])
    assert v.numpy().tolist() == [-1] * 4


@pytest.mark.parametrize("known", [0, KNOWN])
def test_a_gradient_whose_conversion_changes_another_is_noticed(known: int) -> None:
    class Changing:
        changes = False

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            if self.changes:
                gradient.dtype = np.int32
            return np.ones(2, np.float32)

    v, w, gradient = zeros(4), zeros(2, name="w"), np.ones(4, np.float32)
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    for _ in range(known):
        optimizer.apply_gradients([(gradient, v), (Changing(), w)])
    Changing.changes = True
    with pytest.raises(TypeError, match='"v" has dtype int32'):
        optimizer.apply_gradients([(gradient, v), (Changing(), w)])
    assert (v.numpy()[0], w.numpy()[0]) == (-known, -known)


def test_a_gradient_whose_conversion_changes_the_list_of_pairs_does_not_change_the_step() -> None:
    class Changing:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            pairs[1:] = [([5.0, 5.0], c)]
            return np.ones(2, np.float32)

    a, b, c = zeros(2, name="a"), zeros(2, name="b"), zeros(2, name="c")
    pairs: list[Any] = [(Changing(), a), ([1.0, 1.0], b)]
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients(pairs)
    assert [float(each.numpy()[0]) for each in (a, b, c)] == [-1, -1, 0]


@pytest.mark.parametrize("base", [gpuopt.GradientDescentOptimizer, gpuopt.AdamOptimizer])
def test_a_hook_that_steps_the_same_optimizer_does_not_change_later_variables_numbers(
    base: Any,
) -> None:
    """All variables of a call are updated by its own numbers: Adam's powers of beta, too."""
    w, is_inside = zeros(2, name="w"), False
    one, rates = np.ones(2, np.float32), iter([1.0, 100.0])

    def apply_dense(self: Any, grad: Any, var: Any) -> None:
        nonlocal is_inside
        base._apply_dense(self, grad, var)
        if var.name == "a" and not is_inside:
            is_inside = True
            self.apply_gradients([(one, w)])
            is_inside = False

    optimizer = type("Stepping", (base,), {"_apply_dense": apply_dense})(lambda: next(rates))
    a, b = zeros(2, name="a"), zeros(2, name="b")
    optimizer.apply_gradients([(one, a), (one, b)])
    assert a.numpy()[0] == b.numpy()[0] != 0
    assert w.numpy()[0] < -50


# Memory that one call reads and writes


@pytest.mark.parametrize("reverse", [False, True])
def test_a_gradient_in_a_sparsely_updated_table_is_read_before(reverse: bool) -> None:
    table, w = Variable(np.ones((4, 2), np.float32)), zeros(4, 2)
    slices = IndexedSlices(np.full((2, 2), 10, np.float32), [0, 1])
    pairs = [(slices, table), (table.storage, w)]
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients(pairs[::-1] if reverse else pairs)
    assert np.all(w.numpy() == -1)


def test_a_sparse_gradient_in_one_of_many_tables_is_read_before() -> None:
    tables = [Variable(np.ones((4, 2), np.float32)) for _ in range(20)]
    rows = np.arange(4)
    pairs = [(IndexedSlices(np.full((4, 2), 10, np.float32), rows), each) for each in tables]
    pairs[15] = (IndexedSlices(tables[3].storage, rows), tables[15])
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients(pairs)
    assert [float(each.numpy()[0, 0]) for each in tables] == [-9.0] * 15 + [0.0] + [-9.0] * 4


def test_a_gradient_in_a_slot_is_read_before() -> None:
    a, b = zeros(3, 2, name="a"), zeros(3, 2, name="b")
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
    slices = IndexedSlices(np.ones((3, 2), np.float32), [0, 1, 2])
    optimizer.apply_gradients([(slices, a)])
    slot = optimizer.get_slot(a, "momentum")
    assert slot is not None
    optimizer.apply_gradients([(slices, a), (slot.storage, b)])
    assert np.all(b.numpy() == -1)


def test_a_gradient_in_a_variable_of_another_dtype_is_read_before() -> None:
    buffer = np.float32([1, 2, 3, 4])
    half = Variable(buffer.view(np.float16), copy=False, name="half")
    w = zeros(4, name="w")
    expected = -buffer
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients(
        [(np.ones(8, np.float16), half), (buffer, w)]
    )
    assert np.array_equal(w.numpy(), expected)


class Hooked(gpuopt.MomentumOptimizer):
    """Updates its variables one after the other."""

    def _apply_dense(self, grad: Any, var: Any) -> None:
        super()._apply_dense(grad, var)

    def _apply_sparse(self, grad: Any, var: Any) -> None:
        super()._apply_sparse(grad, var)


@pytest.mark.parametrize(("is_sparse", "memory"), [(True, "variable"), (False, "slot")])
def test_a_gradient_that_an_earlier_hook_writes_is_read_before(
    is_sparse: bool, memory: str, device: str
) -> None:
    ones = np.ones((3, 2), np.float32)
    a = Variable(ones, name="a", device=device)
    b = Variable(np.zeros_like(ones), name="b", device=device)
    optimizer = Hooked(1.0, 0.5)
    optimizer.apply_gradients([(ones, a)])
    a.assign(ones)
    of_a = a if memory == "variable" else optimizer.get_slot(a, "momentum")
    assert of_a is not None
    array = of_a.storage
    gradient = IndexedSlices(array, [0, 1, 2]) if is_sparse else array
    optimizer.apply_gradients([(10 * ones, a), (gradient, b)])
    assert np.all(b.numpy() == -1)


def test_a_hook_may_write_the_variable_before_it_reads_a_gradient_in_its_memory() -> None:
    class WritesFirst(gpuopt.GradientDescentOptimizer):
        def _apply_dense(self, grad: Any, var: Any) -> None:
            var.assign(np.zeros(2, np.float32))
            var.assign_sub(grad)

    v = Variable(np.float32([3, 4]))
    WritesFirst(1.0).apply_gradients([(v, v)])
    assert v.numpy().tolist() == [-3, -4]


@pytest.mark.parametrize("known", [0, KNOWN])
def test_a_gradient_is_read_first_where_the_variable_has_its_memory_from_a_memoryview(
    known: int,
) -> None:
    memory = np.full(8, 3.0, np.float32)
    raw = np.frombuffer(memoryview(memory), np.float32)
    table, rows = zeros(8, 1), np.arange(8)
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    slices = IndexedSlices(memory[:, None], rows)
    for number in range(1 + known):
        memory[...], before = 3.0, table.numpy()
        optimizer.apply_gradients([(np.full(8, 2, np.float32), raw), (slices, table)])
        assert np.all(table.numpy() == before - 3), number
        assert np.all(memory == 1)


@pytest.mark.parametrize("known", [0, KNOWN])
def test_a_variable_and_its_own_slot_are_not_updated_in_one_call(known: int) -> None:
    v = zeros(3)
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
    one = np.ones(3, np.float32)
    for _ in range(1 + known):
        optimizer.apply_gradients([(one, v)])
    slot = optimizer.get_slot(v, "momentum")
    before = v.numpy()
    with pytest.raises(ValueError, match=r'"v/Momentum".*written twice'):
        optimizer.apply_gradients([(one, v), (one, slot)])
    assert np.array_equal(v.numpy(), before)


@pytest.mark.parametrize("known", [0, KNOWN])
def test_the_global_step_is_not_part_of_a_variable(known: int) -> None:
    memory = np.zeros(4, np.float32)
    v = Variable(memory, copy=False, name="v")
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    for _ in range(known):
        optimizer.apply_gradients([(np.ones(4, np.float32), v)])
    before = memory.copy()
    with pytest.raises(ValueError, match="global step"):
        optimizer.apply_gradients([(np.ones(4, np.float32), v)], memory[3:].reshape(()))
    assert np.array_equal(memory, before)


# A gradient object that is changed in place


@pytest.mark.parametrize(
    ("size", "change", "words"),
    [
        (1_000, lambda g: setattr(g, "dtype", np.int32), "dtype int32"),
        (20_000, lambda g: setattr(g, "dtype", np.float64), "dtype float64"),
        (400_000, lambda g: setattr(g, "shape", (-1, 2)), "has shape"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_known_gradient_changed_in_place_is_checked_again(
    size: int, change: Callable[[Any], None], words: str
) -> None:
    v, gradient = zeros(size), np.ones(size, np.float32)
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    for _ in range(KNOWN):
        optimizer.apply_gradients([(gradient, v)])
    change(gradient)
    with pytest.raises((TypeError, ValueError), match=f'gradient for "v" has.*{words}|{words}'):
        optimizer.apply_gradients([(gradient, v)])
    assert np.all(v.numpy() == -KNOWN)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_known_raw_array_changed_in_place_is_another_variable() -> None:
    w, gradient = np.zeros(6, np.float32), np.ones(6, np.float32)
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
    for _ in range(KNOWN):
        optimizer.apply_gradients([(gradient, w)])
    before = w.copy()
    w.shape = (2, 3)
    with pytest.raises(ValueError, match="has shape"):
        optimizer.apply_gradients([(gradient, w)])
    optimizer.apply_gradients([(gradient.reshape(2, 3), w)])
    assert np.array_equal(w.reshape(-1), before - 1)  # with a momentum of its own


# Errors in the middle


def test_an_error_in_the_middle_says_what_was_written_and_can_be_accepted() -> None:
    class Failing(gpuopt.GradientDescentOptimizer):
        fails = True

        def _apply_dense(self, grad: Any, var: Any) -> None:
            if self.fails and var.name == "b":
                raise OSError("no more")
            super()._apply_dense(grad, var)

    a, b, step = zeros(2, name="a"), zeros(2, name="b"), Variable(0, name="step")
    pairs = [(np.ones(2, np.float32), v) for v in (a, b)]
    optimizer = Failing(1.0)
    with pytest.raises(OSError, match="no more") as raised:
        optimizer.apply_gradients(pairs, step)
    [note] = raised.value.__notes__
    assert 'Updated: "a"' in note
    assert '"b"' in note.partition("not at all")[2]
    assert '"step" was not counted up' in note
    assert int(step) == 0
    Failing.fails = False
    with pytest.raises(RuntimeError, match='"a" cannot be updated: a step of "Gradient'):
        optimizer.apply_gradients(pairs, step)
    optimizer.accept_unfinished_step()
    assert (a.numpy()[0], b.numpy()[0], int(step)) == (-1, 0, 1)
    optimizer.apply_gradients(pairs, step)
    assert (a.numpy()[0], b.numpy()[0], int(step)) == (-2, -1, 2)


def test_an_error_before_anything_is_written_has_no_such_note() -> None:
    v = zeros(2)
    with pytest.raises(ValueError, match="shape") as raised:
        gpuopt.GradientDescentOptimizer(1.0).apply_gradients([(np.ones(3, np.float32), v)])
    assert not getattr(raised.value, "__notes__", [])


def test_an_error_in_finish_says_what_was_written() -> None:
    class Failing(gpuopt.GradientDescentOptimizer):
        def _finish(self, update_ops: Any, name_scope: str) -> None:
            raise OSError("no more")

    v, step = zeros(2), Variable(0, name="step")
    with pytest.raises(OSError, match="no more") as raised:
        Failing(1.0).apply_gradients([(np.ones(2, np.float32), v)], step)
    [note] = raised.value.__notes__
    assert 'Updated: "v".' in note
    assert (v.numpy()[0], int(step)) == (-1, 0)


def test_an_error_between_gradients_says_all_that_was_written() -> None:
    def fail(array: Any) -> Any:
        raise OSError("no more")

    a = zeros(2, name="a")
    b = Variable(np.zeros(2, np.float32), name="b", constraint=fail)
    with pytest.raises(OSError, match="no more") as raised:
        gpuopt.GradientDescentOptimizer(1.0).minimize(
            lambda: np.sum(b * 2) + np.sum(a * 1), gate_gradients=gpuopt.Optimizer.GATE_NONE
        )
    [note] = raised.value.__notes__
    assert (a.numpy()[0], b.numpy()[0]) == (-1, -2)
    assert 'Updated: "a", "b".' in note


# What is known


@pytest.fixture
def made_groups(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Gets an item with each group that is made."""
    made: list[None] = []

    class Counted(rule_updates.Group):
        def __init__(self, *arguments: Any) -> None:
            made.append(None)
            super().__init__(*arguments)

    monkeypatch.setattr(rule_updates, "Group", Counted)
    return made


def test_more_variables_than_lists_are_kept_stay_known(made_groups: list[None]) -> None:
    variables, gradient = [zeros(2) for _ in range(400)], np.ones(2, np.float32)
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.9)
    for _ in range(3):
        for variable in variables:
            optimizer.apply_gradients([(gradient, variable)])
        optimizer.apply_gradients([(gradient, variable) for variable in variables[:2]])
    assert len(made_groups) == len(variables) + 1


def test_lists_that_are_others_in_each_step_are_not_all_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where each step has other gradients that are None: a plan is large."""
    groups: weakref.WeakSet[rule_updates.Group] = weakref.WeakSet()

    class Listed(rule_updates.Group):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            groups.add(self)

    monkeypatch.setattr(rule_updates, "Group", Listed)
    pairs = [(np.ones(1, np.float32), zeros(1)) for _ in range(1000)]
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    for number in range(100):
        optimizer.apply_gradients(pairs[number:] + pairs[: number // 2])
    assert 10 <= len(groups) <= 20


def test_a_few_lists_stay_known_however_long_they_are(made_groups: list[None]) -> None:
    gradient = np.ones(1, np.float32)
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    lists = [[(gradient, zeros(1)) for _ in range(6000)] for _ in range(4)]
    for _ in range(3):
        for pairs in lists:
            optimizer.apply_gradients(pairs)
    assert len(made_groups) == len(lists)


def test_counters_leave_nothing_behind() -> None:
    w, gradient = zeros(2), np.ones(2, np.float32)
    optimizer = gpuopt.GradientDescentOptimizer(1.0)

    def blocks_after_counters(number: int) -> int:
        for counter in [Variable(0) for _ in range(number)]:
            optimizer.apply_gradients([(gradient, w)], global_step=counter)
        del counter
        gc.collect()
        return sys.getallocatedblocks()

    before = blocks_after_counters(10)
    assert blocks_after_counters(1000) - before < 500


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_refused_call_makes_no_slots(is_sparse: bool) -> None:
    known, new = Variable(np.zeros(3, np.float32)), Variable(np.zeros((3, 2), np.float32))
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
    values = np.ones((1, 2), np.float32)
    good = IndexedSlices(values, np.array([2]))
    if is_sparse:
        known = Variable(np.zeros((3, 2), np.float32))
        first: Any = good
        wrong: Any = IndexedSlices(values, np.array([3]))
    else:
        first, wrong = np.ones(3, np.float32), np.ones(4, np.float32)
    optimizer.apply_gradients([(first, known)])
    with pytest.raises((IndexError, ValueError)):
        optimizer.apply_gradients([(good, new), (wrong, known)])
    assert optimizer.get_slot(new, "momentum") is None
