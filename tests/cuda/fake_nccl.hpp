// A stand-in for NCCL whose ranks need no peers, for the tests.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

namespace fftune::testing {

struct FakeNccl {
  struct Sum {
    const void* from;
    void* to;
    std::size_t elements;
    int type, operation;
    void* stream;
  };
  std::mutex mutex;  // of what follows
  std::string failing_call;
  std::vector<std::array<std::byte, 128>> ids;  // with which ranks came
  std::vector<Sum> sums;
  // A call that blocks ends when this is false again; a sum, when its communicator is aborted too.
  // The end of a communicator blocks while a graph has its sums.
  std::atomic<bool> blocks_init = false, blocks_sums = false, blocks_end = false;
  std::atomic<bool> has_async_error = false;
  std::atomic<int> live = 0, aborted = 0;  // communicators
};

}  // namespace fftune::testing
