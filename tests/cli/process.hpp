// Runs a program with its output in files.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include "support/text_file.hpp"

namespace fftune::testing {

struct Finished {
  int code = -1;  // exit status; 128 + signal if one ended it
  std::string out;
  std::string err;
};

class Process {
 public:
  /// Starts words[0] with `environment` alone, in `folder`, where its output goes to files.
  Process(const std::vector<std::string>& words, const std::vector<std::string>& environment,
          std::filesystem::path folder);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void send(int signal) const;
  /// Its output to stderr so far.
  std::string err() const;
  /// Waits until it has written `text` to stderr, or has ended, or that time has passed; whether it
  /// has written it.
  bool says(const std::string& text, std::chrono::seconds most = std::chrono::seconds(60));
  bool running();
  Finished wait();

 private:
  std::filesystem::path folder_;
  pid_t id_ = -1;
  bool ended_ = false;
  int status_ = 0;
};

/// Runs a program on a terminal of so many columns; `out` is all that it printed there.
Finished run_on_terminal(const std::vector<std::string>& words,
                         const std::vector<std::string>& environment,
                         const std::filesystem::path& folder, int columns);

}  // namespace fftune::testing
