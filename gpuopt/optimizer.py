"""Optimizer: TensorFlow 1's interface between gradients and variables."""

from __future__ import annotations

import itertools
import logging
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast, get_args

import numpy as np

from gpuopt import environment
from gpuopt.autodiff import engine_of
from gpuopt.autodiff.engine import Loss
from gpuopt.choices import is_one_of
from gpuopt.listed import ListsWhatUsersNeed
from gpuopt.locks import Lock
from gpuopt.state.copies import CopiedByConstructor
from gpuopt.state.counts import CountSlot
from gpuopt.state.slots import coded_slot
from gpuopt.state.state import Description, State
from gpuopt.state.state_dict import OptimizerState, load_state, read_state
from gpuopt.step.clips import CLIP_NORM
from gpuopt.step.device_scaling import DeviceScaling, FiniteGradients, Key
from gpuopt.step.hooks import Hooks
from gpuopt.step.leaves import Leaves, paired
from gpuopt.step.ledger import Ledger
from gpuopt.step.loss import (
    GATE_GRAPH,
    GATE_NONE,
    GATE_OP,
    checked_gate,
    gradients_of,
    refuse_independent_loss,
)
from gpuopt.step.nonfinite import first_nonfinite
from gpuopt.step.one_by_one import update_one_by_one
from gpuopt.step.options import STAGE_OPTIONS
from gpuopt.step.pairs import Gradient, as_sequence
from gpuopt.step.replica_context import replica_context
from gpuopt.step.replica_context import this_thread as replicas
from gpuopt.step.report import Report, UpdateKind, reporting
from gpuopt.step.request import StepRequest, is_overridden, make_step, through_users_code
from gpuopt.step.request import this_thread as requests
from gpuopt.step.step import Step, ThisThread
from gpuopt.step.updates import HookUpdates, Updates, dtypes_of
from gpuopt.step.wide_gradients import GradientTypes
from gpuopt.trees import is_leaf
from gpuopt.variables.gate import between_writes
from gpuopt.variables.identity import Identity
from gpuopt.variables.late_errors import raise_late_errors
from gpuopt.variables.operators import reading
from gpuopt.variables.row_changes import forget_plans
from gpuopt.variables.undo import all_or_nothing
from gpuopt.variables.unfinished import accept_steps_of
from gpuopt.variables.variable import Variable, as_variable

# What to do about a gradient that holds NaN or infinity.
OnNonfinite = Literal["propagate", "skip", "raise"]

Params = TypeVar("Params")
Method = TypeVar("Method", bound=Callable[..., Any])

_logger = logging.getLogger("gpuopt")

# The optimizers that are alive, by a number that grows with each new one.
_living: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
_serials = itertools.count()
_listing = Lock("the list of optimizers")


def leaves_gradients_alone(method: Method) -> Method:
    """Marks a `compute_gradients` or `apply_gradients` that does not look at all gradients at once.

    `minimize` with GATE_NONE does without it. The mark belongs to the function: an override in a
    subclass has none.
    """
    method.__dict__["leaves_gradients_alone"] = method
    return method


def is_marked(method: Any) -> bool:
    """Whether `leaves_gradients_alone` has marked this very function, not one that it wraps."""
    function = getattr(method, "__func__", method)
    return getattr(function, "leaves_gradients_alone", None) is function


class Optimizer(ListsWhatUsersNeed, CopiedByConstructor, Hooks):
    """Base of all optimizers.

    A user's optimizer overrides, as in TensorFlow 1: `_create_slots`, `_prepare`, `_apply_dense`,
    `_apply_sparse`, `_apply_sparse_duplicate_indices`, their `_resource_` twins, and `_finish`.
    Variables reach these hooks as `Variable`, also where the caller gave a raw array. Where both an
    `_apply` hook and its `_resource_` twin are overridden, the twin is called, as in TensorFlow's
    eager mode.

    Threads may share an optimizer. With `use_locking=True` they lose no update.

    Args:
        use_locking: Make updates of one variable by several threads one after the other.
        name: The optimizer's name, which the names of its slots contain.
        on_nonfinite: What to do if a gradient of a step contains NaN or infinity. "propagate"
            computes with it, as TensorFlow does; "skip" leaves out the whole step, with all
            slots and the global step as they were, and logs a warning; "raise" raises
            FloatingPointError, and nothing is written. If all variables are on GPUs, a GPU
            decides, and the host does not wait: the warning or the error comes with a later call,
            and after a step that "raise" has refused, no other step is made before the error (see
            `check`).

    Raises:
        ValueError: `name` is empty or None, or `on_nonfinite` is not one of the three.
    """

    _unlisted: ClassVar[frozenset[str]] = frozenset(
        [
            "GATE_GRAPH",
            "GATE_NONE",
            "GATE_OP",
            "accept_unfinished_step",
            "forget_plans",
            "open_report",
            "owner_of_state",
            "ledger",
            "options",
            "own_counts",
            "state",
            "this_thread",
        ]
    )
    # The slots that count the steps of each variable, and what they start with: see
    # `gpuopt.state.counts`. Empty if numbers that follow the steps are shared by all variables.
    own_counts: Mapping[str, np.generic] = MappingProxyType({})
    # What watches the steps: see `report`; None if nothing does.
    open_report: Report | None = None
    # Those that gradients may have, other than sums that a wrapper makes.
    _gradient_types: GradientTypes = GradientTypes.OWN

    GATE_NONE: ClassVar[int] = GATE_NONE
    GATE_OP: ClassVar[int] = GATE_OP
    GATE_GRAPH: ClassVar[int] = GATE_GRAPH

    def __init__(
        self, use_locking: bool, name: str, *, on_nonfinite: OnNonfinite = "propagate"
    ) -> None:
        environment.settings()
        if not name:
            raise ValueError("Must specify the optimizer name")
        if not isinstance(name, str):
            raise TypeError(f"the optimizer's name must be text, got {name!r}")
        if not is_one_of(on_nonfinite, get_args(OnNonfinite)):
            raise ValueError(
                f"on_nonfinite must be one of {list(get_args(OnNonfinite))}, got {on_nonfinite!r}"
            )
        self._use_locking = use_locking
        self._name = name
        self._on_nonfinite = on_nonfinite
        # Calls that GPUs may still refuse or skip.
        self.ledger = Ledger()
        # How GPUs decide about steps, and what was not finite.
        self._on_gpu = DeviceScaling(
            self.ledger,
            report=partial(_warn_of_skip, name) if on_nonfinite == "skip" else None,
            refuses=on_nonfinite == "raise",
        )
        # The slots and other variables.
        self.state = State(self._describe_state)
        # The numbers of the calling thread's step.
        self.this_thread = ThisThread()
        self._gate_warning_given = False
        # The trees that `update` is given.
        self._leaves = Leaves()
        with _listing:
            _living[next(_serials)] = self

    # Type checkers would take every name for one that this returns.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property, whose own error this is
                return object.__getattribute__(self, name)
            from gpuopt.near_names import describe_missing_member

            meant = _hyperparameter_meant(name, self._names_to_set())
            message = describe_missing_member(type(self).__name__, name, meant)
            raise AttributeError(message, name=name, obj=self)

        def __setattr__(self, name: str, value: Any) -> None:
            if not name.startswith("_") and (
                not hasattr(type(self), name) or name in self._names_to_give()
            ):
                hint = self._hint_for_setting(name)
                if hint is not None:
                    raise AttributeError(
                        f"steps of {type(self).__name__} do not read an attribute {name!r}: {hint}",
                        name=name,
                        obj=self,
                    )
            object.__setattr__(self, name, value)

    def _names_to_set(self) -> Collection[str]:
        """Returns the names of the hyperparameters, if it has any by now."""
        names: Collection[str] = vars(self).get("hyperparameters", ())
        return names

    def _names_to_give(self) -> Collection[str]:
        """Returns the arguments that cannot be changed; none until it is made."""
        return ()

    def _hint_for_setting(self, name: str) -> str | None:
        """Says what to do instead of setting an attribute; None if it may be set."""
        meant = _hyperparameter_meant(name, self._names_to_set())
        if meant is not None:
            return f'set optimizer.hyperparameters["{meant}"]'
        if name in self._names_to_give():
            return f"give {name} where the optimizer is made"
        return None

    def get_name(self) -> str:
        return self._name

    @property
    def owner_of_state(self) -> Optimizer:
        """The optimizer whose state a checkpoint holds for this one: itself, or one inside it."""
        return self

    def minimize(
        self,
        loss: Loss,
        global_step: Any = None,
        var_list: Any = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: Any = None,
    ) -> None:
        """Computes gradients and applies them; see `compute_gradients` and `apply_gradients`.

        With GATE_NONE, each variable is updated as soon as its gradient is final, and the gradient
        is freed: memory holds about one gradient instead of all. If an exception ends such a step,
        the variables whose gradients were final by then are updated, and the step is to be settled:
        see `accept_unfinished_step`; with the other gates, no variable is.

        Raises:
            ValueError: no variable has a gradient.
        """
        minimize = partial(
            self._minimize,
            loss=loss,
            var_list=var_list,
            gate_gradients=gate_gradients,
            aggregation_method=aggregation_method,
            colocate_gradients_with_ops=colocate_gradients_with_ops,
            grad_loss=grad_loss,
        )
        make_step(self, StepRequest(None, global_step, name), minimize)

    def _minimize(self, request: StepRequest, loss: Loss, **options: Any) -> None:
        """Does what `minimize` was called for, inside of `make_step`.

        Args:
            request: The step, but for its pairs.
            loss: See `compute_gradients`.
            **options: Its other arguments.
        """
        options["gate_gradients"] = gate_gradients = checked_gate(options["gate_gradients"])
        streams = gate_gradients == self.GATE_NONE and engine_of(loss).streams
        if streams and not self._needs_all_gradients():
            step = Step(self, request.global_step, request.name or self._name)
            asked = options["var_list"], options["grad_loss"]
            update_one_by_one(self, step, request, loss, *asked)
            return
        grads_and_vars, more = self._gradients_to_apply(loss, **options)
        if not [gradient for gradient, _ in grads_and_vars if gradient is not None]:
            refuse_independent_loss(loss, [variable for _, variable in grads_and_vars])
        given = {"global_step": request.global_step, "name": request.name, **more}
        through_users_code(self, request, partial(self.apply_gradients, grads_and_vars, **given))

    def _gradients_to_apply(
        self, loss: Loss, **options: Any
    ) -> tuple[list[tuple[Gradient | None, Variable]], Mapping[str, Any]]:
        """Returns the gradients of `minimize`, and what its `apply_gradients` takes besides.

        Args:
            loss: See `compute_gradients`.
            **options: Its other arguments.
        """
        return self.compute_gradients(loss, **options), {}

    @leaves_gradients_alone
    def compute_gradients(
        self,
        loss: Loss,
        var_list: Any = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
    ) -> list[tuple[Gradient | None, Variable]]:
        """Runs the loss once and returns its gradients.

        Args:
            loss: A function without arguments, in operations of numpy or CuPy; or one decorated
                with `gpuopt.with_torch`, or with `gpuopt.with_gradients`. If it returns an array,
                the sum of the elements is differentiated. In replica i of n that average their
                losses, the loss is scaled by 1/n.
            var_list: Variables, in nested lists if need be; by default the trainable variables
                that the loss reads.
            gate_gradients: GATE_NONE, GATE_OP or GATE_GRAPH; here all give the same.
            aggregation_method: Ignored; it chose among graph operations.
            colocate_gradients_with_ops: Ignored; likewise.
            grad_loss: What gradients are multiplied by: a scalar, or an array of the loss's shape.

        Returns:
            (gradient or None, variable) pairs in the order of `var_list`. Rows read by
            `gpuopt.embedding_lookup` give IndexedSlices. Gradients are only to be read.

        Raises:
            RuntimeError: `loss` is a value, not a function.
            TypeError: `var_list` holds something else than variables.
            ValueError: a bad gate, no variables, or a loss or variable that is not floating point.
        """
        checked_gate(gate_gradients)
        return gradients_of(loss, var_list, grad_loss, dtypes_of(self))

    @leaves_gradients_alone
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
    ) -> None:
        """Updates every variable that has a gradient, in place and on its own device.

        Everything is checked before anything is written. Gradients are not changed. In a replica
        of a strategy, gradients are summed over the replicas first.

        Args:
            grads_and_vars: (gradient, variable) pairs. A gradient is an array of the variable's
                shape and dtype, nested lists of numbers, a Variable, IndexedSlices, or None, which
                leaves its variable alone. A variable is a Variable or a writable array.
            global_step: A scalar Variable or array; 1 is added to it after the update.
            name: The name of this step in NVIDIA's profilers; by default the optimizer's name.
            skip_gradients_aggregation: In a replica, update this replica's variables by its own
                gradients, as if there were no strategy.

        Raises:
            ValueError: there are no pairs or no gradients, a pair is malformed, a shape is wrong,
                an array is read-only, or the same memory would be updated twice.
            TypeError: an argument is not a gradient or a variable, or a dtype is wrong.
            IndexError: a row of IndexedSlices is outside its variable. If the rows are on a GPU, a
                later call raises the error (see `check`), and this call changes nothing there.
            RuntimeError: IndexedSlices are given for a variable with a constraint; or the call is
                in a strategy's cross-replica context.
            DeviceUnavailableError: an array is on a device that cannot be used.
            FloatingPointError: a gradient is not finite, and `on_nonfinite` is "raise". If a GPU
                checks it, a later call raises the error (see `check`), and this call changes
                nothing.
        """
        request = StepRequest(grads_and_vars, global_step, name, skip_gradients_aggregation)
        if requests.passing is None:  # as in `make_step`, whose call would cost time in each step
            self._apply_request(request)
        else:
            make_step(self, request)

    def _apply_request(self, request: StepRequest, **own: Any) -> None:
        """Makes the step that an `apply_gradients` of this package was called for.

        Args:
            request: The step.
            **own: Arguments that the `apply_gradients` of a subclass has, and this one has not.
        """
        context = replicas.context
        if context.strategy is not None and not request.skips_aggregation:
            if context.is_cross_replica:
                raise RuntimeError(
                    "Use `_distributed_apply()` instead of `apply_gradients()` in a cross-replica "
                    "context."
                )
            context.strategy.apply_gradients(self, request)
            return
        if self._on_nonfinite != "propagate":
            request = request._replace(pairs=as_sequence(request.pairs))
            key = self._key_on_gpu(request)
            if key is not None:
                request = request._replace(decides=self._on_gpu)
            else:
                self.ledger.raise_late(wait=True)
            self._step_if_finite(request, key)
            return
        step = Step(self, request.global_step, request.name or self._name)
        if type(request.pairs) is not list:
            request = request._replace(pairs=as_sequence(request.pairs))
        with step.observed:
            step.run(self._checked_updates(request), *request.additions)

    def update(
        self, params: Params, grads: Any, name: str = "", *, global_step: Any = None
    ) -> Params:
        """Updates a tree of parameters in place, by a tree of gradients, as one step.

            params = {"layers": [{"W": w0, "b": b0}, {"W": w1, "b": b1}]}
            grads = {"layers": [{"W": dw0, "b": db0}, {"W": dw1, "b": db1}]}
            optimizer.update(params, grads)

        A tree is a dict, list, tuple, named tuple or dataclass of leaves or of further trees. Both
        trees have the same keys and lengths. A leaf's name is the tree's name and its path, as
        "generator/layers/0/W": its state, its group, checkpoints and errors use this name. If
        another array of the same shape, dtype and device is at the path in a later call, it
        continues with the state. A `Variable` keeps its own name.

        One array instead of a tree, without `name`, is known by its memory, as in
        `apply_gradients`.

        Args:
            params: The tree, whose leaves are Variables or writable arrays. The optimizer keeps a
                reference to each array.
            grads: The tree of gradients. A gradient is an array, IndexedSlices, or None, which
                leaves the leaf and its state as they are; see `apply_gradients`.
            name: The tree's name. Trees of different models need different names.
            global_step: See `apply_gradients`.

        Returns:
            `params` itself.

        Raises:
            ValueError: the trees have different paths, or other paths than in earlier calls with
                this name; an array is at two paths; an array has another shape, dtype or device
                than the earlier one at its path; a key contains "/"; or see `apply_gradients`.
            TypeError: see `apply_gradients`, which also raises all other errors.
        """
        if not isinstance(name, str):
            raise TypeError(f"name must be text, got {name!r}")
        if replica_context().strategy is not None:
            self.apply_gradients(paired(params, grads), global_step)
            return params
        known = self._leaves.find(params, grads, name)
        if known is not None:
            self.apply_gradients(known, global_step)
        elif not name and is_leaf(params, "params"):
            if not hasattr(params, "dtype"):
                raise TypeError(
                    "params: expected a Variable, an array, or a dict, list, tuple or dataclass of "
                    f"these, got {type(params).__name__}"
                )
            self.apply_gradients([(grads, params)], global_step)
        else:
            state = self.owner_of_state.state
            pairs, keep = self._leaves.prepare(params, grads, name, state, _forget_all_plans)
            self.apply_gradients(pairs, global_step)
            keep()
        return params

    def _step_if_finite(self, request: StepRequest, key: Key | None) -> None:
        step, added = Step(self, request.global_step, request.name or self._name), request.additions
        with step.observed:
            updates, clips = self._checked_updates(request), self.options.clips
            takes_norms = clips is not None and clips.takes_norms
            if takes_norms or key is not None:
                own = FiniteGradients(self._on_gpu, key, self._makes_step_of, takes_norms)
                step.run(updates, own, *added)
            elif not self._must_skip(updates):
                step.run(updates, *added)

    @property
    def last_nonfinite(self) -> str | None:
        """Describes the first gradient that was not finite in the last step that had one.

        The first in the list of pairs. None if there was none yet, or with
        `on_nonfinite="propagate"`, where gradients are not checked. If a GPU checks them, reading
        this waits for it, and the text has only the variable's name.
        """
        self.ledger.bring_up()
        return self._on_gpu.last_nonfinite

    def check(self) -> None:
        """Waits for the GPUs, and raises the first error that they found in earlier calls.

        A GPU checks the rows of sparse gradients while the host goes on. If a row is out of range,
        that call of `apply_gradients` and the ones after it change nothing on any GPU. The error is
        raised by the first later call that learns of it: `apply_gradients`, `check`,
        `Variable.numpy`, a save, a restore, or an assignment to the global step; a restore or an
        assignment has then written nothing. That call also undoes the host's part of the refused
        calls: the global step, and Adam's powers of beta. With GPUOPT_CHECK=1 in the environment,
        `apply_gradients` waits for its own check.

        So it is with a gradient that is not finite, if `on_nonfinite` is "raise" and a GPU decides.

        Raises:
            IndexError: a row of IndexedSlices is outside its variable.
            FloatingPointError: a gradient is not finite, and `on_nonfinite` is "raise".
        """
        self.ledger.raise_late(wait=True)

    def report(self) -> AbstractContextManager[Report]:
        """Watches this optimizer's steps, of all threads, as long as it is open.

            with optimizer.report() as report:
                for batch in batches:
                    optimizer.minimize(lambda: loss(batch))
            print(report)  # or rich.print(*report.tables())

        The report has the bytes that steps read and write, by variable and parameter group; their
        launches with the milliseconds of each kind, on a GPU by its own clock; and the bandwidth
        as a share of that of a copy, measured at the end, for which 128 MiB are allocated on each
        device, or twice its largest cache if that is more. In NVIDIA's profilers,
        launches have names then. Steps are a little slower as long as it is open, and as quick as
        ever otherwise.

        Raises:
            RuntimeError: a report of this optimizer is open.
        """
        return reporting(self)

    def _kind_of_update(self, variable: Variable, is_sparse: bool) -> UpdateKind:
        """Returns what a report has to know about an update."""
        return UpdateKind()

    def _distributed_apply(
        self,
        distribution: Any,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
    ) -> None:
        """Does `apply_gradients` in a cross-replica context.

        Args:
            distribution: The strategy whose variables these are.
            grads_and_vars: (gradients, variable) pairs: one gradient for each replica, which are
                summed and applied to each replica's copy, or None.
            global_step: See `apply_gradients`; it grows once.
            name: See `apply_gradients`.
        """
        distribution.update(self, grads_and_vars, global_step, name)

    def get_slot(self, var: Any, name: str) -> Variable | None:
        """Returns the slot variable `name` of `var`, or None if it was never created.

        With `slot_bits=8` it is a `CodedSlot`, though its type here is Variable: it reads as
        float32, takes `assign`, and has the Variables `codes` and `scales`.
        """
        codecs, variable = self.options.codecs, as_variable(var)
        if name not in codecs.coded:
            slot = self.state.slot(variable, name)
            if slot is None or name not in self.own_counts:
                return slot
            count: Any = CountSlot(self, variable, name)
            return cast("Variable", count)
        coded: Any = coded_slot(self.state, variable, name, codecs)
        return cast("Variable | None", coded)

    def get_slot_names(self) -> list[str]:
        """Lists the names of the slots created so far, sorted.

        Among them are those of accumulated gradients, while a variable has one.
        """
        of_wrapper = self.state.wrapper_state
        passing = () if of_wrapper is None else of_wrapper.slot_names
        names = self.options.codecs.without_scales(self.state.slot_names())
        return sorted(name for name in names if name not in passing or self.state.table(name))

    def variables(self) -> list[Variable]:
        """Lists the optimizer's own variables, slots and others, sorted by name."""
        return sorted(self.state.variables(), key=lambda variable: variable.name)

    def state_dict(self, variables: Mapping[str, Any] | None = None) -> OptimizerState:
        """Copies the optimizer's state to host memory, as of one moment between two steps.

        Args:
            variables: Names to variables or arrays: their slots are included, under these names. By
                default all `global_variables()` under their own names.

        Returns:
            Plain dictionaries with numpy arrays of the slots' own dtypes. Hyperparameters are there
            to be read; `load_state_dict` does not set them.

        Raises:
            ValueError: an array without a name has slots, and `variables` is not given.
            RuntimeError: called in the middle of a step, or a step was not finished.
        """
        with between_writes(f'reading the state of optimizer "{self._name}"'):
            return read_state(self.state, variables, Variable.numpy)

    def load_state_dict(
        self, state: OptimizerState, variables: Mapping[str, Any] | None = None
    ) -> None:
        """Takes over a state, exactly; the run continues as the saved one would have.

        Slots that are missing are made at once. The state of variables that do not exist yet waits
        for them, by name, and is what their slots start with; a later call replaces it. So waits
        the state of a tree's paths, for the arrays that `update` is given next. A state of
        before the first step has the next step make slots and powers of beta anew.

        Everything is checked before anything is written. Then Ctrl-C waits until everything is
        written; an error, or a second Ctrl-C, undoes what was written. Meanwhile host memory holds
        a copy of the replaced slots of GPUs, and of those whose rows or master copies follow.

        Args:
            state: What `state_dict` returned. Its arrays are copied.
            variables: The state's names to variables or arrays; by default the
                `global_variables()` under their own names.

        Raises:
            ValueError: names, shapes or dtypes do not fit, or a number is none that a run makes.
            TypeError: `state` is something else, or a value does not hold numbers.
            RuntimeError: called in the middle of a step.
            IndexError: a GPU has refused an earlier step; see `check`. Nothing is loaded.
            FloatingPointError: likewise.
        """
        with between_writes(f'loading the state of optimizer "{self._name}"', writes=True):
            raise_late_errors()
            all_or_nothing(partial(load_state, self.state, state, variables))

    def accept_unfinished_step(self) -> None:
        """Keeps the values that an unfinished step has left, and counts it as if it had been made.

        A step is unfinished if an exception ended it after it had begun to write: Ctrl-C in a step
        of up to 100,000 elements, a second Ctrl-C, an error of a device or of a hook, or a lack of
        memory. Each of its variables, slots and averages may then hold values from before the step,
        from after it, or some of both. So `apply_gradients`, saves, `state_dict`, pickle and
        deepcopy of them raise RuntimeError, until a restore, or a load and assignments, have
        written all of them; or until this call. It changes no values, and advances powers of beta,
        counts and the global step. A `_finish` of a class without a rule that has begun is not
        called again.

        Does nothing if there is no such step.
        """
        accept_steps_of(self.owner_of_state.state)

    def _checked_updates(self, request: StepRequest) -> Updates:
        """Checks the pairs of a request: nothing is written yet."""
        return HookUpdates(self, request)

    def forget_plans(self, changed: Set[Identity]) -> None:
        """Drops what was prepared for updates of variables that have got other arrays."""
        self._leaves.forget(changed)

    def _extra_saved_variables(self) -> Mapping[str, Variable]:
        """Returns variables that a `Saver` of this optimizer saves with its state, by name."""
        return {}

    def _describe_state(self) -> Description:
        of_wrapper = self.state.wrapper_state
        counters = [each.counter for each in STAGE_OPTIONS.values()]
        return Description(
            type(self).__name__,
            self.get_name(),
            self._hyperparameters_to_save(),
            self._all_slot_names(),
            self._row_slot_names(),
            self._all_non_slot_names(),
            [
                *self._non_slot_names_of_groups(),
                *self.options.counters,
                *(of_wrapper.others if of_wrapper else ()),
            ],
            self._lists_all_state(),
            {**self._state_ranges(), **(of_wrapper.others if of_wrapper else {})},
            self._op_name,
            [*self._names_left_out(), *(n for n in counters if n not in self.options.counters)],
            self.options.codecs,
            self if self.own_counts else None,
        )

    def _names_left_out(self) -> Sequence[str]:
        """Names the numbers that a saved state may have in place of each variable's own."""
        return ()

    def _counts_of_all(
        self, numbers: Mapping[str, Any], name: str, variable: Variable | None
    ) -> Mapping[str, Any]:
        """Returns a variable's counts, from a state that has one count for all variables.

        Args:
            numbers: The state's, by name.
            name: The variable's there.
            variable: None if it does not exist yet.
        """
        return {}

    def _op_name(self, slot_name: str) -> str:
        """Returns the second part of a slot variable's name, also of what a wrapper keeps."""
        of_wrapper = self.state.wrapper_state
        is_of_wrapper = of_wrapper is not None and slot_name in of_wrapper.slot_names
        return slot_name if is_of_wrapper else self._slot_op_name(slot_name)

    def _must_skip(self, updates: Updates) -> bool:
        """Looks for NaN and infinity in the gradients; raises or logs, as `on_nonfinite` says."""
        updates.check()
        with reading(*updates.read):
            return not self._makes_step_of(first_nonfinite(updates.pairs()))

    def _makes_step_of(self, nonfinite: str | None) -> bool:
        """Whether a step is made; raises or logs, as `on_nonfinite` says.

        Args:
            nonfinite: Describes a gradient that is not finite; None if there is none.
        """
        if nonfinite is None:
            return True
        self._raise_if_asked(nonfinite)
        _warn_of_skip(self._name, nonfinite)
        return False

    def _raise_if_asked(self, nonfinite: str) -> None:
        """Notes a gradient that is not finite; raises if `on_nonfinite` is "raise"."""
        self._note_nonfinite(nonfinite)
        if self._on_nonfinite == "raise":
            raise FloatingPointError(f"{nonfinite}; nothing was changed")

    def _note_nonfinite(self, description: str) -> None:
        """Keeps the description for `last_nonfinite`."""
        self._on_gpu.last_nonfinite = description

    def _key_on_gpu(self, request: StepRequest) -> Key | None:
        """Returns what the numbers of a step follow from, beside the count of steps.

        None if no GPU can decide about it, as they follow from more.
        """
        return None

    def _looks_at_all_gradients(self) -> list[str]:
        """Returns the arguments by which a step looks at all gradients before it writes."""
        nonfinite, clips = self._on_nonfinite, self.options.clips
        looks = [f'on_nonfinite="{nonfinite}"'] if nonfinite != "propagate" else []
        return [*looks, CLIP_NORM] if clips is not None and clips.takes_norms else looks

    def _needs_all_gradients(self) -> bool:
        """Whether gradients must not be applied one by one; warns of the reason, once."""
        if replica_context().strategy is not None:
            return True
        cls = type(self)
        reasons = [
            f"{cls.__name__} overrides {hook}, which"
            for hook in ("compute_gradients", "apply_gradients")
            if not is_marked(getattr(cls, hook)) or is_overridden(self, hook)
        ]
        reasons += self._looks_at_all_gradients()
        if reasons and not self._gate_warning_given:
            self._gate_warning_given = True
            warnings.warn(
                f"GATE_NONE gives way to GATE_OP: {reasons[0]} needs all gradients at once",
                stacklevel=5,
            )
        return bool(reasons)


def _warn_of_skip(name: str, nonfinite: str) -> None:
    _logger.warning("%s; %s skips the step", nonfinite, name)


def living_optimizers() -> list[Optimizer]:
    """Lists the optimizers still alive, in order of creation."""
    with _listing:
        living = sorted(_living.items())
    return [optimizer for _, optimizer in living]


def _forget_all_plans(changed: Set[Identity]) -> None:
    """Drops the plans for variables that get other arrays."""
    for optimizer in living_optimizers():
        optimizer.forget_plans(changed)
    forget_plans(changed)


def _hyperparameter_meant(name: str, hyperparameters: Collection[str]) -> str | None:
    """Returns the hyperparameter that somebody means by an attribute; None for none."""
    wanted = "learning_rate" if name in ("lr", "learn_rate") else name
    return wanted if wanted in hyperparameters else None


def _var_key(var: Any) -> Identity:
    """Returns the key of `var` in optimizer state; the function's name is TensorFlow's."""
    return as_variable(var).identity
