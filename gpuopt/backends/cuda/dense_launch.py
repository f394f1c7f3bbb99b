"""The launch of one plan's dense updates on one stream."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import numpy as np

from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.launcher import Launch, Launcher, to_device
from gpuopt.backends.cuda.mixed import Storage, real_of
from gpuopt.backends.cuda.scalar_arguments import ScalarArguments
from gpuopt.backends.cuda.structs import (
    FEW_GRADIENTS,
    ClippedScalars,
    FewGradients,
    FewScalars,
    ScaledScalars,
)
from gpuopt.rules.update_rule import UpdateRule

# The arguments for the groups' scalars.
_SCALARS = ("scalars", "many_scalars")
# How many lists of gradients are known: some programs have several sets of buffers in turn, and a
# memory pool gives the same few addresses again and again.
MOST_LISTS = 4


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


class DenseLaunch:
    """A launch that can be pointed to other gradients.

    The addresses of few gradients are passed by value. Those of many are uploaded, and stay on the
    device for the next time that gradients are there.

    Attributes:
        launch: The launch itself.
        scalars: Its arguments for them.
        key: Its key in the plan.
    """

    def __init__(
        self,
        launcher: Launcher,
        launch: Launch | SummedLaunch,
        scalars: ScalarArguments,
        key: Hashable,
    ) -> None:
        self._launcher = launcher
        self.launch = launch
        self.scalars = scalars
        self.key = key
        # By the bytes of the addresses: FewGradients, or the array that has them on the device.
        self._lists: OrderedDict[bytes, Any] = OrderedDict()
        # By version, see `DensePlan.accept`: the addresses' bytes.
        self._versions: OrderedDict[int, bytes] = OrderedDict()
        self._current: Any = None

    def point_to_version(self, version: int | None) -> bool:
        """Points to gradients that had this version before; returns False if none had."""
        found = None if version is None else self._lists.get(self._versions.get(version, b""))
        if found is not None and found is not self._current:
            self._point_to(found)
        return found is not None

    def point_to_addresses(self, addresses: np.ndarray[Any, Any], version: int | None) -> bool:
        """Points to gradients that were at these addresses before; returns False if none were."""
        key = addresses.tobytes()
        found = self._lists.get(key)
        if found is None:
            return False
        self._lists.move_to_end(key)
        self._note(version, key)
        self._point_to(found)
        return True

    def add(self, addresses: np.ndarray[Any, Any], version: int | None) -> None:
        """Points to gradients at new addresses; the arguments are those of `point_to_addresses`."""
        key = addresses.tobytes()
        oldest = None
        if len(self._lists) == MOST_LISTS:
            _, oldest = self._lists.popitem(last=False)
        added: Any
        if addresses.size <= FEW_GRADIENTS:
            added = FewGradients([*addresses.tolist(), *[0] * (FEW_GRADIENTS - addresses.size)])
        else:
            # Later in the stream than the launches that read the oldest.
            added = self._launcher.xp.empty(addresses.size, np.int64) if oldest is None else oldest
            self._current = None  # may be the oldest
            self._launcher.upload(added, addresses)
        self._lists[key] = added
        self._note(version, key)
        self._point_to(added)

    def _note(self, version: int | None, key: bytes) -> None:
        if version is not None:
            self._versions[version] = key
            if len(self._versions) > MOST_LISTS:
                self._versions.popitem(last=False)

    def _point_to(self, found: Any) -> None:
        if found is self._current:
            return
        if isinstance(found, FewGradients):
            self.launch.replace(few_grads=found)
        else:
            self.launch.replace(grads=found)
        self._current = found
