// The simt engine: C = epilogue(A B^T) with fp32 FMA, for any sizes, alignment, element types,
// form, grouping and epilogue: the fallback. Every load and store is one element, so nothing has to
// be a multiple of anything.
//
//   block          256 threads, one work tile of 64 x 64 elements of C: 4 x 4 accumulators a thread
//                  (64 x 128 in two halves, where the kernel finds the scales of C's 128-element
//                  blocks)
//
//        global memory          shared memory                      registers
//     A ------ to_float ----->  a    [16][64 + 1]    -- FMA -->  accumulators[4][4][B operands]
//     B ------ to_float ----->  b0   [16][64 + 1]                      |
//                               (b1) [16][64 + 1]                      |
//     C <------------------------------ epilogue_ops, one rounding ----+
//                               the groups, and the tile's rows or the K block's tokens
//
//   barriers       __syncthreads before and after each K block of 16 is stored
//
// Elements of k are added up in ascending order, a group's tokens in that of the sorted order. With
// block scales, each 128 elements of k have a sum of their own, which is scaled and then added.
#include "common/vectors.cuh"
#include "gemm/epilogue_ops.cuh"
#include "gemm/head_row.cuh"
#include "gemm/simt/config.cuh"
#include "gemm/tile_scheduler.cuh"

namespace fftune {

template <gemm_form form>
class simt_kernel {
  using ops = epilogue_ops<form>;
  using ab = element_type<form.ab>;
  using out = element_type<form.c>;
  using wide = element_type<form.wide>;
  static constexpr int b_operands = form.b_operands(), stored_values = form.stored_values();
  static constexpr int bm = simt_config::bm, bk = simt_config::bk, threads = simt_config::threads;
  static constexpr int half_columns = simt_config::half_columns;
  static constexpr int halves = (simt_config::bn(form) + half_columns - 1) / half_columns;
  static constexpr int side = 16, per_thread = bm / side;  // the grid of threads over a half
  static constexpr int padded = bm + 1;  // the transposing stores then hit different banks
  static constexpr bool groups_rows = form.groups == grouping::rows;
  static constexpr bool groups_tokens = form.groups == grouping::reduction;
  static constexpr bool scales_in_blocks =
      form.scales == scaling::block || form.scales == scaling::channel;
  static constexpr bool a_by_block = form.scales == scaling::block || form.a_scaled_by_block;
  static constexpr bool by_channel = form.scales == scaling::channel;
  static constexpr bool finds_scales = form.finds_scales();

  using scheduler = tile_scheduler<form, bm, simt_config::bn(form)>;
  template <bool in_memory, class Then, class Else>
  using choose = typename choose_type<in_memory, Then, Else>::type;
  using groups = choose<groups_tokens && form.source == group_source::routed, group_offsets,
                        groups_of<form.source>>;
  using tiles = group_tiles<groups_of<form.source>, group_tiling{.height = bm}>;
  static constexpr int group_words = groups_rows ? groups::shared_words + tiles::shared_words
                                                 : (groups_tokens ? groups::shared_words : 0);

  using accumulators = float[per_thread][per_thread][b_operands];

  // A matrix [rows, k] of B operand or A: where its elements are, and their scales.
  struct operand {
    const ab* matrix;
    const float* scale;
    i64 rows, k;
  };

 public:
  struct storage {
    float a[bk][padded];
    float b[b_operands][bk][padded];
    u32 rows_of_a[bm], rows_of_c[bm];      // grouped rows
    u32 tokens_of_a[bk], tokens_of_b[bk];  // grouped reduction: of the K block
    u32 words[group_words + 1];
  };

  static __device__ __forceinline__ void run(const plain_params& all_of, storage& shared) {
    const gemm_params& p = all_of.gemm;
    if constexpr (form.is_qkv()) {
      compute_head(all_of, scheduler::dense(p), shared);
    } else if constexpr (groups_rows) {
      const tiles all(groups::template build<threads>(p, p.m, shared.words),
                      shared.words + groups::shared_words);
      const work_tile tile = scheduler::grouped_rows(p, all);
      if (!tile.is_valid) return;
      if (threadIdx.x < tile.rows) {
        const u32 sorted = tile.sorted + threadIdx.x;
        const u32 row = all.groups().row_of(tile.group, tile.first_m + threadIdx.x);
        shared.rows_of_a[threadIdx.x] = form.a_sorted ? sorted : row;
        shared.rows_of_c[threadIdx.x] = form.c_sorted ? sorted : row;
      }
      __syncthreads();
      compute(p, tile, all.groups(), shared);
    } else if constexpr (groups_tokens) {
      const groups all = groups::template build<threads>(p, p.k, shared.words);
      compute(p, scheduler::grouped_reduction(p, all), all, shared);
    } else {
      compute(p, scheduler::dense(p), 0, shared);
    }
  }

 private:
  static __device__ __forceinline__ int row_of_thread() { return threadIdx.x / side; }
  static __device__ __forceinline__ int column_of_thread() { return threadIdx.x % side; }

  template <class Groups>
  static __device__ __forceinline__ void compute(const gemm_params& p, const work_tile& tile,
                                                 const Groups& all, storage& shared) {
    accumulators sum[halves] = {};
#pragma unroll
    for (int half = 0; half < halves; ++half) {
      const i64 first_n = tile.first_n + half * half_columns;
#pragma unroll
      for (int pair = 0; pair < form.k_pairs(); ++pair) {
        mainloop(sum[half], p, tile, first_n, pair, all, shared);
      }
    }
    store(sum, p, tile, shared);
  }

  // The head that is this tile.
  static __device__ __forceinline__ void compute_head(const plain_params& all,
                                                      const work_tile& tile, storage& shared) {
    const int part = all.qkv.part_of(tile.first_n);
    const int column = tile.first_n - all.qkv.first_column(part);  // of the part
    accumulators sum[halves] = {};
#pragma unroll
    for (int half = 0; half < halves; ++half) {
      const int of_b = (form.qkv.separate ? column : tile.first_n) + half * half_columns;
      work_tile own = tile;
      own.group = form.qkv.separate ? part : 0;
      const int end = of_b - half * half_columns + form.qkv.dim;
      mainloop(sum[half], all.gemm, own, of_b, 0, 0, shared, end);
    }
    store_head(sum, all, tile, part, column);
  }

  // --- loading -----------------------------------------------------------------------------------

  // Operand number `index` of B: of grouped rows the group's.
  static __device__ __forceinline__ operand operand_b(const gemm_params& p, int group, int index,
                                                      i64 last_row = 0) {
    operand b{static_cast<const ab*>(p.b[0][index]), p.b_scale[index], p.n, p.k};
    if constexpr (form.is_qkv()) {
      b.matrix = static_cast<const ab*>(p.b[group / 2][group % 2]);
      b.rows = last_row;
    }
    if constexpr (groups_rows) {
      if constexpr (form.stacked) {
        const i64 matrix = static_cast<i64>(p.n) * p.k;
        if constexpr (form.b_packing == packing::halves) {
          b.matrix += (2 * group + index) * matrix;
        } else if constexpr (form.b_packing == packing::interleaved) {
          b.matrix += 2 * group * matrix + index * (form.b_major == major::mn ? p.n : p.k);
        } else {
          b.matrix += group * matrix;
        }
      } else if (group != 0) {
        b.matrix = static_cast<const ab*>(p.b[1][index]);
      }
      const i64 scales = by_channel         ? p.n
                         : scales_in_blocks ? static_cast<i64>(blocks_of(p.n)) * blocks_of(p.k)
                                            : 1;
      b.scale += scales * (form.b_packing == packing::halves ? 2 * group + index : group);
    }
    return b;
  }

  // An element as a number; of a grouped reduction, whose tokens may share no block, with its
  // scale.
  template <major layout, int scale_rows, bool interleaved = false>
  static __device__ __forceinline__ float element_at(const operand& from, i64 row, i64 k) {
    constexpr int rows_beside = interleaved ? 2 : 1;
    const float value = to_float(from.matrix[layout == major::mn ? k * from.rows * rows_beside + row
                                                                 : row * from.k * rows_beside + k]);
    if constexpr (groups_tokens && scales_in_blocks) {
      return value *
             from.scale[row / scale_rows * blocks_of(static_cast<int>(from.k)) + k / scale_block];
    }
    return value;
  }

  // --- main loop ---------------------------------------------------------------------------------

  // Adds the products of one K-concatenated pair.
  template <class Groups>
  static __device__ __forceinline__ void mainloop(accumulators& sum, const gemm_params& p,
                                                  const work_tile& tile, i64 first_n, int pair,
                                                  const Groups& all, storage& shared,
                                                  i64 end_n = 0) {
    const operand a{static_cast<const ab*>(tile.output == 1 || pair == 1 ? p.a[1] : p.a[0]),
                    p.a_scale, p.m, p.k};
    operand b[b_operands];
#pragma unroll
    for (int index = 0; index < b_operands; ++index) {
      // Columns past the end of a head are computed but not used, and may be past the weight's end.
      b[index] = operand_b(p, tile.group, form.k_pairs() == 2 ? pair : index, end_n);
    }
    accumulators part = {};  // of a block of 128 of k
    for (i64 first_k = 0; first_k < tile.k; first_k += bk) {
      __syncthreads();  // the K block before this one is read
      if constexpr (groups_tokens) {
        list_tokens(tile, all, first_k, shared);
        __syncthreads();
      }
      load(a, b, tile, first_n, first_k, shared);
      __syncthreads();
      if constexpr (scales_in_blocks && !groups_tokens) {
        multiply(part, shared);
        const i64 end = first_k + bk;
        if (end % scale_block == 0 || end >= tile.k) {
          promote(sum, part, a, b, tile, first_n, static_cast<int>(first_k / scale_block), shared);
        }
      } else {
        multiply(sum, shared);
      }
    }
    __syncthreads();
  }

  // Where the tokens of a K block are in A and in B.
  template <class Groups>
  static __device__ __forceinline__ void list_tokens(const work_tile& tile, const Groups& all,
                                                     i64 first_k, storage& shared) {
    const u32 rank = static_cast<u32>(first_k) + threadIdx.x;
    if (threadIdx.x >= bk || rank >= tile.k) return;
    const u32 token = form.a_sorted && form.b_sorted ? 0 : all.row_of(tile.group, rank);
    shared.tokens_of_a[threadIdx.x] = form.a_sorted ? tile.sorted + rank : token;
    shared.tokens_of_b[threadIdx.x] = form.b_sorted ? tile.sorted + rank : token;
  }

  static __device__ __forceinline__ void load(const operand& a, const operand (&b)[b_operands],
                                              const work_tile& tile, i64 first_n, i64 first_k,
                                              storage& shared) {
#pragma unroll
    for (int i = threadIdx.x; i < bm * bk; i += threads) {
      // Neighbouring threads read neighbouring elements.
      const bool a_mn = form.a_major == major::mn, b_mn = form.b_major == major::mn;
      const int row = a_mn ? i % bm : i / bk, a_k = a_mn ? i / bm : i % bk;
      const int column = b_mn ? i % bm : i / bk, b_k = b_mn ? i / bm : i % bk;
      float value = 0;
      if (row < tile.rows && first_k + a_k < tile.k) {
        const i64 at_m = groups_rows ? shared.rows_of_a[row] : tile.first_m + row;
        const i64 at_k = groups_tokens ? shared.tokens_of_a[a_k] : first_k + a_k;
        value = element_at<form.a_major, 1>(a, at_m, at_k);
      }
      shared.a[a_k][row] = value;
#pragma unroll
      for (int index = 0; index < b_operands; ++index) {
        value = 0;
        if (first_n + column < b[index].rows && first_k + b_k < tile.k) {
          const i64 at_k = groups_tokens ? shared.tokens_of_b[b_k] : first_k + b_k;
          value = element_at<form.b_major, scale_block, form.b_packing == packing::interleaved>(
              b[index], first_n + column, at_k);
        }
        shared.b[index][b_k][column] = value;
      }
    }
  }

  static __device__ __forceinline__ void multiply(accumulators& sum, const storage& shared) {
    const int row = row_of_thread(), column = column_of_thread();
#pragma unroll
    for (int at = 0; at < bk; ++at) {
#pragma unroll
      for (int i = 0; i < per_thread; ++i) {
#pragma unroll
        for (int j = 0; j < per_thread; ++j) {
#pragma unroll
          for (int index = 0; index < b_operands; ++index) {
            sum[i][j][index] +=
                shared.a[at][row + i * side] * shared.b[index][at][column + j * side];
          }
        }
      }
    }
  }

  // Adds a block of 128 of k by its scales, and begins the next.
  static __device__ __forceinline__ void promote(accumulators& sum, accumulators& part,
                                                 const operand& a, const operand (&b)[b_operands],
                                                 const work_tile& tile, i64 first_n, int block,
                                                 const storage& shared) {
    const int row = row_of_thread(), column = column_of_thread();
    const i64 blocks = blocks_of(static_cast<int>(a.k));
#pragma unroll
    for (int i = 0; i < per_thread; ++i) {
#pragma unroll
      for (int j = 0; j < per_thread; ++j) {
        const int line = row + i * side;
        const i64 at_n = first_n + column + j * side;
        if (line < tile.rows && at_n < b[0].rows) {
          const i64 at_m = groups_rows ? shared.rows_of_a[line] : tile.first_m + line;
          const float a_scale = a.scale[a_by_block ? at_m * blocks + block : at_m];
#pragma unroll
          for (int index = 0; index < b_operands; ++index) {
            const float b_scale =
                b[index].scale[by_channel ? at_n : at_n / scale_block * blocks + block];
            part[i][j][index] *= a_scale * b_scale;
            sum[i][j][index] += part[i][j][index];
          }
        }
#pragma unroll
        for (int index = 0; index < b_operands; ++index) part[i][j][index] = 0;
      }
    }
  }

  // --- epilogue ----------------------------------------------------------------------------------

  static __device__ __forceinline__ void store(accumulators (&sum)[halves], const gemm_params& p,
                                               const work_tile& tile, const storage& shared) {
    const int row = row_of_thread(), column = column_of_thread();
#pragma unroll
    for (int i = 0; i < per_thread; ++i) {
      const int line = row + i * side;
      const bool row_exists = line < tile.rows;
      i64 at_m = tile.first_m + line;
      if constexpr (groups_rows) at_m = row_exists ? shared.rows_of_c[line] : 0;
      if constexpr (groups_tokens && form.stacked) at_m += static_cast<i64>(tile.group) * p.m;
      float value[halves][per_thread], largest = 0;
#pragma unroll
      for (int half = 0; half < halves; ++half) {
#pragma unroll
        for (int j = 0; j < per_thread; ++j) {
          const i64 at_n = tile.first_n + half * half_columns + column + j * side;
          value[half][j] = 0;
          if (row_exists && at_n < p.n) {
            value[half][j] = finish(sum[half][i][j], p, tile, at_m, at_n);
          }
          largest = larger_magnitude::join(largest, fabsf(value[half][j]));
        }
      }
      if constexpr (finds_scales) {
#pragma unroll
        for (int lane = 1; lane < side; lane *= 2) {
          largest = larger_magnitude::join(largest, __shfl_xor_sync(~0u, largest, lane));
        }
        const float scale = scale_of<fp8>(largest);
        if (!row_exists) continue;
        if (column == 0) p.c_scale[at_m * blocks_of(p.n) + tile.first_n / scale_block] = scale;
#pragma unroll
        for (int half = 0; half < halves; ++half) {
#pragma unroll
          for (int j = 0; j < per_thread; ++j) {
            const i64 at_n = tile.first_n + half * half_columns + column + j * side;
            if (at_n < p.n) put_c(p, tile, at_m * p.n + at_n, value[half][j] / scale);
          }
        }
      }
    }
  }

  // One row of threads has a row of the head. Its neighbours' features come by way of shared
  // memory.
  static __device__ __forceinline__ void store_head(accumulators (&sum)[halves],
                                                    const plain_params& all, const work_tile& tile,
                                                    int part, int first) {
    constexpr int dim = form.qkv.dim, rotary = form.qkv.rotary;
    __shared__ float heads[side][dim];
    const int row = row_of_thread(), lane = column_of_thread();
    const int width = all.qkv.columns(part);
    float* const head = heads[row];
#pragma unroll
    for (int i = 0; i < per_thread; ++i) {
      const int line = row + i * side;
      const i64 at_m = tile.first_m + (line < tile.rows ? line : 0);
      float squares = 0;
#pragma unroll
      for (int at = 0; at < halves * per_thread; ++at) {
        const int feature = lane + at * side;
        float value = sum[at / per_thread][i][at % per_thread][0];
        if (feature < dim) {
          if constexpr (form.qkv.bias) {
            const void* const bias = all.qkv.bias[form.qkv.separate ? part : 0];
            const int column = (form.qkv.separate ? first : tile.first_n) + feature;
            value += to_float(static_cast<const wide*>(bias)[column]);
          }
          head[feature] = value;
          squares += value * value;
        }
      }
      if (form.qkv.normalises && part < 2) {
#pragma unroll
        for (int other = 1; other < side; other *= 2) {
          squares += __shfl_xor_sync(~0u, squares, other);
        }
        const float factor = 1 / sqrtf(squares / dim + all.qkv.epsilon);
        for (int feature = lane; feature < dim; feature += side) {
          head[feature] *=
              factor * (all.qkv.norm_offset +
                        to_float(static_cast<const wide*>(all.qkv.norms[part])[feature]));
        }
      }
      __syncwarp();
      i64 to_row = at_m;
      if constexpr (form.qkv.caches) {
        if (part > 0) to_row = slot_of<form.qkv>(all.qkv, at_m);
      }
      if (line < tile.rows && to_row >= 0) {
        out* const to = static_cast<out*>(all.gemm.c[part / 2][part % 2]) +
                        place_in_part<form>(all.qkv, part, to_row, first);
        for (int feature = lane; feature < dim; feature += side) {
          float value = head[feature];
          if constexpr (form.qkv.rotates()) {
            if (part < 2 && feature < rotary) {
              constexpr bool halves_of = form.qkv.rotation == head_rotation::halves;
              const bool is_first = halves_of ? feature < rotary / 2 : feature % 2 == 0;
              const int distance = halves_of ? rotary / 2 : 1;
              const int pair = halves_of ? feature % (rotary / 2) : feature / 2;
              const float2 turn =
                  reinterpret_cast<const float2*>(all.qkv.sines)[at_m * (rotary / 2) + pair];
              const float partner = head[is_first ? feature + distance : feature - distance];
              value = value * turn.x + (is_first ? -partner : partner) * turn.y;
            }
          }
          to[feature] = from_float<out>(value);
        }
      }
      __syncwarp();
    }
  }

  static __device__ __forceinline__ void put_c(const gemm_params& p, const work_tile& tile, i64 at,
                                               float value) {
    static_cast<out*>(ops::destination(p, 0, tile.output, tile.group))[at] = from_float<out>(value);
  }

  // An element of C, in the units of its scale if the scale is given. Stores it, unless its scale
  // is computed from it, and the additional stored values.
  static __device__ __forceinline__ float finish(float (&sum)[b_operands], const gemm_params& p,
                                                 const work_tile& tile, i64 at_m, i64 at_n) {
    const i64 at = at_m * p.n + at_n;
    if constexpr (form.scales == scaling::tensor) {
#pragma unroll
      for (int index = 0; index < b_operands; ++index) {
        const operand b = operand_b(p, tile.group, index);
        sum[index] *= *p.a_scale * *b.scale;
      }
    }
    if constexpr (group_terms<form>::present) {
      const float factor = group_terms<form>::factor(p, at_m);
#pragma unroll
      for (int index = 0; index < b_operands; ++index) {
        sum[index] = sum[index] * factor +
                     group_terms<form>::bias(p, tile.group, index, static_cast<int>(at_n));
      }
    }
    if constexpr (form.is_gradient()) {
      float result[stored_values];
      ops::gradient(sum[0], to_float(static_cast<const wide*>(p.gate)[at]),
                    to_float(static_cast<const wide*>(p.up)[at]), result);
#pragma unroll
      for (int i = 0; i < stored_values; ++i) {
        static_cast<out*>(ops::destination(p, i, tile.output))[at] = from_float<out>(result[i]);
      }
      return result[0];
    } else {
      float value = ops::apply_broadcasts(p.broadcasts, at_n, ops::value(sum));
      if constexpr (form.adds_source) {
        value += to_float(ops::source(p, tile.output, tile.group)[at]);
      }
      if constexpr (form.scales == scaling::tensor && form.c_quantised) value *= 1.0f / *p.c_scale;
      if constexpr (form.stores_preactivations) {
        static_cast<wide*>(p.gate)[at] = from_float<wide>(sum[0]);
        static_cast<wide*>(p.up)[at] = from_float<wide>(sum[b_operands - 1]);
      }
      if constexpr (!finds_scales) put_c(p, tile, at, value);
      return value;
    }
  }
};

// Grid: work tiles, in one dimension because only that one may pass 65,535. Block: 256 threads.
template <gemm_form form>
__global__ void __launch_bounds__(simt_config::threads)
    simt_gemm(const __grid_constant__ plain_params p) {
  __shared__ typename simt_kernel<form>::storage shared;
  simt_kernel<form>::run(p, shared);
}

}  // namespace fftune
