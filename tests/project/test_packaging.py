"""Wheel, sdist and editable install contain the right files. Builds without a network."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hatchling", reason="hatchling, which builds the package, is not installed")

ROOT = Path(__file__).parents[2]
SKIPPED = shutil.ignore_patterns(
    ".[!cg]*", ".git", ".c[!i]*", "__pycache__", "dist", "site", "*.png"
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, so that nothing is built inside the checkout."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("tree") / "gpuopt", ignore=SKIPPED))


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    return build("wheel", tree)


@pytest.fixture(scope="module")
def sdist(tree: Path) -> Path:
    return build("sdist", tree)


def build(kind: str, tree: Path, out: Path | None = None, **variables: str) -> Path:
    """Calls the build backend as pip does, with its own environment variables or none."""
    out = out or tree.parent / f"{kind}-of-{tree.name}"
    out.mkdir()
    program = f"import hatchling.build as b; b.build_{kind}({str(out)!r})"
    command = [sys.executable, "-c", program]
    addresses = dict.fromkeys(("REPOSITORY_URL", "DOCUMENTATION_URL"), "")
    environment = {**os.environ, **addresses, **variables}
    subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)
    [built] = out.iterdir()
    return built


def unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as opened:
        # Python has filters since 3.11.4, and warns since 3.12 where none is named.
        named = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        opened.extractall(folder, **named)
    [unpacked] = folder.iterdir()
    return unpacked


def metadata(wheel: Path) -> Message:
    [written] = [data for name, data in contents(wheel).items() if name.endswith("/METADATA")]
    return BytesParser().parsebytes(written)


def contents(archive: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(archive) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def kernel_root_of(installed: Path, before_import: str = "") -> Path:
    """Returns the kernels' folder as seen by the gpuopt of a folder, in a new process."""
    program = (
        f"import site, sys; site.addsitedir({str(installed)!r}); "
        f"sys.path.append({sysconfig.get_path('purelib')!r}); {before_import}"
        "import gpuopt; from gpuopt.rules.sources import kernel_root; print(kernel_root())"
    )
    command = [sys.executable, "-I", "-S", "-c", program]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    return Path(finished.stdout.strip())


def test_wheel_holds_the_package_with_its_kernels_and_data_and_nothing_else(
    tree: Path, wheel: Path
) -> None:
    inside = contents(wheel)
    package = {f"gpuopt/{name}": data for name, data in files_below(tree / "gpuopt").items()}
    kernels = {
        f"gpuopt/kernels/{name}": data for name, data in files_below(tree / "kernels").items()
    }
    assert kernels
    assert {"gpuopt/py.typed", "gpuopt/demo/data/digits.npz"} <= package.keys()
    own = {name: data for name, data in inside.items() if ".dist-info/" not in name}
    assert own == {**package, **kernels}
    assert any(name.endswith("licenses/LICENSE") for name in inside)


def test_sdist_holds_what_it_lists_and_builds_the_same_wheel(
    tree: Path, wheel: Path, sdist: Path, tmp_path: Path
) -> None:
    unpacked = unpack(sdist, tmp_path)
    settings = tomllib.loads((tree / "pyproject.toml").read_text())
    listed = settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    # hatchling adds the metadata, and the file that says what git ignores.
    present = {path.name for path in unpacked.iterdir()} - {"PKG-INFO", ".gitignore"}
    assert present == {entry.removeprefix("/") for entry in listed}
    for folder in ("gpuopt", "kernels", "tests"):
        assert files_below(unpacked / folder) == files_below(tree / folder)
    assert contents(build("wheel", unpacked)) == contents(wheel)


def test_a_package_is_the_same_wherever_and_whenever_it_is_built(
    tree: Path, wheel: Path, sdist: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(tree, tmp_path / "other"))
    for path in other.rglob("*"):
        os.utime(path, (1e9, 1e9))
        path.chmod(0o700 if path.is_dir() else path.stat().st_mode & 0o700 | 0o077)
    for kind, first in (("wheel", wheel), ("sdist", sdist)):
        assert build(kind, other).read_bytes() == first.read_bytes()


def test_a_package_names_the_addresses_that_its_builder_knows(tree: Path, tmp_path: Path) -> None:
    known = {
        "REPOSITORY_URL": "https://example.org/them/gpuopt/",
        "DOCUMENTATION_URL": "http://docs.example.org",
    }
    sdist = build("sdist", tree, tmp_path / "sdist", **known)
    # What someone else builds from the sdist keeps the sdist's addresses.
    unpacked = unpack(sdist, tmp_path / "unpacked")
    wheel = build("wheel", unpacked, tmp_path / "wheel", REPOSITORY_URL="https://other.org")
    assert_links_of_the_page_lead_to(metadata(wheel), "https://example.org/them/gpuopt")
    assert metadata(wheel).get_all("Project-URL") == [
        "Documentation, http://docs.example.org",
        "Source, https://example.org/them/gpuopt",
        "Issues, https://example.org/them/gpuopt/issues",
        "Changelog, https://example.org/them/gpuopt/blob/main/CHANGELOG.md",
    ]


def assert_links_of_the_page_lead_to(written: Message, repository: str) -> None:
    assert written["Description-Content-Type"] == "text/markdown"
    page = written.get_payload()
    assert isinstance(page, str)
    targets = links(page)
    assert len(targets) > 20
    for target in targets:
        if target.startswith(f"{repository}/"):
            kind, branch, path = target.removeprefix(f"{repository}/").split("/", 2)
            file = ROOT / path.partition("#")[0]
            assert file.is_dir() if kind == "tree" else file.is_file()
            assert kind == ("raw" if file.suffix == ".svg" else "tree" if file.is_dir() else "blob")
            assert branch == "main"
        else:
            assert target.startswith("https://")


def links(page: str) -> list[str]:
    return re.findall(r"\]\(([^)]+)\)", page)


def test_a_package_whose_builder_knows_no_address_names_none(wheel: Path) -> None:
    written = metadata(wheel)
    assert written.get_all("Project-URL") is None
    page = written.get_payload()
    assert isinstance(page, str)
    assert page.startswith("# gpuopt\n")
    assert "(how closely)" in " ".join(page.split())
    assert not [target for target in links(page) if "://" not in target]


def test_the_page_of_a_package_keeps_code_and_links_of_the_web() -> None:
    hatch_build = module_of(ROOT / "hatch_build.py")
    code = "```python\nx = calls[0](argument)  # [a](b)\n```\n"
    web = "[web](https://a.org/b) and [below](#below) "
    readme = f"{web}[`text`](docs/a.md#part)\n{code}![two\nlines](p.svg) [all](bench/)"
    assert hatch_build.package_page(readme, "") == f"{web}`text`\n{code}two\nlines all"
    there = "https://me.org/it"
    assert hatch_build.package_page(readme, there) == (
        f"{web}[`text`]({there}/blob/main/docs/a.md#part)\n{code}"
        f"![two\nlines]({there}/raw/main/p.svg) [all]({there}/tree/main/bench/)"
    )


def module_of(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("url", ["them/gpuopt", "git@example.org:them/gpuopt", "https:///gpuopt"])
def test_what_is_no_address_of_a_web_page_is_refused(tree: Path, tmp_path: Path, url: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as raised:
        build("wheel", tree, tmp_path / "wheel", REPOSITORY_URL=url)
    last = raised.value.stderr.strip().splitlines()[-1]
    assert last == (
        f"ValueError: REPOSITORY_URL={url} is no address of a web page: write https://HOST/PATH, "
        "or unset REPOSITORY_URL to build a package that names none"
    )


def test_installed_wheel_finds_its_own_kernels(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path)
    assert kernel_root_of(tmp_path) == tmp_path / "gpuopt" / "kernels"


def test_editable_install_sees_the_checkouts_kernels_at_once(tree: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build("editable", tree)) as opened:
        opened.extractall(tmp_path)
    assert not list(tmp_path.rglob("*.cuh")), "a copy that would go stale"
    assert kernel_root_of(tmp_path) == tree / "kernels"


def test_package_without_kernels_says_so(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path)
    shutil.rmtree(tmp_path / "gpuopt" / "kernels")
    with pytest.raises(subprocess.CalledProcessError) as raised:
        kernel_root_of(tmp_path)
    assert "installed without its kernels/ folder" in raised.value.stderr


def test_importing_gpuopt_loads_nothing_that_only_some_users_need(
    tmp_path: Path,
) -> None:
    program = (
        "import sys, gpuopt; late = {'autograd', 'cupy', 'rich', 'matplotlib', 'torch', "
        "'tensorflow', 'safetensors', 'xxhash'}; print(sorted(late & set(sys.modules)))"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert finished.stdout == "[]\n"
    assert finished.stderr == ""
