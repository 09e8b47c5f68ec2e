// Depthwise causal convolution (causal_conv1d.hpp has the formulas) and its gradient. A thread
// keeps `count` neighbouring channels, moves them in accesses of `vector` bytes, and walks over
// `thread_tokens` consecutive tokens of all sequences:
//
//      tokens      | t - 3   t - 2   t - 1 |  t   t + 1 | ...
//      window      [ width - 1 inputs      |  unroll loads in flight ]     in registers, as floats
//                                             y[t] = act(bias + sum over j of w[j] window[j])
//
// Tokens of a thread may belong to several sequences. It begins each with the history from the
// sequence's state, zeros, or the rows before its own. The first width - 1 tokens of a sequence are
// all computed by the thread that has the first one, beyond the end of its own if need be. So one
// thread alone reads and writes a state's channels, and a state may be updated in place without
// communication.
//
// With gates a row of x is B, C and the values, [3 channels]: the inputs are B times the values,
// which a state alone rounds, and C multiplies y.
//
// With groups the channels are q, k and v of all heads of k, which x has in blocks, one for each of
// these heads (conv_groups): a thread's channels are neighbours there too.
//
// x [tokens, x_row], y [tokens, channels], w [channels, width], bias [channels] or null; offsets
// [sequences + 1], or null for sequences of `length` tokens; indices, has_state, accepted
// [sequences] or null; states [slots, state_row]. Grid: column_blocks * ceil(tokens /
// (thread_tokens * rows)). Block: `rows` rows of `columns` threads.
#include "common/activation.cuh"
#include "common/bisect.cuh"
#include "common/columns.cuh"
#include "common/vectors.cuh"

namespace fftune {

// Where sequences and states are.
struct conv_sequences {
  const int* offsets;
  const int* indices;
  const u8* has_state;
  const int* accepted;
  i64 tokens, length;
  int sequences, first_slot, slots;

  __device__ __forceinline__ i64 begin_of(int sequence) const {
    if (offsets == nullptr) return sequence * length;
    const i64 offset = offsets[sequence];
    return offset < 0 ? 0 : offset < tokens ? offset : tokens;
  }
  // The first sequence of which a thread has a part whose first token is `token`.
  __device__ __forceinline__ int first_at(i64 token) const {
    if (offsets == nullptr) {
      if (token >> 31 == 0 && length >> 31 == 0)
        return static_cast<int>(static_cast<u32>(token) / static_cast<u32>(length));
      return static_cast<int>(token / length);
    }
    int low = last_before(sequences, [&](int i) { return offsets[i] <= token; });
    while (low > 0 && offsets[low - 1] == token) --low;  // empty ones
    return low;
  }
  // The state's place; negative for padding.
  __device__ __forceinline__ i64 slot_of(int sequence) const {
    if (indices == nullptr) return sequence;
    const int slot = indices[sequence];
    return slot < first_slot || slot >= slots ? -1 : slot;
  }
};

// A thread's part of a sequence: rows from..to of it, of a sequence begin..end.
template <int width>
struct conv_part {
  i64 begin, end, from, to;

  __device__ __forceinline__ conv_part(const conv_sequences& all, int sequence, i64 first,
                                       i64 last) {
    begin = all.begin_of(sequence);
    end = all.begin_of(sequence + 1);
    const i64 shared = begin + (width - 1) < end ? begin + (width - 1) : end;
    from = begin >= first ? begin : shared > first ? shared : first;
    to = end < last ? end : last;
    if (begin >= first && shared > to) to = shared;
  }
};

// One thread's channels of a state.
template <class T, int count, int entries, bool channels_first, bool aligned>
struct conv_state {
  static constexpr int entry_count = entries;
  static constexpr int bytes = count * entries * static_cast<int>(sizeof(T));
  // Channels with their entries behind each other are loaded at once where accesses allow it.
  static constexpr bool whole = channels_first && aligned && bytes % 16 == 0;
  T* first;  // of the thread's first channel
  i64 channels;

  __device__ __forceinline__ void load_entry(int entry, bool valid, u64 policy,
                                             float (&to)[count]) const {
    if constexpr (channels_first) {
#pragma unroll
      for (int c = 0; c < count; ++c) {
        float one[1];
        to_floats(load_once<T, 1>(first + c * entries + entry, valid, policy), one);
        to[c] = one[0];
      }
    } else {
      to_floats(load_once<T, count>(first + entry * channels, valid, policy), to);
    }
  }
  __device__ __forceinline__ void store_entry(int entry, u64 policy,
                                              const float (&from)[count]) const {
    if constexpr (channels_first) {
#pragma unroll
      for (int c = 0; c < count; ++c) {
        const float one[1] = {from[c]};
        store_once(first + c * entries + entry, from_floats<T>(one), policy);
      }
    } else {
      store_once(first + entry * channels, from_floats<T>(from), policy);
    }
  }
  __device__ __forceinline__ void load(bool valid, u64 policy, float (&to)[entries][count]) const {
    if constexpr (whole) {
      float all[count * entries];
      to_floats(load_once<T, count * entries>(first, valid, policy), all);
#pragma unroll
      for (int e = 0; e < entries; ++e) {
#pragma unroll
        for (int c = 0; c < count; ++c) to[e][c] = all[c * entries + e];
      }
    } else {
#pragma unroll
      for (int e = 0; e < entries; ++e) load_entry(e, valid, policy, to[e]);
    }
  }
  __device__ __forceinline__ void store(u64 policy, const float (&from)[entries][count]) const {
    if constexpr (whole) {
      float all[count * entries];
#pragma unroll
      for (int e = 0; e < entries; ++e) {
#pragma unroll
        for (int c = 0; c < count; ++c) all[c * entries + e] = from[e][c];
      }
      store_once(first, from_floats<T>(all), policy);
    } else {
#pragma unroll
      for (int e = 0; e < entries; ++e) store_entry(e, policy, from[e]);
    }
  }
};

template <int rows, int count>
__device__ __forceinline__ void set_zero(float (&values)[rows][count]) {
#pragma unroll
  for (int i = 0; i < rows; ++i) {
#pragma unroll
    for (int c = 0; c < count; ++c) values[i][c] = 0.0f;
  }
}

// The taps of neighbouring channels, [channels, width] in memory.
template <class W, int width, int count>
__device__ __forceinline__ void load_taps(const W* w, i64 column, float (&taps)[width][count]) {
  constexpr int bytes = width * count * static_cast<int>(sizeof(W));
  if constexpr (bytes % 16 == 0) {
    float all[width * count];
    to_floats(load_through_l1<W, width * count>(w + column * width, true), all);
#pragma unroll
    for (int j = 0; j < width; ++j) {
#pragma unroll
      for (int c = 0; c < count; ++c) taps[j][c] = all[c * width + j];
    }
  } else {
#pragma unroll
    for (int j = 0; j < width; ++j) {
#pragma unroll
      for (int c = 0; c < count; ++c) taps[j][c] = to_float(w[(column + c) * width + j]);
    }
  }
}

// The width - 1 rows of x before `from`.
template <int width, int rows, class T, int count>
__device__ __forceinline__ void load_rows_before(const T* x, i64 x_row, i64 from, u64 policy,
                                                 float (&window)[rows][count]) {
#pragma unroll
  for (int i = 0; i < width - 1; ++i) {
    to_floats(load_once<T, count>(x + (from - (width - 1) + i) * x_row, true, policy), window[i]);
  }
}

// One token's inputs of the convolution, as they were loaded.
template <class T, int count, bool gates>
struct conv_input {
  aligned_vector<T, count> values;

  __device__ __forceinline__ void load(const T* row, int, bool valid, u64 policy) {
    values = load_once<T, count>(row, valid, policy);
  }
  __device__ __forceinline__ void to(float (&result)[count]) const { to_floats(values, result); }
};

template <class T, int count>
struct conv_input<T, count, true> {
  aligned_vector<T, count> gate, values;

  __device__ __forceinline__ void load(const T* row, int channels, bool valid, u64 policy) {
    gate = load_once<T, count>(row, valid, policy);
    values = load_once<T, count>(row + 2 * static_cast<i64>(channels), valid, policy);
  }
  __device__ __forceinline__ void to(float (&result)[count]) const {
    float other[count];
    to_floats(gate, result);
    to_floats(values, other);
#pragma unroll
    for (int c = 0; c < count; ++c) result[c] *= other[c];
  }
};

// Where x has a channel: at its own place, or `grouped`, in the block of its head.
struct conv_groups {
  i64 block;         // columns of x from a head to the next
  int keys, values;  // channels of q, and of k, and those of v in a block
  int all_keys;      // channels of q of all heads

  template <bool grouped>
  __device__ __forceinline__ i64 column_of(i64 channel) const {
    if constexpr (!grouped) return channel;
    const int at = static_cast<int>(channel);
    const int part = at < all_keys ? 0 : at < 2 * all_keys ? 1 : 2;
    const int own = at - part * all_keys, count = part == 2 ? values : keys;
    const int head = own / count;
    return head * block + part * keys + (own - head * count);
  }
};

// A thread's channels, and its tokens [first, last). None if it `is_idle`.
template <int count, int columns, int rows>
struct conv_place {
  i64 column, tile, first, last;
  bool is_idle;

  __device__ __forceinline__ conv_place(int column_blocks, int channels, int thread_tokens,
                                        i64 tokens) {
    const u32 across = static_cast<u32>(column_blocks);
    const int thread = static_cast<int>(threadIdx.x);
    column = (static_cast<i64>(blockIdx.x % across) * columns + thread % columns) * count;
    tile = static_cast<i64>(blockIdx.x / across) * rows + thread / columns;
    first = tile * thread_tokens;
    is_idle = column >= channels || first >= tokens;
    last = first + thread_tokens < tokens ? first + thread_tokens : tokens;
  }
};

// Rows [from, to) of a thread's `count` channels.
template <int count, class T>
__device__ __forceinline__ void store_zeros(T* y, int channels, i64 from, i64 to, u64 policy) {
  const float zeros[count] = {};
  for (i64 t = from; t < to; ++t) store_once(y + t * channels, from_floats<T>(zeros), policy);
}

// The sum of a token: that of `at` in the window, behind width - 1 others.
template <int width, int rows, int count>
__device__ __forceinline__ float convolved(const float (&taps)[width][count],
                                           const float (&added)[count],
                                           const float (&window)[rows][count], int at, int c) {
  float sum = added[c];
#pragma unroll
  for (int j = 0; j < width; ++j) sum += taps[j][c] * window[at + j][c];
  return sum;
}

// The gradient of the place whose tokens all have theirs: that of `at` in the window.
template <int width, int rows, int count>
__device__ __forceinline__ void convolve_back(float (&value)[count],
                                              const float (&taps)[width][count],
                                              const float (&gradients)[rows][count], int at) {
#pragma unroll
  for (int c = 0; c < count; ++c) {
    value[c] = 0.0f;
#pragma unroll
    for (int j = 0; j < width; ++j) value[c] += taps[j][c] * gradients[at + (width - 1) - j][c];
  }
}

// The last width - 1 rows become the first.
template <int width, int unroll, int rows, int count>
__device__ __forceinline__ void move_window(float (&window)[rows][count]) {
#pragma unroll
  for (int i = 0; i < width - 1; ++i) {
#pragma unroll
    for (int c = 0; c < count; ++c) window[i][c] = window[i + unroll][c];
  }
}

// The window before the first token of a sequence, and the state behind its last one. With
// `accepted`, the number of tokens of the step before that count: the history is among the entries.
// `counts`: whether the state before does; else it is of zeros.
template <int width, class State, int rows, int count, class LoadToken>
__device__ __forceinline__ void take_accepted(float (&window)[rows][count], const State& before,
                                              const State& after, bool counts, int accepted,
                                              const conv_part<width>& part,
                                              const LoadToken& load_token, u64 policy) {
  constexpr int entries = State::entry_count;
  const i64 length_here = part.end - part.begin;
  constexpr int most = entries - (width - 1);
  const int kept_before = accepted - 1;
  const int from_entry = kept_before < 0 ? 0 : kept_before < most ? kept_before : most;
#pragma unroll
  for (int i = 0; i < width - 1; ++i) {
    before.load_entry(from_entry + i, counts, policy, window[i]);
  }
  if (length_here > 0) {
#pragma unroll
    for (int e = 0; e < entries; ++e) {
      if (e < width - 2) {
        after.store_entry(e, policy, window[e < width - 2 ? e + 1 : 0]);
      } else if (e - (width - 2) < length_here) {
        float value[count];
        load_token(part.begin + e - (width - 2), value);
        after.store_entry(e, policy, value);
      }
    }
  }
}
// Without `accepted` the history is the last entries. `moves`: to another tensor, even if there is
// no token.
template <int width, class State, int rows, int count, class LoadToken>
__device__ __forceinline__ void take_state(float (&window)[rows][count], const State& before,
                                           const State& after, bool counts, bool moves,
                                           const conv_part<width>& part,
                                           const LoadToken& load_token, u64 policy) {
  constexpr int entries = State::entry_count;
  const i64 length_here = part.end - part.begin;
  float kept[entries][count];
  before.load(counts, policy, kept);
#pragma unroll
  for (int i = 0; i < width - 1; ++i) {
#pragma unroll
    for (int c = 0; c < count; ++c) window[i][c] = kept[entries - (width - 1) + i][c];
  }
  const i64 shifts = length_here < entries ? length_here : entries;
  for (i64 t = part.end - shifts; t < part.end; ++t) {
#pragma unroll
    for (int e = 0; e + 1 < entries; ++e) {
#pragma unroll
      for (int c = 0; c < count; ++c) kept[e][c] = kept[e + 1][c];
    }
    load_token(t, kept[entries - 1]);
  }
  if (length_here > 0 || moves) after.store(policy, kept);
}

template <class T, class W, class activation, int width, int entries, bool channels_first,
          bool aligned, bool gates, int vector, int columns, int rows, int unroll,
          bool grouped = false>
__global__ void __launch_bounds__(columns* rows)
    conv_forward(const T* x, const W* w, const W* bias, const int* offsets, const int* indices,
                 const u8* has_state, const int* accepted, T* initial, T* final, T* y, i64 tokens,
                 i64 length, int sequences, int channels, i64 x_row, i64 state_row, int first_slot,
                 int slots, int thread_tokens, int column_blocks, i64 x_block, int x_keys,
                 int x_values, int all_keys) {
  constexpr int count = vector / static_cast<int>(sizeof(T));
  using input = conv_input<T, count, gates>;
  wait_and_launch_dependents();
  const conv_place<count, columns, rows> place(column_blocks, channels, thread_tokens, tokens);
  if (place.is_idle) return;
  const i64 column = place.column, first = place.first, last = place.last;
  const u64 policy = l2_eviction_policy<false>();
  const conv_sequences all{offsets, indices,   has_state,  accepted, tokens,
                           length,  sequences, first_slot, slots};
  x += conv_groups{x_block, x_keys, x_values, all_keys}.column_of<grouped>(column);
  y += column;

  float taps[width][count], added[count] = {};
  load_taps(w, column, taps);
  if (bias != nullptr) to_floats(load_through_l1<W, count>(bias + column, true), added);

  const auto load_token = [&](i64 token, float(&to)[count]) {
    input loaded;
    loaded.load(x + token * x_row, channels, true, policy);
    loaded.to(to);
  };

  int sequence = all.first_at(first);
  for (; sequence < sequences; ++sequence) {
    const conv_part<width> part(all, sequence, first, last);
    if (part.begin >= last && last < tokens) break;  // empty ones may be behind the last token
    const bool is_first = part.begin >= first;
    if (part.from >= part.to && !is_first) continue;
    const i64 slot = all.slot_of(sequence);
    if (slot < 0) {
      store_zeros<count>(y, channels, part.from, part.to, policy);
      continue;
    }

    float window[width - 1 + unroll][count];
    if (!is_first) {
#pragma unroll
      for (int i = 0; i < width - 1; ++i) load_token(part.from - (width - 1) + i, window[i]);
    } else if constexpr (entries > 0) {
      using state_type = conv_state<T, count, entries, channels_first, aligned>;
      const i64 at = slot * state_row + column * (channels_first ? entries : 1);
      const state_type before{initial + at, channels}, after{final + at, channels};
      const bool counts = has_state == nullptr || has_state[sequence] != 0;
      if (accepted != nullptr) {
        take_accepted<width>(window, before, after, counts, accepted[sequence], part, load_token,
                             policy);
      } else {
        take_state<width>(window, before, after, counts, initial != final, part, load_token,
                          policy);
      }
    } else {
      set_zero(window);
    }

    for (i64 t = part.from; t < part.to; t += unroll) {
      input loaded[unroll];
      aligned_vector<T, count> factors[gates ? unroll : 1];
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        const T* const row = x + (t + u) * x_row;
        loaded[u].load(row, channels, t + u < part.to, policy);
        if constexpr (gates) {
          factors[u] = load_once<T, count>(row + channels, t + u < part.to, policy);
        }
      }
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        loaded[u].to(window[width - 1 + u]);
        float value[count];
#pragma unroll
        for (int c = 0; c < count; ++c)
          value[c] = activation::value(convolved(taps, added, window, u, c));
        if constexpr (gates) {
          float factor[count];
          to_floats(factors[u], factor);
#pragma unroll
          for (int c = 0; c < count; ++c) value[c] *= factor[c];
        }
        if (t + u < part.to) store_once(y + (t + u) * channels, from_floats<T>(value), policy);
      }
      move_window<width, unroll>(window);
    }
  }
  if (sequence >= sequences) {
    const i64 behind = all.begin_of(sequences);
    store_zeros<count>(y, channels, behind > first ? behind : first, last, policy);
  }
}

// One token of each sequence, which has a state. Its x, index, taps and bias are loaded side by
// side, then the state: a step waits for memory twice. tokens of conv_forward are sequences here.
template <class T, class W, class activation, int width, int entries, bool channels_first,
          bool aligned, bool gates, int vector, int columns, int rows, bool grouped = false>
__global__ void __launch_bounds__(columns* rows)
    conv_step(const T* x, const W* w, const W* bias, const int* indices, const u8* has_state,
              T* initial, T* final, T* y, int sequences, int channels, i64 x_row, i64 state_row,
              int first_slot, int slots, int thread_tokens, int column_blocks, i64 x_block,
              int x_keys, int x_values, int all_keys) {
  constexpr int count = vector / static_cast<int>(sizeof(T)), behind = entries - (width - 1);
  using state_type = conv_state<T, count, entries, channels_first, aligned>;
  wait_and_launch_dependents();
  const conv_place<count, columns, rows> place(column_blocks, channels, thread_tokens, sequences);
  if (place.is_idle) return;
  const i64 column = place.column;
  const u64 policy = l2_eviction_policy<false>();
  const conv_sequences all{nullptr, indices,   has_state,  nullptr, sequences,
                           1,       sequences, first_slot, slots};
  x += conv_groups{x_block, x_keys, x_values, all_keys}.column_of<grouped>(column);
  float taps[width][count], added[count] = {};
  for (i64 token = place.first; token < place.last; ++token) {
    const int sequence = static_cast<int>(token);
    const T* const row = x + token * x_row;
    const i64 slot = all.slot_of(sequence);
    const bool counts = has_state == nullptr || has_state[sequence] != 0;
    conv_input<T, count, gates> loaded;
    loaded.load(row, channels, true, policy);
    aligned_vector<T, count> loaded_factor;
    if constexpr (gates) loaded_factor = load_once<T, count>(row + channels, true, policy);
    if (token == place.first) {
      load_taps(w, column, taps);
      if (bias != nullptr) to_floats(load_through_l1<W, count>(bias + column, true), added);
    }
    const i64 at = slot * state_row + column * (channels_first ? entries : 1);
    float window[width][count], kept[entries][count];
    state_type{initial + at, channels}.load(slot >= 0 && counts, policy, kept);
#pragma unroll
    for (int i = 0; i < width - 1; ++i) {
#pragma unroll
      for (int c = 0; c < count; ++c) window[i][c] = kept[behind + i][c];
    }
    loaded.to(window[width - 1]);
    float value[count], factor[count];
    if constexpr (gates) to_floats(loaded_factor, factor);
#pragma unroll
    for (int c = 0; c < count; ++c) {
      value[c] = activation::value(convolved(taps, added, window, 0, c));
      if constexpr (gates) value[c] *= factor[c];
      if (slot < 0) value[c] = 0.0f;
    }
    store_once(y + token * channels + column, from_floats<T>(value), policy);
    if (slot < 0) continue;
#pragma unroll
    for (int e = 0; e < entries; ++e) {
#pragma unroll
      for (int c = 0; c < count; ++c)
        kept[e][c] = e + 1 < entries ? kept[e + 1 < entries ? e + 1 : e][c] : window[width - 1][c];
    }
    state_type{final + at, channels}.store(policy, kept);
  }
}

// The window before the first token of a sequence. Entries before the history only move on to the
// final state.
template <int width, class State, int rows, int count>
__device__ __forceinline__ void begin_backward(float (&window)[rows][count], const State& before,
                                               const State& d_after, const State& d_before,
                                               i64 length_here, u64 policy) {
  constexpr int entries = State::entry_count;
#pragma unroll
  for (int i = 0; i < width - 1; ++i) {
    before.load_entry(entries - (width - 1) + i, true, policy, window[i]);
  }
#pragma unroll
  for (int e = 0; e < entries - (width - 1); ++e) {
    float value[count] = {};
    if (e >= length_here) {
      d_after.load_entry(static_cast<int>(e - length_here), true, policy, value);
    }
    d_before.store_entry(e, policy, value);
  }
}

// The final state's part of the gradient `value` of the place `done`, which may be among the
// entries of the initial state.
template <class State, int width, int count>
__device__ __forceinline__ void add_state_gradient(float (&value)[count], const State& d_after,
                                                   const State& d_before,
                                                   const conv_part<width>& part, i64 done,
                                                   bool is_first, u64 policy) {
  constexpr int entries = State::entry_count;
  const i64 length_here = part.end - part.begin;
  // Among the entries of the initial state and the tokens behind them.
  const i64 among = entries + done - part.begin;
  if (among >= length_here && (done >= part.from || is_first)) {
    float more[count];
    d_after.load_entry(static_cast<int>(among - length_here), true, policy, more);
#pragma unroll
    for (int c = 0; c < count; ++c) value[c] += more[c];
  }
  if (is_first && done < part.begin) {
    d_before.store_entry(static_cast<int>(among), policy, value);
  }
}

// As they lie in memory, [count, width].
template <int width, int count>
__device__ __forceinline__ void store_taps(float* to, const float (&d_taps)[width][count]) {
  float sums[width * count];
#pragma unroll
  for (int j = 0; j < width; ++j) {
#pragma unroll
    for (int c = 0; c < count; ++c) sums[c * width + j] = d_taps[j][c];
  }
  store_floats(to, sums);
}

// The gradient. g = dy act'(sum) of the last width - 1 tokens is kept in a second window, so that
// dx[t - (width - 1)] follows with g[t]; a thread goes on for width - 1 tokens behind its own,
// whose dx and whose part of dw other threads have. partial_w [tiles, channels, width] and
// partial_bias [tiles, channels]: sums of each thread, which conv_backward_sum adds up in a fixed
// order.
template <class T, class W, class activation, int width, int entries, bool channels_first,
          bool aligned, bool frozen, int vector, int columns, int rows, int unroll>
__global__ void __launch_bounds__(columns* rows)
    conv_backward(const T* dy, const T* x, const W* w, const W* bias, const int* offsets,
                  T* initial, T* d_final, T* dx, T* d_initial, float* partial_w,
                  float* partial_bias, i64 tokens, i64 length, int sequences, int channels,
                  i64 x_row, i64 state_row, int thread_tokens, int column_blocks) {
  constexpr int count = vector / static_cast<int>(sizeof(T));
  wait_and_launch_dependents();
  const conv_place<count, columns, rows> place(column_blocks, channels, thread_tokens, tokens);
  if (place.is_idle) return;
  const i64 column = place.column, first = place.first, last = place.last;
  const u64 policy = l2_eviction_policy<false>();
  const conv_sequences all{offsets, nullptr, nullptr, nullptr, tokens, length, sequences, 0, 0};
  x += column;
  dy += column;
  dx += column;

  float taps[width][count], added[count] = {};
  load_taps(w, column, taps);
  if (bias != nullptr) to_floats(load_through_l1<W, count>(bias + column, true), added);
  float d_taps[frozen ? 1 : width][count], d_bias[count] = {};
  set_zero(d_taps);

  int sequence = all.first_at(first);
  for (; sequence < sequences; ++sequence) {
    const conv_part<width> part(all, sequence, first, last);
    if (part.begin >= last && last < tokens) break;  // empty ones may be behind the last token
    const bool is_first = part.begin >= first;
    if (part.from >= part.to && (entries == 0 || !is_first)) continue;
    using state_type = conv_state<T, count, entries == 0 ? 1 : entries, channels_first, aligned>;
    const i64 at = sequence * state_row + column * (channels_first ? entries : 1);
    const state_type before{initial + at, channels}, d_after{d_final + at, channels},
        d_before{d_initial + at, channels};
    const i64 length_here = part.end - part.begin;

    float window[width - 1 + unroll][count], gradients[width - 1 + unroll][count];
    set_zero(window);
    set_zero(gradients);
    if (!is_first) {
      load_rows_before<width>(x, x_row, part.from, policy, window);
    } else if constexpr (entries > 0) {
      begin_backward<width>(window, before, d_after, d_before, length_here, policy);
    }

    for (i64 t = part.from; t < part.to + (width - 1); t += unroll) {
      aligned_vector<T, count> loaded[unroll], loaded_gradients[unroll];
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        const bool valid = t + u < part.end && t + u < part.to + (width - 1);
        loaded[u] = load_once<T, count>(x + (t + u) * x_row, valid, policy);
        loaded_gradients[u] = load_once<T, count>(dy + (t + u) * channels, valid, policy);
      }
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        to_floats(loaded[u], window[width - 1 + u]);
        float gradient[count];
        to_floats(loaded_gradients[u], gradient);
        const bool within = t + u < part.end, own = t + u < part.to;
#pragma unroll
        for (int c = 0; c < count; ++c) {
          const float sum = convolved(taps, added, window, u, c);
          float value, slope;
          activation::value_and_slope(sum, value, slope);
          const float g = within ? activation_gradient<activation>(sum, gradient[c], slope) : 0.0f;
          gradients[width - 1 + u][c] = g;
          if constexpr (!frozen) {
            if (own) {
              d_bias[c] += g;
#pragma unroll
              for (int j = 0; j < width; ++j) d_taps[j][c] += g * window[u + j][c];
            }
          }
        }
        // The place whose gradient is complete now.
        const i64 done = t + u - (width - 1);
        float value[count];
        convolve_back(value, taps, gradients, u);
        if (done >= part.to) continue;
        if constexpr (entries > 0)
          add_state_gradient(value, d_after, d_before, part, done, is_first, policy);
        if (done >= part.from) store_once(dx + done * channels, from_floats<T>(value), policy);
      }
      move_window<width, unroll>(window);
      move_window<width, unroll>(gradients);
    }
  }
  if (sequence >= sequences) {
    const i64 behind = all.begin_of(sequences);
    store_zeros<count>(dx, channels, behind > first ? behind : first, last, policy);
  }
  if constexpr (!frozen) {
    store_taps<width>(partial_w + (place.tile * channels + column) * width, d_taps);
    if (partial_bias != nullptr)
      store_floats(partial_bias + place.tile * channels + column, d_bias);
  }
}

template <class W>
__global__ void __launch_bounds__(512)
    conv_backward_sum(const float* partial, W* out, int rows, i64 columns) {
  column_sum(partial, out, rows, columns);
}

}  // namespace fftune
