#include "apps/fftune/recorder.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include "store/preset_file.hpp"

namespace fftune::tool {

void Recorder::write(const PresetRecord& record) {
  if (strict_ && !record.verdict.disturbances.empty()) {
    ++refused_;
    spdlog::error("{}: not written, as --strict asks: measured while disturbed: {}",
                  record.problem.text(), fmt::join(record.verdict.disturbances, ", "));
    return;
  }
  const std::string& op = record.problem.op;
  files_.insert(
      merge_preset_records(folder_, device_, op, {record}, wait_, comparison_of(catalog_.op(op)))
          .string());
}

}  // namespace fftune::tool
