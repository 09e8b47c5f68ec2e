// The rules by which frequencies are computed.
#include <cmath>
#include <numbers>

#include "rope/problems.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

rope::Frequencies frequencies(std::map<std::string, std::string> options, std::int64_t dim = 128) {
  return rope::frequencies_of(rope_problem(DeviceKind::cpu, "fwd", DType::f32,
                                           {{"s", 4}, {"b", 1}, {"heads", 1}, {"dim", dim}},
                                           std::move(options)));
}

}  // namespace

TEST_CASE("base: a geometric series, stretched by the factor") {
  const auto plain = frequencies({{"angles", "base"}});
  REQUIRE(plain.values.size() == 64);
  CHECK(plain.values[0] == 1.0f);
  CHECK(plain.values[32] == 0.01f);
  CHECK(plain.values[16] == 0.1f);
  CHECK(plain.scale == 1.0f);
  const auto stretched = frequencies({{"angles", "base"}, {"factor", "4"}, {"scale", "2"}});
  for (std::size_t j = 0; j < 64; ++j) CHECK(stretched.values[j] == plain.values[j] / 4);
  CHECK(stretched.scale == 2.0f);
}

TEST_CASE("llama3: long wavelengths are stretched, short ones are not, and between is between") {
  const auto plain = frequencies({{"angles", "base"}, {"base", "500000"}});
  const auto scaled = frequencies({{"angles", "llama3"}, {"base", "500000"}, {"factor", "8"}});
  int stretched = 0, alone = 0, between = 0;
  for (std::size_t j = 0; j < 64; ++j) {
    const double wavelength = 2 * std::numbers::pi / plain.values[j];
    CAPTURE(j, wavelength);
    if (wavelength > 8192) {
      CHECK(scaled.values[j] == Approx(plain.values[j] / 8));
      ++stretched;
    } else if (wavelength < 2048) {
      CHECK(scaled.values[j] == plain.values[j]);
      ++alone;
    } else {
      const double smooth = (8192 / wavelength - 1) / 3;
      CHECK(scaled.values[j] ==
            Approx((1 - smooth) * plain.values[j] / 8 + smooth * plain.values[j]).epsilon(1e-5));
      ++between;
    }
  }
  // For Llama 3.1's 64 pairs.
  CHECK(alone == 29);
  CHECK(between == 6);
  CHECK(stretched == 29);
}

TEST_CASE("yarn: between the rotations of beta-fast and beta-slow the frequency is interpolated") {
  const auto plain = frequencies({{"angles", "base"}});
  const auto scaled = frequencies({{"angles", "yarn"}, {"factor", "16"}, {"context", "4096"}});
  // pair_of(32) = 64 ln(4096 / 64 pi) / ln(10000) = 20.94, pair_of(1) = 45.03.
  for (std::size_t j = 0; j <= 20; ++j) CHECK(scaled.values[j] == plain.values[j]);
  for (std::size_t j = 46; j < 64; ++j) CHECK(scaled.values[j] == Approx(plain.values[j] / 16));
  const double alone = 1 - (33.0 - 20) / (46 - 20);
  CHECK(scaled.values[33] ==
        Approx(plain.values[33] * alone + plain.values[33] / 16 * (1 - alone)).epsilon(1e-5));
  CHECK(scaled.scale == Approx(0.1 * std::log(16.0) + 1));
  CHECK(frequencies({{"angles", "yarn"}}).scale == 1.0f);
}
