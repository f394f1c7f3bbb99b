#!/usr/bin/env python3
"""Sets gpuopt up in .venv and runs a task there. Needs Python 3.11 or newer and nothing else.

    python3 run.py TASK [ARGUMENT ...]

Further arguments go to the task: python3 run.py demo --optimizer Ftrl

GPUOPT_CUDA=auto|cpu|cuda12|cuda13 says what to install; auto asks the driver.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
OLDEST_PYTHON = (3, 11)
# pytest's status where arguments leave none to run.
NO_TESTS = 5
LONGEST_PART_S = 1800.0


class Task(NamedTuple):
    """A row of the table of tasks.

    Attributes:
        purpose: What it does, for the help.
        parts: Commands by name, as in a shell: variables may stand first, and words have wildcards.
            The program is one of .venv, or of .venv-NAME if the part is named as in BESIDE.
        needs: Dependency groups and extras in pyproject.toml to install in .venv.
        is_parallel: Whether parts run side by side.
        last: A command that runs when they have ended.
    """

    purpose: str
    parts: Mapping[str, str]
    needs: Sequence[str] = ()
    is_parallel: bool = False
    last: str = ""


# What all environments have of the extras.
EXTRAS = "losses", "checkpoints", "command"
# Groups that cannot be in one environment with others.
BESIDE = {"cuda12-smoke", "cupy13-smoke", "openmpi", "mpich", "peers", "thinc8", "thinc9"}
# The threads of numpy's and torch's libraries would wait for cores that other processes use.
ONE_THREAD = "OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1"
# Each of many processes would compile all modules.
BYTECODE = "PYTHONDONTWRITEBYTECODE="
# A process that runs tests takes some seconds to start, and half a gigabyte.
IN_PROCESSES = "-n auto --maxprocesses 8 --dist worksteal"
# A test that hangs is to end with the stacks of all threads, not when CI's patience does.
NO_HANGING = "-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true"
# With these, pytest needs the terminal, and so runs the tests in its own process.
INTERACTIVE = {"--pdb", "--trace", "-s", "--capture=no"}

PYTEST = f"-m pytest {IN_PROCESSES} {NO_HANGING} -m"
TEST = f"{BYTECODE} {ONE_THREAD} python {PYTEST} 'not nvrtc'"
HERE = f"PYTHONPATH={shlex.quote(str(ROOT))} {BYTECODE} {ONE_THREAD} python"
DRIVER = f"GPUOPT_REQUIRE=gpu,driver {HERE} tests/support/driver"
ON_DRIVER = f"{DRIVER} {PYTEST} 'gpu and not real_gpu and"
GPU = {
    "a GPU": f"GPUOPT_REQUIRE=gpu {HERE} {PYTEST} gpu",
    "one GPU": f"GPUOPT_DRIVER_DEVICES=1 {ON_DRIVER} not gpus'",
    "several GPUs": f"{ON_DRIVER} gpus'",
    "cuda12-smoke": f"{DRIVER} tests/support/driver/smoke.py",
    "cupy13-smoke": f"{DRIVER} tests/support/driver/smoke.py",
}
TEST_BESIDE = f"{ONE_THREAD} python -m pytest -p no:cacheprovider"
# Tests of NCCL find CuPy in .venv.
CUPY = VENV / "lib/python{}.{}/site-packages".format(*sys.version_info)
RANKS = f"GPUOPT_REQUIRE=mpi GPUOPT_CUPY={shlex.quote(str(CUPY))} {TEST_BESIDE} {NO_HANGING} -m mpi"
INTEROP = f"{TEST_BESIDE} tests/interop tests/project/test_docs.py -m"
NEEDS = "GPUOPT_SANITIZE=undefined GPUOPT_REQUIRE=cxx,emulator,nvrtc python"
OF_KERNELS = "tests/backends/cuda/test_kernels_*.py"
# A sanitizer ends the process: its report must reach the terminal, and the last line above it is to
# name the test. Python's own handler of signals would be in its way.
SANITIZED = f"-m pytest -m emulator -v --capture=sys -p no:faulthandler {OF_KERNELS}"
KERNELS = {
    "as they are": f"{NEEDS} -m pytest {NO_HANGING} -m '(cxx or emulator) and not nvrtc' "
    f"tests/rules/test_rule_parity.py {OF_KERNELS}",
    "compiled for GPUs": f"{NEEDS} -m pytest {NO_HANGING} -m nvrtc {OF_KERNELS}",
    "AddressSanitizer": f"{NEEDS} tests/support/emulator/sanitized.py address {SANITIZED}",
}
THREADS = f"{NEEDS} tests/support/emulator/sanitized.py thread {SANITIZED}"
SOURCES = (
    "kernels/**/*.cu* kernels/**/*.hpp tests/support/emulator/*.cu tests/support/emulator/*.h "
    "tests/support/driver/native/**/*.cpp tests/support/driver/native/**/*.h"
)
WORKFLOWS = ".github/workflows/*.yml"
LINT = {
    "ruff check": "ruff check .",
    "ruff format": "ruff format --check .",
    "mypy": "mypy",
    "lint-imports": "lint-imports",
    "clang-format": f"clang-format --dry-run -Werror {SOURCES}",
    "hadolint": "hadolint Dockerfile",
    "jsonschema": f"check-jsonschema --builtin-schema vendor.github-workflows {WORKFLOWS}",
    "zizmor": f"zizmor --offline --no-progress {WORKFLOWS}",
}


def each(variable: str, parts: Mapping[str, str]) -> dict[str, str]:
    return {name: f"{variable} {command}" for name, command in parts.items()}


TASKS = {
    "demo": Task(
        "train on real data, on the GPU if there is one",
        {"demo": "python -m gpuopt demo"},
        ["plots"],
    ),
    "test": Task("run the tests that need no GPU", {"test": TEST}, ["test", "plots"]),
    "test-full": Task(
        "the same, with every optimizer in every form and type",
        {"test": f"GPUOPT_FULL=1 {TEST}"},
        ["test", "plots"],
    ),
    "test-gpu": Task(
        "run the tests that need a GPU: on one, or on the stub driver", GPU, ["test", "gpu"]
    ),
    "test-gpu-full": Task(
        "the same; without one, streams run in 20 times as many orders",
        each("GPUOPT_FULL=1", GPU),
        ["test", "gpu"],
    ),
    "test-ranks": Task(
        "run the tests of several processes, over Open MPI and MPICH",
        dict.fromkeys(("openmpi", "mpich"), f"{RANKS} tests/distributed"),
        ["test", "gpu"],
        is_parallel=True,
    ),
    "test-peers": Task(
        "compare with optimizers of torch, optax and others, and run jobs of torchrun",
        {
            "peers": f"GPUOPT_REQUIRE=peers,torch,jax {INTEROP} 'peers or torch or jax' "
            "tests/optimizers/test_peers.py tests/distributed/test_torch_jobs.py "
            "tests/distributed/test_strategy_over_mpi.py"
        },
    ),
    "test-thinc": Task(
        "compare with Thinc's optimizers, and train with spaCy",
        {
            "thinc8": f"GPUOPT_REQUIRE=thinc,spacy {INTEROP} 'thinc or spacy'",
            "thinc9": f"GPUOPT_REQUIRE=thinc {INTEROP} thinc",
        },
    ),
    "test-package": Task(
        "test the package as built and installed, with its oldest dependencies and the newest",
        {"package": f"{ONE_THREAD} python tests/support/built_package.py"},
        ["test", "types"],
    ),
    "test-kernels": Task(
        "run the kernels' own tests on the CPU, under sanitizers",
        KERNELS,
        ["test", "kernels"],
        is_parallel=True,
    ),
    "test-kernels-full": Task(
        "the same, and compile all of them for all GPUs",
        each("GPUOPT_ALL_KERNELS=1", {**KERNELS, "ThreadSanitizer": THREADS}),
        ["test", "kernels"],
        is_parallel=True,
        last=f"GPUOPT_ALL_KERNELS=1 {NEEDS} tests/support/compile_times.py",
    ),
    "mutants": Task(
        "change functions at one place each, and report the changes that no test notices",
        {"mutants": f"{ONE_THREAD} python tests/support/mutants.py"},
        ["test", "mutants", "plots"],
    ),
    "lint": Task(
        "check style, types, layers, the Dockerfile and workflows", LINT, ["lint", "test"]
    ),
    "bench": Task(
        "time gpuopt beside other libraries: gpuopt bench", {"bench": "python -m gpuopt bench"}
    ),
    "docs": Task("build the documentation", {"docs": "python -m mkdocs build -s"}, ["docs"]),
    "new-optimizer": Task(
        "add an optimizer by its NAME: write its pieces, or what follows from them",
        {"new-optimizer": f"{ONE_THREAD} python tests/support/new_optimizer.py"},
        ["test", "plots"],
    ),
    "gallery": Task(
        "draw the pictures of docs/optimizers.md",
        {"gallery": f"{ONE_THREAD} python tests/support/gallery.py"},
        ["plots"],
    ),
}


def main() -> int:
    """Runs the task named on the command line and returns its exit status."""
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        sys.exit(f"run.py: gpuopt needs Python {oldest} or newer; this is {sys.version.split()[0]}")
    task, *arguments = sys.argv[1:] or ["help"]
    if task not in TASKS:
        print(__doc__, *(f"{name:20}{row.purpose}" for name, row in TASKS.items()), sep="\n    ")
        return 0 if task in ("help", "-h", "--help") else 2
    row = TASKS[task]
    try:
        set_up(VENV, row.needs)
        if task in ("test-gpu", "test-gpu-full"):
            return test_gpu(row.parts, arguments)
        return run_parts(row, arguments)
    except subprocess.CalledProcessError as error:
        command = " ".join([Path(error.cmd[0]).name, *error.cmd[1:4]])
        sys.exit(
            f"run.py: setting up {VENV.name} failed (see above): {command} ended with status "
            f"{error.returncode}; is the network up?"
        )


def set_up(folder: Path, needs: Sequence[str]) -> None:
    """Makes an environment and installs what is missing from it; a second call does nothing."""
    cuda = [] if folder != VENV or (extra := cuda_extra()) == "cpu" else [extra]
    # Changes whenever the environment has to be made anew.
    parts = [(ROOT / "pyproject.toml").read_text(), *cuda, sys.version, str(folder)]
    base = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    ready = folder / ".ready"
    done = ready.read_text().split() if ready.exists() else []
    if base not in done:
        done = [base]
        print(f"setting up {folder.name} with Python {sys.version.split()[0]}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        make_environment(folder)
    missing = [name for name in (*cuda, *needs, "gpuopt") if name not in done]
    if missing:
        print(f"installing {' '.join(missing)}", flush=True)
        every = requirements([*EXTRAS, *cuda, *needs])
        install(folder, ["--editable", str(ROOT), *every])
        ready.write_text("\n".join([*done, *missing]))


def make_environment(folder: Path) -> None:
    """Makes an empty environment; .venv has pip, which installs packages in the others, too."""
    venv = [sys.executable, "-m", "venv", str(folder)]
    if folder != VENV:
        call([*venv, "--without-pip"])
    elif works("import ensurepip, venv"):
        call(venv)
    elif works("import pip, venv"):
        # Debian's python3 without python3-venv
        call([*venv, "--without-pip"])
        python = str(program("python"))
        call([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "pip"])
    elif shutil.which("apt-get") and os.geteuid() == 0:
        print("this python3 has neither venv nor pip: installing python3-venv", flush=True)
        call(["apt-get", "update", "-qq"])
        quiet = ["env", "DEBIAN_FRONTEND=noninteractive"]
        call([*quiet, "apt-get", "install", "-y", "-qq", "python3-venv"])
        call(venv)
    else:
        sys.exit(
            "run.py: this python3 has neither venv nor pip, so it cannot set anything up; on "
            "Debian and Ubuntu: sudo apt-get install python3-venv, then run this again"
        )


def works(statement: str, python: str = sys.executable) -> bool:
    return subprocess.run([python, "-c", statement], capture_output=True).returncode == 0


def call(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, cwd=ROOT)


def program(name: str, environment: Path = VENV) -> Path:
    return environment / ("Scripts" if os.name == "nt" else "bin") / name


def install(environment: Path, arguments: Sequence[str]) -> None:
    where = [] if environment == VENV else ["--python", str(program("python", environment))]
    options = ["--disable-pip-version-check", "install", "--quiet"]
    call([str(program("python")), "-m", "pip", *where, *options, *arguments])


def requirements(names: Iterable[str]) -> list[str]:
    """Reads dependency groups and extras; pip itself knows groups only since 25.1."""
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    known = settings["dependency-groups"] | settings["project"]["optional-dependencies"]
    return [requirement for name in names for requirement in known[name]]


def cuda_extra() -> str:
    """Chooses "cuda12", "cuda13" or "cpu" by asking the driver itself."""
    wanted = os.environ.get("GPUOPT_CUDA", "auto")
    if wanted not in ("auto", "cpu", "cuda12", "cuda13"):
        sys.exit(f"run.py: GPUOPT_CUDA={wanted} is not one of auto, cpu, cuda12, cuda13")
    if wanted != "auto":
        return wanted
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return "cpu"
    devices, version = ctypes.c_int(0), ctypes.c_int(0)
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGetCount(ctypes.byref(devices))
        or driver.cuDriverGetVersion(ctypes.byref(version))
    )
    if failed or devices.value == 0 or version.value < 12000:
        return "cpu"
    return "cuda13" if version.value >= 13000 else "cuda12"


class Command(NamedTuple):
    """A command that can be run."""

    words: Sequence[str]
    environment: Mapping[str, str]

    def run(self, **options: Any) -> int:
        """Runs it; returns its exit status."""
        return subprocess.run(self.words, cwd=ROOT, env=self.environment, **options).returncode


def read(command: str, arguments: Sequence[str] = (), environment: Path = VENV) -> Command:
    """Finds the program of a command in an environment and the files of its wildcards."""
    if is_interactive(arguments):
        command = command.replace(IN_PROCESSES, "").replace(NO_HANGING, "")
    words, variables = shlex.split(command), dict(os.environ)
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    found = [str(program(words[0], environment))]
    for word in words[1:]:
        files = sorted(ROOT.glob(word)) if "*" in word else []
        found += [str(file.relative_to(ROOT)) for file in files] or [word]
    return Command([*found, *arguments], variables)


def is_interactive(arguments: Sequence[str]) -> bool:
    return not INTERACTIVE.isdisjoint(arguments)


def run_parts(task: Task, arguments: Sequence[str]) -> int:
    """Runs all parts of a task; further arguments are for pytest, or for its only part."""
    commands = {}
    for name, part in task.parts.items():
        environment = VENV
        if name in BESIDE:
            set_up(environment := ROOT / f".venv-{name}", [name])
        takes_arguments = len(task.parts) == 1 or "pytest" in part
        commands[name] = read(part, arguments if takes_arguments else [], environment)
    if len(commands) == 1:
        return commands.popitem()[1].run()
    if task.is_parallel and not is_interactive(arguments):
        statuses = run_side_by_side(commands)
    else:
        statuses = run_one_by_one(commands)
    if task.last:
        statuses |= run_one_by_one({task.last.split()[-1]: read(task.last)})
    if task.is_parallel and arguments:
        # They may name tests of one part.
        statuses = {name: status for name, status in statuses.items() if status != NO_TESTS}
    return report(statuses)


def report(statuses: Mapping[str, int]) -> int:
    failed = [name for name, status in statuses.items() if status]
    if failed:
        print(f"run.py: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run_one_by_one(commands: Mapping[str, Command]) -> dict[str, int]:
    """Runs commands, which may use the terminal; returns the exit status of each."""
    statuses = {}
    for name, command in commands.items():
        print(f"== {name}", flush=True)
        statuses[name] = command.run()
    return statuses


def run_side_by_side(commands: Mapping[str, Command]) -> dict[str, int]:
    """Runs commands, as many at a time as there are cores; returns the exit status of each.

    What a command prints is shown when it has ended. One that hangs is ended.
    """

    def run(name: str) -> int:
        print(f"== {name}: begins", flush=True)
        begin, status, streams = time.monotonic(), 1, {"stderr": subprocess.STDOUT}
        # Not a pipe: children of one that hangs would hold it open.
        with tempfile.TemporaryFile("w+") as output:
            try:
                status = commands[name].run(stdout=output, timeout=LONGEST_PART_S, **streams)
            except subprocess.TimeoutExpired:
                output.write(f"\nrun.py: {name} did not end within {LONGEST_PART_S:.0f} s\n")
            output.seek(0)
            print(f"{output.read()}== {name}: {time.monotonic() - begin:.0f} s", flush=True)
        return status

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(commands, pool.map(run, commands), strict=True))


def test_gpu(parts: Mapping[str, str], arguments: Sequence[str]) -> int:
    """Runs the tests that need a GPU: on one, or on tests/support/driver.

    On that driver, those that need one GPU run where there is one, then the others where there are
    more; and then CuPy for CUDA 12 and the oldest CuPy are tried.
    """
    if cuda_extra() != "cpu":
        return read(parts["a GPU"], arguments).run()
    with tempfile.TemporaryDirectory() as folder:
        # To look for the others in all files would take as long again.
        listed = Path(folder) / "files"
        one = f"GPUOPT_LIST_OF_FILES={shlex.quote(str(listed))} {parts['one GPU']}"
        first = read(one, arguments).run()
        files = listed.read_text().splitlines() if listed.exists() else []
    files = [] if name_tests(arguments) else files
    second = read(parts["several GPUs"], [*files, *arguments]).run()
    ran = [each for each in (first, second) if not (each == NO_TESTS and arguments)]
    status = next(filter(None, ran), 0) if ran else NO_TESTS
    if status or arguments:
        return status
    for group in ("cuda12-smoke", "cupy13-smoke"):
        print(f"== {group}", flush=True)
        set_up(environment := ROOT / f".venv-{group}", [group])
        status = status or read(parts[group], environment=environment).run()
    return status


def name_tests(arguments: Sequence[str]) -> bool:
    return any(argument.startswith("tests/") for argument in arguments)


if __name__ == "__main__":
    sys.exit(main())
