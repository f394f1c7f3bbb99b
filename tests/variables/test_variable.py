"""Variables: storage, names, arithmetic, and copies."""

from __future__ import annotations

import copy
import pickle
import re
import weakref
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from dtypes import every_dtype
from other_thread import repeated

import gpuopt
from gpuopt import Variable
from gpuopt.variables.variable import as_variable

pytestmark = pytest.mark.contract


def test_variable_owns_its_storage() -> None:
    source = np.float32([1, 2, 3])
    v = Variable(source)
    source[0] = 9
    assert v.numpy().tolist() == [1, 2, 3]
    v.assign([4.0, 5.0, 6.0])
    assert source.tolist() == [9, 2, 3]


@every_dtype
def test_owned_storage_is_aligned_and_contiguous(dtype: Any) -> None:
    shapes: list[tuple[int, ...]] = [(), (1,), (7, 5), (3, 1, 2)]
    for shape in shapes:
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
    assert np.shares_memory(v.value(), array)
    assert v.value() is v.storage


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
        (
            lambda: Variable([300], name="w", dtype=np.uint8),
            ValueError,
            '"w" does not fit into uint8',
        ),
        (
            lambda: Variable(0.5, name="w", dtype=np.int32),
            ValueError,
            '"w" does not fit into int32',
        ),
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
            '"w" is a masked array; fill it first',
        ),
        (
            lambda: Variable(np.ma.masked_array([1.0]), name="w"),
            TypeError,
            'the value of "w" is a masked array; fill it first',
        ),
        (lambda: Variable(1.0, name=""), ValueError, "name must not be empty"),
        (lambda: Variable(1.0, name=3), TypeError, "name must be text"),
        (lambda: Variable(1.0, name="w", constraint=3), ValueError, 'constraint of "w"'),
        (lambda: Variable(1.0, device="tpu"), ValueError, 'device must be "cpu"'),
        (
            lambda: Variable(1.0, device="cuda:0"),
            ValueError,
            'what torch calls "cuda:0" is "gpu:0"',
        ),
        (lambda: Variable([[1.0], [2.0, 3.0]], name="w"), ValueError, 'the value of "w": '),
        (lambda: Variable(1.0, name="w", dtype="float33"), TypeError, 'the dtype of "w" must be'),
        (lambda: Variable(np.ones(2), name="w", dtype="x", copy=False), TypeError, 'dtype of "w"'),
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
    for wrong in (None, "text", [None, 1.0]):
        with pytest.raises(TypeError, match=r'the value for "w" must hold numbers, got (N|s|l)'):
            v.assign(wrong)
    with pytest.raises(ValueError, match=r'the value for "w": .*inhomogeneous'):
        v.assign([[1.0], [2.0, 3.0]])
    for operand, error in ((np.ones((3, 2)), ValueError), (np.ones(2, np.complex64), TypeError)):
        with pytest.raises(error) as raised:
            v += operand
        assert raised.value.__notes__ == [
            'Raised by an operation in place of "w", which stays of shape (2,) and dtype float32.'
        ]
    counter = Variable(0, name="counter")
    with pytest.raises(TypeError, match='"counter" has dtype int32'):
        counter.assign_add(0.5)
    assert int(counter.assign_add(1)) == 1
    assert storage.tolist() == [2, 3]


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint64, np.float16, np.float32])
def test_counting_up_adds_one(dtype):
    largest = 127 if np.issubdtype(dtype, np.integer) else 2048
    for start in (0, 41, largest):
        counter, added = Variable(start, dtype=dtype), Variable(start, dtype=dtype)
        counter.count_up()
        added.assign_add(1)
        assert counter.dtype == dtype
        assert counter.numpy() == added.numpy()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(np.int32, 2**40), (np.uint8, 300), (np.uint8, -1), (np.int8, 128)],
)
def test_pythons_integers_that_do_not_fit_are_not_assigned(dtype: Any, value: int) -> None:
    v = Variable(np.ones(2, dtype), name="v")
    for assign in (v.assign, v.assign_add, v.assign_sub):
        with pytest.raises(ValueError, match=f'"v" does not fit into {np.dtype(dtype)}'):
            assign([0, value])
    assert v.numpy().tolist() == [1, 1]
    limit = np.iinfo(dtype).max
    assert v.assign([0, int(limit)]).numpy().tolist() == [0, limit]


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


def test_names_are_unique_among_live_variables() -> None:
    kept = [Variable(1.0, name="w") for _ in range(3)]
    assert [v.name for v in kept] == ["w", "w_1", "w_2"]
    explicit = Variable(1.0, name="w_3")
    assert Variable(1.0, name="w").name == "w_4"
    assert explicit.name == "w_3"
    del kept
    assert Variable(1.0, name="w").name == "w"
    assert Variable(1.0).name == "Variable"


def test_collections_list_live_variables_in_order_of_creation() -> None:
    b, a = Variable(1.0, name="b"), Variable(1.0, name="a")
    frozen = Variable(1.0, name="frozen", trainable=False)
    assert gpuopt.trainable_variables() == [b, a]
    assert gpuopt.global_variables() == [b, a, frozen]
    del b
    assert gpuopt.trainable_variables() == [a]


def test_thousands_of_variables_of_one_name_are_quick_to_name() -> None:
    kept = [Variable(1.0, name="w") for _ in range(5000)]
    assert kept[-1].name == "w_4999"


class OfAnotherLibrary:
    def __dlpack__(self) -> Any:
        raise NotImplementedError

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def test_another_librarys_array_is_refused_with_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"got OfAnotherLibrary; .* gpuopt.Variable\(view, copy=F"):
        as_variable(OfAnotherLibrary())


def test_as_variable_returns_a_variable_itself() -> None:
    v = Variable(1.0)
    assert as_variable(v) is v


def test_variable_says_what_it_is() -> None:
    text = repr(Variable([1.0, 2.0], name="w"))
    assert text == '<Variable "w" shape=(2,) dtype=float32 device=cpu value=[1., 2.]>'
    matrix = repr(Variable(np.eye(2), name="w"))
    assert matrix.endswith("device=cpu value=[[1., 0.], [0., 1.]]>")


def test_a_scalar_is_formatted_as_a_number_and_an_array_refused_by_name() -> None:
    assert f"{Variable(1.25, name='loss'):.1f}|{Variable(7):04d}" == "1.2|0007"
    w = Variable([1.0, 2.0], name="w")
    assert f"{w}" == str(w)
    with pytest.raises(TypeError, match=r'"w" of shape \(2,\) is no number, .* format ".2f"'):
        f"{w:.2f}"


def test_a_raw_array_is_called_by_its_shape() -> None:
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    table, bias = np.zeros((3, 2), np.float32), np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=r'"array_of_3x2(_\d+)?" has shape \(2,\)'):
        optimizer.apply_gradients([(bias, bias), (np.zeros(2, np.float32), table)])
    assert re.fullmatch(r"array(_\d+)?", as_variable(np.zeros((), np.float32)).name)


def test_a_large_value_is_shown_by_its_corners() -> None:
    numbers = Variable(np.arange(1000), name="w")
    assert repr(numbers).endswith("device=cpu value=[0, 1, 2, ..., 997, 998, 999]>")
    table = np.arange(300.0).reshape(100, 3)
    assert repr(Variable(table)).endswith(
        "value=\n" + np.array2string(table, separator=", ", threshold=0).replace("array", "") + ">"
    )
    assert repr(Variable(np.zeros((0, 3)))).endswith("value=[]>")
    assert repr(Variable(np.arange(99).astype(ml_dtypes.bfloat16))).endswith("96, 97, 98]>")
    assert len(repr(Variable(np.zeros((60, 60, 60, 60), np.int8)))) < 10_000


@pytest.mark.emulator
def test_a_gpus_value_is_shown_for_one_wait_however_large_it_is(
    emulated_gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = emulated_gpus[1]
    with launcher.device():
        array = launcher.xp.asarray(np.arange(60_000, dtype=np.float32).reshape(300, 200))
    table = Variable(array, name="table")
    copied: list[int] = []
    asnumpy = launcher.xp.asnumpy

    def asnumpy_counted(device_array: Any) -> Any:
        copied.append(device_array.size)
        return asnumpy(device_array)

    monkeypatch.setattr(launcher.xp, "asnumpy", asnumpy_counted)
    before = fake_cupy.counts.synchronisations
    shown = repr(table)
    assert fake_cupy.counts.synchronisations == before + 1
    assert copied == [49]
    assert "device=gpu:1 value=\n[[0.0000e+00, 1.0000e+00, 2.0000e+00, ...," in shown
    assert shown.endswith("5.9999e+04]]>")


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))]
)
def test_copies_have_the_value_and_memory_of_their_own(copied: Any) -> None:
    array = np.asfortranarray(np.arange(6).reshape(2, 3)).astype(ml_dtypes.bfloat16)
    v = Variable(array, name="w", trainable=False, constraint=np.abs, copy=False)
    other = copied(v)
    assert (other.name, other.trainable, other.constraint) == ("w_1", False, np.abs)
    assert (other.dtype, other.device) == (v.dtype, v.device)
    other.assign_add(np.ones((2, 3), ml_dtypes.bfloat16))
    assert np.array_equal(other.numpy(), v.numpy() + 1)
    assert other.identity is not v.identity
    assert other.owns_memory


def test_a_deep_copy_of_a_model_has_one_variable_for_each() -> None:
    v = Variable([1.0, 2.0])
    first, second = copy.deepcopy([v, v])
    assert first is second
    assert first is not v


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("size", "attribute", "value"),
    [
        (4, "dtype", np.float64),
        (400_000, "dtype", np.int32),
        (400_000, "shape", (2, -1)),
        (4, "strides", (0,)),
    ],
)
def test_an_adopted_variable_keeps_its_form_when_its_array_takes_another(
    size: int, attribute: str, value: Any
) -> None:
    array = np.zeros(size, np.float32)
    v = Variable(array, name="v", copy=False)
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
    gradient = np.ones(size, np.float32)
    optimizer.apply_gradients([(gradient, v)])
    setattr(array, attribute, value)
    optimizer.apply_gradients([(gradient, v)])
    assert (v.shape, v.dtype) == ((size,), np.float32)
    assert (v.numpy() == -2.5).all()
    assert (v.storage.ctypes.data, v.storage.strides) == (array.ctypes.data, (4,))
    with pytest.raises(TypeError, match='"v" has dtype float64'):
        optimizer.apply_gradients([(np.ones(size), v)])


def test_an_adopted_array_is_kept_and_shared() -> None:
    memory = np.arange(6, dtype=np.float32)
    v = Variable(memory[2:5], copy=False)
    assert np.shares_memory(v.storage, memory)
    v.assign_add(np.ones(3, np.float32))
    assert memory.tolist() == [0, 1, 3, 4, 5, 5]
    owner = weakref.ref(memory)
    del memory
    assert v.numpy().tolist() == [3, 4, 5]
    del v
    assert owner() is None


masked = np.ma.masked_array(np.float32([1, 2]), mask=[False, True])


def load(slots: Any, non_slots: Any) -> None:
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    state = optimizer.state_dict()
    state["slots"], state["non_slots"] = {"momentum": slots}, non_slots
    optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda v: v.assign(masked), 'the value for "w"'),
        (lambda v: v.assign_add(masked), 'the value for "w"'),
        (lambda v: v.assign_sub(masked), 'the value for "w"'),
        (lambda v: v.__iadd__(masked), 'the operand for "w"'),
        (lambda v: v.__setitem__(slice(None), masked), 'the value for "w"'),
        (lambda v: v.__setitem__(0, np.ma.masked), 'the value for "w"'),
        (lambda v: np.add(v, masked, out=v), "an operand of what is written to a variable"),
        (lambda v: gpuopt.IndexedSlices(masked, [0, 1]), "IndexedSlices values"),
        (lambda v: gpuopt.IndexedSlices([1.0, 2.0], masked.astype(int)), "IndexedSlices indices"),
        (lambda v: gpuopt.embedding_lookup(v, masked.astype(int)), "ids"),
        (lambda v: gpuopt.embedding_lookup(masked, [0, 1]), "the table"),
        (lambda v: v.__setitem__(masked.astype(bool), 1.0), 'the index for "w"'),
        (lambda v: v[masked.astype(bool)], 'the index for "w"'),
        (
            lambda v: gpuopt.GradientDescentOptimizer(0.1).minimize(
                lambda: v * 2, grad_loss=masked
            ),
            "grad_loss",
        ),
        (
            lambda v: gpuopt.GradientDescentOptimizer(0.1).compute_gradients(
                gpuopt.with_gradients(lambda: (1.0, {v: masked}))
            ),
            'the gradient for "w"',
        ),
        (
            lambda v: gpuopt.GradientDescentOptimizer(0.1).compute_gradients(
                gpuopt.with_gradients(lambda: (1.0, [masked])), [v]
            ),
            'the gradient for "w"',
        ),
        (lambda v: load({"w": masked}, {}), 'slot "momentum" of "w"'),
        (lambda v: load({"late": masked}, {}), 'slot "momentum" of "late"'),
        (lambda v: load({}, {"power": masked}), '"power"'),
        (lambda v: gpuopt.ExponentialMovingAverage(0.9).apply([masked]), "the variable"),
        (
            lambda v: gpuopt.ExponentialMovingAverage(0.9).apply([v, lambda: masked]),
            'the value of "<lambda>"',
        ),
        (
            lambda v: gpuopt.ExponentialMovingAverage(0.9, masked[0:1].reshape(())).apply([v]),
            "the value",
        ),
        (
            lambda v: gpuopt.GradientDescentOptimizer(masked[1:].reshape(())).apply_gradients(
                [([1.0, 2.0], v)]
            ),
            "the value",
        ),
    ],
)
def test_masked_arrays_are_refused_by_name(use: Any, what: str) -> None:
    v = Variable([5.0, 6.0], name="w")
    with pytest.raises(TypeError, match=f"{re.escape(what)} is a masked array; fill it first"):
        use(v)
    assert v.numpy().tolist() == [5, 6]


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda v: Variable([5.0, np.ma.masked], name="x"), 'the value of "x"'),
        (lambda v: Variable([masked, masked], name="x"), 'the value of "x"'),
        (lambda v: Variable([[[1.0]], [(masked[1],)]], name="x"), 'the value of "x"'),
        (lambda v: Variable(lambda: [masked], name="x"), 'the value of "x"'),
        (lambda v: v.assign([5.0, masked[1]]), 'the value for "w"'),
        (lambda v: v.__iadd__([5.0, masked[1]]), 'the operand for "w"'),
        (lambda v: v.__setitem__(slice(None), [5.0, masked[1]]), 'the value for "w"'),
        (lambda v: v.__setitem__((masked.astype(bool),), 1.0), 'the index for "w"'),
        (
            lambda v: gpuopt.GradientDescentOptimizer(0.1).apply_gradients([([1.0, masked[1]], v)]),
            'gradient for "w"',
        ),
        (lambda v: gpuopt.IndexedSlices([1.0, masked[1]], [0, 1]), "IndexedSlices values"),
        (lambda v: gpuopt.embedding_lookup(v, [0, np.ma.masked]), "ids"),
        (lambda v: gpuopt.embedding_lookup([masked, masked], [0]), "the table"),
        (
            lambda v: gpuopt.GradientDescentOptimizer(0.1).minimize(
                lambda: v * 2, grad_loss=[1.0, masked[1]]
            ),
            "grad_loss",
        ),
        (lambda v: load({"w": [1.0, masked[1]]}, {}), 'slot "momentum" of "w"'),
    ],
)
def test_lists_with_masked_arrays_inside_are_refused_by_name(use: Any, what: str) -> None:
    v = Variable([5.0, 6.0], name="w")
    with pytest.raises(TypeError, match=f"{re.escape(what)} has a masked array inside; fill it"):
        use(v)
    assert v.numpy().tolist() == [5, 6]


def test_a_list_that_holds_itself_is_refused() -> None:
    v = Variable([5.0], name="w")
    endless: list[Any] = []
    endless.append(endless)
    for use in (
        lambda: Variable(endless, dtype=np.float32),
        lambda: v.assign(endless),
        lambda: gpuopt.GradientDescentOptimizer(0.1).apply_gradients([(endless, v)]),
    ):
        with pytest.raises(ValueError, match="setting an array element with a sequence"):
            use()


def test_variables_are_listed_while_other_threads_make_and_drop_them() -> None:
    kept = [Variable(0.0, name="kept") for _ in range(100)]

    def make() -> None:
        for _ in range(100):
            made.append(Variable(0.0))
        made.clear()

    made: list[Variable] = []
    with repeated(make, threads=2, alternate=True):
        for _ in range(100):
            listed = gpuopt.global_variables()
            assert listed == sorted(listed, key=Variable.serial)
            assert set(kept) <= set(listed)
            assert set(kept) <= set(gpuopt.trainable_variables())
            Variable(0.0, name="kept")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int64])
def test_a_variable_has_an_arrays_copy_item_tolist_and_sizes(dtype: Any) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    v = Variable(array)
    copy = v.copy()
    v += np.ones((2, 3), dtype)
    np.testing.assert_array_equal(copy, array)
    assert (v.itemsize, v.nbytes) == (array.itemsize, array.nbytes)
    assert v.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert (v.item(5), v.item(1, 0), Variable(dtype(7)).item()) == (6, 4, 7)
    with pytest.raises(ValueError, match="convert an array of size 1"):
        v.item()


def test_a_copy_in_a_loss_keeps_the_gradient_and_numbers_are_refused() -> None:
    v = Variable(np.ones(3, np.float32), name="v")
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    [(gradient, _)] = optimizer.compute_gradients(lambda: np.sum(v.copy() * (2 * v).copy()))
    np.testing.assert_array_equal(gradient, [4, 4, 4])
    for read in (lambda: v.item(0) * v.sum(), lambda: v.tolist()[0] * v.sum()):
        with pytest.raises(TypeError, match="would lose its gradient"):
            optimizer.compute_gradients(read)
