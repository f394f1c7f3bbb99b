"""A step clips gradients on each kind of device, by the same bits of the norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from array_slots import array_slots
from dtypes import DTYPES, every_dtype
from each_device import variable_on
from emulator.emulator import EmulatorLauncher
from every_optimizer import make

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable
from gpuopt.backends.backend import compute_type
from gpuopt.backends.clips import ClipForm, ClipLimits, DenseGradients, SparseGradient
from gpuopt.backends.cpu.clips import CpuClips
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cuda.backend import CudaBackend
from gpuopt.backends.cuda.structs import FEW_DEVICES
from gpuopt.backends.loss_scaling import Decision
from gpuopt.device import Device
from gpuopt.rules.loss_scaling import ScaleRule, ScaleState

pytestmark = pytest.mark.value

SHAPES = [(3, 4), (), (0,), (70, 50), (5,), (131, 257)]
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Adam": gpuopt.AdamOptimizer,
    "LAMB": gpuopt.LAMBOptimizer,
    "RowWiseAdagrad": gpuopt.RowWiseAdagradOptimizer,
    "AdamW": lambda **common: make("AdamWOptimizer", **common),
}


def numbers(array: Any) -> np.ndarray:
    return np.asarray(array.numpy() if isinstance(array, Variable) else array).astype(np.float64)


def on_host(array: Any) -> Any:
    return gpuopt.backends.to_device(array, Device.cpu)


def states_after(
    xp: Any, cls: Callable[..., Any], dtype: Any, is_sparse: bool, **options: Any
) -> tuple[Any, list[np.ndarray]]:
    """Makes three steps; returns the optimizer, and all variables and slots."""
    rng = np.random.default_rng(5)
    variables = [
        variable_on(xp, np.asarray(rng.normal(size=s)).astype(dtype), name=f"w{i}")
        for i, s in enumerate(SHAPES)
    ]
    table = variable_on(xp, rng.normal(size=(40, 12)).astype(dtype), name="table")
    optimizer = cls(**options)
    for _ in range(3):
        gradients = [np.asarray(rng.normal(size=s)).astype(dtype) for s in SHAPES]
        pairs = [(xp.asarray(g), v) for g, v in zip(gradients, variables, strict=True)]
        rows, values = rng.integers(0, 40, 300), rng.normal(size=(300, 12)).astype(dtype)
        if is_sparse:
            pairs.append((IndexedSlices(xp.asarray(values), xp.asarray(rows)), table))
        optimizer.apply_gradients(pairs)
    written = [*variables, table]
    slots = [optimizer.get_slot(v, n) for v in written for n in array_slots(optimizer)]
    return optimizer, [numbers(each) for each in [*written, *slots] if each is not None]


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "mixed"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    # The loops around a rule depend on the type, and not on the rule.
    [
        *(("Adam", dtype) for dtype in DTYPES),
        *((name, np.dtype(np.float32)) for name in OPTIMIZERS if name != "Adam"),
    ],
)
@pytest.mark.one_in(3)
def test_every_device_clips_alike(dtype: Any, name: str, is_sparse: bool, xp: Any) -> None:
    groups = [ParameterGroup("w[34]", clip_norm=0.5), ParameterGroup("w5", clip_value=0.25)]
    for options in ({"clip_norm": 2.0, "groups": groups}, {"clip_value": 0.5}):
        mine, got = states_after(xp, OPTIMIZERS[name], dtype, is_sparse, **options)
        theirs, expected = states_after(np, OPTIMIZERS[name], dtype, is_sparse, **options)
        if "clip_norm" in options:
            norms = [numbers(on_host(mine.global_norm)), numbers(theirs.global_norm)]
            # Rows are added up in another order.
            np.testing.assert_allclose(*norms, rtol=2e-7 if is_sparse else 0)
            for group, norm in theirs.group_norms.items():
                assert numbers(on_host(mine.group_norms[group])) == norm
        tolerance = 48 * float(ml_dtypes.finfo(dtype).eps)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_a_norm_is_an_array_of_the_gpu(xp: Any) -> None:
    w = variable_on(xp, np.zeros(2, np.float32))
    optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_norm=1.0)
    optimizer.apply_gradients([(xp.asarray(np.float32([3, 4])), w)])
    norm = optimizer.global_norm
    assert isinstance(norm, np.floating if xp is np else xp.ndarray)
    assert norm.dtype == np.float32
    assert norm.shape == ()
    assert numbers(on_host(norm)) == 5
    # It is of its step, whatever comes later.
    optimizer.apply_gradients([(xp.asarray(np.float32([6, 8])), w)])
    assert numbers(on_host(norm)) == 5
    assert numbers(on_host(optimizer.global_norm)) == 10
    np.testing.assert_allclose(w.numpy(), [-1.2, -1.6], rtol=3e-7)


@pytest.mark.emulator
def test_a_step_is_two_launches_and_one_where_no_norm_is_taken(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    variables = [Variable(np.ones(s, np.float32), device="gpu:0") for s in [(3,), (40, 50)] * 4]
    gradients = [v.storage.copy() for v in variables]
    for options, launches in (({"clip_norm": 1.0}, 2), ({"clip_value": 1.0}, 1), ({}, 1)):
        optimizer = gpuopt.AdamOptimizer(0.1, **options)
        for _ in range(3):
            before = emulated_gpus[0].launches
            optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
            assert emulated_gpus[0].launches - before == launches


@pytest.mark.emulator
def test_variables_of_several_gpus_and_the_host_have_one_norm(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    places = ["gpu:0", "gpu:1", "gpu:0"]
    for more in ([], ["cpu"]):
        variables = [Variable(np.zeros(1, np.float32), device=place) for place in places + more]
        gradients = [np.float32([2]), np.float32([3]), np.float32([6]), np.float32([24])]
        optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_norm=1.0)
        given = gradients[: len(variables)]
        optimizer.apply_gradients(
            [
                (gpuopt.backends.to_device(g, v.device), v)
                for g, v in zip(given, variables, strict=True)
            ]
        )
        norm = 25 if more else 7
        assert numbers(on_host(optimizer.global_norm)) == norm
        for gradient, variable in zip(given, variables, strict=True):
            np.testing.assert_allclose(variable.numpy(), -gradient / norm, rtol=3e-7)


@pytest.mark.emulator
def test_a_bad_row_changes_nothing_where_a_norm_is_taken(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    for num_rows in (3, 5000):
        table = Variable(np.ones((50, 4), np.float32), device="gpu:0", name="table")
        dense = Variable(np.ones(4, np.float32), device="gpu:0")
        optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_norm=1.0)
        rows = np.arange(num_rows) % 50
        rows[-1] = 50
        values = gpuopt.backends.to_device(np.ones((num_rows, 4), np.float32), table.device)
        slices = IndexedSlices(values, gpuopt.backends.to_device(rows, table.device))
        pairs: list[Any] = [(slices, table)]
        if num_rows == 3:
            pairs.append((dense.storage.copy(), dense))
        optimizer.apply_gradients(pairs)
        with pytest.raises(IndexError, match="row 50 is not in"):
            optimizer.check()
        assert (table.numpy() == 1).all()
        assert (dense.numpy() == 1).all()
        rows[-1] = 0
        good = IndexedSlices(values, gpuopt.backends.to_device(rows, table.device))
        optimizer.apply_gradients([(good, table)])
        optimizer.check()
        assert (table.numpy() != 1).any()


@every_dtype
def test_a_norm_that_no_gradient_reaches_leaves_them_alone(dtype: Any, xp: Any) -> None:
    # Its reciprocal is subnormal: kernels, compiled to flush those to 0, would multiply by that.
    most = np.finfo(compute_type(np.dtype(dtype))).max
    w = variable_on(xp, np.zeros(2, dtype))
    optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_norm=most)
    optimizer.apply_gradients([(xp.asarray(np.array([3, 4], dtype)), w)])
    assert numbers(w).tolist() == [-3, -4]


@pytest.mark.parametrize("form", ["tensorflow", "torch", "apex"])
def test_a_norm_that_float64_alone_holds_clips_float32_too(form: Any, xp: Any) -> None:
    v, w = variable_on(xp, np.zeros(2, np.float64)), variable_on(xp, np.zeros(2, np.float32))
    optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_norm=np.float64(1e30), clip_form=form)
    optimizer.apply_gradients(
        [(xp.asarray([3e40, 4e40]), v), (xp.asarray(np.float32([1e15, 2])), w)]
    )
    assert numbers(on_host(optimizer.global_norm)) == pytest.approx(5e40)
    np.testing.assert_allclose(v.numpy(), [-6e29, -8e29], rtol=1e-12)
    np.testing.assert_allclose(w.numpy(), np.float32([-2e4, -4e-11]), rtol=3e-7)


@pytest.mark.emulator
def test_gradients_that_are_arrays_and_that_are_variables_have_one_norm(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    # As many of each: what one launch reads could take the place of what the other one does.
    gradients = [Variable(np.float32([k]), device="gpu:0") for k in (1, 2, 4, 10)]
    variables = [Variable(np.float32([0]), device="gpu:0") for _ in gradients]
    optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_norm=1.1)
    given = [*(each.storage for each in gradients[:2]), *gradients[2:]]
    optimizer.apply_gradients(list(zip(given, variables, strict=True)))
    assert numbers(on_host(optimizer.global_norm)) == 11
    moved = [variable.numpy()[0] for variable in variables]
    np.testing.assert_allclose(moved, [-0.1, -0.2, -0.4, -1], rtol=3e-7)


def test_a_bound_beyond_the_variables_type_is_no_bound(xp: Any) -> None:
    w = variable_on(xp, np.zeros(2, np.float32))
    optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_value=np.float64(1e300))
    with np.errstate(all="raise"):
        optimizer.apply_gradients([(xp.asarray(np.float32([3, -1e38])), w)])
    assert w.numpy().tolist() == np.float32([-3, 1e38]).tolist()


def launchers() -> Iterator[EmulatorLauncher]:
    """Of other orders of blocks and threads, and other numbers of multiprocessors."""
    for seed, multiprocessors in ((0, 4), (3, 1), (7, 9)):
        launcher = EmulatorLauncher(seed=seed)
        launcher.num_multiprocessors = multiprocessors
        yield launcher


@pytest.mark.emulator
@every_dtype
def test_sums_have_the_same_bits_in_every_order_at_any_address_and_on_the_host(dtype: Any) -> None:
    rng = np.random.default_rng(6)
    memory = rng.normal(size=3 * 16384 + 77).astype(dtype)
    rows, values = rng.integers(0, 9, 600), rng.normal(size=(600, 8)).astype(dtype)
    limits = ClipLimits([np.float32(2), np.float32(3)], ClipForm.TENSORFLOW, False)
    found = set()
    for shift, launcher in enumerate(launchers()):
        copy = np.zeros(memory.size + 4, dtype)[shift : shift + memory.size]
        copy[...] = memory
        apart = np.zeros(values.size + 4, dtype)[shift : shift + values.size]
        apart = apart.reshape(values.shape)
        apart[...] = values
        backend = CudaBackend(Device("gpu", 0), launcher)
        dense = [DenseGradients([copy, copy[:100], memory[:0], copy[7:]], [0, 1, 0, 0])]
        sparse = [SparseGradient(apart, rows, 9, 1)]
        got = backend.clips.measure(dense, sparse, limits).factors
        found.add(got.tobytes())
        host = CpuClips(CpuLimits()).measure(dense, sparse, limits).factors
        np.testing.assert_array_equal(got[0], host[0])
        # 66 rows each are added up in another order.
        tolerance = 66 * np.finfo(compute_type(np.dtype(dtype))).eps
        np.testing.assert_allclose(got[1], host[1], rtol=tolerance)
    assert len(found) == 1


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", DTYPES[1:3], ids=str)
def test_squares_that_floats_cannot_hold_have_the_hosts_bits(dtype: Any) -> None:
    rng = np.random.default_rng(7)
    large = rng.normal(size=16384 + 77) * 2.0 ** np.repeat([100, 40], [16384, 77])
    dense = [DenseGradients([large.astype(dtype)], [0], [0])]
    limits = ClipLimits([np.float32(2)], ClipForm.TENSORFLOW, False, 2.0**-90)
    host = CpuClips(CpuLimits()).measure(dense, [], limits).factors
    backend = CudaBackend(Device("gpu", 0), EmulatorLauncher())
    scaling = backend.loss_scalings.new(ScaleState(2.0**90))
    decision = Decision(ScaleRule(), None, scaling, step=1)
    decided = backend.clips.measure(dense, [], limits, decision=decision)
    for factors in (backend.clips.measure(dense, [], limits).factors, decided.factors):
        assert np.isfinite(factors).all()
        np.testing.assert_array_equal(factors, host)
    assert decided.refused.num_made[0] == 1


@pytest.mark.emulator
@pytest.mark.parametrize("form", ClipForm, ids=lambda form: form.name)
def test_factors_are_the_hosts_for_all_numbers(form: ClipForm) -> None:
    host, backend = CpuClips(CpuLimits()), CudaBackend(Device("gpu", 0), EmulatorLauncher())
    squares = np.float64([0, 1e-20, 4, 9, 1e39, 1e79, 1e300, np.inf, np.nan])
    for most in (0.0, 0.5, 2.0, 3.0, 1e30, 2.0**126, 3e38, 1e40, 1.7e308, np.inf):
        for is_double in (False, True):
            limits = ClipLimits([np.float64(most)] * len(squares), form, is_double)
            got = backend.clips.join([squares, 0 * np.ones_like(squares)], limits).factors
            np.testing.assert_array_equal(got, host.join([squares, 0 * squares**0], limits).factors)


@pytest.mark.emulator
@pytest.mark.parametrize("num_devices", [1, FEW_DEVICES, FEW_DEVICES + 1, 3 * FEW_DEVICES])
def test_sums_of_any_number_of_devices_are_joined_in_their_order(num_devices: int) -> None:
    backend = CudaBackend(Device("gpu", 0), EmulatorLauncher())
    rng = np.random.default_rng(8)
    # Added up in another order, they have other bits.
    sums = list(np.exp(rng.normal(scale=9, size=(num_devices, 3))))
    limits = ClipLimits([np.float64(2)] * 3, ClipForm.TENSORFLOW, True)
    added = np.zeros(3)
    for each in sums:
        added += each
    for _ in range(2):
        got = backend.clips.join(sums, limits).factors
        np.testing.assert_array_equal(got[:, 0], added)
        np.testing.assert_array_equal(got[:, 1], np.sqrt(added))


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("size", [1, 1000, 300_000])
def test_a_norm_is_exact_up_to_the_ends_of_its_range(
    size: int, device: str, is_sparse: bool
) -> None:
    w = Variable(np.zeros((size, 1), np.float32), name="w", device=device)
    optimizer = gpuopt.GradientDescentOptimizer(0.0, clip_norm=np.inf)
    # The squares of the smallest are the smallest normal ones; the sum of the largest is 2^127.
    for element in (2.0**-63, 1.0, 2.0**63.5 / np.sqrt(size)):
        gradient = np.full((size, 1), element, np.float32)
        given: Any = gpuopt.backends.to_device(gradient, w.device)
        if is_sparse:
            rows = gpuopt.backends.to_device(np.arange(size), w.device)
            given = IndexedSlices(given, rows)
        optimizer.apply_gradients([(given, w)])
        exact = np.linalg.norm(gradient.astype(np.float64))
        bound = 16 * np.spacing(np.float32(exact))
        assert abs(float(on_host(optimizer.global_norm)) - exact) <= bound
