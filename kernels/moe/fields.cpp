// The fields of a mixture of experts: its sizes, routing, weights and gradients.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string_view>
#include <vector>

#include "kernels/common/op_parts.hpp"
#include "kernels/moe/moe.hpp"

namespace fftune::moe {

Shape shape_of(const Problem& problem) {
  return {.m = problem.size("m"),
          .d = problem.size("d"),
          .h = problem.size("h"),
          .experts = problem.size(has_own_experts(problem) ? "own-experts" : "experts"),
          .of_all = problem.size("experts"),
          .top_k = problem.size("top-k"),
          .shared = problem.sizes.contains("shared") ? problem.size("shared") : 0};
}

std::vector<std::int32_t> all_choices(const Shape& shape, const std::vector<std::int32_t>& ids) {
  std::vector<std::int32_t> all;
  for (std::size_t token = 0; token < static_cast<std::size_t>(shape.m); ++token) {
    const auto own = ids.begin() + static_cast<std::ptrdiff_t>(token) * shape.top_k;
    // An id that names no expert must not name a shared one either.
    std::transform(own, own + shape.top_k, std::back_inserter(all),
                   [&](std::int32_t id) { return id < shape.experts ? id : -1; });
    for (std::int64_t expert = shape.experts; expert < shape.all_experts(); ++expert)
      all.push_back(static_cast<std::int32_t>(expert));
  }
  return all;
}

std::vector<ExpertsAlike> expected_rows(const Problem& problem) {
  const Shape shape = shape_of(problem);
  auto rows = expected_tokens(routing_of(problem), shape.m, shape.of_all, shape.top_k);
  // A slice has as many popular experts as others.
  for (ExpertsAlike& alike : rows)
    alike.experts *= static_cast<double>(shape.experts) / static_cast<double>(shape.of_all);
  if (shape.shared > 0)
    rows.push_back({static_cast<double>(shape.shared), static_cast<double>(shape.m)});
  return rows;
}

bool has_own_experts(const Problem& problem) {
  return problem.sizes.contains("own-experts");
}

const char* own_ids_of(const Problem& problem) {
  return has_own_experts(problem) ? "own_ids" : "ids";
}

std::int32_t own_id(const Shape& shape, std::int32_t id, std::int32_t first) {
  // Ids may be any numbers: their difference need not be one of 32 bits.
  const std::int64_t own = std::int64_t{id} - first;
  return own >= 0 && own < shape.experts ? static_cast<std::int32_t>(own) : -1;
}

bool weighs_before(const Problem& problem) {
  return problem.has("weigh", "before");
}

Packing packing_of(const Problem& problem) {
  if (problem.has("gate-up", "halves")) return Packing::halves;
  return problem.has("gate-up", "interleaved") ? Packing::interleaved : Packing::separate;
}

Scales scales_of(const Problem& problem) {
  if (quantises(problem)) return problem.has("quantise", "token") ? Scales::token : Scales::block;
  if (problem.dtype != DType::fp8) return Scales::none;
  if (problem.has("scales", "token")) return Scales::token;
  return problem.has("scales", "block") ? Scales::block : Scales::tensor;
}

std::vector<PackedWeight> packed_gate_up(const Problem& problem) {
  if (problem.pass != "fwd" || !packed_format(problem).packed) return {};
  const Shape shape = shape_of(problem);
  const std::int64_t rows = shape.all_experts() * shape.h;
  return {packed_weight(problem,
                        {"w_gate", "w_gate_scale", "w_gate_zero", "w_gate_dense", rows, shape.d}),
          packed_weight(problem, {"w_up", "w_up_scale", "w_up_zero", "w_up_dense", rows, shape.d})};
}

std::vector<PackedWeight> packed_down(const Problem& problem) {
  if (problem.pass != "fwd" || !packed_format(problem).packed) return {};
  const Shape shape = shape_of(problem);
  return {packed_weight(problem, {"w_down", "w_down_scale", "w_down_zero", "w_down_dense",
                                  shape.all_experts() * shape.d, shape.h})};
}

DType element_dtype(const Problem& problem) {
  return quantises(problem) ? DType::fp8 : problem.dtype;
}

DType wide_dtype(const Problem& problem) {
  return problem.dtype == DType::fp8 ? DType::bf16 : problem.dtype;
}

bool has_bias(const Problem& problem) {
  return problem.has("bias", "all");
}

bool has_residual(const Problem& problem) {
  return problem.has("residual", "yes");
}

Routing routing_of(const Problem& problem) {
  return parse_routing(problem.option("routing")).value_or(Routing{});
}

bool has_row_weights(const Problem& problem) {
  if (problem.pass == "fwd") return weighs_before(problem);
  return weighs_before(problem) ? recomputes(problem) : has_bias(problem) && !is_frozen(problem);
}

bool reads_down_bias(const Problem& problem) {
  return problem.pass == "bwd" && has_bias(problem) && !weighs_before(problem);
}

std::vector<std::string_view> gate_gradients(const Problem& problem, bool weighted) {
  if (packing_of(problem) == Packing::separate) {
    if (weighted) return {"weighted_d_gate", "weighted_d_up"};
    return {"d_gate", "d_up"};
  }
  return {weighted ? "weighted_d_gate_up" : "d_gate_up"};
}

std::vector<std::string_view> gate_gradients(const Problem& problem) {
  return gate_gradients(problem, !weighs_before(problem));
}

std::string_view hidden_of_gradient(const Problem& problem) {
  return weighs_before(problem) ? "hidden" : "weighted_hidden";
}

std::vector<BiasGradient> bias_gradients(const Problem& problem) {
  const Shape shape = shape_of(problem);
  const auto gradients = gate_gradients(problem);
  std::vector<BiasGradient> all;
  if (packing_of(problem) == Packing::separate)
    all = {{"db_gate", gradients[0], shape.h}, {"db_up", gradients[1], shape.h}};
  else
    all = {{"db_gate_up", gradients[0], 2 * shape.h}};
  all.push_back({"db_down", "dy", shape.d});
  return all;
}

}  // namespace fftune::moe
