"""Optimizers for Thinc and spaCy, in the place of Thinc's own.

A config names them; nothing has to be imported:

    [training.optimizer]
    @optimizers = "gpuopt.Adam.v1"

They take the arguments of Thinc's `Adam.v1`, `RAdam.v1` and `SGD.v1`, and make the same steps, to
rounding. `Model.finish_update` calls an optimizer once for each parameter: the first of these calls
updates all parameters that the others would, and these find it done. So a model is up to date when
`finish_update` returns, whether or not `step_schedules` is called. Every other call updates its own
parameter. Needs Thinc 8.3 or 9.1.
"""

# Without `from __future__ import annotations`: Thinc's configs evaluate the annotations.

import sys
from collections.abc import Sequence
from operator import is_
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

from thinc import optimizers as thinc_optimizers
from thinc.model import Model
from thinc.optimizers import ADAM_DEFAULTS, SGD_DEFAULTS

from gpuopt.atomic_file import replace_file
from gpuopt.backends import new_storage, to_device
from gpuopt.device import device_of
from gpuopt.interop.thinc_state import load_state, save_state
from gpuopt.interop.thinc_updates import (
    Array,
    Formula,
    Key,
    Parameter,
    Settings,
    Updates,
    is_same_memory,
)

# A number; a list or generator of numbers; or, in Thinc 9, a schedule.
Rate: TypeAlias = Any

_Call = tuple[Key, Array, Array]

# The loop that calls an optimizer once for each parameter of a model.
_FINISH_UPDATE = Model.finish_update.__code__


class Optimizer(thinc_optimizers.Optimizer):
    """Thinc's optimizer, whose steps gpuopt makes. See Thinc's for the arguments and attributes.

    `mom1`, `mom2`, `averages` and `nr_update` have Thinc's keys. `to_bytes` and `to_disk` save
    them, which Thinc's has no way to.
    """

    def __init__(self, learn_rate: Rate, **options: Any) -> None:
        super().__init__(learn_rate, **options)
        self._updates = Updates()
        self._done = _Done()
        # How often `step_schedules` was called.
        self._num_steps = 0

    def __repr__(self) -> str:
        """Shows the settings as they are now, by the names of the constructor's arguments."""
        settings = {
            "learn_rate": self.learn_rate,
            "L2": self.L2,
            "beta1": self.b1,
            "beta2": self.b2,
            "eps": self.eps,
            "grad_clip": self.grad_clip,
            "use_averages": self.averages is not None,
            "use_radam": self.use_radam,
            "L2_is_weight_decay": self.L2_is_weight_decay,
        }
        shown = ", ".join(f"{name}={_shown(value)}" for name, value in settings.items())
        return f"{type(self).__name__}({shown})"

    def __call__(
        self, key: Key, weights: Array, gradient: Array, *, lr_scale: float = 1.0
    ) -> tuple[Array, Array]:
        """Updates a parameter in place, and sets its gradient to 0.

        Args:
            key: The number of the parameter's model, and its name.
            weights: Of a floating-point type, in host memory or on a GPU.
            gradient: Of the weights' shape and dtype, on their device.
            lr_scale: What the learning rate is times.

        Returns:
            The weights and the gradient.

        Raises:
            ValueError: the gradient or a moment does not fit the weights.
            NotImplementedError: beta1 is 0, and beta2 is not.
        """
        caller = sys._getframe(1)
        if caller.f_code is _FINISH_UPDATE:
            if self._done.caller is not caller:
                calls = _calls_of(caller.f_locals["self"])
                self._make_step(calls, lr_scale)
                self._done = _Done(caller, calls)
            done = self._done.take(key)
            if done is not None:
                return done
        self._make_step([(key, weights, gradient)], lr_scale)
        return weights, gradient

    def step_schedules(self) -> None:
        super().step_schedules()
        self._num_steps += 1

    def to_bytes(self, *models: Any) -> bytes:
        """Returns the state: moments, averages, counts, and the position of the schedules.

        Args:
            models: Those that the optimizer has updated: `Model`s, or spaCy's pipelines. Thinc's
                keys change from process to process, and so a state has the places in these.

        Raises:
            ValueError: the optimizer has updated a parameter of another model.
        """
        return save_state(self, self._num_steps, models)

    def from_bytes(self, data: bytes, *models: Any) -> "Optimizer":
        """Takes over a state, and goes on as the saved run would have. Settings are not changed.

        Args:
            data: What `to_bytes` returned.
            models: Of the same structure as those that it was given, with their weights.

        Returns:
            This optimizer.

        Raises:
            ValueError: `data` is no such state or is damaged, it does not fit the models, or
                this optimizer is further in its schedules. Nothing has been changed.
        """
        num_steps = load_state(self, data, models, self._num_steps)
        while self._num_steps < num_steps:
            self.step_schedules()
        return self

    def to_disk(self, path: str | Path, *models: Any) -> None:
        """Writes what `to_bytes` returns to a file, which is replaced at once."""
        replace_file(Path(path), self.to_bytes(*models))

    def from_disk(self, path: str | Path, *models: Any) -> "Optimizer":
        """Does what `from_bytes` does with what `to_disk` has written."""
        return self.from_bytes(Path(path).read_bytes(), *models)

    def _make_step(self, calls: Sequence[_Call], lr_scale: float) -> None:
        """Makes a step of some parameters, each of which is named once."""
        parameters, gradients, settings = [], [], []
        numbers = self.learn_rate, self.b1, self.b2, self.eps, self.L2, self.grad_clip
        has_schedules = any(map(callable, numbers))
        now: Settings | None = None
        for key, weights, gradient in calls:
            if len(gradient) == 0:
                continue
            step = self.nr_update[key] + 1
            # Mostly the same for all.
            if now is None or has_schedules or now.step != step:
                now = self._settings(self._at(numbers, key), lr_scale, step)
            parameters.append(self._parameter(key, weights, now.formula))
            gradients.append(gradient)
            settings.append(now)
        if parameters:
            self._updates.apply(parameters, gradients, settings)
        for each in parameters:
            self.nr_update[each.key] += 1

    def _at(self, numbers: Sequence[Rate], key: Key) -> Sequence[float]:
        """Returns numbers, and those that are schedules' at this step, for a parameter."""
        return [
            each(self.step, key=key, last_score=self.last_score) if callable(each) else each
            for each in numbers
        ]

    def _settings(self, numbers: Sequence[float], lr_scale: float, step: int) -> Settings:
        learn_rate, beta1, beta2, eps, l2, grad_clip = numbers
        formula: Formula = "SGD"
        if self.use_radam:
            formula = "RAdam"
        elif beta1 > 0 and beta2 > 0:
            formula = "Adam"
        elif beta2 > 0:
            raise NotImplementedError(
                f"beta1={beta1} with beta2={beta2}: as in Thinc, both are above 0, or beta2 is 0"
            )
        decays = self.L2_is_weight_decay
        given = learn_rate, beta1, beta2, eps, l2, decays, grad_clip, lr_scale, step
        return Settings(formula, *given)

    def _parameter(self, key: Key, weights: Array, formula: Formula) -> Parameter:
        """Returns a parameter with its arrays: the same object as long as they are the same."""
        moments = () if formula == "SGD" else (self.mom1.get(key), self.mom2.get(key))
        average = None if self.averages is None else self.averages.get(key)
        known = self._updates.parameters.get(key)
        if (
            known is not None
            and (known.weights is weights or is_same_memory(known.weights, weights))
            and known.average is average
            and len(known.moments) == len(moments)
            and all(map(is_, known.moments, moments))
        ):
            return known
        if formula != "SGD":
            moments = tuple(_beside(each, key, weights) for each in (self.mom1, self.mom2))
        if self.averages is not None:
            average = _beside(self.averages, key, weights, weights.shape)
        known = self._updates.parameters[key] = Parameter(key, weights, moments, average)
        return known


class _Done:
    """The parameters of a `finish_update` that are up to date before they are named there.

    Attributes:
        caller: Its frame, until all are named. It is kept, so that no other can be it.
    """

    def __init__(self, caller: FrameType | None = None, calls: Sequence[_Call] = ()) -> None:
        self.caller = caller
        self._arrays = {key: (weights, gradient) for key, weights, gradient in calls}

    def __reduce__(self) -> Any:
        return _Done, ()

    def take(self, key: Key) -> tuple[Array, Array] | None:
        """Returns a parameter's arrays, once; None if it is to be updated."""
        arrays = self._arrays.pop(key, None)
        if not self._arrays:
            self.caller = None
        return arrays


def _shown(value: Rate) -> str:
    """Returns how a setting is shown: in Thinc 9, each number is a schedule."""
    if not callable(value):
        return repr(value)
    name = getattr(value, "name", type(value).__name__)
    return repr(value(0)) if name == "constant" else f"<schedule {name!r}>"


def _calls_of(model: Any) -> list[_Call]:
    """Lists what `finish_update` of a model calls its optimizer with, but for shims."""
    found = {
        (node.id, name): (node.get_param(name), node.get_grad(name))
        for node in model.walk()
        for name in node.param_names
        if node.has_grad(name)
    }
    return [(key, weights, gradient) for key, (weights, gradient) in found.items()]


def _beside(
    arrays: dict[Key, Array], key: Key, weights: Array, shape: tuple[int, ...] | None = None
) -> Array:
    """Returns the array that is kept beside a parameter: zeros if there is none yet."""
    found = arrays.get(key)
    if found is None:
        shape = (weights.size,) if shape is None else shape
        found = arrays[key] = new_storage(0, device_of(weights), weights.dtype, shape)
    elif found.size != weights.size:
        raise ValueError(
            f"parameter {key} has the shape {weights.shape}, and had {found.size} elements before: "
            "make another optimizer for another model"
        )
    elif device_of(found) is not device_of(weights):
        found = arrays[key] = to_device(found, device_of(weights))
    return found


def adam(
    learn_rate: Rate = ADAM_DEFAULTS["learn_rate"],
    *,
    L2: Rate = ADAM_DEFAULTS["L2"],
    beta1: Rate = ADAM_DEFAULTS["beta1"],
    beta2: Rate = ADAM_DEFAULTS["beta2"],
    eps: Rate = ADAM_DEFAULTS["eps"],
    grad_clip: Rate = ADAM_DEFAULTS["grad_clip"],
    L2_is_weight_decay: bool = bool(ADAM_DEFAULTS["L2_is_weight_decay"]),
    use_averages: bool = True,
) -> Optimizer:
    """Makes the optimizer of a config's "gpuopt.Adam.v1"; see Thinc's Adam."""
    return Optimizer(
        learn_rate,
        L2=L2,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        grad_clip=grad_clip,
        L2_is_weight_decay=L2_is_weight_decay,
        use_averages=use_averages,
    )


def r_adam(
    learn_rate: Rate = ADAM_DEFAULTS["learn_rate"],
    *,
    beta1: Rate = ADAM_DEFAULTS["beta1"],
    beta2: Rate = ADAM_DEFAULTS["beta2"],
    eps: Rate = ADAM_DEFAULTS["eps"],
    L2: Rate = ADAM_DEFAULTS["L2"],
    L2_is_weight_decay: bool = bool(ADAM_DEFAULTS["L2_is_weight_decay"]),
    grad_clip: Rate = ADAM_DEFAULTS["grad_clip"],
    use_averages: bool = True,
) -> Optimizer:
    """Makes the optimizer of a config's "gpuopt.RAdam.v1"; see Thinc's RAdam."""
    return Optimizer(
        learn_rate,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        L2=L2,
        L2_is_weight_decay=L2_is_weight_decay,
        grad_clip=grad_clip,
        use_averages=use_averages,
        use_radam=True,
    )


def sgd(
    learn_rate: Rate,
    *,
    L2: Rate = SGD_DEFAULTS["L2"],
    grad_clip: Rate = SGD_DEFAULTS["grad_clip"],
    L2_is_weight_decay: bool = bool(SGD_DEFAULTS["L2_is_weight_decay"]),
    use_averages: bool = True,
) -> Optimizer:
    """Makes the optimizer of a config's "gpuopt.SGD.v1"; see Thinc's SGD."""
    return Optimizer(
        learn_rate,
        L2=L2,
        grad_clip=grad_clip,
        L2_is_weight_decay=L2_is_weight_decay,
        beta1=0.0,
        beta2=0.0,
        use_averages=use_averages,
    )
