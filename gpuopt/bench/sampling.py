"""Times contenders in turn, with warm and with cold caches."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter

from gpuopt.bench.clock import Clock
from gpuopt.bench.contenders import Contender

# Longer than OpenMP's threads wait for more work in a busy loop.
REST_S = 0.01
# Below this, a sample of warm steps has several of them, up to the second number.
_SHORTEST_SAMPLE_MS = 2.0
_MOST_STEPS = 100
_WARM_UP_STEPS = 3
_FEWEST_ROUNDS = 5
# The device is kept busy for this multiple of the time that the host needs to enqueue a step.
_HEAD_START = 1.5
_MOST_HEAD_START_MS = 200.0


def take_samples(
    contenders: Mapping[str, Contender],
    clock: Clock,
    *,
    rounds: int,
    seconds: float,
    on_round: Callable[[], object],
) -> dict[str, dict[str, list[float]]]:
    """Times every contender once in each round, so that a machine's drift affects all alike.

    Returns, for each contender, its times of each kind in milliseconds, one for each round; see
    `Figures.times`. "warm" is the mean of some steps in a row; "cold_dirty" is left out where the
    clock does not tell it from "cold".

    Args:
        contenders: What is timed.
        clock: The device's clock.
        rounds: How many rounds, each in a new order.
        seconds: The time after which no round begins; five are made in any case.
        on_round: Called after each round.
    """
    gc.collect()
    host_ms, steps = {}, {}
    for name, contender in contenders.items():
        _time_steps(contender, clock, _WARM_UP_STEPS)
        host_ms[name] = min(_HEAD_START * _time_host(contender, clock), _MOST_HEAD_START_MS)
        step_ms = _time_steps(contender, clock, _WARM_UP_STEPS)
        steps[name] = max(1, min(_MOST_STEPS, round(_SHORTEST_SAMPLE_MS / max(step_ms, 1e-6))))
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}

    def sample(name: str) -> None:
        contender = contenders[name]
        times = {"cold": _time_cold(contender, clock, host_ms[name])}
        if clock.can_be_dirty and contender.finish is None:
            contender.prepare()
            times["cold_dirty"] = clock.device_ms(contender.step, host_ms[name], dirty=True)
        times["warm"] = _time_steps(contender, clock, steps[name])
        for kind, ms in times.items():
            samples[name].setdefault(kind, []).append(ms)
        rest()

    take_turns(contenders, sample, rounds, seconds, on_round)
    return samples


def rest() -> None:
    """Lets threads of other libraries come to rest, as the next contender needs their core."""
    time.sleep(REST_S)


def take_turns(
    names: Iterable[str],
    sample: Callable[[str], object],
    rounds: int,
    seconds: float = math.inf,
    on_round: Callable[[], object] = lambda: None,
) -> None:
    """Samples each name once in each round.

    Each round has a new order, because a contender's data stays in the caches for the next one. The
    orders are the same in every process.
    """
    order, shuffled = list(names), random.Random(0)
    deadline = perf_counter() + seconds
    for number in range(rounds):
        if number >= _FEWEST_ROUNDS and perf_counter() > deadline:
            break
        shuffled.shuffle(order)
        for name in order:
            sample(name)
        on_round()


def _time_cold(contender: Contender, clock: Clock, host_ms: float) -> float:
    contender.prepare()
    if contender.finish is None:
        return clock.device_ms(contender.step, host_ms)
    return clock.whole_ms(contender.step_to_its_end)


def _time_steps(contender: Contender, clock: Clock, count: int) -> float:
    """Returns the mean time of some steps that follow another one."""
    contender.prepare()
    contender.step()
    _wait(contender, clock)
    started = perf_counter()
    for _ in range(count):
        contender.step()
    _wait(contender, clock)
    return 1e3 * (perf_counter() - started) / count


def _time_host(contender: Contender, clock: Clock) -> float:
    contender.prepare()
    clock.synchronize()
    started = perf_counter()
    contender.step()
    return 1e3 * (perf_counter() - started)


def _wait(contender: Contender, clock: Clock) -> None:
    if contender.finish is not None:
        contender.finish()
    clock.synchronize()
