// An engine: one implementation of GEMMs for one kind of device, as a table of functions that its
// folder defines. Families (family.hpp) apply an engine to a stage of an op.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/config.hpp"
#include "core/space.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/search_side.hpp"
#include "kernels/gemm/problem.hpp"

namespace fftune {

/// GEMMs of consecutive stages that one variant computes: of most engines exactly one. In a chain
/// of two the first one's C is the second one's A: gate_up, then down.
using GemmChain = std::vector<GemmProblem>;

/// Why an engine without Engine::batch_invariant refuses a problem that asks for it.
constexpr std::string_view order_depends_on_rows =
    "batch-invariant: it has another order of sums than the kernels of many rows";

struct Engine {
  std::string_view name;  // "sm90"
  DeviceKind device_kind = DeviceKind::cuda;
  bool is_fallback = false;  // takes whatever the device kind allows; has no parameters

  /// Why it cannot compute the chain there, one line; nothing if the space decides.
  std::optional<std::string> (*can_implement)(const GemmChain&, const DeviceFacts&) = nullptr;
  SearchSide<GemmChain> search = {};  // a fallback has an estimate alone
  /// Whether its default should be faster than those of the engines behind it in an op's order;
  /// null: it always is.
  bool (*is_preferred)(const GemmChain&, const DeviceFacts&) = nullptr;
  /// Appends the launches.
  void (*append)(Program&, const GemmChain&, const TensorPlaces&, const DeviceFacts&,
                 const Config&) = nullptr;
  /// Whether its space for a GemmProblem::batch_invariant has one order of a row's sums alone,
  /// which other such engines for the same problem and device share.
  bool batch_invariant = false;
  /// Embedded sources whose code decides a variant's speed, beside those that all engines of the
  /// CPU share.
  EngineSources sources = {};
};

/// All sources of an engine.
std::vector<std::string> sources_of(const Engine& engine);

/// sm90/: TMA and wgmma, compute capability 9.0.
extern const Engine sm90_engine;
/// sm80/: cp.async and mma.sync, compute capability 8.0 and newer.
extern const Engine sm80_engine;
/// decode/: up to 16 rows of A, at the speed of reading B once; and its chain of both ffn stages in
/// one launch.
extern const Engine decode_engine;
extern const Engine fused_decode_engine;
/// The same for packed weights and up to 64 rows of A; a chain of the stage that would expand them
/// and the product.
extern const Engine packed_decode_engine;
/// sm90/packed.cu: the same with wgmma for any number of rows of A, compute capability 9.0.
extern const Engine packed_sm90_engine;
/// simt/: any size, alignment and type on any CUDA device: the fallback.
extern const Engine simt_engine;
/// cpu/: blocks over OpenBLAS; plain loops, the fallback; and for chains of both ffn stages one
/// that streams the weights for few tokens, and one whose register tiles keep the intermediate in
/// cache.
extern const Engine cpu_blas_engine;
extern const Engine cpu_plain_engine;
extern const Engine cpu_stream_engine;
extern const Engine cpu_tiles_engine;

}  // namespace fftune
