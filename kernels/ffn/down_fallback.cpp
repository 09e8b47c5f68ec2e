#include "kernels/ffn/fallback_family.hpp"
#include "kernels/ffn/families.hpp"

namespace fftune::ffn {

const Family& down_fallback_family() {
  static const FallbackFamily family(
      CudaStage::down, "down_fallback",
      "y for any sizes, alignment and element type; no claim to speed");
  return family;
}

}  // namespace fftune::ffn
