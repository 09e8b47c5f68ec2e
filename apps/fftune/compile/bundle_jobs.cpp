#include "apps/fftune/compile/bundle_jobs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "apps/fftune/presets/presets.hpp"
#include "runtime/choice.hpp"
#include "runtime/token_segments.hpp"

namespace fftune::tool {

BundleJobs::BundleJobs(const Catalog& catalog, const PresetLibrary& presets, std::string arch)
    : catalog_(catalog),
      presets_(presets),
      arch_(std::move(arch)),
      devices_(products_of_architecture(arch_)) {
  for (const PresetFile& file : presets.files()) {
    if (file.device.kind != DeviceKind::cuda || file.device.arch != arch_) continue;
    const DeviceFacts facts = *facts_of_preset(file.device);
    const bool known = std::any_of(devices_.begin(), devices_.end(), [&](const auto& device) {
      return device.name == facts.name && device.multiprocessors == facts.multiprocessors;
    });
    if (!known) devices_.push_back(facts);
  }
}

void BundleJobs::add(const Op& op, const Problem& problem) {
  for (const DeviceFacts& facts : devices_) try {
      add(op, problem, facts, choose(catalog_, op, problem, facts, presets_).recipe);
    } catch (const Error& error) {
      skip(problem, error);
    }
}

void BundleJobs::add_any_tokens(const Op& op, const Problem& most) {
  for (const DeviceFacts& facts : devices_) try {
      for (const auto& segment : token_segments(catalog_, op, most, facts, presets_))
        for (const auto tokens : scanned_tokens(segment))
          add(op, most.with_size(op.token_size(), tokens), facts,
              recipe_at(op, most, facts, segment, tokens));
    } catch (const Error& error) {
      skip(most, error);
    }
}

void BundleJobs::add(const Op& op, const Problem& problem, const DeviceFacts& facts,
                     const Recipe& recipe) {
  for (const Variant& variant : recipe) {
    const auto program = family_of(op, variant.family).program(problem, facts, variant.config);
    bool first = false;
    for (const KernelSource& kernel : program.kernels)
      first |= known_.insert(kernel.file + ":" + kernel.expression).second;
    if (first) jobs_.push_back({arch_, &op, problem, facts, variant});
  }
}

void BundleJobs::skip(const Problem& problem, const Error& error) {
  skipped_.insert(fmt::format("{}: {}", problem.text(), error.what()));
}

}  // namespace fftune::tool
