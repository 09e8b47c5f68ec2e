// The state that all threads of the persistent form of layers have (layer/persistent.cu):
// parameters, the CTA's share of the rows of each product, its part of attention, and the state of
// the sequences.
#pragma once

#include "common/choice.cuh"
#include "common/peers.cuh"
#include "gemm/decode/packed_stage.cuh"
#include "layer/next_token.cuh"
#include "layer/persistent.cuh"
#include "layer/persistent/memory.cuh"

namespace fftune {

template <class T, persistent_config c>
struct persistent_cta {
  static_assert(c.in_flight >= 1 && c.in_flight <= c.stages);
  using W = T;  // weights, as they lie in memory: persistent_config::weight_bytes()
  static constexpr int row_stride = c.weight_bytes(c.chunk) + c.row_padding;
  static constexpr int key_bytes = 2 * c.own_kv_rows();
  static constexpr int key_stride = key_bytes + c.row_padding;
  static constexpr int value_stride = key_bytes + c.value_padding;
  static_assert(c.block_rows * key_stride <= c.stage_bytes(), "a stage has 16 keys");
  static constexpr int token_places = c.tokens <= 1 ? 1 : c.tokens <= 2 ? 2 : c.tokens <= 4 ? 4 : 8;
  static constexpr choice_form choice{.draws = c.draws, .sums = c.sums};
  static constexpr float minus_infinity = __builtin_bit_cast(float, 0xff800000u);

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
  static_assert(!looks_ahead || c.can_look_ahead());
  using idle = typename choose_type<looks_ahead, l2_ahead, no_idle>::type;
  // A thread has its own place in the stages.
  using pipeline = stream_pipeline<c.stages, c.barrier_bytes(), c.stage_bytes(), idle>;
  int sequence, head_group, split, first_key, keys;  // this CTA's part of attention
  // Which of the keys is that of the sequence's first new token, and which one its first query is
  // at. They differ where the new token has no row in the cache. May be < 0.
  int first_new, first_query;

  __device__ __forceinline__ persistent_cta(const params& of_launch, u32 at)
      : p(of_launch), shared(at) {
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
  static __device__ __forceinline__ int first_hidden_of(u32 block) {
    if constexpr (c.shares_pairs())
      return c.first_owned_hidden(block);
    else
      return first_row_of(block, c.all_hidden(), c.hidden_unit());
  }
  static __device__ __forceinline__ int first_hidden() { return first_hidden_of(blockIdx.x); }
  static __device__ __forceinline__ int hidden_rows() {
    return first_hidden_of(blockIdx.x + 1) - first_hidden();
  }
  // The CTA's tiles of gate and up, of packed experts, and whether the first one is of a pair that
  // the CTA before it owns.
  static __device__ __forceinline__ int first_gate_up() { return c.first_gate_up(blockIdx.x); }
  static __device__ __forceinline__ int end_gate_up() { return c.first_gate_up(blockIdx.x + 1); }
  static __device__ __forceinline__ bool begins_with_up() {
    return c.shares_pairs() && first_gate_up() % 2 != 0;
  }
  static __device__ __forceinline__ int gate_up_blocks() {
    return c.shares_pairs() ? end_gate_up() - first_gate_up() : ceil_div(hidden_rows(), 8);
  }
  // Where its sums go among those [all_hidden] that CTAs hand over; or null.
  static __device__ __forceinline__ float* given_ups(float* handed) {
    return begins_with_up() ? handed + first_hidden() - packed_rows : nullptr;
  }
  // The CTA's parts of down, of packed experts, and how many parts of its first tile it leaves to
  // the CTA before it, which owns the tile.
  static __device__ __forceinline__ int first_down_part() { return c.first_part(blockIdx.x); }
  static __device__ __forceinline__ int end_down_part() { return c.first_part(blockIdx.x + 1); }
  static __device__ __forceinline__ int parts_before() {
    return c.shares_tiles() ? first_down_part() % c.slots() : 0;
  }
  // Where the rows of down begin that are CTA `block`'s.
  static __device__ __forceinline__ int first_down_of(u32 block) {
    if constexpr (c.shares_tiles())
      return c.first_owned_row(block);
    else
      return first_row_of(block, c.d, c.down_unit());
  }
  static __device__ __forceinline__ int first_down() { return first_down_of(blockIdx.x); }
  static __device__ __forceinline__ int down_rows() {
    return first_down_of(blockIdx.x + 1) - first_down();
  }
  static __device__ __forceinline__ int down_blocks() {
    return ceil_div(down_rows(), 16) + (parts_before() > 0 ? 1 : 0);
  }
  // Where the sums of the tile go that it does not own, among those [d]; or null.
  static __device__ __forceinline__ float* given_sums(float* handed) {
    return parts_before() > 0 ? handed + first_down() - packed_rows : nullptr;
  }
  // The first of a CTA's rows of the residual stream behind attention or down, and their number.
  static __device__ __forceinline__ int first_residual(bool is_down) {
    return is_down ? first_down() : first_row(c.d, c.attention_unit());
  }
  static __device__ __forceinline__ int residual_rows(bool is_down) {
    return is_down ? down_rows() : rows_of_block(c.d, c.attention_unit());
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
  static __device__ __forceinline__ int part_of(int n) {
    return n < c.q_rows() ? 0 : n < c.q_rows() + c.kv_rows() ? 1 : 2;
  }
  static __device__ __forceinline__ int first_of(int part) {
    return part == 0 ? 0 : c.q_rows() + (part - 1) * c.kv_rows();
  }

  static __device__ __forceinline__ const void* row_at(const void* matrix, i64 row, int k) {
    return static_cast<const W*>(matrix) + row * (k / stream_type<W>::packed);
  }

  // Experts of the weights; behind them parts of the network of all tokens are numbered.
  static constexpr int all_experts = c.experts + c.shared;
  // The choice of each slot, which the producer has made: experts and weights are in shared memory.
  __device__ __forceinline__ int expert_of(int slot) const {
    return read_value<int>(shared + c.choices_at() + slot * 4);
  }

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
};

}  // namespace fftune
