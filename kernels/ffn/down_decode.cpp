#include "kernels/ffn/decode_family.hpp"
#include "kernels/ffn/families.hpp"

namespace fftune::ffn {

const Family& down_decode_family() {
  static const DecodeFamily family(CudaStage::down, "down_decode",
                                   "y for up to 16 tokens, at the speed of reading w_down once");
  return family;
}

}  // namespace fftune::ffn
