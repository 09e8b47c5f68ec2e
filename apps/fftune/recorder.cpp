#include "apps/fftune/recorder.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include "core/error.hpp"

namespace fftune::tool {

void Recorder::write(const PresetRecord& record) {
  if (strict_ && !record.verdict.disturbances.empty()) {
    ++refused_;
    spdlog::error("{}: not written, as --strict asks: measured while disturbed: {}",
                  record.problem.text(), fmt::join(record.verdict.disturbances, ", "));
    return;
  }
  // Those before it first: they may be of the same problem.
  std::erase_if(unwritten_, [&](const PresetRecord& before) { return merge(before).empty(); });
  const std::string why = merge(record);
  if (why.empty()) return;
  unwritten_.push_back(record);
  spdlog::error("{}: not written, and tried again later: {}", record.problem.text(), why);
}

void Recorder::finish() {
  std::erase_if(unwritten_, [&](const PresetRecord& record) {
    const std::string why = merge(record);
    if (!why.empty()) spdlog::error("{}: not written: {}", record.problem.text(), why);
    return why.empty();
  });
}

ExitCode Recorder::code() const {
  if (!unwritten_.empty()) return exit_wrong_input;
  return refused_ > 0 ? exit_check_failed : exit_good;
}

std::string Recorder::merge(const PresetRecord& record) {
  const std::string& op = record.problem.op;
  try {
    files_.insert(
        merge_preset_records(folder_, device_, op, {record}, wait_, comparison_of(catalog_.op(op)))
            .string());
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::internal) throw;
    return error.what();
  }
  return "";
}

}  // namespace fftune::tool
