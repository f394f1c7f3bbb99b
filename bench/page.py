"""Parts of documentation pages that programs write, and their pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness import RESULTS, ROOT
from gpuopt.bench.results import Results

# Of contenders, by Okabe and Ito: told apart by all eyes.
COLORS = ("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#888888", "#CC79A7")
_IMAGES = ROOT / "docs" / "images"
# As in a file's description of its machine, and as pages write them.
_LIBRARIES = {
    "numpy": "numpy",
    "torch": "torch",
    "optax": "optax",
    "jax": "jax",
    "numba": "numba",
    "thinc": "Thinc",
}
_END = "<!-- to here -->\n"
_NUMBER = re.compile(r"\d[\d.]*")


def replace_between(page: str, command: str, text: str) -> str:
    """Returns a page with `text` in place of what `command` has written to it before."""
    begin = _begin(command)
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(_END)
    return before + begin + text + "\n" + _END + after


def part_of(page: str, command: str) -> str:
    """Returns what `command` has written to a page."""
    return page.partition(_begin(command))[2].partition(_END)[0]


def find_files(page: str, command: str) -> list[Path]:
    """Returns the files of results that lines of a command's part of a page name."""
    return [ROOT / name for name in re.findall(r"^From `(.+?)`", part_of(page, command), re.M)]


def name_file(file: Path) -> str:
    """Returns a file of results as pages name it.

    Raises:
        ValueError: it is not under bench/results, where readers of the page find it.
    """
    path = file.resolve()
    if not path.is_relative_to(RESULTS):
        raise ValueError(
            f"{file} is not in {RESULTS.relative_to(ROOT)}: put it there, as "
            "<machine>/<date>-<commit>-<what>.json"
        )
    return path.relative_to(ROOT).as_posix()


def name_versions(machine: Mapping[str, Any]) -> str:
    """Names Python and the libraries of a machine, as in "Python 3.11.7, numpy 2.4.6"."""
    found = [f"{name} {machine[key]}" for key, name in _LIBRARIES.items() if machine.get(key)]
    return ", ".join([f"Python {machine['python']}", *found])


def describe_rounds(results: Results) -> str:
    """Returns how many rounds there were, as in "5 to 30 rounds"."""
    rounds = [len(run.copy_ms) for run in results.runs.values()]
    return f"{_span(rounds)} rounds"


def describe_doubts(results: Results) -> str:
    """Returns each kind of warning that results have, but for that of times that spread widely.

    The first number of a warning is that of all warnings of its kind, as in "0.6 to 1.2".
    """
    kinds: dict[str, list[str]] = {}
    for run in results.runs.values():
        for warning in run.other_warnings:
            kind = _NUMBER.sub("{}", warning, count=1)
            kinds.setdefault(kind, []).extend(_NUMBER.findall(warning)[:1])
    return "; ".join(kind.format(_span(numbers)) for kind, numbers in kinds.items())


def _span(numbers: Sequence[Any]) -> str:
    ends = dict.fromkeys([min(numbers, key=float), max(numbers, key=float)]) if numbers else []
    return " to ".join(map(str, ends))


def _begin(command: str) -> str:
    return f"<!-- `{command}` writes from here -->\n\n"


def make_table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a table in Markdown."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


@contextmanager
def picture(name: str, title: str, size: tuple[float, float]) -> Iterator[Any]:
    """Saves a figure that is drawn in the context as docs/images/NAME.

    Args:
        name: The file's name.
        title: What the picture shows, for its metadata.
        size: In inches.
    """
    import matplotlib
    from matplotlib.figure import Figure

    settings = {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9.0}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        figure.savefig(_IMAGES / name, metadata={"Date": None, "Title": title})
    print(f"written: {(_IMAGES / name).relative_to(ROOT)}")
