"""ModelAverageOptimizer: workers whose variables are averaged after every few steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from gpuopt.backends import backend_for
from gpuopt.backends.backend import compute_type
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.optimizer import Optimizer
from gpuopt.variables.operators import reading
from gpuopt.wrappers.local_variables import LocalVariable, LocalVariables
from gpuopt.wrappers.periodic import Assignments, PeriodicWrapper


class ModelAverageCustomGetter(LocalVariables):
    """Makes variables for `ModelAverageOptimizer`, each with a global average.

    Beside a worker's variable "w" there is "global_center_variable/w", its average over the workers
    when they last met.
    """


class ModelAverageOptimizer(PeriodicWrapper):
    """Workers train by themselves, and go on from their average after every `interval_steps` steps.

    Each worker's optimizer keeps its slots: they are not averaged. The average is computed in
    float32 for 16-bit variables. The global step, which must be given, counts averages.

        def train(communicator):
            getter = ModelAverageCustomGetter(communicator=communicator)
            w = getter.variable(np.zeros(10, np.float32), name="w")
            is_chief = communicator.rank == 0
            optimizer = ModelAverageOptimizer(
                AdamOptimizer(), communicator.size, is_chief, getter, interval_steps=20
            )
            for batch in batches_of(communicator.rank):
                optimizer.minimize(lambda: loss(w, batch), global_step, [w])

    All variables, with averages and `local_step`, are `global_variables()`: a `Saver` saves them;
    `state_dict` leaves them out.
    """

    _counts_workers: ClassVar[bool] = False
    _needs_global_step: ClassVar[bool] = True

    def __init__(
        self,
        opt: Optimizer,
        num_worker: int,
        is_chief: bool,
        ma_custom_getter: ModelAverageCustomGetter,
        interval_steps: int = 100,
        use_locking: bool = True,
        name: str = "ModelAverageOptimizer",
    ) -> None:
        """Wraps `opt`.

        Args:
            opt: Makes the local steps; its state is this optimizer's.
            num_worker: How many workers there are: the ranks of the getter's communicator.
            is_chief: Whether this worker is rank 0.
            ma_custom_getter: What makes the variables.
            interval_steps: The number of local steps between two averages.
            use_locking: See `Optimizer`.
            name: See `Optimizer`.

        Raises:
            TypeError: `opt` is no optimizer, the getter is another one, or a number is none.
            ValueError: a number is less than 1, the getter's communicator has not `num_worker`
                ranks, `is_chief` is not said of rank 0, or `opt` is for workers itself.
        """
        super().__init__(
            opt,
            num_worker,
            ma_custom_getter,
            ModelAverageCustomGetter,
            ("interval_steps", interval_steps),
            use_locking,
            name,
        )
        self._check_worker(None, is_chief)

    def _exchange(self, trained: Sequence[LocalVariable]) -> Assignments:
        return ignore_fp_warnings(self._average, trained)

    def _average(self, trained: Sequence[LocalVariable]) -> Assignments:
        values = []
        for each in trained:
            variable = each.variable
            with reading(variable), backend_for(variable.device).enter():
                values.append(variable.storage.astype(compute_type(variable.dtype)))
        assignments: Assignments = []
        sums = self._communicator.batch_all_reduce(values)
        for each, total in zip(trained, sums, strict=True):
            with backend_for(each.variable.device).enter():
                mean = (total / total.dtype.type(self._num_worker)).astype(each.variable.dtype)
            assignments += [(each.center, mean), (each.variable, mean)]
        return assignments
