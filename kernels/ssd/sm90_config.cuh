// The configuration, the shared memory and the parameters of the kernel of chunks by wgmma
// (sm90.cu). Included by host and device code.
#pragma once

#include "ssd/params.cuh"

namespace fftune {

constexpr int ssd_sm90_chunk = 64;     // tokens, the rows of a wgmma
constexpr int ssd_sm90_threads = 512;  // producer, state and two output warpgroups

struct ssd_sm90_config {
  int rows = 64;    // of a head's state that a CTA has at most: 32, 64 or 128
  int stages = 4;   // chunks in shared memory
  int cluster = 1;  // CTAs that load B and C once for all of them, by multicast
};

// Arrays of 64 floats of a chunk's tokens, with G the sums of dt A log2(e) in the chunk.
enum class ssd_sm90_factor {
  sum,     // G
  before,  // G - log2(dt): 2^(sum - before) is exp(G_i - G_j) dt_j
  decay,   // 2^G
  write,   // 2^(G_last - G) dt
  count
};

// Tiles have rows of `slab_row` bytes of columns, or of 128 bytes of features, under the swizzle of
// that width; slabs of columns or of features follow each other.
struct ssd_sm90_plan {
  int columns;              // of x, out and Sᵀ in a CTA
  int slab_row, slabs;      // of these
  int feature_slabs;        // of B and C, 64 features each
  int c_tile, b_tile;       // bytes of B or C, and offsets in a stage
  int x_tile, x_bytes;      // [slabs][64 tokens][slab_row]
  int factors, stage;       // the stage's end is that of the factors
  int states, state_bytes;  // two of [slabs][state_dim][slab_row]
  int out, out_bytes;       // of each output warpgroup [slabs][64 tokens][slab_row]
  int barriers, bytes;
  int out_registers, state_registers, producer_registers;
};
constexpr ssd_sm90_plan ssd_sm90_plan_of(int dim, int state_dim, ssd_sm90_config c) {
  ssd_sm90_plan plan{};
  plan.columns = c.rows < dim ? c.rows : dim;
  plan.slab_row = plan.columns <= 32 ? 64 : 128;
  plan.slabs = (2 * plan.columns + plan.slab_row - 1) / plan.slab_row;
  plan.feature_slabs = state_dim / 64;
  const int tile = plan.feature_slabs * ssd_sm90_chunk * 128;
  plan.c_tile = 0;
  plan.b_tile = tile;
  plan.x_tile = 2 * tile;
  plan.x_bytes = plan.slabs * ssd_sm90_chunk * plan.slab_row;
  plan.factors = plan.x_tile + plan.x_bytes;
  plan.stage = plan.factors + static_cast<int>(ssd_sm90_factor::count) * ssd_sm90_chunk * 4;
  plan.states = c.stages * plan.stage;
  plan.state_bytes = plan.slabs * state_dim * plan.slab_row;
  plan.out = plan.states + 2 * plan.state_bytes;
  plan.out_bytes = plan.x_bytes;
  plan.barriers = plan.out + 2 * plan.out_bytes;
  plan.bytes = plan.barriers + 8 * (2 * c.stages + 5);
  // 512 registers of the four warpgroups' threads.
  plan.producer_registers = 40;
  plan.out_registers = 144;
  plan.state_registers = 512 - plan.producer_registers - 2 * plan.out_registers;
  return plan;
}
// Floats of a thread of the state warpgroup.
constexpr int ssd_sm90_accumulators(int dim, int state_dim, ssd_sm90_config c) {
  return state_dim / 64 * ssd_sm90_plan_of(dim, state_dim, c).columns / 2;
}

struct ssd_sm90_params {
  ssd_params ssd;
  tensor_map C;  // [tokens, c-row], boxes of 64 tokens and 64 features
  tensor_map B;  // as C
  tensor_map x;  // [tokens, x-row], boxes of 64 tokens and slab_row bytes
};

}  // namespace fftune
