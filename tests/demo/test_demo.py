"""The demo learns with every optimizer, says what it did, and refuses wrong arguments."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpuopt
import gpuopt.__main__ as command_line
from gpuopt.backends import backend_for
from gpuopt.demo import parallel, settings, tune
from gpuopt.demo.digits import NUM_CLASSES, NUM_INTENSITIES, NUM_PIXELS, Digits, load_digits
from gpuopt.demo.model import WideAndDeep
from gpuopt.demo.settings import DEFAULT_NAMES, NAMES, TUNED
from gpuopt.demo.train import DEFAULT_STEPS, Result, train
from gpuopt.device import Device
from gpuopt.errors import DeviceUnavailableError
from gpuopt.optimizers.base.rule_optimizer import RuleOptimizer

FULL = bool(os.environ.get("GPUOPT_FULL"))
train_on_cpu: Callable[..., Result] = partial(train, device=Device.cpu, dtype=np.dtype(np.float32))


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `gpuopt` as a user does, with warnings as errors."""
    root = str(Path(gpuopt.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "gpuopt", *arguments],
        env={**os.environ, "PYTHONPATH": root},
        cwd=cwd,
        capture_output=True,
        text=True,
    )


def total_of_rows(slices: gpuopt.IndexedSlices, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    total = np.zeros(shape)
    np.add.at(total, slices.indices, slices.values)
    return total


def run_here(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs `gpuopt` in this process; returns what it prints."""
    assert command_line.main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


@pytest.fixture(scope="module")
def usual_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The output of a run with the usual optimizers, and the folder that it ran in."""
    folder = tmp_path_factory.mktemp("demo")
    finished = run("demo", "--steps", "30", cwd=folder)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    return finished.stdout, folder


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leaves out the picture, which takes longer than a few steps."""
    monkeypatch.setattr("gpuopt.demo.report.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has rules computed by numpy: to compile each takes longer than a few steps."""
    monkeypatch.setenv("GPUOPT_COMPILED", "0")


# The data.


def test_the_data_is_all_1797_images_in_their_published_range() -> None:
    parts = load_digits()
    images = np.concatenate([part.images for part in parts])
    labels = np.concatenate([part.labels for part in parts])
    assert images.shape == (1797, NUM_PIXELS)
    assert (images.min(), images.max()) == (0, NUM_INTENSITIES - 1)
    # "No of examples in testing set" on the UCI's page.
    counts = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.bincount(labels, minlength=NUM_CLASSES).tolist() == counts


def test_no_image_is_in_both_training_and_test_set() -> None:
    (train_images, _), (test_images, _) = load_digits()
    assert (len(train_images), len(test_images)) == (1437, 360)
    assert not {image.tobytes() for image in train_images} & {
        image.tobytes() for image in test_images
    }


def test_the_data_ships_with_its_source_and_licence_and_needs_no_pickle() -> None:
    data = Path(gpuopt.__file__).parent / "demo" / "data"
    text = (data / "README.md").read_text()
    for fact in ("Alpaydin", "Kaynak", "10.24432/C50P49", "Creative Commons Attribution 4.0"):
        assert fact in text
    assert (data / "digits.npz").stat().st_size < 64 * 1024
    with np.load(data / "digits.npz", allow_pickle=False) as arrays:
        assert {arrays[name].dtype for name in arrays} == {np.dtype(np.uint8)}


# The model.


def test_hand_written_gradients_are_the_slopes_of_the_loss() -> None:
    model = WideAndDeep(Device.cpu, np.dtype(np.float64), seed=3)
    images, labels = (array[:8] for array in load_digits()[0])
    _, grads_and_vars = model.loss_and_gradients(images, labels)
    rng = np.random.default_rng(0)
    width = 1e-5
    for gradient, variable in grads_and_vars:
        is_sparse = isinstance(gradient, gpuopt.IndexedSlices)
        slopes = total_of_rows(gradient, variable.shape) if is_sparse else gradient
        touched = np.argwhere(slopes)
        for position in map(tuple, rng.choice(touched, size=min(40, len(touched)), replace=False)):
            at = float(variable[position])
            losses = []
            for moved in (at + width, at - width):
                variable[position] = moved
                losses.append(model.loss_and_gradients(images, labels)[0])
            variable[position] = at
            slope = (losses[0] - losses[1]) / (2 * width)
            # Cancellation leaves eps / width of the loss of about 2.3.
            assert slope == pytest.approx(slopes[position], abs=1e-9), (variable.name, position)


def test_only_table_rows_of_the_batch_have_a_gradient() -> None:
    model = WideAndDeep(Device.cpu, np.dtype(np.float64), seed=3)
    images, labels = (array[:8] for array in load_digits()[0])
    (slices, table), *_ = model.loss_and_gradients(images, labels)[1]
    assert slices.values.shape == (8 * NUM_PIXELS, NUM_CLASSES)
    seen = {
        pixel * NUM_INTENSITIES + intensity
        for image in images
        for pixel, intensity in enumerate(image)
    }
    unseen = next(row for row in range(table.shape[0]) if row not in seen)
    before = model.scores(images)
    table[unseen] = 1000.0
    np.testing.assert_array_equal(model.scores(images), before)
    assert set(slices.indices.tolist()) == seen


# Training.


@pytest.mark.parametrize("optimizer", TUNED if FULL else ["Adam"])
def test_every_optimizer_reads_95_percent_of_unseen_digits(optimizer: str) -> None:
    result = train_on_cpu(optimizer)
    _, train_accuracy, test_accuracy = result.accuracies[-1]
    assert len(result.losses) == DEFAULT_STEPS
    assert train_accuracy >= 0.95
    assert test_accuracy >= 0.95


def test_the_demo_knows_every_optimizer_that_gpuopt_exports() -> None:
    exported = {
        name.removesuffix("Optimizer")
        for name in gpuopt.__all__
        if name.endswith("Optimizer") and issubclass(getattr(gpuopt, name), RuleOptimizer)
    }
    assert exported == set(NAMES)
    assert set(TUNED) <= exported, "learning_rates.toml names what is not exported"


def test_an_optimizer_that_is_not_tuned_learns_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(settings.TUNED, "Adagrad")
    losses = train_on_cpu("Adagrad", steps=100).losses
    assert losses == train_on_cpu("Adagrad", steps=100, learning_rate=0.01).losses
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("optimizer", TUNED if FULL else ["Adam"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.usefixtures("in_numpy")
def test_the_loss_falls_in_every_dtype(optimizer: str, dtype: Any) -> None:
    # Of fewer images, more is learnt in a step, and they are evaluated sooner.
    few = Digits(*(array[:192] for array in load_digits()[0]))
    digits, steps = (None, 100) if FULL else ((few, few), 40)
    result = train(optimizer, device=Device.cpu, dtype=np.dtype(dtype), steps=steps, digits=digits)
    assert np.isfinite(result.losses).all()
    # RMSProp starts its mean square with ones, so its first steps are short.
    assert np.mean(result.losses[-5:]) < 0.8 * result.losses[0]


@pytest.mark.parametrize("optimizer", ["Adam", "LazyAdam"] if FULL else ["LazyAdam"])
def test_adam_survives_second_moments_too_small_for_float16(optimizer: str) -> None:
    result = train(optimizer, device=Device.cpu, dtype=np.dtype(np.float16), steps=300)
    assert result.accuracies[-1][2] >= 0.95


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-6), (np.float64, 1e-12)])
@pytest.mark.usefixtures("in_numpy")
def test_differentiated_and_hand_written_gradients_give_the_same_curves(
    dtype: Any, tolerance: float
) -> None:
    by_hand, differentiated = (
        train(
            "Adam",
            device=Device.cpu,
            dtype=np.dtype(dtype),
            steps=8,
            autodiff=autodiff,
            digits=(load_digits()[0], Digits(*(array[:1] for array in load_digits()[1]))),
        )
        for autodiff in (False, True)
    )
    np.testing.assert_allclose(differentiated.losses, by_hand.losses, rtol=tolerance)


def test_the_same_seed_gives_the_same_losses_and_another_seed_others() -> None:
    first, again, other = (train_on_cpu("Adam", steps=20, seed=seed).losses for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_each_step_updates_one_table_sparsely_and_the_layers_densely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = backend_for(Device.cpu)
    updated: Counter[str] = Counter()

    def spy(method: str, count: Callable[[Any], int]) -> None:
        real = getattr(backend, method)

        def counting(
            rule: Any, target: Any, gradient: Any, *arguments: Any, **options: Any
        ) -> None:
            updated[method] += count(gradient)
            real(rule, target, gradient, *arguments, **options)

        monkeypatch.setattr(backend, method, counting)

    spy("apply_dense", len)
    spy("apply_sparse", lambda values: 1)
    train_on_cpu("Adam", steps=3)
    assert updated == {"apply_dense": 3 * 4, "apply_sparse": 3}


def test_the_optimizers_share_of_the_time_is_between_0_and_1() -> None:
    result = train_on_cpu("Adam", steps=10)
    assert 0 < result.optimizer_seconds < result.seconds


# Learning rates.


def test_a_rate_is_judged_by_images_that_its_model_has_not_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left_out = []

    def spy(name: str, *, digits: Any, **arguments: Any) -> Result:
        seen, unseen = ({image.tobytes() for image in part.images} for part in digits)
        assert not seen & unseen
        assert len(digits[0].labels) + len(digits[1].labels) == 1437
        left_out.append(unseen)
        return train(name, digits=digits, **arguments)

    monkeypatch.setattr(tune, "train", spy)
    share = tune.accuracy("Adam", 0.005, steps=20, folds=range(5))
    assert 0.2 < share < 0.9
    test_images = {image.tobytes() for image in load_digits()[1].images}
    assert len(set.union(*left_out)) == sum(map(len, left_out)) == 1437
    assert not set.union(*left_out) & test_images


def test_the_smallest_rate_that_is_as_good_as_the_best_is_found_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def accuracy(name: str, rate: float, steps: int, folds: Any) -> float:
        if len(list(folds)) == 1:  # the first fold is not quite like the others
            return 0.95 if rate == 5 else 0.94 if 0.005 <= rate <= 2 else 0.5
        return {0.005: 0.92, 0.01: 0.9475, 0.02: 0.95}.get(rate, 0.949)

    monkeypatch.setattr(tune, "accuracy", accuracy)
    monkeypatch.setattr(tune, "RATES_FILE", tmp_path / "rates.toml")
    monkeypatch.setattr(tune, "TUNED", {"Adam": 0.5, "Ftrl": 0.25, "Gone": 1.0})
    assert tune.main(["Momentum", "Adam"]) == 0
    assert tomllib.loads((tmp_path / "rates.toml").read_text()) == {
        "Adam": 0.01,
        "Ftrl": 0.25,
        "Momentum": 0.01,
    }
    assert tune.main(["Adamm"]) == 2
    assert "Adamm: not among AdaBelief, AdaMax" in capsys.readouterr().err


# The command line.


def test_the_demo_prints_a_table_and_no_progress_into_a_file(usual_run: tuple[str, Path]) -> None:
    printed, _ = usual_run
    assert "30/30" not in printed
    words = " ".join(printed.splitlines())
    for heading in ("device", "optimizer's", "part of a step", "train", "test", "accuracy"):
        assert heading in words
    for name in DEFAULT_NAMES:
        assert re.search(rf"cpu +│ {name} +│ +[\d.]+ of [\d.]+ ms │ +\d+\.\d% │ +\d+\.\d% ", words)
    times = [map(float, pair) for pair in re.findall(r"([\d.]+) of ([\d.]+) ms", words)]
    assert len(times) == len(DEFAULT_NAMES) == 5
    assert all(part < whole for part, whole in times)


@pytest.mark.usefixtures("no_picture")
def test_the_demo_differentiates_its_loss_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert "│ Adam " in run_here(capsys, "demo", "--steps", "3", "--autodiff")


@pytest.mark.usefixtures("no_picture", "in_numpy")
def test_all_optimizers_get_a_row_with_their_whole_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [Digits(*(array[:96] for array in part)) for part in load_digits()]
    monkeypatch.setattr("gpuopt.demo.train.load_digits", lambda: few)
    printed = run_here(capsys, "demo", "--steps", "2", "--optimizer", "all")
    for name in NAMES:
        assert f"│ {name} " in printed


@pytest.mark.usefixtures("no_picture")
def test_several_optimizers_are_named_in_any_case_or_by_class(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = run_here(capsys, "demo", "--steps", "1", "--optimizer", "LIONOPTIMIZER", "adam")
    assert re.findall(r"│ cpu +│ (\w+)", printed) == ["Lion", "Adam"]


def test_the_curves_are_saved_as_a_picture_where_the_user_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    # Brackets are markup to rich.
    path = tmp_path / "curves[bold].svg"
    options = ("--steps", "60" if FULL else "2", "--output", str(path))
    assert (
        run_here(capsys, "demo", *options).splitlines()[-1] == f"loss and accuracy curves: {path}"
    )
    assert path.read_bytes().startswith(b"<?xml")


def test_the_curves_go_to_the_current_folder_by_default(usual_run: tuple[str, Path]) -> None:
    pytest.importorskip("matplotlib")
    _, folder = usual_run
    assert [path.name for path in folder.iterdir()] == ["digits-curves.png"]


@pytest.mark.usefixtures("no_picture")
def test_without_matplotlib_the_demo_says_in_one_line_how_to_get_the_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    printed = run_here(capsys, "demo", "--steps", "1")
    assert printed.splitlines()[-1].endswith("pip install matplotlib")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("demo --optimizer Adamm", "'Adamm' is not one of AdaBelief, AdaMax, Adadelta"),
        ("demo --steps 0", "'0' is not a whole number of at least 1"),
        ("demo --seed -1", "'-1' is not a whole number of at least 0"),
        ("demo --dtype int8", "'int8'"),
        ("demo --device tpu", "'tpu'"),
        ("demo --output curves.txt", "'curves.txt' ends in none of .png"),
        ("demo --output no/such/folder.png", "the folder of 'no/such/folder.png' does not exist"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        command_line.main(arguments.split())
    printed = capsys.readouterr()
    assert refused.value.code == 2
    assert printed.out == ""
    assert printed.err.startswith("gpuopt")
    assert printed.err.count("\n") == 1
    assert words in printed.err


def test_a_gpu_that_is_not_usable_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unavailable(device: Device) -> None:
        raise DeviceUnavailableError(f"no {device}")

    monkeypatch.setattr(command_line, "backend_for", unavailable)
    monkeypatch.setattr(command_line, "why_no_gpu", lambda: "no NVIDIA driver")
    with pytest.raises(SystemExit) as refused:
        command_line.main(["demo", "--device", "gpu:0"])
    assert refused.value.code == 2
    assert "gpu:0 is not usable: no NVIDIA driver\n" in capsys.readouterr().err


def test_the_version_is_printed() -> None:
    assert run("--version").stdout == f"gpuopt {gpuopt.__version__}\n"


# Several workers, and several towers.


def test_workers_reach_the_accuracy_of_one_and_say_what_they_did() -> None:
    result = train_on_cpu("Adam", steps=250, workers=3, replicas_to_aggregate=2)
    assert len(result.losses) == 250
    assert result.losses[-1] < result.losses[0]
    assert [step for step, _, _ in result.accuracies] == [50, 100, 150, 200, 250]
    assert result.accuracies[-1][2] > 0.95
    assert sum(figures.accepted for figures in result.workers) >= 2 * 250
    assert sum(figures.waited_s for figures in result.workers) > 0
    assert 0 < result.optimizer_seconds < result.seconds


def test_several_towers_train_like_one() -> None:
    alone, together = (train_on_cpu("Adam", steps=60, towers=towers) for towers in (1, 3))
    np.testing.assert_allclose(together.losses, alone.losses, rtol=1e-3)
    assert together.workers == []
    assert 0 < together.optimizer_seconds < together.seconds


@pytest.mark.usefixtures("no_picture")
def test_the_command_shows_the_workers_figures(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--optimizer", "Adam", "--steps", "20", "--workers", "2")
    printed = run_here(capsys, "demo", *options)
    assert "workers of Adam" in printed
    rows = re.findall(r"│ +(\d) │ +(\d+) │ +(\d+) │ +[\d.]+ s │", printed)
    assert [row[0] for row in rows] == ["0", "1"]
    assert sum(int(row[1]) for row in rows) == 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--towers", "5"], "5 towers cannot share 96 images evenly"),
        (["--towers", "2", "--workers", "2"], "not allowed with argument"),
        (["--workers", "2", "--replicas-to-aggregate", "3"], "must not be more than --workers"),
    ],
)
def test_impossible_numbers_of_workers_and_towers_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["demo", *arguments])
    assert message in capsys.readouterr().err


def test_the_ranks_of_a_host_take_its_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "ask_driver", lambda: SimpleNamespace(gpus=("one", "other")))
    ranks: list[Any] = [SimpleNamespace(rank_on_host=rank) for rank in range(3)]
    for asked, expected in (("gpu:0", ["gpu:0", "gpu:1", "gpu:0"]), ("cpu", ["cpu"] * 3)):
        device = Device.parse(asked)
        assert [str(parallel.choose_device(rank, device)) for rank in ranks] == expected
