"""Tables with rows that missed steps: those that a gradient names catch up in a step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import is_
from threading import get_ident
from typing import Any

import numpy as np

from gpuopt.backends import to_device
from gpuopt.backends.backend import Scalars, SparseUpdate
from gpuopt.backends.catch_up import CatchUp
from gpuopt.backends.record import StepRecord
from gpuopt.locks import Lock, call_locked
from gpuopt.rules.catch_up import Factors, key_of, may_be_missed
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.state import State
from gpuopt.step.known import Batch
from gpuopt.variables.behind import RowsBehind
from gpuopt.variables.gate import undoing
from gpuopt.variables.identity import Identity
from gpuopt.variables.unfinished import Touched, begun


class TableBehind:
    """A table of one optimizer, whose rows may be behind; a `RowsBehind`.

    The table's identity and those of its slots hold it. It holds their arrays, and so goes with
    them.
    """

    holds_arrays = True

    def __init__(
        self, state: State, arrays: Sequence[Any], batch: Batch, identity: Identity
    ) -> None:
        self._state = weakref.ref(state)
        self._arrays = arrays
        self._identity = weakref.ref(identity)
        self._plan, self._backend, self._real = batch.plan, batch.backend, batch.real
        # Held by a step, or while rows are brought up to date. Taken inside the gate, together with
        # the device's.
        self._lock = Lock(f'the rows of "{identity.name}" that are behind')
        self._locks = (*batch.backend.locks, self._lock)
        self._catch_up: CatchUp | None = None

    @property
    def is_behind(self) -> bool:
        """Whether some rows may be."""
        catch_up = self._catch_up
        return catch_up is not None and catch_up.made_by_all != catch_up.now

    def belongs_to(self, state: State) -> bool:
        """Whether it is of the optimizer that has this state."""
        return self._state() is state

    def is_of_another(self, state: State) -> bool:
        """Whether it is of another optimizer than the one with this state, which still lives."""
        return self._state() not in (None, state)

    def is_of(self, state: State, arrays: Sequence[Any]) -> bool:
        """Whether it is of these arrays, a table's and its slots', under a state."""
        return self.belongs_to(state) and all(map(is_, self._arrays, arrays))

    @property
    def is_replaced(self) -> bool:
        """Whether another optimizer's has taken its place, or one of other slots."""
        identity = self._identity()
        return identity is not None and identity.behind is not self

    def while_written(
        self, written: Any, work: AbstractContextManager[Any], at: Any = ...
    ) -> AbstractContextManager[Any]:
        return work

    def bring_up(self, rows: Any = None) -> None:
        self.bring_up_alone(rows)
        identity = self._identity()
        # The same rows of all copies, so that these always agree to the bit.
        for reference in () if identity is None else identity.copies:
            copy = reference()
            if copy is not None and isinstance(copy.behind, TableBehind):
                copy.behind.bring_up_alone(rows)

    def bring_up_alone(self, rows: Any = None) -> None:
        """Does what `bring_up` does, and leaves other copies of a mirrored table alone."""
        if not self.is_behind:
            return
        if self._lock.is_this_threads:
            raise RuntimeError(
                f'"{self.unfinished_name}" cannot be read while this thread has its rows make '
                "steps, as by a signal handler: half of them would make some twice; read it after "
                "that"
            )
        with undoing():
            here = None if rows is None else to_device(rows, self._backend.device)
            call_locked(self._locks, partial(self._bring_up_locked, here))

    def _bring_up_locked(self, rows: Any = None) -> None:
        catch_up = self._catch_up
        if catch_up is None or not self.is_behind:
            return
        self.thread, begun[self] = get_ident(), None
        try:
            self._backend.bring_up_rows(self._plan, catch_up, rows)
        finally:
            begun.pop(self, None)
        if rows is None:
            catch_up.made_by_all = catch_up.now

    # What a step of a signal handler meanwhile asks for: see `BegunStep`.

    calls_user_code = admits_steps = False
    unfinished_state = None

    @property
    def unfinished_name(self) -> str:
        identity = self._identity()
        return "a table" if identity is None else identity.name

    def touched(self) -> Touched | None:
        return None

    def let_go(self) -> None:
        pass

    def accept(self) -> None:
        pass

    def _ready(
        self, other_rows: UpdateRule, of_counts: Sequence[Scalars], stepping: bool
    ) -> CatchUp | None:
        """Returns the table's count of steps by this step's scalars, with room for it.

        None if all rows have to be updated in this step: then all are up to date.

        Args:
            other_rows: The rule of rows without a gradient.
            of_counts: The scalars for each count of steps that a device may choose.
            stepping: Whether missed steps are to be made one by one.
        """
        scalars, *others = of_counts
        key = key_of(other_rows, scalars)
        keys = [key_of(other_rows, each) for each in others]
        may_miss = [may_be_missed(other_rows, each) for each in of_counts]
        if False in may_miss or keys.count(key) < len(keys):
            self._bring_up_locked()
            return None
        catch_up = self._catch_up
        if catch_up is None or catch_up.factors.key != key:
            factors = Factors(other_rows, other_rows.own(scalars), self._real, stepping=stepping)
            catch_up = self._begin_anew(other_rows, factors)
        elif catch_up.now >= catch_up.room:
            catch_up = self._begin_anew(other_rows, catch_up.factors)
        return catch_up if catch_up.factors.fall_behind else None

    def _begin_anew(self, other_rows: UpdateRule, factors: Factors) -> CatchUp:
        """Brings all rows up to date, and returns a new count of steps."""
        zeros = partial(self._backend.full, dtype=np.dtype(self._real), value=0)
        last = self._backend.full(self._arrays[0].shape[:1], np.dtype(np.int32), 0)
        catch_up = CatchUp(other_rows, factors, last, zeros)
        self._backend.record_creation(catch_up)
        self._bring_up_locked()
        self._catch_up = catch_up
        return catch_up


def update_tables(
    tables: Sequence[TableBehind],
    rule: UpdateRule,
    other_rows: UpdateRule,
    updates: Sequence[SparseUpdate],
    scalars: Sequence[Scalars],
    record: StepRecord,
    *,
    stepping: bool,
) -> list[bool | None]:
    """Updates the rows of gradients together, after the steps that they have missed.

    Args:
        tables: On one device, and of one dtype.
        rule: What to compute.
        other_rows: The rule of rows without a gradient.
        updates: Of each table.
        scalars: Of both rules, for each group; if a GPU decides about the step, for one count of
            steps after the other.
        record: See `Backend.apply_sparse`.
        stepping: Whether missed steps are to be made one by one.

    Returns:
        For each table, whether it did: not if all rows have to be updated in this step. Then all
        are up to date. None if the table is replaced, and has done nothing.
    """
    num_groups = len(scalars) // record.num_counts

    def update_locked() -> list[bool | None]:
        done: list[bool | None] = []
        late: list[SparseUpdate] = []
        for table, update in zip(tables, updates, strict=True):
            if table.is_replaced:
                done.append(None)
                continue
            of_counts = scalars[update.group :: num_groups]
            catch_up = table._ready(other_rows, of_counts, stepping)
            done.append(catch_up is not None)
            if catch_up is not None:
                catch_up.rounding = of_counts[0] if rule.is_rounded else None
                late.append(update._replace(catch_up=catch_up))
        if late:
            tables[0]._backend.apply_sparse(rule, late, scalars, other_rows=None, record=record)
        return done

    return call_locked([lock for table in tables for lock in table._locks], update_locked)


def replace_tables(
    identities: Sequence[Identity], old: Sequence[RowsBehind | None], new: TableBehind
) -> None:
    """Has a table take the place of others, which are brought up to date.

    Args:
        identities: Of the table and its slots.
        old: What they hold.
        new: What they are to hold; unless something else has come.
    """
    tables = [each for each in dict.fromkeys(old) if isinstance(each, TableBehind)]

    def replace() -> None:
        for table in tables:
            table._bring_up_locked()
        if all(map(is_, (each.behind for each in identities), old)):
            # The table's last: `table_behind` looks at that, and an exception may come between.
            for identity in reversed(identities):
                identity.behind = new

    # A step of another thread by one of them comes before, or finds that it is replaced.
    call_locked([lock for table in tables for lock in table._locks], replace)
