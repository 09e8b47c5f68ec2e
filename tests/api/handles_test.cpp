// Handles that are destroyed twice: a build with assertions says which.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <string>

#include "fftune/fftune.h"
#include "support/catch.hpp"

#ifndef NDEBUG

TEST_CASE("a second destroy is named and ends the process") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  fftune_context* context = nullptr;
  REQUIRE(fftune_context_create(-1, nullptr, &context) == FFTUNE_OK);
  fftune_plan* plan = nullptr;
  const auto problem = R"({"op":"ffn","m":1,"d":8,"h":8})";
  REQUIRE(fftune_plan_create(context, problem, &plan) == FFTUNE_OK);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(ends[1], STDERR_FILENO);
    ::signal(SIGABRT, SIG_DFL);
    fftune_plan_destroy(plan);
    fftune_plan_destroy(plan);
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string said;
  std::array<char, 256> part{};
  for (ssize_t count = 0; (count = ::read(ends[0], part.data(), part.size())) > 0;)
    said.append(part.data(), static_cast<std::size_t>(count));
  ::close(ends[0]);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  CAPTURE(said);
  CHECK(said.find("fftune: fftune_plan_destroy: ") != std::string::npos);
  fftune_plan_destroy(plan);
  fftune_context_destroy(context);
  CHECK(said.find("it was destroyed before") != std::string::npos);
}

#endif
