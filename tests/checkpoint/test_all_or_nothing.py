"""A restore, a load or an attach that is cut leaves everything as it was, on every device."""

from __future__ import annotations

import gc
import os
import random
import signal
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from interrupt_at import Interrupt, InterruptAt

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Saver, Variable, interrupts
from gpuopt.backends import backend_for
from gpuopt.distributed import MirroredStrategy
from gpuopt.variables import undo as undo_module
from gpuopt.variables.undo import all_or_nothing

MEGABYTE = 2**20
# Of each kind of call, of which there are three dozen.
MOMENTS = 400 if os.environ.get("GPUOPT_FULL") else 6
# What writes, and what makes what is written; `interrupts` itself is for Ctrl-C alone.
INSIDE = ("/gpuopt/state/", "/gpuopt/variables/", "/gpuopt/checkpoint/", "/gpuopt/wrappers/")

KINDS = [
    "plain", "averages", "catch_up", "stepping", "masters", "remainder", "slot_bits", "groups",
    "scaled", "accumulated", "rounded",
]  # fmt: skip


WAYS = ["restore", "load_state_dict", "load into a new one", "attach", "back to the start"]


class Model:
    """Two variables, a global step, and an optimizer of one kind, with averages or without."""

    def __init__(self, kind: str, device: str) -> None:
        self.kind, self.random = kind, np.random.default_rng(5)
        is_narrow = kind in ("masters", "remainder", "rounded")
        self.dtype = np.dtype(ml_dtypes.bfloat16 if is_narrow else np.float32)
        table, w = self.numbers(9, 4), self.numbers(40)
        self.variables = {
            "table": Variable(table, name="table", device=device),
            "w": Variable(w, name="w", device=device),
        }
        self.step = Variable(0, name="step", trainable=False, dtype=np.int64)
        self.averages: Any = None
        options: dict[str, Any] = {
            "catch_up": {"catch_up": True},
            "stepping": {"catch_up": "stepping"},
            "masters": {"masters": "float32"},
            "remainder": {"masters": "remainder"},
            "slot_bits": {"slot_bits": 8},
            "groups": {"groups": [ParameterGroup("table", learning_rate=0.25, beta1=0.5)]},
            "rounded": {"stochastic_rounding": 3},
        }.get(kind, {})
        if kind in ("averages", "catch_up", "scaled", "accumulated"):
            self.averages = options["averages"] = gpuopt.ExponentialMovingAverage(0.75)
        self.own = self.whole = gpuopt.AdamOptimizer(0.125, **options)
        if kind == "scaled":
            manager = gpuopt.DynamicLossScale(8.0, 2, 2.0)
            self.whole = gpuopt.LossScaleOptimizer(self.own, manager)
        if kind == "accumulated":
            self.whole = gpuopt.GradientAccumulationOptimizer(self.own, 3)

    def numbers(self, *shape: int) -> np.ndarray:
        return self.random.normal(size=shape).astype(self.dtype)

    def train(self, number: int) -> None:
        for _ in range(number):
            rows = IndexedSlices(self.numbers(3, 4), self.random.integers(0, 9, 3), (9, 4))
            pairs = [(rows, self.variables["table"]), (self.numbers(40), self.variables["w"])]
            self.whole.apply_gradients(pairs, self.step)

    def saver(self) -> Saver:
        if self.averages is None:
            return Saver({**self.variables, "step": self.step}, optimizers=[self.whole])
        averages = enumerate(self.averages.averages_of_variables())
        named = {f"average {place}": each for place, each in averages}
        variables = {**self.variables, **named, "step": self.step}
        return Saver(variables, optimizers=[self.whole])

    def look(self) -> dict[str, Any]:
        """Returns all numbers, with what there is besides."""
        state = self.whole.state_dict(dict(self.variables))
        found: dict[str, Any] = {"slots": sorted(self.own.get_slot_names())}
        for name, variable in (*self.variables.items(), ("step", self.step)):
            found[name] = variable.numpy()
        for slot_name, by_variable in state["slots"].items():
            found.update({f"{name}/{slot_name}": each for name, each in by_variable.items()})
        found.update(state["non_slots"])
        averages = self.averages.averages_of_variables() if self.averages else ()
        found.update({f"average {place}": each.numpy() for place, each in enumerate(averages)})
        found["number of the optimizer's variables"] = len(self.own.variables())
        found["waiting"] = (
            sorted(self.own.state.waiting_slots),
            sorted(self.own.state.waiting_others),
        )
        return found


def same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return some.keys() == others.keys() and all(
        np.array_equal(value, others[name]) and np.shape(value) == np.shape(others[name])
        if isinstance(value, np.ndarray)
        else value == others[name]
        for name, value in some.items()
    )


def trained(kind: str, device: str, way: str, folder: Path) -> tuple[Model, Callable[[], Any]]:
    """Returns a model in the middle of its training, and what goes back to an earlier state.

    Args:
        kind: One of `KINDS`.
        device: Where it is.
        way: What is to be called.
        folder: An empty one.
    """
    gc.collect()
    model = Model(kind, device)
    start = model.saver().save(folder / "start")
    model.train(4)
    if way == "back to the start":
        variables = {**model.variables, "step": model.step}
        return model, lambda: Saver(variables, optimizers=[model.whole]).restore(start)
    path = model.saver().save(folder / "model")
    state = model.whole.state_dict(dict(model.variables))
    model.train(2)
    if way == "restore":
        saver = model.saver()
        return model, lambda: saver.restore(path)
    if way == "load_state_dict":
        return model, lambda: model.whole.load_state_dict(state, dict(model.variables))
    # Slots that are not there yet: of a new optimizer.
    new = Model(kind, device)
    new.variables = model.variables
    if way == "load into a new one":
        return new, lambda: new.whole.load_state_dict(state, dict(model.variables))
    late = Saver({"step": new.step}, optimizers=[new.whole])
    late.restore(path, deferred=True)
    return new, lambda: late.attach(model.variables)


@pytest.fixture(params=["host", pytest.param("emulated", marks=pytest.mark.emulator)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "host":
        return "cpu"
    request.getfixturevalue("emulated_gpus")
    return "gpu:0"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(6)
def test_what_is_cut_at_any_moment_is_undone(
    kind: str, way: str, device: str, tmp_path: Path
) -> None:
    check_cut(kind, way, device, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["masters", "scaled", "slot_bits", "catch_up"])
@pytest.mark.one_in(4)
def test_what_is_cut_at_any_moment_is_undone_on_gpus(kind: str, way: str, tmp_path: Path) -> None:
    check_cut(kind, way, "gpu:0", tmp_path)


def check_cut(kind: str, way: str, device: str, folder: Path) -> None:
    model, whole = trained(kind, device, way, folder)
    count = InterruptAt(10**9, interrupts, INSIDE)
    with count:
        whole()
    after = model.look()
    model.train(1)
    later = model.look()
    del model, whole

    model, call = trained(kind, device, way, folder)
    before = model.look()
    chosen = random.Random(f"{kind} {way} {device}")
    num_cut = 0
    for _ in range(MOMENTS):
        # Most are those of what is read and checked: the later half has nearly all that is written.
        moment = chosen.randint((10**9 - count.left) // 2, 10**9 - count.left)
        with suppress(Interrupt), InterruptAt(moment, interrupts, INSIDE):
            call()
        now = model.look()
        if same(now, after):  # it came when all was written
            del model, call  # which have names
            model, call = trained(kind, device, way, folder)
        else:
            assert same(now, before)
            num_cut += 1
    assert num_cut >= MOMENTS // 3
    call()
    assert same(model.look(), after)
    model.train(1)
    assert same(model.look(), later)


def cut_by_error(patch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """Has an error come after the given write."""
    assign, calls = undo_module.Undo.assign, [0]

    def failing(self: Any, variable: Variable, value: Any) -> None:
        assign(self, variable, value)
        calls[0] += 1
        if calls[0] == number:
            raise error

    patch.setattr(undo_module.Undo, "assign", failing)


@pytest.mark.parametrize("number", [1, 2, 8, 9])
def test_a_write_without_memory_undoes_those_before(
    number: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, restore = trained("plain", device, "restore", tmp_path)
    before = model.look()
    with monkeypatch.context() as patch:
        cut_by_error(patch, number, MemoryError("no memory"))
        with pytest.raises(MemoryError, match="no memory"):
            restore()
    assert same(model.look(), before)
    restore()
    assert int(model.step) == 4


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no such signals")
@pytest.mark.parametrize("number_of_signals", [1, 2, 5])
def test_ctrl_c_waits_for_the_end_of_a_restore_and_a_second_one_undoes_it(
    number_of_signals: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, restore = trained("plain", "cpu", "restore", tmp_path)
    before = model.look()
    put_back = undo_module.Undo.put_back

    def interrupted(self: Any, error: BaseException) -> None:
        held_down = [signal.SIGINT] * (number_of_signals - 2)

        def press() -> None:
            while held_down:
                os.kill(os.getpid(), held_down.pop())

        for place in range(1, 5):
            self._entries.insert(place, ("a key", press))
        put_back(self, error)

    assign, calls = undo_module.Undo.assign, [0]

    def assign_interrupted(self: Any, variable: Variable, value: Any) -> None:
        calls[0] += 1
        if calls[0] in (3, 4)[:number_of_signals]:
            os.kill(os.getpid(), signal.SIGINT)
        assign(self, variable, value)

    with monkeypatch.context() as patch:
        patch.setattr(undo_module.Undo, "assign", assign_interrupted)
        patch.setattr(undo_module.Undo, "put_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            restore()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if number_of_signals == 1:
        assert int(model.step) == 4
        assert calls[0] == 9
    else:
        assert same(model.look(), before)
    restore()
    assert int(model.step) == 4


def test_a_swapped_restore_that_is_cut_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v = Variable(np.arange(3.0, dtype=np.float32), name="v")
    optimizer = gpuopt.MovingAverageOptimizer(gpuopt.MomentumOptimizer(1.0, 0.5), 0.5)
    ones = np.ones(3, np.float32)
    optimizer.apply_gradients([(ones, v)])
    saver = optimizer.swapping_saver()
    path = saver.save(tmp_path / "model")
    optimizer.apply_gradients([(ones, v)])
    average = optimizer.get_slot(v, "momentum"), optimizer.averages.average(v)
    before = [each.numpy() for each in (v, *average)]
    for number in range(1, 4):
        with monkeypatch.context() as patch:
            cut_by_error(patch, number, OSError("the device is gone"))
            with pytest.raises(OSError, match="gone"):
                saver.restore(path)
        for old, each in zip(before, (v, *average), strict=True):
            np.testing.assert_array_equal(each.numpy(), old)


@pytest.mark.emulator
def test_copies_of_a_mirrored_variable_are_assigned_together(
    emulated_gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = MirroredStrategy(["gpu:0", "gpu:1"])
    w = strategy.variable(np.zeros(3, np.float32), name="w")
    with monkeypatch.context() as patch:
        cut_by_error(patch, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            w.assign(np.ones(3, np.float32))
    assert [copy.numpy().tolist() for copy in w.replicas] == [[0, 0, 0], [0, 0, 0]]
    w.assign(np.ones(3, np.float32))
    assert [copy.numpy().tolist() for copy in w.replicas] == [[1, 1, 1], [1, 1, 1]]


def test_a_slot_in_8_bits_is_assigned_whole_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Variable(np.ones(300, np.float32), name="w")
    optimizer = gpuopt.AdamOptimizer(0.1, slot_bits=8)
    optimizer.apply_gradients([(np.linspace(0, 1, 300, dtype=np.float32), w)])
    slot: Any = optimizer.get_slot(w, "m")
    before = slot.numpy()
    with monkeypatch.context() as patch:
        cut_by_error(patch, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            slot.assign(np.full(300, 7.0, np.float32))
    np.testing.assert_array_equal(slot.numpy(), before)


@pytest.mark.emulator
def test_an_error_names_what_could_not_be_put_back(
    emulated_gpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, restore = trained("plain", "gpu:0", "restore", tmp_path)

    def gone(array: Any, values: Any) -> None:
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(backend_for(model.variables["w"].device), "overwrite", gone)
    cut_by_error(monkeypatch, 8, RuntimeError("a launch failed"))
    with pytest.raises(RuntimeError, match="a launch failed") as raised:
        restore()
    (note,) = raised.value.__notes__
    assert '"table/Adam" (RuntimeError: the GPU is gone)' in note
    assert "restore them" in note
    # What is in host memory was put back all the same.
    assert float(model.own.state.others()["beta1_power"]) == pytest.approx(0.9**7)


@pytest.mark.emulator
def test_a_restore_replaces_what_is_not_to_be_read(emulated_gpus: Any, tmp_path: Path) -> None:
    model, restore = trained("plain", "gpu:0", "restore", tmp_path)
    backend = backend_for(model.variables["w"].device)
    backend.refuse_reads("rank 1 did not come")
    restore()
    backend.refuse_reads(None)
    assert int(model.step) == 4


def test_a_restore_takes_no_memory_but_that_of_the_checkpoint(tmp_path: Path) -> None:
    variables = [Variable(np.ones(MEGABYTE // 4, np.float32), name=f"w{i}") for i in range(24)]
    optimizer = gpuopt.AdamOptimizer(0.1)
    saver = Saver(variables, optimizers=[optimizer])
    optimizer.apply_gradients([(np.ones(MEGABYTE // 4, np.float32), w) for w in variables])
    path = saver.save(tmp_path / "model")
    tracemalloc.start()  # which does not see the memory that files are read into
    saver.restore(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * MEGABYTE


def test_a_load_in_host_memory_takes_no_memory() -> None:
    w = Variable(np.ones(4 * MEGABYTE, np.float32), name="w")
    optimizer = gpuopt.AdamOptimizer(0.1)
    optimizer.apply_gradients([(np.ones(4 * MEGABYTE, np.float32), w)])
    state = optimizer.state_dict({"w": w})
    tracemalloc.start()
    optimizer.load_state_dict(state, {"w": w})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * MEGABYTE  # of 32; a look at ranges takes two bytes for an element of a slot


def test_what_is_written_in_full_stays_where_ctrl_c_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, restore = trained("plain", "cpu", "restore", tmp_path)
    finish = undo_module.Undo.finish

    def interrupted(self: Any) -> None:
        finish(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(undo_module.Undo, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        restore()
    monkeypatch.undo()
    found = model.look()
    restore()
    assert same(model.look(), found)
    assert int(model.step) == 4


def test_memory_of_a_value_that_is_written_twice_is_not_lent() -> None:
    v, w = Variable([1.0, 2.0]), Variable([3.0, 4.0])
    given = np.array([5, 6], np.float32)

    def write(undo: undo_module.Undo) -> None:
        undo.give([given, given])
        undo.assign(v, given)
        undo.assign(w, given)

    all_or_nothing(write)
    assert [v.numpy().tolist(), w.numpy().tolist()] == [[5, 6], [5, 6]]


def test_a_state_that_is_loaded_is_not_written_to(tmp_path: Path) -> None:
    model, _ = trained("plain", "cpu", "restore", tmp_path)
    state = model.whole.state_dict(dict(model.variables))
    kept = {name: array.copy() for name, array in state["slots"]["m"].items()}
    model.train(1)
    model.whole.load_state_dict(state, dict(model.variables))
    for name, array in state["slots"]["m"].items():
        np.testing.assert_array_equal(array, kept[name])
