// gated-delta-rule token by token (recurrent_tile.cuh), for any sizes; for one token of each
// sequence, bound by the bytes of the states. Values of the next token are loaded before a token's
// reductions.
//
// Grid: sequences * v_heads * ceil(v_dim / (rows of a block)), the rows of a head next to each
// other.
#include "common/async.cuh"
#include "gated_delta_rule/recurrent_walk.cuh"

namespace fftune {

template <delta_rule_form form, delta_recurrent_config c>
__global__ void __launch_bounds__(c.warps * 32)
    delta_rule_recurrent(const __grid_constant__ delta_rule_params p) {
  using Tile = recurrent_tile<form, c>;
  wait_and_launch_dependents();
  const recurrent_place<Tile> place(p);
  const i64 first = place.first, end = place.end;
  const int head = place.head;
  float out[c.rows] = {};
  if (place.sequence.state < 0) {
    for (i64 row = first; row < end; ++row) Tile::store_out(p, row, head, out);
    return;
  }
  const i64 state = place.cached_state(p);
  Tile tile;
  typename Tile::token next;
  if (first < end) next = Tile::load_token(p, first, head);
  place.load_cached(tile, p, state);
  const typename Tile::Gates gates(p, head);
  const typename Tile::biases bias(p, head);
  for (i64 row = first; row < end; ++row) {
    const typename Tile::token token = next;
    if (row + 1 < end) next = Tile::load_token(p, row + 1, head);
    tile.step(typename Tile::values(token, gates, bias), p.scale, out);
    Tile::store_out(p, row, head, out);
    if (p.accepted != nullptr && row - first < p.slots) {
      const i64 own = entry_at(p, static_cast<i64>(place.index) * p.slots + (row - first));
      if (own >= 0)
        tile.store(static_cast<typename Tile::State*>(p.state_out) + own * p.state_block +
                   static_cast<i64>(head) * Tile::state_elements);
    }
  }
  if (p.state_out == nullptr || p.accepted != nullptr) return;
  tile.store(static_cast<typename Tile::State*>(p.state_out) + state);
}

}  // namespace fftune
