// The buffers between CTAs of one layer, in bytes.
#pragma once

#include "layer/persistent/layout.cuh"

namespace fftune {

struct persistent_buffers : persistent_layout {
  static constexpr int copies_of_set = 3;  // one for a layer, in turn

  constexpr long long aligned(long long bytes) const { return (bytes + 255) / 256 * 256; }
  constexpr long long partial_at() const { return aligned(4ll * tokens * qkv_rows()); }
  constexpr long long logs_at(int cache) const {
    return partial_at() + aligned(4ll * tokens * parts(cache) * q_rows());
  }
  constexpr long long attended_at(int cache) const {
    return logs_at(cache) + aligned(4ll * tokens * parts(cache) * heads);
  }
  constexpr long long mid_at(int cache) const {
    return attended_at(cache) + aligned(2ll * tokens * q_rows());
  }
  constexpr long long hidden_at(int cache) const {
    return mid_at(cache) + aligned(2ll * tokens * d);
  }
  constexpr long long y_at(int cache) const {
    return hidden_at(cache) + aligned(2ll * tokens * hidden());
  }
  constexpr long long router_at(int cache) const { return y_at(cache) + aligned(2ll * tokens * d); }
  constexpr long long handed_at(int cache) const {
    return router_at(cache) + aligned(4ll * tokens * router_rows());
  }
  constexpr long long handed_ups_at(int cache) const {
    return handed_at(cache) + (shares_tiles() ? aligned(4ll * d) : 0);
  }
  constexpr long long set_bytes(int cache) const {
    return handed_ups_at(cache) + (shares_pairs() ? aligned(4ll * all_hidden()) : 0);
  }
  // Behind the sets: parts of a choice [CTAs, tokens].
  static constexpr int part_bytes = 48;
  constexpr long long parts_bytes() const { return 1ll * blocks * tokens * part_bytes; }
};

}  // namespace fftune
