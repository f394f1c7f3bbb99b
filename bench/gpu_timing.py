"""The model's arithmetic: how long a launch takes on a GPU. Nothing here is measured."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.gpu_kernels import KERNELS, WorkOf
from bench.gpu_launches import Launch, Resources
from bench.gpu_work import L2_US, Data, Work

# Between the end of a kernel and the beginning of the next one in its stream; from the review.
GAP_US = 0.8
# Of each kernel: its parameters and first instructions come from L2, and its last stores go there.
ENDS_US = 2 * L2_US
# A copy of a few bytes between host and GPU, the gap included; from the review.
COPY_US = 2.0

# What NVIDIA's tuning guides say of compute capabilities 7.5 to 9.0.
_REGISTERS = 65536
_WARP = 32
_REGISTERS_TOGETHER = 256  # a warp gets multiples of these


class Gpu(NamedTuple):
    """A GPU, from its data sheet.

    Attributes:
        name: As CUDA gives it.
        bytes_per_second: Of its memory.
        share: How much of this is reached.
        l2_bytes_per_second: Of its L2, as measured.
        multiprocessors: How many it has.
        architecture: For which kernels are compiled.
        most_threads: Of a multiprocessor.
        most_blocks: Of a multiprocessor.
        shared_bytes: Of a multiprocessor, for blocks.
        reserved_bytes: Of these, what the system takes of each block.
    """

    name: str
    bytes_per_second: float
    share: float
    l2_bytes_per_second: float
    multiprocessors: int
    architecture: str
    most_threads: int
    most_blocks: int
    shared_bytes: int
    reserved_bytes: int


# NVIDIA's data sheets. Of the memory's bandwidth, a V100 reached 0.83 (Jia et al. 2018), a T4 0.69
# and 1.27 TB/s of its L2 (Jia et al. 2019), copies in a simulation of 29a79d3 0.89. An H100's L2
# gave 5.5 TB/s (Chips and Cheese 2023); an A100's is taken to do so, too.
GPUS: Mapping[str, Gpu] = {
    "H100": Gpu(
        "NVIDIA H100 80GB HBM3", 3.35e12, 0.85, 5.5e12, 132, "90", 2048, 32, 228 << 10, 1 << 10
    ),
    "H200": Gpu("NVIDIA H200", 4.8e12, 0.85, 5.5e12, 132, "90", 2048, 32, 228 << 10, 1 << 10),
    "A100": Gpu(
        "NVIDIA A100-SXM4-80GB", 2.039e12, 0.85, 5.5e12, 108, "80", 2048, 32, 164 << 10, 1 << 10
    ),
    "T4": Gpu("Tesla T4", 0.32e12, 0.69, 1.27e12, 40, "75", 1024, 16, 64 << 10, 0),
}


class Modelled(NamedTuple):
    """What the model says of a launch.

    Attributes:
        kernel: Its name, or the copy's kind.
        us: How long it takes, the gap before it included.
        num_bytes: Read and written.
        loads: Dependent loads: those that a block waits for one after another, until the first data
            of its first item are there.
        limit: What takes the most time: "bytes", "waits", "longest run" or "copy".
    """

    kernel: str
    us: float
    num_bytes: float
    loads: float
    limit: str


def model_step(
    launches: Sequence[Launch],
    data: Data,
    gpu: Gpu,
    resources: Mapping[str, Resources],
    kernels: Mapping[str, WorkOf] = KERNELS,
) -> list[Modelled]:
    """Models each launch of a step; the step takes the sum of their times.

    Args:
        launches: Recorded with as many multiprocessors as the GPU has.
        data: What the step updates.
        gpu: Where it runs.
        resources: What blocks take, by kernel, compiled for the GPU.
        kernels: What each kernel does.

    Raises:
        KeyError: nothing is known of a kernel.
    """
    return [_model_launch(launch, data, gpu, resources, kernels) for launch in launches]


def _model_launch(
    launch: Launch,
    data: Data,
    gpu: Gpu,
    resources: Mapping[str, Resources],
    kernels: Mapping[str, WorkOf],
) -> Modelled:
    if launch.copied_bytes:
        return Modelled(launch.kernel, COPY_US, launch.copied_bytes, 0, "copy")
    work = kernels[launch.kernel.partition("<")[0]](launch, data)
    resident = gpu.multiprocessors * resident_blocks(gpu, launch.block, resources[launch.kernel])
    first = work.begin.and_then(work.filling)
    seconds = work.num_bytes / (gpu.bytes_per_second * gpu.share)
    seconds += work.cached_bytes / gpu.l2_bytes_per_second
    times = {
        "waits": waiting_us(work, launch.grid, resident),
        # Data flow as soon as the first are there.
        "bytes": first.us + 1e6 * seconds,
    }
    # The longest run may be any: if not all begin at once, half of them come before, on average.
    waiting = max(0.0, 1 - min(launch.grid, resident) * work.items_per_block / work.items)
    begun = waiting * max(times.values()) / 2
    times["longest run"] = begun + work.begin.us + work.longest.us
    limit = max(times, key=lambda name: times[name])
    us = GAP_US + ENDS_US + times[limit]
    if limit == "bytes" and first.us > times["bytes"] / 2:
        limit = "waits"
    num_bytes = work.num_bytes + work.cached_bytes
    return Modelled(launch.kernel, us, num_bytes, first.loads, limit)


def resident_blocks(gpu: Gpu, num_threads: int, resources: Resources) -> int:
    """Returns how many blocks a multiprocessor runs at once: what CUDA calls occupancy."""
    warps = math.ceil(num_threads / _WARP)
    of_warp = math.ceil(resources.registers * _WARP / _REGISTERS_TOGETHER) * _REGISTERS_TOGETHER
    return min(
        gpu.most_blocks,
        gpu.most_threads // num_threads,
        _REGISTERS // (of_warp * warps),
        gpu.shared_bytes // max(1, resources.shared_bytes + gpu.reserved_bytes),
    )


def waiting_us(work: Work, grid: int, resident: int) -> float:
    """Returns when the last block is done, if loads only take time and no bandwidth.

    A block that is done makes room for the next one.
    """
    at_once = grid * work.items_per_block
    rounds, others = divmod(work.items, at_once)
    longer = math.ceil(others / work.items_per_block)  # these blocks have one round more
    ends = [0.0] * min(grid, resident)
    for block in range(grid):
        own = rounds + (block < longer)
        heapq.heapreplace(ends, ends[0] + work.begin.us + own * work.item.us)
    return max(ends)
