"""The arrays and optimizers of one random program, each beside what it should be.

After each operation everything is compared, and the model goes on from the real values: rounding
does not add up, and one step's tolerance is enough for all.
"""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
from fake_cupy import host_memory

import gpuopt
from fuzzing import model
from gpuopt.backends import backend_for
from gpuopt.device import Device

# One step's rounding, in units of eps x the array's largest element.
STEP_TOLERANCE = 16
# (start, stop, step, shape) of raw arrays within memory of 24 units; most of them overlap.
PARTS = [
    (0, 12, 1, (4, 3)),
    (6, 18, 1, (4, 3)),
    (0, 24, 2, (12,)),
    (1, 24, 2, (12,)),
    (12, 24, 1, (12,)),
    (23, None, -1, (24,)),
]
SHAPES = [(4, 3), (4, 3), (12,), (6,), (2, 3), (3, 2, 2), (), (24,)]
# Beyond the size at which the CPU takes chunks of one array instead of joining several.
LARGE = 1000

_numbers = itertools.count()


class Planned(Exception):
    """What user code raises in the middle of things."""


def put(array: np.ndarray, device: str) -> Any:
    """Returns an array with these values on a device; on the CPU, the array itself."""
    if device == "cpu":
        return array
    with on(device):
        there = fake_cupy.empty(array.shape, array.dtype)
    host_memory(there)[...] = array
    return there


def on(device: str) -> Any:
    if device == "cpu":
        return nullcontext()
    return fake_cupy.cuda.Device(int(device.removeprefix("gpu:")))


def as_float64(array: Any) -> np.ndarray:
    return np.array(host_memory(array), np.float64)


class Memory:
    """Memory that one Variable has for itself, or that raw arrays share.

    Attributes:
        label: For the log.
        expected: What it should hold, in float64.
        real: The array that owns it; None while there is none.
    """

    def __init__(self, label: str, shape: tuple[int, ...], dtype: Any, device: str) -> None:
        self.label, self.shape, self.dtype, self.device = label, shape, np.dtype(dtype), device
        self.expected = np.zeros(shape)
        self.real: Any = None
        self.lender: Any = None  # of raw arrays' memory, if numpy is not

    def overlaps(self, places: list[Place]) -> bool:
        """Whether two of these arrays in this memory have an element in common."""
        seen: set[int] = set()
        for place in places:
            if place.memory is self:
                elements = set(place.elements())
                if seen & elements:
                    return True
                seen |= elements
        return False


class Place:
    """What a program trains: a Variable, a raw array, or a Variable on a raw array's memory.

    Attributes:
        name: A Variable's own; no other program has it.
        label: Its name in checkpoints, and in the log.
        kind: "variable", "raw" or "adopted".
        memory: Where it is.
        shape: Its own.
        part: (start, stop, step) of the memory's elements; None for all of them.
        constrain: Projects the model's array; None if there is no constraint.
    """

    def __init__(
        self,
        name: str,
        label: str,
        kind: str,
        memory: Memory,
        shape: tuple[int, ...],
        part: Any,
        limit: float,
    ) -> None:
        self.name, self.label, self.kind, self.memory, self.shape = name, label, kind, memory, shape
        self.part = slice(*part) if part else None
        self.limit = limit
        self.constraint_raises = False
        self.variable: Any = None
        self.kept_view: Any = None

    @property
    def expected(self) -> np.ndarray:
        if self.part is None:
            return self.memory.expected
        return self.memory.expected[self.part].reshape(self.shape)

    @property
    def constrain(self) -> Callable[[np.ndarray], None] | None:
        return self._constrain if self.limit else None

    def _constrain(self, w: np.ndarray) -> None:
        if self.constraint_raises:
            raise Planned
        np.clip(w, -self.limit, self.limit, out=w)

    def elements(self) -> list[int]:
        """Which of its memory's elements it consists of."""
        return list(range(self.memory.expected.size))[self.part] if self.part else [0]

    def view(self) -> Any:
        """A new view of its memory."""
        memory = self.memory
        if self.part is None:
            return memory.real
        whole = memory.real
        if isinstance(memory.lender, memoryview | mmap.mmap):
            whole = np.frombuffer(memory.lender, memory.dtype)
        return whole[self.part].reshape(self.shape)

    @property
    def handle(self) -> Any:
        """What stands for it at gpuopt."""
        return self.view() if self.variable is None else self.variable

    def given(self, rng: np.random.Generator) -> Any:
        """What is passed to gpuopt: of a raw array, a view made anew, or one kept from before."""
        if self.variable is not None:
            return self.variable
        if self.kept_view is None or rng.random() < 0.5:
            view = self.view()
            if rng.random() < 0.5:
                self.kept_view = view
            return view
        return self.kept_view

    def make(self, value: np.ndarray) -> None:
        """Makes the Variable of a "variable" or "adopted" place."""
        if self.kind == "adopted":
            self.variable = gpuopt.Variable(self.view(), name=self.name, copy=False)
        elif self.kind == "variable":
            constraint = weakref.WeakMethod(self.project) if self.limit else None
            self.variable = gpuopt.Variable(
                value,
                name=self.name,
                device=self.memory.device,
                constraint=None if constraint is None else lambda w: constraint()(w),
            )
            self.memory.real = self.variable.storage
        if self.variable is not None:
            assert self.variable.name == self.name, f"the name {self.name} is still taken"

    def project(self, w: Any) -> Any:
        """The constraint."""
        if self.constraint_raises:
            raise Planned
        return np.clip(w, -self.limit, self.limit)


class Rate:
    """A learning rate that is a function; it does something else, too, when it is told to."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.action: Callable[[], None] | None = None

    def __call__(self) -> float:
        action, self.action = self.action, None
        if action is not None:
            action()
        return self.value


class Trainer:
    """An optimizer and its model.

    Attributes:
        label: The optimizer's name.
        rate: The learning rate; a `Rate` if it is a function.
    """

    def __init__(self, label: str, kind: str, rng: np.random.Generator) -> None:
        value = float(rng.choice([0.5, 0.25, 0.125]))
        self.label, self.kind, self.value = label, kind, value
        self.rate = Rate(value) if rng.random() < 0.6 else None
        self.on_nonfinite = str(rng.choice(["propagate", "propagate", "skip", "raise"]))
        rate: Any = value if self.rate is None else self.rate
        common: dict[str, Any] = {
            "name": label,
            "use_locking": bool(rng.random() < 0.3),
            "on_nonfinite": self.on_nonfinite,
        }
        momentum, nesterov = float(rng.choice([0.5, 0.75])), bool(rng.random() < 0.3)
        self.model: model.NaiveOptimizer
        self.real: Any
        if kind == "Momentum":
            self.model = model.Momentum(momentum, nesterov)
            self.real = gpuopt.MomentumOptimizer(rate, momentum, use_nesterov=nesterov, **common)
        elif kind == "Adagrad":
            self.model = model.Adagrad()
            self.real = gpuopt.AdagradOptimizer(rate, 0.25, **common)
        elif kind == "GradientDescent":
            self.model = model.GradientDescent()
            self.real = gpuopt.GradientDescentOptimizer(rate, **common)
        elif kind == "CountedAdam":
            self.model = model.CountedAdam()
            self.real = gpuopt.LazyAdamOptimizer(
                rate, *model.Adam.betas, model.Adam.epsilon, count="variable", **common
            )
        else:
            self.model = model.Adam() if kind == "Adam" else model.LazyAdam()
            make = gpuopt.AdamOptimizer if kind == "Adam" else gpuopt.LazyAdamOptimizer
            betas = model.Adam.betas
            self.real = make(rate, *betas, epsilon=model.Adam.epsilon, **common)


class World:
    """Everything that a program works on.

    Attributes:
        folder: For checkpoints; empty at first.
        devices: Where arrays may be.
        rng: The current operation's.
        steps: The variable that counts steps, and `count`, what it should be.
        calls: Lists of pairs that were passed before, to be passed again; see `steps.Call`.
        num_steps: Made by the operation so far: without any, every bit stays as it is.
        doing: What the operation has tried last, for the log.
    """

    def __init__(self, folder: Path, devices: tuple[str, ...], rng: np.random.Generator) -> None:
        self.folder, self.devices, self.rng = folder, devices, rng
        self._number = next(_numbers)
        self.calls: list[Any] = []
        self.num_steps = 0
        self.doing = ""
        self.steps = gpuopt.Variable(0, name="steps", trainable=False, dtype=np.int64)
        self.count = 0
        self.places: list[Place] = []
        self.memories: list[Memory] = []
        usual = rng.choice(["float32", "float32", "float64", "float16"])
        for number in range(rng.integers(2, 5)):
            self._add_variable(f"v{number}", usual)
        for number in range(rng.integers(1, 3)):
            self._add_raw_arrays(f"r{number}", usual)
        for memory in self.memories:
            self.fill(memory)
        kinds = ["Momentum", "Momentum", "Adam", "Adagrad", "GradientDescent", "LazyAdam"]
        kinds += ["CountedAdam", "CountedAdam"]
        chosen = rng.choice(kinds, size=4, replace=False)
        self.trainers = [Trainer(f"T{n}", str(kind), rng) for n, kind in enumerate(chosen)]

    def choose(self, items: Any) -> Any:
        return items[self.rng.integers(len(items))]

    def happens(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def values(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Quarters from -3 to 3: their sums are exact."""
        return np.asarray(self.rng.integers(-12, 13, shape) / 4).astype(dtype)

    def in_memory(self, memory: Memory) -> list[Place]:
        return [place for place in self.places if place.memory is memory]

    def apart(self, most: int) -> list[Place]:
        """Some places of which no two overlap, at least one."""
        chosen: list[Place] = []
        for index in self.rng.permutation(len(self.places)):
            place = self.places[index]
            if len(chosen) < most and not place.memory.overlaps([*chosen, place]):
                chosen.append(place)
        return chosen

    def free_and_make_again(self, memory: Memory) -> None:
        """Drops what is on some memory, and makes new arrays of the same names and shapes."""
        places = self.in_memory(memory)
        self.calls = [call for call in self.calls if memory not in call.memories]
        watched = weakref.ref(memory.real if places[0].variable is None else places[0].variable)
        for place in places:
            place.variable = place.kept_view = None
            for trainer in self.trainers:
                trainer.model.forget(place.label)
        memory.real = memory.lender = None
        for device in self.devices:
            # A GPU keeps what its queued work uses until the next update finds it done.
            with backend_for(Device.parse(device)).enter_update():
                pass
        gc.collect()
        assert watched() is None, f"something keeps {memory.label} alive"
        self.fill(memory)

    def fill(self, memory: Memory) -> None:
        """Makes what is on some memory."""
        value = self.values(memory.shape, memory.dtype)
        memory.expected = value.astype(np.float64)
        places = self.in_memory(memory)
        if places[0].kind != "variable":
            memory.real = put(value, memory.device)
            kind = self.choose(["numpy", "numpy", "memoryview", "mmap"])
            if memory.device == "cpu" and kind == "memoryview":
                memory.lender = memoryview(memory.real)
            elif memory.device == "cpu" and kind == "mmap":
                # A forked child's writes are its own.
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                memory.lender = mmap.mmap(-1, memory.real.nbytes, flags)
                memory.real = np.frombuffer(memory.lender, memory.dtype)
                memory.real[...] = value
        for place in places:
            place.make(value)

    def check(self) -> None:
        """Compares everything with the model, and has the model go on from the real values."""
        for memory in self.memories:
            self._compare(memory.label, memory.real, memory.expected)
        for trainer in self.trainers:
            optimizer, naive = trainer.real, trainer.model
            for name, by_label in naive.slots.items():
                for place in self.places:
                    slot = optimizer.get_slot(place.handle, name)
                    what = f"{name} of {place.label} by {trainer.label}"
                    assert (slot is not None) == (place.label in by_label), f"{what}: {slot}"
                    if name == "step":
                        assert slot is None or slot.numpy() == by_label[place.label], what
                    elif slot is not None:
                        self._compare(what, slot.storage, by_label[place.label])
            others = optimizer.state_dict({})["non_slots"]
            assert set(others) == {*naive.others, *naive.waiting}, f"{trainer.label}: {others}"
            for name, value in others.items():
                table = naive.others if name in naive.others else naive.waiting
                expected = np.array(table[name])
                self._compare(f"{name} of {trainer.label}", value, expected)
                table[name] = float(expected)
            of_arrays = [len(slots) for name, slots in naive.slots.items() if name != "step"]
            num_variables = len(naive.others) + sum(of_arrays)
            if len(_arrays_of(optimizer)) != num_variables:
                gc.collect()  # what dies in a collection may leave something to the next one
            owned = [variable.name for variable in _arrays_of(optimizer)]
            assert len(owned) == num_variables, f"{trainer.label} has {owned}"
        assert int(self.steps.numpy()) == self.count, f"steps: {self.steps.numpy()}, {self.count}"
        self.num_steps = 0

    def _compare(self, what: str, real: Any, expected: np.ndarray) -> None:
        got = as_float64(real)
        eps = float(ml_dtypes.finfo(real.dtype).eps)
        scale = max(1.0, float(np.abs(expected).max(initial=0)))
        tolerance = STEP_TOLERANCE * self.num_steps * eps * scale
        difference = np.abs(got - expected)
        assert (difference <= tolerance).all(), f"{what}: {shown(got)} is not {shown(expected)}"
        expected[...] = got

    def _add_variable(self, label: str, usual: str) -> None:
        shape = self._scaled(self.choose(SHAPES))
        dtype = usual if self.happens(0.7) else self.choose(["float32", "float64", "float16"])
        memory = Memory(label, shape, dtype, self.choose(self.devices))
        limit = 4.0 if self.happens(0.25) else 0.0
        self.memories.append(memory)
        self.places.append(Place(self._name(label), label, "variable", memory, shape, None, limit))

    def _add_raw_arrays(self, label: str, usual: str) -> None:
        scale = LARGE if self.happens(0.15) else 1
        memory = Memory(label, (24 * scale,), usual, self.choose(self.devices))
        self.memories.append(memory)
        for number, index in enumerate(self.rng.permutation(len(PARTS))[:3]):
            start, stop, step, shape = PARTS[index]
            start = 24 * scale - 1 if step < 0 else start * (scale if step == 1 else 1)
            part = start, None if stop is None else stop * scale, step
            shape = (shape[0] * scale, *shape[1:])
            # A Variable that has raw arrays' memory is a variable of its own.
            kind = "adopted" if step == 1 and self.happens(0.3) else "raw"
            its_label = f"{label}{'abc'[number]}"
            name = self._name(its_label)
            self.places.append(Place(name, its_label, kind, memory, shape, part, 0.0))

    def _name(self, label: str) -> str:
        return f"program{self._number}/{label}"

    def _scaled(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (LARGE * shape[0], *shape[1:]) if shape and self.happens(0.1) else shape


def shown(array: np.ndarray) -> str:
    return np.array2string(array, max_line_width=200, threshold=24, precision=4)


@contextmanager
def working_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _arrays_of(optimizer: Any) -> list[Any]:
    """An optimizer's variables but for counts of steps, which several arrays may share."""
    return [each for each in optimizer.variables() if each.dtype != np.int64]
