// Attention of a few queries of each sequence over its long cache of keys and values: the decode
// engine, for sm_80 and newer, at the speed of reading the cache once.
//
// The query heads that share a kv head, times the queries of a sequence, are the rows of one
// mma.sync tile: m16n8k16 with most rows unused is still faster than memory. The keys of all
// sequences are divided evenly among groups of CTAs (decode/config.cuh), so that any mix of lengths
// keeps every SM busy to the end. Where a sequence is cut, the CTAs that share it leave partial
// results in the workspace for the one that has its last keys, which adds them up in a fixed order:
// the same bits every time.
//
// Partial results are words with a flag beside the data (common/async.cuh), so that one
// round trip to L2 both finds that they are complete and brings them. The flag is a constant, and
// the CTA that has read the words clears them, so no run can take another's words for its own, and
// the contents of the workspace before a run do not matter. A CTA waits only for CTAs of its
// sequence with lower numbers, which began before it. It seldom waits long, because CTAs go through
// their sequences from the last to the first: results that others wait for are computed first, and
// those that it waits for are read last.
//
//   group of CTAs   tiles [begin, end) of the keys of all sequences, one after the other
//   CTA             one kv head (and block of query rows) of its group's tiles
//   warp            its slice of each tile, on its own: a pipeline of `stages` slices of K and V
//                   that it fills by cp.async, its own accumulators, no barrier
//
//        keys of a sequence ->
//        | warp 0 | warp 1 | warp 2 | warp 3 | warp 0 | warp 1 | ...      slices
//        |            tile 0                 |      tile 1
//
//   shared memory   [warp][stage][K, V] slices; Q; the statistics of each warp
//   barriers        __syncthreads at the beginning of a sequence (Q) and at its end, where the
//                   accumulators of the warps pass through the pipeline stage that each has read
//                   last, and are added up in order
//   workspace       [group][first, last sequence of its share][head] rows of flagged words
//   e4m3            k and v become 16-bit numbers between ldmatrix and the MMA (attention/
//                   e4m3_tile.cuh); k_scale is a factor of the scores, v_scale one of the output
//   dependencies    the first keys are prefetched to L2 before griddepcontrol.wait
//
// run() is long. Its mask, cap and exchange as functions of their own had the same instructions in
// another order, and the presets that were measured with it would be stale.
//
// Grid: (kv heads x row blocks, groups). Block: config.threads().
#include "attention/decode/config.cuh"
#include "attention/e4m3_tile.cuh"
#include "attention/mask.cuh"
#include "attention/mma_tile.cuh"
#include "attention/tile_division.cuh"
#include "common/async.cuh"
#include "common/numerics.cuh"
#include "common/vectors.cuh"

namespace fftune {

template <attention_form form, attention_decode_config config>
class decode_kernel {
  using T = element_type<form.type>;
  static constexpr attention_decode_plan plan = attention_decode_plan_of(form, config);
  static constexpr int dim = form.dim, warps = config.warps, slice = config.slice;
  static constexpr int stages = config.stages, m_tiles = config.m_tiles, rows = config.rows();
  static constexpr int threads = config.threads();
  using tile_of_rows = mma_tile<T, dim, m_tiles>;
  using products = typename choose_type<form.e4m3, e4m3_tile<T, dim, m_tiles>, tile_of_rows>::type;
  using layout = attention_row_layout<dim>;  // of Q
  using chunks_of_row = row_chunks<T, dim>;
  // Of K and V; addressed in words of 16 bits, too.
  static constexpr int kv_words = attention_kv_words(form);
  using kv_layout = attention_row_layout<kv_words>;
  using chunks_of_kv = row_chunks<T, kv_words>;
  static constexpr int quads = ceil_div(dim, 4);  // of columns, each a thread's of a row's result
  static constexpr int column_blocks = layout::padded / 8;
  static_assert(!form.packed_sequences() && !form.bias && form.mask != attention_mask::packed);
  static_assert(slice % 16 == 0 && stages >= 2);
  static_assert(attention_decode_refusal(form, config) == nullptr);

  // Words of so many elements of K or V.
  template <class Integer>
  static __device__ __forceinline__ Integer words_of(Integer elements) {
    return form.e4m3 ? elements >> 1 : elements;
  }

  // The tiles of a sequence that hold visible keys, and at least one, so that a sequence without
  // keys has its zeros written.
  struct tile_range {
    int first, last;
  };
  static __device__ __forceinline__ tile_range tiles_of(const attention_params& p,
                                                        const attention_sequence& sequence) {
    const key_range keys = visible_keys<form>(p, sequence, 0, sequence.q_len);
    const int first = keys.first / config.tile();
    return {first, larger(first + 1, ceil_div(keys.last, config.tile()))};
  }
  static __device__ __forceinline__ int tile_count(const attention_params& p, int index) {
    const tile_range tiles = tiles_of(p, sequence_of<form>(p, index));
    return tiles.last - tiles.first;
  }

  static __device__ __forceinline__ tile_division divide(const attention_params& p) {
    return divide_tiles<form.lengths>(p.batch, [&](int index) { return tile_count(p, index); });
  }
  static __device__ __forceinline__ sequence_tile find(const attention_params& p, int tile) {
    return find_tile<form.lengths>(p.batch, tile, [&](int index) { return tile_count(p, index); });
  }

  // This warp's slices of the tiles of a share, on their way to shared memory.
  class loader {
    const attention_params& p_;
    const T* const k_;  // of the kv head
    const T* const v_;
    const int begin_;  // of the share
    attention_sequence sequence_;
    int before_;       // tiles of the batch before the sequence
    int tile_, last_;  // the next tile, and the one after the last of the sequence's part
    int left_;         // tiles of the share
    int slot_ = 0;
    // Paged: lane i has the pages of the slices of tile listed_ + i. A slice's 16 keys are in one.
    int page_[slice / 16];
    int listed_ = 0, list_end_ = 0;

    // The sequence's part of the share, up to tile `end` of the batch.
    __device__ __forceinline__ void enter(const attention_sequence& sequence, tile_range tiles,
                                          int end) {
      sequence_ = sequence;
      tile_ = tiles.first + larger(begin_ - before_, 0);
      last_ = tiles.first + end - before_;
      list_end_ = 0;
    }
    __device__ __forceinline__ void enter_previous() {
      const attention_sequence sequence = sequence_of<form>(p_, sequence_.index - 1);
      const tile_range tiles = tiles_of(p_, sequence);
      const int end = before_;
      before_ -= tiles.last - tiles.first;
      enter(sequence, tiles, end);
    }

    static __device__ __forceinline__ int first_key(int tile) {
      return tile * config.tile() + static_cast<int>(threadIdx.x) / 32 * slice;
    }

    __device__ __forceinline__ void list_pages() {
      const int* const table = page_table(p_, sequence_.index);
#pragma unroll
      for (int part = 0; part < slice / 16; ++part) {
        const int key = first_key(tile_ + static_cast<int>(threadIdx.x) % 32) + part * 16;
        page_[part] = key < sequence_.kv_len ? table[key / p_.page] : -1;
      }
      listed_ = tile_;
      list_end_ = tile_ + 32;
    }

    // Copies 16 rows; `count` of them exist.
    static __device__ __forceinline__ void copy_rows(u32 to, const T* from, int stride, int count) {
      const int lane = threadIdx.x % 32;
      constexpr int chunks = kv_layout::chunks, copies = 16 * chunks / 32;
      if constexpr (32 % chunks == 0 && chunks_of_kv::access == 16) {
        constexpr int step = 32 / chunks;  // rows at once
        const int row = lane / chunks, chunk = lane % chunks;
        const bool exists = kv_layout::padded == kv_words || chunk * 8 < kv_words;
        const u32 first = kv_layout::offset(row, chunk);
        from += row * stride + chunk * 8;
        count = exists ? count - row : 0;
#pragma unroll
        for (int copy = 0; copy < copies; ++copy) {
          copy_async(to + kv_layout::below(first, copy * step), from, copy * step < count);
          from += step * stride;
        }
      } else {
#pragma unroll
        for (int copy = 0; copy < copies; ++copy) {
          const int index = copy * 32 + lane;
          const int row = index / chunks, chunk = index % chunks;
          chunks_of_kv::copy(to + kv_layout::offset(row, chunk), from + row * stride, chunk,
                             row < count);
        }
      }
    }

   public:
    // Loads the tiles [begin, end); the last one is in the sequence of `from`.
    __device__ __forceinline__ loader(const attention_params& p, int kv_head, sequence_tile from,
                                      int begin, int end)
        : p_(p),
          k_(static_cast<const T*>(p.k) + words_of(kv_head * p.kv_head)),
          v_(static_cast<const T*>(p.v) + words_of(kv_head * p.kv_head)),
          begin_(begin),
          before_(from.before),
          left_(end - begin) {
      const attention_sequence sequence = sequence_of<form>(p, from.index);
      enter(sequence, tiles_of(p, sequence), end);
    }

    // Starts to load the next slice into `ring`. There is a group of copies also where no slice is
    // left, so that waits can count them.
    __device__ __forceinline__ void load(u32 ring) {
      if (left_ > 0) {
        if constexpr (form.paged) {
          if (tile_ >= list_end_) list_pages();
        }
        const int first = first_key(tile_);
        const u32 slot = ring + slot_ * (2 * plan.slice_bytes);
#pragma unroll
        for (int part = 0; part < slice / 16; ++part) {
          const int key = first + part * 16;
          int count = sequence_.kv_len - key;
          i64 k_at, v_at;
          if constexpr (form.paged) {
            const int page = __shfl_sync(~0u, page_[part], tile_ - listed_);
            if (!has_page(p_, page)) count = 0;
            const i64 row = static_cast<i64>(page) * p_.page + key % p_.page;
            k_at = row * p_.k_row;
            v_at = row * p_.v_row;
          } else {
            k_at = sequence_.index * p_.k_batch + static_cast<i64>(key) * p_.k_row;
            v_at = sequence_.index * p_.v_batch + static_cast<i64>(key) * p_.v_row;
          }
          const u32 to = slot + part * 16 * kv_layout::pitch;
          copy_rows(to, k_ + words_of(k_at), words_of(p_.k_row), count);
          copy_rows(to + plan.slice_bytes, v_ + words_of(v_at), words_of(p_.v_row), count);
        }
        --left_;
        if (++tile_ == last_ && left_ > 0) enter_previous();
      }
      copy_async_commit();
      slot_ = slot_ + 1 == stages ? 0 : slot_ + 1;
    }
  };

  // Prefetches rows of keys, or of values, of all heads: each CTA of the group a part of them. The
  // instruction is issued for one lane after another, some 75 cycles each: few, of many bytes.
  static __device__ __forceinline__ void prefetch_rows(const T* rows_at, int stride, int width,
                                                       int count) {
    constexpr int most_bytes = 8192;
    const int at_once = stride == width ? larger(1, most_bytes / (width * 2)) : 1;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, ctas = gridDim.x;
    const int own = (lane * warps + warp) * ctas + static_cast<int>(blockIdx.x);
    for (int row = own * at_once; row < count; row += threads * ctas * at_once) {
      prefetch_l2(rows_at + static_cast<i64>(row) * stride,
                  smaller(at_once, count - row) * width * 2);
    }
  }

  // Before the kernels before this one are complete, the first keys of the first sequence.
  static __device__ __forceinline__ void prefetch(const attention_params& p) {
    if constexpr (config.prefetch > 0 && !form.lengths && !form.paged) {
      const tile_division shares = divide(p);
      const int group = blockIdx.y;
      if (group >= shares.groups) return;
      const int begin = shares.begin(group), end = shares.begin(group + 1);
      const sequence_tile from = find(p, end - 1);
      const int at = larger(begin, from.before);
      const attention_sequence sequence = sequence_of<form>(p, from.index);
      const int first = (tiles_of(p, sequence).first + at - from.before) * config.tile();
      constexpr int most = config.prefetch * 1024 / (4 * kv_words);
      const int keys = smaller(smaller(most, (end - at) * config.tile()), sequence.kv_len - first);
      const T* const k = static_cast<const T*>(p.k) + words_of(from.index * p.k_batch);
      const T* const v = static_cast<const T*>(p.v) + words_of(from.index * p.v_batch);
      const int width = words_of((p.kv_heads - 1) * p.kv_head + dim);
      prefetch_rows(k + static_cast<i64>(first) * words_of(p.k_row), words_of(p.k_row), width,
                    keys);
      prefetch_rows(v + static_cast<i64>(first) * words_of(p.v_row), words_of(p.v_row), width,
                    keys);
    }
  }

  // One block of query rows of one kv head of a sequence. Row r is query r / heads of the group of
  // heads that share the kv head.
  struct rows_of_queries {
    int heads, kv_head, first, count;

    __device__ __forceinline__ explicit rows_of_queries(const attention_params& p)
        : heads(p.heads / p.kv_heads),
          kv_head(static_cast<int>(blockIdx.x) % p.kv_heads),
          first(static_cast<int>(blockIdx.x) / p.kv_heads * rows),
          count(smaller(rows, p.q_len * heads - first)) {}
    __device__ __forceinline__ int query(int row) const { return (first + row) / heads; }
    __device__ __forceinline__ int head(int row) const {
      return kv_head * heads + (first + row) % heads;
    }
  };

  static __device__ __forceinline__ void load_q(const attention_params& p,
                                                const attention_sequence& sequence,
                                                const rows_of_queries& queries, u32 shared_q) {
    const T* const q = static_cast<const T*>(p.q) + sequence.index * p.q_batch;
    for (int index = threadIdx.x; index < rows * layout::chunks; index += threads) {
      const int row = index / layout::chunks, chunk = index % layout::chunks;
      vector16 value = {};
      const auto load = [&](int of) {
        return chunks_of_row::load(
            q + static_cast<i64>(queries.query(row)) * p.q_row + queries.head(row) * dim, of);
      };
      if constexpr (form.e4m3) {
        const int pair = chunk / 2 * 2;
        vector16 both[2] = {};
        if (row < queries.count && pair * 8 < dim) both[0] = load(pair);
        if (row < queries.count && pair * 8 + 8 < dim) both[1] = load(pair + 1);
        value = products::q_words(both[0], both[1], chunk % 2);
      } else if (row < queries.count && chunk * 8 < dim) {
        value = load(chunk);
      }
      store_shared(shared_q + layout::offset(row, chunk),
                   float4{__uint_as_float(value.word[0]), __uint_as_float(value.word[1]),
                          __uint_as_float(value.word[2]), __uint_as_float(value.word[3])});
    }
  }

  static __device__ __forceinline__ void finish(const attention_params& p,
                                                const attention_sequence& sequence,
                                                const rows_of_queries& queries, int row, int column,
                                                const partial_row& value) {
    const int query = queries.query(row), head = queries.head(row);
    const softmax_result result =
        finish_softmax(value.softmax, form.sinks ? p.sinks[head] : minus_infinity());
    const float scale = result.factor;
    T* const out = static_cast<T*>(p.out) + sequence.index * p.out_batch +
                   static_cast<i64>(query) * p.out_row + head * dim + column;
    const uint2 words = {pack<T>(value.o.x * scale, value.o.y * scale),
                         pack<T>(value.o.z * scale, value.o.w * scale)};
    if constexpr (dim % 4 == 0) {
      *reinterpret_cast<uint2*>(out) = words;
    } else {
      *reinterpret_cast<u32*>(out) = words.x;
      if (column + 2 < dim) *reinterpret_cast<u32*>(out + 2) = words.y;
    }
    if constexpr (form.lse) {
      if (column == 0) {
        p.lse[(static_cast<i64>(sequence.index) * p.heads + head) * p.q_len + query] =
            result.lse * natural_log_of_2;
      }
    }
  }

  // --- Partial results in the workspace: for each row 2 quads words of two columns, then one with
  // the reference and the sum ---

  static constexpr int words_of_row = config.partial_words(dim);
  static constexpr u64 is_written = 0x9b1d5c37e6f2a84bull;

  // Words of a group's partial result number `part` (0, or 1 for a group's last sequence).
  static __device__ __forceinline__ unsigned char* partial_words(const attention_params& p,
                                                                 int group, int part) {
    const i64 number = (static_cast<i64>(group) * 2 + part) * gridDim.x + blockIdx.x;
    return p.partials + number * (rows * words_of_row * 16);
  }
  static __device__ __forceinline__ void store_partial(unsigned char* to, float first,
                                                       float second) {
    store_flagged(to, __float_as_uint(first), __float_as_uint(second), is_written);
  }

  // The groups before the last one that share a sequence with it: `count` from `first` on.
  struct other_groups {
    int first, count;
    int first_part;  // of the first of them; the sequence is the first of all others

    __device__ __forceinline__ unsigned char* words(const attention_params& p, int i) const {
      return partial_words(p, first + i, i == 0 ? first_part : 0);
    }
  };

  // Adds the other groups' results of four columns of a row to this one's.
  static __device__ __forceinline__ void add_others(const attention_params& p,
                                                    const other_groups& others, int row, int column,
                                                    partial_row& value) {
    // As many loads are in flight as registers allow.
    constexpr int batch = threads * config.ctas_per_sm > 256 ? 4 : 8;
    for (int base = 0; base < others.count; base += batch) {
      softmax_row statistic[batch];
      float4 o[batch];
      bool ready;
      do {
        flagged_word word[batch][3];
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          // Past the end the last one again.
          const unsigned char* const words =
              others.words(p, smaller(base + i, others.count - 1)) + row * words_of_row * 16;
          word[i][0] = load_flagged(words + column / 2 * 16);
          word[i][1] = load_flagged(words + column / 2 * 16 + 16);
          word[i][2] = load_flagged(words + quads * 32);
        }
        ready = true;
#pragma unroll
        for (int i = 0; i < batch; ++i) {
#pragma unroll
          for (int part = 0; part < 3; ++part) ready &= word[i][part].flag == is_written;
          const bool exists = base + i < others.count;
          const auto value_of = [&](int part, int at) {
            return __uint_as_float(word[i][part].data[at]);
          };
          o[i] = {value_of(0, 0), value_of(0, 1), value_of(1, 0), value_of(1, 1)};
          statistic[i] = {exists ? value_of(2, 0) : minus_infinity(),
                          exists ? value_of(2, 1) : 0.0f};
        }
      } while (!ready);
      value.add(statistic, o);
    }
  }

  // All threads, when all have read the words: no run may find them written.
  static __device__ __forceinline__ void clear_others(const attention_params& p,
                                                      const other_groups& others, int used_rows) {
    const int words = used_rows * words_of_row;
    for (int i = threadIdx.x; i < others.count * words; i += threads) {
      store_flagged(others.words(p, i / words) + i % words * 16, 0, 0, 0);
    }
  }

  // Where the warps leave 8 columns of a row: bank conflicts between rows are avoided.
  static __device__ __forceinline__ u32 exchange_offset(int row, int block) {
    return (row * layout::padded + (block + row) % column_blocks * 8) * 4;
  }

  // All warps' results of four columns of a row.
  static __device__ __forceinline__ void load_warps(softmax_row (&softmax)[warps],
                                                    float4 (&o)[warps], u32 shared, u32 exchange,
                                                    u32 statistics, int row, int column) {
#pragma unroll
    for (int warp = 0; warp < warps; ++warp) {
      const float2 pair = load_shared_pair(statistics + (warp * rows + row) * 8);
      softmax[warp] = {pair.x, pair.y};
      o[warp] = load_shared(shared + warp * plan.ring_bytes + exchange +
                            exchange_offset(row, column / 8) + column % 8 * 4);
    }
  }

 public:
  static __device__ __forceinline__ void run(const attention_params& p, u32 shared,
                                             const attention_cache_params* cache = nullptr) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const rows_of_queries queries(p);
    prefetch(p);
    wait_and_launch_dependents();

    const tile_division shares = divide(p);
    const int group = blockIdx.y;
    if (group >= shares.groups) return;
    const int begin = shares.begin(group), end = shares.begin(group + 1);
    const sequence_tile from = find(p, end - 1);

    const u32 ring = shared + warp * plan.ring_bytes;
    loader slices(p, queries.kv_head, from, begin, end);
#pragma unroll
    for (int stage = 0; stage < stages - 1; ++stage) slices.load(ring);

    const u32 shared_q = shared + plan.q_at, statistics = shared + plan.statistics_at;
    const u32 q_fragment = shared_q + layout::row_fragment(lane);
    const u32 k_fragment = kv_layout::key_fragment(lane);
    const u32 v_fragment = plan.slice_bytes + kv_layout::row_fragment(lane);
    score_scaling<form> scaling(p);
    if constexpr (form.e4m3) scaling.scale_keys(k_scale_of<form>(cache, queries.kv_head));
    int slot = 0, free_slot = stages - 1;  // to read next, and read last

    // From the last sequence to the first, for whose end others may be waited.
    int before = from.before;  // tiles of the batch before the sequence
    for (int index = from.index;; --index) {
      const attention_sequence sequence = sequence_of<form>(p, index);
      const tile_range tiles = tiles_of(p, sequence);
      const int after = before + tiles.last - tiles.first;
      int at = larger(begin, before);
      const int stop = smaller(after, end);

      load_q(p, sequence, queries, shared_q);
      __syncthreads();
      typename tile_of_rows::fragments q = {};
      if constexpr (plan.q_in_registers) tile_of_rows::load_q(q, q_fragment);

      const key_range common =
          common_keys<form>(p, sequence, queries.query(0), queries.query(queries.count - 1) + 1);
      key_range visible[m_tiles][2];
#pragma unroll
      for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          visible[tile][half] =
              keys_of_row<form>(p, sequence, queries.query(tile * 16 + half * 8 + lane / 4));
        }
      }

      typename tile_of_rows::output o = {};
      mma_softmax<m_tiles> softmax;
      int key = (tiles.first + at - before) * config.tile() + warp * slice;
      for (; at < stop; ++at, key += config.tile()) {
        copy_async_wait<stages - 2>();
        __syncwarp();
        slices.load(ring);
        const u32 here = ring + slot * (2 * plan.slice_bytes);
        free_slot = slot;
        slot = slot + 1 == stages ? 0 : slot + 1;

        float s[m_tiles][slice / 8][4];
        products::template multiply_keys<slice, plan.q_in_registers>(s, q, q_fragment,
                                                                     here + k_fragment);
        if constexpr (form.softcap) {
#pragma unroll
          for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
            for (int block = 0; block < slice / 8; ++block) {
#pragma unroll
              for (int i = 0; i < 4; ++i) s[tile][block][i] = scaling.cap(s[tile][block][i]);
            }
          }
        }
        if (key < common.first || key + slice > common.last) {
#pragma unroll
          for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
            for (int block = 0; block < slice / 8; ++block) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const int j = key + block * 8 + lane % 4 * 2 + i % 2;
                const key_range& seen = visible[tile][i / 2];
                if (j < seen.first || j >= seen.last) s[tile][block][i] = minus_infinity();
              }
            }
          }
        }
        softmax.update(s, o, scaling.factor());
        products::template multiply_values<slice>(o, s, here + v_fragment);
      }

      // Add the warps up.
      const u32 exchange = free_slot * (2 * plan.slice_bytes);
      __syncwarp();
#pragma unroll
      for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = tile * 16 + half * 8 + lane / 4;
          const softmax_row whole = softmax.whole(tile, half);
          if (row >= queries.count) continue;
          if constexpr (form.e4m3) {
            const int quad = lane % 4;
#pragma unroll
            for (int group = 0; group < column_blocks / 2; ++group) {
              store_shared(
                  ring + exchange + exchange_offset(row, 2 * group + quad / 2) + quad % 2 * 16,
                  products::columns_of(o[tile], group, half));
            }
          } else {
#pragma unroll
            for (int block = 0; block < column_blocks; ++block) {
              store_shared(ring + exchange + exchange_offset(row, block) + lane % 4 * 8,
                           float2{o[tile][block][half * 2], o[tile][block][half * 2 + 1]});
            }
          }
          if (lane % 4 == 0) {
            store_shared(statistics + (warp * rows + row) * 8, float2{whole.reference, whole.sum});
          }
        }
      }
      __syncthreads();

      const int first_group = shares.group_of(before), last_group = shares.group_of(after - 1);
      const bool finishes = group == last_group;
      const other_groups others{first_group, last_group - first_group,
                                shares.begin(first_group) < before ? 1 : 0};
      // Only the first and the last sequence of a group can be split.
      unsigned char* const words = partial_words(p, group, before > begin ? 1 : 0);
      for (int item = threadIdx.x; item < queries.count * quads; item += threads) {
        const int row = item / quads, column = item % quads * 4;
        softmax_row softmax_of[warps];
        float4 o_of[warps];
        load_warps(softmax_of, o_of, shared, exchange, statistics, row, column);
        partial_row value;
        value.add(softmax_of, o_of);
        if (finishes) {
          add_others(p, others, row, column, value);
          if constexpr (form.e4m3) {
            const float v_scale = v_scale_of<form>(cache, queries.kv_head);
            value.o = {value.o.x * v_scale, value.o.y * v_scale, value.o.z * v_scale,
                       value.o.w * v_scale};
          }
          finish(p, sequence, queries, row, column, value);
        } else {
          unsigned char* const to = words + row * words_of_row * 16;
          store_partial(to + column / 2 * 16, value.o.x, value.o.y);
          store_partial(to + column / 2 * 16 + 16, value.o.z, value.o.w);
          if (column == 0) {
            store_partial(to + quads * 32, value.softmax.reference, value.softmax.sum);
          }
        }
      }
      __syncthreads();  // the exchange, Q and the partial results are read
      if (finishes) clear_others(p, others, queries.count);
      if (before <= begin) return;
      before -= tile_count(p, index - 1);
    }
  }
};

template <attention_form form, attention_decode_config config>
__global__ void __launch_bounds__(config.threads(), config.ctas_per_sm)
    attention_decode(const __grid_constant__ attention_params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  decode_kernel<form, config>::run(p, shared_address(shared_memory));
}

template <attention_form form, attention_decode_config config>
__global__ void __launch_bounds__(config.threads(), config.ctas_per_sm)
    attention_decode_e4m3(const __grid_constant__ attention_cache_params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  decode_kernel<form, config>::run(p.attention, shared_address(shared_memory), &p);
}

}  // namespace fftune
