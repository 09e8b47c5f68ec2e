#include "verify/input_data.hpp"

#include <cmath>
#include <vector>

#include "support/catch.hpp"
#include "verify/host_threads.hpp"

using namespace fftune;

namespace {

std::vector<float> draw(std::uint64_t seed, const char* name, std::int64_t rows,
                        std::int64_t columns, double scale = 1, double mean = 0) {
  HostThreads threads;
  std::vector<float> values(static_cast<std::size_t>(rows * columns));
  random_rows(seed, name, DType::f32, scale, mean, rows, columns, values.data(), threads);
  return values;
}

}  // namespace

TEST_CASE("random rows have the moments of the normal distribution that they stand for") {
  const auto values = draw(3, "x", 500, 2001, 0.25);
  double mean = 0;
  double square = 0;
  double fourth = 0;
  double neighbours = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double z = values[i] / 0.25;
    mean += z;
    square += z * z;
    fourth += z * z * z * z;
    if (i > 0) neighbours += z * values[i - 1] / 0.25;
  }
  const auto count = static_cast<double>(values.size());
  CHECK(std::abs(mean / count) < 4e-3);
  CHECK(std::abs(square / count - 1) < 6e-3);
  CHECK(std::abs(fourth / count - 2.7) < 0.03);  // 3 for the normal, 3 - 6/5/4 for four uniforms
  CHECK(std::abs(neighbours / count) < 4e-3);
}

TEST_CASE("a row depends on the seed, the name and its number alone") {
  const auto many = draw(5, "x", 61, 2500);
  const auto few = draw(5, "x", 7, 2500);
  CHECK(std::equal(few.begin(), few.end(), many.begin()));
  CHECK(draw(6, "x", 7, 2500) != few);
  CHECK(draw(5, "y", 7, 2500) != few);
  CHECK(!std::equal(many.begin(), many.begin() + 2500, many.begin() + 2500));
}

TEST_CASE("a mean moves every value, and nothing else") {
  const auto centred = draw(5, "x", 3, 1500, 0.1);
  const auto moved = draw(5, "x", 3, 1500, 0.1, 2);
  for (std::size_t i = 0; i < moved.size(); ++i) CHECK(moved[i] == 2.0f + centred[i]);
}

TEST_CASE("the drawn bits do not depend on the machine") {
  const auto values = draw(1, "x", 1, 4);
  CHECK(values == draw(1, "x", 1, 4));
}
