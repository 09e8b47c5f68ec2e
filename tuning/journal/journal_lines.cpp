#include "tuning/journal/journal_lines.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "store/renamed_parameters.hpp"

namespace fftune {
namespace {

using nlohmann::json;

// Names of files and messages of compilers may hold any bytes: they become U+FFFD, not an error.
std::string compact(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
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

/// Throws json::exception or Error for a line that is none of a journal's.
JournalEntry entry_of(const json& line) {
  JournalEntry entry;
  if (line.contains("fftune")) {
    entry.header = {line.at("fftune").get<std::string>(), line.at("device").get<std::string>(),
                    line.at("driver").get<std::string>(), line.at("toolkit").get<std::string>(),
                    line.value("data", "")};
    return entry;
  }
  entry.problem = line.at("problem").get<std::string>();
  if (line.contains("launch")) {
    entry.kind = JournalEntry::Kind::launch;
    for (const auto& id : line.at("launch").get<std::vector<std::string>>())
      entry.ids.push_back(renamed_id(id));
    return entry;
  }
  entry.kind = JournalEntry::Kind::outcome;
  entry.sources = line.at("sources").get<std::string>();
  entry.seconds = line.value("seconds", 0.0);
  entry.outcome = outcome_from_json(line);
  return entry;
}

}  // namespace

JournalText read_journal(const std::filesystem::path& path) {
  try {
    return parse_journal(read_whole_file(path, most_journal_bytes));
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("the journal {} {}", path.string(), error.what()));
  }
}

JournalText parse_journal(const std::string& text) {
  JournalText journal;
  journal.bytes = text.size();
  // Whatever follows the last newline was torn off in the middle of being written.
  journal.whole_bytes = text.rfind('\n') == text.npos ? 0 : text.rfind('\n') + 1;
  if (journal.whole_bytes < text.size()) ++journal.damaged_lines;
  for (std::size_t begin = 0; begin < journal.whole_bytes;) {
    const std::size_t end = text.find('\n', begin);
    const auto first = text.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto last = text.begin() + static_cast<std::ptrdiff_t>(end);
    begin = end + 1;
    try {
      journal.entries.push_back(entry_of(json::parse(first, last, nullptr, false)));
    } catch (const json::exception&) {
      ++journal.damaged_lines;
    } catch (const Error&) {
      ++journal.damaged_lines;
    }
  }
  return journal;
}

std::string journal_line(const JournalHeader& header) {
  return compact({{"fftune", header.fftune},
                  {"device", header.device},
                  {"driver", header.driver},
                  {"toolkit", header.toolkit},
                  {"data", header.data}});
}

std::string journal_line(const std::string& problem, const std::vector<std::string>& launched) {
  return compact({{"launch", launched}, {"problem", problem}});
}

std::string journal_line(const std::string& problem, const std::string& sources, double seconds,
                         const Outcome& outcome) {
  json line = outcome_to_json(outcome);
  line["problem"] = problem;
  line["sources"] = sources;
  line["seconds"] = seconds;
  return compact(line);
}

}  // namespace fftune
