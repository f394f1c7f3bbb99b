"""`gpuopt show` prints a step: its stages, how arrays are stored, and C++ that computes it."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuopt
import gpuopt.optimizers
from gpuopt import __main__ as command_line
from gpuopt.rules.sources import kernel_root

ROOT = Path(gpuopt.__file__).parents[1]
F = np.float32


def shown(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert command_line.main(["show", *command.split()]) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    return output


def functor(text: str) -> str:
    """Returns the name of the last functor: that of the rule with its stages."""
    return re.findall(r"^struct (\w+) :", text, re.MULTILINE)[-1]


def table(text: str, heading: str) -> list[list[str]]:
    """Returns the cells of the rows under a heading."""
    [rows] = re.findall(rf"^// {heading}.*:\n((?://   .*\n)+)", text, re.MULTILINE)
    return [re.split(r"  +", row.removeprefix("//   ")) for row in rows.splitlines()]


def stages(text: str) -> list[str]:
    return [name for _, name, _ in table(text, "stages")]


def make(name: str, arguments: Mapping[str, Any]) -> gpuopt.Optimizer:
    """Makes an optimizer as a user does, by the arguments that the command line has as options."""
    given = dict(arguments)
    if "averages" in given:
        given["averages"] = gpuopt.ExponentialMovingAverage(given["averages"])
    return getattr(gpuopt, name)(0.1, **given)  # type: ignore[no-any-return]


def words_of(arguments: Mapping[str, Any]) -> str:
    return "".join(f" --{name.replace('_', '-')}={value}" for name, value in arguments.items())


@pytest.mark.cxx
def test_the_printed_source_has_numpys_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown("adamw --dtype bfloat16 --masters --clip --averages", capsys)
    rule = f"gpuopt::traced::{functor(text)}"
    assert functor(text).startswith("clipped_averaged_decayed_adam_")
    program = f"""{text}
using Rule = {rule};
extern "C" void run(int size, float* var, float* grad, float* slots, Rule::Scalars<float>* s) {{
  for (int i = 0; i < size; ++i) {{
    Rule::apply(var[i], Rule::gradient(grad[i], i, slots + 3 * i, *s), slots + 3 * i, *s);
    Rule::follow(var[i], slots + 3 * i, *s);
  }}
}}
"""
    library = tmp_path / "shown.so"
    command = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC"]
    command += [f"-I{kernel_root()}", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=program, text=True, check=True)

    rng = np.random.default_rng(5)
    var, grad, average, m = rng.normal(size=(4, 100)).astype(F)
    v = m * m
    step_size, beta1, beta2, epsilon, decay = map(F, (0.1, 0.9, 0.99, 1e-3, 0.01))
    weight, factor = map(F, (0.2, 0.7))
    scalars = np.array([step_size, beta1, beta2, epsilon, decay, weight, factor])
    got, slots = var.copy(), np.stack([average, m, v], axis=1)
    arrays = [ctypes.c_void_p(each.ctypes.data) for each in (got, grad, slots, scalars)]
    ctypes.CDLL(str(library)).run(100, *arrays)

    clipped = grad * factor
    decayed = var - decay * var
    m = m + (1 - beta1) * (clipped - m)
    v = v + (1 - beta2) * (clipped * clipped - v)
    new = decayed - step_size * m / (np.sqrt(v) + epsilon)
    average = average + weight * (new - average)
    np.testing.assert_array_equal(got, new)
    np.testing.assert_array_equal(slots, np.stack([average, m, v], axis=1))


# What an option of an optimizer adds to the stages.
ADDED = [
    ("Adam", {"clip_norm": 0.1}, {"clip_by_norm"}),
    ("Adam", {"clip_value": 0.1}, {"clip_by_value"}),
    ("AdaBelief", {"cautious": True}, {"agreeing, elements", "make_agreeing_step"}),
    ("Adam", {"averages": 0.5}, {"move_average"}),
    ("Adam", {"masters": "float32"}, set()),
    ("Adam", {"stochastic_rounding": 3}, set()),
]


def results(optimizer: gpuopt.Optimizer) -> list[np.ndarray]:
    """Returns what two steps of a float32 variable write."""
    variable = gpuopt.Variable(np.float32([1, 2, 3]))
    for gradient in ([1, -2, 3], [-0.1, 2, 1]):
        optimizer.apply_gradients([(np.float32(gradient), variable)])
    averages = optimizer.options.averages  # type: ignore[attr-defined]
    return [each.numpy() for each in (variable, *(averages.of([variable]) if averages else []))]


@pytest.mark.parametrize(("name", "arguments", "added"), ADDED)
def test_a_stage_is_printed_where_its_option_changes_the_result(
    name: str, arguments: Mapping[str, Any], added: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    without, more = (stages(shown(name + each, capsys)) for each in ("", words_of(arguments)))
    assert {*more} - {*without} == added
    before, after = results(make(name, {})), results(make(name, arguments))
    is_same = len(before) == len(after) and all(map(np.array_equal, before, after))
    assert is_same == (not added)


def test_stages_are_printed_in_the_order_of_their_calls(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("torchadamw --averages --cautious --clip", capsys)
    names = [
        "agreeing, elements",
        "clip_by_norm",
        "decay",
        "adam",
        "make_agreeing_step",
        "move_average",
    ]
    assert stages(text) == names
    _, _, after = text.partition(" gradient(Real")
    reading, _, after = after.partition(" terms(Real")
    calls = reading + after.partition(" apply(Real")[2]
    assert re.findall(r"(run_\w+|Rule::apply)\(", calls) == [
        *("run_clipped", "run_decayed", "Rule::apply", "run_cautious", "run_averaged")
    ]


@pytest.mark.parametrize(
    ("name", "dtype", "arguments"),
    [
        ("Adam", "float32", {}),
        ("Adam", "float64", {"clip_value": 1.0, "averages": 0.5}),
        ("TorchAdamW", "bfloat16", {"masters": "float32", "averages": 0.5, "clip_norm": 1.0}),
        ("Adam", "bfloat16", {"stochastic_rounding": 1, "averages": 0.5}),
        ("Adam", "float32", {"stochastic_rounding": 1}),
        ("Adam", "float32", {"stochastic_rounding": 1, "slot_dtype": "bfloat16"}),
        ("Momentum", "float16", {"momentum": 0.9, "use_nesterov": True}),
    ],
)
def test_the_printed_rule_is_the_one_that_steps_run(
    name: str, dtype: str, arguments: Mapping[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer, variable = make(name, arguments), gpuopt.Variable(np.ones(3, dtype))
    optimizer.apply_gradients([(np.ones(3, dtype), variable)])
    with optimizer.report() as report:
        optimizer.apply_gradients([(np.ones(3, dtype), variable)])
    text = shown(f"{name} --dtype {dtype}{words_of(arguments)}", capsys)
    assert [each.name for each in report.launches] == [f"dense {functor(text)[:-9]}"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("adam", ["variable float32 plain", "m float32 plain", "v float32 plain"]),
        (
            "adam --dtype bfloat16 --masters",
            [
                "master float32 plain",
                "variable bfloat16 a copy of master, rounded to nearest",
                "m float32 plain",
                "v float32 plain",
            ],
        ),
        (
            "adam --dtype bfloat16 --masters remainder --slot-dtype --stochastic-rounding",
            [
                "variable bfloat16 the upper half of a float32, rounded half up",
                "master uint16 its lower half",
                "m bfloat16 rounded at random",
                "v bfloat16 rounded at random",
            ],
        ),
        (
            "adam --dtype float16 --averages",
            [
                "variable float16 rounded to nearest",
                "average float32 plain",
                "m float16 rounded to nearest",
                "v float16 rounded to nearest",
            ],
        ),
        (
            "adam --slot-bits",
            [
                "variable float32 plain",
                "m uint8 codes of each number",
                "v uint8 codes of the root of each number",
                "m_absmax float32 a scale for 256 codes",
                "v_absmax float32 a scale for 256 codes",
            ],
        ),
        (
            "rowwiseadagrad",
            ["variable float32 plain", "accumulator float32 plain, one number a row"],
        ),
    ],
)
def test_arrays_are_printed_with_their_types_and_forms(
    words: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    [gradient, *rows] = table(shown(words, capsys), "arrays")
    assert gradient[0] == "gradient"
    assert [" ".join(row) for row in rows] == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("adamm", "there is no optimizer 'adamm'; there is Adam, RAdam, Nadam"),
        ("no_module:Adam", "'no_module:Adam' cannot be imported: No module named 'no_module'"),
        ("gpuopt:Variable", "'gpuopt:Variable' is no class of optimizers with an update rule"),
        ("adam --lr 0.1", "AdamOptimizer takes no lr: it calls that learning_rate; it takes "),
        ("adam --master", "AdamOptimizer takes no master; it takes "),
        ("adam 3", "'3' is no option: options are --NAME or --NAME VALUE"),
        ("adam --masters 8", "masters must be None or one of ['float32', 'remainder'], got 8"),
        (
            "RowWiseAdagrad --slot-bits",
            "RowWiseAdagradOptimizer: slot_bits=8 cannot be had of the rule row_wise_adagrad, ",
        ),
        ("adam --dtype float64 --slot-dtype", 'slot_dtype="bfloat16": "variable" is float64, '),
        ("adam --dtype int8", "argument --dtype: invalid choice: 'int8' (choose from "),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(command_line.main(["show", *words.split()]))
    output, errors = capsys.readouterr()
    assert (ended.value.code, output) == (2, "")
    assert errors.startswith(f"gpuopt show: {message}")
    assert errors.count("\n") == 1


def test_every_optimizer_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for name in vars(gpuopt.optimizers):
        if name.endswith("Optimizer"):
            assert f"// {name}; variables of float32\n" in shown(name.upper(), capsys)


def test_an_optimizer_of_ones_own_is_shown_without_cupy(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import gpuopt\nfrom gpuopt.optimizers.base import RuleOptimizer\n\n"
        "@gpuopt.update_rule\ndef descent(var, grad, *, rate):\n    var -= rate * grad\n\n"
        "class Descent(RuleOptimizer):\n    rule = descent\n"
        "    def __init__(self, rate, **common):\n        super().__init__(common, rate=rate)\n"
    )
    program = (
        "import sys; sys.modules['cupy'] = None; import gpuopt.__main__ as m; sys.exit(m.main())"
    )
    command = [sys.executable, "-c", program, "show", "mine:Descent", "--clip"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert stages(finished.stdout) == ["clip_by_norm", "descent"]
    assert "var - (s.rate_ * grad)" in finished.stdout
