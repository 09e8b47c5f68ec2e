#include "tuning/journal/line_sum.hpp"

#include "core/hash.hpp"

namespace fftune {
namespace {

constexpr std::string_view sum_start = R"(,"sum":")";
constexpr std::string_view sum_end = R"("})";
constexpr std::size_t sum_digits = 16;

}  // namespace

std::string summed_line(const JsonValue& object) {
  std::string line = json_line(object);
  line.pop_back();  // the brace
  const std::string sum = hex(fnv1a(line));
  return line.append(sum_start).append(sum).append(sum_end);
}

LineSum sum_of_line(std::string_view line) {
  constexpr std::size_t bytes = sum_start.size() + sum_digits + sum_end.size();
  if (line.size() < bytes) return LineSum::none;
  const std::string_view before = line.substr(0, line.size() - bytes);
  const std::string_view sum = line.substr(before.size());
  if (!sum.starts_with(sum_start) || !sum.ends_with(sum_end)) return LineSum::none;
  return sum.substr(sum_start.size(), sum_digits) == hex(fnv1a(before)) ? LineSum::right
                                                                        : LineSum::wrong;
}

}  // namespace fftune
