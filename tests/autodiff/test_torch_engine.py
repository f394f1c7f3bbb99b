"""Losses in torch, over variables whose memory torch shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from losses import Gate, dense, gradients_of, sgd

import gpuopt
from gpuopt import IndexedSlices, Variable


@pytest.mark.torch
def test_torch_works_on_the_variables_own_memory() -> None:
    import torch

    w = Variable(np.ones(4, np.float32))
    pointers = []

    @gpuopt.with_torch
    def loss() -> Any:
        tensor = w.value()
        pointers.append(tensor.data_ptr())
        return torch.sum(tensor**2)

    optimizer = sgd(0.25)
    optimizer.minimize(loss)
    optimizer.minimize(loss)
    assert pointers == [w.storage.ctypes.data] * 2
    assert w.numpy().tolist() == [0.25] * 4


@pytest.mark.torch
def test_torchs_sparse_embedding_gives_slices() -> None:
    import torch

    table = Variable(np.ones((5, 2), np.float32))
    ids = torch.tensor([[4, 1], [4, 4]])

    @gpuopt.with_torch
    def loss() -> Any:
        return torch.nn.functional.embedding(ids, table.value(), sparse=True).sum()

    [gradient] = gradients_of(loss)
    assert isinstance(gradient, IndexedSlices)
    assert gradient.dense_shape == (5, 2)
    assert dense(gradient)[:, 0].tolist() == [0, 1, 0, 0, 3]
    for gate in (Gate.GATE_OP, Gate.GATE_NONE):
        sgd(1.0).minimize(loss, gate_gradients=gate)
    assert table.numpy()[:, 0].tolist() == [1, -1, 1, 1, -5]


def test_with_torch_says_that_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match="torch"):
        gpuopt.with_torch(lambda: 1.0)
