#include "tuning/journal/journal_lines.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/hash.hpp"
#include "store/json.hpp"
#include "store/renamed_parameters.hpp"
#include "tuning/journal/line_sum.hpp"

namespace fftune {
namespace {

JsonValue outcome_to_json(const Outcome& outcome) {
  JsonValue value{{"first_stage", outcome.first_stage},
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

/// Throws Error for a line that is not an outcome.
Outcome outcome_from_json(const JsonValue& value) {
  Outcome outcome;
  outcome.first_stage = field_as<std::size_t>(value, "first_stage");
  outcome.id = renamed_id(field_as<std::string>(value, "id"));
  outcome.kind = parse_outcome_kind(field_as<std::string>(value, "kind"));
  outcome.registers = field_as<int>(value, "registers");
  outcome.compile_seconds = field_as<double>(value, "compile_seconds");
  outcome.cached = field_as<bool>(value, "cached");
  // A number that is not finite is written as null.
  if (!member(value, "error").get_if<std::nullptr_t>())
    outcome.error = field_as<double>(value, "error");
  outcome.spill_bytes = field_or(value, "spill_bytes", 0);
  outcome.bits = field_or<std::string>(value, "bits", "");
  outcome.reason = field_or<std::string>(value, "reason", "");
  outcome.finalist = field_or(value, "finalist", false);
  if (value.find("us")) {
    const JsonValue& us = member(value, "us");
    outcome.samples = field_as<int>(us, "samples");
    outcome.median_us = field_as<double>(us, "median");
    outcome.low_us = field_as<double>(us, "low");
    outcome.high_us = field_as<double>(us, "high");
  }
  if (outcome.kind == OutcomeKind::measured && !(outcome.median_us > 0))
    throw Error(ErrorKind::invalid_input, "a measured outcome without a time");
  return outcome;
}

/// Throws Error for a line that is none of a journal's.
JournalEntry entry_of(const JsonValue& line) {
  JournalEntry entry;
  if (line.find("fftune")) {
    entry.header = {field_as<std::string>(line, "fftune"), field_as<std::string>(line, "device"),
                    field_as<std::string>(line, "driver"), field_as<std::string>(line, "toolkit"),
                    field_or<std::string>(line, "data", "")};
    return entry;
  }
  entry.problem = field_as<std::string>(line, "problem");
  entry.header_hash = field_or<std::string>(line, "header", "");
  if (line.find("launch")) {
    entry.kind = JournalEntry::Kind::launch;
    for (const auto& id : field_as<std::vector<std::string>>(line, "launch"))
      entry.ids.push_back(renamed_id(id));
    return entry;
  }
  entry.kind = JournalEntry::Kind::outcome;
  entry.sources = field_as<std::string>(line, "sources");
  entry.seconds = field_or(line, "seconds", 0.0);
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
  journal.whole_bytes = text.rfind('\n') == text.npos ? 0 : text.rfind('\n') + 1;
  bool any_sum = false;  // an older version's lines come first
  std::size_t number = 1;
  for (std::size_t begin = 0; begin < journal.whole_bytes; ++number) {
    const std::size_t end = text.find('\n', begin);
    const std::string_view own = std::string_view(text).substr(begin, end - begin);
    begin = end + 1;
    try {
      const LineSum sum = sum_of_line(own);
      any_sum = any_sum || sum == LineSum::right;
      if (sum == LineSum::wrong || (sum == LineSum::none && any_sum))
        throw Error(ErrorKind::invalid_input, "a line that was changed");
      journal.entries.push_back(entry_of(parse_json(own)));
    } catch (const Error&) {
      journal.damaged_lines.push_back(number);
    }
  }
  // Whatever follows the last newline was torn off in the middle of being written.
  if (journal.whole_bytes < text.size()) journal.damaged_lines.push_back(number);
  return journal;
}

std::string line_numbers(const std::vector<std::size_t>& lines) {
  constexpr std::size_t most = 8;
  const std::size_t named = std::min(lines.size(), most);
  const std::size_t others = lines.size() - named;
  // "1, 2 and 3"
  const std::size_t in_list = others == 0 && named > 1 ? named - 1 : named;
  std::string text = fmt::format(
      "{}{}", lines.size() == 1 ? "line " : "lines ",
      fmt::join(lines.begin(), lines.begin() + static_cast<std::ptrdiff_t>(in_list), ", "));
  if (others > 0) return text + fmt::format(" and {} more", others);
  return in_list < named ? text + fmt::format(" and {}", lines.back()) : text;
}

std::string journal_line(const JournalHeader& header) {
  return summed_line({{"fftune", header.fftune},
                      {"device", header.device},
                      {"driver", header.driver},
                      {"toolkit", header.toolkit},
                      {"data", header.data}});
}

std::string hash_of(const JournalHeader& header) {
  return hex(fnv1a(journal_line(header)));
}

std::string journal_line(const std::string& header_hash, const std::string& problem,
                         const std::vector<std::string>& launched) {
  return summed_line({{"launch", launched}, {"problem", problem}, {"header", header_hash}});
}

std::string journal_line(const std::string& header_hash, const std::string& problem,
                         const std::string& sources, double seconds, const Outcome& outcome) {
  JsonValue line = outcome_to_json(outcome);
  line["problem"] = problem;
  line["sources"] = sources;
  line["seconds"] = seconds;
  line["header"] = header_hash;
  return summed_line(line);
}

}  // namespace fftune
