"""`clip_norm` and `clip_value`: gradients are clipped in the step, and only read."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from array_slots import array_slots
from dtypes import every_dtype
from every_optimizer import make, one_of_each_shape, optimizer_classes
from golden_cases import read_json

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable

SHAPES = [(3, 4), (), (70, 50), (0,), (5,)]
GOLDEN = [
    case
    for case in read_json("schedules_and_clipping.json")["clipping"]
    if case["function"] == "clip_by_global_norm"
]
# Those whose step is no sum of an element's own numbers, and has numbers of rows or variables.
OTHERS: dict[str, Any] = {
    "LAMB": gpuopt.LAMBOptimizer,
    "LARS": lambda **common: gpuopt.LARSOptimizer(0.1, **common),
    "RowWiseAdagrad": gpuopt.RowWiseAdagradOptimizer,
    "PartialRowWiseAdam": gpuopt.PartialRowWiseAdamOptimizer,
    "cautious": lambda **common: gpuopt.TorchAdamWOptimizer(cautious=True, **common),
}


def variables_of(dtype: Any, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Variable]:
    rng = np.random.default_rng(1)
    return [Variable(np.asarray(rng.normal(size=shape)).astype(dtype)) for shape in shapes]


def gradients_of(dtype: Any, seed: int = 2, scale: float = 3.0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.asarray(scale * rng.normal(size=shape)).astype(dtype) for shape in SHAPES]


def state_of(optimizer: gpuopt.Optimizer, variables: Sequence[Variable]) -> list[np.ndarray]:
    slots = [
        optimizer.get_slot(variable, name)
        for variable in variables
        for name in array_slots(optimizer)
    ]
    return [each.numpy() for each in [*variables, *slots] if each is not None]


def check_steps(clipping: Any, plain: Any, dtype: Any, clip: Any) -> None:
    """Three steps are those of a plain optimizer with gradients that were clipped by hand."""
    mine, theirs = variables_of(dtype), variables_of(dtype)
    for seed in range(3):
        gradients = gradients_of(dtype, seed)
        before = [gradient.tobytes() for gradient in gradients]
        clipping.apply_gradients(list(zip(gradients, mine, strict=True)))
        assert [gradient.tobytes() for gradient in gradients] == before
        plain.apply_gradients(list(zip(clip(gradients), theirs, strict=True)))
    for got, expected in zip(state_of(clipping, mine), state_of(plain, theirs), strict=True):
        np.testing.assert_array_equal(got, expected)


def by_norm(gradients: list[np.ndarray]) -> Any:
    return gpuopt.clip_by_global_norm(gradients, 2.0)[0]


def by_value(gradients: list[np.ndarray]) -> Any:
    return [gpuopt.clip_by_value(each, -0.5, 0.5) for each in gradients]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@one_of_each_shape
@pytest.mark.one_in(2)
def test_a_step_is_that_of_gradients_clipped_by_hand(
    name: str, arguments: dict[str, Any], dtype: Any
) -> None:
    clipping, plain = make(name, arguments, clip_norm=2.0), make(name, arguments)
    check_steps(clipping, plain, dtype, by_norm)
    clipping, plain = make(name, arguments, clip_value=0.5), make(name, arguments)
    check_steps(clipping, plain, dtype, by_value)


@pytest.mark.parametrize("name", ["Adam", *OTHERS])
def test_every_form_clips(every_form_one_by_one: str, name: str) -> None:
    cls = OTHERS.get(name, gpuopt.AdamOptimizer)
    check_steps(cls(clip_norm=2.0), cls(), np.float32, by_norm)
    check_steps(cls(clip_value=0.5), cls(), np.float32, by_value)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
def test_gradients_of_16_bits_are_not_rounded_when_they_are_clipped(dtype: Any) -> None:
    w = Variable(np.zeros(3, dtype))
    gradient = np.array([3, 4, 0], dtype)
    optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_norm=1 / 3)
    optimizer.apply_gradients([(gradient, w)])
    expected = -(gradient.astype(np.float32) * (np.float32(1 / 3) * np.float32(1 / 5)))
    np.testing.assert_array_equal(w.numpy(), expected.astype(dtype))
    assert optimizer.global_norm == 5
    assert optimizer.global_norm.dtype == np.float32


@pytest.mark.parametrize("name", ["Adam", "LazyAdam", *OTHERS])
def test_repeated_rows_are_clipped_as_their_sum(every_form_one_by_one: str, name: str) -> None:
    rng = np.random.default_rng(3)
    cls = OTHERS.get(name, getattr(gpuopt, f"{name}Optimizer", None))
    rows = np.array([4, 1, 4, 7, 1, 4])
    unique = np.array([4, 1, 7])
    for options in ({"clip_norm": 1.5}, {"clip_value": 0.25}):
        tables = [Variable(np.ones((9, 6), np.float32)) for _ in range(2)]
        dense = [Variable(np.ones(5, np.float32)) for _ in range(2)]
        clipping, plain = cls(**options), cls()
        for _ in range(3):
            values = rng.normal(size=(6, 6)).astype(np.float32)
            beside = rng.normal(size=5).astype(np.float32)
            sums = np.stack(
                [sum(values[rows == row][1:], values[rows == row][0]) for row in unique]
            )
            norm = np.sqrt(
                np.float32(np.sum(np.float64(sums) ** 2) + np.sum(np.float64(beside) ** 2))
            )
            clipping.apply_gradients([(IndexedSlices(values, rows), tables[0]), (beside, dense[0])])
            if "clip_norm" in options:
                np.testing.assert_allclose(clipping.global_norm, norm, rtol=1e-6)
                clipped, _ = gpuopt.clip_by_global_norm([sums, beside], 1.5)
            else:
                clipped = [gpuopt.clip_by_value(each, -0.25, 0.25) for each in (sums, beside)]
            plain.apply_gradients(
                [(IndexedSlices(clipped[0], unique), tables[1]), (clipped[1], dense[1])]
            )
        for got, expected in zip(
            state_of(clipping, [tables[0], dense[0]]),
            state_of(plain, [tables[1], dense[1]]),
            strict=True,
        ):
            # The norm of few numbers is the same but for the last bit.
            np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['clip_norm']:g}")
def test_a_step_moves_by_tensorflows_clipped_gradients(case: dict[str, Any]) -> None:
    pairs, expected = [], []
    for given, clipped in zip(case["tensors"], case["clipped"], strict=True):
        if given is None:
            continue
        if isinstance(given, dict):
            values = np.float32(given["values"])
            # Each row by itself: TensorFlow does not add up equal ones before the norm.
            height = max(given["shape"][0], len(values))
            table = Variable(np.zeros((height, *values.shape[1:]), np.float32))
            pairs.append((IndexedSlices(values, np.arange(len(values))), table))
            moved = np.zeros(table.shape, np.float32)
            moved[: len(values)] = np.float32(clipped["values"])
            expected.append(moved)
        else:
            gradient = np.float32(given)
            pairs.append((gradient, Variable(np.zeros(gradient.shape, np.float32))))
            expected.append(np.float32(clipped))
    optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_norm=case["clip_norm"])
    optimizer.apply_gradients(pairs)
    np.testing.assert_allclose(optimizer.global_norm, np.float32(case["norm"]), rtol=5e-7)
    for (_, variable), each in zip(pairs, expected, strict=True):
        np.testing.assert_allclose(-variable.numpy(), each, rtol=5e-7)


def test_forms_of_the_factor_are_those_of_the_libraries() -> None:
    def factor(form: str, gradient: list[float], most: float) -> Any:
        w = Variable(np.zeros(2, np.float64))
        optimizer = gpuopt.GradientDescentOptimizer(
            np.float64(1), clip_norm=np.float64(most), clip_form=form
        )
        optimizer.apply_gradients([(np.float64(gradient), w)])
        return -w.numpy() / np.float64(gradient)

    np.testing.assert_allclose(factor("tensorflow", [3, 4], 2), 2 / 5, rtol=1e-15)
    np.testing.assert_allclose(factor("torch", [3, 4], 2), 2 / (5 + 1e-6), rtol=1e-15)
    np.testing.assert_allclose(factor("apex", [3, 4], 2), 1 / (5 / 2), rtol=1e-15)
    for form in ("tensorflow", "torch", "apex"):
        assert (factor(form, [3, 4], 8) == 1).all(), form
    assert (factor("torch", [3, 4], 5) < 1).all()
    with np.errstate(invalid="ignore"):
        assert np.isnan(factor("tensorflow", [np.inf, 4], 2)).all()
        np.testing.assert_array_equal(factor("torch", [np.inf, 4], 2), [np.nan, 0])
        np.testing.assert_array_equal(factor("apex", [np.inf, 4], 2), [np.nan, 0])
        assert np.isnan(factor("torch", [np.nan, 4], 2)).all()


@pytest.mark.torch
@pytest.mark.parametrize("most", [0.1, 2.0, 1e6])
def test_torchs_form_is_torchs(most: float) -> None:
    import torch

    gradients = gradients_of(np.float32)
    mine = variables_of(np.float32)
    theirs = [torch.nn.Parameter(torch.tensor(each.numpy())) for each in mine]
    optimizer = gpuopt.GradientDescentOptimizer(0.5, clip_norm=most, clip_form="torch")
    optimizer.apply_gradients(list(zip(gradients, mine, strict=True)))
    for parameter, gradient in zip(theirs, gradients, strict=True):
        parameter.grad = torch.tensor(gradient.copy())
    norm = torch.nn.utils.clip_grad_norm_(theirs, most)
    torch.optim.SGD(theirs, 0.5).step()
    np.testing.assert_allclose(optimizer.global_norm, norm.item(), rtol=1e-6)
    for got, expected in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(got.numpy(), expected.detach().numpy(), rtol=2e-6, atol=1e-7)


def test_a_group_is_clipped_to_the_norm_of_its_own_gradients() -> None:
    names = ("kernel", "bias", "free", "bound", "other")
    variables = [Variable(np.zeros(2, np.float32), name=name) for name in names]
    optimizer = gpuopt.GradientDescentOptimizer(
        1.0,
        clip_norm=1.0,
        groups=[
            ParameterGroup("bias", clip_norm=0.5),
            ParameterGroup("free", clip_norm=None),
            ParameterGroup("bound", clip_value=0.25),
            ParameterGroup("other", learning_rate=2.0),
        ],
    )
    optimizer.apply_gradients([(np.float32([3, 4]), v) for v in variables])
    kernel, bias, free, bound, other = (-v.numpy() for v in variables)
    norm = np.float32(math.sqrt(50))
    assert optimizer.global_norm == norm
    assert optimizer.group_norms == {"bias": 5.0}
    np.testing.assert_allclose(kernel, np.float32([3, 4]) / norm, rtol=3e-7)
    np.testing.assert_allclose(other, 2 * kernel, rtol=3e-7)
    np.testing.assert_allclose(bias, [0.3, 0.4], rtol=3e-7)
    assert free.tolist() == [3, 4]
    assert bound.tolist() == [0.25, 0.25]


def test_variables_of_all_types_have_one_norm() -> None:
    narrow, wide = Variable(np.zeros(2, np.float32)), Variable(np.zeros(1, np.float64))
    optimizer = gpuopt.GradientDescentOptimizer(np.float64(1), clip_norm=np.float64(1.3))
    optimizer.apply_gradients([(np.float32([3, 4]), narrow), (np.float64([12]), wide)])
    assert optimizer.global_norm == 13
    assert optimizer.global_norm.dtype == np.float64
    np.testing.assert_allclose(wide.numpy(), [-1.2], rtol=1e-15)
    np.testing.assert_allclose(narrow.numpy(), [-0.3, -0.4], rtol=3e-7)


def test_limits_are_hyperparameters() -> None:
    limits = iter([2.0, 0.5])
    w = Variable(np.zeros(2, np.float32), name="w")
    optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_norm=lambda: next(limits))
    for length in (2.0, 0.5):
        w.assign(np.zeros(2))
        optimizer.apply_gradients([(np.float32([3, 4]), w)])
        np.testing.assert_allclose(np.linalg.norm(w), length, rtol=3e-7)
    optimizer.hyperparameters["clip_norm"] = 1.5
    w.assign(np.zeros(2))
    optimizer.apply_gradients([(np.float32([3, 4]), w)])
    np.testing.assert_allclose(np.linalg.norm(w), 1.5, rtol=3e-7)
    optimizer.hyperparameters["clip_norm"] = lambda: -1.0
    with pytest.raises(ValueError, match="clip_norm must be a number from 0, or None, got"):
        optimizer.apply_gradients([(np.float32([3, 4]), w)])
    np.testing.assert_allclose(np.linalg.norm(w), 1.5, rtol=3e-7)


def test_an_infinite_limit_measures_and_clips_nothing() -> None:
    w = Variable(np.zeros(2, np.float32))
    optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_norm=math.inf)
    assert optimizer.global_norm is None
    optimizer.apply_gradients([(np.float32([3, 4]), w)])
    assert w.numpy().tolist() == [-3, -4]
    assert optimizer.global_norm == 5
    optimizer.apply_gradients([(np.float32([np.inf, 4]), w)])
    assert w.numpy().tolist() == [-np.inf, -8]
    assert gpuopt.GradientDescentOptimizer(1.0).global_norm is None
    assert gpuopt.GradientDescentOptimizer(1.0).group_norms == {}


def test_a_gradient_that_is_the_variable_is_read_before_it_is_written() -> None:
    v, w = Variable(np.float32([3, 0])), Variable(np.float32([0, 4]))
    optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_norm=2.5)
    optimizer.apply_gradients([(v.storage, v), (v.storage, w)])
    np.testing.assert_allclose(v, [3 - 3 * 2.5 / np.sqrt(18), 0], rtol=3e-7)
    np.testing.assert_allclose(w, [-3 * 2.5 / np.sqrt(18), 4], rtol=3e-7)


def test_views_that_are_not_contiguous_are_clipped() -> None:
    gradient = np.broadcast_to(np.float32(2), (3, 3))
    w = Variable(np.zeros((3, 3), np.float32))
    optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_norm=3.0)
    optimizer.apply_gradients([(gradient, w)])
    assert optimizer.global_norm == 6
    np.testing.assert_allclose(w, -np.ones((3, 3)), rtol=3e-7)


def test_gate_none_gives_way_to_a_norm_of_all_gradients() -> None:
    v, w = Variable(np.float32([3.0])), Variable(np.float32([4.0]))
    optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_norm=1.0)
    with pytest.warns(UserWarning, match="GATE_NONE gives way to GATE_OP: clip_norm"):
        optimizer.minimize(lambda: (v * v + w * w) / 2, gate_gradients=gpuopt.Optimizer.GATE_NONE)
    np.testing.assert_allclose([v.numpy()[0], w.numpy()[0]], [2.4, 3.2], rtol=3e-7)


def test_a_group_may_say_that_nothing_is_clipped_where_nothing_is() -> None:
    w = Variable(np.zeros(2, np.float32), name="w")
    group = ParameterGroup("w", clip_norm=None)
    optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_norm=None, groups=[group])
    optimizer.apply_gradients([(np.float32([3, 4]), w)])
    assert w.numpy().tolist() == [-3, -4]
    assert (optimizer.global_norm, optimizer.group_norms) == (None, {})
    optimizer.groups[0]["clip_norm"] = 1.0
    optimizer.apply_gradients([(np.float32([3, 4]), w)])
    np.testing.assert_allclose(w, [-3.6, -4.8], rtol=3e-7)


@pytest.mark.parametrize("group", [[], [ParameterGroup("v", clip_value=None)]])
def test_gate_none_applies_gradients_one_by_one_where_only_elements_are_clipped(
    group: list[ParameterGroup],
) -> None:
    v, w = Variable(np.float32([3.0]), name="v"), Variable(np.float32([4.0]))
    optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_value=1.0, groups=group)
    optimizer.minimize(lambda: (v * v + w * w) / 2, gate_gradients=gpuopt.Optimizer.GATE_NONE)
    assert [v.numpy()[0], w.numpy()[0]] == [0 if group else 2, 3]


def test_gate_none_gives_way_to_the_norm_of_a_group() -> None:
    v, w = Variable(np.float32([3.0]), name="v"), Variable(np.float32([4.0]))
    group = ParameterGroup("v", clip_norm=0.5)
    optimizer = gpuopt.GradientDescentOptimizer(1.0, groups=[group])
    with pytest.warns(UserWarning, match="GATE_NONE gives way to GATE_OP: clip_norm"):
        optimizer.minimize(lambda: (v * v + w * w) / 2, gate_gradients=gpuopt.Optimizer.GATE_NONE)
    assert [v.numpy()[0], w.numpy()[0]] == [2.5, 0]


def test_what_a_step_was_clipped_to_is_in_the_optimizers_state() -> None:
    w = Variable(np.zeros(2, np.float32), name="w")
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.9, clip_norm=1.5, clip_form="torch")
    optimizer.apply_gradients([(np.float32([3, 4]), w)])
    hyperparameters = optimizer.state_dict()["hyperparameters"]
    assert hyperparameters["clip_norm"] == 1.5
    assert hyperparameters["clip_form"] == "torch"
    again = gpuopt.MomentumOptimizer(1.0, 0.9)
    again.load_state_dict(optimizer.state_dict())


@pytest.mark.contract
def test_a_saved_state_is_strict_json_whatever_is_clipped(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    w = Variable(np.zeros(2, np.float32), name="w")
    options: list[dict[str, Any]] = [
        {"clip_norm": 1.5},
        {"clip_value": 1.5},
        {"clip_norm": math.inf},
        {"groups": [ParameterGroup("w", clip_norm=None, learning_rate=0.5)]},
    ]
    for number, more in enumerate(options):
        optimizer = gpuopt.MomentumOptimizer(1.0, 0.9, **more)
        optimizer.apply_gradients([(np.float32([3, 4]), w)])
        assert optimizer.state_dict()["hyperparameters"]["clip_value"] == more.get("clip_value")
        path = gpuopt.Saver({"w": w}, optimizers=[optimizer]).save(tmp_path / str(number))
        header = Path(path).read_bytes()
        header = header[8 : 8 + int.from_bytes(header[:8], "little")]
        metadata = json.loads(header, parse_constant=refuse)["__metadata__"]
        json.loads(metadata["description"], parse_constant=refuse)
        gpuopt.Saver({"w": w}, optimizers=[optimizer]).restore(path)


@pytest.mark.contract
@pytest.mark.parametrize("name", ["clip_norm", "clip_value"])
@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_limits_that_are_none_are_refused_by_name(name: str, bad: float) -> None:
    refused = pytest.raises(ValueError, match=f"{name} must be a number from 0, or None, got")
    with refused:
        gpuopt.AdamOptimizer(0.1, **{name: bad})
    with pytest.raises(ValueError, match=f'group "bias": {name} must be a number from 0'):
        gpuopt.AdamOptimizer(0.1, groups=[ParameterGroup("bias", **{name: bad})])
    optimizer = gpuopt.AdamOptimizer(0.1, **{name: 1.0})
    with pytest.raises(ValueError, match=f"{name} must be a number from 0, or None, got"):
        optimizer.hyperparameters[name] = bad
    with pytest.raises(TypeError, match=f"{name} must be a number"):
        gpuopt.AdamOptimizer(0.1, **{name: "much"})


@pytest.mark.contract
def test_options_that_contradict_each_other_are_refused_by_name() -> None:
    both = "clip_norm=1.0 and clip_value=2.0 cannot both clip: give one of them"
    with pytest.raises(ValueError, match=both):
        gpuopt.AdamOptimizer(0.1, clip_norm=1.0, clip_value=2.0)
    group = ParameterGroup("bias", clip_norm=1.0, clip_value=2.0)
    with pytest.raises(ValueError, match=f'group "bias": {both}'):
        gpuopt.AdamOptimizer(0.1, groups=[group])
    with pytest.raises(ValueError, match=r"clip_form must be one of \['tensorflow', 'torch', 'ap"):
        gpuopt.AdamOptimizer(0.1, clip_norm=1.0, clip_form="keras")
    with pytest.raises(
        ValueError, match='clip_form="torch" is a formula for clip_norm, which is n'
    ):
        gpuopt.AdamOptimizer(0.1, clip_value=1.0, clip_form="torch")
    group = ParameterGroup("bias", clip_form="torch")
    with pytest.raises(TypeError, match='group "bias" has clip_form, which all variables share'):
        gpuopt.AdamOptimizer(0.1, clip_norm=1.0, groups=[group])
    whole = Variable(np.zeros(2, np.int32), name="whole")
    with pytest.raises(ValueError, match='Invalid type int32 for "whole"'):
        gpuopt.AdamOptimizer(0.1, clip_norm=1.0).apply_gradients([(np.ones(2, np.int32), whole)])


@pytest.mark.contract
def test_hooks_that_update_one_variable_are_not_clipped_in_silence() -> None:
    class Own(gpuopt.GradientDescentOptimizer):
        def _apply_dense(self, grad: Any, var: Variable) -> Any:
            var.assign_sub(grad)

    w = Variable(np.zeros(2, np.float32))
    with pytest.raises(NotImplementedError, match=r"Own overrides a hook .* clip by hand"):
        Own(0.1, clip_norm=1.0).apply_gradients([(np.float32([3, 4]), w)])
    assert w.numpy().tolist() == [0, 0]


@every_dtype
def test_a_variable_without_gradient_elements_has_a_norm_of_zero(dtype: Any) -> None:
    optimizer = gpuopt.AdamOptimizer(0.1, clip_norm=1.0)
    optimizer.apply_gradients([(np.zeros((0, 2), dtype), Variable(np.zeros((0, 2), dtype)))])
    assert optimizer.global_norm == 0


@pytest.mark.contract
def test_every_optimizer_takes_the_options() -> None:
    for name, cls in optimizer_classes().items():
        parameters = inspect.signature(cls).parameters
        defaults = [parameters[f"clip_{each}"].default for each in ("norm", "value", "form")]
        assert defaults == [None, None, "tensorflow"], name


@pytest.mark.contract
@pytest.mark.parametrize(("bad", "shown"), [(-1, "-1"), (-0.5, "-0.5"), (np.nan, "nan")])
def test_a_limit_below_0_is_shown_as_a_plain_number(bad: float, shown: str) -> None:
    for given in (bad, lambda: bad):
        with pytest.raises(ValueError, match=f"clip_norm must be .*, got {shown}$"):
            gpuopt.AdamOptimizer(clip_norm=given).apply_gradients(
                [(np.ones(2, np.float32), Variable(np.ones(2, np.float32)))]
            )
