"""A rule of a user's package runs on every device that it names a form for, and on no other."""

from __future__ import annotations

import importlib
import itertools
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulator import EmulatorLauncher, KernelError

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.backends.cpu.forms.compiled import compiled_rule
from gpuopt.backends.cpu.forms.replayed import replayed_rules
from gpuopt.optimizers.base import RuleOptimizer
from gpuopt.rules import sources

pytestmark = pytest.mark.contract

# Named like a rule of ours, in a module named like ours, and yet another formula.
RULE = """
from pathlib import Path

import gpuopt


@gpuopt.update_rule{arguments}
def momentum(var, grad, momentum, *, learning_rate, decay):
    momentum *= decay
    momentum += (1 - decay) * grad
    var -= {factor} * learning_rate * momentum


class AveragedMomentum(gpuopt.MomentumOptimizer):
    rule = momentum
"""
WITH_CUDA = '(cuda=gpuopt.CudaSource(Path(__file__).parent, "momentum.cuh", "users::Momentum"))'
HEADER = """
#pragma once
#include "constants.cuh"
#include "shared/math.cuh"

namespace users {{

struct Momentum {{
  static constexpr int num_slots = {num_slots};

  template <class Real>
  struct Scalars {{
    {scalars}
  }};

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {{
    slot[0] = s.decay * slot[0] + (Real(1) - s.decay) * grad;
    var -= Real(factor) * s.learning_rate * slot[0];
  }}
}};

}}  // namespace users
"""
SCALARS = "Real learning_rate, decay;"
WITH_SUMS = f"{WITH_CUDA[:-1]}, sums=['decay'], terms=lambda *_, **__: [])"
TERMS = "lambda var, grad, *_, **__: [grad]"
OTHER_COUNTS: list[tuple[dict[str, Any], str]] = [
    (
        {"num_slots": "1, num_row_slots = 1"},
        "slots of rows of momentum is 0 in Python, and 1 in users::Momentum .num_row_slots",
    ),
    (
        {"num_slots": "1, num_row_slots = 2"},
        "slots of rows of momentum is 0 in Python, and above 1 in users::Momentum",
    ),
    (
        {"num_slots": "1, num_sums = 2"},
        "sums of momentum is 0 in Python, and 2 in users::Momentum .num_sums",
    ),
    (
        {"cuda": WITH_SUMS},
        "sums of momentum is 1 in Python .decay., and 0 in users::Momentum .num_sums",
    ),
    (
        {"cuda": f"{WITH_CUDA[:-1]}, sums=['decay'], terms={TERMS}, degrees=[1])"},
        "the degree of decay of momentum is 1 in Python, and another in users::Momentum",
    ),
]
Package = Callable[..., ModuleType]
_names = (f"users_project_{number}" for number in itertools.count())


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """Makes a package whose module `momentum` holds a rule, and next to it maybe its header."""

    def make(
        cuda: str = WITH_CUDA, factor: int = 1, num_slots: Any = 1, scalars: str = SCALARS
    ) -> ModuleType:
        folder = tmp_path / next(_names)
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "momentum.py").write_text(RULE.format(arguments=cuda, factor=factor))
        header = HEADER.format(num_slots=num_slots, scalars=scalars)
        (folder / "momentum.cuh").write_text(header)
        (folder / "constants.cuh").write_text(f"constexpr int factor = {factor};\n")
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module(f"{folder.name}.momentum")

    return make


def values_after_steps(module: ModuleType, device: str) -> np.ndarray:
    """A dense and a sparse variable's, joined, after two steps of each."""
    optimizer = module.AveragedMomentum(0.95, 0.9)
    dense = Variable(np.ones(5, np.float32), device=device)
    table = Variable(np.ones((4, 2), np.float32), device=device)
    for step in range(1, 3):
        slices = IndexedSlices(np.full((3, 2), step, np.float32), [3, 1, 3])
        optimizer.apply_gradients([(np.arange(5, dtype=np.float32), dense), (slices, table)])
    return np.concatenate([dense.numpy(), table.numpy().ravel()])


def expected_after_steps(factor: int = 1) -> np.ndarray:
    """The same by hand: g and g average to 0.1 g and then 0.19 g, g and 2 g to 0.1 g and 0.29 g."""
    dense = 1 - factor * 0.95 * (0.1 + 0.19) * np.arange(5)
    table = np.ones((4, 2))
    table[1] -= factor * 0.95 * (0.1 + 0.29)
    table[3] -= factor * 0.95 * 2 * (0.1 + 0.29)
    return np.concatenate([dense, table.ravel()])


@pytest.mark.emulator
@pytest.mark.parametrize("cuda", [WITH_CUDA, ""], ids=["its own CUDA", "traced"])
def test_a_rule_of_ones_own_has_its_own_values_on_a_gpu(
    package: Package, emulated_gpus: list[EmulatorLauncher], cuda: str
) -> None:
    values = values_after_steps(package(cuda=cuda), "gpu:0")
    np.testing.assert_allclose(values, expected_after_steps(), atol=1e-6)


@pytest.mark.parametrize("cuda", [WITH_CUDA, ""], ids=["its own CUDA", "traced"])
def test_a_rule_of_ones_own_has_its_own_values_in_every_form_of_the_cpu(
    package: Package, every_cpu_form: str, cuda: str
) -> None:
    module = package(cuda=cuda)
    np.testing.assert_allclose(values_after_steps(module, "cpu"), expected_after_steps(), atol=1e-6)
    if every_cpu_form == "compiled":
        assert compiled_rule(module.momentum, np.dtype(np.float32))


@pytest.mark.emulator
def test_packages_that_give_their_headers_and_functors_one_name_are_kept_apart(
    package: Package, emulated_gpus: list[EmulatorLauncher], every_cpu_form: str
) -> None:
    modules = {factor: package(factor=factor) for factor in (1, 3)}
    for device in ("cpu", "gpu:0"):
        for factor, module in modules.items():
            values = values_after_steps(module, device)
            np.testing.assert_allclose(values, expected_after_steps(factor), atol=1e-6)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_slots": 2}, "not as many as the slots .* of momentum in Python"),
        (
            {"scalars": "Real decay, learning_rate, epsilon;"},
            "not as many as the scalars .* of momentum in Python",
        ),
        (
            {"scalars": "Real decay, learning_rate;"},
            "not in the order of the scalars .* of momentum in Python",
        ),
        (
            {"scalars": "Real learning_rate; int decay;"},
            "not in the order of the scalars .* of momentum in Python",
        ),
        *OTHER_COUNTS,
    ],
)
def test_a_header_with_other_slots_or_scalars_does_not_compile_for_a_gpu(
    package: Package, emulated_gpus: list[EmulatorLauncher], wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises(KernelError, match=words):
        values_after_steps(package(**wrong), "gpu:0")


@pytest.mark.cxx
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_slots": 2}, r"not as many as the slots \(momentum\) of momentum"),
        ({"scalars": "Real decay, learning_rate, epsilon;"}, "not as many as the scalars"),
        ({"scalars": "Real decay, learning_rate;"}, "not in the order of the scalars"),
        *OTHER_COUNTS,
    ],
)
def test_a_header_with_other_slots_or_scalars_leaves_the_work_to_numpy_with_a_warning(
    package: Package,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wrong: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.setenv("GPUOPT_COMPILED", "1")
    rule = package(**wrong).momentum
    with caplog.at_level(logging.WARNING, "gpuopt"):
        assert not compiled_rule(rule, np.dtype(np.float32))
    assert re.search(words, caplog.text)


@gpuopt.update_rule
def limited(var: Any, grad: Any, m: Any, *, rate: Any, decay: Any) -> None:
    m *= decay
    m += (1 - decay) * grad
    step = np.where(np.abs(m) > 1, np.sign(m), m * np.abs(m))
    if rate > 0.2:
        step = step * 0.5
    var -= rate * step


class Limited(RuleOptimizer):
    rule = limited

    def __init__(self, rate: float, **common: Any) -> None:
        super().__init__(common, rate=rate, decay=0.9)


@pytest.mark.emulator
@pytest.mark.parametrize("rate", [0.1, 0.3])
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"clip_norm": 1.0}, np.float32),
        ({"clip_value": 0.5, "masters": "float32"}, np.float16),
        ({"masters": "remainder"}, ml_dtypes.bfloat16),
        ({"slot_bits": 8}, np.float32),
        ({"stochastic_rounding": 3}, ml_dtypes.bfloat16),
        ({"slot_dtype": "bfloat16"}, np.float32),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else np.dtype(value).name,
)
def test_a_rule_without_cuda_runs_with_every_option_as_on_the_cpu(
    options: dict[str, Any], dtype: Any, rate: float, emulated_gpus: list[EmulatorLauncher]
) -> None:
    rng = np.random.default_rng(0)
    weights, table = rng.normal(size=300), rng.normal(size=(40, 6))
    gradients = rng.normal(size=(3, 300)) * 3
    values, rows = rng.normal(size=(3, 20, 6)), rng.integers(0, 40, (3, 20))
    results = []
    for device in ("cpu", "gpu:0"):
        optimizer = Limited(rate, **options)
        dense = Variable(weights.astype(dtype), device=device)
        sparse = Variable(table.astype(dtype), device=device)
        for step in range(3):
            slices = IndexedSlices(values[step].astype(dtype), rows[step])
            pairs = [(gradients[step].astype(dtype), dense), (slices, sparse)]
            optimizer.apply_gradients(pairs)
        results.append([each.numpy().astype(np.float64) for each in (dense, sparse)])
    # A norm is a sum, and each device has its own order for that.
    bound = 4 * np.finfo(np.float32).eps if "clip_norm" in options else 0.0
    for here, there in zip(*results, strict=True):
        np.testing.assert_allclose(there, here, rtol=bound, atol=bound)


@gpuopt.update_rule
def many_functions(
    var: Any,
    grad: Any,
    power: Any,
    exp: Any,
    exp2: Any,
    expm1: Any,
    log: Any,
    log10: Any,
    log1p: Any,
    log2: Any,
    tanh: Any,
    root: Any,
    same: Any,
    square: Any,
) -> None:
    magnitude = np.abs(grad)
    power[...] = magnitude**var
    exp[...], exp2[...], expm1[...] = np.exp(grad), np.exp2(grad), np.expm1(grad)
    log[...], log10[...] = np.log(magnitude), np.log10(magnitude)
    log1p[...], log2[...] = np.log1p(magnitude), np.log2(magnitude)
    tanh[...] = np.tanh(grad)
    root[...], same[...], square[...] = magnitude**0.5, magnitude**1, magnitude**2


class ManyFunctions(RuleOptimizer):
    rule = many_functions

    def __init__(self) -> None:
        super().__init__({})


def check_functions(dtype: Any, device: str) -> None:
    """Compares with functions of a wider type: 4 units in the last place, and powers to the bit."""
    wide: Any = {np.float32: np.float64, np.float64: np.longdouble}[dtype]
    rng = np.random.default_rng(0)
    exponents, given = rng.normal(size=(2, 5000)).astype(dtype)
    variable, optimizer = Variable(exponents, device=device), ManyFunctions()
    optimizer.apply_gradients([(given, variable)])
    slots = {name: optimizer.get_slot(variable, name) for name in optimizer.get_slot_names()}
    got = {name: slot.numpy() for name, slot in slots.items() if slot is not None}
    magnitude = np.abs(given)
    expected = {"root": np.sqrt(magnitude), "same": magnitude, "square": magnitude * magnitude}
    for name, values in expected.items():
        np.testing.assert_array_equal(got.pop(name), values, err_msg=name)
    for name, values in got.items():
        arguments = (magnitude if name.startswith("log") else given,)
        if name == "power":
            arguments = magnitude, exponents
        exact = getattr(np, name)(*arguments, dtype=wide)
        error = np.abs(values - exact) / np.spacing(np.abs(exact).astype(dtype))
        assert error.max() <= 4, (name, error.max())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_functions_are_exact_within_few_units_on_the_cpu(dtype: Any, every_cpu_form: str) -> None:
    check_functions(dtype, "cpu")


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_functions_are_exact_within_few_units_on_an_emulated_gpu(dtype: Any) -> None:
    check_functions(dtype, "gpu:0")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_functions_are_exact_within_few_units_on_a_gpu(dtype: Any) -> None:
    check_functions(dtype, "gpu:0")


CONSTANT_STEP = """
#include "shared/element.cuh"

struct ConstantStep {
  static constexpr int num_slots = 0;
  template <class Real>
  struct Scalars {};
  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real*, const Scalars<Real>&) {
    var -= grad;
  }
};
"""


@pytest.mark.emulator
def test_a_rule_needs_neither_slots_nor_scalars_nor_a_namespace(
    tmp_path: Path, emulated_gpus: list[EmulatorLauncher], every_cpu_form: str
) -> None:
    (tmp_path / "constant_step.cuh").write_text(CONSTANT_STEP)

    @gpuopt.update_rule(cuda=gpuopt.CudaSource(tmp_path, "constant_step.cuh", "ConstantStep"))
    def constant_step(var: Any, grad: Any) -> None:
        var -= grad

    class ConstantStep(gpuopt.GradientDescentOptimizer):
        rule = constant_step

    for device in ("cpu", "gpu:0"):
        w = Variable(np.float32([1, 2, 3]), device=device)
        ConstantStep(0.1).apply_gradients([(np.float32([1, 1, 1]), w)])
        assert w.numpy().tolist() == [0, 1, 2]


@pytest.mark.emulator
def test_a_rule_with_cuda_of_its_own_is_traced_on_a_cpu_alone(
    tmp_path: Path, emulated_gpus: list[EmulatorLauncher]
) -> None:
    (tmp_path / "constant_step.cuh").write_text(CONSTANT_STEP)

    @gpuopt.update_rule(cuda=gpuopt.CudaSource(tmp_path, "constant_step.cuh", "ConstantStep"))
    def sorts(var: Any, grad: Any) -> None:
        var[...] = np.sort(var)

    class ConstantStep(gpuopt.GradientDescentOptimizer):
        rule = sorts

    there, here = (Variable(np.float32([3, 2, 1]), device=device) for device in ("gpu:0", "cpu"))
    ConstantStep(0.1).apply_gradients([(np.float32([1, 1, 1]), there)])
    assert there.numpy().tolist() == [2, 1, 0]
    with pytest.raises(TypeError, match=r"sorts: tests/rules/test_users_rules.py:\d+: .*np\.sort"):
        ConstantStep(0.1).apply_gradients([(np.float32([1, 1, 1]), here)])
    assert here.numpy().tolist() == [3, 2, 1]


def test_a_source_that_cannot_be_found_or_told_apart_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"users::Rule .* rule.cuh, .* in {tmp_path}"):
        gpuopt.CudaSource(tmp_path, "rule.cuh", "users::Rule")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "math.cuh").touch()
    with pytest.raises(ValueError, match=r"shared/math.cuh .* gpuopt's kernels/: .* another name"):
        gpuopt.CudaSource(tmp_path, "shared/math.cuh", "users::Adam")
    with pytest.raises(TypeError, match="folder must be a Path"):
        gpuopt.CudaSource(str(tmp_path), "rules/adam.cuh", "users::Adam")
    with pytest.raises(TypeError, match=r"cuda must be a gpuopt.CudaSource, got 'adam.cuh'"):
        gpuopt.update_rule(cuda="adam.cuh")


def test_a_folder_has_another_digest_when_a_source_in_it_is_changed_renamed_or_new(
    tmp_path: Path,
) -> None:
    def digest_after(change: Callable[[], object]) -> str:
        change()
        sources.digest.cache_clear()
        return sources.digest(tmp_path)

    (tmp_path / "inner").mkdir()
    changes = [
        lambda: (tmp_path / "rule.cuh").write_text("1"),
        lambda: (tmp_path / "rule.cuh").write_text("2"),
        lambda: (tmp_path / "rule.cuh").rename(tmp_path / "other.cuh"),
        lambda: (tmp_path / "inner" / "shared.hpp").write_text("3"),
        lambda: (tmp_path / "inner" / "table.inc").write_text("4"),
        lambda: (tmp_path / "without_suffix").write_text("5"),
    ]
    assert len({digest_after(change) for change in changes}) == len(changes)
    before = sources.digest(tmp_path)
    assert digest_after(lambda: (tmp_path / "rule.py").write_text("6")) == before


@pytest.mark.emulator
def test_the_guides_rule_and_its_cuda_form_run_on_a_gpu(
    tmp_path: Path, emulated_gpus: list[EmulatorLauncher]
) -> None:
    guides = Path(__file__).parents[2] / "docs" / "guides"
    [python, *_], [header] = (
        re.findall(
            rf"^```{language}.*?\n(.*?)^```", (guides / page).read_text(), re.DOTALL | re.MULTILINE
        )
        for language, page in (("python", "rules.md"), ("cpp", "own_package.md"))
    )
    (tmp_path / "averaged_sign.cuh").write_text(header)
    names: dict[str, Any] = {}
    exec(python, names)
    plain = names["AveragedSignOptimizer"]
    source = gpuopt.CudaSource(tmp_path, "averaged_sign.cuh", "averaged_sign::AveragedSign")

    class OnAnyDevice(plain):
        rule = gpuopt.update_rule(cuda=source)(plain.rule.apply)

    here, there, traced = (
        Variable(np.ones(4, np.float32), device=where) for where in ("cpu", "gpu:0", "gpu:0")
    )
    for optimizer, w in ((plain(0.1), here), (OnAnyDevice(0.1), there), (plain(0.1), traced)):
        for gradient in ([1, -2, 0, 3], [-5, 1, 0, np.nan]):
            optimizer.apply_gradients([(np.float32(gradient), w)])
    np.testing.assert_allclose(there.numpy(), here.numpy(), rtol=1e-6)
    np.testing.assert_array_equal(traced.numpy(), here.numpy())
    names.clear()  # compiled kernels keep the rule, and so the guide's variables, alive


@pytest.mark.emulator
def test_the_guides_degree_saves_the_launch_that_it_says(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "rules.md").read_text()
    _, python, *_ = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"gpuopt": gpuopt, "np": np}
    exec(python, names)
    rule = gpuopt.update_rule(
        sums=["squares"],
        terms=names["_squares"],
        degrees=[2],
    )(names["normalized_descent"].apply)

    class NormalizedDescent(RuleOptimizer):
        def __init__(self, **common: Any) -> None:
            super().__init__(common, learning_rate=0.5)

    NormalizedDescent.rule = rule
    launcher = emulated_gpus[0]
    w = Variable(np.ones(4, np.float32), device="gpu:0")
    with launcher.device():
        gradient = launcher.xp.ones(4, np.float32)
    optimizer = NormalizedDescent(clip_norm=1.0)
    with optimizer.report() as report:
        optimizer.apply_gradients([(gradient, w)])
    np.testing.assert_allclose(w.numpy(), [0.75] * 4, rtol=1e-6)  # 0.5 in all
    assert sum(each.num_launches for each in report.launches) == 2
    names.clear()


def returns(var: Any, grad: Any, *, learning_rate: Any) -> Any:
    return var - learning_rate * grad


def gives_the_name_to_another_array(var: Any, grad: Any, *, learning_rate: Any) -> None:
    var = var - learning_rate * grad


@pytest.mark.parametrize(
    ("apply", "error", "words"),
    [
        (returns, TypeError, "into its arrays and returns nothing, got an array: write `var -= "),
        (
            gives_the_name_to_another_array,
            ValueError,
            "gives_the_name_to_another_array writes to none of its arrays",
        ),
    ],
)
def test_a_rule_that_would_train_nothing_is_refused(
    apply: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        gpuopt.update_rule(apply)


def sums(grad: Any) -> Any:
    return np.cumsum(grad)


def reduces(grad: Any) -> Any:
    return np.add.reduce(grad)


def decides(grad: Any) -> Any:
    return grad if grad > 0 else -grad


def masks(grad: Any) -> Any:
    return np.add(grad, 1, where=np.ones(1, bool))


def asks_a_method(grad: Any) -> Any:
    return grad.mean()


def has_a_norm(grad: Any) -> Any:
    return grad / np.linalg.norm(grad)


def converts(grad: Any) -> Any:
    return math.sqrt(grad)


def indexes(grad: Any) -> Any:
    return grad[grad > 0]


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (sums, r"np\.cumsum: the guide"),
        (reduces, r"np\.add\.reduce, .*: for a sum .* give update_rule `sums` and `terms`"),
        (decides, r"an `if` on an array's values: use np\.where"),
        (masks, r"np\.add with where="),
        (asks_a_method, r"array\.mean: for a sum .* give update_rule `sums` and `terms`"),
        (has_a_norm, r"np\.norm: for a sum .* give update_rule `sums` and `terms`"),
        (converts, r"a conversion to a number, .*: use np\.sqrt"),
        (indexes, r"array\[an array\]: use np\.where"),
    ],
)
def test_a_rule_that_is_no_arithmetic_on_elements_is_refused(compute: Any, words: str) -> None:
    with pytest.raises(
        TypeError, match=f"rule: tests/rules/test_users_rules.* is arithmetic .*: {words}"
    ):

        @gpuopt.update_rule
        def rule(var: Any, grad: Any, *, rate: Any) -> None:
            var -= rate * compute(grad)


def test_a_replayed_rule_has_its_own_scalars_in_the_plan_of_another() -> None:
    @gpuopt.update_rule
    def rule(var: Any, grad: Any, *, rate: Any, shift: Any) -> None:
        var -= np.maximum(rate * grad, shift) if rate < 4 else rate * grad

    real = np.dtype(np.float64)
    for rate, shift, expected in ((2, 1, -2), (3, 7, -7), (5, 7, -5), (1, 0.5, -1)):
        scalars = {"rate": np.float64(rate), "shift": np.float64(shift)}
        [form] = replayed_rules(rule, real, [scalars])
        var = np.zeros(3)
        form.apply([var], np.ones(3), [np.empty(3, dtype) for dtype in form.scratch_dtypes])
        np.testing.assert_array_equal(var, np.full(3, expected))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"sums": ["total"]}, r"sums=\('total',\) and terms=None belong together"),
        ({"terms": lambda *_, **__: []}, r"sums=\(\) and terms=.* belong together"),
        ({"sums": ["w"], "terms": lambda *_, **__: []}, r"side by side among its scalars"),
        ({"sums": ["total", "rate"], "terms": lambda *_, **__: []}, r"side by side"),
    ],
)
def test_sums_must_be_scalars_side_by_side_with_terms(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):

        @gpuopt.update_rule(**wrong)
        def summed(var: Any, grad: Any, *, rate: Any, total: Any) -> None:
            var -= rate * total * grad


def _inputs(var: Any, grad: Any, slot: Any, **_: Any) -> list[Any]:
    return [var * grad, abs(grad) ** 3]


def _of_a_slot(var: Any, grad: Any, slot: Any, **_: Any) -> list[Any]:
    return [slot * grad, abs(grad) ** 3]


def _of_a_scalar(var: Any, grad: Any, slot: Any, *, rate: Any, **_: Any) -> list[Any]:
    return [rate * grad, abs(grad) ** 3]


@pytest.mark.parametrize(
    ("terms", "degrees", "words"),
    [
        (
            _inputs,
            [1],
            r"degrees=\(1,\) must be an integer from 0 for each of its sums, \('a', 'b'\)",
        ),
        (_inputs, [1, -3], r"degrees=\(1, -3\) must be an integer from 0"),
        (_inputs, [1, 3.0], r"degrees=\(1, 3.0\) must be an integer from 0"),
        (_inputs, [True, 3], r"degrees=\(True, 3\) must be an integer from 0"),
        (_inputs, [0, 3], r"not of degree 0 in the gradient alone, as degrees=\(0, 3\) declares a"),
        (_inputs, [1, 2], r"not of degree 2 in the gradient alone, as degrees=\(1, 2\) declares b"),
        (_of_a_slot, [1, 3], r"not of degree 1 .* declares a: for twice the gradient, and other"),
        (_of_a_scalar, [1, 3], r"not of degree 1 .* declares a"),
    ],
)
def test_degrees_are_those_of_sums_over_variable_and_gradient(
    terms: Any, degrees: Any, words: str
) -> None:
    def make(**named: Any) -> Any:
        @gpuopt.update_rule(sums=["a", "b"], terms=terms, **named)
        def summed(var: Any, grad: Any, slot: Any, *, rate: Any, a: Any, b: Any) -> None:
            slot += grad
            var -= rate * (a + b) * slot

        return summed

    with pytest.raises(ValueError, match=words):
        make(degrees=degrees)
    make()
    if terms is _inputs:
        make(degrees=[1, 3])


def test_a_rule_of_ones_own_gets_sums_over_each_variable() -> None:
    def squares(var: Any, grad: Any, *, learning_rate: Any, **_: Any) -> list[Any]:
        return [grad * grad]

    @gpuopt.update_rule(sums=["squares"], terms=squares)
    def normalized_descent(var: Any, grad: Any, *, learning_rate: Any, squares: Any) -> None:
        if squares > 0:
            learning_rate = learning_rate / np.sqrt(squares)
        var -= learning_rate * grad

    class NormalizedDescent(RuleOptimizer):
        rule = normalized_descent

        def __init__(self, learning_rate: float) -> None:
            super().__init__({}, learning_rate=learning_rate)

    a, b = gpuopt.Variable(np.zeros(2)), gpuopt.Variable(np.zeros((1, 3)))
    NormalizedDescent(np.float64(5.0)).apply_gradients([([3.0, 4.0], a), (np.zeros((1, 3)), b)])
    assert a.numpy().tolist() == [-3.0, -4.0]
    assert b.numpy().tolist() == [[0.0, 0.0, 0.0]]


def test_a_rule_cannot_write_to_the_callers_gradient() -> None:
    with pytest.raises(TypeError, match=r"halves: .*: writing to the gradient"):

        @gpuopt.update_rule
        def halves(var: Any, grad: Any, *, rate: Any) -> None:
            grad *= 0.5
            var -= rate * grad


def test_squares_must_be_slots() -> None:
    with pytest.raises(ValueError, match=r"squares=\('w',\) must be of its slots, \('v',\)"):

        @gpuopt.update_rule(squares=("w",))
        def squared(var: Any, grad: Any, v: Any, *, rate: Any) -> None:
            v += grad * grad
            var -= rate * v


def test_a_rule_with_a_slot_called_average_has_moving_averages() -> None:
    @gpuopt.update_rule
    def averaged_sign(var: Any, grad: Any, average: Any, *, learning_rate: Any) -> None:
        average += grad
        var -= learning_rate * np.sign(average)

    class Own(RuleOptimizer):
        rule = averaged_sign

        def __init__(self, learning_rate: float, **common: Any) -> None:
            super().__init__(common, learning_rate=learning_rate)

    averages = gpuopt.ExponentialMovingAverage(0.5)
    w = gpuopt.Variable(np.zeros(2, np.float32))
    optimizer = Own(0.5, averages=averages)
    for _ in range(2):
        optimizer.apply_gradients([(np.ones(2, np.float32), w)])
    np.testing.assert_array_equal(w.numpy(), [-1, -1])
    average, slot = averages.average(w), optimizer.get_slot(w, "average")
    assert average is not None
    assert slot is not None
    np.testing.assert_array_equal(average.numpy(), [-0.75, -0.75])
    np.testing.assert_array_equal(slot.numpy(), [2, 2])


@gpuopt.update_rule
def with_a_slot_called_master(var: Any, grad: Any, master: Any, *, learning_rate: Any) -> None:
    master += grad
    var -= learning_rate * master


def test_a_slot_of_the_name_of_master_copies_is_refused_beside_them() -> None:
    class Own(RuleOptimizer):
        rule = with_a_slot_called_master

    Own({}, learning_rate=0.5)
    with pytest.raises(ValueError, match=r"^Own: masters=.* has a slot of this name"):
        Own({"masters": "float32"}, learning_rate=0.5)
