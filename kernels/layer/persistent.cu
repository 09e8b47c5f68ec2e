// Whole layers in one launch, for up to 8 tokens in decoding: one CTA on each SM, for all layers.
//
// A layer of a few tokens is a stream of weights, interrupted where every CTA needs the results of
// all others. Here the stream does not stop there. One warp of a CTA copies the CTA's share of all
// weights, and of the keys and values, in a fixed order into a pipeline of stages in shared memory,
// and waits only for free stages. The other warps run the MMAs; while they wait for other CTAs the
// pipeline fills.
//
//   warps 0 .. n-1  MMA warps, per layer:
//                     norm of x, q k v = rows of the product        -> qkv      [tokens, rows] f32
//                     heads' norms, rotation; new k, v -> caches; attention over a split of the
//                     keys
//                                                                   -> partial  of each split
//                     splits combined                               -> attended [tokens, q]
//                     output product + x                            -> mid      [tokens, d]
//                     experts: norm of mid, router                  -> logits   [tokens, experts]
//                     norm of mid, gate and up                      -> hidden   [tokens, h]
//                     down + mid                                    -> y        [tokens, d]
//                   and behind the last layer of a whole token:
//                     norm of y, rows of the head, best ids         -> parts    [CTAs, tokens]
//                     CTA 0: the next ids, and the sequences' state
//   warp n          producer: weights, keys and values -> pipeline (full and empty barriers);
//                     with experts it waits for the logits, and chooses those that it copies
//   warp n+1        cleaner: sets the buffers of the layer before to zero
//
// Rows of each product are split evenly among CTAs. Results that all CTAs read go through L2 with
// the flag in the data: a word is the complement of its values, which is never zero, because no
// computed value is a NaN of all ones. Readers poll a word until it is not zero: one round trip, no
// fence and no counter. Layers use three sets of buffers in turn. While a CTA computes gate and up,
// every CTA has finished the layer before, so the cleaner zeroes that layer's set. Its fence, and
// the reads and writes up to the set's next use two layers later, order the zeros before that use.
//
// A product begins with weights that the pipeline already has. Each MMA warp takes its part of the
// first stages to registers before it waits for the activations (`held`), so the pipeline goes on.
//
// Products: mma.sync with 16 rows of weights as A, tokens as the 8 columns of B. The order of k is
// permuted so that a lane reads 16 bytes of a row at once. A stage is 16 rows by `chunk` elements
// of k; each warp takes a part of it.
//
// With ranks the rows of the output product and of down are summands. The thread that has an
// element of the residual stream sends its summand to the thread of the same element on every peer,
// as a packet that holds the value and the number of the exchange, and adds theirs
// (common/peers.cuh). Nothing else changes: the peers' words are one more wait of a thread that
// stores mid or y. The cleaner of the first CTA exchanges greetings.
//
// All CTAs must be resident at the same time, so the launch is cooperative. Grid: config.blocks.
// Block: config.threads(). Shared memory: config.shared_bytes(). Workspace: zeros.
#include "attention/softmax.cuh"
#include "common/activation.cuh"
#include "common/async.cuh"
#include "common/choice.cuh"
#include "common/mma.cuh"
#include "common/peers.cuh"
#include "common/rows.cuh"
#include "common/vectors.cuh"
#include "gemm/decode/packed_stage.cuh"
#include "gemm/head_row.cuh"
#include "layer/next_token.cuh"
#include "layer/persistent.cuh"
#include "layer/persistent_memory.cuh"

namespace fftune {

__device__ __forceinline__ bool has_zero_half(u32 word) {
  return ((word - 0x00010001u) & ~word & 0x80008000u) != 0;
}
__device__ __forceinline__ bool is_missing(const vector16& halves) {
  return has_zero_half(halves.word[0]) || has_zero_half(halves.word[1]) ||
         has_zero_half(halves.word[2]) || has_zero_half(halves.word[3]);
}
__device__ __forceinline__ vector16 complement(vector16 value) {
#pragma unroll
  for (u32& word : value.word) word = ~word;
  return value;
}
template <class T, persistent_config c, class activation, class norm>
struct persistent_layers {
  static_assert(c.in_flight >= 1 && c.in_flight <= c.stages);
  using W = T;  // weights, as they lie in memory: persistent_config::weight_bytes()
  static constexpr int row_stride = c.weight_bytes(c.chunk) + c.row_padding;
  static constexpr int key_bytes = 2 * c.own_kv_rows();
  static constexpr int key_stride = key_bytes + c.row_padding;
  static constexpr int value_stride = key_bytes + c.value_padding;
  static constexpr int rotary_pairs = c.rotary / 64;  // pairs of a head that a lane has
  static constexpr int token_places = c.tokens <= 1 ? 1 : c.tokens <= 2 ? 2 : c.tokens <= 4 ? 4 : 8;
  static constexpr choice_form choice{.draws = c.draws, .sums = c.sums};
  static constexpr float minus_infinity = __builtin_bit_cast(float, 0xff800000u);
  // The score of a key that a query does not see. It is finite with several tokens of a sequence:
  // some of them may see no key of a split, and the weight of that part is then exactly zero.
  static constexpr float unseen = c.per_sequence > 1 ? -1e30f : minus_infinity;

  using dense_params =
      typename choose_type<(c.ranks > 0), persistent_rank_params, persistent_params>::type;
  using network_params =
      typename choose_type<c.has_experts(), persistent_expert_params, dense_params>::type;
  using packed_params = typename choose_type<c.has_experts(), persistent_packed_expert_params,
                                             persistent_packed_params>::type;
  using params = typename choose_type<c.packs(), packed_params, network_params>::type;
  using peers = peer_group<(c.ranks > 0 ? c.ranks : 1)>;
  const params& p;
  const u32 shared;
  static constexpr bool looks_ahead = c.ahead > 0;
  static_assert(!looks_ahead || !c.packs());
  using idle = typename choose_type<looks_ahead, l2_ahead, no_idle>::type;
  stream_pipeline<c.stages, c.barrier_bytes(), c.stage_bytes(), idle> pipeline;
  int sequence, head_group, split, first_key, keys;  // this CTA's part of attention
  // Which of the keys is that of the sequence's first new token, and which one its first query is
  // at. They differ where the new token has no row in the cache. May be < 0.
  int first_new, first_query;
  // Kept across layers, because the cleaner's fences leave nothing in L1.
  int first_part = 0;    // First part of the results of this CTA's keys.
  int parts_of_row = 0;  // Parts of the sequence whose features this thread combines.

  __device__ __forceinline__ persistent_layers(const params& of_launch, u32 at)
      : p(of_launch), shared(at), pipeline{.most_in_flight = c.in_flight, .shared = at} {
    sequence = static_cast<int>(blockIdx.x) / c.splits() / c.head_groups;
    head_group = static_cast<int>(blockIdx.x) / c.splits() % c.head_groups;
    split = static_cast<int>(blockIdx.x) % c.splits();
    keys = first_new = first_query = first_key = 0;
    if (sequence < c.sequences()) {
      const int length = length_of(sequence), each = keys_of_split(length);
      first_key = c.first_seen(length) + split * each;
      keys = larger(0, smaller(each, length - first_key));
      first_new = first_query = length - c.per_sequence - first_key;
      if constexpr (c.has_head()) {
        if (slot_of(sequence) < 0) ++first_new;
      }
    }
  }
  __device__ __forceinline__ int first_token() const { return sequence * c.per_sequence; }
  // Whether the key of the sequence's new token `of` is among this CTA's.
  __device__ __forceinline__ bool has_new(int of) const {
    return first_new + of >= 0 && first_new + of < keys;
  }

  // The keys of a sequence, at most what its cache has room for.
  __device__ __forceinline__ int length_of(int of) const {
    const int length = p.lengths[of];
    if constexpr (c.has_head())
      return goes_on(of) ? larger(length, 0) + 1 : larger(smaller(length, p.cache), 1);
    return larger(0, smaller(length, p.cache));
  }
  static __device__ __forceinline__ int keys_of_split(int length) {
    return c.split_keys(length - c.first_seen(length));
  }
  // For a whole token: whether a sequence has a next id, and the new token's row in the caches or
  // -1.
  __device__ __forceinline__ bool goes_on(int of) const {
    return fftune::goes_on(p.token.ended[of], p.lengths[of], p.cache);
  }
  __device__ __forceinline__ i64 slot_of(int of) const {
    if (!goes_on(of)) return -1;
    const int key = length_of(of) - 1;
    if constexpr (c.page > 0) {
      const int page = p.pages[static_cast<i64>(of) * ceil_div(p.cache, c.page) + key / c.page];
      if (static_cast<u32>(page) >= static_cast<u32>(p.page_count)) return -1;
      return static_cast<i64>(page) * c.page + key % c.page;
    }
    return static_cast<i64>(of) * p.cache + key;
  }
  // The row of x of a token, null for one of zeros. Rows of an embedding have a factor.
  __device__ __forceinline__ const T* row_of_x(int token) const {
    if constexpr (c.has_head()) {
      if (p.token.embedding != nullptr) {
        const int id = p.token.ids[token];
        if (static_cast<u32>(id) >= static_cast<u32>(c.vocab)) return nullptr;
        return static_cast<const T*>(p.token.embedding) + static_cast<i64>(id) * c.d;
      }
    }
    return static_cast<const T*>(p.x) + static_cast<i64>(token) * c.d;
  }
  __device__ __forceinline__ T embedded(float value) const {
    return from_float<T>(value * p.token.embed_scale);
  }
  __device__ __forceinline__ bool chooses() const { return c.has_head() && p.token.chooses != 0; }
  // Where the rows of CTA `block` begin, which are whole units.
  static __device__ __forceinline__ int first_row_of(u32 block, int rows, int unit) {
    const i64 before = static_cast<i64>(ceil_div(rows, unit)) * block / c.blocks;
    return smaller(static_cast<int>(before) * unit, rows);
  }
  static __device__ __forceinline__ int first_row(int rows, int unit) {
    return first_row_of(blockIdx.x, rows, unit);
  }
  static __device__ __forceinline__ int rows_of_block(int rows, int unit) {
    return first_row_of(blockIdx.x + 1, rows, unit) - first_row(rows, unit);
  }
  // The first of a CTA's features between gate and down, and their number; of experts whole blocks.
  static __device__ __forceinline__ int first_hidden() {
    return first_row(c.all_hidden(), c.hidden_unit());
  }
  static __device__ __forceinline__ int hidden_rows() {
    return rows_of_block(c.all_hidden(), c.hidden_unit());
  }
  __device__ __forceinline__ const persistent_layer_pointers& layer_of(int layer) const {
    if constexpr (c.has_experts() || c.packs())
      return p.of[layer].layer;
    else
      return p.of[layer];
  }
  static __device__ __forceinline__ void sync_consumers() { named_barrier_sync(1, c.consumers()); }
  __device__ __forceinline__ u8* set_of(int layer) const {
    return static_cast<u8*>(p.workspace) + layer % c.copies_of_set * c.set_bytes(p.cache);
  }
  // ---- producer ----

  // Block by block of `of_block` rows. Rows from `boundary` on are of `more`.
  struct run {
    const void *from, *more;
    int rows, more_rows;
    int pitch = 0;  // elements from a row to the next; 0: k
  };
  template <class RunOf>
  __device__ __forceinline__ void load_weights(int k, int blocks, int places, const RunOf& run_of) {
    for (int begin = 0; begin < k; begin += c.input_length()) {
      const int end = smaller(k, begin + c.input_length());
      for (int block = 0; block < blocks; ++block) {
        const run of = run_of(block);
        for (int at = begin; at < end; at += c.chunk)
          pipeline.load(static_cast<const u8*>(of.from) + c.weight_bytes(at), of.rows,
                        static_cast<const u8*>(of.more) + c.weight_bytes(at), of.more_rows,
                        places == 0 ? of.rows : places, c.weight_bytes(of.pitch > 0 ? of.pitch : k),
                        c.weight_bytes(smaller(c.chunk, end - at)), row_stride);
      }
    }
  }
  // The same of packed weights, a tile of 16 rows after the other; from the element `first` of k
  // on.
  struct packed_run {
    packed_matrix of;
    i64 tile;
    int first = 0;
  };
  template <packed_form format, class RunOf>
  __device__ __forceinline__ void load_packed(int k, int tiles, const RunOf& run_of) {
    constexpr packed_stage_shape shape = c.packed_stage(format);
    for (int begin = 0; begin < k; begin += c.input_length()) {
      const int end = smaller(k, begin + c.input_length());
      for (int tile = 0; tile < tiles; ++tile) {
        const packed_run of = run_of(tile);
        for (int at = begin; at < end; at += shape.k())
          load_packed_stage<shape>(pipeline, of.of, of.tile, of.first + at,
                                   of.first + smaller(end, at + shape.k()));
      }
    }
  }
  using packed = persistent_packed_pointers;
  // A packed weight of a layer, whose codes are at `codes`.
  __device__ __forceinline__ packed_matrix packed_of(int layer, int which, const void* codes,
                                                     int k) const {
    const packed& of = p.of[layer].packed;
    return {static_cast<const u8*>(codes), static_cast<const u8*>(of.scales[which]),
            of.zeros[which], k};
  }
  static __device__ __forceinline__ const void* row_at(const void* matrix, i64 row, int k) {
    return static_cast<const W*>(matrix) + row * (k / stream_type<W>::packed);
  }

  __device__ __forceinline__ void load_keys(const persistent_layer_pointers& of) {
    const int there = larger(0, smaller(keys, first_new));
    const auto page_of = [&](int key) {
      return p.pages[static_cast<i64>(sequence) * ceil_div(p.cache, c.page) + key / c.page];
    };
    [[maybe_unused]] int next_page = 0;
    if constexpr (c.page > 0) {
      if (keys > 0) next_page = page_of(first_key);
    }
    for (int block = 0; block < keys; block += 16) {
      const int rows = smaller(16, there - block), key = first_key + block;
      i64 row = static_cast<i64>(sequence) * p.cache + key;
      if constexpr (c.page > 0) {
        const int page = next_page;
        if (block + 16 < keys) next_page = page_of(key + 16);
        if (static_cast<u32>(page) >= static_cast<u32>(p.page_count)) {
          pipeline.load_zeros(rows, key_bytes, key_stride);
          pipeline.load_zeros(rows, key_bytes, value_stride);
          continue;
        }
        row = static_cast<i64>(page) * c.page + key % c.page;
      }
      const i64 at = row * c.cache_row() + head_group * c.own_kv_heads() * c.kv_head;
      const auto load = [&](const void* cache, u32 stride) {
        const auto* const from = reinterpret_cast<const u8*>(static_cast<const T*>(cache) + at);
        if constexpr (c.kv_head == c.dim)
          pipeline.load(from, rows, nullptr, 0, 0, 2 * c.cache_row(), key_bytes, stride);
        else
          pipeline.load_pieces(from, rows, 2 * c.cache_row(), c.own_kv_heads(), 2 * c.kv_head,
                               2 * c.dim, stride);
      };
      load(of.keys, key_stride);
      load(of.values, value_stride);
    }
  }

  __device__ __forceinline__ void produce() {
    const int qkv = first_row(c.qkv_rows(), c.attention_unit()),
              qkv_rows = rows_of_block(c.qkv_rows(), c.attention_unit());
    const int out = first_row(c.d, c.attention_unit()),
              out_rows = rows_of_block(c.d, c.attention_unit());
    const int down = first_row(c.d, c.down_unit()), down_rows = rows_of_block(c.d, c.down_unit());
    const int hidden = first_hidden(), of_hidden = hidden_rows();
    for (int layer = 0; layer < p.layers; ++layer) {
      const persistent_layer_pointers& of = layer_of(layer);
      if constexpr (c.packs_attention) {
        load_tiles(packed_of(layer, packed::qkv, of.qkv[0], c.d), qkv, qkv_rows);
      } else {
        load_weights(c.d, ceil_div(qkv_rows, 16), 0, [&](int block) {
          const int first = qkv + block * 16, rows = smaller(16, qkv_rows - block * 16);
          if constexpr (c.packed_qkv) return run{row_at(of.qkv[0], first, c.d), nullptr, rows, 0};
          const int part = part_of(first), next = first_of(part + 1);
          const int own = smaller(rows, next - first);
          return run{row_at(of.qkv[part], first - first_of(part), c.d),
                     part < 2 ? of.qkv[part + 1] : nullptr, own, rows - own};
        });
      }
      // Four exchanges between CTAs follow, and the pipeline is full before them.
      pipeline.most_in_flight = c.attention_in_flight;
      if constexpr (looks_ahead && c.has_experts())
        look_at_next(layer + 1, qkv, qkv_rows, out, out_rows);
      else if constexpr (looks_ahead)
        look_at_network(of);
      load_keys(of);
      const auto rows_of = [](const void* matrix, int k, int first, int rows) {
        return [=](int block) {
          return run{row_at(matrix, first + block * 16, k), nullptr, smaller(16, rows - block * 16),
                     0};
        };
      };
      if constexpr (c.packs_attention)
        load_tiles(packed_of(layer, packed::out, of.out, c.q_rows()), out, out_rows);
      else
        load_weights(c.q_rows(), ceil_div(out_rows, 16), 0,
                     rows_of(of.out, c.q_rows(), out, out_rows));
      if constexpr (c.has_experts()) {
        const persistent_router_pointers& router = p.of[layer].router;
        const int first_logit = first_row(c.router_rows(), 1),
                  rows = rows_of_block(c.router_rows(), 1);
        load_weights(c.d, rows > 0 ? 1 : 0, 0, [&](int) {
          const int of_experts = larger(0, smaller(rows, c.experts - first_logit));
          return run{row_at(router.weights, first_logit, c.d), router.own_weight, of_experts,
                     rows - of_experts};
        });
        route(static_cast<const float*>(router.choice_bias), layer);
        if constexpr (c.packs_network) {
          load_packed_experts(of, layer, router);
          continue;
        }
        pipeline.most_in_flight = c.in_flight;
        const i64 stride = static_cast<i64>(c.packed_gate_up ? 2 : 1) * c.h;
        load_weights(c.d, of_hidden / 8, 8, [&](int block) {
          const int first = hidden + block * 8, expert = expert_of(first / c.h);
          if (c.own > 0 && expert >= all_experts) {
            const i64 row = static_cast<i64>(expert - all_experts) * c.h + first % c.h;
            return run{row_at(router.own_gate, row, c.d), row_at(router.own_up, row, c.d), 8, 8};
          }
          if (c.interleaved)
            return run{row_at(of.gate, 2 * (static_cast<i64>(expert) * c.h + first % c.h), c.d),
                       nullptr, 16, 0};
          const i64 row = expert * stride + first % c.h;
          return run{row_at(of.gate, row, c.d),
                     c.packed_gate_up ? row_at(of.gate, row + c.h, c.d) : row_at(of.up, row, c.d),
                     8, 8};
        });
        for (int block = 0; block < ceil_div(down_rows, 16); ++block)
          for (int slot = 0; slot < c.slots(); ++slot)
            load_weights(c.h, 1, 0, [&](int) {
              const int expert = expert_of(slot), rows = smaller(16, down_rows - block * 16);
              if (c.own > 0 && expert >= all_experts)
                return run{
                    static_cast<const W*>(row_at(router.own_down, down + block * 16, c.own * c.h)) +
                        (expert - all_experts) * c.h / stream_type<W>::packed,
                    nullptr, rows, 0, c.own * c.h};
              return run{row_at(of.down, static_cast<i64>(expert) * c.d + down + block * 16, c.h),
                         nullptr, rows, 0};
            });
        continue;
      }
      if constexpr (c.packs_network) {
        load_packed<c.format>(c.d, of_hidden / 8, [&](int block) {
          if (block > 1) pipeline.most_in_flight = c.in_flight;
          const i64 tile = hidden / 16 + block / 2;
          return block % 2 == 0 ? packed_run{packed_of(layer, packed::gate, of.gate, c.d), tile}
                                : packed_run{packed_of(layer, packed::up, of.up, c.d), tile};
        });
        pipeline.most_in_flight = c.in_flight;
        load_tiles(packed_of(layer, packed::down, of.down, c.h), down, down_rows);
        continue;
      }
      const auto gate_up = [&](int block) {
        const int first = hidden + block * 8, rows = smaller(8, of_hidden - block * 8);
        if (block > 0) pipeline.most_in_flight = c.in_flight;
        if constexpr (looks_ahead) look_from(block * 8);
        return run{row_at(of.gate, first, c.d), row_at(of.up, first, c.d), rows, rows};
      };
      load_weights(c.d, ceil_div(of_hidden, 8), 8, gate_up);
      pipeline.most_in_flight = c.in_flight;
      load_weights(c.h, ceil_div(down_rows, 16), 0, rows_of(of.down, c.h, down, down_rows));
    }
    if constexpr (c.has_head()) {
      if (!chooses()) return;
      const int first = first_row(c.vocab, c.head_unit()),
                rows = rows_of_block(c.vocab, c.head_unit());
      if constexpr (c.packs_head)
        load_packed<c.head_format>(c.d, ceil_div(rows, 16), [&](int tile) {
          return packed_run{{static_cast<const u8*>(p.token.head),
                             static_cast<const u8*>(p.token.head_scales), p.token.head_zeros, c.d},
                            first / 16 + tile};
        });
      else
        load_weights(c.d, ceil_div(rows, 16), 0, [&](int block) {
          return run{row_at(p.token.head, first + block * 16, c.d), nullptr,
                     smaller(16, rows - block * 16), 0};
        });
    }
  }

  // L2 takes gate and up of this CTA.
  __device__ __forceinline__ void look_at_network(const persistent_layer_pointers& of) {
    pipeline.idle.first = static_cast<const u8*>(row_at(of.gate, first_hidden(), c.d));
    pipeline.idle.second = static_cast<const u8*>(row_at(of.up, first_hidden(), c.d));
    look_from(0);
  }
  // The same from row `row` on, where the stream is.
  __device__ __forceinline__ void look_from(int row) {
    const int begin = row * c.weight_bytes(c.d), end = hidden_rows() * c.weight_bytes(c.d);
    l2_ahead& to = pipeline.idle;
    to.at = row == 0 ? 0 : larger(to.at, begin);
    to.first_end = to.second_end = smaller(end, begin + c.ahead);
  }
  // The experts are not known before the router: L2 takes what the next layer begins with.
  __device__ __forceinline__ void look_at_next(int layer, int qkv, int qkv_rows, int out,
                                               int out_rows) {
    l2_ahead& to = pipeline.idle;
    to = {};
    if (layer == p.layers) return;
    const persistent_layer_pointers& next = layer_of(layer);
    const int part = c.packed_qkv ? 0 : part_of(qkv);
    const int end = c.packed_qkv ? c.qkv_rows() : first_of(part + 1);
    const auto limit = [](int rows, int k) { return smaller(rows * c.weight_bytes(k), c.ahead); };
    to.first = static_cast<const u8*>(row_at(next.qkv[part], qkv - first_of(part), c.d));
    to.first_end = limit(smaller(qkv_rows, end - qkv), c.d);
    to.second = static_cast<const u8*>(row_at(next.out, out, c.q_rows()));
    to.second_end = limit(out_rows, c.q_rows());
  }

  // A CTA's tiles of a packed weight, `rows` rows from `first` on.
  __device__ __forceinline__ void load_tiles(const packed_matrix& of, int first, int rows) {
    load_packed<c.format>(of.k, rows / 16, [&](int tile) {
      return packed_run{of, first / 16 + tile};
    });
  }

  // Tiles of gate and up in turn, then those of down of each slot.
  __device__ __forceinline__ void load_packed_experts(const persistent_layer_pointers& of,
                                                      int layer,
                                                      const persistent_router_pointers& router) {
    const int hidden = first_hidden();
    const auto is_own = [](int expert) { return c.own > 0 && expert >= all_experts; };
    pipeline.most_in_flight = c.in_flight_of(c.d);
    load_packed<c.format>(c.d, hidden_rows() / 8, [&](int block) {
      const int first = hidden + block / 2 * 16, expert = expert_of(first / c.h);
      const bool own = is_own(expert), up = block % 2 != 0;
      const void* const codes =
          own ? (up ? router.own_up : router.own_gate) : (up ? of.up : of.gate);
      const int which = (own ? packed::own_gate : packed::gate) + (up ? 1 : 0);
      const i64 part = own ? expert - all_experts : expert;
      return packed_run{packed_of(layer, which, codes, c.d), (part * c.h + first % c.h) / 16};
    });
    pipeline.most_in_flight = c.in_flight_of(c.h);
    const int down = first_row(c.d, c.down_unit()) / 16;
    const int tiles = rows_of_block(c.d, c.down_unit()) / 16;
    for (int tile = 0; tile < tiles; ++tile)
      for (int slot = 0; slot < c.slots(); ++slot)
        load_packed<c.format>(c.h, 1, [&](int) {
          const int expert = expert_of(slot);
          if (is_own(expert))
            return packed_run{packed_of(layer, packed::own_down, router.own_down, c.own * c.h),
                              down + tile, (expert - all_experts) * c.h};
          return packed_run{packed_of(layer, packed::down, of.down, c.h),
                            static_cast<i64>(expert) * (c.d / 16) + down + tile};
        });
    pipeline.most_in_flight = c.in_flight;
  }

  // Experts of the weights; behind them parts of the network of all tokens are numbered.
  static constexpr int all_experts = c.experts + c.shared;
  // The choice of each slot, which the producer has made: experts and weights are in shared memory.
  __device__ __forceinline__ int expert_of(int slot) const {
    return read_int(shared + c.choices_at() + slot * 4);
  }
  // Waits for the logits of each token, and chooses its experts (moe_route/moe_route.hpp). A lane
  // has the logits of experts lane, lane + 32 and so on; of equal ones the first is chosen.
  __device__ __forceinline__ void route(const float* choice_bias, int layer) {
    constexpr int each = ceil_div(c.experts, 32);
    const int lane = threadIdx.x % 32;
    const float* const logits =
        reinterpret_cast<const float*>(set_of(layer) + c.router_at(p.cache));
#pragma unroll 1
    for (int token = 0; token < c.tokens; ++token) {
      u32 raw[each];
      bool missing;
      int spins = 0;
#pragma unroll
      for (int i = 0; i < each; ++i) raw[i] = i * 32 + lane < c.experts ? 0 : 1;
      do {
        missing = false;
#pragma unroll
        for (int i = 0; i < each; ++i)
          if (raw[i] == 0)
            raw[i] = load_relaxed_word(logits + token * c.router_rows() + i * 32 + lane);
#pragma unroll
        for (int i = 0; i < each; ++i) missing = missing || raw[i] == 0;
        if constexpr (looks_ahead) {
          missing = __any_sync(~0u, missing);
          if (missing) pipeline.idle();
        }
        count_spin(spins);
      } while (missing);
      __syncwarp();
      float score[each];
      u32 rank[each];  // 0: none, or chosen
      float largest = minus_infinity, sum = 0;
#pragma unroll
      for (int i = 0; i < each; ++i) {
        score[i] = i * 32 + lane < c.experts ? __uint_as_float(~raw[i]) : minus_infinity;
        largest = fmaxf(largest, score[i]);
      }
      largest = warp_largest(largest);
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const bool exists = i * 32 + lane < c.experts;
        float by = score[i];
        if constexpr (c.score == persistent_score::sigmoid) {
          score[i] = 1 / (1 + __expf(-score[i]));
          by = score[i];
        } else if constexpr (c.score == persistent_score::softmax_of_all) {
          score[i] = exists ? __expf(score[i] - largest) : 0;
          sum += score[i];
        }
        if (c.choice_bias && exists) {
          if (c.score == persistent_score::softmax_of_all) by = score[i];
          by += choice_bias[i * 32 + lane];
        }
        rank[i] = exists ? order_of(by) : 0;
      }
      if constexpr (c.score == persistent_score::softmax_of_all) {
        sum = 1 / warp_total(sum);
#pragma unroll
        for (int i = 0; i < each; ++i) score[i] *= sum;
      }
      // Lane i has choice i.
      int expert = c.experts + lane - c.choices;  // of shared ones
      float weight = 1;
#pragma unroll 1
      for (int choice = 0; choice < c.choices; ++choice) {
        u32 own = 0;
#pragma unroll
        for (int i = 0; i < each; ++i) own = rank[i] > own ? rank[i] : own;
        const u32 best = largest_of_warp(own);
        int first = c.experts;
#pragma unroll
        for (int i = each - 1; i >= 0; --i)
          if (rank[i] == best) first = i * 32 + lane;
        first = static_cast<int>(smallest_of_warp(static_cast<u32>(first)));
        float value = 0;
#pragma unroll
        for (int i = 0; i < each; ++i)
          if (i * 32 + lane == first) {
            rank[i] = 0;
            value = score[i];
          }
        value = __shfl_sync(~0u, value, first % 32);
        if (lane == choice) {
          expert = first;
          weight = value;
        }
      }
      const bool is_choice = lane < c.choices;
      if constexpr (c.score == persistent_score::softmax_of_chosen) {
        const float most = warp_largest(is_choice ? weight : minus_infinity);
        if (is_choice) weight = __expf(weight - most);
      }
      if constexpr (c.renormalises || c.score == persistent_score::softmax_of_chosen) {
        const float added = c.score == persistent_score::sigmoid ? 1e-20f : 0;
        const float all = warp_total(is_choice ? weight : 0) + added;
        if (is_choice) weight /= all;
      }
      if (is_choice) weight *= p.route_scale;
      if constexpr (c.own_gate) {
        u32 word;
        int waits = 0;
        do {
          word = load_relaxed_word(logits + token * c.router_rows() + c.experts);
          count_spin(waits);
        } while (word == 0);
        if (lane >= c.choices + c.shared) weight = 1 / (1 + __expf(-__uint_as_float(~word)));
      }
      if (lane < c.of_token()) {
        const int slot = token * c.of_token() + lane;
        write_int(shared + c.choices_at() + slot * 4, expert);
        write_float(shared + c.weights_at() + slot * 4, weight);
      }
    }
    __syncwarp();
  }

  static __device__ __forceinline__ int part_of(int n) {
    return n < c.q_rows() ? 0 : n < c.q_rows() + c.kv_rows() ? 1 : 2;
  }
  static __device__ __forceinline__ int first_of(int part) {
    return part == 0 ? 0 : c.q_rows() + (part - 1) * c.kv_rows();
  }

  // ---- cleaner ----

  struct no_group {};
  // The group as a thread sees it, with room for the packets of an exchange.
  __device__ __forceinline__ auto group_of_launch() const {
    if constexpr (c.ranks > 0) {
      peers group(p.table, p.loopback, p.tag);
      group.require_room(c.tokens * c.d * u64{8}, group.packet_bytes);
      return group;
    } else {
      return no_group{};
    }
  }

  __device__ __forceinline__ void clean() {
    if constexpr (c.ranks > 0) {
      auto group = group_of_launch();
      if (blockIdx.x == 0) group.greet(static_cast<int>(threadIdx.x % 32));
    }
    const i64 vectors = c.set_bytes(p.cache) / 16;
    for (int layer = 0; layer < p.layers; ++layer) {
      named_barrier_sync(2, c.consumers() + 32);  // mid is there: all are past the layer before
      if (layer > 0) {
        u8* const set = set_of(layer - 1);
        const i64 end = vectors * (blockIdx.x + 1) / c.blocks;
        for (i64 at = vectors * blockIdx.x / c.blocks + threadIdx.x % 32; at < end; at += 32)
          store(set + at * 16, vector16{});
        __threadfence();
      }
      named_barrier_arrive(3, c.consumers() + 32);
    }
  }

  // ---- MMA warps ----

  // Starts to copy the weights of a norm for load_input(), and of the post-norm before it.
  __device__ __forceinline__ void fetch_norms(const void* weights, const void* post) const {
    const auto fetch = [&](int to, const void* from) {
#pragma unroll 1
      for (int at = threadIdx.x; at < c.d / 8; at += c.consumers())
        copy_async(shared + to + at * 16, static_cast<const u8*>(from) + at * 16, true);
    };
    if (weights != nullptr) fetch(c.norm_at(), weights);
    if (c.post_norms && post != nullptr) fetch(c.post_norm_at(), post);
    copy_async_commit();
  }

  // A token's root mean square from what each of its threads has of it, reciprocal. All MMA warps.
  template <int lanes, int count>
  __device__ __forceinline__ float deviation_of(const vector16 (&value)[count], int vectors) const {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (i * lanes >= vectors) continue;
#pragma unroll
      for (const u32 word : value[i].word) {
        float first, second;
        unpack<T>(word, first, second);
        squares += first * first + second * second;
      }
    }
    __syncwarp();
    squares = warp_total(squares);
    const u32 statistics = shared + c.statistics_at();
    if (threadIdx.x % 32 == 0) write_float(statistics + threadIdx.x / 32 * 4, squares);
    copy_async_wait<0>();  // the norm's weights
    sync_consumers();
    constexpr int warps_of_token = lanes / 32;
    const int row = threadIdx.x / lanes;
    float sum = 0;
    if (row < c.tokens) {
#pragma unroll
      for (int i = 0; i < warps_of_token; ++i)
        sum += read_float(statistics + (row * warps_of_token + i) * 4);
    }
    return reciprocal_deviation(sum, c.d, p.epsilon);
  }
  static __device__ __forceinline__ void normalise(vector16& value, float r,
                                                   const vector16& weight) {
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      float first, second, first_weight, second_weight;
      unpack<T>(value.word[word], first, second);
      unpack<T>(weight.word[word], first_weight, second_weight);
      first *= r, second *= r;
      // Both in one instruction, where normalised() rounds to T.
      if constexpr (is_same<norm, llama_norm>) unpack<T>(pack<T>(first, second), first, second);
      value.word[word] =
          pack<T>(first * norm::factor(first_weight), second * norm::factor(second_weight));
    }
  }

  // Elements `begin` to `end` of the rows of `from` [tokens, k] to shared memory, normalised on the
  // way or not. Unless they are plain, they are waited for. With `ends` they go to y instead.
  __device__ __forceinline__ void load_input(const T* from, int k, int begin, int end,
                                             bool normalises, bool plain, bool ends = false) {
    constexpr int lanes = c.consumers() / token_places;
    constexpr int each = ceil_div(c.input_length() / 8, lanes);
    const int row = threadIdx.x / lanes, place = threadIdx.x % lanes;
    const int vectors = row < c.tokens ? (end - begin) / 8 - place : 0;
    const T* row_at_x = from + static_cast<i64>(row) * k;
    if constexpr (c.has_head()) {
      if (plain && row < c.tokens) row_at_x = row_of_x(row);
    }
    const T* const at = row_at_x + begin + place * 8;
    vector16 value[each];
#pragma unroll
    for (int i = 0; i < each; ++i) {
      value[i] = {~0u, ~0u, ~0u, ~0u};
      if (i * lanes < vectors) value[i] = {};
    }
    int spins = 0;
    bool missing;
    do {
#pragma unroll
      for (int i = 0; i < each; ++i)
        if (i * lanes < vectors && is_missing(value[i]) && (!c.has_head() || row_at_x != nullptr))
          value[i] = load_relaxed(at + i * lanes * 8);
      missing = false;
#pragma unroll
      for (int i = 0; i < each; ++i) missing = missing || is_missing(value[i]);
      count_spin(spins);
    } while (missing && !plain);
    __syncwarp();
    if (!plain) {
#pragma unroll
      for (int i = 0; i < each; ++i) value[i] = complement(value[i]);
    } else if constexpr (c.has_head()) {
#pragma unroll
      for (int i = 0; i < each; ++i) {
        if (i * lanes >= vectors) continue;
#pragma unroll
        for (u32& word : value[i].word) {
          float first, second;
          unpack<T>(word, first, second);
          word = pack<T>(first * p.token.embed_scale, second * p.token.embed_scale);
        }
      }
    }
    if constexpr (c.post_norms) {
      if (normalises) add_to_residual<lanes>(value, row, place, vectors, plain);
      if (ends) {
#pragma unroll
        for (int i = 0; i < each; ++i)
          if (i * lanes < vectors && (place + i * lanes) % c.blocks == static_cast<int>(blockIdx.x))
            store(static_cast<T*>(p.y) + static_cast<i64>(row) * k + (place + i * lanes) * 8,
                  value[i]);
        return;
      }
    }
    float r = 0;
    if (normalises) r = deviation_of<lanes>(value, vectors);
#pragma unroll
    for (int i = 0; i < each; ++i) {
      if (i * lanes >= vectors) continue;
      const u32 at = (place + i * lanes) * 16;
      if (normalises) normalise(value[i], r, read_shared(shared + c.norm_at() + at));
      write_shared(shared + c.input_at() + row * c.input_stride() + at, value[i]);
    }
    sync_consumers();
  }

  // With post-norms: the residual stream, which becomes x or is added to. A thread has the same
  // elements of it each time.
  template <int lanes, int count>
  __device__ __forceinline__ void add_to_residual(vector16 (&value)[count], int row, int place,
                                                  int vectors, bool begins) const {
    const u32 residual = shared + c.residual_at() + row * c.residual_stride();
    if (!begins) {
      const float r = deviation_of<lanes>(value, vectors);
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (i * lanes >= vectors) continue;
        const u32 at = (place + i * lanes) * 16;
        normalise(value[i], r, read_shared(shared + c.post_norm_at() + at));
        const vector16 before = read_shared(residual + at);
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          float first, second, first_before, second_before;
          unpack<T>(value[i].word[word], first, second);
          unpack<T>(before.word[word], first_before, second_before);
          value[i].word[word] = pack<T>(first + first_before, second + second_before);
        }
      }
      sync_consumers();  // the statistics are read
    }
#pragma unroll
    for (int i = 0; i < count; ++i)
      if (i * lanes < vectors) write_shared(residual + (place + i * lanes) * 16, value[i]);
  }

  // A warp's part of stages of dense weights, and of packed ones: the address of this lane's
  // tokens, the MMAs of a stage or of what was held of it, and the accumulators' rows.
  struct dense_weights : stage_product<W, T, c.warps, c.chunk / 32 / c.warps> {
    using product = stage_product<W, T, c.warps, c.chunk / 32 / c.warps>;
    using typename product::accumulators;
    using typename product::fragment;
    static constexpr int stage_k = c.chunk;
    static constexpr bool packs = false;
    static constexpr bool normalises = true;  // whether one of the products has a norm in front
    static __device__ __forceinline__ u32 lane_at(u32 stride) {
      const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      return lane / 4 * stride + warp * 64 + lane % 4 * 16;
    }
    static __device__ __forceinline__ void hold(fragment& to, u32 stage) {
      product::load(to, stage + lane_at(row_stride), row_stride);
    }
    static __device__ __forceinline__ void multiply(accumulators& sum, const fragment& of,
                                                    u32 tokens, bool has_token, int at, int end) {
      product::run(sum, of, tokens, has_token, at + static_cast<int>(threadIdx.x) / 32 * 32, end);
    }
    template <class Pipeline>
    static __device__ __forceinline__ void multiply_stage(accumulators& sum, Pipeline& pipeline,
                                                          u32 tokens, bool has_token, int at,
                                                          int end) {
      product::run(sum, pipeline.buffer() + lane_at(row_stride), row_stride, tokens, has_token,
                   at + static_cast<int>(threadIdx.x) / 32 * 32, end);
      pipeline.release();
    }
    static __device__ __forceinline__ float total(const accumulators& sum, int i) {
      return (sum[0][i] + sum[1][i]) + (sum[2][i] + sum[3][i]);
    }
    static __device__ __forceinline__ int row(int group, int half) { return group + half * 8; }
  };
  template <packed_form format>
  struct packed_weights {
    static constexpr bool packs = true;
    using product = packed_stage_product<T, c.packed_stage(format), c.warps>;
    using accumulators = typename product::accumulators;
    using fragment = typename product::fragment;
    static constexpr int stage_k = product::stage_k;
    static constexpr bool normalises = !c.has_experts() || c.packs_attention;
    static __device__ __forceinline__ u32 lane_at(u32 stride) {
      const int lane = threadIdx.x % 32;
      return smaller(lane % 8, c.tokens - 1) * stride + lane / 8 * 16;
    }
    static __device__ __forceinline__ void hold(fragment& to, u32 stage) {
      product::load(to, stage);
    }
    static __device__ __forceinline__ void multiply(accumulators& sum, const fragment& of,
                                                    u32 tokens, bool has_token, int at, int end) {
      product::run(sum, of, tokens, end - at);
    }
    template <class Pipeline>
    static __device__ __forceinline__ void multiply_stage(accumulators& sum, Pipeline& pipeline,
                                                          u32 tokens, bool has_token, int at,
                                                          int end) {
      fragment of;
      product::load(of, pipeline.buffer());
      pipeline.release();
      multiply(sum, of, tokens, has_token, at, end);
    }
    static __device__ __forceinline__ float total(const accumulators& sum, int i) {
      return sum.value[i];
    }
    static __device__ __forceinline__ int row(int group, int half) { return 2 * group + half; }
  };

  // Multiplies this CTA's blocks of 16 rows of weights by all tokens, and leaves each warp's sums
  // in shared memory.
  // With `loads` false the activations of the product before are there. `by_slot`: k are the
  // features of each slot, one after the other, which are multiplied by the slot's token alone.
  template <class Weights>
  __device__ __forceinline__ void multiply(const T* from, int k, int blocks, bool normalises,
                                           bool plain, bool loads, bool by_slot) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
    // A block of a mixture has a part for each slot.
    const int parts = c.has_experts() && by_slot ? c.slots() : 1;
#pragma unroll 1
    for (int begin = 0; begin < k; begin += c.input_length()) {
      const int end = smaller(k, begin + c.input_length());
      const int part_stages =
          ceil_div(c.has_experts() && by_slot ? c.h : end - begin, Weights::stage_k);
      const int held = smaller(c.held, blocks * parts * part_stages);
      typename Weights::fragment first_stages[larger(c.held, 1)];
      [[maybe_unused]] int taken = 0;  // of those
#pragma unroll
      for (int i = 0; i < c.held; ++i) {
        if (i >= held) break;
        pipeline.wait();
        Weights::hold(first_stages[i], pipeline.buffer());
        pipeline.release();
      }
      if (!(c.has_experts() || c.has_head()) || loads)
        load_input(from, k, begin, end, Weights::normalises && normalises, plain);
      else
        sync_consumers();
      u32 to = shared + c.sums_at() + warp * c.sums_stride();
#pragma unroll 1
      for (int block = 0; block < blocks; ++block, to += c.warps * c.sums_stride()) {
        float total[4] = {};
        const u32 input = shared + c.input_at() + Weights::lane_at(c.input_stride());
        const bool has_token = group < c.tokens;
#pragma unroll 1
        for (int part = 0; part < parts; ++part) {
          typename Weights::accumulators sum = {};
          u32 token_at = input;
          int first = begin, last = end;
          if (c.has_experts() && by_slot) {
            token_at += part % c.of_token() * c.h * 2;
            last = c.h;
          }
          const int before = (block * parts + part) * part_stages;
          if (!Weights::packs && before < held) {
#pragma unroll
            for (int i = 0; i < c.held; ++i) {
              if (i < before || i >= smaller(held, before + part_stages)) continue;
              Weights::multiply(sum, first_stages[i], token_at, has_token, first, last);
              first += Weights::stage_k;
              token_at += 2 * Weights::stage_k;
            }
          }
#pragma unroll 1
          for (int at = first; at < last; at += Weights::stage_k) {
            if constexpr (Weights::packs && c.held > 0) {
              typename Weights::fragment of = first_stages[0];
              if (taken < held) {
#pragma unroll
                for (int i = 1; i < c.held; ++i) first_stages[i - 1] = first_stages[i];
                ++taken;
              } else {
                pipeline.wait();
                Weights::hold(of, pipeline.buffer());
                pipeline.release();
              }
              Weights::multiply(sum, of, token_at, has_token, at, last);
            } else {
              pipeline.wait();
              Weights::multiply_stage(sum, pipeline, token_at, has_token, at, last);
            }
            token_at += 2 * Weights::stage_k;
          }
          // The other tokens' columns are not the slot's: its weights may be NaN for them.
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const bool is_own = !c.has_experts() || c.tokens == 1 || !by_slot ||
                                2 * pair + i % 2 == part / c.of_token();
            if (is_own) total[i] += Weights::total(sum, i);
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
          store_sums(to, Weights::row(group, half), pair, total[2 * half], total[2 * half + 1],
                     begin > 0);
      }
      sync_consumers();
    }
  }
  static __device__ __forceinline__ void store_sums(u32 to, int row, int pair, float first,
                                                    float second, bool adds) {
    if (c.tokens == 1 ? pair > 0 : 2 * pair >= c.tokens) return;
    const u32 at = to + (row * c.token_columns() + 2 * pair) * 4;
    if (adds) first += read_float(at);
    if constexpr (c.tokens == 1) {
      write_float(at, first);
    } else {
      if (adds) second += read_float(at + 4);
      write_pair(at, first, second);
    }
  }

  // The sum of all warps' parts of row `row` of block `block`.
  __device__ __forceinline__ float sum_of(int block, int row, int column) const {
    const u32 from = shared + c.sums_at() + block * (c.warps * c.sums_stride()) +
                     (row * c.token_columns() + column) * 4;
    float part[c.warps];
#pragma unroll
    for (int warp = 0; warp < c.warps; ++warp)
      part[warp] = read_float(from + warp * c.sums_stride());
#pragma unroll
    for (int step = c.warps / 2; step > 0; step /= 2)
#pragma unroll
      for (int warp = 0; warp < step; ++warp) part[warp] += part[warp + step];
    return part[0];
  }

  __device__ __forceinline__ void finish_qkv(const persistent_layer_pointers& of, float* to) const {
    const int first = first_row(c.qkv_rows(), c.attention_unit()),
              rows = rows_of_block(c.qkv_rows(), c.attention_unit());
#pragma unroll 1
    for (int at = threadIdx.x; at < rows * c.tokens; at += c.consumers()) {
      const int row = at / c.tokens, column = at % c.tokens, n = first + row;
      float sum = sum_of(row / 16, row % 16, column);
      if constexpr (c.bias) {
        const int part = c.packed_qkv ? 0 : part_of(n);
        sum += to_float(static_cast<const T*>(of.bias[part])[n - first_of(part)]);
      }
      store_relaxed(to + static_cast<i64>(column) * c.qkv_rows() + n, sum);
    }
  }

  // Logits of the router [tokens, experts].
  __device__ __forceinline__ void finish_router(const void* bias, float* to) const {
    const int first = first_row(c.router_rows(), 1), rows = rows_of_block(c.router_rows(), 1);
    if (static_cast<int>(threadIdx.x) >= rows * c.tokens) return;
    const int row = threadIdx.x / c.tokens, column = threadIdx.x % c.tokens, n = first + row;
    const bool of_expert = !c.own_gate || n < c.experts;
    float sum = sum_of(0, row, column);
    if constexpr (c.router_bias) {
      if (of_expert) sum += to_float(static_cast<const T*>(bias)[n]);
    }
    if (c.rounds_logits || !of_expert) sum = to_float(from_float<T>(sum));
    store_relaxed(to + column * c.router_rows() + n, sum);
  }

  // Blocks of 8 rows of gate and 8 of up, or packed tiles of both in turn.
  __device__ __forceinline__ void read_gate_up(int row, int column, float& gate, float& up) const {
    if constexpr (c.packs_network) {
      gate = sum_of(row / 16 * 2, row % 16, column);
      up = sum_of(row / 16 * 2 + 1, row % 16, column);
    } else {
      gate = sum_of(row / 8, row % 8, column);
      up = sum_of(row / 8, row % 8 + 8, column);
    }
  }
  template <class Layer>
  __device__ __forceinline__ void finish_hidden([[maybe_unused]] const Layer& of, T* to) const {
    const int first = first_hidden(), rows = hidden_rows();
    if constexpr (c.has_experts()) {
      // The weight of a choice multiplies what goes into down, which is linear.
#pragma unroll 1
      for (int at = threadIdx.x; at < rows; at += c.consumers()) {
        const int slot = (first + at) / c.h, column = slot / c.of_token();
        const int expert = c.own > 0 || c.expert_bias ? expert_of(slot) : 0;
        const bool in_turn = c.interleaved && (c.own == 0 || expert < all_experts);
        float gate, up;
        if (in_turn) {
          gate = sum_of(at / 8, at % 8 * 2, column);
          up = sum_of(at / 8, at % 8 * 2 + 1, column);
        } else {
          read_gate_up(at, column, gate, up);
        }
        if constexpr (c.expert_bias) {
          if (c.own == 0 || expert < all_experts) {
            const int feature = (first + at) % c.h;
            const i64 row = static_cast<i64>(expert) * c.h + feature;
            const T* const bias = static_cast<const T*>(of.router.gate_bias);
            const i64 gate_at = c.interleaved      ? 2 * row
                                : c.packed_gate_up ? 2 * row - feature
                                                   : row;
            gate += to_float(bias[gate_at]);
            up += to_float(c.interleaved      ? bias[gate_at + 1]
                           : c.packed_gate_up ? bias[gate_at + c.h]
                                              : static_cast<const T*>(of.router.up_bias)[row]);
          }
        }
        store_relaxed(to + first + at,
                      from_float<T>(gated_product<activation>(gate, up) *
                                    read_float(shared + c.weights_at() + slot * 4)));
      }
      return;
    }
#pragma unroll 1
    for (int at = threadIdx.x; at < rows * c.tokens; at += c.consumers()) {
      const int row = at / c.tokens, column = at % c.tokens;
      float gate, up;
      read_gate_up(row, column, gate, up);
      store_relaxed(to + static_cast<i64>(column) * c.h + first + row,
                    from_float<T>(gated_product<activation>(gate, up)));
    }
  }

  // Each thread has one element of the residual stream at most. bias(feature, token) is added, and
  // with ranks the summands of the peers before it; `scale` multiplies all of this. With post-norms
  // the sum alone is stored.
  template <class Bias, class Group>
  __device__ __forceinline__ void finish_residual(float& residual, T* to, int unit, bool plain,
                                                  const Bias& bias, const float* scale,
                                                  [[maybe_unused]] Group& group) const {
    const int row = threadIdx.x / c.tokens, column = threadIdx.x % c.tokens;
    if (row >= rows_of_block(c.d, unit)) return;
    const int feature = first_row(c.d, unit) + row;
    const i64 place = static_cast<i64>(column) * c.d + feature;
    float sum = sum_of(row / 16, row % 16, column);
    if constexpr (c.ranks > 0) sum = group.sum_of_ranks(sum, place);
    sum += bias(feature, column);
    if constexpr (c.scales_residual) sum *= scale[feature];
    const T result = from_float<T>(residual + sum);
    if constexpr (!c.post_norms) residual = to_float(result);
    T* const at = to + place;
    if (plain)
      *at = result;
    else
      store_relaxed(at, result);
  }

  // The element of the residual stream `from` [tokens, d] that finish_residual() adds to, where the
  // thread had another one before. load_input() has waited for all of them already.
  __device__ __forceinline__ float residual_of(const T* from, int unit) const {
    const int row = threadIdx.x / c.tokens, column = threadIdx.x % c.tokens;
    if (row >= rows_of_block(c.d, unit)) return 0;
    from += static_cast<i64>(column) * c.d + first_row(c.d, unit) + row;
    T word;
    int spins = 0;
    do {
      word.bits = load_relaxed_half(from);
      count_spin(spins);
    } while (word.bits == 0);
    word.bits = static_cast<u16>(~word.bits);
    return to_float(word);
  }

  // The sum of the experts' biases behind down, each times its weight.
  __device__ __forceinline__ float expert_bias(const void* bias, int feature, int token) const {
    float sum = 0;
#pragma unroll 1
    for (int i = 0; i < c.choices + c.shared; ++i) {
      const int slot = token * c.of_token() + i;
      sum +=
          read_float(shared + c.weights_at() + slot * 4) *
          to_float(static_cast<const T*>(bias)[static_cast<i64>(expert_of(slot)) * c.d + feature]);
    }
    return sum;
  }

  // ---- the head ----

  // Adds the logits of `rows` ids, this CTA's from `first` on, to the best of a thread's token.
  __device__ __forceinline__ void finish_logits(row_choice<choice>& best,
                                                const row_scores<choice>& scores, int first,
                                                int rows) const {
    const int column = threadIdx.x % token_places;
    if (column >= c.tokens) return;
#pragma unroll 1
    for (int row = threadIdx.x / token_places; row < rows; row += c.consumers() / token_places) {
      const int id = first_row(c.vocab, c.head_unit()) + first + row;
      float logit = sum_of(row / 16, row % 16, column);
      if constexpr (c.head_bias) logit += to_float(static_cast<const T*>(p.token.head_bias)[id]);
      if constexpr (c.rounds_head) logit = to_float(from_float<T>(logit));
      logit = scores.cap(logit);
      if constexpr (c.sums) best.add_sum_of(logit);
      const random_words words = scores.words(id / 4);
      const u32 even = id % 4 < 2 ? words.word[0] : words.word[2];
      const u32 odd = id % 4 < 2 ? words.word[1] : words.word[3];
      best.take(rank_of(scores.score(logit, id % 2 == 0 ? even : odd)), id, logit);
    }
  }

  // The best of all threads of this CTA, then in CTA 0 those of all CTAs.
  __device__ __forceinline__ void choose(row_choice<choice> best) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = token_places; distance < 32; distance *= 2) best.add_lane(distance);
    sync_consumers();  // the sums are read
    choice_part* const of_warps =
        reinterpret_cast<choice_part*>(__cvta_shared_to_generic(shared + c.sums_at()));
    if (lane < token_places) best.store(of_warps + warp * token_places + lane);
    sync_consumers();
    u8* const parts =
        static_cast<u8*>(p.workspace) + smaller(c.copies_of_set, p.layers) * c.set_bytes(p.cache);
    constexpr u64 flag = 1;
    if (warp == 0 && lane < c.tokens) {
      row_choice<choice> all;
      for (int i = 0; i < c.warps; ++i) {
        row_choice<choice> part;
        part.load(of_warps[i * token_places + lane]);
        all.add(part);
      }
      u8* const to = parts + (blockIdx.x * c.tokens + lane) * c.part_bytes;
      store_flagged(to, all.rank, all.id, flag);
      store_flagged(to + 16, __float_as_uint(all.logit), __float_as_uint(all.largest), flag);
      store_flagged(to + 32, __float_as_uint(all.sum), 0, flag);
    }
    if (blockIdx.x > 0 || warp >= c.tokens) return;
    row_choice<choice> all;
#pragma unroll 1
    for (int block = lane; block < c.blocks; block += 32) {
      const u8* const from = parts + (block * c.tokens + warp) * c.part_bytes;
      flagged_word word[3];
      int spins = 0;
      do {
#pragma unroll
        for (int i = 0; i < 3; ++i) word[i] = load_flagged(from + i * 16);
        count_spin(spins);
      } while (word[0].flag != flag || word[1].flag != flag || word[2].flag != flag);
      row_choice<choice> part;
      part.rank = static_cast<int>(word[0].data[0]), part.id = static_cast<int>(word[0].data[1]);
      part.logit = __uint_as_float(word[1].data[0]);
      part.largest = __uint_as_float(word[1].data[1]);
      part.sum = __uint_as_float(word[2].data[0]);
      all.add(part);
    }
    __syncwarp();
    all.add_warp();
    if (lane > 0) return;
    all.finish(warp, p.token.chosen, p.token.logit, p.token.logprob);
    advance_sequence({.limits = p.token.limits,
                      .stop = p.token.stop,
                      .ids = p.token.next_ids,
                      .lengths = p.token.next_lengths,
                      .steps = p.token.steps,
                      .ended = p.token.next_ended,
                      .out = p.token.out,
                      .cache = p.cache,
                      .stops = p.token.stops,
                      .room = p.token.room,
                      .pad = p.token.pad},
                     warp, all.id);
  }

  // ---- attention ----

  // Heads of q, and of the new k and v, normalised, rotated and rounded, to shared memory. The
  // heads of the sequence's tokens are shared out among the warps.
  __device__ __forceinline__ void prepare_heads(const persistent_layer_pointers& of,
                                                const float* qkv) const {
    constexpr int all = c.own_heads() + 2 * c.own_kv_heads(), total = c.per_sequence * all;
    constexpr int most = c.prepared_at_once(), values = c.dim / 32;
    const int lane = threadIdx.x % 32;
    const float* const from = qkv + static_cast<i64>(first_token()) * c.qkv_rows() + lane;
    int first = threadIdx.x / 32;
    asm volatile("" : "+r"(first));  // or the rows of heads are in registers for all layers
#pragma unroll 1
    for (; first < total; first += most * c.warps) {
      u32 raw[most][values];
      const auto is_needed = [&](int i) {
        const int at = first + i * c.warps;
        return at < total && (at % all < c.own_heads() || has_new(at / all));
      };
#pragma unroll
      for (int i = 0; i < most; ++i)
#pragma unroll
        for (int j = 0; j < values; ++j) raw[i][j] = is_needed(i) ? 0 : 1;
      int spins = 0;
      bool missing;
      do {
        missing = false;
#pragma unroll
        for (int i = 0; i < most; ++i)
#pragma unroll
          for (int j = 0; j < values; ++j)
            if (raw[i][j] == 0)
              raw[i][j] = load_relaxed_word(from + row_of_head(first + i * c.warps) + j * 32);
#pragma unroll
        for (int i = 0; i < most; ++i)
#pragma unroll
          for (int j = 0; j < values; ++j) missing = missing || raw[i][j] == 0;
        count_spin(spins);
      } while (missing);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < most; ++i)
        if (is_needed(i))
          prepare_head(of, (first + i * c.warps) / all, (first + i * c.warps) % all, raw[i]);
    }
  }

  static __device__ __forceinline__ int part_of_head(int head) {
    return head < c.own_heads() ? 0 : head < c.own_heads() + c.own_kv_heads() ? 1 : 2;
  }
  // Where head `at` of those of the sequence's tokens begins among their rows of q, k and v.
  __device__ __forceinline__ int row_of_head(int at) const {
    constexpr int all = c.own_heads() + 2 * c.own_kv_heads();
    const int head = at % all, part = part_of_head(head);
    const int in_part = part == 0 ? head : head - c.own_heads() - (part - 1) * c.own_kv_heads();
    return at / all * c.qkv_rows() + first_of(part) +
           (head_group * (part == 0 ? c.own_heads() : c.own_kv_heads()) + in_part) * c.dim;
  }

  // One of the heads of the sequence's token `token`, from the words that are polled.
  __device__ __forceinline__ void prepare_head(const persistent_layer_pointers& of, int token,
                                               int head, const u32 (&raw)[c.dim / 32]) const {
    constexpr int values = c.dim / 32;
    const int lane = threadIdx.x % 32;
    float value[values];
#pragma unroll
    for (int j = 0; j < values; ++j) value[j] = __uint_as_float(~raw[j]);
    const int part = part_of_head(head);
    if constexpr (c.head_norms) {
      if (part < 2) {
        float squares = 0;
#pragma unroll
        for (int j = 0; j < values; ++j) squares += value[j] * value[j];
#pragma unroll
        for (int other = 16; other > 0; other /= 2) squares += __shfl_xor_sync(~0u, squares, other);
        const float r = rsqrtf(squares / c.dim + p.epsilon);
        const T* const weights = static_cast<const T*>(of.head_norms[part]) + lane;
#pragma unroll
        for (int j = 0; j < values; ++j)
          value[j] *= r * (p.norm_offset + to_float(weights[j * 32]));
      }
    }
    if constexpr (c.rotates) {
      if (part < 2) {
#pragma unroll
        for (int j = 0; j < rotary_pairs; ++j) {
          const float2 turn =
              read_pair(shared + c.turns_at() + (token * (c.rotary / 2) + lane + j * 32) * 8);
          const float low = value[j], high = value[j + rotary_pairs];
          value[j] = low * turn.x - high * turn.y;
          value[j + rotary_pairs] = high * turn.x + low * turn.y;
        }
      }
    }
    const u32 to =
        shared + lane * 2 +
        (part == 0
             ? c.queries_at() + (token * c.own_heads() + head) * c.query_stride()
             : c.new_rows_at() + (token * 2 * c.own_kv_heads() + head - c.own_heads()) * c.dim * 2);
#pragma unroll
    for (int j = 0; j < values; ++j) write_half(to + j * 64, from_float<T>(value[j]));
  }

  // Rows of the new tokens in the caches, their cosines and sines, and the parts of each sequence:
  // once for all layers.
  __device__ __forceinline__ void read_once() {
    if (keys > 0) {
      const int thread = static_cast<int>(threadIdx.x);
      if (thread < c.per_sequence) {
        const int token = first_token() + thread;
        i64 slot;
        if constexpr (c.has_head())
          slot = slot_of(token);
        else
          slot = c.wide_slots ? static_cast<const i64*>(p.slots)[token]
                              : static_cast<const int*>(p.slots)[token];
        if (slot >= p.cache_rows) slot = -1;
        write_index(shared + c.slots_at() + thread * 8, slot);
      }
      if constexpr (c.rotates) {
        constexpr int pairs = c.rotary / 2;
        for (int at = thread; at < c.per_sequence * pairs; at += c.consumers()) {
          const int token = first_token() + at / pairs;
          const int position = c.has_head() ? length_of(token) - 1 : p.positions[token];
          const float2 turn = turn_of<head_rotation::halves, float>(
              {&position, p.angles, p.table_rows, p.angle_scale}, p.frequencies, 0, at % pairs,
              pairs);
          write_pair(shared + c.turns_at() + at * 8, turn.x, turn.y);
        }
      }
      first_part = split * parts_of_split(keys_of_split(length_of(sequence)));
    }
    const int place = static_cast<int>(threadIdx.x) % c.unit_threads();
    if (place >= rows_of_block(c.units(), 1)) return;
    const int length =
        length_of((first_row(c.units(), 1) + place) / (c.per_sequence * (c.q_rows() / 4)));
    const int each = keys_of_split(length), seen = length - c.first_seen(length);
    const int splits = ceil_div(seen, each);
    parts_of_row = (splits - 1) * parts_of_split(each) +
                   smaller(c.groups(), ceil_div(seen - (splits - 1) * each, 16));
  }

  // Puts this warp's head of new keys (`of` 0) or values (1) into the rows of the stage of `block`,
  // and of the cache.
  __device__ __forceinline__ void place_new(u32 stage, u32 stride, int block, int of, void* cache,
                                            int kv_head) const {
    const int lane = threadIdx.x % 32, end = smaller(c.per_sequence, keys - first_new);
#pragma unroll 1
    for (int token = larger(0, 16 * block - first_new); token < end; ++token) {
      const int row = first_new + token - 16 * block;
      if (row >= 16) break;
      if (lane < c.dim / 8) {
        const int at = kv_head * c.dim + lane * 8;
        const vector16 value =
            read_shared(shared + c.new_rows_at() + ((token * 2 + of) * c.own_kv_rows() + at) * 2);
        write_shared(stage + row * stride + at * 2, value);
        const i64 slot = read_index(shared + c.slots_at() + token * 8);
        if (slot >= 0)
          store(static_cast<T*>(cache) + slot * c.cache_row() +
                    (head_group * c.own_kv_heads() + kv_head) * c.kv_head + lane * 8,
                value);
      }
    }
    __syncwarp();
  }

  // Attention of this CTA's keys. Every warp goes through all stages, and computes those of its
  // group.
  __device__ __forceinline__ void attend(const persistent_layer_pointers& of, float* partial,
                                         float* logs) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
    const int kv_head = warp % c.own_kv_heads(), group = warp / c.own_kv_heads();
    const int blocks = ceil_div(keys, 16);
    constexpr int steps = c.dim / 32, tiles = c.dim / 16, query_tiles = c.query_tiles();
    constexpr int queries = c.per_sequence * c.group_heads();
    const auto query_at = [&](int tile) {
      const int query = tile * 8 + row;
      const int head = query / c.group_heads() * c.own_heads() + kv_head * c.group_heads() +
                       query % c.group_heads();
      return shared + c.queries_at() + head * c.query_stride() + pair * 16;
    };
    float out[query_tiles][tiles][4] = {}, total[query_tiles][2] = {}, most[query_tiles][2];
#pragma unroll
    for (int tile = 0; tile < query_tiles; ++tile) most[tile][0] = most[tile][1] = minus_infinity;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      const bool own = block % c.groups() == group, last = block == blocks - 1;
      const int there = keys - 16 * block;  // rows of the stages
      const bool places = first_new < smaller(keys, 16 * block + 16);
      const bool writes = own && (places || there < 16);
      float weight[query_tiles][4];
      pipeline.wait();
      if (own) {
        const u32 keys_at = pipeline.buffer();
        if (places) place_new(keys_at, key_stride, block, 0, of.keys, kv_head);
        float score[query_tiles][2][4] = {};
        const u32 at = keys_at + row * key_stride + (kv_head * c.dim + pair * 8) * 2;
#pragma unroll
        for (int i = 0; i < steps; ++i) {
          const vector16 low = read_shared(at + i * 64);
          const vector16 high = read_shared(at + i * 64 + 8 * key_stride);
#pragma unroll
          for (int tile = 0; tile < query_tiles; ++tile) {
            vector16 query = {};
            if (tile * 8 + row < queries) query = read_shared(query_at(tile) + i * 64);
#pragma unroll
            for (int half = 0; half < 2; ++half)
              mma_pairs<T>(score[tile][half], low.word, high.word, query.word, 2 * half);
          }
        }
#pragma unroll
        for (int tile = 0; tile < query_tiles; ++tile) {
#pragma unroll
          for (int column = 0; column < 2; ++column) {
            int seen = there;
            if constexpr (c.per_sequence > 1)
              seen = smaller(there, first_new + 1 - 16 * block +
                                        (tile * 8 + 2 * pair + column) / c.group_heads());
#pragma unroll
            for (int i = column; i < 4; i += 2) {
              const int key = row + (i < 2 ? 0 : 8);
              bool is_seen = key < seen;
              if constexpr (c.window > 0)
                is_seen = is_seen &&
                          key + 16 * block > first_query - c.window +
                                                 (tile * 8 + 2 * pair + column) / c.group_heads();
              float sum = score[tile][0][i] + score[tile][1][i];
              if constexpr (c.caps_scores) sum = tanh_by_exp2(sum * p.inner_scale);
              weight[tile][i] = is_seen ? sum * p.scale : unseen;
            }
            float now = fmaxf(weight[tile][column], weight[tile][column + 2]);
#pragma unroll
            for (int other = 4; other < 32; other *= 2)
              now = fmaxf(now, __shfl_xor_sync(~0u, now, other));
            now = fmaxf(now, most[tile][column]);
            const float factor = approximate_exp2(most[tile][column] - now);
            most[tile][column] = now;
            weight[tile][column] = approximate_exp2(weight[tile][column] - now);
            weight[tile][column + 2] = approximate_exp2(weight[tile][column + 2] - now);
            total[tile][column] =
                total[tile][column] * factor + weight[tile][column] + weight[tile][column + 2];
#pragma unroll
            for (int features = 0; features < tiles; ++features) {
              out[tile][features][column] *= factor;
              out[tile][features][column + 2] *= factor;
            }
          }
        }
        if (writes) async_proxy_fence();
      }
      pipeline.release();
      pipeline.wait();
      if (own) {
        const u32 values_at = pipeline.buffer();
        if (places) place_new(values_at, value_stride, block, 1, of.values, kv_head);
        if (last) {
          // Rows of an earlier stage behind the values may be NaN, and a weight of 0 would keep it.
#pragma unroll 1
          for (int at_row = there; at_row < 16; ++at_row)
            if (lane < c.dim / 8)
              write_shared(values_at + at_row * value_stride + (kv_head * c.dim + lane * 8) * 2,
                           vector16{});
          __syncwarp();
        }
        u32 b[query_tiles][2];
#pragma unroll
        for (int tile = 0; tile < query_tiles; ++tile) {
          b[tile][0] = transposed_matrix(pack<T>(weight[tile][0], weight[tile][1]));
          b[tile][1] = transposed_matrix(pack<T>(weight[tile][2], weight[tile][3]));
        }
        const u32 values = values_at + (lane % 8 + lane / 16 * 8) * value_stride +
                           (kv_head * c.dim + lane / 8 % 2 * 8) * 2;
#pragma unroll
        for (int features = 0; features < tiles; ++features) {
          u32 a[4];
          load_matrices_transposed(a[0], a[1], a[2], a[3], values + features * 32);
#pragma unroll
          for (int tile = 0; tile < query_tiles; ++tile)
            mma_16x8x16<T>(out[tile][features], a, b[tile]);
        }
        if (writes) async_proxy_fence();
      }
      pipeline.release();
    }
    if (group >= blocks) return;
#pragma unroll
    for (int tile = 0; tile < query_tiles; ++tile) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        float all = total[tile][column];
#pragma unroll
        for (int other = 4; other < 32; other *= 2) all += __shfl_xor_sync(~0u, all, other);
        const int query = tile * 8 + 2 * pair + column;
        if (query >= queries) continue;
        const int head =
            head_group * c.own_heads() + kv_head * c.group_heads() + query % c.group_heads();
        const i64 part_row =
            static_cast<i64>(first_token() + query / c.group_heads()) * c.parts(p.cache) +
            first_part + group;
        const float factor = 1.0f / all;
        if (row == 0)
          store_relaxed(logs + part_row * c.heads + head, most[tile][column] + log2f(all));
        float* const to = partial + part_row * c.q_rows() + head * c.dim + row;
#pragma unroll
        for (int features = 0; features < tiles; ++features) {
          store_relaxed(to + features * 16, out[tile][features][column] * factor);
          store_relaxed(to + features * 16 + 8, out[tile][features][column + 2] * factor);
        }
      }
    }
  }
  static __device__ __forceinline__ int parts_of_split(int split_keys) {
    return smaller(c.groups(), ceil_div(split_keys, 16));
  }

  // Combines the parts of this CTA's share of the features of all heads. A sink joins the softmax
  // without a value.
  __device__ __forceinline__ void combine(const float* partial, const float* logs,
                                          const float* sinks, T* to) const {
    constexpr int places = c.unit_threads(), sharers = c.consumers() / places;
    constexpr int batch = c.tokens > 2 ? 8 : 4;
    constexpr int units_of_token = c.q_rows() / 4;
    const int place = threadIdx.x % places, sharer = threadIdx.x / places;
    const int first = first_row(c.units(), 1), count = rows_of_block(c.units(), 1);
    const int unit = first + place, row = unit / units_of_token;
    const int feature = unit % units_of_token * 4, head = feature / c.dim;
    float most = minus_infinity, total = 0;
    float sum[4] = {};
    if (place < count) {
      const i64 row_of_parts = static_cast<i64>(row) * c.parts(p.cache);
      const float* const values = partial + row_of_parts * c.q_rows() + feature;
      const float* const logs_at = logs + row_of_parts * c.heads + head;
#pragma unroll 1
      for (int part = sharer; part < parts_of_row; part += batch * sharers) {
        vector16 value[batch];
        u32 log[batch];
        int spins = 0;
        bool missing;
        do {
          missing = false;
#pragma unroll
          for (int i = 0; i < batch; ++i) {
            const i64 at = part + i * sharers;
            value[i] = {~0u, ~0u, ~0u, ~0u};
            log[i] = ~__float_as_uint(minus_infinity);
            if (at >= parts_of_row) continue;
            value[i] = load_relaxed(values + at * c.q_rows());
            log[i] = load_relaxed_word(logs_at + at * c.heads);
          }
#pragma unroll
          for (int i = 0; i < batch; ++i)
            missing = missing || log[i] == 0 || value[i].word[0] == 0 || value[i].word[1] == 0 ||
                      value[i].word[2] == 0 || value[i].word[3] == 0;
          count_spin(spins);
        } while (missing);
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          const float now = __uint_as_float(~log[i]), larger_one = fmaxf(most, now);
          const float old = approximate_exp2(most - larger_one);
          const float fresh = approximate_exp2(now - larger_one);
          most = larger_one;
          total = total * old + fresh;
#pragma unroll
          for (int j = 0; j < 4; ++j)
            sum[j] = sum[j] * old + __uint_as_float(~value[i].word[j]) * fresh;
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int other = places; other < 32; other *= 2) {
      const float other_most = __shfl_xor_sync(~0u, most, other);
      const float larger_one = fmaxf(most, other_most);
      const bool none = larger_one == minus_infinity;
      const float old = none ? 0 : approximate_exp2(most - larger_one);
      const float fresh = none ? 0 : approximate_exp2(other_most - larger_one);
      most = larger_one;
      total = total * old + __shfl_xor_sync(~0u, total, other) * fresh;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        sum[j] = sum[j] * old + __shfl_xor_sync(~0u, sum[j], other) * fresh;
    }
    constexpr int rows = c.combined_rows();
    const u32 sums_at = shared + c.combine_at(), most_at = sums_at + rows * places * 16;
    const u32 totals_at = most_at + rows * places * 4;
    const int own = places <= 32 ? threadIdx.x / 32 : sharer;
    if (places > 32 || threadIdx.x % 32 < places) {
      const int at = own * places + place;
      write_shared(sums_at + at * 16, {__float_as_uint(sum[0]), __float_as_uint(sum[1]),
                                       __float_as_uint(sum[2]), __float_as_uint(sum[3])});
      write_float(most_at + at * 4, most);
      write_float(totals_at + at * 4, total);
    }
    sync_consumers();
#pragma unroll 1
    for (int at = threadIdx.x; at < 4 * count; at += c.consumers()) {
      float of[rows], all_most = minus_infinity;
      if constexpr (c.sinks) {
        constexpr float log2_of_e = 1.4426950408889634f;
        all_most = sinks[(first * 4 + at) % c.q_rows() / c.dim] * log2_of_e;
      }
      const float sink = all_most;
#pragma unroll
      for (int i = 0; i < rows; ++i) {
        of[i] = read_float(most_at + (i * places + at / 4) * 4);
        all_most = fmaxf(all_most, of[i]);
      }
      float all_total = c.sinks ? approximate_exp2(sink - all_most) : 0, value = 0;
#pragma unroll
      for (int i = 0; i < rows; ++i) {
        const int from = i * places + at / 4;
        const float factor = approximate_exp2(of[i] - all_most);
        all_total += factor * read_float(totals_at + from * 4);
        value += factor * read_float(sums_at + from * 16 + at % 4 * 4);
      }
      // A query that sees no key has none of these: zero, as in PyTorch.
      const float result = all_most <= 0.5f * -1e30f ? 0.0f : value / all_total;
      store_relaxed(to + static_cast<i64>(first) * 4 + at, from_float<T>(result));
    }
  }

  // ---- a layer ----

  enum : int { qkv_product, out_product, router, gate_up, down, logits_product };

  using layer_weights = packed_weights<c.format>;
  using head_weights = packed_weights<c.head_format>;
  static constexpr bool packs_all =
      c.packs_attention && c.packs_network && !c.has_experts() && (!c.has_head() || c.packs_head);

  // Whether all packed weights have the layout that the kernel reads.
  __device__ __forceinline__ bool knows_weights() const {
    bool known = true;
    const auto read = [&](const void* codes, packed_code code, i64 n, int k) {
      known = known && is_packed(load_cached(codes), code, n, k);
    };
    if constexpr (c.packs()) {
#pragma unroll 1
      for (int at = threadIdx.x; at < p.layers * packed::count; at += c.consumers()) {
        const int layer = at / packed::count, which = at % packed::count;
        const persistent_layer_pointers& of = layer_of(layer);
        constexpr i64 experts = c.has_experts() ? all_experts : 1;
        if constexpr (c.packs_attention) {
          if (which == packed::qkv) read(of.qkv[0], c.format.code, c.qkv_rows(), c.d);
          if (which == packed::out) read(of.out, c.format.code, c.d, c.q_rows());
        }
        if constexpr (c.packs_network) {
          if (which == packed::gate || which == packed::up)
            read(which == packed::gate ? of.gate : of.up, c.format.code, experts * c.h, c.d);
          if (which == packed::down) read(of.down, c.format.code, experts * c.d, c.h);
          if constexpr (c.own > 0) {
            const persistent_router_pointers& router = p.of[layer].router;
            if (which == packed::own_gate || which == packed::own_up)
              read(which == packed::own_gate ? router.own_gate : router.own_up, c.format.code,
                   c.own * c.h, c.d);
            if (which == packed::own_down) read(router.own_down, c.format.code, c.d, c.own * c.h);
          }
        }
      }
    }
    if constexpr (c.packs_head)
      if (chooses()) read(p.token.head, c.head_format.code, c.vocab, c.d);
    return named_barrier_all(1, c.consumers(), known);
  }

  __device__ __forceinline__ void consume() {
    read_once();
    auto group = group_of_launch();
    const int out_rows = rows_of_block(c.d, c.attention_unit()),
              down_rows = rows_of_block(c.d, c.down_unit());
    float residual = 0;
    {
      const int row = threadIdx.x / c.tokens, column = threadIdx.x % c.tokens;
      if (row < out_rows && !c.post_norms) {
        const T* const of_x = row_of_x(column);
        if (!c.has_head() || of_x != nullptr)
          residual = to_float(of_x[first_row(c.d, c.attention_unit()) + row]);
        if constexpr (c.has_head()) residual = to_float(embedded(residual));
      }
      if constexpr (c.packs() || c.packs_head) {
        if (!knows_weights()) residual = __uint_as_float(0x7fffffff);
      }
    }
    row_choice<choice> best;
    row_scores<choice> scores{c.caps_head ? p.token.softcap : 0.0f};
    if constexpr (c.has_head()) {
      const int column = threadIdx.x % token_places;
      if (chooses() && column < c.tokens)
        scores.load({p.token.temperature, p.token.seeds, p.token.steps}, column);
    }
    constexpr int ids_at_once = 16 * c.most_blocks();
    const int ids = c.has_head() ? rows_of_block(c.vocab, c.head_unit()) : 0;
    fetch_norms(layer_of(0).attn_norm, nullptr);
    const T* x = static_cast<const T*>(p.x);
#pragma unroll 1
    for (int layer = 0; layer < p.layers + (chooses() ? 1 : 0); ++layer) {
      const persistent_layer_pointers& of = layer_of(layer);
      const bool is_head = c.has_head() && layer == p.layers;
      const bool end = layer + 1 == p.layers && !chooses() && !c.post_norms;
      u8* const set = set_of(layer);
      T* const attended = reinterpret_cast<T*>(set + c.attended_at(p.cache));
      T* const mid = reinterpret_cast<T*>(set + c.mid_at(p.cache));
      T* const hidden = reinterpret_cast<T*>(set + c.hidden_at(p.cache));
      T* const y = end ? static_cast<T*>(p.y) : reinterpret_cast<T*>(set + c.y_at(p.cache));
#pragma unroll 1
      for (int at = 0; at < (is_head           ? ceil_div(ids, ids_at_once)
                             : c.has_experts() ? 5
                                               : 4);
           ++at) {
        const int product = is_head ? logits_product : c.has_experts() || at < router ? at : at + 1;
        const int first_id = at * ids_at_once, some_ids = smaller(ids_at_once, ids - first_id);
        const int blocks = product == qkv_product
                               ? ceil_div(rows_of_block(c.qkv_rows(), c.attention_unit()), 16)
                           : is_head            ? ceil_div(some_ids, 16)
                           : product == router  ? ceil_div(rows_of_block(c.router_rows(), 1), 16)
                           : product == gate_up ? ceil_div(hidden_rows(), 8)
                           : product == down    ? ceil_div(down_rows, 16)
                                                : ceil_div(out_rows, 16);
        const int k = product == out_product ? c.q_rows() : product == down ? c.hidden() : c.d;
        const T* const from = product == qkv_product   ? x
                              : product == out_product ? attended
                              : product == down        ? hidden
                              : is_head                ? x
                                                       : mid;
        const bool loads = is_head ? at == 0 : !c.has_experts() || product != gate_up;
        const bool normalises = product != out_product && product != down;
        const bool plain = product == qkv_product && layer == 0, by_slot = product == down;
        const bool of_network = product == gate_up || product == down;
        if (!c.keeps_residual() && product == down) residual = residual_of(mid, c.down_unit());
        if (c.packs_head && is_head)
          multiply<head_weights>(from, k, blocks, normalises, plain, loads, by_slot);
        else if ((c.packs_network && of_network) || (c.packs_attention && product < router))
          multiply<layer_weights>(from, k, blocks, normalises, plain, loads, by_slot);
        else if (!packs_all)
          multiply<dense_weights>(from, k, blocks, normalises, plain, loads, by_slot);
        if (product == qkv_product) {
          float* const qkv = reinterpret_cast<float*>(set);
          float* const partial = reinterpret_cast<float*>(set + c.partial_at());
          float* const logs = reinterpret_cast<float*>(set + c.logs_at(p.cache));
          fetch_norms(of.ffn_norm, of.attn_post_norm);
          finish_qkv(of, qkv);
          // Before this CTA's part of `attended`: with all of them the others set x to zero.
          if (!c.keeps_residual() && layer > 0) residual = residual_of(x, c.attention_unit());
          if (keys > 0) prepare_heads(of, qkv);
          sync_consumers();
          attend(of, partial, logs);
          combine(partial, logs, of.sinks, attended);
        } else if (product == router) {
          if constexpr (c.has_experts())
            finish_router(p.of[layer].router.bias,
                          reinterpret_cast<float*>(set + c.router_at(p.cache)));
        } else if (product == gate_up) {
          named_barrier_sync(3, c.consumers() + 32);
          if (c.post_norms || !end)
            fetch_norms(layer + 1 < p.layers ? layer_of(layer + 1).attn_norm
                        : chooses()          ? p.token.final_norm
                                             : nullptr,
                        of.ffn_post_norm);
          finish_hidden(p.of[layer], hidden);
        } else if (is_head) {
          if constexpr (c.has_head()) finish_logits(best, scores, first_id, some_ids);
        } else {
          finish_residual(
              residual, product == out_product ? mid : y,
              product == out_product ? c.attention_unit() : c.down_unit(), product == down && end,
              [&](int feature, int token) {
                float bias = 0;
                if constexpr (c.out_bias) {
                  if (product == out_product)
                    bias = to_float(static_cast<const T*>(of.out_bias)[feature]);
                }
                if constexpr (c.expert_bias) {
                  if (product == down)
                    bias = expert_bias(p.of[layer].router.down_bias, feature, token);
                }
                return bias;
              },
              of.residual_scale, group);
          if (product == out_product) named_barrier_arrive(2, c.consumers() + 32);
        }
      }
      x = y;
    }
    if constexpr (c.has_head()) {
      if (chooses()) choose(best);
    }
    if constexpr (c.post_norms) {
      if (!chooses()) load_input(x, c.d, 0, c.d, true, false, true);
    }
    // Thread 0 of each CTA has an element of every row of exchanges.
    if constexpr (c.ranks > 0)
      if (threadIdx.x == 0) {
        --group.epoch;
        group.finish();
      }
  }
};

template <class T, persistent_config config, class activation, class norm>
__global__ void __launch_bounds__(config.threads(), 1)
    persistent_layer(const __grid_constant__
                     typename persistent_layers<T, config, activation, norm>::params params) {
  extern __shared__ __align__(128) u8 shared[];
  const u32 base = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < config.stages; ++stage) {
      barrier_init(base + 8 * stage, 1);
      barrier_init(base + 8 * (config.stages + stage), config.warps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  persistent_layers<T, config, activation, norm> layers(params, base);
  const int thread = static_cast<int>(threadIdx.x), others = config.consumers();
  if (thread < others) {
    take_registers<config.consumer_registers()>();
    layers.consume();
  } else {
    give_registers<config.other_registers()>();
    if (thread < others + 32)
      layers.produce();
    else if (thread < others + 64)
      layers.clean();
  }
}

}  // namespace fftune
