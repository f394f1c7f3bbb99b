"""Random raw arrays of all kinds of owners, against a model that keeps its own books.

Owners come and go, and are of one size, so that new ones get the addresses of old ones. Views are
made anew, or kept beyond their owner's name. The model knows which memory is whose, and computes in
float64.
"""

from __future__ import annotations

import array
import ctypes
import gc
import itertools
import mmap
import random
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import gpuopt

pytestmark = pytest.mark.value

SIZE = 12
# Where a view begins, its length, and its step.
PARTS = [(0, 12, 1), (0, 4, 1), (4, 4, 1), (8, 4, 1), (0, 4, 3), (1, 4, 3), (11, 12, -1)]


def tensor() -> Any:
    import torch

    return torch.zeros(SIZE, requires_grad=True)


OWNERS: dict[str, tuple[Callable[[], Any], Callable[[Any], np.ndarray]]] = {
    "numpy": (lambda: np.zeros(SIZE, np.float32), lambda owner: owner),
    "subclass": (lambda: np.zeros(SIZE, np.float32).view(np.recarray), lambda owner: owner),
    "memoryview": (
        lambda: np.zeros(SIZE, np.float32),
        lambda owner: np.frombuffer(memoryview(owner), np.float32),
    ),
    "ctypes": (lambda: (ctypes.c_float * SIZE)(), lambda owner: np.frombuffer(owner, np.float32)),
    "mmap": (
        lambda: mmap.mmap(-1, 4 * SIZE),
        lambda owner: np.frombuffer(owner, np.float32),
    ),
    "array": (
        lambda: array.array("f", [0] * SIZE),
        lambda owner: np.frombuffer(owner, np.float32),
    ),
    "bytearray": (lambda: bytearray(4 * SIZE), lambda owner: np.frombuffer(owner, np.float32)),
    "dlpack": (lambda: np.zeros(SIZE, np.float32), np.from_dlpack),
}
if find_spec("torch") is not None:
    OWNERS["torch"] = (tensor, lambda owner: owner.detach().numpy())
UNKNOWN = {"bytearray", "dlpack"}


class Memory:
    """One owner's memory, what it should hold, and its state by (optimizer, part)."""

    numbers = itertools.count()

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.number = next(self.numbers)
        make, self.whole = OWNERS[kind]
        self.owner: Any = make()
        self.kept: dict[int, np.ndarray] = {}
        self.expected = np.zeros(SIZE)
        self.state: dict[tuple[int, int], np.ndarray] = {}

    def view(self, part: int, choose: random.Random) -> np.ndarray:
        """A view, made anew or kept from before."""
        if part in self.kept and choose.random() < 0.5:
            return self.kept[part]
        start, length, step = PARTS[part]
        view = self.whole(self.owner)[start:][::step] if step > 0 else self.whole(self.owner)[::-1]
        view = view[:length]
        if choose.random() < 0.2:
            self.kept[part] = view
        return view

    def places(self, part: int) -> np.ndarray:
        start, length, step = PARTS[part]
        return start + step * np.arange(length)


def update(
    memory: Memory, part: int, number: int, momentum: float | None, gradient: np.ndarray
) -> None:
    places = memory.places(part)
    if momentum is not None:
        slot = memory.state.setdefault((number, part), np.zeros(len(places)))
        slot *= momentum
        slot += gradient
        gradient = slot
    memory.expected[places] -= 0.5 * gradient


MOMENTA = [None, 0.9, 0.5]


def step(
    optimizers: list[gpuopt.Optimizer],
    memories: list[Memory],
    choose: random.Random,
    rng: np.random.Generator,
) -> str:
    """Makes or drops memory, or updates views of some; returns what was done."""
    action = choose.random()
    if action < 0.15 or not memories:
        memories.append(Memory(choose.choice(list(OWNERS))))
        return "made"
    if action < 0.27 and len(memories) > 2:
        cycle: list[Any] = [memories.pop(choose.randrange(len(memories)))]
        if choose.random() < 0.5:  # dies at a collection some time later
            cycle.append(cycle)
        return "dropped"
    number = choose.randrange(len(optimizers))
    chosen = choose.sample(memories, min(len(memories), choose.randrange(1, 4)))
    targets = [(memory, choose.randrange(len(PARTS))) for memory in chosen]
    gradients = [rng.integers(-3, 4, PARTS[part][1]).astype(np.float32) for _, part in targets]
    pairs = [
        (gradient, memory.view(part, choose))
        for gradient, (memory, part) in zip(gradients, targets, strict=True)
    ]
    done = "updated"
    position = next((i for i, (m, _) in enumerate(targets) if m.kind in UNKNOWN), None)
    if MOMENTA[number] is not None and position is not None:
        done = "refused"
        with pytest.raises(ValueError, match="Make a variable of the array once"):
            optimizers[number].apply_gradients(pairs)
        for memory, part in targets[:position]:  # their slots were made, and are zero
            memory.state.setdefault((number, part), np.zeros(PARTS[part][1]))
    else:
        optimizers[number].apply_gradients(pairs)
        for gradient, (memory, part) in zip(gradients, targets, strict=True):
            update(memory, part, number, MOMENTA[number], gradient)
    for memory in chosen:
        np.testing.assert_allclose(
            memory.whole(memory.owner), memory.expected, rtol=1e-4, atol=1e-4
        )
    return done


# New arrays of one size, in step after step, are a mistake elsewhere.
@pytest.mark.filterwarnings("ignore:in three steps in a row")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.one_in(3, seed=type)
def test_random_views_keep_their_state_and_nobody_elses(seed: int) -> None:
    choose, rng = random.Random(seed), np.random.default_rng(seed)
    optimizers: list[gpuopt.Optimizer] = [
        gpuopt.GradientDescentOptimizer(0.5)
        if momentum is None
        else gpuopt.MomentumOptimizer(0.5, momentum)
        for momentum in MOMENTA
    ]
    memories: list[Memory] = []
    done = Counter(step(optimizers, memories, choose, rng) for _ in range(300))
    assert done["updated"] > 80
    assert done["refused"] > 10
    gc.collect()
    states = [sum(key[0] == n for m in memories for key in m.state) for n in range(3)]
    assert [len(optimizer.variables()) for optimizer in optimizers] == states
    memories.clear()
    gc.collect()
    assert [len(optimizer.variables()) for optimizer in optimizers] == [0, 0, 0]
