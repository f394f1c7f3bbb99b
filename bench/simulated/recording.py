"""Records a step's launches, and the memory that they find, on the tests' driver.

It runs in a process of its own. The driver leaves the kernels out: what they compute is the
simulator's to find.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from bench.simulated.tasks import POOL_ALIGNMENT

# In which everything is compiled, allocated and uploaded.
_WARM_UP_STEPS = 4
# For tables of addresses, and what kernels leave for others.
_OTHER_BYTES = 4 * 2**20


def main() -> None:
    """Reads a job from the file that is named, and writes beside it what it finds.

    The job is an npz file of `description`, with the optimizer's name and arguments, and the
    alignment of arrays, in JSON; and of each variable `table<i>`, its slots `<slot><i>`, its
    gradient `grad<i>` and, if that is sparse, `rows<i>`.
    """
    folder = Path(sys.argv[1])
    job = dict(np.load(folder / "job.npz"))
    description = json.loads(str(job.pop("description")))
    alignment = description["alignment"]
    _lay_out(sum(array.nbytes + alignment for array in job.values()), alignment)
    recorded = _record(description["optimizer"], description["arguments"], job)
    (folder / "memory.bin").write_bytes(recorded.pop("memory"))
    (folder / "launches.json").write_text(json.dumps(recorded))


def _lay_out(num_bytes: int, alignment: int) -> None:
    """Has CuPy's arrays lie one behind the other, each from a multiple of `alignment` on.

    Args:
        num_bytes: Of all arrays of the job, as they will lie.
        alignment: That of CuPy's pool, or less.
    """
    import cupy

    # As in a program that has run for a while, the pool has a block of memory to divide.
    block = cupy.cuda.alloc(num_bytes + _OTHER_BYTES)
    if alignment == POOL_ALIGNMENT:
        return
    begin = 0

    def allocate(size: int) -> Any:
        nonlocal begin
        allocated = block + begin
        begin += -(-size // alignment) * alignment
        if begin > block.mem.size:
            raise MemoryError(f"{begin} bytes of {block.mem.size}")
        return allocated

    cupy.cuda.set_allocator(allocate)


def _record(
    name: str, arguments: Mapping[str, Any], given: Mapping[str, np.ndarray[Any, Any]]
) -> dict[str, Any]:
    driver = import_module("driver")
    step, arrays = _make_step(name, arguments, given)
    for key, array in arrays.items():
        array.set(given[key])
    memory = driver.memory()
    with driver.record_launches() as launches:
        step()
    kinds = [each.kind for each in launches]
    kernels = [each for each in launches if each.kind == "kernel"]
    if kinds[: len(kernels)] != ["kernel"] * len(kernels) or "host to device" in kinds:
        raise ValueError(f"expected a step of kernels, and then downloads; got {kinds}")
    return {
        "step": _WARM_UP_STEPS + 1,
        "begin": memory.begin,
        "memory": memory.values,
        "arrays": {key: array.data.ptr for key, array in arrays.items()},
        "launches": [
            {
                "kernel": each.name,
                "grid": each.grid[0],
                "block": each.block[0],
                "arguments": [value.hex() for value in each.arguments],
            }
            for each in kernels
        ],
        "sources": _sources({each.name for each in kernels}),
    }


def _make_step(
    name: str, arguments: Mapping[str, Any], given: Mapping[str, np.ndarray[Any, Any]]
) -> tuple[Callable[[], object], dict[str, Any]]:
    """Returns a step whose optimizer has its slots, and the arrays to be filled, by name."""
    import cupy

    import gpuopt

    optimizer = getattr(gpuopt, name)(**arguments)
    arrays = {key: cupy.empty_like(given[key]) for key in given if key.startswith("table")}
    pairs = []
    for i in range(len(arrays)):
        variable = gpuopt.Variable(arrays[f"table{i}"], copy=False)
        grad: Any = cupy.asarray(given[f"grad{i}"])
        if f"rows{i}" in given:
            grad = gpuopt.IndexedSlices(grad, cupy.asarray(given[f"rows{i}"]))
        pairs.append((grad, variable))

    def step() -> None:
        optimizer.apply_gradients(pairs)

    for _ in range(_WARM_UP_STEPS):
        step()
    for slot in optimizer.get_slot_names():
        for i, (_, variable) in enumerate(pairs):
            arrays[f"{slot}{i}"] = optimizer.get_slot(variable, slot).storage
    return step, arrays


def _sources(kernels: set[str]) -> list[dict[str, Any]]:
    """Returns, for each module with some of these kernels, what NVRTC needs."""
    return [
        {"source": module.source, "options": module.options, "kernels": sorted(found)}
        for module in import_module("driver.kernels").modules
        if (found := kernels & set(module.expressions.values()))
    ]


if __name__ == "__main__":
    main()
