// The sum over a group's ranks in one launch with the product in front of it
// (all_reduce/product.cu, product_sm90.cu). The norm behind a sum is then a kernel of its own.
#include <fmt/format.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/group_layout.hpp"
#include "kernels/all_reduce/all_reduce.hpp"
#include "kernels/all_reduce/product.cuh"
#include "kernels/all_reduce/product_sm90.cuh"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/gemm/decode/decode.hpp"
#include "kernels/gemm/engine.hpp"
#include "kernels/layer/layer.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/norm/norm.hpp"
#include "registry/catalog.hpp"
#include "registry/part_family.hpp"

namespace fftune::layer {
namespace {

/// The places of a part's tensors, by their names there, among those of one layer.
std::vector<std::size_t> places_of(const Problem& problem, const std::vector<std::string>& names) {
  const auto whole = layer_op().tensors(unrepeated(layer_op(), problem));
  std::vector<std::size_t> places;
  for (const std::string& name : names) places.push_back(tensor_index(whole, name));
  return places;
}

/// A kernel of a product and its sum: the engine whose space and tiles it has, and its launch with
/// all of its parameters but those that the fields are of.
struct SummedKernel {
  const Engine& engine;
  const char* source;
  DType summands;  // f32, or no f32: the type of y
  struct Fields {
    all_reduce::GroupFields group;
    std::size_t residual, y, tag;
  } fields;
  KernelLaunch& (*append)(Program&, const GemmProblem&, const TensorPlaces&, const DeviceFacts&,
                          const Config&, const all_reduce::Form&);
};

KernelLaunch& append_decode(Program& program, const GemmProblem& gemm, const TensorPlaces& places,
                            const DeviceFacts&, const Config& config,
                            const all_reduce::Form& form) {
  const summed_product_config block{.tokens = decode_tokens(gemm),
                                    .rows = config.get("rows"),
                                    .warps = config.get("warps"),
                                    .unroll = config.get("unroll")};
  const auto split_k = static_cast<std::uint32_t>(config.get("split_k"));
  KernelLaunch& launch = append_kernel(
      program, "all_reduce/product.cu",
      fmt::format("summed_product<{}, {}, {}, fftune::summed_product_config{{{}, {}, {}, {}}}>",
                  element_type(gemm.dtype), form.adds, form.ranks, block.tokens, block.rows,
                  block.warps, block.unroll),
      {static_cast<std::uint32_t>(quotient_up(gemm.n, block.rows) + 1), split_k},
      static_cast<std::uint32_t>(block.threads()), {});
  launch.shared_bytes = static_cast<std::uint32_t>(block.shared_bytes());
  launch.cluster.y = split_k;
  using Params = summed_product_params;
  launch.parameters =
      ParameterStruct{.bytes = sizeof(Params),
                      .fields = {{offsetof(Params, a), tensor_of(places, gemm.a[0].front())},
                                 {offsetof(Params, b), tensor_of(places, gemm.b[0].front())},
                                 {offsetof(Params, m), static_cast<std::int32_t>(gemm.m)},
                                 {offsetof(Params, n), static_cast<std::int32_t>(gemm.n)},
                                 {offsetof(Params, k), static_cast<std::int32_t>(gemm.k)},
                                 {offsetof(Params, split_k), static_cast<std::int32_t>(split_k)}}};
  return launch;
}

/// The engine's own launch, of the kernel with another epilogue and more parameters.
KernelLaunch& append_sm90(Program& program, const GemmProblem& gemm, const TensorPlaces& places,
                          const DeviceFacts& facts, const Config& config,
                          const all_reduce::Form& form) {
  sm90_engine.append(program, {gemm}, places, facts, config);
  KernelSource& kernel = program.kernels.back();
  kernel.file = "all_reduce/product_sm90.cu";
  kernel.expression.pop_back();
  const std::string plain = "fftune::gemm_sm90<";
  kernel.expression = fmt::format("fftune::summed_gemm_sm90<{}, {}, {}>",
                                  kernel.expression.substr(plain.size()), form.ranks, form.adds);
  auto& launch = std::get<KernelLaunch>(program.steps.back());
  launch.parameters->bytes = sizeof(summed_sm90_params);
  return launch;
}

template <class Params>
constexpr SummedKernel::Fields fields_of() {
  return {{offsetof(Params, loopback), offsetof(Params, table)},
          offsetof(Params, residual),
          offsetof(Params, y),
          offsetof(Params, tag)};
}

const SummedKernel decode_kernel{decode_engine, "all_reduce/product.cu", DType::f32,
                                 fields_of<summed_product_params>(), append_decode};
const SummedKernel sm90_kernel{sm90_engine, "all_reduce/product_sm90.cu", DType::bf16,
                               fields_of<summed_sm90_params>(), append_sm90};

/// Bytes of summands: those of more tokens have products that take longer than the link.
constexpr std::int64_t most_message = most_packet_message;

/// A product of a rank's slice and the sum of its result.
struct SummedStage {
  std::string_view family, summary;
  std::string part, stage, sum;  // names: the product's part and its last stage, the sum's part
  GemmProblem (*gemm)(const Problem&);
  const SummedKernel& kernel;
};

class SummedProduct final : public Family {
 public:
  SummedProduct(SummedStage of) : of_(std::move(of)) {}

  std::string_view name() const override { return of_.family; }
  std::string_view summary() const override { return of_.summary; }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::vector<std::string> stages() const override {
    return {of_.part + "." + of_.stage, of_.sum + "." + stage_forward};
  }
  std::vector<std::string> sources() const override {
    return {of_.kernel.source, "norm/forward_rows.cu"};
  }
  bool is_preferred(const Problem&, const DeviceFacts&) const override { return false; }

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (facts.kind != DeviceKind::cuda) return "the kernel needs a CUDA device";
    if (facts.compute_capability < 90)
      return "the kernel needs compute capability 9.0: blocks that share k are a cluster";
    const auto parts = parts_of(problem);
    const OpPart *const product = part_named(parts, of_.part), *const sum =
                                                                   part_named(parts, of_.sum);
    if (!product || !sum) return "the layer has no " + (product ? of_.sum : of_.part);
    if (product->tensor("y") != sum->tensor("x"))
      return "the result of " + of_.part + " is not what " + of_.sum + " adds";
    if (product->op->stages(product->problem).back().name != of_.stage)
      return "there is no stage " + product->stage(of_.stage);
    if (message(*sum).normalises && !message(*sum).adds)
      return "the kernel has no place for a sum without a residual in front of a norm";
    if (packed_format(product->problem).packed) return "the kernel reads weights of x's type";
    const GemmProblem gemm = of_.gemm(product->problem);
    if (gemm.epilogue.adds()) return "the kernel adds no bias, and no factor, to a rank's summand";
    if (gemm.dtype != DType::bf16 && gemm.dtype != DType::fp16)
      return "a packet has summands of bf16 and fp16 products";
    if (message(*sum).bytes() > most_message)
      return fmt::format("{} bytes of summands are more than go at once, {}", message(*sum).bytes(),
                         most_message);
    return of_.kernel.engine.can_implement({gemm}, facts);
  }
  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return of_.kernel.engine.search.space({gemm(problem)}, facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return of_.kernel.engine.search.default_config({gemm(problem)}, facts);
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const auto parts = parts_of(problem);
    const OpPart &product = *part_named(parts, of_.part), &sum = *part_named(parts, of_.sum);
    // The product's tensors, then those of the sum.
    auto own = product.op->tensors(product.problem);
    std::vector<std::string> names;
    for (const TensorSpec& tensor : own) names.push_back(product.tensor(tensor.name));
    const std::size_t of_sum = own.size();
    const auto sums = all_reduce_op().tensors(sum.problem);
    for (const TensorSpec& tensor : sums) names.push_back(sum.tensor(tensor.name));
    const auto place = [&](const char* name) {
      return TensorArgument{of_sum + tensor_index(sums, name)};
    };
    const all_reduce::Form form = message(sum);
    const auto& fields = of_.kernel.fields;
    Program from, program;
    KernelLaunch& launch =
        of_.kernel.append(from, gemm(problem), TensorPlaces(std::move(own)), facts, config, form);
    launch.programmatic = true;
    const auto set = [&](std::size_t offset, Argument value) {
      launch.parameters->fields.push_back({offset, std::move(value)});
    };
    all_reduce::set_group(*launch.parameters, from, form,
                          form.loopback ? absent : place("group").tensor, fields.group);
    if (form.adds) set(fields.residual, place("residual"));
    set(fields.y, place(form.normalises ? "sum" : "y"));
    const auto tag = all_reduce::tag_of(
        product.problem, fmt::format("{} {}", from.kernels.back().expression, config.text()));
    set(fields.tag, static_cast<std::int32_t>(tag));
    const auto tensors = layer_op().tensors(unrepeated(layer_op(), problem)).size();
    append_moved(program, std::move(from), places_of(problem, names), tensors);
    if (form.normalises)
      append_moved(program, norm_behind(sum, facts),
                   places_of(problem, {sum.tensor("sum"), sum.tensor("w"), sum.tensor("y")}),
                   tensors);
    return program;
  }

 private:
  /// It reads x and w, and writes y: the tensors in this order.
  static Program norm_behind(const OpPart& sum, const DeviceFacts& facts) {
    const Op& op = rmsnorm_op();
    const Problem problem = canonical(
        op,
        {op.name().data(),
         "fwd",
         sum.problem.dtype,
         {{"m", sum.problem.size("m")}, {"d", sum.problem.size("d")}},
         {{"convention", sum.problem.option("norm")}, {"eps", sum.problem.option("eps")}}},
        facts.kind);
    const Variant variant = default_recipe(op, problem, facts).front();
    return family_of(op, variant.family).program(problem, facts, variant.config);
  }

  GemmProblem gemm(const Problem& problem) const {
    GemmProblem gemm = of_.gemm(part_named(parts_of(problem), of_.part)->problem);
    gemm.follows = true;
    return gemm;
  }
  /// The message of a rank.
  all_reduce::Form message(const OpPart& sum) const {
    all_reduce::Form form = all_reduce::form_of(sum.problem);
    form.as_words = of_.kernel.summands != DType::f32;
    if (!form.as_words) {
      form.dtype = DType::f32;
      form.d = quotient_up(form.d, 8) * 8;  // eight columns are together
    }
    return form;
  }

  SummedStage of_;
};

}  // namespace

std::vector<const Family*> sums() {
  static const SummedProduct products[] = {
      {{.family = "out.summed_decode",
        .summary = "the output product and its sum over the ranks in one launch, up to 16 tokens",
        .part = "out",
        .stage = linear::stage_product,
        .sum = "attn_reduce",
        .gemm = linear::product_gemm,
        .kernel = decode_kernel}},
      {{.family = "out.summed_sm90",
        .summary = "the same for as many tokens as go as packets",
        .part = "out",
        .stage = linear::stage_product,
        .sum = "attn_reduce",
        .gemm = linear::product_gemm,
        .kernel = sm90_kernel}},
      {{.family = "ffn.summed_down_decode",
        .summary = "the product down and its sum over the ranks in one launch, up to 16 tokens",
        .part = "ffn",
        .stage = ffn::stage_down,
        .sum = "ffn_reduce",
        .gemm = ffn::down_gemm,
        .kernel = decode_kernel}},
      {{.family = "ffn.summed_down_sm90",
        .summary = "the same for as many tokens as go as packets",
        .part = "ffn",
        .stage = ffn::stage_down,
        .sum = "ffn_reduce",
        .gemm = ffn::down_gemm,
        .kernel = sm90_kernel}}};
  std::vector<const Family*> list;
  for (const SummedProduct& family : products) list.push_back(&family);
  return list;
}

}  // namespace fftune::layer
