// State space duality, the core of Mamba-2 (arXiv 2405.21060): each head has a state S [dim,
// state-dim], which decays, and to which each token of a sequence adds x Bᵀ:
//
//   dt  = softplus(dt + dt_bias), within [dt-min, dt-max]
//   S   = exp(dt A) S + (dt x) Bᵀ      A = -exp(A_log), one number of a head
//   out = S C + D x                    of the written state
//
//   softplus=no    dt itself; dt-bias=yes and skip=yes: with dt_bias, with D x
//   decay=given    A instead of A_log
//
// It is the gated delta rule without its erase (gated_delta_rule.hpp): B is its k, C its q, x its
// v, and a group its head of q and k. Layouts, sequences, states and caches are as there: x [b, s,
// heads, dim], dt [b, s, heads], B and C [b, s, groups, state-dim], states [.., heads, dim,
// state-dim]. Head j reads B and C of group j / (heads / groups). x, B, C and dt may be parts of
// wider rows (x-row, b-row, c-row, dt-row). `slots` are those of drafts there.
//
// Backward: gradients of all inputs. dB and dC are sums over the heads of a group.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/gated_delta_rule/gated_delta_rule.hpp"

namespace fftune {

/// Defined in ssd/op.cpp; listed in kernels/catalog.cpp.
const Op& ssd_op();

namespace ssd {

using gated_delta_rule::Tokens;
using gated_delta_rule::tokens_of;

constexpr std::int64_t most_dim = 256;

/// A problem's sizes and options, read once. `heads` are the groups, `v_heads` the heads, `dim` is
/// state-dim and `v_dim` dim: the rows of C are those of q, of B of k, of x of v, of dt the gate's.
struct Layer : gated_delta_rule::Layer {
  bool softplus = true;
  bool bias = false;   // dt_bias
  bool skip = false;   // D
  bool given = false;  // A, not A_log
  float dt_min = 0;
  float dt_max = 0;  // infinite without a limit
};
Layer layer_of(const Problem& problem);

/// The definition in float64, of either pass.
void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);

std::vector<const Family*> cuda_families(), cpu_families();

}  // namespace ssd
}  // namespace fftune
