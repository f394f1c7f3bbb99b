"""What NVRTC makes of the kernels: 16 bytes at a time, loads in flight together, caching hints."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from dtypes import DTYPES_BY_NAME
from every_kernel import (
    DTYPES,
    IS_FULL,
    kernels_of,
    kernels_of_codes,
    kernels_without_rule,
    rules_to_compile,
    types_of,
)
from every_optimizer import update_rules
from nvrtc import compile_together
from sass import Instruction, disassemble, loads_in_flight

from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.launch_shapes import FEW_ROWS, PACK_BYTES, SORT_THREADS, SORT_TILE
from gpuopt.backends.cuda.mixed import SPLIT, Mixed
from gpuopt.optimizers.nadam import nadam_decay
from gpuopt.rules.averaged import averaged
from gpuopt.rules.catch_up import NUM_SUMS
from gpuopt.rules.clipped import clipped
from gpuopt.rules.rounded import rounded
from gpuopt.rules.scaled import scaled
from gpuopt.rules.sources import kernel_root, on_disk
from gpuopt.rules.update_rule import UpdateRule

pytestmark = pytest.mark.nvrtc

RULES = rules_to_compile()
ADAM = next(rule for rule in RULES if rule.name == "adam")
CLIPPED = clipped(ADAM)
# The most times that a thread waits for loads on its way through the kernel, from end to end: where
# each load has a branch of its own, as it is easily written, it is 9 to 25 times.
MOST_WAITS = {
    "count_digits": 2,
    "check_and_count_digits": 2,
    "move_rows": 9,
    "sort_few_rows": 2,
}


def compiled(
    group: list[Kernel], architecture: str, folder: Path, instead: Path | None = None
) -> list[list[Instruction]]:
    """Returns each kernel's instructions; see `compile_together`."""
    code, _ = compile_together(group, architecture, instead)
    by_name = disassemble(bytes(code.code), folder)
    return [by_name[code.symbol_mapping[kernel.expression].decode()] for kernel in group]


def accesses(instructions: list[Instruction]) -> Counter[str]:
    """Counts the instructions that read or write memory, but for shared memory."""
    starts = ("LDG", "STG", "LDL", "STL", "LD.", "ST.")
    return Counter(each.name for each in instructions if each.name.startswith(starts))


def packs(counted: Counter[str], instruction: str) -> int:
    return sum(n for name, n in counted.items() if name.startswith(instruction) and ".128" in name)


@pytest.mark.parametrize("architecture", ["sm_90", "sm_75", "sm_80", "sm_100", "sm_120"])
def test_loads_of_sparse_kernels_are_in_flight_together(architecture: str, tmp_path: Path) -> None:
    group = [kernel for kernel in kernels_without_rule() if kernel.function in MOST_WAITS]
    assert {kernel.function for kernel in group} == MOST_WAITS.keys()
    for kernel, instructions in zip(group, compiled(group, architecture, tmp_path), strict=True):
        in_flight = loads_in_flight(instructions)
        assert len(in_flight) <= MOST_WAITS[kernel.function], (kernel.expression, in_flight)
        keys = FEW_ROWS if kernel.function == "sort_few_rows" else SORT_TILE
        reads_flag = kernel.function != "check_and_count_digits"
        assert sum(in_flight) >= keys // SORT_THREADS + reads_flag, (kernel.expression, in_flight)


def some(group: list[Kernel]) -> list[Kernel]:
    """Every third kernel, unless asked for all."""
    return group if IS_FULL else group[::3]


@pytest.mark.parametrize("architecture", ["sm_90", "sm_75"] if IS_FULL else ["sm_90"])
def test_two_keys_that_tell_where_a_run_begins_are_in_flight_together(
    architecture: str, tmp_path: Path
) -> None:
    """Beside the flag of refused rows, of which the load comes before the loop."""
    group = [kernel for kernel in kernels_without_rule() if kernel.function == "mark_rows"]
    updates = "sparse_update", "late_update"
    group += some([kernel for kernel in kernels_of(ADAM) if kernel.function in updates])
    assert {kernel.function for kernel in group} == {"mark_rows", *updates}
    for kernel, instructions in zip(group, compiled(group, architecture, tmp_path), strict=True):
        in_flight = loads_in_flight(instructions)
        assert in_flight[:2] == [1, 2], (kernel.expression, in_flight)


def test_a_sum_of_a_runs_rows_has_eight_of_them_in_flight(tmp_path: Path) -> None:
    group = [kernels.sum_pieces("float32", "uint32")]
    [instructions] = compiled(group, "sm_90", tmp_path)
    assert sum(count >= 8 for count in loads_in_flight(instructions)) >= 3


def test_the_flag_of_refused_rows_and_the_first_chunk_are_in_flight_together(
    tmp_path: Path,
) -> None:
    group = [kernels.dense_update(ADAM, dtype) for dtype in DTYPES]
    for instructions in compiled(group, "sm_90", tmp_path):
        assert loads_in_flight(instructions)[0] == 2


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_updates_move_16_bytes_at_a_time(rule: UpdateRule, tmp_path: Path) -> None:
    group = kernels_of(rule)
    for kernel, instructions in zip(group, compiled(group, "sm_90", tmp_path), strict=True):
        counted = accesses(instructions)
        where = (kernel.expression, counted)
        # Slots, and except where it is zero, the gradient; AdagradDA does not read the variable. A
        # row-wise rule reads gradients twice.
        has_grad = kernel.function != "update_other_rows"
        slots = len(rule.slots) - len(rule.row_slots)
        assert packs(counted, "LDG") >= slots + has_grad + bool(rule.row_slots), where
        if kernel.function != "sum_terms":
            assert packs(counted, "STG") >= 1 + slots, where
        assert not any(name.startswith(("LDL", "STL", "LD.", "ST.")) for name in counted), where


@pytest.mark.parametrize("rule", [nadam_decay, averaged(nadam_decay)], ids=lambda rule: rule.name)
def test_nothing_is_moved_that_a_rule_does_not_write(rule: UpdateRule, tmp_path: Path) -> None:
    """Two slots decay; an average follows the variable, which stays."""
    [instructions] = compiled([kernels.update_other_rows(rule, "float32")], "sm_90", tmp_path)
    counted = accesses(instructions)
    assert packs(counted, "STG") == len(rule.slots)
    assert packs(counted, "LDG") == len(rule.slots) + rule.is_averaged


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_alone_off_16_bytes_costs_only_its_own_packs(dtype: str, tmp_path: Path) -> None:
    """Weights and slots are loaded by packs alone, gradients by packs or one by one."""
    [instructions] = compiled([kernels.dense_update(ADAM, dtype)], "sm_90", tmp_path)
    counted = accesses(instructions)
    assert packs(counted, "LDG.E.128") == packs(counted, "STG.E.128") == 1
    assert packs(counted, "LDG.E.EF.128") == len(ADAM.slots) + 1
    assert packs(counted, "STG.E.EF.128") == len(ADAM.slots)
    single = sum(n for name, n in counted.items() if "LDG.E.EF" in name and "128" not in name)
    pack_size = PACK_BYTES // DTYPES_BY_NAME[dtype].itemsize
    # Besides, an element outside of packs has a gradient and slots; LDG.E.EF.64 is a double.
    assert single == pack_size + 1 + len(ADAM.slots)


def test_caches_keep_weights_and_parts_and_evict_gradients_and_slots(tmp_path: Path) -> None:
    group = [
        kernels.sparse_update(ADAM, "float32", "uint32"),
        kernels.sum_pieces("float32", "uint32"),
    ]
    update, pieces = map(accesses, compiled(group, "sm_90", tmp_path))
    assert packs(update, "STG.E.128") == 1
    assert packs(update, "STG.E.EF.128") == len(ADAM.slots)
    assert packs(pieces, "LDG.E.EF.128") == 8
    assert packs(pieces, "LDG.E.128") == 8
    assert packs(pieces, "STG.E.128") == 2
    assert packs(pieces, "STG.E.EF.128") == 0


def bytes_of_packs(counted: Counter[str]) -> int:
    """Counts what loads and stores of slots and gradients, and stores of weights, move as packs.

    An element outside of packs is moved by fewer than 8 bytes, and the entry of a table by loads
    that are not marked to be evicted.
    """
    sizes = {"128": 16, "64": 8}
    return sum(
        number * sizes[name.rpartition(".")[2]]
        for name, number in counted.items()
        if name.rpartition(".")[2] in sizes and (".EF." in name or name.startswith("STG"))
    )


@pytest.mark.parametrize("copy", ["float16", "bfloat16"])
def test_adam_moves_28_bytes_for_a_parameter_with_a_master_copy(copy: str, tmp_path: Path) -> None:
    storage = Mixed("float32", "float32", copy, copy)
    [instructions] = compiled([kernels.dense_update(ADAM, storage)], "sm_90", tmp_path)
    counted = accesses(instructions)
    elements = PACK_BYTES // 4
    assert bytes_of_packs(counted) == 28 * elements, counted
    assert packs(counted, "STG.E.EF.128") == 1 + len(ADAM.slots)
    assert counted["STG.E.64"] == 1  # the weights: the next forward pass reads them


def test_adam_moves_26_bytes_for_a_parameter_with_a_remainder(tmp_path: Path) -> None:
    storage = Mixed("bfloat16", "float32", "bfloat16", SPLIT)
    [instructions] = compiled([kernels.dense_update(ADAM, storage)], "sm_90", tmp_path)
    counted = accesses(instructions)
    # Loads of weights, which stay in caches, look like those of the tables.
    weights = 2
    assert bytes_of_packs(counted) == (26 - weights) * (PACK_BYTES // 4), counted
    assert packs(counted, "STG.E.EF.128") == len(ADAM.slots)
    assert counted["STG.E.64"] == counted["STG.E.EF.64"] == 1  # the weights, and the remainder
    assert counted["LDG.E.EF.64"] == 2  # the gradient, and the remainder


@pytest.mark.parametrize("is_rounded", [False, True], ids=["to nearest", "at random"])
def test_adam_moves_20_bytes_for_a_parameter_with_slots_in_bfloat16(
    is_rounded: bool, tmp_path: Path
) -> None:
    storage = Mixed("float32", "bfloat16", "float32")
    rule = rounded(ADAM) if is_rounded else ADAM
    [instructions] = compiled([kernels.dense_update(rule, storage)], "sm_90", tmp_path)
    counted = accesses(instructions)
    variable = 4  # its load, which stays in caches
    assert bytes_of_packs(counted) == (20 - variable) * (PACK_BYTES // 4), counted
    assert counted["LDG.E.EF.64"] == counted["STG.E.EF.64"] == len(ADAM.slots)


def test_adam_moves_18_bytes_for_a_parameter_with_a_remainder_and_such_slots(
    tmp_path: Path,
) -> None:
    storage = Mixed("bfloat16", "bfloat16", "bfloat16", SPLIT)
    [instructions] = compiled([kernels.dense_update(ADAM, storage)], "sm_90", tmp_path)
    counted = accesses(instructions)
    weights = 2
    assert bytes_of_packs(counted) == (18 - weights) * (PACK_BYTES // 2), counted
    assert packs(counted, "STG.E.EF.128") == 1 + len(ADAM.slots)


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("sm_90", "float32"), ("sm_90", "float64"), ("sm_90", "bfloat16"), ("sm_75", "float32")],
)
def test_rows_that_catch_up_are_read_and_written_once(
    architecture: str, dtype: str, tmp_path: Path
) -> None:
    group = [
        kernels.sparse_update(ADAM, dtype, "uint32"),
        kernels.late_update(ADAM, ADAM, dtype, "uint32"),
        kernels.bring_up_rows(ADAM, ADAM, dtype, "int64"),
    ]
    update, late, alone = map(accesses, compiled(group, architecture, tmp_path))
    # Slots and gradients, by packs and one by one.
    for counted in (update, late):
        assert packs(counted, "LDG.E.EF") == len(ADAM.slots) + 4
        assert packs(counted, "STG.E.EF") == len(ADAM.slots)
    assert evicted(late) == evicted(update)
    assert packs(alone, "LDG.E.EF") == packs(alone, "STG.E.EF") == len(ADAM.slots)
    # Weights beside them. A row reads its sums once for a pack, and once for an element alone; who
    # counts the step reads sums and what is added, and writes the sums: all in float64.
    sums = NUM_SUMS * 8 // PACK_BYTES
    assert packs(late, "LDG") == packs(update, "LDG") + 4 * sums
    assert packs(late, "STG") == packs(update, "STG") + sums
    assert packs(alone, "LDG") == 1 + len(ADAM.slots) + 2 * sums
    assert packs(alone, "STG") == 1 + len(ADAM.slots)


def evicted(counted: Counter[str]) -> dict[str, int]:
    return {name: number for name, number in counted.items() if ".EF" in name}


def test_norms_and_what_they_scale_move_16_bytes_at_a_time(tmp_path: Path) -> None:
    group = [make(t) for make in (kernels.sum_squares, kernels.scale_to_norm) for t in DTYPES]
    for kernel, instructions in zip(group, compiled(group, "sm_90", tmp_path), strict=True):
        counted = accesses(instructions)
        where = (kernel.expression, counted)
        assert packs(counted, "LDG") >= 1, where
        assert packs(counted, "STG") >= (kernel.function == "scale_to_norm"), where
        # The fields of an array's entry, by value or in the table, are read once for a chunk.
        generic = sum(n for name, n in counted.items() if name.startswith(("LD.", "ST.")))
        assert generic == counted["LD.E.64"] <= 5, where
        assert not any(name.startswith(("LDL", "STL")) for name in counted), where


@pytest.mark.parametrize("architecture", ["sm_90", "sm_75"])
def test_a_clipped_rule_loads_its_scalar_and_the_factor_besides(
    architecture: str, tmp_path: Path
) -> None:
    group = [kernels.dense_update(rule, "float32", has_groups=True) for rule in (ADAM, CLIPPED)]
    plain, clipping = compiled(group, architecture, tmp_path)
    before, after = accesses(plain), accesses(clipping)
    more = after - before
    assert sum(more.values()) == 2, (before, after)
    assert all("CONSTANT" in name for name in more), more
    assert not before - after


def test_a_stage_that_is_off_costs_no_instruction(tmp_path: Path) -> None:
    group = [
        kernels.dense_update(ADAM, "float32"),
        kernels.dense_update(ADAM, "bfloat16", has_groups=True),
        kernels.sparse_update(ADAM, "float32", "uint32"),
    ]
    # The functor says nothing of other stages, and the loops go by what it says.
    for kernel in group:
        assert "is_" not in kernel.rule.own_functor.definition
    without = tmp_path / "kernels"
    shutil.copytree(on_disk(kernel_root()), without)
    update, touched = (without / "shared" / f"{each}.cuh" for each in ("update", "touched_rows"))
    dense = without / "dense_update.cu"
    for header, old, new in (
        (
            update,
            "Program::follow(is_cut ? Real(VarOf<Program>(value)) : value, slot, scalars);",
            "",
        ),
        (update, "      round_stored(i, scalars, value, slot);\n", ""),
        (update, "Program::gradient(gradient[i], number(i), slot, scalars);", "gradient[i];"),
        (update, "    count_from(at);\n", ""),
        (update, "shifted.count_from(begin);", ""),
        (update, "struct Target : Numbered {", "struct Target {"),
        (update, "struct State : Numbered {", "struct State {"),
        (update, " : Numbered(target) {", " {"),
        (update, "      : Numbered(other), average(", "      : average("),
        (touched, "    target.count_from(-tables.first_key_of(table) * row_width);\n", ""),
        (touched, "    target.first_number = tables.first_number_of(table);\n", ""),
        (dense, "    target.first_number = entry.first_number;\n", ""),
    ):
        assert header.read_text().count(old) == (2 if header == dense else 1)
        header.write_text(header.read_text().replace(old, new))
    folders = []
    for name in ("with", "without"):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
    assert compiled(group, "sm_90", folders[0]) == compiled(group, "sm_90", folders[1], without)


@pytest.mark.parametrize("architecture", ["sm_90", "sm_75"])
def test_a_scaled_rule_loads_the_count_of_steps_besides(architecture: str, tmp_path: Path) -> None:
    group = [
        kernels.dense_update(rule, "float32", has_groups=True) for rule in (CLIPPED, scaled(ADAM))
    ]
    clipping, scaling = compiled(group, architecture, tmp_path)
    before, after = accesses(clipping), accesses(scaling)
    more = after - before
    assert sum(more.values()) == 1, (before, after)
    assert all("CONSTANT" in name for name in more), more
    assert not before - after


@pytest.mark.parametrize("architecture", ["sm_90", "sm_75"])
def test_an_average_is_one_more_slot(architecture: str, tmp_path: Path) -> None:
    group = [
        kernels.dense_update(rule, dtype)
        for dtype in ("float32", "float64")
        for rule in (ADAM, averaged(ADAM))
    ]
    counted = [accesses(each) for each in compiled(group, architecture, tmp_path)]
    for before, after in (counted[:2], counted[2:]):
        for access in ("LDG.E.EF.128", "STG.E.EF.128"):
            assert packs(after, access) == packs(before, access) + 1, (before, after)
        assert packs(after, "LDG.E.128") == packs(before, "LDG.E.128")
        assert not any(name.startswith(("LDL", "STL")) for name in after), after


def test_sums_of_a_cautious_rule_load_no_variable_and_no_average(tmp_path: Path) -> None:
    rule = next(each for each in update_rules() if each.name == "decayed_cautious_adam")
    group = [kernels.sum_terms(each, "float32") for each in (rule, averaged(rule))]
    for instructions in compiled(group, "sm_90", tmp_path):
        assert packs(accesses(instructions), "LDG") == 3  # of the gradient and two slots


def test_norms_of_gradients_move_16_bytes_at_a_time(tmp_path: Path) -> None:
    group = [kernels.measure(dtype, decides) for dtype in DTYPES for decides in (False, True)]
    group += [
        kernels.measure_rows(dtype, "uint32", decides)
        for dtype in DTYPES
        for decides in (False, True)
    ]
    for kernel, instructions in zip(group, compiled(group, "sm_90", tmp_path), strict=True):
        counted = accesses(instructions)
        assert packs(counted, "LDG") >= 1, (kernel.expression, counted)
        assert not any(name.startswith(("LDL", "STL")) for name in counted), kernel.expression


def test_sums_of_pieces_move_16_bytes_at_a_time(tmp_path: Path) -> None:
    group = [kernel for kernel in kernels_without_rule() if kernel.function == "sum_pieces"]
    for instructions in compiled(group, "sm_90", tmp_path):
        counted = accesses(instructions)
        assert packs(counted, "LDG") >= 8
        assert packs(counted, "STG") >= 1


@pytest.mark.parametrize("architecture", ["sm_90", "sm_75"] if IS_FULL else ["sm_90"])
def test_updates_of_codes_move_8_of_them_at_a_time(architecture: str, tmp_path: Path) -> None:
    group = some([kernel for kernel in kernels_of_codes() if "float" in types_of(kernel)])
    for kernel, instructions in zip(group, compiled(group, architecture, tmp_path), strict=True):
        counted = accesses(instructions)
        where = (kernel.expression, counted)
        assert kernel.rule is not None
        of_codes = Counter(name[:3] for name in counted.elements() if ".EF.64" in name)
        is_written = kernel.function != "sum_coded_terms"
        assert of_codes["LDG"] == len(kernel.rule.slots), where
        assert of_codes["STG"] == is_written * len(kernel.rule.slots), where
        # Eight floats of the variable are two packs; so are the digits that movements keep.
        keeps_digits = kernel.function in ("update_late_coded_rows", "bring_up_coded_rows")
        assert packs(counted, "STG") == is_written * 2 * (1 + keeps_digits), where
        assert packs(counted, "LDG") >= 2, where
        assert not any(name.startswith(("LDL", "STL", "LD.", "ST.")) for name in counted), where
