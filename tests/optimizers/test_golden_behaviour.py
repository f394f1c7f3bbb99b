"""gpuopt names, refuses and averages what real TensorFlow did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from golden_cases import OPTIMIZERS, check, error, read_json

import gpuopt
from gpuopt import IndexedSlices, Variable

pytestmark = pytest.mark.usefixtures("every_cpu_form")

FLOAT32_TOLERANCE = 3e-6


def numbers(values: Any) -> np.ndarray:
    """JSON's lists, where "nan" and "inf" are text."""
    return np.array(values, dtype=object).astype(np.float64)


@pytest.mark.contract
@pytest.mark.parametrize("key", read_json("structure.json"))
def test_structure_is_tensorflows(key: str) -> None:
    expected = read_json("structure.json")[key]
    optimizer_name, _, custom = key.split("|")
    kwargs = {} if custom == "name=None" else {"name": custom.removeprefix("name=")}
    step = Variable(0, name="global_step", trainable=False, dtype=np.int64)
    kernel = Variable(np.ones(3, np.float32), name="net/kernel")
    a = Variable(np.ones((2, 2), np.float32), name="a")
    c = Variable(np.ones(2, np.float32), name="c")
    optimizer = OPTIMIZERS[optimizer_name](step, **kwargs)
    assert optimizer.get_name() == expected["default_name"]
    assert optimizer.get_slot_names() == expected["slot_names_before"]
    assert optimizer.variables() == expected["variables_before"]
    assert str(optimizer.get_slot(a, "m")) == expected["get_slot_before"]

    pairs = [(np.ones(3, np.float32), kernel), (np.ones((2, 2), np.float32), a), (None, c)]
    optimizer.apply_gradients(pairs, global_step=step)

    def names() -> list[str]:
        return [f"{variable.name}:0" for variable in optimizer.variables()]

    assert optimizer.get_slot_names() == expected["slot_names"]
    assert names() == expected["variables"]
    for slot_name, by_variable in expected["slots"].items():
        for variable in (kernel, a, c):
            slot = optimizer.get_slot(variable, slot_name)
            assert (None if slot is None else slot.name) == by_variable[variable.name]
    optimizer.apply_gradients(pairs)
    assert names() == expected["variables_after_second_apply"]
    assert [v.name for v in gpuopt.trainable_variables()] == expected["trainable"]
    assert sorted(v.name for v in gpuopt.global_variables()) == sorted(expected["global_variables"])

    second = OPTIMIZERS[optimizer_name](step, **kwargs)
    second.apply_gradients(pairs)
    second_names = [f"{variable.name}:0" for variable in second.variables()]
    assert second_names == expected["second_optimizer_variables"]
    saved = sorted((v.name, list(v.shape)) for v in gpuopt.global_variables())
    assert [list(entry) for entry in saved] == expected["checkpoint_keys"]


def optimizer_edge_cases() -> dict[str, tuple[Callable[[], gpuopt.Optimizer], list[Any]]]:
    """The inputs that edge_cases.json describes in words."""
    one = np.float32(1)

    def rows(indices: list[int], values: list[float], *, flat: bool = False) -> IndexedSlices:
        column = np.array(values, np.float32)
        return IndexedSlices(column if flat else column[:, None], np.array(indices, np.int64))

    zero_one = np.float32([0, 1])
    return {
        "Ftrl(0.5) dense zero gradient": (
            lambda: gpuopt.FtrlOptimizer(0.5),
            [np.float32([0, 0, 1])] * 2,
        ),
        "Ftrl(0.5, initial_accumulator_value=0) dense zero gradient": (
            lambda: gpuopt.FtrlOptimizer(0.5, initial_accumulator_value=0.0),
            [zero_one] * 2,
        ),
        "Ftrl(0.5, initial_accumulator_value=0) sparse zero-valued row": (
            lambda: gpuopt.FtrlOptimizer(0.5, initial_accumulator_value=0.0),
            [rows([0, 2], [0, 1])] * 2,
        ),
        "Ftrl(0.5, initial_accumulator_value=0) sparse zero-valued row, 1-D": (
            lambda: gpuopt.FtrlOptimizer(0.5, initial_accumulator_value=0.0),
            [rows([0, 2], [0, 1], flat=True)] * 2,
        ),
        "Adam sparse gradient on row 1 only": (
            lambda: gpuopt.AdamOptimizer(0.1),
            [rows([1], [1])] * 3,
        ),
        "Momentum sparse row 1 only": (
            lambda: gpuopt.MomentumOptimizer(0.1, 0.9),
            [rows([1], [1])] * 3,
        ),
        "SGD sparse duplicate": (
            lambda: gpuopt.GradientDescentOptimizer(0.1),
            [rows([0, 1, 0], [1, 3, 3])],
        ),
        "Adagrad sparse duplicate": (
            lambda: gpuopt.AdagradOptimizer(0.1),
            [rows([0, 1, 0], [1, 3, 3])],
        ),
        "Adagrad dense nan gradient propagates": (
            lambda: gpuopt.AdagradOptimizer(0.1),
            [np.float32([np.nan, 1])],
        ),
        "Adam dense inf gradient": (
            lambda: gpuopt.AdamOptimizer(0.1),
            [np.float32([np.inf, 1])],
        ),
        "ProximalGD l1 soft threshold": (
            lambda: gpuopt.ProximalGradientDescentOptimizer(1.0, 0.5),
            [np.zeros(3, np.float32)] * 2,
        ),
        "AdagradDA(0.5, step0) dense zero gradient": (
            lambda: gpuopt.AdagradDAOptimizer(0.5, Variable(0, name="fixed_step")),
            [zero_one] * 2,
        ),
        "RMSProp centered with constant grad": (
            lambda: gpuopt.RMSPropOptimizer(0.1, decay=0.5, centered=True),
            [one * np.ones(2, np.float32)] * 4,
        ),
        "Adadelta zero grad": (lambda: gpuopt.AdadeltaOptimizer(1.0), [zero_one] * 2),
        "Adam(0.1) sparse, all-ones rows": (lambda: gpuopt.AdamOptimizer(0.1), []),
    }


@pytest.mark.parametrize("case", read_json("edge_cases.json"), ids=lambda case: case["case"][:60])
def test_edge_case_ends_like_tensorflows(case: dict[str, Any]) -> None:
    described = {
        name: value
        for name, value in optimizer_edge_cases().items()
        if case["case"].startswith(name)
    }
    make, gradients = described[max(described, key=len)]
    v = Variable(np.array(case["v0"], np.float32), name="v")
    optimizer = make()
    for t, expected in enumerate(case["steps"]):
        if "ids" in expected:
            ids = np.array(expected["ids"], np.int64)
            gradient: Any = IndexedSlices(np.ones((len(ids), 1), np.float32), ids)
        else:
            gradient = gradients[t]
        optimizer.apply_gradients([(gradient, v)])
        for key, values in expected.items():
            if key == "ids":
                continue
            got = v if key == "var" else optimizer.get_slot(v, key)
            golden_key = f"{case['case']}/{t}/{key}"
            check("edge_cases", golden_key, got.numpy(), numbers(values), FLOAT32_TOLERANCE)


def test_interleaved_gradients_share_one_adams_state() -> None:
    a, b = Variable([1.0, 2.0], name="a"), Variable([3.0, 4.0], name="b")
    optimizer = gpuopt.AdamOptimizer(0.1)
    pairs = {
        "op1": [([0.1, 0.1], a)],
        "op2": [([0.2, -0.2], b), ([0.01, 0.01], a)],
    }
    # In TensorFlow both train ops exist, with all their slots, before the first one runs.
    optimizer._create_slots([a, b])
    for expected in read_json("misc.json")["adam_two_apply_ops_share_state"]["steps"]:
        optimizer.apply_gradients(pairs[expected.pop("ran")])
        variables = {v.name: v.numpy() for v in [a, b, *optimizer.variables()]}
        for name, values in expected.items():
            assert error(variables[name], values) <= FLOAT32_TOLERANCE, name


def test_constraint_runs_after_the_update_and_leaves_slots_alone() -> None:
    v = Variable([-0.5, 0.5, 2.0], name="v", constraint=lambda array: np.clip(array, 0, 1))
    optimizer = gpuopt.MomentumOptimizer(0.5, 0.9)
    for expected in read_json("misc.json")["constraint_clip01_momentum"]["steps"]:
        optimizer.apply_gradients([([0.3, -0.2, 1.0], v)])
        assert error(v.numpy(), expected["v"]) <= FLOAT32_TOLERANCE
        slot = optimizer.get_slot(v, "momentum")
        assert error(slot.numpy(), expected["momentum"]) <= FLOAT32_TOLERANCE


def test_schedule_sees_the_global_step_before_it_grows() -> None:
    v = Variable([1.0, 2.0], name="v")
    step = Variable(0, name="global_step", dtype=np.int64)
    optimizer = gpuopt.GradientDescentOptimizer(lambda: 0.2 * 0.5 ** (int(step) // 2))

    @gpuopt.with_gradients
    def loss() -> tuple[Any, Any]:
        return float(np.sum(v.numpy() ** 2)), {v: 2 * v.value()}

    for expected in read_json("misc.json")["sgd_exponential_decay_staircase"]["steps"]:
        optimizer.minimize(loss, global_step=step)
        assert error(v.numpy(), expected["v"]) <= FLOAT32_TOLERANCE
        assert int(step) == expected["gs"]


@pytest.mark.contract
def test_gates_and_dtypes_are_tensorflows() -> None:
    misc = read_json("misc.json")
    gates = {name: getattr(gpuopt.Optimizer, f"GATE_{name}") for name in ("NONE", "OP", "GRAPH")}
    assert gates == misc["gate_constants"]
    optimizer = gpuopt.GradientDescentOptimizer(0.1)
    assert sorted(str(dtype) for dtype in optimizer._valid_dtypes()) == misc["valid_dtypes"]
    v = Variable([1.0, 1.0], name="v")

    @gpuopt.with_gradients
    def loss() -> tuple[Any, Any]:
        return 6.0, {v: np.float32([3, 3])}

    for gate, expected in misc["gate_values_equal"].items():
        [(gradient, _)] = optimizer.compute_gradients(loss, gate_gradients=int(gate))
        assert gradient.tolist() == expected[0]


@pytest.mark.parametrize("number", range(len(read_json("ema.json"))))
@pytest.mark.one_in(2)
def test_moving_average_follows_tensorflows(number: int) -> None:
    case = read_json("ema.json")[number]
    dtype = np.dtype(case["dtype"])
    current = np.array(case["value0"], dtype)
    w = Variable(current, name="w")
    num = Variable(0, name="num", trainable=False, dtype=np.int64)
    ema = gpuopt.ExponentialMovingAverage(
        case["decay"],
        num_updates=num if case["use_num_updates"] else None,
        zero_debias=case["zero_debias"],
    )

    def x() -> np.ndarray:
        return current

    source = x if case["tensor_input"] else w
    assert ema.average(source) is None
    assert ema.average_name(source) == case["average_name"]
    tolerance = {"float64": 1e-12, "float32": 3e-6, "float16": 4e-3}[case["dtype"]]
    for t, expected in enumerate(case["steps"]):
        if expected["num_updates"] is not None:
            num.assign(expected["num_updates"])
        # The golden shadow starts at the variable's first value, before any of the steps.
        if ema.average(source) is None and not case["tensor_input"]:
            ema.track([w])
            assert error(ema.average(w).numpy(), case["average0"]) == 0
        current = np.array(expected["value"], dtype)
        w.assign(current)
        ema.apply([source])
        names = {variable.name: variable for variable in gpuopt.global_variables()}
        for key, values in expected.items():
            if key in ("num_updates", "value"):
                continue
            got = ema.average(source) if key == "average" else names[key]
            check("ema", f"{number}/{t}/{key}", got.numpy(), values, tolerance)
    assert ema.average(source).name == case["average_var_name"]
    extra = set() if case["use_num_updates"] else {"num"}
    assert {v.name for v in gpuopt.global_variables()} - extra == set(case["all_variables"])


@pytest.mark.contract
def test_eager_mode_calls_return_none_and_refuse_a_loss_that_is_a_value() -> None:
    steps = read_json("trackable_eager.json")["steps"]
    [(expected_type, expected_message)] = [
        step["eager_tensor_loss"] for step in steps if "eager_tensor_loss" in step
    ]
    optimizer = gpuopt.AdamOptimizer(0.1)
    v = Variable([1.0, 2.0], name="v")
    with pytest.raises(RuntimeError) as raised:
        optimizer.compute_gradients(v.value() * 2)
    assert raised.type.__name__ == expected_type
    assert str(raised.value).startswith(expected_message.rstrip("."))
    step = Variable(0, name="global_step", dtype=np.int64)
    returned = optimizer.apply_gradients([([1.0, 1.0], v)], global_step=step)
    assert str(returned) == next(s["ret"] for s in steps if "ret" in s)
    assert int(step) == next(s["gs"] for s in steps if "gs" in s)


def test_training_goes_on_from_restored_state_like_tensorflows() -> None:
    """The run that trackable_eager.json restores, with the state put in by hand."""
    golden = read_json("trackable_eager.json")
    before, after = golden["steps"][0], golden["steps"][1]
    v = Variable(np.float32(before["v"]), name="v")
    optimizer = gpuopt.AdamOptimizer(0.1)
    optimizer._create_slots([v])
    own = {f"{variable.name}:0": variable for variable in optimizer.variables()}
    for name, value in golden["reference"].items():
        own[name].assign(np.float32(value))
    gradient = (np.float32(after["state"]["v/Adam_2:0"]) - 0.9 * own["v/Adam:0"].value()) / 0.1
    optimizer.apply_gradients([(gradient.astype(np.float32), v)])
    assert error(v.numpy(), after["v"]) <= FLOAT32_TOLERANCE
    for name, value in after["ref_state"].items():
        # The gradient is known only to the digits that the difference above has left.
        assert error(own[name].numpy(), value) <= 10 * FLOAT32_TOLERANCE, name
