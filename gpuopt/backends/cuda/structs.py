"""The layout of data for kernels: structs of C++, in kernels/shared/structs.cuh.

That header is written from this file by tests/support/structs_header.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from gpuopt.backends.cuda.parameters import Number, Numbers, Pointer, Several

# How many gradients' addresses a dense update takes by value.
FEW_GRADIENTS = 5
# The most groups whose scalars an update takes by value, and the most bytes that these may have.
FEW_GROUPS = 64
FEW_GROUPS_BYTES = 2048
# The most devices whose sums a launch that joins them finds by addresses that it takes by value.
FEW_DEVICES = 8
# In place of the number of a gradient that is not finite: more than any.
NOTHING_IS_WRONG = 2**53


class FewGradients(NamedTuple):
    """The addresses of gradients, by value: then a step uploads nothing."""

    of: Annotated[Sequence[int], Numbers(Number("int64"), FEW_GRADIENTS)]


class FewScalars(NamedTuple):
    """The scalars of groups, by value.

    Attributes:
        of: The bytes of [num_groups, num_scalars], in the type that the rule computes in.
    """

    of: Annotated[bytes, Several("Scalars")]


class ClippedScalars(NamedTuple):
    """The scalars of groups of a clipped rule, by value.

    Attributes:
        factors: The address of what `Clips.join` returned, `ClipResult` of each norm; 0 if no
            gradient has a norm.
        of: See `FewScalars`.
    """

    factors: Annotated[int, Number("int64")]
    of: Annotated[bytes, Several("Scalars")]


class ScaledScalars(NamedTuple):
    """The scalars of groups of a scaled rule, by value.

    The host may not know the device's count of steps: so there are the scalars of all groups for
    the largest possible count, then those for one step less, and so on.

    Attributes:
        factors: See `ClippedScalars`.
        num_made: The address of how many steps were made, this one included.
        host_count: The largest possible count.
        num_groups: How many groups there are scalars for, for each count.
        of: See `FewScalars`.
    """

    factors: Annotated[int, Number("int64")]
    num_made: Annotated[int, Number("int64")]
    host_count: Annotated[int, Number("int64")]
    num_groups: Annotated[int, Number("int64")]
    of: Annotated[bytes, Several("Scalars")]


class Arrays(NamedTuple):
    """The addresses of a variable, its slots, and its companion, by value."""

    of: Annotated[Sequence[int], Several(Number("int64"))]


class Variable(NamedTuple):
    """One variable of a launch: its size lies beside the addresses that a block needs with it.

    Attributes:
        size: In elements.
        first_number: The number of the variable's first element, for stages of the gradient.
        arrays: See `Arrays`.
    """

    size: Annotated[int, Number("int64")]
    first_number: Annotated[int, Number("int64")]
    arrays: Annotated[Sequence[int], Several(Number("int64"))]


class CodedVariable(NamedTuple):
    """One variable of a launch, with slots in 8 bits.

    Attributes:
        size: In elements.
        width: The size of a row that blocks end at, or of the variable.
        first_number: The number of the variable's first element, for stages of the gradient.
        arrays: The addresses of the variable, its codes and their scales.
    """

    size: Annotated[int, Number("int64")]
    width: Annotated[int, Number("int64")]
    first_number: Annotated[int, Number("int64")]
    arrays: Annotated[Sequence[int], Several(Number("int64"))]


class Chunk(NamedTuple):
    """Elements that a block updates in one go.

    Attributes:
        variable: The variable's number.
        number: The chunk's number among those of the variable.
    """

    variable: Annotated[Any, Number("uint32")]
    number: Annotated[Any, Number("uint32")]


class IndexList(NamedTuple):
    """The rows of one variable's sparse gradient.

    Attributes:
        address: The address of the first row.
        index_size: The size of a row's number in bytes: of int32 or int64.
        first: Where the rows begin among those of all lists.
        first_key: The key of the variable's row 0, if variables are sorted together.
        height: The variable's number of rows.
        variable: Identifies it to the reader of a row flag.
    """

    address: Annotated[int, Number("int64")]
    index_size: Annotated[int, Number("int64")]
    first: Annotated[int, Number("int64")]
    first_key: Annotated[int, Number("int64")]
    height: Annotated[int, Number("int64")]
    variable: Annotated[int, Number("int64")]


class ClippedArray(NamedTuple):
    """One array whose norm is taken, or that is scaled.

    Attributes:
        source: The array's address.
        target: The address of the scaled one; 0 if there is none.
        size: How many elements it has.
        first_chunk: The number of its first chunk among those of all arrays.
    """

    source: Annotated[int, Number("int64")]
    target: Annotated[int, Number("int64")]
    size: Annotated[int, Number("int64")]
    first_chunk: Annotated[int, Number("int64")]


class MeasuredVariable(NamedTuple):
    """What belongs to a gradient of `measure_inputs`.

    Attributes:
        number: The variable's number among those of the plan.
        arrays: The addresses of the variable, and of its companion, if it has one.
        bound: See `RuleInputs.bounds`.
    """

    number: Annotated[int, Number("int64")]
    arrays: Annotated[Sequence[int], Numbers(Number("int64"), 2)]
    bound: Annotated[float, Number("float64")]


class ClipRule(NamedTuple):
    """How norms are made of sums of squares.

    Attributes:
        most_of: The address of the most of each norm, float64; 0 if there is one norm.
        only_most: The most of the only norm.
        unscale: What gradients are multiplied by before all else.
        num_copies: How often each gradient comes.
        form: A `ClipForm`.
        is_double: Whether norms are float64; else they are rounded to float32.
    """

    most_of: Annotated[int, Number("int64")]
    only_most: Annotated[float, Number("float64")]
    unscale: Annotated[float, Number("float64")]
    num_copies: Annotated[float, Number("float64")]
    form: Annotated[int, Number("int32")]
    is_double: Annotated[int, Number("int32")]


class ClipResult(NamedTuple):
    """A row of what `Clips.join` returns."""

    squares: Annotated[float, Number("float64")]
    norm: Annotated[float, Number("float64")]
    factor_of_floats: Annotated[float, Number("float64")]
    factor_of_doubles: Annotated[float, Number("float64")]
    unscale: Annotated[float, Number("float64")]


class FewSums(NamedTuple):
    """The addresses of the sums of several devices, by value."""

    of: Annotated[Sequence[int], Numbers(Number("int64"), FEW_DEVICES)]


class ClipTotals(NamedTuple):
    """Where the sums of one launch go.

    The launch adds to some norms, whose numbers follow each other.

    Attributes:
        sums: The address of the sum of squares of each norm, float64.
        num_done: The address of how many blocks are done: 0 before and after the launch.
        first_norm: The first number.
        end_norm: The number after the last one.
        begins: The address of where each one's parts begin, and the last ones end; 0 if there is
            one norm.
        num_norms: How many norms there are.
        is_first: Whether no launch before it has written sums.
    """

    sums: Annotated[int, Number("int64")]
    num_done: Annotated[int, Number("int64")]
    first_norm: Annotated[int, Number("int64")]
    end_norm: Annotated[int, Number("int64")]
    begins: Annotated[int, Number("int64")]
    num_norms: Annotated[int, Number("int64")]
    is_first: Annotated[int, Number("int64")]


class LossScaling(NamedTuple):
    """A loss scale on a device.

    Attributes:
        is_left_out: Whether the step is left out; updates read it as they read a row flag.
        num_made: How many steps were made.
        last_bad_step: The number of the last one whose gradients were not finite; 0 if none was.
        first_bad: The number of its first gradient that was not; -1: a clipped one.
        has_stopped: Whether no further step is made: rows were refused, or a step was an error.
        good_steps, bad_steps, num_skipped, skipped_in_a_row, loss_scale: See `ScaleState`.
        unscale: What gradients are multiplied by: the scale's reciprocal.
    """

    is_left_out: Annotated[int, Number("uint64")]
    num_made: Annotated[int, Number("int64")]
    last_bad_step: Annotated[int, Number("int64")]
    first_bad: Annotated[int, Number("int64")]
    has_stopped: Annotated[int, Number("int64")]
    good_steps: Annotated[int, Number("int64")]
    bad_steps: Annotated[int, Number("int64")]
    num_skipped: Annotated[int, Number("int64")]
    skipped_in_a_row: Annotated[int, Number("int64")]
    loss_scale: Annotated[float, Number("float32")]
    unscale: Annotated[float, Number("float32")]


class NoDecision(NamedTuple):
    """In the place of the `LossDecision` of a launch that does not decide."""


class LossDecision(NamedTuple):
    """The inputs of the decision about a step.

    Attributes:
        before: The address of the `LossScaling` before the step.
        after: The address of the one after it.
        refused: The address of the row flag.
        bad: The address of a word for gradients that are not finite, uint64: 0 between launches.
        numbers: The address of the numbers of the launch's gradients; 0 if it has one.
        number: The gradient's number, if there is one gradient.
        step: The step's own number, from 1.
        incr_every, decr_every: See `ScaleRule`.
        accept_after: After how many skipped steps one is made anyway; below 0 for never.
        stops: Whether no step is made after one that is not finite.
        incr_ratio, decr_ratio, divisor: See `ScaleRule`.
    """

    before: Annotated[int, Number("int64")]
    after: Annotated[int, Number("int64")]
    refused: Annotated[int, Number("int64")]
    bad: Annotated[int, Number("int64")]
    numbers: Annotated[int, Number("int64")]
    number: Annotated[int, Number("int64")]
    step: Annotated[int, Number("int64")]
    incr_every: Annotated[int, Number("int64")]
    decr_every: Annotated[int, Number("int64")]
    accept_after: Annotated[int, Number("int64")]
    stops: Annotated[int, Number("int64")]
    incr_ratio: Annotated[float, Number("float64")]
    decr_ratio: Annotated[float, Number("float64")]
    divisor: Annotated[float, Number("float64")]


class CopiedRows(NamedTuple):
    """Rows of one array that are copied.

    Attributes:
        target: The address of what is written.
        source: The address of what is read; 0 if a number is written.
        from_rows: The address of the rows of the source, int64; 0 if all are copied, in order.
        to_rows: The address of the rows of the target, likewise.
        low, high: The number, repeated in 16 bytes.
        word_bytes: How much a thread copies at once, up to 16; it divides addresses and rows.
        row_words: How many words a row has.
        num_words: How many words all rows have.
        first_chunk: The number of its first chunk among those of all arrays.
    """

    target: Annotated[int, Number("int64")]
    source: Annotated[int, Number("int64")]
    from_rows: Annotated[int, Number("int64")]
    to_rows: Annotated[int, Number("int64")]
    low: Annotated[int, Number("int64")]
    high: Annotated[int, Number("int64")]
    word_bytes: Annotated[int, Number("int64")]
    row_words: Annotated[int, Number("int64")]
    num_words: Annotated[int, Number("int64")]
    first_chunk: Annotated[int, Number("int64")]


class TableGradient(NamedTuple):
    """One table's gradient in a sparse update.

    Attributes:
        first_key: The key of the table's row 0.
        values: The address that position 0 among the rows of all tables would have: where this
            table's rows begin, its values do.
        first_number: The number of the table's first element, for stages of the gradient.
    """

    first_key: Annotated[int, Number("int64")]
    values: Annotated[int, Number("int64")]
    first_number: Annotated[int, Number("int64")]


class LateTable(NamedTuple):
    """A table's rows that missed steps.

    Attributes:
        last: The address of how many steps each row has made, int32: the one that key 0 would have.
        now: The address of how many steps were counted, int64.
        steps: The address of the step sizes; 0 if rows without a gradient do not move.
        sums: The address of the sums of steps; 0 if missed steps are made one by one.
        weights: The address of what a step of size 1 adds to them.
        powers: The address of powers of the slots' decays, float64 [num_slots, NUM_POWERS].
        numbers: The address of the last step's key of random bits, the tolerance, epsilon, and the
            scalars of rows without a gradient.
        one_earlier: The address of what makes sums one step earlier, float64.
        window: How many steps without a gradient move a row.
    """

    last: Annotated[int, Number("int64")]
    now: Annotated[int, Number("int64")]
    steps: Annotated[int, Number("int64")]
    sums: Annotated[int, Number("int64")]
    weights: Annotated[int, Number("int64")]
    powers: Annotated[int, Number("int64")]
    numbers: Annotated[int, Number("int64")]
    one_earlier: Annotated[int, Number("int64")]
    window: Annotated[int, Number("int64")]


class Shares(NamedTuple):
    """How the rows to sort are divided among blocks.

    Attributes:
        num_rows: How many rows there are.
        num_shares: How many shares they are divided into.
        rows_per_share: How many consecutive rows a share has; the last one may have less.
    """

    num_rows: Annotated[int, Number("int64")]
    num_shares: Annotated[int, Number("int64")]
    rows_per_share: Annotated[int, Number("int64")]


class SortedRows(NamedTuple):
    """A gradient's rows, sorted.

    Attributes:
        keys: The rows in ascending order, [num_rows], uint32 or uint64.
        positions: Where each row stands in the gradient, [num_rows].
        num_rows: How many rows there are, repeated ones included.
    """

    keys: Annotated[Any, Pointer("Key")]
    positions: Annotated[Any, Pointer("uint32")]
    num_rows: Annotated[int, Number("int64")]
