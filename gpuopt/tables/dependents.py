"""The slots and averages that get other rows together with their variable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpuopt.backends import backend_for
from gpuopt.optimizer import living_optimizers
from gpuopt.state.accumulated import SUM
from gpuopt.state.slots import end_blocks_at_rows
from gpuopt.state.state_dict import check_claim, claim_state
from gpuopt.step.overlap import share_memory
from gpuopt.variables.gate import undoing
from gpuopt.variables.identity import Identity, layouts_of_raw_arrays
from gpuopt.variables.undo import Undo, all_or_nothing
from gpuopt.variables.variable import NewRows, Variable, global_variables


class Dependent(NamedTuple):
    """A slot or an average with a row for each row of its variable.

    Attributes:
        variable: The slot or average.
        new_rows: What a new row of it starts with; None if that is not known.
        what: Describes it, for errors.
    """

    variable: Variable
    new_rows: NewRows
    what: str


class Table(NamedTuple):
    """A variable, and what gets other rows together with it.

    Attributes:
        variable: The variable.
        dependents: Its slots under all optimizers, and its averages; without those that have no
            rows, as scalars.
    """

    variable: Variable
    dependents: Sequence[Dependent]

    def variables(self) -> list[Variable]:
        return [self.variable, *(each.variable for each in self.dependents)]

    def identities(self) -> list[Identity]:
        return [each.identity for each in self.variables()]


def make_waiting_slots(variable: Variable) -> None:
    """Makes the slots whose restored values wait for a variable; blocks of codes end at its rows.

    Raises:
        ValueError: a value does not fit.
    """

    def make(undo: Undo) -> None:
        for optimizer in optimizers:
            optimizer.state.keep(undo)
            claim_state(optimizer.state, variable.name, variable, undo)
            end_blocks_at_rows(optimizer.state, variable, optimizer.options.codecs)
            # A copy would keep replaced slots alive.
            optimizer.state.expect_no_more({variable.identity})

    with undoing():
        optimizers = living_optimizers()
        for optimizer in optimizers:
            check_claim(optimizer.state, variable.name, variable)
        all_or_nothing(make)


def table_of(variable: Variable) -> Table:
    """Finds what hangs on a variable.

    Raises:
        ValueError: a slot has another shape, and it is not known to have a row for each of the
            variable's; or the memory belongs to another variable, too.
    """
    slots: set[Variable] = set()
    dependents: list[Dependent] = []
    for optimizer in living_optimizers():
        for slot_name in optimizer.state.slot_names():
            slot = optimizer.state.slot(variable, slot_name)
            if slot is None:
                continue
            slots.add(slot)
            # Nothing was summed for a row that was not there.
            new_rows = 0.0 if slot_name == SUM else optimizer._new_slot_rows(slot_name)
            what = f'slot "{slot_name}" of "{variable.name}" under {type(optimizer).__name__}'
            if _has_rows(slot, variable, what, is_said=new_rows is not None):
                known = slot.new_rows if new_rows is None else new_rows
                dependents.append(Dependent(slot, known, what))
    for each in global_variables():
        if each.is_owned_by(variable) and each not in slots:
            what = f'"{each.name}"'
            if _has_rows(each, variable, what):
                dependents.append(Dependent(each, each.new_rows, what))
    table = Table(variable, dependents)
    _refuse_other_names(table)
    return table


def _has_rows(dependent: Variable, variable: Variable, what: str, is_said: bool = False) -> bool:
    """Whether it has a row for each row of its variable; False for a scalar, which stays as it is.

    Args:
        dependent: A slot or an average.
        variable: What it belongs to.
        what: Describes it.
        is_said: Whether its optimizer says what a row of it starts with.

    Raises:
        ValueError: it has another shape, and its optimizer does not say that it has rows.
    """
    shape = dependent.shape
    if not shape:
        return False
    # Not by the height alone, which may be that of one row by chance.
    if shape == variable.shape or (is_said and shape[0] == variable.shape[0]):
        return True
    raise ValueError(
        f'{what} has shape {shape}, and "{variable.name}" has shape {variable.shape}: it is not '
        "known which part of it belongs to a row, so rows cannot come or go. If it has a row for "
        "each, override _new_slot_rows of the optimizer, which says what a row starts with"
    )


def _refuse_other_names(table: Table) -> None:
    """Raises ValueError if memory of a table is another variable's, too, or a raw array's."""
    changed = table.variables()
    device = table.variable.device
    backend = backend_for(device)
    layouts = [(each, backend.layout(each.unread_storage)) for each in changed if each.size]
    others = [
        (f'"{each.name}"', backend.layout(each.unread_storage))
        for each in global_variables()
        if each not in changed
        and each.device == device
        and each.size
        # Memory of two variables is one's that has adopted it.
        and not (each.owns_memory and table.variable.owns_memory)
    ]
    others += [(f'the raw array "{name}"', layout) for name, layout in layouts_of_raw_arrays()]
    for name, other in others:
        for variable, layout in layouts:
            if share_memory(layout, other):
                raise ValueError(
                    f'"{variable.name}" shares memory with {name}, which would keep the rows as '
                    f'they are. Let that go, or make "{table.variable.name}" a copy'
                )
