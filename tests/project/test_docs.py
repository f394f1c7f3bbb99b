"""The documentation's examples run, its links lead somewhere, and files that it names exist."""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import guide_scripts
import optimizer_nav
import pytest
import reference_pages
import tables
from optimizer_page import entries, exports

import gpuopt
from gpuopt.backends.cuda.kernels import dense_update
from gpuopt.device import Device

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# What a guide's model must have learnt at its end.
OUTCOMES: dict[str, Callable[[Any], bool]] = {
    "logistic_regression.md": lambda names: names["accuracy"] > 0.95,
    "perceptron.md": lambda names: names["accuracy"] > 0.95,
    "rows.md": lambda names: names["after"] < 0.01 * names["before"],
    "thinc.md": lambda names: names["accuracy"] > 0.95,
    "with_torch.md": lambda names: names["accuracy"] > 0.95,
    "with_jax.md": lambda names: names["accuracy"] > 0.95,
    "embeddings.md": lambda names: names["after"] < 0.1 * names["before"],
}
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    ROOT / "bench" / "README.md",
    ROOT / "gpuopt" / "demo" / "data" / "README.md",
    *sorted(DOCS.rglob("*.md")),
]
ARCHITECTURE = (DOCS / "architecture.md").read_text()
DECISIONS = DOCS / "decisions"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


# What a page needs whose examples import a library; see make test-thinc and make test-peers.
NEEDED = {
    "cupy": pytest.mark.gpu,
    "thinc": pytest.mark.thinc,
    "torch": pytest.mark.torch,
    "jax": pytest.mark.jax,
}


def marks(some_examples: list[str]) -> list[pytest.MarkDecorator]:
    imports = re.findall(r"^ *import (\w+)", "\n".join(some_examples), re.MULTILINE)
    return [mark for library, mark in NEEDED.items() if library in imports]


def cases() -> Iterator[Any]:
    """Yields the examples of each page; where only a later one needs a library, also without it."""
    for page in PAGES:
        given = examples(page)
        alone = [example for example in given if not marks([example])]
        if given and alone != given and not marks(given[:1]):
            yield pytest.param(page, alone, id=f"{name_of(page)}, without libraries")
        if given:
            yield pytest.param(page, given, marks=marks(given), id=name_of(page))


# Who runs the blocks of a page in other languages, or with a file's name.
RUN_BY = {
    "CONTRIBUTING.md": "tests/project/test_contributing.py",
    "docs/containers.md": "tests/project/test_workflow.py",
    "docs/guides/own_package.md": "tests/project/test_own_package.py",
    "docs/guides/rules.md": "tests/rules/test_users_rules.py",
    "docs/guides/several_processes.md": "tests/support/guide_scripts.py",
    "docs/guides/thinc.md": "tests/interop/test_thinc.py",
}


FENCED = re.compile(r"^( *)```(.*)\n(?:.*\n)*?\1```$", re.MULTILINE)


def indented_blocks(page: Path) -> list[str]:
    """Returns what Markdown shows as code because it is indented, or takes for a part of a list."""
    text = FENCED.sub("", page.read_text())
    return [textwrap.dedent(lines) for lines in re.findall(r"(?:^ {4}.*\n)+", text, re.MULTILINE)]


def is_python(block: str) -> bool:
    try:
        return bool(ast.parse(block).body) or ">>>" in block
    except SyntaxError:
        return ">>>" in block


def links(page: Path) -> list[tuple[str, str]]:
    """Returns (file, anchor) of links within the project; either may be empty."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    return [tuple(target.partition("#")[::2]) for target in targets if "://" not in target]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def title(page: Path) -> str:
    return page.read_text().partition("\n")[0].removeprefix("# ")


@pytest.mark.parametrize(("page", "given"), list(cases()))
def test_examples_of_a_page_run_in_order(page: Path, given: list[str]) -> None:
    names: dict[str, object] = {}
    for example in given:
        exec(compile(example, page.name, "exec"), names)
    assert OUTCOMES.get(page.name, lambda names: True)(names)
    # Recorded rules keep the functions of a page, and these its variables.
    names.clear()


def test_python_on_a_page_is_in_blocks_that_are_run(subtests: pytest.Subtests) -> None:
    for page in PAGES:
        with subtests.test(name_of(page)):
            hidden = [block for block in indented_blocks(page) if is_python(block)]
            assert not hidden, "fence it as python"
            # Generated C++ is compiled by other tests.
            known = ("python", "text", *(["cpp"] if page in tables.pages() else []))
            fenced = FENCED.findall(page.read_text())
            others = {kind for indent, kind in fenced if indent or kind not in known}
            assert not others or name_of(page) in RUN_BY, f"run the blocks of {others}"


def test_every_script_of_several_processes_is_run() -> None:
    files = [ROOT / "tests" / "support" / "nccl_programs.py", *(ROOT / "tests").rglob("test_*.py")]
    text = "".join(file.read_text() for file in files)
    run = Counter(re.findall(r'= scripts_under\("(.+)"\)\n', text))
    assert run == {heading: len(texts) for heading, texts in guide_scripts.scripts().items()}


def test_the_reference_describes_every_public_name_once() -> None:
    described = [name for page in reference_pages.PAGES.values() for name in page.names]
    described += [f"gpuopt.{each.__name__}" for each in exports.optimizers()]
    assert len(described) == len(set(described))
    public = {f"gpuopt.{name}" for name in gpuopt.__all__}
    assert public <= set(described), "add them to tests/support/reference_pages.py"


def test_links_lead_to_a_file_and_a_heading(subtests: pytest.Subtests) -> None:
    for page in PAGES:
        with subtests.test(name_of(page)):
            for file, anchor in links(page):
                target = page.parent / file if file else page
                assert target.exists(), file
                assert not anchor or anchor in anchors(target), f"{file}#{anchor}"


def test_devices_on_a_page_are_written_as_gpuopt_reads_them(subtests: pytest.Subtests) -> None:
    for page in PAGES:
        with subtests.test(name_of(page)):
            for device in re.findall(r'"((?:cpu|gpu|cuda)(?::\d+)?)"', page.read_text()):
                Device.parse(device)


@pytest.mark.thinc
def test_the_config_of_the_guide_to_spacy_makes_the_optimizer_that_it_names() -> None:
    from thinc.api import Config, registry

    page = (DOCS / "guides" / "thinc.md").read_text()
    [config] = re.findall(r"^```ini\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    parsed = Config().from_str(f"[training]\n\n{config}")["training"]
    made = registry.resolve(parsed)["optimizer"]
    assert type(made).__module__.startswith("gpuopt.")
    expected = {
        "b1": 0.9,
        "b2": 0.999,
        "L2": 0.01,
        "grad_clip": 1.0,
        "eps": 1e-8,
        "learn_rate": 0.001,
    }
    for name, value in expected.items():
        found = getattr(made, name)  # Thinc 9 has schedules of the step
        assert (found(0) if callable(found) else found) == value, name
    assert made.L2_is_weight_decay is True


def names_in(section: str) -> set[str]:
    """Returns what stands in backticks in the first column of a section's tables."""
    rows = re.findall(r"^\| (.*?) \|", section, re.MULTILINE)
    return {name.rpartition(".")[2] for row in rows for name in re.findall(r"`([\w.]+)`", row)}


def test_symbols_of_tensorflow_are_there_where_the_page_says_so() -> None:
    text = (DOCS / "tensorflow_symbols.md").read_text()
    same, elsewhere, missing = map(names_in, re.split(r"^## ", text, flags=re.MULTILINE)[1:])
    assert same <= {*gpuopt.__all__, *gpuopt.contrib.__all__}
    assert (elsewhere | missing) & set(gpuopt.__all__) == {"DynamicLossScale"}
    theirs = {peer.rpartition(".")[2] for peer in entries.every_peer() if peer.startswith("tf.")}
    assert theirs <= same


@pytest.mark.torch
def test_every_optimizer_of_torch_is_on_the_page_for_those_who_come_from_it() -> None:
    import torch

    text = (DOCS / "coming_from_pytorch.md").read_text()
    table = text.partition("## Which optimizer")[2].partition("\n## ")[0]
    listed = {
        name
        for cell in re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"\w+", cell)
    }
    theirs = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    assert theirs - {"Optimizer"} <= listed


def test_the_page_for_those_who_come_from_torch_names_optimizers_that_are_there() -> None:
    named = re.findall(r"`(\w+Optimizer)[`(]", (DOCS / "coming_from_pytorch.md").read_text())
    assert named
    assert set(named) <= set(gpuopt.__all__)


def test_links_of_the_site_stay_on_the_site(subtests: pytest.Subtests) -> None:
    for page in sorted(DOCS.rglob("*.md")):
        with subtests.test(name_of(page)):
            for file, _ in links(page):
                assert (page.parent / file).resolve().is_relative_to(DOCS), file


def test_every_page_is_in_the_navigation_or_in_the_index_of_decisions() -> None:
    config = SimpleNamespace(docs_dir=str(DOCS), nav=[{"Home": "index.md"}, {"Optimizers": []}])
    optimizer_nav.on_config(config)
    written = (ROOT / "mkdocs.yml").read_text()
    assert "  - tests/support/optimizer_nav.py\n" in written
    navigation = written + str(config.nav)
    for page in DOCS.rglob("*.md"):
        listed = page.name if page.parent == DECISIONS else page.relative_to(DOCS).as_posix()
        index = (DECISIONS / "index.md").read_text() if page.parent == DECISIONS else navigation
        assert page.name == "index.md" or listed in index, listed


def test_the_index_of_decisions_gives_each_page_by_its_title() -> None:
    entries = re.findall(r"^- \[(.+)\]\((.+)\)$", (DECISIONS / "index.md").read_text(), re.M)
    pages = [page for page in DECISIONS.glob("*.md") if page.name != "index.md"]
    assert sorted(entries) == sorted((title(page), page.name) for page in pages)


def files_in_the_architecture() -> list[str]:
    picture = (DOCS / "images" / "step.svg").read_text()
    named = re.findall(r"`([\w/]+(?:/|\.py|\.cuh?|\.hpp))`", ARCHITECTURE)
    return sorted({*named, *re.findall(r"[\w/]+\.py", picture)})


def test_a_file_named_in_the_architecture_exists(subtests: pytest.Subtests) -> None:
    for path in files_in_the_architecture():
        with subtests.test(path):
            assert any(
                (folder / path).exists() for folder in (ROOT, ROOT / "gpuopt", ROOT / "kernels")
            )


def test_the_architecture_shows_the_layers_that_the_linter_checks() -> None:
    table = ARCHITECTURE.partition("| layer |")[2].partition("\n\n")[0].splitlines()[2:]
    shown = [set(re.findall(r"`(\w+)`", line.split("|")[1])) for line in table]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = next(
        contract["layers"]
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    )
    assert shown == [set(re.findall(r"gpuopt\.(\w+)", layer)) for layer in layers]


def test_tables_of_optimizers_are_those_of_the_exports(subtests: pytest.Subtests) -> None:
    for page in tables.pages():
        with subtests.test(name_of(page)):
            is_up_to_date = page.read_text() == tables.pages()[page]()
            assert is_up_to_date, (
                f"{page.name} is not what the exports say now: run {tables.COMMAND}"
            )


def test_the_sample_program_is_what_a_kernel_of_adam_is_compiled_with() -> None:
    _, _, program = tables.PROGRAM.read_text().partition("// clang-format off\n")
    rule, end, struct = program.partition("#endif\n")
    source = dense_update(gpuopt.AdamOptimizer().rule, "float32").source
    assert struct
    assert rule + end in source
    assert struct in source
