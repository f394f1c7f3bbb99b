"""Slots in 8 bits in states, in files, in several workers; and damaged ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import (
    IndexedSlices,
    MirroredStrategy,
    Saver,
    Variable,
)
from gpuopt.codecs import Byte
from gpuopt.distributed import PerReplica
from gpuopt.rules.slot_codes import Coding
from gpuopt.state.slot_codecs import decoded_array

Make = Callable[..., Any]
MAKE: dict[str, Make] = {
    "momentum": lambda **more: gpuopt.MomentumOptimizer(0.05, 0.9, **more),
    "adam": lambda **more: gpuopt.AdamOptimizer(0.01, **more),
    "lion": lambda **more: gpuopt.LionOptimizer(0.01, **more),
}
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "root": {"slot_bits": 8},
    "bitsandbytes": {"slot_bits": 8, "slot_form": "bitsandbytes"},
}
SHAPE = (6, 300)

on_devices = pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("gpu:0", marks=pytest.mark.gpu)],
)


def normal(seed: int, shape: tuple[int, ...] = SHAPE) -> Any:
    return np.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)


def trained(make: Make, form: str, device: str = "cpu", sparse: bool = False) -> tuple[Any, Any]:
    variable = Variable(normal(0), name="w", device=device)
    optimizer = make(**FORMS[form])
    for step in range(3):
        gradient: Any = normal(step + 1)
        if sparse:
            gradient = IndexedSlices(gradient[:4], np.array([5, 0, 2, 5]), SHAPE)
        optimizer.apply_gradients([(gradient, variable)])
    return optimizer, variable


def numbers_of(optimizer: Any, variable: Any) -> dict[str, Any]:
    names = optimizer.get_slot_names()
    return {name: optimizer.get_slot(variable, name).numpy() for name in names}


def coding_of(slot_name: str, form: str) -> Coding | None:
    of_squares = {"float32": None, "root": Coding.ROOTS, "bitsandbytes": Coding.SQUARES}[form]
    return of_squares if slot_name == "v" or form == "float32" else Coding.SIGNED


def rounded(values: Any, slot_name: str, form: str) -> Any:
    coding = coding_of(slot_name, form)
    return values if coding is None else Byte(coding).numbers(Byte(coding).new_arrays(values))


@on_devices
@pytest.mark.parametrize("to", FORMS)
@pytest.mark.parametrize("source", FORMS)
def test_a_state_is_restored_in_every_form(
    tmp_path: Path, device: str, source: str, to: str
) -> None:
    optimizer, variable = trained(MAKE["adam"], source, device)
    given, weights = numbers_of(optimizer, variable), variable.numpy()
    name, state = optimizer.get_name(), optimizer.state_dict({"w": variable})
    path = Saver().save(tmp_path / "model")
    del optimizer, variable
    again = Variable(np.zeros(SHAPE, np.float32), name="w", device=device)
    for in_files in (False, True):
        other = MAKE["adam"](**FORMS[to], name=name)
        if in_files:
            Saver().restore(path)
            np.testing.assert_array_equal(again.numpy(), weights)
        else:
            other.load_state_dict(state, {"w": again})
        for slot_name, values in given.items():
            is_kept = coding_of(slot_name, source) == coding_of(slot_name, to)
            expected = values if is_kept else rounded(values, slot_name, to)
            np.testing.assert_array_equal(other.get_slot(again, slot_name).numpy(), expected)
        other.apply_gradients([(normal(5), again)])
        del other


@pytest.mark.parametrize("more", [{}, {"slot_dtype": "bfloat16"}], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_slots_beside_master_copies_are_restored_in_8_bits(
    dtype: str, more: dict[str, Any]
) -> None:
    variable, again = (Variable(normal(0), name=name, dtype=dtype) for name in ("w", "again"))
    optimizer = MAKE["adam"](masters="float32", **more)
    optimizer.apply_gradients([(normal(1).astype(variable.dtype), variable)])
    other = MAKE["adam"](slot_bits=8)
    other.load_state_dict(optimizer.state_dict({"w": variable}), {"w": again})
    for slot_name, values in numbers_of(other, again).items():
        given = optimizer.get_slot(variable, slot_name).numpy()
        np.testing.assert_array_equal(values, rounded(given, slot_name, "root"))
    other.apply_gradients([(normal(2).astype(variable.dtype), again)])


@pytest.mark.parametrize("to", [{"masters": "float32"}, {"slot_dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize(
    "source",
    [{"slot_bits": 8}, {"masters": "float32"}, {"slot_bits": 8, "masters": "float32"}],
    ids=str,
)
def test_slots_of_float16_variables_pass_between_wider_forms_without_being_float16(
    source: dict[str, Any], to: dict[str, Any]
) -> None:
    variable, again = (Variable(normal(0), name=name, dtype="float16") for name in ("w", "again"))
    optimizer = MAKE["adam"](**source)
    # Too large for float16 in `v`, and in `m` of more digits than it has.
    optimizer.apply_gradients([(12_000 * normal(1).astype(np.float16), variable)])
    other = MAKE["adam"](**to)
    other.load_state_dict(optimizer.state_dict({"w": variable}), {"w": again})
    for slot_name in ("m", "v"):
        given, taken = optimizer.get_slot(variable, slot_name), other.get_slot(again, slot_name)
        np.testing.assert_array_equal(taken.numpy(), given.numpy().astype(taken.dtype))


@pytest.mark.parametrize("name", MAKE)
def test_a_restored_run_goes_on_bit_by_bit(tmp_path: Path, name: str) -> None:
    for sparse in (False, True):
        optimizer, variable = trained(MAKE[name], "root", sparse=sparse)
        state, weights = optimizer.state_dict({"w": variable}), variable.numpy()
        scales = optimizer.get_slot(variable, optimizer.get_slot_names()[0]).scales
        assert (scales.ndim == 2) == sparse
        other, again = MAKE[name](slot_bits=8), Variable(weights, name="again")
        other.load_state_dict(state, {"w": again})
        for step in range(2):
            for each, of in ((optimizer, variable), (other, again)):
                each.apply_gradients([(normal(9 + step), of)])
        np.testing.assert_array_equal(again.numpy(), variable.numpy())
        for one, two in zip(
            numbers_of(optimizer, variable).values(), numbers_of(other, again).values(), strict=True
        ):
            np.testing.assert_array_equal(one, two)


def damaged() -> dict[str, tuple[str, Callable[[dict[str, Any]], None]]]:
    def slot(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
        def damage(state: dict[str, Any]) -> None:
            state["slots"][name]["w"] = change(state["slots"][name]["w"])

        return damage

    def said(**changed: Any) -> Callable[[dict[str, Any]], None]:
        return lambda state: state["hyperparameters"].update(changed)

    return {
        "scales of NaN": ("m_absmax", slot("m_absmax", lambda a: a * np.float32(np.nan))),
        "scales below 0": ("v_absmax", slot("v_absmax", lambda a: -a - 1)),
        "infinite scales": ("m_absmax", slot("m_absmax", lambda a: a / np.float32(0))),
        "too few scales": ("m_absmax", slot("m_absmax", lambda a: a[1:])),
        "scales of float64": ("v_absmax", slot("v_absmax", lambda a: a.astype(np.float64))),
        "codes of int8": ('"m"', slot("m", lambda a: a.view(np.int8))),
        "codes of another shape": ('"v"', slot("v", lambda a: a[:2])),
        "no scales": ("m", lambda state: state["slots"].pop("m_absmax")),
        "blocks of 2048": ("blocks of 2048", said(slot_block=2048)),
        "4 bits": ("4 bits", said(slot_bits=4)),
        "another map": ("linear", said(slot_map="linear")),
    }


@pytest.mark.parametrize("what", damaged())
def test_a_damaged_state_is_refused_and_changes_nothing(what: str) -> None:
    message, damage = damaged()[what]
    optimizer, variable = trained(MAKE["adam"], "root")
    with np.errstate(all="ignore"):
        state: Any = optimizer.state_dict({"w": variable})
        damage(state)
    before = numbers_of(optimizer, variable)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state, {"w": variable})
    for name, value in numbers_of(optimizer, variable).items():
        np.testing.assert_array_equal(value, before[name])
    for form in ("float32", "bitsandbytes"):
        other = MAKE["adam"](**FORMS[form])
        if "scales of NaN" not in what and "infinite" not in what and "below" not in what:
            with pytest.raises(ValueError):  # noqa: PT011  (each has a message of its own)
                other.load_state_dict(state, {"w": Variable(normal(0), name="other")})


def test_blocks_of_which_some_end_at_rows_are_refused() -> None:
    optimizer, variable = trained(MAKE["adam"], "root")
    with_rows, table = trained(MAKE["adam"], "root", sparse=True)
    state: Any = optimizer.state_dict({"w": variable})
    rows: Any = with_rows.state_dict({"w": table})
    state["slots"]["v_absmax"]["w"] = rows["slots"]["v_absmax"]["w"]
    weights = variable.numpy()
    optimizer.load_state_dict(state, {"w": variable})
    with pytest.raises(ValueError, match="have blocks that end at rows and others that do not"):
        optimizer.apply_gradients([(normal(1), variable)])
    np.testing.assert_array_equal(variable.numpy(), weights)


def test_copies_of_a_strategy_train_as_one() -> None:
    strategy = MirroredStrategy(["cpu", "cpu"], 20.0)
    mirrored = strategy.variable(normal(0), name="mirrored")
    optimizer, alone = MAKE["adam"](slot_bits=8), MAKE["adam"](slot_bits=8)
    plain = Variable(normal(0), name="plain")
    for turn in range(3):
        halves = [normal(10 * turn + rank) for rank in range(2)]
        strategy.run(
            lambda gradient: optimizer.apply_gradients([(gradient, mirrored.local)]),
            (PerReplica(halves),),
        )
        alone.apply_gradients([(halves[0] + halves[1], plain)])
    for copy in mirrored.replicas:
        np.testing.assert_array_equal(copy.numpy(), plain.numpy())


def test_an_unknown_coding_of_a_saved_slot_is_refused_with_those_that_are_known() -> None:
    codes, scales = np.zeros(3, np.uint8), np.zeros(1, np.float32)
    with pytest.raises(ValueError, match=r'^slot "m" of "w" has the coding \'x\'; known are \['):
        decoded_array(codes, scales, "x", 'slot "m" of "w"')
    with pytest.raises(ValueError, match=r'^slot "m" of "w" must have codes of uint8 and scales'):
        decoded_array(codes, np.zeros(2, np.float32), "signed", 'slot "m" of "w"')
