"""A rule as it is written, for small work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.backends.cpu.numbers import Numbers
from gpuopt.rules.update_rule import MEAN_SQUARE, UpdateRule

Chunk = np.ndarray[Any, Any]

# Partial sums of a row's squares; each adds every sixteenth column.
_LANES = 16
# Up to so many pieces of a row, numpy is faster by adding one piece of all rows at a time than by a
# reduction.
_FEW_PIECES = 16


@dataclass
class PlainRule:
    """A rule as it is written, with a step's scalars: each operation makes an array."""

    rule: UpdateRule
    scalars: Scalars

    scratch_dtypes: ClassVar[tuple[np.dtype[Any], ...]] = ()
    # The temporaries stay in the second-level cache. Twice as much costs four times the time: each
    # temporary is then fresh memory from the operating system.
    most_elements: ClassVar[int] = 32 * 1024

    def apply(
        self,
        written: Sequence[Chunk],
        grad: Chunk | None,
        scratch: Sequence[Chunk],
        numbers: Numbers | None = None,
    ) -> None:
        if grad is None:
            grad = np.broadcast_to(written[0].dtype.type(0), written[0].shape)
        if grad.flags.writeable:  # it may be the caller's own memory, or be read again
            grad = grad.view()
            grad.flags.writeable = False
        if self.rule.row_slots:
            self._apply_to_rows(written, grad, numbers)
        else:
            if self.rule.stages:  # else a call of nothing, in each small step
                grad = self.rule.gradient(grad, written[1:], self.scalars, numbers)
            self.rule.apply(written[0], grad, *written[1:], **self.scalars)

    def _apply_to_rows(
        self, written: Sequence[Chunk], grad: Chunk, numbers: Numbers | None
    ) -> None:
        num_rows = len(written[-1])
        var, *slots = (array.reshape(num_rows, -1) for array in written)
        grad = self.rule.gradient(grad, written[1:], self.scalars, numbers).reshape(num_rows, -1)
        scalars = {**self.scalars, MEAN_SQUARE: _mean_squares(grad)}
        self.rule.apply(var, grad, *slots, **scalars)


def _mean_squares(rows: Chunk) -> Chunk:
    """Returns the mean of each row's squares, [num_rows, 1], as C++ adds them."""
    squares: Chunk = rows * rows
    num_rows, width = squares.shape
    if width == 1:
        return squares
    lanes, whole = squares, width // _LANES * _LANES
    if whole:
        lanes = _sum_pieces(squares[:, :whole].reshape(num_rows, -1, _LANES))
        lanes[:, : width - whole] += squares[:, whole:]
    sums = lanes[:, :1].copy()
    for lane in range(1, lanes.shape[1]):
        sums += lanes[:, lane : lane + 1]
    sums /= width
    return sums


def _sum_pieces(pieces: Chunk) -> Chunk:
    """Returns [num_rows, lanes]: the sums of [num_rows, num_pieces, lanes], one after the other."""
    if pieces.shape[1] > _FEW_PIECES:
        # Along an axis that is not the last one, numpy adds one after the other.
        total: Chunk = np.add.reduce(pieces, axis=1)
        return total
    total = pieces[:, 0].copy()
    for piece in range(1, pieces.shape[1]):
        total += pieces[:, piece]
    return total
