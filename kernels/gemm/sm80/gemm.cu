// The sm80 engine: C = epilogue(A B^T) with cp.async and mma.sync, for sm_80 and newer.
//
// Row-major 16-bit matrices, 16-byte aligned rows and pointers, m >= 1. A block computes one work
// tile, of bm x bn elements of C (of both products where there are two B operands).
//
//   warps          warps_m x warps_n over the tile; all of them load and all of them compute
//
//        global memory             shared memory                           registers
//                            +---------------------------+
//                            | tables of grouped rows    |  mask: the groups, then the tile's rows
//                            +---------------------------+        of A and of C
//                            | epilogue's tile, 128 B    |  what only the epilogue needs
//          cp.async, 16 B    +---------------------------+
//     A ------------------>  | stage 0:  A   B0 (B1)     |  ldmatrix     fragments,   mma.sync
//     B ------------------>  | stage 1:  A   B0 (B1)     | ----------->  two sets   ----------+
//                            |  ...  (stages)            |                                    v
//                            +---------------------------+                             accumulators
//                            | the same bytes afterwards:|                                    |
//          16 B rows         |  split-K reduction        | <----------------------------------+
//     C <------------------  |  output tile, padded      |  epilogue_ops, one rounding
//                            +---------------------------+
//
//   barriers       one __syncthreads per K block: it publishes the next stage, whose cp.async group
//                  is complete, and frees the one before for the copies stages - 1 K blocks ahead
//   split-K        the split_k blocks of a tile (blockIdx.y) are a cluster from sm_90 on, and add
//                  their accumulators up through its shared memory; elsewhere through a workspace
//
// load.cuh: the copies' sources. mainloop.cuh: the loop over K blocks. epilogue.cuh: the epilogue
// of the accumulators, heads_epilogue.cuh: that of heads. tile_scheduler.cuh: which tile a block
// has.
#include "common/async.cuh"
#include "gemm/sm80/epilogue.cuh"
#include "gemm/sm80/heads_epilogue.cuh"
#include "gemm/split_k.cuh"

namespace fftune {

template <gemm_form form, sm80_config config>
class sm80_kernel {
  using scheduler = tile_scheduler<form, config.bm, config.bn>;
  // A grouped reduction by a mask has its tokens sorted by a kernel before (sort_tokens.cu).
  static_assert(form.groups != grouping::reduction || form.source == group_source::routed);
  using groups = groups_of<form.source>;
  using tiles = group_tiles<groups, group_tiling{.height = config.bm}>;
  using loader = operand_loader<form, config>;
  using mainloop = sm80_mainloop<form, config>;
  using epilogue = typename choose_type<form.is_qkv(), sm80_heads_epilogue<form, config>,
                                        sm80_epilogue<form, config>>::type;
  static constexpr int threads = config.threads();
  static constexpr int group_words = groups::shared_words + tiles::shared_words;
  static_assert(form.groups != grouping::rows ||
                group_words == sm80_config::group_words(form.source));

  static __device__ __forceinline__ const gemm_params& gemm_of(const gemm_params& p) { return p; }
  static __device__ __forceinline__ const gemm_params& gemm_of(const plain_params& p) {
    return p.gemm;
  }

  // The tile's rows of A and of C, for grouped rows.
  static __device__ __forceinline__ void list_rows(const groups& from, const work_tile& tile,
                                                   u32* rows_of_a, u32* rows_of_c) {
    const u32 rank = static_cast<u32>(tile.first_m);
    for (int row = threadIdx.x; row < tile.rows; row += threads) {
      const u32 sorted = tile.sorted + row;
      const u32 token =
          form.a_sorted && form.c_sorted ? sorted : from.row_of(tile.group, rank + row);
      rows_of_a[row] = form.a_sorted ? sorted : token;
      rows_of_c[row] = form.c_sorted ? sorted : token;
    }
  }

 public:
  // Those of heads, or of a GEMM without any.
  using params = typename choose_type<form.is_qkv(), plain_params, gemm_params>::type;

  static __device__ __forceinline__ void run(const params& all, unsigned char* memory) {
    const gemm_params& p = gemm_of(all);
    u32* const words = reinterpret_cast<u32*>(memory);
    u32* const rows_of_a = words + group_words;
    u32* const rows_of_c = rows_of_a + config.bm;
    unsigned char* const tables_end = memory + config.table_bytes(form);
    auto& output = *reinterpret_cast<typename epilogue::tile_addresses*>(tables_end);
    unsigned char* const pipeline = tables_end + sm80_config::epilogue_tile_bytes;

    alignas(16) typename mainloop::accumulators sum = {};
    {
      work_tile tile;
      if constexpr (form.groups == grouping::rows) {
        const tiles own(groups::template build<threads>(p, p.m, words),
                        words + groups::shared_words);
        tile = scheduler::grouped_rows(p, own);
        if (!tile.is_valid) return;  // all splits of it
        list_rows(own.groups(), tile, rows_of_a, rows_of_c);
      } else if constexpr (form.groups == grouping::reduction) {
        tile = scheduler::grouped_reduction(p, group_offsets::build<threads>(p, p.k, words));
      } else {
        tile = scheduler::dense(p);
      }
      if constexpr (form.is_qkv()) {
        epilogue::locate(output, all.qkv, tile);
      } else {
        if (threadIdx.x == 0) epilogue::locate(output, p, tile, rows_of_c);
      }
      if constexpr (form.groups == grouping::rows) __syncthreads();  // the tile's rows are listed
      const k_block_range range(tile.k, config.bk, form.k_pairs(), p.split_k);
      loader load(p, tile, range, rows_of_a, threadIdx.x);
      mainloop::run(sum, load, range.count(), shared_address(pipeline));
    }
    if (p.split_k > 1) {
      if (!reduce_splits<threads>(reinterpret_cast<float4(&)[mainloop::vectors]>(sum), true,
                                  p.split_k, {p.split_counters, p.split_partials}, pipeline)) {
        return;
      }
      __syncthreads();  // the split-K reduction has been read
    }
    if constexpr (form.is_qkv()) {
      epilogue::store(sum, output, all, pipeline);
    } else {
      if constexpr (group_terms<form>::present) epilogue::apply_terms(sum, p, output);
      epilogue::store(sum, output, pipeline);
    }
  }
};

// Grid: (work tiles, split_k), with clusters of (1, split_k) where there are no split_counters.
// Block: config.threads(). Shared memory: config.shared_bytes(form).
template <gemm_form form, sm80_config config>
__global__ void __launch_bounds__(config.threads())
    sm80_gemm(const __grid_constant__ typename sm80_kernel<form, config>::params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  if constexpr (form.groups != grouping::none && form.source == group_source::routed) {
    wait_and_launch_dependents();  // the next kernel may take the groups for settled
  } else {
    launch_dependents();
    wait_for_dependencies();
  }
  sm80_kernel<form, config>::run(p, shared_memory);
}

}  // namespace fftune
