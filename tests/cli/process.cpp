#include "process.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <utility>

namespace fftune::testing {

namespace {

std::vector<char*> pointers(const std::vector<std::string>& words) {
  std::vector<char*> result;
  for (const std::string& word : words) result.push_back(const_cast<char*>(word.c_str()));
  result.push_back(nullptr);
  return result;
}

void redirect(const std::filesystem::path& path, int descriptor) {
  const int file = open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_APPEND, 0600);
  if (file < 0 || dup2(file, descriptor) < 0) _exit(126);
}

}  // namespace

Process::Process(const std::vector<std::string>& words, const std::vector<std::string>& environment,
                 std::filesystem::path folder)
    : folder_(std::move(folder)) {
  const auto arguments = pointers(words);
  const auto variables = pointers(environment);
  // Output of an earlier process must not be taken for this one's.
  std::filesystem::remove(folder_ / "stdout");
  std::filesystem::remove(folder_ / "stderr");
  id_ = fork();
  if (id_ != 0) return;
  redirect(folder_ / "stdout", STDOUT_FILENO);
  redirect(folder_ / "stderr", STDERR_FILENO);
  if (chdir(folder_.c_str()) != 0) _exit(126);
  execve(arguments[0], arguments.data(), variables.data());
  _exit(127);
}

Process::~Process() {
  if (!running()) return;
  send(SIGKILL);
  wait();
}

void Process::send(int signal) const {
  kill(id_, signal);
}

std::string Process::err() const {
  return text_of(folder_ / "stderr");
}

bool Process::says(const std::string& text, std::chrono::seconds most) {
  const auto deadline = std::chrono::steady_clock::now() + most;
  for (;;) {
    const bool goes_on = running() && std::chrono::steady_clock::now() < deadline;
    if (err().find(text) != std::string::npos) return true;
    if (!goes_on) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

bool Process::running() {
  if (!ended_) ended_ = waitpid(id_, &status_, WNOHANG) == id_;
  return !ended_;
}

Finished Process::wait() {
  if (!ended_) waitpid(id_, &status_, 0);
  ended_ = true;
  return {WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_),
          text_of(folder_ / "stdout"), text_of(folder_ / "stderr")};
}

Finished run_on_terminal(const std::vector<std::string>& words,
                         const std::vector<std::string>& environment,
                         const std::filesystem::path& folder, int columns) {
  const auto arguments = pointers(words);
  const auto variables = pointers(environment);
  const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  winsize size{};
  size.ws_row = 40;
  size.ws_col = static_cast<unsigned short>(columns);
  if (terminal < 0 || ::grantpt(terminal) != 0 || ::unlockpt(terminal) != 0 ||
      ::ioctl(terminal, TIOCSWINSZ, &size) != 0)
    throw std::runtime_error("there is no terminal to run on");
  const std::string name = ::ptsname(terminal);
  const int held = ::open(name.c_str(), O_RDWR | O_NOCTTY | O_CLOEXEC);
  const pid_t id = ::fork();
  if (id == 0) {
    for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
      if (::dup2(held, descriptor) < 0) ::_exit(126);
    if (::chdir(folder.c_str()) != 0) ::_exit(126);
    ::execve(arguments[0], arguments.data(), variables.data());
    ::_exit(127);
  }
  ::close(held);
  Finished done;
  char bytes[4096];
  // Once the last process has closed it, reading is an error.
  for (ssize_t count; (count = ::read(terminal, bytes, sizeof bytes)) > 0;)
    done.out.append(bytes, static_cast<std::size_t>(count));
  ::close(terminal);
  int status = 0;
  ::waitpid(id, &status, 0);
  done.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return done;
}

}  // namespace fftune::testing
