// Which programs a bundle of one architecture holds: what the library would choose on each of its
// devices.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "registry/catalog.hpp"
#include "store/preset_library.hpp"

namespace fftune::tool {

/// A variant whose program is to be in the bundle.
struct BundleJob {
  std::string arch;
  const Op* op = nullptr;
  Problem problem;
  DeviceFacts facts;
  Variant variant;
};

/// The programs of one architecture, each once. Choices and launches depend on the device: those of
/// the known products count, and those that presets are of.
class BundleJobs {
 public:
  BundleJobs(const Catalog& catalog, const PresetLibrary& presets, std::string arch);

  /// Adds the kernels that fftune_plan_create would choose for the problem.
  void add(const Op& op, const Problem& problem);

  /// The same for a plan of up to as many tokens as the problem has.
  void add_any_tokens(const Op& op, const Problem& most);

  std::vector<BundleJob> take() { return std::move(jobs_); }
  /// Problems that no device serves, with the reason.
  const std::set<std::string>& skipped() const { return skipped_; }

 private:
  void add(const Op& op, const Problem& problem, const DeviceFacts& facts, const Recipe& recipe);
  void skip(const Problem& problem, const Error& error);

  const Catalog& catalog_;
  const PresetLibrary& presets_;
  std::string arch_;
  std::vector<DeviceFacts> devices_;
  std::set<std::string> known_;
  std::vector<BundleJob> jobs_;
  std::set<std::string> skipped_;
};

}  // namespace fftune::tool
