// An engine: one implementation of a pass of attention for one kind of device, as a table of
// functions that its folder defines. families() makes a family of each.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/config.hpp"
#include "core/space.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/common/search_side.hpp"

namespace fftune::attention {

struct Engine {
  std::string_view name;  // of its family: "attention_sm90"
  std::string_view summary;
  DeviceKind device_kind = DeviceKind::cuda;
  bool backward = false;
  bool is_fallback = false;

  /// Why it cannot compute the layer there, one line; nothing if the space decides. Null: it can
  /// compute every layer on its kind of device.
  std::optional<std::string> (*can_implement)(const Layer&, const DeviceFacts&) = nullptr;
  SearchSide<Layer> search = {};
  Program (*program)(const Problem&, const DeviceFacts&, const Config&) = nullptr;
  /// Whether its space for a Layer::batch_invariant has one order of a row's sums alone, whatever
  /// the number of sequences, queries and keys.
  bool batch_invariant = false;
  /// Embedded sources whose code decides a variant's speed, beside those that all engines of the
  /// CPU share.
  EngineSources sources = {};
};

/// decode/: mma.sync, a few queries of each sequence against its long cache.
extern const Engine decode_engine;
/// sm90/: TMA and wgmma, compute capability 9.0.
extern const Engine sm90_engine;
extern const Engine sm90_wide_engine;
extern const Engine sm90_backward_engine;
extern const Engine sm90_backward_copies_engine;
/// sm80/: cp.async and mma.sync, compute capability 8.0 and newer.
extern const Engine sm80_engine;
extern const Engine sm80_wide_engine;
extern const Engine sm80_backward_engine;
/// simt/: any head and type on any CUDA device: the fallbacks.
extern const Engine simt_engine;
extern const Engine simt_backward_engine;
/// cpu/: blocks over OpenBLAS, backward also the fallback; and forward one query after the other,
/// the fallback.
extern const Engine cpu_blas_engine;
extern const Engine cpu_plain_engine;
extern const Engine cpu_backward_engine;

/// Why a kernel of TMA and wgmma cannot compute the layer, one line.
std::optional<std::string> refuse_sm90(const Layer& layer, const DeviceFacts& facts);
/// Features of a head whose output is in the registers of one warp, or MMA warpgroup, at most.
constexpr std::int64_t most_narrow_dim = 256;
/// Why the kernel of TMA and wgmma for wider heads cannot compute the layer, one line.
std::optional<std::string> refuse_wide_sm90(const Layer& layer, const DeviceFacts& facts);
/// Why a kernel of mma.sync leaves the layer to wgmma, one line.
std::optional<std::string> refuse_beside_sm90(const Layer& layer, const DeviceFacts& facts);

}  // namespace fftune::attention
