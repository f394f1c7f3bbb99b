"""GradientAccumulationOptimizer: an update by the mean of several steps' gradients.

tests/fuzz/test_all_stages.py draws updates that are clipped, averaged, scaled, saved and restored
in their middle; tests/wrappers/test_nestings.py has this wrapper in and around others.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from stages import STAGES

import gpuopt
from gpuopt import GradientAccumulationOptimizer, IndexedSlices, Variable
from gpuopt.backends import to_device

pytestmark = pytest.mark.value

SHAPES = [(3, 4), (), (70, 50), (0,), (5,)]


def variables_of(dtype: Any, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Variable]:
    rng = np.random.default_rng(1)
    return [
        Variable(np.asarray(rng.normal(size=shape)).astype(dtype), name=f"w{i}")
        for i, shape in enumerate(shapes)
    ]


def arrays_of(rng: np.random.Generator, dtype: Any) -> list[np.ndarray]:
    return [np.asarray(3 * rng.normal(size=shape)).astype(dtype) for shape in SHAPES]


def summed(arrays: Sequence[Any]) -> Any:
    total = arrays[0].copy()
    for each in arrays[1:]:
        total = total + each
    return total


def state_of(optimizer: Any, variables: Sequence[Variable]) -> list[bytes]:
    return [each.tobytes() for each in arrays_in(optimizer, variables)]


def arrays_in(optimizer: Any, variables: Sequence[Variable]) -> list[np.ndarray]:
    slots = [
        optimizer.get_slot(variable, name)
        for variable in variables
        for name in optimizer.get_slot_names()
        if not name.startswith("gradient_")
    ]
    return [each.numpy() for each in [*variables, *slots] if each is not None]


def one(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


# Rules of several passes, and codes; tests/fuzz/test_all_stages.py draws the other stages.
SOME = ["sums, clip_norm", "other rule for rows", "row-wise, clip_norm", "slot_bits", "no slots"]


@pytest.mark.parametrize(("is_sparse", "reduction"), [(False, "mean"), (True, "sum")])
@pytest.mark.parametrize("stages", SOME)
@pytest.mark.one_in(2)
def test_an_update_is_a_step_by_gradients_summed_by_hand(
    every_form_one_by_one: str, stages: str, is_sparse: bool, reduction: Any
) -> None:
    check_updates(STAGES[stages], np.float32, is_sparse, reduction)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_have_their_variables_type(every_form_one_by_one: str, dtype: Any) -> None:
    check_updates(STAGES["decay"], dtype, True, "mean")


def check_updates(
    make_optimizer: Callable[..., Any], dtype: Any, is_sparse: bool, reduction: Any
) -> None:
    rng, steps = np.random.default_rng(2), 3
    mine, theirs = variables_of(dtype), variables_of(dtype)
    tables = [Variable(np.ones((40, 12), dtype), name="table") for _ in range(2)]
    counters = [Variable(np.int64(0)) for _ in range(2)]
    inner, plain = make_optimizer(), make_optimizer()
    optimizer = GradientAccumulationOptimizer(inner, steps, reduction)
    for number in range(4):
        given = []
        for micro in range(steps):
            arrays = arrays_of(rng, dtype)
            rows, values = rng.integers(0, 40, 30), rng.normal(size=(30, 12)).astype(dtype)
            given.append((arrays, values, rows))
            before = state_of(inner, [*mine, tables[0]])
            pairs: list[Any] = [(array.copy(), v) for array, v in zip(arrays, mine, strict=True)]
            if is_sparse:
                pairs.append((IndexedSlices(values.copy(), rows.copy()), tables[0]))
            optimizer.apply_gradients(pairs, counters[0])
            for array, _ in pairs[: len(mine)]:
                array[...] = np.nan  # gradients are only borrowed
            assert optimizer.accumulated_steps == (micro + 1) % steps
            if micro < steps - 1:
                assert state_of(inner, [*mine, tables[0]]) == before
                assert counters[0].numpy() == number
        divisor = dtype(steps if reduction == "mean" else 1)
        by_hand: list[Any] = [
            (summed(arrays) / divisor, variable)
            for arrays, variable in zip(
                zip(*(arrays for arrays, _, _ in given), strict=True), theirs, strict=True
            )
        ]
        if is_sparse:
            values = np.concatenate([values for _, values, _ in given]) / divisor
            rows = np.concatenate([rows for _, _, rows in given])
            by_hand.append((IndexedSlices(values, rows), tables[1]))
        plain.apply_gradients(by_hand, counters[1])
        assert state_of(inner, [*mine, tables[0]]) == state_of(plain, [*theirs, tables[1]])
        assert counters[0].numpy() == counters[1].numpy() == number + 1


def test_variables_without_a_gradient_in_some_steps() -> None:
    first, second, never = (Variable(one(0)) for _ in range(3))
    inner = gpuopt.MomentumOptimizer(1.0, 0.5)
    optimizer = GradientAccumulationOptimizer(inner, 2)
    for _ in range(2):
        optimizer.apply_gradients([(one(2), first), (None, second), (None, never)])
        optimizer.apply_gradients([(one(4), second)])
    assert (first.numpy(), second.numpy(), never.numpy()) == (-2.5, -5, 0)
    assert inner.get_slot(never, "momentum") is None
    # A sum of the update before counts for nothing.
    for _ in range(2):
        optimizer.apply_gradients([(one(2), first)])
    assert second.numpy() == -5


def test_the_number_of_steps_may_change_between_updates() -> None:
    w, counter = Variable(one(0)), Variable(np.int64(0))
    optimizer = GradientAccumulationOptimizer(
        gpuopt.GradientDescentOptimizer(1.0), lambda: 1 + int(counter.numpy()), "sum"
    )
    seen = []
    for _ in range(6):
        optimizer.apply_gradients([(one(1), w)], counter)
        seen.append(float(w.numpy()[0]))
    assert seen == [-1, -1, -3, -3, -3, -6]
    optimizer.accumulation_steps = 2
    for _ in range(2):
        optimizer.apply_gradients([(one(1), w)], counter)
    assert w.numpy() == -8
    optimizer.accumulation_steps = lambda: 0
    with pytest.raises(ValueError, match="accumulation_steps must be at least 1, got 0"):
        optimizer.apply_gradients([(one(1), w)])


def test_an_early_update_and_a_reset() -> None:
    w, counter = Variable(one(0)), Variable(np.int64(0))
    optimizer = GradientAccumulationOptimizer(gpuopt.GradientDescentOptimizer(1.0), 10)
    optimizer.apply_accumulated(counter)
    assert counter.numpy() == 0
    for gradient in (1, 3):
        optimizer.apply_gradients([(one(gradient), w)], counter)
    optimizer.apply_accumulated(counter)
    assert (w.numpy(), counter.numpy(), optimizer.accumulated_steps) == (-2, 1, 0)
    optimizer.apply_gradients([(one(100), w)])
    optimizer.reset()
    assert optimizer.accumulated_steps == 0
    optimizer.apply_gradients([(one(4), w)])
    optimizer.apply_accumulated()
    assert w.numpy() == -6


def test_steps_that_are_not_finite_are_left_out_or_refused() -> None:
    w = Variable(one(0))
    options: Any
    for options in ("skip", "raise"):
        optimizer = GradientAccumulationOptimizer(
            gpuopt.GradientDescentOptimizer(1.0), 2, "sum", on_nonfinite=options
        )
        optimizer.apply_gradients([(one(1), w)])
        if options == "raise":
            with pytest.raises(FloatingPointError, match="is not finite"):
                optimizer.apply_gradients([(one(np.inf), w)])
        else:
            optimizer.apply_gradients([(one(np.nan), w)])
        assert optimizer.accumulated_steps == 1
        optimizer.apply_gradients([(one(1), w)])
    assert w.numpy() == -4
    optimizer = GradientAccumulationOptimizer(gpuopt.GradientDescentOptimizer(1.0), 2)
    for gradient in (np.nan, 1):
        optimizer.apply_gradients([(one(gradient), w)])
    assert np.isnan(w.numpy()).all()


def test_hooks_are_called_in_updates_alone() -> None:
    calls = []

    class Own(gpuopt.Optimizer):
        def __init__(self) -> None:
            super().__init__(False, "Own")

        def _prepare(self) -> None:
            calls.append("prepare")

        def _apply_dense(self, grad: Any, var: Variable) -> None:
            var.assign_sub(grad)

        def _finish(self, update_ops: list[Any], name_scope: str) -> None:
            calls.append("finish")

    w = Variable(one(0))
    optimizer = GradientAccumulationOptimizer(Own(), 3)
    for _ in range(6):
        optimizer.apply_gradients([(one(1), w)])
    assert calls == ["prepare", "finish"] * 2
    assert w.numpy() == -2


def test_minimize_accumulates_with_every_gate() -> None:
    w, counter = Variable(one(4)), Variable(np.int64(0))
    optimizer = GradientAccumulationOptimizer(gpuopt.GradientDescentOptimizer(0.5), 2)
    for gate in (optimizer.GATE_OP, optimizer.GATE_GRAPH):
        optimizer.minimize(lambda: 0.5 * w * w, counter, [w], gate)
    assert (w.numpy(), counter.numpy()) == (2, 1)
    with pytest.warns(UserWarning, match="needs all gradients at once"):
        optimizer.minimize(lambda: 0.5 * w * w, counter, [w], optimizer.GATE_NONE)
    optimizer.minimize(lambda: 0.5 * w * w, counter, [w])
    assert (w.numpy(), counter.numpy()) == (1, 2)


@pytest.mark.contract
def test_a_state_without_sums_begins_anew_and_one_with_sums_needs_a_place() -> None:
    w = Variable(one(0), name="w")
    plain = gpuopt.AdamOptimizer(0.1)
    plain.apply_gradients([(one(1), w)])
    without = plain.state_dict({"w": w})
    optimizer = GradientAccumulationOptimizer(gpuopt.AdamOptimizer(0.1), 3)
    for _ in range(5):
        optimizer.apply_gradients([(one(1), w)])
    with_sums = optimizer.state_dict({"w": w})
    assert with_sums["slots"]["gradient_sum"]["w"].tolist() == [2]
    assert with_sums["non_slots"]["accumulated_steps"] == 2
    optimizer.load_state_dict(without, {"w": w})
    assert optimizer.accumulated_steps == 0
    refused = pytest.raises(ValueError, match=r'has a slot "gradient_sum".*apply_accumulated')
    with refused:
        plain.load_state_dict(with_sums, {"w": w})
    optimizer.load_state_dict(with_sums, {"w": w})
    optimizer.apply_accumulated()
    between = optimizer.state_dict({"w": w})
    plain.load_state_dict(between, {"w": w})
    np.testing.assert_array_equal(plain.get_slot(w, "m").numpy(), between["slots"]["m"]["w"])
    assert "accumulated_steps" not in plain.state_dict({"w": w})["non_slots"]
    between["non_slots"]["accumulated_steps"] = np.int64(1)
    with pytest.raises(ValueError, match=r'has a "accumulated_steps".*apply_accumulated'):
        plain.load_state_dict(between, {"w": w})
    optimizer.load_state_dict(with_sums, {"w": w})
    assert optimizer.accumulated_steps == 2
    with_sums["slots"]["gradient_sum"]["w"] = one(1, 2)
    with pytest.raises(ValueError, match=r'"gradient_sum" of "w" has shape \(1,\)'):
        optimizer.load_state_dict(with_sums, {"w": w})


def test_sums_beside_a_rule_without_slots_stay_float32_where_masters_are_not_kept() -> None:
    half, states = Variable(one(1).astype(np.float16), name="half"), []
    for masters in ("float32", None):
        inner = gpuopt.GradientDescentOptimizer(1.0, masters=masters)
        optimizer = GradientAccumulationOptimizer(inner, 2, "sum")
        for state in states:
            optimizer.load_state_dict(state, {"half": half})
        for _ in range(1 if states else 3):  # the first makes an update, which makes a master copy
            optimizer.apply_gradients([(one(0.25).astype(np.float16), half)])
        states.append(optimizer.state_dict({"half": half}))
        del inner, optimizer
        gc.collect()
    assert half.numpy() == 0


def test_restored_slices_keep_rows_as_they_are_by_the_same_words() -> None:
    table = Variable(np.zeros((4, 1), np.float32), name="table")
    rows = IndexedSlices(np.ones((1, 1), np.float32), [2])
    optimizers = [
        GradientAccumulationOptimizer(gpuopt.MomentumOptimizer(1.0, 0.5), 2) for _ in range(2)
    ]
    optimizers[0].apply_gradients([(rows, table)])
    optimizers[1].load_state_dict(optimizers[0].state_dict({"table": table}), {"table": table})
    optimizers[0].reset()
    with pytest.raises(ValueError, match=r"are accumulated: call apply_accumulated\(\) or reset"):
        gpuopt.rows(table).keep([2, 3])
    optimizers[1].reset()
    gpuopt.rows(table).keep([2, 3])


def test_an_error_drops_what_was_accumulated_and_says_so() -> None:
    w = Variable(one(0), name="w")
    rate: list[Any] = ["no number"]
    optimizer = GradientAccumulationOptimizer(gpuopt.GradientDescentOptimizer(lambda: rate[0]), 2)
    optimizer.apply_gradients([(one(1), w)])
    with pytest.raises(TypeError) as raised:
        optimizer.apply_gradients([(one(1), w)])
    assert "accumulated in 2 calls was dropped" in raised.value.__notes__[-1]
    assert (w.numpy(), optimizer.accumulated_steps) == (0, 0)
    # What is refused before it is added costs nothing.
    optimizer.apply_gradients([(one(1), w)])
    with pytest.raises(ValueError, match=r"has shape \(2,\)"):
        optimizer.apply_gradients([(one(1, 2), w)])
    assert optimizer.accumulated_steps == 1
    rate[0] = 1.0
    optimizer.apply_gradients([(one(1), w)])
    assert w.numpy() == -1


def test_rows_come_and_go_between_steps_unless_slices_are_kept() -> None:
    table = Variable(np.zeros((2, 1), np.float32), name="table")
    optimizer = GradientAccumulationOptimizer(gpuopt.GradientDescentOptimizer(1.0), 2, "sum")
    optimizer.apply_gradients([(np.ones((2, 1), np.float32), table)])
    gpuopt.rows(table).append(np.zeros((1, 1), np.float32))
    optimizer.apply_gradients([(np.ones((3, 1), np.float32), table)])
    assert table.numpy().tolist() == [[-2], [-2], [-1]]
    slices = IndexedSlices(np.ones((1, 1), np.float32), np.array([2]))
    optimizer.apply_gradients([(slices, table)])
    with pytest.raises(ValueError, match="sparse gradients of it are accumulated"):
        gpuopt.rows(table).remove([0])
    optimizer.apply_accumulated()
    gpuopt.rows(table).remove([0])
    assert table.numpy().tolist() == [[-2], [-2]]


def test_rows_of_a_copy_come_and_go_once_its_slices_are_dropped() -> None:
    table = Variable(np.ones((4, 2), np.float32), name="table")
    optimizer = GradientAccumulationOptimizer(gpuopt.LazyAdamOptimizer(0.1), 3)
    rows = IndexedSlices(np.ones((1, 2), np.float32), np.array([3]))
    optimizer.apply_gradients([(rows, table)])
    copied, of_copy = copy.deepcopy((table, optimizer))
    of_copy.reset()
    gpuopt.rows(copied).keep([0, 2])
    assert copied.shape == (2, 2)
    assert optimizer.accumulated_steps == 1


def test_a_new_row_has_no_part_in_a_restored_sum() -> None:
    table = Variable(np.zeros((2, 1), np.float32), name="table")
    optimizers = [
        GradientAccumulationOptimizer(gpuopt.GradientDescentOptimizer(1.0), 2, "sum")
        for _ in range(2)
    ]
    optimizers[0].apply_gradients([(np.ones((2, 1), np.float32), table)])
    optimizers[1].load_state_dict(optimizers[0].state_dict({"table": table}), {"table": table})
    optimizers[0].reset()
    gpuopt.rows(table).append(np.zeros((1, 1), np.float32))
    optimizers[1].apply_gradients([(np.ones((3, 1), np.float32), table)])
    assert table.numpy().tolist() == [[-2], [-2], [-1]]


@pytest.mark.contract
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, "accumulation_steps must be at least 1, got 0"),
        ((-1,), ValueError, "accumulation_steps must be at least 1, got -1"),
        ((1.5,), TypeError, "accumulation_steps must be an integer, got 1.5"),
        ((True,), TypeError, "accumulation_steps must be an integer, got True"),
        ((2, "median"), ValueError, r"reduction must be one of \['mean', 'sum'\], got 'median'"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: Any, error: Any, message: str) -> None:
    inner = gpuopt.AdamOptimizer()
    with pytest.raises(error, match=message):
        GradientAccumulationOptimizer(inner, *arguments)
    with pytest.raises(ValueError, match="most_rows must be at least 1, got 0"):
        GradientAccumulationOptimizer(inner, 2, most_rows=0)
    with pytest.raises(ValueError, match="on_nonfinite must be one of"):
        GradientAccumulationOptimizer(inner, 2, on_nonfinite="ignore")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be an Optimizer"):
        GradientAccumulationOptimizer("Adam", 2)  # type: ignore[arg-type]
    GradientAccumulationOptimizer(inner, 2)


def test_one_optimizer_accumulates_for_another() -> None:
    inner = gpuopt.AdamOptimizer(name="Inner")
    outer = GradientAccumulationOptimizer(inner, 2)
    with pytest.raises(ValueError, match='"Inner" are accumulated by another'):
        GradientAccumulationOptimizer(inner, 2)
    with pytest.raises(ValueError, match="cannot be around GradientAccumulationOptimizer"):
        GradientAccumulationOptimizer(outer, 2)
    w = Variable(one(0))
    outer.apply_gradients([(one(1), w)])
    del outer
    assert GradientAccumulationOptimizer(inner, 3).accumulated_steps == 1


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("stages", SOME)
@pytest.mark.one_in(3)
def test_updates_in_16_bits_take_sums_of_float32(
    every_form_one_by_one: str, stages: str, dtype: Any
) -> None:
    """A sum of one gradient makes the same step as the gradient: to the bit, but for norms."""
    rng = np.random.default_rng(4)
    mine, theirs = variables_of(dtype), variables_of(dtype)
    tables = [Variable(np.ones((40, 12), dtype), name="table") for _ in range(2)]
    inner, plain = STAGES[stages](), STAGES[stages]()
    optimizer = GradientAccumulationOptimizer(inner, 1)
    for _ in range(3):
        arrays = arrays_of(rng, dtype)
        slices = IndexedSlices(rng.normal(size=(30, 12)).astype(dtype), rng.integers(0, 40, 30))
        optimizer.apply_gradients([*zip(arrays, mine, strict=True), (slices, tables[0])])
        plain.apply_gradients([*zip(arrays, theirs, strict=True), (slices, tables[1])])
        got, expected = arrays_in(inner, [*mine, tables[0]]), arrays_in(plain, [*theirs, tables[1]])
        for a, b in zip(got, expected, strict=True):
            if "clip_norm" not in stages:
                assert a.tobytes() == b.tobytes()
            a, b = a.astype(np.float32), b.astype(np.float32)
            most = 4 * float(ml_dtypes.finfo(dtype).eps) * abs(b).max(initial=0)
            np.testing.assert_allclose(a, b, rtol=0, atol=most)
        if getattr(plain, "global_norm", None) is not None:
            np.testing.assert_allclose(inner.global_norm, plain.global_norm, rtol=3e-7)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("dense", np.float16),
        ("sparse", ml_dtypes.bfloat16),
        ("sparse first", np.float16),
        ("dense first", ml_dtypes.bfloat16),
        ("many rows", np.float16),
    ],
)
def test_sums_of_16_bits_are_not_rounded(every_form_one_by_one: str, kind: str, dtype: Any) -> None:
    w = Variable(np.zeros((3, 2), dtype))
    optimizer = GradientAccumulationOptimizer(
        gpuopt.GradientDescentOptimizer(1.0), 5, "sum", most_rows=1 if kind == "many rows" else 9
    )
    for step, number in enumerate([4096, 1, 1, 1, -4096]):  # 4097 is in neither type
        is_dense = kind == ("sparse first" if step else "dense first") or kind == "dense"
        array = np.full((3, 2), number, dtype)
        slices = IndexedSlices(array, np.array([0, 1, 2]))
        optimizer.apply_gradients([(array if is_dense else slices, w)])
    assert (w.numpy() == -3).all()


@pytest.mark.parametrize(
    ("way", "dtype"), [("saver", np.float16), ("state_dict", ml_dtypes.bfloat16)]
)
def test_float32_sums_of_16_bits_are_restored(way: str, dtype: Any, tmp_path: Path) -> None:
    def model() -> tuple[list[Variable], Any, gpuopt.Saver]:
        variables = [Variable(np.zeros((2, 1), dtype), name=name) for name in ("w", "table")]
        inner = gpuopt.MomentumOptimizer(1.0, 0.5, name="Restored")
        optimizer = GradientAccumulationOptimizer(inner, 3, "sum")
        return variables, optimizer, gpuopt.Saver(variables, optimizers=[optimizer])

    def step(variables: list[Variable], optimizer: Any, number: float) -> None:
        array = np.full((2, 1), number, dtype)
        slices = IndexedSlices(array, np.array([0, 1]))
        optimizer.apply_gradients([(array, variables[0]), (slices, variables[1])])

    variables, optimizer, saver = model()
    for number in (4096, 1):
        step(variables, optimizer, number)
    if way == "saver":
        path = saver.save(str(tmp_path / "model"))
        del variables, optimizer, saver
        variables, optimizer, saver = model()
        saver.restore(path)
    else:
        state = optimizer.state_dict(dict(zip("ab", variables, strict=True)))
        assert state["slots"]["gradient_sum"]["a"].dtype == np.float32
        del variables, optimizer, saver
        variables, optimizer, saver = model()
        optimizer.load_state_dict(state, dict(zip("ab", variables, strict=True)))
    step(variables, optimizer, -4096)
    assert [(each.numpy() == -1).all() for each in variables] == [True, True]


def test_a_reset_drops_sparse_gradients_that_were_restored() -> None:
    table = Variable(np.zeros((2, 1), np.float32), name="table")
    optimizer = GradientAccumulationOptimizer(gpuopt.GradientDescentOptimizer(1.0), 2, "sum")
    slices = IndexedSlices(np.ones((1, 1), np.float32), np.array([1]))
    optimizer.apply_gradients([(slices, table)])
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.reset()
    assert not optimizer.state_dict()["slots"].get("gradient_rows")
    for _ in range(2):
        optimizer.apply_gradients([(slices, table)])
    assert table.numpy().tolist() == [[0], [-2]]


@pytest.mark.contract
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"accumulated_steps": np.int64(-5)}, '"accumulated_steps" holds numbers from 0'),
        ({"accumulated_steps": np.float32(1)}, '"accumulated_steps.* has dtype int64'),
        ({"gradient_rows": [1, 2]}, r'"gradient_rows" of "rows" holds 2, which is not in \[0, 2\)'),
        ({"gradient_rows": [-1, 0]}, '"gradient_rows" of "rows" holds -1'),
        ({"gradient_rows": [0, 1, 1]}, r'"gradient_rows" of "rows" has shape \(2,\)'),
        ({"gradient_rows": None}, '"gradient_rows" and "gradient_values"'),
        ({"gradient_values": None}, '"gradient_rows" and "gradient_values"'),
        ({"gradient_sum": np.zeros((2, 1), np.float32)}, 'either "gradient_sum", or'),
        ({"gradient_unique_rows": 3}, '"gradient_unique_rows" of "rows" is 3, of 2 rows'),
        ({"gradient_unique_rows": -1}, '"gradient_unique_rows" of "rows" is -1'),
        ({"gradient_unique_rows": [1]}, r'"gradient_unique_rows" of "rows" has shape \(\)'),
    ],
)
def test_impossible_sums_are_refused_and_nothing_is_changed(changes: Any, problem: str) -> None:
    table = Variable(np.zeros((2, 1), np.float32), name="rows")
    optimizer = GradientAccumulationOptimizer(gpuopt.GradientDescentOptimizer(1.0), 2)
    slices = IndexedSlices(np.ones((2, 1), np.float32), np.array([1, 0]))
    optimizer.apply_gradients([(slices, table)])
    state = optimizer.state_dict()
    for name, value in changes.items():
        if name in state["non_slots"]:
            state["non_slots"][name] = value
        elif value is None:
            del state["slots"][name]["rows"]
        else:
            state["slots"].setdefault(name, {})["rows"] = np.array(value)
    with pytest.raises((TypeError, ValueError), match=problem):
        optimizer.load_state_dict(state)
    assert optimizer.accumulated_steps == 1
    optimizer.apply_gradients([(slices, table)])
    assert table.numpy().tolist() == [[-1], [-1]]
    if "accumulated_steps" in changes:
        return
    # Of a variable that is made later, its first step finds it.
    del table
    optimizer = GradientAccumulationOptimizer(gpuopt.GradientDescentOptimizer(1.0), 2)
    optimizer.load_state_dict(state)
    table = Variable(np.zeros((2, 1), np.float32), name="rows")
    with pytest.raises(ValueError, match=problem):
        optimizer.apply_gradients([(slices, table)])


@pytest.mark.parametrize("call", ["apply_gradients", "apply_accumulated", "reset"])
def test_calls_in_the_middle_of_an_update_are_refused(call: str) -> None:
    w = Variable(one(0), name="w")
    errors = []

    def rate() -> float:
        given = [[(one(100), w)]] if call == "apply_gradients" else []
        with pytest.raises(RuntimeError, match="in the middle of another call") as caught:
            getattr(optimizer, call)(*given)
        errors.append(caught.value)
        return 1.0

    optimizer = GradientAccumulationOptimizer(gpuopt.GradientDescentOptimizer(rate), 2)
    for number in (1, 3):
        optimizer.apply_gradients([(one(number), w)])
    assert len(errors) == 1
    assert w.numpy().tolist() == [-2]
    assert optimizer.accumulated_steps == 0


@pytest.mark.parametrize("is_early", [False, True])
def test_sums_wait_for_variables_that_are_made_after_a_restore(is_early: bool) -> None:
    def make() -> tuple[list[Variable], Any]:
        inner = gpuopt.GradientDescentOptimizer(1.0)
        return [], GradientAccumulationOptimizer(inner, 3, "sum")

    def add_variables(variables: list[Variable]) -> None:
        variables += [Variable(np.zeros((2, 1), np.float32), name=f"late{i}") for i in range(3)]

    array = np.ones((2, 1), np.float32)
    variables, optimizer = make()
    add_variables(variables)
    slices = IndexedSlices(array, np.array([1, 1]))
    for _ in range(2):
        optimizer.apply_gradients(list(zip([array, slices, array], variables, strict=True)))
    state = optimizer.state_dict()
    del variables[:], optimizer
    variables, optimizer = make()
    optimizer.load_state_dict(state)
    add_variables(variables)
    if is_early:
        optimizer.apply_accumulated()
    else:  # the first two have no gradient here
        optimizer.apply_gradients([(array, variables[2])])
    expected = [[[-2], [-2]], [[0], [-4]], [[-2 if is_early else -3]] * 2]
    assert [each.numpy().tolist() for each in variables] == expected


def test_hooks_are_given_gradients_of_their_variables_type() -> None:
    given = []

    class Own(gpuopt.Optimizer):
        def __init__(self) -> None:
            super().__init__(False, "Own")

        def _apply_dense(self, grad: Any, var: Variable) -> None:
            given.append(grad)

        def _apply_sparse(self, grad: Any, var: Variable) -> None:
            given.append(grad.values)

    w, table = (Variable(np.zeros((1, 1), np.float16)) for _ in range(2))
    optimizer = GradientAccumulationOptimizer(Own(), 2)
    one = np.ones((1, 1), np.float16)
    for _ in range(2):
        optimizer.apply_gradients([(one, w), (IndexedSlices(one, np.array([0])), table)])
    assert [(each.dtype, each.tolist()) for each in given] == [(np.float16, [[1]])] * 2


def test_a_users_gradient_of_float32_is_refused_for_16_bits() -> None:
    w = Variable(np.zeros(1, np.float16), name="half")
    optimizer = GradientAccumulationOptimizer(gpuopt.GradientDescentOptimizer(1.0), 1)
    for _ in range(2):
        with pytest.raises(TypeError, match='"half" has dtype float32; the variable has dtype'):
            optimizer.apply_gradients([(one(1), w)])
        optimizer.apply_gradients([(np.ones(1, np.float16), w)])
        with pytest.raises(TypeError, match='"half" has dtype float32; the variable has dtype'):
            optimizer._inner.apply_gradients([(one(1), w)])


@pytest.mark.parametrize("chooses", [False, True])
def test_a_step_inside_an_update_takes_no_gradient_wider_than_its_variable(chooses: bool) -> None:
    other = Variable(np.zeros(1, np.float16), name="other")
    inside, errors = gpuopt.GradientDescentOptimizer(1.0), []

    def learning_rate() -> float:
        for gradient in (one(1), IndexedSlices(one(1), np.array([0]))):
            with pytest.raises(TypeError) as raised:
                inside.apply_gradients([(gradient, other)])
            errors.append(str(raised.value))
        inside.apply_gradients([(np.ones(1, np.float16), other)])
        return 1.0

    opt: gpuopt.Optimizer = gpuopt.GradientDescentOptimizer(learning_rate)
    if chooses:
        opt = gpuopt.MultitaskOptimizerWrapper(opt)
    w, left_out = (Variable(np.zeros(1, np.float16), name=name) for name in ("w", "left_out"))
    optimizer = GradientAccumulationOptimizer(opt, 2)
    for _ in range(2):
        pairs = [(np.full(1, value, np.float16), v) for value, v in ((1, w), (0, left_out))]
        optimizer.apply_gradients(pairs)
    assert [float(each.numpy().sum()) for each in (w, other)] == [-1, -1]
    assert len(errors) == 2
    assert all('"other" has dtype float32; the variable has dtype' in each for each in errors)


def test_a_step_of_the_same_optimizer_inside_an_update_takes_none_either() -> None:
    w, other = (Variable(np.zeros(1, np.float16), name=name) for name in ("w", "other"))
    errors: list[str] = []

    def learning_rate() -> float:
        if not errors:
            errors.append("")
            with pytest.raises(TypeError) as raised:
                opt.apply_gradients([(one(1), other)])
            errors.append(str(raised.value))
        return 1.0

    opt = gpuopt.GradientDescentOptimizer(learning_rate)
    GradientAccumulationOptimizer(opt, 1).apply_gradients([(np.ones(1, np.float16), w)])
    assert '"other" has dtype float32; the variable has dtype' in errors[1]
    assert [float(each.numpy()[0]) for each in (w, other)] == [-1, 0]


@pytest.mark.contract
def test_variables_of_integers_are_refused_by_name() -> None:
    w = Variable(np.zeros(2, np.int32), name="whole")
    optimizer = GradientAccumulationOptimizer(gpuopt.AdamOptimizer(), 2)
    with pytest.raises(ValueError, match='Invalid type int32 for "whole"'):
        optimizer.apply_gradients([(np.ones(2, np.int32), w)])
    assert optimizer.accumulated_steps == 0


@pytest.mark.contract
def test_loss_scaling_is_refused_around_it_and_where_a_call_would_raise() -> None:
    def scaling(inner: gpuopt.Optimizer) -> gpuopt.LossScaleOptimizer:
        return gpuopt.LossScaleOptimizer(inner, gpuopt.DynamicLossScale())

    adam = gpuopt.AdamOptimizer()
    with pytest.raises(
        ValueError, match=r"write GradientAccumulationOptimizer\(LossScaleOptimizer\(\.\.\.\)"
    ):
        scaling(GradientAccumulationOptimizer(adam, 2))
    inner = gpuopt.MovingAverageOptimizer(scaling(gpuopt.AdamOptimizer()))
    with pytest.raises(ValueError, match='it would never lower the scale: give "skip"'):
        GradientAccumulationOptimizer(inner, 2, on_nonfinite="raise")
    GradientAccumulationOptimizer(inner, 2)


def test_slots_of_accumulated_rows_are_listed_while_a_variable_has_them() -> None:
    table, inner = Variable(np.ones((3, 1), np.float32), name="table"), gpuopt.AdamOptimizer()
    optimizer = GradientAccumulationOptimizer(inner, 2)

    def step() -> list[str]:
        slices = IndexedSlices(np.ones((1, 1), np.float32), np.array([1]))
        optimizer.apply_gradients([(slices, table)])
        return optimizer.get_slot_names()

    step(), step(), step()
    optimizer.load_state_dict(optimizer.state_dict())
    names = ["gradient_rows", "gradient_values", "m", "v"]
    assert inner.get_slot_names() == names
    assert all(inner.get_slot(table, name) is not None for name in names)
    assert step() == inner.get_slot_names() == ["m", "v"]


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu:0", marks=pytest.mark.gpu)])
def test_a_call_that_overflows_is_left_out_and_lowers_the_scale(
    device: str, is_sparse: bool
) -> None:
    w = Variable(np.zeros((3, 1), np.float32), name="w", device=device)
    counter = Variable(np.int64(0))
    scaling = gpuopt.LossScaleOptimizer(
        gpuopt.GradientDescentOptimizer(1.0), gpuopt.DynamicLossScale(64, 2), accept_after=2
    )
    optimizer = GradientAccumulationOptimizer(scaling, 2, "sum", on_nonfinite="skip")

    def call(factor: float) -> list[Any]:
        given = to_device(np.float32([[factor], [0], [1]]), w.device)
        rows = to_device(np.array([0, 1, 2]), w.device)
        gradient = IndexedSlices(given, rows) if is_sparse else given
        optimizer.apply_gradients([(gradient, w)], counter)
        counts = scaling.loss_scale, scaling.num_skipped, scaling.skipped_in_a_row
        return [float(w.numpy()[0, 0]), int(counter), optimizer.accumulated_steps, *counts]

    assert call(1) == [0, 0, 1, 64, 0, 0]
    assert call(np.inf) == [0, 0, 1, 32, 1, 1]
    assert optimizer.last_nonfinite is not None
    assert optimizer.last_nonfinite.startswith('gradient for "w" is not finite')
    assert call(2) == [-3, 1, 0, 32, 1, 0]
    # The manager has heard of a bad step since, and so of one good one alone.
    assert call(4) == [-3, 1, 1, 32, 1, 0]
    assert call(4) == [-11, 2, 0, 64, 1, 0]
    assert call(np.nan) == [-11, 2, 0, 32, 2, 1]
    assert call(-np.inf) == [-11, 2, 0, 16, 3, 2]
    # What comes after so many is accepted, and the update with it.
    assert call(-np.inf) == [-11, 2, 1, 16, 3, 2]
    assert call(1) == [np.inf, 3, 0, 8, 3, 2]


def test_all_replicas_leave_out_a_call_that_overflows_in_one_and_count_it_once() -> None:
    strategy = gpuopt.MirroredStrategy(["cpu:0"] * 2)
    w = strategy.variable(one(0), name="w")
    scaling = gpuopt.LossScaleOptimizer(
        gpuopt.GradientDescentOptimizer(1.0), gpuopt.DynamicLossScale(64)
    )
    optimizer = GradientAccumulationOptimizer(scaling, 2, on_nonfinite="skip")

    def step(factor: float) -> None:
        optimizer.apply_gradients([(one(factor), w.local)])

    for factors in ((1, 1), (1, np.inf), (np.nan, np.inf), (3, 3)):
        strategy.run(step, (gpuopt.distributed.PerReplica(factors),))
    assert (scaling.num_skipped, scaling.loss_scale) == (2, 16)
    assert w.numpy() == -4


@pytest.mark.contract
def test_towers_inside_and_workers_are_refused_by_name() -> None:
    optimizer = GradientAccumulationOptimizer(gpuopt.TowerOptimizer(gpuopt.AdamOptimizer()), 2)
    w = Variable(one(0))
    train = gpuopt.replicate(
        lambda x: optimizer.apply_gradients([(x, w)]), "weighted_sum", ["cpu", "cpu"]
    )
    with pytest.raises(RuntimeError, match=r"write TowerOptimizer\(GradientAccumulationOptimizer"):
        train(one(1, 2))
    assert optimizer.accumulated_steps == 0
    with pytest.raises(ValueError, match="cannot be around GradientAccumulationOptimizer"):
        gpuopt.SyncReplicasOptimizer(optimizer, 1)


@pytest.mark.parametrize("bad", [0.5, np.nan, -8, "8", [8.0], True])
def test_a_bad_loss_scale_is_refused_and_nothing_is_added(bad: Any) -> None:
    optimizer = GradientAccumulationOptimizer(gpuopt.AdamOptimizer(), 3)
    pairs = [(np.ones(3, np.float32), Variable(np.ones(3, np.float32)))]
    with pytest.raises((TypeError, ValueError), match="loss_scale"):
        optimizer.apply_gradients(pairs, loss_scale=bad)
    assert optimizer.accumulated_steps == 0


def test_a_wrong_global_step_drops_nothing() -> None:
    w = Variable(np.zeros(1, np.float32))
    optimizer = GradientAccumulationOptimizer(gpuopt.GradientDescentOptimizer(1.0), 2)
    optimizer.apply_gradients([(one(1), w)])
    with pytest.raises(TypeError, match="global_step: expected a Variable"):
        optimizer.apply_accumulated("x")
    assert optimizer.accumulated_steps == 1


@pytest.mark.contract
def test_arguments_that_cannot_be_set_are_refused_and_a_wrapper_names_the_one_inside() -> None:
    optimizer = GradientAccumulationOptimizer(gpuopt.GradientDescentOptimizer(1.0), 2)
    for name in ("reduction", "most_rows", "on_nonfinite"):
        with pytest.raises(AttributeError, match=f"give {name} where the optimizer is made"):
            setattr(optimizer, name, 1)
    around = gpuopt.MovingAverageOptimizer(optimizer)
    with pytest.raises(AttributeError, match="set it on the GradientAccumulationOptimizer inside"):
        around.accumulation_steps = 1
    optimizer.accumulation_steps = 3
    assert optimizer.accumulation_steps == 3
