"""A model of one step on many ranks: the network, stragglers, and backup workers.

`bench.pages` writes its tables into docs/scale.md. Of what goes into them, `bench.ranks` has
measured the time of a message between two processes and of reductions on one host; all else is
assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from gpuopt.distributed.communicators.host_communicator import default_bucket_bytes

RANKS = tuple(2**i for i in range(13))

_BACKUPS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Of the logarithm of time: the curve has no features.
_STEPS = 200


@dataclass(frozen=True)
class Network:
    """What joins the ranks: the time from one to another, and each rank's bandwidth each way."""

    latency_s: float = 2e-6
    bytes_per_s: float = 12.5e9


@dataclass(frozen=True)
class Stragglers:
    """How long a rank computes: `compute_s`, or, seldom, far longer.

    A rank takes longer than t with the probability `share * (t / compute_s) ** -exponent`, for t
    from `compute_s` to `longest * compute_s`.
    """

    compute_s: float = 0.1
    share: float = 0.01
    exponent: float = 1.5
    longest: float = 30.0

    def late(self, seconds: float) -> float:
        """Returns the probability that a rank takes longer."""
        times = seconds / self.compute_s
        if times < 1:
            return 1.0
        return 0.0 if times >= self.longest else self.share * times**-self.exponent


def ring_s(ranks: int, num_bytes: float, network: Network) -> float:
    """Returns the time of a ring's all-reduce (Patarasuk and Yuan 2009)."""
    rounds = 2 * (ranks - 1)
    return rounds * (network.latency_s + num_bytes / ranks / network.bytes_per_s)


def tree_s(ranks: int, num_bytes: float, network: Network) -> float:
    """Returns the time to add up along a binomial tree, and to send the sum back along it."""
    rounds = 2 * math.ceil(math.log2(ranks))
    return rounds * (network.latency_s + num_bytes / network.bytes_per_s)


def shares_s(ranks: int, num_bytes: float, network: Network, message_s: float) -> float:
    """Returns the time of `MPICommunicator`, each of whose ranks writes to each other one.

    Args:
        ranks: How many there are.
        num_bytes: Of each rank's arrays.
        network: What joins them.
        message_s: What one message costs the processes that send and receive it.
    """
    if ranks == 1:
        return 0.0
    moved = 2 * (ranks - 1) / ranks * num_bytes / network.bytes_per_s
    return 2 * network.latency_s + max(moved, _num_messages(ranks, num_bytes) * message_s)


def on_one_host_s(
    ranks: int, num_bytes: float, message_s: float, bytes_per_s: float, cores: int
) -> float:
    """Returns the time of `MPICommunicator` where messages are copies, and ranks may share cores.

    Args:
        ranks: How many there are.
        num_bytes: Of each rank's arrays.
        message_s: What one message costs.
        bytes_per_s: How fast a core copies or adds up.
        cores: How many there are.
    """
    # All is packed; what comes from others is copied; each rank adds up its share.
    passes = 1 + 2 * (ranks - 1) / ranks + (ranks - 1) / ranks
    alone = _num_messages(ranks, num_bytes) * message_s + passes * num_bytes / bytes_per_s
    return alone * max(1.0, ranks / cores)


def _num_messages(ranks: int, num_bytes: float) -> int:
    """Counts a rank's headers and blocks to others."""
    return (ranks - 1) * (1 + 2 * math.ceil(num_bytes / default_bucket_bytes(ranks)))


def chief_s(ranks: int, num_bytes: float, network: Network) -> float:
    """Returns the time in which a chief gets all ranks' gradients, and sends variables back."""
    return 2 * (network.latency_s + ranks * num_bytes / network.bytes_per_s)


@cache
def wait_s(awaited: int, started: int, stragglers: Stragglers) -> float:
    """Returns the mean time until `awaited` of `started` ranks have computed.

    It is the integral, over time, of the probability that too many are late.
    """
    spare = started - awaited
    growth = stragglers.longest ** (1 / _STEPS)
    total = time = stragglers.compute_s
    for _ in range(_STEPS):
        late = stragglers.late(time * growth**0.5)
        total += (growth - 1) * time * _more_than(spare, started, late)
        time *= growth
    return total


def best_backups(
    ranks: int, stragglers: Stragglers, reduce_s: Callable[[int], float]
) -> tuple[int, float]:
    """Finds how many of the ranks are best not waited for.

    Args:
        ranks: All of them.
        stragglers: How long they compute.
        reduce_s: The time to combine so many ranks' gradients.

    Returns:
        Their number, and the gradients that count in a second.
    """
    rates = []
    for backups in [each for each in _BACKUPS if each <= ranks // 2]:
        counted = ranks - backups
        seconds = wait_s(counted, ranks, stragglers) + reduce_s(ranks)
        rates.append((counted / seconds, -backups))
    rate, backups = max(rates)
    return -backups, rate


def _more_than(number: int, trials: int, probability: float) -> float:
    """Returns the probability of more than `number` successes (the binomial distribution)."""
    if probability <= 0 or number >= trials:
        return 0.0
    if probability >= 1:
        return 1.0
    odds = math.log(probability) - math.log1p(-probability)
    logarithm = trials * math.log1p(-probability)
    at_most = 0.0
    for successes in range(number + 1):
        at_most += math.exp(logarithm)
        logarithm += math.log((trials - successes) / (successes + 1)) + odds
    return max(0.0, 1.0 - at_most)
