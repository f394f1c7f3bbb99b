"""Loss scales in device memory, where kernels decide whether a step is made."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.backends.clips import ClipLimits, DenseGradients, SparseGradient
from gpuopt.backends.cuda.clips import CudaClips
from gpuopt.backends.cuda.launcher import Download, Launcher, to_device, wait_for_event
from gpuopt.backends.cuda.order import UpdateOrder
from gpuopt.backends.cuda.parameters import struct_of
from gpuopt.backends.cuda.structs import LossDecision, LossScaling
from gpuopt.backends.loss_scaling import Decided, Decision
from gpuopt.locks import Lock
from gpuopt.rules.loss_scaling import ScaleState

_LAYOUT = struct_of(LossScaling)
_WORD = np.dtype(np.uint64)
_FLOAT = np.dtype(np.float32)


class CudaLossScaling:
    """A `LossScaling` in device memory: written once, and read as a row flag by updates.

    Attributes:
        array: The words.
        num_made: How many steps were made, an array of one word.
        unchecked: See `CudaRowFlag`.
    """

    __slots__ = ("array", "last_update", "num_made", "unchecked")

    def __init__(self, array: Any) -> None:
        self.array = array
        self.num_made = array[1:2]
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
        values = LossScaling(0, 0, *state[1:], float(scale), float(np.float32(1) / scale))
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
        before, rule = decision.before, decision.rule
        accept_after = -1 if decision.accept_after is None else decision.accept_after
        with self._lock, self._launcher.device():
            after = CudaLossScaling(self._launcher.xp.empty(_LAYOUT.size // _WORD.itemsize, _WORD))
            self._order.follow((before,))
            last = self._order.begin((after,), is_step=False)
            try:
                given = LossDecision(
                    self._launcher.address(before.array),
                    self._launcher.address(after.array),
                    self._clips.flag_address(refused),
                    rule.incr_every,
                    rule.decr_every,
                    accept_after,
                    rule.incr_ratio,
                    rule.decr_ratio,
                    rule.divisor,
                )
                factors = self._clips.measure(dense, sparse, limits, refused, given)
            finally:
                self._order.end(last, (before.array, after.array), (before,))
        return Decided(factors, after, decision.host_count + 1)

    def choose(self, decided: Decided, numbers: Sequence[np.floating[Any]]) -> Any:
        with self._lock, self._launcher.device():
            self._order.follow((decided.after,))
            every = to_device(self._launcher, np.array(numbers))
            behind = decided.host_count - decided.after.num_made.view(np.int64)
            chosen = every[self._launcher.xp.clip(behind, 0, len(numbers) - 1)]
            self._order.hold((decided.after.array,))
            return chosen[0]

    def read(self, scaling: CudaLossScaling) -> Download:
        with self._lock, self._launcher.device():
            self._order.follow((scaling,))
            read = self._launcher.download(scaling.num_made)
            self._order.hold((scaling.array,))
            return read

    def seed(self, scaling: CudaLossScaling) -> Any:
        with self._lock, self._launcher.device():
            self._order.follow((scaling,))
            place = _LAYOUT.offsets[LossScaling._fields.index("loss_scale")] // _FLOAT.itemsize
            return scaling.array.view(_FLOAT)[place]

    def state(self, scaling: CudaLossScaling) -> tuple[ScaleState, int]:
        with self._launcher.device():
            self._order.follow((scaling,))
            wait_for_event(self._launcher.record(), "a GPU, which decides about steps")
            words = self._launcher.xp.asnumpy(scaling.array)
        found = LossScaling(*struct.unpack(_LAYOUT.code, words.tobytes()))
        counts = found[2:6]
        return ScaleState(np.float32(found.loss_scale), *counts), found.num_made
