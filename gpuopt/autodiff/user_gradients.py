"""Losses that come with their own gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gpuopt.autodiff.engine import GradsAndVars, Loss, OnGradient, flatten
from gpuopt.backends import refuse_masked
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable, as_variable


class UserEngine:
    """Takes the gradients that a loss returns; see `Engine.compute`."""

    # All gradients exist at once. They may be other variables' own memory, so that none of these
    # may be written before the last gradient is used.
    streams = False
    without_variables = "brought no gradients. Return (value, {variable: gradient, ...})."

    def compute(
        self,
        loss_fn: Loss,
        var_list: Any = None,
        grad_loss: Any = None,
        on_grad: OnGradient | None = None,
    ) -> tuple[Any, GradsAndVars]:
        """Evaluates the loss once; by default `var_list` is all variables with a gradient.

        Raises:
            TypeError: the loss returned something else than `(value, gradients)`, or a gradient
                is masked.
            ValueError: a list of gradients does not match `var_list`, or `grad_loss` is no scalar.
        """
        variables = None if var_list is None else [as_variable(v) for v in flatten(var_list)]
        result = loss_fn()
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                "a loss decorated with gpuopt.with_gradients must return (value, gradients), got "
                f"{type(result).__name__}"
            )
        value, gradients = result
        pairs = _pair_with_variables(gradients, variables)
        for gradient, variable in pairs:
            refuse_masked(gradient, f'the gradient for "{variable.name}"')
        if grad_loss is not None:
            if np.ndim(grad_loss) != 0:
                raise ValueError(
                    "grad_loss must be a scalar where the loss brings its own gradients, got "
                    f"shape {np.shape(grad_loss)}"
                )
            pairs = [
                (_scaled(gradient, float(grad_loss)), variable) for gradient, variable in pairs
            ]
        return value, pairs


_engine = UserEngine()


def with_gradients(loss: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
    """Marks a loss that brings its own gradients, for `minimize` and `compute_gradients`.

    The loss takes no arguments and returns `(value, gradients)`: gradients is a mapping from
    Variable to array or IndexedSlices, or a sequence in the order of `var_list`.
    """
    if not callable(loss):
        raise TypeError(f"with_gradients decorates a function, got {loss!r}")

    @functools.wraps(loss)
    def marked() -> tuple[Any, Any]:
        return loss()

    marked.gradient_engine = _engine  # type: ignore[attr-defined]
    return marked


def _pair_with_variables(gradients: Any, variables: list[Variable] | None) -> GradsAndVars:
    if isinstance(gradients, Mapping):
        if variables is None:
            return [(gradient, as_variable(variable)) for variable, gradient in gradients.items()]
        by_identity = {as_variable(v).identity: g for v, g in gradients.items()}
        return [(by_identity.get(variable.identity), variable) for variable in variables]
    if not isinstance(gradients, Sequence):
        raise TypeError(
            "gradients must be a mapping from variable to gradient, or a sequence in the order of "
            f"var_list, got {type(gradients).__name__}"
        )
    if variables is None:
        raise ValueError("a sequence of gradients needs var_list; or return {variable: gradient}")
    if len(gradients) != len(variables):
        raise ValueError(f"{len(gradients)} gradients for {len(variables)} variables in var_list")
    return list(zip(gradients, variables, strict=True))


def _scaled(gradient: Any, factor: float) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, IndexedSlices):
        return IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return np.multiply(gradient, factor) if isinstance(gradient, list) else gradient * factor
