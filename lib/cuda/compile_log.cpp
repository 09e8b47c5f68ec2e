#include "cuda/compile_log.hpp"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <limits>
#include <vector>

namespace fftune::cuda {
namespace {

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const auto end = std::min(text.find('\n'), text.size());
    lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != text.npos;
}

/// The number that stands before `unit`: 40 in "Used 40 registers"; 0 if there is none.
int number_before(std::string_view line, std::string_view unit) {
  const auto end = line.find(unit);
  if (end == line.npos) return 0;
  auto begin = end;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') --begin;
  std::int32_t value = 0;
  const auto [rest, error] = std::from_chars(line.data() + begin, line.data() + end, value);
  return error == std::errc() ? value : 0;
}

/// "(C7510) Potential Performance Loss: ..." and "ptxas warning : ...".
bool is_warning(std::string_view line) {
  return contains(line, "(C75") || line.rfind("ptxas warning", 0) == 0;
}

std::string_view trimmed(std::string_view line) {
  while (!line.empty() && (line.back() == ' ' || line.back() == '\r' || line.back() == '\t'))
    line.remove_suffix(1);
  while (!line.empty() && (line.front() == ' ' || line.front() == '\t')) line.remove_prefix(1);
  return line;
}

/// The text behind "ptxas info    : " and its kin.
std::string_view message_of(std::string_view line) {
  if (line.rfind("ptxas", 0) == 0)
    if (const auto colon = line.find(": "); colon != line.npos) line.remove_prefix(colon + 2);
  return trimmed(line);
}

/// "file(12): error: text" as "file:12: text".
std::string with_place(std::string_view line) {
  constexpr std::string_view mark = "): error: ";
  const auto close = line.find(mark);
  const auto open = close == line.npos ? line.npos : line.rfind('(', close);
  if (open == line.npos) return std::string(trimmed(line));
  return std::string(trimmed(line.substr(0, open))) + ":" +
         std::string(line.substr(open + 1, close - open - 1)) + ": " +
         std::string(trimmed(line.substr(close + mark.size())));
}

}  // namespace

KernelReport read_assembler_log(std::string_view log, std::string_view entry) {
  KernelReport report;
  std::int64_t spills = 0;
  bool ours = true;  // functions listed before any kernel may be called by it
  for (const auto line : lines_of(log)) {
    constexpr std::string_view start = "Compiling entry function '";
    if (const auto at = line.find(start); at != line.npos) {
      const auto name = line.substr(at + start.size());
      ours = entry.empty() || name.substr(0, name.find('\'')) == entry;
    }
    if (is_warning(line)) report.warnings.emplace_back(message_of(line));
    if (!ours) continue;
    spills += number_before(line, " bytes spill stores");
    spills += number_before(line, " bytes spill loads");
    if (contains(line, "Used ") && contains(line, " registers")) {
      report.registers = std::max(report.registers, number_before(line, " registers"));
      report.static_shared_bytes =
          std::max(report.static_shared_bytes, number_before(line, " bytes smem"));
    }
  }
  constexpr std::int64_t most = std::numeric_limits<int>::max();
  report.spill_bytes = static_cast<int>(std::min(spills, most));
  return report;
}

std::string first_error(std::string_view log) {
  const auto lines = lines_of(log);
  for (const auto line : lines)
    if (contains(line, "error: ") || contains(line, "ptxas error") || contains(line, "ptxas fatal"))
      return with_place(trimmed(line));
  for (const auto line : lines)
    if (!trimmed(line).empty()) return std::string(trimmed(line));
  return "the compiler gave no reason";
}

}  // namespace fftune::cuda
