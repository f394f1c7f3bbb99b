"""Rules' functors as plain C++, compiled by g++ to be called on arrays."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from importlib.resources import as_file
from typing import Any

import numpy as np
from driver.native_library import build, digest_of

from gpuopt.rules.sources import kernel_root
from gpuopt.rules.update_rule import UpdateRule

REALS = {"float": np.float32, "double": np.float64}
_ENTRY = """
using Update_{place}_{real} = gpuopt::Update<{functor}, {real}, {codecs}>;

extern "C" void run_{place}_{real}(const Update_{place}_{real}::Chunk* chunk,
                                   const {functor}::Scalars<{real}>* scalars) {{
  Update_{place}_{real}::update_chunk(*chunk, *scalars);
}}
"""


class RuleLibrary:
    """Compiled rules; GPUOPT_SANITIZE=undefined checks them at work."""

    def __init__(self, rules: Sequence[UpdateRule]) -> None:
        """Compiles the rules in one library, unless it is there from another process or run."""
        self._rules = list(rules)
        source = '#include "cpu/update.hpp"\n' + "".join(rule.include for rule in rules)
        for place, rule in enumerate(rules):
            for real in REALS:
                codecs = ", ".join([f"gpuopt::Plain<{real}>"] * (2 + len(rule.slots)))
                source += _ENTRY.format(place=place, real=real, functor=rule.functor, codecs=codecs)
        sanitizer = os.environ.get("GPUOPT_SANITIZE")
        checks = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"] if sanitizer else []
        with as_file(kernel_root()) as kernels:
            command = ["g++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror"]
            command += ["-Wno-unknown-pragmas"]  # those of nvcc
            # numpy rounds every product; nvcc's fused multiply-adds are a GPU test's business.
            command += ["-shared", "-fPIC", "-ffp-contract=off", *checks, f"-I{kernels}"]
            command += ["-x", "c++", "-"]
            library = build("rules.so", command, [digest_of(kernels)], source)
        self._library = ctypes.CDLL(str(library))

    def run(
        self,
        rule: UpdateRule,
        real: str,
        written: Sequence[np.ndarray],
        grad: np.ndarray,
        scalars: Mapping[str, Any],
    ) -> None:
        """Applies a rule to a variable and its slots, in place."""
        addresses = [array.ctypes.data for array in (*written, grad)]
        chunk = np.array([*addresses, grad.size, 1, 0, 0], np.intp)
        packed = np.array([scalars[name] for name in rule.scalars] or [0], grad.dtype)
        place = next(at for at, each in enumerate(self._rules) if each is rule)
        function = getattr(self._library, f"run_{place}_{real}")
        function(ctypes.c_void_p(chunk.ctypes.data), ctypes.c_void_p(packed.ctypes.data))
