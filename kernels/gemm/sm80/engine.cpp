// The sm80 engine: can_implement, and how its kernel is launched.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/gemm/engine.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/sm80/space.hpp"

namespace fftune {
namespace {

/// Measured on an H200: mma.sync reaches 440 TFLOP/s at best, where wgmma reaches 700 to 800; up to
/// this number of tokens the memory decides, and either may win.
constexpr std::int64_t most_tokens_beside_wgmma = 64;

std::optional<std::string> can_implement(const GemmChain& chain, const DeviceFacts& facts) {
  const GemmProblem& gemm = chain.front();
  if (gemm.dtype != DType::bf16 && gemm.dtype != DType::fp16)
    return fmt::format("mma.sync m16n8k16 multiplies bf16 and fp16, not {}",
                       dtype_name(gemm.dtype));
  if (gemm.c_dtype != gemm.dtype || gemm.wide_dtype != gemm.dtype || gemm.quantisation.any())
    return fmt::format("its output has the type of its operands, {}, without scales",
                       dtype_name(gemm.dtype));
  if (facts.compute_capability == 90 && gemm.tokens() > most_tokens_beside_wgmma &&
      !sm90_engine.can_implement(chain, facts))
    return fmt::format(
        "with more than {} tokens mma.sync has half the rate of wgmma on compute capability 9.0",
        most_tokens_beside_wgmma);
  // Its epilogue of heads adds up squares in another order.
  if (gemm.batch_invariant && gemm.epilogue.kind == EpilogueKind::qkv &&
      !sm90_engine.can_implement(chain, facts))
    return std::string(order_depends_on_rows);
  if (gemm.groups.by == Grouping::rows && gemm.a_major == Major::mn)
    return "cp.async gathers rows of 16 bytes or more: grouped rows of a K-major A";
  if (gemm.groups.by == Grouping::reduction &&
      (gemm.a_major == Major::k || gemm.b_major == Major::k ||
       (gemm.form != GemmForm::single && gemm.form != GemmForm::two_outputs)))
    return "cp.async gathers tokens of 16 bytes or more: a grouped reduction of MN-major operands";
  if (gemm.epilogue.kind == EpilogueKind::qkv && !sm80::has_tiles(gemm, facts))
    return fmt::format(
        "no tile of 32 to 256 columns has whole heads of {} features, of q alone or of k",
        gemm.epilogue.qkv.form.dim);
  return misaligned_rows(gemm);
}

Space space(const GemmChain& chain, const DeviceFacts& facts) {
  return sm80::space(chain.front(), facts);
}

Config default_config(const GemmChain& chain, const DeviceFacts& facts) {
  return sm80::default_config(chain.front(), facts);
}

std::optional<double> estimate(const GemmChain& chain, const DeviceFacts& facts,
                               const Config& config) {
  if (facts.clock_hz <= 0) return std::nullopt;
  const GemmProblem& gemm = chain.front();
  const double computing = sm80::cycles(gemm, facts, config) / facts.clock_hz;
  if (gemm.groups.by == Grouping::reduction || facts.memory_bandwidth <= 0) return computing;
  // The weights come from memory at nine tenths of the datasheet's rate, which is that of a copy.
  // In the median of an H100 and an H200, 72 variants of up to 64 tokens took 1.75 times as long as
  // this. They took 2.7 times as long as computing alone. Those of experts wait for their offsets
  // first: on an H200 the fastest for 8 to 57 of 256 experts took 14.4, 20.5, 35.7 and 62.5 us,
  // where this has 12.8, 20.3, 35.4 and 60.
  const double start = gemm.groups.any() ? 5e-6 : 0;
  const double groups = gemm.groups.any() ? std::max(gemm.groups.with_rows(), 1.0) : 1;
  const double bytes = 2.0 * gemm.b_operands() * static_cast<double>(gemm.n * gemm.k) * groups;
  return std::max(computing, start + bytes / (0.9 * facts.memory_bandwidth));
}

/// The launch that writes offsets and permutation of a mask's groups to two scratch areas.
void append_sort(Program& program, const GemmProblem& gemm, const TensorPlaces& places) {
  const std::size_t offsets = program.scratch.size();
  program.scratch.push_back({static_cast<std::size_t>(gemm.groups.count + 1) * 4, false});
  program.scratch.push_back({static_cast<std::size_t>(gemm.k) * 4, false});
  append_kernel(program, "gemm/sort_tokens.cu", "sort_tokens",
                {static_cast<std::uint32_t>(ceil_div(gemm.k, 256))}, 256,
                {tensor_of(places, gemm.groups.mask), ScratchArgument{offsets},
                 ScratchArgument{offsets + 1}, static_cast<std::int32_t>(gemm.k)});
}

void append(Program& program, const GemmChain& chain, const TensorPlaces& places,
            const DeviceFacts& facts, const Config& config) {
  const GemmProblem& gemm = chain.front();
  const sm80::Tile tile(config);
  gemm_form form = form_of(gemm);
  form.b_depends = false;  // it waits for all of the launches before it, whatever B is
  const auto sines = append_sines(program, gemm, places);
  ParameterStruct parameters = plain_parameters(
      gemm, places, sines, form.is_qkv() ? sizeof(plain_params) : sizeof(gemm_params));
  ParameterFields<gemm_params> fields(parameters);
  fields.set(&gemm_params::group_m, tile.group_m);
  if (gemm.groups.by == Grouping::reduction && form.source == group_source::mask) {
    form.source = group_source::routed;
    const std::size_t offsets = program.scratch.size();
    append_sort(program, gemm, places);
    fields.set(&gemm_params::offsets, ScratchArgument{offsets}, &gemm_params::permutation,
               ScratchArgument{offsets + 1});
  }
  KernelLaunch& launch = append_gemm(
      program, "gemm/sm80/gemm.cu",
      fmt::format("sm80_gemm<{}, {}>", template_argument(form), template_argument(tile)),
      work_tiles(gemm, tile.bm, tile.bn), tile.threads(), std::move(parameters));
  launch.programmatic = (gemm.follows || sines) && facts.compute_capability >= 90;
  launch.shared_bytes = static_cast<std::uint32_t>(tile.shared_bytes(form));
  split_launch(program, launch, facts, tile.split_k, tile.exchange_bytes(gemm.b_operands()),
               tile.table_bytes(form) + sm80_config::epilogue_tile_bytes);
}

}  // namespace

constinit const Engine sm80_engine{
    .name = "sm80",
    .can_implement = can_implement,
    .search = {space, default_config, estimate},
    .append = append,
    .batch_invariant = true,
    .sources = {"gemm/sm80/gemm.cu", "gemm/sort_tokens.cu", "gemm/head_sines.cu"}};

}  // namespace fftune
