// Loading: cp.async copies of the K blocks of a block's operands into the shared-memory pipeline.
//
// Each copy class is one thread's part in filling [rows, bk] tiles of one operand, K block after K
// block: issue<first, last>() copies some of the thread's chunks of 16 bytes, next_k_block() moves
// on. Rows and elements of k that do not exist become zeros.
#pragma once

#include "common/async.cuh"
#include "gemm/epilogue_ops.cuh"
#include "gemm/sm80/config.cuh"
#include "gemm/sm80/tile_layout.cuh"
#include "gemm/tile_scheduler.cuh"

namespace fftune {

// A thread's chunks where k is contiguous: of different rows, at the same place of k.
template <int rows, int bk, int threads>
struct k_major_chunks {
  using layout = k_major_layout<bk>;
  static constexpr int chunks = rows * layout::row_chunks;
  static constexpr int row_step = threads / layout::row_chunks;  // between consecutive chunks
  static constexpr int steps = ceil_div(chunks, threads), bytes = rows * layout::row_bytes;
  static_assert(threads % layout::row_chunks == 0);
  int thread, row, valid, chunk_k;
  const char* source;

  k_major_chunks() = default;
  __device__ __forceinline__ k_major_chunks(int valid_rows, int own_thread)
      : thread(own_thread),
        row(thread / layout::row_chunks),
        valid(valid_rows - row),
        chunk_k(thread % layout::row_chunks * 8) {}

  __device__ __forceinline__ bool has(int step) const {
    return (step + 1) * threads <= chunks || thread + step * threads < chunks;
  }
  __device__ __forceinline__ void next_k_block() { source += layout::row_bytes; }
  // The bytes from the start of k to element `k` of it.
  static __device__ __forceinline__ i64 distance(i64 k, i64 /*pitch*/) { return k * 2; }
  __device__ __forceinline__ void move(i64 bytes) { source += bytes; }
};

// A thread's chunks where the other extent is contiguous: of different k, of the same rows.
template <int rows, int bk, int threads>
struct mn_major_chunks {
  using layout = mn_major_layout<rows>;
  static constexpr int chunks = bk * layout::row_chunks;
  static constexpr int k_step = threads / layout::row_chunks;  // between consecutive chunks
  static constexpr int steps = ceil_div(chunks, threads), bytes = bk * layout::row_bytes;
  static_assert(threads % layout::row_chunks == 0);
  int thread, k, chunk;
  bool row_is_valid;
  const char* source;

  mn_major_chunks() = default;
  __device__ __forceinline__ mn_major_chunks(int valid_rows, int own_thread)
      : thread(own_thread),
        k(thread / layout::row_chunks),
        chunk(thread % layout::row_chunks),
        row_is_valid(chunk * 8 < valid_rows) {}

  __device__ __forceinline__ bool has(int step) const {
    return (step + 1) * threads <= chunks || thread + step * threads < chunks;
  }
};

// Copies a matrix whose k is contiguous.
template <int rows, int bk, int threads>
struct k_major_copy : k_major_chunks<rows, bk, threads> {
  using own = k_major_chunks<rows, bk, threads>;
  using own::row_step;
  using typename own::layout;
  u32 shared;
  i64 stride;

  k_major_copy() = default;
  template <class T>
  __device__ __forceinline__ k_major_copy(const T* matrix, i64 first_row, int valid_rows, i64 k,
                                          i64 first_k, int thread)
      : own(valid_rows, thread),
        shared(layout::offset(this->row, thread % layout::row_chunks)),
        stride(row_step * k * 2) {
    this->source = reinterpret_cast<const char*>(matrix + (first_row + this->row) * k + first_k +
                                                 this->chunk_k);
  }

  // Copies the chunk numbers [first, last) of this thread for the current K block, which has
  // `valid_k` elements left.
  template <int first, int last>
  __device__ __forceinline__ void issue(u32 shared_tile, int valid_k) const {
    const bool k_is_valid = this->chunk_k < valid_k;
    // One running pointer takes fewer registers than one each.
    const char* from = this->source + first * stride;
#pragma unroll
    for (int step = first; step < last; ++step, from += stride) {
      if (this->has(step)) {
        copy_async(shared_tile + shared_offset(step), from,
                   k_is_valid && step * row_step < this->valid);
      }
    }
  }
  __device__ __forceinline__ u32 shared_offset(int step) const {
    if constexpr (row_step % 8 == 0) {  // whole periods of the swizzle
      return shared + step * row_step * layout::row_bytes;
    } else {
      return layout::offset(this->row + step * row_step, this->chunk_k / 8);
    }
  }
};

// Copies a matrix [k, pitch] whose rows are contiguous.
template <int rows, int bk, int threads>
struct mn_major_copy : mn_major_chunks<rows, bk, threads> {
  using own = mn_major_chunks<rows, bk, threads>;
  using own::k_step;
  i64 pitch_bytes;

  mn_major_copy() = default;
  template <class T>
  __device__ __forceinline__ mn_major_copy(const T* matrix, i64 first_row, int valid_rows,
                                           i64 pitch, i64 first_k, int thread)
      : own(valid_rows, thread), pitch_bytes(pitch * 2) {
    this->source = reinterpret_cast<const char*>(matrix + (first_k + this->k) * pitch + first_row +
                                                 this->chunk * 8);
  }

  template <int first, int last>
  __device__ __forceinline__ void issue(u32 shared_tile, int valid_k) const {
    const char* from = this->source + first * k_step * pitch_bytes;
#pragma unroll
    for (int step = first; step < last; ++step, from += k_step * pitch_bytes) {
      if (this->has(step)) {
        const int k = this->k + step * k_step;
        copy_async(shared_tile + own::layout::offset(k, this->chunk), from,
                   this->row_is_valid && k < valid_k);
      }
    }
  }

  __device__ __forceinline__ void next_k_block() {
    this->source += bk * pitch_bytes;
  }
  static __device__ __forceinline__ i64 distance(i64 k, i64 pitch) {
    return k * pitch * 2;
  }
  __device__ __forceinline__ void move(i64 bytes) {
    this->source += bytes;
  }
};

// Grouped rows: as k_major_copy, of the rows that a table in shared memory names. A row's part of a
// K block is 64 bytes or more, so scattered rows cost no more than neighbours.
template <int rows, int bk, int threads>
struct row_gather : k_major_chunks<rows, bk, threads> {
  using own = k_major_chunks<rows, bk, threads>;
  using own::row_step;
  u32 pitch;
  const u32* table;

  row_gather() = default;
  template <class T>
  __device__ __forceinline__ row_gather(const T* matrix, const u32* rows_of_tile, int valid_rows,
                                        i64 k, i64 first_k, int thread)
      : own(valid_rows, thread), pitch(static_cast<u32>(k) * 2), table(rows_of_tile + this->row) {
    this->source = reinterpret_cast<const char*>(matrix + first_k + this->chunk_k);
  }

  template <int first, int last>
  __device__ __forceinline__ void issue(u32 shared_tile, int valid_k) const {
    const bool k_is_valid = this->chunk_k < valid_k;
#pragma unroll
    for (int step = first; step < last; ++step) {
      if (this->has(step)) {
        const bool valid = k_is_valid && step * row_step < this->valid;
        const u32 from = valid ? table[step * row_step] : 0;
        copy_async(
            shared_tile + own::layout::offset(this->row + step * row_step, this->chunk_k / 8),
            this->source + static_cast<u64>(from) * pitch, valid);
      }
    }
  }
};

// Grouped reduction: as mn_major_copy, of the tokens that a list in memory names from sorted
// position `begin` on; or of an operand that is in the sorted order.
template <int rows, int bk, int threads, bool sorted>
struct token_gather : mn_major_chunks<rows, bk, threads> {
  using own = mn_major_chunks<rows, bk, threads>;
  using own::k_step;
  u32 pitch_bytes, position;
  const u32* permutation;

  token_gather() = default;
  template <class T>
  __device__ __forceinline__ token_gather(const T* matrix, const u32* tokens, u32 begin,
                                          i64 first_row, int valid_rows, i64 pitch, int thread)
      : own(valid_rows, thread),
        pitch_bytes(static_cast<u32>(pitch) * 2),
        position(begin + this->k),
        permutation(tokens) {
    this->source = reinterpret_cast<const char*>(matrix + first_row + this->chunk * 8);
  }

  template <int first, int last>
  __device__ __forceinline__ void issue(u32 shared_tile, int valid_k) const {
#pragma unroll
    for (int step = first; step < last; ++step) {
      if (this->has(step)) {
        const int k = this->k + step * k_step;
        const bool valid = this->row_is_valid && k < valid_k;
        const u32 at = position + step * k_step;
        const u32 token = !valid ? 0 : sorted ? at : permutation[at];
        copy_async(shared_tile + own::layout::offset(k, this->chunk),
                   this->source + static_cast<u64>(token) * pitch_bytes, valid);
      }
    }
  }

  __device__ __forceinline__ void next_k_block() {
    position += bk;
  }
};

// The K blocks [first, last) of a block, those of two K-concatenated pairs one after the other:
// balanced shares of the splits. In 32 bits: k < 2^31, bk >= 32 and under 64 splits.
struct k_block_range {
  int k, bk;
  u32 pair_blocks, first, last;

  __device__ __forceinline__ k_block_range(int extent, int block, int pairs, int splits)
      : k(extent),
        bk(block),
        pair_blocks(ceil_div(static_cast<u32>(extent), static_cast<u32>(block))) {
    const u32 blocks = pair_blocks * pairs;
    first = blocks * blockIdx.y / splits;
    last = blocks * (blockIdx.y + 1) / splits;
  }
  __device__ __forceinline__ int count() const { return static_cast<int>(last - first); }
  // Where the range ends within a pair that begins after `before` K blocks.
  __device__ __forceinline__ int end_in_pair(u32 before) const {
    if (last >= before + pair_blocks) return k;
    return last > before ? static_cast<int>((last - before) * bk) : 0;
  }
};

// All copies of a block, K block after K block.
template <gemm_form form, sm80_config config>
class operand_loader {
  static constexpr int bm = config.bm, bn = config.bn, bk = config.bk, threads = config.threads();
  static constexpr int b_operands = form.b_operands();
  static constexpr bool a_mn_major = form.a_major == major::mn;
  static constexpr bool b_mn_major = form.b_major == major::mn;
  static constexpr bool gathers_rows = form.groups == grouping::rows;
  static constexpr bool gathers_tokens = form.groups == grouping::reduction;
  static constexpr bool concatenates = form.k_pairs() == 2;
  static_assert(!gathers_rows || !a_mn_major);
  static_assert(!gathers_tokens || (a_mn_major && b_mn_major && !concatenates));
  using T = element_type<form.ab>;

  template <bool condition, class Then, class Else>
  using choose = typename choose_type<condition, Then, Else>::type;
  template <bool mn_major, int rows>
  using copy = choose<mn_major, mn_major_copy<rows, bk, threads>, k_major_copy<rows, bk, threads>>;

 public:
  using a_copy = choose<gathers_tokens, token_gather<bm, bk, threads, form.a_sorted>,
                        choose<gathers_rows, row_gather<bm, bk, threads>, copy<a_mn_major, bm>>>;
  using b_copy =
      choose<gathers_tokens, token_gather<bn, bk, threads, form.b_sorted>, copy<b_mn_major, bn>>;
  static_assert(a_copy::bytes + b_operands * b_copy::bytes == config.stage_bytes(b_operands));

  // `rows_of_a`: of grouped rows, the tile's rows of A, in shared memory.
  __device__ __forceinline__ operand_loader(const gemm_params& p, const work_tile& tile,
                                            const k_block_range& range, const u32* rows_of_a,
                                            int thread) {
    // Whether the range begins in the second K-concatenated pair.
    const bool late = concatenates && range.first >= range.pair_blocks;
    const u32 before = late ? range.pair_blocks : 0;
    const u32 first_k = (range.first - before) * bk;
    const T* const a = static_cast<const T*>(tile.output == 1 || late ? p.a[1] : p.a[0]);
    const T* const b0 = operand_b(p, tile.group, 0);
    const T* const b1 = operand_b(p, tile.group, 1);
    k_left_ = range.end_in_pair(before) - static_cast<int>(first_k);
    if constexpr (gathers_tokens) {
      const auto* const permutation = reinterpret_cast<const u32*>(p.permutation);
      const u32 begin = tile.sorted + first_k;
      a_ = a_copy(a, permutation, begin, tile.first_m, tile.rows, p.m, thread);
      b_[0] = b_copy(b0, permutation, begin, tile.first_n, tile.columns, p.n, thread);
    } else {
      const i64 a_pitch = a_mn_major ? p.m : p.k,
                b_pitch =
                    i64{b_mn_major ? p.n : p.k} * (form.b_packing == packing::interleaved ? 2 : 1);
      const int k = static_cast<int>(first_k);
      if constexpr (gathers_rows) {
        a_ = a_copy(a, rows_of_a, tile.rows, p.k, k, thread);
      } else {
        a_ = a_copy(a, tile.first_m, tile.rows, a_pitch, k, thread);
      }
      b_[0] = b_copy(late ? b1 : b0, tile.first_n, tile.columns, b_pitch, k, thread);
      if constexpr (b_operands == 2) {
        b_[1] = b_copy(b1, tile.first_n, tile.columns, b_pitch, k, thread);
      }
      if constexpr (concatenates) {
        const i64 walked = static_cast<i64>(range.pair_blocks) * bk;
        first_pair_blocks_ = late ? 0 : static_cast<int>(range.pair_blocks - range.first);
        second_k_ = range.end_in_pair(range.pair_blocks);
        a_jump_ = (static_cast<const T*>(p.a[1]) - static_cast<const T*>(p.a[0])) * 2 -
                  a_copy::distance(walked, a_pitch);
        b_jump_ = (b1 - b0) * 2 - b_copy::distance(walked, b_pitch);
      }
    }
  }

  // Copies a share of the next K block; spreading it over the k16 steps keeps the load unit from
  // bursting.
  template <int share, int shares>
  __device__ __forceinline__ void issue(u32 stage) const {
    a_.template issue<share * a_copy::steps / shares, (share + 1) * a_copy::steps / shares>(
        stage, k_left_);
#pragma unroll
    for (int i = 0; i < b_operands; ++i) {
      b_[i].template issue<share * b_copy::steps / shares, (share + 1) * b_copy::steps / shares>(
          stage + a_copy::bytes + i * b_copy::bytes, k_left_);
    }
  }

  __device__ __forceinline__ void next_k_block() {
    a_.next_k_block();
#pragma unroll
    for (int i = 0; i < b_operands; ++i) b_[i].next_k_block();
    k_left_ -= bk;
    if constexpr (concatenates) {
      if (--first_pair_blocks_ == 0) {
        a_.move(a_jump_);
        b_[0].move(b_jump_);
        k_left_ = second_k_;
      }
    }
  }

 private:
  // Operand number `index` of B: of grouped rows the group's.
  static __device__ __forceinline__ const T* operand_b(const gemm_params& p, int group, int index) {
    constexpr bool packed = form.b_packing != packing::separate;
    const void* own = index == 0 || packed ? p.b[0][0] : p.b[0][1];
    if constexpr (form.is_qkv()) own = p.b[group / 2][group % 2];  // of q, k or v
    if constexpr (gathers_rows && !form.stacked) {
      if (group != 0) own = index == 0 ? p.b[1][0] : p.b[1][1];
    }
    const T* const b = static_cast<const T*>(own);
    if constexpr (gathers_rows && form.stacked) {
      const i64 matrix = static_cast<i64>(p.n) * p.k;
      if constexpr (form.b_packing == packing::halves) return b + (2 * group + index) * matrix;
      if constexpr (form.b_packing == packing::interleaved) {
        return b + 2 * group * matrix + index * (b_mn_major ? p.n : p.k);
      }
      return b + group * matrix;
    }
    return b;
  }

  a_copy a_;
  b_copy b_[b_operands];
  int k_left_;  // elements from the start of the next K block to the end of this block's range
  // Of two K-concatenated pairs: the K blocks to the end of the first, and how to go on from there.
  int first_pair_blocks_, second_k_;
  i64 a_jump_, b_jump_;
};

}  // namespace fftune
