"""What training should do: plain numpy in float64, and nothing of gpuopt.

Each optimizer's update is written as its paper has it. A step reads all of its gradients, then
updates one array after the other, then calls the constraints, then counts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

Slots = dict[str, np.ndarray]


class Rows(NamedTuple):
    """The gradient of some rows: those that are named several times count as the sum."""

    values: np.ndarray
    indices: np.ndarray


class NaiveOptimizer:
    """One optimizer's state.

    Attributes:
        slots: By slot name, then by the label of the array they belong to.
        others: Its other numbers by name, once they are there.
        waiting: Restored numbers by name, for when they are made.
    """

    initial: ClassVar[dict[str, float]] = {}
    other_names: tuple[str, ...] = ()
    moves_all_rows = False

    def __init__(self) -> None:
        self.slots: dict[str, Slots] = {name: {} for name in self.initial}
        self.others: dict[str, float] = {}
        self.waiting: dict[str, float] = {}

    def make_slots(self, label: str, w: np.ndarray) -> None:
        for name, start in self.initial.items():
            self.slots[name].setdefault(label, np.full(w.shape, start))

    def forget(self, label: str) -> None:
        for by_label in self.slots.values():
            by_label.pop(label, None)

    def update(self, label: str, w: np.ndarray, gradient: Any, rate: float) -> None:
        """Updates an array in place by a dense gradient or by `Rows`."""
        slots = [by_label[label] for by_label in self.slots.values()]
        if not isinstance(gradient, Rows):
            self.rule(w, gradient, *slots, rate=rate)
            return
        dense = np.zeros(w.shape)
        for row, value in zip(gradient.indices, gradient.values, strict=True):
            dense[row] += value
        touched = (
            np.arange(len(w)) if self.moves_all_rows else np.array(sorted(set(gradient.indices)))
        )
        if touched.size:
            parts = [array[touched] for array in (w, *slots)]
            self.rule(parts[0], dense[touched], *parts[1:], rate=rate)
            for array, part in zip((w, *slots), parts, strict=True):
                array[touched] = part

    def rule(self, w: np.ndarray, g: np.ndarray, *slots: np.ndarray, rate: float) -> None:
        raise NotImplementedError

    def finish(self, labels: Sequence[str]) -> None:
        """What follows the updates of a step, which was made of these arrays."""

    def state(self) -> Any:
        """A copy, to be loaded later."""
        return copy.deepcopy((self.slots, {**self.waiting, **self.others}))

    def accepts(self, state: Any, labels: Sequence[str]) -> bool:
        """Whether a state has all that is there now, of these arrays and otherwise."""
        slots, others = state
        if self._is_of_no_step(state, labels):
            return True
        saved = {label for by_label in slots.values() for label in by_label}
        complete = all(
            label in slots[name]
            for name, by_label in self.slots.items()
            for label in labels
            if label in by_label
        )
        needed = set(self.others) | (set(self.other_names) if saved else set())
        return complete and needed <= set(others)

    def load(self, state: Any, labels: Sequence[str]) -> None:
        """Takes over the state of some arrays, and leaves that of all others."""
        slots, others = copy.deepcopy(state)
        if self._is_of_no_step(state, labels):
            self.slots = {name: {} for name in self.initial}
            for name in self.other_names:
                self.others.pop(name, None)
                self.waiting.pop(name, None)
        for name, by_label in slots.items():
            for label in labels:
                if label in by_label:
                    self.slots[name][label] = by_label[label]
        for name, value in others.items():
            (self.others if name in self.others else self.waiting)[name] = value

    def _is_of_no_step(self, state: Any, labels: Sequence[str]) -> bool:
        """Whether a state is of before the first step, and of all arrays that have slots now."""
        slots, others = state
        has_slots = {label for by_label in self.slots.values() for label in by_label}
        is_empty = not any(slots.values()) and not set(others) & set(self.other_names)
        return is_empty and has_slots <= set(labels)


class GradientDescent(NaiveOptimizer):
    def rule(self, w: np.ndarray, g: np.ndarray, *slots: np.ndarray, rate: float) -> None:
        w -= rate * g


class Momentum(NaiveOptimizer):
    initial: ClassVar[dict[str, float]] = {"momentum": 0.0}

    def __init__(self, momentum: float, nesterov: bool) -> None:
        super().__init__()
        self.momentum, self.nesterov = momentum, nesterov

    def rule(self, w: np.ndarray, g: np.ndarray, *slots: np.ndarray, rate: float) -> None:
        (velocity,) = slots
        velocity[...] = self.momentum * velocity + g
        w -= rate * (g + self.momentum * velocity if self.nesterov else velocity)


class Adagrad(NaiveOptimizer):
    initial: ClassVar[dict[str, float]] = {"accumulator": 0.25}

    def rule(self, w: np.ndarray, g: np.ndarray, *slots: np.ndarray, rate: float) -> None:
        (squares,) = slots
        squares += g**2
        w -= rate * g / np.sqrt(squares)


class Adam(NaiveOptimizer):
    initial: ClassVar[dict[str, float]] = {"m": 0.0, "v": 0.0}
    other_names = ("beta1_power", "beta2_power")
    moves_all_rows = True
    betas = (0.5, 0.75)
    epsilon = 0.125

    def make_slots(self, label: str, w: np.ndarray) -> None:
        super().make_slots(label, w)
        for name, beta in zip(self.other_names, self.betas, strict=True):
            if name not in self.others:
                self.others[name] = self.waiting.pop(name, beta)

    def rule(self, w: np.ndarray, g: np.ndarray, *slots: np.ndarray, rate: float) -> None:
        m, v = slots
        beta1, beta2 = self.betas
        power1, power2 = (self.others[name] for name in self.other_names)
        m[...] = beta1 * m + (1 - beta1) * g
        v[...] = beta2 * v + (1 - beta2) * g**2
        w -= rate * np.sqrt(1 - power2) / (1 - power1) * m / (np.sqrt(v) + self.epsilon)

    def finish(self, labels: Sequence[str]) -> None:
        for name, beta in zip(self.other_names, self.betas, strict=True):
            # In float32 for arrays of any type, as in TensorFlow.
            self.others[name] = float(np.float32(self.others[name] * beta))


class LazyAdam(Adam):
    moves_all_rows = False


class CountedAdam(NaiveOptimizer):
    """`LazyAdam` whose arrays each have their own count of steps."""

    initial: ClassVar[dict[str, float]] = {"m": 0.0, "v": 0.0, "step": 0.0}

    def make_slots(self, label: str, w: np.ndarray) -> None:
        super().make_slots(label, w)
        self.slots["step"][label] = self.slots["step"][label].reshape(-1)[:1].reshape(())

    def update(self, label: str, w: np.ndarray, gradient: Any, rate: float) -> None:
        averages, steps = {name: self.slots[name] for name in "mv"}, self.slots["step"]
        corrections = [1 - beta ** (float(steps[label]) + 1) for beta in Adam.betas]
        rate *= np.sqrt(corrections[1]) / corrections[0]
        every, self.slots = self.slots, averages  # the base class takes those of the array's shape
        try:
            super().update(label, w, gradient, rate)
        finally:
            self.slots = every

    def rule(self, w: np.ndarray, g: np.ndarray, *slots: np.ndarray, rate: float) -> None:
        m, v = slots
        beta1, beta2 = Adam.betas
        m[...] = beta1 * m + (1 - beta1) * g
        v[...] = beta2 * v + (1 - beta2) * g**2
        w -= rate * m / (np.sqrt(v) + Adam.epsilon)

    def finish(self, labels: Sequence[str]) -> None:
        for label in labels:
            self.slots["step"][label] += 1


class NaivePair(NamedTuple):
    """One gradient and what it is for.

    Attributes:
        read: Returns the gradient's value now: a float64 array, or `Rows`.
        label: Of the array that it updates.
        w: That array.
        constrain: Projects the array in place, after all updates; or raises.
    """

    read: Callable[[], Any]
    label: str
    w: np.ndarray
    constrain: Callable[[np.ndarray], None] | None


def step(
    optimizer: NaiveOptimizer,
    pairs: Sequence[NaivePair],
    rate: float,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Makes one step.

    Args:
        optimizer: By which.
        pairs: Without those whose gradient is None.
        rate: The learning rate.
        before: What user code does when the learning rate is asked for.
    """
    for pair in pairs:
        optimizer.make_slots(pair.label, pair.w)
    before()
    gradients = [copy.deepcopy(pair.read()) for pair in pairs]
    for pair, gradient in zip(pairs, gradients, strict=True):
        optimizer.update(pair.label, pair.w, gradient, rate)
    for pair in pairs:
        if pair.constrain is not None:
            pair.constrain(pair.w)
    optimizer.finish([pair.label for pair in pairs])
