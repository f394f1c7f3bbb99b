"""The C++ of every rule computes what its numpy form computes. Needs g++, not a GPU."""

from __future__ import annotations

import ctypes
import os
import subprocess
from importlib.resources import as_file
from typing import Any

import numpy as np
import pytest
from every_optimizer import update_rules

from gpuopt.rules.sources import kernel_root
from gpuopt.rules.update_rule import MEAN_SQUARE, UpdateRule

pytestmark = [pytest.mark.value, pytest.mark.cxx]

RULES = update_rules()
REALS = {"float": np.float32, "double": np.float64}

ENTRY = """
extern "C" void {name}_{real}(const gpuopt::Chunk<{functor}, {real}>* chunk,
                              const {functor}::Scalars<{real}>* scalars) {{
  gpuopt::update_chunk(*chunk, *scalars);
}}
"""


@pytest.fixture(scope="module")
def compiled_rules(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """All headers, as plain C++, in one library; GPUOPT_SANITIZE=undefined checks them at work."""
    source = '#include "cpu/update.hpp"\n' + "".join(rule.include for rule in RULES)
    for rule in RULES:
        for real in REALS:
            functor = rule.functor
            source += ENTRY.format(name=rule.name, real=real, functor=functor)
    library = tmp_path_factory.mktemp("rules") / "rules.so"
    sanitizer = os.environ.get("GPUOPT_SANITIZE")
    checks = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"] if sanitizer else []
    with as_file(kernel_root()) as folder:
        command = ["g++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        # numpy rounds every product; nvcc's fused multiply-adds are a GPU test's business.
        command += ["-ffp-contract=off", *checks, f"-I{folder}", "-x", "c++", "-"]
        subprocess.run([*command, "-o", str(library)], input=source, text=True, check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("power", [0.5, 0.7], ids=["root", "power"])
@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_cuda_rule_computes_what_its_numpy_form_computes(
    compiled_rules: ctypes.CDLL, rule: UpdateRule, real: str, power: float
) -> None:
    dtype = REALS[real]
    rng = np.random.default_rng(len(rule.name))
    size = 257
    var, grad = rng.normal(size=(2, size)).astype(dtype)
    slots = [rng.uniform(1, 2, size).astype(dtype) for _ in rule.slots]
    # Zeros, ties with a threshold, and what must pass through.
    grad[:4] = 0
    var[2:6] = 0
    grad[-3:] = [np.inf, -np.inf, np.nan]
    scalars = {name: dtype(rng.uniform(0.1, 0.9)) for name in rule.scalars}
    if "power" in scalars:
        scalars["power"] = dtype(power)
    # A decision is made one way with the one power, and the other way with the other.
    flags = [name for name in scalars if name.startswith("is_")]
    scalars |= dict.fromkeys(flags, dtype(power == 0.5))

    expected = [array.copy() for array in (var, *slots)]
    with np.errstate(all="ignore"):
        # Rows of one element.
        of_rows = {MEAN_SQUARE: grad * grad} if rule.row_slots else {}
        rule.apply(expected[0], grad, *expected[1:], **{**scalars, **of_rows})
    run(compiled_rules, rule, real, var, slots, grad, scalars)

    for got, want in zip((var, *slots), expected, strict=True):
        # Both sides round each operation once, pow aside; inputs are of size 1.
        tolerance = 16 * np.finfo(dtype).eps
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def run(
    library: ctypes.CDLL,
    rule: UpdateRule,
    real: str,
    var: np.ndarray,
    slots: list[np.ndarray],
    grad: np.ndarray,
    scalars: dict[str, Any],
) -> None:
    address = ctypes.c_void_p
    addresses = [array.ctypes.data for array in (var, *slots, grad)]
    chunk = np.array([*addresses, var.size, 1, 0], np.intp)
    packed = np.array([scalars[name] for name in rule.scalars], var.dtype)
    getattr(library, f"{rule.name}_{real}")(address(chunk.ctypes.data), address(packed.ctypes.data))
