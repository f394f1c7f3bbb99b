// Copies rows of many arrays, whatever their types, to others, or writes a number to rows.
#include "shared/grid.cuh"
#include "shared/ranges.cuh"
#include "shared/structs.cuh"

namespace gpuopt {

// Returns where a word of row i is, if row i stands for `rows[i]`.
__device__ __forceinline__ long long place_of(long long word, long long row_words, long long rows) {
  if (rows == 0) return word;
  const long long row = word / row_words;
  const long long named = __ldg(reinterpret_cast<const long long*>(rows) + row);
  return word + (named - row) * row_words;
}

// Precondition: an element is no larger than a word if a number is written.
template <class Word>
__device__ __forceinline__ void copy_words(const CopiedRows& copied, long long begin) {
  const Word* source = reinterpret_cast<const Word*>(copied.source);
  Word* target = reinterpret_cast<Word*>(copied.target);
  const long long bits[] = {copied.low, copied.high};
  Word word;
  memcpy(&word, bits, sizeof word);
  const long long end =
      begin + copy_chunk < copied.num_words ? begin + copy_chunk : copied.num_words;
  for (long long i = begin + threadIdx.x; i < end; i += copy_threads) {
    if (source) word = source[place_of(i, copied.row_words, copied.from_rows)];
    target[place_of(i, copied.row_words, copied.to_rows)] = word;
  }
}

// Preconditions: the arrays are in order, and none is empty; no word is written twice, or read
// where it is written; blocks have `copy_threads` threads.
__global__ void __launch_bounds__(copy_threads)
    copy_rows(const CopiedRows* __restrict__ arrays, long long num_arrays, long long num_chunks) {
  for (long long c = blockIdx.x; c < num_chunks; c += gridDim.x) {
    const CopiedRows& copied = arrays[range_with<&CopiedRows::first_chunk>(arrays, num_arrays, c)];
    const long long begin = (c - copied.first_chunk) * copy_chunk;
    switch (copied.word_bytes) {
      case 16:
        copy_words<uint4>(copied, begin);
        break;
      case 8:
        copy_words<unsigned long long>(copied, begin);
        break;
      case 4:
        copy_words<unsigned int>(copied, begin);
        break;
      case 2:
        copy_words<unsigned short>(copied, begin);
        break;
      default:
        copy_words<unsigned char>(copied, begin);
    }
  }
}

}  // namespace gpuopt
