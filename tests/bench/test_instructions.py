"""`bench.instructions`."""

from __future__ import annotations

import pytest
from sass import Instruction

from bench import instructions
from bench.harness import ROOT

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
    assert adam["bytes_an_element"] == 28
    assert adam["spilled_bytes"] == 0
    assert adam["loads"] == "4 x 128, 4 x 32"  # of these, 4 where a gradient is no pack
    assert adam["stores"] == "3 x 128"
    [contracted] = instructions.count(ROOT, "adam", "sm_90", contracts=True).values()
    # Of the formula, three products have a sum to go into.
    less = adam["instructions_an_element"] - contracted["instructions_an_element"]
    assert 2.5 <= less <= 3.5


def test_limits_are_of_each_count() -> None:
    before = {
        "registers": 62,
        "threads": 128,
        "spilled_bytes": 0,
        "loads": "2 x 128, 1 x 32",
        "stores": "1 x 128",
        "bytes_an_element": 28.0,
        "instructions_an_element": 10.0,
    }
    same = {"theirs": before, "contracted": before, "shipped": before}
    assert instructions.list_misses(same, "sm_90") == []
    within = {"registers": 64, "instructions_an_element": 13.0, "loads": "3 x 128"}
    assert instructions.list_misses({**same, "shipped": {**before, **within}}, "sm_90") == []
    beyond = {
        "registers": 66,
        "spilled_bytes": 8,
        "loads": "3 x 128, 1 x 32",
        "instructions_an_element": 13.1,
    }
    assert instructions.list_misses({**same, "shipped": {**before, **beyond}}, "sm_90") == [
        "spills 8 bytes",
        "registers 62 to 66",
        "loads 2 x 128, 1 x 32 to 3 x 128, 1 x 32",
        "instructions 1.31 times",
    ]
    slow = {**same, "contracted": {**before, "instructions_an_element": 10.6}}
    of_two = {"a": dict.fromkeys(instructions.ARCHITECTURES, slow)}
    assert ("mean, contracted: instructions 1.060 times", "sm_75") in instructions.list_all_misses(
        of_two
    )
    of_two["b"] = dict.fromkeys(instructions.ARCHITECTURES, same)
    assert instructions.list_all_misses(of_two) == []
    # 28 bytes take 5.83 ps, and 33.5e12 instructions begin in a second.
    assert instructions.find_share_of_h200(before) == pytest.approx(10 / 195.1, rel=1e-3)
