#include "kernels/ffn/families.hpp"
#include "kernels/ffn/mma_sync_family.hpp"

namespace fftune::ffn {

const Family& gate_up_sm80_family() {
  static const MmaSyncFamily family(
      CudaStage::gate_up, "gate_up_sm80",
      "hidden = act(x w_gate^T) * (x w_up^T) in one pass over x, with mma.sync tiles");
  return family;
}

}  // namespace fftune::ffn
