#include "apps/fftune/compile_report.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>

#include "apps/fftune/numbers.hpp"

namespace fftune::tool {

namespace {

Json program_json(const std::string& arch, const CompileUnit& unit, const CompileReport& report) {
  Json kernels = Json::array();
  for (const KernelReport& kernel : report.kernels)
    kernels.push_back({{"name", kernel.name},
                       {"registers", kernel.registers},
                       {"spill_bytes", kernel.spill_bytes},
                       {"static_shared_bytes", kernel.static_shared_bytes},
                       {"warnings", kernel.warnings}});
  return {{"arch", arch},
          {"family", unit.family},
          {"variant", unit.variant},
          {"problem", unit.problem},
          {"dynamic_shared_bytes", unit.dynamic_shared_bytes},
          {"seconds", report.seconds},
          {"cached", report.cached},
          {"failure", report.failure},
          {"kernels", kernels}};
}

}  // namespace

CompileSummary::Row& CompileSummary::row(const std::string& arch, const std::string& family) {
  const auto found = std::find_if(rows_.begin(), rows_.end(), [&](const Row& each) {
    return each.arch == arch && each.family == family;
  });
  if (found != rows_.end()) return *found;
  rows_.push_back({});
  rows_.back().arch = arch;
  rows_.back().family = family;
  return rows_.back();
}

void CompileSummary::add(const std::string& arch, const std::vector<CompileUnit>& units,
                         const std::vector<UnitResult>& results) {
  for (std::size_t i = 0; i < units.size(); ++i) {
    if (!results[i].tried) continue;
    const CompileUnit& unit = units[i];
    const CompileReport& report = results[i].report;
    Row& total = row(arch, unit.family);
    total.programs += 1;
    total.kernels += report.kernels.size();
    total.spilled += report.spill_bytes() > 0 ? 1 : 0;
    total.cached += report.cached ? 1 : 0;
    total.seconds += report.seconds;
    for (const KernelReport& kernel : report.kernels) {
      total.registers = std::max(total.registers, kernel.registers);
      total.shared_bytes =
          std::max(total.shared_bytes, unit.dynamic_shared_bytes +
                                           static_cast<std::size_t>(kernel.static_shared_bytes));
      for (const std::string& warning : kernel.warnings)
        warnings_.push_back(fmt::format("{} {}: {}", arch, unit.variant, warning));
    }
    if (!report.failure.empty()) {
      total.failed += 1;
      failed_.push_back(
          fmt::format("{} {} ({}): {}", arch, unit.variant, unit.problem, report.failure));
    }
    programs_.push_back(program_json(arch, unit, report));
  }
}

void CompileSummary::print(const Output& output) const {
  TextTable table({{"arch"},
                   {"family"},
                   {"programs", Align::right},
                   {"kernels", Align::right},
                   {"failed", Align::right},
                   {"spilled", Align::right},
                   {"max registers", Align::right},
                   {"max shared", Align::right},
                   {"cached", Align::right},
                   {"seconds", Align::right}});
  for (const Row& each : rows_)
    table.row({each.arch,
               each.family,
               fmt::format("{}", each.programs),
               fmt::format("{}", each.kernels),
               {fmt::format("{}", each.failed), each.failed > 0 ? Style::bad : Style::plain},
               {fmt::format("{}", each.spilled), each.spilled > 0 ? Style::caution : Style::plain},
               fmt::format("{}", each.registers),
               bytes_text(static_cast<double>(each.shared_bytes)),
               fmt::format("{}", each.cached),
               fmt::format("{:.1f}", each.seconds)});
  output.table(table);
  if (output.verbose())
    for (const std::string& warning : warnings_) output.line("warning: " + warning);
  for (const std::string& failure : failed_) output.line("failed: " + failure);
  output.document({{"failed", failed_.size()}, {"programs", programs_}});
}

}  // namespace fftune::tool
