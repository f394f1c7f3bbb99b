"""The tables with rows that missed steps, and the steps that bring them up to date."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from gpuopt.state.masters import MasterPair
from gpuopt.state.state import State
from gpuopt.step.known import Batch
from gpuopt.step.rows_behind import TableBehind, replace_tables
from gpuopt.step.updates import Updates
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable

# The identities of tables that some optimizer lets fall behind, and of their slots. Public, because
# each step looks whether there are any: a function call would cost time.
members_of_tables: dict[weakref.ref[Identity], None] = {}


def table_behind(
    state: State, variable: Variable, slots: Sequence[Variable], batch: Batch
) -> TableBehind:
    """Returns the `TableBehind` of a table, made if there is none of these arrays.

    Args:
        state: The optimizer's.
        variable: The table.
        slots: Its slots, and its master copy.
        batch: Of the table alone.
    """
    members = [variable, *slots]
    arrays = [each.unread_storage for each in members]
    identities = [each.identity for each in members]
    new: TableBehind | None = None
    # Again if another thread comes first.
    while True:
        found = variable.identity.behind
        if isinstance(found, TableBehind) and found.is_of(state, arrays):
            return found
        if new is None:
            new = TableBehind(state, arrays, batch, variable.identity)
            for identity in identities:
                members_of_tables[weakref.ref(identity, _forget)] = None
        replace_tables(identities, [each.behind for each in identities], new)


def bring_up_written(updates: Updates, state: State) -> None:
    """Brings tables up to date that a step is about to write, other than by `update_tables`.

    Args:
        updates: The step's.
        state: Of the step's optimizer.
    """
    behind = dict(_behind())
    if not behind:
        return
    for _, variable in updates.sparse_pairs():
        table = behind.get(variable.identity)
        if table is not None and table.belongs_to(state):
            del behind[variable.identity]
    if behind:
        for identity in updates.identities():
            if identity in behind:
                behind[identity].bring_up()


def bring_up_all(state: State) -> None:
    """Brings all tables up to date that an optimizer has let fall behind."""
    for _, table in _behind():
        if table.belongs_to(state):
            table.bring_up()


def _behind() -> list[tuple[Identity, TableBehind]]:
    """Lists the tables and slots that are behind."""
    members = [
        (identity, identity.behind) for each in list(members_of_tables) if (identity := each())
    ]
    return [
        (identity, table)
        for identity, table in members
        if isinstance(table, TableBehind) and table.is_behind
    ]


def refuse_unseen_reads(variable: Variable, state: State) -> None:
    """Raises ValueError for a table that may be read without being brought up to date first.

    Or that has a master copy under another optimizer, which knows nothing of rows that are behind.

    Raises:
        ValueError: see above.
    """
    if variable.is_raw_array or not variable.owns_memory:
        what = "is an array" if variable.is_raw_array else "was made with copy=False"
        raise ValueError(
            f'catch_up: "{variable.name}" {what}, whose rows would be seen as they were before '
            "steps that they have missed: nobody notices a read of an array. Make a variable of a "
            "copy, gpuopt.Variable(array), and read that; or leave out catch_up"
        )
    pair = variable.identity.master_pair
    if isinstance(pair, MasterPair) and pair.is_alive and not pair.belongs_to(state):
        raise ValueError(
            f'catch_up: "{variable.name}" has a master copy under another optimizer, which would '
            "not follow rows that are behind: leave out catch_up, or masters"
        )


def refuse_tables_of_another(variables: Sequence[Variable], state: State) -> None:
    """Raises ValueError for tables that catch up under another optimizer, without a master copy."""
    for variable in variables:
        table = variable.identity.behind
        if isinstance(table, TableBehind) and table.is_of_another(state):
            raise ValueError(
                f'masters: "{variable.name}" has rows that catch up under another optimizer: they '
                "have no master copy"
            )


def _forget(dead: weakref.ref[Identity]) -> None:
    members_of_tables.pop(dead, None)
