// The product of a rank's slice whose result is a summand of a group's, by the sm_90a GEMM:
// y = residual + the sum over the ranks of A B^T, in one launch. It is gemm_sm90 with another
// epilogue; tiles, pipeline and split-K are its own (gemm/sm90/gemm.cu).
//
//   accumulators ── round ── stmatrix ──> epilogue stage ──> words ──> peers
//                                               └── own ──┬── peers' words of the same rows
//                                     residual ───────────┴──> y
//
// A warpgroup sends all of its subtiles before it waits for the peers'. Summands are rounded to the
// type of y, as those of a product with a kernel of its own are (words.cuh).
#include "all_reduce/product_sm90.cuh"
#include "all_reduce/words.cuh"
#include "gemm/sm90/gemm.cu"

namespace fftune {

template <gemm_form form_, sm90_config config_, int ranks_, bool adds_>
struct summed_traits : sm90_traits<form_, config_> {
  static constexpr int ranks = ranks_;
  static constexpr bool adds = adds_;
};

template <class Traits>
struct summed_epilogue : value_epilogue<Traits> {
  using base = value_epilogue<Traits>;
  using typename base::fragment, typename base::Wide;
  static constexpr auto plan = Traits::plan;
  static constexpr int ranks = Traits::ranks, elements = 8;  // of 16 bytes
  static constexpr int chunks = plan.subtile_n / elements, row_step = 128 / chunks;
  static constexpr int rows = (plan.subtile_m + row_step - 1) / row_step;  // of a thread
  using vector = aligned_vector<Wide, elements>;
  static_assert(sizeof(Wide) == 2);

  using base::base;

  __device__ __forceinline__ void store(const fragment& acc, const output_tile& to) {
    const auto& all = reinterpret_cast<const summed_sm90_params&>(this->params);
    const int thread = threadIdx.x % 128;
    const u64 policy = l2_eviction_policy<false>();
    wait_for_dependencies();  // the producers have, and so this returns at once
    peer_group<ranks> group(all.table, all.loopback, all.tag);
    sent_words::require_room(group, static_cast<i64>(this->gemm.m) * this->gemm.n / elements);
    if (blockIdx.x == 0 && this->warpgroup == 0) group.send_greeting(thread);
    const auto row_of = [&](int i) { return to.row + thread / chunks + i * row_step; };
    const auto column_of = [&](int subtile) {
      return to.column + subtile * plan.subtile_n + thread % chunks * elements;
    };
    const auto exists = [&](int subtile, int i) {
      return thread / chunks + i * row_step < plan.subtile_m && row_of(i) < this->gemm.m &&
             column_of(subtile) < this->gemm.n;
    };
    const auto place = [&](int subtile, int i) {
      return static_cast<i64>(row_of(i)) * this->gemm.n + column_of(subtile);
    };

    // Sends all subtiles. Its own summands wait in C: in registers they would be too many.
    Wide* const kept = static_cast<Wide*>(this->gemm.c[0][0]);
#pragma unroll
    for (int subtile = 0; subtile < plan.subtiles; ++subtile) {
      const u32 buffer = this->stages.buffer(this->stages.take());
      this->sync_warpgroup();  // the stage's last subtile is read
      if constexpr (base::swap_ab) {
        this->template write_swapped<0>(acc, buffer, subtile, thread, 0);
      } else {
        this->template write<0>(acc, buffer, subtile, thread, 0);
      }
      this->sync_warpgroup();
#pragma unroll 1
      for (int i = 0; i < rows; ++i) {
        if (!exists(subtile, i) || group.failed) continue;
        const float4 words = load_shared(
            buffer + chunk_offset<plan.subtile_n>(thread / chunks + i * row_step, thread % chunks));
        const vector own = {__float_as_uint(words.x), __float_as_uint(words.y),
                            __float_as_uint(words.z), __float_as_uint(words.w)};
#pragma unroll
        for (int p = 0; p < ranks; ++p) {
          if (!group.is_peer(p)) continue;
          sent_words::send(sent_words::at_peer(group, p), place(subtile, i) / elements, own);
        }
        store_once(kept + place(subtile, i), own, policy);
      }
    }

    // Adds them, a few rows at a time, whose loads are in flight together.
    constexpr int batch = rows < 4 ? rows : 4;
#pragma unroll 1
    for (int step = 0; step < plan.subtiles * ((rows + batch - 1) / batch); ++step) {
      const int subtile = step % plan.subtiles, first = step / plan.subtiles * batch;
      const auto valid = [&](int i) { return first + i < rows && exists(subtile, first + i); };
      vector own[batch], others[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        const i64 at = place(subtile, first + i);
        own[i] = load_once<Wide, elements>(kept + at, valid(i), policy);
        if constexpr (Traits::adds)
          others[i] = load_once<Wide, elements>(static_cast<const Wide*>(all.residual) + at,
                                                valid(i), policy);
      }
      float total[batch][elements];
      sent_words::add_up(group, own, total, valid,
                         [&](int i) { return place(subtile, first + i) / elements; });
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        if (!valid(i) || group.failed) continue;
        if constexpr (Traits::adds) {
          float summand[elements];
          to_floats(others[i], summand);
#pragma unroll
          for (int e = 0; e < elements; ++e) total[i][e] += summand[e];
        }
        store_once(static_cast<Wide*>(all.y) + place(subtile, first + i),
                   from_floats<Wide>(total[i]), policy);
      }
    }
  }
};

template <gemm_form form, sm90_config config, int ranks, bool adds>
struct epilogue_choice<summed_traits<form, config, ranks, adds>, epilogue_kind::linear> {
  using type = summed_epilogue<summed_traits<form, config, ranks, adds>>;
};

template <gemm_form form, sm90_config config, int ranks, bool adds>
__global__ void __launch_bounds__(sm90_plan_of(form, config).threads,
                                  sm90_plan_of(form, config).ctas_per_sm)
    summed_gemm_sm90(const __grid_constant__ summed_sm90_params params) {
  extern __shared__ unsigned char shared_memory[];
  gemm_kernel<summed_traits<form, config, ranks, adds>>::run(params.gemm, shared_memory);
  // The producers have given their registers away, and are done.
  constexpr int mma_threads = config.mma_warpgroups * 128;
  if (threadIdx.x >= mma_threads) return;
  wait_for_dependencies();
  named_barrier_sync(0, mma_threads);
  peer_group<ranks> group(params.table, params.loopback, params.tag);
  if (blockIdx.x == 0 && threadIdx.x < 32) group.await_greeting(static_cast<int>(threadIdx.x));
  named_barrier_sync(0, mma_threads);
  if (threadIdx.x == 0) group.finish();
}

}  // namespace fftune
