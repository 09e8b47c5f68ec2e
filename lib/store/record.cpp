#include "store/record.hpp"

namespace fftune {

Recipe PresetRecord::recipe() const {
  Recipe recipe;
  for (const auto& stage : stages) recipe.push_back(stage.variant);
  return recipe;
}

PresetDevice preset_device(const DeviceFacts& facts) {
  return {facts.slug(), facts.name, facts.kind, facts.arch, facts.multiprocessors, {}};
}

}  // namespace fftune
