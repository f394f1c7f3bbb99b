"""Clipping has TensorFlow's values, on the host and on GPUs, and leaves its arguments alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from dtypes import every_dtype
from emulator import EmulatorLauncher
from golden_cases import read_json
from gpu_streams import new_stream, uploaded, wait_for_gpus
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpuopt
from gpuopt import IndexedSlices, Variable, backends
from gpuopt.backends.cuda.launch_shapes import CLIP_CHUNK
from gpuopt.device import Device, device_of

# The first numbers that a process draws may take a second.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

GOLDEN = read_json("schedules_and_clipping.json")["clipping"]

# Puts an array of the host where it belongs.
Place = Callable[[Any], Any]


@pytest.fixture(
    params=[
        "host",
        pytest.param("emulated", marks=pytest.mark.emulator),
        pytest.param("emulated, mixed", marks=pytest.mark.emulator),
        pytest.param("gpu", marks=pytest.mark.gpu),
        pytest.param("gpu, mixed", marks=[pytest.mark.gpu, pytest.mark.gpus(2)]),
    ]
)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Places the arrays of a test: in host memory, on one GPU, or one after the other on each."""
    if request.param == "host":
        yield np.asarray
        return
    if "gpu" in request.param:
        upload = uploaded_by_cupy
        count = number_of_gpus()
    else:
        launchers = request.getfixturevalue("emulated_gpus")
        count = len(launchers)

        def upload(host: np.ndarray, number: int) -> Any:
            with launchers[number].device():
                return fake_cupy.asarray(host)

    turn = iter(range(1000))

    def put(host: Any) -> Any:
        number = next(turn) % (count + 1) if "mixed" in request.param else 0
        return np.asarray(host) if number == count else upload(np.asarray(host), number)

    yield put


def number_of_gpus() -> int:
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def uploaded_by_cupy(host: np.ndarray, number: int) -> Any:
    return uploaded(host, device=number)


def host(array: Any) -> Any:
    return np.asarray(backends.to_device(array, Device.cpu))


def tensor(given: Any, place: Place) -> Any:
    """A tensor of the golden file."""
    if given is None:
        return None
    if isinstance(given, dict):
        values = place(np.float32(given["values"]))
        with backends.backend_for(device_of(values)).enter():
            indices = backends.to_device(np.array(given["indices"]), device_of(values))
        return IndexedSlices(values, indices, given["shape"])
    return place(np.float32(given))


def check(got: Any, expected: Any, given: Any) -> None:
    if expected is None:
        assert got is None
        return
    if isinstance(expected, dict):
        assert isinstance(got, IndexedSlices)
        assert got.indices is given.indices
        assert got.dense_shape == tuple(expected["shape"])
        got, expected, given = got.values, expected["values"], given.values
    assert got is not given
    assert device_of(got) is device_of(given)
    assert got.dtype == np.float32
    np.testing.assert_allclose(host(got), np.float32(expected), rtol=5e-7)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["function"])
@pytest.mark.one_in(4, case=itemgetter("function"))
def test_values_are_tensorflows(case: dict[str, Any], place: Place) -> None:
    function = getattr(gpuopt, case["function"])
    if "tensors" in case:
        tensors = [tensor(each, place) for each in case["tensors"]]
        clipped, norm = function(tensors, case["clip_norm"])
        np.testing.assert_allclose(host(norm), np.float32(case["norm"]), rtol=5e-7)
        again = gpuopt.global_norm(tensors)
        assert host(again).tobytes() == host(norm).tobytes()
        assert len(clipped) == len(tensors)
        for each in zip(clipped, case["clipped"], tensors, strict=True):
            check(*each)
        return
    t = tensor(case["t"], place)
    if case["function"] == "clip_by_value":
        clipped = function(t, case["min"], case["max"])
    else:
        axes = {"axes": case["axes"]} if "axes" in case else {}
        clipped = function(t, case["clip_norm"], **axes)
    check(clipped, case["clipped"], t)


def test_golden_values_cover_every_function() -> None:
    functions = {"clip_by_value", "clip_by_norm", "clip_by_average_norm", "clip_by_global_norm"}
    assert {case["function"] for case in GOLDEN} == functions


def exact_norm(arrays: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(np.float64(array) ** 2) for array in arrays)))


SIZES = [(), (1,), (0,), (3, 5), (CLIP_CHUNK,), (CLIP_CHUNK + 1,), (2 * CLIP_CHUNK - 7,)]


@every_dtype
def test_a_global_norm_is_the_formulas_in_every_type_and_size(dtype: Any, place: Place) -> None:
    rng = np.random.default_rng(2)
    arrays = [np.asarray(rng.normal(size=size)).astype(dtype) for size in SIZES]
    placed = [place(array) for array in arrays]
    before = [host(array).copy() for array in placed]
    eps = float(ml_dtypes.finfo(dtype).eps)
    expected = exact_norm(arrays)
    clipped, norm = gpuopt.clip_by_global_norm(placed, np.float64(2))
    real = np.float64 if dtype == np.float64 else np.float32
    assert (norm.dtype, norm.shape) == (real, ())
    assert float(norm) == pytest.approx(expected, rel=8 * float(np.finfo(real).eps))
    for got, array, old in zip(clipped, arrays, before, strict=True):
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        scaled = np.float64(array) * 2 / expected
        np.testing.assert_allclose(np.float64(host(got)), scaled, rtol=8 * eps, atol=eps * 1e-3)
        assert array.tobytes() == old.tobytes()
    for array, old in zip(placed, before, strict=True):
        assert host(array).tobytes() == old.tobytes()


@every_dtype
def test_one_arrays_norms_are_the_formulas(dtype: Any, place: Place) -> None:
    rng = np.random.default_rng(3)
    array = rng.normal(size=(7, 30)).astype(dtype)
    exact, eps = np.float64(array), float(ml_dtypes.finfo(dtype).eps)
    norm = exact_norm([array])
    rows = np.sqrt(np.sum(exact**2, axis=1, keepdims=True))
    limit = np.float64(4.0)
    for got, expected in (
        (gpuopt.clip_by_norm(place(array), limit), exact * limit / norm),
        (gpuopt.clip_by_norm(place(array), 1e3), exact),
        (gpuopt.clip_by_norm(place(array), limit, axes=1), exact * limit / np.maximum(rows, limit)),
        (
            gpuopt.clip_by_average_norm(place(array), limit),
            exact * limit * min(array.size / norm, 1 / limit),
        ),
        (gpuopt.clip_by_value(place(array), -0.5, 0.25), np.clip(exact, -0.5, 0.25)),
    ):
        assert got.dtype == array.dtype
        np.testing.assert_allclose(np.float64(host(got)), expected, rtol=8 * eps)


def test_types_may_differ_and_the_norm_keeps_most_digits(place: Place) -> None:
    arrays = [np.float16([3]), np.float64([4]), np.float32([12]), ml_dtypes.bfloat16(84)]
    clipped, norm = gpuopt.clip_by_global_norm([place(array) for array in arrays], 8.5)
    assert norm.dtype == np.float64
    assert float(norm) == 85
    assert [each.dtype for each in clipped] == [array.dtype for array in arrays]
    got = [float(host(each).reshape(())) for each in clipped]
    np.testing.assert_allclose(got, [0.3, 0.4, 1.2, 8.4], rtol=4e-3)


def test_arrays_may_have_any_strides(place: Place) -> None:
    memory = np.arange(24, dtype=np.float32).reshape(4, 6)
    views = [memory.T, memory[::2, ::-1], memory[1:3, 1:4], np.broadcast_to(memory[0], (3, 6))]
    placed = place(memory)
    same = [placed.T, placed[::2, ::-1], placed[1:3, 1:4], place(np.array(views[3]))]
    clipped, norm = gpuopt.clip_by_global_norm(same, 1.0)
    assert float(norm) == pytest.approx(exact_norm(views), rel=1e-6)
    for got, view in zip(clipped, views, strict=True):
        np.testing.assert_allclose(host(got), view / exact_norm(views), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_element_that_is_not_finite_makes_all_nan(bad: float, place: Place) -> None:
    arrays = [np.ones(40000, np.float32), np.float16([1, bad]), np.ones((), np.float64)]
    clipped, norm = gpuopt.clip_by_global_norm([place(array) for array in arrays], 1.0)
    assert not np.isfinite(float(norm))
    assert np.isnan(float(norm)) == np.isnan(bad)
    assert all(np.isnan(host(each).astype(np.float64)).all() for each in clipped)


def test_a_norm_beyond_float32_is_infinite_as_in_tensorflow(place: Place) -> None:
    large = np.full(4, 2e19, np.float32)
    assert float(gpuopt.global_norm([place(large)])) == np.inf
    assert float(gpuopt.global_norm([place(large.astype(np.float64))])) == np.float32(2e19) * 2


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64], ids=str)
def test_a_limit_that_no_norm_reaches_leaves_gradients_alone(dtype: Any, place: Place) -> None:
    # 1 / most is subnormal, which kernels flush to 0, and x * most may overflow.
    most = ml_dtypes.finfo(np.float64 if dtype is np.float64 else np.float32).max
    given = place(np.array([3, -4, 0], dtype))
    empty = place(np.array([], dtype))
    [clipped, _], _ = gpuopt.clip_by_global_norm([given, empty], most)
    for got in (
        clipped,
        gpuopt.clip_by_norm(given, most),
        gpuopt.clip_by_average_norm(given, most),
    ):
        assert host(got).astype(np.float64).tolist() == [3, -4, 0]
    # Norms that are not finite have more.
    bad = place(np.array([1, np.inf], dtype))
    assert np.isnan(host(gpuopt.clip_by_global_norm([bad], most)[0][0]).astype(np.float64)).all()
    for got in (gpuopt.clip_by_norm(bad, most), gpuopt.clip_by_average_norm(bad, most)):
        np.testing.assert_array_equal(host(got).astype(np.float64), [0, np.nan])


def test_zeros_stay_zeros(place: Place) -> None:
    zeros = np.zeros(5, np.float32)
    clipped, norm = gpuopt.clip_by_global_norm([place(zeros)], 1.0)
    assert float(norm) == 0
    for got in (
        clipped[0],
        gpuopt.clip_by_norm(place(zeros), 1.0),
        gpuopt.clip_by_average_norm(place(zeros), 1.0),
    ):
        assert not host(got).any()
    assert float(gpuopt.global_norm([place(zeros[:0])])) == 0


def test_a_norm_that_is_known_is_used(place: Place) -> None:
    array = np.float32([3, 4])
    for norm in (place(np.float32(50)), 50, np.float64(50), Variable(50.0)):
        [clipped], used = gpuopt.clip_by_global_norm([place(array)], 5.0, use_norm=norm)
        assert float(used) == 50
        np.testing.assert_allclose(host(clipped), [0.3, 0.4], rtol=1e-6)


def test_variables_and_lists_are_clipped_too() -> None:
    w = Variable([3.0, 4.0])
    [clipped, other], norm = gpuopt.clip_by_global_norm((w, [[12.0]]), 1.3)
    assert norm == 13
    assert type(norm) is np.float32
    np.testing.assert_allclose(clipped, [0.3, 0.4], rtol=1e-6)
    assert (other.dtype, other.shape) == (np.float32, (1, 1))
    assert w.numpy().tolist() == [3, 4]


def test_a_step_takes_what_was_clipped(place: Place) -> None:
    w, table = np.zeros(2, np.float32), np.zeros((3, 2), np.float32)
    where = [place(w), place(table)]
    given = [np.float32([3, 0]), np.float32([[0, 4], [0, 0]])]
    rows = [backends.to_device(np.array([2, 0]), device_of(each)) for each in where]
    here = [backends.to_device(g, device_of(v)) for g, v in zip(given, where, strict=True)]
    gradients = [here[0], IndexedSlices(here[1], rows[1])]
    clipped, _ = gpuopt.clip_by_global_norm(gradients, 0.5)
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients(zip(clipped, where, strict=True))
    np.testing.assert_allclose(host(where[0]), [-0.3, 0], rtol=1e-6)
    np.testing.assert_allclose(host(where[1]), [[0, 0], [0, 0], [0, -0.4]], rtol=1e-6)


def test_bounds_may_be_arrays(place: Place) -> None:
    array = place(np.float32([[1, 5, 9], [2, -6, np.nan]]))
    high = backends.to_device(np.float32([3, 4, 5]), device_of(array))
    got = host(gpuopt.clip_by_value(array, -4, high))
    np.testing.assert_array_equal(got, np.float32([[1, 4, 5], [2, -4, np.nan]]))
    whole = gpuopt.clip_by_value(place(np.arange(5)), 1, 3)
    assert host(whole).tolist() == [1, 1, 2, 3, 3]


@PATIENT
@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=6),
    clip_norm=st.floats(2.0**-10, 100),
    seed=st.integers(0, 100),
)
def test_a_clipped_norm_is_the_smaller_of_both(
    sizes: list[int], clip_norm: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=size).astype(np.float32) for size in sizes]
    clipped, norm = gpuopt.clip_by_global_norm(arrays, clip_norm)
    expected = min(float(norm), clip_norm)
    assert float(gpuopt.global_norm(clipped)) == pytest.approx(expected, rel=2e-6, abs=1e-12)
    if norm <= clip_norm:
        for got, array in zip(clipped, arrays, strict=True):
            np.testing.assert_allclose(got, array, rtol=3e-7)


@pytest.mark.emulator
def test_many_arrays_take_few_launches_and_no_wait(emulated_gpus: list[EmulatorLauncher]) -> None:
    launcher = emulated_gpus[0]
    with launcher.device():
        arrays = [
            fake_cupy.asarray(np.ones(size, dtype))
            for size in range(1, 200)
            for dtype in (np.float16, np.float32)
        ]
    launches, waits = launcher.launches, fake_cupy.counts.synchronisations
    clipped, norm = gpuopt.clip_by_global_norm(arrays, 1.0)
    # For each of two types a sum and a scaling, and one that adds up.
    assert launcher.launches - launches == 5
    assert fake_cupy.counts.synchronisations == waits
    assert (device_of(norm), norm.shape) == (Device("gpu"), ())
    assert {device_of(each) for each in clipped} == {Device("gpu")}
    launches, uploads = launcher.launches, launcher.uploads
    gpuopt.clip_by_norm(arrays[5], 1.0)
    assert (launcher.launches - launches, launcher.uploads - uploads) == (3, 0)


@pytest.mark.gpu
@pytest.mark.usefixtures("every_schedule")
def test_what_is_clipped_is_kept_until_it_is_read() -> None:
    import cupy

    a, b = new_stream(), new_stream()
    Variable([0.0], device="gpu:0")  # on the default stream: a second one is seen from here on
    gradients = [uploaded(np.full(100, value, np.float32), a) for value in (3, 4)]
    strided = uploaded(np.zeros(200, np.float32), a)[::2]
    wait_for_gpus()
    with b:
        clipped, norm = gpuopt.clip_by_global_norm([*gradients, strided], 5.0)
        alone = gpuopt.clip_by_norm(gradients[0], 15.0)
        bounded = gpuopt.clip_by_value(gradients[1], 0, 2)
    del gradients, strided
    with a:
        others = [cupy.full(size, 300, np.float32) for size in (100, 100, 200)]
    b.synchronize()
    assert float(norm) == 50
    for got, expected in ((clipped[0], 0.3), (clipped[1], 0.4), (alone, 1.5), (bounded, 2)):
        np.testing.assert_allclose(host(got), np.full(100, expected), rtol=1e-6)
    a.synchronize()
    assert all((host(each) == 300).all() for each in others)


@pytest.mark.gpu
@pytest.mark.usefixtures("every_schedule")
def test_clipping_reads_a_variable_between_two_updates() -> None:
    a, b = new_stream(), new_stream()
    variable = Variable(np.zeros(1000, np.float32), device="gpu:0")
    with a:
        variable.assign(np.full(1000, 2, np.float32))
    with b:
        clipped = gpuopt.clip_by_value(variable, 0, 1.5)
        norm = gpuopt.global_norm([variable])
    with a:
        variable.assign(np.full(1000, 1, np.float32))
    b.synchronize()
    assert (host(clipped) == 1.5).all()
    assert float(norm) == pytest.approx(2 * 1000**0.5)
    assert (variable.numpy() == 1).all()


@pytest.mark.gpu
def test_clipping_in_a_capture_is_refused() -> None:
    gradient = uploaded(np.ones(3, np.float32))
    stream = new_stream()
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="call clipping outside of the capture"):
            gpuopt.clip_by_global_norm([gradient], 1.0)
        stream.end_capture()


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: gpuopt.global_norm(np.ones(3)), TypeError, "t_list must be a list or tuple.*ndarray"),
    (lambda: gpuopt.global_norm("ab"), TypeError, "t_list must be a list or tuple of arrays"),
    (lambda: gpuopt.global_norm([]), ValueError, "t_list must have at least one array, got"),
    (lambda: gpuopt.global_norm([None]), ValueError, "at least one array, got .None."),
    (
        lambda: gpuopt.global_norm([np.ones(2), np.arange(3)]),
        TypeError,
        r"t_list\[1\] must be floating-point numbers, got dtype int64",
    ),
    (
        lambda: gpuopt.clip_by_global_norm([None, np.ma.masked_array([1.0])], 1.0),
        TypeError,
        r"t_list\[1\] is a masked array",
    ),
    (
        lambda: gpuopt.clip_by_global_norm([np.ones(2)], -1.0),
        ValueError,
        "clip_norm must be a number from 0, got -1.0",
    ),
    (lambda: gpuopt.clip_by_norm(np.ones(2), np.nan), ValueError, "clip_norm must be a number fr"),
    (lambda: gpuopt.clip_by_norm(np.ones(2), "1"), TypeError, "clip_norm must be a number"),
    (lambda: gpuopt.clip_by_norm(np.ones(2), [1.0]), ValueError, "clip_norm must be a scalar"),
    (lambda: gpuopt.clip_by_norm(np.arange(2), 1.0), TypeError, "t must be floating-point numb"),
    (lambda: gpuopt.clip_by_norm(np.ones(2), 1.0, axes=1), ValueError, "axes: axis 1 is out of"),
    (lambda: gpuopt.clip_by_norm(np.ones((2, 2)), 1.0, axes=(0, 0)), ValueError, "repeated axis"),
    (lambda: gpuopt.clip_by_average_norm(np.ones(2), -2), ValueError, "clip_norm must be a numb"),
    (lambda: gpuopt.clip_by_average_norm(None, 2), TypeError, "t must be floating-point numbers"),
    (lambda: gpuopt.clip_by_value(np.ones(2), np.nan, 1), ValueError, "clip_value_min must not be"),
    (
        lambda: gpuopt.clip_by_value(np.arange(2), 0, 0.5),
        TypeError,
        "max must be a number of int64",
    ),
    (lambda: gpuopt.clip_by_value(np.ones(2), 0, "x"), TypeError, "clip_value_max must be a numbe"),
    (
        lambda: gpuopt.clip_by_value(np.ones(2), 0, np.float32([1, 2])),
        TypeError,
        "clip_value_max must have dtype float64, as t has, got float32",
    ),
    (
        lambda: gpuopt.clip_by_value(np.ones(2), np.ones((3, 2)), 1),
        ValueError,
        r"clip_value_min of shape \(3, 2\) cannot be broadcast to t of shape \(2,\)",
    ),
    (
        lambda: gpuopt.clip_by_global_norm([np.ones(2)], 1.0, use_norm=np.ones(2)),
        ValueError,
        "use_norm must be a scalar",
    ),
]


@pytest.mark.contract
@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_wrong_arguments_are_refused_by_name(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()
