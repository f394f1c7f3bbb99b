"""The number of threads and blocks of each kernel: it changes speed, never results."""

from __future__ import annotations

from gpuopt.backends.cuda.structs import Shares
from gpuopt.backends.row_order import PIECES_PER_STRETCH

# Kernels are compiled with these numbers, which tests/support/structs_header.py writes to
# kernels/shared/constants.cuh.
WARP = 32
PACK_BYTES = 16
DENSE_THREADS = 256
SORT_THREADS = 256
SORT_TILE = 1024
# Shares whose counts are added up for all that come after them.
SHARES_PER_GROUP = 16
FEW_ROWS = 2048
DIGIT_BITS = 8
NUM_DIGITS = 1 << DIGIT_BITS
# A block sums all pieces of a stretch, with up to a warp for each.
PIECE_THREADS = PIECES_PER_STRETCH * WARP
# Of these three, a sum's bits depend on: they do not depend on the GPU.
CLIP_THREADS = 256
CLIP_CHUNK = 16384
MEASURED_ROWS = CLIP_THREADS
COPY_THREADS = 256
# Words that a block copies at once.
COPY_CHUNK = 4096
# Elements of a block of codes that a lane has: their codes are one load.
LANE_CODES = 8
# decay^k is the product of a power for each 8 bits of k, which is below 2^31.
POWER_BITS = 8
NUM_POWERS = 4 << POWER_BITS

# ---- The table of numbers that are chosen here: untuned, no GPU yet. The reasons are expectations.

# Shares of rows to sort, a block for each: about four for each multiprocessor.
MAX_SHARES = 512
# Elements of a dense chunk: at least a pass of DENSE_THREADS packs of float32, and at most 16.
MIN_CHUNK = 1024
MAX_CHUNK = 16384
# So that every multiprocessor has work where there are few elements.
CHUNKS_PER_MULTIPROCESSOR = 8
# Threads of a block for chunks of a few packs: the others would have nothing to do.
MIN_DENSE_THREADS = WARP
# Kernels on rows take many registers, and more of the smaller blocks fit on a multiprocessor.
ROW_THREADS = 128
# More than run at once, so that a multiprocessor that is done early finds another block.
BLOCKS_PER_MULTIPROCESSOR = 16
# As many as a multiprocessor runs at once, however small they are. A block that goes on to another
# small chunk has asked for it before; a new block begins by waiting.
MAX_RESIDENT_BLOCKS = 32

# ---- What follows from it


def num_blocks(items: int, threads: int, num_multiprocessors: int) -> int:
    """Returns how many blocks share `items`, one for each thread in a pass."""
    return max(1, min(-(-items // threads), BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors))


def dense_chunk(num_elements: int, num_multiprocessors: int) -> int:
    """Returns how many elements are updated in one go: a multiple of every pack."""
    even = num_elements // (CHUNKS_PER_MULTIPROCESSOR * num_multiprocessors)
    return min(max(even // MIN_CHUNK * MIN_CHUNK, MIN_CHUNK), MAX_CHUNK)


def dense_threads(num_elements: int, num_chunks: int, pack_size: int) -> int:
    """Returns how many threads update a chunk: one for each pack of a chunk of the mean size."""
    packs = num_elements // (pack_size * num_chunks)
    return min(max(1 << max(0, packs - 1).bit_length(), MIN_DENSE_THREADS), DENSE_THREADS)


def dense_blocks(num_chunks: int, threads: int, num_multiprocessors: int) -> int:
    """Returns how many blocks share the chunks: as many threads as with blocks of DENSE_THREADS."""
    as_many_threads = BLOCKS_PER_MULTIPROCESSOR * DENSE_THREADS // threads
    most = min(as_many_threads, MAX_RESIDENT_BLOCKS) * num_multiprocessors
    return max(1, min(num_chunks, most))


def shares(num_rows: int) -> Shares:
    """Returns how rows are divided to be sorted."""
    tiles = -(-num_rows // SORT_TILE)
    rows_per_share = -(-tiles // MAX_SHARES) * SORT_TILE
    return Shares(num_rows, -(-num_rows // rows_per_share), rows_per_share)


def lanes_per_row(row_width: int, pack_size: int) -> int:
    """Returns how many threads share a row: a power of 2 up to a warp."""
    parts = row_width // pack_size if row_width % pack_size == 0 else row_width
    return min(WARP, 1 << max(0, parts - 1).bit_length())


def lanes_per_block(width: int, per_block: int) -> int:
    """Returns how many threads share a block of codes, in rows of this width: a power of 2."""
    parts = -(-min(width, per_block) // LANE_CODES)
    return 1 << max(0, parts - 1).bit_length()
