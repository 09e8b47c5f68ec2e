#include "kernels/common/activation.hpp"

#include <cmath>

#include "core/error.hpp"
#include "support/catch.hpp"

using namespace fftune;

TEST_CASE("activations at known values") {
  struct Known {
    Activation activation;
    double x, value;
  };
  // silu and gelu-tanh from their formulas, gelu from x Phi(x) with tables of the normal
  // distribution: Phi(1) = 0.8413447460685429, Phi(-2) = 0.0227501319481792.
  const Known known[] = {
      {Activation::silu, 0, 0},
      {Activation::silu, 1, 0.7310585786300049},
      {Activation::silu, -2, -0.2384058440442351},
      {Activation::gelu, 0, 0},
      {Activation::gelu, 1, 0.8413447460685429},
      {Activation::gelu, -2, -0.0455002638963584},
      {Activation::gelu_tanh, 1, 0.8411919906082768},
      {Activation::gelu_tanh, -2, -0.0454023059122250},
      {Activation::relu, 3, 3},
      {Activation::relu, -3, 0},
      {Activation::none, -3, -3},
  };
  for (const auto& [activation, x, value] : known) {
    CAPTURE(static_cast<int>(activation), x);
    REQUIRE(std::abs(activate(activation, x) - value) < 1e-12);
  }
}

TEST_CASE("activation names and their values agree") {
  REQUIRE(activation_names().front() == "silu");
  REQUIRE(parse_activation("silu") == Activation::silu);
  REQUIRE(parse_activation("gelu") == Activation::gelu);
  REQUIRE(parse_activation("gelu-tanh") == Activation::gelu_tanh);
  REQUIRE(parse_activation("relu") == Activation::relu);
  REQUIRE(parse_activation("none") == Activation::none);
  REQUIRE_THROWS_AS(parse_activation("swish"), Error);
}
