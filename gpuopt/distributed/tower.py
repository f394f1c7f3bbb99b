"""TowerOptimizer: towers share a batch, and their gradients make one update."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

from gpuopt.backends import backend_for, to_device
from gpuopt.device import Device, device_of
from gpuopt.distributed.reduction import sum_gradients
from gpuopt.distributed.wrapper import OptimizerWrapper, check_optimizer
from gpuopt.optimizer import Optimizer
from gpuopt.step.pairs import Gradient
from gpuopt.step.replica_context import ReplicaContext, in_replica
from gpuopt.step.request import StepRequest, make_step, pass_on
from gpuopt.step.step import checked_global_step
from gpuopt.step.updates import pairs_to_sum
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable, as_variable


class Reduction(StrEnum):
    """How the losses of towers become one; values as of `tf.losses.Reduction`."""

    NONE = "none"
    SUM = "weighted_sum"
    MEAN = "weighted_mean"
    SUM_OVER_BATCH_SIZE = "weighted_sum_over_batch_size"
    SUM_BY_NONZERO_WEIGHTS = "weighted_sum_by_nonzero_weights"


class _Call(NamedTuple):
    """One call of a TowerOptimizer's `apply_gradients` in a tower, with checked pairs."""

    optimizer: TowerOptimizer
    request: StepRequest


class _Towers:
    """The calls of `apply_gradients` in the towers of one replicated call so far."""

    def __init__(self, number: int) -> None:
        self.calls: list[list[_Call]] = [[] for _ in range(number)]
        self.current = 0

    def apply_gradients(self, optimizer: Optimizer, request: StepRequest) -> None:
        """Refuses an optimizer without a TowerOptimizer; see `ReplicaContext.strategy`."""
        raise ValueError(
            "Please wrap optimizers with TowerOptimizer in order to use replicate with multiple "
            f"`devices`: {type(optimizer).__name__} was used bare, and would update "
            f"{len(self.calls)} times"
        )

    def collect(self, call: _Call) -> None:
        self.calls[self.current].append(call)

    def finish(self) -> None:
        """Sums the gradients of each call over the towers, and applies it once."""
        counts = [len(calls) for calls in self.calls]
        if len(set(counts)) > 1:
            raise ValueError(
                "towers must make the same optimizer calls; from the first tower to the last they "
                f"made {counts}"
            )
        together = list(zip(*self.calls, strict=True))
        for position, calls in enumerate(together):
            if any(call.optimizer is not calls[0].optimizer for call in calls):
                raise ValueError(
                    f"optimizer call {position} was made on a different TowerOptimizer in each "
                    "tower; make it once, outside the model function, so that it keeps its state"
                )
        summed = [_sum_by_variable(calls) for calls in together]
        for calls, pairs in zip(together, summed, strict=True):
            last = calls[-1]
            pass_on(last.optimizer._inner, last.request._replace(pairs=pairs))


class _ThisThread(threading.local):
    towers: _Towers | None = None
    has_been_used = False


_this_thread = _ThisThread()


class TowerOptimizer(OptimizerWrapper):
    """Gathers gradients over the towers of a function made by `replicate`, and applies them once.

    Make it outside the model function. In a tower, `apply_gradients` keeps the gradients and
    returns; when all towers have run, they are summed and `optimizer` applies them, so
    `global_step` grows by 1. Outside `replicate` it does what the optimizer inside does.
    """

    COLLECTION_FOR_GRAPH_STATES: ClassVar[str] = "replicate_model_fn_graph_states"
    """TensorFlow's name for where it keeps this state in a graph; only the name is here."""

    def __init__(self, optimizer_or_optimizer_fn: Optimizer | Callable[[], Optimizer]) -> None:
        """Wraps an optimizer.

        Args:
            optimizer_or_optimizer_fn: An optimizer, or a function without arguments that makes
                one; it is called once, when the optimizer is first needed.

        Raises:
            TypeError: it is neither.
        """
        if not callable(optimizer_or_optimizer_fn):
            check_optimizer(optimizer_or_optimizer_fn)
        # First, as another thread may save as soon as this optimizer is listed among the living.
        self._given = optimizer_or_optimizer_fn
        self._made: Optimizer | None = None
        super().__init__(False, type(self).__name__)

    @staticmethod
    def has_been_used() -> bool:
        """Returns whether this thread used a TowerOptimizer since a replicated call last began."""
        return _this_thread.has_been_used

    @property
    def _inner(self) -> Optimizer:
        with self.state.lock:
            if self._made is None:
                given = self._given
                self._made = check_optimizer(
                    given if isinstance(given, Optimizer) or not callable(given) else given()
                )
            return self._made

    def get_name(self) -> str:
        """Asks the optimizer inside; see `Optimizer.get_name`."""
        return self._inner.get_name()

    def compute_gradients(
        self, *args: Any, **kwargs: Any
    ) -> list[tuple[Gradient | None, Variable]]:
        """Asks the optimizer inside; see `Optimizer.compute_gradients`.

        In one of n towers, the loss is scaled by 1/n first, unless losses are summed.
        """
        _this_thread.has_been_used = True
        return super().compute_gradients(*args, **kwargs)

    def apply_gradients(  # type: ignore[override]  # as in TensorFlow: no aggregation to skip
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
    ) -> None:
        """Keeps the gradients until all towers have run; see `Optimizer.apply_gradients`.

        They are checked now, and must not change until then.
        """
        make_step(self, StepRequest(grads_and_vars, global_step, name))

    def _apply_request(self, request: StepRequest, **own: Any) -> None:
        _this_thread.has_been_used = True
        towers = _this_thread.towers
        if towers is None:
            pass_on(self._inner, request)
            return
        given, step = list(request.pairs), request.global_step
        # A tower may have no gradient at all. If no tower has any, the optimizer inside raises.
        has_gradient = not given or any(gradient is not None for gradient, _ in given)
        pairs = (
            pairs_to_sum(self, given, request.takes_wide)
            if has_gradient
            else [(None, as_variable(variable)) for _, variable in given]
        )
        step = None if step is None else checked_global_step(step)
        towers.collect(_Call(self, request._replace(pairs=pairs, global_step=step)))


def replicate(
    model_fn: Callable[..., Any],
    loss_reduction: Reduction | str = Reduction.SUM_BY_NONZERO_WEIGHTS,
    devices: Sequence[Device | str] | None = None,
) -> Callable[..., Any]:
    """Makes a function that runs `model_fn` on each device, on its share of a batch.

    Towers run one after the other on the calling thread, which does not wait for GPUs in between.
    Variables live where they were made; their gradients are brought there and summed in the order
    of the towers. Name one device several times for several logical towers on it.

    Args:
        model_fn: Takes parts of the batch, computes its loss, minimizes it with one or more
            TowerOptimizers, and returns the loss (or None). The tower's number is the `replica_id`
            of `gpuopt.step.replica_context`.
        loss_reduction: How `model_fn` reduces its own loss over its part of the batch. With
            Reduction.SUM, towers' losses are summed; otherwise averaged.
        devices: Where parts of the batch go; by default one tower, on the CPU.

    Returns:
        A function of the batch: arrays, or lists, tuples and dicts of arrays, which are all split
        along their first axis; anything that is no array goes to every tower as it is. It returns
        the sum of the (scaled) losses, or None if there are none.

        It raises ValueError, with nothing updated, if the batch cannot be divided evenly, if an
        optimizer is not wrapped in TowerOptimizer, or if towers make different optimizer calls.

    Raises:
        ValueError: `loss_reduction` is NONE or unknown, or there are no devices.
        DeviceUnavailableError: a device cannot be used.
    """
    if loss_reduction not in list(Reduction):
        raise ValueError(
            "loss_reduction must be one of "
            f"{[each.value for each in Reduction if each is not Reduction.NONE]}, got "
            f"{loss_reduction!r}"
        )
    reduction = Reduction(loss_reduction)
    if reduction is Reduction.NONE:
        raise ValueError(
            "Tower losses need to be reduced in some way, yet none reduction is specified."
        )
    places = [Device.parse(device) for device in (["cpu"] if devices is None else devices)]
    if not places:
        raise ValueError("replicate needs at least one device")
    for place in places:
        backend_for(place)

    def replicated(*args: Any, **kwargs: Any) -> Any:
        _this_thread.has_been_used = False
        if len(places) == 1:
            return model_fn(*_take_share(args, 0, places), **_take_share(kwargs, 0, places))
        if _this_thread.towers is not None:
            raise RuntimeError("a replicated function was called inside a tower of another")
        towers = _Towers(len(places))
        how: Any = "sum" if reduction is Reduction.SUM else "mean"
        losses = []
        _this_thread.towers = towers
        try:
            for tower in range(len(places)):
                towers.current = tower
                context = ReplicaContext(tower, len(places), how, strategy=towers)
                parts = _take_share(args, tower, places), _take_share(kwargs, tower, places)
                with in_replica(context), backend_for(places[tower]).enter():
                    loss = model_fn(*parts[0], **parts[1])
                    losses.append(None if loss is None else loss * context.loss_scale)
        finally:
            _this_thread.towers = None
        towers.finish()
        return None if any(loss is None for loss in losses) else _sum(losses)

    return replicated


def _take_share(batch: Any, tower: int, places: Sequence[Device]) -> Any:
    """Returns a tower's share of everything in a batch, on its device."""
    if isinstance(batch, dict):
        return {key: _take_share(value, tower, places) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_take_share(value, tower, places) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_take_share(value, tower, places) for value in batch)
    if isinstance(batch, Variable) or not getattr(batch, "shape", None):
        return batch
    size, number = batch.shape[0], len(places)
    if size % number:
        raise ValueError(
            f"Batch size {size} needs to be divisible by the number of devices, which is {number}."
        )
    share = size // number
    return to_device(batch[tower * share : (tower + 1) * share], places[tower])


def _sum(losses: Sequence[Any]) -> Any:
    """Adds up losses of any devices, on the first one's device."""
    device = device_of(losses[0])
    with backend_for(device).enter():
        return sum(
            loss if device_of(loss) == device else to_device(loss, device) for loss in losses
        )


def _sum_by_variable(calls: Sequence[_Call]) -> list[tuple[Gradient | None, Variable]]:
    """Sums gradients by variable, in order of first appearance; None counts as nothing."""
    by_variable: dict[Identity, tuple[Variable, list[Gradient]]] = {}
    for call in calls:
        for gradient, variable in call.request.pairs:
            _, gradients = by_variable.setdefault(variable.identity, (variable, []))
            if gradient is not None:
                gradients.append(gradient)
    return [
        (sum_gradients(gradients, variable.device) if gradients else None, variable)
        for variable, gradients in by_variable.values()
    ]
