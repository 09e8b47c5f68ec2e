#include "apps/fftune/terminal/interrupt.hpp"

#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <ctime>
#include <string_view>

#include "apps/fftune/terminal/exit_code.hpp"

namespace fftune::tool {

namespace {

// A signal handler is given no context, so this one flag has to be global.
std::atomic<bool> interrupt_requested{false};
static_assert(std::atomic<bool>::is_always_lock_free, "needed in a signal handler");

/// When the first signal came; 0 before. It decides which of two signals is the first, as threads
/// may take them at once.
std::atomic<std::int64_t> interrupted_at{0};
static_assert(std::atomic<std::int64_t>::is_always_lock_free, "needed in a signal handler");

/// timeout(1) sends SIGTERM to a process and to its group, and of a terminal that is closed both
/// the shell and the kernel tell by SIGHUP: what comes within this time is one request.
constexpr std::int64_t one_request_ms = 1000;

std::int64_t now_ms() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
}

void on_signal(int signal) {
  const std::int64_t now = now_ms();
  std::int64_t first = 0;
  if (!interrupted_at.compare_exchange_strong(first, now)) {
    if (signal == SIGINT || now - first > one_request_ms) _exit(exit_interrupted);
    return;
  }
  interrupt_requested = true;
  // A reference may take minutes, which nobody would wait for without a word.
  constexpr std::string_view word =
      "\ninterrupted: ending as soon as what runs is done; a second Ctrl-C or signal ends at "
      "once\n";
  if (::write(STDERR_FILENO, word.data(), word.size()) < 0) return;
}

void handle(int signal, void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  // Restarting keeps a write of the presets whole.
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(signal, &action, nullptr);
}

bool is_ignored(int signal) {
  struct sigaction now {};
  return sigaction(signal, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
}

}  // namespace

Interrupt::Interrupt() : hangups_count_(!is_ignored(SIGHUP)) {
  interrupt_requested = false;
  interrupted_at = 0;
  handle(SIGINT, on_signal);
  handle(SIGTERM, on_signal);
  // A terminal that is closed; nohup has this ignored.
  if (hangups_count_) handle(SIGHUP, on_signal);
  // Nobody may read the progress any more: the results are worth more than that. Standard
  // output tells by its errors.
  handle(SIGPIPE, SIG_IGN);
}

Interrupt::~Interrupt() {
  handle(SIGINT, SIG_DFL);
  handle(SIGTERM, SIG_DFL);
  if (hangups_count_) handle(SIGHUP, SIG_DFL);
  handle(SIGPIPE, SIG_DFL);
}

const std::atomic<bool>& Interrupt::requested() const {
  return interrupt_requested;
}

}  // namespace fftune::tool
