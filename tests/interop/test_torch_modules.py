"""torch's modules, whose parameters gpuopt updates on torch's own memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt.interop import gradients_of_module, variables_of_module

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.value, pytest.mark.torch]


def module(dtype: Any = None) -> Any:
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    return torch.nn.Sequential(*layers).to(dtype or torch.float32)


def backward(made: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(16, 4, generator=generator).to(next(made.parameters()).dtype)
    made.zero_grad()
    made(inputs).square().sum().backward()


def train(made: Any, optimizer: Any, variables: Any, steps: range) -> None:
    for step in steps:
        backward(made, step)
        optimizer.apply_gradients(gradients_of_module(made, variables))


def train_by_torch(made: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        backward(made, step)
        optimizer.step()


def values(made: Any) -> np.ndarray:
    flat = [parameter.detach().double().flatten() for parameter in made.parameters()]
    return torch.cat(flat).numpy()


def test_a_modules_parameters_are_updated_as_by_torchs_optimizer() -> None:
    expected, found = module(), module()
    train_by_torch(expected, torch.optim.AdamW(expected.parameters(), 0.01), range(20))
    variables = variables_of_module(found)
    train(found, gpuopt.TorchAdamWOptimizer(0.01), variables, range(20))
    np.testing.assert_allclose(values(found), values(expected), rtol=1e-5, atol=1e-6)
    assert [*variables] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_a_modules_run_goes_to_gpuopt_and_back_in_mid_training() -> None:
    expected, found = module(), module()
    theirs = torch.optim.AdamW(expected.parameters(), 0.01)
    train_by_torch(expected, theirs, range(15))
    first = torch.optim.AdamW(found.parameters(), 0.01)
    train_by_torch(found, first, range(5))
    variables = variables_of_module(found)
    ours = gpuopt.optimizer_from_torch(first.state_dict(), list(variables.values()))
    train(found, ours, variables, range(5, 10))
    last = torch.optim.AdamW(found.parameters())
    last.load_state_dict(gpuopt.optimizer_to_torch(ours, list(variables.values())))
    train_by_torch(found, last, range(10, 15))
    np.testing.assert_allclose(values(found), values(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_parameters_of_every_type_share_their_memory(dtype: str) -> None:
    made = module(getattr(torch, dtype))
    before = values(made)
    train(made, gpuopt.GradientDescentOptimizer(0.1), variables_of_module(made), range(1))
    assert (values(made) != before).any()
    assert next(made.parameters()).dtype == getattr(torch, dtype)


def test_shared_parameters_are_listed_once_and_frozen_ones_never() -> None:
    made = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    made[1].weight = made[0].weight
    made[0].bias.requires_grad_(False)
    assert [*variables_of_module(made)] == ["0.weight", "1.bias"]


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    made = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    variables = variables_of_module(made)
    made[0](torch.ones(1, 3)).sum().backward()
    pairs = gradients_of_module(made, variables)
    assert [gradient is None for gradient, _ in pairs] == [False, False, True, True]
    before = made[1].weight.detach().clone()
    gpuopt.GradientDescentOptimizer(0.1).apply_gradients(pairs)
    assert torch.equal(made[1].weight, before)


def test_a_sparse_gradient_updates_the_rows_that_it_names() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    variables = variables_of_module(table)
    before = table.weight.detach().clone()
    table(torch.tensor([1, 3, 1])).sum().backward()
    [(gradient, _)] = pairs = gradients_of_module(table, variables)
    assert isinstance(gradient, gpuopt.IndexedSlices)
    gpuopt.GradientDescentOptimizer(0.5).apply_gradients(pairs)
    moved = torch.tensor([0.0, -1.0, 0.0, -0.5, 0.0])[:, None].expand(5, 2)
    assert torch.allclose(table.weight.detach() - before, moved)


def test_a_parameter_that_overlaps_itself_is_refused() -> None:
    made = torch.nn.Module()
    made.weight = torch.nn.Parameter(torch.ones(1).expand(3))
    with pytest.raises(ValueError, match="weight"):
        variables_of_module(made)
