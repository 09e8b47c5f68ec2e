// Which handles of the C API are live, in builds with assertions: what is called with one that was
// destroyed is named there.
#pragma once

namespace fftune {

#ifdef NDEBUG
inline void began(const void*) {}
inline void used(const void*, const char*) {}
inline void ended(const void*, const char*) {}
#else
/// A handle was created.
void began(const void* handle);
/// `function` was called with it. Ends the process by a failed assertion if it is not live.
void used(const void* handle, const char* function);
/// It is destroyed by `function`. Ends the process by a failed assertion if it is not live.
void ended(const void* handle, const char* function);
#endif

}  // namespace fftune
