// gated-delta-rule of one token of each sequence, bound by the bytes of the states
// (decode_rows.cuh).
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

  typename Tile::row_sums sums(token);
  rows.for_each([&](int row, int i, float element) {
    if constexpr (form.channels) element *= token.decay(i);
    sums.add(token, row, i, element);
  });
  rows.prevent_reuse();
  float delta[c.rows], out[c.rows];
  sums.finish(token, form.channels ? 1.0f : token.decay(0), p.scale, delta, out);
#pragma unroll
  for (int row = 0; row < c.rows; ++row)
    if (state < 0) out[row] = 0.0f;
  if (p.state_out != nullptr && state >= 0) {
    rows.store(static_cast<State*>(p.state_out) + place.begin(p, state),
               [&](int row, int i, float element) {
                 return token.decay(i) * element + delta[row] * token.k[i];
               });
  }
  Rows::store_out(p, place.index, head, out);
}

}  // namespace fftune
