#include "api/handles.hpp"

#ifndef NDEBUG

#include <cassert>
#include <cstdio>
#include <mutex>
#include <unordered_set>

#include "core/fork.hpp"

namespace fftune {
namespace {

/// Its mutex is locked in work that a fork() waits for: a child calls the API too.
struct LiveHandles {
  std::mutex mutex;
  std::unordered_set<const void*> handles;
};

/// Never destroyed: handles may be, by the destructors of other libraries' objects.
LiveHandles& live() {
  static auto* const handles = new LiveHandles;
  return *handles;
}

void require(bool was_live, const void* handle, const char* function) {
  if (!was_live)
    std::fprintf(stderr, "fftune: %s: %p is not a live handle: it was destroyed before\n", function,
                 handle);
  assert(was_live);
}

}  // namespace

void began(const void* handle) {
  const UntornByFork whole;
  const std::lock_guard lock(live().mutex);
  live().handles.insert(handle);
}

void used(const void* handle, const char* function) {
  const UntornByFork whole;
  const std::lock_guard lock(live().mutex);
  require(live().handles.contains(handle), handle, function);
}

void ended(const void* handle, const char* function) {
  const UntornByFork whole;
  const std::lock_guard lock(live().mutex);
  require(live().handles.erase(handle) > 0, handle, function);
}

}  // namespace fftune
#endif
