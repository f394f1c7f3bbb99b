"""Times contenders in turn on a GPU: on the device alone, and as the user waits."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

from bench.gpu_clock import Clock, Step
from bench.harness import Timing, Workload, timing

# A sample of the time that passes for the user: this many steps, then one wait for the device.
# Fewer, where that would take longer than _MOST_SAMPLE_MS.
_WALL_STEPS = 100
_MOST_SAMPLE_MS = 1000.0
_FEWEST_STEPS = 3
_WARM_UP_STEPS = 3
_FEWEST_ROUNDS = 3
# How much longer the device waits than the host took when nothing kept it.
_HEAD_START = 1.5
_MOST_HEAD_START_MS = 200.0


@dataclass(frozen=True)
class Measured:
    """One contender's times.

    Attributes:
        device: From the beginning of a step's first kernel to the end of its last, on the device,
            for which the host's work was done before; memory and speed are counted by it.
        wall: Of `wall_steps` steps and a wait for the device, divided by them.
        wall_steps: In each sample of `wall`.
        first_step_ms: Of the very first step, which may compile.
        runs_ahead: Whether the host is through with a step before the device has begun it, so that
            it never waits for the device (nor for room in the queue of launches).
    """

    device: Timing
    wall: Timing
    wall_steps: int
    first_step_ms: float
    runs_ahead: bool | None


def measure(
    workload: Workload,
    clock: Clock,
    copy_bytes_per_second: float,
    seconds: float,
    rounds: int = 50,
) -> dict[str, Measured]:
    """Times every contender once in each round, in an order that is new in each.

    Args:
        workload: What to run.
        clock: Of the device.
        copy_bytes_per_second: What bandwidth is compared with.
        seconds: How long that may take; three rounds are made in any case.
        rounds: How many there are at the most, of either kind of time.
    """
    gc.collect()
    contenders = workload.contenders
    first = {name: _wall_ms(clock, step, 1) for name, step in contenders.items()}
    for step in contenders.values():
        _wall_ms(clock, step, _WARM_UP_STEPS)
    host_ms = {name: _host_ms(clock, step) for name, step in contenders.items()}
    steps = {
        name: _num_steps(_wall_ms(clock, step, _FEWEST_STEPS)) for name, step in contenders.items()
    }

    def device_ms(name: str) -> float:
        head_start = min(_HEAD_START * host_ms[name], _MOST_HEAD_START_MS)
        return clock.device_ms(contenders[name], head_start)

    def wall_ms(name: str) -> float:
        return _wall_ms(clock, contenders[name], steps[name])

    device = _in_turn(contenders, device_ms, seconds / 3, rounds)
    wall = _in_turn(contenders, wall_ms, seconds * 2 / 3, rounds)
    return {
        name: Measured(
            timing(workload, device[name], device["gpuopt"], None, copy_bytes_per_second),
            timing(workload, wall[name], wall["gpuopt"], None, copy_bytes_per_second),
            steps[name],
            round(first[name], 3),
            clock.runs_ahead(step, host_ms[name]),
        )
        for name, step in contenders.items()
    }


def _in_turn(
    contenders: Mapping[str, Step], sample: Callable[[str], float], seconds: float, rounds: int
) -> dict[str, list[float]]:
    shuffled = random.Random(0)
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    deadline = perf_counter() + seconds
    for round_number in range(rounds):
        if round_number >= _FEWEST_ROUNDS and perf_counter() > deadline:
            break
        shuffled.shuffle(names)
        for name in names:
            samples[name].append(sample(name))
    return samples


def _wall_ms(clock: Clock, step: Step, count: int) -> float:
    clock.synchronize()
    started = perf_counter()
    for _ in range(count):
        step()
    clock.synchronize()
    return 1e3 * (perf_counter() - started) / count


def _host_ms(clock: Clock, step: Step) -> float:
    clock.synchronize()
    started = perf_counter()
    step()
    return 1e3 * (perf_counter() - started)


def _num_steps(step_ms: float) -> int:
    return max(_FEWEST_STEPS, min(_WALL_STEPS, int(_MOST_SAMPLE_MS / max(step_ms, 1e-6))))
