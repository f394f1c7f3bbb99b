"""Operations that step, or try to: each does the same to gpuopt and to the model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from fake_cupy import host_memory

import gpuopt
from fuzzing import model
from fuzzing.model import NaivePair, Rows
from fuzzing.world import Memory, Place, Planned, Trainer, World, as_float64, on, put, shown
from gpuopt.variables.unfinished import begun

# Larger arrays are no gradients: what adds itself to itself grows beyond bounds.
LARGEST_GRADIENT = 8.0


class Gradient(NamedTuple):
    """A gradient for gpuopt, and how the model reads it.

    Attributes:
        real: What gpuopt gets.
        read: Returns its present value: None, a float64 array, or `Rows`.
        kind: For the log.
        memories: Those that it is in, if it is in any.
    """

    real: Any
    read: Callable[[], Any]
    kind: str
    memories: Sequence[Memory] = ()


class Call(NamedTuple):
    """One call of `apply_gradients`.

    Attributes:
        trainer: Whose.
        places: What is updated, by `gradients`.
        pairs: What is passed.
        memories: All that the call refers to.
    """

    trainer: Trainer
    places: list[Place]
    gradients: list[Gradient]
    pairs: list[tuple[Any, Any]]

    @property
    def memories(self) -> list[Memory]:
        own = [place.memory for place in self.places]
        return [*own, *(memory for gradient in self.gradients for memory in gradient.memories)]

    def naive_pairs(self) -> list[NaivePair]:
        return [
            NaivePair(gradient.read, place.label, place.expected, place.constrain)
            for gradient, place in zip(self.gradients, self.places, strict=True)
            if gradient.kind != "none"
        ]

    def __str__(self) -> str:
        pairs = zip(self.gradients, self.places, strict=True)
        listed = ", ".join(f"({gradient.kind}, {place.label})" for gradient, place in pairs)
        return f"{self.trainer.kind} {self.trainer.label}: {listed}"


# Gradients


def new(world: World, place: Place, _: list[Gradient]) -> Gradient:
    return array_gradient(world.values(place.shape, place.memory.dtype), place, "new")


def elsewhere(world: World, place: Place, _: list[Gradient]) -> Gradient:
    """On any device: gpuopt copies it to the variable's."""
    device = world.choose(world.devices)
    real = put(world.values(place.shape, place.memory.dtype), device)
    return Gradient(real, lambda: as_float64(real), f"new on {device}")


def strided(world: World, place: Place, _: list[Gradient]) -> Gradient:
    values = world.values((*place.shape, 3), place.memory.dtype)[..., 1]
    if place.shape and world.happens(0.5):
        values = np.broadcast_to(world.values(place.shape[1:], place.memory.dtype), place.shape)
    return Gradient(values, lambda: as_float64(values), "strided")


def nested_list(world: World, place: Place, _: list[Gradient]) -> Gradient:
    values = world.values(place.shape, place.memory.dtype)
    return Gradient(values.tolist(), lambda: as_float64(values), "list")


def none(world: World, place: Place, _: list[Gradient]) -> Gradient:
    return Gradient(None, lambda: None, "none")


def alias(world: World, place: Place, _: list[Gradient]) -> Gradient:
    """Some of the memory that is trained, the place's own or another's."""
    memory = world.choose(world.memories)
    size, start = place.expected.size, 0
    if not is_usable(memory.real, memory.expected, place):
        return new(world, place, _)
    if memory.expected.size > size:
        start = int(world.rng.integers(memory.expected.size - size + 1))

    def part(array: Any) -> Any:
        return array.reshape(-1)[start : start + size].reshape(place.shape)

    kind = f"{memory.label}[{start}:]"
    return Gradient(part(memory.real), lambda: part(memory.expected), kind, [memory])


def slot(world: World, place: Place, _: list[Gradient]) -> Gradient:
    """A slot of anything that is trained."""
    found = [
        (trainer, name, owner)
        for trainer in world.trainers
        for name, by_label in trainer.model.slots.items()
        for owner in world.places
        if owner.label in by_label and name != "step"
    ]
    if not found:
        return new(world, place, _)
    trainer, name, owner = world.choose(found)
    by_label, label = trainer.model.slots[name], owner.label
    real = trainer.real.get_slot(owner.handle, name)
    if not is_usable(real.storage, by_label[label], place):
        return new(world, place, _)
    size = place.expected.size

    def part(array: Any) -> Any:
        return array.reshape(-1)[:size].reshape(place.shape)

    kind = f"{name} of {label} by {trainer.label}"
    return Gradient(part(real.storage), lambda: part(by_label[label]), kind, [owner.memory])


def variable(world: World, place: Place, _: list[Gradient]) -> Gradient:
    """Another Variable of the shape, as an object."""
    found = [
        other
        for other in world.places
        if other.variable is not None
        and other.shape == place.shape
        and is_usable(other.view(), other.expected, place)
    ]
    if place.variable is None or not found:
        return new(world, place, _)
    other = world.choose(found)
    kind = f"Variable {other.label}"
    return Gradient(other.variable, lambda: other.expected, kind, [other.memory])


def shared(world: World, place: Place, earlier: list[Gradient]) -> Gradient:
    """What another variable of the call gets, too, or memory that overlaps with it."""
    size = place.expected.size
    found = [
        gradient.real
        for gradient in earlier
        if gradient.kind == "new"
        and place.memory.device == device_of(gradient.real) == "cpu"
        and gradient.real.dtype == place.memory.dtype
        and gradient.real.size >= size
    ]
    if not found:
        return new(world, place, earlier)
    real = world.choose(found)
    part = real.reshape(-1)[real.size - size :].reshape(place.shape)
    return Gradient(part, lambda: as_float64(part), "shared")


def sparse(world: World, place: Place, _: list[Gradient]) -> Gradient:
    if not place.shape or place.limit:
        return new(world, place, _)
    height = min(place.shape[0], 6) if world.happens(0.5) else place.shape[0]
    indices = world.rng.integers(0, height, world.rng.integers(0, 9))
    indices = indices.astype(world.choose([np.int32, np.int64]))
    values = world.values((len(indices), *place.shape[1:]), place.memory.dtype)
    return sparse_gradient(put(values, place.memory.device), indices, place, "sparse")


def sparse_alias(world: World, place: Place, _: list[Gradient]) -> Gradient:
    """Rows whose values are memory that is trained."""
    memory = world.choose(world.memories)
    if not place.shape or place.limit or not is_usable(memory.real, memory.expected, place, 1):
        return sparse(world, place, _)
    width = place.expected.size // place.shape[0]
    count = min(memory.expected.size // width, 8)
    indices = world.rng.integers(0, place.shape[0], count)

    def part(array: Any) -> Any:
        return array.reshape(-1)[: count * width].reshape(count, *place.shape[1:])

    real = gpuopt.IndexedSlices(part(memory.real), put(indices, place.memory.device))
    kind = f"sparse {memory.label}[:{count * width}]"
    return Gradient(real, lambda: Rows(part(memory.expected), indices), kind, [memory])


GRADIENTS: list[tuple[float, Callable[..., Gradient]]] = [
    (5, new),
    (2, elsewhere),
    (1, strided),
    (1, nested_list),
    (1.5, none),
    (3, alias),
    (1.5, slot),
    (1, variable),
    (1, shared),
    (3, sparse),
    (2, sparse_alias),
]


def array_gradient(values: np.ndarray, place: Place, kind: str) -> Gradient:
    real = put(values, place.memory.device)
    return Gradient(real, lambda: as_float64(real), kind)


def sparse_gradient(values: Any, indices: np.ndarray, place: Place, kind: str) -> Gradient:
    real = gpuopt.IndexedSlices(values, put(indices, place.memory.device))
    return Gradient(real, lambda: Rows(as_float64(values), indices), f"{kind} {list(indices)}")


def is_usable(real: Any, value: np.ndarray, place: Place, rows: int | None = None) -> bool:
    """Whether an array's memory can be a place's gradient: as large, of the type, and not huge."""
    least = place.expected.size
    if rows is not None:
        least = rows * place.expected.size // max(1, place.shape[0] if place.shape else 1)
    is_small = bool(np.abs(value).max(initial=0) < LARGEST_GRADIENT)
    same_device = place.memory.device == device_of(real)
    return value.size >= least and is_small and same_device and real.dtype == place.memory.dtype


def device_of(array: Any) -> str:
    return "cpu" if host_memory(array) is array else f"gpu:{array.device_id}"


# Calls


def random_call(world: World, trainer: Trainer, places: list[Place]) -> Call:
    gradients: list[Gradient] = []
    weights = np.array([weight for weight, _ in GRADIENTS])
    for place in places:
        number = world.rng.choice(len(GRADIENTS), p=weights / weights.sum())
        gradients.append(GRADIENTS[number][1](world, place, gradients))
    if all(gradient.kind == "none" for gradient in gradients):
        gradients[0] = new(world, places[0], [])
    given = [place.given(world.rng) for place in places]
    pairs = [(gradient.real, each) for gradient, each in zip(gradients, given, strict=True)]
    return Call(trainer, places, gradients, pairs)


def apply_for_real(world: World, call: Call, counts: bool) -> None:
    world.doing += f"\n    {call}"
    call.trainer.real.apply_gradients(call.pairs, global_step=world.steps if counts else None)


def apply_in_model(
    world: World, call: Call, counts: bool, before: Callable[[], None] = lambda: None
) -> None:
    world.num_steps += 1
    model.step(call.trainer.model, call.naive_pairs(), call.trainer.value, before)
    world.count += counts


def apply(world: World, call: Call, counts: bool) -> None:
    apply_for_real(world, call, counts)
    apply_in_model(world, call, counts)


# Operations


def step(world: World) -> str:
    call = random_call(world, world.choose(world.trainers), world.apart(4))
    counts = world.happens(0.3)
    apply(world, call, counts)
    if world.happens(0.5):
        world.calls.append(call)
        del world.calls[:-4]
    return str(call)


def step_again(world: World) -> str:
    """The very objects of an earlier call, some times over: the values in them may be others."""
    if not world.calls:
        return step(world)
    call = world.choose(world.calls)
    times = int(world.rng.integers(1, 5))
    for _ in range(times):
        for gradient in call.gradients:
            if gradient.kind == "new" and world.happens(0.5):
                values = world.values(gradient.real.shape, gradient.real.dtype)
                host_memory(gradient.real)[...] = values
        if is_bounded(call):
            apply(world, call, world.happens(0.3))
            world.check()
    return f"{times} x {call}"


def is_bounded(call: Call) -> bool:
    values = (gradient.read() for gradient in call.gradients if gradient.memories)
    arrays = (value.values if isinstance(value, Rows) else value for value in values)
    return all(np.abs(array).max(initial=0) < LARGEST_GRADIENT for array in arrays)


def nested_step(world: World) -> str:
    """The learning rate is a function that steps, with the same optimizer or another."""
    outer = [trainer for trainer in world.trainers if trainer.rate is not None]
    if not outer:
        return step(world)
    usual = [call for call in world.calls if call.trainer in outer and is_bounded(call)]
    if usual and world.happens(0.7):
        call = world.choose(usual)
    else:
        call = random_call(world, world.choose(outer), world.apart(3))
        world.calls.append(call)
    trainer = call.trainer if world.happens(0.7) else world.choose(world.trainers)
    same = [each for each in world.calls if each.trainer is trainer and is_bounded(each)]
    inner = (
        world.choose(same)
        if same and world.happens(0.5)
        else random_call(world, trainer, world.apart(3))
    )
    if any(gradient.memories for gradient in (*inner.gradients, *call.gradients)):
        times = 1  # their gradients grow
    else:
        times = int(world.rng.integers(1, 4))

    def real_steps() -> None:
        for _ in range(times):
            apply_for_real(world, inner, counts=False)

    def naive_steps() -> None:
        for _ in range(times):
            apply_in_model(world, inner, counts=False)

    assert call.trainer.rate is not None
    for _ in range(2):  # the second time, both are known
        call.trainer.rate.action = real_steps
        apply_for_real(world, call, counts=True)
        apply_in_model(world, call, True, naive_steps)
        world.check()
        if not (is_bounded(call) and is_bounded(inner)):
            break
    return f"{call}; in its learning rate {times} x {inner}"


def gradient_changed_in_place(world: World) -> str:
    """The gradient object of a known call gets another dtype or shape: the call is refused."""
    place = world.choose(world.places)
    trainer = world.choose(world.trainers)
    if place.memory.device != "cpu" or not place.shape:
        return step(world)
    others = [each for each in world.apart(3) if not each.memory.overlaps([place, each])]
    gradients = [new(world, each, []) for each in (place, *others)]
    pairs = [
        (gradient.real, each.given(world.rng))
        for gradient, each in zip(gradients, (place, *others), strict=True)
    ]
    call = Call(trainer, [place, *others], gradients, pairs)
    for _ in range(3):
        apply(world, call, counts=False)
    world.check()
    gradient = gradients[0].real
    dtype, shape = gradient.dtype, gradient.shape
    change = world.choose(["dtype", "shape"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if change == "dtype":
            gradient.dtype = np.dtype(f"i{dtype.itemsize}")
        else:
            gradient.shape = (1, *shape)
        refuse(world, call, (TypeError, ValueError))
        if change == "dtype":
            gradient.dtype = dtype
        else:
            gradient.shape = shape
    return f"{call}, and the first gradient's {change} changed in place"


WRONG = [
    *("shape", "dtype", "text", "overlap", "row", "counter", "read-only", "masked", "nan"),
    "swapped",
]


def refused(world: World) -> str:
    """One thing in the list is wrong: nothing is written."""
    trainer = world.choose(world.trainers)
    call = random_call(world, trainer, world.apart(4))
    position = int(world.rng.integers(len(call.pairs)))
    place = call.places[position]
    counter: Any = world.steps
    wrong = world.choose(WRONG)
    gradient, given = call.pairs[position]
    expected: tuple[type[Exception], ...] = (TypeError, ValueError)
    values = world.values(place.shape, place.memory.dtype)
    if wrong == "shape":
        gradient = world.values((*place.shape, 2), place.memory.dtype)
    elif wrong == "dtype":
        gradient = values.astype(np.complex64)
    elif wrong == "text":
        gradient = "a gradient"
    elif wrong == "overlap":
        gradient = values
        call.pairs.append((values.copy(), given))
    elif wrong == "row":
        if not place.shape or place.limit or place.memory.device != "cpu":
            return step(world)
        row = world.choose([-1, place.shape[0]])
        gradient = sparse_gradient(values[:1], np.array([row]), place, "").real
        expected = (IndexError,)
    elif wrong == "counter":
        counter = gpuopt.Variable(np.zeros(2, np.float32), name="no counter")
    elif wrong == "read-only":
        gradient, given = values, np.zeros_like(values)
        given.flags.writeable = False
    elif wrong == "swapped":
        if place.variable is None:
            return step(world)
        gradient, given = given, put(values, place.memory.device)
    elif wrong == "masked":
        gradient = np.ma.masked_array(values)
    else:
        if trainer.on_nonfinite == "propagate":
            return step(world)
        gradient = np.full_like(values, np.nan)
        expected = (FloatingPointError,) if trainer.on_nonfinite == "raise" else ()
    call.pairs[position] = gradient, given
    refuse(world, call, expected, counter)
    return f"{call}, refused at {position}: {wrong}"


def refuse(
    world: World, call: Call, expected: tuple[type[Exception], ...], counter: Any = None
) -> None:
    """Passes a call that raises, or that is left out."""
    if not expected:
        call.trainer.real.apply_gradients(call.pairs, global_step=counter)
        return
    try:
        call.trainer.real.apply_gradients(call.pairs, global_step=counter)
        call.trainer.real.check()  # a GPU finds out later that gradients are not finite
    except expected:
        return
    raise AssertionError(f"not refused: {call}")


def row_refused_by_a_gpu(world: World) -> str:
    """A GPU finds a row out of range after the call: `check` raises it, and nothing was changed.

    Slots that were missing are missing again.
    """
    places = [place for place in world.places if place.shape and not place.limit]
    places = [place for place in places if place.memory.device != "cpu"]
    if not places:
        return step(world)
    place, trainer = world.choose(places), world.choose(world.trainers)
    values = put(world.values((2, *place.shape[1:]), place.memory.dtype), place.memory.device)
    rows = np.array([0, place.shape[0]])
    gradient = sparse_gradient(values, rows, place, "sparse")
    call = Call(trainer, [place], [gradient], [(gradient.real, place.given(world.rng))])
    try:
        apply_for_real(world, call, counts=True)
        trainer.real.check()
    except IndexError:
        return f"{call}, refused by the GPU"
    raise AssertionError(f"not refused: {call}")


def rate_that_raises(world: World) -> str:
    """User code raises before anything is written; slots that were missing are missing again."""
    found = [trainer for trainer in world.trainers if trainer.rate is not None]
    if not found:
        return step(world)
    call = random_call(world, world.choose(found), world.apart(4))

    def fail() -> None:
        raise Planned

    call.trainer.rate.action = fail
    refuse(world, call, (Planned,), world.steps)
    return f"{call}, and the learning rate raises"


def constraint_that_raises(world: World) -> str:
    """A constraint comes after all updates: they stay, and the step is not counted."""
    constrained = [place for place in world.places if place.limit]
    if not constrained:
        return step(world)
    place = world.choose(constrained)
    call = random_call(world, world.choose(world.trainers), [place])
    place.constraint_raises = True
    try:
        refuse(world, call, (Planned,), world.steps)
        with contextlib.suppress(Planned):
            apply_in_model(world, call, counts=False)
    finally:
        place.constraint_raises = False
    # The program goes on with what is there; tests of unfinished steps settle them.
    begun.clear()
    return f"{call}, and the constraint raises"


def minimize(world: World) -> str:
    """A loss whose gradients are known: by autograd, variable by variable or all at once."""
    places = [place for place in world.apart(4) if place.kind == "variable"]
    device = world.choose(world.devices)
    places = [place for place in places if place.memory.device == device]
    trainer = world.choose(world.trainers)
    if not places or trainer.on_nonfinite != "propagate":
        return step(world)
    gradients = [new(world, place, []) for place in places]
    call = Call(trainer, places, gradients, [])
    gate = world.choose([gpuopt.Optimizer.GATE_NONE, gpuopt.Optimizer.GATE_OP])
    # One type for the sum: each gradient has its variable's.
    with on(device):
        trainer.real.minimize(
            lambda: sum(
                (place.variable * gradient.real).sum().astype(np.float64)
                for place, gradient in zip(places, gradients, strict=True)
            ),
            global_step=world.steps,
            gate_gradients=gate,
        )
    apply_in_model(world, call, counts=True)
    return f"minimize with gate {gate}, {call}"


def minimize_with_gradients(world: World) -> str:
    """A loss with gradients of its own, which may be other variables' memory."""
    places = [place for place in world.apart(4) if place.kind == "variable"]
    trainer = world.choose(world.trainers)
    if not places or trainer.on_nonfinite != "propagate":
        return step(world)
    call = random_call(world, trainer, places)
    gradients = {
        place.variable: gradient.real
        for place, gradient in zip(places, call.gradients, strict=True)
        if gradient.kind not in ("list", "none")
    }
    if not gradients:
        return step(world)
    kept = [at for at, place in enumerate(places) if place.variable in gradients]
    call = Call(trainer, [places[at] for at in kept], [call.gradients[at] for at in kept], [])
    gate = world.choose([gpuopt.Optimizer.GATE_NONE, gpuopt.Optimizer.GATE_OP])
    trainer.real.minimize(
        gpuopt.with_gradients(lambda: (0.0, gradients)),
        global_step=world.steps,
        gate_gradients=gate,
    )
    apply_in_model(world, call, counts=True)
    return f"minimize with gradients and gate {gate}, {call}"


def assign(world: World) -> str:
    """Writes by hand: to a Variable, through a raw array, or to a slot."""
    place = world.choose(world.places)
    value = world.values(place.shape, place.memory.dtype)
    how = world.choose(["assign", "+=", "item"])
    w = place.expected
    if place.variable is None:
        host_memory(place.view())[...] = value
        w[...] = value
    elif how == "assign":
        place.variable.assign(value)
        w[...] = value
    elif how == "+=":
        variable = place.variable
        variable += put(value, place.memory.device)
        assert variable is place.variable
        world.num_steps += 1
        w += value
    else:
        place.variable[...] = put(value, place.memory.device)
        w[...] = value
    return f"{place.label} {how} {shown(value)}"


def make_again(world: World, memory: Memory) -> str:
    world.free_and_make_again(memory)
    return f"free {memory.label} and make it again"
