// The logits of a vocabulary and the best id of each token, for up to 16 tokens, sm_80 and newer,
// at the speed of reading the weights once: gemm/decode/stream.cuh. No logit reaches memory.
//
//   warp           `rows` rows of w at a time, over all of k. Tiles of rows go round all warps of
//                  the grid. Between tiles a warp adds its logits to the best ids and the sums of
//                  its tokens, and other warps have loads in flight.
//   lane           tokens lane / 4 (and 8 further), ids 2 (lane % 4) and the next of each 8 rows
//   parts          each warp writes a part for each token (common/choice.cuh); choose_finish of
//                  sample/choose.cu takes the best of them
//   dependencies   w is complete before the launch and is loaded first; the launch before may still
//                  write x, so the first load of x waits (griddepcontrol)
#include "common/async.cuh"
#include "common/choice.cuh"
#include "gemm/decode/stream.cuh"

namespace fftune {

struct head_config {
  int tokens;  // 8 or 16
  int rows;    // of a tile of w
  int warps;   // of a block
  int unroll;  // 16-byte loads of a row that a thread issues at once
  int blocks;  // of an SM
  bool bias, rounds, caps;
};

template <class T, choice_form form, head_config config>
__global__ void __launch_bounds__(config.warps * 32, config.blocks)
    choose_decode(const T* x, const T* w, const T* bias, const float* temperature, const i64* seeds,
                  const int* steps, choice_part* parts, float softcap, int m, int vocab, int k) {
  constexpr stream_shape shape{
      .operands = 1, .tokens = config.tokens, .rows = config.rows, .unroll = config.unroll};
  using stream = weight_stream<T, T, shape, load_path::read_only, stream_bounds::last_group>;
  constexpr int halves = shape.halves(), fragments = shape.n_fragments();
  const int lane = threadIdx.x % 32;
  const int warp = blockIdx.x * config.warps + threadIdx.x / 32, warps = gridDim.x * config.warps;
  const int tiles = ceil_div(vocab, config.rows);

  stream weights;
  const int lane_k = stream::lane_k();
#pragma unroll
  for (int half = 0; half < halves; ++half) {
    const int token = lane / 4 + half * 8;
    weights.exists[half] = token < m;
    weights.rows[half] = x + static_cast<i64>(token) * k + lane_k;
  }
  weights.left = larger(k - lane_k, 0);
  const u32 groups = ceil_div(static_cast<u32>(k), static_cast<u32>(stream::k_group));
  const u32 whole_groups = static_cast<u32>(k) / stream::k_group;

  launch_dependents();
  row_choice<form> best[halves];
  row_scores<form> scores[halves];
  bool waited = false;
  const auto ready = [&] {
    if (waited) return;
    wait_for_dependencies();
    waited = true;
#pragma unroll
    for (int half = 0; half < halves; ++half) {
      scores[half].softcap = config.caps ? softcap : 0.0f;
      if (weights.exists[half]) scores[half].load({temperature, seeds, steps}, lane / 4 + half * 8);
    }
  };
#pragma unroll 1
  for (int tile = warp; tile < tiles; tile += warps) {
    const int first = tile * config.rows;
#pragma unroll
    for (int j = 0; j < fragments; ++j) {
      const int row = smaller(first + j * 8 + lane / 4, vocab - 1);
      weights.weights[0][j] = w + static_cast<i64>(row) * k + lane_k;
#pragma unroll
      for (int i = 0; i < 4; ++i) weights.sum[0][j][i] = 0;
    }
    weights.run_groups(0, groups, 1, whole_groups, ready,
                       [](typename stream::token_group&, u32, bool) {});
#pragma unroll
    for (int j = 0; j < fragments; ++j) {
      const int id = first + j * 8 + lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < halves; ++half) {
        if (!weights.exists[half]) continue;
        const random_words words = scores[half].words(id / 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (id + i >= vocab) continue;
          float logit = weights.sum[0][j][half * 2 + i];
          if constexpr (config.bias) logit += to_float(bias[id + i]);
          if constexpr (config.rounds) logit = to_float(from_float<T>(logit));
          if constexpr (config.caps) logit = scores[half].cap(logit);
          if constexpr (form.sums) best[half].add_sum_of(logit);
          best[half].take(rank_of(scores[half].score(logit, words.word[id % 4 + i])), id + i,
                          logit);
        }
      }
    }
  }
  ready();  // a warp without a tile must not write before the kernels before are done
#pragma unroll
  for (int half = 0; half < halves; ++half) {
    best[half].add_lane(1);
    best[half].add_lane(2);
    if (lane % 4 == 0 && weights.exists[half])
      best[half].store(parts + static_cast<i64>(lane / 4 + half * 8) * warps + warp);
  }
}

}  // namespace fftune
