#include "apps/fftune/interrupt.hpp"

#include <unistd.h>

#include <csignal>
#include <string_view>

#include "apps/fftune/exit_code.hpp"

namespace fftune::tool {

namespace {

// A signal handler is given no context, so this one flag has to be global.
std::atomic<bool> interrupt_requested{false};
static_assert(std::atomic<bool>::is_always_lock_free, "needed in a signal handler");

void on_signal(int signal) {
  if (interrupt_requested.exchange(true)) {
    // Only a person asks twice: timeout(1) sends SIGTERM to a process and to its group, and of a
    // terminal that is closed both the shell and the kernel tell by SIGHUP.
    if (signal == SIGINT) _exit(exit_interrupted);
    return;
  }
  // A reference may take minutes, which nobody would wait for without a word.
  constexpr std::string_view word =
      "\ninterrupted: ending as soon as what runs is done; Ctrl-C ends at once from now on\n";
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
