// The error of a call that must fail.
#pragma once

#include <string>

#include "core/error.hpp"
#include "support/catch.hpp"

namespace fftune::test {

/// The message of the Error that the call throws; empty if it throws none.
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

/// Likewise; an Error of another kind fails the test.
template <typename Call>
std::string error_of(ErrorKind kind, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.kind() == kind);
    return error.what();
  }
  return "";
}

}  // namespace fftune::test
