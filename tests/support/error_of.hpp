// The error of a call that must fail.
#pragma once

#include <string>

#include "core/error.hpp"

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

}  // namespace fftune::test
