"""Writes the measured part of docs/guides/thinc.md.

`python -m bench.thinc_page FILE` takes a file of results of `bench.spacy_training`; without it, the
one that the page names.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness import ROOT
from bench.page import find_files, make_table, name_file, name_versions, replace_between
from gpuopt.bench.results import three_digits

PAGE = ROOT / "docs" / "guides" / "thinc.md"
COMMAND = ".venv/bin/python -m bench.thinc_page"
_ROWS = {
    "spacy_train_64_total": "all of spaCy's training",
    "spacy_train_64_optimizer": "of it, in the optimizer",
    "spacy_train_64_averages_total": "all of spaCy's training, with averages",
    "spacy_train_64_averages_optimizer": "of it, in the optimizer",
    "thinc_step_64": "a step of three layers of width 64",
    "thinc_step_64_averages": "the same, with averages",
    "thinc_step_1024": "a step of three layers of width 1,024",
    "thinc_step_1024_averages": "the same, with averages",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.thinc_page", description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", help="a file of results")
    page = PAGE.read_text()
    file = parser.parse_args().results or find_files(page, COMMAND)[0]
    PAGE.write_text(with_results(page, file))
    print(f"written: {PAGE.relative_to(ROOT)}")


def with_results(page: str, file: Path) -> str:
    """Returns the text of docs/guides/thinc.md with what a file of results says."""
    found = json.loads(file.read_text())
    machine, workloads = found["machine"], found["workloads"]
    parts = [
        _summary(workloads),
        _table(workloads).strip(),
        f"From `{name_file(file)}`, on {machine['cores']} cores of an\n"
        f"{machine['cpu']}, with {name_versions(machine)}. Medians; the quotient is the\n"
        "median of all rounds, in each of which both took their turn.",
    ]
    return replace_between(page, COMMAND, "\n\n".join(parts) + "\n")


def _summary(workloads: Mapping[str, Any]) -> str:
    total, optimizer = (
        [_ratio(workloads[f"spacy_train_64{form}_{part}"]) for form in ("", "_averages")]
        for part in ("total", "optimizer")
    )
    steps = workloads["spacy_train_64_total"]["description"].split()[0]
    return (
        f"{steps} steps of spaCy's text classifier of width 64 take {total[0]:.2f} times as long\n"
        f"with `gpuopt.Adam.v1` as with `Adam.v1`, and what they spend in the optimizer\n"
        f"{optimizer[0]:.2f} times; with `use_averages = true`, {total[1]:.2f} and "
        f"{optimizer[1]:.2f} times."
    )


def _table(workloads: Mapping[str, Any]) -> str:
    rows = []
    for name, what in _ROWS.items():
        contenders = workloads[name]["contenders"]
        times = (three_digits(contenders[who]["median_ms"]) for who in ("Thinc's", "gpuopt"))
        rows.append([what, *times, f"{_ratio(workloads[name]):.2f}"])
    return make_table(["milliseconds", "Thinc's Adam", "gpuopt's", "gpuopt's / Thinc's"], rows)


def _ratio(workload: Mapping[str, Any]) -> float:
    """Returns the median of gpuopt's time divided by Thinc's: the file's own has few digits."""
    ours, its = (workload["contenders"][who]["samples_ms"] for who in ("gpuopt", "Thinc's"))
    return float(median(our_ms / its_ms for our_ms, its_ms in zip(ours, its, strict=True)))


if __name__ == "__main__":
    main()
