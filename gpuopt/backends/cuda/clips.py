"""Measures a step's gradients on a GPU, and decides about the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from gpuopt.backends.clips import (
    ClipLimits,
    DenseGradients,
    RuleInputs,
    SparseGradient,
    sums_of,
)
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.dense_plan import DensePlan
from gpuopt.backends.cuda.launch_shapes import (
    CLIP_THREADS,
    MEASURED_ROWS,
    PACK_BYTES,
    lanes_per_row,
    num_blocks,
)
from gpuopt.backends.cuda.launcher import Launcher, LaunchSequence
from gpuopt.backends.cuda.loss_scaling import DECIDED_ELSEWHERE, CudaLossScalings
from gpuopt.backends.cuda.mixed import storage_of
from gpuopt.backends.cuda.norms import ClippedArrays
from gpuopt.backends.cuda.order import UpdateOrder
from gpuopt.backends.cuda.parameters import name_of
from gpuopt.backends.cuda.sorted_rows import (
    SortedTables,
    Table,
    TablesKind,
    add_pieces,
    tables_kind_of,
)
from gpuopt.backends.cuda.structs import (
    FEW_DEVICES,
    NOTHING_IS_WRONG,
    ClipResult,
    ClipRule,
    ClipTotals,
    FewSums,
    LossDecision,
    NoDecision,
)
from gpuopt.backends.cuda.workspace import Workspace, Workspaces
from gpuopt.backends.loss_scaling import Decision
from gpuopt.backends.record import StepRecord
from gpuopt.backends.row_order import together
from gpuopt.locks import Lock
from gpuopt.rules.update_rule import UpdateRule

_NOWHERE = ClipTotals(0, 0, 0, 0, 0, 0, 0)
_NO_DECISION = NoDecision()
# The sums become no results: another launch follows.
NO_RULE = ClipRule(0, 0.0, 1.0, 1.0, 0, 0)
Array = Any


class MeasuredTables:
    """The launches for tables of one kind, on one stream: they sort, and add up squares."""

    def __init__(
        self,
        launcher: Launcher,
        workspace: Workspace,
        kind: TablesKind,
        tables: Sequence[Table],
        refused: Any,
        decision: LossDecision | None = None,
    ) -> None:
        """Prepares the launches; the last three arguments are those of the first `start`."""
        self._tables = SortedTables(launcher, workspace, kind)
        self._measure = LaunchSequence()
        num_parts = -(-kind.num_rows // MEASURED_ROWS)
        parts = workspace.take("squares", num_parts, "float64")
        rows = self._tables.add_sort(workspace, tables, refused)
        given = {**self._tables.gradients_of(tables), "num_tables": len(tables)}
        run_parts = add_pieces(
            self._measure, launcher, workspace, rows, kind.dtype, kind.width, given, refused
        )
        launch = launcher.bind(
            kernels.measure_rows(
                name_of(kind.dtype), name_of(rows.keys.dtype), decides=decision is not None
            ),
            num_blocks(num_parts, 1, launcher.num_multiprocessors),
            CLIP_THREADS,
            **given,
            rows=rows,
            run_parts=run_parts,
            row_width=kind.width,
            lanes_per_row=lanes_per_row(kind.width, PACK_BYTES // kind.dtype.itemsize),
            refused=refused,
            parts=parts,
            totals=_NOWHERE,
            rule=NO_RULE,
            results=None,
            decision=decision or _NO_DECISION,
        )
        self._measure.add(launch)

    def start(
        self,
        tables: Sequence[Table],
        refused: Any,
        *,
        decision: LossDecision | NoDecision,
        totals: ClipTotals,
        rule: ClipRule,
        results: Any,
    ) -> None:
        """Adds up the squares on the current stream.

        Args:
            tables: Of the kind's heights, in its order.
            refused: A row flag. If it is set, nothing is added.
            decision: About the step, if they were prepared with one.
            totals: Where sums go.
            rule: How results are made of them.
            results: Where these go; None if another launch follows.
        """
        self._tables.start(tables, refused)
        self._measure.start(
            refused=refused,
            totals=totals,
            rule=rule,
            results=results,
            decision=decision,
            **self._tables.gradients_of(tables),
        )


class _Sum(NamedTuple):
    """The part of norms that one launch adds.

    Attributes:
        norms: The norms' numbers, one after the other.
        begins: Where the sums of each one's chunks begin, and the last ones end; of several norms.
        launch: Launches it, given arguments for where sums go.
        numbers: See `DenseGradients`, of the launch's.
    """

    norms: range
    begins: Sequence[int]
    launch: Callable[..., None]
    numbers: Sequence[int]


class CudaClips:
    """See `Clips`. A launch for each dtype of dense gradients; of rows, for each norm and width.

    The last block of each adds up what all its blocks have found, so that no launch is for that
    alone, and no block waits for another one.
    """

    def __init__(
        self,
        launcher: Launcher,
        lock: Lock,
        order: UpdateOrder,
        workspaces: Workspaces,
        scalings: CudaLossScalings,
        flag_array: Callable[[Any], Any],
    ) -> None:
        """`flag_array` returns what kernels read of a row flag, or of None."""
        self._launcher = launcher
        self._lock = lock
        self._order = order
        self._workspaces = workspaces
        self._scalings = scalings
        self._flag_array = flag_array

    def inputs(
        self, rule: UpdateRule, plan: DensePlan, bounds: Sequence[float]
    ) -> RuleInputs | None:
        if not rule.degrees or plan.codecs.per_block or not plan.num_variables:
            return None
        size = plan.num_variables * len(rule.sums)
        with self._launcher.device():
            sums = self._launcher.xp.empty(size, np.float64)
        return RuleInputs(rule, plan, sums, bounds)

    def sums(
        self,
        dense: Sequence[DenseGradients],
        sparse: Sequence[SparseGradient],
        num_norms: int,
        refused: Any = None,
        *,
        decides: bool = False,
    ) -> Array:
        with self._lock, self._launcher.device():
            self._follow_flag(refused)
            flag = self._flag_array(refused)
            if not decides:
                return self._sum(dense, sparse, num_norms, flag)
            decision = DECIDED_ELSEWHERE._replace(refused=self._launcher.address(flag))
            sums = self._sum(dense, sparse, num_norms, flag, decision)
            if refused is not None:
                self._order.end_reading((refused,))
            return sums

    def measure(
        self,
        dense: Sequence[DenseGradients],
        sparse: Sequence[SparseGradient],
        limits: ClipLimits,
        refused: Any = None,
        decision: Decision | None = None,
    ) -> StepRecord:
        with self._lock, self._launcher.device():
            if decision is None:
                self._follow_flag(refused)
            flag = self._flag_array(refused)
            with self._recording(limits, decision, refused, flag) as (record, given):
                self._sum(dense, sparse, len(limits.most), flag, given, limits, record.factors)
        return record._replace(sums=sums_of(dense))

    def join(
        self, sums: Sequence[Array], limits: ClipLimits, decision: Decision | None = None
    ) -> StepRecord:
        with self._lock, self._launcher.device():
            flag = self._flag_array(None)
            with self._recording(limits, decision, None, flag) as (record, given):
                self._join(sums, limits, record.factors, given)
                return record

    def memory(self, record: StepRecord) -> Array:
        if record.refused is None:  # the host decides
            return record.factors
        return self._scalings.memory(record.refused)

    def take(self, record: StepRecord, memory: Array) -> StepRecord:
        if record.refused is None:
            return record._replace(factors=memory)
        after = self._scalings.copied(memory)
        return record._replace(refused=after, factors=after.factors)

    def factor_scalar(
        self, factors: Array, norm: int, real: type[np.floating[Any]]
    ) -> np.floating[Any]:
        return real(norm)

    @contextmanager
    def _recording(
        self, limits: ClipLimits, decision: Decision | None, refused: Any, flag: Any
    ) -> Iterator[tuple[StepRecord, LossDecision | None]]:
        """Yields a new record, which launches inside may write, and their argument to decide by."""
        num_norms = len(limits.most)
        if decision is None:
            yield StepRecord(refused, self._empty_results(num_norms)), None
        else:
            address = self._launcher.address(flag)
            with self._scalings.deciding(decision, num_norms, refused, address) as given:
                yield given

    def _sum(
        self,
        dense: Sequence[DenseGradients],
        sparse: Sequence[SparseGradient],
        num_norms: int,
        flag: Any,
        decision: LossDecision | None = None,
        limits: ClipLimits | None = None,
        results: Array | None = None,
    ) -> Array:
        """Returns the sums; if there are limits, writes the results, and decides."""
        sums = self._launcher.xp.empty(num_norms + (decision is not None), np.float64)
        for each in dense:
            if each.inputs is not None:
                self._follow(each.inputs.plan)
        try:
            are_any = self._launch(dense, sparse, flag, sums, results, limits, decision)
        finally:
            self._order.hold((sums, results, dense, sparse))
        if not are_any:
            sums[...] = 0
            sums[num_norms:] = NOTHING_IS_WRONG
            if limits is not None:
                self._join([sums], limits, results)
        return sums

    def _join(
        self,
        sums: Sequence[Array],
        limits: ClipLimits,
        results: Array,
        decision: LossDecision | None = None,
    ) -> None:
        """Writes results of the sums of all devices, and decides about the step."""
        num_norms = len(limits.most)
        addresses = [self._launcher.address(each) for each in sums]
        workspace = self._workspaces.take(self._launcher.stream())
        many = None
        if len(addresses) > FEW_DEVICES:
            many, addresses = workspace.constants("sums to join").set(addresses), []
        few = FewSums([*addresses, *[0] * (FEW_DEVICES - len(addresses))])
        workspace.launch(
            kernels.join_sums(decides=decision is not None),
            num_blocks(num_norms, CLIP_THREADS, self._launcher.num_multiprocessors),
            CLIP_THREADS,
            few_sums=few,
            many_sums=many,
            num_devices=len(sums),
            num_norms=num_norms,
            rule=self._rule(workspace, limits),
            results=results,
            decision=decision or _NO_DECISION,
        )
        self._workspaces.put_back(workspace)
        self._order.hold((sums, results))

    def _follow_flag(self, refused: Any) -> None:
        # Without one, too: this notes that the stream is in use.
        self._order.follow(() if refused is None else (refused,))

    def _launch(
        self,
        dense: Sequence[DenseGradients],
        sparse: Sequence[SparseGradient],
        flag: Any,
        sums: Array,
        results: Array | None,
        limits: ClipLimits | None,
        decision: LossDecision | None,
    ) -> bool:
        """Launches the kernels that measure; returns whether there is anything to measure."""
        workspace = self._workspaces.take(self._launcher.stream())
        if decision is not None:
            word = workspace.zeros("bad", 1, "uint64")
            decision = decision._replace(bad=self._launcher.address(word))
        every = [*self._dense_sums(workspace, dense, decides=decision is not None)]
        every += self._sparse_sums(workspace, sparse, flag, decision)
        num_norms, address = len(sums) - (decision is not None), self._launcher.address
        rule = NO_RULE if limits is None else self._rule(workspace, limits)
        unscaling = NO_RULE._replace(unscale=rule.unscale)
        num_done = workspace.zeros("num_done", 1, "uint32")
        for number, one in enumerate(every):
            is_last = number == len(every) - 1
            begins = 0
            if one.begins:
                begins = address(workspace.constants(f"begins {number}").set(one.begins))
            norms = one.norms.start, one.norms.stop
            totals = ClipTotals(
                address(sums), address(num_done), *norms, begins, num_norms, int(number == 0)
            )
            given: LossDecision | NoDecision = _NO_DECISION
            if decision is not None:
                given = decision._replace(**self._numbers(workspace, number, one.numbers))
            one.launch(
                totals=totals,
                rule=rule if is_last else unscaling,
                results=results if is_last else None,
                decision=given,
            )
        self._workspaces.put_back(workspace)
        return bool(every)

    def _dense_sums(
        self,
        workspace: Workspace,
        dense: Sequence[DenseGradients],
        decides: bool,
    ) -> Iterator[_Sum]:
        for number, gradients in enumerate(dense):
            arrays, of_norms = gradients.arrays, gradients.positions()
            if not of_norms:
                continue
            norms = range(min(of_norms), max(of_norms) + 1)
            positions = [at for norm in norms for at in of_norms.get(norm, ())]
            dtype = arrays[positions[0]].dtype
            # All are uploaded before the first launch: those of one dtype must not share.
            constants = workspace.constants(f"gradients {number}")
            table = ClippedArrays(self._launcher, arrays, positions, constants=constants)
            kernel = kernels.measure(name_of(dtype), decides)
            more: dict[str, Any] = {}
            if gradients.inputs is not None:
                rule, plan, sums, bounds = gradients.inputs
                kernel = kernels.measure_inputs(rule, storage_of(plan.codecs, dtype), decides)
                variables = workspace.constants(f"variables {number}")
                size = table.num_chunks * len(rule.sums)
                more = {
                    "variables": variables.set(
                        plan.measured(positions, [bounds[at] for at in positions])
                    ),
                    "parts_of_sums": workspace.take("sums of inputs", size, "float64"),
                    "num_done": workspace.zeros("variables_done", len(positions), "uint32"),
                    "sums": sums,
                }
            parts = workspace.take("squares", table.num_chunks, "float64")
            launch = partial(table.launch, kernel, workspace, parts=parts, **more)
            numbers = [gradients.numbers[at] for at in positions] if decides else ()
            begins: Sequence[int] = ()
            if len(norms) > 1:
                ends = accumulate(len(of_norms.get(norm, ())) for norm in norms)
                begins = [table.first_chunks[at] for at in (0, *ends)]
            yield _Sum(norms, begins, launch, numbers)

    def _follow(self, plan: DensePlan) -> None:
        """Makes the current stream wait until a plan's variables can be read."""
        last = plan.last_update
        is_last = last is not None and not last.is_superseded
        self._order.follow((plan,) if is_last else plan.updated)
        plan.fill_stand_ins()

    def _sparse_sums(
        self,
        workspace: Workspace,
        sparse: Sequence[SparseGradient],
        flag: Any,
        decision: LossDecision | None,
    ) -> Iterator[_Sum]:
        by_kind: dict[tuple[int, np.dtype[Any], int], list[Table]] = {}
        numbers: dict[tuple[int, np.dtype[Any], int], list[int]] = {}
        contiguous = self._launcher.xp.ascontiguousarray
        for values, rows, height, norm, number in sparse:
            if values.size:
                key = norm, values.dtype, math.prod(values.shape[1:])
                table = Table((), height, contiguous(values), contiguous(rows))
                by_kind.setdefault(key, []).append(table)
                numbers.setdefault(key, []).append(number)
        for (norm, dtype, width), tables in by_kind.items():
            left = iter(numbers[norm, dtype, width])
            for some in together(tables) if len(tables) > 1 else (tables,):
                kind = tables_kind_of(dtype, width, some, checks=False)
                given = some, flag, decision
                prepare = partial(MeasuredTables, self._launcher, workspace, kind, *given)
                # Those of the updates that follow are of another kind.
                form = MeasuredTables, kind, decision is not None
                launches = workspace.prepared(form, prepare)
                launch = partial(launches.start, some, flag)
                yield _Sum(range(norm, norm + 1), (), launch, [next(left) for _ in some])

    def _numbers(self, workspace: Workspace, launch: int, numbers: Sequence[int]) -> dict[str, int]:
        """Returns how a decision numbers the gradients of a launch."""
        if len(numbers) == 1:
            return {"numbers": 0, "number": numbers[0]}
        on_device = workspace.constants(f"numbers {launch}").set(numbers)
        return {"numbers": self._launcher.address(on_device), "number": 0}

    def _rule(self, workspace: Workspace, limits: ClipLimits) -> ClipRule:
        most = [float(each) for each in limits.most]
        address = 0
        if len(most) > 1:
            on_device = workspace.constants("most").set(most, np.float64)
            address = self._launcher.address(on_device)
        return ClipRule(
            address,
            most[0],
            float(limits.unscale),
            float(limits.num_copies),
            int(limits.form),
            int(limits.is_double),
        )

    def _empty_results(self, num_norms: int) -> Array:
        return self._launcher.xp.empty((num_norms, len(ClipResult._fields)), np.float64)
