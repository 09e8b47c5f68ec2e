#include "tuning/journal/journal.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <system_error>
#include <vector>

#include "core/error.hpp"
#include "store/renamed_parameters.hpp"

namespace fftune {
namespace {

using nlohmann::json;

// Names of files and messages of compilers may hold any bytes: they become U+FFFD, not an error.
std::string compact(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

json header(const DeviceFacts& facts) {
  return {{"fftune", FFTUNE_VERSION},
          {"device", facts.name},
          {"driver", facts.driver},
          {"toolkit", facts.toolkit}};
}

json outcome_to_json(const Outcome& outcome) {
  json value{{"first_stage", outcome.first_stage},
             {"id", outcome.id},
             {"kind", outcome_kind_name(outcome.kind)},
             {"registers", outcome.registers},
             {"compile_seconds", outcome.compile_seconds},
             {"cached", outcome.cached},
             {"error", outcome.error}};
  if (outcome.spill_bytes) value["spill_bytes"] = outcome.spill_bytes;
  if (!outcome.bits.empty()) value["bits"] = outcome.bits;
  if (!outcome.reason.empty()) value["reason"] = outcome.reason;
  if (outcome.samples)
    value["us"] = {{"samples", outcome.samples},
                   {"median", outcome.median_us},
                   {"low", outcome.low_us},
                   {"high", outcome.high_us}};
  if (outcome.finalist) value["finalist"] = true;
  return value;
}

/// Throws json::exception or Error for a line that is not an outcome.
Outcome outcome_from_json(const json& value) {
  Outcome outcome;
  outcome.first_stage = value.at("first_stage").get<std::size_t>();
  outcome.id = renamed_id(value.at("id").get<std::string>());
  outcome.kind = parse_outcome_kind(value.at("kind").get<std::string>());
  outcome.registers = value.at("registers").get<int>();
  outcome.compile_seconds = value.at("compile_seconds").get<double>();
  outcome.cached = value.at("cached").get<bool>();
  // A number that is not finite is written as null.
  if (value.at("error").is_number()) outcome.error = value.at("error").get<double>();
  outcome.spill_bytes = value.value("spill_bytes", 0);
  outcome.bits = value.value("bits", "");
  outcome.reason = value.value("reason", "");
  outcome.finalist = value.value("finalist", false);
  if (value.contains("us")) {
    const auto& us = value.at("us");
    outcome.samples = us.at("samples").get<int>();
    outcome.median_us = us.at("median").get<double>();
    outcome.low_us = us.at("low").get<double>();
    outcome.high_us = us.at("high").get<double>();
  }
  if (outcome.kind == OutcomeKind::measured && !(outcome.median_us > 0))
    throw Error(ErrorKind::invalid_input, "a measured outcome without a time");
  return outcome;
}

std::string new_name(const std::string& op) {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char stamp[sizeof "20261121T140322Z"];
  std::strftime(stamp, sizeof stamp, "%Y%m%dT%H%M%SZ", &utc);
  return fmt::format("{}-{}-{}.jsonl", op, stamp, getpid());
}

/// The journals of the op by the time of their last line, the newest last: a name has the time by a
/// clock that may have been wrong.
std::vector<std::filesystem::path> journals_of(const std::filesystem::path& folder,
                                               const std::string& op) {
  std::vector<std::filesystem::path> all;
  std::error_code ignored;  // no folder: no journal
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    const auto name = entry.path().filename().string();
    // The stamp begins with a digit, so that op "ffn" does not take the journals of "ffn-x".
    const bool ours = name.starts_with(op + "-") && name.ends_with(".jsonl") &&
                      name[op.size() + 1] >= '0' && name[op.size() + 1] <= '9';
    if (ours && entry.is_regular_file(ignored)) all.push_back(entry.path());
  }
  std::vector<std::pair<std::filesystem::file_time_type, std::filesystem::path>> dated;
  for (auto& path : all) dated.emplace_back(std::filesystem::last_write_time(path, ignored), path);
  std::sort(dated.begin(), dated.end());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = std::move(dated[i].second);
  return all;
}

/// How many journals of each op and device are kept. A sweep that runs is among the newest; one
/// whose journal is removed nevertheless goes on, and cannot be resumed.
constexpr std::size_t most_journals = 32;

void remove_oldest(const std::vector<std::filesystem::path>& journals,
                   const std::filesystem::path& own) {
  std::error_code ignored;  // another process may have been first
  for (std::size_t i = 0; i + most_journals < journals.size(); ++i)
    if (journals[i] != own) std::filesystem::remove(journals[i], ignored);
}

}  // namespace

Journal Journal::open(const std::filesystem::path& folder, const DeviceFacts& facts,
                      const std::string& op, bool resume) {
  const auto own_folder = folder / facts.slug();
  const auto fail = [&](const std::filesystem::path& path, const std::string& why) {
    throw Error(ErrorKind::io, fmt::format("cannot write the sweep's journal {}: {}; give another "
                                           "state folder by XDG_STATE_HOME",
                                           path.string(), why));
  };
  std::error_code error;
  std::filesystem::create_directories(own_folder, error);
  if (error) fail(own_folder, error.message());

  Journal journal;
  const auto present = journals_of(own_folder, op);
  if (resume && !present.empty()) {
    journal.path_ = present.back();
    journal.read_back(facts);
  } else {
    journal.path_ = own_folder / new_name(op);
  }
  journal.file_.reset(std::fopen(journal.path_.c_str(), "ab"));
  if (!journal.file_) fail(journal.path_, std::strerror(errno));
  journal.write_line(compact(header(facts)));
  remove_oldest(journals_of(own_folder, op), journal.path_);
  return journal;
}

void Journal::read_back(const DeviceFacts& facts) {
  std::ifstream in(path_, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  // Whatever follows the last newline was torn off in the middle of being written.
  const std::size_t whole = text.rfind('\n') == text.npos ? 0 : text.rfind('\n') + 1;
  if (whole < text.size()) {
    ++damaged_lines_;
    std::error_code error;
    std::filesystem::resize_file(path_, whole, error);
    if (error)
      throw Error(ErrorKind::io,
                  fmt::format("cannot repair {}: {}", path_.string(), error.message()));
  }
  bool ours = false;  // the lines after a header of this very device, driver and toolkit
  for (std::size_t begin = 0; begin < whole;) {
    const std::size_t end = text.find('\n', begin);
    const auto first = text.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto last = text.begin() + static_cast<std::ptrdiff_t>(end);
    begin = end + 1;
    const json line = json::parse(first, last, nullptr, false);
    try {
      if (line.contains("fftune")) {
        ours = line == header(facts);
      } else if (line.contains("launch")) {
        interrupted_.clear();
        for (const auto& id : line.at("launch").get<std::set<std::string>>())
          interrupted_.insert(renamed_id(id));
      } else {
        auto outcome = outcome_from_json(line);
        const Key key{line.at("problem").get<std::string>(), line.at("sources").get<std::string>(),
                      outcome.first_stage, outcome.id};
        interrupted_.erase(outcome.id);
        if (ours) known_[key] = std::move(outcome);
      }
    } catch (const json::exception&) {
      ++damaged_lines_;
    } catch (const Error&) {
      ++damaged_lines_;
    }
  }
}

std::optional<Outcome> Journal::known(const Problem& problem, const std::string& source_hash,
                                      std::size_t first_stage, const std::string& id) const {
  const auto found = known_.find({problem.text(), source_hash, first_stage, id});
  if (found == known_.end()) return {};
  return found->second;
}

void Journal::launch(const Problem& problem, const std::vector<std::string>& ids) {
  if (file_) write_line(compact({{"launch", ids}, {"problem", problem.text()}}));
}

void Journal::add(const Problem& problem, const std::string& source_hash, const Outcome& outcome) {
  if (!file_) return;
  json line = outcome_to_json(outcome);
  line["problem"] = problem.text();
  line["sources"] = source_hash;
  write_line(compact(line));
}

void Journal::sync() {
  // Synced one by one, lines would take longer than the variants that they tell of.
  const auto now = std::chrono::steady_clock::now();
  if (now - synced_ < std::chrono::seconds(1)) return;
  synced_ = now;
  ::fdatasync(::fileno(file_.get()));
}

void Journal::write_line(const std::string& line) {
  const std::string text = line + '\n';
  if (std::fwrite(text.data(), 1, text.size(), file_.get()) == text.size() &&
      std::fflush(file_.get()) == 0)
    return sync();
  spdlog::warn("the sweep goes on without its journal {}: {}", path_.string(),
               std::strerror(errno));
  file_.reset();
}

}  // namespace fftune
