"""gpuopt refuses what real TensorFlow refuses, and accepts what it accepts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from golden_cases import exceptions, read_json

import gpuopt
from gpuopt import IndexedSlices, Variable

pytestmark = pytest.mark.contract

# What TensorFlow's own exception types are here.
COUNTERPARTS: dict[str, tuple[type[Exception], ...]] = {
    "InvalidArgumentError": (ValueError, IndexError),
    "AttributeError": (TypeError,),
    "NotImplementedError": (NotImplementedError,),
    "RuntimeError": (RuntimeError,),
    "TypeError": (TypeError,),
    "ValueError": (ValueError,),
}
# A variable here is never uninitialised (departure 8).
OUT_OF_SCOPE = ("run-time: uninitialised",)


def v() -> Variable:
    return Variable(np.ones((3, 2), np.float32), name="v")


def sgd(learning_rate: Any = 0.1) -> gpuopt.Optimizer:
    return gpuopt.GradientDescentOptimizer(learning_rate)


def apply(gradient: Any, optimizer: gpuopt.Optimizer | None = None, **variable: Any) -> Any:
    target = Variable(np.ones((3, 2), variable.pop("dtype", np.float32)), name="v", **variable)
    (optimizer or sgd()).apply_gradients([(gradient, target)])
    return target


def loss_of(value: Any, gradients: Any = None) -> Any:
    return gpuopt.with_gradients(lambda: (value, {} if gradients is None else gradients))


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def rows(indices: list[int], height: int | None = None, width: int = 2) -> IndexedSlices:
    return IndexedSlices(ones(len(indices) if height is None else height, width), indices)


def average_of(value: Variable) -> gpuopt.ExponentialMovingAverage:
    average = gpuopt.ExponentialMovingAverage(0.9)
    average.apply([value])
    return average


def disconnected(var: Variable) -> list[Any]:
    return sgd().compute_gradients(loss_of(1.0, {}), var_list=[var])


def sync_push(pairs: Any, global_step: Any = 0, start: bool = True, num_tokens: int = -1) -> None:
    """Trains with two workers up to the first push; a step needs five gradients."""
    step = Variable(global_step, name="step") if global_step is not None else None
    sync = gpuopt.SyncReplicasOptimizer(sgd(), 5, 2)
    if not start:
        sync.apply_gradients(pairs, step)
        return
    coordinator = sync.start(Variable(0, name="step") if step is None else step, num_tokens)
    with coordinator, sync.worker(0):
        sync.apply_gradients(pairs, step)


CASES: dict[str, Callable[[], Any]] = {
    "SyncReplicas empty grads": lambda: sync_push([]),
    "SyncReplicas no global step": lambda: sync_push([(ones(3, 2), v())], None),
    # TensorFlow's queue runner, tokens and hook all come into being by start().
    "SyncReplicas get_chief_queue_runner early": lambda: sync_push(
        [(ones(3, 2), v())], start=False
    ),
    "SyncReplicas get_init_tokens_op early": lambda: sync_push([(ones(3, 2), v())], start=False),
    "SyncReplicas hook begin early": lambda: sync_push([(ones(3, 2), v())], start=False),
    "SyncReplicas too few init tokens": lambda: sync_push([(ones(3, 2), v())], num_tokens=2),
    "SyncReplicas zero init tokens -> no-op": lambda: (
        gpuopt.SyncReplicasOptimizer(sgd(), 2).start(Variable(0, name="step"), 0).close()
    ),
    "SyncReplicas all None grads": lambda: sync_push([(None, v())]),
    "SyncReplicas numpy grad": lambda: sync_push([(ones(3, 2), v())]),
    "ConditionalAccumulator bad reduction": lambda: gpuopt.ConditionalAccumulator(
        np.float32, (), "Invalid"
    ),
    "empty name": lambda: gpuopt.AdamOptimizer(name=""),
    "None name": lambda: gpuopt.AdamOptimizer(name=None),
    "apply_gradients empty list": lambda: sgd().apply_gradients([]),
    "apply_gradients all None": lambda: apply(None),
    "apply_gradients unconvertible string gradient": lambda: apply("text"),
    "apply_gradients object() gradient": lambda: apply(object()),
    "apply_gradients numpy gradient accepted": lambda: apply(ones(3, 2)),
    "apply_gradients python list gradient accepted": lambda: apply([[1.0, 1.0]] * 3),
    "apply_gradients to python float var": lambda: sgd().apply_gradients([(1.0, 2.0)]),
    "apply_gradients to Tensor": lambda: sgd().apply_gradients([(ones(3), ones(3))]),
    "apply_gradients pairs of wrong length": lambda: sgd().apply_gradients([(ones(3), v(), 1)]),
    "apply_gradients not iterable": lambda: sgd().apply_gradients(3),
    "apply_gradients generator accepted": lambda: sgd().apply_gradients(
        pair for pair in [(ones(3, 2), v())]
    ),
    "shape mismatch dense (ref, static)": lambda: apply(ones(4)),
    "shape mismatch dense (resource, static)": lambda: apply(ones(4)),
    "dtype mismatch dense grad float64 var float32 (ref)": lambda: apply(
        ones(3, 2, dtype=np.float64)
    ),
    "minimize no variables": lambda: sgd().minimize(loss_of(1.0)),
    "minimize empty var_list": lambda: sgd().minimize(loss_of(1.0), var_list=[]),
    "minimize no gradients (disconnected)": lambda: sgd().minimize(loss_of(1.0), var_list=[v()]),
    "compute_gradients disconnected gives None": lambda: disconnected(v()),
    "compute_gradients int loss": lambda: sgd().compute_gradients(loss_of(1, {v(): ones(3, 2)})),
    "compute_gradients int variable": lambda: disconnected(Variable(1, name="Variable")),
    "compute_gradients complex loss": lambda: sgd().compute_gradients(
        loss_of(np.complex64(1), {v(): ones(3, 2)})
    ),
    "bad gate_gradients": lambda: sgd().compute_gradients(
        loss_of(1.0, {v(): ones(3, 2)}), gate_gradients="x"
    ),
    "gate_gradients 3": lambda: sgd().compute_gradients(
        loss_of(1.0, {v(): ones(3, 2)}), gate_gradients=3
    ),
    "grad_loss int": lambda: sgd().compute_gradients(loss_of(1.0, {v(): ones(3, 2)}), grad_loss=1),
    "var_list contains non variable": lambda: sgd().compute_gradients(
        loss_of(1.0), var_list=[object()]
    ),
    "sparse grad with constraint (ref)": lambda: apply(rows([0]), constraint=np.abs),
    "sparse grad with constraint (resource)": lambda: apply(rows([0]), constraint=np.abs),
    "Adagrad init accumulator 0": lambda: gpuopt.AdagradOptimizer(0.1, 0.0),
    "Adagrad init accumulator -1": lambda: gpuopt.AdagradOptimizer(0.1, -1.0),
    "ProximalAdagrad init accumulator 0": lambda: gpuopt.ProximalAdagradOptimizer(0.1, 0.0),
    "AdagradDA init accumulator 0": lambda: gpuopt.AdagradDAOptimizer(0.1, Variable(0), 0.0),
    "Ftrl init accumulator -1": lambda: gpuopt.FtrlOptimizer(0.1, initial_accumulator_value=-1.0),
    "Ftrl init accumulator 0 ok": lambda: gpuopt.FtrlOptimizer(0.1, initial_accumulator_value=0.0),
    "Ftrl lr_power 0.5": lambda: gpuopt.FtrlOptimizer(0.1, learning_rate_power=0.5),
    "Ftrl l1 -1": lambda: gpuopt.FtrlOptimizer(0.1, l1_regularization_strength=-1.0),
    "Ftrl l2 -1": lambda: gpuopt.FtrlOptimizer(0.1, l2_regularization_strength=-1.0),
    "Ftrl l2 shrinkage -1": lambda: gpuopt.FtrlOptimizer(
        0.1, l2_shrinkage_regularization_strength=-1.0
    ),
    "base Optimizer apply": lambda: apply(ones(3, 2), gpuopt.Optimizer(False, "base")),
    "base Optimizer sparse apply": lambda: apply(rows([0]), gpuopt.Optimizer(False, "base")),
    "callable lr Ftrl": lambda: apply(ones(3, 2), gpuopt.FtrlOptimizer(lambda: 0.1)),
    "callable lr AdagradDA": lambda: apply(
        ones(3, 2), gpuopt.AdagradDAOptimizer(lambda: 0.1, Variable(0))
    ),
    "callable lr ProximalGD": lambda: apply(
        ones(3, 2), gpuopt.ProximalGradientDescentOptimizer(lambda: 0.1)
    ),
    "callable lr ProximalAdagrad": lambda: apply(
        ones(3, 2), gpuopt.ProximalAdagradOptimizer(lambda: 0.1)
    ),
    "callable hyper GradientDescent": lambda: apply(ones(3, 2), sgd(lambda: 0.1)),
    "callable hyper Momentum": lambda: apply(
        ones(3, 2), gpuopt.MomentumOptimizer(lambda: 0.1, lambda: 0.9)
    ),
    "callable hyper Adagrad": lambda: apply(ones(3, 2), gpuopt.AdagradOptimizer(lambda: 0.1)),
    "callable hyper Adadelta": lambda: apply(
        ones(3, 2), gpuopt.AdadeltaOptimizer(lambda: 0.1, lambda: 0.9, lambda: 1e-8)
    ),
    "callable hyper RMSProp": lambda: apply(
        ones(3, 2), gpuopt.RMSPropOptimizer(lambda: 0.1, lambda: 0.9, lambda: 0.5, lambda: 1e-8)
    ),
    "callable lr Adam": lambda: apply(ones(3, 2), gpuopt.AdamOptimizer(lambda: 0.1)),
    "callable beta1 Adam": lambda: apply(ones(3, 2), gpuopt.AdamOptimizer(beta1=lambda: 0.9)),
    "EMA int var": lambda: average_of(Variable(1, name="Variable")),
    "EMA average before apply": lambda: gpuopt.ExponentialMovingAverage(0.9).average(v()),
    "EMA average_name before apply": lambda: gpuopt.ExponentialMovingAverage(0.9).average_name(v()),
    "run-time: dense shape mismatch dynamic": lambda: apply(ones(4, 2)),
    "run-time: non scalar lr": lambda: apply(ones(3, 2), sgd(np.float32([0.1, 0.1]))),
}

SPARSE_DEFECTS = {
    "index out of range": lambda: rows([0, 7]),
    "negative index": lambda: rows([-1]),
    "nnz mismatch": lambda: rows([0], height=2),
    "inner dim mismatch": lambda: rows([0], width=3),
}
SPARSE_OPTIMIZERS = {
    "SGD": sgd,
    "Momentum": lambda: gpuopt.MomentumOptimizer(0.1, 0.9),
    "Adagrad": lambda: gpuopt.AdagradOptimizer(0.1),
    "AdagradDA": lambda: gpuopt.AdagradDAOptimizer(0.1, Variable(0)),
    "Adadelta": lambda: gpuopt.AdadeltaOptimizer(0.1),
    "RMSProp": lambda: gpuopt.RMSPropOptimizer(0.1),
    "Adam": lambda: gpuopt.AdamOptimizer(0.1),
    "Ftrl": lambda: gpuopt.FtrlOptimizer(0.1),
    "ProximalGD": lambda: gpuopt.ProximalGradientDescentOptimizer(0.1),
    "ProximalAdagrad": lambda: gpuopt.ProximalAdagradOptimizer(0.1),
}
PROXIMAL = {
    "ProximalGradientDescent": lambda: gpuopt.ProximalGradientDescentOptimizer(0.1),
    "ProximalAdagrad": lambda: gpuopt.ProximalAdagradOptimizer(0.1),
}


def action_for(case: str) -> Callable[[], Any]:
    if case in CASES:
        return CASES[case]
    if found := re.fullmatch(r"run-time: sparse (.*) (\w+) resource=\w+", case):
        defect, name = found.groups()
        return lambda: apply(SPARSE_DEFECTS[defect](), SPARSE_OPTIMIZERS[name]())
    if found := re.fullmatch(
        r"(\w+) python-float hyper on (\w+) var resource=\w+ sparse=(\w+)", case
    ):
        name, dtype, sparse = found.groups()
        gradient: Any = ones(3, 2, dtype=np.dtype(dtype))
        if sparse == "True":
            gradient = IndexedSlices(gradient[:1], [0])
        return lambda: apply(gradient, PROXIMAL[name](), dtype=np.dtype(dtype))
    raise KeyError(f"no action is written down for the golden case {case!r}")


@pytest.mark.parametrize(
    "case",
    [case for case in read_json("errors.json") if not case["case"].startswith(OUT_OF_SCOPE)],
    ids=lambda case: case["case"],
)
def test_refuses_and_accepts_what_tensorflow_does(case: dict[str, Any]) -> None:
    listed = exceptions("errors")
    action = action_for(case["case"])
    expected = () if case["raised"] is None else COUNTERPARTS[case["raised"]]
    outcome: Exception | None = None
    try:
        action()
    except Exception as raised:
        outcome = raised
    agrees = outcome is None if not expected else isinstance(outcome, expected)
    if case["case"] in listed:
        assert not agrees, "TensorFlow's outcome is reproduced: take it off exceptions.toml"
    else:
        assert agrees, f"{outcome!r} instead of {case['raised']}: {case.get('message')}"
