"""Report: what an optimizer's steps read, write and start, and how long that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from gpuopt.backends import backend_for, gpu_backends, launch_observer, profiling_range
from gpuopt.device import Device
from gpuopt.extras import import_for
from gpuopt.locks import Lock
from gpuopt.state.slot_codecs import has_master
from gpuopt.state.state import State
from gpuopt.step.pairs import Gradient
from gpuopt.step.updates import Updates
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable

if TYPE_CHECKING:
    from rich.table import Table

# So many launches are known before the host waits for the first of them to end.
_MOST_UNREAD = 4096
_MEGABYTE, _GIGABYTE = 1e6, 1e9


class UpdateKind(NamedTuple):
    """What a report asks an optimizer about the update of a variable.

    Attributes:
        group: The name of the variable's `ParameterGroup`, or "".
        writes_all_rows: Whether a sparse gradient also updates the rows that it does not name.
        averaged_bytes: The bytes that moving the variable's average reads and writes.
    """

    group: str = ""
    writes_all_rows: bool = False
    averaged_bytes: int = 0


class ReportedOptimizer(Protocol):
    """The part of an optimizer that a report uses."""

    state: State
    open_report: Report | None

    def get_name(self) -> str: ...

    def _kind_of_update(self, variable: Variable, is_sparse: bool) -> UpdateKind: ...


class Traffic(NamedTuple):
    """What steps read and wrote for one variable.

    Attributes:
        variable: Its name.
        group: The name of its `ParameterGroup`, or "".
        device: As "gpu:0".
        num_bytes: In all steps: its gradients, once, and it, its slots and its average, twice, as a
            step reads and writes them; beside a master copy, it is only written, and beside a
            remainder both are the copy. Of a sparse gradient, the rows that it names count as often
            as it names them. An average that moves after the update reads the variable once more.
    """

    variable: str
    group: str
    device: str
    num_bytes: int


class LaunchTime(NamedTuple):
    """The launches of one kind.

    Attributes:
        device: As "gpu:0".
        name: The kernel's function and the rule's name; on the CPU, "dense" or "sparse" and that.
        num_launches: How many there were in all steps.
        total_ms: What they took there, all together.
    """

    device: str
    name: str
    num_launches: int
    total_ms: float


class Report:
    """What an optimizer's steps did while `Optimizer.report` was open; printed, it is a table.

    Attributes:
        num_steps: How many steps there were.
        host_ms: What they took on the host, all together.
        num_waits: How often the host waited for a GPU in them.
        copy_rates: By device, the bytes a second that a copy within its memory reads and writes,
            measured when the report ends.
    """

    def __init__(self, optimizer: ReportedOptimizer) -> None:
        """Starts without steps."""
        self.num_steps = 0
        self.host_ms = 0.0
        self.num_waits = 0
        self.copy_rates: dict[str, float] = {}
        self._optimizer = optimizer
        # Who waits for a GPU holds this one alone, so that steps go on.
        self._reading = Lock("the times of a report of steps")
        self._lock = Lock("a report of steps")
        self._traffic: dict[tuple[str, str, str], int] = {}
        self._times: dict[tuple[str, str], list[float]] = {}
        self._unread: list[tuple[str, str, Callable[[], float]]] = []

    @property
    def variables(self) -> list[Traffic]:
        """What each variable's steps read and wrote, the largest first."""
        found = [Traffic(*key, num_bytes) for key, num_bytes in self._traffic.items()]
        return sorted(found, key=lambda each: -each.num_bytes)

    @property
    def groups(self) -> dict[str, int]:
        """The bytes of each parameter group; "" stands for variables in none."""
        totals: dict[str, int] = {}
        for each in self.variables:
            totals[each.group] = totals.get(each.group, 0) + each.num_bytes
        return totals

    @property
    def launches(self) -> list[LaunchTime]:
        """What was launched, that which took longest first; the host waits for it."""
        self._read(0)
        found = [LaunchTime(*key, len(ms), sum(ms)) for key, ms in self._times.items()]
        return sorted(found, key=lambda each: -each.total_ms)

    def bandwidth(self, device: str) -> float:
        """Returns the bytes a second that launches on a device moved: 0 if there were none."""
        num_bytes = sum(each.num_bytes for each in self.variables if each.device == device)
        ms = sum(each.total_ms for each in self.launches if each.device == device)
        return num_bytes / ms * 1e3 if ms else 0.0

    def share_of_copy(self, device: str) -> float:
        """Returns the bandwidth as a share of what a copy has: above 1 what caches hold."""
        rate = self.copy_rates.get(device, 0.0)
        return self.bandwidth(device) / rate if rate else 0.0

    def tables(self) -> list[Table]:
        """Returns the report as tables of `rich`: of devices, launches, and variables.

        Raises:
            ModuleNotFoundError: rich is not installed.
        """
        table_class = import_for("tables of a report", "rich.table", "command").Table

        tables = []
        for title, header, rows in self._contents():
            table = table_class(title=title, title_justify="left")
            for number, name in enumerate(header):
                table.add_column(name, justify="right" if number >= len(header) - 3 else "left")
            for row in rows:
                table.add_row(*row)
            tables.append(table)
        return tables

    def __repr__(self) -> str:
        num_bytes = sum(self.groups.values())
        return (
            f'<Report of "{self._optimizer.get_name()}": {self.num_steps} steps, '
            f"{self._a_step(self.host_ms):.3f} ms each on the host, "
            f"{self._a_step(num_bytes) / _MEGABYTE:.3f} MB each>"
        )

    def __str__(self) -> str:
        parts = [f"{self.num_steps} steps, {self._a_step(self.host_ms):.3f} ms each on the host"]
        if gpu_backends:
            parts[0] += f", in which it waits {self._a_step(self.num_waits):.4g} times for a GPU"
        for title, header, rows in self._contents():
            lines = [header, *rows]
            widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
            texts = (
                "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
                for line in lines
            )
            parts += ["", title, *(text.rstrip() for text in texts)]
        return "\n".join(parts)

    def _contents(self) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """Yields the title, header and rows of each table; bytes and times are of one step."""
        a_step = self._a_step
        yield (
            "Devices",
            ["device", "GB/s", "copy GB/s", "share"],
            [
                [
                    device,
                    f"{self.bandwidth(device) / _GIGABYTE:.2f}",
                    f"{rate / _GIGABYTE:.2f}",
                    f"{self.share_of_copy(device):.0%}",
                ]
                for device, rate in self.copy_rates.items()
            ],
        )
        yield (
            "Launches of a step",
            ["device", "launch", "count", "ms", "ms of each"],
            [
                [
                    each.device,
                    each.name,
                    f"{a_step(each.num_launches):.4g}",
                    f"{a_step(each.total_ms):.4f}",
                    f"{each.total_ms / each.num_launches:.4f}",
                ]
                for each in self.launches
            ],
        )
        total = sum(self.groups.values())
        yield (
            "Variables",
            ["device", "group", "variable", "MB a step", "share"],
            [
                [
                    each.device,
                    each.group,
                    each.variable,
                    f"{a_step(each.num_bytes) / _MEGABYTE:.3f}",
                    f"{each.num_bytes / total:.0%}" if total else "",
                ]
                for each in self.variables
            ],
        )
        if len(self.groups) > 1:
            yield (
                "Groups",
                ["group", "MB a step", "share"],
                [
                    [name, f"{a_step(num_bytes) / _MEGABYTE:.3f}", f"{num_bytes / total:.0%}"]
                    for name, num_bytes in self.groups.items()
                ],
            )

    def _a_step(self, total: float) -> float:
        return total / self.num_steps if self.num_steps else 0.0

    # What steps call, and `Optimizer.report`.

    @contextmanager
    def observe_step(self, name: str, began: float) -> Iterator[None]:
        """Watches what this thread launches inside, as a step.

        Args:
            name: The step's, for profilers.
            began: When it began, by `perf_counter`.
        """
        with (
            launch_observer.observed_by(self),
            profiling_range(name) if gpu_backends else nullcontext(),
        ):
            yield
        with self._lock:
            self.num_steps += 1
            self.host_ms += (perf_counter() - began) * 1e3

    def note_updates(self, updates: Updates) -> None:
        """Adds what updates have read and written."""
        optimizer = self._optimizer
        for gradient, variable in updates.pairs():
            kind = optimizer._kind_of_update(variable, isinstance(gradient, IndexedSlices))
            stored = _bytes_stored(optimizer.state, variable)
            moved = _bytes_moved(gradient, variable, stored, kind.writes_all_rows)
            moved += kind.averaged_bytes
            key = variable.name, kind.group, str(variable.device)
            with self._lock:
                self._traffic[key] = self._traffic.get(key, 0) + moved

    def note_launch(self, device: str, name: str, read_ms: Callable[[], float]) -> None:
        with self._lock:
            self._unread.append((device, name, read_ms))
        with launch_observer.observed_by(None):  # the report's own waits are none of the step's
            self._read(_MOST_UNREAD)

    def note_wait(self) -> None:
        with self._lock:
            self.num_waits += 1

    def end(self) -> None:
        """Waits for what was launched, and measures a copy on each device."""
        launched = [each.device for each in self.launches]
        for device in dict.fromkeys([*launched, *(each.device for each in self.variables)]):
            self.copy_rates[device] = backend_for(Device.parse(device)).measure_copy()

    def _read(self, most_left: int) -> None:
        if len(self._unread) <= most_left:
            return
        with self._reading:
            with self._lock:
                unread, self._unread = self._unread, []
            times = [(device, name, read_ms()) for device, name, read_ms in unread]
            with self._lock:
                for device, name, ms in times:
                    self._times.setdefault((device, name), []).append(ms)


class reporting:
    """Watches an optimizer's steps while it is open; see `Optimizer.report`."""

    def __init__(self, optimizer: ReportedOptimizer) -> None:
        self._optimizer = optimizer
        self._report: Report | None = None

    def __enter__(self) -> Report:
        if self._optimizer.open_report is not None:
            name = self._optimizer.get_name()
            raise RuntimeError(f'a report of the steps of "{name}" is open already')
        self._optimizer.open_report = self._report = Report(self._optimizer)
        return self._report

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        report, self._optimizer.open_report = self._report, None
        if kind is None and report is not None:
            report.end()

    def __repr__(self) -> str:
        return "<a report that is not open: with optimizer.report() as report: ...; print(report)>"


def _bytes_stored(state: State, variable: Variable) -> int:
    """Returns the bytes of a variable and its slots that an update of all of it moves."""
    slots = 2 * sum(map(_size, state.slots_of(variable)))
    masters = state.describe().slot_codecs.masters
    if masters is None or not has_master(variable.dtype):
        return 2 * _size(variable) + slots
    # A remainder's copy has no memory of its own: the variable and the remainder are its halves.
    return slots if masters == "remainder" else _size(variable) + slots


def _bytes_moved(gradient: Gradient, variable: Variable, stored: int, all_rows: bool) -> int:
    """Returns the bytes that one update reads and writes.

    Args:
        gradient: The variable's.
        variable: What is updated.
        stored: From `_bytes_stored`.
        all_rows: Whether a sparse gradient also updates the rows that it does not name.
    """
    if not isinstance(gradient, IndexedSlices):
        return _size(gradient) + stored
    height = variable.shape[0] if variable.shape else 1
    share = 1.0 if all_rows or not height else len(gradient.indices) / height
    return _size(gradient.values) + _size(gradient.indices) + int(stored * share)


def _size(array: Any) -> int:
    return int(np.prod(array.shape, dtype=np.int64)) * int(np.dtype(array.dtype).itemsize)
