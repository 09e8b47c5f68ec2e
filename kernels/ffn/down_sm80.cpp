#include "kernels/ffn/families.hpp"
#include "kernels/ffn/mma_sync_family.hpp"

namespace fftune::ffn {

const Family& down_sm80_family() {
  static const MmaSyncFamily family(CudaStage::down, "down_sm80",
                                    "y = hidden w_down^T with mma.sync tiles");
  return family;
}

}  // namespace fftune::ffn
