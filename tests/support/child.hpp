// Work in a child of fork().
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include "support/catch.hpp"

namespace fftune::test {

/// 1 if work fails in a child of fork(), or takes longer than 20 s there, else 0.
template <class Work>
int fails_in_child(const Work& work) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    work();
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return status != 0 ? 1 : 0;
}

}  // namespace fftune::test
