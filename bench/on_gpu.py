"""Tests and times gpuopt on this machine's GPU, in two calls: of 4 minutes, and of 5.

    bench/on_gpu.sh [first|second] [options]

The first call makes a user's first steps, launches every kernel, times steps beside torch's and a
copy, and runs the tests of updates and of streams. The second one runs the other tests, the
benchmark with its targets, and NVIDIA's checkers of memory and of races. Without a name, both run.

A phase begins only if its limit fits into what is left of the time. Each has its log in the output
folder. If one fails, its first failure is printed, and the others still run. The table at the end,
also after Ctrl-C, has each phase's outcome. The status is 1 if a phase failed. Files of earlier
runs stay: the second run into a folder writes user-2.log and summary-2.txt.

The machine needs Python 3.11 or newer ($PYTHON, else python3), with CuPy. Its packages are used as
they are. Missing ones come from a folder of wheels; a machine with a network fills it by

    python3 bench/gpu_environment.py --fetch FOLDER --python 3.12
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = ROOT / "tests" / "support"
sys.path += [str(ROOT), str(SUPPORT)]

from build_cache import build_cache  # noqa: E402

import run  # noqa: E402
from bench import gpu_environment  # noqa: E402

SECONDS = {"first": 240, "second": 300}
# Seconds of a phase's limit: for pytest's summary, and for a program's end after SIGINT.
_FOR_SUMMARY, _FOR_ENDING = 5, 5
# On the stub driver, where g++ compiles the kernels, limits are this many times as long.
_PATIENCE = 10
CUT_OFF = -1
_UPDATES = ["tests/backends/cuda/test_on_gpu.py", "tests/backends/cuda/test_gpu_driver.py"]
_EACH_KERNEL = "tests/backends/cuda/test_each_kernel.py"
# The tests that each phase runs on the stub driver.
_FEW = {
    "smoke": [
        f"{_EACH_KERNEL}::test_steps_that_launch_each_kernel_are_numpys[{case}]"
        for case in ("few rows", "kept rows")
    ],
    "updates": [
        f"{_UPDATES[0]}::test_dense_steps_are_numpys_in_every_layout[gpu-float32-MomentumOptimizer]"
    ],
    "streams": [
        "tests/backends/cuda/test_streams.py::"
        "test_the_powers_of_beta_can_be_read_on_every_stream[oldest]"
    ],
    "others": ["tests/step/test_update.py::test_state_goes_on_where_cupy_arrays_are_replaced"],
}


class Phase(NamedTuple):
    """Commands to run one after the other.

    Attributes:
        name: Of the phase, and of its log.
        limit: How many seconds all of them may take.
        commands: All run, also after one has failed.
        why_not: Why the phase cannot run on this machine, or "".
        note: What it runs without, or "".
        shows_log: Whether its log is printed also if it passes.
    """

    name: str
    limit: int
    commands: Sequence[Sequence[str]]
    why_not: str = ""
    note: str = ""
    shows_log: bool = False


class Row(NamedTuple):
    """A row of the last table: the outcome of a phase."""

    phase: str
    outcome: str
    seconds: str = ""
    tests: str = ""


def main() -> int:
    options = parse_arguments()
    if options.stub_driver and os.environ.get("GPUOPT_DRIVER") != "1":
        environment = {**os.environ, "GPUOPT_DRIVER_DEVICES": "1"}
        command = [sys.executable, str(SUPPORT / "driver"), __file__, *sys.argv[1:]]
        os.execve(sys.executable, command, environment)
    os.environ["GPUOPT_CUDA"] = "auto"
    if run.cuda_extra() == "cpu":
        print("no GPU with a driver for CUDA 12 or newer is here: nothing was run")
        return 1 if options.require_gpu else 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        machine = Machine(options, Path(folder.name))
    except (OSError, RuntimeError) as error:
        print(f"nothing was run: {error}")
        return 1
    with folder:
        rows = run_phases(machine)
    print(f"{make_table(rows)}logs and results: {options.output}")
    wrong = ("failed", "cut off", "stopped")
    return 1 if any(row.outcome.startswith(wrong) for row in rows) else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="on_gpu.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("call", nargs="?", choices=SECONDS, help="by default both, in turn")
    parser.add_argument(
        "--seconds", type=float, help="time for all phases (default: 240, 300 or their sum)"
    )
    parser.add_argument(
        "--wheels", type=Path, metavar="FOLDER", help="packages that this machine lacks"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        default=ROOT / "bench" / "results" / "on-gpu",
        help="for logs and results (default: bench/results/on-gpu)",
    )
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--require-gpu", action="store_true", help="fail if there is no GPU")
    parser.add_argument(
        "--stub-driver",
        action="store_true",
        help="try the script without a GPU: tiny sizes, and a few tests in each phase",
    )
    options = parser.parse_args()
    if options.wheels is not None and not options.wheels.is_dir():
        parser.error(f"there is no folder {options.wheels}")
    if options.seconds is None:
        calls = SECONDS if options.call is None else [options.call]
        options.seconds = sum(SECONDS[call] for call in calls)
        options.seconds *= _PATIENCE if options.stub_driver else 1
    options.output = options.output.resolve()
    return options


class Machine:
    """This machine's Python, with the packages that the phase "setup" installs.

    Args:
        options: The command's.
        folder: A folder for as long as the phases run.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        earlier_runs = len(list(options.output.glob("summary*.txt")))
        self._run = f"-{earlier_runs + 1}" if earlier_runs else ""
        self.patience = _PATIENCE if options.stub_driver else 1
        self._packages = folder / "packages"
        path = [str(self._packages), os.environ.get("PYTHONPATH", ""), str(ROOT), str(SUPPORT)]
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHONUNBUFFERED": "1",
            "GPUOPT_REQUIRE": "gpu",
            "PYTHONDONTWRITEBYTECODE": "",  # each of many processes would compile all modules
        }
        if not options.stub_driver:  # which has a cache of its own
            # The second call finds the kernels that the first one has compiled.
            self.environment["CUPY_CACHE_DIR"] = str(build_cache("on-gpu"))

    def file(self, name: str) -> Path:
        """Returns a file in the output folder, whose name no earlier run has used."""
        file: Path = self.options.output / name
        return file.with_stem(file.stem + self._run)

    def setup(self) -> Phase:
        command = [sys.executable, gpu_environment.__file__, str(self._packages)]
        if self.options.wheels is not None:
            command += ["--wheels", str(self.options.wheels.resolve())]
        # pip takes a second or two for each package.
        return Phase("setup", 25, [command], shows_log=True)

    def lacks(self, *packages: str) -> str:
        """Names the first of these packages that is not here, or returns ""."""
        for package in packages:
            search = f"import importlib.util; exit(importlib.util.find_spec({package!r}) is None)"
            if subprocess.run([sys.executable, "-c", search], env=self.environment).returncode:
                return f"{package} is not here"
        return ""

    def pytest(self, *arguments: str) -> list[str]:
        """Returns a command that runs tests in one process, and skips those left at its limit."""
        command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "--tb=short", "-rfE"]
        return [*command, "-p", "no:cacheprovider", "-p", "ends_in_time", *arguments]

    def tests(self, name: str, limit: int, files: Sequence[str], few: Sequence[str]) -> Phase:
        """Returns a phase of tests in as many processes as there are cores.

        Args:
            name: The phase's name.
            limit: How many seconds it may take.
            files: Their tests that need a GPU are run.
            few: On the stub driver, these are run instead.
        """
        chosen = few if self.options.stub_driver else files
        command = self.pytest("-m", "gpu and not real_gpu and not driver", *chosen)
        if alone := self.lacks("xdist"):
            alone += ", and so in one process"
        else:
            command += ["-n", str(os.cpu_count()), "--dist", "worksteal"]
        return Phase(name, limit, [command], self.lacks("pytest"), alone)


def first(machine: Machine) -> list[Phase]:
    """Lists the phases of the first call."""
    python, options = sys.executable, machine.options
    is_small = options.stub_driver
    user = [[python, "-m", "gpuopt", "info"]]
    if not machine.lacks("pytest"):
        quick_start = ["-k", "quick_start_for_cupy and run_in_order"]
        user += [machine.pytest(*quick_start, "tests/project/test_docs.py")]
    if not machine.lacks("rich"):
        steps = ["--steps", "20" if is_small else "1000"]
        curves = ["--output", str(machine.folder / "curves.png")]
        user += [[python, "-m", "gpuopt", "demo", "--device", "gpu:0", *steps, *curves]]
    timings = [python, "bench/first_run.py", "--json", str(machine.file("timings.json"))]
    timings += ["--seconds", "2", "--small"] if is_small else ["--seconds", "35"]
    timings += [] if options.commit is None else ["--commit", options.commit]
    of_speed = machine.pytest("-m", "real_gpu", *files_with("mark.real_gpu"))
    return [
        Phase("user", 30, user, note=machine.lacks("pytest", "rich")),
        machine.tests("smoke", 35, [_EACH_KERNEL], _FEW["smoke"]),
        Phase("timings", 65, [timings, of_speed], note=machine.lacks("torch")),
        machine.tests("updates", 55, _UPDATES, _FEW["updates"]),
        machine.tests("streams", 30, tests_of_streams(), _FEW["streams"]),
    ]


def second(machine: Machine) -> list[Phase]:
    """Lists the phases of the second call."""
    options = machine.options
    others = {*files_with("mark.gpu")} - {_EACH_KERNEL, *_UPDATES, *tests_of_streams()}
    benchmark = [sys.executable, "-m", "bench.gpu", "--seconds", "75"]
    if options.stub_driver:
        benchmark = [sys.executable, str(SUPPORT / "tiny_benchmark.py"), "--seconds", "1"]
        benchmark += ["--only", "gpu_adam_160m"]
    benchmark += ["--require-gpu", "--output", str(options.output)]
    benchmark += [] if options.commit is None else ["--commit", options.commit]
    checker = gpu_environment.find_sanitizer()
    no_checker = "" if checker else "compute-sanitizer is not here"
    # gpuopt's waits poll events: an event that is not done yet is no error.
    check = [checker or "", "--error-exitcode", "86", "--report-api-errors", "no", "--tool"]
    # Without CuPy's pool each array is an allocation, so that the checker knows where arrays end.
    memory = machine.pytest("-p", "no_memory_pool", _EACH_KERNEL)
    races = machine.pytest("-k", "rows or sums or measured or clipped", _EACH_KERNEL)
    return [
        machine.tests("others", 100, sorted(others), _FEW["others"]),
        Phase("benchmark", 90, [benchmark], machine.lacks("rich"), machine.lacks("torch")),
        Phase("memcheck", 45, [[*check, "memcheck", *memory]], no_checker),
        Phase("racecheck", 40, [[*check, "racecheck", *races]], no_checker),
    ]


def files_with(marker: str) -> list[str]:
    """Lists the files of tests that have a marker: others need not be collected."""
    pattern = re.compile(rf"\b{re.escape(marker)}\b")
    files = sorted(ROOT.glob("tests/**/test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if pattern.search(file.read_text())]


def tests_of_streams() -> list[str]:
    return [file for file in files_with("mark.gpu") if re.search(r"stream|lifetimes", file)]


def list_phases(machine: Machine) -> Iterator[Phase]:
    """Lists "setup" and the phases of the calls, each when those before it have run."""
    yield machine.setup()
    phases = {"first": first, "second": second}
    for call in SECONDS if machine.options.call is None else [machine.options.call]:
        yield from phases[call](machine)


def run_phases(machine: Machine) -> list[Row]:
    """Runs phases until a signal comes or a file cannot be written; returns the table's rows.

    The table is written after each phase, in case this process is killed.
    """
    begin, rows, name = time.monotonic(), [], ""
    summary = machine.file("summary.txt")
    try:
        for phase in list_phases(machine):
            name = phase.name
            left = machine.options.seconds - (time.monotonic() - begin)
            rows.append(run_phase(phase, machine, left))
            summary.write_text(make_table(rows))
    except KeyboardInterrupt:
        rows.append(Row(name, "stopped by a signal"))
    except OSError as error:
        rows.append(Row(name, f"stopped: {error}"))
    rows.append(Row("all phases", "", f"{time.monotonic() - begin:.0f} s"))
    with suppress(OSError):
        summary.write_text(make_table(rows))
    return rows


def run_phase(phase: Phase, machine: Machine, left: float) -> Row:
    """Runs a phase if it fits into the time that is left, and prints what failed first in it."""
    if phase.why_not:
        return Row(phase.name, f"left out: {phase.why_not}")
    limit = phase.limit * machine.patience
    if limit > left:
        return Row(phase.name, f"left out: it may take {limit} s, and {left:.0f} s are left")
    print(f"== {phase.name} (at most {limit} s)", flush=True)
    begin, log = time.monotonic(), machine.file(f"{phase.name}.log")
    end = begin + limit - _FOR_ENDING
    environment = machine.environment | {
        "GPUOPT_TESTS_END": str(time.time() + limit - _FOR_ENDING - _FOR_SUMMARY)
    }
    with log.open("wb") as file:
        statuses = [
            run_command(command, file, environment, end - time.monotonic())
            for command in phase.commands
        ]
    text = log.read_text(errors="replace")
    wrong = [status for status in statuses if status != 0]
    if wrong:
        print(first_failure(text) or f"{log} is empty: is space left?", flush=True)
        for command, status in zip(phase.commands, statuses, strict=True):
            if status not in (0, CUT_OFF):
                print(f"status {status} of {shlex.join(command)}", flush=True)
    elif phase.shows_log:
        print(text, end="", flush=True)
    seconds = f"{time.monotonic() - begin:.0f} s"
    outcome = "passed" if not wrong else f"failed with status {wrong[0]}"
    if CUT_OFF in wrong:
        outcome = f"cut off after {seconds}"
    note = f", though {phase.note}" if phase.note else ""
    return Row(phase.name, outcome + note, seconds, count_tests(text))


def run_command(
    command: Sequence[str], log: IO[bytes], environment: Mapping[str, str], seconds: float
) -> int:
    """Runs a command, and interrupts and then kills it and its children when its time is over.

    Returns:
        Its status, or CUT_OFF.
    """
    if seconds <= 0:
        return CUT_OFF
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest still prints what has failed
        with suppress(subprocess.TimeoutExpired):
            process.wait(_FOR_ENDING)
        return CUT_OFF
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def first_failure(log: str) -> str:
    """Returns the whole report of the first test that failed, or else the log's end."""
    title, other = r"^_{3,} [^\n]+ _{3,}$", r"^={3,} [^\n]+ ={3,}$"
    found = re.search(rf"{title}.*?(?={title}|{other}|\Z)", log, re.MULTILINE | re.DOTALL)
    return found[0].rstrip() if found else "\n".join(log.splitlines()[-60:])


def count_tests(log: str) -> str:
    """Returns the numbers in the last line of each pytest in a log."""
    kinds = "passed|failed|skipped|errors?|xfailed|xpassed"
    lines = re.findall(r"^.*\d+ (?:passed|failed|skipped|error).* in [\d.]+s.*$", log, re.M)
    counts = [
        f"{number} {kind}" for number, kind in re.findall(rf"(\d+) ({kinds})", "".join(lines))
    ]
    not_begun = re.findall(r"^(\d+) tests were not begun", log, re.M)
    return ", ".join(counts + [f"{number} of them not begun" for number in not_begun])


def make_table(rows: Sequence[Row]) -> str:
    """Returns a line for each row, in columns."""
    cells = [("phase", "outcome", "time", "tests"), *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    return "".join(
        "  ".join(
            [*(f"{cell:<{width}}" for cell, width in zip(row[:3], widths, strict=True)), row[3]]
        ).rstrip()
        + "\n"
        for row in cells
    )


if __name__ == "__main__":
    sys.exit(main())
