"""The three launches of a rule that needs sums over each variable."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends.backend import compute_type
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.launch_shapes import DENSE_THREADS, num_blocks
from gpuopt.backends.cuda.launcher import Launcher
from gpuopt.backends.cuda.parameters import name_of
from gpuopt.backends.cuda.structs import FewScalars
from gpuopt.rules.update_rule import UpdateRule

# The arguments for the groups' scalars.
_SCALARS = ("few_scalars", "many_scalars")


class SummedLaunch:
    """Sums over chunks, sums over variables, and the update by these: as if they were one launch.

    The host waits for no sum: the second launch writes the scalars of each variable, which the
    third reads as if each variable were a group.
    """

    def __init__(
        self,
        launcher: Launcher,
        rule: UpdateRule,
        shape: tuple[int, int],
        table: Any,
        variables: np.ndarray[Any, Any],
        dtype: np.dtype[Any],
        scalars: dict[str, Any],
        **chunks: Any,
    ) -> None:
        """Prepares the launches.

        Args:
            launcher: Of the device.
            rule: What to compute.
            shape: How many blocks go through the chunks, and how many threads they have.
            table: That of `dense_update_of_groups`.
            variables: The number of each chunk's variable, in ascending order.
            dtype: Of the variables.
            scalars: The arguments for the groups' scalars.
            **chunks: The other arguments of `dense_update_of_groups`.
        """
        name, num_variables = name_of(dtype), table.shape[1]
        numbers = np.arange(num_variables + 1)
        first_chunks = launcher.xp.empty(num_variables + 1, np.int64)
        launcher.upload(first_chunks, np.searchsorted(variables, numbers).astype(np.int64))
        alone = table.copy()
        launcher.upload(alone[-1], numbers[:-1])
        parts = launcher.xp.empty(len(variables) * len(rule.sums), np.float64)
        each = launcher.xp.empty(num_variables * len(rule.scalars), compute_type(dtype))
        self._sum = launcher.bind(
            kernels.sum_terms(rule, name),
            *shape,
            table=table,
            **chunks,
            **scalars,
            parts=parts,
        )
        self._add = launcher.bind(
            kernels.add_sums(rule, name),
            num_blocks(num_variables, 1, launcher.num_multiprocessors),
            DENSE_THREADS,
            table=table,
            num_variables=num_variables,
            first_chunks=first_chunks,
            parts=parts,
            first_sum=rule.scalars.index(rule.sums[0]),
            **scalars,
            of_variables=each,
        )
        self._update = launcher.bind(
            kernels.dense_update(rule, name, has_groups=True),
            *shape,
            table=alone,
            **chunks,
            few_scalars=FewScalars(b""),
            many_scalars=each,
        )

    def replace(self, **arguments: Any) -> None:
        """Checks new values of some arguments of `dense_update_of_groups`, for all later starts."""
        scalars = {name: arguments.pop(name) for name in _SCALARS if name in arguments}
        self._sum.replace(**arguments, **scalars)
        self._add.replace(**scalars)
        self._update.replace(**arguments)

    def start(self) -> None:
        """Starts the kernels on the device's current stream."""
        self._sum.start()
        self._add.start()
        self._update.start()
