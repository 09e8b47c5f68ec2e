#include "moe/problems.hpp"

#include <random>
#include <utility>

#include "cpu/open.hpp"
#include "support/verify_variants.hpp"

namespace fftune::test {

Problem moe_problem(const MoeSizes& sizes, DType dtype, DeviceKind kind,
                    std::map<std::string, std::string> options, std::string pass) {
  Problem problem{"moe-ffn",
                  std::move(pass),
                  dtype,
                  {{"m", sizes.m},
                   {"d", sizes.d},
                   {"h", sizes.h},
                   {"experts", sizes.experts},
                   {"top-k", sizes.choices}},
                  std::move(options)};
  if (sizes.shared > 0) problem.sizes["shared"] = sizes.shared;
  return canonical(moe_ffn_op(), problem, kind);
}

void verify_experts(const std::vector<std::map<std::string, std::string>>& forms,
                    std::initializer_list<MoeSizes> all_sizes) {
  const auto backend = open_cpu();
  std::mt19937_64 random(1);
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const auto& options : forms)
      for (const MoeSizes& sizes : all_sizes)
        verify_families(*backend, moe_ffn_op(),
                        {moe_problem(sizes, dtype, DeviceKind::cpu, options)}, random, 1);
}

}  // namespace fftune::test
