"""Random programs of steps with many stages, beside a naive model of them.

What an operation does follows from the program's seed and the operation's number alone. Where
numbers are kept in fewer bits than steps are computed in, everything is compared after each
operation, and the model goes on from the real numbers. Else it is compared now and then, as a
comparison brings rows up to date, and waits.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import float8
import gradient_noise
import ml_dtypes
import numpy as np
import pytest
import smoothed_gradient
from interrupt_at import HandleAt

import gpuopt
from fuzzing.model import Rows
from fuzzing.noise_model import ETA, GAMMA, SEED
from fuzzing.settings import how_to_repeat
from fuzzing.stages_beside import beside_another, copied, forked, step_by_views
from fuzzing.stages_model import (
    AVERAGE_DECAY,
    DECAY,
    EETA,
    KINDS,
    MEAN_DECAY,
    MOMENTUM,
    USUAL,
    Clip,
    Model,
    Scaling,
    Settings,
    as_dense,
)
from gpuopt import IndexedSlices, Variable, backends
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.device import Device
from gpuopt.rules.catch_up import Factors

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = {"w0": (3, 4), "w1": (5,), "w2": (), "w3": (300,), "table": (9, 2)}
DTYPES = ["float32", "float64", "float16", "bfloat16", "mixed"]
RATES, GROUPS_RATE = [2.0**-3, 2.0**-6, 2.0**-10, 0.0, -(2.0**-7)], 2.0**-4
BETAS = [0.0, 0.5, 0.875, 0.9375], [0.75, 0.9375, 1 - 2**-8, 1 - 2**-10]
EPSILONS = [2.0**-27, 2.0**-17, 2.0**-10, 1.0]
ADAMS = ("Adam", "AdamW", "LazyAdam")
GROUP = ("w1", "table")
# Of the largest number of an array: rounding of a step, and of all steps between comparisons.
STEPS_TOLERANCE = {"float32": 4e-5, "float64": 2e-6}
# Of the largest number of a block: half the distance of codes, by `slot_form`.
CODES = {"root": 0.01, "float8": 0.036}


class Form:
    """How an optimizer keeps its numbers: what may differ where its state is restored."""

    def __init__(self, program: Program) -> None:
        choose, dtypes = program.choose, program.dtypes.values()
        self.options: dict[str, Any] = {}
        self.codes = 0.0
        kind, narrow = program.kind, [each for each in dtypes if each.itemsize == 2]
        has_slots = bool(program.model.kind.slots) and np.float64 not in dtypes
        has_slots = has_slots and not program.varies
        form = choose(["root", "float8", None, None]) if has_slots else None
        if form is not None:
            self.options |= {"slot_bits": 8, "slot_form": form}
            self.codes = CODES[form]
        if narrow and choose([True, False]):
            only_bfloat16 = np.float16 not in dtypes
            names = ["float32", np.float32, *(["remainder"] if only_bfloat16 else [])]
            self.options["masters"] = choose(names)
        if has_slots and form is None and choose([True, False, False]):
            self.options["slot_dtype"] = choose(["bfloat16", BFLOAT16])
        if program.follows != "inside" and not program.varies and choose([True, False]):
            is_wide = "masters" in self.options or np.float16 not in dtypes
            if is_wide and ("slot_dtype" in self.options or "masters" not in self.options):
                self.options["stochastic_rounding"] = 7
        if kind in ("Adam", "AdamW") and choose([True, True, True, False]):
            self.options["catch_up"] = choose([True, "stepping"])


class Program:
    """One random program; `log` says what it has done."""

    def __init__(self, seed: int, folder: Path, device: str, streams: Sequence[Any] = ()) -> None:
        self.seed, self.folder, self.device, self.streams = seed, folder, device, streams
        self.rng = np.random.default_rng([seed])
        self.log: list[str] = []
        choose = self.choose
        # Rows catch up by Adam alone: half of the programs are its own.
        self.kind = choose([*KINDS, *(["Adam"] * 5)])
        # Settings are of all sizes where numbers are kept in as many bits as steps need.
        self.varies = self.kind in ADAMS and choose([True, True, False])
        of_all = choose(DTYPES[:2] if self.varies else DTYPES)
        self.dtypes = {
            label: np.dtype(choose(DTYPES[:4]) if of_all == "mixed" else of_all) for label in SHAPES
        }
        self.places = {
            label: choose(["cpu", device]) if device != "cpu" and choose([0, 0, 0, 1]) else device
            for label in SHAPES
        }
        start = {label: self.rng.normal(size=shape) for label, shape in SHAPES.items()}
        self.real = {
            label: Variable(value.astype(self.dtypes[label]), label, device=self.places[label])
            for label, value in start.items()
        }
        self.other = Variable(np.zeros(3, np.float32))
        self.expected_other = np.zeros(3)
        self.counter = Variable(np.int64(0), trainable=False)
        values = {label: as_float64(each) for label, each in self.real.items()}
        drawn = Settings(*map(choose, (*BETAS, EPSILONS)))
        self.base_rate = choose(RATES) if self.varies else RATES[0]
        self.model = Model(
            self.kind,
            values,
            drawn if self.varies else USUAL,
            smooths=not self.varies and choose([True, False, False]),
        )
        self.shown = {label: value.copy() for label, value in values.items()}
        # A master copy keeps its digits where it is assigned either of what its ties round to.
        self.halves_to_even = dict(self.shown)
        # What does not change when the optimizer is made again.
        inside = None if self.varies else "inside"  # each step would read the table
        self.follows: str | None = choose([None, None, inside, "after"])
        self.averages: Any = None
        self.scaling = choose([None, "fixed", "dynamic", "exponential"])
        if self.scaling:
            self.model.scaling = Scaling(self.scaling)
        self.skips = bool(self.scaling) or choose([True, False])
        self.refuses = self.skips and not self.scaling and choose([True, False])
        self.was_refused = False
        self.accumulated = choose([0, 0, 0, 2] if self.varies else [0, 0, 2, 3])
        self.is_mean = choose([True, False])
        self.clip = choose([Clip(), Clip(norm=0.75), Clip(value=0.5), Clip(norm=1.5, form="torch")])
        self.group = choose([None, None, {}, {"clip_norm": 0.25}, {"clip_value": 0.125}])
        self.group_epsilon = choose(EPSILONS) if self.varies and self.group is not None else None
        self.rate = choose(["fixed", "function", *([] if self.varies else ["schedule"])])
        self.casts = not self.varies and choose([False, False, True])
        if not self.varies:
            self.model.noise = choose([None, None, "gradient_noise", "unscaled_noise"])
        self.saved: list[Any] = []
        self.made_steps = 0
        # Whether blocks of the table's slots do.
        self.ends_at_rows = False
        self.make()
        self.log.append(
            f"{self.kind} of {of_all} on {device}, {self.form.options}, averages {self.follows}, "
            f"scale {self.scaling}, skips {self.skips} (refuses {self.refuses}), "
            f"accumulates {self.accumulated} (mean {self.is_mean}), {self.clip}, "
            f"group {self.group} {self.group_epsilon}, rate {self.base_rate} {self.rate}, "
            f"{self.model.settings}, {self.model.noise}, "
            f"smooths {self.model.smooths}, "
            f"casts gradients {self.casts}"
        )

    def choose(self, items: Any) -> Any:
        return items[int(self.rng.integers(len(items)))]

    # The optimizer and its wrappers.

    def make(self) -> None:
        """Makes the optimizer in some form, with the stages of the program around it."""
        self.form = Form(self)
        options: dict[str, Any] = dict(self.form.options)
        if self.clip.norm < np.inf:
            options |= {"clip_norm": self.clip.norm, "clip_form": self.clip.form}
        if self.clip.value < np.inf:
            options["clip_value"] = self.clip.value
        if self.group is not None:
            listed = [self.real[label] for label in GROUP]
            own = {"learning_rate": GROUPS_RATE, **self.group}
            if self.group_epsilon is not None:
                own["epsilon"] = self.group_epsilon
            options["groups"] = [gpuopt.ParameterGroup(variables=listed, **own)]
        if self.skips and not self.scaling:
            options["on_nonfinite"] = "raise" if self.refuses else "skip"
        if self.casts:
            options["gradient_dtype"] = "cast"
        if self.follows == "inside":
            if self.averages is None:
                self.averages = gpuopt.ExponentialMovingAverage(AVERAGE_DECAY)
            options["averages"] = self.averages
        if self.model.noise:
            options[self.model.noise] = ETA, GAMMA, SEED
        if self.model.smooths:
            options["smoothed_gradient"] = MEAN_DECAY
        self.own = make_optimizer(self.kind, self.rate_now(), self.model.settings, options)
        self.whole: Any = self.own
        self.scaled: Any = None
        if self.scaling:
            self.whole = self.scaled = gpuopt.LossScaleOptimizer(
                self.own, _manager(self.scaling), host_may_wait=True
            )
        if self.accumulated:
            # Sparse gradients of a few rows are added up early.
            self.whole = gpuopt.GradientAccumulationOptimizer(
                self.whole,
                self.accumulated,
                "mean" if self.is_mean else "sum",
                most_rows=self.choose([8, 65536]),
            )
        if self.follows == "after":
            self.whole = gpuopt.MovingAverageOptimizer(self.whole, AVERAGE_DECAY)
            self.whole.averages = self.averages = self.averages or self.whole.averages

    def rate_now(self) -> Any:
        base = self.base_rate
        if self.rate == "schedule":
            return gpuopt.exponential_decay(base, self.counter, 4, 0.5, staircase=True)
        return base if self.rate == "fixed" else lambda: base

    @property
    def is_exact(self) -> bool:
        """Whether numbers are kept in as many bits as steps are computed in."""
        options, dtypes = self.form.options, self.dtypes.values()
        is_wide = "masters" in options and not self.follows
        if not is_wide and any(each.itemsize == 2 for each in dtypes):
            return False
        return not {"slot_dtype", "slot_bits", "stochastic_rounding"} & set(options)

    def rates(self) -> dict[str, float]:
        rate = self.base_rate * (0.5 ** (self.model.count // 4) if self.rate == "schedule" else 1)
        grouped = GROUP if self.group is not None else ()
        return {label: GROUPS_RATE if label in grouped else rate for label in SHAPES}

    def epsilons(self) -> dict[str, float]:
        return {} if self.group_epsilon is None else dict.fromkeys(GROUP, self.group_epsilon)

    def clips(self) -> dict[str, tuple[int, Clip]]:
        own = 0, self.clip
        apart = own
        if self.group:
            of_group = Clip(
                self.group.get("clip_norm", np.inf), self.group.get("clip_value", np.inf)
            )
            apart = 1, of_group._replace(form=self.clip.form)
        return {label: apart if label in GROUP else own for label in SHAPES}

    @property
    def accumulating(self) -> Any:
        return self.whole if self.follows != "after" else self.whole._inner

    def named(self) -> dict[str, Variable]:
        return dict(self.real)

    def saver(self) -> gpuopt.Saver:
        beside = {} if self.scaled is None else self.scaled._own_variables()
        named = {**self.real, **{f"scaling/{name}": each for name, each in beside.items()}}
        return gpuopt.Saver(named, optimizers=[self.whole])

    # Steps.

    @np.errstate(over="ignore")  # times a scale, in 16 bits
    def gradients(self) -> dict[str, Any]:
        """Draws gradients in the arrays' types, or others, times the scale of the loss if asked."""
        scale = 1.0 if self.accumulated or self.scaled is None else self.model.scaling.scale
        size = self.choose([1.0, 1.0, 2.0**-6, 8.0])
        drawn: dict[str, Any] = {}
        for label, value in self.model.values.items():
            if self.rng.random() < 0.25:
                continue
            if label == "table" and self.rng.random() < (0.97 if self.varies else 0.7):
                drawn[label] = self.rows(size * scale)
            else:
                gradient = size * scale * self.rng.normal(size=value.shape)
                drawn[label] = np.asarray(gradient).astype(self.dtype_of_gradient(label))
        return drawn or {"w0": np.full(SHAPES["w0"], scale).astype(self.dtypes["w0"])}

    @np.errstate(over="ignore")  # times a scale, in 16 bits
    def rows(self, size: float) -> Rows:
        """Draws a gradient of some rows of the table, with numbers of this size."""
        count, height = int(self.rng.integers(0, 7)), len(self.model.values["table"])
        values = size * self.rng.normal(size=(count, *SHAPES["table"][1:]))
        rows = self.rng.integers(0, self.choose([height, height, height // 2]), count)
        return Rows(values.astype(self.dtype_of_gradient("table")), rows)

    def dtype_of_gradient(self, label: str) -> np.dtype[Any]:
        return np.dtype(self.choose(DTYPES[:4])) if self.casts else self.dtypes[label]

    def given(self, gradients: Mapping[str, Any]) -> list[tuple[Any, Variable]]:
        """Returns what an optimizer gets; on the variables' devices, and now and then not."""
        pairs: list[tuple[Any, Variable]] = []
        for label, gradient in gradients.items():
            place = self.places[label] if self.rng.random() < 0.9 else "cpu"
            if isinstance(gradient, Rows):
                slices = [put(each, place) for each in gradient]
                pairs.append((IndexedSlices(*slices), self.real[label]))
            else:
                pairs.append((put(gradient, place), self.real[label]))
        return pairs

    def step(self) -> None:
        gradients = self.gradients()
        self.apply(gradients)
        self.follow(gradients)

    def apply(self, gradients: Mapping[str, Any]) -> None:
        more = {}
        if self.scaled is not None and self.whole is self.scaled:
            more["loss_scale"] = np.float32(self.model.scaling.scale)
        elif self.scaled is not None and not self.accumulated:
            gradients = {label: _times(each, 1 / self.scale()) for label, each in gradients.items()}
        self.call(lambda: self.whole.apply_gradients(self.given(gradients), self.counter, **more))

    def call(self, step: Callable[[], None]) -> None:
        """Notes whether a step is refused, in the call or late."""
        self.was_refused = False
        try:
            step()
            if self.refuses:
                self.whole.check()
        except FloatingPointError:
            if not self.refuses:
                raise
            self.was_refused = True

    def scale(self) -> float:
        return 1.0 if self.accumulated or self.scaled is None else self.model.scaling.scale

    @np.errstate(invalid="ignore")
    def follow(self, gradients: Mapping[str, Any]) -> bool:
        """Has the model do what `apply` has done; says whether it was an update."""
        unscaled = {
            label: _times(_wide(each, self.dtypes[label]), 1 / self.scale())
            for label, each in gradients.items()
        }
        if not self.accumulated:
            return self.update(unscaled)
        self.model.accumulate(unscaled)
        return len(self.model.pending) >= self.accumulated and self.update(
            self.model.take(is_mean=self.is_mean)
        )

    def update(self, gradients: Mapping[str, Any]) -> bool:
        is_made = self.model.update(
            gradients,
            self.rates(),
            self.clips(),
            self.follows,
            self.epsilons(),
            may_skip=self.skips,
            makes_slots=self.scaled is not None,
        )
        self.made_steps += is_made
        if self.refuses:
            assert self.was_refused != is_made
        return is_made

    def write(self, label: str, value: np.ndarray) -> None:
        """Has the model have what somebody else has written to an array.

        Digits of a master copy that are none of the array's stay where the array stays as it was.
        """
        kept = self.model.values[label]
        is_same = (value == self.shown[label]) | (value == self.halves_to_even[label])
        self.model.values[label] = np.where(is_same, kept, value)
        self.shown[label] = self.halves_to_even[label] = value.copy()

    # Comparisons.

    def check(self) -> None:
        """Compares everything; the model goes on from what is there."""
        model = self.model
        self.whole.check()
        assert int(self.counter) == model.count, (int(self.counter), model.count)
        np.testing.assert_array_equal(self.other.numpy(), self.expected_other)
        if self.scaled is not None and model.scaling is not None:
            told = self.scaled.loss_scale, self.scaled.num_skipped
            assert told == (model.scaling.scale, model.scaling.skipped)
        if self.accumulated:
            counted = self.accumulating.accumulated_steps
            assert counted == len(model.pending), (counted, len(model.pending))
        for number, power in enumerate(model.powers, 1):
            own = self.own.state.other(f"beta{number}_power")  # None until it is used
            assert own is None or own.numpy() == power, (number, float(own.numpy()), power)
        for label, real in self.real.items():
            self._check_value(label, real)
            for name, expected in model.slots.get(label, {}).items():
                self._compare(f"{name} of {label}", self.own.get_slot(real, name), expected, label)
            if label in model.averages:
                average = self.averages.average(real)
                self._compare(f"average of {label}", average, model.averages[label], label)
        model.turned.clear()
        self.made_steps = 0
        slots = [self.own.get_slot(self.real["table"], name) for name in model.kind.slots]
        scales = [getattr(slot, "scales", None) for slot in slots]
        self.ends_at_rows = all(each is not None and each.ndim == 2 for each in scales)

    def _check_value(self, label: str, real: Variable) -> None:
        master = self.own.get_slot(real, "master") if "masters" in self.form.options else None
        kept = real if master is None else master
        self._compare(label, kept, self.model.values[label], label)
        self.shown[label] = self.halves_to_even[label] = as_float64(real)
        if master is not None:
            bits = master.numpy().view(np.uint32)
            rounded = master.numpy().astype(real.dtype)
            self.halves_to_even[label] = rounded.astype(np.float64)
            if self.form.options["masters"] == "remainder":  # half up
                rounded = ((bits + np.uint32(0x8000)) >> 16).astype(np.uint16).view(BFLOAT16)
            np.testing.assert_array_equal(real.numpy(), rounded, err_msg=label)

    def _compare(
        self, what: str, real: Any, expected: np.ndarray, label: str, largest: float = 0.0
    ) -> None:
        assert real is not None, f"{what} is missing"
        got = as_float64(real)
        assert got.shape == expected.shape, (what, got.shape, expected.shape)
        before = max(self.model.largest.pop(what, 0.0), largest)
        largest = max(np.abs(expected).max(initial=0), np.abs(got).max(initial=0), before)
        wide = "float64" if self.dtypes[label] == np.float64 else "float32"
        tolerance = STEPS_TOLERANCE[wide] * largest
        if " of " in what and "average" not in what:
            # Twice where blocks of a table begin to end at rows.
            tolerance += 2 * self.form.codes * largest
        elif label == "table" and self.form.codes and not self.ends_at_rows:
            # Slots are rounded before the step, too; those that float8 rounds to 0 are divided by.
            is_float8 = self.form.options["slot_form"] == "float8"
            # A step is as long as the slots say, which may have been assigned.
            moved = np.abs(expected - self.shown[label]).max(initial=self.base_rate)
            spread = self._spread_of_roots(label)
            tolerance = tolerance + (np.inf if is_float8 else 2 * self.form.codes * moved * spread)
        is_average = "average" in what  # of a value that is rounded, too
        if real.dtype.itemsize == 2 or (is_average and self.dtypes[label].itemsize == 2):
            eps = float(ml_dtypes.finfo(self.dtypes[label] if is_average else real.dtype).eps)
            beside = np.maximum(np.abs(expected), np.abs(got))
            if is_average:
                beside = largest + np.abs(self.model.values[label]).max(initial=0)
            tolerance = tolerance + eps * beside + 1e-7
        is_narrow = self.dtypes[label].itemsize == 2 or "slot_dtype" in self.form.options
        if (is_narrow or self.form.codes) and (" of " not in what or is_average):
            tolerance = tolerance + self.model.turned.get(label, 0.0)
        wrong = ~(np.abs(got - expected) <= tolerance + 1e-30)
        assert not wrong.any(), f"{what}: {got[wrong]} is not {expected[wrong]}"
        expected[...] = got

    def _spread_of_roots(self, label: str) -> Any:
        """Returns how much larger than an element's root, a divisor, the largest of all is."""
        slots = self.model.slots.get(label, {})
        squares = next((slots[name] for name in ("v", "rms", "accumulator") if name in slots), None)
        if squares is None or not squares.any():
            return 1.0
        return np.sqrt(squares.max() / np.maximum(squares, 1e-30))

    # The whole.

    def run(self, number: int) -> None:
        """Does operation `number`."""
        self.rng = np.random.default_rng([self.seed, number])
        weights = np.array(
            [weight * (OF_ROWS.get(each, 1) if self.varies else 1) for weight, each in OPERATIONS]
        )
        operation = OPERATIONS[self.rng.choice(len(weights), p=weights / weights.sum())][1]
        self.log.append(f"{number}: {operation.__name__}")
        with self.choose(self.streams) if self.streams else nullcontext():
            operation(self)
        share, most = (0.05, 100) if self.varies else (0.3, 12)
        if not self.is_exact or self.rng.random() < share or self.made_steps > most:
            self.check()


def put(array: np.ndarray, device: str) -> Any:
    return array if device == "cpu" else Variable(array, device=device).storage


def as_float64(variable: Any) -> np.ndarray:
    return np.array(variable.numpy(), np.float64)


@np.errstate(over="ignore")
def _wide(gradient: Any, dtype: np.dtype[Any]) -> Any:
    """Returns what a step reads of the gradient of an array of this type."""
    if isinstance(gradient, Rows):
        return Rows(_wide(gradient.values, dtype), gradient.indices)
    read = np.float64 if dtype == np.float64 else np.float32
    return gradient.astype(read).astype(np.float64)


def _times(gradient: Any, factor: float) -> Any:
    if isinstance(gradient, Rows):
        return gradient._replace(values=gradient.values * gradient.values.dtype.type(factor))
    return np.asarray(gradient * gradient.dtype.type(factor))


def _manager(kind: str) -> gpuopt.LossScaleManager:
    start, every = Scaling.start, Scaling.every
    if kind == "fixed":
        return gpuopt.FixedLossScaleManager(start)
    if kind == "dynamic":
        return gpuopt.DynamicLossScale(start, every, 2.0)
    return gpuopt.ExponentialUpdateLossScaleManager(start, every, 2, 2.0, 0.5)


def make_optimizer(kind: str, rate: Any, at: Settings, options: Mapping[str, Any]) -> Any:
    moments = at._asdict()
    arguments: dict[str, dict[str, Any]] = {
        "GradientDescent": {},
        "Momentum": {"momentum": MOMENTUM},
        "Adagrad": {"initial_accumulator_value": 0.25},
        "RMSProp": {"decay": at.beta1, "momentum": MOMENTUM, "epsilon": at.epsilon},
        "Adam": moments,
        "LazyAdam": moments,
        "AdamW": {"weight_decay": DECAY, **moments},
        "LARS": {
            **{"momentum": MOMENTUM, "weight_decay": DECAY, "eeta": EETA, "epsilon": at.epsilon},
        },
        "Lion": {"beta1": at.beta1, "beta2": at.beta2, "weight_decay": DECAY},
    }
    make = getattr(gpuopt, f"{kind}Optimizer")
    return make(learning_rate=rate, **arguments[kind], **options)


def steps(program: Program) -> None:
    for _ in range(4 if program.is_exact else 1):
        program.step()


def steps_of_rows(program: Program) -> None:
    """Many steps by rows of the table alone, which others catch up with later."""
    if not program.is_exact:
        return
    for _ in range(int(program.choose([1, 3, 30]))):
        gradients = {"table": program.rows(program.scale())}
        program.apply(gradients)
        program.follow(gradients)


def by_turns(program: Program) -> None:
    """Another Adam whose rows catch up steps on the table, too."""
    if not program.is_exact or "masters" in program.form.options:
        return
    at, rate = Settings(*map(program.choose, (*BETAS, EPSILONS))), program.choose(RATES)
    form = {"catch_up": program.choose([True, "stepping"]), "gradient_dtype": "cast"}
    other = make_optimizer("Adam", rate, at, form)
    model = Model("Adam", {"table": program.model.values["table"]}, at)
    for _ in range(5):
        gradients = {"table": program.rows(program.scale())}
        program.apply(gradients)
        program.follow(gradients)
        gradients = {"table": program.rows(1.0)}
        wide = {"table": _wide(gradients["table"], program.dtypes["table"])}
        other.apply_gradients(program.given(gradients))
        model.update(
            wide, {"table": rate}, {"table": (0, Clip())}, None, may_skip=False, makes_slots=False
        )


def read(program: Program) -> None:
    """Reads the table or one of its slots, and nothing else: late rows catch up."""
    if not program.is_exact or "masters" in program.form.options:
        return
    table, expected = program.real["table"], program.model.values["table"]
    slots = program.model.slots.get("table", {})
    how = program.choose(["table", "rows", "average", *slots])
    if how in slots:
        found = program.own.get_slot(table, how)
        program._compare(f"{how} of table", found, slots[how], "table")
    elif how == "rows":
        ids = program.rng.integers(0, len(expected), (2, 3))
        found = Variable(gpuopt.embedding_lookup(table, ids))
        of_rows = expected[ids]
        program._compare("table", found, of_rows, "table", largest=np.abs(expected).max())
        expected[ids] = of_rows
    elif how == "average":
        average = gpuopt.ExponentialMovingAverage(0.5)
        average.apply([table])
        program._compare("table", average.average(table), expected, "table")
    else:
        program._compare("table", table, expected, "table")


def change(program: Program) -> None:
    """Changes the learning rate, or other numbers of the rule."""
    if not program.varies:
        return
    given, model = program.own.hyperparameters, program.model
    # A step that is left out may have made powers, of the beta before.
    if program.own.state.other("beta1_power") is None or program.choose([True, False, False]):
        program.base_rate = program.choose(RATES)
        given["learning_rate"] = program.rate_now()
    else:
        model.settings = Settings(*map(program.choose, (*BETAS, EPSILONS)))
        for name, number in model.settings._asdict().items():
            given[name] = number


def flush(program: Program) -> None:
    program.own.flush()


def delete_slots(program: Program) -> None:
    """The next step makes those of the table anew."""
    if not program.is_exact or "table" not in program.model.slots:
        return
    for name in program.model.slots.pop("table"):
        del program.own.state.table(name)[program.real["table"].identity]
        program.model.largest.pop(f"{name} of table", None)


def bad_step(program: Program) -> None:
    """A gradient that is not finite is left out, where that is asked for."""
    if not program.skips:
        return
    gradients = program.gradients()
    bad = program.choose(list(gradients))
    values = getattr(gradients[bad], "values", gradients[bad])
    if values.size:
        values.reshape(-1)[-1:] = program.choose([np.inf, -np.inf, np.nan])
    program.apply(gradients)
    program.follow(gradients)


def refused_late(program: Program) -> None:
    """Steps after one that is not finite are not made either, until somebody hears of it."""
    if not program.refuses or program.accumulated:
        return
    bad = {"w0": np.full(SHAPES["w0"], np.nan, program.dtypes["w0"])}
    with pytest.raises(FloatingPointError, match="is not finite"):  # noqa: PT012
        program.whole.apply_gradients(
            program.given({**program.gradients(), **bad}), program.counter
        )
        for _ in range(program.choose([0, 1, 3])):
            program.whole.apply_gradients(program.given(program.gradients()), program.counter)
        program.whole.check()


def refused_step(program: Program) -> None:
    gradients = {**program.gradients(), "w3": np.ones(7, program.dtypes["w3"])}
    with pytest.raises(ValueError, match="has shape"):
        program.apply(gradients)


def row_out_of_range(program: Program) -> None:
    """A GPU refuses the whole call later; the host at once."""
    # What is on another device is updated nevertheless.
    if program.accumulated or len(set(program.places.values())) > 1:
        return
    gradients = program.gradients()
    values = np.ones((2, *program.model.values["table"].shape[1:]), program.dtypes["table"])
    gradients["table"] = Rows(values, np.array([0, len(program.model.values["table"])]))
    program.check()
    with pytest.raises(IndexError, match="row"):  # noqa: PT012
        program.apply(gradients)
        program.whole.check()


def assign(program: Program) -> None:
    label = program.choose(list(SHAPES))
    value = program.rng.normal(size=program.model.values[label].shape)
    new = np.asarray(value).astype(program.dtypes[label])
    program.check()
    program.real[label].assign(new)
    program.write(label, new.astype(np.float64))


def assign_slot(program: Program) -> None:
    if not program.model.slots or not program.model.kind.slots:
        return
    label = program.choose(list(program.model.slots))
    name = program.choose(list(program.model.kind.slots))
    slot = program.own.get_slot(program.real[label], name)
    value = program.rng.uniform(0.5, 1, program.model.values[label].shape)
    new = np.asarray(value).astype(slot.dtype)
    slot.assign(new)
    program.model.slots[label][name] = new.astype(np.float64)


def apply_accumulated(program: Program) -> None:
    if not program.accumulated:
        return
    if program.choose([True, False]):
        program.accumulating.reset()
        program.model.pending.clear()
    elif program.follows != "after":  # averages of the wrapper around are moved by its own calls
        program.call(lambda: program.accumulating.apply_accumulated(program.counter))
        if program.model.pending:
            program.update(program.model.take(is_mean=program.is_mean))


def by_another(program: Program) -> None:
    """Another optimizer steps on some of the variables: it sees no master copies."""
    program.check()
    labels = [label for label in SHAPES if program.rng.random() < 0.5]
    gradients = {label: each for label, each in program.gradients().items() if label in labels}
    gradients = {label: _times(each, 1 / program.scale()) for label, each in gradients.items()}
    # Not what the scale made infinite in 16 bits: nothing would come back from it.
    gradients = {
        label: each
        for label, each in gradients.items()
        if np.isfinite(getattr(each, "values", each)).all()
    }
    if gradients:
        other = gpuopt.GradientDescentOptimizer(0.5, gradient_dtype="cast")
        other.apply_gradients(program.given(gradients))
    for label, gradient in gradients.items():
        value = program.shown[label].copy()
        wide = _wide(gradient, program.dtypes[label])
        if isinstance(wide, Rows):
            np.subtract.at(value, wide.indices, 0.5 * wide.values)
        else:
            value -= 0.5 * wide
        program._compare(label, program.real[label], value, label)
        program.write(label, value)


def handled_step(program: Program) -> None:
    """A signal handler reads, and steps on another variable, in the middle of a step."""
    gradients = program.gradients()
    stepped: list[bool] = []

    def handle() -> None:
        with _refused():
            program.real["table"].numpy()
        with _refused():
            program.own.state_dict(program.named())
        with _refused():
            gpuopt.GradientDescentOptimizer(1.0).apply_gradients(
                [(np.ones(3, np.float32), program.other)]
            )
            stepped.append(True)

    with HandleAt(int(program.rng.integers(1, 400)), handle, ["gpuopt/"]):
        program.apply(gradients)
    program.expected_other = program.expected_other - len(stepped)
    program.follow(gradients)


def watched_steps(program: Program) -> None:
    """Another thread reads what there is while steps are made."""
    done = threading.Event()
    failed: list[BaseException] = []

    def read() -> None:
        try:
            while not done.is_set():
                for each in program.real.values():
                    each.numpy()
                program.whole.state_dict(program.named())
        except BaseException as error:  # raised again by the program's thread
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        steps(program)
    finally:
        done.set()
        thread.join()
    if failed:
        raise failed[0]


def change_rows(program: Program) -> None:
    table, model = program.real["table"], program.model
    height = len(model.values["table"])
    is_longer = height < 20 and program.choose([True, False])
    new = program.rng.normal(size=(2, SHAPES["table"][1])).astype(program.dtypes["table"])
    kept = np.sort(program.rng.permutation(height)[: max(height - 2, 3)])
    program.check()
    try:
        if is_longer:
            gpuopt.rows(table).append(new)
        else:
            gpuopt.rows(table).keep(kept)
    except (ValueError, NotImplementedError) as error:
        if not any(each in str(error) for each in ("are accumulated", "has a master copy by")):
            raise
        return

    def changed(array: np.ndarray, start: Any) -> np.ndarray:
        if not is_longer:
            return array[kept]
        return np.concatenate([array, np.broadcast_to(start, new.shape).astype(np.float64)])

    for call in model.pending:
        if "table" in call:
            call["table"] = changed(as_dense(call["table"], model.values["table"].shape), 0.0)
    for values in (model.values, program.shown, program.halves_to_even):
        values["table"] = changed(values["table"], new)
    for name, slot in model.slots.get("table", {}).items():
        model.slots["table"][name] = changed(slot, model.kind.slots[name])
    if "table" in model.averages:
        model.averages["table"] = changed(model.averages["table"], new)
    program.saved.clear()


def save(program: Program) -> None:
    program.check()
    if program.choose([True, False]):
        saved: Any = program.saver().save(program.folder / f"model{len(program.log)}")
    else:
        saved = program.whole.state_dict(program.named())
    values = {label: each.numpy() for label, each in program.real.items()}
    labels = sorted(program.model.averages)
    averages = {n: program.averages.average(program.real[n]).numpy() for n in labels}
    # A step makes them: those that were restored without one are not there yet.
    own = program.own
    masters = [n for n, v in program.real.items() if own.get_slot(v, "master") is not None]
    program.saved.append((saved, masters, values, averages, program.model.copied()))
    del program.saved[:-4]


def restore(program: Program) -> None:
    """Goes back; in half of the cases with an optimizer that is made anew, in some form."""
    if not program.saved:
        return
    program.check()
    saved, masters, values, averages, model = program.choose(program.saved)
    if not set(program.model.slots) <= set(model.slots):  # those would be missing
        return
    if set(program.model.averages) != set(averages):
        return
    is_new = program.choose([True, False])
    if is_new:
        before = program.form.options
        del program.own, program.whole, program.scaled
        gc.collect()
        program.make()
        program.log.append(f"   {before} into {program.form.options}")
    if isinstance(saved, str):
        program.saver().restore(saved)
    else:
        for label, value in values.items():
            program.real[label].assign(value)
        program.whole.load_state_dict(saved, program.named())
    for label, average in averages.items():
        program.averages.average(program.real[label]).assign(average)
    program.counter.assign(np.int64(model.count))
    scaling, kept = program.model.scaling, program.model.values
    settings, program.model = program.model.settings, model.copied()
    program.model.settings = settings
    if "beta1_power" not in program.own.state_dict({})["non_slots"]:  # the next step makes it
        program.model.powers = [np.float32(each) for each in settings[:2]]
    for label, value in values.items():
        if "masters" not in program.form.options:
            program.model.values[label] = value.astype(np.float64)
        elif label not in masters and not is_new:  # those that there are follow what is written
            program.model.values[label] = kept[label]
            program.write(label, value.astype(np.float64))
    assert (scaling is None) == (program.model.scaling is None)
    program.check()


OPERATIONS: list[tuple[float, Callable[[Program], None]]] = [
    (10, Program.step),
    (6, steps),
    (3, steps_of_rows),
    (1, by_turns),
    (3, read),
    (3, change),
    (1, flush),
    (1, delete_slots),
    (3, bad_step),
    (1, refused_late),
    (1, refused_step),
    (1, row_out_of_range),
    (2, assign),
    (1, assign_slot),
    (1, apply_accumulated),
    (1, by_another),
    (2, handled_step),
    (1, watched_steps),
    (1, change_rows),
    (2, save),
    (3, restore),
    (2, copied),
    (1, forked),
    (1, beside_another),
    (2, step_by_views),
]
# Drawn more often where settings vary: rows fall behind, and catch up by other numbers.
OF_ROWS: dict[Any, int] = {steps_of_rows: 12, change: 4, read: 3}


def run(
    seed: int,
    numbers: Iterable[int],
    device: str = "cpu",
    streams: Sequence[Any] = (),
) -> None:
    """Runs a program; what it raises says how to repeat it.

    Args:
        seed: Decides what the program works on, and what each operation does.
        numbers: Which operations.
        device: Of all variables, or of most of them.
        streams: Each operation is done on one of these.
    """
    gc.collect()  # frees the names of an earlier program's variables
    rng = np.random.default_rng([seed, 2**31])
    with ExitStack() as stack:
        for stage in (gradient_noise, smoothed_gradient):
            stage.register(stack.enter_context(pytest.MonkeyPatch.context()))
        form = int(rng.integers(3))
        if form:  # all compiled and shared by threads, or numpy alone
            large = 0 if form == 1 else 10**9
            limits = CpuLimits(small_elements=1, large_elements=large, elements_per_thread=64)
            stack.enter_context(backends.using(Device.cpu, CpuBackend(limits)))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        room = int(rng.choice([7, 64, 1024]))
        patch.setattr(Factors, "room_for", lambda self, height: room)
        float8.register(patch, int(rng.choice([8, 64, 256])))
        program = Program(seed, Path(stack.enter_context(TemporaryDirectory())), device, streams)
        done = []
        try:
            for number in numbers:
                done.append(number)
                program.run(number)
            program.check()
        except BaseException as error:
            error.add_note(how_to_repeat("test_all_stages.py", seed, done, program.log))
            raise


class _refused(suppress):
    """Takes an error that says that a signal handler has come."""

    def __init__(self) -> None:
        super().__init__(RuntimeError)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        if isinstance(error, RuntimeError):
            assert "signal handler" in str(error), error
        return super().__exit__(kind, error, traceback)
