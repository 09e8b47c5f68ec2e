#include "tuning/worker/process.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <string_view>
#include <thread>

#include "core/error.hpp"

namespace fftune {
namespace {

/// A worker that is told to end lets go of its device, which takes a driver a moment.
constexpr double parting_seconds = 5;
/// The process whose end closed the channel is collected this much later at most.
constexpr double collecting_seconds = 2;
/// A worker's output is cut once it is this long: only its last line is of interest.
constexpr off_t most_printed_bytes = 1 << 20;

[[noreturn]] void fail(const char* what) {
  throw Error(ErrorKind::unavailable,
              fmt::format("a worker process could not be started: {}: {}; {}--in-process does "
                          "without one",
                          what, std::strerror(errno),
                          errno == EMFILE   ? "raise the limit of files (ulimit -n); "
                          : errno == EAGAIN ? "raise the limit of processes (ulimit -u); "
                                            : ""));
}

int print_file() {
  const int file = ::memfd_create("fftune worker", MFD_CLOEXEC);
  // To the end even after it was cut.
  if (file < 0 || ::fcntl(file, F_SETFL, O_APPEND) != 0) fail("the file it prints to");
  return file;
}

struct Descriptors {
  int channel;
  int in_flight;
  int printed;
  int references;
};

/// Between fork and exec: only what is safe in a signal handler, and nothing that returns.
[[noreturn]] void become(char* const* arguments, Descriptors own, pid_t parent) {
  // Out of the way of the numbers that they are to have.
  const int channel = ::fcntl(own.channel, F_DUPFD, 10);
  const int in_flight = ::fcntl(own.in_flight, F_DUPFD, 10);
  const int printed = ::fcntl(own.printed, F_DUPFD, 10);
  const int references = ::fcntl(own.references, F_DUPFD, 10);
  const int nothing = ::open("/dev/null", O_RDONLY);
  const bool placed = ::dup2(nothing, STDIN_FILENO) >= 0 && ::dup2(printed, STDOUT_FILENO) >= 0 &&
                      ::dup2(printed, STDERR_FILENO) >= 0 &&
                      ::dup2(channel, worker_channel_descriptor) >= 0 &&
                      ::dup2(in_flight, worker_in_flight_descriptor) >= 0 &&
                      ::dup2(references, worker_reference_descriptor) >= 0;
  // A journal that stays open here could be written by a worker that has lost its mind.
  ::syscall(SYS_close_range, worker_reference_descriptor + 1, ~0U, 0U);
  // Ctrl-C and a hangup go to every process of a terminal: the supervisor alone decides what they
  // mean.
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) ::signal(signal, SIG_IGN);
  // Nobody is left behind by a supervisor that is killed, not even in a kernel without end.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (placed && ::getppid() == parent) ::execv(arguments[0], arguments);
  // The supervisor shows the last line.
  const std::string_view why =
      placed ? "it could not be started: is /proc mounted, and is there memory enough?\n"
             : "it could not be started: are there file descriptors enough (ulimit -n)?\n";
  const int log = placed ? STDERR_FILENO : own.printed;
  if (::write(log, why.data(), why.size()) < 0) ::_exit(126);
  ::_exit(127);
}

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

}  // namespace

WorkerProcess::WorkerProcess(const std::vector<std::string>& command, int references)
    : printed_(print_file()) {
  std::array<int, 2> ends;
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) fail("its channel");
  channel_.emplace(ends[0]);
  std::vector<char*> arguments;
  for (const auto& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const pid_t parent = ::getpid();
  id_ = ::fork();
  if (id_ == 0)
    become(arguments.data(), {ends[1], in_flight_.descriptor(), printed_, references}, parent);
  ::close(ends[1]);
  if (id_ < 0) fail("fork");
}

WorkerProcess::~WorkerProcess() {
  channel_.reset();
  if (!ended_ && !wait(parting_seconds)) end();
  ::close(printed_);
}

bool WorkerProcess::send(const std::string& line) {
  if (::lseek(printed_, 0, SEEK_END) > most_printed_bytes && ::ftruncate(printed_, 0) != 0)
    return false;
  return channel_->send(line);
}

bool WorkerProcess::wait(double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  for (auto pause = std::chrono::microseconds(100); !ended_;
       pause = std::min(pause * 2, std::chrono::microseconds(10000))) {
    ended_ = ::waitpid(id_, &status_, WNOHANG) == id_;
    if (ended_ || Clock::now() >= until) break;
    std::this_thread::sleep_for(pause);
  }
  return ended_;
}

std::string WorkerProcess::end() {
  // One that ended by itself has its own status to tell.
  if (wait(closed() ? collecting_seconds : 0)) {
    was_killed_ = WIFSIGNALED(status_) && WTERMSIG(status_) == SIGKILL;
  } else {
    ::kill(id_, SIGKILL);
    // A process in the middle of a system call of a sick driver may take its time to die.
    wait(60);
  }
  std::string how = "could not be killed";
  if (ended_ && WIFEXITED(status_))
    how = fmt::format("exited with code {}", WEXITSTATUS(status_));
  else if (ended_ && WIFSIGNALED(status_))
    how = fmt::format("killed by {} ({})", signal_name(WTERMSIG(status_)),
                      ::sigdescr_np(WTERMSIG(status_)));
  const auto words = last_words();
  return words.empty() ? how : how + ": " + words;
}

std::string WorkerProcess::last_words() const {
  std::array<char, 2048> bytes;
  const auto size = ::lseek(printed_, 0, SEEK_END);
  const auto from = std::max<off_t>(0, size - static_cast<off_t>(bytes.size()));
  const auto count = ::pread(printed_, bytes.data(), bytes.size(), from);
  std::string text(bytes.data(), static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text.substr(text.rfind('\n') + 1);
}

}  // namespace fftune
