// The parameters of a GEMM kernel: one struct, passed by value. Included by host and device code.
// The host writes fields by their offsets (gemm/launch.hpp) and leaves those that a problem does
// not use.
#pragma once

#include "gemm/qkv.cuh"
#include "gemm/row_broadcast.cuh"

namespace fftune {

struct gemm_params {
  // Matrices, row-major. The second a belongs to the second K-concatenated pair, or output.
  const void* a[2];
  // [group][operand]; one stacked tensor of all groups: b[0]; qkv: those of the parts
  const void* b[2][2];
  void* c[2][2];             // [group][output]; groups only in a grouped reduction; qkv: as b.
  const void* source[2][2];  // Added to C; indexed as c.
  const void* broadcasts[row_broadcasts];  // [n] each.
  const float* row_weights;                // [m], by sorted rows.
  const void* group_bias[2];  // [groups, n] for each B operand; packed as B is: the first alone.
  void* gate;                 // [m, n], written (gated) or read (activation_gradient), as up.
  void* up;
  void* d_up;
  void* hidden;
  const float* a_scale;
  const float* b_scale[2];
  float* c_scale;  // read with Scaling::tensor, written with Scaling::block

  const unsigned char* mask;  // u8 [tokens]
  const int* offsets;         // [groups + 1]
  const int* permutation;     // [tokens]
  const int* ids;             // [id_count]: the groups of the choices that are sorted
  int groups, id_count;
  int whole_groups;  // the last ones, with a row of each token

  int m, n, k;  // k of one K-concatenated pair; of a grouped reduction all tokens
  int group_m;  // tile rows in a band of the raster order
  int split_k;
  unsigned*
      split_counters;     // split-K through a workspace: [tiles], zero before and after; else null
  float* split_partials;  // [tiles, split_k, elements of a tile]

  const void* norm_of_a;  // [k]: weights of the row norm
  float norm_epsilon;
};

// Parameters of engines that need no tensor maps.
struct plain_params {
  gemm_params gemm;
  qkv_params qkv;  // epilogue qkv
};

// Parameters of engines that compute the sines of rotated heads themselves.
struct angle_params : plain_params {
  head_angles angles;
};
template <int pairs>
struct rotating_params : angle_params {
  pair_frequencies<pairs> frequencies;
};

}  // namespace fftune
