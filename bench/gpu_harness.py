"""Times contenders in turn on a GPU: device time, and wall time.

Of `Figures.times`, "device" is the time on the device from the beginning of a step's first kernel
to the end of its last one, enqueued beforehand, with nothing in the caches that must be written
back. "device_dirty" is the same with caches full of data that must be; it is left out where the
clock does not tell one from the other. "wall" is the time of `wall_steps` steps and a wait for the
device, divided by their number. If a step `runs_ahead`, the host waits neither for the device nor
for room in the queue of launches.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter

from gpuopt.bench.clock import Clock, Step
from gpuopt.bench.results import Figures, make_figures
from gpuopt.bench.workloads import Workload

# A sample of wall time: this many steps, then one wait for the device. Fewer steps, if they would
# take longer than _MOST_SAMPLE_MS.
_WALL_STEPS = 100
_MOST_SAMPLE_MS = 1000.0
_FEWEST_STEPS = 3
_WARM_UP_STEPS = 3
_FEWEST_ROUNDS = 3
# The device is kept busy for this multiple of the time that the host needs to enqueue a step.
_HEAD_START = 1.5
_MOST_HEAD_START_MS = 200.0


def measure(
    workload: Workload,
    clock: Clock,
    copy_bytes_per_second: float,
    seconds: float,
    rounds: int = 50,
) -> dict[str, Figures]:
    """Times every contender once in each round, in a new order in each round.

    Args:
        workload: The contenders.
        clock: The device's clock.
        copy_bytes_per_second: The bandwidth of a copy, for comparison.
        seconds: The time limit; at least three rounds are made.
        rounds: The largest number of rounds, for each kind of time.
    """
    gc.collect()
    contenders = workload.contenders
    first = {name: _measure_wall_ms(clock, step, 1) for name, step in contenders.items()}
    for step in contenders.values():
        _measure_wall_ms(clock, step, _WARM_UP_STEPS)
    host_ms = {name: _measure_host_ms(clock, step) for name, step in contenders.items()}
    steps = {
        name: _choose_num_steps(_measure_wall_ms(clock, step, _FEWEST_STEPS))
        for name, step in contenders.items()
    }

    def device_ms(name: str, dirty: bool) -> float:
        head_start = min(_HEAD_START * host_ms[name], _MOST_HEAD_START_MS)
        return clock.device_ms(contenders[name], head_start, dirty=dirty)

    def wall_ms(name: str) -> float:
        return _measure_wall_ms(clock, contenders[name], steps[name])

    clean = partial(device_ms, dirty=False)
    device = _sample_in_turn(contenders, clean, seconds / 3, rounds)
    dirty: dict[str, list[float]] = {}
    if clock.can_be_dirty:
        dirty = _sample_in_turn(contenders, partial(device_ms, dirty=True), seconds / 6, rounds)
    wall = _sample_in_turn(contenders, wall_ms, seconds / 2, rounds)
    kinds = {"device": device, "device_dirty": dirty, "wall": wall}
    return {
        name: make_figures(
            {kind: samples[name] for kind, samples in kinds.items() if samples},
            workload.bytes_moved,
            copy_bytes_per_second / 1e9,
            wall_steps=steps[name],
            first_step_ms=round(first[name], 3),
            runs_ahead=clock.runs_ahead(step, host_ms[name]),
        )
        for name, step in contenders.items()
    }


def _sample_in_turn(
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


def _measure_wall_ms(clock: Clock, step: Step, count: int) -> float:
    clock.synchronize()
    started = perf_counter()
    for _ in range(count):
        step()
    clock.synchronize()
    return 1e3 * (perf_counter() - started) / count


def _measure_host_ms(clock: Clock, step: Step) -> float:
    clock.synchronize()
    started = perf_counter()
    step()
    return 1e3 * (perf_counter() - started)


def _choose_num_steps(step_ms: float) -> int:
    return max(_FEWEST_STEPS, min(_WALL_STEPS, int(_MOST_SAMPLE_MS / max(step_ms, 1e-6))))
