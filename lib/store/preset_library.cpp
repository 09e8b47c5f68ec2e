#include "store/preset_library.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <system_error>
#include <tuple>

#include "core/pattern.hpp"
#include "core/routing.hpp"

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

/// The options but those that are numbers, which decide nothing about speed (OptionField::number)
/// and may be left out, and patterns, which decide how near the problems are.
std::map<std::string, std::string> words(const Problem& problem, const Comparison& comparison) {
  auto options = problem.options;
  std::erase_if(options, [&](const auto& option) {
    const auto& [name, value] = option;
    return (comparison.numbers.contains(name) && parse_number(value)) ||
           (comparison.patterns.contains(name) && pattern_difference(value, value));
  });
  return options;
}

/// Calls visit(place) for those of files that `admits` admits. Places are in the order of files, so
/// a file that is not admitted is stepped over as a whole, however many records it has.
template <typename Place, typename Admits, typename Visit>
void for_each_place(const std::vector<Place>& places, const Admits& admits, const Visit& visit) {
  for (auto place = places.begin(); place != places.end();) {
    const auto end_of_file =
        std::upper_bound(place, places.end(), place->file,
                         [](std::size_t file, const Place& other) { return file < other.file; });
    if (admits(place->file)) std::for_each(place, end_of_file, visit);
    place = end_of_file;
  }
}

/// All but the shape, and the options that are numbers or patterns: what has to be the same.
std::string alike_key(const Problem& problem, const Comparison& comparison) {
  std::string key = fmt::format("{}/{}/{}", problem.op, problem.pass, dtype_name(problem.dtype));
  for (const auto& [name, value] : problem.sizes) key += fmt::format("/{}", name);
  for (const auto& [name, value] : words(problem, comparison))
    key += fmt::format("/{}={}", name, value);
  return key;
}

std::string exact_key(const Problem& problem, const Comparison& comparison) {
  std::string key = alike_key(problem, comparison);
  for (const auto& [name, value] : problem.sizes) key += fmt::format("/{}", value);
  for (const auto& name : comparison.patterns)
    if (const auto option = problem.options.find(name); option != problem.options.end())
      key += fmt::format("/{}", option->second);
  return key;
}

struct Candidate {
  const PresetFile* file;
  const PresetRecord* record;
  double distance;
  double size_difference;  // |log2| of the ratio of SM counts
};

double log_ratio(double a, double b) {
  return std::abs(std::log2(a / b));
}

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
  for (const auto& [name, value] : record.sizes)
    if (problem.sizes.at(name) != value) differing += fmt::format(" {}={}", name, value);
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

struct PresetLibrary::Indexes {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const Index>> of_comparison;
};

PresetLibrary::PresetLibrary() : indexes_(std::make_shared<Indexes>()) {}

std::shared_ptr<const PresetLibrary::Index> PresetLibrary::index_of(
    const Comparison& comparison) const {
  const auto key =
      fmt::format("{}|{}|{}", comparison.token_size, fmt::join(comparison.numbers, ","),
                  fmt::join(comparison.patterns, ","));
  const std::lock_guard lock(indexes_->mutex);
  auto& known = indexes_->of_comparison[key];
  if (known) return known;
  auto index = std::make_shared<Index>();
  for (std::size_t file = 0; file < files_.size(); ++file)
    for (std::size_t i = 0; i < files_[file].records.size(); ++i) {
      const auto& problem = files_[file].records[i].problem;
      index->alike[alike_key(problem, comparison)].push_back({file, i});
      index->exact[exact_key(problem, comparison)].push_back({file, i});
    }
  return known = std::move(index);
}

std::optional<PresetMatch> PresetLibrary::find(const Problem& problem, const DeviceFacts& device,
                                               const Legality& illegal,
                                               const Comparison& comparison) const {
  const auto index = index_of(comparison);
  const auto places_of = [](const Places& places, const std::string& key) {
    static const std::vector<Place> none;
    const auto found = places.find(key);
    return found == places.end() ? &none : &found->second;
  };
  const auto* const alike = places_of(index->alike, alike_key(problem, comparison));
  const auto* const exact = places_of(index->exact, exact_key(problem, comparison));
  const auto is_exact = [&](const Place& place) {
    return std::any_of(exact->begin(), exact->end(), [&](const Place& each) {
      return each.file == place.file && each.record == place.record;
    });
  };
  std::vector<std::optional<DeviceMatch>> matches;
  for (const auto& file : files_) matches.push_back(device_match(file.device, device));

  const auto folders = folders_.empty() ? 0 : folders_.back() + 1;
  std::string first_refusal;
  int refused = 0;
  const auto candidates_of = [&](DeviceMatch match, std::size_t folder, bool exactly) {
    std::vector<Candidate> candidates;
    const auto admits = [&](std::size_t file) {
      return folders_[file] == folder && matches[file] == match;
    };
    for_each_place(exactly ? *exact : *alike, admits, [&](const Place& place) {
      if (!exactly && is_exact(place)) return;
      const auto& file = files_[place.file];
      const auto& record = file.records[place.record];
      candidates.push_back({&file, &record, distance(record.problem, problem, comparison),
                            log_ratio(file.device.multiprocessors, device.multiprocessors)});
    });
    return candidates;
  };
  const auto nearer = [](const Candidate& a, const Candidate& b) {
    return std::tie(a.distance, a.size_difference) < std::tie(b.distance, b.size_difference);
  };
  for (const auto match : {DeviceMatch::exact, DeviceMatch::alias, DeviceMatch::same_arch_and_size,
                           DeviceMatch::same_arch})
    for (std::size_t folder = 0; folder < folders; ++folder)
      // Those of the same shape first: mostly one of them serves, and the others are not looked at.
      for (const bool exactly : {true, false}) {
        auto candidates = candidates_of(match, folder, exactly);
        // Equally near records keep the order of paths and problems.
        for (auto first = candidates.begin(); first != candidates.end(); ++first) {
          const auto nearest = std::min_element(first, candidates.end(), nearer);
          std::rotate(first, nearest, nearest + 1);
          const auto& record = *first->record;
          if (const auto refusal = illegal(record, problem); !refusal.empty()) {
            if (refused++ == 0)
              first_refusal = fmt::format("{}: {}: {}", first->file->path.string(),
                                          record.problem.text(), refusal);
            continue;
          }
          auto reason = fmt::format("{}: {}, {}", first->file->path.string(),
                                    device_words(match, first->file->device, device),
                                    shape_words(record.problem, problem, comparison));
          if (refused > 0)
            reason += fmt::format("; {} nearer {} illegal here, the first {}", refused,
                                  refused == 1 ? "record is" : "records are", first_refusal);
          return PresetMatch{&record,         first->file->path,
                             match,           record.problem.sizes == problem.sizes,
                             first->distance, std::move(reason)};
        }
      }
  return std::nullopt;
}

std::string PresetLibrary::absence(const Problem& problem, const DeviceFacts& device,
                                   const Legality& illegal, const Comparison& comparison) const {
  bool any_device = false;
  int refused = 0;
  std::string first_refusal;
  for (const auto& file : files_) any_device = any_device || device_match(file.device, device);
  const auto index = index_of(comparison);
  const auto alike = index->alike.find(alike_key(problem, comparison));
  const auto matches = [&](std::size_t file) {
    return device_match(files_[file].device, device).has_value();
  };
  if (alike != index->alike.end())
    for_each_place(alike->second, matches, [&](const Place& place) {
      const auto& file = files_[place.file];
      const auto& record = file.records[place.record];
      if (const auto refusal = illegal(record, problem); !refusal.empty() && refused++ == 0)
        first_refusal =
            fmt::format("{}: {}: {}", file.path.string(), record.problem.text(), refusal);
    });
  if (refused > 0)
    return fmt::format("{} illegal here, the first {}",
                       refused == 1 ? "the only preset for this is"
                                    : fmt::format("all {} presets for this are", refused),
                       first_refusal);
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
  const auto index = index_of(comparison);
  const auto alike = index->alike.find(alike_key(problem, comparison));
  if (alike == index->alike.end()) return tokens;
  for (const Place& place : alike->second) {
    const auto& file = files_[place.file];
    const auto& sizes = file.records[place.record].problem.sizes;
    const auto own = sizes.find(comparison.token_size);
    if (own == sizes.end() || !device_match(file.device, device)) continue;
    if (problem.with_size(comparison.token_size, own->second).sizes == sizes)
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

double distance(const Problem& a, const Problem& b, const Comparison& comparison) {
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
