// Times of earlier runs, for `bench --against`.
#pragma once

#include <map>
#include <string>

#include "apps/fftune/comparison.hpp"
#include "core/problem.hpp"
#include "device/facts.hpp"

namespace fftune::tool {

/// By problem, of what `fftune bench --json` printed or of presets: a file or a folder, whose
/// records of this device are taken, or all where it has none. Throws Error(invalid_input).
std::map<Problem, Measured> earlier_times(const std::string& path, const DeviceFacts& facts);

}  // namespace fftune::tool
