// The part of a family, or of an engine of products or of attention, that a search asks.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "core/config.hpp"
#include "core/space.hpp"
#include "device/facts.hpp"

namespace fftune {

/// The parameters of a kernel for its work; null where it has none.
template <class Work>
struct SearchSide {
  Space (*space)(const Work&, const DeviceFacts&) = nullptr;
  Config (*default_config)(const Work&, const DeviceFacts&) = nullptr;
  /// Seconds by the cost model, to rank; null: there is no model.
  std::optional<double> (*estimate)(const Work&, const DeviceFacts&, const Config&) = nullptr;
};

/// Names of embedded sources; null from the end of them on.
using EngineSources = std::array<const char*, 4>;

inline std::vector<std::string> listed(const EngineSources& sources) {
  std::vector<std::string> names;
  for (const char* source : sources)
    if (source != nullptr) names.emplace_back(source);
  return names;
}

}  // namespace fftune
