#include "device/parallel.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <numeric>

#include "support/catch.hpp"
#include "verify/host_threads.hpp"

using namespace fftune;

TEST_CASE("a large vector is all zeros, whatever its memory held before") {
  HostThreads threads;
  for (const std::size_t count : {0U, 1U, 1000U, 2097151U, 2097152U, 2097153U, 5000001U})
    for (int round = 0; round < 2; ++round) {
      auto values = large_vector<double>(count, threads);
      CAPTURE(count, round);
      REQUIRE(values.size() == count);
      CHECK(std::all_of(values.begin(), values.end(), [](double value) { return value == 0; }));
      std::fill(values.begin(), values.end(), 7);
    }
}

TEST_CASE("a large copy is the same") {
  HostThreads threads;
  for (const std::size_t count : {0U, 5U, 131072U, 3000001U}) {
    std::vector<double> values(count);
    std::iota(values.begin(), values.end(), 1);
    CHECK(large_copy(values, threads) == values);
  }
}

TEST_CASE("every row of a matrix is in one block") {
  HostThreads threads;
  for (const std::size_t rows : {0U, 1U, 61U, 5000U})
    for (const std::size_t columns : {1U, 40U, 300000U}) {
      std::vector<std::atomic<int>> visits(rows);
      for_each_row(rows, columns, threads, [&](std::size_t row) { ++visits[row]; });
      CHECK(
          std::all_of(visits.begin(), visits.end(), [](const auto& times) { return times == 1; }));
    }
}
