"""`bench.instructions`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sass import Instruction

from bench import instructions, pages
from bench.harness import ROOT, write_results
from bench.instructions import (
    ARCHITECTURES,
    Kernel,
    find_share_of_h200,
    list_all_misses,
    list_misses,
)
from gpuopt.bench.compare import compare_results, list_advice
from gpuopt.bench.page import make_page
from gpuopt.bench.results import Compiled, Figures, Results, read_results
from gpuopt.bench.workloads import Workload, make_run

pytestmark = pytest.mark.internal

# A loop over packs, and within its turn: a gradient by a pack or one by one, a division that may be
# a call, and a loop over parts; and a loop over single elements. `@` is for a predicate.
_LISTING = """
  S2R R0
 .packs
 @BRA .one_by_one
  LDG.E.128 R4
  BRA .divide
 .one_by_one
  LDG.E R4
  LDG.E R5
  LDG.E R6
 .divide
  MUFU.RCP R8
 @BRA .divided
  CALL.REL.NOINC .division
 .divided
 @BRA P1, .sum
 .sum
  FADD R9
 @BRA .sum
  STG.E.EF.128 R4
 @BRA .packs
 .single
  LDG.E.64 R4
  STG.E.64 R4
 @BRA .single
  EXIT
 .division
  FMUL R8
  RET.REL.NODEC R20
"""


def _read(listing: str) -> list[Instruction]:
    read = []
    for line in listing.strip("\n").splitlines():
        name, _, operands = line[2:].partition(" ")
        if line.startswith(" ."):
            read.append(Instruction("", label=name))
        else:
            branch = operands.replace(".", "`(") + ")" if "." in operands else operands
            given = tuple(branch.split(", "))
            read.append(Instruction(name, given, has_condition=line[1] == "@"))
    return read


def test_the_way_of_packs_has_no_call_and_no_gradient_one_by_one() -> None:
    path = instructions.find_packed_path(_read(_LISTING), "STG", 1)
    names = [each.name for each in path]
    assert names == [
        *("BRA", "LDG.E.128", "BRA", "MUFU.RCP", "BRA", "BRA"),
        *("FADD", "BRA", "STG.E.EF.128", "BRA"),
    ]


@pytest.mark.nvrtc
def test_adams_kernel_is_counted_as_it_is_shipped() -> None:
    [(name, adam)] = instructions.count(ROOT, "adam", "sm_90", contracts=False).items()
    assert name == "adam"
    assert adam.bytes_an_element == 28
    assert adam.spilled_bytes == 0
    assert adam.loads == "4 x 128, 4 x 32"  # of these, 4 where a gradient is no pack
    assert adam.stores == "3 x 128"
    [contracted] = instructions.count(ROOT, "adam", "sm_90", contracts=True).values()
    # Of the formula, three products have a sum to go into.
    less = adam.instructions_an_element - contracted.instructions_an_element
    assert 2.5 <= less <= 3.5


BEFORE = Compiled(
    registers=62,
    threads=128,
    spilled_bytes=0,
    loads="2 x 128, 1 x 32",
    stores="1 x 128",
    bytes_an_element=28.0,
    instructions_an_element=10.0,
)
SAME = Kernel(BEFORE, BEFORE, BEFORE)


def test_limits_are_of_each_count() -> None:
    assert list_misses(SAME, "sm_90") == []
    within = replace(BEFORE, registers=64, instructions_an_element=13.0, loads="3 x 128")
    assert list_misses(SAME._replace(shipped=within), "sm_90") == []
    beyond = replace(
        BEFORE,
        registers=66,
        spilled_bytes=8,
        loads="3 x 128, 1 x 32",
        instructions_an_element=13.1,
    )
    assert list_misses(SAME._replace(shipped=beyond), "sm_90") == [
        "spills 8 bytes",
        "registers 62 to 66",
        "loads 2 x 128, 1 x 32 to 3 x 128, 1 x 32",
        "instructions 1.31 times",
    ]
    slow = SAME._replace(contracted=replace(BEFORE, instructions_an_element=10.6))
    of_two = {"a": dict.fromkeys(ARCHITECTURES, slow)}
    assert ("mean, contracted: instructions 1.060 times", "sm_75") in list_all_misses(of_two)
    of_two["b"] = dict.fromkeys(ARCHITECTURES, SAME)
    assert list_all_misses(of_two) == []
    # 28 bytes take 5.83 ps, and 33.5e12 instructions begin in a second.
    assert find_share_of_h200(BEFORE) == pytest.approx(10 / 195.1, rel=1e-3)


def test_kernels_are_written_and_read_as_all_results_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(folder: Path, pattern: str, architecture: str, contracts: bool) -> Any:
        registers = 50 if folder == tmp_path else 40 + contracts
        counted = {name: replace(BEFORE, registers=registers) for name in ("adam", "adam, rows")}
        return counted if folder == tmp_path else {**counted, "new": BEFORE}

    monkeypatch.setattr(instructions, "checkout", lambda commit: nullcontext(tmp_path))
    monkeypatch.setattr(instructions, "describe_commit", lambda folder: "abc")
    monkeypatch.setattr(instructions, "count", count)
    write = partial(write_results, output=tmp_path / "results")
    monkeypatch.setattr(instructions, "write_results", write)
    written: list[Path] = []
    monkeypatch.setattr(pages, "write", lambda part, files: written.extend(files))
    monkeypatch.setattr("sys.argv", ["", "older"])
    instructions.main()
    [file] = written
    assert file.parent.name == "nvrtc-against-abc"
    runs = read_results(file).runs
    assert list(runs["adam/sm_80"].contenders) == ["abc", "gpuopt, contracted", "gpuopt"]
    kernels = instructions.read_kernels(runs)
    assert list(kernels) == ["adam", "adam, rows"]
    for of_one in kernels.values():
        assert list(of_one) == ARCHITECTURES
        for kernel in of_one.values():
            assert [each.registers for each in kernel] == [50, 41, 40]


def test_results_without_times_have_no_verdict_and_a_page() -> None:
    compiled = make_run(Workload("adam", {}), {"gpuopt": Figures({}, compiled=BEFORE)})
    results = Results("1", "today", "NVRTC", {}, {"adam/sm_90": compiled}, {})
    assert compare_results(results, results) == []
    assert list_advice([], results, results) == []
    assert "<td>gpuopt</td>" in make_page(results)
