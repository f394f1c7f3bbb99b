"""Writes the README's table from a file that `gpuopt bench --json` has written."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from bench.harness import RESULTS, ROOT
from bench.page import describe_doubts, describe_rounds, make_table, name_file, replace_between
from gpuopt.bench.results import Results, Run, Times, name_optimizer, read_results
from gpuopt.bench.workloads import list_tasks

PAGE = ROOT / "README.md"
COMMAND = "python -m bench.readme_page"
_DOUBTFUL = "†"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.readme_page", description=__doc__)
    parser.add_argument(
        "results", type=Path, nargs="?", help="the file; without it, the one that the README names"
    )
    options = parser.parse_args()
    page = PAGE.read_text()
    PAGE.write_text(with_table(page, options.results or find_results(page)))
    print(f"written: {PAGE.relative_to(ROOT)}")


def find_results(page: str) -> Path:
    """Returns the file of results that the page's table is from."""
    written = page.partition(f"<!-- `{COMMAND}` writes from here -->")[2]
    found = re.search(r"\(bench/results/(.+?\.json)\)", written)
    if not found:
        raise ValueError(f"{PAGE.name} names no file of results: give one")
    return RESULTS / found[1]


def with_table(page: str, file: Path) -> str:
    """Returns the README's text with the figures of a file of results."""
    results = read_results(file)
    return replace_between(page, COMMAND, f"{_make_table(results)}\n{_describe(results, file)}\n")


def _make_table(results: Results) -> str:
    contenders = dict.fromkeys(name for run in results.runs.values() for name in run.contenders)
    peers = [each for each in contenders if each != "gpuopt"]
    rows = [
        [_describe_run(name, run), _format_ours(run.contenders["gpuopt"].cold)]
        + [_compare(run, peer) for peer in peers]
        for name, run in results.runs.items()
    ]
    return make_table(["", "gpuopt", *peers], rows)


def _describe_run(name: str, run: Run) -> str:
    mark = f" {_DOUBTFUL}" if run.other_warnings else ""
    return f"{name_optimizer(name, run)}, {run.description}{mark}"


def _format_ours(times: Times) -> str:
    return f"{_about(times)}{times.median_ms:.3g} ms"


def _about(times: Times) -> str:
    return "~" if times.is_noisy else ""


def _compare(run: Run, peer: str) -> str:
    figures = run.contenders.get(peer)
    if figures is None:
        return ""
    ratio = figures.cold.median_ms / run.contenders["gpuopt"].cold.median_ms
    return f"{_about(figures.cold)}{ratio:.{0 if ratio >= 10 else 2}f}x"


def _describe(results: Results, file: Path) -> str:
    machine = results.machine
    names = {"numpy": "numpy", "torch": "torch", "optax": "optax", "jax": "jax", "thinc": "Thinc"}
    versions = [f"{name} {machine[key]}" for key, name in names.items() if machine[key]]
    path = name_file(file)
    device = (
        f"{machine['cores']} cores of an {machine['cpu']}"
        if results.device == "cpu"
        else results.device
    )
    doubts = describe_doubts(results)
    lines = [
        f"From [a file of results]({path})",
        f"of {results.date[:10]}: float32, on {device},",
        f"with {', '.join(versions)}.",
        f"Medians of {describe_rounds(results)}. A ~ marks times that spread widely.",
        *([f"A {_DOUBTFUL} marks rows with a warning in that file: {doubts}."] if doubts else []),
        *(f"Not run: {_name_task(name)}: {reason}." for name, reason in results.not_run.items()),
    ]
    return "\n".join(lines)


def _name_task(run_name: str) -> str:
    task, _, settings = run_name.partition("/")
    descriptions = {each.name: each.description for each in list_tasks()}
    return f"{descriptions.get(task, task)} ({settings})"


if __name__ == "__main__":
    main()
