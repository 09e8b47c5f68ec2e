// gated-delta-rule of one token of each sequence, bound by the bytes of the states
// (decode_rows.cuh). One reduction over the lanes of a row gives S k, S q and k q, and with them
// delta and out:
//
//   delta = beta (v - decay S k),  out = scale (decay S q + delta k q)
//
// Padding takes the same way, without a state, so that no load waits for its index but the state's.
//
// Grid: (sequences * ceil(v_dim / (rows of a block)), v_heads).
#include "gated_delta_rule/decode_rows.cuh"

namespace fftune {

template <delta_rule_form form, delta_recurrent_config c>
__global__ void __launch_bounds__(c.warps * 32)
    delta_rule_decode(const __grid_constant__ delta_rule_params p) {
  using Rows = decode_rows<form, c>;
  using Tile = typename Rows::Tile;
  using State = typename Rows::State;
  const decode_place<Rows> place;
  if constexpr (c.prefetch) place.prefetch(p);
  wait_and_launch_dependents();
  const int state = place.state(p), head = place.head;
  const bool begins = place.begins(p);
  const typename Tile::token raw = Tile::load_token(p, place.index, head);
  const typename Tile::Gates gates(p, head);
  const typename Tile::biases bias(p, head);
  Rows rows;
  rows.load(static_cast<const State*>(p.state_in) + place.begin(p, state), begins && state >= 0);
  const typename Tile::values token(raw, gates, bias);

  // k q; S k and S q of each row, of the decayed state if a decay is a channel's; k k and q q.
  constexpr int held = 1, read = held + c.rows, squares = read + c.rows;
  float sums[squares + 2] = {};
#pragma unroll
  for (int i = 0; i < Tile::features; ++i) {
    sums[0] += token.k[i] * token.q[i];
    sums[squares] += token.k[i] * token.k[i];
    sums[squares + 1] += token.q[i] * token.q[i];
  }
  rows.for_each([&](int row, int i, float element) {
    if constexpr (form.channels) element *= token.decay(i);
    sums[held + row] += element * token.k[i];
    sums[read + row] += element * token.q[i];
  });
  rows.prevent_reuse();
  Tile::sum_over_row(sums, form.normed ? squares + 2 : squares);
  float of_k = 1.0f, of_q = p.scale;
  if constexpr (form.normed) {
    of_k = rsqrtf(sums[squares] + 1e-6f);
    of_q *= rsqrtf(sums[squares + 1] + 1e-6f);
  }
  const float decay = form.channels ? 1.0f : token.decay(0);
  float delta[c.rows], out[c.rows];
#pragma unroll
  for (int row = 0; row < c.rows; ++row) {
    delta[row] = token.beta * (token.v[row] - of_k * decay * sums[held + row]) * of_k;
    const float sum = of_q * (decay * sums[read + row] + delta[row] * sums[0]);
    out[row] = state >= 0 ? sum : 0.0f;
  }
  if (p.state_out != nullptr && state >= 0) {
    rows.store(static_cast<State*>(p.state_out) + place.begin(p, state),
               [&](int row, int i, float element) {
                 return token.decay(i) * element + delta[row] * token.k[i];
               });
  }
  Rows::store_out(p, place.index, head, out);
}

}  // namespace fftune
