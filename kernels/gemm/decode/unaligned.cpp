// The decode engine for unaligned rows: can_implement, its space and cost model, and how its kernel
// is launched.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/least_cost.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/gemm/decode/decode.hpp"
#include "kernels/gemm/decode/unaligned_config.cuh"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/padded/padded.hpp"
#include "kernels/gemm/padded/row_copies.hpp"

namespace fftune {
namespace {

struct Block : unaligned_config {
  explicit Block(const GemmProblem& gemm)
      : unaligned_config{.tokens = stream_tokens(gemm.m), .unroll = 1} {}
  Block(const GemmProblem& gemm, const Config& config)
      : unaligned_config{.tokens = stream_tokens(gemm.m),
                         .rows = config.get("rows"),
                         .warps = config.get("warps"),
                         .unroll = config.get("unroll"),
                         .staged = config.get("staged") != 0} {}

  std::int64_t blocks(const GemmProblem& gemm) const {
    const std::int64_t period = alignment_period(gemm.k);
    return period * ceil_div(ceil_div(gemm.n, period), std::int64_t{rows});
  }
  /// Registers of a thread, with those of the rest of k and about 60 for addresses, masks and
  /// loops.
  int registers(const GemmProblem& gemm) const {
    const stream_shape own = shape(gemm.b_operands());
    return own.registers() + 4 * own.operands * own.n_fragments() + 60;
  }
  /// Elements from a row of the tokens that are multiplied to the next. Two rows of staged ones are
  /// in different banks.
  std::int64_t pitch(const GemmProblem& gemm) const {
    if (has_aligned_tokens(gemm)) return gemm.k;
    if (staged) return ceil_div(gemm.k + 7, std::int64_t{64}) * 64 + 32;
    return ceil_div(gemm.k + 7, std::int64_t{8}) * 8;
  }
  std::int64_t shared_bytes(const GemmProblem& gemm) const {
    const std::int64_t accumulators = shape(gemm.b_operands()).reduction_bytes(warps);
    return accumulators + (staged ? 2 * gemm.m * pitch(gemm) : 0);
  }
  /// Whether the rows of B, and so the tokens, begin at boundaries as they are.
  static bool has_aligned_tokens(const GemmProblem& gemm) { return gemm.k % 8 == 0; }
};

std::optional<std::string> can_implement(const GemmChain& chain, const DeviceFacts&) {
  const GemmProblem& gemm = chain.front();
  if (auto reason = no_decode(gemm)) return reason;
  if (gemm.epilogue.kind != EpilogueKind::linear && gemm.epilogue.kind != EpilogueKind::gated)
    return "it has a linear or a gated epilogue";
  if (gemm.norm_of_a.any()) return "it multiplies copies of A, which no norm has changed";
  if (gemm.batch_invariant) return std::string(order_depends_on_rows);
  if (!misaligned_rows(gemm)) return "rows are aligned as they are";
  constexpr std::int64_t most_columns = std::int64_t{1} << 30;
  if (gemm.k > most_columns || gemm.n > most_columns)
    return fmt::format("n={} and k={} are limited to 2^30", gemm.n, gemm.k);
  return std::nullopt;
}

TypedSpace<Block> blocks_of(const GemmProblem& gemm, const DeviceFacts& facts) {
  using Blocks = TypedSpace<Block>;
  Blocks space{Block(gemm)};
  space
      .parameter("rows", "rows of each weight that a block takes", Blocks::to<&Block::rows>,
                 {8, 16, 32})
      .parameter("warps", "warps of a block, which share k", Blocks::to<&Block::warps>, {4, 8, 16})
      .parameter("unroll", "16-byte loads of a row that a thread issues at once",
                 Blocks::to<&Block::unroll>, {1, 2, 4})
      .parameter("staged", "whether a block shifts the tokens itself, instead of a launch before",
                 Blocks::to<&Block::staged>, {0, 1})
      .when_absent(0);
  space.constraint("tokens that are aligned are not shifted", {"staged"}, [gemm](const Block& b) {
    return !b.staged || !Block::has_aligned_tokens(gemm);
  });
  space.constraint("the tokens must fit in shared memory", {"warps", "rows", "staged"},
                   [gemm, facts](const Block& b) {
                     return !b.staged || b.shared_bytes(gemm) <= facts.shared_bytes_per_block;
                   });
  const int operands = gemm.b_operands();
  space.constraint("more than 16 loads in flight take too many registers", {"rows", "unroll"},
                   [operands](const Block& b) { return b.shape(operands).loads() <= 16; });
  space.constraint(
      "a thread has too few registers", {"rows", "warps", "unroll"},
      [gemm](const Block& b) { return b.registers(gemm) <= most_registers(b.threads()); });
  space.constraint("every warp needs a share of k, 32 * unroll elements at the least",
                   {"warps", "unroll"}, [k = gemm.k](const Block& b) {
                     return (b.warps == 4 && b.unroll == 1) ||
                            k > std::int64_t{32} * b.unroll * (b.warps - 1);
                   });
  return space;
}

Space space(const GemmChain& chain, const DeviceFacts& facts) {
  return blocks_of(chain.front(), facts).space();
}

/// Seconds until the tokens are where the product reads them: a launch of copies, or what each
/// block does, 4 chunks of a thread at a time.
double token_seconds(const Block& block, const GemmProblem& gemm) {
  if (Block::has_aligned_tokens(gemm)) return 0;
  if (!block.staged) return 2.5e-6;
  const std::int64_t rounds = ceil_div(gemm.m * gemm.k, std::int64_t{8} * 4 * block.threads());
  return 0.5e-6 + 0.4e-6 * static_cast<double>(rounds);
}

/// Seconds of the launch of copies and of the product. The terms are those of the decode engine's
/// model (engine.cpp); this kernel has not been fitted.
double seconds(const Block& block, const GemmProblem& gemm, const DeviceFacts& facts) {
  const double processors = std::max(facts.multiprocessors, 1);
  const double bytes_per_second =
      0.9 * (facts.memory_bandwidth > 0 ? facts.memory_bandwidth : 2e12);
  const auto blocks = static_cast<double>(block.blocks(gemm));
  const double weights = 2.0 * static_cast<double>(gemm.b_operands() * gemm.n * gemm.k);
  const double each = std::ceil(blocks / processors);
  const double of_registers = 65536.0 / (block.threads() * block.registers(gemm));
  const double of_shared = static_cast<double>(facts.shared_bytes_per_block) /
                           static_cast<double>(block.shared_bytes(gemm));
  const double resident =
      std::clamp(std::floor(std::min(of_registers, of_shared)), 1.0, std::max(each, 1.0));
  const double k_of_loads = 32.0 * block.unroll * block.warps;
  const auto k = static_cast<double>(gemm.k);
  const double padding = std::ceil(k / k_of_loads) * k_of_loads / k;
  const double tokens_read =
      1 + 0.035 * static_cast<double>(gemm.m) / (block.rows * gemm.b_operands());
  const double wanted = 1.655e-6 * bytes_per_second / processors;
  const double in_flight = resident * block.threads() * 16 * block.shape(gemm.b_operands()).loads();
  const double starved = std::pow(std::max(1.0, wanted / in_flight), 0.193);
  const double stream = weights / bytes_per_second * std::pow(each * processors / blocks, 0.228) *
                        std::pow(padding, 0.07) * tokens_read * starved;
  constexpr double wave = 0.77e-6;
  return token_seconds(block, gemm) + stream + wave * std::ceil(each / resident);
}

std::optional<double> estimate(const GemmChain& chain, const DeviceFacts& facts,
                               const Config& config) {
  const GemmProblem& gemm = chain.front();
  return seconds(Block(gemm, config), gemm, facts);
}

Config default_config(const GemmChain& chain, const DeviceFacts& facts) {
  const GemmProblem& gemm = chain.front();
  return least_cost(blocks_of(gemm, facts), "decode_unaligned",
                    [&](const Block& block) { return seconds(block, gemm, facts); });
}

/// The tokens that the kernel reads: A, or copies in scratch memory.
Argument append_tokens(Program& program, const GemmProblem& gemm, const Block& block,
                       const TensorPlaces& places, const DeviceFacts& facts) {
  const TensorArgument a = tensor_of(places, gemm.a.front().front());
  if (block.staged || Block::has_aligned_tokens(gemm)) return a;
  const int period = alignment_period(gemm.k);
  const std::int64_t pitch = block.pitch(gemm), bytes_of_copy = 2 * gemm.m * pitch;
  const std::size_t scratch = program.scratch.size();
  program.scratch.push_back({static_cast<std::size_t>(period * bytes_of_copy)});
  std::vector<RowCopy> copies;
  for (int alignment = 0; alignment < period; ++alignment) {
    row_copy copy{};
    copy.matrices = 1;
    copy.rows = copy.to_rows = gemm.m;
    copy.columns = static_cast<int>(gemm.k);
    copy.to_columns = static_cast<int>(pitch);
    copy.before = static_cast<int>(alignment * gemm.k % 8);
    copies.push_back(
        {copy, a, ScratchArgument{scratch, static_cast<std::size_t>(alignment * bytes_of_copy)}});
  }
  append_row_copies(program, copies, facts);
  return ScratchArgument{scratch};
}

void append(Program& program, const GemmChain& chain, const TensorPlaces& places,
            const DeviceFacts& facts, const Config& config) {
  const GemmProblem& gemm = chain.front();
  const Block block(gemm, config);
  const int period = alignment_period(gemm.k);
  const Argument tokens = append_tokens(program, gemm, block, places, facts);
  using Params = unaligned_params;
  ParameterStruct parameters{sizeof(Params), {}};
  ParameterFields<Params> fields(parameters);
  set_gemm(fields.inside(&Params::gemm), gemm, places);
  fields.set(&Params::tokens, tokens, &Params::period, period, &Params::pitch, block.pitch(gemm));
  KernelLaunch& launch =
      append_gemm(program, "gemm/decode/unaligned.cu",
                  fmt::format("unaligned_gemm<{}, {}>", template_argument(form_of(gemm)),
                              StructText("unaligned_config", "tokens", block.tokens, "rows",
                                         block.rows, "warps", block.warps, "unroll", block.unroll)
                                  .flags("staged", block.staged)),
                  block.blocks(gemm), block.threads(), std::move(parameters));
  launch.shared_bytes = static_cast<std::uint32_t>(block.shared_bytes(gemm));
  launch.programmatic = facts.compute_capability >= 90;
}

}  // namespace

constinit const Engine unaligned_decode_engine{
    .name = "decode_unaligned",
    .can_implement = can_implement,
    .search = {space, default_config, estimate},
    .append = append,
    .sources = {"gemm/decode/unaligned.cu", row_copy_source}};

}  // namespace fftune
