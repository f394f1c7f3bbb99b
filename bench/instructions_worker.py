"""Compiles kernels of the checkout that PYTHONPATH names first, for `bench.instructions`.

    instructions_worker.py FOLDER PATTERN ARCHITECTURE CONTRACTS

compiles those whose names match, with contraction of multiplications and additions or without, and
writes their code to the folder. It answers with a line of JSON for each.
"""

from __future__ import annotations

import inspect
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from cuda.core import Program, ProgramOptions
from cuda.pathfinder import find_nvidia_header_directory

from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.mixed import SPLIT, Mixed, Storage
from gpuopt.rules.averaged import averaged
from gpuopt.rules.cautious import cautious
from gpuopt.rules.clipped import clipped
from gpuopt.rules.decayed import decayed
from gpuopt.rules.rounded import rounded
from gpuopt.rules.scaled import scaled
from gpuopt.rules.sources import on_disk
from gpuopt.rules.update_rule import UpdateRule

_PACK_BYTES = 16
# How many elements a lane has of slots in 8 bits.
_LANE_CODES = 8
_BF16 = "bfloat16"
_MASTERS = Mixed("float32", "float32", _BF16, _BF16)
_REMAINDERS = Mixed(_BF16, "float32", _BF16, SPLIT)
_NARROW_SLOTS = Mixed("float32", _BF16, "float32")


def main() -> None:
    folder, pattern, architecture, contracts = sys.argv[1:]
    listed = [each for each in _list_kernels() if fnmatch(each[0], pattern)]
    compiled, log = _compile([kernel for _, kernel, _ in listed], architecture, contracts == "True")
    Path(folder, "kernels.cubin").write_bytes(bytes(compiled.code))
    reports = dict(re.findall(r"Function properties for (\w+)\n(.*\n.*)", log))
    for name, kernel, elements in listed:
        symbol = compiled.symbol_mapping[kernel.expression].decode()
        file = kernel.file or kernel.function
        answer = {
            "name": name,
            "symbol": symbol,
            "elements": elements,
            "arrays": _count_arrays(name, kernel),
            "registers": int(re.findall(r"Used (\d+) registers", reports[symbol])[-1]),
            "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", reports[symbol]))),
            "threads": 256 if file.startswith(("dense_", "coded_update")) else 128,
            "is_sum": kernel.function.startswith("sum_"),
        }
        print(json.dumps(answer))


def _count_arrays(name: str, kernel: Kernel) -> int:
    """Counts the arrays that a kernel writes at most: a variable, slots, and what is beside it."""
    has_beside = "masters" in name or "remainders" in name
    return 1 + max(len(rule.slots) for rule in kernel.rules) + has_beside


def _list_kernels() -> Iterator[tuple[str, Kernel, int]]:
    """Lists kernels, with a name of each, and how many elements a thread loads at once."""
    listed = import_module("every_optimizer")
    rules: dict[str, UpdateRule] = {rule.name: rule for rule in listed.update_rules()}
    adam, momentum, lamb = (rules[name] for name in ("adam", "momentum", "lamb"))
    others = listed.rules_of_other_rows_alone()
    for name, rule in rules.items():
        if rule in others:
            kernel = kernels.update_other_rows(rule, "float32")
            yield f"{name}, other rows", kernel, _pack("float32")
        elif rule.row_slots:
            of_rows = getattr(kernels, "dense_update_of_rows", kernels.dense_update)
            yield f"{name}", of_rows(rule, "float32"), _pack("float32")
        else:
            has_groups = bool(rule.sums)
            kernel = kernels.dense_update(rule, "float32", has_groups=has_groups)
            yield name, kernel, _pack("float32")
    everything = scaled(averaged(decayed(adam)))
    if not getattr(everything, "is_clipped", True):  # before f44cee1f, `scaled` clips, too
        everything = clipped(everything)
    of_late = inspect.signature(kernels.bring_up_rows).parameters
    late = [adam] * sum(name in ("rule", "other_rows") for name in of_late)  # one before 9a807ace
    dense: dict[str, tuple[UpdateRule, Storage, bool]] = {
        "adam, groups": (adam, "float32", True),
        "adam, clip": (clipped(adam), "float32", True),
        "adam, loss scale": (scaled(adam), "float32", True),
        "adam, average": (averaged(adam), "float32", False),
        "adam, loss scale, clip, decay, average": (everything, "float32", True),
        "adam, float64": (adam, "float64", False),
        "adam, bfloat16": (adam, _BF16, False),
        "adam, rounding": (rounded(adam), _BF16, False),
        "adam, masters": (adam, _MASTERS, False),
        "momentum, masters": (momentum, _MASTERS, False),
        "adam, remainders": (adam, _REMAINDERS, False),
        "adam, remainders, everything": (everything, _REMAINDERS, True),
        "adam, bfloat16 slots": (adam, _NARROW_SLOTS, False),
        "adam, bfloat16 slots, rounding": (rounded(adam), _NARROW_SLOTS, False),
    }
    for name, (rule, storage, has_groups) in dense.items():
        yield name, kernels.dense_update(rule, storage, has_groups=has_groups), _pack(storage)
    yield "lamb, sums", kernels.sum_terms(lamb, "float32"), _pack("float32")
    coded: dict[str, tuple[UpdateRule, str, Storage]] = {
        "adam, byte slots": (adam, "root", "float32"),
        "adam, byte slots, squares": (adam, "bitsandbytes", "float32"),
        "adam, byte slots, bfloat16": (adam, "root", _BF16),
        "adam, byte slots, clip": (clipped(adam), "root", "float32"),
        "momentum, byte slots": (momentum, "root", "float32"),
        "lion, byte slots": (rules["lion"], "root", "float32"),
    }
    for name, (rule, form, storage) in coded.items():
        kernel = kernels.coded_update(rule, _codes_of(rule, form), storage)
        yield name, kernel, _LANE_CODES
    of_two = _codes_of(adam, "root")
    careful = cautious(adam)
    earlier: Any = kernels
    if hasattr(earlier, "update_coded_rows"):  # until 2026-12-01
        of_rows = earlier.update_coded_rows(adam, of_two, "float32", "uint32")
        of_others = earlier.update_other_coded_rows(adam, of_two, "float32")
    else:
        of_rows = kernels.sparse_update(adam, "float32", "uint32", True, of_two)
        of_others = kernels.update_other_rows(adam, "float32", codecs=of_two)
    for name, kernel in {
        "adam, byte slots, rows": of_rows,
        "adam, byte slots, other rows": of_others,
        "cautious adam, byte slots, sums": kernels.sum_coded_terms(careful, of_two, "float32"),
    }.items():
        yield name, kernel, _LANE_CODES
    for name in ("adagrad", "adam", "momentum", "row_wise_adagrad"):
        kernel = kernels.sparse_update(rules[name], "float32", "uint32")
        yield f"{name}, rows", kernel, _pack("float32")
    for name, kernel in {
        "adam, rows, groups": kernels.sparse_update(adam, "float32", "uint32", has_groups=True),
        "adam, rows, bfloat16": kernels.sparse_update(adam, _BF16, "uint32"),
        "adam, other rows": kernels.update_other_rows(adam, "float32"),
        "adam, late rows": kernels.late_update(adam, adam, "float32", "uint32"),
        "adam, rows brought up": kernels.bring_up_rows(*late, "float32", "int64"),
    }.items():
        yield name, kernel, _pack(_BF16 if _BF16 in name else "float32")


def _codes_of(rule: UpdateRule, form: str) -> Any:
    """Returns how a rule's slots are stored in 8 bits, as kernels take it."""
    try:
        codecs = import_module("gpuopt.optimizers.base.slot_options").coded_slots(rule, form)
    except ImportError:  # in 3c94777f
        return import_module("gpuopt.rules.slot_codes").slot_codes(rule, form).codings
    return tuple(codecs.values())


def _pack(storage: Storage) -> int:
    """Returns how many elements are a pack of the widest type."""
    types = [storage] if isinstance(storage, str) else list(filter(None, storage))
    sizes = [2 if each == _BF16 else np.dtype(each).itemsize for each in types]
    return _PACK_BYTES // max(sizes)


def _compile(group: Sequence[Kernel], architecture: str, contracts: bool) -> tuple[Any, str]:
    """Compiles kernels together with CuPy's options; returns the code and what ptxas reports."""
    log = io.StringIO()
    # Until 3c94777f, a source was one of lines, each of them complete.
    pieces = [getattr(kernel, "pieces", None) or kernel.source.splitlines() for kernel in group]
    source = "\n".join(dict.fromkeys(piece for each in pieces for piece in each))
    folders = {str(on_disk(each)): None for kernel in group for each in kernel.include_folders}
    options: dict[str, Any] = {
        "std": "c++17",
        "device_as_default_execution_space": True,
        "arch": architecture,
        "include_path": [*folders, find_nvidia_header_directory("cudart")],
        "ftz": True,
        "fma": contracts,
        "ptxas_options": ["-v"],
    }
    names = tuple(dict.fromkeys(kernel.expression for kernel in group))
    program = Program(source, "c++", ProgramOptions(**options))
    return program.compile("cubin", name_expressions=names, logs=log), log.getvalue()


if __name__ == "__main__":
    main()
