"""Compares results with earlier ones, and gives no verdict that the samples do not carry.

The rule. Each median has an interval by the sign test: that of n samples as many lie below as above
with equal chance, so that the binomial distribution says between which of the ordered samples it
is. No shape of the distribution is assumed, and nothing is drawn at random. The intervals of all
comparisons of a file hold together with 99%, for each is made for its share of the 1% (Bonferroni).
From the two intervals follows one of the new time divided by the old one:

* SLOWER: all of it is above 1 + tolerance, and above what copies became slower by, times that.
* FASTER: all of it is below 1 / (1 + tolerance), and below that divided by what copies became
  faster by.
* SAME: all of it is within the tolerance, and copies are the same, too.
* AMBIGUOUS: anything else. More rounds make the intervals smaller: it is said how many of both
  results would give another verdict if they had the same samples over and over.

Copies are the control. What changed them, too, is the machine, and not the program. Without their
times, which `python -m bench` does not always take, everything is AMBIGUOUS.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from gpuopt.bench.results import Results

TOLERANCE = 0.05
_CONFIDENCE = 0.99
# How many times as many rounds may be recommended.
_MORE_ROUNDS = (2, 3, 4, 6, 8, 12, 16, 24)
_Pair = tuple[list[float], list[float]]


class Verdict(StrEnum):
    """What a comparison says of the new time."""

    SAME = "SAME"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    AMBIGUOUS = "AMBIGUOUS"


class Interval(NamedTuple):
    """Where a number is; infinite where the samples are too few."""

    low: float
    high: float

    def divided_by(self, other: Interval) -> Interval:
        """Returns where the quotient of two positive numbers is."""
        return Interval(self.low / other.high, self.high / other.low if other.low else math.inf)


class Comparison(NamedTuple):
    """One contender's time beside its time in earlier results.

    Attributes:
        run: The run's name.
        contender: Its name.
        caches: "warm" or "cold"; or the kind of another benchmark's times.
        ratio: The new median divided by the old one.
        interval: Where this is.
        verdict: By the rule above.
        rounds_to_settle: Where this is AMBIGUOUS: with how many rounds of both it would not be.
            None where they would be too many.
    """

    run: str
    contender: str
    caches: str
    ratio: float
    interval: Interval
    verdict: Verdict
    rounds_to_settle: int | None = None


def compare_results(new: Results, old: Results, tolerance: float = TOLERANCE) -> list[Comparison]:
    """Compares what both results have, contender by contender, with warm and cold caches."""
    pairs = [
        (name, contender, caches)
        for name, run in new.runs.items()
        if name in old.runs
        for contender in run.contenders
        if contender in old.runs[name].contenders
        for caches in run.kinds
        if caches in old.runs[name].kinds
    ]
    # Two medians of each pair, and two of the copies of each run.
    num_intervals = 2 * len(pairs) + 2 * len({name for name, _, _ in pairs})
    miss = (1 - _CONFIDENCE) / max(1, num_intervals)
    copies = {name: (new.runs[name].copy_ms, old.runs[name].copy_ms) for name, _, _ in pairs}
    of_copies = {name: find_ratio(*pair, miss) for name, pair in copies.items()}
    comparisons = []
    for name, contender, caches in pairs:
        fresh, earlier = (
            results.runs[name].contenders[contender].times[caches] for results in (new, old)
        )
        samples = fresh.samples_ms, earlier.samples_ms
        interval = find_ratio(*samples, miss)
        verdict = judge(interval, of_copies[name], tolerance)
        rounds = None
        if verdict is Verdict.AMBIGUOUS:
            rounds = _rounds_to_settle(samples, copies[name], miss, tolerance)
        ratio = fresh.median_ms / earlier.median_ms
        comparisons.append(Comparison(name, contender, caches, ratio, interval, verdict, rounds))
    return comparisons


def list_advice(comparisons: Sequence[Comparison], new: Results, old: Results) -> list[str]:
    """Says of each run how long to time it, new and old, so that gpuopt's times are settled."""
    advice = []
    compared = {each.run for each in comparisons}
    without: set[str] = set()
    for which, results in (("old", old), ("new", new)):
        lacking = [
            name for name in results.runs if name in compared and not results.runs[name].copy_ms
        ]
        if lacking:
            names = "all runs" if compared <= set(lacking) else ", ".join(lacking)
            advice.append(
                f"AMBIGUOUS: {names}: the {which} file has no times of copies, without which a "
                "slower machine is not told from a slower program"
            )
        without.update(lacking)
    for name in [name for name in new.runs if name not in without]:
        run = new.runs[name]
        ambiguous = [
            each
            for each in comparisons
            if each.run == name
            and each.verdict is Verdict.AMBIGUOUS
            and each.contender.startswith("gpuopt")
        ]
        settled = [each.rounds_to_settle for each in ambiguous if each.rounds_to_settle]
        if len(settled) < len(ambiguous):
            advice.append(
                f"AMBIGUOUS: {name}: more rounds would not settle it: copies differ, or the change "
                "is about as large as the tolerance"
            )
        elif settled:
            rounds = max(settled)
            seconds = ""
            if run.seconds is not None:
                seconds = f" --seconds {math.ceil(run.seconds / run.rounds * rounds)}"
            advice.append(f"AMBIGUOUS: {name}: time both with --rounds {rounds}{seconds}")
    return advice


def find_missing(new: Results, old: Results) -> list[str]:
    """Says which runs and contenders one of two results lacks, with the reason if it has one."""
    missing = []
    for word, there, elsewhere in (("GONE", old, new), ("NEW", new, old)):
        for name, run in there.runs.items():
            other = elsewhere.runs.get(name)
            if other is None:
                missing.append(_name_missing(word, name, elsewhere.not_run.get(name)))
                continue
            missing += [
                _name_missing(word, f"{name}, {contender}", other.left_out.get(contender))
                for contender in run.contenders
                if contender not in other.contenders
            ]
    return missing


def judge(interval: Interval, copies: Interval, tolerance: float = TOLERANCE) -> Verdict:
    """Judges a ratio of times.

    Args:
        interval: Where the ratio of the new time to the old one is.
        copies: Where the ratio of the times of copies is.
        tolerance: By how much times may differ that are called the same.
    """
    limit = 1 + tolerance
    if interval.low > limit * max(1.0, copies.high):
        return Verdict.SLOWER
    if interval.high < min(1.0, copies.low) / limit:
        return Verdict.FASTER
    if all(1 / limit <= end <= limit for end in (*interval, *copies)):
        return Verdict.SAME
    return Verdict.AMBIGUOUS


def find_ratio(new: Sequence[float], old: Sequence[float], miss: float) -> Interval:
    """Returns where the ratio of two medians is; each interval fails with probability `miss`."""
    return find_median(new, miss).divided_by(find_median(old, miss))


def find_median(samples: Sequence[float], miss: float) -> Interval:
    """Returns an interval that the median of the samples' distribution is in.

    Args:
        samples: Independent samples.
        miss: With at most this probability, the median is outside.
    """
    ordered = sorted(samples)
    n = len(ordered)
    # The median is below the sample k, counted from 0, if at most k samples are below the median.
    below, outside = 0.0, -1
    for k in range((n + 1) // 2):
        below += math.comb(n, k) / 2**n
        if 2 * below > miss:
            break
        outside = k
    if outside < 0:
        return Interval(0.0, math.inf)
    return Interval(ordered[outside], ordered[n - 1 - outside])


def find_differences(new: Results, old: Results) -> list[str]:
    """Says in what the machines and libraries of two results differ."""
    differences = []
    if new.device != old.device:
        differences.append(f"device: {old.device} -> {new.device}")
    described: tuple[Mapping[str, object], Mapping[str, object]] = new.machine, old.machine
    for key in sorted({*described[0], *described[1]}):
        now, then = (each.get(key) for each in described)
        if now != then:
            differences.append(f"{key}: {then} -> {now}")
    return differences


def _rounds_to_settle(times: _Pair, copies: _Pair, miss: float, tolerance: float) -> int | None:
    """Returns `Comparison.rounds_to_settle`: as if each sample had come several times.

    Args:
        times: The samples of the two results.
        copies: Those of copies.
        miss: See `find_median`.
        tolerance: See `judge`.
    """
    for factor in _MORE_ROUNDS:
        of_times, of_copies = (
            find_ratio(factor * new, factor * old, miss) for new, old in (times, copies)
        )
        if judge(of_times, of_copies, tolerance) is not Verdict.AMBIGUOUS:
            # The samples' median may be farther from the tolerance than the true one is.
            return 2 * factor * min(map(len, times))
    return None


def _name_missing(word: str, name: str, reason: str | None) -> str:
    return f"{word}: {name} ({reason})" if reason else f"{word}: {name}"
