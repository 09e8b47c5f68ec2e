// The stages that are GEMMs: those of ffn over the sorted choices, with the experts' weights
// stacked in one tensor.
#include <algorithm>

#include "kernels/common/op_parts.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/moe/moe.hpp"

namespace fftune::moe {
namespace {

/// Tensors of ffn's stages that have another name here.
struct Renamed {
  std::string_view in_ffn, here;
};

/// Whether rows of the tensor are those of the tokens, rather than of the sorted choices.
bool has_token_rows(std::string_view name) {
  return name == "x" || name == "x_quantised" || name == "dy";
}

void rename(std::vector<TensorNames>& matrices, const std::vector<Renamed>& names) {
  for (TensorNames& matrix : matrices)
    for (std::string_view& name : matrix)
      for (const Renamed& renamed : names)
        if (name == renamed.in_ffn) name = renamed.here;
}

/// ffn's GEMM over the rows of every expert.
GemmProblem grouped(const Problem& problem, GemmProblem gemm, const std::vector<Renamed>& names) {
  const Shape shape = shape_of(problem);
  rename(gemm.a, names);
  rename(gemm.b, names);
  rename(gemm.c, names);
  const bool sums_rows = gemm.a_major == Major::mn;
  (sums_rows ? gemm.k : gemm.m) = shape.rows();
  gemm.groups = {.by = sums_rows ? Grouping::reduction : Grouping::rows,
                 .count = shape.all_experts(),
                 .offsets = "offsets",
                 .permutation = "tokens",
                 .ready = groups_ready::settled,
                 .choices = shape.choices(),
                 .scattered = true};
  for (const ExpertsAlike& alike : expected_rows(problem))
    gemm.groups.expected_rows.push_back({alike.experts, alike.tokens});
  gemm.a_sorted = !has_token_rows(gemm.a.front().front());
  gemm.b_sorted = sums_rows && !has_token_rows(gemm.b.front().front());
  gemm.c_sorted = !sums_rows;
  gemm.follows = true;
  return gemm;
}

/// The first GEMM after route. Few ids are counted by every block, while route sorts them: of more
/// that took as long on an H200 as waiting for their sort.
void await_route(const Problem& problem, GemmProblem& gemm) {
  constexpr std::int64_t most_ids = 4096;
  const Shape shape = shape_of(problem);
  gemm.groups.ready = groups_ready::awaited;
  if (shape.m * shape.top_k > most_ids) return;
  gemm.groups.ready = groups_ready::counted;
  gemm.groups.ids = own_ids_of(problem);
  gemm.groups.id_count = shape.m * shape.top_k;
  gemm.groups.whole_groups = shape.shared;
}

GemmProblem gate_up_gemm(const Problem& problem) {
  const Packing packed = packing_of(problem);
  const bool separate = packed == Packing::separate;
  GemmProblem gemm = grouped(problem, ffn::gate_up_gemm(problem), {});
  await_route(problem, gemm);
  gemm.b_packing = packed;
  if (!separate) gemm.b = {{"w_gate_up"}, {"w_gate_up"}};
  if (scales_of(problem) == Scales::token) gemm.quantisation.scaling = Scaling::channel;
  if (quantises(problem)) {
    gemm.c_dtype = DType::fp8;
    gemm.quantisation.c_scale = "hidden_scale";
  }
  if (scales_of(problem) != Scales::none && !separate)
    gemm.quantisation.b_scale = {"w_gate_up_scale", "w_gate_up_scale"};
  if (weighs_before(problem)) gemm.epilogue.row_weights = "row_weights";
  if (has_bias(problem)) {
    if (separate)
      gemm.epilogue.group_bias = {"b_gate", "b_up"};
    else
      gemm.epilogue.group_bias = {"b_gate_up", "b_gate_up"};
  }
  return gemm;
}
GemmProblem down_gemm(const Problem& problem) {
  GemmProblem gemm = grouped(problem, ffn::down_gemm(problem), {{"y", "expert_out"}});
  gemm.epilogue.source = {};  // the residual is of the sum
  if (scales_of(problem) == Scales::token) {
    gemm.quantisation.scaling = Scaling::channel;
    gemm.quantisation.a_scaled_by_block = true;
  }
  if (quantises(problem)) gemm.a = {{"hidden"}};
  if (has_bias(problem)) gemm.epilogue.group_bias = {"b_down"};
  return gemm;
}
/// d_hidden = dy·w_down. The stage weigh, which has the rows' weights, applies the rest of the
/// activation's gradient.
GemmProblem d_hidden_gemm(const Problem& problem) {
  GemmProblem gemm = grouped(problem, ffn::d_hidden_gemm(problem), {{"d_gate", "d_hidden"}});
  gemm.epilogue = {};
  if (!recomputes(problem)) await_route(problem, gemm);
  return gemm;
}
GemmProblem d_x_gemm(const Problem& problem) {
  const auto gradients = gate_gradients(problem);
  GemmProblem gemm = ffn::d_x_gemm(problem);
  if (packing_of(problem) != Packing::separate) {
    gemm.form = GemmForm::single;
    gemm.k *= 2;
    gemm.a = {{gradients[0]}};
    gemm.b = {{"w_gate_up"}};
    return grouped(problem, gemm, {{"dx", "dx_rows"}});
  }
  return grouped(problem, gemm,
                 {{"d_gate", gradients[0]}, {"d_up", gradients[1]}, {"dx", "dx_rows"}});
}
GemmProblem d_gate_up_gemm(const Problem& problem) {
  const auto gradients = gate_gradients(problem, true);
  GemmProblem gemm = ffn::d_gate_up_gemm(problem);
  if (packing_of(problem) != Packing::separate) {
    gemm.form = GemmForm::single;
    gemm.m *= 2;
    gemm.a = {{gradients[0]}};
    gemm.c = {{"dw_gate_up"}};
    if (accumulates(problem)) gemm.epilogue.source = {{"dw_gate_up_before"}};
    return grouped(problem, gemm, {});
  }
  return grouped(problem, gemm, {{"d_gate", gradients[0]}, {"d_up", gradients[1]}});
}
GemmProblem d_down_gemm(const Problem& problem) {
  return grouped(problem, ffn::d_down_gemm(problem), {{"hidden", hidden_of_gradient(problem)}});
}

GemmProblem packed_gate_up_gemm(const Problem& problem) {
  return reads_packed(gate_up_gemm(problem), packed_gate_up(problem), true);
}
GemmProblem packed_down_gemm(const Problem& problem) {
  return reads_packed(down_gemm(problem), packed_down(problem), true);
}

constexpr ExpandStage gate_up_expansion{ffn::stage_expand_gate_up, moe_ffn_op, packed_gate_up};
constexpr ExpandStage down_expansion{ffn::stage_expand_down, moe_ffn_op, packed_down};
constexpr GemmStage expand_gate_up{ffn::stage_expand_gate_up, moe_ffn_op, packed_gate_up_gemm};
constexpr GemmStage expand_down{ffn::stage_expand_down, moe_ffn_op, packed_down_gemm};
constexpr QuantiseStage quantisation{ffn::stage_quantise, moe_ffn_op, ffn::quantised_x};
constexpr GemmStage gate_up{ffn::stage_gate_up, moe_ffn_op, gate_up_gemm};
constexpr GemmStage down{ffn::stage_down, moe_ffn_op, down_gemm};
constexpr GemmStage d_hidden{ffn::stage_d_hidden, moe_ffn_op, d_hidden_gemm};
constexpr GemmStage d_x{ffn::stage_d_x, moe_ffn_op, d_x_gemm};
constexpr GemmStage d_gate_up{ffn::stage_d_gate_up, moe_ffn_op, d_gate_up_gemm};
constexpr GemmStage d_down{ffn::stage_d_down, moe_ffn_op, d_down_gemm};

// Summaries of several families.
constexpr const char* by_wgmma = "tiles of one expert's rows, with TMA and wgmma";
constexpr const char* by_mma_sync = "tiles of one expert's rows, with mma.sync";
constexpr const char* sums_by_wgmma = "wgmma over each expert's rows, all experts in one launch";
constexpr const char* sums_by_mma_sync =
    "mma.sync over each expert's rows, all experts in one launch";
constexpr const char* fallback = "any sizes, alignment and element type; no claim to speed";
constexpr const char* blas = "blocks over OpenBLAS, each of one expert's rows";

}  // namespace

std::vector<std::string> stage_names(const Problem& problem) {
  std::vector<std::string> names;
  const auto add = [&](std::initializer_list<const char*> more) {
    names.insert(names.end(), more.begin(), more.end());
  };
  if (has_own_experts(problem)) add({stage_own_ids});
  add({stage_route});
  if (problem.pass == "fwd") {
    const bool packed = packed_format(problem).packed;
    if (quantises(problem)) add({ffn::stage_quantise});
    if (packed) add({ffn::stage_expand_gate_up});
    add({ffn::stage_gate_up});
    if (packed) add({ffn::stage_expand_down});
    add({ffn::stage_down, stage_combine});
    return names;
  }
  if (recomputes(problem)) add({ffn::stage_gate_up});
  add({ffn::stage_d_hidden, stage_weigh, ffn::stage_d_x});
  if (!is_frozen(problem)) {
    add({ffn::stage_d_gate_up, ffn::stage_d_down});
    if (has_bias(problem)) add({stage_d_biases});
  }
  add({stage_combine_dx});
  return names;
}

const GemmStage* gemm_stage(const Problem&, std::string_view name) {
  static constexpr const GemmStage* stages[] = {&gate_up, &down,      &d_hidden,
                                                &d_x,     &d_gate_up, &d_down};
  for (const GemmStage* stage : stages)
    if (stage->name == name) return stage;
  return nullptr;
}

std::vector<const Family*> gemm_families() {
  static const auto families = families_of(
      {{packed_sm90_engine, {expand_gate_up, gate_up}, "gate_up_packed_sm90", packed_sm90_summary},
       {packed_sm90_engine, {expand_down, down}, "down_packed_sm90", packed_sm90_summary},
       {packed_decode_engine, {expand_gate_up, gate_up}, "gate_up_packed", packed_decode_summary},
       {packed_decode_engine, {expand_down, down}, "down_packed", packed_decode_summary},
       {sm90_engine, {gate_up, down, d_hidden, d_x}, "{}_sm90", by_wgmma},
       {sm90_engine, {d_gate_up, d_down}, "{}_sm90", sums_by_wgmma},
       {sm80_engine, {gate_up, down, d_hidden, d_x}, "{}_sm80", by_mma_sync},
       {sm80_engine, {d_gate_up, d_down}, "{}_sm80", sums_by_mma_sync},
       {simt_engine, {gate_up, down, d_hidden, d_x, d_gate_up, d_down}, "{}_fallback", fallback},
       {cpu_blas_engine, {gate_up, down, d_hidden, d_x, d_gate_up, d_down}, "cpu_{}_blas", blas},
       {cpu_plain_engine,
        {gate_up, down, d_hidden, d_x, d_gate_up, d_down},
        "cpu_{}_plain",
        plain_summary}});
  static const auto expansions =
      on_both(expand_family, cpu_expand_family, {gate_up_expansion, down_expansion});
  static const auto quantisations = on_both(quantise_family, cpu_quantise_family, {quantisation});
  return addresses_of(families, expansions, quantisations);
}

}  // namespace fftune::moe
