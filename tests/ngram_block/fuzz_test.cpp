// Random problems against the definition, set for set, on every family of a device; and the CUDA
// spaces.
#include "ngram_block/problems.hpp"

using namespace fftune;
using namespace fftune::test;

TEST_CASE("ten thousand small random problems are right on the CPU") {
  verify_small_on_cpu(ngram_block_op(), random_ngram_block);
}

TEST_CASE("larger random problems are right on the CPU") {
  verify_larger_on_cpu(ngram_block_op(), random_ngram_block);
}

TEST_CASE("500 random problems are right on the GPU", "[gpu]") {
  verify_on_gpu(ngram_block_op(), random_ngram_block);
}

TEST_CASE("a few small problems are right on the GPU", "[gpu][small]") {
  verify_small_on_gpu(ngram_block_op(), random_ngram_block);
}

TEST_CASE("the longest rows and the largest vocabulary are right on the GPU", "[gpu]") {
  const auto backend = open_first_cuda();
  if (!backend) FFTUNE_SKIP("there is no CUDA device here");
  Draw draw(5);
  for (const char* ids : {"i32", "i64"})
    for (const bool shares : {false, true}) {
      Problem problem{"ngram-block",
                      "fwd",
                      DType::bf16,
                      {{"b", 2}, {"len", 131072}, {"vocab", 524288}},
                      {{"ids", ids}, {"ngrams", "own"}}};
      if (shares) problem.sizes.insert({{"prefix", 131072}, {"beams", 2}});
      problem = canonical(ngram_block_op(), problem, DeviceKind::cuda);
      REQUIRE(verify_variants(*backend, ngram_block_op(), problem, draw.random(), 6) > 0);
    }
}

TEST_CASE("every CUDA family has a space with its default in it, and legal launches") {
  check_cuda_spaces(ngram_block_op(), random_ngram_block);
}
