// How data for kernels is laid out. Addresses are integers, but for arrays that are only read.
// Written from gpuopt/backends/cuda/structs.py by .venv/bin/python tests/support/structs_header.py.
#pragma once

namespace gpuopt {

// The addresses of gradients, by value: then a step uploads nothing.
struct FewGradients {
  long long of[5];
};

// The scalars of groups, by value.
template <class Scalars, int count>
struct FewScalars {
  // The bytes of [num_groups, num_scalars], in the type that the rule computes in.
  Scalars of[count];
};

// The scalars of groups of a clipped rule, by value.
template <class Scalars, int count>
struct ClippedScalars {
  // The address of what `Clips.join` returned, `ClipResult` of each norm; 0 if no gradient has a
  // norm.
  long long factors;
  // See `FewScalars`.
  Scalars of[count];
};

// The scalars of groups of a scaled rule, by value.
//
// The host may not know the device's count of steps: so there are the scalars of all groups for the
// largest possible count, then those for one step less, and so on.
template <class Scalars, int count>
struct ScaledScalars {
  // See `ClippedScalars`.
  long long factors;
  // The address of how many steps were made, this one included.
  long long num_made;
  // The largest possible count.
  long long host_count;
  // How many groups there are scalars for, for each count.
  long long num_groups;
  // See `FewScalars`.
  Scalars of[count];
};

// The addresses of a variable, its slots, and its companion, by value.
template <int count>
struct Arrays {
  long long of[count];
};

// One variable of a launch: its size lies beside the addresses that a block needs with it.
template <int count>
struct Variable {
  // In elements.
  long long size;
  // The number of the variable's first element, for stages of the gradient.
  long long first_number;
  // See `Arrays`.
  long long arrays[count];
};

// One variable of a launch, with slots in 8 bits.
template <int count>
struct CodedVariable {
  // In elements.
  long long size;
  // The size of a row that blocks end at, or of the variable.
  long long width;
  // The number of the variable's first element, for stages of the gradient.
  long long first_number;
  // The addresses of the variable, its codes and their scales.
  long long arrays[count];
};

// Elements that a block updates in one go.
struct alignas(8) Chunk {
  // The variable's number.
  unsigned int variable;
  // The chunk's number among those of the variable.
  unsigned int number;
};

// The rows of one variable's sparse gradient.
struct IndexList {
  // The address of the first row.
  long long address;
  // The size of a row's number in bytes: of int32 or int64.
  long long index_size;
  // Where the rows begin among those of all lists.
  long long first;
  // The key of the variable's row 0, if variables are sorted together.
  long long first_key;
  // The variable's number of rows.
  long long height;
  // Identifies it to the reader of a row flag.
  long long variable;
};

// One array whose norm is taken, or that is scaled.
struct ClippedArray {
  // The array's address.
  long long source;
  // The address of the scaled one; 0 if there is none.
  long long target;
  // How many elements it has.
  long long size;
  // The number of its first chunk among those of all arrays.
  long long first_chunk;
};

// What belongs to a gradient of `measure_inputs`.
struct MeasuredVariable {
  // The variable's number among those of the plan.
  long long number;
  // The addresses of the variable, and of its companion, if it has one.
  long long arrays[2];
  // See `RuleInputs.bounds`.
  double bound;
};

// How norms are made of sums of squares.
struct ClipRule {
  // The address of the most of each norm, float64; 0 if there is one norm.
  long long most_of;
  // The most of the only norm.
  double only_most;
  // What gradients are multiplied by before all else.
  double unscale;
  // How often each gradient comes.
  double num_copies;
  // A `ClipForm`.
  int form;
  // Whether norms are float64; else they are rounded to float32.
  int is_double;
};

// A row of what `Clips.join` returns.
struct ClipResult {
  double squares;
  double norm;
  double factor_of_floats;
  double factor_of_doubles;
  double unscale;
};

// The addresses of the sums of several devices, by value.
struct FewSums {
  long long of[8];
};

// Where the sums of one launch go.
//
// The launch adds to some norms, whose numbers follow each other.
struct ClipTotals {
  // The address of the sum of squares of each norm, float64.
  long long sums;
  // The address of how many blocks are done: 0 before and after the launch.
  long long num_done;
  // The first number.
  long long first_norm;
  // The number after the last one.
  long long end_norm;
  // The address of where each one's parts begin, and the last ones end; 0 if there is one norm.
  long long begins;
  // How many norms there are.
  long long num_norms;
  // Whether no launch before it has written sums.
  long long is_first;
};

// A loss scale on a device.
struct LossScaling {
  // Whether the step is left out; updates read it as they read a row flag.
  unsigned long long is_left_out;
  // How many steps were made.
  long long num_made;
  // The number of the last one whose gradients were not finite; 0 if none was.
  long long last_bad_step;
  // The number of its first gradient that was not; -1: a clipped one.
  long long first_bad;
  // Whether no further step is made: rows were refused, or a step was an error.
  long long has_stopped;
  // See `ScaleState`.
  long long good_steps;
  long long bad_steps;
  long long num_skipped;
  long long skipped_in_a_row;
  float loss_scale;
  // What gradients are multiplied by: the scale's reciprocal.
  float unscale;
};

// In the place of the `LossDecision` of a launch that does not decide.
struct NoDecision {};

// The inputs of the decision about a step.
struct LossDecision {
  // The address of the `LossScaling` before the step.
  long long before;
  // The address of the one after it.
  long long after;
  // The address of the row flag.
  long long refused;
  // The address of a word for gradients that are not finite, uint64: 0 between launches.
  long long bad;
  // The address of the numbers of the launch's gradients; 0 if it has one.
  long long numbers;
  // The gradient's number, if there is one gradient.
  long long number;
  // The step's own number, from 1.
  long long step;
  // See `ScaleRule`.
  long long incr_every;
  long long decr_every;
  // After how many skipped steps one is made anyway; below 0 for never.
  long long accept_after;
  // Whether no step is made after one that is not finite.
  long long stops;
  // See `ScaleRule`.
  double incr_ratio;
  double decr_ratio;
  double divisor;
};

// Rows of one array that are copied.
struct CopiedRows {
  // The address of what is written.
  long long target;
  // The address of what is read; 0 if a number is written.
  long long source;
  // The address of the rows of the source, int64; 0 if all are copied, in order.
  long long from_rows;
  // The address of the rows of the target, likewise.
  long long to_rows;
  // The number, repeated in 16 bytes.
  long long low;
  long long high;
  // How much a thread copies at once, up to 16; it divides addresses and rows.
  long long word_bytes;
  // How many words a row has.
  long long row_words;
  // How many words all rows have.
  long long num_words;
  // The number of its first chunk among those of all arrays.
  long long first_chunk;
};

// One table's gradient in a sparse update.
struct TableGradient {
  // The key of the table's row 0.
  long long first_key;
  // The address that position 0 among the rows of all tables would have: where this table's rows
  // begin, its values do.
  long long values;
  // The number of the table's first element, for stages of the gradient.
  long long first_number;
};

// A table's rows that missed steps.
struct LateTable {
  // The address of how many steps each row has made, int32: the one that key 0 would have.
  long long last;
  // The address of how many steps were counted, int64.
  long long now;
  // The address of the step sizes; 0 if rows without a gradient do not move.
  long long steps;
  // The address of the sums of steps; 0 if missed steps are made one by one.
  long long sums;
  // The address of what a step of size 1 adds to them.
  long long weights;
  // The address of powers of the slots' decays, float64 [num_slots, NUM_POWERS].
  long long powers;
  // The address of the last step's key of random bits, the tolerance, epsilon, and the scalars of
  // rows without a gradient.
  long long numbers;
  // The address of what makes sums one step earlier, float64.
  long long one_earlier;
  // How many steps without a gradient move a row.
  long long window;
};

// How the rows to sort are divided among blocks.
struct Shares {
  // How many rows there are.
  long long num_rows;
  // How many shares they are divided into.
  long long num_shares;
  // How many consecutive rows a share has; the last one may have less.
  long long rows_per_share;
};

// A gradient's rows, sorted.
template <class Key>
struct SortedRows {
  // The rows in ascending order, [num_rows], uint32 or uint64.
  const Key* keys;
  // Where each row stands in the gradient, [num_rows].
  const unsigned int* positions;
  // How many rows there are, repeated ones included.
  long long num_rows;
};

}  // namespace gpuopt
