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

void on_signal(int) {
  if (interrupt_requested.exchange(true)) _exit(exit_interrupted);
  // A reference may take minutes, which nobody would wait for without a word.
  constexpr std::string_view word =
      "\ninterrupted: ending as soon as what runs is done; a second time ends at once\n";
  if (::write(STDERR_FILENO, word.data(), word.size()) < 0) return;
}

void handle(void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  // Restarting keeps a write of the presets whole.
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

}  // namespace

Interrupt::Interrupt() {
  interrupt_requested = false;
  handle(on_signal);
}

Interrupt::~Interrupt() {
  handle(SIG_DFL);
}

const std::atomic<bool>& Interrupt::requested() const {
  return interrupt_requested;
}

}  // namespace fftune::tool
