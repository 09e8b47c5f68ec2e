#include "cpu/blas.hpp"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "support/catch.hpp"

using namespace fftune;

TEST_CASE("sgemm multiplies by the transpose, with strides and beta") {
  const std::vector<float> a{1, 2, -1, 3, 4, -1};  // [2,2] in rows of 3
  const std::vector<float> b{5, 6, 7, 8, 9, 10};   // [3,2]
  std::vector<float> c{1, 1, 1, 99, 1, 1, 1, 99};  // [2,3] in rows of 4
  sgemm(2, 3, 2, {a.data(), 3}, {b.data(), 2}, 0, c.data(), 4);
  REQUIRE(c == std::vector<float>{17, 23, 29, 99, 39, 53, 67, 99});
  sgemm(2, 3, 2, {a.data(), 3}, {b.data(), 2}, 1, c.data(), 4);
  REQUIRE(c == std::vector<float>{34, 46, 58, 99, 78, 106, 134, 99});
}

TEST_CASE("a lease of another thread count waits for those that hold") {
  auto first = std::make_unique<BlasThreads>(1);
  auto again = std::make_unique<BlasThreads>(1);  // the same number joins
  std::atomic<bool> second_holds{false};
  std::thread other([&] {
    const BlasThreads second(2);
    second_holds = true;
  });
  first.reset();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  REQUIRE(!second_holds);
  again.reset();
  other.join();
  REQUIRE(second_holds);
}
