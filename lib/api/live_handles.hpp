// Which handles of the C API are live, in builds with assertions: a second destroy is named there.
#pragma once

namespace fftune {

#ifdef NDEBUG
inline void began(const void*) {}
inline void ended(const void*, const char*) {}
#else
/// A handle was created.
void began(const void* handle);
/// It is destroyed by `function`. Ends the process by a failed assertion if it is not live.
void ended(const void* handle, const char* function);
#endif

}  // namespace fftune
