// Updates of blocks of elements whose slots are in 8 bits, by lanes that share a block: each has
// neighbours in registers, and together they find the block's scale. Codes and scales are those of
// `Coded` in kernels/cpu/codecs.hpp.
#pragma once
#include "lanes.cuh"
#include "slot_codes.cuh"
#include "update.cuh"

namespace gpuopt {

// A program has `Codes`, a `CodesOf`, and `per_block`, how many codes share a scale. Lanes of a
// warp share a block, so it has at most as many.
template <class Program>
constexpr int lanes_of_whole_block = Program::per_block / lane_codes;

// How many blocks a row has; a variable whose blocks do not end at rows is one row.
template <class Program>
__device__ __forceinline__ long long blocks_of_row(long long width) {
  return (width + Program::per_block - 1) / Program::per_block;
}

// How many lanes share a block.
template <class Program>
__device__ __forceinline__ int lanes_of_block(long long width) {
  constexpr int most = lanes_of_whole_block<Program>;
  static_assert(most >= 1 && most <= warp_size && warp_size % most == 0, "a part of a warp");
  return width < Program::per_block ? lanes_per_row((width + lane_codes - 1) / lane_codes) : most;
}

// A thread block's copy of tables, in shared memory: its threads read different entries at once.
template <const SlotTables& tables>
__device__ __forceinline__ SlotTables& shared_copy() {
  __shared__ SlotTables copy;
  return copy;
}

template <const SlotTables& tables>
GPUOPT_INLINE const SlotTables& looked_up() {
  return shared_copy<tables>();
}

template <const SlotTables& tables>
GPUOPT_INLINE void prepare_tables() {
  const unsigned int* from = reinterpret_cast<const unsigned int*>(&tables);
  unsigned int* to = reinterpret_cast<unsigned int*>(&shared_copy<tables>());
  for (int i = threadIdx.x; i < static_cast<int>(sizeof tables / sizeof *to); i += blockDim.x) {
    to[i] = __ldg(&from[i]);
  }
}

// Every thread of a thread block must call it before any of them updates anything.
template <class Program>
__device__ __forceinline__ void prepare_codes() {
  Program::Codes::prepare();
  __syncthreads();
}

// How many arrays an update writes: a variable, an average if there is one, codes and scales, and
// the companion of the variable, if there is one.
template <class Program>
constexpr int num_coded_arrays =
    1 + 2 * Program::num_slots - Program::num_averages + CompanionOf<Program>::num_arrays;

// The addresses of a variable, of its slots' codes, of their scales, and of the companion of the
// variable, passed by value.
template <class Program>
using CodedArraysOf = Arrays<num_coded_arrays<Program>>;

// A variable, its average if the rule moves one, the codes of its slots, their scales, and its
// companion, if there is one.
template <class Program>
struct CodedTarget : Numbered {
  VarOf<Program>* var;
  float* average = nullptr;
  Slots<Program, unsigned char> codes;  // from `Program::num_averages` on
  Slots<Program, float> scales;
  CompanionArray<CompanionOf<Program>> companion;

  // `arrays` holds the addresses of the variable, the average, all codes, all scales, and its
  // companion.
  __device__ __forceinline__ explicit CodedTarget(const long long* arrays)
      : companion(arrays + 1 + 2 * Program::num_slots - Program::num_averages) {
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
    bool aligned = is_pack_aligned(var) & companion.is_aligned();
    if constexpr (Program::num_averages > 0) aligned &= is_pack_aligned(average);
#pragma unroll
    for (int k = Program::num_averages; k < Program::num_slots; ++k) {
      aligned &= reinterpret_cast<unsigned long long>(codes.of[k]) % lane_codes == 0;
    }
    return aligned;
  }
};

// One lane's elements of a block.
struct LanePart {
  long long block;   // the block's number among those of the variable
  long long begin;   // the lane's first element
  long long column;  // the same, in its row
  int count;         // how many elements there are: lane_codes, or less at the block's end

  // `per_block` is the program's.
  __device__ __forceinline__ LanePart(int per_block, long long number, long long row_begin,
                                      long long column_of_block, long long width,
                                      const Lanes& lanes) {
    const long long left = width - column_of_block;
    const int length = left < per_block ? static_cast<int>(left) : per_block;
    const int first = lanes.lane * lane_codes;
    block = number;
    column = column_of_block + first;
    begin = row_begin + column;
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

// Loads a lane's elements; those past the end become 0.
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
      store<caching>(to + first, some);
    }
  } else {
#pragma unroll
    for (int k = 0; k < lane_codes; ++k) {
      const Elements<Element, 1> one = {elements[k]};
      if (k < count) store<caching>(to + k, one);
    }
  }
}

// The weights of a lane's elements.
template <class Program>
struct LaneWeights {
  static constexpr int pack = lane_pack<VarOf<Program>>;

  Weights<Program, pack> packs[lane_codes / pack];

  // Elements past the end become 0.
  __device__ __forceinline__ void load_from(const CodedTarget<Program>& target, bool is_packed,
                                            const LanePart& part) {
    if (is_packed) {
#pragma unroll
      for (int k = 0; k < lane_codes / pack; ++k) packs[k].load_from(target, part.begin + k * pack);
    } else {
#pragma unroll
      for (int i = 0; i < lane_codes; ++i) {
        Weights<Program, 1> one = {};
        if (i < part.count) one.load_from(target, part.begin + i);
        set(i, one.get(0));
      }
    }
  }

  __device__ __forceinline__ float get(int i) const { return packs[i / pack].get(i % pack); }
  __device__ __forceinline__ void set(int i, float value) { packs[i / pack].set(i % pack, value); }

  __device__ __forceinline__ void store_to(const CodedTarget<Program>& target, bool is_packed,
                                           const LanePart& part) const {
    if (is_packed) {
#pragma unroll
      for (int k = 0; k < lane_codes / pack; ++k)
        packs[k].template store_to<true>(target, part.begin + k * pack);
    } else {
#pragma unroll
      for (int i = 0; i < lane_codes; ++i) {
        Weights<Program, 1> one;
        one.set(0, get(i));
        if (i < part.count) one.store_to(target, part.begin + i);
      }
    }
  }
};

// The codes of a lane's elements, four in each word.
using LaneCodes = Elements<unsigned int, lane_codes / 4>;

// Loads codes; those past the end become 0.
__device__ __forceinline__ void load_codes(const unsigned char* from, int count, bool is_packed,
                                           LaneCodes& codes) {
  if (is_packed) {
    load<Caching::evict_first>(reinterpret_cast<const unsigned int*>(from), codes);
  } else {
    codes = {};
#pragma unroll
    for (int k = 0; k < lane_codes; ++k) {
      if (k < count) codes.of[k / 4] |= static_cast<unsigned int>(__ldcs(from + k)) << 8 * (k % 4);
    }
  }
}

__device__ __forceinline__ void store_codes(unsigned char* to, int count, bool is_packed,
                                            const LaneCodes& codes) {
  if (is_packed) {
    store<Caching::evict_first>(reinterpret_cast<unsigned int*>(to), codes);
  } else {
#pragma unroll
    for (int k = 0; k < lane_codes; ++k) {
      if (k < count) __stcs(to + k, static_cast<unsigned char>(codes.of[k / 4] >> 8 * (k % 4)));
    }
  }
}

// Returns the largest of the lanes' numbers to all of them. It is a barrier, too: what one of them
// has loaded before, another may write afterwards.
__device__ __forceinline__ int largest_of_lanes(int mine, const Lanes& lanes) {
  if (lanes.num_lanes == warp_size) {  // in most blocks: a mask that is known saves instructions
    __syncwarp();
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
  __syncwarp(mask_of(lanes));
  for (int distance = lanes.num_lanes / 2; distance > 0; distance /= 2) {
    const int other = __shfl_xor_sync(mask_of(lanes), mine, distance);
    mine = other > mine ? other : mine;
  }
  return mine;
}

// As integers, floats from 0 on have the same order. Finite ones are below this; infinity, NaN and
// numbers below 0 are not.
constexpr unsigned int bits_of_infinity = 0x7f800000u;

// Returns the bits by which a block's scale is found: a magnitude's, where codes have a sign.
__device__ __forceinline__ unsigned int bits_for_scale(bool has_sign, float stored) {
  unsigned int bits;
  memcpy(&bits, &stored, sizeof bits);
  return has_sign ? bits & 0x7fffffffu : bits;
}

// Encodes a lane's numbers of a slot, made by `to_store` and all finite, and returns the block's
// scale. Every lane must call it.
template <class Codes>
__device__ __forceinline__ float encode_lane(int slot, const float (&values)[lane_codes],
                                             unsigned int largest, const Lanes& lanes,
                                             LaneCodes& codes) {
  const int largest_of_all = largest_of_lanes(static_cast<int>(largest), lanes);
  float scale;
  memcpy(&scale, &largest_of_all, sizeof scale);
  scale = Codes::scale(slot, scale);
  const BlockDivisor divisor(scale > 0 ? scale : 1);
#pragma unroll
  for (int first = 0; first < lane_codes; first += 4) {
    int four[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float magnitude = divisor.quotient(absolute(values[first + k]));
      four[k] = Codes::encode(slot, magnitude, values[first + k] < 0);
    }
    // That byte of the first number, and of the second.
    const int bytes = 0x0040 + 0x0011 * Codes::byte_of_code(slot);
    codes.of[first / 4] = __byte_perm(__byte_perm(four[0], four[1], bytes),
                                      __byte_perm(four[2], four[3], bytes), 0x5410);
  }
  return scale;
}

// A lane's elements of a variable, and of its slots. All are loaded before anything is computed.
// Every lane of the block must make one before one of them stores: the first lane writes the scales
// that all read.
template <class Program>
struct CodedState : Numbered {
  using Codes = typename Program::Codes;
  static_assert(sizeof(RealOf<Program>) == sizeof(float), "codes stand for float");
  static constexpr int size = lane_codes;

  int count;  // how many elements there are
  LaneWeights<Program> weights;
  float average[Program::num_averages > 0 ? lane_codes : 1];
  LaneCodes codes[slot_capacity<Program>];  // as they were loaded
  float scales[slot_capacity<Program>];
  float slots[slot_capacity<Program>][lane_codes];  // once they are updated, as `to_store` has them
  unsigned int largest[slot_capacity<Program>];     // of these, by `bits_for_scale`

  __device__ __forceinline__ CodedState(const CodedTarget<Program>& target, bool is_packed,
                                        const LanePart& part)
      : Numbered(target), count(part.count) {
    count_from(part.begin);
#pragma unroll
    for (int k = Program::num_averages; k < Program::num_slots; ++k)
      scales[k] = __ldcs(target.scales.of[k] + part.block);
    if (is_packed) {  // one branch for all arrays
      load_from(target, true, part);
    } else {
      load_from(target, false, part);
    }
  }

  __device__ __forceinline__ void load_from(const CodedTarget<Program>& target, bool is_packed,
                                            const LanePart& part) {
    weights.load_from(target, is_packed, part);
    if constexpr (Program::num_averages > 0) {
      load_lane<Caching::evict_first>(target.average + part.begin, part.count, is_packed, average);
    }
#pragma unroll
    for (int k = Program::num_averages; k < Program::num_slots; ++k)
      load_codes(target.codes.of[k] + part.begin, part.count, is_packed, codes[k]);
  }

  // Whether element `i` is one of the variable's.
  __device__ __forceinline__ bool has(int i) const { return i < count; }

  // Writes the decoded slots of an element.
  __device__ __forceinline__ void get_slots(int i, float* slot) const {
#pragma unroll
    for (int k = Program::num_averages; k < Program::num_slots; ++k) {
      // The byte, with zeros above it.
      const int code = static_cast<int>(__byte_perm(codes[k].of[i / 4], 0, 0x4440 + i % 4));
      slot[k] = Codes::decode(k - Program::num_averages, code, scales[k]);
    }
    if constexpr (Program::num_averages > 0) slot[0] = average[i];
  }

  __device__ __forceinline__ void update(const float (&gradient)[lane_codes],
                                         const ScalarsOf<Program>& scalars) {
    change([&](int i, float& value, float* slot) {
      Program::apply(value, read(i, gradient, slot, scalars), slot, scalars);
      round_stored(i, scalars, value, slot);
      constexpr bool is_cut = drops_bits_of_var<Program>;
      Program::follow(is_cut ? float(VarOf<Program>(value)) : value, slot, scalars);
    });
  }

  // Rounds the variable's element `i` at random, if the program does so.
  __device__ __forceinline__ void round_stored(int i, const ScalarsOf<Program>& scalars,
                                               float& value, float* slot) const {
    if constexpr (Program::is_rounded)
      this->template round<Program, IsRoundedAlike<drops_bits_of_var<Program>, false>>(i, scalars,
                                                                                       value, slot);
  }

  __device__ __forceinline__ float read(int i, const float (&gradient)[lane_codes], float* slot,
                                        const ScalarsOf<Program>& scalars) const {
    return Program::gradient(gradient[i], number(i), slot, scalars);
  }

  // Calls `apply` with the place of each element, its weight and its slots, which it may change.
  template <class Apply>
  __device__ __forceinline__ void change(const Apply& apply) {
#pragma unroll
    for (int i = 0; i < lane_codes; ++i) {
      float value = weights.get(i);
      float slot[slot_capacity<Program>];
      get_slots(i, slot);
      apply(i, value, slot);
      weights.set(i, value);
      if constexpr (Program::num_averages > 0) average[i] = slot[0];
#pragma unroll
      for (int k = Program::num_averages; k < Program::num_slots; ++k) {
        // Here, where the root of a square may be one that the rule has computed.
        const int coded = k - Program::num_averages;
        slots[k][i] = Codes::to_store(coded, slot[k]);
        const unsigned int bits = bits_for_scale(Codes::has_sign(coded), slots[k][i]);
        largest[k] = i > 0 && largest[k] > bits ? largest[k] : bits;
      }
    }
    unsigned int largest_of_all = 0;
#pragma unroll
    for (int k = Program::num_averages; k < Program::num_slots; ++k) {
      if (largest[k] > largest_of_all) largest_of_all = largest[k];
    }
    if ((count < lane_codes) | (largest_of_all >= bits_of_infinity)) begin_anew();
  }

  // Sets the slots of an element to 0 where one is not finite, or there is no element.
  __device__ __forceinline__ void begin_anew() {
#pragma unroll
    for (int k = Program::num_averages; k < Program::num_slots; ++k) largest[k] = 0;
#pragma unroll
    for (int i = 0; i < lane_codes; ++i) {
      bool has_codes = has(i);
#pragma unroll
      for (int k = Program::num_averages; k < Program::num_slots; ++k)
        has_codes &= is_finite(slots[k][i]);
#pragma unroll
      for (int k = Program::num_averages; k < Program::num_slots; ++k) {
        if (!has_codes) slots[k][i] = 0;
        const bool has_sign = Codes::has_sign(k - Program::num_averages);
        const unsigned int bits = bits_for_scale(has_sign, slots[k][i]);
        if (bits > largest[k]) largest[k] = bits;
      }
    }
  }

  // Adds to `sums` what the rule sums over a variable; nothing is changed.
  template <int num_sums>
  __device__ __forceinline__ void add_terms(const float (&gradient)[lane_codes],
                                            const ScalarsOf<Program>& scalars,
                                            float (&sums)[num_sums]) const {
#pragma unroll
    for (int i = 0; i < lane_codes; ++i) {
      float slot[slot_capacity<Program>];
      get_slots(i, slot);
      float terms[num_sums];
      Program::terms(weights.get(i), read(i, gradient, slot, scalars), slot, scalars, terms);
#pragma unroll
      for (int k = 0; k < num_sums; ++k) sums[k] += has(i) ? terms[k] : 0;
    }
  }

  // Every lane of the block must call it.
  __device__ __forceinline__ void store_to(const CodedTarget<Program>& target, bool is_packed,
                                           const LanePart& part, const Lanes& lanes) const {
    if (writes_var<Program>) weights.store_to(target, is_packed, part);
    if constexpr (Program::num_averages > 0) {
      store_lane<Caching::evict_first>(target.average + part.begin, part.count, is_packed, average);
    }
#pragma unroll
    for (int k = Program::num_averages; k < Program::num_slots; ++k) {
      LaneCodes encoded;
      const float scale =
          encode_lane<Codes>(k - Program::num_averages, slots[k], largest[k], lanes, encoded);
      store_codes(target.codes.of[k] + part.begin, part.count, is_packed, encoded);
      if (lanes.lane == 0) __stcs(target.scales.of[k] + part.block, scale);
    }
  }
};

}  // namespace gpuopt
