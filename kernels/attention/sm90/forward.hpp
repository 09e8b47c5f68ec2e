// Common parts of the forward engines of sm_90a, host side.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/attention/launch.hpp"
#include "kernels/attention/sm90/config.cuh"

namespace fftune::attention {

constexpr const char* forward_source = "attention/sm90/forward.cu";

/// The launch of `kernel`, with those of copies and of the sums of divided keys where there are
/// such. `group`: heads whose tiles are scheduled together. `most_ctas`: persistent CTAs; 0: as
/// many as work items.
Program forward_program(const Problem& problem, const DeviceFacts& facts, std::string_view kernel,
                        const attention_sm90_config& config, const attention_sm90_plan& plan,
                        std::int64_t group, std::int64_t most_ctas = 0);

/// Bytes of the workspace that CTAs of `chunk` keys leave sums in.
std::int64_t bytes_of_chunks(const Layer& layer, std::int64_t chunk);
constexpr std::int64_t most_bytes_of_chunks = std::int64_t{256} << 20;

/// Keys that a tile of `bm` queries sees, on average.
double keys_seen(const Layer& layer, int bm);

/// Whether a tile may have the queries of all heads that share keys.
bool may_pack_heads(const Layer& layer);
/// The factor of a launch's cycles by it. Measured: 1% where sequences are long. Without pages it
/// was not measured enough to be the default for little.
double packing_factor(const Layer& layer, const attention_sm90_config& config);

/// Heads of k and v that are scheduled together by default: as many, in powers of two up to 128, as
/// there are or as L2 has room for.
std::int64_t usual_group(const Layer& layer, const DeviceFacts& facts);

/// Why a kernel of TMA and wgmma cannot read the layer's heads, one line.
std::optional<std::string> refuse_tma(const Layer& layer, const DeviceFacts& facts);

}  // namespace fftune::attention
