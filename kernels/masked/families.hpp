// The families of masked-linear and masked-ffn, those of one engine together.
#pragma once

#include <vector>

#include "registry/family.hpp"

namespace fftune::masked {

std::vector<const Family*> linear_sm90_families();
std::vector<const Family*> linear_sm90_sum_families();
std::vector<const Family*> linear_sm80_families();
std::vector<const Family*> linear_sm80_sum_families();
std::vector<const Family*> linear_fallback_families();
std::vector<const Family*> linear_cpu_blas_families();
std::vector<const Family*> linear_cpu_blas_sum_families();
std::vector<const Family*> linear_cpu_plain_families();

std::vector<const Family*> ffn_sm90_families();
std::vector<const Family*> ffn_sm90_sum_families();
std::vector<const Family*> ffn_sm80_families();
std::vector<const Family*> ffn_sm80_sum_families();
std::vector<const Family*> ffn_fallback_families();
std::vector<const Family*> ffn_cpu_blas_families();
std::vector<const Family*> ffn_cpu_blas_sum_families();
std::vector<const Family*> ffn_cpu_plain_families();

}  // namespace fftune::masked
