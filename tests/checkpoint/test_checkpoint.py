"""State goes into dictionaries and files, and comes back exactly."""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dtypes import every_dtype
from every_optimizer import make, one_of_each_shape, own_step
from golden_cases import GOLDEN, OPTIMIZERS, check, error, read_json
from other_thread import repeated
from safetensors import safe_open
from safetensors.numpy import load_file

import gpuopt
from gpuopt import CheckpointError, IndexedSlices, Saver, Variable
from gpuopt.checkpoint import saver as saver_module


class Run:
    """A kernel with dense gradients and a table with sparse ones, trained by one optimizer."""

    def __init__(self, optimizer: gpuopt.Optimizer, seed: int = 0, dtype: Any = np.float32) -> None:
        rng = np.random.default_rng(seed)
        self.kernel = Variable(rng.normal(size=(3, 2)).astype(dtype), name="kernel")
        self.table = Variable(rng.normal(size=(5, 2)).astype(dtype), name="table")
        self.step = Variable(0, name="global_step", trainable=False, dtype=np.int64)
        self.optimizer = optimizer
        if (step := own_step(optimizer)) is not None:
            self.step = step

    @property
    def variables(self) -> list[Variable]:
        return [self.kernel, self.table, self.step]

    @property
    def named(self) -> dict[str, Variable]:
        return {"kernel": self.kernel, "table": self.table, "global_step": self.step}

    def train(self, first: int, last: int) -> None:
        for t in range(first, last):
            rng = np.random.default_rng([7, t])
            dense = rng.normal(size=(3, 2)).astype(self.kernel.dtype)
            rows = rng.integers(0, 5, size=4)
            slices = IndexedSlices(rng.normal(size=(4, 2)).astype(self.table.dtype), rows)
            self.optimizer.apply_gradients(
                [(dense, self.kernel), (slices, self.table)], global_step=self.step
            )

    def state(self) -> dict[str, bytes]:
        values = {name: variable.numpy().tobytes() for name, variable in self.named.items()}
        for slot in self.optimizer.get_slot_names():
            for variable in (self.kernel, self.table):
                value = self.optimizer.get_slot(variable, slot).numpy()
                values[f"{slot} of {list(self.named)[variable is self.table]}"] = value.tobytes()
        for name, value in self.optimizer.state_dict()["non_slots"].items():
            values[name] = value.tobytes()
        return values


def trained(steps: int = 3, dtype: Any = np.float32) -> Run:
    run = Run(gpuopt.AdamOptimizer(0.1), dtype=dtype)
    run.train(0, steps)
    return run


# The dictionary; test_checkpoint_properties.py continues runs with one.


def test_deferred_restoration_is_tensorflows(tmp_path: Path) -> None:
    """Replays what trackable_eager.json recorded of real TensorFlow."""
    golden = read_json("trackable_eager.json")

    def loss_gradient(v: Variable) -> np.ndarray:
        return 2 * v.numpy()

    v = Variable([1.0, 2.0], name="v")
    reference = gpuopt.AdamOptimizer(0.1)
    for _ in range(3):
        reference.apply_gradients([(loss_gradient(v), v)])
    expected = golden["reference"]
    check("trackable_eager", "m", reference.get_slot(v, "m"), expected["v/Adam:0"], 1e-6)
    check("trackable_eager", "v", reference.get_slot(v, "v"), expected["v/Adam_1:0"], 1e-6)
    powers = {p.name: p for p in reference.variables() if "power" in p.name}
    for name in ("beta1_power", "beta2_power"):
        check("trackable_eager", name, powers[name], expected[f"{name}:0"], 1e-6)
    state, saved_v = reference.state_dict(), v.numpy()
    saved = gpuopt.AdamOptimizer(0.1)
    saved.load_state_dict(state, {})
    first, second, third = golden["steps"][:3]

    # Before the slots exist: they are made at once, and no step is needed.
    v2, optimizer = Variable([0.0, 0.0], name="v2"), gpuopt.AdamOptimizer(0.1)
    optimizer.load_state_dict(state, {"v": v2})
    v2.assign(saved_v)
    assert optimizer.get_slot_names() == first["after_restore_slot_names"]
    assert len(optimizer.variables()) == len(first["variables"])
    check("trackable_eager", "restored m", optimizer.get_slot(v2, "m"), first["slot_m"], 1e-6)
    check("trackable_eager", "restored", v2, first["v"], 1e-6)
    reference.apply_gradients([(loss_gradient(v), v)])
    optimizer.apply_gradients([(loss_gradient(v2), v2)])
    assert second["equal"]
    np.testing.assert_array_equal(v.numpy(), v2.numpy())
    check("trackable_eager", "continued", v2, second["v2"], 1e-6)
    continued = optimizer.state_dict({"v": v2})
    for slot, name in (("m", "v/Adam_2:0"), ("v", "v/Adam_3:0")):
        got = continued["slots"][slot]["v"]
        check("trackable_eager", name, got, second["state"][name], 1e-6)

    # Before the variable is attached.
    optimizer3 = gpuopt.AdamOptimizer(0.1)
    saver = Saver({"other": Variable([0.0])}, optimizers=[optimizer3])
    saved_by = Saver({"v": Variable(saved_v), "other": Variable([5.0])}, optimizers=[saved])
    saver.restore(saved_by.save(tmp_path / "model"), deferred=True)
    v3 = Variable([0.0, 0.0], name="v3")
    saver.attach({"v": v3})
    assert optimizer3.get_slot_names() == third["slots"]
    check("trackable_eager", "m, attached later", optimizer3.get_slot(v3, "m"), third["m"], 1e-6)
    check("trackable_eager", "v, attached later", v3, third["v3"], 1e-6)


def test_of_two_states_that_wait_to_be_restored_the_newer_counts_and_saving_loses_neither() -> None:
    run = trained(2)
    older = run.optimizer.state_dict(run.named)
    run.train(2, 3)
    newer = run.optimizer.state_dict(run.named)
    run.optimizer = None
    del run
    optimizer = gpuopt.AdamOptimizer(0.1)
    optimizer.load_state_dict(older)
    optimizer.load_state_dict(newer)
    waiting = optimizer.state_dict()
    for slot in ("m", "v"):
        for name in ("kernel", "table"):
            np.testing.assert_array_equal(waiting["slots"][slot][name], newer["slots"][slot][name])
    assert waiting["non_slots"] == newer["non_slots"]


def test_state_is_a_copy() -> None:
    run = trained()
    state = run.optimizer.state_dict()
    before = state["slots"]["m"]["kernel"].copy()
    run.train(3, 4)
    np.testing.assert_array_equal(state["slots"]["m"]["kernel"], before)
    run.optimizer.load_state_dict(state)
    run.train(4, 5)
    np.testing.assert_array_equal(state["slots"]["m"]["kernel"], before)


def test_raw_arrays_are_saved_under_the_names_they_are_given() -> None:
    array = np.ones(3, np.float32)
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    optimizer.apply_gradients([(np.ones(3, np.float32), array)])
    with pytest.raises(ValueError, match="array without a name of its own"):
        optimizer.state_dict()
    state = optimizer.state_dict({"weights": array})
    other = np.ones(3, np.float32)
    second = gpuopt.MomentumOptimizer(0.1, 0.9)
    second.load_state_dict(state, {"weights": other})
    np.testing.assert_array_equal(second.get_slot(other, "momentum"), np.ones(3))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda s: s["slots"]["m"].update(kernel=np.zeros(7, np.float32)),
            r'"m" of "kernel" has shape',
        ),
        (
            lambda s: s["slots"]["v"].update(table=np.zeros((5, 2))),
            r'"v" of "table" has dtype float32',
        ),
        (lambda s: s["slots"]["v"].pop("table"), r'no slot "v" of "table"'),
        (lambda s: s["slots"].update(rms={"kernel": np.zeros((3, 2))}), r'has a slot "rms"'),
        (lambda s: s["non_slots"].pop("beta2_power"), r'has no "beta2_power"'),
        (lambda s: s.update(format=2), "format 2"),
    ],
)
def test_state_that_does_not_fit_changes_nothing(spoil: Any, message: str) -> None:
    run = trained()
    before = run.state()
    state = run.optimizer.state_dict()
    run.train(3, 4)
    run.optimizer.load_state_dict(state)
    after = run.state()
    spoil(state)
    with pytest.raises(ValueError, match=message):
        run.optimizer.load_state_dict(state)
    assert run.state() == after
    assert {k: v for k, v in after.items() if " of " in k} == {
        k: v for k, v in before.items() if " of " in k
    }


def test_slots_that_wait_for_an_array_are_not_saved_without_it(tmp_path: Path) -> None:
    params = {"w": np.ones(3, np.float32)}
    first = gpuopt.AdamOptimizer(0.1)
    first.update(params, {"w": np.ones(3, np.float32)})
    state = first.state_dict()
    del first, params
    step = Variable(0, name="global_step", trainable=False, dtype=np.int64)
    second = gpuopt.AdamOptimizer(0.1)
    second.load_state_dict(state)
    saver = Saver()
    with pytest.raises(ValueError, match='the slots of "w" in "Adam" were loaded, and wait'):
        saver.save(tmp_path / "model")
    assert not list(tmp_path.iterdir())
    params = {"w": np.ones(3, np.float32)}
    second.update(params, {"w": np.ones(3, np.float32)}, global_step=step)
    expected = params["w"].copy()
    path = saver.save(tmp_path / "model")
    params["w"][:] = 0
    saver.restore(path)
    np.testing.assert_array_equal(params["w"], expected)


def test_waiting_values_that_do_not_fit_are_refused_before_the_first_step() -> None:
    state = trained().optimizer.state_dict()
    optimizer = gpuopt.AdamOptimizer(0.1)
    w = Variable([1.0], name="w")
    state["slots"]["m"]["w"] = state["slots"]["v"]["w"] = np.zeros(7, np.float32)
    optimizer.load_state_dict(state, {})
    with pytest.raises(ValueError, match='slot "m" of "w" has shape'):
        optimizer.apply_gradients([([1.0], w)])
    np.testing.assert_array_equal(w, [1.0])


@pytest.mark.parametrize("state", [None, {}, {"slots": {}}, [1]])
def test_loading_something_that_is_no_state_is_a_type_error(state: Any) -> None:
    with pytest.raises(TypeError, match="optimizer's state is a dictionary"):
        gpuopt.AdamOptimizer().load_state_dict(state)


def test_state_cannot_be_read_in_the_middle_of_a_step() -> None:
    class Curious(gpuopt.AdamOptimizer):
        def _finish(self, update_ops: Any, name_scope: str) -> None:
            self.state_dict()

    w = Variable([1.0], name="w")
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        Curious().apply_gradients([([1.0], w)])
    gpuopt.AdamOptimizer().state_dict()  # and the gate is open again


# The file.


@one_of_each_shape
@every_dtype
@pytest.mark.one_in(8)
def test_restored_checkpoint_continues_the_run_bit_by_bit(
    name: str, arguments: dict[str, Any], dtype: Any, tmp_path: Path
) -> None:
    run = Run(make(name, arguments), dtype=dtype)
    saver = Saver(run.named, optimizers=[run.optimizer])
    run.train(0, 3)
    path = saver.save(tmp_path / "model", global_step=run.step)
    run.train(3, 6)
    expected = run.state()
    saver.restore(path)
    run.train(3, 6)
    assert run.state() == expected

    fresh = Run(make(name, arguments), seed=5, dtype=dtype)
    Saver(fresh.named, optimizers=[fresh.optimizer]).restore(path)
    fresh.train(3, 6)
    assert fresh.state() == expected


def test_a_checkpoint_is_a_plain_safetensors_file_with_tensorflows_names(tmp_path: Path) -> None:
    run = trained(dtype=ml_dtypes.bfloat16)
    second = gpuopt.AdamOptimizer(0.2)
    second.apply_gradients([(run.kernel.numpy(), run.kernel)])
    path = Saver().save(tmp_path / "model", global_step=run.step)
    assert path == str(tmp_path / "model-3.safetensors")
    tensors = load_file(path)
    # As structure.json has it: a second Adam's slots count on.
    assert sorted(tensors) == [
        "beta1_power",
        "beta1_power_1",
        "beta2_power",
        "beta2_power_1",
        "global_step",
        "kernel",
        "kernel/Adam",
        "kernel/Adam_1",
        "kernel/Adam_2",
        "kernel/Adam_3",
        "table",
        "table/Adam",
        "table/Adam_1",
    ]
    assert tensors["kernel/Adam"].dtype == ml_dtypes.bfloat16
    assert tensors["global_step"].dtype == np.int64
    assert tensors["beta1_power"].dtype == np.float32
    own = run.optimizer.get_slot(run.table, "v").numpy()
    assert tensors["table/Adam_1"].tobytes() == own.tobytes()
    with safe_open(path, "np") as opened:
        metadata = opened.metadata()
    assert metadata["format_version"] == "1"
    assert metadata["gpuopt_version"] == gpuopt.__version__
    assert sorted(json.loads(metadata["checksums"])) == sorted(tensors)
    description = json.loads(metadata["description"])
    assert description["global_step"] == 3
    first, other = description["optimizers"]
    assert first["optimizer"] == "AdamOptimizer"
    assert first["hyperparameters"]["learning_rate"] == 0.1
    assert other["hyperparameters"]["learning_rate"] == 0.2


def test_checkpoint_has_the_keys_that_tensorflow_wrote(
    subtests: pytest.Subtests, tmp_path: Path
) -> None:
    for key, expected in read_json("structure.json").items():
        gc.collect()  # frees the names
        with subtests.test(key):
            assert keys_of(key, tmp_path) == expected["checkpoint_keys"]


def keys_of(key: str, folder: Path) -> list[Any]:
    """Returns the names and shapes in a checkpoint of two optimizers; see structure.json."""
    optimizer_name, _, custom = key.split("|")
    kwargs = {} if custom == "name=None" else {"name": custom.removeprefix("name=")}
    step = Variable(0, name="global_step", trainable=False, dtype=np.int64)
    kernel = Variable(np.ones(3, np.float32), name="net/kernel")
    a = Variable(np.ones((2, 2), np.float32), name="a")
    c = Variable(np.ones(2, np.float32), name="c")
    pairs = [(np.ones(3, np.float32), kernel), (np.ones((2, 2), np.float32), a), (None, c)]
    optimizers = [OPTIMIZERS[optimizer_name](step, **kwargs) for _ in range(2)]
    for optimizer in optimizers:
        optimizer.apply_gradients(pairs, global_step=step)
    path = Saver([step, kernel, a, c], optimizers=optimizers).save(folder / "model")
    return sorted([name, list(array.shape)] for name, array in load_file(path).items())


def test_every_dtype_and_shape_survives_exactly(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "scalar": np.float32(1.5),
        "empty": np.zeros((0, 3), np.float64),
        "bool": rng.random(5) > 0.5,
        "int8": np.arange(-3, 3, dtype=np.int8),
        "uint64": np.array([2**64 - 1], np.uint64),
        "complex64": np.array([1 + 2j], np.complex64),
        "bfloat16": rng.normal(size=4).astype(ml_dtypes.bfloat16),
        "nan": np.array([np.nan, -0.0, np.inf, 5e-324]),
        'name with "quotes", / and \N{GREEK SMALL LETTER ALPHA}': np.ones(2, np.float16),
    }
    variables = {name: Variable(array, name="x") for name, array in arrays.items()}
    fortran = np.asfortranarray(rng.normal(size=(3, 4)))
    strided = rng.normal(size=(6, 4))[::2, ::-1]
    swapped = rng.normal(size=3).astype(">f8")
    raw = {"fortran": fortran, "strided": strided, "swapped": swapped}
    before = {n: np.array(v).astype(np.array(v).dtype.newbyteorder("=")) for n, v in raw.items()}
    saver = Saver({**variables, **raw})
    path = saver.save(tmp_path / "model")
    for variable in variables.values():
        variable.storage[...] = 0
    for array in raw.values():
        array[...] = 0
    saver.restore(path)
    for name, array in arrays.items():
        assert variables[name].numpy().tobytes() == np.asarray(array).tobytes(), name
    for name, array in before.items():
        np.testing.assert_array_equal(raw[name], array)


def test_dtype_that_the_format_lacks_is_refused_by_name(tmp_path: Path) -> None:
    w = Variable(np.ones(2, np.complex128), name="w", dtype=np.complex128)
    with pytest.raises(
        ValueError, match='"w" has dtype complex128, which a checkpoint cannot hold'
    ):
        Saver([w]).save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_renamed_variables_find_their_slots_through_a_mapping(tmp_path: Path) -> None:
    run = trained()
    Saver().save(tmp_path / "model")
    run.train(3, 5)
    expected = run.state()
    other = Run(gpuopt.AdamOptimizer(0.1), seed=3)
    assert other.kernel.name == "kernel_1"
    Saver(other.named, optimizers=[other.optimizer]).restore(tmp_path / "model")
    other.train(3, 5)
    assert other.state() == expected


def test_restored_before_variables_exist(tmp_path: Path) -> None:
    run = trained()
    Saver().save(tmp_path / "model")
    run.train(3, 5)
    expected = run.state()
    del run
    optimizer = gpuopt.AdamOptimizer(0.1)
    saver = Saver()
    with pytest.raises(CheckpointError, match='holds "global_step", "kernel", "table"'):
        saver.restore(tmp_path / "model")
    saver.restore(tmp_path / "model", deferred=True)
    again = saver.save(tmp_path / "again")  # what waits is not lost
    assert load_file(again).keys() == load_file(tmp_path / "model.safetensors").keys()
    late = Run(optimizer, seed=4)
    saver.attach(late.variables)
    late.train(3, 5)
    assert late.state() == expected
    with pytest.raises(ValueError, match='no restored value waits for "kernel"'):
        saver.attach([late.kernel])


def test_averages_are_restored_as_weights(tmp_path: Path) -> None:
    w = Variable([1.0], name="w")
    average = gpuopt.ExponentialMovingAverage(0.5)
    average.apply([w])
    w.assign([3.0])
    average.apply([w])
    Saver().save(tmp_path / "model")
    Saver(average.variables_to_restore([w])).restore(tmp_path / "model")
    np.testing.assert_array_equal(w, [2.0])


def test_missing_and_extra_names_are_named(tmp_path: Path) -> None:
    run = trained()
    path = Saver().save(tmp_path / "model")
    before = run.state()
    bias = Variable([0.0], name="bias")
    with pytest.raises(CheckpointError, match='holds no "bias"'):
        Saver().restore(path)
    del bias
    Saver([run.kernel]).restore(path)  # the others are left out, as in TensorFlow
    run.optimizer = run.kernel = None
    with pytest.raises(CheckpointError, match=r'holds .*"kernel"'):
        Saver().restore(path)
    assert before["table"] == run.table.numpy().tobytes()


@pytest.mark.parametrize("path", ["", "here/", ".safetensors"])
def test_a_path_without_a_files_name_is_refused(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    w = Variable([0.0], name="w")
    with pytest.raises(ValueError, match="ends without a file's name"):
        Saver([w]).save(path)
    assert not [*tmp_path.glob("**/.*")]


def test_two_optimizers_of_one_name_must_be_told_apart(tmp_path: Path) -> None:
    run = trained()
    path = Saver().save(tmp_path / "model")
    other = gpuopt.AdamOptimizer(0.3)
    with pytest.raises(CheckpointError, match='1 optimizers named "Adam", and there are 2'):
        Saver().restore(path)
    Saver(run.named, optimizers=[run.optimizer]).restore(path)
    del other
    with pytest.raises(
        CheckpointError,
        match=rf'{path} holds no state of an optimizer named "Momentum"; its optimizers: "Adam"',
    ):
        Saver(run.named, optimizers=[gpuopt.MomentumOptimizer(0.1, 0.9)]).restore(path)


def test_a_variable_or_an_optimizer_alone_is_not_taken_for_a_list() -> None:
    w, optimizer = Variable(np.ones((2, 3), np.float32), name="w"), gpuopt.AdamOptimizer()
    with pytest.raises(TypeError, match="var_list must be a list of variables, got Variable of"):
        Saver(w)
    with pytest.raises(TypeError, match="var_list must be a list of variables, got AdamOptimizer"):
        Saver(optimizer)
    with pytest.raises(TypeError, match="var_list must be a list of variables, got str"):
        Saver("w")
    with pytest.raises(TypeError, match="optimizers must be a list of optimizers"):
        Saver([w], optimizers=optimizer)
    with pytest.raises(TypeError, match="var_list holds AdamOptimizer, not a Variable"):
        Saver([w, optimizer])


def test_a_raw_array_is_saved_by_the_name_that_a_mapping_gives_it(tmp_path: Path) -> None:
    array, step = np.ones(3, np.float32), Variable(0, name="global_step", trainable=False)
    with pytest.raises(TypeError, match=r"var_list holds ndarray of dtype float32.*needs a name"):
        Saver([array])
    with pytest.raises(TypeError, match=r"\['layers'\]: .* got list; .*{.layers/0/W.: array"):
        Saver({"layers": [{"W": array}]})
    with pytest.raises(TypeError, match=r"var_list\['rate'\]: .* got float"):
        Saver({"w": array, "rate": 0.1})
    assert list(load_file(Saver({"w": array}).save(tmp_path / "model"))) == ["w"]
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    optimizer.apply_gradients([(np.ones(3, np.float32), array)])
    with pytest.raises(ValueError, match=r'slot "momentum" in "Momentum".*Saver\({"w": array}'):
        Saver().save(tmp_path / "model", step)


def test_a_path_that_is_no_file_is_told_from_a_file_that_is_missing(tmp_path: Path) -> None:
    saver = Saver([Variable([1.0], name="w")])
    with pytest.raises(ValueError, match="latest_checkpoint returns for a folder without a check"):
        saver.restore(gpuopt.latest_checkpoint(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"is a folder; .* latest_checkpoint\("):
        saver.restore(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        saver.restore(tmp_path / "model")


def two_of_one_name(
    order: str,
) -> tuple[dict[str, Variable], dict[str, gpuopt.MomentumOptimizer]]:
    variables = {name: Variable(np.zeros(2, np.float32), name=name) for name in "ab"}
    return variables, {name: gpuopt.MomentumOptimizer(1.0, 0.9) for name in order}


def step_each(
    variables: dict[str, Variable], optimizers: dict[str, gpuopt.MomentumOptimizer]
) -> None:
    for name, scale in (("a", 1), ("b", 2)):
        gradient = np.full(2, scale, np.float32)
        optimizers[name].apply_gradients([(gradient, variables[name])])


def test_optimizers_of_one_name_made_in_another_order_do_not_take_each_others_state(
    tmp_path: Path,
) -> None:
    variables, optimizers = two_of_one_name("ab")
    step_each(variables, optimizers)
    path = Saver().save(tmp_path / "model")
    step_each(variables, optimizers)
    expected = [variable.numpy().tolist() for variable in variables.values()]
    del variables, optimizers

    variables, optimizers = two_of_one_name("ba")
    Saver().restore(path)
    restored = [variable.numpy().tolist() for variable in variables.values()]
    for _ in range(2):
        with pytest.raises(ValueError, match=r'"momentum" of "a" went to another .* "Momentum"'):
            step_each(variables, optimizers)
    assert [variable.numpy().tolist() for variable in variables.values()] == restored
    # Where it is said which is which, they go on as the saved run would.
    del variables, optimizers
    variables, optimizers = two_of_one_name("ba")
    in_order = [optimizers[name] for name in "ab"]
    Saver(list(variables.values()), optimizers=in_order).restore(path)
    step_each(variables, optimizers)
    assert [variable.numpy().tolist() for variable in variables.values()] == expected


def test_optimizers_of_one_name_made_in_the_saved_order_take_up_new_variables(
    tmp_path: Path,
) -> None:
    variables, optimizers = two_of_one_name("ab")
    step_each(variables, optimizers)
    path = Saver().save(tmp_path / "model")
    Saver().restore(path)
    late = Variable(np.zeros(2, np.float32), name="late")
    for optimizer in optimizers.values():
        optimizer.apply_gradients([(np.ones(2, np.float32), late)])
    assert late.numpy().tolist() == [-2, -2]


def test_latest_checkpoint_is_the_one_saved_last_even_if_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = Variable([0.0], name="w")
    assert gpuopt.latest_checkpoint(tmp_path) is None
    assert gpuopt.latest_checkpoint(tmp_path / "nowhere") is None
    Saver([w]).save(tmp_path / "model", global_step=10)
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    newest = Saver([w]).save(tmp_path / "model", global_step=2)
    assert gpuopt.latest_checkpoint(tmp_path) == newest


def test_max_to_keep_and_keep_checkpoint_every_n_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    w = Variable([0.0], name="w")
    saver = Saver([w], max_to_keep=2, keep_checkpoint_every_n_hours=1)
    for hours in range(7):
        now[0] = hours * 1800.0
        saver.save(tmp_path / "model", global_step=hours)
    # Every half an hour: those first saved after 1, 2, ... hours stay, as in TensorFlow.
    kept = sorted(int(p.stem.partition("-")[2]) for p in tmp_path.iterdir())
    assert kept == [3, 5, 6]
    assert [Path(p).stem for p in saver.last_checkpoints] == ["model-5", "model-6"]
    monkeypatch.undo()
    every = Saver([w], max_to_keep=None)
    for step in range(20, 28):
        every.save(tmp_path / "all", global_step=step)
    assert len(every.last_checkpoints) == 8
    later = Saver([w], max_to_keep=1)
    later.recover_last_checkpoints(every.last_checkpoints)
    later.save(tmp_path / "all", global_step=28)
    assert [p.name for p in tmp_path.glob("all*")] == ["all-28.safetensors"]


def test_saving_the_same_path_again_counts_once(tmp_path: Path) -> None:
    w = Variable([0.0], name="w")
    saver = Saver([w], max_to_keep=2)
    for value in range(5):
        w.assign([value])
        saver.save(tmp_path / "model")
    assert saver.last_checkpoints == [str(tmp_path / "model.safetensors")]
    assert load_file(saver.last_checkpoints[0])["w"] == [4.0]


def test_malformed_arguments_are_refused() -> None:
    w = Variable([0.0], name="w")
    with pytest.raises(ValueError, match="No variables to save"):
        Saver([])
    with pytest.raises(ValueError, match="appears twice"):
        Saver([w, w])
    with pytest.raises(TypeError, match="must be text"):
        Saver({1: w})
    with pytest.raises(TypeError, match="optimizers must hold optimizers"):
        Saver([w], optimizers=[w])
    with pytest.raises(ValueError, match="must not be negative"):
        Saver([w], max_to_keep=-1)


# In the background, and beside other threads.


def test_step_goes_on_while_an_async_save_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained()
    may_write = threading.Event()
    write = saver_module.write_checkpoint

    def slow(*arguments: Any) -> str:
        assert may_write.wait(60)
        return write(*arguments)

    monkeypatch.setattr(saver_module, "write_checkpoint", slow)
    saver = Saver()
    future = saver.save_async(tmp_path / "model")
    run.train(3, 6)  # would wait for ever if the writing held it back
    assert not future.done()
    may_write.set()
    saver.restore(future.result())
    assert int(run.step) == 3


def test_failed_async_save_is_logged_and_raised_and_the_next_one_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    w = Variable([0.0], name="w")
    saver = Saver([w])
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        saver.save_async(tmp_path / "missing" / "model")
    (tmp_path / "taken.safetensors").mkdir()
    future = saver.save_async(tmp_path / "taken")
    with pytest.raises(OSError, match="could not be saved"):
        future.result()
    assert "could not be saved" in caplog.text
    assert Path(saver.save_async(tmp_path / "model").result()).exists()


@pytest.mark.parametrize("mode", ["save", "save_async", "state_dict"])
def test_a_checkpoint_saved_while_threads_train_is_the_state_between_two_steps(
    mode: str, tmp_path: Path
) -> None:
    """Each step adds 1 to everything, so a mixture of two steps shows."""
    size = 20_000
    a, b = (Variable(np.zeros(size, np.float32), name=name) for name in "ab")
    step = Variable(0, name="global_step", trainable=False, dtype=np.int64)
    optimizer = gpuopt.MomentumOptimizer(-1.0, 0.0, use_locking=True)
    saver = Saver(max_to_keep=2)
    gradient = np.ones(size, np.float32)
    seen = set()

    def work() -> None:
        optimizer.apply_gradients([(gradient, a), (gradient, b)], global_step=step)

    with repeated(work, threads=4):
        for number in range(25):
            if mode == "state_dict":
                optimizer.state_dict()  # only must not fail or block
                continue
            path = getattr(saver, mode)(tmp_path / "model", global_step=number)
            tensors = load_file(path if mode == "save" else path.result())
            count = int(tensors["global_step"])
            seen.add(count)
            assert set(np.unique(tensors["a"])) == {count}
            assert set(np.unique(tensors["b"])) == {count}
            time.sleep(0.002)
    assert mode == "state_dict" or len(seen) > 5


# TensorFlow's own checkpoint.


class _Reader:
    """Reads tests/golden/tf1_checkpoint without TensorFlow, in which tensors lie by their names."""

    def __init__(self, prefix: str) -> None:
        stored = Path(f"{prefix}.data-00000-of-00001").read_bytes()
        self._tensors = {}
        with np.load(Path(prefix).parent / "continued.npz") as archive:
            for key in sorted(key for key in archive if key.startswith("final/")):
                like = archive[key]
                value = np.frombuffer(stored, like.dtype, like.size).reshape(like.shape)
                self._tensors[key.removeprefix("final/")] = value
                stored = stored[like.nbytes :]
        assert not stored

    def get_variable_to_shape_map(self) -> dict[str, tuple[int, ...]]:
        return {name: value.shape for name, value in self._tensors.items()}

    def get_tensor(self, name: str) -> np.ndarray:
        return self._tensors[name]


@pytest.fixture(params=["TensorFlow", "a stand-in"])
def tensorflows_reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "a stand-in":
        train = ModuleType("tensorflow.train")
        train.load_checkpoint = _Reader  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "tensorflow", ModuleType("tensorflow"))
        monkeypatch.setitem(sys.modules, "tensorflow.train", train)
    elif importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed")


@pytest.mark.usefixtures("tensorflows_reader")
@pytest.mark.parametrize("catch_up", [False, True, "stepping"])
def test_tensorflows_checkpoint_is_continued_as_tensorflow_did(
    catch_up: bool | str, tmp_path: Path
) -> None:
    """tests/golden/make_tf1_checkpoint.py made it, with real TensorFlow."""
    with np.load(GOLDEN / "tf1_checkpoint" / "continued.npz") as archive:
        golden = dict(archive)
    kernel = Variable(np.zeros((4, 3), np.float32), name="net/kernel")
    table = Variable(np.zeros((6, 2), np.float32), name="table")
    step = Variable(0, name="global_step", trainable=False, dtype=np.int64)
    adam = gpuopt.AdamOptimizer(0.05, catch_up=catch_up)
    momentum = gpuopt.MomentumOptimizer(0.1, 0.9)
    for row in (0, 3, 1):  # with catch_up, rows are behind when they are restored
        before = IndexedSlices(np.ones((1, 2), np.float32), [row])
        adam.apply_gradients([(np.ones((4, 3), np.float32), kernel), (before, table)])
        momentum.apply_gradients([(np.ones((4, 3), np.float32), kernel)])
    Saver().restore(GOLDEN / "tf1_checkpoint" / "model.ckpt-3")
    assert int(step) == 3
    for t in range(4):
        gradient = golden["gradient/kernel"][t]
        slices = IndexedSlices(golden["gradient/values"][t], golden["gradient/rows"][t])
        adam.apply_gradients([(gradient, kernel), (slices, table)], global_step=step)
        momentum.apply_gradients([(np.float32(0.1) * gradient, kernel)])
    behind: Any = table.identity.behind
    assert bool(catch_up) == (behind is not None and behind.is_behind)
    got = load_file(Saver().save(tmp_path / "model"))
    assert sorted(got) == sorted(key.removeprefix("final/") for key in golden if "final/" in key)
    for name, value in got.items():
        assert error(value, golden[f"final/{name}"]) <= 3e-6, name


def test_tensorflows_checkpoint_without_tensorflow_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    monkeypatch.setitem(sys.modules, "tensorflow.train", None)
    w = Variable([0.0], name="w")
    with pytest.raises(ModuleNotFoundError, match="needs tensorflow, which is not installed"):
        Saver([w]).restore(GOLDEN / "tf1_checkpoint" / "model.ckpt-3")


@pytest.mark.contract
@pytest.mark.parametrize(
    ("step", "error"),
    [
        (1.5, ValueError),
        (np.float32(2.5), ValueError),
        (-1, ValueError),
        (np.int64(-7), ValueError),
        (np.nan, ValueError),
        (np.inf, ValueError),
        ([1, 2], ValueError),
        (True, TypeError),
        (np.bool_(True), TypeError),
        ("3", TypeError),
        (lambda: 3, TypeError),
    ],
)
def test_what_numbers_no_step_is_refused_by_name(
    step: Any, error: type[Exception], tmp_path: Path
) -> None:
    saver = Saver([Variable([1.0], name="w")])
    for save in (saver.save, saver.save_async):
        with pytest.raises(error, match="global_step must be a") as raised:
            save(tmp_path / "model", global_step=step)
        assert "function that" not in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", [2**60 + 1, np.int64(2**60 + 1), np.array(2**60 + 1)])
def test_the_number_of_a_step_keeps_its_digits(step: Any, tmp_path: Path) -> None:
    saver = Saver([Variable([1.0], name="w")])
    assert saver.save(tmp_path / "model", global_step=step).endswith(f"-{2**60 + 1}.safetensors")
