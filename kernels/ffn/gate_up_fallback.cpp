#include "kernels/ffn/fallback_family.hpp"
#include "kernels/ffn/families.hpp"

namespace fftune::ffn {

const Family& gate_up_fallback_family() {
  static const FallbackFamily family(
      CudaStage::gate_up, "gate_up_fallback",
      "hidden for any sizes, alignment and element type; no claim to speed");
  return family;
}

}  // namespace fftune::ffn
