"""Thinc's models, updated by gpuopt's optimizers and by Thinc's own: make test-thinc."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

pytestmark = [pytest.mark.value, pytest.mark.thinc]

# On both sides: moments of float32, rounded in another order.
WITHIN = 1e-6
STEPS = 50


@pytest.fixture(autouse=True)
def every_form(every_cpu_form: str) -> Iterator[None]:
    """Runs each test with a compiler, and without."""
    from gpuopt.interop import thinc_updates

    thinc_updates._host.cache_clear()
    yield
    thinc_updates._host.cache_clear()


def model(width: int = 8) -> Any:
    from thinc.api import Relu, Softmax, chain, fix_random_seed

    fix_random_seed(0)
    made = chain(Relu(nO=width, nI=6), Relu(nO=width, nI=width), Softmax(nO=3, nI=width))
    made.initialize()
    # Biases and a last layer that begin at 0 would show no decay.
    rng = np.random.default_rng(0)
    for node, name in parameters(made):
        node.set_param(name, rng.standard_normal(node.get_param(name).shape).astype(np.float32))
    return made


def parameters(made: Any) -> list[tuple[Any, str]]:
    return [(node, name) for node in made.walk() for name in node.param_names]


def weights(made: Any) -> np.ndarray:
    return np.concatenate([node.get_param(name).ravel() for node, name in parameters(made)])


def add_gradients(made: Any, step: int, scale: float = 1.0) -> None:
    rng = np.random.default_rng(step)
    for node, name in parameters(made):
        shape = node.get_param(name).shape
        node.inc_grad(name, (scale * rng.standard_normal(shape)).astype(np.float32))


def train(made: Any, optimizer: Any, steps: range, scale: float = 1.0) -> None:
    for step in steps:
        add_gradients(made, step, scale)
        made.finish_update(optimizer)
        optimizer.step_schedules()


def theirs(name: str) -> Callable[..., Any]:
    from thinc.api import registry

    return registry.optimizers.get(f"{name}.v1")  # type: ignore[no-any-return]


def ours(name: str = "Adam") -> Callable[..., Any]:
    from thinc.api import registry

    return registry.optimizers.get(f"gpuopt.{name}.v1")  # type: ignore[no-any-return]


def averages_of(optimizer: Any, made: Any) -> np.ndarray:
    of_nodes = [optimizer.averages[node.id, name] for node, name in parameters(made)]
    return np.concatenate([average.ravel() for average in of_nodes])


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Adam": ("Adam", {}),
    "what spaCy's configs have": ("Adam", {"L2": 0.01, "use_averages": False}),
    "fast, with decay": ("Adam", {"learn_rate": 0.05, "L2": 0.1, "beta1": 0.5, "eps": 1e-3}),
    "L2 in the gradient": ("Adam", {"L2": 0.1, "L2_is_weight_decay": False}),
    "without clipping": ("Adam", {"grad_clip": 0.0}),
    "a list of rates": ("Adam", {"learn_rate": [0.1, 0.03, 0.01]}),
    "RAdam": ("RAdam", {"L2": 0.01}),
    "RAdam with a short memory": ("RAdam", {"beta2": 0.9, "use_averages": False}),
    "SGD": ("SGD", {"learn_rate": 0.1, "L2": 0.01}),
    "SGD without averages": ("SGD", {"learn_rate": 0.1, "use_averages": False}),
}


@pytest.mark.parametrize("scale", [1e-3, 1.0])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_thincs_optimizer(case: str, scale: float) -> None:
    compare(case, scale, width=8, within=WITHIN)


# Each step rounds a weight that decays, and of more weights one is farther off.
@pytest.mark.parametrize("case", ["what spaCy's configs have", "fast, with decay", "RAdam", "SGD"])
def test_steps_of_wide_layers_that_decay_are_those_of_thincs_optimizer(case: str) -> None:
    compare(case, scale=1.0, width=64, within=2 * WITHIN)


def compare(case: str, scale: float, width: int, within: float) -> None:
    """Compares weights and averages after steps by one of `CASES`, of Thinc's and of ours."""
    name, arguments = CASES[case]
    expected, found = model(width), model(width)
    their_optimizer, our_optimizer = theirs(name)(**arguments), ours(name)(**arguments)
    train(expected, their_optimizer, range(STEPS), scale)
    train(found, our_optimizer, range(STEPS), scale)
    np.testing.assert_allclose(weights(found), weights(expected), rtol=within, atol=within)
    assert abs(weights(expected) - weights(model(width))).max() > 1e-3, "the weights move"
    if arguments.get("use_averages", True):
        averages = averages_of(our_optimizer, found), averages_of(their_optimizer, expected)
        np.testing.assert_allclose(*averages, rtol=within, atol=within)
    else:
        assert our_optimizer.averages is None


def test_schedules_are_those_of_thinc() -> None:
    from thinc import schedules

    optimizers = [
        make(learn_rate=schedules.warmup_linear(0.1, 5, 30), L2=schedules.decaying(0.1, 0.1))
        for make in (theirs("Adam"), ours())
    ]
    expected, found = model(), model()
    train(expected, optimizers[0], range(STEPS))
    train(found, optimizers[1], range(STEPS))
    np.testing.assert_allclose(weights(found), weights(expected), rtol=WITHIN, atol=WITHIN)


def test_a_models_parameters_are_updated_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuopt.interop.thinc_updates import Updates

    numbers: list[int] = []
    apply = Updates.apply

    def counted(self: Updates, given: Any, *rest: Any) -> None:
        numbers.append(len(given))
        apply(self, given, *rest)

    monkeypatch.setattr(Updates, "apply", counted)
    made = model()
    train(made, ours()(), range(3))
    assert numbers == [len(parameters(made))] * 3


def test_the_model_is_up_to_date_when_finish_update_returns() -> None:
    expected, found, optimizers = model(), model(), (theirs("Adam")(), ours()())
    for made, optimizer in zip((expected, found), optimizers, strict=True):
        for step in range(3):
            add_gradients(made, step)
            made.finish_update(optimizer)  # and no step_schedules, as in nlp.update
    np.testing.assert_allclose(weights(found), weights(expected), rtol=WITHIN, atol=WITHIN)
    assert not any(node.get_grad(name).any() for node, name in parameters(found))


def test_a_call_outside_of_finish_update_updates_its_parameter_alone() -> None:
    arrays = []
    for optimizer in (theirs("Adam")(), ours()()):
        one, other = np.ones((2, 3), np.float32), np.ones(4, np.float32)
        for lr_scale in (1.0, 0.5):
            gradient = np.full((2, 3), 0.5, np.float32)
            result = optimizer((1, "W"), one, gradient, lr_scale=lr_scale)
            assert np.shares_memory(result[0], one)
            assert not gradient.any()
        optimizer((1, "b"), other, np.ones(4, np.float32))
        arrays.append((one, other))
    np.testing.assert_allclose(arrays[1][0], arrays[0][0], rtol=WITHIN)
    np.testing.assert_allclose(arrays[1][1], arrays[0][1], rtol=WITHIN)


def test_each_parameter_counts_its_own_steps() -> None:
    expected, found, optimizers = model(), model(), (theirs("Adam")(), ours()())
    for made, optimizer in zip((expected, found), optimizers, strict=True):
        late = {parameters(made)[0], parameters(made)[3]}
        for step in range(6):
            for node, name in parameters(made):
                if step > 2 or (node, name) not in late:
                    gradient = np.full_like(node.get_param(name), 0.1 * step + 0.1)
                    node.inc_grad(name, gradient)
            made.finish_update(optimizer)
    np.testing.assert_allclose(weights(found), weights(expected), rtol=WITHIN, atol=WITHIN)


def test_an_update_that_an_error_ended_is_not_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    from thinc.api import Model

    made, optimizer = model(), ours()(use_averages=False)
    add_gradients(made, 0)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Model, "set_param", fail)
        with pytest.raises(KeyboardInterrupt):
            made.finish_update(optimizer)
    after_one = weights(made)
    add_gradients(made, 1)
    made.finish_update(optimizer)
    assert (weights(made) != after_one).all()


def test_tied_weights_are_updated_once_for_each_name() -> None:
    from thinc.api import Linear, chain

    both = []
    for optimizer in (theirs("Adam")(), ours()()):
        first, second = Linear(nO=4, nI=4), Linear(nO=4, nI=4)
        made = chain(first, second).initialize()
        first.set_param("W", np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4))
        second.set_param("W", first.get_param("W"))
        train(made, optimizer, range(5))
        both.append(weights(made))
    np.testing.assert_allclose(both[1], both[0], rtol=WITHIN, atol=WITHIN)


def test_new_arrays_of_weights_go_on_with_their_moments() -> None:
    expected, found, optimizers = model(), model(), (theirs("Adam")(), ours()())
    for made, optimizer in zip((expected, found), optimizers, strict=True):
        train(made, optimizer, range(3))
        for node, name in parameters(made):
            node.set_param(name, node.get_param(name).copy())
        train(made, optimizer, range(3, 6))
        with made.use_params(optimizer.averages):
            pass
        train(made, optimizer, range(6, 9))
    np.testing.assert_allclose(weights(found), weights(expected), rtol=WITHIN, atol=WITHIN)


def test_weights_of_another_shape_are_refused() -> None:
    optimizer = ours()()
    optimizer((1, "W"), np.ones(3, np.float32), np.ones(3, np.float32))
    with pytest.raises(ValueError, match=r"\(1, 'W'\) has the shape \(4,\), and had 3 elements"):
        optimizer((1, "W"), np.ones(4, np.float32), np.ones(4, np.float32))


@pytest.mark.parametrize("gradient", [np.ones(4, np.float32), np.ones(3)], ids=["shape", "dtype"])
def test_a_gradient_that_does_not_fit_is_refused(gradient: np.ndarray) -> None:
    optimizer, array = ours()(), np.ones(3, np.float32)
    with pytest.raises(ValueError, match=r"the gradient of parameter \(1, 'W'\) is"):
        optimizer((1, "W"), array, gradient)
    assert (array == 1).all()
    optimizer((1, "W"), array, np.ones(3, np.float32))
    assert optimizer.nr_update[1, "W"] == 1


def test_beta2_without_beta1_is_refused_as_by_thinc() -> None:
    with pytest.raises(NotImplementedError, match=r"beta1=0.* with beta2=0\.9"):
        ours()(beta1=0.0, beta2=0.9)((1, "W"), np.ones(3, np.float32), np.ones(3, np.float32))


def test_a_copy_of_an_optimizer_writes_its_own_arrays_alone() -> None:
    made, optimizer = model(), ours()()
    train(made, optimizer, range(3))
    before = weights(made), averages_of(optimizer, made)
    twin, copied = copy.deepcopy((made, optimizer))
    train(twin, copied, range(3, 6))
    np.testing.assert_array_equal(weights(made), before[0])
    np.testing.assert_array_equal(averages_of(optimizer, made), before[1])
    train(made, optimizer, range(3, 6))
    np.testing.assert_array_equal(weights(made), weights(twin))


def some_rates() -> Iterator[float]:
    for step in itertools.count(1):
        yield 0.1 / step


def test_a_run_goes_on_from_its_state_as_if_it_had_not_ended() -> None:
    made, optimizer = model(), ours()(learn_rate=some_rates())
    train(made, optimizer, range(4))
    state, content = optimizer.to_bytes(made), made.to_bytes()
    train(made, optimizer, range(4, 8))
    again, restored = model().from_bytes(content), ours()(learn_rate=some_rates())
    assert restored.from_bytes(state, again) is restored
    train(again, restored, range(4, 8))
    np.testing.assert_array_equal(weights(again), weights(made))
    np.testing.assert_array_equal(averages_of(restored, again), averages_of(optimizer, made))


def test_a_state_is_written_to_a_file(tmp_path: Any) -> None:
    made, optimizer = model(), ours()()
    train(made, optimizer, range(4))
    optimizer.to_disk(tmp_path / "optimizer", made)
    restored = ours()().from_disk(tmp_path / "optimizer", made)
    assert restored.to_bytes(made) == optimizer.to_bytes(made)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    made, optimizer = model(), ours()()
    train(made, optimizer, range(4))
    state, other = optimizer.to_bytes(made), model(width=4)
    train(other, fresh := ours()(), range(2))
    before = fresh.to_bytes(other)
    for models, problem in {(other,): "it must be", (): "have no parameter"}.items():
        with pytest.raises(ValueError, match=problem):
            fresh.from_bytes(state, *models)
    for damaged in (b"", state[:-8], state.replace(b'"counts"', b'"covnts"')):
        with pytest.raises(ValueError, match="no state of a Thinc optimizer, or damaged"):
            fresh.from_bytes(damaged, other)
    assert fresh.to_bytes(other) == before
    with pytest.raises(ValueError, match="the schedules are at step 4"):
        optimizer.from_bytes(before, made)
    with pytest.raises(ValueError, match="which none of the given models has"):
        optimizer.to_bytes(other)


@pytest.mark.parametrize("last_score", [7, {"a": 1}, "12", [1, "text"], "[" * 100_000])
def test_a_forged_state_is_refused_and_changes_nothing(last_score: Any) -> None:
    made, optimizer = model(), ours()()
    train(made, optimizer, range(4))
    before = optimizer.to_bytes(made)
    arrays = load(before)
    about = json.loads(arrays["about"].tobytes())
    forged = json.dumps({**about, "last_score": last_score}).encode()
    if isinstance(last_score, str) and last_score[0] == "[":
        forged = last_score.encode()
    state = save({**arrays, "about": np.frombuffer(forged, np.uint8)})
    with pytest.raises(ValueError, match="no state of a Thinc optimizer, or damaged"):
        optimizer.from_bytes(state, made)
    assert optimizer.to_bytes(made) == before


def test_averages_that_a_user_drops_begin_anew() -> None:
    expected, found, optimizers = model(), model(), (theirs("Adam")(), ours()())
    for made, optimizer in zip((expected, found), optimizers, strict=True):
        train(made, optimizer, range(3))
        optimizer.averages = {}
        train(made, optimizer, range(3, 6))
    averages = averages_of(optimizers[1], found), averages_of(optimizers[0], expected)
    np.testing.assert_allclose(*averages, rtol=WITHIN, atol=WITHIN)


def test_parameters_of_no_elements_are_left_alone() -> None:
    from thinc.api import Model

    optimizer, shapes = ours()(), {"E": (0, 3), "F": (3, 0), "W": (3,)}
    made: Any = Model(
        "some", lambda *_: None, params={k: np.ones(v, np.float32) for k, v in shapes.items()}
    )
    for name, shape in shapes.items():
        made.set_grad(name, np.ones(shape, np.float32))
    train(made, optimizer, range(4))
    assert (made.get_param("W") != 1).all()


def test_weights_that_are_not_contiguous_are_updated_in_place() -> None:
    arrays = []
    for make in (theirs("SGD"), ours("SGD")):
        whole = np.ones((4, 6), np.float32)
        gradient = np.arange(12, dtype=np.float32).reshape(4, 3)
        make(learn_rate=0.1, use_averages=False)((1, "W"), whole[:, ::2], gradient)
        arrays.append(whole)
    np.testing.assert_allclose(arrays[1], arrays[0], rtol=WITHIN)


def test_an_optimizer_is_shown_with_its_settings_as_they_are_now() -> None:
    optimizer = ours()([0.5, 0.25, 0.125], L2=0.01, use_averages=False)
    defaults = "beta1=0.9, beta2=0.999, eps=1e-08, grad_clip=1.0"
    rest = f"L2=0.01, {defaults}, use_averages=False, use_radam=False, L2_is_weight_decay=True)"
    optimizer.b2 = 0.99
    rest = rest.replace("beta2=0.999", "beta2=0.99")
    # Of a list, Thinc 8 has the number that is next, and Thinc 9 a schedule.
    before, _, after = repr(optimizer).partition(", L2=")
    assert before in (
        "Optimizer(learn_rate=0.5",
        "Optimizer(learn_rate=<schedule 'wrap_generator'>",
    )
    assert f"L2={after}" == rest
    assert repr(ours("SGD")(0.5)) == (
        "Optimizer(learn_rate=0.5, L2=0.0, beta1=0.0, beta2=0.0, eps=1e-08, grad_clip=1.0, "
        "use_averages=True, use_radam=False, L2_is_weight_decay=True)"
    )
    assert "use_radam=True" in repr(ours("RAdam")())


def test_the_guides_config_makes_the_optimizer_that_it_names() -> None:
    from thinc.api import Config, registry

    from gpuopt.interop.thinc import Optimizer

    page = (Path(__file__).parents[2] / "docs" / "guides" / "thinc.md").read_text()
    [block] = re.findall(r"^```ini\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    # A part of a config of spaCy's, which has the section around it.
    config = Config().from_str(f"[training]\n\n{block}")
    made = registry.resolve(config)["training"]["optimizer"]
    assert type(made) is Optimizer
    assert repr(made) == (
        "Optimizer(learn_rate=0.001, L2=0.01, beta1=0.9, beta2=0.999, eps=1e-08, grad_clip=1.0, "
        "use_averages=False, use_radam=False, L2_is_weight_decay=True)"
    )
    one, other = model(), model()
    train(one, made, range(3))
    given = {
        name: value for name, value in config["training"]["optimizer"].items() if name[0] != "@"
    }
    train(other, theirs("Adam")(**given), range(3))
    np.testing.assert_allclose(weights(one), weights(other), rtol=0, atol=WITHIN)
