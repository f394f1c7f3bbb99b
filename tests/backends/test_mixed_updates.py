"""In host memory, arrays that are not all float32 are updated in one pass, to numpy's bits.

Large updates by compiled rules are compared with small ones, which are numpy's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from every_backend import BACKENDS, BY_NAME, misaligned, plan_beside, scalars_for
from four_slots import four_slots

from gpuopt.backends import Target
from gpuopt.backends.backend import SparseUpdate
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cpu.forms.compiled import CompiledRows, CompiledRule
from gpuopt.rules.averaged import averaged
from gpuopt.rules.clipped import clipped
from gpuopt.rules.decayed import decayed
from gpuopt.rules.rounded import key_of_step, rounded
from gpuopt.rules.split import joined, split
from gpuopt.rules.update_rule import UpdateRule

pytestmark = pytest.mark.cxx

Array = np.ndarray[Any, Any]

FLOAT, FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SGD, ADAM = BY_NAME["gradient_descent"], BY_NAME["adam"]
RULES = [SGD, clipped(decayed(ADAM)), averaged(BY_NAME["ams_grad"])]
SHAPES = [(1,), (7,), (511,), (513,), (), (0,), (5, 3), (40, 130), (70_001,), (300, 7)]


class Kind(NamedTuple):
    """How the arrays of an update are stored: the weights, what is beside them, and slots."""

    weights: np.dtype[Any]
    beside: str
    slots: np.dtype[Any]
    is_rounded: bool = False


KINDS = {
    "bfloat16": Kind(BFLOAT16, "", BFLOAT16),
    "float16": Kind(FLOAT16, "", FLOAT16),
    "bfloat16 with masters": Kind(BFLOAT16, "master", FLOAT),
    "float16 with masters": Kind(FLOAT16, "master", FLOAT),
    "bfloat16 with remainders": Kind(BFLOAT16, "remainder", FLOAT),
    "slots in bfloat16": Kind(FLOAT, "", BFLOAT16),
    "float16 with slots in bfloat16": Kind(FLOAT16, "", BFLOAT16),
    "float16 with masters and slots in bfloat16": Kind(FLOAT16, "master", BFLOAT16),
    "remainders and slots in bfloat16": Kind(BFLOAT16, "remainder", BFLOAT16),
    "bfloat16, rounded": Kind(BFLOAT16, "", BFLOAT16, True),
    "slots, rounded": Kind(FLOAT, "", BFLOAT16, True),
    "slots beside float16, rounded": Kind(FLOAT16, "", BFLOAT16, True),
    "slots beside masters, rounded": Kind(BFLOAT16, "master", BFLOAT16, True),
    "slots beside remainders, rounded": Kind(BFLOAT16, "remainder", BFLOAT16, True),
}


def make(kind: Kind, rule: UpdateRule, shapes: list[Any]) -> tuple[list[Target], Any, Any]:
    """Returns variables with slots, what is beside them, and their gradients."""
    random = np.random.default_rng(0)
    targets, beside, gradients = [], [], []
    for shape in shapes:
        master = np.asarray(random.normal(size=shape), FLOAT)
        of_average = FLOAT if kind.beside else kind.weights
        slots = [
            np.asarray(
                random.uniform(1, 2, shape), of_average if name == "_average" else kind.slots
            )
            for name in rule.slots
        ]
        var = master.astype(kind.weights)
        if kind.beside == "master":
            var, copy = master, var
            beside.append(copy)
        elif kind.beside:
            var, rest = map(np.asarray, split(master))
            beside.append(rest)
        targets.append(Target(var, slots))
        gradients.append(np.asarray(random.normal(size=shape), kind.weights))
    return targets, beside, gradients


def shifted(array: Array) -> Array:
    return misaligned(array) if array.size else array


def write(backend: str, kind: Kind, rule: UpdateRule, shift: bool) -> Any:
    """Returns what is written by three steps."""
    targets, beside, gradients = make(kind, rule, SHAPES)
    if shift:
        targets = [Target(shifted(var), slots) for var, slots, *_ in targets]
        gradients = list(map(shifted, gradients))
    mine, groups = BACKENDS[backend](), [i % 2 for i in range(len(SHAPES))]
    plan = plan_beside(mine, targets, beside, groups=groups)
    for step in range(3):
        scalars = scalars_for(backend, rule)
        if kind.is_rounded:
            scalars |= key_of_step(3, step)
        of_groups = [scalars, {**scalars, rule.scalars[0]: np.float32(0.25)}]
        taken = rounded(rule) if kind.is_rounded else rule
        mine.apply_dense(taken, plan, gradients, of_groups)
    return [array for var, slots, *_ in targets for array in (var, *slots)] + beside


KEY = key_of_step(3, 0)
CASES = [
    *((name, ADAM) for name in KINDS),
    *(("bfloat16 with masters", rule) for rule in RULES),
    *(("remainders and slots in bfloat16", rule) for rule in RULES),
    *((name, BY_NAME["lamb"]) for name in ("float16 with masters", "bfloat16, rounded")),
    # Two words of random bits for each element.
    ("bfloat16, rounded", four_slots),
    # Averages are of what is stored.
    *((name, averaged(BY_NAME["ams_grad"])) for name, kind in KINDS.items() if kind.is_rounded),
    *((str(dtype), averaged(ADAM, dtype)) for dtype in (FLOAT16, BFLOAT16)),
    ("float16 with slots in bfloat16", averaged(ADAM, FLOAT16)),
    *((name, averaged(ADAM)) for name in ("slots in bfloat16", "bfloat16 with remainders")),
]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the calls of compiled code are made, in order."""
    made: list[str] = []

    def noting(kind: Any, name: str) -> None:
        method = getattr(kind, name)

        def call(self: Any, *arguments: Any) -> Any:
            if not self.stored.codecs.are_plain:
                made.append(name)
            return method(self, *arguments)

        monkeypatch.setattr(kind, name, call)

    noting(CompiledRule, "update_chunks")
    noting(CompiledRows, "row_update")
    noting(CompiledRows, "update_table")
    return made


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize(("name", "rule"), CASES, ids=lambda each: getattr(each, "name", each))
@pytest.mark.one_in(9)
def test_compiled_updates_write_numpys_bits(
    compiled: list[str], name: str, rule: UpdateRule, shift: bool
) -> None:
    found = write("compiled", KINDS[name], rule, shift)
    assert set(compiled) == {"update_chunks"}
    compiled.clear()
    expected = write("plain", KINDS[name], rule, shift)
    assert not compiled
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_a_table_are_updated_to_numpys_bits(compiled: list[str], name: str) -> None:
    kind, rows = KINDS[name], np.array([3, 40, 3, 0])
    rule, scalars = (rounded(ADAM), KEY) if kind.is_rounded else (ADAM, {})
    for other_rows in (None, rule):
        found = []
        for backend in ("compiled", "plain"):
            [target], beside, [grad] = make(kind, ADAM, [(300, 70)])
            mine = BACKENDS[backend]()
            update = SparseUpdate(plan_beside(mine, [target], beside), grad[:4], rows)
            given = {**scalars_for(backend, ADAM), **scalars}
            mine.apply_sparse(rule, [update], [given], other_rows=other_rows)
            found.append([target.var, *target.slots, *beside])
        *others, of_rows = dict.fromkeys(compiled)
        assert others == ["update_chunks"] * (other_rows is not None)
        assert of_rows in ("row_update", "update_table")
        compiled.clear()
        for one, other in zip(*found, strict=True):
            assert one.tobytes() == other.tobytes()


# Each upper half of a float32, with the lower halves around each tie of both types of 16 bits.
TIES = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
FLOATS = (np.arange(1 << 16)[:, np.newaxis] << 16 | TIES).astype(np.uint32).reshape(-1).view(FLOAT)
HALVES = np.arange(1 << 16).astype(np.uint16)


def step_by_gradient(var: Array, beside: list[Array], grad: Array) -> None:
    mine = BACKENDS["compiled"]()
    plan = plan_beside(mine, [Target(var, [])], beside)
    mine.apply_dense(SGD, plan, [grad], [{"learning_rate": FLOAT.type(1)}])


def check_same(found: Array, expected: Array) -> None:
    """Compares bits; a NaN may be another one, as it may in numpy, which asks the processor."""
    is_nan = np.isnan(expected.astype(FLOAT))
    np.testing.assert_array_equal(np.isnan(found.astype(FLOAT)), is_nan)
    assert found[~is_nan].tobytes() == expected[~is_nan].tobytes()


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_every_number_is_rounded_as_numpy_does(dtype: np.dtype[Any]) -> None:
    copy = np.empty(FLOATS.shape, dtype)
    step_by_gradient(FLOATS.copy(), [copy], np.zeros_like(copy))
    with np.errstate(all="ignore"):
        check_same(copy, FLOATS.astype(dtype))


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_every_number_of_16_bits_is_read_as_numpy_does(dtype: np.dtype[Any]) -> None:
    var = np.zeros(1 << 16, FLOAT)
    step_by_gradient(var, [], HALVES.view(dtype))
    with np.errstate(all="ignore"):
        check_same(var, 0 - HALVES.view(dtype).astype(FLOAT))


def test_every_number_is_split_as_numpy_does() -> None:
    var, rest = split(FLOATS)
    step_by_gradient(var, [rest], np.zeros_like(var))
    check_same(joined(var, rest), FLOATS)
    is_nan = np.isnan(FLOATS)
    assert np.isnan(var[is_nan].astype(FLOAT)).all()


def test_gradients_may_be_of_another_type_and_in_columns_and_overlap_the_variable() -> None:
    for dtype in (FLOAT, FLOAT16):
        var, rest = split(np.asfortranarray(FLOATS[:77].reshape(7, 11)).copy("C"))
        expected = joined(var, rest) - 2
        step_by_gradient(var, [rest], np.full((11, 7), 2, dtype).T)
        check_same(joined(var, rest), expected)
    # The gradient of an element is the element before.
    numbers = np.geomspace(1, 100, 1001).astype(BFLOAT16)
    expected = numbers[1:].astype(FLOAT) - numbers[:-1].astype(FLOAT)
    step_by_gradient(numbers[1:], [], numbers[:-1])
    assert numbers[1:].tobytes() == expected.astype(BFLOAT16).tobytes()


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_small_variables_beside_a_large_one_take_gradients_of_another_type(
    dtype: np.dtype[Any],
) -> None:
    sizes = 70_001, 100, 3_000
    targets = [Target(np.ones(size, FLOAT), []) for size in sizes]
    gradients = [(np.arange(size) % 64).astype(dtype) for size in sizes]
    mine = CpuBackend()
    plan = mine.plan_dense(targets)
    mine.apply_dense(SGD, plan, gradients, [{"learning_rate": FLOAT.type(0.5)}])
    for (var, *_), size in zip(targets, sizes, strict=True):
        np.testing.assert_array_equal(var, 1 - np.arange(size) % 64 / 2)


@pytest.mark.parametrize("types", [(FLOAT16, FLOAT16), (FLOAT, FLOAT16), (FLOAT16, FLOAT)], ids=str)
@pytest.mark.parametrize("limits", ["compiled", "usual"])
def test_gradients_of_another_type_update_small_variables_beside_large_ones(
    types: tuple[np.dtype[Any], ...], limits: str
) -> None:
    """A small variable is updated with others, or by numpy, where a large one is not."""
    mine = BACKENDS["compiled"]() if limits == "compiled" else CpuBackend()
    for shape in ((48,), (6, 8)):
        large, small = np.ones(300_000, FLOAT), np.asfortranarray(np.ones(shape, FLOAT))
        plan = mine.plan_dense([Target(large, []), Target(small, [])])
        gradients = [np.full_like(large, 2, types[0]), np.full(shape, 2, types[1])]
        mine.apply_dense(SGD, plan, gradients, [{"learning_rate": FLOAT.type(0.25)}])
        assert set(large) == {0.5}
        assert set(small.reshape(-1)) == {0.5}


def test_slots_of_types_without_a_compiled_form_are_left_to_numpy() -> None:
    for dtype in (np.float64, np.uint16):
        slot, after = np.arange(1, 6).astype(dtype), np.arange(3, 8)
        var, grad = np.ones(5, FLOAT), np.full(5, 2, FLOAT)
        mine = BACKENDS["compiled"]()
        plan = mine.plan_dense([Target(var, [slot])])
        scalars = {"learning_rate": FLOAT.type(0.5), "decay": FLOAT.type(1)}
        mine.apply_dense(BY_NAME["momentum"], plan, [grad], [scalars])
        np.testing.assert_array_equal(slot, after)
        np.testing.assert_array_equal(var, 1 - after / 2)
