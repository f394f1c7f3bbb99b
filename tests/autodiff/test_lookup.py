"""Rows of embedding tables, whose gradient is of those rows alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from golden_cases import read_json
from losses import Language, dense, gradients_of

import gpuopt
from gpuopt import IndexedSlices, Variable

pytestmark = pytest.mark.contract


def test_lookups_of_one_table_join_and_beside_a_dense_read_become_dense(
    language: Language,
) -> None:
    table = language.place(Variable(np.ones((6, 2), np.float32)))
    first, second = language.put(np.array([0, 2, 0])), language.put(np.array([5]))

    def lookup(ids: Any) -> Any:
        return gpuopt.embedding_lookup(table, ids).sum()

    [gradient] = gradients_of(language.mark(lambda: lookup(first) + lookup(second) * 2))
    assert isinstance(gradient, IndexedSlices)
    assert sorted(language.get(gradient.indices).tolist()) == [0, 0, 2, 5]
    assert dense(gradient, language.get)[:, 0].tolist() == [2, 0, 1, 0, 0, 2]

    [gradient] = gradients_of(language.mark(lambda: lookup(first) + (table * 2).sum()))
    assert not isinstance(gradient, IndexedSlices)
    assert language.get(gradient)[:, 0].tolist() == [4, 2, 3, 2, 2, 2]

    doubled = language.mark(lambda: gpuopt.embedding_lookup(table * 2, first).sum())
    [gradient] = gradients_of(doubled)
    assert not isinstance(gradient, IndexedSlices)
    assert language.get(gradient)[:, 0].tolist() == [4, 0, 2, 0, 0, 0]


def test_a_lookup_takes_ids_of_any_shape(language: Language) -> None:
    table = language.place(Variable(np.arange(12, dtype=np.float32).reshape(6, 2)))
    for ids, indices in ((3, [3]), ([4, 1], [4, 1]), (np.zeros((0, 2), np.int32), [])):
        shapes = []

        def loss(ids: Any = ids, shapes: list[Any] = shapes) -> Any:
            rows = gpuopt.embedding_lookup(table, ids)
            shapes.append(tuple(rows.shape))
            return rows.sum()

        [gradient] = gradients_of(language.mark(loss))
        assert shapes == [(*np.shape(ids), 2)]
        assert language.get(gradient.indices).tolist() == indices
        assert gradient.values.shape == (len(indices), 2)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([0, 6], IndexError, r'id 6 for "table" is not in \[0, 6\)'),
        ([-1], IndexError, r'id -1 for "table" is not in \[0, 6\)'),
        (np.int64(-1), IndexError, r'id -1 for "table" is not in \[0, 6\)'),
        (-1, IndexError, r'id -1 for "table" is not in \[0, 6\)'),
        (lambda: Variable([0, -1]), IndexError, r'id -1 for "table" is not in \[0, 6\)'),
        (np.uint64([2**63]), IndexError, 'id 9223372036854775808 for "table"'),
        (np.float32([1]), TypeError, 'ids for "table" must be integers, got float32'),
        (lambda: Variable([0.0, 1.7]), TypeError, 'ids for "table" must be integers, got float32'),
        ([0.9, 1.2], TypeError, 'ids for "table" must be integers, got float64'),
        (np.float64(1.0), TypeError, 'ids for "table" must be integers, got float64'),
        (1.0, TypeError, 'ids for "table" must be integers, got float64'),
        ([True, False], TypeError, 'ids for "table" must be integers, got bool'),
        (True, TypeError, 'ids for "table" must be integers, got bool'),
    ],
)
def test_a_lookup_refuses_bad_ids(ids: Any, error: type[Exception], message: str) -> None:
    table = Variable(np.ones((6, 2)), name="table")
    ids = ids() if callable(ids) else ids
    with pytest.raises(error, match=message):
        gradients_of(lambda: np.sum(gpuopt.embedding_lookup(table, ids)))
    with pytest.raises(error, match=message):
        gpuopt.embedding_lookup(table, ids)


def test_outside_a_loss_a_lookup_is_an_array() -> None:
    table = Variable(np.arange(6.0).reshape(3, 2))
    assert gpuopt.embedding_lookup(table, [2, 0]).tolist() == [[4, 5], [0, 1]]


def test_gathered_rows_have_tensorflows_gradient() -> None:
    golden = read_json("misc.json")["embedding_gradient_type"]
    table = Variable(np.arange(1, 7, dtype=np.float32).reshape(3, 2))

    def squares() -> Any:
        return np.sum(gpuopt.embedding_lookup(table, golden["indices"]) ** 2)

    [gradient] = gradients_of(squares)
    assert type(gradient).__name__ == golden["gather_only"]
    assert gradient.indices.tolist() == golden["indices"]
    assert gradient.values.tolist() == golden["values"]
    [gradient] = gradients_of(lambda: squares() + np.sum(table[0]))
    assert isinstance(gradient, np.ndarray)
    [gradient] = gradients_of(
        lambda: gpuopt.embedding_lookup(table, golden["indices"]), grad_loss=3.0
    )
    assert gradient.values.tolist() == golden["grad_loss3_values"]


def test_float_ids_of_every_kind_of_array_are_refused(language: Language) -> None:
    table = language.place(Variable(np.ones((6, 2), np.float32), name="table"))
    ids = language.put(np.float32([1]))
    with pytest.raises(TypeError, match='ids for "table" must be integers, got float32'):
        gradients_of(language.mark(lambda: gpuopt.embedding_lookup(table, ids).sum()))


def test_a_variable_holds_ids() -> None:
    table, ids = Variable(np.arange(6.0).reshape(3, 2)), Variable([2, 0])
    assert gpuopt.embedding_lookup(table, ids).tolist() == [[4, 5], [0, 1]]
    [gradient] = gradients_of(lambda: np.sum(gpuopt.embedding_lookup(table, ids)))
    assert gradient.indices.tolist() == [2, 0]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ids_may_be_overwritten_after_the_lookup(language: Language, dtype: type) -> None:
    table = language.place(Variable(np.arange(12, dtype=np.float32).reshape(6, 2)))
    ids = language.put(np.array([1, 4], dtype))

    def loss() -> Any:
        rows = gpuopt.embedding_lookup(table, ids)
        ids[0] = 5
        return (rows * rows).sum()

    [gradient] = gradients_of(language.mark(loss))
    ids[1] = 0
    assert language.get(gradient.indices).tolist() == [1, 4]
    assert language.get(gradient.values).tolist() == [[4, 6], [16, 18]]


@pytest.mark.parametrize("in_a_loss", [False, True])
def test_arguments_in_the_wrong_order_are_refused(in_a_loss: bool) -> None:
    table = Variable(np.ones((3, 2), np.float32), name="table")

    def swapped() -> Any:
        return gpuopt.embedding_lookup([0, 1], table)

    with pytest.raises(
        TypeError, match=r"table must be .*got list; .*embedding_lookup\(table, ids"
    ):
        gpuopt.AdamOptimizer().minimize(swapped) if in_a_loss else swapped()
