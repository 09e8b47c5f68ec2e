#include "apps/fftune/own_records.hpp"

#include <fmt/format.h>

#include "core/error.hpp"

namespace fftune::tool {

std::map<Problem, PresetRecord> own_records(const std::filesystem::path& folder,
                                            const PresetDevice& device, const std::string& op) {
  const auto path = folder / device.slug / (op + ".json");
  std::map<Problem, PresetRecord> records;
  if (!std::filesystem::exists(path)) return records;
  PresetFile file = read_preset_file(path);
  if (!file.complaints.empty())
    throw Error(ErrorKind::invalid_input,
                fmt::format("{}: repair it or move it away", file.complaints.front()));
  for (PresetRecord& record : file.records) records[record.problem] = std::move(record);
  return records;
}

std::map<Problem, Recipe> present_winners(const std::filesystem::path& folder,
                                          const PresetDevice& device,
                                          const std::vector<Problem>& problems) {
  std::map<Problem, Recipe> winners;
  for (const Problem& problem : problems) {
    const auto records = own_records(folder, device, problem.op);
    const auto found = records.find(problem);
    if (found == records.end())
      throw Error(ErrorKind::invalid_input,
                  fmt::format("--same-bits: {} has no record of {} for {}: tune it without first",
                              folder.string(), problem.text(), device.slug));
    winners[problem] = found->second.recipe();
  }
  return winners;
}

}  // namespace fftune::tool
