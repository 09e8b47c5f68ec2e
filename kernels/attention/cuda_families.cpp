// The CUDA families of both passes, the fastest first.
#include "kernels/attention/families.hpp"

namespace fftune::attention {

std::vector<const Family*> cuda_families() {
  return {&attention_decode_family(),  &attention_sm90_family(),     &attention_sm80_family(),
          &attention_simt_family(),    &attention_bwd_sm90_family(), &attention_bwd_sm80_family(),
          &attention_bwd_simt_family()};
}

}  // namespace fftune::attention
