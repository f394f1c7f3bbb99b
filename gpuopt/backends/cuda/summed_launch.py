"""The two launches of a rule that needs sums over each variable."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.launcher import Launcher, to_device
from gpuopt.backends.cuda.mixed import Storage, real_of
from gpuopt.backends.cuda.structs import ClippedScalars, FewScalars, ScaledScalars
from gpuopt.rules.update_rule import UpdateRule

# The arguments for the groups' scalars.
_SCALARS = ("scalars", "many_scalars")


class SummedLaunch:
    """Sums over variables, and the update by these: as if they were one launch.

    The host waits for no sum: the first launch writes the scalars of each variable, which the
    second reads as if each variable were a group.
    """

    def __init__(
        self,
        launcher: Launcher,
        rule: UpdateRule,
        shape: tuple[int, int],
        of_chunks: np.ndarray[Any, Any],
        groups: np.ndarray[Any, Any],
        storage: Storage,
        scalars: dict[str, Any],
        forms: tuple[Kernel, Kernel],
        **chunks: Any,
    ) -> None:
        """Prepares the launches.

        Args:
            launcher: Of the device.
            rule: The rule.
            shape: How many blocks go through the chunks, and how many threads they have.
            of_chunks: The number of each chunk's variable, in ascending order.
            groups: The number of each variable's group, int64 [num_variables].
            storage: The types that kernels are compiled for.
            scalars: The arguments for the groups' scalars.
            forms: The kernel that sums over variables, and the one that updates them by scalars of
                groups.
            **chunks: The other arguments of both.
        """
        num_variables = len(groups)
        numbers = np.arange(num_variables + 1)
        first_chunks = to_device(launcher, np.searchsorted(of_chunks, numbers).astype(np.int64))
        parts = launcher.xp.empty(len(of_chunks) * len(rule.sums), np.float64)
        each = launcher.xp.empty(num_variables * len(rule.scalars), real_of(storage))
        of_terms, update = forms
        self._sum = launcher.bind(
            of_terms,
            *shape,
            **chunks,
            groups=to_device(launcher, groups),
            **scalars,
            first_chunks=first_chunks,
            parts=parts,
            num_done=launcher.xp.zeros(num_variables, np.uint32),
            first_sum=rule.scalars.index(rule.sums[0]),
            of_variables=each,
        )
        self._update = launcher.bind(
            update,
            *shape,
            **chunks,
            groups=to_device(launcher, numbers[:-1]),
            scalars=_of_variables(scalars["scalars"]),
            many_scalars=each,
        )

    def replace(self, **arguments: Any) -> None:
        """Checks new values of some arguments of the update, for all later starts."""
        scalars = {name: arguments.pop(name) for name in _SCALARS if name in arguments}
        self._sum.replace(**arguments, **scalars)
        if scalars:
            arguments["scalars"] = _of_variables(scalars["scalars"])
        self._update.replace(**arguments)

    def start(self) -> None:
        """Starts the kernels on the device's current stream."""
        self._sum.start()
        self._update.start()


def _of_variables(
    scalars: FewScalars | ClippedScalars | ScaledScalars,
) -> FewScalars | ClippedScalars | ScaledScalars:
    """Returns the argument of the second launch, whose scalars the first one has chosen."""
    if isinstance(scalars, ScaledScalars):
        scalars = scalars._replace(num_groups=0)
    return scalars._replace(of=b"")
