"""Records the launches of steps on GPUs, on the tests' driver that is not there.

The driver leaves the kernels out, so that a step costs neither time nor memory; which kernels are
launched, and how, depends on nothing that they compute. This module runs in a process of its own,
also with an older gpuopt, and so imports nothing of the benchmark.
"""

from __future__ import annotations

import gc
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).resolve().parent.parent
_SUPPORT = _ROOT / "tests" / "support"
# How many calls make an update, with "accumulation"; the last one updates. Others are recorded by
# the names of these stages, by their numbers.
ACCUMULATED = 3
CALLS_THAT_ADD = {"first call": 0, "call between": 1}
# Stages of variables of that type.
_OF_BFLOAT16 = {"bfloat16", "masters", "remainders", "rounding"}
# After these, nothing is compiled, allocated or uploaded any more.
_WARM_UP_STEPS = 8
_KERNEL = re.compile(
    r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\((.*?)\)\s*\{", re.S
)
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_NUMBER = re.compile(r"(?:const )?(?:int|long long) (\w+)")


class Launch(NamedTuple):
    """A kernel or copy of a step.

    Attributes:
        kernel: The kernel's name in C++, without namespaces; or the copy's kind, as in "host to
            device".
        grid: How many blocks.
        block: How many threads each has.
        arguments: Of the kernel's parameters, those that are integers.
        copied_bytes: The copy's.
    """

    kernel: str
    grid: int
    block: int
    arguments: Mapping[str, int]
    copied_bytes: int


class Resources(NamedTuple):
    """What a block of a compiled kernel takes of its multiprocessor.

    Attributes:
        registers: Of each thread.
        shared_bytes: Shared memory.
    """

    registers: int
    shared_bytes: int


class Recorded(NamedTuple):
    """What a process has recorded.

    Attributes:
        launches: Of one step, by workload.
        resources: By kernel.
    """

    launches: dict[str, list[Launch]]
    resources: dict[str, Resources]


def record(
    workloads: Mapping[str, Mapping[str, Any]],
    num_multiprocessors: int,
    architecture: str | None,
    checkout: Path = _ROOT,
) -> Recorded:
    """Records one call of `apply_gradients` of each workload, in another process.

    Args:
        workloads: For each name, {"job": ..., "shapes": ..., "num_sets": ...} or {"job": ...,
            "table": ..., "lookups": ...}: the fields of a `DenseTask` or `SparseTask`. Those of
            a dense step of Adam may have "stages": see `_with_stages`, `CALLS_THAT_ADD`, and
            "bfloat16". A sparse one may have "catch_up": whether rows catch up, instead of
            LazyAdam's step.
        num_multiprocessors: The GPU's.
        architecture: For which kernels are compiled, as "90"; None to find out no resources.
        checkout: The gpuopt to run.
    """
    printed = run_on_driver(
        [__file__, architecture or "", str(checkout)],
        num_multiprocessors,
        checkout,
        json.dumps(workloads),
    )
    found = json.loads(printed.splitlines()[-1])
    return Recorded(
        {name: [Launch(*each) for each in some] for name, some in found["launches"].items()},
        {name: Resources(*some) for name, some in found["resources"].items()},
    )


def run_on_driver(
    arguments: Sequence[str],
    num_multiprocessors: int,
    checkout: Path = _ROOT,
    given: str = "",
    environment: Mapping[str, str] | None = None,
) -> str:
    """Runs Python on the driver, without kernels, in another process; returns what it prints.

    Args:
        arguments: Python's.
        num_multiprocessors: The GPU's.
        checkout: The gpuopt to run.
        given: The process's standard input.
        environment: More variables of the process's.
    """
    path = [*map(str, (checkout, _SUPPORT)), os.environ.get("PYTHONPATH", "")]
    of_process = {
        **os.environ,
        **(environment or {}),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "GPUOPT_DRIVER_STREAMS": "nothing",
        "GPUOPT_DRIVER_BLOCKS": "plain",
        "GPUOPT_DRIVER_MULTIPROCESSORS": str(num_multiprocessors),
    }
    finished = subprocess.run(
        [sys.executable, str(_SUPPORT / "driver"), *arguments],
        input=given,
        cwd=checkout,
        env=of_process,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return finished.stdout


def main() -> None:
    """Reads workloads from the standard input and prints what it records."""
    architecture, checkout = sys.argv[1:]
    parameters = read_parameters(Path(checkout) / "kernels")
    launches = {}
    for name, workload in json.load(sys.stdin).items():
        calls_before = _calls_before(workload.get("stages", ()))
        launches[name] = _record_call(_make_call(workload), calls_before, parameters)
        _free_memory()
    resources = _compile(architecture) if architecture else {}
    print(json.dumps({"launches": launches, "resources": resources}))


def _calls_before(stages: Sequence[str]) -> int:
    """Returns how many calls come before the one that is recorded."""
    if "accumulation" not in stages:
        return _WARM_UP_STEPS
    numbers = [number for name, number in CALLS_THAT_ADD.items() if name in stages]
    return _WARM_UP_STEPS * ACCUMULATED + (numbers[0] if numbers else ACCUMULATED - 1)


def _make_call(workload: Mapping[str, Any]) -> Callable[[], object]:
    import cupy
    import numpy as np

    import gpuopt

    optimizers: dict[str, Callable[[float], Any]] = {
        "adam": gpuopt.AdamOptimizer if "shapes" in workload else gpuopt.LazyAdamOptimizer,
        "adagrad": gpuopt.AdagradOptimizer,
        "momentum": lambda rate: gpuopt.MomentumOptimizer(rate, 0.9),
    }
    stages, catches_up = workload.get("stages", ()), workload.get("catch_up", False)
    optimizer = optimizers[workload["job"]](1e-3) if not stages else _with_stages(stages)
    if catches_up:
        optimizer = gpuopt.AdamOptimizer(1e-3, catch_up=True)
    is_scaled = {"loss_scale", "growing_scale"} & set(stages)
    more = {"loss_scale": np.float32(8)} if is_scaled else {}
    real = np.dtype("bfloat16" if set(stages) & _OF_BFLOAT16 else "float32")

    def make(shape: Sequence[int], dtype: Any = real) -> Any:
        return cupy.empty(tuple(shape), dtype)

    sets: list[list[Any]]
    if "shapes" in workload:
        copy = bool({"masters", "remainders"} & set(stages))  # else nobody sees what is written
        variables = [gpuopt.Variable(make(each), copy=copy) for each in workload["shapes"]]
        sets = [
            [(make(variable.shape), variable) for variable in variables]
            for _ in range(workload["num_sets"])
        ]
    else:
        count, width = workload["lookups"], workload["table"][1]
        rows = gpuopt.IndexedSlices(make((count, width)), make((count,), np.int64))
        sets = [[(rows, gpuopt.Variable(make(workload["table"]), copy=catches_up))]]
    turn = 0

    def call() -> None:
        nonlocal turn
        turn += 1
        optimizer.apply_gradients(sets[turn % len(sets)], **more)

    return call


def _with_stages(stages: Sequence[str]) -> Any:
    """Returns Adam, or LARS, with what is named: options, and wrappers around it."""
    import gpuopt

    every: dict[str, Any] = {
        "clip_norm": {"clip_norm": 1.0},
        "clip_value": {"clip_value": 1.0},
        "groups": {"groups": [gpuopt.ParameterGroup("_[13]$", learning_rate=1e-4)]},
        "on_nonfinite": {"on_nonfinite": "skip"},
        "cautious": {"cautious": True},
        "masters": {"masters": "float32"},
        "remainders": {"masters": "remainder"},
        "rounding": {"stochastic_rounding": 1},
        "8 bits": {"slot_bits": 8},
        "slot_dtype": {"slot_dtype": "bfloat16"},
        "catch_up": {"catch_up": True},
    }
    options = {key: value for name in stages for key, value in every.get(name, {}).items()}
    if "averages" in stages:
        options["averages"] = gpuopt.ExponentialMovingAverage(0.99)
    optimizer: Any
    if "cautious" in stages:
        decay = 0.01 if "decay" in stages else 0.0
        optimizer = gpuopt.TorchAdamWOptimizer(1e-3, weight_decay=decay, **options)
    elif "decay" in stages:
        optimizer = gpuopt.AdamWOptimizer(0.01, 1e-3, **options)
    elif "lars" in stages:
        optimizer = gpuopt.LARSOptimizer(1e-3, **options)
    else:
        optimizer = gpuopt.AdamOptimizer(1e-3, **options)
    if {"loss_scale", "growing_scale", "on_nonfinite"} & set(stages):
        # Nothing runs that would decide about steps: the host is to learn of no decision.
        device_scaling = import_module("gpuopt.step.device_scaling")
        device_scaling.DeviceScaling._look = lambda scaling: None
    if "loss_scale" in stages:
        optimizer = gpuopt.LossScaleOptimizer(optimizer, gpuopt.FixedLossScaleManager(8.0))
    if "growing_scale" in stages:
        optimizer = gpuopt.LossScaleOptimizer(optimizer, gpuopt.DynamicLossScale(8.0, 4))
    if "accumulation" in stages:
        return gpuopt.GradientAccumulationOptimizer(optimizer, ACCUMULATED)
    return optimizer


def _record_call(
    call: Callable[[], object], calls_before: int, parameters: Mapping[str, Sequence[str | None]]
) -> list[Launch]:
    driver = import_module("driver")

    for _ in range(calls_before):
        call()
    with driver.record_launches() as launches:
        call()
    return [
        Launch(
            _short(each.name) or each.kind,
            each.grid[0],
            each.block[0],
            _integers(each, parameters.get(_function(each.name))),
            each.num_bytes,
        )
        for each in launches
    ]


def _integers(launch: Any, parameters: Sequence[str | None] | None) -> dict[str, int]:
    """Returns a launch's arguments that are integers; none are known of a kernel of CuPy's."""
    if parameters is None:
        return {}
    return {
        name: int.from_bytes(value, "little", signed=True)
        for name, value in zip(parameters, launch.arguments, strict=True)
        if name is not None
    }


def _free_memory() -> None:
    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()


def read_parameters(folder: Path) -> dict[str, list[str | None]]:
    """Returns the name of each kernel's parameters; None for those that are no integers."""
    found = {}
    for path in folder.glob("*.cu"):
        for function, declared in _KERNEL.findall(re.sub(r"//.*", "", path.read_text())):
            numbers = (_NUMBER.fullmatch(" ".join(each.split())) for each in _at_commas(declared))
            found[function] = [number and number[1] for number in numbers]
    return found


def _at_commas(declared: str) -> list[str]:
    """Divides a list of parameters, but not where commas are between < and >."""
    return re.split(r",(?![^<]*>)", declared)


def _short(expression: str) -> str:
    return expression.replace("gpuopt::", "")


def _function(expression: str) -> str:
    return _short(expression).partition("<")[0]


def _compile(architecture: str) -> dict[str, Resources]:
    """Compiles every kernel that this process has launched; returns what its blocks take."""
    from cupy.cuda.compiler import compile_using_nvrtc

    modules = import_module("driver.kernels").modules

    found: dict[str, Resources] = {}
    for module in modules:
        if module.is_cupys:
            continue
        log = io.StringIO()
        _, names = compile_using_nvrtc(
            module.source,
            (*module.options, "--ptxas-options=-v"),
            architecture,
            name_expressions=tuple(module.expressions.values()),
            log_stream=log,
        )
        for name, mangled in names.items():
            report = log.getvalue().partition(f"for {mangled}\n")[2]
            [registers] = _REGISTERS.findall(report)[:1]
            shared = _SHARED.findall(report.partition(" bytes cmem")[0])
            found[_short(name)] = Resources(int(registers), int(shared[0]) if shared else 0)
    return found


if __name__ == "__main__":
    main()
