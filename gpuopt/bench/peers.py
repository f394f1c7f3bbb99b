"""The optimizers of torch, optax and Thinc, doing the same work."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from typing import Any

import numpy as np

import gpuopt
from gpuopt.bench.contenders import Arrays, Contender, GradientSets
from gpuopt.bench.jobs import BETA1, BETA2, EPSILON, RATE, Job, Place

TORCH_FORMS: Mapping[str, Mapping[str, bool]] = {
    "torch fused": {"fused": True},
    "torch foreach": {"foreach": True},
}
# As in the extras "bench" and "thinc": pip cannot find gpuopt by name.
REQUIREMENTS: Mapping[str, str] = {
    "torch": "torch>=2.13",
    "optax": "optax>=0.2.8",
    "thinc": "thinc>=8.3,<10",
}
_CUDA_13 = 13000


def make_torch_step(
    make: Callable[[Any, Any], Any], weights: Arrays, gradients: GradientSets
) -> Contender:
    """Makes torch's step on the same memory.

    Args:
        make: Makes the optimizer from (torch, parameters).
        weights: The parameters' arrays, which are updated in place.
        gradients: Their gradients.
    """
    import torch

    def read(gradient: Any, shape: tuple[int, ...]) -> Callable[[], Any]:
        if not isinstance(gradient, gpuopt.IndexedSlices):
            tensor = _to_torch(gradient)
            return lambda: tensor
        rows, values = torch.from_dlpack(gradient.indices)[None], _to_torch(gradient.values)
        # New tensors in each step: torch marks a tensor whose rows are summed, and skips the work.
        return lambda: torch.sparse_coo_tensor(rows, values, shape, check_invariants=False)

    parameters = [torch.nn.Parameter(_to_torch(weight)) for weight in weights]
    optimizer = make(torch, parameters)
    shapes = [weight.shape for weight in weights]
    sets = cycle([list(map(read, of_set, shapes)) for of_set in gradients])

    def give() -> None:
        for parameter, gradient in zip(parameters, next(sets), strict=True):
            parameter.grad = gradient()

    def step() -> None:
        give()
        optimizer.step()

    if len(gradients) == 1 and not isinstance(gradients[0][0], gpuopt.IndexedSlices):
        give()
        return Contender(optimizer.step, partial(_torch_state, optimizer))
    return Contender(step, partial(_torch_state, optimizer))


def why_not_torch(
    job: Job, place: Place, form: Mapping[str, bool], dtype: str = "float32"
) -> str | None:
    """Returns why torch lacks this implementation here, or None: tries a step on one element."""
    if (reason := _why_not_installed("torch")) is not None:
        return reason
    import torch

    try:
        ones = torch.ones(1, dtype=getattr(torch, dtype), device=place.torch_device)
        parameter = torch.nn.Parameter(ones)
        parameter.grad = torch.ones_like(parameter)
        job.torch(torch, [parameter], form).step()
    # A torch without CUDA asserts that it has it, and TypeError is of no such implementation.
    except (AssertionError, RuntimeError, TypeError) as error:
        return str(error).splitlines()[0]
    return None


def make_optax_step(
    make: Callable[[Any], Any], weights: Arrays, gradients: GradientSets, device: Any = None
) -> Contender:
    """Makes optax's step, compiled by JAX, on copies of the weights.

    Args:
        make: Makes the optimizer from (optax).
        weights: The parameters' arrays; JAX's own are donated to each step.
        gradients: Their gradients.
        device: From `find_jax_device`; None for JAX's default one.
    """
    import jax
    import optax

    def copy(array: Any) -> Any:
        # Through the host's memory: so CuPy's streams and JAX's need no order between them.
        on_host = array.get() if hasattr(array, "get") else array
        return jax.numpy.array(on_host)

    optimizer = make(optax)
    # Not by arrays that are bound to a device: the state is not, so that a step is compiled twice.
    with jax.default_device(device):
        moved = [copy(weight) for weight in weights]
        sets = cycle([[copy(gradient) for gradient in of_set] for of_set in gradients])
        state = optimizer.init(moved)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(weights: Any, state: Any, given: Any) -> Any:
        moves, state = optimizer.update(given, state, weights)
        return optax.apply_updates(weights, moves), state

    def step() -> None:
        nonlocal moved, state
        with jax.default_device(device):
            moved, state = update(moved, state, next(sets))

    def finish() -> None:
        jax.block_until_ready((moved, state))

    def step_to_its_end() -> None:
        step()
        finish()

    def arrays() -> list[Any]:
        return list(jax.tree.leaves(state))

    if device is None or device.platform == "cpu":
        return Contender(step_to_its_end, arrays)
    return Contender(step, arrays, finish=finish)


def find_jax_device(place: Place) -> Any:
    """Returns JAX's device of this place.

    Raises:
        RuntimeError: JAX has none there.
    """
    # Else it takes three quarters of the GPU's memory as soon as it is used.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    kind, _, index = place.torch_device.partition(":")
    devices = jax.devices("cpu" if kind == "cpu" else "gpu")
    if int(index or 0) >= len(devices):
        raise RuntimeError(f"JAX has {len(devices)} of {kind}")
    return devices[int(index or 0)]


def why_not_optax(dtype: str, place: Place) -> str | None:
    """Returns why optax takes no part, or None."""
    if (reason := _why_not_installed("optax")) is not None:
        return reason
    if dtype == "float64":
        return "JAX has float64 in a mode for the whole process only"
    try:
        find_jax_device(place)
    except RuntimeError as error:
        if place.on_host:
            return str(error).splitlines()[0]
        newest = place.xp.cuda.runtime.driverGetVersion() >= _CUDA_13
        return f"JAX does not find this GPU: pip install 'jax[cuda{13 if newest else 12}]'"
    return None


def make_thinc_step(weights: Arrays, gradients: GradientSets) -> Contender:
    """Makes a step of Thinc's Adam: one call for each parameter."""
    from thinc.api import Optimizer

    optimizer = Optimizer(RATE, beta1=BETA1, beta2=BETA2, eps=EPSILON, L2=0.0, grad_clip=0.0)
    sets = cycle(gradients)
    # Thinc sets gradients to 0 in its step.
    given = [gradient.copy() for gradient in gradients[0]]

    def prepare() -> None:
        for own, gradient in zip(given, next(sets), strict=True):
            own[...] = gradient

    def step() -> None:
        for number, (weight, gradient) in enumerate(zip(weights, given, strict=True)):
            optimizer((number, "w"), weight, gradient)

    return Contender(step, lambda: [*optimizer.mom1.values(), *optimizer.mom2.values()], prepare)


def why_not_thinc(job: Job, dtype: str) -> str | None:
    """Returns why Thinc takes no part, or None."""
    if (reason := _why_not_installed("thinc")) is not None:
        return reason
    if job.title != "Adam" or dtype != "float32":
        return "of these optimizers and types, Thinc has Adam in float32"
    return None


def _why_not_installed(package: str) -> str | None:
    if find_spec(package) is not None:
        return None
    name = "Thinc" if package == "thinc" else package
    return f"{name} is not installed: pip install '{REQUIREMENTS[package]}'"


def _to_torch(array: Any) -> Any:
    import torch

    if array.dtype.name == "bfloat16":  # numpy's DLPack has no type for it
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def _torch_state(optimizer: Any) -> list[Any]:
    arrays = (array for of_one in optimizer.state.values() for array in of_one.values())
    return [array for array in arrays if hasattr(array, "nbytes")]
