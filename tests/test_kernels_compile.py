"""NVRTC compiles every kernel for every architecture, as it should: no GPU or driver is needed."""

from __future__ import annotations

import io
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from every_kernel import kernels_of, kernels_without_rule
from every_optimizer import update_rules

from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.kernel_sources import kernel_root
from gpuopt.update_rule import UpdateRule

pytestmark = pytest.mark.nvrtc

# Turing to Blackwell; the first is the one we tune for.
ARCHITECTURES = ["sm_90", "sm_75", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120"]
RULES = update_rules()


def max_registers(kernel: Kernel, architecture: str) -> int:
    """The budget: so many threads run side by side in a multiprocessor's 65,536 registers.

    1024 threads with 64 registers, 768 with 80, and in blocks of 128, 640 with 96 and 512 with 128.
    """
    if kernel.function in ("sparse_update", "sum_pieces") and architecture != ARCHITECTURES[0]:
        return 128
    if kernel.function == "sparse_update":  # several rows' gradients beside the rule's state
        return 80 if "float" in kernel.types else 96
    return 80 if {"double", "unsigned long long"} & {*kernel.types} else 64


def selected(architecture: str) -> Iterable[UpdateRule]:
    """All rules for the architecture we tune for; elsewhere, unless asked, the extremes."""
    if architecture == ARCHITECTURES[0] or os.environ.get("GPUOPT_ALL_KERNELS"):
        return RULES
    by_slots = sorted(RULES, key=lambda rule: len(rule.slots))
    return [by_slots[0], by_slots[-1], max(RULES, key=lambda rule: len(rule.scalars))]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_without_spills_within_their_registers(architecture: str) -> None:
    groups = [kernels_without_rule(), *(kernels_of(rule) for rule in selected(architecture))]
    for group in groups:
        compiled, log = compile_together(group, architecture)
        reports = resources(log)
        for kernel in group:
            report = reports[compiled.symbol_mapping[kernel.expression].decode()]
            assert report["stack"] == report["spilled"] == 0, (kernel.expression, report)
            assert report["registers"] <= max_registers(kernel, architecture), (
                kernel.expression,
                report,
            )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_updates_move_16_bytes_at_a_time(rule: UpdateRule, tmp_path: Path) -> None:
    compiled, _ = compile_together(kernels_of(rule), "sm_90")
    by_name = memory_accesses(bytes(compiled.code), tmp_path)
    assert len(by_name) == len(kernels_of(rule))
    for name, accesses in by_name.items():
        loads = sum(
            n for access, n in accesses.items() if access.startswith("LDG") and "128" in access
        )
        stores = sum(
            n for access, n in accesses.items() if access.startswith("STG") and "128" in access
        )
        # Slots, and except where it is zero, the gradient; AdagradDA does not read the variable.
        assert loads >= len(rule.slots) + ("update_other_rows" not in name), (name, accesses)
        assert stores >= 1 + len(rule.slots), (name, accesses)
        assert not any(access.startswith(("LDL", "STL")) for access in accesses), (name, accesses)


def test_sums_of_pieces_move_16_bytes_at_a_time(tmp_path: Path) -> None:
    compiled, _ = compile_together(kernels_without_rule(), "sm_90")
    by_name = memory_accesses(bytes(compiled.code), tmp_path)
    pieces = {name: accesses for name, accesses in by_name.items() if "sum_pieces" in name}
    assert len(pieces) == 4
    for accesses in pieces.values():
        assert any(access.startswith("LDG") and "128" in access for access in accesses)
        assert any(access.startswith("STG") and "128" in access for access in accesses)


def compile_together(group: list[Kernel], architecture: str) -> tuple[Any, str]:
    """Compiles kernels with CuPy's options; returns the code and what ptxas reported."""
    from cuda.core import Program, ProgramOptions
    from cuda.pathfinder import find_nvidia_header_directory

    lines = dict.fromkeys(line for kernel in group for line in kernel.source.splitlines())
    log = io.StringIO()
    options = ProgramOptions(
        std="c++17",
        arch=architecture,
        include_path=[str(kernel_root()), find_nvidia_header_directory("cudart")],
        ftz=True,
        ptxas_options=["-v"],
    )
    compiled = Program("\n".join(lines), "c++", options).compile(
        "cubin", name_expressions=tuple(kernel.expression for kernel in group), logs=log
    )
    return compiled, log.getvalue()


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


def memory_accesses(cubin: bytes, folder: Path) -> dict[str, Counter[str]]:
    """Counts the instructions of each kernel that read or write global or local memory."""
    path = folder / "kernels.cubin"
    path.write_bytes(cubin)
    command: list[Any] = [disassembler(), "-c", path]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        name: Counter(re.findall(r"\b((?:LDG|STG|LDL|STL)[A-Z0-9.]*)", body))
        for name, body in re.findall(
            r"\.text\.(\w+):\n(.*?)(?=\n\.section|\n//-----|\Z)", text, re.DOTALL
        )
    }


def disassembler() -> Path:
    from cuda.pathfinder import find_nvidia_header_directory

    return Path(find_nvidia_header_directory("cudart")).parent / "bin" / "nvdisasm"
