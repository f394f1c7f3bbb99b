"""The CUDA backend, with its kernels run on the CPU, does what the numpy backend does."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from dtypes import DTYPES_BY_NAME, TYPES_OF_KERNELS
from emulator.emulator import EmulatorLauncher
from every_kernel import kernels_of, kernels_without_rule, types_of
from every_optimizer import rules_of_each_shape, rules_of_other_rows_alone, update_rules
from kernel_updates import (
    Arrays,
    Update,
    apply_dense,
    apply_sparse,
    check,
    check_sorted,
    copy_of,
    sparse_case,
)

from gpuopt.backends import Target
from gpuopt.backends.backend import RowCheck
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cuda import kernels, launch_shapes, structs
from gpuopt.backends.cuda.backend import CudaBackend
from gpuopt.backends.cuda.dense_launch import MOST_LISTS
from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.launch_shapes import (
    BLOCKS_PER_MULTIPROCESSOR,
    DENSE_THREADS,
    FEW_ROWS,
    MAX_CHUNK,
    ROW_THREADS,
    SORT_TILE,
)
from gpuopt.backends.cuda.launcher import Launch, LaunchSequence
from gpuopt.backends.cuda.sorted_rows import add_sort
from gpuopt.backends.cuda.structs import FEW_GRADIENTS, FewGradients, SortedRows
from gpuopt.backends.cuda.workspace import Workspace
from gpuopt.device import Device
from gpuopt.rules.update_rule import UpdateRule

pytestmark = pytest.mark.emulator

SANITIZED = bool(os.environ.get("GPUOPT_EMULATOR_SANITIZE"))
# Under a sanitizer, every thread costs a lot: less of everything, and what differs in kind.
SCALE = 10 if SANITIZED else 1
ORDERS = [7] if SANITIZED else [0, 1, 7]
INDICES = [np.int64] if SANITIZED else [np.int32, np.int64]
# Which threads meet does not depend on what an element is.
OF_THREADS = os.environ.get("GPUOPT_EMULATOR_SANITIZE") == "thread"
DTYPES = ["float32"] if OF_THREADS else TYPES_OF_KERNELS
HEIGHTS = [1, 2, 255, 256, 257, 2**16, 2**24 + 1, 2**31, 2**32, 2**40]
RULES = (
    rules_of_each_shape()
    if SANITIZED
    else [rule for rule in update_rules() if rule not in rules_of_other_rows_alone()]
)
RULES += [rule for rule in update_rules() if rule.sums and rule not in RULES][:1]
RULES += [rule for rule in update_rules() if rule.row_slots and rule not in RULES][:1]
BY_NAME = {rule.name: rule for rule in update_rules()}


@pytest.fixture(scope="module", autouse=True)
def kernels_are_compiled(request: pytest.FixtureRequest) -> None:
    """Compiles all kernels of this file at once, on all cores."""
    mine = [item for item in request.session.items if item.path == request.path]
    parameters = [getattr(item, "callspec", None) for item in mine]
    rules = {call.params["rule"] for call in parameters if call and "rule" in call.params}
    EmulatorLauncher().prepare(
        kernel
        for group in (kernels_without_rule(), *map(kernels_of, rules))
        for kernel in group
        if is_launched(kernel)
    )


def is_launched(kernel: Kernel) -> bool:
    """Whether a test of this file launches it, as far as that goes by its types."""
    if OF_THREADS and {"double", "__half", "__nv_bfloat16"} & types_of(kernel):
        return False
    by_index = kernel.function in ("sparse_update", "sum_pieces", "sum_runs")
    return not by_index or kernel.types["Key"] == "unsigned int"


@pytest.fixture(params=ORDERS, ids=lambda seed: f"order-{seed}")
def launcher(request: pytest.FixtureRequest) -> EmulatorLauncher:
    return EmulatorLauncher(seed=request.param)


@pytest.fixture
def backend(launcher: EmulatorLauncher) -> CudaBackend:
    return CudaBackend(Device("gpu"), launcher)


# Dense


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_one_launch_updates_many_variables(rule: UpdateRule, dtype: str) -> None:
    launcher = EmulatorLauncher(seed=3)
    backend = CudaBackend(Device("gpu"), launcher)
    arrays = Arrays(rule, dtype)
    tails = [1, 7, 64, 1001, 0, MAX_CHUNK // SCALE, MAX_CHUNK // SCALE + 1]
    updates = [arrays.update(size) for size in (*tails, *[3] * 20)]
    # Variable, gradient or slots are not at an address of whole packs.
    misaligned = arrays.update(501)
    updates.append(misaligned._replace(var=arrays.gradient(502)[1:]))
    updates.append(arrays.update(501, grad=arrays.gradient(502)[1:]))
    slots = [np.concatenate([slot[:1], slot])[1:] for slot in misaligned.slots]
    updates.append(arrays.update(501)._replace(slots=slots))
    transposed = arrays.update(20, 30)
    updates.append(transposed._replace(var=arrays.gradient(30, 20).T))
    updates.append(arrays.update(6, 5, grad=np.broadcast_to(arrays.gradient(1), (6, 5))))
    expected = [copy_of(update) for update in updates]
    scalars = arrays.scalars()
    apply_dense(CpuBackend(), rule, expected, scalars)
    apply_dense(backend, rule, updates, scalars)
    assert launcher.launches == (2 if rule.sums else 1)
    check(updates, expected)


def test_more_chunks_than_blocks_are_updated(
    launcher: EmulatorLauncher, backend: CudaBackend
) -> None:
    [rule] = [rule for rule in update_rules() if rule.name == "momentum"]
    arrays = Arrays(rule, "float32")
    most_blocks = BLOCKS_PER_MULTIPROCESSOR * launcher.num_multiprocessors
    updates = [arrays.update(size) for size in (3 * MAX_CHUNK + 5, *[3] * most_blocks)]
    expected = [copy_of(update) for update in updates]
    scalars = arrays.scalars()
    apply_dense(CpuBackend(), rule, expected, scalars)
    apply_dense(backend, rule, updates, scalars)
    check(updates, expected)


def test_a_second_step_uploads_what_moved_and_allocates_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = BY_NAME["adam"]
    arrays = Arrays(rule, "float32")
    launcher = EmulatorLauncher()
    backend = CudaBackend(Device("gpu"), launcher)
    updates = [arrays.update(size) for size in range(10, 11 + FEW_GRADIENTS)]
    scalars = arrays.scalars()
    plan = backend.plan_dense([Target(update.var, update.slots) for update in updates])
    gradients = [update.grad for update in updates]
    others = [[gradients[0].copy(), *gradients[1:]] for _ in range(MOST_LISTS)]
    for given in [*others[1:], gradients]:
        backend.apply_dense(rule, plan, given, [scalars])
    uploads: list[int] = []
    upload = launcher.upload

    def counted(target: Any, source: np.ndarray) -> None:
        uploads.append(source.nbytes)
        upload(target, source)

    monkeypatch.setattr(launcher, "upload", counted)
    monkeypatch.setattr(np, "empty", None)
    backend.apply_dense(rule, plan, gradients, [scalars])
    backend.apply_dense(rule, plan, gradients, [arrays.scalars()])
    assert uploads == []
    backend.apply_dense(rule, plan, others[0], [arrays.scalars()])
    assert uploads == [len(updates) * 8]


def test_a_gradient_may_alias_a_written_array(backend: CudaBackend) -> None:
    [rule] = [rule for rule in update_rules() if rule.name == "momentum"]
    scalars = {"learning_rate": 0.1, "decay": 0.9}

    def overlapping() -> list[Update]:
        memory = np.linspace(0, 1, 300)
        slots = np.linspace(1, 2, 300)
        return [
            Update(memory[:100], memory[:100], [slots[:100]]),  # the variable itself
            Update(memory[100:200], memory[103:203], [slots[100:200]]),  # a part of it
            Update(memory[200:], slots[50:150], [slots[200:]]),  # parts of others' slots
            Update(np.ones(10), memory[20:30], [np.ones(10)]),  # in the middle of another
        ]

    expected = [update._replace(grad=update.grad.copy()) for update in overlapping()]
    apply_dense(CpuBackend(), rule, expected, scalars)
    updates = overlapping()
    apply_dense(backend, rule, updates, scalars)
    check(updates, expected)


def test_elements_beyond_32_bits_are_reached(launcher: EmulatorLauncher) -> None:
    """The kernel gets arrays that end where the test's do and begin 2**32 elements earlier."""
    [rule] = [rule for rule in update_rules() if rule.name == "momentum"]
    arrays = Arrays(rule, "float32")
    before, here = 2**32, 5
    update, expected = (copy_of(each) for each in [arrays.update(here)] * 2)
    scalars = arrays.scalars()
    apply_dense(CpuBackend(), rule, [expected], scalars)
    grad, *starts = (
        array.ctypes.data - 4 * before for array in (update.grad, update.var, *update.slots)
    )
    launcher.launch(
        kernels.dense_update(rule, "float32"),
        1,
        DENSE_THREADS,
        variables=np.array([before + here, 0, *starts]),
        num_variables=1,
        chunks=np.array([0, before // MAX_CHUNK], np.uint32),
        num_chunks=1,
        chunk_size=MAX_CHUNK,
        grads=np.array([grad]),
        few_grads=FewGradients([0] * FEW_GRADIENTS),
        scalars=kernels.scalars_of(rule, scalars),
        refused=np.zeros(2, np.uint64),
    )
    check([update], [expected])


# Sorting


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("height", [257, 2**40] if SANITIZED else HEIGHTS)
def test_rows_are_sorted_stably(launcher: EmulatorLauncher, height: int, index: str) -> None:
    rng = np.random.default_rng(height)
    for size in (1, 31, 2048 // SCALE, 2049 // SCALE, 4500 // SCALE):
        rows = rng.integers(min(height, np.iinfo(index).max), size=size).astype(index)
        rows[rng.integers(size, size=size // 3)] = rows[0]
        check_sorted(launcher, rows, height)


@pytest.mark.parametrize("exponent", [1.05, 1.5, 3.0])
def test_runs_of_any_length_are_sorted(launcher: EmulatorLauncher, exponent: float) -> None:
    rows = np.random.default_rng(0).zipf(exponent, 5000 // SCALE) % 1000
    check_sorted(launcher, rows.astype(np.int64), 1000)


@pytest.mark.parametrize("most_shares", [2, 5, 256])
def test_rows_of_many_tiles_are_sorted(
    launcher: EmulatorLauncher, most_shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more tiles than shares, a share has several tiles."""
    monkeypatch.setattr(launch_shapes, "MAX_SHARES", most_shares)
    rows = np.random.default_rng(0).zipf(1.1, size=4 * SORT_TILE + 1) % 2**16
    check_sorted(launcher, rows, 2**16)


def test_more_rows_than_32_bits_can_number_are_refused() -> None:
    rows = np.broadcast_to(np.int32(0), 2**31)
    launcher = EmulatorLauncher()
    workspace = Workspace(launcher)
    with pytest.raises(ValueError, match="less than 2147483648 rows; this has 2147483648"):
        add_sort(LaunchSequence(), launcher, workspace, rows, 1, np.zeros(2, np.uint64))


# Sparse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rule", "touches_all_rows"),
    [
        pytest.param(rule, touches_all_rows, id=f"{rule.name}-{touches_all_rows}")
        for rule in RULES
        if not rule.sums
        for touches_all_rows in (False, True)
        if not (touches_all_rows and rule.row_slots)
    ],
)
def test_repeated_rows_update_like_their_sum(
    rule: UpdateRule, dtype: str, touches_all_rows: bool
) -> None:
    backend = CudaBackend(Device("gpu"), EmulatorLauncher(seed=5))
    arrays = Arrays(rule, dtype)
    rng = np.random.default_rng(1)
    # Widths of part of a pack, one pack, a pack and a bit, several lanes, more than 32 packs.
    for width, index in ((1, np.int32), (8, np.int64), (9, np.int32), (40, np.int32)):
        rows = (rng.zipf(1.4, 240) % 50).astype(index)
        update, expected = sparse_case(arrays, 50, width, rows)
        scalars = arrays.scalars()
        apply_sparse(CpuBackend(), rule, expected, scalars, touches_all_rows)
        apply_sparse(backend, rule, update, scalars, touches_all_rows)
        check([update], [expected])


def misaligned(array: np.ndarray) -> np.ndarray:
    """Returns a copy at an address that is not aligned to packs."""
    return np.concatenate([array.reshape(-1)[:1], array.reshape(-1)])[1:].reshape(array.shape)


@pytest.mark.parametrize("touches_all_rows", [False, True])
def test_rows_of_misaligned_strided_and_shared_arrays_are_updated(
    backend: CudaBackend, touches_all_rows: bool
) -> None:
    rule = BY_NAME["adam"]
    arrays = Arrays(rule, "float32")
    rows = np.array([3, 1, 3, 6], np.int32)
    plain = arrays.update(7, 8, grad=arrays.gradient(4, 8), rows=rows)
    strided = np.asfortranarray
    cases = [
        plain._replace(var=misaligned(plain.var)),
        plain._replace(grad=misaligned(plain.grad)),
        plain._replace(slots=[plain.slots[0], misaligned(plain.slots[1])]),
        plain._replace(var=strided(plain.var), slots=list(map(strided, plain.slots))),
        plain._replace(grad=strided(plain.grad)),
        plain._replace(grad=plain.var[:4]),
        plain._replace(grad=plain.slots[1][2:6]),
    ]
    scalars = arrays.scalars()
    for case in cases:
        expected = copy_of(case._replace(grad=case.grad.copy()))
        apply_sparse(CpuBackend(), rule, expected, scalars, touches_all_rows)
        apply_sparse(backend, rule, case, scalars, touches_all_rows)
        check([case], [expected])


def test_more_rows_than_one_pass_of_the_grid_are_updated(
    launcher: EmulatorLauncher, backend: CudaBackend
) -> None:
    [rule] = [rule for rule in update_rules() if rule.name == "momentum"]
    arrays = Arrays(rule, "float64")
    most_blocks = BLOCKS_PER_MULTIPROCESSOR * launcher.num_multiprocessors
    at_once = most_blocks * ROW_THREADS // 32  # by warps
    rows = np.random.default_rng(3).permutation(at_once + 20).astype(np.int32)
    update, expected = sparse_case(arrays, rows.size, 64, rows)
    scalars = arrays.scalars()
    apply_sparse(CpuBackend(), rule, expected, scalars, False)
    apply_sparse(backend, rule, update, scalars, False)
    check([update], [expected])


def test_rows_beyond_32_bits_are_reached(launcher: EmulatorLauncher) -> None:
    """The kernel gets a table and a gradient that begin more than 2**32 elements earlier."""
    [rule] = [rule for rule in update_rules() if rule.name == "momentum"]
    arrays = Arrays(rule, "float32")
    width, row, position = 8, 2**33, 2**31 - 1
    grad = arrays.gradient(1, width)
    update, expected = (
        copy_of(each) for each in [arrays.update(1, width, grad=grad, rows=np.zeros(1, int))] * 2
    )
    scalars = arrays.scalars()
    apply_sparse(CpuBackend(), rule, expected, scalars, False)
    starts = [array.ctypes.data - 4 * width * row for array in (update.var, *update.slots)]
    sorted_rows = SortedRows(
        keys=np.array([row], np.uint64),
        positions=np.array([position], np.uint32),
        num_rows=1,
    )
    launcher.launch(
        kernels.sparse_update(rule, "float32", "uint64"),
        1,
        ROW_THREADS,
        only_gradient=structs.TableGradient(0, grad.ctypes.data - 4 * width * position, 0),
        gradients=None,
        num_tables=1,
        only_arrays=structs.Arrays(starts),
        arrays=None,
        rows=sorted_rows,
        parts=np.zeros(4, np.float32),
        row_width=width,
        scalars=kernels.scalars_of(rule, scalars),
        touched=None,
        lanes_per_row=2,
        refused=np.zeros(2, np.uint64),
    )
    check([update], [expected])


def array_at(address: int) -> np.ndarray:
    """A float32 array that is never read through numpy."""
    return np.ctypeslib.as_array((ctypes.c_float * 1).from_address(address))


@pytest.mark.parametrize("key", ["uint32", "uint64"])
def test_the_bits_of_rows_with_a_gradient_are_set(launcher: EmulatorLauncher, key: str) -> None:
    keys = np.sort(np.random.default_rng(0).zipf(1.3, 1000 // SCALE) % 500).astype(key)
    touched = np.zeros(16, np.uint32)
    launcher.launch(
        kernels.mark_rows(key),
        3,
        ROW_THREADS,
        rows=SortedRows(keys=keys, positions=np.zeros(keys.size, np.uint32), num_rows=keys.size),
        touched=touched,
        refused=np.zeros(2, np.uint64),
    )
    bits = np.unpackbits(touched.view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == np.unique(keys).tolist()


@pytest.mark.parametrize("width", [1, 4, 6])
@pytest.mark.parametrize("run", [257, 300] if SANITIZED else [255, 256, 257, 300, 600, 1000])
def test_long_runs_are_summed_in_parts(backend: CudaBackend, run: int, width: int) -> None:
    """A run may begin anywhere in one piece and end anywhere in another."""
    rule = BY_NAME["gradient_descent"]
    arrays = Arrays(rule, "float64")
    for before in (1, 128) if SANITIZED else (0, 1, 127, 128, 200):
        rows = np.array([0] * before + [3] * run + [4] * run + [5] * 3, np.int32)
        update, expected = sparse_case(arrays, 7, width, rows)
        scalars = arrays.scalars()
        apply_sparse(CpuBackend(), rule, expected, scalars, False)
        apply_sparse(backend, rule, update, scalars, False)
        # Sums of n numbers of size 1 in another order: up to about n roundings.
        check([update], [expected], sum_error=float(run))


def test_the_order_of_blocks_and_threads_changes_no_bit() -> None:
    rule = BY_NAME["adam"]
    results = set()
    for seed in range(6):
        backend = CudaBackend(Device("gpu"), EmulatorLauncher(seed=seed))
        arrays = Arrays(rule, "float32")
        rows = (np.random.default_rng(2).zipf(1.2, 1500 // SCALE) % 30).astype(np.int32)
        update, _ = sparse_case(arrays, 30, 5, rows)
        apply_sparse(backend, rule, update, arrays.scalars(), True)
        results.add(b"".join(array.tobytes() for array in (update.var, *update.slots)))
    assert len(results) == 1


@pytest.mark.parametrize("touches_all_rows", [False, True])
def test_empty_gradients_and_empty_variables_are_accepted(
    backend: CudaBackend, touches_all_rows: bool
) -> None:
    rule = BY_NAME["adam"]
    arrays = Arrays(rule, "float32")
    for height, width in ((5, 3), (0, 3), (5, 0)):
        update, expected = sparse_case(arrays, height, width, np.zeros(0, np.int32))
        scalars = arrays.scalars()
        apply_sparse(CpuBackend(), rule, expected, scalars, touches_all_rows)
        apply_sparse(backend, rule, update, scalars, touches_all_rows)
        check([update], [expected])


def test_only_touched_rows_are_written(backend: CudaBackend) -> None:
    rule = BY_NAME["adam"]
    update, before = sparse_case(Arrays(rule, "float32"), 9, 4, np.array([7, 2, 7], np.int64))
    apply_sparse(backend, rule, update, Arrays(rule, "float32").scalars(), False)
    for array, old in zip((update.var, *update.slots), (before.var, *before.slots), strict=True):
        assert np.flatnonzero((array != old).any(axis=1)).tolist() == [2, 7]


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize(("row", "is_there"), [(0, True), (8, True), (9, False), (-1, False)])
def test_rows_that_are_out_of_range_are_found(
    backend: CudaBackend, row: int, is_there: bool, index: type
) -> None:
    flag = backend.row_flags.new()
    backend.row_flags.check(flag, [RowCheck(6, np.array([3, row, 1], index), 9)])
    assert flag.array.view(np.int64).tolist() == ([0, 0] if is_there else [7, row])


class Recording(EmulatorLauncher):
    """Notes which kernels are launched."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.launched: list[str] = []

    def bind(self, kernel: Kernel, blocks: int, threads: int, /, **arguments: Any) -> Launch:
        launch = super().bind(kernel, blocks, threads, **arguments)
        start = launch.start

        def noted() -> None:
            self.launched.append(kernel.function)
            start()

        of_launch = {"kernel": kernel, "replace": launch.replace, "forget": launch.forget}
        return cast(Launch, SimpleNamespace(**of_launch, start=noted))


BY_THE_SORT = ["check_and_count_digits", "move_rows"]


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("bad", [None, -1, 300])
@pytest.mark.parametrize("all_rows", [False, True])
def test_the_sort_of_many_rows_checks_them(bad: int | None, index: type, all_rows: bool) -> None:
    launcher = Recording()
    backend = CudaBackend(Device("gpu"), launcher)
    arrays = Arrays(BY_NAME["adam"], "float32")
    scalars = arrays.scalars()
    flag = backend.row_flags.new()
    for number, given in ((4, bad), (5, None)):
        rows = np.random.default_rng(0).integers(300, size=FEW_ROWS + 1).astype(index)
        if given is not None:
            rows[1234] = given
        update, expected = sparse_case(arrays, 300, 3, rows)
        launcher.launched.clear()
        backend.row_flags.check(flag, [RowCheck(number, rows, 300)])
        apply_sparse(backend, arrays.rule, update, scalars, all_rows, flag)
        assert launcher.launched[:2] == BY_THE_SORT
        assert "check_rows" not in launcher.launched
        if bad is None:
            apply_sparse(CpuBackend(), arrays.rule, expected, scalars, all_rows)
            check([update], [expected], sum_error=30)
        else:  # and so the next call
            assert update.var.tobytes() == expected.var.tobytes()
        assert flag.array.view(np.int64).tolist() == ([0, 0] if bad is None else [5, bad])
    backend.row_flags.clear(flag)
    # The refused calls have left no counts behind.
    update, expected = sparse_case(arrays, 300, 3, np.arange(FEW_ROWS + 1, dtype=index) % 300)
    apply_sparse(CpuBackend(), arrays.rule, expected, scalars, all_rows)
    apply_sparse(backend, arrays.rule, update, scalars, all_rows, flag)
    check([update], [expected], sum_error=30)


def test_rows_are_checked_before_any_other_kernel_reads_the_flag() -> None:
    launcher = Recording()
    backend = CudaBackend(Device("gpu"), launcher)
    arrays = Arrays(BY_NAME["momentum"], "float32")
    scalars = arrays.scalars()
    rows = np.full(FEW_ROWS + 1, 7)
    update, before = sparse_case(arrays, 7, 2, rows)
    dense = arrays.update(5)
    dense_before = copy_of(dense)
    flag = backend.row_flags.new()
    # A dense update of the same call comes first.
    backend.row_flags.check(flag, [RowCheck(2, rows, 7)])
    apply_dense(backend, arrays.rule, [dense], scalars, flag)
    assert launcher.launched == ["check_rows", "dense_update"]
    apply_sparse(backend, arrays.rule, update, scalars, False, flag)
    assert launcher.launched[2:4] == ["count_digits", "move_rows"]
    for mine, theirs in ((dense, dense_before), (update, before)):
        assert mine.var.tobytes() == theirs.var.tobytes()
    backend.row_flags.clear(flag)
    # Nothing is updated, or other rows are.
    backend.row_flags.check(flag, [RowCheck(2, rows, 7)])
    assert backend.row_flags.read(flag).values.view(np.int64).tolist() == [3, 7]
    backend.row_flags.clear(flag)
    backend.row_flags.check(flag, [RowCheck(2, rows, 7)])
    other, other_before = sparse_case(arrays, 7, 2, np.zeros(FEW_ROWS + 1, np.int64))
    apply_sparse(backend, arrays.rule, other, scalars, False, flag)
    assert other.var.tobytes() == other_before.var.tobytes()


def test_a_refused_call_writes_nothing(launcher: EmulatorLauncher) -> None:
    rule = BY_NAME["adam"]
    backend = CudaBackend(Device("gpu"), launcher)
    arrays = Arrays(rule, "float32")
    update, _ = sparse_case(arrays, 9, 4, np.array([7, 2, 7], np.int64))
    # Afterwards the workspace holds sorted rows, which a kernel could take for this call's.
    apply_sparse(backend, rule, update, arrays.scalars(), True)
    before = copy_of(update)
    flag = backend.row_flags.new()
    backend.row_flags.check(flag, [RowCheck(6, np.array([3, 9, 1, -2], np.int32), 9)])
    assert flag.array[0] == 7
    assert flag.array[1:].view(np.int64)[0] in (9, -2)
    apply_sparse(backend, rule, update, arrays.scalars(), True, flag)
    dense = arrays.update(3)._replace(var=update.var[0, :3])
    apply_dense(backend, rule, [dense], {name: np.float32(0.5) for name in rule.scalars}, flag)
    for array, old in zip((update.var, *update.slots), (before.var, *before.slots), strict=True):
        assert array.tobytes() == old.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_duplicate_rows_are_summed_in_order_of_first_appearance(
    backend: CudaBackend, dtype: str
) -> None:
    rng = np.random.default_rng(4)
    values = rng.normal(size=(700 // SCALE, 2, 3)).astype(DTYPES_BY_NAME[dtype])
    rows = (rng.zipf(1.5, 700 // SCALE) % 20).astype(np.int64)
    sums, unique = backend.sum_duplicate_rows(values, rows)
    expected, expected_rows = CpuBackend().sum_duplicate_rows(values, rows)
    assert unique.tolist() == expected_rows.tolist()
    assert sums.dtype == expected.dtype
    np.testing.assert_allclose(sums, expected, rtol=1e-4, atol=1e-4)
