// Whether this process was forked off since something was made that does not survive fork():
// threads, locks, a CUDA context.
#pragma once

namespace fftune {

/// One more in every forked child, from the first call on. A few nanoseconds.
int fork_count();

}  // namespace fftune
