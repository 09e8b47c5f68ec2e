#ifndef NDEBUG
#include "api/live_handles.hpp"

#include <cassert>
#include <cstdio>
#include <mutex>
#include <unordered_set>

namespace fftune {
namespace {

struct LiveHandles {
  std::mutex mutex;
  std::unordered_set<const void*> handles;
};

/// Never destroyed: handles may be, by the destructors of other libraries' objects.
LiveHandles& live() {
  static auto* const handles = new LiveHandles;
  return *handles;
}

}  // namespace

void began(const void* handle) {
  const std::lock_guard lock(live().mutex);
  live().handles.insert(handle);
}

void ended(const void* handle, const char* function) {
  const std::lock_guard lock(live().mutex);
  const bool was_live = live().handles.erase(handle) > 0;
  if (!was_live)
    std::fprintf(stderr, "fftune: %s: %p is no live handle: it was destroyed before\n", function,
                 handle);
  assert(was_live);
}

}  // namespace fftune
#endif
