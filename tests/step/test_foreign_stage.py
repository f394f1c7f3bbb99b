"""A stage is one file and two lines that name it: here are two that gpuopt does not have.

One adds noise to gradients; the other, with a slot, puts means of gradients in their place. Each is
beside a model of it in float64 that has nothing of gpuopt.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Unpack

import fake_cupy
import gradient_noise
import numpy as np
import pytest
import smoothed_gradient
from each_device import variable_on
from every_optimizer import update_rules
from fuzzing.noise_model import ETA, GAMMA, SEED, noise
from gradient_noise import GradientNoise
from smoothed_gradient import SmoothedGradient
from stages import STAGES

import gpuopt
from gpuopt import backends
from gpuopt.__main__ import main
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.device import Device
from gpuopt.rules.stage import ORDER, Stage
from gpuopt.rules.staged import staged
from gpuopt.step.options import STAGE_OPTIONS

F = np.float32
DECAY = 0.75


def noise_of(eta: float, gamma: float, seed: int) -> dict[str, Any]:
    return {GradientNoise.name: (eta, gamma, seed)}


NOISE = noise_of(ETA, GAMMA, SEED)
SMOOTHED: dict[str, Any] = {SmoothedGradient.name: DECAY}


@pytest.fixture(autouse=True)
def _are_known(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    gradient_noise.register(monkeypatch)
    smoothed_gradient.register(monkeypatch)
    yield
    assert "cannot build" not in caplog.text


SHAPES = {"w0": (), "w1": (3,), "w2": (40,), "w3": (6, 5), "empty": (0,), "w4": (300, 7)}
TABLE, ROWS = (12, 20), np.array([4, 1, 9, 0, 7, 1])
# A step with a stage is one without it by the model's gradients. These are rules that are more than
# elementwise, or of more parts than those of tests/fuzz/test_all_stages.py, which draws both stages
# in any step: clipped or scaled, with master copies or slots of few bits, left out, and restored.
KINDS_OF_STEPS: dict[str, Callable[..., Any]] = {
    **{name: STAGES[name] for name in ("cautious", "sums", "other rule for rows", "row-wise")},
    "float64 sums": lambda **more: gpuopt.LAMBOptimizer(0.01, **more),
    "nesterov": lambda **more: gpuopt.MomentumOptimizer(0.1, 0.9, use_nesterov=True, **more),
    "ftrl": lambda **more: gpuopt.FtrlOptimizer(0.1, l1_regularization_strength=0.01, **more),
    "sums, wide norm": lambda **more: gpuopt.LARSOptimizer(0.1, clip_norm=2.0**20, **more),
    "several rates": lambda **more: gpuopt.AdamOptimizer(
        groups=[gpuopt.ParameterGroup("(w[24]|table2)(_.*)?", learning_rate=0.5)], **more
    ),
}


def drawn(seed: int, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


class Noisy:
    """Noise in numpy."""

    option = NOISE

    def gradient(self, name: str, given: np.ndarray, step: int, rows: Any = ...) -> np.ndarray:
        """Returns what the stage makes of a gradient in float64: all of it, or some rows."""
        return np.asarray(given + noise(step, given.shape, name))


class Means:
    """Means of gradients in numpy."""

    option = SMOOTHED

    def __init__(self) -> None:
        self.of: dict[str, np.ndarray] = {}

    def gradient(self, name: str, given: np.ndarray, step: int, rows: Any = ...) -> np.ndarray:
        mean = self.of.setdefault(name, np.zeros(given.shape))
        mean[rows] = DECAY * mean[rows] + (1 - DECAY) * given[rows]
        return mean / (1 - DECAY ** (step + 1))


def summed(values: np.ndarray) -> np.ndarray:
    """Returns the sum of the rows of each of `ROWS`, for all rows."""
    dense = np.zeros(TABLE)
    np.add.at(dense, ROWS, values.astype(np.float64))
    return dense


def pairs_of(xp: Any, model: Any, variables: tuple[Any, Any], seed: int, step: int) -> Any:
    """Returns (what the step with the stage is given, what the step without it is)."""
    w, v = variables
    if not w.name.startswith("table"):
        gradient = drawn(seed, w.shape, w.dtype)
        expected = model.gradient(w.name, gradient.astype(np.float64), step).astype(w.dtype)
        return (xp.asarray(gradient), w), (xp.asarray(expected), v)
    values, named = drawn(seed, (len(ROWS), TABLE[1]), w.dtype), np.unique(ROWS)
    expected = model.gradient(w.name, summed(values), step, named)[named].astype(w.dtype)
    given = gpuopt.IndexedSlices(xp.asarray(values), xp.asarray(ROWS))
    return (given, w), (gpuopt.IndexedSlices(xp.asarray(expected), xp.asarray(named)), v)


def variables_of(xp: Any, kind: str, dtype: Any, suffix: str) -> list[gpuopt.Variable]:
    shapes = {} if kind == "sparse" else dict(SHAPES)
    if kind != "dense":
        shapes |= {"table": TABLE, "table2": TABLE}
    return [
        variable_on(xp, drawn(i, shape, dtype), name=name + suffix)
        for i, (name, shape) in enumerate(shapes.items())
    ]


def check(variable: gpuopt.Variable, got: Any, expected: Any) -> None:
    a, b = (np.asarray(each.numpy()).astype(np.float64) for each in (got, expected))
    largest = np.abs(b).max(initial=0)
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * largest, err_msg=variable.name)


@pytest.mark.parametrize("stage", [Noisy, Means])
@pytest.mark.parametrize("name", KINDS_OF_STEPS)
def test_every_kind_of_step_is_that_of_the_models_gradients(name: str, stage: Any, xp: Any) -> None:
    make, model, at = KINDS_OF_STEPS[name], stage(), [*KINDS_OF_STEPS].index(name)
    dtype = np.float64 if "float64" in name else np.float32
    kind, large = ("mixed", "dense", "sparse", "mixed")[at % 4], (10**9, 0)[at // 4 % 2]
    backend = CpuBackend(CpuLimits(small_elements=1, large_elements=large, elements_per_thread=64))
    with backends.using(Device.cpu, backend):
        mine, theirs = (variables_of(xp, kind, dtype, each) for each in ("", "_of_model"))
        ours, plain = make(**model.option), make()
        for step in range(3):
            pairs, expected = [], []
            for number, (w, v) in enumerate(zip(mine, theirs, strict=True)):
                v.assign(w.numpy())
                given, of_model = pairs_of(xp, model, (w, v), 100 * step + number, step)
                pairs.append(given)
                expected.append(of_model)
            ours.apply_gradients(pairs)
            plain.apply_gradients(expected)
            for w, v in zip(mine, theirs, strict=True):
                check(w, w, v)
                for slot in plain.get_slot_names():
                    check(w, ours.get_slot(w, slot), plain.get_slot(v, slot))
                if stage is Means:
                    own = ours.get_slot(w, "mean")
                    assert (own.shape, own.device) == (w.shape, w.device)
                    check(w, own, gpuopt.Variable(model.of[w.name]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_numbers_are_those_of_the_model_on_every_device(dtype: Any, xp: Any) -> None:
    shapes = [(5000,), (7,), (3, 4)]
    variables = [
        variable_on(xp, np.zeros(shape, dtype), name=name)
        for name, shape in zip("abc", shapes, strict=True)
    ]
    optimizer = gpuopt.GradientDescentOptimizer(1.0, **NOISE)
    for step in range(3):
        for w in variables:
            w.assign(np.zeros(w.shape, dtype))
        zeros = [(xp.asarray(np.zeros(w.shape, dtype)), w) for w in variables]
        optimizer.apply_gradients(zeros)
        for w in variables:
            expected = noise(step, w.shape, w.name[0])
            # The cosine's argument is rounded, too: near its zeros by more digits than it has.
            most = 8 * np.finfo(np.float32).eps * np.sqrt(ETA)
            np.testing.assert_allclose(-w.numpy(), expected, rtol=0, atol=4 * most)
            np.testing.assert_array_less(np.abs(expected), 6 * np.sqrt(ETA))


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
def test_numbers_of_devices_differ_by_the_last_digits_of_log_and_cos() -> None:
    results = []
    for xp in (np, fake_cupy):
        w = variable_on(xp, np.zeros(20_000, np.float32))
        optimizer = gpuopt.GradientDescentOptimizer(1.0, **noise_of(1.0, 0.0, SEED))
        optimizer.apply_gradients([(xp.asarray(np.zeros(20_000, np.float32)), w)])
        results.append(w.numpy())
    np.testing.assert_allclose(*results, rtol=8 * np.finfo(np.float32).eps)


def test_the_noise_is_normal_and_each_steps_own() -> None:
    w, seen = gpuopt.Variable(np.zeros(100_000, np.float32)), []
    optimizer = gpuopt.GradientDescentOptimizer(1.0, **noise_of(1.0, 1.0, 3))
    for step in range(3):
        w.assign(np.zeros(w.shape, np.float32))
        optimizer.apply_gradients([(np.zeros(w.shape, np.float32), w)])
        seen.append(w.numpy().astype(np.float64) * np.sqrt(1 + step))
    for each in seen:
        moments = [each.mean(), each.var() - 1, (each**3).mean(), (each**4).mean() - 3]
        assert np.abs(moments).max() < 0.1, moments
    assert np.abs(np.corrcoef(seen) - np.eye(3)).max() < 0.02


@pytest.mark.parametrize("view", ["transposed", "every third", "backwards"])
@pytest.mark.parametrize("make", [gpuopt.GradientDescentOptimizer, gpuopt.LAMBOptimizer])
def test_elements_are_numbered_in_the_order_of_their_indices(view: str, make: Any) -> None:
    memory = drawn(0, (900,))
    w = {
        "transposed": memory.reshape(30, 30).T,
        "every third": memory[::3],
        "backwards": memory[::-1],
    }[view]
    v, gradient = w.copy(), drawn(1, w.shape)
    make(0.5, **NOISE).apply_gradients([(gradient, w)])
    make(0.5).apply_gradients([((gradient + noise(0, w.shape, "")).astype(np.float32), v)])
    np.testing.assert_allclose(w, v, atol=1e-5)


def noise_in(w: gpuopt.Variable, optimizer: Any) -> np.ndarray:
    """Returns what a step of gradient descent by 0 takes from a variable of zeros."""
    w.assign(np.zeros(w.shape, np.float32))
    optimizer.apply_gradients([(np.zeros(w.shape, np.float32), w)])
    return w.numpy()


def test_variables_of_one_name_or_none_have_noise_of_their_own_in_the_order_of_steps() -> None:
    """The names that they have in this process do not count."""
    beside = gpuopt.Variable(0.0, name="w")
    for name in ("w", None):
        seen = []
        for _ in range(2):
            optimizer = gpuopt.GradientDescentOptimizer(1.0, **noise_of(1.0, 0.0, SEED))
            variables = [gpuopt.Variable(np.zeros(50, np.float32), name=name) for _ in range(2)]
            for w in variables:
                noise_in(w, optimizer)
            seen.append([noise_in(w, optimizer) for w in reversed(variables)])
        np.testing.assert_array_equal(seen[0], seen[1])
        assert np.abs(np.corrcoef(seen[0])[0, 1]) < 0.5
    assert beside.name == "w"


def test_an_optimizer_that_is_copied_with_its_variables_goes_on() -> None:
    _ = gpuopt.Variable(0.0, name="w").name
    w = gpuopt.Variable(np.zeros(50, np.float32), name="w")
    optimizer = gpuopt.GradientDescentOptimizer(1.0, **NOISE)
    noise_in(w, optimizer)
    v, copied = copy.deepcopy((w, optimizer))
    np.testing.assert_array_equal(noise_in(v, copied), noise_in(w, optimizer))


def test_copies_of_a_mirrored_variable_have_the_same_noise() -> None:
    strategy = gpuopt.MirroredStrategy(["cpu", "cpu"])
    w = strategy.variable(np.zeros(50, np.float32), name="w")
    optimizer = gpuopt.GradientDescentOptimizer(1.0, **NOISE)

    def step(w: gpuopt.Variable) -> None:
        optimizer.apply_gradients([(np.zeros(50, np.float32), w)])

    strategy.run(step, (w,))
    for each in w.replicas:
        np.testing.assert_allclose(-each.numpy(), noise(0, (50,), "w"), atol=1e-5)


@pytest.mark.parametrize("begins", [False, True])
def test_a_run_may_begin_or_end_to_have_noise(begins: bool) -> None:
    none: dict[str, Any] = {}
    options = (none, NOISE) if begins else (NOISE, none)
    first, then = (gpuopt.AdamOptimizer(0.01, **each) for each in options)
    w, v = (gpuopt.Variable(drawn(0, (30,)), name="w") for _ in range(2))
    first.apply_gradients([(drawn(1, (30,)), w)])
    then.load_state_dict(first.state_dict({"w": w}), {"w": v})
    then.apply_gradients([(drawn(2, (30,)), v)])
    expected = first.get_slot(w, "m").numpy()
    given = drawn(2, (30,)) + (noise(0, (30,), "w") if begins else 0)
    np.testing.assert_allclose(
        then.get_slot(v, "m").numpy(), 0.9 * expected + 0.1 * given, atol=1e-6
    )


def test_a_refused_row_does_not_count(xp: Any) -> None:
    table = variable_on(xp, drawn(0, (6, 4)))
    optimizer = gpuopt.GradientDescentOptimizer(0.1, **NOISE)
    for rows, is_refused in (([1, 2], False), ([1, 6], True)):
        before = table.numpy()
        slices = gpuopt.IndexedSlices(xp.asarray(drawn(1, (2, 4))), xp.asarray(np.array(rows)))
        with pytest.raises(IndexError) if is_refused else nullcontext():
            optimizer.apply_gradients([(slices, table)])
            table.numpy()
        assert np.array_equal(table.numpy(), before) == is_refused
    assert optimizer.state.host_scalar("noise_steps").numpy() == 1


def test_a_rule_of_a_user_gets_noise(xp: Any) -> None:
    @gpuopt.update_rule
    def own(var: Any, grad: Any, trace: Any, *, learning_rate: Any) -> None:
        trace[...] = 0.5 * trace + grad
        var -= learning_rate * trace

    class Own(gpuopt.optimizers.base.RuleOptimizer):
        rule = own

        def __init__(self, learning_rate: float, **common: Any) -> None:
            super().__init__(common, learning_rate=learning_rate)

    w, v = (variable_on(xp, drawn(0, (50,))) for _ in range(2))
    gradient = drawn(1, (50,))
    Own(0.1, **NOISE).apply_gradients([(xp.asarray(gradient), w)])
    noisy = (gradient + noise(0, (50,))).astype(np.float32)
    Own(0.1).apply_gradients([(xp.asarray(noisy), v)])
    np.testing.assert_allclose(w.numpy(), v.numpy(), atol=1e-6)


@pytest.mark.contract
def test_it_is_in_signatures_and_shown_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    class Own(gpuopt.AdamOptimizer):
        def __init__(self, **common: Unpack[gpuopt.optimizers.base.Common]) -> None:
            super().__init__(0.1, **common)

    assert inspect.signature(Own).parameters[GradientNoise.name].default is None
    for option, place in (("gradient-noise", -1), ("unscaled-noise", 0)):
        assert main(["show", "adam", "--clip-norm", f"--{option}", "(0.1, 0.5, 3)"]) == 0
        stages = [line for line in capsys.readouterr().out.splitlines() if "gradient  " in line]
        assert "add_noise" in stages[:2][place]


def test_the_command_line_and_the_help_of_optimizers_have_its_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["show", "--help"])
    shown = capsys.readouterr().out
    assert "  --gradient-noise [(0.1, 0.55, 0)]  Gets each gradient a normal number" in shown
    described = inspect.getdoc(gpuopt.optimizers.base.RuleOptimizer) or ""
    assert "    gradient_noise: Gets each gradient a normal number" in described
    assert main(["show", "adam", "--gradient-noise"]) == 0
    assert "gradient_noise=(0.1, 0.55, 0); variables" in capsys.readouterr().out


@pytest.mark.contract
def test_hooks_that_know_no_stage_refuse_it() -> None:
    class Own(gpuopt.GradientDescentOptimizer):
        def _apply_dense(self, grad: Any, var: gpuopt.Variable) -> None:
            super()._apply_dense(grad, var)

    w = gpuopt.Variable(np.ones(3, np.float32))
    optimizer = Own(0.1, **NOISE)
    with pytest.raises(NotImplementedError, match="no such stage; leave gradient_noise out"):
        optimizer.apply_gradients([(np.ones(3, np.float32), w)])


def delete(grad: Any) -> None:  # a keyword of C++
    grad *= grad.dtype.type(0.5)


@pytest.mark.parametrize("limits", ["small", "large"])
def test_two_stages_may_share_a_function(
    limits: str, xp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Halved(GradientNoise):
        name, counter, stage = "halved", "halvings", Stage("halved", delete)

        def scalars(self, steps: int) -> dict[str, Any]:
            return {}

    class HalvedAgain(Halved):
        name, stage = "halved_again", Stage("halved_again", delete)

    order = [Halved.stage.name, *ORDER["gradient"], HalvedAgain.stage.name]
    monkeypatch.setitem(ORDER, "gradient", order)
    given: dict[str, Any] = {}
    for each in (Halved, HalvedAgain):
        monkeypatch.setitem(STAGE_OPTIONS, each.name, each)
        given[each.name] = (0.0, 0.0, 0)
    large = {"small": 10**9, "large": 0}[limits]
    backend = CpuBackend(CpuLimits(small_elements=1, large_elements=large, elements_per_thread=64))
    with backends.using(Device.cpu, backend):
        w = variable_on(xp, np.ones(300, F))
        optimizer = gpuopt.GradientDescentOptimizer(1.0, **given)
        optimizer.apply_gradients([(xp.full(300, F(0.25)), w)])
        np.testing.assert_array_equal(w.numpy(), F(1 - 0.25 / 4))


def keywords(grad: Any, new: Any, *, double: Any, Real: Any) -> None:
    new += double * grad
    grad[...] = Real * new


def own_names(grad: Any, s: Any, t0: Any, *, learning_rate_: Any, _x: Any) -> None:
    s += grad * grad
    t0 += learning_rate_ * (grad + s) - learning_rate_ * grad * grad
    grad[...] = _x * t0


def other_letters(grad: Any, größe: Any, *, η: Any) -> None:
    größe += η * grad
    grad[...] = größe


@pytest.mark.parametrize(
    ("function", "slots", "scalars"),
    [
        (keywords, ("new",), {"double": 2.0, "Real": 0.25}),
        (own_names, ("s", "t0"), {"learning_rate_": 2.0, "_x": 0.25}),
        (other_letters, ("größe",), {"η": 0.5}),
    ],
)
def test_a_stage_may_give_slots_and_scalars_any_names(
    function: Any,
    slots: tuple[str, ...],
    scalars: dict[str, float],
    xp: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Halved(GradientNoise):
        name, counter, stage = "halved", "halvings", Stage("halved", function, slots)

        def scalars(self, steps: int) -> dict[str, Any]:
            return scalars

    monkeypatch.setitem(ORDER, "gradient", [*ORDER["gradient"], Halved.stage.name])
    monkeypatch.setitem(STAGE_OPTIONS, Halved.name, Halved)
    backend = CpuBackend(CpuLimits(small_elements=1, large_elements=0, elements_per_thread=64))
    with backends.using(Device.cpu, backend):
        w = variable_on(xp, np.ones(300, F))
        given: dict[str, Any] = {Halved.name: (0.0, 0.0, 0)}
        optimizer = gpuopt.GradientDescentOptimizer(1.0, **given)
        optimizer.apply_gradients([(xp.full(300, F(0.5)), w)])
        np.testing.assert_array_equal(w.numpy(), np.full(300, F(0.75)))


@pytest.mark.parametrize("name", ["no-identifier", "größer", "2nd"])
def test_names_of_stages_are_identifiers(name: str) -> None:
    with pytest.raises(ValueError, match="must be an ASCII identifier"):
        Stage(name, delete)


def count(grad: Any, step: Any) -> list[Any]:
    return [np.ones_like(grad)]


def mean_of_gradients(grad: Any, *, elements: Any) -> None:
    grad /= elements


def mean_step(var: Any, step: Any, *, elements: Any) -> None:
    var += step / elements


@pytest.mark.parametrize(
    ("stage", "base", "message"),
    [
        (Stage("bounded", mean_of_gradients, (), ("elements",), count), "adam", "without `step`"),
        (Stage("cautious", mean_step, (), ("elements",), count), "lamb", "lamb has .*: a step has"),
    ],
)
def test_sums_that_a_step_does_not_have_are_refused(stage: Stage, base: str, message: str) -> None:
    rule = next(rule for rule in update_rules() if rule.name == base)
    with pytest.raises(ValueError, match=message):
        staged(rule, stage)


def returning(grad: Any) -> Any:
    return grad * 2


def of_its_variable(grad: Any, var: Any) -> None:
    grad += var


def of_an_unknown_slot(grad: Any, mean: Any) -> None:
    grad += mean


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (returning, TypeError, "halved returns .*: a stage writes into its arrays"),
        (of_its_variable, ValueError, r"halved takes \['var'\]: neither its slots"),
        (of_an_unknown_slot, ValueError, r"halved takes \['mean'\]: neither its slots"),
    ],
)
def test_functions_that_are_no_stages_are_refused_before_a_step(
    function: Any, error: type[Exception], message: str, xp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Halved(GradientNoise):
        name, counter, stage = "halved", "halvings", Stage("halved", function)

        def scalars(self, steps: int) -> dict[str, Any]:
            return {}

    monkeypatch.setitem(ORDER, "gradient", [*ORDER["gradient"], Halved.stage.name])
    monkeypatch.setitem(STAGE_OPTIONS, Halved.name, Halved)
    w, given = variable_on(xp, np.ones(3, F)), {Halved.name: (0.0, 0.0, 0)}
    optimizer = gpuopt.GradientDescentOptimizer(1.0, **given)  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        optimizer.apply_gradients([(xp.ones(3, F), w)])
    np.testing.assert_array_equal(w.numpy(), [1, 1, 1])


@pytest.mark.contract
@pytest.mark.parametrize("to", ["torch", "bitsandbytes"])
def test_other_libraries_add_no_noise(to: str) -> None:
    pytest.importorskip("torch")
    more: Any = {"slot_bits": 8, "slot_form": "bitsandbytes"} if to == "bitsandbytes" else {}
    w = gpuopt.Variable(np.ones(3, np.float32), name="w")
    optimizer = gpuopt.TorchAdamWOptimizer(0.1, **NOISE, **more)
    optimizer.apply_gradients([(np.ones(3, np.float32), w)])
    with pytest.raises(ValueError, match="gradient_noise"):
        getattr(gpuopt, f"optimizer_to_{to}")(optimizer, [w])


@pytest.mark.parametrize("options", [(SMOOTHED, {}), ({}, SMOOTHED)], ids=["ends", "begins"])
def test_a_run_that_begins_or_ends_to_have_it_is_refused(options: Any) -> None:
    first, then = (gpuopt.AdamOptimizer(0.01, **each) for each in options)
    w, v = (gpuopt.Variable(drawn(0, (30,)), name="w") for _ in range(2))
    first.apply_gradients([(drawn(1, (30,)), w)])
    with pytest.raises(ValueError, match=r'has (a|no) slot "mean"'):
        then.load_state_dict(first.state_dict({"w": w}), {"w": v})


@pytest.mark.parametrize("options", [{}, {"catch_up": True, "slot_bits": 8}], ids=str)
def test_rows_without_a_gradient_keep_their_means(options: Any, xp: Any) -> None:
    table = variable_on(xp, drawn(0, (6, 4)))
    optimizer = gpuopt.AdamOptimizer(0.1, **SMOOTHED, **options)
    expected = np.zeros((6, 4))
    for step, row in enumerate([2, 2, 5, 3]):
        values = drawn(step, (1, 4))
        expected[row] += (1 - DECAY) * (values[0] - expected[row])
        slices = gpuopt.IndexedSlices(xp.asarray(values), xp.asarray(np.array([row])))
        optimizer.apply_gradients([(slices, table)])
    mean: Any = optimizer.get_slot(table, "mean")
    bound = 0.02 if options.get("slot_bits") else 1e-6
    np.testing.assert_allclose(mean.numpy(), expected, atol=bound)
    assert not mean.numpy()[[0, 1, 4]].any()


def test_rows_that_are_added_begin_with_means_of_0() -> None:
    table = gpuopt.Variable(drawn(0, (3, 2)), name="table")
    optimizer = gpuopt.AdamOptimizer(0.1, **SMOOTHED)
    optimizer.apply_gradients([(drawn(1, (3, 2)), table)])
    before: Any = optimizer.get_slot(table, "mean")
    kept = before.numpy()
    gpuopt.rows(table).append(np.ones((2, 2), np.float32))
    mean: Any = optimizer.get_slot(table, "mean")
    np.testing.assert_array_equal(mean.numpy(), [*kept, *np.zeros((2, 2))])


@pytest.mark.contract
def test_slots_of_a_stage_are_listed_and_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    w = gpuopt.Variable(drawn(0, (3,)))
    optimizer = gpuopt.AdamOptimizer(0.1, **SMOOTHED)
    optimizer.apply_gradients([(drawn(1, (3,)), w)])
    assert optimizer.get_slot_names() == ["m", "mean", "v"]
    assert main(["show", "adam", "--smoothed-gradient", "0.5"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["mean", "float32"] in [line[1:3] for line in lines]


@pytest.mark.contract
def test_slots_of_one_name_are_refused() -> None:
    @gpuopt.update_rule
    def own(var: Any, grad: Any, mean: Any, *, learning_rate: Any) -> None:
        mean += grad
        var -= learning_rate * mean

    class Own(gpuopt.optimizers.base.RuleOptimizer):
        rule = own

        def __init__(
            self, learning_rate: float, **common: Unpack[gpuopt.optimizers.base.Common]
        ) -> None:
            super().__init__(common, learning_rate=learning_rate)

    with pytest.raises(ValueError, match=r"smoothed and own both have slots \['mean'\]"):
        Own(0.1, **SMOOTHED)
