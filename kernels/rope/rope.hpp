// Rotary position embedding (Su et al. 2021, arXiv 2104.09864) of queries, and of keys in the same
// launch: y_i = m (x_i cos f_i + r_i sin f_i) for each head's first `rotary` features; the others
// are copied. Rotation "halves": r_i = -x_{i + rotary/2} in the first half, x_{i - rotary/2} in the
// second (GPT-NeoX, Llama); "interleaved": r_{2j} = -x_{2j+1}, r_{2j+1} = x_{2j} (GPT-J).
//
// The backward pass is the transpose, with the partner's sine: dx_i = m (dy_i cos f_i ± dy_p sin
// f_p), where p is the partner of i, plus for the first of a pair and minus for the second.
//
// Angles f are a table [positions, rotary] of f32, as TransformerEngine has them (a position past
// its end reads its last row), or the product in f32 of the position and a frequency in f32. Both
// features of pair j of rotary/2 have the same frequency, by one of these rules:
//   base    base^(-2j/rotary) / factor
//   llama3  (Llama 3.1): a wavelength w = 2 pi / frequency above context/low is divided by
//           `factor`, one below context/high is left alone, and between the two the frequency is
//           interpolated, linearly in context/w
//   yarn    (Peng et al. 2023, arXiv 2309.00071): pairs with fewer than beta-slow rotations in
//           `context` positions are divided by `factor`, those with more than beta-fast rotations
//           are left alone. From the last pair of these to the first of those the frequency is
//           interpolated, linearly in j. m = 0.1 ln(factor) + 1, or 1 for a factor below 1
// m is 1 but in yarn; the option `scale` sets it to another value.
//
// q and k may be views of other tensors: the strides of a token, of the dimension outside it and of
// a head are sizes of the op. Results are contiguous.
//
// Every thread reads all it needs of a tensor before it writes, so an output may lie in the buffer
// of its input where both have rows of the same length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "kernels/common/op_parts.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in rope.cpp; listed in kernels/catalog.cpp.
const Op& rope_op();

namespace rope {

constexpr std::int64_t most_features = 1024;  // of a head
constexpr std::int64_t most_heads = 1024;

enum class Layout { sbhd, bshd, thd };
enum class Rotation { halves, interleaved };

/// Where the heads of q or k lie, in elements. Features are next to each other.
struct Strides {
  std::int64_t row = 0;    // from a token to the next one: in sbhd of the next sequence
  std::int64_t outer = 0;  // from a sequence to the next in bshd, from a position in sbhd; thd: 0
  std::int64_t head = 0;
};

/// A problem's sizes and options, read once.
struct Layer {
  std::int64_t s = 0;          // Positions of a sequence; in thd tokens of all sequences together.
  std::int64_t b = 0;          // Sequences.
  std::int64_t heads = 0;      // Heads of q.
  std::int64_t kv_heads = 0;   // Heads of k; 0: there is no k.
  std::int64_t dim = 0;        // Features of a head.
  std::int64_t rotary = 0;     // The first `rotary` features are rotated.
  std::int64_t positions = 0;  // Rows of the table.
  Strides q, k;
  Layout layout = Layout::sbhd;
  Rotation rotation = Rotation::halves;
  bool backward = false;
  bool table = false;   // of angles
  bool starts = false;  // each sequence has a first position of its own
  DType dtype = DType::f32;

  std::int64_t tokens() const { return layout == Layout::thd ? s : s * b; }
  /// Tokens of the inner dimension: neighbours by Strides::row.
  std::int64_t inner() const { return layout == Layout::sbhd ? b : s; }
  /// Whether `head_count` heads are contiguous, and tokens have a constant stride.
  bool is_plain(const Strides& strides, std::int64_t head_count) const {
    return strides.head == dim && strides.row >= head_count * dim &&
           (layout == Layout::thd || strides.outer == inner() * strides.row);
  }
  bool is_plain() const { return is_plain(q, heads) && is_plain(k, kv_heads); }
  /// Place of the first feature.
  std::int64_t place(const Strides& strides, std::int64_t token, std::int64_t head) const {
    return token / inner() * strides.outer + token % inner() * strides.row + head * strides.head;
  }
};
Layer layer_of(const Problem& problem);

/// The frequencies of the pairs, [rotary / 2], and m. All frequencies are 0 where there is a table.
struct Frequencies {
  std::vector<float> values;
  float scale = 1;
};
Frequencies frequencies_of(const Problem& problem);

/// One of the two tensors that are rotated, by name: [s, b, heads, dim], [b, s, heads, dim] or [s,
/// heads, dim]. In the backward pass they are gradients.
struct Side {
  const char* in = nullptr;
  const char* out = nullptr;
  std::int64_t heads = 0;
  Strides strides = {};  // of `in`
};
/// q, and k if there is one.
std::vector<Side> sides_of(const Layer& layer);

/// The definition in float64, of either pass.
void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);

std::vector<const Family*> cuda_families(), cpu_families();

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts);

}  // namespace rope
}  // namespace fftune
