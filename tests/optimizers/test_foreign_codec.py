"""A codec is one file and a line in a table: here is one that gpuopt does not have."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from every_optimizer import FIRST_OF_EACH_SHAPE, make
from float8 import register

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.backends import backend_for
from gpuopt.device import Device
from gpuopt.optimizers.base import RuleOptimizer

pytestmark = pytest.mark.value

Array = np.ndarray[Any, Any]

SHAPE = (5, 600)
MADE = {
    "LAMB": lambda **more: gpuopt.LAMBOptimizer(0.1, **more),
    "LARS": lambda **more: gpuopt.LARSOptimizer(0.1, **more),
    **{
        each.identifier: lambda each=each, **more: make(each.name, each.arguments, **more)
        for each in FIRST_OF_EACH_SHAPE
    },
}
WITH_SLOTS = [name for name in MADE if MADE[name]().rule.slots]


def as_stored(slot: Array, per_block: int, *, by_rows: bool) -> Array:
    """Returns the numbers that are read again: block after block, from the definition."""
    rows = slot.reshape(len(slot), -1) if by_rows else slot.reshape(1, -1)
    read = np.zeros_like(rows)
    for row, numbers in zip(rows, read, strict=True):
        for first in range(0, len(row), per_block):
            block = row[first : first + per_block]
            scale = np.abs(block).max() / np.float32(448)
            nearest = (block / (scale or np.float32(1))).astype(ml_dtypes.float8_e4m3fn)
            numbers[first : first + per_block] = nearest.astype(np.float32) * scale
    return read.reshape(slot.shape)


def slots_of(optimizer: RuleOptimizer, variable: Variable) -> dict[str, Array]:
    slots: dict[str, Any] = {
        name: optimizer.get_slot(variable, name) for name in optimizer.rule.slots
    }
    return {name: slot.numpy() for name, slot in slots.items()}


@pytest.mark.parametrize(
    ("name", "per_block"), [(name, [256, 32, 128][at % 3]) for at, name in enumerate(WITH_SLOTS)]
)
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.one_in(6)
def test_a_step_is_that_of_float32_slots_which_the_codec_stores_after_it(
    name: str,
    per_block: int,
    is_sparse: bool,
    every_place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = register(monkeypatch, per_block)
    random = np.random.default_rng(0)
    start = np.asarray(random.normal(size=SHAPE), np.float32)
    ours, theirs = MADE[name](**options), MADE[name]()
    stored, plain = (Variable(start, name=each, device=every_place) for each in ("ours", "theirs"))
    xp = np if every_place == "cpu" else backend_for(Device.parse(every_place)).xp
    rows = np.array([3, 0]) if is_sparse else np.arange(5)
    updated = np.arange(5) if ours.rule_of_other_rows is not None or ours.rule.sums else rows
    for step in range(4):
        if step > 0:  # slots are made by the first
            plain.assign(stored.numpy())
            for slot_name, slot in slots_of(ours, stored).items():
                theirs.get_slot(plain, slot_name).assign(slot)
        gradient: Any = xp.asarray(np.asarray(random.normal(size=(len(rows), 600)), np.float32))
        if is_sparse:
            gradient = IndexedSlices(gradient, xp.asarray(rows), SHAPE)
        for optimizer, variable in ((ours, stored), (theirs, plain)):
            optimizer.apply_gradients([(gradient, variable)])
        if step == 0:
            continue
        # Only sums are added up in another order, by other chunks.
        rtol = 1e-5 if ours.rule.sums else 0
        np.testing.assert_allclose(stored.numpy(), plain.numpy(), rtol=rtol, atol=rtol)
        for slot_name, slot in slots_of(ours, stored).items():
            float32 = theirs.get_slot(plain, slot_name).numpy()
            expected = as_stored(float32, per_block, by_rows=is_sparse)
            error = np.abs(slot - expected)[updated]
            # Numbers between two codes may get either, then.
            differs = error > rtol * np.abs(expected[updated])
            assert np.mean(differs) <= (0.01 if ours.rule.sums else 0), slot_name
            assert error.max() <= np.abs(expected).max() / 14, slot_name


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_a_slot_starts_with_what_the_codec_stores_of_its_first_number(
    is_sparse: bool, every_place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = gpuopt.AdagradOptimizer(0.5, 0.25, **register(monkeypatch))
    variable = Variable(np.zeros(SHAPE, np.float32), name="w", device=every_place)
    xp = np if every_place == "cpu" else backend_for(Device.parse(every_place)).xp
    gradient: Any = xp.zeros(SHAPE, np.float32)
    if is_sparse:
        gradient = IndexedSlices(gradient[:1], xp.asarray([2]), SHAPE)
    optimizer.apply_gradients([(gradient, variable)])
    expected = as_stored(np.full((1, 1), 0.25, np.float32), 256, by_rows=False)
    np.testing.assert_array_equal(slots_of(optimizer, variable)["accumulator"], expected[0, 0])
    gpuopt.rows(variable).append(xp.ones((1, 600), np.float32))
    np.testing.assert_array_equal(slots_of(optimizer, variable)["accumulator"][5], expected[0, 0])


@pytest.mark.parametrize("per_block", [256, 64])
def test_a_saved_state_is_decoded_and_encoded_by_the_codec(
    per_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = register(monkeypatch, per_block)
    gradient = np.asarray(np.random.default_rng(1).normal(size=SHAPE), np.float32)
    stored = as_stored(gradient, per_block, by_rows=False)
    variable = Variable(np.zeros(SHAPE, np.float32), name="w")
    coded = gpuopt.MomentumOptimizer(0.5, 0.75, **options)
    coded.apply_gradients([(gradient, variable)])
    state = coded.state_dict({"w": variable})
    said = state["hyperparameters"]
    assert [said["slot_block"], said["slot_map"]] == [per_block, "float8_e4m3fn"]
    assert said["slot_codings"] == {"momentum": "float8_e4m3fn"}
    plain = gpuopt.MomentumOptimizer(0.5, 0.75)
    plain.load_state_dict(state, {"w": variable})
    slot: Any = plain.get_slot(variable, "momentum")
    np.testing.assert_array_equal(slot.numpy(), stored)
    slot.assign(gradient)
    again = gpuopt.MomentumOptimizer(0.5, 0.75, **options)
    again.load_state_dict(plain.state_dict({"w": variable}), {"w": variable})
    slot = again.get_slot(variable, "momentum")
    np.testing.assert_array_equal(slot.numpy(), stored)


@pytest.mark.parametrize("per_block", [4, 48, 2048])
@pytest.mark.contract
def test_blocks_that_no_warp_shares_are_refused_when_the_optimizer_is_made(
    per_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = register(monkeypatch, per_block)
    with pytest.raises(ValueError, match=f"of {per_block} and {per_block} codes; both must be"):
        gpuopt.MomentumOptimizer(0.5, 0.75, **options)
