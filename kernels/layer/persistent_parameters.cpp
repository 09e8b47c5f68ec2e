#include "kernels/layer/persistent_parameters.hpp"

#include <fmt/format.h>

#include <numbers>
#include <string_view>
#include <type_traits>

#include "device/group_layout.hpp"
#include "kernels/all_reduce/all_reduce.hpp"
#include "kernels/common/parameter_fields.hpp"
#include "kernels/gemm/packed/packed.hpp"
#include "registry/part_family.hpp"

namespace fftune::layer {
namespace {

/// The tensors of one layer by their names, as placed among those of the program.
struct LayerTensors {
  const TensorPlaces& names;
  const std::vector<std::size_t>& places;

  std::size_t at(std::string_view name) const {
    const std::size_t place = names.at(name);
    return place == absent ? absent : places[place];
  }
};

void set_ranks(ParameterFields<persistent_ranks> fields, Program& program, const Problem& one,
               const LayerTensors& tensors, const std::string& launch) {
  all_reduce::Form form;
  form.m = one.size("batch") * size_or(one, "s", 1);
  form.d = one.size("d");
  form.ranks = static_cast<int>(one.size("ranks"));
  form.loopback = !one.has("link", "peers");
  all_reduce::set_group(fields, program, form, tensors.at("group"));
  fields.set(&persistent_ranks::tag, all_reduce::tag_of(one, launch));
}

void set_common(ParameterFields<persistent_common> fields, const Problem& one, const Layer& layer,
                const LayerTensors& first, const LayerTensors& last, const DecodeStep* step) {
  using Params = persistent_common;
  fields.set_tensors(first, &Params::x, "x", &Params::pages, "pages");
  fields.set_tensors(last, &Params::y, "y");
  if (step != nullptr)
    fields.set_places(&Params::lengths, step->lengths);
  else
    fields.set_tensors(first, &Params::positions, "positions", &Params::slots, "slots",
                       &Params::lengths, "lengths");
  if (layer.heads.table) fields.set_tensors(first, &Params::angles, "angles");
  const float cap = layer.attention.softcap, scale = layer.attention.scale;
  const auto turns = qkv::turns_of(part_named(parts_of(one), "qkv")->problem);
  fields.set(
      &Params::cache_rows, layer.heads.cache_rows, &Params::page_count, layer.attention.pages,
      &Params::cache, layer.cache, &Params::table_rows, layer.heads.positions, &Params::epsilon,
      layer.norm.eps, &Params::norm_offset, layer.heads.norm_offset, &Params::scale,
      (cap > 0 ? cap : scale) * std::numbers::log2e_v<float>, &Params::angle_scale, turns.scale);
  if (cap > 0) fields.set(&Params::inner_scale, scale / cap);
  if (layer.router) fields.set(&Params::route_scale, layer.router->scale);
  if (!turns.frequencies.empty())
    fields.set(&Params::frequencies, ArrayArgument{turns.frequencies});
}

void set_router(ParameterFields<persistent_router_pointers> fields, const LayerTensors& tensors) {
  using Pointers = persistent_router_pointers;
  fields.set_tensors(tensors, &Pointers::weights, "w_router", &Pointers::bias, "b_router",
                     &Pointers::choice_bias, "choice_bias", &Pointers::gate_bias, "b_gate",
                     &Pointers::gate_bias, "b_gate_up", &Pointers::up_bias, "b_up",
                     &Pointers::down_bias, "b_down", &Pointers::own_gate, "w_shared_gate",
                     &Pointers::own_up, "w_shared_up", &Pointers::own_down, "w_shared_down",
                     &Pointers::own_weight, "w_shared_router");
}

void set_packed(ParameterFields<persistent_packed_pointers> fields, const LayerTensors& tensors) {
  using Pointers = persistent_packed_pointers;
  fields.set_tensors_of(tensors, &Pointers::scales,
                        {"w_qkv_scale", "w_o_scale", "w_gate_scale", "w_up_scale", "w_down_scale",
                         "w_shared_gate_scale", "w_shared_up_scale", "w_shared_down_scale"});
  fields.set_tensors_of(tensors, &Pointers::zeros,
                        {"w_qkv_zero", "w_o_zero", "w_gate_zero", "w_up_zero", "w_down_zero",
                         "w_shared_gate_zero", "w_shared_up_zero", "w_shared_down_zero"});
}

void set_layer(ParameterFields<persistent_layer_pointers> fields, const Layer& layer,
               const LayerTensors& tensors) {
  using Pointers = persistent_layer_pointers;
  if (layer.heads.packed) {
    fields.set_tensors_of(tensors, &Pointers::qkv, {"w_qkv"});
    fields.set_tensors_of(tensors, &Pointers::bias, {"b_qkv"});
  } else {
    fields.set_tensors_of(tensors, &Pointers::qkv, {"w_q", "w_k", "w_v"});
    fields.set_tensors_of(tensors, &Pointers::bias, {"b_q", "b_k", "b_v"});
  }
  fields.set_tensors_of(tensors, &Pointers::head_norms, {"q_norm", "k_norm"});
  if (layer.router) fields.set_tensors(tensors, &Pointers::gate, "w_gate_up");
  fields.set_tensors(tensors, &Pointers::attn_norm, "attn_norm", &Pointers::ffn_norm, "ffn_norm",
                     &Pointers::attn_post_norm, "attn_post_norm", &Pointers::ffn_post_norm,
                     "ffn_post_norm", &Pointers::out, "w_o", &Pointers::out_bias, "b_o",
                     &Pointers::sinks, "sinks", &Pointers::residual_scale, "residual_scale",
                     &Pointers::gate, "w_gate", &Pointers::up, "w_up", &Pointers::down, "w_down",
                     &Pointers::keys, "k_cache", &Pointers::values, "v_cache");
}

/// The same with what stands beside a layer's pointers in the struct.
template <class Pointers>
void set_layer(ParameterFields<Pointers> fields, const Layer& layer, const LayerTensors& tensors) {
  set_layer(fields.inside(&Pointers::layer), layer, tensors);
  if constexpr (requires { &Pointers::router; })
    set_router(fields.inside(&Pointers::router), tensors);
  if constexpr (requires { &Pointers::packed; })
    set_packed(fields.inside(&Pointers::packed), tensors);
}

template <class Params>
ParameterStruct filled(Program& program, const Problem& one, const Layer& layer,
                       const LaunchedLayers& layers, const DecodeStep* step,
                       const std::string& expression) {
  ParameterStruct parameters{sizeof(Params), {}};
  ParameterFields<Params> fields(parameters);
  const TensorPlaces names(layer_op().tensors(one));
  const LayerTensors first{names, layers.places.front()}, last{names, layers.places.back()};
  auto common = fields.template base<persistent_common>();
  common.set(&persistent_common::workspace, ScratchArgument{program.scratch.size() - 1},
             &persistent_common::layers, layers.count());
  set_common(common, one, layer, first, last, step);
  if constexpr (std::is_base_of_v<persistent_ranks, Params>)
    set_ranks(fields.template base<persistent_ranks>(), program, one, first,
              fmt::format("{} {}", expression, layers.count()));
  if (step != nullptr) step->set_fields(fields.inside(&Params::token), layers.first, layers.last);
  for (std::size_t i = 0; i < layers.count(); ++i)
    set_layer(fields.inside(&Params::of, i), layer, {names, layers.places[i]});
  return parameters;
}

}  // namespace

ParameterStruct parameters_of(Program& program, const Problem& one, const Layer& layer,
                              const LaunchedLayers& layers, const DecodeStep* step,
                              const std::string& expression) {
  const bool experts = layer.router.has_value(), packs = packed_format(one).packed;
  const auto fill = one.sizes.contains("ranks") ? filled<persistent_rank_params>
                    : packs && experts          ? filled<persistent_packed_expert_params>
                    : packs                     ? filled<persistent_packed_params>
                    : experts                   ? filled<persistent_expert_params>
                                                : filled<persistent_params>;
  return fill(program, one, layer, layers, step, expression);
}

}  // namespace fftune::layer
