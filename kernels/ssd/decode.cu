// ssd of one token of each sequence, bound by the bytes of the states
// (gated_delta_rule/decode_rows.cuh).
//
// Grid: (sequences * ceil(dim / (rows of a block)), heads).
#include "gated_delta_rule/decode_rows.cuh"
#include "ssd/recurrent_tile.cuh"

namespace fftune {

template <ssd_form form, delta_recurrent_config c>
__global__ void __launch_bounds__(c.warps * 32)
    ssd_decode(const __grid_constant__ ssd_params params) {
  using Rows = decode_rows<form.states(), c>;
  using Tile = ssd_tile<form, c>;
  using State = typename Rows::State;
  const delta_rule_params& p = params.layer;
  const decode_place<Rows> place;
  if constexpr (c.prefetch) place.prefetch(p);
  wait_and_launch_dependents();
  const int state = place.state(p), head = place.head;
  const bool begins = place.begins(p);
  const typename Tile::token raw = Tile::load_token(p, place.index, head);
  const ssd_head<form> parameters(params, p, head);
  Rows rows;
  rows.load(static_cast<const State*>(p.state_in) + place.begin(p, state), begins && state >= 0);
  const typename Tile::values token(raw, parameters);

  float written[c.rows], out[c.rows] = {};
#pragma unroll
  for (int row = 0; row < c.rows; ++row) written[row] = token.step.dt * token.x[row];
  const auto after = [&](int row, int i, float element) {
    return token.decay * element + written[row] * token.B[i];
  };
  rows.for_each(
      [&](int row, int i, float element) { out[row] += after(row, i, element) * token.C[i]; });
  if (p.state_out != nullptr && state >= 0) {
    rows.prevent_reuse();
    rows.store(static_cast<State*>(p.state_out) + place.begin(p, state),
               [&](int row, int i, float element) { return number(after(row, i, element)); });
  }
  Tile::sum_over_row(out, c.rows);
#pragma unroll
  for (int row = 0; row < c.rows; ++row) {
    out[row] = number(out[row]);
    if constexpr (form.skip) out[row] += parameters.D * token.x[row];
    if (state < 0) out[row] = 0.0f;
  }
  Rows::store_out(p, place.index, head, out);
}

}  // namespace fftune
