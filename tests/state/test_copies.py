"""Copies and pickles of optimizers, with their variables and without."""

from __future__ import annotations

import copy
import inspect
import pickle
from array import array as PythonArray
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from every_optimizer import ARGUMENTS
from ml_dtypes import bfloat16
from spawned import one_process

import gpuopt
from gpuopt import ParameterGroup, Variable

Model = dict[str, Any]


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


# Of other arguments than a rate: a step, functions of it, several rates of decay, and sums.
OPTIMIZERS = ["AdagradDA", "AddSign", "Adam", "LARS", "ScheduleFreeAdamW", "TorchNAdam"]
BOTH = pytest.mark.parametrize("copied", [copy.deepcopy, pickled])


def make(name: str, step: Variable, **more: Any) -> Any:
    name = f"{name}Optimizer"
    cls = getattr(gpuopt, name)
    if "global_step" in inspect.signature(cls).parameters:
        more["global_step"] = step
    return cls(**{"learning_rate": 0.1, **ARGUMENTS.get(name, {}), **more})


def gradient(number: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).normal(size=shape).astype(np.float32)


def train(model: Model, steps: range) -> None:
    for number in steps:
        pairs: list[Any] = [(gradient(number, each.shape), each) for each in model["variables"]]
        rows = gpuopt.IndexedSlices(gradient(number, (3, 2)), [1, 4, 1])
        pairs[-1] = rows, model["variables"][-1]
        model["optimizer"].apply_gradients(pairs, global_step=model["step"])


def model_of(make_optimizer: Callable[[Any], Any]) -> Model:
    variables = [
        Variable(gradient(91, (4, 3)), name="w"),
        Variable(gradient(92, (3,)), name="b"),
        Variable(gradient(93, (6, 2)), name="table"),
    ]
    step = Variable(0, name="step", trainable=False)
    return {"variables": variables, "step": step, "optimizer": make_optimizer(step)}


def values(model: Model) -> dict[str, bytes]:
    """Returns the bits of the variables and of all state, by their names in the first model."""
    names = ["w", "b", "table"]
    variables = dict(zip(names, model["variables"], strict=True))
    state = model["optimizer"].state_dict(variables)
    slots = {
        f"{name}/{slot}": value
        for slot, of_slot in state["slots"].items()
        for name, value in of_slot.items()
    }
    read = {name: each.numpy() for name, each in {**variables, "step": model["step"]}.items()}
    found = {**read, **slots, **state["non_slots"]}
    return {name: value.tobytes() for name, value in found.items()}


@pytest.mark.parametrize(
    ("name", "copied"),
    [*((name, pickled) for name in OPTIMIZERS), ("Adam", copy.deepcopy)],
)
def test_a_model_copied_with_its_optimizer_continues_to_the_bit(name: str, copied: Any) -> None:
    model = model_of(lambda step: make(name, step))
    train(model, range(3))
    other = copied(model)
    assert values(other) == values(model)
    train(model, range(3, 6))
    between = values(other)
    assert between != values(model)
    train(other, range(3, 6))
    assert values(other) == values(model)


@BOTH
def test_what_is_a_copys_is_its_own(copied: Any) -> None:
    model = model_of(lambda step: gpuopt.AdamOptimizer(0.1))
    train(model, range(2))
    other = copied(model)
    mine = [model["optimizer"].get_slot(each, "m") for each in model["variables"]]
    theirs = [other["optimizer"].get_slot(each, "m") for each in other["variables"]]
    assert [slot.name for slot in mine] == ["w/Adam", "b/Adam", "table/Adam"]
    assert [slot.name for slot in theirs] == ["w_1/Adam", "b_1/Adam", "table_1/Adam"]
    assert not [s for s in mine for t in theirs if np.shares_memory(s.value(), t.value())]
    train(other, range(2, 3))
    assert len(other["optimizer"].variables()) == len(model["optimizer"].variables()) == 8
    assert other["optimizer"].state.lock is not model["optimizer"].state.lock


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_an_optimizer_copied_alone_continues_with_variables_of_the_names(copied: Any) -> None:
    model = model_of(lambda step: gpuopt.AdamOptimizer(0.1))
    train(model, range(3))
    other = {**model, "optimizer": copied(model["optimizer"])}
    assert values(other) == values(model)
    again = copy.deepcopy(model)
    train(again, range(3, 5))
    train(other, range(3, 5))
    assert values(other) == values(again)


def test_a_shallow_copy_has_slots_of_its_own_of_the_same_variables() -> None:
    w = Variable([1.0, 2.0], name="w")
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    optimizer.apply_gradients([([1.0, 1.0], w)])
    other = copy.copy(optimizer)
    other.apply_gradients([([1.0, 1.0], w)])
    assert other.get_slot(w, "momentum").numpy().tolist() == np.float32([1.9, 1.9]).tolist()
    assert optimizer.get_slot(w, "momentum").numpy().tolist() == [1, 1]


def test_slots_of_a_copy_go_with_their_variables_once_it_has_stepped() -> None:
    model = model_of(lambda step: gpuopt.MomentumOptimizer(0.1, 0.9))
    train(model, range(1))
    other = copy.deepcopy(model)
    train(other, range(1, 2))
    optimizer = other["optimizer"]
    del other
    assert optimizer.variables() == []
    assert not optimizer.state.waiting_slots


@BOTH
def test_settings_are_those_of_the_moment(copied: Any) -> None:
    groups = [ParameterGroup("^b", learning_rate=0.5)]
    optimizer = gpuopt.RAdamOptimizer(0.1, groups=groups, clip_norm=2.0, name="mine")
    optimizer.hyperparameters["learning_rate"] = 0.25
    optimizer.groups[0]["learning_rate"] = 0.125
    other = copied(optimizer)
    assert repr(other) == repr(optimizer)
    assert other.hyperparameters == optimizer.hyperparameters
    assert other.groups[0] == optimizer.groups[0]
    other.hyperparameters["learning_rate"] = 1.0
    assert optimizer.hyperparameters["learning_rate"] == 0.25
    assert copied(other).hyperparameters["learning_rate"] == 1.0


@BOTH
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_group_that_lists_variables_has_the_copies(copied: Any, is_alone: bool) -> None:
    w, b = Variable([1.0], name="w"), Variable([1.0], name="b")
    groups = [ParameterGroup(variables=[b], learning_rate=0.5)]
    optimizer = gpuopt.GradientDescentOptimizer(0.25, groups=groups)
    if is_alone:
        optimizer = copied(optimizer)
    else:
        optimizer, w, b = copied([optimizer, w, b])
    optimizer.apply_gradients([([1.0], w), ([1.0], b)])
    assert (float(w[0]), float(b[0])) == (0.75, 0.5)


def rate() -> float:
    return 0.5


def test_functions_that_a_pickle_cannot_name_are_refused_by_name() -> None:
    pickled(gpuopt.AdamOptimizer(rate))
    makers: dict[str, Callable[[Any], Any]] = {
        "learning_rate": gpuopt.AdamOptimizer,
        "beta2": lambda f: gpuopt.AdamOptimizer(0.1, beta2=f),
        'epsilon of group "w"': lambda f: gpuopt.AdamOptimizer(
            groups=[ParameterGroup("w", epsilon=f)]
        ),
        "sign_decay_fn": lambda f: gpuopt.AddSignOptimizer(sign_decay_fn=f),
    }
    for name, make_optimizer in makers.items():
        optimizer = make_optimizer(lambda *step: 0.5)
        with pytest.raises(TypeError, match=f"Optimizer cannot be pickled: its {name} is <functio"):
            pickle.dumps(optimizer)
        assert repr(copy.deepcopy(optimizer)) == repr(optimizer)
    optimizer = gpuopt.TorchAdamWOptimizer(rate)
    pickled(optimizer)
    optimizer.hyperparameters["learning_rate"] = lambda: 0.5
    with pytest.raises(TypeError, match="its learning_rate is"):
        pickle.dumps(optimizer)


@BOTH
def test_a_schedule_follows_the_copy_of_its_step(copied: Any) -> None:
    def make_optimizer(step: Variable) -> Any:
        return gpuopt.GradientDescentOptimizer(gpuopt.exponential_decay(0.5, step, 1, 0.5))

    model = model_of(make_optimizer)
    train(model, range(2))
    other = copied(model)
    train(model, range(2, 4))
    train(other, range(2, 4))
    assert values(other) == values(model)


def arrays_of(kind: str) -> list[Any]:
    """Returns arrays of the shapes in `model_of`."""
    arrays = [gradient(91, (4, 3)), gradient(92, (3,)), gradient(93, (6, 2))]
    if kind == "own their memory":
        return arrays
    if kind == "transposed":
        return [array.T.copy().T for array in arrays]
    if kind == "bfloat16":
        return [array.astype(bfloat16) for array in arrays]
    flat = np.concatenate([array.ravel() for array in arrays])
    return [flat[:12].reshape(4, 3), flat[12:15], flat[15:].reshape(6, 2)]


ARRAYS = ["own their memory", "transposed", "bfloat16", "views of one"]
COPIED = {
    "deepcopy": copy.deepcopy,
    **{
        f"protocol {number}": lambda value, number=number: pickle.loads(
            pickle.dumps(value, protocol=number)
        )
        for number in range(2, pickle.HIGHEST_PROTOCOL + 1)
    },
}


def train_arrays(model: Any, steps: range) -> None:
    arrays, optimizer = model["arrays"], model["optimizer"]
    for number in steps:
        pairs: list[Any] = [(gradient(number, a.shape).astype(a.dtype), a) for a in arrays]
        rows = gradient(number, (3, 2)).astype(arrays[-1].dtype)
        pairs[-1] = gpuopt.IndexedSlices(rows, [1, 4, 1]), arrays[-1]
        optimizer.apply_gradients(pairs)


def bits(model: Any) -> list[bytes]:
    return [array.tobytes() for array in model["arrays"]]


@pytest.mark.parametrize(
    ("copied", "kind", "is_first"),
    [
        *((copied, "views of one", True) for copied in COPIED.values()),
        *((copy.deepcopy, kind, False) for kind in ARRAYS),
        *((pickled, kind, False) for kind in ARRAYS),
    ],
)
def test_arrays_copied_with_their_optimizer_continue_to_the_bit(
    copied: Any, kind: str, is_first: bool
) -> None:
    both = {"arrays": arrays_of(kind), "optimizer": gpuopt.AdamOptimizer(0.1)}
    model = dict(reversed(both.items())) if is_first else both
    train_arrays(model, range(3))
    other = copied(model)
    train_arrays(model, range(3, 6))
    assert bits(other) != bits(model)
    train_arrays(other, range(3, 6))
    assert bits(other) == bits(model)
    assert len(other["optimizer"].variables()) == len(model["optimizer"].variables()) == 8
    again = copied(other)
    train_arrays(again, range(6, 8))
    train_arrays(model, range(6, 8))
    assert bits(again) == bits(model)


def test_an_optimizer_of_arrays_copied_alone_goes_on_with_them() -> None:
    for copied in (copy.copy, copy.deepcopy):
        model: Any = {"arrays": arrays_of("views of one"), "optimizer": gpuopt.AdamOptimizer(0.1)}
        train_arrays(model, range(3))
        again = copy.deepcopy(model)
        alone = copied(model["optimizer"])
        train_arrays({**model, "optimizer": alone}, range(3, 5))
        train_arrays(again, range(3, 5))
        assert bits(again) == bits(model)
        assert len(alone.variables()) == 8


def test_an_optimizer_that_is_unpickled_without_its_arrays_makes_no_step() -> None:
    model: Any = {"arrays": arrays_of("own their memory"), "optimizer": gpuopt.AdamOptimizer(0.1)}
    train_arrays(model, range(3))
    state = model["optimizer"].state_dict(dict(zip("wbt", model["arrays"], strict=True)))
    alone = pickled(model["optimizer"])
    before = bits(model)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r'of "Adam" came out of a copy or a pickle without .*"array_of_4x3'
        ):
            train_arrays({**model, "optimizer": alone}, range(3, 4))
    assert bits(model) == before
    again = copy.deepcopy(model)
    alone.load_state_dict(state, dict(zip("wbt", model["arrays"], strict=True)))
    train_arrays({**model, "optimizer": alone}, range(3, 5))
    train_arrays(again, range(3, 5))
    assert bits(again) == bits(model)


def test_a_new_array_does_not_get_the_slots_of_one_that_is_gone() -> None:
    w = np.ones(3, np.float32)
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    optimizer.apply_gradients([(w.copy(), w)])
    other = copy.deepcopy(optimizer)
    del w
    v = np.ones(3, np.float32)
    with pytest.raises(ValueError, match="without the arrays"):
        other.apply_gradients([(v.copy(), v)])


def test_arrays_that_a_program_drops_take_their_slots_along() -> None:
    w, v = np.ones(3, np.float32), np.ones(3, np.float32)
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    optimizer.apply_gradients([(2 * w, w), (w.copy(), v)])
    [kept, _, other] = pickled([v, w, optimizer])
    del _
    new = np.ones(3, np.float32)
    other.apply_gradients([(new.copy(), kept), (new.copy(), new)])
    [slot, of_new] = [other.get_slot(each, "momentum").numpy() for each in (kept, new)]
    assert slot.tolist() == np.full(3, 0.9 + 1, np.float32).tolist()
    assert of_new.tolist() == [1, 1, 1]


def test_two_optimizers_of_one_array_are_copied_with_one_copy() -> None:
    w = np.ones(3, np.float32)
    optimizers = [gpuopt.MomentumOptimizer(0.1, 0.9), gpuopt.AdamOptimizer(0.1)]
    for each in optimizers:
        each.apply_gradients([(w.copy(), w)])
    one, v, two = copy.deepcopy([optimizers[0], w, optimizers[1]])
    for each, array in [(one, v), (two, v), (optimizers[0], w), (optimizers[1], w)]:
        each.apply_gradients([(np.ones(3, np.float32), array)])
    assert v.tobytes() == w.tobytes()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_slots_of_views_that_are_made_anew_are_refused(copied: Any) -> None:
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    flat = np.ones(6, np.float32)
    optimizer.apply_gradients([(np.ones(3, np.float32), flat[:3])])
    with pytest.raises(ValueError, match=r'"array_of_3\w*" cannot be copied .*view of another'):
        copied(optimizer)
    kept = flat[:3]
    group = ParameterGroup(variables=[flat[3:]], learning_rate=0.5)
    with pytest.raises(ValueError, match="view of another array"):
        copy.deepcopy(group)
    assert kept.tolist() == [np.float32(0.9)] * 3


def test_a_view_that_is_kept_is_copied_though_another_of_its_memory_was_seen_first() -> None:
    memory = PythonArray("f", [1, 1, 1])
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    optimizer.apply_gradients([(np.ones(3, np.float32), np.frombuffer(memory, np.float32))])
    view = np.frombuffer(memory, np.float32)
    optimizer.apply_gradients([(np.ones(3, np.float32), view)])
    other, twin = copy.deepcopy((optimizer, view))
    for one, values in ((optimizer, view), (other, twin)):
        one.apply_gradients([(np.ones(3, np.float32), values)])
    assert twin.tolist() == view.tolist()


@BOTH
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_group_that_lists_arrays_has_their_copies(copied: Any, is_alone: bool) -> None:
    w, b = np.ones(1, np.float32), np.ones(1, np.float32)
    groups = [ParameterGroup(variables=[b], learning_rate=0.5)]
    optimizer = gpuopt.GradientDescentOptimizer(0.25, groups=groups)
    if not is_alone:
        optimizer, w, b = copied([optimizer, w, b])
    else:
        optimizer = copied(optimizer)
    if is_alone and copied is not copy.deepcopy:
        for _ in range(2):
            with pytest.raises(ValueError, match=r'group "array_of_1.*" came out of .* without'):
                optimizer.apply_gradients([(np.ones(1, np.float32), w)])
        assert float(w[0]) == 1
        return
    optimizer.apply_gradients([(np.ones(1, np.float32), w), (np.ones(1, np.float32), b)])
    assert (float(w[0]), float(b[0])) == (0.75, 0.5)


def continue_with_arrays_elsewhere(model: Any) -> list[bytes]:
    train_arrays(model, range(3, 5))
    return bits(model)


def test_arrays_and_their_optimizer_go_to_a_process_that_is_spawned() -> None:
    model = {"optimizer": gpuopt.AdamOptimizer(0.1), "arrays": arrays_of("views of one")}
    train_arrays(model, range(3))
    with one_process() as pool:
        elsewhere = pool.submit(continue_with_arrays_elsewhere, model).result()
    train_arrays(model, range(3, 5))
    assert elsewhere == bits(model)


@pytest.mark.gpu
@BOTH
def test_arrays_of_a_gpu_are_copied_with_their_optimizer(copied: Any) -> None:
    cupy: Any = pytest.importorskip("cupy")
    arrays = [cupy.ones((4, 3), np.float32), cupy.ones(6, np.float32)[:3]]
    model = {"arrays": arrays, "optimizer": gpuopt.AdamOptimizer(0.1)}

    def step(one: Any) -> list[Any]:
        pairs = [(cupy.full(a.shape, 0.5, np.float32), a) for a in one["arrays"]]
        one["optimizer"].apply_gradients(pairs)
        return [cupy.asnumpy(array).tolist() for array in one["arrays"]]

    step(model)
    other = copied(model)
    assert step(other) == step(model)
    assert len(other["optimizer"].variables()) == 6


def test_a_repr_shows_hyperparameters_as_they_are_now_and_what_was_given() -> None:
    optimizer: Any = gpuopt.AdamOptimizer(0.1, clip_norm=2.0, name="mine")
    common = "beta1=0.9, beta2=0.999, epsilon=1e-08, name='mine', clip_norm=2.0"
    assert repr(optimizer) == f"AdamOptimizer(learning_rate=0.1, {common})"
    optimizer.hyperparameters["learning_rate"] = 0.05
    assert repr(optimizer) == f"AdamOptimizer(learning_rate=0.05, {common})"
    optimizer = gpuopt.TorchSGDOptimizer(0.5, groups=iter([ParameterGroup("b", learning_rate=1.0)]))
    optimizer.groups[0]["learning_rate"] = 0.25
    assert repr(optimizer).endswith(", groups=[ParameterGroup('b', learning_rate=0.25)])")
    assert repr(OfAUser(0.5)) == "OfAUser(rate=0.5)"
    wrapper = gpuopt.MultitaskOptimizerWrapper(OfAUser(0.5))
    assert repr(wrapper) == "MultitaskOptimizerWrapper(opt=OfAUser(rate=0.5), name='OfAUser')"


def test_savers_and_averages_are_shown_with_their_settings() -> None:
    averages = gpuopt.ExponentialMovingAverage(0.9, name="slow")
    assert repr(averages) == "ExponentialMovingAverage(decay=0.9, name='slow')"
    saver = gpuopt.Saver([Variable([1.0])], optimizers=[gpuopt.AdamOptimizer()])
    assert repr(saver) == "<Saver of 1 variables; optimizers: ['Adam']>"
    assert repr(gpuopt.Saver()) == "<Saver of all variables; optimizers: all>"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_strategy_is_not_copied(copied: Any) -> None:
    with pytest.raises(TypeError, match="MirroredStrategy cannot be copied or pickled: its repl"):
        copied(gpuopt.MirroredStrategy(["cpu"]))


@BOTH
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("slot_bits", 8),
        ("masters", "float32"),
        ("masters", "remainder"),
        ("stochastic_rounding", 7),
    ],
)
def test_a_copy_alone_takes_its_state_in_few_bits_along(
    copied: Any, option: str, value: Any
) -> None:
    common: Any = {option: value}
    dtype = np.float32 if option == "slot_bits" else bfloat16
    w = Variable(gradient(1, (300,)).astype(dtype), name="w")
    optimizer = gpuopt.AdamOptimizer(0.1, **common)
    for number in range(3):
        optimizer.apply_gradients([(gradient(number, (300,)).astype(dtype), w)])
    alone, (optimizer, v) = copied(optimizer), copied((optimizer, w))
    for number in range(3, 6):
        alone.apply_gradients([(gradient(number, (300,)).astype(dtype), w)])
        optimizer.apply_gradients([(gradient(number, (300,)).astype(dtype), v)])
    assert w.numpy().tobytes() == v.numpy().tobytes()


def test_a_copy_in_the_middle_of_a_step_is_refused() -> None:
    class Copies(gpuopt.GradientDescentOptimizer):
        def _prepare(self) -> None:
            super()._prepare()

        def _finish(self, update_ops: Any, name_scope: str) -> None:
            copy.copy(self)

    w = Variable([1.0])
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        Copies(0.5).apply_gradients([([1.0], w)])


class OfAUser(gpuopt.Optimizer):
    def __init__(self, rate: float) -> None:
        super().__init__(False, "OfAUser")
        self._rate = rate

    def _create_slots(self, var_list: Any) -> None:
        for variable in var_list:
            self._zeros_slot(variable, "sum", self._name)

    def _apply_dense(self, grad: Any, var: Variable) -> None:
        total = self.get_slot(var, "sum")
        assert total is not None
        total.assign_add(grad)
        var.assign_sub(self._rate * total.numpy())


@BOTH
def test_an_optimizer_of_a_users_own_is_copied_with_its_slots(copied: Any) -> None:
    w = Variable([1.0], name="w")
    optimizer = OfAUser(0.5)
    optimizer.apply_gradients([([1.0], w)])
    other, v = copied((optimizer, w))
    other.apply_gradients([([1.0], v)])
    assert (float(w[0]), float(v[0])) == (0.5, -0.5)


@BOTH
def test_a_run_of_torch_keeps_the_epsilon_of_its_own_steps(copied: Any) -> None:
    def state_of_torch() -> Any:
        moments = {"step": 3.0, "exp_avg": np.float32([0.1]), "exp_avg_sq": np.float32([0.01])}
        group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 0.5, "weight_decay": 0, "amsgrad": False}
        group |= {"maximize": False, "params": [0]}
        return {"state": {0: moments}, "param_groups": [group]}

    w = Variable([1.0], name="w")
    optimizer = gpuopt.optimizer_from_torch(state_of_torch(), [w])
    assert "epsilon=EpsilonOfTorch(0.5, 'beta2_power')" in repr(optimizer)
    other, v = copied((optimizer, w))
    for _ in range(3):
        optimizer.apply_gradients([([1.0], w)])
    before = float(v[0])
    optimizers = [(other, v), copied((other, v))]
    for each, variable in optimizers:
        for _ in range(3):
            each.apply_gradients([([1.0], variable)])
    assert before == 1.0
    assert float(v[0]) == float(optimizers[1][1][0]) == float(w[0])


def continue_elsewhere(model: Model) -> dict[str, bytes]:
    train(model, range(3, 5))
    assert [each.name for each in model["variables"]] == ["w", "b", "table"]
    return values(model)


def test_a_model_and_its_optimizer_go_to_a_process_that_is_spawned() -> None:
    model = model_of(lambda step: gpuopt.AdamOptimizer(rate, catch_up=True))
    train(model, range(3))
    with one_process() as pool:
        elsewhere = pool.submit(continue_elsewhere, model).result()
    train(model, range(3, 5))
    assert elsewhere == values(model)


@pytest.mark.emulator
@BOTH
def test_a_model_on_gpus_is_copied_to_the_same_gpus(copied: Any, emulated_gpus: Any) -> None:
    def pair(model: Model, device: int) -> tuple[Any, Variable]:
        launcher = emulated_gpus[device]
        with launcher.device():
            return launcher.xp.ones((3,), np.float32), model["variables"][device]

    variables = [Variable([1.0, 2.0, 3.0], name="w", device=f"gpu:{n}") for n in range(2)]
    model = {"variables": variables, "optimizer": gpuopt.AdamOptimizer(0.1)}
    model["optimizer"].apply_gradients([pair(model, 0), pair(model, 1)])
    other = copied(model)
    assert [str(each.device) for each in other["variables"]] == ["gpu:0", "gpu:1"]
    for each in (model, other):
        each["optimizer"].apply_gradients([pair(each, 0), pair(each, 1)])
    numbers = [[v.numpy().tolist() for v in each["variables"]] for each in (model, other)]
    assert numbers[0] == numbers[1]
    assert len(other["optimizer"].variables()) == 6


class ChangesRows:
    """Stands for another thread that changes rows in the middle of a copy."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def __deepcopy__(self, memo: Any) -> None:
        self.change()

    def __reduce__(self) -> Any:
        self.change()
        return list, ()


@pytest.mark.parametrize(
    ("how", "change", "what"),
    [
        ("deepcopy", "appends", "slots"),
        ("pickle", "permutes", "slots"),
        ("pickle", "appends", "averages"),
    ],
)
def test_rows_that_change_in_the_middle_of_a_copy_are_an_error(
    how: str, change: str, what: str
) -> None:
    table = Variable(np.arange(8.0, dtype=np.float32).reshape(4, 2), name="table")
    averages = gpuopt.ExponentialMovingAverage(0.5)
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
    optimizer.apply_gradients([(np.arange(8.0, dtype=np.float32).reshape(4, 2), table)])
    averages.apply([table])
    rows = gpuopt.rows(table)
    changes = {
        "appends": lambda: rows.append(np.ones((1, 2), np.float32)),
        "permutes": lambda: rows.keep([3, 2, 1, 0]),
    }
    last = optimizer if what == "slots" else averages

    def copied(*parts: Any) -> Any:
        return copy.deepcopy(parts) if how == "deepcopy" else pickle.loads(pickle.dumps(parts))

    with pytest.raises(RuntimeError, match=r'rows of "table.*" came or went'):
        copied(table, ChangesRows(changes[change]), last)
    # Changes before and after it are none in the middle: also of a copy of a copy.
    changes[change]()
    other, whole = copied(table, last)
    assert other.shape == table.shape
    other, whole = copied(other, whole)
    if what == "slots":
        np.testing.assert_array_equal(
            whole.get_slot(other, "momentum").numpy(), optimizer.get_slot(table, "momentum").numpy()
        )
