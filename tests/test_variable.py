"""Variables: storage, names, arithmetic, and raw arrays that stand for them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpuopt
from gpuopt import Variable, identity
from gpuopt.variable import as_variable


def test_variable_owns_its_storage() -> None:
    source = np.float32([1, 2, 3])
    v = Variable(source)
    source[0] = 9
    assert v.numpy().tolist() == [1, 2, 3]
    v.assign([4.0, 5.0, 6.0])
    assert source.tolist() == [9, 2, 3]


@pytest.mark.parametrize("shape", [(), (1,), (7, 5), (3, 1, 2)])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_owned_storage_is_aligned_and_contiguous(shape: tuple[int, ...], dtype: Any) -> None:
    v = Variable(np.ones(shape, dtype))
    assert v.value().ctypes.data % 64 == 0
    assert v.value().flags.c_contiguous
    assert v.value().flags.writeable
    assert (v.shape, v.dtype) == (shape, np.dtype(dtype))


def test_adopted_array_is_updated_itself() -> None:
    array = np.zeros(3, np.float32)
    v = Variable(array, copy=False)
    v.assign_add([1.0, 2.0, 3.0])
    assert array.tolist() == [1, 2, 3]
    assert v.value() is array


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1.0, np.float32),
        ([1.0, 2.0], np.float32),
        (1, np.int32),
        (True, np.bool_),
        (np.float64(1), np.float64),
        ([np.float64(1)], np.float64),
        (np.zeros(2), np.float64),
        (np.zeros(2, ">f4"), np.float32),
        (lambda: [1.0], np.float32),
        (ml_dtypes.bfloat16(1), ml_dtypes.bfloat16),
    ],
)
def test_python_numbers_become_tensorflows_types_and_arrays_keep_theirs(
    value: Any, dtype: Any
) -> None:
    assert Variable(value).dtype == np.dtype(dtype)
    assert Variable(value, dtype=np.float64).dtype == np.float64


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Variable("text", name="w"), TypeError, '"w" must hold numbers'),
        (lambda: Variable(np.array([object()]), name="w"), TypeError, '"w" must hold numbers'),
        (lambda: Variable(2**40, name="w"), ValueError, '"w" does not fit into int32'),
        (lambda: Variable([1.0], name="w", copy=False), TypeError, '"w": copy=False adopts'),
        (
            lambda: Variable(np.float64([1]), name="w", copy=False, dtype=np.float32),
            ValueError,
            '"w": copy=False cannot turn float64 into float32',
        ),
        (
            lambda: Variable(np.broadcast_to(1.0, 3), name="w", copy=False),
            ValueError,
            '"w": a read-only array',
        ),
        (
            lambda: Variable(np.ma.masked_array([1.0]), name="w", copy=False),
            TypeError,
            '"w": copy=False adopts an array, got MaskedArray',
        ),
        (lambda: Variable(1.0, name=""), ValueError, "name must not be empty"),
        (lambda: Variable(1.0, name=3), TypeError, "name must be text"),
        (lambda: Variable(1.0, name="w", constraint=3), ValueError, 'constraint of "w"'),
        (lambda: Variable(1.0, device="tpu"), ValueError, 'device must be "cpu"'),
        (lambda: Variable(1.0, device="gpu:1"), gpuopt.DeviceUnavailableError, '"gpu:1"'),
        (lambda: Variable(1.0, device=3), TypeError, "device must be text"),
    ],
)
def test_bad_variable_is_refused_with_its_name_and_a_reason(
    make: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as raised:
        make()
    assert words in str(raised.value)


def test_assignments_check_shape_and_kind_and_write_in_place() -> None:
    v = Variable([1.0, 2.0], name="w")
    storage = v.value()
    assert v.assign([3.0, 4.0]) is v
    assert v.assign_sub(np.float64([1, 1])) is v  # narrows within its kind
    assert storage.tolist() == [2, 3]
    for wrong in ([1.0], [[1.0, 2.0]], 1.0):
        with pytest.raises(ValueError, match=r'"w" has shape \(2,\)'):
            v.assign(wrong)
    counter = Variable(0, name="counter")
    with pytest.raises(TypeError, match='"counter" has dtype int32'):
        counter.assign_add(0.5)
    assert int(counter.assign_add(1)) == 1
    assert storage.tolist() == [2, 3]


def test_arithmetic_works_from_both_sides_and_gives_arrays() -> None:
    v = Variable([1.0, 2.0])
    array = np.float32([10, 20])
    for got, expected in [
        (v + array, [11, 22]),
        (array + v, [11, 22]),
        (array - v, [9, 18]),
        (2 * v, [2, 4]),
        (v**2, [1, 4]),
        (-v, [-1, -2]),
        (v @ array, 50),
        (array @ v, 50),
        (np.exp(v) * 0 + v, [1, 2]),
        (v + v, [2, 4]),
        (v > 1.5, [False, True]),
    ]:
        assert isinstance(got, np.ndarray | np.generic)
        assert np.asarray(got).tolist() == expected
    assert (v + array).dtype == np.float32


def test_in_place_arithmetic_writes_into_the_variable() -> None:
    v = Variable([1.0, 2.0])
    same, storage = v, v.value()
    v -= np.float32([1, 1])
    v *= 3
    v[0] = 7
    assert v is same
    assert storage.tolist() == [7, 3]
    array = np.float32([0, 0])
    array += v
    assert array.tolist() == [7, 3]


def test_equality_and_hash_go_by_identity() -> None:
    a, b = Variable([1.0]), Variable([1.0])
    assert a == a
    assert a != b
    assert len({a, b}) == 2
    assert [b, a].index(a) == 1


def test_scalars_convert_and_arrays_index() -> None:
    step = Variable(3, name="step")
    assert (int(step), float(step), range(5)[step], bool(step)) == (3, 3.0, 3, True)
    table = Variable([[1.0, 2.0], [3.0, 4.0]], name="table")
    assert len(table) == 2
    assert table[1].tolist() == [3, 4]
    assert table.T.tolist() == [[1, 3], [2, 4]]
    with pytest.raises(TypeError, match="table"):
        range(5)[table]


def test_numpy_is_a_copy_and_asarray_the_array() -> None:
    v = Variable([1.0, 2.0])
    copy, view = v.numpy(), np.asarray(v)
    v.assign([5.0, 6.0])
    assert copy.tolist() == [1, 2]
    assert view.tolist() == [5, 6]
    assert np.asarray(v, dtype=np.float64).dtype == np.float64


def test_dlpack_shares_the_memory() -> None:
    v = Variable([1.0, 2.0])
    shared = np.from_dlpack(v)
    v.assign([5.0, 6.0])
    assert shared.tolist() == [5, 6]
    assert v.__dlpack_device__() == (1, 0)


def test_names_are_made_unique_among_the_living() -> None:
    kept = [Variable(1.0, name="w") for _ in range(3)]
    assert [v.name for v in kept] == ["w", "w_1", "w_2"]
    explicit = Variable(1.0, name="w_3")
    assert Variable(1.0, name="w").name == "w_4"
    assert explicit.name == "w_3"
    del kept
    assert Variable(1.0, name="w").name == "w"
    assert Variable(1.0).name == "Variable"


def test_collections_list_the_living_in_order_of_creation() -> None:
    b, a = Variable(1.0, name="b"), Variable(1.0, name="a")
    frozen = Variable(1.0, name="frozen", trainable=False)
    assert gpuopt.trainable_variables() == [b, a]
    assert gpuopt.global_variables() == [b, a, frozen]
    del b
    assert gpuopt.trainable_variables() == [a]


def test_thousands_of_variables_of_one_name_are_quick_to_name() -> None:
    kept = [Variable(1.0, name="w") for _ in range(5000)]
    assert kept[-1].name == "w_4999"


# Raw arrays


def momentum() -> gpuopt.MomentumOptimizer:
    return gpuopt.MomentumOptimizer(0.1, 0.9)


def test_state_of_a_raw_array_is_found_through_any_view_of_the_same_memory() -> None:
    flat = np.zeros(8, np.float32)
    optimizer = momentum()
    for _ in range(3):
        optimizer.apply_gradients([(np.ones(4, np.float32), flat[:4])])
    assert len(optimizer.variables()) == 1
    expected = Variable(np.zeros(4, np.float32))
    reference = momentum()
    for _ in range(3):
        reference.apply_gradients([(np.ones(4, np.float32), expected)])
    assert np.array_equal(flat[:4], expected.numpy())
    assert not flat[4:].any()
    slot = optimizer.get_slot(flat[:4], "momentum")
    assert slot is optimizer.get_slot(flat.view()[0:4], "momentum")
    assert optimizer.get_slot(flat[4:], "momentum") is None
    assert optimizer.get_slot(flat, "momentum") is None


def test_state_goes_with_the_memory_and_does_not_keep_it_alive() -> None:
    flat = np.zeros(8, np.float32)
    optimizer = momentum()
    optimizer.apply_gradients([(np.ones(4, np.float32), flat[:4])])
    slot = weakref.ref(optimizer.variables()[0])
    alive = weakref.ref(flat)
    part = flat[2:3]
    del flat
    assert alive() is not None  # the view owns a share
    assert slot() is not None
    del part
    assert alive() is None
    assert slot() is None
    assert optimizer.variables() == []


def test_ten_thousand_short_lived_arrays_leave_nothing_behind() -> None:
    optimizer = gpuopt.AdamOptimizer(0.1)
    kept = np.zeros(2, np.float32)
    gradient = np.ones(2, np.float32)
    optimizer.apply_gradients([(gradient, kept)])
    gc.collect()
    before = (len(identity._by_memory), len(identity._named), len(gpuopt.global_variables()))
    for _ in range(10_000):
        optimizer.apply_gradients([(gradient, np.zeros(2, np.float32)), (gradient, kept)])
    gc.collect()
    after = (len(identity._by_memory), len(identity._named), len(gpuopt.global_variables()))
    assert after == before
    assert all(len(table) == 1 for table in optimizer._slots._tables.values())


def test_new_memory_at_an_old_address_starts_without_state() -> None:
    optimizer = momentum()
    addresses = []
    for _ in range(50):
        w = np.zeros(64, np.float32)
        addresses.append(w.ctypes.data)
        optimizer.apply_gradients([(np.ones(64, np.float32), w)])
        assert w[0] == pytest.approx(-0.1)
        del w
    assert len(set(addresses)) < len(addresses)


def test_memory_of_a_foreign_owner_keeps_its_state() -> None:
    buffer = bytearray(16)
    optimizer = momentum()
    w = np.frombuffer(buffer, np.float32)
    for _ in range(2):
        optimizer.apply_gradients([(np.ones(2, np.float32), w[:2])])
    assert np.frombuffer(buffer, np.float32)[0] == pytest.approx(-0.1 - 0.19)


@pytest.mark.parametrize(
    "layout",
    [
        lambda full: full[::2],
        lambda full: full[::-1],
        lambda full: full.reshape(4, 6)[:, 1:4],
        lambda full: full.reshape(4, 6).T,
        lambda full: full.reshape(2, 3, 4)[:, ::-1, 1::2],
        lambda full: full.view(np.uint8)[2:-2].view(np.float32),  # misaligned
    ],
)
@pytest.mark.parametrize("sparse", [False, True])
def test_strided_and_misaligned_arrays_are_updated_in_place(layout: Any, sparse: bool) -> None:
    rng = np.random.default_rng(0)
    full = rng.normal(size=24).astype(np.float32)
    w = layout(full)
    before = full.view(np.uint8).copy()
    reference = Variable(w)
    gradient = rng.normal(size=w.shape).astype(np.float32)
    given: Any = gpuopt.IndexedSlices(gradient[[1, 0]], [1, 0]) if sparse else gradient
    for target in (w, reference):
        optimizer = gpuopt.AdamOptimizer(0.1)
        for _ in range(3):
            optimizer.apply_gradients([(given, target)])
    assert np.array_equal(w, reference.numpy())
    touched = np.zeros(24, np.float32)
    layout(touched)[...] = np.uint32(0x01010101).view(np.float32)
    outside = touched.view(np.uint8) == 0
    assert np.array_equal(full.view(np.uint8)[outside], before[outside])


def test_read_only_and_immutable_values_are_refused_with_a_reason() -> None:
    for value, words in [
        (np.broadcast_to(np.float32(1), 3), "read-only"),
        (np.frombuffer(b"\0" * 12, np.float32), "read-only"),
        (np.float32(1), "expected a Variable or an array"),
        ([1.0], "expected a Variable or an array, got list"),
        (np.ma.masked_array(np.ones(3, np.float32)), "expected a Variable or an array"),
    ]:
        with pytest.raises((ValueError, TypeError)) as raised:
            momentum().apply_gradients([(np.ones(3, np.float32), value)])
        assert words in str(raised.value)
        assert "grads_and_vars[0]" in str(raised.value)


def test_memory_mapped_file_is_updated(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "w", np.float32, "w+", shape=(4,))
    momentum().apply_gradients([(np.ones(4, np.float32), mapped)])
    mapped.flush()
    assert np.fromfile(tmp_path / "w", np.float32).tolist() == pytest.approx([-0.1] * 4)


def test_as_variable_returns_a_variable_itself() -> None:
    v = Variable(1.0)
    assert as_variable(v) is v


def test_variable_says_what_it_is() -> None:
    text = repr(Variable([1.0, 2.0], name="w"))
    assert text == '<Variable "w" shape=(2,) dtype=float32 device=cpu>'
