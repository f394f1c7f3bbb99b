"""Rows that come and go under every optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from array_slots import array_slots
from every_optimizer import make, one_of_each_shape, own_step

import gpuopt
from gpuopt import IndexedSlices, Variable

pytestmark = pytest.mark.value


@one_of_each_shape
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_new_row_is_updated_as_a_new_variable(
    name: str, arguments: dict[str, Any], dtype: Any
) -> None:
    """And rows that stay, that are reset, or move elsewhere, as the variables that they were."""
    rng = np.random.default_rng(7)
    optimizer = make(name, arguments)
    step = own_step(optimizer)
    # Each row is a variable of one row beside the table.
    table = Variable(rng.uniform(0.5, 2, (4, 3)).astype(dtype), name="table")
    singles = [Variable(table.numpy()[row : row + 1], name=f"row{row}") for row in range(4)]

    def train(rows: list[int] | None = None) -> None:
        height = table.shape[0]
        gradient = rng.normal(size=(height, 3)).astype(dtype)
        if rows is None:
            given: Any = gradient
            of_rows: list[Any] = [gradient[row : row + 1] for row in range(height)]
        else:
            given = IndexedSlices(gradient[rows], np.array(rows))
            of_rows = [
                IndexedSlices.from_mask(gradient[row : row + 1], np.array([row in rows]))
                for row in range(height)
            ]
        optimizer.apply_gradients(
            [(given, table), *zip(of_rows, singles, strict=True)], global_step=step
        )

    def new_single(row: Any, name: str) -> Variable:
        """A variable that has made as many steps as the table has, where each has a count."""
        single = Variable(row, name=name)
        if optimizer.own_counts:
            state: Any = optimizer.state_dict({"w": singles[0]})
            for slot in array_slots(optimizer):  # they start at 0
                state["slots"][slot]["w"] = np.zeros_like(state["slots"][slot]["w"])
            optimizer.load_state_dict(state, {"w": single})
        return single

    train()
    train([1, 3])
    added = rng.uniform(0.5, 2, (2, 3)).astype(dtype)
    gpuopt.rows(table).append(added)
    singles += [new_single(row[None], "added") for row in added]
    train()
    train([0, 5])
    gpuopt.rows(table).keep([5, 0, 3])
    singles = [singles[row] for row in (5, 0, 3)]
    gpuopt.rows(table).reset([1], added[:1])
    singles[1] = new_single(added[:1], "reset")
    train([1, 2])
    train()
    for array in ("the variable", *array_slots(optimizer)):
        every = [
            each.numpy() if array == "the variable" else optimizer.get_slot(each, array).numpy()
            for each in (table, *singles)
        ]
        np.testing.assert_allclose(
            every[0], np.concatenate(every[1:]), rtol=8 * np.finfo(dtype).eps, err_msg=array
        )
