"""The default engine: HIPS autograd, for losses in numpy or CuPy operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autograd.core import VJPNode, add_outgrads, vspace
from autograd.extend import Box, defvjp, primitive
from autograd.tracer import isbox, new_box

from gpuopt.autodiff import cupy_compat
from gpuopt.autodiff.engine import GradsAndVars, Loss, OnGradient, ReadRecorder, traced_variables
from gpuopt.identity import Identity
from gpuopt.indexed_slices import IndexedSlices
from gpuopt.recording import depth, recorder, recording
from gpuopt.variable import Variable

# Of a variable that this thread's loss does not watch: below every trace, so autograd ignores it.
_NO_TRACE = -2.0


class AutogradEngine:
    """Records a loss with HIPS autograd; see `Engine.compute`.

    The loss computes with Variables, numpy's or CuPy's functions, or `autograd.numpy`'s. Threads
    may differentiate at once.
    """

    def compute(
        self,
        loss_fn: Loss,
        var_list: Any = None,
        grad_loss: Any = None,
        on_grad: OnGradient | None = None,
    ) -> tuple[Any, GradsAndVars]:
        cupy_compat.install()
        wanted = traced_variables(var_list)
        trace = _trace_level()
        outer = recorder()  # of a loss that calls this one; it is told of the same reads

        def read_outside(variable: Variable) -> Any:
            return variable.storage if outer is None else outer.read(variable)

        reads = ReadRecorder(
            wanted,
            make_leaf=lambda variable: new_box(read_outside(variable), trace, VJPNode.new_root()),
            make_constant=read_outside,
            lookup=_traced_lookup,
        )
        with recording(reads):
            loss = loss_fn()
            loss = loss.value() if isinstance(loss, Variable) else loss
        variables = reads.variables() if wanted is None else wanted
        if not (isbox(loss) and loss._trace == trace):
            return loss, [(None, variable) for variable in variables]
        leaves = {leaf._node: variable for variable, leaf in reads.leaves.values()}
        found = _backward(loss, _seed(loss._value, grad_loss), leaves, on_grad)
        return loss._value, [(found.get(variable.identity), variable) for variable in variables]


def _trace_level() -> float:
    """Returns a trace of our own for each loss within a loss: -1/2, -1/3, ...

    autograd counts its traces in a variable that all threads share, upwards from 0. Ours stay below
    them, so that `autograd.grad` works inside a loss, and touch nothing shared.
    """
    return -1.0 / (2 + depth())


def _seed(value: Any, grad_loss: Any) -> Any:
    ones = vspace(value).ones()
    if grad_loss is None:
        return ones
    given = grad_loss.storage if isinstance(grad_loss, Variable) else grad_loss
    shape = getattr(given, "shape", ())
    if shape not in ((), ones.shape):
        raise ValueError(f"grad_loss has shape {shape}; the loss has shape {ones.shape}")
    return (ones * given).astype(ones.dtype, copy=False)


def _backward(
    loss: Any, seed: Any, leaves: dict[Any, Variable], on_grad: OnGradient | None
) -> dict[Identity, Any]:
    """Goes through what was recorded in reverse, freeing it on the way.

    A gradient is final when all that its node went into has passed its part on.
    """
    pending: dict[Any, tuple[Any, bool]] = {loss._node: (seed, False)}
    uses = _count_uses(loss._node)
    final = []
    found: dict[Identity, Any] = {}

    def finish(node: Any) -> None:
        variable = leaves.get(node)
        if variable is None:
            final.append(node)
            return
        gradient = _of_variable(pending.pop(node)[0], variable)
        if on_grad is None:
            found[variable.identity] = gradient
        else:
            on_grad(gradient, variable)

    finish(loss._node)
    while final:
        node = final.pop()
        gradient = pending.pop(node)[0]
        if isinstance(gradient, IndexedSlices):  # of a table that the loss computed
            gradient = _to_dense(gradient)
        for parent, contribution in zip(node.parents, node.vjp(gradient), strict=True):
            pending[parent] = _added(pending.get(parent), contribution)
            uses[parent] -= 1
            if uses[parent] == 0:
                finish(parent)
        node.vjp = None  # lets go of the values that it needed
    return found


def _count_uses(end: Any) -> dict[Any, int]:
    """Returns how often each node that leads to `end` was an argument of another."""
    uses: dict[Any, int] = {end: 0}
    nodes = [end]
    while nodes:
        for parent in nodes.pop().parents:
            if parent not in uses:
                uses[parent] = 0
                nodes.append(parent)
            uses[parent] += 1
    return uses


def _added(sum_so_far: tuple[Any, bool] | None, gradient: Any) -> tuple[Any, bool]:
    """Adds a contribution; rows stay rows until something dense joins them."""
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
    xp = cupy_compat.array_module(first.values)
    return IndexedSlices(
        xp.concatenate([first.values, second.values]),
        xp.concatenate([first.indices, second.indices]),
        first.dense_shape,
    )


def _to_dense(slices: IndexedSlices) -> Any:
    xp = cupy_compat.array_module(slices.values)
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
    if not isinstance(gradient, type(variable.storage)):
        gradient = cupy_compat.array_module(variable.storage).asarray(gradient)
    return gradient if gradient.dtype == variable.dtype else gradient.astype(variable.dtype)


@primitive
def _lookup(table: Any, ids: Any) -> Any:
    return table[ids]


def _lookup_vjp(rows: Any, table: Any, ids: Any) -> Any:
    shape = table.shape
    return lambda gradient: IndexedSlices(
        gradient.reshape((-1, *shape[1:])), ids.reshape(-1), shape
    )


defvjp(_lookup, _lookup_vjp)


def _traced_lookup(table: Any, ids: Any) -> Any:
    table = table.value() if isinstance(table, Variable) else table
    xp = cupy_compat.array_module(getattr(table, "_value", table))
    ids = xp.asarray(ids)
    return _lookup(table, ids if ids.dtype in ("int32", "int64") else ids.astype("int64"))


def _as_read(name: str, otherwise: Callable[[Variable], Any]) -> property:
    """A property of the box that a Variable reads as in this thread's loss."""

    def get(variable: Variable) -> Any:
        by = recorder()
        read = None if by is None else by.read(variable)
        return getattr(read, name) if isbox(read) else otherwise(variable)

    return property(get)


# A function of `autograd.numpy` must see a Variable among its arguments as the box that it reads
# as: otherwise it would record the box inside the value of another box, and lose its gradient.
Box.types.add(Variable)
for _name, _otherwise in (
    ("_trace", lambda variable: _NO_TRACE),
    ("_node", lambda variable: None),
    ("_value", lambda variable: variable.storage),
):
    setattr(Variable, _name, _as_read(_name, _otherwise))
