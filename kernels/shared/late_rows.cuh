// Rows of a table that missed steps make them in registers; see catch_up.cuh.
#pragma once
#include "catch_up.cuh"
#include "grid.cuh"
#include "lanes.cuh"
#include "scalars.cuh"
#include "update.cuh"

namespace gpuopt {

// How rows without a gradient move; see `Unnamed`.
template <class Program>
using UnnamedOf = typename Program::Unnamed;

// Numbers of a table, which stay as long as its rule's scalars do, but for the key of the last step
// that was counted: rows that are brought up after it are rounded by that.
template <class Rule, class Real>
struct LateNumbers {
  Real key[num_key_parts];
  Real tolerance, epsilon;
  typename Rule::template Scalars<Real> scalars;
};
template <class Program>
using LateNumbersOf = LateNumbers<typename UnnamedOf<Program>::Rule, RealOf<Program>>;

template <class Value>
__device__ __forceinline__ Value* array_at(long long address) {
  return reinterpret_cast<Value*>(address);
}

// Where a table has how many steps the row of a key has made.
__device__ __forceinline__ int* last_of(const LateTable& table, long long row) {
  return array_at<int>(table.last) + row;
}

// Returns the power of a slot's decay.
__device__ __forceinline__ double power_of(const LateTable& table, int slot, int exponent) {
  const double* powers = array_at<const double>(table.powers) + slot * num_powers;
  double power = 1;
#pragma unroll 1
  for (; exponent > 0; exponent >>= power_bits, powers += 1 << power_bits) {
    power *= __ldg(powers + (exponent & ((1 << power_bits) - 1)));
  }
  return power;
}

// How many steps were counted. Not by way of the read-only cache: the last block of this launch may
// count one, though after all have read it.
__device__ __forceinline__ int steps_of(const LateTable& table) {
  return static_cast<int>(__ldca(array_at<const long long>(table.now)));
}

// Sums, by packs: element `number` of an array.
struct PackedSums {
  static constexpr int pack = pack_size<double>;
  static constexpr int packs = sizeof(MissedSteps) / pack_bytes;

  __device__ __forceinline__ static double* at(long long address, long long number) {
    return array_at<double>(address) + number * (packs * pack);
  }

  __device__ __forceinline__ static MissedSteps load(long long address, long long number) {
    Elements<double, pack> parts[packs];
#pragma unroll
    for (int i = 0; i < packs; ++i) {
      gpuopt::load<Caching::normal>(at(address, number) + i * pack, parts[i]);
    }
    MissedSteps sums;
    memcpy(&sums, parts, sizeof sums);
    return sums;
  }

  __device__ __forceinline__ static void store(long long address, long long number,
                                               const MissedSteps& sums) {
    Elements<double, pack> parts[packs];
    memcpy(parts, &sums, sizeof sums);
#pragma unroll
    for (int i = 0; i < packs; ++i) {
      gpuopt::store<Caching::normal>(at(address, number) + i * pack, parts[i]);
    }
  }
};

// Returns the sums of a row that has made `last` steps of `now`.
template <class Real>
__device__ __forceinline__ MissedSteps sums_of(const LateTable& table, int last, int now) {
  const Real* steps = array_at<const Real>(table.steps);
  const auto* given = array_at<const OneEarlier>(table.one_earlier);
  const OneEarlier one_earlier = {__ldg(&given->ratio), __ldg(&given->excess),
                                  __ldg(&given->bound)};
  MissedSteps sums = PackedSums::load(table.sums, next_sums(last));
  go_back(sums, last, now, one_earlier, [&](int step) { return __ldg(steps + step); });
  return sums;
}

// Elements of a row while it makes the steps that it has missed, in the type that rules compute in:
// they are encoded once, when they are stored. If another step follows, their weights are the sums
// of two numbers.
template <class Program, int count, bool has_rest>
struct LateElements {
  using Real = RealOf<Program>;

  Real var[count];
  Real rest[has_rest ? count : 1] = {};
  Real slots[slot_capacity<Program>][count];

  // Those that are not the variable's become 0, which does not move.
  template <class State>
  __device__ __forceinline__ explicit LateElements(const State& state) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      var[i] = state.weights.get(i);
      Real slot[slot_capacity<Program>];
      state.get_slots(i, slot);
#pragma unroll
      for (int k = 0; k < Program::num_slots; ++k) slots[k][i] = state.has(i) ? slot[k] : Real(0);
    }
  }

  __device__ __forceinline__ void get(int i, Real* slot) const {
#pragma unroll
    for (int k = 0; k < Program::num_slots; ++k) slot[k] = slots[k][i];
  }

  __device__ __forceinline__ void move(int i, Real value, Real value_rest) {
    if constexpr (has_rest) {
      var[i] = value;
      rest[i] = value_rest;
    } else {
      var[i] = value + value_rest;
    }
  }
};

// Moves the elements of a row for which the sums are close enough; returns bits of those that are
// left. The row has made `last` steps of `now`.
template <class Program, int count, bool has_rest>
__device__ __forceinline__ unsigned int move_by_sums(const LateTable& table, int last, int now,
                                                     LateElements<Program, count, has_rest>& row) {
  using Real = RealOf<Program>;
  using Unnamed = UnnamedOf<Program>;
  const auto* numbers = array_at<const LateNumbersOf<Program>>(table.numbers);
  const MissedSteps missed = sums_of<Real>(table, last, now);
  const Real epsilon = __ldg(&numbers->epsilon);
  const Real tolerance = __ldg(&numbers->tolerance);
  unsigned int left = 0;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    Real var = row.var[i], rest;
    if (moved(missed, row.slots[Unnamed::average][i], row.slots[Unnamed::square][i], epsilon,
              tolerance, var, rest)) {
      row.move(i, var, rest);
    } else {
      left |= 1u << i;
    }
  }
  return left;
}

// Makes the first `made` steps that a row has missed, one by one, with the elements that are left,
// which are added up alone. Their slots only decay after that, over `others` steps.
template <class Program, int count, bool has_rest>
__device__ __forceinline__ void make_steps(const LateTable& table, int last, int made, int others,
                                           unsigned int left,
                                           LateElements<Program, count, has_rest>& row) {
  using Real = RealOf<Program>;
  using Other = typename UnnamedOf<Program>::Rule;
  typename Other::template Scalars<Real> scalars;
  constexpr int num_scalars = sizeof scalars / sizeof(Real);
#pragma unroll
  for (int i = 0; i < num_scalars; ++i) {
    const auto* given = &array_at<const LateNumbersOf<Program>>(table.numbers)->scalars;
    reinterpret_cast<Real*>(&scalars)[i] = __ldg(reinterpret_cast<const Real*>(given) + i);
  }
  const Real* steps = array_at<const Real>(table.steps) + last;
  // Of eight elements beside their own copies, a kernel would need a third more registers.
  constexpr int at_once = count < 4 ? count : 4;
#pragma unroll
  for (int first = 0; first < count; first += at_once) {
    if ((left >> first & ((1u << at_once) - 1)) == 0) continue;
    Real moved[at_once] = {};
    Real slots[at_once][slot_capacity<Other>];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
#pragma unroll
      for (int k = 0; k < Other::num_slots; ++k) slots[i][k] = row.slots[k][first + i];
    }
#pragma unroll 1
    for (int step = 0; step < made; ++step) {
      UnnamedOf<Program>::template set_step_size<Real>(scalars, __ldg(steps + step));
#pragma unroll
      for (int i = 0; i < at_once; ++i) Other::apply(moved[i], Real(0), slots[i], scalars);
    }
#pragma unroll
    for (int k = 0; k < Other::num_slots; ++k) {
      const auto decay = Decay<Real>::of(power_of(table, k, others));
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        if (left >> (first + i) & 1) row.slots[k][first + i] = decay(slots[i][k]);
      }
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (left >> (first + i) & 1) row.move(first + i, row.var[first + i], moved[i]);
    }
  }
}

// A row that may have missed steps, of which a thread has some columns.
template <class Program>
struct LateRow {
  using Real = RealOf<Program>;
  using Unnamed = UnnamedOf<Program>;

  const LateTable& table;
  long long row;
  int last;  // how many steps it has made
  int now;   // how many there were

  // Makes the steps that the row has missed.
  template <int count, bool has_rest>
  __device__ __forceinline__ void bring_up(LateElements<Program, count, has_rest>& row) const {
    constexpr int num_slots = Unnamed::Rule::num_slots;
    static_assert(Program::num_slots == num_slots,
                  "rows with and without a gradient have one form");
    const int gap = now - last;
    if (gap <= 0) return;
    unsigned int left = 0;
    if constexpr (Unnamed::moves) {
      left = (1u << count) - 1;
      if (table.sums != 0) left = move_by_sums(table, last, now, row);
    }
#pragma unroll
    for (int k = 0; k < num_slots; ++k) {
      const auto decay = Decay<Real>::of(power_of(table, k, gap));
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if ((left >> i & 1) == 0) row.slots[k][i] = decay(row.slots[k][i]);
      }
    }
    if constexpr (Unnamed::moves) {
      if (left != 0) {
        const int made = gap < table.window ? gap : static_cast<int>(table.window);
        make_steps(table, last, made, gap - made, left, row);
      }
    }
  }

  // Brings up the row's elements, which are stored next.
  template <class State>
  __device__ __forceinline__ void bring_up(State& state, const ScalarsOf<Program>& scalars) const {
    LateElements<Program, State::size, false> row(state);
    bring_up(row);
    state.change([&](int i, Real& var, Real* slot) {
      if constexpr (Unnamed::moves) var = row.var[i];
      row.get(i, slot);
      state.round_stored(i, scalars, var, slot);
    });
  }

  // Makes a step after those that the row has missed.
  template <class State>
  __device__ __forceinline__ void update(State& state, const Real (&gradient)[State::size],
                                         const ScalarsOf<Program>& scalars) const {
    LateElements<Program, State::size, true> row(state);
    bring_up(row);
    state.change([&](int i, Real& var, Real* slot) {
      row.get(i, slot);
      const Real grad = state.read(i, gradient, slot, scalars);
      if (Unnamed::moves && now > last) {
        var = row.var[i];
        Program::Shift::template apply<Program>(var, row.rest[i], grad, slot, scalars);
      } else {  // as a row of a table that does not catch up
        Program::apply(var, grad, slot, scalars);
      }
      state.round_stored(i, scalars, var, slot);
    });
  }

  // Notes, once all lanes are done, that the row has made `steps`.
  __device__ __forceinline__ void note(int steps, const Lanes& lanes) const {
    __syncwarp(mask_of(lanes));
    if (lanes.lane == 0) store<Caching::normal>(last_of(table, row), Elements<int, 1>{steps});
  }

  // Notes the step that is being made, too.
  __device__ __forceinline__ void note_step(const Lanes& lanes) const { note(now + 1, lanes); }
};

// For `update_rows`: the only table's rows that missed steps, or those of several tables.
template <class Program>
struct LateTables {
  static constexpr bool goes_by_rows = true;

  const LateTable& only;
  const LateTable* __restrict__ every;  // not read if there is one group

  __device__ __forceinline__ const LateTable& table(long long number) const {
    if constexpr (has_groups<Program>) {
      return every[number];
    } else {
      return only;
    }
  }

  // Returns a row with the steps that it has made.
  __device__ __forceinline__ LateRow<Program> row(long long number, long long row) const {
    const LateTable& its_table = table(number);
    Elements<int, 1> last;
    load<Caching::normal>(last_of(its_table, row), last);
    return {its_table, row, last.of[0], steps_of(its_table)};
  }
};

// Counts a step of a table, and adds it to the sums of the steps before it. Every thread of one
// block must call it, and no other one reads the counts meanwhile.
template <class Real>
__device__ __forceinline__ void count_step(const LateTable& table, Real step_size) {
  const long long step = steps_of(table);
  if (table.sums != 0) {
    for (long long at = step / sums_stride - threadIdx.x; at >= 0; at -= blockDim.x) {
      const long long before = step - at * sums_stride;
      if (before >= table.window) break;
      const MissedSteps weight = PackedSums::load(table.weights, table.window - 1 - before);
      MissedSteps sums = PackedSums::load(table.sums, at);
      sums.first += step_size * weight.first;
      sums.second += step_size * weight.second;
      sums.third += step_size * weight.third;
      sums.bound += absolute(step_size) * weight.bound;
      PackedSums::store(table.sums, at, sums);
    }
  }
  __syncthreads();  // all have read `now`
  if (threadIdx.x != 0) return;
  if (table.steps != 0) {
    store<Caching::normal>(array_at<Real>(table.steps) + step, Elements<Real, 1>{step_size});
  }
  store<Caching::normal>(array_at<long long>(table.now), Elements<long long, 1>{step + 1});
}

// Returns scalars for `round_stored`: the key of the last step that was counted, and nothing else.
// `Program::key_scalar` is its place among the rule's scalars; negative if nothing is rounded at
// random.
template <class Program>
__device__ __forceinline__ ScalarsOf<Program> key_of_last_step(const LateTable& table) {
  using Real = RealOf<Program>;
  ScalarsOf<Program> scalars = {};
  if constexpr (Program::key_scalar >= 0) {
    const auto* numbers = array_at<const LateNumbersOf<Program>>(table.numbers);
#pragma unroll
    for (int k = 0; k < num_key_parts; ++k)
      reinterpret_cast<Real*>(&scalars)[Program::key_scalar + k] = __ldg(numbers->key + k);
  }
  return scalars;
}

// Has the last block of a launch count the step of each table, which other rows will make later:
// rows and the counts are written by one launch, so nothing comes between. `Program::step_scalar`
// is the place of the step size among the rule's scalars; negative if rows without a gradient do
// not move. Every thread must call it.
template <class Program>
__device__ __forceinline__ void count_steps(const LateTables<Program>& behind,
                                            const GroupScalars<Program>& every,
                                            long long num_tables, unsigned int* num_done,
                                            const unsigned long long* refused) {
  using Real = RealOf<Program>;
  __syncthreads();  // all have read the counts
  if (!is_last_block(gridDim.x, num_done) || *refused) return;
  for (long long table = 0; table < num_tables; ++table) {
    constexpr int step_scalar = Program::step_scalar;
    const Real step_size = step_scalar < 0 ? Real(0) : every.number(table, step_scalar);
    count_step(behind.table(table), step_size);
    if constexpr (Program::key_scalar >= 0) {
      auto* numbers = array_at<LateNumbersOf<Program>>(behind.table(table).numbers);
      if (threadIdx.x < num_key_parts)
        numbers->key[threadIdx.x] = every.number(table, Program::key_scalar + threadIdx.x);
    }
  }
}

// Returns how many steps a row has made of `now`, and notes that it has made all: of those that
// name a row, the first one moves it, as they would all do the same.
__device__ __forceinline__ int take_late_row(const LateTable& late, long long row, int now,
                                             const Lanes& lanes) {
  int last = now;
  if (lanes.lane == 0) last = atomicMax(last_of(late, row), now);
  return __shfl_sync(mask_of(lanes), last, 0, lanes.num_lanes);
}

}  // namespace gpuopt
