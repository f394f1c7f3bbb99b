"""The emulator computes what a GPU would, and each of its checkers finds the defect made for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from emulator import EmulatorLauncher, KernelError, kernel_library, planted
from emulator.sanitized import sanitized

from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.parameters import (
    CPP_TYPES,
    Number,
    Parameter,
    Pointer,
    Struct,
    struct_of,
)

pytestmark = pytest.mark.emulator

ROOT = Path(__file__).parents[3]
SANITIZE = os.environ.get("GPUOPT_EMULATOR_SANITIZE", "")
without_sanitizer = pytest.mark.skipif(bool(SANITIZE), reason="this process has a sanitizer itself")


def collective(function: str, value: str = "", **parameters: Parameter) -> Kernel:
    types = {"Value": value} if value else {}
    return Kernel(function, parameters, types, file="collectives.cu")


FLOATS = Pointer("float32")
# `num_results` in collectives.cu.
NUM_RESULTS = 17
COLLECTIVES = collective("use_collectives", values=Pointer("int32"), results=Pointer("int32"))
SQUARE = collective("square", values=FLOATS, results=FLOATS, size=Number("int64"))
MULTIPLY_ADD = collective("multiply_add", a=FLOATS, b=FLOATS, c=FLOATS, results=FLOATS)
ATOMICS = {
    dtype: collective(
        "use_atomics", CPP_TYPES[dtype], values=Pointer(dtype), results=Pointer(dtype)
    )
    for dtype in ("int32", "uint32", "int64", "uint64", "float32")
}
STORAGE = {
    dtype: collective(
        "to_16_bits_and_back",
        CPP_TYPES[dtype],
        values=FLOATS,
        stored=Pointer(dtype),
        results=FLOATS,
    )
    for dtype in ("float16", "bfloat16")
}


class AllNumbers(NamedTuple):
    """Its twin is in collectives.cu."""

    float64: Annotated[float, Number("float64")]
    int64: Annotated[int, Number("int64")]
    uint64: Annotated[int, Number("uint64")]
    floats: Annotated[Any, FLOATS]
    float32: Annotated[float, Number("float32")]
    int32: Annotated[int, Number("int32")]


ALL_TYPES = collective(
    "take_all",
    floats=FLOATS,
    doubles=Pointer("float64"),
    halves=Pointer("float16"),
    bfloats=Pointer("bfloat16"),
    longs=Pointer("int64"),
    words=Pointer("uint32", is_optional=True),
    structs=Pointer("uint8", struct_of(AllNumbers)),
    by_value=struct_of(AllNumbers),
    float32=Number("float32"),
    float64=Number("float64"),
    int32=Number("int32"),
    int64=Number("int64"),
    uint32=Number("uint32"),
    uint64=Number("uint64"),
)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compiles all kernels of this file at once, which is faster than one by one."""
    EmulatorLauncher().prepare(
        [
            *planted.all_planted(),
            planted.combine(),
            *(COLLECTIVES, SQUARE, MULTIPLY_ADD, ALL_TYPES),
            *ATOMICS.values(),
            *STORAGE.values(),
        ]
    )


# ---- What kernels compute


@pytest.mark.parametrize("seed", range(4))
def test_collectives_give_each_lane_what_cuda_gives_it(seed: int) -> None:
    blocks, threads = 3, 64
    values = np.random.default_rng(seed).integers(0, 8, blocks * threads, np.int32)
    results = np.empty((values.size, NUM_RESULTS), np.int32)
    EmulatorLauncher(seed).launch(COLLECTIVES, blocks, threads, values=values, results=results)
    expected = [what_a_lane_gets(values, i, threads) for i in range(values.size)]
    np.testing.assert_array_equal(results, np.array(expected).astype(np.uint32).view(np.int32))


def what_a_lane_gets(values: np.ndarray, i: int, threads: int) -> list[int]:
    """Returns a lane's results by the descriptions in the CUDA C++ Programming Guide."""
    warp = [int(value) for value in values[i // 32 * 32 :][:32]]
    block = [int(value) for value in values[i // threads * threads :][:threads]]
    lane, value = i % 32, int(values[i])
    half = warp[lane // 16 * 16 :][:16]
    complement = -value % 2**64
    bits = f"{value:032b}", f"{complement % 2**32:032b}"
    return [
        warp[5],
        warp[lane // 8 * 8 + value % 8],
        warp[lane - 3] if lane >= 3 else value,
        warp[lane + 7] if lane % 16 + 7 < 16 else value,
        warp[lane ^ 9],
        sum(2**k for k, other in enumerate(warp) if other % 2),
        int(3 in warp),
        int(min(warp) > 0),
        sum(2**k for k, other in enumerate(warp) if other == value),
        int(7 in block),
        int(7 not in block),
        sum(other % 2 for other in block),
        sum(half),
        # The lowest set bit counts from 1.
        value.bit_count() + 100 * (bits[0][::-1].find("1") + 1) + 10000 * (32 - value.bit_length()),
        complement.bit_count()
        + 100 * (bits[1][::-1].find("1") + 1)
        + 10000 * (64 - value.bit_length()),
        warp[lane ^ 15],
        # Bytes 3, 6, 0 and 7 of both numbers, of which the first begins with `value`.
        int.from_bytes([0x07, value, 0x06, 0x03], "little"),
    ]


@pytest.mark.parametrize("dtype", ATOMICS)
def test_atomics_count_every_thread_once(dtype: str) -> None:
    values = np.random.default_rng(0).integers(0, 1000, 128).astype(dtype)
    results = np.array([0, 0, 500, 500, 0, 1023, 0, 0], dtype)
    EmulatorLauncher(seed=1).launch(ATOMICS[dtype], 2, 64, values=values, results=results)
    total = values.sum(dtype=dtype)
    negative = np.negative(values).sum(dtype=dtype)
    expected = [total, negative, min(500, values.min()), max(500, values.max()), total]
    np.testing.assert_array_equal(results[:5], np.array(expected, dtype))
    if np.issubdtype(dtype, np.integer):
        bitwise = [reduce(f, values) for f in (np.bitwise_and, np.bitwise_or, np.bitwise_xor)]
        np.testing.assert_array_equal(results[5:], np.array(bitwise, dtype))


@pytest.mark.parametrize("dtype", STORAGE)
def test_16_bit_types_round_as_numpy_does(dtype: str) -> None:
    values = np.random.default_rng(0).normal(size=64).astype(np.float32)
    values[:4] = [np.inf, -np.inf, 65519.0, 0.0]
    stored = np.empty(64, getattr(ml_dtypes, dtype, dtype))
    results = np.empty_like(values)
    EmulatorLauncher().launch(STORAGE[dtype], 1, 64, values=values, stored=stored, results=results)
    np.testing.assert_array_equal(stored, values.astype(stored.dtype))
    np.testing.assert_array_equal(results, stored.astype(np.float32))


def test_products_are_rounded_before_they_are_added() -> None:
    a = np.full(32, 1 + 2**-12, np.float32)
    c = np.full(32, -(1 + 2**-11), np.float32)
    results = np.empty(32, np.float32)
    EmulatorLauncher().launch(MULTIPLY_ADD, 1, 32, a=a, b=a, c=c, results=results)
    assert np.all(results == 0)  # once: 2**-24


def test_denormals_are_flushed_inside_a_kernel_and_not_outside() -> None:
    values = np.full(32, 1e-20, np.float32)
    results = np.ones_like(values)
    EmulatorLauncher().launch(SQUARE, 1, 32, values=values, results=results, size=32)
    assert np.all(results == 0)
    assert np.all(values * values > 0)


def test_threads_of_python_may_launch_at_once() -> None:
    outcomes = []

    def work(seed: int) -> None:
        values = np.full(256, seed, np.int32)
        results = np.empty((256, NUM_RESULTS), np.int32)
        for _ in range(10):
            EmulatorLauncher(seed).launch(COLLECTIVES, 4, 64, values=values, results=results)
        outcomes.append(np.all(results[:, 12] == 16 * seed))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert outcomes == [True] * 4


# ---- What a launcher does


def test_launcher_takes_arrays_of_the_module_it_was_given() -> None:
    launcher = EmulatorLauncher(xp=fake_cupy)
    values = fake_cupy.ones(32, np.float32)
    results = fake_cupy.zeros(32, np.float32)
    launcher.upload(values, np.arange(32, dtype=np.float32))
    launcher.launch(SQUARE, 1, 32, values=values, results=results, size=32)
    np.testing.assert_array_equal(results.get(), np.arange(32.0) ** 2)
    assert launcher.launches == 1
    with pytest.raises(TypeError, match=r"values must be \*float32, got \*float32 of numpy"):
        launcher.launch(SQUARE, 1, 32, values=values.get(), results=results, size=32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"size": 32.0}, "size must be int64, got 32.0"),
        ({"size": 2**63}, f"size must be int64, got {2**63}"),
        ({"size": np.zeros(1, np.int64)}, r"size must be int64, got \*int64"),
        ({"values": np.zeros(32)}, r"values must be \*float32, got \*float64"),
        ({"values": None}, r"values must be \*float32, got None"),
        ({"results": np.zeros(64, np.float32)[::2]}, "results is not C-contiguous"),
        ({"length": 32}, "takes values, results, size; missing: none, unknown: length"),
    ],
)
def test_wrong_argument_is_refused_before_anything_runs(
    changed: dict[str, Any], message: str
) -> None:
    launcher = EmulatorLauncher()
    results = np.zeros(32, np.float32)
    arguments = {"values": np.ones(32, np.float32), "results": results, "size": 32, **changed}
    with pytest.raises(TypeError, match=message):
        launcher.launch(SQUARE, 1, 32, **arguments)
    assert launcher.launches == 0
    assert not results.any()


def test_missing_argument_is_named() -> None:
    with pytest.raises(TypeError, match="missing: results, size, unknown: none"):
        EmulatorLauncher().launch(SQUARE, 1, 32, values=np.ones(32, np.float32))


def test_upload_refuses_another_type_or_size() -> None:
    launcher = EmulatorLauncher()
    with pytest.raises(TypeError, match="upload of 4 float64 elements to 4 of float32"):
        launcher.upload(np.zeros(4, np.float32), np.zeros(4))
    with pytest.raises(TypeError, match="upload of 3 float32 elements to 4 of float32"):
        launcher.upload(np.zeros(4, np.float32), np.zeros(3, np.float32))


def test_every_type_of_argument_arrives() -> None:
    doubles = np.zeros(12)
    floats = np.full(4, 7.5, np.float32)
    EmulatorLauncher().launch(
        ALL_TYPES,
        1,
        32,
        floats=floats,
        doubles=doubles,
        halves=np.zeros(4, np.float16),
        bfloats=np.zeros(4, ml_dtypes.bfloat16),
        longs=np.zeros(4, np.int64),
        words=None,
        structs=np.zeros(40, np.uint8),
        by_value=AllNumbers(0.1, -(2**40), 2**53, floats, 0.25, -7),
        float32=np.float32(0.5),
        float64=0.3,
        int32=np.int64(-1),
        int64=-(2**50),
        uint32=2**32 - 1,
        uint64=np.uint8(200),
    )
    by_value = [0.1, -(2**40), 2**53, 7.5, 0.25, -7]
    assert doubles.tolist() == [0.5, 0.3, -1, -(2**50), 2**32 - 1, 200, *by_value]


def pair_arguments() -> dict[str, Any]:
    left, right, before, after = np.arange(4 * 32, dtype=np.float32).reshape(4, 32)
    return {
        "pair": planted.Pair(left, right, 1, 10),
        "before": before,
        "after": after,
        "results": np.zeros(32, np.float32),
        "before_factor": 100,
        "after_factor": 1000,
    }


def test_struct_arrives_field_by_field() -> None:
    arguments = pair_arguments()
    pair = arguments["pair"]
    EmulatorLauncher().launch(planted.combine(), 1, 32, **arguments)
    expected = pair.left + 10 * pair.right + 100 * arguments["before"] + 1000 * arguments["after"]
    np.testing.assert_array_equal(arguments["results"], expected)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("right", np.zeros(32), r"pair.right must be \*float32, got \*float64"),
        ("left_factor", 0.5, "pair.left_factor must be int32, got 0.5"),
        ("right_factor", np.int64(2**31), "pair.right_factor must be int32, got .*2147483648"),
        ("left", np.zeros(64, np.float32)[::2], "pair.left is not C-contiguous"),
    ],
)
def test_wrong_field_is_refused(field: str, value: object, message: str) -> None:
    arguments = pair_arguments()
    arguments["pair"] = arguments["pair"]._replace(**{field: value})
    with pytest.raises(TypeError, match=message):
        EmulatorLauncher().launch(planted.combine(), 1, 32, **arguments)


def test_struct_is_refused_if_its_fields_have_other_names() -> None:
    class Swapped(NamedTuple):
        right: Any
        left: Any
        left_factor: int
        right_factor: int

    arguments = pair_arguments()
    for wrong in (Swapped(*arguments["pair"]), tuple(arguments["pair"]), arguments["before"]):
        with pytest.raises(TypeError, match="pair must be a tuple with fields left, right, left_f"):
            EmulatorLauncher().launch(planted.combine(), 1, 32, **{**arguments, "pair": wrong})


def test_struct_with_padding_is_refused() -> None:
    fields = {"first": Number("int32"), "second": Pointer("float32")}
    with pytest.raises(TypeError, match="Pair has padding: declare its widest fields first"):
        Struct("gpuopt::Pair", fields)
    with pytest.raises(TypeError, match="padding"):
        Struct("gpuopt::Pair", dict(reversed(fields.items())))


@pytest.fixture(scope="module")
def compiler_errors() -> str:
    """What g++ says of all wrong declarations."""
    with pytest.raises(KernelError, match="g\\+\\+ does not compile") as raised:
        EmulatorLauncher().prepare([kernel for kernel, _ in planted.BY_COMPILER.values()])
    return str(raised.value)


@pytest.mark.parametrize("name", planted.BY_COMPILER)
def test_compiler_finds_the_wrong_declaration(name: str, compiler_errors: str) -> None:
    _, message = planted.BY_COMPILER[name]
    assert re.search(message, compiler_errors), compiler_errors


@pytest.mark.parametrize("name", planted.BY_NAME)
def test_parameters_of_other_names_are_refused(name: str) -> None:
    message = "in Python, and pair, before, after, results, before_factor, after_factor in C"
    with pytest.raises(KernelError, match=message):
        EmulatorLauncher().prepare([planted.BY_NAME[name]])


def test_kernel_that_its_file_lacks_is_refused() -> None:
    with pytest.raises(KernelError, match=r"collectives\.cu has no kernel cube"):
        EmulatorLauncher().prepare([collective("cube", values=FLOATS)])


@pytest.mark.parametrize(
    ("num_blocks", "num_threads", "message"),
    [(0, 32, "0 blocks"), (1, 33, "multiple of 32"), (1, 2048, "up to 1024")],
)
def test_launches_beyond_the_limits_are_refused(
    num_blocks: int, num_threads: int, message: str
) -> None:
    arrays = {"values": np.ones(32, np.float32), "results": np.zeros(32, np.float32)}
    with pytest.raises(KernelError, match=message):
        EmulatorLauncher().launch(SQUARE, num_blocks, num_threads, **arrays, size=32)


def test_kernel_that_does_not_compile_says_why() -> None:
    unknown = collective("use_atomics", "char", values=FLOATS, results=FLOATS)
    with pytest.raises(KernelError, match="atomics are of 32 or 64 bits"):
        EmulatorLauncher().prepare([unknown])


@without_sanitizer
def test_libraries_on_disk_are_told_apart_by_whatever_goes_into_them(tmp_path: Path) -> None:
    def name(flags: Sequence[str] = ("-O1",), source: str = "a kernel") -> str:
        kernel_library._digest.cache_clear()
        return kernel_library._name(flags, source, [tmp_path])

    names = {name(), name(flags=["-O2"]), name(source="another")}
    for text in ("1", "2"):
        for file in ("a.h", "b.cuh", "c.cu", "d.ld", "e.inl", "f"):
            (tmp_path / file).write_text(text)
            names.add(name())
    assert len(names) == 3 + 12


@without_sanitizer
def test_a_copy_of_the_project_compiles_no_kernel_again_whichever_it_was_compiled_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(folder: Path, *kernels: Kernel) -> kernel_library.Function:
        shutil.copytree(kernel_library.HERE, folder)
        monkeypatch.setattr(kernel_library, "HERE", folder)
        monkeypatch.setattr(kernel_library, "_functions", {})
        EmulatorLauncher().prepare(kernels)
        return kernel_library.find(SQUARE, "")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    together = compiled(tmp_path / "one", MULTIPLY_ADD, SQUARE)
    assert compiled(tmp_path / "other", SQUARE) == together
    assert len(list(tmp_path.rglob("*.so"))) == 1


# ---- What the checkers find


@pytest.mark.parametrize("name", planted.BY_EMULATOR)
@pytest.mark.parametrize("seed", [0, 3])
def test_emulator_finds_the_planted_defect_and_works_on(name: str, seed: int) -> None:
    launcher = EmulatorLauncher(seed)
    with pytest.raises(KernelError, match=planted.BY_EMULATOR[name]):
        planted.run(launcher, name, defective=True)
    planted.run(launcher, name, defective=False)
    test_collectives_give_each_lane_what_cuda_gives_it(seed)


@pytest.mark.parametrize("name", ["barrier_of_some_warps", "shuffle_after_exit"])
def test_a_defect_that_gpus_tolerate_passes_when_the_emulator_is_not_strict(name: str) -> None:
    for seed in range(4):
        planted.run(EmulatorLauncher(seed, strict=False), name, defective=True)


@without_sanitizer
def test_shared_memory_that_nobody_wrote_is_not_a_number() -> None:
    values = planted.run(EmulatorLauncher(), "uninitialised_shared", defective=True)
    unwritten = np.arange(values.size) % planted.NUM_THREADS == planted.NUM_THREADS - 1
    np.testing.assert_array_equal(np.isnan(values), unwritten)
    assert np.all(planted.run(EmulatorLauncher(), "uninitialised_shared", defective=False) == 1)


@without_sanitizer
@pytest.mark.parametrize("name", ["block_order", "missing_barrier", "missing_warp_barrier"])
def test_result_that_depends_on_an_order_differs_between_seeds(name: str) -> None:
    def outcomes(defective: bool) -> set[bytes]:
        return {planted.run(EmulatorLauncher(s), name, defective).tobytes() for s in range(8)}

    assert len(outcomes(defective=True)) > 1
    assert len(outcomes(defective=False)) == 1


@without_sanitizer
def test_same_seed_gives_the_same_order() -> None:
    first, second = (planted.run(EmulatorLauncher(3), "missing_barrier", True) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@without_sanitizer
@pytest.mark.parametrize("name", planted.BY_ADDRESS)
def test_address_and_behaviour_sanitizers_find_the_planted_defect(name: str) -> None:
    report = run_sanitized("address", "defective", name)
    assert re.search(planted.BY_ADDRESS[name], report), report
    assert "planted.cu" in report


@without_sanitizer
@pytest.mark.parametrize("name", planted.BY_THREAD)
def test_thread_sanitizer_finds_the_planted_race(name: str) -> None:
    report = run_sanitized("thread", "defective", name)
    assert re.search("WARNING: ThreadSanitizer: data race", report), report
    assert "planted.cu" in report


@without_sanitizer
@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_sanitizers_report_nothing_for_correct_kernels(sanitize: str) -> None:
    report = run_sanitized(sanitize, "sound", *planted.NAMES)
    assert report.endswith("ran to the end\n"), report


def run_sanitized(sanitize: str, *arguments: str) -> str:
    """Returns what planted.py and the sanitizer wrote."""
    command, environment = sanitized(sanitize, ["-m", "emulator.planted", *arguments])
    tests = str(ROOT / "tests" / "support")
    result = subprocess.run(
        command,
        cwd=tests,
        env={**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), tests])},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
    assert (result.returncode == 0) == result.stdout.endswith("ran to the end\n"), result.stdout
    return result.stdout


def test_functions_of_one_name_in_different_files_are_told_apart() -> None:
    EmulatorLauncher().prepare([SQUARE])
    elsewhere = Kernel("square", SQUARE.parameters, file="planted.cu")
    with pytest.raises(KernelError, match=r"planted\.cu has no kernel square"):
        EmulatorLauncher().prepare([elsewhere])


@without_sanitizer
def test_a_sanitizer_that_is_not_loaded_is_an_error_that_says_how_to_load_it() -> None:
    with pytest.raises(KernelError, match="the address sanitizer must be there when Python starts"):
        planted.run(EmulatorLauncher(sanitize="address"), "block_order", defective=False)
