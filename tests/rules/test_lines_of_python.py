"""Each statement of a rule's C++ names its line of Python, for compilers and profilers."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvrtc import compile_together
from sass import lines_of

import gpuopt
from gpuopt.backends.cuda.kernels import dense_update
from gpuopt.optimizers.adam import adam
from gpuopt.rules.clipped import bounded, clip_by_value
from gpuopt.rules.sources import kernel_root
from gpuopt.rules.update_rule import UpdateRule

ROOT = Path(gpuopt.__file__).parents[1]
HERE = "tests/rules/test_lines_of_python.py"


@gpuopt.update_rule
def in_several_lines(var: Any, grad: Any, copy: Any, *, rate: Any, bound: Any) -> None:
    step = np.sqrt(np.abs(grad))
    if rate > bound:
        step = step * rate

    copy[...] = grad
    var -= step


def line_of(function: Any, text: str) -> int:
    """Returns the line of a function that has a text."""
    lines, first = inspect.getsourcelines(function)
    [found] = [place for place, line in enumerate(lines, first) if text in line]
    return found


def statements(rule: UpdateRule) -> list[tuple[str, int, str]]:
    """Returns each statement of a rule that is alone, with the file and line that it names."""
    _, _, body = rule.own_functor.definition.partition(" apply(")
    found = re.findall(r'^#line (\d+) "(.*)"\n +(.*);$', body, re.MULTILINE)
    assert len(found) == len(re.findall(r";$", body.partition("\n  }\n")[0], re.MULTILINE))
    return [(file, int(line), statement) for line, file, statement in found]


def test_each_statement_names_its_line() -> None:
    by_text = {statement: line for _, line, statement in statements(in_several_lines)}
    [root] = [each for each in by_text if "numpy::sqrt" in each]
    assert by_text[root] == line_of(in_several_lines.apply, "np.sqrt")
    [copied] = [each for each in by_text if each.endswith("= grad")]
    assert by_text[copied] == by_text["slot[0] = new_1"]
    assert by_text[copied] == line_of(in_several_lines.apply, "copy[...]")
    assert by_text["var = new_0"] == line_of(in_several_lines.apply, "var -=")
    assert {file for file, _, _ in statements(in_several_lines)} == {HERE}


def test_a_stage_names_the_lines_of_its_own_file() -> None:
    line = line_of(clip_by_value, "np.clip")
    assert f'#line {line} "gpuopt/rules/clipped.py"\n' in bounded(adam).cpp


@pytest.mark.parametrize("where", ["", "elsewhere"])
def test_the_text_does_not_depend_on_where_gpuopt_is(where: str, tmp_path: Path) -> None:
    root = tmp_path / where
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "gpuopt", root / "gpuopt", ignore=without)
    shutil.copytree(ROOT / "kernels", root / "kernels", ignore=without)
    program = "import gpuopt; print(gpuopt.__file__, gpuopt.AdamWOptimizer(0.1, 0.1).rule.cpp)"
    printed = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    file, _, text = printed.partition(" ")
    assert Path(file).is_relative_to(root)
    assert text == f"{gpuopt.AdamWOptimizer(0.1, 0.1).rule.cpp}\n"


def compiled(text: str) -> str:
    """Returns what g++ says of a text."""
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-pedantic", "-fsyntax-only"]
    command += [f"-I{kernel_root()}", "-x", "c++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True).stderr


@pytest.mark.cxx
def test_a_compiler_names_the_line_of_python_and_no_other_file_after_the_rule() -> None:
    text = in_several_lines.cpp
    assert compiled(text) == ""
    line = line_of(in_several_lines.apply, "np.sqrt")
    assert f"{HERE}:{line}:" in compiled(text.replace("numpy::sqrt(", "numpy::no_such("))
    errors = compiled(f"{text}\nint behind = unknown;\n")
    assert "unknown" in errors
    assert ".py" not in errors


def rule_in(file: str, package: str) -> UpdateRule:
    names: dict[str, Any] = {"np": np, "gpuopt": gpuopt, "__package__": package}
    source = "@gpuopt.update_rule\ndef root(var, grad):\n    var -= np.sqrt(np.abs(grad))\n"
    exec(compile(source, file, "exec"), names)
    return names["root"]  # type: ignore[no-any-return]


FILES = [
    ("/home/me/train.py", "", "train.py"),
    ("/lib/my/optim/root.py", "my.optim", "my/optim/root.py"),
    (r"C:\lib\my\root.py", "my", "my/root.py"),
    ("<stdin>", "", "<stdin>"),
    ('/home/me/my "größte β" 😀\n.py', "", "my _größte β_ 😀_.py"),
]


@pytest.mark.cxx
@pytest.mark.parametrize(("file", "package", "named"), FILES)
def test_a_file_is_named_from_its_package_on(file: str, package: str, named: str) -> None:
    rule = rule_in(file, package)
    assert f'#line 3 "{named}"\n' in rule.cpp
    assert compiled(rule.cpp) == ""


@pytest.mark.nvrtc
def test_profilers_see_the_lines_of_a_rule(tmp_path: Path) -> None:
    rules = [adam, *(rule_in(file, package) for file, package, _ in FILES)]
    kernels = [dense_update(rule, "float32") for rule in rules]
    code, _ = compile_together(kernels[:1], "sm_90")
    seen = {line for file, line in lines_of(bytes(code.code), tmp_path) if file == "adam.py"}
    assert seen == {line_of(adam.apply, text) for text in ("m +=", "v +=", "var -=")}
    for kernel in kernels[1:]:
        compile_together([kernel], "sm_90")
