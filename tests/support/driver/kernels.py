"""Runs whatever CUDA source CuPy compiles: g++ compiles the same source for the emulator.

NVRTC has compiled it before, so a source must please both.
"""

from __future__ import annotations

import ctypes
import inspect
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from driver.native_library import NATIVE, build, digest_of, headers, library

EMULATOR = Path(__file__).resolve().parents[1] / "emulator"
INCLUDE = NATIVE / "include"
FLAGS = [
    # As the emulator's own kernels; see emulator/kernel_library.py.
    *("-std=c++20", "-Og", "-mfma", "-ffp-contract=off"),
    *("-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-fPIC", "-w", "-fdata-sections", "-nostdlib"),
]
_SYSTEM_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<.*$", re.MULTILINE)
_DYNAMIC = re.compile(r"extern\s+__shared__\s+([\w ]+?)\s+(\w+)\s*\[\s*\]")
_TIMER = re.compile(r'asm\s+volatile\("mov\.u64 %0, %%globaltimer;"\s*:\s*"=l"\((\w+)\)\)')


class Module:
    """A source that CuPy has compiled.

    Attributes:
        expressions: The C++ names of its functions, by the mangled ones; none of an `extern "C"`.
        is_cupys: Whether it is one of CuPy's own, whose threads may exit before a barrier.
    """

    def __init__(self, source: str, options: Sequence[str]) -> None:
        self.source = source
        self.options = list(options)
        self.expressions: dict[str, str] = {}
        self.is_cupys = "<cupy/" in source


class Found(ctypes.Structure):
    """What the driver has to know of a kernel; its twin is in native/modules.cpp."""

    _fields_ = [
        ("launch", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("sizes", ctypes.POINTER(ctypes.c_uint)),
        ("is_strict", ctypes.c_int),
    ]


# By number, from 1.
modules: list[Module] = []
_numbers: dict[tuple[str, tuple[str, ...], tuple[str, ...]], int] = {}
_names: list[bytes] = []


def watch(compiler: Any) -> None:
    """Has CuPy's compiler tell the driver the source of each module that it loads."""
    original = compiler._compile_with_cache_cuda
    signature = inspect.signature(original)

    def compile_module(*positional: Any, **named: Any) -> Any:
        arguments = signature.bind(*positional, **named).arguments
        source, options = arguments["source"], arguments["options"]
        names = tuple(arguments.get("name_expressions") or ())
        key = (source, tuple(options), names)
        if key not in _numbers:
            modules.append(Module(source, options))
            _numbers[key] = len(modules)
        number = _numbers[key]
        library().driver_next_module(number)
        try:
            module = original(*positional, **named)
        finally:
            library().driver_next_module(0)
        mapping = getattr(module, "mapping", None) or {}
        modules[number - 1].expressions |= {
            mangled if isinstance(mangled, str) else mangled.decode(): name
            for name, mangled in mapping.items()
        }
        return module

    compiler._compile_with_cache_cuda = compile_module


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_long, ctypes.c_char_p, ctypes.POINTER(Found))
def find(number: int, name: bytes, found: Any) -> int:
    try:
        module = modules[number - 1]
        expression = module.expressions.get(name.decode(), name.decode())
        kernel = compile_kernel(module, expression)
        found[0].launch = ctypes.cast(kernel.emulator_launch, ctypes.c_void_p).value
        _names.append(expression.encode())
        found[0].name = _names[-1]
        found[0].sizes = kernel.emulator_argument_sizes(0)
        found[0].is_strict = not module.is_cupys
        return 1
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return 0


def compile_kernel(module: Module, expression: str) -> ctypes.CDLL:
    """Compiles one function of a module, or finds it compiled on disk.

    Raises:
        RuntimeError: g++ refuses the source.
    """
    folders = [option for option in module.options if option.startswith("-I")]
    defines = [option for option in module.options if option.startswith("-D")]
    # What CuPy has of Thrust and CUB is for NVCC.
    folders = [folder for folder in folders if "_cccl" not in folder and "nvidia" not in folder]
    own = [f"-I{INCLUDE}", f"-I{EMULATOR}"]
    header = "cupy_source.h" if module.is_cupys else "cuda_source.h"
    digests = [digest_of(INCLUDE), digest_of(EMULATOR, "*.h"), digest_of(EMULATOR, "*.ld")]
    command = ["g++", *FLAGS, *own, *(folders if module.is_cupys else []), headers()]
    precompiled = build(
        f"{header}.gch", [*command, "-x", "c++-header", str(INCLUDE / header)], digests
    )
    text = source_for_emulator(module.source, expression)
    command = ["g++", *FLAGS, f"-include{precompiled.with_suffix('')}", *own, *folders, *defines]
    command += [headers(), "-shared", f"-Wl,-T,{EMULATOR / 'shared_memory.ld'}", "-x", "c++", "-"]
    ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)
    kernel = ctypes.CDLL(str(build("kernel.so", command, digests, text)))
    kernel.emulator_argument_sizes.restype = ctypes.POINTER(ctypes.c_uint)
    timer = ctypes.cast(library().driver_timer, ctypes.c_void_p).value
    ctypes.c_void_p.in_dll(kernel, "driver_timer").value = timer
    return kernel


def source_for_emulator(source: str, expression: str) -> str:
    """Returns a translation unit that g++ compiles to a library with one kernel."""
    system = _SYSTEM_INCLUDE.findall(source)
    rest = _SYSTEM_INCLUDE.sub("", source)
    # Functions in the unnamed namespace are those whose shared memory the emulator finds.
    rest = re.sub(r'extern\s+"C"', "", rest)
    # As much shared memory as a launch may ask for.
    rest = _DYNAMIC.sub(r"__shared__ \1 \2[(48 << 10) / sizeof(\1)]", rest)
    rest = _TIMER.sub(r"\1 = driver_timer()", rest)
    return "\n".join(
        [
            *system,
            "namespace {",
            rest,
            "}",
            f"EMULATOR_KERNELS(::emulator::describe<({expression})>())\n",
        ]
    )
