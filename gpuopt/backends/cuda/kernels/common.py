"""Parameters that several kernels share."""

from __future__ import annotations

from gpuopt.backends.cuda.launch_shapes import (
    LANE_CODES,
    PACK_BYTES,
    PIECE_THREADS,
    WARP,
)
from gpuopt.backends.cuda.parameters import Number, Pointer, Struct, struct_of
from gpuopt.backends.cuda.structs import TableGradient
from gpuopt.backends.row_order import PIECE, ROWS_PER_WORD, STRETCH
from gpuopt.rules.slot_codes import Coding

INT32 = Number("int32")
INT64 = Number("int64")
UINT32S = Pointer("uint32")
REFUSED = Pointer("uint64")
TABLES: dict[str, Number | Pointer | Struct] = {
    "only_gradient": struct_of(TableGradient),
    "gradients": Pointer("int64", struct_of(TableGradient), is_optional=True),
    "num_tables": INT64,
}
OF_TOUCHED_ROWS = {
    "gpuopt::piece_size": PIECE,
    "gpuopt::stretch_size": STRETCH,
    "gpuopt::rows_per_word": ROWS_PER_WORD,
    "gpuopt::warp_size": WARP,
    "gpuopt::pack_bytes": PACK_BYTES,
}
OF_SPARSE_UPDATE = {**OF_TOUCHED_ROWS, "gpuopt::piece_threads": PIECE_THREADS}
OF_CODES = {
    "gpuopt::lane_codes": LANE_CODES,
    **{f"gpuopt::coding_{each.name.lower()}": each for each in Coding},
}
