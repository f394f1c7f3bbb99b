"""Updates of Thinc's parameters: many in one call of a backend. Thinc itself is not needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from operator import is_
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
from numpy.lib.array_utils import byte_bounds

from gpuopt.backends import Backend, Target, backend_for
from gpuopt.backends.backend import compute_type
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cpu.compiled_update import repeated_update
from gpuopt.backends.cpu.compiler import why_not_compiled
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.clipping import clip_by_norm
from gpuopt.device import Device, device_of
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.optimizers.adam import adam
from gpuopt.optimizers.gradient_descent import gradient_descent
from gpuopt.optimizers.r_adam import r_adam
from gpuopt.rules.decayed import decayed
from gpuopt.rules.update_rule import UpdateRule

Array = Any
Key = tuple[int, str]
Formula = Literal["Adam", "RAdam", "SGD"]
Scalars = Mapping[str, "np.floating[Any]"]

_RULES: Mapping[Formula, UpdateRule] = {"Adam": adam, "RAdam": r_adam, "SGD": gradient_descent}
# A new average is `decay * average + (1 - decay) * weights`: of these two rules.
_AVERAGE = decayed(gradient_descent)

# Of RAdam: from so many gradients on, the average of their squares says enough.
_ENOUGH = 5.0
# The largest weight of an old average.
_MOST_DECAY = 0.9999
# Lists of parameters whose plans are kept.
_MOST_LISTS = 256


class Settings(NamedTuple):
    """The numbers that one parameter's step is made with.

    Attributes:
        formula: Which it is.
        learn_rate: Thinc's, as the others are.
        beta1: Decay of the gradient's average.
        beta2: Decay of the average of its square.
        eps: Added to the root of that.
        l2: Times the weights, what is added to the gradient, or what `decay` is made of.
        l2_is_weight_decay: Which of these two.
        grad_clip: The largest norm of the parameter's gradient; 0 for any.
        lr_scale: What the learning rate is times.
        step: The number of this step, from 1.
    """

    formula: Formula
    learn_rate: float
    beta1: float
    beta2: float
    eps: float
    l2: float
    l2_is_weight_decay: bool
    grad_clip: float
    lr_scale: float
    step: int

    @property
    def decay(self) -> float:
        """The part of the weights that is taken away after the step."""
        return self.lr_scale * self.learn_rate * self.l2 if self.l2_is_weight_decay else 0.0


class Parameter(NamedTuple):
    """A parameter's arrays, all on one device.

    Attributes:
        key: Thinc's.
        weights: Of any shape and strides.
        moments: The averages of the gradient and of its square, [size]; none with SGD.
        average: The moving average of the weights, of their shape; None if there is none.
    """

    key: Key
    weights: Array
    moments: tuple[Array, ...]
    average: Array | None


class _Updated:
    """Puts updates of a parameter in order across streams."""

    last_update: Any = None


class _ArrayUpdates:
    """Updates of some arrays of one device and dtype, by gradients that are mostly the same arrays.

    Attributes:
        backend: The device's.
        real: The type that is computed in.
    """

    def __init__(self, targets: Sequence[Target], groups: Sequence[int]) -> None:
        """Prepares updates.

        Args:
            targets: Arrays that share no memory.
            groups: For each, the position of its scalars among those that `apply` gets.
        """
        array = targets[0].var
        self.real = compute_type(array.dtype)
        device = device_of(array)
        self._is_on_host = device is Device.cpu
        self.backend = _host() if self._is_on_host else backend_for(device)
        self._targets = targets
        self._groups = groups
        of_groups = groups if max(groups) else None
        updated = [_Updated() for _ in targets]
        self._plan = self.backend.plan_dense(targets, updated=updated, groups=of_groups)
        self._gradients: Sequence[Array] = ()
        # By rule; None where the plan is used.
        self._repeated: dict[UpdateRule, Callable[[Sequence[Scalars]], None] | None] = {}

    def accept(self, gradients: Sequence[Array]) -> bool:
        """Whether gradients are of their arrays' shapes, dtype and device."""
        if _are_same(self._gradients, gradients):
            return True
        self._gradients, self._repeated = (), {}
        return self._plan.accept(gradients) is not None

    def apply(
        self, rule: UpdateRule, gradients: Sequence[Array], scalars: Sequence[Scalars]
    ) -> None:
        """Applies a rule by gradients that were accepted, or others of their kind."""
        if self._is_on_host and _are_same(self._gradients, gradients):
            if rule not in self._repeated:
                given = rule, self._targets, gradients, self._groups
                self._repeated[rule] = repeated_update(*given)
            repeated = self._repeated[rule]
            if repeated is not None:
                repeated(scalars)
                return
        self._gradients = gradients
        version = self._plan.accept(gradients)
        self.backend.apply_dense(rule, self._plan, gradients, scalars, version=version)


class _Batch(NamedTuple):
    """Parameters that one call of a backend updates.

    Attributes:
        positions: Theirs, in the list.
        weights: Updates of their weights and moments.
        averages: Updates of their averages, whose gradients are the weights; None without.
        settings: For each group of the updates, the number of its settings.
    """

    positions: Sequence[int]
    weights: _ArrayUpdates
    averages: _ArrayUpdates | None
    settings: Sequence[int]


class _Plan(NamedTuple):
    """What is prepared for a list of parameters.

    Attributes:
        parameters: The plan is for the same ones alone.
        batches: None if parameters share memory.
    """

    parameters: Sequence[Parameter]
    batches: Sequence[_Batch] | None


class Updates:
    """Updates parameters, and keeps plans for it. A copy has no plans.

    Attributes:
        parameters: Those that were updated, by key: the same objects are recognised soonest.
    """

    def __init__(self) -> None:
        self.parameters: dict[Key, Parameter] = {}
        self._plans: dict[Any, _Plan] = {}

    def __reduce__(self) -> Any:
        # Plans have the addresses of arrays that a copy does not own.
        return Updates, ()

    def apply(
        self,
        parameters: Sequence[Parameter],
        gradients: Sequence[Array],
        settings: Sequence[Settings],
    ) -> None:
        """Makes a step of each parameter, those of a device and type in one call.

        Clipping, and `l2` that is no decay, change the gradients before. At the end they are 0.

        Args:
            parameters: Each once.
            gradients: One for each, of its shape and dtype, and on its device.
            settings: Of each.

        Raises:
            ValueError: a gradient does not fit; nothing has been changed.
        """
        first = settings[0]
        if all(each is first for each in settings):
            distinct, of_each = [first], (0,) * len(settings)
        else:
            distinct = list(dict.fromkeys(settings))
            numbers = {each: number for number, each in enumerate(distinct)}
            of_each = tuple(numbers[each] for each in settings)
        batches = self._batches_of(parameters, distinct, of_each)
        if batches is None or len(set(map(id, gradients))) < len(gradients):
            # As Thinc does it: what parameters share is updated several times.
            for parameter, gradient, now in zip(parameters, gradients, settings, strict=True):
                self.apply([parameter], [gradient], [now])
            return
        for batch in batches:
            if not batch.weights.accept(_select(gradients, batch)):
                _refuse_misfits(parameters, gradients)
        ignore_fp_warnings(_update, batches, parameters, gradients, settings, distinct)

    def _batches_of(
        self,
        parameters: Sequence[Parameter],
        distinct: Sequence[Settings],
        of_each: tuple[int, ...],
    ) -> Sequence[_Batch] | None:
        """Returns what is prepared for parameters; None if they share memory."""
        formulas = tuple(each.formula for each in distinct)
        key = parameters[0].key, parameters[-1].key, of_each, formulas
        plan = self._plans.get(key)
        if plan is None or not _are_same(plan.parameters, parameters):
            if len(self._plans) >= _MOST_LISTS:
                self._plans.clear()
            batches = _batches(parameters, formulas, of_each) if _are_apart(parameters) else None
            plan = self._plans[key] = _Plan(parameters, batches)
        return plan.batches


def is_same_memory(some: Array, other: Array) -> bool:
    """Whether two arrays are views of the same elements, as torch's are made anew in each step."""
    if some.shape != other.shape or some.strides != other.strides or some.dtype != other.dtype:
        return False
    device = device_of(other)
    if device_of(some) is not device:
        return False
    layout = backend_for(device).layout
    return bool(layout(some).ctypes.data == layout(other).ctypes.data)


@cache
def _host() -> Backend:
    """The CPU's backend for small parameters: a call costs more than what it computes."""
    if why_not_compiled() is not None:
        return backend_for(Device.cpu)
    # Compiled rules for all, which are quicker than numpy at any size.
    return CpuBackend(CpuLimits(small_elements=1, large_elements=0))


def _are_same(some: Sequence[Array], others: Sequence[Array]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _are_apart(parameters: Sequence[Parameter]) -> bool:
    """Whether no two parameters share memory."""
    spans: dict[Device, list[tuple[int, int]]] = {}
    for each in parameters:
        device = device_of(each.weights)
        layout = backend_for(device).layout(each.weights)
        spans.setdefault(device, []).append(byte_bounds(layout))
    return all(
        before[1] <= after[0]
        for of_device in spans.values()
        for before, after in pairwise(sorted(of_device))
    )


def _batches(
    parameters: Sequence[Parameter], formulas: Sequence[Formula], of_each: Sequence[int]
) -> list[_Batch]:
    by_kind: dict[Any, list[int]] = {}
    for position, each in enumerate(parameters):
        formula = formulas[of_each[position]]
        has_average = each.average is not None
        kind = device_of(each.weights), each.weights.dtype, formula, has_average
        by_kind.setdefault(kind, []).append(position)
    batches = []
    for (*_, has_average), positions in by_kind.items():
        members = [parameters[position] for position in positions]
        used = sorted({of_each[position] for position in positions})
        groups = [used.index(of_each[position]) for position in positions]
        averages = None
        if has_average:
            averages = _ArrayUpdates([Target(each.average, []) for each in members], groups)
        weights = [
            Target(each.weights, [m.reshape(each.weights.shape) for m in each.moments])
            for each in members
        ]
        batches.append(_Batch(positions, _ArrayUpdates(weights, groups), averages, used))
    return batches


def _refuse_misfits(parameters: Sequence[Parameter], gradients: Sequence[Array]) -> NoReturn:
    for (key, weights, *_), gradient in zip(parameters, gradients, strict=True):
        found = [
            f"{getattr(each, 'shape', None)} {getattr(each, 'dtype', type(each).__name__)}"
            f" on {device_of(each)}"
            for each in (gradient, weights)
        ]
        if found[0] != found[1]:
            raise ValueError(f"the gradient of parameter {key} is {found[0]}, it is {found[1]}")
    raise ValueError("a gradient is no plain array of its parameter's device")


def _update(
    batches: Sequence[_Batch],
    parameters: Sequence[Parameter],
    gradients: Sequence[Array],
    settings: Sequence[Settings],
    distinct: Sequence[Settings],
) -> None:
    for batch in batches:
        backend, real = batch.weights.backend, batch.weights.real
        weights = [parameters[position].weights for position in batch.positions]
        given = zip(weights, _select(gradients, batch), _select(settings, batch), strict=True)
        prepared = [_prepared(backend, *each) for each in given]
        groups = [distinct[number] for number in batch.settings]
        rule = _RULES[groups[0].formula]
        scalars = [_scalars(each, real) for each in groups]
        if any(each.decay for each in groups):
            rule = decayed(rule)
            for numbers, each in zip(scalars, groups, strict=True):
                numbers["weight_decay"] = real(each.decay)
        batch.weights.apply(rule, prepared, scalars)
        if batch.averages is not None:
            new = [_weights_of_average(each.step, real) for each in groups]
            batch.averages.apply(_AVERAGE, weights, new)
    for gradient in gradients:
        gradient.fill(0)


def _select(items: Sequence[Any], batch: _Batch) -> Sequence[Any]:
    return [items[position] for position in batch.positions]


def _prepared(backend: Backend, weights: Array, gradient: Array, settings: Settings) -> Array:
    """Returns the gradient that the rule takes: with `l2`, and clipped."""
    if settings.l2 and not settings.l2_is_weight_decay:
        with backend.enter():
            gradient += settings.l2 * weights
    most = settings.grad_clip
    if not most:
        return gradient
    if backend.device is not Device.cpu:
        return clip_by_norm(gradient, most)
    flat = gradient.ravel(order="K")
    norm = math.sqrt(flat.dot(flat))
    if norm >= most:
        gradient *= most / norm
    return gradient


def _scalars(settings: Settings, real: type[np.floating[Any]]) -> dict[str, np.floating[Any]]:
    _, learn_rate, beta1, beta2, eps, *_, lr_scale, step = settings
    # Thinc's weights decay after the step: this is as much of it as the decay leaves.
    left = 1 - settings.decay
    if settings.formula == "SGD":
        return {"learning_rate": real(lr_scale * learn_rate * left)}
    averages = {"beta1": real(beta1), "beta2": real(beta2), "epsilon": real(eps)}
    if settings.formula == "Adam":
        rate = lr_scale * learn_rate * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        return {"step_size": real(rate * left), **averages}
    rate, is_rectified = _rate_of_r_adam(beta1, beta2, step + 1)
    return {
        "step_size": real(learn_rate * rate * left),
        **averages,
        "is_rectified": real(is_rectified),
    }


def _rate_of_r_adam(beta1: float, beta2: float, step: int) -> tuple[float, bool]:
    """Returns what the learning rate is times, and whether the root of squares divides the step.

    It is Thinc's RAdam: it counts one step more than there were, and leaves out `lr_scale`.
    """
    power = beta2**step
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * power / (1 - power)
    rate = 1 / (1 - beta1**step)
    if length < _ENOUGH:
        return rate, False
    variance = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return rate * math.sqrt((1 - power) * variance), True


def _weights_of_average(step: int, real: type[np.floating[Any]]) -> Scalars:
    new = 1 - min((1 + step) / (10 + step), _MOST_DECAY)
    return {"learning_rate": real(-new), "weight_decay": real(new)}
