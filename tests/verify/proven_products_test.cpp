#include "verify/host_threads.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "cpu/blas.hpp"
#include "support/catch.hpp"
#include "support/host_backend.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

struct Matrices {
  std::vector<double> a, b, c;
  DoubleProduct product;
};

std::vector<double> random_values(std::int64_t count, std::mt19937& random) {
  std::normal_distribution<double> normal;
  std::vector<double> values(static_cast<std::size_t>(count));
  for (double& value : values) value = normal(random);
  return values;
}

void multiply_here(const DoubleProduct& p) {
  dgemm(p.m, p.n, p.k, {p.a, p.a_transposed ? p.m : p.k, p.a_transposed},
        {p.b, p.b_transposed ? p.n : p.k, p.b_transposed}, 0, p.c, p.n);
}

/// A device whose products are right but for what `spoil` does to them.
class MultiplyingBackend final : public HostBackend {
 public:
  explicit MultiplyingBackend(std::function<void(const DoubleProduct&)> spoil = {})
      : spoil_(std::move(spoil)) {}
  bool multiply(const DoubleProduct& product) override {
    ++calls;
    multiply_here(product);
    if (spoil_) spoil_(product);
    return true;
  }
  int calls = 0;

 private:
  std::function<void(const DoubleProduct&)> spoil_;
};

}  // namespace

TEST_CASE("a product is known from one with a single element that is hardly wrong") {
  HostThreads threads;
  std::mt19937 random(1);
  for (int round = 0; round < 40; ++round) {
    const std::int64_t m = random() % 300 + 1, n = random() % 900 + 1, k = random() % 500 + 1;
    const auto a = random_values(m * k, random), b = random_values(n * k, random);
    std::vector<double> c(static_cast<std::size_t>(m * n));
    const DoubleProduct product{
        m, n, k, a.data(), b.data(), random() % 2 == 0, random() % 2 == 0, c.data()};
    CAPTURE(m, n, k, product.a_transposed, product.b_transposed);
    multiply_here(product);
    CHECK(is_product(product, threads));
    double& element = c[random() % c.size()];
    const double right = element;
    element = right + 1e-7 * std::sqrt(static_cast<double>(k));
    CHECK_FALSE(is_product(product, threads));
    element = std::nan("");
    CHECK_FALSE(is_product(product, threads));
    element = right;
    if (m > 1 && n > 1) {
      std::swap(c.front(), c.back());
      CHECK_FALSE(is_product(product, threads));
    }
  }
}

TEST_CASE("the device's products are taken as long as they are right") {
  std::mt19937 random(2);
  const auto a = random_values(50 * 30, random), b = random_values(70 * 30, random);
  std::vector<double> c(50 * 70);
  const DoubleProduct product{50, 70, 30, a.data(), b.data(), false, false, c.data()};

  MultiplyingBackend right;
  ProvenProducts proven(right);
  CHECK(proven.multiply(product));
  CHECK(proven.multiply(product));
  CHECK(right.calls == 2);

  MultiplyingBackend wrong([](const DoubleProduct& p) { p.c[77] += 1e-6; });
  ProvenProducts unproven(wrong);
  CHECK_FALSE(unproven.multiply(product));
  CHECK_FALSE(unproven.multiply(product));
  CHECK(wrong.calls == 1);

  HostBackend none;
  CHECK_FALSE(ProvenProducts(none).multiply(product));
}
