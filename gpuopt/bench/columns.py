"""The columns of a table of contenders, in a terminal and in a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from gpuopt.bench.results import Figures, Run, three_digits


class Column(NamedTuple):
    """What a table shows of each contender.

    Attributes:
        heading: In two lines, or one.
        part: What the column belongs to: "times", "deciles", "bandwidth", "memory" or "counts".
        write: Returns a contender's cell.
    """

    heading: str
    part: str
    write: Callable[[Figures], str]


def list_columns(run: Run) -> list[Column]:
    """Lists the columns of what was measured in a run."""
    columns = [*_list_times(run)]
    if any(each.gb_per_s is not None for each in run.contenders.values()):
        columns += [
            Column("GB/s", "bandwidth", lambda each: _write(each.gb_per_s, ".1f")),
            Column("of\ncopy", "bandwidth", lambda each: _write(each.share_of_copy, ".0%")),
        ]
    for heading, key in (("state\nMB", "state_bytes"), ("peak\nMB", "peak_extra_bytes")):
        if any(getattr(each, key) is not None for each in run.contenders.values()):
            columns.append(Column(heading, "memory", _megabytes(key)))
    if run.counts_launches:
        columns += [
            Column("launches", "counts", lambda each: _write(each.launches, "d")),
            Column("waits", "counts", lambda each: _write(each.waits, "d")),
        ]
    if run.units:
        columns.append(
            Column(f"ns a\n{run.per}", "times", lambda each: three_digits(run.cost_ns(each)))
        )
    return columns


def _list_times(run: Run) -> Iterator[Column]:
    ours = run.contenders.get("gpuopt")
    for number, kind in enumerate(run.kinds):
        yield Column(f"{kind}\nms", "times", _milliseconds(kind, "median_ms"))
        yield Column("p10", "deciles", _milliseconds(kind, "p10_ms"))
        yield Column("p90", "deciles", _milliseconds(kind, "p90_ms"))
        if number == 0 and ours is not None:
            yield Column("gpuopt\n/ its", "times", _ratio_of(ours))


def _ratio_of(ours: Figures) -> Callable[[Figures], str]:
    return lambda each: f"{ours.usual.median_ms / each.usual.median_ms:.2f}"


def _milliseconds(kind: str, key: str) -> Callable[[Figures], str]:
    return lambda each: f"{getattr(each.times[kind], key):.4g}"


def _megabytes(key: str) -> Callable[[Figures], str]:
    def write(each: Figures) -> str:
        num_bytes = getattr(each, key)
        return _write(None if num_bytes is None else num_bytes / 1e6, ".1f")

    return write


def _write(number: float | None, form: str) -> str:
    return "" if number is None else format(number, form)
