"""AGNOptimizer: workers' gradients, summed over several steps, move a common center."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.backends.backend import compute_type
from gpuopt.distributed.first_rank import broadcast_all
from gpuopt.distributed.wrapper import inner_optimizers
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.optimizer import Optimizer
from gpuopt.step.additions import Forget
from gpuopt.step.ledger import Ledger
from gpuopt.step.pairs import Gradient
from gpuopt.step.request import StepRequest, pass_on
from gpuopt.step.updates import Updates
from gpuopt.variables.gate import writing
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.operators import reading
from gpuopt.variables.variable import Variable
from gpuopt.wrappers.base import StepWrapper
from gpuopt.wrappers.local_variables import LocalVariable, LocalVariables, copies_of
from gpuopt.wrappers.periodic import Assignments, PeriodicWrapper


class AGNCustomGetter(LocalVariables):
    """Makes variables for `AGNOptimizer`, each with a global center and a sum of gradients.

    Beside a worker's variable "w" there are "global_center_variable/w", which the workers have in
    common, and "grad_variable/w", the sum of the worker's gradients since it last moved the center.
    """

    _companion_kind = "grad_variable"

    def initial_companion(self, center: Any) -> Any:
        return np.zeros(center.shape, center.dtype)


class AGNOptimizer(PeriodicWrapper):
    """Accumulated gradient normalization (Hermans, Spanakis & Moeckel 2017).

    A worker trains by itself, and sums its gradients. After every `communication_period` local
    steps the center makes one step of the worker's optimizer, by the sum divided by
    `communication_period`; the worker goes on from the center, with a sum of 0.

    Workers come in the order of their ranks, and each moves the center that the one before has
    moved: TensorFlow's workers come in any order, and here it is always this one, for the same
    result in each run. An exchange sends the centers, their slots, and their moving averages if
    `optimizer` keeps some, once for each worker.

    One optimizer makes a worker's local steps and its steps of the center: so these have slots of
    their own, and Adam's powers of beta in common, as in TensorFlow. The powers are a worker's own.
    IndexedSlices are summed as arrays.

        def train(communicator):
            getter = AGNCustomGetter(communicator=communicator)
            w = getter.variable(np.zeros(10, np.float32), name="w")
            optimizer = AGNOptimizer(AdamOptimizer(), communicator.size, getter)
            for batch in batches_of(communicator.rank):
                optimizer.minimize(lambda: loss(w, batch), global_step, [w])

    The global step counts each worker's steps of the center. All variables, with centers, sums and
    `local_step`, are `global_variables()`: a `Saver` saves them; `state_dict` leaves them out, but
    for the centers' slots.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_worker: int,
        custom_getter: AGNCustomGetter,
        communication_period: int = 10,
        use_locking: bool = True,
        name: str = "AGNOptimizer",
    ) -> None:
        """Wraps `optimizer`.

        Args:
            optimizer: Makes the steps; its state is this optimizer's.
            num_worker: How many workers there are: the ranks of the getter's communicator.
            custom_getter: What makes the variables.
            communication_period: The number of local steps between two exchanges.
            use_locking: See `Optimizer`.
            name: See `Optimizer`.

        Raises:
            TypeError: `optimizer` is none, the getter is another one, or a number is no integer.
            ValueError: a number is less than 1, the getter's communicator has not `num_worker`
                ranks, or `optimizer` is for workers itself.
        """
        super().__init__(
            optimizer,
            num_worker,
            custom_getter,
            AGNCustomGetter,
            ("communication_period", communication_period),
            use_locking,
            name,
        )

    @property
    def _what_is_added(self) -> str:
        return "sums of gradients"

    def _prepare_updates(self, optimizer: Any, updates: Updates) -> tuple[Updates, Forget]:
        super()._prepare_updates(optimizer, updates)
        # As in TensorFlow, from the beginning: checkpoints hold the same slots in every step.
        centers = [self._getter.center(variable) for variable in updates.variables()]
        state = optimizer.state
        created = state.collect_created(lambda: optimizer._create_slots(centers))
        return updates, lambda devices: state.forget(created, devices)

    def _written_beside(self, variables: Sequence[Variable]) -> Iterable[Variable]:
        return [_sum_of(self._getter.find(variable)) for variable in variables]

    def _before_update(self, updates: Updates, ledger: Ledger) -> None:
        # Before: a gradient may be the memory of a variable that the step updates.
        super()._before_update(updates, ledger)
        with reading(*updates.read):
            for gradient, variable in updates.pairs():
                ignore_fp_warnings(_add, gradient, _sum_of(self._getter.find(variable)), ledger)

    def _exchange(self, trained: Sequence[LocalVariable]) -> Assignments:
        if not trained:
            return []
        centers = [each.center for each in trained]
        own = [each for each in trained if each.number in self._trained]
        with writing():
            # Those that only other workers have trained lack slots, and averages.
            self.owner_of_state._create_slots(centers)
            beside = self._kept_beside(centers)
        seen: list[Any] = []
        for rank in range(self._num_worker):
            if rank == self._communicator.rank:
                self._step_center(own)
                seen = copies_of(centers)
            if self._num_worker > 1:
                self._take_over([*centers, *beside], rank)
        return [
            *zip((each.variable for each in trained), seen, strict=True),
            *((_sum_of(each), np.zeros(each.center.shape, each.center.dtype)) for each in trained),
        ]

    def _step_center(self, own: Sequence[LocalVariable]) -> None:
        """Has the centers make a step by this worker's sums."""
        pairs = [(ignore_fp_warnings(_mean_of, each, self._period), each.center) for each in own]
        if not pairs:
            return
        # Without what is added to the worker's own steps. The number counts nothing; some
        # optimizers want to know how late it is.
        pass_on(self._inner, StepRequest(pairs, np.array(int(self._local_step))))

    def _kept_beside(self, centers: Sequence[Variable]) -> list[Variable]:
        """Lists the centers' slots, and what wrappers keep beside them, as moving averages."""
        state = self.owner_of_state.state
        slots = [slot for center in centers for slot in state.slots_of(center)]
        wrappers = [each for each in inner_optimizers(self._inner) if isinstance(each, StepWrapper)]
        return slots + [v for each in wrappers for v in each._variables_beside(centers)]

    def _take_over(self, taken: Sequence[Variable], rank: int) -> None:
        """Has variables become those of a rank."""
        values = broadcast_all(self._communicator, copies_of(taken), rank)
        if rank != self._communicator.rank:
            with writing():
                for variable, value in zip(taken, values, strict=True):
                    variable.assign(value)


def _sum_of(local: LocalVariable) -> Variable:
    assert local.companion is not None
    return local.companion


def _mean_of(local: LocalVariable, period: int) -> Any:
    total = _sum_of(local)
    real, backend = compute_type(total.dtype), backend_for(total.device)
    with reading(total), backend.enter():
        mean = total.storage.astype(real) / real(period)
        return backend.xp.asarray(mean.astype(total.dtype))


def _add(gradient: Gradient, total: Variable, ledger: Ledger) -> None:
    """Adds a gradient to a sum, unless a GPU refuses the step's rows."""
    if not total.size:
        return
    real, backend = compute_type(total.dtype), backend_for(total.device)
    rows: Any = ...
    with reading(total), backend.enter():
        if isinstance(gradient, IndexedSlices):
            rows = gradient.indices
            if total.device in ledger.records:
                # The GPU may be about to find some that are not there.
                rows = backend.xp.clip(rows, 0, total.shape[0] - 1)
            gradient, rows = backend.sum_duplicate_rows(gradient.values, rows)
        old = total.storage[rows]
        new = (old.astype(real) + gradient.astype(real)).astype(total.dtype)
        new = ledger.unless_refused(total.device, new, old)
    total[rows] = new
