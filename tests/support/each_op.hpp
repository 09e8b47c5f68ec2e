// A test case for each op of the catalog: ctest runs them side by side, and each can be asked for
// by its name.
#pragma once

#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

#include "registry/catalog.hpp"
#include "support/catch.hpp"

namespace fftune::test {

using OpTest = void (*)(const Op&);

/// Registers "<name>: <op>" with the tags for each op. Catch2 takes functions without arguments, so
/// every op has an instance of its own.
template <OpTest Test>
class ForEachOp {
 public:
  ForEachOp(const char* file, std::size_t line, const std::string& name, const std::string& tags) {
    if (builtin_catalog().ops.size() > most_ops)
      throw std::length_error("ForEachOp: raise most_ops");
    register_all(Catch::SourceLineInfo(file, line), name, tags,
                 std::make_index_sequence<most_ops>());
  }

 private:
  static constexpr std::size_t most_ops = 32;

  template <std::size_t... indices>
  static void register_all(const Catch::SourceLineInfo& line, const std::string& name,
                           const std::string& tags, std::index_sequence<indices...>) {
    const auto& ops = builtin_catalog().ops;
    const std::array functions{&run<indices>...};
    for (std::size_t i = 0; i < ops.size(); ++i) {
      const std::string whole = name + ": " + std::string(ops[i]->name());
      Catch::AutoReg(Catch::makeTestInvoker(functions[i]), line, Catch::StringRef(),
                     Catch::NameAndTags(whole, tags));
    }
  }

  template <std::size_t index>
  static void run() {
    Test(*builtin_catalog().ops.at(index));
  }
};

}  // namespace fftune::test

// The tags stand in the same line as the macro: CMake looks for [gpu] there.
#define FFTUNE_TEST_EACH_OP(function, name, tags)                                               \
  static const ::fftune::test::ForEachOp<function> each_op_##function(__FILE__, __LINE__, name, \
                                                                      tags)
