// Ranks of a group as threads of a test.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace fftune::test {

/// The text that each rank's call of `work` returned, or that of its exception. Catch's assertions
/// are not for threads: compare it behind them.
inline std::vector<std::string> on_threads(int ranks,
                                           const std::function<std::string(int rank)>& work) {
  std::vector<std::string> results(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      auto& own = results[static_cast<std::size_t>(rank)];
      try {
        own = work(rank);
      } catch (const std::exception& error) {
        own = error.what();
      }
    });
  for (auto& thread : threads) thread.join();
  return results;
}

}  // namespace fftune::test
