"""torch's tensors as gradients and values, without an integration: taken, or refused by name."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpuopt
from gpuopt import IndexedSlices, Variable

pytestmark = pytest.mark.torch


def stepped(gradient: Any, dtype: Any, **options: Any) -> np.ndarray:
    variable = Variable(np.zeros((4, 2), dtype), name="w")
    optimizer = gpuopt.GradientDescentOptimizer(1.0, **options)
    optimizer.apply_gradients([(gradient, variable)])
    return variable.numpy().astype(np.float32)


@pytest.mark.parametrize("options", [{}, {"masters": "float32"}], ids=["plain", "masters"])
def test_bfloat16_tensors_are_gradients_values_and_rows(options: Any) -> None:
    import torch

    tensor = torch.arange(8.0).reshape(2, 4).T.to(torch.bfloat16)  # strided: [4, 2]
    expected = np.arange(8.0).reshape(2, 4).T
    np.testing.assert_array_equal(stepped(tensor, ml_dtypes.bfloat16, **options), -expected)
    rows = IndexedSlices(tensor[:2], torch.tensor([3, 1]))
    assert rows.values.dtype == ml_dtypes.bfloat16
    by_row = stepped(rows, ml_dtypes.bfloat16, **options)
    np.testing.assert_array_equal(by_row[[3, 1]], -expected[:2])
    variable = Variable(tensor)
    assert variable.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(variable.numpy().astype(float), expected)
    variable.assign(2 * tensor)
    np.testing.assert_array_equal(variable.numpy().astype(float), 2 * expected)
    assert Variable(torch.tensor(1.5, dtype=torch.bfloat16)).numpy() == 1.5


def sparse() -> Any:
    import torch

    return torch.ones(4, 2).to_sparse(1)


def parameter() -> Any:
    import torch

    return torch.nn.Parameter(torch.ones(4, 2))


def in_layout(name: str) -> Any:
    import torch

    tensor = torch.ones(4, 2)
    return {
        "csr": tensor.to_sparse_csr,
        "csc": tensor.to_sparse_csc,
        "bsr": lambda: tensor.to_sparse_bsr((2, 2)),
        "bsc": lambda: tensor.to_sparse_bsc((2, 2)),
        "coo of elements": tensor.to_sparse,
    }[name]()


def quantized() -> Any:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates them
        return torch.quantize_per_tensor(torch.ones(4, 2), 0.5, 0, torch.qint8)


def float8() -> Any:
    import torch

    return torch.ones(4, 2).to(torch.float8_e4m3fn)


TO_DENSE = r"tensor\.to_dense\(\), .*gpuopt\.IndexedSlices\(tensor\.to_dense\(\)\[rows\], rows\)"
LAYOUTS = ["csr", "csc", "bsr", "bsc", "coo of elements"]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("make", "way_out"),
    [
        (sparse, r"gpuopt\.IndexedSlices\(tensor\._values\(\)"),
        *((partial(in_layout, name), TO_DENSE) for name in LAYOUTS),
        (parameter, r"tensor\.detach\(\)"),
        (quantized, r"quantized .*tensor\.dequantize\(\)"),
        (float8, r"tensor of torch\.float8_e4m3fn; pass tensor\.to\(torch\.float32\)"),
    ],
)
def test_tensors_that_share_no_memory_are_refused_by_the_variables_name(
    make: Any, way_out: str
) -> None:
    w = Variable(np.zeros((4, 2), np.float32), name="w")
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    with pytest.raises(TypeError, match=f'gradient for "{w.name}": .*{way_out}'):
        optimizer.apply_gradients([(make(), w)])
    with pytest.raises(TypeError, match=f'the value of "v": .*{way_out}'):
        Variable(make(), name="v")
    with pytest.raises(TypeError, match=f'the value for "{w.name}": .*{way_out}'):
        w.assign(make())
    with pytest.raises(TypeError, match=f'the operand for "{w.name}": .*{way_out}'):
        w += make()
    with pytest.raises(TypeError, match=f'the value for "{w.name}": .*{way_out}'):
        w[...] = make()
    with pytest.raises(TypeError, match=r'"v": copy=False adopts an array .*from_dlpack'):
        Variable(make(), name="v", copy=False)
    assert not w.numpy().any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_conjugated_and_negated_views_are_read_as_what_they_are(dtype: str) -> None:
    import torch

    numbers = torch.complex(torch.zeros(4, 2), torch.arange(8.0).reshape(4, 2))
    negated = torch.conj(numbers).imag
    if dtype == "bfloat16":
        negated = torch._neg_view(torch.arange(8.0).reshape(4, 2).to(torch.bfloat16))
    assert negated.is_neg()
    expected = -np.arange(8.0).reshape(4, 2)
    own = getattr(ml_dtypes, dtype, np.float32)
    np.testing.assert_array_equal(stepped(negated, own), -expected)
    np.testing.assert_array_equal(Variable(negated).numpy().astype(float), expected)
    conjugated = Variable(torch.conj(numbers)).numpy()
    np.testing.assert_array_equal(conjugated, 1j * expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_are_written_into_variables(dtype: str) -> None:
    import torch

    tensor = torch.arange(8.0).reshape(4, 2).to(getattr(torch, dtype))
    w = Variable(tensor)
    w += tensor
    w *= tensor[0, 1]
    w[1:2] = tensor[3:]
    expected = 2 * np.arange(8.0).reshape(4, 2)
    expected[1] = [6, 7]
    np.testing.assert_array_equal(w.numpy().astype(float), expected)


def test_the_ways_out_of_refused_tensors_work() -> None:
    tensor = sparse()
    rows = IndexedSlices(tensor._values(), tensor._indices()[0])
    for gradient in (rows, tensor.to_dense(), parameter().detach()):
        np.testing.assert_array_equal(stepped(gradient, np.float32), -np.ones((4, 2)))
