#include "kernels/masked/masked.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/error.hpp"

namespace fftune::masked {

std::string stage_name(Stage stage) {
  switch (stage) {
    case Stage::linear:
      return "linear";
    case Stage::dx:
      return "dx";
    case Stage::dw:
      return "dw";
    case Stage::gate_up:
      return "gate_up";
    case Stage::down:
      return "down";
    case Stage::d_hidden:
      return "d_hidden";
    case Stage::d_x:
      return "d_x";
    case Stage::d_gate_up:
      return "d_gate_up";
    case Stage::d_down:
      return "d_down";
  }
  throw Error(ErrorKind::internal, "stage_name: a value outside the enumeration");
}

std::vector<Stage> stages_of(const Problem& problem) {
  const bool backward = problem.pass == "bwd";
  if (problem.op == masked_linear_op().name())
    return backward ? std::vector{Stage::dx, Stage::dw} : std::vector{Stage::linear};
  if (!backward) return {Stage::gate_up, Stage::down};
  std::vector<Stage> stages{Stage::d_hidden, Stage::d_x, Stage::d_gate_up, Stage::d_down};
  if (recomputes(problem)) stages.insert(stages.begin(), Stage::gate_up);
  return stages;
}

std::optional<std::string> refuse_stage(Stage stage, const Problem& problem) {
  const auto stages = stages_of(problem);
  if (std::find(stages.begin(), stages.end(), stage) != stages.end()) return std::nullopt;
  return fmt::format("the pass {} has no stage {} here", problem.pass, stage_name(stage));
}

bool accumulates(const Problem& problem) {
  return problem.has("accumulate", "yes");
}

bool recomputes(const Problem& problem) {
  return problem.pass == "bwd" && problem.has("save", "input");
}

bool stores_gates(const Problem& problem) {
  return problem.pass == "bwd" ? recomputes(problem) : problem.has("save", "preact");
}

StageProduct product_of(Stage stage, const Problem& problem) {
  switch (stage) {
    case Stage::linear:
    case Stage::dx:
      return linear_product(stage, problem);
    case Stage::gate_up:
    case Stage::down:
    case Stage::d_hidden:
    case Stage::d_x:
      return ffn_product(stage, problem);
    case Stage::dw:
    case Stage::d_gate_up:
    case Stage::d_down:
      break;
  }
  throw Error(ErrorKind::internal, stage_name(stage) + " is no product of grouped rows");
}

StageSum sum_of(Stage stage, const Problem& problem) {
  switch (stage) {
    case Stage::dw:
      return linear_sum(problem);
    case Stage::d_gate_up:
    case Stage::d_down:
      return ffn_sum(stage, problem);
    case Stage::linear:
    case Stage::dx:
    case Stage::gate_up:
    case Stage::down:
    case Stage::d_hidden:
    case Stage::d_x:
      break;
  }
  throw Error(ErrorKind::internal, stage_name(stage) + " is no sum over tokens");
}

bool sums_over_tokens(Stage stage) {
  return stage == Stage::dw || stage == Stage::d_gate_up || stage == Stage::d_down;
}

OptionField mask_option() {
  return {.name = "mask",
          .help = "what the masks look like: of test data, and to choose a preset by",
          .choices = {"block:0.33"},
          .pattern = true};
}

TensorSpec mask_tensor(const Problem& problem) {
  TensorSpec mask{"mask", DType::u8, {problem.size("m")}, Role::input};
  mask.pattern = problem.option("mask");
  return mask;
}

}  // namespace fftune::masked
