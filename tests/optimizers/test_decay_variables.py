"""`decay_variables`: which variables of an optimizer decay, for every optimizer that has decay."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import fake_cupy
import numpy as np
import pytest
import textbook
from array_slots import array_slots
from optimizers_by_hooks import ByHooks, RuleByHooks

import gpuopt
import gpuopt.optimizers
from gpuopt import Device, IndexedSlices, ParameterGroup, Variable
from gpuopt.backends import to_device
from gpuopt.optimizers.base import RuleOptimizer

pytestmark = pytest.mark.value

SHAPES = {"kernel": (4, 3), "bias": (3,), "scale": (), "embedding": (5, 2), "deep": (2, 2, 2)}
MATRICES = {"kernel", "embedding", "deep"}
EXTENDED = {
    "AdagradW": gpuopt.extend_with_decoupled_weight_decay(gpuopt.AdagradOptimizer),
    "LazyAdamW": gpuopt.extend_with_decoupled_weight_decay(gpuopt.LazyAdamOptimizer),
}
CLASSES = {
    name.removesuffix("Optimizer"): each
    for name, each in sorted(vars(gpuopt.optimizers).items())
    if inspect.isclass(each) and "weight_decay" in inspect.signature(each).parameters
} | EXTENDED
MORE: dict[str, dict[str, Any]] = {"Momentum": {"momentum": 0.5}, "MomentumW": {"momentum": 0.5}}
NUMBERS = {"learning_rate": 0.125, "weight_decay": 0.25}


HOOKS: dict[str, Callable[..., Any]] = {
    "hooks": lambda **more: gpuopt.extend_with_decoupled_weight_decay(ByHooks)(0.25, **more),
    "rule by hooks": lambda **more: gpuopt.extend_with_decoupled_weight_decay(RuleByHooks)(
        0.25, 0.5, **more
    ),
}


def made(name: str, **more: Any) -> Any:
    return CLASSES[name](**{**NUMBERS, **MORE.get(name, {}), **more})


def put(device: str, values: Any) -> Any:
    return to_device(np.asarray(values, np.float32), Device.parse(device))


def new_variables(device: str, names: Any = SHAPES) -> dict[str, Variable]:
    rng = np.random.default_rng(3)
    starts = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    return {name: Variable(starts[name], name=name, device=device) for name in names}


def new_gradients(device: str, names: Any = SHAPES, sparse: Any = ()) -> list[dict[str, Any]]:
    """Returns the gradients of three steps; those of tables of `sparse` name a row twice."""
    rng = np.random.default_rng(4)
    steps = []
    for _ in range(3):
        step: dict[str, Any] = {}
        for name, shape in SHAPES.items():
            dense, rows = rng.normal(size=shape), rng.normal(size=(3, *shape[1:]))
            given = put(device, dense)
            if name in sparse:
                at = to_device(np.array([1, 0, 1]), Device.parse(device))
                given = IndexedSlices(put(device, rows), at, shape)
            if name in names:
                step[name] = given
        steps.append(step)
    return steps


def train(optimizer: Any, variables: dict[str, Variable], steps: Any, **call: Any) -> None:
    for step in steps:
        optimizer.apply_gradients([(step[n], v) for n, v in variables.items()], **call)


def numbers_of(optimizer: Any, variables: dict[str, Variable]) -> dict[str, Any]:
    """Returns the weights and slots of each variable."""
    return {
        name: [
            variable.numpy(),
            *(optimizer.get_slot(variable, slot).numpy() for slot in array_slots(optimizer)),
        ]
        for name, variable in variables.items()
    }


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, arrays in expected.items():
        for one, other in zip(found[name], arrays, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)


def test_all_optimizers_that_decay_are_here() -> None:
    assert len(CLASSES) >= 13
    for name, each in CLASSES.items():
        assert "decay_variables" in inspect.signature(each).parameters, name


@pytest.mark.parametrize("sparse", [(), ("embedding", "deep")], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", CLASSES)
def test_others_are_updated_with_a_decay_of_0(name: str, sparse: Any, device: str) -> None:
    """Each variable gets what an optimizer of its own kind gives it, weights and slots."""
    variables, optimizer = new_variables(device), made(name, decay_variables="matrices")
    train(optimizer, variables, new_gradients(device, sparse=sparse))
    found = numbers_of(optimizer, variables)
    for is_matrix in (True, False):
        names = [each for each in SHAPES if (each in MATRICES) == is_matrix]
        alone = new_variables(device, names)
        other = made(name, weight_decay=0.25 if is_matrix else 0.0)
        train(other, alone, new_gradients(device, names, sparse))
        check_equal({each: found[each] for each in names}, numbers_of(other, alone))


FORMULAS = {
    "TorchAdamW": textbook.torch_adam_w,
    "Lion": textbook.lion,
    "TorchSGD": textbook.torch_sgd,
    "LAMB": textbook.lamb,
    "LARS": textbook.lars,
    "ScheduleFreeSGD": textbook.schedule_free_sgd,
    "ScheduleFreeAdamW": textbook.schedule_free_adam_w,
    "AdamW": textbook.adam,
    "AdagradW": textbook.adagrad,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_steps_are_the_formulas_with_and_without_decay(name: str, device: str) -> None:
    variables, steps = new_variables(device), new_gradients("cpu")
    starts = {each: v.numpy().astype(np.float64) for each, v in variables.items()}
    optimizer = made(name, decay_variables=lambda variable: variable.name in MATRICES)
    train(optimizer, variables, new_gradients(device))
    for each, variable in variables.items():
        history = [(t, step[each].astype(np.float64)) for t, step in enumerate(steps, 1)]
        decay = 0.25 if each in MATRICES else 0.0
        expected = FORMULAS[name](starts[each], history, learning_rate=0.125, weight_decay=decay)[
            "var"
        ]
        np.testing.assert_allclose(variable.numpy(), expected, rtol=2e-5, atol=1e-6, err_msg=each)
    assert not np.allclose(variables["kernel"].numpy(), starts["kernel"])


@pytest.mark.parametrize("make", HOOKS.values(), ids=HOOKS)
def test_hooks_know_which_variables_decay(make: Any, device: str) -> None:
    variables = new_variables(device)
    starts = {name: variable.numpy() for name, variable in variables.items()}
    ones = {name: put(device, np.ones(shape)) for name, shape in SHAPES.items()}
    train(make(decay_variables="matrices"), variables, [ones])
    for name, variable in variables.items():
        decay = np.float32(0.25 if name in MATRICES else 0.0)
        expected = starts[name] - decay * starts[name] - np.float32(0.5)
        np.testing.assert_array_equal(variable.numpy(), expected, err_msg=name)


@pytest.mark.parametrize("make", [*HOOKS.values(), gpuopt.AdamWOptimizer], ids=[*HOOKS, "rule"])
def test_a_function_is_called_once_for_each_variable(make: Any) -> None:
    asked: list[str] = []

    def decays(variable: Variable) -> np.bool_:
        asked.append(variable.name)
        return np.bool_(variable.shape == (4, 3))

    more = {} if make in HOOKS.values() else {"weight_decay": 0.25}
    optimizer, variables = make(decay_variables=decays, **more), new_variables("cpu")
    some = ["kernel", "bias"]
    train(optimizer, {each: variables[each] for each in some}, new_gradients("cpu", some))
    assert sorted(asked) == sorted(some)
    train(optimizer, variables, new_gradients("cpu", sparse=["embedding"]))
    assert sorted(asked) == sorted(SHAPES)


def test_groups_keep_their_numbers_whether_they_decay_or_not(device: str) -> None:
    groups = [
        ParameterGroup("kernel|bias", learning_rate=0.5, weight_decay=0.125, clip_norm=0.25),
        ParameterGroup("deep|scale", clip_value=0.25),
    ]
    variables = new_variables(device)
    optimizer = gpuopt.TorchAdamWOptimizer(
        0.125, weight_decay=0.25, decay_variables="matrices", clip_norm=0.5, groups=groups
    )
    steps = new_gradients("cpu")
    train(optimizer, variables, new_gradients(device))
    for name, variable in variables.items():
        start = new_variables("cpu")[name].numpy().astype(np.float64)
        history = []
        in_group = name in ("kernel", "bias")
        together = ["kernel", "bias"] if in_group else ["embedding"]
        for t, step in enumerate(steps, 1):
            gradient = step[name].astype(np.float64)
            if name in ("deep", "scale"):
                history.append((t, np.clip(gradient, -0.25, 0.25)))
                continue
            norm = np.sqrt(sum(np.sum(step[other].astype(np.float64) ** 2) for other in together))
            history.append((t, gradient * (0.25 if in_group else 0.5) / norm))
        decay = 0.0 if name not in MATRICES else 0.125 if in_group else 0.25
        expected = textbook.torch_adam_w(
            start, history, learning_rate=0.5 if in_group else 0.125, weight_decay=decay
        )
        np.testing.assert_allclose(variable.numpy(), expected["var"], rtol=2e-5, err_msg=name)


def test_a_list_stands_in_for_the_argument_in_its_call(device: str) -> None:
    variables = new_variables(device)
    zeros = [{name: put(device, np.zeros(shape)) for name, shape in SHAPES.items()}]
    optimizer = gpuopt.MomentumWOptimizer(0.5, 1.0, 0.0, decay_variables="matrices")
    expected = {name: variable.numpy() for name, variable in variables.items()}
    lists = [None, [variables["bias"]], None, [], [variables["kernel"], variables["scale"]], None]
    # Twice, as the second time a list's variables are known.
    for listed in lists * 2:
        train(optimizer, variables, zeros, decay_var_list=listed)
        decaying = MATRICES if listed is None else {each.name for each in listed}
        for name, variable in variables.items():
            expected[name] = expected[name] * np.float32(0.5 if name in decaying else 1)
            np.testing.assert_array_equal(variable.numpy(), expected[name], err_msg=name)


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["AdamW", "TorchSGD", "LAMB", "LARS"])
@pytest.mark.parametrize("more", [{}, {"clip_norm": 1.0}], ids=["plain", "clipped"])
def test_a_step_is_as_many_launches_as_if_all_decayed(
    name: str, more: dict[str, Any], emulated_gpus: Any
) -> None:
    variables, [step, *_] = new_variables("gpu:0"), new_gradients("gpu:0")
    chosen: dict[str, dict[str, Any]] = {"all": {}, "matrices": {"decay_variables": "matrices"}}
    if name == "LARS":
        chosen["skipped"] = {"skip_list": ["bias"], "decay_variables": "matrices"}
    launches = {}
    for which, given in chosen.items():
        optimizer = made(name, **more, **given)
        train(optimizer, variables, [step])
        before = emulated_gpus[0].launches
        train(optimizer, variables, [step])
        launches[which] = emulated_gpus[0].launches - before
    if name == "AdamW":
        before = emulated_gpus[0].launches
        train(optimizer, variables, [step], decay_var_list=[variables["bias"]])
        launches["listed"] = emulated_gpus[0].launches - before
    assert len(set(launches.values())) == 1 < len(launches)


@pytest.mark.emulator
def test_tables_are_one_launch_whether_they_decay_or_not(emulated_gpus: Any) -> None:
    tables = [Variable(np.ones((4, 2), np.float32), device="gpu:0") for _ in range(3)]
    rows = fake_cupy.asarray(np.array([1, 3]))
    slices = IndexedSlices(fake_cupy.asarray(np.ones((2, 2), np.float32)), rows)
    launched = []
    for decaying in (lambda _: True, lambda variable: variable is not tables[1]):
        optimizer = gpuopt.LionOptimizer(weight_decay=0.5, decay_variables=decaying)
        for _ in range(2):
            before = emulated_gpus[0].launches
            optimizer.apply_gradients([(slices, table) for table in tables])
        launched.append(emulated_gpus[0].launches - before)
    assert launched[0] == launched[1] > 0


def test_a_skipped_variable_of_lars_has_neither_decay_nor_ratio() -> None:
    names = ["kernel", "bias", "embedding"]
    variables, steps = new_variables("cpu", names), new_gradients("cpu", names)
    starts = {each: v.numpy().astype(np.float64) for each, v in variables.items()}
    optimizer = made("LARS", skip_list=["embed"], decay_variables="matrices")
    train(optimizer, variables, steps)
    for name, variable in variables.items():
        history = [(t, step[name].astype(np.float64)) for t, step in enumerate(steps, 1)]
        own = {
            "kernel": {"weight_decay": 0.25},
            "bias": {"weight_decay": 0.0},
            "embedding": {"skip_list": ["all"]},
        }[name]
        expected = textbook.lars(starts[name], history, learning_rate=0.125, **own)["var"]
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-5, err_msg=name)


def test_lamb_gives_no_ratio_to_what_does_not_decay_unless_asked() -> None:
    for use_nvlamb in (False, True):
        variables, steps = new_variables("cpu"), new_gradients("cpu")
        starts = {each: v.numpy().astype(np.float64) for each, v in variables.items()}
        train(made("LAMB", decay_variables="matrices", use_nvlamb=use_nvlamb), variables, steps)
        for name, variable in variables.items():
            history = [(t, step[name].astype(np.float64)) for t, step in enumerate(steps, 1)]
            expected = textbook.lamb(
                starts[name],
                history,
                learning_rate=0.125,
                weight_decay=0.25 if name in MATRICES else 0.0,
                use_nvlamb=use_nvlamb,
            )["var"]
            np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-5, err_msg=name)


def test_averages_and_loss_scale_go_together_with_it(device: str) -> None:
    found = {}
    for which in ("argument", "groups"):
        variables = new_variables(device)
        average = gpuopt.ExponentialMovingAverage(0.5)
        more: dict[str, Any] = {"decay_variables": "matrices"}
        if which == "groups":
            of_0 = [each for name, each in variables.items() if name not in MATRICES]
            more = {"groups": [ParameterGroup(variables=of_0, weight_decay=0.0)]}
        inner = gpuopt.AdamWOptimizer(0.25, 0.125, averages=average, **more)
        optimizer = gpuopt.LossScaleOptimizer(inner, gpuopt.FixedLossScaleManager(4.0))
        train(optimizer, variables, new_gradients(device))
        found[which] = {
            name: [*each, average.average(variables[name]).numpy()]
            for name, each in numbers_of(inner, variables).items()
        }
    check_equal(found["argument"], found["groups"])


def test_replicas_ask_for_each_copy() -> None:
    strategy = gpuopt.MirroredStrategy(["cpu", "cpu"])
    w = strategy.variable(np.float32([[8]]), name="w")
    b = strategy.variable(np.float32([8]), name="b")
    optimizer = gpuopt.MomentumWOptimizer(0.25, 1.0, 0.0, decay_variables="matrices")

    def step() -> None:
        optimizer.apply_gradients([(np.zeros((1, 1), np.float32), w), (np.zeros(1, np.float32), b)])

    strategy.run(step)
    assert [copy.numpy().tolist() for copy in w.replicas] == [[[6.0]]] * 2
    assert [copy.numpy().tolist() for copy in b.replicas] == [[8.0]] * 2


def test_raw_arrays_decay_by_their_shape() -> None:
    arrays = [np.full(shape, 8, np.float32) for shape in ((2, 2), (2,))]
    optimizer = gpuopt.MomentumWOptimizer(0.25, 1.0, 0.0, decay_variables="matrices")
    optimizer.apply_gradients([(np.zeros_like(each), each) for each in arrays])
    assert [each.flat[0] for each in arrays] == [6, 8]


@pytest.mark.contract
@pytest.mark.parametrize("name", CLASSES)
def test_a_copy_leaves_out_the_same_variables(name: str) -> None:
    if name in EXTENDED:
        pytest.skip("pickle finds classes by their names alone")
    for copied in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        found = {}
        for which in ("given", "copied"):
            optimizer, variables = made(name, decay_variables="matrices"), new_variables("cpu")
            optimizer = copied(optimizer) if which == "copied" else optimizer
            train(optimizer, variables, new_gradients("cpu"))
            found[which] = numbers_of(optimizer, variables)
        check_equal(found["copied"], found["given"])


@pytest.mark.contract
def test_an_optimizer_without_decay_takes_no_such_argument() -> None:
    for make in (gpuopt.AdamOptimizer, gpuopt.LazyAdamOptimizer, gpuopt.AMSGradOptimizer):
        words = "takes no decay_variables, and has no weight decay: AdamWOptimizer"
        with pytest.raises(TypeError, match=words):
            make(decay_variables="matrices")


@pytest.mark.contract
@pytest.mark.parametrize("given", ["vectors", 2, ["w"], True, np.ones(2)])
@pytest.mark.parametrize("make", [gpuopt.AdamWOptimizer, gpuopt.LAMBOptimizer, HOOKS["hooks"]])
def test_other_values_of_decay_variables_are_refused(make: Any, given: Any) -> None:
    more = {"weight_decay": 0.1} if make is gpuopt.AdamWOptimizer else {}
    with pytest.raises(TypeError, match='decay_variables must be "matrices" or a function'):
        make(decay_variables=given, **more)


@pytest.mark.contract
def test_decay_variables_cannot_be_set_later() -> None:
    optimizer = gpuopt.LionOptimizer()
    with pytest.raises(AttributeError, match="give decay_variables where the optimizer is made"):
        optimizer.decay_variables = "matrices"
    with pytest.raises(TypeError, match=r"group .* has decay_variables, which"):
        gpuopt.LionOptimizer(groups=[ParameterGroup("w", decay_variables="matrices")])  # type: ignore[call-arg]


def raises(_: Variable) -> bool:
    raise KeyError("mine")


@pytest.mark.contract
@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (lambda _: None, TypeError, 'must return True or False, got None for "scale"'),
        (raises, KeyError, "mine"),
    ],
    ids=["no bool", "raises"],
)
@pytest.mark.parametrize("make", [gpuopt.AdamWOptimizer, *HOOKS.values()], ids=["rule", *HOOKS])
def test_an_error_of_the_function_comes_before_anything_is_written(
    make: Any, given: Any, error: type[Exception], words: str
) -> None:
    variables, [step, *_] = new_variables("cpu"), new_gradients("cpu")
    starts = {name: variable.numpy() for name, variable in variables.items()}

    def decays(variable: Variable) -> Any:
        return given(variable) if variable.name == "scale" else True

    more = {"weight_decay": 0.25} if make is gpuopt.AdamWOptimizer else {}
    optimizer = make(decay_variables=decays, **more)
    for _ in range(2):
        with pytest.raises(error, match=words):
            train(optimizer, variables, [step])
    for name, variable in variables.items():
        np.testing.assert_array_equal(variable.numpy(), starts[name])
        assert optimizer.get_slot_names() == [] or optimizer.get_slot(variable, "m") is None


class OwnDecay(RuleOptimizer):
    """A user's, whose rule has no scalar of that name."""

    @gpuopt.update_rule
    def rule(var: Any, grad: Any, *, learning_rate: Any, kept: Any) -> None:
        var -= learning_rate * grad + (1 - kept) * var

    def __init__(self, learning_rate: Any, weight_decay: Any, **common: Any) -> None:
        super().__init__(common, learning_rate=learning_rate, weight_decay=weight_decay)

    def _scalars(self, real: Any) -> Any:
        return {
            "learning_rate": real(self._hyper("learning_rate")),
            "kept": real(1 - self._hyper("weight_decay")),
        }


class SaysHow(OwnDecay):
    def _scalars_of_variant(self, variant: int, scalars: Any) -> Any:
        return {**scalars, "kept": scalars["kept"].dtype.type(1)}


@pytest.mark.contract
def test_a_users_rule_decays_by_a_scalar_of_this_name_or_says_how() -> None:
    w = Variable(np.float32([8]), name="w")
    pairs = [(np.zeros(1, np.float32), w)]
    # Of another type, it would be updated before.
    first = Variable(np.float64([[8]]), name="first")
    with pytest.raises(TypeError, match=r'"w" does not decay, .* takes no scalar weight_decay'):
        OwnDecay(1.0, 0.25, decay_variables="matrices").apply_gradients(
            [(np.ones((1, 1)), first), *pairs]
        )
    assert w.numpy() == first.numpy() == 8
    SaysHow(1.0, 0.25, decay_variables="matrices").apply_gradients(pairs)
    assert w.numpy() == 8
    OwnDecay(1.0, 0.25).apply_gradients(pairs)
    assert w.numpy() == 6
