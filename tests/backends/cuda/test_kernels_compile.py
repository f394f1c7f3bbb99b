"""NVRTC compiles every kernel for every architecture within limits. Needs no GPU or driver."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from every_kernel import (
    IS_FULL,
    has_groups,
    kernels_of,
    kernels_of_accumulation,
    kernels_of_codes,
    kernels_of_measured_inputs,
    kernels_of_several_types,
    kernels_of_slots_in_bfloat16,
    kernels_with_averages,
    kernels_with_averages_of_several_types,
    kernels_with_rounding,
    kernels_without_rule,
    rules_to_compile,
    types_of,
)
from four_slots import four_slots
from nvrtc import ARCHITECTURES, compile_together, ptx_of

from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.parameters import Number, Parameter, Pointer
from gpuopt.rules.update_rule import UpdateRule

pytestmark = pytest.mark.nvrtc

RULES = rules_to_compile()
ADAM = next(rule for rule in RULES if rule.name == "adam")
# The oldest and the newest, beside the one we tune for.
OTHERS = ARCHITECTURES[1:] if IS_FULL else ["sm_75", ARCHITECTURES[-1]]
on_tuned = pytest.mark.parametrize("architecture", ARCHITECTURES if IS_FULL else ARCHITECTURES[:1])


def max_registers(kernel: Kernel, architecture: str) -> int:
    """The budget: so many threads run side by side in a multiprocessor's 65,536 registers.

    1024 threads with 64 registers, 768 with 80, and in blocks of 128, 640 with 96 and 512 with 128.
    """
    is_sparse_update = kernel.function.startswith("sparse_update")
    slots, types = 0 if kernel.rule is None else len(kernel.rule.slots), types_of(kernel)
    is_dense_update = kernel.function == "dense_update"
    is_given_sums = "first_sum" in kernel.types
    if kernel.function.startswith("late_update"):  # besides, what rows have missed
        # Of 16 bits, a thread has 8 elements; of each, what is left of the weight as it was moved.
        is_wide = not {"double", "__half", "__nv_bfloat16"}.isdisjoint(types)
        is_wide |= has_groups(kernel)
        return 128 if is_wide or architecture != ARCHITECTURES[0] else 96
    if kernel.function == "bring_up_rows":
        return 80 if architecture == ARCHITECTURES[0] else 96
    if kernel.function == "update_late_coded_rows":  # of 8 elements, what they were moved by, too
        return 168
    if is_dense_update and kernel.rule is not None and kernel.rule.row_slots:
        return 128 if slots > 2 and "double" in types else 80  # two blocks of 256
    if is_given_sums:  # as many as launch bounds ask for, at least
        return 128 if "double" in types else 80
    is_averaged = kernel.rule is not None and "_average" in kernel.rule.slots
    storage = next((each for each in types if each.startswith("<")), "")
    if is_averaged and ("coded" in kernel.function or types.isdisjoint({"float", "double"})):
        # Two blocks of 256, or three: more elements are in registers than a rule has of itself.
        is_scaled = kernel.rule.is_scaled
        has_wide_average = "float" not in kernel.types.values()  # beside 16 bits alone
        has_many_slots = slots > 2 and "coded" in kernel.function
        has_many_slots |= slots > 3 and kernel.rule.is_rounded
        return 128 if is_scaled or has_wide_average or has_many_slots else 80
    if "coded" in kernel.function:  # a lane has 8 elements: 512 threads load as much as 1024 do
        has_remainder = (
            kernel.types["Companion"] == "gpuopt::Split"
        )  # two blocks of 256, as with 96
        if has_remainder or slots > 2 or architecture not in ("sm_75", "sm_90"):
            return 128
        return 80 if slots == 1 else 96
    if kernel.function.startswith("measure_inputs"):
        return 80  # a variable's packs beside a gradient's
    is_scaled_group = is_dense_update and has_groups(kernel) and kernel.rule.is_scaled
    is_rounded = kernel.rule is not None and kernel.rule.is_rounded
    if is_scaled_group and (is_rounded or (slots > 2 and "double" in types)):
        return 128  # two blocks of 256, as with 96: `blocks_of_updates` asks for them
    if has_groups(kernel) and slots > 1 + is_sparse_update:
        if is_sparse_update:
            return 128
        return 96 if slots > 2 and "double" in types else 80  # the group's scalars, too
    if (is_sparse_update or kernel.function == "sum_pieces") and architecture != ARCHITECTURES[0]:
        return 128
    if kernel.function.startswith("measure_rows"):  # blocks of 256: as launch bounds ask for
        return 128
    if kernel.function == "sort_few_rows":  # one block
        return 128
    if is_sparse_update:  # several rows' gradients beside the rule's state
        return 80 if slots < 3 and "float" in types else 96
    has_wide_gradient = kernel.types.get("Gradient") == "float" and "float" not in types
    if is_rounded and has_wide_gradient and slots > 2 and architecture == "sm_120":
        return 80  # random bits beside gradients of 32 bits: with 64 registers, some spill
    wide = {"double", "unsigned long long"}
    if architecture == "sm_75":  # it has no instructions for bfloat16
        wide |= {"__nv_bfloat16"}
    bfloat16 = re.findall(r"__nv_bfloat16", storage)
    return 80 if wide & {*types, *bfloat16} else 64


@pytest.mark.parametrize("rule", [None, *RULES], ids=lambda rule: rule.name if rule else "none")
def test_kernels_compile_without_spills_within_their_registers(rule: UpdateRule | None) -> None:
    check_registers(kernels_of(rule) if rule else kernels_without_rule(), ARCHITECTURES[0])


@pytest.mark.parametrize("architecture", OTHERS)
def test_kernels_keep_to_their_registers_on_other_gpus(architecture: str) -> None:
    rules = [rule for rule in RULES if IS_FULL or rule.name == "adam"]
    for group in [kernels_without_rule(), *map(kernels_of, rules)]:
        check_registers(some(group), architecture)


def some(group: list[Kernel]) -> list[Kernel]:
    """Every third kernel, unless asked for all."""
    return group if IS_FULL else group[::3]


@on_tuned
def test_kernels_of_several_types_keep_to_the_same_registers(architecture: str) -> None:
    check_registers(some(kernels_of_several_types()), architecture)


@on_tuned
def test_kernels_of_measured_inputs_keep_to_the_same_registers(architecture: str) -> None:
    check_registers(some(kernels_of_measured_inputs()), architecture)


@on_tuned
def test_kernels_of_slots_in_8_bits_keep_to_their_registers(architecture: str) -> None:
    check_registers(some(kernels_of_codes()), architecture)


@on_tuned
def test_kernels_of_accumulation_keep_to_the_same_registers(architecture: str) -> None:
    check_registers(kernels_of_accumulation(), architecture)


@on_tuned
def test_kernels_with_averages_keep_to_the_same_registers(architecture: str) -> None:
    check_registers(some(kernels_with_averages()), architecture)


@on_tuned
def test_kernels_with_averages_of_several_types_keep_to_their_registers(architecture: str) -> None:
    check_registers(some(kernels_with_averages_of_several_types()), architecture)


@on_tuned
def test_kernels_with_rounding_keep_to_the_same_registers(architecture: str) -> None:
    check_registers(some(kernels_with_rounding()), architecture)


@on_tuned
def test_kernels_of_slots_in_bfloat16_keep_to_the_same_registers(architecture: str) -> None:
    check_registers(some(kernels_of_slots_in_bfloat16()), architecture)


FUSED = {
    "without a rule": kernels_without_rule,
    "adam": lambda: kernels_of(ADAM),
    "codes": lambda: kernels_of_codes()[::3],
    "averages": lambda: kernels_with_averages()[::3],
    "rounding": lambda: kernels_with_rounding()[::3],
}


@pytest.mark.parametrize("name", FUSED)
def test_only_what_says_so_is_a_fused_multiply_add(name: str) -> None:
    """Rows that catch up and codes call `fused`; no other kernel here calls it, or takes powers."""
    group = FUSED[name]()
    ptx = ptx_of(group, "compute_90")
    for kernel in group:
        is_expected = "coded" in kernel.function and kernel.function != "sum_coded_terms"
        is_expected |= kernel.function in ("late_update", "bring_up_rows")
        assert ("fma.rn" in ptx[kernel.expression]) == is_expected, kernel.expression


def check_registers(group: list[Kernel], architecture: str) -> None:
    compiled, log = compile_together(group, architecture)
    reports = resources(log)
    too_many = []
    for kernel in group:
        report = reports[compiled.symbol_mapping[kernel.expression].decode()]
        budget = max_registers(kernel, architecture)
        if report["stack"] or report["spilled"] or report["registers"] > budget:
            too_many.append((kernel.expression, report, budget))
    assert not too_many


def with_parameters(kernel: Kernel, **changed: Parameter) -> Kernel:
    return replace(kernel, parameters={**kernel.parameters, **changed})


def declared(what: str) -> str:
    return f'"Python declares {what}"'


def wrong_declarations() -> dict[str, tuple[Kernel, str]]:
    """Kernels that Python declares otherwise than C++, each with what NVRTC should name."""
    move_rows = kernels.move_rows("int64", "uint32")
    return {
        "scalar missing": (
            kernels.sparse_update(replace(four_slots, scalars=()), "float64", "uint32"),
            '"not as many as the scalars () of four_slots in Python"',
        ),
        "slot missing": (
            kernels.dense_update(replace(four_slots, slots=()), "float32"),
            '"not as many as the slots () of four_slots in Python"',
        ),
        "scalar of another name": (
            kernels.dense_update(replace(four_slots, scalars=("rate",)), "float32"),
            'has no member "rate"',
        ),
        "parameter of another type": (
            with_parameters(move_rows, counts=Pointer("uint64")),
            declared(f"parameter 4 of {move_rows.expression}, counts, as unsigned long long*"),
        ),
        "parameter too many": (
            with_parameters(move_rows, more=Number("int32")),
            declared(f"{move_rows.expression} with 10 parameters"),
        ),
    }


@pytest.mark.parametrize("what", wrong_declarations())
def test_nvrtc_refuses_a_kernel_that_python_declares_otherwise(what: str) -> None:
    kernel, message = wrong_declarations()[what]
    with pytest.raises(Exception, match=re.escape(message)):
        compile_together([kernel], ARCHITECTURES[0])


def resources(log: str) -> dict[str, dict[str, int]]:
    reports: dict[str, dict[str, int]] = {}
    name = ""
    for line in log.splitlines():
        if found := re.search(r"Function properties for (\w+)", line):
            name = found[1]
        elif found := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            stack, stores, loads = map(int, found.groups())
            reports[name] = {"stack": stack, "spilled": stores + loads}
        elif found := re.search(r"Used (\d+) registers", line):
            reports[name]["registers"] = int(found[1])
    # Functions of CUDA's own that are called, as double's power, use their callers' registers.
    return {name: report for name, report in reports.items() if "registers" in report}
