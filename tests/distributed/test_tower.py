"""Towers together do what TensorFlow's do, and what one tower does with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from golden_cases import check, exceptions, read_json

import gpuopt
from gpuopt import IndexedSlices, TowerOptimizer, Variable, embedding_lookup, replicate
from gpuopt.distributed import Reduction
from gpuopt.step.replica_context import replica_context

# The model's own float32 sums are in it too, in another order than TensorFlow's.
MODEL_TOLERANCE = 2e-5
CPUS = ["cpu", "cpu"]

GOLDEN_OPTIMIZERS: dict[str, Callable[[], gpuopt.Optimizer]] = {
    "GradientDescent": lambda: gpuopt.GradientDescentOptimizer(0.1),
    "Momentum": lambda: gpuopt.MomentumOptimizer(0.1, 0.9),
    "Adam": lambda: gpuopt.AdamOptimizer(0.1),
}


def new_step() -> Variable:
    return Variable(0, name="global_step", trainable=False, dtype=np.int64)


@pytest.mark.parametrize("case", read_json("tower.json"), ids=lambda case: case["tag"])
def test_trains_as_tensorflows_towers_do(case: dict[str, Any]) -> None:
    w = Variable(np.array(case["w0"], np.float32), name="w")
    b = Variable(np.array(case["b0"], np.float32), name="b")
    step = new_step()
    optimizer = TowerOptimizer(GOLDEN_OPTIMIZERS[case["train_op"]])
    reduction = Reduction(case["loss_reduction"])
    features = np.array(case["features"], np.int64 if case["sparse"] else np.float32)
    labels = np.array(case["labels"], np.float32)

    def model_fn(features: Any, labels: Any) -> Any:
        values = []

        def loss() -> Any:
            product = embedding_lookup(w, features) if case["sparse"] else features @ w
            squares = (product.sum(axis=1) + b - labels) ** 2
            value = squares.sum() if reduction is Reduction.SUM else squares.mean()
            values.append(value)
            return value

        optimizer.minimize(loss, global_step=step, var_list=[w, b])
        return float(getattr(values[0], "_value", values[0]))

    train = replicate(model_fn, case["loss_reduction"], ["cpu"] * case["towers"])
    assert (case["second_optimizer"], optimizer.get_name()) == (False, case["train_op"])
    for number, expected in enumerate(case["steps"]):
        if number:
            loss = train(features, labels)
            assert TowerOptimizer.has_been_used()
            assert loss == pytest.approx(expected["loss_fetched"], rel=1e-5)
        own = {"w": w, "b": b, "global_step": step}
        own |= {variable.name: variable for variable in optimizer.variables()}
        for name, value in expected.items():
            if name == "loss_fetched" or (number == 0 and name not in own):
                continue  # TensorFlow makes its state before the first step
            key = f"{case['tag']}/{number}/{name}"
            check("tower", key, own[name].numpy(), value, MODEL_TOLERANCE)


# What TensorFlow refuses and accepts.


def model(optimizer: Any, w: Variable) -> Callable[..., None]:
    def model_fn(features: Any) -> None:
        optimizer.apply_gradients([(features.sum(axis=0), w)])

    return model_fn


def extra_call_in_the_last_tower() -> None:
    w, optimizer = Variable(np.zeros(2, np.float32)), TowerOptimizer(sgd())

    def model_fn(features: Any) -> None:
        for _ in range(1 + replica_context().replica_id):
            optimizer.apply_gradients([(features.sum(axis=0), w)])

    replicate(model_fn, Reduction.SUM, CPUS)(np.ones((2, 2), np.float32))


def sgd() -> gpuopt.Optimizer:
    return gpuopt.GradientDescentOptimizer(1.0)


def train(optimizer: Any, devices: list[str], batch_size: int = 2) -> None:
    w = Variable(np.zeros(2, np.float32))
    replicate(model(optimizer, w), Reduction.SUM, devices)(np.ones((batch_size, 2), np.float32))


CASES: dict[str, Callable[[], Any]] = {
    "loss_reduction NONE": lambda: replicate(print, Reduction.NONE, CPUS),
    "optimizer not wrapped, 2 devices": lambda: train(sgd(), CPUS),
    "optimizer not wrapped, 1 device ok": lambda: train(sgd(), ["cpu"]),
    "batch not divisible": lambda: train(TowerOptimizer(sgd()), CPUS, batch_size=3),
    "tower 2 makes extra optimizer call": extra_call_in_the_last_tower,
    "direct TowerOptimizer use w/o replicate (1 tower)": lambda: TowerOptimizer(
        sgd()
    ).apply_gradients([(np.ones(2, np.float32), Variable(np.zeros(2, np.float32)))]),
    "get_slot_names before": lambda: TowerOptimizer(sgd()).get_slot_names() == [],
}


@pytest.mark.contract
@pytest.mark.parametrize("case", read_json("tower_errors.json"), ids=lambda case: case["case"])
def test_refuses_and_accepts_what_tensorflow_does(case: dict[str, Any]) -> None:
    kinds = {None: (), "ValueError": ValueError, "IndexError": IndexError}
    outcome: Exception | None = None
    try:
        CASES[case["case"]]()
    except Exception as error:
        outcome = error
    expected: Any = kinds[case["raised"]]
    agrees = outcome is None if not expected else isinstance(outcome, expected)
    assert agrees != (case["case"] in exceptions("tower_errors")), repr(outcome)


# What towers promise.


@pytest.mark.parametrize(("towers", "reduction"), [(2, Reduction.SUM), (6, Reduction.MEAN)])
def test_towers_equal_one_tower_with_the_whole_batch(towers: int, reduction: Reduction) -> None:
    rng = np.random.default_rng(0)
    ids, labels = rng.integers(0, 5, 12), rng.standard_normal(12).astype(np.float32)
    weights = []
    for number in (1, towers):
        table = Variable(np.ones((5, 1), np.float32), name="table")
        bias = Variable(np.zeros(1, np.float32), name="bias")
        optimizer = TowerOptimizer(gpuopt.AdamOptimizer(0.1))

        def model_fn(
            ids: Any,
            labels: Any,
            table: Any = table,
            bias: Any = bias,
            optimizer: Any = optimizer,
        ) -> None:
            def loss() -> Any:
                squares = (embedding_lookup(table, ids)[:, 0] + bias - labels) ** 2
                return squares.sum() if reduction is Reduction.SUM else squares.mean()

            optimizer.minimize(loss, var_list=[table, bias])

        run = replicate(model_fn, reduction, ["cpu"] * number)
        for _ in range(5):
            run(ids, labels)
        weights.append(np.concatenate([table.numpy().ravel(), bias.numpy()]))
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-5, atol=1e-6)


def test_every_tower_reads_the_weights_from_before_the_step() -> None:
    w, other = Variable(np.zeros(1, np.float32)), Variable(np.zeros(1, np.float32))
    first, second = TowerOptimizer(sgd()), TowerOptimizer(sgd())
    seen: list[list[float]] = []

    def model_fn(batch: Any) -> None:
        first.apply_gradients([(np.ones(1, np.float32), w)])
        seen.append([float(w[0]), *batch.tolist()])
        second.apply_gradients([(np.full(1, 2, np.float32), other)])

    replicate(model_fn, Reduction.SUM, ["cpu"] * 3)(np.arange(6))
    assert seen == [[0, 0, 1], [0, 2, 3], [0, 4, 5]]
    assert (w.numpy().tolist(), other.numpy().tolist()) == ([-3], [-6])


def test_a_variable_with_a_gradient_in_some_towers_gets_their_sum() -> None:
    a, b, c = (Variable(np.zeros(1, np.float32), name=name) for name in "abc")
    optimizer, step = TowerOptimizer(sgd()), new_step()

    def model_fn() -> None:
        tower = replica_context().replica_id
        one = np.ones(1, np.float32)
        if tower == 2:
            optimizer.apply_gradients([(None, a)], step)
        else:
            optimizer.apply_gradients([(one, a), (one if tower else None, b), (None, c)], step)

    replicate(model_fn, Reduction.SUM, ["cpu"] * 3)()
    assert [float(variable[0]) for variable in (a, b, c)] == [-2, -1, 0]
    assert int(step) == 1


def test_rows_of_all_towers_are_summed_by_the_optimizer() -> None:
    table, optimizer = Variable(np.zeros((4, 1), np.float32)), TowerOptimizer(sgd())

    def model_fn(ids: Any) -> None:
        slices = IndexedSlices(np.ones((len(ids), 1), np.float32), ids)
        optimizer.apply_gradients([(slices, table)])

    replicate(model_fn, Reduction.SUM, CPUS)(np.array([3, 0, 0, 0]))
    assert table.numpy().ravel().tolist() == [-3, 0, 0, -1]


def test_gradients_are_only_read_and_arrays_do_not_mix_with_slices() -> None:
    w, optimizer = Variable(np.zeros((2, 1), np.float32)), TowerOptimizer(sgd())
    shared = np.ones((2, 1), np.float32)
    replicate(lambda: optimizer.apply_gradients([(shared, w)]), Reduction.SUM, ["cpu"] * 3)()
    assert shared.tolist() == [[1], [1]]
    assert w.numpy().tolist() == [[-3], [-3]]

    def mixed() -> None:
        gradients = [shared, IndexedSlices(shared[:1], [0])]
        optimizer.apply_gradients([(gradients[replica_context().replica_id], w)])

    with pytest.raises(ValueError, match="either all arrays or all IndexedSlices"):
        replicate(mixed, Reduction.SUM, CPUS)()
    assert w.numpy().tolist() == [[-3], [-3]]


class Batch(NamedTuple):
    features: Any
    weight: Any


def test_batches_in_nested_structures_are_split_and_other_values_go_to_every_tower() -> None:
    seen: list[Any] = []
    w = Variable(np.zeros(2, np.float32))
    batch = {"pair": (np.arange(4), [np.arange(8).reshape(4, 2)]), "rate": 0.5, "w": w}
    replicate(lambda *args, **named: seen.append((args, named)), Reduction.SUM, CPUS)(
        batch, Batch(np.arange(2), np.float32(3)), training=True
    )
    (first, named), (second, _) = seen
    assert named == {"training": True}
    assert [first[0]["pair"][0].tolist(), second[0]["pair"][0].tolist()] == [[0, 1], [2, 3]]
    assert second[0]["pair"][1][0].tolist() == [[4, 5], [6, 7]]
    assert (first[0]["rate"], first[0]["w"]) == (0.5, w)
    assert (second[1].features.tolist(), second[1].weight) == ([1], 3)


def test_an_optimizer_factory_is_called_once_when_first_needed() -> None:
    made: list[gpuopt.Optimizer] = []

    def make() -> gpuopt.Optimizer:
        made.append(gpuopt.AdamOptimizer(0.1, name="Mine"))
        return made[-1]

    optimizer = TowerOptimizer(make)
    assert made == []
    w = Variable(np.zeros(1, np.float32), name="w")
    for _ in range(2):
        optimizer.apply_gradients([(np.ones(1, np.float32), w)])
    assert len(made) == 1
    assert (optimizer.get_name(), optimizer.get_slot_names()) == ("Mine", ["m", "v"])
    assert optimizer.get_slot(w, "m") is made[0].get_slot(w, "m")
    assert TowerOptimizer.COLLECTION_FOR_GRAPH_STATES == "replicate_model_fn_graph_states"
    with pytest.raises(TypeError, match="the optimizer to wrap must be an Optimizer, got"):
        TowerOptimizer(lambda: "Adam").get_name()  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match=r"the optimizer to wrap must be an Optimizer, got 0\.1"):
        TowerOptimizer(0.1)  # type: ignore[arg-type]


def test_has_been_used_is_about_the_latest_call_of_the_towers() -> None:
    train(TowerOptimizer(sgd()), CPUS)
    assert TowerOptimizer.has_been_used()
    replicate(lambda: None, Reduction.SUM, CPUS)()
    assert not TowerOptimizer.has_been_used()


def test_sync_replicas_work_inside_towers() -> None:
    w, step = Variable(np.zeros(2, np.float32)), new_step()
    sync = gpuopt.SyncReplicasOptimizer(sgd(), 1)
    optimizer = TowerOptimizer(sync)

    def model_fn(features: Any) -> None:
        optimizer.apply_gradients([(features.sum(axis=0), w)], step)

    with sync.start(step), sync.worker(0):
        replicate(model_fn, Reduction.SUM, CPUS)(np.ones((4, 2), np.float32))
    assert (w.numpy().tolist(), int(step)) == ([-4, -4], 1)


def test_a_failed_tower_updates_nothing_and_leaves_nothing_behind() -> None:
    w, optimizer = Variable(np.zeros(2, np.float32)), TowerOptimizer(sgd())

    def model_fn(features: Any) -> None:
        optimizer.apply_gradients([(features.sum(axis=0), w)])
        if replica_context().replica_id == 1:
            raise KeyError("lost")

    with pytest.raises(KeyError):
        replicate(model_fn, Reduction.SUM, CPUS)(np.ones((2, 2), np.float32))
    assert w.numpy().tolist() == [0, 0]
    assert replica_context().strategy is None
    replicate(model(optimizer, w), Reduction.SUM, CPUS)(np.ones((2, 2), np.float32))
    assert w.numpy().tolist() == [-2, -2]


@pytest.mark.contract
def test_wrong_towers_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one device"):
        replicate(print, Reduction.SUM, [])
    with pytest.raises(ValueError, match=r"one of \['weighted_sum', .*'average'"):
        replicate(print, "average")
    w = Variable(np.zeros(2, np.float32))

    def makes_its_own() -> None:
        TowerOptimizer(sgd()).apply_gradients([(np.ones(2, np.float32), w)])

    with pytest.raises(ValueError, match="outside the model function"):
        replicate(makes_its_own, Reduction.SUM, CPUS)()
    nested = replicate(replicate(print, Reduction.SUM, CPUS), Reduction.SUM, CPUS)
    with pytest.raises(RuntimeError, match="inside a tower of another"):
        nested(np.ones(4))


@pytest.mark.parametrize("policy", ["propagate", "skip"])
def test_towers_clip_the_gradients_of_all_to_one_norm(policy: Any) -> None:
    w, step = Variable([0.0, 0.0], name="w"), Variable(0, name="step")
    optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_norm=1.0, on_nonfinite=policy)
    tower = gpuopt.TowerOptimizer(optimizer)

    def model(gradient: Any) -> Any:
        tower.minimize(lambda: np.sum(w.value() * gradient[0]), step, [w])
        return np.float32(0)

    train = gpuopt.replicate(model, "weighted_sum", devices=["cpu", "cpu"])
    train(np.float32([[3, 0], [0, 4]]))
    # Of their sum, which is [3, 4].
    assert optimizer.global_norm == 5
    np.testing.assert_allclose(w.numpy(), [-0.6, -0.8], rtol=1e-6)
    if policy == "skip":
        train(np.float32([[3, 0], [0, np.nan]]))
        np.testing.assert_allclose(w.numpy(), [-0.6, -0.8], rtol=1e-6)
        assert int(step) == 1
