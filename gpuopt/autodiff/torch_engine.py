"""Losses written in torch, over variables whose memory torch shares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gpuopt.autodiff.array_modules import overlap
from gpuopt.autodiff.engine import (
    GradsAndVars,
    Loss,
    OnGradient,
    ReadRecorder,
    checked_loss,
    traced_variables,
)
from gpuopt.backends import backend_for
from gpuopt.device import device_of
from gpuopt.locks import importing
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.operators import as_constant, value_of
from gpuopt.variables.recording import record
from gpuopt.variables.variable import Variable


class TorchEngine:
    """Has torch differentiate; see `Engine.compute`.

    A Variable is read as a torch tensor on its own memory, by DLPack and without a copy; gradients
    come back the same way. A sparse gradient of `torch.nn.functional.embedding(..., sparse=True)`,
    or of `gpuopt.embedding_lookup`, becomes IndexedSlices.
    """

    streams = True
    without_variables = (
        "read no trainable one. Torch's own tensors and parameters, the result of numpy(), and "
        "integers are constants in a loss: compute with a gpuopt.Variable's value(). For the "
        "parameters of a module, call backward() and gpuopt.interop.gradients_of_module."
    )

    def compute(
        self,
        loss_fn: Loss,
        var_list: Any = None,
        grad_loss: Any = None,
        on_grad: OnGradient | None = None,
    ) -> tuple[Any, GradsAndVars]:
        import torch

        wanted = traced_variables(var_list)
        constants: list[Variable] = []

        def constant_of(variable: Variable) -> Any:
            constants.append(variable)
            return _tensor(variable)

        reads = ReadRecorder(
            wanted,
            make_leaf=lambda variable: _tensor(variable).requires_grad_(),
            make_constant=constant_of,
            lookup=_lookup,
            is_constant=lambda variable: any(
                overlap(constant.unread_storage, variable.unread_storage) for constant in constants
            ),
        )
        with torch.enable_grad():
            loss = record(reads, lambda: checked_loss(value_of(loss_fn())))
        variables = reads.variables() if wanted is None else wanted
        if not (reads.leaves and isinstance(loss, torch.Tensor) and loss.requires_grad):
            return to_array(loss), [(None, variable) for variable in variables]
        pairs = list(reads.leaves.values())
        found: dict[Any, Any] = {}
        if on_grad is None:
            gradients = torch.autograd.grad(
                loss, [leaf for _, leaf in pairs], _seed(loss, grad_loss), allow_unused=True
            )
            for (variable, _), gradient in zip(pairs, gradients, strict=True):
                found[variable.identity] = gradient_array(gradient, variable)
        else:
            _hand_over(pairs, on_grad)
            loss.backward(_seed(loss, grad_loss))
        return to_array(loss), [(found.get(variable.identity), variable) for variable in variables]


_engine = TorchEngine()


def with_torch(loss: Callable[[], Any]) -> Callable[[], Any]:
    """Marks a loss that is written in torch, for `minimize` and `compute_gradients`.

    Raises:
        ModuleNotFoundError: torch is not installed.
    """
    with importing:
        import torch  # noqa: F401 - says at once that it is missing

    @functools.wraps(loss)
    def marked() -> Any:
        return loss()

    marked.gradient_engine = _engine  # type: ignore[attr-defined]
    return marked


def _tensor(variable: Variable) -> Any:
    import torch

    array = variable.unread_numbers()
    if variable.dtype.kind == "V":  # bfloat16, which numpy's DLPack does not know
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def to_array(value: Any) -> Any:
    """Returns an array on a tensor's memory, on whichever device, and anything else as it is."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return backend_for(device_of(value)).as_array(value)


def gradient_array(gradient: Any, variable: Variable) -> Any:
    """Returns a tensor that is a gradient as an array, or as IndexedSlices; None as it is."""
    import torch

    if gradient is None:
        return None
    if gradient.layout == torch.sparse_coo:
        return IndexedSlices(
            to_array(gradient._values()), to_array(gradient._indices()[0]), variable.shape
        )
    return to_array(gradient)


def _seed(loss: Any, grad_loss: Any) -> Any:
    import torch

    ones = torch.ones_like(loss)
    if grad_loss is None:
        return ones
    given = as_constant(grad_loss)
    given = given if isinstance(given, torch.Tensor) else torch.as_tensor(given)
    if tuple(given.shape) not in ((), tuple(loss.shape)):
        raise ValueError(
            f"grad_loss has shape {tuple(given.shape)}; the loss has shape {tuple(loss.shape)}"
        )
    return (ones * given).to(loss.dtype)


def _hand_over(pairs: list[tuple[Variable, Any]], on_grad: OnGradient) -> None:
    """Has torch call `on_grad` as soon as a leaf's gradient is complete, and then forget it."""
    import torch

    for variable, leaf in pairs:

        def hook(leaf: Any, variable: Variable = variable) -> None:
            on_grad(gradient_array(leaf.grad, variable), variable)
            leaf.grad = None
            # torch then refuses to use values that it kept in this memory, as by leaf.detach().
            torch.autograd.graph.increment_version(leaf)

        leaf.register_post_accumulate_grad_hook(hook)


def _lookup(table: Any, ids: Any) -> Any:
    import torch

    # A copy: the gradient outlives the loss, and the caller may fill its array of ids anew.
    ids = torch.as_tensor(ids).to(torch.long, copy=True)
    is_variable = isinstance(table, Variable)
    weight = table.unread_value() if is_variable else table
    if is_variable and weight.ndim == 2:
        return torch.nn.functional.embedding(ids, weight, sparse=True)
    return weight[ids]  # torch has sparse gradients of matrices alone
