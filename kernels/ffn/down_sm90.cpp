#include "kernels/ffn/families.hpp"
#include "kernels/ffn/wgmma_family.hpp"

namespace fftune::ffn {

const Family& down_sm90_family() {
  static const WgmmaFamily family(CudaStage::down, "down_sm90",
                                  "y = hidden w_down^T with TMA, wgmma and clusters");
  return family;
}

}  // namespace fftune::ffn
