#include "kernels/layer/persistent_parameters.hpp"

#include <fmt/format.h>

#include <iterator>
#include <numbers>
#include <utility>

#include "device/group_layout.hpp"
#include "kernels/all_reduce/all_reduce.hpp"
#include "kernels/gemm/packed/packed.hpp"
#include "registry/part_family.hpp"

namespace fftune::layer {
namespace {

constexpr std::size_t layers_at = token_at + sizeof(persistent_token);
static_assert(sizeof(persistent_params) ==
              layers_at + sizeof(persistent_layer_pointers) * persistent_params::most_layers);
static_assert(sizeof(persistent_packed_expert_params) ==
              layers_at + sizeof(persistent_packed_expert_layer) * persistent_params::most_layers);

}  // namespace

void set_ranks(ParameterStruct& parameters, Program& program, const Problem& one,
               const std::vector<std::size_t>& places, std::size_t layers,
               const std::string& expression) {
  all_reduce::Form form;
  form.m = one.size("batch") * size_or(one, "s", 1);
  form.d = one.size("d");
  form.ranks = static_cast<int>(one.size("ranks"));
  form.loopback = !one.has("link", "peers");
  const TensorPlaces own(layer_op().tensors(one));
  // They are behind the common ones.
  constexpr std::size_t at = sizeof(persistent_common);
  all_reduce::set_group(
      parameters, program, form, form.loopback ? absent : places[own.at("group")],
      {at + offsetof(persistent_ranks, loopback), at + offsetof(persistent_ranks, table)});
  const auto tag = all_reduce::tag_of(one, fmt::format("{} {}", expression, layers));
  parameters.fields.push_back(
      {at + offsetof(persistent_ranks, tag), static_cast<std::int32_t>(tag)});
}

ParameterStruct parameters_of(const Problem& one, const Layer& layer, std::size_t workspace,
                              const std::vector<std::vector<std::size_t>>& places,
                              bool whole_token) {
  const TensorPlaces own(layer_op().tensors(one));
  const bool experts = layer.router.has_value(), packs = packed_format(one).packed;
  const std::size_t common =
      one.sizes.contains("ranks") ? sizeof(persistent_rank_common) : sizeof(persistent_common);
  const std::size_t of_layer = packs && experts ? sizeof(persistent_packed_expert_layer)
                               : packs          ? sizeof(persistent_packed_layer)
                               : experts        ? sizeof(persistent_expert_layer)
                                                : sizeof(persistent_layer_pointers);
  ParameterStruct parameters{
      .bytes = common + sizeof(persistent_token) + persistent_params::most_layers * of_layer,
      .fields = {}};
  const auto set = [&](std::size_t offset, Argument value) {
    parameters.fields.push_back({offset, std::move(value)});
  };
  const auto set_tensor = [&](std::size_t offset, const std::vector<std::size_t>& of,
                              const char* name) {
    if (const std::size_t at = own.at(name); at != absent) set(offset, TensorArgument{of[at]});
  };
  using Params = persistent_common;
  const auto& first = places.front();
  set_tensor(offsetof(Params, x), first, "x");
  set_tensor(offsetof(Params, y), places.back(), "y");
  if (!whole_token) {
    set_tensor(offsetof(Params, positions), first, "positions");
    set_tensor(offsetof(Params, slots), first, "slots");
    set_tensor(offsetof(Params, lengths), first, "lengths");
  }
  if (layer.heads.table) set_tensor(offsetof(Params, angles), first, "angles");
  set_tensor(offsetof(Params, pages), first, "pages");
  set(offsetof(Params, cache_rows), layer.heads.cache_rows);
  set(offsetof(Params, page_count), static_cast<std::int32_t>(layer.attention.pages));
  set(offsetof(Params, workspace), ScratchArgument{workspace});
  set(offsetof(Params, layers), static_cast<std::int32_t>(places.size()));
  set(offsetof(Params, cache), static_cast<std::int32_t>(layer.cache));
  set(offsetof(Params, table_rows), static_cast<std::int32_t>(layer.heads.positions));
  set(offsetof(Params, epsilon), layer.norm.eps);
  set(offsetof(Params, norm_offset), static_cast<float>(layer.heads.norm_offset));
  const float cap = layer.attention.softcap;
  set(offsetof(Params, scale),
      (cap > 0 ? cap : layer.attention.scale) * std::numbers::log2e_v<float>);
  if (cap > 0) set(offsetof(Params, inner_scale), layer.attention.scale / cap);
  const auto turns = qkv::turns_of(part_named(parts_of(one), "qkv")->problem);
  set(offsetof(Params, angle_scale), turns.scale);
  if (experts) set(offsetof(Params, route_scale), layer.router->scale);
  if (!turns.frequencies.empty())
    set(offsetof(Params, frequencies), ArrayArgument{turns.frequencies});
  for (std::size_t i = 0; i < places.size(); ++i) {
    using Pointers = persistent_layer_pointers;
    const std::size_t at = common + sizeof(persistent_token) + i * of_layer;
    const auto set_own = [&](std::size_t offset, const char* name) {
      set_tensor(at + offset, places[i], name);
    };
    set_own(offsetof(Pointers, attn_norm), "attn_norm");
    set_own(offsetof(Pointers, ffn_norm), "ffn_norm");
    set_own(offsetof(Pointers, attn_post_norm), "attn_post_norm");
    set_own(offsetof(Pointers, ffn_post_norm), "ffn_post_norm");
    if (layer.heads.packed) {
      set_own(offsetof(Pointers, qkv), "w_qkv");
      set_own(offsetof(Pointers, bias), "b_qkv");
    } else {
      const char* const names[][2] = {{"w_q", "b_q"}, {"w_k", "b_k"}, {"w_v", "b_v"}};
      for (std::size_t part = 0; part < 3; ++part) {
        set_own(offsetof(Pointers, qkv) + part * sizeof(void*), names[part][0]);
        set_own(offsetof(Pointers, bias) + part * sizeof(void*), names[part][1]);
      }
    }
    set_own(offsetof(Pointers, head_norms), "q_norm");
    set_own(offsetof(Pointers, head_norms) + sizeof(void*), "k_norm");
    set_own(offsetof(Pointers, out), "w_o");
    set_own(offsetof(Pointers, out_bias), "b_o");
    set_own(offsetof(Pointers, sinks), "sinks");
    set_own(offsetof(Pointers, residual_scale), "residual_scale");
    if (experts) {
      const auto set_router = [&](std::size_t offset, const char* name) {
        set_own(offsetof(persistent_expert_layer, router) + offset, name);
      };
      set_router(offsetof(persistent_router_pointers, weights), "w_router");
      set_router(offsetof(persistent_router_pointers, bias), "b_router");
      set_router(offsetof(persistent_router_pointers, choice_bias), "choice_bias");
      set_router(offsetof(persistent_router_pointers, gate_bias), "b_gate");
      set_router(offsetof(persistent_router_pointers, gate_bias), "b_gate_up");
      set_router(offsetof(persistent_router_pointers, up_bias), "b_up");
      set_router(offsetof(persistent_router_pointers, down_bias), "b_down");
      set_router(offsetof(persistent_router_pointers, own_gate), "w_shared_gate");
      set_router(offsetof(persistent_router_pointers, own_up), "w_shared_up");
      set_router(offsetof(persistent_router_pointers, own_down), "w_shared_down");
      set_router(offsetof(persistent_router_pointers, own_weight), "w_shared_router");
      set_own(offsetof(Pointers, gate), "w_gate_up");
    }
    set_own(offsetof(Pointers, gate), "w_gate");
    set_own(offsetof(Pointers, up), "w_up");
    set_own(offsetof(Pointers, down), "w_down");
    set_own(offsetof(Pointers, keys), "k_cache");
    set_own(offsetof(Pointers, values), "v_cache");
    if (!packs) continue;
    using Packed = persistent_packed_pointers;
    const std::size_t packed = experts ? offsetof(persistent_packed_expert_layer, packed)
                                       : offsetof(persistent_packed_layer, packed);
    constexpr const char* names[] = {"w_qkv",  "w_o",           "w_gate",      "w_up",
                                     "w_down", "w_shared_gate", "w_shared_up", "w_shared_down"};
    static_assert(std::size(names) == Packed::count);
    for (std::size_t part = 0; part < std::size(names); ++part) {
      const std::string name = names[part];
      const std::size_t offset = packed + part * sizeof(void*);
      set_own(offset + offsetof(Packed, scales), (name + "_scale").c_str());
      set_own(offset + offsetof(Packed, zeros), (name + "_zero").c_str());
    }
  }
  return parameters;
}

}  // namespace fftune::layer
