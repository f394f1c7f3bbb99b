"""The launch of one plan's dense updates on one stream."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import numpy as np

from gpuopt.backends.cuda.launcher import Launch, Launcher
from gpuopt.backends.cuda.scalar_arguments import ScalarArguments
from gpuopt.backends.cuda.structs import FEW_GRADIENTS, FewGradients
from gpuopt.backends.cuda.summed_launch import SummedLaunch

# How many lists of gradients are known: some programs have several sets of buffers in turn, and a
# memory pool gives the same few addresses again and again.
MOST_LISTS = 4


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
        """Points to gradients that were at these addresses before; returns False if none were.

        Args:
            addresses: int64 [num_variables].
            version: The gradients', to be known by from now on; or None.
        """
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
