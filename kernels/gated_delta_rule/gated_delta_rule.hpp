// The gated delta rule: linear attention whose state S [v-dim, dim] of each value head decays,
// erases what it holds for a key, and writes the key's new value (Gated DeltaNet, arXiv 2412.06464;
// with a decay for each channel Kimi Delta Attention, arXiv 2510.26692). For each token of a
// sequence, in this order:
//
//   S     = S diag(exp(g))     decay, by one number or by dim numbers of a value head
//   delta = beta (v - S k)     erase what the decayed state holds for k
//   S     = S + delta kᵀ       write
//   out   = scale S q          read behind the write; scale is 1/sqrt(dim) if none is given
//
//   qk-norm=l2       q and k are divided by sqrt(sum of their squares + 1e-6) first
//   gate=softplus    g = -exp(A_log) softplus(a + dt_bias)
//   gate=bounded     g = gate-bound · sigmoid(exp(A_log) (a + dt_bias)), gate-bound < 0
//   beta=sigmoid     beta = beta-scale · sigmoid(beta_logits)
//
// Layout bshd: q and k [b, s, heads, dim], v [b, s, v-heads, v-dim], g or a [b, s, v-heads], with
// decay=channel [b, s, v-heads, dim], beta [b, s, v-heads]. Layout thd: the same without b, the
// sequences one after the other; sequence i has the tokens offsets[i] to offsets[i + 1], cut to the
// tokens that there are. Tokens of no sequence are not written. Value head j reads q and k of head
// j / (v-heads / heads). q, k, v and g or a with beta may be parts of wider rows (q-row, k-row,
// v-row, gate-row). The value heads of one head of k are neighbours in g or a and beta; from those
// of a head to the next one's there are gate-block elements, more than they are where a projection
// gives both together, as in Qwen3-Next.
//
// States are [.., v-heads, v-dim, dim], or with state-layout=kv [.., v-heads, dim, v-dim], in f32
// or bf16, whatever the dtype of q is. A sequence begins with zeros or with its initial_state [b,
// ..]; final_state [b, ..] is the state behind its last token; of an empty sequence, the one that
// it began with. With indices=yes states are in a cache [states, ..] whose entries are state-block
// elements apart, and are updated in place: sequence i has the entry state_indices[i]. An index of
// at most null-index, or beyond the last state, is padding: out is 0, and no state is read or
// written. has-state=yes: a sequence whose byte of has_state is 0 begins with zeros.
//
// With the size `slots` a sequence has as many entries, state_indices [b, slots], for the
// verification of drafts: it begins with the entry of slot accepted[i] - 1, where accepted [b] are
// the tokens of the last run that were kept, and the state behind its token t is written to the
// entry of slot t. The other rules are those of one entry: if the first one is padding, the
// sequence is, and no state is written to another one that is. Tokens behind the last slot leave no
// state.
//
// Backward: gradients of all inputs, by the recurrence in reverse. dq and dk are sums over the
// value heads of a head.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/common/op_parts.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in gated_delta_rule/op.cpp; listed in kernels/catalog.cpp.
const Op& gated_delta_rule_op();

namespace gated_delta_rule {

constexpr std::int64_t most_dim = 256;
constexpr double norm_eps = 1e-6;

enum class Gate { log, softplus, bounded };

/// A problem's sizes and options, read once.
struct Layer {
  std::int64_t b = 0;            // sequences
  std::int64_t s = 0;            // tokens of a sequence; in thd of all together
  std::int64_t heads = 0;        // of q and k
  std::int64_t v_heads = 0;      // of v
  std::int64_t dim = 0;          // features of a head of q and k
  std::int64_t v_dim = 0;        // features of a head of v
  std::int64_t states = 0;       // entries of the cache
  std::int64_t state_block = 0;  // elements from an entry to the next
  std::int64_t slots = 0;        // entries of a sequence, one behind each token; 0: one for all
  std::int64_t q_row = 0;        // elements from a token to the next
  std::int64_t k_row = 0;
  std::int64_t v_row = 0;
  std::int64_t gate_row = 0;    // of a, with decay=head, and of beta
  std::int64_t gate_block = 0;  // of these, elements from a head of k to the next
  bool packed = false;          // layout thd
  Gate gate = Gate::log;
  bool channels = false;  // a decay for each channel
  bool sigmoid = false;   // beta from beta_logits
  bool normed = false;    // l2 norm of q and k
  bool initial = false;
  bool final = false;
  bool indices = false;
  bool has_state = false;
  bool key_major = false;  // states [.., dim, v-dim]
  bool backward = false;
  float scale = 0;
  float beta_scale = 1;
  float gate_bound = -5;
  std::int64_t null_index = 0;
  DType dtype = DType::f32;
  DType state_dtype = DType::f32;

  std::int64_t tokens() const { return packed ? s : b * s; }
  /// Tokens of a sequence. Packed ones count as equally long.
  std::int64_t sequence_tokens() const { return packed ? (s + b - 1) / b : s; }
  /// One token of each sequence, and a state of each.
  bool is_decode() const { return !packed && s == 1 && slots == 0 && !backward; }
  std::int64_t group() const { return v_heads / heads; }
  std::int64_t state_elements() const { return v_heads * v_dim * dim; }
  /// Elements of a token's beta, from the first to the last one.
  std::int64_t gate_elements() const { return (heads - 1) * gate_block + group(); }
  /// Where a token's row has the a, with decay=head, and the beta of a value head.
  std::int64_t gate_at(std::int64_t token, std::int64_t head) const {
    return token * gate_row + head / group() * gate_block + head % group();
  }
  /// Log-decays of a value head.
  std::int64_t decays() const { return channels ? dim : 1; }
  /// Elements from a token's g or a to the next token's.
  std::int64_t g_row() const { return channels ? v_heads * dim : gate_row; }
  /// The place of an element of a state in a value head.
  std::int64_t state_at(std::int64_t v, std::int64_t k) const {
    return key_major ? k * v_dim + v : v * dim + k;
  }
};
Layer layer_of(const Problem& problem);

/// The place in state_indices of the entry that a sequence begins with. accepted: of all sequences.
template <typename Accepted>
std::int64_t first_slot_of(const Layer& layer, const Accepted* accepted, std::int64_t sequence) {
  if (layer.slots == 0) return sequence;
  const auto kept = static_cast<std::int64_t>(accepted[sequence]);
  return sequence * layer.slots + std::clamp<std::int64_t>(kept, 1, layer.slots) - 1;
}

/// Why kernels that multiply all pairs of a chunk's tokens serve the layer on no device.
std::optional<std::string> refuse_chunks(const Layer& layer);

/// The tokens of a sequence: those of `offsets`, cut to the tokens that there are, or those of its
/// place.
struct Tokens {
  std::int64_t first = 0, end = 0;
};
template <typename Offset>
Tokens tokens_of(const Layer& layer, const Offset* offsets, std::int64_t sequence) {
  if (!layer.packed) return {sequence * layer.s, (sequence + 1) * layer.s};
  const std::int64_t first =
      std::clamp<std::int64_t>(static_cast<std::int64_t>(offsets[sequence]), 0, layer.s);
  const std::int64_t end =
      std::clamp<std::int64_t>(static_cast<std::int64_t>(offsets[sequence + 1]), first, layer.s);
  return {first, end};
}

/// The definition in float64, of either pass.
void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);

std::vector<const Family*> cuda_families(), cpu_families();

}  // namespace gated_delta_rule
}  // namespace fftune
