"""How many threads and blocks each kernel gets. They change the speed, never a result."""

from __future__ import annotations

# What the sources fix: sort_threads and find_threads, tile_size and find_tile, and piece_size.
SORT_THREADS = 256
SORT_TILE = 2048
PIECE = 32
# Every block that sorts reads the counts of all shares.
MAX_SHARES = 256

DENSE_THREADS = 256
# Elements of a variable that a block updates before it takes others: 16 rounds of 16-byte accesses
# in float32. A multiple of every pack.
DENSE_CHUNK = 16384
# Small blocks, as kernels on rows take many registers: more of them fit beside each other.
ROW_THREADS = 128
# Blocks that wait their turn behind those that run, so that none runs dry.
BLOCKS_PER_MULTIPROCESSOR = 16


def num_blocks(items: int, threads: int, num_multiprocessors: int) -> int:
    """Returns how many blocks share `items`, one for each thread in a pass."""
    return max(1, min(-(-items // threads), BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors))


def shares(num_rows: int) -> tuple[int, int]:
    """Returns into how many shares rows are divided to be sorted, and the size of each."""
    tiles = -(-num_rows // SORT_TILE)
    rows_per_share = -(-tiles // MAX_SHARES) * SORT_TILE
    return -(-num_rows // rows_per_share), rows_per_share


def lanes_per_row(row_width: int, pack_size: int) -> int:
    """Returns how many threads share a row: a power of 2 up to a warp."""
    parts = row_width // pack_size if row_width % pack_size == 0 else row_width
    return min(32, 1 << max(0, parts - 1).bit_length())
