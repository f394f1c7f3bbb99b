"""gpuopt computes what real TensorFlow computed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from golden_cases import (
    GOLDEN,
    GoldenCase,
    check,
    error,
    kind_of_case,
    optimizer_cases,
    read_json,
)

import gpuopt

TOLERANCE = {"float64": 1e-12, "float32": 3e-6, "float16": 4e-3}
# TensorFlow rounds each operation to float16, these accumulate it: compared with the textbook.
COARSE_IN_FLOAT16 = {"Adam", "Adadelta", "Ftrl"}
CASES = optimizer_cases()
EXACT_CASES = [
    case
    for case in CASES
    if not (case["dtype"] == "float16" and case["optimizer"] in COARSE_IN_FLOAT16)
]
CONSTANT_RATE_CASES = [case for case in CASES if "lr_schedule" not in case]


@pytest.mark.usefixtures("every_cpu_form")
@pytest.mark.parametrize("case", EXACT_CASES, ids=lambda case: case["id"])
@pytest.mark.one_in(16, case=kind_of_case)
def test_optimizer_steps_like_tensorflow(case: dict[str, Any]) -> None:
    golden = GoldenCase(case)
    for key, rows in golden.replay().items():
        check(
            "index", f"{case['id']}/{key}", rows, golden.arrays[key][1:], TOLERANCE[case["dtype"]]
        )


@pytest.mark.parametrize("case", CONSTANT_RATE_CASES, ids=lambda case: case["id"])
@pytest.mark.one_in(6, case=kind_of_case)
def test_optimizer_steps_like_the_textbook(case: dict[str, Any]) -> None:
    golden = GoldenCase(case)
    # beta1_power is a product of float32 numbers; the textbook's is a power.
    tolerance = {"float64": 1e-5, "float32": 1e-5, "float16": 4e-3}[case["dtype"]]
    rows = golden.replay()
    for key, expected in golden.hand_computed().items():
        got = rows["var" if key == "var" else f"slot/{key}"][-1]
        assert error(got, expected) <= tolerance, key


@pytest.mark.contract
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
@pytest.mark.one_in(6, case=kind_of_case)
def test_slot_variables_are_named_like_tensorflows(case: dict[str, Any]) -> None:
    golden = GoldenCase(case)
    step = gpuopt.Variable(0, name="global_step", dtype=np.int64)
    w = gpuopt.Variable(golden.arrays["var"][0], name="w")
    schedule = [0.1]
    optimizer = golden.make_optimizer(step, schedule)
    optimizer.apply_gradients([(golden.gradient(0), w)], global_step=step)
    slot_names = case["slot_names"]
    assert optimizer.get_slot_names() == sorted(slot_names)
    assert {n: optimizer.get_slot(w, n).name for n in slot_names} == case["slot_var_names"]
    assert [v.name for v in optimizer.variables()] == case["variables"]


def multi_variable_optimizer(name: str) -> gpuopt.Optimizer:
    return {
        "Adam": lambda: gpuopt.AdamOptimizer(0.05, 0.8, 0.9, 1e-4),
        "Momentum": lambda: gpuopt.MomentumOptimizer(0.1, 0.9),
        "RMSProp": lambda: gpuopt.RMSPropOptimizer(0.05, momentum=0.5),
        "Ftrl": lambda: gpuopt.FtrlOptimizer(0.3, l1_regularization_strength=0.05),
        "Adagrad": lambda: gpuopt.AdagradOptimizer(0.3),
    }[name]()


@pytest.mark.usefixtures("every_cpu_form")
@pytest.mark.parametrize(
    "case",
    [c for c in read_json("multi_variable.json")["cases"] if c["split"] == "public"],
    ids=lambda case: case["id"],
)
def test_several_variables_step_together_like_tensorflow(case: dict[str, Any]) -> None:
    name = case["id"]
    arrays = np.load(GOLDEN / "multi_variable.npz")
    a, b, c = (gpuopt.Variable(arrays[f"{name}/{key}"][0], name=key) for key in "abc")
    global_step = gpuopt.Variable(0, name="global_step", dtype=np.int64)
    optimizer = multi_variable_optimizer(name)
    for t, (grad_a, values, indices) in enumerate(
        zip(
            arrays[f"{name}/grad_a"],
            arrays[f"{name}/grad_b_values"],
            arrays[f"{name}/grad_b_indices"],
            strict=True,
        )
    ):
        slices = gpuopt.IndexedSlices(values, indices)
        optimizer.apply_gradients([(grad_a, a), (slices, b), (None, c)], global_step=global_step)
        state = {"a": a, "b": b, "c": c, "global_step": global_step}
        own = {f"state/{v.name.replace('/', '.')}": v for v in optimizer.variables()}
        for key, variable in {**state, **own}.items():
            expected = arrays[f"{name}/{key}"][t + 1]
            key = f"{name}/{key}"
            check("multi_variable", key, variable.numpy(), expected, TOLERANCE["float32"])
    assert [v.name for v in optimizer.variables()] == case["variables"]


def test_bfloat16_cases_follow_the_float32_ones() -> None:
    """Compares with the textbook on rounded input: the golden files have no bfloat16."""
    eps = float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps)
    for case in CONSTANT_RATE_CASES:
        if case["dtype"] != "float32":
            continue
        golden = GoldenCase(case)
        for key in ("var", "grads", "values"):
            if key in golden.arrays:
                rounded = golden.arrays[key].astype(ml_dtypes.bfloat16)
                golden.arrays[key] = rounded
        got = golden.replay()["var"][-1]
        expected = golden.hand_computed()["var"]
        # A rounding for each of the steps, of the weight and of its slots.
        assert error(got, expected) <= 3 * eps * case["steps"], case["id"]
