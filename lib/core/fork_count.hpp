// Effects of fork() on a process: locks and threads of others do not survive in the child, and work
// that is half done is torn there.
#pragma once

namespace fftune {

/// Forks between this process and the first one that called it, which tells whether something that
/// does not survive fork() was made here: threads, locks, a CUDA context. A few nanoseconds.
int fork_count();

/// Work that a fork() of another thread waits for, because a child could not go on with what it
/// leaves half done: tables that grow, and initialisations that run once. A fork() that waits goes
/// before work that has not begun. May be nested; a fork() within the work does not wait for it.
class UntornByFork {
 public:
  UntornByFork();
  ~UntornByFork();
  UntornByFork(const UntornByFork&) = delete;
  UntornByFork& operator=(const UntornByFork&) = delete;
};

}  // namespace fftune
