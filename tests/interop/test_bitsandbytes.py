"""The form "bitsandbytes" is that of bitsandbytes, and its files become ours and the other way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import Variable
from gpuopt.codecs import Byte
from gpuopt.rules.slot_codes import CodedValues, Coding

pytestmark = pytest.mark.value

SIZES = [(5000,), (20, 300), (4096,)]
KINDS = ["AdamW", "Lion", "SGD"]
THEIRS: dict[str, Callable[[Any, Any], Any]] = {
    "AdamW": lambda bnb, p: bnb.optim.AdamW8bit(p, 1e-2, weight_decay=0.1),
    "Lion": lambda bnb, p: bnb.optim.Lion8bit(p, 1e-2, weight_decay=0.1),
    "SGD": lambda bnb, p: bnb.optim.SGD8bit(p, 1e-2, momentum=0.9),
}
CODINGS = [Coding.SIGNED, Coding.SQUARES]
# On a CPU, theirs find a code by one of 65,536 places: it is not always the nearest.
THEIR_PLACES = 2.0**-15
SLOTS = {"AdamW": ["m", "v"], "Lion": ["m"], "SGD": ["momentum"]}

with_bitsandbytes = pytest.mark.peers


def normal(seed: int, shape: tuple[int, ...]) -> Any:
    return np.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)


class Theirs:
    """A run of bitsandbytes, on the CPU."""

    def __init__(self, kind: str, values: list[Any]) -> None:
        import bitsandbytes as bnb
        import torch

        self.parameters = [torch.nn.Parameter(torch.from_numpy(each.copy())) for each in values]
        self.optimizer = THEIRS[kind](bnb, self.parameters)

    def step(self, gradients: list[Any]) -> None:
        import torch

        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = torch.from_numpy(gradient.copy())
        self.optimizer.step()

    @property
    def values(self) -> list[Any]:
        return [each.detach().numpy().copy() for each in self.parameters]

    def stored(self, number: int, slot: int) -> CodedValues:
        state = self.optimizer.state[self.parameters[number]]
        parts = state[f"state{slot + 1}"], state[f"absmax{slot + 1}"]
        return CodedValues(*(each.numpy().copy() for each in parts))


def gradients_at(step: int) -> list[Any]:
    return [normal(10 * step + i, shape) * np.float32(0.1) for i, shape in enumerate(SIZES)]


@with_bitsandbytes
@pytest.mark.parametrize("signed", [True, False])
def test_our_map_is_the_published_one(signed: bool) -> None:
    import bitsandbytes.functional as functional

    expected = functional.create_dynamic_map(signed=signed).numpy()
    coding = Coding.SIGNED if signed else Coding.SQUARES
    np.testing.assert_array_equal(coding.values, expected)


@with_bitsandbytes
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_from_the_same_codes_is_theirs(kind: str) -> None:
    starts = [normal(99 + i, shape) for i, shape in enumerate(SIZES)]
    theirs = Theirs(kind, starts)
    for step in range(1, 6):
        theirs.step(gradients_at(step))
        variables = [Variable(each) for each in theirs.values]
        ours = gpuopt.optimizer_from_bitsandbytes(kind, theirs.optimizer.state_dict(), variables)
        given = gradients_at(step + 1)
        ours.apply_gradients(list(zip(given, variables, strict=True)))
        following = Theirs(kind, [each.copy() for each in theirs.values])
        following.optimizer.load_state_dict(theirs.optimizer.state_dict())
        following.step(given)
        for number, (variable, expected) in enumerate(
            zip(variables, following.values, strict=True)
        ):
            bound = 8 * float(np.finfo(np.float32).eps) * np.abs(expected).max()
            np.testing.assert_allclose(variable.numpy(), expected, rtol=0, atol=bound)
            for place, slot_name in enumerate(SLOTS[kind]):
                slot, stored = ours.get_slot(variable, slot_name), following.stored(number, place)
                # `1 - beta2` is taken of float32 here: 4.7e-5 from that of float64.
                np.testing.assert_allclose(slot.scales.numpy(), stored.scales, rtol=5e-5)
                values = CODINGS[place].values
                # The same number of the map, or a neighbour where theirs is not the nearest.
                gaps = np.diff(values, prepend=values[0], append=values[-1])
                codes = slot.codes.numpy()
                apart = np.abs(values[codes] - values[stored.codes])
                assert (apart <= np.maximum(gaps[:-1], gaps[1:])[codes] + THEIR_PLACES).all()
                assert (codes != stored.codes).mean() < 0.05


@with_bitsandbytes
@pytest.mark.parametrize("coding", CODINGS)
def test_a_code_of_theirs_is_never_nearer_and_hardly_farther(coding: Coding) -> None:
    import torch

    numbers = normal(5, (1 << 16,))
    if coding is Coding.SQUARES:
        numbers = np.square(numbers)
    qmap = torch.from_numpy(np.array(coding.values))
    quantize = torch.ops.bitsandbytes.quantize_blockwise
    theirs, scales = (each.numpy() for each in quantize(torch.from_numpy(numbers), qmap, 256))
    ours = Byte(coding).new_arrays(numbers)
    np.testing.assert_array_equal(ours.scales, scales)
    stored = numbers.reshape(-1, 256) / scales[:, np.newaxis]
    near, far = (
        np.abs(stored - coding.values[codes].reshape(-1, 256)) for codes in (ours.codes, theirs)
    )
    eps = float(np.finfo(np.float32).eps)
    assert (near <= far + eps).all()
    assert (far <= near + THEIR_PLACES).all()
    assert (near < far - eps).any()


@with_bitsandbytes
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_from_theirs_to_ours_and_back_code_by_code(kind: str) -> None:
    theirs = Theirs(kind, [normal(99 + i, shape) for i, shape in enumerate(SIZES)])
    for step in range(3):
        theirs.step(gradients_at(step))
    variables = [Variable(each) for each in theirs.values]
    ours = gpuopt.optimizer_from_bitsandbytes(kind, theirs.optimizer.state_dict(), variables)
    again = Theirs(kind, theirs.values)
    again.optimizer.load_state_dict(gpuopt.optimizer_to_bitsandbytes(ours, variables))
    for number in range(len(SIZES)):
        for place in range(len(SLOTS[kind])):
            for one, other in zip(
                theirs.stored(number, place), again.stored(number, place), strict=True
            ):
                np.testing.assert_array_equal(one, other)
    for each in (theirs, again):
        each.step(gradients_at(7))
    for one, other in zip(theirs.values, again.values, strict=True):
        np.testing.assert_array_equal(one, other)


@with_bitsandbytes
def test_states_in_float32_of_small_parameters_are_rounded() -> None:
    theirs = Theirs("AdamW", [normal(1, (100,))])
    theirs.step([normal(2, (100,))])
    variable = Variable(theirs.values[0])
    ours = gpuopt.optimizer_from_bitsandbytes("AdamW", theirs.optimizer.state_dict(), [variable])
    state = theirs.optimizer.state[theirs.parameters[0]]
    for slot_name, name, coding in (
        ("m", "state1", Coding.SIGNED),
        ("v", "state2", Coding.SQUARES),
    ):
        expected = Byte(coding).numbers(Byte(coding).new_arrays(state[name].numpy()))
        np.testing.assert_array_equal(ours.get_slot(variable, slot_name).numpy(), expected)


def forged(kind: str, shape: tuple[int, ...], **changed: Any) -> dict[str, Any]:
    """A state as bitsandbytes writes it, of arrays."""
    codings = CODINGS[: len(SLOTS[kind])]
    state: dict[str, Any] = {"step": 3}
    for number, coding in enumerate(codings, 1):
        numbers = normal(number, shape) if coding is Coding.SIGNED else normal(number, shape) ** 2
        codes, scales = Byte(coding).new_arrays(numbers)
        state |= {
            f"state{number}": codes,
            f"absmax{number}": scales,
            f"qmap{number}": coding.values,
        }
    settings = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    settings |= {name: value for name, value in changed.items() if name in settings}
    state |= {name: value for name, value in changed.items() if name not in settings}
    return {"state": {0: state}, "param_groups": [{"params": [0], **settings}]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_read_as_it_is(kind: str) -> None:
    variable = Variable(normal(0, (3, 300)))
    given = forged(kind, (3, 300))
    ours = gpuopt.optimizer_from_bitsandbytes(kind, given, [variable])
    for number, slot_name in enumerate(SLOTS[kind], 1):
        slot = ours.get_slot(variable, slot_name)
        np.testing.assert_array_equal(slot.codes.numpy(), given["state"][0][f"state{number}"])
        np.testing.assert_array_equal(slot.scales.numpy(), given["state"][0][f"absmax{number}"])
    wrapped = {"step": 3, "__bnb_optimizer_quant_state__": given["state"][0]}
    other = Variable(normal(0, (3, 300)))
    again = gpuopt.optimizer_from_bitsandbytes(kind, {**given, "state": {0: wrapped}}, [other])
    states = ours.state_dict({"w": variable}), again.state_dict({"w": other})
    for name, of_variable in states[0]["slots"].items():
        np.testing.assert_array_equal(of_variable["w"], states[1]["slots"][name]["w"])


def test_groups_become_groups() -> None:
    variables = [Variable(normal(i, (300,)), name=f"of_bits_{i}") for i in range(2)]
    given = forged("Lion", (300,))
    given["state"][1] = dict(given["state"][0])
    given["param_groups"].append({**given["param_groups"][0], "params": [1], "lr": 0.5})
    ours = gpuopt.optimizer_from_bitsandbytes("Lion", given, variables)
    before = [each.numpy() for each in variables]
    ours.apply_gradients([(np.zeros(300, np.float32), each) for each in variables])
    moved = [np.abs(a.numpy() - b).max() for a, b in zip(variables, before, strict=True)]
    np.testing.assert_allclose(moved, [0.1, 0.5], rtol=1e-5)


WRONG: dict[str, tuple[str, str, dict[str, Any]]] = {
    "no state": ("AdamW", "state1 of .* is missing", {"state1": None}),
    "another shape": ("AdamW", "must be uint8 of shape", {"state1": np.zeros(5, np.uint8)}),
    "another type": ("AdamW", "must be uint8", {"state2": np.zeros((3, 300), np.int8)}),
    "blocks of 2048": ("AdamW", "one for each 256", {"absmax1": np.ones(1, np.float32)}),
    "no scales": ("Lion", "one for each 256", {"absmax1": None}),
    "scales of NaN": ("AdamW", "no largest magnitude", {"absmax2": np.full(4, np.nan, np.float32)}),
    "scales below 0": ("AdamW", "no largest magnitude", {"absmax1": np.full(4, -1, np.float32)}),
    "another map": ("Lion", "not bitsandbytes' dynamic map", {"qmap1": np.linspace(-1, 1, 256)}),
    "no map": ("Lion", "not bitsandbytes' dynamic map", {"qmap1": None}),
    "float32 of NaN": (
        "AdamW",
        "not finite, or squares below 0",
        {"state1": np.full((3, 300), np.nan, np.float32)},
    ),
    "squares below 0": (
        "AdamW",
        "not finite, or squares below 0",
        {"state2": np.full((3, 300), -1, np.float32)},
    ),
    "beta": ("AdamW", "cannot have", {"betas": (0.9, 1.0)}),
    "three betas": ("AdamW", "cannot have", {"betas": (0.9, 0.9, 0.9)}),
    "rate": ("Lion", "cannot have", {"lr": float("nan")}),
    "decay": ("SGD", "no such term", {"weight_decay": 0.1}),
    "no step": ("AdamW", "at step None", {"step": None}),
    "half a step": ("AdamW", "at step 2.5", {"step": 2.5}),
    "a step below 0": ("Lion", "at step -1", {"step": -1}),
    "kind": ("Adagrad", "kind must be one of", {}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_state_that_cannot_be_is_refused_before_anything_is_written(what: str) -> None:
    kind, message, changed = WRONG[what]
    variable = Variable(normal(0, (3, 300)))
    before = variable.numpy()
    given = forged(kind if kind in SLOTS else "AdamW", (3, 300), **changed)
    with pytest.raises(ValueError, match=message):
        gpuopt.optimizer_from_bitsandbytes(kind, given, [variable])  # type: ignore[arg-type]
    np.testing.assert_array_equal(variable.numpy(), before)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: gpuopt.TorchAdamWOptimizer(slot_bits=8),
        lambda: gpuopt.TorchAdamWOptimizer(),
        lambda: gpuopt.AdamOptimizer(slot_bits=8, slot_form="bitsandbytes"),
    ],
)
@pytest.mark.torch
def test_optimizers_without_counterpart_are_refused(optimizer: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="has no counterpart in bitsandbytes"):
        gpuopt.optimizer_to_bitsandbytes(optimizer(), [Variable(np.ones(5, np.float32))])
