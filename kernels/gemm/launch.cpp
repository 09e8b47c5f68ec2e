#include "kernels/gemm/launch.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string_view>
#include <vector>

#include "core/error.hpp"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/parameter_fields.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/gemm/element.hpp"
#include "kernels/gemm/packed/packed.hpp"

namespace fftune {
namespace {

constexpr std::string_view operands[] = {"single", "dual_b", "k_concatenated", "two_outputs"};
constexpr std::string_view majors[] = {"k", "mn"};
constexpr std::string_view groupings[] = {"none", "rows", "reduction"};
constexpr std::string_view group_sources[] = {"mask", "routed"};
constexpr std::string_view readiness[] = {"awaited", "settled", "counted"};
constexpr std::string_view packings[] = {"separate", "halves", "interleaved"};
constexpr std::string_view epilogues[] = {"linear", "gated", "activation_gradient", "qkv"};
constexpr std::string_view rotations[] = {"none", "halves", "interleaved"};
constexpr std::string_view row_norms[] = {"none", "llama", "gemma", "t5"};
constexpr std::string_view scalings[] = {"none", "tensor", "block", "channel"};

/// The device's enumeration has the host's order, and its enumerators the names of the types.
std::string activation_enumerator(activation_kind kind) {
  const std::string type = activation_type(static_cast<Activation>(kind));
  return type.substr(type.rfind(':') + 1);
}

}  // namespace

gemm_form form_of(const GemmProblem& gemm) {
  gemm_form form;
  form.ab = element_of(gemm.dtype);
  form.c = element_of(gemm.c_dtype);
  form.wide = element_of(gemm.wide_dtype);
  form.operands = gemm.form;
  form.a_major = gemm.a_major;
  form.b_major = gemm.b_major;
  form.groups = gemm.groups.by;
  if (gemm.groups.any()) {
    form.source = gemm.groups.mask.empty() ? group_source::routed : group_source::mask;
    const auto& of_groups = gemm.groups.by == Grouping::rows ? gemm.b : gemm.c;
    form.stacked = of_groups.front().size() == 1;
    form.a_sorted = gemm.a_sorted;
    form.b_sorted = gemm.b_sorted;
    form.c_sorted = gemm.c_sorted;
    form.ready = gemm.groups.ready;
  }
  const Epilogue& epilogue = gemm.epilogue;
  form.epilogue = epilogue.kind;
  form.qkv = epilogue.qkv.form;
  form.activates = epilogue.kind == EpilogueKind::linear && epilogue.activation != Activation::none;
  if (epilogue.kind != EpilogueKind::linear || form.activates)
    form.activation = static_cast<activation_kind>(epilogue.activation);
  for (std::size_t i = 0; i < row_broadcasts; ++i) form.broadcasts[i] = !epilogue.rows[i].empty();
  form.adds_source = !epilogue.source.empty();
  form.stores_preactivations = epilogue.stores_preactivations();
  form.stores_hidden = form.is_gradient() && !epilogue.hidden.empty();
  form.scales = gemm.quantisation.scaling;
  form.a_scaled_by_block = gemm.quantisation.a_scaled_by_block;
  form.a_scales_sorted = form.scales != scaling::none && form.a_sorted;
  form.c_quantised = !gemm.quantisation.c_scale.empty();
  form.b_packing = gemm.b_packing;
  form.weighs_rows = !epilogue.row_weights.empty();
  form.group_bias = !epilogue.group_bias.empty();
  form.b_depends = gemm.b_depends;
  form.norm_of_a = gemm.norm_of_a.kind;
  return form;
}

std::string template_argument(const gemm_form& form) {
  const gemm_form plain;
  StructText text("gemm_form");
  text.name("ab", "element", form.ab, plain.ab, element_names)
      .name("c", "element", form.c, plain.c, element_names)
      .name("wide", "element", form.wide, plain.wide, element_names)
      .name("operands", "gemm_operands", form.operands, plain.operands, operands)
      .name("a_major", "major", form.a_major, plain.a_major, majors)
      .name("b_major", "major", form.b_major, plain.b_major, majors)
      .name("groups", "grouping", form.groups, plain.groups, groupings)
      .name("source", "group_source", form.source, plain.source, group_sources)
      .flags("stacked", form.stacked, "a_sorted", form.a_sorted, "b_sorted", form.b_sorted,
             "c_sorted", form.c_sorted)
      .name("ready", "groups_ready", form.ready, plain.ready, readiness)
      .name("epilogue", "epilogue_kind", form.epilogue, plain.epilogue, epilogues);
  if (form.epilogue != epilogue_kind::linear || form.activates)
    text.set("activation", "fftune::activation_kind::" + activation_enumerator(form.activation));
  if (form.broadcasts_any())
    text.set("broadcasts", fmt::format("{{{}}}", fmt::join(form.broadcasts, ", ")));
  text.flags("activates", form.activates, "adds_source", form.adds_source, "stores_preactivations",
             form.stores_preactivations, "stores_hidden", form.stores_hidden)
      .name("scales", "scaling", form.scales, plain.scales, scalings)
      .flags("a_scaled_by_block", form.a_scaled_by_block, "a_scales_sorted", form.a_scales_sorted,
             "c_quantised", form.c_quantised)
      .name("b_packing", "packing", form.b_packing, plain.b_packing, packings)
      .flags("weighs_rows", form.weighs_rows, "group_bias", form.group_bias, "b_depends",
             form.b_depends)
      .name("norm_of_a", "row_norm", form.norm_of_a, plain.norm_of_a, row_norms);
  if (form.is_qkv())
    text.set("qkv", StructText("qkv_form", "dim", form.qkv.dim, "rotary", form.qkv.rotary)
                        .name("rotation", "head_rotation", form.qkv.rotation, head_rotation::none,
                              rotations)
                        .flags("separate", form.qkv.separate, "bias", form.qkv.bias, "normalises",
                               form.qkv.normalises, "caches", form.qkv.caches, "wide_slots",
                               form.qkv.wide_slots));
  return text;
}

void set_gemm(ParameterFields<gemm_params> fields, const GemmProblem& gemm,
              const TensorPlaces& places) {
  using Params = gemm_params;
  const auto set_each = [&](auto array, const TensorNames& names) {
    for (std::size_t i = 0; i < names.size(); ++i)
      if (!names[i].empty()) fields.set_at(array, i, tensor_of(places, names[i]));
  };
  // Arrays of [group][operand or output].
  const auto set_grouped = [&](auto array, const std::vector<TensorNames>& tensors) {
    for (std::size_t i = 0; i < tensors.size(); ++i)
      for (std::size_t group = 0; group < tensors[i].size(); ++group)
        if (!tensors[i][group].empty())
          fields.set_at(array, group * 2 + i, tensor_of(places, tensors[i][group]));
  };
  for (std::size_t i = 0; i < gemm.a.size(); ++i)
    fields.set_at(&Params::a, i, tensor_of(places, gemm.a[i].front()));
  set_grouped(&Params::b, gemm.b);
  set_grouped(&Params::c, gemm.c);
  const Epilogue& epilogue = gemm.epilogue;
  set_grouped(&Params::source, epilogue.source);
  set_each(&Params::broadcasts, {epilogue.rows.begin(), epilogue.rows.end()});
  set_each(&Params::group_bias, epilogue.group_bias);
  const Quantisation& scales = gemm.quantisation;
  set_each(&Params::b_scale, scales.b_scale);
  const Groups& groups = gemm.groups;
  fields.set_named(places, &Params::row_weights, epilogue.row_weights, &Params::gate, epilogue.gate,
                   &Params::up, epilogue.up, &Params::d_up, epilogue.d_up, &Params::hidden,
                   epilogue.hidden, &Params::a_scale, scales.a_scale, &Params::c_scale,
                   scales.c_scale, &Params::mask, groups.mask, &Params::offsets, groups.offsets,
                   &Params::permutation, groups.permutation, &Params::ids, groups.ids,
                   &Params::norm_of_a, gemm.norm_of_a.weights);
  if (gemm.norm_of_a.any()) fields.set(&Params::norm_epsilon, gemm.norm_of_a.epsilon);
  fields.set(&Params::groups, groups.count, &Params::id_count, groups.id_count,
             &Params::whole_groups, groups.whole_groups, &Params::m, gemm.m, &Params::n, gemm.n,
             &Params::k, gemm.k);
}

packed_form packed_form_of(const GemmProblem& gemm) {
  return gemm.packed.front().format.form();
}

std::string template_argument(const packed_form& form) {
  return StructText("packed_form", "group", form.group, "zeros", form.zeros, "code",
                    device_name(form.code));
}

void set_packed(ParameterFields<packed_params> fields, const GemmProblem& gemm,
                const TensorPlaces& places) {
  using Params = packed_params;
  set_gemm(fields.inside(&Params::gemm), gemm, places);
  for (std::size_t i = 0; i < gemm.packed.size(); ++i) {
    const PackedWeight& weight = gemm.packed[i];
    fields.set_at(&Params::scales, i, tensor_of(places, weight.scales));
    if (!weight.zeros.empty()) fields.set_at(&Params::zeros, i, tensor_of(places, weight.zeros));
  }
  fields.set(&Params::groups, gemm.packed.front().format.stored_groups(gemm.k));
}

KernelLaunch& append_permute_rows(Program& program, const GemmProblem& gemm,
                                  const TensorPlaces& places, const DeviceFacts& facts,
                                  std::int64_t rows) {
  constexpr std::int64_t warps = 8, ctas = 4;  // of a CTA; of an SM
  const Groups& groups = gemm.groups;
  const auto or_null = [&](std::string_view name) -> Argument {
    if (name.empty()) return std::int64_t{0};
    return tensor_of(places, name);
  };
  const auto grid = static_cast<std::uint32_t>(
      std::min(ceil_div(rows, warps), ctas * std::max<std::int64_t>(facts.multiprocessors, 1)));
  KernelLaunch& launch =
      append_kernel(program, "gemm/sort_tokens.cu",
                    fmt::format("permute_rows<fftune::group_source::{}>",
                                groups.mask.empty() ? "routed" : "mask"),
                    {grid}, warps * 32,
                    {or_null(groups.mask), or_null(groups.offsets), or_null(groups.permutation),
                     static_cast<std::int32_t>(groups.count)});
  launch.programmatic = gemm.follows;
  return launch;
}

/// Zeros where angles come from a table.
ArrayArgument frequencies_of(const QkvHeads& qkv) {
  ArrayArgument array{qkv.frequencies};
  array.values.resize(static_cast<std::size_t>(qkv.form.rotary / 2));
  return array;
}

std::optional<Pointer> append_sines(Program& program, const GemmProblem& gemm,
                                    const TensorPlaces& places) {
  const QkvHeads& qkv = gemm.epilogue.qkv;
  if (!qkv.form.rotates()) return std::nullopt;
  const std::int64_t pairs = qkv.form.rotary / 2;
  const ScratchArgument sines{program.scratch.size()};
  program.scratch.push_back({static_cast<std::size_t>(gemm.m * pairs) * 2 * sizeof(float), false});
  constexpr std::int64_t threads = 256;
  KernelLaunch& launch = append_kernel(
      program, "gemm/head_sines.cu",
      fmt::format("head_sines<{}, fftune::head_rotation::{}, {}>", pairs,
                  rotations[static_cast<std::size_t>(qkv.form.rotation)],
                  gemm.dtype == DType::f32 ? "double" : "float"),
      {static_cast<std::uint32_t>(ceil_div(gemm.m * pairs, threads))}, threads,
      {tensor_of(places, qkv.positions), tensor_or_null(places, qkv.angles), sines,
       frequencies_of(qkv), gemm.m, static_cast<std::int32_t>(qkv.table_rows), qkv.scale});
  launch.programmatic = gemm.follows;
  return sines;
}

void set_heads(ParameterFields<qkv_params> fields, const GemmProblem& gemm,
               const TensorPlaces& places, const std::optional<Pointer>& sines) {
  using Params = qkv_params;
  const QkvHeads& qkv = gemm.epilogue.qkv;
  for (std::size_t i = 0; i < qkv.bias.size(); ++i)
    fields.set_at(&Params::bias, i, tensor_of(places, qkv.bias[i]));
  for (std::size_t i = 0; i < qkv.norms.size(); ++i)
    fields.set_at(&Params::norms, i, tensor_of(places, qkv.norms[i]));
  if (sines) fields.set(&Params::sines, argument_of(*sines));
  if (!qkv.slots.empty())
    fields.set(&Params::slots, tensor_of(places, qkv.slots), &Params::cache_rows, qkv.cache_rows,
               &Params::cache_head, qkv.cache_head);
  fields.set(&Params::q_columns, qkv.columns(0), &Params::kv_columns, qkv.columns(1),
             &Params::epsilon, qkv.epsilon, &Params::norm_offset, qkv.norm_offset);
}

ParameterStruct plain_parameters(const GemmProblem& gemm, const TensorPlaces& places,
                                 const std::optional<Pointer>& sines, std::size_t bytes) {
  ParameterStruct parameters{bytes, {}};
  ParameterFields<plain_params> fields(parameters);
  set_gemm(fields.inside(&plain_params::gemm), gemm, places);
  if (gemm.epilogue.kind == EpilogueKind::qkv)
    set_heads(fields.inside(&plain_params::qkv), gemm, places, sines);
  return parameters;
}

ParameterStruct heads_parameters(const GemmProblem& gemm, const TensorPlaces& places) {
  const QkvHeads& qkv = gemm.epilogue.qkv;
  const std::size_t frequencies = sizeof(angle_params);
  const bool rotates = qkv.form.rotates();
  const std::size_t bytes = frequencies + static_cast<std::size_t>(qkv.form.rotary / 2) * 4;
  ParameterStruct parameters = plain_parameters(
      gemm, places, std::nullopt, rotates ? (bytes + 7) / 8 * 8 : sizeof(plain_params));
  if (!rotates) return parameters;
  using Angles = head_angles;
  ParameterFields<angle_params>(parameters)
      .inside(&angle_params::angles)
      .set(&Angles::positions, tensor_of(places, qkv.positions), &Angles::table,
           tensor_or_null(places, qkv.angles), &Angles::table_rows, qkv.table_rows, &Angles::scale,
           qkv.scale);
  parameters.fields.push_back({frequencies, frequencies_of(qkv)});
  return parameters;
}

KernelLaunch& append_gemm(Program& program, const std::string& file, const std::string& expression,
                          std::int64_t grid, int threads, ParameterStruct parameters) {
  KernelLaunch& launch =
      append_kernel(program, file, expression, {static_cast<std::uint32_t>(grid)},
                    static_cast<std::uint32_t>(threads), {});
  launch.parameters = std::move(parameters);
  return launch;
}

void launch_behind(KernelLaunch& launch, const KernelSource& kernel) {
  constexpr std::string_view files[] = {
      "gemm/sm90/gemm.cu",     "gemm/sm80/gemm.cu",   "gemm/decode/gemm.cu", "gemm/decode/fused.cu",
      "gemm/decode/packed.cu", "gemm/sm90/packed.cu", "gemm/head_sines.cu"};
  if (std::find(std::begin(files), std::end(files), kernel.file) == std::end(files)) return;
  launch.programmatic = true;
  if (kernel.file != "gemm/sm90/packed.cu") return;
  const std::size_t early =
      ParameterFields<packed_params>(*launch.parameters).offset_of(&packed_params::loads_early);
  for (ParameterStruct::Field& field : launch.parameters->fields)
    if (field.offset == early) field.value = std::int32_t{1};
}

void launch_programmatically(Program& program, const DeviceFacts& facts) {
  if (facts.compute_capability < 90) return;
  for (Step& step : program.steps)
    if (auto* launch = std::get_if<KernelLaunch>(&step))
      launch_behind(*launch, program.kernels[launch->kernel]);
}

bool splits_in_clusters(const DeviceFacts& facts) {
  return facts.compute_capability >= 90;
}

void split_launch(Program& program, KernelLaunch& launch, const DeviceFacts& facts, int split_k,
                  std::int64_t share_bytes, std::int64_t kept_bytes) {
  using Params = gemm_params;
  ParameterFields<Params> fields(*launch.parameters);
  fields.set(&Params::split_k, split_k);
  launch.grid.y = static_cast<std::uint32_t>(split_k);
  if (split_k == 1 || splits_in_clusters(facts)) {
    launch.cluster.y = launch.grid.y;
    if (split_k > 1)
      launch.shared_bytes =
          std::max(launch.shared_bytes, static_cast<std::uint32_t>(kept_bytes + share_bytes));
    return;
  }
  const auto tiles = static_cast<std::size_t>(launch.grid.x);
  fields.set(&Params::split_counters, ScratchArgument{program.scratch.size()},
             &Params::split_partials, ScratchArgument{program.scratch.size() + 1});
  program.scratch.push_back({tiles * 4, true, true});
  program.scratch.push_back({tiles * split_k * static_cast<std::size_t>(share_bytes), false});
}

std::int64_t work_tiles(const GemmProblem& gemm, int bm, int bn) {
  std::int64_t tile_rows = ceil_div(gemm.m, bm);
  const Groups& groups = gemm.groups;
  if (groups.by == Grouping::rows) tile_rows = groups.most_tiles(gemm.m, bm);
  if (groups.by == Grouping::reduction) tile_rows *= groups.count;
  return tile_rows * gemm.outputs() * ceil_div(gemm.n, bn);
}

}  // namespace fftune
