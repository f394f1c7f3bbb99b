"""An update by accumulated gradients is a step by sums made by hand, and takes a launch more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from each_device import variable_on
from emulator.emulator import EmulatorLauncher
from gpu_streams import new_stream, uploaded, wait_for_gpus
from interrupt_at import HandleAt

import gpuopt
from gpuopt import (
    GradientAccumulationOptimizer,
    IndexedSlices,
    LossScaleOptimizer,
    ParameterGroup,
    Variable,
)
from gpuopt.backends import backend_for, to_device
from gpuopt.device import Device
from gpuopt.step.request import StepRequest, make_step

pytestmark = pytest.mark.value

SHAPES: dict[str, tuple[int, ...]] = {"a": (3, 4), "b": (), "c": (0,), "d": (70, 50), "e": (5,)}
BRAIN = np.dtype(ml_dtypes.bfloat16)
ONE_GROUP = [ParameterGroup("[ad]", clip_norm=0.5)]


def adam(**options: Any) -> Any:
    return gpuopt.AdamOptimizer(0.1, **options)


def scaled(optimizer: Any) -> Any:
    return LossScaleOptimizer(optimizer, gpuopt.DynamicLossScale(8.0, 2))


INNER: dict[str, tuple[Callable[[], Any], Any]] = {
    "clip_norm": (lambda: adam(clip_norm=1.0), np.float32),
    "clip_norm of float64": (lambda: adam(clip_norm=1.0), np.float64),
    "clip_norm of a group": (lambda: adam(groups=ONE_GROUP), np.float32),
    "clip_norm of each": (lambda: adam(clip_norm=2.0, groups=ONE_GROUP), np.float32),
    "clip_value": (lambda: adam(clip_value=0.5), np.float32),
    "on_nonfinite": (lambda: adam(on_nonfinite="skip"), np.float32),
    "loss scale": (lambda: scaled(adam()), np.float32),
    "loss scale of float16": (lambda: scaled(adam(masters="float32", clip_norm=1.0)), np.float16),
    "loss scale of bfloat16": (lambda: scaled(adam(masters="remainder")), BRAIN),
    "rounding": (lambda: adam(stochastic_rounding=3, clip_norm=1.0), BRAIN),
    "8 bits": (lambda: adam(slot_bits=8, clip_norm=1.0), np.float32),
    "LARS": (lambda: scaled(gpuopt.LARSOptimizer(0.1, clip_norm=1.0)), np.float32),
    "LARS alone": (lambda: gpuopt.LARSOptimizer(0.1), np.float32),
    "LARS by value": (lambda: gpuopt.LARSOptimizer(0.1, clip_value=0.1), np.float32),
    "LAMB": (lambda: gpuopt.LAMBOptimizer(0.1, clip_norm=1.0), np.float32),
    "averages": (
        lambda: adam(clip_norm=1.0, averages=gpuopt.ExponentialMovingAverage(0.5)),
        np.float32,
    ),
}


class ByHand:
    """Adds as accumulation is documented: each operation rounds to the type of the sum."""

    def __init__(self, inner: Any, steps: int, reduction: str) -> None:
        self.inner, self.steps, self.takes_mean = inner, steps, reduction == "mean"
        self.sums: dict[str, Any] = {}
        self.count = 0

    def apply_gradients(self, pairs: list[tuple[Any, Variable]], loss_scale: Any = None) -> None:
        for gradient, variable in pairs:
            self._add(gradient, variable, loss_scale)
        self.count += 1
        if self.count >= self.steps:
            self.apply_accumulated()

    def apply_accumulated(self) -> None:
        if not self.count:
            return
        pairs: list[tuple[Any, Variable]] = []
        for total, variable in self.sums.values():
            divisor = _wide(variable)(self.count if self.takes_mean else 1)
            if isinstance(total, list):
                values, rows = map(np.concatenate, zip(*total, strict=True))
                arrays = (to_device(each, variable.device) for each in (values / divisor, rows))
                pairs.append((IndexedSlices(*arrays), variable))
            else:
                pairs.append((to_device(np.asarray(total / divisor), variable.device), variable))
        self.sums, self.count = {}, 0
        make_step(self.inner, StepRequest(pairs, takes_wide=True))

    def state_dict(self, variables: dict[str, Variable]) -> Any:
        return self.inner.state_dict(variables)

    def _add(self, gradient: Any, variable: Variable, loss_scale: Any) -> None:
        real, on_host = _wide(variable), backend_for(variable.device).to_host
        factor = real(1 if loss_scale is None else 1 / loss_scale)
        total, _ = self.sums.get(variable.name, (None, None))
        if isinstance(gradient, IndexedSlices):
            values, rows = map(on_host, (gradient.values, gradient.indices))
            given = values.astype(real) * factor
            if total is None or isinstance(total, list):
                self.sums[variable.name] = [*(total or []), (given, rows)], variable
                return
            given = _dense([(given, rows)], variable)
        else:
            given = on_host(gradient).astype(real) * factor
        if isinstance(total, list):
            total = _dense(total, variable)
        self.sums[variable.name] = (given if total is None else total + given), variable


def _wide(variable: Variable) -> Any:
    return np.float64 if variable.dtype == np.float64 else np.float32


def _dense(slices: list[Any], variable: Variable) -> np.ndarray[Any, Any]:
    dense = np.zeros(variable.shape, _wide(variable))
    for values, rows in slices:
        dense[rows] += values
    return dense


def results_of(
    make: Callable[[], Any], dtype: Any, xp: Any, seed: int, accumulating: Callable[..., Any]
) -> dict[str, np.ndarray[Any, Any]]:
    """Makes a random program's calls; returns variables, slots and what else the state has."""
    rng = np.random.default_rng(seed)
    variables = {
        name: variable_on(xp, np.ones(shape, dtype), name=name) for name, shape in SHAPES.items()
    }
    table = variable_on(xp, np.ones((9, 4), dtype), name="table")
    inner = make()
    steps = int(rng.integers(1, 4))
    optimizer = accumulating(inner, steps, str(rng.choice(["mean", "sum"])))
    scale = np.float32(rng.choice([8, 3])) if isinstance(inner, LossScaleOptimizer) else None
    for _ in range(9):
        some = [name for name in variables if rng.random() < (0.7 if rng.random() < 0.3 else 1)]
        pairs: list[Any] = []
        for name in some:
            values = rng.normal(size=SHAPES[name])
            if rng.random() < 0.04 and values.size:
                values = np.full(SHAPES[name], rng.choice([np.inf, np.nan, 3e38]))
            with np.errstate(over="ignore"):
                values = np.asarray(values).astype(dtype)
            if rng.random() < 0.3:  # of which a copy is made, if it is a matrix
                pairs.append((xp.asarray(values.T.copy()).T, variables[name]))
            else:
                pairs.append((xp.asarray(values), variables[name]))
        if rng.random() < 0.5:
            values, rows = rng.normal(size=(5, 4)).astype(dtype), rng.integers(0, 9, 5)
            rows = np.unique(rows)  # equal ones are added up in any order on a GPU
            slices = IndexedSlices(xp.asarray(values[: len(rows)]), xp.asarray(rows))
            dense = rng.random() < 0.2
            pairs.append((xp.asarray(np.ones((9, 4), dtype)) if dense else slices, table))
        if pairs:
            more = {} if scale is None else {"loss_scale": scale}
            optimizer.apply_gradients(pairs, **more)
        if rng.random() < 0.1:
            optimizer.apply_accumulated()
    for _ in range(2 * steps):
        ones = [(xp.asarray(np.ones(v.shape, dtype)), v) for v in variables.values()]
        optimizer.apply_gradients(ones)
    found = {name: each.numpy() for name, each in (*variables.items(), ("table", table))}
    # By these names: variables of an earlier run may still have them.
    state = optimizer.state_dict({**variables, "table": table})
    for slot_name, slots in state["slots"].items():
        if slot_name != "gradient_sum":
            found |= {f"{slot_name} of {name}": value for name, value in slots.items()}
    return found | {k: v for k, v in state["non_slots"].items() if k != "accumulated_steps"}


@pytest.mark.one_in(16)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", INNER)
def test_an_update_has_the_bits_of_a_step_by_sums_made_by_hand(
    kind: str, seed: int, xp: Any
) -> None:
    make, dtype = INNER[kind]
    with np.errstate(all="ignore"):
        expected = results_of(make, dtype, xp, seed, ByHand)
    found = results_of(make, dtype, xp, seed, GradientAccumulationOptimizer)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.tobytes() == expected[name].tobytes(), name


def on_gpu(values: Any, gpu: str = "gpu:0") -> Any:
    return to_device(np.asarray(values, np.float32), Device.parse(gpu))


def launches_of_updates(
    gpus: list[EmulatorLauncher], optimizer: Any, variables: list[Variable], **more: Any
) -> list[int]:
    """Returns the launches of each call, once all is made and known, and checks for waits."""
    gradients = [to_device(np.ones(v.shape, v.dtype), v.device) for v in variables]
    launches: list[int] = []
    for call in range(12):
        before = sum(each.launches for each in gpus), fake_cupy.counts.synchronisations
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)), **more)
        launches.append(sum(each.launches for each in gpus) - before[0])
        if call >= 6:
            assert fake_cupy.counts.synchronisations == before[1]
    return launches[6:]


@pytest.mark.internal
@pytest.mark.emulator
@pytest.mark.parametrize("kind", INNER)
def test_an_update_takes_one_launch_more_than_a_step(
    kind: str, emulated_gpus: list[EmulatorLauncher]
) -> None:
    make, dtype = INNER[kind]
    variables = [Variable(np.ones(s, dtype), device="gpu:0") for s in [(3,), (40, 50)] * 4]
    is_scaled = isinstance(make(), LossScaleOptimizer)
    more = {"loss_scale": np.float32(1)} if is_scaled else {}
    of_step = launches_of_updates(emulated_gpus, make(), variables, **more)[0]
    found = launches_of_updates(
        emulated_gpus, GradientAccumulationOptimizer(make(), 3), variables, **more
    )
    assert found == [1, 1, 1 + of_step] * 2


@pytest.mark.emulator
def test_several_gpus_add_in_a_launch_each(emulated_gpus: list[EmulatorLauncher]) -> None:
    places = ["gpu:0", "gpu:1"] * 3
    variables = [Variable(np.ones(9, np.float32), device=place) for place in places]
    [of_step, *_] = launches_of_updates(emulated_gpus, adam(clip_norm=1.0), variables)
    optimizer = GradientAccumulationOptimizer(adam(clip_norm=1.0), 2)
    assert launches_of_updates(emulated_gpus, optimizer, variables) == [2, 2 + of_step] * 3


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
def test_an_optimizer_of_a_users_own_gets_sums_that_are_complete() -> None:
    seen: list[list[float]] = []

    class Looking(gpuopt.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars: Any, *arguments: Any, **more: Any) -> None:
            seen.extend(gradient.get().tolist() for gradient, _ in grads_and_vars)
            super().apply_gradients(grads_and_vars, *arguments, **more)

    class Hooked(gpuopt.GradientDescentOptimizer):
        def _apply_dense(self, grad: Any, var: Any) -> None:
            seen.append(grad.get().tolist())
            super()._apply_dense(grad, var)

    for inner in (Looking(1.0, clip_norm=100.0), Hooked(1.0)):
        weight = Variable(np.zeros(2, np.float32), device="gpu:0")
        optimizer = GradientAccumulationOptimizer(inner, 2, "sum")
        for gradient in ([1, 2], [3, 5]):
            optimizer.apply_gradients([(on_gpu(gradient), weight)])
        assert seen.pop() == [4, 7]
        assert not seen
        assert weight.numpy().tolist() == [-4, -7]


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
def test_gradients_in_the_memory_of_sums_are_read_before_these_are_written() -> None:
    first, second = (Variable(np.zeros(3, np.float32), device="gpu:0") for _ in range(2))
    inner = gpuopt.GradientDescentOptimizer(1.0, clip_norm=1e3)
    optimizer = GradientAccumulationOptimizer(inner, 2, "sum")
    optimizer.apply_gradients([(on_gpu([1, 2, 4]), first), (on_gpu([8, 16, 32]), second)])
    sums = [inner.get_slot(each, "gradient_sum") for each in (first, second)]
    arrays = [each.storage for each in sums if each is not None]
    optimizer.apply_gradients([(arrays[1], first), (arrays[0], second)])
    for each in (first, second):
        np.testing.assert_allclose(each.numpy(), [-9, -18, -36], rtol=1e-6)


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
def test_user_code_in_an_update_may_make_a_step_of_the_optimizer_inside() -> None:
    other = Variable(np.zeros(2, np.float32), device="gpu:0")
    weight = Variable(np.zeros(2, np.float32), device="gpu:0")
    calls = 0

    def rate() -> float:
        nonlocal calls
        calls += 1
        if calls == 2:  # in the update, which is the second step of the optimizer inside
            inner.apply_gradients([(on_gpu([1, 1]), other)], loss_scale=np.float32(1))
        return 1.0

    options = {"clip_norm": 1e3}
    inner = LossScaleOptimizer(
        gpuopt.GradientDescentOptimizer(rate, **options),
        gpuopt.FixedLossScaleManager(8.0),
        host_may_wait=True,
    )
    inner.apply_gradients([(on_gpu([1, 1]), other)])
    optimizer = GradientAccumulationOptimizer(inner, 2, "sum")
    for gradient in ([1, 2], [3, 5]):
        optimizer.apply_gradients([(on_gpu(gradient), weight)])
    np.testing.assert_allclose(weight.numpy(), [-4, -7], rtol=1e-6)
    np.testing.assert_allclose(other.numpy(), [-2, -2], rtol=1e-6)


@pytest.mark.internal
@pytest.mark.gpu
@pytest.mark.usefixtures("every_schedule")
def test_each_call_may_come_on_a_stream_of_its_own() -> None:
    streams = [new_stream() for _ in range(3)]
    weights = [Variable(np.zeros(50, np.float32), device="gpu:0") for _ in range(3)]
    gradients = [uploaded(np.full(50, number, np.float32)) for number in range(1, 9)]
    inner = gpuopt.GradientDescentOptimizer(1.0, clip_norm=1e6)
    optimizer = GradientAccumulationOptimizer(inner, 2, "sum")
    wait_for_gpus()
    for number, gradient in enumerate(gradients):
        with streams[number % 3]:
            # Freed as soon as the call has returned: its memory goes to the next one.
            optimizer.apply_gradients(
                [(gradient + position, w) for position, w in enumerate(weights)]
            )
    for position, weight in enumerate(weights):
        np.testing.assert_allclose(weight.numpy(), -(36 + 8 * position), rtol=1e-6)


@pytest.mark.internal
@pytest.mark.gpu
@pytest.mark.usefixtures("every_schedule")
def test_a_sum_that_is_read_on_another_stream_is_added_to_after_that() -> None:
    reading, stepping = new_stream(), new_stream()
    weight = Variable(np.zeros(4000, np.float32), device="gpu:0")
    gradient = uploaded(np.ones(4000, np.float32))
    inner = gpuopt.GradientDescentOptimizer(1.0, clip_norm=1e6)
    optimizer = GradientAccumulationOptimizer(inner, 2, "sum")
    wait_for_gpus()
    with stepping:
        optimizer.apply_gradients([(gradient, weight)])
    total = inner.get_slot(weight, "gradient_sum")
    assert total is not None
    with reading:
        seen = total * 3
    with stepping:
        optimizer.apply_gradients([(gradient, weight)])
    wait_for_gpus()
    assert (seen.get() == 3).all()
    assert (weight.numpy() == -2).all()


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
def test_some_sums_may_begin_where_others_go_on() -> None:
    variables = [Variable(np.zeros(9, np.float32), device="gpu:0") for _ in range(3)]
    inner = gpuopt.GradientDescentOptimizer(1.0, clip_norm=1e3)
    optimizer = GradientAccumulationOptimizer(inner, 2, "sum")
    for some in (variables[1:], variables):
        optimizer.apply_gradients([(on_gpu(np.ones(9)), each) for each in some])
    assert [float(each.numpy()[0]) for each in variables] == [-1, -2, -2]


@pytest.mark.internal
@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
def test_a_handler_that_steps_another_optimizer_at_any_moment_adds_nothing_twice() -> None:
    scaling = gpuopt.FixedLossScaleManager(8.0)
    other = LossScaleOptimizer(gpuopt.GradientDescentOptimizer(1.0), scaling)
    elsewhere = Variable(np.zeros(2, np.float32))

    def handler() -> None:
        with suppress(RuntimeError):  # in the middle of the step
            other.apply_gradients([(np.ones(2, np.float32), elsewhere)])

    for moment in range(1, 200):
        weight = Variable(np.zeros(2, np.float32), device="gpu:0")
        inner = gpuopt.GradientDescentOptimizer(1.0, clip_norm=1e6)
        optimizer = GradientAccumulationOptimizer(inner, 2, "sum")
        optimizer.apply_gradients([(on_gpu([1, 2]), weight)])
        with HandleAt(moment, handler, ["gradient_sums.py", "request.py"]) as at:
            optimizer.apply_gradients([(on_gpu([3, 5]), weight)])
        np.testing.assert_allclose(weight.numpy(), [-4, -7], rtol=1e-6)
        if at.is_over:
            return
    raise AssertionError("the update has more moments than that")


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
def test_a_gradient_in_the_memory_of_a_sum_that_gets_none_is_read_before_that_is_divided() -> None:
    first, second = (Variable(np.zeros(2, np.float32), device="gpu:0") for _ in range(2))
    inner = gpuopt.GradientDescentOptimizer(1.0, clip_norm=1e6)
    optimizer = GradientAccumulationOptimizer(inner, 2)
    optimizer.apply_gradients([(on_gpu([1, 2]), first), (on_gpu([8, 16]), second)])
    total = inner.get_slot(second, "gradient_sum")
    assert total is not None
    optimizer.apply_gradients([(total.storage, first)])
    np.testing.assert_allclose(first.numpy(), [-4.5, -9], rtol=1e-6)
    np.testing.assert_allclose(second.numpy(), [-4, -8], rtol=1e-6)


@pytest.mark.internal
@pytest.mark.gpu
@pytest.mark.usefixtures("every_schedule")
def test_user_code_that_steps_another_optimizer_on_another_stream_leaves_the_sums_alone() -> None:
    own, others = new_stream(), new_stream()
    elsewhere = Variable(np.zeros(2, np.float32), device="gpu:0")
    ones = uploaded(np.ones(2, np.float32))
    scaling = gpuopt.FixedLossScaleManager(8.0)
    other = LossScaleOptimizer(gpuopt.GradientDescentOptimizer(1.0), scaling)

    def rate() -> float:
        with others:
            other.apply_gradients([(ones, elsewhere)])
        return 1.0

    weight = Variable(np.zeros(4000, np.float32), device="gpu:0")
    inner = gpuopt.GradientDescentOptimizer(rate, clip_norm=1e6)
    optimizer = GradientAccumulationOptimizer(inner, 2, "sum")
    gradients = [uploaded(np.full(4000, number, np.float32)) for number in range(1, 9)]
    wait_for_gpus()
    with own:
        for gradient in gradients:
            optimizer.apply_gradients([(gradient * 1, weight)])
    assert (weight.numpy() == -36).all()


@pytest.mark.internal
@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
def test_an_update_that_fails_before_its_step_leaves_nothing_to_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = Variable(np.zeros(2, np.float32), device="gpu:0")
    inner = gpuopt.GradientDescentOptimizer(1.0, clip_norm=100.0)
    optimizer = GradientAccumulationOptimizer(inner, 1)

    def fail(*arguments: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("gpuopt.optimizer.Step", fail)
        with pytest.raises(MemoryError):
            optimizer.apply_gradients([(on_gpu([1, 2]), weight)])
    inner.apply_gradients([(on_gpu([3, 5]), weight)])
    assert weight.numpy().tolist() == [-3, -5]
