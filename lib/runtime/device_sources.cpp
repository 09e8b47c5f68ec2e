#include "runtime/device_sources.hpp"

#include <fmt/format.h>

#include <set>

#include "core/error.hpp"

namespace fftune {

std::unique_ptr<const SourceSet> device_sources(const SourceSet& built_in,
                                                const Environment& environment) {
  if (environment.device_sources.empty()) return nullptr;
  try {
    return std::make_unique<const SourceSet>(
        built_in.with_device_sources_of(environment.device_sources));
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("FFTUNE_DEVICE_SOURCES: {}", error.what()));
  }
}

std::vector<std::string> changed_files(const SourceSet& built_in, const SourceSet& sources) {
  std::set<std::string> changed;
  for (const auto& name : built_in.names())
    if (!sources.has(name) || sources.text(name) != built_in.text(name)) changed.insert(name);
  for (const auto& name : sources.names())
    if (!built_in.has(name)) changed.insert(name);
  return {changed.begin(), changed.end()};
}

}  // namespace fftune
