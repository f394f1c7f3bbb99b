"""What tests need: GPUOPT_REQUIRE turns a skip for something missing into a failure."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import browser
import driver
import fake_cupy
import gpu_streams
import kinds
import mpi_job
import numpy as np
import one_in
import peers
import pytest
from build_cache import build_cache
from emulator import EmulatorLauncher
from emulator.kernel_library import what_is_missing
from every_kernel import is_of_large_table, kernels_of, kernels_without_rule
from every_optimizer import update_rules

from gpuopt import backends, environment, global_variables
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cuda import launcher
from gpuopt.backends.cuda.availability import ask_driver, installed
from gpuopt.backends.cuda.backend import CudaBackend
from gpuopt.device import Device
from gpuopt.optimizer import living_optimizers
from gpuopt.step.rule_updates import RuleUpdates


def has_gpu() -> bool:
    return ask_driver().problem is None and find_spec("cupy") is not None


def has_nvrtc() -> bool:
    wheels = "cuda-core", "nvidia-cuda-nvrtc", "nvidia-cuda-nvdisasm"
    return all(installed(wheel) is not None for wheel in wheels)


# Packages that gpuopt imports where they are first used, and those of tests: steps need none.
OPTIONAL = ("autograd", "hypothesis", "rich", "safetensors", "scipy", "xxhash")


def has_package(name: str) -> bool:
    return find_spec(name) is not None


# For each marker: (whether its tool is there, the reason for the skip if not).
NEEDS = {
    "browser": (lambda: browser.find_browser() is not None, "Chromium is not installed"),
    "cxx": (lambda: shutil.which("g++") is not None, "g++ is not installed"),
    "emulator": (lambda: what_is_missing() is None, what_is_missing()),
    "gpu": (has_gpu, "there is no GPU, or no CuPy"),
    "driver": (driver.is_here, "the GPU is a real one, or there is none: see make test-gpu"),
    "real_gpu": (
        lambda: has_gpu() and not driver.is_here(),
        "there is no real GPU, or no CuPy",
    ),
    "nvrtc": (has_nvrtc, "cuda-core, NVRTC or nvdisasm is not installed"),
    "mpi": (lambda: mpi_job.what_is_missing() is None, mpi_job.what_is_missing()),
    "peers": (lambda: peers.what_is_missing() is None, peers.what_is_missing()),
    "jax": (lambda: find_spec("jax") is not None, "JAX is not installed"),
    "spacy": (lambda: find_spec("spacy") is not None, "spaCy is not installed"),
    "thinc": (lambda: find_spec("thinc") is not None, "Thinc is not installed"),
    "torch": (lambda: find_spec("torch") is not None, "torch is not installed"),
    **{name: (partial(has_package, name), f"{name} is not installed") for name in OPTIONAL},
}


def required() -> set[str]:
    names = {name for name in os.environ.get("GPUOPT_REQUIRE", "").split(",") if name}
    if unknown := names - set(NEEDS):
        raise pytest.UsageError(
            f"GPUOPT_REQUIRE names {', '.join(sorted(unknown))}; known are {', '.join(NEEDS)}"
        )
    return names


def _followed_by(change: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that changes the environment and has gpuopt read it again."""

    def changed(*args: Any, **kwargs: Any) -> None:
        change(*args, **kwargs)
        environment.forget()

    return changed


def pytest_configure(config: pytest.Config) -> None:
    required()
    # Tests change the environment, which a program reads once.
    for name in ("setenv", "delenv", "undo"):
        setattr(pytest.MonkeyPatch, name, _followed_by(getattr(pytest.MonkeyPatch, name)))
    # Compiled rules are kept from one run to the next, apart from the user's own.
    os.environ.setdefault("GPUOPT_CACHE_DIR", str(build_cache("rules")))
    # A job in a shell's background ignores Ctrl-C, which tests send to themselves.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--one-in",
        type=int,
        default=int(os.environ.get("GPUOPT_ONE_IN", "1")),
        metavar="N",
        help="of all tests with parameters, run about one in N of their cases; GPUOPT_ONE_IN",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves files without tests of the kind that `-m` names: each process would import them."""
    kind = config.option.markexpr
    if kind in kinds.KINDS and collection_path.match("test_*.py"):
        return not kinds.may_have(kind, collection_path) or None
    return None


# The files that have tests of several GPUs, for GPUOPT_LIST_OF_FILES.
NEED_SEVERAL = pytest.StashKey[set[str]]()


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Leaves out cases of a test before pytest makes tests of them."""
    yield
    # pytest has no public name for what its own hooks have made so far.
    test, config, cases = metafunc.definition, metafunc.config, metafunc._calls
    every_marker = [*test.iter_markers(), *(each for case in cases for each in case.marks)]
    if any(each.name == "gpus" for each in every_marker):
        config.stash.setdefault(NEED_SEVERAL, set()).add(str(test.path))
    if cases:
        cases[:] = cases_to_make(test, cases, config)


def cases_to_make(test: pytest.Item, cases: Sequence[Any], config: pytest.Config) -> Sequence[Any]:
    """Returns the cases that run; or if none does, one for pytest to leave out."""
    drawn = cases
    if not runs_all_cases(config):
        if marker := test.get_closest_marker("one_in"):
            cases = one_in.divide(cases, *marker.args, marker.kwargs)
        drawn = one_in.draw(test.nodeid, cases, config.option.one_in)
    if expression := one_in.compiled(config.option.markexpr):
        drawn = [
            case for case in drawn if one_in.selects(expression, kinds.markers_of(test, case.marks))
        ]
    return drawn or cases[:1]


def runs_all_cases(config: pytest.Config) -> bool:
    """Whether somebody names what to run, or asks for all cases."""
    are_named = config.option.keyword or any("::" in argument for argument in config.args)
    return bool(are_named or os.environ.get("GPUOPT_FULL"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests with their kinds, and leaves out those of which no case is drawn."""
    kinds.mark(items)
    # run.py runs tests that need several GPUs next. Tests that run pytest must not write it, too.
    if listed := os.environ.pop("GPUOPT_LIST_OF_FILES", None):
        Path(listed).write_text("\n".join(sorted(config.stash.get(NEED_SEVERAL, ()))))
    if not runs_all_cases(config):
        drawn = {item: one_in.is_drawn(item.nodeid, config.option.one_in) for item in items}
        items[:] = [item for item in items if drawn[item]]
        config.hook.pytest_deselected(items=[item for item in drawn if not drawn[item]])


def pytest_collection_finish(session: pytest.Session) -> None:
    made = [*global_variables(), *living_optimizers()]
    if made:
        raise pytest.UsageError(f"made when tests are collected, and seen by all of them: {made}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, (is_there, reason) in NEEDS.items():
        marker = item.get_closest_marker(name)
        if marker is None or is_there():
            continue
        skip_without(name, ", and the test ".join([reason, *marker.args]))
    several = item.get_closest_marker("gpus")
    # A case of the test may need none: one in host memory, or on the emulator.
    if several is not None and item.get_closest_marker("gpu") is not None:
        [needed], found = several.args, len(ask_driver().gpus)
        if found < needed:
            pytest.skip(f"the test needs {needed} GPUs, and this machine has {found}")


def skip_without(name: str, reason: str) -> None:
    if name in required():
        pytest.fail(f"{reason}, and GPUOPT_REQUIRE asks for it", pytrace=False)
    pytest.skip(reason)


# A test whose own process cannot import an optional package counts as marked with its name: only a
# test that starts other processes needs the marker.


def missing_package(error: str) -> str | None:
    """Returns the optional package for whose lack an import failed."""
    found = re.search(r"No module named '(\w+)", error)
    return found[1] if found and found[1] in OPTIONAL and not has_package(found[1]) else None


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Iterator[None]:
    return (yield from skipping_without_packages())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    return (yield from skipping_without_packages())


def skipping_without_packages() -> Iterator[None]:
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if (name := missing_package(str(error))) is None:
            raise
        skip_without(name, NEEDS[name][1])


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    if report.failed and (name := missing_package(str(report.longrepr))) and name not in required():
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {NEEDS[name][1]}")
    return report


# A garbage collection takes about a millisecond for this many objects.
MOST_TRACKED = 4000


@pytest.fixture(autouse=True)
def ctrl_c_is_as_before() -> Iterator[None]:
    """A test that raises at any moment may do so before a write gives Ctrl-C back."""
    before = signal.getsignal(signal.SIGINT)
    yield
    if signal.getsignal(signal.SIGINT) is not before:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def names_of_earlier_tests_are_free() -> None:
    """A caught exception keeps its test's variables, and so their names, in a reference cycle."""
    gc.collect()
    if len(gc.get_objects()) > MOST_TRACKED and not global_variables():
        # What is left lives as long as the session, as tests and imported modules do: later
        # collections leave it out. A variable that is left, as by a thread that has not ended yet,
        # would keep its name for good.
        gc.freeze()


# How streams run on the stub driver; a real GPU does it its own way.
SCHEDULES = ["oldest", "newest", *(f"random:{seed}" for seed in range(3))]
if os.environ.get("GPUOPT_FULL"):
    SCHEDULES += [f"random:{seed}" for seed in range(3, 100)]


@pytest.fixture(params=SCHEDULES if driver.is_here() else ["its own"])
def every_schedule(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test with streams that run late, in different orders."""
    if not driver.is_here():
        yield request.param
        return
    policy, _, seed = request.param.partition(":")
    with driver.schedule(policy, int(seed or 0)):
        yield request.param


@pytest.fixture(autouse=driver.is_here())
def driver_has_nothing_to_report() -> Iterator[None]:
    """Fails a test whose kernels wrote where they must not, or the like."""
    yield
    reports = driver.take_reports()
    driver.repair()
    assert not reports


@pytest.fixture(autouse=True)
def streams_end_with_their_test() -> Iterator[None]:
    yield
    gpu_streams.drop_streams()


@pytest.fixture(
    params=[
        "host",
        pytest.param("emulated", marks=pytest.mark.emulator),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ]
)
def xp(request: pytest.FixtureRequest) -> Any:
    """The module of a device's arrays."""
    if request.param == "host":
        return np
    if request.param == "emulated":
        request.getfixturevalue("emulated_gpus")
        return fake_cupy
    return pytest.importorskip("cupy")


CPU_FORMS = ["plain", "replayed", pytest.param("compiled", marks=pytest.mark.cxx)]
GPUS = [
    pytest.param("emulated", marks=pytest.mark.emulator),
    pytest.param("gpu", marks=pytest.mark.gpu),
]


@pytest.fixture(params=CPU_FORMS)
def every_cpu_form(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Runs a test with rules as written, and with each form that large work takes, in threads."""
    with in_form(request.param, monkeypatch):
        yield request.param


@contextmanager
def in_form(form: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GPUOPT_COMPILED", "1" if form == "compiled" else "0")
    limits = CpuLimits()
    if form != "plain":
        monkeypatch.setenv("GPUOPT_THREADS", "3")
        limits = CpuLimits(small_elements=1, large_elements=0, elements_per_thread=1)
    with backends.using(Device.cpu, CpuBackend(limits)):
        yield


@pytest.fixture(params=CPU_FORMS)
def every_form_one_by_one(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Runs a test with rules in each form, where no variables are joined to bundles."""
    if request.param != "compiled":
        monkeypatch.setenv("GPUOPT_COMPILED", "0")
    large = 10**9 if request.param == "plain" else 1
    limits = CpuLimits(small_elements=1, large_elements=large)
    with backends.using(Device.cpu, CpuBackend(limits)):
        yield request.param


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """Compiles all kernels at once, on all cores, but for those of tables that no test has."""
    EmulatorLauncher().prepare(
        kernel
        for group in (kernels_without_rule(), *map(kernels_of, update_rules()))
        for kernel in group
        if not is_of_large_table(kernel)
    )


@pytest.fixture
def emulated_gpus(compiled_kernels: None) -> Iterator[list[EmulatorLauncher]]:
    """Makes gpu:0 and gpu:1 usable: arrays of fake_cupy, and kernels that run on the CPU."""
    launchers = [EmulatorLauncher(xp=fake_cupy, index=index) for index in range(2)]
    with ExitStack() as stack:
        for index, each in enumerate(launchers):
            gpu = Device("gpu", index)
            stack.enter_context(backends.using(gpu, CudaBackend(gpu, each)))
        # Ctrl-C, in an earlier test, may have come where a device's context begins or ends.
        fake_cupy.cuda.current.device = 0
        yield launchers


@pytest.fixture(params=["host", *GPUS])
def device(request: pytest.FixtureRequest) -> str:
    """Runs a test on each kind of device, and gives it the name of one."""
    if request.param == "emulated":
        request.getfixturevalue("emulated_gpus")
    return "cpu" if request.param == "host" else "gpu:0"


@pytest.fixture(params=[*CPU_FORMS, *GPUS])
def every_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs a test in each form of the CPU and on each kind of GPU: the device's name."""
    if request.param == "emulated":
        request.getfixturevalue("emulated_gpus")
    if request.param in ("emulated", "gpu"):
        yield "gpu:0"
        return
    with in_form(request.param, monkeypatch):
        yield "cpu"


@pytest.fixture(params=[*CPU_FORMS, pytest.param("kernels", marks=pytest.mark.emulator)])
def each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs a test of numpy's arrays by each form of the CPU, and by kernels: with the backend."""
    if request.param == "kernels":
        yield CudaBackend(Device("gpu"), EmulatorLauncher())
        return
    with in_form(request.param, monkeypatch):
        yield backends.backend_for(Device.cpu)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes how often the host waits for a GPU that is not done yet."""
    seen: list[str] = []
    waiting = launcher.Waiting

    def wait() -> Any:
        seen.append("wait")
        return waiting()

    monkeypatch.setattr(launcher, "Waiting", wait)
    return seen


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[RuleUpdates]:
    """The steps that GPUs have decided about."""
    seen: list[RuleUpdates] = []
    decide = RuleUpdates.decide_on_gpu

    def note(self: RuleUpdates, *given: Any) -> None:
        seen.append(self)
        decide(self, *given)

    monkeypatch.setattr(RuleUpdates, "decide_on_gpu", note)
    return seen
