"""Writes into bench/README.md which targets the newest results on CPUs miss.

`python -m bench.missed_page` reads all files of results of `python -m bench`. Of each workload and
machine, the newest day counts, and of that day the result that is farthest from its target.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import RESULTS, ROOT
from bench.host_targets import TARGETS
from bench.page import make_table, replace_between
from bench.targets import Target, compare

PAGE = ROOT / "bench" / "README.md"
COMMAND = ".venv/bin/python -m bench.missed_page"


class _Result(NamedTuple):
    day: str
    measured: float
    file: Path


def main() -> None:
    PAGE.write_text(with_misses(PAGE.read_text()))
    print(f"written: {PAGE.relative_to(ROOT)}")


def with_misses(page: str) -> str:
    """Returns the text of bench/README.md with what the files of results say."""
    newest: dict[tuple[str, Target], _Result] = {}
    for machine, target, result in _results():
        known = newest.setdefault((machine, target), result)
        if (result.day, result.measured) > (known.day, known.measured):
            newest[machine, target] = result
    rows = [
        [
            f"`{target.workload}`",
            f"{_words(target)} <= {target.at_most:g}",
            f"{result.measured:.2f}",
            f"[{result.file.parent.name}](results/{result.file.relative_to(RESULTS)})",
        ]
        for (_, target), result in sorted(newest.items(), key=lambda each: str(each[0]))
        if not compare(target, result.measured).met
    ]
    count = f"Of {len(newest)} targets with a result on a CPU, {len(rows)} are missed:"
    table = make_table(["workload", "at most", "measured", "result"], rows)
    return replace_between(page, COMMAND, f"{count}\n\n{table}")


def _words(target: Target) -> str:
    if target.against is None:
        return target.quantity
    mine = "numpy alone" if target.quantity == "numpy_ratio" else "gpuopt"
    return f"{mine} / {target.against}"


def _results() -> Iterator[tuple[str, Target, _Result]]:
    """Lists what was measured on each machine for targets that there are today."""
    today = {(each.workload, each.quantity, each.against): each for each in TARGETS}
    for file in sorted(RESULTS.glob("*-cores/*.json")):
        workloads: dict[str, Any] = json.loads(file.read_text()).get("workloads", {})
        verdicts = [each for one in workloads.values() for each in one.get("targets", ())]
        for verdict in verdicts:
            was = verdict["target"]
            target = today.get((was["workload"], was["quantity"], was["against"]))
            if target is not None and target.at_most is not None and verdict["measured"]:
                day = file.name[: len("2026-11-21")]
                yield file.parent.name, target, _Result(day, verdict["measured"], file)


if __name__ == "__main__":
    main()
