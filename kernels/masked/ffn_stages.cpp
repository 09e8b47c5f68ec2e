// The tensors and the stages of masked-ffn, of both passes.
#include <cmath>

#include "kernels/masked/masked.hpp"

namespace fftune::masked {
namespace {

constexpr const char* experts[2] = {"_true", "_false"};

}  // namespace

FfnPlaces ffn_places(const Problem& problem) {
  FfnPlaces places;
  const auto next = [&](std::size_t& place) { place = places.count++; };
  const auto next_of_each = [&](EachExpert<std::size_t>& gate, EachExpert<std::size_t>& up,
                                EachExpert<std::size_t>& down) {
    for (const std::size_t expert : {0, 1})
      for (auto* own : {&gate, &up, &down}) next((*own)[expert]);
  };
  const bool backward = problem.pass == "bwd", saved = backward && !recomputes(problem);
  if (backward) next(places.dy);
  next(places.x);
  next(places.mask);
  if (saved)
    for (std::size_t* place : {&places.gate, &places.up}) next(*place);
  next_of_each(places.w_gate, places.w_up, places.w_down);
  if (accumulates(problem)) next_of_each(places.gate_before, places.up_before, places.down_before);
  if (backward) {
    next(places.dx);
    next_of_each(places.dw_gate, places.dw_up, places.dw_down);
  } else {
    next(places.y);
  }
  if (stores_gates(problem))
    for (std::size_t* place : {&places.gate, &places.up}) next(*place);
  next(places.hidden);
  if (backward)
    for (std::size_t* place : {&places.d_gate, &places.d_up}) next(*place);
  return places;
}

std::vector<TensorSpec> ffn_tensors(const Problem& problem) {
  const std::int64_t m = problem.size("m"), d = problem.size("d"), h = problem.size("h");
  const DType dtype = problem.dtype;
  const bool backward = problem.pass == "bwd", saved = backward && !recomputes(problem);
  std::vector<TensorSpec> tensors;
  const auto sorted = [&](const char* name, Role role) {
    TensorSpec inner{name, dtype, {m, h}, role, 1};
    inner.sorted = true;
    inner.kept = role == Role::input;
    tensors.push_back(inner);
  };
  // gate and up have h x d, down d x h.
  const auto of_each = [&](const std::string& prefix, const std::string& suffix, Role role,
                           double by_d, double by_h) {
    const std::size_t first = tensors.size();
    for (const char* expert : experts) {
      for (const char* name : {"gate", "up"})
        tensors.push_back({prefix + name + expert + suffix, dtype, {h, d}, role, by_d});
      tensors.push_back({prefix + "down" + expert + suffix, dtype, {d, h}, role, by_h});
    }
    for (std::size_t i = first; i < tensors.size(); ++i) {
      tensors[i].begins_sum = !suffix.empty();
      tensors[i].sums_tokens = role == Role::output;
    }
  };
  if (backward) tensors.push_back({"dy", dtype, {m, d}, Role::input, 1});
  tensors.push_back({"x", dtype, {m, d}, Role::input, 1});
  tensors.push_back(mask_tensor(problem));
  for (std::size_t i = 1; i < tensors.size(); ++i) tensors[i].kept = backward;
  if (saved)
    for (const char* name : {"gate", "up"}) sorted(name, Role::input);
  // A sum of n products with weights of deviation 1/sqrt(n) keeps the deviation of its inputs.
  of_each("w_", "", Role::input, 1 / std::sqrt(static_cast<double>(d)),
          1 / std::sqrt(static_cast<double>(h)));
  if (accumulates(problem)) of_each("dw_", "_before", Role::input, 1, 1);
  if (backward) {
    tensors.push_back({"dx", dtype, {m, d}, Role::output, 1});
    of_each("dw_", "", Role::output, 1, 1);
  } else {
    tensors.push_back({"y", dtype, {m, d}, Role::output, 1});
  }
  if (stores_gates(problem))
    for (const char* name : {"gate", "up"})
      sorted(name, backward ? Role::intermediate : Role::output);
  sorted("hidden", Role::intermediate);
  if (backward)
    for (const char* name : {"d_gate", "d_up"}) sorted(name, Role::intermediate);
  return tensors;
}

StageProduct ffn_product(Stage stage, const Problem& problem) {
  const FfnPlaces at = ffn_places(problem);
  const std::int64_t m = problem.size("m"), d = problem.size("d"), h = problem.size("h");
  StageProduct product;
  product.mask = at.mask;
  if (stage == Stage::gate_up) {
    product.shape = {.m = m, .n = h, .k = d, .products = 2};
    product.a = {at.x};
    product.b = {{{at.w_gate[0], at.w_up[0]}, {at.w_gate[1], at.w_up[1]}}};
    product.c = {at.hidden};
    if (stores_gates(problem)) product.c.insert(product.c.end(), {at.gate, at.up});
    product.sorted_c = true;
  } else if (stage == Stage::down) {
    product.shape = {.m = m, .n = d, .k = h};
    product.a = {at.hidden};
    product.b = {{{at.w_down[0]}, {at.w_down[1]}}};
    product.c = {at.y};
    product.sorted_a = true;
  } else if (stage == Stage::d_hidden) {
    product.shape = {
        .m = m, .n = h, .k = d, .b_transposed = true, .box_buffers = recomputes(problem) ? 2 : 3};
    product.a = {at.dy};
    product.b = {{{at.w_down[0]}, {at.w_down[1]}}};
    product.c = {at.d_gate, at.d_up};
    if (!recomputes(problem)) product.c.push_back(at.hidden);
    product.gradient = {at.gate, at.up};
    product.sorted_c = true;
  } else {
    product.shape = {.m = m, .n = d, .k = h, .b_transposed = true, .terms = 2};
    product.a = {at.d_gate, at.d_up};
    product.b = {{{at.w_gate[0], at.w_up[0]}, {at.w_gate[1], at.w_up[1]}}};
    product.c = {at.dx};
    product.sorted_a = true;
  }
  return product;
}

StageSum ffn_sum(Stage stage, const Problem& problem) {
  const FfnPlaces at = ffn_places(problem);
  const std::int64_t m = problem.size("m"), d = problem.size("d"), h = problem.size("h");
  const bool gates = stage == Stage::d_gate_up, adds = accumulates(problem);
  StageSum sum;
  sum.mask = at.mask;
  sum.shape = {.m = gates ? h : d,
               .n = gates ? d : h,
               .k = m,
               .a_transposed = true,
               .b_transposed = true,
               .results = gates ? 4 : 2};
  if (gates) {
    sum.a = {at.d_gate, at.d_up};
    sum.b = at.x;
    sum.sorted_a = true;
  } else {
    sum.a = {at.dy};
    sum.b = at.hidden;
    sum.sorted_b = true;
  }
  for (const std::size_t expert : {0, 1}) {
    if (gates) {
      sum.c[expert] = {at.dw_gate[expert], at.dw_up[expert]};
      if (adds) sum.addends[expert] = {at.gate_before[expert], at.up_before[expert]};
    } else {
      sum.c[expert] = {at.dw_down[expert]};
      if (adds) sum.addends[expert] = {at.down_before[expert]};
    }
  }
  return sum;
}

}  // namespace fftune::masked
