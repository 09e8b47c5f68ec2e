#include "moe/problems.hpp"

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

}  // namespace fftune::test
