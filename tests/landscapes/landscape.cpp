#include "landscapes/landscape.hpp"

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <tuple>

#include "core/error.hpp"
#include "measure/statistics.hpp"
#include "tuning/search/enumerate.hpp"

namespace fftune::test {
namespace {

const std::filesystem::path recorded_in = FFTUNE_SOURCE_DIR "/tests/data/landscapes";
constexpr double infinity = std::numeric_limits<double>::infinity();
/// Ceilings of an H200; on the device itself the tuner measures them.
constexpr double bytes_per_second = 4.2e12;
constexpr double flops_per_second = 780e12;

/// The inverse of Problem::text().
Problem parse_problem(const std::string& text, const Catalog& catalog) {
  std::istringstream words(text);
  std::string word;
  words >> word;
  const auto slash = word.find('/');
  Problem problem;
  problem.op = word.substr(0, slash);
  problem.pass = word.substr(slash + 1);
  words >> word;
  problem.dtype = parse_dtype(word);
  const auto sizes = catalog.op(problem.op).sizes();
  while (words >> word) {
    const auto equals = word.find('=');
    const auto name = word.substr(0, equals), value = word.substr(equals + 1);
    const bool size = std::any_of(sizes.begin(), sizes.end(),
                                  [&](const SizeField& field) { return field.name == name; });
    if (size)
      problem.sizes[name] = std::stoll(value);
    else
      problem.options[name] = value;
  }
  return problem;
}

double floor_us(const std::vector<StageSpec>& stages, std::size_t first, std::size_t count) {
  double flops = 0, bytes = 0;
  for (std::size_t i = first; i < first + count; ++i) {
    flops += stages[i].flops;
    bytes += stages[i].bytes;
  }
  return std::max(flops / flops_per_second, bytes / bytes_per_second) * 1e6;
}

class Reader {
 public:
  Reader(const Catalog& catalog, const DeviceFacts& facts) : catalog_(catalog), facts_(facts) {}

  void take(const std::string& line) {
    std::istringstream words(line);
    std::string word;
    words >> word;
    if (word == "device") return;
    if (word == "problem") {
      problem_ = parse_problem(line.substr(word.size() + 1), catalog_);
    } else if (word == "family") {
      names_.clear();
      words >> first_stage_ >> family_;
      while (words >> word) names_.push_back(word);
    } else {
      take_variant(line);
    }
  }

  std::vector<Landscape> finish() {
    std::vector<Landscape> all;
    for (auto& [key, landscape] : groups_) {
      put_favourites_first(landscape);
      all.push_back(std::move(landscape));
    }
    return all;
  }

 private:
  const Family* family() const {
    for (const Family* family : catalog_.op(problem_.op).families())
      if (family->name() == family_) return family;
    return nullptr;
  }

  void take_variant(const std::string& line) {
    const Family* family = this->family();
    if (!family || family->refusal(problem_, facts_)) return;
    std::istringstream words(line);
    Variant variant{family_, {}};
    for (const auto& name : names_) {
      std::string value;
      words >> value;
      variant.config.set(name, Config::parse(name + "=" + value).value(name));
    }
    // Parameters that are newer than the record were at what their space says, or their defaults.
    variant = completed(catalog_.op(problem_.op), problem_, facts_, std::move(variant));
    const Config defaults = family->default_config(problem_, facts_);
    for (const auto& [name, value] : defaults.entries())
      if (!variant.config.contains(name)) variant.config.set(name, value);
    std::string time;
    words >> time;
    const auto stages = catalog_.op(problem_.op).stages(problem_);
    const auto covered = family->stages();
    auto& landscape = groups_[{problem_.text(), first_stage_, covered.size()}];
    landscape.problem = problem_;
    landscape.stages = covered.size() == 1 ? covered[0] : covered.front() + "+" + covered.back();
    landscape.us.push_back(time.find_first_not_of("0123456789.e+") == time.npos ? std::stod(time)
                                                                                : infinity);
    landscape.estimates.push_back(cost_model_us(*family, problem_, facts_, variant.config,
                                                floor_us(stages, first_stage_, covered.size())));
    landscape.traits.push_back(launch_traits(*family, problem_, facts_, variant.config));
    if (variant.config == defaults) warm_starts_[&landscape].push_back(landscape.variants.size());
    landscape.variants.push_back(std::move(variant));
  }

  void put_favourites_first(Landscape& landscape) {
    const auto& warm_starts = warm_starts_[&landscape];
    for (const std::size_t place : warm_starts) {
      const auto to = landscape.warm_starts++;
      std::swap(landscape.variants[to], landscape.variants[place]);
      std::swap(landscape.us[to], landscape.us[place]);
      std::swap(landscape.estimates[to], landscape.estimates[place]);
      std::swap(landscape.traits[to], landscape.traits[place]);
    }
  }

  const Catalog& catalog_;
  const DeviceFacts& facts_;
  Problem problem_;
  std::size_t first_stage_ = 0;
  std::string family_;
  std::vector<std::string> names_;
  std::map<std::tuple<std::string, std::size_t, std::size_t>, Landscape> groups_;
  std::map<const Landscape*, std::vector<std::size_t>> warm_starts_;
};

}  // namespace

double Landscape::best() const {
  return *std::min_element(us.begin(), us.end());
}

DeviceFacts h200() {
  auto facts = facts_of_architecture("sm_90a");
  facts.name = "NVIDIA H200";
  facts.memory_bandwidth = 4.8e12;
  return facts;
}

std::vector<Landscape> read_landscapes(const std::filesystem::path& file, const Catalog& catalog,
                                       const DeviceFacts& facts) {
  std::ifstream in(file);
  Reader reader(catalog, facts);
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    try {
      reader.take(line);
    } catch (const std::exception& error) {
      throw std::runtime_error(file.string() + ":" + std::to_string(number) + ": " + error.what());
    }
  }
  return reader.finish();
}

std::vector<std::string> landscape_folders() {
  std::vector<std::string> folders{""};
  for (const auto& entry : std::filesystem::directory_iterator(recorded_in))
    if (entry.is_directory()) folders.push_back(entry.path().filename());
  return folders;
}

std::vector<Landscape> recorded_landscapes(const std::string& folder) {
  std::vector<Landscape> all;
  for (const auto& entry : std::filesystem::directory_iterator(recorded_in / folder))
    if (entry.is_regular_file())
      for (auto& landscape : read_landscapes(entry.path(), builtin_catalog(), h200()))
        all.push_back(std::move(landscape));
  return all;
}

RecordedSearch::RecordedSearch(const Landscape& landscape, const DeviceFacts& facts,
                               std::uint64_t seed)
    : landscape_(landscape),
      facts_(facts),
      seed_(seed),
      random_(seed),
      seen_(landscape.variants.size(), infinity) {}

double RecordedSearch::sample(std::size_t index) {
  std::normal_distribution<double> normal;
  return landscape_.us[index] * (1 + 0.004 * std::abs(normal(random_)));
}

void RecordedSearch::screen(std::size_t index, double abandon_us) {
  if (std::find(tried_.begin(), tried_.end(), index) != tried_.end()) return;
  tried_.push_back(index);
  std::vector<double> samples;
  for (int i = 0; i < 3; ++i) {
    samples.push_back(sample(index));
    if (samples.back() > abandon_us) break;
  }
  seen_[index] = median(samples);
  best_ = std::min(best_, seen_[index]);
}

void RecordedSearch::expect_gain(double gain) {
  double best = infinity;
  for (const auto index : tried_) best = std::min(best, landscape_.us[index]);
  statements_.push_back({gain, 1 - landscape_.best() / best});
}

void RecordedSearch::measure(const std::vector<std::size_t>& indices, int samples, double) {
  for (const auto index : indices) {
    std::vector<double> all;
    for (int i = 0; i < samples; ++i) all.push_back(sample(index));
    seen_[index] = median(all);
  }
}

}  // namespace fftune::test
