"""Verdicts of comparisons: what noise alone, a slower machine and slower code come to."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from gpuopt.bench.compare import (
    Interval,
    Verdict,
    compare_results,
    find_differences,
    find_median,
    find_missing,
    find_ratio,
    judge,
    list_advice,
)
from gpuopt.bench.report import print_comparison
from gpuopt.bench.results import Results, Run, make_figures

# The first numbers that a process draws may take a second.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

NO_CHANGE = Interval(1.0, 1.0)
times = st.lists(st.floats(0.01, 100.0), min_size=5, max_size=40)


def noisy_times(rng: np.random.Generator, median_ms: float, rounds: int = 30) -> list[float]:
    """Times as machines give them: skewed, with a few that are several times as long."""
    usual = median_ms * np.exp(0.03 * rng.standard_normal(rounds))
    return list(np.where(rng.random(rounds) < 0.05, 3 * usual, usual))


def results(
    ours: list[float], copies: list[float], theirs: list[float] | None = None, cpu: str = "a CPU"
) -> Results:
    contenders = {
        name: make_figures({"warm": samples, "cold": samples}, 100, 1.0)
        for name, samples in {"gpuopt": ours, "torch fused": theirs or ours}.items()
    }
    run = Run("a task", 100, None, None, None, None, copies, 1.0, contenders)
    return Results("1", "a day", "cpu", {"cpu": cpu}, {"16m/adam/float32": run}, {})


def verdicts(new: Results, old: Results) -> set[Verdict]:
    return {each.verdict for each in compare_results(new, old)}


@pytest.mark.parametrize("n", [1, 2, 7, 10])
@pytest.mark.parametrize("miss", [0.5, 0.1, 0.01])
def test_the_median_is_in_its_interval_as_often_as_is_said(n: int, miss: float) -> None:
    """Each sample is below the median or above it with equal chance: tries all that may come."""
    missed = 0
    for sides in itertools.product((-1.0, 1.0), repeat=n):
        samples = [side * (1 + i / 100) for i, side in enumerate(sides)]
        low, high = find_median([5 + sample for sample in samples], miss)
        missed += not low <= 5 <= high
    assert missed / 2**n <= miss
    # And no shorter one is sure enough: the interval of all samples misses 2 of 2^n.
    is_finite = math.isfinite(find_median([1.0] * n, miss).high)
    assert is_finite == (2 / 2**n <= miss)


@PATIENT
@given(times, times, st.floats(0.1, 10.0))
def test_another_unit_of_time_changes_no_ratio(
    new: list[float], old: list[float], factor: float
) -> None:
    interval = find_ratio(new, old, 0.1)
    scaled = find_ratio([factor * t for t in new], [factor * t for t in old], 0.1)
    assert scaled == pytest.approx(interval)


@PATIENT
@given(times, times)
def test_a_comparison_the_other_way_round_says_the_opposite(
    new: list[float], old: list[float]
) -> None:
    opposite = {Verdict.SLOWER: Verdict.FASTER, Verdict.FASTER: Verdict.SLOWER}
    forth = judge(find_ratio(new, old, 0.1), NO_CHANGE)
    back = judge(find_ratio(old, new, 0.1), NO_CHANGE)
    assert back == opposite.get(forth, forth)


def test_noise_alone_is_neither_slower_nor_faster() -> None:
    rng = np.random.default_rng(0)
    found: set[Verdict] = set()
    for _ in range(300):
        one, other = (
            results(noisy_times(rng, 2.0), noisy_times(rng, 9.0), noisy_times(rng, 3.0))
            for _ in range(2)
        )
        found |= verdicts(one, other)
    assert found <= {Verdict.SAME, Verdict.AMBIGUOUS}


@pytest.mark.parametrize(
    ("factor", "expected"), [(1.3, Verdict.SLOWER), (0.7, Verdict.FASTER), (1.0, Verdict.SAME)]
)
def test_what_changed_by_much_more_than_noise_is_told(factor: float, expected: Verdict) -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        old = results(noisy_times(rng, 2.0, 100), noisy_times(rng, 9.0, 100))
        new = results(noisy_times(rng, factor * 2.0, 100), noisy_times(rng, 9.0, 100))
        assert verdicts(new, old) == {expected}


def test_a_change_as_large_as_the_tolerance_is_ambiguous() -> None:
    rng = np.random.default_rng(2)
    old = results(noisy_times(rng, 2.0), noisy_times(rng, 9.0))
    new = results(noisy_times(rng, 2.1), noisy_times(rng, 9.0))
    assert verdicts(new, old) == {Verdict.AMBIGUOUS}


def test_what_copies_became_slower_by_too_is_the_machines() -> None:
    rng = np.random.default_rng(3)
    old = results(noisy_times(rng, 2.0), noisy_times(rng, 9.0))
    throttled = results(noisy_times(rng, 2.6), noisy_times(rng, 11.7))
    assert verdicts(throttled, old) == {Verdict.AMBIGUOUS}
    # What is slower by more than copies are is slower.
    slower = results(noisy_times(rng, 4.0), noisy_times(rng, 11.7))
    assert verdicts(slower, old) == {Verdict.SLOWER}


def test_a_few_samples_force_no_verdict() -> None:
    few = results([1.0] * 5, [9.0] * 5)
    assert verdicts(results([2.0] * 5, [9.0] * 5), few) == {Verdict.AMBIGUOUS}
    [each, *_] = compare_results(few, few)
    assert each.interval == (0.0, math.inf)
    console = Console(width=160, file=StringIO())
    print_comparison(console, compare_results(few, few), [])
    shown = console.file.getvalue()
    assert shown.count("too few samples") == 4
    assert "inf" not in shown


@pytest.mark.parametrize("factor", [1.0, 1.1, 0.9])
def test_the_rounds_that_are_said_to_settle_it_mostly_do(factor: float) -> None:
    rng = np.random.default_rng(4)
    settled = []
    for _ in range(100):
        old, new = (
            results(noisy_times(rng, 2.0 * times, 14), noisy_times(rng, 9.0, 14))
            for times in (1.0, factor)
        )
        first = compare_results(new, old)[0]
        if first.rounds_to_settle is None:
            continue
        assert first.verdict is Verdict.AMBIGUOUS
        n = first.rounds_to_settle
        assert n > 14
        old, new = (
            results(noisy_times(rng, 2.0 * times, n), noisy_times(rng, 9.0, n))
            for times in (1.0, factor)
        )
        settled.append(compare_results(new, old)[0].verdict is not Verdict.AMBIGUOUS)
    assert len(settled) > 20
    assert np.mean(settled) > 0.6


def test_an_ambiguous_verdict_says_how_long_to_time_both() -> None:
    rng = np.random.default_rng(5)
    old, new = (
        results(noisy_times(rng, median_ms, 16), noisy_times(rng, 9.0, 16))
        for median_ms in (2.0, 2.3)
    )
    run = replace(new.runs["16m/adam/float32"], seconds=8.0)
    new.runs["16m/adam/float32"] = run
    comparisons = compare_results(new, old)
    assert comparisons[0].verdict is Verdict.AMBIGUOUS
    rounds = max(each.rounds_to_settle or 0 for each in comparisons)
    [advice] = list_advice(comparisons, new, old)
    # Sixteen rounds took eight seconds.
    expected = f"--rounds {rounds} --seconds {math.ceil(rounds / 2)}"
    assert advice == f"AMBIGUOUS: 16m/adam/float32: time both with {expected}"
    slow_machine = results([2.0] * 16, [11.7] * 16)
    [each, *_] = compare_results(slow_machine, old)
    assert (each.verdict, each.rounds_to_settle) == (Verdict.AMBIGUOUS, None)
    [advice] = list_advice([each], slow_machine, old)
    assert "copies differ" in advice
    steady = results([2.0] * 30, [9.0] * 30)
    assert list_advice(compare_results(steady, steady), steady, steady) == []


def test_a_file_without_copies_is_named_as_the_reason_for_no_verdict() -> None:
    with_copies, without = results([2.0] * 30, [9.0] * 30), results([4.0] * 30, [])
    assert verdicts(without, with_copies) == {Verdict.AMBIGUOUS}
    for new, old, reasons in (
        (without, with_copies, ["the new file has no times of copies"]),
        (with_copies, without, ["the old file has no times of copies"]),
        (without, without, ["the old file has no times", "the new file has no times"]),
    ):
        advice = list_advice(compare_results(new, old), new, old)
        for line, reason in zip(advice, reasons, strict=True):
            assert line.startswith(f"AMBIGUOUS: all runs: {reason}")


def test_only_what_both_have_is_compared() -> None:
    old = results([1.0] * 30, [9.0] * 30)
    assert compare_results(replace(old, runs={}), old) == []
    other = replace(old, runs={"160m/adam/float32": old.runs["16m/adam/float32"]})
    assert compare_results(other, old) == []


def test_what_one_side_lacks_is_named_with_its_reason() -> None:
    old = results([1.0] * 30, [9.0] * 30)
    [(name, run)] = old.runs.items()
    assert find_missing(old, old) == []
    no_task = replace(old, runs={}, not_run={name: "no memory"})
    assert find_missing(no_task, old) == [f"GONE: {name} (no memory)"]
    assert find_missing(old, no_task) == [f"NEW: {name} (no memory)"]
    fewer = replace(run, contenders={"gpuopt": run.contenders["gpuopt"]}, left_out={})
    without_torch = replace(old, runs={name: fewer})
    assert find_missing(without_torch, old) == [f"GONE: {name}, torch fused"]
    assert find_missing(old, without_torch) == [f"NEW: {name}, torch fused"]
    console = Console(width=160, file=StringIO())
    print_comparison(console, [], [], find_missing(no_task, old))
    assert console.file.getvalue() == f"  GONE: {name} (no memory)\n"


def test_machines_that_differ_are_named() -> None:
    old, new = (results([1.0] * 5, [9.0] * 5, cpu=cpu) for cpu in ("a CPU", "another CPU"))
    assert find_differences(new, old) == ["cpu: a CPU -> another CPU"]
    assert find_differences(old, old) == []
