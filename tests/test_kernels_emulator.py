"""The emulator computes what a GPU would, and each of its checkers finds the defect made for it."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from functools import reduce
from pathlib import Path

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from emulator import EmulatorLauncher, KernelError, kernel_library, planted
from emulator.sanitized import sanitized

from gpuopt.backends.cuda.kernel import Kernel

pytestmark = pytest.mark.emulator

SANITIZE = os.environ.get("GPUOPT_EMULATOR_SANITIZE", "")
without_sanitizer = pytest.mark.skipif(bool(SANITIZE), reason="this process has a sanitizer itself")

COLLECTIVES = Kernel("use_collectives", ("*int32", "*int32"), file="collectives.cu")
SQUARE = Kernel("square", ("*float32", "*float32", "int64"), file="collectives.cu")
MULTIPLY_ADD = Kernel("multiply_add", ("*float32",) * 4, file="collectives.cu")
ATOMICS = {
    dtype: Kernel("use_atomics", (f"*{dtype}",) * 2, types=(cxx,), file="collectives.cu")
    for dtype, cxx in {
        "int32": "int",
        "uint32": "unsigned int",
        "int64": "long long",
        "uint64": "unsigned long long",
        "float32": "float",
    }.items()
}
STORAGE = {
    dtype: Kernel(
        "to_16_bits_and_back", ("*float32", f"*{dtype}", "*float32"), (cxx,), file="collectives.cu"
    )
    for dtype, cxx in {"float16": "__half", "bfloat16": "__nv_bfloat16"}.items()
}
ALL_TYPES = Kernel(
    "take_all",
    (
        *("*float32", "*float64", "*float16", "*bfloat16", "*int64", "*uint32", "*uint8", "*int16"),
        *("*void", "*void", "float32", "float64", "int32", "int64", "uint32"),
    ),
    file="collectives.cu",
)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All at once, which is quicker than one after another."""
    EmulatorLauncher().prepare(
        [
            *planted.all_planted(),
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
    results = np.empty((values.size, 16), np.int32)
    EmulatorLauncher(seed).launch(COLLECTIVES, blocks, threads, [values, results])
    expected = [what_a_lane_gets(values, i, threads) for i in range(values.size)]
    np.testing.assert_array_equal(results, np.array(expected).astype(np.uint32).view(np.int32))


def what_a_lane_gets(values: np.ndarray, i: int, threads: int) -> list[int]:
    """By the CUDA C++ Programming Guide's description of each function."""
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
        value,
    ]


@pytest.mark.parametrize("dtype", ATOMICS)
def test_atomics_count_every_thread_once(dtype: str) -> None:
    values = np.random.default_rng(0).integers(0, 1000, 128).astype(dtype)
    results = np.array([0, 0, 500, 500, 0, 1023, 0, 0], dtype)
    EmulatorLauncher(seed=1).launch(ATOMICS[dtype], 2, 64, [values, results])
    total = values.sum(dtype=dtype)
    expected = [total, dtype_negated(total), min(500, values.min()), max(500, values.max()), total]
    np.testing.assert_array_equal(results[:5], np.array(expected, dtype))
    if np.issubdtype(dtype, np.integer):
        bitwise = [reduce(f, values) for f in (np.bitwise_and, np.bitwise_or, np.bitwise_xor)]
        np.testing.assert_array_equal(results[5:], np.array(bitwise, dtype) & dtype_of(dtype, 1023))


def dtype_negated(value: np.generic) -> np.generic:
    with np.errstate(over="ignore"):
        return value.dtype.type(0) - value


def dtype_of(dtype: str, value: int) -> np.generic:
    return np.dtype(dtype).type(value)


@pytest.mark.parametrize("dtype", STORAGE)
def test_16_bit_types_round_as_numpy_does(dtype: str) -> None:
    values = np.random.default_rng(0).normal(size=64).astype(np.float32)
    values[:4] = [np.inf, -np.inf, 65519.0, 0.0]
    stored = np.empty(64, getattr(ml_dtypes, dtype, dtype))
    results = np.empty_like(values)
    EmulatorLauncher().launch(STORAGE[dtype], 1, 64, [values, stored, results])
    np.testing.assert_array_equal(stored, values.astype(stored.dtype))
    np.testing.assert_array_equal(results, stored.astype(np.float32))


def test_multiply_adds_are_rounded_once() -> None:
    a = np.full(32, 1 + 2**-12, np.float32)
    c = np.full(32, -(1 + 2**-11), np.float32)
    results = np.empty(32, np.float32)
    EmulatorLauncher().launch(MULTIPLY_ADD, 1, 32, [a, a, c, results])
    assert np.all(results == np.float32(2**-24))
    assert np.all(a * a + c == 0)


def test_denormals_are_flushed_inside_a_kernel_and_not_outside() -> None:
    values = np.full(32, 1e-20, np.float32)
    results = np.ones_like(values)
    EmulatorLauncher().launch(SQUARE, 1, 32, [values, results, np.int64(32)])
    assert np.all(results == 0)
    assert np.all(values * values > 0)


def test_threads_of_python_may_launch_at_once() -> None:
    outcomes = []

    def work(seed: int) -> None:
        values = np.full(256, seed, np.int32)
        results = np.empty((256, 16), np.int32)
        for _ in range(10):
            EmulatorLauncher(seed).launch(COLLECTIVES, 4, 64, [values, results])
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
    launcher.launch(SQUARE, 1, 32, [values, results, np.int64(32)])
    np.testing.assert_array_equal(results.get(), np.arange(32.0) ** 2)
    assert launcher.launches == 1
    with pytest.raises(TypeError, match="argument 0 must be"):
        launcher.launch(SQUARE, 1, 32, [values.get(), results, np.int64(32)])


@pytest.mark.parametrize(
    ("position", "argument", "message"),
    [
        (2, 32, "argument 2 must be int64, got 32"),
        (2, np.int32(32), "argument 2 must be int64, got int32"),
        (0, np.zeros(32), r"argument 0 must be \*float32, got \*float64"),
        (1, np.zeros(64, np.float32)[::2], "argument 1 is not C-contiguous"),
    ],
)
def test_wrong_argument_is_refused_before_anything_runs(
    position: int, argument: object, message: str
) -> None:
    launcher = EmulatorLauncher()
    results = np.zeros(32, np.float32)
    arguments = [np.ones(32, np.float32), results, np.int64(32)]
    arguments[position] = argument
    with pytest.raises(TypeError, match=message):
        launcher.launch(SQUARE, 1, 32, arguments)
    assert launcher.launches == 0
    assert not results.any()


def test_upload_refuses_another_type_or_size() -> None:
    launcher = EmulatorLauncher()
    with pytest.raises(TypeError, match="upload of 4 float64 elements to 4 of float32"):
        launcher.upload(np.zeros(4, np.float32), np.zeros(4))
    with pytest.raises(TypeError, match="upload of 3 float32 elements to 4 of float32"):
        launcher.upload(np.zeros(4, np.float32), np.zeros(3, np.float32))


@pytest.mark.parametrize("position", range(len(ALL_TYPES.parameters)))
def test_declaration_that_differs_from_cxx_is_refused(position: int) -> None:
    arguments = [an_argument(parameter) for parameter in ALL_TYPES.parameters]
    EmulatorLauncher().launch(ALL_TYPES, 1, 32, arguments)
    declared = list(ALL_TYPES.parameters)
    declared[position] = "*complex64" if declared[position].startswith("*") else "*void"
    arguments[position] = an_argument(declared[position])
    wrong = Kernel("take_all", tuple(declared), file="collectives.cu")
    actual = re.escape(ALL_TYPES.parameters[position])
    with pytest.raises(
        KernelError, match=rf"parameter {position} is declared .*C\+\+ it is {actual}"
    ):
        EmulatorLauncher().launch(wrong, 1, 32, arguments)


def an_argument(parameter: str) -> object:
    name = parameter.removeprefix("*").replace("void", "uint8")
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    return np.zeros(4, dtype) if parameter.startswith("*") else dtype.type(1)


def test_declaration_with_too_few_parameters_is_refused() -> None:
    wrong = Kernel("square", ("*float32",), file="collectives.cu")
    with pytest.raises(KernelError, match=r"declared with 1 parameters; in C\+\+ it has 3"):
        EmulatorLauncher().launch(wrong, 1, 32, [np.zeros(4, np.float32)])


def test_memory_of_any_kind_may_be_declared_for_any_pointer() -> None:
    declared = Kernel("square", ("*float32", "*void", "int64"), file="collectives.cu")
    results = np.zeros(128, np.uint8)
    arguments = [np.ones(32, np.float32), results, np.int64(32)]
    EmulatorLauncher().launch(declared, 1, 32, arguments)
    np.testing.assert_array_equal(results.view(np.float32), 1)


@pytest.mark.parametrize(
    ("num_blocks", "num_threads", "message"),
    [(0, 32, "0 blocks"), (1, 33, "multiple of 32"), (1, 2048, "up to 1024")],
)
def test_launch_limits_hold(num_blocks: int, num_threads: int, message: str) -> None:
    arguments = [np.ones(32, np.float32), np.zeros(32, np.float32), np.int64(32)]
    with pytest.raises(KernelError, match=message):
        EmulatorLauncher().launch(SQUARE, num_blocks, num_threads, arguments)


def test_kernel_that_does_not_compile_says_why() -> None:
    unknown = Kernel("use_atomics", ("*int8",) * 2, types=("char",), file="collectives.cu")
    with pytest.raises(KernelError, match="atomics are of 32 or 64 bits"):
        EmulatorLauncher().prepare([unknown])


@without_sanitizer
def test_libraries_on_disk_are_told_apart_by_whatever_went_into_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_library, "HERE", tmp_path)
    digests = set()
    for text in ("1", "2"):
        for name in ("a.h", "b.cuh", "c.cu", "d.ld"):
            (tmp_path / name).write_text(text)
            kernel_library._digest.cache_clear()
            digests.add(kernel_library._digest(tmp_path))
    kernel_library._digest.cache_clear()
    assert len(digests) == 8


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
def test_what_gpus_put_up_with_passes_where_asked_for(name: str) -> None:
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
def test_sanitizers_have_nothing_to_say_about_sound_kernels(sanitize: str) -> None:
    report = run_sanitized(sanitize, "sound", *planted.NAMES)
    assert report.endswith("ran to the end\n"), report


def run_sanitized(sanitize: str, *arguments: str) -> str:
    """Returns what planted.py and the sanitizer wrote."""
    command, environment = sanitized(sanitize, ["-m", "emulator.planted", *arguments])
    tests = str(Path(__file__).parent)
    result = subprocess.run(
        command,
        cwd=tests,
        env={**environment, "PYTHONPATH": tests},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
    assert (result.returncode == 0) == result.stdout.endswith("ran to the end\n"), result.stdout
    return result.stdout


@without_sanitizer
def test_sanitizer_that_is_not_loaded_is_asked_for() -> None:
    with pytest.raises(KernelError, match="the address sanitizer must be there when Python starts"):
        planted.run(EmulatorLauncher(sanitize="address"), "block_order", defective=False)
