// The sum over a group's ranks in one launch with the product in front of it
// (all_reduce/product.cu, product_sm90.cu). The norm behind a sum is then a kernel of its own.
#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/group_layout.hpp"
#include "kernels/all_reduce/all_reduce.hpp"
#include "kernels/all_reduce/product.cuh"
#include "kernels/all_reduce/product_sm90.cuh"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/gemm/decode/decode.hpp"
#include "kernels/gemm/engine.hpp"
#include "kernels/layer/fused_parts.hpp"
#include "kernels/layer/layer.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/norm/norm.hpp"
#include "registry/catalog.hpp"

namespace fftune::layer {
namespace {

/// The tensors of a sum, by their places or `absent`, and the tag that ranks compare.
struct Sum {
  std::size_t group, residual, y;
  std::uint32_t tag;
};

/// A kernel of a product and its sum: the engine whose space and tiles it has, its launch with all
/// of its parameters but the sum's, and those.
struct SummedKernel {
  const Engine& engine;
  const char* source;
  DType summands;  // f32, or no f32: the type of y
  void (*set_sum)(ParameterStruct&, Program&, const all_reduce::Form&, const Sum&);
  KernelLaunch& (*append)(Program&, const GemmProblem&, const TensorPlaces&, const DeviceFacts&,
                          const Config&, const all_reduce::Form&);
};

template <class Params>
void set_sum(ParameterStruct& parameters, Program& program, const all_reduce::Form& form,
             const Sum& sum) {
  ParameterFields<Params> fields(parameters);
  all_reduce::set_group(fields, program, form, sum.group);
  fields.set_places(&Params::residual, sum.residual, &Params::y, sum.y);
  fields.set(&Params::tag, sum.tag);
}

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
      fmt::format("summed_product<{}, {}, {}, {}>", element_type(gemm.dtype), form.adds, form.ranks,
                  StructText("summed_product_config", "tokens", block.tokens, "rows", block.rows,
                             "warps", block.warps, "unroll", block.unroll)),
      {static_cast<std::uint32_t>(quotient_up(gemm.n, block.rows) + 1), split_k},
      static_cast<std::uint32_t>(block.threads()), {});
  launch.shared_bytes = static_cast<std::uint32_t>(block.shared_bytes());
  launch.cluster.y = split_k;
  using Params = summed_product_params;
  launch.parameters = ParameterStruct{sizeof(Params), {}};
  ParameterFields<Params>(*launch.parameters)
      .set(&Params::a, tensor_of(places, gemm.a[0].front()), &Params::b,
           tensor_of(places, gemm.b[0].front()), &Params::m, gemm.m, &Params::n, gemm.n, &Params::k,
           gemm.k, &Params::split_k, split_k);
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

const SummedKernel decode_kernel{decode_engine, "all_reduce/product.cu", DType::f32,
                                 set_sum<summed_product_params>, append_decode};
const SummedKernel sm90_kernel{sm90_engine, "all_reduce/product_sm90.cu", DType::bf16,
                               set_sum<summed_sm90_params>, append_sm90};

/// Bytes of summands: those of more tokens have products that take longer than the link.
constexpr std::int64_t most_message = most_packet_message;

/// A product of a rank's slice and the sum of its result.
class SummedProduct final : public FusedParts {
 public:
  using Gemm = GemmProblem (*)(const Problem&);
  SummedProduct(FusedStages of, Gemm gemm, const SummedKernel& kernel)
      : FusedParts(std::move(of)), gemm_(gemm), kernel_(kernel) {}

  std::vector<std::string> sources() const override {
    return {kernel_.source, "norm/forward_rows.cu"};
  }
  bool is_preferred(const Problem&, const DeviceFacts&) const override { return false; }

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (facts.kind != DeviceKind::cuda) return "the kernel needs a CUDA device";
    if (facts.compute_capability < 90)
      return "the kernel needs compute capability 9.0: blocks that share k are a cluster";
    if (auto reason = refuse_parts(parts_of(problem))) return reason;
    const auto [product, sum] = parts(problem);
    if (message(sum).normalises && !message(sum).adds)
      return "the kernel has no place for a sum without a residual in front of a norm";
    if (packed_format(product.problem).packed) return "the kernel reads weights of x's type";
    if (auto refusal = all_reduce::refuse_peers(sum.problem, facts)) return refusal;
    const GemmProblem gemm = gemm_(product.problem);
    if (gemm.epilogue.adds()) return "the kernel adds no bias, and no factor, to a rank's summand";
    if (gemm.dtype != DType::bf16 && gemm.dtype != DType::fp16)
      return "a packet has summands of bf16 and fp16 products";
    if (message(sum).bytes() > most_message)
      return fmt::format("{} bytes of summands exceed the {} that are sent at once",
                         message(sum).bytes(), most_message);
    return of_.engine.can_implement({gemm}, facts);
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Parts two = parts(problem);
    const auto& [product, sum] = two;
    // The product's tensors, then those of the sum.
    auto tensors = product.op->tensors(product.problem);
    std::vector<std::string> names;
    for (const TensorSpec& tensor : tensors) names.push_back(product.tensor(tensor.name));
    const std::size_t of_sum = tensors.size();
    const auto sums = all_reduce_op().tensors(sum.problem);
    for (const TensorSpec& tensor : sums) names.push_back(sum.tensor(tensor.name));
    const auto place = [&](const char* name) { return of_sum + tensor_index(sums, name); };
    const all_reduce::Form form = message(sum);
    Program from, program;
    KernelLaunch& launch = kernel_.append(from, chain(two).front(),
                                          TensorPlaces(std::move(tensors)), facts, config, form);
    launch.programmatic = true;
    kernel_.set_sum(*launch.parameters, from, form,
                    {.group = form.loopback ? absent : place("group"),
                     .residual = form.adds ? place("residual") : absent,
                     .y = place(form.normalises ? "sum" : "y"),
                     .tag = all_reduce::tag_of(
                         product.problem,
                         fmt::format("{} {}", from.kernels.back().expression, config.text()))});
    append_in_layer(program, std::move(from), problem, names);
    if (form.normalises)
      append_in_layer(program, norm_behind(sum, facts), problem,
                      {sum.tensor("sum"), sum.tensor("w"), sum.tensor("y")});
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

  GemmChain chain(const Parts& two) const override {
    GemmProblem gemm = gemm_(two.first.problem);
    gemm.follows = true;
    return {gemm};
  }
  /// The message of a rank.
  all_reduce::Form message(const OpPart& sum) const {
    all_reduce::Form form = all_reduce::form_of(sum.problem);
    form.as_words = kernel_.summands != DType::f32;
    if (!form.as_words) {
      form.dtype = DType::f32;
      form.d = quotient_up(form.d, 8) * 8;  // eight columns are together
    }
    return form;
  }

  Gemm gemm_;
  const SummedKernel& kernel_;
};

}  // namespace

std::vector<const Family*> sums() {
  const auto out = [](std::string_view family, std::string_view summary,
                      const SummedKernel& kernel) {
    return SummedProduct({.family = family,
                          .summary = summary,
                          .first = {"out", linear::stage_product},
                          .second = {"attn_reduce", stage_forward},
                          .engine = kernel.engine},
                         linear::product_gemm, kernel);
  };
  const auto down = [](std::string_view family, std::string_view summary,
                       const SummedKernel& kernel) {
    return SummedProduct({.family = family,
                          .summary = summary,
                          .first = {"ffn", ffn::stage_down},
                          .second = {"ffn_reduce", stage_forward},
                          .engine = kernel.engine},
                         ffn::down_gemm, kernel);
  };
  static const SummedProduct products[] = {
      out("out.summed_decode",
          "the output product and its sum over the ranks in one launch, up to 16 tokens",
          decode_kernel),
      out("out.summed_sm90", "the same for as many tokens as go as packets", sm90_kernel),
      down("ffn.summed_down_decode",
           "the product down and its sum over the ranks in one launch, up to 16 tokens",
           decode_kernel),
      down("ffn.summed_down_sm90", "the same for as many tokens as go as packets", sm90_kernel)};
  std::vector<const Family*> list;
  for (const SummedProduct& family : products) list.push_back(&family);
  return list;
}

}  // namespace fftune::layer
