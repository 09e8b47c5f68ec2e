// Random problems against the definition, set for set, on every family of a device; and the CUDA
// spaces.
#include "ngram_block/problems.hpp"
#include "support/fuzz_cases.hpp"

namespace fftune::test {

TEST_CASE("the longest rows and the largest vocabulary are right on the GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
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

const FuzzCases<ngram_block_op, random_ngram_block> ngram_block_cases;

}  // namespace fftune::test
