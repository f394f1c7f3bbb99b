"""The updates of one step, by hooks that get one variable each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.backends.backend import Scalars, compute_type
from gpuopt.device import Device
from gpuopt.state.counts import counts_of
from gpuopt.state.state import Created, State
from gpuopt.step.nonfinite import first_nonfinite
from gpuopt.step.overlap import Written, refuse_shared_memory
from gpuopt.step.pairs import Gradient, as_pairs, checked_pairs
from gpuopt.step.request import StepRequest
from gpuopt.step.user_code import call_user_code
from gpuopt.step.wide_gradients import GradientTypes, narrowed, types_of, unscaled, widened
from gpuopt.variables.identity import Identity
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable

Pair = tuple[Gradient, Variable]


class Decider(Protocol):
    """Has a GPU decide whether one step is made, and counts the step. `Ledger.call` calls it."""

    def begin(self, updates: Any) -> None:
        """Called before the GPU is given any work; raises late errors of earlier steps.

        From then on, `updates.measure` has the GPU decide.
        """

    def promise(self, updates: Any) -> None:
        """Called after all launches; the count follows when the decision has arrived."""


class Updates(Protocol):
    """The updates of one step, or of a part of it.

    They are checked by `check`, and then made in the passes `measure`, `update` and `follow`.

    Attributes:
        has_rows_on_a_gpu: Whether a sparse gradient's rows must be checked by a GPU.
        created: What `create_slots` has made.
        forgets: Called, if the step is refused, with the devices that refuse it: they take back
            what it has made besides. None stands for all devices.
        read: The gradients that are Variables: all passes are inside `reading` of them.
        clips: How gradients are clipped, and what is measured for it; None if there is no `measure`
            to be called.
        is_followed: Whether there is a `follow` to be called.
        gpu_decides: What has a GPU decide whether the step is made; None if the host decides.
        request: The step's.
        is_planned: Whether all is made and planned that a step of these variables needs.
        fixed_by: The numbers that `fix_scalars` has read, if the step has such of its own.
        unscaled_by: What gradients are still to be multiplied by, if they are to be measured; else
            None.
    """

    gpu_decides: Decider | None = None
    fixed_by: Mapping[Identity, Any] | None = None
    request: StepRequest
    is_planned: bool = False
    has_rows_on_a_gpu: bool
    created: list[Created]
    forgets: list[Callable[[Collection[Device] | None], None]]
    read: list[Variable]

    @property
    def clips(self) -> Any:
        return None

    @property
    def is_followed(self) -> bool:
        return False

    @property
    def unscaled_by(self) -> float | None:
        return None

    def pairs(self) -> Sequence[Pair]:
        """Returns the (gradient, variable) pairs, without those of None."""

    def variables(self) -> Sequence[Variable]:
        """Returns the variables of these pairs, in any order; gradients are not looked at."""

    def sparse_pairs(self) -> Sequence[Pair]:
        """Returns the pairs whose gradient is IndexedSlices."""

    def identities(self) -> Iterable[Identity]:
        """Returns the variables' identities."""

    @property
    def num_elements(self) -> int:
        """About how many elements of variables are written."""

    def devices(self) -> Collection[Device]:
        """Returns the devices that are written to, after `create_slots`."""

    def refuse_shared_memory(self, counter: Variable | None) -> None:
        """Raises ValueError if memory would be written twice.

        Args:
            counter: The variable that counts steps, which is written, too.
        """

    def create_slots(self, of_part: bool = False) -> None:
        """Makes the slots that the variables still lack.

        Args:
            of_part: Whether these are a part of a step, whose other variables come later.
        """

    def fix_scalars(self) -> None:
        """Has the optimizer compute what its rule is given in this step."""

    def check(self) -> None:
        """Raises what does not fit, as user code may have it since these were made.

        Called after all user code that runs before the first write.
        """

    def must_check_first(self) -> bool:
        """Whether an update would write even after a GPU has refused rows."""

    def measure(self) -> None:
        """Has devices measure gradients, and decide about the step if a GPU is to."""
        return

    def update(self) -> list[Any]:
        """Writes what was checked; returns what `_finish` is given."""

    def follow(self) -> None:
        """Writes what follows the variables: constraints, and averages that rules do not move."""
        return

    def written(self) -> tuple[list[str], list[str]]:
        """Returns the names of variables that were updated, and of those that may be half done."""

    def unscale(self, factor: float) -> None:
        """Has gradients multiplied by a factor before all else, and measured before any write.

        Called after `check`. The host reads what is measured, by `find_nonfinite`.
        """

    def measure_all(self) -> None:
        """Has all gradients measured before any write, for `find_nonfinite`; as they are.

        Called after `check`.
        """
        return

    def find_nonfinite(self) -> str | None:
        """Describes the first gradient that holds NaN or infinity; None if all are finite.

        Called after `measure`, for which `unscale` or `measure_all` asked. The host waits for GPUs.
        """


class HookOptimizer(Protocol):
    """The part of an optimizer that `HookUpdates` uses."""

    state: State
    this_thread: Any

    @property
    def _gradient_types(self) -> GradientTypes: ...

    def _valid_dtypes(self) -> Iterable[Any]: ...

    def _create_slots(self, var_list: Sequence[Variable]) -> None: ...

    def _scalars_for(self, real: type[np.floating[Any]]) -> Sequence[Scalars]: ...

    def _apply_one(self, gradient: Gradient, variable: Variable) -> Any: ...


class HookUpdates(Updates):
    """Updates by `_apply_dense`, `_apply_sparse` and their twins, one variable after the other."""

    def __init__(self, optimizer: HookOptimizer, request: StepRequest) -> None:
        self._optimizer = optimizer
        self.request = request
        given = as_pairs(request.pairs)
        types = types_of(optimizer, request.takes_wide)
        checked = checked_pairs(given, dtypes_of(optimizer), types)
        # A hook's own code computes in the variable's dtype.
        self._pairs = [(narrowed(*pair), pair[1]) for pair in checked if pair[0] is not None]
        self._num_begun = 0
        self._num_done = 0
        self.created: list[Created] = []
        self.forgets: list[Callable[[Collection[Device] | None], None]] = []
        self.read = [pair[0] for pair in given if isinstance(pair[0], Variable)]
        self.has_rows_on_a_gpu = any(v.device.kind == "gpu" for _, v in self.sparse_pairs())

    def pairs(self) -> Sequence[Pair]:
        return self._pairs

    def variables(self) -> Sequence[Variable]:
        return [variable for _, variable in self._pairs]

    def sparse_pairs(self) -> Sequence[Pair]:
        return [pair for pair in self._pairs if isinstance(pair[0], IndexedSlices)]

    def identities(self) -> Iterable[Identity]:
        return [variable.identity for variable in self.variables()]

    @property
    def num_elements(self) -> int:
        return sum(variable.size for variable in self.variables())

    def devices(self) -> Collection[Device]:
        return {variable.device for variable in self.variables()}

    def refuse_shared_memory(self, counter: Variable | None) -> None:
        variables = self.variables()
        slots = [slot for each in variables for slot in self._optimizer.state.slots_of(each)]
        refuse_shared_memory(variables, [*slots, *([] if counter is None else [counter])])

    def create_slots(self, of_part: bool = False) -> None:
        variables = self.variables()
        self.created += self._optimizer.state.collect_created(
            lambda: self._optimizer._create_slots(variables)
        )

    def fix_scalars(self) -> None:
        optimizer = self._optimizer
        optimizer.this_thread.counted = counts_of(optimizer.state, self.variables())
        for real in {compute_type(variable.dtype) for _, variable in self._pairs}:
            self._optimizer._scalars_for(real)

    def check(self) -> None:
        # They have been narrowed.
        checked = checked_pairs(self._pairs, dtypes_of(self._optimizer))
        state = self._optimizer.state
        variables = [variable for _, variable in checked]
        slots = (slot for each in variables for slot in state.slots_of(each))
        written = Written([*variables, *slots])
        self._pairs = [
            (_copy_if_shared(gradient, variable, written), variable)
            for gradient, variable in checked
        ]

    def must_check_first(self) -> bool:
        return True

    def update(self) -> list[Any]:
        self._optimizer.this_thread.decaying = self.request.decaying
        update_ops = []
        for gradient, variable in self._pairs:
            self._num_begun += 1
            update_ops.append(call_user_code(self._optimizer._apply_one, gradient, variable))
            # A hook's own code has read and written them.
            slots = self._optimizer.state.slots_of(variable)
            backend_for(variable.device).hold(
                gradient, variable.unread_storage, [slot.unread_storage for slot in slots]
            )
            self._num_done += 1
        return update_ops

    def unscale(self, factor: float) -> None:
        if factor != 1:
            self._pairs = [
                (narrowed(unscaled(gradient, factor), v), v) for gradient, v in self._pairs
            ]

    def find_nonfinite(self) -> str | None:
        return first_nonfinite(self._pairs)

    def written(self) -> tuple[list[str], list[str]]:
        names = [variable.name for variable in self.variables()]
        return names[: self._num_done], names[self._num_done : self._num_begun]


def _copy_if_shared(gradient: Gradient, variable: Variable, written: Written) -> Gradient:
    if isinstance(gradient, IndexedSlices):
        values = written.copy_if_shared(gradient.values, variable.device)
        indices = written.copy_if_shared(gradient.indices, variable.device)
        return gradient.replace(values, indices, variable.shape)
    return written.copy_if_shared(gradient, variable.device)


def apply_constraint(variable: Variable) -> None:
    """Projects a variable after its update; slots stay as they are."""
    if variable.constraint is not None:
        with backend_for(variable.device).enter():
            variable.assign(call_user_code(variable.constraint, variable.storage))


def pairs_for(
    optimizer: HookOptimizer, grads_and_vars: Iterable[tuple[Any, Any]], takes_wide: bool = False
) -> list[tuple[Gradient | None, Variable]]:
    """Returns `checked_pairs` of gradients that an optimizer is to take in a later step.

    Args:
        optimizer: Which one.
        grads_and_vars: See `checked_pairs`.
        takes_wide: Whether the step takes wide gradients that the optimizer by itself does not.
    """
    types = types_of(optimizer, takes_wide)
    return checked_pairs(grads_and_vars, dtypes_of(optimizer), types)


def pairs_to_sum(
    optimizer: HookOptimizer, grads_and_vars: Iterable[tuple[Any, Any]], takes_wide: bool = False
) -> list[tuple[Gradient | None, Variable]]:
    """Returns `pairs_for`; if any float is taken, gradients of one type, which others add."""
    pairs = pairs_for(optimizer, grads_and_vars, takes_wide)
    if optimizer._gradient_types is not GradientTypes.FLOATS:
        return pairs
    return [(widened(*pair), pair[1]) for pair in pairs]


def dtypes_of(optimizer: HookOptimizer) -> frozenset[np.dtype[Any]]:
    """Returns the dtypes of variables and gradients that an optimizer takes."""
    return _as_dtypes(tuple(optimizer._valid_dtypes()))


@cache
def _as_dtypes(named: tuple[Any, ...]) -> frozenset[np.dtype[Any]]:
    return frozenset(map(np.dtype, named))
