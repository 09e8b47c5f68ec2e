#include "kernels/attention/launch.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <tuple>
#include <utility>

#include "core/error.hpp"
#include "kernels/attention/pack_mask.hpp"
#include "kernels/attention/row_layout.cuh"
#include "kernels/attention/simt/config.cuh"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/gemm/element.hpp"

namespace fftune::attention {
namespace {

static_assert(attention_flag_tile == mask_tile);
static_assert(attention_mask_words(129) == mask_words(129));

std::int64_t element_bytes(const Layer& layer) {
  return static_cast<std::int64_t>(dtype_bytes(layer.dtype));
}

}  // namespace

attention_form form_of(const Layer& layer) {
  attention_form form;
  form.type = element_of(layer.dtype);
  form.dim = static_cast<int>(layer.dim);
  form.layout = layer.layout == Layout::thd ? attention_layout::thd : attention_layout::bshd;
  form.mask = layer.masked()               ? attention_mask::packed
              : layer.mask == Mask::causal ? attention_mask::causal
                                           : attention_mask::none;
  form.window = layer.window > 0;
  form.bias = layer.bias;
  form.lengths = layer.lengths;
  form.paged = layer.page > 0;
  form.sinks = layer.sinks;
  form.softcap = layer.softcap > 0;
  form.lse = layer.lse;
  form.deterministic = layer.deterministic;
  form.e4m3 = layer.cache_format.e4m3;
  return form;
}

std::string template_argument(const attention_form& form) {
  constexpr std::string_view masks[] = {"none", "causal", "packed"};
  StructText text("attention_form");
  text.set("type", element_text(form.type), "dim", form.dim);
  if (form.layout == attention_layout::thd) text.set("layout", "fftune::attention_layout::thd");
  return text.name("mask", "attention_mask", form.mask, attention_mask::none, masks)
      .flags("window", form.window, "bias", form.bias, "lengths", form.lengths, "paged", form.paged,
             "sinks", form.sinks, "softcap", form.softcap, "lse", form.lse, "deterministic",
             form.deterministic, "e4m3", form.e4m3);
}

std::string kernel_of(const Layer& layer, std::string_view name, const std::string& config) {
  const bool other_values = layer.v_dim != layer.dim;
  return fmt::format("{}{}{}<{}{}{}{}>", name, other_values ? "_values" : "",
                     layer.cache_format.e4m3 ? "_e4m3" : "", template_argument(form_of(layer)),
                     other_values ? fmt::format(", {}", layer.v_dim) : "",
                     config.empty() ? "" : ", ", config);
}

std::optional<std::string> misaligned_rows(const Layer& layer) {
  if (layer.dim % 2 != 0)
    return fmt::format("heads of dim={} are not aligned to 4 bytes", layer.dim);
  // Elements of e4m3 are read in pairs, as those of 16 bits.
  const std::int64_t pair = layer.cache_format.e4m3 ? 2 : 1;
  if (layer.dim / pair % 2 != 0)
    return fmt::format("heads of dim={} in e4m3 are not aligned to 4 bytes", layer.dim);
  for (const auto& [name, row, features, bytes] :
       {std::tuple{"q", layer.q_row, layer.dim, element_bytes(layer)},
        std::tuple{"k", layer.k_row, layer.dim / pair, element_bytes(layer) / pair},
        std::tuple{"v", layer.v_row, layer.v_dim / pair, element_bytes(layer) / pair}}) {
    const int access = attention_access_bytes(static_cast<int>(features));
    if (row * bytes % access != 0)
      return fmt::format("rows of {}-row={} elements are not aligned to {} bytes", name, row,
                         access);
  }
  return std::nullopt;
}

std::optional<std::string> refuse_other_values(const Layer& layer) {
  if (layer.v_dim == layer.dim) return std::nullopt;
  return fmt::format("it takes values of as many features as keys: v-dim={} is not dim={}",
                     layer.v_dim, layer.dim);
}

std::optional<std::string> refuse_e4m3(const Layer& layer) {
  if (!layer.cache_format.e4m3) return std::nullopt;
  return "its keys and values are of the same type as q, and not e4m3";
}

std::string no_tiles(const Layer& layer, const DeviceFacts& facts) {
  return fmt::format("tiles of dim={} do not fit in the registers and shared memory of {}",
                     layer.dim, facts.name);
}

Launch::Launch(Program& program, const Problem& problem, const DeviceFacts& facts,
               std::size_t bytes, std::size_t base)
    : program_(program),
      facts_(facts),
      base_(base),
      layer_(layer_of(problem)),
      at_(places_of(problem)) {
  parameters_.bytes = bytes;
  using Params = attention_params;
  const std::size_t kv_offsets = at_.kv_offsets == absent ? at_.offsets : at_.kv_offsets;
  attention().set_places(&Params::q, at_.q, &Params::k, at_.k, &Params::v, at_.v, &Params::out,
                         at_.out, &Params::lse, at_.lse, &Params::bias, at_.bias, &Params::offsets,
                         at_.offsets, &Params::kv_offsets, kv_offsets, &Params::lengths,
                         at_.lengths, &Params::pages, at_.pages, &Params::sinks, at_.sinks,
                         &Params::d_out, at_.d_out, &Params::dq, at_.dq, &Params::dk, at_.dk,
                         &Params::dv, at_.dv, &Params::d_sinks, at_.d_sinks);
  set_sizes();
  if (layer_.mask == Mask::packed) {
    attention().set_places(&Params::mask_bits, at_.mask_bits, &Params::mask_flags, at_.mask_flags);
  } else if (layer_.mask == Mask::boolean) {
    const MaskShape shape{layer_.b * layer_.mask_heads(), layer_.s, layer_.kv};
    const auto bits = scratch(shape.bits_bytes()), flags = scratch(shape.flags_bytes());
    attention().set(&Params::mask_bits, bits, &Params::mask_flags, flags);
    append_pack_mask(program, facts, shape, TensorArgument{at_.mask}, bits, flags);
  }
}

void Launch::set_sizes() {
  using Params = attention_params;
  const std::int64_t out_row = layer_.heads * layer_.v_dim, matrix = layer_.s * layer_.kv;
  const std::int64_t bias_of_sequence = matrix * (layer_.bias_of_head ? layer_.heads : 1);
  attention().set(
      &Params::q_batch, layer_.s * layer_.q_row, &Params::k_batch, layer_.kv * layer_.k_row,
      &Params::v_batch, layer_.kv * layer_.v_row, &Params::out_batch, layer_.s * out_row,
      &Params::bias_head, layer_.bias_of_head ? matrix : 0, &Params::bias_batch,
      layer_.bias_of_sequence ? bias_of_sequence : 0, &Params::q_row, layer_.q_row, &Params::k_row,
      layer_.k_row, &Params::v_row, layer_.v_row, &Params::out_row, out_row, &Params::kv_head,
      layer_.kv_head, &Params::bias_row, layer_.kv, &Params::batch, layer_.b, &Params::heads,
      layer_.heads, &Params::kv_heads, layer_.kv_heads, &Params::q_len, layer_.s, &Params::kv_len,
      layer_.kv, &Params::mask_heads, layer_.mask_heads(), &Params::window, layer_.window,
      &Params::page, layer_.page, &Params::page_count, layer_.pages, &Params::scale, layer_.scale,
      &Params::softcap, layer_.softcap);
}

void Launch::set_group(std::int64_t kv_heads, std::int64_t packed_heads) {
  attention().set(&attention_params::group, kv_heads * layer_.group() / packed_heads);
}

ScratchArgument Launch::scratch(std::int64_t bytes, bool zeroed) {
  // Kernels count up to a bound and begin at zero again.
  program_.scratch.push_back(
      {static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1)), zeroed, zeroed});
  return {program_.scratch.size() - 1};
}

KernelLaunch& Launch::append(const std::string& file, const std::string& expression, Dim3 grid,
                             int threads, int shared_bytes) {
  auto& launch = append_pdl_kernel(program_, facts_, file, expression, grid,
                                   static_cast<std::uint32_t>(threads), {});
  launch.shared_bytes = static_cast<std::uint32_t>(shared_bytes);
  launch.parameters = parameters_;
  return launch;
}

void append_d_sinks(Launch& launch) {
  if (!launch.layer().sinks) return;
  launch.append(
      d_sinks_file,
      fmt::format("attention_simt_d_sinks<{}>", template_argument(form_of(launch.layer()))),
      {static_cast<std::uint32_t>(launch.layer().heads), 1, 1}, attention_simt_config::threads);
}

Launch forward_launch(Program& program, const Problem& problem, const DeviceFacts& facts) {
  using Params = attention_cache_params;
  const Layer layer = layer_of(problem);
  if (!layer.cache_format.e4m3) return {program, problem, facts, sizeof(attention_params)};
  Launch launch(program, problem, facts, sizeof(Params), offsetof(Params, attention));
  launch.fields<Params>().set(&Params::k_scale, TensorArgument{launch.places().k_scale},
                              &Params::v_scale, TensorArgument{launch.places().v_scale},
                              &Params::scale_of_head, layer.cache_format.scale_of_head);
  return launch;
}

Launch backward_launch(Program& program, const Problem& problem, const DeviceFacts& facts) {
  using Params = attention_backward_params;
  Launch launch(program, problem, facts, sizeof(Params), offsetof(Params, forward));
  const Layer& layer = launch.layer();
  const std::int64_t row = layer.heads * layer.dim, kv_row = layer.kv_heads * layer.dim;
  const std::int64_t out_row = layer.heads * layer.v_dim, v_row = layer.kv_heads * layer.v_dim;
  launch.fields<Params>().set(
      &Params::d_out_batch, layer.s * out_row, &Params::dq_batch, layer.s * row, &Params::dk_batch,
      layer.kv * kv_row, &Params::dv_batch, layer.kv * v_row, &Params::d_out_row, out_row,
      &Params::dq_row, row, &Params::dk_row, kv_row, &Params::dv_row, v_row);
  launch.attention().set(&attention_params::delta,
                         launch.scratch(layer.q_tokens() * layer.heads * 4));
  return launch;
}

TensorMapArgument rows_map(const Layer& layer, const Pointer& tensor, std::int64_t row,
                           bool of_keys, int box_tokens, int box_columns) {
  TensorMapArgument map;
  map.matrix = tensor;
  map.dtype = layer.dtype;
  map.rows = of_keys ? layer.kv : layer.s;
  map.columns = row;
  map.box_rows = static_cast<std::uint32_t>(box_tokens);
  map.box_columns = static_cast<std::uint32_t>(box_columns);
  map.matrices = layer.layout == Layout::thd ? 1 : layer.b;
  if (of_keys && layer.page > 0) {
    map.rows = layer.page;
    map.matrices = layer.pages;
    map.box_rows = std::min(map.box_rows, static_cast<std::uint32_t>(layer.page));
  }
  return map;
}

bool fits_shared_memory(const DeviceFacts& facts, std::int64_t bytes, std::int64_t ctas) {
  constexpr std::int64_t reserved = 1024;  // of each CTA, by the driver
  return bytes <= facts.shared_bytes_per_block &&
         ctas * (bytes + reserved) <= facts.shared_bytes_per_multiprocessor;
}

std::int64_t query_tiles(const Layer& layer, std::int64_t bm, std::int64_t packed_heads) {
  const std::int64_t heads = layer.heads / packed_heads;
  if (layer.layout == Layout::thd) return (quotient_up(layer.s, bm) + layer.b) * heads;
  return quotient_up(layer.s, bm) * layer.b * heads;
}

std::int64_t usual_queries(const Layer& layer) {
  return layer.layout == Layout::thd ? quotient_up(layer.s, layer.b) : layer.s;
}

std::int64_t usual_keys(const Layer& layer) {
  return layer.layout == Layout::thd && layer.page == 0 ? quotient_up(layer.kv, layer.b) : layer.kv;
}

std::int64_t kv_matrices(const Layer& layer) {
  return layer.kv_heads * (layer.layout == Layout::thd ? 1 : layer.b);
}

std::int64_t heads_in_l2(const Layer& layer, const DeviceFacts& facts) {
  const std::int64_t bytes = usual_keys(layer) * (layer.dim + layer.v_dim) * element_bytes(layer);
  return std::clamp<std::int64_t>(facts.l2_bytes / 2 / bytes, 1, layer.kv_heads * layer.b);
}

}  // namespace fftune::attention
