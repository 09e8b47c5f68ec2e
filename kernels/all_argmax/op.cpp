#include <vector>

#include "device/group_layout.hpp"
#include "kernels/all_argmax/all_argmax.hpp"

namespace fftune::all_argmax {
namespace {

OpFacts facts() {
  return {.name = "all-argmax",
          .summary =
              "the best of the ids that the ranks of a group chose, each from its slice of "
              "the vocabulary",
          .passes = {"fwd"},
          .sizes =
              {token_count("m", "tokens", {1, 16, 64}, {1, 16}, 65536),
               {.name = "vocab", .help = "ids of a rank's slice", .max = 1 << 27, .example = 64128},
               {.name = "ranks",
                .help = "ranks of the group",
                .max = GroupTable::most_ranks,
                .example = 2}},
          .options = {{.name = "link",
                       .help = "peers: through a group's memory; loopback: one rank plays all, "
                               "with equal ids and logits; nccl: between hosts, not supported",
                       .choices = {"loopback", "peers", "nccl"},
                       .rare = true}},
          .families = {cuda_families, cpu_families}};
}

class AllArgmax final : public DescribedOp {
 public:
  AllArgmax() : DescribedOp(facts()) {}

  std::vector<DType> dtypes(DeviceKind) const override { return {DType::f32}; }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    const std::int64_t m = problem.size("m"), vocab = problem.size("vocab");
    TensorSpec ids{"ids", DType::i32, {m}, Role::input};
    ids.draw = [vocab](std::uint64_t seed, std::span<double> values) {
      for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = static_cast<double>((seed + 7 * i) % static_cast<std::uint64_t>(vocab));
    };
    std::vector<TensorSpec> tensors{std::move(ids), {"logit", DType::f32, {m}, Role::input, 1}};
    if (!form_of(problem).loopback) tensors.push_back(all_reduce::group_tensor());
    tensors.push_back({"best_ids", DType::i32, {m}, Role::output});
    tensors.push_back({"best_logit", DType::f32, {m}, Role::output, 1});
    return tensors;
  }

  std::vector<StageSpec> stages(const Problem& problem) const override {
    StageSpec stage = whole_stage(stage_forward, tensors(problem));
    stage.flops = static_cast<double>(problem.size("m") * (problem.size("ranks") - 1));
    return {stage};
  }

  void reference(const Problem&, std::size_t, ReferenceTensors& tensors, Parallel&) const override {
    // All ranks have equal logits: the first one's id is the best.
    tensors["best_ids"] = tensors.at("ids");
    tensors["best_logit"] = tensors.at("logit");
  }
};

}  // namespace

all_reduce::Form form_of(const Problem& problem) {
  all_reduce::Form form;
  form.m = problem.size("m");
  form.d = 2;
  form.ranks = static_cast<int>(problem.size("ranks"));
  form.dtype = DType::f32;
  form.loopback = all_reduce::is_loopback(problem);
  return form;
}

}  // namespace fftune::all_argmax

const fftune::Op& fftune::all_argmax_op() {
  static const all_argmax::AllArgmax op;
  return op;
}
