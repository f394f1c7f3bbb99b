"""RuleOptimizer: an optimizer whose step is one update rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from functools import partial
from operator import attrgetter, is_
from typing import Any, ClassVar, TypeVar, get_args

import numpy as np

from gpuopt.backends import gpu_backends
from gpuopt.backends.clips import ClipForm
from gpuopt.choices import is_one_of
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.optimizer import Optimizer
from gpuopt.optimizers.base.arguments import (
    Common,
    FullSignature,
    GradientDtype,
    given_options,
    options,
    unknown_argument,
    with_defaults,
)
from gpuopt.optimizers.base.catching_up import checked_catch_up
from gpuopt.optimizers.base.clipping import CLIPPING, has_clipping
from gpuopt.optimizers.base.copied import CopiedByHyperparameters
from gpuopt.optimizers.base.decaying import Decaying
from gpuopt.optimizers.base.declared import (
    Documented,
    Hyperparameter,
    show_types_alone,
)
from gpuopt.optimizers.base.groups import Groups
from gpuopt.optimizers.base.hyperparameters import Hyperparameters, checked_hyperparameter
from gpuopt.optimizers.base.numbers_by_count import unknown_hyperparameter
from gpuopt.optimizers.base.own_counts import scalars_by_count
from gpuopt.optimizers.base.slot_options import slot_codecs_of
from gpuopt.rules.catch_up import CatchUpOption
from gpuopt.rules.slot_codes import scales_name
from gpuopt.rules.staged import staged
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.counts import STEP, StepCount, create_counts
from gpuopt.state.slot_codecs import MASTER, has_master
from gpuopt.state.slots import create_master, create_slots
from gpuopt.state.state import Range
from gpuopt.step.averages import following
from gpuopt.step.clips import CLIP_NORM, GradientClips
from gpuopt.step.device_scaling import Key
from gpuopt.step.misuse import Misuse
from gpuopt.step.options import STAGE_OPTIONS, Options
from gpuopt.step.pairs import Gradient
from gpuopt.step.plan_cache import PlanCache
from gpuopt.step.replica_context import replica_context
from gpuopt.step.report import UpdateKind
from gpuopt.step.request import Listed, StepRequest
from gpuopt.step.rule_updates import RuleUpdates
from gpuopt.step.tables_behind import bring_up_all
from gpuopt.step.updates import HookUpdates, Updates
from gpuopt.step.user_code import call_user_code
from gpuopt.step.wide_gradients import GradientTypes
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import NewRows, Variable

# The largest scale of a slot in 8 bits: any finite one.
_LARGEST_SCALE = float(np.finfo(np.float32).max)

WEIGHT_DECAY = "weight_decay"

# More than `_variant_of` returns.
_MOST_VARIANTS = 16

Result = TypeVar("Result")
Scalars = Mapping[str, "np.floating[Any]"]

_APPLY_HOOKS = (
    "_apply_one",
    "_apply_dense",
    "_resource_apply_dense",
    "_apply_sparse",
    "_resource_apply_sparse",
    "_apply_sparse_duplicate_indices",
    "_resource_apply_sparse_duplicate_indices",
)

# The hooks of a class: equal to those of `RuleOptimizer` if it overrides none.
hooks_of = attrgetter(*_APPLY_HOOKS)
_scalars_of = attrgetter("_scalars", "_hyper")


class RuleOptimizer(CopiedByHyperparameters, Optimizer):
    """Base of the optimizers that apply an `UpdateRule` to every element or touched row.

    A subclass sets `rule` and passes its hyperparameters to `__init__`. It overrides
    `_initial_slot_values` where a slot does not start at 0, and `_scalars` where the rule takes
    something else than the hyperparameters themselves.

    A `Hyperparameter` is a number, something with a scalar value, or a function without
    arguments that returns one and is called once in each step. The constructor takes a mapping of
    what all optimizers take, and then the hyperparameters by name. All take the arguments of
    `Optimizer`: `use_locking` (False unless given), `name` (by default the class's, less
    "Optimizer") and `on_nonfinite`; and the options that `Additions` declares.

    Raises:
        TypeError: a hyperparameter is no number, an argument is unknown, a group names
            something else than a hyperparameter, or `averages` is no such thing. At the definition
            of a subclass: `rule` is a plain function.
        ValueError: a hyperparameter is an array of numbers, or outside of its range, two options
            cannot be had together, or `Optimizer` refuses an argument.

    Attributes:
        rule: The arithmetic of a step.
        rule_with_slots: The rule with those stages of options that have slots: a variable has the
            slots of both.
        hyperparameters: The hyperparameters by name, as they were given. They can be set:
            `optimizer.hyperparameters["learning_rate"] = 0.01`.
        groups: The same of each `ParameterGroup`, in their order.
        hyperparameter_of: The hyperparameters that are scalars of the rule, by the names that they
            have there, where these differ.
        derived_hyperparameters: The names of those that nobody gives or sets.
        rule_of_other_rows: The rule, with the same slots, by which a sparse gradient also updates
            rows that it does not name: with a gradient of zero. None if they stay as they are.
        catch_up: Whether rows that a sparse gradient does not name catch up when they are next
            named or read; "stepping" if they make the steps that they missed one by one.
        instead_of_all_rows: The optimizer that does the same for named rows alone, if there is one:
            a hint mentions it.
        plans: The plans of variables that are updated together.
    """

    _unlisted = frozenset(
        [
            "catch_up",
            "derived_hyperparameters",
            "hyperparameter_of",
            "instead_of_all_rows",
            "plans",
            "rule",
            "rule_of_other_rows",
            "rule_with_slots",
        ]
    )
    rule: UpdateRule
    rule_with_slots: UpdateRule
    rule_of_other_rows: ClassVar[UpdateRule | None] = None
    hyperparameter_of: ClassVar[Mapping[str, str]] = {}
    derived_hyperparameters: ClassVar[tuple[str, ...]] = ()
    instead_of_all_rows: ClassVar[str] = ""
    catch_up: CatchUpOption = False
    _decaying: Decaying | None = None
    # Whether none of its hyperparameters is rounded to float32; see `AllDigits`.
    _keeps_all_digits: ClassVar[bool] = False
    __signature__ = FullSignature()

    # Found once, as each step asks: whether the class overrides a hook that gets one variable, and
    # whether its scalars are other than its hyperparameters.
    _has_own_hooks: ClassVar[bool] = False
    _has_own_scalars: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if isinstance(text := vars(cls).get("__doc__"), str):
            cls.__doc__ = Documented(text, Common.__annotations__)  # type: ignore[assignment]
        show_types_alone(vars(cls).get("__init__"))
        cls._has_own_hooks = hooks_of(cls) != hooks_of(RuleOptimizer)
        cls._has_own_scalars = _scalars_of(cls) != _scalars_of(RuleOptimizer)
        rule = vars(cls).get("rule")
        if callable(rule):
            raise TypeError(
                f"the rule of {cls.__name__} is a plain function, {rule!r}: decorate it with "
                "@gpuopt.update_rule"
            )
        own = getattr(cls, "rule", None)
        if cls.rule_of_other_rows is not None and isinstance(own, UpdateRule) and own.row_slots:
            raise TypeError(
                f"{cls.__name__} has a rule_of_other_rows, and the rule {own.name} with slots of "
                "rows: such a rule updates no row without a gradient"
            )

    # No docstring, here and in `Optimizer`: editors would show it in place of a subclass's.
    def __init__(self, common: Common, /, **hyperparameters: Hyperparameter) -> None:
        arguments, ours = with_defaults(common, type(self))
        self._grouping = Groups(ours["groups"])
        super().__init__(**arguments)
        given = {name: each for name, each in STAGE_OPTIONS.items() if ours[name] is not None}
        self.rule_with_slots = self.rule
        for option in given.values():
            if option.stage.slots:
                self.rule_with_slots = staged(self.rule_with_slots, option.stage)
        codecs = slot_codecs_of(
            self.rule_with_slots,
            type(self).__name__,
            slot_bits=ours["slot_bits"],
            slot_form=ours["slot_form"],
            slot_dtype=ours["slot_dtype"],
            masters=ours["masters"],
        )
        self.options = Options(codecs)
        stages = [option.checked(ours[name], self) for name, option in given.items()]
        averages = following(ours["averages"], codecs.masters)
        gradient_dtype, decay_variables = ours["gradient_dtype"], ours["decay_variables"]
        if not is_one_of(gradient_dtype, get_args(GradientDtype)):
            raise ValueError(f'gradient_dtype must be "strict" or "cast", got {gradient_dtype!r}')
        if gradient_dtype == "cast":
            self._gradient_types = GradientTypes.FLOATS
        limits, clip_form = {name: ours[name] for name in CLIPPING}, ours["clip_form"]
        clipping = limits if has_clipping(limits, clip_form, self._grouping) else {}
        self._given_options = given_options(ours, self._grouping)
        every = {**self._all_hyperparameters(hyperparameters), **clipping}
        if decay_variables is not None:
            if WEIGHT_DECAY not in every:
                raise unknown_argument(type(self), "decay_variables", Common.__annotations__)
            self._decaying = Decaying(decay_variables)
        settable = [name for name in every if name not in self.derived_hyperparameters]
        self.hyperparameters = Hyperparameters(
            every, partial(checked_hyperparameter, type(self)), settable
        )
        shared = [name for name in settable if self._has_state(name)]
        self.groups = tuple(
            self.hyperparameters.of_group(each, type(self), shared) for each in self._grouping
        )
        clips = None
        if clipping:
            form, measures_all = ClipForm[clip_form.upper()], limits[CLIP_NORM] is not None
            every_group = self.hyperparameters, *self.groups
            clips = GradientClips(form, measures_all, bool(self.rule.degrees), every_group)
        self.options = Options(codecs, stages, averages, clips)
        self.plans = PlanCache(Misuse(type(self).__name__, self.instead_of_all_rows))
        # Values of hyperparameters that do not change, and what `_scalars` has made of them, by
        # the type that the rule computes in.
        self._fixed: tuple[list[Scalars], dict[type[np.floating[Any]], Sequence[Scalars]]]
        self._fixed = [], {}

    def flush(self) -> None:
        """Brings all rows up to date that are behind, where rows catch up with their steps.

        Reads do so themselves, of what they read.
        """
        bring_up_all(self.state)

    def _set_catch_up(self, catch_up: CatchUpOption) -> None:
        """Keeps the option of optimizers that update rows without a gradient.

        Raises:
            TypeError: it is none of False, True and "stepping".
            ValueError: this optimizer leaves rows without a gradient alone, or does not say what
                happens to them.
        """
        self.catch_up = checked_catch_up(catch_up, self)

    def _all_hyperparameters(self, given: dict[str, Hyperparameter]) -> dict[str, Hyperparameter]:
        """Returns the hyperparameters that `__init__` is given, and any others."""
        return given

    def _kind_of_update(self, variable: Variable, is_sparse: bool) -> UpdateKind:
        every, averages = (self.hyperparameters, *self.groups), self.options.averages
        return UpdateKind(
            every[self._grouping.number_of(variable)].group_name or "",
            self.rule_of_other_rows is not None and not self.catch_up,
            0 if averages is None else averages.bytes_moved(variable, is_sparse),
        )

    def _names_to_give(self) -> Collection[str]:
        if "groups" not in vars(self):
            return ()
        # A class sets what it takes besides after `__init__` of this one.
        of_class = vars(self).keys() & inspect.signature(type(self)).parameters.keys()
        return {"use_locking", "on_nonfinite", *options(), *of_class}

    @property
    def global_norm(self) -> Any:
        """The norm of the gradients of the last step, before they were clipped.

        Those of groups with a clipping of their own are left out: see `group_norms`. It is a
        scalar: float64 if a variable is, else float32. On a GPU it is an array there, on the
        current stream, and the host waits where its value is used. None before the first step, and
        unless `clip_norm` is given.
        """
        return _norm_of(self.options.clips, 0)

    @property
    def group_norms(self) -> dict[str, Any]:
        """The same of each group with a `clip_norm` of its own, by the group's name."""
        clips = self.options.clips
        norms = {each.group_name: _norm_of(clips, n) for n, each in enumerate(self.groups, 1)}
        return {name: norm for name, norm in norms.items() if name is not None and norm is not None}

    def _key_on_gpu(self, request: StepRequest) -> Key | None:
        global_step = request.global_step
        context, every = replica_context(), (self.hyperparameters, *self.groups)
        if (
            not gpu_backends
            or request.additions
            or context.strategy is not None
            or context.num_replicas > 1
            or self._overrides_apply_hook()
        ):
            return None
        if global_step is not None and not _is_in_memory(global_step):
            return None
        if unknown_hyperparameter(every, global_step) is not None:
            return None
        return [each.own for each in every]

    def _has_state(self, name: str) -> bool:
        """Whether a hyperparameter has state: a group has its own from the beginning, or never."""
        return False

    def _initial_slot_values(self) -> Mapping[str, float]:
        """Returns each slot's initial value, in order of creation: by default 0 for every slot."""
        return dict.fromkeys(self.rule.slots, 0.0)

    def _slot_starts(self) -> Mapping[str, float]:
        """Returns the same of all slots: those of stages start at 0."""
        slots = self.rule_with_slots.slots
        of_stages = slots[: len(slots) - len(self.rule.slots)]
        return {**self._initial_slot_values(), **dict.fromkeys(of_stages, 0.0)}

    def _new_slot_rows(self, slot_name: str) -> NewRows:
        if slot_name == MASTER and self.options.codecs.masters is not None:
            return MASTER
        codecs, starts = self.options.codecs, self._slot_starts()
        if slot_name in codecs.array_names(codecs.coded):
            return codecs.form(slot_name, (1,), np.dtype(np.float32), starts).start
        return starts.get(slot_name)

    def _all_slot_names(self) -> list[str]:
        return [*self.options.codecs.array_names(self._slot_starts()), *self.own_counts]

    def _row_slot_names(self) -> Sequence[str]:
        return self.rule.row_slots

    def _state_ranges(self) -> Mapping[str, Range]:
        coded = self.options.codecs.coded
        squares = [name for name in self.rule.squares if name not in coded]
        return {
            **dict.fromkeys(map(scales_name, coded), Range(0.0, _LARGEST_SCALE)),
            **dict.fromkeys(squares, Range(0.0, np.inf)),
            **{each.counter: each.range for each in self.options.stages},
        }

    def _hyperparameters_to_save(self) -> dict[str, Any]:
        clips = self.options.clips
        of_groups = {each.group_name: each.to_save() for each in self.groups}
        return {
            "rule": self.rule.name,
            **self.hyperparameters.to_save(),
            **({} if clips is None else {"clip_form": clips.form.name.lower()}),
            **self.options.codecs.described(),
            **{each.name: each.described() for each in self.options.stages},
            **({"groups": of_groups} if of_groups else {}),
        }

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        """Returns the rule's scalars of this step, computed in the type `real`.

        Those that are `computed` are left out.

        Called for each group, with what `_hyper` returns then.
        """
        names = self.hyperparameter_of
        given = [name for name in self.rule.scalars if name not in self.rule.computed]
        return {name: real(self._hyper(names.get(name, name))) for name in given}

    def _sparse_scalars(
        self, scalars: Mapping[str, np.floating[Any]]
    ) -> Mapping[str, np.floating[Any]]:
        """Returns the scalars of sparse updates: by default the same.

        Args:
            scalars: Those of `_scalars`, in this step or in one of another count of steps: what is
                returned follows from these alone.
        """
        return scalars

    def _hyper(self, name: str) -> np.floating[Any]:
        """Returns a hyperparameter of this step: float64 where it was given so, else float32.

        While a group is computed, it is the group's.
        """
        try:
            return self.this_thread.hyperparameters[name]
        except KeyError:
            raise TypeError(
                f'the rule "{self.rule.name}" takes the scalar "{name}", which is no '
                f"hyperparameter of {type(self).__name__}: pass {name}=... to super().__init__(), "
                "or override _scalars"
            ) from None

    def _create_slots(self, var_list: Sequence[Variable]) -> None:
        create_slots(self.state, var_list, self._slot_starts(), self.rule.slot_shape)
        for variable in var_list:
            if self.options.codecs.masters is not None and has_master(variable.dtype):
                create_master(self.state, variable)
        for option in self.options.stages:
            first = min(var_list, key=attrgetter("name"))
            option.create_counter(self.state, first.device)
        if self.own_counts:
            create_counts(self.state, var_list, self)

    def _prepare(self) -> None:
        given = self.hyperparameters.fixed or self.hyperparameters.evaluate()
        of_groups = [each.fixed or each.evaluate() for each in self.groups] if self.groups else []
        scalars: dict[type[np.floating[Any]], Sequence[Scalars]] = {}
        if not self._has_own_scalars:
            before, known = self._fixed
            values = [given, *of_groups]
            if before and all(map(is_, before, values)):
                scalars = known
            else:
                self._fixed = values, scalars
        # Attributes of what threads have apart take several times as long.
        this_thread = vars(self.this_thread)
        this_thread["hyperparameters"], this_thread["of_groups"] = given, of_groups
        this_thread["group"], this_thread["scalars"] = 0, scalars

    def _group_of_scalars(self, variable: Variable, listed: Listed = None) -> int:
        """Returns the number of the group whose scalars a variable has in a call.

        After the parameter groups, each has a copy whose `weight_decay` is 0: see
        `_scalars_of_variant`.

        Args:
            variable: The variable.
            listed: See `StepRequest.decaying`, also for the methods below.

        Raises:
            TypeError: the variable does not decay, and the rule has no scalar that could be 0.
        """
        variant = self._variant_of(variable, listed)
        is_default = type(self)._scalars_of_variant is RuleOptimizer._scalars_of_variant
        if variant and is_default and WEIGHT_DECAY not in self.rule.scalars:
            raise TypeError(
                f'decay_variables: "{variable.name}" does not decay, and the rule '
                f'"{self.rule.name}" takes no scalar {WEIGHT_DECAY} that could be 0 for it: name '
                "it so, or override _scalars_of_variant"
            )
        return self._grouping.number_of(variable) + (1 + len(self.groups)) * variant

    def _number_of_scalars(self, variable: Variable, listed: Listed = None) -> int:
        """Returns the number of the scalars that a variable has in a call.

        It is that of `_group_of_scalars`; a variable with a count of its own has a larger number.
        """
        number = self._group_of_scalars(variable, listed)
        count = self.state.slot(variable, STEP) if self.own_counts else None
        if isinstance(count, StepCount):
            number += (1 + len(self.groups)) * _MOST_VARIANTS * count.number
        return number

    def _variant_of(self, variable: Variable, listed: Listed = None) -> int:
        """Returns 0 for a variable with its group's own scalars, 1 for one that does not decay."""
        return int(not self._decays(variable, listed))

    def _decays(self, variable: Variable, listed: Listed = None) -> bool:
        return self._decaying is None or self._decaying.has(variable)

    def _scalars_of_variant(self, variant: int, scalars: Scalars) -> Scalars:
        """Returns a group's scalars for its variables with this result of `_variant_of`."""
        return {**scalars, WEIGHT_DECAY: scalars[WEIGHT_DECAY].dtype.type(0)}

    def _scalars_of_groups(
        self, every: Any, numbers: Sequence[int], is_sparse: bool
    ) -> list[Scalars]:
        """Returns scalars by the numbers that `_number_of_scalars` returns.

        Args:
            every: Those of the parameter groups; or of counts, by the counts' numbers.
            numbers: See above.
            is_sparse: Whether they are for sparse gradients.
        """
        num_groups, found = 1 + len(self.groups), []
        for number in numbers:
            number, group = divmod(number, num_groups)
            count, variant = divmod(number, _MOST_VARIANTS)
            scalars = every[count if self.own_counts else group]
            if is_sparse:
                scalars = self._in_group(group, partial(self._sparse_scalars, scalars))
            found.append(self._scalars_of_variant(variant, scalars) if variant else scalars)
        return found

    def _in_group(self, number: int, compute: Callable[[], Result]) -> Result:
        """Calls a function that sees the hyperparameters of a group."""
        this_thread = vars(self.this_thread)
        given, group = this_thread["hyperparameters"], this_thread["group"]
        if number == group:
            return compute()
        if group == 0:
            this_thread["of_no_group"] = given
        own = this_thread["of_groups"][number - 1] if number else {}
        try:
            this_thread["hyperparameters"] = {**this_thread["of_no_group"], **own}
            this_thread["group"] = number
            return compute()
        finally:
            this_thread["hyperparameters"], this_thread["group"] = given, group

    def _apply_one(self, gradient: Gradient, variable: Variable) -> Any:
        update = partial(super()._apply_one, gradient, variable)
        return self._in_group(self._grouping.number_of(variable), update)

    def _apply_dense(self, grad: Any, var: Variable) -> None:
        """Updates one variable, for a hook, with the hyperparameters that `_prepare` evaluated."""
        counted = self.this_thread.counted
        updates = RuleUpdates(self, StepRequest([(grad, var)], decaying=self.this_thread.decaying))
        updates.create_slots()
        updates.fix_scalars()
        self.this_thread.counted = counted  # of all variables of the step
        updates.check()
        if updates.clips is not None:
            updates.measure()
        call_user_code(updates.update, is_ours=True)

    _apply_sparse = _apply_dense

    def _checked_updates(self, request: StepRequest) -> Updates:
        if not self._overrides_apply_hook():
            return RuleUpdates(self, request)
        for name, option in self._given_options.items():
            if option.by_hooks:
                raise NotImplementedError(
                    f"{type(self).__name__} overrides a hook that updates one variable at a time, "
                    f"{option.by_hooks}; leave {name} out"
                )
        updates = HookUpdates(self, request)
        self._grouping.check(updates.variables())
        return updates

    def forget_plans(self, changed: Set[Identity]) -> None:
        super().forget_plans(changed)
        self.plans.forget(changed)
        if self.options.averages is not None:
            self.options.averages.known.forget(changed)

    def _rule_of_call(
        self, variables: Sequence[Any], is_sparse: bool, listed: Listed
    ) -> tuple[UpdateRule, bytes]:
        """Returns the rule of this call, and the key of what groups the call itself chooses.

        The rule has the slots of `rule`, and no other scalars than it has. The key is empty if
        `_group_of_scalars` is the same in all calls.

        Args:
            variables: As the caller passed them: not checked yet.
            is_sparse: Whether the gradients are; else all are dense.
            listed: See `StepRequest.decaying`.
        """
        return self.rule, b""

    def _scalars_for(self, real: type[np.floating[Any]]) -> Any:
        if self.own_counts:
            return scalars_by_count(self, real)
        fixed = self.this_thread.scalars
        if real not in fixed:
            scalars = [ignore_fp_warnings(self._scalars, real)]
            if self.groups:
                of_group = partial(self._scalars, real)
                numbers = range(1, 1 + len(self.groups))
                scalars += ignore_fp_warnings(
                    lambda: [self._in_group(each, of_group) for each in numbers]
                )
            if self.rule.computed:
                computed = dict.fromkeys(self.rule.computed, real(0))
                scalars = [{**each, **computed} for each in scalars]
            fixed[real] = scalars
        return fixed[real]

    def _overrides_apply_hook(self) -> bool:
        """Whether a subclass overrides a hook that gets one variable: then nothing is batched."""
        return self._has_own_hooks or not vars(self).keys().isdisjoint(_APPLY_HOOKS)


RuleOptimizer.__doc__ = Documented(  # type: ignore[assignment]
    RuleOptimizer.__doc__, all_of=options
)


def _norm_of(clips: GradientClips | None, group: int) -> Any:
    measured = None if clips is None else clips.measured
    return None if measured is None else measured.norm(group)


def _is_in_memory(counter: Any) -> bool:
    """Whether whoever reads a counter can be made to wait for a GPU, and writing it waits not."""
    is_variable = isinstance(counter, Variable) and not counter.is_raw_array
    return is_variable and counter.memory.kind == "cpu"
