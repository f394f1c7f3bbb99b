// Updates of blocks of elements whose slots are in 8 bits, by lanes that share a block: each has
// neighbours in registers, and together they find the block's scale. Codes and scales are those of
// `Byte` in kernels/cpu/codecs.hpp.
#pragma once
#include "lanes.cuh"
#include "slot_codes.cuh"
#include "update.cuh"

namespace gpuopt {

// How many elements of a block a lane has: their codes are one load.
constexpr int lane_codes = block_codes / warp_size;

// How many blocks a row has; a variable whose blocks do not end at rows is one row.
__device__ __forceinline__ long long blocks_of_row(long long width) {
  return (width + block_codes - 1) / block_codes;
}

// How many lanes share a block.
__device__ __forceinline__ int lanes_of_block(long long width) {
  return width < block_codes ? lanes_per_row((width + lane_codes - 1) / lane_codes) : warp_size;
}

// Reads the maps to shared memory: that of both signs, and if a slot is of squares the other one.
// Every thread of the block must call it.
template <class Program>
__device__ __forceinline__ const SlotTables* shared_tables(const unsigned int* __restrict__ words) {
  constexpr int num_maps = Program::codings == 0 ? 1 : 2;
  __shared__ SlotTables tables[num_maps];
  unsigned int* to = reinterpret_cast<unsigned int*>(tables);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof tables / sizeof *to); i += blockDim.x) {
    to[i] = __ldg(&words[i]);
  }
  __syncthreads();
  return tables;
}

// How many arrays an update writes: a variable, an average if there is one, codes and scales.
template <class Program>
constexpr int num_coded_arrays = 1 + 2 * Program::num_slots - Program::num_averages;

// A variable, its average if the rule moves one, the codes of its slots, and their scales.
template <class Program>
struct CodedTarget {
  VarOf<Program>* var;
  float* average = nullptr;
  Slots<Program, unsigned char> codes;  // from `Program::num_averages` on
  Slots<Program, float> scales;

  // `arrays` holds the variable's address, that of the average, those of all codes, and then those
  // of all scales.
  __device__ __forceinline__ explicit CodedTarget(const long long* arrays) {
    constexpr int first = Program::num_averages;
    var = reinterpret_cast<VarOf<Program>*>(arrays[0]);
    if constexpr (Program::num_averages > 0) average = reinterpret_cast<float*>(arrays[1]);
#pragma unroll
    for (int k = first; k < Program::num_slots; ++k) {
      codes.of[k] = reinterpret_cast<unsigned char*>(arrays[1 + k]);
      scales.of[k] = reinterpret_cast<float*>(arrays[1 + Program::num_slots + k - first]);
    }
  }

  // Whether lanes' elements are packs of the variable and of its codes, if their first one's
  // number is a multiple of lane_codes.
  __device__ __forceinline__ bool has_packs() const {
    bool aligned = is_pack_aligned(var);
    if constexpr (Program::num_averages > 0) aligned &= is_pack_aligned(average);
#pragma unroll
    for (int k = Program::num_averages; k < Program::num_slots; ++k) {
      aligned &= reinterpret_cast<unsigned long long>(codes.of[k]) % lane_codes == 0;
    }
    return aligned;
  }
};

// What one lane has of a block.
struct LanePart {
  long long block;   // the block's number among those of the variable
  long long begin;   // the lane's first element
  long long column;  // the same, in its row
  int count;         // how many elements there are: lane_codes, or less at the block's end

  __device__ __forceinline__ LanePart(long long number, long long row, long long column_of_block,
                                      long long width, const Lanes& lanes) {
    const long long left = width - column_of_block;
    const int length = left < block_codes ? static_cast<int>(left) : block_codes;
    const int first = lanes.lane * lane_codes;
    block = number;
    column = column_of_block + first;
    begin = row * width + column;
    count = length - first < lane_codes ? length - first : lane_codes;
  }

  // Whether these are packs of arrays that have them.
  __device__ __forceinline__ bool is_packed() const {
    return (count == lane_codes) & (begin % lane_codes == 0);
  }
};

// How many elements one instruction moves.
template <class Element>
constexpr int lane_pack =
    pack_bytes / sizeof(Element) < lane_codes ? pack_bytes / sizeof(Element) : lane_codes;

// Loads a lane's elements; what is not there becomes 0.
template <Caching caching, class Element>
__device__ __forceinline__ void load_lane(const Element* from, int count, bool is_packed,
                                          Element (&elements)[lane_codes]) {
  constexpr int pack = lane_pack<Element>;
  if (is_packed) {
#pragma unroll
    for (int first = 0; first < lane_codes; first += pack) {
      Elements<Element, pack> some;
      load<caching>(from + first, some);
#pragma unroll
      for (int k = 0; k < pack; ++k) elements[first + k] = some.of[k];
    }
  } else {
#pragma unroll
    for (int k = 0; k < lane_codes; ++k) {
      Elements<Element, 1> one = {};
      if (k < count) load<caching>(from + k, one);
      elements[k] = one.of[0];
    }
  }
}

template <Caching caching, class Element>
__device__ __forceinline__ void store_lane(Element* to, int count, bool is_packed,
                                           const Element (&elements)[lane_codes]) {
  constexpr int pack = lane_pack<Element>;
  if (is_packed) {
#pragma unroll
    for (int first = 0; first < lane_codes; first += pack) {
      Elements<Element, pack> some;
#pragma unroll
      for (int k = 0; k < pack; ++k) some.of[k] = elements[first + k];
      store_pack<caching>(to + first, some);
    }
  } else {
#pragma unroll
    for (int k = 0; k < lane_codes; ++k) {
      const Elements<Element, 1> one = {elements[k]};
      if (k < count) store<caching>(to + k, one);
    }
  }
}

// Returns the largest of the lanes' numbers to all of them.
__device__ __forceinline__ int largest_of_lanes(int mine, const Lanes& lanes) {
  if (lanes.num_lanes == warp_size) {  // in most blocks: a mask that is known saves instructions
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(whole_warp, mine);
#else
#pragma unroll
    for (int distance = warp_size / 2; distance > 0; distance /= 2) {
      const int other = __shfl_xor_sync(whole_warp, mine, distance);
      mine = other > mine ? other : mine;
    }
    return mine;
#endif
  }
  for (int distance = lanes.num_lanes / 2; distance > 0; distance /= 2) {
    const int other = __shfl_xor_sync(mask_of(lanes), mine, distance);
    mine = other > mine ? other : mine;
  }
  return mine;
}

// Encodes a lane's numbers, made by `to_store` and all finite, and returns the block's scale. Every
// lane must call it.
__device__ __forceinline__ float encode_lane(int coding, const SlotTables& tables,
                                             const float (&values)[lane_codes], const Lanes& lanes,
                                             unsigned char (&codes)[lane_codes]) {
  float magnitudes[lane_codes];
  // As integers, floats that are not below 0 have the same order.
  int largest = 0;
#pragma unroll
  for (int k = 0; k < lane_codes; ++k) {
    magnitudes[k] = absolute(values[k]);
    int bits;
    memcpy(&bits, &magnitudes[k], sizeof bits);
    largest = bits > largest ? bits : largest;
  }
  largest = largest_of_lanes(largest, lanes);
  float scale;
  memcpy(&scale, &largest, sizeof scale);
  const BlockDivisor divisor(scale > 0 ? scale : 1);
#pragma unroll
  for (int k = 0; k < lane_codes; ++k) {
    const float magnitude = divisor.quotient(magnitudes[k]);
    const int first = tables.first[place_of(magnitude)];
    codes[k] = static_cast<unsigned char>(code_of(coding, tables, first, magnitude, values[k] < 0));
  }
  return scale;
}

// A lane's elements of a variable, and of its slots. All are loaded before anything is computed.
// Every lane of the block must make one: the first lane alone reads and writes scales.
template <class Program>
struct CodedState {
  static_assert(sizeof(RealOf<Program>) == sizeof(float), "codes stand for float");

  VarOf<Program> var[lane_codes];
  float average[Program::num_averages > 0 ? lane_codes : 1];
  unsigned char codes[slot_capacity<Program>][lane_codes];  // as they were loaded
  float scales[slot_capacity<Program>];
  float slots[slot_capacity<Program>][lane_codes];  // once they are updated, as `to_store` has them

  __device__ __forceinline__ CodedState(const CodedTarget<Program>& target, bool is_packed,
                                        const LanePart& part, const Lanes& lanes) {
    load_lane<Caching::normal>(target.var + part.begin, part.count, is_packed, var);
    if constexpr (Program::num_averages > 0) {
      load_lane<Caching::evict_first>(target.average + part.begin, part.count, is_packed, average);
    }
#pragma unroll
    for (int k = Program::num_averages; k < Program::num_slots; ++k) {
      load_lane<Caching::evict_first>(target.codes.of[k] + part.begin, part.count, is_packed,
                                      codes[k]);
      scales[k] = lanes.lane == 0 ? __ldcs(target.scales.of[k] + part.block) : 0;
    }
#pragma unroll
    for (int k = Program::num_averages; k < Program::num_slots; ++k) {
      scales[k] = __shfl_sync(mask_of(lanes), scales[k], 0, lanes.num_lanes);
    }
  }

  // Writes the decoded slots of an element.
  __device__ __forceinline__ void decode_element(const SlotTables* tables, int i,
                                                 float (&slot)[slot_capacity<Program>]) const {
#pragma unroll
    for (int k = Program::num_averages; k < Program::num_slots; ++k) {
      const int coding = coding_of(Program::codings, k - Program::num_averages);
      slot[k] = decode(coding, tables[map_of(coding)], codes[k][i], scales[k]);
    }
  }

  __device__ __forceinline__ void update(const SlotTables* tables,
                                         const float (&gradient)[lane_codes], int count,
                                         const ScalarsOf<Program>& scalars) {
#pragma unroll
    for (int i = 0; i < lane_codes; ++i) {
      float value = static_cast<float>(var[i]);
      float slot[slot_capacity<Program>];
      decode_element(tables, i, slot);
      if constexpr (Program::num_averages > 0) slot[0] = average[i];
      Program::apply(value, gradient[i], slot, scalars);
      var[i] = VarOf<Program>(value);
      Program::follow(static_cast<float>(var[i]), slot, scalars);
      if constexpr (Program::num_averages > 0) average[i] = slot[0];
      // The slots of an element begin anew where one has no code.
      bool has_codes = i < count;
#pragma unroll
      for (int k = Program::num_averages; k < Program::num_slots; ++k)
        has_codes &= is_finite(slot[k]);
#pragma unroll
      for (int k = Program::num_averages; k < Program::num_slots; ++k) {
        // Here, where the root of a square may be one that the rule has computed.
        const int coding = coding_of(Program::codings, k - Program::num_averages);
        slots[k][i] = has_codes ? to_store(coding, slot[k]) : 0;
      }
    }
  }

  // Adds to `sums` what the rule sums over a variable; nothing is changed.
  template <int num_sums>
  __device__ __forceinline__ void add_terms(const SlotTables* tables,
                                            const float (&gradient)[lane_codes], int count,
                                            const ScalarsOf<Program>& scalars,
                                            float (&sums)[num_sums]) const {
#pragma unroll
    for (int i = 0; i < lane_codes; ++i) {
      float slot[slot_capacity<Program>];
      decode_element(tables, i, slot);
      float terms[num_sums];
      Program::terms(static_cast<float>(var[i]), gradient[i], slot, scalars, terms);
#pragma unroll
      for (int k = 0; k < num_sums; ++k) sums[k] += i < count ? terms[k] : 0;
    }
  }

  // Every lane of the block must call it.
  __device__ __forceinline__ void store_to(const CodedTarget<Program>& target, bool is_packed,
                                           const SlotTables* tables, const LanePart& part,
                                           const Lanes& lanes) const {
    store_lane<Caching::normal>(target.var + part.begin, part.count, is_packed, var);
    if constexpr (Program::num_averages > 0) {
      store_lane<Caching::evict_first>(target.average + part.begin, part.count, is_packed, average);
    }
#pragma unroll
    for (int k = Program::num_averages; k < Program::num_slots; ++k) {
      const int coding = coding_of(Program::codings, k - Program::num_averages);
      unsigned char encoded[lane_codes];
      const float scale = encode_lane(coding, tables[map_of(coding)], slots[k], lanes, encoded);
      store_lane<Caching::evict_first>(target.codes.of[k] + part.begin, part.count, is_packed,
                                       encoded);
      if (lanes.lane == 0) __stcs(target.scales.of[k] + part.block, scale);
    }
  }
};

}  // namespace gpuopt
