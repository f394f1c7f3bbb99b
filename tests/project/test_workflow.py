"""What GitHub's workflows and the Dockerfile run; make lint checks how they are written."""

from __future__ import annotations

import json
import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import run

pytestmark = pytest.mark.internal

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github/workflows/ci.yml"
NIGHTLY = ROOT / ".github/workflows/nightly.yml"
RELEASE = ROOT / ".github/workflows/release.yml"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# What is for people to look at; and the benchmark is part of the image that the workflow runs.
NOT_CHECKS = {"bench", "gallery", "new-optimizer"}


def test_workflow_runs_every_task_that_checks_something() -> None:
    workflow = WORKFLOW.read_text() + NIGHTLY.read_text()
    ran = {*re.findall(r"make ([\w-]+)", workflow), *re.findall(r"task: ([\w-]+)", workflow)}
    assert set(run.TASKS) - NOT_CHECKS <= ran


def test_workflow_tests_with_every_python_that_the_package_names() -> None:
    [tested] = re.findall(r"python: (\[.*\])", WORKFLOW.read_text())
    named = PYPROJECT["project"]["classifiers"]
    versions = [name.rpartition(" ")[2] for name in named if "Python :: 3." in name]
    assert json.loads(tested) == versions


def test_nightly_workflow_mutates_every_package() -> None:
    mutated = re.findall(r"^ {10}- (\w+)$", NIGHTLY.read_text(), re.MULTILINE)
    packages = [path.parent.name for path in ROOT.glob("gpuopt/*/__init__.py")]
    assert sorted(mutated) == sorted(["gpuopt", *packages])


def jobs(file: Path) -> dict[str, str]:
    """Returns the text of each job by name, without comments, and with each command in one line."""
    text = file.read_text().partition("\njobs:\n")[2]
    text = re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r">-((?:\n {10}.*)+)", lambda found: " ".join(found[1].split()), text)
    names = re.split(r"^  ([\w-]+):$", text, flags=re.MULTILINE)[1:]
    return dict(zip(names[::2], names[1::2], strict=True))


def commands(job: str) -> list[str]:
    return re.findall(r"run: (.*)", job)


def last_stages() -> list[str]:
    """Returns the targets of the Dockerfile that no other one is made of; the default one is ''."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?", dockerfile, re.MULTILINE)
    used = {base for base, _ in stages} | set(re.findall(r"--from=(\w+)", dockerfile))
    return [name for _, name in stages if name not in used]


def test_workflows_build_and_run_every_image_that_no_other_is_made_of() -> None:
    assert last_stages() == ["dist", "test", "bench", ""]
    assert "--target dist --output dist" in jobs(RELEASE)["build"]
    image = jobs(WORKFLOW)["image"]
    for target, tag in (("--target test ", ":test"), ("--target bench ", ":bench"), ("", "")):
        assert f"docker build --build-arg EXTRA {target}-t gpuopt{tag} ." in image
        assert re.search(rf"docker run --rm [^\n]*gpuopt{tag}( |\n)", image)


def test_the_page_on_containers_has_the_workflows_commands_and_the_dockerfiles_targets() -> None:
    page = ROOT / "docs/containers.md"
    shown = commands(jobs(page)["gpu"])
    assert len(shown) == 5
    assert set(shown) <= set(commands(jobs(WORKFLOW)["gpu"]))
    stages = re.findall(r" AS (\w+)", (ROOT / "Dockerfile").read_text())
    assert set(re.findall(r"--target (\w+)", page.read_text())) <= set(stages)


@pytest.mark.parametrize("cuda", ["cuda12", "cuda13"])
def test_the_image_installs_one_version_of_what_the_package_and_its_tests_need(cuda: str) -> None:
    """.ci/constraints chooses it, and a change of pyproject.toml may ask for another one."""
    lines = (ROOT / "constraints.txt").read_text().split()
    versions = dict(line.split("==") for line in lines)
    assert len(versions) == len(lines)
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras[cuda], *extras["plots"]]
    needed += chain(*map(extras.get, run.EXTRAS))
    needed += extras["bench"] if cuda == "cuda13" else []
    needed += [*PYPROJECT["dependency-groups"]["test"], *PYPROJECT["build-system"]["requires"]]
    for requirement in map(Requirement, needed):
        version = versions[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}, and {version} is pinned"
