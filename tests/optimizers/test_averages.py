"""`averages`: moving averages that follow each step, with the values of `apply` after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from bound_kernels import compile_together
from dtypes import DTYPES
from each_device import variable_on
from emulator.emulator import EmulatorLauncher
from every_optimizer import make, one_of_each_shape
from stages import STAGES

import gpuopt
from gpuopt import ExponentialMovingAverage, IndexedSlices, Variable
from gpuopt.backends import to_device
from gpuopt.device import Device

pytestmark = pytest.mark.value

GPU = Device.parse("gpu:0")
SHAPES = [(3, 4), (), (70, 50), (0,), (5,)]


class Run:
    """A model that is trained with averages; two of one seed get the same gradients."""

    def __init__(
        self,
        dtype: Any,
        *,
        is_sparse: bool = False,
        xp: Any = np,
        shapes: Any = SHAPES,
        **options: Any,
    ) -> None:
        self._rng = np.random.default_rng(1)
        self._xp = xp
        self.counter = Variable(np.int64(0), name="counter")
        self.variables = [
            variable_on(xp, np.asarray(self._rng.normal(size=shape)).astype(dtype), name=f"w{i}")
            for i, shape in enumerate([*shapes, *([(40, 12)] if is_sparse else [])])
        ]
        self._is_sparse = is_sparse
        num_updates = self.counter if options.pop("is_bounded", False) else None
        self.averages = ExponentialMovingAverage(0.9, num_updates, **options)

    def pairs(self) -> list[tuple[Any, Variable]]:
        put = self._xp.asarray
        given: list[tuple[Any, Variable]] = []
        for variable in self.variables:
            if self._is_sparse and variable is self.variables[-1]:
                rows = self._rng.integers(0, 40, 300)
                values = self._rng.normal(size=(300, 12)).astype(variable.dtype)
                given.append((IndexedSlices(put(values), put(rows)), variable))
            else:
                gradient: Any = np.asarray(3 * self._rng.normal(size=variable.shape))
                given.append((put(gradient.astype(variable.dtype)), variable))
        return given

    def values(self) -> list[bytes]:
        averages = [self.averages.average(variable) for variable in self.variables]
        return [each.numpy().tobytes() for each in (*self.variables, *averages) if each is not None]


def steps(
    make_optimizer: Callable[..., Any], dtype: Any, options: dict[str, Any]
) -> Iterator[tuple[Run, Run]]:
    """Makes a step with averages and one without, which `apply` follows, each time."""
    mine, theirs = Run(dtype, **options), Run(dtype, **options)
    following = make_optimizer(averages=mine.averages)
    plain = make_optimizer()
    while True:
        following.apply_gradients(mine.pairs(), mine.counter)
        plain.apply_gradients(theirs.pairs(), theirs.counter)
        theirs.averages.apply(theirs.variables)
        yield mine, theirs


def check_steps(make_optimizer: Callable[..., Any], dtype: Any, **options: Any) -> None:
    """Four steps with averages are, to the bit, steps without, each with `apply` after it."""
    made = partial(steps, make_optimizer, dtype, options)
    if options.get("xp") is fake_cupy:
        # From the second step on, averages are there.
        compile_together(lambda: list(islice(made(), 2)))
    for mine, theirs in islice(made(), 4):
        assert mine.values() == theirs.values()
        assert len(mine.values()) == 2 * len(mine.variables)


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "mixed"])
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.one_in(6)
def test_every_combination_is_steps_with_apply_after_each(
    every_form_one_by_one: str, stages: str, is_sparse: bool
) -> None:
    check_steps(STAGES[stages], np.float32, is_sparse=is_sparse, is_bounded=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_bounded", [False, True], ids=["decay", "num_updates"])
@pytest.mark.one_in(3)
def test_every_type_has_the_averages_of_apply(
    every_form_one_by_one: str, dtype: Any, is_bounded: bool
) -> None:
    check_steps(STAGES["decay"], dtype, is_bounded=is_bounded, zero_debias=True)


@pytest.mark.parametrize(
    ("dtype", "options"), [(DTYPES[1], {}), (np.float32, {"slot_dtype": "bfloat16"})], ids=str
)
def test_averages_of_what_is_rounded_at_random_are_those_of_apply(
    every_form_one_by_one: str, dtype: Any, options: dict[str, Any]
) -> None:
    kind = partial(gpuopt.AdamOptimizer, 0.1, stochastic_rounding=7, **options)
    check_steps(kind, dtype, is_bounded=True)


@one_of_each_shape
def test_averages_follow_every_optimizer(name: str, arguments: dict[str, Any]) -> None:
    check_steps(lambda **more: make(name, arguments, **more), np.float32)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("how", ["row-wise", "beside a strided one"])
def test_large_variables_that_are_updated_as_copies_have_the_averages_of_apply(
    how: str, dtype: Any
) -> None:
    """The copies are not rounded, as the variables are."""
    rng = np.random.default_rng(0)
    shape = (700, 900)
    variables = [Variable(np.asarray(rng.normal(size=shape)).astype(dtype))]
    if how != "row-wise":
        variables.append(Variable(np.zeros((8, 6), dtype).T, copy=False))
    kind = gpuopt.RowWiseAdagradOptimizer if how == "row-wise" else gpuopt.AdamOptimizer
    averages, apart = ExponentialMovingAverage(0.75), ExponentialMovingAverage(0.75, name="apart")
    optimizer = kind(0.1, averages=averages)
    for _ in range(3):
        optimizer.apply_gradients([(rng.normal(size=v.shape).astype(dtype), v) for v in variables])
        apart.apply(variables)
    for variable in variables:
        mine, theirs = averages.average(variable), apart.average(variable)
        assert mine is not None
        assert theirs is not None
        assert mine.numpy().tobytes() == theirs.numpy().tobytes()


def test_averages_of_dense_variables_are_moved_by_their_rule() -> None:
    w, bounded = Variable(np.ones(3, np.float32)), Variable(np.ones(3, np.float32))
    averages = ExponentialMovingAverage(0.5)
    optimizer = gpuopt.GradientDescentOptimizer(1.0, averages=averages)
    following = optimizer.options.averages
    assert following is not None
    one = np.ones(3, np.float32)
    optimizer.apply_gradients([(one, w), (one, bounded)])
    # Its average is made after the first step.
    assert following.known.find([w, bounded], 0) is None
    optimizer.apply_gradients([(one, w), (one, bounded)])
    assert following.known.find([w, bounded], 0) is not None


def test_an_average_sees_a_variable_after_its_constraint() -> None:
    mine, theirs = (
        Variable(np.ones(3, np.float32), constraint=lambda value: np.clip(value, -0.5, 0.5))
        for _ in range(2)
    )
    following, apart = ExponentialMovingAverage(0.5), ExponentialMovingAverage(0.5)
    optimizer = gpuopt.GradientDescentOptimizer(1.0, averages=following)
    plain = gpuopt.GradientDescentOptimizer(1.0)
    for gradient in np.float32([[1, 2, -1], [1, -2, -1], [-1, 0, 0.25]]):
        optimizer.apply_gradients([(gradient, mine)])
        plain.apply_gradients([(gradient, theirs)])
        apart.apply([theirs])
        expected = apart.average(theirs)
        got = following.average(mine)
        assert got is not None
        assert expected is not None
        assert got.numpy().tobytes() == expected.numpy().tobytes()


@pytest.mark.parametrize("gate", [gpuopt.Optimizer.GATE_NONE, gpuopt.Optimizer.GATE_OP])
def test_the_step_that_is_counted_bounds_the_decay(gate: int) -> None:
    w = Variable(np.float64([0.0]))
    counter = Variable(np.int64(0))
    averages = ExponentialMovingAverage(0.9, counter)
    optimizer = gpuopt.GradientDescentOptimizer(np.float64(1), averages=averages)
    expected = -1.0
    for step in range(1, 4):
        optimizer.minimize(lambda: w, counter, [w], gate)
        decay = np.float32(1 + step) / np.float32(10 + step)
        expected -= (expected + step) * (1 - decay)
        average = averages.average(w)
        assert average is not None
        np.testing.assert_allclose(average.numpy(), [expected], rtol=1e-7)


def test_variables_without_a_gradient_and_skipped_steps_leave_averages_alone() -> None:
    w, other = Variable(np.ones(2, np.float32)), Variable(np.ones(2, np.float32))
    averages = ExponentialMovingAverage(0.5)
    optimizer = gpuopt.GradientDescentOptimizer(1.0, averages=averages, on_nonfinite="skip")
    optimizer.apply_gradients([(np.ones(2, np.float32), w), (None, other)])
    assert averages.average(other) is None
    optimizer.apply_gradients([(np.float32([1, np.nan]), w)])
    average = averages.average(w)
    assert average is not None
    assert average.numpy().tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_a_step_that_loss_scaling_skips_leaves_averages_as_they_were(kind: str) -> None:
    w = Variable(np.zeros((2, 2), np.float32))
    averages = ExponentialMovingAverage(0.5)
    optimizer = gpuopt.LossScaleOptimizer(
        gpuopt.GradientDescentOptimizer(1.0, averages=averages), gpuopt.DynamicLossScale(4.0)
    )

    def step(value: float) -> None:
        gradient = np.full((2, 2), value, np.float32)
        slices = IndexedSlices(gradient, np.array([0, 1]))
        optimizer.apply_gradients([(gradient if kind == "dense" else slices, w)], loss_scale=4.0)

    step(np.inf)
    assert averages.average(w) is None
    step(4)
    average = averages.average(w)
    assert average is not None
    assert (average.numpy() == -1).all()
    step(np.nan)
    assert (average.numpy() == -1).all()
    step(4)
    assert (average.numpy() == -1.5).all()
    assert optimizer.num_skipped == 2


def test_all_rows_are_brought_up_for_their_averages() -> None:
    """As `apply` after the step reads them all."""
    table = Variable(np.ones((5, 2), np.float32))
    averages = ExponentialMovingAverage(0.5)
    optimizer = gpuopt.AdamOptimizer(0.1, catch_up=True, averages=averages)
    for row in (0, 1, 2):
        slices = IndexedSlices(np.ones((1, 2), np.float32), np.array([row]))
        before = averages.average(table)
        kept = None if before is None else before.numpy()
        optimizer.apply_gradients([(slices, table)])
        moved = table.unread_storage
        average = averages.average(table)
        assert average is not None
        expected = moved if kept is None else (kept + moved) / 2
        np.testing.assert_allclose(average.numpy(), expected, rtol=1e-6)
    assert (table.unread_storage[0] < 0.8).all()  # it has moved in each step, the last in none
    assert (table.unread_storage[4] == 1).all()


def test_optimizers_share_averages_which_others_may_move_too() -> None:
    first, second = (Variable(np.zeros(1, np.float32)) for _ in range(2))
    averages = ExponentialMovingAverage(0.5)
    optimizers = [gpuopt.GradientDescentOptimizer(1.0, averages=averages) for _ in range(2)]
    one = np.ones(1, np.float32)
    for _ in range(2):
        for optimizer, variable in zip(optimizers, (first, second), strict=True):
            optimizer.apply_gradients([(one, variable)])
    moved = [averages.average(each) for each in (first, second)]
    assert [each.numpy().tolist() for each in moved if each is not None] == [[-1.5], [-1.5]]
    # One variable by both, and by `apply` besides.
    optimizers[1].apply_gradients([(one, first)])
    assert moved[0] is not None
    assert moved[0].numpy().tolist() == [-2.25]
    averages.apply([first])
    assert moved[0].numpy().tolist() == [-2.625]


def test_an_average_that_is_dropped_or_gets_other_rows_is_not_written_any_more() -> None:
    table = Variable(np.zeros((3, 2), np.float32))
    averages = ExponentialMovingAverage(0.5)
    optimizer = gpuopt.GradientDescentOptimizer(1.0, averages=averages)
    one = np.ones((3, 2), np.float32)
    for _ in range(2):
        optimizer.apply_gradients([(one, table)])
    dropped = averages.average(table)
    assert dropped is not None
    averages.forget([dropped])
    optimizer.apply_gradients([(one, table)])
    assert (dropped.numpy() == -1.5).all()
    average = averages.average(table)
    assert average is not None
    assert (average.numpy() == -3).all()
    gpuopt.rows(table).append(np.float32([[0, 0]]))
    optimizer.apply_gradients([(np.ones((4, 2), np.float32), table)])
    assert average.numpy().tolist() == [[-3.5] * 2] * 3 + [[-0.5] * 2]


def test_evaluation_may_swap_values_in_and_out() -> None:
    w = Variable(np.zeros(2, np.float32))
    averages = ExponentialMovingAverage(0.5)
    optimizer = gpuopt.GradientDescentOptimizer(1.0, averages=averages)
    one = np.ones(2, np.float32)
    for _ in range(2):
        optimizer.apply_gradients([(one, w)])
    average = averages.average(w)
    assert average is not None
    kept = w.numpy()
    w.assign(average)
    assert (w.numpy() == -1.5).all()
    w.assign(kept)
    optimizer.apply_gradients([(one, w)])
    assert (average.numpy() == -2.25).all()


@pytest.mark.contract
def test_a_saver_brings_averages_back(tmp_path: Path) -> None:
    def steps(path: str | None) -> bytes:
        w = Variable(np.zeros(4, np.float32), name="saved")
        averages = ExponentialMovingAverage(0.5)
        optimizer = gpuopt.AdamOptimizer(0.1, averages=averages, name="Saved")
        averages.track([w])
        average = averages.average(w)
        assert average is not None
        saver = gpuopt.Saver([w, average], optimizers=[optimizer])
        if path is not None:
            saver.restore(path)
        for number in range(0 if path is None else 3, 6):
            if number == 3 and path is None:
                saver.save(str(tmp_path / "model"))
            optimizer.apply_gradients([(np.float32([1, -2, 3, number]), w)])
        return w.numpy().tobytes() + average.numpy().tobytes()

    expected = steps(None)
    assert steps(str(tmp_path / "model")) == expected


@pytest.mark.contract
def test_what_is_no_moving_average_is_refused() -> None:
    for wrong in (0.999, "EMA", ExponentialMovingAverage, object()):
        with pytest.raises(TypeError, match="averages must be an ExponentialMovingAverage, or No"):
            gpuopt.AdamOptimizer(averages=wrong)  # type: ignore[arg-type]


@pytest.mark.contract
def test_an_average_that_is_also_trained_is_refused() -> None:
    w = Variable(np.zeros(2, np.float32), name="trained")
    averages = ExponentialMovingAverage(0.5)
    averages.track([w])
    average = averages.average(w)
    optimizer = gpuopt.GradientDescentOptimizer(1.0, averages=averages)
    one = np.ones(2, np.float32)
    with pytest.raises(ValueError, match="trained"):
        optimizer.apply_gradients([(one, w), (one, average)])
    assert (w.numpy() == 0).all()


@pytest.mark.contract
def test_a_class_that_overrides_a_hook_is_refused_by_name() -> None:
    class Own(gpuopt.AdamOptimizer):
        def _apply_dense(self, grad: Any, var: Variable) -> None:
            super()._apply_dense(grad, var)

    w = Variable(np.zeros(2, np.float32))
    optimizer = Own(averages=ExponentialMovingAverage(0.5))
    with pytest.raises(NotImplementedError, match=r"Own overrides a hook.*MovingAverageOptimizer"):
        optimizer.apply_gradients([(np.ones(2, np.float32), w)])


def test_each_copy_of_a_mirrored_variable_has_its_average() -> None:
    strategy = gpuopt.MirroredStrategy(["cpu", "cpu"])
    w = strategy.variable(np.zeros(1, np.float32))
    averages = ExponentialMovingAverage(0.5)
    optimizer = gpuopt.GradientDescentOptimizer(1.0, averages=averages)
    for _ in range(2):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(1, np.float32), w.local)]))
    moved = [averages.average(copy) for copy in w.replicas]
    assert [each.numpy().tolist() for each in moved if each is not None] == [[-3.0], [-3.0]]


# On devices


# The loops around a rule depend on these.
ON_DEVICES = ["plain", "decay, clip_norm, groups", "cautious", "sums, clip_norm"]
ON_DEVICES += ["row-wise, clip_norm"]


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "mixed"])
@pytest.mark.parametrize("stages", ON_DEVICES)
@pytest.mark.one_in(4)
def test_averages_are_those_of_apply_on_every_device(stages: str, is_sparse: bool, xp: Any) -> None:
    shapes = [*SHAPES, (131, 257)]
    check_steps(
        STAGES[stages], np.float32, is_sparse=is_sparse, is_bounded=True, xp=xp, shapes=shapes
    )


@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16])
def test_averages_of_other_types_are_those_of_apply_on_every_device(dtype: Any, xp: Any) -> None:
    check_steps(STAGES["decay"], dtype, is_bounded=True, xp=xp)


@pytest.mark.emulator
def test_an_average_takes_no_launch_of_its_own(emulated_gpus: list[EmulatorLauncher]) -> None:
    variables = [Variable(np.ones(s, np.float32), device="gpu:0") for s in [(3,), (40, 50)] * 4]
    gradients = [v.storage.copy() for v in variables]
    for stages, launches in (("plain", 1), ("decay", 1), ("clip_norm", 2), ("sums", 2)):
        optimizer = STAGES[stages](averages=ExponentialMovingAverage(0.9))
        for step in range(4):
            before = emulated_gpus[0].launches
            optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
            assert step == 0 or emulated_gpus[0].launches - before == launches


# The type of variables, and what the optimizer is given.
STORED: dict[str, tuple[str, dict[str, Any]]] = {
    "float16": ("float16", {}),
    "bfloat16": ("bfloat16", {}),
    "slots in bfloat16": ("float32", {"slot_dtype": "bfloat16"}),
    "float16, slots in bfloat16": ("float16", {"slot_dtype": "bfloat16"}),
    "masters, slots in bfloat16": ("float16", {"masters": "float32", "slot_dtype": "bfloat16"}),
    "remainders": ("bfloat16", {"masters": "remainder"}),
    "remainders, slots in bfloat16": (
        "bfloat16",
        {"masters": "remainder", "slot_dtype": "bfloat16"},
    ),
    "at random": ("bfloat16", {"stochastic_rounding": 7}),
    "slots at random": ("float32", {"slot_dtype": "bfloat16", "stochastic_rounding": 7}),
    "remainders, slots at random": (
        "bfloat16",
        {"masters": "remainder", "slot_dtype": "bfloat16", "stochastic_rounding": 7},
    ),
    "8 bits": ("float32", {"slot_bits": 8}),
    "8 bits, bfloat16": ("bfloat16", {"slot_bits": 8}),
}


class StoredSteps:
    """Steps with averages of variables that are stored in a way; the same without; and `apply`."""

    def __init__(self, stored: str) -> None:
        self._name, options = STORED[stored]
        self._rng = np.random.default_rng(3)
        # The last one is not where packs are.
        shapes: Any = [(3, 4), (), (70, 9), (0,), (300,)]
        given = [np.asarray(self._rng.normal(size=shape)) for shape in shapes]
        self.variables, self.same = [
            [Variable(each.astype(self._name), device="gpu:0") for each in given] for _ in range(2)
        ]
        self.averages = ExponentialMovingAverage(0.75)
        self.apart = ExponentialMovingAverage(0.75, name="apart")
        self.optimizer = gpuopt.AdamOptimizer(0.1, averages=self.averages, **options)
        self.without = gpuopt.AdamOptimizer(0.1, **options)

    def gradients(self) -> list[Any]:
        values = [np.asarray(self._rng.normal(size=v.shape)) for v in self.variables]
        return [to_device(value.astype(self._name), GPU) for value in values]

    def followed(self) -> list[Any]:
        masters = [self.optimizer.get_slot(variable, "master") for variable in self.variables]
        pairs = zip(self.variables, masters, strict=True)
        return [variable if master is None else master for variable, master in pairs]

    def run(self) -> None:
        for _ in range(2):
            gradients = self.gradients()
            self.optimizer.apply_gradients(list(zip(gradients, self.variables, strict=True)))
            self.without.apply_gradients(list(zip(gradients, self.same, strict=True)))
            self.apart.apply(self.followed())


@cache
def compile_all_stored() -> None:
    compile_together(lambda: [StoredSteps(stored).run() for stored in STORED])


@pytest.mark.emulator
@pytest.mark.parametrize("stored", STORED)
def test_averages_follow_what_is_stored_in_the_launch_that_stores_it(
    emulated_gpus: list[EmulatorLauncher], stored: str
) -> None:
    """To the bit, as one that `apply` moves after each step; the step is as without it."""
    compile_all_stored()
    made = StoredSteps(stored)
    for step in range(4):
        gradients = made.gradients()
        before = emulated_gpus[0].launches
        made.optimizer.apply_gradients(list(zip(gradients, made.variables, strict=True)))
        assert step == 0 or emulated_gpus[0].launches - before == 1
        made.without.apply_gradients(list(zip(gradients, made.same, strict=True)))
        for variable, each in zip(made.variables, made.same, strict=True):
            assert variable.numpy().tobytes() == each.numpy().tobytes()
        followed = made.followed()
        before = emulated_gpus[0].launches
        made.apart.apply(followed)
        assert emulated_gpus[0].launches - before == 1
        for variable, value in zip(made.variables, followed, strict=True):
            mine, expected = made.averages.average(variable), made.apart.average(value)
            assert mine is not None
            assert expected is not None
            assert mine.numpy().tobytes() == expected.numpy().tobytes()


@pytest.mark.emulator
def test_a_refused_step_leaves_averages_and_makes_none(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    table = Variable(np.ones((50, 4), np.float32), device="gpu:0", name="table")
    old, new = (Variable(np.ones(4, np.float32), device="gpu:0") for _ in range(2))
    averages = ExponentialMovingAverage(0.5)
    optimizer = gpuopt.GradientDescentOptimizer(1.0, averages=averages)
    one = to_device(np.ones(4, np.float32), GPU)
    optimizer.apply_gradients([(one, old)])
    rows = IndexedSlices(
        to_device(np.ones((2, 4), np.float32), GPU), to_device(np.array([3, 50]), GPU)
    )
    optimizer.apply_gradients([(rows, table), (one, old), (one, new)])
    with pytest.raises(IndexError, match="row 50 is not in"):
        optimizer.check()
    assert averages.average(table) is None
    assert averages.average(new) is None
    average = averages.average(old)
    assert average is not None
    assert average.numpy().tolist() == [0] * 4
    optimizer.apply_gradients([(one, old), (one, new)])
    assert average.numpy().tolist() == [-0.5] * 4
    made = averages.average(new)
    assert made is not None
    assert made.numpy().tolist() == [0] * 4


@pytest.mark.emulator
def test_each_gpu_and_the_host_move_their_own_averages(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    variables = [
        Variable(np.zeros(3, np.float32), device=place) for place in ("gpu:0", "gpu:1", "cpu")
    ]
    averages = ExponentialMovingAverage(0.5)
    optimizer = gpuopt.GradientDescentOptimizer(1.0, averages=averages)
    for _ in range(2):
        optimizer.apply_gradients(
            [(to_device(np.float32([1, 2, 3]), v.device), v) for v in variables]
        )
    for variable in variables:
        average = averages.average(variable)
        assert average is not None
        assert average.device == variable.device
        assert average.numpy().tolist() == [-1.5, -3, -4.5]
