"""A signal handler that steps, saves or restores in the middle of such a call gets an error."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupt_at import HandleAt

import gpuopt
from gpuopt import Variable
from gpuopt.backends import backend_for, to_device
from gpuopt.step.rule_updates import RuleUpdates
from gpuopt.variables.undo import Undo

# Signals in the middle of each call.
FULL = bool(os.environ.get("GPUOPT_FULL"))
NUMBER = 2_000 if FULL else 30
RATE, BETA1, BETA2 = 0.01, 0.9, 0.999
DEVICES = ["cpu", pytest.param("gpu:0", marks=pytest.mark.gpu)]
CALLS = ["step", "save", "state_dict", "restore", "load_state_dict"]


class Training:
    """Two variables and Adam, whose gradients are 1: after t steps, values are -t * RATE.

    Of the table, the gradient names three rows; the other three stay as they are.
    """

    def __init__(self, device: str, folder: Path) -> None:
        self.w = Variable(np.zeros(9_000, np.float32), name="w", device=device)
        self.table = Variable(np.zeros((6, 4), np.float32), name="table", device=device)
        self.step = Variable(0, name="step", trainable=False, dtype=np.int64)
        self.optimizer = gpuopt.AdamOptimizer(RATE, BETA1, BETA2, catch_up=True)
        self.other = gpuopt.GradientDescentOptimizer(RATE)
        self.saver = gpuopt.Saver(
            [self.w, self.table, self.step], optimizers=[self.optimizer], max_to_keep=2
        )
        self.folder = folder
        ones, rows = np.ones((3, 4), np.float32), np.arange(3, 6)
        sparse = gpuopt.IndexedSlices(*(to_device(each, self.w.device) for each in (ones, rows)))
        dense = to_device(np.ones(9_000, np.float32), self.w.device)
        self.pairs: list[Any] = [(dense, self.w), (sparse, self.table)]
        self.calls: dict[str, Callable[[], Any]] = {
            "step": partial(self.optimizer.apply_gradients, self.pairs, self.step),
            "step of another": partial(self.other.apply_gradients, self.pairs),
            "save": lambda: self.saver.save(folder / "saved", self.step),
            "state_dict": self.optimizer.state_dict,
            "restore": lambda: self.saver.restore(self.start),
            "load_state_dict": lambda: self.optimizer.load_state_dict(self.state_now()),
        }
        self.calls["step"]()
        self.start = gpuopt.Saver(
            [self.w, self.table, self.step], optimizers=[self.optimizer]
        ).save(folder / "start")
        self.state = 1, self.optimizer.state_dict()

    def state_now(self) -> Any:
        count = int(self.step.numpy())
        if count != self.state[0]:
            self.state = count, self.optimizer.state_dict()
        return self.state[1]

    def check(self) -> None:
        """Checks that everything is of one step."""
        named: dict[str, Any] = {"w": self.w, "table": self.table, "step": self.step}
        named |= self.optimizer.state.others()
        for slot in ("m", "v"):
            for own in ("w", "table"):
                named[f"{own}/{slot}"] = self.optimizer.get_slot(named[own], slot)
        values = {name: each.numpy() for name, each in named.items()}
        count = int(values["step"])
        expected = {
            "w": -RATE * count,
            "m": 1 - BETA1**count,
            "v": 1 - BETA2**count,
            "beta1_power": BETA1 ** (count + 1),
            "beta2_power": BETA2 ** (count + 1),
        }
        for name, each in values.items():
            if name != "step":
                kind = "w" if name == "table" else name.rsplit("/", 1)[-1]
                is_table = name.startswith("table")
                assert not is_table or not each[:3].any(), name
                value = each[3:] if is_table else each
                np.testing.assert_allclose(value, expected[kind], rtol=1e-3, err_msg=name)


@pytest.fixture
def handled_signal() -> Any:
    before = signal.getsignal(signal.SIGALRM)
    yield signal.SIGALRM
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("around", "call"),
    [
        *(("step", call) for call in (*CALLS, "step of another")),
        *((around, "step") for around in ("its scalars", "restore", "load_state_dict")),
    ],
)
def test_a_call_by_a_signal_handler_in_the_middle_of_another_raises_at_once(
    around: str,
    call: str,
    device: str,
    tmp_path: Path,
    handled_signal: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(device, tmp_path)
    owner: Any = Undo
    name = "assign"
    if around == "step":
        owner, name = type(backend_for(training.w.device)), "apply_dense"
    elif around == "its scalars":  # they are ready, and nothing is written yet
        owner, name, around = RuleUpdates, "fix_scalars", "step"
    write, caught = getattr(owner, name), []

    def handle(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="signal handler") as raised:
            training.calls[call]()
        caught.append(raised)

    def write_between_signals(*args: Any, **options: Any) -> None:
        signal.raise_signal(handled_signal)
        write(*args, **options)
        signal.raise_signal(handled_signal)

    signal.signal(handled_signal, handle)
    monkeypatch.setattr(owner, name, write_between_signals)
    training.calls[around]()
    monkeypatch.undo()
    assert len(caught) >= 2
    assert training.step.numpy() == (2 if around == "step" else 1)
    training.check()
    training.calls["step"]()
    training.check()


@pytest.mark.parametrize("call", ["step", "restore", "load_state_dict"])
def test_a_step_after_a_handlers_call_at_any_moment_follows_from_it(
    call: str, tmp_path: Path
) -> None:
    training = Training("cpu", tmp_path)
    for _ in range(3):
        training.calls["step"]()
    training.state_now()
    refused = 0

    def handle() -> None:
        nonlocal refused
        try:
            training.calls[call]()
        except RuntimeError as error:
            refused += "signal handler" in str(error)

    for moment in range(1, 10_000, 1 if FULL else 3):
        handled = HandleAt(moment, handle, ["gpuopt/step/", "gpuopt/optimizers/"])
        with handled:
            training.calls["step"]()
        if handled.is_over:
            break
        if call != "load_state_dict" or training.step.numpy() == 5:
            training.check()
        training.calls["restore"]()
        training.state = 1, training.optimizer.state_dict()
        for _ in range(3):
            training.calls["step"]()
        training.state_now()
    assert moment > 100
    assert refused > 30


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no such signals")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", CALLS)
def test_calls_by_signal_handlers_at_any_moment_work_or_raise_at_once(
    call: str, device: str, tmp_path: Path, handled_signal: signal.Signals
) -> None:
    training = Training(device, tmp_path)
    choices = random.Random(7)
    counts = {"refused": 0, "made": 0}
    is_inside, longest_s = False, 0.001
    errors: list[BaseException] = []

    def handle(*_: Any) -> None:
        if not is_inside:
            return
        began = time.monotonic()
        try:
            training.calls[choices.choice(CALLS)]()
            counts["made"] += 1
        except RuntimeError as error:
            counts["refused"] += 1
            if "signal handler" not in str(error) or time.monotonic() - began > 5:
                errors.append(error)
        except BaseException as error:
            errors.append(error)

    signal.signal(handled_signal, handle)
    training.calls["state_dict"]()
    while sum(counts.values()) < NUMBER:
        if call == "load_state_dict":
            training.calls["restore"]()  # as a step before the load may have come to nothing
            training.state_now()
        began, made = time.monotonic(), counts["made"]
        signal.setitimer(signal.ITIMER_REAL, choices.uniform(1e-6, 1.1 * longest_s))
        is_inside = True
        done = training.calls[call]()
        is_inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        longest_s = 0.9 * longest_s + 0.1 * (time.monotonic() - began)
        assert not errors
        is_alone = made == counts["made"]
        if call != "load_state_dict" or is_alone:
            training.check()
        if call == "save":
            training.saver.restore(done)
            training.check()
        if not is_alone or training.step.numpy() > 60:
            training.calls["restore"]()
    print(call, device, counts)
    assert counts["refused"] > NUMBER / 20
