"""A GPU leaves out, or refuses, a step that is not finite, and the host waits for nothing.

tests/fuzz/test_programs_on_streams.py compares random programs of such steps with an oracle on the
host.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import driver
import numpy as np
import pytest
from interrupt_at import HandleAt, Interrupt, each_moment
from other_thread import in_threads

import gpuopt
from gpuopt import ExponentialMovingAverage, IndexedSlices, ParameterGroup, Variable, backends
from gpuopt.backends.cuda import cuda_backend
from gpuopt.device import Device
from gpuopt.step.chain import with_numbers
from gpuopt.variables import unfinished

pytestmark = pytest.mark.gpu

POLICIES = ("newest", "random", "oldest")
SHAPES = {"w0": (3, 4), "w1": (700,), "table": (6, 4)}


def decays(step: Variable) -> Any:
    return gpuopt.exponential_decay(0.1, step, 3, 0.5)


# Makes an optimizer that follows a global step.
STAGES: dict[str, Callable[..., Any]] = {
    "plain": lambda step, **more: gpuopt.AdamOptimizer(0.1, **more),
    "no slots": lambda step, **more: gpuopt.GradientDescentOptimizer(decays(step), **more),
    "clip_norm": lambda step, **more: gpuopt.LazyAdamOptimizer(0.1, clip_norm=0.5, **more),
    "clip_value": lambda step, **more: gpuopt.AdagradOptimizer(decays(step), clip_value=1, **more),
    "groups": lambda step, **more: gpuopt.MomentumOptimizer(
        0.1, 0.9, groups=[ParameterGroup("w1", learning_rate=decays(step))], **more
    ),
    "decay and averages": lambda step, **more: gpuopt.AdamWOptimizer(
        0.01, 0.1, averages=ExponentialMovingAverage(0.9, step), **more
    ),
    "sums": lambda step, **more: gpuopt.LAMBOptimizer(learning_rate=decays(step), **more),
    "codes": lambda step, **more: gpuopt.LazyAdamOptimizer(0.1, slot_bits=8, **more),
    "rows that catch up": lambda step, **more: gpuopt.AdamOptimizer(
        decays(step), catch_up=True, **more
    ),
}


class Model:
    """Variables on a GPU, with an optimizer; every other one has its own names."""

    def __init__(self, stage: str, device: str = "gpu:0", **more: Any) -> None:
        self.variables = {
            name: Variable(np.full(shape, 0.5, np.float32), name=name, device=device)
            for name, shape in SHAPES.items()
        }
        self.step = Variable(0, name="step", trainable=False)
        self.optimizer = STAGES[stage](self.step, **more)

    def make_step(self, given: dict[str, Any], rows: Any) -> None:
        self.optimizer.apply_gradients(self.pairs(given, rows), self.step)

    def pairs(self, given: dict[str, Any], rows: Any) -> list[tuple[Any, Variable]]:
        where = self.variables["w0"].device
        put = [(backends.to_device(each, where), self.variables[n]) for n, each in given.items()]
        if rows is not None and "table" in given:
            values, table = put.pop()
            put.append((IndexedSlices(values, backends.to_device(rows, where)), table))
        return put

    def numbers(self) -> dict[str, Any]:
        """Returns all that steps change, by name."""
        state = self.optimizer.state_dict(self.variables)
        found = {name: each.numpy() for name, each in self.variables.items()}
        for slot, by_name in state["slots"].items():
            found.update({f"{slot} of {name}": each for name, each in by_name.items()})
        averages = self.optimizer.options.averages
        for name, each in self.variables.items() if averages is not None else ():
            average = averages.moving.average(each)
            if average is not None:
                found[f"average of {name}"] = average.numpy()
        return {**found, **state["non_slots"], "step": self.step.numpy()}


def gradients(rng: np.random.Generator, bad: str = "", *, names: Any = SHAPES) -> dict[str, Any]:
    given = {name: rng.normal(size=SHAPES[name]).astype(np.float32) for name in names}
    if bad:
        flat = given[bad].reshape(-1)
        flat[rng.integers(flat.size)] = rng.choice([np.inf, -np.inf, np.nan])
    return given


def assert_same(got: dict[str, Any], expected: dict[str, Any], tolerance: float = 0.0) -> None:
    assert got.keys() == expected.keys()
    for name, each in expected.items():
        np.testing.assert_allclose(got[name], each, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.fixture(autouse=True)
def names_are_free() -> None:
    """Has variables of earlier tests gone, whose names those of this one ask for."""
    gc.collect()


@pytest.mark.skipif(not driver.is_here(), reason="a real GPU may be done before the host looks")
@pytest.mark.parametrize(("policy", "kind"), [("skip", "dense"), ("raise", "mixed")])
@pytest.mark.parametrize("stage", STAGES)
def test_no_step_waits(stage: str, policy: str, kind: str, waits: list[str]) -> None:
    gpu = Device("gpu", 0)
    rng = np.random.default_rng(0)
    # With a backend that has seen no other stream, as other tests' has.
    with driver.schedule("oldest"), backends.using(gpu, cuda_backend(gpu)):
        model = Model(stage, on_nonfinite=policy)
        rows = np.arange(6) % 4 if kind == "mixed" else None
        for number in range(12):
            is_bad = number % 4 == 3 and policy == "skip"
            pairs = model.pairs(gradients(rng, "w1" if is_bad else ""), rows)
            before = len(waits)
            with driver.record_launches() as launches:
                model.optimizer.apply_gradients(pairs, model.step)
            # The first ones make slots and averages, and wait for memory.
            assert number < 2 or len(waits) == before, number
            if number % 8 == 7:
                driver.synchronize()  # the host is never more than 8 steps ahead
            if number >= 2 and kind == "dense" and stage not in ("sums", "codes"):
                kernels = [each.name for each in launches if each.kind == "kernel"]
                assert len(kernels) == 2, kernels
        assert int(model.step) == (9 if policy == "skip" else 12)


def test_a_refused_step_stops_the_next_ones_until_it_is_heard_of(every_schedule: str) -> None:
    rng = np.random.default_rng(1)
    for num_later in (0, 1, 3):
        model = Model("clip_norm", on_nonfinite="raise")
        for _ in range(3):
            model.make_step(gradients(rng), None)
        before, name = model.numbers(), model.variables["w1"].name
        pairs = model.pairs(gradients(rng, "w1"), None)
        model.optimizer.apply_gradients(pairs, model.step)
        with suppress(FloatingPointError):  # heard of early, which drops the call that hears of it
            for _ in range(num_later):
                pairs = model.pairs(gradients(rng), None)
                model.optimizer.apply_gradients(pairs, model.step)
            since = f", nor by the {num_later} calls since" if num_later else ""
            with pytest.raises(FloatingPointError) as raised:
                model.optimizer.check()
            assert str(raised.value) == (
                f'gradient for "{name}" is not finite; gpu:0 found this after the call: nothing '
                f"was changed by it{since}"
            )
        model.optimizer.check()
        assert_same(model.numbers(), before)
        assert model.optimizer.last_nonfinite == f'gradient for "{name}" is not finite'
        model.make_step(gradients(rng), None)
        model.optimizer.check()
        assert int(model.step) == 4


def read_a_variable(model: Model, folder: Path) -> None:
    model.variables["w0"].numpy()


def save(model: Model, folder: Path) -> None:
    gpuopt.Saver(model.variables, optimizers=[model.optimizer]).save(folder / "model")


def read_the_state(model: Model, folder: Path) -> None:
    model.optimizer.state_dict(model.variables)


def step_again(model: Model, folder: Path) -> None:
    int(model.step)  # waits, so that the GPU is done
    model.make_step(gradients(np.random.default_rng(2)), None)


def step_where_the_host_decides(model: Model, folder: Path) -> None:
    model.optimizer.hyperparameters["learning_rate"] = lambda: 0.1
    model.make_step(gradients(np.random.default_rng(2)), None)


def step_with_a_new_variable(model: Model, folder: Path) -> None:
    new = Variable(np.ones(3, np.float32), name="new", device="gpu:0")
    ones = backends.to_device(np.ones(3, np.float32), new.device)
    model.optimizer.apply_gradients([(ones, new)], model.step)


HEARING = [
    *(read_a_variable, save, read_the_state, step_again),
    *(step_where_the_host_decides, step_with_a_new_variable),
]


@pytest.mark.parametrize("hear", HEARING, ids=lambda each: each.__name__)
def test_whoever_hears_of_a_refused_step_raises_its_error_once(
    hear: Callable[[Model, Path], None], every_schedule: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    model = Model("plain", on_nonfinite="raise")
    for _ in range(2):
        model.make_step(gradients(rng), None)
    model.optimizer.check()
    before = model.numbers()
    model.make_step(gradients(rng, "table"), np.arange(6) % 4)
    with pytest.raises(FloatingPointError, match='gradient for "table" is not finite, or equal'):
        hear(model, tmp_path)
    assert_same(model.numbers(), before)
    hear(model, tmp_path)


def test_the_global_step_is_right_before_the_error_is_raised(every_schedule: str) -> None:
    rng = np.random.default_rng(1)
    model = Model("plain", on_nonfinite="raise")
    for bad in ("", "", "w0", ""):
        model.make_step(gradients(rng, bad), None)
    assert int(model.step) == 2
    assert model.optimizer.last_nonfinite == 'gradient for "w0" is not finite'
    for _ in range(2):  # nobody has heard of the error
        assert int(model.step) == 2
    with pytest.raises(FloatingPointError, match="nor by the 1 calls since"):
        model.make_step(gradients(rng), None)
    model.make_step(gradients(rng), None)
    assert int(model.step) == 3


@pytest.mark.parametrize("how", ["checked by hand", "GPUOPT_CHECK"])
def test_a_step_can_be_tried_again_where_it_is_checked(
    how: str, monkeypatch: pytest.MonkeyPatch, every_schedule: str
) -> None:
    if how == "GPUOPT_CHECK":
        monkeypatch.setenv("GPUOPT_CHECK", "1")
    rng = np.random.default_rng(1)
    ours, theirs = Model("groups", on_nonfinite="raise"), Model("groups")
    refused: list[str] = []
    for number in range(12):
        good, bad = gradients(rng), gradients(rng, "w1")
        try:
            ours.make_step(bad if number % 3 == 2 else good, None)
            if how == "checked by hand":
                ours.optimizer.check()
        except FloatingPointError as error:
            refused.append(str(error))
            ours.make_step(good, None)
        theirs.make_step(good, None)
    assert len(refused) == 4
    assert not [each for each in refused if "since" in each]
    assert_same(ours.numbers(), theirs.numbers(), 1e-6)


def test_refused_rows_and_what_is_not_finite_are_told_apart(every_schedule: str) -> None:
    rng = np.random.default_rng(1)
    out_of_range = np.array([0, 1, 6, 2, 3, 4])
    for policy, order in itertools.product(("skip", "raise"), itertools.permutations(range(3))):
        model = Model("clip_norm", on_nonfinite=policy)
        for _ in range(2):
            model.make_step(gradients(rng), np.arange(6))
        model.optimizer.check()
        before = model.numbers()
        found: list[type[Exception]] = []
        for number in (*order, 3, 4, 5):
            try:
                if number < 3:
                    bad, rows = ("w1", "", "w1")[number], (np.arange(6), out_of_range)[number > 0]
                    model.make_step(gradients(rng, bad), rows)
                else:
                    model.optimizer.check()
            except (IndexError, FloatingPointError) as error:
                found.append(type(error))
        is_nonfinite_first = policy == "raise" and order[0] == 0
        assert found[0] is (FloatingPointError if is_nonfinite_first else IndexError), order
        assert len(found) <= 2, (policy, order)  # calls since an error are dropped
        assert found.count(FloatingPointError) <= (policy == "raise")
        assert_same(model.numbers(), before)
        model.make_step(gradients(rng), np.arange(6))
        model.optimizer.check()
        assert int(model.step) == 3, (policy, order)


def test_a_call_that_is_dropped_for_an_earlier_one_has_no_error_of_its_own(
    every_schedule: str,
) -> None:
    rng = np.random.default_rng(1)
    model = Model("clip_norm", on_nonfinite="raise")
    for bad in ("", "", "w1"):
        model.make_step(gradients(rng, bad), np.arange(6))
    with pytest.raises(FloatingPointError):  # it counts by another variable, and so has to wait
        model.optimizer.apply_gradients(model.pairs(gradients(rng), np.arange(6) + 1))
    model.optimizer.check()
    model.make_step(gradients(rng), np.arange(6))
    assert int(model.step) == 3


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_a_first_step_that_is_not_finite_makes_no_slots(policy: str, every_schedule: str) -> None:
    rng = np.random.default_rng(1)
    model = Model("plain", on_nonfinite=policy)
    with pytest.raises(FloatingPointError) if policy == "raise" else nullcontext():
        model.make_step(gradients(rng, "w0"), None)
    assert model.optimizer.get_slot(model.variables["w0"], "m") is None
    model.make_step(gradients(rng, names=["w0"]), None)
    assert model.optimizer.get_slot(model.variables["w0"], "m") is not None
    assert int(model.step) == 1


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_an_infinite_norm_of_finite_gradients_is_no_step(policy: str, every_schedule: str) -> None:
    rng = np.random.default_rng(1)
    model = Model("clip_norm", on_nonfinite=policy)
    model.make_step(gradients(rng), None)
    before = model.numbers()
    huge = {name: each + np.float32(1e30) for name, each in gradients(rng).items()}
    model.make_step(huge, None)
    with pytest.raises(FloatingPointError) if policy == "raise" else nullcontext():
        model.optimizer.check()
    assert_same(model.numbers(), before)
    assert model.optimizer.last_nonfinite is not None
    assert "clipping to a norm makes finite gradients NaN" in model.optimizer.last_nonfinite


def constrained(model: Model) -> list[Any]:
    other = Variable(
        np.ones(2, np.float32), name="other", device="gpu:0", constraint=lambda array: array
    )
    return [(backends.to_device(np.ones(2, np.float32), other.device), other)]


def on_the_host(model: Model) -> list[Any]:
    return [(np.ones(2, np.float32), Variable(np.ones(2, np.float32), name="other"))]


def by_a_function(model: Model) -> list[Any]:
    model.optimizer.hyperparameters["learning_rate"] = lambda: 0.1
    return []


def counted_by_an_array(model: Model) -> list[Any]:
    model.step = np.zeros((), np.int64)  # type: ignore[assignment]
    return []


HOST_DECIDES = [constrained, on_the_host, by_a_function, counted_by_an_array]


@pytest.mark.parametrize("why", HOST_DECIDES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("stage", ["plain", "clip_norm"])
def test_what_no_gpu_can_decide_is_found_in_the_call(
    stage: str, why: Callable[[Model], list[Any]], every_schedule: str
) -> None:
    rng = np.random.default_rng(1)
    model = Model(stage, on_nonfinite="raise")
    more = why(model)

    def make_step(bad: str = "") -> None:
        pairs = [*model.pairs(gradients(rng, bad), None), *more]
        model.optimizer.apply_gradients(pairs, model.step)

    for _ in range(2):
        make_step()
        before = int(model.step)
        with pytest.raises(FloatingPointError, match="1 of 12 values, the first is"):
            make_step("w0")
        assert int(model.step) == before
    assert before == 2


def test_an_update_by_accumulated_gradients_is_refused_late(every_schedule: str) -> None:
    rng = np.random.default_rng(1)
    model = Model("plain", on_nonfinite="raise")
    optimizer = gpuopt.GradientAccumulationOptimizer(model.optimizer, 2)

    def call(bad: str = "") -> None:
        optimizer.apply_gradients(model.pairs(gradients(rng, bad), None), model.step)

    for bad in ("", "", "", "w1"):
        call(bad)
    with pytest.raises(FloatingPointError, match='gradient for "w1" is not finite; gpu:0 found'):
        optimizer.check()
    assert (int(model.step), optimizer.accumulated_steps) == (1, 0)
    call()
    call()
    assert int(model.step) == 2


def test_a_workers_step_raises_its_own_error(every_schedule: str) -> None:
    rng = np.random.default_rng(1)
    model = Model("plain", on_nonfinite="raise")
    sync = gpuopt.SyncReplicasOptimizer(model.optimizer, 1, 1)
    with sync.start(model.step, num_tokens=0), sync.worker(0) as worker:
        for _ in range(2):
            worker.apply_gradients(model.pairs(gradients(rng), None), model.step)
        with pytest.raises(FloatingPointError, match="is not finite"):
            worker.apply_gradients(model.pairs(gradients(rng, "w1"), None), model.step)
    stale = gpuopt.DropStaleGradientOptimizer(model.optimizer, 1, global_step=model.step)
    made: list[int] = []

    def train(worker: Any) -> None:
        for bad in ("", "w0"):
            worker.apply_gradients(model.pairs(gradients(rng, bad), None))
            made.append(int(model.step))

    with pytest.raises(FloatingPointError, match="is not finite"):
        stale.run(train, num_workers=1)
    assert made == [3]
    assert int(model.step) == 3


@pytest.mark.gpus(2)
def test_variables_of_several_gpus_are_refused_alike(every_schedule: str) -> None:
    first, second = (
        Variable(np.zeros(5, np.float32), name=f"w{at}", device=f"gpu:{at}") for at in (0, 1)
    )
    step = Variable(0, name="step")
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.0, on_nonfinite="raise")

    def make_step(last: float) -> None:
        given = [np.float32([1, 1, 1, 1, each]) for each in (1, last)]
        pairs = [
            (backends.to_device(each, v.device), v)
            for each, v in zip(given, (first, second), strict=True)
        ]
        optimizer.apply_gradients(pairs, step)

    make_step(1)
    make_step(1)
    make_step(np.inf)
    with pytest.raises(FloatingPointError, match='gradient for "w1" is not finite'):
        second.numpy()
    for each in (first, second):
        np.testing.assert_array_equal(each.numpy(), np.float32([-2] * 5))
    assert int(step) == 2


def test_one_of_several_threads_raises_the_error(every_schedule: str) -> None:
    model = Model("no slots", on_nonfinite="raise")
    errors: list[FloatingPointError] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for at in range(10):
            try:
                model.make_step(gradients(rng, "w0" if at == 4 else ""), None)
                model.optimizer.check()
            except FloatingPointError as error:
                errors.append(error)

    in_threads(partial(work, 0), partial(work, 1))
    assert 1 <= len(errors) <= 2
    assert int(model.step) + len(errors) <= 20
    before = int(model.step)
    model.make_step(gradients(np.random.default_rng(0)), None)
    model.optimizer.check()
    assert int(model.step) == before + 1


def test_a_number_is_shown_as_it_is_after_the_steps_so_far(every_schedule: str) -> None:
    rng = np.random.default_rng(1)
    model = Model("plain", on_nonfinite="skip")
    model.make_step(gradients(rng), None)
    for bad in ("", "w0", ""):
        model.make_step(gradients(rng, bad), None)
        power = model.optimizer.state.others()["beta1_power"]
    assert "value=3>" in repr(model.step)
    model.make_step(gradients(rng, "w1"), None)
    assert "value=0.656" in repr(power)  # 0.9 ** 4


def test_user_code_in_a_step_waits_for_the_steps_so_far(every_schedule: str) -> None:
    step = Variable(0, name="step", trainable=False)
    beside = Variable(np.zeros(2, np.float32))
    rate = gpuopt.piecewise_constant(step, [0, 1, 2, 3, 4], [1.0, 10.0, 100.0, 1e3, 1e4, 1e5])
    plain = gpuopt.GradientDescentOptimizer(rate)
    seen: list[int] = []

    def look(variable: Variable) -> bool:
        seen.append(int(step))
        plain.apply_gradients([(np.ones(2, np.float32), beside)], step)
        return True

    optimizer = gpuopt.AdamWOptimizer(0.1, decay_variables=look, on_nonfinite="skip")
    first, second = (Variable(np.zeros(3, np.float32), device="gpu:0") for _ in range(2))
    good, bad = (backends.to_device(np.float32([1, 1, n]), first.device) for n in (1, np.nan))
    for gradient in (good, good, bad, bad):
        optimizer.apply_gradients([(gradient, first)], step)
    optimizer.apply_gradients([(good, first), (good, second)], step)
    assert seen == [0, 3]
    assert int(step) == 5
    np.testing.assert_array_equal(beside.numpy(), np.float32([-1001] * 2))


def test_prepare_of_a_subclass_is_called_by_numbers_of_steps_that_were_made(
    every_schedule: str,
) -> None:
    step = Variable(0, name="step", trainable=False)
    seen: set[int] = set()

    class Prepared(gpuopt.GradientDescentOptimizer):
        def _prepare(self) -> None:
            seen.add(int(step))
            self.hyperparameters["learning_rate"] = 10.0 ** int(step)
            super()._prepare()

    optimizer = Prepared(0.1, on_nonfinite="skip")
    w = Variable(np.zeros(3, np.float32), device="gpu:0")
    good, bad = (backends.to_device(np.float32([1, 1, n]), w.device) for n in (1, np.nan))
    for gradient in (good, bad, bad, good, bad, good):
        optimizer.apply_gradients([(gradient, w)], step)
    np.testing.assert_array_equal(w.numpy(), np.float32([-111] * 3))
    assert seen == {0, 1, 2}


def test_a_handler_of_the_log_may_read_numbers(every_schedule: str) -> None:
    rng = np.random.default_rng(1)
    model = Model("plain", on_nonfinite="skip")
    seen: list[int] = []
    told: list[str] = []

    class Reading(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(int(model.step))
            told.append(record.getMessage())

    handler = Reading()
    logging.getLogger("gpuopt").addHandler(handler)
    try:
        for bad in ("", "", "w0", "", "w1"):
            model.make_step(gradients(rng, bad), None)
        assert int(model.step) == 3
    finally:
        logging.getLogger("gpuopt").removeHandler(handler)
    assert len(seen) == 2
    assert [each.split('"')[1] for each in told] == ["w0", "w1"]
    name = model.optimizer.get_name()
    assert all(each.endswith(f"{name} skips the step") for each in told), told


def is_in_own_numbers() -> bool:
    """Whether a step reads or writes numbers of its own, as the stack of calls shows."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is with_numbers.__code__:
            return True
        frame = frame.f_back
    return False


def test_a_signal_handler_in_a_step_reads_and_assigns_right_numbers_or_gets_an_error(
    every_schedule: str,
) -> None:
    rng = np.random.default_rng(1)
    model = Model("no slots", on_nonfinite="skip")
    model.make_step(gradients(rng), None)
    done: list[str] = []

    def handle() -> None:
        nonlocal before
        if is_in_own_numbers():
            return
        what = ("read", "assigned")[moment % 2]
        try:
            if what == "read":
                assert int(model.step) in (before, before + 1), moment
            else:
                model.step.assign(100)
                before = 100
        except RuntimeError as error:
            what = str(error)
        done.append(what)

    for moment in itertools.count(1, 5):
        before = int(model.step)
        model.make_step(gradients(rng, "w1"), None)
        pairs, handling = model.pairs(gradients(rng), None), HandleAt(moment, handle, ["gpuopt/"])
        with handling:
            model.optimizer.apply_gradients(pairs, model.step)
        # What is assigned may come before the count or after it.
        assert int(model.step) in (before + 1, 100 if before == 100 else before + 1), moment
        if handling.is_over:
            break
    read, assigned = (done.count(each) for each in ("read", "assigned"))
    assert min(read, assigned) > 5
    [refused] = set(done) - {"read", "assigned"}
    assert "in the middle of a step that a GPU decides about" in refused


def test_a_gradients_own_code_reads_the_steps_that_were_made(every_schedule: str) -> None:
    rng = np.random.default_rng(1)
    model = Model("plain", on_nonfinite="skip")
    for bad in ("", "", "w1"):
        model.make_step(gradients(rng, bad), None)
    read = []

    class Gradient:
        def __init__(self, shape: tuple[int, ...]) -> None:
            self.shape = shape

        def __array__(self, *arguments: Any, **options: Any) -> Any:
            read.append(int(model.step))
            return np.ones(self.shape, np.float32)

    pairs = [(Gradient(each.shape), each) for each in model.variables.values()]
    model.optimizer.apply_gradients(pairs, model.step)
    assert read
    assert set(read) == {2}
    assert int(model.step) == 3


# Where the host counts and notes what it counts.
COUNTING = ["gpuopt/step/step.py", "host_scalar.py", "device_scaling.py", "ledger.py", "chain.py"]


def test_a_refused_step_that_ctrl_c_ends_changes_nothing() -> None:
    rng = np.random.default_rng(1)
    model = Model("plain", on_nonfinite="raise")
    model.make_step(gradients(rng), None)
    for interrupt in each_moment(COUNTING, least=20):
        model.optimizer.accept_unfinished_step()
        model.make_step(gradients(rng), None)
        model.optimizer.check()
        before = model.numbers()
        pairs = model.pairs(gradients(rng, "w1"), None)
        with suppress(Interrupt, FloatingPointError), interrupt:
            model.optimizer.apply_gradients(pairs, model.step)
            model.optimizer.check()
        with suppress(FloatingPointError):
            model.optimizer.check()
        if not unfinished.unfinished_steps():  # else it is not known what a GPU has written
            assert_same(model.numbers(), before)
    assert math.isfinite(float(model.variables["w1"].numpy().sum()))
