// The sum over a group's ranks together with what stands beside it: in one launch with the product
// in front, for few tokens (all_reduce/product.cu); and with the norm behind.
#include <fmt/format.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/group_layout.hpp"
#include "kernels/all_reduce/all_reduce.hpp"
#include "kernels/all_reduce/product.cuh"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/gemm/decode/decode.hpp"
#include "kernels/gemm/engine.hpp"
#include "kernels/layer/layer.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/norm/norm.hpp"
#include "registry/part_family.hpp"

namespace fftune::layer {
namespace {

/// The part of a layer, or null.
const OpPart* part_of(const std::vector<OpPart>& parts, const std::string& name) {
  for (const OpPart& part : parts)
    if (part.name == name) return &part;
  return nullptr;
}

/// The places of a part's tensors, by their names there, among those of one layer.
std::vector<std::size_t> places_of(const Problem& problem, const std::vector<std::string>& names) {
  const auto whole = layer_op().tensors(unrepeated(layer_op(), problem));
  std::vector<std::size_t> places;
  for (const std::string& name : names) places.push_back(tensor_index(whole, name));
  return places;
}

/// A product of a rank's slice and the sum of its result.
struct SummedStage {
  std::string_view family, summary;
  std::string part, stage, sum;  // names: the product's part and its last stage, the sum's part
  GemmProblem (*gemm)(const Problem&);
};

class SummedProduct final : public Family {
 public:
  explicit SummedProduct(SummedStage of) : of_(std::move(of)) {}

  std::string_view name() const override { return of_.family; }
  std::string_view summary() const override { return of_.summary; }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::vector<std::string> stages() const override {
    return {of_.part + "." + of_.stage, of_.sum + "." + stage_forward};
  }
  std::vector<std::string> sources() const override { return {source}; }

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (facts.kind != DeviceKind::cuda) return "the kernel needs a CUDA device";
    if (facts.compute_capability < 90)
      return "the kernel needs compute capability 9.0: blocks that share k are a cluster";
    const auto parts = parts_of(problem);
    const OpPart *const product = part_of(parts, of_.part), *const sum = part_of(parts, of_.sum);
    if (!product || !sum) return "the layer has no " + (product ? of_.sum : of_.part);
    if (product->tensor("y") != sum->tensor("x"))
      return "the result of " + of_.part + " is not what " + of_.sum + " adds";
    if (product->op->stages(product->problem).back().name != of_.stage)
      return "there is no stage " + product->stage(of_.stage);
    if (packed_format(product->problem).packed) return "the kernel reads weights of x's type";
    const GemmProblem gemm = of_.gemm(product->problem);
    if (gemm.epilogue.adds()) return "the kernel adds no bias, and no factor, to a rank's summand";
    if (auto reason = no_decode(gemm)) return reason;
    if (all_reduce::form_of(sum->problem).bytes() * 4 /
            static_cast<std::int64_t>(dtype_bytes(gemm.dtype)) >
        static_cast<std::int64_t>(most_packet_message))
      return "the float32 summands are more than go as packets";
    return decode_engine.can_implement({gemm}, facts);
  }
  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return decode_engine.search.space({gemm(problem)}, facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return decode_engine.search.default_config({gemm(problem)}, facts);
  }

  Program program(const Problem& problem, const DeviceFacts&, const Config& config) const override {
    const auto parts = parts_of(problem);
    const OpPart &product = *part_of(parts, of_.part), &sum = *part_of(parts, of_.sum);
    const GemmProblem gemm = of_.gemm(product.problem);
    all_reduce::Form form = all_reduce::form_of(sum.problem);
    const summed_product_config block{.tokens = decode_tokens(gemm),
                                      .rows = config.get("rows"),
                                      .warps = config.get("warps"),
                                      .unroll = config.get("unroll")};
    const int split_k = config.get("split_k");
    const std::string expression =
        fmt::format("summed_product<{}, {}, {}, fftune::summed_product_config{{{}, {}, {}, {}}}>",
                    element_type(gemm.dtype), form.adds, form.ranks, block.tokens, block.rows,
                    block.warps, block.unroll);
    Program program;
    KernelLaunch& launch =
        append_kernel(program, source, expression,
                      {static_cast<std::uint32_t>(quotient_up(gemm.n, block.rows) + 1),
                       static_cast<std::uint32_t>(split_k)},
                      static_cast<std::uint32_t>(block.threads()), {});
    launch.shared_bytes = static_cast<std::uint32_t>(block.shared_bytes());
    launch.cluster.y = static_cast<std::uint32_t>(split_k);
    launch.programmatic = true;
    ParameterStruct parameters{.bytes = sizeof(summed_product_params), .fields = {}};
    const auto set = [&](std::size_t offset, Argument value) {
      parameters.fields.push_back({offset, std::move(value)});
    };
    const auto set_tensor = [&](std::size_t offset, const std::string& name) {
      set(offset, TensorArgument{places_of(problem, {name}).front()});
    };
    form.dtype = DType::f32;  // of the summands
    all_reduce::set_group(
        parameters, program, form,
        form.loopback ? absent : places_of(problem, {sum.tensor("group")}).front(),
        {offsetof(summed_product_params, loopback), offsetof(summed_product_params, table)});
    set_tensor(offsetof(summed_product_params, a), product.tensor(std::string(gemm.a[0].front())));
    set_tensor(offsetof(summed_product_params, b), product.tensor(std::string(gemm.b[0].front())));
    if (form.adds) set_tensor(offsetof(summed_product_params, residual), sum.tensor("residual"));
    set_tensor(offsetof(summed_product_params, y), sum.tensor("y"));
    set(offsetof(summed_product_params, m), static_cast<std::int32_t>(gemm.m));
    set(offsetof(summed_product_params, n), static_cast<std::int32_t>(gemm.n));
    set(offsetof(summed_product_params, k), static_cast<std::int32_t>(gemm.k));
    set(offsetof(summed_product_params, split_k), std::int32_t{split_k});
    set(offsetof(summed_product_params, tag),
        static_cast<std::int32_t>(
            all_reduce::tag_of(sum.problem, fmt::format("{} {} {}", expression, gemm.k, split_k))));
    launch.parameters = std::move(parameters);
    return program;
  }

 private:
  static constexpr const char* source = "all_reduce/product.cu";

  GemmProblem gemm(const Problem& problem) const {
    return of_.gemm(part_of(parts_of(problem), of_.part)->problem);
  }

  SummedStage of_;
};

/// A family of all-reduce for the sum behind attention and the RMSNorm behind it.
class NormedSum final : public Family {
 public:
  explicit NormedSum(const Family& family)
      : family_(family), name_("attn_reduce.normed_" + std::string(family.name())) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return family_.summary(); }
  DeviceKind device_kind() const override { return family_.device_kind(); }
  std::vector<std::string> stages() const override {
    return {"attn_reduce.forward", "ffn_norm.forward"};
  }
  std::vector<std::string> sources() const override { return family_.sources(); }
  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    const auto parts = parts_of(problem);
    const OpPart *const sum = part_of(parts, "attn_reduce"), *const norm =
                                                                 part_of(parts, "ffn_norm");
    if (!sum || !norm) return std::string("the layer has no ") + (sum ? "ffn_norm" : "attn_reduce");
    if (sum->tensor("y") != norm->tensor("x")) return "the norm is not that of the sum";
    return family_.refusal(whole(parts), facts);
  }
  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return family_.space(whole(parts_of(problem)), facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return family_.default_config(whole(parts_of(problem)), facts);
  }
  bool is_preferred(const Problem& problem, const DeviceFacts& facts) const override {
    return family_.is_preferred(whole(parts_of(problem)), facts);
  }
  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const auto parts = parts_of(problem);
    const OpPart &sum = *part_of(parts, "attn_reduce"), &norm = *part_of(parts, "ffn_norm");
    const Problem fused = whole(parts);
    std::vector<std::string> names;
    for (const TensorSpec& tensor : all_reduce_op().tensors(fused))
      names.push_back(tensor.name == "w" || tensor.name == "y" ? norm.tensor(tensor.name)
                      : tensor.name == "sum"                   ? sum.tensor("y")
                                                               : sum.tensor(tensor.name));
    Program program;
    append_moved(program, family_.program(fused, facts, config), places_of(problem, names),
                 layer_op().tensors(unrepeated(layer_op(), problem)).size());
    return program;
  }

 private:
  /// The sum with the norm, as a problem of all-reduce.
  static Problem whole(const std::vector<OpPart>& parts) {
    Problem sum = part_of(parts, "attn_reduce")->problem;
    const Problem& norm = part_of(parts, "ffn_norm")->problem;
    sum.options["norm"] = norm.option("convention");
    sum.options["eps"] = norm.option("eps");
    return sum;
  }

  const Family& family_;
  std::string name_;
};

}  // namespace

std::vector<const Family*> sums() {
  static const SummedProduct out({.family = "out.summed_decode",
                                  .summary = "the output product and its sum over the ranks in one "
                                             "launch, up to 16 tokens",
                                  .part = "out",
                                  .stage = linear::stage_product,
                                  .sum = "attn_reduce",
                                  .gemm = linear::product_gemm});
  static const SummedProduct down({.family = "ffn.summed_down_decode",
                                   .summary = "the product down and its sum over the ranks in one "
                                              "launch, up to 16 tokens",
                                   .part = "ffn",
                                   .stage = ffn::stage_down,
                                   .sum = "ffn_reduce",
                                   .gemm = ffn::down_gemm});
  static const auto normed = [] {
    std::deque<NormedSum> all;
    for (const Family* family : all_reduce_op().families()) all.emplace_back(*family);
    return all;
  }();
  std::vector<const Family*> list{&out, &down};
  for (const NormedSum& family : normed) list.push_back(&family);
  return list;
}

}  // namespace fftune::layer
