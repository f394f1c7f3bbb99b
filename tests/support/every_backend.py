"""Backends that compute an update in each way, and a rule of each kind for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from emulator.emulator import EmulatorLauncher
from every_optimizer import update_rules

from gpuopt.backends import Backend, Target
from gpuopt.backends.backend import codecs_of
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cuda.backend import CudaBackend
from gpuopt.codecs import Codecs, MasterAndCopy, Split
from gpuopt.device import Device
from gpuopt.rules.cautious import cautious
from gpuopt.rules.clipped import bounded, clipped
from gpuopt.rules.decayed import decayed
from gpuopt.rules.update_rule import UpdateRule

BY_NAME = {rule.name: rule for rule in update_rules()}
ADAM = BY_NAME["adam"]
RULES = [
    *(BY_NAME[name] for name in ("gradient_descent", "adam", "row_wise_adagrad", "lamb")),
    *(
        decayed(ADAM),
        clipped(bounded(ADAM)),
        cautious(ADAM),
        clipped(decayed(BY_NAME["row_wise_adagrad"])),
    ),
]


def host(**limits: int) -> Backend:
    return CpuBackend(CpuLimits(**limits))


BACKENDS: dict[str, Callable[[], Backend]] = {
    "plain": lambda: host(compiled_elements=10**9),
    "one by one": lambda: host(small_elements=1, compiled_elements=10**9),
    "compiled": lambda: host(small_elements=1, large_elements=0, elements_per_thread=1),
    "kernels": lambda: CudaBackend(Device("gpu"), EmulatorLauncher(seed=3)),
}
every_backend = pytest.mark.parametrize(
    "backend",
    ["plain", "one by one", "compiled", pytest.param("kernels", marks=pytest.mark.emulator)],
)
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def scalars_for(backend: str, rule: UpdateRule) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    given = {name: np.float32(rng.uniform(0.1, 0.9)) for name in rule.scalars}
    if "clip_factor" in given:  # kernels take a norm's number, or -1
        given["clip_factor"] = np.float32(-1 if backend == "kernels" else 1)
    return given


def misaligned(array: np.ndarray) -> np.ndarray:
    """Returns a copy at an address that is not aligned to packs."""
    return np.concatenate([array.reshape(-1)[:1], array.reshape(-1)])[1:].reshape(array.shape)


def plan_beside(
    backend: Backend, targets: Sequence[Target], beside: Sequence[Any], **more: Any
) -> Any:
    """Plans updates of variables that are stored in two arrays each, or in one if none is given."""
    codecs = codecs_of(targets[0])
    if beside:
        other = beside[0].dtype
        var = Split() if other == np.uint16 else MasterAndCopy(other)
        codecs = Codecs(var, codecs.slots)
        pairs = zip(targets, beside, strict=True)
        targets = [target._replace(companion=array) for target, array in pairs]
    return backend.plan_dense(targets, codecs, **more)
