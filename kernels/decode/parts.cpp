#include "kernels/decode/parts.hpp"

#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "kernels/all_argmax/all_argmax.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/decode/kinds.hpp"
#include "kernels/head/head.hpp"
#include "kernels/layer/layer.hpp"
#include "registry/last_problems.hpp"

namespace fftune::decoding {
namespace {

/// The names of tensors of one layer of each kind; of layers of one kind, those of the op layer.
OpPart make_layer_part(const Problem& problem, std::size_t kind) {
  const std::size_t kinds = kinds_of(problem);
  OpPart part{kind_parts[kind],
              &layer_op(),
              layers_of_kind(problem, kind),
              {{"lengths", "key_lengths"}, {"y", "last_hidden"}}};
  if (kinds == 1) return part;
  std::vector<std::size_t> order(kinds);
  std::iota(order.begin(), order.end(), 0);
  const LayerNames names(std::move(order), false, has_own_angles(problem));
  for (const TensorSpec& tensor : layer_op().tensors(part.problem))
    part.names[tensor.name] = names(kind, tensor.name);
  return part;
}

/// Ids that a rank chooses from.
std::int64_t own_vocab(const Problem& problem) {
  return problem.size("vocab") / (slices_head(problem) ? problem.size("ranks") : 1);
}

OpPart make_head_part(const Problem& problem) {
  Problem head{
      "head",
      "fwd",
      problem.dtype,
      {{"m", problem.size("batch")}, {"d", problem.size("d")}, {"vocab", own_vocab(problem)}},
      {}};
  for (const char* name : {"norm", "convention", "eps"})
    if (problem.options.contains(name)) head.options[name] = problem.option(name);
  if (problem.sizes.contains("best")) head.sizes["best"] = problem.size("best");
  for (const auto& [name, here] : head_options)
    if (problem.options.contains(here)) head.options[name] = problem.option(here);
  const bool sliced = slices_head(problem);
  return {"head",
          &head_op(),
          canonical(head_op(), std::move(head), DeviceKind::cuda),
          {{"x", "last_hidden"},
           {"w_norm", "final_norm"},
           {"b_norm", "final_norm_bias"},
           {"normalised", "final_normalised"},
           {"w", "w_head"},
           {"w_scale", "w_head_scale"},
           {"w_zero", "w_head_zero"},
           {"w_dense", "w_head_dense"},
           {"bias", "b_head"},
           {"ids", sliced ? "own_chosen" : "chosen"},
           {"logit", sliced ? "own_logit" : "logit"}}};
}

/// The best of the ranks' ids.
OpPart make_argmax_part(const Problem& problem) {
  return {"argmax",
          &all_argmax_op(),
          canonical(all_argmax_op(),
                    {"all-argmax",
                     "fwd",
                     DType::f32,
                     {{"m", problem.size("batch")},
                      {"vocab", own_vocab(problem)},
                      {"ranks", problem.size("ranks")}},
                     {{"link", option_or(problem, "link", "loopback")}}},
                    DeviceKind::cuda),
          {{"ids", "own_chosen"},
           {"logit", "own_logit"},
           {"best_ids", "chosen"},
           {"best_logit", "logit"}}};
}

}  // namespace

bool slices_head(const Problem& problem) {
  return problem.has("head", "sliced");
}

std::vector<OpPart> parts_of(const Problem& problem) {
  static OfLastProblems<std::vector<OpPart>> last;
  return *last.of(problem, [&] {
    std::vector<OpPart> parts;
    for (std::size_t kind = 0; kind < kinds_of(problem); ++kind)
      parts.push_back(make_layer_part(problem, kind));
    parts.push_back(make_head_part(problem));
    if (slices_head(problem)) parts.push_back(make_argmax_part(problem));
    return parts;
  });
}

OpPart layer_part(const Problem& problem) {
  return parts_of(problem).front();
}

OpPart head_part(const Problem& problem) {
  return parts_of(problem).at(kinds_of(problem));
}

}  // namespace fftune::decoding
