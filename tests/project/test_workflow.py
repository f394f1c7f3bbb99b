"""What the workflow of GitHub runs; make lint checks how it is written."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import run

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github/workflows/ci.yml"
# What is for people to look at; and the benchmark is part of the image that the workflow runs.
NOT_CHECKS = {"bench", "gallery"}


def test_workflow_runs_every_task_that_checks_something() -> None:
    workflow = WORKFLOW.read_text()
    ran = {*re.findall(r"make ([\w-]+)", workflow), *re.findall(r"task: ([\w-]+)", workflow)}
    assert set(run.GROUPS) - NOT_CHECKS <= ran


def test_workflow_tests_with_every_python_that_the_package_names() -> None:
    [tested] = re.findall(r"python: (\[.*\])", WORKFLOW.read_text())
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    versions = [name.rpartition(" ")[2] for name in named if "Python :: 3." in name]
    assert json.loads(tested) == versions


def test_workflow_tests_the_package_with_its_oldest_dependencies() -> None:
    """Those that newer Pythons know may be newer: run.py leaves them out with these."""
    [python] = re.findall(r'task: test-package, .*python: "([\d.]+)"', WORKFLOW.read_text())
    assert python == ".".join(map(str, run.OLDEST_PYTHON))


def test_workflow_builds_and_runs_every_image_that_no_other_is_made_of() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?", dockerfile, re.MULTILINE)
    used = {base for base, _ in stages} | set(re.findall(r"--from=(\w+)", dockerfile))
    workflow = WORKFLOW.read_text()
    ends = [name for _, name in stages if name not in used]
    assert ends == ["test", "bench", ""]
    for name in ends:
        target, tag = (f"--target {name} ", f":{name}") if name else ("", "")
        assert f"docker build --build-arg EXTRA=plots {target}-t gpuopt{tag} ." in workflow
        assert re.search(f"docker run --rm gpuopt{tag}( |\n)", workflow)


def test_some_job_fails_where_tests_in_a_browser_would_be_skipped() -> None:
    assert re.search(r'require: "[^"]*\bbrowser\b', WORKFLOW.read_text())


def test_every_job_has_a_time_limit() -> None:
    workflow = WORKFLOW.read_text()
    jobs = re.findall(r"runs-on: ", workflow)
    assert jobs
    assert len(re.findall(r"timeout-minutes: ", workflow)) == len(jobs)
