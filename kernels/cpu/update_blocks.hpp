// Updates of variables whose slots are in 8 bits, in host memory: block by block, whose slots are
// decoded, updated and encoded in the first-level cache. Threads call them for different blocks.
// Precondition: the variable, its slots and the gradient share no memory.
#pragma once
#include <cstdint>

#include "../shared/slot_codes.cuh"
#include "update.hpp"

namespace gpuopt {

// Blocks of one length at equal distances, and the scalars of the variable's group.
template <class Rule>
struct CodedChunk {
  float* var;
  const float* grad;
  void* slots[Rule::num_slots];  // codes; the first may be an average, of floats
  float* scales[Rule::num_slots - Rule::num_averages];
  std::intptr_t num_blocks;
  std::intptr_t length;
  std::intptr_t distance;         // in elements
  std::intptr_t scales_distance;  // in scales
  const typename Rule::template Scalars<float>* scalars;
};

// Encodes the numbers of a block, all finite, and returns their scale.
template <int coding>
__attribute__((always_inline)) inline float encode_block(const SlotTables& tables,
                                                         const float* values, long long length,
                                                         unsigned char* codes) {
  float magnitudes[block_codes];
  int places[block_codes];
  // As integers, floats that are not below 0 have the same order, and a vector has their largest.
  int largest = 0;
  for (long long i = 0; i < length; ++i) {
    magnitudes[i] = absolute(to_store(coding, values[i]));
    int bits;
    memcpy(&bits, &magnitudes[i], sizeof bits);
    largest = bits > largest ? bits : largest;
  }
  float scale;
  memcpy(&scale, &largest, sizeof scale);
  const float divisor = scale > 0 ? scale : 1;
  for (long long i = 0; i < length; ++i) {
    magnitudes[i] /= divisor;
    places[i] = place_of(magnitudes[i]);
  }
  for (long long i = 0; i < length; ++i) places[i] = tables.first[places[i]];
  GPUOPT_INDEPENDENT
  for (long long i = 0; i < length; ++i)
    codes[i] = static_cast<unsigned char>(
        code_of(coding, tables, places[i], magnitudes[i], values[i] < 0));
  return scale;
}

template <int codings, int k, class Rule>
__attribute__((always_inline)) inline void decode_slots(const CodedChunk<Rule>& chunk,
                                                        const SlotTables* tables, long long block,
                                                        long long length,
                                                        float (*slots)[block_codes]) {
  if constexpr (k < Rule::num_slots) {
    constexpr int number = k - Rule::num_averages;
    constexpr int coding = coding_of(codings, number);
    const unsigned char* const codes =
        static_cast<const unsigned char*>(chunk.slots[k]) + block * chunk.distance;
    const float scale = chunk.scales[number][block * chunk.scales_distance];
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < length; ++i)
      slots[k][i] = decode(coding, tables[map_of(coding)], codes[i], scale);
    decode_slots<codings, k + 1>(chunk, tables, block, length, slots);
  }
}

template <int codings, int k, class Rule>
__attribute__((always_inline)) inline void encode_slots(const CodedChunk<Rule>& chunk,
                                                        const SlotTables* tables, long long block,
                                                        long long length,
                                                        const float (*slots)[block_codes]) {
  if constexpr (k < Rule::num_slots) {
    constexpr int number = k - Rule::num_averages;
    constexpr int coding = coding_of(codings, number);
    unsigned char* const codes =
        static_cast<unsigned char*>(chunk.slots[k]) + block * chunk.distance;
    chunk.scales[number][block * chunk.scales_distance] =
        encode_block<coding>(tables[map_of(coding)], slots[k], length, codes);
    encode_slots<codings, k + 1>(chunk, tables, block, length, slots);
  }
}

// Inlined: where the compiler knows `length`, it leaves out everything for other lengths.
template <int codings, class Rule>
__attribute__((always_inline)) inline void update_coded_chunk(
    const CodedChunk<Rule>& chunk, long long length, typename Rule::template Scalars<float> scalars,
    const SlotTables* tables) {
  constexpr int first = Rule::num_averages;
  float slots[slot_capacity<Rule>][block_codes];
  for (long long block = 0; block < chunk.num_blocks; ++block) {
    decode_slots<codings, first>(chunk, tables, block, length, slots);
    float* const var = chunk.var + block * chunk.distance;
    const float* const grad = chunk.grad + block * chunk.distance;
    float* average = nullptr;
    if constexpr (Rule::num_averages > 0)
      average = static_cast<float*>(chunk.slots[0]) + block * chunk.distance;
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < length; ++i) {
      float value = var[i];
      float slot[slot_capacity<Rule>];
      for (int k = first; k < Rule::num_slots; ++k) slot[k] = slots[k][i];
      if constexpr (Rule::num_averages > 0) slot[0] = average[i];
      Rule::apply(value, grad[i], slot, scalars);
      Rule::follow(value, slot, scalars);
      if constexpr (Rule::num_averages > 0) average[i] = slot[0];
      var[i] = value;
      // The slots of an element begin anew where one has no code.
      bool all_finite = true;
      for (int k = first; k < Rule::num_slots; ++k) all_finite &= is_finite(slot[k]);
      for (int k = first; k < Rule::num_slots; ++k) slots[k][i] = all_finite ? slot[k] : 0;
    }
    encode_slots<codings, first>(chunk, tables, block, length, slots);
  }
}

// Updates chunks until all are taken. Threads that call it at once share them; `taken` counts for
// all of them, from 0.
template <int codings, class Rule>
void update_coded_chunks(const CodedChunk<Rule>* chunks, long long num_chunks, long long* taken,
                         const SlotTables* tables) {
  for (long long i; (i = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED)) < num_chunks;)
    if (chunks[i].length == block_codes)
      update_coded_chunk<codings>(chunks[i], block_codes, *chunks[i].scalars, tables);
    else
      update_coded_chunk<codings>(chunks[i], chunks[i].length, *chunks[i].scalars, tables);
}

}  // namespace gpuopt
