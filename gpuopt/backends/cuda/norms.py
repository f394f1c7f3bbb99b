"""Norms of arrays on a GPU: a launch for each dtype, and one that adds up their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.backends.backend import compute_type
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.launch_shapes import CLIP_CHUNK, CLIP_THREADS, num_blocks
from gpuopt.backends.cuda.launcher import Launcher
from gpuopt.backends.cuda.parameters import name_of
from gpuopt.backends.cuda.structs import ClippedArray
from gpuopt.backends.cuda.workspace import Constants, Workspace
from gpuopt.backends.norms import Clipping

Array = Any


class CudaNorms:
    """See `Norms`. All that it allocates belongs to the current stream, as do its launches."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._xp = launcher.xp

    def sum_squares(self, arrays: Sequence[Array]) -> Array:
        return self._added(arrays, (), np.dtype(np.float64), is_root=0)

    def norm(self, arrays: Sequence[Array], sums: Sequence[Array], dtype: Any) -> Array:
        return self._added(arrays, sums, np.dtype(dtype), is_root=1).reshape(())

    def scale(
        self, arrays: Sequence[Array], norm: Array, most: np.floating[Any], clipping: Clipping
    ) -> list[Array]:
        scaled = [self._xp.empty(array.shape, dtype=array.dtype) for array in arrays]
        for dtype, positions in _by_dtype(arrays).items():
            given = ClippedArrays(self._launcher, arrays, positions, scaled)
            real = compute_type(dtype)
            given.launch(
                kernels.scale_to_norm(name_of(dtype)),
                norm=norm.astype(real, copy=False).reshape(1),
                most=real(most),
                formula=int(clipping),
            )
        return scaled

    def _added(
        self, arrays: Sequence[Array], sums: Sequence[Array], dtype: np.dtype[Any], is_root: int
    ) -> Array:
        tables = {
            dtype: ClippedArrays(self._launcher, arrays, positions)
            for dtype, positions in _by_dtype(arrays).items()
        }
        num_chunks = sum(table.num_chunks for table in tables.values())
        num_sums = num_chunks + len(sums)
        parts = self._xp.empty(max(1, num_sums), dtype=np.float64)
        begin = 0
        for of, table in tables.items():
            sums_here = parts[begin : begin + table.num_chunks]
            table.launch(kernels.sum_squares(name_of(of)), sums=sums_here)
            begin += table.num_chunks
        for position, each in enumerate(sums, num_chunks):
            parts[position : position + 1] = each
        result = self._xp.empty(1, dtype=dtype)
        self._launcher.launch(
            kernels.add_squares(name_of(dtype)),
            1,
            CLIP_THREADS,
            sums=parts,
            num_sums=num_sums,
            is_root=is_root,
            result=result,
        )
        return result


class ClippedArrays:
    """The arrays of one launch: a single one is passed by value, and more are uploaded.

    Attributes:
        num_arrays: How many there are.
        num_chunks: How many chunks they have together.
        first_chunks: The number of each one's first chunk, and at the end `num_chunks`.
        only: The first.
        on_device: All, if there are more; else None.
    """

    def __init__(
        self,
        launcher: Launcher,
        arrays: Sequence[Array],
        positions: Sequence[int],
        targets: Sequence[Array] | None = None,
        constants: Constants | None = None,
    ) -> None:
        """Lays out arrays.

        Args:
            launcher: Of the device.
            arrays: Of one dtype, those at `positions`.
            positions: Which are of the launch; they have elements.
            targets: Where scaled ones are written.
            constants: Keeps the layout on the device, for later launches of the same arrays.
        """
        self._launcher = launcher
        # Kept as long as the launches are not enqueued: some may be copies.
        self._sources = [launcher.xp.ascontiguousarray(arrays[i]) for i in positions]
        rows = []
        self.num_chunks = 0
        for position, source in zip(positions, self._sources, strict=True):
            target = 0 if targets is None else launcher.address(targets[position])
            address = launcher.address(source)
            rows.append(ClippedArray(address, target, source.size, self.num_chunks))
            self.num_chunks += -(-source.size // CLIP_CHUNK)
        self.num_arrays = len(rows)
        self.first_chunks = [*(row.first_chunk for row in rows), self.num_chunks]
        self.only = rows[0]
        self.on_device = None
        if self.num_arrays > 1:
            self.on_device = (constants or Constants(launcher)).set(rows)

    def launch(self, kernel: Kernel, workspace: Workspace | None = None, **more: Any) -> None:
        """Launches a kernel on the arrays, with more arguments; see `Workspace.launch`."""
        launch = self._launcher.launch if workspace is None else workspace.launch
        launch(
            kernel,
            num_blocks(self.num_chunks, 1, self._launcher.num_multiprocessors),
            CLIP_THREADS,
            only=self.only,
            arrays=self.on_device,
            num_arrays=self.num_arrays,
            num_chunks=self.num_chunks,
            **more,
        )


def _by_dtype(arrays: Sequence[Array]) -> dict[np.dtype[Any], list[int]]:
    """Returns the positions of the arrays that have elements."""
    positions: dict[np.dtype[Any], list[int]] = {}
    for position, array in enumerate(arrays):
        if array.size:
            positions.setdefault(array.dtype, []).append(position)
    return positions
