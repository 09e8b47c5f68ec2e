// qkv with tokens that the op quantises to e4m3.
#include <random>

#include "cpu/open.hpp"
#include "kernels/qkv/qkv.hpp"
#include "support/op_run.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

std::vector<Problem> forms_of(std::int64_t m, std::int64_t d, std::int64_t dim, DType dtype) {
  std::vector<Problem> problems;
  for (const char* quantise : {"token", "block"})
    for (const char* cache : {"no", "yes"})
      problems.push_back({"qkv",
                          "fwd",
                          dtype,
                          {{"m", m}, {"d", d}, {"heads", 4}, {"kv-heads", 2}, {"dim", dim}},
                          {{"quantise", quantise},
                           {"bias", "yes"},
                           {"norm", "yes"},
                           {"rotation", "halves"},
                           {"cache", cache}}});
  return problems;
}

}  // namespace

TEST_CASE("qkv with quantised tokens is right on the CPU", "[quantise]") {
  const auto backend = open_cpu();
  std::mt19937_64 random(1);
  for (const DType dtype : {DType::f32, DType::bf16})
    verify_families(*backend, qkv_op(), forms_of(9, 130, 32, dtype), random, 1);
}

TEST_CASE("qkv with quantised tokens is right on a GPU", "[quantise][gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(3);
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (const std::int64_t m : {1, 77})
      verify_families(*backend, qkv_op(), forms_of(m, 272, 64, dtype), random, 2);
}
