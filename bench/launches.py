"""Counts the launches, the host's waits and the bytes of a step on a GPU, without a GPU.

    .venv/bin/python -m bench.launches

writes the tables of docs/performance.md. Real CuPy runs each step on the tests' stub driver, which
leaves the kernels out: which are launched depends on nothing that they compute. The bytes follow
from the types that a kernel is compiled for. `bench.gpu_host` times the host's part of such steps.

The process on the driver imports nothing of `bench`: its gpuopt may be that of another commit.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

_ROOT = Path(__file__).resolve().parent.parent
_SUPPORT = _ROOT / "tests" / "support"
# With "accumulation", the number of calls that make an update; the last one updates. The stages of
# the next line stand for an earlier call, by its number.
ACCUMULATED = 3
_CALLS_THAT_ADD = {"first call": 0, "call between": 1}
# After these, nothing is compiled, allocated or uploaded any more.
_WARM_UP_STEPS = 8
# Of the times of a process.
_SAMPLES, _SAMPLE_S = 7, 0.07
_NUM_GROUPS = 40
# Stages of variables in bfloat16.
_OF_BFLOAT16 = {"bfloat16", "masters", "remainders", "rounding"}
# Stages that have a GPU decide whether a step is made.
_DECIDED = {"loss_scale", "growing_scale", "on_nonfinite"}
# By their names in those of programs, of which one is part of another.
_BYTES = {"nv_bfloat16": 2, "float": 4, "Split": 2}
_SLOTS = {"adam": 2, "lars": 1}
# A byte, and the scale of 256 of them.
_CODE_BYTES = 1 + 4 / 256


class Step(NamedTuple):
    """A step to count.

    Attributes:
        stages: What Adam does besides; see `_make_optimizer`.
        shapes: The variables'.
        num_sets: How many sets of gradient arrays the calls use in turn.
        rows: How many rows each gradient has; None for dense gradients.
        dense_shapes: Those of further variables, whose gradients are dense in any case.
    """

    stages: Sequence[str] = ()
    shapes: Sequence[Sequence[int]] = ((1 << 20,),) * 4
    num_sets: int = 1
    rows: int | None = None
    dense_shapes: Sequence[Sequence[int]] = ()


class Counted(NamedTuple):
    """What one call of `apply_gradients` does.

    Attributes:
        kernels: Each kernel that is launched, in order: its name in C++, without namespaces.
        copies: The kind of each copy, as in "host to device".
        waits: How often the host waits for the GPU.
    """

    kernels: Sequence[str]
    copies: Sequence[str]
    waits: int

    @property
    def functions(self) -> list[str]:
        """The kernels' names, without the types that they are compiled for."""
        return [each.partition("<")[0] for each in self.kernels]

    @property
    def bytes_an_element(self) -> float:
        """What kernels of a dense step read and write for each element of a variable."""
        return sum(map(_bytes_moved, self.kernels))


_ALL = "clip_norm, decay, averages"
_DENSE = (
    *("plain", "clip_value", "clip_norm", "decay", "groups", "averages", _ALL, f"groups, {_ALL}"),
    *("loss_scale", f"loss_scale, {_ALL}", "on_nonfinite", f"on_nonfinite, {_ALL}"),
    *("cautious", "cautious, clip_norm", "accumulation, first call", "accumulation, call between"),
    *("accumulation", "accumulation, clip_norm", f"accumulation, loss_scale, {_ALL}"),
    *("bfloat16", f"bfloat16, {_ALL}", "masters", f"masters, {_ALL}", "masters, loss_scale"),
    *("masters, accumulation, first call", "masters, accumulation"),
    *("remainders", f"remainders, {_ALL}", "rounding", f"rounding, {_ALL}"),
    *("slot_bits", f"slot_bits, {_ALL}", "slot_dtype", f"slot_dtype, {_ALL}"),
)
DENSE = {name: Step(name.split(", ")) for name in _DENSE}
# Launches depend on the height of a table, and not on its width.
_TABLE = (1_000_000, 4)
SPARSE = {
    "LazyAdam": Step(["lazy"], [_TABLE], rows=65_536),
    "LazyAdam, 1,000 rows": Step(["lazy"], [_TABLE], rows=1_000),
    "LazyAdam, 10 such tables": Step(["lazy"], [_TABLE] * 10, rows=65_536),
    "Adagrad": Step(["adagrad"], [_TABLE], rows=65_536),
    "Adam, whose other rows catch up": Step(["catch_up"], [_TABLE], rows=65_536),
    "Adam, which updates all rows": Step([], [_TABLE], rows=65_536),
}


def count(steps: Mapping[str, Step]) -> dict[str, Counted]:
    """Counts a step of each, in another process."""
    return {name: Counted(*each) for name, each in _on_driver("count", steps, _ROOT).items()}


def time_on_host(step: Step, checkout: Path = _ROOT) -> float:
    """Returns the milliseconds of the host's part of a step, in another process.

    Args:
        step: The step.
        checkout: The folder of the gpuopt that makes it.
    """
    [found] = _on_driver("time", {"": step}, checkout).values()
    return float(found)


def _on_driver(what: str, steps: Mapping[str, Step], checkout: Path) -> dict[str, Any]:
    path = [*map(str, (checkout, _SUPPORT)), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "GPUOPT_DRIVER_STREAMS": "nothing",
        "GPUOPT_DRIVER_BLOCKS": "plain",
    }
    finished = subprocess.run(
        [sys.executable, str(_SUPPORT / "driver"), __file__, what],
        input=json.dumps(steps),
        cwd=_ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(finished.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    from bench import pages

    pages.write("launches")


# ---- The bytes of a kernel


def _bytes_moved(kernel: str) -> float:
    """Returns what a kernel reads and writes for each element, by the types in its name."""
    function, _, argument = kernel.partition("<")
    rule, of_types = _split(argument)
    names = re.findall("|".join((*_BYTES, "Copied")), of_types)
    types = [_BYTES[name] for name in names if name in _BYTES]
    if function.startswith("measure"):
        return _bytes_measured(rule, names, types)
    # A type for all, or those of the variable, slots, gradient, and what is beside it.
    var, slot, gradient, *beside = types if len(types) > 1 else types * 3
    words = rule.split("_")  # of a rule and its stages
    slots: float = sum(_SLOTS.get(word, 0) for word in words)
    slots *= _CODE_BYTES if "coded" in function else slot
    if function.startswith("sum_"):  # a cautious rule's: steps depend on no variable, or average
        return gradient + slots
    if "averaged" in words:  # the average of 16 bits is of 32
        slots += max(var, 4)
    is_begun = "begin_sum" in rule  # the first of accumulated gradients: no sum is read
    is_copy = "Copied" in names  # of the master, and not read
    return gradient + 2 * slots + var * (2 - is_begun) + sum(beside) * (2 - is_copy)


def _split(argument: str) -> tuple[str, str]:
    """Returns the rule that a kernel's argument is named after, and the types."""
    found = re.match(r"(\w+?)_[0-9a-f]{8}_(\w+)_[0-9a-f]{8}\b", argument)
    return found.groups() if found else ("", argument)  # type: ignore[return-value]


def _bytes_measured(rule: str, names: Sequence[str], types: Sequence[int]) -> float:
    """Returns what is read of gradients, and of variables.

    Args:
        rule: The rule, if variables are read.
        names: Those of the types.
        types: The bytes of types: of the variable, slots, gradient, and what is beside it; or one.
    """
    if not rule:
        return types[0]
    gradient = types[2] if len(types) > 2 else types[0]
    # The whole of a variable that is kept in two parts.
    return types[0] + 2 * ("Split" in names) + gradient


# ---- In the process on the stub driver


def _make_call(step: Step) -> Callable[[], object]:
    import cupy
    import numpy as np

    import gpuopt

    stages = set(step.stages)
    scaled = bool(stages & {"loss_scale", "growing_scale"})
    options = {"loss_scale": np.float32(8)} if scaled else {}
    dtype = np.dtype("bfloat16" if stages & _OF_BFLOAT16 else "float32")
    # Where kernels run, they are not to read anything.
    make = cupy.zeros if _DECIDED & stages else cupy.empty
    shapes = [*step.shapes, *step.dense_shapes]
    variables = [gpuopt.Variable(make(each, dtype)) for each in shapes]
    optimizer = _make_optimizer(stages, variables)

    def make_gradient(shape: Sequence[int], is_dense: bool) -> Any:
        if is_dense or step.rows is None:
            return make(shape, dtype)
        values = make((step.rows, *shape[1:]), dtype)
        return gpuopt.IndexedSlices(values, make(step.rows, np.int64))

    are_dense = [at >= len(step.shapes) for at in range(len(shapes))]
    sets = [
        [(make_gradient(v.shape, each), v) for v, each in zip(variables, are_dense, strict=True)]
        for _ in range(step.num_sets)
    ]
    turn = 0

    def call() -> None:
        nonlocal turn
        turn += 1
        optimizer.apply_gradients(sets[turn % len(sets)], **options)

    return call


def _make_optimizer(stages: set[str], variables: Sequence[Any]) -> Any:
    """Returns Adam, or what the stages name in its place, with their options and wrappers."""
    import gpuopt

    every: dict[str, Any] = {
        "clip_norm": {"clip_norm": 1.0},
        "clip_value": {"clip_value": 1.0},
        "groups": {"groups": lambda: [gpuopt.ParameterGroup("_[13]$", learning_rate=1e-4)]},
        "many_groups": {"groups": lambda: _list_groups(variables)},
        "on_nonfinite": {"on_nonfinite": "skip"},
        "cautious": {"cautious": True},
        "masters": {"masters": "float32"},
        "remainders": {"masters": "remainder"},
        "rounding": {"stochastic_rounding": 1},
        "slot_bits": {"slot_bits": 8},
        "slot_dtype": {"slot_dtype": "bfloat16"},
        "catch_up": {"catch_up": True},
        "averages": {"averages": lambda: gpuopt.ExponentialMovingAverage(0.99)},
    }
    options = {
        key: value() if callable(value) else value
        for name in stages
        for key, value in every.get(name, {}).items()
    }
    optimizer: Any
    if "cautious" in stages:
        decay = 0.01 if "decay" in stages else 0.0
        optimizer = gpuopt.TorchAdamWOptimizer(1e-3, weight_decay=decay, **options)
    elif "decay" in stages:
        optimizer = gpuopt.AdamWOptimizer(0.01, 1e-3, **options)
    else:
        others = {"lars": "LARS", "lazy": "LazyAdam", "adagrad": "Adagrad"}
        name = next((others[each] for each in stages & others.keys()), "Adam")
        optimizer = getattr(gpuopt, f"{name}Optimizer")(1e-3, **options)
    if "loss_scale" in stages:
        optimizer = gpuopt.LossScaleOptimizer(optimizer, gpuopt.contrib.FixedLossScaleManager(8.0))
    if "growing_scale" in stages:
        optimizer = gpuopt.LossScaleOptimizer(optimizer, gpuopt.DynamicLossScale(8.0, 4))
    if "accumulation" in stages:
        return gpuopt.GradientAccumulationOptimizer(optimizer, ACCUMULATED)
    return optimizer


def _list_groups(variables: Sequence[Any]) -> list[Any]:
    import gpuopt

    return [
        gpuopt.ParameterGroup(variables=variables[i::_NUM_GROUPS], learning_rate=1e-4 * i)
        for i in range(1, _NUM_GROUPS)
    ]


def _time_step(step: Step) -> float:
    """Returns the median of some samples, each of them the mean of several steps.

    Where a GPU decides about steps, the kernels run, as the host reads what they decide. The time
    in calls that launch them is left out.
    """
    in_launches = 0.0
    if _DECIDED.intersection(step.stages):
        from cupy.cuda import driver as cuda

        launch = cuda.launchKernel

        def launch_timed(*arguments: Any) -> None:
            nonlocal in_launches
            started = perf_counter()
            launch(*arguments)
            in_launches += perf_counter() - started

        cuda.launchKernel = launch_timed
        import_module("driver").set_policy("immediate")
    call = _make_call(step)
    for _ in range(_WARM_UP_STEPS):
        call()
    gc.collect()
    gc.freeze()
    started = perf_counter()
    call()
    steps = max(3, int(_SAMPLE_S / (perf_counter() - started)))
    samples = []
    for _ in range(_SAMPLES):
        in_launches, started = 0.0, perf_counter()
        for _ in range(steps):
            call()
        samples.append(1e3 * (perf_counter() - started - in_launches) / steps)
    return median(samples)


def _count_step(step: Step) -> Counted:
    call, calls_before = _make_call(step), _WARM_UP_STEPS
    if "accumulation" in step.stages:
        adding = [number for name, number in _CALLS_THAT_ADD.items() if name in step.stages]
        calls_before = _WARM_UP_STEPS * ACCUMULATED + (adding or [ACCUMULATED - 1])[0]
    for _ in range(calls_before):
        call()
    return count_call(call)


def count_call(call: Callable[[], object]) -> Counted:
    """Counts what a function does, in a process on the stub driver."""
    driver = import_module("driver")
    before = driver.counts()
    with driver.record_launches() as launches:
        call()
    after = driver.counts()
    return Counted(
        [each.name.replace("gpuopt::", "") for each in launches if each.kind == "kernel"],
        [each.kind for each in launches if each.kind != "kernel"],
        sum(
            number - before.get(name, 0)
            for name, number in after.items()
            if name.endswith("Synchronize") or name == "cudaMemcpy"
        ),
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        given = {name: Step(*each) for name, each in json.load(sys.stdin).items()}
        do = {"count": _count_step, "time": _time_step}[sys.argv[1]]
        print(json.dumps({name: do(step) for name, step in given.items()}))
    else:
        main()
