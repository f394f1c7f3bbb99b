"""JAX's arrays as gradients of variables in host memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpuopt

pytestmark = [pytest.mark.value, pytest.mark.jax]


def variables() -> dict[str, gpuopt.Variable]:
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 3), "b": (3,)}
    return {
        name: gpuopt.Variable(rng.standard_normal(shape).astype(np.float32), name=name)
        for name, shape in shapes.items()
    }


def steps_by_jax(count: int) -> list[np.ndarray]:
    import jax
    import jax.numpy as jnp

    def error(weights: dict[str, Any]) -> Any:
        return jnp.sum((jnp.tanh(jnp.ones((5, 4)) @ weights["w"] + weights["b"]) - 0.5) ** 2)

    made = variables()
    value_and_gradients = jax.jit(jax.value_and_grad(error))

    @gpuopt.with_gradients
    def loss() -> Any:
        value, gradients = value_and_gradients({k: v.numpy() for k, v in made.items()})
        return value, {made[name]: gradient for name, gradient in gradients.items()}

    optimizer = gpuopt.AdamOptimizer(0.05)
    for _ in range(count):
        optimizer.minimize(loss)
    return [variable.numpy() for variable in made.values()]


def test_gradients_of_a_jitted_loss_update_as_those_of_the_same_loss_in_numpy() -> None:
    made = variables()

    def loss() -> Any:
        return np.sum((np.tanh(np.ones((5, 4), np.float32) @ made["w"] + made["b"]) - 0.5) ** 2)

    optimizer = gpuopt.AdamOptimizer(0.05)
    for _ in range(20):
        optimizer.minimize(loss)
    for found, variable in zip(steps_by_jax(20), made.values(), strict=True):
        np.testing.assert_allclose(found, variable.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_jax_gradient_is_read_and_not_written(dtype: str) -> None:
    import jax.numpy as jnp

    gradient = jnp.full(3, 2, dtype)
    variable = gpuopt.Variable(np.ones(3, dtype))
    gpuopt.GradientDescentOptimizer(0.5).apply_gradients([(gradient, variable)])
    np.testing.assert_array_equal(variable.numpy(), np.zeros(3, dtype))
    np.testing.assert_array_equal(np.asarray(gradient), np.full(3, 2, dtype))


@pytest.mark.parametrize("convert", [np.asarray, lambda gradient: gradient], ids=["numpy", "jax"])
def test_a_bfloat16_gradient_of_jax_is_taken_as_numpys(convert: Any) -> None:
    import jax.numpy as jnp

    variable = gpuopt.Variable(np.ones(3, ml_dtypes.bfloat16))
    gradient = convert(jnp.full(3, 2, "bfloat16"))
    gpuopt.GradientDescentOptimizer(0.5).apply_gradients([(gradient, variable)])
    assert (variable.numpy() == 0).all()
    variable.assign(gradient)
    assert (gpuopt.Variable(gradient).numpy() == variable.numpy()).all()


def test_rows_of_jax_update_the_rows_that_they_name() -> None:
    import jax.numpy as jnp

    table = gpuopt.Variable(np.zeros((4, 2), np.float32))
    slices = gpuopt.IndexedSlices(jnp.ones((2, 2)), jnp.array([1, 1]))
    gpuopt.GradientDescentOptimizer(0.5).apply_gradients([(slices, table)])
    np.testing.assert_array_equal(table.numpy(), [[0, 0], [-1, -1], [0, 0], [0, 0]])


def test_a_jax_array_is_no_variable() -> None:
    import jax.numpy as jnp

    with pytest.raises(TypeError, match=r"make gpuopt\.Variable"):
        gpuopt.GradientDescentOptimizer(0.5).apply_gradients([(jnp.ones(3), jnp.ones(3))])
