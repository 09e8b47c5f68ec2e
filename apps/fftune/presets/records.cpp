#include "apps/fftune/presets/records.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.hpp"
#include "registry/op.hpp"
#include "tuning/log.hpp"

namespace fftune::tool {

std::string kept_out(const TuneResult& result, const Admission& admission) {
  const Verdict& verdict = result.record->verdict;
  const auto disturbed =
      fmt::format("measured while disturbed: {}", fmt::join(verdict.disturbances, ", "));
  if (!result.lacked.empty())
    return fmt::format(
        "the machine lacks memory for the moment, so what is best may be left out: "
        "{}; search again when there is more",
        result.lacked);
  if (verdict.disturbances.empty()) return "";
  if (admission.strict) return "as --strict asks: " + disturbed;
  if (admission.keep_undecided || verdict.decided.value_or(true)) return "";
  return fmt::format("undecided, and {}; search again on a quiet machine, or --keep-undecided",
                     disturbed);
}

void Recorder::write(const TuneResult& result) {
  const PresetRecord& record = *result.record;
  if (const std::string why = kept_out(result, admission_); !why.empty()) {
    ++refused_;
    logging::error("{}: not written, {}", record.problem.text(), why);
    return;
  }
  // Those before it first: they may be of the same problem.
  std::erase_if(unwritten_, [&](const PresetRecord& before) { return merge(before).empty(); });
  const std::string why = merge(record);
  if (why.empty()) return;
  unwritten_.push_back(record);
  logging::error("{}: not written, and tried again later: {}", record.problem.text(), why);
}

void Recorder::finish() {
  std::erase_if(unwritten_, [&](const PresetRecord& record) {
    const std::string why = merge(record);
    if (!why.empty()) logging::error("{}: not written: {}", record.problem.text(), why);
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

std::map<Problem, PresetRecord> own_records(const std::filesystem::path& folder,
                                            const PresetDevice& device, const Op& op) {
  const auto path = preset_path(folder, device.slug, std::string(op.name()));
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
  const fftune::Comparison comparison = comparison_of(op);
  std::map<Problem, Recipe> winners;
  for (const Problem& repeated : problems) {
    const Problem problem = unrepeated(op, repeated);  // what records are of
    const auto found = records.find(compared_part(problem, comparison));
    if (found != records.end()) winners[problem] = found->second.recipe();
  }
  return winners;
}

LockWait lock_wait(const std::atomic<bool>* cancelled) {
  LockWait wait;
  wait.tell = [](const std::string& line) { logging::warn("{}", line); };
  if (cancelled) wait.cancelled = [cancelled] { return cancelled->load(); };
  return wait;
}

void require_out(const std::filesystem::path& folder, const PresetDevice& device,
                 const std::string& op, const LockWait& wait, const std::string& where) {
  try {
    require_mergeable(folder, device, op, wait);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::io) throw;
    throw Error(ErrorKind::io,
                fmt::format("{} {} cannot be written: {}", where, folder.string(), error.what()));
  }
}

void require_writable_file(const std::filesystem::path& file, const std::string& where) {
  try {
    require_replaceable(file);
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("{} {}: {}", where, file.string(), error.what()));
  }
}

}  // namespace fftune::tool
