"""ElasticAverageOptimizer: workers drawn towards a common center."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.backends.backend import compute_type
from gpuopt.checkpoint import Saver
from gpuopt.device import device_of
from gpuopt.distributed.first_rank import broadcast_all
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.optimizer import Optimizer
from gpuopt.step.pairs import Gradient
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.operators import reading, storage_of
from gpuopt.variables.scalars import as_scalar
from gpuopt.variables.variable import Variable, as_variable, checked_list
from gpuopt.wrappers.base import checked_number
from gpuopt.wrappers.local_variables import LocalVariable, LocalVariables, copies_of
from gpuopt.wrappers.periodic import Assignments, PeriodicWrapper


class ElasticAverageCustomGetter(LocalVariables):
    """Makes variables for `ElasticAverageOptimizer`, each with two centers.

    Beside a worker's variable "w" there are "global_center_variable/w", which the workers have in
    common, and "local_center_variable/w", what the worker has last seen of it.
    """

    _companion_kind = "local_center_variable"


class ElasticAverageOptimizer(PeriodicWrapper):
    """Workers train by themselves, drawn towards a common center (Zhang, Choromanska & LeCun 2015).

    The gradient of `rho / 2 * |w - local_center|^2` is added to the loss's. After every
    `communication_period` local steps, a worker and the center move towards each other:

        local_center = center
        difference = w - center
        w -= moving_rate * difference
        center += moving_rate * difference

    Workers come in the order of their ranks, and each meets the center that the one before has
    moved: TensorFlow's workers come in any order, and here it is always this one, for the same
    result in each run. An exchange sends the variables once for each worker. With
    `synchronous=True` all workers meet the same center, which then moves by the sum of their
    `moving_rate * difference` (the paper's synchronous form): the variables are sent once.

        def train(communicator):
            getter = ElasticAverageCustomGetter(communicator=communicator)
            w = getter.variable(np.zeros(10, np.float32), name="w")
            optimizer = ElasticAverageOptimizer(
                MomentumOptimizer(0.1, 0.9), communicator.size, getter
            )
            for batch in batches_of(communicator.rank):
                optimizer.minimize(lambda: loss(w, batch), global_step, [w])

    The global step counts each worker's exchanges. All variables, with centers and `local_step`,
    are `global_variables()`: a `Saver` saves them; `state_dict` leaves them out.
    """

    # TensorFlow's choice of the paper's beta, num_worker * moving_rate * communication_period.
    BETA: ClassVar[float] = 0.9

    def __init__(
        self,
        opt: Optimizer,
        num_worker: int,
        ea_custom_getter: ElasticAverageCustomGetter,
        communication_period: int = 10,
        moving_rate: float | None = None,
        rho: float | None = None,
        use_locking: bool = True,
        synchronous: bool = False,
        name: str = "ElasticAverageOptimizer",
    ) -> None:
        """Wraps `opt`.

        Args:
            opt: Makes the local steps; its state is this optimizer's.
            num_worker: How many workers there are: the ranks of the getter's communicator.
            ea_custom_getter: What makes the variables.
            communication_period: The number of local steps between two exchanges.
            moving_rate: How far a worker and the center move towards each other, above 0 and up to
                1; by default `0.9 / communication_period / num_worker`.
            rho: How strongly gradients draw towards the center that was last seen; by default
                `moving_rate` divided by the learning rate of `opt`.
            use_locking: See `Optimizer`.
            synchronous: All workers meet the same center.
            name: See `Optimizer`.

        Raises:
            TypeError: `opt` is no optimizer, the getter is another one, or a number is none.
            ValueError: a number is out of range, the getter's communicator has not `num_worker`
                ranks, `opt` is for workers itself, or has no learning rate and `rho` is not given.
        """
        super().__init__(
            opt,
            num_worker,
            ea_custom_getter,
            ElasticAverageCustomGetter,
            ("communication_period", communication_period),
            use_locking,
            name,
        )
        if moving_rate is None:
            moving_rate = self.BETA / self._period / self._num_worker
        self._moving_rate = checked_number("moving_rate", moving_rate)
        if not 0 < self._moving_rate <= 1:
            raise ValueError(f"moving_rate must be above 0 and up to 1, got {moving_rate!r}")
        self._rho = None if rho is None else checked_number("rho", rho)
        if self._rho is None:
            self._rho_now()
        elif not 0 <= self._rho < np.inf:
            raise ValueError(f"rho must be finite and not negative, got {rho!r}")
        self._synchronous = synchronous
        if synchronous:  # the center moves by the rate on all ranks
            self._exchange_settings = f", synchronous, with moving_rate {self._moving_rate}"

    def compute_gradients(
        self,
        loss: Any,
        var_list: Any = None,
        gate_gradients: int = Optimizer.GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
    ) -> list[tuple[Gradient | None, Variable]]:
        """Computes the gradients of the loss and of the distance to the center.

        Args:
            loss: See `Optimizer.compute_gradients`, also for the other arguments. The distance is
                added once, also to a loss that is an array.
            var_list: Likewise.
            gate_gradients: Likewise.
            aggregation_method: Likewise.
            colocate_gradients_with_ops: Likewise.
            grad_loss: Likewise; a scalar multiplies the distance's gradient, too.

        Returns:
            Pairs as there, without None. IndexedSlices get a row for each row of the variable.

        Raises:
            ValueError: a variable was not made by the custom getter; or see there.
        """
        pairs = super().compute_gradients(
            loss,
            var_list,
            gate_gradients,
            aggregation_method,
            colocate_gradients_with_ops,
            grad_loss,
        )
        rho = self._rho_now()
        if grad_loss is not None and not np.shape(grad_loss):
            rho *= float(as_scalar(grad_loss, "grad_loss"))
        return [(ignore_fp_warnings(self._drawn, gradient, v, rho), v) for gradient, v in pairs]

    def swapping_saver(
        self, var_list: Any = None, name: str = "swapping_saver", **kwargs: Any
    ) -> Saver:
        """Makes a Saver of the global centers under the names of the workers' variables.

        A plain `Saver` restores such a checkpoint's centers as weights, as for evaluation.

        Args:
            var_list: A list of variables, or a mapping from names to them; by default all that the
                custom getter has made. Those without a center are saved themselves.
            name: Accepted as in TensorFlow; nothing here is named after it.
            **kwargs: Other arguments of `Saver`.

        Raises:
            RuntimeError: the custom getter has made no variable.
            TypeError, ValueError: see `Saver`.
        """
        centers = {each.variable: each for each in self._getter.made()}
        if not centers:
            raise RuntimeError(
                "the swapping_saver needs variables: make them by "
                "ElasticAverageCustomGetter.variable first"
            )
        if var_list is None:
            var_list = list(centers)
        if not isinstance(var_list, Mapping):
            listed = [as_variable(each) for each in checked_list(var_list, "var_list")]
            var_list = {centers[v].name if v in centers else v.name: v for v in listed}
        swapped = {
            name: centers[v].center if isinstance(v, Variable) and v in centers else v
            for name, v in var_list.items()
        }
        return Saver(swapped, **kwargs)

    def _exchange(self, trained: Sequence[LocalVariable]) -> Assignments:
        return ignore_fp_warnings(self._move, trained)

    def _move(self, trained: Sequence[LocalVariable]) -> Assignments:
        move = self._move_together if self._synchronous else self._move_in_turn
        centers = copies_of(each.center for each in trained)
        seen, differences, centers = move([each.variable for each in trained], centers)
        new = _moved([each.variable for each in trained], -self._moving_rate, differences)
        return [
            *zip((each.variable for each in trained), new, strict=True),
            *zip((each.center for each in trained), centers, strict=True),
            *zip((_local_center(each) for each in trained), seen, strict=True),
        ]

    def _move_together(self, variables: list[Variable], centers: list[Any]) -> _Move:
        differences = _differences(variables, centers)
        sums = self._communicator.batch_all_reduce(differences)
        return centers, differences, _moved(centers, self._moving_rate, sums)

    def _move_in_turn(self, variables: list[Variable], centers: list[Any]) -> _Move:
        seen, differences = centers, []
        for rank in range(self._communicator.size):
            if rank == self._communicator.rank:
                seen, differences = centers, _differences(variables, centers)
                centers = _moved(seen, self._moving_rate, differences)
            centers = broadcast_all(self._communicator, centers, rank)
        return seen, differences, centers

    def _rho_now(self) -> float:
        if self._rho is not None:
            return self._rho
        owner = self.owner_of_state
        rate = getattr(owner, "hyperparameters", {}).get("learning_rate")
        if rate is None:
            rate = getattr(owner, "_learning_rate", None)
        if rate is None:
            raise ValueError(
                f'rho must be given: "{owner.get_name()}" has no learning rate that is known'
            )
        learning_rate = float(as_scalar(self._call_if_callable(rate), "learning_rate"))
        if not 0 < learning_rate < np.inf:
            raise ValueError(
                f"rho must be given: by default it is moving_rate divided by the learning rate, "
                f"which is {learning_rate}"
            )
        return self._moving_rate / learning_rate

    def _drawn(self, gradient: Gradient | None, variable: Variable, rho: float) -> Gradient:
        """Adds the gradient of the distance to the center that was last seen."""
        center = _local_center(self._getter.find(variable))
        backend = backend_for(variable.device)
        with reading(variable, center), backend.enter():
            [difference] = _differences([variable], [center.storage])
            force = (difference.dtype.type(rho) * difference).astype(variable.dtype)
            if gradient is None:
                return force
            if not isinstance(gradient, IndexedSlices):
                return backend.xp.asarray(gradient + force)
            values = backend.xp.concatenate([gradient.values, force])
            rows = backend.xp.arange(variable.shape[0], dtype=gradient.indices.dtype)
            rows = backend.xp.concatenate([gradient.indices, rows])
            return IndexedSlices(values, rows, variable.shape)


# The centers that this worker has seen, how far it is from them, and the centers afterwards.
_Move = tuple[list[Any], list[Any], list[Any]]


def _differences(variables: Sequence[Variable], centers: Sequence[Any]) -> list[Any]:
    """Returns each variable's difference from its center, in the type that rules compute in."""
    differences = []
    for variable, center in zip(variables, centers, strict=True):
        real, backend = compute_type(variable.dtype), backend_for(variable.device)
        with reading(variable), backend.enter():
            difference = variable.storage.astype(real) - center.astype(real)
            differences.append(backend.xp.asarray(difference))
    return differences


def _moved(values: Sequence[Any], rate: float, differences: Sequence[Any]) -> list[Any]:
    """Returns `value + rate * difference` of each array or variable, in its own type."""
    moved = []
    for value, difference in zip(values, differences, strict=True):
        real, backend = difference.dtype.type, backend_for(device_of(difference))
        with reading(value), backend.enter():
            new = storage_of(value).astype(real) + real(rate) * difference
            moved.append(backend.xp.asarray(new.astype(value.dtype)))
    return moved


def _local_center(local: LocalVariable) -> Variable:
    assert local.companion is not None
    return local.companion
