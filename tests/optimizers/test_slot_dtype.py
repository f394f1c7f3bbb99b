"""Slots in bfloat16 as an option of optimizers: on every device, with what else a step does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_slots import array_slots
from each_device import variable_on
from every_optimizer import make, one_of_each_shape
from stages import STAGES

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.rules.rounded import BFLOAT16, key_of_step, round_at_random

pytestmark = pytest.mark.value

SEED = 11
REFUSED = {
    "row-wise": "slots accumulator have a number for each row",
    "row-wise, clip_norm": "slots v have a number for each row",
    "no slots": "which has no slots",
    "slot_bits": "with slot_bits=8",
    "slot_bits, clip_norm, groups": "with slot_bits=8",
}
TAKEN = [name for name in STAGES if name not in REFUSED]
# Beside slots in bfloat16: the variables' type, master copies, and whether slots are rounded to
# nearest.
KINDS: dict[str, tuple[Any, Any, bool]] = {
    "float32": (np.float32, None, True),
    "float32, at random": (np.float32, None, False),
    "float16": (np.float16, None, True),
    "master": (BFLOAT16, "float32", True),
    "master, at random": (np.float16, "float32", False),
    "remainder": (BFLOAT16, "remainder", True),
    "remainder, at random": (BFLOAT16, "remainder", False),
}
# On GPUs, the loops around a rule depend on the types, and not on the rule.
ON_GPUS = [
    ("plain", "float32"),
    ("plain", "float32, at random"),
    ("plain", "float16"),
    ("plain", "master, at random"),
    ("plain", "remainder"),
    ("plain", "remainder, at random"),
    ("lazy", "float32"),
    ("decay, clip_norm, groups", "float32"),
    ("sums", "master"),
]
SHAPES = [(), (1,), (40,), (5, 3), (0,), (300, 7)]
# Rules that sum over a variable see a table's gradient in the table's type.
ROWS = np.array([3, 5, 0, 11, 7])
NUM_STEPS = 3
Make = Callable[..., Any]


def normal(seed: int, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    return np.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def gradients(xp: Any, step: int, dtype: Any, like: Any) -> list[Any]:
    """Returns dense gradients, and one of some rows; `like` says which digits they have."""
    shapes = [*SHAPES[:-1], (5, 7)]
    found = [
        xp.asarray(normal(50 + 9 * step + i, shape, like).astype(dtype))
        for i, shape in enumerate(shapes)
    ]
    return [*found[:-1], IndexedSlices(found[-1], xp.asarray(ROWS), SHAPES[-1])]


def rounded_slots(exact: Any, variable: Variable, at_random: bool, step: int) -> None:
    """Rounds the slots of a float32 variable, as a step with slots in bfloat16 does."""
    slots = [exact.get_slot(variable, name) for name in array_slots(exact)]
    arrays = [each.numpy().reshape(-1) for each in (variable, *slots)]
    new = [each.astype(BFLOAT16) for each in arrays]
    if at_random:
        numbers = np.arange(arrays[0].size, dtype=np.uint64)
        new = round_at_random(arrays, numbers, key_of_step(SEED, step))
    for slot, values in zip(slots, new[1:], strict=True):
        slot.assign(values.astype(np.float32).reshape(slot.shape))


def check(stage: str, kind: str, xp: Any = np) -> None:
    """Compares each step with that of float32 slots, which are rounded after it."""
    dtype, masters, is_nearest = KINDS[kind]
    options: dict[str, Any] = {"slot_dtype": "bfloat16", "masters": masters}
    if not is_nearest:
        options["stochastic_rounding"] = SEED
    optimizer, exact = STAGES[stage](**options), STAGES[stage]()
    mine = [variable_on(xp, normal(i, s, dtype), name=f"w{i}") for i, s in enumerate(SHAPES)]
    theirs = [
        Variable(each.numpy().astype(np.float32), name=f"w{i}") for i, each in enumerate(mine)
    ]
    eps = 2.0**-10 if dtype == np.float16 and masters is None else 2.0**-23
    for step in range(NUM_STEPS):
        given, wide = (gradients(m, step, t, dtype) for m, t in ((xp, dtype), (np, np.float32)))
        optimizer.apply_gradients(list(zip(given, mine, strict=True)))
        exact.apply_gradients(list(zip(wide, theirs, strict=True)))
        for w, v in zip(mine, theirs, strict=True):
            values = w if masters is None else optimizer.get_slot(w, "master")
            got, expected = values.numpy().astype(np.float32), v.numpy()
            np.testing.assert_allclose(got, expected, rtol=4 * eps, atol=16 * eps)
            rounded_slots(exact, v, not is_nearest, step)
            for name in array_slots(exact):
                slot, other = optimizer.get_slot(w, name), exact.get_slot(v, name)
                assert slot.dtype == BFLOAT16
                a, b = slot.numpy().astype(np.float32), other.numpy()
                np.testing.assert_allclose(a, b, rtol=2.0**-7, atol=1e-9)
                # Digits that differ in float32 round to other neighbours at times.
                assert (a != b).sum() <= (0 if xp is np and eps < 1e-6 else 2 + 0.01 * a.size)
                other.assign(a)
            v.assign(got)  # from here on, both are the same


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        *(("plain", kind) for kind in KINDS),
        *((stage, "float32") for stage in TAKEN if stage != "plain"),
        *(
            (stage, "remainder, at random")
            for stage in ("lazy", "decay, clip_norm, groups", "sums")
        ),
    ],
)
@pytest.mark.one_in(3)
def test_a_step_is_that_of_float32_slots_which_are_rounded_after_it(
    stage: str, kind: str, every_form_one_by_one: str
) -> None:
    check(stage, kind)


@pytest.mark.parametrize(("stage", "kind"), ON_GPUS)
@pytest.mark.one_in(3)
def test_every_device_makes_the_same_steps(stage: str, kind: str, xp: Any) -> None:
    check(stage, kind, xp)


@one_of_each_shape
def test_every_elementwise_optimizer_with_slots_takes_it(
    name: str, arguments: dict[str, Any]
) -> None:
    rule = make(name, arguments).rule
    if rule.row_slots or not rule.slots:
        with pytest.raises(ValueError, match="slot_dtype='bfloat16' cannot be had of the rule"):
            make(name, arguments, slot_dtype="bfloat16")
        return
    optimizer = make(name, arguments, slot_dtype="bfloat16")
    w, half = Variable(np.ones((6, 4), np.float32)), Variable(np.ones(5, BFLOAT16))
    optimizer.apply_gradients([(normal(0, (6, 4)), w), (normal(1, (5,), BFLOAT16), half)])
    slots = [optimizer.get_slot(each, n) for each in (w, half) for n in rule.slots]
    assert {slot.dtype for slot in slots} == {BFLOAT16}


@pytest.mark.contract
@pytest.mark.parametrize("stage", REFUSED)
def test_what_it_cannot_be_had_with_is_refused_by_name(stage: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[stage]):
        STAGES[stage](slot_dtype="bfloat16")


@pytest.mark.parametrize("given", ["bfloat16", BFLOAT16, np.dtype(BFLOAT16)], ids=repr)
def test_the_type_itself_is_as_good_as_its_name(given: Any) -> None:
    optimizer, w = gpuopt.AdamOptimizer(slot_dtype=given), Variable(np.ones(3, np.float32))
    optimizer.apply_gradients([(np.ones(3, np.float32), w)])
    assert optimizer.get_slot(w, "m").dtype == BFLOAT16
    assert optimizer.state_dict({"w": w})["hyperparameters"]["slot_dtype"] == "bfloat16"


@pytest.mark.contract
def test_other_refusals_are_by_name_and_write_nothing() -> None:
    for bad in ("float16", "float64", np.float64, np.dtype("float16"), 16, True, {}):
        with pytest.raises(ValueError, match='slot_dtype must be None, "bfloat16" or "float32"'):
            gpuopt.AdamOptimizer(slot_dtype=bad)
    double, w = Variable(np.ones(3), name="double"), Variable(np.ones(3, np.float32))
    optimizer = gpuopt.AdamOptimizer(slot_dtype="bfloat16")
    with pytest.raises(TypeError, match='slot_dtype="bfloat16": "double" is float64'):
        optimizer.apply_gradients([(np.ones(3, np.float32), w), (np.ones(3), double)])
    assert (w.numpy() == 1).all()
    assert not optimizer.variables()
    half = Variable(np.ones(3, np.float16), name="half")
    rounded = gpuopt.AdamOptimizer(slot_dtype="bfloat16", stochastic_rounding=SEED)
    with pytest.raises(ValueError, match='"half" is float16, and only bfloat16'):
        rounded.apply_gradients([(np.ones(3, np.float16), half)])

    class Own(gpuopt.MomentumOptimizer):
        def _apply_dense(self, grad: Any, var: Variable) -> None:
            super()._apply_dense(grad, var)

    with pytest.raises(NotImplementedError, match="leave slot_dtype out"):
        Own(0.1, 0.9, slot_dtype="bfloat16").apply_gradients([(np.ones(3, np.float32), w)])


@pytest.mark.contract
def test_torch_has_no_slots_of_another_type() -> None:
    pytest.importorskip("torch")
    w = Variable(np.ones(3, np.float32))
    optimizer = gpuopt.AdamOptimizer(slot_dtype="bfloat16")
    optimizer.apply_gradients([(np.ones(3, np.float32), w)])
    with pytest.raises(ValueError, match="has slot_dtype, and torch"):
        gpuopt.optimizer_to_torch(optimizer, [w])


def step_of(optimizer: Any, variable: Variable, seed: int) -> None:
    optimizer.apply_gradients([(normal(seed, variable.shape, variable.dtype), variable)])


@pytest.mark.parametrize("by_saver", [False, True], ids=["state_dict", "Saver"])
@pytest.mark.parametrize("is_made", [False, True], ids=["before", "after its first step"])
@pytest.mark.parametrize("masters", [None, "float32", "remainder"])
@pytest.mark.parametrize("types", [(1, 1), (0, 1), (1, 0)], ids=["as it was", "begins", "ends"])
def test_a_run_goes_on_with_slots_of_either_type(
    types: tuple[int, int], masters: Any, is_made: bool, by_saver: bool, tmp_path: Path
) -> None:
    dtype = np.float32 if masters is None else BFLOAT16
    first, then = (
        gpuopt.AdamOptimizer(0.01, masters=masters, slot_dtype="bfloat16" if each else None)
        for each in types
    )
    w, v = (Variable(normal(i, (300,), dtype), name="w") for i in range(2))
    for seed in range(3):
        step_of(first, w, seed)
    path = gpuopt.Saver({"w": w}, optimizers=[first]).save(str(tmp_path / "model"))
    if is_made:
        step_of(then, v, 9)
    if by_saver:
        gpuopt.Saver({"w": v}, optimizers=[then]).restore(path)
    else:
        then.load_state_dict(first.state_dict({"w": w}), {"w": v})
        v.assign(w.numpy())
        step_of(then, v, 3)
        step_of(first, w, 3)
    for name in "mv":
        mine, theirs = then.get_slot(v, name), first.get_slot(w, name)
        if mine is None:  # not made before the first step
            step_of(then, v, 3)
            step_of(first, w, 3)
            mine = then.get_slot(v, name)
        assert mine.dtype == (BFLOAT16 if types[1] else np.float32)
        a, b = (each.numpy().astype(np.float32) for each in (mine, theirs))
        np.testing.assert_allclose(a, b, rtol=2.0**-7, atol=1e-3)
    if types[0] == types[1]:
        np.testing.assert_array_equal(v.numpy(), w.numpy())


def test_a_state_may_come_before_its_variable() -> None:
    w = Variable(normal(0, (30,)), name="w")
    for dtypes in (("bfloat16", None), (None, "bfloat16")):
        first, then = (gpuopt.AdamOptimizer(0.01, slot_dtype=each) for each in dtypes)
        step_of(first, w, 0)
        then.load_state_dict(first.state_dict({"w": w}), {})
        v = Variable(w.numpy(), name="w")
        name = v.name
        if name != "w":  # the state is for the first of the name
            then.load_state_dict(first.state_dict({name: w}), {})
        step_of(then, v, 1)
        step_of(first, w, 1)
        m, other = then.get_slot(v, "m").numpy(), first.get_slot(w, "m").numpy()
        np.testing.assert_allclose(m.astype("f"), other.astype("f"), rtol=2.0**-6, atol=1e-3)


def test_small_changes_of_squares_are_kept_at_random_alone(xp: Any) -> None:
    ones = np.ones(4000, np.float32)
    found = []
    for seed in (None, SEED):
        w = variable_on(xp, ones)
        optimizer = gpuopt.AdamOptimizer(0.0, slot_dtype="bfloat16", stochastic_rounding=seed)
        for _ in range(20):
            optimizer.apply_gradients([(xp.asarray(ones), w)])
        for _ in range(100):
            optimizer.apply_gradients([(xp.asarray(0 * ones), w)])
        found.append(optimizer.get_slot(w, "v").numpy().astype(np.float64).mean())
    expected = (1 - 0.999**20) * 0.999**100
    assert found[0] / expected > 1.05  # to nearest, it does not shrink
    assert abs(found[1] / expected - 1) < 0.005


def test_rows_come_and_go_with_their_slots(xp: Any) -> None:
    table = variable_on(xp, normal(0, (6, 4)), name="table")
    optimizer = gpuopt.AdamOptimizer(0.1, slot_dtype="bfloat16")
    optimizer.apply_gradients([(xp.asarray(normal(1, (6, 4))), table)])
    before = optimizer.get_slot(table, "m").numpy()
    gpuopt.rows(table).keep([4, 1])
    gpuopt.rows(table).append(xp.asarray(np.ones((1, 4), np.float32)))
    after = optimizer.get_slot(table, "m").numpy()
    assert after.dtype == BFLOAT16
    np.testing.assert_array_equal(after[:2], before[[4, 1]])
    assert (after[2] == 0).all()
    optimizer.apply_gradients([(xp.asarray(normal(2, (3, 4))), table)])


@pytest.mark.parametrize("dtype", [BFLOAT16, np.float16])
@pytest.mark.parametrize("name", ["Adam", "Momentum"])
@pytest.mark.one_in(3)
def test_float32_slots_of_a_16_bit_variable_are_those_of_a_float32_one(
    name: str, dtype: Any, xp: Any
) -> None:
    make = {
        "Adam": lambda **more: gpuopt.AdamOptimizer(0.1, **more),
        "Momentum": lambda **more: gpuopt.MomentumOptimizer(0.1, 0.9, **more),
    }[name]
    start = normal(0, (300, 7), dtype)
    narrow = variable_on(xp, start, name="narrow")
    wide = variable_on(xp, start.astype(np.float32), name="wide")
    mine, theirs = make(slot_dtype="float32"), make()
    for step in range(NUM_STEPS):
        gradient, values = normal(step + 1, (300, 7), dtype), normal(step + 9, (5, 7), dtype)
        for optimizer, variable in ((mine, narrow), (theirs, wide)):
            own = variable.dtype
            rows = IndexedSlices(xp.asarray(values.astype(own)), xp.asarray(ROWS))
            optimizer.apply_gradients([(xp.asarray(gradient.astype(own)), variable)])
            if variable is wide:
                wide.assign(wide.numpy().astype(dtype).astype(np.float32))
            optimizer.apply_gradients([(rows, variable)])
        wide.assign(wide.numpy().astype(dtype).astype(np.float32))
        np.testing.assert_array_equal(narrow.numpy().astype(np.float32), wide.numpy())
    for slot_name in mine.state.slot_names():
        slots = mine.get_slot(narrow, slot_name), theirs.get_slot(wide, slot_name)
        assert slots[0] is not None
        assert slots[1] is not None
        assert slots[0].dtype == np.float32
        np.testing.assert_array_equal(slots[0].numpy(), slots[1].numpy())


def test_float32_slots_go_together_with_no_random_rounding_and_no_float64() -> None:
    with pytest.raises(ValueError, match=r'stochastic_rounding=11.*with slot_dtype="float32"'):
        gpuopt.AdamOptimizer(0.1, slot_dtype="float32", stochastic_rounding=SEED)
    w = Variable(np.ones(3), name="w")
    with pytest.raises(TypeError, match='slot_dtype="float32": "w" is float64'):
        gpuopt.AdamOptimizer(0.1, slot_dtype="float32").apply_gradients([(np.ones(3), w)])
