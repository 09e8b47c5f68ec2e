// The cases of an op whose problems are drawn at random: one object registers them all.
#pragma once

#include <string>

#include "support/fuzz.hpp"
#include "support/op_reference.hpp"

namespace fftune::test {

/// Problems of each case; a case of none is left out.
struct FuzzCounts {
  int small = 10000;  // on the CPU
  int larger = 60;    // on the CPU
  int gpu = 500;
  int gpu_bits = 20;  // the largest of the GPU's have 2^gpu_bits elements
  bool small_on_gpu = true;
  int spaces = 400;
};

/// Those on a GPU have the tag [gpu], and the few small ones, which the emulator runs, [small] too.
/// Catch2 takes functions without arguments, so what they test is the object's type.
template <const Op& (*op)(), DrawProblem draw, FuzzCounts counts = FuzzCounts{}>
class FuzzCases {
 public:
  /// Cases under the op's name, and one that the catalog has it; or under another name, for a part
  /// of the op's problems. `gpu_tag` is a further tag of the many on a GPU.
  explicit FuzzCases(const std::string& part = "", const std::string& gpu_tag = "",
                     const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : subject_(part.empty() ? std::string(op().name()) : part),
        line_(file, static_cast<std::size_t>(line)) {
    if (part.empty())
      add([] { check_registration(op()); },
          subject_ + " is in the catalog, and every source that its families name is embedded");
    if constexpr (counts.small > 0)
      add([] { verify_small_on_cpu(op(), draw, counts.small); },
          "small random problems of " + subject_ + " are right on the CPU");
    if constexpr (counts.larger > 0)
      add([] { verify_larger_on_cpu(op(), draw, counts.larger); },
          "larger random problems of " + subject_ + " are right on the CPU");
    if constexpr (counts.gpu > 0)
      add([] { verify_on_gpu(op(), draw, counts.gpu, counts.gpu_bits); },
          "random problems of " + subject_ + " are right on the GPU", "[gpu]" + gpu_tag);
    if constexpr (counts.small_on_gpu)
      add([] { verify_small_on_gpu(op(), draw); },
          "a few small problems of " + subject_ + " are right on the GPU", "[gpu][small]");
    if constexpr (counts.spaces > 0)
      add([] { check_cuda_spaces(op(), draw, counts.spaces); },
          "every CUDA family of " + subject_ +
              " has a space with its default in it, and legal launches");
  }

 private:
  void add(void (*test)(), const std::string& name, const std::string& tags = "") const {
    Catch::AutoReg(Catch::makeTestInvoker(test), line_, Catch::StringRef(),
                   Catch::NameAndTags(name, tags));
  }

  std::string subject_;
  Catch::SourceLineInfo line_;
};

}  // namespace fftune::test
