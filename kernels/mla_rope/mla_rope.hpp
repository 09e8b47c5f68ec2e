// What latent attention (mla/mla.hpp) computes between the products in front of it and its cache:
// RoPE of the queries' last features and of the key that all heads share, the norm of the latent,
// and the row of the cache.
//
//   q_rope[i, h] = rotated q[i, h, nope:]                         q  [m, heads, nope + rope]
//   cache[slots[i]] = [rms(kv[i, :rank]) norm, rotated kv[i, rank:]]    kv [m, rank + rope]
//
// A token whose slot is no row of the cache writes none. The other features of q, [:nope], are read
// where they are, by head-linear.
//
// Pairs of features and angles are those of the op rope. With rope-order=halves neighbours that
// were rotated are not stored as such: the first of each pair come first, then the second, as in
// transformers' DeepSeek-V3. Scores are the same in both orders.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/common/op_parts.hpp"
#include "kernels/rope/part.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in mla_rope/op.cpp; listed in kernels/catalog.cpp.
const Op& mla_rope_op();

namespace mla_rope {

enum class Rotation { none, halves, interleaved };

/// A problem's sizes and options, read once.
struct Layer {
  std::int64_t m = 0;
  std::int64_t heads = 0;
  std::int64_t nope = 0;        // features of a head of q that are not rotated
  std::int64_t rope = 0;        // those behind them
  std::int64_t rank = 0;        // latent features
  std::int64_t positions = 0;   // rows of the table of angles
  std::int64_t cache_rows = 0;  // of the cache
  double epsilon = 0;
  Rotation rotation = Rotation::none;
  bool to_halves = false;  // the order of neighbours in the results
  bool table = false;      // of angles
  DType dtype = DType::f32;

  std::int64_t width() const { return rank + rope; }
  bool rotates() const { return rotation != Rotation::none; }
  fftune::rope::RotatedPart rotated() const {
    return {rope, positions, rotation == Rotation::halves, table};
  }
  std::int64_t pairs() const { return rotates() ? rope / 2 : 0; }
  /// The place of the first feature of a pair, and the distance of the second.
  std::int64_t from(std::int64_t pair) const {
    return rotation == Rotation::halves ? pair : 2 * pair;
  }
  std::int64_t apart() const { return rotation == Rotation::halves ? rope / 2 : 1; }
  /// The same in the results.
  std::int64_t to(std::int64_t pair) const { return to_halves ? pair : from(pair); }
  std::int64_t apart_in_results() const { return to_halves ? rope / 2 : apart(); }
};
Layer layer_of(const Problem& problem);

using rope::Turns;
Turns turns_of(const Problem& problem);

/// The definition in float64.
void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);

std::vector<const Family*> cuda_families(), cpu_families();

}  // namespace mla_rope
}  // namespace fftune
