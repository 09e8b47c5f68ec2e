// The search side of the engines of sm_90a: a space of tiles, and a model of the cycles of each.
#pragma once

#include <optional>
#include <string_view>

#include "core/config.hpp"
#include "core/space.hpp"
#include "device/facts.hpp"
#include "kernels/attention/launch.hpp"
#include "kernels/common/least_cost.hpp"
#include "kernels/common/search_side.hpp"

namespace fftune::attention {

/// `Model` has the engine's `name`, `tiles(layer, facts)`, a TypedSpace of tiles, `tile(layer,
/// config)`, one of them, and `cycles(layer, facts, form, tile)`.
template <class Model>
struct TileSearch {
  static Space space(const Layer& layer, const DeviceFacts& facts) {
    return Model::tiles(layer, facts).space();
  }
  static Config default_config(const Layer& layer, const DeviceFacts& facts) {
    const attention_form form = form_of(layer);
    return least_cost(Model::tiles(layer, facts), Model::name,
                      [&](const auto& tile) { return Model::cycles(layer, facts, form, tile); });
  }
  static std::optional<double> estimate(const Layer& layer, const DeviceFacts& facts,
                                        const Config& config) {
    if (facts.clock_hz <= 0) return std::nullopt;
    return Model::cycles(layer, facts, form_of(layer), Model::tile(layer, config)) / facts.clock_hz;
  }
  static constexpr SearchSide<Layer> side{space, default_config, estimate};
};

}  // namespace fftune::attention
