"""The arithmetic of the model of many ranks."""

from __future__ import annotations

import numpy as np
import pytest

from bench.ranks import TARGETS
from bench.scale import (
    Network,
    Stragglers,
    best_backups,
    ring_s,
    wait_s,
)
from bench.targets import find_measured
from gpuopt.bench.results import make_figures
from gpuopt.bench.workloads import Workload, make_run

pytestmark = pytest.mark.internal


@pytest.mark.parametrize(("awaited", "started"), [(1, 1), (8, 8), (64, 64), (62, 64), (50, 64)])
def test_the_wait_is_the_mean_of_simulated_waits(awaited: int, started: int) -> None:
    stragglers = Stragglers(share=0.05)
    rng = np.random.default_rng(0)
    # By the inverse of the tail; what would be longer than the longest is as long.
    luck = rng.random((20_000, started))
    times = np.full(luck.shape, stragglers.compute_s)
    is_late = luck < stragglers.share
    tail = (luck[is_late] / stragglers.share) ** (-1 / stragglers.exponent)
    times[is_late] *= np.minimum(tail, stragglers.longest)
    waits = np.partition(times, awaited - 1, axis=1)[:, awaited - 1]
    error = 4 * waits.std() / np.sqrt(len(waits)) + 0.01 * waits.mean()
    assert wait_s(awaited, started, stragglers) == pytest.approx(waits.mean(), abs=error)


def test_backups_are_worth_more_where_more_ranks_are_late() -> None:
    gains = []
    for share in (0.001, 0.01, 0.1):
        stragglers = Stragglers(share=share)
        _, rate = best_backups(256, stragglers, lambda ranks: 0.0)
        gains.append(rate / (256 / wait_s(256, 256, stragglers)))
    assert gains == sorted(gains)
    assert gains[0] > 1


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_a_ring_takes_the_time_of_its_replay(ranks: int) -> None:
    network = Network(latency_s=3.0, bytes_per_s=10.0)
    # When each rank has each part of the sum: in a round, all pass on one part to their right.
    clock = np.zeros(ranks)
    part_s = network.latency_s + 1000 / ranks / network.bytes_per_s
    for _ in range(2 * (ranks - 1)):
        clock = np.maximum(clock, np.roll(clock, 1)) + part_s
    assert ring_s(ranks, 1000, network) == pytest.approx(clock.max())


def test_a_difference_is_judged_round_by_round() -> None:
    [target] = [target for target in TARGETS if target.quantity == "extra_ms"]
    samples = {"gpuopt": [1.0, 9.0, 3.0], "one process": [0.5, 8.8, 1.0]}
    figures = {name: make_figures({"step": each}, None, None) for name, each in samples.items()}
    assert find_measured(target, make_run(Workload("", {}), figures)) == 0.5
