// The baselines: the unfused sequence of kernels, one for each step of the formula.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/rope/rope.hpp"

namespace fftune::rope {

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  // Sequences that begin anywhere take a user a loop over them.
  if (facts.kind == DeviceKind::cpu || layer.layout == Layout::thd || layer.starts) return {};
  if (layer.table && layer.positions < layer.s) return {};
  // Other views than parts of packed rows take a user a copy first.
  if (!layer.is_plain()) return {};
  constexpr const char* file = "rope/baseline.cu";
  constexpr std::uint32_t threads = 256;
  const TensorPlaces at(rope_op().tensors(problem));
  const Frequencies frequencies = frequencies_of(problem);
  const std::string type = element_type(layer.dtype);
  const bool interleaved = layer.rotation == Rotation::interleaved;
  const std::int64_t widest_heads = std::max(layer.heads, layer.kv_heads);
  const Argument cosine = ScratchArgument{0}, sine = ScratchArgument{1};
  const auto angle_bytes = static_cast<std::size_t>(layer.s * layer.rotary) * sizeof(float);
  Baseline baseline;
  baseline.name = "unfused";
  baseline.summary = "a plain kernel each for sines and cosines, the partners, and the sum";
  baseline.extra = {
      {"turned", layer.dtype, {layer.tokens(), widest_heads, layer.rotary}, Role::intermediate, 1}};
  const TensorArgument turned{at.count()};
  Program& program = baseline.program;
  program.scratch = {{angle_bytes, false}, {angle_bytes, false}};
  const auto grid_of = [&](std::int64_t elements) {
    constexpr std::int64_t most_blocks = std::int64_t{1} << 20;
    return Dim3{static_cast<std::uint32_t>(std::min(quotient_up(elements, threads), most_blocks)),
                1, 1};
  };
  append_kernel(program, file,
                fmt::format("baseline_angles<{}, {}, {}>", layer.table, interleaved, layer.rotary),
                {static_cast<std::uint32_t>(quotient_up(layer.s * layer.rotary, threads)), 1, 1},
                threads,
                {tensor_or_null(at, "angles"), ArrayArgument{frequencies.values}, cosine, sine,
                 layer.s, frequencies.scale});
  for (const auto& [in_name, out_name, heads, strides] : sides_of(layer)) {
    const TensorArgument in = tensor_of(at, in_name), out = tensor_of(at, out_name);
    const auto count = static_cast<std::int32_t>(heads);
    const std::int64_t row = strides.row;
    const std::int64_t divisor = layer.layout == Layout::sbhd ? layer.b : 1;
    append_kernel(program, file,
                  fmt::format("baseline_turn<{}, {}, {}, {}, {}>", type, layer.backward,
                              interleaved, layer.dim, layer.rotary),
                  grid_of(layer.tokens() * heads * layer.rotary), threads,
                  {in, sine, turned, layer.tokens(), count, row, divisor, layer.s});
    append_kernel(
        program, file,
        fmt::format("baseline_sum<{}, {}, {}, {}>", type, layer.backward, layer.dim, layer.rotary),
        grid_of(layer.tokens() * heads * layer.dim), threads,
        {in, turned, cosine, sine, out, layer.tokens(), count, row, divisor, layer.s});
  }
  return {baseline};
}

}  // namespace fftune::rope
