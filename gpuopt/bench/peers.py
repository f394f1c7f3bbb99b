"""What takes part in tasks: gpuopt, array code, torch, optax and Thinc, doing the same work."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

import gpuopt
from gpuopt.backends.cpu.compiler import compiler
from gpuopt.bench.contenders import (
    Arrays,
    Contender,
    GradientSets,
    Setting,
    StepMaker,
    make_elementwise_step,
    make_naive_step,
    make_our_step,
    make_users_step,
)
from gpuopt.bench.jobs import BETA1, BETA2, EPSILON, JOBS, RATE, Job, Place

# The contender that is gpuopt without compiled rules.
NUMPY_ALONE = "gpuopt, numpy alone"
ARRAYS = "array operations"
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
_NOT_COMPILED = "that is gpuopt, as no C++ compiler was found"
_NO_SPARSE_GRADIENTS = "it has no sparse gradients"
_CUDA_13 = 13000
# With more tensors than this, array operations on a GPU take a second for each step.
_MOST_NAIVE = 1000


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


def why_not_torch(job: Job, place: Place, form: Mapping[str, bool], dtype: str) -> str | None:
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


def _make_optax_step(setting: Setting) -> Contender:
    """Makes optax's step, compiled by JAX, on copies of the weights: JAX's own are donated."""
    import jax
    import optax

    def copy(array: Any) -> Any:
        # Through the host's memory: so CuPy's streams and JAX's need no order between them.
        on_host = array.get() if hasattr(array, "get") else array
        return jax.numpy.array(on_host)

    device, optimizer = find_jax_device(setting.place), setting.job.optax(optax)
    # Not by arrays that are bound to a device: the state is not, so that a step is compiled twice.
    with jax.default_device(device):
        moved = [copy(weight) for weight in setting.weights()]
        sets = cycle([[copy(gradient) for gradient in of_set] for of_set in setting.gradients])
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

    if device.platform == "cpu":
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


def _why_not_optax(setting: Setting) -> str | None:
    place = setting.place
    if setting.is_sparse:
        return _NO_SPARSE_GRADIENTS
    if (reason := _why_not_installed("optax")) is not None:
        return reason
    if setting.dtype == "float64":
        return "JAX has float64 in a mode for the whole process only"
    try:
        find_jax_device(place)
    except RuntimeError as error:
        if place.on_host:
            return str(error).splitlines()[0]
        newest = place.xp.cuda.runtime.driverGetVersion() >= _CUDA_13
        return f"JAX does not find this GPU: pip install 'jax[cuda{13 if newest else 12}]'"
    return None


def _make_thinc_step(setting: Setting) -> Contender:
    """Makes a step of Thinc's Adam: one call for each parameter."""
    from thinc.api import Optimizer

    optimizer = Optimizer(RATE, beta1=BETA1, beta2=BETA2, eps=EPSILON, L2=0.0, grad_clip=0.0)
    weights, sets = setting.weights(), cycle(setting.gradients)
    # Thinc sets gradients to 0 in its step.
    given = [gradient.copy() for gradient in setting.gradients[0]]

    def prepare() -> None:
        for own, gradient in zip(given, next(sets), strict=True):
            own[...] = gradient

    def step() -> None:
        for number, (weight, gradient) in enumerate(zip(weights, given, strict=True)):
            optimizer((number, "w"), weight, gradient)

    return Contender(step, lambda: [*optimizer.mom1.values(), *optimizer.mom2.values()], prepare)


def _why_not_thinc(setting: Setting) -> str | None:
    if setting.is_sparse:
        return _NO_SPARSE_GRADIENTS
    if (reason := _why_not_installed("thinc")) is not None:
        return reason
    if setting.job.title != "Adam" or setting.dtype != "float32":
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


# All of them


class Peer(NamedTuple):
    """A contender that may take part in a task.

    Attributes:
        name: Its name.
        make: Makes it.
        why_not: Returns why it takes no part here, or None.
        belongs: Whether it is among the contenders of such a task at all.
    """

    name: str
    make: Callable[[Setting], Contender]
    why_not: Callable[[Setting], str | None] = lambda _: None
    belongs: Callable[[Setting], bool] = lambda _: True


def users_peer(name: str, make: StepMaker) -> Peer:
    """Makes a peer of a user's own contender."""

    def make_step(setting: Setting) -> Contender:
        return make_users_step(name, make, setting.weights(), list(setting.gradients[0]))

    return Peer(name, make_step)


def _make_ours(setting: Setting, compiled: bool = True) -> Contender:
    return make_our_step(setting.job.ours, setting.weights(), setting.gradients, compiled)


def _torchs_peer(name: str, form: Mapping[str, bool], is_sparse: bool = False) -> Peer:
    def make(setting: Setting) -> Contender:
        make_optimizer = partial(setting.job.torch, form=form)
        return make_torch_step(make_optimizer, setting.weights(), setting.gradients)

    def why_not(setting: Setting) -> str | None:
        # SparseAdam takes no dense gradient to try; torch has it wherever it has Adam.
        job = JOBS["adam"] if is_sparse else setting.job
        return why_not_torch(job, setting.place, form, setting.dtype)

    return Peer(name, make, why_not, lambda setting: setting.is_sparse == is_sparse)


def _make_kernel_each(setting: Setting) -> Contender:
    xp = setting.place.xp
    return make_elementwise_step(setting.job, xp, setting.weights(), setting.gradients)


def _has_kernel_each(setting: Setting) -> bool:
    has_kernels = hasattr(setting.place.xp, "ElementwiseKernel")
    return has_kernels and setting.dtype in ("float32", "float64") and not setting.is_sparse


def _make_arrays(setting: Setting) -> Contender:
    return make_naive_step(setting.job, setting.place.xp, setting.weights(), setting.gradients)


def _why_not_arrays(setting: Setting) -> str | None:
    if setting.dtype == "float16" and "v" in setting.job.state:
        return "in float16, Adam's epsilon is 0, and so its steps are infinite"
    on_gpu = not (setting.place.on_host or setting.is_sparse)
    if on_gpu and len(setting.shapes) > _MOST_NAIVE:
        return "it would launch a hundred thousand kernels in each step"
    return None


PEERS: Sequence[Peer] = (
    Peer("gpuopt", _make_ours),
    Peer(
        NUMPY_ALONE,
        partial(_make_ours, compiled=False),
        lambda _: None if compiler() else _NOT_COMPILED,
        lambda setting: setting.place.on_host,
    ),
    *(_torchs_peer(name, form) for name, form in TORCH_FORMS.items()),
    _torchs_peer("torch sparse", {}, is_sparse=True),
    Peer("optax jit", _make_optax_step, _why_not_optax),
    Peer("Thinc", _make_thinc_step, _why_not_thinc),
    Peer("a kernel for each parameter", _make_kernel_each, belongs=_has_kernel_each),
    Peer(ARRAYS, _make_arrays, _why_not_arrays),
)
