// can_implement checks that all CUDA families have in common.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "core/problem.hpp"
#include "device/facts.hpp"

namespace fftune {

/// Why a CUDA kernel that computes `pass` cannot run the problem on the device, in one line; none
/// if it can.
std::optional<std::string> refuse_cuda(const Problem& problem, std::string_view pass,
                                       const DeviceFacts& facts);

}  // namespace fftune
