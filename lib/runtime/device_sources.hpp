// For those who change kernels: device sources from a folder instead of the ones that are built in.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "device/sources.hpp"
#include "runtime/environment.hpp"

namespace fftune {

/// `built_in` with the device sources of the environment's folder, read now; null if it names none.
/// Throws Error(invalid_input) that names the variable.
std::unique_ptr<const SourceSet> device_sources(const SourceSet& built_in,
                                                const Environment& environment);

/// The files of `sources` that are not as in `built_in`, and those that are missing; sorted.
std::vector<std::string> changed_files(const SourceSet& built_in, const SourceSet& sources);

}  // namespace fftune
