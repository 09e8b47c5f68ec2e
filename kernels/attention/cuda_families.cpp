// The CUDA families of both passes, the fastest first.
#include "kernels/attention/families.hpp"

namespace fftune::attention {

std::vector<const Family*> cuda_families() {
  return {&attention_sm90_family(), &attention_bwd_sm90_family()};
}

}  // namespace fftune::attention
