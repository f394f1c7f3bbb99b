// Updates of arrays that are not all float, in host memory: tile by tile, whose numbers are
// converted, updated and rounded in the first-level cache. Threads call them for different chunks.
// Precondition: all arrays of an update are in different memory.
#pragma once
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include "../shared/rounding.cuh"
#include "stored.hpp"
#include "update.hpp"

namespace gpuopt {

// Elements that are converted at a time.
constexpr long long mixed_tile = 512;

// What is kept beside a variable, in an array of its own: nothing; or, beside a master copy of the
// weights, the weights in a 16-bit type; or, beside bfloat16 weights, the bits that their master
// copy has besides.
struct Alone {
  static constexpr bool is_array = false;
};
template <class Stored>
struct Copied {
  static constexpr bool is_array = true;
};
struct Split {
  static constexpr bool is_array = true;
};

// The floats of a tile: those in memory, where they are stored so, and else copies.
template <class Stored>
struct Tile {
  float numbers[mixed_tile];

  float* read(const Stored* at, long long size) {
    for (long long i = 0; i < size; ++i) numbers[i] = widened(at[i]);
    return numbers;
  }
  void write(Stored* at, long long size) const {
    for (long long i = 0; i < size; ++i) narrow(numbers[i], at[i]);
  }
  // What is stored of a number.
  static float of(float value) {
    Stored stored;
    narrow(value, stored);
    return widened(stored);
  }
};
template <>
struct Tile<float> {
  static float of(float value) { return value; }
  template <class Float>
  Float* read(Float* at, long long) {
    return at;
  }
  void write(float*, long long) const {}
};

// The gradient's: copies, or those in memory. Or zeros, where there is none.
struct Zeros {};
template <class Stored>
struct GradientTile {
  Tile<Stored> tile;

  const float* read(const void* grad, long long at, long long size) {
    return tile.read(static_cast<const Stored*>(grad) + at, size);
  }
};
template <>
struct GradientTile<Zeros> {
  float numbers[mixed_tile] = {};

  const float* read(const void*, long long, long long) const { return numbers; }
};

// Those of a variable, which is written with what is beside it.
template <class Var, class Beside>
struct VariableTile;
template <class Var>
struct VariableTile<Var, Alone> {
  Tile<Var> tile;

  static float of(float value) { return Tile<Var>::of(value); }
  float* read(void* const* var, void* const*, long long at, long long size) {
    return tile.read(static_cast<Var*>(*var) + at, size);
  }
  void write(void* const* var, void* const*, long long at, long long size) const {
    tile.write(static_cast<Var*>(*var) + at, size);
  }
};
template <class Stored>
struct VariableTile<float, Copied<Stored>> {
  static float of(float value) { return value; }
  float* read(void* const* var, void* const*, long long at, long long) {
    return static_cast<float*>(*var) + at;
  }
  void write(void* const* var, void* const* beside, long long at, long long size) const {
    const float* const from = static_cast<const float*>(*var) + at;
    Stored* const to = static_cast<Stored*>(*beside) + at;
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < size; ++i) narrow(from[i], to[i]);
  }
};
template <>
struct VariableTile<Bfloat16, Split> {
  float numbers[mixed_tile];

  static float of(float value) { return value; }
  float* read(void* const* var, void* const* beside, long long at, long long size) {
    const Bfloat16* const weights = static_cast<const Bfloat16*>(*var) + at;
    const std::uint16_t* const rest = static_cast<const std::uint16_t*>(*beside) + at;
    for (long long i = 0; i < size; ++i) numbers[i] = float_of(joined({weights[i].bits, rest[i]}));
    return numbers;
  }
  void write(void* const* var, void* const* beside, long long at, long long size) const {
    Bfloat16* const weights = static_cast<Bfloat16*>(*var) + at;
    std::uint16_t* const rest = static_cast<std::uint16_t*>(*beside) + at;
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < size; ++i) {
      const Halves halves = split(bits_of(numbers[i]));
      weights[i].bits = halves.weight;
      rest[i] = halves.remainder;
    }
  }
};

// Elements of a variable that follow each other, with its slots and what is beside it, and the
// scalars of the variable's group.
template <class Rule, class Beside>
struct MixedChunk {
  void* written[1 + Rule::num_slots + Beside::is_array];
  const void* grad;
  std::intptr_t size;
  std::intptr_t first;  // the number of the first element in its variable
  const typename Rule::template Scalars<float>* scalars;
};

// An update of arrays of certain types: each float, Bfloat16 or Float16; a gradient may be `Zeros`.
template <class Rule, class Var, class Beside, class Gradient, class... Slot>
struct MixedUpdate {
  static_assert(sizeof...(Slot) == Rule::num_slots, "each slot has a type");
  using Scalars = typename Rule::template Scalars<float>;
  using Chunk = MixedChunk<Rule, Beside>;

  // Updates chunks until all are taken. Threads that call it at once share them; `taken` counts for
  // all of them, from 0.
  static void update_chunks(const Chunk* chunks, long long num_chunks, long long* taken) {
    for (long long i; (i = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED)) < num_chunks;) {
      const Chunk& chunk = chunks[i];
      for (long long at = 0; at < chunk.size; at += mixed_tile) {
        const long long left = chunk.size - at;
        update_tile(chunk, at, left < mixed_tile ? left : mixed_tile, *chunk.scalars,
                    std::index_sequence_for<Slot...>{});
      }
    }
  }

 private:
  template <std::size_t... k>
  static void update_tile(const Chunk& chunk, long long at, long long size, Scalars scalars,
                          std::index_sequence<k...>) {
    VariableTile<Var, Beside> variable;
    GradientTile<Gradient> gradient;
    std::tuple<Tile<Slot>...> tiles;
    void* const* const beside = chunk.written + Rule::num_slots + 1;
    float* const var = variable.read(chunk.written, beside, at, size);
    const float* const grad = gradient.read(chunk.grad, at, size);
    const Slots<Rule, float> slots{
        {std::get<k>(tiles).read(static_cast<Slot*>(chunk.written[1 + k]) + at, size)...}};
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < size; ++i)
      update_element<Rule, VariableTile<Var, Beside>>(var, slots, i, grad[i], scalars);
    if constexpr (Rule::is_rounded) round(var, slots, chunk.first + at, size, scalars);
    variable.write(chunk.written, beside, at, size);
    (std::get<k>(tiles).write(static_cast<Slot*>(chunk.written[1 + k]) + at, size), ...);
  }

  // Rounds what is stored in bfloat16, and nowhere else; then an average follows. The rule's own
  // slots are of one type.
  static void round(float* var, const Slots<Rule, float>& slots, long long first, long long size,
                    const Scalars& scalars) {
    constexpr bool is_var_rounded = std::is_same<Var, Bfloat16>::value && !Beside::is_array;
    Numbering<Rule> numbering;
    numbering.count_from(first);
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < size; ++i) {
      float value = var[i];
      float slot[slot_capacity<Rule>];
      for (int k = 0; k < Rule::num_slots; ++k) slot[k] = slots.of[k][i];
      numbering.template round<is_var_rounded>(static_cast<int>(i), scalars, value, slot);
      Rule::follow(VariableTile<Var, Beside>::of(value), slot, scalars);
      if (is_var_rounded) var[i] = value;
      for (int k = 0; k < Rule::num_slots; ++k) slots.of[k][i] = slot[k];
    }
  }
};

}  // namespace gpuopt
