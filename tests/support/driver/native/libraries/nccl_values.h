// Arithmetic on the elements of collectives.
#pragma once

#include <cstddef>
#include <vector>

namespace nccl {

constexpr int num_types = 10;
constexpr int num_ops = 4;
extern const size_t item_size[num_types];

// Reduces `count` elements of all ranks, as a ring does: the first part of the elements begins with
// the second rank, the next part with the third. Every step is rounded. The least and the greatest
// of a number and NaN are the number, as by NVIDIA's fmin and fmax.
void reduce(int type, int op, const std::vector<const char*>& of_ranks, size_t count, char* result);

}  // namespace nccl
