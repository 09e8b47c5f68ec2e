// What the CUDA families share: how a stage's kernels are named and called, and what they refuse.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/masked/masked.hpp"

namespace fftune::masked {

using StageFamily = fftune::StageFamily<Stage, DeviceKind::cuda>;

/// The template arguments that every kernel of a product begins with: element type, epilogue,
/// whether A and C are in the order of the mask.
std::string template_arguments(const StageProduct& work, const Problem& problem);

/// Appends the addresses of the tensors at these places, and nulls up to `count`.
void append_places(std::vector<Argument>& arguments, const std::vector<std::size_t>& places,
                   std::size_t count);

/// The addresses that the kernels of the fallback and of mma.sync begin with: a0, a1, mask, an
/// expert's b0 and b1, the other's, c0, c1, c2, gate, up; null for what the product does without.
std::vector<Argument> pointer_arguments(const StageProduct& work);
/// Those of the sums' kernels: a0, a1, b, an expert's addends, the other's, an expert's c0 and c1,
/// the other's.
std::vector<Argument> pointer_arguments(const StageSum& work);

/// What the sm_90a kernels keep in shared memory beside the engine's layout (more_bytes): 8 bytes
/// to align, row_groups::shared_words, two row_tables of `rows` rows, and their barriers.
constexpr std::int64_t row_table_bytes(std::int64_t rows) {
  constexpr std::int64_t group_words = 1024 + 4 + 32;
  return 8 + 4 * group_words + 2 * 4 * (rows + 4) + 4 * 8;
}

/// Whether most tiles of a mask of the problem's pattern have tokens that are no neighbours.
bool scatters(const Problem& problem);

/// The sums as an engine's space and cost may see them: each over half of the tokens, which is what
/// those of both experts come to.
GemmShape halved(GemmShape shape);

/// Why no kernel of 16-bit tensor core products and 16-byte rows can serve it.
std::optional<std::string> refuse_halves(const Problem& problem, const DeviceFacts& facts);

/// The same of the mma.sync engine.
std::optional<std::string> refuse_mma_sync(const Problem& problem, const DeviceFacts& facts);
/// The same of the wgmma engine, whose table of tiles is in shared memory: 64 KiB with tiles of 64
/// rows.
std::optional<std::string> refuse_wgmma(const Problem& problem, const DeviceFacts& facts);

}  // namespace fftune::masked
