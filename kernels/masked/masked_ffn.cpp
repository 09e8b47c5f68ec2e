#include <utility>

#include "kernels/common/activation.hpp"
#include "kernels/masked/baselines.hpp"
#include "kernels/masked/families.hpp"
#include "kernels/masked/masked_op.hpp"

namespace fftune {
namespace masked {
namespace {

class MaskedFfn final : public MaskedOp {
 public:
  std::string_view name() const override { return "masked-ffn"; }
  std::string_view summary() const override {
    return "gated feed-forward network of two experts: ffn with the true one's weights where "
           "mask_i, else with the false one's";
  }

  std::vector<SizeField> sizes() const override {
    return {tokens(),
            {.name = "d", .help = "embedding size"},
            {.name = "h", .help = "intermediate size", .example = 2048}};
  }
  std::vector<OptionField> options() const override {
    std::vector<OptionField> options{{"act", "activation of the gate", activation_names()},
                                     mask_option()};
    for (OptionField& field : gated_save_options(", in the order of the mask"))
      options.push_back(std::move(field));
    options.push_back(accumulate_option("the weights"));
    return options;
  }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    return ffn_tensors(problem);
  }

  std::vector<const Family*> families() const override {
    return all_of({ffn_sm90_families(), ffn_sm90_sum_families(), ffn_sm80_families(),
                   ffn_sm80_sum_families(), ffn_fallback_families(), ffn_cpu_blas_families(),
                   ffn_cpu_blas_sum_families(), ffn_cpu_plain_families()});
  }
  std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) const override {
    return ffn_baselines(problem, facts);
  }
};

}  // namespace
}  // namespace masked

const Op& masked_ffn_op() {
  static const masked::MaskedFfn op;
  return op;
}

}  // namespace fftune
