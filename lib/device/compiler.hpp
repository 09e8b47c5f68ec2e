// A compiler: builds a program's kernels for an architecture where no such device need be.
#pragma once

#include <string>
#include <vector>

#include "device/backend.hpp"
#include "device/program.hpp"

namespace fftune {

class Compiler {
 public:
  virtual ~Compiler() = default;
  /// Compiles every kernel of `program`, or takes it from the cache, and checks its launches
  /// against the architecture's limits. A failure is a result. Any thread may call it.
  virtual CompileReport compile(const Program& program) = 0;
  /// Warnings for the user, one line each: "kernels are not cached: ...".
  virtual std::vector<std::string> warnings() const = 0;
};

}  // namespace fftune
