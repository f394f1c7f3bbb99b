"""Measures one task with everything that can do it here."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from time import perf_counter
from typing import Any

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.backends.cpu.cores import read_cache_bytes
from gpuopt.bench.clock import Clock, GpuClock, HostClock, Step, make_gpu_copy
from gpuopt.bench.contenders import Contender, StepMaker, as_contender, compiled_as_now
from gpuopt.bench.jobs import Place
from gpuopt.bench.machine import count_free_bytes, make_host_copy
from gpuopt.bench.memory import measure_gpu_peak, measure_host_peak
from gpuopt.bench.profiler import count_calls, count_our_calls
from gpuopt.bench.results import Copies, Run, make_figures, warn_of_spread
from gpuopt.bench.sampling import take_samples
from gpuopt.bench.slowdowns import (
    GpuThrottling,
    compare_counters,
    find_drift,
    find_load,
    read_counters,
)
from gpuopt.bench.workloads import Task, make_contenders, make_run
from gpuopt.device import Device

_COPY = "copy"
# At least; and twice the caches.
_HOST_COPY_BYTES = 64 * 2**20
_GPU_COPY_BYTES = 2**30
_OUT_OF_SIGHT = "it has streams and memory of its own"


@dataclass(frozen=True)
class Bench:
    """Where tasks are measured.

    Attributes:
        name: "cpu", or the GPU's name.
        place: Where arrays are.
        clock: The device's.
        make_copy: Makes the copy that bandwidths are compared with, and allocates its arrays.
        copy_bytes: How many bytes it reads and writes.
        bus_id: The GPU's address on the PCI bus; None for the host.
    """

    name: str
    place: Place
    clock: Clock
    make_copy: Callable[[], Step]
    copy_bytes: int
    bus_id: str | None = None

    @cached_property
    def copy(self) -> Step:
        return self.make_copy()

    @property
    def on_gpu(self) -> bool:
        return not self.place.on_host

    def measure_copies(self, rounds: int = 20) -> Copies:
        """Times copies whose data are in no cache, and frees them."""
        copy = self.make_copy()
        copy()
        return Copies([self.clock.device_ms(copy, 0.5) for _ in range(rounds)], self.copy_bytes)

    def watch_throttling(self) -> GpuThrottling | None:
        """Makes what sees whether a GPU is throttled while it is timed."""
        if self.bus_id is None:
            return None

        def keep_busy() -> None:
            self.copy()
            self.clock.synchronize()

        return GpuThrottling(self.bus_id, keep_busy)

    def count_free_bytes(self) -> int | None:
        """Frees what earlier tasks have left; returns how much memory there is, if known."""
        gc.collect()
        if not self.on_gpu:
            return count_free_bytes()
        cupy = self.place.xp
        cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()
        return int(cupy.cuda.runtime.memGetInfo()[0])


def prepare(device: Device) -> Bench:
    """Prepares the host's memory or a GPU for measurements."""
    if device == Device.cpu:
        cache_bytes = read_cache_bytes()
        size = max(_HOST_COPY_BYTES, 2 * cache_bytes)
        clock = HostClock(2 * cache_bytes)
        return Bench("cpu", Place(np, "cpu"), clock, partial(make_host_copy, size), 2 * size)
    cupy = backend_for(device).xp
    cupy.cuda.Device(device.index).use()
    runtime = cupy.cuda.runtime
    name = runtime.getDeviceProperties(device.index)["name"].decode()
    bus_id = runtime.deviceGetPCIBusId(device.index)
    place = Place(cupy, f"cuda:{device.index}")
    make_copy = partial(make_gpu_copy, cupy, _GPU_COPY_BYTES)
    return Bench(name, place, GpuClock(cupy), make_copy, 2 * _GPU_COPY_BYTES, bus_id)


def measure(
    bench: Bench,
    task: Task,
    job_name: str,
    dtype: str,
    *,
    rounds: int,
    seconds: float,
    on_round: Callable[[], object] = lambda: None,
    users: Sequence[tuple[str, StepMaker]] = (),
) -> Run:
    """Measures a task.

    Args:
        bench: Where.
        task: What a step updates.
        job_name: The optimizer, among `JOBS`.
        dtype: Of the variables.
        rounds: How many times each contender is sampled at most.
        seconds: The time after which no round begins; five are made in any case.
        on_round: Called after each round.
        users: A user's own contenders: their names, and what makes their steps.
    """
    workload = make_contenders(task, job_name, dtype, bench.place, users)
    contenders = {name: as_contender(step) for name, step in workload.contenders.items()}
    before, started = read_counters(), perf_counter()
    warnings = find_load()
    throttling = bench.watch_throttling()

    def after_round() -> None:
        on_round()
        if throttling is not None:
            throttling.note_round()

    with compiled_as_now():
        samples = take_samples(
            {**contenders, _COPY: Contender(bench.copy)},
            bench.clock,
            rounds=rounds,
            seconds=seconds,
            on_round=after_round,
        )
        rounds_took = perf_counter() - started
        kept = {name: _measure_kept(bench, each) for name, each in contenders.items()}
    uncounted = {name: str(why) for name, each in kept.items() if (why := each.pop("why", None))}
    warnings += compare_counters(before, read_counters(), perf_counter() - started)
    if throttling is not None:
        warnings += throttling.explain()
    copies = Copies(samples.pop(_COPY)["cold"], bench.copy_bytes)
    warnings += find_drift(copies.samples_ms)
    figures = {
        name: make_figures(samples[name], workload.bytes_moved, copies.gb_per_s, **of_one)
        for name, of_one in kept.items()
    }
    noisy = [
        name
        for name, each in figures.items()
        if each.times["warm"].is_noisy or each.times["cold"].is_noisy
    ]
    if noisy:
        warnings.append(warn_of_spread(noisy))
    others = {"warnings": warnings, "uncounted": uncounted, "seconds": round(rounds_took, 3)}
    return make_run(workload, figures, copies, curve=task.curve, at=task.at, **others)


def _measure_kept(bench: Bench, contender: Contender) -> dict[str, Any]:
    """Measures the figures that are no times; "why" launches are not counted."""
    contender.prepare()
    if not bench.on_gpu:
        peak = measure_host_peak(contender.step)
        return {"peak_extra_bytes": peak, "state_bytes": contender.count_state_bytes()}
    if contender.finish is not None:
        return {"state_bytes": contender.count_state_bytes(), "why": _OUT_OF_SIGHT}
    count = count_our_calls if contender.is_ours else count_calls
    calls = count(contender.step, bench.clock)
    counted = {"why": calls} if isinstance(calls, str) else calls._asdict()
    peak = measure_gpu_peak(contender.step, bench.clock, bench.place.xp)
    return {
        "peak_extra_bytes": peak,
        "state_bytes": contender.count_state_bytes(),
        **counted,
    }
