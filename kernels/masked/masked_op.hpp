// What masked-linear and masked-ffn have in common as ops.
#pragma once

#include <initializer_list>

#include "kernels/common/op_fields.hpp"
#include "kernels/masked/masked.hpp"
#include "kernels/masked/stages.hpp"

namespace fftune::masked {

class MaskedOp : public Op {
 public:
  std::vector<std::string> passes() const final { return {"fwd", "bwd"}; }
  std::vector<DType> dtypes(DeviceKind kind) const final { return float_dtypes(kind); }
  std::string_view token_size() const final { return "m"; }

  std::vector<StageSpec> stages(const Problem& problem) const final {
    const auto tensors = this->tensors(problem);
    std::vector<StageSpec> stages;
    for (const GemmStage& stage : gemm_stages(problem))
      stages.push_back(stage_spec(stage.name, stage.gemm(problem), tensors));
    return stages;
  }

  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel& parallel) const final {
    masked::reference(stages_of(problem).at(stage), problem, tensors, parallel);
  }

 protected:
  static SizeField tokens() {
    return {.name = "m",
            .help = "tokens",
            .default_on_cuda = {256, 1024, 4096, 16384},
            .default_on_cpu = {16, 128, 512}};
  }
  /// The families of all kinds, one list.
  static std::vector<const Family*> all_of(
      std::initializer_list<std::vector<const Family*>> kinds) {
    std::vector<const Family*> all;
    for (const auto& some : kinds) all.insert(all.end(), some.begin(), some.end());
    return all;
  }
};

}  // namespace fftune::masked
