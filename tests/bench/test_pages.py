"""Parts of pages are what their files of results say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import pages, pictures
from bench.harness import RESULTS, ROOT
from bench.pages import PARTS, find_files, list_curves, read_part
from bench.targets import judge
from bench.workloads import TARGETS
from gpuopt.bench.results import (
    Figures,
    Results,
    Run,
    make_figures,
    read_results,
    summarize,
    write_results,
)
from gpuopt.bench.workloads import Workload, list_growing_tasks, make_run

# The counts of launches need CuPy: test_launches_of_a_step.py has them.
MEASURED = [name for name in PARTS if name != "launches"]
IMAGES = ROOT / "docs" / "images"


@pytest.mark.parametrize("name", MEASURED)
def test_a_part_is_what_the_files_that_it_names_say(name: str) -> None:
    page = (ROOT / PARTS[name].page).read_text()
    written = pages.replace_part(page, name, PARTS[name].write(find_files(name)))
    assert read_part(name)
    assert written == page, f"run .venv/bin/python -m bench.pages {name}"


def test_a_page_names_each_file_of_results() -> None:
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "bench" / "README.md"]
    pages_text = "\n".join(text.read_text() for text in texts)
    files = set(RESULTS.glob("*/*.json")) - set(RESULTS.glob("on-gpu/*"))
    assert {file for file in files if file.name not in pages_text} == set()


def test_all_files_of_results_have_one_form() -> None:
    for file in RESULTS.glob("*/*.json"):
        assert read_results(file).runs


def test_each_picture_is_of_the_files_that_its_part_names() -> None:
    for file in find_files("machines"):
        drawn = (IMAGES / pictures.name_steps(file)).read_text()
        assert f"at {file.stem.rpartition('-')[2]}:" in drawn
    [file] = find_files("growth")
    assert file.name in (IMAGES / pictures.GROWTH).read_text()


# README.md


def cut(run: Run, rounds: int) -> dict[str, Figures]:
    """Returns a run's figures of its first rounds."""
    return {
        name: replace(
            each,
            times={
                kind: summarize((4 * of.samples_ms)[:rounds]) for kind, of in each.times.items()
            },
        )
        for name, each in run.contenders.items()
    }


def test_the_table_of_steps_says_what_its_file_doubts_and_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = read_results(find_files("steps")[0])
    names = list(results.runs)
    warnings = {
        names[0]: ["copies took 0.70 times as long", "the times of gpuopt spread widely"],
        names[1]: ["copies took 1.30 times as long", "the CPU was throttled by its heat"],
        names[2]: ["the times of gpuopt spread widely"],
    }
    runs = {
        name: replace(run, contenders=cut(run, 7 + at), warnings=warnings.get(name, []))
        for at, (name, run) in enumerate(results.runs.items())
    }
    for folder in ("RESULTS", "ROOT"):
        monkeypatch.setattr(pages, folder, tmp_path)
    file = tmp_path / "today.json"
    not_run = {"llama-layer/adam/float32": "it needs more memory"}
    write_results(replace(results, runs=runs, not_run=not_run), file)
    written = PARTS["steps"].write([file])
    rows = [line for line in written.splitlines() if line.startswith("|") and " ms |" in line]
    assert ["†" in row for row in rows] == [True, True] + [False] * (len(names) - 2)
    assert f"Medians of 7 to {6 + len(names)} rounds." in written
    assert (
        "marks rows with a warning in that file: "
        "copies took 0.70 to 1.30 times as long; the CPU was throttled by its heat.\n"
    ) in written
    assert "Not run: a layer of Llama 2 7B (adam/float32): it needs more memory.\n" in written
    write_results(replace(results, runs={names[4]: runs[names[4]]}, not_run={}), file)
    written = PARTS["steps"].write([file])
    assert "Medians of 11 rounds." in written
    assert "†" not in written
    assert "Not run" not in written


def test_a_page_without_a_file_of_results_is_refused() -> None:
    with pytest.raises(ValueError, match=r"README.md names no file of results"):
        PARTS["steps"].write([])


def test_results_that_readers_would_not_find_are_refused(tmp_path: Path) -> None:
    copy = tmp_path / "today.json"
    copy.write_bytes(find_files("steps")[0].read_bytes())
    with pytest.raises(ValueError, match=r"today.json is not in bench/results: put it there"):
        PARTS["steps"].write([copy])


# Growth


def test_the_file_of_growth_has_every_task_that_grows() -> None:
    [file] = find_files("growth")
    found = {name.partition("/")[0] for name in read_results(file).runs}
    assert found == {task.name for task in list_growing_tasks()}


def test_the_page_says_how_many_runs_the_file_doubts_and_of_which_commit_it_is() -> None:
    [file] = find_files("growth")
    found = json.loads(file.read_text())
    warnings = [run["warnings"] for run in found["runs"].values()]
    spread = [any("spread widely" in each for each in of_run) for of_run in warnings]
    others = [any("spread widely" not in each for each in of_run) for of_run in warnings]
    assert sum(spread) > sum(others) > 0
    text = " ".join(read_part("growth").split())
    assert (
        f"Of its {len(warnings)} runs, {sum(spread)} have times that spread widely, "
        f"and {sum(others)} have other warnings: copies took "
    ) in text
    _, commit, _ = file.stem.rsplit("-", 2)
    assert f"of {found['date'][:10]} at commit {commit}, on" in text
    fewest = min(len(run["copy_ms"]) for run in found["runs"].values())
    assert f"Medians of {fewest} to " in text


def test_results_without_growth_are_refused() -> None:
    results = read_results(find_files("growth")[0])
    runs = {name: replace(run, curve=None) for name, run in results.runs.items()}
    with pytest.raises(ValueError, match="no curve 'height'"):
        list_curves(replace(results, runs=runs))


# Thinc


def test_the_page_has_the_quotient_of_rounds_of_the_training() -> None:
    [file] = find_files("thinc")
    trained = read_results(file).runs["spacy_train_64_averages_optimizer"].contenders
    samples = (trained[who].usual.samples_ms for who in ("gpuopt", "Thinc's"))
    quotients = sorted(ours / its for ours, its in zip(*samples, strict=True))
    middle = quotients[len(quotients) // 2]
    assert f" and {middle:.2f} times." in read_part("thinc")


# Missed targets


@pytest.mark.parametrize(
    ("measured", "listed"),
    [
        ({"2026-11-01-a": 9.0, "2026-11-02-b": 0.1}, []),
        ({"2026-11-01-a": 0.1, "2026-11-02-b": 9.0}, ["9.00"]),
        # of one day, the farthest
        ({"2026-11-02-a": 9.0, "2026-11-02-b": 0.1, "2026-11-02-c": 8.0}, ["9.00"]),
    ],
)
def test_the_newest_day_counts(
    measured: dict[str, float], listed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = next(each for each in TARGETS if each.quantity == "ratio")
    folder = tmp_path / "one-cores"
    folder.mkdir()
    for name, ratio in measured.items():
        contenders = {
            who: make_figures({"step": [ms] * 3}, None, None)
            for who, ms in {"gpuopt": ratio, str(target.against): 1.0}.items()
        }
        run = make_run(Workload("", {}), contenders)
        run.targets.append(judge(target, run))
        results = Results("1", name[:10], "cpu", {}, {target.workload: run}, {}, "abc")
        write_results(results, folder / f"{name}.json")
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    written = PARTS["missed"].write([])
    rows = re.findall(rf"^\| `{target.workload}` \| .* \| (\S+) \| \[", written, re.M)
    assert rows == listed
