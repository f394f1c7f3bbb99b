"""Loss scales in device memory, where kernels decide whether a step is made."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpuopt.backends.clips import ClipLimits, DenseGradients, SparseGradient
from gpuopt.backends.cuda.clips import CudaClips
from gpuopt.backends.cuda.launcher import Download, Launcher, to_device, wait_for_event
from gpuopt.backends.cuda.order import UpdateOrder
from gpuopt.backends.cuda.parameters import struct_of
from gpuopt.backends.cuda.structs import ClipResult, LossDecision, LossScaling
from gpuopt.backends.loss_scaling import Decided, Decision, LastBad
from gpuopt.locks import Lock
from gpuopt.rules.loss_scaling import ScaleState

_LAYOUT = struct_of(LossScaling)
_WORD = np.dtype(np.uint64)
_NUM_WORDS = _LAYOUT.size // _WORD.itemsize
# What launches are given that do not decide, but tell who does.
_ELSEWHERE = LossDecision(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
_FLOAT = np.dtype(np.float32)


class CudaLossScaling:
    """A `LossScaling` in device memory: written once, and read as a row flag by updates.

    Attributes:
        array: The words.
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


class CudaLossScalings:
    """See `LossScalings`."""

    def __init__(
        self, launcher: Launcher, lock: Lock, order: UpdateOrder, clips: CudaClips
    ) -> None:
        """Makes none yet.

        Args:
            launcher: The device's launcher.
            lock: Lets one thread at a time enqueue work.
            order: The order of updates, which loss scales are in like variables.
            clips: Measures gradients, and decides.
        """
        self._launcher = launcher
        self._lock = lock
        self._order = order
        self._clips = clips

    def new(self, state: ScaleState) -> CudaLossScaling:
        scale = np.float32(state.loss_scale)
        values = LossScaling(0, 0, 0, 0, 0, *state[1:], float(scale), float(np.float32(1) / scale))
        words = np.frombuffer(struct.pack(_LAYOUT.code, *values), _WORD)
        with self._lock, self._launcher.device():
            scaling = CudaLossScaling(to_device(self._launcher, words))
            self._order.record_creation(scaling)
            return scaling

    def decide(
        self,
        dense: Sequence[DenseGradients],
        sparse: Sequence[SparseGradient],
        limits: ClipLimits,
        decision: Decision,
        refused: Any = None,
    ) -> Decided:
        with self._lock, self._launcher.device():
            after = CudaLossScaling(self._launcher.xp.empty(_NUM_WORDS, _WORD))
            with self._deciding(decision, after, refused) as given:
                factors = self._clips.measure(dense, sparse, limits, refused, given)
        return Decided(factors, after, decision.host_count + 1)

    def sums(
        self,
        dense: Sequence[DenseGradients],
        sparse: Sequence[SparseGradient],
        num_norms: int,
        refused: Any = None,
    ) -> Any:
        with self._launcher.device():
            given = _ELSEWHERE._replace(refused=self._clips.flag_address(refused))
            sums = self._clips.sums(dense, sparse, num_norms, refused, given)
            if refused is not None:
                with self._lock:
                    self._order.end_reading((refused,))
            return sums

    def join(self, sums: Sequence[Any], limits: ClipLimits, decision: Decision) -> Decided:
        with self._lock, self._launcher.device():
            num_words = _NUM_WORDS + len(limits.most) * len(ClipResult._fields)
            memory = self._launcher.xp.empty(num_words, _WORD)
            decided = self._decided(memory, decision.host_count + 1)
            with self._deciding(decision, decided.after, None) as given:
                self._clips.join(sums, limits, decided.factors, given)
            self._order.hold((memory,))
        return decided

    def take(self, decided: Decided, memory: Any) -> Decided:
        with self._lock, self._launcher.device():
            taken = self._decided(memory, decided.host_count)
            self._order.record_creation(taken.after)
            return taken

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
            words = self._launcher.xp.asnumpy(scaling.array)
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
    def _deciding(
        self, decision: Decision, after: CudaLossScaling, refused: Any
    ) -> Iterator[LossDecision]:
        """Inside, a launch may write `after`, as the decision says that kernels take."""
        before, rule = decision.before, decision.rule
        # The flag, too: the host clears it after it has read which rows are refused.
        read = (before,) if refused is None else (before, refused)
        accept_after = -1 if decision.accept_after is None else decision.accept_after
        self._order.follow((before,))
        last = self._order.begin((after,), is_step=False)
        try:
            yield _ELSEWHERE._replace(
                before=self._launcher.address(before.array),
                after=self._launcher.address(after.array),
                refused=self._clips.flag_address(refused),
                step=decision.step,
                incr_every=rule.incr_every,
                decr_every=rule.decr_every,
                accept_after=accept_after,
                stops=int(decision.stops),
                incr_ratio=rule.incr_ratio,
                decr_ratio=rule.decr_ratio,
                divisor=rule.divisor,
            )
        finally:
            self._order.end(last, (before.array, after.array, refused), read)

    def _decided(self, memory: Any, host_count: int) -> Decided:
        """Returns what is in memory that `join` has laid out."""
        factors = memory[_NUM_WORDS:].view(np.float64).reshape(-1, len(ClipResult._fields))
        return Decided(factors, CudaLossScaling(memory[:_NUM_WORDS]), host_count, memory=memory)
