"""Tables on GPUs whose rows catch up end where tables do that make all steps, whatever is done."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import textbook
from catching_up import CASES, OPTIMIZERS, TOLERANCE, CatchingUp, roundings_of_a_named_row
from golden_cases import error
from interrupt_at import HandleAt, Interrupt, InterruptAt

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Saver, Variable, locks
from gpuopt.backends.cuda.row_flags import CudaRowFlags
from gpuopt.distributed import MirroredStrategy, PerReplica

HEIGHT = 40

pytestmark = pytest.mark.usefixtures("gpus")
ways = pytest.mark.parametrize("catch_up", [True, "stepping"])


ON_GPU = pytest.param("gpu", marks=pytest.mark.gpu)
EMULATED = pytest.param("emulated", marks=pytest.mark.emulator)


@pytest.fixture(params=[ON_GPU, EMULATED])
def gpus(request: pytest.FixtureRequest) -> None:
    """Makes gpu:0 usable, and gpu:1 for a test that is marked to need it."""
    if request.param == "emulated":
        request.getfixturevalue("emulated_gpus")


class Pair:
    """A table on a GPU whose rows catch up, and one in host memory that makes all steps."""

    def __init__(self, make: Any = gpuopt.AdamOptimizer, dtype: Any = np.float32, **options: Any):
        self.rng = np.random.default_rng(5)
        self.dtype = np.dtype(dtype)
        value = self.rng.normal(size=(HEIGHT, 3)).astype(dtype)
        self.tables = [Variable(value, device=each) for each in ("gpu:0", "cpu")]
        self.optimizers = [make(catch_up=True, **options), make(**options)]

    @property
    def late(self) -> Variable:
        return self.tables[0]

    def slices(self, number: int, below: int = HEIGHT // 4) -> IndexedSlices:
        values = self.rng.normal(size=(number, 3)).astype(self.dtype)
        return IndexedSlices(values, self.rng.integers(0, below, number))

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            self.apply(self.slices(3))

    def apply(self, gradient: Any) -> None:
        for optimizer, table in zip(self.optimizers, self.tables, strict=True):
            optimizer.apply_gradients([(gradient, table)])

    def is_behind(self) -> bool:
        behind: Any = self.late.identity.behind
        return behind is not None and behind.is_behind

    def check(self, tolerance: float = 2e-6) -> None:
        names = self.optimizers[1].get_slot_names()
        of_both = [
            [table.numpy(), *(optimizer.get_slot(table, name).numpy() for name in names)]
            for optimizer, table in zip(self.optimizers, self.tables, strict=True)
        ]
        assert not self.is_behind()
        for got, expected in zip(*of_both, strict=True):
            close(got, expected, tolerance)


def numbers(array: Any) -> np.ndarray:
    if isinstance(array, Variable):
        array = array.numpy()
    return np.asarray(array.get() if hasattr(array, "get") else array).astype(np.float64)


def close(one: Any, other: Any, tolerance: float = 2e-6) -> None:
    np.testing.assert_allclose(numbers(one), numbers(other), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_named_row_is_rounded_once(name: str) -> None:
    assert roundings_of_a_named_row(name, "gpu:0") <= 0.53


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_named_row_of_16_bits_is_rounded_once(dtype: Any) -> None:
    assert roundings_of_a_named_row("AdamW", "gpu:0", dtype) <= 0.53


@ways
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_rows_that_catch_up_step_like_tensorflows(case: dict[str, Any], catch_up: Any) -> None:
    golden = CatchingUp(case, catch_up)
    for key, rows in golden.replay(device="gpu:0").items():
        assert error(rows, golden.arrays[key][1:]) <= TOLERANCE[case["dtype"]], key


@ways
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clipping", [{}, {"clip_norm": 0.5}, {"clip_value": 0.3}], ids=str)
@pytest.mark.one_in(4)
def test_every_optimizer_ends_where_it_ends_without(
    clipping: dict[str, float], name: str, dtype: Any, catch_up: Any
) -> None:
    pair = Pair(OPTIMIZERS[name], dtype, **clipping)
    pair.optimizers[0] = OPTIMIZERS[name](catch_up=catch_up, **clipping)
    pair.step(60)
    assert pair.is_behind()
    # A slot is rounded once in a step without, and once for all of them with it.
    pair.check(60 * 4 * float(np.finfo(dtype).eps) if dtype is np.float32 else 1e-7)


@ways
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_tables_step_like_the_textbook(dtype: Any, catch_up: Any) -> None:
    pair = Pair(dtype=dtype)
    start = pair.late.numpy().astype(np.float64)
    pair.optimizers[0] = gpuopt.AdamOptimizer(0.01, catch_up=catch_up)
    histories: list[list[Any]] = [[] for _ in range(HEIGHT)]
    for number in range(1, 80):
        slices = pair.slices(1)
        pair.optimizers[0].apply_gradients([(slices, pair.late)])
        for at, history in enumerate(histories):
            named = at == slices.indices[0]
            history.append((number, slices.values[0].astype(np.float64) if named else np.zeros(3)))
    got = pair.late.numpy().astype(np.float64)
    bound = 16 * float(ml_dtypes.finfo(dtype).eps)  # stored whenever it was named: 8 times or so
    for row, history in enumerate(histories):
        expected = textbook.adam(start[row], history, learning_rate=0.01)
        np.testing.assert_allclose(got[row], expected["var"], rtol=bound, atol=bound)


READS: dict[str, Callable[[Variable], Any]] = {
    "numpy()": lambda table: table.numpy(),
    "value()": lambda table: table.value(),
    "storage": lambda table: table.storage,
    "table + 0": lambda table: table + 0,
    "table[...]": lambda table: table[...],
    "a Variable of it": lambda table: Variable(table).numpy(),
    "assigned": lambda table: Variable(np.zeros(table.shape, "f4")).assign(table).numpy(),
    "on the other GPU": lambda table: Variable(table, device="gpu:1").numpy(),
    "all rows": lambda table: gpuopt.embedding_lookup(table, np.arange(HEIGHT)),
}


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(read, marks=pytest.mark.gpus(2)) if read == "on the other GPU" else read
        for read in READS
    ],
)
def test_a_read_sees_all_steps(read: str) -> None:
    pair = Pair()
    pair.step(20)
    assert pair.is_behind()
    close(READS[read](pair.late), pair.tables[1])
    pair.step(3)
    pair.check()


WRITES: dict[str, Callable[[Variable], Any]] = {
    "assign": lambda table: table.assign(np.ones(table.shape, "f4")),
    "assign_add": lambda table: table.assign_add(np.ones(table.shape, "f4")),
    "+=": lambda table: table.__iadd__(1),
    "table[1:3] =": lambda table: table.__setitem__(slice(1, 3), 4),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_comes_after_the_steps_before_it(write: str) -> None:
    pair = Pair()
    pair.step(20)
    for table in pair.tables:
        WRITES[write](table)
    pair.step(20)
    pair.check()


def test_a_slot_may_be_read_and_written() -> None:
    pair = Pair()
    pair.step(20)
    slots = [
        optimizer.get_slot(table, "m")
        for optimizer, table in zip(pair.optimizers, pair.tables, strict=True)
    ]
    close(*slots)
    pair.step(10)
    for slot in slots:
        slot.assign(np.ones((HEIGHT, 3), "f4"))
    pair.step(10)
    pair.check()


@pytest.mark.parametrize("gpus", [ON_GPU], indirect=True)  # autograd knows real arrays alone
def test_a_loss_looks_up_rows_that_are_up_to_date() -> None:
    pair = Pair()
    pair.step(20)
    ids = np.array([[2, 7], [2, 39]])
    for optimizer, table in zip(pair.optimizers, pair.tables, strict=True):
        for _ in range(3):
            optimizer.minimize(
                lambda table=table: (gpuopt.embedding_lookup(table, ids) ** 2).sum(),
                var_list=[table],
            )
    assert pair.is_behind()
    pair.check()


@pytest.mark.parametrize("kind", ["empty", "dense", "not finite", "one row of many"])
def test_steps_of_all_kinds_come_between(kind: str) -> None:
    pair = Pair(on_nonfinite="skip")
    gradients = {
        "empty": IndexedSlices(np.zeros((0, 3), "f4"), np.zeros(0, np.int64)),
        "dense": np.ones((HEIGHT, 3), np.float32),
        "not finite": IndexedSlices(np.full((1, 3), np.nan, "f4"), np.array([1])),
        "one row of many": IndexedSlices(np.ones((500, 3), "f4"), np.full(500, 7)),
    }
    for _ in range(4):
        pair.step(5)
        pair.apply(gradients[kind])
    pair.step(5)
    pair.check()


def test_a_loss_that_is_scaled_skips_its_steps() -> None:
    pair = Pair()
    scaling = [
        gpuopt.LossScaleOptimizer(each, gpuopt.FixedLossScaleManager(8.0))
        for each in pair.optimizers
    ]
    for number in range(30):
        slices = pair.slices(3)
        factor = np.float32(np.inf if number % 7 == 3 else 8)
        scaled = IndexedSlices(slices.values * factor, slices.indices)
        for optimizer, table in zip(scaling, pair.tables, strict=True):
            optimizer.apply_gradients([(scaled, table)])
    assert [each.num_skipped for each in scaling] == [4, 4]
    assert pair.is_behind()
    pair.check()


def test_hyperparameters_may_change() -> None:
    pair = Pair(learning_rate=0.1)
    changes = ("beta1", 0.5), ("learning_rate", lambda: 0.05), ("epsilon", 1e-3), ("beta2", 0.99)
    for name, value in changes:
        pair.step(15)
        for optimizer in pair.optimizers:
            optimizer.hyperparameters[name] = value
    pair.step(15)
    pair.check()


def test_tables_of_groups_fall_behind_beside_each_other() -> None:
    """Some of one width, which are updated together; not all in each step."""
    rng = np.random.default_rng(6)
    shapes = [(20, 2), (33, 2), (7, 2), (20, 5)]
    of_both = []
    for device, catch_up in (("gpu:0", True), ("cpu", False)):
        tables = [Variable(np.ones(shape, "f4"), device=device) for shape in shapes]
        groups = [
            ParameterGroup(variables=tables[1:2], beta1=0.5, learning_rate=0.1, epsilon=1e-4),
            ParameterGroup(variables=tables[2:3], learning_rate=0.01),
        ]
        of_both.append((gpuopt.AdamOptimizer(catch_up=catch_up, groups=groups), tables))
    for number in range(30):
        chosen = [at for at in range(4) if (number + at) % 3]
        slices = {
            at: IndexedSlices(
                rng.normal(size=(4, shapes[at][1])).astype("f4"), rng.integers(0, 7, 4)
            )
            for at in chosen
        }
        for optimizer, tables in of_both:
            optimizer.apply_gradients([(slices[at], tables[at]) for at in chosen])
        if number % 10 == 4:
            for _, tables in of_both:
                gpuopt.embedding_lookup(tables[number % 4], [1, 5])
    for table, other in zip(of_both[0][1], of_both[1][1], strict=True):
        close(table.numpy(), other.numpy())


def test_an_average_follows_all_steps() -> None:
    pair = Pair()
    averages = [gpuopt.ExponentialMovingAverage(0.9, name=name) for name in ("One", "Two")]
    for _ in range(3):
        pair.step(5)
        for average, table in zip(averages, pair.tables, strict=True):
            average.apply([table])
    close(*(each.average(table) for each, table in zip(averages, pair.tables, strict=True)))


@pytest.mark.parametrize("restored_by", [True, "stepping", False])
def test_a_file_is_restored_into_either_form(restored_by: Any, tmp_path: Path) -> None:
    pair = Pair()
    pair.step(25)
    assert pair.is_behind()
    path = Saver({"table": pair.late}, optimizers=pair.optimizers[:1]).save(tmp_path / "model")
    start = np.zeros((HEIGHT, 3), "f4")
    table, optimizer = Variable(start, device="gpu:0"), gpuopt.AdamOptimizer(catch_up=restored_by)
    for _ in range(12):  # rows that are behind are overwritten
        optimizer.apply_gradients([(pair.slices(3), table)])
    Saver({"table": table}, optimizers=[optimizer]).restore(path)
    np.testing.assert_array_equal(table.numpy(), pair.late.numpy())
    pair.tables[0], pair.optimizers[0] = table, optimizer
    pair.step(20)
    pair.check()


@pytest.mark.gpus(2)
def test_mirrored_copies_on_two_gpus_catch_up_alike() -> None:
    ids = np.random.default_rng(8).integers(0, 12, (20, 2, 3))
    ends = []
    for devices, catch_up in ((["gpu:0", "gpu:1"], True), (["cpu", "cpu"], False)):
        strategy = MirroredStrategy(devices)
        table = strategy.variable(np.ones((12, 2), np.float32), name="mirrored")
        optimizer = gpuopt.AdamOptimizer(0.01, catch_up=catch_up)

        def train(rows: Any, seen: Any, table: Any = table, optimizer: Any = optimizer) -> None:
            gpuopt.embedding_lookup(table.local, seen)
            values = 2 * gpuopt.embedding_lookup(table.local, rows)
            optimizer.apply_gradients([(IndexedSlices(values, rows), table.local)])

        for number, rows in enumerate(ids):
            strategy.run(train, [PerReplica(rows), PerReplica([[number % 12], [0]])])
        arrays = [
            [copy.numpy(), *(optimizer.get_slot(copy, name).numpy() for name in "mv")]
            for copy in table.replicas
        ]
        for one, other in zip(*arrays, strict=True):
            np.testing.assert_array_equal(one, other)
        ends.append(arrays[0])
    for got, expected in zip(*ends, strict=True):
        close(got, expected)


@pytest.mark.parametrize("gpus", [ON_GPU], indirect=True)
@pytest.mark.gpus(2)
@pytest.mark.parametrize("seed", range(2))
def test_mirrored_tables_on_two_gpus_take_what_comes(seed: int) -> None:
    ends = []
    for devices, catch_up in ((["gpu:0", "gpu:1"], True), (["cpu", "cpu"], False)):
        rng = np.random.default_rng(seed)
        strategy = MirroredStrategy(devices)
        tables = [strategy.variable(np.ones((24, width), np.float32)) for width in (2, 5)]
        optimizer, other = (gpuopt.AdamOptimizer(0.01, catch_up=catch_up) for _ in "12")
        for _ in range(40):
            event = rng.choice(["", "look up", "read", "assign", "other", "read one", "flush"])
            chosen = [[0], [1], [0, 1]][rng.integers(3)]
            rows = rng.integers(0, 12, (2, 4))
            values = [rng.normal(size=(2, 4, width)).astype("f4") for width in (2, 5)]

            by = other if event == "other" else optimizer
            slices = [list(map(IndexedSlices, each, rows)) for each in values]

            def train(
                replica: int, rows: Any, event: str, by: Any, slices: Any, tables: Any = tables
            ) -> None:
                local = [table.local for table in tables]
                if event == "look up":
                    gpuopt.embedding_lookup(local[0], rows)
                if event == "read":
                    local[1].numpy()
                if event == "assign":
                    local[0].assign_add(np.full((24, 2), 0.01, "f4"))
                by.apply_gradients([(each[replica], local[at]) for at, each in slices])

            given = event, by, [(at, slices[at]) for at in chosen]
            strategy.run(train, [PerReplica([0, 1]), PerReplica(list(rows)), *given])
            if event == "read one":
                tables[0].replicas[1].numpy()
            if event == "flush":
                optimizer.flush()
        for table in tables:
            np.testing.assert_array_equal(*[copy.numpy() for copy in table.replicas])
        ends.append([table.replicas[0].numpy() for table in tables])
    for got, expected in zip(*ends, strict=True):
        close(got, expected, 4e-6)


@pytest.mark.parametrize("call", ["step", "read"])
def test_a_signal_handler_in_an_update_reads_beside_a_thread_that_waits_for_the_update(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "DEADLINE_S", 2.0)
    # A step would wait for this update before it has the table.
    monkeypatch.setattr(CudaRowFlags, "check", lambda self, flag, checks: None)
    pair = Pair()
    pair.step(14)
    assert pair.is_behind()
    other = Variable(np.ones(3, np.float32), device="gpu:0")
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    errors: list[BaseException] = []
    calls: dict[str, Callable[[], Any]] = {"step": pair.step, "read": pair.late.numpy}

    def work() -> None:
        try:
            calls[call]()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)

    def handle() -> None:
        thread.start()
        time.sleep(0.2)
        pair.late.numpy()

    with HandleAt(1, handle, ["dense_launch.py"]) as handled:
        optimizer.apply_gradients([(np.ones(3, np.float32), other)])
    thread.join()
    assert not handled.is_over
    assert not errors
    pair.check()


@pytest.mark.parametrize("gpus", [ON_GPU], indirect=True)
def test_ctrl_c_in_a_step_leaves_other_rows_to_catch_up() -> None:
    others = np.arange(HEIGHT // 4, HEIGHT)
    inside = "cuda/backend", "cuda/catch_up", "count_of_steps", "cuda/sparse", "gpuopt/step"
    moment, is_over = 1, False
    while not is_over:
        pair = Pair()
        pair.apply(IndexedSlices(np.ones((len(others), 3), "f4"), others))
        pair.step(4)
        gradient = IndexedSlices(np.ones((1, 3), "f4"), [0])
        try:
            with InterruptAt(moment, inside=inside):
                pair.optimizers[0].apply_gradients([(gradient, pair.late)])
            is_over = True
        except Interrupt:
            pass
        # Counted, or not: there is nothing between.
        before = pair.tables[1].numpy()[others].copy()
        pair.optimizers[1].apply_gradients([(gradient, pair.tables[1])])
        ends = before, pair.tables[1].numpy()[others]
        got = pair.late.numpy()[others]
        assert min(abs(got - end).max() for end in ends) < 2e-6
        moment += 4
    assert moment > 60


@pytest.mark.parametrize("gpus", [ON_GPU], indirect=True)
@pytest.mark.parametrize("read", ["table", "slot", "rows"])
def test_a_read_that_is_cut_at_any_moment_is_finished_by_the_next(read: str) -> None:
    def behind() -> Pair:
        pair = Pair()
        pair.apply(IndexedSlices(np.ones((HEIGHT, 3), "f4"), np.arange(HEIGHT)))
        pair.step(12)
        return pair

    def arrays(pair: Pair) -> list[np.ndarray]:
        slots = [pair.optimizers[0].get_slot(pair.late, name) for name in ("m", "v")]
        return [each.numpy() for each in (pair.late, *slots)]

    reads: dict[str, Callable[[Pair], object]] = {
        "table": lambda pair: pair.late.numpy(),
        "slot": lambda pair: pair.optimizers[0].get_slot(pair.late, "v").numpy(),
        "rows": lambda pair: gpuopt.embedding_lookup(pair.late, [17, 0, 17, 39]),
    }
    expected = arrays(behind())
    inside = "cuda/backend", "cuda/catch_up", "cuda/order", "cuda/workspace", "rows_behind"
    for moment in itertools.count(1, 2):
        pair = behind()
        interrupts = InterruptAt(moment, inside=inside)
        with suppress(Interrupt), interrupts:
            reads[read](pair)
        reads[read](pair)
        for got, exact in zip(arrays(pair), expected, strict=True):
            np.testing.assert_array_equal(got, exact, err_msg=str(moment))
        if interrupts.left > 0:
            break
    assert moment > 20
