// Groups a sparse gradient's rows by their index, in host memory.
#pragma once
#include <cstdint>

namespace gpuopt {

// A row that is named, and its number among the rows.
struct NumberedRow {
  std::uint64_t row;
  std::int32_t number;
};

// Writes to `firsts` where each row's positions begin among all that are sorted by row, counted
// from `first` on; counts[k] of them are of row k. `sorted` and `other` have room for all rows.
// This matters to rows with three positions or more: two are added up alike wherever they stand.
// So only the buckets of near rows that have such a row are sorted, each by the bits in which its
// rows differ.
inline void find_firsts(std::int32_t num_rows, const long long* rows, const long long* counts,
                        long long first, NumberedRow* sorted, NumberedRow* other,
                        long long* firsts) {
  constexpr int bits = 11;
  constexpr std::uint64_t num_buckets = 1 << bits;
  long long most = 0;
  std::uint64_t highest = 0;
  for (std::int32_t k = 0; k < num_rows; ++k) {
    if (counts[k] > most) most = counts[k];
    highest |= rows[k];
    firsts[k] = first;
  }
  if (most < 3) return;
  if (highest < 2ull * num_rows) {  // a counter for each row of the table is quicker than a sort
    auto* const before = reinterpret_cast<std::int32_t*>(sorted);
    for (std::uint64_t row = 0; row <= highest; ++row) before[row] = 0;
    for (std::int32_t k = 0; k < num_rows; ++k) before[rows[k]] = counts[k];
    std::int32_t sum = 0;
    for (std::uint64_t row = 0; row <= highest; ++row) {
      const std::int32_t count = before[row];
      before[row] = sum;
      sum += count;
    }
    for (std::int32_t k = 0; k < num_rows; ++k)
      if (counts[k] > 2) firsts[k] = first + before[rows[k]];
    return;
  }
  int bucket_shift = 0;
  while (highest >> bucket_shift >= num_buckets) ++bucket_shift;
  std::int32_t first_of[num_buckets] = {};
  bool matters[num_buckets] = {};
  for (std::int32_t k = 0; k < num_rows; ++k) {
    const auto bucket = static_cast<std::uint64_t>(rows[k]) >> bucket_shift;
    first_of[bucket] += static_cast<std::int32_t>(counts[k]);
    matters[bucket] |= counts[k] > 2;
  }
  std::int32_t sum = 0;
  for (std::int32_t& each : first_of) {
    const std::int32_t count = each;
    each = sum;
    sum += count;
  }
  std::int32_t num_sorted = 0;
  for (std::int32_t k = 0; k < num_rows; ++k) {
    // Without a branch, which processors could not foresee.
    const auto row = static_cast<std::uint64_t>(rows[k]);
    sorted[num_sorted] = {row, k};
    num_sorted += matters[row >> bucket_shift];
  }
  for (int shift = 0; shift < bucket_shift; shift += bits) {
    std::int32_t ends[num_buckets] = {};
    for (std::int32_t k = 0; k < num_sorted; ++k) ++ends[sorted[k].row >> shift & num_buckets - 1];
    std::int32_t before = 0;
    for (std::int32_t& each : ends) {
      const std::int32_t count = each;
      each = before;
      before += count;
    }
    for (std::int32_t k = 0; k < num_sorted; ++k)
      other[ends[sorted[k].row >> shift & num_buckets - 1]++] = sorted[k];
    NumberedRow* const source = sorted;
    sorted = other;
    other = source;
  }
  for (std::int32_t k = 0; k < num_sorted; ++k) {
    std::int32_t& next = first_of[sorted[k].row >> bucket_shift];
    firsts[sorted[k].number] = first + next;
    next += static_cast<std::int32_t>(counts[sorted[k].number]);
  }
}

// Writes each index once to `rows`, in the order in which they first appear: so their values are
// read almost in the order in which they lie. All positions go to `positions`, those of one row in
// ascending order; to `begins` where each row's positions begin, and at last `size`; and to
// `firsts` where they begin among the positions that are sorted by row, counted from `first` on.
// Returns how many rows there are. Precondition: size < 2^31, 2^bucket_bits >= 4 * size; `work` has
// room for 2^bucket_bits + 6 * size, and begins where an 8-byte number may.
template <class Index>
long long group_rows(const Index* indices, long long size, long long first, int bucket_bits,
                     std::int32_t* work, long long* rows, long long* positions, long long* begins,
                     long long* firsts) {
  // 2^64 divided by the golden ratio.
  constexpr std::uint64_t golden = 0x9E3779B97F4A7C15ull;
  const long long num_buckets = 1ll << bucket_bits;
  // Rows count from 1. Of each bucket: its newest row; of each row: the one before it in its
  // bucket; and of each position: its row.
  std::int32_t* const newest_of = work;
  std::int32_t* const before = newest_of + num_buckets;
  std::int32_t* const row_of = before + size;
  // Once all rows are found, the buckets' memory has another use.
  auto* const sorted = reinterpret_cast<NumberedRow*>(work);
  auto* const other = reinterpret_cast<NumberedRow*>(row_of + size);
  for (long long i = 0; i < num_buckets; ++i) newest_of[i] = 0;
  std::int32_t num_rows = 0;
  for (long long i = 0; i < size; ++i) {
    // Multiples of `golden` spread evenly (Knuth, The Art of Computer Programming 3, section 6.4):
    // whatever the indices, a bucket gets about as many of them as there are rows in the table for
    // each bucket, and hardly more.
    const std::uint64_t index = indices[i];
    std::int32_t& newest = newest_of[index * golden >> (64 - bucket_bits)];
    std::int32_t row = newest;
    while (row != 0 && rows[row - 1] != indices[i]) row = before[row - 1];
    if (row == 0) {
      rows[num_rows] = indices[i];
      before[num_rows] = newest;
      newest = row = ++num_rows;
      begins[row] = 0;
    }
    row_of[i] = row;
    ++begins[row];
  }
  // From how often each row appears to where its positions begin, and then to where they end.
  find_firsts(num_rows, rows, begins + 1, first, sorted, other, firsts);
  long long begin = 0;
  begins[0] = 0;
  for (std::int32_t row = 1; row <= num_rows; ++row) {
    const long long count = begins[row];
    begins[row] = begin;
    begin += count;
  }
  for (long long i = 0; i < size; ++i) positions[begins[row_of[i]]++] = i;
  return num_rows;
}

// Does that for int32, of 4 bytes, or int64.
inline long long group_rows(const void* indices, int index_bytes, long long size, long long first,
                            int bucket_bits, std::int32_t* work, long long* rows,
                            long long* positions, long long* begins, long long* firsts) {
  const auto group = [=](auto typed) {
    return group_rows(typed, size, first, bucket_bits, work, rows, positions, begins, firsts);
  };
  return index_bytes == 4 ? group(static_cast<const std::int32_t*>(indices))
                          : group(static_cast<const std::int64_t*>(indices));
}

}  // namespace gpuopt
