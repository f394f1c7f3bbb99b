"""The updates of one step by an update rule: dense variables together, and sparse ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from gpuopt.backends import array_types, backend_for
from gpuopt.backends.backend import Scalars
from gpuopt.backends.clips import ClipForm
from gpuopt.backends.loss_scaling import Decision
from gpuopt.backends.record import NOTHING_KNOWN, StepRecord
from gpuopt.computed_once import computed_once
from gpuopt.device import Device
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.counts import counts_of, separate_counts, shared_with_others
from gpuopt.state.masters import check_variables
from gpuopt.state.slots import create_slots, end_blocks_at_rows, master_or_own
from gpuopt.state.state import Created
from gpuopt.step.clips import CLIPPING_MAKES_NAN, GradientClips, Measurement, StepClips
from gpuopt.step.hooks import is_undoable
from gpuopt.step.known import Group, PlannedPart, StepPlan, selecting
from gpuopt.step.nonfinite import describe_first
from gpuopt.step.overlap import refuse_shared_memory
from gpuopt.step.pairs import (
    Zipped,
    as_pairs,
    checked_gradient,
    refuse_no_gradients,
    unpack_pair,
)
from gpuopt.step.parts import Part, Unit, names_of, units_of
from gpuopt.step.request import StepRequest
from gpuopt.step.rule_protocol import RuleOptimizer
from gpuopt.step.sparse_updates import apply_as_dense, apply_sparse
from gpuopt.step.stage_options import StageOption
from gpuopt.step.step_numbers import StepNumbers
from gpuopt.step.tables_behind import refuse_tables_of_another, refuse_unseen_reads
from gpuopt.step.updated_arrays import target_of
from gpuopt.step.updates import Pair, Updates, apply_constraint, dtypes_of
from gpuopt.step.wide_gradients import GradientTypes, types_of
from gpuopt.variables.gate import writing
from gpuopt.variables.identity import Identity
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable, as_variable

_NO_GROUP = [0]
_TUPLES = {tuple}
# Of gradients that are no plain arrays: plans have them, or leave them out.
_PLANNED = frozenset([IndexedSlices, type(None)])


class RuleUpdates(Updates):
    """The updates of one step by rules."""

    # Here, because setting each in `__init__` takes time.
    numbers = StepNumbers({}, None, ())
    # For each count of steps: see `decide_on_gpu`.
    _of_counts: Sequence[StepNumbers] = ()
    clips: StepClips | None = None
    # What backends write at once, as far as it is known; and for each, the result of `_join`.
    _units: Sequence[Unit] = ()
    _joined: Sequence[tuple[UpdateRule, Sequence[int], list[Scalars]]] = ()
    _host_decides = False
    _has_constraints = False
    is_followed = False
    unscaled_by: float | None = None
    has_rows_on_a_gpu = False
    # By device, for those whose updates must read one.
    records: Mapping[Device, StepRecord] = MappingProxyType({})

    def __init__(self, optimizer: RuleOptimizer, request: StepRequest) -> None:
        """Divides the pairs into parts and checks them; recognised pairs need few checks."""
        self._optimizer = optimizer
        self.request = request
        self._parts: list[Part] = []
        # What is being written, and what has been written.
        self._writing: Unit = []
        self._done: Unit = []
        self.created: list[Created] = []
        self.forgets: list[Callable[[Collection[Device] | None], None]] = []
        self.read: list[Variable] = []
        given = request.pairs
        if type(given) is Zipped:
            gradients, variables = given.gradients, given.variables
        else:
            if set(map(type, given)) != _TUPLES:
                given = as_pairs(given)
            try:
                # Not zip(*given): its thousands of iterators would set off the garbage collection.
                gradients, variables = [each for each, _ in given], [each for _, each in given]
            except ValueError:  # a tuple of another length
                as_pairs(given)
                raise
        kinds: Collection[Any] = set(map(type, gradients))
        if len(kinds) > 1:
            kinds = list(map(type, gradients))
        if optimizer._gradient_types is GradientTypes.FLOATS:  # which decide about the parts, too
            kinds = [*kinds, *[getattr(each, "dtype", None) for each in gradients]]
        if request.decaying is None:
            plan = optimizer.plans.steps.find(variables)
            if plan is not None and plan.kinds == kinds:
                self.is_planned = self._take(plan, variables, gradients)
        if not self.is_planned:
            self._divide(given, variables, gradients, kinds)

    def _take(self, plan: StepPlan, variables: Sequence[Any], gradients: Sequence[Any]) -> bool:
        """Divides the pairs as in an earlier step; returns whether its plan is still valid."""
        optimizer, num_elements = self._optimizer, 0
        every_row = optimizer.rule_of_other_rows is not None and not optimizer.catch_up
        version = optimizer.state.version.number
        for group, is_sparse, is_averaged, choice, positions, select in plan.parts:
            now = self._version_with_averages() if is_averaged else version
            if group.state_version != now:
                self._parts.clear()
                return False
            given, mine = variables, gradients
            if select is not None:
                given, mine = select(variables), select(gradients)
            if is_sparse:
                self.has_rows_on_a_gpu |= group.batches[0].device.kind == "gpu"
                if optimizer.catch_up:
                    refuse_unseen_reads(as_variable(given[0]), optimizer.state)
            if is_sparse and not every_row:
                num_elements += mine[0].values.size
            else:
                num_elements += group.num_elements
            rule, _ = optimizer._rule_of_call(given, is_sparse, None)
            part = Part(rule, given, mine, positions, group, is_averaged, choice)
            self._parts.append(part)
        if len(plan.parts) == 1 and len(group.batches) == 1:
            self._units = [[(part, group.batches[0])]]
        self.num_elements = num_elements
        return True

    def _remember(self, variables: Sequence[Any], kinds: Collection[Any]) -> None:
        """Keeps a plan for the next step of these pairs."""
        optimizer = self._optimizer
        moves_averages = optimizer.options.averages is not None
        if optimizer.own_counts and shared_with_others(optimizer.state, self.variables()):
            return  # the next step comes after `separate_counts`
        parts: list[PlannedPart] = []
        for part in self._parts:
            if part.group is None or part.is_averaged != (moves_averages and not part.is_sparse):
                return
            numbers = part.numbers
            select = None if len(numbers) == len(variables) else selecting(numbers)
            own = part.is_sparse, part.is_averaged, part.choice, numbers, select
            parts.append(PlannedPart(part.group, *own))
        optimizer.plans.steps.add(variables, StepPlan(kinds, parts))

    def _divide(
        self,
        given: Sequence[tuple[Any, Any]],
        variables: Sequence[Any],
        gradients: Sequence[Any],
        kinds: Collection[Any],
    ) -> None:
        """Divides pairs that are not known together."""
        optimizer, request = self._optimizer, self.request
        others = [at for at, each in enumerate(gradients) if type(each) not in array_types]
        left: Sequence[int] = range(len(given))
        if others:
            given = list(given)  # what converts a gradient may change the caller's list
            left = sorted(set(left).difference(others))
        if left:
            self._add_dense([variables[at] for at in left], [gradients[at] for at in left], left)
        converted: list[tuple[int, Any, Any]] = []
        for position in others:
            gradient, variable = unpack_pair(position, given[position])
            if gradient is None:
                continue
            as_passed = given[position][1]
            if isinstance(gradient, IndexedSlices):
                if optimizer.catch_up:
                    refuse_unseen_reads(variable, optimizer.state)
                self.has_rows_on_a_gpu |= variable.device.kind == "gpu"
                self._add_part([as_passed], [gradient], [position], is_sparse=True)
            else:
                types = types_of(optimizer, request.takes_wide)
                checked = checked_gradient(gradient, variable, dtypes_of(optimizer), types)
                if isinstance(gradient, Variable):
                    self.read.append(gradient)
                converted.append((position, checked, as_passed))
        if converted:
            positions, arrays, listed = zip(*converted, strict=True)
            self._add_dense(listed, arrays, positions)
        if not self._parts:
            refuse_no_gradients([unpack_pair(*each)[1] for each in enumerate(given)])
        if request.decaying is None and _PLANNED.issuperset([type(gradients[at]) for at in others]):
            self._remember(variables, kinds)

    def pairs(self) -> Sequence[Pair]:
        if len(self._parts) == 1:
            return list(self._parts[0].pairs())
        every = [
            each for part in self._parts for each in zip(part.numbers, part.pairs(), strict=True)
        ]
        return [pair for _, pair in sorted(every, key=itemgetter(0))]

    def variables(self) -> Sequence[Variable]:
        return [variable for part in self._parts for variable in part.variables()]

    def sparse_pairs(self) -> Sequence[Pair]:
        return [pair for part in self._parts if part.is_sparse for pair in part.pairs()]

    def identities(self) -> Iterable[Identity]:
        return chain.from_iterable(part.identities() for part in self._parts)

    @computed_once
    def num_elements(self) -> int:
        number, optimizer = 0, self._optimizer
        every_row = optimizer.rule_of_other_rows is not None and not optimizer.catch_up
        for part in self._parts:
            if part.is_sparse and not every_row:
                number += part.gradients[0].values.size
            elif part.group is not None:
                number += part.group.num_elements
            else:
                number += sum(variable.size for variable in part.variables())
        return number

    def devices(self) -> Collection[Device]:
        groups = [part.group for part in self._parts if part.group is not None]
        return {batch.device for group in groups for batch in group.batches}

    def refuse_shared_memory(self, counter: Variable | None) -> None:
        if len(self._parts) == 1 and counter is None and self._parts[0].group is not None:
            return
        groups = [part.group for part in self._parts if part.group is not None]
        if len(groups) < len(self._parts):
            self._look_for_shared_memory(counter)
            return
        first, *others = groups
        members: list[Group | Identity] = [*others]
        if counter is not None:
            members.append(counter.identity)
        if members and not first.is_known_apart(members):
            self._look_for_shared_memory(counter)
            first.note_apart(members)

    def _look_for_shared_memory(self, counter: Variable | None) -> None:
        variables, state = self.variables(), self._optimizer.state
        slots = [slot for variable in variables for slot in state.slots_of(variable)]
        if self._optimizer.options.averages is not None:
            slots += self._optimizer.options.averages.of(variables)
        refuse_shared_memory(variables, [*slots, *([] if counter is None else [counter])])

    def create_slots(self, of_part: bool = False) -> None:
        codecs = self._optimizer.options.codecs
        tables = self._tables_with_codes() if codecs.coded else ()
        unknown = [part for part in self._parts if part.group is None]
        if not unknown:
            return
        for part in self._parts:
            if part.group is not None:  # others have been checked
                part.check(self._optimizer, self.request.takes_wide)
        state = self._optimizer.state
        with writing(), state.lock:
            variables = [v for part in unknown for v in part.variables()]
            new = [each for each in variables if not state.slots_of(each)]
            self._optimizer._grouping.check(variables)
            if codecs.masters is not None:
                check_variables(state, variables, codecs.masters)
                refuse_tables_of_another(variables, state)
            codecs.check_types(variables)
            for option in self._optimizer.options.stages:
                option.check(variables)
            if tables:
                shape_of = self._optimizer.rule.slot_shape
                starts = self._optimizer._slot_starts()
                create = partial(create_slots, state, tables, starts, shape_of, by_rows=True)
                self.created += state.collect_created(create)
            self.created += state.collect_created(lambda: self._optimizer._create_slots(variables))
            for part in unknown:
                target_in = partial(target_of, self._optimizer)
                known = self._optimizer.plans.groups
                if part.is_averaged and self._optimizer.options.averages is not None:
                    averages = self._optimizer.options.averages
                    target_in, known = partial(averages.target, target_in), averages.known
                group = Group(
                    part.variables(),
                    self._version_with_averages() if part.is_averaged else state.version.number,
                    target_in,
                    partial(self._optimizer._number_of_scalars, listed=self.request.decaying),
                    part.choice,
                    counts_of(state, part.variables()) if self._optimizer.own_counts else (),
                )
                known.add(group)
                part.group = group
            if not of_part:
                self._optimizer.plans.misuse.note_call(
                    [part.require_group() for part in unknown],
                    self.variables(),
                    new,
                    bool(self._optimizer._all_non_slot_names()),
                )

    def _tables_with_codes(self) -> list[Variable]:
        """Returns the variables with sparse gradients; makes blocks of their slots end at rows.

        Raises:
            NotImplementedError: the form has no blocks that end at rows.
        """
        tables = [part.variables()[0] for part in self._parts if part.is_sparse]
        codecs = self._optimizer.options.codecs
        if tables and not all(codec.ends_at_rows for codec in codecs.coded.values()):
            raise NotImplementedError(
                f'the gradient of "{tables[0].name}" is IndexedSlices, and slots in 8 bits of the '
                f'form "{codecs.slot_form}" have blocks that end at no rows: give slot_form="root"'
            )
        state = self._optimizer.state
        version = state.version.number
        for table in tables:
            end_blocks_at_rows(state, table, codecs)
        if state.version.number != version:
            for part in self._parts:
                part.group = None
        return tables

    def fix_scalars(self) -> None:
        optimizer = self._optimizer
        scalars: dict[type[np.floating[Any]], Sequence[Scalars]] = {}
        if optimizer.own_counts:
            counts = [part.require_group().counts for part in self._parts]
            each_once = counts[0] if len(counts) == 1 else dict.fromkeys(chain(*counts))
            optimizer.this_thread.counted = list(each_once)
        for part in self._parts:
            group = part.group
            assert group is not None, "create_slots comes first"
            if group.constrained:
                self._has_constraints = True
            for batch in group.batches:
                if batch.real not in scalars:
                    scalars[batch.real] = optimizer._scalars_for(batch.real)
        if optimizer.options.clips is not None and self.request.decides is None:
            self.clips = self._clips_by(None)
        averages = None
        if optimizer.options.averages is not None:
            counter = optimizer.this_thread.global_step
            averages = optimizer.options.averages.of_step(counter)
            self.forgets.append(averages.forget)
        self.is_followed = averages is not None or self._has_constraints
        stages: Sequence[tuple[StageOption, Scalars]] = ()
        if optimizer.options.stages:
            state, options = optimizer.state, optimizer.options.stages
            stages = [(option, option.scalars_of_next_step(state)) for option in options]
        self.numbers = StepNumbers(scalars, averages, stages)
        self._of_counts = [self.numbers]

    def fix_scalars_anew(self) -> None:
        """Repeats `fix_scalars`, with the numbers that this thread reads now."""
        self._optimizer.this_thread.scalars = {}
        self._optimizer._prepare()
        self.fix_scalars()

    def count(self) -> None:
        """Changes powers and counters as the step does, but not the global step."""
        optimizer = self._optimizer
        for option in optimizer.options.stages:
            option.count(optimizer.state)
        optimizer._finish([], self.request.name or optimizer.get_name())

    def check(self) -> None:
        optimizer = self._optimizer
        averages, version = optimizer.options.averages, optimizer.state.version.number
        is_anew = False
        for part in self._parts:
            now = self._version_with_averages() if part.is_averaged else version
            if part.group is not None and part.group.state_version != now:
                # User code has replaced a slot, or an average is gone.
                part.group, self._units = None, ()
                if optimizer.own_counts and not is_anew:
                    is_anew = True
                    separate_counts(optimizer.state, self.variables(), optimizer.ledger.settle)
                if averages is not None and part.is_averaged:
                    part.is_averaged = all(averages.joining(part.given))
                self.create_slots()
            part.check(optimizer, self.request.takes_wide)
        if is_anew and self._of_counts:  # else the scalars come later
            optimizer.this_thread.scalars = {}
            self.fix_scalars()

    def must_check_first(self) -> bool:
        needs_host = self._has_constraints or self._host_decides
        return needs_host or not is_undoable(self._optimizer._finish)

    def measure(self) -> None:
        assert self.clips is not None, "they are asked for"
        units = self._units = self._units or units_of(self._parts)
        self._joined = [self._join(unit) for unit in units]
        # A stage of an option may change the gradient that the rule itself sums.
        degrees = [unit[0][0].rule.degrees for unit in units]
        sums_inputs = degrees == [rule.degrees for rule, *_ in self._joined]
        given = list(chain.from_iterable(units)), self._optimizer.ledger.records
        copies = self.request.copies
        self.records = ignore_fp_warnings(self.clips.measure, *given, copies, sums_inputs)

    def update(self) -> list[Any]:
        optimizer, clips = self._optimizer, self.clips
        units = self._units or units_of(self._parts)
        joined = self._joined or [self._join(unit) for unit in units]
        if clips is None and optimizer.ledger.flags:
            self.records = optimizer.ledger.records
        for unit, (rule, numbers, scalars) in zip(units, joined, strict=True):
            part, batch = unit[0]
            record = self.records.get(batch.device, NOTHING_KNOWN)
            if clips is not None:
                rule, scalars = clips.clip(rule, batch, numbers, scalars, record)
            self._writing = unit
            # Raw arrays own the memory that the plan writes to.
            kept = [part.given for part, batch in unit if batch.is_borrowed]
            if part.is_sparse and rule.sums:
                apply_as_dense(optimizer, unit, rule, numbers, scalars, record, kept)
            elif part.is_sparse:
                apply_sparse(optimizer, unit, rule, numbers, scalars, record, kept)
            else:
                batch.backend.apply_dense(
                    rule,
                    batch.plan,
                    batch.select(part.gradients) if batch.positions else part.gradients,
                    scalars,
                    record=record,
                    version=None if part.versions is None else part.versions[batch.number],
                    kept=kept,
                )
            self._done += unit
        self._writing = []
        return []

    def follow(self) -> None:
        if self._has_constraints:
            for part in self._parts:
                for position in part.require_group().constrained:
                    apply_constraint(part.given[position])
        averages, variables = self.numbers.averages, self._averaged_alone()
        if averages is None or not variables:
            return
        values: Sequence[Variable] = variables
        if self._optimizer.options.codecs.masters is not None:
            values = [master_or_own(self._optimizer.state, each) for each in variables]
        if self.gpu_decides is None:  # else none is missing: see `deciding_gpu`
            averages.start(variables, values)
        every = [each.averages for each in self._of_counts if each.averages is not None]
        averages.follow(variables, values, every, self.records)

    def _join(self, unit: Unit) -> tuple[UpdateRule, Sequence[int], list[Scalars]]:
        """Returns the rule of a unit with its stages, the groups of its scalars, and these."""
        optimizer, (part, batch) = self._optimizer, unit[0]
        if part.rule.is_emitted or batch.device.kind == "cpu":
            _ = part.rule.programs  # refuses a rule that could not be traced when it was made
        numbers = batch.scalar_groups
        is_plain = numbers == _NO_GROUP and part.rule is optimizer.rule
        if is_plain and not part.is_sparse:
            [first, *others] = self._of_counts
            if not others and not first.stages and not part.is_averaged:
                return part.rule, numbers, [first.scalars[batch.real][0]]
        if len(unit) > 1:
            numbers = sorted({number for _, each in unit for number in each.scalar_groups})
        rule, has_stages = part.rule, part.is_averaged or bool(self.numbers.stages)
        if has_stages:
            rule = self.numbers.staged(rule, batch, part.is_averaged)
        scalars: list[Scalars] = []
        for of_count in self._of_counts:
            every = of_count.scalars[batch.real]
            mine: Sequence[Scalars]
            if numbers == _NO_GROUP and not part.is_sparse:
                mine = every[:1]
            else:
                mine = optimizer._scalars_of_groups(every, numbers, part.is_sparse)
            if part.rule is not optimizer.rule:
                mine = [part.rule.own(each) for each in mine]
            if has_stages:
                own = of_count.of_stages(batch, part.is_averaged)
                mine = [{**each, **own} for each in mine]
            scalars += mine
        return rule, numbers, scalars

    def clip(self) -> None:
        """Clips gradients as they are, where a GPU could have decided, and the host does."""
        if self._optimizer.options.clips is not None:
            self.clips = self._clips_by(None)

    def unscale(self, factor: float) -> None:
        self.clips, self.unscaled_by = self._clips_by(factor), factor
        self._host_decides = True

    def measure_all(self) -> None:
        self.clips, self.unscaled_by = self._clips_by(1.0), 1.0

    def _clips_by(self, unscale: float | None) -> StepClips:
        """Returns how gradients are clipped, by the values that the optimizer's `_prepare` found.

        Args:
            unscale: See `GradientClips.of_step`.
        """
        optimizer = self._optimizer
        thread, clips = optimizer.this_thread, optimizer.options.clips
        if clips is None:
            clips = GradientClips(ClipForm.TENSORFLOW, measures_all=False, sums_inputs=False)
        return clips.of_step(thread.hyperparameters, thread.of_groups, unscale)

    def deciding_gpu(self, last: Device | None) -> Device | None:
        """Returns the GPU that can decide whether the step is made; None if the host must.

        Args:
            last: The one that has decided about the step before, which can about all others.
        """
        parts = self._parts
        devices = self.devices()
        if self._has_constraints or not is_undoable(self._optimizer._finish):
            return None
        if [each for each in devices if backend_for(each).loss_scalings is None]:
            return None
        if not self._averages_follow_the_count():
            return None
        arrays = chain.from_iterable(
            part.gradients[:1] if part.is_sparse else part.gradients for part in parts
        )
        if not any(_has_elements(array) for array in arrays):
            return None
        return last or min(devices, key=lambda device: device.index)

    def _averages_follow_the_count(self) -> bool:
        """Whether the step's averages depend on the count of steps alone, and none is missing."""
        following = self._optimizer.options.averages
        if following is None:
            return True
        counter, alone = self._optimizer.this_thread.global_step, self._averaged_alone()
        return following.moving.follows(counter) and len(following.of(alone)) == len(alone)

    def _averaged_alone(self) -> list[Variable]:
        """Returns the variables whose average is not moved by their rule."""
        return [v for part in self._parts if not part.is_averaged for v in part.variables()]

    def decide_on_gpu(
        self,
        decision: Decision,
        device: Device,
        unscale: float,
        of_counts: Sequence[StepNumbers],
    ) -> None:
        """Has `deciding_gpu` decide before it writes.

        Args:
            decision: How.
            device: Which GPU it is.
            unscale: See `unscale`; 0 for the reciprocal of the loss scale before the step.
            of_counts: `numbers` for each count of steps that the GPU may have made, in descending
                order without gaps.
        """
        self.clips = self._clips_by(unscale)
        self.clips.decision, self.clips.deciding = decision, device
        self._of_counts = of_counts

    @property
    def measured_names(self) -> Sequence[tuple[Sequence[int], Sequence[str], bool]]:
        """The numbers of gradients, their variables' names, and whether they are sparse."""
        return [(part.numbers, part.require_group().names, part.is_sparse) for part in self._parts]

    def find_nonfinite(self) -> str | None:
        assert self.clips is not None, "unscale or measure_all comes first"
        device = self._units[0][0][1].device  # each has the sums of all
        found = self.clips.look(device, self.records[device])
        if found is Measurement.FINITE:
            return None
        is_clipped_to_nan = found is Measurement.FACTOR_IS_NAN
        return describe_first(self.pairs()) or (CLIPPING_MAKES_NAN if is_clipped_to_nan else None)

    def written(self) -> tuple[list[str], list[str]]:
        return names_of(self._done), names_of(self._writing)

    def _add_dense(
        self,
        variables: Sequence[Any],
        gradients: Sequence[Any],
        positions: Sequence[int],
        is_averaged: bool | None = None,
    ) -> None:
        """Finds the group of dense gradients' variables, or checks the gradients for a new one.

        Args:
            variables: As the caller passed them.
            gradients: An array on any device for each variable.
            positions: The variables' positions in the caller's list.
            is_averaged: Whether it moves their averages, too; None to find out. There is a part for
                those of which it does, and one for the others.
        """
        optimizer = self._optimizer
        if optimizer._gradient_types is GradientTypes.FLOATS:
            # Backends update variables of one type by gradients of one type.
            pairs = zip(gradients, variables, strict=True)
            found = [(g.dtype, getattr(v, "dtype", g.dtype)) for g, v in pairs]
            others = ["" if dtype == own else dtype.name for dtype, own in found]
            if len(kinds := list(dict.fromkeys(others))) > 1:
                for kind in kinds:
                    chosen = _chosen(others, kind, variables, gradients, positions)
                    self._add_dense(*chosen, is_averaged)
                return
        if optimizer.options.averages is None:
            is_averaged = False
        elif is_averaged is None:
            joining = optimizer.options.averages.joining(variables)
            for joins in dict.fromkeys(joining):
                self._add_dense(*_chosen(joining, joins, variables, gradients, positions), joins)
            return
        self._add_part(variables, gradients, positions, is_sparse=False, is_averaged=is_averaged)

    def _add_part(
        self,
        variables: Sequence[Any],
        gradients: Sequence[Any],
        positions: Sequence[int],
        *,
        is_sparse: bool,
        is_averaged: bool = False,
    ) -> None:
        optimizer = self._optimizer
        known, version = optimizer.plans.groups, optimizer.state.version.number
        if is_averaged and optimizer.options.averages is not None:
            known, version = optimizer.options.averages.known, self._version_with_averages()
        rule, choice = optimizer._rule_of_call(variables, is_sparse, self.request.decaying)
        group = known.find_by_identities(variables, choice)
        if group is not None and group.state_version != version:
            group = None
        part = Part(rule, variables, gradients, positions, group, is_averaged, choice)
        if group is None:
            for position, pair in zip(
                positions, zip(gradients, variables, strict=True), strict=True
            ):
                unpack_pair(position, pair)
            part.check(optimizer, self.request.takes_wide)
        self._parts.append(part)

    def _version_with_averages(self) -> int:
        """Returns the present `Group.state_version` of plans that also write averages."""
        averages = self._optimizer.options.averages
        dropped = 0 if averages is None else averages.moving.version
        return self._optimizer.state.version.number + dropped


def _chosen(
    kinds: Sequence[Any], kind: Any, *lists: Sequence[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns of each of three lists the items of one kind, given each item's kind."""
    mine = [i for i, each in enumerate(kinds) if each == kind]
    some, theirs, at = ([items[i] for i in mine] for items in lists)
    return some, theirs, at


def _has_elements(gradient: Any) -> bool:
    if isinstance(gradient, IndexedSlices):
        gradient = gradient.values
    return bool(gradient.size)
