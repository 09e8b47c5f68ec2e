#include "kernels/ffn/families.hpp"
#include "kernels/ffn/wgmma_family.hpp"

namespace fftune::ffn {

const Family& gate_up_sm90_family() {
  static const WgmmaFamily family(
      CudaStage::gate_up, "gate_up_sm90",
      "hidden = act(x w_gate^T) * (x w_up^T) in one pass over x, with TMA, wgmma and clusters");
  return family;
}

}  // namespace fftune::ffn
