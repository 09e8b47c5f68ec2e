// ssd token by token (recurrent_tile.cuh), for any sizes; for one token of each sequence, bound by
// the bytes of the states. Values of the next token are loaded before a token's reduction.
//
// Grid: sequences * heads * ceil(dim / (rows of a block)), the rows of a head next to each other.
#include "common/async.cuh"
#include "ssd/recurrent_tile.cuh"

namespace fftune {

template <ssd_form form, delta_recurrent_config c>
__global__ void __launch_bounds__(c.warps * 32)
    ssd_recurrent(const __grid_constant__ ssd_params params) {
  using Tile = ssd_tile<form, c>;
  wait_and_launch_dependents();
  const delta_rule_params& p = params.layer;
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
  const ssd_head<form> parameters(params, p, head);
  for (i64 row = first; row < end; ++row) {
    const typename Tile::values token(next, parameters);
    if (row + 1 < end) next = Tile::load_token(p, row + 1, head);
    tile.write(token);
    tile.read(token, parameters.D, out);
    Tile::store_out(p, row, head, out);
    if (p.accepted != nullptr && row - first < p.slots) {
      const i64 own = entry_at(p, static_cast<i64>(place.index) * p.slots + (row - first));
      if (own >= 0) {
        tile.check();
        tile.store(static_cast<typename Tile::State*>(p.state_out) + own * p.state_block +
                   static_cast<i64>(head) * Tile::state_elements);
      }
    }
  }
  if (p.state_out == nullptr || p.accepted != nullptr) return;
  tile.check();
  tile.store(static_cast<typename Tile::State*>(p.state_out) + state);
}

}  // namespace fftune
