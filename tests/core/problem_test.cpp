#include "core/problem.hpp"

#include "core/error.hpp"
#include "support/catch.hpp"

using namespace fftune;

TEST_CASE("a problem has one canonical text") {
  const Problem problem{
      "ffn", "fwd", DType::bf16, {{"m", 16}, {"h", 2048}, {"d", 1024}}, {{"act", "silu"}}};
  REQUIRE(problem.text() == "ffn/fwd bf16 act=silu d=1024 h=2048 m=16");
  REQUIRE(problem.with_size("m", 32).size("m") == 32);
  REQUIRE(problem.with_size("m", 16) == problem);
  REQUIRE_THROWS_AS(problem.size("n"), Error);
  REQUIRE_THROWS_AS(problem.option("bias"), Error);
}
