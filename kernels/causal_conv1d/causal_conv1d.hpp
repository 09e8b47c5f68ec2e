// Depthwise causal convolution over the tokens of sequences, as the linear-attention layers of
// Mamba-2, Qwen3-Next, Kimi-Linear and LFM2 have it:
//
//   y[t, c] = act(bias[c] + Σ_j w[c, j] x[t − (width − 1) + j, c]),  j = 0 … width − 1
//
// The last tap multiplies the token itself. Inputs before the first token are zeros, or come from
// the sequence's state. Nothing is rounded between the sum, the bias and the activation.
//
// With gates=yes, as in LFM2, a token of x has three parts of `channels`, B, C and the values. The
// inputs of the convolution are B times the values, which a state holds too, and y is multiplied by
// C. This form has no gradients.
//
// Sequences are equally long (layout bsc: x [b, s, channels]) or packed one after the other (layout
// sc: x [s, channels], sequence i has the rows offsets[i] to offsets[i + 1]); history never crosses
// from one to the next. Rows of y behind the last offset are zeros. `x-row` is the stride of x
// between tokens: x may be columns of a projection's result.
//
// The size `x-groups` is given: x has the channels of each head of k together, as Qwen3-Next's
// projection gives them. The channels are q, k and v of all heads, and a row of x is x-groups
// blocks of x-row / x-groups columns. A block begins with `x-keys` channels of q, as many of k, and
// the channels / x-groups − 2 x-keys of v; columns behind them are not read. This form has no
// gradients.
//
// The state of a sequence is its last `entries` inputs, before the convolution, the oldest first:
// width − 1 as vLLM keeps them, width as transformers does. With H the width − 1 newest entries and
// n the sequence's tokens:
//
//   state=update   `state` [slots, entries, channels] is read and updated in place.
//   state=pass     `initial` is read and `final` written, both [b, entries, channels]; this form
//                  has gradients.
//   indices        the size `slots` is given: state of sequence i is that of slot indices[i]. A
//                  sequence whose index is below `first-slot` is padding: its rows of y are zeros,
//                  and no state is touched. Two sequences must not share a slot.
//   has-state      a byte for each sequence: 0 means that the state's contents do not count, as
//                  if they were zeros. The new state is written all the same.
//   accepted       the tokens of the last run that were kept, at least 1 for each sequence, as
//                  speculative decoding has them. The history is the entries accepted[i] − 1 up to
//                  accepted[i] + width − 3 then, and the new state begins with that history without
//                  its oldest entry, followed by the n tokens: with entries >= width − 2 + n, any
//                  number of these can be accepted next.
//
// An empty sequence leaves its state as it is. `state-row` is the stride between slots: the state
// may be a part of a page. With state-order=channels a state is [channels, entries], as
// transformers keeps it.
//
// The backward pass computes the sum again. With g = dy act'(sum):
//
//   dx[u, c] = Σ_j w[c, j] g[u + (width − 1) − j, c]
//   dw[c, j] = Σ_t g[t, c] x[t − (width − 1) + j, c]
//   dbias[c] = Σ_t g[t, c]
//
// with g = 0 beyond the tokens of the sequence, as a padded convolution has it. d_initial is dx at
// the places of the history, and d_final is added to the gradient of each input that `final` holds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/op_parts.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in op.cpp; listed in kernels/catalog.cpp.
const Op& causal_conv1d_op();

namespace causal_conv1d {

constexpr std::int64_t least_width = 2, most_width = 8;
constexpr std::int64_t most_entries = 24;

enum class State { none, update, pass };

/// A problem's sizes and options, read once.
struct Layer {
  std::int64_t s = 0;  // tokens of a sequence; of all together where they are packed
  std::int64_t b = 0;  // sequences
  std::int64_t channels = 0;
  std::int64_t width = 0;
  std::int64_t x_row = 0;     // stride of x between tokens, in elements
  std::int64_t x_groups = 0;  // blocks of a row of x with channels of q, k and v; 0: no blocks
  std::int64_t x_keys = 0;    // channels of q, and of k, in a block
  std::int64_t entries = 0;   // of a state
  std::int64_t slots = 0;     // states; b without indices
  std::int64_t state_row = 0;
  std::int64_t first_slot = 0;
  bool packed = false;
  bool bias = false;
  bool backward = false;
  bool frozen = false;
  bool indexed = false;  // states are found by `indices`
  bool flagged = false;  // has-state
  bool accepted = false;
  bool gates = false;
  bool channels_first = false;  // a state is [channels, entries]
  State state = State::none;
  Activation act = Activation::none;
  DType dtype = DType::f32;
  DType weight_dtype = DType::f32;

  /// The elements of a row of x that count.
  std::int64_t x_columns() const { return gates ? 3 * channels : channels; }
  std::int64_t tokens() const { return packed ? s : s * b; }
  /// The columns of a block of x, its channels, and the channels of v among them.
  std::int64_t x_block() const { return x_row / x_groups; }
  std::int64_t group_channels() const { return channels / x_groups; }
  std::int64_t group_values() const { return group_channels() - 2 * x_keys; }
  /// Calls visit(channel, column, count) for each run of channels that are neighbours in x.
  template <class Visit>
  void for_each_run(const Visit& visit) const {
    if (x_groups == 0) return visit(0, 0, channels);
    for (std::int64_t group = 0; group < x_groups; ++group) {
      const std::int64_t first = group * x_block(), keys = x_groups * x_keys;
      visit(group * x_keys, first, x_keys);
      visit(keys + group * x_keys, first + x_keys, x_keys);
      visit(2 * keys + group * group_values(), first + 2 * x_keys, group_values());
    }
  }
  /// Strides of a state between entries and between channels.
  std::int64_t entry_step() const { return channels_first ? 1 : channels; }
  std::int64_t channel_step() const { return channels_first ? entries : 1; }
};
Layer layer_of(const Problem& problem);

/// Where a sequence is: its rows, and its state.
struct Sequence {
  std::int64_t begin = 0, end = 0;
  std::int64_t slot = 0;  // negative: padding
  bool has_state = false;
  std::int64_t first_entry = 0;  // of the history in the state
};

/// The tensors of counts that say where sequences are.
enum class Count { offsets, indices, has_state, accepted };
constexpr const char* count_names[] = {"offsets", "indices", "has_state", "accepted"};

/// From the tensors of counts that are there, which `at(count, i)` reads. Counts that are out of
/// range are limited to it.
template <class Read>
Sequence sequence_of(const Layer& layer, std::int64_t i, const Read& at) {
  Sequence sequence{i * layer.s, (i + 1) * layer.s, i, layer.state != State::none,
                    layer.entries - (layer.width - 1)};
  if (layer.packed) {
    sequence.begin = std::clamp<std::int64_t>(at(Count::offsets, i), 0, layer.s);
    sequence.end = std::clamp<std::int64_t>(at(Count::offsets, i + 1), sequence.begin, layer.s);
  }
  if (layer.indexed) {
    sequence.slot = at(Count::indices, i);
    if (sequence.slot < layer.first_slot || sequence.slot >= layer.slots) sequence.slot = -1;
  }
  if (layer.flagged) sequence.has_state = at(Count::has_state, i) != 0;
  if (layer.accepted)
    sequence.first_entry =
        std::clamp<std::int64_t>(at(Count::accepted, i) - 1, 0, sequence.first_entry);
  return sequence;
}

/// The op's tensors, as Op::tensors has them.
std::vector<TensorSpec> tensors_of(const Layer& layer);

/// The definition in float64, of either pass.
void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);

std::vector<const Family*> cuda_families(), cpu_families();

}  // namespace causal_conv1d
}  // namespace fftune
