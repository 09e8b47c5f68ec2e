// Choosing the recipe that serves a problem: a preset record by the lookup rules, or the default.
#pragma once

#include <optional>
#include <string>

#include "registry/catalog.hpp"
#include "store/preset_library.hpp"

namespace fftune {

struct Choice {
  Recipe recipe;
  std::optional<PresetMatch> preset;  // none: the op's default for this device
  bool stale = false;                 // the preset's kernel sources have changed since
  std::string reason;                 // which rule chose it and why, one line
};

/// `problem` must be canonical. Throws Error(unavailable) only if no family at all can serve it.
Choice choose(const Catalog& catalog, const Op& op, const Problem& problem,
              const DeviceFacts& facts, const PresetLibrary& presets);

}  // namespace fftune
