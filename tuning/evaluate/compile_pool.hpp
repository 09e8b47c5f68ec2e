// Compiling many variants at once.
#pragma once

#include <cstddef>
#include <functional>

namespace fftune {

/// How many compilations run at once here: one a core, and at most one for each half gigabyte of
/// memory, which is what an optimising assembler may take.
unsigned compile_threads();

/// Calls task(i) for each i in [0, count) on up to `threads` threads, in order of i, until one
/// returns false; returns when all that were begun are done. Tasks must not throw.
void run_pool(std::size_t count, unsigned threads, const std::function<bool(std::size_t)>& task);

}  // namespace fftune
