"""The gradients of a loss, as an optimizer asks for them."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np

from gpuopt.autodiff import engine_of
from gpuopt.autodiff.engine import Loss, OnGradient, flatten
from gpuopt.backends import array_types, backend_for, refuse_masked
from gpuopt.device import device_of
from gpuopt.step.pairs import Gradient
from gpuopt.step.replica_context import replica_context
from gpuopt.variables.variable import FLOAT_DTYPES, Variable

# TensorFlow's numbers.
GATE_NONE, GATE_OP, GATE_GRAPH = range(3)


def value_and_gradients(
    loss: Loss, var_list: Any = None, grad_loss: Any = None
) -> tuple[Any, list[tuple[Gradient | None, Variable]]]:
    """Runs a loss once, and returns its value with what `Optimizer.compute_gradients` returns.

        value, pairs = gpuopt.value_and_gradients(lambda: loss(inputs, targets))
        optimizer.apply_gradients(pairs)

    Args:
        loss: See `Optimizer.compute_gradients`.
        var_list: Likewise.
        grad_loss: Likewise; the value is not multiplied by it.

    Returns:
        The value as the loss returned it, a number or array on its device; and (gradient or None,
        variable) pairs.

    Raises:
        RuntimeError, TypeError, ValueError: see `Optimizer.compute_gradients`.
    """
    return _differentiate(loss, var_list, grad_loss, FLOAT_DTYPES)


def gradients_of(
    loss: Loss,
    var_list: Any,
    grad_loss: Any,
    valid_dtypes: Set[np.dtype[Any]],
    on_grad: OnGradient | None = None,
) -> list[tuple[Gradient | None, Variable]]:
    """Runs a loss once and returns its gradients; see `Optimizer.compute_gradients`.

    Args:
        loss: The function to differentiate.
        var_list: The variables to differentiate by.
        grad_loss: What gradients are multiplied by.
        valid_dtypes: The dtypes that the loss, `grad_loss`, and variables with a gradient may have.
        on_grad: Called with each gradient as soon as it is final; it is not returned then.

    Raises:
        RuntimeError: `loss` is no function.
        ValueError: no variables, or an invalid dtype.
    """
    return _differentiate(loss, var_list, grad_loss, valid_dtypes, on_grad)[1]


def _differentiate(
    loss: Loss,
    var_list: Any,
    grad_loss: Any,
    valid_dtypes: Set[np.dtype[Any]],
    on_grad: OnGradient | None = None,
) -> tuple[Any, list[tuple[Gradient | None, Variable]]]:
    if not callable(loss):
        raise RuntimeError(
            "`loss` passed to Optimizer.compute_gradients should be a function when eager "
            f"execution is enabled, got {loss!r}. Write minimize(lambda: ...), or pass a function "
            "without arguments that computes the loss."
        )
    if var_list is not None and not list(flatten(var_list)):
        raise ValueError("No variables to optimize.")
    if grad_loss is not None:
        refuse_masked(grad_loss, "grad_loss")
        _check_dtype(_dtype_of(grad_loss), "grad_loss", valid_dtypes)
    scale = replica_context().loss_scale
    if scale != 1:
        grad_loss = scale if grad_loss is None else _scaled(grad_loss, scale)
    engine = engine_of(loss)
    value, grads_and_vars = engine.compute(loss, var_list, grad_loss, on_grad)
    if not grads_and_vars:
        raise ValueError(f"No variables to optimize: the loss {loss!r} {engine.without_variables}")
    if on_grad is None:
        _check_dtype(_dtype_of(value), "loss", valid_dtypes)
        for gradient, variable in grads_and_vars:
            if gradient is not None:
                _check_dtype(variable.dtype, f'"{variable.name}"', valid_dtypes)
    return value, grads_and_vars


def checked_gate(gate_gradients: int) -> int:
    """Returns a gate of `minimize`, or raises ValueError."""
    if gate_gradients not in (GATE_NONE, GATE_OP, GATE_GRAPH):
        raise ValueError(
            "gate_gradients must be one of: Optimizer.GATE_NONE, Optimizer.GATE_OP, "
            f"Optimizer.GATE_GRAPH.  Not {gate_gradients}"
        )
    return gate_gradients


def refuse_independent_loss(loss: Loss, variables: list[Variable]) -> None:
    """Raises ValueError: the loss depends on none of the variables."""
    names = [variable.name for variable in variables]
    whole = [f'"{each.name}" is {each.dtype}' for each in variables if each.dtype.kind in "iub"]
    if whole:
        raise ValueError(
            f"No gradients provided for any variable of {names}: {', '.join(whole)}, and integers "
            f"are constants in a loss, here {loss!r}."
        )
    raise ValueError(
        f"No gradients provided for any variable: the loss {loss!r} does not depend on {names}."
    )


def _scaled(grad_loss: Any, scale: float) -> Any:
    """Multiplies on the device of `grad_loss`, which may be another one than the loss's."""
    if type(grad_loss) not in array_types:
        return grad_loss * scale
    with backend_for(device_of(grad_loss)).enter():
        return grad_loss * scale


def _check_dtype(dtype: np.dtype[Any], what: str, valid: Set[np.dtype[Any]]) -> None:
    if dtype not in valid:
        expected = sorted(map(str, valid))
        raise ValueError(f"Invalid type {dtype} for {what}, expected: {expected}.")


def _dtype_of(value: Any) -> np.dtype[Any]:
    """The dtype of a number, array or tensor, where Python's float counts as float32."""
    if type(value) is float:
        return np.dtype(np.float32)
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    return np.dtype(str(dtype).removeprefix("torch."))
