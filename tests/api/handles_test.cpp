// Handles that are used or destroyed after they were destroyed: a build with assertions says which.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <string>

#include "fftune/fftune.h"
#include "support/catch.hpp"

#ifndef NDEBUG

namespace {

/// The stderr of a call that ended its process by SIGABRT; otherwise how it ended.
template <typename Call>
std::string last_words(const Call& call) {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(ends[1], STDERR_FILENO);
    ::signal(SIGABRT, SIG_DFL);
    call();
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
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT ? said : "it did not abort: " + said;
}

void check_names(const std::string& said, const std::string& function) {
  CAPTURE(said);
  CHECK(said.starts_with("fftune: " + function + ": "));
  CHECK(said.find("it was destroyed before") != std::string::npos);
}

}  // namespace

TEST_CASE("a call with a destroyed handle is named and ends the process") {
  fftune_context* context = nullptr;
  REQUIRE(fftune_context_create(-1, nullptr, &context) == FFTUNE_OK);
  fftune_plan* plan = nullptr;
  const auto problem = R"({"op":"ffn","m":1,"d":8,"h":8})";
  REQUIRE(fftune_plan_create(context, problem, &plan) == FFTUNE_OK);
  fftune_plan_destroy(plan);
  fftune_context_destroy(context);
  check_names(last_words([&] { fftune_plan_destroy(plan); }), "fftune_plan_destroy");
  check_names(last_words([&] { fftune_plan_run(plan, nullptr, 0, nullptr, nullptr); }),
              "fftune_plan_run");
  check_names(last_words([&] { fftune_plan_workspace_bytes(plan); }),
              "fftune_plan_workspace_bytes");
  check_names(last_words([&] { fftune_context_destroy(context); }), "fftune_context_destroy");
  check_names(last_words([&] { fftune_plan_create(context, problem, &plan); }),
              "fftune_plan_create");
}

#endif
