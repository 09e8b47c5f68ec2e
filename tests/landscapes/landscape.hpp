// Landscapes that were recorded on a device (bench/landscape.py says how and in which
// form), and a search of one that takes its times from there.
#pragma once

#include <filesystem>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "device/facts.hpp"
#include "registry/catalog.hpp"
#include "tuning/strategies/search.hpp"

namespace fftune::test {

/// The variants of one problem that cover the same stages.
struct Landscape {
  Problem problem;
  std::string stages;  // "gate_up+down"
  std::vector<Variant> variants;
  std::vector<double> us;  // infinity for one that has no time
  std::vector<double> estimates;
  std::vector<std::vector<double>> traits;
  std::size_t warm_starts = 0;  // the families' defaults, first

  double best() const;
};

/// The device that they were recorded on.
DeviceFacts h200();

/// Those of a file, in its order; what the catalog does not know any more is left out. Throws
/// std::runtime_error with the line that cannot be read.
std::vector<Landscape> read_landscapes(const std::filesystem::path& file, const Catalog& catalog,
                                       const DeviceFacts& facts);

/// The folders in tests/data/landscapes, and "", which is that one itself.
std::vector<std::string> landscape_folders();
/// Those of all files of a folder.
std::vector<Landscape> recorded_landscapes(const std::string& folder = "");

/// The remaining gain that a strategy stated, and the real one.
struct Statement {
  double said = 0;
  double left = 0;
};

/// Times are as recorded, but for some noise, always upwards.
class RecordedSearch final : public Search {
 public:
  RecordedSearch(const Landscape& landscape, const DeviceFacts& facts, std::uint64_t seed);

  const Problem& problem() const override { return landscape_.problem; }
  const DeviceFacts& facts() const override { return facts_; }
  std::uint64_t seed() const override { return seed_; }
  const std::vector<Variant>& variants() const override { return landscape_.variants; }
  std::size_t warm_starts() const override { return landscape_.warm_starts; }
  double predicted_us(std::size_t index) const override { return landscape_.estimates[index]; }
  std::vector<double> traits(std::size_t index) const override { return landscape_.traits[index]; }
  void compile(const std::vector<std::size_t>&) override {}
  void screen(std::size_t index, double abandon_us) override;
  std::size_t workers() const override { return 1; }
  std::vector<std::size_t> screen_all(const std::vector<std::size_t>&, double, int) override {
    return {};
  }
  void measure(const std::vector<std::size_t>& indices, int samples, double seconds) override;
  void forget(const std::vector<std::size_t>&) override {}
  double median_us(std::size_t index) const override { return seen_[index]; }
  double best_us() const override { return best_; }
  bool stopped() const override { return false; }
  bool undecided(const std::vector<std::size_t>&) const override { return false; }
  bool enough() const override { return false; }
  void cut_short() override {}
  void expect_gain(double gain) override;
  double least_gain() const override { return 0.01; }
  double seconds_left() const override { return std::numeric_limits<double>::infinity(); }
  void enter(Phase, std::size_t) override {}

  /// In the order in which they were tried; those without a time count.
  const std::vector<std::size_t>& tried() const { return tried_; }
  /// One for each time that it said so.
  const std::vector<Statement>& statements() const { return statements_; }

 private:
  double sample(std::size_t index);

  const Landscape& landscape_;
  const DeviceFacts& facts_;
  std::uint64_t seed_;
  std::mt19937_64 random_;
  std::vector<double> seen_;
  std::vector<std::size_t> tried_;
  double best_ = std::numeric_limits<double>::infinity();
  std::vector<Statement> statements_;
};

}  // namespace fftune::test
