#include "kernels/ffn/decode_family.hpp"
#include "kernels/ffn/families.hpp"

namespace fftune::ffn {

const Family& gate_up_decode_family() {
  static const DecodeFamily family(
      CudaStage::gate_up, "gate_up_decode",
      "hidden for up to 16 tokens, at the speed of reading w_gate and w_up once");
  return family;
}

}  // namespace fftune::ffn
