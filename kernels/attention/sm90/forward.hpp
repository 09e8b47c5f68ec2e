// Common parts of the forward engines of sm_90a, host side.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/attention/launch.hpp"
#include "kernels/attention/sm90/config.cuh"

namespace fftune::attention {

constexpr const char* forward_source = "attention/sm90/forward.cu";

std::string template_argument(const attention_sm90_config& config);

/// Sets the tensor maps of q, k and v, of copies where heads need them, whose launch it adds.
void set_tensor_maps(Program& program, Launch& launch, const DeviceFacts& facts,
                     const attention_sm90_plan& plan, const attention_sm90_config& config);

/// Heads of k and v that are scheduled together by default: as many, in powers of two up to 128, as
/// there are or as L2 has room for.
std::int64_t usual_group(const Layer& layer, const DeviceFacts& facts);

/// Why a kernel of TMA and wgmma cannot read the layer's heads, one line.
std::optional<std::string> refuse_tma(const Layer& layer, const DeviceFacts& facts);

}  // namespace fftune::attention
