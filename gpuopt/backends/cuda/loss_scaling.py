"""Loss scales in device memory, which change as kernels decide whether steps are made."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpuopt.backends.cuda.launcher import Download, Launcher, to_device, wait_for_event
from gpuopt.backends.cuda.order import UpdateOrder
from gpuopt.backends.cuda.parameters import struct_of
from gpuopt.backends.cuda.structs import ClipResult, LossDecision, LossScaling
from gpuopt.backends.loss_scaling import Decision, LastBad
from gpuopt.backends.record import StepRecord
from gpuopt.locks import Lock
from gpuopt.rules.loss_scaling import ScaleState

_LAYOUT = struct_of(LossScaling)
_WORD = np.dtype(np.uint64)
_NUM_WORDS = _LAYOUT.size // _WORD.itemsize
# The argument of launches whose results are joined before the step is decided about.
DECIDED_ELSEWHERE = LossDecision(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
_FLOAT = np.dtype(np.float32)


class CudaLossScaling:
    """A `LossScaling` in device memory: written once, and read as a row flag by updates.

    Attributes:
        array: Its words, and then the factors of clipping.
        num_made: How many steps were made, an array of one word.
        seen: That, and the words of `LastBad`.
        unchecked: See `CudaRowFlag`.
    """

    __slots__ = ("array", "last_update", "num_made", "seen", "unchecked")

    def __init__(self, array: Any) -> None:
        self.array = array
        self.num_made = array[1:2]
        self.seen = array[1:4]
        self.last_update: Any = None
        self.unchecked = None

    @property
    def factors(self) -> Any:
        """The factors of clipping, which follow the words: see `Clips.join`."""
        return self.array[_NUM_WORDS:].view(np.float64).reshape(-1, len(ClipResult._fields))


class CudaLossScalings:
    """See `LossScalings`."""

    def __init__(self, launcher: Launcher, lock: Lock, order: UpdateOrder) -> None:
        self._launcher = launcher
        self._lock = lock
        self._order = order

    def new(self, state: ScaleState) -> CudaLossScaling:
        scale = np.float32(state.loss_scale)
        values = LossScaling(0, 0, 0, 0, 0, *state[1:], float(scale), float(np.float32(1) / scale))
        words = np.frombuffer(struct.pack(_LAYOUT.code, *values), _WORD)
        with self._lock, self._launcher.device():
            scaling = CudaLossScaling(to_device(self._launcher, words))
            self._order.record_creation(scaling)
            return scaling

    def memory(self, scaling: CudaLossScaling) -> Any:
        with self._lock, self._launcher.device():
            self._order.follow((scaling,))
            self._order.hold((scaling.array,))
            return scaling.array

    def copied(self, memory: Any) -> CudaLossScaling:
        with self._lock, self._launcher.device():
            scaling = CudaLossScaling(memory)
            self._order.record_creation(scaling)
            return scaling

    def read(self, scaling: CudaLossScaling) -> Download:
        with self._lock, self._launcher.device():
            self._order.follow((scaling,))
            read = self._launcher.download(scaling.seen)
            self._order.hold((scaling.array,))
            return read

    def seed(self, scaling: CudaLossScaling) -> Any:
        return self._number(scaling, "loss_scale")

    def unscale(self, scaling: CudaLossScaling) -> Any:
        return self._number(scaling, "unscale")

    def state(self, scaling: CudaLossScaling) -> tuple[ScaleState, int, LastBad]:
        with self._launcher.device():
            self._order.follow((scaling,))
            wait_for_event(self._launcher.record(), "a GPU, which decides about steps")
            words = self._launcher.xp.asnumpy(scaling.array[:_NUM_WORDS])
        found = LossScaling(*struct.unpack(_LAYOUT.code, words.tobytes()))
        state = ScaleState(
            np.float32(found.loss_scale),
            found.good_steps,
            found.bad_steps,
            found.num_skipped,
            found.skipped_in_a_row,
        )
        return state, found.num_made, LastBad(found.last_bad_step, found.first_bad)

    def _number(self, scaling: CudaLossScaling, name: str) -> Any:
        with self._lock, self._launcher.device():
            self._order.follow((scaling,))
            place = _LAYOUT.offsets[LossScaling._fields.index(name)] // _FLOAT.itemsize
            return scaling.array.view(_FLOAT)[place]

    @contextmanager
    def deciding(
        self, decision: Decision, num_norms: int, refused: Any, refused_address: int
    ) -> Iterator[tuple[StepRecord, LossDecision]]:
        """Yields a new record, which launches inside may write, and their argument to decide by.

        Args:
            decision: How to decide.
            num_norms: How many norms the record has factors of.
            refused: The row flag that the launch reads, or None.
            refused_address: Of what it reads of that.
        """
        xp, address, before = self._launcher.xp, self._launcher.address, decision.before
        num_factors = num_norms * len(ClipResult._fields)
        after = CudaLossScaling(xp.empty(_NUM_WORDS + num_factors, _WORD))
        rule = decision.rule
        # The flag, too: the host clears it after it has read which rows are refused.
        read = (before,) if refused is None else (before, refused)
        accept_after = -1 if decision.accept_after is None else decision.accept_after
        last = self._order.begin((after,), read=read, is_step=False)
        try:
            given = DECIDED_ELSEWHERE._replace(
                before=address(before.array),
                after=address(after.array),
                refused=refused_address,
                step=decision.step,
                incr_every=rule.incr_every,
                decr_every=rule.decr_every,
                accept_after=accept_after,
                stops=int(decision.stops),
                incr_ratio=rule.incr_ratio,
                decr_ratio=rule.decr_ratio,
                divisor=rule.divisor,
            )
            counts = decision.num_counts, decision.most_made
            yield StepRecord(after, after.factors, {}, *counts), given
        finally:
            self._order.end(last, (before.array, after.array, refused), read)
