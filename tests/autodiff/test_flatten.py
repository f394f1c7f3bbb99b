"""autograd's own functions of lists and dictionaries, on those with Variables."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from autograd.misc.flatten import flatten

from gpuopt import GradientDescentOptimizer, Variable


def variables() -> tuple[Variable, Variable]:
    return Variable(np.arange(6.0).reshape(2, 3), name="w"), Variable(np.ones(3), name="b")


def gradients(loss: Any) -> list[np.ndarray]:
    return [g for g, _ in GradientDescentOptimizer(0.1).compute_gradients(loss)]


def test_variables_are_flattened_outside_of_a_loss() -> None:
    w, b = variables()
    flat, unflatten = flatten([w, {"b": (b, 2.0)}])
    np.testing.assert_array_equal(flat, [0, 1, 2, 3, 4, 5, 1, 1, 1, 2])
    plain, of_name = unflatten(flat + 1)
    np.testing.assert_array_equal(plain, w.numpy() + 1)
    np.testing.assert_array_equal(of_name["b"][0], [2, 2, 2])


def test_a_loss_is_differentiated_through_flatten() -> None:
    w, b = variables()
    of_w, of_b = gradients(lambda: np.sum(flatten([w, {"x": (b, 2 * w)}])[0] ** 2))
    np.testing.assert_array_equal(of_w, 10 * w.numpy())
    np.testing.assert_array_equal(of_b, 2 * b.numpy())


def test_a_loss_is_differentiated_through_unflatten() -> None:
    w, b = variables()

    def loss() -> Any:
        flat, unflatten = flatten([w, (b,)])
        doubled, (other,) = unflatten(2 * flat)
        return np.sum(doubled**2) + np.sum(other)

    of_w, of_b = gradients(loss)
    np.testing.assert_array_equal(of_w, 8 * w.numpy())
    np.testing.assert_array_equal(of_b, [2, 2, 2])


def test_gradients_of_flattened_float32_are_float32() -> None:
    w = Variable(np.ones(3, np.float32))
    [gradient] = gradients(lambda: np.sum(flatten([w])[0] ** 2))
    assert gradient.dtype == np.float32
    np.testing.assert_array_equal(gradient, [2, 2, 2])


@pytest.mark.parametrize(
    "imports",
    [
        "import gpuopt; from autograd.misc.flatten import flatten",
        "from autograd.misc.flatten import flatten; import gpuopt",
        "import gpuopt, importlib.util; importlib.util.find_spec('autograd'); "
        "from autograd.misc.flatten import flatten",
    ],
)
def test_variables_are_flattened_before_any_gradient_was_computed(imports: str) -> None:
    program = f"""
{imports}
import autograd, inspect, sys
flat, _ = flatten([gpuopt.Variable([1.0, 2.0]), {{"b": gpuopt.Variable(3.0)}}])
print(flat, "def flatten" in inspect.getsource(flatten), type(autograd.__loader__).__name__)
print([type(each) for each in sys.meta_path if type(each).__module__.startswith("gpuopt")])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stderr == ""
    assert ran.stdout.splitlines() == ["[1. 2. 3.] True SourceFileLoader", "[]"]


def test_autograd_is_not_imported_by_gpuopt_alone() -> None:
    program = "import gpuopt, sys; gpuopt.Variable(1.0); print('autograd' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("False\n", "")
