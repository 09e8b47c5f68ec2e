// Why no CUDA kernel here can serve: what every family for CUDA asks first.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "core/problem.hpp"
#include "device/facts.hpp"

namespace fftune {

/// Why a CUDA kernel that computes `pass` cannot serve the problem on the device, one line.
std::optional<std::string> refuse_cuda(const Problem& problem, std::string_view pass,
                                       const DeviceFacts& facts);

}  // namespace fftune
