// Errors: one exception type, whose kind decides the exit code and the C status.
#pragma once

#include <stdexcept>
#include <string>

namespace fftune {

enum class ErrorKind {
  invalid_input,  // the caller's words are wrong: an option, a problem, a file
  unavailable,    // the machine lacks something: a driver, a library, memory, a device
  device_fault,   // the device reported a failure; its context may be lost
  io,             // a file could not be read or written
  internal,       // a broken promise of our own
};

/// Thrown when the input is wrong or the environment is broken; a failed candidate is an outcome
/// instead. The message is one line: what was wrong, where, and what to do.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace fftune
