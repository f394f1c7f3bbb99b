"""`Optimizer.update`: trees of parameters, whose leaves are known by their paths."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import random
import signal
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
from gpu_streams import new_stream
from interrupt_at import HandleAt
from spawned import one_process

import gpuopt
from gpuopt.trees import flatten, walk_of

pytestmark = pytest.mark.contract


class Dense(NamedTuple):
    W: Any
    b: Any


@dataclasses.dataclass
class Norm:
    scale: Any
    shift: Any


def a_tree(rng: random.Random, leaf: Any, depth: int = 0) -> Any:
    """Returns a random tree, whose leaves `leaf` makes."""
    kind = rng.choice(
        ["dict", "ordered", "list", "tuple", "named", "data", "leaf"][: 7 if depth else 6]
    )
    if kind == "leaf" or depth > 3:
        return leaf()
    count = rng.randrange(1, 4)
    children = [a_tree(rng, leaf, depth + 1) for _ in range(max(count, 2))]
    if kind == "dict":
        return dict(zip(rng.sample("abcdef", count), children, strict=False))
    if kind == "ordered":
        return OrderedDict(zip(rng.sample(range(9), count), children, strict=False))
    if kind == "list":
        return children[:count]
    if kind == "tuple":
        return tuple(children[:count])
    return Dense(*children[:2]) if kind == "named" else Norm(*children[:2])


def mapped(function: Any, tree: Any) -> Any:
    """Returns a tree of the same form, with other leaves."""
    if isinstance(tree, dict):
        return type(tree)((key, mapped(function, each)) for key, each in tree.items())
    if isinstance(tree, Dense):
        return Dense(*(mapped(function, each) for each in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(function, each) for each in tree)
    if isinstance(tree, Norm):
        return Norm(mapped(function, tree.scale), mapped(function, tree.shift))
    return function(tree)


def leaves_of(tree: Any) -> list[Any]:
    found: list[Any] = []
    mapped(found.append, tree)
    return found


def without(is_left_out: list[bool], grads: Any) -> Any:
    """Returns the tree with None for some leaves."""
    remaining = iter(is_left_out)
    return mapped(lambda each: None if next(remaining) else each, grads)


def shuffled(rng: random.Random, tree: Any) -> Any:
    """Returns the tree with the keys of its dicts in another order."""
    if isinstance(tree, dict):
        items = [(key, shuffled(rng, each)) for key, each in tree.items()]
        return type(tree)(rng.sample(items, len(items)))
    if isinstance(tree, list):
        return [shuffled(rng, each) for each in tree]
    return tree


@pytest.mark.parametrize("seed", range(10))
def test_a_walk_lists_the_leaves_of_its_form_and_of_no_other(seed: int) -> None:
    rng = random.Random(seed)
    tree = a_tree(rng, object)
    found = flatten(tree, "params")
    expected = leaves_of(tree)
    assert found.leaves == expected
    assert walk_of(found.form)(tree) == expected
    order = rng.sample(range(len(expected)), len(expected))
    assert walk_of(found.form, tuple(order))(tree) == [expected[at] for at in order]
    if isinstance(tree, dict):
        assert walk_of(found.form)(type(tree)({**tree, "one more": object()})) is None
    other = a_tree(rng, object)
    if flatten(other, "params").form != found.form:
        walked = walk_of(found.form)(other)
        assert walked is None or walked != leaves_of(other) or len(walked) != len(expected)


@pytest.mark.parametrize("seed", range(10))
def test_trees_with_new_arrays_now_and_then_are_updated_like_variables(seed: int) -> None:
    rng, numbers = random.Random(seed), np.random.default_rng(seed)

    def array() -> Any:
        return numbers.standard_normal((2, 3)).astype(np.float32)

    params = a_tree(rng, array)
    variables = [gpuopt.Variable(each) for each in leaves_of(params)]
    make = rng.choice([gpuopt.AdamOptimizer, gpuopt.RMSPropOptimizer, gpuopt.AdagradOptimizer])
    by_tree, by_list = make(0.1), make(0.1)
    for _ in range(6):
        if rng.random() < 0.4:
            params = mapped(lambda each: each.copy() if rng.random() < 0.5 else each, params)
        is_left_out = [rng.random() < 0.2 for _ in variables]
        grads = mapped(lambda _: array(), params)
        listed = leaves_of(grads)
        if not all(is_left_out):
            grads = without(is_left_out, grads)
            listed = leaves_of(grads)
        returned = by_tree.update(params, shuffled(rng, grads))
        assert returned is params
        by_list.apply_gradients(zip(listed, variables, strict=True))
        for leaf, variable in zip(leaves_of(params), variables, strict=True):
            np.testing.assert_array_equal(leaf, variable.numpy())


def test_leaves_are_known_by_the_paths_in_state_groups_and_errors() -> None:
    params = {"layers": [{"W": np.ones(2, np.float32), "b": np.zeros(2, np.float32)}]}
    grads = {"layers": [{"b": np.ones(2, np.float32), "W": np.ones(2, np.float32)}]}
    biases = gpuopt.ParameterGroup("/b$", learning_rate=0.0)
    optimizer = gpuopt.MomentumOptimizer(0.5, 0.9, groups=[biases])
    optimizer.update(params, grads, "net")
    np.testing.assert_array_equal(params["layers"][0]["W"], [0.5, 0.5])
    np.testing.assert_array_equal(params["layers"][0]["b"], [0.0, 0.0])
    assert list(optimizer.state_dict()["slots"]["momentum"]) == [
        "net/layers/0/W",
        "net/layers/0/b",
    ]
    slot = optimizer.get_slot(params["layers"][0]["W"], "momentum")
    assert slot is not None
    np.testing.assert_array_equal(slot.numpy(), [1.0, 1.0])
    grads["layers"][0]["W"] = np.ones(3, np.float32)
    with pytest.raises(ValueError, match='gradient for "net/layers/0/W" has shape'):
        optimizer.update(params, grads, "net")


def test_one_array_without_a_name_is_known_by_its_memory() -> None:
    # With one call each, two parameters would share their state if they were known by path.
    first, second = np.ones(1), np.full(1, 2.0)
    optimizer = gpuopt.MomentumOptimizer(0.5, 0.9)
    optimizer.update(first, np.ones(1))
    optimizer.update(second, np.ones(1))
    assert (first[0], second[0]) == (0.5, 1.5)


def test_rows_of_a_leaf_are_updated() -> None:
    params = {"table": np.zeros((4, 2), np.float32)}
    rows = gpuopt.IndexedSlices(np.ones((1, 2), np.float32), np.array([2]))
    gpuopt.GradientDescentOptimizer(1.0).update(params, {"table": rows})
    np.testing.assert_array_equal(params["table"][:, 0], [0, 0, -1, 0])


def test_a_variable_keeps_its_own_name() -> None:
    w = gpuopt.Variable(np.ones(2, np.float32), name="mine")
    optimizer = gpuopt.AdamOptimizer(0.1)
    optimizer.update({"W": w}, {"W": np.ones(2, np.float32)})
    assert list(optimizer.state_dict()["slots"]["m"]) == ["mine"]


def test_a_global_step_is_counted() -> None:
    step = gpuopt.Variable(0, name="step")
    w = np.ones(2, np.float32)
    gpuopt.AdamOptimizer(0.1).update([w], [np.ones(2, np.float32)], global_step=step)
    assert int(step) == 1


def two_arrays() -> dict[str, Any]:
    return {"W": np.ones(2, np.float32), "b": np.zeros(2, np.float32)}


def train(optimizer: gpuopt.Optimizer, tree: Any, num_steps: int) -> Any:
    for _ in range(num_steps):
        optimizer.update(tree, {key: np.full(2, 0.5, np.float32) for key in tree})
    return tree


def by_pickle_alone(optimizer: gpuopt.Optimizer, tree: Any) -> tuple[gpuopt.Optimizer, Any]:
    pickled = pickle.dumps(optimizer)
    return pickle.loads(pickled), {key: each.copy() for key, each in tree.items()}


def by_state_of(make: Any, optimizer: gpuopt.Optimizer) -> gpuopt.Optimizer:
    loaded: gpuopt.Optimizer = make()
    loaded.load_state_dict(optimizer.state_dict())
    return loaded


TAKEN_OVER: list[Any] = [
    lambda optimizer, tree: (by_state_of(lambda: gpuopt.AdamOptimizer(0.1), optimizer), tree),
    lambda optimizer, tree: (copy.copy(optimizer), tree),
    lambda optimizer, tree: (copy.deepcopy(optimizer), tree),
    lambda *both: copy.deepcopy(both),
    lambda *both: copy.deepcopy(copy.deepcopy(both)),
    lambda *both: pickle.loads(pickle.dumps(both)),
]


@pytest.mark.parametrize("take_over", [by_pickle_alone, *TAKEN_OVER[1:]])
def test_a_run_goes_on_with_the_state_of_its_paths(take_over: Any) -> None:
    expected = train(gpuopt.AdamOptimizer(0.1), two_arrays(), 5)
    optimizer = gpuopt.AdamOptimizer(0.1)
    both = take_over(optimizer, train(optimizer, two_arrays(), 3))
    del optimizer
    for key, value in train(*both, 2).items():
        np.testing.assert_array_equal(value, expected[key])


@pytest.mark.parametrize("take_over", TAKEN_OVER)
@pytest.mark.parametrize(("is_alive", "reads"), [(True, False), (False, False), (False, True)])
def test_other_arrays_go_on_with_a_state_that_was_taken_over(
    take_over: Any, is_alive: bool, reads: bool
) -> None:
    """While the arrays of its paths live, and after them."""
    expected = train(gpuopt.AdamOptimizer(0.1), two_arrays(), 5)
    optimizer = gpuopt.AdamOptimizer(0.1)
    first = train(optimizer, two_arrays(), 3)
    goes_on, tree = take_over(optimizer, first)
    if reads:
        assert set(goes_on.state_dict()["slots"]["m"]) == {"W", "b"}
    others = {key: each.copy() for key, each in tree.items()}
    if not is_alive:
        del first, tree, optimizer
    for key, value in train(goes_on, others, 2).items():
        np.testing.assert_array_equal(value, expected[key])
    assert set(goes_on.state_dict()["slots"]["m"]) == {"W", "b"}


def test_a_state_is_loaded_before_the_first_step_of_a_copy() -> None:
    optimizer, tree = gpuopt.MomentumOptimizer(0.1, 0.5), two_arrays()
    state = train_and_read(optimizer, tree)
    train(optimizer, tree, 2)
    goes_on, tree = copy.deepcopy((optimizer, tree))
    del optimizer
    goes_on.load_state_dict(state)
    after = train_and_read(goes_on, tree)["slots"]["momentum"]
    np.testing.assert_array_equal(after["W"], np.full(2, 0.75, np.float32))


def test_a_copied_state_goes_on_past_the_end_of_the_copied_arrays() -> None:
    optimizer = gpuopt.AdamOptimizer(0.1)
    tree = train(optimizer, two_arrays(), 1)
    goes_on, copied = copy.deepcopy((optimizer, tree))
    train(goes_on, tree, 2)
    before = goes_on.state_dict()["slots"]["m"]
    del copied
    after = goes_on.state_dict()["slots"]["m"]
    for key in tree:
        np.testing.assert_array_equal(after[key], before[key])


def train_and_read(optimizer: gpuopt.Optimizer, tree: Any) -> Any:
    train(optimizer, tree, 1)
    return optimizer.state_dict()


def test_accumulated_rows_of_a_copied_tree_are_in_the_step_that_another_tree_ends() -> None:
    optimizer = gpuopt.GradientAccumulationOptimizer(gpuopt.GradientDescentOptimizer(1.0), 2)
    table, bias = np.zeros((3, 2), np.float32), np.zeros(2, np.float32)
    rows = gpuopt.IndexedSlices(np.full((1, 2), 4, np.float32), np.array([1]))
    optimizer.update([table], [rows], "table")
    goes_on, table, bias = copy.deepcopy((optimizer, table, bias))
    del optimizer
    goes_on.update([bias], [ones], "bias")
    np.testing.assert_array_equal(table[:, 0], [0, -2, 0])
    np.testing.assert_array_equal(bias, [-0.5, -0.5])


def test_a_saver_finds_the_arrays_that_were_copied_with_their_optimizer(tmp_path: Any) -> None:
    optimizer = gpuopt.AdamOptimizer(0.1)
    goes_on, tree = copy.deepcopy((optimizer, train(optimizer, two_arrays(), 3)))
    del optimizer
    saver = gpuopt.Saver(optimizers=[goes_on])
    path = saver.save(tmp_path / "model")
    expected = {key: each.copy() for key, each in tree.items()}
    train(goes_on, tree, 2)
    saver.restore(path)
    for key, value in tree.items():
        np.testing.assert_array_equal(value, expected[key])


@pytest.mark.parametrize(
    ("take_over", "num_steps"),
    [
        (lambda make, *both: copy.deepcopy(both), 2),
        (lambda make, optimizer, tree: (copy.deepcopy(optimizer), tree), 4),
        (lambda make, optimizer, tree: (by_state_of(make, optimizer), tree), 5),
    ],
)
def test_accumulated_gradients_go_on_in_other_arrays(take_over: Any, num_steps: int) -> None:
    def make() -> gpuopt.Optimizer:
        return gpuopt.GradientAccumulationOptimizer(gpuopt.AdamOptimizer(0.1), 4)

    expected = train(make(), two_arrays(), 8)
    optimizer = make()
    first = train(optimizer, two_arrays(), num_steps)
    goes_on, tree = take_over(make, optimizer, first)
    others = {key: each.copy() for key, each in tree.items()}
    for key, value in train(goes_on, others, 8 - num_steps).items():
        np.testing.assert_array_equal(value, expected[key])


def test_a_state_has_the_paths_while_other_models_have_them_too() -> None:
    first, second = gpuopt.AdamOptimizer(0.1), gpuopt.AdamOptimizer(0.1)
    trees = train(first, two_arrays(), 1), train(second, two_arrays(), 3)
    state, values = second.state_dict(), {key: each.copy() for key, each in trees[1].items()}
    expected = {key: each.copy() for key, each in train(second, trees[1], 2).items()}
    second.load_state_dict(state)
    for key, value in values.items():
        trees[1][key][:] = value
    for key, value in train(second, trees[1], 2).items():
        np.testing.assert_array_equal(value, expected[key])
    assert list(state["slots"]["m"]) == list(first.state_dict()["slots"]["m"]) == ["W", "b"]


def test_a_saver_tells_trees_of_equal_paths_apart(tmp_path: Any) -> None:
    optimizers = [gpuopt.AdamOptimizer(0.1, name=name) for name in ("G", "D")]
    trees = [train(optimizer, two_arrays(), 2 + i) for i, optimizer in enumerate(optimizers)]
    saver = gpuopt.Saver(optimizers=optimizers)
    path = saver.save(tmp_path / "model")
    after = []
    for _ in range(2):
        for optimizer, tree in zip(optimizers, trees, strict=True):
            train(optimizer, tree, 2)
        after.append([each.copy() for tree in trees for each in tree.values()])
        saver.restore(path)
    np.testing.assert_array_equal(after[0], after[1])


def by_copy(optimizer: gpuopt.Optimizer, tree: Any) -> Any:
    return copy.deepcopy((optimizer, tree))


def by_pickle(optimizer: gpuopt.Optimizer, tree: Any) -> Any:
    return pickle.loads(pickle.dumps((optimizer, tree)))


def by_state(optimizer: gpuopt.Optimizer, tree: Any) -> Any:
    other = by_state_of(lambda: gpuopt.MomentumOptimizer(1.0, 1.0), optimizer)
    return other, {path: each.copy() for path, each in tree.items()}


def by_itself(optimizer: gpuopt.Optimizer, tree: Any) -> Any:
    return optimizer, tree


def loaded_again(optimizer: gpuopt.Optimizer, tree: Any) -> Any:
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer, tree


@pytest.mark.parametrize(
    ("of_another", "left_out"), [(["b"], ["b_1"]), (["b", "b_1"], ["b", "b_1"])]
)
@pytest.mark.parametrize("go_on", [by_copy, by_pickle, by_state, by_itself, loaded_again])
def test_a_loaded_state_keeps_its_paths_beside_another_model_of_these(
    go_on: Any, of_another: list[str], left_out: list[str]
) -> None:
    # The arrays of the other model have the names, so that the name of "b" here is "b_1".
    another = {path: np.zeros(1, np.float32) for path in of_another}
    gpuopt.GradientDescentOptimizer(1.0).update(another, another)
    slots = {"a": 1.0, "b": 2.0, "b_1": 4.0}
    optimizer = gpuopt.MomentumOptimizer(1.0, 1.0)
    state = optimizer.state_dict()
    state["slots"] = {"momentum": {path: np.full(1, slots[path], np.float32) for path in slots}}
    optimizer.load_state_dict(state)
    tree = {path: np.zeros(1, np.float32) for path in slots}
    no_change = {path: np.zeros(1, np.float32) for path in slots}
    for _ in range(2):
        optimizer.update(tree, {**no_change, **dict.fromkeys(left_out)})
    assert set(optimizer.state_dict()["slots"]["momentum"]) == set(slots)
    goes_on, tree = go_on(optimizer, tree)
    before = {path: each.copy() for path, each in tree.items()}
    goes_on.update(tree, no_change)
    assert {path: before[path] - tree[path] for path in slots} == slots


ones = np.ones(2, np.float32)
cyclic: dict[str, Any] = {"w": ones}
cyclic["self"] = cyclic


@pytest.mark.parametrize(
    ("params", "grads", "message"),
    [
        ({"a/b": ones.copy()}, {"a/b": ones}, "params has the key 'a/b'"),
        ({1: ones.copy(), "1": ones.copy()}, {1: ones}, "keys 1 and '1', which are the same path"),
        ({"a": ones.copy()}, {"b": ones}, 'only params has "a"; only grads has "b"'),
        ({"a": ones.copy()}, {"a": [1.0, 1.0]}, 'only params has "a"; only grads has "a/0", "a/1"'),
        (
            {"x": [ones.copy() for _ in range(7)]},
            {"x": [ones]},
            'only params has "x/1", "x/2", "x/3", "x/4", "x/5" and 1 more',
        ),
        ({"a": None}, {"a": ones}, 'params at "a": expected a Variable or an array, got NoneType'),
        ({"a": "text"}, {"a": ones}, 'params at "a": expected a Variable or an array, got str'),
        ({"a": ones.copy()}, {"a": cyclic}, "grads holds itself, or is nested too deeply"),
        (
            {"a": object.__new__(Norm)},
            {"a": Norm(ones, ones)},
            """params["a"]: 'Norm' object has no attribute 'scale'""",
        ),
        (object.__new__(Norm), Norm(ones, ones), "params: 'Norm' object has no attribute 'scale'"),
    ],
)
def test_what_does_not_fit_is_refused_by_path(params: Any, grads: Any, message: str) -> None:
    optimizer = gpuopt.AdamOptimizer(0.1)
    with pytest.raises((TypeError, ValueError)) as caught:
        optimizer.update(params, grads)
    assert message in str(caught.value)
    # Nothing is remembered of it.
    array = ones.copy()
    with pytest.raises(ValueError, match="shape"):
        optimizer.update({"wrong": array}, {"wrong": np.ones(3, np.float32)})
    optimizer.update({"other": array}, {"other": ones})
    assert list(optimizer.state_dict()["slots"]["m"]) == ["other"]


@pytest.mark.parametrize(("first", "second"), [("g", "g/x"), ("g/x", "g")])
def test_a_path_of_another_tree_is_refused(first: str, second: str) -> None:
    trees = {"g": {"x": {"w": ones.copy()}}, "g/x": {"w": ones.copy()}}
    optimizer = gpuopt.AdamOptimizer(0.1)
    optimizer.update(trees[first], trees[first], first)
    with pytest.raises(ValueError, match=rf'"g/x/w" of the tree "{second}".* the tree "{first}"'):
        optimizer.update(trees[second], trees[second], second)


def test_a_refused_tree_leaves_no_names() -> None:
    array = ones.copy()
    with pytest.raises(ValueError, match="shape") as keeps_its_frames:
        gpuopt.AdamOptimizer(0.1).update({"wrong": array}, {"wrong": np.ones(3, np.float32)})
    optimizer = gpuopt.AdamOptimizer(0.1)
    optimizer.update({"w": array}, {"w": ones})
    assert list(optimizer.state_dict()["slots"]["m"]) == ["w"]
    del keeps_its_frames


def test_an_array_with_a_state_of_its_own_is_refused_by_a_wrapper_too() -> None:
    own, first = ones.copy(), ones.copy()
    optimizer = gpuopt.GradientAccumulationOptimizer(gpuopt.AdamOptimizer(0.1), 1)
    optimizer.apply_gradients([(ones, own)])
    optimizer.update({"w": first}, {"w": ones})
    with pytest.raises(ValueError, match='the array at "w" has a state of its own'):
        optimizer.update({"w": own}, {"w": ones})


def test_a_shared_array_is_refused() -> None:
    shared = ones.copy()
    optimizer = gpuopt.AdamOptimizer(0.1)
    with pytest.raises(ValueError, match='the array at "b" is that of "a"'):
        optimizer.update({"a": shared, "b": shared}, {"a": ones, "b": ones})
    optimizer.update({"a": shared, "b": ones.copy()}, {"a": ones, "b": ones}, "one")
    with pytest.raises(ValueError, match='the array at "two/a" is that of "one/a"'):
        optimizer.update({"a": shared}, {"a": ones}, "two")
    np.testing.assert_allclose(shared, 0.9, rtol=1e-6)


def test_arrays_that_change_places_are_refused() -> None:
    params = {"a": ones.copy(), "b": ones.copy()}
    grads = {"a": ones, "b": ones}
    optimizer = gpuopt.AdamOptimizer(0.1)
    optimizer.update(params, grads)
    before = {key: each.copy() for key, each in params.items()}
    with pytest.raises(ValueError, match='the array at "a" is that of "b"'):
        optimizer.update({"a": params["b"], "b": params["a"]}, grads)
    for key, value in before.items():
        np.testing.assert_array_equal(params[key], value)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (np.ones(3, np.float32), r"has shape \(3,\) and dtype float32"),
        (np.ones(2), r"has shape \(2,\) and dtype float64"),
    ],
)
def test_an_array_of_another_form_is_refused(other: Any, message: str) -> None:
    optimizer = gpuopt.AdamOptimizer(0.1)
    optimizer.update({"w": ones.copy()}, {"w": ones})
    with pytest.raises(ValueError, match=message):
        optimizer.update({"w": other}, {"w": np.ones(other.shape, other.dtype)})


def test_an_array_that_became_read_only_is_refused() -> None:
    optimizer = gpuopt.AdamOptimizer(0.1)
    params = {"v": ones.copy(), "w": ones.copy()}
    grads = {"v": ones, "w": ones}
    for _ in range(3):
        optimizer.update(params, grads)
    before = params["v"].copy()
    params["w"].flags.writeable = False
    with pytest.raises(ValueError, match=r'params at "w": the array .* is read-only'):
        optimizer.update(params, grads)
    np.testing.assert_array_equal(params["v"], before)
    np.testing.assert_array_equal(params["w"], before)


def test_an_array_in_the_place_of_a_variable_is_refused() -> None:
    optimizer = gpuopt.AdamOptimizer(0.1)
    w = gpuopt.Variable(ones, name="mine")
    optimizer.update({"w": w}, {"w": ones})
    with pytest.raises(ValueError, match='was the Variable "mine" before'):
        optimizer.update({"w": ones.copy()}, {"w": ones})


def test_other_paths_under_a_name_are_refused() -> None:
    optimizer = gpuopt.AdamOptimizer(0.1)
    optimizer.update({"w": ones.copy()}, {"w": ones})
    with pytest.raises(
        ValueError, match=r'the tree without a name has other paths.*only params has "v"'
    ):
        optimizer.update({"v": ones.copy()}, {"v": ones})
    optimizer.update({"v": ones.copy()}, {"v": ones}, name="second")


def test_an_array_that_another_optimizer_calls_otherwise_is_refused() -> None:
    w = ones.copy()
    keeps = gpuopt.AdamOptimizer(0.1)
    keeps.update({"w": w}, {"w": ones})
    gpuopt.GradientDescentOptimizer(0.1).update({"w": w}, {"w": ones})
    with pytest.raises(ValueError, match='the array at "v" is known as "w" already'):
        gpuopt.GradientDescentOptimizer(0.1).update({"v": w}, {"v": ones})


def test_two_trees_without_a_name_that_take_turns_are_noticed_once() -> None:
    trees = [{"w": ones.copy()}, {"w": ones.copy()}]
    optimizer = gpuopt.AdamOptimizer(0.1)
    for tree in (*trees, trees[0]):
        optimizer.update(tree, {"w": ones})
    with pytest.warns(UserWarning, match="two sets of arrays in turn"):
        optimizer.update(trees[1], {"w": ones})
    for tree in trees:
        optimizer.update(tree, {"w": ones})


def test_an_array_that_comes_back_once_is_not_noticed() -> None:
    best, last = {"w": ones.copy()}, {"w": ones.copy()}
    optimizer = gpuopt.AdamOptimizer(0.1)
    for tree in (best, last, best, best, last, last, best):
        optimizer.update(tree, {"w": ones})


def test_arrays_that_another_optimizer_has_replaced_are_updated_themselves() -> None:
    first, second = gpuopt.MomentumOptimizer(0.5, 0.0), gpuopt.MomentumOptimizer(0.5, 0.0)
    slow = {"w": np.zeros(2, np.float32)}
    for optimizer in (first, second):
        optimizer.update(slow, {"w": ones})
    fast = {"w": slow["w"].copy()}
    for _ in range(2):
        first.update(fast, {"w": ones})
        second.update(slow, {"w": -ones})
    np.testing.assert_array_equal(fast["w"], [-2.0, -2.0])
    np.testing.assert_array_equal(slow["w"], [0.0, 0.0])


def test_an_array_that_a_loss_has_read_keeps_its_path_until_after_the_loss() -> None:
    optimizer = gpuopt.MomentumOptimizer(1.0, 1.0)
    w = gpuopt.Variable(ones)
    former, new = {"v": ones.copy()}, {"v": ones.copy()}
    optimizer.update(former, {"v": ones})
    [read] = [each for each in gpuopt.trainable_variables() if each.name == "v"]

    def loss() -> Any:
        value = (read * w).sum()
        optimizer.update(new, {"v": ones})
        return value

    with pytest.raises(RuntimeError, match='"v" would be written in a loss'):
        gpuopt.GradientDescentOptimizer(1.0).minimize(loss, var_list=[w, read])
    optimizer.update(new, {"v": ones})
    np.testing.assert_array_equal(former["v"], [0.0, 0.0])
    np.testing.assert_array_equal(new["v"], [-1.0, -1.0])


def test_ctrl_c_replaces_all_arrays_of_a_tree_or_none() -> None:
    def press() -> None:
        nonlocal is_pressed
        is_pressed = True
        signal.raise_signal(signal.SIGINT)

    for moment in itertools.count(1):
        optimizer = gpuopt.GradientDescentOptimizer(1.0)
        tree = train(optimizer, two_arrays(), 1)
        others = {key: each.copy() for key, each in tree.items()}
        is_pressed = False
        try:
            with HandleAt(moment, press, inside=["variables/identity.py"]):
                train(optimizer, others, 1)
        except KeyboardInterrupt:
            pass
        if not is_pressed:
            break
        for arrays in (others, tree):
            before = {key: each.copy() for key, each in arrays.items()}
            train(optimizer, arrays, 1)
            for key, value in before.items():
                np.testing.assert_array_equal(arrays[key], value - 0.5)
    assert moment > 5


def test_a_replaced_array_is_freed() -> None:
    import weakref

    w = ones.copy()
    optimizer = gpuopt.AdamOptimizer(0.1)
    optimizer.update({"w": w}, {"w": ones})
    alive = weakref.ref(w)
    w = w.copy()
    optimizer.update({"w": w}, {"w": ones})
    assert alive() is None


def on_gpu(tree: Any) -> Any:
    cupy = pytest.importorskip("cupy")
    return mapped(cupy.array, tree)


def a_model(seed: int) -> Any:
    numbers = np.random.default_rng(seed)
    return {
        "layers": [
            {
                "W": numbers.standard_normal((4, 3)).astype(np.float32),
                "b": numbers.standard_normal(3).astype(np.float32),
            }
            for _ in range(3)
        ],
        "head": Dense(*numbers.standard_normal((2, 5)).astype(np.float32)),
    }


def assert_same(on_host: Any, on_device: Any) -> None:
    for expected, leaf in zip(leaves_of(on_host), leaves_of(on_device), strict=True):
        # The kernel fuses multiplications with additions.
        np.testing.assert_allclose(leaf.get(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_trees_of_cupy_arrays_are_updated_in_one_launch_as_on_the_cpu() -> None:
    on_host, by_host, by_device = a_model(0), gpuopt.AdamOptimizer(0.1), gpuopt.AdamOptimizer(0.1)
    on_device = on_gpu(on_host)
    with by_device.report() as report:
        for step in range(1, 4):
            grads = a_model(step)
            by_host.update(on_host, grads)
            assert by_device.update(on_device, on_gpu(grads)) is on_device
    assert_same(on_host, on_device)
    assert [launch[::2] for launch in report.launches] == [("gpu:0", 3)]


@pytest.mark.gpu
def test_state_goes_on_where_cupy_arrays_are_replaced() -> None:
    on_host, by_host, by_device = a_model(0), gpuopt.AdamOptimizer(0.1), gpuopt.AdamOptimizer(0.1)
    on_device = on_gpu(on_host)
    for step in range(1, 6):
        grads = a_model(step)
        by_host.update(on_host, grads)
        by_device.update(on_device, on_gpu(grads), "model")
        assert_same(on_host, on_device)
        on_device = mapped(lambda each: each * 1, on_device)
    slots = by_device.state_dict()["slots"]["m"]
    assert list(slots)[:2] == ["model/layers/0/W", "model/layers/0/b"]
    assert len(slots) == len(leaves_of(on_host))


def updated_on_two_streams() -> Any:
    """Returns what a stream sees of an array that it has taken over after work on another one."""
    import cupy

    by_path, by_array = gpuopt.MomentumOptimizer(1.0, 0.0), gpuopt.GradientDescentOptimizer(1.0)
    former, new, grad = (cupy.full(4096, value, np.float32) for value in (0, 0, 1))
    by_path.update({"w": former}, {"w": grad})
    by_array.apply_gradients([(grad, former)])  # prepares the kernel
    cupy.cuda.Device().synchronize()
    first, second = new_stream(), new_stream()
    with first:
        by_array.apply_gradients([(grad, new)])
    with second:
        by_path.update({"w": new}, {"w": grad})
        seen = new.copy()
    return seen.get(second)


@pytest.mark.gpu
def test_a_new_array_is_updated_after_work_on_another_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GPUOPT_DRIVER_STREAMS", "newest")
    # In this one, looks at earlier tests' events might do the waiting.
    with one_process() as process:
        seen = process.submit(updated_on_two_streams).result()
    np.testing.assert_array_equal(seen, np.full(4096, -2.0))


@pytest.mark.gpu
def test_an_array_that_a_capture_refuses_is_updated_after_it() -> None:
    import cupy

    optimizer = gpuopt.MomentumOptimizer(1.0, 1.0)
    former, new, grad = (cupy.full(4, value, np.float32) for value in (0, -1, 1))
    optimizer.update({"w": former}, {"w": grad})
    cupy.cuda.Device().synchronize()
    with new_stream() as stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match="is being captured into a CUDA graph"):
                optimizer.update({"w": new}, {"w": grad})
        finally:
            stream.end_capture()
    optimizer.update({"w": new}, {"w": grad})
    np.testing.assert_array_equal(former.get(), np.full(4, -1.0))
    np.testing.assert_array_equal(new.get(), np.full(4, -3.0))


@pytest.mark.gpu
def test_an_array_of_another_device_is_refused_by_its_path() -> None:
    params = {"w": np.ones(2, np.float32)}
    optimizer = gpuopt.AdamOptimizer(0.1)
    optimizer.update(params, {"w": np.ones(2, np.float32)})
    moved = on_gpu(params)
    with pytest.raises(ValueError, match=r'the array at "w" has .* is on gpu:0; the one before'):
        optimizer.update(moved, on_gpu({"w": np.ones(2, np.float32)}))
    assert moved["w"].get().tolist() == params["w"].tolist()


def test_an_overridden_apply_gradients_gets_pairs_in_each_call() -> None:
    seen = []

    class Doubling(gpuopt.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars: Any, *rest: Any, **named: Any) -> None:
            pairs = [(2 * gradient, variable) for gradient, variable in grads_and_vars]
            seen.append([grads_and_vars[1], *grads_and_vars[:1], *grads_and_vars])
            assert len(grads_and_vars) == len(pairs)
            super().apply_gradients(pairs, *rest, **named)

    optimizer, params = Doubling(0.25), [np.zeros(2, np.float32), np.zeros(3, np.float32)]
    grads = [np.ones(2, np.float32), np.ones(3, np.float32)]
    for _ in range(3):
        optimizer.update(params, grads)
    for in_call in seen:
        assert [gradient.size for gradient, _ in in_call] == [3, 2, 2, 3]
        assert [variable.name for _, variable in in_call] == ["1", "0", "0", "1"]
    assert [float(array[0]) for array in params] == [-1.5, -1.5]


@pytest.mark.parametrize("params", [{"w": 1}.values(), "w", 3.0, None], ids=repr)
def test_params_that_are_neither_a_tree_nor_an_array_are_refused(params: Any) -> None:
    words = f"params: expected a Variable, an array, or a dict, .* got {type(params).__name__}"
    with pytest.raises(TypeError, match=words):
        gpuopt.AdamOptimizer(0.1).update(params, np.ones(2, np.float32))
