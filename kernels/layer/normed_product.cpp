// A norm and the product that reads what it writes, in the product's kernel: for few tokens, whose
// rows every block can read whole (decode/gemm.cu).
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/gemm/engine.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/layer/layer.hpp"
#include "kernels/norm/norm.hpp"
#include "kernels/qkv/qkv.hpp"
#include "registry/part_family.hpp"

namespace fftune::layer {
namespace {

/// The stages that a family of this kind covers: the norm's part, and the first stage of the part
/// behind it.
struct NormedStage {
  std::string_view family, summary;
  std::string norm, part;  // names of parts
  std::string stage;       // of the latter
  GemmProblem (*gemm)(const Problem&);
};

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

class NormedProduct final : public Family {
 public:
  explicit NormedProduct(NormedStage of) : of_(std::move(of)) {}

  std::string_view name() const override { return of_.family; }
  std::string_view summary() const override { return of_.summary; }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::vector<std::string> stages() const override {
    return {of_.norm + "." + stage_forward, of_.part + "." + of_.stage};
  }
  std::vector<std::string> sources() const override { return sources_of(decode_engine); }

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (facts.kind != DeviceKind::cuda) return "the kernel needs a CUDA device";
    if (facts.compute_capability < 80) return "the kernel needs compute capability 8.0";
    const auto parts = parts_of(problem);
    const OpPart *const norm = part_named(parts, of_.norm), *const product =
                                                                part_named(parts, of_.part);
    if (!norm || !product) return "there is no " + (norm ? of_.part : of_.norm);
    if (norm->tensor("y") != product->tensor("x"))
      return "the result of " + of_.norm + " has other readers too";
    for (const OpPart& other : parts)
      if (&other != product && reads(other, norm->tensor("y")))
        return "the result of " + of_.norm + " is read by " + other.name + " too";
    const auto stages = product->op->stages(product->problem);
    if (stages.front().name != of_.stage) return "there is no stage " + product->stage(of_.stage);
    return decode_engine.can_implement(chain(*norm, *product), facts);
  }
  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return decode_engine.search.space(chain(problem), facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return decode_engine.search.default_config(chain(problem), facts);
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const auto parts = parts_of(problem);
    const OpPart &norm = *part_named(parts, of_.norm), &product = *part_named(parts, of_.part);
    // The product's tensors, then what it reads of the norm's.
    auto own = product.op->tensors(product.problem);
    std::vector<std::string> names;
    for (const TensorSpec& tensor : own) names.push_back(product.tensor(tensor.name));
    for (const auto& [here, there] : {std::pair(norm_x, "x"), std::pair(norm_weights, "w")}) {
      TensorSpec tensor;
      tensor.name = here;
      own.push_back(std::move(tensor));
      names.push_back(norm.tensor(there));
    }
    const auto whole = layer_op().tensors(unrepeated(layer_op(), problem));
    std::vector<std::size_t> places;
    for (const std::string& name : names) places.push_back(tensor_index(whole, name));
    Program from, program;
    decode_engine.append(from, chain(norm, product), TensorPlaces(std::move(own)), facts, config);
    append_moved(program, std::move(from), places, whole.size());
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

  GemmChain chain(const Problem& problem) const {
    const auto parts = parts_of(problem);
    return chain(*part_named(parts, of_.norm), *part_named(parts, of_.part));
  }
  GemmChain chain(const OpPart& norm, const OpPart& product) const {
    const norm::Layer rows = norm::layer_of(norm.problem);
    GemmProblem gemm = of_.gemm(product.problem);
    gemm.a = {{norm_x}};
    gemm.norm_of_a = {
        .kind = kind_of(rows.convention), .weights = norm_weights, .epsilon = double{rows.eps}};
    gemm.follows = true;
    return {gemm};
  }

  NormedStage of_;
};

}  // namespace

std::vector<const Family*> normed_products() {
  static const NormedProduct qkv({.family = "qkv.normed_decode",
                                  .summary = "the norm within the product of q, k and v, up to 16 "
                                             "tokens",
                                  .norm = "attn_norm",
                                  .part = "qkv",
                                  .stage = qkv::stage_product,
                                  .gemm = qkv::product_gemm});
  static const NormedProduct gate_up(
      {.family = "ffn.normed_gate_up_decode",
       .summary = "the norm within the products of gate and up, up to 16 tokens",
       .norm = "ffn_norm",
       .part = "ffn",
       .stage = ffn::stage_gate_up,
       .gemm = ffn::gate_up_gemm});
  return {&qkv, &gate_up};
}

}  // namespace fftune::layer
