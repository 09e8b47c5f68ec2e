// The CUDA family of head-linear: tokens of a head in shared memory, its weight read once for them.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/common/stage_family.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/head_linear/head_linear.hpp"

namespace fftune::head_linear {
namespace {

constexpr const char* kernel_file = "head_linear/heads.cu";
// Of a block, without asking for more, beside 512 bytes of partial sums.
constexpr std::int64_t shared_bytes = (48 << 10) - 512;
constexpr std::int64_t most_blocks = 65535;  // of a grid's second dimension

Space space(const Problem& problem, const DeviceFacts&) {
  const Layer layer = layer_of(problem);
  return Space()
      .parameter("tokens", "tokens of a block, for which it reads the weight once",
                 {1, 2, 4, 8, 16})
      .parameter("columns", "features of y of a block", {32, 64, 128})
      .constraint("the tokens' features must fit in 48 KiB of shared memory",
                  [layer](const Config& c) { return 4 * c.at("tokens") * layer.k <= shared_bytes; },
                  {"tokens"});
}

Config default_config(const Problem& problem, const DeviceFacts&) {
  const std::int64_t m = problem.size("m"), k = problem.size("k");
  std::int64_t tokens = 1;
  while (tokens < m && tokens < 16 && 8 * tokens * k <= shared_bytes) tokens *= 2;
  return {{"tokens", tokens}, {"columns", std::int64_t{64}}};
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  const TensorPlaces places(head_linear_op().tensors(problem));
  const int tokens = config.get("tokens"), columns = config.get("columns");
  const std::int64_t across = (layer.n + columns - 1) / columns * layer.heads;
  const std::int64_t down = std::min((layer.m + tokens - 1) / tokens, most_blocks);
  return pdl_program(
      facts, kernel_file,
      fmt::format("head_linear<{}, {}>", element_type(layer.dtype),
                  StructText("head_linear_config", "n", layer.n, "k", layer.k, "inputs_as_rows",
                             layer.inputs_as_rows, "tokens", tokens, "columns", columns)),
      {static_cast<std::uint32_t>(across), static_cast<std::uint32_t>(down)}, 128,
      {tensor_of(places, "x"), tensor_of(places, "w"), tensor_of(places, "y"), layer.m,
       static_cast<std::int32_t>(layer.heads), layer.x_head, layer.w_rows * layer.columns(),
       layer.w_skip * layer.columns()});
}

}  // namespace

std::vector<const Family*> cuda_families() {
  static const StageFamily family({.name = "head_linear_simt",
                                   .summary = "some tokens of a head a block, sums in fp32",
                                   .sources = {kernel_file},
                                   .is_fallback = true,
                                   .search = {space, default_config},
                                   .program = program});
  return {&family};
}

}  // namespace fftune::head_linear
