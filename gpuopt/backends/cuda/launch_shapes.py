"""How many threads and blocks each kernel gets: this changes its speed, never its result."""

from __future__ import annotations

from gpuopt.backends.cuda.structs import Shares

# The CUDA sources fix these numbers. `kernels.py` declares them, so that no kernel compiles with
# others.
WARP = 32
PACK_BYTES = 16
DENSE_THREADS = 256
SORT_THREADS = 256
SORT_TILE = 2048
DIGIT_BITS = 8
NUM_DIGITS = 1 << DIGIT_BITS
PIECE = 32
LONG_RUN = 2 * PIECE
ROWS_PER_WORD = 32

# These are chosen here, and untuned: they have not been measured on a GPU yet. The reasons given
# are expectations.

# Few, as every block that sorts reads the counts of all shares.
MAX_SHARES = 256
# Elements: 16 rounds of 16-byte accesses by a block, in float32. A multiple of every pack.
DENSE_CHUNK = 16384
# Kernels on rows take many registers, and more of the smaller blocks fit on a multiprocessor.
ROW_THREADS = 128
# More than run at once, so that a multiprocessor that is done early finds another block.
BLOCKS_PER_MULTIPROCESSOR = 16


def num_blocks(items: int, threads: int, num_multiprocessors: int) -> int:
    """Returns how many blocks share `items`, one for each thread in a pass."""
    return max(1, min(-(-items // threads), BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors))


def shares(num_rows: int) -> Shares:
    """Returns how rows are divided to be sorted."""
    tiles = -(-num_rows // SORT_TILE)
    rows_per_share = -(-tiles // MAX_SHARES) * SORT_TILE
    return Shares(num_rows, -(-num_rows // rows_per_share), rows_per_share)


def lanes_per_row(row_width: int, pack_size: int) -> int:
    """Returns how many threads share a row: a power of 2 up to a warp."""
    parts = row_width // pack_size if row_width % pack_size == 0 else row_width
    return min(WARP, 1 << max(0, parts - 1).bit_length())
