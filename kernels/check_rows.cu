// Reads the rows of sparse gradients as users give them: each variable's in an array of its own.
#include "shared/grid.cuh"
#include "shared/ranges.cuh"
#include "shared/row_check.cuh"
#include "shared/structs.cuh"

namespace gpuopt {

// The row at `position` among those of all lists.
__device__ __forceinline__ long long row_at(const IndexList& list, long long position) {
  const long long i = position - list.first;
  if (list.index_size == sizeof(int)) return __ldg(reinterpret_cast<const int*>(list.address) + i);
  return __ldg(reinterpret_cast<const long long*>(list.address) + i);
}

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
    check_row(row_at(list, i), list.height, list.variable, refused);
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
    keys[i] = static_cast<int>(list.first_key + row_at(list, i));
  }
}

}  // namespace gpuopt
