#include "verify/comparison.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "support/catch.hpp"
#include "verify/host_threads.hpp"

using namespace fftune;

namespace {

std::vector<const double*> rows_of(const std::vector<double>& values, std::int64_t columns) {
  std::vector<const double*> rows;
  for (auto first = values.begin(); first < values.end(); first += columns) rows.push_back(&*first);
  return rows;
}

}  // namespace

TEST_CASE("the difference of random matrices is what a plain loop finds") {
  HostThreads threads;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (int round = 0; round < 20; ++round) {
    const auto rows = static_cast<std::int64_t>(random() % 300 + 1);
    const auto columns = static_cast<std::int64_t>(random() % 3000 + 1);
    const auto period = std::min<std::int64_t>(rows, 61);
    std::vector<double> reference(static_cast<std::size_t>(period * columns));
    for (auto& value : reference) value = normal(random);
    std::vector<float> out(static_cast<std::size_t>(rows * columns));
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = static_cast<float>(reference[i % reference.size()]) + 1e-3F * normal(random);
    const std::size_t wrong = random() % out.size();
    out[wrong] += 1;
    double squares = 0;
    for (std::size_t i = 0; i < out.size(); ++i)
      squares += std::pow(out[i] - reference[i % reference.size()], 2);

    const auto found = compare({DType::f32, rows, columns, period}, out.data(),
                               rows_of(reference, columns), 0, 0.5, threads);
    CHECK(std::abs(found.norm / std::sqrt(squares) - 1) < 1e-9);
    CHECK(found.outliers == 1);
    CHECK(found.first_outlier == static_cast<std::int64_t>(wrong));
    CHECK(found.unwritten == 0);
  }
}

TEST_CASE("the absolute bound of a row is multiplied by its factor") {
  HostThreads threads;
  const std::vector<double> reference(12, 1);
  std::vector<float> out(24, 1);  // of each row of the reference two
  for (const std::size_t row : {0U, 1U, 2U, 5U}) out[row * 4 + 1] += 0.5F;
  const std::vector<double> factors{1, 3, 1};
  RepeatedRows shape{DType::f32, 6, 4, 3};
  const auto outliers = [&] {
    return compare(shape, out.data(), rows_of(reference, 4), 0, 0.2, threads).outliers;
  };
  CHECK(outliers() == 4);
  shape.factors = factors.data();
  CHECK(outliers() == 3);
}

TEST_CASE("the bound of an element has more room by what rounding changes in the reference") {
  HostThreads threads;
  const double nan = std::nan("");
  const std::vector<double> reference{1, 1, 1, nan, HUGE_VAL, 1};
  const std::vector<double> rounded{1, 1.5, 0.5, 2, HUGE_VAL, nan};
  const auto rounded_rows = rows_of(rounded, 6);
  RepeatedRows shape{DType::f32, 2, 6, 1};
  shape.rounded = &rounded_rows;
  const auto outliers = [&](const std::vector<float>& second) {
    std::vector<float> out{1, 1, 1, std::nanf(""), HUGE_VALF, 1};
    out.insert(out.end(), second.begin(), second.end());
    return compare(shape, out.data(), rows_of(reference, 6), 0, 0.2, threads).outliers;
  };
  const float none = std::nanf(""), infinity = HUGE_VALF;
  CHECK(outliers({1.1F, 1.6F, 0.4F, none, infinity, 1.1F}) == 0);
  CHECK(outliers({1.3F, 1.8F, 0.2F, none, infinity, 1.3F}) == 4);
  CHECK(outliers({1, 1, 1, 2, 1, none}) == 3);
}

TEST_CASE("NaN equals NaN alone, unless the place is independent of it") {
  HostThreads threads;
  const double nan = std::nan("");
  const std::vector<double> reference{1, nan, nan, HUGE_VAL, nan, 2};
  const std::vector<double> independent{nan, nan, 5, nan, 5, nan};
  const auto independent_rows = rows_of(independent, 6);
  RepeatedRows shape{DType::f32, 1, 6, 1};
  const auto outliers = [&](const std::vector<float>& out) {
    const auto found = compare(shape, out.data(), rows_of(reference, 6), 0, 0.5, threads);
    CHECK((found.norm > 0) == (found.outliers > 0));
    return found.outliers;
  };
  const float none = std::nanf(""), infinity = HUGE_VALF;
  CHECK(outliers({1, none, none, infinity, none, 2}) == 0);
  CHECK(outliers({1, 0, none, infinity, none, 2}) == 1);
  CHECK(outliers({1, infinity, none, infinity, none, 2}) == 1);
  CHECK(outliers({1, none, none, none, none, none}) == 2);
  CHECK(outliers({1, none, none, -infinity, none, 2}) == 1);
  CHECK(outliers({1, none, 5, infinity, none, 2}) == 1);
  shape.independent = &independent_rows;
  CHECK(outliers({1, none, 5, infinity, none, 2}) == 0);
  CHECK(outliers({1, none, 5, infinity, 6, 2}) == 1);
  CHECK(outliers({1, 5, none, infinity, none, 2}) == 1);
  // Numbers whose errors count belong to the norm that the errors are divided by.
  const std::vector<float> out{1, none, 5, HUGE_VALF, 4.75F, 2};
  const auto found = compare(shape, out.data(), rows_of(reference, 6), 0, 0.5, threads);
  CHECK(found.norm == Approx(0.25));
  CHECK(found.of_independent == Approx(std::sqrt(50.0)));
}

TEST_CASE("poison is counted in both element sizes") {
  HostThreads threads;
  for (const auto dtype : {DType::f32, DType::bf16, DType::fp16}) {
    const std::vector<double> reference(10, 0);
    std::vector<std::byte> out(1000 * 10 * dtype_bytes(dtype), std::byte{0});
    for (const std::size_t i : {137U, 9998U, 9999U})
      for (std::size_t byte = 0; byte < dtype_bytes(dtype); ++byte)
        out[i * dtype_bytes(dtype) + byte] = std::byte{0xff};
    const auto found =
        compare({dtype, 1000, 10, 1}, out.data(), rows_of(reference, 10), 0, 1, threads);
    CHECK(found.unwritten == 3);
    CHECK(found.first_unwritten == 137);
    CHECK(std::isinf(found.norm));
  }
}

TEST_CASE("the first difference of bytes is found, wherever it is") {
  HostThreads threads;
  std::vector<std::byte> a(1500000, std::byte{7});
  for (const std::size_t place : {0U, 1U, 262143U, 262144U, 1499999U}) {
    auto b = a;
    b[place] = std::byte{8};
    b.back() = std::byte{9};
    CHECK(first_difference(a.data(), b.data(), a.size(), threads) == place);
  }
  CHECK(first_difference(a.data(), a.data(), a.size(), threads) == a.size());
  CHECK(first_difference(a.data(), a.data(), 0, threads) == 0);
}

TEST_CASE("where neighbours are alike, an element's bound follows from their size") {
  HostThreads threads;
  // A row of ones, and one of thousandths with an error of a tenth of their size.
  std::vector<double> reference(16, 1.0);
  std::fill(reference.begin() + 8, reference.end(), 1e-3);
  std::vector<float> out(reference.begin(), reference.end());
  out[12] += 1e-4F;
  const auto outliers = [&](std::int64_t alike, double least) {
    RepeatedRows shape{DType::f32, 1, 16, 1};
    shape.alike = alike;
    shape.least_bound = least;
    return compare(shape, out.data(), rows_of(reference, 16), 0, 0.01, threads).outliers;
  };
  CHECK(outliers(0, 0) == 0);
  CHECK(outliers(8, 0) == 1);
  CHECK(outliers(8, 1e-3) == 0);
}

TEST_CASE("any number of neighbours may be alike") {
  HostThreads threads;
  std::vector<double> reference(6000, 1.0);
  std::fill(reference.begin() + 3000, reference.end(), 100.0);
  std::vector<float> out(reference.begin(), reference.end());
  out[2999] += 0.5F;
  out[3000] += 0.5F;
  RepeatedRows shape{DType::f32, 1, 6000, 1};
  shape.alike = 3000;
  const auto difference = compare(shape, out.data(), rows_of(reference, 6000), 0, 0.01, threads);
  CHECK(difference.outliers == 1);
  CHECK(difference.first_outlier == 2999);
}
