#include "apps/fftune/own_records.hpp"

#include <fmt/format.h>

#include "core/error.hpp"
#include "registry/op.hpp"

namespace fftune::tool {

std::map<Problem, PresetRecord> own_records(const std::filesystem::path& folder,
                                            const PresetDevice& device, const Op& op) {
  const auto path = folder / device.slug / (std::string(op.name()) + ".json");
  if (!std::filesystem::exists(path)) return {};
  const PresetFile file = read_preset_file(path);
  if (!file.complaints.empty())
    throw Error(ErrorKind::invalid_input,
                fmt::format("{}: repair it or move it away", file.complaints.front()));
  return by_compared_part(file.records, comparison_of(op));
}

std::map<Problem, Recipe> present_winners(const std::filesystem::path& folder,
                                          const PresetDevice& device, const Op& op,
                                          const std::vector<Problem>& problems) {
  const auto records = own_records(folder, device, op);
  const Comparison comparison = comparison_of(op);
  std::map<Problem, Recipe> winners;
  for (const Problem& repeated : problems) {
    const Problem problem = unrepeated(op, repeated);  // what records are of
    const auto found = records.find(compared_part(problem, comparison));
    if (found != records.end()) winners[problem] = found->second.recipe();
  }
  return winners;
}

}  // namespace fftune::tool
