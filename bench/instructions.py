"""Counts the instructions of kernels beside those of another commit, without a GPU.

    .venv/bin/python -m bench.instructions COMMIT

NVRTC compiles the kernels of both commits for five architectures: those of the commit with
contraction of multiplications and additions, this checkout's with it and, as they are shipped,
without. Counted is what a thread executes for the elements that it loads at once, by way of packs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from bench.against_commit import checkout
from bench.harness import ROOT, make_parser, write_results
from gpuopt.bench.machine import describe_commit
from gpuopt.bench.results import Compiled, Figures, Run
from gpuopt.bench.workloads import Workload, make_run

ARCHITECTURES = ["sm_90", "sm_75", "sm_80", "sm_100", "sm_120"]
# This checkout's kernels as they would be with contraction.
_CONTRACTED = "gpuopt, contracted"
_SUPPORT = ROOT / "tests" / "support"
# Of an access, by its width in bits.
_BYTES = {"128": 16, "64": 8}
# An H200: memory's bytes a second (nvidia.com/en-us/data-center/h200), and instructions of threads
# that its multiprocessors begin at most, 32 of each of 4 warps a cycle (docs.nvidia.com/cuda/
# hopper-tuning-guide), at its highest clock.
_BYTES_PER_SECOND = 4.8e12
_INSTRUCTIONS_PER_SECOND = 132 * 4 * 32 * 1.98e9
# Of a multiprocessor; and how many threads it has at once, where that is not 2048.
_REGISTERS, _THREADS = 65536, {"sm_75": 1024, "sm_120": 1536}
# More instructions than any way past a function that divides, or takes a root, in a rare case.
_OF_CALL = 10_000
# What ratios to the other commit's instructions are at most: in the mean of all kernels, and of one
# kernel as it is shipped.
MOST_IN_MEAN, MOST_OF_ONE = {"contracted": 1.05, "shipped": 1.15}, 1.3


class Kernel(NamedTuple):
    """What a kernel is compiled to for one architecture.

    Attributes:
        theirs: The other commit's.
        contracted: This checkout's with contraction.
        shipped: This checkout's.
    """

    theirs: Compiled
    contracted: Compiled
    shipped: Compiled

    def ratio(self, ours: Compiled) -> float:
        """Returns the instructions of one form, divided by the other commit's."""
        return ours.instructions_an_element / self.theirs.instructions_an_element


# By name, and then by architecture.
Kernels = Mapping[str, Mapping[str, Kernel]]


def main() -> None:
    from bench import pages

    parser = make_parser("bench.instructions", __doc__, only="'adam, *'")
    parser.add_argument("commit", metavar="COMMIT", help="the other commit")
    options = parser.parse_args()
    runs: dict[str, Run] = {}
    with checkout(options.commit) as other:
        against = describe_commit(other)
        forms = {against: (other, True), _CONTRACTED: (ROOT, True), "gpuopt": (ROOT, False)}
        for architecture in ARCHITECTURES:
            counted = {
                form: count(folder, options.only, architecture, contracts)
                for form, (folder, contracts) in forms.items()
            }
            # Some have no twin.
            for name in [each for each in counted["gpuopt"] if each in counted[against]]:
                compiled = {form: Figures({}, compiled=of[name]) for form, of in counted.items()}
                runs[f"{name}/{architecture}"] = make_run(Workload(name, {}), compiled)
            print(f"compiled for {architecture}", flush=True)
    for miss, architecture in list_all_misses(read_kernels(runs)):
        print(f"{architecture}, {miss}")
    if not options.no_results:
        file = write_results(runs, f"NVRTC against {against}", device="NVRTC")
        pages.write("instructions", [file])


def read_kernels(runs: Mapping[str, Run]) -> Kernels:
    """Returns the kernels of results, whose runs are each a kernel for one architecture."""
    kernels: dict[str, dict[str, Kernel]] = {}
    for run_name, run in runs.items():
        name, _, architecture = run_name.rpartition("/")
        forms = [each.compiled for each in run.contenders.values() if each.compiled]
        kernels.setdefault(name, {})[architecture] = Kernel(*forms)
    return kernels


def find_share_of_h200(compiled: Compiled) -> float:
    """Returns the instructions of an element, divided by what fits into its bytes' time."""
    seconds = compiled.bytes_an_element / _BYTES_PER_SECOND
    return compiled.instructions_an_element / (seconds * _INSTRUCTIONS_PER_SECOND)


def list_all_misses(kernels: Kernels) -> list[tuple[str, str]]:
    """Lists what is over its limit, with the architecture: of each kernel, and in the mean."""
    misses = [
        (f"{name}: {miss}", architecture)
        for name, every in kernels.items()
        for architecture, kernel in every.items()
        for miss in list_misses(kernel, architecture)
    ]
    for architecture in ARCHITECTURES if kernels else ():
        for form, most in MOST_IN_MEAN.items():
            of_form = (every[architecture] for every in kernels.values())
            ratio = mean(kernel.ratio(getattr(kernel, form)) for kernel in of_form)
            if ratio > most:
                misses.append((f"mean, {form}: instructions {ratio:.3f} times", architecture))
    return misses


def list_misses(kernel: Kernel, architecture: str) -> list[str]:
    """Lists what a kernel has more of on an architecture than its limits allow."""
    theirs, ours = kernel.theirs, kernel.shipped
    misses = [f"spills {ours.spilled_bytes} bytes"] if ours.spilled_bytes else []
    if _count_blocks(ours, architecture) < _count_blocks(theirs, architecture):
        misses.append(f"registers {theirs.registers} to {ours.registers}")
    for kind in ("loads", "stores"):
        before, now = (getattr(each, kind) for each in (theirs, ours))
        if _count_accesses(now) > _count_accesses(before):
            misses.append(f"{kind} {before} to {now}")
    if kernel.ratio(ours) > MOST_OF_ONE:
        misses.append(f"instructions {kernel.ratio(ours):.2f} times")
    return misses


def _count_blocks(compiled: Compiled, architecture: str) -> int:
    """Counts the thread blocks that a multiprocessor has at once; it gives registers by eights."""
    registers = -(-compiled.registers // 8) * 8
    threads = min(_REGISTERS // registers, _THREADS.get(architecture, 2048))
    return int(threads // compiled.threads)


def _count_accesses(accesses: str) -> int:
    return sum(int(each.partition(" x ")[0]) for each in accesses.split(", ") if each)


def count(folder: Path, pattern: str, architecture: str, contracts: bool) -> dict[str, Compiled]:
    """Counts what kernels of a checkout do, by name; see `_count_one`.

    Args:
        folder: The checkout.
        pattern: What their names match.
        architecture: As "sm_90".
        contracts: Whether a product and a sum may be one instruction.
    """
    path = [*map(str, (folder, folder / "tests" / "support")), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as codes:
        worker = [sys.executable, str(ROOT / "bench" / "instructions_worker.py")]
        finished = subprocess.run(
            [*worker, codes, pattern, architecture, str(contracts)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        code = Path(codes, "kernels.cubin").read_bytes()
        sys.path.append(str(_SUPPORT))
        listings = import_module("sass").disassemble(code, Path(codes))
        sys.path.pop()
    compiled = map(json.loads, finished.stdout.splitlines())
    return {each["name"]: _count_one(each, listings[each["symbol"]]) for each in compiled}


def _count_one(compiled: Mapping[str, Any], instructions: Sequence[Any]) -> Compiled:
    access = "LDG" if compiled["is_sum"] else "STG"
    # Sums read a gradient, too.
    most = compiled["arrays"] + compiled["is_sum"]
    path = find_packed_path(instructions, access, most)
    moved = sum(_bytes_of_pack(each.name) for each in path)
    num_packs = _count_packs(path, range(len(path)), "STG")
    elements = compiled["elements"] * max(1, num_packs // compiled["arrays"])
    return Compiled(
        compiled["registers"],
        compiled["threads"],
        compiled["spilled_bytes"],
        _list_accesses(path, "LDG"),
        _list_accesses(path, "STG"),
        moved / elements,
        len(path) / elements,
    )


def _list_accesses(path: Iterable[Any], kind: str) -> str:
    """Lists the widths of loads or stores, in bits, as in "4 x 128, 1 x 32"."""
    names = (each.name for each in path if each.name.startswith(kind))
    widths = Counter(
        next((int(part) for part in name.split(".") if part in ("64", "128")), 32) for name in names
    )
    return ", ".join(f"{number} x {width}" for width, number in sorted(widths.items())[::-1])


# ---- The way of packs through a kernel


def find_packed_path(instructions: Sequence[Any], access: str, most: int) -> list[Any]:
    """Returns what one turn of a kernel's inner loop executes, by the way of packs.

    Of all ways through the innermost loop that moves most bytes in packs, this is the one of
    fewest instructions: it has no slow case of a division, and loops within it have one turn.

    Args:
        instructions: A kernel's, with labels.
        access: How the name of an access begins that packs are counted of.
        most: How many packs of these are in a turn, unless the loop is unrolled.
    """
    graph = _make_graph(instructions)
    backward, order = _search(graph)
    into: dict[int, list[int]] = {at: [] for at in graph}
    for at, nexts in graph.items():
        for each in nexts:
            into[each].append(at)
    ways = []
    for begin in {each for _, each in backward}:
        ends = [at for at, each in backward if each == begin]
        body = _list_body(into, begin, ends)
        inside = [at for at in order if at in body]
        ways.append((body, _find_way(graph, backward, instructions, inside, begin, ends, access)))
    packed = [(body, way) for body, way in ways if way[0] > 0]
    inner = [way for body, way in packed if not any(other < body for other, _ in packed)]
    # Beside a loop that is unrolled, there is often one of a single pack.
    of_one = [way for way in inner if _count_packs(instructions, way[-1], access) <= most]
    *_, path = max(of_one or inner, key=lambda way: way[:2])
    return [instructions[at] for at in path if not instructions[at].label]


def _make_graph(instructions: Sequence[Any]) -> dict[int, list[int]]:
    """Returns which instructions may follow each one."""
    places = {each.label: at for at, each in enumerate(instructions) if each.label}
    graph: dict[int, list[int]] = {}
    for at, each in enumerate(instructions):
        nexts = [at + 1] if at + 1 < len(instructions) else []
        is_sure = not each.has_condition
        if each.name.startswith("BRA"):
            target = places[each.operands[-1].strip("`()")]
            is_sure &= len(each.operands) == 1 and "." not in each.name
            nexts = [target] if is_sure else [*nexts, target]
        elif each.name.startswith(("EXIT", "RET")) and is_sure:
            nexts = []
        graph[at] = nexts
    return graph


def _search(graph: Mapping[int, Sequence[int]]) -> tuple[set[tuple[int, int]], list[int]]:
    """Searches a graph depth first, from the first instruction on.

    Returns:
        The edges from the ends of loops to their beginnings; and the instructions, each after all
        that may follow it by other edges.
    """
    backward, order, seen, open_ones = set(), [], {0}, {0}
    stack = [(0, iter(graph[0]))]
    while stack:
        at, nexts = stack[-1]
        each = next(nexts, None)
        if each is None:
            open_ones.remove(at)
            order.append(at)
            stack.pop()
        elif each in open_ones:
            backward.add((at, each))
        elif each not in seen:
            seen.add(each)
            open_ones.add(each)
            stack.append((each, iter(graph[each])))
    return backward, order


def _list_body(into: Mapping[int, Sequence[int]], begin: int, ends: Sequence[int]) -> set[int]:
    body, left = {begin}, [*ends]
    while left:
        at = left.pop()
        if at not in body:
            body.add(at)
            left += into[at]
    return body


def _find_way(
    graph: Mapping[int, Sequence[int]],
    backward: set[tuple[int, int]],
    instructions: Sequence[Any],
    inside: Sequence[int],
    begin: int,
    ends: Sequence[int],
    access: str,
) -> tuple[int, int, list[int]]:
    """Returns the best way: its bytes in packs, less its instructions, and these.

    `inside` are the loop's instructions, each after all that may follow it in a turn.
    """
    best: dict[int, tuple[int, int]] = {}
    following: dict[int, int] = {}
    for at in inside:
        each = instructions[at]
        ways = [
            (best[other], other)
            for other in graph[at]
            if other in best and (at, other) not in backward
        ]
        if at in ends:
            ways.append(((0, 0), -1))
        if not ways:
            continue
        (packed, less), following[at] = max(ways)
        is_access = each.name.startswith(access)
        cost = _OF_CALL if each.name.startswith("CALL") else not each.label
        best[at] = packed + is_access * _bytes_of_pack(each.name), less - cost
    if begin not in best:
        return 0, 0, []
    path, at = [], begin
    while at >= 0:
        path.append(at)
        at = following[at]
    return *best[begin], path


def _count_packs(instructions: Sequence[Any], path: Iterable[int], access: str) -> int:
    names = [instructions[at].name for at in path]
    return sum(name.startswith(access) and _bytes_of_pack(name) > 0 for name in names)


def _bytes_of_pack(name: str) -> int:
    if not name.startswith(("LDG", "STG")):
        return 0
    return next((_BYTES[part] for part in name.split(".") if part in _BYTES), 0)


if __name__ == "__main__":
    main()
