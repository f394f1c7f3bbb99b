"""Every kernel with its parameters, by the types that it is compiled for."""

from gpuopt.backends.cuda.kernels.dense import (
    coded_update,
    dense_update,
    sum_coded_terms,
    sum_terms,
)
from gpuopt.backends.cuda.kernels.norms import (
    add_squares,
    join_sums,
    measure,
    measure_inputs,
    measure_rows,
    scale_to_norm,
    sum_squares,
)
from gpuopt.backends.cuda.kernels.of_rules import (
    few_groups,
    form_of_scalars,
    has_factors,
    needs_groups,
    scalars_of,
)
from gpuopt.backends.cuda.kernels.rows import (
    check_and_count_digits,
    check_rows,
    copy_rows,
    count_digits,
    gather_rows,
    mark_rows,
    move_rows,
    sort_few_rows,
    sum_pieces,
    sum_runs,
)
from gpuopt.backends.cuda.kernels.sparse import (
    bring_up_rows,
    late_update,
    sparse_update,
    update_coded_rows,
    update_other_coded_rows,
    update_other_rows,
)

__all__ = [
    "add_squares",
    "bring_up_rows",
    "check_and_count_digits",
    "check_rows",
    "coded_update",
    "copy_rows",
    "count_digits",
    "dense_update",
    "few_groups",
    "form_of_scalars",
    "gather_rows",
    "has_factors",
    "join_sums",
    "late_update",
    "mark_rows",
    "measure",
    "measure_inputs",
    "measure_rows",
    "move_rows",
    "needs_groups",
    "scalars_of",
    "scale_to_norm",
    "sort_few_rows",
    "sparse_update",
    "sum_coded_terms",
    "sum_pieces",
    "sum_runs",
    "sum_squares",
    "sum_terms",
    "update_coded_rows",
    "update_other_coded_rows",
    "update_other_rows",
]
