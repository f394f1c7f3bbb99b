// Reads the rows of sparse gradients as users give them: each variable's in an array of its own.
#include "shared/grid.cuh"
#include "shared/ranges.cuh"
#include "shared/row_check.cuh"

namespace gpuopt {

// The rows of one variable's gradient. Mirrors `IndexList` in gpuopt/backends/cuda/structs.py.
struct IndexList {
  long long address;     // of its first row
  long long index_size;  // in bytes: 4 or 8, for int and long long
  long long first;       // where its rows begin among those of all lists
  long long first_key;   // the key of the variable's row 0
  long long height;      // the variable's number of rows
  long long variable;    // identifies it to the reader of `refused`

  // The row at `position` among those of all lists.
  __device__ __forceinline__ long long row_at(long long position) const {
    const long long i = position - first;
    if (index_size == sizeof(int)) return __ldg(reinterpret_cast<const int*>(address) + i);
    return __ldg(reinterpret_cast<const long long*>(address) + i);
  }
};

// Returns the list that has a position. Precondition: the lists are in order, and none is empty.
__device__ __forceinline__ const IndexList& list_of(const IndexList& only, const IndexList* lists,
                                                    long long num_lists, long long position) {
  if (num_lists == 1) return only;
  return lists[range_with<&IndexList::first>(lists, num_lists, position)];
}

// Refuses rows that their variable does not have.
//
// A single list is passed by value, as `only`; `lists` are read if there are more.
__global__ void check_rows(const __grid_constant__ IndexList only,
                           const IndexList* __restrict__ lists, long long num_lists,
                           long long num_rows, unsigned long long* refused) {
  for (long long i = first_item(); i < num_rows; i += items_per_pass()) {
    const IndexList& list = list_of(only, lists, num_lists, i);
    check_row(list.row_at(i), list.height, list.variable, refused);
  }
}

// Writes the keys of all rows, side by side, for the variables to be sorted together.
__global__ void gather_rows(const IndexList* __restrict__ lists, long long num_lists,
                            long long num_rows, int* keys,
                            const unsigned long long* __restrict__ refused) {
  if (*refused) return;
  for (long long i = first_item(); i < num_rows; i += items_per_pass()) {
    const IndexList& list = list_of(lists[0], lists, num_lists, i);
    // 32 bits of which the sort reads no sign.
    keys[i] = static_cast<int>(list.first_key + list.row_at(i));
  }
}

}  // namespace gpuopt
