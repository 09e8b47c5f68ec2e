#include "store/preset_library.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <system_error>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/distribution.hpp"

namespace fftune {
namespace {

constexpr double token_weight = 0.5;
constexpr double pattern_weight = 0.5;

/// How unlike two patterns, or two routings, are; nothing if the words are not both the same thing.
std::optional<double> pattern_difference(const std::string& a, const std::string& b) {
  if (const auto one = parse_pattern(a), other = parse_pattern(b); one && other)
    return pattern_distance(*one, *other);
  if (const auto one = parse_routing(a), other = parse_routing(b); one && other)
    return routing_distance(*one, *other);
  return std::nullopt;
}

bool same_names(const Problem& a, const Problem& b) {
  return std::equal(a.sizes.begin(), a.sizes.end(), b.sizes.begin(), b.sizes.end(),
                    [](const auto& x, const auto& y) { return x.first == y.first; });
}

/// The compared options but those that are numbers, which decide nothing about speed
/// (OptionField::number) and may be left out, and patterns, which decide how near the problems are.
std::map<std::string, std::string> words(const Problem& compared, const Comparison& comparison) {
  auto options = compared.options;
  std::erase_if(options, [&](const auto& option) {
    const auto& [name, value] = option;
    return (comparison.numbers.contains(name) && parse_number(value)) ||
           (comparison.patterns.contains(name) && pattern_difference(value, value));
  });
  return options;
}

/// Illegal records of other shapes that are passed over: whether one is legal takes microseconds,
/// and where this many are not, the file is of another version of fftune.
constexpr std::size_t most_refused = 16;

/// All but the shape, the options that are numbers or patterns, and what is performance-neutral:
/// what has to be the same.
std::string alike_key(const Problem& problem, const Comparison& comparison) {
  const Problem compared = compared_part(problem, comparison);
  std::string key = fmt::format("{}/{}/{}", problem.op, problem.pass, dtype_name(problem.dtype));
  for (const auto& [name, value] : compared.sizes) key += fmt::format("/{}", name);
  for (const auto& [name, value] : words(compared, comparison))
    key += fmt::format("/{}={}", name, value);
  return key;
}

std::string exact_key(const Problem& problem, const Comparison& comparison) {
  std::string key = alike_key(problem, comparison);
  for (const auto& [name, value] : compared_part(problem, comparison).sizes)
    key += fmt::format("/{}", value);
  for (const auto& name : comparison.patterns)
    if (const auto option = problem.options.find(name); option != problem.options.end())
      key += fmt::format("/{}", option->second);
  return key;
}

double log_ratio(double a, double b) {
  return std::abs(std::log2(a / b));
}

/// The sizes that distance() sums up, as logarithms: the sum of the absolute differences of two
/// points is at most the distance of their problems, which counts patterns too.
using Point = std::vector<double>;

Point point_of(const Problem& problem, const Comparison& comparison) {
  Point point;
  for (const auto& [name, value] : compared_part(problem, comparison).sizes) {
    const double octaves = std::log2(static_cast<double>(std::max<std::int64_t>(value, 1)));
    point.push_back(name == comparison.token_size ? token_weight * octaves : octaves);
  }
  return point;
}

/// Points from the nearest to the farthest, equally near ones by their index. All are compared, but
/// `distance`, which takes longer, is asked only for those that may be next.
class NearestFirst {
 public:
  /// `points`: the coordinates of `count` points, one after the other.
  NearestFirst(const std::vector<double>& points, std::size_t count, const Point& from,
               std::function<double(std::size_t)> distance)
      : distance_(std::move(distance)), least_(count), known_(count) {
    constexpr double rounding = 1e-9;  // distance() is rounded otherwise than the sum
    const double* coordinate = points.data();
    for (double& least : least_) {
      least = -rounding;
      for (const double own : from) least += std::abs(*coordinate++ - own);
    }
  }

  struct Near {
    std::size_t index = 0;
    double distance = 0;
  };
  std::optional<Near> next() {
    constexpr double never = std::numeric_limits<double>::infinity();
    while (true) {
      std::size_t first = 0;
      for (std::size_t i = 1; i < least_.size(); ++i)
        // At equal distances a bound comes first: its point may have a smaller index.
        if (least_[i] < least_[first] || (least_[i] == least_[first] && known_[i] < known_[first]))
          first = i;
      if (least_.empty() || known_[first] == 2) return std::nullopt;
      if (known_[first] == 1) {
        known_[first] = 2;
        return Near{first, std::exchange(least_[first], never)};
      }
      least_[first] = distance_(first);
      known_[first] = 1;
    }
  }

 private:
  std::function<double(std::size_t)> distance_;
  std::vector<double> least_;        // the distance, or a bound of it
  std::vector<std::uint8_t> known_;  // 0: a bound; 1: the distance; 2: it has been returned
};

std::string device_words(DeviceMatch match, const PresetDevice& preset, const DeviceFacts& device) {
  const char* units = device.kind == DeviceKind::cpu ? "cores" : "SMs";
  switch (match) {
    case DeviceMatch::exact:
      return "exact device";
    case DeviceMatch::alias:
      return fmt::format("{} counts as {}", device.name, preset.name);
    case DeviceMatch::same_arch_and_size:
      return fmt::format("{}, the same architecture {} and {} {}", preset.name, device.arch,
                         device.multiprocessors, units);
    case DeviceMatch::same_arch:
      break;
  }
  return fmt::format("{}, the same architecture {} with {} {} where this has {}", preset.name,
                     device.arch, preset.multiprocessors, units, device.multiprocessors);
}

std::string shape_words(const Problem& record, const Problem& problem,
                        const Comparison& comparison) {
  std::string differing;
  const auto wanted = compared_part(problem, comparison).sizes;
  for (const auto& [name, value] : compared_part(record, comparison).sizes)
    if (wanted.at(name) != value) differing += fmt::format(" {}={}", name, value);
  std::string pattern;
  for (const auto& name : comparison.patterns) {
    const auto here = problem.options.find(name), there = record.options.find(name);
    if (here != problem.options.end() && there != record.options.end() && *here != *there)
      pattern += fmt::format(", nearest pattern {}={}", name, there->second);
  }
  return (differing.empty() ? "exact shape" : "nearest shape" + differing) + pattern;
}

}  // namespace

std::optional<DeviceMatch> device_match(const PresetDevice& preset, const DeviceFacts& device) {
  if (preset.kind != device.kind) return std::nullopt;
  if (preset.slug == device.slug()) return DeviceMatch::exact;
  for (const auto& alias : preset.aliases)
    if (slug_of(alias) == slug_of(device.name)) return DeviceMatch::alias;
  if (preset.arch != device.arch) return std::nullopt;
  return preset.multiprocessors == device.multiprocessors ? DeviceMatch::same_arch_and_size
                                                          : DeviceMatch::same_arch;
}

PresetLibrary PresetLibrary::load(const std::vector<std::filesystem::path>& folders) {
  PresetLibrary library;
  std::set<std::filesystem::path> seen;
  for (std::size_t i = 0; i < folders.size(); ++i) {
    std::error_code error;
    const auto real = std::filesystem::weakly_canonical(folders[i], error);
    if (!seen.insert(error ? folders[i] : real).second) continue;  // named twice
    for (auto& file : read_preset_folder(folders[i])) {
      library.files_.push_back(std::move(file));
      library.folders_.push_back(i);
    }
  }
  return library;
}

/// Records that differ only in the shape, from one folder and from devices with the same relation
/// to this one.
struct PresetLibrary::Shelf {
  DeviceMatch match = DeviceMatch::exact;
  std::size_t folder = 0;
  std::size_t count = 0;
  /// Records of one shape are together: those of the device nearest in size first, and equally near
  /// ones in the order of paths and problems.
  std::vector<std::vector<RecordIndex>> shapes{};
  std::unordered_map<std::string, std::size_t> by_key{};  // of `shapes`
  std::vector<double> points{};                           // point_of() of each
};

/// The shelves by what has to agree, best first.
struct PresetLibrary::Index {
  std::unordered_map<std::string, std::vector<Shelf>> shelves;
};

struct PresetLibrary::Indexes {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const Index>> known;
};

PresetLibrary::PresetLibrary() : indexes_(std::make_shared<Indexes>()) {}

std::shared_ptr<const PresetLibrary::Index> PresetLibrary::index_of(
    const std::string& op, const DeviceFacts& device, const Comparison& comparison) const {
  const auto key =
      fmt::format("{}|{}|{}|{}|{}|{}|{}|{}|{}|{}", op, static_cast<int>(device.kind), device.name,
                  device.arch, device.multiprocessors, comparison.token_size,
                  fmt::join(comparison.numbers, ","), fmt::join(comparison.patterns, ","),
                  fmt::join(comparison.neutral, ","), comparison.unified != nullptr);
  const std::lock_guard lock(indexes_->mutex);
  auto& known = indexes_->known[key];
  if (!known) known = make_index(op, device, comparison);
  return known;
}

std::shared_ptr<const PresetLibrary::Index> PresetLibrary::make_index(
    const std::string& op, const DeviceFacts& device, const Comparison& comparison) const {
  struct Sorted {
    double size_difference;  // |log2| of the ratio of SM counts
    RecordIndex index;
  };
  using Rank = std::pair<DeviceMatch, std::size_t>;  // and the folder
  using ByShape = std::map<std::string, std::vector<Sorted>>;
  std::map<std::string, std::map<Rank, ByShape>> sorted;
  for (std::size_t file = 0; file < files_.size(); ++file) {
    const auto match = device_match(files_[file].device, device);
    if (!match || files_[file].op != op) continue;
    const double size_difference = log_ratio(std::max(files_[file].device.multiprocessors, 1),
                                             std::max(device.multiprocessors, 1));
    for (std::size_t i = 0; i < files_[file].records.size(); ++i) {
      const auto& problem = files_[file].records[i].problem;
      sorted[alike_key(problem, comparison)][{*match, folders_[file]}]
            [exact_key(problem, comparison)]
                .push_back({size_difference, {file, i}});
    }
  }
  const auto nearer = [](const Sorted& a, const Sorted& b) {
    return std::tie(a.size_difference, a.index.file, a.index.record) <
           std::tie(b.size_difference, b.index.file, b.index.record);
  };
  auto index = std::make_shared<Index>();
  for (auto& [alike, ranks] : sorted)
    for (auto& [rank, by_shape] : ranks) {
      std::vector<std::pair<std::string, std::vector<Sorted>>> shapes(by_shape.begin(),
                                                                      by_shape.end());
      for (auto& [key, places] : shapes) std::sort(places.begin(), places.end(), nearer);
      std::sort(shapes.begin(), shapes.end(), [&](const auto& a, const auto& b) {
        return nearer(a.second.front(), b.second.front());
      });
      Shelf shelf{.match = rank.first, .folder = rank.second};
      for (const auto& [key, places] : shapes) {
        const Point point = point_of(record_at(places.front().index).problem, comparison);
        shelf.points.insert(shelf.points.end(), point.begin(), point.end());
        shelf.by_key[key] = shelf.shapes.size();
        auto& shape = shelf.shapes.emplace_back();
        for (const auto& each : places) shape.push_back(each.index);
        shelf.count += shape.size();
      }
      index->shelves[alike].push_back(std::move(shelf));
    }
  return index;
}

std::optional<PresetMatch> PresetLibrary::find(const Problem& problem, const DeviceFacts& device,
                                               const Legality& illegal,
                                               const Comparison& comparison) const {
  return search(problem, device, illegal, comparison).match;
}

PresetLibrary::Search PresetLibrary::search(const Problem& problem, const DeviceFacts& device,
                                            const Legality& illegal,
                                            const Comparison& comparison) const {
  const auto index = index_of(problem.op, device, comparison);
  const auto shelves = index->shelves.find(alike_key(problem, comparison));
  Search result;
  if (shelves == index->shelves.end()) return result;
  const auto key = exact_key(problem, comparison);
  const auto point = point_of(problem, comparison);
  const auto sizes = compared_part(problem, comparison).sizes;

  const auto serves = [&](const Shelf& shelf, const RecordIndex& where, double distance) {
    const auto& file = files_[where.file];
    const auto& record = record_at(where);
    if (const auto refusal = illegal(record, problem); !refusal.empty()) {
      if (result.refused++ == 0)
        result.first_refusal =
            fmt::format("{}: {}: {}", file.path.string(), record.problem.text(), refusal);
      return false;
    }
    auto reason = fmt::format("{}: {}, {}", file.path.string(),
                              device_words(shelf.match, file.device, device),
                              shape_words(record.problem, problem, comparison));
    if (result.refused > 0)
      reason +=
          fmt::format("; {} nearer {} illegal here, the first {}", result.refused,
                      result.refused == 1 ? "record is" : "records are", result.first_refusal);
    const bool exact_shape = compared_part(record.problem, comparison).sizes == sizes;
    result.match =
        PresetMatch{&record, file.path, shelf.match, exact_shape, distance, std::move(reason)};
    return true;
  };
  for (const Shelf& shelf : shelves->second) {
    std::size_t tried = 0;
    // Those of the same shape first: mostly one of them serves, and the others are not looked at.
    const auto exact = shelf.by_key.find(key);
    if (exact != shelf.by_key.end())
      for (const RecordIndex& where : shelf.shapes[exact->second]) {
        ++tried;
        if (serves(shelf, where, 0)) return result;
      }
    NearestFirst nearest(shelf.points, shelf.shapes.size(), point, [&](std::size_t shape) {
      return distance(record_at(shelf.shapes[shape].front()).problem, problem, comparison);
    });
    while (result.refused < most_refused) {
      const auto near = nearest.next();
      if (!near) break;
      if (exact != shelf.by_key.end() && near->index == exact->second) continue;
      for (const RecordIndex& where : shelf.shapes[near->index]) {
        if (result.refused >= most_refused) break;
        ++tried;
        if (serves(shelf, where, near->distance)) return result;
      }
    }
    result.untried += shelf.count - tried;
  }
  return result;
}

std::string PresetLibrary::absence(const Problem& problem, const DeviceFacts& device,
                                   const Legality& illegal, const Comparison& comparison) const {
  const Search result = search(problem, device, illegal, comparison);
  if (result.refused > 0) {
    const std::string which =
        result.untried > 0    ? fmt::format("the nearest {} of {} presets for this are",
                                            result.refused, result.refused + result.untried)
        : result.refused == 1 ? "the only preset for this is"
                              : fmt::format("all {} presets for this are", result.refused);
    return fmt::format("{} illegal here, the first {}", which, result.first_refusal);
  }
  const bool any_device = std::any_of(files_.begin(), files_.end(), [&](const PresetFile& file) {
    return device_match(file.device, device).has_value();
  });
  std::string kind = fmt::format("{}/{} {}", problem.op, problem.pass, dtype_name(problem.dtype));
  for (const auto& [name, value] : problem.options) kind += fmt::format(" {}={}", name, value);
  if (any_device) return fmt::format("no preset of {} for this device or its like", kind);
  return fmt::format("no preset for this device ({}) or another of its architecture ({})",
                     device.name, device.arch);
}

std::set<std::int64_t> PresetLibrary::recorded_tokens(const Problem& problem,
                                                      const DeviceFacts& device,
                                                      const Comparison& comparison) const {
  std::set<std::int64_t> tokens;
  const auto index = index_of(problem.op, device, comparison);
  const auto shelves = index->shelves.find(alike_key(problem, comparison));
  if (shelves == index->shelves.end()) return tokens;
  const Problem wanted = compared_part(problem, comparison);
  for (const Shelf& shelf : shelves->second)
    for (const auto& shape : shelf.shapes) {
      const auto sizes = compared_part(record_at(shape.front()).problem, comparison).sizes;
      const auto own = sizes.find(comparison.token_size);
      if (own == sizes.end()) continue;
      if (wanted.with_size(comparison.token_size, own->second).sizes == sizes)
        tokens.insert(own->second);
    }
  return tokens;
}

std::vector<std::string> PresetLibrary::complaints() const {
  std::vector<std::string> complaints;
  for (const auto& file : files_)
    complaints.insert(complaints.end(), file.complaints.begin(), file.complaints.end());
  return complaints;
}

double distance(const Problem& one, const Problem& other, const Comparison& comparison) {
  const Problem a = compared_part(one, comparison), b = compared_part(other, comparison);
  if (!same_names(a, b)) return std::numeric_limits<double>::infinity();
  double sum = 0;
  for (const auto& [name, value] : a.sizes) {
    const auto ratio = log_ratio(static_cast<double>(value), static_cast<double>(b.sizes.at(name)));
    sum += name == comparison.token_size ? token_weight * ratio : ratio;
  }
  for (const auto& name : comparison.patterns) {
    if (!a.options.contains(name) || !b.options.contains(name)) continue;
    if (const auto own = pattern_difference(a.options.at(name), b.options.at(name)))
      sum += pattern_weight * *own;
  }
  return sum;
}

}  // namespace fftune
