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

namespace {

/// The tensors of one layer, as placed among those of the problem.
using Tensors = std::vector<std::size_t>;

struct Named {
  std::size_t offset;
  const char* name;
};

/// Fills the fields of a struct, with tensors by their names: a pointer to one that the problem
/// lacks stays null.
class Fields {
 public:
  Fields(ParameterStruct& parameters, const Problem& one)
      : parameters_(parameters), own_(layer_op().tensors(one)) {}

  void set(std::size_t offset, Argument value) {
    parameters_.fields.push_back({offset, std::move(value)});
  }
  void set(const Tensors& tensors, std::size_t at, std::initializer_list<Named> named) {
    for (const auto& [offset, name] : named)
      if (const std::size_t place = own_.at(name); place != absent)
        set(at + offset, TensorArgument{tensors[place]});
  }

 private:
  ParameterStruct& parameters_;
  TensorPlaces own_;
};

void set_common(Fields& fields, const Problem& one, const Layer& layer, std::size_t workspace,
                const std::vector<Tensors>& places, bool whole_token) {
  using Params = persistent_common;
  const Tensors& first = places.front();
  fields.set(first, 0, {{offsetof(Params, x), "x"}});
  fields.set(places.back(), 0, {{offsetof(Params, y), "y"}});
  if (!whole_token)
    fields.set(first, 0,
               {{offsetof(Params, positions), "positions"},
                {offsetof(Params, slots), "slots"},
                {offsetof(Params, lengths), "lengths"}});
  if (layer.heads.table) fields.set(first, 0, {{offsetof(Params, angles), "angles"}});
  fields.set(first, 0, {{offsetof(Params, pages), "pages"}});
  fields.set(offsetof(Params, cache_rows), layer.heads.cache_rows);
  fields.set(offsetof(Params, page_count), static_cast<std::int32_t>(layer.attention.pages));
  fields.set(offsetof(Params, workspace), ScratchArgument{workspace});
  fields.set(offsetof(Params, layers), static_cast<std::int32_t>(places.size()));
  fields.set(offsetof(Params, cache), static_cast<std::int32_t>(layer.cache));
  fields.set(offsetof(Params, table_rows), static_cast<std::int32_t>(layer.heads.positions));
  fields.set(offsetof(Params, epsilon), layer.norm.eps);
  fields.set(offsetof(Params, norm_offset), static_cast<float>(layer.heads.norm_offset));
  const float cap = layer.attention.softcap;
  fields.set(offsetof(Params, scale),
             (cap > 0 ? cap : layer.attention.scale) * std::numbers::log2e_v<float>);
  if (cap > 0) fields.set(offsetof(Params, inner_scale), layer.attention.scale / cap);
  const auto turns = qkv::turns_of(part_named(parts_of(one), "qkv")->problem);
  fields.set(offsetof(Params, angle_scale), turns.scale);
  if (layer.router) fields.set(offsetof(Params, route_scale), layer.router->scale);
  if (!turns.frequencies.empty())
    fields.set(offsetof(Params, frequencies), ArrayArgument{turns.frequencies});
}

void set_router(Fields& fields, const Tensors& tensors, std::size_t at) {
  using Pointers = persistent_router_pointers;
  fields.set(tensors, at,
             {{offsetof(Pointers, weights), "w_router"},
              {offsetof(Pointers, bias), "b_router"},
              {offsetof(Pointers, choice_bias), "choice_bias"},
              {offsetof(Pointers, gate_bias), "b_gate"},
              {offsetof(Pointers, gate_bias), "b_gate_up"},
              {offsetof(Pointers, up_bias), "b_up"},
              {offsetof(Pointers, down_bias), "b_down"},
              {offsetof(Pointers, own_gate), "w_shared_gate"},
              {offsetof(Pointers, own_up), "w_shared_up"},
              {offsetof(Pointers, own_down), "w_shared_down"},
              {offsetof(Pointers, own_weight), "w_shared_router"}});
}

void set_layer(Fields& fields, const Layer& layer, const Tensors& tensors, std::size_t at) {
  using Pointers = persistent_layer_pointers;
  constexpr std::size_t next = sizeof(void*);
  constexpr std::size_t qkv = offsetof(Pointers, qkv), bias = offsetof(Pointers, bias);
  fields.set(tensors, at,
             {{offsetof(Pointers, attn_norm), "attn_norm"},
              {offsetof(Pointers, ffn_norm), "ffn_norm"},
              {offsetof(Pointers, attn_post_norm), "attn_post_norm"},
              {offsetof(Pointers, ffn_post_norm), "ffn_post_norm"}});
  if (layer.heads.packed)
    fields.set(tensors, at, {{qkv, "w_qkv"}, {bias, "b_qkv"}});
  else
    fields.set(tensors, at,
               {{qkv, "w_q"},
                {bias, "b_q"},
                {qkv + next, "w_k"},
                {bias + next, "b_k"},
                {qkv + 2 * next, "w_v"},
                {bias + 2 * next, "b_v"}});
  fields.set(tensors, at,
             {{offsetof(Pointers, head_norms), "q_norm"},
              {offsetof(Pointers, head_norms) + next, "k_norm"},
              {offsetof(Pointers, out), "w_o"},
              {offsetof(Pointers, out_bias), "b_o"},
              {offsetof(Pointers, sinks), "sinks"},
              {offsetof(Pointers, residual_scale), "residual_scale"}});
  if (layer.router) {
    set_router(fields, tensors, at + offsetof(persistent_expert_layer, router));
    fields.set(tensors, at, {{offsetof(Pointers, gate), "w_gate_up"}});
  }
  fields.set(tensors, at,
             {{offsetof(Pointers, gate), "w_gate"},
              {offsetof(Pointers, up), "w_up"},
              {offsetof(Pointers, down), "w_down"},
              {offsetof(Pointers, keys), "k_cache"},
              {offsetof(Pointers, values), "v_cache"}});
}

void set_packed(Fields& fields, const Tensors& tensors, std::size_t at) {
  using Packed = persistent_packed_pointers;
  constexpr const char* names[] = {"w_qkv",  "w_o",           "w_gate",      "w_up",
                                   "w_down", "w_shared_gate", "w_shared_up", "w_shared_down"};
  static_assert(std::size(names) == Packed::count);
  for (const std::string name : names) {
    const std::string scales = name + "_scale", zeros = name + "_zero";
    fields.set(
        tensors, at,
        {{offsetof(Packed, scales), scales.c_str()}, {offsetof(Packed, zeros), zeros.c_str()}});
    at += sizeof(void*);
  }
}

}  // namespace

ParameterStruct parameters_of(const Problem& one, const Layer& layer, std::size_t workspace,
                              const std::vector<std::vector<std::size_t>>& places,
                              bool whole_token) {
  const bool experts = layer.router.has_value(), packs = packed_format(one).packed;
  const std::size_t common =
      one.sizes.contains("ranks") ? sizeof(persistent_rank_common) : sizeof(persistent_common);
  const std::size_t of_layer = packs && experts ? sizeof(persistent_packed_expert_layer)
                               : packs          ? sizeof(persistent_packed_layer)
                               : experts        ? sizeof(persistent_expert_layer)
                                                : sizeof(persistent_layer_pointers);
  const std::size_t packed = experts ? offsetof(persistent_packed_expert_layer, packed)
                                     : offsetof(persistent_packed_layer, packed);
  std::size_t at = common + sizeof(persistent_token);
  ParameterStruct parameters{.bytes = at + persistent_params::most_layers * of_layer, .fields = {}};
  Fields fields(parameters, one);
  set_common(fields, one, layer, workspace, places, whole_token);
  for (const Tensors& tensors : places) {
    set_layer(fields, layer, tensors, at);
    if (packs) set_packed(fields, tensors, at + packed);
    at += of_layer;
  }
  return parameters;
}

}  // namespace fftune::layer
