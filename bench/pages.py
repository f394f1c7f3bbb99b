"""Writes what files of results say into the documentation, and draws its pictures.

.venv/bin/python -m bench.pages                 # all parts of pages, from the files they name
.venv/bin/python -m bench.pages growth FILE     # one part, from another file
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from bench import catch_up, instructions, launches, missed_steps, pictures, scale
from bench.harness import RESULTS, ROOT
from bench.targets import Target, find_measured, find_ratio
from bench.workloads import TARGETS
from gpuopt.bench.results import Results, Run, Times, describe_run, read_results, three_digits
from gpuopt.bench.results import list_curves as find_curves
from gpuopt.bench.workloads import list_tasks

_END = "<!-- to here -->\n"
# As in a file's description of its machine, and as pages write them.
_LIBRARIES = {
    "numpy": "numpy",
    "torch": "torch",
    "optax": "optax",
    "jax": "jax",
    "thinc": "Thinc",
}
_NUMBER = re.compile(r"\d[\d.]*")


class Part(NamedTuple):
    """A part of a page, between two comments.

    Attributes:
        page: The page's path in the repository.
        write: Returns the part's text from files of results.
        draw: Draws the part's pictures from the same files.
    """

    page: str
    write: Callable[[Sequence[Path]], str]
    draw: Callable[[Sequence[Path]], None] | None = None


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.pages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", nargs="?", choices=PARTS, help="by default, all of them")
    parser.add_argument(
        "results", nargs="*", type=Path, help="by default, the files that the part names"
    )
    options = parser.parse_args()
    for name in [options.part] if options.part else PARTS:
        write(name, options.results)


def write(name: str, files: Sequence[Path] = ()) -> None:
    """Writes a part and draws its pictures; by default, from the files that it names."""
    part, page = PARTS[name], ROOT / PARTS[name].page
    chosen = files or find_files(name)
    page.write_text(replace_part(page.read_text(), name, part.write(chosen)))
    print(f"written: {part.page}")
    if part.draw is None:
        return
    if find_spec("matplotlib") is None:
        print("no pictures: matplotlib is not installed")
        return
    part.draw(chosen)


def replace_part(page: str, name: str, text: str) -> str:
    """Returns a page with `text` as the part of this name."""
    before, begin, rest = page.partition(_begin(name))
    _, _, after = rest.partition(_END)
    return before + begin + text + "\n" + _END + after


def read_part(name: str) -> str:
    """Returns what a part says now."""
    page = (ROOT / PARTS[name].page).read_text()
    return page.partition(_begin(name))[2].partition(_END)[0]


def find_files(name: str) -> list[Path]:
    """Returns the files of results that a part names, each once."""
    named = re.findall(r"bench/results/[\w./-]+\.json", read_part(name))
    return [ROOT / file for file in dict.fromkeys(named)]


def _begin(name: str) -> str:
    return f"<!-- `.venv/bin/python -m bench.pages {name}` writes from here -->\n\n"


# What parts have in common


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


def make_table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table in Markdown."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _join(*parts: str) -> str:
    """Joins the paragraphs and tables of a part that are there."""
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _list_contenders(runs: Iterable[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.contenders))


def _name_versions(machine: Mapping[str, Any]) -> str:
    """Names the libraries of a machine, as in "numpy 2.4.6, torch 2.15.0"."""
    return ", ".join(
        f"{name} {machine[key]}" for key, name in _LIBRARIES.items() if machine.get(key)
    )


def _list_times(run: Run, contenders: Iterable[str], statistic: str = "median_ms") -> list[str]:
    """Returns a time of each contender with two decimals; nothing where it took no part."""
    found = (run.contenders.get(name) for name in contenders)
    return ["" if each is None else f"{getattr(each.usual, statistic):.2f}" for each in found]


def _describe_rounds(results: Results) -> str:
    """Returns how many rounds there were, as in "5 to 30 rounds"."""
    return f"{_span([run.rounds for run in results.runs.values()])} rounds"


def _describe_doubts(results: Results) -> str:
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


# README.md: steps, from a file of `gpuopt bench --json`

_DOUBTFUL = "†"


def _write_steps(files: Sequence[Path]) -> str:
    if not files:
        raise ValueError("README.md names no file of results: give one")
    [file] = files[:1]
    results = read_results(file)
    peers = [each for each in _list_contenders(results.runs.values()) if each != "gpuopt"]
    rows = [
        [
            describe_run(name, run) + (f" {_DOUBTFUL}" if run.other_warnings else ""),
            f"{_about(ours)}{ours.median_ms:.3g} ms",
            *(_compare(run, peer) for peer in peers),
        ]
        for name, run in results.runs.items()
        for ours in [run.contenders["gpuopt"].times["cold"]]
    ]
    return f"{make_table(['', 'gpuopt', *peers], rows)}\n{_describe_steps(results, file)}\n"


def _about(times: Times) -> str:
    return "~" if times.is_noisy else ""


def _compare(run: Run, peer: str) -> str:
    if peer not in run.contenders:
        return ""
    ours, its = (run.contenders[name].times["cold"] for name in ("gpuopt", peer))
    ratio = its.median_ms / ours.median_ms
    return f"{_about(its)}{ratio:.{0 if ratio >= 10 else 2}f}x"


def _describe_steps(results: Results, file: Path) -> str:
    machine, doubts = results.machine, _describe_doubts(results)
    device = (
        f"{machine['cores']} cores of an {machine['cpu']}"
        if results.device == "cpu"
        else results.device
    )
    descriptions = {each.name: each.description for each in list_tasks()}
    lines = [
        f"From [a file of results]({name_file(file)})",
        f"of {results.date[:10]}: float32, on {device},",
        f"with {_name_versions(machine)}.",
        f"Medians of {_describe_rounds(results)}. A ~ marks times that spread widely.",
        *([f"A {_DOUBTFUL} marks rows with a warning in that file: {doubts}."] if doubts else []),
    ]
    for name, reason in results.not_run.items():
        task, _, settings = name.partition("/")
        lines.append(f"Not run: {descriptions.get(task, task)} ({settings}): {reason}.")
    return "\n".join(lines)


# docs/performance.md: steps on CPUs, from a file of `python -m bench` for each machine

_SPARSE = ("host_sparse_lazy_adam", "host_sparse_adagrad", "host_all_rows_adam", "host_row_sums")


def _write_machines(files: Sequence[Path]) -> str:
    return "\n".join(map(_write_machine, files))


def _write_machine(file: Path) -> str:
    results = read_results(file)
    machine, runs = results.machine, results.runs
    dense = [run for name, run in runs.items() if pictures.DENSE.fullmatch(name)]
    sparse = [runs[name] for name in _SPARSE if name in runs]
    return _join(
        f"### {machine['cpu']}, {machine['cores']} cores",
        f"Python {machine['python']}, {_name_versions(machine)}.",
        "![Milliseconds of a step of each library, for one large tensor, the tensors of a "
        "ResNet-50,\nand many small tensors; the table below has the numbers.]"
        f"(images/{pictures.name_steps(file)})",
        _make_machine_table(dense),
        _make_machine_table(sparse) if sparse else "",
        f"From `{name_file(file)}`, at commit {results.commit}. A copy in memory "
        f"reached {dense[0].copy_gb_per_s:.1f} GB/s.",
    )


def _make_machine_table(runs: Sequence[Run]) -> str:
    contenders = _list_contenders(runs)
    return make_table(
        ["milliseconds, the median", *contenders, "gpuopt's bandwidth, of a copy's"],
        [
            [
                run.description,
                *_list_times(run, contenders),
                f"{run.contenders['gpuopt'].share_of_copy:.2f}",
            ]
            for run in runs
        ],
    )


# docs/performance.md: growth, from a file of `gpuopt bench --growth --json`


def list_curves(results: Results) -> dict[str, list[Run]]:
    """Returns the runs of each curve.

    Raises:
        ValueError: a curve is not there, as in results without `--growth`.
    """
    found = {name.partition("/")[0]: runs for name, runs in find_curves(results.runs).items()}
    if missing := pictures.CURVES.keys() - found.keys():
        raise ValueError(f"the results have no curve {min(missing)!r}")
    return {name: found[name] for name in pictures.CURVES}


def _write_growth(files: Sequence[Path]) -> str:
    [file] = files
    results = read_results(file)
    curves, machine, runs = list_curves(results), results.machine, results.runs.values()
    spread = sum(run.warnings != run.other_warnings for run in runs)
    others = sum(bool(run.other_warnings) for run in runs)
    why = f":\n{doubts}" if (doubts := _describe_doubts(results)) else ""
    return _join(
        "![Nanoseconds that each parameter, tensor or row costs each library, in four panels; the\n"
        f"table below has some of the numbers.](images/{pictures.GROWTH})",
        _make_growth_table(curves),
        f"From `{name_file(file)}`,\n"
        # A file's name is <date>-<commit>-<what>.json.
        f"of {results.date[:10]} at commit {file.stem.split('-')[3]}, on {machine['cores']} "
        f"cores of an\n{machine['cpu']}, Python {machine['python']}, {_name_versions(machine)}.\n"
        f"Medians of {_describe_rounds(results)}. Of its {len(runs)} runs, {spread} have times\n"
        f"that spread widely, and {others} have other warnings{why}.",
    )


def _make_growth_table(curves: Mapping[str, Sequence[Run]]) -> str:
    contenders = _list_contenders(run for runs in curves.values() for run in runs)
    rows = []
    for name, runs in curves.items():
        # Of many points, every third; the picture has all.
        for run in runs if len(runs) < 10 else [*runs[:-1:3], runs[-1]]:
            costs = (three_digits(run.cost_ns(run.contenders.get(each))) for each in contenders)
            size = _format_size(run.at or 0)
            rows.append([f"{pictures.CURVES[name].axis}: {size}", f"a {run.per}", *costs])
    return make_table(["nanoseconds", "", *contenders], rows)


def _format_size(number: int) -> str:
    """Writes a power of 2 from 2^10 on as one, and other numbers with commas."""
    exponent = number.bit_length() - 1
    return f"2^{exponent}" if exponent >= 10 and number == 2**exponent else f"{number:,}"


def _draw_growth(files: Sequence[Path]) -> None:
    pictures.draw_growth(list_curves(read_results(files[0])), files[0])


# docs/performance.md: launches, counted now


def _write_launches(files: Sequence[Path]) -> str:
    return make_launches_tables(launches.count({**launches.DENSE, **launches.SPARSE}))


def make_launches_tables(counted: Mapping[str, launches.Counted]) -> str:
    """Returns the tables of the steps `launches.DENSE` and `launches.SPARSE`."""

    def row(name: str, last: str) -> list[str]:
        return [name, str(len(counted[name].kernels)), str(counted[name].waits), last]

    dense = [row(name, f"{counted[name].bytes_an_element:g}") for name in launches.DENSE]
    sparse = [row(name, ", ".join(counted[name].functions)) for name in launches.SPARSE]
    columns = ["launches", "waits"]
    return _join(
        make_table(["Adam with", *columns, "bytes an element"], dense),
        make_table(["65,536 rows of a table of 1,000,000", *columns, "kernels"], sparse),
    )


# docs/performance.md: instructions, from a file of `python -m bench.instructions`


def _write_instructions(files: Sequence[Path]) -> str:
    [file] = files
    runs = read_results(file).runs
    kernels = instructions.read_kernels(runs)
    missed: dict[str, list[str]] = {}
    for miss, architecture in instructions.list_all_misses(kernels):
        missed.setdefault(miss, []).append(architecture)
    misses = "\n".join(f"- {what} ({', '.join(where)})" for what, where in missed.items())
    [against, *_] = _list_contenders(runs.values())
    return _join(
        _make_architectures_table(kernels),
        _make_kernels_table(kernels, "sm_90"),
        f"Over the limits:\n\n{misses}" if misses else "",
        f"From `{name_file(file)}`,\nbeside commit {against}.",
    )


def _make_architectures_table(of_all: instructions.Kernels) -> str:
    rows = []
    for architecture in instructions.ARCHITECTURES:
        kernels = [every[architecture] for every in of_all.values()]
        row: list[object] = [architecture, len(kernels)]
        for ratios in (
            [each.ratio(each.contracted) for each in kernels],
            [each.ratio(each.shipped) for each in kernels],
        ):
            row += [f"{mean(ratios):.3f}", f"{max(ratios):.2f}"]
        row += [sum(each.theirs.registers for each in kernels)]
        row += [sum(each.shipped.registers for each in kernels)]
        rows.append([*row, sum(each.shipped.spilled_bytes for each in kernels)])
    headings = ["", "kernels", "contracted, mean", "highest", "as shipped, mean", "highest"]
    return make_table([*headings, "registers before", "now", "spilled bytes"], rows)


def _make_kernels_table(kernels: instructions.Kernels, architecture: str) -> str:
    rows = []
    for name, every in kernels.items():
        kernel = every[architecture]
        before, now = kernel.theirs, kernel.shipped
        rows.append(
            [
                name,
                f"{before.registers} / {now.registers}",
                f"{now.bytes_an_element:g}",
                " / ".join(f"{each.instructions_an_element:.1f}" for each in kernel),
                " / ".join(f"{kernel.ratio(each):.2f}" for each in (kernel.contracted, now)),
                f"{instructions.find_share_of_h200(now):.0%}",
            ]
        )
    headings = [architecture, "registers before / now", "bytes an element"]
    of_instructions = "instructions an element before / contracted / as shipped"
    return make_table([*headings, of_instructions, "to before", "of an H200's"], rows)


# docs/scale.md: a model, beside a file of `python -m bench.ranks`

_SIZES_MB = (1, 16)
_MODELS_MB = (1, 100)


def _write_scale(files: Sequence[Path]) -> str:
    [file] = files
    results = read_results(file)
    # Of each, the tenth percentile: other programs, and ranks that share a core, disturb it least.
    p10_ms = {name: run.contenders["gpuopt"].usual.p10_ms for name, run in results.runs.items()}
    cores = results.machine["cores"]
    message_s = p10_ms["ranks_exchange_of_2_over_mpich"] / 1e3
    return _join(
        f"## Held against a host of {cores} cores",
        f"Tenth percentiles of `{name_file(file)}`.\n{_hold_model_against(p10_ms, cores)}",
        "## One reduction, modelled, in ms",
        _make_reductions_table(message_s),
        "## Backup workers, modelled",
        _make_backups_table(),
    )


def _hold_model_against(p10_ms: Mapping[str, float], cores: int) -> str:
    rows, headers = [], []
    for mpi in ("openmpi", "mpich"):
        message_s = p10_ms[f"ranks_exchange_of_2_over_{mpi}"] / 1e3
        headers.append(f"{1e6 * message_s:.0f} us over {mpi}")
        for megabytes in _SIZES_MB:
            num_bytes = megabytes * 2**20
            times = [p10_ms[f"ranks_all_reduce_{megabytes}mb_of_{n}_over_{mpi}"] for n in (2, 3, 4)]
            # The speed of memory that two ranks' time says, without the messages.
            for_bytes = times[0] / 1e3 - scale.on_one_host_s(2, num_bytes, message_s, 1e99, cores)
            speed = num_bytes * scale.on_one_host_s(2, 1, 0, 1, cores) / for_bytes
            for ranks, took in zip((2, 3, 4), times, strict=True):
                modelled = 1e3 * scale.on_one_host_s(ranks, num_bytes, message_s, speed, cores)
                shown = [f"{took:.2f}", "(fitted)" if ranks == 2 else f"{modelled:.2f}"]
                rows.append([mpi, f"{megabytes} MB", ranks, *shown])
    took_headers = f"An exchange of headers between two ranks took {' and '.join(headers)}.\n\n"
    table = make_table(["MPI", "arrays", "ranks", "measured, ms", "modelled, ms"], rows)
    return took_headers + table


def _make_reductions_table(message_s: float) -> str:
    network = scale.Network()
    rows = [
        [
            f"{ranks:,}",
            *(
                _format_ms(seconds)
                for num_bytes in (megabytes * 1e6 for megabytes in _MODELS_MB)
                for seconds in (
                    scale.ring_s(ranks, num_bytes, network),
                    scale.tree_s(ranks, num_bytes, network),
                    scale.shares_s(ranks, num_bytes, network, message_s),
                )
            ),
        ]
        for ranks in scale.RANKS
    ]
    headings = [
        heading
        for megabytes in _MODELS_MB
        for heading in (f"{megabytes} MB: ring", "tree", "`MPICommunicator`")
    ]
    return make_table(["ranks", *headings], rows)


def _make_backups_table() -> str:
    network, stragglers = scale.Network(), scale.Stragglers()
    rows = []
    for ranks in scale.RANKS:
        all_s = scale.wait_s(ranks, ranks, stragglers)
        row: list[object] = [f"{ranks:,}", _format_ms(all_s)]
        for megabytes in _MODELS_MB:
            num_bytes = megabytes * 1e6

            def by_ring(number: int, num_bytes: float = num_bytes) -> float:
                return scale.ring_s(number, num_bytes, network)

            def by_chief(number: int, num_bytes: float = num_bytes) -> float:
                return scale.chief_s(number, num_bytes, network)

            plain = ranks / (all_s + by_ring(ranks))
            for reduce_s in (by_chief, by_ring):
                backups, rate = scale.best_backups(ranks, stragglers, reduce_s)
                row.append(f"{rate / plain:.2f} ({backups})")
        rows.append(row)
    headings = ["ranks", "all have computed after, ms"]
    for megabytes in _MODELS_MB:
        headings += [f"{megabytes} MB: one chief", "as a ring"]
    return make_table(headings, rows)


def _format_ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"


# docs/guides/adam_for_embeddings.md: rows that catch up, from files of `python -m bench`

_ALL_ROWS = "a step of all rows"
_CATCH_UP = {
    "catch_up_step": "a step, 1,000,000 x 64",
    "catch_up_flush": "all brought up to date",
    **{f"catch_up_step_{key}": f"a step, {rows:,} x 16" for key, rows in catch_up.HEIGHTS.items()},
}


def _write_catch_up(files: Sequence[Path]) -> str:
    runs = _read_catch_up(files)
    low, *_, tall = (runs[f"catch_up_step_{key}"].contenders for key in catch_up.HEIGHTS)
    ours, lazy = (tall[who].usual.p10_ms / low[who].usual.p10_ms for who in ("gpuopt", "LazyAdam"))
    contenders = pictures.CATCH_UP_CONTENDERS
    return _join(
        f"Each step of the curve names {catch_up.NUM_DIFFERENT:,} different rows. In the tallest "
        f"table, it\ntakes {ours:.1f} times as long as in the lowest with rows that catch up, and "
        f"{lazy:.1f} times with\nLazyAdam: the rows of the lowest stay in the caches.",
        make_table(
            ("milliseconds, the tenth percentile", *contenders.values(), "one step of all rows"),
            [
                [title, *_list_times(runs[name], (*contenders, _ALL_ROWS), "p10_ms")]
                for name, title in _CATCH_UP.items()
            ],
        ),
        "From " + " and\n".join(f"`{name_file(each)}`" for each in files) + ".",
    )


def _read_catch_up(files: Sequence[Path]) -> dict[str, Run]:
    """Reads runs; of one in several files, the last one counts."""
    return {name: run for file in files for name, run in read_results(file).runs.items()}


def _draw_catch_up(files: Sequence[Path]) -> None:
    pictures.draw_catch_up_times(_read_catch_up(files))
    pictures.draw_catch_up_training(catch_up.train_apart())


# docs/decisions/2026-12-01-...: sums of missed steps, from a file of `python -m bench`


def _write_missed_steps(files: Sequence[Path]) -> str:
    [file] = files
    results = read_results(file)
    rows, at_rule = [], []
    for rule in missed_steps.RULES:
        for height, width in missed_steps.SIZES:
            for gap in missed_steps.GAPS:
                name = missed_steps.name_run(rule, height, width, gap)
                run = results.runs[name]
                ratio = 1 / find_ratio(run, missed_steps.STEPPING)
                times = _list_times(run, run.contenders)
                rows.append([f"{rule}, {height:,} x {width}", f"{gap:,}", *times, f"{ratio:.2g}"])
                if rule == "Adam" and gap == missed_steps.GAP_OF_RULE:
                    at_rule.append(ratio)
    machine = results.machine
    return _join(
        f"With gaps of {missed_steps.GAP_OF_RULE:,} steps, Adam's stepping takes "
        f"{_span([f'{each:.0f}' for each in at_rule])} times as long.",
        make_table(["all rows brought up", "missed", "sums, ms", "stepping, ms", "ratio"], rows),
        f"From `{name_file(file)}`, on one core of an\n{machine['cpu']}. Medians of "
        f"{_describe_rounds(results)}, in each of which both took their turn.",
    )


# docs/guides/thinc.md: from a file of `python -m bench.spacy_training`

_THINCS = "Thinc's"
_TRAININGS = {
    "spacy_train_64_total": "all of spaCy's training",
    "spacy_train_64_optimizer": "of it, in the optimizer",
    "spacy_train_64_averages_total": "all of spaCy's training, with averages",
    "spacy_train_64_averages_optimizer": "of it, in the optimizer",
    "thinc_step_64": "a step of three layers of width 64",
    "thinc_step_64_averages": "the same, with averages",
    "thinc_step_1024": "a step of three layers of width 1,024",
    "thinc_step_1024_averages": "the same, with averages",
}


def _write_thinc(files: Sequence[Path]) -> str:
    [file] = files
    results = read_results(file)
    machine, runs = results.machine, results.runs
    ratios = {name: f"{find_ratio(runs[name], _THINCS):.2f}" for name in _TRAININGS}
    rows = []
    for name, what in _TRAININGS.items():
        of_both = (runs[name].contenders[who].usual.median_ms for who in (_THINCS, "gpuopt"))
        rows.append([what, *map(three_digits, of_both), ratios[name]])
    steps = runs["spacy_train_64_total"].description.split()[0]
    return _join(
        f"{steps} steps of spaCy's text classifier of width 64 take "
        f"{ratios['spacy_train_64_total']} times as long\nwith `gpuopt.Adam.v1` as with "
        "`Adam.v1`, and their time in the optimizer is\n"
        f"{ratios['spacy_train_64_optimizer']} times; with `use_averages = true`, "
        f"{ratios['spacy_train_64_averages_total']} and "
        f"{ratios['spacy_train_64_averages_optimizer']} times.",
        make_table(["milliseconds", "Thinc's Adam", "gpuopt's", "gpuopt's / Thinc's"], rows),
        f"From `{name_file(file)}`, on {machine['cores']} cores of an\n"
        f"{machine['cpu']}, with Python {machine['python']}, {_name_versions(machine)}. Medians; "
        "the quotient is the\nmedian of all rounds, in each of which both took their turn.",
    )


# bench/README.md: targets that the newest results on CPUs miss, from all files


class _Result(NamedTuple):
    day: str
    measured: float
    file: Path


def _write_missed(files: Sequence[Path]) -> str:
    newest = find_newest_results()
    rows = [
        [
            f"`{target.workload}`",
            f"{_name_ratio(target)} <= {target.at_most:g}",
            f"{result.measured:.2f}",
            f"[{result.file.parent.name}](results/{result.file.relative_to(RESULTS)})",
        ]
        for (_, target), result in sorted(newest.items(), key=lambda each: str(each[0]))
        if not target.is_met_by(result.measured)
    ]
    count = f"Of {len(newest)} targets with a result on a CPU, {len(rows)} are missed:"
    return f"{count}\n\n{make_table(['workload', 'at most', 'measured', 'result'], rows)}"


def find_newest_results() -> dict[tuple[str, Target], _Result]:
    """Returns what counts of each machine and target.

    Of each, the newest day counts, and of that day the result that is farthest from its target.
    """
    newest: dict[tuple[str, Target], _Result] = {}
    for machine, target, result in _list_results():
        known = newest.setdefault((machine, target), result)
        if (result.day, result.measured) > (known.day, known.measured):
            newest[machine, target] = result
    return newest


def _list_results() -> Iterator[tuple[str, Target, _Result]]:
    """Lists what was measured on each machine for today's targets, where a target was then, too."""
    for file in sorted(RESULTS.glob("*-cores/*.json")):
        results = read_results(file)
        for target in TARGETS:
            run = results.runs.get(target.workload)
            if run is None or not any(f"{target.subject} <" in line for line in run.targets):
                continue
            measured = find_measured(target, run)
            if measured is not None:
                yield file.parent.name, target, _Result(results.date[:10], measured, file)


def _name_ratio(target: Target) -> str:
    if target.against is None:
        return target.quantity
    mine = "numpy alone" if target.quantity == "numpy_ratio" else "gpuopt"
    return f"{mine} / {target.against}"


PARTS: Mapping[str, Part] = {
    "steps": Part("README.md", _write_steps),
    "machines": Part("docs/performance.md", _write_machines, pictures.draw_steps),
    "growth": Part("docs/performance.md", _write_growth, _draw_growth),
    "launches": Part("docs/performance.md", _write_launches),
    "instructions": Part("docs/performance.md", _write_instructions),
    "scale": Part("docs/scale.md", _write_scale),
    "catch_up": Part("docs/guides/adam_for_embeddings.md", _write_catch_up, _draw_catch_up),
    "missed_steps": Part(
        "docs/decisions/2026-12-01-the-closed-form-of-missed-steps-stays.md", _write_missed_steps
    ),
    "thinc": Part("docs/guides/thinc.md", _write_thinc),
    "missed": Part("bench/README.md", _write_missed),
}


if __name__ == "__main__":
    main()
