#include "core/distribution.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/fork.hpp"
#include "core/hash.hpp"
#include "core/problem.hpp"

namespace fftune {
namespace {

constexpr std::array<std::pair<std::string_view, Pattern::Kind>, 4> kinds{
    {{"block", Pattern::Kind::block},
     {"tail", Pattern::Kind::tail},
     {"even", Pattern::Kind::even},
     {"random", Pattern::Kind::random}}};

bool is_uniform(const Pattern& pattern) {
  return pattern.share <= 0 || pattern.share >= 1;
}

}  // namespace

std::optional<Pattern> parse_pattern(std::string_view text) {
  if (text == "all") return Pattern{Pattern::Kind::block, 1};
  if (text == "none") return Pattern{Pattern::Kind::block, 0};
  const auto colon = text.find(':');
  if (colon == text.npos) return std::nullopt;
  const auto share = parse_number(text.substr(colon + 1));
  if (!share || !(*share >= 0 && *share <= 1)) return std::nullopt;
  for (const auto& [name, kind] : kinds)
    if (name == text.substr(0, colon)) return Pattern{kind, *share};
  return std::nullopt;
}

std::string pattern_text(const Pattern& pattern) {
  for (const auto& [name, kind] : kinds)
    if (kind == pattern.kind) return fmt::format("{}:{}", name, pattern.share);
  return "";
}

std::vector<std::uint8_t> draw_pattern(const Pattern& pattern, std::int64_t rows,
                                       std::uint64_t seed) {
  const auto marked = std::llround(pattern.share * static_cast<double>(rows));
  std::vector<std::uint8_t> marks(static_cast<std::size_t>(rows));
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::uint64_t bits = mix(mix(seed) + 0x9e3779b97f4a7c15u * (std::uint64_t(row) + 1));
    bool mark = false;
    switch (pattern.kind) {
      case Pattern::Kind::block:
        mark = row < marked;
        break;
      case Pattern::Kind::tail:
        mark = row >= rows - marked;
        break;
      case Pattern::Kind::even:
        mark = (row + 1) * marked / rows > row * marked / rows;
        break;
      case Pattern::Kind::random:
        mark = static_cast<double>(bits >> 11) * 0x1p-53 < pattern.share;
        break;
    }
    marks[static_cast<std::size_t>(row)] =
        mark ? static_cast<std::uint8_t>(1 + (bits & 0x7ff) % 255) : 0;
  }
  return marks;
}

double pattern_distance(const Pattern& a, const Pattern& b) {
  const bool alike = a.kind == b.kind || is_uniform(a) || is_uniform(b);
  return (std::abs(a.share - b.share) + (alike ? 0 : 1)) / 2;
}

std::vector<std::int64_t> sorted_by_mark(const std::vector<std::uint8_t>& marks) {
  std::vector<std::int64_t> order;
  order.reserve(marks.size());
  for (const bool marked : {true, false})
    for (std::size_t row = 0; row < marks.size(); ++row)
      if ((marks[row] != 0) == marked) order.push_back(static_cast<std::int64_t>(row));
  return order;
}

namespace {

constexpr double most_skew = 4;
constexpr std::string_view of_file = "file:";
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(mix(seed + golden)) {}
  std::uint64_t next() { return mix(state_ += golden); }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  std::uint64_t state_;
};

/// The ids of a text file, or what is wrong with it: one line that names it.
struct IdsOfFile {
  std::vector<std::int32_t> ids = {};
  std::string complaint = {};
};

IdsOfFile parse_ids(const std::string& file) {
  std::string words;
  try {
    words = read_whole_file(file);
  } catch (const Error& error) {
    return {.complaint = fmt::format("{}: {}", file, error.what())};
  }
  std::replace(words.begin(), words.end(), ',', ' ');
  std::istringstream all(words);
  IdsOfFile read;
  for (std::string word; all >> word;) {
    std::int32_t id = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), id);
    if (error == std::errc{} && end == word.data() + word.size() && id >= -1) {
      read.ids.push_back(id);
      continue;
    }
    const bool is_text =
        std::all_of(word.begin(), word.end(), [](unsigned char c) { return std::isgraph(c) != 0; });
    return {.complaint = fmt::format(
                "{}: {} is not an id: write the experts of each token as "
                "numbers from 0 on, or -1, separated by spaces",
                file, is_text ? "'" + word.substr(0, 40) + "'" : "a word that is no text")};
  }
  if (read.ids.empty()) return {.complaint = fmt::format("{}: there are no ids in it", file)};
  return read;
}

/// The file is read again when it has changed: a cost model asks for it at each of its steps.
std::shared_ptr<const IdsOfFile> read_ids(const std::string& file) {
  struct Known {
    std::filesystem::file_time_type changed;
    std::uintmax_t bytes = 0;
    std::shared_ptr<const IdsOfFile> ids;
  };
  static ForkMutex mutex;
  static std::map<std::string, Known>& known = *new std::map<std::string, Known>;
  std::error_code error;
  const auto changed = std::filesystem::last_write_time(file, error);
  const std::uintmax_t bytes = std::filesystem::file_size(file, error);
  const std::lock_guard lock(mutex.own());
  Known& entry = known[file];
  if (entry.ids == nullptr || error || entry.changed != changed || entry.bytes != bytes)
    entry = {changed, bytes, std::make_shared<const IdsOfFile>(parse_ids(file))};
  return entry.ids;
}

/// The probability of each expert as a single draw, the most popular first.
std::vector<double> popularity(const Routing& routing, std::int64_t experts) {
  std::vector<double> shares(static_cast<std::size_t>(experts));
  double sum = 0;
  for (std::size_t rank = 0; rank < shares.size(); ++rank)
    sum += shares[rank] = std::pow(static_cast<double>(rank + 1), -routing.skew);
  for (double& share : shares) share /= sum;
  return shares;
}

}  // namespace

std::optional<Routing> parse_routing(std::string_view text) {
  constexpr std::string_view zipf = "zipf:";
  if (text.substr(0, of_file.size()) == of_file && text.size() > of_file.size())
    return Routing{0, std::string(text.substr(of_file.size()))};
  if (text == "uniform") return Routing{0};
  if (text.substr(0, zipf.size()) != zipf) return std::nullopt;
  const auto skew = parse_number(text.substr(zipf.size()));
  if (!skew || !(*skew >= 0 && *skew <= most_skew)) return std::nullopt;
  return Routing{*skew};
}

std::string routing_text(const Routing& routing) {
  if (!routing.file.empty()) return std::string(of_file) + routing.file;
  return routing.skew == 0 ? "uniform" : fmt::format("zipf:{}", routing.skew);
}

std::vector<std::int32_t> draw_routing(const Routing& routing, std::int64_t tokens,
                                       std::int64_t experts, std::int64_t choices,
                                       std::uint64_t seed) {
  if (!routing.file.empty()) {
    const auto read = read_ids(routing.file);
    const IdsOfFile& given = *read;
    const auto complain = [&](std::string what) {
      throw Error(ErrorKind::invalid_input, std::move(what));
    };
    if (!given.complaint.empty()) complain(given.complaint);
    if (std::ssize(given.ids) % choices != 0)
      complain(fmt::format("{}: {} ids are no whole number of tokens with {} choices each",
                           routing.file, given.ids.size(), choices));
    const std::int32_t largest = *std::max_element(given.ids.begin(), given.ids.end());
    if (largest >= experts)
      complain(
          fmt::format("{}: there is no expert {}: they are 0 to {}, and -1 is one that is not "
                      "here",
                      routing.file, largest, experts - 1));
    std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * choices));
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = given.ids[i % given.ids.size()];
    return ids;
  }
  Random random(seed);
  std::vector<std::int32_t> by_rank(static_cast<std::size_t>(experts));
  std::iota(by_rank.begin(), by_rank.end(), 0);
  for (std::size_t i = by_rank.size(); i > 1; --i)
    std::swap(by_rank[i - 1], by_rank[random.next() % i]);
  std::vector<double> cumulative = popularity(routing, experts);
  std::partial_sum(cumulative.begin(), cumulative.end(), cumulative.begin());
  std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * choices));
  std::vector<std::int64_t> chosen_by(by_rank.size(), -1);  // the last token that chose the expert
  const auto draw = [&]() -> std::size_t {
    const auto found = std::lower_bound(cumulative.begin(), cumulative.end(), random.unit());
    return std::min<std::size_t>(static_cast<std::size_t>(found - cumulative.begin()),
                                 cumulative.size() - 1);
  };
  for (std::int64_t token = 0; token < tokens; ++token)
    for (std::int64_t choice = 0; choice < choices; ++choice) {
      std::size_t rank = draw();
      // Where few experts have nearly all of the probability, the next one that is left.
      for (int attempt = 0; attempt < 64 && chosen_by[rank] == token; ++attempt) rank = draw();
      while (chosen_by[rank] == token) rank = (rank + 1) % by_rank.size();
      chosen_by[rank] = token;
      ids[static_cast<std::size_t>(token * choices + choice)] = by_rank[rank];
    }
  return ids;
}

std::vector<ExpertsAlike> expected_tokens(const Routing& routing, std::int64_t tokens,
                                          std::int64_t experts, std::int64_t choices) {
  const auto all = static_cast<double>(tokens), wanted = static_cast<double>(choices);
  const auto count = static_cast<double>(experts);
  if (const auto read = routing.file.empty() ? nullptr : read_ids(routing.file);
      read != nullptr && !read->ids.empty()) {
    const std::vector<std::int32_t>& given = read->ids;
    std::vector<double> rows(static_cast<std::size_t>(experts));
    for (const std::int32_t id : given)
      if (id >= 0 && id < experts) ++rows[static_cast<std::size_t>(id)];
    std::sort(rows.rbegin(), rows.rend());
    std::vector<ExpertsAlike> alike;
    for (const double row : rows)
      alike.push_back({1, row * all * wanted / static_cast<double>(given.size())});
    return alike;
  }
  if (routing.skew == 0 || choices >= experts)
    return {{count, all * std::min(1.0, wanted / count)}};
  // Ranks [first, last) that are within a quarter of each other are taken as one.
  std::vector<ExpertsAlike> alike;
  std::vector<double> weights;
  for (std::int64_t first = 0; first < experts;) {
    const std::int64_t last = std::min(experts, first + 1 + first / 4);
    double weight = 0;
    for (std::int64_t rank = first; rank < last; ++rank)
      weight += std::pow(static_cast<double>(rank + 1), -routing.skew);
    alike.push_back({static_cast<double>(last - first), 0});
    weights.push_back(weight / alike.back().experts);
    first = last;
  }
  // Drawing without repetition is, in expectation, close to giving an expert of weight w the share
  // 1 - e^(-t w) of the tokens, with t such that the shares add up to the choices of a token.
  const auto chosen = [&](double t) {
    double sum = 0;
    for (std::size_t i = 0; i < alike.size(); ++i)
      sum += alike[i].experts * (1 - std::exp(-t * weights[i]));
    return sum;
  };
  double low = 0, high = 1;
  while (chosen(high) < wanted) high *= 2;
  for (int step = 0; step < 30; ++step) {
    const double middle = (low + high) / 2;
    (chosen(middle) < wanted ? low : high) = middle;
  }
  for (std::size_t i = 0; i < alike.size(); ++i)
    alike[i].tokens = all * (1 - std::exp(-high * weights[i]));
  return alike;
}

double routing_distance(const Routing& a, const Routing& b) {
  if (a.file != b.file) return 0.5;
  return std::abs(a.skew - b.skew) / most_skew;
}

SortedRouting sorted_routing(const std::vector<std::int32_t>& ids, std::int64_t experts,
                             std::int64_t choices) {
  SortedRouting sorted;
  sorted.offsets.assign(static_cast<std::size_t>(experts) + 1, 0);
  sorted.tokens.assign(ids.size(), 0);
  sorted.places.assign(ids.size(), -1);
  const auto is_here = [&](std::int32_t id) { return id >= 0 && id < experts; };
  for (const std::int32_t id : ids)
    if (is_here(id)) ++sorted.offsets[static_cast<std::size_t>(id) + 1];
  std::partial_sum(sorted.offsets.begin(), sorted.offsets.end(), sorted.offsets.begin());
  std::vector<std::int32_t> next(sorted.offsets.begin(), sorted.offsets.end() - 1);
  for (std::size_t choice = 0; choice < ids.size(); ++choice) {
    if (!is_here(ids[choice])) continue;
    const std::int32_t place = next[static_cast<std::size_t>(ids[choice])]++;
    sorted.places[choice] = place;
    sorted.tokens[static_cast<std::size_t>(place)] =
        static_cast<std::int32_t>(choice / static_cast<std::size_t>(choices));
  }
  return sorted;
}

}  // namespace fftune
