"""A step that was not finished is remembered, until a restore or its optimizer settles it."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import signal
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import autograd.extend
import ml_dtypes
import numpy as np
import pytest
from array_slots import array_slots
from failing_launch import failing_launch
from interrupt_at import Interrupt, InterruptAt

import gpuopt
from gpuopt import Variable
from gpuopt.backends import to_device
from gpuopt.distributed.wrapper import inner_optimizers
from gpuopt.optimizers.base import undoable
from gpuopt.variables import unfinished

FULL = bool(os.environ.get("GPUOPT_FULL"))
RNG = np.random.default_rng(3)
SMALL, TABLE = RNG.normal(size=6).astype(np.float32), RNG.normal(size=(5, 2)).astype(np.float32)


class Training:
    """Variables, an optimizer, and everything that its steps write."""

    def __init__(
        self, make: Callable[[], gpuopt.Optimizer], device: str = "cpu", of_table: str = "cpu"
    ) -> None:
        bfloat16 = make.__name__ in ("rounding", "masters")
        kind: Any = ml_dtypes.bfloat16 if bfloat16 else np.float32
        self.w = Variable(SMALL, name="w", dtype=kind, device=device)
        self.table = Variable(TABLE, name="table", dtype=kind, device=of_table)
        self.named = {"w": self.w, "table": self.table}
        self.step = Variable(0, name="step", trainable=False, dtype=np.int64)
        self.optimizer = make()
        self.dense = to_device(np.full(6, 0.5, kind), self.w.device)
        values, rows = np.full((2, 2), 0.25, kind), np.array([3, 1])
        self.rows = gpuopt.IndexedSlices(
            *(to_device(each, self.table.device) for each in (values, rows)), (5, 2)
        )

    def one(self) -> None:
        pairs = [(self.dense, self.w), (self.rows, self.table)]
        self.optimizer.apply_gradients(pairs, self.step)

    def arrays(self) -> dict[str, Any]:
        """Returns the values that a step changes, without counting any."""
        values = dict(self.named)
        for own, variable in self.named.items():
            for name in array_slots(self.optimizer):
                slot = self.optimizer.get_slot(variable, name)
                if slot is not None:
                    values[f"{own}/{name}"] = slot
            for at, averages in enumerate(self.averages()):
                average = averages.average(variable)
                if average is not None:
                    values[f"{own}/{at}"] = average
        return {name: value.numpy() for name, value in values.items()}

    def averages(self) -> list[Any]:
        every = list(inner_optimizers(self.optimizer))
        found = [getattr(each, "averages", each.options.averages) for each in every]
        return [getattr(each, "moving", each) for each in found if each is not None]

    def numbers(self) -> dict[str, float]:
        others = self.optimizer.owner_of_state.state.others()
        found = {name: float(each.numpy()) for name, each in others.items()}
        if isinstance(self.optimizer, gpuopt.LossScaleOptimizer):
            manager: Any = self.optimizer.manager
            found |= {name: float(each.numpy()) for name, each in manager.variables.items()}
        for own, variable in self.named.items():
            count = self.optimizer.get_slot(variable, "step")
            found |= {} if count is None else {f"{own}/step": float(count.numpy())}
        return found | {"global step": float(self.step.numpy())}


def sgd() -> gpuopt.Optimizer:
    return gpuopt.GradientDescentOptimizer(0.5)


def momentum() -> gpuopt.Optimizer:
    return gpuopt.MomentumOptimizer(0.5, 0.9, use_locking=True)


def adam() -> gpuopt.Optimizer:
    return gpuopt.AdamOptimizer(0.1, averages=gpuopt.ExponentialMovingAverage(0.5))


def catching_up() -> gpuopt.Optimizer:
    return gpuopt.AdamOptimizer(0.1, catch_up=True)


def clipped() -> gpuopt.Optimizer:
    return gpuopt.AdamOptimizer(0.1, clip_norm=0.5)


def counting() -> gpuopt.Optimizer:
    return gpuopt.RAdamOptimizer(0.1)


def masters() -> gpuopt.Optimizer:
    return gpuopt.AdamOptimizer(0.1, masters="float32")


def rounding() -> gpuopt.Optimizer:
    return gpuopt.AdamOptimizer(0.1, stochastic_rounding=7)


def averaging() -> gpuopt.Optimizer:
    return gpuopt.MovingAverageOptimizer(adam(), 0.5)


def scaling() -> gpuopt.Optimizer:
    return gpuopt.LossScaleOptimizer(adam(), gpuopt.DynamicLossScale(1.0, 2))


def scaling_alone() -> gpuopt.Optimizer:
    return gpuopt.LossScaleOptimizer(gpuopt.AdamOptimizer(0.1), gpuopt.DynamicLossScale(1.0, 2))


KINDS = [sgd, momentum, adam, catching_up, clipped, counting, masters, rounding, averaging, scaling]


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        np.array_equal(first[name], second[name]) for name in first
    )


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    unfinished.begun.clear()
    yield
    unfinished.begun.clear()


# Generators that an interrupt ends say so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("make", KINDS)
def test_an_interrupted_step_is_not_made_or_made_or_remembered(
    make: Callable[[], gpuopt.Optimizer], tmp_path: Path
) -> None:
    other = Training(make)
    other.one()
    before = other.arrays(), other.numbers()
    other.one()
    after = other.arrays(), other.numbers()
    seen = set()
    number = num_moments(make)
    moments = range(1, number + 2)
    for moment in moments if FULL else random.Random(make.__name__).sample(moments, 60):
        training = Training(make)
        training.one()
        kept = training.optimizer.state_dict(training.named)
        interrupts = InterruptAt(moment, inside=["gpuopt/"])
        try:
            with interrupts:
                training.one()
        except Interrupt:
            pass
        if unfinished.unfinished_steps():
            check_refusals(training, tmp_path)
            left = training.arrays()
            if moment % 2:
                training.optimizer.accept_unfinished_step()
                assert same(training.numbers(), after[1]), moment
                assert same(training.arrays(), left), moment
                seen.add("accepted")
            else:
                training.optimizer.load_state_dict(kept, training.named)
                for name, variable in training.named.items():
                    for at, averages in enumerate(training.averages()):
                        averages.average(variable).assign(before[0][f"{name}/{at}"])
                    assert unfinished.unfinished_steps(), moment
                    variable.assign(before[0][name])
                seen.add("loaded")
        else:
            now = training.arrays(), training.numbers()
            # What a decision about the step has counted by then belongs to the next one.
            is_made = same(now[0], after[0])
            assert is_made or same(now[0], before[0]), moment
            assert same(now[1], (after if is_made else before)[1]) or make is scaling, moment
            seen.add(is_made)
        assert not unfinished.unfinished_steps(), moment
        training.one()
        training.optimizer.state_dict(training.named)
    # A step is not made, is remembered, and is settled either way; of a sample of moments, few or
    # none come when it is made.
    assert seen | ({True} if not FULL else set()) == {"accepted", "loaded", False, True}


# Generators that an interrupt ends say so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("make", [momentum, adam, masters, averaging])
def test_a_second_exception_while_a_step_is_noted_loses_nothing(
    make: Callable[[], gpuopt.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    note, seconds = unfinished.note_unfinished, []

    def note_interrupted(step: Any) -> None:
        with InterruptAt(choices.randint(1, 80), inside=["gpuopt/"]) as second:
            seconds.append(second)
            note(step)

    monkeypatch.setattr(gpuopt.step.step, "note_unfinished", note_interrupted)
    other = Training(make)
    other.one()
    before = other.arrays(), other.numbers()
    other.one()
    after = other.arrays(), other.numbers()
    number, choices = num_moments(make), random.Random(make.__name__)
    num_remembered = 0
    for _ in range(1_000 if FULL else 30):
        # The later ones write.
        first = choices.randint(number // 2, number)
        training = Training(make)
        training.one()
        with suppress(Interrupt), InterruptAt(first, inside=["gpuopt/"]):
            training.one()
        if unfinished.unfinished_steps():
            num_remembered += 1
            training.optimizer.accept_unfinished_step()
            assert same(training.numbers(), after[1]), first
            if make is masters:
                master = training.optimizer.get_slot(training.w, "master")
                assert master is not None
                rounded = master.numpy().astype(training.w.dtype)
                np.testing.assert_array_equal(rounded, training.w.numpy())
        else:
            now = training.arrays(), training.numbers()
            is_made = same(now[0], after[0])
            assert is_made or same(now[0], before[0]), first
            assert same(now[1], (after if is_made else before)[1]), first
        assert not unfinished.unfinished_steps()
        training.one()
    assert num_remembered > 5
    assert len([each for each in seconds if each.left <= 0]) > 5


def num_moments(make: Callable[[], gpuopt.Optimizer]) -> int:
    training, interrupts = Training(make), InterruptAt(100_000, inside=["gpuopt/"])
    training.one()
    with interrupts:
        training.one()
    return 100_000 - interrupts.left


def check_refusals(training: Training, folder: Path) -> None:
    saver = gpuopt.Saver([training.w], optimizers=[training.optimizer])
    calls: list[Callable[[], Any]] = [
        training.one,
        lambda: saver.save(folder / "model"),
        lambda: saver.save_async(folder / "model"),
        lambda: training.optimizer.state_dict(training.named),
        lambda: pickle.dumps(training.w),
        lambda: copy.deepcopy(training.table),
        lambda: copy.deepcopy(training.optimizer),
        lambda: gpuopt.MomentumOptimizer(0.1, 0.9).apply_gradients([(training.dense, training.w)]),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="was not finished; restore or load it"):
            call()


def check_launches(
    make: Callable[[], gpuopt.Optimizer], error: type[BaseException], folder: Path, *devices: str
) -> None:
    other = Training(make, *devices)
    other.one()
    other.one()
    after = other.numbers()
    other.one()
    remembered = 0
    for failing in range(100):
        training = Training(make, *devices)
        training.one()
        try:
            with failing_launch(failing, error):
                training.one()
            break
        except error:
            pass
        training.optimizer.check()
        if unfinished.unfinished_steps():
            remembered += 1
            check_refusals(training, folder)
            training.optimizer.accept_unfinished_step()
            assert training.numbers() == after, failing
        training.one()
        assert not unfinished.unfinished_steps()
    assert remembered


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("devices", [("gpu:0", "gpu:0"), ("gpu:0", "gpu:1"), ("cpu", "gpu:1")])
@pytest.mark.one_in(6)
def test_a_launch_that_fails_is_remembered(
    make: Callable[[], gpuopt.Optimizer], devices: tuple[str, str], tmp_path: Path
) -> None:
    check_launches(make, MemoryError, tmp_path, *devices)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("make", "error"), [*((make, KeyboardInterrupt) for make in KINDS), (adam, RuntimeError)]
)
def test_a_launch_of_cupys_that_fails_is_remembered(
    make: Callable[[], gpuopt.Optimizer], error: type[BaseException], tmp_path: Path
) -> None:
    check_launches(make, error, tmp_path, "gpu:0", "gpu:0")


class Failing(gpuopt.AdamOptimizer):
    """Fails once, after its updates."""

    fails = True

    @undoable
    def _finish(self, update_ops: Any, name_scope: str) -> None:
        if self.fails:
            raise MemoryError
        super()._finish(update_ops, name_scope)


def test_a_mirrored_step_is_remembered_by_all_copies() -> None:
    strategy = gpuopt.distributed.MirroredStrategy(["cpu", "cpu"])
    mirrored, other = (strategy.variable(np.zeros(3, np.float32)) for _ in range(2))
    optimizer = Failing(0.1)

    def step() -> None:
        optimizer.apply_gradients([(np.ones(3, np.float32), mirrored.local)])

    with pytest.raises(MemoryError):
        strategy.run(step)
    mirrored.replicas[1].storage.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        mirrored.assign([1.0, 2.0, 3.0])
    mirrored.replicas[1].storage.flags.writeable = True
    for copied in mirrored.replicas:
        with pytest.raises(RuntimeError, match="was not finished"):
            pickle.dumps(copied)
    pickle.dumps(other.replicas)
    optimizer.fails = False
    with pytest.raises(RuntimeError, match="was not finished"):
        strategy.run(step)
    optimizer.accept_unfinished_step()
    strategy.run(step)
    state = optimizer.state_dict(dict(enumerate(mirrored.replicas)))  # type: ignore[arg-type]
    assert float(state["non_slots"]["beta1_power"]) == pytest.approx(0.9**3)


def test_towers_remember_a_step() -> None:
    w, optimizer = Variable(np.zeros(3, np.float32), name="w"), Failing(0.1)
    towers = gpuopt.TowerOptimizer(optimizer)

    def loss() -> Any:
        return np.sum(w * 2.0)

    train = gpuopt.replicate(
        lambda batch: towers.minimize(loss, var_list=[w]), devices=["cpu", "cpu"]
    )
    with pytest.raises(MemoryError):
        train(np.zeros(2))
    with pytest.raises(RuntimeError, match="was not finished"):
        optimizer.state_dict()
    optimizer.fails = False
    towers.accept_unfinished_step()
    optimizer.state_dict()


def test_an_accumulated_step_is_remembered_and_calls_before_it_refused() -> None:
    w, inner = Variable(np.zeros(3, np.float32), name="w"), Failing(0.1)
    optimizer = gpuopt.GradientAccumulationOptimizer(inner, 2)
    pairs = [(np.ones(3, np.float32), w)]
    optimizer.apply_gradients(pairs)
    with pytest.raises(MemoryError):
        optimizer.apply_gradients(pairs)
    inner.fails = False
    with pytest.raises(RuntimeError, match='cannot be updated: a step of "Adam"'):
        optimizer.apply_gradients(pairs)
    optimizer.accept_unfinished_step()
    assert optimizer.accumulated_steps == 0
    for _ in range(2):
        optimizer.apply_gradients(pairs)
    np.testing.assert_allclose(w.numpy(), -0.2, rtol=1e-5)


def test_one_by_one_steps_count_as_writing_from_the_first_gradient_on() -> None:
    a, b = (Variable(np.zeros(3, np.float32)) for _ in range(2))
    optimizer, step = gpuopt.AdamOptimizer(0.1), Variable(0, dtype=np.int64)
    raises = True

    @autograd.extend.primitive
    def stopping(x: Any) -> Any:
        return x * 1

    def derivative(answer: Any, x: Any) -> Any:
        def pass_on(gradient: Any) -> Any:
            if raises:
                raise MemoryError
            return gradient

        return pass_on

    autograd.extend.defvjp(stopping, derivative)

    def loss() -> Any:
        return np.sum(stopping(a * 1.0)) + np.sum(b * 2.0)

    def minimize() -> None:
        optimizer.minimize(loss, step, [a, b], gate_gradients=gpuopt.Optimizer.GATE_NONE)

    with pytest.raises(MemoryError):
        minimize()
    assert b.numpy().any()
    assert not a.numpy().any()
    raises = False
    with pytest.raises(RuntimeError, match=f'"{b.name}" cannot be updated'):
        minimize()
    optimizer.accept_unfinished_step()
    assert int(step) == 1
    minimize()
    assert int(step) == 2


def test_a_large_step_is_finished_and_counted_before_ctrl_c() -> None:
    calls: list[str] = []

    class Interrupted(gpuopt.MomentumOptimizer):
        def _apply_dense(self, grad: Any, var: Variable) -> None:
            signal.raise_signal(signal.SIGINT)
            calls.append(var.name)
            super()._apply_dense(grad, var)

    w, step = Variable(np.zeros(100_001, np.float32), name="w"), Variable(0, dtype=np.int64)
    optimizer = Interrupted(1.0, 0.5)
    with pytest.raises(KeyboardInterrupt):
        optimizer.apply_gradients([(np.ones(100_001, np.float32), w)], step)
    assert calls == ["w"]
    assert (w.numpy() == -1).all()
    assert int(step) == 1
    assert not unfinished.begun
    other = Variable(np.zeros(100_001, np.float32), name="other")
    pairs = [(np.ones(100_001, np.float32), each) for each in (w, other)]
    with pytest.raises(KeyboardInterrupt):  # the second one ends it
        optimizer.apply_gradients(pairs, step)
    with pytest.raises(RuntimeError, match='"other" cannot be copied'):
        copy.deepcopy(other)
    optimizer.accept_unfinished_step()
    assert int(step) == 2


def test_a_restore_settles_what_it_covers(tmp_path: Path) -> None:
    w, v = (Variable(np.zeros(3, np.float32), name=name) for name in "wv")
    optimizer, step = Failing(0.1), Variable(0, name="step", dtype=np.int64)
    optimizer.fails = False
    pairs = [(np.ones(3, np.float32), each) for each in (w, v)]
    optimizer.apply_gradients(pairs, step)
    whole = gpuopt.Saver({"w": w, "v": v, "step": step}, optimizers=[optimizer])
    path = whole.save(tmp_path / "whole")
    of_w = gpuopt.Saver({"w": w}, optimizers=[optimizer])
    optimizer.fails = True
    with pytest.raises(MemoryError):
        optimizer.apply_gradients(pairs, step)
    of_w.restore(path)
    with pytest.raises(RuntimeError, match='"v" cannot be saved'):
        whole.save(tmp_path / "other")
    whole.restore(path)
    whole.save(tmp_path / "other")
    assert int(step) == 1


# Averages are the user's own: `assign` or a file that has them settles those.
@pytest.mark.parametrize(
    ("make", "is_file"),
    [
        *((make, True) for make in (momentum, clipped, masters, scaling_alone)),
        *((make, False) for make in (momentum, catching_up, counting, rounding, scaling_alone)),
    ],
)
def test_a_first_step_is_settled_by_a_state_from_before_it(
    make: Callable[[], gpuopt.Optimizer], is_file: bool, tmp_path: Path
) -> None:
    other = Training(make)
    for moment in range(num_moments_of_first(make), 0, -9):
        training = Training(make)
        named = {**training.named, "step": training.step}
        saver = gpuopt.Saver(named, optimizers=[training.optimizer])
        path, state = saver.save(tmp_path / "m"), training.optimizer.state_dict(training.named)
        with suppress(Interrupt), InterruptAt(moment, inside=["gpuopt/step/"]):
            training.one()
        if unfinished.unfinished_steps():
            break
    assert unfinished.unfinished_steps()
    kept = [training.optimizer.get_slot(training.w, name) for name in ("m", "momentum")]
    if is_file:
        saver.restore(path)
    else:
        training.optimizer.load_state_dict(state, training.named)
        for name, variable in training.named.items():
            variable.assign(other.named[name].numpy())
        training.step.assign(0)
    assert kept != [None, None]  # they are alive, and belong to nothing
    assert not unfinished.unfinished_steps()
    assert training.optimizer.state_dict(training.named) == state
    for each in (training, other):
        each.one()
        each.one()
    assert same(training.arrays(), other.arrays())
    assert training.numbers() == other.numbers()


def num_moments_of_first(make: Callable[[], gpuopt.Optimizer]) -> int:
    training, interrupts = Training(make), InterruptAt(100_000, inside=["gpuopt/step/"])
    with interrupts:
        training.one()
    return 100_000 - interrupts.left


def test_a_state_from_before_all_steps_is_refused_where_it_leaves_a_slot_out() -> None:
    v, w = (Variable(np.zeros(3, np.float32), name=name) for name in "vw")
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    before = optimizer.state_dict({"v": v, "w": w})
    optimizer.apply_gradients([(np.ones(3, np.float32), v)])
    of_v = optimizer.state_dict({"v": v, "w": w})
    optimizer.apply_gradients([(np.ones(3, np.float32), w)])
    with pytest.raises(ValueError, match='has no slot "momentum" of "v"'):
        optimizer.load_state_dict(before, {"v": v})
    with pytest.raises(ValueError, match='has no slot "momentum" of "w"'):
        optimizer.load_state_dict(of_v, {"v": v, "w": w})


class Hooked(gpuopt.MomentumOptimizer):
    """Fails where it is told to; what its hooks return is given to `_finish`."""

    fails_in = ""

    def _apply_dense(self, grad: Any, var: Variable) -> Any:
        super()._apply_dense(grad, var)
        self._fail("second" if var.identity.given_name == "second" else "")
        return var

    def _finish(self, update_ops: Any, name_scope: str) -> None:
        self._fail("finish")
        super()._finish(update_ops, name_scope)

    def _fail(self, place: str) -> None:
        if place and place == self.fails_in:
            raise MemoryError


@pytest.mark.parametrize(
    ("fails_in", "kept", "is_noted"),
    [
        ("second", "nothing", True),
        ("finish", "the optimizer", True),
        ("second", "a variable", True),
        ("finish", "nothing", False),
        ("second", "the optimizer", False),
        ("finish", "a variable", False),
    ],
)
def test_an_unfinished_step_keeps_nothing_alive(
    fails_in: str, kept: str, is_noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["first", "second", "step"]
    optimizer = Hooked(0.1, 0.9)
    optimizer.fails_in = fails_in
    first, second = (Variable(np.zeros(3, np.float32), name=name) for name in names[:2])
    step = Variable(0, name="step", dtype=np.int64)
    gradient = np.ones(3, np.float32)
    pairs = [(gradient, first), (gradient, second)]
    with monkeypatch.context() as patch:
        if not is_noted:
            patch.setattr(gpuopt.step.step, "note_unfinished", raise_interrupt)
        with pytest.raises(MemoryError if is_noted else KeyboardInterrupt):
            optimizer.apply_gradients(pairs, step)
    everything = [optimizer, first, second, step, gradient]
    held = {id(each): weakref.ref(each) for each in everything}
    keeps = {"nothing": [], "the optimizer": [optimizer], "a variable": [first]}[kept]
    del optimizer, first, second, step, gradient, pairs, everything
    gc.collect()
    new = {name: Variable(0, name=name) for name in names}
    assert {id(held_by()) for held_by in held.values() if held_by() is not None} == set(
        map(id, keeps)
    )
    assert [each.name for each in new.values()] == [
        "first_1" if kept == "a variable" else "first", "second", "step",
    ]  # fmt: skip
    assert bool(unfinished.unfinished_steps()) == (kept == "a variable")


def raise_interrupt(step: Any) -> None:
    raise KeyboardInterrupt


def test_what_is_gone_settles_itself() -> None:
    w, optimizer = Variable(np.zeros(3, np.float32)), Failing(0.1)
    with pytest.raises(MemoryError):
        optimizer.apply_gradients([(np.ones(3, np.float32), w)])
    [(step, _)] = unfinished.unfinished_steps()
    held = weakref.ref(step)
    del w, step
    gc.collect()
    assert unfinished.unfinished_steps() == []
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("is_scaled", [False, True])
def test_an_optimizer_that_is_gone_leaves_its_step_to_a_restore_or_assignments(
    is_scaled: bool, tmp_path: Path
) -> None:
    w, step = Variable(np.zeros(3, np.float32), name="w"), Variable(0, name="step", dtype=np.int64)
    pairs = [(np.ones(3, np.float32), w)]

    def restart() -> gpuopt.Optimizer:
        """Makes an optimizer as a cell of a notebook does that is run again."""
        return gpuopt.AdamOptimizer(0.1, name="Adam")

    def fail() -> None:
        failing: gpuopt.Optimizer = Failing(0.1, name="Adam")
        if is_scaled:
            failing = gpuopt.LossScaleOptimizer(failing, gpuopt.DynamicLossScale(1.0, 2))
        held.append(weakref.ref(failing))
        with pytest.raises(MemoryError):
            failing.apply_gradients(pairs, step)

    held: list[weakref.ref[Any]] = []
    optimizer = restart()
    optimizer.apply_gradients(pairs, step)
    path = gpuopt.Saver({"w": w, "step": step}, optimizers=[optimizer]).save(tmp_path / "model")
    for settles_by_restore in (True, False):
        fail()
        gc.collect()
        assert held[-1]() is None
        optimizer = restart()
        match = 'an optimizer that is gone .* assign what it may have written: "w"'
        with pytest.raises(RuntimeError, match=match):
            optimizer.apply_gradients(pairs, step)
        if settles_by_restore:
            gpuopt.Saver({"w": w, "step": step}, optimizers=[optimizer]).restore(path)
            assert int(step) == 1
        else:
            w.assign(w.numpy())
        optimizer.apply_gradients(pairs, step)
