"""The default engine: HIPS autograd, for losses in numpy or CuPy operations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from autograd.core import add_outgrads
from autograd.extend import primitive
from autograd.tracer import getval, isbox, new_box

from gpuopt.autodiff.array_modules import array_module, is_array, memory_owner, overlap
from gpuopt.autodiff.derivatives import derivative
from gpuopt.autodiff.engine import (
    GradsAndVars,
    Loss,
    OnGradient,
    ReadRecorder,
    checked_loss,
    traced_variables,
)
from gpuopt.autodiff.tracing import LossNode, add_cupy, add_variables
from gpuopt.backends import to_device
from gpuopt.device import device_of
from gpuopt.variables.identity import Identity
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.operators import as_constant, value_of
from gpuopt.variables.recording import depth, record, recorder
from gpuopt.variables.variable import Variable


class AutogradEngine:
    """Records a loss with HIPS autograd; see `Engine.compute`.

    The loss computes with Variables, numpy's or CuPy's functions, or `autograd.numpy`'s. Threads
    may differentiate at once.
    """

    streams = True
    without_variables = (
        "read no trainable one. Raw arrays, the result of numpy(), and integers are constants in a "
        "loss. One in torch's operations is marked by gpuopt.with_torch."
    )

    def compute(
        self,
        loss_fn: Loss,
        var_list: Any = None,
        grad_loss: Any = None,
        on_grad: OnGradient | None = None,
    ) -> tuple[Any, GradsAndVars]:
        add_cupy()
        add_variables()
        wanted = traced_variables(var_list)
        trace = _trace_level()
        outer = recorder()  # the recorder of a loss that calls this one; it gets the same reads
        constants: list[weakref.ref[Any]] = []

        def read_outside(variable: Variable) -> Any:
            return variable.unread_numbers() if outer is None else outer.read(variable)

        def leaf_of(variable: Variable) -> Any:
            return new_box(read_outside(variable), trace, LossNode.of_leaf(constants))

        def is_constant(variable: Variable) -> bool:
            return any(overlap(array, variable.unread_storage) for array in _alive(constants))

        reads = ReadRecorder(wanted, leaf_of, read_outside, _traced_lookup, is_constant)
        loss = record(reads, lambda: checked_loss(value_of(loss_fn())))
        variables = reads.variables() if wanted is None else wanted
        if not (isbox(loss) and loss._trace == trace):
            return loss, [(None, variable) for variable in variables]
        leaves = {leaf._node: variable for variable, leaf in reads.leaves.values()}
        seed = _seed(loss._value, grad_loss)
        found: dict[Identity, Any] = {}
        if on_grad is None:

            def collect(gradient: Any, variable: Variable) -> None:
                found[variable.identity] = gradient

            _backward(loss._node, seed, leaves, collect)
        else:
            stream = _Stream(on_grad, leaves.values(), _alive(constants))
            _backward(loss._node, seed, leaves, stream.hand_over, stream.copy_if_shared)
            stream.finish()
        reads.end()
        return loss._value, [(found.get(variable.identity), variable) for variable in variables]


def _trace_level() -> float:
    """Returns a trace of our own for each loss within a loss: -1/2, -1/3, ...

    autograd counts its traces in a variable that all threads share, upwards from 0. Ours stay below
    them, so that `autograd.grad` works inside a loss, and touch nothing shared.
    """
    return -1.0 / (2 + depth())


def _alive(constants: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [array for array in (constant() for constant in constants) if array is not None]


def _seed(value: Any, grad_loss: Any) -> Any:
    shape, dtype = np.shape(value), np.result_type(value)
    ones = array_module(getval(value)).ones(shape, dtype=dtype)
    if grad_loss is None:
        return ones
    # Where the loss is: a loss scale may be on a GPU.
    given = to_device(as_constant(grad_loss), device_of(ones))
    given_shape = getattr(given, "shape", ())
    if given_shape not in ((), shape):
        raise ValueError(f"grad_loss has shape {given_shape}; the loss has shape {shape}")
    return (ones * given).astype(dtype, copy=False)


class _Memory:
    """The memory of some arrays."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        owners = list(map(memory_owner, arrays))
        self._arrays = arrays
        self._owners = set(map(id, owners))
        # As from a buffer or another library: it may be another array's memory after all.
        self._lent = [
            array for array, owner in zip(arrays, owners, strict=True) if not is_array(owner)
        ]

    def overlaps(self, array: Any) -> bool:
        """Whether an array may share this memory: by its owner, or by bounds if that is unsure."""
        owner = memory_owner(array)
        if id(owner) in self._owners:
            return True
        unsure = self._lent if is_array(owner) else self._arrays
        return any(overlap(array, other) for other in unsure)


class _Stream:
    """Delivers gradients inside the backward pass, with the values that they have at its end.

    `on_grad` updates the gradient's variable, while the rest of the backward pass may still read
    the variable's memory: as a constant, or as another variable's gradient.
    """

    def __init__(
        self, on_grad: OnGradient, variables: Iterable[Variable], constants: Iterable[Any]
    ) -> None:
        self._on_grad = on_grad
        variables = list(variables)
        self._of_variables = _Memory([variable.unread_storage for variable in variables])
        # The constants themselves are not kept: the backward pass frees what it no longer needs.
        of_constants = _Memory(list(constants))
        self._constant = {v.identity for v in variables if of_constants.overlaps(v.unread_storage)}
        self._held_back: list[tuple[Any, Variable]] = []

    def hand_over(self, gradient: Any, variable: Variable) -> None:
        if variable.identity in self._constant:
            self._held_back.append((gradient, variable))
        else:
            self._on_grad(gradient, variable)

    def copy_if_shared(self, gradient: Any) -> Any:
        """Copies a gradient that may be on a variable's memory; returns any other as it is."""
        is_own = is_array(gradient) and self._of_variables.overlaps(gradient)
        return gradient.copy() if is_own else gradient

    def finish(self) -> None:
        for gradient, variable in self._held_back:
            self._on_grad(gradient, variable)


def _backward(
    end: LossNode,
    seed: Any,
    leaves: dict[LossNode, Variable],
    deliver: OnGradient,
    copy_if_shared: Callable[[Any], Any] | None = None,
) -> None:
    """Goes through the recorded nodes in reverse order, and frees them on the way.

    A node's gradient is final when all nodes that used its result have added their parts, each
    after `copy_if_shared`. A variable's, of the node that it was read by, is then given to
    `deliver`.
    """
    pending: dict[LossNode, tuple[Any, bool]] = {end: (seed, False)}
    uses = _count_uses(end)
    final = []

    def finish(node: LossNode) -> None:
        variable = leaves.get(node)
        if variable is None:
            final.append(node)
        else:
            deliver(_of_variable(pending.pop(node)[0], variable), variable)

    finish(end)
    while final:
        node = final.pop()
        gradient = pending.pop(node)[0]
        if isinstance(gradient, IndexedSlices):  # of a table that the loss computed
            gradient = _to_dense(gradient)
        assert node.vjp is not None
        # All parts are computed before a variable is written that one of them depends on.
        parts = list(node.vjp(gradient))
        if copy_if_shared is not None:
            parts = list(map(copy_if_shared, parts))
        for parent, part in zip(node.parents, parts, strict=True):
            pending[parent] = _added(pending.get(parent), part)
            uses[parent] -= 1
            if uses[parent] == 0:
                finish(parent)
        node.vjp = None  # frees the values that it needed


def _count_uses(end: LossNode) -> dict[LossNode, int]:
    """Returns how often each node that leads to `end` was an argument of another."""
    uses: dict[LossNode, int] = {end: 0}
    nodes = [end]
    while nodes:
        for parent in nodes.pop().parents:
            if parent not in uses:
                uses[parent] = 0
                nodes.append(parent)
            uses[parent] += 1
    return uses


def _added(sum_so_far: tuple[Any, bool] | None, gradient: Any) -> tuple[Any, bool]:
    """Adds a part of a gradient; IndexedSlices stay sparse until a dense part is added."""
    if sum_so_far is None and isinstance(gradient, IndexedSlices):
        return gradient, False
    if sum_so_far is not None and isinstance(sum_so_far[0], IndexedSlices):
        if isinstance(gradient, IndexedSlices):
            return _concatenated(sum_so_far[0], gradient), False
        sum_so_far = _to_dense(sum_so_far[0]), True
    elif isinstance(gradient, IndexedSlices):
        gradient = _to_dense(gradient)
    added: tuple[Any, bool] = add_outgrads(sum_so_far, gradient)
    return added


def _concatenated(first: IndexedSlices, second: IndexedSlices) -> IndexedSlices:
    xp = array_module(first.values)
    return IndexedSlices(
        xp.concatenate([first.values, second.values]),
        xp.concatenate([first.indices, second.indices]),
        first.dense_shape,
    )


def _to_dense(slices: IndexedSlices) -> Any:
    xp = array_module(slices.values)
    dense = xp.zeros(slices.dense_shape, dtype=slices.values.dtype)
    xp.add.at(dense, slices.indices, slices.values)
    return dense


def _of_variable(gradient: Any, variable: Variable) -> Any:
    """Gives a gradient its variable's dtype, and makes numpy's scalars arrays."""
    if isbox(gradient):  # an outer loss goes on with it
        return gradient
    if isinstance(gradient, IndexedSlices):
        if gradient.dtype == variable.dtype:
            return gradient
        values = gradient.values.astype(variable.dtype)
        return IndexedSlices(values, gradient.indices, gradient.dense_shape)
    if not isinstance(gradient, type(variable.unread_storage)):
        gradient = array_module(variable.unread_storage).asarray(gradient)
    return gradient if gradient.dtype == variable.dtype else gradient.astype(variable.dtype)


@primitive
def _lookup(table: Any, ids: Any) -> Any:
    return table[ids]


def _lookup_vjp(ans: Any, table: Any, ids: Any) -> Callable[[Any], Any]:
    shape = table.shape
    return lambda g: IndexedSlices(g.reshape((-1, *shape[1:])), ids.reshape(-1), shape)


derivative(_lookup, _lookup_vjp)


def _traced_lookup(table: Any, ids: Any) -> Any:
    table = table.unread_value() if isinstance(table, Variable) else table
    xp = array_module(getval(table))
    # A copy: the gradient outlives the loss, and the caller may fill its array of ids anew.
    return _lookup(table, xp.asarray(ids).astype("int32" if ids.dtype == "int32" else "int64"))
