#include "kernels/gemm/family.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/gemm/cpu/host_gemm.hpp"
#include "kernels/gemm/packed/packed.hpp"
#include "kernels/gemm/padded/padded.hpp"
#include "kernels/gemm/quantise/quantise.hpp"

namespace fftune {
namespace {

using Names = std::vector<std::string>;

/// Once, also where two operands are packed in one tensor.
void add(Names& names, std::string_view name) {
  if (!name.empty() && std::find(names.begin(), names.end(), name) == names.end())
    names.emplace_back(name);
}

/// The first group's tensor of each matrix, then the second's.
void add(Names& names, const std::vector<TensorNames>& matrices) {
  for (std::size_t group = 0; !matrices.empty() && group < matrices.front().size(); ++group)
    for (const TensorNames& matrix : matrices) add(names, matrix[group]);
}

}  // namespace

StageSpec stage_spec(std::string_view name, const GemmProblem& gemm,
                     const std::vector<TensorSpec>& tensors) {
  StageSpec stage;
  stage.name = name;
  const Epilogue& epilogue = gemm.epilogue;
  const Quantisation& scales = gemm.quantisation;
  add(stage.inputs, gemm.a);
  add(stage.inputs, gemm.b);
  add(stage.outputs, gemm.c);
  for (const std::string_view preactivation : {epilogue.gate, epilogue.up})
    add(epilogue.kind == EpilogueKind::gated ? stage.outputs : stage.inputs, preactivation);
  for (const std::string_view output : {epilogue.d_up, epilogue.hidden}) add(stage.outputs, output);
  add(stage.inputs, scales.a_scale);
  for (const std::string_view scale : scales.b_scale) add(stage.inputs, scale);
  add(scales.finds_scales() ? stage.outputs : stage.inputs, scales.c_scale);
  for (const std::string_view row : epilogue.rows) add(stage.inputs, row);
  add(stage.inputs, epilogue.row_weights);
  for (const std::string_view bias : epilogue.group_bias) add(stage.inputs, bias);
  add(stage.inputs, epilogue.source);
  const QkvHeads& qkv = epilogue.qkv;
  for (const auto& vectors : {qkv.bias, qkv.norms})
    for (const std::string_view vector : vectors) add(stage.inputs, vector);
  for (const std::string_view of_rows : {qkv.positions, qkv.angles, qkv.slots})
    add(stage.inputs, of_rows);
  for (const std::string_view sorting :
       {gemm.groups.mask, gemm.groups.offsets, gemm.groups.permutation, gemm.groups.ids})
    add(stage.inputs, sorting);
  stage.reduction_length = gemm.k * gemm.k_pairs();
  stage.flops = gemm.flops();
  for (const Names* names : {&stage.inputs, &stage.outputs})
    for (const std::string& name_of_tensor : *names) {
      const TensorSpec& tensor = tensors[tensor_index(tensors, name_of_tensor)];
      stage.bytes += tensor.read_share * static_cast<double>(tensor.bytes());
    }
  return stage;
}

std::vector<std::string> sources_of(const Engine& engine) {
  auto own = listed(engine.sources);
  return engine.device_kind == DeviceKind::cpu ? gemm_cpu::sources_with(std::move(own)) : own;
}

GemmFamily::GemmFamily(const Engine& engine, std::vector<GemmStage> stages, std::string name,
                       std::string_view summary)
    : engine_(engine), stages_(std::move(stages)), name_(std::move(name)), summary_(summary) {}

std::vector<GemmFamily> families_of(const std::vector<GemmRow>& rows) {
  std::vector<GemmFamily> families;
  const auto add = [&](const Engine& engine, const GemmRow& row, std::string_view suffix,
                       std::string_view summary) {
    const std::size_t place = row.name.find("{}");
    const std::string name = std::string(row.name).append(suffix);
    if (place == row.name.npos) {
      families.emplace_back(engine, row.stages, name, summary);
      return;
    }
    for (const GemmStage& stage : row.stages)
      families.emplace_back(engine, std::vector{stage},
                            std::string(name).replace(place, 2, stage.name), summary);
  };
  for (const GemmRow& row : rows) {
    add(row.engine, row, "", row.summary);
    if (const Engine* unaligned = unaligned_engine_of(row.engine))
      add(*unaligned, row, "_unaligned", "the same for rows that are not aligned to 16 bytes");
  }
  return families;
}

std::vector<std::string> GemmFamily::stages() const {
  std::vector<std::string> names;
  for (const GemmStage& stage : stages_) names.emplace_back(stage.name);
  return names;
}

std::optional<std::string> GemmFamily::refusal(const Problem& problem,
                                               const DeviceFacts& facts) const {
  if (facts.kind != engine_.device_kind)
    return engine_.device_kind == DeviceKind::cuda ? "the kernel needs a CUDA device"
                                                   : "it runs on the CPU";
  const auto specs = stages_.front().op().stages(problem);
  for (const GemmStage& stage : stages_) {
    if (!stage.pass.empty() && stage.pass != problem.pass)
      return fmt::format("it computes the pass {}, not {}", stage.pass, problem.pass);
    if (stage.packed && !quantises(problem)) {
      if (auto reason = refuse_dense(problem, facts)) return reason;
    }
    if (std::none_of(specs.begin(), specs.end(),
                     [&](const StageSpec& spec) { return spec.name == stage.name; }))
      return fmt::format("the pass {} has no stage {} here", problem.pass, stage.name);
  }
  const auto names = stages();
  if (std::search(specs.begin(), specs.end(), names.begin(), names.end(),
                  [](const StageSpec& spec, const std::string& name) {
                    return spec.name == name;
                  }) == specs.end())
    return fmt::format("other stages lie between its stages {} here", fmt::join(names, " and "));
  if (facts.kind == DeviceKind::cuda && facts.compute_capability < 80)
    return fmt::format("the kernel needs compute capability 8.0: {} has {}.{}", facts.name,
                       facts.compute_capability / 10, facts.compute_capability % 10);
  if (is_batch_invariant(problem) && !engine_.batch_invariant)
    return std::string(order_depends_on_rows);
  return engine_.can_implement(chain(problem), facts);
}

Space GemmFamily::space(const Problem& problem, const DeviceFacts& facts) const {
  return engine_.is_fallback ? Space() : engine_.search.space(chain(problem), facts);
}

Config GemmFamily::default_config(const Problem& problem, const DeviceFacts& facts) const {
  return engine_.is_fallback ? Config() : engine_.search.default_config(chain(problem), facts);
}

std::optional<double> GemmFamily::estimate(const Problem& problem, const DeviceFacts& facts,
                                           const Config& config) const {
  if (engine_.search.estimate == nullptr) return std::nullopt;
  return engine_.search.estimate(chain(problem), facts, config);
}

bool GemmFamily::is_preferred(const Problem& problem, const DeviceFacts& facts) const {
  return engine_.is_preferred == nullptr || engine_.is_preferred(chain(problem), facts);
}

Program GemmFamily::program(const Problem& problem, const DeviceFacts& facts,
                            const Config& config) const {
  Program program;
  const TensorPlaces places(stages_.front().op().tensors(problem));
  if (engine_.device_kind == DeviceKind::cpu) program.host_tensors = places.count();
  engine_.append(program, chain(problem), places, facts, config);
  return program;
}

GemmChain GemmFamily::chain(const Problem& problem) const {
  GemmChain chain;
  for (const GemmStage& stage : stages_) {
    chain.push_back(stage.gemm(problem));
    chain.back().batch_invariant = is_batch_invariant(problem);
  }
  return chain;
}

}  // namespace fftune
