// Groups a sparse gradient's rows by their index, in host memory.
#pragma once
#include <cstdint>

#include "../shared/random_bits.cuh"

namespace gpuopt {

// Writes each index once to `rows`, in the order in which they first appear: so their values are
// read almost in the order in which they lie. All positions go to `positions`, those of one row in
// ascending order; and to `begins` where each row's positions begin, and at last `size`. Returns
// how many rows there are. Precondition: size < 2^31, bucket_bits > 0; `work` has room for
// 2^bucket_bits + 2 * size.
template <class Index>
long long group_rows(const Index* indices, long long size, int bucket_bits, std::int32_t* work,
                     long long* rows, long long* positions, long long* begins) {
  const long long num_buckets = 1ll << bucket_bits;
  // Rows count from 1. Of each bucket: its newest row; of each row: the one before it in its
  // bucket; and of each position: its row.
  std::int32_t* const newest_of = work;
  std::int32_t* const before = newest_of + num_buckets;
  std::int32_t* const row_of = before + size;
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

}  // namespace gpuopt
