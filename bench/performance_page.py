"""Writes the measured part of docs/performance.md, and draws its pictures.

`python -m bench.performance_page FILE...` takes files of results of `python -m bench`, one for each
machine; without any, those that the page names.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import ROOT
from bench.page import (
    COLORS,
    find_files,
    make_table,
    name_file,
    name_versions,
    picture,
    replace_between,
)

PAGE = ROOT / "docs" / "performance.md"
COMMAND = ".venv/bin/python -m bench.performance_page"
_DENSE = re.compile(r"host_(\w+)_(16m|resnet50|1000x64)")
_SPARSE = ("host_sparse_lazy_adam", "host_sparse_adagrad", "host_all_rows_adam", "host_row_sums")


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.performance_page", description=__doc__)
    parser.add_argument("results", type=Path, nargs="*", help="files of results of python -m bench")
    files = parser.parse_args().results or find_files(PAGE.read_text(), COMMAND)
    for file in files:
        _draw(file)
    PAGE.write_text(with_results(PAGE.read_text(), files))
    print(f"written: {PAGE.relative_to(ROOT)}")


def picture_of(file: Path) -> str:
    """Returns the name of the picture of a file of results."""
    return f"steps_on_{file.parent.name.replace('-', '_')}.svg"


def with_results(page: str, files: Sequence[Path]) -> str:
    """Returns the text of docs/performance.md with what some files of results say."""
    return replace_between(page, COMMAND, "\n".join(map(_section, files)))


def _section(file: Path) -> str:
    found = _read(file)
    machine = found["machine"]
    dense = {key: each for key, each in found["workloads"].items() if _DENSE.fullmatch(key)}
    sparse = {key: found["workloads"][key] for key in _SPARSE if key in found["workloads"]}
    parts = [
        f"### {machine['cpu']}, {machine['cores']} cores",
        f"{name_versions(machine)}.",
        "![Milliseconds of a step of each library, for one large tensor, the tensors of a "
        "ResNet-50,\nand many small tensors; the table below has the numbers.]"
        f"(images/{picture_of(file)})",
        _table(dense),
        _table(sparse) if sparse else "",
        f"From `{name_file(file)}`, at commit {found['commit']}. A copy in memory "
        f"reached {found['copy_gb_per_s']:.1f} GB/s.",
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _table(workloads: Mapping[str, Any]) -> str:
    every = [name for each in workloads.values() for name in each["contenders"]]
    contenders = list(dict.fromkeys(every))
    rows = []
    for each in workloads.values():
        times = [_median(each["contenders"].get(name)) for name in contenders]
        share = each["contenders"]["gpuopt"]["share_of_copy"]
        rows.append([each["description"], *times, f"{share:.2f}"])
    return make_table(
        ["milliseconds, the median", *contenders, "gpuopt's bandwidth, of a copy's"], rows
    )


def _median(contender: Mapping[str, Any] | None) -> str:
    return "" if contender is None else f"{contender['median_ms']:.2f}"


def _draw(file: Path) -> None:
    found = _read(file)
    sizes: dict[str, dict[str, Any]] = {}
    for key, workload in found["workloads"].items():
        if match := _DENSE.fullmatch(key):
            sizes.setdefault(match[2], {})[match[1]] = workload
    title = f"Milliseconds of a step at {found['commit']}: the median, first and ninth decile"
    with picture(picture_of(file), title, (8.0, 3.6)) as figure:
        panels = figure.subplots(1, len(sizes), squeeze=False)[0]
        colors: dict[str, str] = {}
        for panel, workloads in zip(panels, sizes.values(), strict=True):
            _draw_panel(panel, list(workloads.values()), colors)
            panel.set_xlabel("milliseconds")
            what = next(iter(workloads.values()))["description"].partition(" on ")[2]
            panel.set_title(what.replace(" of ", "\nof ", 1), fontsize=8, loc="left")
        lines = [
            panels[0].plot([], [], "o", color=color, markersize=4, label=name)[0]
            for name, color in colors.items()
        ]
        figure.legend(handles=lines, loc="outside lower center", ncols=3, frameon=False)


def _draw_panel(panel: Any, workloads: Sequence[Mapping[str, Any]], colors: dict[str, str]) -> None:
    """Draws a group of points for each workload, one below the other.

    Args:
        panel: Matplotlib's axes.
        workloads: Of one size.
        colors: By contender; new ones are added.
    """
    from matplotlib.ticker import LogLocator

    for row, workload in enumerate(workloads):
        contenders = workload["contenders"]
        for place, (name, times) in enumerate(contenders.items()):
            color = colors.setdefault(name, COLORS[len(colors) % len(COLORS)])
            y = row + 0.7 * (place / len(contenders) - 0.5)
            panel.plot([times["p10_ms"], times["p90_ms"]], [y, y], color=color, linewidth=1.0)
            panel.plot(times["median_ms"], y, "o", color=color, markersize=4)
    names = [each["description"].partition(" on ")[0] for each in workloads]
    panel.set_yticks(range(len(names)), [name.replace(" with ", "\nwith ") for name in names])
    panel.invert_yaxis()
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter("")
    panel.grid(axis="x", color="#DDDDDD", linewidth=0.5)


def _read(file: Path) -> Any:
    return json.loads(file.read_text())


if __name__ == "__main__":
    main()
