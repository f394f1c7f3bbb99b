"""The results of `gpuopt bench` and of `python -m bench`: statistics, and the file of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from gpuopt.atomic_file import replace_file
from gpuopt.bench.jobs import JOBS, LAZY_ADAM

FORMAT = 1
# Of times, in the order in which tables show them; see `Figures.times`.
KINDS = ("step", "warm", "cold", "cold_dirty", "device", "device_dirty", "wall", "host")
# The end of the warning about times that are noise.
_SPREAD = "spread widely"
# Beyond this, the ninth decile less the first one, divided by the median, is called noise.
_MOST_SPREAD = 0.3


class ResultsError(ValueError):
    """A file has no results that can be read."""


@dataclass(frozen=True)
class Times:
    """Samples of a step's time, in milliseconds, and their statistics."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    samples_ms: list[float]

    @property
    def is_noisy(self) -> bool:
        return self.p90_ms - self.p10_ms > _MOST_SPREAD * self.median_ms


@dataclass(frozen=True)
class Compiled:
    """What a kernel is compiled to, as `bench.instructions` counts it.

    Attributes:
        registers: Those of a thread.
        threads: Those of a block.
        spilled_bytes: What a thread keeps in memory for want of registers.
        loads: Of one turn of the inner loop, by their widths in bits, as in "4 x 128, 1 x 32".
        stores: The same.
        bytes_an_element: What these move.
        instructions_an_element: What a thread executes.
    """

    registers: int
    threads: int
    spilled_bytes: int
    loads: str
    stores: str
    bytes_an_element: float
    instructions_an_element: float


@dataclass(frozen=True)
class Figures:
    """What was measured of one contender.

    Attributes:
        times: Those of a step, by their kind. "step": in the contender's turn, after the others'
            steps. "warm": just after another one of the same contender. "cold": of a step whose
            data are in no cache; on a GPU, the device's time alone, with nothing in its caches
            that must be written back. "cold_dirty": the same with caches full of data that must
            be. `bench.gpu_harness` describes "device", "device_dirty" and "wall". "host": the part
            of "wall" until the steps are enqueued. A kernel that was only compiled has none.
        gb_per_s: The bytes that a step must move, divided by the median of "cold" or else of the
            first kind; None where they are not known.
        share_of_copy: `gb_per_s` divided by that of a copy, measured in the same run.
        state_bytes: The memory of the optimizer's state; None where it is not known.
        peak_extra_bytes: What a step takes besides at its peak; None where it is not known.
        launches: How many kernels a step launches on a GPU; None where it is not known.
        waits: How often the host waits for the GPU in a step; None where it is not known.
        first_step_ms: The time of the first step, which may compile; None where it is not known.
        wall_steps: The number of steps in each sample of "wall".
        runs_ahead: Whether the host has enqueued a step before the GPU begins it.
        kernels: Those of a step that took most time, or why they are not known; None unless asked.
        compiled: Of a kernel that was only compiled.
    """

    times: dict[str, Times]
    gb_per_s: float | None = None
    share_of_copy: float | None = None
    state_bytes: int | None = None
    peak_extra_bytes: int | None = None
    launches: int | None = None
    waits: int | None = None
    first_step_ms: float | None = None
    wall_steps: int | None = None
    runs_ahead: bool | None = None
    kernels: list[dict[str, Any]] | str | None = None
    compiled: Compiled | None = None

    @property
    def usual(self) -> Times:
        """The times by which contenders are compared."""
        return next(iter(self.times.values()))


class Copies(NamedTuple):
    """Copies in memory, for comparison.

    Attributes:
        samples_ms: How long they took.
        num_bytes: How many bytes each one reads and writes.
    """

    samples_ms: Sequence[float]
    num_bytes: int

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / median(self.samples_ms) / 1e6


@dataclass(frozen=True)
class Run:
    """What was measured of a task with one optimizer and type.

    Attributes:
        description: The task, in a few words.
        bytes_moved: How many bytes a step must at least read and write.
        per: What the time is divided by, where its growth matters.
        units: How many of `per` a step has.
        curve: What grows along with other runs, as in "parameters"; or None.
        at: How much of it there is.
        copy_ms: Samples of a copy's time; `gpuopt bench` takes them in the same rounds.
        copy_gb_per_s: The bandwidth that follows from their median; None without a copy.
        contenders: The figures, by name.
        left_out: Contenders that took no part, with reasons.
        warnings: What makes the figures doubtful.
        uncounted: Contenders whose launches and waits are not known on a GPU, with reasons.
        seconds: How long all rounds took together; None in files that do not tell.
        targets: Which limits were met, and which missed.
    """

    description: str
    bytes_moved: int | None = None
    per: str | None = None
    units: int | None = None
    curve: str | None = None
    at: int | None = None
    copy_ms: list[float] = field(default_factory=list)
    copy_gb_per_s: float | None = None
    contenders: dict[str, Figures] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    uncounted: dict[str, str] = field(default_factory=dict)
    seconds: float | None = None
    targets: list[str] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return max(len(each.usual.samples_ms) for each in self.contenders.values())

    @property
    def kinds(self) -> list[str]:
        """The kinds of times that are shown and compared: all contenders have them."""
        kinds = [kind for kind in KINDS if kind != "cold_dirty"]
        return [kind for kind in kinds if all(kind in f.times for f in self.contenders.values())]

    @property
    def other_warnings(self) -> list[str]:
        """Warnings, but for that of times that spread widely, which the times tell themselves."""
        return [warning for warning in self.warnings if not warning.endswith(_SPREAD)]

    @property
    def notes(self) -> list[str]:
        """Lines about what the figures lack, and what makes them doubtful."""
        # Mostly all for the same reason.
        uncounted = {
            reason: [name for name, other in self.uncounted.items() if other == reason]
            for reason in self.uncounted.values()
        }
        return [
            *(f"without {name}: {reason}" for name, reason in self.left_out.items()),
            *(
                f"launches and waits not counted of {'; '.join(names)}: {reason}"
                for reason, names in uncounted.items()
            ),
            *(f"doubtful: {warning}" for warning in self.warnings),
        ]

    def cost_ns(self, figures: Figures | None) -> float | None:
        """Returns what one of `per` costs in a usual step; None where nothing is counted."""
        if figures is None or not self.units:
            return None
        return 1e6 * figures.usual.median_ms / self.units

    @property
    def counts_launches(self) -> bool:
        """Whether launches and waits are known of some contender, as on a GPU."""
        return any(figures.launches is not None for figures in self.contenders.values())


@dataclass(frozen=True)
class Results:
    """All that a call of `gpuopt bench` has measured, or that `python -m bench` has of a commit.

    Attributes:
        gpuopt: gpuopt's version.
        date: When it began, in UTC.
        device: "cpu", or a GPU's name.
        machine: The machine and its libraries.
        runs: By name, as in "gpt2-124m/adam/float32".
        not_run: What could not be run, with reasons.
        commit: What was measured; None where nobody asked.
    """

    gpuopt: str
    date: str
    device: str
    machine: Mapping[str, Any]
    runs: dict[str, Run]
    not_run: dict[str, str]
    commit: str | None = None


def warn_of_spread(contenders: Sequence[str]) -> str:
    """Returns the warning that times of some contenders are noise."""
    return f"the times of {'; '.join(contenders)} {_SPREAD}"


def name_optimizer(run_name: str, run: Run) -> str:
    """Returns the title of the optimizer that was timed; for sparse rows, adam is LazyAdam."""
    _, job_name, *_ = run_name.split("/")
    is_sparse = any("torch sparse" in names for names in (run.contenders, run.left_out))
    if is_sparse and job_name == "adam":
        return LAZY_ADAM.title
    return JOBS[job_name].title if job_name in JOBS else job_name


def describe_run(name: str, run: Run) -> str:
    """Returns what was timed, with the optimizer where it is not in the description."""
    return f"{name_optimizer(name, run)}, {run.description}" if "/" in name else run.description


def list_curves(runs: Mapping[str, Run]) -> dict[str, list[Run]]:
    """Returns the runs of each curve of two points or more, by its name, optimizer and type."""
    curves: dict[str, list[Run]] = {}
    for name, run in runs.items():
        if run.curve is not None:
            settings = name.partition("/")[2]
            curves.setdefault(f"{run.curve}/{settings}", []).append(run)
    return {name: found for name, found in curves.items() if len(found) > 1}


def list_costs(runs: Sequence[Run], contender: str) -> dict[int, float]:
    """Returns what a contender's parameter, tensor or row costs, by how many there are."""
    costs = ((run.at, run.cost_ns(run.contenders.get(contender))) for run in runs)
    return {at: cost for at, cost in costs if at is not None and cost is not None}


def three_digits(number: float | None) -> str:
    """Writes a positive number with three digits, or all before the point; nothing for None."""
    if number is None:
        return ""
    decimals = max(0, 2 - math.floor(math.log10(number)))
    return f"{number:,.{decimals}f}"


def summarize(samples_ms: Sequence[float]) -> Times:
    """Computes the statistics of samples."""
    deciles = quantiles(samples_ms, n=10, method="inclusive") if len(samples_ms) > 1 else samples_ms
    rounded = [round(sample, 6) for sample in samples_ms]
    return Times(round(median(samples_ms), 6), round(deciles[0], 6), round(deciles[-1], 6), rounded)


def make_figures(
    samples: Mapping[str, Sequence[float]],
    bytes_moved: int | None,
    copy_gb_per_s: float | None,
    **others: Any,
) -> Figures:
    """Computes a contender's figures.

    Args:
        samples: By kind, the times of a step in milliseconds.
        bytes_moved: How many bytes a step must at least read and write, where that matters.
        copy_gb_per_s: The bandwidth of a copy, for comparison.
        **others: Other attributes of `Figures`.
    """
    times = {kind: summarize(samples[kind]) for kind in KINDS if samples.get(kind)}
    figures = Figures(times, **others)
    if bytes_moved is None:
        return figures
    gb_per_s = bytes_moved / times.get("cold", figures.usual).median_ms / 1e6
    share = None if copy_gb_per_s is None else round(gb_per_s / copy_gb_per_s, 6)
    return replace(figures, gb_per_s=round(gb_per_s, 6), share_of_copy=share)


def write_results(results: Results, path: Path) -> None:
    """Writes a file of results with all samples; replaces an earlier one at once.

    Raises:
        OSError: the file cannot be written.
    """
    replace_file(path, f"{json.dumps(to_json(results), indent=1)}\n".encode())


def to_json(results: Results) -> dict[str, Any]:
    """Returns what a file of results has, for `json.dumps`."""
    written = {"format": FORMAT, **asdict(results)}
    for figures in _list_figures(written):
        known = {key: each for key, each in figures.items() if each is not None}
        figures.clear()
        # Each kind of times is beside a contender's other figures.
        figures.update({**known.pop("times"), **known})
    return written


def read_results(path: Path) -> Results:
    """Reads what `write_results` has written.

    Raises:
        ResultsError: the file cannot be read, is no file of results, or one of another format.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ResultsError(f"{_why_unread(path, error)}; --json FILE writes results") from error
    except ValueError as error:
        raise ResultsError(f"{path} is no file of results: {error}") from error
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise ResultsError(f"{path} is no file of results in format {FORMAT}; write it anew")
    try:
        for figures in _list_figures(found):
            given = {kind: figures.pop(kind) for kind in KINDS if kind in figures}
            figures["times"] = {kind: each for kind, each in given.items() if each is not None}
        results: Results = _build("the file", Results, found)
        _check_times(results)
        return results
    except (AttributeError, KeyError, TypeError) as error:
        raise ResultsError(f"{path} is no complete file of results: {error}") from error
    except ValueError as error:
        raise ResultsError(f"{path} is no file of results: {error}") from error


def _why_unread(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no file {path}"
    return f"{path} cannot be read: {error.strerror}"


def _list_figures(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for run in found["runs"].values():
        yield from run["contenders"].values()


def _check_times(results: Results) -> None:
    for run in results.runs.values():
        _check_positive("copy_ms", run.copy_ms)
        for figures in run.contenders.values():
            if not figures.times and figures.compiled is None:
                raise ValueError("a contender has no times")
            for times in figures.times.values():
                _check_positive("samples_ms", times.samples_ms or [0.0])
                statistics = [times.median_ms, times.p10_ms, times.p90_ms]
                _check_positive("median_ms, p10_ms, p90_ms", statistics)


def _check_positive(name: str, times_ms: Sequence[float]) -> None:
    if not all(0 < ms < math.inf for ms in times_ms):
        raise ValueError(f"{name} must be positive times, and is {str(times_ms)[:80]}")


def _build(name: str, declared: Any, value: Any) -> Any:
    """Returns what JSON has as a value of its declared type; dataclasses are objects in JSON.

    Raises:
        KeyError: an object has a name that its dataclass has not.
        TypeError: an object lacks a name.
        ValueError: the value has another type.
    """
    kinds, origin = get_args(declared), get_origin(declared)
    if is_dataclass(declared) and isinstance(value, dict):
        hints = get_type_hints(declared)
        given = {key: _build(key, hints[key], each) for key, each in value.items()}
        return declared(**given)  # type: ignore[operator]
    if origin is list and isinstance(value, list):
        return [_build(name, kinds[0], each) for each in value]
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _build(name, kinds[1], each) for key, each in value.items()}
    if isinstance(declared, UnionType):
        for kind in kinds:
            with suppress(ValueError):
                return _build(name, kind, value)
    # JSON writes 1.0, and others write 1.
    simple = int | float if declared is float else declared
    if declared is Any or (origin is None and isinstance(value, simple)):
        return value
    raise ValueError(f"{name} is {str(value)[:80]!r}, which is no {declared}")
