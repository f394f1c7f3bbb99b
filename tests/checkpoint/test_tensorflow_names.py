"""Whose the slots and powers of beta in TensorFlow's checkpoints are.

tests/golden/make_tf1_names.py made the checkpoints, with real TensorFlow.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import AdamOptimizer, CheckpointError, Saver, Variable

GOLDEN = Path(__file__).parents[1] / "golden" / "tf1_names.npz"
ONE = np.ones(3, np.float32)
EVERY_SLOT = {
    "Momentum": lambda: gpuopt.MomentumOptimizer(0.1, 0.9),
    "Adagrad": lambda: gpuopt.AdagradOptimizer(0.1),
    "RMSProp": lambda: gpuopt.RMSPropOptimizer(0.1, momentum=0.5),
    "Ftrl": lambda: gpuopt.FtrlOptimizer(0.1),
    "Adadelta": lambda: gpuopt.AdadeltaOptimizer(0.1),
    "Adam": lambda: AdamOptimizer(0.1),
}


class _Reader:
    """Reads a checkpoint without TensorFlow."""

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        self._tensors = tensors

    def get_variable_to_shape_map(self) -> dict[str, tuple[int, ...]]:
        return {name: value.shape for name, value in self._tensors.items()}

    def get_tensor(self, name: str) -> np.ndarray:
        return self._tensors[name].copy()


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Returns a function that makes a checkpoint of tensors, and returns its prefix."""

    def make(tensors: Mapping[str, np.ndarray]) -> str:
        train = ModuleType("tensorflow.train")
        train.load_checkpoint = lambda prefix: _Reader(tensors)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "tensorflow", ModuleType("tensorflow"))
        monkeypatch.setitem(sys.modules, "tensorflow.train", train)
        prefix = tmp_path / "model.ckpt"
        for end in (".index", ".meta", ".data-00000-of-00001"):
            Path(f"{prefix}{end}").touch()
        return str(prefix)

    return make


def golden(graph: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns what a graph's checkpoint holds, and its variables after the next step."""
    with np.load(GOLDEN) as archive:
        saved, after = (
            {key.removeprefix(start): archive[key] for key in archive if key.startswith(start)}
            for start in (f"{graph}/saved/", f"{graph}/next/")
        )
    return saved, after


def variable(name: str) -> Variable:
    return Variable(np.zeros(3, np.float32), name=name)


def step(*pairs: tuple[Any, Variable]) -> None:
    for optimizer, each in pairs:
        optimizer.apply_gradients([(ONE, each)])


def assert_follows(after: Mapping[str, np.ndarray], *variables: Variable) -> None:
    for each in variables:
        np.testing.assert_allclose(each.numpy(), after[each.name], rtol=2e-6, err_msg=each.name)


@pytest.mark.parametrize(
    ("order", "before"), [("d first", "no step"), ("g first", "no step"), ("g first", "a step")]
)
def test_two_optimizers_of_one_name_get_the_slots_of_their_own_variables(
    checkpoint: Callable[..., str], order: str, before: str
) -> None:
    saved, after = golden("gan")
    d, g = variable("d/w"), variable("g/w")
    of_d, of_g = AdamOptimizer(0.1, 0.5), AdamOptimizer(0.1, 0.9)
    if before == "a step":
        step((of_d, d), (of_g, g))
    Saver([d, g], optimizers=[of_d, of_g]).restore(checkpoint(saved))
    pairs = [(of_d, d), (of_g, g)]
    step(*(pairs if order == "d first" else reversed(pairs)))
    assert_follows(after, d, g)
    assert of_d.get_slot(g, "m") is None
    assert of_g.get_slot(d, "m") is None


def test_slots_that_wait_for_the_first_of_two_optimizers_are_not_given_twice(
    checkpoint: Callable[..., str],
) -> None:
    saved, _ = golden("gan")
    d, g = variable("d/w"), variable("g/w")
    of_d, of_g = AdamOptimizer(0.1, 0.5), AdamOptimizer(0.1, 0.9)
    Saver([d, g], optimizers=[of_d, of_g]).restore(checkpoint(saved))
    step((of_d, d))
    assert not any(name == d.name for _, name in of_g.state.waiting_slots)
    with pytest.raises(ValueError, match=r'slot "m" of "d/w" went to another optimizer'):
        step((of_g, d))


def test_a_step_that_fails_leaves_waiting_slots_to_any_optimizer(
    checkpoint: Callable[..., str],
) -> None:
    saved, after = golden("gan")
    d, g = variable("d/w"), variable("g/w")
    of_d, of_g = AdamOptimizer(0.1, 0.5), AdamOptimizer(0.1, 0.9)
    Saver([d, g], optimizers=[of_d, of_g]).restore(checkpoint(saved))
    with pytest.raises(ValueError, match="has shape"):
        of_g.apply_gradients([(np.ones(4, np.float32), d)])
    step((of_d, d), (of_g, g))
    assert_follows(after, d, g)


@pytest.mark.parametrize(
    ("way", "when"),
    [
        ("file", "at once"),
        ("file of other names", "after a step of one"),
        ("copy", "at once"),
        ("copy", "after a step of one"),
    ],
)
def test_slots_that_wait_are_saved_and_copied(
    checkpoint: Callable[..., str], tmp_path: Path, when: str, way: str
) -> None:
    saved, after = golden("gan")
    d, g = variable("d/w"), variable("g/w")
    of_d, of_g = AdamOptimizer(0.1, 0.5), AdamOptimizer(0.1, 0.9)
    Saver([d, g], optimizers=[of_d, of_g]).restore(checkpoint(saved))
    if when != "at once":
        step((of_d, d))
    if way == "copy":
        everything = copy.deepcopy((d, g, of_d, of_g))
        d, g, of_d, of_g = everything
        step((of_g, g))
        np.testing.assert_allclose(g.numpy(), after["g/w"], rtol=2e-6)
        return
    names = {"d/w": d, "g/w": g} if way == "file" else {"one": d, "two": g}
    path = Saver(names, optimizers=[of_d, of_g]).save(tmp_path / "own")
    others = {name: variable(f"new/{each.name}") for name, each in names.items()}
    anew = AdamOptimizer(0.1, 0.5), AdamOptimizer(0.1, 0.9)
    Saver(others, optimizers=anew).restore(path)
    other_d, other_g = others.values()
    if when == "at once":
        step((anew[0], other_d))
    step((anew[1], other_g))
    np.testing.assert_allclose(other_d.numpy(), after["d/w"], rtol=2e-6)
    np.testing.assert_allclose(other_g.numpy(), after["g/w"], rtol=2e-6)


def test_an_optimizer_of_two_variables_and_one_of_a_single_one(
    checkpoint: Callable[..., str],
) -> None:
    saved, after = golden("both_and_one")
    d, g = variable("d/w"), variable("g/w")
    first, second = AdamOptimizer(0.1, 0.5), AdamOptimizer(0.1, 0.9)
    Saver([d, g], optimizers=[first, second]).restore(checkpoint(saved))
    first.apply_gradients([(ONE, d), (ONE, g)])
    step((second, g))
    assert_follows(after, d, g)


@pytest.mark.parametrize("late", [False, True])
def test_variables_that_are_made_later_get_the_slots_of_their_optimizer(
    checkpoint: Callable[..., str], late: bool
) -> None:
    saved, after = golden("gan")
    of_d, of_g = AdamOptimizer(0.1, 0.5), AdamOptimizer(0.1, 0.9)
    given = variable("d/w")
    saver = Saver([given], optimizers=[of_d, of_g])
    saver.restore(checkpoint(saved), deferred=True)
    g = variable("elsewhere")
    saver.attach({"g/w": g})
    pairs = [(of_d, given), (of_g, g)]
    step(*(reversed(pairs) if late else pairs))
    np.testing.assert_allclose(g.numpy(), after["g/w"], rtol=2e-6)
    assert_follows(after, given)


def test_powers_of_beta_that_nobody_claims_are_refused(checkpoint: Callable[..., str]) -> None:
    saved, _ = golden("gan")
    g, of_g = variable("g/w"), AdamOptimizer(0.1, 0.9)
    with pytest.raises(CheckpointError, match=r'"beta1_power_1", "beta2_power_1".*claims'):
        Saver([g], optimizers=[of_g]).restore(checkpoint(saved))
    np.testing.assert_array_equal(g.numpy(), 0)
    Saver([g]).restore(checkpoint(saved))  # without optimizers, nothing of theirs is of interest
    np.testing.assert_array_equal(g.numpy(), saved["g/w"])


def test_slots_of_more_optimizers_than_there_are_here_are_refused(
    checkpoint: Callable[..., str],
) -> None:
    w = {"w": ONE, "w/Momentum": 2 * ONE, "w/Momentum_1": 3 * ONE}
    v, momentum = variable("w"), gpuopt.MomentumOptimizer(0.1, 0.9)
    with pytest.raises(CheckpointError, match=r'"w/Momentum_1".*more optimizers'):
        Saver([v], optimizers=[momentum]).restore(checkpoint(w))


def test_which_two_of_three_optimizers_have_slots_shows_in_their_own_slots(
    checkpoint: Callable[..., str],
) -> None:
    tensors = {
        "v": ONE,
        "w": ONE,
        "v/Momentum": 4 * ONE,
        "w/Momentum": 2 * ONE,
        "w/Momentum_1": 3 * ONE,
    }
    v, w = variable("v"), variable("w")
    three = [gpuopt.MomentumOptimizer(0.1, 0.9) for _ in range(3)]
    with pytest.raises(CheckpointError, match='slots of 2 optimizers named "Momentum" for "w"'):
        Saver([v, w], optimizers=three).restore(checkpoint(tensors))
    step((three[0], w), (three[1], v), (three[2], w))
    Saver([v, w], optimizers=three).restore(checkpoint(tensors))
    slots = [three[0].get_slot(w, "momentum"), three[2].get_slot(w, "momentum")]
    assert [slot.numpy()[0] for slot in slots if slot is not None] == [2, 3]


def test_a_users_own_beta1_power_stays_the_users(checkpoint: Callable[..., str]) -> None:
    saved, after = golden("own_power")
    w, adam = variable("w"), AdamOptimizer(0.1)
    own = Variable(np.float32(0), name="beta1_power", trainable=False)
    Saver([w, own], optimizers=[adam]).restore(checkpoint(saved))
    assert own.numpy() == 7
    step((adam, w))
    assert_follows(after, w)
    with pytest.raises(CheckpointError, match=r'"beta1_power_1".*your own variable of this name'):
        Saver([w], optimizers=[adam]).restore(checkpoint(saved))


@pytest.mark.parametrize("kind", EVERY_SLOT)
def test_slots_of_a_scope_need_its_name(kind: str, checkpoint: Callable[..., str]) -> None:
    saved, after = golden(kind)
    w, optimizer = variable("w"), EVERY_SLOT[kind]()
    saver = Saver([w], optimizers=[optimizer])
    with pytest.raises(CheckpointError, match=rf'no "w/{kind}".*"train/w/{kind}".*optimizer_scope'):
        saver.restore(checkpoint(saved))
    np.testing.assert_array_equal(w.numpy(), 0)
    saver.restore(checkpoint(saved), optimizer_scope="train")
    step((optimizer, w))
    assert_follows(after, w)


def test_each_optimizer_may_have_a_scope_of_its_own(checkpoint: Callable[..., str]) -> None:
    saved, after = golden("two_scopes")
    d, g = variable("d/w"), variable("g/w")
    of_d, of_g = AdamOptimizer(0.1, 0.5), AdamOptimizer(0.1, 0.9)
    scopes = {of_g: "train_g/", of_d: "train_d"}
    Saver([d, g], optimizers=[of_d, of_g]).restore(checkpoint(saved), optimizer_scope=scopes)
    step((of_d, d), (of_g, g))
    assert_follows(after, d, g)
    alone = AdamOptimizer(0.1, 0.9)
    Saver([g], optimizers=[alone]).restore(checkpoint(saved), optimizer_scope="train_g")
    step((alone, g))
    assert_follows(after, g)


def test_a_name_scope_is_in_the_names_of_powers_alone(checkpoint: Callable[..., str]) -> None:
    saved, after = golden("name_scope")
    w, adam = variable("w"), AdamOptimizer(0.1)
    saver = Saver([w], optimizers=[adam])
    with pytest.raises(CheckpointError, match=r'no "beta1_power".*"optimizer/beta1_power"'):
        saver.restore(checkpoint(saved))
    saver.restore(checkpoint(saved), optimizer_scope="optimizer")
    step((adam, w))
    assert_follows(after, w)


@pytest.mark.parametrize("kind", EVERY_SLOT)
def test_slots_that_are_not_in_the_checkpoint_are_refused(
    kind: str, checkpoint: Callable[..., str]
) -> None:
    w, optimizer = variable("w"), EVERY_SLOT[kind]()
    prefix = checkpoint({"w": ONE})
    with pytest.raises(CheckpointError, match=f'no "w/{kind}", a slot of "w"'):
        Saver([w], optimizers=[optimizer]).restore(prefix)
    step((optimizer, w))
    with pytest.raises(CheckpointError, match=f'no "w/{kind}", a slot of "w"'):
        Saver([w], optimizers=[optimizer]).restore(prefix)


def test_a_trainable_variable_without_slots_is_refused_beside_one_with_slots(
    checkpoint: Callable[..., str],
) -> None:
    tensors = {"v": ONE, "w": ONE, "w/Momentum": ONE}
    v, w, momentum = variable("v"), variable("w"), gpuopt.MomentumOptimizer(0.1, 0.9)
    with pytest.raises(CheckpointError, match=r'no "v/Momentum", a slot of "v".*trainable=False'):
        Saver([v, w], optimizers=[momentum]).restore(checkpoint(tensors))
    descent = gpuopt.GradientDescentOptimizer(0.1)  # which may train it
    Saver([v, w], optimizers=[momentum, descent]).restore(checkpoint(tensors))
    frozen = Variable(np.zeros(3, np.float32), name="frozen", trainable=False)
    Saver({"v": frozen, "w": w}, optimizers=[momentum]).restore(checkpoint(tensors))
    np.testing.assert_array_equal(frozen.numpy(), ONE)


@pytest.mark.parametrize(
    ("scope", "kind", "words"),
    [
        (5, TypeError, "optimizer_scope must be a scope's name, or a mapping"),
        ({"Adam": "train"}, TypeError, "optimizer_scope must be a scope's name, or a mapping"),
    ],
)
def test_a_scope_of_another_type_is_refused(
    scope: Any, kind: type[Exception], words: str, checkpoint: Callable[..., str]
) -> None:
    w = variable("w")
    with pytest.raises(kind, match=words):
        Saver([w]).restore(checkpoint({"w": ONE}), optimizer_scope=scope)


def test_a_scope_is_of_the_savers_optimizers_and_of_tensorflows_checkpoints(
    checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    w, adam = variable("w"), AdamOptimizer(0.1)
    with pytest.raises(ValueError, match='optimizer "Adam", whose state this Saver does not'):
        Saver([w]).restore(checkpoint({"w": ONE}), optimizer_scope={adam: "train"})
    with pytest.raises(TypeError, match='optimizer_scope of "Adam" must be text, got 3'):
        Saver([w], optimizers=[adam]).restore(checkpoint({"w": ONE}), optimizer_scope={adam: 3})
    own = Saver([w]).save(tmp_path / "own")
    with pytest.raises(ValueError, match="optimizer_scope is for TensorFlow's checkpoints"):
        Saver([w]).restore(own, optimizer_scope="train")


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_a_global_step_is_restored_into_any_type_that_holds_it(
    dtype: type, checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    step = Variable(dtype(0), name="global_step", trainable=False)
    Saver([step]).restore(checkpoint({"global_step": np.int64(200)}))
    assert step.numpy() == 200
    assert step.dtype == dtype


@pytest.mark.parametrize(
    ("name", "dtype"), [("w", "U3"), ("w", object), ("w/Adam", "U3"), ("beta1_power", object)]
)
def test_texts_in_the_place_of_numbers_are_refused(
    dtype: Any, name: str, checkpoint: Callable[..., str]
) -> None:
    saved = {"w": ONE, "w/Adam": ONE, "w/Adam_1": ONE}
    saved |= {f"beta{i}_power": np.float32(0.5) for i in (1, 2)}
    w, optimizer = variable("w"), AdamOptimizer(0.1)
    with pytest.raises(CheckpointError, match=r"model\.ckpt: "):
        Saver([w], optimizers=[optimizer]).restore(
            checkpoint({**saved, name: saved[name].astype(dtype)})
        )
    assert not w.numpy().any()
    assert not optimizer.variables()


def test_a_global_step_that_is_too_large_for_its_type_is_refused(
    checkpoint: Callable[..., str],
) -> None:
    step = Variable(0, name="global_step", trainable=False)
    with pytest.raises(CheckpointError, match=r'"global_step" has dtype int32.* int64'):
        Saver([step]).restore(checkpoint({"global_step": np.int64(2**31)}))
    assert step.numpy() == 0


@pytest.mark.parametrize("end", ["", ".index", ".meta", ".data-00000-of-00001"])
def test_each_file_of_a_checkpoint_stands_for_its_prefix(
    end: str, checkpoint: Callable[..., str]
) -> None:
    w = variable("w")
    Saver([w]).restore(checkpoint({"w": ONE}) + end)
    np.testing.assert_array_equal(w.numpy(), ONE)


@pytest.mark.parametrize("end", ["", ".meta"])
def test_tensorflows_first_format_is_refused_by_name(end: str, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    # Its last bytes are those of each table of TensorFlow's.
    path.write_bytes(bytes(40) + bytes.fromhex("57fb808b247547db"))
    (tmp_path / "model.ckpt.meta").touch()
    words = re.escape(str(path)) + r" is a checkpoint of TensorFlow's first format \(V1\)"
    with pytest.raises(CheckpointError, match=words):
        Saver([variable("w")]).restore(f"{path}{end}")
    path.write_bytes(b"short")
    with pytest.raises(FileNotFoundError):
        Saver([variable("w")]).restore(path)
