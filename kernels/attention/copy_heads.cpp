#include "kernels/attention/copy_heads.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/attention/copy_heads.cuh"
#include "kernels/attention/row_layout.cuh"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/parameter_fields.hpp"

namespace fftune::attention {
namespace {

std::int64_t padded(const Layer& layer) {
  return attention_padded_dim(static_cast<int>(layer.dim));
}

}  // namespace

bool copies_heads(const Layer& layer) {
  return attention_copies_heads(static_cast<int>(layer.dim));
}

double copy_cycles(const Layer& layer, const DeviceFacts& facts) {
  if (!copies_heads(layer)) return 0;
  constexpr double of_launch = 3000, bytes_of_cycle = 13;  // of an SM
  const std::int64_t of_queries = layer.backward ? 2 : 1;
  const std::int64_t elements =
      (of_queries * layer.q_tokens() * layer.heads + 2 * layer.kv_tokens() * layer.kv_heads) *
      padded(layer);
  // 16-bit elements, read once and written once.
  return of_launch + 2.0 * static_cast<double>(2 * elements) / bytes_of_cycle /
                         static_cast<double>(facts.multiprocessors);
}

HeadTensors head_tensors(Program& program, Launch& launch, const DeviceFacts& facts) {
  const Layer& layer = launch.layer();
  const Places& at = launch.places();
  HeadTensors tensors{layer, TensorArgument{at.q}, TensorArgument{at.k}, TensorArgument{at.v},
                      TensorArgument{at.d_out}};
  if (!copies_heads(layer)) return tensors;
  using Params = attention_copy_params;
  constexpr std::int64_t tokens_of_block = 8;
  ParameterStruct parameters{sizeof(Params), {}};
  ParameterFields<Params> fields(parameters);
  std::int64_t most_tokens = 0;
  std::size_t count = 0;
  const auto copy = [&](Pointer& tensor, std::int64_t tokens, std::int64_t heads, std::int64_t row,
                        std::int64_t head) {
    const auto set = [&](auto array, const auto& value) { fields.set_at(array, count, value); };
    const ScratchArgument to = launch.scratch(tokens * heads * padded(layer) * 2);
    set(&Params::from, argument_of(tensor));
    set(&Params::to, to);
    set(&Params::tokens, tokens);
    set(&Params::heads, heads);
    set(&Params::row, row);
    set(&Params::head, head);
    tensor = to;
    most_tokens = std::max(most_tokens, tokens);
    ++count;
  };
  copy(tensors.q, layer.q_tokens(), layer.heads, layer.q_row, layer.dim);
  copy(tensors.k, layer.kv_tokens(), layer.kv_heads, layer.k_row, layer.kv_head);
  copy(tensors.v, layer.kv_tokens(), layer.kv_heads, layer.v_row, layer.kv_head);
  if (layer.backward)
    copy(tensors.d_out, layer.q_tokens(), layer.heads, layer.heads * layer.dim, layer.dim);
  auto& step =
      append_pdl_kernel(program, facts, copy_heads_source,
                        fmt::format("attention_copy_heads<{}, {}>", layer.dim, tokens_of_block),
                        {static_cast<std::uint32_t>(quotient_up(most_tokens, tokens_of_block)),
                         static_cast<std::uint32_t>(count), 1},
                        256, {});
  step.parameters = std::move(parameters);
  Layer& copied = tensors.layer;
  copied.dim = copied.kv_head = padded(layer);
  copied.q_row = layer.heads * copied.dim;
  copied.k_row = copied.v_row = layer.kv_heads * copied.dim;
  return tensors;
}

TensorMapArgument heads_map(const Layer& layer, const Pointer& tensor, std::int64_t row,
                            bool of_keys, int tokens, int columns, int heads) {
  TensorMapArgument map;
  map.matrix = tensor;
  map.dtype = layer.dtype;
  map.columns = layer.dim;
  map.rows = row / layer.dim;
  map.matrices = of_keys ? layer.kv_tokens() : layer.q_tokens();
  map.box_columns = static_cast<std::uint32_t>(columns);
  map.box_rows = static_cast<std::uint32_t>(heads);
  map.box_matrices = static_cast<std::uint32_t>(tokens);
  if (of_keys && layer.page > 0)
    map.box_matrices = std::min(map.box_matrices, static_cast<std::uint32_t>(layer.page));
  return map;
}

}  // namespace fftune::attention
