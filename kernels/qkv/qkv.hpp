// The product in front of attention: the heads of q, k and v of x [m, d] in one GEMM, with its
// epilogue in gemm/form.cuh. The epilogue adds the bias, normalises the heads of q and k (Qwen3's
// q_norm and k_norm), and applies RoPE to them like the op rope, at a given position of each token.
// It writes q [m, heads, dim], k and v [m, kv_heads, dim].
//
// With a cache, row i of k and v goes to row slots[i] of k_cache and v_cache [slots, kv_heads,
// dim] instead, or nowhere if there is no such row. A contiguous cache [sequences, length] has the
// slot sequence * length + position, a paged one page * page_size + offset. Heads of the caches may
// be further apart than dim (cache-head): keys and values of a head are then side by side, and
// v_cache begins dim elements after k_cache. Caches may be e4m3 with scales
// (common/cache_format.hpp), whatever the dtype of q.
//
// With keys=no there is q alone: of a layer that attends to another one's keys and values (Gemma
// 4).
//
// With gates=yes w_q has, behind the rows of each head, as many of its gate (Qwen3-Next). Their
// products go to gates [m, heads, dim] as they are.
//
// An epilogue has the heads of a tile. Other forms take a second stage (heads.cu) over the
// product's result in memory. They are norms over all heads of q, and of k (OLMo-2), layer
// normalisation of heads, norms behind RoPE (HunYuan), gates in the rows of q, and weights with
// alternating rows of q, k and v (GPT-NeoX, Falcon). So are q alone, norms of heads of v, which
// have no weights (Gemma 4), packed weights (gemm/packed), and weights of e4m3 for tokens that the
// op quantises (gemm/quantise), and caches of e4m3.
#pragma once

#include <cstdint>
#include <vector>

#include "core/problem.hpp"
#include "kernels/common/cache_format.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/gemm/family.hpp"
#include "kernels/gemm/packed/packed.hpp"
#include "kernels/gemm/quantise/quantise.hpp"
#include "kernels/rope/part.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in qkv/op.cpp; listed in kernels/catalog.cpp.
const Op& qkv_op();

namespace qkv {

constexpr const char* stage_expand = "expand";      // w as a dense weight: weights=int4
constexpr const char* stage_quantise = "quantise";  // x as e4m3: quantise=token, block
constexpr const char* stage_product = "product";
constexpr const char* stage_heads = "heads";

constexpr std::int64_t most_features = 512;  // of a head
constexpr std::int64_t most_heads = 1024;

/// Norms of q and k: of each head by its root mean square, of all heads together, or layer
/// normalisation of each head. In the order of heads.cu's `head_norm`.
enum class HeadNorm { none, head, rows, centred };

/// A problem's sizes and options, read once.
struct Layer {
  std::int64_t m = 0, d = 0;
  std::int64_t heads = 0, kv_heads = 0, dim = 0;
  std::int64_t rotary = 0;      // features of a head that are rotated
  std::int64_t positions = 0;   // rows of the table of angles
  std::int64_t cache_rows = 0;  // of the caches
  std::int64_t cache_head = 0;  // elements from a head of the caches to the next
  double epsilon = 0;
  double norm_offset = 0;  // added to the norms' weights
  head_rotation rotation = head_rotation::none;
  bool packed = false;              // one weight and bias, not three
  bool grouped = false;             // of each head of k the rows of its heads of q, of k and of v
  PackedFormat format = {};         // of 4 bits, in one weight
  Scaling scaling = Scaling::none;  // of x where the op quantises it, and of one weight of e4m3
  bool gates = false;               // rows of w_q: behind each head's those of its gate
  bool bias = false;
  HeadNorm norm = HeadNorm::none;
  bool norm_last = false;  // behind the rotation
  bool v_norm = false;     // RMSNorm without weights of each head of v
  bool keys = true;        // and values, beside q
  bool table = false;      // of angles
  bool cache = false;
  bool wide_slots = false;  // of 64 bits
  CacheFormat cache_format = {};
  DType dtype = DType::f32;

  bool rotates() const { return rotation != head_rotation::none; }
  rope::RotatedPart rotated() const {
    return {rotary, positions, rotation == head_rotation::halves, table};
  }
  bool normalises() const { return norm != HeadNorm::none; }
  bool in_two_stages() const {
    return joined() || gates || v_norm || norm_last || norm == HeadNorm::rows ||
           norm == HeadNorm::centred || cache_format.e4m3 || !keys;
  }
  /// Whether the first of two stages writes q, k and v of a token next to each other.
  bool joined() const { return grouped || format.packed || scaling != Scaling::none; }
  /// The first element of a head of q (part 0), k or v in what the first of two stages writes.
  std::int64_t raw_place(std::size_t part, std::int64_t token, std::int64_t head) const;
  /// Of q, k and v.
  std::size_t parts() const { return keys ? 3 : 1; }
  std::int64_t q_columns() const { return heads * dim * (gates ? 2 : 1); }
  std::int64_t columns() const { return q_columns() + 2 * kv_heads * dim; }
};
Layer layer_of(const Problem& problem);

using rope::Turns;
Turns turns_of(const Problem& problem);

/// Computes the outputs of a stage in float64.
void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
               Parallel& parallel);

GemmProblem product_gemm(const Problem& problem);
/// The product with the packed weight itself.
GemmProblem packed_gemm(const Problem& problem);
/// The packed weight of 4 bits, or none.
std::vector<PackedWeight> packed_weights(const Problem& problem);
/// x where the op quantises it.
QuantisedRows quantised_x(const Layer& layer);
QuantisedRows quantised_x(const Problem& problem);
std::vector<const Family*> families();
/// Why the families of the stage heads do not serve a problem, one line.
std::optional<std::string> refuse_finished_heads(const Problem& problem, const DeviceFacts&);

/// Both are fallbacks.
const Family& heads_family();
const Family& cpu_heads_family();
std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts);

}  // namespace qkv
}  // namespace fftune
