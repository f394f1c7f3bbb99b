"""Records autograd's tables and results, to compare them before and after gpuopt's losses.

Run as a program, prints the differences. It must be a process in which nothing else has imported
gpuopt.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import autograd
import autograd.numpy as anp
import autograd.scipy.special as special
import numpy as np
from autograd.core import JVPNode, VJPNode, VSpace, primitive_jvps, primitive_vjps
from autograd.extend import Box
from autograd.tracer import new_box, notrace_primitives, trace_primitives_map

X = np.array([[1.0, 2.0], [4.0, 0.5]], np.float32)
MASKED = np.array([[0.0, -np.inf], [-np.inf, -np.inf]])
# Functions for which gpuopt's derivatives differ from autograd's, or once did; and refused ones.
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], np.ndarray]] = {
    "logsumexp at infinity": (lambda x: special.logsumexp(x), MASKED),
    "logsumexp with weights": (lambda x: anp.sum(special.logsumexp(x, axis=1, b=X)), X),
    "sum": (lambda x: anp.sum(x, where=X > 1), X),
    "prod": (lambda x: anp.prod(x), np.array([2.0, 0.0, 3.0])),
    "var": (lambda x: anp.var(x, correction=1), X),
    "power": (lambda x: anp.sum(x**3 + 2.0**x), X),
    "concatenate": (lambda x: anp.sum(anp.concatenate([x, anp.stack([x[0], x[1]])])), X),
    "array": (lambda x: anp.sum(anp.array([x[0, 0], x[1, 1]])), X),
    "einsum": (lambda x: anp.sum(anp.einsum("...ij,jk->...ik", x, x)), X),
    "norm": (lambda x: anp.linalg.norm(x, axis=0, keepdims=True)[0, 0], X),
    "dot": (lambda x: anp.sum(anp.dot(x, x) + anp.tensordot(x, x, 1)), X),
    "choices": (lambda x: anp.sum(anp.sort(x[0]) * anp.where(x > 1, x, 0)), X),
    "numpy's tanh and sum": (lambda x: np.sum(np.tanh(x)), X),
    "numpy's concatenate": (lambda x: np.sum(np.concatenate([x, x])), X),
    "numpy's asarray": (lambda x: np.sum(np.asarray(x)), X),
}
VALUES = [X, X[0, 0], np.float64(1), 1.0, 1j, [X], (X,), {"a": X}, X > 1, np.linalg.slogdet(X)]


def outcome(function: Callable[[Any], Any], x: np.ndarray) -> Any:
    """The gradient's bits, or the error."""
    try:
        gradient = autograd.grad(function)(x.copy())
    except Exception as error:
        return type(error), str(error)
    return type(gradient), gradient.dtype, gradient.tobytes(), repr(function(x))


def snapshot() -> dict[str, dict[Any, Any]]:
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "autograd"]
    names = {
        (module.__name__, name): value
        for module in modules
        for name, value in vars(module).items()
        if name != "__warningregistry__"
    }
    classes = {value for value in names.values() if isinstance(value, type)}
    return {
        "name": names,
        "attribute": {(c, name): value for c in classes for name, value in vars(c).items()},
        "derivative": dict(primitive_vjps),
        "forward derivative": dict(primitive_jvps),
        "constant": {
            (node, f): True for node in (VJPNode, JVPNode) for f in notrace_primitives[node]
        },
        # Types of ours may come to these.
        "space": dict(VSpace.mappings),
        "primitive": dict(trace_primitives_map),
        "type of boxes": dict.fromkeys(Box.types, True),
        "box": {i: type(new_box(v, 0, VJPNode.new_root())) for i, v in enumerate(VALUES)},
        "outcome": {name: outcome(*case) for name, case in FUNCTIONS.items()},
    }


def differences(
    before: dict[str, dict[Any, Any]], after: dict[str, dict[Any, Any]]
) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for part, was in before.items():
        now = after[part]
        for key, value in was.items():
            is_same = key in now and (
                now[key] is value or (part == "outcome" and now[key] == value)
            )
            if not is_same:
                found.append((part, key))
        if part in ("name", "attribute", "derivative", "forward derivative", "constant"):
            found += [(part, key) for key in now if key not in was]
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    assert "gpuopt" not in sys.modules
    before = snapshot()
    import gpuopt

    w = gpuopt.Variable(X)
    optimizer = gpuopt.GradientDescentOptimizer(0.1)
    optimizer.minimize(lambda: np.sum(w**2))
    for function, _ in FUNCTIONS.values():
        try:
            optimizer.compute_gradients(lambda function=function: function(w.value()))
        except (NotImplementedError, TypeError):
            continue
    for part, key in differences(before, snapshot()):
        print(part, key)
    print("compared", sum(map(len, before.values())))


if __name__ == "__main__":
    main()
