// The CUDA families of attention, each in a folder of its own, and reasons that several share.
#pragma once

#include <optional>
#include <string>

#include "device/facts.hpp"
#include "kernels/attention/attention.hpp"
#include "registry/family.hpp"

namespace fftune::attention {

const Family& attention_sm90_family();
const Family& attention_bwd_sm90_family();
const Family& attention_decode_family();
const Family& attention_sm80_family();
const Family& attention_bwd_sm80_family();
const Family& attention_simt_family();
const Family& attention_bwd_simt_family();

/// Why a kernel of TMA and wgmma cannot serve the problem, one line.
std::optional<std::string> refuse_sm90(const Layer& layer, const DeviceFacts& facts);

}  // namespace fftune::attention
