"""Device tables that dense_update reads: where each variable, its slots and its gradient are."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends.cuda.launcher import Launcher

# Rows of the table; the slots' follow.
_SIZE, _GRAD, _VAR = range(3)


class UpdatePlan:
    """The tables of one set of variables; made once, as they stay where they are.

    Attributes:
        table: int64 [3 + num_slots, num_variables] on the device.
        chunks: uint32 [num_chunks, 2] on the device: which variable, and which part of it.
    """

    def __init__(
        self,
        launcher: Launcher,
        fixed: np.ndarray[Any, Any],
        grads: np.ndarray[Any, Any],
        chunk: int,
    ) -> None:
        """Uploads the tables.

        Args:
            launcher: Of the device.
            fixed: int64 [2 + num_slots, num_variables]: sizes and addresses of variables and slots.
            grads: int64 [num_variables]: addresses of the gradients.
            chunk: How many elements a block takes at once.
        """
        self._launcher = launcher
        host = np.ascontiguousarray(np.concatenate([fixed[:1], grads[None], fixed[1:]]))
        self._grads = host[_GRAD].copy()
        self.table = launcher.xp.empty(host.shape, dtype=np.int64)
        launcher.upload(self.table, host)
        per_variable = -(-host[_SIZE] // chunk)
        variables = np.repeat(np.arange(per_variable.size), per_variable)
        first = np.cumsum(per_variable) - per_variable
        parts = np.arange(variables.size) - first[variables]
        chunks = np.stack([variables, parts], axis=1).astype(np.uint32)
        self.chunks = launcher.xp.empty(chunks.shape, dtype=np.uint32)
        launcher.upload(self.chunks, chunks)

    def point_to(self, grads: np.ndarray[Any, Any]) -> None:
        """Uploads the gradients' addresses if they have moved."""
        if not np.array_equal(grads, self._grads):
            self._grads = grads
            self._launcher.upload(self.table[_GRAD], grads)
