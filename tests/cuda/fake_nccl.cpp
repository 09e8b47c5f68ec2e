#include "cuda/fake_nccl.hpp"

#include <chrono>
#include <cstring>
#include <thread>

namespace {

using fftune::testing::FakeNccl;

FakeNccl state;

struct Id {
  std::array<std::byte, 128> bytes;
};

struct Communicator {
  std::atomic<bool> aborted = false;
};

constexpr int success = 0, system_error = 2, remote_error = 6;

int outcome(const char* call) {
  const std::lock_guard lock(state.mutex);
  return state.failing_call == call ? system_error : success;
}

void wait_while(const std::atomic<bool>& blocks, const std::atomic<bool>* ends = nullptr) {
  while (blocks && !(ends && *ends)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

extern "C" {

FakeNccl* fftune_fake_nccl() {
  return &state;
}

int ncclGetUniqueId(Id* id) {
  static std::atomic<int> next = 1;
  std::memset(id, next++, sizeof *id);
  return outcome("ncclGetUniqueId");
}

int ncclCommInitRank(void** communicator, int, Id id, int) {
  wait_while(state.blocks_init);
  if (const int status = outcome("ncclCommInitRank"); status != success) return status;
  const std::lock_guard lock(state.mutex);
  state.ids.push_back(id.bytes);
  *communicator = new Communicator;
  ++state.live;
  return success;
}

// Communicators that are aborted stay in memory, as another thread may be in a sum.
int ncclCommAbort(void* communicator) {
  static_cast<Communicator*>(communicator)->aborted = true;
  wait_while(state.blocks_end);
  --state.live;
  ++state.aborted;
  return success;
}

int ncclCommDestroy(void* communicator) {
  wait_while(state.blocks_end);
  delete static_cast<Communicator*>(communicator);
  --state.live;
  return success;
}

int ncclCommGetAsyncError(void*, int* status) {
  *status = state.has_async_error ? remote_error : success;
  return success;
}

int ncclAllReduce(const void* from, void* to, std::size_t elements, int type, int operation,
                  void* communicator, void* stream) {
  const auto& own = *static_cast<Communicator*>(communicator);
  wait_while(state.blocks_sums, &own.aborted);
  if (own.aborted) return remote_error;
  const std::lock_guard lock(state.mutex);
  state.sums.push_back({from, to, elements, type, operation, stream});
  return success;
}

const char* ncclGetErrorString(int status) {
  return status == system_error ? "unhandled system error" : "remote process exited";
}

const char* ncclGetLastError(void*) {
  return "no way\nto the peer";
}
}
