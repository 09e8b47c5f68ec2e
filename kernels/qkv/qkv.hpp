// The product in front of attention: the heads of q, k and v of x [m, d] in one GEMM, with its
// epilogue in gemm/qkv.cuh. The epilogue adds the bias, normalises the heads of q and k (Qwen3's
// q_norm and k_norm), and applies RoPE to them like the op rope, at a given position of each token.
// It writes q [m, heads, dim], k and v [m, kv_heads, dim].
//
// With a cache, row i of k and v goes to row slots[i] of k_cache and v_cache [slots, kv_heads,
// dim] instead, or nowhere if there is no such row. A contiguous cache [sequences, length] has the slot
// sequence * length + position, a paged one page * page_size + offset.
#pragma once

#include <cstdint>
#include <vector>

#include "core/problem.hpp"
#include "kernels/gemm/family.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in qkv/op.cpp; listed in kernels/catalog.cpp.
const Op& qkv_op();

namespace qkv {

constexpr const char* stage_product = "product";

constexpr std::int64_t most_features = 512;  // of a head
constexpr std::int64_t most_heads = 1024;

/// A problem's sizes and options, read once.
struct Layer {
  std::int64_t m = 0, d = 0;
  std::int64_t heads = 0, kv_heads = 0, dim = 0;
  std::int64_t rotary = 0;      // features of a head that are rotated
  std::int64_t positions = 0;   // rows of the table of angles
  std::int64_t cache_rows = 0;  // of the caches
  double epsilon = 0;
  double norm_offset = 0;  // added to the norms' weights
  head_rotation rotation = head_rotation::none;
  bool packed = false;  // one weight and bias, not three
  bool bias = false;
  bool norm = false;
  bool table = false;  // of angles
  bool cache = false;
  bool wide_slots = false;  // of 64 bits
  DType dtype = DType::f32;

  bool rotates() const { return rotation != head_rotation::none; }
  std::int64_t columns() const { return (heads + 2 * kv_heads) * dim; }
};
Layer layer_of(const Problem& problem);

/// The rule of the op rope: the frequency of each pair, none where there is a table, and the factor
/// of all sines and cosines.
struct Turns {
  std::vector<float> frequencies;
  float scale = 1;
};
Turns turns_of(const Problem& problem);

/// Computes the outputs in float64.
void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);

GemmProblem product_gemm(const Problem& problem);
std::vector<const Family*> families();
std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts);

}  // namespace qkv
}  // namespace fftune
