#include "kernels/attention/attention.hpp"

namespace fftune::attention {

std::vector<Baseline> baselines(const Problem&, const DeviceFacts&) {
  return {};
}

}  // namespace fftune::attention
