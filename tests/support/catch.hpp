// Catch2 2 and 3 under one name.
#pragma once

#if __has_include(<catch2/catch_test_macros.hpp>)
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_adapters.hpp>
#include <catch2/generators/catch_generators_random.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

using Catch::Approx;  // where Catch2 2 has it
using Catch::Generators::table;
using Catch::Matchers::ContainsSubstring;
#else
#include <catch2/catch.hpp>

inline auto ContainsSubstring(const std::string& text) {
  return Catch::Contains(text);
}
#endif

// Leaves the test case with a reason in the log. Catch2 2 has no notion of skipping.
#ifdef SKIP
#define FFTUNE_SKIP(reason) SKIP(reason)
#else
#define FFTUNE_SKIP(reason)        \
  do {                             \
    WARN("skipped: " << (reason)); \
    return;                        \
  } while (false)
#endif
