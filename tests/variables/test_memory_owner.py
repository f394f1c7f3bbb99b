"""Whose memory an array is on, of all kinds of owners: state goes with it, or is refused."""

from __future__ import annotations

import array
import ctypes
import gc
import io
import mmap
import multiprocessing
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy as safetensors

import gpuopt
from gpuopt import Variable
from gpuopt.variables.variable import as_variable

# New arrays, step after step, are what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:in three steps in a row, all arrays were new")


def momentum() -> gpuopt.MomentumOptimizer:
    return gpuopt.MomentumOptimizer(0.1, 0.9)


def float_array(size: int) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * size)()


class Pair(ctypes.Structure):
    _fields_ = [("first", ctypes.c_float * 2), ("second", ctypes.c_float * 4)]


def tensor(**options: Any) -> Any:
    import torch

    return torch.zeros(4, **options)


def kinds(names: Iterable[str]) -> pytest.MarkDecorator:
    marks = {True: [pytest.mark.torch], False: []}
    return pytest.mark.parametrize(
        "kind", [pytest.param(name, marks=marks["torch" in name]) for name in names]
    )


# Each makes the owner of four floats, and of it a view that is made anew in each step.
WATCHED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "slice": (lambda: np.zeros(8, np.float32), lambda owner: owner[2:6]),
    "subclass": (lambda: np.zeros(8, np.float32).view(np.recarray), lambda owner: owner[2:6]),
    "as_strided": (
        lambda: np.zeros(8, np.float32),
        lambda owner: np.lib.stride_tricks.as_strided(owner, (4,), (8,)),
    ),
    "field": (lambda: np.zeros(4, [("w", "f4"), ("b", "f4")]), lambda owner: owner["w"]),
    "memoryview": (
        lambda: np.zeros(4, np.float32),
        lambda owner: np.frombuffer(memoryview(owner), np.float32),
    ),
    "memoryview of a view": (
        lambda: np.zeros(8, np.float32),
        lambda owner: np.asarray(memoryview(owner[1:5])),
    ),
    "ctypes": (lambda: float_array(4), lambda owner: np.frombuffer(owner, np.float32)),
    "ctypes by as_array": (lambda: float_array(4), np.ctypeslib.as_array),
    "ctypes field": (Pair, lambda owner: np.frombuffer(owner.second, np.float32)),
    "array.array": (
        lambda: array.array("f", [0] * 4),
        lambda owner: np.frombuffer(owner, np.float32),
    ),
    "mmap": (lambda: mmap.mmap(-1, 16), lambda owner: np.frombuffer(owner, np.float32)),
    "mmap as buffer": (lambda: mmap.mmap(-1, 16), lambda owner: np.ndarray(4, np.float32, owner)),
    "RawArray": (
        lambda: multiprocessing.RawArray("f", 4),
        lambda owner: np.frombuffer(owner, np.float32),
    ),
    "RawArray by as_array": (lambda: multiprocessing.RawArray("f", 4), np.ctypeslib.as_array),
    "unpickled": (lambda: pickle.loads(pickle.dumps(np.zeros(4000), 4)), lambda owner: owner[:4]),
    "unpickled, protocol 5": (
        lambda: pickle.loads(pickle.dumps(np.zeros(4000), 5)),
        lambda owner: owner[:4],
    ),
    "torch": (tensor, lambda owner: owner.numpy()),
    "torch.detach": (lambda: tensor(requires_grad=True), lambda owner: owner.detach().numpy()),
    "torch.data": (lambda: tensor(requires_grad=True), lambda owner: owner.data.numpy()),
    "torch by asarray": (tensor, np.asarray),
    "torch slice": (tensor, lambda owner: owner.view(2, 2)[1].numpy()),
}
watched = kinds(WATCHED)


@watched
def test_state_is_found_through_views_that_are_made_anew_and_new_memory_has_none(kind: str) -> None:
    make, view = WATCHED[kind]
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.9)
    for _ in range(8):
        owner, average = make(), gpuopt.ExponentialMovingAverage(0.5)
        view(owner)[...] = 0
        for _ in range(3):
            gradient = np.ones(view(owner).shape, view(owner).dtype)
            optimizer.apply_gradients([(gradient, view(owner))])
            average.apply([view(owner)])
        assert np.allclose(view(owner), -1 - 1.9 - 2.71)
        assert len(optimizer.variables()) == 1
        shadow = average.average(view(owner))
        assert shadow is not None
        assert np.allclose(shadow.numpy(), ((-1 * 0.5 + -2.9 * 0.5) + -5.61) / 2)
        del owner


@watched
def test_state_goes_with_the_owner_which_is_not_kept(kind: str) -> None:
    make, view = WATCHED[kind]
    owner = make()
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.9)
    first = view(owner)
    optimizer.apply_gradients([(np.ones_like(first), first)])
    gone = weakref.ref(owner)
    del owner
    assert len(optimizer.variables()) == 1  # the view keeps the memory, and so the state
    del first
    assert gone() is None
    assert optimizer.variables() == []
    cycle: list[Any] = [make()]
    cycle.append(cycle)
    optimizer.apply_gradients([(np.ones_like(view(cycle[0])), view(cycle[0]))])
    del cycle
    gc.collect()
    assert optimizer.variables() == []


def test_state_is_found_in_shared_memory() -> None:
    memory = shared_memory.SharedMemory(create=True, size=16)
    try:
        optimizer = momentum()
        for _ in range(3):
            view = np.ndarray(4, np.float32, memory.buf)
            optimizer.apply_gradients([(np.ones(4, np.float32), view)])
        assert np.allclose(view, -0.1 - 0.19 - 0.271)
        del view
    finally:
        memory.close()
        memory.unlink()


def test_state_is_found_in_a_memory_mapped_file(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "w", np.float32, "w+", shape=(6,))
    optimizer = momentum()
    for _ in range(3):
        optimizer.apply_gradients([(np.ones(4, np.float32), np.asarray(mapped)[2:])])
    assert np.allclose(mapped[2:], -0.1 - 0.19 - 0.271)


def test_arrays_from_safetensors_have_state() -> None:
    weights = safetensors.load(safetensors.save({"w": np.zeros(4, np.float32)}))["w"]
    optimizer = momentum()
    for _ in range(2):
        optimizer.apply_gradients([(np.ones(4, np.float32), weights)])
    assert weights[0] == pytest.approx(-0.1 - 0.19)


def test_memory_that_its_owner_has_left_is_new_memory_to_others() -> None:
    owner = array.array("f", [0] * 64)
    view = np.frombuffer(owner, np.float32)
    where = {**view.__array_interface__}
    of_owner = as_variable(view).identity
    assert as_variable(np.frombuffer(owner, np.float32)).identity is of_owner
    del view
    owner.extend([0] * (1 << 20))  # moves; whatever is allocated next may get the old address
    stranger = np.asarray(type("Lent", (), {"__array_interface__": where})())
    assert as_variable(stranger).identity is not of_owner


# Whose owner is not known


def exported_by_a_capsule() -> Any:
    memory = np.zeros(4, np.float32)
    return lambda: np.from_dlpack(memory)


def kept_by(owner: Any, view: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: view(owner)


UNKNOWN: dict[str, tuple[Callable[[], Callable[[], Any]], str]] = {
    "DLPack": (exported_by_a_capsule, "a capsule, such as DLPack's"),
    "DLPack of torch": (lambda: kept_by(tensor(), np.from_dlpack), "a capsule"),
    "bytearray": (
        lambda: kept_by(bytearray(16), lambda owner: np.frombuffer(owner, np.float32)),
        "type bytearray",
    ),
    "bytearray as buffer": (
        lambda: kept_by(bytearray(16), lambda owner: np.ndarray(4, np.float32, owner)),
        "type bytearray",
    ),
    "a kind of bytearray": (
        lambda: kept_by(
            type("Bytes", (bytearray,), {})(16), lambda owner: np.ndarray(4, np.float32, owner)
        ),
        "type Bytes",
    ),
    "memoryview of a bytearray": (
        lambda: kept_by(memoryview(bytearray(16)), lambda owner: np.frombuffer(owner, np.float32)),
        "type bytearray",
    ),
    "BytesIO": (
        lambda: kept_by(
            io.BytesIO(bytes(16)), lambda owner: np.frombuffer(owner.getbuffer(), np.float32)
        ),
        "type _BytesIOBuffer",
    ),
    "from_address": (
        lambda: kept_by(
            float_array(4),
            lambda owner: np.frombuffer(
                (ctypes.c_float * 4).from_address(ctypes.addressof(owner)), np.float32
            ),
        ),
        "type c_float_Array_4",
    ),
    "from_buffer": (
        lambda: kept_by(
            bytearray(16),
            lambda owner: np.frombuffer((ctypes.c_float * 4).from_buffer(owner), np.float32),
        ),
        "type c_float_Array_4",
    ),
    "pointer": (
        lambda: kept_by(
            float_array(4),
            lambda owner: np.ctypeslib.as_array(
                ctypes.cast(owner, ctypes.POINTER(ctypes.c_float)), (4,)
            ),
        ),
        "type c_float_Array_4",
    ),
    "array interface": (
        lambda: kept_by(
            np.zeros(4, np.float32),
            lambda owner: np.asarray(
                type("Lent", (), {"__array_interface__": owner.__array_interface__})()
            ),
        ),
        "type Lent",
    ),
}
unknown = kinds(UNKNOWN)


@unknown
def test_state_is_refused_where_the_owner_is_not_known(kind: str) -> None:
    make, described = UNKNOWN[kind]
    view = make()
    gradient = np.ones(4, np.float32)
    before = view().copy()
    for make_state in (
        lambda: momentum().apply_gradients([(gradient, view())]),
        lambda: gpuopt.AdamOptimizer(0.1).apply_gradients([(gradient, view())]),
        lambda: gpuopt.ExponentialMovingAverage(0.9).apply([view()]),
        lambda: gpuopt.ExponentialMovingAverage(0.9).track([view()]),
    ):
        with pytest.raises(ValueError, match="Make a variable of the array once") as raised:
            make_state()
        assert described in str(raised.value)
        assert "shape (4,)" in str(raised.value)
        assert np.array_equal(view(), before)


@unknown
def test_without_state_any_owner_will_do_and_a_variable_of_the_array_has_state(kind: str) -> None:
    view = UNKNOWN[kind][0]()
    variable = Variable(view(), copy=False)
    for optimizer, again, expected in (
        (gpuopt.GradientDescentOptimizer(1.0), view, -3),
        (gpuopt.MomentumOptimizer(1.0, 0.9), lambda: variable, -5.61),
    ):
        view()[...] = 0
        for _ in range(3):
            optimizer.apply_gradients([(np.ones(4, np.float32), again())])
        assert np.allclose(view(), expected)


def test_a_refused_restoration_changes_nothing() -> None:
    trained, gradient = np.zeros(4, np.float32), np.ones(4, np.float32)
    optimizer = momentum()
    optimizer.apply_gradients([(gradient, trained)])
    state = optimizer.state_dict({"w": trained})
    other = momentum()
    with pytest.raises(ValueError, match="Make a variable of the array once"):
        other.load_state_dict(state, {"w": exported_by_a_capsule()()})
    assert other.variables() == []
    fresh = Variable(np.zeros(4, np.float32), name="w")
    other.apply_gradients([(gradient, fresh)])
    assert np.array_equal(fresh.numpy(), np.float32(-0.1) * gradient)  # nothing waited for "w"


def test_a_bytearray_that_others_hold_is_told_from_one_of_an_array_alone() -> None:
    alone = np.frombuffer(bytearray(16), np.float32)
    assert as_variable(alone[1:]).identity.unknown_owner is None
    for hold in (lambda a: a.base, lambda a: a.base.obj, lambda a: memoryview(a.base)):
        array_of_others = np.frombuffer(bytearray(16), np.float32)
        held = hold(array_of_others)
        assert as_variable(array_of_others).identity.unknown_owner is not None
        del held


def test_torch_is_not_imported_for_arrays() -> None:
    code = """
import sys, numpy as np, gpuopt
gpuopt.MomentumOptimizer(1.0, 0.9).apply_gradients([(np.ones(2), np.zeros(2))])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
