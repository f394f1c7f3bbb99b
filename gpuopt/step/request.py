"""StepRequest: the arguments of one step, from `apply_gradients` to the updates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple, Protocol

from gpuopt.variables.identity import Identity

# The variables that a call lists; None without a list.
Listed = frozenset[Identity] | None


class Copies(NamedTuple):
    """The copies of mirrored variables that a step updates, by equal gradients.

    Attributes:
        number: How many each variable has. In the step's list they follow each other.
        devices_are_alike: Whether each device, a GPU, has one of the copies of every variable: then
            it can compute by itself what all gradients say together.
        identities: All of them.
    """

    number: int = 1
    devices_are_alike: bool = False
    identities: frozenset[Identity] = frozenset()


class StepRequest(NamedTuple):
    """One step that an optimizer is to make.

    Attributes:
        pairs: (gradient, variable) pairs; see `Optimizer.apply_gradients`, also for the next three.
        global_step: The variable that counts steps, as the caller gave it.
        name: The step's name in profilers.
        skips_aggregation: Whether a replica updates its own variables by its own gradients.
        additions: What wrappers add to the step, each an `Addition`: the closest to the optimizer
            comes first.
        takes_wide: Whether gradients may have the type that rules compute in.
        loss_scales: By each `LossScaleOptimizer` among the additions, what the loss of its
            gradients was multiplied by, a number or a `DeviceScale`; and the key of
            `DeviceScaling.prepare`.
        decides: The `DeviceScaling` that may have a GPU decide about the step; None if the host
            must.
        decaying: The variables that decay in this step, whichever the optimizer's own are; None if
            none are listed.
        copies: What it updates if it is the step of all replicas of a process. A user's own code
            may have chosen other variables.
    """

    pairs: Any
    global_step: Any = None
    name: str | None = None
    skips_aggregation: bool = False
    additions: tuple[Any, ...] = ()
    takes_wide: bool = False
    loss_scales: Mapping[Any, tuple[Any, Any]] = MappingProxyType({})
    decides: Any = None
    decaying: Listed = None
    copies: Copies = Copies()


class RequestedOptimizer(Protocol):
    """The part of an optimizer that requests go through."""

    @property
    def owner_of_state(self) -> Any: ...

    def apply_gradients(self, grads_and_vars: Any, *arguments: Any, **options: Any) -> None: ...

    def _apply_request(self, request: StepRequest, **own: Any) -> None:
        """Makes the step.

        Args:
            request: The step.
            **own: Arguments that an `apply_gradients` has beside those of `Optimizer`'s.
        """


class _Passing(NamedTuple):
    """A request that is on its way through a user's own code.

    Attributes:
        owner: The optimizer whose step it is, as far as that is known.
        request: The request, but for its pairs: the user's code passes these on, or others.
    """

    owner: Any
    request: StepRequest


class _ThisThread(threading.local):
    """What cannot be an argument: TensorFlow's `apply_gradients` has none for it.

    Attributes:
        passing: Set while an `apply_gradients` of a user's own runs, until that of this package
            which it calls. There is none in a step, so that steps inside a step have none either.
    """

    passing: _Passing | None = None


# Public, because each step reads it: a function call would cost time.
this_thread = _ThisThread()


def make_step(
    optimizer: RequestedOptimizer,
    request: StepRequest,
    make: Callable[..., None] | None = None,
    **own: Any,
) -> None:
    """Does what `apply_gradients` of this package was called for.

    Args:
        optimizer: Whose method it is.
        request: Its arguments.
        make: Given the request, makes the step; by default the optimizer's `_apply_request`.
        **own: See `RequestedOptimizer._apply_request`.
    """
    make, passing = make or optimizer._apply_request, this_thread.passing
    if passing is None:
        make(request, **own)
        return
    request = joined(optimizer, request)
    try:
        this_thread.passing = None
        make(request, **own)
    finally:
        this_thread.passing = passing


def joined(optimizer: RequestedOptimizer, request: StepRequest) -> StepRequest:
    """Returns a request with what has come for it through a user's own code."""
    passing = this_thread.passing
    if passing is None:
        return request
    owner, outer = passing
    if optimizer.owner_of_state is not owner:
        # The user's code makes a step of another optimizer: maybe of the one that a wrapper of the
        # user's own has inside.
        if not is_overridden(owner, "apply_gradients"):
            return request
        outer = outer._replace(takes_wide=False, decaying=None)
    return request._replace(
        additions=outer.additions,
        takes_wide=outer.takes_wide,
        loss_scales=outer.loss_scales,
        decaying=outer.decaying if request.decaying is None else request.decaying,
        copies=outer.copies,
    )


def pass_on(
    optimizer: RequestedOptimizer,
    request: StepRequest,
    method: Callable[..., None] | None = None,
) -> None:
    """Has an optimizer make a step: by its own `apply_gradients` if a user wrote that.

    Args:
        optimizer: The optimizer.
        request: The step.
        method: Called in the place of its `apply_gradients`: a base class's.
    """
    if not is_overridden(optimizer, "apply_gradients"):
        optimizer._apply_request(request)
        return
    # Only then: optimizers that TensorFlow's users wrote do not all take it.
    options = {"skip_gradients_aggregation": True} if request.skips_aggregation else {}
    name = [] if request.name is None else [request.name]
    method = method or optimizer.apply_gradients
    pairs = request.pairs
    if isinstance(pairs, Iterator):  # read here, it may make steps, which take nothing of this one
        pairs = list(pairs)
    arguments = pairs, request.global_step, *name
    through_users_code(optimizer, request, partial(method, *arguments, **options))


def through_users_code(
    optimizer: RequestedOptimizer, request: StepRequest, call: Callable[[], None]
) -> None:
    """Calls code that may be a user's own, and that calls `apply_gradients` of this package.

    Args:
        optimizer: The optimizer whose method it is.
        request: What the step is to have, beside the arguments that it is given there.
        call: The code.
    """
    outer = this_thread.passing
    try:
        this_thread.passing = _Passing(optimizer.owner_of_state, request)
        call()
    finally:
        this_thread.passing = outer


def is_overridden(optimizer: Any, method: str) -> bool:
    """Whether a method is a user's own, or calls one that is."""
    for names in (vars(optimizer), *map(vars, type(optimizer).__mro__)):
        if method in names:
            function = names[method]
            # Not by `__module__`, which functools.wraps copies to a user's function. And a method
            # of an object, even of this package, is no function.
            if not isinstance(function, FunctionType):
                return True
            if not str(function.__globals__.get("__name__")).startswith("gpuopt."):
                return True
    return False
