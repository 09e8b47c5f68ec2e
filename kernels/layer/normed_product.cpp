// A norm and the product that reads what it writes, in the product's kernel: for few tokens, whose
// rows every block can read whole (decode/gemm.cu).
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/ffn/ffn.hpp"
#include "kernels/gemm/engine.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/layer/fused_parts.hpp"
#include "kernels/layer/layer.hpp"
#include "kernels/norm/norm.hpp"
#include "kernels/qkv/qkv.hpp"

namespace fftune::layer {
namespace {

row_norm kind_of(norm::Convention convention) {
  switch (convention) {
    case norm::Convention::llama:
      return row_norm::llama;
    case norm::Convention::gemma:
      return row_norm::gemma;
    case norm::Convention::t5:
      break;
  }
  return row_norm::t5;
}

class NormedProduct final : public FusedParts {
 public:
  using Gemm = GemmProblem (*)(const Problem&);
  NormedProduct(FusedStages of, Gemm gemm) : FusedParts(std::move(of)), gemm_(gemm) {}

  std::vector<std::string> sources() const override { return sources_of(decode_engine); }

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (facts.kind != DeviceKind::cuda) return "the kernel needs a CUDA device";
    if (facts.compute_capability < 80) return "the kernel needs compute capability 8.0";
    const auto all = parts_of(problem);
    if (auto reason = refuse_parts(all)) return reason;
    const Parts two = parts(problem);
    for (const OpPart& other : all)
      if (other.name != of_.second.part && reads(other, two.first.tensor("y")))
        return "the result of " + of_.first.part + " is read by " + other.name + " too";
    return decode_engine.can_implement(chain(two), facts);
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Parts two = parts(problem);
    // The product's tensors, then what it reads of the norm's.
    auto own = two.second.op->tensors(two.second.problem);
    std::vector<std::string> names;
    for (const TensorSpec& tensor : own) names.push_back(two.second.tensor(tensor.name));
    for (const auto& [here, there] : {std::pair(norm_x, "x"), std::pair(norm_weights, "w")}) {
      TensorSpec tensor;
      tensor.name = here;
      own.push_back(std::move(tensor));
      names.push_back(two.first.tensor(there));
    }
    Program from, program;
    decode_engine.append(from, chain(two), TensorPlaces(std::move(own)), facts, config);
    append_in_layer(program, std::move(from), problem, names);
    if (facts.compute_capability >= 90)
      for (Step& step : program.steps) std::get<KernelLaunch>(step).programmatic = true;
    return program;
  }

 private:
  static constexpr const char *norm_x = "norm_x", *norm_weights = "norm_weights";

  static bool reads(const OpPart& part, const std::string& tensor) {
    for (const StageSpec& stage : part.op->stages(part.problem))
      for (const std::string& input : stage.inputs)
        if (part.tensor(input) == tensor) return true;
    return false;
  }

  GemmChain chain(const Parts& two) const override {
    const norm::Layer rows = norm::layer_of(two.first.problem);
    GemmProblem gemm = gemm_(two.second.problem);
    gemm.a = {{norm_x}};
    gemm.norm_of_a = {
        .kind = kind_of(rows.convention), .weights = norm_weights, .epsilon = double{rows.eps}};
    gemm.follows = true;
    return {gemm};
  }

  Gemm gemm_;
};

}  // namespace

std::vector<const Family*> normed_products() {
  static const NormedProduct qkv({.family = "qkv.normed_decode",
                                  .summary = "the norm within the product of q, k and v, up to 16 "
                                             "tokens",
                                  .first = {"attn_norm", stage_forward},
                                  .second = {"qkv", qkv::stage_product},
                                  .engine = decode_engine},
                                 qkv::product_gemm);
  static const NormedProduct gate_up(
      {.family = "ffn.normed_gate_up_decode",
       .summary = "the norm within the products of gate and up, up to 16 tokens",
       .first = {"ffn_norm", stage_forward},
       .second = {"ffn", ffn::stage_gate_up},
       .engine = decode_engine},
      ffn::gate_up_gemm);
  return {&qkv, &gate_up};
}

}  // namespace fftune::layer
