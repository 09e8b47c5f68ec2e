// A test case for each op of the catalog: ctest runs them side by side, and each can be asked for
// by its name.
#pragma once

#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "registry/catalog.hpp"
#include "support/catch.hpp"

namespace fftune::test {

/// One of several cases that share the work on an op, as a run on a device may be limited in time.
struct Part {
  std::size_t index = 0;
  std::size_t count = 1;

  bool has(std::size_t piece) const { return piece % count == index; }
};

inline std::size_t undivided(const Op&) {
  return 1;
}

/// Registers "<name>: <op>" with the tags for each op, or "<name>: <op>, part 1 of 4" for each of
/// parts_of(op) parts. Catch2 takes functions without arguments, so each case has an instance of
/// its own.
template <auto Test, std::size_t (*parts_of)(const Op&) = undivided>
class ForEachOp {
 public:
  ForEachOp(const char* file, std::size_t line, const std::string& name, const std::string& tags) {
    register_all(Catch::SourceLineInfo(file, line), name, tags,
                 std::make_index_sequence<most_ops * most_parts>());
  }

 private:
  static constexpr bool has_parts = std::is_invocable_v<decltype(Test), const Op&, Part>;
  static constexpr std::size_t most_ops = 40, most_parts = has_parts ? 8 : 1;

  template <std::size_t... indices>
  static void register_all(const Catch::SourceLineInfo& line, const std::string& name,
                           const std::string& tags, std::index_sequence<indices...>) {
    const auto& ops = builtin_catalog().ops;
    const std::array functions{&run<indices>...};
    for (std::size_t op = 0; op < ops.size(); ++op) {
      const std::size_t parts = parts_of(*ops[op]);
      if (op >= most_ops || parts > most_parts)
        throw std::length_error("ForEachOp: raise most_ops or most_parts");
      for (std::size_t part = 0; part < parts; ++part) {
        std::string whole = name + ": " + std::string(ops[op]->name());
        if (parts > 1)
          whole += ", part " + std::to_string(part + 1) + " of " + std::to_string(parts);
        Catch::AutoReg(Catch::makeTestInvoker(functions[op * most_parts + part]), line,
                       Catch::StringRef(), Catch::NameAndTags(whole, tags));
      }
    }
  }

  template <std::size_t index>
  static void run() {
    const Op& op = *builtin_catalog().ops.at(index / most_parts);
    if constexpr (has_parts)
      Test(op, Part{index % most_parts, parts_of(op)});
    else
      Test(op);
  }
};

}  // namespace fftune::test

// The tags stand in the same line as the macro: CMake looks for [gpu] there.
#define FFTUNE_TEST_EACH_OP(function, name, tags)                                               \
  static const ::fftune::test::ForEachOp<function> each_op_##function(__FILE__, __LINE__, name, \
                                                                      tags)
#define FFTUNE_TEST_EACH_OP_IN_PARTS(function, parts_of, name, tags)             \
  static const ::fftune::test::ForEachOp<function, parts_of> each_op_##function( \
      __FILE__, __LINE__, name, tags)
