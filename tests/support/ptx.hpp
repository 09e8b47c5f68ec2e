// The PTX of kernels for sm_90a, and what it says about shared memory that threads, TMA and wgmma
// access in turn.
#pragma once

#include <string>
#include <vector>

#include "device/program.hpp"
#include "device/sources.hpp"

namespace fftune::test {

/// The PTX of the program's kernels, which is in their images. Throws Error(unavailable) without
/// NVRTC.
std::string ptx_of(const Program& program, const SourceSet& sources);

struct FenceRules {
  /// Without it the order of the text is the only way: where a fence and the read depend on the
  /// same condition.
  bool follows_branches = true;
  /// Threads pass rows that they wrote to TMA, by an arrival at a barrier: the fence is before it.
  bool hands_over = false;
};

/// Reads of shared memory by TMA or wgmma that may miss what threads wrote there: on some way to
/// them, loops aside, no proxy fence is behind the writes. A thread writes and reads behind the
/// same wait. Rows that cp.async copies come with a barrier, so that each wait for one needs a
/// fence before the MMAs.
std::vector<std::string> unfenced_reads(const std::string& ptx, const FenceRules& rules);

/// Accesses to global memory by TMA, in the order of the text, that may come before writes of other
/// threads which this thread has waited for; and releases that may come before sums by TMA which it
/// has waited for. A proxy fence is missing in between.
std::vector<std::string> unfenced_global_accesses(const std::string& ptx);

/// Whether a thread that loads by TMA waits at a barrier behind its last load, on every way to its
/// end. In a cluster a CTA may otherwise end while others load into it or arrive at its barriers.
bool waits_behind_loads(const std::string& ptx);

}  // namespace fftune::test
